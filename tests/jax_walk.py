"""An environment and an agent of pure functions, which compile quickly, for the tests of compiled rollouts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from rlstructs import DictTensor, JaxAgent, JaxEnv, RL_Batcher
from rlstructs.envs import JaxFunctions

LIMIT = 9


def reset(key, params):
    at = jax.random.randint(key, (), 1, 5)
    # A number of Python has a weak type.
    return {"at": at, "n": jnp.int32(0), "one": 1.0}, {"at": at, "wide": jnp.full(3, at, jnp.float32)}


def step(key, state, action, params):
    at, n = state["at"] + 2 * action["way"] - 1, state["n"] + 1
    noise = jax.random.uniform(key, (3,))
    seen = {"at": at, "wide": at + noise + action["push"].sum()}
    return (
        {"at": at, "n": n, "one": state["one"] + 0 * noise[0]},
        seen,
        at * params["scale"],
        (at <= 0) | (at >= 6),
        n >= LIMIT,
        {},
    )


WALK = JaxFunctions(
    reset,
    step,
    spaces.Dict({"at": spaces.Discrete(7), "wide": spaces.Box(-9, 9, (3,))}),
    spaces.Dict({"way": spaces.Discrete(2), "push": spaces.Box(-1, 1, (2,))}),
    {"scale": np.float32(0.5)},
    "walk",
)
PARAMS = {"w": np.float32(0.3), "layers": (np.ones((3, 2), np.float32),)}


def act(params, state, observation, key, agent_info):
    """Remembers what it has seen, and how often it has acted in this episode."""
    seen, n = 0.5 * state["seen"] + observation["wide"], state["n"] + 1
    drawn = jax.random.normal(key, (2,)) + (seen @ params["layers"][0]) * params["w"] + observation["reward"]
    way = (drawn.sum() + agent_info["bias"] > 0).astype(int)
    return {"action": {"way": way, "push": jnp.tanh(drawn)}, "n": n}, {"seen": seen, "n": n}


def make_agent(cls=JaxAgent):
    return cls(act, PARAMS, {"seen": np.zeros(3, np.float32), "n": np.int32(0)})


class Stepping(JaxAgent):
    """Acts step by step: its class has a call of its own."""

    def __call__(self, state, observation, agent_info, history=None):
        return super().__call__(state, observation, agent_info, history)


def make_batcher(n_workers=0, n_envs=4, n_timesteps=7, cls=JaxAgent, seed=3, **settings):
    n = n_envs // max(1, n_workers)
    return RL_Batcher(
        n_timesteps, make_agent, {"cls": cls}, lambda seed: JaxEnv(WALK, n, seed), {}, n_workers, seed,
        agent_info=DictTensor({"bias": np_tensor([0.0])}), **settings,
    )  # fmt: skip


def np_tensor(values):
    import torch

    return torch.tensor(values)


def bias(n=4, value=0.0):
    return DictTensor({"bias": np_tensor([value] * n)})
