"""`info_keys`: what environments say beside rewards, as columns of what a batcher hands out."""

from __future__ import annotations

import math

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from helpers import Counting, rollout

from rlstructs import (
    DeviceEnv,
    DictTensor,
    GymEnv,
    GymEnvInf,
    GymVectorEnv,
    NormalizeObservation,
    NormalizeReward,
    RL_Batcher,
    SharedVectorEnv,
    SpecError,
)
from rlstructs.replay import VectorReplayBuffer
from rlstructs.testing import check_env

KEYS = {"steps": np.float32, "is_success": bool, "count": np.int64, "inner/x": torch.float64, "start": "f4"}


class Telling(gymnasium.Env):
    """Says in its infos how many steps there were, and at the end of an episode, the third, whether it went well."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(5)

    def __init__(self):
        self.episode, self.steps, self.info = -1, 0, {}

    def reset(self, *, seed=None, options=None):
        self.episode, self.steps = self.episode + 1, 0
        self.info.clear()  # one and the same dict all along
        self.info.update(start=float(self.episode))
        return np.zeros(1, np.float32), self.info

    def step(self, action):
        self.steps += 1
        self.info.clear()
        self.info.update(steps=self.steps, count=10 * self.steps, inner={"x": np.float32(self.steps / 2), "y": "text"})
        if self.steps == 3:
            self.info["is_success"] = self.episode % 2 == 0
        return np.full(1, self.steps, np.float32), 1.0, self.steps == 3, False, self.info


class Copying(Telling):
    """Says it in dicts of their own: gymnasium's AsyncVectorEnv keeps no copy of the last one."""

    def reset(self, **arguments):
        observation, info = super().reset(**arguments)
        return observation, dict(info)

    def step(self, action):
        *rest, info = super().step(action)
        return *rest, dict(info)


def lists(keys, seed):
    return GymEnvInf([Telling(), Telling()], seed, info_keys=keys)


def leaving(keys, seed):
    return GymEnv([Telling(), Telling()], seed, info_keys=keys)


def deferring(keys, seed):
    return GymEnvInf([Telling(), Telling()], seed, info_keys=keys, defer_resets=True)


def vector(make, mode, **arguments):
    def created(keys, seed):
        told = Copying if make is AsyncVectorEnv else Telling
        envs = make([told, told], autoreset_mode=mode, **arguments)
        return GymVectorEnv(envs, seed, info_keys=keys)

    return created


MODES = list(AutoresetMode)
VECTORS = {
    **{f"sync-{mode.value}": vector(SyncVectorEnv, mode) for mode in MODES},
    **{f"shared-{mode.value}": vector(SharedVectorEnv, mode, n_workers=0) for mode in MODES},
    "shared-2": vector(SharedVectorEnv, AutoresetMode.SAME_STEP, n_workers=2),
    "shared-groups": vector(SharedVectorEnv, AutoresetMode.NEXT_STEP, n_workers=0, n_groups=2),
    "async": vector(AsyncVectorEnv, AutoresetMode.SAME_STEP),
}
WRAPPED = {
    "observation": lambda keys, seed: NormalizeObservation(lists(keys, seed)),
    "reward": lambda keys, seed: NormalizeReward(lists(keys, seed)),
    "device": lambda keys, seed: DeviceEnv(lists(keys, seed), "cpu", "cpu"),
}


def told(create, n_timesteps=8, n_processes=0, **arguments):
    """The infos of the first environment's steps, before and after them; NaN as None."""
    seeds = [100 * worker for worker in range(n_processes or 1)]
    with RL_Batcher(n_timesteps, Counting, {}, create, {"keys": KEYS}, n_processes, seeds, **arguments) as batcher:
        batcher.reset()
        trajectories, _ = rollout(batcher)
        n = int(trajectories.lengths[0])
        steps = trajectories.trajectories
        return [
            {key: [None if isinstance(x, float) and math.isnan(x) else x
                   for x in steps[f"{side}/info/{key}"][0, :n].tolist()] for key in KEYS}
            for side in ("observation", "_observation")
        ]  # fmt: skip


def expected(n):
    """Of n steps without those that only reset."""
    steps, episode = [step % 3 + 1 for step in range(n)], [step // 3 for step in range(n)]
    after = {
        "steps": [float(step) for step in steps],
        "is_success": [step == 3 and e % 2 == 0 for step, e in zip(steps, episode, strict=True)],
        "count": [10 * step for step in steps],
        "inner/x": [step / 2 for step in steps],
        "start": [None] * n,
    }
    nothing = {"steps": None, "is_success": False, "count": 0, "inner/x": None}
    begins = [step == 1 for step in steps]
    before = {key: [nothing[key] if begins[at] else after[key][at - 1] for at in range(n)] for key in nothing} | {
        "start": [float(e) if first else None for e, first in zip(episode, begins, strict=True)]
    }
    return [before, after]


@pytest.mark.parametrize("create", [lists, *VECTORS.values(), *WRAPPED.values()],
                         ids=["list", *VECTORS, *WRAPPED])  # fmt: skip
def test_columns_hold_what_each_step_and_reset_said(create):
    n_steps = 6 if create in (VECTORS["sync-NextStep"], VECTORS["shared-NextStep"], VECTORS["shared-groups"]) else 8
    assert told(create) == expected(n_steps)


@pytest.mark.parametrize("create", [leaving, deferring])
def test_those_of_an_episode_that_ends_hold_the_last_ones(create):
    assert told(create) == expected(3)


@pytest.mark.parametrize("arguments", [{}, {"run_ahead": 2}, {"on_worker_failure": "restart"}, {"debug": True}],
                         ids=str)  # fmt: skip
def test_every_start_method_and_setting_gives_the_same(start_method, arguments):
    assert told(lists, n_processes=2, start_method=start_method, **arguments) == expected(8)


@pytest.mark.parametrize("create", [lists, leaving, *VECTORS.values()])
def test_such_an_environment_keeps_the_contract(create):
    check_env(create({"steps": "f4", "count": int}, 0))


def test_a_list_of_keys_is_float32_and_nothing_is_there_without_keys():
    observation, _ = GymEnvInf([Telling()], 0, info_keys=["start", "steps"]).reset()
    assert observation["info/start"].dtype is torch.float32 and observation["info/start"].tolist() == [0.0]
    assert observation["info/steps"].isnan().all()
    assert not [key for key in GymEnvInf([Telling()], 0).reset()[0] if key.startswith("info")]


class Says(Telling):
    def __init__(self, info):
        super().__init__()
        self.said = info

    def step(self, action):
        return *super().step(action)[:4], self.said


@pytest.mark.parametrize(("info", "dtype", "value"), [
    ({"x": None}, "f4", math.nan), ({}, int, 0), ({"x": np.array([2.5])}, "f8", 2.5), ({"x": torch.tensor(3)}, int, 3),
    ({"x": 1}, bool, True), ({"x": np.bool_(True)}, "f4", 1.0), ({"y": 1}, bool, False), ({"x": 1e300}, "f4", math.inf),
    ({"x": {"z": 1}}, "f4", None), ({"x": "text"}, "f4", None), ({"x": [1, 2]}, "f4", None), ({"x": 0.5}, int, None),
    ({"x": 300}, np.uint8, None), ({"x": math.nan}, bool, None), (None, "f4", None), ([], "f4", None),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", ["list", "vector"])
def test_what_is_said_is_one_number_that_the_dtype_holds_or_an_error_that_names_it(info, dtype, value, kind):
    if kind == "list":
        env = GymEnvInf([Says(info), Telling()], 0, info_keys={"x": dtype})
    elif not isinstance(info, dict) or isinstance(info.get("x"), dict):
        return  # of vector environments rows are others
    else:
        envs = SharedVectorEnv([lambda: Says(info), Telling], 0, autoreset_mode="SameStep")
        env = GymVectorEnv(envs, 0, info_keys={"x": dtype})
    env.reset()
    action = DictTensor({"action": torch.tensor([0, 0])})
    if value is None:
        what = "info 'x' (must be one number|is .*, which .* cannot hold)|its info must be a dict"
        with pytest.raises(SpecError, match=f"^environment 0: ({what})"):
            env.step(action)
    else:
        (after, _), _ = env.step(action)
        assert np.array_equal(after["info/x"][0].item(), value, equal_nan=True)


class Named(Telling):
    observation_space = spaces.Dict({"info": spaces.Dict({"x": spaces.Box(-1, 1, (1,))})})


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"info_keys": "is_success"}, SpecError, "info_keys must be several names, got the string 'is_success'"),
    ({"info_keys": [3]}, TypeError, "info_keys: needs names"),
    ({"info_keys": {"x": object}}, SpecError, "info_keys: 'x' must be numbers or bools"),
    ({"info_keys": {"x": "nothing"}}, TypeError, "info_keys: 'x' needs a dtype"),
])  # fmt: skip
def test_keys_that_are_not_what_is_needed_are_refused(arguments, error, message):
    for make in (lambda: GymEnvInf([Telling()], 0, **arguments),
                 lambda: GymVectorEnv(SyncVectorEnv([Telling]), 0, **arguments)):  # fmt: skip
        with pytest.raises(error, match=f"^{message}"):
            make()


def test_an_entry_of_the_observation_may_not_be_called_as_an_info():
    with pytest.raises(SpecError, match="^observation: an entry may not be called 'info/x'"):
        GymEnv([Named()], 0)


def test_infos_of_a_vector_environment_may_be_a_list_or_arrays_without_masks():
    class Listing(SyncVectorEnv):
        kind = "list"

        def step(self, actions):
            *rest, _ = super().step(actions)
            infos = [{"x": 1.5}, {}] if self.kind == "list" else {"x": np.array([1, 2]), "a": {"b": [3, 4]}}
            return *rest, infos

    for kind, wanted in (("list", [[1.5, 0.0], [0.0, 0.0]]), ("arrays", [[1.0, 2.0], [3.0, 4.0]])):
        Listing.kind = kind
        env = GymVectorEnv(Listing([Telling] * 2), 0, info_keys=["x", "a/b"])
        env.reset()
        (after, _), _ = env.step(DictTensor({"action": torch.tensor([0, 0])}))
        assert [after[f"info/{key}"].nan_to_num(0.0).tolist() for key in ("x", "a/b")] == wanted


def test_replay_stores_them_as_infos_and_not_as_what_was_seen():
    with RL_Batcher(8, Counting, {}, lists, {"keys": KEYS}, 0, [0]) as batcher:
        batcher.reset()
        trajectories, _ = rollout(batcher)
    buffer = VectorReplayBuffer(32, 2)
    buffer.add_trajectories(trajectories)
    batch = buffer[np.arange(8)]
    assert batch.info.steps.tolist() == [1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0, 2.0]
    assert batch.info.is_success.tolist() == [False, False, True] + [False] * 5
    assert batch.obs.shape == (8, 1)
