"""`CheckedEnv`: checks the results of a `VecEnv`, and raises if one is wrong."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

from rlstructs.envs.env_infos import PREFIX
from rlstructs.envs.vec_env import VecEnv
from rlstructs.errors import SpecError
from rlstructs.rollout.job_specs import repeat_row
from rlstructs.structures.arrays import TensorSpec, numpy_specs, specs_of
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.tree import equal, show

ENDS = ("terminated", "truncated")
DONE, START = "done", "initial_state"
FLAGS = (DONE, *ENDS, START)
# The number of last observations that are checked for later writes: few environments rotate through more buffers.
REMEMBERED = 8


class CheckedEnv:
    """Calls an environment, and raises unless it returns what a rollout needs.

    Args:
        env: the environment.
        name: for messages.
        env_info: one row, which every environment gets at each reset; None for none.

    Attributes:
        running: int64, the environments that run.
    """

    def __init__(self, env: VecEnv, name: str, env_info: DictTensor | None = None) -> None:
        self._env, self._name = env, name
        self._n = self._n_envs()
        self._info = repeat_row(env_info, self._n)
        self._specs: dict[str, TensorSpec] | None = None
        self._handed_out: deque[tuple[str, DictTensor, DictTensor]] = deque(maxlen=REMEMBERED)
        self.running = torch.zeros(0, dtype=torch.int64, device="cpu")
        # Environments whose episode has ended, and whose next step may only start another one.
        self._ended = torch.zeros(self._n, dtype=torch.bool, device="cpu")
        # Environments that wait for an episode, and whose next step need not be a transition.
        self._absent = torch.zeros(self._n, dtype=torch.bool, device="cpu")

    def reset(self) -> DictTensor:
        """The first observation of every environment."""
        where = f"{self._name}.reset"
        observation, running = self._pair(where, self._env.reset(self._info))
        self._check_observation(where, observation, self._n)
        if not torch.equal(running, torch.arange(self._n, device="cpu")):
            raise SpecError(
                f"{where}: all environments have to run after it: running is {running.tolist()}, "
                f"expected {list(range(self._n))}"
            )
        for key, wanted in ((START, True), (DONE, False), *((end, False) for end in ENDS)):
            if key in observation and not (observation[key] == wanted).all():
                raise SpecError(f"{where}: {key!r} has to be {wanted} in a first observation, got {observation[key]}")
        self._remember(where, observation)
        if self._n_envs() != self._n:
            raise SpecError(f"{self._name}.n_envs was {self._n}, and is {self._n_envs()} after reset")
        self.running = running
        self._ended[:] = False
        self._note_absent(running)
        return observation

    def step(self, action: DictTensor) -> tuple[DictTensor, DictTensor]:
        """Returns the result of a step, and the agent's next observation."""
        where, given = f"{self._name}.step", action.clone()
        result = self._env.step(action)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"{where} must return two pairs of observation and running, got {kind_of(result)}")
        after, before = self._pair(f"{where}, first pair", result[0])
        following, left = self._pair(f"{where}, second pair", result[1])
        check_unchanged(f"{where} wrote into the action that it was given: ", action, given)
        self._check_observation(f"{where}, first pair", after, self.running.numel())
        if not torch.equal(before, self.running):
            raise SpecError(
                f"{where}, first pair: running has to name those that were stepped, {self.running.tolist()}, "
                f"got {before.tolist()}"
            )
        kept = self._find_kept(left)
        self._check_observation(f"{where}, second pair", following, left.numel())
        only_starts = _find_starts(where, before, after, self._ended[before], self._absent[before])
        self._ended[:] = False
        _check_flags(where, after)
        self._ended[before[kept]] = _check_ends(where, before, kept, after, following, only_starts)
        self._note_absent(before)
        self._remember(where, after, following)
        self.running = left
        return after, following

    def _note_absent(self, running: torch.Tensor) -> None:
        """Notes which of these environments wait for an episode, if the environment has `absent_rows`."""
        self._absent[:] = False
        self._absent[running[torch.as_tensor(getattr(self._env, "absent_rows", []), dtype=torch.int64)]] = True

    def _n_envs(self) -> int:
        n = self._env.n_envs()
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
            raise SpecError(f"{self._name}.n_envs must be an int of at least 1, got {n!r}")
        return int(n)

    def _pair(self, where: str, pair: Any) -> tuple[DictTensor, torch.Tensor]:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(f"{where} must be a pair of observation and running, got {kind_of(pair)}")
        observation, running = pair
        if not isinstance(observation, DictTensor):
            raise TypeError(f"{where}: an observation must be a DictTensor, got {kind_of(observation)}")
        if not isinstance(running, torch.Tensor):
            raise TypeError(f"{where}: running must be a tensor of int64, got {kind_of(running)}")
        if running.ndim != 1 or (running.numel() and running.dtype != torch.int64):
            raise SpecError(f"{where}: running must be int64 with one axis, got {show(running)}")
        return observation, running.to(torch.int64)

    def _find_kept(self, left: torch.Tensor) -> torch.Tensor:
        """Finds the rows, among those that were stepped, whose environments still run."""
        kept = torch.searchsorted(self.running, left)
        known = bool((kept < self.running.numel()).all()) and torch.equal(self.running[kept], left)
        if not known or not (left.diff() > 0).all():
            raise SpecError(
                f"{self._name}.step, second pair: those that still run have to be some of {self.running.tolist()}, "
                f"in that order, got {left.tolist()}; one that has stopped comes back only with the next reset"
            )
        return kept

    def _check_observation(self, where: str, observation: DictTensor, n: int) -> None:
        if observation.empty():
            raise SpecError(f"{where}: an observation needs at least one key")
        for key, tensor in observation.items():
            if tensor.ndim == 0 or tensor.shape[0] != n:
                whose = "is stepped" if "first" in where else "runs"
                raise SpecError(
                    f"{where}: {key!r} has shape {tuple(tensor.shape)}, expected ({n}, ...), "
                    f"a row for each environment that {whose}"
                )
            if key in FLAGS and (tensor.dtype != torch.bool or tensor.ndim != 1):
                raise SpecError(f"{where}: {key!r} must be bool, one for each environment, got {show(tensor)}")
            if key == "reward" and tensor.ndim != 1:
                raise SpecError(f"{where}: 'reward' must be one number for each environment, got {show(tensor)}")
            if not key.startswith(PREFIX):  # NaN stands for a missing info
                _check_numbers(where, key, tensor)
        specs = specs_of(observation)
        if self._specs is None:
            _check_recordable(where, specs)
            self._specs = specs
        if specs != self._specs:
            raise SpecError(
                f"{where}: {difference(self._specs, specs)}; keys, dtypes and shapes have to be the same at every call"
            )

    def _remember(self, where: str, *observations: DictTensor) -> None:
        """Checks that earlier observations have not changed, and remembers these."""
        for old, tensors, copy in self._handed_out:
            message = f"{where} wrote into what {old} handed out before (hand out a new tensor each time, or a clone): "
            check_unchanged(message, tensors, copy)
        # In a DictTensor of our own: the caller may set keys in the one it gets.
        self._handed_out += [(where, DictTensor(one), one.clone()) for one in observations]


def check_unchanged(message: str, tensors: DictTensor, copy: DictTensor) -> None:
    """Raises SpecError unless tensors are equal to an earlier copy of them."""
    for key, tensor in tensors.items():
        if not equal(tensor, copy[key]):
            raise SpecError(f"{message}{key!r} was {_values(copy[key])} and is {_values(tensor)}")


def _check_recordable(where: str, specs: dict[str, TensorSpec]) -> None:
    for key, (shape, dtype) in specs.items():
        try:
            numpy_specs({key: (shape, dtype)})
        except SpecError as error:
            raise SpecError(f"{where}: {key!r} is {_short(dtype)}, which cannot be recorded; convert it") from error


def _check_numbers(where: str, key: str, tensor: torch.Tensor) -> None:
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return
    wrong = ~tensor.isfinite() if key == "reward" else tensor.isnan()
    if wrong.any():
        row = int(wrong.reshape(len(tensor), -1).any(dim=1).nonzero()[0])
        what = "has to be finite numbers" if key == "reward" else "holds NaN"
        raise SpecError(f"{where}: {key!r} {what}, got {_values(tensor[row])} in row {row}")


def _find_starts(
    where: str, before: torch.Tensor, after: DictTensor, ended: torch.Tensor, absent: torch.Tensor
) -> torch.Tensor:
    """Finds the environments that made no transition in a step.

    They started an episode, or waited for one.
    """
    starts = after[START] if START in after else torch.zeros_like(ended)
    if (wrong := ended & ~starts).any():
        raise SpecError(
            f"{where}: environment {int(before[wrong][0])} ended its episode and goes on, but its "
            "'initial_state' was False in the second pair and in the first pair of the next step: "
            "the agent would not learn that another episode begins"
        )
    if (starts & ~ended & ~absent).any():
        raise SpecError(
            f"{where}, first pair: 'initial_state' is True; the first pair holds what the step led to, "
            "even if the episode ended. What a reset gave belongs in the second pair"
        )
    return starts


def _check_flags(where: str, after: DictTensor) -> None:
    """Raises unless the flags after a step agree."""
    ends = [after[key] for key in ENDS if key in after]
    if DONE in after and len(ends) == len(ENDS) and not torch.equal(after[DONE], ends[0] | ends[1]):
        raise SpecError(
            f"{where}, first pair: 'done' is {after[DONE].tolist()}, expected 'terminated' or 'truncated', "
            f"{(ends[0] | ends[1]).tolist()}"
        )


def _check_ends(
    where: str,
    before: torch.Tensor,
    kept: torch.Tensor,
    after: DictTensor,
    following: DictTensor,
    only_starts: torch.Tensor,
) -> torch.Tensor:
    """Raises unless the agent's next observation is the step's, except after an end.

    An end is one of an episode.

    Returns:
        Which running environments have ended their episode and start another one only in their next step, bool.
    """
    done = done_of(after)
    stopped = torch.ones(before.numel(), dtype=torch.bool, device="cpu")
    stopped[kept] = False
    if stopped.any() and done is None:
        raise SpecError(
            f"{where}: environment {int(before[stopped][0])} stopped, and no key says that its episode "
            "ended; give bool keys 'done', 'terminated' and 'truncated'"
        )
    if done is None:
        return torch.zeros(kept.numel(), dtype=torch.bool, device="cpu")
    if (wrong := stopped & ~done & ~only_starts).any():
        environment = int(before[wrong][0])
        raise SpecError(f"{where}: environment {environment} stopped, but its 'done' is False in the first pair")
    ended = done[kept]
    starts = following[START] if START in following.keys() else ended  # noqa: SIM118 - no dict
    later = ended & ~starts
    for row, (environment, old) in enumerate(zip(before[kept].tolist(), kept.tolist(), strict=True)):
        one, other = after.slice(old, old + 1), following.slice(row, row + 1)
        if later[row] and not all(equal(tensor, other[key]) for key, tensor in one.items()):
            raise SpecError(
                f"{where}: environment {environment} ended its episode and goes on, but its "
                "'initial_state' is False in the second pair: the agent would not learn that another "
                "episode begins"
            )
        if not (only_starts[old] and starts[row]):
            _check_row(where, environment, one, other, bool(ended[row] & ~later[row]))
    return later


def _check_row(where: str, environment: int, after: DictTensor, following: DictTensor, ended: bool) -> None:
    """Checks one environment that still runs.

    One row each: `after`, the step's observation, and `following`, the agent's next one.
    """
    starts = bool(following[START]) if START in following else ended
    if ended:
        if set_flags := [key for key in (DONE, *ENDS) if key in following and bool(following[key])]:
            raise SpecError(
                f"{where}, second pair: {set_flags[0]!r} of environment {environment} has to be False in a "
                "first observation; the end of an episode belongs in the first pair"
            )
        return
    if starts:
        raise SpecError(
            f"{where}, second pair: 'initial_state' of environment {environment} is True, but its episode "
            "did not end: 'done' is False in the first pair"
        )
    for key, tensor in after.items():
        if not equal(tensor, following[key]):
            raise SpecError(
                f"{where}: {key!r} of environment {environment}, whose episode goes on, is {_values(tensor[0])} in the "
                f"first pair and {_values(following[key][0])} in the second; they have to be the same"
            )


def done_of(after: DictTensor) -> torch.Tensor | None:
    """Returns whether each row ended its episode in a step, bool (B,).

    None if no key tells.
    """
    if DONE in after:
        return after[DONE]
    ends = [after[key] for key in ENDS if key in after]
    return torch.stack(ends).any(dim=0) if ends else None


def difference(wanted: dict[str, TensorSpec], got: dict[str, TensorSpec]) -> str:
    """Says in which key two specs differ."""
    for key, (shape, dtype) in wanted.items():
        if key not in got:
            return f"no {key!r} any more, there are {sorted(got)}"
        if got[key] != (shape, dtype):
            return f"{key!r} has rows of {got[key][0]} {_short(got[key][1])}, before {shape} {_short(dtype)}"
    return f"{sorted(set(got) - set(wanted))} was not there at first"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _values(tensor: torch.Tensor) -> str:
    return f"{tensor.tolist()!s:.60}"


def kind_of(value: Any) -> str:
    """Returns the type of a value, for messages.

    For a tuple, the types of its parts.
    """
    if isinstance(value, tuple):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return type(value).__name__
