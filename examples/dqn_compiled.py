"""Double Q-learning with environments, agents, learner and memory in jax: a rollout is one compiled call.

    python examples/dqn_compiled.py --seed 1

The learner, the memory and the arguments are those of `jax_dqn.py`. Environments are gymnax's, and `RL_Batcher`
compiles T steps of all of them and of the agent. It needs `pip install -e '.[jax-envs]'`, and prints at the end the
mean return of `--n-eval` episodes in which no action is random. Random ones return 0.4 on Breakout:

    Breakout-MinAtar: score 12.4, 300032 steps, 994 steps/s
"""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnax
import jax
import jax.numpy as jnp
from jax_dqn import Args, Params, main, parse_args, q_values

from rlstructs import JaxAgent, JaxEnv, VecEnv

BREAKOUT = Args(
    env_id="Breakout-MinAtar", n_steps=300_000, n_processes=0, n_envs=64, n_timesteps=4, memory_size=100_000,
    n_before=5_000, n_between_copies=500, batch_size=64, learning_rate=5e-4, last_epsilon=0.02,
)  # fmt: skip


def act(params: Params, state: Any, observation: Any, key: jax.Array, agent_info: Any) -> tuple[jax.Array, Any]:
    """The best action, or with the probability `epsilon` of `agent_info` any."""
    chance, choice = jax.random.split(key)
    [values] = q_values(params, observation["frame"][None])
    explores = jax.random.uniform(chance) < agent_info["epsilon"]
    return jnp.where(explores, jax.random.randint(choice, (), 0, len(values)), values.argmax()), state


def create_env(env_id: str, n_envs: int, seed: int) -> VecEnv:
    return JaxEnv(gymnax.make(env_id), n_envs, seed)


if __name__ == "__main__":
    main(parse_args(__doc__, BREAKOUT), partial(JaxAgent, act), create_env)
