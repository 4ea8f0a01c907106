"""Keeps a `DictTensorReplayBuffer` in dicts and folders.

It also makes the header of files: everything beside the rows.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlstructs.checks import DTYPES, MOST_AXES, clean_text
from rlstructs.errors import FileError
from rlstructs.replay.keep import saving
from rlstructs.replay.keep.checks import Claims, check_aligned, flag, whole
from rlstructs.replay.torchrl.assembly import Assembly
from rlstructs.replay.torchrl.rows_in import RowIntake
from rlstructs.replay.torchrl.samplers import Arrays, State

if TYPE_CHECKING:
    from rlstructs.replay.buffer import Buffer

VERSION = 1
FILE = "buffer.npz"
NAME = "load_state_dict"
# Entries of the states and name of the file that torchrl's own buffers write.
THEIR_ENTRIES, THEIR_FILE = ("_storage", "_writer"), "buffer_metadata.json"


def state_dict(buffer: Buffer) -> dict[str, Any]:
    """Copies the contents of a file of this buffer.

    `torch.load` takes them with `weights_only=True`.
    """
    with buffer._hold_locks():
        arrays, _, state = saving.contents(buffer)
        tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
        state = json.loads(json.dumps(state))
        return {"class": type(buffer).__name__, "version": VERSION, "state": state, "arrays": tensors}


def load_state_dict(buffer: Buffer, given: Mapping[str, Any]) -> None:
    """Restores a buffer from a result of `state_dict`.

    Raises:
        FileError: it does not fit; nothing changes.
    """
    if isinstance(given, Mapping) and all(entry in given for entry in THEIR_ENTRIES):
        raise _their_error(NAME, "state")
    try:
        if given["version"] != VERSION:
            raise ValueError(f"version {given['version']!r}, this program reads version {VERSION}")
        restore = saving.restorer(buffer, NAME, TensorReader(given["arrays"]), given)
    except FileError:
        raise
    except Exception as error:  # the state may hold anything
        raise FileError(f"{NAME}: not the state of a buffer, or a damaged one: {clean_text(error)}") from error
    restore()


class TensorReader:
    """Reads arrays from tensors, with the interface of a file's `Reader`.

    Args:
        tensors: by name.
    """

    text = ""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
        for name, array in self._arrays.items():
            if type(name) is not str or array.dtype.name not in DTYPES:
                raise ValueError(f"{name!r} is not a tensor that a buffer has")
            if array.dtype == np.bool_ and np.ascontiguousarray(array).view(np.uint8).max(initial=0) > 1:
                raise ValueError(f"{name!r} holds bools that are neither true nor false")

    def spec_of(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """Returns the dtype and the shape of an array."""
        return self._arrays[name].dtype, self._arrays[name].shape

    def verify(self) -> None:
        """Does nothing: tensors have no checksums."""

    def read_into(self, name: str, array: np.ndarray, first: int = 0) -> None:
        """Copies numbers of an array."""
        array[...] = self._arrays[name].reshape(-1)[first : first + array.size].reshape(array.shape)

    def read_slots(self, name: str, array: np.ndarray, start: int) -> None:
        """Copies slots of every lane of an array."""
        array[...] = self._arrays[name][:, start : start + array.shape[1]]


def dump(buffer: Buffer, folder: Path) -> None:
    """Writes a buffer to a folder, which is created if it does not exist."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        saving.save(buffer, folder / FILE)
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):  # somebody else has put something into it
                folder.rmdir()
        raise


def find_file(folder: str | Path) -> Path:
    """Finds the file of `dump` in a folder.

    Raises:
        FileError: torchrl wrote the folder.
    """
    path = Path(folder) / FILE
    if not path.exists() and (Path(folder) / THEIR_FILE).exists():
        raise _their_error(str(folder), "folder")
    return path


def _their_error(source: str, what: str) -> FileError:
    """Makes the error for a state or folder of torchrl itself."""
    advice = "load it into a buffer of torchrl, and give that one's rows, `[:]`, to `extend`"
    return FileError(f"{source}: this is a {what} of torchrl's own, which only torchrl reads; {advice}")


def own_state(parts: Assembly, rows: RowIntake) -> dict[str, Any]:
    """Returns the settings and counters for a file's header, as JSON."""
    return {
        "max_size": parts.storage.max_size,
        "n_rows": parts.store.columns.n_rows,
        "n_written": rows.n_written,
        "knows_episodes": parts.marks.are_known,
        "axes": parts.axes,
        "sampler": {"class": type(parts.sampler).__name__, **parts.sampler.state()},
    }


def own_restorer(parts: Assembly, rows: RowIntake, state: State, arrays: Arrays, claims: Claims) -> Callable[[], None]:
    """Checks a result of `own_state`; returns a function that restores it.

    Raises:
        ValueError, KeyError, TypeError: it does not fit.
    """
    own, found = (parts.storage.max_size, type(parts.sampler).__name__), state["sampler"]
    if own != (state["max_size"], found["class"]):
        raise ValueError(f"it has room for {state['max_size']} rows and a {found['class']}, expected {own}")
    check_aligned(claims.ring)
    whole("n_rows", state["n_rows"], claims.n_rows, claims.n_rows)
    n_written, knows = whole("n_written", state["n_written"]), flag("knows_episodes", state["knows_episodes"])
    axes = _check_axes(state.get("axes"), claims)
    restore_sampler = parts.sampler.restorer(found, arrays, claims)

    def restore() -> None:
        parts.store.alignment = parts.storage.alignment
        restore_sampler()
        parts.writer.changed()
        rows.n_written, parts.marks.are_known, parts.axes = n_written, knows, axes
        parts.note_change()

    return restore


def _check_axes(axes: Any, claims: Claims) -> dict[str, int] | None:
    """Checks the axes in a file; see `tensordicts`.

    Raises ValueError if the columns do not have so many.
    """
    if axes is None:
        return None
    if not isinstance(axes, Mapping) or "" not in axes:
        raise ValueError("its axes are not those of a batch")
    most = max((len(spec.shape) for spec in claims.specs.values()), default=MOST_AXES)
    whole("the axes of its batches", axes[""], 1, 1 + most)
    for name, n in axes.items():
        inside = [len(spec.shape) for column, spec in claims.specs.items() if column.startswith(f"{name}/")]
        whole(f"the axes of {name!r}", n, axes[""], 1 + min(inside, default=most))
    return dict(axes)
