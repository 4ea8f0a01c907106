"""`CheckedAgent`: checks the results of an agent, and raises if one is wrong."""

from __future__ import annotations

from typing import Any

import torch

from rlstructs.agent import evaluation_mode, takes_views
from rlstructs.checks import hint_batch_first
from rlstructs.errors import SpecError
from rlstructs.structures.arrays import TensorSpec, check_dtype, specs_of
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.testing.checked_env import check_unchanged, difference, kind_of

STATE, OUTPUT, NEXT_STATE = "the initial state", "the output", "the next state"


class CheckedAgent:
    """Calls an agent, and raises unless it returns what a rollout needs.

    The calls are without gradients, in evaluation mode.

    Args:
        agent: the agent.
        name: for messages.
    """

    def __init__(self, agent: Any, name: str) -> None:
        self._agent, self._name = agent, name
        self._specs: dict[str, dict[str, TensorSpec]] = {}
        self.takes_views = takes_views(agent)
        self.needs_history = agent.require_history()
        if self.needs_history not in (True, False):
            raise TypeError(f"{name}.require_history must return a bool, got {self.needs_history!r}")

    @torch.no_grad()
    def begin(self, info: DictTensor, n: int) -> DictTensor:
        """The initial state of n environments."""
        with evaluation_mode(self._agent):
            state = self._agent.initial_state(info.clone(), n)
        return self._check_rows(f"{self._name}.initial_state of {_rows(n)}", STATE, state, n)

    @torch.no_grad()
    def step(
        self, state: DictTensor, observation: DictTensor, info: DictTensor, history: TemporalDictTensor | None = None
    ) -> tuple[DictTensor, DictTensor]:
        """Returns the output and the next state of one step.

        Only an agent that requires a history gets one.
        """
        n = observation.n_elems()
        where = f"{self._name}.__call__ of {_rows(n)}"
        seen, known = observation.clone(), info.clone()
        arguments = (state, DictTensor(observation), DictTensor(info))  # the agent may set keys in what it gets
        with evaluation_mode(self._agent):
            result = self._agent(*arguments, history=history) if self.needs_history else self._agent(*arguments)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"{where} must return its output and the next state, got {kind_of(result)}")
        output = self._check_rows(where, OUTPUT, result[0], n, observation.device())
        following = self._check_rows(where, NEXT_STATE, result[1], n, observation.device())
        if self.takes_views:
            hint = "that it was given, and that is recorded; clone it first, or leave out takes_views: "
            check_unchanged(f"{where} wrote into the observation {hint}", observation, seen)
            check_unchanged(f"{where} wrote into the agent_info {hint}", info, known)
        return output, following

    def _check_rows(self, where: str, what: str, value: Any, n: int, device: torch.device | None = None) -> DictTensor:
        if not isinstance(value, DictTensor):
            raise TypeError(f"{where}: {what} must be a DictTensor, got {kind_of(value)}")
        for key, tensor in value.items():
            if tensor.ndim == 0 or tensor.shape[0] != n:
                shape = tuple(tensor.shape)
                hint = hint_batch_first(shape, n)
                raise SpecError(f"{where}: {what} {key!r} has shape {shape}, expected ({n}, ...){hint}")
            check_dtype(f"{where}: {what}", key, tensor.dtype)
            if device is not None and tensor.device != device:
                raise SpecError(f"{where}: {what} {key!r} is on {tensor.device}, the observation on {device}")
        # The next state has the specs of the initial one.
        before = self._specs.setdefault(OUTPUT if what == OUTPUT else STATE, specs_of(value))
        if specs_of(value) != before:
            when = "the initial state" if what == NEXT_STATE else "the first call"
            raise SpecError(f"{where}: {what}: {difference(before, specs_of(value))}; it has to be as in {when}")
        return value


def _rows(n: int) -> str:
    return "1 row" if n == 1 else f"{n} rows"
