"""What a job is built from, and what its first step tells.

The first step of an agent shows its output and its state, which are checked here.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from rlstructs.agent import EmptyHistory, RL_Agent
from rlstructs.checks import BATCH_FIRST_HINT, hint_batch_first
from rlstructs.copying import copy_arguments
from rlstructs.envs.env_list import RAISE
from rlstructs.envs.vec_env import VecEnv
from rlstructs.errors import SpecError
from rlstructs.moments import Moments
from rlstructs.seeding import next_seed
from rlstructs.structures.arrays import TensorSpec, check_dtype
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.tree import check_same_keys

# The message of torch's recurrent layers for a state whose first two axes are swapped.
HIDDEN = re.compile(r"Expected hidden\S* size \((\d+), (\d+), .*got \[(\d+), (\d+), ")


@dataclass(frozen=True)
class JobSettings:
    """The settings from which a worker makes its environments and its agent."""

    create_agent: Callable[..., RL_Agent]
    agent_args: dict[str, Any]
    create_env: Callable[..., VecEnv]
    env_args: dict[str, Any]
    seeds: Sequence[int]
    agent_seeds: Sequence[int] | None
    agent_info: DictTensor
    env_info: DictTensor
    device: torch.device | None
    on_env_failure: str = RAISE
    max_env_restarts: int | None = None
    first_worker: int = 0  # the index of the first of these workers among all

    def with_new_streams(self, worker: int, restart_number: int) -> JobSettings:
        """Returns the settings with new seeds for one worker.

        Its streams start anew for the `restart_number`-th time.
        """
        seeds = list(self.seeds)
        seeds[worker] = next_seed(seeds[worker], restart_number)
        agent_seeds = None if self.agent_seeds is None else list(self.agent_seeds)
        if agent_seeds is not None:
            agent_seeds[worker] = next_seed(agent_seeds[worker], restart_number)
        return replace(self, seeds=seeds, agent_seeds=agent_seeds)

    def seed_of(self, worker: int, restart_number: int) -> int:
        """The seed of a worker whose streams have started anew so many times."""
        return next_seed(self.seeds[worker], restart_number) if restart_number else self.seeds[worker]

    def with_copied_arguments(self) -> JobSettings:
        """The settings with copied arguments, like those that a worker in another process gets."""
        both = self.agent_args, self.env_args  # copied together: an object in both stays one object
        agent_args, env_args = copy_arguments(both)
        return replace(self, agent_args=agent_args, env_args=env_args)

    def objects(self) -> dict[str, Any]:
        """The user's objects, by their names in messages."""
        parts: dict[str, Any] = {"create_agent": self.create_agent, "create_env": self.create_env}
        parts |= {f"agent_args[{key!r}]": value for key, value in self.agent_args.items()}
        return parts | {f"env_args[{key!r}]": value for key, value in self.env_args.items()}


def first_step(agent: RL_Agent, observation: DictTensor, info: DictTensor, n: int) -> tuple[DictTensor, DictTensor]:
    """Returns an agent's first output and its initial state, after checking both.

    Args:
        agent: an agent for this check alone, because it may be called with another number of rows.
        observation, info: n rows each, or an empty info; the agent gets copies.
        n: the number of environments.
    """
    # A rollout moves the state to this device too.
    device = observation.device() or torch.device("cpu")
    state = check_rows("agent: initial_state", agent.initial_state(info.clone(), n), n).to(device)
    result = _call_agent(agent, state.clone(), observation, info)
    if not isinstance(result, (tuple, list)) or len(result) != 2:  # a DictTensor would be unpacked into its keys
        raise TypeError(f"agent: it must return its output and its next state, got {type(result).__name__}")
    output, following = result
    check_rows("agent: its output", output, n)
    check_rows("agent: its next state", following, n)
    if state.specs() != following.specs():
        raise SpecError(f"agent: its next state is {following!r}, its initial one {state!r}")
    check_batch_first("agent", agent, state, observation, info)
    return output, state


def check_rows(what: str, value: Any, n: int) -> DictTensor:
    """Raises unless `value` is a DictTensor of `n` rows, or an empty one."""
    if not isinstance(value, DictTensor):
        raise TypeError(f"{what} must be a DictTensor, got {type(value).__name__}")
    for key, tensor in value.items():
        if tensor.ndim == 0 or tensor.shape[0] != n:
            shape = tuple(tensor.shape)
            raise SpecError(f"{what}: {key!r} has shape {shape}, expected ({n}, ...){hint_batch_first(shape, n)}")
        check_dtype(what, key, tensor.dtype)
    return value


def check_batch_first(name: str, agent: RL_Agent, state: DictTensor, observation: DictTensor, info: DictTensor) -> None:
    """Raises SpecError if a state is (layers, B, ...) with B layers.

    The shape alone does not show it. An agent with such a state is called once more, with another number of rows. It is
    refused only if the result shows swapped axes, not if it raises: it may be made for one number of environments.

    Args:
        name: of the agent, for messages.
        agent: the agent.
        state: its initial state, n rows.
        observation, info: n rows each, or an empty info.
    """
    n = observation.n_elems()
    square = [key for key, tensor in state.items() if tensor.shape[:2] == (n, n)]
    if not square or not n:
        return
    other = n - 1 or 2  # fewer if possible, so that indexes of the agent stay in their bounds
    rows = torch.arange(other, device="cpu") % n
    seen, info = observation.index(rows.to(observation.device() or "cpu")), info if info.empty() else info.index(rows)
    where = f"{name}: initial_state of {_environments_text(other)}"
    initial = _call_or_none(where, lambda: agent.initial_state(info.clone(), other))
    _refuse_layers(where, initial, square, other, n)
    if not isinstance(initial, DictTensor) or not set(square) <= set(initial.keys()):
        return
    initial = initial.to(observation.device() or "cpu")
    where = f"{name}: its next state of {_environments_text(other)}"
    result = _call_or_none(where, lambda: _call_agent(agent, initial.clone(), seen, info))
    if result is None:  # user code for (layers, B, ...) accepts that form; a mask does not
        turned = {key: t.transpose(0, 1) if key in square else t for key, t in initial.items()}
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = _call_agent(agent, DictTensor.trusted(turned).clone(), seen, info)
    if isinstance(result, (tuple, list)) and len(result) == 2:
        _refuse_layers(where, result[1], square, other, n)


def _call_agent(agent: RL_Agent, state: DictTensor, observation: DictTensor, info: DictTensor) -> Any:
    """Calls an agent with copies, and an empty history if it requires one."""
    observation = observation.clone()
    if agent.require_history():
        return agent(state, observation, info.clone(), history=EmptyHistory.of(observation.clone()))
    return agent(state, observation, info.clone())


def _call_or_none(what: str, call: Callable[[], Any]) -> Any:
    """Returns the result of a call, or None if it raises.

    An error about swapped axes becomes a SpecError.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return call()
    except Exception as error:
        found = HIDDEN.search(str(error))
        if BATCH_FIRST_HINT in str(error) or (found and found.groups()[:2] == found.groups()[:1:-1]):
            raise SpecError(f"{what}: {error}{'' if BATCH_FIRST_HINT in str(error) else BATCH_FIRST_HINT}") from error
    return None


def _refuse_layers(what: str, state: Any, keys: list[str], n: int, n_layers: int) -> None:
    """Raises SpecError if a state has its environments on the second axis.

    Only these keys are checked; there are n environments.
    """
    for key in keys if isinstance(state, DictTensor) else ():
        shape = tuple(state[key].shape) if key in state else ()
        if shape[:2] == (n_layers, n):
            raise SpecError(f"{what}: {key!r} has shape {shape}, expected ({n}, ...){hint_batch_first(shape, n)}")


def _environments_text(n: int) -> str:
    return "1 environment" if n == 1 else f"{n} environments"


def repeat_row(example: DictTensor | None, n: int) -> DictTensor:
    """Repeats row 0 of an example n times; empty if there is none."""
    if example is None or example.empty():
        return DictTensor()
    return example.index(torch.zeros(n, dtype=torch.int64, device="cpu"))


@dataclass(frozen=True)
class Specs:
    """The specs of everything that slots hold, found in a first step."""

    observation: dict[str, TensorSpec]
    action: dict[str, TensorSpec]
    state: dict[str, TensorSpec]
    # Empty moments of everything that the environment keeps statistics of.
    statistics: dict[str, Moments]
    # A warning for the user, if any.
    hint: str | None = None
    # Whether each step has a policy version of its own, because some are chosen before their rollout begins.
    has_step_versions: bool = False

    def check_like(self, first: Specs, who: str) -> None:
        """Raises unless keys, dtypes and shapes equal those of the first worker."""
        for name in ("observation", "action", "state"):
            own, wanted = getattr(self, name), getattr(first, name)
            check_same_keys(f"{who}: {name}", wanted, own)
            for key, spec in wanted.items():
                if own[key] != spec:
                    raise SpecError(f"{who}: {name} {key!r} has rows of {own[key]}, of the first one they are {spec}")


class JobDescription(NamedTuple):
    """A worker's reply once its job is built.

    Attributes:
        n_envs: how many environments it has.
        specs: the specs of its slots; None for workers that did not look for them.
    """

    n_envs: int
    specs: Specs | None
