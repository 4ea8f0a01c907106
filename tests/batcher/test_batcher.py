"""The batcher's contract: what chunks hold, in which order calls go, what is refused."""

from __future__ import annotations

import random
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
import torch
from helpers import SPACING, Count, Counting, count_batcher, create_gym, rollout

from rlstructs import (
    ClosedError,
    DictTensor,
    GymEnv,
    GymEnvInf,
    MissingKeyError,
    RandomAgent,
    RL_Agent,
    RL_Batcher,
    SpecError,
    StateError,
    TemporalDictTensor,
)
from rlstructs.envs import VecEnv
from rlstructs.memories.torch import RandomMemory

TABLE = [[1, 4], [2, 7]]


def valid(trajectories, key):
    """The valid steps of one key, a list for each row."""
    steps = trajectories.trajectories
    return [row[:length].tolist() for row, length in zip(steps[key], steps.lengths, strict=True)]


def bits(trajectories, key):
    """The same of a bool key, as text: "TFF"."""
    return ["".join("FT"[value] for value in row) for row in valid(trajectories, key)]


def counts(trajectories, key):
    """The same of [episode, step] observations, as pairs of ints."""
    return [[tuple(int(v) for v in pair) for pair in row] for row in valid(trajectories, key)]


def column(trajectories, key):
    return trajectories.info[key].tolist()


# --- chunks of GymEnv: CV47-CV61 -----------------------------------------------------------------


def test_chunks_of_gym_env_follow_each_episode_to_its_end():
    with count_batcher(TABLE, 3) as batcher:
        batcher.reset()
        first, n = rollout(batcher)  # CV47
        assert (n, first.lengths.tolist(), first.trajectories.n_timesteps()) == (2, [1, 3, 2, 3], 3)
        assert column(first, "agent_state/n") == [0, 0, 0, 0]
        assert column(first, "env_index") == [0, 1, 2, 3]
        assert first.mask().tolist() == [[1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 1, 1]]
        assert bits(first, "observation/initial_state") == ["T", "TFF", "TF", "TFF"]
        assert bits(first, "_observation/done") == ["T", "FFF", "FT", "FFF"]
        assert valid(first, "_observation/reward") == [[1], [1, 2, 3], [1, 2], [1, 2, 3]]
        assert valid(first, "action/n") == [[0], [0, 1, 2], [0, 1], [0, 1, 2]]
        assert [[step for _, step in row] for row in counts(first, "observation/frame")] == [
            [0], [0, 1, 2], [0, 1], [0, 1, 2],
        ]  # fmt: skip

        second, n = rollout(batcher)  # CV48
        assert (n, second.lengths.tolist(), column(second, "agent_state/n")) == (1, [1, 3], [3, 3])
        assert column(second, "env_index") == [1, 3]
        assert bits(second, "observation/initial_state") == ["F", "FFF"]
        assert bits(second, "_observation/done") == ["T", "FFF"]
        assert valid(second, "_observation/reward") == [[4], [4, 5, 6]]
        assert valid(second, "action/n") == [[3], [3, 4, 5]]
        assert second.trajectories["action/n"].tolist() == [[3, 0, 0], [3, 4, 5]]  # CV51

        third, n = rollout(batcher)  # CV49
        assert (n, third.lengths.tolist(), third.trajectories.n_timesteps()) == (0, [1], 1)
        assert (column(third, "agent_state/n"), valid(third, "_observation/reward")) == ([6], [[7]])

        for call in (batcher.execute, batcher.get):  # CV50
            with pytest.raises(StateError, match="every environment has ended, call reset first"):
                call()
        batcher.reset()
        again, _ = rollout(batcher)
        assert [pair[0][0] for pair in counts(again, "observation/frame")] == [1, 1, 1, 1]
        assert again.trajectories["observation/initial_state"][:, 0].all()


def test_padding_is_zero_in_every_chunk():  # CV51
    with count_batcher(TABLE, 3) as batcher:
        batcher.reset()
        for _ in range(3):
            trajectories, _ = rollout(batcher)
            padding = ~trajectories.mask(torch.bool)
            for tensor in trajectories.trajectories.values():
                assert not tensor[padding].any()


def test_time_axis_ends_with_the_longest_episode():  # CV52
    with count_batcher(TABLE, 10) as batcher:
        batcher.reset()
        trajectories, n = rollout(batcher)
    assert (n, trajectories.lengths.tolist(), trajectories.trajectories.n_timesteps()) == (0, [1, 4, 2, 7], 7)
    assert [row.index("T") for row in bits(trajectories, "_observation/done")] == [0, 3, 1, 6]


def test_an_episode_may_end_on_the_last_step_of_a_chunk():  # CV53
    with count_batcher([[3, 6]], 3) as batcher:
        batcher.reset()
        first, n = rollout(batcher)
        assert (n, first.lengths.tolist(), bits(first, "_observation/done")[0]) == (1, [3, 3], "FFT")
        second, n = rollout(batcher)
        assert (n, column(second, "agent_state/n"), bits(second, "_observation/done")) == (0, [3], ["FFT"])
        with pytest.raises(StateError):
            batcher.execute()


def test_chunks_of_one_step():  # CV54
    with count_batcher([[1, 2]], 1) as batcher:
        batcher.reset()
        first, n = rollout(batcher)
        assert (n, first.lengths.tolist(), bits(first, "_observation/done")) == (1, [1, 1], ["T", "F"])
        second, n = rollout(batcher)
        assert (n, bits(second, "observation/initial_state"), bits(second, "_observation/done")) == (0, ["F"], ["T"])


@pytest.mark.parametrize(
    ("table", "n_timesteps", "rows", "firsts", "n"),
    [
        pytest.param([[2], [4], [1]], 2, [1], [2], 0, id="CV55"),
        pytest.param([[1, 2], [9, 9]], 3, [2, 3], [3, 3], 2, id="CV56"),
    ],
)
def test_workers_that_are_finished_contribute_nothing(table, n_timesteps, rows, firsts, n):
    with count_batcher(table, n_timesteps) as batcher:
        batcher.reset()
        rollout(batcher)
        second, n_running = rollout(batcher)
    assert column(second, "env_index") == rows
    assert [row[0][1] for row in counts(second, "observation/frame")] == firsts
    assert [row[0] for row in valid(second, "action/n")] == firsts
    assert n_running == n


def test_reset_in_the_middle_of_episodes_starts_new_ones():  # CV57
    with count_batcher([[9, 9]], 3) as batcher:
        batcher.reset()
        rollout(batcher)
        batcher.reset()
        trajectories, _ = rollout(batcher)
    assert counts(trajectories, "observation/frame") == [[(1, 0), (1, 1), (1, 2)]] * 2
    assert column(trajectories, "agent_state/n") == [0, 0]
    assert bits(trajectories, "observation/initial_state") == ["TFF"] * 2


def eps(*values):
    return DictTensor({"eps": torch.tensor(values)})


def lengths(*values):
    return DictTensor({"length": torch.tensor(values)})


def approx(values):
    return pytest.approx(values, abs=1e-6)


def test_agent_info_is_recorded_for_the_rows_that_run():
    with count_batcher([[9, 1], [9, 9]], 2, agent_info=eps(0.0)) as batcher:
        batcher.reset(agent_info=eps(0.1, 0.2, 0.3, 0.4))
        first, _ = rollout(batcher)  # CV58
        assert column(first, "agent_info/eps") == approx([0.1, 0.2, 0.3, 0.4])
        assert first.lengths.tolist() == [2, 1, 2, 2]
        second, _ = rollout(batcher)
        assert column(second, "agent_info/eps") == approx([0.1, 0.3, 0.4])
        batcher.execute(agent_info=eps(0.5, 0.6, 0.7, 0.8))  # CV59
        third, _ = batcher.get()
        assert column(third, "agent_info/eps") == approx([0.5, 0.7, 0.8])


@pytest.mark.parametrize("nothing", [None, DictTensor()], ids=["none", "empty"])
def test_agent_info_stays_until_it_is_replaced(nothing):  # CV69, CV70
    with count_batcher(TABLE, 3, autoreset=True, agent_info=eps(0.0)) as batcher:
        batcher.reset(agent_info=eps(0.1, 0.2, 0.3, 0.4))
        batcher.execute(agent_info=eps(0.5, 0.6, 0.7, 0.8))
        for _ in range(2):
            trajectories, _ = batcher.get()
            assert column(trajectories, "agent_info/eps") == approx([0.5, 0.6, 0.7, 0.8])
            batcher.execute(agent_info=nothing)


def test_env_info_reaches_the_environments_and_is_recorded():  # CV60
    with count_batcher([[5, 5], [5, 5]], 5, env_info=lengths(1)) as batcher:
        batcher.reset(env_info=lengths(1, 2, 3, 9))
        first, n = rollout(batcher)
        assert (n, first.lengths.tolist(), column(first, "env_info/length")) == (1, [1, 2, 3, 5], [1, 2, 3, 9])
        second, n = rollout(batcher)
        assert (n, second.lengths.tolist(), column(second, "env_info/length")) == (0, [4], [9])


def test_rollouts_reset_with_the_infos_in_force():
    with count_batcher([[5, 5]], 3, agent_info=eps(0.0), env_info=lengths(1)) as batcher:
        with pytest.raises(SpecError, match="agent_info"):
            next(batcher.rollouts())
        batcher.reset(agent_info=eps(0.5, 0.25), env_info=lengths(2, 3))
        found = [column(next(batcher.rollouts()), "env_info/length")]
        batcher.reset(agent_info=eps(0.5, 0.25), env_info=lengths(3, 2))
        batcher.execute(eps(0.75, 1.0))
        batcher.get()
        for trajectories in batcher.rollouts(10):
            found.append([column(trajectories, name) for name in ("agent_info/eps", "env_info/length")])
            assert trajectories.lengths.tolist() == [3, 2]
    assert found == [[2, 3], [[0.75, 1.0], [3, 2]], [[0.75, 1.0], [3, 2]]]


def test_agent_info_and_env_info_together():  # CV61
    with count_batcher([[5, 5]], 2, agent_info=eps(0.0), env_info=lengths(1)) as batcher:
        batcher.reset(agent_info=eps(0.5, 0.25), env_info=lengths(1, 4))
        first, n = rollout(batcher)
        assert (n, first.lengths.tolist()) == (1, [1, 2])
        second, n = rollout(batcher)
        assert (n, second.lengths.tolist(), column(second, "agent_state/n")) == (0, [2], [2])
        assert (column(second, "agent_info/eps"), column(second, "env_info/length")) == ([0.25], [4])


# --- chunks of GymEnvInf: CV62-CV68 --------------------------------------------------------------


def test_chunks_of_gym_env_inf_are_always_full_and_keep_final_observations():
    with count_batcher(TABLE, 3, autoreset=True) as batcher:
        batcher.reset()
        first, n = rollout(batcher)  # CV62
        assert (n, first.lengths.tolist()) == (4, [3] * 4)
        assert valid(first, "action/n") == [[0, 0, 0], [0, 1, 2], [0, 1, 0], [0, 1, 2]]
        assert bits(first, "observation/initial_state") == ["TTT", "TFF", "TFT", "TFF"]
        assert bits(first, "_observation/done") == ["TTT", "FFF", "FTF", "FFF"]
        assert valid(first, "_observation/reward") == [[1, 1, 1], [1, 2, 3], [1, 2, 1], [1, 2, 3]]
        assert valid(first, "observation/reward") == [[0, 0, 0], [0, 1, 2], [0, 1, 0], [0, 1, 2]]
        assert counts(first, "observation/frame") == [
            [(0, 0), (1, 0), (2, 0)], [(0, 0), (0, 1), (0, 2)], [(0, 0), (0, 1), (1, 0)], [(0, 0), (0, 1), (0, 2)],
        ]  # fmt: skip
        assert counts(first, "_observation/frame") == [
            [(0, 1), (1, 1), (2, 1)], [(0, 1), (0, 2), (0, 3)], [(0, 1), (0, 2), (1, 1)], [(0, 1), (0, 2), (0, 3)],
        ]  # fmt: skip
        assert set("".join(bits(first, "_observation/initial_state"))) == {"F"}

        second, n = rollout(batcher)  # CV63
        assert (n, column(second, "agent_state/n")) == (4, [1, 3, 1, 3])
        assert valid(second, "action/n") == [[0, 0, 0], [3, 0, 1], [1, 0, 1], [3, 4, 5]]
        assert valid(second, "action/action") == [[0, 0, 0], [3, 0, 1], [1, 0, 1], [3, 4, 0]]
        assert bits(second, "observation/initial_state") == ["TTT", "FTF", "FTF", "FFF"]
        assert bits(second, "_observation/done") == ["TTT", "TFF", "TFT", "FFF"]
        assert valid(second, "observation/last_action") == [[0, 0, 0], [2, 0, 0], [0, 0, 0], [2, 3, 4]]
        assert valid(second, "_observation/reward") == [[1, 1, 1], [4, 1, 2], [2, 1, 2], [4, 5, 6]]
        assert set("".join(bits(second, "observation/done"))) == {"F"}  # CV65

        third, _ = rollout(batcher)  # CV64
        assert column(third, "agent_state/n") == [1, 2, 2, 6]
        assert valid(third, "action/n") == [[0, 0, 0], [2, 3, 0], [0, 1, 0], [6, 0, 1]]
        assert bits(third, "observation/initial_state") == ["TTT", "FFT", "TFT", "FTF"]
        assert bits(third, "_observation/done") == ["TTT", "FTF", "FTF", "TFF"]
        assert valid(third, "_observation/reward") == [[1, 1, 1], [3, 4, 1], [1, 2, 1], [7, 1, 2]]


def test_state_and_flags_cross_chunk_boundaries():  # CV66
    with count_batcher([[3, 6]], 3, autoreset=True) as batcher:
        batcher.reset()
        chunks = [rollout(batcher)[0] for _ in range(3)]
    starts = [bits(chunk, "observation/initial_state") for chunk in chunks]
    assert starts == [["TFF", "TFF"], ["TFF", "FFF"], ["TFF", "TFF"]]
    assert [bits(chunk, "_observation/done") for chunk in chunks] == [["FFT", "FFF"], ["FFT", "FFT"], ["FFT", "FFF"]]
    assert [column(chunk, "agent_state/n") for chunk in chunks] == [[0, 0], [3, 3], [3, 6]]
    assert valid(chunks[1], "action/n") == [[0, 1, 2], [3, 4, 5]]


def test_three_workers_of_one_environment():  # CV67
    with count_batcher([[2], [4], [1]], 2, autoreset=True) as batcher:
        batcher.reset()
        chunks = [rollout(batcher)[0] for _ in range(3)]
    assert [valid(chunk, "action/n") for chunk in chunks] == [
        [[0, 1], [0, 1], [0, 0]], [[0, 1], [2, 3], [0, 0]], [[0, 1], [0, 1], [0, 0]],
    ]  # fmt: skip
    assert [bits(chunk, "_observation/done") for chunk in chunks] == [
        ["FT", "FF", "TT"], ["FT", "FT", "TT"], ["FT", "FF", "TT"],
    ]  # fmt: skip
    assert [column(chunk, "agent_state/n") for chunk in chunks] == [[0, 0, 0], [2, 2, 1], [2, 4, 1]]


def test_an_agent_that_ignores_episode_starts_keeps_its_state():  # CV68
    with count_batcher(TABLE, 3, autoreset=True, agent_args={"resets": False}) as batcher:
        batcher.reset()
        assert valid(rollout(batcher)[0], "action/n") == [[0, 1, 2]] * 4
        assert valid(rollout(batcher)[0], "action/n") == [[3, 4, 5]] * 4


@pytest.mark.parametrize("autoreset", [False, True], ids=["GymEnv", "GymEnvInf"])
def test_fixed_episodes_of_three_steps_have_length_three_everywhere(autoreset):  # R4
    with count_batcher([[3, 3], [3, 3]], 12, autoreset=autoreset) as batcher:
        batcher.reset()
        trajectories, _ = rollout(batcher)
        episodes = batcher.episodes()
    assert set(episodes["length"].tolist()) == {3} and set(episodes["return"].tolist()) == {6.0}
    assert episodes.n_elems() == (16 if autoreset else 4)
    steps = trajectories.trajectories
    done = steps["_observation/done"] & steps.mask(torch.bool)
    assert (steps["_observation/frame"][..., 1][done] == 3).all()
    assert trajectories.lengths.tolist() == ([12] * 4 if autoreset else [3] * 4)


# --- agents and their updates: CV71, CV83 --------------------------------------------------------


def test_update_reaches_every_agent_from_the_next_rollout_on():  # CV71
    with count_batcher([[9, 9], [9, 9]], 2, agent_seeds=[11, 22]) as batcher:
        batcher.update(3.5)
        batcher.reset()
        first, _ = rollout(batcher)
        assert valid(first, "action/given") == [[3.5, 3.5]] * 4
        assert valid(first, "action/seed") == [[11, 11], [11, 11], [22, 22], [22, 22]]
        batcher.update(4.5)
        assert valid(rollout(batcher)[0], "action/given") == [[4.5, 4.5]] * 4


def test_an_agent_without_a_seed_of_its_own_gets_that_of_its_environments():
    with count_batcher([[9, 9], [9, 9]], 1) as batcher:
        batcher.reset()
        assert valid(rollout(batcher)[0], "action/seed") == [[0], [0], [SPACING], [SPACING]]


class Sampling(RL_Agent):
    """Has a generator of its own, of which there is none before it has been seeded."""

    def seed(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        return DictTensor({"action": torch.randint(2, (observation.n_elems(),), generator=self.generator)}), state


def test_an_agent_is_seeded_before_it_acts_for_the_first_time():
    found = []
    for _ in range(2):
        settings = 8, Sampling, {}, create_gym, {"env_id": "CartPole-v1", "n_envs": 2}
        with RL_Batcher(*settings, n_processes=2, seeds=0, agent_seeds=[3, 4]) as batcher:
            batcher.reset()
            found.append(rollout(batcher)[0].trajectories["action/action"].tolist())
    expected = [torch.randint(2, (8, 2), generator=torch.Generator().manual_seed(seed)).T for seed in (3, 4)]
    assert found == [torch.cat(expected).tolist()] * 2


class Holding(RL_Agent):
    """Keeps what it is given, as it is, and puts out its sum."""

    def __init__(self, model):
        self.model = model

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        B = observation.n_elems()
        total = sum(tensor.sum() for tensor in self.model.values()).detach()
        return DictTensor({"action": torch.zeros(B, dtype=torch.int64), "total": total.expand(B)}), state

    def update(self, info):
        self.model = info


@pytest.mark.parametrize("n_processes", [0, 2])
def test_weights_are_what_they_were_when_they_were_given(n_processes):  # CV83
    weights = {"w": torch.ones(300), "shared": torch.ones(2, 2)}
    with RL_Batcher(
        1, Holding, {"model": weights}, create_gym, {"env_id": "CartPole-v1", "n_envs": 1}, n_processes,
        [0, 10][: max(1, n_processes)],
    ) as batcher:  # fmt: skip
        weights["w"].zero_()
        batcher.reset()
        assert set(rollout(batcher)[0].trajectories["action/total"].flatten().tolist()) == {304.0}
        new = {"w": torch.full((1000,), 2.0), "bf16": torch.ones(3, dtype=torch.bfloat16)}
        batcher.update(new)
        new["w"].zero_()
        assert set(rollout(batcher)[0].trajectories["action/total"].flatten().tolist()) == {2003.0}
        assert not any(tensor.is_shared() for tensor in new.values())
        batcher.update({"w": torch.zeros(3, requires_grad=True)})  # overwrites the block; agents hold copies
        assert set(rollout(batcher)[0].trajectories["action/total"].flatten().tolist()) == {0.0}


def test_update_takes_modules_and_nested_objects():
    model = torch.nn.Linear(3, 2)
    with RL_Batcher(
        1, Holding, {"model": {"a": torch.zeros(1)}}, create_gym, {"env_id": "CartPole-v1", "n_envs": 2}, 1, 0
    ) as batcher:
        batcher.reset()
        batcher.update(model.state_dict())
        got = rollout(batcher)[0].trajectories["action/total"][0, 0]
    torch.testing.assert_close(got, sum(tensor.sum() for tensor in model.state_dict().values()))


class Odd(Counting):
    """Tells what its odd tensors are."""

    def update(self, info):
        assert info["sparse"].layout == torch.sparse_coo
        self.given = info["quantised"].dequantize().sum().item()


@pytest.mark.filterwarnings("ignore:.*uantiz")
def test_update_takes_tensors_that_are_more_than_their_numbers():
    quantised = torch.quantize_per_tensor(torch.tensor([1.0, 2.5]), 0.5, 0, torch.qint8)
    odd = {"quantised": quantised, "sparse": torch.eye(2).to_sparse()}
    with RL_Batcher(2, Odd, {}, create_gym, {"env_id": "CartPole-v1", "n_envs": 1}, 1, 0) as batcher:
        batcher.reset()
        batcher.update(odd)
        assert rollout(batcher)[0].trajectories["action/given"].tolist() == [[3.5, 3.5]]


# --- determinism: CV74 ---------------------------------------------------------------------------


class Noisy(RL_Agent):
    """Draws from every global stream."""

    def initial_state(self, agent_info, B):
        return DictTensor({"seen": torch.zeros(B, 4)})

    def __call__(self, state, observation, agent_info, history=None):
        B = observation.n_elems()
        noise = torch.rand(B) + np.random.random() + random.random()
        return DictTensor({"action": torch.randint(2, (B,)), "noise": noise}), DictTensor(
            {"seen": observation["frame"]}
        )


def noisy_chunks(n_processes, seeds, n_envs=3, **arguments):
    with RL_Batcher(
        20, Noisy, {}, create_gym, {"env_id": "CartPole-v1", "n_envs": n_envs}, n_processes, seeds, **arguments
    ) as batcher:
        batcher.reset()
        return [rollout(batcher)[0] for _ in range(3)]


@pytest.mark.parametrize("seeds", [5, [100, 200]], ids=["int", "list"])
def test_same_seeds_give_the_same_rollouts_whatever_the_start_method(seeds, start_method):
    expected = noisy_chunks(2, seeds, start_method="forkserver" if start_method == "spawn" else "spawn")
    assert noisy_chunks(2, seeds, start_method=start_method) == expected
    assert noisy_chunks(2, 6 if seeds == 5 else [100, 201]) != expected


def test_workers_feed_a_memory_whatever_the_start_method(start_method):
    fed, other = (RandomMemory(memory_size=20, num_envs=4, device="cpu") for _ in range(2))
    with count_batcher(TABLE, 6, autoreset=True, start_method=start_method, memory=fed) as batcher:
        batcher.reset()
        for _ in range(4):
            other.add_trajectories(rollout(batcher)[0])
    names = other.get_tensor_names()
    for one, two in zip(fed.sample_all(names)[0], other.sample_all(names)[0], strict=True):
        assert len(one) == 80 and torch.equal(one, two)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("autoreset", [False, True], ids=["GymEnv", "GymEnvInf"])
def test_no_process_gives_what_one_process_gives(env_id, autoreset):
    def chunks(n_processes):
        env = gymnasium.make(env_id)
        with RL_Batcher(
            30, RandomAgent, {"action_space": env.action_space}, create_gym,
            {"env_id": env_id, "n_envs": 3, "autoreset": autoreset, "max_episode_steps": 25}, n_processes, [7],
        ) as batcher:  # fmt: skip
            batcher.reset()
            return [rollout(batcher)[0] for _ in range(3 if autoreset else 1)]

    assert chunks(0) == chunks(1)


def test_environment_streams_do_not_depend_on_how_workers_share_them():
    def frames(n_processes, n_envs):
        with RL_Batcher(
            2, Counting, {}, create_gym, {"env_id": "CartPole-v1", "n_envs": n_envs}, n_processes, 3
        ) as batcher:
            batcher.reset()
            return rollout(batcher)[0].trajectories["observation/frame"][:, 0]

    frames_4 = frames(1, 4)
    assert torch.equal(frames(2, 2), frames_4) and torch.equal(frames(4, 1), frames_4)
    assert len({tuple(row) for row in frames_4.tolist()}) == 4  # R40: no two environments alike


def test_listed_seeds_are_used_as_they_are():  # CV74
    def frames(n_envs, seeds):
        with RL_Batcher(
            2, Counting, {}, create_gym, {"env_id": "CartPole-v1", "n_envs": n_envs}, len(seeds), seeds
        ) as batcher:
            batcher.reset()
            return rollout(batcher)[0].trajectories["observation/frame"]

    assert torch.equal(frames(2, [0, 2]), frames(4, [0]))


def test_streams_that_overlap_are_warned_of_once_by_environment():
    with pytest.warns(UserWarning, match=r"environment 1 of process 0 and environment 0 of process 1") as caught:
        count_batcher_of_seeds([0, 1]).close()
    assert len(caught) == 1 and caught[0].filename == __file__
    count_batcher_of_seeds([0, 2]).close()


def count_batcher_of_seeds(seeds):
    return RL_Batcher(2, Counting, {}, create_gym, {"env_id": "CartPole-v1", "n_envs": 2}, len(seeds), seeds)


def test_the_callers_random_streams_stay_as_they_are():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.random(), torch.rand(1)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    n_threads = torch.get_num_threads()
    noisy_chunks(0, 5)
    assert (random.random(), np.random.random(), torch.rand(1)) == expected
    assert torch.get_num_threads() == n_threads


# --- what leaves is private: CV82, R39 -----------------------------------------------------------


@pytest.mark.parametrize("n_processes", [0, 1])
def test_what_was_handed_out_never_changes_and_shares_nothing(n_processes):
    with count_batcher([[3, 4]], 4, autoreset=True, n_processes=n_processes) as batcher:
        batcher.reset()
        first, _ = rollout(batcher)
        before = first.clone()
        rollout(batcher)
        assert first == before
        tensors = [*first.trajectories.values(), *first.info.values(), first.lengths]
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
        for tensor in first.trajectories.values():
            assert not tensor.is_shared() and tensor.is_contiguous()
            tensor.fill_(1)
        second, _ = rollout(batcher)
        assert second != first
    assert first.trajectories["action/n"].eq(1).all()


class Remembering(RL_Agent):
    """Gives back the observation it got as its state, and records what it then finds there."""

    def initial_state(self, agent_info, B):
        return DictTensor({"last": torch.full((B, 2), -1.0)})

    def __call__(self, state, observation, agent_info, history=None):
        action = torch.zeros(observation.n_elems(), dtype=torch.int64)
        return DictTensor({"action": action, "last": state["last"]}), DictTensor({"last": observation["frame"]})


@pytest.mark.parametrize("n_timesteps", [1, 2, 3])
@pytest.mark.parametrize("lengths", [(99, 99), (3, 99)], ids=["all", "some"])
def test_an_observation_kept_as_state_keeps_its_value_across_chunks(n_timesteps, lengths):
    with RL_Batcher(
        n_timesteps, Remembering, {}, lambda seed: GymEnv([Count(length) for length in lengths], seed), {}, 1, 0
    ) as batcher:
        batcher.reset()
        seen = [counts(rollout(batcher)[0], "action/last")[-1] for _ in range(4)]
    steps = [step for row in seen for _, step in row]
    assert steps == list(range(-1, 4 * n_timesteps - 1))


class Setting(RL_Agent):
    """Puts a key of its own into the observation that it is given, and takes one away."""

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        n = observation.n_elems()
        known = "mine" in observation
        observation.set("mine", torch.zeros(n))
        observation.set("frame", torch.full((n, 2), 7.0))
        return DictTensor({"action": torch.zeros(n, dtype=torch.int64), "known": torch.full((n,), known)}), state


def test_what_an_agent_sets_in_its_observation_is_its_own():
    with RL_Batcher(2, Setting, {}, lambda seed: GymEnvInf([Count(9)], seed), {}, 1, 0) as batcher:
        batcher.reset()
        chunks = [rollout(batcher)[0] for _ in range(3)]
    assert not any(chunk.trajectories["action/known"].any() for chunk in chunks)
    assert [counts(chunk, "observation/frame") for chunk in chunks] == [[[(0, t), (0, t + 1)]] for t in (0, 2, 4)]


# --- the order of calls: CV75, CV79, CV81 --------------------------------------------------------


def test_calls_out_of_order_are_refused_and_change_nothing():
    with count_batcher([[3, 5]], 2) as batcher:
        for call in (batcher.execute, batcher.get, lambda: batcher.get(blocking=False)):
            with pytest.raises(StateError, match="call reset first"):
                call()
        batcher.reset()
        for blocking in (True, False):
            with pytest.raises(StateError, match="call execute first"):
                batcher.get(blocking)
        batcher.execute()
        for call in (batcher.execute, lambda: batcher.update(1.0)):
            with pytest.raises(StateError, match="a rollout is under way, call get or wait first"):
                call()
        trajectories, n = batcher.get()
    assert (trajectories.lengths.tolist(), n) == ([2, 2], 2)


def test_everything_after_close_is_refused_but_close():
    batcher = count_batcher([[3]], 2)
    batcher.close()
    batcher.close()
    for call in (batcher.reset, batcher.execute, batcher.get, batcher.episodes, lambda: batcher.update(0.0)):
        with pytest.raises(ClosedError, match="the batcher is closed"):
            call()


def test_close_with_a_rollout_under_way():
    batcher = count_batcher([[3000], [5]], 2000)
    batcher.reset()
    batcher.execute()
    batcher.close()
    with pytest.raises(ClosedError):
        batcher.get()


def test_polling_gives_nothing_until_all_is_there_and_keeps_the_order():  # CV81
    with count_batcher([[500], [3]], 200, autoreset=True) as batcher:
        batcher.reset()
        starts = []
        for _ in range(5):
            batcher.execute()
            polled = batcher.get(blocking=False)
            while polled == (None, None):
                polled = batcher.get(blocking=False)
            starts.append(int(polled[0].trajectories["observation/frame"][0, 0, 1]))
    assert starts == [0, 200, 400, 100, 300]


# --- sizes and arguments -------------------------------------------------------------------------


def test_numbers_of_elements_and_bytes_are_known_at_once():
    with count_batcher([[3, 3], [3, 3]], 10) as batcher:
        assert batcher.n_elems() == 4
        observation = 2 * 4 + 4 + 4 * 1 + 8  # frame, reward, flags, last_action
        action = 8 + 8 + 4 + 8  # action, n, given, seed
        exact = 4 * (11 * observation + 10 * action + 10 + 8 + 8)
        assert exact <= batcher.nbytes <= exact + 64 * 16


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"n_timesteps": 0}, SpecError, "n_timesteps must be at least 1, got 0"),
        ({"n_timesteps": 1.5}, TypeError, "n_timesteps must be an int, got 1.5"),
        ({"n_processes": -1}, SpecError, "n_processes must be at least 0, got -1"),
        ({"seeds": [1]}, SpecError, r"seeds: needs 2 seeds .* one for each of the processes, got \[1\]"),
        ({"seeds": [1, -2]}, SpecError, "seeds: needs 2 seeds of at least 0"),
        ({"seeds": -1}, SpecError, "seeds: must not be negative, got -1"),
        ({"seeds": [1, 2.5]}, TypeError, r"^seeds: needs an int, or one for each of 2 processes, got \[1, 2.5\]$"),
        ({"seeds": True}, TypeError, "^seeds: needs an int, or one for each of 2 processes, got True$"),
        ({"agent_seeds": [1, 2.5]}, TypeError, r"^agent_seeds: needs one for each of 2 processes, got \[1, 2.5\]$"),
        ({"agent_seeds": [1, 2, 3]}, SpecError, "agent_seeds: needs 2"),
        ({"agent_seeds": [1, -2]}, SpecError, "agent_seeds: needs 2 seeds of at least 0"),
        ({"agent_seeds": 3}, TypeError, "^agent_seeds: needs one for each of 2 processes, got 3$"),
        ({"agent_args": None}, TypeError, "^agent_args must be a mapping of names to values, got NoneType$"),
        ({"agent_info": {"x": 1}}, TypeError, "agent_info must be a DictTensor, got dict"),
        ({"env_info": DictTensor({"x": torch.zeros(0)})}, SpecError, "env_info: example 'x' has shape"),
        ({"start_method": "thread"}, SpecError, "start_method must be one of"),
        ({"start_method": "thread", "n_processes": 0}, SpecError, "start_method must be one of"),
        ({"device": "cuda:99"}, RuntimeError, r"^device: torch \S+ finds \d CUDA devices, got 'cuda:99'$"),
        ({"env_args": {"n_envs": 0}}, SpecError, "needs at least one environment, got none"),
        ({"env_args": {"env_id": "NoSuchEnv-v0"}}, gymnasium.error.NameNotFound, "NoSuchEnv"),
        ({"create_env": lambda env_id, n_envs, seed: object()}, TypeError, r"create_env must return a VecEnv"),
        (
            {"create_env": lambda env_id, n_envs, seed: gymnasium.make(env_id)},
            TypeError,
            r"VecEnv, got .* without n_envs\(\): return GymEnvInf\(\[env, \.\.\.\], seed\)\n",
        ),
        (
            {"create_env": lambda env_id, n_envs, seed: gymnasium.make_vec(env_id, n_envs)},
            TypeError,
            r"VecEnv, got CartPoleVectorEnv without n_envs\(\): return GymVectorEnv\(envs, seed\)\n",
        ),
        (
            {"create_env": lambda env_id, n_envs: None},
            TypeError,
            r"^create_env: is called with env_args and seed=, here with env_id, n_envs, seed: .*argument 'seed'\n",
        ),
        ({"create_env": "CartPole-v1"}, TypeError, "create_env must be a function or a class, .* got str"),
        ({"create_agent": Counting()}, TypeError, "create_agent must be a function or a class, .* got Counting"),
        ({"create_agent": lambda: None}, TypeError, r"must return an RL_Agent, got NoneType without initial_state\(\)"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_bad_arguments_are_refused_by_name(changed, error, message):
    arguments = {
        "n_timesteps": 5, "create_agent": Counting, "agent_args": {}, "create_env": create_gym,
        "n_processes": 2, "seeds": [0, 10], **changed,
        "env_args": {"env_id": "CartPole-v1", "n_envs": 2, **changed.get("env_args", {})},
    }  # fmt: skip
    with pytest.raises(error, match=message):
        RL_Batcher(**arguments)


def test_arguments_of_environments_must_be_named():
    with pytest.raises(TypeError, match="^env_args must be a mapping of names to values, got list$"):
        RL_Batcher(5, Counting, {}, create_gym, ["CartPole-v1", 2], 1, [0])


def test_a_seed_among_the_arguments_gives_way_to_those_of_the_workers():
    def create_env(seed):
        given.append(seed)
        return GymEnv([Count(3)], seed)

    given = []
    RL_Batcher(5, Counting, {}, create_env, {"seed": 0}, 0, [7]).close()
    assert set(given) == {7}


def test_workers_must_have_equally_many_environments():
    with pytest.raises(SpecError, match="worker 1 has 1 environments, worker 0 has 2"):
        count_batcher([[3, 3], [3]], 2)


class OfEachWorker:
    """Two environments whose observations are what a function makes of the worker's seed and the time."""

    def __init__(self, seed, observe):
        self.seed, self.observe, self.time = seed, observe, 0

    def n_envs(self):
        return 2

    def reset(self, env_info):
        self.time = 0
        return DictTensor(self.observe(self.seed, self.time)), torch.arange(2)

    def step(self, action):
        self.time += 1
        observation, running = DictTensor(self.observe(self.seed, self.time)), torch.arange(2)
        return (observation, running), (observation, running)

    def close(self):
        pass


def frames(shape=(2, 3), dtype=torch.float32):
    return {"frame": torch.zeros(shape, dtype=dtype)}


def test_each_worker_may_order_the_keys_of_its_observations_as_it_likes():
    def observe(seed, time):
        found = {"reward": torch.full((2,), 1.0 + time), "mass": torch.full((2,), 100.0 + time)}
        return dict(reversed(found.items())) if seed else found

    agent_args = {"action_space": Count.action_space}
    with RL_Batcher(3, RandomAgent, agent_args, OfEachWorker, {"observe": observe}, 2, [0, 10]) as batcher:
        batcher.reset()
        steps = rollout(batcher)[0].trajectories
    assert steps["observation/reward"].tolist() == [[1, 2, 3]] * 4
    assert steps["_observation/mass"].tolist() == [[101, 102, 103]] * 4


@pytest.mark.parametrize(
    ("first", "second", "error", "message"),
    [
        (frames(), frames((2, 1)), SpecError, r"'frame' has rows of \(1,\) float32, expected \(3,\) float32"),
        (frames(), frames(dtype=torch.float64), SpecError, r"'frame' has rows of \(3,\) float64, expected"),
        (frames(), {**frames(), "mass": torch.zeros(2)}, SpecError, r"unknown key\(s\) \['mass'\]"),
        ({**frames(), "mass": torch.zeros(2)}, frames(), MissingKeyError, r"key\(s\) \['mass'\] are missing"),
    ],
    ids=["shape", "dtype", "more", "fewer"],
)
def test_a_worker_with_other_observations_than_the_first_is_refused(first, second, error, message):
    def observe(seed, time):
        return second if seed else first

    agent_args = {"action_space": Count.action_space}
    with RL_Batcher(3, RandomAgent, agent_args, OfEachWorker, {"observe": observe}, 2, [0, 10]) as batcher:
        batcher.reset()
        with pytest.raises(error, match=f"environment: observation.*{message}"):
            rollout(batcher)


BAD_INFOS = [
    (eps(0.1), SpecError, r"agent_info: 'eps' is \(1,\) torch.float32, expected \(4,\)"),
    (eps(*[0.1] * 5), SpecError, r"agent_info: 'eps' is \(5,\)"),
    (DictTensor({"other": torch.zeros(4)}), MissingKeyError, r"agent_info: key\(s\) \['eps'\] are missing"),
    (eps(0.0, 0.0, 0.0, 0.0) + DictTensor({"more": torch.zeros(4)}), SpecError, r"unknown key\(s\) \['more'\]"),
    (DictTensor({"eps": torch.zeros(4, dtype=torch.float64)}), SpecError, "is .* torch.float64, expected"),
    (DictTensor({"eps": torch.zeros(4, 1)}), SpecError, r"\(4, 1\)"),
    (DictTensor({"eps": torch.zeros(4, device="meta")}), SpecError, "is on meta, expected the CPU"),
    ({"eps": torch.zeros(4)}, TypeError, "agent_info must be a DictTensor, got dict"),
]


@pytest.mark.parametrize("call", ["reset", "execute"])
def test_a_wrong_info_is_refused_and_the_batcher_stays_usable(call):  # CV84
    good = eps(0.1, 0.2, 0.3, 0.4)
    with count_batcher([[9, 9], [9, 9]], 2, agent_info=eps(0.0)) as batcher:
        batcher.reset(agent_info=good)
        for info, error, message in BAD_INFOS:
            with pytest.raises(error, match=message):
                getattr(batcher, call)(agent_info=info)
        with pytest.raises(MissingKeyError, match="eps"):
            batcher.reset()
        with pytest.raises(SpecError, match="env_info: unknown key"):
            batcher.reset(agent_info=good, env_info=lengths(1, 2, 3, 4))
        trajectories, _ = rollout(batcher)
    assert column(trajectories, "agent_info/eps") == approx([0.1, 0.2, 0.3, 0.4])


class Faulty(RL_Agent):
    """Puts out something else from its `since`th call on."""

    def __init__(self, since, **wrong):
        self.since, self.wrong, self.calls = since, wrong, 0

    def initial_state(self, agent_info, B):
        return DictTensor({"n": torch.zeros(B)})

    def __call__(self, state, observation, agent_info, history=None):
        self.calls += 1
        output = {"action": torch.zeros(2, dtype=torch.int64), "value": torch.zeros(2)}
        if self.calls > self.since:
            output |= self.wrong
        return DictTensor({key: value for key, value in output.items() if value is not None}), state


@pytest.mark.parametrize("since", [0, 2])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"action": None, "actoin": torch.zeros(2, dtype=torch.int64)}, "no 'action' in its output"),
        ({"action": torch.zeros(3, dtype=torch.int64), "value": None}, r"'action'.*\(3,\)"),
        ({"action": torch.zeros(2)}, "'action' is .*float32, expected"),
        ({"action": torch.zeros(2, 1, dtype=torch.int64)}, r"'action'.*\(2, 1\)"),
    ],
    ids=["key", "batch", "dtype", "shape"],
)
def test_a_wrong_action_is_refused_with_what_was_needed(since, wrong, message):
    with pytest.raises(SpecError, match=message):
        run_faulty(since, wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"value": None}, "no 'value' in its output any more"),
        ({"value": torch.zeros(2, dtype=torch.int64)}, r"'value' is \(2,\) int64, expected \(2,\) float32"),
        ({"extra": torch.zeros(2)}, r"output \['extra'\] was not in its first step"),
    ],
    ids=["dropped", "dtype", "added"],
)
def test_an_output_that_changes_later_is_refused(wrong, message):
    with pytest.raises(SpecError, match=message):
        run_faulty(3, wrong)


def run_faulty(since, wrong):
    with RL_Batcher(
        6, Faulty, {"since": since, **wrong}, create_gym, {"env_id": "CartPole-v1", "n_envs": 2}, 1, 0
    ) as batcher:
        batcher.reset()
        rollout(batcher)


# --- factories -----------------------------------------------------------------------------------


def test_factories_may_be_lambdas_and_closures():
    length = 4
    with RL_Batcher(6, lambda: Counting(), {}, lambda seed: GymEnvInf([Count(length)], seed), {}, 2, 0) as batcher:
        batcher.reset()
        assert bits(rollout(batcher)[0], "_observation/done") == ["FFFTFF"] * 2


@pytest.mark.parametrize("n_processes", [0, 1])
def test_what_cannot_be_pickled_is_named(n_processes):
    import threading

    with pytest.raises(TypeError, match=r"env_args\['lock'\] cannot be sent to a worker: .*lock"):
        RL_Batcher(2, Counting, {}, lambda lock, seed: None, {"lock": threading.Lock()}, n_processes, 0)
    if n_processes:
        lock = threading.Lock()
        with pytest.raises(TypeError, match="create_agent cannot be sent to a worker: .*lock"):
            RL_Batcher(2, lambda: lock, {}, create_gym, {"env_id": "CartPole-v1", "n_envs": 1}, 1, 0)


def test_environment_ids_that_the_program_registered_are_known_to_workers(start_method):
    gymnasium.register("TestCount-v0", entry_point=lambda: Count(3))
    try:
        with RL_Batcher(
            4, Counting, {}, create_gym, {"env_id": "TestCount-v0", "n_envs": 1, "disable_env_checker": True}, 1, 0,
            start_method=start_method,
        ) as batcher:  # fmt: skip
            batcher.reset()
            assert bits(rollout(batcher)[0], "_observation/done") == ["FFTF"]
    finally:
        del gymnasium.registry["TestCount-v0"]


@pytest.mark.parametrize("env_id", ["TestShort-v0", "CartPole-v1"])
def test_a_registration_of_an_environment_of_gymnasium_is_known_to_workers(env_id, start_method, monkeypatch):
    cart_pole = gymnasium.spec("CartPole-v1").entry_point
    monkeypatch.setitem(gymnasium.registry, env_id, gymnasium.registry["CartPole-v1"])  # and as it was afterwards
    del gymnasium.registry[env_id]
    gymnasium.register(env_id, entry_point=cart_pole, max_episode_steps=2)
    arguments = {"env_id": env_id, "n_envs": 1}
    with RL_Batcher(4, Counting, {}, create_gym, arguments, 1, 0, start_method=start_method) as batcher:
        batcher.reset()
        assert bits(rollout(batcher)[0], "_observation/truncated") == ["FTFT"]


class History(RL_Agent):
    """Records how many steps of history it is given."""

    def require_history(self):
        return True

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        assert isinstance(history, TemporalDictTensor)
        B = observation.n_elems()
        return DictTensor({"action": torch.zeros(B, dtype=torch.int64), "seen": history.lengths.clone()}), state


def test_history_is_the_steps_of_this_rollout():
    with RL_Batcher(3, History, {}, create_gym, {"env_id": "CartPole-v1", "n_envs": 2}, 1, 0) as batcher:
        batcher.reset()
        for _ in range(2):
            assert rollout(batcher)[0].trajectories["action/seen"].tolist() == [[0, 1, 2]] * 2


# --- episodes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_timesteps", [1, 3, 7, 50])
def test_episodes_are_the_same_however_they_are_cut(n_timesteps):
    with count_batcher([[2, 20], [5, 7]], n_timesteps, autoreset=True) as batcher:
        batcher.reset()
        total = []
        while (n_timesteps * len(total)) < 100:
            rollout(batcher)
            total.append(batcher.episodes())
        episodes = DictTensor.cat(total)
    for env, length in enumerate([2, 20, 5, 7]):
        mine = episodes.index(episodes["env_index"] == env)
        steps = n_timesteps * len(total)
        assert mine["length"].tolist() == [length] * (steps // length)
        assert set(mine["return"].tolist()) == {length * (length + 1) / 2}
    assert episodes["terminated"].all() and not episodes["truncated"].any()


class Nested(gymnasium.Env):
    """Observations and actions in dicts and tuples; every array is returned again and again."""

    observation_space = gymnasium.spaces.Dict(
        camera=gymnasium.spaces.Dict(left=gymnasium.spaces.Box(0, 255, (2, 2), np.uint8)),
        pair=gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(9), gymnasium.spaces.Box(-9, 9, ())]),
    )
    action_space = gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(3), gymnasium.spaces.Box(-1, 1, (2,))])

    def __init__(self):
        self.left, self.steps = np.zeros((2, 2), np.uint8), 0

    def _observation(self):
        self.left[...] = self.steps
        return {"camera": {"left": self.left}, "pair": (self.steps, np.float32(-self.steps))}

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return self._observation(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.steps += 1
        return self._observation(), 1.0, False, self.steps == 4, {}


def test_nested_observations_and_actions_pass_through_shared_memory():  # R35, R1
    with RL_Batcher(
        6, RandomAgent, {"action_space": Nested.action_space},
        lambda seed: GymEnvInf([Nested() for _ in range(2)], seed), {}, 2, 0,
    ) as batcher:  # fmt: skip
        batcher.reset()
        steps = rollout(batcher)[0].trajectories
    assert steps["observation/camera/left"].dtype == torch.uint8
    assert steps["observation/camera/left"][:, :, 0, 0].tolist() == [[0, 1, 2, 3, 0, 1]] * 4
    assert steps["_observation/camera/left"][:, :, 1, 1].tolist() == [[1, 2, 3, 4, 1, 2]] * 4
    assert steps["_observation/pair/0"].tolist() == [[[1], [2], [3], [4], [1], [2]]] * 4
    assert steps["observation/pair/1"].tolist() == [[0, -1, -2, -3, 0, -1]] * 4
    for key in ("action/0", "action/1"):
        assert torch.equal(steps[f"_observation/last_{key}"], steps[f"action/{key}"])


def test_a_reset_right_after_an_episode_ended_starts_one_episode():  # R46
    with count_batcher([[3]], 3, autoreset=True) as batcher:
        batcher.reset()
        rollout(batcher)
        batcher.reset()
        trajectories, _ = rollout(batcher)
    assert counts(trajectories, "observation/frame") == [[(2, 0), (2, 1), (2, 2)]]
    assert bits(trajectories, "observation/initial_state") == ["TFF"]


def test_reset_drops_the_episodes_that_had_not_ended():
    with count_batcher([[5]], 3, autoreset=True) as batcher:
        batcher.reset()
        rollout(batcher)
        batcher.reset()
        rollout(batcher), rollout(batcher)
        episodes = batcher.episodes()
    assert (episodes["length"].tolist(), episodes["return"].tolist()) == ([5], [15.0])


# --- real environments ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env_id", "frame", "dtype"),
    [
        ("CartPole-v1", (4,), torch.float32),
        ("Pendulum-v1", (3,), torch.float32),
        ("HalfCheetah-v5", (17,), torch.float32),
        ("ale_py:ALE/Pong-v5", (210, 160, 3), torch.uint8),
    ],
)
def test_real_environments(env_id, frame, dtype):
    with RL_Batcher(
        12, lambda: RandomAgent(gymnasium.make(env_id).action_space), {}, create_gym,
        {"env_id": env_id, "n_envs": 2, "max_episode_steps": 5}, 2, 0,
    ) as batcher:  # fmt: skip
        batcher.reset()
        trajectories, n = rollout(batcher)
    steps = trajectories.trajectories
    assert (n, tuple(steps["observation/frame"].shape), steps["observation/frame"].dtype) == (4, (4, 12, *frame), dtype)
    ended = steps["_observation/truncated"] | steps["_observation/terminated"]
    assert torch.equal(ended, steps["_observation/done"]) and ended.any()
    going = ~ended[:, :-1]
    assert torch.equal(steps["observation/frame"][:, 1:][going], steps["_observation/frame"][:, :-1][going])
    assert torch.equal(steps["observation/initial_state"][:, 1:], ended[:, :-1])


@pytest.mark.parametrize("where", ["output", "state", "agent_info"])
def test_a_dtype_that_cannot_be_recorded_is_named(where):
    value = torch.zeros(1).to(torch.float8_e4m3fn)

    class Odd(Counting):
        def initial_state(self, agent_info, B):
            state = super().initial_state(agent_info, B)
            return state + DictTensor({"odd": value.expand(B)}) if where == "state" else state

        def __call__(self, state, *arguments, **named):
            output, following = super().__call__(state, *arguments, **named)
            odd = DictTensor({"odd": value.expand(len(state["n"]))})
            return (output + odd if where == "output" else output), (following + odd if where == "state" else following)

    info = {"agent_info": DictTensor({"odd": value})} if where == "agent_info" else {}
    words = f"{where.split('_')[0]}.*'odd' is torch.float8_e4m3fn, which cannot be recorded"
    with pytest.raises(SpecError, match=words):
        RL_Batcher(5, Odd, {}, lambda seed: GymEnvInf([Count(3)], seed), {}, n_processes=0, seeds=[0], **info)


class Wearing(RL_Agent):
    """Wears out what it is given: counts calls in a list, and leaves it empty when it is closed."""

    def __init__(self, calls):
        self.calls = calls

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        self.calls.append(0)
        n = observation.n_elems()
        called = torch.full((n,), len(self.calls))
        return DictTensor({"action": torch.zeros(n, dtype=torch.int64), "called": called}), state

    def close(self):
        self.calls.clear()


class Drawing(VecEnv):
    """An environment without `example`; shows numbers of a generator that it was given."""

    def __init__(self, generator):
        self.generator = generator

    def n_envs(self):
        return 1

    def _shown(self):
        value = torch.tensor([self.generator.random()], dtype=torch.float64)
        return DictTensor({"frame": value}), torch.arange(1)

    def reset(self, env_info=None):
        return self._shown()

    def step(self, action):
        return self._shown(), self._shown()

    def close(self):
        pass


@pytest.mark.parametrize("n_processes", [0, 2])
def test_finding_the_specs_leaves_the_arguments_of_agents_and_environments_as_they_are(n_processes):
    def create_env(generator, seed):
        return Drawing(generator)

    generator = np.random.default_rng(0)
    with RL_Batcher(1, Wearing, {"calls": [7]}, create_env, {"generator": generator}, n_processes, 0) as batcher:
        batcher.reset()
        trajectories, _ = rollout(batcher)
    n = max(1, n_processes)
    assert trajectories.trajectories["action/called"].tolist() == [[2]] * n
    first = np.random.default_rng(0).random()
    assert trajectories.trajectories["observation/frame"].tolist() == [[first]] * n


class Growing(Counting):
    """Fills one of two empty tensors that an update brings."""

    def update(self, info):
        info["low"].resize_(1).fill_(-1.0)
        self.given = float(info["high"].numel())


def test_empty_tensors_of_an_update_are_apart():
    def create_env(seed):
        return GymEnvInf([Count(9)], seed)

    with RL_Batcher(1, Growing, {}, create_env, {}, 1, 0) as batcher:
        batcher.update({"low": torch.empty(0), "high": torch.empty(0)})
        batcher.reset()
        assert rollout(batcher)[0].trajectories["action/given"].tolist() == [[0.0]]


@pytest.mark.parametrize("n_processes", [0, 1])
@pytest.mark.parametrize("end", ["", "raise SystemExit(3)"])
def test_a_program_that_closes_nothing_ends_in_silence(n_processes, end, subprocess_env):
    program = f"""
import gymnasium
from rlstructs import GymEnvInf, RandomAgent, RL_Batcher

create_env = lambda seed: GymEnvInf([gymnasium.make("CartPole-v1")], seed)
create_agent = lambda: RandomAgent(gymnasium.spaces.Discrete(2))
batcher = RL_Batcher(4, create_agent, {{}}, create_env, {{}}, {n_processes}, 0)
batcher.reset()
batcher.execute()
print(batcher.get()[1])
{end}
"""
    done = subprocess.run([sys.executable, "-c", program], env=subprocess_env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3 if end else 0, "1\n", "")
