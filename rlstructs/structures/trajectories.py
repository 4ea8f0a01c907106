"""`Trajectories`: data that are constant over each trajectory, and data that vary with time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from rlstructs.errors import SpecError
from rlstructs.files.segments import list_parts
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
        """A copy of the valid steps, one after another without padding, for recurrent networks and transformers.

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
