"""Wrappers that check the results of gymnasium environments, single and vectorised.

They come before the library reads the results. Observations must lie in their space, and rewards be finite.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlstructs.envs.array_values import as_numpy
from rlstructs.envs.gym_env import GymEnv
from rlstructs.envs.gym_vector import GymVectorEnv
from rlstructs.envs.row_adapter import row_env
from rlstructs.envs.spaces import Leaf, list_leaves
from rlstructs.envs.vec_env import VecEnv
from rlstructs.errors import SpecError
from rlstructs.seeding import environment_seeds
from rlstructs.structures.dict_tensor import DictTensor

STEP = "(observation, reward, terminated, truncated, info)"
FLAGS = ("terminated", "truncated")
# A float may lie outside a bound by this share of the bound: the error of rounding to float32.
TOLERANCE = 1e-6
RUNNING_MEANS = (
    gymnasium.wrappers.NormalizeObservation,
    gymnasium.wrappers.NormalizeReward,
    gymnasium.wrappers.vector.NormalizeObservation,
    gymnasium.wrappers.vector.NormalizeReward,
)


def find_innermost(env: VecEnv) -> Any:
    """Finds the environment below all wrappers that keep the wrapped one in `_env`."""
    while "_env" in getattr(env, "__dict__", {}) and not isinstance(env, (GymEnv, GymVectorEnv)):
        env = env.__dict__["_env"]
    return env


def install_gymnasium_checks(env: VecEnv) -> None:
    """Wraps the gymnasium environments below `env`, to check their results.

    The wrappers raise if a result is wrong.
    """
    inner = find_innermost(env)
    if isinstance(inner, GymEnv):
        inner._envs = [
            each if isinstance(each, CheckedGym) else CheckedGym(each, type(each.unwrapped).__name__, is_given=False)
            for each in inner._envs
        ]
    elif isinstance(inner, GymVectorEnv) and not isinstance(inner._envs, CheckedVector):
        inner._envs = CheckedVector(inner._envs, inner)


def remove_gymnasium_checks(env: VecEnv) -> None:
    """Undoes `install_gymnasium_checks`."""
    inner = find_innermost(env)
    if isinstance(inner, GymEnv):
        inner._envs = [each.env if isinstance(each, CheckedGym) else each for each in inner._envs]
    elif isinstance(inner, GymVectorEnv) and isinstance(inner._envs, CheckedVector):
        inner._envs = inner._envs.envs


def restarts_with_seed(env: VecEnv) -> bool:
    """Whether a reset with a seed has to bring back the environment's first state."""
    inner = find_innermost(env)
    if row_env(env).shared_statistics() is not None:
        return False  # statistics survive resets
    if isinstance(inner, GymVectorEnv):
        return inner._seeds is not None and not keeps_state(inner._envs.envs)
    return isinstance(inner, GymEnv) and all(isinstance(each, CheckedGym) and each.is_given for each in inner._envs)


def seed_next_reset(env: VecEnv, seed: int) -> bool:
    """Makes the next reset use the seeds of the first one.

    Returns whether the environment takes seeds.
    """
    inner = find_innermost(env)
    if isinstance(inner, GymVectorEnv) and not inner._envs.took_seed:
        return False
    inner._seeds = environment_seeds(seed, inner.n_envs())
    return True


def reset_by_mask(env: VecEnv) -> None:
    """Resets one of several environments in mid-episode, if the autoreset mode allows it."""
    inner = find_innermost(env)
    if isinstance(inner, GymVectorEnv) and inner._mode is AutoresetMode.DISABLED and inner.n_envs() > 1:
        inner._envs.reset(options={"reset_mask": np.arange(inner.n_envs()) == 0})


def keeps_state(env: Any) -> bool:
    """Whether a wrapper keeps a running mean, which survives resets.

    True if it might, in another process.
    """
    while isinstance(env, (gymnasium.Wrapper, gymnasium.vector.VectorWrapper)):
        if isinstance(env, RUNNING_MEANS):
            return True
        env = env.env
    if isinstance(env, SyncVectorEnv):
        return any(map(keeps_state, env.envs))
    return hasattr(env, "env_fns")  # its environments are in other processes


class CheckedGym(gymnasium.Wrapper):  # type: ignore[misc]
    """A gymnasium environment that raises if it returns something wrong.

    Args:
        env: the environment.
        name: for messages.
        is_given: whether the user gave this environment itself; False for one that a factory made.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], name: str, is_given: bool = True) -> None:
        super().__init__(env)
        self._name, self.is_given = name, is_given

    @functools.cached_property
    def _spaces(self) -> SpaceCheck | None:
        space = getattr(self.env, "observation_space", None)  # `GymEnv` has checked the space by then
        return None if space is None else SpaceCheck(space, self._name)

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        result = self.env.reset(**arguments)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
            raise SpecError(f"{self._name}.reset must return (observation, info dict), got {_short(result)}")
        if self._spaces is not None:
            self._spaces.check("reset", result[0])
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        result = self.env.step(action)
        if not isinstance(result, tuple) or len(result) != 5:
            raise SpecError(f"{self._name}.step must return {STEP}, got {_short(result)}")
        for flag, value in zip(FLAGS, result[2:4], strict=True):
            if not isinstance(value, (bool, np.bool_)):
                raise TypeError(f"{self._name}.step: {flag} must be a bool, got {_short(value)}")
        if not isinstance(result[4], dict):
            raise SpecError(f"{self._name}.step: info must be a dict, got {_short(result[4])}")
        check_reward(f"{self._name}.step", result[1])
        if self._spaces is not None:
            self._spaces.check("step", result[0])
        return result


class CheckedVector:
    """A gymnasium vector environment that raises if it returns something wrong.

    Other attributes are those of the wrapped environment.

    Args:
        envs: the vector environment.
        owner: the `GymVectorEnv` that uses it, and knows its spaces, size and mode.
    """

    def __init__(self, envs: Any, owner: GymVectorEnv) -> None:
        self.envs, self._name, self._n = envs, owner._name, owner.n_envs()
        self._mode, self._spaces = owner._mode, SpaceCheck(owner.observation_space, owner._name)
        self._last: list[np.ndarray] | None = None
        self.took_seed = False
        self._ended = np.zeros(self._n, bool)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.envs, name)

    def reset(self, **arguments: Any) -> tuple[Any, Any]:
        """Resets, and checks that the observations of environments outside the mask have not changed."""
        mask = (arguments.get("options") or {}).get("reset_mask")
        left = None if mask is None else ~mask
        result = self.envs.reset(**arguments)
        self.took_seed = self.took_seed or arguments.get("seed") is not None
        if not isinstance(result, tuple) or len(result) != 2:
            raise SpecError(f"{self._name}.reset must return (observations, infos), got {_short(result)}")
        self._check_infos("reset", result[1])
        self._spaces.check("reset", result[0], (self._n,))
        shown = self._read(result[0])
        if left is not None and self._last is not None and shown is not None:
            changed = [_rows_that_differ(*pair) for pair in zip(self._last, shown, strict=True)]
            if (wrong := np.logical_or.reduce(changed) & left).any():
                raise SpecError(
                    f"{self._name}.reset changed the observation of environment {int(np.argmax(wrong))}, which "
                    f"is not in options['reset_mask'] ({np.flatnonzero(~left).tolist()}): its episode has to go on"
                )
        self._last, self._ended = shown, np.zeros(self._n, bool)
        return result

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Steps, and checks the results."""
        result = self.envs.step(actions)
        if not isinstance(result, tuple) or len(result) != 5:
            wanted = "(observations, rewards, terminations, truncations, infos)"
            raise SpecError(f"{self._name}.step must return {wanted}, got {_short(result)}")
        observations, rewards, *flags, infos = result
        for flag, values in zip(FLAGS, flags, strict=True):
            found = as_numpy(values)
            if found.dtype != np.bool_:
                raise TypeError(f"{self._name}.step: {flag} must be an array of bool, got {found.dtype}")
        check_reward(f"{self._name}.step", rewards)
        self._check_infos("step", infos)
        self._spaces.check("step", observations, (self._n,))
        done = as_numpy(flags[0]) | as_numpy(flags[1])
        if done.shape == (self._n,):
            self._check_ends(rewards, done, infos)
        self._last = self._read(observations)
        return result

    def _check_ends(self, rewards: Any, done: np.ndarray, infos: Any) -> None:
        """Raises unless episode ends, and the next steps, agree with the autoreset mode."""
        if self._mode is AutoresetMode.NEXT_STEP:
            paid = as_numpy(rewards).astype(np.float64) != 0
            if (wrong := self._ended & (done | paid)).any():
                raise SpecError(
                    f"{self._name}.step: environment {int(np.argmax(wrong))} may only reset in the step after the end "
                    "of its episode (autoreset mode NextStep): give reward 0 there, and flags that are False"
                )
        self._ended = done.copy()
        mask = infos.get("_final_obs") if isinstance(infos, Mapping) else None
        if mask is not None and not np.array_equal(as_numpy(mask), done):
            raise SpecError(
                f"{self._name}.step: infos['_final_obs'] is {as_numpy(mask).tolist()}, but the episodes that "
                f"ended are {done.tolist()}"
            )
        finals = infos.get("final_obs") if isinstance(infos, Mapping) else None
        if finals is not None and isinstance(finals, np.ndarray) and finals.dtype == object:
            for k in np.flatnonzero(done):
                self._spaces.check("step, final observation", finals[k])

    def _check_infos(self, method: str, infos: Any) -> None:
        if infos is None or not isinstance(infos, (Mapping, list, tuple)):
            raise SpecError(f"{self._name}.{method}: infos must be a dict, got {_short(infos)}")
        for key, mask in infos.items() if isinstance(infos, Mapping) else ():
            is_mask = isinstance(mask, np.ndarray) and isinstance(key, str) and key[:1] == "_" and key[1:] in infos
            if is_mask and (mask.shape != (self._n,) or mask.dtype != np.bool_):
                raise SpecError(
                    f"{self._name}.{method}: infos[{key!r}], the mask of {key[1:]!r}, must be "
                    f"({self._n},) bool, got {mask.shape} {mask.dtype}"
                )

    def _read(self, observations: Any) -> list[np.ndarray] | None:
        """Copies the leaves of a batch; None if they cannot be read.

        In that case `GymVectorEnv` raises.
        """
        try:
            found = [np.array(as_numpy(leaf.pick(observations))) for leaf in self._spaces.leaves]
        except (TypeError, ValueError, LookupError):
            return None
        return found if all(values.shape[:1] == (self._n,) for values in found) else None


def _rows_that_differ(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    if one.shape != other.shape:
        return np.ones(len(one), bool)
    found: np.ndarray = (one != other).reshape(len(one), -1).any(axis=1)
    return found


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return f"{value!r:.60} ({type(value).__name__})"


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
