"""Makes the environments and agents that a command line names."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import operator
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.envs.registration import find_highest_version, get_env_id, parse_env_id

from rlstructs.agent import RL_Agent
from rlstructs.envs.gym_env import GymEnv, GymEnvInf
from rlstructs.errors import SpecError
from rlstructs.random_agent import RandomAgent


class GymMaker:
    """Makes the environments of a worker, then its agent, which gets their spaces.

    Both methods travel to a worker in one pickle, so that they belong to the same object there too.

    Args:
        agent: name of the agent for `find_agent`.
        make: makes one environment.
        n_envs: number of environments.
        kind: `GymEnvInf` or `GymEnv`.
    """

    def __init__(
        self, agent: str, make: Callable[[], gymnasium.Env[Any, Any]], n_envs: int, kind: type[GymEnv] = GymEnvInf
    ) -> None:
        self._agent, self._make, self._n_envs, self._kind = agent, make, n_envs, kind
        self._spaces: dict[str, Any] = {}

    def create_env(self, seed: int) -> GymEnv:
        """Makes the environments."""
        envs = [self._make() for _ in range(self._n_envs)]
        self._spaces = {"observation_space": envs[0].observation_space, "action_space": envs[0].action_space}
        return self._kind(envs, seed)

    def create_agent(self) -> RL_Agent:
        """Makes the agent; `create_env` has to be called first."""
        factory = find_agent(self._agent)
        agent = factory(**_accepted_arguments(factory, self._spaces))
        if not isinstance(agent, RL_Agent):
            raise SpecError(f"--agent {self._agent}: must return an RL_Agent, got {type(agent).__name__}")
        return agent


def find_env(env_id: str) -> str:
    """Finds an environment in the registry; returns its full id.

    Args:
        env_id: `[module:][namespace/]name[-vN]`; the module is imported, the default is the newest version.

    Raises:
        SpecError: there is no such environment.
    """
    module, _, name = env_id.rpartition(":")
    if name.startswith("ALE/"):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module("ale_py")
    if module:
        _import(module, env_id)
    try:
        namespace, base, version = parse_env_id(name)
        newest = find_highest_version(namespace, base) if version is None else None
        return str(gymnasium.spec(name if newest is None else get_env_id(namespace, base, newest)).id)
    except gymnasium.error.Error as error:
        raise SpecError(f"{env_id}: {error}") from error


def find_agent(name: str) -> Callable[..., RL_Agent]:
    """Finds the factory of an agent named `random` or `module:factory`.

    Raises:
        SpecError: there is no such module or attribute, or it cannot be called.
    """
    if name == "random":
        return RandomAgent
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise SpecError(f"--agent: must be random or module:factory, got {name!r}")
    module = _import(module_name, f"--agent {name}")
    try:
        factory: Callable[..., RL_Agent] = operator.attrgetter(attribute)(module)
    except AttributeError as error:
        raise SpecError(f"--agent {name}: {error}") from error
    if not callable(factory):
        raise SpecError(f"--agent {name}: must be callable, it is a {type(factory).__name__}")
    return factory


def _import(module: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise SpecError(f"{what}: cannot import {module!r}: {type(error).__name__}: {error}") from error


def _accepted_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a function takes by keyword."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some builtins have no signature
        return {}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return arguments
    named = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return {name: value for name, value in arguments.items() if name in named}
