"""torchrl steps `SharedVectorWrapper`, and learns from it and from `TensorDictCollector`."""

from __future__ import annotations

import contextlib

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictSequential
from torchrl.collectors import Collector
from torchrl.envs import GymWrapper
from torchrl.envs.utils import check_env_specs
from torchrl.modules import MLP, EGreedyModule, QValueActor, ValueOperator
from torchrl.objectives import DQNLoss, SoftUpdate
from torchrl.objectives.value import GAE
from walks import BOX, SPACES, Walks

from rlstructs import (
    GymEnvInf,
    RandomAgent,
    RL_Batcher,
    SharedVectorEnv,
    TemporalDictTensor,
    Trajectories,
    gae,
    make_vec,
    transitions,
)  # fmt: skip
from rlstructs.errors import SpecError
from rlstructs.integrations.torchrl import SharedVectorWrapper, TensorDictCollector
from rlstructs.replay import DictTensorReplayBuffer


def wrap(n_workers=0, n=3, **settings):
    return SharedVectorWrapper(make_vec("CartPole-v1", n, n_workers=n_workers, **settings))


def replay_bare(batch, seed, n_resets=1):
    """What bare environments return for the actions of a batch (N, T): observations, next ones, rewards, ends."""
    for k, row in enumerate(batch):
        env = gymnasium.make("CartPole-v1")
        observation, _ = env.reset(seed=seed + k)
        for _ in range(1, n_resets):
            observation, _ = env.reset()
        for step in row:
            assert np.array_equal(step["observation"].numpy(), observation)
            observation, reward, terminated, truncated, _ = env.step(int(step["action"].argmax()))
            assert np.array_equal(step["next", "observation"].numpy(), observation)
            found = [step["next", name].item() for name in ("reward", "terminated", "truncated", "done")]
            assert found == [reward, terminated, truncated, terminated or truncated]
            if terminated or truncated:
                observation, _ = env.reset()


@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])
def test_a_rollout_is_that_of_bare_environments_with_the_same_seeds(mode):
    with contextlib.closing(wrap(vector_kwargs={"autoreset_mode": mode, "copy": False})) as env:
        env.set_seed(5)
        batch = env.rollout(60, break_when_any_done=False)
    assert batch.batch_size == (3, 60) and batch["next", "done"].sum() > 3
    replay_bare(batch, 5)


@pytest.mark.parametrize("mode", ["SameStep", "Disabled"])
def test_torchrls_own_wrapper_takes_a_shared_vector_env(mode):
    with contextlib.closing(make_vec("CartPole-v1", 3, n_workers=2, vector_kwargs={"autoreset_mode": mode})) as envs:
        env = GymWrapper(envs)
        env.set_seed(5)
        batch = env.rollout(60, break_when_any_done=False)
    assert batch.batch_size == (3, 60) and batch["next", "done"].sum() > 3
    replay_bare(batch, 5, n_resets=2)  # by `set_seed`, and by `rollout`


@pytest.mark.parametrize("kind", ["box", "float64", "discrete", "dict"])
def test_its_specs_are_what_it_returns(kind):
    actions = spaces.Discrete(3) if kind == "box" else spaces.Box(-1, 1, (2,), np.float32)
    envs = SharedVectorEnv([lambda: Walks(SPACES[kind], 0, actions)] * 3, 0)
    with contextlib.closing(SharedVectorWrapper(envs, categorical_action_encoding=kind != "discrete")) as env:
        check_env_specs(env)


def test_without_a_reset_the_environments_reset_themselves_in_the_step_after():
    with contextlib.closing(SharedVectorWrapper(SharedVectorEnv([Walks] * 2, 0))) as env:
        data = env.reset()
        for _ in range(12):
            data = env.rand_action(data)
            was_done = data.get("done").clone()
            data = env.step(data)["next"]
            assert not data["reward"][was_done].any() and not data["done"][was_done].any()
    with pytest.raises(SpecError, match="got SAME_STEP"):
        SharedVectorWrapper(SharedVectorEnv([Walks] * 2, 0, autoreset_mode="SameStep"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torchrl calls what newer versions of tensordict deprecate
def test_dqn_learns_from_its_collector_and_our_buffer():
    torch.manual_seed(0)
    network = MLP(in_features=4, out_features=2, num_cells=[16])
    with contextlib.closing(wrap(n_workers=2)) as env:
        env.set_seed(3)
        actor = QValueActor(network, spec=env.action_spec[0], in_keys=["observation"])
        loss_module = DQNLoss(actor, action_space="one-hot", delay_value=True)
        updater, optimizer = SoftUpdate(loss_module, eps=0.9), torch.optim.Adam(loss_module.parameters(), 1e-2)
        policy = TensorDictSequential(actor, EGreedyModule(env.action_spec, eps_init=0.5, eps_end=0.1))
        settings = {"auto_register_policy_transforms": False}
        collector = Collector(env, policy, frames_per_batch=48, total_frames=144, **settings)
        buffer, batches, before = DictTensorReplayBuffer(batch_size=32), [], network[0].weight.detach().clone()
        for batch in collector:
            batches.append(batch.clone())
            buffer.extend(batch.exclude("collector").reshape(-1))
            loss = loss_module(buffer.sample())["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            updater.step()
        collector.shutdown()
    assert len(buffer) == 144 and not torch.equal(before, network[0].weight)
    replay_bare(torch.cat(batches, 1), 3)


def test_advantages_of_rows_that_were_cut_are_those_of_our_gae():
    def create_env(seed):
        return GymEnvInf([Walks(BOX, k) for k in range(3)], seed)

    torch.manual_seed(0)
    critic = torch.nn.Linear(3, 1)
    with RL_Batcher(8, lambda: RandomAgent(spaces.Discrete(2)), {}, create_env, {}, n_processes=0, seeds=4) as batcher:
        [whole] = batcher.rollouts(24)
    cut = TemporalDictTensor(dict(whole.trajectories.items()), torch.tensor([2, 8, 5])).zero_padding()
    rollouts = [whole, Trajectories(whole.info, cut)]
    estimate = GAE(gamma=0.9, lmbda=0.8, value_network=ValueOperator(critic, in_keys=["observation"]))
    for batch, rollout in zip(map(TensorDictCollector(batcher)._convert, rollouts), rollouts, strict=True):
        steps = rollout.trajectories
        with torch.no_grad():
            values, after = (critic(steps[key])[..., 0] for key in ("observation/frame", "_observation/frame"))
            wanted, _ = gae(values=values, next_values=after, gamma=0.9, lambda_=0.8, **transitions(steps))
        mask = batch["collector", "mask"]
        assert torch.allclose(estimate(batch)["advantage"][..., 0][mask], wanted[mask], atol=1e-5)
