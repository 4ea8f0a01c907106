"""`GymEnv` and `GymEnvInf`: a list of gymnasium environments as one vectorised environment."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch

from rlstructs.checks import other_words
from rlstructs.envs.array_values import copy_value, may_share_memory
from rlstructs.envs.env_infos import InfoColumns, InfoKeys
from rlstructs.envs.env_lives import EnvLives, LivesRule
from rlstructs.envs.gym_envs import check_envs, check_new, find_observation_space
from rlstructs.envs.observation_columns import FLAGS, RowLayout
from rlstructs.envs.row_env import NO_ROWS, RowDefaults, Step, check_running, split_options, step_pairs
from rlstructs.envs.spaces import copy_sample, example_value, nest
from rlstructs.envs.stepping import (
    NO_RESULT,
    Episode,
    SingleEnv,
    add_origin,
    explain_step_error,
    read_reset,
    reward_array,
)
from rlstructs.envs.vec_env import NO_INFO
from rlstructs.seeding import environment_seeds, next_stream
from rlstructs.shared.packing import Rows, Target
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.workers.public_names import set_module


@set_module("rlstructs")
class GymEnv(RowDefaults):
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
        self._envs = check_envs(envs)
        self._infos = InfoColumns(info_keys)
        self._seeds: list[int] | None = environment_seeds(seed, len(self._envs))
        self.observation_space = find_observation_space(self._envs[0], self._seeds[0])
        self.action_space = self._envs[0].action_space
        # The seeds of the streams; those of environments that were made anew and not yet reset; and whether every reset
        # gets one, with the running episodes.
        self._stream_seeds, self._new_seeds = list(self._seeds), dict[int, int]()
        self._has_episode_seeds = episode_seeds
        self._episodes: list[Episode | None] = [None] * len(self._envs)
        for env, value in zip(self._envs, self._seeds, strict=True):
            env.action_space.seed(value)
        layout = RowLayout(self.observation_space, self.action_space, keep_float64, self._infos, clip_actions)
        self._leaves, self._actions, self._last_actions = layout.leaves, layout.actions, layout.last_actions
        self._after, self._fresh = layout.allocate(len(self._envs))
        # Indexes of the running environments, None before the first reset; and the environments themselves.
        self._running: np.ndarray | None = None
        self._running_envs: list[gymnasium.Env[Any, Any]] = []
        self._options: list[dict[str, Any] | None] = [None] * len(self._envs)
        self._flagged_rows: list[int] = []
        # False until a step has shown that no two environments write observations into the same memory.
        self._have_own_memory = False
        # How often each was made anew; and those that have failed and have not begun an episode since.
        self._lives, self._failed = EnvLives(len(self._envs)), list[int]()

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
            frames = [
                self._copy(self._begin_one(k, None if seeds is None else seeds[k], k)) for k in range(len(self._envs))
            ]
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
        fresh = [self._copy(self._begin_one(k, None, row)) for row, k in enumerate(which.tolist())]
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
        running = check_running(self._running)
        actions, action_columns = self._actions.read(action, running.size)
        frames, rewards, ended, uncopied = [], [], [], []
        fresh: list[Any] = []
        have_own_memory, infos, logs = self._have_own_memory, self._infos or None, self._has_episode_seeds
        row, result = 0, NO_RESULT
        gone: dict[int, bool] = {}  # whether the environment of a row has failed in the reset after the step
        self._lives.n_steps += 1
        steps = enumerate(zip(self._running_envs, actions, strict=True))
        while True:  # more than once only where an environment fails: the others are stepped all the same
            try:
                for row, (env, env_action) in steps:
                    result = env.step(copy.deepcopy(env_action) if logs else env_action)
                    frame, reward, terminated, truncated, info = result
                    if logs:
                        self._log(int(running[row]), env_action, frame, reward)
                    if infos is not None:  # before a reset changes it
                        infos.write(self._after.view, row, info, int(running[row]))
                    if not have_own_memory:  # another environment may write into the same array
                        uncopied.append((frame, reward))
                        frame, reward = self._copy(frame), copy_value(reward)
                    if terminated or truncated:
                        ended.append((row, bool(terminated), bool(truncated)))
                        frame, reward = self._copy(frame), copy_value(reward)  # before a reset writes into them
                        if self._autoreset:
                            fresh.append(self._copy(self._reset_one(int(running[row]), None, len(fresh))))
                    frames.append(frame)
                    rewards.append(reward)
                break
            except Exception as error:
                in_reset = bool(ended) and ended[-1][0] == row
                self._explain_and_replace(int(running[row]), error, result, in_reset)
                gone[row] = in_reset
                frames.append(frame if in_reset else self._make_blank())
                rewards.append(reward if in_reset else 0.0)
        after = self._write(frames, running, rewards, ended, action_columns)
        if not have_own_memory:
            self._have_own_memory = not gone and self._find_own_memory(uncopied)
        return self._end_step(after, running, ended, fresh, gone) if ended or gone else Step(after, NO_ROWS, None, None)

    def _end_step(
        self,
        after: Rows,
        running: np.ndarray,
        ended: list[tuple[int, bool, bool]],
        fresh: list[Any],
        gone: dict[int, bool],
    ) -> Step:
        """Ends a step in which episodes ended or environments failed: keeps those that run, and fills the fresh rows.

        Args:
            after: the rows after it.
            running: the environments that it has stepped.
            ended: the rows whose episodes ended, with their flags.
            fresh: first observations of those that were reset.
            gone: rows of environments that failed: whether in the reset that followed, not in the step.
        """
        rows = np.array([row for row, _, _ in ended], np.int64)
        if not gone:  # as nearly always
            if self._autoreset:
                return Step(after, rows, self._fresh.fill(fresh, rows), None)
            leaving, failed, first = rows, NO_ROWS, None
        else:
            failed = np.array([row for row, in_reset in gone.items() if not in_reset], np.int64)
            unreset = np.array([row for row, in_reset in gone.items() if in_reset], np.int64)
            leaving = np.concatenate([failed, unreset if self._autoreset else rows])
            rows = np.setdiff1d(rows, unreset)
            first = self._fresh.fill(fresh, rows) if self._autoreset and rows.size else None
        kept = np.delete(np.arange(running.size), leaving)
        self._set_running(running[kept])
        return Step(after, rows if self._autoreset else NO_ROWS, first, kept, failed=failed)

    def close(self) -> None:
        """Closes every environment, even if some raise; then raises the first error."""
        errors = []
        for k, env in enumerate(self._envs):
            try:
                env.close()
            except Exception as error:
                add_origin(error, "close", env, k)
                errors.append(error)
        if errors:
            raise errors[0]

    def _set_running(self, running: np.ndarray) -> None:
        self._running, self._running_envs = running, [self._envs[k] for k in running.tolist()]

    def _find_own_memory(self, results: list[tuple[Any, Any]]) -> bool:
        """Whether these observations and rewards, one pair for each environment, share no memory."""
        frames, rewards = zip(*results, strict=True)
        return not may_share_memory(rewards) and not any(
            may_share_memory(map(leaf.pick, frames)) for leaf in self._leaves.values()
        )

    def _begin_one(self, k: int, seed: int | None, row: int) -> Any:
        """Resets an environment, which is made anew if it fails."""
        while True:
            try:
                return self._reset_one(k, seed, row)
            except Exception as error:
                self._replace(k, error, in_reset=True)

    def _explain_and_replace(self, k: int, error: Exception, result: Any, in_reset: bool) -> None:
        """Makes environment k anew that has failed in a step, or in the reset after it; see `explain_step_error`."""
        explain_step_error(error, result, self._envs[k], k, self._lives.name_step(k))
        self._replace(k, error, in_reset)

    def _replace(self, k: int, error: Exception, in_reset: bool) -> None:
        """Makes environment k, which has raised this error, anew; raises an error if that is not wanted."""
        env = self._lives.replace(k, self._envs[k], error, in_reset)
        check_new(env, k, self._envs)
        seed = next_stream(self._stream_seeds[k], self._lives.counts[k])
        env.action_space.seed(seed)
        self._envs[k], self._episodes[k], self._have_own_memory = env, None, False
        self._stream_seeds[k] = self._new_seeds[k] = seed
        self._failed.append(k)

    def _make_blank(self) -> Any:
        """An observation that stands for one that an environment has failed to give."""
        return nest(self.observation_space, (example_value(leaf) for leaf in self._leaves.values()))

    def _reset_one(self, k: int, seed: int | None, row: int) -> Any:
        """Resets environment k, writes its info to a row of the fresh ones, and returns its observation."""
        options, seed = self._options[k], self._new_seeds.get(k, seed)
        episode = None
        if self._has_episode_seeds:
            episode = Episode.after(self._episodes[k], self._stream_seeds[k], options)
            seed = episode.seed
        arguments: dict[str, Any] = {} if seed is None else {"seed": seed}
        if options is not None:
            arguments["options"] = copy.deepcopy(options)  # the environment may change them
        try:
            result = self._envs[k].reset(**arguments)
        except Exception as error:
            add_origin(error, "reset", self._envs[k], k)
            raise
        observation, info = read_reset(result, self._envs[k], k)
        self._lives.begin_episode(k)
        if self._infos:
            self._infos.write(self._fresh.view, row, info, k)
        if episode is not None:
            episode.last = self._copy(observation), None
            self._episodes[k] = episode
        return observation

    def _log(self, k: int, action: Any, frame: Any, reward: Any) -> None:
        """Adds a step to the running episode of environment k."""
        episode = self._episodes[k]
        assert episode is not None
        episode.actions.append(action)
        episode.last = self._copy(frame), copy_value(reward)

    def _copy(self, observation: Any) -> Any:
        """Copies the entries of the space: the environment may write into the observation again."""
        if isinstance(observation, np.ndarray):
            return observation.copy()
        return copy_sample(self.observation_space, observation)

    def _write(
        self,
        frames: list[Any],
        running: np.ndarray,
        rewards: list[Any],
        ended: list[tuple[int, bool, bool]],
        actions: dict[str, np.ndarray],
    ) -> Rows:
        after, view, n = self._after.fill(frames, running), self._after.view, len(frames)
        view["reward"][:n] = reward_array(rewards, running)
        for row in self._flagged_rows:
            for flag in FLAGS:
                view[flag][row] = False
        self._flagged_rows = [row for row, _, _ in ended]
        for row, terminated, truncated in ended:
            view["done"][row] = True
            view["terminated"][row], view["truncated"][row] = terminated, truncated
        for key, leaf in self._last_actions.items():
            view[key][:n] = actions[leaf.key]
        return after


@set_module("rlstructs")
class GymEnvInf(GymEnv):
    """A `GymEnv` whose environments reset themselves in the step that ends an episode, so that all always run.

    Of a step that ended an episode, the first pair holds the true final observation, with its reward
    and flags; the second pair, which the agent sees next, holds the first observation of the new episode.

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
