"""Compares what `ParallelEnvs` hands out of PettingZoo's own environments with a loop over each of them.

    python tests/integrations/fifteen_environments.py [--steps 10000] [--names pursuit_v5 chess_v6]

For each environment it prints how many steps of how many agents were equal. Needs mpe2, and what pettingzoo's extras
`classic`, `sisl` and `butterfly` have; says which environments it could not import.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections import deque
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from guests import record, streams_of

from rlstructs import DictTensor, RandomAgent, RL_Agent, RL_Batcher
from rlstructs.integrations.pettingzoo import ParallelEnvs

# Module -> whether its observations have an action mask.
NAMES = {
    "mpe2.simple_v3": False, "mpe2.simple_spread_v3": False, "mpe2.simple_reference_v3": False,
    "mpe2.simple_line_v1": False, "mpe2.simple_formation_v1": False,
    "pettingzoo.classic.tictactoe_v3": True, "pettingzoo.classic.connect_four_v3": True,
    "pettingzoo.classic.chess_v6": True, "pettingzoo.classic.rps_v2": False,
    "pettingzoo.classic.leduc_holdem_v4": True,
    "pettingzoo.sisl.multiwalker_v9": False, "pettingzoo.sisl.pursuit_v5": False,
    "pettingzoo.butterfly.pistonball_v6": False, "pettingzoo.butterfly.cooperative_pong_v6": False,
    "pettingzoo.butterfly.knights_archers_zombies_v11": False,
}  # fmt: skip
N_ENVS, N_TIMESTEPS, SEED = 2, 32, 7


class LegalAgent(RL_Agent):
    """Draws legal actions; any where there are none, because another agent's turn is."""

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        mask = observation["action_mask"].float()
        mask[mask.sum(dim=1) == 0] = 1
        return DictTensor({"action": torch.multinomial(mask, 1)[:, 0]}), state


def maker_of(name):
    module = importlib.import_module(name)
    return getattr(module, "parallel_env", None) or module.env


class Rollouts:
    """The steps of each slot, from rollouts that are run when they are asked for."""

    def __init__(self, batcher, n_rollouts):
        self.batcher, self.left = batcher, n_rollouts
        self.queues = [deque() for _ in range(batcher.n_elems())]
        batcher.reset()

    def stream(self, slot):
        while True:
            while self.queues[slot]:
                yield self.queues[slot].popleft()
            if not self.left:
                return
            self.left -= 1
            self.batcher.execute()
            for queue, own in zip(self.queues, streams_of([self.batcher.get()[0]], len(self.queues)), strict=True):
                queue += own


def compare(name, has_mask, n_steps):
    """Compares so many steps of one environment of two; returns how many of its agents were equal."""
    make = maker_of(name)

    def create_env(seed):
        return ParallelEnvs([make] * N_ENVS, seed)

    def create_agent():
        probe = ParallelEnvs([make], 0)
        found = LegalAgent() if has_mask else RandomAgent(probe.action_space)
        probe.close()
        return found

    probe = ParallelEnvs([make], 0)
    env, n_agents, is_discrete = probe._groups[0].env, len(probe.agents), hasattr(probe.action_space, "n")
    frames = [leaf.name for leaf in probe._after._leaves.values()]
    with RL_Batcher(N_TIMESTEPS, create_agent, {}, create_env, {}, 0, [SEED]) as batcher:
        rollouts = Rollouts(batcher, -(-n_steps // N_TIMESTEPS))
        # The second environment, whose steps come after those of the first in each rollout.
        streams = [rollouts.stream(n_agents + agent) for agent in range(n_agents)]
        n = record(env, SEED + 1, streams, int if is_discrete else np.asarray, frames)
        left = sum(map(len, rollouts.queues[n_agents:]))
    probe.close()
    assert not left, f"{left} steps were not compared"
    return n, n_agents


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--names", nargs="+", default=[name.split(".")[-1] for name in NAMES])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    torch.set_num_threads(1)
    for name, has_mask in NAMES.items():
        if name.split(".")[-1] in arguments.names:
            try:
                maker_of(name)
            except ImportError as error:
                print(f"{name}: {error}", flush=True)
                continue
            n, n_agents = compare(name, has_mask, arguments.steps)
            print(f"{name}: {arguments.steps} steps, {n_agents} agents, {n} transitions, all equal", flush=True)


if __name__ == "__main__":
    main()
