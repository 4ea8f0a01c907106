"""How a `DictTensorReplayBuffer` is kept: in files, folders, dicts, and pickled."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlstructs.checks import DTYPES, MOST_AXES, clean_text
from rlstructs.errors import FileError
from rlstructs.files.layout import WRITERS, ending_of
from rlstructs.replay import saving
from rlstructs.replay.claims import Claims, check_aligned, flag, whole
from rlstructs.replay.copies import lock_that_forks
from rlstructs.replay.torchrl import keeping
from rlstructs.replay.torchrl.index import DictTensorIndex
from rlstructs.replay.torchrl.prefetch import Prefetch

if TYPE_CHECKING:
        from rlstructs.replay.buffer import Buffer


VERSION = 1
FILE = "buffer.npz"
NAME = "load_state_dict"
# What tells the states and folders that torchrl's own buffers write.
THEIR_ENTRIES, THEIR_FILE = ("_storage", "_writer"), "buffer_metadata.json"


def state_dict(buffer: Buffer) -> dict[str, Any]:
    """What `files.contents` gives, copies; `torch.load` takes it with `weights_only=True`."""
    arrays, _, state = saving.contents(buffer)
    return {
        "class": type(buffer).__name__,
        "version": VERSION,
        "state": json.loads(json.dumps(state)),
        "arrays": {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()},
    }


def load_state_dict(buffer: Buffer, given: Mapping[str, Any]) -> None:
    """Restores a buffer.

    Raises:
        FileError: it does not fit; nothing has changed.
    """
    if isinstance(given, Mapping) and all(entry in given for entry in THEIR_ENTRIES):
        raise _theirs(NAME, "state")
    try:
        if given["version"] != VERSION:
            raise ValueError(f"version {given['version']!r}, this program reads version {VERSION}")
        restore = saving.restorer(buffer, NAME, Held(given["arrays"]), given)
    except FileError:
        raise
    except Exception as error:  # whatever it holds
        raise FileError(f"{NAME}: not the state of a buffer, or a damaged one: {clean_text(error)}") from error
    restore()


class Held:
    """Tensors as what is read from.

    Args:
        tensors: by name.
    """

    text = ""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}

        for name, array in self._arrays.items():
            if type(name) is not str or array.dtype.name not in DTYPES:
                raise ValueError(f"{name!r} is no tensor that a buffer has")
            if array.dtype == np.bool_ and np.ascontiguousarray(array).view(np.uint8).max(initial=0) > 1:
                raise ValueError(f"{name!r} holds bools that are neither true nor false")

    def spec_of(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """The dtype and shape of one."""
        return self._arrays[name].dtype, self._arrays[name].shape

    def verify(self) -> None:
        """They are what they are."""

    def read_into(self, name: str, array: np.ndarray) -> None:
        """Copies one."""
        array[...] = self._arrays[name]


def dump(buffer: Buffer, folder: Path) -> None:
    """Writes a buffer to a folder, which is made if there is none."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        saving.save(buffer, folder / FILE)
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):  # somebody else has put something into it
                folder.rmdir()
        raise


def file_in(folder: str | Path) -> Path:
    """The file that `dump` wrote.

    Raises:
        FileError: torchrl wrote the folder.
    """
    path = Path(folder) / FILE
    if not path.exists() and (Path(folder) / THEIR_FILE).exists():
        raise _theirs(str(folder), "folder")
    return path


def _theirs(source: str, what: str) -> FileError:
    """The error for what torchrl itself wrote."""
    advice = "load it into a buffer of torchrl, and give that one's rows, `[:]`, to `extend`"
    return FileError(f"{source}: this is a {what} of torchrl's own, which only torchrl reads; {advice}")


class DictTensorFiles(DictTensorIndex):
    """What is kept elsewhere; see `DictTensorReplayBuffer`."""

    _ahead: Prefetch
    _version: int  # raised by what changes batches beside rows and the sampler

    def save(self, path: str | Path) -> None:
        """Writes rows, counters, episodes, priorities and the random stream, whole or not at all.

        Args:
            path: a file, which ends in `.npz`, `.pt` or `.h5` (which needs the extra `hdf5`); or a folder, whose name
                is any other, for what `dumps` does.
        """
        if Path(path).is_dir() or ending_of(Path(path)) not in WRITERS:
            self.dumps(path)
            return
        with self._lock:
            super().save(path)

    def load(self, path: str | Path) -> None:
        if Path(path).is_dir():
            path = keeping.file_in(path)
        with self._lock:
            super().load(path)

    load.__doc__ = DictTensorIndex.load.__doc__

    def dumps(self, path: str | Path) -> None:
        """Writes a folder with what `save` writes; a file that is there stays whole until the new one is."""
        with self._lock:
            keeping.dump(self, Path(path))

    def loads(self, path: str | Path) -> None:
        """Restores what `dumps` wrote.

        Raises:
            FileNotFoundError, FileError: as of `load`.
        """
        self.load(keeping.file_in(path))

    dump = dumps

    def state_dict(self) -> dict[str, Any]:
        """What `save` writes as tensors and plain values, copies; `torch.load` takes it with `weights_only=True`."""
        with self._lock:
            return keeping.state_dict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave: the next samples are those that would have come then.

        Raises:
            FileError: it is damaged, or of a buffer of another size or class, or with another sampler; this one is
                as it was.
        """
        with self._lock:
            keeping.load_state_dict(self, state_dict)

    _may_be_aligned = True

    def _takes_capacity(self, capacity: int) -> bool:
        return self._settings.capacity_for(capacity) == capacity

    def _state(self) -> dict[str, Any]:
        return {
            "max_size": self._settings.max_size,
            "n_rows": self._storage.columns.n_rows,
            "n_written": self._n_written,
            "knows_episodes": self._knows_episodes,
            "axes": self._axes,
            "sampler": {"class": type(self._sampler).__name__, **self._sampler.state()},
        }

    def _more_arrays(self) -> dict[str, np.ndarray]:
        return self._sampler.arrays()

    def _restorer(
        self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray], claims: Claims
    ) -> Callable[[], None]:
        own, found = (self._settings.max_size, type(self._sampler).__name__), state["sampler"]
        if own != (state["max_size"], found["class"]):
            raise ValueError(f"it has room for {state['max_size']} rows and a {found['class']}, needed are {own}")
        check_aligned(claims.ring)
        whole("n_rows", state["n_rows"], claims.n_rows, claims.n_rows)
        n_written, knows = whole("n_written", state["n_written"]), flag("knows_episodes", state["knows_episodes"])
        axes = _checked_axes(state.get("axes"), claims)
        restore_sampler = self._sampler.restorer(found, arrays, claims)

        def restore() -> None:
            self._storage.alignment = self._settings.alignment
            restore_sampler()
            self._writer.changed()
            self._n_written, self._knows_episodes, self._quick, self._written = n_written, knows, None, None
            self._axes = axes
            self._version += 1

        return restore

    def _locks(self) -> Sequence[Any]:
        return [self._lock, *super()._locks()]

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "_ahead": self._ahead.depth, "_quick": None, "_written": None}
        del state["_lock"]
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(state)
        self._lock = lock_that_forks()
        self._ahead = Prefetch(self._lock, state["_ahead"])
        for each in (self._settings, self._sampler, self._writer):
            each.belong(self)


def _checked_axes(axes: Any, claims: Claims) -> dict[str, int] | None:
    """The axes of what rows came as, as of `tensordicts`; raises ValueError if columns have not so many."""
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
