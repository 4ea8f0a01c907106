"""Checks that a file fits a memory, and restores the memory from the file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlstructs.checks import clean_text
from rlstructs.errors import FileError
from rlstructs.files.archives import Reader
from rlstructs.memories.tensors import Tensors
from rlstructs.replay.claims import (
    Claims,
    check_counters,
    check_episodes,
    dtype_called,
    following_in,
    generator_in,
    row_shape,
    whole,
)
from rlstructs.replay.columns import Columns, Spec
from rlstructs.replay.priorities import DRAWN_ROWS, FOLLOWED_STEPS, TREE_LEAVES
from rlstructs.replay.roles import ENDS
from rlstructs.replay.row_ids import SLOT

if TYPE_CHECKING:
    from rlstructs.memories.memory import Memory

KIND = "Memory"
# Arrays in a file that are not tensors.
RING, EPISODES = "__ring__", "__episodes__"
BOOKKEEPING = {
    RING: np.int64, EPISODES: np.int32, FOLLOWED_STEPS: np.int64, DRAWN_ROWS: np.int64, TREE_LEAVES: np.float64,
}  # fmt: skip


def plan_restore(
    memory: Memory, path: Path, state: Any, more: Mapping[str, np.ndarray]
) -> tuple[dict[str, Spec], Callable[[], None]]:
    """Checks a file; returns the specs of its tensors and a function that restores the rest.

    Raises:
        FileError, ValueError, KeyError, TypeError: the file does not fit the memory.
    """
    tensors, sizes = memory._tensors, tuple(whole(name, state[name], 1) for name in ("memory_size", "num_envs"))
    if sizes != tensors.lead:
        held = "memory_size {} and num_envs {}, this memory has {} and {}".format(*sizes, *tensors.lead)
        raise FileError(f"{path}: holds {held}")
    specs = check_tensors(tensors, path, state["tensors"])
    claims = Claims(check_counters(more[RING], memory.num_envs, memory.memory_size), SLOT, specs)
    episodes = _check_episodes(memory, more, claims)
    generator, following = generator_in(state["rng"]), following_in(state, memory.num_envs)
    restore_more = memory._plan_more(more, state, claims)

    def restore() -> None:
        tensors.storage.restore(claims.ring.counters, episodes, following)  # old files have no episodes
        memory._rng = generator
        restore_more()

    return specs, restore


def check_complete(tensors: Tensors, path: Path, found: Iterable[str]) -> None:
    """Raises FileError if a file lacks a tensor that there is."""
    if missing := sorted(set(tensors.dtypes) - set(found)):
        raise FileError(clean_text(f"{path}: has no tensor(s) {missing}, it has {sorted(found)}"))


def check_tensors(tensors: Tensors, path: Path, found: Mapping[str, Any]) -> dict[str, Spec]:
    """Returns the specs of the tensors in a file.

    Args:
        tensors: the tensors that there are.
        path: the file.
        found: name -> name of the dtype, and shape of a row.

    Raises:
        FileError, ValueError, TypeError: a tensor is missing or does not fit.
    """
    check_complete(tensors, path, found)
    specs = {}
    for name, (dtype, shape) in found.items():
        specs[name] = new = tensors.make_spec(find_dtype(tensors, name, dtype), row_shape(name, shape))
        own = tensors.spec_of(name) if name in tensors.dtypes else new
        if own != new:
            ours = f"in this memory {own.dtype} {own.shape}"
            raise FileError(f"{path}: tensor {name!r} is {new.dtype} {new.shape}, {ours}")
    if not tensors.storage.is_private and (more := sorted(set(specs) - set(tensors.dtypes))):
        held = f"has tensor(s) {more}, this memory, which processes share, has {sorted(tensors.dtypes)}"
        raise FileError(clean_text(f"{path}: {held}: load it into a new memory, and share or feed that"))
    return specs


def _check_episodes(memory: Memory, more: Mapping[str, np.ndarray], claims: Claims) -> np.ndarray | None:
    """Returns the episodes of a file, int32 (num_envs, memory_size, 2); None if it has none.

    Raises:
        ValueError: they are missing, or make no sense.
    """
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


def find_dtype(tensors: Tensors, name: str, dtype: Any) -> Any:
    """The library's dtype for a tensor in a file, by the name of its dtype there."""
    return tensors.convert_dtype(name, dtype if dtype == "bfloat16" else dtype_called(name, dtype).name, by_name=True)


def _prepare_columns(memory: Memory, path: Path, specs: Mapping[str, Spec]) -> Columns:
    """Creates missing tensors, drops all rows, and returns the columns, which are then filled.

    Raises:
        SpecError, OutOfMemoryError: a tensor cannot be created; nothing changes.
    """
    tensors = memory._tensors
    missing = {name: spec for name, spec in specs.items() if name not in tensors.dtypes}
    tensors.check_room(str(path), missing.values())
    for name, spec in missing.items():
        tensors.plan(name, find_dtype(tensors, name, "bfloat16" if spec.is_bfloat16 else spec.dtype.name), spec.shape)
    try:
        columns = tensors.allocate().columns
    except BaseException:
        tensors.forget(missing)
        raise
    memory.reset()
    return columns


def check_shapes(memory: Memory, specs: Mapping[str, Spec], reader: Reader) -> None:
    """Raises ValueError if a tensor in a file has another dtype or shape than it should have."""
    for name, spec in specs.items():
        found, needed = reader.spec_of(name), (spec.dtype, (*memory._tensors.lead, *spec.shape))
        if found != needed:
            raise ValueError(f"tensor {name!r} is {found[0]} {found[1]}, needed is {needed[0]} {needed[1]}")


def read_tensors(memory: Memory, path: Path, specs: Mapping[str, Spec], reader: Reader) -> None:
    """Drops all rows, and reads tensors from a file, whose shapes `check_shapes` has checked."""
    columns = _prepare_columns(memory, path, specs)
    for name in specs:
        columns.read_into(name, partial(reader.read_into, name))


def write_rows(memory: Memory, path: Path, specs: Mapping[str, Spec], rows: np.ndarray, found: Any) -> None:
    """Drops all rows and writes those of a file; the others become unwritten.

    Args:
        memory: the memory.
        path: the file.
        specs: name -> spec of each tensor.
        rows: int64 (n,), flat indexes.
        found: name -> `(n, *shape)`; may be empty without rows.
    """
    columns = _prepare_columns(memory, path, specs)
    for name, spec in specs.items():
        columns.put_rows(name, slice(None), columns.value(name, spec.unwritten))
        if rows.size:
            columns.put_rows(name, rows, columns.converted(name, found[name], spec))
