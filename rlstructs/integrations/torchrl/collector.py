"""`TensorDictCollector`: the rollouts of an `RL_Batcher` as torchrl's collectors hand them out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict

from rlstructs.errors import SpecError
from rlstructs.structures.arrays import nest_names
from rlstructs.structures.trajectories import Trajectories
from rlstructs.workers.public_names import set_module

# Columns to which torchrl adds an axis, and columns that it names differently.
SIGNALS = ("reward", "done", "terminated", "truncated", "initial_state")
NAMES = {"frame": "observation", "initial_state": "is_init"}
# Keys of `observation` and of `_observation` that torchrl's batches lack.
LEFT_OUT = {"observation": ("reward", "last_action"), "_observation": ("initial_state", "last_action")}
PLACES = {"observation": "", "_observation": "next/", "action": ""}
# Keys that the collector itself adds.
MASK, TRAJ_IDS = "collector/mask", "collector/traj_ids"
# The log-probability of the action, as agents call it, and as torchrl's actors do and its losses look for it.
LOG_PROB, ACTION_LOG_PROB = "log_prob", "action_log_prob"


class Batcher(Protocol):
    """Runs rollouts: an `RL_Batcher` or a `RayBatcher`."""

    def rollouts(self, n_steps: int | None = None) -> Iterator[Trajectories]: ...

    def update(self, info: Any) -> None: ...

    def close(self) -> None: ...


@set_module("rlstructs.integrations.torchrl")
class TensorDictCollector:
    """Iterates over the rollouts of a batcher, like one of torchrl's collectors.

    Each is a `TensorDict` of batch size (B, T), whose second axis has the name "time":

    - observations by their keys, the `frame` as "observation"; "action", and what else the agent put out, by its keys;
      its `log_prob` also as "action_log_prob", where torchrl's losses look for it, unless something else has this name;
    - "done", "terminated", "truncated" and "is_init", whether an episode begins, bool (B, T, 1);
    - ("next", ...): the observations that followed, where an episode ended its true last ones; "reward" (B, T, 1),
      "done", "terminated" and "truncated";
    - ("collector", "traj_ids"), int64 (B, T): a number for each episode, which goes on in the next batch; and
      ("collector", "mask"), bool (B, T): False in the padding.

    Discrete actions are numbers, torchrl's "categorical". Where padding follows a step that ended no episode, the step
    is marked as truncated, so that the padding does not affect earlier advantages; the next batch continues with the
    same number. If rollouts of the batcher went elsewhere, the steps after them begin an episode.
    `batch[batch["collector", "mask"]]` are the steps alone, for a replay buffer.

    Args:
        batcher: runs the rollouts. It is reset when a loop begins with a new one, or after all episodes have ended.
        total_frames: number of steps after which the iteration ends, padding not counted; -1 for no end.
        set_truncated: whether the last step of each row is marked as truncated, unless an episode ended there.

    Raises:
        SpecError: two keys of a rollout get the same name, or one that of ("collector", "mask") or "traj_ids".

    Example:
        >>> from rlstructs import RL_Batcher
        >>> with RL_Batcher.make("CartPole-v1", None, n_envs=4, n_workers=0, n_timesteps=8, seed=0) as batcher:
        ...     [batch] = TensorDictCollector(batcher, total_frames=32)
        >>> batch.batch_size, batch["next", "reward"].shape
        (torch.Size([4, 8]), torch.Size([4, 8, 1]))
    """

    def __init__(self, batcher: Batcher, total_frames: int = -1, *, set_truncated: bool = False) -> None:
        self._batcher, self._n_steps = batcher, None if total_frames == -1 else total_frames
        self._set_truncated = set_truncated
        self._n_episodes = 0
        self._episodes: dict[int, int] = {}  # of each environment, the number of its newest episode
        self._following: dict[int, int] = {}  # and that of the step that follows; see `TemporalDictTensor.first_steps`

    def __iter__(self) -> Iterator[Any]:
        return map(self._convert, self._batcher.rollouts(self._n_steps))

    def update_policy_weights_(self, policy_weights: Any) -> None:
        """Sends weights to the agents: a module or its state dict."""
        self._batcher.update(policy_weights)

    def shutdown(self) -> None:
        """Closes the batcher."""
        self._batcher.close()

    def _convert(self, trajectories: Trajectories) -> Any:
        steps = trajectories.trajectories
        mask = steps.mask(torch.bool)
        columns = name_columns(dict(steps.items()))
        self._mark_cuts(columns, steps.lengths, mask)
        columns[MASK] = mask
        numbers = self._number(*self._find_starts(trajectories, mask))
        columns[TRAJ_IDS] = torch.from_numpy(numbers).to(mask.device)
        return TensorDict(nest_names(columns), batch_size=list(mask.shape), names=[None, "time"], device=mask.device)

    def _mark_cuts(self, columns: dict[str, Any], lengths: torch.Tensor, mask: torch.Tensor) -> None:
        """Marks last steps as truncated where an episode goes on; see the class."""
        T = mask.shape[1]
        wanted = lengths > 0 if self._set_truncated else (lengths > 0) & (lengths < T)
        is_last = (torch.arange(T, device=mask.device) == lengths[:, None] - 1) & wanted[:, None]
        cuts = is_last[..., None] & ~columns["next/done"]
        for name in ("next/truncated", "next/done"):
            columns[name] = columns[name] | cuts

    def _find_starts(self, trajectories: Trajectories, mask: torch.Tensor) -> tuple[np.ndarray, list[int]]:
        """Marks the starts of episodes, bool (B, T), and numbers each row's environment."""
        envs = trajectories.info["env_index"].tolist()
        starts = (trajectories.trajectories["observation/initial_state"] & mask).cpu().numpy()
        # This collector may begin, or go on after others, in the middle of an episode.
        is_new = np.array([env not in self._episodes for env in envs], bool) | self._find_gaps(trajectories)
        starts[:, :1] |= is_new[:, None] & mask[:, :1].cpu().numpy()
        return starts, envs

    def _find_gaps(self, trajectories: Trajectories) -> np.ndarray:
        """Marks rows that do not continue their environment's last row, bool (B,).

        Compared are the rows that this collector has had.
        """
        numbers = trajectories.trajectories.first_steps
        if numbers is None:
            return np.zeros(len(trajectories), bool)
        envs, firsts = trajectories.info["env_index"].tolist(), numbers.tolist()
        gaps = [self._following.get(env) != first for env, first in zip(envs, firsts, strict=True)]
        self._following |= {
            env: first + n for env, first, n in zip(envs, firsts, trajectories.lengths.tolist(), strict=True)
        }
        return np.array(gaps, bool)

    def _number(self, starts: np.ndarray, envs: list[int]) -> np.ndarray:
        """Returns the number of the episode of each step, int64 (B, T).

        `starts`, bool (B, T), marks where one starts.
        """
        counts, n_new = starts.cumsum(1), starts.sum(1)
        last = self._n_episodes - 1 + n_new.cumsum()
        before = np.array([self._episodes.get(env, -1) for env in envs], np.int64)
        self._n_episodes += int(n_new.sum())
        self._episodes |= {env: int(last[row]) for row, env in enumerate(envs) if n_new[row]}
        return np.where(counts == 0, before[:, None], (last - n_new)[:, None] + counts)


def name_columns(steps: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The columns of a rollout under torchrl's names, joined with `/`.

    Raises:
        SpecError: two get the same name.
    """
    found: dict[str, torch.Tensor] = {}
    for key, tensor in steps.items():
        place, _, name = key.partition("/")
        if any(name == left or name.startswith(f"{left}/") for left in LEFT_OUT.get(place, ())):
            continue
        is_signal = place != "action" and name in SIGNALS
        name = PLACES[place] + (name if place == "action" else NAMES.get(name, name))
        if name in found or name in (MASK, TRAJ_IDS):
            other = "another key does, too" if name in found else "the collector has one of that name"
            raise SpecError(f"{key!r} of the trajectories becomes {name!r} in a TensorDict, and {other}")
        found[name] = tensor[..., None] if is_signal else tensor
    if LOG_PROB in found and f"action/{LOG_PROB}" in steps:
        found.setdefault(ACTION_LOG_PROB, found[LOG_PROB])
    return found
