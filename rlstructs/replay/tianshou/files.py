"""Makes buffers of files and of arrays."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rlstructs.checks import clean_text
from rlstructs.errors import FileError, SpecError
from rlstructs.replay.intake.arrays import flat_items, host_array
from rlstructs.replay.keep import saving
from rlstructs.replay.tianshou import transitions
from rlstructs.replay.tianshou.transitions import DONE, FLAGS

if TYPE_CHECKING:
    from rlstructs.replay.tianshou.replay_buffer import ReplayBuffer

HDF5 = ".h5"
B = TypeVar("B", bound="ReplayBuffer")


def load(kind: type[B], path: str | Path, given: Mapping[str, Any]) -> B:
    """Makes a buffer of a file.

    Args:
        kind: its class.
        path: of the file.
        given: arguments of the constructor that are in no file.

    Raises:
        FileNotFoundError, FileError: as of `ReplayBuffer.load_hdf5`.
    """

    def make(own: Mapping[str, Any]) -> B:
        try:
            return kind._of_settings(own.get("settings"), given)
        except (ImportError, MemoryError):
            raise
        except Exception as error:  # whatever they are
            raise FileError(f"{path}: its settings do not make a {kind.__name__}: {clean_text(error)}") from error

    return saving.load_new(kind.__name__, make, Path(path), HDF5)


def from_arrays(kind: type[B], given: Mapping[str, Any], done: Any, settings: Mapping[str, Any]) -> B:
    """Makes a full buffer; see `ReplayBuffer.from_data`. A key of `given` that is None is left out."""
    arrays = {
        name: value if isinstance(value, torch.Tensor) else host_array(name, value)
        for name, value in flat_items({key: value for key, value in given.items() if value is not None}, "").items()
    }
    transitions.check_required(arrays)
    n = len(transitions.as_column(FLAGS[0], arrays[FLAGS[0]], 1))
    buffer = kind(n, **settings)
    rows = buffer._intake.as_transitions(arrays, "from_data", 1)
    if wrong := [name for name, values in rows.items() if len(values) != n]:
        raise SpecError(f"{wrong[0]!r} has {len(rows[wrong[0]])} rows, 'terminated' has {n}")
    if done is not None:
        ends = transitions.as_flags(DONE, host_array(DONE, done))
        if ends.shape != (n,):
            raise SpecError(f"'done' has shape {ends.shape}, expected ({n},)")
        rows[FLAGS[1]] = rows[FLAGS[1]] | (ends & ~rows[FLAGS[0]])
    if n:
        buffer._intake.fill(rows)
    return buffer


def construct(kind: type[B], arguments: Mapping[str, Any]) -> B:
    """Makes a buffer; for a user's class whose constructor takes other arguments, by the constructor of ours."""
    buffer, known = kind.__new__(kind), kind
    try:
        inspect.signature(kind).bind(**arguments)
    except TypeError:
        known = next(each for each in kind.__mro__ if each.__module__.startswith("rlstructs."))
    known.__init__(buffer, **arguments)
    return buffer
