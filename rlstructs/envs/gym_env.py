"""`GymEnv` and `GymEnvInf`: a list of gymnasium environments as one vectorised environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch

from rlstructs.checks import other_words
from rlstructs.envs.env_infos import InfoColumns, InfoKeys
from rlstructs.envs.env_list import EnvList, LivesRule
from rlstructs.envs.gym_envs import check_envs, check_new, find_observation_space
from rlstructs.envs.observation_columns import FLAGS, RowLayout
from rlstructs.envs.row_env import NO_ROWS, RowDefaults, Step, check_running, split_options, step_pairs
from rlstructs.envs.spaces import copy_sample, example_value, nest
from rlstructs.envs.stepping import Episode, LoggedEnv, SingleEnv, reward_array
from rlstructs.envs.vec_env import NO_INFO
from rlstructs.seeding import environment_seeds
from rlstructs.shared.layout import Rows, Target
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.trace import lane as lanes
from rlstructs.workers.public_names import set_module


@set_module("rlstructs")
class GymEnv(RowDefaults, EnvList):
    """gymnasium environments, stepped one after another; one that ends leaves the running set.

    An observation holds, with B rows:

    - `frame`, or a key for each entry of a Dict or Tuple space: dtype and shape of the space, except
      that float64 becomes float32; a Discrete one is int64 (B, 1). What an environment returns beyond the
      entries of its space is left out;
    - `reward`: float32 (B,), the reward of the step that led here, 0 at a reset;
    - `terminated`, `truncated`, `done` (either of the two): bool (B,), False at a reset;
    - `initial_state`: bool (B,), True at a reset;
    - `last_action`: the action that led here, 0 at a reset; `last_action/<key>` for structured ones;
    - `info/<key>` for each of `info_keys`, (B,): its value in the info of the step or reset that led here; where the
      info lacks it, NaN, or 0 or False in columns that are not floating-point.

    Args:
        envs: gymnasium environments of equal spaces. If none has an `observation_space`, the first one is reset to see
            the dtype and shape of its observations, which have to be arrays.
        seed: environment k gets `seed + k`, or a stream of its own when the seed comes from
            `RL_Batcher(seeds=int)`; or a sequence with a seed for each. Used at the first reset only: later
            episodes continue the stream.
        keep_float64: keep float64 observations and actions, rather than turn them into float32.
        info_keys: which numbers of the infos are recorded, such as `("is_success",)`, as float32; or a mapping from
            keys to dtypes, `{"is_success": bool}`. `"a/b"` is entry `b` of the info `a`.
        episode_seeds: give every reset a seed, of a stream for each environment, and keep the actions of the running
            episodes, up to a million of each. An exact state of a batcher can then bring back environments that cannot
            be pickled, by playing the running episode again. It needs environments in which a reset with a seed leaves
            nothing of what was before.
        clip_actions: give environments the actions of a Box clipped to its bounds; rollouts keep them as they were
            drawn, as log-probabilities need them.

    Raises:
        TypeError: `envs` are not gymnasium environments.
        SpecError: none are given, one is given twice, spaces differ, or one is missing or not supported.

    Example:
        >>> import gymnasium
        >>> env = GymEnv([gymnasium.make("CartPole-v1") for _ in range(2)], seed=0)
        >>> observation, running = env.reset()
        >>> observation["frame"].shape, running.tolist()
        (torch.Size([2, 4]), [0, 1])
        >>> (after, _), (following, running) = env.step(DictTensor({"action": torch.tensor([0, 1])}))
        >>> after["reward"], running.tolist()
        (tensor([1., 1.]), [0, 1])
        >>> env.close()
    """

    _autoreset = False
    defers_resets = False

    @other_words(seeds="seed")
    def __init__(
        self,
        envs: Sequence[gymnasium.Env[Any, Any]],
        seed: int | Sequence[int],
        *,
        keep_float64: bool = False,
        info_keys: InfoKeys = (),
        episode_seeds: bool = False,
        clip_actions: bool = False,
    ) -> None:
        envs = check_envs(envs)
        self._infos = InfoColumns(info_keys)
        self._takes_infos = self._takes_all_infos = bool(self._infos)
        self._seeds: list[int] | None = environment_seeds(seed, len(envs))
        self._set_envs(envs, self._seeds)
        self.observation_space = find_observation_space(envs[0], self._seeds[0])
        self.action_space = envs[0].action_space
        # Whether every reset gets a seed, and the running episodes are kept.
        self._has_episode_seeds = episode_seeds
        self._episodes: list[Episode | None] = [None] * len(envs)
        for env, value in zip(envs, self._seeds, strict=True):
            env.action_space.seed(value)
        layout = RowLayout(self.observation_space, self.action_space, keep_float64, self._infos, clip_actions)
        self._leaves, self._actions, self._last_actions = layout.leaves, layout.actions, layout.last_actions
        self._after, self._fresh = layout.allocate(len(envs))
        # Indexes of the running environments, None before the first reset; and the environments, as they are stepped.
        self._running: np.ndarray | None = None
        self._running_envs: list[Any] = []
        self._options: list[dict[str, Any] | None] = [None] * len(envs)
        # Of the last step: the rows whose episodes ended; the first observations of those that were reset; the newest
        # final observation, with its reward; and the rows that failed: whether in the reset that followed.
        self._ended, self._shown, self._final = list[int](), list[Any](), (None, None)
        self._gone: dict[int, bool] = {}
        self._failed = list[int]()  # have failed and not begun an episode since

    def n_envs(self) -> int:
        """Number of environments, E."""
        return len(self._envs)

    def single_envs(self) -> Sequence[SingleEnv]:
        return list(map(SingleEnv, self._envs, self._episodes))

    def example(self) -> Rows:
        """First observations as `reset` would return them, made from the spaces alone."""
        return self._fresh.example()

    def reset(self, env_info: DictTensor = NO_INFO) -> tuple[DictTensor, torch.Tensor]:
        """Starts an episode in every environment.

        Args:
            env_info: E rows, or empty. Row k, as `{key: number or list}`, becomes the `options` of
                environment k's resets, now and whenever it resets itself.
        """
        return self.reset_rows(env_info).tensors(), torch.arange(len(self._envs), device="cpu")

    def step(self, action: DictTensor) -> tuple[tuple[DictTensor, torch.Tensor], tuple[DictTensor, torch.Tensor]]:
        """Steps the running environments; see `VecEnv.step`.

        Args:
            action: `action`, or `action/<key>` for a structured space; one row for each running environment.

        Raises:
            StateError: no environment runs.
            MissingKeyError, SpecError: the action does not fit the action space.
        """
        running = torch.from_numpy(check_running(self._running).copy())
        return step_pairs(self.step_rows(action), running)

    def reset_rows(self, env_info: DictTensor) -> Rows:
        """Resets, and returns the observation as rows that nobody else uses."""
        self._options = split_options(env_info, len(self._envs))
        seeds, episodes = self._seeds, list(self._episodes)
        try:
            frames = self._begin_episodes(range(len(self._envs)), seeds)
        except BaseException:
            self._episodes = episodes  # a reset after an interrupted one needs the same seeds
            raise
        self._seeds = None
        self._new_seeds, self._failed = {}, []
        self._set_running(np.arange(len(self._envs)))
        return self._fresh.fill(frames).take(np.arange(len(self._envs)))

    def revive_rows(self, which: np.ndarray | None = None) -> tuple[np.ndarray, Rows]:
        """Starts an episode in environments that do not run; see `RowEnv.revive_rows`."""
        assert self._running is not None
        if which is None:
            which = np.setdiff1d(np.arange(len(self._envs)), self._running)
        fresh = self._begin_episodes(which.tolist())
        for k in which.tolist():
            self._new_seeds.pop(k, None)
        self._failed = [k for k in self._failed if k not in which]
        self._set_running(np.union1d(self._running, which))
        return which, self._fresh.fill(fresh, which).take(np.arange(which.size))

    @property
    def failed_rows(self) -> np.ndarray:
        return np.array(sorted(self._failed), np.int64)

    def set_lives(self, rule: LivesRule | None) -> None:
        self._lives.set_rule(rule)

    def take_restarts(self) -> dict[int, int]:
        return self._lives.take_counts()

    def step_rows(self, action: DictTensor, target: Target | None = None) -> Step:
        """Steps, and returns rows of its own that stay valid until the next step."""
        running, envs = check_running(self._running), self._running_envs
        actions, action_columns = self._actions.read(action, running.size)
        if self._ended or self._gone:
            self._forget_ends()
        if self._has_episode_seeds:
            episodes = [self._episodes[k] for k in running.tolist()]
            envs = [LoggedEnv(env, episode, self._copy) for env, episode in zip(envs, episodes, strict=True)]
        self._lives.n_steps += 1
        if lanes.current is not None and lanes.is_timed(self._lives.n_steps):
            envs = lanes.current.time_envs(envs, running.tolist())
        rewards: list[Any] = [None] * running.size
        return self._fill_step(self._step_envs(envs, actions, rewards), rewards, action_columns, running)

    def _forget_ends(self) -> None:
        """Forgets the ends and failures of the last step."""
        for row in self._ended:
            for flag in FLAGS:
                self._after.view[flag][row] = False
        self._ended, self._shown, self._gone = [], [], {}

    def _fill_step(
        self, frames: list[Any], rewards: list[Any], action_columns: dict[str, np.ndarray], running: np.ndarray
    ) -> Step:
        """Fills the rows of a step.

        Args:
            frames, rewards: what each environment returned.
            action_columns: the actions that led there.
            running: the environments that it has stepped.
        """
        after, view = self._after.fill(frames, running), self._after.view
        view["reward"][: running.size] = reward_array(rewards, running)
        for key, leaf in self._last_actions.items():
            view[key][: running.size] = action_columns[leaf.key]
        return self._end_step(after, running) if self._ended or self._gone else Step(after, NO_ROWS, None, None)

    def _end_step(self, after: Rows, running: np.ndarray) -> Step:
        """Ends a step in which episodes ended or environments failed.

        Keeps those that run, and fills the fresh rows.

        Args:
            after: the rows after it.
            running: the environments that it has stepped.
        """
        rows, gone = np.array(self._ended, np.int64), self._gone
        if not gone:  # as nearly always
            if self._autoreset:
                return Step(after, rows, self._fresh.fill(self._shown, rows), None)
            leaving, failed, first = rows, NO_ROWS, None
        else:
            failed = np.array([row for row, in_reset in gone.items() if not in_reset], np.int64)
            unreset = np.array([row for row, in_reset in gone.items() if in_reset], np.int64)
            leaving = np.concatenate([failed, unreset if self._autoreset else rows])
            rows = np.setdiff1d(rows, unreset)
            first = self._fresh.fill(self._shown, rows) if self._autoreset and rows.size else None
        kept = np.delete(np.arange(running.size), leaving)
        self._stop(running, kept)
        return Step(after, rows if self._autoreset else NO_ROWS, first, kept, failed=failed)

    def _stop(self, running: np.ndarray, kept: np.ndarray) -> None:
        """Takes all but the `kept` rows of these environments from those that run."""
        self._set_running(running[kept])

    def _set_running(self, running: np.ndarray) -> None:
        self._running, self._running_envs = running, [self._envs[k] for k in running.tolist()]

    def _find_index(self, row: int) -> int:
        assert self._running is not None
        return int(self._running[row])

    def _keep(self, row: int, observation: Any) -> Any:
        return self._copy(observation)

    def _take_info(self, row: int, info: Any) -> None:
        if self._infos:
            self._infos.write(self._after.view, row, info, self._find_index(row))

    def _end(self, row: int, observation: Any, reward: Any, terminated: bool, truncated: bool, info: Any) -> Any:
        if self._infos:
            self._take_info(row, info)
        self._final = self._copy(observation), reward  # before a reset writes into it
        self._ended.append(row)
        view = self._after.view
        view["done"][row], view["terminated"][row], view["truncated"][row] = True, terminated, truncated
        if self._autoreset:
            self._shown.append(self._copy(self._start_episode(self._find_index(row), None, len(self._shown))))
        return self._final[0]

    def _fail(self, row: int, k: int, error: Exception) -> tuple[Any, Any]:
        self._gone[row] = in_reset = self._ended[-1:] == [row]
        self._replace(k, error, in_reset)
        blank = nest(self.observation_space, (example_value(leaf) for leaf in self._leaves.values()))
        return self._final if in_reset else (blank, 0.0)

    def _check_new(self, env: Any, k: int) -> None:
        check_new(env, k, self._envs)

    def _replace(self, k: int, error: Exception, in_reset: bool) -> None:
        super()._replace(k, error, in_reset)
        self._envs[k].action_space.seed(self._stream_seeds[k])
        self._episodes[k] = None
        self._failed.append(k)

    def _begin_episodes(self, which: Sequence[int], seeds: Sequence[int] | None = None) -> list[Any]:
        """Resets these environments, with these seeds, if any; returns copies of their observations."""
        return [self._begin_episode(k, None if seeds is None else seeds[k], row) for row, k in enumerate(which)]

    def _begin_episode(self, k: int, seed: int | None, row: int) -> Any:
        """Resets environment k; returns a copy of its observation.

        Makes it anew if it fails.
        """
        return self._copy(self._begin(k, self._start_episode, seed, row)[0])

    def _start_episode(self, k: int, seed: int | None, row: int) -> Any:
        """Resets environment k, and returns its observation.

        Writes its info to a row of the fresh rows.
        """
        episode, seed = None, self._new_seeds.get(k, seed)
        if self._has_episode_seeds:
            episode = Episode.after(self._episodes[k], self._stream_seeds[k], self._options[k])
            seed = episode.seed
        observation, info = self._reset_one(k, seed, self._options[k])
        if self._infos:
            self._infos.write(self._fresh.view, row, info, k)
        if episode is not None:
            episode.last = self._copy(observation), None
            self._episodes[k] = episode
        return observation

    def _copy(self, observation: Any) -> Any:
        return copy_observation(self.observation_space, observation)


def copy_observation(space: gymnasium.Space[Any], observation: Any) -> Any:
    """Copies the entries of the space: the environment may write into the observation again."""
    if isinstance(observation, np.ndarray):
        return observation.copy()
    return copy_sample(space, observation)


@set_module("rlstructs")
class GymEnvInf(GymEnv):
    """A `GymEnv` whose environments reset themselves when an episode ends.

    They reset in the same step, so that all always run. Of a step that ended an episode, the first pair holds the true
    final observation, with its reward and flags; the second pair, which the agent sees next, holds the first
    observation of the new episode.

    Args:
        defer_resets: for resets that take long. An environment that ends within a rollout of `RL_Batcher` leaves the
            running set, so that the others do not wait for its reset; its slot is shorter, as `lengths` tells. It
            is reset when the next rollout begins, and runs again in that. Below `DeviceEnv`, or a wrapper of your
            own, it does not run until `reset`, as with `GymEnv`.

    Other arguments are those of `GymEnv`.

    Example:
        >>> import gymnasium
        >>> env = GymEnvInf([gymnasium.make("CartPole-v1", max_episode_steps=1)], seed=0)
        >>> _ = env.reset()
        >>> (after, _), (following, _) = env.step(DictTensor({"action": torch.tensor([0])}))
        >>> after["truncated"].item(), following["truncated"].item(), following["initial_state"].item()
        (True, False, True)
    """

    @other_words(seeds="seed")
    def __init__(
        self,
        envs: Sequence[gymnasium.Env[Any, Any]],
        seed: int | Sequence[int],
        *,
        keep_float64: bool = False,
        defer_resets: bool = False,
        info_keys: InfoKeys = (),
        episode_seeds: bool = False,
        clip_actions: bool = False,
    ) -> None:
        super().__init__(
            envs,
            seed,
            keep_float64=keep_float64,
            info_keys=info_keys,
            episode_seeds=episode_seeds,
            clip_actions=clip_actions,
        )
        if not isinstance(defer_resets, bool):
            raise TypeError(f"defer_resets must be a bool, got {defer_resets!r}")
        self._autoreset, self.defers_resets = not defer_resets, defer_resets
