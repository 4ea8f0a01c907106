"""Whether final observations are those of the episodes that ended, and not those of the next ones."""

from __future__ import annotations

import numpy as np
import torch

from rlstructs.errors import SpecError
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.tree import equal
from rlstructs.testing.watched_env import done_of

# Keys that say how a step went, not what is seen.
TOLD = ("reward", "raw_reward", "done", "terminated", "truncated", "initial_state")
# After how many ends, all of which look wrong, something is.
ENOUGH = 2


class Ends:
    """Compares final observations with the first ones of the episodes after them.

    An episode that ends in the state in which the next begins is possible, if seldom; one that does so at every end is
    none: what a reset showed has taken the place of the final observation.

    Args:
        name: of the environment, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._n_same = self._n_others = 0
        # What the agent saw last; and, of environments that start with their next step, how they ended.
        self._seen, self._rows = DictTensor(), np.zeros(0, np.int64)
        self._ended: dict[int, tuple[DictTensor, DictTensor]] = {}

    def begin(self, observation: DictTensor) -> None:
        """All environments were reset."""
        self._ended = {}
        self._see(np.arange(observation.n_elems()), observation)

    def step(self, before: torch.Tensor, after: DictTensor, left: torch.Tensor, following: DictTensor) -> None:
        """Looks at a step.

        Args:
            before, after: which environments were stepped, and what it led to.
            left, following: which of them still run, and what the agent sees of them next.
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
                if "initial_state" in first and not bool(first["initial_state"]):  # it starts with its next step
                    self._ended[env] = seen, final.clone()
                else:
                    self._compare(seen, final, _row(following, place[env]))
        self._see(left.numpy(), following)

    def check(self) -> None:
        """Raises SpecError if no final observation was its own."""
        if self._n_same >= ENOUGH and not self._n_others:
            raise SpecError(
                f"{self._name}: the final observations of {self._n_same} episodes are the first ones of the episodes "
                "after them: what a step led to was lost with the reset; keep a copy of it before the reset (in "
                "'final_obs', where the autoreset mode is SameStep)"
            )

    def _compare(self, before: DictTensor, final: DictTensor, first: DictTensor) -> None:
        if _same(before, final):
            return  # a step that changed nothing says nothing
        if _same(final, first):
            self._n_same += 1
        else:
            self._n_others += 1

    def _see(self, envs: np.ndarray, observation: DictTensor) -> None:
        self._seen, self._rows = observation.clone(), envs.copy()

    def _seen_of(self, env: int) -> DictTensor:
        return _row(self._seen, int(np.searchsorted(self._rows, env)))


def _row(observation: DictTensor, row: int) -> DictTensor:
    """What can be seen in one row."""
    kept = [key for key in observation if key not in TOLD and key.partition("/")[0] != "last_action"]
    return observation.get(kept).slice(row, row + 1)


def _same(one: DictTensor, other: DictTensor) -> bool:
    return all(equal(tensor, other[key]) for key, tensor in one.items())
