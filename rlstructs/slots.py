"""Slots: where a rollout is written. Typed columns over one shared arena, one slot per environment.

    observation     (N, T+1, ...)   row t is what the agent saw at t; row t+1 is also what followed
    _observation    (N, T, ...)     only where an environment was reset in its step: the true final one
    action/k        (N, T, ...)     what the agent put out
    agent_state/k, agent_info/k, env_info/k   (N, ...)   as they were before the first step
    reset           (N, T)          where row t of `_observation` counts
    lengths         (N,)

An observation is stored once, in a column for each of its blocks (`rows.py`). Pages of `_observation`
cost memory only where an episode ended.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from mmap import mmap
from typing import Any

import numpy as np
import torch

from rlstructs.debug import poison
from rlstructs.errors import MissingKeyError, SpecError, StateError
from rlstructs.rows import Packing, Rows, TensorSpec, as_array, numpy_specs
from rlstructs.structures.base import show
from rlstructs.structures.dict_tensor import DictTensor

STATE = "agent_state/"

# The bits of bfloat16's NaN.
BFLOAT16_NAN = 0x7FC0
# Bytes: what a cache line, jax and SIMD loads want.
ALIGNMENT = 64

Specs = Mapping[str, TensorSpec]


@dataclass(frozen=True)
class Field:
    """One column in the arena.

    Attributes:
        name: what it is called.
        shape: of the whole column.
        dtype: torch's; a record of observations is uint8, with an axis for its bytes.
        offset: bytes from the start of the arena.
        sparse: whether most of its pages are never touched.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    sparse: bool = False

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Which columns there are, and where.

    Attributes:
        n_slots: N.
        n_timesteps: T.
        observation, action: what a step writes, by name without prefix.
        info: what a rollout writes once, by name with prefix.
    """

    n_slots: int
    n_timesteps: int
    observation: Specs
    action: Specs
    info: Specs

    def fields(self) -> list[Field]:
        """Every column, at its place."""
        fields: list[Field] = []
        offset = 0
        for name, shape, dtype, sparse in self._columns():
            field = Field(name, (self.n_slots, *shape), dtype, offset, sparse)
            fields.append(field)
            offset += -(-field.nbytes // ALIGNMENT) * ALIGNMENT
        return fields

    def packing(self) -> Packing:
        """How observations lie in blocks."""
        return Packing(numpy_specs(self.observation))

    def _blocks(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        blocks = self.packing().blocks.items()
        return [
            (name, *(((*shape, dtype.itemsize), torch.uint8) if dtype.kind == "V" else self.observation[name]))
            for name, (shape, dtype) in blocks
        ]

    def _columns(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, bool]]:
        n_timesteps = self.n_timesteps
        for name, shape, dtype in self._blocks():
            yield f"observation/{name}", (n_timesteps + 1, *shape), dtype, False
        for key, (shape, dtype) in self.action.items():
            yield f"action/{key}", (n_timesteps, *shape), dtype, False
        for name, (shape, dtype) in self.info.items():
            yield name, shape, dtype, False
        yield "reset", (n_timesteps,), torch.bool, False
        yield "lengths", (), torch.int64, False
        for name, shape, dtype in self._blocks():
            yield f"_observation/{name}", (n_timesteps, *shape), dtype, True

    @property
    def reserved_nbytes(self) -> int:
        """Address space, in bytes."""
        last = self.fields()[-1]
        return last.offset + last.nbytes

    @property
    def nbytes(self) -> int:
        """Memory that a rollout takes, in bytes, without the sparse columns."""
        return sum(field.nbytes for field in self.fields() if not field.sparse)


class Lent(Mapping[str, torch.Tensor]):
    """Tensors by name.

    Args:
        views: those that lie where they were written.
        copies: those that cannot, or what makes them when they are first asked for.
    """

    def __init__(
        self,
        views: Mapping[str, torch.Tensor],
        copies: Mapping[str, torch.Tensor | Callable[[], torch.Tensor]],
    ) -> None:
        self.views, self.copies = views, dict(copies)

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.views:
            return self.views[key]
        found = self.copies[key]
        if not isinstance(found, torch.Tensor):
            found = self.copies[key] = found()
        return found

    def __contains__(self, key: object) -> bool:
        return key in self.views or key in self.copies

    def __iter__(self) -> Iterator[str]:
        return itertools.chain(self.views, self.copies)

    def __len__(self) -> int:
        return len(self.views) + len(self.copies)

    def with_views(self, views: Mapping[str, torch.Tensor]) -> Lent:
        """The same with others in the place of its views, and the same copies."""
        other = Lent(views, {})
        other.copies = self.copies
        return other

    def close(self, why: str) -> None:
        """The slots will be written again: what was not copied can no longer be, and autograd hears of it."""
        for view in self.views.values():
            torch.autograd.graph.increment_version(view)
        for key, copy in self.copies.items():
            if not isinstance(copy, torch.Tensor):
                self.copies[key] = functools.partial(_refuse, why)


def _refuse(why: str) -> torch.Tensor:
    raise StateError(why)


class Slots:
    """The slots `first` to `first + n - 1`, over the bytes of an arena.

    One writer, which is the rollout; a reader when it is over.
    """

    def __init__(
        self, layout: Layout, buffer: mmap | memoryview, first: int = 0, n: int | None = None, poisons: bool = False
    ) -> None:
        self.layout, self.first = layout, first
        self._poisons = poisons
        self.n = layout.n_slots if n is None else n
        self._columns = {
            field.name: _column(field, buffer)[first : first + self.n] for field in layout.fields()
        }
        self.lengths: np.ndarray = self._columns["lengths"].numpy()
        self._reset: np.ndarray = self._columns["reset"].numpy()
        self._packing = layout.packing()
        self._observation, self._final = self._blocks("observation/"), self._blocks("_observation/")
        self._arrays = {key: self._packing.view(self._observation, key) for key in layout.observation}
        self._seen = {key: torch.from_numpy(view) for key, view in self._arrays.items()}
        self._action = {key: self._columns[f"action/{key}"] for key in layout.action}
        self._action_arrays = {key: _raw(column) for key, column in self._action.items()}
        # What is handed out: where it lies, and at which timestep it begins.
        self._sources = {f"observation/{key}": (array, 0) for key, array in self._arrays.items()}
        self._sources |= {f"action/{key}": (array, 0) for key, array in self._action_arrays.items()}
        self._sources |= {f"_observation/{key}": (array, 1) for key, array in self._arrays.items()}
        specs = {"observation": layout.observation, "action": layout.action, "_observation": layout.observation}
        #: Of what is handed out: shapes without the first two axes, and dtypes.
        self.specs = {name: specs[name.partition("/")[0]][name.partition("/")[2]] for name in self._sources}
        self._states = {key.removeprefix(STATE): spec for key, spec in layout.info.items() if key.startswith(STATE)}
        self._n_actions = len(self._action)
        # Views of one timestep, made when first needed and kept: making them costs more than a write.
        self._rows: dict[int, tuple[list[tuple[str, np.ndarray]], dict[str, torch.Tensor]]] = {}
        self._action_rows: dict[int, list[tuple[str, np.ndarray]]] = {}

    def column(self, name: str) -> torch.Tensor:
        """A column whole, a view."""
        return self._columns[name]

    def info_of(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """The `agent_info/`, `env_info/` and `agent_state/` of these rows, private memory."""
        return {name: _rows(self._columns[name], rows) for name in self.layout.info}

    def info(self, prefix: str) -> DictTensor:
        """The `agent_info/`, `env_info/` or `agent_state/` rows, views, without their prefix."""
        return DictTensor.trusted(self._columns).truncate_key(prefix)

    def begin(self, rows: np.ndarray | None, state: DictTensor) -> None:
        """Starts a rollout of these rows (None: all), whose agents are in this state."""
        self.empty()
        self.check_state(state, self.n if rows is None else len(rows))
        for key in self._states:
            _put(self._columns[STATE + key], slice(None) if rows is None else rows, state[key])

    def check_state(self, state: DictTensor, n: int) -> None:
        """Raises unless an agent's state has the keys, dtypes and shapes of its first one, in n rows."""
        if not isinstance(state, DictTensor):
            raise TypeError(f"agent: its next state must be a DictTensor, got {type(state).__name__}")
        for key, (shape, dtype) in self._states.items():
            if key not in state:
                raise MissingKeyError(f"agent: no {key!r} in its state, there are {sorted(state.keys())}")
            if tuple(state[key].shape) != (n, *shape) or state[key].dtype != dtype:
                raise SpecError(f"agent: state {key!r} is {show(state[key])}, expected {(n, *shape)} {_short(dtype)}")
        if unknown := set(state.keys()) - set(self._states):
            raise SpecError(f"agent: state {sorted(unknown)} was not in its first one")

    def empty(self, rows: np.ndarray | None = None) -> None:
        """Leaves nothing of a rollout of these rows (None: all) that was broken off."""
        index = slice(None) if rows is None else rows
        self.lengths[index] = 0
        self._reset[index] = False

    def write_observation(self, t: int, rows: np.ndarray | None, seen: Rows) -> None:
        """Writes what the agent sees at t, for these rows (None: all)."""
        if rows is None:
            for name, row in self._row(t)[0]:
                row[...] = seen.blocks[name]
        else:
            for name, block in self._observation.items():
                block[rows, t] = seen.blocks[name]

    def write_reset(self, t: int, rows: np.ndarray, finals: Rows, fresh: Rows) -> None:
        """Replaces rows that `write_observation` wrote for t + 1: there was a reset in step t."""
        # Mostly there is one; a slice is then the faster index by far.
        at = slice(rows[0], rows[0] + 1) if rows.size == 1 else rows
        self._reset[at, t] = True
        for name, block in self._observation.items():
            self._final[name][at, t] = finals.blocks[name]
            block[at, t + 1] = fresh.blocks[name]

    def drop(self, idle: list[tuple[int, np.ndarray]]) -> None:
        """Leaves out steps that were none, when the rollout is over; what came after them moves up.

        Args:
            idle: timesteps, and for each the rows (k,) in which an environment only started an episode. What was
                seen before such a step is the final observation of the episode before.
        """
        n_timesteps = self.layout.n_timesteps
        times = np.repeat([t for t, _ in idle], [rows.size for _, rows in idle])
        rows = np.concatenate([rows for _, rows in idle])
        kept = np.zeros((self.n, n_timesteps + 1), bool)
        kept[:, :-1] = np.arange(n_timesteps) < self.lengths[:, None]
        kept[rows, times] = self._reset[rows, times] = False
        rows, times = rows[times > 0], times[times > 0]
        self._reset[rows, times - 1] = True
        for name, block in self._observation.items():
            self._final[name][rows, times - 1] = block[rows, times]
        self._move_finals(kept)
        _move(self._action_arrays.values(), kept[:, :-1])
        self.lengths[:] = kept.sum(axis=1)
        # What followed the last step goes with it.
        some = np.flatnonzero(self.lengths)
        last = n_timesteps - 1 - kept[some, -2::-1].argmax(axis=1)
        kept[some, last + 1] = True
        _move(self._observation.values(), kept)

    def _move_finals(self, kept: np.ndarray) -> None:
        """Has final observations follow their steps, which move as `_move` has them."""
        at, times = np.nonzero(self._reset)
        finals = {name: block[at, times] for name, block in self._final.items()}
        self._reset[...] = False
        times = times - (~kept).cumsum(axis=1, dtype=np.int32)[at, times]
        self._reset[at, times] = True
        for name, block in self._final.items():
            block[at, times] = finals[name]

    def write_action(self, t: int, rows: np.ndarray | None, output: DictTensor) -> None:
        """Writes the agent's output at t, for these rows (None: all).

        Raises:
            MissingKeyError, SpecError: it is not as the first one was.
        """
        if not isinstance(output, DictTensor):
            raise TypeError(f"agent: its output must be a DictTensor, got {type(output).__name__}")
        tensors = output._tensors
        if rows is not None or len(tensors) != self._n_actions:
            self._write_action_slowly(t, rows, tensors)
            return
        for key, row in self._action_row(t):
            tensor = tensors.get(key)
            array = None if tensor is None else _raw(tensor)
            if array is None or array.shape != row.shape or array.dtype != row.dtype:
                self._write_action_slowly(t, rows, tensors)
                return
            row[...] = array

    def _write_action_slowly(self, t: int, rows: np.ndarray | None, tensors: Mapping[str, torch.Tensor]) -> None:
        n = self.n if rows is None else len(rows)
        check_output(tensors, {key: ((n, *c.shape[2:]), c.dtype) for key, c in self._action.items()})
        for key, column in self._action.items():
            _put(column, (slice(None) if rows is None else rows, t), tensors[key])

    def observation(self, t: int) -> DictTensor:
        """What the agent sees at t, every row, views."""
        return DictTensor.trusted(self._row(t)[1])  # an object of its own: the agent may `set` keys

    def rows(self, t: int, rows: np.ndarray) -> Rows:
        """What the agent sees at t, these rows, private memory."""
        return Rows(self._packing, {name: block[rows, t] for name, block in self._observation.items()})

    def release(self, rows: np.ndarray | None = None) -> None:
        """Nobody reads these slots (None: all) any more until they are written again: poisons them, if it is to."""
        if not self._poisons:
            return
        for name, (array, start) in self._sources.items():
            if not start:  # what follows is what is seen next
                array[slice(None) if rows is None else rows] = self._nothing(name)

    def read(
        self, rows: np.ndarray | None, n_timesteps: int, out: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Steps 0 to `n_timesteps - 1` of these rows (None: all), private memory, zeros or poison in the padding.

        Args:
            rows: of which slots.
            n_timesteps: how many steps.
            out: tensors to be filled, of the names, shapes and dtypes of what is returned; None for new ones.

        Returns:
            `observation/k`, `action/k`, `_observation/k` -> (B, n_timesteps, ...).
        """
        lengths = self.lengths if rows is None else self.lengths[rows]
        padding = np.arange(n_timesteps) >= lengths[:, None]
        padded = bool(padding.any())

        def take(name: str, array: np.ndarray, start: int) -> np.ndarray:
            steps = array[:, start : start + n_timesteps]
            # numpy, not torch: the threads of a parallel copy would spin on the workers' cores for
            # milliseconds after it, just when the next rollout begins.
            if out is not None:
                torch.autograd.graph.increment_version(out[name])
                taken = _raw(out[name])
                taken[...] = steps if rows is None else steps[rows]
            else:
                taken = np.array(steps, order="C") if rows is None else steps[rows]
            if padded:
                taken[padding] = self._nothing(name)
            return taken

        taken = {name: take(name, *source) for name, source in self._sources.items()}
        self._put_finals(taken, rows, n_timesteps)
        return {name: _tensor(array, self.specs[name][1]) for name, array in taken.items()}

    def lend(self, rows: np.ndarray | None, n_timesteps: int) -> Lent:
        """As `read`, but views wherever they can be; what lies in the padding is of no meaning."""
        if rows is not None:
            return Lent({}, self.read(rows, n_timesteps))
        views = {f"observation/{key}": column[:, :n_timesteps] for key, column in self._seen.items()}
        views |= {f"action/{key}": column[:, :n_timesteps] for key, column in self._action.items()}
        if not self._reset[:, :n_timesteps].any():
            following = {f"_observation/{key}": column[:, 1 : n_timesteps + 1] for key, column in self._seen.items()}
            return Lent(views | following, {})
        return Lent(
            views, {f"_observation/{key}": functools.partial(self._patched, key, n_timesteps) for key in self._seen}
        )

    def _patched(self, key: str, n_timesteps: int) -> torch.Tensor:
        """`_observation/key` of every row, private memory."""
        following = np.array(self._arrays[key][:, 1 : n_timesteps + 1], order="C")
        at = np.nonzero(self._reset[:, :n_timesteps])
        following[at] = self._packing.view(self._final, key)[at]
        return torch.from_numpy(following)

    def _nothing(self, name: str) -> Any:
        """What stands where there was no step."""
        if not self._poisons:
            return 0
        return BFLOAT16_NAN if self.specs[name][1] is torch.bfloat16 else poison(self._sources[name][0].dtype)

    def _put_finals(self, taken: dict[str, np.ndarray], rows: np.ndarray | None, n_timesteps: int) -> None:
        reset = self._reset if rows is None else self._reset[rows]
        at, times = np.nonzero(reset[:, :n_timesteps])
        if not at.size:
            return
        slots = at if rows is None else rows[at]
        finals = Rows(self._packing, {name: block[slots, times] for name, block in self._final.items()})
        for key, final in finals.arrays().items():
            taken[f"_observation/{key}"][at, times] = final

    def _blocks(self, prefix: str) -> dict[str, np.ndarray]:
        found = {}
        for name, (_, dtype) in self._packing.blocks.items():
            block = self._columns[prefix + name].numpy()
            found[name] = block.view(dtype)[..., 0] if dtype.kind == "V" else block
        return found

    def _row(self, t: int) -> tuple[list[tuple[str, np.ndarray]], dict[str, torch.Tensor]]:
        found = self._rows.get(t)
        if found is None:
            rows = [(name, block[:, t]) for name, block in self._observation.items()]
            found = self._rows[t] = rows, {key: column[:, t] for key, column in self._seen.items()}
        return found

    def _action_row(self, t: int) -> list[tuple[str, np.ndarray]]:
        found = self._action_rows.get(t)
        if found is None:
            found = self._action_rows[t] = [(key, array[:, t]) for key, array in self._action_arrays.items()]
        return found


def check_output(tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, tuple[Any, torch.dtype]]) -> None:
    """Raises unless an agent's output has these keys, of these shapes and dtypes."""
    for key, (shape, dtype) in wanted.items():
        if key not in tensors:
            raise MissingKeyError(f"agent: no {key!r} in its output any more, there are {sorted(tensors)}")
        if tuple(tensors[key].shape) != tuple(shape) or tensors[key].dtype != dtype:
            raise SpecError(
                f"agent: output {key!r} is {show(tensors[key])}, expected {tuple(shape)} "
                f"{_short(dtype)} as in its first step"
            )
    if unknown := set(tensors) - set(wanted):
        raise SpecError(f"agent: output {sorted(unknown)} was not in its first step")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _move(arrays: Iterable[np.ndarray], kept: np.ndarray) -> None:
    """Moves the kept entries (n, T) of arrays (n, T, ...) to the beginning of their rows."""
    front = np.arange(kept.shape[1]) < kept.sum(axis=1)[:, None]
    for array in arrays:
        # As opaque bytes, one for each entry: then numpy copies whole runs of them.
        if array.size:
            entries = array.view()
            entries.shape = (*kept.shape, -1)
            entries = entries.view(f"V{int(entries.shape[2]) * entries.itemsize}")[..., 0]
            entries[front] = entries[kept]


def _raw(tensor: torch.Tensor) -> np.ndarray:
    """The same memory as a numpy array: torch cannot index every dtype, and numpy has not every dtype."""
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return as_array(tensor)


def _rows(column: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    return _tensor(_raw(column)[rows], column.dtype)


def _tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """The same memory as a tensor of the dtype of which `_raw` gave the array."""
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype is dtype else tensor.view(dtype)


def _put(column: torch.Tensor, index: Any, values: torch.Tensor) -> None:
    _raw(column)[index] = _raw(values)


def _column(field: Field, buffer: mmap | memoryview) -> torch.Tensor:
    count = int(np.prod(field.shape, dtype=np.int64))
    if not count:
        return torch.zeros(field.shape, dtype=field.dtype)
    # frombuffer in bytes, not in the dtype: numpy has no bfloat16.
    raw = np.frombuffer(buffer, np.uint8, field.nbytes, field.offset)
    return torch.from_numpy(raw).view(field.dtype).view(field.shape)
