"""`GymVectorEnv`: any `gymnasium.vector.VectorEnv` as a vectorised environment of rlstructs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from rlstructs.envs.action_reader import ActionReader
from rlstructs.envs.answers import add_origin, check_step, checked_reset
from rlstructs.envs.finals import finals_of, has_finals, put_finals
from rlstructs.envs.gym_env import NO_INFO, packing_of, refuse_reserved
from rlstructs.envs.info_columns import InfoColumns, InfoKeys, final_infos
from rlstructs.envs.libraries import Wanted, same, wanted_by
from rlstructs.envs.observation_columns import Sheet
from rlstructs.envs.row_env import NO_ROWS, Step, pairs
from rlstructs.envs.shared_vector.arguments import autoreset_mode_of
from rlstructs.envs.spaces import example, leaves
from rlstructs.envs.values import as_numpy
from rlstructs.errors import SpecError, StateError
from rlstructs.seeding import environment_seeds, int32_seed
from rlstructs.shared.packing import Rows, Target
from rlstructs.structures.dict_tensor import DictTensor

OUTCOME = ("reward", "terminated", "truncated")
# What a seed that is not to an environment's taste may raise.
REFUSALS = (TypeError, ValueError, AssertionError, gymnasium.error.Error)


class GymVectorEnv:
    """A vector environment, whose environments reset themselves, and all always run.

    Observations are those of `GymEnvInf`, whatever the autoreset mode is: each transition leads to its
    true next observation, and an episode that ended is followed by the first observation of the next.

    - SAME_STEP: the final observation comes from `infos["final_obs"]`, all as one, or one for each environment; or
      infos are a list of dicts, one for each. (In other modes they may be anything.) (gymnasium's `SyncVectorEnv` and
      `AsyncVectorEnv` keep no copy of it: an environment that writes all its observations into one array needs another
      mode, or `SharedVectorEnv`.)
    - DISABLED: environments that end are reset at once, by `options["reset_mask"]`.
    - NEXT_STEP: the step after an end does nothing but reset, and ignores its action. It is no transition:
      a rollout leaves it out, and the slot's length is one less.

    One that gives tensors of torch, or arrays of jax, gets its actions as such, on the device of these.

    Of a `SharedVectorEnv` with several groups a rollout steps one while the agent acts on another: the agent is then
    called with the rows of one group. (Not below a wrapper, nor in mode DISABLED.)

    Args:
        envs: with `num_envs`, `single_observation_space` and `single_action_space`, or, as EnvPool has it,
            `observation_space` and `action_space` of a single environment.
        seed: as of `GymEnv`. One that cannot take a list of them gets an array, or else a single one, below
            2**31; one that takes none at a reset warns. None for environments that were seeded when they were made, as
            EnvPool's are: `rlstructs.int32_seed` makes a seed for those.
        keep_float64: do not turn float64 into float32, neither observations nor the last action.
        autoreset_mode: what `envs.metadata["autoreset_mode"]` is where that says nothing; None for NEXT_STEP then,
            with a warning.
        info_keys: as of `GymEnv`. Of a step that ended an episode in mode SAME_STEP, what `infos["final_info"]` says.

    Raises:
        TypeError: `envs` is no vector environment.
        SpecError: a space is not supported, or the mode is another.

    Example:
        >>> import gymnasium
        >>> envs = gymnasium.make_vec("CartPole-v1", num_envs=3, vectorization_mode="vector_entry_point")
        >>> env = GymVectorEnv(envs, seed=0)
        >>> env.reset()[0]["frame"].shape
        torch.Size([3, 4])
        >>> (after, _), _ = env.step(DictTensor({"action": torch.tensor([0, 1, 1])}))
        >>> after["reward"]
        tensor([1., 1., 1.])
    """

    writes_rows: ClassVar[bool] = True

    def __init__(
        self,
        envs: Any,
        seed: int | Sequence[int] | None,
        *,
        keep_float64: bool = False,
        autoreset_mode: AutoresetMode | str | None = None,
        info_keys: InfoKeys = (),
    ) -> None:
        self._infos = InfoColumns(info_keys)
        self._envs, self._n, self._name = envs, _n_envs(envs), type(envs).__name__
        self.observation_space, self.action_space = _single_space(envs, "observation"), _single_space(envs, "action")
        self._mode = _mode(envs, autoreset_mode)
        self._seeds: list[int] | None = None if seed is None else environment_seeds(seed, self._n)
        self._single = int(seed) if isinstance(seed, (int, np.integer)) else (self._seeds or [0])[0]
        self._leaves = {
            leaf.name: leaf for leaf in leaves(self.observation_space, "observation", keep_float64)
        }
        refuse_reserved(self._leaves)
        self._actions = ActionReader(self.action_space, keep_float64)
        last_actions = {f"last_{ActionReader.key(leaf)}": leaf for leaf in self._actions.leaves}
        packing = packing_of(self._leaves, last_actions, self._infos)
        self._after, self._fresh = (Sheet(self._leaves, packing, self._n) for _ in range(2))
        self._fresh.view["initial_state"][:] = True
        self._last_actions = {key: leaf.key for key, leaf in last_actions.items()}
        self._is_running = False
        self._as_wanted: Wanted = same  # until a reset has shown what arrays there are
        # Environments whose next step does nothing but reset.
        self._ended = NO_ROWS
        groups = _groups(envs, self._mode)
        self._groups = [GymVectorGroup(Group(envs, ids), keep_float64, info_keys) for ids in groups]

    def n_envs(self) -> int:
        """Number of environments, E."""
        return self._n

    def example(self) -> Rows:
        """A first observation such as `reset` gives, made of the spaces alone."""
        rows = self._fresh.rows.take(np.arange(self._n))
        arrays = rows.arrays()
        for key, leaf in self._leaves.items():
            arrays[key][...] = example(leaf)
        return rows

    def reset(self, env_info: DictTensor = NO_INFO) -> tuple[DictTensor, torch.Tensor]:
        """Starts an episode in every environment.

        Args:
            env_info: empty: a vector environment has no options for single ones.
        """
        return self.reset_rows(env_info).tensors(), torch.arange(self._n, device="cpu")

    def step(self, action: DictTensor) -> tuple[tuple[DictTensor, torch.Tensor], tuple[DictTensor, torch.Tensor]]:
        """Steps every environment; see `VecEnv.step`.

        Where a step did nothing but reset (NEXT_STEP), `initial_state` is True in both pairs.

        Args:
            action: `action`, or `action/<key>` for a structured space, E rows.

        Raises:
            StateError: there was no reset.
            MissingKeyError, SpecError: the action is not what the action space needs.
        """
        return pairs(self.step_rows(action), torch.arange(self._n, device="cpu"))

    def row_groups(self) -> Sequence[GymVectorGroup]:
        """The groups of a `SharedVectorEnv` that has several: a rollout steps one while the agent acts on another."""
        return self._groups

    def reset_rows(self, env_info: DictTensor) -> Rows:
        """As `reset`, the observation as rows of its own."""
        if not env_info.empty():
            raise SpecError(f"env_info: {self._name} takes no options for single environments")
        observations, infos = self._seeded_reset()
        for env in (self, *self._groups):
            env._is_running, env._ended = True, NO_ROWS
        first = self._shown(observations, infos, np.arange(self._n))
        self._as_wanted = wanted_by(leaf.pick(observations) for leaf in self._leaves.values())
        return first

    @property
    def may_idle(self) -> bool:
        """As of `RowEnv`."""
        return bool(self._ended.size)

    def step_rows(self, action: DictTensor, target: Target | None = None) -> Step:
        """As `step`, in rows that stay valid until the next one.

        Args:
            action: E rows.
            target: where they are written to; None for rows of its own.
        """
        actions, columns = self._read(action)
        try:
            stepped = self._envs.step(actions)
        except Exception as error:
            add_origin(error, "step", self._envs)
            raise
        return self._followed(columns, stepped, target)

    def close(self) -> None:
        """Closes the environments."""
        try:
            self._envs.close()
        except Exception as error:
            add_origin(error, "close", self._envs)
            raise

    def _read(self, action: DictTensor) -> tuple[Any, dict[str, np.ndarray]]:
        """A batch of actions as the environment takes it, and as columns."""
        if not self._is_running:
            raise StateError("step: call reset first")
        return self._actions.read_batch(action, self._n, self._as_wanted)

    def _followed(self, columns: Mapping[str, np.ndarray], stepped: Any, target: Target | None) -> Step:
        """What came of the actions in these columns."""
        try:
            observations, rewards, terminated, truncated, infos = stepped
        except (TypeError, ValueError):
            check_step(stepped, self._envs)
            raise
        idle, after = self._ended, target or Target(self._after.rows, self._after.view)
        outcome = list(map(self._numbers, OUTCOME, (rewards, terminated, truncated)))
        done = np.logical_or(*outcome[1:])
        done[idle] = False
        self._write(after.arrays, observations, (*outcome, done), columns)
        self._begin(after.arrays, idle)
        if self._infos:
            self._infos.write_batch(after.arrays, infos)
        ended = done.nonzero()[0]
        if self._mode is AutoresetMode.NEXT_STEP:
            if ended.size and has_finals(infos):
                raise SpecError(f"environment: {self._name} gave infos['final_obs'], which is not {self._mode.value}")
            self._ended = ended
            return Step(after.rows, NO_ROWS, None, None, idle)
        if not ended.size:
            return Step(after.rows, NO_ROWS, None, None)
        first = self._restarted(ended) if self._mode is AutoresetMode.DISABLED else self._first_of(after.rows, ended)
        if self._mode is AutoresetMode.SAME_STEP:
            put_finals(self._leaves, ended, finals_of(infos, self._n, self._name), after.arrays)
            if self._infos and final_infos(infos) is not None:
                self._infos.write_batch(after.arrays, final_infos(infos), ended)
            elif self._infos:  # it says nothing of resets
                self._infos.write_batch(first.arrays(), {})
        return Step(after.rows, ended, first, None)

    def _write(
        self,
        arrays: Mapping[str, np.ndarray],
        observations: Any,
        outcome: Sequence[np.ndarray],
        actions: Mapping[str, np.ndarray],
    ) -> None:
        """Writes what a step gave to all rows."""
        self._after.fill_batch(observations, arrays)
        for key, values in zip((*OUTCOME, "done"), outcome, strict=True):
            arrays[key][...] = values
        arrays["initial_state"][...] = False
        for key, name in self._last_actions.items():
            arrays[key][...] = actions[name]

    def _begin(self, arrays: Mapping[str, np.ndarray], at: Any) -> None:
        """Makes some rows what they are after a reset, all but what the environment shows."""
        for key in (*OUTCOME, "done", *self._last_actions):
            arrays[key][at] = 0
        arrays["initial_state"][at] = True

    def _numbers(self, key: str, values: Any) -> np.ndarray:
        """Rewards or flags, one for each environment."""
        found = as_numpy(values)
        if found.shape != (self._n,) or found.dtype.kind not in "biuf":
            raise SpecError(f"environment: {key} must be {self._n} numbers, got {found.shape} {found.dtype}")
        return found

    def _restarted(self, ended: np.ndarray) -> Rows:
        """The first observations of environments that are reset now."""
        mask = np.zeros(self._n, bool)
        mask[ended] = True
        try:
            answer = self._envs.reset(options={"reset_mask": mask})
        except Exception as error:
            add_origin(error, "reset", self._envs)
            raise
        observations, infos = checked_reset(answer, self._envs)
        return self._shown(observations, infos, ended)

    def _shown(self, observations: Any, infos: Any, rows: np.ndarray) -> Rows:
        """The first observations of some environments."""
        self._fresh.fill_batch(observations, self._fresh.view)
        if self._infos:
            self._infos.write_batch(self._fresh.view, infos, rows)
        return self._fresh.rows.take(rows)

    def _first_of(self, rows: Rows, ended: np.ndarray) -> Rows:
        """The first observations of environments that have been reset: what the step gave."""
        first = rows.take(ended)
        self._begin(first.arrays(), slice(None))
        return first

    def _seeded_reset(self) -> Any:
        """What the first reset gives, or a later one: observations and infos."""
        try:
            answer = self._reset_by(self._seeds)
        except Exception as error:
            add_origin(error, "reset", self._envs)
            raise
        self._seeds = None  # not before: who was interrupted begins again
        return checked_reset(answer, self._envs)

    def _reset_by(self, seeds: list[int] | None) -> Any:
        if seeds is None:
            return self._envs.reset()
        if isinstance(getattr(self._envs, "unwrapped", self._envs), (SyncVectorEnv, AsyncVectorEnv)):
            return self._envs.reset(seed=seeds)  # whatever this raises is not about the seeds
        refused: Exception | None = None
        for seed in (seeds, np.array([int32_seed(seed) for seed in seeds]), int32_seed(self._single), None):
            try:
                found = self._envs.reset() if seed is None else self._envs.reset(seed=seed)
            except REFUSALS as error:
                refused = refused or error
                continue
            except StateError:  # a `SharedVectorEnv` takes any seeds, but no call after what an environment raised
                if refused is None:
                    raise
                break
            if seed is None:
                warnings.warn(f"{self._name}.reset takes no seed: give it one when it is made", stacklevel=2)
            return found
        assert refused is not None
        raise refused


class Group:
    """Some environments of a `SharedVectorEnv`, as far as a `GymVectorEnv` wants to know them.

    Args:
        envs: the whole.
        env_ids: int64, which of them.
    """

    def __init__(self, envs: Any, env_ids: np.ndarray) -> None:
        self._envs, self._env_ids = envs, env_ids
        self.num_envs, self.metadata = len(env_ids), envs.metadata
        self.single_observation_space = envs.single_observation_space
        self.single_action_space = envs.single_action_space

    def step_async(self, actions: Any) -> None:
        """Has them stepped."""
        self._envs.send(actions, self._env_ids)

    def step_wait(self) -> Any:
        """What came of it."""
        return self._envs.recv(env_ids=self._env_ids)


class GymVectorGroup(GymVectorEnv):
    """One group of a `GymVectorEnv`: see `SplitEnv`. It is reset with the whole."""

    def __init__(self, group: Group, keep_float64: bool, info_keys: InfoKeys) -> None:
        super().__init__(group, 0, keep_float64=keep_float64, info_keys=info_keys)
        self._columns: Mapping[str, np.ndarray] = {}

    def send_rows(self, action: DictTensor) -> None:
        """As `SplitEnv.send_rows`."""
        actions, columns = self._read(action)
        # Copies: the agent may write into its output before these environments have been stepped.
        self._columns = {name: column.copy() for name, column in columns.items()}
        self._envs.step_async(actions)

    def recv_rows(self, target: Target) -> Step:
        """As `SplitEnv.recv_rows`."""
        return self._followed(self._columns, self._envs.step_wait(), target)


def _groups(envs: Any, mode: AutoresetMode) -> Sequence[np.ndarray]:
    """The groups of environments that can be stepped by themselves; none if there is only one."""
    # Of its own: a wrapper hands on the attributes of what it wraps, but changes what a step is.
    groups: Sequence[np.ndarray] = getattr(envs, "__dict__", {}).get("groups", ()) if hasattr(envs, "recv") else ()
    if len(groups) < 2:
        return ()
    if mode is AutoresetMode.DISABLED:
        raise SpecError(
            f"environment: {type(envs).__name__} has groups, of which none can be reset while another is stepped: give "
            "it an autoreset_mode, or n_groups=1"
        )
    return groups


def _single_space(envs: Any, what: str) -> Any:
    single = getattr(envs, f"single_{what}_space", None)
    return getattr(envs, f"{what}_space") if single is None else single


def _n_envs(envs: Any) -> int:
    if isinstance(envs, (list, tuple)) or not (hasattr(envs, "num_envs") or hasattr(type(envs), "__len__")):
        raise TypeError(
            f"envs: must be a vector environment, as gymnasium.make_vec makes it, got {type(envs).__name__}: "
            "GymEnvInf([env, ...], seed) is for single ones"
        )
    return int(envs.num_envs if hasattr(envs, "num_envs") else len(envs))


def _mode(envs: Any, asked: AutoresetMode | str | None) -> AutoresetMode:
    told = (getattr(envs, "metadata", None) or {}).get("autoreset_mode")
    modes = [autoreset_mode_of(getattr(mode, "value", mode)) for mode in (told, asked) if mode is not None]
    if len(set(modes)) > 1:
        raise SpecError(f"autoreset_mode: {type(envs).__name__} says {modes[0].value}, got {modes[1].value}")
    if not modes:
        warnings.warn(
            f"{type(envs).__name__} does not say its autoreset mode: taken as {AutoresetMode.NEXT_STEP.value}, "
            "give autoreset_mode",
            stacklevel=3,
        )
    return modes[0] if modes else AutoresetMode.NEXT_STEP
