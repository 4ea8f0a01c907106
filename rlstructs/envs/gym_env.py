"""`GymEnv` and `GymEnvInf`: a list of gymnasium environments as one vectorised environment."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch

from rlstructs.envs.action_reader import ActionReader
from rlstructs.envs.answers import NONE_YET, add_origin, blame_step, checked_reset
from rlstructs.envs.info_columns import PREFIX, InfoColumns, InfoKeys
from rlstructs.envs.observation_columns import Sheet
from rlstructs.envs.parts import are_equal, copy_parts
from rlstructs.envs.row_env import NO_ROWS, Step, pairs
from rlstructs.envs.shared_vector.env_group import innermost
from rlstructs.envs.spaces import Leaf, example, leaves
from rlstructs.envs.values import copy_value, share_memory
from rlstructs.errors import SpecError, StateError
from rlstructs.seeding import environment_seeds
from rlstructs.shared.packing import Packing, Rows
from rlstructs.structures.dict_tensor import DictTensor

# Keys that every observation has, beside those of the environment's own observation space.
FLAGS = ("done", "terminated", "truncated", "initial_state")
RAW_REWARD = "raw_reward"  # what `NormalizeReward` makes of the reward
RESERVED = ("reward", RAW_REWARD, *FLAGS, "last_action")
NO_INFO = DictTensor()


class GymEnv:
    """gymnasium environments, stepped one after another; one that ends leaves the running set.

    An observation holds, with B rows:

    - `frame`, or a key for each entry of a Dict or Tuple space: dtype and shape of the space, except
      that float64 becomes float32; a Discrete one is int64 (B, 1). What an environment gives beside the
      entries of its space is left out;
    - `reward`: float32 (B,), the reward of the step that led here, 0 at a reset;
    - `terminated`, `truncated`, `done` (either of the two): bool (B,), False at a reset;
    - `initial_state`: bool (B,), True at a reset;
    - `last_action`: the action that led here, 0 at a reset; `last_action/<key>` for structured ones;
    - `info/<key>` for each of `info_keys`, (B,): what the info of the step that led here, or of the reset, says; where
      it does not, NaN, or 0 or False in a column of other numbers.

    Args:
        envs: gymnasium environments of equal spaces.
        seed: environment k gets `seed + k`, or, when the seed comes from `RL_Batcher(seeds=int)`, a
            stream of its own; or a sequence with a seed for each. Used at the first reset only: later
            episodes continue the stream.
        keep_float64: do not turn float64 into float32, neither observations nor the last action.
        info_keys: which numbers of the infos are recorded, such as `("is_success",)`, as float32; or a mapping from
            keys to dtypes, `{"is_success": bool}`. `"a/b"` is entry `b` of the info `a`.

    Raises:
        TypeError: `envs` are not gymnasium environments.
        SpecError: none are given, one twice, a space is not there or not supported, or spaces differ.

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
    #: Whether a rollout begins with the resets of environments that ended in the one before.
    defers_resets = False
    writes_rows: ClassVar[bool] = False
    may_idle: ClassVar[bool] = False

    def __init__(
        self,
        envs: Sequence[gymnasium.Env[Any, Any]],
        seed: int | Sequence[int],
        *,
        keep_float64: bool = False,
        info_keys: InfoKeys = (),
    ) -> None:
        self._envs = _checked(envs)
        self._infos = InfoColumns(info_keys)
        self.observation_space = self._envs[0].observation_space
        self.action_space = self._envs[0].action_space
        self._seeds: list[int] | None = environment_seeds(seed, len(self._envs))
        for env, value in zip(self._envs, self._seeds, strict=True):
            env.action_space.seed(value)
        n = len(self._envs)
        self._leaves = {
            leaf.name: leaf for leaf in leaves(self.observation_space, "observation", keep_float64)
        }
        self._actions = ActionReader(self.action_space, keep_float64)
        refuse_reserved(self._leaves)
        self._last_actions = {f"last_{ActionReader.key(leaf)}": leaf for leaf in self._actions.leaves}
        packing = packing_of(self._leaves, self._last_actions, self._infos)
        self._after, self._fresh = (Sheet(self._leaves, packing, n) for _ in range(2))
        self._fresh.view["initial_state"][:] = True
        # None before the first reset.
        self._running: np.ndarray | None = None
        self._stepped: list[gymnasium.Env[Any, Any]] = []
        self._options: list[dict[str, Any] | None] = [None] * n
        self._flagged: list[int] = []
        self._are_apart = False  # until a step has shown that no two write what they observe into the same memory

    def n_envs(self) -> int:
        """Number of environments, E."""
        return len(self._envs)

    def example(self) -> Rows:
        """A first observation such as `reset` gives, made of the spaces alone."""
        rows = self._fresh.rows.take(np.arange(len(self._envs)))
        arrays = rows.arrays()
        for key, leaf in self._leaves.items():
            arrays[key][...] = example(leaf)
        return rows

    def reset(self, env_info: DictTensor = NO_INFO) -> tuple[DictTensor, torch.Tensor]:
        """Starts an episode in every environment.

        Args:
            env_info: E rows, or empty. Row k, as `{key: number or list}`, is the `options` of
                environment k's reset, here and wherever it resets itself.
        """
        return self.reset_rows(env_info).tensors(), torch.arange(len(self._envs), device="cpu")

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
        running = torch.from_numpy(self._check_running().copy())
        return pairs(self.step_rows(action), running)

    def reset_rows(self, env_info: DictTensor) -> Rows:
        """As `reset`, the observation as rows of its own."""
        self._options = _options(env_info, len(self._envs))
        seeds = self._seeds
        frames = [
            self._copied(self._reset_one(k, None if seeds is None else seeds[k], k)) for k in range(len(self._envs))
        ]
        self._seeds = None  # not before: who was interrupted begins again
        self._run(np.arange(len(self._envs)))
        return self._fresh.fill(frames).take(np.arange(len(self._envs)))

    def revive_rows(self) -> tuple[np.ndarray, Rows]:
        """Starts an episode in every environment that has ended; all run then.

        Returns:
            Which they are, int64 (R,), ascending, and their first observations as rows of their own.
        """
        assert self._running is not None
        which = np.setdiff1d(np.arange(len(self._envs)), self._running)
        fresh = [self._copied(self._reset_one(k, None, row)) for row, k in enumerate(which.tolist())]
        self._run(np.arange(len(self._envs)))
        return which, self._fresh.fill(fresh, which).take(np.arange(which.size))

    def step_rows(self, action: DictTensor) -> Step:
        """As `step`, in rows that stay valid until the next one."""
        running = self._check_running()
        actions, action_columns = self._actions.read(action, running.size)
        frames, rewards, ended, seen = [], [], [], []
        fresh: list[Any] = []
        are_apart, infos = self._are_apart, self._infos or None
        row, answer = 0, NONE_YET
        try:
            for row, (env, action_of_it) in enumerate(zip(self._stepped, actions, strict=True)):
                answer = env.step(action_of_it)
                frame, reward, terminated, truncated, info = answer
                if infos is not None:  # before a reset changes it
                    infos.write(self._after.view, row, info, int(running[row]))
                if not are_apart:  # another environment may write into the same array
                    seen.append((frame, reward))
                    frame, reward = self._copied(frame), copy_value(reward)
                if terminated or truncated:
                    ended.append((row, bool(terminated), bool(truncated)))
                    frame, reward = self._copied(frame), copy_value(reward)  # before a reset writes into them
                    if self._autoreset:
                        fresh.append(self._copied(self._reset_one(int(running[row]), None, len(fresh))))
                frames.append(frame)
                rewards.append(reward)
        except Exception as error:
            blame_step(error, answer, self._stepped[row], int(running[row]))
            raise
        after = self._write(frames, running, rewards, ended, action_columns)
        if not are_apart:
            given, paid = zip(*seen, strict=True)
            self._are_apart = not share_memory(paid) and not any(
                share_memory(map(leaf.pick, given)) for leaf in self._leaves.values()
            )
        if not ended:
            return Step(after, NO_ROWS, None, None)
        rows = np.array([row for row, _, _ in ended], np.int64)
        if self._autoreset:
            return Step(after, rows, self._fresh.fill(fresh, rows), None)
        kept = np.delete(np.arange(running.size), rows)
        self._run(running[kept])
        return Step(after, NO_ROWS, None, kept)

    def close(self) -> None:
        """Closes every environment, also when one of them raises; then raises what the first did."""
        errors = []
        for k, env in enumerate(self._envs):
            try:
                env.close()
            except Exception as error:
                add_origin(error, "close", env, k)
                errors.append(error)
        if errors:
            raise errors[0]

    def _check_running(self) -> np.ndarray:
        if self._running is None:
            raise StateError("step: call reset first")
        if not self._running.size:
            raise StateError("step: every environment has ended, call reset")
        return self._running

    def _run(self, running: np.ndarray) -> None:
        self._running, self._stepped = running, [self._envs[k] for k in running.tolist()]

    def _reset_one(self, k: int, seed: int | None, row: int) -> Any:
        """What environment k observes after a reset; its info goes into a row of the fresh ones."""
        options = self._options[k]
        arguments: dict[str, Any] = {} if seed is None else {"seed": seed}
        if options is not None:
            arguments["options"] = copy.deepcopy(options)  # the environment may change them
        try:
            answer = self._envs[k].reset(**arguments)
        except Exception as error:
            add_origin(error, "reset", self._envs[k], k)
            raise
        observation, info = checked_reset(answer, self._envs[k], k)
        if self._infos:
            self._infos.write(self._fresh.view, row, info, k)
        return observation

    def _copied(self, observation: Any) -> Any:
        """What the space has of an observation, which the environment may write into again."""
        if isinstance(observation, np.ndarray):
            return observation.copy()
        return copy_parts(self.observation_space, observation)

    def _write(
        self,
        frames: list[Any],
        running: np.ndarray,
        rewards: list[Any],
        ended: list[tuple[int, bool, bool]],
        actions: dict[str, np.ndarray],
    ) -> Rows:
        after, view, n = self._after.fill(frames, running), self._after.view, len(frames)
        view["reward"][:n] = _numbers(rewards, running)
        for row in self._flagged:
            for flag in FLAGS:
                view[flag][row] = False
        self._flagged = [row for row, _, _ in ended]
        for row, terminated, truncated in ended:
            view["done"][row] = True
            view["terminated"][row], view["truncated"][row] = terminated, truncated
        for key, leaf in self._last_actions.items():
            view[key][:n] = actions[leaf.key]
        return after


class GymEnvInf(GymEnv):
    """As `GymEnv`, but an environment that ends resets itself in the same step, and all always run.

    Of a step that ended an episode, the first pair holds the true final observation, with its reward
    and flags; the second pair, which the agent sees next, the first observation of the new episode.

    Args:
        defer_resets: for resets that take long. Within a rollout of `RL_Batcher` an environment that ends leaves the
            running set, so that the others do not wait for its reset, and its slot is shorter: `lengths` says so. It
            is reset as the next rollout begins, in which it runs again. Below `DeviceEnv`, or one's own wrapper, it
            stays out until `reset`, as with `GymEnv`. Otherwise as above.

    Example:
        >>> import gymnasium
        >>> env = GymEnvInf([gymnasium.make("CartPole-v1", max_episode_steps=1)], seed=0)
        >>> _ = env.reset()
        >>> (after, _), (following, _) = env.step(DictTensor({"action": torch.tensor([0])}))
        >>> after["truncated"].item(), following["truncated"].item(), following["initial_state"].item()
        (True, False, True)
    """

    def __init__(
        self,
        envs: Sequence[gymnasium.Env[Any, Any]],
        seed: int | Sequence[int],
        *,
        keep_float64: bool = False,
        defer_resets: bool = False,
        info_keys: InfoKeys = (),
    ) -> None:
        super().__init__(envs, seed, keep_float64=keep_float64, info_keys=info_keys)
        if not isinstance(defer_resets, bool):
            raise TypeError(f"defer_resets must be a bool, got {defer_resets!r}")
        self._autoreset, self.defers_resets = not defer_resets, defer_resets


def packing_of(observation: Mapping[str, Leaf], last_actions: Mapping[str, Leaf], infos: InfoColumns) -> Packing:
    """How observations lie in rows: entries of the space, reward, flags, the last action and infos."""
    specs = {key: (leaf.row_shape, leaf.dtype) for key, leaf in observation.items()}
    specs["reward"] = (), np.dtype(np.float32)
    specs |= {flag: ((), np.dtype(bool)) for flag in FLAGS}
    specs |= {key: (leaf.shape, leaf.dtype) for key, leaf in last_actions.items()}
    return Packing(specs | infos.specs)


def _checked(envs: Sequence[gymnasium.Env[Any, Any]]) -> list[gymnasium.Env[Any, Any]]:
    try:
        envs = list(envs)
    except TypeError as error:
        raise TypeError(f"envs: needs a list of gymnasium environments, got {_instead_of(envs)}") from error
    if not envs:
        raise SpecError("envs: needs at least one environment, got none")
    taken: set[int] = set()
    for k, env in enumerate(envs):
        if not isinstance(env, gymnasium.Env):
            got = f"{type(env).__name__}, call it" if callable(env) else type(env).__name__
            raise TypeError(f"envs: number {k} must be a gymnasium.Env, got {got}")
        if id(innermost(env)) in taken:
            raise SpecError(f"envs: number {k} is given twice, each must be an environment of its own")
        taken.add(id(innermost(env)))
        for name in ("observation_space", "action_space"):
            if getattr(env, name, None) is None:
                raise SpecError(f"envs: number {k} has no {name}, which says what keys, dtypes and shapes there are")
            if not are_equal(getattr(env, name), getattr(envs[0], name)):
                raise SpecError(
                    f"envs: {name} of number {k} is {getattr(env, name)}, of number 0 {getattr(envs[0], name)}"
                )
    return envs


def _instead_of(envs: Any) -> str:
    """What was given in place of a list, and what to do with it."""
    if isinstance(envs, gymnasium.vector.VectorEnv):
        return f"{type(envs).__name__}: give it to GymVectorEnv"
    if callable(envs):
        return f"{type(envs).__name__}: call it, once for each environment, [make() for _ in range(n)]"
    return f"{type(envs).__name__}: put it into a list, [env]"


def refuse_reserved(keys: Any) -> None:
    """Raises SpecError if an entry of an observation is called as one of ours."""
    for key in keys:
        if key.split("/")[0] in RESERVED or key.startswith(PREFIX):
            raise SpecError(f"observation: an entry may not be called {key!r}; reserved are {(*RESERVED, PREFIX)}")


def _options(env_info: DictTensor, n_envs: int) -> list[dict[str, Any] | None]:
    if not isinstance(env_info, DictTensor):
        raise TypeError(f"env_info must be a DictTensor, got {type(env_info).__name__}")
    if env_info.empty():
        return [None] * n_envs
    if env_info.n_elems() != n_envs:
        raise SpecError(f"env_info: has {env_info.n_elems()} rows, expected {n_envs}")
    columns = {key: tensor.tolist() for key, tensor in env_info.items()}
    return [{key: values[k] for key, values in columns.items()} for k in range(n_envs)]


def _numbers(rewards: list[Any], running: np.ndarray) -> np.ndarray:
    found = _plain_array(rewards)
    if found.ndim == 1 and found.dtype.kind in "biuf":
        return found
    for k, reward in zip(running, rewards, strict=True):
        one = _plain_array(reward)
        is_number = one.dtype.kind in "biuf" or isinstance(reward, int)  # which may be too large for an array
        if one.ndim or not is_number:
            raise SpecError(f"environment {k}: reward must be a number, got {reward!r}")
    return np.array([float(reward) for reward in rewards])


def _plain_array(values: Any) -> np.ndarray:
    try:
        return np.asarray(values)
    except (TypeError, ValueError):  # of different shapes
        return np.asarray(None)

