"""A single environment of a vectorised one, and the episode that it is in."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from rlstructs.seeding import episode_seed

# How many actions are packed at once, and the most that are kept of an episode. To play more would take minutes, and an
# episode without an end would take all memory.
BLOCK, MOST_ACTIONS = 1000, 1_000_000


class Actions:
    """The actions of a running episode, packed; forgotten once there are more than `MOST_ACTIONS`."""

    def __init__(self) -> None:
        self._blocks: list[Iterable[Any]] = []
        self._newest: list[Any] = []
        self._n = 0

    def append(self, action: Any) -> None:
        """Adds the newest one."""
        self._n += 1
        if not self.are_kept:
            self._blocks, self._newest = [], []
            return
        self._newest.append(action)
        if len(self._newest) == BLOCK:
            self._blocks.append(_pack(self._newest))
            self._newest = []

    @property
    def are_kept(self) -> bool:
        """Whether there are few enough."""
        return self._n <= MOST_ACTIONS

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[Any]:
        return chain(*self._blocks, self._newest)


def _pack(actions: list[Any]) -> Iterable[Any]:
    """Packs actions of one type into an array of which each element is equal to one; others stay a list."""
    first = actions[0]
    if any(type(each) is not type(first) for each in actions):
        return actions
    if type(first) in (int, float):
        try:
            return array("q" if type(first) is int else "d", actions)
        except OverflowError:
            return actions
    if isinstance(first, (np.number, np.bool_)):
        return np.array(actions, first.dtype)
    is_plain = type(first) is np.ndarray and first.ndim > 0 and not first.dtype.hasobject
    if is_plain and all(each.dtype == first.dtype and each.shape == first.shape for each in actions):
        return np.stack(actions)
    return actions


@dataclass
class Episode:
    """A running episode, from which a new environment can be brought to the same state.

    Attributes:
        number: how many episodes came before it.
        seed, options: of its reset.
        actions: of all steps so far.
        last: the last observation, and the reward of its step.
    """

    number: int
    seed: int
    options: dict[str, Any] | None
    actions: Actions = field(default_factory=Actions)
    last: tuple[Any, Any] | None = None

    @classmethod
    def after(cls, earlier: Episode | None, seed: int, options: dict[str, Any] | None) -> Episode:
        """The episode that follows, with the next seed of the environment's stream; `seed` is that of the stream."""
        number = 0 if earlier is None else earlier.number + 1
        return cls(number, episode_seed(seed, number), options)

    def replay(self, env: Any) -> tuple[Any, Any]:
        """Plays the episode in an environment; returns the last observation, and the reward of its step."""
        arguments = {} if self.options is None else {"options": copy.deepcopy(self.options)}
        shown, reward = env.reset(seed=self.seed, **arguments)[0], None
        for action in self.actions:
            shown, reward = env.step(copy.deepcopy(action))[:2]
        return shown, reward


class SingleEnv(NamedTuple):
    """An environment that is brought back by a method of its own.

    Attributes:
        env: it; of an unknown class of vectorised environments all of it.
        episode: its running episode, if it is kept.
    """

    env: Any
    episode: Episode | None = None
