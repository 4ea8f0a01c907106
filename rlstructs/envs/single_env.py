"""A single environment of a vectorised one, and the episode that it is in."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlstructs.seeding import episode_seed


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
    actions: list[Any] = field(default_factory=list)
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
