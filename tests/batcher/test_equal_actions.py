"""A batcher warns of agents that draw alike in several workers, and of no others."""

from __future__ import annotations

import warnings
from functools import partial

import gymnasium
import pytest
import torch

from rlstructs import DictTensor, GymEnvInf, RL_Agent, RL_Batcher, TemporalDictTensor, Trajectories
from rlstructs.batcher.metrics import EqualActions

T = 64
ALIKE = "the agents of workers draw the same random numbers"


def rollouts(act, n_envs, n_workers=2, n_rollouts=3, seen=None):
    """Rollouts in which `act(observations, worker)`, (T, E) each, acts; observations are normal, or `seen`."""
    torch.manual_seed(0)
    for _ in range(n_rollouts):
        observations = torch.randn(n_workers, T, n_envs, dtype=torch.float64) if seen is None else seen.clone()
        actions = [act(observations[worker], worker) for worker in range(n_workers)]
        steps = {
            "observation/frame": observations.transpose(1, 2).reshape(-1, T),
            "observation/last_action": torch.rand(n_workers * n_envs, T),
            "action/action": torch.stack(actions).transpose(1, 2).reshape(n_workers * n_envs, T, *actions[0].shape[2:]),
        }
        info = DictTensor({"env_index": torch.arange(n_workers * n_envs)})
        yield Trajectories(info, TemporalDictTensor(steps, torch.full((n_workers * n_envs,), T)))


def warns(act, n_envs, **others):
    check = EqualActions(n_envs, others.get("n_workers", 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in rollouts(act, n_envs, **others):
            if not check.is_over:
                check.add(batch)
    assert check.is_over
    return [str(warning.message) for warning in caught if ALIKE in str(warning.message)]


def draws(of, seed, observations, worker):
    generator = torch.Generator().manual_seed(seed(worker))
    return of(torch.rand(observations.shape, generator=generator, dtype=torch.float64), observations)


KINDS = {
    "two": lambda drawn, seen: (drawn < 0.5 + 0.01 * seen.tanh()).long(),
    "six": lambda drawn, seen: (drawn * 6).long(), "box": lambda drawn, seen: drawn.float(),
    "vector": lambda drawn, seen: torch.stack([drawn, drawn * 2], -1), "bool": lambda drawn, seen: drawn < 0.4,
}  # fmt: skip


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("kind", ["two", "six", "bool"])
def test_equal_draws_of_workers_are_warned_of_once(kind, n_envs):
    [text] = warns(partial(draws, KINDS[kind], lambda worker: 0), n_envs, n_workers=3)
    assert "workers 0 and 1" in text and "torch.manual_seed(0) in create_agent" in text


@pytest.mark.parametrize("kind", ["box", "vector"])
def test_equal_draws_for_a_box_are_warned_of(kind):
    assert warns(partial(draws, KINDS[kind], lambda worker: 0), 3)


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_independent_draws_are_not_warned_of(kind, n_envs):
    assert not warns(partial(draws, KINDS[kind], lambda worker: worker), n_envs)


REGULAR = {
    "constant": lambda seen, worker: torch.ones(seen.shape, dtype=torch.int64),
    "nearly constant": lambda seen, worker: (seen > 2.5).long(),
    "greedy": lambda seen, worker: (seen > 0).long(),
    "in turns": lambda seen, worker: (torch.arange(T)[:, None] % 2).expand(seen.shape),
    "counting": lambda seen, worker: torch.arange(T)[:, None].expand(seen.shape),
    "of a long period": lambda seen, worker: (torch.arange(T)[:, None] % 11).expand(seen.shape),
    "a mean": lambda seen, worker: seen.float(),
}


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("name", REGULAR)
def test_actions_that_are_not_drawn_are_not_warned_of(name, n_envs):
    assert not warns(REGULAR[name], n_envs)


@pytest.mark.parametrize("n_envs", [1, 3])
def test_equal_actions_for_equal_observations_are_not_warned_of(n_envs):
    seen = torch.randn(1, T, n_envs, dtype=torch.float64).expand(2, T, n_envs)
    assert not warns(REGULAR["greedy"], n_envs, seen=seen)
    assert not warns(partial(draws, KINDS["two"], lambda worker: 0), n_envs, seen=seen)


def test_one_worker_is_not_compared_and_short_rollouts_are_added_up():
    assert EqualActions(4, 1).is_over
    streams = [torch.Generator().manual_seed(0) for _ in range(2)]
    batches = list(rollouts(lambda seen, worker: torch.rand(seen.shape, generator=streams[worker]) < 0.5, 1, 2, 20))
    for length, n_rollouts in ((9, 15), (1, 20), (0, 20)):  # 20 are enough, however short
        check = EqualActions(1, 2)
        *first, last = (
            Trajectories(batch.info, TemporalDictTensor(dict(batch.trajectories.items()), torch.full((2,), length)))
            for batch in batches[:n_rollouts]
        )
        for batch in first:
            check.add(batch)
            assert not check.is_over
        with pytest.warns(match=ALIKE) if length == 9 else warnings.catch_warnings():
            check.add(last)
        assert check.is_over


class Drawing(RL_Agent):
    """Draws from logits that depend on the observation; seeds torch where it is told to."""

    def __init__(self, seed):
        if seed is not None:
            torch.manual_seed(seed)

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        logits = observation["frame"][:, :2] / 100
        return DictTensor({"action": torch.distributions.Categorical(logits=logits).sample()}), state


def create_env(seed):
    return GymEnvInf([gymnasium.make("CartPole-v1") for _ in range(2)], seed)


def wait(batcher):
    batcher.wait()


def lease(batcher):
    with batcher.lease():
        pass


@pytest.mark.parametrize("take", [RL_Batcher.get, lease, wait], ids=["get", "lease", "wait"])
def test_a_batcher_warns_of_agents_that_seed_torch_at_the_line_that_takes_the_rollout(take):
    with RL_Batcher(T, Drawing, {"seed": 0}, create_env, {}, 2, seeds=0) as batcher:
        batcher.reset()
        batcher.execute()
        with pytest.warns(UserWarning, match=ALIKE) as caught:
            take(batcher)
        assert [warning.filename for warning in caught] == [__file__]
        for _ in range(2):  # once
            batcher.execute()
            take(batcher)


def test_a_batcher_does_not_warn_of_agents_that_workers_seed():
    with RL_Batcher(T, Drawing, {"seed": None}, create_env, {}, 2, seeds=0) as batcher:
        for _ in batcher.rollouts(n_steps=3 * 4 * T):
            pass
