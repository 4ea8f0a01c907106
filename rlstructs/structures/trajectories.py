"""`Trajectories`: data constant over each trajectory, and data that vary with time.

`save_rollouts` and `load_rollouts` keep them in folders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rlstructs.errors import FileError, SpecError
from rlstructs.files.segments import list_parts, part_path
from rlstructs.structures.dict_tensor import DictTensor, Index, as_index
from rlstructs.structures.packed import PackedTrajectories
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.tree import Structure, check_parts, show_fields
from rlstructs.workers.public_names import set_module


@set_module("rlstructs")
class Trajectories(Structure):
    """A pair of `info`, one row per trajectory, and `trajectories`, B x T.

    Args:
        info: B rows, or empty.
        trajectories: B rows.

    Raises:
        TypeError: an argument is of another class.
        SpecError: the two differ in their number of rows or their device.

    Example:
        >>> t = Trajectories(
        ...     DictTensor({"env_index": torch.arange(2)}),
        ...     TemporalDictTensor({"action/action": torch.zeros(2, 5)}, torch.tensor([5, 3])),
        ... )
        >>> t.n_elems(), t.lengths.tolist()
        (2, [5, 3])
        >>> Trajectories.cat([t, t]).n_elems()
        4
    """

    _kind = "Trajectories"
    info: DictTensor
    trajectories: TemporalDictTensor

    def __init__(self, info: DictTensor, trajectories: TemporalDictTensor) -> None:
        if not isinstance(info, DictTensor) or not isinstance(trajectories, TemporalDictTensor):
            raise TypeError(
                "Trajectories: needs a DictTensor and a TemporalDictTensor, "
                f"got {type(info).__name__} and {type(trajectories).__name__}"
            )
        if not info.empty():
            if info.n_elems() != trajectories.n_elems():
                raise SpecError(
                    f"Trajectories: info has {info.n_elems()} rows, trajectories has {trajectories.n_elems()}"
                )
            if info.device() != trajectories.device():
                raise SpecError(f"Trajectories: info is on {info.device()}, trajectories is on {trajectories.device()}")
        self.info, self.trajectories = info, trajectories

    def _tree(self) -> dict[str, Any]:
        return {"info": self.info._tree(), "trajectories": self.trajectories._tree()}

    def _shown(self) -> dict[str, Any]:
        return {"info": self.info._shown(), "trajectories": self.trajectories._shown()}

    @classmethod
    def _from_tree(cls, tree: Mapping[str, Any]) -> Trajectories:
        return cls(DictTensor._from_tree(tree.get("info", {})), TemporalDictTensor._from_tree(tree["trajectories"]))

    @classmethod
    def trusted(cls, info: DictTensor, trajectories: TemporalDictTensor) -> Trajectories:
        """Wraps a valid pair without checks."""
        made = cls.__new__(cls)
        made.info, made.trajectories = info, trajectories
        return made

    @classmethod
    def _from_trusted(cls, tree: Mapping[str, Any]) -> Trajectories:
        return cls(DictTensor.trusted(tree["info"]), TemporalDictTensor._from_trusted(tree["trajectories"]))

    def _content(self) -> dict[str, Any]:
        return {"info": self.info._content(), "trajectories": self.trajectories._content()}

    def __contains__(self, name: object) -> bool:
        """Whether the steps have this key."""
        return name in self.trajectories

    __iter__ = None  # by `__getitem__` Python would try 0, 1, and so on

    def __getitem__(self, name: str) -> torch.Tensor:
        """The steps of a key, (B, T, ...): the same as `trajectories[name]`.

        Raises:
            MissingKeyError: there is no such key.
        """
        return self.trajectories[name]

    def items(self) -> list[tuple[str, DictTensor | TemporalDictTensor]]:
        """The two parts with their names."""
        return [("info", self.info), ("trajectories", self.trajectories)]

    def values(self) -> list[DictTensor | TemporalDictTensor]:
        """The two parts."""
        return [self.info, self.trajectories]

    def n_elems(self) -> int:
        """Number of trajectories, B."""
        return self.trajectories.n_elems()

    def device(self) -> torch.device:
        """The device of both parts."""
        return self.trajectories.device()

    @property
    def lengths(self) -> torch.Tensor:
        """int64 (B,): the number of valid steps of each trajectory."""
        return self.trajectories.lengths

    def mask(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A mask (B, T): 1 in valid steps, 0 in the padding."""
        return self.trajectories.mask(dtype)

    def index(self, index: Index) -> Trajectories:
        """The trajectories at `index`; an int keeps the batch axis."""
        index = as_index(index)
        rows = self.trajectories.index(index)
        if isinstance(index, int):
            index = slice(index, index + 1 or None)
        return Trajectories(self.info.index(index), rows)

    def slice(self, index_from: int, index_to: int | None = None) -> Trajectories:
        """Views of trajectories `index_from` to `index_to - 1`; with one argument, of that one."""
        return self.index(index_from if index_to is None else slice(index_from, index_to))

    def shorten(self) -> Trajectories:
        """Views without the timesteps that are padding in every trajectory."""
        return Trajectories(self.info, self.trajectories.shorten())

    def sample(self, n: int, generator: torch.Generator | None = None) -> Trajectories:
        """A copy of `n` different trajectories, drawn uniformly.

        Raises:
            SpecError: there are fewer than `n`.
        """
        if not 0 <= n <= self.n_elems():
            raise SpecError(f"Trajectories.sample: n must lie in [0, {self.n_elems()}], got {n}")
        device = "cpu" if generator is None else generator.device
        drawn = torch.randperm(self.n_elems(), generator=generator, device=device)[:n]
        return self.index(drawn.to(self.device()))

    def packed(self, by: str = "row", keys: Iterable[str] | None = None) -> PackedTrajectories:
        """Copies the valid steps one after another, without padding.

        For recurrent networks and transformers.

        Args:
            by: what a segment is: a "row", or what there is of an "episode" in a row. Rows without steps have none.
            keys: which tensors; None for all.

        Raises:
            MissingKeyError: there is no such key, or by episode none that says where episodes begin or end.
            SpecError: `by` is something else.

        Example:
            >>> steps = {"x": torch.arange(6).view(2, 3)}
            >>> batch = Trajectories(DictTensor(), TemporalDictTensor(steps, torch.tensor([3, 2])))
            >>> pack = batch.packed()
            >>> pack["x"], pack.cu_seqlens.tolist(), pack.positions.tolist()
            (tensor([0, 1, 2, 3, 4]), [0, 3, 5], [0, 1, 2, 0, 1])
        """
        return PackedTrajectories.of(self.info, self.trajectories, by, keys)

    @staticmethod
    def cat(trajectories: Iterable[Trajectories]) -> Trajectories:
        """Concatenates trajectories in a copy, padded with zeros to the longest T."""
        parts = check_parts(Trajectories, trajectories)
        return Trajectories(
            DictTensor.cat(part.info for part in parts),
            TemporalDictTensor.cat(part.trajectories for part in parts),
        )

    @classmethod
    def load(cls, path: str | Path) -> Trajectories:
        """Reads a file that `save` wrote, or a folder that `save_rollouts` wrote.

        Nothing in a file is executed.

        Raises:
            FileError: a file was not written by `save`, is damaged, missing, or holds another class.
            FileNotFoundError: there is no such file.
        """
        if not Path(path).is_dir():
            return super().load(path)
        return cls.cat(map(super().load, list_parts(path)))

    def __repr__(self) -> str:
        line = ",\n    "
        info = show_fields(self.info._head(), self.info, line)
        steps = show_fields(self.trajectories._head(), self.trajectories, line)
        return f"Trajectories(\n  info={info},\n  trajectories={steps})"


# Rollouts are gathered until they have so many bytes.
PART_NBYTES = 16 << 20


def save_rollouts(folder: str | Path, rollouts: Iterable[Trajectories], *, compress: bool = False) -> int:
    """Writes rollouts to a folder as they come, 16 MB to a file.

    Written files remain after an error, a Ctrl-C or a SIGKILL: a file is either complete or absent.

    Args:
        folder: a new or empty folder.
        rollouts: trajectories of the same keys, such as `batcher.rollouts(n_steps=...)`.
        compress: see `Trajectories.save`.

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
    with RolloutFolder(folder, compress) as opened:
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
        compress: see `Trajectories.save`.

    Attributes:
        n_written: the number of trajectories in its files.

    Raises:
        FileError: the folder has files.
        OSError: it is not a folder, or its parent folder does not exist.
    """

    def __init__(self, folder: str | Path, compress: bool = False) -> None:
        self._folder, self._compress = Path(folder), compress
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
            part.save(part_path(self._folder, self._n_parts), compress=self._compress)
            self._n_parts, self.n_written = self._n_parts + 1, self.n_written + len(part)


def _nbytes(rollout: Trajectories) -> int:
    return sum(tensor.nbytes for tensors in rollout.values() for tensor in tensors.values())
