"""PettingZoo environments: their making, their agents, and each agent's observations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from pettingzoo.utils.conversions import aec_to_parallel, turn_based_aec_to_parallel
from pettingzoo.utils.env import AECEnv, ParallelEnv

from rlstructs.envs.array_values import copy_value
from rlstructs.envs.spaces import are_equal, copy_sample
from rlstructs.envs.stepping import STEP, add_origin, check_step, read_reset
from rlstructs.errors import SpecError


class Shown(NamedTuple):
    """The result of a step or a reset for one agent.

    Attributes:
        observation: a copy.
        info: the environment's own.
        reward, terminated, truncated: of the action that led here; 0 and False if it is the first observation.
        is_first: whether an episode of the agent begins here.
    """

    observation: Any
    info: Any
    reward: Any = 0.0
    terminated: bool = False
    truncated: bool = False
    is_first: bool = True


class AgentGroup:
    """Steps one environment, and sorts its results by agent.

    Args:
        env: the environment.
        number: of the environment, for messages.
        agents: all possible agents.
        space: the observation space of each.

    Attributes:
        env: the environment.
        acts: for each of the agents, whether it acts in the next step.
    """

    def __init__(self, env: ParallelEnv, number: int, agents: Sequence[Any], space: gymnasium.Space[Any]) -> None:
        self.env, self._number, self._agents, self._space = env, number, agents, space
        self._known = frozenset(agents)
        self.acts = [False] * len(agents)

    def reset(self, seed: int | None, options: Mapping[str, Any] | None) -> list[Shown | None]:
        """Starts an episode; returns each agent's data, None for absent agents.

        Raises:
            SpecError: the environment returned something wrong.
        """
        arguments: dict[str, Any] = {} if seed is None else {"seed": seed}
        if options is not None:
            arguments["options"] = copy.deepcopy(options)  # the environment may change them
        try:
            result = self.env.reset(**arguments)
        except Exception as error:
            add_origin(error, "reset", self.env, self._number)
            raise
        observations, infos = read_reset(result, self.env, self._number)
        present = self._present()
        if not present:
            raise SpecError(f"{self._describe('reset')} began no episode: the environment's agents are []")
        self._check_mapping("reset", "observation", observations, present)
        self._check_mapping("reset", "info", infos, ())
        shown = [self._first(agent, observations, infos) if agent in present else None for agent in self._agents]
        self.acts = [one is not None for one in shown]
        return shown

    def step(self, actions: Sequence[Any]) -> list[Shown | None]:
        """Steps the environment.

        Args:
            actions: one for each agent; those of agents that do not act are not used.

        Returns:
            The result for each agent, including final observations, and first ones of agents that join or return. None
            for absent agents.

        Raises:
            SpecError: the environment returned something wrong.
        """
        given = {agent: action for agent, action, acts in zip(self._agents, actions, self.acts, strict=True) if acts}
        try:
            result = self.env.step(given)
        except Exception as error:
            add_origin(error, "step", self.env, self._number)
            raise
        try:
            shown = self._read(result)
        except (LookupError, TypeError, ValueError, AttributeError):
            self._check_result(result, given)
            raise
        self.acts = [one is not None and not (one.terminated or one.truncated) for one in shown]
        return shown

    def close(self) -> None:
        """Closes the environment."""
        try:
            self.env.close()
        except Exception as error:
            add_origin(error, "close", self.env, self._number)
            raise

    def _read(self, result: Any) -> list[Shown | None]:
        observations, rewards, terminated, truncated, infos = result
        present, shown = self._present(), []
        for agent, acted in zip(self._agents, self.acts, strict=True):
            found = None
            if acted:
                has_terminated = bool(terminated[agent])
                # An agent that has left without either flag was truncated.
                is_cut = bool(truncated[agent]) or (agent not in present and not has_terminated)
                observation, reward = self._copy(observations[agent]), copy_value(rewards[agent])
                found = Shown(observation, infos.get(agent, {}), reward, has_terminated, is_cut, False)
            elif agent in present and not (terminated.get(agent) or truncated.get(agent)):
                found = self._first(agent, observations, infos)
            shown.append(found)
        return shown

    def _first(self, agent: Any, observations: Any, infos: Any) -> Shown:
        return Shown(self._copy(observations[agent]), infos.get(agent, {}))

    def _copy(self, observation: Any) -> Any:
        """Copies an observation, into which the environment may write again."""
        return observation.copy() if type(observation) is np.ndarray else copy_sample(self._space, observation)

    def _present(self) -> set[Any]:
        """The agents that the environment has now."""
        present = set(self.env.agents)
        if not present <= self._known:
            unknown = sorted(map(str, present - self._known))
            raise SpecError(f"{self._describe('agents')} has {unknown}, which possible_agents lacks")
        return present

    def _check_result(self, result: Any, given: Mapping[Any, Any]) -> None:
        """Raises SpecError if a step gave something wrong."""
        check_step(result, self.env)
        acting, coming = tuple(given), tuple(self._present() - set(given))
        for name, found in zip(STEP, result, strict=True):
            needed = {"observation": (*acting, *coming), "info": ()}.get(name, acting)
            self._check_mapping("step", name, found, needed)

    def _check_mapping(self, call: str, name: str, found: Any, agents: Any) -> None:
        if not isinstance(found, Mapping):
            raise SpecError(f"{self._describe(call)} must give {name} as a dict by agent, got {type(found).__name__}")
        for agent in agents:
            if agent not in found:
                raise SpecError(f"{self._describe(call)} gave no {name} of agent {agent!r}, only of {list(found)}")

    def _describe(self, call: str) -> str:
        return f"environment {self._number} ({self.env}): {call}"


PADDING = "SuperSuit's pad_observations_v0 and pad_action_space_v0 make spaces equal"


def make_environments(makers: Iterable[Callable[[], Any]]) -> list[ParallelEnv]:
    """Calls each function; converts environments whose agents act one after another.

    Raises:
        TypeError: one is no function, or makes something else.
        SpecError: there are none, or one made the same environment as another.
    """
    try:
        makers = list(makers)
    except TypeError as error:
        got = f"{type(makers).__name__}: put it into a list, [make]"
        raise TypeError(f"makers: needs a list of functions that make an environment each, got {got}") from error
    if not makers:
        raise SpecError("makers: needs at least one function that makes an environment, got none")
    envs = [_make(k, make) for k, make in enumerate(makers)]
    known: set[int] = set()
    for k, env in enumerate(envs):
        if id(env.unwrapped) in known:
            raise SpecError(f"makers: number {k} made an environment that another made, each needs one of its own")
        known.add(id(env.unwrapped))
    return envs


def _make(k: int, make: Callable[[], Any]) -> ParallelEnv:
    wanted = "must be a function that makes a PettingZoo environment, such as simple_spread_v3.parallel_env"
    if not callable(make):
        raise TypeError(f"makers: number {k} {wanted}, got {type(make).__name__}")
    env = make()
    if isinstance(env, AECEnv):
        # If the state changes only after every agent has acted, all act in one step; otherwise one agent acts in each.
        return (aec_to_parallel if env.metadata.get("is_parallelizable") else turn_based_aec_to_parallel)(env)
    if not isinstance(env, ParallelEnv):
        raise TypeError(f"makers: number {k} {wanted}, it made {type(env).__name__}")
    return env


def read_agents(envs: Sequence[ParallelEnv]) -> list[Any]:
    """The agents of each environment, in order.

    Raises:
        SpecError: an environment does not say which agents it may have, or has other agents than the first.
    """
    found: list[list[Any]] = []
    for k, env in enumerate(envs):
        agents = list(getattr(env, "possible_agents", None) or ())
        if not agents:
            raise SpecError(f"environment {k} ({env}) has no possible_agents, which say how many slots it needs")
        if agents != (first := found[0] if found else agents):
            raise SpecError(f"environment {k} ({env}) has the agents {agents}, environment 0 {first}")
        found.append(agents)
    return found[0]


def read_spaces(
    envs: Sequence[ParallelEnv], agents: Sequence[Any]
) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
    """The observation space and action space of all agents.

    Raises:
        SpecError: they differ; the message names the agent and both spaces.
    """
    return _read_space("observation_space", envs, agents), _read_space("action_space", envs, agents)


def _read_space(name: str, envs: Sequence[ParallelEnv], agents: Sequence[Any]) -> gymnasium.Space[Any]:
    first: gymnasium.Space[Any] = getattr(envs[0], name)(agents[0])
    for k, env in enumerate(envs):
        for agent in agents:
            space = getattr(env, name)(agent)
            if not are_equal(space, first):
                raise SpecError(
                    f"environment {k} ({env}): {name} of agent {agent!r} is {space}, that of {agents[0]!r} in "
                    f"environment 0 is {first}, and rows of one batch must be equal: {PADDING}"
                )
    return first
