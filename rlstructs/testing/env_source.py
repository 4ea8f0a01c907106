"""Sources of environments for `check_env`: a factory, a `VecEnv` or a gymnasium environment."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle
import gymnasium

from rlstructs.envs.gym_env import GymEnvInf
from rlstructs.envs.vec_env import VecEnv
from rlstructs.errors import SpecError
from rlstructs.testing.checked_gymnasium import CheckedGym, keeps_state

BY_SEED = "the seed that create_env gets"
BY_RESET = "the seed that reset gets: super().reset(seed=seed), then self.np_random"


@dataclass(frozen=True)
class EnvSource:
    """A source of environments.

    Attributes:
        name: for messages.
        make: takes a seed and gives a `VecEnv`.
        seeded_by: where an environment finds the seed, for messages.
        is_new: whether `make` gives a new environment each time, which can be closed.
        can_repeat: whether `make` can be called again, with another seed.
        is_kept: whether something is meant to survive a reset, such as a running mean.
    """

    name: str
    make: Callable[[int], VecEnv]
    seeded_by: str = BY_SEED
    is_new: bool = True
    can_repeat: bool = True
    is_kept: bool = False


def env_source(env: Any, env_args: dict[str, Any]) -> EnvSource:
    """Returns the source for the argument of `check_env`.

    Raises:
        TypeError, SpecError: it is no environment and no factory, or a worker could not use the factory.
    """
    is_object = isinstance(env, gymnasium.Env) or (not isinstance(env, type) and hasattr(env, "step"))
    if is_object and env_args:
        raise SpecError(f"check_env: env_args are for what makes an environment, got one ({type(env).__name__})")
    if isinstance(env, gymnasium.Env):
        name = type(env.unwrapped).__name__
        _check_reset(env, name)

        def wrap(seed: int) -> VecEnv:
            return GymEnvInf([CheckedGym(env, name)], seed)

        return EnvSource(name, wrap, BY_RESET, is_new=False, is_kept=keeps_state(env))
    if is_object:
        name = type(env).__name__
        return EnvSource(name, lambda seed: _check_vec_env(env, name), is_new=False, can_repeat=False)
    if not callable(env):
        raise TypeError(f"check_env: needs an environment, or what makes one, got {type(env).__name__}")
    return _factory_source(env, env_args)


def _factory_source(create_env: Callable[..., Any], env_args: dict[str, Any]) -> EnvSource:
    check_pickles("create_env", create_env)
    for key, value in env_args.items():
        check_pickles(f"env_args[{key!r}]", value)
    takes_seed = _takes(create_env, "seed")

    def make(seed: int) -> Any:
        # A worker gets the factory pickled.
        create, arguments = cloudpickle.loads(cloudpickle.dumps((create_env, env_args)))
        return create(**arguments, seed=seed) if takes_seed else create(**arguments)

    try:
        made = make(0)
    except TypeError:
        # A function that takes any keyword, such as `gymnasium.make`, may still refuse this one.
        if not takes_seed or _names(create_env, "seed"):
            raise
        takes_seed = False
        made = make(0)
    if isinstance(made, gymnasium.Env):
        name = type(made.unwrapped).__name__
        _check_reset(made, name)
        close(made, name)

        def make_two(seed: int) -> VecEnv:
            return GymEnvInf([CheckedGym(make(seed + k), name) for k in range(2)], seed)

        return EnvSource(name, make_two, seeded_by=BY_RESET, is_kept=keeps_state(made))
    name = type(made).__name__
    close(_check_vec_env(made, name), name)
    if not takes_seed:
        raise SpecError("create_env must take seed=: RL_Batcher calls create_env(**env_args, seed=...)")
    return EnvSource(name, lambda seed: _check_vec_env(make(seed), name))


def check_pickles(what: str, value: Any) -> None:
    """Raises TypeError unless a value can travel to a worker."""
    try:
        cloudpickle.loads(cloudpickle.dumps(value))
    except Exception as error:
        raise TypeError(
            f"{what} cannot be pickled, so that no worker can get it: {error!r}; create in it what cannot travel "
            "(files, locks, windows), in place of taking it from outside"
        ) from error


def close(env: Any, name: str) -> None:
    """Closes an environment.

    Raises:
        SpecError: `close` raised.
    """
    try:
        env.close()
    except Exception as error:
        raise SpecError(f"{name}.close raised {error!r}; it has to work at any time, also a second time") from error


def _check_reset(env: gymnasium.Env[Any, Any], name: str) -> None:
    reset = env.unwrapped.reset
    if not (_takes(reset, "seed") and _takes(reset, "options")):
        raise SpecError(f"{name}.reset must take seed= and options=, as gymnasium.Env.reset does")


def _takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function takes this keyword, by name or as one of any keywords."""
    return _names(function, name) or any(p.kind is p.VAR_KEYWORD for p in _parameters(function) or ())


def _names(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of this name.

    True for a function in C without a signature.
    """
    parameters = _parameters(function)
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return parameters is None or any(p.name == name and p.kind in named for p in parameters)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # written in C
        return None


def _check_vec_env(env: Any, name: str) -> VecEnv:
    """Returns the environment; raises unless it has the methods of a `VecEnv`.

    The error is a TypeError or SpecError.
    """
    for method in ("n_envs", "reset", "step", "close"):
        if not callable(getattr(env, method, None)):
            hint = ", put it into a GymVectorEnv" if hasattr(env, "single_action_space") else ""
            raise TypeError(f"{name} is not a VecEnv: it has no method {method}(){hint}")
    try:
        inspect.signature(env.reset).bind(None)
    except TypeError:
        raise SpecError(f"{name}.reset must take env_info, a DictTensor, as its one argument") from None
    checked: VecEnv = env
    return checked
