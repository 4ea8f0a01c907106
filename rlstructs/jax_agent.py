"""`JaxAgent`: an agent of pure functions of jax."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from rlstructs.agent import RL_Agent
from rlstructs.envs.action_reader import ActionReader
from rlstructs.envs.jax_trees import (
    arrays_of_tensors,
    check_like,
    describe,
    fold_rows,
    jax,
    make_keys,
    name_leaves,
    select_rows,
    tensors_of_jax,
    trace,
)
from rlstructs.envs.spaces import list_leaves
from rlstructs.errors import SpecError
from rlstructs.seeding import agent_seed, environment_seeds
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.workers.public_names import set_module

jnp = jax.numpy
# Keys are folded with the number of the step, a uint32.
N_COUNTS = 2**32


@dataclass(frozen=True)
class Policy:
    """The pure function of an agent, for all environments.

    Two of the same function are equal, and compiled once.

    Attributes:
        act: see `JaxAgent`.
        takes_info: whether `act` takes an `agent_info`.
    """

    act: Callable[..., Any]
    takes_info: bool

    def __call__(self, inputs: Any, t: Any, state: Any, observation: Any, agent_info: Any) -> tuple[Any, Any]:
        """Acts at the t-th step of a call.

        Returns output and next state, arrays of B rows by name.

        Args:
            inputs: what `JaxAgent.take_inputs` returned.
            t, state, observation, agent_info: the step, and arrays of B rows by name.
        """
        params, initial, keys, count = inputs
        n, shapes = len(keys), jax.tree.structure(initial)
        begun = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (n, *leaf.shape)), initial)
        before = jax.tree.unflatten(shapes, list(state.values()))
        if "initial_state" in observation:
            before = select_rows(observation["initial_state"], begun, before)
        act = self.act if self.takes_info else lambda *given: self.act(*given[:4])
        drawn = fold_rows(keys, count + t)
        output, after = jax.vmap(act, (None, 0, 0, 0, 0))(params, before, observation, drawn, agent_info)
        return _name_output(output), name_leaves(after, "state")


def _as_numpy(what: str, tree: Any) -> Any:
    """Returns a pytree with arrays of numpy in dtypes of jax.

    They are copied and pickled without a device.
    """

    def convert(path: Any, leaf: Any) -> np.ndarray:
        array = np.asarray(leaf)
        if array.dtype.kind in "OSUM":
            where = f"{what}{jax.tree_util.keystr(path)}"
            raise SpecError(f"JaxAgent: {where} is a {type(leaf).__name__}, expected an array or a number")
        return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)

    return jax.tree_util.tree_map_with_path(convert, jax.device_get(tree))


def _name_output(output: Any) -> dict[str, Any]:
    named = name_leaves(output, "action")
    if "action" not in (key.split("/")[0] for key in named):
        raise SpecError(f"agent: no 'action' in its output, there are {sorted(named)}")
    return named


_act = jax.jit(lambda policy, *arguments: policy(*arguments), static_argnums=0)


@set_module("rlstructs")
class JaxAgent(RL_Agent):
    """An agent that is a pure function of jax.

    In environments of jax (`JaxEnv`) its whole rollout is one compiled call; in all others each of its steps is one.

    Args:
        act: `act(params, state, observation, key) -> (action, state)` for one environment, compiled for all. The
            observation is a dict with the keys of `GymEnv`, such as `observation["frame"]`; the action an array, or a
            dict with the `action` and whatever else is to be recorded, such as its `log_prob`. It may have a fifth
            argument, `agent_info`, a dict. Row by row it gives the same actions whatever the number of workers.
        params: a pytree; `update` replaces it by another with the same shapes and dtypes.
        state: the state of one environment at the beginning of an episode, a pytree of arrays; None for none. It is put
            back in each environment whose episode begins.

    Raises:
        ImportError: jax is missing.
        SpecError: a leaf of `params` or `state` is no array or number; or, at the first step, `act` is not pure, gives
            no action, or changes the shape of the state.

    Example:
        >>> import jax
        >>> def act(params, state, observation, key):
        ...     logits = observation["frame"] @ params
        ...     action = jax.random.categorical(key, logits)
        ...     return {"action": action, "log_prob": jax.nn.log_softmax(logits)[action]}, state
        >>> import gymnax
        >>> from rlstructs import RL_Batcher
        >>> agent = JaxAgent(act, jax.numpy.zeros((4, 2)))
        >>> with RL_Batcher.make(
        ...     gymnax.make("CartPole-v1"), agent, n_envs=8, n_workers=0, n_timesteps=5, seed=0
        ... ) as batcher:
        ...     trajectories = next(iter(batcher))
        >>> trajectories.trajectories["action/log_prob"].shape
        torch.Size([8, 5])
    """

    #: It copies what it gets to jax.
    takes_views: ClassVar[bool] = True

    def __init__(self, act: Callable[..., Any], params: Any = None, state: Any = None) -> None:
        self._policy = Policy(act, "agent_info" in inspect.signature(act).parameters)
        self._params, self._state = _as_numpy("params", params), _as_numpy("state", state)
        self._streams, self._keys, self._count = (0, 0), np.zeros((0, 2), np.uint32), 0
        self._is_checked = False

    def pure_policy(self) -> Policy | None:
        """The function that a compiled rollout calls.

        None for a subclass with steps of its own.
        """
        return self._policy if type(self).__call__ is JaxAgent.__call__ else None

    def seed(self, seed: int) -> None:
        """Begins new random streams, one for each environment."""
        self._streams, self._keys, self._count = (seed, 0), np.zeros((0, 2), np.uint32), 0

    def initial_state(self, agent_info: DictTensor, B: int) -> DictTensor:
        """The initial state, B rows."""
        self._make_more_keys(B)
        named = name_leaves(self._state, "state")
        return tensors_of_jax({key: np.broadcast_to(leaf, (B, *leaf.shape)) for key, leaf in named.items()})

    def __call__(
        self,
        state: DictTensor,
        observation: DictTensor,
        agent_info: DictTensor,
        history: TemporalDictTensor | None = None,
    ) -> tuple[DictTensor, DictTensor]:
        """Acts for one step, for all environments or for some of them."""
        given = [arrays_of_tensors(each) for each in (state, observation, agent_info)]
        if not self._is_checked:
            self._check(*given)
        self._make_more_keys(n := observation.n_elems())
        # The number of rows stays the same, because another one would be compiled anew.
        if (missing := len(self._keys) - n) > 0:
            given = [{key: np.pad(a, [(0, missing), *[(0, 0)] * (a.ndim - 1)]) for key, a in each.items()}
                     for each in given]  # fmt: skip
        found = _act(self._policy, self.take_inputs(1), np.uint32(0), *given)
        output, after = (tensors_of_jax({key: np.asarray(each)[:n] for key, each in part.items()}) for part in found)
        return output, after

    def take_inputs(self, n_timesteps: int) -> Any:
        """Takes what this many steps need.

        These are params, initial state, keys and the number of the first step.
        """
        if self._count + n_timesteps > N_COUNTS:
            self._streams, self._count = (self._streams[0], self._streams[1] + 1), 0
            self._make_keys(len(self._keys))
        first, self._count = np.uint32(self._count), self._count + n_timesteps
        return self._params, self._state, self._keys, first

    def update(self, info: Any) -> None:
        """Takes new params."""
        try:
            params = jax.tree.map(lambda old, new: np.asarray(new, old.dtype), self._params, info)
        except ValueError as error:
            structures = f"got {jax.tree.structure(info)}, expected {jax.tree.structure(self._params)}"
            raise SpecError(f"update: params of another structure: {structures}") from error
        check_like("update: params", self._params, params)
        self._params = params

    def get_state(self) -> Any:
        """Returns params, and the state of the random streams."""
        return self._params, self._streams, len(self._keys), self._count

    def set_state(self, state: Any) -> None:
        """Goes on with what `get_state` returned."""
        self._params, self._streams, n, self._count = state
        self._make_keys(n)

    def copy_for_evaluation(self) -> JaxAgent:
        """Returns a copy that shares the params, which nobody writes to."""
        return copy.copy(self)

    def _make_more_keys(self, n: int) -> None:
        if len(self._keys) < n:
            self._make_keys(n)

    def _make_keys(self, n: int) -> None:
        """Makes the keys of n environments.

        The streams are their seed, and how many were used up.
        """
        seed, number = self._streams
        self._keys = make_keys([agent_seed(one, number) for one in environment_seeds(seed, n)])

    def _check(self, state: Any, observation: Any, agent_info: Any) -> None:
        """Traces `act` for one environment."""
        rows = [{key: jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for key, array in each.items()}
                for each in (observation, agent_info)]  # fmt: skip
        key, policy = jax.ShapeDtypeStruct((2,), np.uint32), self._policy
        more = rows[1:] if policy.takes_info else []
        found = trace("agent: act", policy.act, self._params, self._state, rows[0], key, *more)
        if not isinstance(found, tuple) or len(found) != 2:
            raise SpecError(f"agent: act must return (action, state), got {describe(found)}")
        _name_output(found[0])
        check_like("agent: the state that act returns", self._state, found[1])
        self._is_checked = True


def make_random_agent(action_space: gymnasium.Space[Any]) -> JaxAgent:
    """Makes an agent that draws each action from its space, as `RandomAgent` does."""
    return JaxAgent(partial(_act_randomly, _Draws(action_space)))


@dataclass(frozen=True)
class _Draws:
    """An action space, whose equality is that of the space."""

    space: gymnasium.Space[Any]

    def __hash__(self) -> int:
        return hash(str(self.space))


def _act_randomly(draws: _Draws, params: Any, state: Any, observation: Any, key: Any) -> tuple[Any, Any]:
    leaves = list_leaves(draws.space, "action")
    keys = jax.random.split(key, len(leaves)) if len(leaves) > 1 else [key]
    drawn = [_draw(leaf, each) for leaf, each in zip(leaves, keys, strict=True)]
    return {ActionReader.key(leaf): each for leaf, each in zip(leaves, drawn, strict=True)}, state


def _draw(leaf: Any, key: Any) -> Any:
    """Draws one leaf of an action space."""
    space, dtype = leaf.space, jax.dtypes.canonicalize_dtype(leaf.dtype)
    if isinstance(space, spaces.Discrete):
        return jax.random.randint(key, (), int(space.start), int(space.start + space.n), dtype)
    if isinstance(space, spaces.MultiDiscrete):
        return jax.random.randint(key, space.shape, space.start, space.start + space.nvec, dtype)
    if isinstance(space, spaces.MultiBinary):
        return jax.random.bernoulli(key, 0.5, space.shape).astype(dtype)
    if dtype.kind in "iu":
        return jax.random.randint(key, space.shape, space.low, space.high.astype(np.int64) + 1).astype(dtype)
    below, above = space.bounded_below, space.bounded_above
    low, high = np.where(below, space.low, 0), np.where(above, space.high, 0)
    uniform = low + (high - low) * jax.random.uniform(key, space.shape)
    tail = jax.random.exponential(key, space.shape)
    free = jnp.where(below, low + tail, jnp.where(above, high - tail, jax.random.normal(key, space.shape)))
    return jnp.where(below & above, uniform, free).astype(dtype)
