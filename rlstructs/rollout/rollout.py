"""One rollout: an agent acts for up to T timesteps, and slots are filled."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch

from rlstructs.agent import RL_Agent, evaluation_mode, takes_views
from rlstructs.envs.row_env import RowEnv, SplitEnv, Step
from rlstructs.errors import SpecError
from rlstructs.rollout.progress import Progress
from rlstructs.shared.slots import Slots
from rlstructs.shared.writing import LazyCopies, Steps, settle
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.tree import put_rows
from rlstructs.trace.lane import AGENT, ENVIRONMENT, EPISODES, STEPS, WRITE, Lane

# Returns the observations of some rows (None: all) at t, and copies to settle before those are overwritten.
Observe = Callable[[int, np.ndarray | None], tuple[DictTensor, weakref.ref[LazyCopies] | None]]


class ActingAgent(NamedTuple):
    """The agent of a rollout, and how it acts.

    Attributes:
        agent: acts on the environments that run.
        device: where the agent wants observations; None for the CPU.
        lane: adds up times and steps.
        is_cut: called after each step; the rollout ends there if it returns True. None if it never ends early.
    """

    agent: RL_Agent
    device: torch.device | None = None
    lane: Lane = Lane()  # that nobody reads
    is_cut: Callable[[], bool] | None = None


@torch.no_grad()
def acquire(
    acting_agent: ActingAgent,
    envs: Sequence[RowEnv],
    slots: Sequence[Slots],
    progress: Sequence[Progress],
    agent_info: DictTensor,
) -> list[Progress]:
    """Fills the slots of the running environments with up to T steps each.

    With several groups of environments, the agent acts on one while the others are stepped; each is a `SplitEnv`, all
    of whose environments run. If `is_cut` turns True between two groups, the first of them has one step more than the
    second.

    Args:
        acting_agent: the agent.
        envs: the groups, or all environments as a single one; `progress` says which environments run.
        slots: of each group; their layout sets T.
        progress: what the last call, or a reset, returned for each group.
        agent_info: a row for each environment of all groups, or empty.

    Returns:
        Where each group stopped. `lengths` of the slots hold the number of steps.
    """
    groups = enumerate(zip(envs, slots, progress, strict=True))
    rollouts, progress_after, end = {}, dict[int, Progress](), 0
    with evaluation_mode(acting_agent.agent), contextlib.ExitStack() as stack:
        for index, (env, own, reached) in groups:
            end += own.n
            info = agent_info if agent_info.empty() or len(envs) == 1 else agent_info.slice(end - own.n, end)
            rollout = stack.enter_context(contextlib.closing(Rollout(acting_agent, env, own, reached, info)))
            rollouts[index] = rollout.run(cast(SplitEnv, env) if len(envs) > 1 else None)
        while rollouts:
            for index in list(rollouts):
                if (found := _resume(rollouts[index])) is not None:
                    progress_after[index] = found
                    del rollouts[index]
    return [progress_after[index] for index in range(len(envs))]


def _resume(rollout: Generator[None, None, Progress]) -> Progress | None:
    """Runs a rollout until it waits or ends; returns where it stopped.

    None while it waits.
    """
    try:
        next(rollout)
    except StopIteration as end:
        progress: Progress = end.value
        return progress
    except RuntimeError as error:
        if isinstance(error.__cause__, StopIteration) and _is_pythons(error):  # of an environment or an agent (PEP 479)
            raise error.__cause__ from None
        raise
    return None


def _is_pythons(error: RuntimeError) -> bool:
    """Whether Python made this error as a StopIteration left `run`.

    Then nothing that was called there raised it.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code in (_resume.__code__, Rollout.run.__code__)


class Rollout:
    """One rollout of environments that are stepped together.

    Args:
        acting_agent, env, slots, progress, agent_info: those of one group; see `acquire`.
    """

    def __init__(
        self, acting_agent: ActingAgent, env: RowEnv, slots: Slots, progress: Progress, agent_info: DictTensor
    ) -> None:
        self._acting_agent, self._env, self._slots = acting_agent, env, slots
        self._progress, self._agent_info = progress, agent_info
        self._needs_history = self._is_shown = False
        # Timesteps, ascending, each with the rows whose environments only started an episode in it.
        self._idle: list[tuple[int, np.ndarray]] = []
        self._histories: list[weakref.ref[LazyCopies]] = []  # given to the agent, which may still hold some

    def run(self, group: SplitEnv | None = None) -> Generator[None, None, Progress]:
        """Runs the rollout.

        Yields while the environments step if they are one `group` of several.
        """
        rows, info, state, steps, observe = self._begin()
        (agent, device, lane, is_cut), env, slots = self._acting_agent, self._env, self._slots  # local names are fast
        enter, counters = lane.enter, lane.cells
        is_shown, has_info, has_state = self._is_shown, bool(info._tensors), not state.empty()
        # Some environments alone do not write to the target.
        writes = rows is None and (group is not None or env.writes_rows)
        skip_idle, read_history = self._skip_idle, self._history_reader()
        for t in range(slots.layout.n_timesteps):
            enter(AGENT)
            seen, copies = observe(t, rows)
            known = info if is_shown else info.clone() if has_info else DictTensor.trusted({})
            if device is not None:
                seen, state = seen.to(device), state.to(device)
            before = state.clone() if has_state and env.may_idle else None  # agents may write into theirs
            if read_history is not None:
                output, state = agent(state, seen, known, history=read_history(t, rows))
            else:
                output, state = agent(state, seen, known)
            del seen
            if copies is not None:
                settle(copies)
            enter(WRITE)
            if has_state:  # before the agent gets it in the next step
                slots.check_state(state, slots.n if rows is None else rows.size)
            steps.write_action(t, rows, output)
            enter(ENVIRONMENT)
            if group is not None:
                group.send_rows(output)
                state = state.clone() if has_state else state  # the agent may write into it meanwhile
                yield
                enter(ENVIRONMENT)
                step = group.recv_rows(steps.target(t + 1) if writes else None)
            else:
                step = env.step_rows(output, steps.target(t + 1)) if writes else env.step_rows(output)
            enter(WRITE)
            counters[STEPS] += (slots.n if rows is None else rows.size) - step.idle.size
            if not writes:
                steps.write_observation(t + 1, rows, step.after)
            if step.idle.size:
                state = skip_idle(t, rows, step.idle, before, state)
            if step.fresh is not None:
                ended = step.reset if rows is None else rows[step.reset]
                slots.write_reset(t, ended, step.after.take(step.reset), step.fresh)
                counters[EPISODES] += ended.size
            if step.kept is not None:
                rows, info, state = self._drop_stopped(t, rows, step, info, state)
                writes = False
            if (rows is not None and not rows.size) or (is_cut is not None and is_cut()):
                break
        return self._finish(t, rows, state, steps)

    def close(self) -> None:
        """Copies the histories that the agent still holds: the slots will be overwritten."""
        for history in self._histories:
            settle(history)

    def _begin(self) -> tuple[np.ndarray | None, DictTensor, DictTensor, Steps, Observe]:
        """Prepares the first step.

        Returns:
            The rows that run (None: all), their `agent_info` and state, where to write steps, and the function that
            returns observations.
        """
        (agent, device, _, _), slots, progress = self._acting_agent, self._slots, self._progress
        n_running = progress.running.size
        rows = None if n_running == slots.n else progress.running
        if progress.state is None:  # the slots were laid out for another worker or an earlier environment
            slots.check_observation(progress.observation)
        info = self._agent_info if rows is None or self._agent_info.empty() else self._agent_info.index(rows)
        state = self._begin_state(info, n_running)
        self._needs_history, self._is_shown = agent.require_history(), takes_views(agent)
        is_viewed = self._is_shown or (device is not None and device.type != "cpu")
        steps = slots.begin(rows, state, is_read=self._needs_history)
        steps.write_observation(0, rows, progress.observation)
        return rows, info, state, steps, steps.view_observation if is_viewed else steps.copy_observation

    def _begin_state(self, info: DictTensor, n: int) -> DictTensor:
        """Returns the agent's state in the n running rows.

        It is an initial state where episodes begin.
        """
        agent, progress = self._acting_agent.agent, self._progress
        if progress.state is None:
            return initial_state(agent, info, n)
        if not progress.begins.size:
            return progress.state
        begins = progress.begins
        begun = initial_state(agent, info if info.empty() else info.index(begins), begins.size)
        self._slots.check_state(begun, begins.size)
        state = progress.state.clone()
        for key, tensor in state.items():
            put_rows(tensor, torch.from_numpy(begins).to(tensor.device), begun[key].to(tensor.device))
        return state

    def _history_reader(self) -> Callable[[int, np.ndarray | None], TemporalDictTensor] | None:
        """The function that returns the agent's history; None if the agent needs none."""
        return self._read_history if self._needs_history else None

    def _read_history(self, t: int, rows: np.ndarray | None) -> TemporalDictTensor:
        """The steps before t of these rows (None: all)."""
        slots, device = self._slots, self._acting_agent.device
        n, steps = slots.n if rows is None else rows.size, slots.read_later(rows, t)
        self._histories.append(weakref.ref(steps))
        history = TemporalDictTensor.trusted(steps, torch.full((n,), t, dtype=torch.int64, device="cpu"))
        return history if device is None else history.to(device)

    def _skip_idle(
        self, t: int, rows: np.ndarray | None, idle: np.ndarray, before: DictTensor | None, state: DictTensor
    ) -> DictTensor:
        """Notes the rows that only started an episode; returns the state.

        In these rows it is restored to before the step.
        """
        if self._needs_history:
            raise SpecError(
                "agent: its history would hold steps that are no transitions; an agent that requires a history "
                "cannot act in an environment that resets in a step of its own (autoreset NEXT_STEP), or in which one "
                "of several agents waits"
            )
        self._idle.append((t, idle if rows is None else rows[idle]))
        if state.empty():
            return state
        if before is None:
            raise SpecError(
                f"environment: {self._idle[-1][1].tolist()} only started an episode in a step, but the step before "
                "ended no episode ('done' was False), so that the agent's state before the step was not kept"
            )
        index, restored = torch.from_numpy(idle), state.clone()
        for key, tensor in restored.items():
            put_rows(tensor, index.to(tensor.device), before[key].to(tensor.device)[index.to(tensor.device)])
        return restored

    def _drop_stopped(
        self, t: int, rows: np.ndarray | None, step: Step, info: DictTensor, state: DictTensor
    ) -> tuple[np.ndarray, DictTensor, DictTensor]:
        """Keeps the rows that still run, with their `agent_info` and state.

        The slots of the others end at t.

        A step in which an environment has failed does not count: its slot ends before it.
        """
        slots, kept = self._slots, step.kept
        assert kept is not None
        slots.lengths[... if rows is None else rows] = t + 1
        counters = self._acting_agent.lane.cells
        counters[EPISODES] += len(step.after) - kept.size - step.failed.size
        if step.failed.size:
            slots.lengths[step.failed if rows is None else rows[step.failed]] = t
            counters[STEPS] -= step.failed.size
        slots.check_state(state, slots.n if rows is None else rows.size)
        rows = kept if rows is None else rows[kept]
        state = state if state.empty() else state.index(kept)
        return rows, info if info.empty() else info.index(kept), state

    def _finish(self, t: int, rows: np.ndarray | None, state: DictTensor, steps: Steps) -> Progress:
        """Ends the rollout after step t; returns where it stopped."""
        slots = self._slots
        slots.lengths[... if rows is None else rows] = t + 1
        left = np.arange(slots.n) if rows is None else rows
        slots.check_state(state, left.size)
        # A copy: an update may write into the agent's result, such as a view of a parameter.
        progress = Progress(steps.copy_rows(t + 1, left), left, state.clone())
        slots.end(self._idle)
        return progress


def initial_state(agent: RL_Agent, info: DictTensor, n: int) -> DictTensor:
    """Returns an agent's state for n environments, in memory of its own.

    The agent gets a copy of `info`.
    """
    state = agent.initial_state(info.clone(), n)
    return state.clone() if isinstance(state, DictTensor) else state
