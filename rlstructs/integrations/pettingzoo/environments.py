"""Makes PettingZoo environments, and checks that one batch can hold what all their agents show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import gymnasium
from pettingzoo.utils.conversions import aec_to_parallel, turn_based_aec_to_parallel
from pettingzoo.utils.env import AECEnv, ParallelEnv

from rlstructs.envs.space_tree import are_equal
from rlstructs.errors import SpecError

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
