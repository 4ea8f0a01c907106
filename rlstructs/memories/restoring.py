"""Checks that a file fits a memory, and restores the memory from the file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlstructs.checks import clean_text
from rlstructs.errors import FileError
from rlstructs.memories.tensors import Tensors
from rlstructs.replay.claims import Claims, check_counters, check_episodes, dtype_called, generator_in, row_shape, whole
from rlstructs.replay.columns import SLOT, Columns, Spec
from rlstructs.replay.priorities import DRAWN, LEAVES, SYNCED
from rlstructs.replay.roles import ENDS

if TYPE_CHECKING:
    from rlstructs.memories.memory import Memory

KIND = "Memory"
# Arrays in a file that are not tensors.
RING, EPISODES = "__ring__", "__episodes__"
BOOKKEEPING = {RING: np.int64, EPISODES: np.int32, SYNCED: np.int64, DRAWN: np.int64, LEAVES: np.float64}


def plan_restore(
    memory: Memory, path: Path, state: Any, more: Mapping[str, np.ndarray]
) -> tuple[dict[str, Spec], Callable[[], None]]:
    """Checks a file; returns the specs of its tensors and a function that restores everything else.

    Raises:
        FileError, ValueError, KeyError, TypeError: the file does not fit the memory.
    """
    tensors, sizes = memory._tensors, tuple(whole(name, state[name], 1) for name in ("memory_size", "num_envs"))
    if sizes != tensors.lead:
        raise FileError(
            f"{path}: holds memory_size {sizes[0]} and num_envs {sizes[1]}, "
            f"this memory has {memory.memory_size} and {memory.num_envs}"
        )
    check_complete(tensors, path, state["tensors"])
    specs = {}
    for name, (dtype, shape) in state["tensors"].items():
        specs[name] = new = tensors.new_spec(dtype_of(tensors, name, dtype), row_shape(name, shape))
        if name in tensors.dtypes and (own := tensors.spec(name)) != new:
            ours = f"in this memory {own.dtype} {own.shape}"
            raise FileError(f"{path}: tensor {name!r} is {new.dtype} {new.shape}, {ours}")
    claims = Claims(check_counters(more[RING], memory.num_envs, memory.memory_size), SLOT, specs)
    episodes = _check_episodes(memory, more, claims)
    generator = generator_in(state["rng"])
    restore_more = memory._plan_more(more, state, claims)

    def restore() -> None:
        tensors.storage.restore(claims.ring.counters, episodes)  # none if it is from before episodes were tracked
        memory._rng = generator
        restore_more()

    return specs, restore


def check_complete(tensors: Tensors, path: Path, found: Iterable[str]) -> None:
    """Raises FileError if a file lacks a tensor that there is."""
    if missing := sorted(set(tensors.dtypes) - set(found)):
        raise FileError(clean_text(f"{path}: has no tensor(s) {missing}, it has {sorted(found)}"))


def _check_episodes(memory: Memory, more: Mapping[str, np.ndarray], claims: Claims) -> np.ndarray | None:
    if EPISODES not in more:
        if ends := [name for name in claims.specs if name in ENDS]:
            raise ValueError(f"it has no episodes, but a tensor {ends[0]!r}")
        return None
    episodes = more[EPISODES]
    if episodes.dtype != np.int32 or episodes.shape != (claims.n_rows, 2):
        raise ValueError(f"its episodes are {episodes.dtype} {episodes.shape}, needed is int32 {(claims.n_rows, 2)}")
    episodes = episodes.reshape(memory.memory_size, memory.num_envs, 2).swapaxes(0, 1)
    check_episodes(episodes, claims.ring)
    return episodes


def dtype_of(tensors: Tensors, name: str, dtype: Any) -> Any:
    """The library's dtype for a tensor in a file, by the name of its dtype there."""
    return tensors.dtype(name, dtype if dtype == "bfloat16" else dtype_called(name, dtype).name, by_name=True)


def begin(memory: Memory, path: Path, specs: Mapping[str, Spec]) -> Columns:
    """Creates the tensors that a memory lacks, drops its rows, and returns its columns, to be filled.

    Raises:
        SpecError, OutOfMemoryError: a tensor cannot be created; nothing changes.
    """
    tensors = memory._tensors
    missing = {name: spec for name, spec in specs.items() if name not in tensors.dtypes}
    tensors.check_room(str(path), missing.values())
    for name, spec in missing.items():
        tensors.plan(name, dtype_of(tensors, name, "bfloat16" if spec.is_bfloat16 else spec.dtype.name), spec.shape)
    memory.reset()
    return tensors.store().columns
