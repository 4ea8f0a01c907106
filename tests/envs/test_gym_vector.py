"""`GymVectorEnv`: the same transitions, and no others, whichever way a vector environment resets its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers import Count

from rlstructs import DictTensor, GymEnvInf, GymVectorEnv, RL_Agent, RL_Batcher, SharedVectorEnv, SpecError, StateError
from rlstructs.seeding import EnvSeed
from rlstructs.shared import slots
from rlstructs.testing import check_env

MODES = list(AutoresetMode)


class Nested(gymnasium.Env):
    """A Dict of a Tuple, and actions of a Dict; ends after a number of steps that it draws."""

    observation_space = spaces.Dict(
        {"x": spaces.Box(-9, 9, (2,), np.float64), "more": spaces.Tuple([spaces.Discrete(50), spaces.MultiBinary(3)])}
    )
    action_space = spaces.Dict({"turn": spaces.Discrete(3), "push": spaces.Box(-1, 1, (2,), np.float32)})

    def _observation(self):
        return {"x": np.full(2, self.total), "more": (self.steps, np.array([1, 0, self.steps % 2], np.int8))}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.total = 0, self.np_random.uniform()
        self.length = int(self.np_random.integers(1, 6))
        return self._observation(), {}

    def step(self, action):
        self.steps += 1
        self.total += action["turn"] / 4 + float(action["push"].sum())
        ended = self.steps == self.length
        return self._observation(), self.total, ended and self.length % 2 == 0, ended and self.length % 2 == 1, {}


ENVS = {
    "cartpole": lambda: gymnasium.make("CartPole-v1", max_episode_steps=13),
    "pendulum": lambda: gymnasium.make("Pendulum-v1", max_episode_steps=7),
    "nested": Nested,
    "one step": lambda: Count(1),
    "two steps": lambda: Count(2, truncates=True),
}


class Fixed(RL_Agent):
    """Acts by what it sees, and notes how often it has acted since the episode began."""

    def __init__(self, space):
        self.space = space

    def initial_state(self, agent_info, B):
        return DictTensor({"n": torch.zeros(B, dtype=torch.int64)})

    def _act(self, space, key, bits):
        if isinstance(space, spaces.Dict):
            acts = (self._act(inner, f"{key}/{name}", bits) for name, inner in space.items())
            return {name: value for act in acts for name, value in act.items()}
        if isinstance(space, spaces.Discrete):
            return {key: bits % int(space.n)}
        return {key: (bits[:, None] % 7 - 3).float().expand(-1, *space.shape) / 5}

    def __call__(self, state, observation, agent_info, history=None):
        n = torch.where(observation["initial_state"], 0, state["n"]) + 1
        frame = observation["frame"] if "frame" in observation else observation["x"]
        bits = (frame.reshape(len(frame), -1).double().sum(dim=1) * 1000).long().abs()
        return DictTensor({**self._act(self.space, "action", bits), "n": n}), DictTensor({"n": n})


def transitions(name, create_env, n_processes=2, n_timesteps=5, n_rollouts=8):
    """The steps of each environment, one behind another, as bytes; and the ended episodes."""
    space = ENVS[name]().action_space
    found = {}
    with RL_Batcher(n_timesteps, Fixed, {"space": space}, create_env, {}, n_processes, 3) as batcher:
        batcher.reset()
        for _ in range(n_rollouts):
            batcher.execute()
            trajectories, n_running = batcher.get()
            assert n_running == batcher.n_elems()
            steps = trajectories.trajectories
            for row, env_index in enumerate(trajectories.info["env_index"].tolist()):
                for t in range(int(steps.lengths[row])):
                    step = {key: steps[key][row, t].numpy().tobytes() for key in sorted(steps.keys())}
                    found.setdefault(env_index, []).append(step)
        return found, batcher.episodes()


def vector_of(name, mode, n=3):
    def create_env(seed):
        return GymVectorEnv(SyncVectorEnv([ENVS[name]] * n, autoreset_mode=mode), seed)

    return create_env


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ENVS)
@pytest.mark.parametrize("n_timesteps", [1, 2, 5, 16])
def test_the_transitions_are_those_of_gym_env_inf(name, mode, n_timesteps):
    n_rollouts = 40 // n_timesteps
    wanted, _ = transitions(
        name, lambda seed: GymEnvInf([ENVS[name]() for _ in range(3)], seed), 0, n_timesteps, n_rollouts
    )
    found, _ = transitions(name, vector_of(name, mode), 0, n_timesteps, n_rollouts)
    for env_index, steps in wanted.items():
        got = found.get(env_index, [])
        assert got == steps[: len(got)]
        ends = sum(step["_observation/done"] == b"\1" for step in steps)
        assert len(steps) == n_rollouts * n_timesteps and len(got) >= len(steps) - ends - 1
        assert mode is AutoresetMode.NEXT_STEP or len(got) == len(steps)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["cartpole", "nested", "one step"])
def test_the_transitions_are_the_same_beside_the_slots(name, mode, monkeypatch):
    wanted = transitions(name, vector_of(name, mode), 0)
    monkeypatch.setattr(slots, "STAGED_ENVS", 1)
    found = transitions(name, vector_of(name, mode), 0)
    assert found == wanted


@pytest.mark.parametrize("mode", MODES)
def test_workers_do_the_same(mode):
    in_this_process, in_a_worker, in_two = (transitions("cartpole", vector_of("cartpole", mode), n) for n in (0, 1, 2))
    assert in_this_process == in_a_worker
    assert {index: in_two[0][index] for index in range(3)} == in_a_worker[0] and len(in_two[0]) == 6


@pytest.mark.parametrize("mode", MODES)
def test_a_reset_is_no_step_of_an_episode(mode):  # R4
    _, episodes = transitions("three", lambda seed: vector_of("three", mode)(seed), 0, 7, 6)
    assert set(episodes["length"].tolist()) == {3} and set(episodes["return"].tolist()) == {1.0 + 2 + 3}


ENVS["three"] = lambda: Count(3)


class Counting(RL_Agent):
    """Notes how often it has acted, in its state as it lies there or in another, and by how much what it sees moved."""

    def __init__(self, in_place):
        self.in_place, self.seen = in_place, None

    def initial_state(self, agent_info, B):
        return DictTensor({"n": torch.zeros(B, dtype=torch.int64)})

    def __call__(self, state, observation, agent_info, history=None):
        n, frame = state["n"].clone(), observation["frame"]
        moved = frame - (frame if self.seen is None else self.seen)
        self.seen = frame
        if self.in_place:
            state["n"].add_(1)
        else:
            state = DictTensor({"n": n + 1})
        return DictTensor({"action": torch.ones(len(n), dtype=torch.int64), "n": n, "moved": moved}), state


@pytest.mark.parametrize("n_timesteps", [1, 2, 7])
@pytest.mark.parametrize("mode", MODES)
def test_agents_may_write_into_their_state_and_keep_the_last_observation(mode, n_timesteps):
    class Copying(Counting):
        def __call__(self, state, observation, agent_info, history=None):
            return super().__call__(state, observation.clone(), agent_info, history)

    def run(agent, in_place):
        found = []
        with RL_Batcher(
            n_timesteps, agent, {"in_place": in_place}, vector_of("cartpole", mode, 2), {}, 0, 3, debug=True
        ) as batcher:
            batcher.reset()
            for _ in range(60 // n_timesteps):
                batcher.execute()
                trajectories, _ = batcher.get()
                found.append((trajectories.trajectories.clone(), trajectories.info["agent_state/n"].tolist()))
        return found

    wanted = run(Copying, in_place=False)
    assert run(Copying, in_place=True) == wanted and run(Counting, in_place=False) == wanted
    moved = torch.cat([steps["action/moved"][steps.mask().bool()] for steps, _ in wanted])
    assert (moved != 0).any(1).sum() > 60


def test_lengths_say_how_many_steps_were_left_out():
    with RL_Batcher(
        7, Fixed, {"space": spaces.Discrete(2)}, vector_of("three", AutoresetMode.NEXT_STEP, 1), {}, 0, 0
    ) as batcher:
        batcher.reset()
        lengths = []
        for _ in range(4):  # of eight calls two are resets: the 4th, 8th, 12th, ...
            batcher.execute()
            with batcher.lease() as lease:
                lengths += lease.trajectories.lengths.tolist()
                frames = lease.trajectories.trajectories["observation/frame"][0, : lengths[-1], 1].tolist()
                assert all(step < 3 for step in frames)  # nothing begins where an episode has ended
        assert lengths == [6, 5, 5, 5]


@pytest.mark.parametrize("n_processes", [0, 2])
def test_gymnasiums_own_vectorised_cartpole(n_processes):
    def create_env(seed):
        envs = gymnasium.make_vec("CartPole-v1", num_envs=50, vectorization_mode="vector_entry_point")
        return GymVectorEnv(envs, seed)

    with RL_Batcher(40, Fixed, {"space": spaces.Discrete(2)}, create_env, {}, n_processes, 1) as batcher:
        batcher.reset()
        for _ in range(3):
            batcher.execute()
            trajectories, _ = batcher.get()
            steps = trajectories.trajectories
            before, after = steps["observation/frame"], steps["_observation/frame"]
            inside, done = steps.mask(torch.bool), steps["_observation/done"]
            assert (steps["_observation/reward"][inside] == 1).all() and not steps["_observation/initial_state"].any()
            goes_on = inside[:, 1:] & ~done[:, :-1]
            assert torch.equal(before[:, 1:][goes_on], after[:, :-1][goes_on])
            begins = inside[:, 1:] & done[:, :-1]
            assert begins.any() and steps["observation/initial_state"][:, 1:][begins].all()
            assert (before[:, 1:][begins].abs() <= 0.05).all()
            ended = after[inside & steps["_observation/terminated"]]
            assert ((ended[:, 0].abs() > 2.4) | (ended[:, 2].abs() > 0.2094)).all()
        episodes = batcher.episodes()
        assert (episodes["return"] == episodes["length"]).all() and episodes.n_elems() > 20


def test_ales_vector_environment():
    from ale_py.vector_env import AtariVectorEnv

    def create_env(seed):
        settings = {"autoreset_mode": AutoresetMode.SAME_STEP, "max_num_frames_per_episode": 200}
        return GymVectorEnv(AtariVectorEnv("pong", num_envs=2, **settings), seed)

    with RL_Batcher(80, Fixed, {"space": spaces.Discrete(6)}, create_env, {}, 1, 1) as batcher:
        batcher.reset()
        batcher.execute()
        trajectories, _ = batcher.get()
        assert trajectories.trajectories["observation/frame"].shape == (2, 80, 4, 84, 84)
        episodes, done = batcher.episodes(), trajectories.trajectories["_observation/done"]
        assert episodes["truncated"].all() and set(episodes["length"].tolist()) == {50}
        assert done.nonzero().tolist() == [[0, 49], [1, 49]]
        frames, following = (trajectories.trajectories[f"{side}observation/frame"] for side in ("", "_"))
        assert not torch.equal(following[:, 49], frames[:, 50])  # the true final observation
        assert torch.equal(following[:, :49], frames[:, 1:50])


class Own(gymnasium.vector.VectorEnv):
    """A vector environment that notes what it is given."""

    def __init__(self, **changes):
        self.num_envs, self.metadata = 2, {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = spaces.Box(-1, 1, (3,), np.float32)
        self.single_action_space = spaces.MultiDiscrete([3, 4])
        self.changes, self.calls = changes, []

    def reset(self, *, seed=None, options=None):
        self.calls.append(("reset", seed))
        if not isinstance(seed, self.changes.get("seeds", object)):
            raise TypeError("this seed is not to my taste")
        return np.zeros((2, 3), np.float32), {}

    def step(self, actions):
        self.calls.append(("step", actions))
        done = np.array([False, self.changes.get("ends", False)])
        frames = self.changes.get("frames", np.ones((2, 3), np.float32))
        rewards = self.changes.get("rewards", np.zeros(2))
        return frames, rewards, done, np.zeros(2, bool), self.changes.get("infos", {})


ACTION = DictTensor({"action": torch.tensor([[1, 2], [2, 3]])})


def test_actions_come_as_one_and_are_the_environments_own():
    envs = Own()
    env, action = GymVectorEnv(envs, 0), DictTensor({"action": ACTION["action"].clone()})
    env.reset()
    env.step(action)
    given = envs.calls[-1][1]
    assert given.tolist() == [[1, 2], [2, 3]] and given.dtype == np.int64
    given[:] = 0
    assert action["action"].tolist() == [[1, 2], [2, 3]]


@pytest.mark.parametrize(("seeds", "taken"), [(object, [5, 6]), (np.ndarray, [5, 6]), (int, 5), (type(None), None)])
def test_it_gets_the_seeds_that_it_can_take_and_only_once(seeds, taken):
    envs = Own(seeds=(seeds, type(None)))
    env = GymVectorEnv(envs, 5)
    if taken is None:
        with pytest.warns(UserWarning, match="^Own.reset takes no seed: give it one when it is made$"):
            env.reset()
    else:
        env.reset()
    assert envs.calls[-1][0] == "reset" and np.array_equal(envs.calls[-1][1], taken)
    env.reset()
    assert envs.calls[-1] == ("reset", None)


class Spoilt(Count):
    """Its first reset fails, with something that might be about seeds; or all of them do."""

    def __init__(self, how, left=1):
        super().__init__(3)
        self.how, self.left = how, left

    def reset(self, **arguments):
        self.left -= 1
        if self.left >= 0:
            raise self.how
        return super().reset(**arguments)


def test_what_the_first_reset_raises_is_not_taken_for_a_matter_of_seeds():
    env_fns = [lambda: Spoilt(ValueError("an asset is missing"))] * 2
    for envs in (SyncVectorEnv(env_fns), SharedVectorEnv(env_fns, 0)):
        env = GymVectorEnv(envs, 0)
        with pytest.raises(ValueError, match="an asset is missing"):
            env.reset()
        env.close()


class Always(Own):
    def __init__(self, observation=None):
        super().__init__()

    def reset(self, *, seed=None, options=None):
        raise ValueError(f"with seed {seed}")


def test_when_no_reset_works_the_first_error_says_why():
    with pytest.raises(ValueError, match=r"^with seed \[5, 6\]\nraised by environments \(Always\) in reset$"):
        GymVectorEnv(Always(), 5).reset()


def test_seeds_of_a_batcher_are_such_that_all_environments_take_them():
    from ale_py.vector_env import AtariVectorEnv

    for worker in range(20):
        env = GymVectorEnv(AtariVectorEnv("pong", num_envs=1), EnvSeed(0, worker))
        env.reset()  # a warning is an error
        env.close()


class Forwarding:
    """A wrapper that knows nothing of rows."""

    def __init__(self, env):
        self.env = env

    def __getattr__(self, name):
        if name.endswith("_rows") or name == "example":
            raise AttributeError(name)
        return getattr(self.env, name)

    def step(self, action):
        return self.env.step(action)

    def reset(self, env_info):
        return self.env.reset(env_info)

    def close(self):
        self.env.close()

    def n_envs(self):
        return self.env.n_envs()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["cartpole", "nested", "one step"])
def test_a_wrapper_around_it_gives_the_same_transitions(mode, name):
    create_env = vector_of(name, mode)
    assert transitions(name, lambda seed: Forwarding(create_env(seed)), 0) == transitions(name, create_env, 0)


@pytest.mark.parametrize("mode", MODES)
def test_it_is_a_vec_env_as_they_should_be(mode):
    check_env(lambda seed: vector_of("cartpole", mode)(seed), {}, n_steps=60)


class Carrying(Fixed):
    """Its counter goes on from episode to episode."""

    def __call__(self, state, observation, agent_info, history=None):
        output, _ = super().__call__(state, observation, agent_info)
        output.set("n", state["n"])
        return output, DictTensor({"n": state["n"] + 1})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n_timesteps", [1, 4, 9])
def test_an_agents_state_is_what_the_steps_made_it(mode, n_timesteps):
    create_env = vector_of("three", mode)
    with RL_Batcher(n_timesteps, Carrying, {"space": spaces.Discrete(5)}, create_env, {}, 0, 3) as batcher:
        batcher.reset()
        n = torch.zeros(3, dtype=torch.int64)
        for _ in range(5):
            batcher.execute()
            trajectories, _ = batcher.get()
            lengths = trajectories.lengths
            assert torch.equal(trajectories.info["agent_state/n"], n)
            for row in range(3):
                counted = trajectories.trajectories["action/n"][row, : lengths[row]]
                assert torch.equal(counted, n[row] + torch.arange(int(lengths[row])))
            n = n + lengths


def test_an_agent_with_history_needs_another_mode():
    class Historic(Fixed):
        def require_history(self):
            return True

    with RL_Batcher(
        9, Historic, {"space": spaces.Discrete(5)}, vector_of("three", AutoresetMode.NEXT_STEP), {}, 0, 3
    ) as batcher:
        batcher.reset()
        batcher.execute()
        with pytest.raises(SpecError, match="^agent: its history would hold steps that are no transitions"):
            batcher.get()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ends": True}, r"^environment: Own ended an episode without infos\['final_obs'\]$"),
        ({"ends": True, "infos": {"final_obs": np.ones((2, 3))[:, :2]}}, r"final observation has shape"),
        ({"ends": True, "infos": [{}, {}]}, "^environment: infos with 'final_obs' must be .* or 2 dicts, got list$"),
        ({"rewards": np.ones(1)}, r"^environment: reward must be 2 numbers, got \(1,\) float64$"),
        ({"rewards": [None, 1]}, r"^environment: reward must be 2 numbers, got \(2,\) object$"),
        ({"frames": np.zeros((2, 4), np.float32)}, r"observation has shape \(2, 4\), the space says \(2, 3\)$"),
        ({"frames": np.zeros((2, 3), "U1")}, "observation has dtype <U1, and values that"),
    ],
)
def test_what_is_not_as_the_space_says_is_refused(changes, message):
    env = GymVectorEnv(Own(**changes), 0)
    env.reset()
    with pytest.raises(SpecError, match=message):
        env.step(ACTION)


def test_single_environments_are_refused():
    env = gymnasium.make("CartPole-v1")
    for envs, name in ((env, "TimeLimit"), (env.unwrapped, "CartPoleEnv"), ([env], "list")):
        with pytest.raises(TypeError, match=rf"^envs: must be a vector .*, got {name}: GymEnvInf\(.* is for"):
            GymVectorEnv(envs, 0)


def test_what_cannot_be_is_refused():
    env = GymVectorEnv(Own(), 0)
    with pytest.raises(StateError, match="^step: call reset first$"):
        env.step(ACTION)
    with pytest.raises(SpecError, match="^env_info: Own takes no options for single environments$"):
        env.reset(DictTensor({"length": torch.zeros(2)}))
    with pytest.raises(SpecError, match="^autoreset_mode: must be one of .*, got 'never'$"):
        GymVectorEnv(Own(), 0, autoreset_mode="never")
    with pytest.raises(SpecError, match="^autoreset_mode: Own says SameStep, got NextStep$"):
        GymVectorEnv(Own(), 0, autoreset_mode="NextStep")
    unsaid = Own(ends=True, infos={"final_obs": np.ones((2, 3))})
    unsaid.metadata = {}
    with pytest.warns(UserWarning, match="^Own does not say its autoreset mode: taken as NextStep, give"):
        wrong = GymVectorEnv(unsaid, 0)
    wrong.reset()
    with pytest.raises(SpecError, match=r"^environment: Own gave infos\['final_obs'\], which is not NextStep$"):
        wrong.step(ACTION)
    env.reset()
    with pytest.raises(SpecError, match=r"^agent: 'action' has shape \(1, 2\), expected \(2, 2\)"):
        env.step(DictTensor({"action": ACTION["action"][:1]}))


@pytest.mark.parametrize("kind", ["int", "list"])
def test_seeds_from_2_31_on_give_workers_streams_of_their_own(kind):
    """Of an environment that takes one seed only, and none that does not fit into int32."""

    class Small(Own):
        def reset(self, *, seed=None, options=None):
            if seed is None:
                return super().reset()
            if isinstance(seed, (list, np.ndarray)) or not 0 <= seed < 2**31:
                raise ValueError("Seed should be in range of int32")
            self.seeded = seed
            return super().reset()

    found = []
    for seed in (2**31, 2**32, 2**40, 2**41, 2**63, *(EnvSeed(0, worker) for worker in range(8))):
        envs = Small()
        env = GymVectorEnv(envs, seed if kind == "int" else [seed + k for k in range(2)])
        env.reset()
        found.append(envs.seeded)
    assert len(set(found)) == len(found)


def test_environments_that_were_seeded_before_are_not_seeded_again(recwarn):
    class Seeded(Own):
        def reset(self, **arguments):
            assert not arguments
            return super().reset()

    GymVectorEnv(Seeded(), None).reset()
    assert not recwarn.list


# A double of EnvPool as far as seeds go: one int32 when it is made, none at a reset; the same seed, the same streams.
ENVPOOL = """
import gymnasium
import numpy as np


class EnvPool:
    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, n, seed):
        self.n, self.rngs = n, [np.random.default_rng(seed + k) for k in range(n)]

    def __len__(self):
        return self.n

    def _observation(self):
        return np.stack([rng.uniform(-1, 1, 3).astype(np.float32) for rng in self.rngs])

    def reset(self, env_id=None):
        return self._observation(), {}

    def step(self, actions):
        no = np.zeros(self.n, bool)
        return self._observation(), np.ones(self.n, np.float32), no, no, {}

    def close(self):
        pass


def make(task_id, env_type, num_envs, seed=42):
    assert -(2**31) <= seed < 2**31, f"Seed should be in range of int32, got {seed}"
    return EnvPool(num_envs, seed)
"""


def test_workers_with_the_recipe_for_envpool_have_streams_of_their_own(subprocess_env, tmp_path):
    page = (Path(__file__).parents[2] / "docs/learn/environments.md").read_text()
    recipe = page.split('```python title="EnvPool"\n')[1].split("```")[0]
    (tmp_path / "envpool.py").write_text(ENVPOOL)
    (tmp_path / "program.py").write_text(recipe + textwrap.dedent("""
        import gymnasium
        import torch
        from rlstructs import RandomAgent, RL_Batcher

        if __name__ == "__main__":
            for seeds in (0, 2**63, [0, 1000], [2**40, 2**41], [2**63, 2**62], None):
                with RL_Batcher(
                    2, lambda: RandomAgent(gymnasium.spaces.Discrete(2)), {}, create_envpool, {"n_envs": 3}, 2, seeds
                ) as batcher:
                    batcher.reset()
                    batcher.execute()
                    frames = batcher.get()[0].trajectories["observation/frame"]
                    print(len(torch.unique(frames[:, 0], dim=0)))
    """))  # fmt: skip
    path = os.pathsep.join([str(tmp_path), subprocess_env["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-W", "error", tmp_path / "program.py"], capture_output=True, text=True,
        env={**subprocess_env, "PYTHONPATH": path},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("6\n" * 6, "")
