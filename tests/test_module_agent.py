"""`ModuleAgent`: actions of every kind of space, drawn from the policy that the network gives."""

from __future__ import annotations

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.distributions import Bernoulli, Categorical, Independent, Normal

from rlstructs import (
    DictTensor,
    GymEnvInf,
    ModuleAgent,
    RL_Agent,
    RL_Agent_CheckDevice,
    RL_Batcher,
    SpecError,
    mask_logits,
    replay_agent,
    replay_agent_stateless,
)
from rlstructs.shared.module_state import plain_state
from rlstructs.testing import check_agent

N = 2000


class Constant(torch.nn.Module):
    """The same output in every row; keeps its last input."""

    def __init__(self, row, wrap=lambda output: output):
        super().__init__()
        self.row, self.wrap = torch.nn.Parameter(torch.as_tensor(row, dtype=torch.float32)), wrap

    def forward(self, inputs):
        self.inputs = inputs
        n = len(next(iter(inputs.values())) if isinstance(inputs, dict) else inputs)
        return self.wrap(self.row.expand(n, *self.row.shape))


def act(module, space, observation=None, **settings):
    torch.manual_seed(0)
    agent = ModuleAgent(module, space, **settings)
    observation = {"frame": torch.zeros(N, 3)} if observation is None else observation
    with torch.no_grad():
        output, state = agent(DictTensor(), DictTensor(observation), DictTensor())
    assert state == DictTensor() == agent.initial_state(DictTensor(), N)
    return agent, output


@pytest.mark.parametrize(
    ("space", "row", "probabilities"),
    [
        (spaces.Discrete(3), [0.0, 1.0, 2.0], [[0, 1, 2]]),
        (spaces.Discrete(3, start=-1), [0.0, 1.0, 2.0], [[-1, 0, 1]]),
        (spaces.MultiDiscrete([2, 3]), [0.0, 1.0, 0.0, 1.0, 2.0], [[0, 1], [0, 1, 2]]),
        (spaces.MultiDiscrete([2, 3], start=[5, 7]), [0.0, 1.0, 0.0, 1.0, 2.0], [[5, 6], [7, 8, 9]]),
    ],
)
def test_numbers_are_drawn_by_their_logits(space, row, probabilities):
    _, output = act(Constant(row), space)
    actions = output["action"].reshape(N, -1)
    log_prob, first = torch.zeros(N, dtype=torch.float64), 0
    for column, values in enumerate(probabilities):
        wanted = torch.tensor(row[first : first + len(values)], dtype=torch.float64).softmax(0)
        first += len(values)
        for value, share in zip(values, wanted, strict=True):
            is_it = actions[:, column] == value
            assert abs(is_it.double().mean() - share) < 0.05
            log_prob[is_it] += share.log()
    assert all(space.contains(np.asarray(action, space.dtype).reshape(space.shape)) for action in output["action"])
    torch.testing.assert_close(output["log_prob"].double(), log_prob, atol=1e-5, rtol=0)


def test_bits_are_drawn_one_by_one():
    _, output = act(Constant([-100.0, 100.0, 0.0]), spaces.MultiBinary(3))
    assert output["action"].dtype == torch.int8
    shares = output["action"].float().mean(0)
    assert shares[:2].tolist() == [0, 1] and abs(shares[2] - 0.5) < 0.05
    torch.testing.assert_close(output["log_prob"], torch.full((N,), 0.5).log(), atol=1e-5, rtol=0)


def test_a_tensor_for_a_box_is_the_action():
    _, output = act(Constant([0.5, -0.5]), spaces.Box(-1, 1, (2,)))
    assert set(output.keys()) == {"action"} and output["action"][7].tolist() == [0.5, -0.5]


@pytest.mark.parametrize("event_dims", [0, 1])
def test_a_distribution_is_drawn_from(event_dims):
    def wrap(mean):
        return torch.distributions.Independent(Normal(mean, 0.1), event_dims)

    _, output = act(Constant([0.5, -0.5], wrap), spaces.Box(-1, 1, (2,)))
    action = output["action"]
    assert abs(action.mean(0) - torch.tensor([0.5, -0.5])).max() < 0.02 and abs(action.std() - 0.51).max() < 0.05
    wanted = Normal(torch.tensor([0.5, -0.5]), 0.1).log_prob(action).sum(1)
    torch.testing.assert_close(output["log_prob"], wanted)
    _, output = act(Constant([0.0, 100.0], lambda logits: Categorical(logits=logits)), spaces.Discrete(2, start=4))
    assert (output["action"] == 5).all()


MASK = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 1, 1]])
POLICIES = {
    "numbers": (spaces.Discrete(3, start=2), 3, lambda x: x),
    "many numbers": (spaces.Discrete(900), 900, lambda x: x),
    "numbers of float64": (spaces.Discrete(3), 3, torch.Tensor.double),
    "masked numbers": (spaces.Discrete(3), 3, lambda x: mask_logits(x, MASK.repeat(len(x) // 3 + 1, 1)[: len(x)])),
    "impossible numbers": (spaces.Discrete(3), 3, lambda x: x.masked_fill((x < 0) & (torch.arange(3) > 0), -torch.inf)),
    "unlikely numbers": (spaces.Discrete(3), 3, lambda x: x * 50),
    "equal rows": (spaces.Discrete(3), 3, lambda x: x[:1].expand(len(x), 3)),
    "turned rows": (spaces.Discrete(3), 3, lambda x: x.T.contiguous().T),
    "several": (spaces.MultiDiscrete([2, 3, 1]), 6, lambda x: x),
    "several alike": (spaces.MultiDiscrete([[4, 4], [4, 4]], start=[[1, 2], [3, 4]]), 16, lambda x: x),
    "bits": (spaces.MultiBinary((2, 3)), 6, lambda x: x.reshape(-1, 2, 3) * 5),
    "logits": (spaces.Discrete(3), 3, lambda x: Categorical(logits=x)),
    "probabilities": (spaces.Discrete(3), 3, lambda x: Categorical(probs=x.softmax(-1).masked_fill(x < -1, 0) + 1e-9)),
    "several, given": (spaces.MultiDiscrete([3, 3]), 6, lambda x: Independent(Categorical(logits=x.view(-1, 2, 3)), 1)),
    "bits, given": (spaces.MultiBinary(4), 4, lambda x: Bernoulli(probs=x.sigmoid())),
    "normal": (spaces.Box(-9, 9, (4,)), 4, lambda x: Normal(1000 + x, x.exp())),
    "normals, one width": (spaces.Box(-9, 9, (2, 2)), 4, lambda x: Independent(Normal(x.view(-1, 2, 2), 0.1), 2)),
    "another": (spaces.Box(0, 1, (4,)), 4, lambda x: torch.distributions.Beta(x.exp(), x.exp())),
}  # fmt: skip


class Wrapped(torch.nn.Module):
    """A random layer, whose output some function changes."""

    def __init__(self, n, wrap):
        super().__init__()
        self.layer, self.wrap = torch.nn.Linear(3, n), wrap

    def forward(self, frame):
        return self.wrap(self.layer(frame))


@pytest.mark.parametrize("n", [1, 7, 64])
@pytest.mark.parametrize(("space", "size", "wrap"), POLICIES.values(), ids=POLICIES)
def test_actions_are_drawn_and_weighed_as_by_the_distribution(space, size, wrap, n):
    torch.manual_seed(n)
    agent = ModuleAgent(Wrapped(size, wrap), space)
    for seed in range(20):
        observation = DictTensor({"frame": torch.randn(n, 3)})
        torch.manual_seed(seed)
        output, _ = agent(DictTensor(), observation, DictTensor())
        torch.manual_seed(seed)
        policy = agent.policy(observation)
        action = policy.sample()
        start = torch.as_tensor(getattr(space, "start", 0))
        assert torch.equal(output["action"].to(action.dtype), action + start)
        log_prob = policy.log_prob(action).reshape(n, -1).sum(1)
        assert output["log_prob"].dtype == log_prob.dtype and not output["action"].requires_grad
        torch.testing.assert_close(output["log_prob"], log_prob, atol=1e-5, rtol=1e-5)
        weight = agent.module.layer.weight
        grads = [torch.autograd.grad(each.sum(), weight)[0] for each in (output["log_prob"], log_prob)]
        torch.testing.assert_close(*grads, atol=1e-3, rtol=1e-3)


def test_a_subclass_may_give_another_policy():
    class Greedy(ModuleAgent):
        def policy(self, observation):
            return super().policy(observation).logits.argmax(-1)

    output, _ = Greedy(Constant([0.0, 1.0, 0.5]), spaces.Discrete(3))(
        DictTensor(), DictTensor({"frame": torch.zeros(4, 3)}), DictTensor()
    )
    assert output["action"].tolist() == [1] * 4 and set(output.keys()) == {"action"}


def test_a_network_gets_the_frame_or_a_dict_of_entries():
    module = Constant([0.0, 0.0])
    agent, _ = act(module, spaces.Discrete(2))
    assert agent.module.inputs.shape == (N, 3)
    space = spaces.Dict({"frame": spaces.Box(-1, 1, (3,)), "more": spaces.Dict({"n": spaces.Discrete(4)})})
    given = {"frame": torch.zeros(N, 3), "more/n": torch.zeros(N, 1), "reward": torch.zeros(N)}
    agent, _ = act(module, spaces.Discrete(2), given, observation_space=space)
    assert set(agent.module.inputs) == {"frame", "more/n"}


def compiled(module):
    return torch.compile(module, backend="eager")


def weight_norm(module):
    return torch.nn.utils.parametrizations.weight_norm(module)


@pytest.mark.parametrize("wrap", [compiled, torch.nn.DataParallel, weight_norm, lambda module: module])
def test_wrapped_networks_are_copied_plain_and_updated_as_the_batcher_sends_them(wrap):
    network = torch.nn.Sequential(wrap(torch.nn.Linear(3, 2)))
    agent, _ = act(network, spaces.Discrete(2))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 1
    agent.update(plain_state(network))
    inputs, plain = torch.randn(5, 3), torch.nn.Linear(3, 2)
    plain.load_state_dict({name.removeprefix("0."): value for name, value in plain_state(network).items()})
    assert not any(a is b for a in agent.module.parameters() for b in network.parameters())
    with torch.no_grad():
        torch.testing.assert_close(agent.module(inputs), plain(inputs))


@pytest.mark.parametrize(
    ("space", "row", "message"),
    [
        (spaces.Discrete(3), [0.0, 1.0], r"must return a tensor \(2000, 3\) or a distribution for Discrete\(3\), got"),
        (spaces.MultiDiscrete([2, 3]), [0.0], r"a tensor \(2000, 5\)"),
        (spaces.Box(-1, 1, (2,)), [0.0], r"a tensor \(2000, 2\)"),
    ],
)
def test_an_output_of_another_shape_is_refused(space, row, message):
    with pytest.raises(SpecError, match=message):
        act(Constant(row), space)


def test_what_the_network_was_called_with_is_named():
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        act(torch.nn.Linear(9, 3), spaces.Discrete(3))
    assert caught.value.__notes__ == ["the module of the agent was called with observations (2000, 3) float32"]
    with pytest.raises(SpecError, match="got tuple; compute values and what else there is in the trainer"):
        act(torch.nn.GRU(3, 3), spaces.Discrete(3))


def test_what_is_no_network_or_no_supported_space_is_refused():
    with pytest.raises(TypeError, match=r"module must be a torch.nn.Module, got function"):
        ModuleAgent(lambda inputs: inputs, spaces.Discrete(2))
    with pytest.raises(SpecError, match=r"must be one of Discrete, MultiDiscrete, MultiBinary, Box, got Dict"):
        ModuleAgent(torch.nn.Identity(), spaces.Dict({"a": spaces.Discrete(2)}))


class Asked(gymnasium.Env):
    """Episodes of 3 steps; the reward is the action."""

    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), float(action), self.t == 3, False, {}


class Mode(torch.nn.Module):
    """Takes action 1 in training mode, 0 in evaluation mode."""

    def forward(self, frame):
        return torch.tensor([0.0, 1000.0 if self.training else -1000.0]).expand(len(frame), 2)


class Holder(RL_Agent):
    """Acts with a network that it holds, in some way."""

    def __init__(self, held, find=lambda held: held):
        self.held, self.find = held, find

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        return DictTensor({"action": self.find(self.held)(observation["frame"]).argmax(-1)}), state


class Network(RL_Agent, torch.nn.Module):
    """An agent that is a network; it holds itself, too."""

    def __init__(self):
        torch.nn.Module.__init__(self)
        self.mode, self.agents = Mode(), [self]

    initial_state, find = Holder.initial_state, lambda self, held: self.mode

    @property
    def held(self):
        return self

    def forward(self, *arguments, **others):
        return Holder.__call__(self, *arguments, **others)

    __call__ = forward


KEEPING = type("Keeping", (Holder,), {"keeps_modes": True})
AGENTS = {
    "network": Mode, "function": lambda: Mode, "ModuleAgent": lambda: ModuleAgent(Mode(), Asked.action_space),
    "attribute": lambda: Holder(Mode()), "list": lambda: Holder([Mode()], lambda held: held[0]),
    "dict": lambda: Holder({"a": (Mode(),)}, lambda held: held["a"][0]), "agent": Network,
    "agent in an agent": lambda: RL_Agent_CheckDevice(Holder(Mode()), "cpu"),
}  # fmt: skip
TRAINING = {
    "ModuleAgent": lambda: ModuleAgent(Mode().eval(), Asked.action_space, training=True),
    "attribute": lambda: KEEPING(Mode()), "agent in an agent": lambda: RL_Agent_CheckDevice(KEEPING(Mode()), "cpu"),
}  # fmt: skip
MODES = [*((name, make, 0) for name, make in AGENTS.items()), *((name, make, 1) for name, make in TRAINING.items())]


@pytest.mark.parametrize("n_workers", [0, 1])
@pytest.mark.parametrize(("make", "action"), [mode[1:] for mode in MODES], ids=[f"{m[0]}-{m[2]}" for m in MODES])
def test_networks_act_in_evaluation_mode_unless_their_agent_keeps_their_modes(make, action, n_workers):
    with RL_Batcher.make(Asked, make(), n_envs=2, n_workers=n_workers, n_timesteps=4, seed=0) as batcher:
        steps = next(iter(batcher)).trajectories
        assert (steps["action/action"] == action).all()
        assert (batcher.evaluate(2, seed=0)["return"] == 3 * action).all()


@pytest.mark.parametrize(("training", "action"), [(False, 0), (True, 1)])
def test_the_mode_in_which_a_network_is_given_or_sent_does_not_matter(training, action):
    network = Mode()
    network.layer = torch.nn.Linear(1, 1)
    agent = ModuleAgent(network.train(not training), Asked.action_space, training=training)
    with RL_Batcher.make(Asked, agent, n_envs=2, n_workers=0, n_timesteps=4, seed=0) as batcher:
        for mode in (True, False):
            batcher.update(network.train(mode))
            assert (next(iter(batcher)).trajectories["action/action"] == action).all()
            assert network.training == network.layer.training == mode


def test_a_network_that_the_trainer_shares_is_put_back_into_its_modes_even_after_an_error():
    network = torch.nn.Sequential(Mode(), torch.nn.Dropout(0.5).eval())
    modes, calls = [part.training for part in network.modules()], []

    def check(held):
        calls.append([part.training for part in network.modules()])
        if len(calls) > 6:
            raise ZeroDivisionError
        return held

    agent = Holder(network, check)
    with RL_Batcher(4, lambda: agent, {}, partial(GymEnvInf, [Asked()]), {}, 0, 0) as batcher:
        next(iter(batcher))
        assert [part.training for part in network.modules()] == modes == [True, True, False]
        batcher.execute()
        with pytest.raises(ZeroDivisionError):
            batcher.get()
    assert calls == [[False] * 3] * 7 and [part.training for part in network.modules()] == modes


def test_log_probabilities_are_those_of_the_whole_network_and_one_environment_is_enough_for_a_batch_norm():
    layers = torch.nn.Linear(2, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)
    network = torch.nn.Sequential(*layers)
    with RL_Batcher.make(Asked, network, n_envs=1, n_workers=0, n_timesteps=9, seed=0) as batcher:
        batch = next(iter(batcher))
    assert network.training
    with torch.no_grad():
        wanted = Categorical(logits=network.eval()(batch.trajectories["observation/frame"][0]))
    steps = {name: batch.trajectories[f"action/{name}"][0] for name in ("action", "log_prob")}
    torch.testing.assert_close(steps["log_prob"], wanted.log_prob(steps["action"]))
    replayed = replay_agent(ModuleAgent(network.train(), Asked.action_space), batch)
    assert replayed["log_prob"].requires_grad and replayed["action"].shape == (1, 9)


def test_check_agent_acts_and_replays_in_evaluation_mode():
    networks = [torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5), torch.nn.Linear(3, 2)]
    agent = Holder(torch.nn.Sequential(*networks))
    check_agent(agent, DictTensor({"frame": torch.randn(4, 2), "initial_state": torch.ones(4, dtype=torch.bool)}))
    assert agent.held.training


# --- what is wrong with a network, and what is no agent -------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_a_network_of_another_dtype_is_named_with_what_to_do(dtype):
    message = rf"parameters are {str(dtype)[6:]}, the observations are float32: give it as module.to\(torch.float32\)"
    with pytest.raises(SpecError, match=message):
        RL_Batcher.make("CartPole-v1", torch.nn.Linear(4, 2).to(dtype), n_envs=2, n_workers=0)


@pytest.mark.parametrize("space", [spaces.Discrete(2), spaces.MultiDiscrete([1, 1]), spaces.MultiBinary(2)], ids=str)
@pytest.mark.parametrize("in_weights", [True, False])
def test_logits_that_are_nan_are_named_with_their_row_and_the_parameters(space, in_weights):
    module = torch.nn.Linear(3, 2)
    observation = torch.zeros(4, 3)
    if in_weights:
        module.bias.data[1] = torch.nan
        message = r"logits are NaN in row 0; its parameters \['bias'\] hold NaN"
    else:
        observation[2] = torch.nan
        message = "logits are NaN in row 2; its parameters hold none"
    with pytest.raises(SpecError, match=f"^agent: the module's {message}"):
        act(module, space, {"frame": observation})


FAULTY = {
    "shape": (spaces.Discrete(2), lambda frame: Categorical(logits=torch.zeros(len(frame), 1, 2))),
    "one": (spaces.Discrete(2), lambda frame: Categorical(logits=torch.zeros(2))),
    "vector": (spaces.Box(-1, 1, (2,)), lambda frame: Normal(torch.zeros(len(frame), 3), 1.0)),
    "numbers": (spaces.MultiDiscrete([2, 2]), lambda frame: Categorical(logits=torch.zeros(len(frame), 2))),
    "one hot": (spaces.Discrete(2), lambda frame: torch.distributions.OneHotCategorical(torch.ones(len(frame), 2))),
    "floats": (spaces.Discrete(2), lambda frame: torch.distributions.Bernoulli(torch.ones(len(frame)) / 2)),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_distribution_of_another_shape_or_dtype_is_refused_when_the_batcher_is_made(name):
    space, policy = FAULTY[name]

    class Faulty(torch.nn.Module):
        def forward(self, frame):
            return policy(frame)

    class Spaced(Asked):
        action_space = space

    message = rf"^agent: a \w+ of the module gave \(.*, expected \(2.* for {type(space).__name__}"
    with pytest.raises(SpecError, match=message):
        RL_Batcher.make(Spaced, Faulty(), n_envs=2, n_workers=0)


NET = torch.nn.Linear(4, 2)
NO_AGENTS = {
    "create_agent": lambda: RL_Batcher(4, NET, {}, partial(GymEnvInf, [Asked()]), {}, 0, 0),
    "made": lambda: RL_Batcher(4, lambda: NET, {}, partial(GymEnvInf, [Asked()]), {}, 0, 0),
    "check_agent": lambda: check_agent(NET, DictTensor({"frame": torch.zeros(2, 4)})),
    "check_agent made": lambda: check_agent(lambda: NET, DictTensor({"frame": torch.zeros(2, 4)})),
    "replay": lambda: replay_agent(NET, None), "stateless": lambda: replay_agent_stateless(NET, None, "call_replay"),
    "device": lambda: RL_Agent_CheckDevice(NET, "cpu"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_AGENTS)
def test_a_network_in_the_place_of_an_agent_is_told_of_module_agent(name):
    with pytest.raises(TypeError, match=r"Linear.*ModuleAgent\(module, action_space\)"):
        NO_AGENTS[name]()


def test_logits_may_be_whole_numbers():
    def whole(output):
        return (output * 50).long()

    _, output = act(Constant([0.0, 1.0, 0.0], whole), spaces.Discrete(3))
    assert (output["action"] == 1).all() and output["log_prob"].dtype == torch.float32


def test_invalid_probabilities_are_drawn_by_torch_which_refuses_them():
    def invalid(output):
        return Categorical(probs=output, validate_args=False)

    with pytest.raises(RuntimeError, match="probability tensor"):
        act(Constant([-3.0, 1.0, 1.0], invalid), spaces.Discrete(3))
