"""`JaxEnv`: environments that are pure functions of jax, stepped together by compiled calls."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from rlstructs.checks import check_count
from rlstructs.envs.action_reader import ActionReader
from rlstructs.envs.jax_functions import JaxFunctions, as_functions
from rlstructs.envs.jax_trees import (
    arrays_of_tensors,
    check_like,
    check_start_method,
    describe,
    fold_rows,
    jax,
    make_keys,
    name_leaves,
    select_rows,
    tensor_of_jax,
    tensors_of_jax,
    trace,
)
from rlstructs.envs.observation_columns import FLAGS, refuse_reserved
from rlstructs.envs.row_env import NO_ROWS, CompiledRollout, CompiledSteps, RowDefaults, Step, step_pairs
from rlstructs.envs.spaces import list_leaves, nest
from rlstructs.envs.vec_env import NO_INFO
from rlstructs.errors import MissingKeyError, SpecError, StateError
from rlstructs.seeding import environment_seeds, next_stream
from rlstructs.shared.layout import Packing, Rows, Target
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.workers.public_names import set_module

jnp = jax.numpy
# Keys are folded with uint32 numbers, two for each step.
N_COUNTS = 2**31
# Bytes of a row from which on each step writes it where it stays. Smaller ones are transposed at the end, which costs
# less than scattered writes.
WIDE = 64


class Batch(NamedTuple):
    """E environments as arrays of jax.

    Attributes:
        keys: uint32 (E, 2), which the numbers of steps and resets are folded in.
        states: pytree of E rows.
    """

    keys: Any
    states: Any


@set_module("rlstructs")
class JaxEnv(RowDefaults):
    """Environments that are pure functions of jax.

    Each begins a new episode in the step that ends the last one.

    In `RL_Batcher`, with a `JaxAgent`, T steps of all of them are one compiled call. With any other agent, or in a
    wrapper, each step of all of them is one. Both give the same rows. Observations have the keys of `GymEnv`; dtypes
    are those of jax, so that a Discrete action is int32.

    Environment i has the key `jax.random.PRNGKey(seed_i)`. The n-th call of `reset` and `step`, counted from 0, gets
    `jax.random.fold_in(key, 2 * n)`, and the reset after an end in that step `jax.random.fold_in(key, 2 * n + 1)`.

    Args:
        env: a `JaxFunctions`, an environment of gymnax, a pair of one and its params, or an environment of Brax.
        n_envs: E.
        seed: as for `GymEnv`.

    Raises:
        ImportError: jax is missing.
        TypeError: `env` is something else.
        SpecError: its functions are not pure, their states or observations change their shapes, or a space is not
            supported.

    Example:
        >>> import gymnax
        >>> env = JaxEnv(gymnax.make("CartPole-v1"), n_envs=3, seed=0)
        >>> observation, running = env.reset()
        >>> observation["frame"].shape, observation["initial_state"].tolist()
        (torch.Size([3, 4]), [True, True, True])
    """

    def __init__(self, env: Any, n_envs: int, seed: int) -> None:
        check_start_method()
        self.functions = functions = as_functions(env)
        self._params = functions.params
        self._n = check_count("n_envs", n_envs)
        self.observation_space, self.action_space = functions.observation_space, functions.action_space
        self._last_actions = {f"last_{key}": spec for key, spec in _action_specs(functions).items()}
        self._shapes, frames = _find_shapes(functions)
        frames = {key: (leaf.shape or (1,), np.dtype(leaf.dtype)) for key, leaf in frames.items()}
        refuse_reserved(frames)
        for key, (_, dtype) in frames.items():
            if dtype.kind not in "biufc":
                raise SpecError(
                    f"{functions.name}: observation {key!r} is {dtype.name}, which numpy lacks; make it float32"
                )
        self._frames = list(frames)
        flags = {flag: ((), np.dtype(bool)) for flag in FLAGS}
        self._packing = Packing({**frames, "reward": ((), np.dtype(np.float32)), **flags, **self._last_actions})
        self._seeds, self._count = environment_seeds(seed, n_envs), 0
        self._keys = make_keys(self._seeds)
        self._batch: Batch | None = None

    def n_envs(self) -> int:
        """Number of environments, E."""
        return self._n

    def close(self) -> None:
        """Does nothing."""

    def example(self) -> Rows:
        """Zeros with the shapes of first observations."""
        return self._first_rows({}, self._n)

    def reset(self, env_info: DictTensor = NO_INFO) -> tuple[DictTensor, torch.Tensor]:
        """Starts an episode in every environment; `env_info` must be empty."""
        return self.reset_rows(env_info).tensors(), torch.arange(self._n, device="cpu")

    def step(self, action: DictTensor) -> tuple[tuple[DictTensor, torch.Tensor], tuple[DictTensor, torch.Tensor]]:
        """Steps all environments; see `VecEnv.step`.

        Args:
            action: `action`, or `action/<key>` for a structured space, E rows.

        Raises:
            StateError: it was not reset.
            MissingKeyError, SpecError: the action does not fit the action space.
        """
        return step_pairs(self.step_rows(action), torch.arange(self._n, device="cpu"))

    def reset_rows(self, env_info: DictTensor) -> Rows:
        if not env_info.empty():
            raise SpecError(f"env_info: environments in jax take none, got {sorted(env_info.keys())}; give them params")
        states, frames = _reset(self.functions, self._keys, 2 * self._take_counts(1), self._params)
        self._batch = Batch(self._keys, states)
        return self._first_rows(frames, self._n)

    def step_rows(self, action: DictTensor, target: Target | None = None) -> Step:
        batch, actions = self._running(), arrays_of_tensors(action)
        _check_actions(self._last_actions, {key: array.shape for key, array in actions.items()}, self._n)
        states, after, frames = _step(self.functions, batch, actions, self._take_counts(1), self._params)
        self._batch = Batch(batch.keys, states)
        rows = Rows.of(self._packing, {key: np.asarray(array) for key, array in after.items()})
        ended = np.flatnonzero(rows["done"])
        fresh = {key: np.asarray(array)[ended] for key, array in frames.items()}
        return (
            Step(rows, ended, self._first_rows(fresh, ended.size), None)
            if ended.size
            else Step(rows, NO_ROWS, None, None)
        )

    def compiled_rollout(self, agent: Any) -> CompiledRollout | None:
        policy = getattr(agent, "pure_policy", lambda: None)()
        return None if policy is None else partial(self._run, agent, policy)

    def _run(
        self, agent: Any, policy: Any, n_timesteps: int, observation: Rows, state: DictTensor, agent_info: DictTensor
    ) -> CompiledSteps:
        """Runs a rollout with an agent of pure functions; see `CompiledRollout`."""
        batch, count = self._running(), self._take_counts(n_timesteps)
        seen = {key: np.ascontiguousarray(array) for key, array in observation.arrays().items()}
        # The caller's guard is for arrays of his own.
        with jax.transfer_guard("allow"):
            (states, seen, after), steps = _run_steps(
                self.functions, policy, n_timesteps, batch, count, self._params, seen, arrays_of_tensors(state),
                agent.take_inputs(n_timesteps), arrays_of_tensors(agent_info),
            )  # fmt: skip
        self._batch = Batch(batch.keys, states)
        tensors = {name: tensor_of_jax(array) for name, array in steps.items()}
        following = Rows.of(self._packing, {key: np.asarray(array) for key, array in seen.items()})
        return CompiledSteps(tensors, following, tensors_of_jax(after))

    def get_state(self) -> Any:
        """Returns the state of all environments: seeds, number of steps, params and states."""
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(self._running().states)]
        # Numbers of Python stay what they are, because arrays in their place would be compiled anew.
        params = [
            leaf if isinstance(leaf, (bool, int, float)) else np.asarray(leaf) for leaf in jax.tree.leaves(self._params)
        ]
        return self._seeds, self._count, params, leaves

    def set_state(self, state: Any) -> None:
        """Goes on where `get_state` was called, in the same rows from there on."""
        self._seeds, self._count, params, leaves = state
        self._keys, self._params = make_keys(self._seeds), jax.tree.unflatten(jax.tree.structure(self._params), params)
        states = jax.tree.unflatten(jax.tree.structure(self._shapes), [jnp.asarray(leaf) for leaf in leaves])
        self._batch = Batch(self._keys, states)

    def _running(self) -> Batch:
        if self._batch is None:
            raise StateError("step: call reset first")
        return self._batch

    def _take_counts(self, n: int) -> np.uint32:
        """Takes the numbers of the next n steps or resets; returns the first one."""
        if self._count + n > N_COUNTS:
            self._seeds, self._count = [next_stream(one, 0) for one in self._seeds], 0
            self._keys = make_keys(self._seeds)
            self._batch = None if self._batch is None else Batch(self._keys, self._batch.states)
        first, self._count = np.uint32(self._count), self._count + n
        return first

    def _first_rows(self, frames: dict[str, Any], n: int) -> Rows:
        """Rows of first observations with these frames."""
        rows = Rows.zeros(self._packing, n)
        arrays = rows.arrays()
        arrays["initial_state"][...] = True
        for key, frame in frames.items():
            arrays[key][...] = np.asarray(frame)
        return rows


class JaxEnvs:
    """Makes `JaxEnv`s for `RL_Batcher.make`.

    All of a process have the same functions, which are compiled once.

    Args:
        env: see `JaxEnv`.
    """

    def __init__(self, env: Any) -> None:
        self._env = env

    def __call__(self, n_envs: int, seed: int) -> JaxEnv:
        """Makes the environments of a worker."""
        if not isinstance(self._env, JaxFunctions):
            self._env = as_functions(self._env)
        return JaxEnv(self._env, n_envs, seed)


def _action_specs(functions: JaxFunctions) -> dict[str, Any]:
    """Shapes and jax's dtypes of actions, by key."""
    leaves = list_leaves(functions.action_space, "action")
    return {ActionReader.key(leaf): (leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype)) for leaf in leaves}


def _find_shapes(functions: JaxFunctions) -> tuple[Any, dict[str, Any]]:
    """Traces the functions.

    Returns the shapes of a state, and those of an observation by name.

    Raises:
        SpecError: they are not pure, `step` changes shapes, or an observation has another shape than its space.
    """
    key = jax.ShapeDtypeStruct((2,), np.uint32)
    name, params = functions.name, functions.params
    first = _unpack(f"{name}: reset", trace(f"{name}: reset", functions.reset, key, params), ("state", "observation"))
    given = [jax.ShapeDtypeStruct(*spec) for spec in _action_specs(functions).values()]
    action = nest(functions.action_space, iter(given))
    found = trace(f"{name}: step", functions.step, key, first[0], action, params)
    parts = ("state", "observation", "reward", "terminated", "truncated", "info")
    after = _unpack(f"{name}: step", found, parts)
    check_like(f"{name}: the state that step returns", first[0], after[0])
    check_like(f"{name}: the observation that step returns", first[1], after[1])
    for part, each in zip(parts[2:5], after[2:5], strict=True):
        if getattr(each, "shape", None) != () or np.dtype(each.dtype).kind == "c":
            raise SpecError(f"{name}: step: {part} must be one real number, got {describe(each)}")
    frames = name_leaves(first[1], "frame")
    for leaf in list_leaves(functions.observation_space, f"{name}: observation"):
        found = frames.get(leaf.name, leaf)
        if (found.shape or (1,)) != (leaf.shape or (1,)):
            raise SpecError(f"{name}: reset: {leaf.describe()} has shape {found.shape}, its space {leaf.shape}")
    return first[0], frames


def _unpack(what: str, found: Any, parts: tuple[str, ...]) -> Any:
    if not isinstance(found, tuple) or len(found) != len(parts):
        got = f"{len(found)} values" if isinstance(found, tuple) else describe(found)
        raise SpecError(f"{what} must return ({', '.join(parts)}), got {got}")
    return found


def _check_actions(wanted: Any, shapes: dict[str, tuple[int, ...]], n: int) -> None:
    """Raises unless there are n actions with the shapes of these last actions."""
    for name, (shape, _) in wanted.items():
        key = name.removeprefix("last_")
        if key not in shapes:
            raise MissingKeyError(f"agent: no {key!r} in its output, there are {sorted(shapes)}")
        if shapes[key] != (n, *shape):
            raise SpecError(f"agent: output {key!r} has shape {shapes[key]}, expected {(n, *shape)}")


def _name_frames(observations: Any) -> dict[str, Any]:
    """The entries of E observations by name.

    Single numbers get an axis, as those of Discrete spaces have.
    """
    frames = name_leaves(observations, "frame")
    return {key: frame if frame.ndim > 1 else frame[:, None] for key, frame in frames.items()}


def _without_weak_types(states: Any) -> Any:
    """Gives states the types of arrays.

    Numbers of Python have weak types: a scan that begins with one and ends with the other is compiled twice.
    """
    return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, leaf.dtype), states)


def _reset_all(functions: JaxFunctions, keys: Any, count: Any, params: Any) -> tuple[Any, dict[str, Any]]:
    states, observations = jax.vmap(functions.reset, (0, None))(fold_rows(keys, count), params)
    return _without_weak_types(states), _name_frames(observations)


def _step_all(functions: JaxFunctions, batch: Batch, actions: Any, count: Any, params: Any) -> tuple[Any, Any, Any]:
    """Steps all environments, and resets those that have ended.

    Returns:
        The states; the columns of the step, final observations included; and the frames that are seen next.
    """
    specs = _action_specs(functions)
    given = {key: jnp.asarray(actions[key], dtype) for key, (_, dtype) in specs.items()}
    keys = fold_rows(batch.keys, 2 * count)
    results = jax.vmap(functions.step, (0, 0, 0, None))(
        keys, batch.states, nest(functions.action_space, iter(given.values())), params
    )
    states, observations, rewards, terminated, truncated, _ = results
    states = _without_weak_types(states)
    terminated, truncated, frames = terminated.astype(bool), truncated.astype(bool), _name_frames(observations)
    done = terminated | truncated

    def begin(_: None) -> Any:
        fresh = _reset_all(functions, batch.keys, 2 * count + 1, params)
        return select_rows(done, fresh, (states, frames))

    following = jax.lax.cond(done.any(), begin, lambda _: (states, frames), None)
    after = {
        **frames,
        "reward": rewards.astype(jnp.float32),
        "done": done,
        "terminated": terminated,
        "truncated": truncated,
        "initial_state": jnp.zeros_like(done),
        **{f"last_{key}": action for key, action in given.items()},
    }
    return following[0], after, following[1]


_reset, _step = (jax.jit(function, static_argnums=0) for function in (_reset_all, _step_all))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _run_steps(
    functions: JaxFunctions,
    policy: Any,
    n_timesteps: int,
    batch: Batch,
    count: Any,
    params: Any,
    seen: Any,
    state: Any,
    inputs: Any,
    agent_info: Any,
) -> Any:
    """Runs T steps of all environments in one scan.

    `policy` and `inputs` are the agent's.

    Returns:
        States of the environments, the next observation and the agent's state; and `observation/k`, `action/k`,
        `_observation/k` -> (E, T, ...).
    """

    def act_and_step(carried: Any, t: Any) -> Any:
        states, seen, state = carried
        output, state = policy(inputs, t, state, seen, agent_info)
        _check_actions({f"last_{key}": spec for key, spec in _action_specs(functions).items()},
                       {key: column.shape for key, column in output.items()}, len(seen["done"]))  # fmt: skip
        states, after, frames = _step_all(functions, Batch(batch.keys, states), output, count + t, params)
        none = {key: jnp.zeros_like(column) for key, column in after.items()}
        fresh = {**none, "initial_state": jnp.ones_like(after["done"])}
        following = {**select_rows(after["done"], fresh, after), **frames}
        parts = {"observation": seen, "action": output, "_observation": after}
        steps = {f"{part}/{key}": column for part, columns in parts.items() for key, column in columns.items()}
        return (states, following, state), steps

    def advance(carried: Any, t: Any) -> Any:
        carried, columns = carried
        carried, steps = act_and_step(carried, t)
        columns = {
            name: jax.lax.dynamic_update_index_in_dim(column, steps.pop(name), t, 1) for name, column in columns.items()
        }
        return (carried, columns), steps

    begun = batch.states, seen, state
    columns = _make_columns(jax.eval_shape(act_and_step, begun, jnp.uint32(0))[1], n_timesteps)
    (carried, columns), steps = jax.lax.scan(advance, (begun, columns), jnp.arange(n_timesteps, dtype=jnp.uint32))
    return carried, {**columns, **{name: column.swapaxes(0, 1) for name, column in steps.items()}}


def _make_columns(rows: dict[str, Any], n_timesteps: int) -> dict[str, Any]:
    """Makes columns (E, T, ...) for the wide ones of these rows.

    These are shapes of (E, ...).
    """
    return {
        name: jnp.zeros((row.shape[0], n_timesteps, *row.shape[1:]), row.dtype)
        for name, row in rows.items()
        if math.prod(row.shape[1:]) * row.dtype.itemsize >= WIDE
    }
