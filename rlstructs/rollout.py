"""One rollout: an agent acts in environments for T timesteps, and slots are filled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch

from rlstructs.agent import RL_Agent
from rlstructs.envs.vec_env import RowEnv, SplitEnv, Step
from rlstructs.errors import SpecError
from rlstructs.rows import Rows
from rlstructs.slots import Slots
from rlstructs.structures.base import put_rows
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor


@dataclass
class Clock:
    """What a worker's time went to, since it began.

    Attributes:
        steps: of single environments.
        environment, agent: seconds in each.
        busy: seconds in rollouts.
    """

    steps: int = 0
    environment: float = 0.0
    agent: float = 0.0
    busy: float = 0.0

    def fields(self) -> tuple[int, float, float, float]:
        """What makes an equal one, cheaper to send than the object."""
        return self.steps, self.environment, self.agent, self.busy


@dataclass
class Progress:
    """Where a rollout stopped, and the next one goes on.

    Attributes:
        observation: what the agent sees next, a row for each environment that runs.
        running: int64, the environments that run; all of them are 0..E-1.
        state: the agent's, None before its first step since a reset.
    """

    observation: Rows
    running: np.ndarray
    state: DictTensor | None = None


@torch.no_grad()
def acquire(
    env: RowEnv,
    agent: RL_Agent,
    slots: Slots,
    progress: Progress,
    agent_info: DictTensor,
    device: torch.device | None = None,
    clock: Clock | None = None,
) -> Progress:
    """Fills the slots of the running environments with up to T steps each.

    Args:
        env: E environments that run as `progress` says.
        agent: acts on those that run.
        slots: E of them; T is theirs.
        progress: as the last call, or a reset, left it.
        agent_info: E rows, or empty.
        device: where the agent wants observations; None for the CPU.
        clock: where time and steps are added; None for nowhere.

    Returns:
        Where it stopped. `slots.lengths` says how many steps each slot holds.
    """
    acting, began = Acting(agent, slots, progress, agent_info, device, clock), 0.0
    while not acting.is_over:
        output = acting.act()
        if clock is not None:
            began = perf_counter()
        step = env.step_rows(output)
        if clock is not None:
            clock.environment += perf_counter() - began
        acting.follow(step)
    return acting.end()


@torch.no_grad()
def acquire_in_turns(
    envs: Sequence[SplitEnv],
    agent: RL_Agent,
    slots: Sequence[Slots],
    progress: Sequence[Progress],
    agent_info: DictTensor,
    device: torch.device | None = None,
    clock: Clock | None = None,
) -> list[Progress]:
    """As `acquire`, for groups of environments: the agent acts on one while others are stepped.

    Args:
        envs: the groups, in all of which everything always runs.
        slots, progress: of each group.
        agent_info: a row for each environment of all groups, or empty.
    """
    ends = np.cumsum([own.n for own in slots]).tolist()
    infos = [agent_info if agent_info.empty() else agent_info.slice(end - own.n, end)
             for own, end in zip(slots, ends, strict=True)]  # fmt: skip
    groups = [Acting(agent, *own, device, clock) for own in zip(slots, progress, infos, strict=True)]
    for env, acting in zip(envs, groups, strict=True):
        env.send_rows(acting.act())
    while not groups[0].is_over:
        for env, acting in zip(envs, groups, strict=True):
            began = perf_counter()
            step = env.recv_rows()
            if clock is not None:
                clock.environment += perf_counter() - began
            acting.follow(step)
            if not acting.is_over:
                env.send_rows(acting.act())
    return [acting.end() for acting in groups]


class Acting:
    """The agent's side of a rollout: everything but the steps of the environments.

    Args: as `acquire`'s.

    Attributes:
        is_over: whether all steps have been taken.
    """

    def __init__(
        self,
        agent: RL_Agent,
        slots: Slots,
        progress: Progress,
        agent_info: DictTensor,
        device: torch.device | None,
        clock: Clock | None,
    ) -> None:
        self._agent, self._slots, self._device, self._clock = agent, slots, device, clock
        rows = self._rows = None if progress.running.size == slots.n else progress.running
        self._info = agent_info if rows is None or agent_info.empty() else agent_info.index(rows)
        state = progress.state
        self._state = agent.initial_state(self._info, progress.running.size) if state is None else state
        self._before = self._state
        slots.begin(rows, self._state)
        slots.write_observation(0, rows, progress.observation)
        self._with_history = agent.require_history()
        self._idle: list[tuple[int, np.ndarray]] = []
        self._t, self.is_over = 0, False

    def act(self) -> DictTensor:
        """What the agent does next, which is recorded."""
        slots, rows, t, info, state = self._slots, self._rows, self._t, self._info, self._state
        began = 0.0 if self._clock is None else perf_counter()
        observation = slots.observation(t) if rows is None else slots.rows(t, rows).tensors()
        if self._device is not None:
            observation, state = observation.to(self._device), state.to(self._device)
        self._before = state
        if self._with_history:
            output, self._state = self._agent(
                state, observation, info, history=_history(slots, rows, t, self._device)
            )
        else:
            output, self._state = self._agent(state, observation, info)
        if self._clock is not None:
            self._clock.agent += perf_counter() - began
        slots.write_action(t, rows, output)
        return output

    def follow(self, step: Step) -> None:
        """Records what came of it."""
        slots, rows, t = self._slots, self._rows, self._t
        if self._clock is not None:
            self._clock.steps += (slots.n if rows is None else rows.size) - step.idle.size
        slots.write_observation(t + 1, rows, step.after)
        if step.idle.size:
            if self._with_history:
                raise SpecError(
                    "agent: its history would hold steps that were none; an environment that resets in a step of its "
                    "own (autoreset NEXT_STEP) is for agents that do not require it"
                )
            self._idle.append((t, step.idle if rows is None else rows[step.idle]))
            self._state = _with_rows(self._state, self._before, step.idle)
        if step.fresh is not None:
            ended = step.reset if rows is None else rows[step.reset]
            slots.write_reset(t, ended, step.after.take(step.reset), step.fresh)
        self._t += 1
        self.is_over = self._t == slots.layout.n_timesteps
        if step.kept is not None:
            self._go_on_with(step.kept)

    def end(self) -> Progress:
        """Where it stopped."""
        slots, rows, t = self._slots, self._rows, self._t
        slots.lengths[... if rows is None else rows] = t
        left = np.arange(slots.n) if rows is None else rows
        slots.check_state(self._state, left.size)
        # The agent may have given back views of what the next rollout overwrites.
        progress = Progress(slots.rows(t, left), left, self._state.clone())
        if self._idle:
            slots.drop(self._idle)
        return progress

    def _go_on_with(self, kept: np.ndarray) -> None:
        """The other rows have ended."""
        slots, rows, state, info = self._slots, self._rows, self._state, self._info
        slots.lengths[... if rows is None else rows] = self._t
        slots.check_state(state, slots.n if rows is None else rows.size)
        self._rows = kept if rows is None else rows[kept]
        self._state = state if state.empty() else state.index(kept)
        self._info = info if info.empty() else info.index(kept)
        if not kept.size:
            self.is_over = True


def _with_rows(state: DictTensor, other: DictTensor, rows: np.ndarray) -> DictTensor:
    """A state with some rows of another."""
    if state.empty():
        return state
    index, made = torch.from_numpy(rows), state.clone()
    for key, tensor in made.items():
        put_rows(tensor, index.to(tensor.device), other[key].to(tensor.device)[index.to(tensor.device)])
    return made


def _history(slots: Slots, rows: np.ndarray | None, t: int, device: torch.device | None) -> TemporalDictTensor:
    n = slots.n if rows is None else rows.size
    slots.lengths[... if rows is None else rows] = t
    history = TemporalDictTensor(slots.read(rows, t), torch.full((n,), t, dtype=torch.int64))
    return history if device is None else history.to(device)
