"""`RayReplay`: a replay memory that is spread over the machines of a cluster.

trainers                                     shard s: an actor of Ray
--------                                     ------------------------
extend()             ── object store ─────>  appends the steps of its environments
sample()             ── how many rows ────>  draws them
                     <── object store ─────  rows, their priorities, and sums over all of its rows
update_priorities()  ── object store ─────>  sets those of its rows
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlstructs.checks import check_count, check_timeout
from rlstructs.distributed import cluster, replay_files
from rlstructs.distributed.cluster import Bell, Columns, Node
from rlstructs.distributed.pool import NodePool
from rlstructs.distributed.shard import DATA, INDEX, LEAF, ROW, Dtypes, Kind, ShardSettings, columns_of
from rlstructs.errors import ClosedError, MissingKeyError, SpecError, StateError
from rlstructs.replay.draw.plan import AVOID_ENDS
from rlstructs.replay.draw.priorities import exponent, importance_weights, largest_of, limit_of
from rlstructs.replay.intake.arrays import host_array, real_numbers
from rlstructs.replay.intake.trajectories import NAMES, STATES, Names, Steps, find_names, take_trajectories
from rlstructs.replay.rows.spec import Compression, Setting, Spec, cast
from rlstructs.structures.arrays import raw_dtype, raw_of, tensor_of
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.trajectories import Trajectories
from rlstructs.workers import pickling
from rlstructs.workers.interrupts import defer_interrupt
from rlstructs.workers.messages import Future
from rlstructs.workers.public_names import set_module

FORMAT, VERSION = "rlstructs.RayReplay", 1
WEIGHT = "weight"


@set_module("rlstructs")
class RayReplay:
    """A replay memory in shards, each an actor of Ray.

    A shard keeps the rows of some of the environments.

    The rows of environment e are in shard e modulo `n_shards`. Each environment has a ring of its own, so that n-step
    returns and sequences continue from one rollout to the next. A pickled copy of this object gives another trainer
    access to the same rows: pass it to `ray.remote` functions and actors. The shards end with the program that made
    the memory.

    Args:
        memory_size: rows of each environment; the newest are kept.
        num_envs: number of environments of all batchers.
        n_shards: number of actors; None for one on each machine of the cluster that has `resources`, at most
            `num_envs`.
        alpha: exponent of priorities, at least 0; None draws all rows with the same probability.
        beta: exponent of importance weights, at least 0.
        names: name in the memory -> key of the trajectories; None for the names of `Memory.add_trajectories`:
            observations, next_observations, actions, rewards, terminated and truncated, and states and next_states if
            observations have a `state` beside their `frame`.
        compression: "zstd", "zstd:LEVEL", or name -> one of these, compresses columns; see `Memory`.
        seed: seeds all draws; None draws a seed.
        timeout: in seconds; a shard must answer within 2 * timeout + 5 s. None for no limit.
        resources, placement, address: see `RayBatcher`.

    Attributes:
        beta: exponent of importance weights; may be set at any time.

    Raises:
        ImportError: Ray is not installed.
        SpecError, TypeError: an argument has a wrong value or type.
        WorkerError: a shard could not start.

    Example:
        memory = RayReplay(memory_size=100_000, num_envs=batcher.n_elems(), n_shards=4, alpha=0.6)
        memory.extend(trajectories)
        batch = memory.sample(256, n_step=3)
        memory.update_priorities(batch["index"], td_errors)
    """

    def __init__(
        self,
        memory_size: int,
        num_envs: int,
        n_shards: int | None = None,
        *,
        alpha: float | None = None,
        beta: float = 0.4,
        names: Mapping[str, str] | None = None,
        compression: Setting = None,
        seed: int | None = None,
        timeout: float | None = None,
        resources: Mapping[str, float] | None = None,
        placement: Any = None,
        address: str | None = None,
    ) -> None:
        cluster.import_ray("RayReplay")
        timeout = check_timeout(timeout)
        self.beta = exponent("beta", beta)
        self._memory_size, self._num_envs = check_count("memory_size", memory_size), check_count("num_envs", num_envs)
        if n_shards is not None and check_count("n_shards", n_shards) > num_envs:
            raise SpecError(f"n_shards is {n_shards}, which is more than num_envs, {num_envs}")
        self._alpha = None if alpha is None else exponent("alpha", alpha)
        self._names: Names = dict(names) if names else find_names
        cluster.connect(address)
        rules = cluster.Placement(resources, placement)
        self._n_shards = n_shards or min(rules.n_machines(), num_envs)
        own, *of_shards = np.random.SeedSequence(seed).spawn(self._n_shards + 1)
        self._rng, self._is_closed, self._is_owner = np.random.default_rng(own), False, True
        Compression.of(compression)  # raises here, and not in an actor
        rows = ShardSettings(self._memory_size, self._alpha or 0.0, dict(names or NAMES | STATES), compression)
        settings = pickling.dumps(rows)
        job_arguments = [
            (len(range(shard, num_envs, self._n_shards)), int(seed.generate_state(1)[0]))
            for shard, seed in enumerate(of_shards)
        ]
        self._pool = ShardPool(settings, job_arguments, [1] * self._n_shards, rules, timeout)

    def extend(self, trajectories: Trajectories) -> None:
        """Appends the valid steps of trajectories, as a batcher's `get` returns them.

        Args:
            trajectories: with `env_index` in their info.

        Raises:
            MissingKeyError, SpecError, TypeError: the trajectories do not fit; the memory is unchanged.
            WorkerError: a shard is gone.
        """
        self._check_open("extend")
        steps = take_trajectories(trajectories, self._names, self._num_envs, "extend", "the memory's num_envs")
        dtypes, columns = self._cast(steps)
        steps = replace(steps, values=columns)
        largest = max(report["largest"] for report in self._pool.reports)  # the priority of new rows in every shard
        sent = []
        for shard in range(self._n_shards):
            # Shards that get no rows are asked too, so that all of them make the same tensors.
            own = steps.at(np.flatnonzero(steps.lanes % self._n_shards == shard))
            sent.append(cluster.import_ray().put(columns_of(replace(own, lanes=own.lanes // self._n_shards))))
        with defer_interrupt():  # either all shards get their rows, or none does
            asked = [self._pool.ask("extend", dtypes, largest, own, only=[shard])[0] for shard, own in enumerate(sent)]
        self._pool.gather(asked)

    def add_trajectories(self, trajectories: Trajectories, names: Mapping[str, str] | None = None) -> None:
        """Adds rows, as `extend` does.

        Args:
            trajectories: with `env_index` in their info.
            names: None, or those that the memory was made with.

        Raises:
            MissingKeyError, SpecError, TypeError: they do not fit; the memory is unchanged.
            WorkerError: a shard is gone.
        """
        if names is not None and dict(names) != (own := self.make_feed().choose_names(trajectories.trajectories)):
            raise SpecError(f"add_trajectories: this memory was made with names={own}, got {dict(names)}")
        self.extend(trajectories)

    def make_feed(self) -> ReplayFeed:
        """Returns what `RL_Batcher.feed` needs of this memory."""
        return ReplayFeed(self._names)

    def sample(
        self,
        batch_size: int,
        names: Sequence[str] | None = None,
        *,
        sequence_length: int = 1,
        n_step: int = 1,
        gamma: float = 0.99,
        episode_ends: str = "cross",
    ) -> DictTensor:
        """Draws rows at random, from all shards in proportion to their priorities.

        How many rows each shard draws depends on the sums of priorities in the shards' last answers to this trainer.
        What other trainers change afterwards counts from the next answer on.

        Args:
            batch_size: number of rows, or of sequences.
            names: names of the tensors; None for all.
            sequence_length, n_step, gamma, episode_ends: see `RandomMemory.sample`.

        Returns:
            A copy of `batch_size` rows: each tensor is (B, ...), or (B, sequence_length, ...) for sequences.
            Also, (B,) or (B, sequence_length): `index` (int64, for `update_priorities`), `mask` (bool), `discount`
            (float32, gamma to the power of the number of steps) and, if the tensors say where episodes end, `is_first`
            (bool); and `weight`, float32 (B,): (smallest priority of all / priority) ** (alpha * beta).

        Raises:
            SpecError: an argument has a wrong value, or there is nothing to draw.
            WorkerError: a shard is gone.
        """
        self._check_open("sample")
        n = check_count("batch_size", batch_size)
        known = list(self._pool.find_dtypes() or self._header()["names"])
        names = known if names is None else list(names)
        if unknown := sorted(set(names) - set(known)):
            raise MissingKeyError(f"sample: no tensor(s) {unknown}, there are {sorted(known)}")
        length = check_count("sequence_length", sequence_length or 1)
        settings = {"sequence_length": length, "n_step": n_step, "gamma": gamma, "episode_ends": episode_ends}
        try:
            dtypes, columns = self._draw(n, names, settings)
        except SpecError:
            self._pool.refresh()  # other trainers may have left nothing to draw in a shard
            dtypes, columns = self._draw(n, names, settings)
        return self._join(dtypes, columns, (n,) if length == 1 else (n, length))

    def update_priorities(self, index: Any, priorities: Any) -> None:
        """Sets the priorities of rows; if an index is repeated, its last priority counts.

        Rows that were overwritten since they were drawn are ignored.

        Args:
            index: int (n,), the `index` of samples; for sequences, its first column.
            priorities: (n,), finite, at least 0.

        Raises:
            StateError: the memory has no priorities.
            IndexError, SpecError: an argument is invalid; nothing changes, except that the other shards set their
                priorities if one shard refuses the index of a row that is not written yet.
            WorkerError: a shard is gone.
        """
        self._check_open("update_priorities")
        if self._alpha is None:
            raise StateError("update_priorities: this memory has no priorities; make it with alpha=")
        rows = host_array(INDEX, index).reshape(-1).astype(np.int64)
        values = real_numbers("priorities", priorities).reshape(-1)
        if values.shape != rows.shape:
            raise SpecError(f"update_priorities: {values.size} priorities came for {rows.size} indexes")
        if not rows.size:
            return
        largest_of(values, limit_of(self._memory_size * self._num_envs, self._alpha))  # before any shard is asked
        shards, rows = rows % self._n_shards, rows // self._n_shards
        if rows.min() < 0:
            raise IndexError("update_priorities: an index is not from a sample")
        asked: list[Future] = []
        for shard in np.unique(shards):
            own = {INDEX: rows[shards == shard], "priority": values[shards == shard]}
            asked += self._pool.ask("update_priorities", cluster.import_ray().put(own), only=[shard])
        self._pool.gather(asked)

    def __len__(self) -> int:
        """The number of rows in all shards; asks each of them."""
        self._check_open("len")
        self._pool.refresh()
        return sum(report["rows"] for report in self._pool.reports)

    def stats(self) -> dict[str, Any]:
        """Returns the state of the shards at their last answers.

        Returns:
            `shards`: for each a dict of `shard` (its index), `node_id` and `address` (Ray's, of the machine), `pid`,
            `state` ("idle", "busy" or "gone"), `rows` and `nbytes`. `rows` and `nbytes`: the sums over all shards.
        """
        self._check_open("stats", asks_shards=False)
        nodes = self._pool.nodes
        shards = [
            {
                "shard": node.index,
                "node_id": node.node_id,
                "address": node.address,
                "pid": node.pid,
                "state": node.state,
                "rows": node.report["rows"],
                "nbytes": node.report["nbytes"],
            }
            for node in nodes
        ]
        return {"shards": shards, **{key: sum(shard[key] for shard in shards) for key in ("rows", "nbytes")}}

    def save(self, path: str | Path) -> None:
        """Writes a folder: a file for each shard, then a header that names them.

        The files of an earlier `save` are deleted after the header is written, so that a failed `save` leaves them.

        Args:
            path: the folder, on the trainer's machine; it is made if there is none.

        Raises:
            OSError: the folder cannot be written to.
            WorkerError: a shard is gone.
        """
        self._check_open("save")
        shards = range(self._n_shards)
        # One after another, because each may be large.
        data = (self._pool.gather(self._pool.ask("save", only=[shard]))[0].columns[DATA] for shard in shards)
        replay_files.write(Path(path), self._header(), self._rng.bit_generator.state, data)

    def load(self, path: str | Path) -> None:
        """Restores what `save` wrote: rows, priorities and random streams.

        Args:
            path: the folder of a memory with the same `memory_size`, `num_envs`, `n_shards`, `alpha` and `names`.

        Raises:
            FileError: the folder is of another memory, or damaged; this memory is unchanged.
            FileNotFoundError: the folder, or a file in it, does not exist.
            WorkerError: a shard is gone.
        """
        with contextlib.ExitStack() as held:
            self._plan_load(Path(path), held)()

    def _plan_load(self, path: Path, held: contextlib.ExitStack) -> Callable[[], None]:
        """Makes the shards read a folder; returns a function that puts it into use.

        See `load`.

        Args:
            path: the folder.
            held: makes the shards discard what they read, unless the function was called.
        """
        self._check_open("load")
        generator, files = replay_files.read(path, self._header(), self._n_shards)
        drop = held.enter_context(contextlib.ExitStack())
        drop.callback(self._pool.ask, "drop_loaded")
        for shard, file in enumerate(files):
            with replay_files.open_shard(file) as data:
                self._pool.gather(self._pool.ask("load", cluster.import_ray().put({DATA: data}), only=[shard]))

        def use() -> None:
            drop.pop_all()
            self._pool.gather(self._pool.ask("use_loaded"))
            self._rng = generator

        return use

    def close(self) -> None:
        """Ends the shards, unless this object is a pickled copy. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            if self._is_owner:
                self._pool.close()

    def __enter__(self) -> RayReplay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        self._check_open("pickle")
        return {**vars(self), "_rng": None, "_is_owner": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._rng = np.random.default_rng()  # otherwise all trainers would draw the same rows

    def _header(self) -> dict[str, Any]:
        """The settings that must be the same in the memory that loads a folder."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "memory_size": self._memory_size,
            "num_envs": self._num_envs,
            "n_shards": self._n_shards,
            "alpha": self._alpha,
            "names": NAMES if callable(self._names) else self._names,
        }

    def _check_open(self, method: str, asks_shards: bool = True) -> None:
        if self._is_closed:
            raise ClosedError(f"{method}: the memory is closed")
        if asks_shards:
            self._pool.check_connection()

    def _join(self, dtypes: Dtypes, columns: list[Columns], lead: tuple[int, ...]) -> DictTensor:
        """Joins the columns of all shards, and adds weights.

        The first axes of the result have the shape `lead`.
        """
        leaves = np.concatenate([own.pop("/" + LEAF) for own in columns])
        least = min(report["least"] for report in self._pool.reports if report["rows"])
        joined = {name: np.concatenate([own[name] for own in columns]) for name in columns[0]}
        found = {
            name: tensor_of(joined[name].reshape(*lead, *joined[name].shape[1:]), dtype)
            for name, dtype in dtypes.items()
        }
        more = {
            name.removeprefix("/"): torch.from_numpy(joined[name].reshape(lead))
            for name in joined
            if name.startswith("/")
        }
        weights = importance_weights(leaves, min(least, leaves.min()), self.beta)
        return DictTensor({**found, **more, WEIGHT: torch.from_numpy(weights)})

    def _cast(self, steps: Steps) -> tuple[Dtypes, Columns]:
        """Casts values to the dtypes of the shards; returns all dtypes and columns.

        Raises:
            SpecError: a value does not fit.
        """
        held, dtypes, columns = self._pool.find_dtypes(), {}, {}
        for name, values in steps.values.items():
            dtypes[name] = held.get(name, values.dtype)
            if torch.bfloat16 in (dtypes[name], values.dtype):  # which numpy lacks
                dtypes[name] = values.dtype
            if dtypes[name] is values.dtype:
                columns[name] = raw_of(values.cpu())
            else:
                spec = Spec(raw_dtype(dtypes[name]))
                columns[name] = cast(name, host_array(name, steps.for_columns({name: spec})[name]), spec.dtype)
        return dtypes, columns

    def _draw(self, n: int, names: list[str], settings: dict[str, Any]) -> tuple[Dtypes, list[Columns]]:
        """Draws `n` rows or sequences; returns dtypes and each shard's columns."""
        length = settings["sequence_length"]
        counts = self._pool.split_draws(n, (length, length > 1 and settings["episode_ends"] == AVOID_ENDS), self._rng)
        shards = [shard for shard, count in enumerate(counts) if count]
        self._pool.ask_idle(shards)  # otherwise this trainer might never see what others add to the rest
        asked = [self._pool.ask("sample", names, counts[shard], settings, only=[shard])[0] for shard in shards]
        samples = self._pool.gather(asked)
        for shard, sample in zip(shards, samples, strict=True):
            sample.columns["/" + INDEX] = sample.columns["/" + INDEX] * self._n_shards + shard
        return samples[0].dtypes, [sample.columns for sample in samples]


@dataclass(frozen=True)
class ReplayFeed:
    """Feeds a `RayReplay` through the trainer.

    Workers cannot write to the actors that hold its rows.

    Args:
        names: as of `take_trajectories`.
    """

    names: Names
    storage: None = None

    def choose_names(self, keys: Collection[str]) -> dict[str, str]:
        """The columns that the memory was made with, or else those of `extend`."""
        return dict(self.names(keys) if callable(self.names) else self.names)


class ShardPool(NodePool):
    """The actors of a `RayReplay`; a pickled copy asks the same actors."""

    noun = "shard"

    def __getstate__(self) -> dict[str, Any]:
        # A copy waits for none of these requests, and starts no actors.
        nodes = [dataclasses.replace(node, requests=deque()) for node in self.nodes]
        return {**vars(self), "nodes": nodes, "_settings": None, "_lock": None, "_bell": None, "_connection": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock, self._bell = threading.RLock(), Bell()
        self._connection = cluster.read_connection()

    @property
    def reports(self) -> list[dict[str, Any]]:
        """The last report of each shard, see `Shard.report`."""
        return [node.report for node in self.nodes]

    def refresh(self) -> None:
        """Asks every shard for a report."""
        self.gather(self.ask("report"))

    def ask_idle(self, busy: list[int]) -> None:
        """Asks the other shards for reports, without waiting for them.

        Shards that have requests to answer are left out: their replies come with a report.
        """
        self.ask("report", only=[node.index for node in self.nodes if not (node.index in busy or node.requests)])

    def find_dtypes(self) -> Dtypes:
        """Returns the dtypes of the tensors, by name; {} while no shard has rows."""
        if not any(report["dtypes"] for report in self.reports):
            self.refresh()  # other trainers may have added the first rows
        found: Dtypes = next((report["dtypes"] for report in self.reports if report["dtypes"]), {})
        return found

    def split_draws(self, n: int, kind: Kind, rng: np.random.Generator) -> list[int]:
        """Splits `n` draws among the shards, in proportion to their sums of priorities.

        Stratified: one draw from each n-th of the total.

        Raises:
            SpecError: there is nothing to draw.
        """
        while any(kind not in report["sums"] for report in self.reports):
            self.gather(self.ask("add_kind", kind))
        sums = np.array([report["sums"][kind] for report in self.reports])
        if not sums.sum() > 0:
            what = "rows" if kind == ROW else f"windows of {kind[0]} rows"
            raise SpecError(f"nothing to sample: there are no {what}, or none has a priority above zero")
        ends = np.cumsum(sums)
        points = (np.arange(n) + rng.random(n)) / n * ends[-1]
        shards = np.minimum(np.searchsorted(ends, points, side="right"), np.flatnonzero(sums)[-1])
        counts: list[int] = np.bincount(shards, minlength=len(sums)).tolist()
        return counts

    def _describe_place(self, node: Node) -> str:
        return f"on {node}"

    def _describe_losses(self, node: Node) -> str:
        return "its rows"
