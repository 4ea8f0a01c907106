"""`RL_Batcher`: agents and environments in worker processes, trajectories out.

    trainer                                    worker w of W
    -------                                    -------------
    RL_Batcher()  ── factories, by value ───>  builds E environments and an agent
                  <── specs of a first step ─  (worker 0)
    sizes one shared arena  ── layout ──────>  maps its E slots
    reset()       ── agent_info, env_info ──>  resets its environments
    execute()     ── "rollout" ─────────────>  T steps, written straight into its slots
    get()         <── which slots, how many ─
    copies the slots into private memory

With `run_ahead=k` there are k + 1 slot buffers, and `execute` orders what is missing to k + 1 rollouts: workers
go on while the trainer learns. Orders, updates and resets reach a worker one behind another, through its pipe.

Rows of trajectories never cross a pipe. The arena is anonymous and belongs to those who map it: it is
gone with the last of them, however they end.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

import torch

import rlstructs.errors  # noqa: F401 - first of ours: it sees whether `workers` is ours too
from rlstructs.agent import RL_Agent
from rlstructs.batcher import state_dict
from rlstructs.batcher.arguments import (
    RAISE,
    RunSettings,
    agent_seeds_of,
    arguments_of,
    check_factory,
    check_info,
    check_policy,
    info_example,
    seeds_of,
    warn_of_overlap,
)
from rlstructs.batcher.engine import Engine, start_engine
from rlstructs.batcher.handing_out import HandOut
from rlstructs.batcher.lease import Lease
from rlstructs.batcher.lifecycle import Lifecycle, Phase
from rlstructs.checks import check_count, check_start_method, check_timeout
from rlstructs.debug import is_on
from rlstructs.envs.vec_env import NO_INFO, VecEnv
from rlstructs.frameworks.torch import as_device
from rlstructs.moments import Moments
from rlstructs.rollout.job_settings import JobSettings
from rlstructs.seeding import draw_seed, seeds_argument
from rlstructs.shared.module_state import plain_state
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.trajectories import Trajectories
from rlstructs.worker_setup.setup import check_init_worker
from workers.interrupts import defer_first_interrupt
from workers.public_names import set_module

logger = logging.getLogger("rlstructs")


@set_module("rlstructs")
class RL_Batcher:
    """Runs agents in environments, in worker processes, and hands out what happened.

    Args:
        n_timesteps: T, the most steps that an environment takes in one rollout.
        create_agent: `create_agent(**agent_args)` makes the agent of a worker. May be a lambda.
        agent_args: its arguments.
        create_env: `create_env(**env_args, seed=seed)` makes the `VecEnv` of a worker.
        env_args: its arguments.
        n_processes: W, worker processes; 0 runs the same rollout in this process, for debugging.
        seeds: one for each process, handed to `create_env` as they are (environment k of process p
            then has `seeds[p] + k`); or one int, from which a stream for each environment is derived; None for an
            int that is drawn, differently each time: `stats()["seeds"]` says which, and given here repeats the run.
        agent_info: an example, one row, of what `reset` and `execute` will be given; empty if nothing.
        env_info: likewise.
        agent_seeds: one for each process, handed to `RL_Agent.seed`; None for those of the environments.
        device: where observations and states are wanted, and trajectories handed out.
        start_method: "forkserver" (the default on Linux), "spawn" (elsewhere) or "fork".
        timeout: seconds within which workers must answer, counted from each order, None for no limit. A worker
            that dies or raises is noticed at once either way.
        on_worker_failure: "raise" what happened; or "restart" a worker that died, raised or was late.
            Its successor is built from what the first was built from, with the next seed of its stream,
            gets the last `update`, and resets its environments; `execute` and `get` wait for its start. Of a
            rollout that was lost with a worker the lengths are 0; the others' rollouts are kept. With no
            processes what happens is raised.
        max_restarts: how many workers may be replaced in all, None for any number. One whose successors
            fail three times in a row before they have begun ends the batcher with the first error.
        run_ahead: k, how many rollouts workers may begin before the trainer has taken the oldest: they collect while
            it learns. `execute` and `get` keep their meaning, but `get` gives the rollout that was ordered k calls of
            `execute` ago, and what `execute` and `update` are given takes effect k rollouts later: with one update for
            each rollout, its weights are at most k updates old; `policy_version` in `info` says of which update they
            are. Rollouts and their order are the same in every run. `reset` drops what is under way.
        debug: padding, and slots between rollouts, hold poison in place of zeros: NaN, or the extreme of
            an integer (`rlstructs.debug`); a leased tensor raises when it is used after its release. None
            for what the variable RLSTRUCTS_DEBUG says.
        init_worker: `init_worker(index)` is called in each worker before anything else of yours, in one that takes
            another's place too, with the index of the worker; with no processes once in this one, with 0. For what
            workers do not take over by themselves (see the page on start methods). May be a lambda.

    Raises:
        SpecError, TypeError: an argument is not what is needed.
        OutOfMemoryError: the slots do not fit into memory.
        WorkerError: a worker did not come up.
        Exception: what `create_env`, `create_agent` or `init_worker` raised in a worker.

    Example:
        >>> import gymnasium
        >>> from rlstructs import GymEnvInf, RandomAgent
        >>> def create_env(n_envs, seed):
        ...     return GymEnvInf([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed)
        >>> with RL_Batcher(
        ...     n_timesteps=10, create_agent=lambda: RandomAgent(gymnasium.spaces.Discrete(2)), agent_args={},
        ...     create_env=create_env, env_args={"n_envs": 4}, n_processes=2, seeds=0,
        ... ) as batcher:
        ...     batcher.reset()
        ...     batcher.execute()
        ...     trajectories, n_running = batcher.get()
        >>> trajectories.trajectories["_observation/frame"].shape, n_running
        (torch.Size([8, 10, 4]), 8)
    """

    # From where `warnings.warn` is called, up to the user's call of the constructor.
    _stack_level = 3

    def __init__(
        self,
        n_timesteps: int,
        create_agent: Callable[..., RL_Agent],
        agent_args: Mapping[str, Any],
        create_env: Callable[..., VecEnv],
        env_args: Mapping[str, Any],
        n_processes: int,
        seeds: int | Sequence[int] | None = None,
        agent_info: DictTensor | None = None,
        env_info: DictTensor | None = None,
        agent_seeds: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
        *,
        start_method: str | None = None,
        timeout: float | None = None,
        on_worker_failure: str = RAISE,
        max_restarts: int | None = None,
        run_ahead: int = 0,
        debug: bool | None = None,
        init_worker: Callable[[int], object] | None = None,
    ) -> None:
        self._life = Lifecycle()
        check_count("n_timesteps", n_timesteps, 1)
        check_count("n_processes", n_processes, 0)
        check_start_method(start_method)
        timeout = check_timeout(timeout)
        check_policy(on_worker_failure, max_restarts)
        check_count("run_ahead", run_ahead, 0)
        check_factory("create_agent", create_agent)
        check_factory("create_env", create_env)
        self._device, self._debug = as_device(device), is_on(debug)
        infos = {"agent_info": agent_info, "env_info": env_info}
        self._examples = {name: info_example(name, info) for name, info in infos.items()}
        n_workers = max(1, n_processes)
        self._settings = JobSettings(
            create_agent,
            arguments_of("agent_args", agent_args),
            create_env,
            arguments_of("env_args", env_args),
            seeds_of(draw_seed() if seeds is None else seeds, n_workers),
            agent_seeds_of(agent_seeds, n_workers),
            self._examples["agent_info"],
            self._examples["env_info"],
            None if self._device.type == "cpu" else self._device,
        )
        self._run = RunSettings(
            n_timesteps, n_processes, start_method, timeout, on_worker_failure, max_restarts, run_ahead,
            check_init_worker(init_worker),
        )  # fmt: skip
        self._engine = self._start_engine(self._run)
        try:
            warn_of_overlap(self._settings.seeds, self._engine.n_envs, self._stack_level)
            self._hand_out = HandOut(self._engine, self._life, self._device)
            self._life.phase = Phase.NEW
        except BaseException:
            with contextlib.suppress(Exception):
                self._engine.close()
            raise

    def n_elems(self) -> int:
        """Number of environments over all workers, N = W * E."""
        return self._engine.n_elems

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory that rollouts take; known before the first of them takes it."""
        return self._engine.transport.nbytes

    @property
    def policy_version(self) -> int:
        """How many times `update` was called."""
        return self._engine.policy_version

    def reset(self, agent_info: DictTensor = NO_INFO, env_info: DictTensor = NO_INFO) -> None:
        """Starts an episode in every environment; drops agents' states, and episodes that had not ended.

        It waits for the rollouts that are under way, those of a run-ahead too, and drops them: a cell of a notebook
        that was interrupted can be run again. Interrupted itself, it can be called again.

        Args:
            agent_info: N rows with the keys of the constructor's example, on the CPU; kept until the
                next `reset`, or `execute` with another.
            env_info: likewise; row i is the `options` of environment i's resets.

        Raises:
            SpecError: an info is not as its example; the batcher is as it was.
            StateError: a rollout is leased: release it first.
            Exception: what an environment raised, or an agent or environment in a rollout that was under way.
        """
        self._hand_out.drop_lease()
        self._life.check("reset", Phase.NEW, Phase.READY, Phase.RUNNING, Phase.ENDED, Phase.INTERRUPTED)
        infos = {"agent_info": agent_info, "env_info": env_info}
        for name, info in infos.items():
            check_info(name, info, self._examples[name], self.n_elems())
        with self._life.failing("reset", lambda: self._engine.is_halfway):
            self._engine.settle()
            self._life.phase = Phase.INTERRUPTED  # until it is through
            self._hand_out.forget()
            self._engine.reset(infos)
            self._life.phase = Phase.READY

    def execute(self, agent_info: DictTensor | None = None) -> None:
        """Starts a rollout and returns at once; `get` gives it, or, with a run-ahead, the oldest one.

        Ctrl-C goes through once the rollout is started; with no processes once it is over, after five seconds, or when
        it comes again: then the next call is `reset`.

        Args:
            agent_info: N rows that replace the ones in force, from the rollout on that is started now; the rows of
                environments that have ended are ignored. None, or an empty one, keeps them.

        Raises:
            SpecError: the info is not as its example; the batcher is as it was.
            StateError: there was no `reset`, a rollout is under way or leased, or every environment has ended.
        """
        self._hand_out.drop_lease()
        self._life.check("execute", Phase.READY)
        agent_info = None if agent_info == NO_INFO else agent_info
        if agent_info is not None:
            check_info("agent_info", agent_info, self._examples["agent_info"], self.n_elems())
        with self._life.failing():
            self._engine.mend()
        with defer_first_interrupt(), self._life.failing("execute", lambda: self._engine.is_halfway):
            self._life.phase = Phase.INTERRUPTED  # until it is through
            self._engine.begin(agent_info)
            self._life.phase = Phase.RUNNING

    @overload
    def get(
        self,
        blocking: Literal[True] = True,
        out: Trajectories | None = None,
        *,
        min_workers: int | None = None,
        preempt: float | None = None,
    ) -> tuple[Trajectories, int]: ...

    @overload
    def get(
        self,
        blocking: bool,
        out: Trajectories | None = None,
        *,
        min_workers: int | None = None,
        preempt: float | None = None,
    ) -> tuple[Trajectories, int] | tuple[None, None]: ...

    def get(
        self,
        blocking: bool = True,
        out: Trajectories | None = None,
        *,
        min_workers: int | None = None,
        preempt: float | None = None,
    ) -> tuple[Trajectories, int] | tuple[None, None]:
        """The rollout that `execute` started, in memory of its own.

        A row for each environment that ran when the rollout began, in the order of their global
        index. `trajectories`, up to the longest length, zeros in the padding:

        - `observation/k`: what the agent saw at t;
        - `action/k`: what it put out;
        - `_observation/k`: what followed, with the reward of the step; the true final observation
          where an episode ended.

        `info`: `agent_info/k`, `env_info/k`, `agent_state/k` as they were before the first step;
        `env_index`, int64, the environment's global index; and `policy_version`, int64, how many updates
        the agent had had.

        Args:
            blocking: wait for it. Otherwise return `(None, None)` until all of it is there, and wait only while
                successors of workers that failed start.
            out: what it is written to in place of new memory, pinned perhaps: with the same keys, dtypes and
                shapes, at least as many rows as environments run, and `n_timesteps` or more, such as an earlier
                rollout of that size. The trajectories that are returned are the first of its rows and
                timesteps, or a copy of them on the batcher's device.
            min_workers: hand out the environments of so many workers, or more, as soon as they are through, in
                place of all: first come, first served. The others' rollouts come with the `get` after another
                `execute`, which starts one in those who are through.
            preempt: a fraction, above 0 and up to 1, of the workers: once so many are through, the others end their
                rollouts after the step that they are in; their lengths say so.

        Returns:
            The trajectories and the number of environments that still run.

        Raises:
            StateError: there was no `execute`.
            SpecError: an argument does not fit; the rollout can still be had.
            WorkerError: a worker died, or did not answer in time.
            Exception: what an environment or agent raised, with the worker's traceback as its cause.
        """
        return self._hand_out.get(blocking, out, min_workers, preempt)

    def lease(self) -> Lease:
        """The rollout that `execute` started, where the workers wrote it: `get` without a copy.

        Returns:
            A `Lease`, for a `with` block: it unpacks into what `get` returns, on the CPU, but what lies behind a row's
            length is of no meaning. The next `execute` or `reset` comes after its release; with a run-ahead workers go
            on meanwhile.

        Raises:
            StateError, WorkerError, Exception: as `get`.
        """
        return self._hand_out.lease(
            lambda _, trajectories, *rest: Lease(trajectories, *rest, is_guarded=self._debug)
        )

    def update(self, info: Any) -> None:
        """Calls `update(info)` of every agent, and waits for it.

        With a run-ahead it does not wait: agents are updated behind the rollouts that were ordered before, and what an
        agent raises comes with the rollout after those. Ctrl-C goes through when all agents are updated, after
        five seconds, or when it comes again.

        Args:
            info: a `torch.nn.Module`, of which agents get the state dict that its plain twin has: without the names
                that `torch.compile`, `DataParallel` and their like put before those of the network, and with
                parametrisations applied. Or any object that can be pickled. It goes through shared memory, once;
                agents get its tensors as they are now, on the CPU, for themselves: they may keep and change them.

        Raises:
            StateError: a rollout is under way, and there is no run-ahead: `get` it first.
            SpecError: an agent could not take the state dict of a wrapped module; give `update` the module.
            Exception: what an agent raised.
        """
        ahead = (Phase.RUNNING,) if self._run.run_ahead else ()
        self._life.check("update", Phase.NEW, Phase.READY, Phase.LEASED, Phase.ENDED, Phase.INTERRUPTED, *ahead)
        packed = self._engine.outbox.pack(plain_state(info) if isinstance(info, torch.nn.Module) else info)
        with self._life.failing("update", lambda: self._engine.is_halfway):
            self._engine.update(packed)

    def evaluate(
        self, n_episodes: int, seed: int | Sequence[int], agent_info: DictTensor | None = None
    ) -> DictTensor:
        """Plays episodes with copies of the agents as they are now, in environments made for it.

        Environments, agents and random streams of the training are left as they are, also when it fails or is
        interrupted. Every
        environment gives the same number of episodes, one more or less, so that short ones do not count more
        often than long ones. It takes until the last of them has ended.

        Agents are copied by their `copy_for_evaluation`, and the copies are seeded; environments come from
        `create_env`, which has to make new ones at each call.

        Args:
            n_episodes: how many in all, at least 1.
            seed: of environments and agents, as the constructor's `seeds`.
            agent_info: N rows for the agents; None for those in force.

        Returns:
            `n_episodes` rows, by `env_index`, as `episodes` gives them.

        Raises:
            SpecError: an argument is not what is needed, or the environment gives no `reward` or `done`.
            TypeError: an agent cannot be copied; names what in it cannot be.
            StateError: there was no `reset`, or a rollout is under way: `get` it first.
            WorkerError: as `get`; a worker that is replaced plays its episodes anew.
            Exception: what an agent or environment raised; the training can go on.
        """
        self._life.check("evaluate", Phase.READY, Phase.LEASED, Phase.ENDED)
        check_count("n_episodes", n_episodes, 1)
        if agent_info is not None:
            check_info("agent_info", agent_info, self._examples["agent_info"], self.n_elems())
        self._engine.check_evaluation()
        seeds = seeds_of(seed, len(self._settings.seeds), "seed")
        warn_of_overlap(seeds, self._engine.n_envs, 3)
        with self._life.failing("evaluate", lambda: self._engine.is_halfway):
            found = self._engine.evaluate(n_episodes, seeds, agent_info)
        if isinstance(found, Exception):
            raise found
        return found

    def episodes(self) -> DictTensor:
        """The episodes that ended in the rollouts handed out since the last call, in one row each.

        When this is not called for long, at least the latest 100,000 are kept, and all of the last
        rollout; `stats()["dropped_episodes"]` counts the others.

        Returns:
            `return` float64, `length` int64, `env_index` int64, `terminated` bool, `truncated` bool. Returns are sums
            of `reward`, or of `raw_reward` where there is one: `NormalizeReward` changes nothing about them.

        Raises:
            SpecError: the environment gives no `reward` or `done`.
        """
        self._life.check_open("episodes")
        return self._engine.transport.episodes.take()

    def statistics(self) -> dict[str, Moments]:
        """What `NormalizeObservation` and `NormalizeReward` go by: the moments of all rollouts handed out so far.

        `load_statistics` of such an environment takes it, for a use without a batcher:
        `env.load_statistics(batcher.statistics(), frozen=True)`.

        Returns:
            `Moments` (`count`, `mean`, `variance`: float64 arrays), private memory, by name: `observation/<key>` and
            `return`. Empty if environments keep no statistics.
        """
        self._life.check_open("statistics")
        return {name: moments.copy() for name, moments in self._engine.supervisor.statistics.items()}

    def stats(self) -> dict[str, Any]:
        """What the workers do and have done; cheap enough to ask for after every rollout.

        Returns:
            `workers`: for each a dict of `worker` (its index), `pid`, `state` ("idle", "busy" or "gone"),
            `restarts` (how many were before it), `lost_rollouts` (with them), and, of the present one as
            of its last rollout, `steps`, `steps_per_second` (of all the time since it began), and
            `environment_seconds`, `agent_seconds` and `waiting_seconds`. `restarts` and
            `lost_rollouts` in all. `dropped_episodes`: how many `episodes` will never give.
            `arena_bytes`: the shared memory that rollouts take. `seeds`: those that were given, or the int that was
            drawn.
        """
        self._life.check_open("stats")
        supervisor = self._engine.supervisor
        workers = supervisor.stats()
        return {
            "workers": workers,
            "restarts": supervisor.n_restarts,
            "lost_rollouts": sum(worker["lost_rollouts"] for worker in workers),
            "dropped_episodes": self._engine.transport.episodes.n_dropped,
            "arena_bytes": self.nbytes,
            "seeds": seeds_argument(self._settings.seeds),
        }

    def state_dict(self) -> dict[str, Any]:
        """What a batcher made of the same arguments goes on from, as of the last rollout that was handed out.

        It holds the seeds and how far their streams are, the statistics, how often `update` was called, the counters of
        `stats` and the episodes that `episodes` would give. It does not hold environments, nor agents: save the
        weights yourself. For `torch.save`; `torch.load(weights_only=True)` reads it.

        Returns:
            dicts, lists, tensors, numbers and texts, private memory.
        """
        self._life.check_open("state_dict")
        return state_dict.of_engine(self._engine)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`.

        Environments are made anew and start new episodes: call `reset` next. Their seeds, and those that agents get
        (`RL_Agent.seed`), are the next of their streams, never used before the state was made; the same state always
        goes on in the same way. Episodes that had not ended are gone. Agents stay as they are: `update` them.

        Args:
            state: of a batcher with the same number of workers and environments, the same seeds (`state["seeds"]` is
                what its constructor was given, or had drawn), and the same keys, dtypes and shapes; `n_timesteps` may
                be another, and `n_processes` 0 is as 1.

        Raises:
            SpecError: it is not; says what differs, and the batcher is as it was.
            StateError: a rollout is under way, or leased.
            Exception: what an environment or agent raised.
        """
        self._life.check("load_state_dict", Phase.NEW, Phase.READY, Phase.ENDED, Phase.INTERRUPTED)
        state_dict.check(state, self.state_dict())
        statistics = state_dict.to_statistics(state["statistics"])
        with defer_first_interrupt(), self._life.failing("load_state_dict"):
            self._engine.load(state, statistics)
            self._life.phase = Phase.NEW

    def close(self) -> None:
        """Ends every worker, within seconds whatever they are doing. Idempotent.

        Raises:
            Exception: what an environment or agent raised as it was closed, or, unless workers are restarted, in a
                rollout that was under way; all is gone all the same.
        """
        if self._life.is_closed:
            if hasattr(self, "_engine") and self._life.is_ours:
                self._engine.pool.kill()  # those that an interrupted `close` has left
            return
        failed = self._life.close()
        try:
            if self._life.is_ours:
                self._engine.close()
        except Exception:
            if not failed:  # otherwise the first failure has been reported
                raise
            logger.debug("a worker raised while it was closed", exc_info=True)
        finally:
            self._hand_out.close()
            self._engine.free()

    def __enter__(self) -> RL_Batcher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is not None and not self._life.is_closed:
            self._life.fail(error, "the program failed before")
        self.close()

    def _start_engine(self, run: RunSettings) -> Engine:
        """Starts what runs rollouts."""
        return start_engine(self._settings, run, self._debug)
