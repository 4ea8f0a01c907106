"""`TemporalDictTensor`: named tensors over batch and time, with a length per row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch

from rlstructs.checks import UNKNOWN
from rlstructs.errors import SpecError
from rlstructs.structures.dict_tensor import DictTensor, Index, as_index, check_copy
from rlstructs.structures.tree import (
    TensorMap,
    check_alike,
    check_parts,
    check_same_keys,
    flatten,
    put_rows,
    show,
    show_fields,
)
from rlstructs.workers.public_names import set_module

LENGTHS = "lengths"
# The first steps beside the tensors, in copies and files alone.
FIRST_STEPS = "@first_steps"


@set_module("rlstructs")
class TemporalDictTensor(TensorMap):
    """A map name -> tensor (B, T, ...) and `lengths`, int64 (B,).

    Steps t >= lengths[b] are padding. The mapping is copied, the tensors are not.

    Args:
        from_dict: name -> tensor (B, T, ...); nested mappings are flattened to keys joined with `/`.
        lengths: int64 (B,), each in [0, T]; None if no row has padding.
        first_steps: int64 (B,), see the attribute of this name; None if none is known.

    Attributes:
        lengths: int64 (B,), the number of valid steps of each row.
        first_steps: int64 (B,), the number of each row's first step in its environment's own count, -1 where that is
            not known; None if none is known. The count begins at any number and continues from one rollout to the
            next; it skips a number where steps do not continue the previous ones. Memories end an episode where a row
            does not continue the previous one. `==`, `numpy`, `jax`, `warp` and `to_tensordict` leave it out.

    Raises:
        TypeError: a value is not a tensor.
        SpecError: batch sizes, numbers of timesteps, devices or lengths do not fit; the message names the key.

    Example:
        >>> m = TemporalDictTensor({"y": torch.arange(12).view(3, 4)}, torch.tensor([2, 4, 1]))
        >>> m
        TemporalDictTensor(n_elems=3, n_timesteps=4, lengths=1..4, device=cpu, y=(3, 4) int64)
        >>> m.mask()[0]
        tensor([1., 1., 0., 0.])
        >>> rows, index = m.masked_temporal_index(1)
        >>> rows["y"], index
        (tensor([1, 5]), tensor([0, 1]))
    """

    _kind = "TemporalDictTensor"
    lengths: torch.Tensor
    first_steps: torch.Tensor | None

    def __init__(
        self,
        from_dict: Mapping[str, Any] | TensorMap | None = None,
        lengths: torch.Tensor | None = None,
        first_steps: torch.Tensor | None = None,
    ) -> None:
        self._tensors = {} if from_dict is None else flatten(from_dict, "TemporalDictTensor")
        self.lengths = _full_lengths(self._tensors) if lengths is None else lengths
        self.first_steps = first_steps
        self._check()

    @classmethod
    def trusted(
        cls, tensors: Mapping[str, torch.Tensor], lengths: torch.Tensor, first_steps: torch.Tensor | None = None
    ) -> TemporalDictTensor:
        """Wraps valid tensors, lengths and first steps without checks or a copy."""
        made = cls.__new__(cls)
        made._tensors, made.lengths, made.first_steps = tensors, lengths, first_steps
        return made

    def _check(self) -> None:
        lengths, first = self.lengths, next(iter(self._tensors), None)
        _check_numbers(LENGTHS, lengths)
        if self.first_steps is not None:
            _check_numbers("first_steps", self.first_steps)
            if self.first_steps.shape != lengths.shape or self.first_steps.device != lengths.device:
                raise SpecError(
                    f"TemporalDictTensor: first_steps is {show(self.first_steps)} on {self.first_steps.device}, "
                    f"expected {show(lengths)} on {lengths.device} (from lengths)"
                )
        for name in (LENGTHS, FIRST_STEPS):
            if name in self._tensors:
                raise SpecError(f"TemporalDictTensor: no tensor may be called {name!r}")
        for key, tensor in self._tensors.items():
            if tensor.device != lengths.device:
                raise SpecError(
                    f"TemporalDictTensor: {key!r} is on {tensor.device}, expected {lengths.device} (from lengths)"
                )
            wanted = (lengths.shape[0], self._tensors[str(first)].shape[1] if tensor.ndim > 1 else "T")
            if tensor.ndim < 2 or tuple(tensor.shape[:2]) != wanted:
                raise SpecError(
                    f"TemporalDictTensor: {key!r} has shape {tuple(tensor.shape)}, expected "
                    f"({wanted[0]}, {wanted[1]}, ...) (from lengths and {first!r})"
                )
        if lengths.numel() and not lengths.is_meta:
            low, high = int(lengths.min()), int(lengths.max())
            if low < 0 or high > self.n_timesteps():
                raise SpecError(f"TemporalDictTensor: lengths must lie in [0, {self.n_timesteps()}], got {low}..{high}")

    def _tree(self) -> dict[str, torch.Tensor]:
        return self._shown() if self.first_steps is None else {**self._shown(), FIRST_STEPS: self.first_steps}

    def _shown(self) -> dict[str, torch.Tensor]:
        return {**self._tensors, LENGTHS: self.lengths}

    @classmethod
    def _from_tree(cls, tree: Mapping[str, Any]) -> TemporalDictTensor:
        tensors = dict(tree)
        lengths, first_steps = tensors.pop(LENGTHS, None), tensors.pop(FIRST_STEPS, None)
        if isinstance(lengths, torch.Tensor) and lengths.dtype == torch.int32:
            lengths = lengths.long()  # jax has only 32 bits by default
        return cls(tensors, lengths, first_steps)

    @classmethod
    def _from_trusted(cls, tree: dict[str, torch.Tensor]) -> TemporalDictTensor:
        tensors = dict(tree)
        return cls.trusted(tensors, tensors.pop(LENGTHS), tensors.pop(FIRST_STEPS, None))

    def _content(self) -> dict[str, torch.Tensor]:
        """Returns the tree without padding values and without a batcher's count.

        Zeros replace the padding, whose values do not matter.
        """
        return self.zero_padding()._shown()

    def n_elems(self) -> int:
        """Number of rows, B."""
        return self.lengths.shape[0]

    def n_timesteps(self) -> int:
        """Size of the time axis, T; the largest length if there are no tensors."""
        for tensor in self._tensors.values():
            return tensor.shape[1]
        return int(self.lengths.max()) if self.lengths.numel() and not self.lengths.is_meta else 0

    def device(self) -> torch.device:
        """The device of tensors and lengths."""
        return self.lengths.device

    def specs(self) -> dict[str, dict[str, Any]]:
        """`{name: {"size": shape without the batch and time axes, "dtype": dtype}}`."""
        return {key: {"size": t.shape[2:], "dtype": t.dtype} for key, t in self._tensors.items()}

    def mask(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A mask (B, T): 1 in steps t < lengths[b], 0 in the padding."""
        steps = torch.arange(self.n_timesteps(), device=self.device())
        return (steps[None] < self.lengths[:, None]).to(dtype)

    def full(self) -> bool:
        """Whether no row has padding."""
        return bool((self.lengths == self.n_timesteps()).all())

    def zero_padding(self) -> TemporalDictTensor:
        """Returns this object, or a copy with zeros in its padding."""
        if self.full():
            return self
        mask = self.mask(torch.bool)
        zeroed = {
            key: torch.where(mask.view(*mask.shape, *[1] * (t.ndim - 2)), t, torch.zeros_like(t))
            for key, t in self._tensors.items()
        }
        return self.trusted(zeroed, self.lengths.clone(), _copy(self.first_steps))

    def get(self, keys: Iterable[str], clone: bool = False) -> TemporalDictTensor:
        """A TemporalDictTensor of some of the tensors, which are shared unless `clone`.

        Raises:
            MissingKeyError: there is no such key.
        """
        picked = self.trusted(self._pick(keys), self.lengths, self.first_steps)
        return picked.clone() if clone else picked

    def set(self, key: str, value: torch.Tensor) -> TemporalDictTensor:
        """Adds or replaces a tensor (B, T, ...), in place.

        Returns:
            This object.

        Raises:
            TypeError, SpecError: it does not fit; nothing changes.
        """
        new = self.empty() and self.lengths.numel() == 0
        made = TemporalDictTensor({**self._tensors, key: value}, None if new else self.lengths)  # checks
        self._tensors, self.lengths = made._tensors, made.lengths
        return self

    def index(self, index: Index) -> TemporalDictTensor:
        """Returns the rows at `index`; an int keeps the batch axis (1 x T).

        Otherwise as in `DictTensor.index`.
        """
        index = as_index(index)
        if isinstance(index, int):
            index = slice(self._row(index), self._row(index) + 1)
        rows = DictTensor.trusted(self._tree()).index(index)
        first_steps = None if self.first_steps is None else rows[FIRST_STEPS]
        return self.trusted({key: rows[key] for key in self._tensors}, rows[LENGTHS], first_steps)

    def slice(self, index_from: int, index_to: int | None = None) -> TemporalDictTensor:
        """Returns views of rows `index_from` to `index_to - 1`.

        With one argument, of that row as 1 x T.
        """
        return self.index(index_from if index_to is None else slice(index_from, index_to))

    def _row(self, row: int) -> int:
        if not -self.n_elems() <= row < self.n_elems():
            raise IndexError(f"row {row} is out of range for {self.n_elems()} rows")
        return row % self.n_elems()

    def unfold(self) -> list[TemporalDictTensor]:
        """B views of one row each, 1 x T."""
        return [self.slice(row) for row in range(self.n_elems())]

    def shorten(self) -> TemporalDictTensor:
        """Returns views without the timesteps that are padding in every row.

        The lengths are a copy.
        """
        longest = int(self.lengths.max()) if self.lengths.numel() else 0
        steps = {key: t[:, :longest] for key, t in self._tensors.items()}
        return self.trusted(steps, self.lengths.clone(), _copy(self.first_steps))

    def temporal_slice(self, index_from: int, index_to: int) -> TemporalDictTensor:
        """Views of timesteps `index_from` to `index_to - 1`, with the lengths that remain.

        Raises:
            SpecError: unless 0 <= index_from <= index_to.
        """
        if not 0 <= index_from <= index_to:
            raise SpecError(f"temporal_slice: needs 0 <= from <= to, got {index_from} and {index_to}")
        index_to = min(index_to, max(index_from, self.n_timesteps()))
        lengths = (self.lengths - index_from).clamp(0, index_to - index_from)
        first = self.first_steps
        first = None if first is None else torch.where(first == UNKNOWN, first, first + index_from)
        return self.trusted({key: t[:, index_from:index_to] for key, t in self._tensors.items()}, lengths, first)

    def temporal_index(self, index_t: int) -> DictTensor:
        """Returns views of all B rows at time `index_t`, padding included.

        A negative time counts from T.
        """
        return DictTensor.trusted({key: tensor[:, index_t] for key, tensor in self._tensors.items()})

    def temporal_multi_index(self, index_t: torch.Tensor | Sequence[int] | int) -> DictTensor:
        """Returns a copy of row b at time `index_t[b]`.

        `lengths - 1` gives the last valid steps.

        Args:
            index_t: integers (B,), or one time for all rows.

        Raises:
            IndexError: the times are not integers, or of another shape.
        """
        times = torch.as_tensor(index_t, device=self.device())
        if times.dtype == torch.bool or times.dtype.is_floating_point or times.dtype.is_complex:
            raise IndexError(f"temporal_multi_index: times must be integers, got {show(times)}")
        times = times.long().reshape(1) if times.ndim == 0 else times.long()
        if times.ndim != 1 or times.shape[0] not in (1, self.n_elems()):
            raise IndexError(f"temporal_multi_index: times must be ({self.n_elems()},) or (1,), got {show(times)}")
        rows = torch.arange(self.n_elems(), device=self.device())
        return DictTensor.trusted({key: tensor[rows, times] for key, tensor in self._tensors.items()})

    def masked_temporal_index(self, index_t: int) -> tuple[DictTensor, torch.Tensor]:
        """The rows that are valid at time `index_t`, and their indexes.

        Returns:
            A copy of the B' valid rows, and their indexes, int64 (B',), ascending; 0 rows if `index_t` >= T.

        Raises:
            IndexError: `index_t` is negative.
        """
        if index_t < 0:
            raise IndexError(f"masked_temporal_index: t must not be negative, got {index_t}")
        rows = torch.nonzero(self.lengths > index_t).flatten()
        step = min(index_t, self.n_timesteps() - 1)
        if step < 0:
            return DictTensor.trusted({key: x.flatten(0, 1) for key, x in self._tensors.items()}), rows
        return DictTensor.trusted({key: x[rows, step] for key, x in self._tensors.items()}), rows

    def expand(self, new_batch_size: int) -> TemporalDictTensor:
        """A copy with rows of zeros, of length 0, appended up to `new_batch_size` rows.

        Raises:
            SpecError: there are more rows already.
        """
        missing = new_batch_size - self.n_elems()
        if missing < 0:
            raise SpecError(f"expand: has {self.n_elems()} rows, cannot have {new_batch_size}")
        grown = {key: torch.cat([t, t.new_zeros(missing, *t.shape[1:])]) for key, t in self._tensors.items()}
        first = self.first_steps
        first = None if first is None else torch.cat([first, first.new_full((missing,), UNKNOWN)])
        return self.trusted(grown, torch.cat([self.lengths, self.lengths.new_zeros(missing)]), first)

    @staticmethod
    def cat(tensors: Iterable[TemporalDictTensor]) -> TemporalDictTensor:
        """Concatenates the rows of all items in a copy.

        Pads them with zeros to the longest T.

        Raises:
            MissingKeyError, SpecError: the items differ in keys, trailing shapes or devices.
        """
        parts = check_parts(TemporalDictTensor, tensors)
        if not parts:
            return TemporalDictTensor()
        check_alike("TemporalDictTensor.cat", LENGTHS, [part.lengths for part in parts], axes=1)
        for number, part in enumerate(parts):
            check_same_keys(f"TemporalDictTensor.cat: item {number}", parts[0], part)
        columns = {key: [part[key] for part in parts] for key in parts[0]}
        for key, column in columns.items():
            check_alike("TemporalDictTensor.cat", key, column, axes=2)
        cat = {key: _cat_padded(column) for key, column in columns.items()}
        first = None
        if any(part.first_steps is not None for part in parts):
            first = torch.cat([part._first_steps_or_unknown() for part in parts])
        return TemporalDictTensor.trusted(cat, torch.cat([part.lengths for part in parts]), first)

    def _first_steps_or_unknown(self) -> torch.Tensor:
        """The first steps, `UNKNOWN` in all rows if there are none."""
        return torch.full_like(self.lengths, UNKNOWN) if self.first_steps is None else self.first_steps

    def copy_(self, source: TemporalDictTensor, source_indexes: Index, destination_indexes: Index) -> None:
        """Copies rows of `source` to rows of this object, in place.

        Their lengths and first steps too.

        Each row is copied up to its length; the rest of it becomes zeros.

        Args:
            source: has at least the keys of this object, with the same dtypes and trailing shapes.
            source_indexes: int64 (K,) or a list: the rows to read.
            destination_indexes: int64 (K,) or a list: the rows to write.

        Raises:
            MissingKeyError, SpecError, IndexError: an argument does not fit, or a row is longer than T here; nothing
                changes.
        """
        owner = "TemporalDictTensor.copy_"
        rows_from, rows_to = check_copy(owner, self, source, source_indexes, destination_indexes)
        rows = source.get(self).index(rows_from).shorten().zero_padding()
        steps = rows.n_timesteps()
        if not self.empty() and steps > self.n_timesteps():
            raise SpecError(f"{owner}: a row has {steps} steps, there is room for {self.n_timesteps()}")
        for key, tensor in self._tensors.items():
            block = tensor.new_zeros(len(rows_to), *tensor.shape[1:])
            block[:, :steps] = rows[key]
            put_rows(tensor, rows_to, block)
        self.lengths[rows_to] = rows.lengths.to(self.device())
        if self.first_steps is not None or rows.first_steps is not None:
            self.first_steps = self._first_steps_or_unknown()
            self.first_steps[rows_to] = rows._first_steps_or_unknown().to(self.device())

    def __repr__(self) -> str:
        return show_fields(self._head(), self)

    def _head(self) -> str:
        """The beginning of the repr."""
        low, high = (self.lengths.min(), self.lengths.max()) if len(self) else (0, 0)
        lengths = "?" if self.lengths.is_meta else f"{int(low)}..{int(high)}"
        sizes = f"n_elems={self.n_elems()}, n_timesteps={self.n_timesteps()}, lengths={lengths}"
        return f"TemporalDictTensor({sizes}, device={self.device()}"


def _check_numbers(name: str, numbers: Any) -> None:
    """Raises SpecError unless these are int64 (B,)."""
    if not isinstance(numbers, torch.Tensor) or numbers.dtype != torch.int64 or numbers.ndim != 1:
        got = show(numbers) if isinstance(numbers, torch.Tensor) else type(numbers).__name__
        raise SpecError(f"TemporalDictTensor: {name} must be int64 (B,), got {got}")


def _copy(numbers: torch.Tensor | None) -> torch.Tensor | None:
    return None if numbers is None else numbers.clone()


def _full_lengths(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    for key, tensor in tensors.items():
        if tensor.ndim < 2:
            raise SpecError(f"TemporalDictTensor: {key!r} has shape {tuple(tensor.shape)}, expected (B, T, ...)")
        return torch.full((tensor.shape[0],), tensor.shape[1], dtype=torch.int64, device=tensor.device)
    return torch.zeros(0, dtype=torch.int64, device="cpu")


def _cat_padded(tensors: list[torch.Tensor]) -> torch.Tensor:
    first, n_timesteps = tensors[0], max(tensor.shape[1] for tensor in tensors)
    if all(tensor.shape[1] == n_timesteps for tensor in tensors):
        return torch.cat(tensors)
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    n_elems = sum(tensor.shape[0] for tensor in tensors)
    whole, row = first.new_zeros(n_elems, n_timesteps, *first.shape[2:], dtype=dtype), 0
    for tensor in tensors:
        whole[row : row + tensor.shape[0], : tensor.shape[1]] = tensor
        row += tensor.shape[0]
    return whole
