"""Folders of rollouts, written and read part by part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from rlstructs.errors import FileError
from rlstructs.files.segments import list_parts, part_path
from rlstructs.structures.trajectories import Trajectories

# Rollouts are gathered until they have so many bytes.
PART_NBYTES = 16 << 20


def save_rollouts(folder: str | Path, rollouts: Iterable[Trajectories]) -> int:
    """Writes rollouts to a folder as they come, 16 MB to a file.

    Written files remain after an error, a Ctrl-C or a SIGKILL: a file is either complete or absent.

    Args:
        folder: a new or empty folder.
        rollouts: trajectories of the same keys, such as `batcher.rollouts(n_steps=...)`.

    Returns:
        The number of trajectories, B.

    Raises:
        FileError: the folder has files.
        OSError: a file cannot be written.

    Example:
        >>> import tempfile, torch
        >>> from rlstructs import DictTensor, TemporalDictTensor, load_rollouts
        >>> rollout = Trajectories(DictTensor(), TemporalDictTensor({"x": torch.zeros(2, 5)}))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_rollouts(folder, [rollout] * 3)
        ...     [len(part) for part in load_rollouts(folder)], len(Trajectories.load(folder))
        6
        ([6], 6)
    """
    with RolloutFolder(folder) as opened:
        for rollout in rollouts:
            opened.add(rollout)
    return opened.n_written


def load_rollouts(folder: str | Path) -> Iterator[Trajectories]:
    """Reads the files of `save_rollouts`, one after the other.

    `Trajectories.load` reads all of them at once.

    Args:
        folder: the folder.

    Yields:
        Trajectories of some rollouts, in the order in which they were written.

    Raises:
        FileNotFoundError: there is no such folder.
        FileError: it has no rollouts, one of its files is missing, damaged, or not one of rlstructs.
    """
    return map(Trajectories.load, list_parts(folder))


class RolloutFolder:
    """A folder that rollouts are written to; use it in a `with` block.

    Args:
        folder: an empty folder, or a path where one is made for the first file.

    Attributes:
        n_written: the number of trajectories in its files.

    Raises:
        FileError: the folder has files.
        OSError: it is not a folder, or its parent folder does not exist.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        if not self._folder.parent.is_dir():
            raise FileNotFoundError(f"{folder}: there is no folder {self._folder.parent}")
        if self._folder.exists() and (found := next(self._folder.iterdir(), None)):
            raise FileError(f"{folder}: must be a new or an empty folder, it has {found.name!r}")
        self._held: list[Trajectories] = []
        self._n_parts = self.n_written = 0

    def __enter__(self) -> RolloutFolder:
        return self

    def __exit__(self, *_: object) -> None:
        """Writes the gathered rollouts, also after an error."""
        self._write()

    def add(self, rollout: Trajectories) -> None:
        """Adds a rollout."""
        if not isinstance(rollout, Trajectories):
            raise TypeError(f"save_rollouts: needs Trajectories, got {type(rollout).__name__}")
        self._held.append(rollout)
        if sum(map(_nbytes, self._held)) >= PART_NBYTES:
            self._write()
        else:
            self._held[-1] = rollout.clone()  # a lease ends, and `get(out=)` writes to the same memory again

    def _write(self) -> None:
        held, self._held = self._held, []
        if held:
            self._folder.mkdir(exist_ok=True)
            part = held[0] if len(held) == 1 else Trajectories.cat(held)
            part.save(part_path(self._folder, self._n_parts))
            self._n_parts, self.n_written = self._n_parts + 1, self.n_written + len(part)


def _nbytes(rollout: Trajectories) -> int:
    return sum(tensor.nbytes for tensors in rollout.values() for tensor in tensors.values())
