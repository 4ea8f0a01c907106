"""Plays what `ppo.py` has learned, in a window or a video. Not run by itself: `rlstructs play` loads it.

    python examples/ppo.py --save policy.pt
    rlstructs play CartPole-v1 --agent examples.play_ppo:agent --video ppo.mp4

`agent` is what `rlstructs play` and `rlstructs collect` call in their workers. It reads `policy.pt` (the environment
variable `PPO_POLICY` names another file), and normalises what it sees as the training did:

    episode 1: return 500.00, 500 steps
    wrote ppo.mp4
"""

from __future__ import annotations

import os

import gymnasium
import torch

from examples.ppo import ActorCritic
from rlstructs import DictTensor, RL_Agent


class Player(RL_Agent):
    """Takes the most likely actions of a policy that has learned from normalised observations."""

    def __init__(self, network: ActorCritic, mean: torch.Tensor, variance: torch.Tensor, limits=None) -> None:
        self.network, self.mean, self.deviation, self.limits = network, mean, (variance + 1e-8).sqrt(), limits

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        frame = (observation["frame"] - self.mean) / self.deviation
        action = self.network.policy(frame.clamp(-10, 10).float()).mode
        return DictTensor({"action": action if self.limits is None else action.clamp(*self.limits)}), state


def agent(observation_space: gymnasium.spaces.Box, action_space: gymnasium.Space) -> Player:
    """What was saved, for these spaces."""
    path = os.environ.get("PPO_POLICY", "policy.pt")
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: no such file, first run python examples/ppo.py --save {path}")
    saved = torch.load(path, weights_only=True)
    is_discrete = isinstance(action_space, gymnasium.spaces.Discrete)
    n_actions = int(action_space.n if is_discrete else action_space.shape[0])
    network = ActorCritic(observation_space.shape[0], n_actions, is_discrete)
    network.load_state_dict(saved["network"])
    seen = saved["batcher"]["statistics"]["observation/frame"]
    limits = None if is_discrete else (torch.from_numpy(action_space.low), torch.from_numpy(action_space.high))
    return Player(network, seen["mean"], seen["m2"] / seen["count"], limits)
