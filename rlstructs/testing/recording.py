"""Records an agent's inputs and outputs in a few steps.

There are neither workers nor slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlstructs.agent import EmptyHistory
from rlstructs.envs.vec_env import VecEnv
from rlstructs.rollout.probe import repeat_row
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import Trajectories
from rlstructs.structures.tree import put_rows
from rlstructs.testing.checked_agent import CheckedAgent


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
