"""`GymVectorEnv`: any `gymnasium.vector.VectorEnv` as a vectorised environment of rlstructs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from rlstructs.checks import other_words
from rlstructs.envs.action_reader import Conversion, choose_conversion, keep_numpy
from rlstructs.envs.array_values import as_numpy
from rlstructs.envs.env_infos import InfoColumns, InfoKeys, final_infos, find_finals, has_finals, write_finals
from rlstructs.envs.env_list import LivesRule, RestartPolicy
from rlstructs.envs.observation_columns import RowLayout
from rlstructs.envs.row_env import NO_ROWS, RowDefaults, Step, refuse_lives, step_pairs
from rlstructs.envs.shared_vector.arguments import check_autoreset_mode
from rlstructs.envs.shared_vector.env_group import ENV_FAILURE
from rlstructs.envs.shared_vector.shared_vector_env import SharedVectorEnv
from rlstructs.envs.stepping import SingleEnv, add_origin, check_step, read_reset
from rlstructs.envs.vec_env import NO_INFO
from rlstructs.errors import SpecError, StateError
from rlstructs.seeding import environment_seeds, int32_seed
from rlstructs.shared.layout import Rows, Target
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.workers.public_names import set_module

OUTCOME = ("reward", "terminated", "truncated")
# Errors by which an environment may refuse a seed.
REFUSALS = (TypeError, ValueError, AssertionError, gymnasium.error.Error)


@set_module("rlstructs")
class GymVectorEnv(RowDefaults):
    """A vector environment whose environments reset themselves, so that all always run.

    Observations are those of `GymEnvInf`, in every autoreset mode: each transition leads to its
    true next observation, and the first observation of the next episode follows an episode's end.

    - SAME_STEP: the final observations come from `infos["final_obs"]`, as one batch or one for each environment; or
      infos are a list of dicts, one for each environment. (In other modes infos may be anything.) gymnasium's
      `SyncVectorEnv` and `AsyncVectorEnv` do not copy final observations: an environment that writes all its
      observations into one array needs another mode, or `SharedVectorEnv`.
    - DISABLED: environments that end are reset at once, by `options["reset_mask"]`.
    - NEXT_STEP: the step after an end only resets, and ignores its action. It is no transition:
      a rollout leaves it out, and the slot's length is one less.

    If observations are tensors of torch or arrays of jax, actions are too, on the same device.

    A rollout steps one group of a `SharedVectorEnv` with several groups while the agent acts on another: the agent is
    then called with the rows of one group. (Not below a wrapper, nor in mode DISABLED.)

    Args:
        envs: has `num_envs`, `single_observation_space` and `single_action_space`; or, like EnvPool, the
            `observation_space` and `action_space` of a single environment.
        seed: as for `GymEnv`. A vector environment that refuses a list of seeds gets an array, or else a single seed
            below 2**31; if it takes no seed at a reset, a warning says so. None for environments that were seeded when
            they were made, as EnvPool's are: `rlstructs.int32_seed` makes a seed for those.
        keep_float64: keep float64 observations and actions, rather than turn them into float32.
        autoreset_mode: the mode, if `envs.metadata["autoreset_mode"]` is missing; None then means NEXT_STEP, with a
            warning.
        info_keys: as for `GymEnv`. For a step that ended an episode in mode SAME_STEP, values come from
            `infos["final_info"]`.
        clip_actions: as for `GymEnv`.

    Raises:
        TypeError: `envs` is no vector environment.
        SpecError: a space is not supported, or `envs` has another mode.

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

    writes_rows = True

    @other_words(seeds="seed")
    def __init__(
        self,
        envs: Any,
        seed: int | Sequence[int] | None,
        *,
        keep_float64: bool = False,
        autoreset_mode: AutoresetMode | str | None = None,
        info_keys: InfoKeys = (),
        clip_actions: bool = False,
    ) -> None:
        self._infos = InfoColumns(info_keys)
        self._envs, self._n, self._name = envs, _count_envs(envs), type(envs).__name__
        self.observation_space, self.action_space = _single_space(envs, "observation"), _single_space(envs, "action")
        self._mode = _find_mode(envs, autoreset_mode)
        self._seeds: list[int] | None = None if seed is None else environment_seeds(seed, self._n)
        self._single_seed = int(seed) if isinstance(seed, (int, np.integer)) else (self._seeds or [0])[0]
        layout = RowLayout(self.observation_space, self.action_space, keep_float64, self._infos, clip_actions)
        self._leaves, self._actions = layout.leaves, layout.actions
        self._after, self._fresh = layout.allocate(self._n)
        self._last_actions = {key: leaf.key for key, leaf in layout.last_actions.items()}
        self._is_running = False
        self._convert: Conversion = keep_numpy  # until a reset shows the library of observations
        # Environments whose next step only resets them; and those that have failed and do not run.
        self._ended, self._gone = NO_ROWS, NO_ROWS
        self._n_restarts = np.zeros(self._n, np.int64)  # those that were told
        groups = _list_groups(envs, self._mode)
        self._groups = [GymVectorGroup(Group(envs, ids), keep_float64, info_keys, clip_actions) for ids in groups]

    def n_envs(self) -> int:
        """Number of environments, E."""
        return self._n

    def example(self) -> Rows:
        """First observations as `reset` would return them, made from the spaces alone."""
        return self._fresh.example()

    def reset(self, env_info: DictTensor = NO_INFO) -> tuple[DictTensor, torch.Tensor]:
        """Starts an episode in every environment.

        Args:
            env_info: empty: a vector environment takes no options for single environments.
        """
        return self.reset_rows(env_info).tensors(), torch.arange(self._n, device="cpu")

    def step(self, action: DictTensor) -> tuple[tuple[DictTensor, torch.Tensor], tuple[DictTensor, torch.Tensor]]:
        """Steps every environment; see `VecEnv.step`.

        Where a step only reset an environment (NEXT_STEP), `initial_state` is True in both pairs.

        Args:
            action: `action`, or `action/<key>` for a structured space, E rows.

        Raises:
            StateError: `reset` was not called.
            MissingKeyError, SpecError: the action does not fit the action space.
        """
        return step_pairs(self.step_rows(action), torch.arange(self._n, device="cpu"))

    def row_groups(self) -> Sequence[GymVectorGroup]:
        """Returns the groups of a `SharedVectorEnv`, if it has several.

        A rollout steps one group while the agent acts on another.
        """
        return self._groups

    def single_envs(self) -> Sequence[SingleEnv]:
        """The environments of a `SyncVectorEnv`; otherwise the vector environment."""
        inner = getattr(self._envs, "unwrapped", self._envs)
        return [SingleEnv(env) for env in (inner.envs if isinstance(inner, SyncVectorEnv) else [self._envs])]

    def reset_rows(self, env_info: DictTensor) -> Rows:
        """Resets, and returns the observation as rows that nobody else uses."""
        if not env_info.empty():
            raise SpecError(f"env_info: {self._name} takes no options for single environments")
        observations, infos = self._reset_all()
        for env in (self, *self._groups):
            env._is_running, env._ended, env._gone = True, NO_ROWS, NO_ROWS
        first = self._read_first(observations, infos, np.arange(self._n))
        self._convert = choose_conversion(leaf.pick(observations) for leaf in self._leaves.values())
        return first

    @property
    def may_idle(self) -> bool:
        return bool(self._ended.size)

    @property
    def failed_rows(self) -> np.ndarray:
        ends = np.cumsum([group._n for group in self._groups])
        groups = (group._gone + end - group._n for group, end in zip(self._groups, ends, strict=True))
        return np.concatenate([self._gone, *groups])  # of one or the other: a wrapper steps all together

    def revive_rows(self, which: np.ndarray | None = None) -> tuple[np.ndarray, Rows]:
        """Starts an episode in all environments that have failed; see `RowEnv.revive_rows`."""
        failed = self.failed_rows
        for env in (self, *self._groups):
            env._gone = NO_ROWS
        return failed, self._reset_ended(failed)

    def set_lives(self, rule: LivesRule | None) -> None:
        if (shared := _find_shared(self._envs)) is not None:
            shared.hold_failed(None if rule is None else RestartPolicy(True, rule.limit, rule.first))
        elif rule is not None:
            refuse_lives(self._envs)

    def take_restarts(self) -> dict[int, int]:
        if (shared := _find_shared(self._envs)) is None:
            return {}
        before, self._n_restarts = self._n_restarts, shared.env_restarts
        return {k: n for k, n in enumerate((self._n_restarts - before).tolist()) if n}

    def step_rows(self, action: DictTensor, target: Target | None = None) -> Step:
        """Steps, and returns rows that stay valid until the next step.

        Args:
            action: a row for each environment that runs: all that have not failed.
            target: the rows to write to; None for rows of its own.
        """
        actions, columns = self._read_actions(action)
        try:
            result = self._envs.step(actions)
        except Exception as error:
            add_origin(error, "step", self._envs)
            raise
        return self._read_step(columns, result, target)

    def close(self) -> None:
        """Closes the environments."""
        try:
            self._envs.close()
        except Exception as error:
            add_origin(error, "close", self._envs)
            raise

    def _read_actions(self, action: DictTensor) -> tuple[Any, dict[str, np.ndarray]]:
        """Returns a batch of actions as the environment takes it, and as columns."""
        if not self._is_running:
            raise StateError("step: call reset first")
        if self._gone.size:  # failed environments may get any action
            action = action.index(torch.from_numpy(self._find_running()[1]))
        return self._actions.read_batch(action, self._n, self._convert)

    def _read_step(self, columns: Mapping[str, np.ndarray], result: Any, target: Target | None) -> Step:
        """Writes the result of a step to rows.

        Also the actions in `columns` that led to it.
        """
        step, infos = self._read_all(columns, result, target), result[4]
        may_leave = self._gone.size or (isinstance(infos, Mapping) and ENV_FAILURE in infos)
        return self._leave_out(step, infos) if may_leave else step

    def _leave_out(self, step: Step, infos: Mapping[str, Any]) -> Step:
        """Removes environments that have failed, now or before, from a step.

        The step is one of all E environments.
        """
        failed = np.flatnonzero(infos.get(f"_{ENV_FAILURE}", np.zeros(self._n, bool)))
        (running, place), out = self._find_running(), np.union1d(self._gone, failed)
        self._gone, self._ended = out, np.setdiff1d(self._ended, out)
        is_in = ~np.isin(step.reset, out)
        return Step(
            step.after if running.size == self._n else step.after.take(running),
            place[step.reset[is_in]],
            step.fresh.take(is_in) if step.fresh is not None and is_in.any() else None,
            np.flatnonzero(~np.isin(running, failed)) if failed.size else None,
            place[np.setdiff1d(step.idle, out)],
            place[failed[~step.after["done"][failed].astype(bool)]],  # others have failed in the reset that followed
        )

    def _find_running(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the environments that have not failed, int64, and their places.

        The places are by environment; they are arbitrary for environments that have failed.
        """
        is_running = ~np.isin(np.arange(self._n), self._gone)
        return np.flatnonzero(is_running), np.maximum(is_running.cumsum() - 1, 0)

    def _read_all(self, columns: Mapping[str, np.ndarray], result: Any, target: Target | None) -> Step:
        """Reads a step into rows of all E environments."""
        try:
            observations, rewards, terminated, truncated, infos = result
        except (TypeError, ValueError):
            check_step(result, self._envs)
            raise
        idle, after = self._ended, target or Target(self._after.rows, self._after.view)
        outcome = list(map(self._check_numbers, OUTCOME, (rewards, terminated, truncated)))
        done = np.logical_or(*outcome[1:])
        done[idle] = False
        self._write(after.arrays, observations, (*outcome, done), columns)
        self._mark_initial(after.arrays, idle)
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
        is_disabled = self._mode is AutoresetMode.DISABLED
        first = self._reset_ended(ended) if is_disabled else self._take_first(after.rows, ended)
        if self._mode is AutoresetMode.SAME_STEP:
            write_finals(self._leaves, ended, find_finals(infos, self._n, self._name), after.arrays)
            if self._infos and final_infos(infos) is not None:
                self._infos.write_batch(after.arrays, final_infos(infos), ended)
            elif self._infos:  # infos are those of the steps, not of the resets
                self._infos.write_batch(first.arrays(), {})
        return Step(after.rows, ended, first, None)

    def _write(
        self,
        arrays: Mapping[str, np.ndarray],
        observations: Any,
        outcome: Sequence[np.ndarray],
        actions: Mapping[str, np.ndarray],
    ) -> None:
        """Writes the result of a step to all rows."""
        self._after.fill_batch(observations, arrays)
        for key, values in zip((*OUTCOME, "done"), outcome, strict=True):
            arrays[key][...] = values
        arrays["initial_state"][...] = False
        for key, name in self._last_actions.items():
            arrays[key][...] = actions[name]

    def _mark_initial(self, arrays: Mapping[str, np.ndarray], at: Any) -> None:
        """Sets reward, flags and last action of some rows to their initial values."""
        for key in (*OUTCOME, "done", *self._last_actions):
            arrays[key][at] = 0
        arrays["initial_state"][at] = True

    def _check_numbers(self, key: str, values: Any) -> np.ndarray:
        """Returns rewards or flags as an array.

        Raises SpecError unless there is a number for each environment.
        """
        found = as_numpy(values)
        if found.shape != (self._n,) or found.dtype.kind not in "biuf":
            raise SpecError(f"environment: {key} must be {self._n} numbers, got {found.shape} {found.dtype}")
        return found

    def _reset_ended(self, ended: np.ndarray) -> Rows:
        """Resets the environments that have ended, and returns their first observations."""
        mask = np.zeros(self._n, bool)
        mask[ended] = True
        try:
            result = self._envs.reset(options={"reset_mask": mask})
        except Exception as error:
            add_origin(error, "reset", self._envs)
            raise
        observations, infos = read_reset(result, self._envs)
        return self._read_first(observations, infos, ended)

    def _read_first(self, observations: Any, infos: Any, rows: np.ndarray) -> Rows:
        """Returns the first observations of some environments, from the result of a reset."""
        self._fresh.fill_batch(observations, self._fresh.view)
        if self._infos:
            self._infos.write_batch(self._fresh.view, infos, rows)
        return self._fresh.rows.take(rows)

    def _take_first(self, rows: Rows, ended: np.ndarray) -> Rows:
        """Returns first observations of environments reset in the last step.

        That step wrote these rows.
        """
        first = rows.take(ended)
        self._mark_initial(first.arrays(), slice(None))
        return first

    def _reset_all(self) -> tuple[Any, Any]:
        """Resets all environments, the first time with seeds; returns observations and infos."""
        try:
            result = self._reset_with(self._seeds)
        except Exception as error:
            add_origin(error, "reset", self._envs)
            raise
        self._seeds = None  # only now: a reset after an interrupted one needs the same seeds
        return read_reset(result, self._envs)

    def _reset_with(self, seeds: list[int] | None) -> Any:
        if seeds is None:
            return self._envs.reset()
        if isinstance(getattr(self._envs, "unwrapped", self._envs), (SyncVectorEnv, AsyncVectorEnv)):
            return self._envs.reset(seed=seeds)  # these take the seeds, so an error has another cause
        refused: Exception | None = None
        for seed in (seeds, np.array([int32_seed(seed) for seed in seeds]), int32_seed(self._single_seed), None):
            try:
                result = self._envs.reset() if seed is None else self._envs.reset(seed=seed)
            except REFUSALS as error:
                refused = refused or error
                continue
            except StateError:  # a `SharedVectorEnv` takes any seeds, but no calls after an environment raised
                if refused is None:
                    raise
                break
            if seed is None:
                warnings.warn(f"{self._name}.reset takes no seed: give it one when it is made", stacklevel=2)
            return result
        assert refused is not None
        raise refused


class Group:
    """Some environments of a `SharedVectorEnv`, with the methods that `GymVectorGroup` needs.

    Args:
        envs: the `SharedVectorEnv`.
        env_ids: int64, indexes of the environments.
    """

    def __init__(self, envs: Any, env_ids: np.ndarray) -> None:
        self._envs, self._env_ids = envs, env_ids
        self.num_envs, self.metadata = len(env_ids), envs.metadata
        self.single_observation_space = envs.single_observation_space
        self.single_action_space = envs.single_action_space

    def step_async(self, actions: Any) -> None:
        """Starts a step of these environments."""
        self._envs.send(actions, self._env_ids)

    def step_wait(self) -> Any:
        """Waits for the step, and returns its result."""
        return self._envs.recv(env_ids=self._env_ids)


class GymVectorGroup(GymVectorEnv):
    """One group of a `GymVectorEnv`: see `SplitEnv`. It is reset together with all others."""

    def __init__(self, group: Group, keep_float64: bool, info_keys: InfoKeys, clip_actions: bool) -> None:
        super().__init__(group, 0, keep_float64=keep_float64, info_keys=info_keys, clip_actions=clip_actions)
        self._columns: Mapping[str, np.ndarray] = {}

    def send_rows(self, action: DictTensor) -> None:
        actions, columns = self._read_actions(action)
        # Copies: the agent may overwrite its output before these environments have stepped.
        self._columns = {name: column.copy() for name, column in columns.items()}
        self._envs.step_async(actions)

    def recv_rows(self, target: Target | None) -> Step:
        return self._read_step(self._columns, self._envs.step_wait(), target)


def _find_shared(envs: Any) -> SharedVectorEnv | None:
    """Returns the `SharedVectorEnv` that this is or wraps; None otherwise."""
    inner = getattr(envs, "unwrapped", envs)
    return inner if isinstance(inner, SharedVectorEnv) else None


def _list_groups(envs: Any, mode: AutoresetMode) -> Sequence[np.ndarray]:
    """Lists the groups of environments that can be stepped separately.

    Empty if there is only one.
    """
    # Looks at the object's own attributes: a wrapper forwards those of what it wraps, but changes the step.
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


def _count_envs(envs: Any) -> int:
    if isinstance(envs, (list, tuple)) or not (hasattr(envs, "num_envs") or hasattr(type(envs), "__len__")):
        raise TypeError(
            f"envs: must be a vector environment, as gymnasium.make_vec makes it, got {type(envs).__name__}: "
            "GymEnvInf([env, ...], seed) is for single ones"
        )
    return int(envs.num_envs if hasattr(envs, "num_envs") else len(envs))


def _find_mode(envs: Any, given: AutoresetMode | str | None) -> AutoresetMode:
    """Returns the environment's or the user's autoreset mode; they must agree."""
    own = (getattr(envs, "metadata", None) or {}).get("autoreset_mode")
    modes = [check_autoreset_mode(getattr(mode, "value", mode)) for mode in (own, given) if mode is not None]
    if len(set(modes)) > 1:
        raise SpecError(f"autoreset_mode: {type(envs).__name__} says {modes[0].value}, got {modes[1].value}")
    if not modes:
        warnings.warn(
            f"{type(envs).__name__} does not say its autoreset mode: taken as {AutoresetMode.NEXT_STEP.value}, "
            "give autoreset_mode",
            stacklevel=3,
        )
    return modes[0] if modes else AutoresetMode.NEXT_STEP
