"""Buffers as dicts of tensors and plain values, and as folders: what a file of one holds, in other places."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlstructs.checks import DTYPES, reason
from rlstructs.errors import FileError
from rlstructs.replay.buffers import files

if TYPE_CHECKING:
    from rlstructs.replay.buffers.base import Buffer

VERSION = 1
FILE = "buffer.npz"
NAME = "load_state_dict"


def state_dict(buffer: Buffer) -> dict[str, Any]:
    """What `files.contents` gives, copies; `torch.load` takes it with `weights_only=True`."""
    arrays, _, state = files.contents(buffer)
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
    try:
        if given["version"] != VERSION:
            raise ValueError(f"version {given['version']!r}, this program reads version {VERSION}")
        restore = files.restorer(buffer, NAME, Held(given["arrays"]), given)
    except FileError:
        raise
    except Exception as error:  # whatever it holds
        raise FileError(f"{NAME}: not the state of a buffer, or a damaged one: {reason(error)}") from error
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

    def found(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
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
        files.save(buffer, folder / FILE)
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):  # somebody else has put something into it
                folder.rmdir()
        raise


def file_in(folder: str | Path) -> Path:
    """The file that `dump` wrote."""
    return Path(folder) / FILE
