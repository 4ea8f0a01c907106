"""One rollout of environments that are stepped on their own.

First come, first served.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from time import monotonic

import numpy as np
import torch

from rlstructs.agent import RL_Agent, evaluation_mode
from rlstructs.envs.row_env import NO_ROWS, RowEnv, Step, WaitingEnv
from rlstructs.errors import SpecError
from rlstructs.rollout.progress import Chosen, Progress
from rlstructs.rollout.rollout import ActingAgent, Rollout
from rlstructs.shared.layout import FIRST_BEHIND
from rlstructs.shared.slots import Slots
from rlstructs.shared.writing import Steps
from rlstructs.structures.arrays import tensor_of
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.tree import put_rows
from rlstructs.trace.lane import AGENT, ENVIRONMENT, EPISODES, STEPS, WRITE


def check_history(agent: RL_Agent, env: RowEnv) -> None:
    """Raises SpecError if the agent requires a history that `env` lacks.

    Environments that are stepped on their own have none.
    """
    if env.pace is not None and agent.require_history():
        raise SpecError(
            "agent: an agent that requires a history cannot act in environments of threads (GymEnvThreads), whose "
            "steps may be chosen before their rollout begins"
        )


@torch.no_grad()
def acquire_waiting(
    acting_agent: ActingAgent,
    env: WaitingEnv,
    slots: Slots,
    progress: Progress,
    agent_info: DictTensor,
    version: int,
) -> Progress:
    """Fills the running environments' slots with up to T steps each.

    They do not wait for each other.

    Args:
        acting_agent, env, slots, progress, agent_info: see `acquire`.
        version: the number of updates that the agent has received.

    Returns:
        Where it stopped. `lengths` of the slots hold the number of steps.
    """
    with evaluation_mode(acting_agent.agent):
        rollout = WaitingRollout(acting_agent, env, slots, progress, agent_info, version)
        with contextlib.closing(rollout):
            return rollout.run_rows()


class WaitingRollout(Rollout):
    """One rollout of environments that are each stepped on their own.

    Args:
        acting_agent, env, slots, progress, agent_info, version: see `acquire_waiting`.
    """

    def __init__(
        self,
        acting_agent: ActingAgent,
        env: WaitingEnv,
        slots: Slots,
        progress: Progress,
        agent_info: DictTensor,
        version: int,
    ) -> None:
        super().__init__(acting_agent, env, slots, progress, agent_info)
        self._waiting_env, self._version = env, version
        # Of each environment: its number of steps, whether it runs, and how old the action of its first step is.
        self._times, self._behind = np.zeros(slots.n, np.int64), np.zeros(slots.n, np.int64)
        self._is_running = np.zeros(slots.n, bool)
        # The agent's state after the action of each environment, and before it.
        self._state, self._before = DictTensor.trusted({}), DictTensor.trusted({})

    def run_rows(self) -> Progress:
        """Runs the rollout."""
        steps, ready = self._begin_rows()
        env, n_timesteps = self._waiting_env, self._slots.layout.n_timesteps
        assert env.pace is not None
        deadline, is_cut = env.pace.deadline, self._acting_agent.is_cut
        until = None if deadline is None else monotonic() + deadline
        while True:
            if ready.size:
                self._act(steps, ready)
            if not env.under_way.size:
                break
            has_steps = self._times.any()
            stepped, step = self._collect(until if has_steps else None, is_cut if has_steps else None)
            if not stepped.size:
                break
            kept = self._take_step(steps, stepped, step)
            if (is_cut is not None and is_cut()) or (until is not None and monotonic() >= until and self._times.any()):
                break
            ready = kept[self._times[kept] < n_timesteps]
        return self._finish_rows(steps)

    def _begin_rows(self) -> tuple[Steps, np.ndarray]:
        """Prepares the rollout.

        Returns where to write steps, and the environments that wait for an action.
        """
        slots, progress = self._slots, self._progress
        _, _, state, steps, _ = self._begin()
        running = progress.running
        self._is_running[running] = True
        zeros = [{key: tensor.new_zeros(slots.n, *tensor.shape[1:]) for key, tensor in state.items()} for _ in range(2)]
        self._state, self._before = map(DictTensor.trusted, zeros)
        self._put(self._before, running, state)
        self._put(self._state, running, state)
        chosen = progress.chosen
        if chosen is None:
            return steps, running
        steps.write_action(0, chosen.rows, chosen.output)
        self._put(self._state, chosen.rows, chosen.state)
        self._behind[chosen.rows] = self._version - chosen.versions
        return steps, np.setdiff1d(running, chosen.rows)

    def _act(self, steps: Steps, ready: np.ndarray) -> None:
        """Has the agent choose for these environments, and starts their steps."""
        (agent, device, lane, _), times = self._acting_agent, self._times[ready]
        lane.enter(AGENT)
        seen, state = steps.copy_rows(times, ready).tensors(), self._rows_of(self._state, ready)
        self._put(self._before, ready, state)
        if device is not None:
            seen, state = seen.to(device), state.to(device)
        output, state = agent(state, seen, self._rows_of(self._agent_info, ready))
        lane.enter(WRITE)
        self._slots.check_state(state, ready.size)
        steps.write_action(times, ready, output)
        self._put(self._state, ready, state)
        self._waiting_env.start_rows(ready, output)

    def _collect(self, until: float | None, is_cut: Callable[[], bool] | None) -> tuple[np.ndarray, Step]:
        """Waits for environments."""
        lane = self._acting_agent.lane
        lane.enter(ENVIRONMENT)
        stepped, step = self._waiting_env.collect_rows(until, is_cut)
        lane.enter(WRITE)
        lane.cells[STEPS] += stepped.size - step.failed.size
        lane.cells[EPISODES] += np.count_nonzero(step.after["done"])
        return stepped, step

    def _take_step(self, steps: Steps, stepped: np.ndarray, step: Step) -> np.ndarray:
        """Writes a step of these environments; returns those that still run."""
        times = self._times[stepped]
        steps.write_observation(times + 1, stepped, step.after)
        if step.fresh is not None:
            self._slots.write_reset(times[step.reset], stepped[step.reset], step.after.take(step.reset), step.fresh)
        self._times[stepped] += 1
        self._times[stepped[step.failed]] -= 1
        if step.kept is None:
            return stepped
        kept: np.ndarray = stepped[step.kept]
        self._is_running[np.setdiff1d(stepped, kept)] = False
        return kept

    def _finish_rows(self, steps: Steps) -> Progress:
        """Ends the rollout; returns where it stopped."""
        slots, left = self._slots, np.flatnonzero(self._is_running)
        slots.lengths[...] = self._times
        slots.column(FIRST_BEHIND).numpy()[...] = self._behind
        rows, at = self._waiting_env.under_way, self._times
        chosen = None
        if rows.size:
            output = {
                key: tensor_of(array[rows, at[rows]], slots.layout.action[key][1])
                for key, array in steps.action.items()
            }
            versions = self._version - np.where(at[rows] == 0, self._behind[rows], 0)
            chosen = Chosen(rows, DictTensor.trusted(output), self._rows_of(self._state, rows), versions)
        state = self._rows_of(self._state, left)
        self._put(state, np.searchsorted(left, rows), self._rows_of(self._before, rows))
        progress = Progress(steps.copy_rows(at[left], left), left, state, NO_ROWS, chosen)
        slots.end([])
        return progress

    @staticmethod
    def _rows_of(state: DictTensor, rows: np.ndarray) -> DictTensor:
        """Copies these rows of a state or an info of all environments."""
        return DictTensor.trusted({}) if state.empty() else state.index(rows)

    @staticmethod
    def _put(target: DictTensor, rows: np.ndarray, state: DictTensor) -> None:
        """Writes a state to these rows of another."""
        for key, tensor in target.items():
            put_rows(tensor, torch.from_numpy(rows).to(tensor.device), state[key])
