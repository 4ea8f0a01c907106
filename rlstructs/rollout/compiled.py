"""One rollout whose steps, those of the agent included, are one compiled call."""

from __future__ import annotations

import numpy as np
import torch

from rlstructs.envs.row_env import CompiledRollout
from rlstructs.episodes import DONE
from rlstructs.rollout.progress import Progress
from rlstructs.rollout.rollout import ActingAgent, initial_state
from rlstructs.shared.slots import Slots
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.trace.lane import ENVIRONMENT, EPISODES, STEPS, WRITE


@torch.no_grad()
def acquire_compiled(
    run: CompiledRollout, acting_agent: ActingAgent, slots: Slots, progress: Progress, agent_info: DictTensor
) -> Progress:
    """Fills the slots of all environments with T steps each.

    Such a rollout cannot end early.

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
    slots.begin(None, state, is_read=True)
    lane.enter(ENVIRONMENT)
    found = run(n_timesteps, progress.observation, state, agent_info)
    lane.enter(WRITE)
    lane.cells[STEPS] += n * n_timesteps
    lane.cells[EPISODES] += int(np.count_nonzero(found.steps[DONE].numpy()))
    slots.check_state(found.state, n)
    slots.take_steps(found.steps, found.steps[DONE])
    return Progress(found.observation, np.arange(n), found.state)
