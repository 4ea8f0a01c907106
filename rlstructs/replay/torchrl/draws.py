"""Makes a batch: draws rows, reads them, hands them over and transforms them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlstructs.replay.array_dict import ArrayDict
from rlstructs.replay.given import is_mapping
from rlstructs.replay.span import Selection
from rlstructs.replay.torchrl import slice_marks, tensordicts
from rlstructs.replay.torchrl.assembly import Assembly
from rlstructs.replay.torchrl.part import join_key
from rlstructs.replay.torchrl.samplers import WEIGHT, Sampler
from rlstructs.replay.torchrl.slice_samplers import INSIDE, SliceSampler
from rlstructs.structures.dict_tensor import DictTensor

# Number of draws, number of rows of each, and whether the batch holds what is known of its rows.
Request = tuple[int, int, bool]
# A batch, and what is known of its rows.
Made = tuple[Any, dict[str, Any]]


@dataclass
class Place:
    """A place in the stream of draws.

    Attributes:
        generator: state of the bit generator.
        position: of the sampler.
    """

    generator: Mapping[str, Any]
    position: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Place):
            return NotImplemented
        return bool(self.position == other.position and _comparable(self.generator) == _comparable(other.generator))


class Draws:
    """Draws rows and makes batches of them; only `finish` may be called without the lock.

    It keeps the sampler, the columns and the transforms that the buffer has now: another thread may exchange them
    before a batch is finished.

    Args:
        parts: of the buffer.
        request: what a batch is made of.
        collate_fn: applied to a batch before all transforms; None for nothing.
        pin_memory: whether batches are in page-locked memory.
    """

    def __init__(
        self, parts: Assembly, request: Request, collate_fn: Callable[[Any], Any] | None, pin_memory: bool
    ) -> None:
        self.lock, self._store, self._reading = parts.lock, parts.store, parts.reading
        self._rng = parts.stream.generator
        self.request, self._collate_fn, self._pin_memory = request, collate_fn, pin_memory
        self.sampler, self._transform = parts.sampler, parts.transform
        self._specs, self._axes, self._export = parts.specs, parts.axes, parts.export
        # Whether each draw is one row of a batch.
        self._is_flat = type(parts.sampler).flat is Sampler.flat

    def place(self) -> Place:
        """The place in the stream of draws."""
        return Place(self._rng.bit_generator.state, self.sampler.position())

    def go_to(self, place: Place) -> None:
        """Continues the stream of draws at a place."""
        self._rng.bit_generator.state = place.generator
        self.sampler.go_to(place.position)

    def draw(self) -> Selection:
        """Draws the rows of a batch."""
        if not self.request[0]:
            rows = np.zeros((0, 1), np.int64)
            fields = {INSIDE: np.zeros((0, 1), bool), WEIGHT: np.zeros(0, np.float32)}
            return Selection(rows, self._store.span(), fields)
        return self.sampler.draw(self._store, *self.request[:2], self._rng)

    def read(self, picked: Selection) -> dict[str, Any]:
        """The columns of drawn rows, name -> `(n, length, ...)`, or `(n, ...)` of single rows, private memory."""
        rows = picked.rows[:, 0] if self._is_flat else picked.rows
        return self._reading.read(self._store, picked.span, list(self._specs), rows)

    def finish(self, picked: Selection, arrays: dict[str, Any]) -> Made:
        """The batch, and what is known of its rows. Several threads may call this at once."""
        with_info, sampler, specs, axes = self.request[2], self.sampler, self._specs, self._axes
        values = arrays
        if not self._is_flat:
            values = {name: sampler.flat(picked, array) for name, array in arrays.items()}
        n_axes = 1 if axes is None else axes[""]
        if n_axes > 1:  # a stack comes behind all axes of the batch
            values = {k: _move_stack(v, n_axes) if self._reading.stacks(k) else v for k, v in values.items()}
        known: dict[str, Any] = dict(sampler.info(picked))
        if isinstance(sampler, SliceSampler):
            known |= slice_marks.put(values, picked, sampler, specs, () if axes is None else (1,))
        if with_info and self._collate_fn is None:
            batch = self._export(values | known, specs)
            info = Known((name, batch[name]) for name in known)
            batch = tensordicts.restore_form(batch, axes)
        else:
            info = Known(self._export(known, specs).items())
            batch = tensordicts.restore_form(self._export(values, specs), axes)
            if self._collate_fn is not None:
                batch = self._collate_fn(batch)
                if not is_mapping(batch):
                    raise TypeError(f"collate_fn must return a batch with keys, got {type(batch).__name__}")
                batch = _add_columns(batch, info if with_info else {})
        if len(self._transform):
            batch = self._transform(batch)
            if with_info:  # a transform may have dropped columns
                has = tensordicts.has if tensordicts.is_tensordict(batch) else operator.contains
                batch = _add_columns(batch, {name: value for name, value in info.items() if not has(batch, name)})
        return (batch.pin_memory() if self._pin_memory else batch), info


class Known(dict[str, Any]):
    """What is known of rows, by name; ("next", "truncated") stands for `next/truncated`, as in a tensordict."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(_join_names(key))

    def __contains__(self, key: object) -> bool:
        return super().__contains__(_join_names(key))

    def get(self, key: Any, default: Any = None) -> Any:
        """The value under a name, or the default."""
        return super().get(_join_names(key), default)


def _join_names(key: Any) -> Any:
    """Converts a key of torchrl to the name of a column, and leaves what is none, as that of a dict."""
    is_path = isinstance(key, tuple) and key and all(isinstance(each, str) for each in key)
    return join_key(key) if is_path else key


def _move_stack(array: Any, axis: int) -> Any:
    """Moves axis 1 of an array to this place."""
    return array.movedim(1, axis) if isinstance(array, torch.Tensor) else np.moveaxis(array, 1, axis)


def _add_columns(batch: Any, info: dict[str, Any]) -> Any:
    """Adds columns to a batch, unless a transform has changed its number of rows."""
    if not info or len(batch) != len(next(iter(info.values()))):
        return batch
    if isinstance(batch, DictTensor):
        return DictTensor({**dict(batch.items()), **info})
    if tensordicts.is_tensordict(batch):  # which stays one
        for name, value in info.items():
            tensordicts.put(batch, name, value)
        return batch
    return ArrayDict({**{key: batch[key] for key in batch.keys()}, **info})  # noqa: SIM118


def _comparable(value: Any) -> Any:
    """Converts the state of a bit generator to values that `==` compares."""
    if isinstance(value, Mapping):
        return {name: _comparable(each) for name, each in value.items()}
    return value.tobytes() if isinstance(value, np.ndarray) else value
