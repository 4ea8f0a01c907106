"""What one actor of a `RayReplay` keeps: a memory of some of the environments."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rlstructs.distributed.actor import Columns
from rlstructs.errors import FileError
from rlstructs.memories.from_trajectories import add_steps
from rlstructs.memories.torch import PrioritizedMemory
from rlstructs.replay import expand
from rlstructs.replay.from_trajectories import Steps
from rlstructs.replay.span import Span
from rlstructs.structures.arrays import raw_of, tensor_of

# What is known of rows that were drawn.
INDEX, LEAF, MASK, IS_FIRST, DISCOUNT = "index", "leaf", "mask", "is_first", "discount"
# What steps are, beside their values: the slash keeps these apart from names of tensors.
LENGTHS, LANES, DONE, STARTS = "/lengths", "/lanes", "/done", "/starts"
DATA = "data"  # of a file
FORMAT = "npz"

# What draws begin with: rows after which so many are stored, itself among them; and whether of the same episode.
Beginning = tuple[int, bool]
ROW: Beginning = (1, False)
# Of how many kinds, beside single rows, reports say what they sum up to.
N_KINDS = 8
# Share of a sum below which a difference of two is not it.
EXACT = 1e-6

Dtypes = dict[str, torch.dtype]


class ShardSample(NamedTuple):
    """What a shard has drawn: dtypes by name; tensors, and what is known of them, their names behind a "/"."""

    dtypes: Dtypes
    columns: Columns


class ShardFile(NamedTuple):
    """A shard's file, as bytes."""

    columns: Columns


def columns_of(steps: Steps) -> Columns:
    """Steps as what is sent to a shard: values by name, and what else they are."""
    marks = {LENGTHS: steps.lengths, LANES: steps.lanes, DONE: steps.done, STARTS: steps.starts}
    return {**steps.values, **{name: each for name, each in marks.items() if each is not None}}


@dataclass(frozen=True)
class ShardSettings:
    """What shards are made of; this is what is pickled.

    Attributes:
        memory_size: rows of each environment.
        alpha: exponent of priorities.
        names: as of `Memory.add_trajectories`.
    """

    memory_size: int
    alpha: float
    names: Mapping[str, str]

    def build(self, num_envs: int, seed: int) -> Shard:
        """As of `Shard`."""
        return Shard(self, num_envs, seed)


class ShardMemory(PrioritizedMemory):
    """A memory that tells what a trainer needs to draw from several."""

    # Which rows were the last that `_whole` was asked for, and of which kind, when.
    _found: tuple[int, bytes, np.ndarray] | None = None

    def masses(self, kinds: Sequence[Beginning]) -> tuple[dict[Beginning, float], float]:
        """The sum of all priorities, to the power of alpha, of each of these kinds; and the smallest of all."""
        self._priorities.follow(self._store().span())
        tree = self._priorities.tree
        return {ROW: float(tree.total), **{kind: self._mass(*kind) for kind in kinds}}, float(tree.minimum)

    def _mass(self, length: int, is_whole: bool) -> float:
        store, tree = self._store(), self._priorities.tree
        span = store.span(length)
        if is_whole and store.episodes is not None:
            return float(tree.values[self._whole(span)].sum())
        # Those that do not fit are few: the last ones of each environment.
        mass = float(tree.total) - float(tree.values[store.span().newer(span.high)].sum())
        return mass if mass > EXACT * tree.total else float(tree.values[span.every_row()].sum())

    def _whole(self, span: Span) -> np.ndarray:
        """Rows with as many of their episode as the span says, row ids; looked for when something was written."""
        if self._found is None or self._found[:2] != (span.length, span.snapshot):
            every, episodes = span.every_row(), self._store().episodes
            assert episodes is not None
            self._found = (span.length, span.snapshot, every[expand.fits(episodes, every, span.length)])
        return self._found[2]

    @property
    def largest(self) -> float:
        """The largest priority ever, of all shards that this one has heard of: what a new row gets."""
        return self._priorities.max_priority

    @largest.setter
    def largest(self, largest: float) -> None:
        self._priorities.max_priority = max(largest, self._priorities.max_priority)

    def drawn(self) -> Columns:
        """What is known of the last `sample`."""
        picked = self._last_selection()
        known = {
            MASK: self.get_sampling_mask(),
            DISCOUNT: self.get_sampling_discounts(),
        }
        if IS_FIRST in picked.fields:
            known[IS_FIRST] = self.get_sampling_is_first()
        rows = self.get_sampling_indexes().numpy()
        index = rows + self._turns(self._store().span().steps(rows)) * self._n_rows
        return {INDEX: index, LEAF: picked.fields["leaves"], **{name: each.numpy() for name, each in known.items()}}

    def update_drawn(self, index: np.ndarray, priorities: np.ndarray) -> None:
        """Sets the priorities of what `drawn` gave as `index`, of it what was not overwritten since.

        Raises:
            IndexError: one is of a row that is yet to come.
        """
        turns, rows = np.divmod(index, self._n_rows)
        span = self._store().span()
        steps = span.steps(rows)
        if (turns > self._turns(steps)).any() or (steps < 0).any():
            raise IndexError("update_priorities: an index is none that a sample has had")
        held = (turns == self._turns(steps)) & span.holds(rows, steps)
        self._priorities.update(span, rows[held], priorities[held], is_last=True)

    @property
    def _n_rows(self) -> int:
        return self.memory_size * self.num_envs

    def _turns(self, steps: np.ndarray) -> np.ndarray:
        """How often the rows that hold these steps were written to before."""
        return np.asarray(steps // self.memory_size)


class Shard:
    """Answers what a `RayReplay` asks of a shard.

    Args:
        settings: how to make its memory.
        num_envs: its environments.
        seed: of its draws.
    """

    def __init__(self, settings: ShardSettings, num_envs: int, seed: int) -> None:
        self._settings, self._num_envs, self._seed = settings, num_envs, seed
        self._memory = self._made()
        self._loaded: ShardMemory | None = None
        self._kinds: deque[Beginning] = deque(maxlen=N_KINDS)

    def report(self) -> dict[str, Any]:
        """How many rows there are, what `ShardMemory` tells of them, bytes, and dtypes by name, if it has any rows."""
        memory = self._memory
        masses, least = memory.masses(self._kinds)
        held = memory.get_tensor_names() if len(memory) else []
        names = [name for key in self._settings.names for name in held if name == key or name.startswith(f"{key}/")]
        dtypes = {name: memory.get_tensor_by_name(name).dtype for name in names}
        return {"rows": len(memory), "masses": masses, "least": least, "largest": memory.largest,
                "nbytes": memory.nbytes, "dtypes": dtypes}  # fmt: skip

    def tell(self, kind: Beginning) -> None:
        """Has reports say what this kind sums up to."""
        if kind != ROW and kind not in self._kinds:
            self._kinds.append(kind)

    def extend(self, dtypes: Dtypes, largest: float, columns: Columns) -> None:
        """Appends the steps of trajectories.

        Args:
            dtypes: of tensors, by name.
            largest: priority that other shards have been given.
            columns: of `columns_of`.
        """
        values = {name: tensor_of(np.array(columns[name]), dtype) for name, dtype in dtypes.items()}
        n_timesteps = int(next(iter(values.values())).shape[1])
        self._memory.largest = largest
        marks = columns[LENGTHS], columns[LANES], columns.get(DONE), columns.get(STARTS)
        add_steps(self._memory, Steps(values, n_timesteps, *marks))

    def sample(self, names: Sequence[str], n: int, settings: Mapping[str, Any]) -> ShardSample:
        """Draws rows or sequences.

        Args:
            names: of tensors.
            n: how many.
            settings: of `RandomMemory.sample`.

        Returns:
            The tensors' dtypes; the tensors, and what is known of them, their names behind a "/".
        """
        [tensors] = self._memory.sample(names, batch_size=n, **settings)
        found = dict(zip(names, tensors, strict=True))
        columns = {name: raw_of(tensor) for name, tensor in found.items()}
        columns |= {f"/{name}": column for name, column in self._memory.drawn().items()}
        return ShardSample({name: tensor.dtype for name, tensor in found.items()}, columns)

    def update_priorities(self, columns: Columns) -> None:
        """Of `index` the `priority`."""
        self._memory.update_drawn(columns[INDEX], columns["priority"])

    def save(self) -> ShardFile:
        """Saves the memory."""
        with tempfile.TemporaryDirectory() as folder:
            data = self._memory.save(folder, format=FORMAT).read_bytes()
        return ShardFile({DATA: np.frombuffer(data, np.uint8)})

    def load(self, columns: Columns) -> None:
        """Reads what `save` gave, and keeps it beside what is there."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"memory.{FORMAT}"
            columns[DATA].tofile(path)
            memory = self._made()
            memory.load(path)
        if len(memory) and (missing := sorted(set(self._settings.names) - set(memory.get_tensor_names()))):
            raise FileError(f"{path}: has no tensor(s) {missing}")
        self._loaded = memory

    def take_loaded(self) -> None:
        """Goes on with what `load` has read."""
        assert self._loaded is not None
        self._memory, self._loaded = self._loaded, None

    def drop_loaded(self) -> None:
        """Does not."""
        self._loaded = None

    def close(self) -> None:
        """Nothing: it ends with its actor."""

    def _made(self) -> ShardMemory:
        settings = self._settings
        return ShardMemory(
            memory_size=settings.memory_size, num_envs=self._num_envs, alpha=settings.alpha, seed=self._seed,
            device="cpu",
        )  # fmt: skip
