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

Rows of trajectories never cross a pipe. The arena is anonymous and belongs to those who map it: it is
gone with the last of them, however they end.
"""

from __future__ import annotations

import contextlib
import enum
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

import rlstructs.errors  # noqa: F401 - first of ours: it sees whether `workers` is ours too
from rlstructs import weights
from rlstructs.agent import RL_Agent
from rlstructs.envs import registry
from rlstructs.envs.vec_env import VecEnv
from rlstructs.episodes import EpisodeTracker
from rlstructs.errors import ClosedError, SpecError, StateError
from rlstructs.rollout import JobFactory, Specs
from rlstructs.rows import specs_of
from rlstructs.seeding import PrivateStreams
from rlstructs.settings import (
    JobSettings,
    agent_seeds_of,
    check_count,
    check_info,
    check_timeout,
    info_example,
    seeds_of,
    warn_of_overlap,
)
from rlstructs.slots import Layout, Slots
from rlstructs.structures.base import as_device
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import Trajectories
from workers import InlinePool, SharedArena, WorkerPool

logger = logging.getLogger("rlstructs")

PRELOAD = ("torch", "gymnasium", "rlstructs.rollout", "rlstructs.envs.gym_env")
NO_INFO = DictTensor()


class _State(enum.Enum):
    NEW = "needs a reset"
    READY = "ready"
    RUNNING = "a rollout is under way"
    ENDED = "every environment has ended"
    FAILED = "a worker failed"
    CLOSED = "closed"


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
            then has `seeds[p] + k`); or one int, from which streams that never overlap are derived.
        agent_info: an example, one row, of what `reset` and `execute` will be given; empty if nothing.
        env_info: likewise.
        agent_seeds: one for each process, handed to `RL_Agent.seed`.
        device: where observations and states are wanted, and trajectories handed out.
        start_method: "forkserver" (the default on Linux), "spawn" (elsewhere) or "fork".
        timeout: seconds within which workers must answer, None for no limit. A worker that dies or
            raises is noticed at once either way.

    Raises:
        SpecError, TypeError: an argument is not what is needed.
        OutOfMemoryError: the slots do not fit into memory.
        WorkerError: a worker did not come up.
        Exception: what `create_env` or `create_agent` raised in a worker.

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

    def __init__(
        self,
        n_timesteps: int,
        create_agent: Callable[..., RL_Agent],
        agent_args: Mapping[str, Any],
        create_env: Callable[..., VecEnv],
        env_args: Mapping[str, Any],
        n_processes: int,
        seeds: int | Sequence[int],
        agent_info: DictTensor | None = None,
        env_info: DictTensor | None = None,
        agent_seeds: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
        *,
        start_method: str | None = None,
        timeout: float | None = None,
    ) -> None:
        self._state = _State.CLOSED  # until there is something to close
        check_count("n_timesteps", n_timesteps, 1)
        check_count("n_processes", n_processes, 0)
        check_timeout(timeout)
        self._device = as_device(device)
        infos = {"agent_info": agent_info, "env_info": env_info}
        self._examples = {name: info_example(name, info) for name, info in infos.items()}
        n_workers = max(1, n_processes)
        settings = JobSettings(
            create_agent,
            dict(agent_args),
            create_env,
            dict(env_args),
            seeds_of(seeds, n_workers),
            agent_seeds_of(agent_seeds, n_workers),
            self._examples["agent_info"],
            self._examples["env_info"],
            None if self._device.type == "cpu" else self._device,
        )
        self._arena, self._weights = SharedArena(), SharedArena()
        self._pool = self._started(settings, n_processes, start_method, timeout)
        try:
            self._attach(settings, n_timesteps)
        except BaseException:
            self._pool.kill()
            raise
        self._episodes = EpisodeTracker()
        # Of a rollout that is over, until it has been handed out: Ctrl-C may come between.
        self._replies: list[Any] | None = None
        self._failure: BaseException | None = None
        self._state = _State.NEW

    def n_elems(self) -> int:
        """Number of environments over all workers, N = W * E."""
        return int(self._n_envs * self._pool.n_workers)

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory that rollouts take; known before the first of them takes it."""
        return self._slots.layout.nbytes

    def reset(self, agent_info: DictTensor = NO_INFO, env_info: DictTensor = NO_INFO) -> None:
        """Starts an episode in every environment; drops agents' states, and episodes that had not ended.

        Args:
            agent_info: N rows with the keys of the constructor's example, on the CPU; kept until the
                next `reset`, or `execute` with another.
            env_info: likewise; row i is the `options` of environment i's resets.

        Raises:
            SpecError: an info is not as its example; the batcher is as it was.
            StateError: a rollout is under way: `get` it first.
            Exception: what an environment raised.
        """
        self._check("reset", _State.NEW, _State.READY, _State.ENDED)
        infos = {"agent_info": agent_info, "env_info": env_info}
        for name, info in infos.items():
            check_info(name, info, self._examples[name], self.n_elems())
        for name, info in infos.items():
            self._write_info(name, info)
        self._call("reset")
        self._episodes.reset()
        self._state = _State.READY

    def execute(self, agent_info: DictTensor | None = None) -> None:
        """Starts a rollout and returns at once; `get` gives it.

        Args:
            agent_info: N rows that replace the ones in force, from this rollout on; the rows of
                environments that have ended are ignored. None, or an empty one, keeps them.

        Raises:
            SpecError: the info is not as its example; the batcher is as it was.
            StateError: there was no `reset`, a rollout is under way, or every environment has ended.
        """
        self._check("execute", _State.READY)
        if agent_info is not None and agent_info != NO_INFO:
            check_info("agent_info", agent_info, self._examples["agent_info"], self.n_elems())
            self._write_info("agent_info", agent_info)
        with self._failing("execute"):
            self._pool.broadcast("rollout")
        self._state = _State.RUNNING

    def get(self, blocking: bool = True) -> tuple[Trajectories, int] | tuple[None, None]:
        """The rollout that `execute` started, in memory of its own.

        A row for each environment that ran when the rollout began, in the order of their global
        index. `trajectories`, up to the longest length, zeros in the padding:

        - `observation/k`: what the agent saw at t;
        - `action/k`: what it put out;
        - `_observation/k`: what followed, with the reward of the step; the true final observation
          where an episode ended.

        `info`: `agent_info/k`, `env_info/k`, `agent_state/k` as they were before the first step, and
        `env_index`, int64, the environment's global index.

        Args:
            blocking: wait for it. Otherwise return `(None, None)` until all of it is there.

        Returns:
            The trajectories and the number of environments that still run.

        Raises:
            StateError: there was no `execute`.
            WorkerError: a worker died, or did not answer in time.
            Exception: what an environment or agent raised, with the worker's traceback as its cause.
        """
        self._check("get", _State.RUNNING)
        with self._failing():
            if self._replies is None:
                if not blocking and not self._pool.ready():
                    return None, None
                self._replies = self._pool.gather()
            trajectories = self._read([filled for filled, _ in self._replies])
        n_running = sum(running for _, running in self._replies)
        self._episodes.add(trajectories)
        self._replies = None
        self._state = _State.READY if n_running else _State.ENDED
        return trajectories.to(self._device), n_running

    def update(self, info: Any) -> None:
        """Calls `update(info)` of every agent, and waits for it.

        Args:
            info: any object that can be pickled. Its tensors go through shared memory, once; agents
                get private copies of what they are now, on the CPU.

        Raises:
            StateError: a rollout is under way: `get` it first.
            Exception: what an agent raised.
        """
        self._check("update", _State.NEW, _State.READY, _State.ENDED)
        self._call("update", weights.pack(info, self._weights))

    def episodes(self) -> DictTensor:
        """The episodes that ended in the rollouts handed out since the last call, in one row each.

        Returns:
            `return` float64, `length` int64, `env_index` int64, `terminated` bool, `truncated` bool.

        Raises:
            SpecError: the environment gives no `reward` or `done`.
        """
        if self._state is _State.CLOSED:
            raise ClosedError("episodes: the batcher is closed")
        return self._episodes.take()

    def close(self) -> None:
        """Ends every worker, within seconds whatever they are doing. Idempotent.

        Raises:
            Exception: what an environment or agent raised as it was closed; all is gone all the same.
        """
        if self._state is _State.CLOSED:
            return
        failed, self._state = self._state is _State.FAILED, _State.CLOSED
        try:
            self._pool.close()
        except Exception:
            if not failed:  # otherwise the first failure has been reported
                raise
            logger.debug("a worker raised while it was closed", exc_info=True)
        finally:
            self._arena.close()
            self._weights.close()

    def __enter__(self) -> RL_Batcher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is not None and self._state is not _State.CLOSED:
            self._fail(error, "the program failed before")
        self.close()

    def _started(
        self, settings: JobSettings, n_processes: int, start_method: str | None, timeout: float | None
    ) -> WorkerPool | InlinePool:
        shared = (self._arena, self._weights)
        try:
            if n_processes == 0:
                return InlinePool(JobFactory(settings.by_value()), shared=shared, around=PrivateStreams())
            return WorkerPool(
                n_processes,
                JobFactory(settings),
                shared=shared,
                start_method=start_method,
                timeout=timeout,
                preload=PRELOAD,
                setup=partial(registry.register, registry.registered()),
                name="rlstructs-worker",
            )
        except Exception as error:
            if culprit := settings.unpicklable():
                raise TypeError(f"{culprit[0]} cannot be sent to a worker: {culprit[1]}") from error
            raise

    def _attach(self, settings: JobSettings, n_timesteps: int) -> None:
        answers = self._pool.call("describe")
        counts, specs = [n for n, _ in answers], answers[0][1]
        assert isinstance(specs, Specs)
        self._n_envs = counts[0]
        for worker, count in enumerate(counts):
            if count != counts[0]:
                raise SpecError(f"create_env: worker {worker} has {count} environments, worker 0 has {counts[0]}")
        warn_of_overlap(settings.seeds, self._n_envs)
        info = {f"agent_state/{key}": spec for key, spec in specs.state.items()}
        for name, example in self._examples.items():
            info.update({f"{name}/{key}": spec for key, spec in specs_of(example).items()})
        layout = Layout(self.n_elems(), n_timesteps, specs.observation, specs.action, info)
        self._arena.resize(layout.reserved_nbytes, expected=layout.nbytes)
        self._slots = Slots(layout, self._arena.map())
        self._pool.call("attach", layout)

    def _read(self, filled: list[list[int] | None]) -> Trajectories:
        n = self._n_envs
        rows = np.concatenate(
            [worker * n + np.arange(n) if slots is None else worker * n + np.array(slots, np.int64)
             for worker, slots in enumerate(filled)]
        )  # fmt: skip
        some = None if rows.size == self.n_elems() else rows
        lengths = torch.from_numpy(self._slots.lengths[rows])
        steps = self._slots.read(some, int(lengths.max()))
        info = {**self._slots.info_of(rows), "env_index": torch.from_numpy(rows)}
        return Trajectories(DictTensor(info), TemporalDictTensor(steps, lengths))

    def _write_info(self, name: str, info: DictTensor) -> None:
        for key, tensor in info.items():
            self._slots.column(f"{name}/{key}").copy_(tensor.detach())

    def _check(self, call: str, *allowed: _State) -> None:
        state = self._state
        if state in allowed:
            return
        if state is _State.CLOSED:
            raise ClosedError(f"{call}: the batcher is closed")
        if state is _State.FAILED:
            raise StateError(f"{call}: {self._failed_in}, close the batcher") from self._failure
        needed = {
            _State.NEW: "call reset first",
            _State.READY: "call execute first",
            _State.RUNNING: "call get first",
            _State.ENDED: "call reset first",
        }
        raise StateError(f"{call}: {state.value}, {needed[state]}")

    def _call(self, method: str, *arguments: Any) -> None:
        with self._failing(method):
            self._pool.call(method, *arguments)

    @contextlib.contextmanager
    def _failing(self, call: str = "") -> Iterator[None]:
        """Marks the batcher as failed when a worker fails, and when `call` is interrupted halfway.

        Without a call an interrupt changes nothing: the workers do not know of it, and it can be waited
        for them again.
        """
        try:
            yield
        except Exception as error:
            self._fail(error, "a worker failed before")
            raise
        except BaseException as error:
            if call:
                self._fail(error, f"{call} was interrupted before")
            raise

    def _fail(self, error: BaseException, why: str) -> None:
        self._state, self._failure, self._failed_in = _State.FAILED, error, why
        logger.info("%s: %r", why, error)
