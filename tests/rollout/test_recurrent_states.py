"""Rows of a state come first: (layers, B, ...) is refused by name, also with as many layers as environments."""

from __future__ import annotations

import gymnasium
import pytest
import torch

from rlstructs import DictTensor, GymEnvInf, RL_Agent, RL_Batcher, SpecError, masked_dicttensor, replay_agent
from rlstructs.testing import check_agent

HINT = r"; permute it to batch first, by `\.transpose\(0, 1\)`: a recurrent layer of torch has \(layers, B, \.\.\.\)"


class Recurrent(RL_Agent):
    """A policy with a GRU of several layers; its state is (B, layers, H), and, where it counts, (B,) beside."""

    counts = False

    def __init__(self, n_layers):
        torch.manual_seed(0)
        self.n_layers, self.memory = n_layers, torch.nn.GRU(4, 8, n_layers)

    def initial_state(self, agent_info, B):
        return self.state(torch.zeros(B, self.n_layers, 8), torch.zeros(B))

    def state(self, h, n):
        return DictTensor({"h": h, "n": n} if self.counts else {"h": h})

    def __call__(self, state, observation, agent_info, history=None):
        state = masked_dicttensor(
            state, self.initial_state(agent_info, observation.n_elems()), observation["initial_state"]
        )
        seen, h = self.memory(observation["frame"][None], self.given(state["h"]))
        noise = torch.rand(observation.n_elems())
        action = (seen[0].sum(-1) + noise > 0.5).long()
        output = DictTensor({"action": action, "seen": seen[0], "noise": noise})
        return output, self.state(self.returned(h), state["n"] + 1 if self.counts else None)

    def given(self, h):
        return h.transpose(0, 1).contiguous()

    def returned(self, h):
        return h.transpose(0, 1)

    def update(self, info):
        pass

    def seed(self, seed):
        torch.manual_seed(seed)


class LayersFirst(Recurrent):
    """Its state is what torch gives, from the first one on."""

    def initial_state(self, agent_info, B):
        return DictTensor({"h": torch.zeros(self.n_layers, B, 8)})

    def __call__(self, state, observation, agent_info, history=None):
        seen, h = self.memory(observation["frame"][None], state["h"])
        return DictTensor({"action": (seen[0].sum(-1) > 0).long()}), DictTensor({"h": h})


class Masked(LayersFirst):
    """As it is written in a hurry: a shape that the mask does not fit."""

    def __call__(self, state, observation, agent_info, history=None):
        fresh = self.initial_state(agent_info, observation.n_elems())
        return super().__call__(masked_dicttensor(state, fresh, observation["initial_state"]), observation, agent_info)


class Forgets(Recurrent):
    """Gives the layer what it wants, and returns what it gives."""

    def returned(self, h):
        return h


class HandsOn(Forgets):
    """Permutes nothing."""

    def given(self, h):
        return h


class OfOne(RL_Agent):
    """Made for one environment alone."""

    def initial_state(self, agent_info, B):
        return DictTensor({"n": torch.zeros(1, 1, 3)})

    def __call__(self, state, observation, agent_info, history=None):
        action = int(observation["frame"][:, 0].item() > 0)
        return DictTensor({"action": torch.tensor([action])}), DictTensor({"n": state["n"] + 1})


def create_envs(n_envs, seed):
    return GymEnvInf([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed)


def batches(agent, agent_args, n_envs, n_processes=0, n_rollouts=3, **arguments):
    seeds = [100 * worker for worker in range(max(1, n_processes))]
    with RL_Batcher(6, agent, agent_args, create_envs, {"n_envs": n_envs}, n_processes, seeds, **arguments) as batcher:
        batcher.reset()
        found = []
        for _ in range(n_rollouts):
            batcher.execute()
            found.append(batcher.get()[0])
    return found


@pytest.mark.parametrize("n_envs", [1, 2, 3, 4])
@pytest.mark.parametrize("n_layers", [1, 2, 3])
@pytest.mark.parametrize("agent", [LayersFirst, Masked, Forgets])
def test_a_state_with_layers_first_is_refused_by_name(agent, n_layers, n_envs):
    which = "its next state" if agent is Forgets else "initial_state"
    n = n_envs if n_envs != n_layers else max(1, n_envs - 1) if n_envs > 1 else 2
    of = "" if n == n_envs else " of 1 environment" if n == 1 else f" of {n} environments"
    message = rf"'h' has shape \({n_layers}, {n}, 8\), expected \({n}, \.\.\.\){HINT}$"
    with pytest.raises(SpecError, match=f"^agent: {which}{of}: {message}"):
        batches(agent, {"n_layers": n_layers}, n_envs)
    with pytest.raises(SpecError, match=rf"'h' has shape \({n_layers}, \d, 8\), expected \(\d, \.\.\.\){HINT}$"):
        check_agent(agent, create_envs(n_envs, 0), {"n_layers": n_layers})


class HandsOnWithoutMask(HandsOn):
    """Does what a GRU of one layer for each does, in code of its own."""

    def __call__(self, state, observation, agent_info, history=None):
        layers = [layer + observation["frame"].sum(1, keepdim=True) for layer in state["h"]]
        action = (layers[-1].sum(1) > 0).long()
        return DictTensor({"action": action}), DictTensor({"h": torch.stack(layers)})


@pytest.mark.parametrize(("agent", "n"), [(HandsOn, 1), (HandsOn, 2), (HandsOn, 3), (HandsOnWithoutMask, 3)])
def test_a_state_that_is_handed_on_unpermuted_is_refused_where_its_shape_does_not_show_it(agent, n):
    said = rf"size \({n}, \d, 8\), got \[\d, {n}, 8\]" if agent is HandsOn else rf"'h' has shape \({n}, \d, 8\), .*"
    with pytest.raises(SpecError, match=rf"^agent: its next state of \d environments?: .*{said}{HINT}$"):
        batches(agent, {"n_layers": n}, n)
    with pytest.raises(SpecError, match=rf"^{agent.__name__}: its next state of \d environments?: .*{said}{HINT}$"):
        check_agent(agent, create_envs(n, 0), {"n_layers": n})


def test_a_state_with_layers_first_is_refused_in_workers(start_method):
    with pytest.raises(SpecError, match=rf"^agent: initial_state of 1 environment: 'h' has shape .*{HINT}"):
        batches(Masked, {"n_layers": 2}, 2, n_processes=2, start_method=start_method)


class Counts(Forgets):
    counts = True


class CountsFirst(Recurrent):
    counts = True

    def initial_state(self, agent_info, B):
        return self.state(torch.zeros(self.n_layers, B, 8), torch.zeros(B))


@pytest.mark.parametrize("n_envs", [1, 2, 3])
@pytest.mark.parametrize("n_layers", [1, 2, 3])
@pytest.mark.parametrize("agent", [Counts, CountsFirst])
def test_layers_first_beside_something_with_rows_first_is_refused_by_name(agent, n_layers, n_envs):
    message = rf"DictTensor: 'n' has .*; 'h' has shape \({n_layers}, \d, 8\), expected \(\d, \.\.\.\){HINT}$"
    with pytest.raises(SpecError, match=message):
        batches(agent, {"n_layers": n_layers}, n_envs)
    with pytest.raises(SpecError, match=message):
        check_agent(agent, create_envs(n_envs, 0), {"n_layers": n_layers})


@pytest.mark.parametrize("n_envs", [1, 2, 3])
@pytest.mark.parametrize("n_layers", [1, 2, 3])
def test_a_state_with_rows_first_is_taken_and_replayed(n_layers, n_envs):
    arguments = {"n_layers": n_layers}
    check_agent(Recurrent, create_envs(n_envs, 0), arguments, replayed=["seen"])
    for batch in batches(Recurrent, arguments, n_envs):
        assert batch.info["agent_state/h"].shape == (n_envs, n_layers, 8)
        seen = replay_agent(Recurrent(n_layers), batch)["seen"]
        assert torch.allclose(seen, batch.trajectories["action/seen"], atol=1e-6)


def test_looking_at_a_square_state_draws_from_nobodys_stream():
    square, other = (batches(Recurrent, {"n_layers": n}, 2)[0].trajectories["action/noise"] for n in (2, 3))
    assert torch.equal(square, other)


def test_an_agent_for_one_number_of_environments_is_taken_as_it_is():
    [first, second] = batches(OfOne, {}, 1, n_rollouts=2)
    assert first.info["agent_state/n"].sum() == 0 and second.info["agent_state/n"].sum() == 18


class ChangesLater(Recurrent):
    """Returns layers first from its second step on."""

    def returned(self, h):
        self.n_calls = getattr(self, "n_calls", 0) + 1
        return h.transpose(0, 1) if self.n_calls == 1 else h


def test_a_state_that_changes_later_is_refused_before_the_agent_gets_it():
    message = rf"^agent: state 'h' is \(3, 2, 8\) float32, expected \(2, 3, 8\) float32{HINT}$"
    with pytest.raises(SpecError, match=message):
        batches(ChangesLater, {"n_layers": 3}, 2)


def test_masks_name_the_entry_that_has_layers_first():
    square, flat, mask = torch.zeros(2, 3, 8), torch.zeros(3, 2, 8), torch.ones(3, dtype=torch.bool)
    for one, other in ((square, flat), (flat, square), (square, square)):
        with pytest.raises(SpecError, match=rf"^masked_dicttensor: 'h': .*{HINT}$"):
            masked_dicttensor(DictTensor({"h": one}), DictTensor({"h": other}), mask)
