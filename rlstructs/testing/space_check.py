"""Checks that observations lie in their space, and that rewards are finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from rlstructs.envs.array_values import as_numpy
from rlstructs.envs.gym_env import GymEnv
from rlstructs.envs.gym_vector import GymVectorEnv
from rlstructs.envs.spaces import Leaf, list_leaves
from rlstructs.errors import SpecError
from rlstructs.structures.dict_tensor import DictTensor

# A float may lie outside a bound by this share of the bound: the error of rounding to float32.
TOLERANCE = 1e-6


class SpaceCheck:
    """Raises if an observation is not in its space.

    Shapes and dtypes are checked elsewhere, when the observation is read.

    Args:
        space: of one observation.
        name: of the environment, for messages.
    """

    def __init__(self, space: gymnasium.Space[Any], name: str) -> None:
        self._space, self._name = space, name
        self.leaves = list_leaves(space, "observation")

    def check(self, where: str, observation: Any, batch: tuple[int, ...] = ()) -> None:
        """Checks one observation, or all of a batch at once.

        Args:
            where: the method that it came from, for the message.
            observation: a sample of the space, or arrays with the axes `batch` in front.
            batch: the axes in front of those of one observation.

        Raises:
            SpecError: its entries are not those of the space, or it holds a NaN or a value out of bounds.
        """
        where = f"{self._name}.{where}"
        _check_entries(where, self._space, observation, "the observation")
        for leaf in self.leaves:
            try:
                values = as_numpy(leaf.pick(observation))
            except (TypeError, ValueError, LookupError):
                continue  # the reader of the observation raises, with more detail
            if values.dtype.kind in "biuf" and values.shape == (*batch, *leaf.shape):
                check_values(f"{where}: {leaf.key or 'frame'!r}", leaf, values)


def check_declared(env: Any, observation: DictTensor, name: str) -> None:
    """Raises SpecError unless rows lie in the `observation_space` that a user's `VecEnv` declares.

    Checks only the keys that the space has, and only a space that the class itself declares: a wrapper may pass on the
    space of the environment below it. Gymnasium's environments are checked by their own wrappers.
    """
    own = {**vars(type(env)), **getattr(env, "__dict__", {})}.get("observation_space")
    if not isinstance(own, gymnasium.Space) or isinstance(env, (GymEnv, GymVectorEnv)):
        return
    for leaf in list_leaves(own, "observation"):
        key = leaf.key or "frame"
        values = observation[key].detach().cpu() if key in observation else None
        if values is not None and values.dtype != torch.bfloat16 and tuple(values.shape[1:]) == leaf.row_shape:
            check_values(f"{name}: {key!r}", leaf, values.numpy().reshape(len(values), *leaf.shape))


def check_values(what: str, leaf: Leaf, values: np.ndarray) -> None:
    """Raises SpecError unless numbers lie in the space of a leaf.

    They may have more axes in front.
    """
    if values.dtype.kind == "f" and np.isnan(values).any():
        raise SpecError(f"{what} holds NaN{_at(np.isnan(values))}, which is in no space")
    low, high = _bounds(leaf.space)
    if low is None or high is None:
        return
    slack = TOLERANCE if values.dtype.kind == "f" else 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        below = values < low - slack * np.abs(np.where(np.isfinite(low), low, 0))
        above = values > high + slack * np.abs(np.where(np.isfinite(high), high, 0))
    wrong = below | above
    if wrong.any():
        at = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        least, most = (np.broadcast_to(bound, wrong.shape)[at] for bound in (low, high))
        raise SpecError(
            f"{what} is {values[at]}{_at(wrong)}, the space says {least} to {most}; keep to the bounds, or give the "
            "space wider ones"
        )


def check_reward(where: str, reward: Any) -> None:
    """Raises SpecError for rewards that are NaN or infinite."""
    try:
        values = as_numpy(reward)
    except ValueError:
        return  # of different shapes: the reader of the rewards raises
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        wrong = values[~np.isfinite(values)].flat[0]
        raise SpecError(f"{where}: reward is {wrong}, it has to be a finite number")


def _check_entries(where: str, space: gymnasium.Space[Any], value: Any, what: str) -> None:
    """Raises SpecError unless a Dict or Tuple has exactly the entries of its space."""
    if isinstance(space, spaces.Dict):
        if not isinstance(value, Mapping):
            raise SpecError(f"{where}: {what} must be a dict with {list(space.spaces)}, got {type(value).__name__}")
        if set(value) != set(space.spaces):
            raise SpecError(f"{where}: {what} has the entries {list(value)}, the space has {list(space.spaces)}")
        for key, inner in space.spaces.items():
            _check_entries(where, inner, value[key], f"{what}'s {key!r}")
    elif isinstance(space, spaces.Tuple):
        if not isinstance(value, (tuple, list)) or len(value) != len(space.spaces):
            got = len(value) if isinstance(value, (tuple, list)) else type(value).__name__
            raise SpecError(f"{where}: {what} must be a tuple of {len(space.spaces)}, got {got}")
        for at, inner in enumerate(space.spaces):
            _check_entries(where, inner, value[at], f"{what}'s {at}")


def _bounds(space: gymnasium.Space[Any]) -> tuple[Any, Any]:
    if isinstance(space, spaces.Box):
        return space.low, space.high
    if isinstance(space, spaces.Discrete):
        return np.asarray(space.start), np.asarray(space.start + space.n - 1)
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    if isinstance(space, spaces.MultiBinary):
        return np.asarray(0), np.asarray(1)
    return None, None


def _at(wrong: np.ndarray) -> str:
    """The index of the first True, for a message; "" for a single number."""
    if math.prod(wrong.shape) <= 1:
        return ""
    return f" at {[int(index) for index in np.unravel_index(int(np.argmax(wrong)), wrong.shape)]}"
