"""`BatcherBase`: what a batcher tells about its rollouts, how its state is saved, and how it ends."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from rlstructs.batcher import saving
from rlstructs.batcher.arguments import check_info
from rlstructs.batcher.delivery import Delivery
from rlstructs.batcher.engine import Engine
from rlstructs.batcher.evaluation import evaluate
from rlstructs.batcher.feeding import feed_memory, stop_feeding
from rlstructs.batcher.lifecycle import Lifecycle, Phase
from rlstructs.checks import check_count
from rlstructs.moments import Moments
from rlstructs.structures.dict_tensor import DictTensor

logger = logging.getLogger("rlstructs")

B = TypeVar("B", bound="BatcherBase")


class BatcherBase:
    """Base class of the batchers: all but the constructor and the calls that run rollouts."""

    _life: Lifecycle
    _engine: Engine
    _delivery: Delivery
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
        return self._engine.transport.nbytes

    @property
    def policy_version(self) -> int:
        """How many times `update` was called."""
        return self._engine.policy_version

    def feed(self, memory: Any, names: Mapping[str, str] | None = None) -> None:
        """Has workers write what they collect to a memory: each its own lanes, at the end of each rollout.

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
        fed = None
        if memory is None:
            stop_feeding(self._life)
        else:
            fed = feed_memory(self._engine, self._life, memory, names)
        with self._life.note_failures("feed", self._engine.is_halfway):
            self._engine.feed(fed)

    def evaluate(
        self, n_episodes: int, seed: int | Sequence[int], agent_info: DictTensor | None = None, *,
        max_steps: int | None = None,
    ) -> DictTensor:  # fmt: skip
        """Plays episodes with copies of the agents as they are now, in environments made for the evaluation.

        Environments, agents and random streams of the training stay as they are, even if the evaluation fails or is
        interrupted. Every environment gives the same number of episodes, one more or less, so that short ones do not
        count more often than long ones. The call returns when the last of them has ended.

        Where an environment plays no episode, as that of an agent that is not there, others play its share. If none
        can, or `max_steps` are over, the evaluation ends with a warning that names the environments whose episodes are
        missing. An environment without ends needs `max_steps`: without it, the evaluation ends after a million
        timesteps in which no episode that counts has ended.

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
            SpecError: an argument is not what is needed, or the environment gives no `reward` or `done`.
            TypeError: an agent cannot be copied; the message names what in it cannot be.
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
        return evaluate(self._engine, self._life, n_episodes, seed, agent_info, max_steps)

    def episodes(self) -> DictTensor:
        """The episodes that ended in the rollouts handed out since the last call, in one row each.

        If this is not called for long, at least the latest 100,000 are kept, and all of the last rollout;
        `stats()["dropped_episodes"]` counts the others.

        Returns:
            `return` float64, `length` int64, `env_index` int64, `terminated` bool, `truncated` bool, (K,). Returns are
            sums of `reward`, or of `raw_reward` where there is one: `NormalizeReward` does not change them.

        Raises:
            SpecError: the environment gives no `reward` or `done`.
        """
        self._life.check_open("episodes")
        return self._engine.transport.episodes.take()

    def statistics(self) -> dict[str, Moments]:
        """The moments of all rollouts handed out, by which `NormalizeObservation` and `NormalizeReward` normalise.

        `load_statistics` of such an environment takes them, for a use without a batcher:
        `env.load_statistics(batcher.statistics(), frozen=True)`.

        Returns:
            `Moments` (`count`, `mean`, `variance`: float64 arrays), private memory, by name: `observation/<key>` and
            `return`. Empty if environments keep no statistics.
        """
        self._life.check_open("statistics")
        return {name: moments.copy() for name, moments in self._engine.supervisor.statistics.items()}

    def stats(self) -> dict[str, Any]:
        """What the workers do and have done; cheap enough to call after every rollout.

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
        """What is worth logging; it leaves `episodes` as it is.

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

    def state_dict(self, exact: bool | str = False) -> dict[str, Any]:
        """The state of the batcher, for `load_state_dict`; the batcher goes on as if it had not been asked.

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
        return saving.make_state(self._engine, self._life, self._delivery, exact)

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
        saving.plan_load(self._engine, self._life, state)()()

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
