"""skrl's agents train on `SharedVectorEnv` and our memories with the same transitions as on gymnasium's and its own."""

from __future__ import annotations

import contextlib
import logging
import random

import numpy as np
import pytest
import skrl.memories.torch
import torch
from gymnasium.spaces import Box
from gymnasium.vector import SyncVectorEnv
from skrl.agents.torch.ppo import PPO
from skrl.agents.torch.sac import SAC
from skrl.envs.wrappers.torch import wrap_env
from skrl.models.torch import DeterministicMixin, GaussianMixin, Model
from skrl.trainers.torch import SequentialTrainer
from walks import short_pendulum

import rlstructs.memories.torch
from rlstructs import DictTensor, SharedVectorEnv, TemporalDictTensor, Trajectories, make_vec

# Steps of each environment, and after how many of them SAC begins to learn. PPO does after the last one.
N_STEPS, LEARNING_STARTS = 40, 32
TENSORS = (
    "observations",
    "next_observations",
    "states",
    "next_states",
    "actions",
    "rewards",
    "terminated",
    "truncated",
)


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("skrl").setLevel(logging.WARNING)


class Privileged(SharedVectorEnv):
    """Tells skrl what only the critic may see: here the angle and its velocity."""

    state_space = Box(-np.inf, np.inf, (2,), np.float32)

    def state(self):
        return np.stack(self.call("state")).astype(np.float32)


class Actor(GaussianMixin, Model):
    def __init__(self, env):
        Model.__init__(self, observation_space=env.observation_space, action_space=env.action_space, device="cpu")
        GaussianMixin.__init__(self)
        self.net = torch.nn.Linear(self.num_observations, self.num_actions)

    def compute(self, inputs, role=""):
        mean = self.net(inputs["observations"])
        return mean, {"log_std": torch.zeros_like(mean[0])}


class Critic(DeterministicMixin, Model):
    """Sees the states if there are any, and the actions if it is one of SAC."""

    def __init__(self, env, sees_actions):
        seen = env.state_space or env.observation_space
        Model.__init__(self, observation_space=seen, action_space=env.action_space, device="cpu")
        DeterministicMixin.__init__(self)
        self.sees_actions = sees_actions
        self.net = torch.nn.Linear(self.num_observations + sees_actions * self.num_actions, 1)

    def compute(self, inputs, role=""):
        seen = inputs["observations"] if inputs["states"] is None else inputs["states"]
        return self.net(torch.cat([seen, inputs["taken_actions"]], 1) if self.sees_actions else seen), {}


def train(agent_class, make_envs, module, tmp_path):
    """The memory and the weights after `N_STEPS` steps of 3 environments."""
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    with contextlib.closing(make_envs()) as made:
        env = wrap_env(made, wrapper="gymnasium" if type(made) is Privileged else "auto", verbose=False)
        names = ["value"] if agent_class is PPO else ["critic_1", "critic_2", "target_critic_1", "target_critic_2"]
        models = {"policy": Actor(env)} | {name: Critic(env, agent_class is SAC) for name in names}
        # Without a seed our memory takes one from torch's global stream, from which the actions come.
        own = {"seed": 0} if module is rlstructs.memories.torch else {}
        memory = module.RandomMemory(memory_size=N_STEPS, num_envs=3, device="cpu", **own)
        more = (
            {"rollouts": N_STEPS, "learning_epochs": 2} if agent_class is PPO else {"learning_starts": LEARNING_STARTS}
        )
        agent = agent_class(
            models=models, memory=memory, observation_space=env.observation_space, state_space=env.state_space,
            action_space=env.action_space, device="cpu",
            cfg={**more, "experiment": {"directory": str(tmp_path), "write_interval": 0, "checkpoint_interval": 0}},
        )  # fmt: skip
        SequentialTrainer(
            env=env, agents=agent, cfg={"timesteps": N_STEPS, "disable_progressbar": True, "headless": True}
        ).train()
    weights = [parameter.detach() for model in models.values() for parameter in model.parameters()]
    held = [name for name in TENSORS if name in memory.get_tensor_names()]
    return {name: memory.get_tensor_by_name(name).clone() for name in held}, weights


@pytest.mark.parametrize("agent_class", [PPO, SAC])
def test_training_has_the_transitions_and_weights_of_skrl_on_gymnasiums_environments(agent_class, tmp_path):
    theirs, ours = skrl.memories.torch, rlstructs.memories.torch
    rows, weights = train(agent_class, lambda: SyncVectorEnv([short_pendulum] * 3), theirs, tmp_path)
    assert not rows["observations"].isnan().any()
    found, learned = train(agent_class, lambda: make_vec(short_pendulum, 3, n_workers=2), theirs, tmp_path)
    assert found.keys() == rows.keys() and all(torch.equal(found[name], rows[name]) for name in rows)
    assert all(torch.equal(one, other) for one, other in zip(learned, weights, strict=True))
    found, learned = train(agent_class, lambda: make_vec(short_pendulum, 3, n_workers=0), ours, tmp_path)
    # Our memory draws other rows than skrl's: agents act differently once they have learned from some.
    n = N_STEPS if agent_class is PPO else LEARNING_STARTS
    assert found.keys() == rows.keys() and all(torch.equal(found[name][:n], rows[name][:n]) for name in rows)
    assert not any(weights.isnan().any() for weights in learned)


@pytest.mark.parametrize("agent_class", [PPO, SAC])
def test_the_critic_sees_states_of_a_vectorised_environment_that_tells_them(agent_class, tmp_path):
    def make():
        return Privileged([short_pendulum] * 3, 0)

    rows, _ = train(agent_class, make, rlstructs.memories.torch, tmp_path)
    wanted, _ = train(agent_class, make, skrl.memories.torch, tmp_path)
    n = N_STEPS if agent_class is PPO else LEARNING_STARTS
    assert "states" in rows and all(torch.equal(rows[name][:n], wanted[name][:n]) for name in wanted)
    angle = rows["states"][..., 0]
    assert torch.allclose(rows["observations"][..., 0], angle.cos(), atol=1e-5)


def rollout(**observations):
    """Two steps of two environments that show these."""
    flags = {f"_observation/{name}": torch.zeros(2, 2, dtype=torch.bool) for name in ("terminated", "truncated")}
    keys = {f"{place}/{key}": each for place in ("observation", "_observation") for key, each in observations.items()}
    steps = {**keys, **flags, "action/action": torch.zeros(2, 2), "_observation/reward": torch.zeros(2, 2)}
    return Trajectories(DictTensor({"env_index": torch.arange(2)}), TemporalDictTensor(steps))


@pytest.mark.parametrize(
    "shown, wanted",
    [
        (["frame"], {"observations"}),
        (["frame", "state"], {"observations", "states"}),
        (["frame", "state/pose", "state/speed"], {"observations", "states/pose", "states/speed"}),
        (["image", "state"], {"observations/image", "observations/state"}),  # the policy sees both
    ],
)
def test_trajectories_bring_states_where_environments_show_some_beside_the_frame(shown, wanted):
    memory = rlstructs.memories.torch.RandomMemory(memory_size=4, num_envs=2, device="cpu")
    memory.add_trajectories(rollout(**{key: torch.full((2, 2, 3), 1.0 + k) for k, key in enumerate(shown)}))
    names = set(memory.get_tensor_names()) - set(TENSORS[4:])
    assert names == wanted | {f"next_{name}" for name in wanted}
    if "states" in wanted:
        [[states, following]] = memory.sample_all(["states", "next_states"])
        assert bool((states == 2).all() and (following == 2).all()) and states.shape == (4, 3)
