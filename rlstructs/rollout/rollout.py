"""One rollout: an agent acts in environments for T timesteps, and slots are filled."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from rlstructs.agent import RL_Agent, takes_views
from rlstructs.envs.row_env import RowEnv, SplitEnv
from rlstructs.errors import SpecError
from rlstructs.rollout.progress import Clock, Progress
from rlstructs.shared.slots import Slots
from rlstructs.shared.writing import settle
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.tree import put_rows


@torch.no_grad()
def acquire(
    env: RowEnv,
    agent: RL_Agent,
    slots: Slots,
    progress: Progress,
    agent_info: DictTensor,
    device: torch.device | None = None,
    clock: Clock | None = None,
    is_cut: Callable[[], bool] | None = None,
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
        is_cut: asked after each step whether that was the last one; None for T steps.

    Returns:
        Where it stopped. `slots.lengths` says how many steps each slot holds.
    """
    stopped = _advanced(_acting(env, False, agent, slots, progress, agent_info, device, clock, is_cut))
    assert stopped is not None
    return stopped


@torch.no_grad()
def acquire_in_turns(
    envs: Sequence[SplitEnv],
    agent: RL_Agent,
    slots: Sequence[Slots],
    progress: Sequence[Progress],
    agent_info: DictTensor,
    device: torch.device | None = None,
    clock: Clock | None = None,
    is_cut: Callable[[], bool] | None = None,
) -> list[Progress]:
    """As `acquire`, for groups of environments: the agent acts on one while others are stepped.

    Args:
        envs: the groups, in all of which everything always runs.
        slots, progress: of each group.
        agent_info: a row for each environment of all groups, or empty.
        is_cut: asked after each step of a group whether that was its last one; a group that had been asked before the
            answer changed has one step more than the others.
    """
    ends = np.cumsum([own.n for own in slots]).tolist()
    infos = [agent_info if agent_info.empty() else agent_info.slice(end - own.n, end)
             for own, end in zip(slots, ends, strict=True)]  # fmt: skip
    groups = enumerate(zip(envs, slots, progress, infos, strict=True))
    acting = {index: _acting(env, True, agent, own, before, info, device, clock, is_cut)
              for index, (env, own, before, info) in groups}  # fmt: skip
    stopped: dict[int, Progress] = {}
    while acting:
        for index in list(acting):
            if (end := _advanced(acting[index])) is not None:
                stopped[index] = end
                del acting[index]
    return [stopped[index] for index in range(len(envs))]


def _advanced(acting: Generator[None, None, Progress]) -> Progress | None:
    """Has a rollout go on until it waits; where it stopped, if it did."""
    try:
        next(acting)
    except StopIteration as end:
        stopped: Progress = end.value
        return stopped
    except RuntimeError as error:
        if isinstance(error.__cause__, StopIteration):  # an environment's or an agent's own (PEP 479)
            raise error.__cause__ from None
        raise
    return None


def _acting(
    env: Any,
    is_split: bool,
    agent: RL_Agent,
    slots: Slots,
    progress: Progress,
    agent_info: DictTensor,
    device: torch.device | None,
    clock: Clock | None,
    is_cut: Callable[[], bool] | None,
) -> Generator[None, None, Progress]:
    """A rollout that yields while it waits for a `SplitEnv`. Of a `RowEnv` it yields never, and costs what a loop does.

    Args: as of `acquire`; is_split: whether the environment is a `SplitEnv`.
    """
    rows = None if progress.running.size == slots.n else progress.running
    if progress.state is None:  # of another worker, or another environment, than the one that the slots were made for
        slots.check_observation(progress.observation)
    info = agent_info if rows is None or agent_info.empty() else agent_info.index(rows)
    state = initial_state(agent, info, progress.running.size) if progress.state is None else progress.state
    with_history, is_shown = agent.require_history(), takes_views(agent)
    steps, has_state = slots.begin(rows, state, is_read=with_history), not state.empty()
    steps.write_observation(0, rows, progress.observation)
    writes, moves = is_split or env.writes_rows, device is not None and device.type != "cpu"
    began = acted = 0.0
    idle: list[tuple[int, np.ndarray]] = []
    for t in range(slots.layout.n_timesteps):
        if clock is not None:
            began = perf_counter()
        copies = None
        if rows is not None:
            observation = steps.rows(t, rows).tensors()
        elif is_shown or moves:
            observation = steps.viewed(t)
        else:
            observation, copies = steps.copied(t)
        known = info if is_shown else _own(info)
        if device is not None:
            observation, state = observation.to(device), state.to(device)
        # Agents may write into their state.
        before = state.clone() if env.may_idle and not state.empty() else state
        if with_history:
            output, state = agent(state, observation, known, history=_history(slots, rows, t, device))
        else:
            output, state = agent(state, observation, known)
        del observation
        if copies is not None:
            settle(copies)
        if clock is not None:
            acted = perf_counter()
            clock.agent += acted - began
        if has_state:  # before the agent is given it
            slots.check_state(state, slots.n if rows is None else rows.size)
        steps.write_action(t, rows, output)
        if is_split:
            env.send_rows(output)
            if has_state:  # the agent may write into what it returned when it acts on another group
                state = state.clone()
            yield
            acted = perf_counter()
            step = env.recv_rows(steps.target(t + 1))
        else:
            step = env.step_rows(output, steps.target(t + 1)) if writes else env.step_rows(output)
        if clock is not None:
            clock.environment += perf_counter() - acted
            clock.steps += (slots.n if rows is None else rows.size) - step.idle.size
        if not writes:
            steps.write_observation(t + 1, rows, step.after)
        if step.idle.size:
            if with_history:
                raise SpecError(
                    "agent: its history would hold steps that were none; an environment that resets in a step of its "
                    "own (autoreset NEXT_STEP) is for agents that do not require it"
                )
            idle.append((t, step.idle if rows is None else rows[step.idle]))
            state = _with_rows(state, before, step.idle)
        if step.fresh is not None:
            ended = step.reset if rows is None else rows[step.reset]
            slots.write_reset(t, ended, step.after.take(step.reset), step.fresh)
        if step.kept is not None:
            slots.lengths[... if rows is None else rows] = t + 1
            slots.check_state(state, slots.n if rows is None else rows.size)
            rows = step.kept if rows is None else rows[step.kept]
            state = state if state.empty() else state.index(step.kept)
            info = info if info.empty() else info.index(step.kept)
            if not rows.size:
                break
        if is_cut is not None and is_cut():
            break
    slots.lengths[... if rows is None else rows] = t + 1
    left = np.arange(slots.n) if rows is None else rows
    slots.check_state(state, left.size)
    # A copy: an update may write into what the agent returned, such as a view of a parameter.
    progress = Progress(steps.rows(t + 1, left), left, state.clone())
    slots.end(idle)
    return progress


def initial_state(agent: RL_Agent, info: DictTensor, n: int) -> DictTensor:
    """The state that an agent gives n environments, nobody else's; `info` is copied for it."""
    state = agent.initial_state(_own(info), n)
    return state.clone() if isinstance(state, DictTensor) else state


def _own(info: DictTensor) -> DictTensor:
    """A copy of what an agent may keep and write into."""
    return info.clone() if info._tensors else DictTensor.trusted({})


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
    history = TemporalDictTensor(slots.read(rows, t), torch.full((n,), t, dtype=torch.int64, device="cpu"))
    return history if device is None else history.to(device)
