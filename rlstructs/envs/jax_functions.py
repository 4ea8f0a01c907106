"""`JaxFunctions`: an environment as pure functions of jax.

Those of gymnax and Brax are brought into this form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlstructs.checks import check_count
from rlstructs.errors import SpecError
from rlstructs.workers.public_names import set_module

# No limit of steps that an int32 can count.
NO_LIMIT = 2**31 - 1
# The message where workers would be forked.
FORKED = "start_method: jax hangs if it is forked; expected 'forkserver' or 'spawn', got 'fork'"
# Steps of a Brax episode that nothing else limits, as in Brax's own training.
BRAX_LENGTH = 1000


@set_module("rlstructs.envs")
@dataclass(frozen=True, eq=False)
class JaxFunctions:
    """One environment as pure functions of jax, which `RL_Batcher.make` and `JaxEnv` take.

    Both functions see a single environment and are compiled for many. Random numbers come from `key` alone. An episode
    that has ended is begun anew by the caller, so that `step` returns its true final observation.

    Attributes:
        reset: `reset(key, params) -> (state, observation)`.
        step: `step(key, state, action, params) -> (state, observation, reward, terminated, truncated, info)`. The state
            is any pytree of arrays, with the shapes and dtypes that `reset` gave; the observation is an array, or a
            pytree of named ones (dicts, named tuples, dataclasses); `info` is not recorded.
        observation_space, action_space: gymnasium's, of one environment.
        params: a pytree that both functions get; None for none.
        name: in messages.

    Example:
        >>> def reset(key, params):
        ...     at = jax.random.randint(key, (), 0, 5)
        ...     return at, at.astype(float)
        >>> def step(key, at, action, params):
        ...     at = at + 2 * action - 1
        ...     return at, at.astype(float), 1.0, (at < 0) | (at > params), False, {}
        >>> import jax
        >>> walk = JaxFunctions(reset, step, spaces.Box(-1, 9, ()), spaces.Discrete(2), params=8)
        >>> from rlstructs import RL_Batcher
        >>> with RL_Batcher.make(walk, n_envs=4, n_workers=0, n_timesteps=10, seed=0) as batcher:
        ...     trajectories = next(iter(batcher))
        >>> trajectories.trajectories["_observation/frame"].shape
        torch.Size([4, 10, 1])
    """

    reset: Callable[..., Any]
    step: Callable[..., Any]
    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    params: Any = None
    name: str = "environment"


def is_functional(env: Any) -> bool:
    """Whether `as_functions` takes this environment; imports nothing."""
    if isinstance(env, tuple) and env:
        return is_functional(env[0])
    return not isinstance(env, type) and (isinstance(env, JaxFunctions) or _is_gymnax(env) or _is_brax(env))


def as_functions(env: Any) -> JaxFunctions:
    """Returns an environment as pure functions.

    Args:
        env: a `JaxFunctions`, an environment of gymnax or Brax, or a pair of one and its params.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(env, tuple) and len(env) == 2 and _is_gymnax(env[0]):
        return from_gymnax(*env)
    if isinstance(env, JaxFunctions):
        return env
    if _is_gymnax(env):
        return from_gymnax(env)
    if _is_brax(env):
        return from_brax(env)
    got = f"a tuple of {[type(part).__name__ for part in env]}" if isinstance(env, tuple) else type(env).__name__
    raise TypeError(
        f"env: expected a JaxFunctions, an environment of gymnax or a pair of one and its params, or one of Brax, "
        f"got {got}"
    )


def _is_gymnax(env: Any) -> bool:
    return all(callable(getattr(env, name, None)) for name in ("step_env", "reset_env", "action_space"))


def _is_brax(env: Any) -> bool:
    kinds = {cls.__module__.split(".")[0] for cls in type(env).__mro__}
    return "brax" in kinds and callable(getattr(env, "reset", None))


def from_gymnax(env: Any, params: Any = None) -> JaxFunctions:
    """Returns an environment of gymnax as pure functions, without its automatic reset.

    gymnax tells `done` alone. A step is `truncated` if it would not have ended the episode without the limit
    `max_steps_in_episode` of the params, and `terminated` otherwise.

    Args:
        env: the environment.
        params: its params; None for the default ones.

    Raises:
        SpecError: the params have no `max_steps_in_episode`, by which the two are told apart; or a space is not
            supported.
    """
    params = env.default_params if params is None else params
    if not hasattr(params, "max_steps_in_episode"):
        raise SpecError(
            f"env: {env.name} cannot tell terminated from truncated: its params have no max_steps_in_episode, expected "
            "in gymnax's; give a JaxFunctions whose step returns both"
        )

    def reset(key: Any, params: Any) -> tuple[Any, Any]:
        observation, state = env.reset_env(key, params)
        return state, observation

    def step(key: Any, state: Any, action: Any, params: Any) -> tuple[Any, ...]:
        observation, after, reward, done, info = env.step_env(key, state, action, params)
        unlimited = params.replace(max_steps_in_episode=NO_LIMIT)
        terminated = env.step_env(key, state, action, unlimited)[3]  # the compiler computes what is equal once
        return after, observation, reward, terminated, done & ~terminated, info

    seen, acted = (_from_gymnax_space(space(params)) for space in (env.observation_space, env.action_space))
    return JaxFunctions(reset, step, seen, acted, params, env.name)


def _from_gymnax_space(space: Any) -> gymnasium.Space[Any]:
    """Returns a space of gymnax as one of gymnasium."""
    kind, inner = type(space).__name__, getattr(space, "spaces", None)
    if kind == "Discrete":
        return spaces.Discrete(int(space.n))
    if kind == "Box":
        dtype = np.dtype(space.dtype)
        low, high = (np.broadcast_to(np.asarray(bound), space.shape).astype(dtype) for bound in (space.low, space.high))
        return spaces.Box(low, high, tuple(space.shape), dtype.type)
    if kind == "Dict":
        assert inner is not None
        return spaces.Dict({key: _from_gymnax_space(each) for key, each in inner.items()})
    if kind == "Tuple":
        return spaces.Tuple([_from_gymnax_space(each) for each in inner or ()])
    raise SpecError(f"env: gymnax's space {kind} is not supported; expected Box, Discrete, Dict or Tuple")


def from_brax(env: Any, episode_length: int | None = None) -> JaxFunctions:
    """Returns an environment of Brax as pure functions.

    Its wrappers for batches, episodes and automatic resets are taken off. A step that ends the episode by itself is
    `terminated`; one that only reaches `episode_length` is `truncated`.

    Args:
        env: the environment.
        episode_length: in steps; None for that of its episode wrapper, or 1000 without one.

    Raises:
        SpecError: the wrapper repeats actions.
    """
    while type(env).__name__ in ("AutoResetWrapper", "EpisodeWrapper", "VmapWrapper"):
        if getattr(env, "action_repeat", 1) != 1:
            raise SpecError(f"env: Brax's episode wrapper repeats each action {env.action_repeat} times, expected 1")
        if episode_length is None and type(env).__name__ == "EpisodeWrapper":
            episode_length = int(env.episode_length)
        env = env.env
    limit = check_count("episode_length", BRAX_LENGTH if episode_length is None else episode_length, 1)

    def reset(key: Any, params: Any) -> tuple[Any, Any]:
        state = env.reset(key)
        return (state, np.int32(0)), state.obs

    def step(key: Any, state: Any, action: Any, params: Any) -> tuple[Any, ...]:
        after, n_steps = env.step(state[0], action), state[1] + 1
        terminated = after.done.astype(bool)
        return (after, n_steps), after.obs, after.reward, terminated, ~terminated & (n_steps >= params), after.metrics

    import jax

    def box(shape: Any) -> gymnasium.Space[Any]:
        if isinstance(shape, Mapping):
            return spaces.Dict({key: box(each) for key, each in shape.items()})
        return spaces.Box(-np.inf, np.inf, shape.shape, np.float32)

    # Not `observation_size`, which computes a reset.
    seen = box(jax.eval_shape(env.reset, jax.ShapeDtypeStruct((2,), np.uint32)).obs)
    acted = spaces.Box(-1.0, 1.0, (env.action_size,), np.float32)
    return JaxFunctions(reset, step, seen, acted, limit, type(env.unwrapped).__name__)
