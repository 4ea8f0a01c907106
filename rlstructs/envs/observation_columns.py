"""Gathers the observations of E environments into columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlstructs.envs.spaces import FEW, Leaf
from rlstructs.shared.packing import Packing, Rows


class Column:
    """Gathers one leaf of E observations into the rows of an array.

    Args:
        leaf: which.
        n_envs: the most observations, E.
        array: the rows, without gaps; None for some of its own.
    """

    def __init__(self, leaf: Leaf, n_envs: int, array: np.ndarray | None = None) -> None:
        self.leaf = leaf
        self.array = np.zeros((n_envs, *leaf.row_shape), leaf.dtype) if array is None else array
        # Observations laid one behind another along their first axis: a single concatenation.
        n_rows, rest = (n_envs * leaf.shape[0], leaf.shape[1:]) if leaf.shape else (n_envs, ())
        self._chain = self.array.reshape(n_rows, *rest)
        self._n_envs, self._sizes = n_envs, [leaf.shape[0]] * n_envs if leaf.shape else []
        # Rounding a float is all right. Whole numbers of a wider dtype are looked at one by one.
        self._casting: Any = "same_kind" if leaf.dtype.kind == "f" else "safe"

    def fill(self, observations: Sequence[Any], environments: Iterable[int] | None = None) -> np.ndarray:
        """Writes the leaf of each observation; the rows, valid until the next call.

        Args:
            observations: at most E.
            environments: whose they are, for messages; None for 0, 1, ...

        Raises:
            SpecError: an observation is not in the space; names environment and key.
        """
        n = len(observations)
        try:
            self._fill_at_once(observations, n)
        except (TypeError, ValueError, LookupError, RuntimeError):  # torch's own, of tensors with gradients
            self._fill_one_by_one(observations, range(n) if environments is None else environments)
        return self.array if n == self._n_envs else self.array[:n]

    def _fill_at_once(self, observations: Sequence[Any], n: int) -> None:
        leaf = self.leaf
        values = [leaf.pick(sample) for sample in observations] if leaf.path else observations
        if not leaf.shape:
            np.copyto(self._chain[:n], np.asarray(values).reshape(n), casting=self._casting)
        elif list(map(len, values)) == (self._sizes if n == self._n_envs else self._sizes[:n]):
            chain = self._chain if n == self._n_envs else self._chain[: n * leaf.shape[0]]
            np.concatenate(values, out=chain, casting=self._casting)
        else:  # too long and too short ones may add up
            raise ValueError("an observation of another size")

    def _fill_one_by_one(self, observations: Sequence[Any], environments: Iterable[int]) -> None:
        """Finds what is wrong; takes values of another dtype where none is changed by it."""
        leaf = self.leaf
        for row, (environment, observation) in enumerate(zip(environments, observations, strict=True)):
            got = leaf.read(f"environment {environment}: observation {leaf.name!r}", observation, leaf.shape)
            self.array[row] = got.astype(leaf.dtype).reshape(leaf.row_shape)


class Sheet:
    """E rows of observations that are written over again and again.

    Args:
        found: key -> the leaf that it comes from; other keys are the owner's to write.
        packing: of all keys.
        n_envs: E.

    Attributes:
        rows: all E.
        view: each key's values, views.
    """

    def __init__(self, found: Mapping[str, Leaf], packing: Packing, n_envs: int) -> None:
        self._n_envs, self._leaves = n_envs, found
        self.rows = Rows.zeros(packing, n_envs)
        self.view = self.rows.arrays()
        # Filled in place, or, what lies in a record, copied into it.
        self._columns = [
            (Column(leaf, n_envs, self.view[key]), None)
            if key in self.rows.blocks
            else (Column(leaf, n_envs), self.view[key])
            for key, leaf in found.items()
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        # Made anew, also where an environment is copied: copies of views would be no views of the copied rows.
        return _sheet_of, (self._leaves, self.rows.packing, self._n_envs, self.rows.blocks)

    def fill(self, observations: Sequence[Any], environments: Iterable[int] | None = None) -> Rows:
        """Writes every leaf, as `Column.fill` does; the rows, valid until the next call."""
        n = len(observations)
        for column, record in self._columns:
            rows = column.fill(observations, environments)
            if record is not None:
                record[:n] = rows
        return self.rows if n == self._n_envs else self.rows.take(slice(n))

    def fill_batch(self, batch: Any, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes every leaf of E observations that are one already to the arrays of its keys."""
        for key, leaf in self._leaves.items():
            got = leaf.read(f"environment: observation {key!r}", batch, (self._n_envs, *leaf.shape))
            _copy(arrays[key], got.reshape(self._n_envs, *leaf.row_shape))


def _sheet_of(
    found: Mapping[str, Leaf], packing: Packing, n_envs: int, blocks: Mapping[str, np.ndarray]
) -> Sheet:
    sheet = Sheet(found, packing, n_envs)
    for name, block in blocks.items():
        sheet.rows.blocks[name][...] = block
    return sheet


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copies rows, also those of an array that an environment keeps column by column."""
    if source.ndim == 2 and source.shape[1] <= FEW and source.strides[0] < source.strides[1]:
        for column in range(source.shape[1]):  # numpy would go row by row, and each of them is short
            target[:, column] = source[:, column]
    else:
        np.copyto(target, source, casting="unsafe")
