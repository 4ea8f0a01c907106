"""Transitions for tests of tianshou's buffers, and what a buffer is, to be compared."""

from __future__ import annotations

import numpy as np
import torch


def row(obs, done=False, /, **more):
    """A transition of which all numbers are `obs`; `done` ends the episode."""
    return {"obs": obs, "act": obs, "rew": float(obs), "terminated": done, "truncated": False} | more


def rows(obs, done=None, /, **more):
    """Transitions, one per lane."""
    obs = np.asarray(obs)
    done = np.zeros(obs.shape, bool) if done is None else np.asarray(done, bool)
    truncated = np.zeros(obs.shape, bool)
    return {"obs": obs, "act": obs, "rew": obs * 1.0, "terminated": done, "truncated": truncated, **more}


def fill(buffer, n, ends=(), start=0, **more):
    """Adds n transitions whose numbers count on; those in `ends` end their episodes."""
    for t in range(start, start + n):
        buffer.add(row(t, t in ends, **more))
    return buffer


def listed(added):
    """What `add` returned, as lists."""
    return [np.asarray(part).tolist() for part in added]


def state_of(buffer):
    """All that a buffer holds and knows, so that two states can be compared."""
    state = {name: np.copy(buffer._table.column(name)).tolist() for name in buffer._specs}
    storage = buffer._storage
    state["counters"] = storage.ring.counters.tolist()
    state["episodes"] = storage.episodes.columns.flat["episode"].tolist()
    state["running"] = {name: array.tolist() for name, array in buffer._intake.running.arrays().items()}
    state["rng"] = str(buffer._rng.bit_generator.state)
    state["more"] = {name: np.copy(array).tolist() for name, array in buffer._more_arrays().items()}
    if inner := buffer._inner():
        state["inner"] = {name: state_of(one) for name, one in inner.items()}
    return state


def draws(buffer, n=5, batch_size=7):
    """What the next samples hold, as lists."""
    found = []
    for _ in range(n):
        batch, index = buffer.sample(batch_size)
        found.append((index.tolist(), {name: _list(value) for name, value in batch.items()}))
    return found


def _list(value):
    return np.asarray(value.float() if isinstance(value, torch.Tensor) else value).tolist()
