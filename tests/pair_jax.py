"""The environment and the agent of `pair_worlds.py` as pure functions of jax.

A reset knows nothing of the episodes before it. The number of an episode is what was folded in the key of its reset:
2 n for a reset at count n, 2 n + 1 for one that follows the end of an episode in the step of count n.
"""

from __future__ import annotations

import os
import signal
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from pair_worlds import ACTION_SPACES, FACTOR, FIELDS, LIMIT, length_of, observation_space

from rlstructs import JaxAgent, JaxEnv
from rlstructs.envs import JaxFunctions
from rlstructs.seeding import environment_seeds

# More than are folded in a key in any case.
N_FOLDED = 512
# Schrage's way to multiply modulo 2**31 - 1 with 32 bits.
QUOTIENT, REMAINDER = divmod(LIMIT, FACTOR)


def checksum(*parts):
    """As that of `pair_worlds`, of int32."""
    total = jnp.int32(0)
    for part in parts:
        scaled = FACTOR * (total % QUOTIENT) - REMAINDER * (total // QUOTIENT)
        scaled = jnp.where(scaled < 0, scaled + LIMIT, scaled).astype(jnp.uint32)
        total = ((scaled + jnp.uint32(part) + jnp.uint32(12_345)) % jnp.uint32(LIMIT)).astype(jnp.int32)
    return total % (1 << 20)


def code_of(action, kind):
    if kind == "dict":
        return code_of(action["move"], "discrete") * 512 + code_of(action["force"], "box")
    if kind == "discrete":
        return action.astype(jnp.int32)
    if kind == "multi":
        return action[0] * 4 + action[1]
    steps = jnp.rint(action * 8).astype(jnp.int32) + 8
    return steps[0] * 17 + steps[1]


def observe(shows, numbers):
    if shows == "numbers":
        return numbers
    index, _, episode, step, draw, option, check = numbers.astype(jnp.float32)
    features = jnp.stack([draw / 64, step - episode / 8, index + option, check / 4096])
    image = (numbers[jnp.array([[0, 2], [3, 4], [5, 6]])] % 251).astype(jnp.uint8)
    return {"book": numbers, "x": features, "inner": {"step": numbers[3], "image": image}}


def note(state, code, key):
    told = *(state[name] for name in FIELDS[:4]), jax.random.randint(key, (), 0, 1 << 16), jnp.int32(0)
    return jnp.stack([*told, checksum(*told, code)])


def reset(shows, key, params):
    found = (params["folded"] == key).all(-1)
    k = found.any(1).argmax()
    state = {"index": params["first"] + k, "generation": params["generation"], "episode": found[k].argmax(), "step": 0}
    state = {name: jnp.int32(value) for name, value in state.items()}
    return state, observe(shows, note(state, 0, key))


def fail(how, now):
    if now and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if now:
        raise RuntimeError("told to fail")
    return np.float32(0)


def step(shows, acts, fails, key, state, action, params):
    state = state | {"step": state["step"] + 1}
    index, episode, n = (state[name] for name in ("index", "episode", "step"))
    is_over = n == length_of(index, episode)
    has_terminated = is_over & ((index + episode) % 2 == 0)
    reward = n + index / 4
    if fails:  # in the last environment
        now = (episode // 2 + n == fails[1]) & (index == params["first"] + len(params["folded"]) - 1)
        told = jax.ShapeDtypeStruct((), np.float32)
        reward += jax.pure_callback(partial(fail, fails[0]), told, now, vmap_method="sequential")
    seen = observe(shows, note(state, code_of(action, acts) + 1, key))
    return state, seen, reward, has_terminated, is_over & ~has_terminated, {}


def fold(keys):
    return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(keys, jnp.arange(N_FOLDED))


def make_env(first, generation, shows, acts, fails, n_envs, seed):
    keys = jnp.stack([jax.random.PRNGKey(one) for one in environment_seeds(seed, n_envs)])
    params = {"folded": np.asarray(fold(keys)), "first": np.int32(first), "generation": np.int32(generation)}
    functions = JaxFunctions(
        partial(reset, shows), partial(step, shows, acts, fails), observation_space(shows), ACTION_SPACES[acts], params,
        "told",
    )  # fmt: skip
    return JaxEnv(functions, n_envs, seed)


def draw_action(acts, key):
    """A random action; the force is on the grid that books know."""
    first, second = jax.random.split(key)
    force = jax.random.randint(first, (2,), -8, 9) / 8
    if acts == "discrete":
        return jax.random.randint(first, (), 2, 7)
    if acts == "multi":
        return jax.random.randint(first, (2,), 0, jnp.array([3, 4]))
    return force if acts == "box" else {"move": jax.random.randint(second, (), 0, 3), "force": force}


def act(acts, params, state, observation, key, agent_info):
    """Acts at random; tells what it was given, and counts the steps of the episode."""
    told = {name: agent_info[name] for name in ("offset",) if name in agent_info}
    told |= {"action": draw_action(acts, key), "version": params["version"], "n": state["n"]}
    return told, {"n": state["n"] + 1}


def make_agent(acts):
    return JaxAgent(partial(act, acts), {"version": np.int32(0)}, {"n": np.int32(0)})
