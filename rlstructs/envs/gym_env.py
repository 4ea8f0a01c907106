"""`GymEnv` and `GymEnvInf`: a list of gymnasium environments as one vectorised environment."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch

from rlstructs.envs.spaces import ActionReader, Column, example, leaves
from rlstructs.envs.vec_env import NO_ROWS, Arrays, Step
from rlstructs.errors import SpecError, StateError
from rlstructs.seeding import environment_seeds
from rlstructs.structures.dict_tensor import DictTensor

# Keys that every observation has, beside those of the environment's own observation space.
FLAGS = ("done", "terminated", "truncated", "initial_state")
RESERVED = ("reward", *FLAGS, "last_action")
NO_INFO = DictTensor()


class GymEnv:
    """gymnasium environments, stepped one after another; one that ends leaves the running set.

    An observation holds, with B rows:

    - `frame`, or a key for each entry of a Dict or Tuple space: dtype and shape of the space, except
      that float64 becomes float32; a Discrete one is int64 (B, 1);
    - `reward`: float32 (B,), the reward of the step that led here, 0 at a reset;
    - `terminated`, `truncated`, `done` (either of the two): bool (B,), False at a reset;
    - `initial_state`: bool (B,), True at a reset;
    - `last_action`: the action that led here, 0 at a reset; `last_action/<key>` for structured ones.

    Args:
        envs: gymnasium environments of equal spaces.
        seed: environment k gets `seed + k`, or, when the seed comes from `RL_Batcher(seeds=int)`, a
            stream of its own; or a sequence with a seed for each. Used at the first reset only: later
            episodes continue the stream.
        keep_float64: do not turn float64 observations into float32.

    Raises:
        TypeError: `envs` are not gymnasium environments.
        SpecError: none are given, a space is not supported, or spaces differ.

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

    _autoreset: ClassVar[bool] = False

    def __init__(
        self, envs: Sequence[gymnasium.Env[Any, Any]], seed: int | Sequence[int], *, keep_float64: bool = False
    ) -> None:
        self._envs = _checked(envs)
        self.observation_space = self._envs[0].observation_space
        self.action_space = self._envs[0].action_space
        self._seeds: list[int] | None = environment_seeds(seed, len(self._envs))
        for env, value in zip(self._envs, self._seeds, strict=True):
            env.action_space.seed(value)
        n = len(self._envs)
        self._columns = {
            leaf.key or "frame": Column(leaf, n)
            for leaf in leaves(self.observation_space, "observation", keep_float64)
        }
        self._actions = ActionReader(self.action_space, n)
        _refuse_reserved(self._columns)
        self._after: Arrays = {key: column.array for key, column in self._columns.items()}
        self._after["reward"] = np.zeros(n, np.float32)
        self._after.update({flag: np.zeros(n, bool) for flag in FLAGS})
        self._last_actions = {f"last_{ActionReader.key(leaf)}": leaf for leaf in self._actions.leaves}
        for key, leaf in self._last_actions.items():
            dtype = np.float32 if leaf.dtype == np.float64 else leaf.dtype
            self._after[key] = np.zeros((n, *leaf.shape), dtype)
        self._running: np.ndarray | None = None
        self._options: list[dict[str, Any] | None] = [None] * n
        self._flagged: list[int] = []

    def n_envs(self) -> int:
        """Number of environments, E."""
        return len(self._envs)

    def example(self) -> Arrays:
        """A first observation such as `reset` gives, made of the spaces alone."""
        frames = {
            key: np.stack([example(column.leaf)] * len(self._envs)).reshape(column.array.shape)
            for key, column in self._columns.items()
        }
        return self._at_reset(frames)

    def reset(self, env_info: DictTensor = NO_INFO) -> tuple[DictTensor, torch.Tensor]:
        """Starts an episode in every environment.

        Args:
            env_info: E rows, or empty. Row k, as `{key: number or list}`, is the `options` of
                environment k's reset, here and wherever it resets itself.
        """
        return _tensors(self.reset_arrays(env_info)), torch.arange(len(self._envs))

    def step(
        self, action: DictTensor
    ) -> tuple[tuple[DictTensor, torch.Tensor], tuple[DictTensor, torch.Tensor]]:
        """Steps the running environments; see `VecEnv.step`.

        Args:
            action: `action`, or `action/<key>` for a structured space, one row for each that runs.

        Raises:
            StateError: none runs.
            MissingKeyError, SpecError: the action is not what the action space needs.
        """
        before = torch.from_numpy(self._check_running().copy())
        step = self.step_arrays(action)
        after = _tensors(step.after)
        following, kept = after, before
        if step.reset.size:
            following = after.clone()
            for key, rows in step.fresh.items():
                following[key][torch.from_numpy(step.reset)] = torch.from_numpy(rows)
        if step.kept is not None:
            rows = torch.from_numpy(step.kept)
            following, kept = after.index(rows), before[rows]
        return (after, before), (following, kept)

    def reset_arrays(self, env_info: DictTensor) -> Arrays:
        """As `reset`, the observation as arrays of its own."""
        self._options = _options(env_info, len(self._envs))
        seeds, self._seeds = self._seeds, None
        frames = [
            _copied(self._reset_one(k, None if seeds is None else seeds[k])) for k in range(len(self._envs))
        ]
        self._running = np.arange(len(self._envs))
        return self._at_reset({key: column.rows(frames) for key, column in self._columns.items()})

    def step_arrays(self, action: DictTensor) -> Step:
        """As `step`, in arrays that stay valid until the next one."""
        running = self._check_running()
        actions, action_columns = self._actions.read(action, running.size)
        frames, rewards, ended, fresh = [], [], [], []
        for row, k in enumerate(running.tolist()):
            frame, reward, terminated, truncated, _ = self._envs[k].step(actions[row])
            rewards.append(reward)
            if terminated or truncated:
                ended.append((row, bool(terminated), bool(truncated)))
                frame = _copied(frame)  # before a reset writes into the same array
                if self._autoreset:
                    fresh.append(self._reset_one(k, None))
            frames.append(frame)
        after = self._write(frames, rewards, ended, action_columns)
        rows = np.array([row for row, _, _ in ended], np.int64) if ended else NO_ROWS
        if self._autoreset:
            return Step(after, rows, self._fresh(fresh) if fresh else {}, None)
        kept = np.delete(np.arange(running.size), rows) if ended else None
        if kept is not None:
            self._running = running[kept]
        return Step(after, NO_ROWS, {}, kept)

    def close(self) -> None:
        """Closes every environment, also when one of them raises; then raises what the first did."""
        errors = []
        for env in self._envs:
            try:
                env.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _check_running(self) -> np.ndarray:
        if self._running is None:
            raise StateError("step: call reset first")
        if not self._running.size:
            raise StateError("step: every environment has ended, call reset")
        return self._running

    def _reset_one(self, k: int, seed: int | None) -> Any:
        options = self._options[k]
        arguments: dict[str, Any] = {} if seed is None else {"seed": seed}
        if options is not None:
            arguments["options"] = dict(options)
        return self._envs[k].reset(**arguments)[0]

    def _write(
        self, frames: list[Any], rewards: list[Any], ended: list[tuple[int, bool, bool]], actions: Arrays
    ) -> Arrays:
        n, after = len(frames), self._after
        for column in self._columns.values():
            column.fill(frames)
        try:
            after["reward"][:n] = rewards
        except (TypeError, ValueError) as error:
            raise SpecError(f"reward must be a number for each environment, got {rewards}") from error
        for row in self._flagged:
            for flag in FLAGS:
                after[flag][row] = False
        self._flagged = [row for row, _, _ in ended]
        for row, terminated, truncated in ended:
            after["done"][row] = True
            after["terminated"][row], after["truncated"][row] = terminated, truncated
        for key, leaf in self._last_actions.items():
            after[key][:n] = actions[leaf.key]
        return after if n == len(self._envs) else {key: array[:n] for key, array in after.items()}

    def _fresh(self, frames: list[Any]) -> Arrays:
        return self._at_reset({key: column.rows(frames) for key, column in self._columns.items()})

    def _at_reset(self, frames: Arrays) -> Arrays:
        """The observation of environments that have just been reset, in the order of the keys."""
        n = len(next(iter(frames.values())))
        rest = {
            key: np.zeros((n, *array.shape[1:]), array.dtype)
            for key, array in self._after.items()
            if key not in frames
        }
        rest["initial_state"][:] = True
        return {**frames, **rest}


class GymEnvInf(GymEnv):
    """As `GymEnv`, but an environment that ends resets itself in the same step, and all always run.

    Of a step that ended an episode, the first pair holds the true final observation, with its reward
    and flags; the second pair, which the agent sees next, the first observation of the new episode.

    Example:
        >>> import gymnasium
        >>> env = GymEnvInf([gymnasium.make("CartPole-v1", max_episode_steps=1)], seed=0)
        >>> _ = env.reset()
        >>> (after, _), (following, _) = env.step(DictTensor({"action": torch.tensor([0])}))
        >>> after["truncated"].item(), following["truncated"].item(), following["initial_state"].item()
        (True, False, True)
    """

    _autoreset = True


def _checked(envs: Sequence[gymnasium.Env[Any, Any]]) -> list[gymnasium.Env[Any, Any]]:
    envs = list(envs)
    if not envs:
        raise SpecError("envs: needs at least one environment, got none")
    for k, env in enumerate(envs):
        if not isinstance(env, gymnasium.Env):
            raise TypeError(f"envs: number {k} must be a gymnasium.Env, got {type(env).__name__}")
        for name in ("observation_space", "action_space"):
            if getattr(env, name) != getattr(envs[0], name):
                raise SpecError(
                    f"envs: {name} of number {k} is {getattr(env, name)}, of number 0 {getattr(envs[0], name)}"
                )
    return envs


def _refuse_reserved(keys: Any) -> None:
    for key in keys:
        if key.split("/")[0] in RESERVED:
            raise SpecError(f"observation: an entry may not be called {key!r}; reserved are {RESERVED}")


def _options(env_info: DictTensor, n_envs: int) -> list[dict[str, Any] | None]:
    if env_info.empty():
        return [None] * n_envs
    if env_info.n_elems() != n_envs:
        raise SpecError(f"env_info: has {env_info.n_elems()} rows, expected {n_envs}")
    columns = {key: tensor.tolist() for key, tensor in env_info.items()}
    return [{key: values[k] for key, values in columns.items()} for k in range(n_envs)]


def _copied(observation: Any) -> Any:
    return observation.copy() if isinstance(observation, np.ndarray) else copy.deepcopy(observation)


def _tensors(arrays: Arrays) -> DictTensor:
    return DictTensor.trusted({key: torch.from_numpy(np.array(array)) for key, array in arrays.items()})
