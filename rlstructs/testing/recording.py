"""Records an agent's inputs and outputs in a few steps, and checks each output.

There are neither workers nor slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rlstructs.agent import EmptyHistory, evaluation_mode, takes_views
from rlstructs.checks import hint_batch_first
from rlstructs.envs.vec_env import VecEnv
from rlstructs.errors import SpecError
from rlstructs.rollout.job_specs import repeat_row
from rlstructs.structures.arrays import TensorSpec, check_dtype, specs_of
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import Trajectories
from rlstructs.structures.tree import put_rows
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


@dataclass(frozen=True)
class Moment:
    """An agent's input of one step.

    Attributes:
        rows: int64 (B',), the environments that run.
        observation: B' rows.
        after: B' rows, the observation after the step.
    """

    rows: torch.Tensor
    observation: DictTensor
    after: DictTensor


@dataclass
class Recording:
    """An agent's recorded actions.

    Attributes:
        script: its inputs.
        info: B rows, or empty.
        state: the first one, B rows.
        outputs: copies of the output of each step.
    """

    script: list[Moment]
    info: DictTensor
    state: DictTensor
    outputs: list[DictTensor]

    @property
    def n_rows(self) -> int:
        """The number of environments at the beginning, B."""
        return self.script[0].rows.numel()

    @property
    def device(self) -> torch.device:
        """The device of the observations."""
        return self.script[0].observation.device() or torch.device("cpu")

    def trajectories(self) -> Trajectories:
        """The steps in which every environment ran, in the form of a batcher."""
        n = self.n_rows
        n_timesteps = sum(moment.rows.numel() == n for moment in self.script)
        info = self.info.to(self.device).prepend_key("agent_info/") + self.state.prepend_key("agent_state/")
        return Trajectories(info, self._temporal(self.script[0].rows, n_timesteps))

    def history(self, rows: torch.Tensor) -> TemporalDictTensor:
        """The steps so far of these environments, which run."""
        n_timesteps = len(self.outputs)
        if not n_timesteps:
            return EmptyHistory.of(self.script[0].observation.slice(0, rows.numel()))
        return self._temporal(rows, n_timesteps)

    def _temporal(self, rows: torch.Tensor, n_timesteps: int) -> TemporalDictTensor:
        """The first `n_timesteps` steps of these environments, without padding."""
        found: dict[str, torch.Tensor] = {}
        for t in range(n_timesteps):
            moment = self.script[t]
            at = torch.searchsorted(moment.rows, rows)
            seen, after = moment.observation.prepend_key("observation/"), moment.after.prepend_key("_observation/")
            for key, tensor in (seen + self.outputs[t].prepend_key("action/") + after).index(at).items():
                if key not in found:
                    found[key] = tensor.new_zeros(rows.numel(), n_timesteps, *tensor.shape[1:])
                put_rows(found[key], (slice(None), t), tensor)
        lengths = torch.full((rows.numel(),), n_timesteps, dtype=torch.int64, device=self.device)
        return TemporalDictTensor(found, lengths)


class _Example:
    """An environment that returns the rows of one observation in turn."""

    def __init__(self, observation: DictTensor) -> None:
        self._observation = observation

    def reset(self, env_info: DictTensor) -> tuple[DictTensor, torch.Tensor]:
        return self._observation.clone(), torch.arange(self._observation.n_elems(), device="cpu")

    def step(self, action: DictTensor) -> tuple[tuple[DictTensor, torch.Tensor], tuple[DictTensor, torch.Tensor]]:
        n = self._observation.n_elems()
        self._observation = self._observation.index((torch.arange(n, device="cpu") + 1) % n)
        pair = self.reset(DictTensor())
        if "initial_state" in pair[0]:
            pair[0]["initial_state"].zero_()
        return pair, pair


def record_script(
    agent: CheckedAgent, source: DictTensor | VecEnv, agent_info: DictTensor | None, n_steps: int
) -> list[Moment]:
    """Lets an agent act on a source, and returns the agent's inputs.

    Args:
        agent: the agent.
        source: B rows, or an environment.
        agent_info: one row.
        n_steps: the most steps; fewer if every environment ends.
    """
    env = _Example(source) if isinstance(source, DictTensor) else source
    observation, rows = env.reset(DictTensor())
    info = repeat_row(agent_info, rows.numel())
    found = Recording([], info, agent.begin(info, rows.numel()), [])
    state = found.state
    for _ in range(n_steps):
        seen = observation.clone()
        found.script.append(Moment(rows, seen, seen))
        output, state = _step(agent, found, len(found.outputs), seen.clone(), state)
        (after, _), (observation, left) = env.step(output)
        found.script[-1] = Moment(rows, seen, after.clone())
        found.outputs.append(output.clone())
        kept = torch.searchsorted(rows, left.long())
        state, rows = state if state.empty() else state.index(kept), left.long()
        if not rows.numel():
            break
    return found.script


def record_rollout(
    agent: CheckedAgent, script: list[Moment], agent_info: DictTensor | None, overwrite: bool = False
) -> Recording:
    """Lets an agent act on given observations, and returns its actions.

    Args:
        agent: the agent.
        script: the agent's inputs.
        agent_info: one row.
        overwrite: whether to overwrite the observations at the end, as a worker does.
    """
    n = script[0].rows.numel()
    info = repeat_row(agent_info, n)
    state = agent.begin(info, n)
    found, given = Recording(script, info, state.clone(), []), []
    for t, moment in enumerate(script):
        if t:
            kept = torch.searchsorted(script[t - 1].rows, moment.rows)
            state = state if state.empty() else state.index(kept)
        given.append(moment.observation.clone())
        output, state = _step(agent, found, t, given[-1], state)
        found.outputs.append(output.clone())
    for tensor in (tensor for observation in given if overwrite for tensor in observation.values()):
        if tensor.dtype == torch.bool:
            tensor.logical_not_()
        else:
            tensor.fill_(float("nan") if tensor.dtype.is_floating_point or tensor.dtype.is_complex else 85)
    return found


def _step(
    agent: CheckedAgent, found: Recording, t: int, observation: DictTensor, state: DictTensor
) -> tuple[DictTensor, DictTensor]:
    rows = found.script[t].rows
    info = found.info if found.info.empty() else found.info.index(rows)
    return agent.step(state, observation, info, found.history(rows) if agent.needs_history else None)
