"""Buffers of several lanes, one for each environment."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlstructs.checks import check_count, check_size
from rlstructs.errors import SpecError
from rlstructs.public_names import set_module
from rlstructs.replay.snapshot import AnySnapshot
from rlstructs.replay.tianshou.reads import EpisodeReads
from rlstructs.replay.tianshou.replay_buffer import ReplayBuffer
from rlstructs.replay.tianshou.ring_view import RingView
from rlstructs.replay.values import host_array


@set_module("rlstructs.replay")
class VectorReplayBuffer(ReplayBuffer):
    """The newest transitions of several environments, each in a ring of its own.

    Row ids are those of all rings one behind the other, and in `[0, maxsize)`. Samples are uniform over all rows.

    Args:
        total_size: how many, of all environments; rounded up to a multiple of `buffer_num`.
        buffer_num: environments.
        settings: as of `ReplayBuffer`.

    Raises:
        TypeError, SpecError: an argument is not what is needed.

    Example:
        >>> buffer = VectorReplayBuffer(total_size=10, buffer_num=2)
        >>> batch = {"obs": [1, 2], "act": [0, 0], "rew": [1, 1], "terminated": [0, 1], "truncated": [0, 0]}
        >>> buffer.add(batch)  # where they lie, return and length of what has ended, where it began
        (array([0, 5]), array([0., 1.]), array([0, 1]), array([0, 5]))
        >>> _ = buffer.add({name: [value[1]] for name, value in batch.items()}, buffer_ids=[1])
        >>> buffer.sample_indices(0), buffer.unfinished_index(), buffer.subbuffer_edges
        (array([0, 5, 6]), array([0]), array([ 0,  5, 10]))
    """

    _is_stacked = True

    def __init__(self, total_size: int, buffer_num: int, *args: Any, **settings: Any) -> None:
        self._n_lanes = check_count("buffer_num", buffer_num)
        super().__init__(-(-check_size("total_size", total_size) // self._n_lanes), *args, **settings)

    @property
    def buffer_num(self) -> int:
        """How many rings there are."""
        return self._n_lanes

    @property
    def buffers(self) -> np.ndarray:
        """The rings as views, an array of objects: each is read as a `ReplayBuffer`, with row ids of its own."""
        views = np.empty(self._n_lanes, object)
        for lane in range(self._n_lanes):
            views[lane] = RingView(self, lane, int(self.subbuffer_edges[-1]) - (self._n_lanes - lane) * self._lane_size)
        return views

    def update(self, buffer: EpisodeReads) -> np.ndarray:
        """Not for several environments: whose would the rows be?"""
        raise NotImplementedError(f"{type(self).__name__} cannot be updated; add to one of its rings")

    @classmethod
    def from_data(cls, *args: Any, **settings: Any) -> Any:
        """Not for several environments: whose would the rows be?"""
        raise NotImplementedError(f"{cls.__name__}.from_data: there is no order of several environments' rows")

    def _choose_lanes(self, buffer_ids: Any) -> tuple[np.ndarray, int]:
        if buffer_ids is None:
            return np.arange(self._n_lanes), 1
        lanes = host_array("buffer_ids", buffer_ids)
        if lanes.ndim != 1 or (lanes.dtype.kind not in "iu" and lanes.size):
            raise SpecError(f"buffer_ids must be a list of ints, got {buffer_ids!r}")
        lanes = lanes.astype(np.int64)
        if lanes.size and not (lanes.min() >= 0 and lanes.max() < self._n_lanes):
            wrong = lanes[(lanes < 0) | (lanes >= self._n_lanes)][0]
            raise IndexError(f"buffer_ids: {wrong} is not in [0, {self._n_lanes})")
        return lanes, 1

    @property
    def _takes_any_environment(self) -> bool:
        return False

    def _index_end(self, rows: AnySnapshot) -> int:
        return self.maxsize

    def _settings(self) -> dict[str, Any]:
        settings = super()._settings()
        return {"total_size": settings.pop("size") * self._n_lanes, "buffer_num": self._n_lanes, **settings}
