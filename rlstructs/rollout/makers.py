"""`Makers`: makes a worker's environments and agent from `RL_Batcher.make`'s arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import torch

from rlstructs.agent import RL_Agent
from rlstructs.checks import PETTINGZOO_HINT, call_factory
from rlstructs.copying import copy_arguments
from rlstructs.envs.env_list import close_in_time
from rlstructs.envs.gym_env import GymEnv, GymEnvInf
from rlstructs.envs.gym_vector import GymVectorEnv
from rlstructs.envs.jax_functions import JaxFunctions
from rlstructs.envs.row_env import RowEnv
from rlstructs.envs.vec_env import VecEnv
from rlstructs.errors import SpecError
from rlstructs.module_agent import ModuleAgent
from rlstructs.random_agent import RandomAgent


class Makers:
    """Makes the environments of a worker, then its agent, which gets their spaces.

    Both methods travel to a worker in one pickle, so that they belong to the same object there too.

    Args:
        env: makes one gymnasium environment, or all of a worker; it is called with those of `n_envs`, `num_envs` and
            `seed` that it takes.
        agent: an agent, a network, or a function that makes one of them and is called with those of
            `observation_space` and `action_space` that it takes; None for random actions.
        n_envs: number of environments.
        device: the device of the observations.
        kind: makes a vectorised environment of single ones.
        clip_actions: whether gymnasium environments get actions clipped to the bounds of their Box.
        needs_single: whether the function has to make single environments, which run in threads.
    """

    def __init__(
        self,
        env: Callable[..., Any],
        agent: Any,
        n_envs: int,
        device: torch.device | str = "cpu",
        kind: Callable[..., GymEnv] = GymEnvInf,
        clip_actions: bool = False,
        needs_single: bool = False,
    ) -> None:
        self._make, self._agent, self._n_envs, self._device, self._kind = env, agent, n_envs, device, kind
        self._clips, self._needs_single = clip_actions, needs_single
        self._spaces: dict[str, Any] = {}
        self._is_in_jax = False
        #: Whether the function makes single environments; known once it was called.
        self.makes_single = False

    def create_env(self, seed: int) -> VecEnv:
        """Makes the environments.

        Raises:
            TypeError: the function does not make environments.
            SpecError: it makes another number of them.
        """
        first = call_factory("env is called", self._make, self._select_arguments(seed))
        if hasattr(first, "possible_agents") or hasattr(first, "max_num_agents"):
            raise TypeError(f"env: it made a {type(first).__name__}{PETTINGZOO_HINT}")
        self.makes_single = isinstance(first, gymnasium.Env)
        if self.makes_single:
            envs = [first, *(self.make_single(seed) for _ in range(self._n_envs - 1))]
            made: Any = self._kind(envs, seed, clip_actions=self._clips)
        elif self._needs_single:
            raise SpecError(
                f"threads=True: needs a function that makes one gymnasium environment, this one made a "
                f"{type(first).__name__}, whose environments are stepped together"
            )
        elif isinstance(first, gymnasium.vector.VectorEnv):
            made = GymVectorEnv(first, seed, clip_actions=self._clips)
        elif self._clips:
            name = type(first).__name__
            raise SpecError(f"clip_actions: needs gymnasium's environments, got a {name}, which has to clip itself")
        else:
            made = first
        self._is_in_jax = isinstance(getattr(made, "functions", None), JaxFunctions)
        n_envs = made.n_envs() if callable(getattr(made, "n_envs", None)) else self._n_envs
        if n_envs != self._n_envs:
            slots = " (n_envs counts slots, one for each agent of an environment)" if hasattr(made, "agents") else ""
            raise SpecError(f"env: it made {n_envs} environments for a worker that needs {self._n_envs}{slots}")
        self._spaces = {name: getattr(made, name, None) for name in ("observation_space", "action_space")}
        return made  # type: ignore[no-any-return]

    def make_single(self, seed: int) -> Any:
        """Makes one more environment, where the function makes single ones."""
        return _without_check(self._make)(**self._select_arguments(seed))

    def _select_arguments(self, seed: int) -> dict[str, Any]:
        offered = {"n_envs": self._n_envs, "num_envs": self._n_envs, "seed": seed}
        return select_arguments(self._make, offered, only_named=True)  # `gymnasium.make` has `**kwargs`

    def create_agent(self) -> RL_Agent:
        """Makes the agent; `create_env` has to be called first.

        Raises:
            TypeError: the function makes no agent.
            SpecError: the environments have no action space, which the agent needs.
        """
        if self._agent is None:
            if not self._is_in_jax:
                return RandomAgent(self._action_space())
            from rlstructs.jax_agent import make_random_agent  # imports jax

            return make_random_agent(self._action_space())
        agent = self._agent
        if isinstance(agent, RL_Agent):
            return copy_arguments(agent)
        if not isinstance(agent, torch.nn.Module):
            agent = call_factory("agent is called", agent, select_arguments(agent, self._spaces))
        if isinstance(agent, torch.nn.Module) and not isinstance(agent, RL_Agent):
            return ModuleAgent(agent, self._action_space(), self._spaces["observation_space"], self._device)
        if not isinstance(agent, RL_Agent):
            raise TypeError(f"agent must make an RL_Agent or a torch.nn.Module, got {type(agent).__name__}")
        return agent

    def _action_space(self) -> gymnasium.Space[Any]:
        space = self._spaces["action_space"]
        if space is None:
            raise SpecError("agent: the environments have no action_space: give an RL_Agent")
        return space


def make_one(create_env: Callable[..., VecEnv], make_all: Callable[[], RowEnv], seed: int, k: int) -> Any:
    """Makes one environment of a worker.

    Args:
        create_env: of the worker; `Makers.create_env` may be able to make one alone.
        make_all: called otherwise; makes all of them with the same seed, of which all but one are closed.
        seed: of the environment.
        k: its index in the worker.
    """
    makers = getattr(create_env, "__self__", None)
    if isinstance(makers, Makers) and makers.makes_single:
        return makers.make_single(seed)
    singles = make_all().single_envs()
    close_in_time({other: single.env for other, single in enumerate(singles) if other != k})
    return singles[k].env


def _without_check(make: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a factory without gymnasium's checker of first calls.

    The checker would slow down all other calls.
    """
    if not isinstance(make, partial) or make.func is not gymnasium.make or "disable_env_checker" in make.keywords:
        return make
    return partial(make, disable_env_checker=True)


def select_arguments(
    function: Callable[..., Any], arguments: dict[str, Any], only_named: bool = False
) -> dict[str, Any]:
    """Selects the arguments that a function takes by keyword; with `only_named`, `**kwargs` takes none."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return {}
    made = function.func if isinstance(function, partial) else function
    if getattr(made, "__init__", None) is torch.nn.Module.__init__:  # it has `**kwargs`, and takes none
        return {}
    if not only_named and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return arguments
    named = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return {name: value for name, value in arguments.items() if name in named}
