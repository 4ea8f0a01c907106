"""Environments of users' own behind the rollout's view of them, and `DeviceEnv`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import Count, Counting, rollout

from rlstructs import (
    DeviceEnv,
    DictTensor,
    GymEnv,
    GymEnvInf,
    GymVectorEnv,
    RandomAgent,
    RL_Agent,
    RL_Batcher,
    SharedVectorEnv,
    SpecError,
    StateError,
)
from rlstructs.envs import NormalizeObservation, VecEnv
from rlstructs.envs.row_adapter import RowAdapter, WritingRowAdapter, row_env
from rlstructs.envs.row_env import take_statistics
from rlstructs.shared.layout import Rows, Target
from rlstructs.testing import check_env

NO_INFO = DictTensor()


def frames(*values, **more):
    return DictTensor({"frame": torch.tensor(values, dtype=torch.float32), **more})


def running(*values):
    return torch.tensor(values, dtype=torch.int64)


class Scripted:
    """Three environments that say what they are told to say."""

    def __init__(self, *steps, start=None):
        self.start = start or (frames(0, 0, 0), running(0, 1, 2))
        self.steps, self.given = list(steps), []

    def n_envs(self):
        return 3

    def reset(self, env_info):
        self.given.append(env_info)
        return self.start

    def step(self, action):
        self.given.append(action)
        return self.steps.pop(0)

    def close(self):
        self.given.append("close")


def unchanged(*values, rows=(0, 1, 2)):
    pair = frames(*values), running(*rows)
    return pair, pair


def started(*steps):
    env = RowAdapter(Scripted(*steps))
    env.reset_rows(NO_INFO)
    return env


# --- RowAdapter --------------------------------------------------------------------------------


def test_an_environment_that_gives_rows_is_used_as_it_is():
    native, scripted = GymEnv([Count(3)], 0), Scripted()
    assert row_env(native) is native
    adapted = row_env(scripted)
    assert type(adapted) is RowAdapter and isinstance(scripted, VecEnv) and isinstance(native, VecEnv)
    info = DictTensor({"x": torch.zeros(3)})
    assert adapted.n_envs() == 3 and adapted.reset_rows(info)["frame"].tolist() == [0, 0, 0]
    adapted.close()
    assert scripted.given == [info, "close"]


def test_a_step_says_what_differs_and_who_is_left():
    env = started(
        unchanged(1, 1, 1),
        ((frames(2, 2, 2), running(0, 1, 2)), (frames(2, 0, 2), running(0, 1, 2))),
        ((frames(3, 1, 3), running(0, 1, 2)), (frames(3, 3), running(0, 2))),
        unchanged(4, 4, rows=(0, 2)),
        ((frames(5, 5), running(0, 2)), (frames(), torch.zeros(0))),  # rlstructures' empty index is float32
    )
    found = [env.step_rows(NO_INFO) for _ in range(5)]
    assert [step.after["frame"].tolist() for step in found] == [[1] * 3, [2] * 3, [3, 1, 3], [4] * 2, [5] * 2]
    assert [step.reset.tolist() for step in found] == [[], [0, 1, 2], [0, 2], [], []]
    assert [step.fresh is None for step in found] == [True, False, False, True, False]
    assert [None if step.kept is None else step.kept.tolist() for step in found] == [None, None, [0, 2], None, []]
    assert found[1].fresh["frame"].tolist() == [2, 0, 2] and found[2].fresh["frame"].tolist() == [3, 3]


@pytest.mark.parametrize("rows", [(0, 1), (1, 2, 3), (2, 1, 0), ()], ids=str)
def test_everyone_must_run_after_a_reset(rows):
    env = RowAdapter(Scripted(start=(frames(*[0] * len(rows)), running(*rows))))
    with pytest.raises(SpecError, match=r"^environment: running after reset is \[.*\], expected 0..2"):
        env.reset_rows(NO_INFO)


def test_it_must_have_stepped_those_that_ran():
    env = started(((frames(1, 1), running(0, 2)), (frames(1, 1), running(0, 2))))
    with pytest.raises(SpecError, match=r"^environment: it stepped \[0 2\], running were \[0 1 2\]"):
        env.step_rows(NO_INFO)


@pytest.mark.parametrize("rows", [(0, 1, 2), (0, 1), (1,), (2, 0), (0, 0), (0, 3), (-1, 2)], ids=str)
def test_those_left_must_be_some_of_those_before_in_their_order(rows):
    pair = frames(1, 1, 1), running(0, 1, 2)
    left = frames(1, 1), running(0, 2)
    env = started((pair, left), (left, (frames(*[1] * len(rows)), running(*rows))))
    env.step_rows(NO_INFO)
    with pytest.raises(SpecError, match=r"^environment: \[.*\] run after the step, before it \[0 2\]"):
        env.step_rows(NO_INFO)


@pytest.mark.parametrize(
    "wrong",
    [
        frames(1, 1),
        frames([1], [1], [1]),
        DictTensor({"frame": torch.zeros(3, dtype=torch.int64)}),
        DictTensor({"other": torch.zeros(3)}),
        frames(1, 1, 1, more=torch.zeros(3)),
        frames(1, 1, 1, frame=torch.tensor(1.0)),
        DictTensor(),
    ],
    ids=["rows", "shape", "dtype", "key", "more", "no-axis", "empty"],
)
@pytest.mark.parametrize("second", [False, True])
def test_observations_that_change_their_form_are_refused(wrong, second):
    right = frames(1, 1, 1)
    pairs = (right if second else wrong, running(0, 1, 2)), (wrong if second else right, running(0, 1, 2))
    with pytest.raises(SpecError, match=r"^environment: observation is DictTensor\(.*, expected 3 rows of {'frame'"):
        started(pairs).step_rows(NO_INFO)


def test_an_observation_that_is_no_dicttensor_is_refused():
    with pytest.raises(TypeError, match=r"^environment: an observation must be a DictTensor, got dict"):
        RowAdapter(Scripted(start=({"frame": torch.zeros(3)}, running(0, 1, 2)))).reset_rows(NO_INFO)


# --- DeviceEnv -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [GymEnv, GymEnvInf])
def test_what_a_device_env_gives_is_on_the_other_device(cls):
    envs = [cls([Count(1), Count(3)], 0) for _ in range(2)]
    plain, moved = envs[0], DeviceEnv(envs[1], torch.device("cpu"), "meta")
    assert isinstance(moved, VecEnv) and moved.n_envs() == 2
    pairs = [(plain.reset(), moved.reset())]
    action = DictTensor({"action": torch.tensor([1, 2])})
    pairs += zip(plain.step(action), moved.step(action), strict=True)
    for (expected, rows), (observation, there) in pairs:
        assert {tensor.device.type for tensor in observation.values()} == {"meta"}
        assert observation.specs() == expected.specs() and observation.n_elems() == expected.n_elems()
        assert (there.device.type, there.dtype, there.shape) == ("meta", torch.int64, rows.shape)


def test_actions_reach_the_device_of_the_environment_and_env_info_stays():
    scripted = Scripted(unchanged(1, 1, 1))
    env, info = DeviceEnv(scripted, "meta", "cpu"), DictTensor({"x": torch.zeros(3)})
    env.reset(info)
    first, second = env.step(DictTensor({"action": torch.zeros(3)}))
    env.close()
    assert scripted.given[0] is info and scripted.given[1]["action"].device.type == "meta"
    assert scripted.given[2] == "close"
    assert first[0] is second[0]  # what does not differ is moved once


def test_a_device_env_has_the_attributes_of_its_environment_but_not_its_rows():
    native = GymEnv([Count(3)], 0)
    env = DeviceEnv(native, "cpu", "cpu")
    assert env.action_space == spaces.Discrete(5) and env.observation_space is native.observation_space
    for name in ("nothing", "_running"):
        with pytest.raises(AttributeError, match=name):
            getattr(env, name)
    adapted = row_env(env)
    assert type(adapted) is RowAdapter
    assert np.array_equal(adapted.reset_rows(NO_INFO)["frame"], [[0, 0]])


class Tenfold(GymEnvInf):
    """Overrides what `GymEnv` gives by way of rows."""

    def step(self, action):
        (after, before), (following, running) = super().step(action)
        after.set("reward", after["reward"] * 10)
        following.set("reward", following["reward"] * 10)
        return (after, before), (following, running)


class Forwarding:
    """A wrapper in the usual manner."""

    def __init__(self, env):
        self._env = env

    def reset(self, env_info=DictTensor()):  # noqa: B008 - as users write it
        return self._env.reset(env_info)

    def step(self, action):
        (after, before), (following, running) = self._env.step(action)
        after = DictTensor({**dict(after.items()), "reward": after["reward"] * 10})
        return (after, before), (following, running)

    def __getattr__(self, name):
        return getattr(self._env, name)


WRAPPERS = {
    "device": lambda env: DeviceEnv(env, "cpu", "cpu"), "forwards": Forwarding, "both": lambda env: Forwarding(
        DeviceEnv(env, "cpu", "cpu")),
}  # fmt: skip


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", ["deferred", "groups", "step_into", "normalized"])
def test_what_a_wrapper_has_not_itself_a_rollout_does_not_use_below_it(name, wrapper):
    inner = {
        "deferred": lambda: GymEnvInf([Count(3)], 0, defer_resets=True),
        "groups": lambda: GymVectorEnv(SharedVectorEnv([lambda: Count(3)] * 4, n_workers=0, n_groups=2), 0),
        "step_into": lambda: Walks(3, 4, True),
        "normalized": lambda: NormalizeObservation(GymEnvInf([Count(3)], 0)),
    }[name]()
    own, rows = row_env(inner), row_env(WRAPPERS[wrapper](inner))
    assert own.defers_resets == (name == "deferred") and len(own.row_groups()) == 2 * (name == "groups")
    assert (own.example() is None) == (name == "step_into") == (type(own) is WritingRowAdapter)
    assert type(rows) is RowAdapter and not (rows.writes_rows or rows.defers_resets or rows.may_idle)
    assert rows.example() is None and not rows.row_groups()
    with pytest.raises(StateError, match="^RowAdapter defers no resets$"):
        rows.revive_rows()
    # Statistics are the same seen through a wrapper.
    assert (rows.shared_statistics() is None) == (own.shared_statistics() is None) == (name != "normalized")
    assert take_statistics(rows).keys() == ({"observation/frame"} if name == "normalized" else set())
    inner.close()


class WithKey(GymEnvInf):
    def reset(self, env_info=DictTensor()):  # noqa: B008
        observation, running = super().reset(env_info)
        return DictTensor({**dict(observation.items()), "extra": torch.ones(2)}), running

    def step(self, action):
        (after, before), (following, running) = super().step(action)
        return tuple(
            (DictTensor({**dict(o.items()), "extra": torch.ones(2)}), r)
            for o, r in ((after, before), (following, running))
        )


def patched(envs, seed):
    env = GymEnvInf(envs, seed)
    step = env.step

    def ten(action):
        (after, before), following = step(action)
        return (DictTensor({**dict(after.items()), "reward": after["reward"] * 10}), before), following

    env.step = ten
    return env


@pytest.mark.parametrize("make", [Tenfold, lambda e, s: Forwarding(GymEnvInf(e, s)), patched, WithKey],
                         ids=["subclass", "wrapper", "patched", "key"])  # fmt: skip
def test_what_a_user_puts_in_place_of_step_is_what_runs(make):
    with RL_Batcher(
        5, Counting, {}, lambda seed: make([Count(3), Count(3)], seed), {}, n_processes=0, seeds=[0]
    ) as batcher:
        batcher.reset()
        trajectories, _ = rollout(batcher)
    factor = 1 if make is WithKey else 10
    expected = torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0]) * factor
    assert trajectories.trajectories["_observation/reward"].tolist() == [expected.tolist()] * 2
    assert ("_observation/extra" in trajectories.trajectories) == (make is WithKey)


# --- step_into -----------------------------------------------------------------------------------


class Walks:
    """Native: E walks on the whole numbers, each of which begins anew at 0 when it comes to `far`.

    Args:
        restarts: in the same step, or in a step of its own.
    """

    def __init__(self, n, far, restarts):
        self.n, self.far, self.restarts, self.begins = n, far, restarts, np.zeros(n, bool)

    def n_envs(self):
        return self.n

    def reset(self, env_info):
        self.at, self.begins = np.zeros(self.n, np.float32), np.zeros(self.n, bool)
        return self._first(self.n), torch.arange(self.n)

    def _first(self, n):
        flags = {"done": torch.zeros(n, dtype=torch.bool), "initial_state": torch.ones(n, dtype=torch.bool)}
        return DictTensor({"frame": torch.zeros(n, 2), "reward": torch.zeros(n), **flags})

    def step_into(self, action, rows):
        self.at += np.where(self.begins, 0, action["action"].numpy())
        ended = self.at >= self.far
        rows["frame"][:, 0], rows["frame"][:, 1] = self.at, -self.at
        rows["reward"][:], rows["done"][:], rows["initial_state"][:] = self.at, ended, self.begins
        if not self.restarts:
            rows["frame"][self.begins] = rows["reward"][self.begins] = 0
        self.begins = np.zeros(self.n, bool) if self.restarts else ended
        self.at[ended] = 0
        return (np.flatnonzero(ended), self._first(int(ended.sum()))) if self.restarts else None

    def step(self, action):
        rows = {key: tensor.numpy() for key, tensor in self._first(self.n).items()}
        reset = self.step_into(action, rows)
        after = following = DictTensor.from_numpy(rows)
        if reset is not None and reset[0].size:
            following = after.clone()
            for key, tensor in reset[1].items():
                following[key][torch.from_numpy(reset[0])] = tensor
        return (after, torch.arange(self.n)), (following, torch.arange(self.n))

    def close(self):
        pass


class SlowWalks(Walks):
    """Its `step` is another one, for all that the batcher knows."""

    def step(self, action):
        return super().step(action)


def walked(cls, n_processes, n=3, **arguments):
    with RL_Batcher(
        6, lambda: RandomAgent(spaces.Discrete(3)), {}, lambda seed: cls(n, 4, **arguments), {}, n_processes, 0,
        agent_seeds=[1] * max(1, n_processes),
    ) as batcher:  # fmt: skip
        batcher.reset()
        found = [rollout(batcher) for _ in range(5)]
        return found, batcher.episodes()


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("n", [3, 300])
def test_step_into_gives_what_step_gives(restarts, n):
    assert type(row_env(Walks(n, 4, restarts))) is WritingRowAdapter
    assert type(row_env(SlowWalks(n, 4, restarts))) is RowAdapter
    wanted = walked(SlowWalks, 0, n, restarts=restarts)
    assert walked(Walks, 0, n, restarts=restarts) == wanted
    assert wanted[1].n_elems() > 0 and (wanted[1]["return"] > 0).all()


def test_step_into_runs_in_workers():
    found, episodes = walked(Walks, 2, restarts=True)
    assert found[0][0].n_elems() == 6 and episodes.n_elems() > 0


@pytest.mark.parametrize("restarts", [False, True])
def test_an_environment_with_step_into_passes_the_check(restarts):
    ones = DictTensor({"action": torch.ones(3, dtype=torch.int64)})
    check_env(lambda seed: Walks(3, 4, restarts), act=lambda observation: ones, uses_seed=False)


@pytest.mark.parametrize(
    "reset, words",
    [
        (([2, 1], frames(0, 0)), r"step_into reset \[2 1\], of 3 environments in ascending order"),
        (([1, 3], frames(0, 0)), r"step_into reset \[1 3\], of 3"),
        (([1.5], frames(0)), r"step_into must give which were reset as int64"),
        (([1], frames(0, 0)), r"environment: observation is .*, expected 1 rows"),
    ],
)
def test_a_wrong_reset_of_step_into_says_what_is_wrong(reset, words):
    env = Scripted()
    env.step_into = lambda action, rows: reset
    rows = WritingRowAdapter(env)
    packing = rows.reset_rows(NO_INFO).packing
    target = Rows.zeros(packing, 3)
    with pytest.raises(SpecError, match=words):
        rows.step_rows(NO_INFO, Target(target, target.arrays()))


# --- steps that only start an episode ------------------------------------------------------------


class Copied(DictTensor):
    """Counts its copies."""

    n = 0

    def clone(self):
        Copied.n += 1
        return super().clone()


class Adds(RL_Agent):
    """Counts its steps in its state, which it writes into."""

    def initial_state(self, agent_info, B):
        return Copied({"n": torch.zeros(B)})

    def __call__(self, state, observation, agent_info, history=None):
        n = state["n"].add_(1)
        return DictTensor({"action": torch.ones(len(n), dtype=torch.int64), "n": n.clone()}), Copied({"n": n})


def added(env, n_timesteps, n_rollouts=1):
    """What rollouts of this agent hold, and how often its state was copied in them."""
    with RL_Batcher(n_timesteps, Adds, {}, lambda seed: env, {}, 0, [0]) as batcher:
        batcher.reset()
        Copied.n = 0
        return [rollout(batcher)[0] for _ in range(n_rollouts)], Copied.n


OWN = {
    "step": lambda restarts: SlowWalks(3, 4, restarts),
    "step_into": lambda restarts: Walks(3, 4, restarts),
    "forwards": lambda restarts: Forwarding(SlowWalks(3, 4, restarts)),
    "device": lambda restarts: DeviceEnv(Walks(3, 4, restarts), "cpu", "cpu"),
}


@pytest.mark.parametrize("kind", OWN)
def test_the_state_is_copied_only_where_a_step_may_start_an_episode(kind):
    # The first state and the last one, not one in every step.
    assert added(OWN[kind](restarts=True), 16)[1] == 2
    # Three times in 16 steps, an episode of 4 steps has ended: the state before that step, and the one that results.
    assert added(OWN[kind](restarts=False), 16)[1] == 2 + 2 * 3


@pytest.mark.parametrize("n_timesteps", [1, 4, 5, 7])  # an end may be the last step, and the start the first one
@pytest.mark.parametrize("kind", OWN)
def test_a_step_that_only_starts_an_episode_leaves_the_state_as_it_was(kind, n_timesteps):
    found, _ = added(OWN[kind](restarts=False), n_timesteps, n_rollouts=20)
    for row in range(3):
        counted = [batch.trajectories["action/n"][row, : int(batch.lengths[row])] for batch in found]
        assert torch.equal(torch.cat(counted), torch.arange(1.0, 1 + sum(map(len, counted))))
    assert sum(int(batch.lengths[0]) for batch in found) == 20 * n_timesteps - 20 * n_timesteps // 5


class Flagless(SlowWalks):
    """Doesn't say when an episode ends."""

    def _first(self, n):
        return DictTensor({key: tensor for key, tensor in super()._first(n).items() if key != "done"})

    def step_into(self, action, rows):
        return super().step_into(action, {**rows, "done": np.zeros(self.n, bool)})


def test_without_flags_of_ends_any_step_may_start_an_episode():
    found, n_copies = added(Flagless(3, 4, restarts=False), 16)
    assert found[0].trajectories["action/n"][0, :13].tolist() == list(range(1, 14)) and n_copies == 2 + 16 + 3


class Late(SlowWalks):
    """Starts an episode where none has ended."""

    def step(self, action):
        self.begins[1] |= self.at[1] == 2
        return super().step(action)


def test_a_start_where_no_episode_has_ended_is_refused_for_agents_with_a_state():
    with pytest.raises(SpecError, match=r"^environment: \[1\] only started an episode in a step, but the step before"):
        added(Late(3, 4, restarts=False), 16)
    found, _ = walked(Late, 0, restarts=False)  # one without a state goes on
    assert len(found) == 5
