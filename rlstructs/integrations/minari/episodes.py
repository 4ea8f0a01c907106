"""Cuts rollouts into episodes, and joins pieces from consecutive rollouts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from rlstructs.checks import UNKNOWN
from rlstructs.envs.env_infos import PREFIX
from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.integrations.minari.columns import SpaceColumns, find_array
from rlstructs.replay.intake.arrays import find_marks, host_array
from rlstructs.replay.intake.trajectories import STEP_START
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import Trajectories

# The columns of steps that every dataset has: Minari's name -> key of trajectories.
STEPS = {
    "rewards": "_observation/reward",
    "terminations": "_observation/terminated",
    "truncations": "_observation/truncated",
}
OPTIONS = "env_info/"

Arrays = dict[str, np.ndarray]


@dataclass
class Episode:
    """The steps of an episode that are not written yet.

    Attributes:
        first: key -> value before the first step; empty once that is written.
        options: of its reset.
        number: its number in the dataset; None until a part of it is written.
        n_written: how many of its steps are written.
        following: the number of the step after the last one; `UNKNOWN` if it is not known.
        pieces: the data that follow each step, (n, ...) each: `observation/...`, `info/...`, `action/...` and the names
            of `STEPS`.
    """

    first: Arrays
    options: Arrays
    number: int | None = None
    n_written: int = 0
    following: int = UNKNOWN
    pieces: list[Arrays] = field(default_factory=list)

    @property
    def n_held(self) -> int:
        """The number of steps that are not written."""
        return sum(len(piece["rewards"]) for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        """The bytes of the steps that are not written."""
        return sum(array.nbytes for piece in self.pieces for array in piece.values())

    @property
    def is_over(self) -> bool:
        """Whether the environment ended it."""
        last = self.pieces[-1]
        return bool(last["terminations"][-1] or last["truncations"][-1])

    def goes_on(self, before: Arrays, number: int) -> bool:
        """Whether a step follows the last one.

        Args:
            before: key -> value before the step. If a number is unknown, these must equal the values after the last
                step: they differ if a rollout is missing, unless the environment returns the same values again.
            number: of the step, see `TemporalDictTensor.first_steps`.
        """
        if UNKNOWN not in (number, self.following):
            return number == self.following
        last = self.pieces[-1]
        keys = [key for key in before if key.startswith("observation/")]
        return all(last[key][-1].tobytes() == before[key].tobytes() for key in keys)

    def truncate(self) -> None:
        """Marks the last step as truncated, unless the episode is over."""
        if not self.is_over:
            self.pieces[-1]["truncations"][-1] = True

    def take(self, n_left: int = 0) -> Arrays:
        """Removes and returns all steps but the last `n_left`.

        Observations and infos begin with those before the first step, unless they were written already.
        """
        joined = {key: np.concatenate([piece[key] for piece in self.pieces]) for key in self.pieces[0]}
        n = len(joined["rewards"]) - n_left
        self.pieces = [{key: array[n:].copy() for key, array in joined.items()}] if n_left else []
        self.n_written += n
        taken = {key: array[:n] for key, array in joined.items()}
        taken |= {key: np.concatenate([value[None], taken[key]]) for key, value in self.first.items()}
        self.first = {}
        return taken


class EpisodeJoiner:
    """Makes episodes of rollouts.

    Args:
        observations, actions: the columns of the spaces.
    """

    def __init__(self, observations: SpaceColumns, actions: SpaceColumns) -> None:
        self._observations, self._actions = observations, actions
        self._going: dict[int, Episode] = {}  # by environment

    @property
    def going(self) -> list[Episode]:
        """The episodes that go on, by environment."""
        return [self._going[env] for env in sorted(self._going)]

    def add(self, batch: Trajectories) -> Iterator[Episode]:
        """Adds the next steps of each environment; yields the episodes that are complete.

        Raises:
            MissingKeyError, SpecError: a key is missing or has the wrong shape; the message names it.
        """
        if not isinstance(batch, Trajectories):
            raise TypeError(f"to_minari: each batch must be Trajectories, got {type(batch).__name__}")
        if "env_index" not in batch.info:
            raise MissingKeyError("to_minari: no 'env_index' in info: it says which environment a row belongs to")
        first, following = self._columns(batch.trajectories)
        info = {key: host_array(key, value) for key, value in batch.info.items()}
        options = {key.removeprefix(OPTIONS): info[key] for key in info if key.startswith(OPTIONS)}
        done = following["terminations"] | following["truncations"]
        found = find_marks({key: batch.trajectories[key] for key in (STEP_START,) if key in batch.trajectories})
        starts = np.zeros_like(done) if found is None else found
        lengths = host_array("lengths", batch.lengths).tolist()
        numbers = batch.trajectories.first_steps
        firsts = [UNKNOWN] * len(lengths) if numbers is None else numbers.tolist()
        for row, (env, n, number) in enumerate(zip(info["env_index"].tolist(), lengths, firsts, strict=True)):
            cuts = np.flatnonzero(done[row, : max(0, n - 1)] | starts[row, 1 : max(1, n)]) + 1
            for start, stop in itertools.pairwise([0, *cuts.tolist(), n]) if n else ():
                before = {key: array[row, start].copy() for key, array in first.items()}
                episode = self._going.pop(env, None)
                at = UNKNOWN if number == UNKNOWN else number + start
                if episode is not None and (starts[row, start] or not episode.goes_on(before, at)):
                    yield episode
                    episode = None
                episode = episode or Episode(before, {key: np.array(values[row]) for key, values in options.items()})
                episode.pieces.append({key: array[row, start:stop].copy() for key, array in following.items()})
                episode.following = UNKNOWN if at == UNKNOWN else at + stop - start
                if episode.is_over:
                    yield episode
                else:
                    self._going[env] = episode

    def end(self) -> Iterator[Episode]:
        """Yields the episodes that go on, and forgets them."""
        going, self._going = self.going, {}
        yield from going

    def _columns(self, steps: TemporalDictTensor) -> tuple[Arrays, Arrays]:
        """Returns the data before each step, and the data that follow it.

        Before: observations and infos; (B, T, ...) both.
        """
        leaves = self._observations.leaves
        first: Arrays = {}
        following: Arrays = {}
        for found, prefix in ((first, "observation/"), (following, "_observation/")):
            found |= {f"observation/{name}": self._observations.find(steps, name, prefix) for name in leaves}
            names = [key.removeprefix(prefix) for key in steps if key.startswith(prefix + PREFIX)]
            found |= {name: find_array(steps, prefix + name) for name in names if name not in leaves}
        for name in self._actions.leaves:
            following[f"action/{name}"] = self._actions.find(steps, name, "action/")
        for name, key in STEPS.items():
            following[name] = find_array(steps, key)
            if following[name].ndim != 2:
                raise SpecError(f"to_minari: {key!r} is {following[name].shape}, expected (B, T)")
        for name in ("terminations", "truncations"):
            following[name] = following[name].astype(bool)
        return first, following
