"""The job of a worker: builds environments and agent, and runs rollouts.

It builds them from the user's factories.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Protocol, cast

import numpy as np
import torch

from rlstructs.agent import RL_Agent, evaluation_mode
from rlstructs.checks import call_factory, check_methods
from rlstructs.copying import copy_arguments
from rlstructs.envs.env_list import RESTART, LivesRule
from rlstructs.envs.row_adapter import row_env
from rlstructs.envs.row_env import RowEnv, WaitingEnv, load_statistics, take_statistics
from rlstructs.envs.vec_env import VecEnv
from rlstructs.errors import SpecError
from rlstructs.moments import Moments
from rlstructs.rollout.compiled import acquire_compiled
from rlstructs.rollout.evaluation import Evaluation, Standing, seed_agent
from rlstructs.rollout.feeding import Feed
from rlstructs.rollout.job_specs import JobDescription, JobSettings, Specs, first_step, repeat_row
from rlstructs.rollout.progress import Clock, RolloutReply, WorkerProgress
from rlstructs.rollout.rollout import ActingAgent, acquire
from rlstructs.rollout.waiting import acquire_waiting, check_history
from rlstructs.seeding import PrivateStreams, life_seed, seed_global_streams
from rlstructs.shared.layout import Rows
from rlstructs.shared.module_state import update_agent
from rlstructs.shared.slots import SlotBuffers, Slots
from rlstructs.shared.weights import Inbox, Packed
from rlstructs.structures.arrays import specs_of
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.trace import lane as lanes
from rlstructs.trace.board import Board
from rlstructs.trace.lane import Lane, during
from rlstructs.workers.arena import SharedArena, attach, can_attach
from rlstructs.workers.loop import close_job


@dataclass
class RolloutJob:
    """The environments and the agent of a worker, and their progress.

    Args:
        index: index of the worker.
        arena: will hold the slots.
        weights_arena: holds the tensors of updates.
        settings: how to make environments and agent.
        is_first: whether this worker is the first one in its place; specs are unknown then.
        lane: where the worker's time goes; None for one that nobody reads.

    Attributes:
        env, agent: the environments and the agent.
        slots: the slots of this worker, in each slot buffer.
        progress: where the last rollout stopped, and how the worker has spent its time.
        methods: how an exact state brings back each environment, once that is known.
    """

    index: int
    arena: SharedArena
    weights_arena: SharedArena
    settings: JobSettings
    is_first: bool = True
    lane: InitVar[Lane | None] = None
    specs: Specs | None = field(init=False, default=None)

    def __post_init__(self, lane: Lane | None) -> None:
        settings, self._lane = self.settings, lane or Lane()
        self._agent_seed = None if settings.agent_seeds is None else int(settings.agent_seeds[self.index])
        seed_global_streams(settings.seeds[self.index], self._agent_seed)
        # Two copies of the arguments, because finding the specs may change the one that it uses.
        spare = settings.with_copied_arguments() if self.index == 0 and self.is_first else None
        env = self.make_env(settings.seeds[self.index])
        try:
            if spare is not None:
                example = env.example()
                used = example is None
                self.settings, spent = (spare, settings) if used else (settings, spare)
                self.specs = self._probe(env, example, spent.agent_args)
                if used:  # made again, from the same state of the streams as in other workers
                    seed_global_streams(settings.seeds[self.index], self._agent_seed)
                    env = self.make_env(settings.seeds[self.index])
            self.env = env
            self.agent = self._make_agent()
            check_history(self.agent, env)
            self._seed(self.agent, settings.seeds[self.index])
        except BaseException:
            with contextlib.suppress(Exception):
                env.close()
            raise
        self.slots: list[Slots] = []
        self._inbox = Inbox(self.weights_arena)
        self.error: BaseException | None = None
        self.methods: list[str] | None = None
        self.progress = WorkerProgress.of_new(self.env.n_envs())
        self._evaluation: Evaluation | None = None
        self._feed: Feed | None = None

    def describe(self) -> JobDescription:
        """Returns the number of environments, and the specs if this worker has found them."""
        return JobDescription(self.env.n_envs(), self.specs)

    def attach(self, slot_buffers: SlotBuffers, slots: list[Slots] | None = None) -> None:
        """Maps this worker's block of slots.

        `slots` are the trainer's, if this is its process.
        """
        n, buffer = self.env.n_envs(), self.arena.map()
        self._slot_buffers = slot_buffers
        self.slots = slots or slot_buffers.slots(buffer, first=self.index * n, n=n)
        self._cuts = slot_buffers.cuts(buffer)
        self._attach_groups()

    def feed(self, packed: bytes) -> None:
        """Makes later rollouts write their steps to a memory, too.

        Args:
            packed: a `Feed`, or None for no memory, packed by `rlstructs.workers.arena`.
        """
        self._feed = attach(packed)

    def can_attach(self, packed: bytes) -> bool:
        """Whether this process can open the shared memory of the main process; see `rlstructs.workers.arena`."""
        return can_attach(packed)

    def _attach_groups(self) -> None:
        """Finds the groups of environments, and maps the slots of each."""
        buffer, first, groups = self.arena.map(), self.slots[0].first, self.env.row_groups()
        self._groups: Sequence[RowEnv] = groups if len(groups) > 1 else (self.env,)
        sizes = [group.n_envs() for group in self._groups]
        # The environments of each group, counted from the worker's first.
        self._rows = [range(end - size, end) for size, end in zip(sizes, np.cumsum(sizes).tolist(), strict=True)]
        self._group_slots = [self.slots]
        if len(groups) > 1:
            make = self._slot_buffers.slots
            self._group_slots = [make(buffer, first=first + rows.start, n=len(rows)) for rows in self._rows]

    @during(lanes.RESET)
    def reset(self, statistics: Mapping[str, Moments]) -> None:
        """Starts an episode in every environment, with the `env_info/` rows of the slots.

        Args:
            statistics: statistics of all workers together; empty if environments keep none.
        """
        with FailureGuard(self):
            load_statistics(self.env, statistics)
            self.begin_episodes()

    def begin_episodes(self) -> None:
        """Resets every environment, with the `env_info/` rows of the slots."""
        self.progress.begin_episodes(self.env.reset_rows(self.slots[0].info("env_info/").clone()), self._rows)

    @property
    def running(self) -> np.ndarray:
        """The environments that run, int64, counted from the worker's first."""
        return self.progress.running(self._rows)

    @during(lanes.WRITE)
    def rollout(self, number: int, statistics: Mapping[str, Moments]) -> RolloutReply:
        """Fills the slots of all environments that run.

        Args:
            number: the number of rollouts ordered before.
            statistics: as for `reset`.
        """
        slots, progress = self.slots[number % len(self.slots)], self.progress
        with FailureGuard(self):
            load_statistics(self.env, statistics)
            if self.env.defers_resets and self.running.size < slots.n:
                progress.revive(*self.env.revive_rows(), self._rows)
            if not self.running.size:
                slots.empty()  # of an earlier rollout
                return self._reply([])
            began = perf_counter()
            slots.first_steps[...] = progress.next_steps
            with self._lane.count_rollout(number, self._inbox.version, progress.clock):
                self._acquire(number, slots)
            progress.next_steps += slots.lengths
            if self._feed is not None:
                self._feed.write(slots, number, self._inbox.version)
            cut, running = self._revive_failed(), self.running
            progress.clock.busy += perf_counter() - began
            return self._reply(None if running.size == slots.n or self.env.defers_resets else running.tolist(), cut)

    def _reply(self, running: list[int] | None, cut: list[int] | None = None) -> RolloutReply:
        now = self.progress.clock.fields(), self._inbox.version, take_statistics(self.env)
        return RolloutReply(running, *now, cut, self.env.take_restarts() or None)

    def _revive_failed(self) -> list[int] | None:
        """Starts episodes in environments that failed in the rollout.

        Returns their indexes, or None if there are none.
        """
        failed = self.env.failed_rows
        if not failed.size:
            return None
        which, first = self.env.revive_rows(failed)
        self.progress.revive(which, first, self._rows)
        self.progress.next_steps[which] += 1  # other steps do not follow
        return list(map(int, which))

    def _acquire(self, number: int, slots: Slots) -> None:
        """Runs a rollout."""
        cuts, index, progress, groups = self._cuts, self.index, self.progress, self.progress.groups
        acting_agent = ActingAgent(self.agent, self.settings.device, self._lane, lambda: cuts[index] > number)
        own = [buffers[number % len(buffers)] for buffers in self._group_slots]
        info = slots.info("agent_info/")
        if self.env.pace is not None:
            env = cast(WaitingEnv, self.env)
            progress.groups = [acquire_waiting(acting_agent, env, slots, groups[0], info, progress.n_updates)]
        elif (run := self.env.compiled_rollout(self.agent)) is not None:
            progress.groups = [acquire_compiled(run, acting_agent, slots, groups[0], info)]
        else:
            progress.groups = acquire(acting_agent, self._groups, own, groups, info)

    @during(lanes.UPDATE)
    def update(self, packed: Packed) -> tuple[int, ...]:
        """Gives the agent an update.

        Returns the versions of updates whose tensors the agent still holds.
        """
        with FailureGuard(self):
            update_agent(self.agent, self._inbox.unpack(packed))
            self.progress.n_updates += 1
        return self._inbox.held_versions()

    def renew(self, seeds: Sequence[int], agent_seeds: Sequence[int] | None, clocks: Sequence[tuple[Any, ...]]) -> None:
        """Closes the environments and makes new ones; keeps the agent.

        Args:
            seeds, agent_seeds: as in `JobSettings`.
            clocks: for each worker the fields of the `Clock` to go on with.
        """
        with FailureGuard(self):
            self.end_evaluation()
            seed, n = seeds[self.index], self.env.n_envs()
            self._agent_seed = None if agent_seeds is None else int(agent_seeds[self.index])
            self.env.close()
            seed_global_streams(seed, self._agent_seed)
            self.set_env(self.make_env(seed, copy_arguments(self.settings.env_args)))
            if (n_own := self.env.n_envs()) != n:
                raise SpecError(f"create_env: made {n_own} environments, and {n} before")
            self._seed(self.agent, seed)  # it may have drawn ahead
            self.progress.groups, self.progress.clock = [], Clock(*clocks[self.index])

    def set_env(self, env: RowEnv) -> None:
        """Uses other environments from now on."""
        self._set_lives(env, self.settings.seeds[self.index])
        self.env, self.methods = env, None
        self._attach_groups()

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function with the job and these arguments.

        The function may bring the job to another state.
        """
        if self.error is not None:
            raise self.error
        return function(self, *args)

    def begin_evaluation(
        self,
        seeds: Sequence[int],
        max_steps: int | None,
        infos: Mapping[str, DictTensor],
        statistics: Mapping[str, Moments],
    ) -> None:
        """Makes the environments of an evaluation.

        Args:
            seeds: seeds of the environments, one for each worker.
            max_steps: the most timesteps; None for no end.
            infos: `agent_info` and `env_info`, N rows each, or empty.
            statistics: as for `reset`; the evaluation does not add to them.
        """
        if self.error is not None:
            raise self.error
        self.end_evaluation()
        seed, n = seeds[self.index], self.env.n_envs()
        mine = self._mine()
        own = {name: info if info.empty() else info.slice(mine.start, mine.stop) for name, info in infos.items()}

        def create_env() -> RowEnv:
            env = self.make_env(seed, copy_arguments(self.settings.env_args))
            if (n_own := env.n_envs()) != n:
                env.close()
                raise SpecError(f"create_env: made {n_own} environments for an evaluation, and {n} before")
            load_statistics(env, statistics, frozen=True)
            return env

        self._evaluation = Evaluation(
            create_env, self.agent, self.slots[0].layout, seed, n, max_steps, own, self.settings.device
        )

    @during(lanes.EVALUATE)
    def evaluate(self, wanted: np.ndarray) -> Standing:
        """Continues the evaluation for up to T timesteps.

        Args:
            wanted: int64 (N,), the number of episodes for each environment of all workers.
        """
        assert self._evaluation is not None
        try:
            return self._evaluation.advance(wanted[self._mine()])
        except BaseException:
            with contextlib.suppress(Exception):
                self.end_evaluation()
            raise

    def end_evaluation(self) -> dict[str, Any] | None:
        """Ends the evaluation; returns its episodes, or None without an evaluation.

        `env_index` counts from 0 in this worker.
        """
        evaluation, self._evaluation = self._evaluation, None
        return None if evaluation is None else evaluation.close()

    def _mine(self) -> slice:
        """This worker's environments among those of all workers."""
        n = self.env.n_envs()
        return slice(self.index * n, (self.index + 1) * n)

    def close(self) -> None:
        """Closes evaluation, agent and environments, even if one of them raises."""
        with contextlib.ExitStack() as stack:
            for close in (self.env.close, self.agent.close, self.end_evaluation):  # the last one first
                stack.callback(close)

    def make_env(self, seed: int, env_args: dict[str, Any] | None = None) -> RowEnv:
        """Makes environments with this seed, and has them handle failures as the settings say."""
        env = self._make_all(seed, env_args)
        try:
            self._set_lives(env, seed)
        except BaseException:
            with contextlib.suppress(Exception):
                env.close()
            raise
        return env

    def _set_lives(self, env: RowEnv, seed: int) -> None:
        settings, first = self.settings, (self.settings.first_worker + self.index) * env.n_envs()
        is_on = settings.on_env_failure == RESTART
        rule = LivesRule(partial(self._make_one, first), settings.max_env_restarts, first, seed, only_late=not is_on)
        env.set_lives(rule if is_on or env.replaces_late else None)

    def _make_one(self, first: int, k: int, number: int, seed: int) -> Any:
        """Makes environment k anew, for the `number`-th time.

        `first` is the index of environment 0 among all.
        """
        from rlstructs.rollout.makers import make_one  # imports gymnasium

        seed = life_seed(seed, first + k, number)
        make_all = partial(self._make_all, seed, copy_arguments(self.settings.env_args))
        return make_one(self.settings.create_env, make_all, seed, k)

    def _make_all(self, seed: int, env_args: dict[str, Any] | None) -> RowEnv:
        # The worker's seed replaces a seed among the arguments, as in rlstructures.
        arguments = {**(self.settings.env_args if env_args is None else env_args), "seed": seed}
        env: VecEnv = call_factory("create_env: is called with env_args and seed=", self.settings.create_env, arguments)
        check_methods("create_env must return a VecEnv", env, "n_envs", "reset", "step", "close")
        n = env.n_envs()
        if not isinstance(n, (int, np.integer)) or n < 1:
            raise SpecError(f"create_env: n_envs() must be an int of at least 1, got {n!r}")
        return row_env(env)

    def _seed(self, agent: RL_Agent, seed: int) -> None:
        """Seeds an agent with this worker's agent seed.

        With the seed of the environments if there is none.
        """
        seed_agent(agent, seed if self._agent_seed is None else self._agent_seed)

    def _make_agent(self, agent_args: dict[str, Any] | None = None) -> RL_Agent:
        settings = self.settings
        agent = settings.create_agent(**(settings.agent_args if agent_args is None else agent_args))
        methods = "initial_state", "__call__", "require_history", "close"
        check_methods("create_agent must return an RL_Agent", agent, *methods)
        return agent

    def _probe(self, env: RowEnv, example: Rows | None, agent_args: dict[str, Any]) -> Specs:
        """Finds the specs with a separate agent, made from these arguments.

        Args:
            env: the environments; they are reset and closed if there is no example.
            example: first observations; None to get them from a reset.
            agent_args: arguments of the agent, which it may change.
        """
        settings, n = self.settings, env.n_envs()
        with PrivateStreams()(), torch.no_grad():
            if example is None:
                with contextlib.closing(env):
                    example = env.reset_rows(repeat_row(settings.env_info, n))
            observation = example.tensors()
            seen = observation.to(settings.device or "cpu")
            agent = self._make_agent(agent_args)
            try:
                self._seed(agent, settings.seeds[self.index])
                with evaluation_mode(agent):
                    output, state = first_step(agent, seen, repeat_row(settings.agent_info, n), n)
                    find_hint = getattr(agent, "exploration_hint", None)
                    hint = find_hint(seen) if callable(find_hint) else None
            finally:
                close_job(agent)
        kept = {name: Moments.none(moments.mean.shape) for name, moments in take_statistics(env).items()}
        return Specs(specs_of(observation), specs_of(output), specs_of(state), kept, hint, env.pace is not None)


class Stoppable(Protocol):
    """A job that keeps the error which stopped it halfway; None at first."""

    error: BaseException | None


class FailureGuard:
    """Raises the error of a failed request again at every later request.

    The job stopped halfway, and cannot continue.

    An interrupt without processes is no failure: the batcher then asks for a reset.
    """

    def __init__(self, job: Stoppable) -> None:
        self._job = job

    def __enter__(self) -> None:
        if self._job.error is not None:
            raise self._job.error

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, KeyboardInterrupt):
            self._job.error = error


@dataclass(frozen=True)
class JobFactory:
    """Makes the job of one worker; the pool pickles it."""

    settings: JobSettings

    def __call__(
        self,
        index: int,
        arena: SharedArena,
        weights_arena: SharedArena,
        board_arena: SharedArena,
        restart_number: int = 0,
    ) -> RolloutJob:
        """Makes the job of a worker, or of the `restart_number`-th one that replaces it."""
        settings = self.settings.with_new_streams(index, restart_number) if restart_number else self.settings
        lane = Board(board_arena).make_lane(1 + index)
        job = RolloutJob(index, arena, weights_arena, settings, not restart_number, lane)
        lane.enter(lanes.ORDERLESS)
        return job
