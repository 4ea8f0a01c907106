"""Short trainings in the manner of CleanRL's `dqn.py`, `sac_continuous_action.py` and `ppo.py`.

Each function is one such script; it takes what the page "Your program, one line changed" changes: the vector
environment and the replay buffer. It returns all that came from the environments, and all weights. As CleanRL's scripts
expect it, environments are reset in the step that ends an episode.
"""

from __future__ import annotations

import copy
import itertools
import random

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn.functional import mse_loss

SAME_STEP = gym.vector.AutoresetMode.SAME_STEP
GAMMA = 0.99


def make_env(env_id, seed):
    def make():
        env = gym.wrappers.RecordEpisodeStatistics(gym.make(env_id, max_episode_steps=25, disable_env_checker=True))
        env.action_space.seed(seed)
        return env

    return make


def start(vector_env, env_id, n_envs, seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return vector_env([make_env(env_id, seed + i) for i in range(n_envs)], autoreset_mode=SAME_STEP)


def mlp(*sizes):
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def true_next(observations, truncations, infos):
    """The observations after a step; where an episode was truncated, the last of that episode."""
    real = observations.copy()
    for i, truncated in enumerate(truncations):
        if truncated:
            real[i] = infos["final_obs"][i]
    return real


def returns(infos):
    """The returns of the episodes that a step ended."""
    return infos["final_info"]["episode"]["r"][infos["_final_info"]] if "final_info" in infos else np.zeros(0)


def descend(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def move_towards(target, network, tau):
    for old, new in zip(target.parameters(), network.parameters(), strict=True):
        old.data.copy_(tau * new.data + (1 - tau) * old.data)


def results(envs, seen, *networks):
    envs.close()
    return [*seen, *(parameter.detach().numpy() for network in networks for parameter in network.parameters())]


def dqn(vector_env, replay_buffer, seed=1, n_steps=240, n_before=60):
    envs = start(vector_env, "CartPole-v1", 1, seed)
    network = mlp(envs.single_observation_space.shape[0], 32, envs.single_action_space.n)
    target, optimizer = copy.deepcopy(network), torch.optim.Adam(network.parameters(), 1e-3)
    buffer = replay_buffer(
        300, envs.single_observation_space, envs.single_action_space, "cpu", handle_timeout_termination=False
    )
    seen = []
    observations, _ = envs.reset(seed=seed)
    for step in range(n_steps):
        if random.random() < max(1 - step / 120, 0.05):
            actions = np.array([envs.single_action_space.sample() for _ in range(envs.num_envs)])
        else:
            actions = network(torch.Tensor(observations)).argmax(1).numpy()
        following, rewards, terminations, truncations, infos = envs.step(actions)
        real = true_next(following, truncations, infos)
        buffer.add(observations, real, actions, rewards, terminations, infos)
        seen += [real, rewards, returns(infos)]
        observations = following
        if step > n_before and step % 4 == 0:
            data = buffer.sample(32)
            with torch.no_grad():
                best = target(data.next_observations).max(1).values
                wanted = data.rewards.flatten() + GAMMA * best * (1 - data.dones.flatten())
            descend(optimizer, mse_loss(wanted, network(data.observations).gather(1, data.actions).squeeze()))
        if step % 50 == 0:
            move_towards(target, network, 1.0)
    return results(envs, seen, network)


class Actor(nn.Module):
    def __init__(self, n_observations, space):
        super().__init__()
        self.body = mlp(n_observations, 32, 2 * space.shape[0])
        self.scale = torch.tensor((space.high - space.low) / 2, dtype=torch.float32)
        self.middle = torch.tensor((space.high + space.low) / 2, dtype=torch.float32)

    def forward(self, observations):
        mean, log_std = self.body(observations).chunk(2, 1)
        normal = Normal(mean, (log_std.tanh() * 3.5 - 1.5).exp())
        raw = normal.rsample()
        squashed = raw.tanh()
        log_probs = normal.log_prob(raw) - torch.log(self.scale * (1 - squashed**2) + 1e-6)
        return squashed * self.scale + self.middle, log_probs.sum(1, keepdim=True)


def sac(vector_env, replay_buffer, seed=1, n_steps=100, n_before=40, n_envs=2):
    envs = start(vector_env, "InvertedPendulum-v5", n_envs, seed)
    n_observations, n_actions = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    actor = Actor(n_observations, envs.single_action_space)
    critics = nn.ModuleList(mlp(n_observations + n_actions, 32, 1) for _ in range(2))
    targets = copy.deepcopy(critics)
    optimizers = [torch.optim.Adam(module.parameters(), 1e-3) for module in (critics, actor)]
    log_alpha = torch.zeros(1, requires_grad=True)
    alpha_optimizer = torch.optim.Adam([log_alpha], 1e-3)
    envs.single_observation_space.dtype = np.float32
    buffer = replay_buffer(
        300, envs.single_observation_space, envs.single_action_space, "cpu", n_envs=n_envs,
        handle_timeout_termination=False,
    )  # fmt: skip
    seen = []
    observations, _ = envs.reset(seed=seed)
    for step in range(n_steps):
        if step < n_before:
            actions = np.array([envs.single_action_space.sample() for _ in range(n_envs)])
        else:
            actions = actor(torch.Tensor(observations))[0].detach().numpy()
        following, rewards, terminations, truncations, infos = envs.step(actions)
        real = true_next(following, truncations, infos)
        buffer.add(observations, real, actions, rewards, terminations, infos)
        seen += [real, rewards, returns(infos)]
        observations = following
        if step <= n_before:
            continue
        data, alpha = buffer.sample(32), log_alpha.exp().item()
        with torch.no_grad():
            actions, log_probs = actor(data.next_observations)
            pairs = torch.cat([data.next_observations, actions], 1)
            best = torch.min(*(target(pairs) for target in targets)) - alpha * log_probs
            wanted = data.rewards + (1 - data.dones) * GAMMA * best
        pairs = torch.cat([data.observations, data.actions], 1)
        descend(optimizers[0], sum(mse_loss(critic(pairs), wanted) for critic in critics))
        actions, log_probs = actor(data.observations)
        pairs = torch.cat([data.observations, actions], 1)
        descend(optimizers[1], (alpha * log_probs - torch.min(*(critic(pairs) for critic in critics))).mean())
        descend(alpha_optimizer, -(log_alpha.exp() * (log_probs.detach() - n_actions)).mean())
        move_towards(targets, critics, 0.005)
    return results(envs, seen, actor, critics)


def ppo(vector_env, seed=1, n_iterations=4, n_steps=32, n_envs=4):
    envs = start(vector_env, "CartPole-v1", n_envs, seed)
    n_observations = envs.single_observation_space.shape[0]
    actor, critic = mlp(n_observations, 32, envs.single_action_space.n), mlp(n_observations, 32, 1)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], 2.5e-4, eps=1e-5)
    observations = torch.zeros(n_steps, n_envs, n_observations)
    actions, log_probs, rewards, dones, values, advantages = (torch.zeros(n_steps, n_envs) for _ in range(6))
    seen = []
    following, done = torch.Tensor(envs.reset(seed=seed)[0]), torch.zeros(n_envs)
    for _ in range(n_iterations):
        for step in range(n_steps):
            observations[step], dones[step] = following, done
            with torch.no_grad():
                policy = Categorical(logits=actor(following))
                action, values[step] = policy.sample(), critic(following).flatten()
            actions[step], log_probs[step] = action, policy.log_prob(action)
            following, reward, terminations, truncations, infos = envs.step(action.numpy())
            seen.append(returns(infos))
            rewards[step] = torch.tensor(reward)
            following, done = torch.Tensor(following), torch.Tensor(terminations | truncations)
        with torch.no_grad():
            advantage, next_value, goes_on = 0, critic(following).flatten(), 1 - done
            for step in reversed(range(n_steps)):
                delta = rewards[step] + GAMMA * next_value * goes_on - values[step]
                advantages[step] = advantage = delta + GAMMA * 0.95 * goes_on * advantage
                next_value, goes_on = values[step], 1 - dones[step]
        seen += [observations.numpy().copy(), rewards.numpy().copy(), dones.numpy().copy()]
        flat = [each.flatten(0, 1) for each in (observations, actions, log_probs, advantages, advantages + values)]
        order = np.arange(n_steps * n_envs)
        for _ in range(2):
            np.random.shuffle(order)
            for rows in order.reshape(4, -1):
                some, action, before, advantage, wanted = (each[rows] for each in flat)
                ratio = (Categorical(logits=actor(some)).log_prob(action) - before).exp()
                gain = torch.min(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)).mean()
                descend(optimizer, 0.5 * mse_loss(critic(some).flatten(), wanted) - gain)
    return results(envs, seen, actor, critic)
