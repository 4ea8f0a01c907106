"""The first step of an agent: what it puts out, what its state is, and whether its rows come first."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rlstructs.agent import EmptyHistory, RL_Agent
from rlstructs.checks import BATCH_FIRST, batch_first
from rlstructs.errors import SpecError
from rlstructs.moments import Moments
from rlstructs.structures.arrays import TensorSpec, check_dtype
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.tree import check_same_keys

# What torch's recurrent layers say of a state whose first two axes are in the wrong order.
HIDDEN = re.compile(r"Expected hidden\S* size \((\d+), (\d+), .*got \[(\d+), (\d+), ")


def first_step(agent: RL_Agent, observation: DictTensor, info: DictTensor, n: int) -> tuple[DictTensor, DictTensor]:
    """What an agent puts out in its very first step, and its initial state; checks both.

    Args:
        agent: one of its own: it may be asked for another number of rows.
        observation, info: n rows each, or an empty info; copied for the agent.
        n: how many environments there are.
    """
    # Wherever the agent has made it, as in a rollout.
    device = observation.device() or torch.device("cpu")
    state = checked("agent: initial_state", agent.initial_state(info.clone(), n), n).to(device)
    result = _called(agent, state.clone(), observation, info)
    if not isinstance(result, (tuple, list)) or len(result) != 2:  # a DictTensor would be taken apart into its keys
        raise TypeError(f"agent: it must return its output and its next state, got {type(result).__name__}")
    output, following = result
    checked("agent: its output", output, n)
    checked("agent: its next state", following, n)
    if state.specs() != following.specs():
        raise SpecError(f"agent: its next state is {following!r}, its initial one {state!r}")
    check_batch_first("agent", agent, state, observation, info)
    return output, state


def checked(what: str, value: Any, n: int) -> DictTensor:
    """Raises unless `value` is a DictTensor of `n` rows, or an empty one."""
    if not isinstance(value, DictTensor):
        raise TypeError(f"{what} must be a DictTensor, got {type(value).__name__}")
    for key, tensor in value.items():
        if tensor.ndim == 0 or tensor.shape[0] != n:
            shape = tuple(tensor.shape)
            raise SpecError(f"{what}: {key!r} has shape {shape}, expected ({n}, ...){batch_first(shape, n)}")
        check_dtype(what, key, tensor.dtype)
    return value


def check_batch_first(
    name: str, agent: RL_Agent, state: DictTensor, observation: DictTensor, info: DictTensor
) -> None:
    """Raises SpecError if a state is (layers, B, ...), with as many layers as there are environments.

    Its shape does not show it then: such an agent, and no other, is asked for another number of rows, and refused only
    where what it gives shows what its state is: it may be made for one number of environments, and raise.

    Args:
        name: of the agent, for messages.
        agent: is asked.
        state: its initial one, n rows.
        observation, info: n rows each, or an empty info.
    """
    n = observation.n_elems()
    square = [key for key, tensor in state.items() if tensor.shape[:2] == (n, n)]
    if not square or not n:
        return
    other = n - 1 or 2  # fewer, if there are: an index that an agent makes stays within its bounds
    rows = torch.arange(other, device="cpu") % n
    seen, info = observation.index(rows.to(observation.device() or "cpu")), info if info.empty() else info.index(rows)
    where = f"{name}: initial_state of {_environments(other)}"
    initial = _asked(where, lambda: agent.initial_state(info.clone(), other))
    _refuse_layers(where, initial, square, other, n)
    if not isinstance(initial, DictTensor) or not set(square) <= set(initial.keys()):
        return
    initial = initial.to(observation.device() or "cpu")
    where = f"{name}: its next state of {_environments(other)}"
    result = _asked(where, lambda: _called(agent, initial.clone(), seen, info))
    if result is None:  # code of one's own that takes (layers, B, ...) is content with that; a mask is not
        turned = {key: t.transpose(0, 1) if key in square else t for key, t in initial.items()}
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = _called(agent, DictTensor.trusted(turned).clone(), seen, info)
    if isinstance(result, (tuple, list)) and len(result) == 2:
        _refuse_layers(where, result[1], square, other, n)


def _called(agent: RL_Agent, state: DictTensor, observation: DictTensor, info: DictTensor) -> Any:
    """What an agent gives for copies of these, with no steps behind it."""
    observation = observation.clone()
    if agent.require_history():
        return agent(state, observation, info.clone(), history=EmptyHistory.of(observation.clone()))
    return agent(state, observation, info.clone())


def _asked(what: str, call: Callable[[], Any]) -> Any:
    """What a call gives, None where it raises; raises SpecError where that says that rows do not come first."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return call()
    except Exception as error:
        found = HIDDEN.search(str(error))
        if BATCH_FIRST in str(error) or (found and found.groups()[:2] == found.groups()[:1:-1]):
            raise SpecError(f"{what}: {error}{'' if BATCH_FIRST in str(error) else BATCH_FIRST}") from error
    return None


def _refuse_layers(what: str, state: Any, keys: list[str], n: int, n_layers: int) -> None:
    """Raises SpecError if these entries of a state of n environments have them on the second axis."""
    for key in keys if isinstance(state, DictTensor) else ():
        shape = tuple(state[key].shape) if key in state else ()
        if shape[:2] == (n_layers, n):
            raise SpecError(f"{what}: {key!r} has shape {shape}, expected ({n}, ...){batch_first(shape, n)}")


def _environments(n: int) -> str:
    return "1 environment" if n == 1 else f"{n} environments"


def repeated(example: DictTensor, n: int) -> DictTensor:
    """Row 0 of an example, n times."""
    if example.empty():
        return example
    return example.index(torch.zeros(n, dtype=torch.int64, device="cpu"))


@dataclass(frozen=True)
class Specs:
    """What one worker's slots have to hold, found by a first step with nothing recorded."""

    observation: dict[str, TensorSpec]
    action: dict[str, TensorSpec]
    state: dict[str, TensorSpec]
    # Of no rows: what the environment keeps statistics of.
    statistics: dict[str, Moments]

    def check_like(self, first: Specs, who: str) -> None:
        """Raises unless keys, dtypes and shapes are those that the first one found."""
        for name in ("observation", "action", "state"):
            own, wanted = getattr(self, name), getattr(first, name)
            check_same_keys(f"{who}: {name}", wanted, own)
            for key, spec in wanted.items():
                if own[key] != spec:
                    raise SpecError(f"{who}: {name} {key!r} has rows of {own[key]}, of the first one they are {spec}")


class JobDescription(NamedTuple):
    """What a worker replies once its job is built.

    Attributes:
        n_envs: how many environments it has.
        specs: what its slots have to hold; None for workers that did not look for it.
    """

    n_envs: int
    specs: Specs | None
