"""One rollout whose steps, those of the agent included, are one compiled call."""

from __future__ import annotations

import numpy as np
import torch

from rlstructs.envs.row_env import CompiledRollout
from rlstructs.errors import SpecError
from rlstructs.rollout.progress import Progress
from rlstructs.rollout.rollout import ActingAgent, initial_state
from rlstructs.shared.slots import Slots
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.tree import check_same_keys
from rlstructs.trace.lane import ENVIRONMENT, EPISODES, STEPS, WRITE


@torch.no_grad()
def acquire_compiled(
    run: CompiledRollout, acting_agent: ActingAgent, slots: Slots, progress: Progress, agent_info: DictTensor
) -> Progress:
    """Fills the slots of all environments with T steps each; such a rollout cannot end early.

    Args:
        run: makes the steps.
        acting_agent, slots, progress, agent_info: see `acquire`.

    Returns:
        Where it stopped. `lengths` of the slots hold the number of steps.
    """
    n, n_timesteps, lane = slots.n, slots.layout.n_timesteps, acting_agent.lane
    state = progress.state
    if state is None:
        slots.check_observation(progress.observation)
        state = initial_state(acting_agent.agent, agent_info, n)
    steps = slots.begin(None, state)
    steps.write_observation(0, None, progress.observation)
    lane.enter(ENVIRONMENT)
    found = run(n_timesteps, progress.observation, state, agent_info)
    lane.enter(WRITE)
    lane.cells[STEPS] += n * n_timesteps
    lane.cells[EPISODES] += found.rows.size
    slots.check_state(found.state, n)
    check_same_keys("agent: its output", steps.action, found.output)
    for key, column in steps.action.items():
        shape, dtype = found.output[key].shape[2:], found.output[key].dtype
        if (shape, dtype) != (column.shape[2:], column.dtype):
            raise SpecError(f"agent: output {key!r} is {dtype} {shape}, expected {column.dtype} {column.shape[2:]}")
    for written, columns in ((steps.action, found.output), (steps.arrays, found.after)):
        for key, column in columns.items():
            written[key][:, -n_timesteps:] = column.swapaxes(0, 1)
    if found.rows.size:
        slots.write_reset(found.times, found.rows, found.finals, found.fresh)
    slots.lengths[...] = n_timesteps
    stopped = Progress(steps.copy_rows(n_timesteps, np.arange(n)), np.arange(n), found.state)
    slots.end([])
    return stopped
