"""Checks that a file fits a memory, and restores the memory from the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlstructs.checks import clean_text
from rlstructs.errors import FileError
from rlstructs.memories.names import check_name
from rlstructs.memories.tensors import spec_of
from rlstructs.replay.claims import Claims, check_counters, check_episodes, dtype_called, generator_in, row_shape, whole
from rlstructs.replay.columns import SLOT, Spec
from rlstructs.replay.priorities import DRAWN_ROWS, FOLLOWED_STEPS, TREE_LEAVES
from rlstructs.replay.roles import ENDS

if TYPE_CHECKING:
    from rlstructs.memories.memory import Memory

KIND = "Memory"
# Arrays in a file that are not tensors.
RING, EPISODES = "__ring__", "__episodes__"
BOOKKEEPING = (RING, EPISODES, FOLLOWED_STEPS, DRAWN_ROWS, TREE_LEAVES)


def plan_restore(
    memory: Memory, path: Path, state: Any, more: Mapping[str, np.ndarray]
) -> tuple[dict[str, Spec], Callable[[], None]]:
    """Checks a file; returns the specs of its tensors and a function that restores everything else.

    Raises:
        FileError, ValueError, KeyError, TypeError: the file does not fit the memory.
    """
    sizes = tuple(whole(name, state[name], 1) for name in ("memory_size", "num_envs"))
    if sizes != (memory.memory_size, memory.num_envs):
        raise FileError(
            f"{path}: holds memory_size {sizes[0]} and num_envs {sizes[1]}, "
            f"this memory has {memory.memory_size} and {memory.num_envs}"
        )
    if missing := sorted(set(memory._dtypes) - set(state["tensors"])):
        raise FileError(clean_text(f"{path}: has no tensor(s) {missing}, it has {sorted(state['tensors'])}"))
    specs = {name: _spec(memory, name, *each) for name, each in state["tensors"].items()}
    for name, theirs in specs.items():
        if name in memory._dtypes and (spec := memory._spec(name)) != theirs:
            raise FileError(
                f"{path}: tensor {name!r} is {theirs.dtype} {theirs.shape}, in this memory {spec.dtype} {spec.shape}"
            )
    claims = Claims(check_counters(more[RING], memory.num_envs, memory.memory_size), SLOT, specs)
    episodes = _check_episodes(memory, more, claims)
    generator = generator_in(state["rng"])
    restore_more = memory._plan_more(more, state, claims)

    def restore() -> None:
        memory._store().restore(claims.ring.counters, episodes)  # none if it is from before episodes were tracked
        memory._rng = generator
        restore_more()

    return specs, restore


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


def _spec(memory: Memory, name: str, dtype: Any, shape: Any) -> Spec:
    return spec_of(memory.framework, dtype_of(memory, name, dtype), row_shape(name, shape))


def dtype_of(memory: Memory, name: str, dtype: Any) -> Any:
    """The library's dtype for the name of a dtype in a file."""
    return memory.framework.dtype_from_name(dtype if dtype == "bfloat16" else dtype_called(name, dtype).name)


def make_missing(memory: Memory, path: Path, state: Mapping[str, Any], specs: Mapping[str, Spec]) -> None:
    """Creates the tensors of a file that a memory lacks, after checking that all of them fit."""
    missing = [name for name in specs if name not in memory._dtypes]
    for name in missing:
        check_name(name)
    memory._check_room(str(path), [specs[name] for name in missing])
    for name in missing:
        memory._plan_tensor(name, dtype_of(memory, name, state["tensors"][name][0]), specs[name].shape)
