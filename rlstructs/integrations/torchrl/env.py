"""`SharedVectorWrapper`: a `SharedVectorEnv` as an environment of torchrl."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from tensordict import NonTensorStack, TensorDict
from torchrl.data import Categorical, Composite, NonTensor, OneHot, Unbounded
from torchrl.data.tensor_specs import Stacked
from torchrl.envs import EnvBase, GymWrapper

from rlstructs.envs.shared_vector.arguments import RESET_MASK
from rlstructs.envs.shared_vector.shared_vector_env import SharedVectorEnv
from rlstructs.errors import SpecError
from rlstructs.workers.public_names import set_module

ENDS = ("done", "terminated", "truncated")


@set_module("rlstructs.integrations.torchrl")
class SharedVectorWrapper(EnvBase):  # type: ignore[misc]
    """Replaces torchrl's `ParallelEnv` of `GymEnv`, with environments stepped by worker processes.

    To torchrl it is one environment of batch size (N,).

    It steps and resets as torchrl expects: ("next", "observation") of a last step is the true last observation of the
    episode, and `reset` starts an episode only in the environments of "_reset". In the default mode, environments that
    torchrl does not reset are reset by the `SharedVectorEnv` in the next step.

    Keys and specs are those of torchrl's `GymWrapper`: images of three colours are "pixels", "state" of a Dict without
    "observation" is "observation", entries of a Dict of actions are keys of their own. Where `GymWrapper` steps an
    environment with an action that its space does not contain, it steps it with the one that is meant: a tuple for a
    Tuple, a dict for a Dict of one entry, a vector for a MultiDiscrete that an "action_mask" flattens. Only a `start`
    is ignored, as there: actions count from 0.

    Args:
        envs: in autoreset mode NEXT_STEP, the default, or DISABLED.
        categorical_action_encoding: whether discrete numbers are numbers; otherwise one-hot, as in `GymWrapper`.
        device: of what `step` and `reset` return.

    Raises:
        TypeError: `envs` is no `SharedVectorEnv`.
        SpecError: its autoreset mode is SAME_STEP, which returns no last observations; or torchrl has no spec for a
            batch of one of its spaces.
        Exception: what `SharedVectorEnv` raises.
    """

    def __init__(
        self,
        envs: SharedVectorEnv,
        *,
        categorical_action_encoding: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        if not isinstance(envs, SharedVectorEnv):
            raise TypeError(f"SharedVectorWrapper: needs a SharedVectorEnv, got {type(envs).__name__}")
        if envs.autoreset_mode is AutoresetMode.SAME_STEP:
            raise SpecError("SharedVectorWrapper: needs the autoreset mode NEXT_STEP or DISABLED, got SAME_STEP")
        n = envs.num_envs
        super().__init__(device=device, batch_size=torch.Size([n]))
        self._envs = envs
        self._seed: int | None = None  # of the next reset of all environments
        one = _wrap_one(envs, self.device, categorical_action_encoding)
        self._one_spec = one.observation_spec
        self._seen = _name_space(envs.single_observation_space, one.observation_spec)
        self._acted = _name_space(envs.single_action_space, one.full_action_spec)
        self.observation_spec = one.observation_spec.expand(n, *one.observation_spec.shape)
        self.full_action_spec = one.full_action_spec.expand(n, *one.full_action_spec.shape)
        self.reward_spec = Unbounded(shape=(n, 1), device=self.device)
        done = {name: Categorical(2, dtype=torch.bool, shape=(n, 1), device=self.device) for name in ENDS}
        self.done_spec = Composite(done, shape=[n])

    def _step(self, tensordict: Any) -> Any:
        actions = _read_actions(self._acted, self.full_action_spec, tensordict)
        if self._acted is not self._envs.single_action_space:
            [actions] = actions.values()
        observations, rewards, terminated, truncated, _ = self._envs.step(actions)
        signals = {"reward": rewards.astype(np.float32), "terminated": terminated, "truncated": truncated}
        return self._make_tensordict(observations, signals | {"done": terminated | truncated})

    def _reset(self, tensordict: Any = None, *, seed: int | None = None, options: Any = None, **kwargs: Any) -> Any:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is None or mask.all():
            seed, self._seed = self._seed if seed is None else seed, None
        else:
            options = {**(options or {}), RESET_MASK: mask.cpu().numpy().reshape(self._envs.num_envs)}
        observations, _ = self._envs.reset(seed=seed, options=options)
        return self._make_tensordict(observations, dict.fromkeys(ENDS, np.zeros(self._envs.num_envs, bool)))

    def _set_seed(self, seed: int | None) -> None:
        self._seed = seed

    def close(self, **kwargs: Any) -> None:
        """Closes every environment and ends every worker."""
        super().close(**kwargs)
        self._envs.close()

    def _make_tensordict(self, observations: Any, signals: Mapping[str, np.ndarray]) -> Any:
        if self._seen is not self._envs.single_observation_space:
            observations = dict.fromkeys(self._seen, observations)
        found = _encode(self._seen, self._one_spec, self.observation_spec, observations)
        for name, values in signals.items():
            found[name] = torch.from_numpy(values)[:, None]
        made = TensorDict(found, batch_size=self.batch_size, device=self.device)
        return made if self._envs.copy else made.clone()


class _SpacesOnly(gymnasium.Env):  # type: ignore[misc]
    """An environment with spaces that does nothing."""

    def __init__(self, envs: SharedVectorEnv) -> None:
        self.observation_space, self.action_space = envs.single_observation_space, envs.single_action_space


def _wrap_one(envs: SharedVectorEnv, device: Any, is_categorical: bool) -> Any:
    """Returns torchrl's wrapper of one environment, which has the keys and specs of each.

    Raises:
        SpecError: torchrl cannot represent batches of a space.
    """
    try:
        one = GymWrapper(_SpacesOnly(envs), categorical_action_encoding=is_categorical, device=device)
        for specs in (one.observation_spec, one.full_action_spec):
            for key, spec in specs.items(True, True):
                if isinstance(spec, Stacked):
                    raise SpecError(f"{key!r} stacks spaces that differ")
        for space in (envs.single_observation_space, envs.single_action_space):
            _check_tuples(space)
        if not is_categorical:
            _check_starts(envs.single_observation_space)
        sample = copy.deepcopy(envs.single_observation_space).sample()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: a tuple of arrays is slow to convert
            TensorDict(one.read_obs(sample), batch_size=[])
            one.full_action_spec.rand()
    except Exception as error:
        seen, acted = envs.single_observation_space, envs.single_action_space
        raise SpecError(
            f"SharedVectorWrapper: torchrl cannot represent batches of the observation space {seen} or of the action "
            f"space {acted}: {error}"
        ) from error
    return one


def _check_tuples(space: gymnasium.Space[Any]) -> None:
    """Raises SpecError if a Tuple has a Dict.

    torchrl's environments confuse it with arrays.
    """
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        for each in space.values() if isinstance(space, spaces.Dict) else space:
            if isinstance(space, spaces.Tuple) and isinstance(each, spaces.Dict):
                raise SpecError("a Tuple has a Dict")
            _check_tuples(each)


def _check_starts(space: gymnasium.Space[Any]) -> None:
    """Raises SpecError for one-hot numbers that do not start at 0."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        for each in space.values() if isinstance(space, spaces.Dict) else space:
            _check_starts(each)
    elif np.any(getattr(space, "start", 0)):
        raise SpecError(f"{space} does not start at 0, and cannot be one-hot: pass categorical_action_encoding=True")


def _name_space(space: gymnasium.Space[Any], spec: Any) -> spaces.Dict:
    """Returns a Dict as it is, another space as a Dict of one.

    Its entry has the name in the spec.
    """
    return space if isinstance(space, spaces.Dict) else spaces.Dict(dict.fromkeys(spec, space))


def _names(space: spaces.Dict) -> Iterator[tuple[str, str]]:
    """Yields the keys of a Dict, and torchrl's names for them."""
    for key in space:
        yield key, "observation" if key == "state" and "observation" not in space.spaces else key


def _encode(space: gymnasium.Space[Any], one: Any, specs: Any, batch: Any) -> Any:
    """Returns observations of N environments as torchrl represents them.

    Args:
        space, one: of one environment, and its spec.
        specs: the spec of N environments.
        batch: what `SharedVectorEnv` returns.
    """
    if isinstance(space, spaces.Dict):
        return {name: _encode(space[key], one[name], specs[name], batch[key]) for key, name in _names(space)}
    if isinstance(one, NonTensor):
        return NonTensorStack(*_rows(space, batch))
    if not isinstance(space, (spaces.Tuple, spaces.Sequence)):
        return specs.encode(batch, ignore_device=True)
    try:
        return torch.stack([one.encode(np.asarray(row), ignore_device=True) for row in _rows(space, batch)])
    except (ValueError, RuntimeError) as error:
        raise SpecError(f"SharedVectorWrapper: torchrl cannot stack observations of {space}: {error}") from error


def _rows(space: gymnasium.Space[Any], batch: Any) -> Iterator[Any]:
    """Yields the observations of each environment."""
    if isinstance(space, spaces.Tuple):
        return zip(*(_rows(each, values) for each, values in zip(space, batch, strict=True)), strict=True)
    return iter(batch)


def _read_actions(space: gymnasium.Space[Any], spec: Any, values: Any) -> Any:
    """Returns actions of N environments as `SharedVectorEnv` takes them."""
    if isinstance(space, spaces.Dict):
        return {key: _read_actions(space[key], spec[name], values[name]) for key, name in _names(space)}
    if isinstance(spec, NonTensor):
        return [values] * spec.shape[0] if isinstance(values, str) else list(values)  # a str: all have the same
    actions = spec.to_numpy(values, safe=False)
    if isinstance(space, spaces.MultiDiscrete) and isinstance(spec, (Categorical, OneHot)) and actions.ndim == 1:
        return np.stack(np.unravel_index(actions, tuple(space.nvec)), -1)
    return _split(space, actions)


def _split(space: gymnasium.Space[Any], actions: np.ndarray) -> Any:
    """Splits actions (N, k, ...) of a Tuple of k spaces into k arrays.

    Returns actions of other spaces as they are.
    """
    if isinstance(space, spaces.Tuple):
        return tuple(_split(each, actions[:, k]) for k, each in enumerate(space))
    return actions
