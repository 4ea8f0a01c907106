"""Proximal policy optimisation with environments, agents and learner in jax: a rollout is one compiled call.

    python examples/ppo_compiled.py --seed 1

The learner and the arguments are those of `ppo_jax.py`. Environments are gymnax's, observations and rewards as they
are, and the agent is a function of one environment: `RL_Batcher` compiles T steps of all environments of a worker. It
needs `pip install -e '.[jax-envs]'`, and prints at the end the mean return of `--n-eval` episodes in which the policy
takes its most likely action. The steps per second include the first rollout, which compiles:

    CartPole-v1: score 500.0, 200704 steps, 12693 steps/s, 64% of the time waiting for rollouts
"""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnax
import jax
import jax.numpy as jnp
from ppo_jax import Params, layers, main, parse_args

from rlstructs import JaxAgent, JaxEnv, VecEnv


def act(params: Params, state: Any, observation: Any, key: jax.Array, agent_info: Any) -> tuple[Any, Any]:
    """Draws an action; takes the most likely one where `agent_info` says `greedy`."""
    log_probs = jax.nn.log_softmax(layers(observation["frame"], params["actor"], jnp))
    noise = jnp.where(agent_info["greedy"], 0, jax.random.gumbel(key, log_probs.shape))
    action = (log_probs + noise).argmax()
    return {"action": action, "log_prob": log_probs[action]}, state


def create_env(env_id: str, n_envs: int, gamma: float, seed: int) -> VecEnv:
    return JaxEnv(gymnax.make(env_id), n_envs, seed)


if __name__ == "__main__":
    main(parse_args(__doc__), partial(JaxAgent, act), create_env)
