"""`ChunkReplayBuffer`: rlberry's replay buffer, which gives chunks of T consecutive steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from rlstructs.checks import check_count, check_names
from rlstructs.errors import MissingKeyError, SpecError, StateError
from rlstructs.public_names import set_module
from rlstructs.replay import expand
from rlstructs.replay.claims import Claims
from rlstructs.replay.drawing import Selection, Uniform, draw_fitting
from rlstructs.replay.expand import AVOID_ENDS, CROSS_ENDS, EPISODE_ENDS, MASK_ENDS, Window
from rlstructs.replay.priorities import Priorities, exponent, importance_weights
from rlstructs.replay.reading import Reading
from rlstructs.replay.rlberry.tagged import TaggedBuffer
from rlstructs.replay.span import Span
from rlstructs.replay.store import Storage
from rlstructs.replay.values import host_array

UNIFORM, PRIORITIZED = MODES = ("uniform", "prioritized")
EVENLY = Uniform()


@set_module("rlstructs.replay")
class ChunkBatch(NamedTuple):
    """What `ChunkReplayBuffer.sample` gives.

    Attributes:
        data: tag -> `(B, T, ...)`; and `discount`, gamma to the number of steps, if n_step is above 1.
        info: `indices` int64 (B, T), which rows; `weights` float32 (B,), of importance; `mask` bool (B, T),
            which rows count; `is_first` bool (B, T), where an episode begins.
    """

    data: Any
    info: Any


@set_module("rlstructs.replay")
class ChunkReplayBuffer(TaggedBuffer):
    """A replay buffer that gives chunks of T consecutive steps, uniformly or in proportion to priorities.

    A chunk never goes from the newest row on to the oldest. Episodes end where `end_episode` is called, and
    with rows of which a tag says so (`terminated`, `truncated`, `done` or `dones`).

    In proportion to priorities the last rows of chunks are drawn, so that every row can be, but for the oldest
    T - 1. A new row has the largest priority that was ever given, at first 1. Schaul et al., Prioritized
    Experience Replay (2016), section 3.

    Args:
        max_replay_size: rows; the oldest are overwritten. Several lanes share it, rounded up to as many for each.
        rng: a generator, which the buffer then draws from, or an int to seed one with.
        max_episode_steps: an episode ends with so many rows; of trajectories, which say where theirs end, a longer
            one is an error. None or infinity for no limit.
        enable_prioritized: whether there are priorities.
        alpha: exponent of priorities, at least 0; 0 draws uniformly.
        beta: exponent of importance weights, at least 0; may be set anew at any time.
        n_lanes: environments that are stepped side by side; each has rows and episodes of its own.
        framework: what samples are made of, "numpy", "torch", "jax" or "warp".
        device: where samples are wanted.
        episode_ends: whether chunks "cross" the ends of episodes; do, and `mask` leaves out what is of another
            episode than the first row, or than the drawn last one ("mask"); or "never" do.
        n_step: rewards become the discounted sum of so many steps, up to the end of the episode or the newest
            row; `next_observations` and the like come from the last of them.
        gamma: discount per step.
        stack_num: observations become the last so many of their episode, on a new axis `(B, T, stack_num, ...)`.
        stack_keys: which tags are stacked; None for those that are observations.

    Raises:
        TypeError, SpecError: an argument is not what is needed.

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
    ) -> None:
        # The other one is rlberry's name of it, which its programs read.
        self.max_replay_size = self._max_replay_size = check_count("max_replay_size", max_replay_size)
        self.n_lanes = check_count("n_lanes", n_lanes)
        if rng is None:
            raise SpecError("rng must be a Generator or an int, got None")
        if episode_ends not in EPISODE_ENDS:
            raise SpecError(f"episode_ends must be one of {EPISODE_ENDS}, got {episode_ends!r}")
        keys = None if stack_keys is None else check_names("stack_keys", stack_keys, "tags")
        super().__init__(
            self.n_lanes,
            -(-self.max_replay_size // self.n_lanes),
            max_episode_steps,
            seed=rng,
            framework=framework,
            device=device,
            reading=Reading(n_step, gamma, stack_num, keys),
        )
        self._episode_ends = episode_ends
        self._alpha, self.beta = exponent("alpha", alpha), beta
        self._priorities: Priorities | None = None
        if enable_prioritized:
            self._priorities = Priorities(self._storage.columns.n_rows, self.n_lanes, self._alpha)

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
        """Bytes that rows, what is kept about them, and priorities take."""
        columns = self._storage.columns
        tree = 0 if self._priorities is None else Priorities.nbytes_of(columns.n_rows, columns.n_lanes)
        return super().nbytes + tree

    def sample(self, batch_size: int, chunk_size: int, sampling_mode: str = UNIFORM) -> ChunkBatch | None:
        """Chunks drawn at random, private copies.

        Args:
            batch_size: chunks, B.
            chunk_size: consecutive rows of each, T.
            sampling_mode: "uniform", every chunk as likely as any other, or "prioritized".

        Returns:
            A `ChunkBatch`; None if no lane has `chunk_size` rows.

        Raises:
            SpecError: an argument is not what is needed, or no chunk is there that could be drawn.
            StateError: there are no priorities.
        """
        length = check_count("chunk_size", chunk_size)
        if sampling_mode not in MODES:
            raise SpecError(f"sampling_mode must be one of {MODES}, got {sampling_mode!r}")
        if sampling_mode == PRIORITIZED and self._priorities is None:
            raise StateError("sample: there are no priorities; construct the buffer with enable_prioritized=True")
        n = check_count("batch_size", batch_size)
        if unknown := set(self._reading.stack_keys or ()) - set(self._tags):
            raise MissingKeyError(f"stack_keys: no {sorted(unknown)} among the tags {self.tags}")
        if not self._span(length).total:
            return None
        picked, arrays = self._sample(n, partial(self._select, length=length, mode=sampling_mode))
        return ChunkBatch(self._hand_over(arrays), self._export({"indices": picked.rows, **picked.fields}, {}))

    def update_priorities(self, indices: Any, new_priorities: Any) -> None:
        """Sets the priorities of rows; of equal indices the last counts.

        Priorities of rows that were overwritten since they were drawn are dropped. The indices of a whole batch
        mean the rows of that batch, if it is one of the last 32; others what they meant when they were last drawn.

        Args:
            indices: int (B, T), as `info["indices"]` has them.
            new_priorities: (B, T), finite, at least 0.

        Raises:
            IndexError, SpecError: something is not so; nothing has changed.
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
        """Drops every row, their priorities and the largest of them; tags and the generator stay."""
        super().clear()
        if self._priorities is not None:
            self._priorities.clear()

    # Reading

    def _select(self, n: int, length: int, mode: str) -> Selection:
        storage, ends, rng = self._storage, self._episode_ends, self._rng
        if self._priorities is None:
            return _uniform(storage, n, length, ends, rng)
        with self._priorities.lock:
            if mode == UNIFORM:
                picked = _uniform(storage, n, length, ends, rng)
            else:
                picked = _by_priority(storage, self._priorities, n, length, ends, self._beta, rng)
            self._priorities.drawn.remember(picked.span, picked.rows)
        return picked

    # Files and copies

    def _locks(self) -> Sequence[Any]:
        own = [] if self._priorities is None else [self._priorities.lock]
        return [*own, *super()._locks()]

    def _state(self) -> dict[str, Any]:
        own = {"alpha": self._alpha, "max_priority": 1.0} if self._priorities is None else self._priorities.state()
        return {**super()._state(), **own}

    def _more_arrays(self) -> dict[str, np.ndarray]:
        return {} if self._priorities is None else self._priorities.arrays()

    def _restorer(
        self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray], claims: Claims
    ) -> Callable[[], None]:
        restore_tags, priorities = super()._restorer(state, arrays, claims), self._priorities
        if priorities is not None:
            priorities = priorities.restored(arrays, state, claims)

        def restore() -> None:
            restore_tags()
            self._priorities = priorities

        return restore


def _uniform(storage: Storage, n: int, length: int, ends: str, rng: np.random.Generator) -> Selection:
    """`n` chunks, each as likely as any other; see `_by_priority` for the arguments."""
    span, episodes = storage.span(length), storage.track_episodes()
    if ends == AVOID_ENDS:
        fits = partial(expand.fits, episodes, length=length)
        anchors = draw_fitting(lambda k: EVENLY.draw(span, k, rng), fits, n, rng.choice, span, _wanted(ends, length))
    else:
        anchors = EVENLY.draw(span, n, rng)
    window = (expand.padded if ends == MASK_ENDS else expand.chunk)(span, episodes, anchors, length)
    return _selection(window, span, np.ones(n, np.float32))


def _by_priority(
    storage: Storage, priorities: Priorities, n: int, length: int, ends: str, beta: float, rng: np.random.Generator
) -> Selection:
    """`n` chunks that end with rows drawn in proportion to their priorities.

    Args:
        storage: which tracks episodes.
        priorities: of its rows.
        n: how many chunks.
        length: rows of each.
        ends: whether chunks "cross" the ends of episodes, have what is of another episode masked ("mask"),
            or "never" hold one inside.
        beta: exponent of the weights.
        rng: what draws.

    Raises:
        SpecError: there is none to draw.
    """
    span, episodes = storage.span(), storage.track_episodes()
    fits = partial(expand.fits_to, span, episodes if ends == AVOID_ENDS else None, length=length)
    anchors = priorities.draw_rows(span, n, rng, fits if length > 1 else None, _wanted(ends, length))
    tree = priorities.tree
    weights = importance_weights(tree.values.take(anchors), tree.minimum, beta)
    window = (expand.padded_to if ends == MASK_ENDS else expand.chunk_to)(span, episodes, anchors, length)
    return _selection(window, span, weights)


def _selection(window: Window, span: Span, weights: np.ndarray) -> Selection:
    return Selection(window.rows, span, {"weights": weights, "mask": window.mask, "is_first": window.is_first})


def _wanted(ends: str, length: int) -> str:
    return f"window of {length} rows" + (" within one episode" if ends == AVOID_ENDS else "")
