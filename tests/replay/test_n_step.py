"""Every surface reads n-step returns alike: up to the end of the episode or the newest row, and no further."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from frameworks import EVERY_KIND, host, make
from surfaces import TIANSHOU, TORCHRL

from rlstructs import DictTensor, TemporalDictTensor, Trajectories
from rlstructs.replay import (
    CachedReplayBuffer,
    ChunkReplayBuffer,
    DictTensorPrioritizedReplayBuffer,
    DictTensorReplayBuffer,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    VectorReplayBuffer,
)
from rlstructs.replay.intake.trajectories import NAMES

N, GAMMA, CAPACITY, N_LANES = 3, 0.5, 12, 2
HOW = {"n_step": N, "gamma": GAMMA}


@dataclass(frozen=True)
class Surface:
    """A class of memories.

    Attributes:
        make: makes one with `CAPACITY` rows in each lane.
        names: column -> key of trajectories.
        draw: draws a number of rows: their observations, rewards, what came after them, and discounts.
    """

    make: Callable[[], Any]
    names: dict[str, str]
    draw: Callable[[Any, int], tuple[Any, Any, Any, Any]]


def _memory(kind):
    def draw(made, n):
        names = ["observations", "rewards", "next_observations"]
        [batch] = made.sample(names, batch_size=n, **HOW)
        return *map(host, batch), host(made.get_sampling_discounts())

    return Surface(lambda: make(kind, CAPACITY, N_LANES, cls="PrioritizedMemory"), dict(NAMES), draw)


def _tianshou(make_buffer):
    def draw(made, n):
        batch, _ = made.sample(n)
        return batch.obs, batch.rew, batch.obs_next, batch.discount

    return Surface(make_buffer, {**TIANSHOU, "obs_next": "_observation/frame"}, draw)


def _chunks(n_lanes, mode):
    def draw(made, n):
        data = made.sample(n, 1, mode).data
        return data["observations"], data["rewards"], data["next_observations"], data["discount"]

    return Surface(
        lambda: ChunkReplayBuffer(CAPACITY * n_lanes, 0, n_lanes=n_lanes, enable_prioritized=True, **HOW),
        dict(NAMES), draw,
    )  # fmt: skip


def _torchrl(cls, **settings):
    def draw(made, n):
        batch = made.sample(n)
        return tuple(batch[name].numpy() for name in ("obs", "next/reward", "next/obs", "discount"))

    names = {**TORCHRL, "next/obs": "_observation/frame"}
    return Surface(lambda: cls(storage=ListStorage(CAPACITY), generator=0, **HOW, **settings), names, draw)


PER = {"alpha": 0.6, "beta": 0.4}
BUFFERS = {
    "ReplayBuffer": _tianshou(lambda: ReplayBuffer(CAPACITY, **HOW)),
    "PrioritizedReplayBuffer": _tianshou(lambda: PrioritizedReplayBuffer(CAPACITY, **PER, **HOW)),
    "VectorReplayBuffer": _tianshou(lambda: VectorReplayBuffer(CAPACITY * N_LANES, N_LANES, **HOW)),
    "PrioritizedVectorReplayBuffer": _tianshou(
        lambda: PrioritizedVectorReplayBuffer(CAPACITY * N_LANES, N_LANES, **PER, **HOW)
    ),
    "CachedReplayBuffer": _tianshou(lambda: CachedReplayBuffer(ReplayBuffer(2 * CAPACITY, **HOW), N_LANES, CAPACITY)),
    "ChunkReplayBuffer": _chunks(1, "uniform"),
    "ChunkReplayBuffer of lanes": _chunks(N_LANES, "prioritized"),
    "DictTensorReplayBuffer": _torchrl(DictTensorReplayBuffer),
    "DictTensorPrioritizedReplayBuffer": _torchrl(DictTensorPrioritizedReplayBuffer, **PER),
}
SURFACES = [
    *(pytest.param(_memory(*(kind.values if hasattr(kind, "values") else [kind])), marks=getattr(kind, "marks", ()),
                   id=f"memory of {getattr(kind, 'values', [kind])[0]}") for kind in EVERY_KIND),
    *(pytest.param(surface, id=name) for name, surface in BUFFERS.items()),
]  # fmt: skip


def batch_of(lengths, ends):
    """Trajectories whose frames and rewards count up; `ends` are the places (b, t) of ends."""
    frames = torch.arange(len(lengths) * 6.0).reshape(len(lengths), 6)
    done = torch.zeros(frames.shape, dtype=torch.bool)
    for place in ends:
        done[place] = True
    steps = {
        "observation/frame": frames, "_observation/frame": frames + 0.5, "action/action": frames.long(),
        "_observation/reward": frames, "_observation/terminated": done,
        "_observation/truncated": torch.zeros_like(done),
    }  # fmt: skip
    info = DictTensor({"env_index": torch.arange(len(lengths))})
    return Trajectories(info, TemporalDictTensor(steps, torch.tensor(lengths)))


@pytest.mark.parametrize("surface", SURFACES)
def test_returns_go_as_far_as_their_episode_and_what_comes_after_with_them(surface):
    lengths, ends = [6, 4], [(0, 1), (1, 2)]
    batch = batch_of(lengths, ends)
    expected = {}
    for b, length in enumerate(lengths):
        stop = length
        for t in reversed(range(length)):
            stop = t + 1 if (b, t) in ends else stop
            count = min(N, stop - t)
            frames = batch.trajectories["observation/frame"][b, t : t + count].tolist()
            total = sum(GAMMA**i * frame for i, frame in enumerate(frames))
            expected[frames[0]] = total, frames[-1] + 0.5, GAMMA**count
    made = surface.make()
    made.add_trajectories(batch, surface.names)
    drawn = [np.reshape(values, (300, -1))[:, 0].tolist() for values in surface.draw(made, 300)]
    found = {frame: rest for frame, *rest in zip(*drawn, strict=True)}
    assert {frame: tuple(rest) for frame, rest in found.items()} == expected
