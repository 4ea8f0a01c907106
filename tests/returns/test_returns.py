"""Returns are what their equations say, written out as loops; ends, padding and masks never leak into each other."""

from __future__ import annotations

import math

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from rlstructs import (
    GymEnvInf,
    MissingKeyError,
    RandomAgent,
    RL_Batcher,
    SpecError,
    TemporalDictTensor,
    Trajectories,
    discounted_returns,
    gae,
    lambda_returns,
    n_step_returns,
    transitions,
    vtrace,
)
from rlstructs.returns import compute

GAMMA, EPISODE = 0.99, 100
FLOATS = ("rewards", "values", "next_values", "target_log_probs", "behaviour_log_probs")
COMMON = ("rewards", "next_values", "terminated", "truncated", "gamma", "mask")
# What each function takes beside those.
EXTRA = {
    gae: ("values", "lambda_"),
    discounted_returns: (),
    lambda_returns: ("lambda_",),
    n_step_returns: ("n",),
    vtrace: ("values", "target_log_probs", "behaviour_log_probs", "rho_clip", "c_clip"),
}
SETTINGS = {"gamma": GAMMA, "lambda_": 0.9, "n": 3, "rho_clip": 1.0, "c_clip": 1.0, "mask": None}
functions = pytest.mark.parametrize("function", EXTRA, ids=lambda function: function.__name__)


@pytest.fixture(scope="module", params=["torch", "kernels"], autouse=True)
def path(request):
    """What computes the results: torch, or kernels of Warp where there is a step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compute, "FEWEST_STEPS", 1 if request.param == "kernels" else 2**62)
        patch.setattr(compute, "FEWEST_ROUNDS", 0)
        yield request.param


def call(function, arguments):
    """The results, as a tuple; the last of them are the targets of the values."""
    results = function(**{name: arguments[name] for name in (*COMMON, *EXTRA[function])})
    return results if isinstance(results, tuple) else (results,)


def numbers(n_elems, n_timesteps, seed=0, dtype=torch.float64):
    """Random arguments of all functions, without an end."""
    generator = torch.Generator().manual_seed(seed)
    floats = {name: torch.randn(n_elems, n_timesteps, generator=generator, dtype=dtype) for name in FLOATS}
    no = torch.zeros(n_elems, n_timesteps, dtype=torch.bool)
    return {**SETTINGS, **floats, "terminated": no, "truncated": no.clone()}


@st.composite
def arguments_of_all(draw):
    """Random arguments, NaN where nothing may count."""
    n_elems, n_timesteps = draw(st.integers(0, 3)), draw(st.integers(0, 17))
    seed, dtype = draw(st.integers(0, 2**32)), draw(st.sampled_from([torch.float32, torch.float64]))
    made, random = numbers(n_elems, n_timesteps, seed, dtype), np.random.default_rng(seed)

    def flags(share):
        return torch.from_numpy(random.random((n_elems, n_timesteps)) < share)

    share = draw(st.sampled_from([0.0, 0.1, 0.5]))
    made |= {"terminated": flags(share), "truncated": flags(share), "n": draw(st.integers(1, 20))}
    made |= {name: draw(st.sampled_from([0.5, 1.0, math.inf])) for name in ("rho_clip", "c_clip")}
    for name in ("gamma", "lambda_"):
        weights = torch.from_numpy(random.random((n_elems, n_timesteps))).to(dtype)
        made[name] = draw(st.sampled_from([0.0, 0.9, 1, torch.tensor(0.75), weights]))
    if draw(st.booleans()):
        lengths = torch.from_numpy(random.integers(0, n_timesteps + 1, n_elems))
        prefix = torch.arange(n_timesteps)[None] < lengths[:, None]
        made["mask"] = draw(st.sampled_from([prefix, prefix.float(), flags(0.7)]))
        masked = made["mask"] == 0
        for name, value in made.items():
            if name != "mask" and isinstance(value, torch.Tensor) and value.ndim and value.is_floating_point():
                value[masked] = math.nan
    made["next_values"][made["terminated"]] = math.nan
    return made


class WrittenOut:
    """The equations for one row, in Python's floats: sums that go forward from t until something ends them."""

    def __init__(self, arguments, row):
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                value = value.double()
                value = value[row].tolist() if value.ndim else [value.item()] * arguments["rewards"].shape[1]
            elif name in ("gamma", "lambda_"):
                value = [value] * arguments["rewards"].shape[1]
            setattr(self, name, value)
        self.counts = [True] * len(self.rewards) if self.mask is None else [bool(m) for m in self.mask]

    def after(self, t):
        return 0.0 if self.terminated[t] else self.next_values[t]

    def is_last(self, t):
        return bool(self.terminated[t] or self.truncated[t]) or t + 1 == len(self.rewards) or not self.counts[t + 1]

    def delta(self, t):
        return self.rewards[t] + self.gamma[t] * self.after(t) - self.values[t]

    def ratio(self, t, clip):
        return min(clip, math.exp(self.target_log_probs[t] - self.behaviour_log_probs[t]))

    def gae(self, t):
        total, weight, k = self.delta(t), 1.0, t
        while not self.is_last(k):
            weight *= self.gamma[k] * self.lambda_[k]
            k += 1
            total += weight * self.delta(k)
        return total, total + self.values[t]

    def n_step_returns(self, t, n=None):
        total, weight, k, n = 0.0, 1.0, t, self.n if n is None else n
        while True:
            total += weight * self.rewards[k]
            weight *= self.gamma[k]
            if self.is_last(k) or k == t + n - 1:
                return (total + weight * self.after(k),)
            k += 1

    def discounted_returns(self, t):
        return self.n_step_returns(t, n=len(self.rewards))

    def lambda_returns(self, t):
        total, weight, k = 0.0, 1.0, t
        while not self.is_last(k):
            total += weight * (self.rewards[k] + self.gamma[k] * (1 - self.lambda_[k]) * self.after(k))
            weight *= self.gamma[k] * self.lambda_[k]
            k += 1
        return (total + weight * (self.rewards[k] + self.gamma[k] * self.after(k)),)

    def vtrace(self, t):
        target = self.vtrace_target(t)
        following = self.after(t) if self.is_last(t) else self.vtrace_target(t + 1)
        advantage = self.rewards[t] + self.gamma[t] * following - self.values[t]
        return self.ratio(t, self.rho_clip) * advantage, target

    def vtrace_target(self, t):
        total, weight, k = self.values[t], 1.0, t
        while True:
            total += weight * self.ratio(k, self.rho_clip) * self.delta(k)
            if self.is_last(k):
                return total
            weight *= self.gamma[k] * self.ratio(k, self.c_clip)
            k += 1


@functions
@given(arguments_of_all())
def test_it_is_what_its_equation_says(function, arguments):
    results = call(function, arguments)
    dtype, shape = arguments["rewards"].dtype, arguments["rewards"].shape
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-10}[dtype]
    expected = np.zeros((len(results), *shape))
    for row in range(shape[0]):
        written_out = WrittenOut(arguments, row)
        for t in range(shape[1]):
            if written_out.counts[t]:
                expected[:, row, t] = getattr(written_out, function.__name__)(t)
    for result, values in zip(results, expected, strict=True):
        assert result.dtype == dtype and result.shape == shape and result.is_contiguous()
        np.testing.assert_allclose(result.numpy(), values, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@functions
def test_long_rows_are_as_exact_as_their_dtype(function, dtype, path):
    arguments = numbers(3, 2000, dtype=dtype)
    random = torch.Generator().manual_seed(1)
    for name, share in (("terminated", 0.01), ("truncated", 0.01), ("mask", 0.9)):
        arguments[name] = torch.rand(3, 2000, generator=random) < share
    results = call(function, arguments)
    exact = call(function, {k: v.double() if k in FLOATS else v for k, v in arguments.items()})
    assert path == "torch" or compute._starts[torch.device("cpu"), dtype] is not None
    for result, wanted in zip(results, exact, strict=True):
        torch.testing.assert_close(result.double(), wanted, rtol=1e-4, atol=1e-4)


TRACED = {
    "compile": lambda function: torch.compile(function, backend="eager", fullgraph=True),
    "trace": lambda function: torch.jit.trace(function, (torch.zeros(2, 40),), check_trace=False),
    "make_fx": lambda function: make_fx(function)(torch.zeros(2, 40)),
    "vmap": lambda function: lambda x: torch.vmap(function)(x[None])[0],
}


@pytest.mark.parametrize("tracer", TRACED)
@pytest.mark.filterwarnings("ignore")  # of torch, that its tracer is old
def test_what_traces_operations_of_torch_finds_them(tracer):
    arguments = {name: numbers(2, 40, dtype=torch.float32)[name] for name in COMMON}
    arguments["truncated"][0, 7] = True
    rewards = arguments.pop("rewards")

    def function(rewards):
        return discounted_returns(rewards, **arguments)

    torch.testing.assert_close(TRACED[tracer](function)(rewards), function(rewards))


@functions
def test_half_of_the_bits_a_device_without_memory_and_negated_views_are_left_to_torch(function):
    arguments = numbers(2, 8, dtype=torch.float32)
    wanted = call(function, arguments)
    for convert in (torch.Tensor.bfloat16, lambda tensor: tensor.to("meta")):
        converted = {k: convert(v) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        for result, like in zip(call(function, converted), wanted, strict=True):
            assert (result.dtype, result.device, result.shape) == (
                converted["rewards"].dtype, converted["rewards"].device, like.shape)  # fmt: skip
    arguments["rewards"] = torch._neg_view(-arguments["rewards"])
    for result, like in zip(call(function, arguments), wanted, strict=True):
        torch.testing.assert_close(result, like)


class Ones(gymnasium.Env):
    """A reward of 1 at each step, for ever; the observation is how many steps there were."""

    observation_space = gymnasium.spaces.Box(0, np.inf, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, ending):
        self.ending = ending

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        terminated, truncated = (self.t == EPISODE and self.ending == ending for ending in ("terminated", "truncated"))
        return np.full(1, self.t, np.float32), 1.0, terminated, truncated, {}


def ones(ending, n_timesteps=250):
    """A rollout of two such environments: two episodes and a half each."""
    with RL_Batcher(
        n_timesteps, lambda: RandomAgent(Ones.action_space), {},
        lambda seed: GymEnvInf([Ones(ending) for _ in range(2)], seed), {}, n_processes=0, seeds=0,
    ) as batcher:  # fmt: skip
        batcher.reset()
        batcher.execute()
        return batcher.get()[0]


def targets_of(function, batch, critic):
    """Targets of the values that a critic gives, (B, T)."""
    steps = batch.trajectories
    random = torch.Generator().manual_seed(0)
    behaviour = torch.randn(2, steps.n_timesteps(), generator=random)
    arguments = {**SETTINGS, **transitions(batch), "target_log_probs": behaviour, "behaviour_log_probs": behaviour}
    arguments |= {"values": critic(steps["observation/frame"]), "next_values": critic(steps["_observation/frame"])}
    return call(function, arguments)[-1]


def the_same_everywhere(value):
    """The critic of an environment whose states are all alike."""
    return lambda frame: value.expand(frame.shape[:2])


@functions
def test_of_a_constant_reward_that_is_truncated_values_are_learned_as_if_it_went_on(function):
    batch, targets = ones("truncated"), torch.zeros(())
    for _ in range(1200):
        targets = targets_of(function, batch, the_same_everywhere(targets.mean()))
    assert targets.shape == (2, 250)
    torch.testing.assert_close(targets, torch.full_like(targets, 1 / (1 - GAMMA)), rtol=0.01, atol=0)


@functions
def test_of_a_constant_reward_that_terminates_values_follow_the_closed_form(function):
    batch = ones("terminated")
    closed_form = (1 - GAMMA ** (EPISODE - torch.arange(EPISODE + 1.0))) / (1 - GAMMA)
    # What follows a terminal step is not asked for.
    critic = torch.cat([closed_form[:-1], torch.tensor([math.nan])])
    targets = targets_of(function, batch, lambda frame: critic[frame[..., 0].long()])
    torch.testing.assert_close(targets, closed_form[torch.arange(250) % EPISODE].expand(2, -1))


def test_returns_of_whole_episodes_need_no_critic():
    batch = ones("terminated", n_timesteps=2 * EPISODE)
    targets = targets_of(discounted_returns, batch, lambda frame: torch.zeros(frame.shape[:2]))
    closed_form = (1 - GAMMA ** (EPISODE - torch.arange(EPISODE, dtype=torch.float64))) / (1 - GAMMA)
    torch.testing.assert_close(targets, closed_form.repeat(2, 2).float())


@pytest.mark.parametrize("nothing", [math.nan, math.inf])
def test_discounted_returns_look_at_values_where_an_episode_was_cut_only(nothing):
    arguments = {key: value for key, value in numbers(3, 9).items() if key in (
        "rewards", "next_values", "terminated", "truncated", "gamma", "mask")}  # fmt: skip
    arguments["terminated"][:, 2], arguments["truncated"][:, 5] = True, True
    arguments["mask"] = torch.ones(3, 9, dtype=torch.bool)
    arguments["mask"][1, 7:] = False
    wanted = discounted_returns(**arguments)
    cut = arguments["truncated"].clone()
    cut[[0, 1, 2], [8, 6, 8]] = True
    arguments["next_values"] = torch.where(cut, arguments["next_values"], nothing)
    assert torch.equal(discounted_returns(**arguments), wanted) and wanted.isfinite().all()


@functions
@pytest.mark.parametrize("ending", ["terminated", "truncated"])
def test_an_episode_is_the_same_alone_and_beside_others(function, ending):
    both = numbers(2, 9)
    both[ending][:, 3] = True
    both["values"][:, 4:] *= 1e6
    first, second = ({**both, **{k: v[:, part] for k, v in both.items() if isinstance(v, torch.Tensor)}}
                     for part in (slice(0, 4), slice(4, 9)))  # fmt: skip
    for whole, *parts in zip(call(function, both), call(function, first), call(function, second), strict=True):
        assert torch.equal(whole, torch.cat(parts, dim=1))


@functions
def test_results_are_constants_and_arguments_stay_as_they_are(function):
    arguments = numbers(2, 5)
    arguments["truncated"][0, 2] = True
    arguments["mask"] = torch.ones(2, 5)
    before = {k: v.clone() for k, v in arguments.items() if isinstance(v, torch.Tensor)}
    for name in FLOATS:
        arguments[name].requires_grad_()
    assert not any(result.requires_grad for result in call(function, arguments))
    assert all(torch.equal(arguments[name], tensor) for name, tensor in before.items())


@functions
def test_rewards_of_32_bits_and_values_of_64_give_64(function):
    arguments = numbers(2, 5)
    rewards = arguments["rewards"].float()
    exact = call(function, arguments | {"rewards": rewards.double()})
    for result, wanted in zip(call(function, arguments | {"rewards": rewards}), exact, strict=True):
        assert result.dtype == torch.float64 and torch.equal(result, wanted)


@functions
def test_memory_in_another_order_gives_contiguous_results(function):
    arguments = numbers(3, 5)
    turned = {k: v.t().contiguous().t() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    for result, wanted in zip(call(function, turned), call(function, arguments), strict=True):
        assert result.is_contiguous() and torch.equal(result, wanted)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@functions
def test_on_a_gpu_it_is_the_same(function):
    arguments = numbers(3, 40, dtype=torch.float32) | {"gamma": torch.tensor(0.9)}
    arguments["terminated"][0, 7] = True
    there = {k: v.cuda() if isinstance(v, torch.Tensor) and v.ndim else v for k, v in arguments.items()}
    for result, wanted in zip(call(function, there), call(function, arguments), strict=True):
        assert result.is_cuda
        torch.testing.assert_close(result.cpu(), wanted)


def test_advantages_of_v_trace_on_policy_are_those_of_gae_with_lambda_one():
    arguments = numbers(2, 7)
    arguments["next_values"][:, :-1] = arguments["values"][:, 1:]
    arguments |= {"target_log_probs": arguments["behaviour_log_probs"], "lambda_": 1.0}
    for mine, wanted in zip(call(vtrace, arguments), call(gae, arguments), strict=True):
        torch.testing.assert_close(mine, wanted)


@pytest.mark.parametrize("kind", [Trajectories, TemporalDictTensor])
def test_transitions_are_those_of_the_batch(kind):
    batch = ones("truncated", n_timesteps=120)
    steps = batch.trajectories
    found = transitions(batch if kind is Trajectories else steps)
    assert found["rewards"] is steps["_observation/reward"]
    assert found["truncated"].nonzero().tolist() == [[0, 99], [1, 99]] and not found["terminated"].any()
    assert torch.equal(found["mask"], steps.mask(torch.bool))


def test_padding_counts_for_nothing_whatever_it_holds():
    lengths = torch.tensor([3, 5, 0])
    padding = torch.arange(5)[None] >= lengths[:, None]
    arguments = numbers(3, 5, dtype=torch.float32)
    following = {"reward": arguments["rewards"].masked_fill(padding, math.nan)}
    following |= {"terminated": padding, "truncated": padding}
    batch = TemporalDictTensor({"_observation": following}, lengths)
    values = arguments["next_values"].masked_fill(padding, math.inf)
    returns = discounted_returns(**transitions(batch), next_values=values, gamma=GAMMA)
    assert torch.equal(returns == 0, padding)
    short = {name: arguments[name][:1, :3] for name in ("rewards", "next_values", "terminated", "truncated")}
    torch.testing.assert_close(returns[:1, :3], discounted_returns(**short, gamma=GAMMA))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@functions
def test_what_is_not_finite_stays_in_its_episode(function, value):
    arguments = numbers(4, 8)
    arguments["terminated"][:, 4] = True
    wanted = call(function, arguments)
    arguments["rewards"][2, 5] = value
    packed = {k: v.flatten() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    bounds = torch.arange(5, dtype=torch.int32) * 8
    of_pack = function(**{name: packed[name] for name in (*COMMON, *EXTRA[function])}, cu_seqlens=bounds)
    others = torch.ones(4, 8, dtype=torch.bool)
    others[2, 5:] = False
    for found in (call(function, arguments), of_pack if isinstance(of_pack, tuple) else (of_pack,)):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.view(4, 8)[others], other[others])


def test_a_batch_without_ends_is_refused():
    with pytest.raises(MissingKeyError, match=r"^TemporalDictTensor: no key '_observation/terminated', there are "):
        transitions(TemporalDictTensor({"_observation/reward": torch.zeros(1, 2)}))
    with pytest.raises(TypeError, match=r"^transitions: needs Trajectories, .* or PackedTrajectories, got dict$"):
        transitions({"rewards": torch.zeros(1, 2)})


FLAT, WIDE, MISSHAPEN = torch.zeros(5), torch.zeros(2, 5, 1), torch.zeros(5, 2)
WRONG = {
    "rewards": [
        (TemporalDictTensor(), TypeError, r"must be a tensor \(B, T\), got TemporalDictTensor; `\*\*transitions"),
        (WIDE, SpecError, r"must have shape \(B, T\), got \(2, 5, 1\) float32$"),
        (torch.zeros(2, 5, dtype=torch.int64), SpecError, r"must have a floating point dtype, got \(2, 5\) int64$"),
    ],
    "values": [(MISSHAPEN, SpecError, r"must have shape \(2, 5\), like rewards, got \(5, 2\) float32$")],
    "next_values": [
        (WIDE, SpecError, r"must have shape \(B, T\), got \(2, 5, 1\) float32$"),
        (torch.zeros(2, 5, device="meta"), SpecError, r"is on meta, expected cpu, like rewards$"),
        (None, TypeError, r"must be a tensor \(B, T\), got NoneType; "),
    ],
    "terminated": [(FLAT, SpecError, r"must have shape \(B, T\), got \(5,\) float32$")],
    "truncated": [(False, TypeError, r"must be a tensor \(B, T\), got bool; ")],
    "mask": [(MISSHAPEN, SpecError, r"must have shape \(2, 5\), like rewards, got \(5, 2\) float32$")],
    "gamma": [
        (1.01, SpecError, r"must lie in \[0, 1\], got 1.01$"),
        (math.nan, SpecError, r"must lie in \[0, 1\], got nan$"),
        ("0.9", TypeError, r"must be a number or a tensor, got '0.9'$"),
        (FLAT, SpecError, r"must have shape \(B, T\), got \(5,\) float32$"),
    ],
    "lambda_": [(-0.1, SpecError, r"must lie in \[0, 1\], got -0.1$"), (True, TypeError, r"must be a number or")],
    "n": [(0, SpecError, r"must be at least 1, got 0$"), (2.0, TypeError, r"must be an int, got 2.0$")],
    "target_log_probs": [(MISSHAPEN, SpecError, r"must have shape \(2, 5\), like rewards, ")],
    "behaviour_log_probs": [(WIDE, SpecError, r"must have shape \(B, T\), got \(2, 5, 1\) float32$")],
    "rho_clip": [(0.0, SpecError, r"must be above 0, got 0.0$"), (None, TypeError, r"must be a number, got None$")],
    "c_clip": [(math.nan, SpecError, r"must be above 0, got nan$")],
}


@functions
def test_what_is_wrong_is_named(function):
    for name in (*COMMON, *EXTRA[function]):
        for value, error, message in WRONG[name]:
            with pytest.raises(error, match=rf"^{name} {message}"):
                call(function, numbers(2, 5) | {name: value})


@pytest.fixture
def peers_arguments():
    """Rows with ends of both kinds, in which V of the next observation is that of the next row where it goes on."""
    arguments = numbers(3, 40)
    arguments["terminated"][0, [5, 30]] = True
    arguments["truncated"][1, [11, 12]] = True
    goes_on = ~(arguments["terminated"] | arguments["truncated"])[:, :-1]
    following = arguments["next_values"][:, :-1]
    following[goes_on] = arguments["values"][:, 1:][goes_on]
    return arguments


@functions
def test_torchrl_says_the_same(function, peers_arguments):
    theirs = pytest.importorskip("torchrl.objectives.value.functional")
    a = {k: v[..., None] if isinstance(v, torch.Tensor) else v for k, v in peers_arguments.items()}
    done = {"reward": a["rewards"], "done": a["terminated"] | a["truncated"], "terminated": a["terminated"]}
    both = {"next_state_value": a["next_values"], **done}
    wanted = {
        gae: lambda: theirs.generalized_advantage_estimate(GAMMA, a["lambda_"], a["values"], **both),
        discounted_returns: lambda: (theirs.td1_return_estimate(GAMMA, **both),),
        lambda_returns: lambda: (theirs.td_lambda_return_estimate(GAMMA, a["lambda_"], **both),),
        n_step_returns: lambda: (theirs.td0_return_estimate(GAMMA, **both),),  # that is n = 1
        vtrace: lambda: theirs.vtrace_advantage_estimate(
            GAMMA, a["target_log_probs"], a["behaviour_log_probs"], a["values"], **both
        ),
    }[function]()
    for mine, value in zip(call(function, peers_arguments | {"n": 1}), wanted, strict=True):
        torch.testing.assert_close(mine, value[..., 0], rtol=1e-5, atol=1e-5)  # its gamma has 32 bits


@functions
def test_rlax_says_the_same(function, peers_arguments):
    try:
        rlax = pytest.importorskip("rlax")
    except AttributeError as error:  # where a package that it needs lags behind jax
        pytest.skip(f"could not import rlax: {error}")
    peers_arguments["truncated"][:] = False  # which it does not know
    peers_arguments["next_values"][:, :-1] = peers_arguments["values"][:, 1:]
    mine = call(function, peers_arguments)
    a = {k: v.float().numpy() if isinstance(v, torch.Tensor) else v for k, v in peers_arguments.items()}
    for row in range(3):
        r_t, v_tm1, v_t = a["rewards"][row], a["values"][row], a["next_values"][row]
        discount_t = GAMMA * (1 - a["terminated"][row])
        rho = np.exp(a["target_log_probs"][row] - a["behaviour_log_probs"][row])
        if function is gae:
            values = np.append(v_tm1, v_t[-1])
            advantages = rlax.truncated_generalized_advantage_estimation(r_t, discount_t, a["lambda_"], values)
            wanted = advantages, advantages + v_tm1
        elif function is discounted_returns:
            wanted = (rlax.discounted_returns(r_t, discount_t, v_t),)
        elif function is lambda_returns:
            wanted = (rlax.lambda_returns(r_t, discount_t, v_t, a["lambda_"]),)
        elif function is n_step_returns:
            wanted = (rlax.n_step_bootstrapped_returns(r_t, discount_t, v_t, a["n"]),)
        else:
            found = rlax.vtrace_td_error_and_advantage(v_tm1, v_t, r_t, discount_t, rho)
            wanted = found.pg_advantage, found.errors + v_tm1
        for result, value in zip(mine, wanted, strict=True):
            np.testing.assert_allclose(result[row].numpy(), np.asarray(value), rtol=1e-4, atol=1e-4)


@functions
@given(arguments_of_all(), st.integers(0, 2**32))
def test_packed_steps_have_the_results_of_padded_ones(function, arguments, seed):
    shape = arguments["rewards"].shape
    lengths = torch.from_numpy(np.random.default_rng(seed).integers(0, shape[1] + 1, shape[0]))
    valid = torch.arange(shape[1])[None] < lengths[:, None]
    padded = {**arguments, "mask": valid if arguments["mask"] is None else valid & (arguments["mask"] != 0)}
    packed = {
        key: value[valid] if isinstance(value, torch.Tensor) and value.ndim else value
        for key, value in arguments.items()
    }
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    for bounds in (cu_seqlens.int(), cu_seqlens):
        results = function(**{name: packed[name] for name in (*COMMON, *EXTRA[function])}, cu_seqlens=bounds)
        for result, wanted in zip(
            results if isinstance(results, tuple) else (results,), call(function, padded), strict=True
        ):
            assert result.shape == (int(lengths.sum()),) and result.is_contiguous()
            torch.testing.assert_close(result, wanted[valid])


@functions
def test_a_pack_is_taken_as_its_batch_is(function):
    batch = ones("truncated")
    batch.trajectories.lengths[1] = 180
    for by in ("row", "episode"):
        pack = batch.packed(by)
        told, packed = transitions(batch), transitions(pack)
        assert packed["cu_seqlens"] is pack.cu_seqlens and packed["mask"].all()
        values = {name: torch.randn(2, 250) for name in FLOATS if name != "rewards"}
        gathered = {name: value[told["mask"]] for name, value in values.items()}
        of_batch = call(function, {**SETTINGS, **values, **told})
        settings = {name: SETTINGS[name] for name in EXTRA[function] if name in SETTINGS}
        others = {name: gathered[name] for name in ("next_values", *EXTRA[function]) if name in gathered}
        results = function(gamma=GAMMA, **settings, **others, **packed)
        for result, wanted in zip(results if isinstance(results, tuple) else (results,), of_batch, strict=True):
            torch.testing.assert_close(pack.unpack(result), wanted)


def test_packed_arguments_that_do_not_fit_are_named():
    ten = torch.zeros(10)
    arguments = {"rewards": ten, "next_values": ten, "terminated": ten, "truncated": ten, "gamma": 0.9}
    bounds = torch.tensor([0, 4, 10], dtype=torch.int32)
    with pytest.raises(SpecError, match=r"rewards must have shape \(B, T\), got \(10,\) float32"):
        discounted_returns(**arguments)
    with pytest.raises(SpecError, match=r"rewards must have shape \(N,\) with cu_seqlens, got \(1, 10\) float32"):
        discounted_returns(**{**arguments, "rewards": ten[None]}, cu_seqlens=bounds)
    with pytest.raises(SpecError, match=r"next_values must have shape"):
        discounted_returns(**{**arguments, "next_values": ten[:-1]}, cu_seqlens=bounds)
    with pytest.raises(TypeError, match=r"cu_seqlens must be an int32 tensor \(S \+ 1,\), got list"):
        discounted_returns(**arguments, cu_seqlens=[0, 4, 10])
    with pytest.raises(SpecError, match=r"cu_seqlens must have shape \(S \+ 1,\) on cpu"):
        discounted_returns(**arguments, cu_seqlens=bounds[None])
    with pytest.raises(SpecError, match="cu_seqlens must rise from 0 to 10"):
        discounted_returns(**arguments, cu_seqlens=bounds[:-1])
