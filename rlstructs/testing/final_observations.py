"""Checks that final observations belong to the episode that ended, not to the next one."""

from __future__ import annotations

import numpy as np
import torch

from rlstructs.errors import SpecError
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.tree import equal
from rlstructs.testing.checked_env import done_of

# Keys that say how a step went; the others hold what the agent sees.
NOT_SEEN = ("reward", "raw_reward", "done", "terminated", "truncated", "initial_state")
# How many episodes must have ended before it is an error that all their ends look wrong.
MIN_ENDS = 2


class FinalObservations:
    """Compares each final observation with the first observation of the next episode.

    Now and then an episode may end in the state in which the next one begins. If every episode does, the observation
    of the reset has replaced the final one.

    Args:
        name: of the environment, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._n_same = self._n_others = 0
        # What the agent saw last, and the environments that its rows belong to.
        self._seen, self._rows = DictTensor(), np.zeros(0, np.int64)
        # By environment: the last two observations of an episode that ended, until the next step starts another one.
        self._ended: dict[int, tuple[DictTensor, DictTensor]] = {}

    def begin(self, observation: DictTensor) -> None:
        """Starts anew, after a reset of all environments."""
        self._ended = {}
        self._see(np.arange(observation.n_elems()), observation)

    def step(self, before: torch.Tensor, after: DictTensor, left: torch.Tensor, following: DictTensor) -> None:
        """Compares the episodes that end or begin in a step.

        Args:
            before, after: the environments that were stepped, and what the step led to.
            left, following: those that still run, and what the agent sees of them next.
        """
        done = done_of(after)
        if done is None:
            return
        rows, place = before.tolist(), {env: row for row, env in enumerate(left.tolist())}
        for row, env in enumerate(rows):
            if env in self._ended:
                self._compare(*self._ended.pop(env), _row(after, row))
            elif done[row] and env in place:
                seen, final = self._seen_of(env), _row(after, row)
                first = following.slice(place[env], place[env] + 1)
                if "initial_state" in first and not bool(first["initial_state"]):  # the next step starts it
                    self._ended[env] = seen, final.clone()
                else:
                    self._compare(seen, final, _row(following, place[env]))
        self._see(left.numpy(), following)

    def check(self) -> None:
        """Raises SpecError if every final observation equalled the first one of the next episode."""
        if self._n_same >= MIN_ENDS and not self._n_others:
            raise SpecError(
                f"{self._name}: the final observations of {self._n_same} episodes equal the first ones of the next "
                "episodes: the reset has overwritten the observation that the step led to; copy it before the reset "
                "(to 'final_obs' if the autoreset mode is SameStep)"
            )

    def _compare(self, before: DictTensor, final: DictTensor, first: DictTensor) -> None:
        if _same(before, final):
            return  # nothing can be concluded from a step that changed nothing
        if _same(final, first):
            self._n_same += 1
        else:
            self._n_others += 1

    def _see(self, envs: np.ndarray, observation: DictTensor) -> None:
        self._seen, self._rows = observation.clone(), envs.copy()

    def _seen_of(self, env: int) -> DictTensor:
        return _row(self._seen, int(np.searchsorted(self._rows, env)))


def _row(observation: DictTensor, row: int) -> DictTensor:
    """What the agent sees in one row: all keys but those of `NOT_SEEN` and last actions."""
    kept = [key for key in observation if key not in NOT_SEEN and key.partition("/")[0] != "last_action"]
    return observation.get(kept).slice(row, row + 1)


def _same(one: DictTensor, other: DictTensor) -> bool:
    return all(equal(tensor, other[key]) for key, tensor in one.items())
