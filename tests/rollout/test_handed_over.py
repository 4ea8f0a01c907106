"""What an agent is handed is its own: it may keep it and write into it, and what is recorded is as without that."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from collections import deque

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from helpers import Count, rollout

from rlstructs import (
    DeviceEnv,
    DictTensor,
    GymEnv,
    GymEnvInf,
    GymVectorEnv,
    MissingKeyError,
    RandomAgent,
    RL_Agent,
    RL_Agent_CheckDevice,
    RL_Batcher,
    SharedVectorEnv,
    replay_agent,
)
from rlstructs.agent import takes_views
from rlstructs.envs import NormalizeObservation, NormalizeReward

N_ENVS, N_TIMESTEPS = 3, 5
GAINS = DictTensor({"gain": torch.tensor([1.0, 2.0, 3.0])})


def scramble(*given):
    """Writes something else into every tensor, and takes what holds them apart."""
    for tensors in given:
        for key, tensor in list(tensors.items()):
            if tensor.dtype == torch.bool:
                tensor.logical_not_()
            else:
                tensor.fill_(float("nan") if tensor.dtype.is_floating_point else 1)
            if tensor.ndim == 1:
                tensor.unsqueeze_(1)  # what belongs to the object, and not to its memory
            if isinstance(tensors, DictTensor):
                tensors.unset(key)


class Handed(RL_Agent):
    """Acts by all that it is handed; then keeps it, or writes into it and, later, into what it returned.

    What it puts out as `changed` says whether anything that it kept is not as it was.
    """

    def __init__(self, how, with_history=False):
        self.how, self.with_history = how, with_history
        self.kept, self.returned = [], []

    def require_history(self):
        return self.with_history

    def initial_state(self, agent_info, B):
        state = DictTensor({"n": torch.zeros(B, 2), "start": 2 * agent_info["gain"]})
        self._deal(agent_info)
        return state

    def __call__(self, state, observation, agent_info, history=None):
        if self.how == "write":
            scramble(*self.returned)
        changed = any(not torch.equal(tensor, copy) for tensor, copy in self.kept)
        fresh = observation["initial_state"]
        n = torch.where(fresh[:, None], 0, state["n"]) + 1
        seen = torch.stack([tensor.double().reshape(len(n), -1).sum(1) for _, tensor in sorted(observation.items())])
        past = 0 if history is None else history["observation/reward"].double().sum(1)
        value = seen.sum(0) + n[:, 0] * agent_info["gain"] + state["start"] + past
        output = DictTensor({
            "action": (torch.sin(20 * value) > 0).long(), "value": value, "n": state["n"].clone(),
            "changed": torch.full_like(fresh, changed),
        })  # fmt: skip
        following = DictTensor({"n": n, "start": state["start"].clone()})
        self.returned = [output]
        self._deal(state, observation, agent_info, *([] if history is None else [history]))
        return output, following

    def _deal(self, *given):
        if self.how == "write":
            scramble(*given)
        elif self.how == "keep":
            self.kept += [(tensor, tensor.clone()) for tensors in given for tensor in tensors.values()]


class Plain:
    """An environment of a user's own, which shows the action before the last one: it keeps what it is given."""

    def __init__(self, seed):
        self.env = GymEnvInf([Count(4 + k) for k in range(N_ENVS)], seed)

    def n_envs(self):
        return N_ENVS

    def reset(self, env_info):
        observation, running = self.env.reset(env_info)
        self.action = torch.zeros(N_ENVS, dtype=torch.int64)
        return observation.set("before", torch.zeros(N_ENVS, dtype=torch.int64)), running

    def step(self, action):
        before, self.action = self.action.clone(), action["action"]
        (after, stepped), (following, running) = self.env.step(action)
        action["action"].fill_(-7)  # it may, for its own
        self.action = after["last_action"].clone()
        return (after.set("before", before), stepped), (following.set("before", before), running)

    def close(self):
        self.env.close()


class Sticky(Plain):
    """Keeps the tensor itself, which the agent writes into later."""

    def step(self, action):
        before, self.action = self.action, action["action"]
        (after, stepped), (following, running) = self.env.step(action)
        return (after.set("before", before), stepped), (following.set("before", before), running)


class Bare:
    """An environment of which only the methods of a `VecEnv` are seen."""

    def __init__(self, env):
        self.n_envs, self.reset, self.step, self.close = env.n_envs, env.reset, env.step, env.close


class Walk:
    """One that writes where a rollout keeps it."""

    def __init__(self, seed):
        self.seed = seed

    def n_envs(self):
        return N_ENVS

    def reset(self, env_info):
        self.at = np.arange(N_ENVS, dtype=np.float32) + self.seed
        start = DictTensor({"frame": torch.from_numpy(self.at.copy())[:, None], "reward": torch.zeros(N_ENVS)})
        return start.set("initial_state", torch.ones(N_ENVS, dtype=torch.bool)), torch.arange(N_ENVS)

    def step_into(self, action, rows):
        self.at += 2 * action["action"].numpy() - 1
        action["action"].fill_(-7)
        rows["frame"][:, 0], rows["reward"][:], rows["initial_state"][:] = self.at, abs(self.at), False

    def step(self, action):
        raise AssertionError("step_into is there")

    def close(self):
        pass


def counts(seed, kind=GymEnvInf, **arguments):
    return kind([Count(4 + k) for k in range(N_ENVS)], seed, **arguments)


def vector(seed, mode, kind=SyncVectorEnv, **arguments):
    makers = [functools.partial(Count, 4 + k) for k in range(N_ENVS)]
    return GymVectorEnv(kind(makers, autoreset_mode=mode, **arguments), seed)


def in_groups(seed, mode):
    return vector(seed, mode, SharedVectorEnv, n_workers=0, n_groups=3)


def native(seed):
    return GymVectorEnv(gymnasium.make_vec("CartPole-v1", N_ENVS, "vector_entry_point"), seed)


def normalized(seed):
    return NormalizeReward(NormalizeObservation(counts(seed)))


ENVIRONMENTS = {
    "ends": functools.partial(counts, kind=GymEnv),
    "resets": counts,
    "deferred": functools.partial(counts, defer_resets=True),
    "same step": functools.partial(vector, mode="SameStep"),
    "next step": functools.partial(vector, mode="NextStep"),
    "disabled": functools.partial(vector, mode="Disabled"),
    "groups, same step": functools.partial(in_groups, mode="SameStep"),
    "groups, next step": functools.partial(in_groups, mode="NextStep"),
    "native": native,
    "device": lambda seed: DeviceEnv(counts(seed), "cpu", "cpu"),
    "normalized": normalized,
    "own": Plain,
    "own, next step": lambda seed: Bare(vector(seed, "NextStep")),
    "sticky": Sticky,
    "step_into": Walk,
}


def trajectories(create_env, how, n_rollouts=4, n_processes=0, with_history=False, **arguments):
    """What rollouts of such an agent hold."""
    infos = DictTensor({"gain": GAINS["gain"].repeat(max(1, n_processes))})
    with RL_Batcher(
        N_TIMESTEPS, Handed, {"how": how, "with_history": with_history}, create_env, {}, n_processes,
        [7 * worker for worker in range(max(1, n_processes))], agent_info=GAINS.slice(0, 1), **arguments,
    ) as batcher:  # fmt: skip
        batcher.reset(agent_info=infos)
        found = []
        for _ in range(n_rollouts):
            trajectories, n_running = rollout(batcher)
            found.append(trajectories)
            if not n_running:
                batcher.reset(agent_info=infos)
        return found


def check(create_env, **arguments):
    """Checks that neither writing nor keeping changes anything."""
    plain = trajectories(create_env, "leave", **arguments)
    assert trajectories(create_env, "write", **arguments) == plain
    kept = trajectories(create_env, "keep", **arguments)
    assert kept == plain  # `changed` is among them, False everywhere
    assert not any(batch.trajectories["action/changed"].any() for batch in plain)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_agent_may_keep_what_it_is_handed_and_write_into_it(name):
    check(ENVIRONMENTS[name])


@pytest.mark.parametrize("name", ["ends", "resets", "disabled", "own"])
def test_a_history_is_the_agents_own(name):
    check(ENVIRONMENTS[name], with_history=True)


class Historian(RL_Agent):
    """Keeps each history, or copies it at once; may be interrupted in a step."""

    def __init__(self, kept, copies, fails_at=None):
        self.kept, self.copies, self.fails_at = kept, copies, fails_at

    def require_history(self):
        return True

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        self.kept.append(history.clone() if self.copies else history)
        if len(self.kept) == self.fails_at:
            raise KeyboardInterrupt
        return DictTensor({"action": torch.arange(observation.n_elems()) % 2, "n": observation["reward"] + 1}), state


@pytest.mark.parametrize("name", ["ends", "resets", "groups, same step"])
@pytest.mark.parametrize("fails_at", [None, 3])
def test_a_history_that_is_read_later_is_what_it_was(name, fails_at):
    def run(copies):
        kept = []

        def make():
            return Historian(kept, copies, fails_at)

        with RL_Batcher(5, make, {}, ENVIRONMENTS[name], {}, 0, 0, debug=True) as batcher:
            for _ in range(4):
                batcher.reset()
                with contextlib.suppress(KeyboardInterrupt):
                    rollout(batcher)
        return kept

    later, at_once = run(copies=False), run(copies=True)
    assert later == at_once and len(later) > 12


@pytest.mark.parametrize("name", ["resets", "groups, same step", "step_into"])
def test_what_an_agent_keeps_is_not_poisoned_in_debug_mode(name):
    check(ENVIRONMENTS[name], debug=True)


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_what_an_agent_is_handed_in_workers_is_its_own(start_method, run_ahead):
    check(counts, n_processes=2, start_method=start_method, run_ahead=run_ahead, debug=run_ahead == 2)


def test_observations_of_many_environments_are_the_agents_own():
    def create_env(seed):  # so many that steps are written beside the slots first
        return GymEnvInf([Count(3 + k % 5) for k in range(300)], seed)

    def run(how):
        info = DictTensor({"gain": torch.linspace(1, 3, 300)})
        with RL_Batcher(4, Handed, {"how": how}, create_env, {}, 0, 0, agent_info=info) as batcher:
            batcher.reset(agent_info=info)
            return [rollout(batcher)[0] for _ in range(3)]

    assert run("write") == run("leave") == run("keep")


@pytest.mark.parametrize("name", ["ends", "resets", "next step", "own"])
def test_an_evaluation_is_the_same_whatever_the_agent_does_with_what_it_is_handed(name):
    def run(how):
        with RL_Batcher(
            N_TIMESTEPS, Handed, {"how": how}, ENVIRONMENTS[name], {}, 0, 0, agent_info=GAINS.slice(0, 1)
        ) as batcher:
            batcher.reset(agent_info=GAINS)
            return batcher.evaluate(7, seed=3), rollout(batcher)[0]

    assert run("write") == run("leave") == run("keep")


class Stacks(RL_Agent):
    """Keeps the last four frames itself, and divides what it is shown."""

    def __init__(self):
        self.frames = deque(maxlen=4)

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        self.frames.append(observation["frame"])
        stack = torch.stack([*[self.frames[0]] * (4 - len(self.frames)), *self.frames], dim=1)
        action = torch.zeros(observation.n_elems(), dtype=torch.int64)
        return DictTensor({"action": action, "stack": stack}), state


class Divides(Stacks):
    def __call__(self, state, observation, agent_info, history=None):
        result = super().__call__(state, DictTensor({"frame": observation["frame"].clone()}), agent_info)
        observation["frame"].div_(255)
        return result


@pytest.mark.parametrize("n_timesteps", [1, 2, 5])
@pytest.mark.parametrize("agent", [Stacks, Divides])
def test_an_agents_own_frame_stack_holds_the_last_four_frames(agent, n_timesteps):
    with RL_Batcher(n_timesteps, agent, {}, lambda seed: GymEnvInf([Count(99)], seed), {}, 0, 0) as batcher:
        batcher.reset()
        steps = [rollout(batcher)[0].trajectories for _ in range(5)]
    stacks = torch.cat([batch["action/stack"][0, :, :, 1] for batch in steps]).tolist()
    assert stacks == [[max(0, t - k) for k in (3, 2, 1, 0)] for t in range(5 * n_timesteps)]
    for which, first in (("observation", 0), ("_observation", 1)):
        frames = torch.cat([batch[f"{which}/frame"][0, :, 1] for batch in steps])
        assert frames.tolist() == [t + first for t in range(5 * n_timesteps)]


class KeepsWhole(RL_Agent):
    """Looks at observations only once others have come after them."""

    def __init__(self, part):
        self.part, self.kept = part, []

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        action = torch.zeros(observation.n_elems(), dtype=torch.int64)
        seen = [0.0] * len(self.kept)
        if len(self.kept) == 11:
            seen = [dict(kept if self.part else kept.items())["frame"][0, 1].item() for kept in self.kept]
            assert seen == list(range(11))
        self.kept.append(getattr(observation, self.part)() if self.part else observation)
        return DictTensor({"action": action, "n": torch.full_like(action, len(seen))}), state


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("n_timesteps", [1, 3])
@pytest.mark.parametrize("part", ["", "items"])
def test_an_observation_that_is_kept_unread_reads_as_it_was(part, n_timesteps, debug):
    with RL_Batcher(
        n_timesteps, KeepsWhole, {"part": part}, lambda seed: GymEnvInf([Count(99)], seed), {}, 0, 0, debug=debug
    ) as batcher:
        batcher.reset()
        numbers = [rollout(batcher)[0].trajectories["action/n"][0] for _ in range(12 // n_timesteps)]
    assert torch.cat(numbers).tolist() == list(range(12))


class Buffers(RL_Agent):
    """Has one tensor for each thing that it returns, and writes all of them anew."""

    def __init__(self, clones):
        self.clones = clones
        self.action, self.n = torch.zeros(N_ENVS, dtype=torch.int64), torch.zeros(N_ENVS)

    def initial_state(self, agent_info, B):
        return DictTensor({"n": self.n[:B].zero_()})

    def __call__(self, state, observation, agent_info, history=None):
        B = observation.n_elems()
        n = state["n"] + observation["frame"][:, 0] + 1
        self.n[:B] = n
        self.action[:B] = n.long() % 5
        output, state = DictTensor({"action": self.action[:B]}), DictTensor({"n": self.n[:B]})
        return (output.clone(), state.clone()) if self.clones else (output, state)


@pytest.mark.parametrize("name", sorted(set(ENVIRONMENTS) - {"native", "step_into"}))
def test_an_agent_may_return_the_same_tensors_again_and_again(name):
    def run(clones):
        with RL_Batcher(N_TIMESTEPS, Buffers, {"clones": clones}, ENVIRONMENTS[name], {}, 0, 0) as batcher:
            batcher.reset()
            found = [rollout(batcher)[0]]
            batcher.reset()
            return [*found, rollout(batcher)[0]]

    assert run(False) == run(True)


class Learned(RL_Agent):
    """Its first state is a parameter, which an update writes into."""

    def __init__(self):
        self.start = torch.nn.Parameter(torch.ones(1, 2))

    def initial_state(self, agent_info, B):
        return DictTensor({"h": self.start.expand(B, -1)})

    def __call__(self, state, observation, agent_info, history=None):
        output = DictTensor({"action": torch.zeros(observation.n_elems(), dtype=torch.int64), "h": state["h"].clone()})
        return output, DictTensor({"h": state["h"].mul_(2)})

    def update(self, info):
        self.start.data.copy_(info)


@pytest.mark.parametrize("n_processes", [0, 1])
def test_a_state_that_is_written_into_leaves_the_parameter_that_it_came_from(n_processes):
    with RL_Batcher(2, Learned, {}, counts, {}, n_processes, [0]) as batcher:
        batcher.reset()
        first, _ = rollout(batcher)
        batcher.update(torch.full((1, 2), 7.0))
        second, _ = rollout(batcher)
        batcher.reset()
        third, _ = rollout(batcher)
    assert [batch.trajectories["action/h"][0, :, 0].tolist() for batch in (first, second, third)] == [
        [1, 2], [4, 8], [7, 14],
    ]  # fmt: skip
    assert [batch.info["agent_state/h"][0, 0].item() for batch in (first, second, third)] == [1, 4, 7]


class Updates(RL_Agent):
    """Keeps what it was updated with, and writes into the last of it."""

    def __init__(self):
        self.kept = [torch.zeros(2)]

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        sums = torch.stack([weights.sum() for weights in self.kept])
        padded = torch.nn.functional.pad(sums, (0, 4 - len(sums))).repeat(observation.n_elems(), 1)
        self.kept[-1].add_(1)
        return DictTensor({"action": torch.zeros(observation.n_elems(), dtype=torch.int64), "sums": padded}), state

    def update(self, info):
        self.kept.append(info["weights"])


@pytest.mark.parametrize("n_processes", [0, 2])
def test_an_update_is_the_agents_own(n_processes):
    weights = torch.ones(2)
    with RL_Batcher(1, Updates, {}, counts, {}, n_processes, [0, 9][: max(1, n_processes)]) as batcher:
        batcher.reset()
        for number in range(1, 4):
            weights.fill_(100 * number)
            batcher.update({"weights": weights})
            weights.fill_(-1)
            sums = rollout(batcher)[0].trajectories["action/sums"][:, 0]
        assert (sums == torch.tensor([0.0, 202.0, 402.0, 600.0])).all()
        assert (weights == -1).all()


@pytest.mark.parametrize("with_history", [False, True])
@pytest.mark.parametrize("how", ["write", "keep"])
def test_a_replay_leaves_the_trajectories_as_they_are(how, with_history):
    batches = trajectories(counts, "leave", with_history=with_history)
    for batch in batches:
        before = batch.clone()
        for _ in range(2):
            again = replay_agent(Handed(how, with_history), batch)
            assert batch == before
            for key in ("action", "value", "n"):
                assert torch.equal(again[key], batch.trajectories[f"action/{key}"])


# --- classes that take views ---------------------------------------------------------------------------


class Looks(RL_Agent):
    takes_views = True

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        place = torch.full((observation.n_elems(),), observation["frame"].data_ptr())
        return DictTensor({"action": torch.zeros_like(place), "place": place}), state


class LooksToo(Looks):
    def update(self, info):
        pass


class Own(Looks):
    def __call__(self, state, observation, agent_info, history=None):
        return super().__call__(state, observation, agent_info)


class Mixed(Own, LooksToo):
    pass


def test_only_a_class_that_says_so_beside_its_call_is_handed_views():
    agents = [Looks(), LooksToo(), RandomAgent(spaces.Discrete(2))]
    assert [takes_views(agent) for agent in agents] == [True] * 3
    mine = Own()
    mine.takes_views = True  # of one object: not what its class is
    others = [mine, Mixed(), Stacks(), Handed("keep"), RL_Agent_CheckDevice(Looks(), "cpu"), object()]
    assert [takes_views(agent) for agent in others] == [False] * 6


@pytest.mark.parametrize("n_timesteps", [1, 3])
def test_views_are_of_what_is_recorded(n_timesteps):
    def places(agent):
        with RL_Batcher(n_timesteps, agent, {}, lambda seed: GymEnvInf([Count(99)], seed), {}, 0, 0) as batcher:
            batcher.reset()
            batcher.execute()
            with batcher.lease() as lent:
                steps = lent.trajectories.trajectories
                recorded = [steps["observation/frame"][:, t].data_ptr() for t in range(n_timesteps)]
                return recorded, steps["action/place"][0].tolist()

    recorded, seen = places(Looks)
    assert seen == recorded
    recorded, seen = places(Own)
    assert not set(seen) & set(recorded)


# --- what is handed over is a DictTensor like any other ------------------------------------------------


class Uses(RL_Agent):
    """Looks for a key that is not there, and keeps the observation whole, which an evaluation has to copy."""

    def __init__(self):
        self.kept = []

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        with pytest.raises(MissingKeyError, match=r"^DictTensor: no key 'image', there are \['done', 'frame', "):
            observation["image"]
        assert "image" not in observation and observation["reward"] is observation["reward"]
        same = DictTensor(dict(observation.items()))
        for other in (
            observation, observation.clone(), observation.to("cpu"), copy.copy(observation), copy.deepcopy(observation),
            pickle.loads(pickle.dumps(observation)), observation.prepend_key("a/").truncate_key("a/"),
            observation.slice(0, len(observation)), observation + DictTensor(), DictTensor.cat([observation]),
            observation.get(observation.keys()), DictTensor.from_numpy(observation.numpy()),
        ):  # fmt: skip
            assert other == same and list(other.keys()) == list(same.keys()) and repr(other) == repr(same)
        self.kept.append(observation)
        observation.set("more", observation["reward"] + 1)
        action = torch.zeros(observation.n_elems(), dtype=torch.int64)
        return DictTensor({"action": action, "number": torch.full_like(action, len(self.kept))}), state


def test_what_an_agent_is_handed_is_a_dict_tensor_like_any_other():
    with RL_Batcher(3, Uses, {}, functools.partial(counts, kind=GymEnv), {}, 0, 0) as batcher:
        batcher.reset()
        rollout(batcher)
        assert batcher.evaluate(3, seed=0)["length"].tolist() == [4, 5, 6]
        steps = rollout(batcher)[0].trajectories
        assert steps["action/number"][2, :3].tolist() == [4, 5, 6] and "observation/more" not in steps
