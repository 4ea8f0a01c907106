"""`RL_Agent`, its device check, and the replay of agents over trajectories."""

from __future__ import annotations

import pytest
import torch

from rlstructs import (
    DictTensor,
    MissingKeyError,
    RL_Agent,
    RL_Agent_CheckDevice,
    SpecError,
    TemporalDictTensor,
    Trajectories,
    mask_logits,
    replay_agent,
    replay_agent_stateless,
)

NO_INFO = DictTensor()


class Linear(RL_Agent):
    """State n, which counts up; output y = w * x + n, times `scale` of its info where there is one."""

    def __init__(self):
        self.w = torch.nn.Parameter(torch.tensor(2.0))
        self.calls = []

    def initial_state(self, agent_info, B):
        return DictTensor({"n": torch.zeros(B)})

    def __call__(self, state, observation, agent_info, history=None):
        self.calls.append((observation, agent_info, history))
        y = self.w * observation["x"] + state["n"]
        if "scale" in agent_info:
            y = y * agent_info["scale"]
        return DictTensor({"y": y}), DictTensor({"n": state["n"] + 1})

    def reversed_replay(self, trajectories, t, state):
        output, state = self.call_replay(trajectories, t, state)
        return DictTensor({"z": -output["y"]}), state

    def total(self, trajectories):
        return (self.w * trajectories.trajectories["observation/x"] * trajectories.mask()).sum()


def trajectories_of(x, lengths, n=(10.0, 20.0), **info):
    steps = {"observation/x": torch.tensor(x), "_observation/x": torch.full((len(x), len(x[0])), torch.nan)}
    info = DictTensor({"agent_state/n": torch.tensor(n), **info})
    return Trajectories(info, TemporalDictTensor(steps, torch.tensor(lengths)))


ROWS = [[1.0, 2.0, 3.0], [4.0, 99.0, 99.0]]


# --- RL_Agent ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda agent: agent.initial_state(NO_INFO, 2), r"^Bare must define initial_state\(agent_info, B\)"),
        (lambda agent: agent(NO_INFO, NO_INFO, NO_INFO), r"^Bare must define __call__\("),
        (lambda agent: agent.update(1), r"^Bare must define update\(info\)"),
    ],
    ids=["initial_state", "call", "update"],
)
def test_what_an_agent_must_define_is_said_when_it_is_called(call, message):
    class Bare(RL_Agent):
        pass

    with pytest.raises(NotImplementedError, match=message):
        call(Bare())


def test_what_an_agent_need_not_define_does_nothing():
    agent = RL_Agent()
    assert agent.require_history() is False and agent.seed(3) is None and agent.close() is None


def test_call_replay_starts_from_the_recorded_state_and_needs_one_later():
    agent, trajectories = Linear(), trajectories_of(ROWS, [3, 1], **{"agent_info/scale": torch.tensor([1.0, 2.0])})
    output, state = agent.call_replay(trajectories, 0, None)
    assert output["y"].tolist() == [12, 56] and state["n"].tolist() == [11, 21]
    output, _ = agent.call_replay(trajectories, 1, DictTensor({"n": torch.tensor([0.0, 0.0])}))
    assert output["y"].tolist() == [4, 396]
    observation, info, history = agent.calls[0]
    assert list(observation) == ["x"] and info["scale"].tolist() == [1, 2] and history is None
    with pytest.raises(SpecError, match=r"^call_replay: a state is needed at t=1"):
        agent.call_replay(trajectories, 1, None)


def test_call_replay_gives_the_steps_so_far_to_an_agent_that_wants_them():
    class Historian(Linear):
        def require_history(self):
            return True

    agent, trajectories = Historian(), trajectories_of(ROWS, [3, 1])
    replay_agent(agent, trajectories)
    for t, (_, _, history) in enumerate(agent.calls):
        assert history == trajectories.trajectories.temporal_slice(0, t)
        assert history.lengths.tolist() == [t, min(t, 1)]


# --- replay --------------------------------------------------------------------------------------


def test_replay_carries_the_state_and_gradients():  # CV72
    agent = Linear()
    replayed = replay_agent(agent, trajectories_of(ROWS, [3, 1]))
    assert replayed["y"][0].tolist() == [12, 15, 18] and replayed["y"][1, 0] == 28
    assert replayed.lengths.tolist() == [3, 1] and list(replayed) == ["y"]
    (replayed["y"] * replayed.mask()).sum().backward()
    assert agent.w.grad == 10


@pytest.mark.parametrize(("lengths", "n_timesteps"), [([2, 1], 2), ([1, 0], 1), ([3, 3], 3)], ids=str)
def test_replay_ends_with_the_longest_trajectory(lengths, n_timesteps):  # CV72
    trajectories = trajectories_of(ROWS, lengths)
    replayed = replay_agent(Linear(), trajectories)
    assert replayed.n_timesteps() == n_timesteps and replayed.lengths.tolist() == lengths
    replayed.lengths[0] = 0
    assert trajectories.lengths.tolist() == lengths


@pytest.mark.parametrize("method", ["call_replay", "reversed_replay"])
@pytest.mark.parametrize("n_rows", [0, 2])
def test_a_replay_without_steps_has_the_keys_of_others_and_gradients_of_0(n_rows, method):
    agent, key = Linear(), {"call_replay": "y", "reversed_replay": "z"}[method]
    trajectories = trajectories_of(ROWS, [0, 0]).slice(0, n_rows)
    for batch in (trajectories, trajectories.shorten()):
        replayed = replay_agent(agent, batch, method)
        assert list(replayed) == [key] and replayed[key].shape == (n_rows, 0)
        assert replayed[key].dtype == torch.float32 and replayed.lengths.tolist() == [0] * n_rows
        (replayed[key] * replayed.mask()).sum().backward()
        assert agent.w.grad == 0


@pytest.mark.parametrize("n_rows", [0, 2])
def test_a_replay_without_steps_of_an_agent_that_refuses_padding_has_what_was_recorded(n_rows):
    class Refusing(Linear):
        def __call__(self, state, observation, agent_info, history=None):
            mask_logits(torch.zeros(2, 1), observation["x"][:, None])  # padding allows nothing
            return super().__call__(state, observation, agent_info)

    trajectories = trajectories_of(ROWS, [0, 0])
    trajectories.trajectories.set("action/y", torch.ones(2, 3))
    trajectories.trajectories.set("action/n", torch.ones(2, 3, dtype=torch.int64))
    replayed = replay_agent(Refusing(), trajectories.slice(0, n_rows))
    assert {key: tensor.shape for key, tensor in replayed.items()} == {"y": (n_rows, 0), "n": (n_rows, 0)}
    replayed["y"].sum().backward()
    with torch.no_grad():
        assert not replay_agent(Refusing(), trajectories)["y"].requires_grad


def test_replay_by_another_method():
    replayed = replay_agent(Linear(), trajectories_of(ROWS, [3, 1]), replay_method_name="reversed_replay")
    assert replayed["z"][0].tolist() == [-12, -15, -18]
    with pytest.raises(AttributeError, match="no_such"):
        replay_agent(Linear(), trajectories_of(ROWS, [3, 1]), "no_such")


@pytest.mark.parametrize(
    ("later", "error", "message"),
    [
        (["y"], MissingKeyError, r"^replay_agent: the output at t=2: key\(s\) \['z'\] are missing"),
        (["y", "z", "more"], SpecError, r"^replay_agent: the output at t=2: unknown key\(s\) \['more'\]"),
        ([], MissingKeyError, r"^replay_agent: the output at t=2: key\(s\) \['y', 'z'\] are missing"),
    ],
    ids=["dropped", "added", "none"],
)
def test_outputs_whose_keys_change_are_refused(later, error, message):
    class Changing(Linear):
        def call_replay(self, trajectories, t, state):
            return DictTensor({key: torch.zeros(2) for key in (["y", "z"] if t < 2 else later)}), NO_INFO

    with pytest.raises(error, match=message):
        replay_agent(Changing(), trajectories_of(ROWS, [3, 1]))


def test_a_stateless_replay_is_one_call():
    agent = Linear()
    total = replay_agent_stateless(agent, trajectories_of(ROWS, [3, 1]), "total")
    total.backward()
    assert total == 20 and agent.w.grad == 10
    assert replay_agent_stateless(RL_Agent_CheckDevice(agent, "cpu"), trajectories_of(ROWS, [3, 1]), "total") == 20


# --- RL_Agent_CheckDevice ------------------------------------------------------------------------


class Talkative(Linear):
    """Keeps what it is told; gives what it is set to give."""

    name = "talkative"

    def __init__(self):
        super().__init__()
        self.told, self.gives = [], {}

    def initial_state(self, agent_info, B):
        return self.gives.get("initial", super().initial_state(agent_info, B))

    def __call__(self, state, observation, agent_info):  # without history, which it does not want
        output, state = super().__call__(state, observation, agent_info)
        return self.gives.get("output", output), self.gives.get("state", state)

    def require_history(self):
        return "asked"

    def update(self, info):
        self.told.append(("update", info))

    def seed(self, seed):
        self.told.append(("seed", seed))

    def close(self):
        self.told.append("close")


def test_a_checked_agent_forwards_everything():
    agent = Talkative()
    checked = RL_Agent_CheckDevice(agent, "cpu")
    checked.seed(5), checked.update({"w": 1}), checked.close()
    assert agent.told == [("seed", 5), ("update", {"w": 1}), "close"]
    assert checked.name == "talkative" and checked.require_history() == "asked" and checked.w is agent.w
    assert checked.initial_state(NO_INFO, 2)["n"].tolist() == [0, 0]
    output, state = checked(DictTensor({"n": torch.ones(2)}), DictTensor({"x": torch.ones(2)}), NO_INFO)
    assert output["y"].tolist() == [3, 3] and state["n"].tolist() == [2, 2]
    with pytest.raises(AttributeError, match="nothing"):
        _ = checked.nothing


@pytest.mark.parametrize("method", ["call_replay", "reversed_replay"])
def test_a_checked_agent_replays_as_the_agent_does(method):
    trajectories = trajectories_of(ROWS, [3, 1])
    checked = RL_Agent_CheckDevice(Linear(), torch.device("cpu"))
    assert replay_agent(checked, trajectories, method) == replay_agent(Linear(), trajectories, method)


def test_a_checked_agent_takes_history():
    agent = Linear()
    history = TemporalDictTensor({"observation/x": torch.zeros(2, 0)})
    checked = RL_Agent_CheckDevice(agent, "cpu")
    checked(DictTensor({"n": torch.ones(2)}), DictTensor({"x": torch.ones(2)}), NO_INFO, history=history)
    assert agent.calls[0][2] is history


def on(device, key="n"):
    return DictTensor({key: torch.zeros(2, device=device)})


def test_everything_may_be_on_another_device_but_agent_info():
    agent = Linear()
    agent.w = torch.nn.Parameter(torch.tensor(1.0, device="meta"))
    agent.initial_state = lambda agent_info, B: on("meta")
    checked = RL_Agent_CheckDevice(agent, "meta")
    output, state = checked(checked.initial_state(on("cpu", "eps"), 2), on("meta", "x"), on("cpu", "eps"))
    assert output.device().type == state.device().type == "meta"


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"agent_info": "meta"}, "agent_info: 'eps' is on meta, expected cpu"),
        ({"state": "wrong"}, "state: 'n' is on {wrong}, expected {right}"),
        ({"observation": "wrong"}, "observation: 'x' is on {wrong}, expected {right}"),
        ({"history": "wrong"}, "history: 'h' is on {wrong}, expected {right}"),
        ({"output": "wrong"}, "the output: 'y' is on {wrong}, expected {right}"),
        ({"next": "wrong"}, "the next state: 'n' is on {wrong}, expected {right}"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_what_is_on_the_wrong_device_is_named(device, arguments, message):
    wrong = "meta" if device == "cpu" else "cpu"
    where = {name: wrong if value == "wrong" else value for name, value in arguments.items()}

    class Giving(RL_Agent):
        def __call__(self, state, observation, agent_info, history=None):
            return on(where.get("output", device), "y"), on(where.get("next", device))

    history = TemporalDictTensor({"h": torch.zeros(2, 1, device=where.get("history", device))})
    with pytest.raises(SpecError, match=f"^{message.format(wrong=wrong, right=device)}"):
        RL_Agent_CheckDevice(Giving(), device)(
            on(where.get("state", device)), on(where.get("observation", device), "x"),
            on(where.get("agent_info", "cpu"), "eps"), history=history,
        )  # fmt: skip


def test_initial_states_and_replays_are_checked_too():
    agent = Talkative()
    agent.gives["initial"] = on("meta")
    checked, trajectories = RL_Agent_CheckDevice(agent, "cpu"), trajectories_of(ROWS, [3, 1])
    with pytest.raises(SpecError, match="^the initial state: 'n' is on meta"):
        checked.initial_state(NO_INFO, 2)
    with pytest.raises(SpecError, match="^agent_info: 'eps' is on meta, expected cpu"):
        checked.initial_state(on("meta", "eps"), 2)
    with pytest.raises(SpecError, match="^state: 'n' is on meta"):
        checked.call_replay(trajectories, 1, on("meta"))
    with pytest.raises(SpecError, match="^trajectories: '.*observation/x' is on meta, expected cpu"):
        checked.call_replay(trajectories.to("meta"), 0, None)
    agent.require_history, agent.gives = (lambda: False), {"output": on("meta", "y")}
    with pytest.raises(SpecError, match="^the output: 'y' is on meta"):
        checked.call_replay(trajectories, 0, None)


class PutsOut(RL_Agent):
    """Counts in its state, in place, and puts that out as it is."""

    def initial_state(self, agent_info, B):
        return DictTensor({"n": torch.zeros(B)})

    def __call__(self, state, observation, agent_info, history=None):
        state["n"].add_(1)
        return DictTensor({**state}), state


def test_a_state_that_is_put_out_and_written_into_is_replayed_as_it_was():
    trajectories = Trajectories(
        DictTensor({"agent_state/n": torch.zeros(1)}), TemporalDictTensor({"observation/x": torch.zeros(1, 3)})
    )
    for _ in range(2):
        assert replay_agent(PutsOut(), trajectories)["n"].tolist() == [[1, 2, 3]]


def test_a_checked_agent_has_the_agent_and_its_device():
    inner = PutsOut()
    checked = RL_Agent_CheckDevice(inner, "cpu")
    assert checked.agent is inner and checked.device == torch.device("cpu")
    assert isinstance(checked, RL_Agent)  # as in rlstructures


class Bare:
    """What workers need of an agent, and no more."""

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info):
        return DictTensor({"action": observation["x"]}), state


def test_a_checked_agent_is_seeded_only_if_it_can_be():
    checked = RL_Agent_CheckDevice(Bare(), "cpu")
    checked.seed(3)
    assert checked(DictTensor(), on("cpu", "x"), NO_INFO)[0]["action"].tolist() == [0, 0]


class InPlace(RL_Agent):
    """Writes into the state that it is given."""

    def __call__(self, state, observation, agent_info, history=None):
        state["n"].add_(1)
        return DictTensor({"out": state["n"].clone()}), state


def test_a_replay_leaves_the_trajectories_as_they_were():
    info = DictTensor({"agent_state/n": torch.zeros(1, dtype=torch.int64)})
    steps = TemporalDictTensor({"observation/x": torch.zeros(1, 3)}, torch.tensor([3]))
    trajectories = Trajectories(info, steps)
    for _ in range(2):
        assert replay_agent(InPlace(), trajectories)["out"].tolist() == [[1, 2, 3]]
