"""`RayReplay`: a replay memory that is spread over the machines of a cluster.

    trainers                                     shard s: an actor of Ray
    --------                                     ------------------------
    extend()             ── object store ─────>  appends the steps of its environments
    sample()             ── how many rows ────>  draws them
                         <── object store ─────  rows, priorities, and what all of its rows sum up to
    update_priorities()  ── object store ─────>  of its rows
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlstructs.checks import check_count, check_timeout
from rlstructs.distributed import cluster, replay_files
from rlstructs.distributed.actor import Columns
from rlstructs.distributed.node_handle import Bell, Node
from rlstructs.distributed.pool import NodePool
from rlstructs.distributed.shard import (
    DATA,
    INDEX,
    LEAF,
    ROW,
    Beginning,
    Dtypes,
    ShardSettings,
    columns_of,
)
from rlstructs.errors import ClosedError, MissingKeyError, SpecError, StateError
from rlstructs.replay.columns import Spec, cast
from rlstructs.replay.expand import NEVER
from rlstructs.replay.from_trajectories import NAMES, Steps, take_trajectories
from rlstructs.replay.priorities import exponent, importance_weights, largest_of, limit_of
from rlstructs.replay.values import host_array, real_numbers
from rlstructs.structures.arrays import raw_dtype, raw_of, tensor_of
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.trajectories import Trajectories
from workers import pickling
from workers.interrupts import defer_interrupt
from workers.messages import Asked

FORMAT, VERSION = "rlstructs.RayReplay", 1
WEIGHT = "weight"


class ShardPool(NodePool):
    """The actors of a `RayReplay`."""

    noun = "shard"

    def __getstate__(self) -> dict[str, Any]:
        """Another trainer may ask the same actors; what this one waits for, and how they were made, is not for it."""
        nodes = [replace(node, asked=deque()) for node in self.nodes]
        return {**vars(self), "nodes": nodes, "_settings": None, "_lock": None, "_bell": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock, self._bell = threading.RLock(), Bell()

    def _where(self, node: Node) -> str:
        return f"on {node}"

    def _held(self, node: Node) -> str:
        return "its rows"


class RayReplay:
    """A replay memory in shards, each an actor of Ray that keeps the rows of some of the environments.

    Of environment e the rows are in shard e modulo `n_shards`; each environment has a ring of its own, so that n-step
    returns and sequences go on from one rollout to the next. A copy of this object, pickled, is another trainer's way
    to the same rows: `ray.remote` functions and actors may be given it. The shards end with the program that made it.

    Args:
        memory_size: rows of each environment; the newest are kept.
        num_envs: environments, of all batchers.
        n_shards: how many actors; None for one for each machine of the cluster that has `resources`, at most
            `num_envs`.
        alpha: exponent of priorities, at least 0; None draws all rows alike.
        beta: exponent of importance weights, at least 0.
        names: name here -> key of the trajectories; None for what `Memory.add_trajectories` takes: observations,
            next_observations, actions, rewards, terminated and truncated.
        seed: of all draws; None for any.
        timeout: seconds within which a shard must answer; None for no limit. Twice that and 5 s are given.
        resources, placement, address: as of `RayBatcher`.

    Attributes:
        beta: may be set at any time.

    Raises:
        ImportError: Ray is not installed.
        SpecError, TypeError: an argument is not what is needed.
        WorkerError: a shard did not come up.

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
        seed: int | None = None,
        timeout: float | None = None,
        resources: Mapping[str, float] | None = None,
        placement: Any = None,
        address: str | None = None,
    ) -> None:
        cluster.ray("RayReplay")
        timeout = check_timeout(timeout)
        self.beta = exponent("beta", beta)
        self._memory_size, self._num_envs = check_count("memory_size", memory_size), check_count("num_envs", num_envs)
        if n_shards is not None and check_count("n_shards", n_shards) > num_envs:
            raise SpecError(f"n_shards is {n_shards}, which is more than num_envs, {num_envs}")
        self._alpha, self._names = None if alpha is None else exponent("alpha", alpha), dict(names or NAMES)
        cluster.connect(address)
        where = cluster.Placement(resources, placement)
        self._n_shards = n_shards or min(where.n_machines(), num_envs)
        own, *of_shards = np.random.SeedSequence(seed).spawn(self._n_shards + 1)
        self._rng, self._is_closed, self._is_owner = np.random.default_rng(own), False, True
        settings = pickling.dumps(ShardSettings(self._memory_size, self._alpha or 0.0, self._names))
        seeds = [int(seed.generate_state(1)[0]) for seed in of_shards]
        parts = list(zip(self._sizes(), seeds, strict=True))
        self._pool = ShardPool(settings, parts, [1] * self._n_shards, where, timeout)

    def _sizes(self) -> list[int]:
        """How many environments each shard has."""
        return [len(range(shard, self._num_envs, self._n_shards)) for shard in range(self._n_shards)]

    def extend(self, trajectories: Trajectories) -> None:
        """Appends the valid steps of what a batcher's `get` gives.

        Args:
            trajectories: with `env_index` in their info.

        Raises:
            MissingKeyError, SpecError, TypeError: something does not fit; the memory is as it was.
            WorkerError: a shard is gone.
        """
        self._check_open("extend")
        steps = take_trajectories(trajectories, self._names, self._num_envs, "extend", "the memory's num_envs")
        dtypes, columns = self._columns(steps)
        steps = replace(steps, values=columns)
        largest = max(report["largest"] for report in self._reports())  # which new rows have, in every shard
        parts = []
        for shard in range(self._n_shards):
            # Those too of which nothing comes: they make the same tensors.
            part = steps.at(np.flatnonzero(steps.lanes % self._n_shards == shard))
            parts.append(cluster.ray().put(columns_of(replace(part, lanes=part.lanes // self._n_shards))))
        with defer_interrupt():  # all take it, or none does
            asked = [self._pool.ask("extend", dtypes, largest, part, only=[shard])[0]
                     for shard, part in enumerate(parts)]  # fmt: skip
        self._pool.values(asked)

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
        """Rows drawn at random, over all shards in proportion to what their rows sum up to.

        That is as of each shard's last answer to this trainer: what others have added since is known with the next one.

        Args:
            batch_size: rows, or sequences.
            names: of tensors; None for all.
            sequence_length, n_step, gamma, episode_ends: as of `RandomMemory.sample`.

        Returns:
            `batch_size` rows, private memory: of each name `(B, *data)`, of sequences `(B, sequence_length, *data)`;
            and with as many axes `index` (int64, for `update_priorities`), `mask` (bool), `discount` (float32, gamma
            to the number of steps) and, if something says where episodes end, `is_first` (bool); and `weight`,
            float32 (B,): (smallest priority of all / priority) ** (alpha * beta).

        Raises:
            SpecError: an argument is not what is needed, or there is nothing to draw.
            WorkerError: a shard is gone.
        """
        self._check_open("sample")
        n, known = check_count("batch_size", batch_size), self._tensor_names()
        names = known if names is None else list(names)
        if unknown := sorted(set(names) - set(known)):
            raise MissingKeyError(f"sample: no tensor(s) {unknown}, there are {sorted(known)}")
        length = check_count("sequence_length", sequence_length or 1)
        settings = {"sequence_length": length, "n_step": n_step, "gamma": gamma, "episode_ends": episode_ends}
        try:
            dtypes, columns = self._drawn(n, names, settings)
        except SpecError:
            self._refresh()  # others may have left nothing to draw in a shard
            dtypes, columns = self._drawn(n, names, settings)
        leaves = np.concatenate([part.pop("/" + LEAF) for part in columns])
        least = min(report["least"] for report in self._reports() if report["rows"])
        joined = {name: np.concatenate([part[name] for part in columns]) for name in columns[0]}
        lead = (n,) if length == 1 else (n, length)
        found = {name: tensor_of(joined[name].reshape(*lead, *joined[name].shape[1:]), dtypes[name]) for name in names}
        more = {name.removeprefix("/"): torch.from_numpy(joined[name].reshape(lead))
                 for name in joined if name.startswith("/")}  # fmt: skip
        weights = importance_weights(leaves, min(least, leaves.min()), self.beta)
        return DictTensor({**found, **more, WEIGHT: torch.from_numpy(weights)})

    def update_priorities(self, index: Any, priorities: Any) -> None:
        """Sets the priorities of rows; of equal indexes the last counts.

        Those of rows that were overwritten since they were drawn are dropped.

        Args:
            index: int (n,), as samples have it; of sequences the first column.
            priorities: (n,), finite, at least 0.

        Raises:
            StateError: the memory draws all rows alike.
            IndexError, SpecError: something does not fit; nothing has changed, unless it is that an index holds no row
                yet: then the other shards have theirs.
            WorkerError: a shard is gone.
        """
        self._check_open("update_priorities")
        if self._alpha is None:
            raise StateError("update_priorities: this memory draws all rows alike; make it with alpha=")
        rows = host_array(INDEX, index).reshape(-1).astype(np.int64)
        values = real_numbers("priorities", priorities).reshape(-1)
        if values.shape != rows.shape:
            raise SpecError(f"update_priorities: {values.size} priorities came for {rows.size} indexes")
        if not rows.size:
            return
        largest_of(values, limit_of(self._memory_size * self._num_envs, self._alpha))  # here: for all shards or none
        shards, rows = rows % self._n_shards, rows // self._n_shards
        if rows.min() < 0:
            raise IndexError("update_priorities: an index is none that a sample has had")
        asked: list[Asked] = []
        for shard in np.unique(shards):
            part = {INDEX: rows[shards == shard], "priority": values[shards == shard]}
            asked += self._pool.ask("update_priorities", cluster.ray().put(part), only=[shard])
        self._pool.values(asked)

    def __len__(self) -> int:
        """Rows of all shards, asked for now."""
        self._check_open("len")
        self._refresh()
        return sum(report["rows"] for report in self._reports())

    def stats(self) -> dict[str, Any]:
        """What each shard has said last.

        Returns:
            `shards`: for each a dict of `shard`, `node_id` and `address` (of the machine, by Ray), `pid`, `state`
            ("idle", "busy" or "gone"), `rows` and `nbytes`; `rows` and `nbytes` of all.
        """
        self._check_open("stats")
        nodes = self._pool.nodes
        shards = [
            {"shard": node.index, "node_id": node.node_id, "address": node.address, "pid": node.pid,
             "state": node.state, "rows": node.report["rows"], "nbytes": node.report["nbytes"]} for node in nodes
        ]  # fmt: skip
        return {"shards": shards, **{key: sum(shard[key] for shard in shards) for key in ("rows", "nbytes")}}

    def save(self, path: str | Path) -> None:
        """Writes a folder: a file for each shard, and one that names them, which is written last.

        What an earlier `save` has left there stays whole until then, and goes afterwards.

        Args:
            path: of the folder, which is made if there is none; on the trainer's machine.

        Raises:
            OSError: it cannot be written to.
            WorkerError: a shard is gone.
        """
        self._check_open("save")
        shards = range(self._n_shards)
        # One after another: each may be large.
        data = (self._pool.values(self._pool.ask("save", only=[shard]))[0].columns[DATA] for shard in shards)
        replay_files.write(Path(path), self._header(), self._rng.bit_generator.state, data)

    def load(self, path: str | Path) -> None:
        """Restores what `save` wrote: rows, priorities and random streams.

        Args:
            path: of the folder of a memory with the same sizes, `n_shards`, `alpha` and `names`.

        Raises:
            FileError: it is not, or damaged; the memory is as it was.
            FileNotFoundError: there is none.
            WorkerError: a shard is gone.
        """
        self._check_open("load")
        generator, files = replay_files.read(Path(path), self._header(), self._n_shards)
        try:
            for shard, file in enumerate(files):
                with replay_files.shard_bytes(file) as data:
                    self._pool.values(self._pool.ask("load", cluster.ray().put({DATA: data}), only=[shard]))
        except BaseException:
            self._pool.ask("drop_loaded")
            raise
        self._pool.values(self._pool.ask("take_loaded"))
        self._rng = generator

    def close(self) -> None:
        """Ends the shards, if this is the object that made them. Idempotent."""
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
        self._rng = np.random.default_rng()  # or trainers would draw alike

    def _header(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "memory_size": self._memory_size,
            "num_envs": self._num_envs,
            "n_shards": self._n_shards,
            "alpha": self._alpha,
            "names": self._names,
        }

    def _check_open(self, method: str) -> None:
        if self._is_closed:
            raise ClosedError(f"{method}: the memory is closed")

    def _tensor_names(self) -> list[str]:
        """The names of the tensors that the shards have; what they will have as long as none has rows."""
        if not any(report["dtypes"] for report in self._reports()):
            self._refresh()  # others may have added the first ones
        return list(next((report["dtypes"] for report in self._reports() if report["dtypes"]), self._names))

    def _columns(self, steps: Steps) -> tuple[Dtypes, Columns]:
        """Dtypes and values; those that the shards hold otherwise are cast, here: for all shards or none.

        Raises:
            SpecError: a value does not fit.
        """
        if not any(report["dtypes"] for report in self._reports()):
            self._refresh()  # others may have added the first ones
        held: Dtypes = next((report["dtypes"] for report in self._reports() if report["dtypes"]), {})
        dtypes, columns = {}, {}
        for name, values in steps.values.items():
            dtypes[name] = held.get(name, values.dtype)
            if torch.bfloat16 in (dtypes[name], values.dtype):  # which numpy has not
                dtypes[name] = values.dtype
            if dtypes[name] is values.dtype:
                columns[name] = raw_of(values.cpu())
            else:
                spec = Spec(raw_dtype(dtypes[name]))
                columns[name] = cast(name, host_array(name, steps.for_column(name, spec)), spec.dtype)
        return dtypes, columns

    def _drawn(self, n: int, names: list[str], settings: dict[str, Any]) -> tuple[Dtypes, list[Columns]]:
        """The tensors' dtypes, and what each shard that draws some of `n` rows gives."""
        length = settings["sequence_length"]
        counts = self._counts(n, (length, length > 1 and settings["episode_ends"] == NEVER))
        shards = [shard for shard, count in enumerate(counts) if count]
        # The others say, some time, what has become of them meanwhile: nothing else would tell.
        self._pool.ask("report", only=[node.index for node in self._pool.nodes
                                       if not (counts[node.index] or node.asked)])  # fmt: skip
        asked = [self._pool.ask("sample", names, counts[shard], settings, only=[shard])[0] for shard in shards]
        parts = self._pool.values(asked)
        for shard, part in zip(shards, parts, strict=True):
            part.columns["/" + INDEX] = part.columns["/" + INDEX] * self._n_shards + shard
        return parts[0].dtypes, [part.columns for part in parts]

    def _counts(self, n: int, kind: Beginning) -> list[int]:
        """How many of `n` draws of this kind each shard makes: one for each n-th of the total."""
        while any(kind not in report["masses"] for report in self._reports()):
            self._pool.values(self._pool.ask("tell", kind))
        masses = np.array([report["masses"][kind] for report in self._reports()])
        if not masses.sum() > 0:
            what = "rows" if kind == ROW else f"windows of {kind[0]} rows"
            raise SpecError(f"nothing to sample: there are no {what}, or none has a priority above zero")
        ends = np.cumsum(masses)
        at = (np.arange(n) + self._rng.random(n)) / n * ends[-1]
        shards = np.minimum(np.searchsorted(ends, at, side="right"), np.flatnonzero(masses)[-1])
        counts: list[int] = np.bincount(shards, minlength=len(masses)).tolist()
        return counts

    def _reports(self) -> list[dict[str, Any]]:
        return [node.report for node in self._pool.nodes]

    def _refresh(self) -> None:
        self._pool.values(self._pool.ask("report"))
