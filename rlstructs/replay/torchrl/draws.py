"""From a request to a batch: draw, read, hand over, transform."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlstructs.replay.array_dict import ArrayDict
from rlstructs.replay.drawing import Selection
from rlstructs.replay.given import is_mapping
from rlstructs.replay.torchrl import slice_marks, tensordicts
from rlstructs.replay.torchrl.part import joined
from rlstructs.replay.torchrl.prefetch import Place
from rlstructs.replay.torchrl.slice_samplers import SliceSampler
from rlstructs.structures.dict_tensor import DictTensor

if TYPE_CHECKING:
    from rlstructs.replay.torchrl.buffer import DictTensorReplayBuffer

# How many draws, of how many rows each, and whether the batch holds what is known of them.
Request = tuple[int, int, bool]


class Draws:
    """The draws of a buffer; everything but `finish` needs its lock.

    Args:
        buffer: whose. What is drawn goes through the sampler, the columns and the transforms that it has now,
            whatever another thread exchanges before it is handed out.
    """

    def __init__(self, buffer: DictTensorReplayBuffer) -> None:
        self._buffer = buffer
        self._sampler, self._transform = buffer._sampler, buffer._transform
        self._specs, self._axes, self._export = buffer._specs, buffer._axes, buffer._export

    def place(self) -> Place:
        """Where the stream of draws stands."""
        buffer = self._buffer
        return Place(buffer._rng.bit_generator.state, self._sampler.position())

    def go_to(self, place: Place) -> None:
        """Has the stream of draws go on from such a place."""
        self._buffer._rng.bit_generator.state = place.generator
        self._sampler.go_to(place.position)

    def draw(self, request: Request, rng: np.random.Generator | None) -> Selection:
        """Which rows make such a batch; from the buffer's own generator if None is given."""
        buffer = self._buffer
        return self._sampler.draw(buffer._storage, *request[:2], buffer._rng if rng is None else rng)

    def drawn(self, picked: Selection) -> None:
        """Notes that these are handed out."""
        self._sampler.drawn(picked)

    def read(self, picked: Selection) -> dict[str, Any]:
        """What the columns hold for them, name -> `(n, length, ...)`, private memory."""
        buffer = self._buffer
        return buffer._reading.read(buffer._storage, picked.span, list(buffer._specs), picked.rows)

    def finish(self, request: Request, picked: Selection, arrays: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The batch, and what is known of its rows."""
        buffer, (*_, with_info) = self._buffer, request
        sampler, specs, axes = self._sampler, self._specs, self._axes
        values = {name: sampler.flat(picked, array) for name, array in arrays.items()}
        n_axes = 1 if axes is None else axes[""]
        if n_axes > 1:  # of a batch: a stack is in front of what an observation has behind them
            values = {k: _moved(v, n_axes) if buffer._reading.stacks(k) else v for k, v in values.items()}
        known: dict[str, Any] = dict(sampler.info(picked))
        if isinstance(sampler, SliceSampler):
            known |= slice_marks.put(values, picked, sampler, specs, () if axes is None else (1,))
        if with_info and buffer._collate_fn is None:
            batch = self._export(values | known, specs)
            info = Known((name, batch[name]) for name in known)
            batch = tensordicts.as_given(batch, axes)
        else:
            info = Known(self._export(known, specs).items())
            batch = tensordicts.as_given(self._export(values, specs), axes)
            if buffer._collate_fn is not None:
                batch = _with(_collate(buffer._collate_fn(batch)), info if with_info else {})
        if len(self._transform):
            batch = self._transform(batch)
            if with_info:  # of a transform that picks columns, too
                batch = _with(batch, {name: value for name, value in info.items() if not _has(batch, name)})
        return (batch.pin_memory() if buffer._pin_memory else batch), info


class Known(dict[str, Any]):
    """What is known of rows, by name; ("next", "truncated") stands for `next/truncated`, as in a tensordict."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(joined(key))

    def __contains__(self, key: object) -> bool:
        return super().__contains__(joined(key))

    def get(self, key: Any, default: Any = None) -> Any:
        """What there is under a name, or the default."""
        return super().get(joined(key), default)


def _moved(array: Any, axis: int) -> Any:
    """An array whose axis 1 has become this one."""
    return array.movedim(1, axis) if isinstance(array, torch.Tensor) else np.moveaxis(array, 1, axis)


def _collate(batch: Any) -> Any:
    if not is_mapping(batch):
        raise TypeError(f"collate_fn must give a batch with keys, got {type(batch).__name__}")
    return batch


def _with(batch: Any, info: dict[str, Any]) -> Any:
    """A batch with more columns, unless it has other rows by now."""
    if not info or len(batch) != len(next(iter(info.values()))):
        return batch
    if isinstance(batch, DictTensor):
        return DictTensor({**dict(batch.items()), **info})
    if tensordicts.is_one(batch):  # which stays one
        for name, value in info.items():
            tensordicts.put(batch, name, value)
        return batch
    return ArrayDict({**{key: batch[key] for key in batch.keys()}, **info})  # noqa: SIM118


def _has(batch: Any, name: str) -> bool:
    return tensordicts.has(batch, name) if tensordicts.is_one(batch) else name in batch
