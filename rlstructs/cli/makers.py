"""Makes the agents that a command line names."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from rlstructs.agent import RL_Agent
from rlstructs.envs.gym_envs import import_module
from rlstructs.errors import SpecError
from rlstructs.random_agent import RandomAgent
from rlstructs.rollout.makers import select_arguments

AGENTS = (RL_Agent, torch.nn.Module)


class NamedAgent:
    """Makes the agent named `random` or `module:name`.

    The name is looked up where the factory is called: in a worker.

    Args:
        name: the name.
        action_mask: `mask` of `RandomAgent`, for the name `random` alone.
    """

    def __init__(self, name: str, action_mask: str | None = None) -> None:
        self._name, self._mask = name, {} if action_mask is None else {"mask": action_mask}

    def __call__(self, **spaces: Any) -> RL_Agent | torch.nn.Module:
        """Makes the agent, or its network.

        A factory gets the spaces that it takes, by name.

        Raises:
            SpecError: there is no such factory, or it makes no agent.
        """
        found: Any = find_agent(self._name)
        agent = found if isinstance(found, AGENTS) else found(**select_arguments(found, spaces | self._mask))
        if not isinstance(agent, AGENTS):
            got = type(agent).__name__
            raise SpecError(f"--agent {self._name}: must return an RL_Agent or a torch.nn.Module, got {got}")
        return agent


def find_agent(name: str) -> RL_Agent | torch.nn.Module | Callable[..., Any]:
    """Finds an agent, a network or the factory of one, named `random` or `module:name`.

    Raises:
        SpecError: there is no such module or attribute, or it cannot be called.
    """
    if name == "random":
        return RandomAgent
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise SpecError(f"--agent: must be random or module:factory, got {name!r}")
    module = import_module(module_name, f"--agent {name}")
    try:
        factory: Callable[..., Any] = operator.attrgetter(attribute)(module)
    except AttributeError as error:
        raise SpecError(f"--agent {name}: {error}") from error
    if not callable(factory):
        raise SpecError(f"--agent {name}: must be callable, it is a {type(factory).__name__}")
    return factory
