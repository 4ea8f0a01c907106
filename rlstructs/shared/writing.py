"""The memory to which rollouts write steps, which then move to the slots.

`Steps` lie in the slots, or on a stage beside them that is ordered by time. In the slots the steps of an environment
are contiguous, so those of one timestep lie in as many pages as there are environments. With a thousand environments,
writing a few bytes to each page took longer than the agent. `make_staged_steps` makes private memory in which a
timestep is contiguous; `Slots.end` moves it to the slots.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.frameworks.torch import dtype_name
from rlstructs.shared.layout import Packing, Rows, Target
from rlstructs.structures.arrays import TensorSpec, put, raw_dtype, raw_of, tensor_of
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.tree import show

# Unused rows between two timesteps, so that they are not a power of two apart, which would use few cache sets.
GAP = 8


# A timestep, or int64 (k,): one for each of some rows.
Time = int | np.ndarray


class Steps:
    """The steps of n environments.

    Args:
        packing: says in which block a key lies.
        observation: block -> (n, T+1, ...).
        action: key -> (n, T, ...).

    Attributes:
        observation, action: the arguments; actions as arrays.
        arrays: key -> observations, (n, T+1, ...), views of the blocks.
        seen: `arrays` as tensors.
        is_staged: whether the steps lie on a stage beside the slots.
    """

    def __init__(
        self,
        packing: Packing,
        observation: dict[str, np.ndarray],
        action: dict[str, torch.Tensor],
        is_staged: bool = False,
    ) -> None:
        self._packing, self.observation, self._columns = packing, observation, action
        self.is_staged = is_staged
        self.arrays = packing.views(observation)
        self.seen = {key: torch.from_numpy(view) for key, view in self.arrays.items()}
        self.action = {key: raw_of(column) for key, column in action.items()}
        # Views of each timestep, kept because making one takes longer than writing to it.
        self._rows: dict[int, tuple[dict[str, np.ndarray], dict[str, torch.Tensor]]] = {}
        self._action_rows: dict[int, list[tuple[str, np.ndarray]]] = {}
        self._targets: dict[int, Target] = {}

    def write_observation(self, t: Time, rows: np.ndarray | None, seen: Rows) -> None:
        """Writes what the agent sees at t, for these rows (None: all)."""
        if rows is None:
            for name, row in self._row(t)[0].items():  # type: ignore[arg-type]
                row[...] = seen.blocks[name]
        else:
            for name, block in self.observation.items():
                block[rows, t] = seen.blocks[name]

    def write_action(self, t: Time, rows: np.ndarray | None, output: DictTensor) -> None:
        """Writes the agent's output at t, for these rows (None: all).

        Raises:
            TypeError: it is not a DictTensor.
            MissingKeyError, SpecError: its keys, shapes or dtypes are not those of the first output.
        """
        if not isinstance(output, DictTensor):
            raise TypeError(f"agent: its output must be a DictTensor, got {type(output).__name__}")
        tensors = output._tensors
        if rows is not None or len(tensors) != len(self.action):
            self._write_action_slowly(t, rows, tensors)
            return
        for key, row in self._action_row(t):  # type: ignore[arg-type]
            tensor = tensors.get(key)
            array = None if tensor is None else raw_of(tensor)
            if array is None or array.shape != row.shape or array.dtype != row.dtype:
                self._write_action_slowly(t, rows, tensors)
                return
            row[...] = array

    def _write_action_slowly(self, t: Time, rows: np.ndarray | None, tensors: Mapping[str, torch.Tensor]) -> None:
        check_output(
            tensors,
            {key: ((len(c) if rows is None else len(rows), *c.shape[2:]), c.dtype) for key, c in self._columns.items()},
        )
        for key, column in self._columns.items():
            put(column, (slice(None) if rows is None else rows, t), tensors[key])

    def view_observation(self, t: int, rows: np.ndarray | None) -> tuple[DictTensor, None]:
        """Returns the observations of these rows (None: all) at t.

        Views for all rows, copies for some.

        Returns:
            The tensors; and None, as there is nothing to settle, see `copy_observation`.
        """
        if rows is not None:
            return self.copy_rows(t, rows).tensors(), None
        return DictTensor.trusted(self._row(t)[1]), None

    def copy_observation(self, t: int, rows: np.ndarray | None) -> tuple[DictTensor, weakref.ref[LazyCopies] | None]:
        """Copies what these rows (None: all) see at t.

        Returns:
            The copies; and what to `settle` before the originals are overwritten, None if all copies are made.
        """
        if rows is not None:
            return self.copy_rows(t, rows).tensors(), None
        row = self._row(t)[1]
        copies = LazyCopies(row, lambda key: row[key].clone())
        return DictTensor.trusted(copies), weakref.ref(copies)

    def copy_rows(self, t: Time, rows: np.ndarray) -> Rows:
        """Copies what the agent sees at t in these rows."""
        return Rows(self._packing, {name: block[rows, t] for name, block in self.observation.items()})

    def target(self, t: int) -> Target:
        """Returns the target for the observations of all rows at t.

        An environment may write to it.
        """
        found = self._targets.get(t)
        if found is None:
            rows = Rows(self._packing, {name: block[:, t] for name, block in self.observation.items()})
            found = self._targets[t] = Target(rows, {key: array[:, t] for key, array in self.arrays.items()})
        return found

    def _row(self, t: int) -> tuple[dict[str, np.ndarray], dict[str, torch.Tensor]]:
        found = self._rows.get(t)
        if found is None:
            rows = {name: block[:, t] for name, block in self.observation.items()}
            found = self._rows[t] = rows, {key: column[:, t] for key, column in self.seen.items()}
        return found

    def _action_row(self, t: int) -> list[tuple[str, np.ndarray]]:
        found = self._action_rows.get(t)
        if found is None:
            found = self._action_rows[t] = [(key, array[:, t]) for key, array in self.action.items()]
        return found


class LazyCopies(Mapping[str, torch.Tensor]):
    """Copies of tensors, made at their first use.

    Copying all of them takes as long as a step of a small network.

    Args:
        names: of the tensors.
        copy: copies one; the originals must not change until `settle`, or until nobody holds this object.
    """

    __slots__ = ("__weakref__", "_copy", "_made", "_names")

    def __init__(self, names: Collection[str], copy: Callable[[str], torch.Tensor]) -> None:
        self._names, self._copy = names, copy
        self._made: dict[str, torch.Tensor] = {}

    def settle(self) -> None:
        """Makes the copies that are missing."""
        for key in self._names:
            self[key]

    def __getitem__(self, key: str) -> torch.Tensor:
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = self._copy(key)
        return found

    def __contains__(self, key: object) -> bool:
        return key in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def settle(copies: weakref.ref[LazyCopies]) -> None:
    """Settles copies if somebody still holds them."""
    if (held := copies()) is not None:
        held.settle()


def make_staged_steps(packing: Packing, n: int, n_timesteps: int, action: Mapping[str, TensorSpec]) -> Steps:
    """Makes steps of n environments in private memory, in which a timestep is contiguous."""

    def column(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.zeros((n_timesteps + 1, n + GAP, *shape), dtype)[:, :n].swapaxes(0, 1)

    observation = {name: column(shape, dtype) for name, (shape, dtype) in packing.blocks.items()}
    actions = {}
    for key, (shape, dtype) in action.items():
        actions[key] = tensor_of(column(shape, raw_dtype(dtype)), dtype)
    return Steps(packing, observation, actions, is_staged=True)


def check_output(tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, tuple[Any, torch.dtype]]) -> None:
    """Raises MissingKeyError or SpecError unless an agent's output has these keys, shapes and dtypes."""
    for key, (shape, dtype) in wanted.items():
        if key not in tensors:
            raise MissingKeyError(f"agent: no {key!r} in its output any more, there are {sorted(tensors)}")
        if tuple(tensors[key].shape) != tuple(shape) or tensors[key].dtype != dtype:
            raise SpecError(
                f"agent: output {key!r} is {show(tensors[key])}, expected {tuple(shape)} "
                f"{dtype_name(dtype)} as in its first step"
            )
    if unknown := set(tensors) - set(wanted):
        raise SpecError(f"agent: output {sorted(unknown)} was not in its first step")


class Mover:
    """Moves the steps of n environments to their slots, without the steps to remove."""

    def __init__(self, n: int) -> None:
        self._n = n
        # By number of timesteps and strides. Each rollout overwrites them, which is cheaper than allocating new ones.
        self._indexes: dict[tuple[int, ...], np.ndarray] = {}
        self._gaps: tuple[np.ndarray, np.ndarray] | None = None
        self._ready: set[tuple[int, ...]] = set()

    def begin(self, gaps: tuple[np.ndarray, np.ndarray] | None) -> None:
        """Starts a rollout.

        Args:
            gaps: rows, ascending, and places of the K steps to remove, int64 (K,) each; None if there are none. A place
                is the number of steps before it in its row that stay.
        """
        self._gaps = gaps
        self._ready.clear()

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """Moves the steps in one column.

        Args:
            source: (n, T, ...), of any strides.
            target: (n, T', ...); may be the source. Values after the last step of a row are undefined.
        """
        if not source.size or not target.size:
            return
        origin, to = view_entries(source), view_entries(target)
        if self._gaps is None:
            to[...] = origin[:, : to.shape[1]]
            return
        strides = [stride // origin.itemsize for stride in origin.strides]
        size = (origin.shape[0] - 1) * strides[0] + (origin.shape[1] - 1) * strides[1] + 1
        flat = np.lib.stride_tricks.as_strided(origin, (size,), (origin.itemsize,), writeable=False)
        index = self._index(to.shape[1], *strides)
        if source is target:
            to[...] = flat.take(index, mode="clip")
        else:
            flat.take(index, out=to, mode="clip")  # mode "raise" would write to a copy first

    def _index(self, n_timesteps: int, per_env: int, per_step: int) -> np.ndarray:
        """Computes the source of each step, int64 (n, n_timesteps).

        It is an index into a flat array with these strides.
        """
        # One index for both axes, because numpy is four times as fast with one as with two.
        key = n_timesteps, per_env, per_step
        index = self._indexes.get(key)
        if index is None:
            index = self._indexes[key] = np.empty((self._n, n_timesteps), np.int64)
        if key not in self._ready:
            assert self._gaps is not None
            rows, places = self._gaps
            index[...] = per_step
            index[:, 0] = np.arange(self._n) * per_env
            within = places < n_timesteps
            np.add.at(index.reshape(-1), (rows * n_timesteps + places)[within], per_step)
            index.cumsum(axis=1, out=index)
            self._ready.add(key)
        return index


def view_entries(array: np.ndarray) -> np.ndarray:
    """Views an array (n, T, ...) as opaque entries (n, T).

    numpy copies each of them at once.
    """
    if array.ndim > 2:
        array = array.reshape(*array.shape[:2], -1)
        return array.view(f"V{array.shape[2] * array.itemsize}")[..., 0]
    return array.view(f"V{array.itemsize}")
