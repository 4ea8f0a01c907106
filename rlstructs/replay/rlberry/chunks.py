"""`ChunkReplayBuffer`: rlberry's replay buffer, which samples chunks of T consecutive steps."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rlstructs.checks import check_count, check_names
from rlstructs.errors import MissingKeyError, SpecError, StateError
from rlstructs.replay.buffer import Buffer
from rlstructs.replay.draw.ahead import Batches, StoreDraws
from rlstructs.replay.draw.packed import ANCHOR, FIRST, PackedWindows, in_library
from rlstructs.replay.draw.plan import (
    AVOID_ENDS,
    CROSS_ENDS,
    EPISODE_ENDS,
    Selection,
    Uniform,
    Windows,
    check_not_packed,
)
from rlstructs.replay.draw.priorities import LEAVES, Priorities, exponent, importance_weights
from rlstructs.replay.draw.reading import DISCOUNT, Reading
from rlstructs.replay.intake.arrays import host_array, spec_of
from rlstructs.replay.keep.checks import Claims
from rlstructs.replay.keep.stored import Arrays, Restore
from rlstructs.replay.leave.export import GatheredColumn
from rlstructs.replay.rlberry.intake import StoredRows, TaggedIntake, dtype_name
from rlstructs.replay.rows.spec import Setting
from rlstructs.structures.trajectories import Trajectories
from rlstructs.workers.public_names import set_module

UNIFORM, PRIORITIZED = MODES = ("uniform", "prioritized")
EVENLY = Uniform()


@set_module("rlstructs.replay")
class ChunkBatch(NamedTuple):
    """A sample of a `ChunkReplayBuffer`.

    Attributes:
        data: tag -> `(B, T, ...)`; and `discount`, gamma to the number of steps, if n_step is above 1.
        info: `indices` int64 (B, T), which rows; `weights` float32 (B,), of importance; `mask` bool (B, T),
            which rows count; `is_first` bool (B, T), where an episode begins.
    """

    data: Any
    info: Any


@set_module("rlstructs.replay")
class ChunkReplayBuffer(Buffer):
    """A replay buffer that draws chunks of T consecutive steps.

    Draws are uniform or in proportion to priorities. A chunk never goes from the newest row on to the oldest. Episodes
    end where `end_episode` is called, and at rows in which a tag says so (`terminated`, `truncated`, `done` or
    `dones`).

    Prioritised draws draw the last row of a chunk, so that every row can be drawn except the oldest T - 1. A new row
    has the largest priority that was ever given, at first 1. Schaul et al., Prioritized Experience Replay (2016),
    section 3.

    Args:
        max_replay_size: number of rows; the oldest are overwritten. Several lanes share it, in equal parts, rounded up.
        rng: a generator, which the buffer then draws from, or an int to seed one with.
        max_episode_steps: an episode ends after so many rows; a longer episode in trajectories, which mark their ends,
            is an error. None or infinity for no limit.
        enable_prioritized: whether there are priorities.
        alpha: exponent of priorities, at least 0; 0 draws uniformly.
        beta: exponent of importance weights, at least 0; may be set.
        n_lanes: number of environments that are stepped side by side; each has rows and episodes of its own.
        framework: library of the samples, "numpy", "torch", "jax" or "warp".
        device: of samples.
        episode_ends: "cross" if chunks may span episodes; "never" for chunks of one episode; "mask" if they may span
            episodes and `mask` marks one of them, that of the first row (in prioritised draws, of the last row).
        n_step: rewards become the discounted sum of so many steps, up to the end of the episode or the newest
            row; `next_observations` and the like come from the last of them.
        gamma: discount per step.
        stack_num: observations become the last so many of their episode, on a new axis `(B, T, stack_num, ...)`.
        stack_keys: which tags are stacked; None for all observations.
        compression: "zstd", "zstd:LEVEL", or tag -> one of these, compresses columns; see `Memory`.
        path: a folder for the rows, which opens again after a program was killed; see `Memory`.

    Raises:
        TypeError, SpecError: an argument is invalid.

    Example:
        >>> buffer = ChunkReplayBuffer(1000, rng=0, enable_prioritized=True)
        >>> buffer.setup_entry("observations", np.float32)
        >>> buffer.setup_entry("rewards", np.float32)
        >>> for t in range(10):
        ...     buffer.append({"observations": [t, -t], "rewards": 1.0})
        >>> buffer.end_episode()
        >>> batch = buffer.sample(batch_size=32, chunk_size=4, sampling_mode="prioritized")
        >>> batch.data["observations"].shape, batch.info["weights"].shape
        ((32, 4, 2), (32,))
        >>> errors = abs(batch.data["rewards"] - 0.5)
        >>> buffer.update_priorities(batch.info["indices"], errors)
    """

    _intake: TaggedIntake

    def __init__(
        self,
        max_replay_size: int,
        rng: np.random.Generator | int,
        max_episode_steps: float | None = None,
        enable_prioritized: bool = False,
        alpha: float = 0.5,
        beta: float = 0.5,
        *,
        n_lanes: int = 1,
        framework: str = "numpy",
        device: Any = None,
        episode_ends: str = CROSS_ENDS,
        n_step: int = 1,
        gamma: float = 0.99,
        stack_num: int = 1,
        stack_keys: Sequence[str] | None = None,
        compression: Setting = None,
        path: str | Path | None = None,
    ) -> None:
        # The private one has rlberry's name, which its programs read.
        self.max_replay_size = self._max_replay_size = check_count("max_replay_size", max_replay_size)
        self.n_lanes = check_count("n_lanes", n_lanes)
        if rng is None:
            raise SpecError("rng must be a Generator or an int, got None")
        if episode_ends not in EPISODE_ENDS:
            raise SpecError(f"episode_ends must be one of {EPISODE_ENDS}, got {episode_ends!r}")
        keys = None if stack_keys is None else check_names("stack_keys", stack_keys, "tags")
        capacity, reading = -(-self.max_replay_size // self.n_lanes), Reading(n_step, gamma, stack_num, keys)
        where: Any = {"framework": framework, "device": device, "compression": compression, "path": path}
        super().__init__(self.n_lanes, capacity, seed=rng, reading=reading, **where)
        # rlberry's agents give infinity for an environment without a limit.
        has_limit = max_episode_steps is not None and max_episode_steps != math.inf
        limit = check_count("max_episode_steps", max_episode_steps) if has_limit else None
        self._intake = TaggedIntake(self._storage, type(self).__name__, limit)
        self._intake.set_tags(dict(self._storage.columns.specs))
        self._episode_ends = episode_ends
        self._alpha, self.beta = exponent("alpha", alpha), beta
        self._priorities: Priorities | None = None
        if enable_prioritized:
            n_rows, clock = self._storage.columns.n_rows, self._storage.clock
            self._priorities = Priorities(n_rows, self.n_lanes, self._alpha, clock=clock)

    def __repr__(self) -> str:
        tags = ", ".join(f"{tag} {dtype_name(spec)}" for tag, spec in self._intake.tags.items())
        lanes = "" if self.n_lanes == 1 else f" in {self.n_lanes} lanes"
        n_rows = self._storage.columns.n_rows
        return f"{type(self).__name__}({len(self)} of {n_rows} rows{lanes}: {tags or 'no tags'})"

    @property
    def alpha(self) -> float:
        """Exponent of priorities."""
        return self._alpha

    @property
    def beta(self) -> float:
        """Exponent of importance weights."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = exponent("beta", value)

    @property
    def nbytes(self) -> int:
        """Bytes of rows, bookkeeping and priorities."""
        columns = self._storage.columns
        tree = 0 if self._priorities is None else Priorities.nbytes_of(columns.n_rows, columns.n_lanes)
        return super().nbytes + tree

    # Writing

    @property
    def data(self) -> Mapping[str, GatheredColumn]:
        """Tag -> the stored rows, `(len, ...)`, copied when they are indexed.

        They are sorted by lane and then by slot: with one lane, `data[tag][indices]` has the rows of a sample.
        Operations on a column as a whole copy it, as `numpy.array` does; later rows do not change such a copy.
        """
        return StoredRows(self._intake)

    @property
    def tags(self) -> list[str]:
        """Tags in the order in which they were set up."""
        return list(self._intake.tags)

    @property
    def dtypes(self) -> dict[str, Any]:
        """Tag -> dtype of numpy, or torch's bfloat16, which numpy lacks."""
        return {tag: torch.bfloat16 if spec.is_bfloat16 else spec.dtype for tag, spec in self._intake.tags.items()}

    @property
    def max_episode_steps(self) -> int | None:
        """The most steps of an episode; None for no limit."""
        return self._intake.max_episode_steps

    def setup_entry(self, tag: str, dtype: Any) -> None:
        """Adds a tag, for which every row will hold a value.

        The first value gives the shape.

        Args:
            tag: its name.
            dtype: in which values are stored and returned.

        Raises:
            SpecError: the tag exists already, or the dtype is not one of numbers.
            StateError: there are rows already, which have no such value.
        """
        if not isinstance(tag, str) or not tag:
            raise SpecError(f"setup_entry: a tag must be a string, got {tag!r}")
        if tag in self._intake.tags:
            raise SpecError(f"setup_entry: {tag!r} is there already")
        if tag == DISCOUNT and self._reading.n_step > 1:
            raise SpecError(f"setup_entry: {tag!r} is what a sample with n_step above 1 holds beside its tags")
        if len(self):
            raise StateError(f"setup_entry: {tag!r} comes too late, there are rows; call clear first")
        self._intake.set_tags({**self._intake.tags, tag: spec_of(tag, dtype)})

    def append(self, data: Mapping[str, Any], lane: int | None = None) -> None:
        """Copies a row into the buffer.

        Args:
            data: tag -> value, of any library, one for each tag; only the precision of floats may be lost, so that a
                tag of whole numbers takes a float of 1.0, but not 0.5. Where several lanes get a row, values are
                `(n_lanes, ...)`.
            lane: which lane gets it; None for every lane.

        Raises:
            MissingKeyError, SpecError, TypeError: an argument does not fit; nothing changes.
            StateError: there is no tag yet.
        """
        self._intake.append(data, lane)

    def end_episode(self, lane: int | None = None) -> None:
        """Ends the unfinished episode of a lane, if there is one.

        None ends those of every lane.
        """
        self._intake.end_episodes(self._intake.choose_lanes(lane))

    def add_trajectories(self, trajectories: Trajectories, names: Mapping[str, str] | None = None) -> None:
        """Appends the valid steps of a batch of `RL_Batcher.get`.

        The lane of a trajectory is its `env_index`; a buffer of one lane appends one trajectory after another. If no
        tag is set up yet, the tags of `names` are set up, with the dtypes of the trajectories.

        Args:
            trajectories: the batch.
            names: tag -> key of the trajectories; None for the names of rlberry's agents (`observations`,
                `next_observations`, `actions`, `rewards`, `terminated`, `truncated`, `dones`), as far as they are set
                up.

        Raises:
            TypeError, MissingKeyError, SpecError: an argument does not fit; nothing is added.
        """
        super().add_trajectories(trajectories, names)

    # Sampling

    def sample(
        self,
        batch_size: int,
        chunk_size: int,
        sampling_mode: str = UNIFORM,
        *,
        packed: bool = False,
        context: int = 0,
        max_steps: int | None = None,
        states: Mapping[str, str] | None = None,
    ) -> ChunkBatch | None:
        """Draws chunks, private copies.

        Args:
            batch_size: number of chunks, B.
            chunk_size: number of consecutive rows of each, T.
            sampling_mode: "uniform", every chunk as likely as any other, or "prioritized".
            packed: whether `data` is a `PackedTrajectories` of chunks of one episode each, which begin at the drawn
                row, also in prioritised draws, and may be shorter; `indices` (B, 1) are the drawn rows, `mask` and
                `is_first` (N,). Buffers of jax and warp return its `jax()` and `warp()`.
            context, max_steps, states: of packs, see `RandomMemory.sample`.

        Returns:
            A `ChunkBatch`; None if no lane has `chunk_size` rows, or of packs, if there is no row.

        Raises:
            SpecError: an argument is invalid, or there is no chunk to draw.
            StateError: there are no priorities.
        """
        draws = self._draws(batch_size, chunk_size, sampling_mode, packed, context, max_steps, states)
        batch: ChunkBatch | None = draws.sample() if self._storage.view(1 if packed else chunk_size).total else None
        return batch

    def batches(
        self, batch_size: int, chunk_size: int, sampling_mode: str = UNIFORM, *, prefetch: int = 2, **settings: Any
    ) -> Batches:
        """Makes batches ahead, for ever, by threads; see `RandomMemory.batches`.

        Weights are of the draw, too.

        Args:
            batch_size, chunk_size, sampling_mode, settings: see `sample`.
            prefetch: how many batches are drawn ahead; 0 for none.

        Returns:
            An iterator over what `sample` returns. Without a chunk to draw, it raises SpecError.

        Raises:
            SpecError, StateError: see `sample`.
        """
        return Batches.of(self._draws(batch_size, chunk_size, sampling_mode, **settings), prefetch)

    def _draws(
        self,
        batch_size: int,
        chunk_size: int,
        sampling_mode: str,
        packed: bool = False,
        context: int = 0,
        max_steps: int | None = None,
        states: Mapping[str, str] | None = None,
    ) -> StoreDraws:
        """Describes the draws of `sample`."""
        length = check_count("chunk_size", chunk_size)
        if sampling_mode not in MODES:
            raise SpecError(f"sampling_mode must be one of {MODES}, got {sampling_mode!r}")
        by_priority = sampling_mode == PRIORITIZED
        if by_priority and self._priorities is None:
            raise StateError("sample: there are no priorities; construct the buffer with enable_prioritized=True")
        n = check_count("batch_size", batch_size)
        if unknown := set(self._reading.stack_keys or ()) - self._intake.tags.keys():
            raise MissingKeyError(f"stack_keys: no {sorted(unknown)} among the tags {self.tags}")
        if packed:
            return self._packed_draws(n, PackedWindows.of(length, context, max_steps, states), by_priority)
        check_not_packed(context, max_steps, states)

        def hand_over(picked: Selection, arrays: dict[str, Any]) -> ChunkBatch:
            data = self._export(arrays, self._storage.columns.specs)
            return ChunkBatch(data, self._export({"indices": picked.rows, **picked.fields}, {}))

        select = partial(self._select, length=length, by_priority=by_priority)
        return StoreDraws(self._storage, self._stream, n, select, self._read, hand_over)

    def update_priorities(self, indices: Any, new_priorities: Any) -> None:
        """Sets the priorities of rows; if an index is repeated, its last priority counts.

        Priorities of rows that were overwritten since they were drawn are dropped. The indices of a whole batch mean
        the rows of that batch, if it is one of the last 32; other indices mean the rows when they were last drawn.

        Args:
            indices: int (B, T), of `info["indices"]`.
            new_priorities: (B, T), finite, at least 0.

        Raises:
            IndexError, SpecError: an argument does not fit; nothing changes.
            StateError: there are no priorities.
        """
        if self._priorities is None:
            raise StateError("update_priorities: there are none; construct the buffer with enable_prioritized=True")
        rows, values = host_array("indices", indices), host_array("new_priorities", new_priorities)
        if rows.ndim != 2 or rows.shape != values.shape:
            raise SpecError(
                f"update_priorities: indices and new_priorities must have one shape (B, T), got {rows.shape} "
                f"and {values.shape}"
            )
        self._priorities.set(self._storage, rows, values)

    def clear(self) -> None:
        """Drops every row and all priorities.

        The largest priority is forgotten, too; tags and the generator stay.
        """
        self._storage.clear()
        if self._priorities is not None:
            self._priorities.clear()

    def _packed_draws(self, n: int, packs: PackedWindows, by_priority: bool) -> StoreDraws:
        def select(count: int) -> Selection:
            picked = self._pick(count, by_priority, packs.select)
            picked.earliest = self._reading.earliest(picked.view, picked.fields[FIRST])
            return picked

        def hand_over(picked: Selection, arrays: Any) -> ChunkBatch:
            picked, pack = packs.pack(picked, arrays, specs, lambda picked: {"weights": picked.fields["weights"]})
            fields = picked.fields
            info = {"indices": fields[ANCHOR][:, None], "weights": fields["weights"]}
            info |= {name: fields[name][:, 0] for name in ("mask", "is_first")}
            data = in_library(pack, self._export.framework, self._export.device)
            return ChunkBatch(data, self._export(info, {}))

        specs = self._storage.columns.specs
        read = packs.reader(lambda view, rows: self._reading.read(self._storage, view, list(specs), rows), specs)
        return StoreDraws(self._storage, self._stream, n, select, read, hand_over)

    def _select(self, n: int, length: int, by_priority: bool) -> Selection:
        ends = self._episode_ends
        wanted = f"window of {length} rows" + (" within one episode" if ends == AVOID_ENDS else "")
        windows = Windows(length, ends, is_last=by_priority)
        picked = self._pick(n, by_priority, partial(windows.select, wanted=wanted))
        picked.earliest = self._reading.earliest(picked.view, picked.rows[:, 0])
        return picked

    def _pick(self, n: int, by_priority: bool, select: Callable[..., Selection]) -> Selection:
        """Draws windows, with their weights, and remembers their rows."""
        priorities, rng = self._priorities, self._stream.generator
        picker: Any = priorities if by_priority else EVENLY
        weights = np.ones(n, np.float32)
        with contextlib.nullcontext() if priorities is None else priorities.lock:
            picked = select(self._storage, picker, n, rng)
            if priorities is not None:
                if by_priority:
                    weights = importance_weights(picked.fields.pop(LEAVES), priorities.tree.minimum, self._beta)
                priorities.drawn.remember(picked.view, picked.rows)
        picked.fields = {"weights": weights, **picked.fields}
        return picked

    def _read(self, picked: Selection) -> dict[str, Any]:
        return self._reading.read(self._storage, picked.view, list(self._storage.columns.specs), picked.rows)

    # Files and copies

    def _held_priorities(self) -> Priorities | None:
        return self._priorities

    def _state(self) -> dict[str, Any]:
        own = {"alpha": self._alpha, "max_priority": 1.0} if self._priorities is None else self._priorities.state()
        return {**self._intake.state(), **own}

    def _restorer(self, state: Mapping[str, Any], arrays: Arrays, claims: Claims) -> Restore:
        tags, priorities = self._intake.tags_in(state, claims), self._priorities
        if priorities is not None:
            priorities = priorities.restored(arrays, state, claims)

        def restore() -> None:
            self._intake.set_tags(tags)
            self._priorities = priorities

        return restore
