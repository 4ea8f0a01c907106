"""`TensorDictCollector` gives torchrl the transitions of the batcher's rollouts, in its form."""

from __future__ import annotations

import importlib
import itertools
import sys

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from walks import BOX, Walks

from rlstructs import DictTensor, GymEnv, GymEnvInf, RandomAgent, RL_Batcher, TemporalDictTensor, Trajectories
from rlstructs.errors import SpecError
from rlstructs.integrations.torchrl import TensorDictCollector


def make_batcher(env_class, n_timesteps=8):
    def create_env(seed):
        return env_class([Walks(BOX, k) for k in range(3)], seed)

    return RL_Batcher(n_timesteps, lambda: RandomAgent(spaces.Discrete(2)), {}, create_env, {}, n_processes=0, seeds=4)


def episodes_of(batches):
    """traj_id -> the steps of the episode, in order."""
    found = {}
    for batch in batches:
        for row in batch[batch["collector", "mask"]]:
            found.setdefault(int(row["collector", "traj_ids"]), []).append(row)
    return found


def test_every_step_is_in_one_episode_with_its_true_last_observation():
    with make_batcher(GymEnvInf) as batcher:
        batches = list(TensorDictCollector(batcher, total_frames=72))
    with make_batcher(GymEnvInf) as batcher:
        wanted = list(batcher.rollouts(72))
    assert len(batches) == 3 and all(batch.batch_size == (3, 8) and batch.names[1] == "time" for batch in batches)
    for batch, rollout in zip(batches, wanted, strict=True):
        steps = rollout.trajectories
        for key, name in (("frame", "observation"), ("reward", "reward"), ("terminated", "terminated")):
            assert torch.equal(batch["next", name].flatten(2), steps[f"_observation/{key}"].reshape(3, 8, -1))
        assert torch.equal(batch["observation"], steps["observation/frame"])
        assert torch.equal(batch["action"], steps["action/action"]) and batch["collector", "mask"].all()
    episodes = episodes_of(batches)
    assert sorted(episodes) == list(range(len(episodes)))
    for steps in episodes.values():
        assert bool(steps[0]["is_init"]) and not any(bool(step["is_init"]) for step in steps[1:])
        assert not any(bool(step["next", "done"]) for step in steps[:-1])
        for one, after in itertools.pairwise(steps):
            assert torch.equal(one["next", "observation"], after["observation"])
    n_ended = sum(int(batch["next", "done"].sum()) for batch in batches)
    assert sum(bool(steps[-1]["next", "done"]) for steps in episodes.values()) == n_ended >= len(episodes) - 3


def test_steps_before_padding_are_cut_off_and_the_padding_is_masked():
    with make_batcher(GymEnv, n_timesteps=2) as batcher:
        batches = list(TensorDictCollector(batcher, total_frames=20))
    for batch in batches:
        last = batch["collector", "mask"].sum(1) - 1
        is_full = last == batch.shape[1] - 1
        done = batch["next", "done"][range(len(last)), last, 0]
        assert bool((done | is_full).all())
    assert sum(int(batch["collector", "mask"].sum()) for batch in batches) >= 20


def rollout(lengths, starts, envs=(0, 1), **more):
    flags = {name: torch.zeros(2, 4, dtype=torch.bool) for name in ("done", "terminated", "truncated")}
    keys = {f"{place}/{name}": flag for place in ("observation", "_observation") for name, flag in flags.items()}
    keys["observation/initial_state"] = torch.tensor(starts, dtype=torch.bool)
    keys |= {"_observation/reward": torch.zeros(2, 4), "observation/frame": torch.zeros(2, 4), **more}
    return Trajectories(DictTensor({"env_index": torch.tensor(envs)}), TemporalDictTensor(keys, torch.tensor(lengths)))


class Given:
    """Yields the given rollouts."""

    def __init__(self, *rollouts):
        self.given = rollouts

    def rollouts(self, n_steps=None):
        return iter(self.given)


def test_episodes_that_are_cut_go_on_with_their_number_even_if_the_collector_came_late():
    first = rollout([3, 4], [[0, 0, 0, 0], [1, 0, 1, 0]])
    second = rollout([4, 0], [[0, 1, 0, 0], [1, 1, 1, 1]])
    third = rollout([1, 2], [[0, 0, 0, 0], [0, 1, 0, 0]])
    one, two, three = TensorDictCollector(Given(first, second, third))
    assert one["collector", "traj_ids"][0, :3].tolist() == [0, 0, 0]
    assert one["collector", "traj_ids"][1].tolist() == [1, 1, 2, 2]
    assert two["collector", "traj_ids"][0].tolist() == [0, 3, 3, 3]
    assert three["collector", "traj_ids"][:, 0].tolist() == [3, 2] and three["collector", "traj_ids"][1, 1] == 4
    assert one["next", "truncated"][..., 0].tolist() == [[False, False, True, False], [False] * 4]
    assert not two["next", "done"].any()
    [whole] = TensorDictCollector(Given(second), set_truncated=True)
    assert whole["next", "truncated"][..., 0].tolist() == [[False, False, False, True], [False] * 4]


def test_keys_are_nested_and_clashes_are_errors():
    more = {"observation/pos/x": torch.zeros(2, 4), "_observation/info/lives": torch.ones(2, 4)}
    [batch] = TensorDictCollector(Given(rollout([4, 4], np.zeros((2, 4)), **more, **{"action/a": torch.ones(2, 4)})))
    assert batch["pos", "x"].shape == batch["next", "info", "lives"].shape == batch["a"].shape == (2, 4)
    assert batch["pos"].batch_size == (2, 4)
    with pytest.raises(SpecError, match="'action/observation' .* another key does"):
        list(TensorDictCollector(Given(rollout([4, 4], np.zeros((2, 4)), **{"action/observation": torch.ones(2, 4)}))))


@pytest.mark.parametrize("key", [
    "observation/collector/mask", "observation/collector/traj_ids", "action/collector/mask", "observation/collector",
])  # fmt: skip
def test_a_key_with_a_name_of_the_collector_s_own_is_refused(key):
    given = rollout([4, 4], np.zeros((2, 4)), **{key: torch.ones(2, 4)})
    with pytest.raises(SpecError, match="collector"):
        list(TensorDictCollector(Given(given)))


def test_keys_beside_those_of_the_collector_stay():
    more = {"observation/collector/n": torch.ones(2, 4), "_observation/collector/mask": torch.full((2, 4), 7.0)}
    [batch] = TensorDictCollector(Given(rollout([4, 3], np.zeros((2, 4)), **more)))
    assert batch["collector", "n"].all() and (batch["next", "collector", "mask"] == 7).all()
    assert batch["collector", "mask"].sum() == 7


def test_log_probabilities_are_where_torchrl_s_losses_look_for_them():
    tensordict_nn, modules = pytest.importorskip("tensordict.nn"), pytest.importorskip("torchrl.modules")
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    network, critic = torch.nn.Linear(4, 2), modules.ValueOperator(torch.nn.Linear(4, 1), in_keys=["observation"])
    actor = modules.ProbabilisticActor(
        tensordict_nn.TensorDictModule(network, in_keys=["observation"], out_keys=["logits"]), in_keys=["logits"],
        distribution_class=torch.distributions.Categorical, return_log_prob=True,
    )  # fmt: skip
    with RL_Batcher.make("CartPole-v1", network, n_envs=4, n_workers=0, n_timesteps=8, seed=0) as batcher:
        [batch] = TensorDictCollector(batcher, total_frames=32)
    loss = ClipPPOLoss(actor, critic)
    GAE(gamma=0.99, lmbda=0.95, value_network=critic)(batch)
    assert torch.equal(batch["action_log_prob"], batch["log_prob"])
    assert loss.tensor_keys.sample_log_prob in list(batch.keys())
    torch.testing.assert_close(actor.log_prob(batch), batch["action_log_prob"])
    found = loss(batch)
    assert (found["kl_approx"].abs() < 1e-6).all() and found["ESS"].isfinite().all()


def test_other_keys_named_like_log_probabilities_stay_what_they_are():
    own = {"action/log_prob": torch.ones(2, 4), "action/action_log_prob": torch.zeros(2, 4)}
    [batch] = TensorDictCollector(Given(rollout([4, 4], np.zeros((2, 4)), **own)))
    assert batch["log_prob"].all() and not batch["action_log_prob"].any()
    shown = {"observation/log_prob": torch.ones(2, 4)}
    [batch] = TensorDictCollector(Given(rollout([4, 4], np.zeros((2, 4)), **shown)))
    assert "action_log_prob" not in batch.keys()  # noqa: SIM118 - no dict


def test_what_comes_after_rollouts_that_went_elsewhere_begins_an_episode():
    class Endless(gymnasium.Env):
        observation_space, action_space = gymnasium.spaces.Discrete(2), gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return 0, {}

        def step(self, action):
            return 0, 1.0, False, False, {}

    with RL_Batcher.make(Endless, None, n_envs=2, n_workers=0, n_timesteps=4, seed=0) as batcher:
        collector, numbers = iter(TensorDictCollector(batcher)), []
        for elsewhere in (False, False, True, False):
            if elsewhere:
                batcher.execute()
                batcher.get()
            numbers.append(next(collector)["collector", "traj_ids"].unique().tolist())
    assert numbers == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_weights_reach_the_agents_and_shutdown_closes():
    network = torch.nn.Linear(4, 2)
    batcher = RL_Batcher.make("CartPole-v1", network, n_envs=2, n_workers=0, n_timesteps=4, seed=0)
    collector = TensorDictCollector(batcher)
    with torch.no_grad():
        network.weight.zero_()
        network.bias[:] = torch.tensor([100.0, -100.0])
    collector.update_policy_weights_(network)
    assert not next(iter(collector))["action"].any()
    collector.shutdown()


def test_the_collector_needs_no_torchrl(monkeypatch):
    name = "rlstructs.integrations.torchrl.collector"
    monkeypatch.setitem(sys.modules, "torchrl", None)  # an import of it raises
    monkeypatch.delitem(sys.modules, name)
    importlib.import_module(name)
