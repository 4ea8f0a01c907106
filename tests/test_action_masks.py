"""Masks of actions: what they forbid is never drawn, and what is wrong with them is said."""

from __future__ import annotations

import re
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from masked_env import N_ACTIONS, Masked

from rlstructs import (
    DictTensor,
    GymEnv,
    GymEnvInf,
    GymVectorEnv,
    MissingKeyError,
    ModuleAgent,
    RandomAgent,
    RL_Batcher,
    SpecError,
    mask_logits,
)


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(5)
        yield


def draw(space, mask, **others):
    observation = DictTensor({"mask": torch.as_tensor(mask), **others})
    return RandomAgent(space, mask="mask")(DictTensor(), observation, DictTensor())[0]["action"]


# --- RandomAgent ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float32], ids=str)
def test_allowed_actions_are_equally_likely_and_others_never_drawn(dtype):
    mask = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 0, 0, 0]]).to(dtype).repeat(3000, 1)
    drawn = draw(spaces.Discrete(5, start=-2), mask)
    assert drawn.dtype == torch.int64 and drawn.shape == (6000,)
    values, counts = drawn[::2].unique(return_counts=True)
    assert values.tolist() == [-2, 0, 1] and (counts - 1000).abs().max() < 5 * 1000**0.5
    assert drawn[1::2].unique().tolist() == [-1]


@pytest.mark.parametrize(
    "space",
    [
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiDiscrete([2, 3], dtype=np.uint16, start=np.array([4, 0], np.uint16)),
        spaces.MultiDiscrete([[2, 3], [4, 1]], start=[[0, -1], [5, 0]]),
    ],
    ids=str,
)
def test_entries_of_a_multi_discrete_action_are_masked_one_after_another(space):
    generator = np.random.default_rng(3)
    allowed = [[generator.permutation(n) < generator.integers(1, n + 1) for n in space.nvec.flat] for _ in range(200)]
    mask = torch.from_numpy(np.stack([np.concatenate(parts) for parts in allowed]))
    drawn = draw(space, mask)
    assert drawn.numpy().dtype == space.dtype and drawn.shape == (200, *space.shape)
    for parts, action in zip(allowed, drawn.numpy(), strict=True):
        entries = (action.astype(np.int64) - space.start).flat
        assert space.contains(action) and all(part[entry] for part, entry in zip(parts, entries, strict=True))


def test_a_seed_decides_what_is_drawn():
    agent, mask = RandomAgent(spaces.Discrete(9), mask="mask"), torch.ones(4, 9)
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        agent.seed(3)
        drawn.append(agent(DictTensor(), DictTensor({"mask": mask}), DictTensor())[0]["action"])
    assert torch.equal(*drawn) and torch.equal(mask, torch.ones(4, 9))


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ([[1, 1], [0, 1], [0, 0], [0, 0]], "allows no action in row 2"),
        ([[1, 1], [2, 1]], "must hold 0 and 1, got 2"),
        ([[0.5, 1.0]], "must hold 0 and 1, got 0.5"),
        ([[float("nan"), 1.0]], "must hold 0 and 1, got nan"),
        ([[1, 1, 1]], "has rows of shape (3,), expected (2,) for Discrete(2)"),
        ([1, 1], "has rows of shape (), expected (2,) for Discrete(2)"),
    ],
)
def test_a_mask_that_says_nothing_is_refused(mask, words):
    with pytest.raises(SpecError, match=f"^RandomAgent: the mask 'mask' {re.escape(words)}$"):
        draw(spaces.Discrete(2), mask)


def test_an_entry_without_any_value_is_named():
    with pytest.raises(SpecError, match="^RandomAgent: the mask 'mask' for entry 1 of the action allows no .* row 0$"):
        draw(spaces.MultiDiscrete([2, 2]), [[1, 1, 0, 0]])


def test_where_an_episode_has_ended_nothing_need_be_allowed():
    ended = torch.tensor([True, False])
    assert draw(spaces.Discrete(2), [[0, 0], [0, 1]], done=ended).tolist()[1] == 1
    with pytest.raises(SpecError, match="allows no action in row 1"):
        draw(spaces.Discrete(2), [[1, 0], [0, 0]], done=ended)


def test_a_missing_key_is_named_with_those_that_are_there():
    agent, observation = RandomAgent(spaces.Discrete(2), mask="other"), DictTensor({"mask": torch.ones(1, 2)})
    with pytest.raises(
        MissingKeyError, match=r"the mask 'other' is not a key of the observation, which has \['mask'\]$"
    ):
        agent(DictTensor(), observation, DictTensor())


@pytest.mark.parametrize("space", [spaces.Box(0, 1), spaces.Dict(a=spaces.Discrete(2)), spaces.MultiBinary(2)], ids=str)
def test_only_discrete_spaces_have_masks(space):
    with pytest.raises(SpecError, match="^RandomAgent: mask needs a Discrete or MultiDiscrete action space, got "):
        RandomAgent(space, mask="mask")


def next_step(n_envs, seed):
    envs = [partial(Masked, start=3)] * n_envs
    return GymVectorEnv(gymnasium.vector.SyncVectorEnv(envs), seed)


@pytest.mark.parametrize(
    "create_env",
    [
        lambda n_envs, seed: GymEnvInf([Masked(3) for _ in range(n_envs)], seed),
        lambda n_envs, seed: GymEnv([Masked(3) for _ in range(n_envs)], seed),
        next_step,
    ],
    ids=["resets in the step", "ends", "resets in the next step"],
)
def test_whole_rollouts_hold_allowed_actions_only(create_env):
    agent = partial(RandomAgent, spaces.Discrete(N_ACTIONS, start=3), "action_mask")
    with RL_Batcher(20, agent, {}, create_env, {"n_envs": 3}, n_processes=0, seeds=1) as batcher:
        batcher.reset()
        batcher.execute()
        steps = batcher.get()[0].trajectories
        chosen = steps["action/action"] - 3
        is_allowed = steps["observation/action_mask"].gather(-1, chosen.clamp(min=0)[..., None])[..., 0]
        assert batcher.metrics()["episode/count"] >= 3
    assert is_allowed[steps.mask(torch.bool)].all()


# --- mask_logits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_forbidden_actions_have_no_probability_and_no_gradient(dtype):
    logits = torch.randn(3, 4, 5, dtype=dtype, requires_grad=True)
    mask = torch.rand(3, 4, 5) < 0.4
    mask[..., 2] = True
    policy = torch.distributions.Categorical(logits=mask_logits(logits, mask))
    expected = logits.detach().double().masked_fill(~mask, -torch.inf).softmax(-1)
    torch.testing.assert_close(policy.probs.double(), expected, atol=1e-2 if dtype == torch.bfloat16 else 1e-6, rtol=0)
    (policy.entropy().sum() + policy.log_prob(policy.sample()).sum()).backward()
    assert logits.grad.isfinite().all() and not logits.grad[~mask].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [0.2, 0.9, torch.inf], ids=str)
def test_forbidden_actions_are_never_drawn_where_allowed_ones_have_the_lowest_logits(dtype, scale):
    lowest = torch.finfo(dtype).min * scale
    rows = [[lowest, 0, 0], [lowest, lowest, 5], [lowest, 0, -torch.inf], [0, 1, 2]]
    logits = torch.tensor(rows, dtype=dtype, requires_grad=True)
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1], [1, 0, 0]])
    masked = mask_logits(logits, mask)
    expected = torch.tensor([[1, 0, 0], [0.5, 0.5, 0], [1, 0, 0] if scale < 1 else [0.5, 0, 0.5], [1.0, 0, 0]])
    for policy in (torch.distributions.Categorical(logits=masked), torch.distributions.Categorical(masked.softmax(-1))):
        torch.testing.assert_close(policy.probs.float(), expected, atol=0, rtol=0)
        assert policy.entropy().isfinite().all() and policy.log_prob(mask.argmax(-1)).isfinite().all()
    log_probs = torch.distributions.Categorical(logits=masked).log_prob(mask.argmax(-1))
    (log_probs.sum() + masked.softmax(-1).max()).backward()
    assert logits.grad.isfinite().all() and not logits.grad[mask == 0].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_low_logits_keep_their_ratios(dtype):
    lowest = torch.finfo(dtype).min
    for low in (lowest * 0.1, lowest * 0.4, lowest * 0.6, lowest * 0.9):
        logits = torch.tensor([low, low * 1.001, low * 1.1, 0.0]).to(dtype)
        expected = logits.double()[:3].softmax(-1).tolist()
        assert mask_logits(logits, torch.tensor([1, 1, 1, 0])).double().softmax(-1).tolist() == [*expected, 0]


def test_nan_in_rows_that_nobody_uses_does_not_hide_low_logits():
    logits = torch.tensor([[torch.nan, 0.0], [-torch.inf, 0.0]])
    masked = mask_logits(logits, torch.tensor([[0, 0], [1, 0]]), torch.tensor([True, False]))
    assert masked.softmax(-1).tolist() == [[0.5, 0.5], [1, 0]]


def test_two_masks_are_applied_one_after_the_other():
    once = mask_logits(torch.tensor([[3.0, 0.0, 0.0]]), torch.tensor([[0, 1, 1]]))
    twice = mask_logits(once, torch.tensor([[1, 0, 0]]))
    assert twice.softmax(-1).tolist() == [[1, 0, 0]] and twice.argmax(-1).item() == 0


@pytest.mark.parametrize("shape", [(0, 3), (2, 0, 3)], ids=str)
def test_no_rows_are_masked_to_no_rows(shape):
    assert mask_logits(torch.zeros(shape), torch.ones(shape)).shape == shape


def test_a_network_that_masks_the_numbers_of_a_multi_discrete_action_draws_allowed_ones_only():
    space, mask = spaces.MultiDiscrete([2, 3]), torch.tensor([[1, 0, 0, 1, 0]])

    class Masking(torch.nn.Module):
        def forward(self, frame):
            return mask_logits(torch.tensor([[-torch.inf, 0, 9, -torch.inf, 9.0]]).expand(64, 5), mask.expand(64, 5))

    observation = DictTensor({"frame": torch.zeros(64, 2)})
    output, _ = ModuleAgent(Masking(), space)(DictTensor(), observation, DictTensor())
    assert (output["action"] == torch.tensor([0, 1])).all() and not output["log_prob"].any()


def test_rows_that_nobody_uses_may_allow_nothing():
    masked = mask_logits(torch.randn(2, 3), torch.tensor([[0, 1, 0], [0, 0, 0]]), torch.tensor([False, True]))
    probabilities = torch.distributions.Categorical(logits=masked).probs
    torch.testing.assert_close(probabilities, torch.tensor([[0.0, 1.0, 0.0], [1 / 3, 1 / 3, 1 / 3]]))


def test_the_row_that_allows_nothing_is_named():
    mask = torch.ones(2, 3, 4)
    mask[1, 2] = 0
    with pytest.raises(SpecError, match=r"mask allows no action in row \(1, 2\); give ignored= .*SAME_STEP"):
        mask_logits(torch.zeros(2, 3, 4), mask)
    with pytest.raises(SpecError, match=r"^mask_logits: the mask allows no action in row \(1, 2\)$"):
        mask_logits(torch.zeros(2, 3, 4), mask, torch.zeros(2, 3, dtype=torch.bool))


def test_logits_and_mask_have_the_same_shape():
    with pytest.raises(SpecError, match=r"^mask_logits: the mask has shape \(4,\), expected \(2, 4\)$"):
        mask_logits(torch.zeros(2, 4), torch.ones(4))


class MaskingNetwork(torch.nn.Module):
    """A policy that masks its logits, with no word on which rows nobody uses."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(N_ACTIONS, N_ACTIONS)

    def forward(self, seen):
        return mask_logits(self.layer(seen["action_mask"].float()), seen["action_mask"])


@pytest.mark.parametrize("mode", [*gymnasium.vector.AutoresetMode][:2], ids=str)
@pytest.mark.parametrize("lengths", [(3, 3), (3, 4), (2, 5)], ids=str)
def test_a_network_that_masks_acts_in_every_autoreset_mode(mode, lengths):
    class Ending(Masked):
        """Masked, with nothing allowed once an episode has ended after some steps."""

        def __init__(self, limit):
            super().__init__(0)
            self.limit = limit

        def reset(self, **arguments):
            self.t = 0
            return super().reset(**arguments)

        def step(self, action):
            observation, *_, info = super().step(action)
            self.t += 1
            if self.t == self.limit:
                observation["action_mask"] = np.zeros_like(observation["action_mask"])
            return observation, 0.0, self.t == self.limit, False, info

    def create_env(n_envs, seed):
        envs = [partial(Ending, limit) for limit in lengths]
        return GymVectorEnv(gymnasium.vector.SyncVectorEnv(envs, autoreset_mode=mode), seed)

    with RL_Batcher.make(create_env, MaskingNetwork(), n_envs=2, n_workers=0, n_timesteps=20, seed=0) as batcher:
        for _ in range(2):
            steps = next(iter(batcher)).trajectories
            allowed = steps["observation/action_mask"].gather(-1, steps["action/action"][..., None])[..., 0]
            assert allowed[steps.mask(torch.bool)].all() and steps["_observation/done"].sum() >= 4
