"""`RandomMemory`, which draws rows, or windows of rows, uniformly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlstructs.checks import check_count, check_gamma
from rlstructs.errors import SpecError, StateError
from rlstructs.memories import memory
from rlstructs.replay.draw.ahead import Batches, StoreDraws
from rlstructs.replay.draw.packed import ANCHOR, PackedWindows, in_library
from rlstructs.replay.draw.plan import CROSS_ENDS, EPISODE_ENDS, Picker, Selection, Uniform, Windows, check_not_packed
from rlstructs.replay.draw.reading import Reading
from rlstructs.replay.rows.store import Storage

NO_NAME = ""  # no tensor has it
# The settings of nearly every draw, which need no check.
USUAL = (1, 1, 0.99, CROSS_ENDS)
NO_ENDS_ERROR = "no tensor 'terminated' or 'truncated' says where episodes end"


class RandomMemory(memory.Memory):
    """A memory that draws its rows uniformly.

    Args:
        replacement: whether a batch may hold a row twice. If False, a batch is smaller if there are too few rows.
            None draws with replacement, except that a batch as large as the memory holds each row once: an epoch of
            skrl's on-policy agents.
        memory_size, num_envs, device, export, export_format, export_directory, seed, strict: see `Memory`.
    """

    def __init__(
        self,
        memory_size: int,
        num_envs: int = 1,
        device: Any = None,
        export: bool = False,
        export_format: str = "pt",
        export_directory: str | Path = "",
        replacement: bool | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(memory_size, num_envs, device, export, export_format, export_directory, **settings)
        self._uniform = Uniform(replacement)
        # skrl's attribute, which subclasses of its memories read.
        self._replacement = self._uniform.replacement is not False
        self._last: Selection | None = None
        self._discounts: Any = 1.0  # of the last sample: one number, or one for each row

    def sample(
        self,
        names: Sequence[str],
        batch_size: int,
        mini_batches: int = 1,
        sequence_length: int = 1,
        *,
        n_step: int = 1,
        gamma: float = 0.99,
        episode_ends: str = "cross",
        packed: bool = False,
        max_steps: int | None = None,
        context: int = 0,
        states: Mapping[str, str] | None = None,
    ) -> Any:
        """Draws rows at random and returns copies.

        Args:
            names: names of tensors; unknown ones give None, with one warning in the log.
            batch_size: number of rows or sequences; without replacement there may be fewer.
            mini_batches: number of parts; they hold whole sequences and are of nearly equal size.
            sequence_length: consecutive rows of one environment, adjacent in the result, none after the newest.
            n_step: `rewards` become the discounted sum of n rewards, up to the end of the episode or the newest row;
                `next_*`, `terminated` and `truncated` come from the last of these steps. `get_sampling_discounts`
                returns gamma to the number of steps.
            gamma: the discount per step.
            episode_ends: whether sequences "cross" the ends of episodes, are masked after them ("mask", see
                `get_sampling_mask`), or "never" contain one.
            packed: whether to return a `PackedTrajectories` of windows of one episode each, which may be shorter than
                `sequence_length`; memories of jax and warp return its `jax()` and `warp()`. `get_sampling_indexes` has
                the first row of each that counts.
            max_steps: size of the pack, which is filled up; windows that have no room are left out. None for no limit.
            context: how many rows in front of a window come with it, as far as its episode has them, and do not count.
            states: part of the agent's state -> the tensor that has it before each step; the pack's `state` is that of
                the first row of each window.

        Returns:
            For each mini-batch a list of tensors `(rows, *data)`, in the order of `names`.

        Raises:
            SpecError: an argument is invalid, or there is nothing to draw.
        """
        settings = n_step, gamma, episode_ends, packed, max_steps, context, states
        return self._draws(names, batch_size, mini_batches, sequence_length, *settings).sample()

    def batches(
        self,
        names: Sequence[str],
        batch_size: int,
        mini_batches: int = 1,
        sequence_length: int = 1,
        *,
        prefetch: int = 2,
        **settings: Any,
    ) -> Batches:
        """Makes batches ahead, without end.

        Threads read and decode them while the program works with another one.

        They have the rows that as many calls of `sample` would draw, in the same order. If rows are added or priorities
        set in between, a batch is of the rows and priorities there were when the batch `prefetch` places before it was
        handed out; the first ones, of those when the first was. Rows that were overwritten since are drawn anew. What
        was drawn ahead is drawn anew, too, if rows are changed in place, the memory is saved, or the program draws
        otherwise: files and copies have the random stream as it is after the last batch that was handed out, and a
        program that goes on after a save draws what one draws that loads the file. While the program has live tensors,
        nothing is read ahead.

        Args:
            names, batch_size, mini_batches, sequence_length, settings: see `sample`.
            prefetch: how many batches are drawn ahead; 0 for none.

        Returns:
            An iterator over what `sample` returns, with `close()`, also a context manager. `get_sampling_indexes`,
            `get_sampling_weights` and the like are of the last batch that it handed out. What raises, raises where the
            batch would have been handed out; the next one follows.

        Raises:
            SpecError: an argument is invalid.

        Example:
            >>> from rlstructs.memories.torch import RandomMemory
            >>> memory = RandomMemory(100, seed=0)
            >>> _ = memory.create_tensor("rewards", 1)
            >>> memory.add_samples(rewards=range(5))
            >>> with memory.batches(["rewards"], batch_size=2, prefetch=1) as batches:
            ...     [[rewards]] = next(batches)
            >>> rewards.shape
            torch.Size([2, 1])
        """
        return Batches.of(self._draws(names, batch_size, mini_batches, sequence_length, **settings), prefetch)

    def _draws(
        self,
        names: Sequence[str],
        batch_size: int,
        mini_batches: int,
        sequence_length: int,
        n_step: int = 1,
        gamma: float = 0.99,
        episode_ends: str = CROSS_ENDS,
        packed: bool = False,
        max_steps: int | None = None,
        context: int = 0,
        states: Mapping[str, str] | None = None,
    ) -> StoreDraws:
        """Describes the draws of `sample`."""
        if packed:
            windows = PackedWindows.of(sequence_length or 1, context, max_steps, states)
            _check_packed(mini_batches, episode_ends, n_step)
            return self._packed_draws(names, batch_size, windows)
        check_not_packed(context, max_steps, states)
        names, known = self._tensors.check_names(names, self.strict)
        n, storage = check_count("batch_size", batch_size), self._tensors.allocate()
        settings = sequence_length, n_step, gamma, episode_ends
        length = 1 if type(gamma) is float and settings == USUAL else _check_length(storage, *settings)

        def hand_over(picked: Selection, arrays: list[Any]) -> Any:
            self._note(picked, picked.rows.reshape(-1), gamma if n_step == 1 else arrays.pop())
            if n_step == 1 and type(self).sample_by_index is not memory.Memory.sample_by_index:
                # A subclass returns rows in its own way, for example on another device: skrl's `sample` uses it too.
                return self.sample_by_index(names=names, indexes=self.sampling_indexes, mini_batches=mini_batches)
            if length > 1:
                arrays = [array.reshape(picked.rows.size, *array.shape[2:]) for array in arrays]
            starts = None if mini_batches == 1 else np.arange(0, picked.rows.size, length)
            return self._tensors.split(names, known, arrays, mini_batches, starts)

        return StoreDraws(
            storage,
            self._stream,
            n,
            lambda count: self._select(count, Windows(length, episode_ends)),
            lambda chosen: _read_windows(storage, chosen, known, n_step, gamma),
            hand_over,
        )

    def _note(self, picked: Selection, rows: np.ndarray, discounts: Any) -> None:
        """Notes a batch that is handed out."""
        self._last, self._discounts = picked, discounts
        self.sampling_indexes = self.framework.as_indexes(rows)

    def get_sampling_mask(self) -> Any:
        """Returns a mask of the valid sampled rows, bool (rows,).

        It is in the order of `get_sampling_indexes`.
        """
        return self._tensors.hand_over_one(self._last_selection().fields["mask"].flatten())

    def get_sampling_is_first(self) -> Any:
        """Returns a mask of the sampled rows that begin an episode, bool.

        It is in the order of `get_sampling_indexes`.
        """
        picked = self._last_selection()
        if "is_first" not in picked.fields:
            raise StateError(NO_ENDS_ERROR)
        return self._tensors.hand_over_one(picked.fields["is_first"].flatten())

    def get_sampling_discounts(self) -> Any:
        """Returns gamma to the number of steps of each row, float32 (rows,).

        These are the steps that the row sums up.
        """
        n = self._last_selection().rows.size
        return self._tensors.hand_over_one(np.full(n, self._discounts, np.float32))

    def _last_selection(self) -> Selection:
        if self._last is None:
            raise StateError("call sample first")
        return self._last

    @property
    def _picker(self) -> Picker:
        return self._uniform

    def _select(self, n: int, windows: Windows | PackedWindows) -> Selection:
        return windows.select(self._storage, self._picker, n, self._stream.generator)

    def _packed_draws(self, names: Sequence[str], batch_size: int, windows: PackedWindows) -> StoreDraws:
        _, known = self._tensors.check_names(names, self.strict)
        n, storage = check_count("batch_size", batch_size), self._tensors.allocate()
        if storage.episodes is None:
            raise StateError(NO_ENDS_ERROR)
        read = list(dict.fromkeys([*known, *windows.states.values()]))
        for column in windows.states.values():
            self._tensors.check_known(column)
        specs = storage.columns.specs

        def hand_over(picked: Selection, arrays: Any) -> Any:
            picked, pack = windows.pack(picked, arrays, specs)
            self._note(picked, picked.fields[ANCHOR], 1.0)
            return in_library(pack.get(known), self.framework.library, self.device)

        read_all = windows.reader(
            lambda _, rows: dict(zip(read, storage.columns.gather(read, rows), strict=True)), specs
        )
        return StoreDraws(storage, self._stream, n, lambda count: self._select(count, windows), read_all, hand_over)


def _check_packed(mini_batches: int, episode_ends: str, n_step: int) -> None:
    """Checks the arguments of `RandomMemory.sample` that go with packs."""
    if n_step != 1:
        raise SpecError(f"packed: n_step must be 1, got {n_step}")
    if mini_batches != 1 or episode_ends != CROSS_ENDS:
        raise SpecError(
            "packed: draws one batch of windows that end with their episodes; leave mini_batches and episode_ends out"
        )


def _check_length(storage: Storage, sequence_length: Any, n_step: Any, gamma: float, episode_ends: str) -> int:
    """Checks the arguments of `RandomMemory.sample` and returns the length of windows."""
    # In skrl 0 means 1.
    length = 1 if sequence_length in (0, 1) else check_count("sequence_length", sequence_length)
    if n_step != 1 and check_count("n_step", n_step) > 1 and length > 1:
        raise SpecError("n_step and sequence_length cannot both be above 1")
    check_gamma(gamma)
    if episode_ends not in EPISODE_ENDS:
        raise SpecError(f"episode_ends must be one of {EPISODE_ENDS}, got {episode_ends!r}")
    if (episode_ends != CROSS_ENDS or n_step > 1) and storage.episodes is None:
        raise StateError(NO_ENDS_ERROR)
    return length


def _read_windows(storage: Storage, picked: Selection, names: Sequence[str], n_step: int, gamma: float) -> list[Any]:
    """Reads the drawn rows; for several steps also gamma to their number."""
    rows = picked.rows if picked.rows.shape[1] > 1 else picked.rows[:, 0]
    if n_step == 1:
        return storage.columns.gather(names, rows)
    found = Reading(n_step, gamma).read(storage, picked.view, names, rows, discount=NO_NAME)
    return [found[name] for name in (*names, NO_NAME)]
