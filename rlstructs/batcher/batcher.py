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

With `run_ahead=k` there are k + 1 slot buffers, and `execute` orders rollouts until k + 1 are under way: workers go on
while the trainer learns. Orders, updates and resets reach a worker one after another, through its pipe.

Rows of trajectories never cross a pipe. The arena is anonymous: it is freed when the last process that maps it ends,
even if it is killed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, overload

import torch

import rlstructs.errors  # noqa: F401 - before other modules of ours: it checks that `workers` is ours too
from rlstructs.agent import RL_Agent
from rlstructs.batcher.arguments import (
    RAISE,
    RunSettings,
    agent_seeds_of,
    arguments_of,
    check_factory,
    check_info,
    constructor_arguments,
    info_example,
    seeds_of,
    warn_of_overlap,
)
from rlstructs.batcher.engine import Delivery, Engine
from rlstructs.batcher.evaluation import EpisodePlan
from rlstructs.batcher.lease import Lease
from rlstructs.batcher.lifecycle import Lifecycle, Phase
from rlstructs.batcher.start import start_engine
from rlstructs.batcher.state import plan_load, take_state
from rlstructs.checks import check_count, other_words, warn_caller
from rlstructs.debug import is_on
from rlstructs.envs.vec_env import NO_INFO, VecEnv
from rlstructs.frameworks.torch import find_device
from rlstructs.moments import Moments
from rlstructs.rollout.job_specs import JobSettings
from rlstructs.seeding import draw_seed
from rlstructs.shared.module_state import plain_state
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.trajectories import Trajectories
from rlstructs.trace.lane import EVALUATE, LEASE, ORDER, READ, RESET, SAVE, UPDATE, Lane, during
from rlstructs.trace.timeline import Timeline, record
from rlstructs.trace.verdict import explain
from rlstructs.workers.interrupts import defer_first_interrupt
from rlstructs.workers.public_names import set_module

if TYPE_CHECKING:
    from gymnasium.envs.registration import EnvSpec
    from typing_extensions import Self


logger = logging.getLogger("rlstructs")

B = TypeVar("B", bound="RL_Batcher")


@set_module("rlstructs")
class RL_Batcher:
    """Runs agents in environments, in worker processes, and returns their trajectories.

    `make` is a shorter way to construct one.

    Args:
        n_timesteps: T, the most steps that an environment takes in one rollout.
        create_agent: `create_agent(**agent_args)` makes the agent of a worker. May be a lambda.
        agent_args: its arguments.
        create_env: `create_env(**env_args, seed=seed)` makes the `VecEnv` of a worker.
        env_args: its arguments.
        n_processes: W, the number of worker processes; 0 runs the same rollouts in this process, for debugging.
        seeds: one for each process, which `create_env` gets as it is (environment k of process p then has
            `seeds[p] + k`); or one int, from which a stream for each environment is derived; None draws a new
            int each time, which `stats()["seeds"]` returns: given here, it repeats the run.
        agent_info: an example, one row, of the argument of `reset` and `execute`; None if there is none.
        env_info: an example, one row, of the argument of `reset`.
        agent_seeds: one for each process, for `RL_Agent.seed`; None for the seeds of the environments.
        device: where agents get observations and states, and trajectories are handed out.
        start_method: "forkserver" (the default on Linux), "spawn" (elsewhere) or "fork".
        timeout: seconds within which workers must answer, counted from each request; None for no limit. A worker
            that dies or raises is noticed at once either way.
        on_worker_failure: "raise" raises the error; "restart" replaces a worker that died, raised or was late.
            Its successor is built from the same factories and arguments, with the next seed of its stream, gets the
            last `update`, and resets its environments; `execute` and `get` wait for its start. A rollout that was lost
            with a worker has lengths of 0; the rollouts of the other workers are kept. With no processes, the
            error is always raised.
        max_restarts: how many workers may be replaced in all; None for any number. If the successors of one worker
            fail three times in a row before they have begun, the first error is raised, and the batcher has failed.
        on_env_failure: "raise" treats an environment that raises in `step` or `reset` as a worker that failed;
            "restart" closes it and makes it anew, by the function given to `make`, or by `create_env`, of which only
            this environment is kept. Its row of the rollout ends with its last good step, as `lengths` tells: the
            episode is cut there, neither terminated nor truncated. All others go on. The new environment begins an
            episode with the next rollout; its stream follows from the seed. The log has the traceback, as a warning. It
            is for `GymEnv`, `GymEnvInf`, and a `GymVectorEnv` of a `SharedVectorEnv`.
        max_env_restarts: how often each environment may be made anew in all; None for any number. Then, or if it fails
            more than three times in a row without a step in between, the error counts as the worker's.
        run_ahead: k, how many rollouts workers may begin before the trainer has taken the oldest: they collect while
            it learns. `get` then gives the rollout that was ordered k calls of `execute` ago,
            and arguments of `execute` and `update` take effect k rollouts later. With one update for
            each rollout, a rollout's weights are at most k updates old; `policy_version` in `info` says which update
            they came with. Rollouts and their order are the same in every run. `reset` drops rollouts under way.
        debug: whether padding, and slots between rollouts, hold poison instead of zeros: NaN, or an extreme integer
            (`rlstructs.debug`); a leased tensor then raises when it is used after its release. None for the value of
            the environment variable RLSTRUCTS_DEBUG.
        init_worker: `init_worker(index)` is called in each worker, also in a successor, with the worker's index, before
            any other code of yours. With no processes it is called once, with 0. For settings that workers do not
            take over by themselves (see the page on start methods). May be a lambda.
        memory: a memory that workers write to, see `feed`; None for none.

    Raises:
        SpecError, TypeError: an argument has a wrong value or type.
        RuntimeError: torch has no such `device` here.
        OutOfMemoryError: the slots do not fit into memory.
        WorkerError: a worker could not start.
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

    @other_words(n_workers="n_processes", seed="seeds")
    def __init__(
        self, n_timesteps: int, create_agent: Callable[..., RL_Agent], agent_args: Mapping[str, Any],
        create_env: Callable[..., VecEnv], env_args: Mapping[str, Any], n_processes: int,
        seeds: int | Sequence[int] | None = None, agent_info: DictTensor | None = None,
        env_info: DictTensor | None = None, agent_seeds: Sequence[int] | None = None,
        device: torch.device | str = "cpu", *, start_method: str | None = None, timeout: float | None = None,
        on_worker_failure: str = RAISE, max_restarts: int | None = None, run_ahead: int = 0,
        debug: bool | None = None, init_worker: Callable[[int], object] | None = None, memory: Any = None,
        on_env_failure: str = RAISE, max_env_restarts: int | None = None,
    ) -> None:  # fmt: skip
        self._life = Lifecycle()
        run = RunSettings(
            n_timesteps, n_processes, start_method, timeout, on_worker_failure, max_restarts, run_ahead, init_worker,
            on_env_failure, max_env_restarts,
        ).check()  # fmt: skip
        self._device, self._debug = find_device(device), is_on(debug)
        infos = {"agent_info": agent_info, "env_info": env_info}
        self._examples = {name: info_example(name, info) for name, info in infos.items()}
        settings = JobSettings(
            check_factory("create_agent", create_agent), arguments_of("agent_args", agent_args),
            check_factory("create_env", create_env), arguments_of("env_args", env_args),
            seeds_of(draw_seed() if seeds is None else seeds, run.n_workers),
            agent_seeds_of(agent_seeds, run.n_workers),
            self._examples["agent_info"], self._examples["env_info"],
            None if self._device.type == "cpu" else self._device, on_env_failure, max_env_restarts,
        )  # fmt: skip
        self._engine = self._start_engine(settings, run)
        self._lane = self._engine.board.lane
        try:
            warn_of_overlap(settings.seeds, self._engine.n_envs)
            if self._engine.hint:
                warn_caller(self._engine.hint)
            self._delivery = Delivery(self._engine, self._life, self._device)
            self._life.phase = Phase.NEW
            if memory is not None:
                self.feed(memory)
        except BaseException:
            with contextlib.suppress(Exception):
                self._engine.close()
            raise

    @classmethod
    def make(
        cls,
        env: str | Callable[..., Any] | EnvSpec,
        agent: RL_Agent | torch.nn.Module | Callable[..., Any] | None = None,
        *,
        n_envs: int = 8,
        n_workers: int | None = None,
        n_timesteps: int = 128,
        seed: int | None = None,
        env_args: Mapping[str, Any] | None = None,
        device: torch.device | str = "cpu",
        episode_seeds: bool = False,
        clip_actions: bool = False,
        threads: bool = False,
        **settings: Any,
    ) -> Self:
        """Makes a batcher of environments that reset themselves; shorter than the constructor.

        Args:
            env: an id of gymnasium's registry; or a function, which may be a lambda, that makes one gymnasium
                environment, or a vectorised one (a `VecEnv`, or gymnasium's `VectorEnv`) of `n_envs`, or `num_envs`,
                environments. It is called in each worker, with those of `n_envs`, `num_envs` and `seed` that it takes.
                Or an environment of gymnax or Brax, or one of jax's pure functions: see `JaxEnv`.
            agent: an `RL_Agent`, copied to each worker; or a network that maps observations to logits or to actions, or
                returns a `torch.distributions.Distribution` (see `ModuleAgent`); or a function that makes one of these
                and may take `observation_space` and `action_space`; or None for random actions. Networks act in
                evaluation mode (see `RL_Agent.keeps_modes`).
            n_envs: N, the number of environments of all workers, a multiple of `n_workers`.
            n_workers: W; 0 runs the environments in this process; None for the largest number, up to that
                of the cores, that divides `n_envs`.
            n_timesteps, device: see the constructor.
            seed: `seeds` of the constructor.
            env_args: further arguments of `gymnasium.make`, or of the function.
            episode_seeds: see `GymEnv`; only for single environments.
            clip_actions: give gymnasium's environments the actions of a Box clipped to its bounds, as Stable-Baselines3
                does; trajectories keep them as they were drawn, with their `log_prob`. False gives environments what
                was drawn, beyond the bounds, too.
            threads: step each environment in a thread of its own, for environments that wait for another process, a
                server or a device: see `GymEnvThreads`, whose `min_ready`, `max_wait`, `deadline`, `step_timeout` and
                `on_env_timeout` may be given too. Only for single environments.
            settings: further arguments of the constructor, by name.

        Raises:
            SpecError, TypeError, Exception: see the constructor.

        Example:
            >>> from rlstructs import RL_Batcher
            >>> with RL_Batcher.make("CartPole-v1", n_envs=4, n_workers=2, n_timesteps=10, seed=0) as batcher:
            ...     lengths = [trajectories.lengths.tolist() for trajectories in batcher.rollouts(n_steps=80)]
            >>> lengths
            [[10, 10, 10, 10], [10, 10, 10, 10]]
        """
        arguments = constructor_arguments(
            cls, env, agent, n_envs, n_workers, env_args, device, episode_seeds, clip_actions, threads, settings
        )
        return cls(n_timesteps, seeds=seed, **arguments)

    def rollouts(self, n_steps: int | None = None) -> Iterator[Trajectories]:
        """Yields one rollout after another, as `execute` and `get` do.

        Calls `reset` first if one is due.

        `for trajectories in batcher:` does the same, without end. After a `break`, a new loop goes on where the last
        one stopped. If agents or environments take an info, call `reset` with it before the loop, whose resets keep
        it; to give another one to each rollout, call `execute` and `get` instead.

        Args:
            n_steps: the steps of all environments together after which no new rollout begins; None for no end.

        Raises:
            SpecError, TypeError: `n_steps` is not an int above 0.
            StateError, Exception: what `reset`, `execute` and `get` raise.
        """
        return run_rollouts(self, self._life, lambda: self._engine.infos, n_steps)

    def __iter__(self) -> Iterator[Trajectories]:
        return self.rollouts()

    @during(RESET)
    def reset(self, agent_info: DictTensor = NO_INFO, env_info: DictTensor = NO_INFO) -> None:
        """Starts an episode in every environment.

        Drops the agents' states and unfinished episodes. It waits for the rollouts that are under way, those of a
        run-ahead too, and drops them: a cell of a notebook that was interrupted can be run again. If it is itself
        interrupted, it can be called again.

        Args:
            agent_info: N rows with the keys of the constructor's example, on the CPU; in force until the next `reset`,
                or an `execute` with another one.
            env_info: N rows, likewise; row i is the `options` of environment i's resets.

        Raises:
            SpecError: an info does not match its example; nothing changes.
            StateError: a rollout is leased: release it first.
            Exception: what an environment raised, or an agent or environment in a rollout that was under way.
        """
        self._delivery.drop_lease()
        self._life.check("reset", Phase.NEW, Phase.READY, Phase.RUNNING, Phase.ENDED, Phase.INTERRUPTED)
        infos = {"agent_info": agent_info, "env_info": env_info}
        for name, info in infos.items():
            check_info(name, info, self._examples[name], self.n_elems())
        with self._life.note_failures("reset", self._engine.is_halfway):
            self._engine.settle()
            self._life.phase = Phase.INTERRUPTED  # until the reset is done
            self._delivery.forget()
            self._engine.reset(infos)
            self._life.phase = Phase.READY

    @during(ORDER)
    def execute(self, agent_info: DictTensor | None = None) -> None:
        """Starts a rollout and returns at once.

        `get` returns it or, with a run-ahead, the oldest one. Ctrl-C takes effect once the rollout is started. With no
        processes it takes effect once the rollout is over, after five seconds, or at a second Ctrl-C; call `reset` next
        then.

        Args:
            agent_info: N rows that replace the ones in force, from the rollout on that is started now; the rows of
                environments that have ended are ignored. None, or an empty one, keeps them.

        Raises:
            SpecError: the info does not match its example; nothing changes.
            StateError: there was no `reset`, a rollout is under way or leased, or every environment has ended.
        """
        self._delivery.drop_lease()
        self._life.check("execute", Phase.READY)
        agent_info = None if agent_info == NO_INFO else agent_info
        if agent_info is not None:
            check_info("agent_info", agent_info, self._examples["agent_info"], self.n_elems())
        with self._life.note_failures():
            self._engine.replace_gone()
        with defer_first_interrupt(), self._life.note_failures("execute", self._engine.is_halfway):
            self._life.phase = Phase.INTERRUPTED  # until the rollout is started
            self._engine.begin_rollouts(agent_info)
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

    @during(READ)
    def get(
        self,
        blocking: bool = True,
        out: Trajectories | None = None,
        *,
        min_workers: int | None = None,
        preempt: float | None = None,
    ) -> tuple[Trajectories, int] | tuple[None, None]:
        """Returns the rollout that `execute` started, in memory of its own.

        It has a row for each environment that ran when the rollout began, sorted by global index. `trajectories`,
        (B, T, ...), ends at the longest length and has zeros in the padding:

        - `observation/k`: what the agent saw at t;
        - `action/k`: the agent's output at t;
        - `_observation/k`: what followed, with the reward of the step; the true final observation where an episode
          ended.

        `info`, (B, ...): `agent_info/k`, `env_info/k`, `agent_state/k` as they were before the first step;
        `env_index`, int64, the global index of the environment; and `policy_version`, int64, the number of updates that
        the agent had received.

        Args:
            blocking: whether to wait. Otherwise return `(None, None)` until all of the rollout is there, and wait only
                for the start of successors of workers that failed.
            out: memory to copy the rollout to, perhaps pinned, with the same keys, dtypes and shapes, at least as many
                rows as environments run, and at least `n_timesteps`, such as an earlier rollout of that size. The
                returned trajectories are views of its first rows and timesteps, or a copy of them on the batcher's
                device.
            min_workers: return the rollouts of that many workers or more as soon as they are done, without waiting for
                the others: first come, first served. The others' rollouts come with the `get` after the next
                `execute`, which starts one in those that are done.
            preempt: a fraction of the workers, above 0 and up to 1: once so many are done, the others end their
                rollouts after the step that they are in, so that these have smaller lengths.

        Returns:
            The trajectories, and the number of environments that still run.

        Raises:
            StateError: there was no `execute`.
            SpecError: an argument does not fit; the rollout can still be fetched.
            WorkerError: a worker died, or did not answer in time.
            Exception: what an environment or agent raised, with the worker's traceback as its cause.
        """
        return self._delivery.get(blocking, out, min_workers, preempt)

    @during(READ)
    def wait(
        self, blocking: bool = True, *, min_workers: int | None = None, preempt: float | None = None
    ) -> tuple[int, int] | tuple[None, None]:
        """Waits for the rollout that `execute` started, without reading its rows.

        It is for a memory that workers write to, see `feed`.

        Args:
            blocking, min_workers, preempt: see `get`; with nodes, `min_workers` counts nodes.

        Returns:
            The number of steps, and the number of environments that still run.

        Raises:
            StateError, SpecError, WorkerError, Exception: see `get`.
        """
        return self._delivery.wait(blocking, min_workers, preempt)

    @during(LEASE)
    def lease(self) -> Lease:
        """Lends the rollout that `execute` started: `get` without a copy.

        Tensors are views of the slots that the workers wrote.

        Returns:
            A `Lease` for a `with` block. It unpacks into what `get` returns, but on the CPU, and values behind a row's
            length are undefined. `execute` and `reset` are allowed again after its release; with a run-ahead, workers
            go on meanwhile.

        Raises:
            StateError, WorkerError, Exception: see `get`.
        """
        return self._delivery.lease(lambda _, trajectories, *rest: Lease(trajectories, *rest, is_guarded=self._debug))

    @during(UPDATE)
    def update(self, info: Any) -> None:
        """Calls `update(info)` of every agent, and waits until all have returned.

        With a run-ahead it does not wait: agents are updated after the rollouts that were ordered before, and what an
        agent raises comes with its next rollout. Ctrl-C takes effect when all agents are updated, after five seconds,
        or when it comes again.

        Args:
            info: a `torch.nn.Module`; agents get its state dict, without the prefixes that `torch.compile`,
                `DataParallel` and the like put before names, and with parametrisations applied. Or any
                object that can be pickled. It goes through shared memory, once; each agent gets its own tensors with
                the present values, on the CPU, and may keep and change them.

        Raises:
            StateError: a rollout is under way, and there is no run-ahead: `get` it first.
            SpecError: an agent could not take the state dict of a wrapped module; give `update` the module.
            Exception: what an agent raised.
        """
        ahead = (Phase.RUNNING,) if self._engine.run_ahead else ()
        self._life.check("update", Phase.NEW, Phase.READY, Phase.LEASED, Phase.ENDED, Phase.INTERRUPTED, *ahead)
        packed = self._engine.pack(plain_state(info) if isinstance(info, torch.nn.Module) else info)
        with self._life.note_failures("update", self._engine.is_halfway):
            self._engine.update(packed)

    _life: Lifecycle
    _engine: Engine
    _delivery: Delivery
    _lane: Lane
    # One row of `agent_info` and `env_info`; empty if there is none.
    _examples: dict[str, DictTensor]

    def n_elems(self) -> int:
        """Number of environments over all workers, N = W * E."""
        return self._engine.n_elems

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.n_elems()} environments: {self._life.phase.value}>"

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory that rollouts take; known before the first one takes it."""
        return self._engine.nbytes

    @property
    def policy_version(self) -> int:
        """The number of calls of `update`."""
        return self._engine.policy_version

    def feed(self, memory: Any, names: Mapping[str, str] | None = None) -> None:
        """Makes workers write what they collect to a memory.

        Each worker writes to its own lanes, at the end of each rollout.

        The memory then holds the rollouts that were handed out, in the rows in which `add_trajectories` would have put
        them: `wait`, `get` or `lease` adds those that it returns. Until then they are not seen, and neither are the
        oldest rows, which they may be overwriting: in each lane as many as the rollouts under way have timesteps. What
        is drawn between two calls therefore does not depend on what workers are doing meanwhile. Rollouts that are
        lost, or that `reset`, `close` or another `feed` drops, are not in it.

        The memory moves to shared memory: tensors that the program holds do not follow. While rollouts are under way it
        can be drawn from, read and saved, which waits for them, and not be written to or cleared.

        Where workers cannot write to a memory, the trainer adds each rollout as it hands it out. These are memories on
        a device or with `export=True`, buffers with one ring for all environments (those of torchrl, and a
        `ReplayBuffer` unless there is only one worker), a `CachedReplayBuffer`, a `RayReplay`, whatever a
        `RayBatcher` feeds, and all of them outside Linux, or where /proc hides other processes (`hidepid`).

        Args:
            memory: of `rlstructs.memories` or `rlstructs.replay`, with a lane for each environment or one for all, or a
                `RayReplay`; None to feed none. Rollouts that were ordered before are in none if workers write.
            names: column -> key of the trajectories, or "policy_version", the number of updates that the agent had had.
                None for the usual columns of the memory and, unless it has others already, `policy_version`.

        Raises:
            TypeError, StateError: this is no memory, another batcher feeds it, or a rollout is under way.
            MissingKeyError, SpecError, OutOfMemoryError: it has too few lanes or rows, or other columns.
        """
        self._life.check("feed", Phase.NEW, Phase.READY, Phase.ENDED, Phase.INTERRUPTED)
        self._engine.feed(memory, names, self._life)

    @during(EVALUATE)
    def evaluate(
        self,
        n_episodes: int,
        seed: int | Sequence[int],
        agent_info: DictTensor | None = None,
        *,
        max_steps: int | None = None,
    ) -> DictTensor:
        """Plays episodes with copies of the agents, in environments of their own.

        The copies act as the agents do now. Environments, agents and random streams of the training stay as they are,
        even if the evaluation fails or is interrupted. Every environment gives the same number of episodes, one more or
        less, so that short ones do not count more often than long ones. The call returns when the last of them has
        ended.

        Where an environment plays no episode, for example because its agent never joins, others play its share. If
        none can, or after `max_steps`, the evaluation ends with a warning that names the environments whose episodes
        are missing. Environments whose episodes never end need `max_steps`: without it, the evaluation ends after a
        million timesteps in which no episode that counts has ended.

        Agents are copied by their `copy_for_evaluation`, and the copies are seeded. Environments come from
        `create_env`, which has to make new ones at each call.

        Args:
            n_episodes: number of episodes in all, at least 1.
            seed: seeds environments and agents; see `seeds` of the constructor.
            agent_info: N rows for the agents; None for those in force.
            max_steps: the most timesteps of each environment, in all its episodes; None for no end.

        Returns:
            `n_episodes` rows, or fewer with a warning, with the columns of `episodes`, sorted by `env_index`.

        Raises:
            SpecError: an argument has a wrong value, or the environment gives no `reward` or `done`.
            TypeError: an agent cannot be copied; the message names the part that cannot.
            StateError: there was no `reset`, or a rollout is under way: `get` it first.
            WorkerError: see `get`; a worker that is replaced plays its episodes anew.
            Exception: what an agent or environment raised; the training can go on.
        """
        self._life.check("evaluate", Phase.READY, Phase.LEASED, Phase.ENDED)
        check_count("n_episodes", n_episodes, 1)
        if max_steps is not None:
            check_count("max_steps", max_steps, 1)
        if agent_info is not None:
            check_info("agent_info", agent_info, self._examples["agent_info"], self.n_elems())
        engine, plan = self._engine, EpisodePlan(n_episodes, self._engine.layout, max_steps)
        seeds = seeds_of(seed, len(engine.settings.seeds), "seed")
        warn_of_overlap(seeds, engine.n_envs)
        with self._life.note_failures("evaluate", engine.is_halfway):
            found = engine.play(plan, seeds, agent_info)
        if isinstance(found, Exception):
            raise found
        return plan.take(found)

    def episodes(self) -> DictTensor:
        """Returns the episodes that ended since the last call, one row each.

        Only episodes in rollouts that were handed out count. If this is not called for long, at least the latest
        100,000 are kept, and all of the last rollout; `stats()["dropped_episodes"]` counts the others.

        Returns:
            `return` float64, `length` int64, `env_index` int64, `terminated` bool, `truncated` bool, (K,). Returns are
            sums of `reward`, or of `raw_reward` where there is one: `NormalizeReward` does not change them.

        Raises:
            SpecError: the environment gives no `reward` or `done`.
        """
        self._life.check_open("episodes")
        return self._engine.episodes.take()

    def statistics(self) -> dict[str, Moments]:
        """The moments of all rollouts handed out, by which `NormalizeObservation` and `NormalizeReward` normalise.

        `load_statistics` of such an environment takes them, for a use without a batcher:
        `env.load_statistics(batcher.statistics(), frozen=True)`.

        Returns:
            `Moments` (`count`, `mean`, `variance`: float64 arrays), private memory, by name: `observation/<key>` and
            `return`. Empty if environments keep no statistics.
        """
        self._life.check_open("statistics")
        return {name: moments.copy() for name, moments in self._engine.statistics.items()}

    def stats(self) -> dict[str, Any]:
        """Returns what each worker is doing and has done; cheap.

        It can be called after every rollout.

        Returns:
            `workers`: for each a dict of `worker` (its index), `pid`, `state` ("idle", "busy" or "gone"),
            `restarts` (how many workers were in its place before), `lost_rollouts` (how many were lost with them),
            `env_restarts` (how often each of its environments was made anew, a list), and, as of its own last rollout,
            `steps`, `steps_per_second` (over all the time since it began), `environment_seconds`, `agent_seconds` and
            `waiting_seconds`. `restarts` and `lost_rollouts`: the sums over all workers. `env_restarts`: those of all N
            environments, a list. `dropped_episodes`: how many `episodes` will never return. `arena_bytes`: the shared
            memory that rollouts take. `seeds`: the given ones, or the int that was drawn.
        """
        self._life.check_open("stats")
        return self._engine.stats()

    def metrics(self) -> dict[str, float]:
        """Returns numbers for a log; leaves `episodes` as it is.

        Returns:
            Since the last call: `episode/count`, and the means `episode/return` and `episode/length`, missing where no
            episode ended; `rollout/steps_per_second`, of all environments; `rollout/waiting_share`, the share of the
            time, 0 to 1, that `execute`, `get`, `wait` and `lease` waited for workers; `rollout/staleness`, by how many
            updates agents were behind when what they did was handed out, the mean over steps, missing without any. In
            all: `rollout/steps`, which `state_dict` keeps; `rollout/restarts`, of workers; `rollout/env_restarts`, of
            environments, and `rollout/env_restarts/<index>` for each that was made anew.
        """
        self._life.check_open("metrics")
        return self._engine.metrics()

    def trace(self, path: str | Path | None) -> contextlib.AbstractContextManager[Timeline | None]:
        """Writes a timeline of what the trainer and each worker do.

        It covers a `with` block.

        The file opens in Perfetto (https://ui.perfetto.dev) and in `chrome://tracing`; `rlstructs trace FILE` says what
        follows from it. Each worker has a lane: agent, environment, reset, write, update, wait for an order, start; the
        trainer has wait, read, lease, order, update, evaluate, draw, save, restart, and learn, which is what lies
        between calls; with a `RayBatcher` each node has one too. Arrows lead from an order to its rollout and to its
        delivery. The file is appended to as the program runs, some megabytes a second where steps are quick; a program
        that is killed leaves a file that opens.

        Args:
            path: the file, which is replaced; usually `.json`. Without one (None or "") nothing is recorded.

        Returns:
            A context manager for a `Timeline`, whose `n_lost` counts events that did not fit into memory, which the
            file shows as "not recorded"; for None without a file.

        Raises:
            StateError: a timeline is being written already.
            ClosedError: the batcher is closed.
            OSError: the file cannot be written.

        Example:
            >>> import tempfile
            >>> from rlstructs import RL_Batcher
            >>> path = tempfile.mkdtemp() + "/run.json"
            >>> with RL_Batcher.make("CartPole-v1", n_envs=4, n_workers=2, n_timesteps=10, seed=0) as batcher:
            ...     with batcher.trace(path) as timeline:
            ...         n_rollouts = sum(1 for _ in batcher.rollouts(n_steps=80))
            >>> n_rollouts, timeline.n_lost
            (2, 0)
        """
        self._life.check_open("trace")
        return record(path, self._engine.board)

    def explain(self) -> str:
        """Says where time went since the last call, and what to do.

        Returns:
            Five lines: the bottleneck; what to do; the shares of the trainer's time; of the workers' time; how much was
            done. `rlstructs trace FILE` says the same of a timeline.

        Example:
            >>> from rlstructs import RL_Batcher
            >>> with RL_Batcher.make("CartPole-v1", n_envs=4, n_workers=2, n_timesteps=10, seed=0) as batcher:
            ...     n_rollouts = sum(1 for _ in batcher.rollouts(n_steps=80))
            ...     lines = batcher.explain().splitlines()
            >>> lines[1].split(": ")[0], lines[4].split(",")[0]
            ('to do', '80 steps')
        """
        self._life.check_open("explain")
        return "\n".join(explain(self._engine.board.take_account()))

    @during(SAVE)
    def state_dict(self, exact: bool | str = False) -> dict[str, Any]:
        """Returns the state of the batcher, for `load_state_dict`; collection is not affected.

        By default, the state after the last rollout that was handed out: the seeds and how far their streams are, the
        statistics, how often `update` was called, the counters of `stats`, `rollout/steps`, and the episodes that
        `episodes` would return. It holds neither environments nor agents: save the weights yourself.

        With `exact`, everything: a batcher that loads it goes on, bit for bit, as this one does. Rollouts under way are
        finished first, with what they write to a memory that is fed: save the memory after the batcher. Environments
        are in the middle of their episodes. Each is brought back by the first method that does, which is tested
        once: two copies are made, and have to behave alike (see the page on exact resumption). Agents are pickled, but
        for those that have `get_state()` and `set_state(state)`.

        Save it with `torch.save`; `torch.load(weights_only=True)` reads it.

        Args:
            exact: whether the state is exact; "best" for an exact one in which all environments of a worker begin new
                episodes if one of them cannot be brought back, with a warning.

        Returns:
            dicts, lists, tensors, numbers and texts, private memory. `state["exact"]["environments"]` says of each
            environment of an exact state its `worker`, its `name` and its `method`.

        Raises:
            SpecError: `exact`: an environment cannot be brought back, or the agent cannot be pickled. The message says
                why; the batcher can go on.
            StateError: `exact`: a `reset` or a rollout was interrupted: call what the message says first.
            WorkerError, Exception: `exact`: what `get` would raise.
        """
        return take_state(self._engine, self._life, self._delivery, exact)

    @during(SAVE)
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a `state_dict`.

        From an exact one it goes on as the batcher that was saved: do not call `reset`. Its environments, agents and
        the last `update` are in the state. It runs code that is pickled in it: load an exact state only from someone
        whom you trust.

        From another one, environments are made anew and start new episodes: call `reset` next. Their seeds, and those
        that agents get (`RL_Agent.seed`), are the next ones of their streams, which were not used before the state was
        made; the same state always continues in the same way. Episodes that had not ended are lost. Agents stay as they
        are: `update` them.

        Args:
            state: of a batcher with the same number of workers and environments, the same seeds (`state["seeds"]` is
                what its constructor was given, or had drawn), and the same keys, dtypes and shapes; `n_processes` 0
                counts as 1. `n_timesteps` may differ, but not for an exact state, nor may `run_ahead`.

        Raises:
            SpecError: the state is of another batcher; the message says what differs, and this one is as it was.
            StateError: a rollout is under way, or leased.
            Exception: what an environment or agent raised.
        """
        plan_load(self._engine, self._life, state)()()

    def close(self) -> None:
        """Ends every worker, within seconds whatever they are doing. Idempotent.

        Raises:
            Exception: what an environment or agent raised as it was closed, or, unless workers are restarted, in a
                rollout that was under way; every worker has ended all the same.
        """
        if self._life.is_closed:
            if hasattr(self, "_engine") and self._life.is_ours:
                self._engine.pool.kill()  # those that an interrupted `close` has left
            return
        has_failed = self._life.close()
        try:
            if self._life.is_ours:
                self._engine.close()
        except Exception:
            if not has_failed:  # otherwise the first failure has been reported
                raise
            logger.debug("a worker raised while it was closed", exc_info=True)
        finally:
            self._delivery.close()
            self._engine.free()

    def __enter__(self: B) -> B:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._life.is_closed:
            self._life.fail(error, "the program failed before")
        self.close()

    def _start_engine(self, settings: JobSettings, run: RunSettings) -> Engine:
        """Starts the engine that runs rollouts."""
        return start_engine(settings, run, self._debug, Engine)


class Rollouts(Protocol):
    """Runs rollouts: an `RL_Batcher`."""

    def reset(self, agent_info: DictTensor = ..., env_info: DictTensor = ...) -> None: ...

    def execute(self) -> None: ...

    def get(self) -> tuple[Trajectories, int]: ...


def run_rollouts(
    batcher: Rollouts, life: Lifecycle, find_infos: Callable[[], Mapping[str, DictTensor]], n_steps: int | None
) -> Iterator[Trajectories]:
    """Yields rollouts; see `RL_Batcher.rollouts`.

    Args:
        batcher: runs them.
        life: its lifecycle.
        find_infos: returns the infos in force, by the names of the arguments of `reset`; none before the first one.
        n_steps: see `RL_Batcher.rollouts`.
    """
    left = None if n_steps is None else check_count("n_steps", n_steps)
    while left is None or left > 0:
        if life.phase in (Phase.NEW, Phase.ENDED, Phase.INTERRUPTED):
            batcher.reset(**find_infos())
        if life.phase is not Phase.RUNNING:
            batcher.execute()
        trajectories, _ = batcher.get()
        if left is not None:
            left -= int(trajectories.lengths.sum())
        yield trajectories
