"""`RayReplay` over a real Ray cluster: the rows of one memory, in shards; several trainers; files; failures."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import zlib

import cloudpickle
import numpy as np
import pytest
import torch
from clusters import ray_cluster
from processes import LIMIT, wait_until, wait_until_gone

from rlstructs import (
    ClosedError,
    DictTensor,
    FileError,
    MissingKeyError,
    RayReplay,
    SpecError,
    StateError,
    TemporalDictTensor,
    Trajectories,
    WorkerCrashed,
    WorkerError,
)
from rlstructs.distributed import replay_files
from rlstructs.files.layout import replace_file
from rlstructs.replay import Compression

pytest.importorskip("ray", reason="ray is not installed: pip install ray")

N_ENVS, T, EPISODE = 5, 12, 7
NAMES = {"obs": "observation/frame", "rewards": "_observation/reward", "next_obs": "_observation/frame",
         "terminated": "_observation/terminated"}  # fmt: skip


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster(2) as made:
        yield made


@pytest.fixture(scope="module")
def memories(cluster):
    """Memories that tests share, each with a folder that it was saved to without rows, by their arguments."""
    found = {}
    yield found
    for memory, _ in found.values():
        memory.close()


@pytest.fixture
def lend(memories, tmp_path_factory):
    """`with lend(...) as memory` gives one as `replay` makes it: its two processes take seconds to start."""

    @contextlib.contextmanager
    def lend(**arguments):
        settings = tuple(arguments.items())
        if settings not in memories:
            memories[settings] = replay(**arguments), tmp_path_factory.mktemp("empty")
            memories[settings][0].save(memories[settings][1])
        memory, folder = memories[settings]
        memory.load(folder)
        yield memory

    return lend


def rollout(start=0, environments=range(N_ENVS), n_timesteps=T, lengths=None):
    """Steps `start` to `start + n_timesteps - 1` of environments whose episodes take 7 steps: frame 1000 e + t."""
    environments = torch.tensor(list(environments), dtype=torch.int64)
    times = torch.arange(start, start + n_timesteps).expand(len(environments), -1)
    frames = (1000 * environments[:, None] + times).float()
    ends = (times + 1) % EPISODE == 0
    steps = {
        "observation/frame": frames[..., None],
        "observation/initial_state": times % EPISODE == 0,
        "_observation/frame": frames[..., None] + 1,
        "_observation/reward": times.double(),
        "_observation/terminated": ends,
        "_observation/truncated": torch.zeros_like(ends),
        "_observation/done": ends,
        "action/action": times,
    }
    lengths = torch.full((len(environments),), n_timesteps) if lengths is None else torch.tensor(lengths)
    return Trajectories(DictTensor({"env_index": environments}), TemporalDictTensor(steps, lengths))


def replay(**arguments):
    return RayReplay(**{"memory_size": 20, "num_envs": N_ENVS, "n_shards": 2, "names": NAMES, "seed": 0, **arguments})


def frames_of(batch):
    return batch["obs"][..., 0].long()


def test_rows_of_all_shards_are_drawn_alike(lend):
    with lend() as memory:
        memory.extend(rollout())
        memory.extend(rollout(T, range(3), lengths=[12, 5, 0]))  # of the oldest rows some are overwritten
        batch = memory.sample(4 * 73)
        kept = {1000 * e + t for e in range(N_ENVS) for t in range(T)} | {12 + t for t in range(12)}
        kept = (kept | {1012 + t for t in range(5)}) - set(range(4))
        assert len(memory) == len(kept) == 73
        assert set(frames_of(batch).tolist()) <= kept
        # One for each n-th of all rows: of shard 0, environments 0, 2 and 4, nearly exactly its share.
        in_first = (frames_of(batch) // 1000 % 2 == 0).sum().item()
        assert abs(in_first - 4 * 44) <= 1
        assert (batch["weight"] == 1).all() and batch["mask"].all()
        assert batch["obs"].dtype is torch.float32 and batch["rewards"].dtype is torch.float64
        assert (batch["next_obs"] == batch["obs"] + 1).all()
        assert {name: tuple(batch[name].shape) for name in ("obs", "rewards", "index", "weight", "discount")} == {
            "obs": (292, 1), "rewards": (292, 1), "index": (292,), "weight": (292,), "discount": (292,)
        }  # fmt: skip
        # An index means a row, and a row has one index.
        assert len({(i, f) for i, f in zip(batch["index"].tolist(), frames_of(batch).tolist(), strict=True)}) == len(
            set(batch["index"].tolist())
        )
        batch["obs"][:] = 0  # private memory
        assert (memory.sample(8, ["obs"])["obs"] != 0).any()


def test_nested_actions_and_observations_are_tensors_of_their_own(cluster):
    steps = dict(rollout().trajectories.items())
    frames, times = steps.pop("observation/frame"), steps.pop("action/action")
    steps |= {"observation/image": frames, "observation/speed/x": -frames, "_observation/image": frames + 1,
              "_observation/speed/x": -frames - 1, "action/action/left": times, "action/action/right/0": -times,
              "action/value": frames}  # fmt: skip
    del steps["_observation/frame"]
    batch = Trajectories(DictTensor({"env_index": torch.arange(N_ENVS)}),
                         TemporalDictTensor(steps, torch.full((N_ENVS,), T)))  # fmt: skip
    names = ["observations/image", "observations/speed/x", "next_observations/image", "next_observations/speed/x",
             "actions/left", "actions/right/0", "rewards", "terminated", "truncated"]  # fmt: skip
    with replay(names=None) as memory:
        for _ in range(2):
            memory.extend(batch)
        found = memory.sample(16)
        assert [name for name in found if "/" in name or name in names] == names
        left, image = found["actions/left"].reshape(-1), found["observations/image"][..., 0]
        assert (left == -found["actions/right/0"].reshape(-1)).all() and (left == image.long() % 1000).all()
        assert (found["next_observations/speed/x"] == -found["observations/image"] - 1).all()
        assert next(iter(memory.sample(4, ["actions/left"]))) == "actions/left"
        with pytest.raises(MissingKeyError, match=r"^sample: no tensor\(s\) \['actions'\], there are \['actions/left'"):
            memory.sample(4, ["actions"])


@pytest.mark.parametrize("compression", ["zstd", Compression({"obs": "zstd:1"}, max_bytes=5 * 20 * 4000)], ids=str)
def test_a_compressed_one_draws_the_rows_of_a_raw_one(cluster, compression):
    batches = []
    for each in (None, compression):
        with replay(compression=each, alpha=0.6) as memory:
            for start in (0, T):
                steps = dict(rollout(start).trajectories.items())
                frames = steps["observation/frame"].byte().expand(-1, -1, 1000).clone()
                steps |= {"observation/frame": frames, "_observation/frame": frames + 1}
                lengths = torch.full((N_ENVS,), T)
                memory.extend(Trajectories(rollout().info, TemporalDictTensor(steps, lengths)))
            batches.append((memory.sample(64), memory.stats()))
    (raw, raw_stats), (packed, stats) = batches
    assert stats["rows"] == raw_stats["rows"] > 0
    assert all(torch.equal(raw[name], packed[name]) for name in raw)


def test_priorities_count_over_all_shards(cluster):
    with replay(alpha=0.5, beta=1.0) as memory:
        memory.extend(rollout())
        everything = memory.sample(2000, ["obs"])
        assert (everything["weight"] == 1).all()
        of_index = dict(zip(everything["index"].tolist(), frames_of(everything).tolist(), strict=True))
        assert len(of_index) == N_ENVS * T
        index = torch.tensor(list(of_index))
        priorities = torch.tensor([1.0 + (frame % 1000) + 4 * (frame // 1000) for frame in of_index.values()]).double()
        memory.update_priorities(index, priorities)
        n, batch = 60_000, memory.sample(60_000, ["obs"])
        mass = priorities.sqrt()
        counts = torch.tensor([(batch["index"] == i).sum() for i in index]).double()
        assert torch.allclose(counts / n, mass / mass.sum(), atol=0.002)
        weights = dict(zip(batch["index"].tolist(), batch["weight"].tolist(), strict=True))
        assert [weights[i] for i in index.tolist()] == pytest.approx((mass.min() / mass).tolist(), rel=1e-5)
        memory.beta = 0.0
        assert (memory.sample(10)["weight"] == 1).all()


def test_a_new_row_has_the_largest_priority_that_any_shard_was_given(lend):
    with lend(alpha=1.0, beta=1.0) as memory:
        memory.extend(rollout(environments=[0, 1], n_timesteps=4))
        batch = memory.sample(100, ["obs"])
        in_first = batch["index"][frames_of(batch) < 1000][:1]
        memory.update_priorities(in_first, torch.tensor([50.0]))
        memory.extend(rollout(4, [1], n_timesteps=1))  # of the other shard
        batch = memory.sample(2000, ["obs"])
        share = (frames_of(batch) == 1004).double().mean().item()
        assert share == pytest.approx(50 / 107, abs=0.01)
        with pytest.raises(SpecError, match="at most"):
            memory.update_priorities(batch["index"][:2], torch.tensor([1.0, 1e299], dtype=torch.float64))


def test_n_steps_and_sequences_go_on_from_one_rollout_to_the_next(lend):
    with lend() as memory:
        memory.extend(rollout(n_timesteps=5))
        memory.extend(rollout(5, n_timesteps=9))
        batch = memory.sample(500, n_step=3, gamma=0.5)
        for frame, reward, discount, end, after in zip(
            frames_of(batch).tolist(), batch["rewards"][:, 0].tolist(), batch["discount"].tolist(),
            batch["terminated"][:, 0].tolist(), batch["next_obs"][:, 0].tolist(), strict=True,
        ):  # fmt: skip
            t = frame % 1000
            steps = range(t, min(t + 3, (t // EPISODE + 1) * EPISODE, 14))
            assert reward == sum(s * 0.5 ** (s - t) for s in steps)
            assert discount == 0.5 ** len(steps) and after == frame + len(steps)
            assert end == ((steps[-1] + 1) % EPISODE == 0)
        batch = memory.sample(200, ["obs"], sequence_length=4, episode_ends="mask")
        assert batch["obs"].shape == (200, 4, 1) and batch["index"].shape == batch["is_first"].shape == (200, 4)
        assert batch["weight"].shape == (200,)
        times = frames_of(batch) % 1000
        begins = times[:, :1]
        inside = torch.arange(4) < torch.minimum(EPISODE - begins % EPISODE, 14 - begins)
        assert (batch["mask"] == inside).all()
        assert (times == begins + torch.arange(4))[inside].all()
        assert (batch["is_first"][inside] == (times % EPISODE == 0)[inside]).all()


@pytest.mark.parametrize(("ends", "shares"), [("cross", (15, 7)), ("never", (10, 4))])
def test_sequences_of_all_shards_are_drawn_alike(lend, ends, shares):
    with lend() as memory:
        memory.extend(rollout(lengths=[12, 3, 9, 3, 3]))
        first = memory.sample(60, ["obs"], sequence_length=4, episode_ends=ends)
        assert set((frames_of(first)[:, 0] // 1000).tolist()) == {0, 2}  # in shard 1 there is none
        memory.extend(rollout(T, [1], n_timesteps=7))
        n = 5 * sum(shares)
        for _ in range(3):
            batch = memory.sample(n, ["obs"], sequence_length=4, episode_ends=ends)
            n_first = (frames_of(batch)[:, 0] // 1000 % 2 == 0).sum().item()
            assert abs(n_first - 5 * shares[0]) <= 1
        with pytest.raises(SpecError, match="nothing to sample: there are no windows of 18 rows"):
            memory.sample(4, sequence_length=18)


def test_a_copy_made_before_the_first_rows_knows_of_what_type_they_are(lend):
    import ray

    @ray.remote(num_cpus=0)
    def extend(memory):
        trajectories = rollout(T)
        rewards = torch.ones(N_ENVS, T, dtype=torch.float64)
        rewards[1] = 1e300  # for one shard too much, for the other not
        trajectories.trajectories.set("_observation/reward", rewards)
        with pytest.raises(SpecError, match="rewards"):
            memory.extend(trajectories)
        return len(memory)

    with lend() as memory:
        copy = cloudpickle.loads(cloudpickle.dumps(memory))
        trajectories = rollout()
        steps = trajectories.trajectories
        steps.set("_observation/reward", steps["_observation/reward"].float())
        memory.extend(trajectories)
        assert ray.get(extend.remote(copy)) == N_ENVS * T


def test_several_trainers_write_and_draw_at_once(cluster):
    import ray

    @ray.remote(num_cpus=0)
    def train(memory, environment):
        torch.set_num_threads(1)
        for start in range(0, 60, T):
            memory.extend(rollout(start, [environment]))
            batch = memory.sample(16)
            assert (batch["next_obs"] == batch["obs"] + 1).all()
            memory.update_priorities(batch["index"], batch["rewards"][:, 0] + 1)
        memory.close()  # its own way to the rows only
        return memory is not None and len(set(batch["index"].tolist()))

    with replay(alpha=0.6, memory_size=60) as memory:
        assert all(n > 1 for n in ray.get([train.remote(memory, e) for e in range(N_ENVS)], timeout=LIMIT))
        assert len(memory) == N_ENVS * 60
        drawn = memory.sample(3000, ["obs"])
        assert {frame // 1000 for frame in frames_of(drawn).tolist()} == set(range(N_ENVS))
        assert len(set(drawn["weight"].tolist())) > 3


def test_a_trainer_that_only_draws_sees_what_others_add_and_take_away(cluster):
    import ray

    @ray.remote(num_cpus=0)
    class Trainer:
        def __init__(self, memory):
            self.memory = memory

        def drawn(self, n_times=1):
            return {frame // 1000 for _ in range(n_times) for frame in frames_of(self.memory.sample(60)).tolist()}

    with replay(alpha=1.0) as memory:
        memory.extend(rollout(environments=[0]))
        trainer = Trainer.remote(memory)
        assert ray.get(trainer.drawn.remote()) == {0}
        memory.extend(rollout(environments=[1]))  # in the other shard
        wait_until(lambda: ray.get(trainer.drawn.remote()) == {0, 1})
        batch = memory.sample(500)
        index = torch.unique(batch["index"][frames_of(batch) >= 1000])
        memory.update_priorities(index, torch.zeros(len(index)))
        assert ray.get(trainer.drawn.remote(3)) == {0}


def test_a_request_that_does_not_arrive_costs_no_rows(lend):
    import ray

    failures = {"num_failures": 1, "req_failure_prob": 100, "resp_failure_prob": 0, "in_flight_failure_prob": 0}
    chaos = {"RAY_testing_rpc_failure": json.dumps({"CoreWorkerService.grpc_client.PushTask": failures})}

    @ray.remote(num_cpus=0, runtime_env={"env_vars": chaos})
    def train(memory):
        # The first request of all is lost: which shard it goes to, is Ray's to say.
        lost = r"^the reply of shard [01] \(.*\) to 'sample' is lost: .* is unavailable"
        with pytest.raises(WorkerError, match=lost):
            memory.sample(20)
        return len(set(frames_of(memory.sample(20)).tolist()))

    with lend() as memory:
        memory.extend(rollout())
        assert ray.get(train.remote(memory), timeout=LIMIT) > 1
        assert len(memory) == N_ENVS * T


FULL = """
    import os, sys
    os.environ["RAY_local_fs_capacity_threshold"] = "0.0"  # Ray would go on with files in place of memory
    import torch
    from clusters import ray_cluster
    from rlstructs import DictTensor, OutOfMemoryError, RayReplay, TemporalDictTensor, Trajectories

    frames = torch.arange(8.0)[:, None].expand(8, 2**18)[None]
    steps = TemporalDictTensor({"frame": frames}, torch.tensor([8]))
    with ray_cluster(1), RayReplay(200, 1, 1, names={"obs": "frame"}, seed=0) as memory:
        for _ in range(20):
            memory.extend(Trajectories(DictTensor({"env_index": torch.tensor([0])}), steps))
        try:
            memory.save(sys.argv[1])
        except OutOfMemoryError as error:
            print(error)
        print(len(memory), len(memory.sample(8)["obs"]), os.listdir(sys.argv[1]))
"""


def test_a_shard_that_is_larger_than_the_object_store_outlives_a_save(subprocess_env, tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(FULL), str(tmp_path / "kept")]
    done = subprocess.run(command, env=subprocess_env, capture_output=True, text=True, timeout=LIMIT)
    assert re.search(r"the reply of shard 0 \(.*\) to 'save' is lost: its machine's object store is full", done.stdout)
    assert done.stdout.splitlines()[-1] == "160 8 []"


def test_what_is_saved_is_gone_on_with(lend, tmp_path):
    with lend(alpha=0.6) as memory:
        memory.extend(rollout())
        batch = memory.sample(30)
        memory.update_priorities(batch["index"], batch["rewards"][:, 0] + 1)
        memory.save(tmp_path / "kept")
        before = sorted(path.name for path in (tmp_path / "kept").iterdir())
        batches = [memory.sample(20) for _ in range(3)]
        memory.extend(rollout(T))
        memory.load(tmp_path / "kept")
        assert len(memory) == N_ENVS * T
        for batch in batches:
            again = memory.sample(20)
            assert all(torch.equal(batch[key], again[key]) for key in batch.keys())  # noqa: SIM118
        memory.save(tmp_path / "kept")
        after = sorted(path.name for path in (tmp_path / "kept").iterdir())
        assert len(after) == len(before) == 3 and after != before
        others = {"shard-mine.npz", "shard-0-01234567.npz"}  # which nothing names
        for name in others:
            (tmp_path / "kept" / name).touch()
        memory.save(tmp_path / "kept")
        left = {path.name for path in (tmp_path / "kept").iterdir()}
        assert len(left) == 5 and others < left and left & set(after) == {"replay.json"}
        with replay(alpha=0.6, n_shards=1) as other, pytest.raises(FileError, match=r"differs in \{'n_shards': 1\}"):
            other.load(tmp_path / "kept")
        with replay(alpha=0.6, seed=9) as other:
            other.load(tmp_path / "kept")
            mine, its = memory.sample(20), other.sample(20)
            assert all(torch.equal(mine[key], its[key]) for key in mine.keys())  # noqa: SIM118


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_is_named_is_there_whenever_a_save_is_interrupted(tmp_path, monkeypatch, when):
    def write(number, shards):
        replay_files.write(tmp_path, {"number": number}, np.random.default_rng(number).bit_generator.state, shards)

    def parts(number):
        yield np.full(3, number, np.uint8)
        if when == "before" and number == 2:
            raise KeyboardInterrupt
        yield np.full(4, number, np.uint8)

    @contextlib.contextmanager
    def interrupted(path):
        with replace_file(path) as new:
            yield new
        raise KeyboardInterrupt

    write(1, parts(1))
    if when == "after":
        monkeypatch.setattr("rlstructs.distributed.replay_files.replace_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(2, parts(2))
    number = 1 if when == "before" else 2
    _, files = replay_files.read(tmp_path, {"number": number}, 2)
    assert [file.read_bytes() for file in files] == [bytes([number]) * 3, bytes([number]) * 4]
    assert len(list(tmp_path.iterdir())) == 3


def write_header(folder, header):
    text = json.dumps(header)
    whole = {"checksum": zlib.crc32(text.encode()), "header": text}
    (folder / "replay.json").write_text(json.dumps(whole))


@pytest.mark.parametrize("damage", ["cut", "flip", "header", "sum", "other", "outside"])
def test_a_damaged_folder_changes_nothing(lend, tmp_path, damage):
    with lend(alpha=0.6) as memory:
        memory.extend(rollout())
        memory.save(tmp_path)
        header = json.loads(json.loads((tmp_path / "replay.json").read_text())["header"])
        last = tmp_path / header["shards"][-1]
        data = bytearray(last.read_bytes())
        if damage == "cut":
            last.write_bytes(data[: len(data) // 2])
        elif damage == "flip":
            data[data.index(np.float32(1003).tobytes())] ^= 0xFF  # not in the gaps between what is kept
            last.write_bytes(data)
        elif damage == "header":
            (tmp_path / "replay.json").write_text("{")
        elif damage == "sum":
            text = (tmp_path / "replay.json").read_text()
            (tmp_path / "replay.json").write_text(text.replace("terminated", "determined"))
        elif damage == "other":
            write_header(tmp_path, {**header, "memory": {**header["memory"], "num_envs": 4}})
        else:
            write_header(tmp_path, {**header, "shards": ["../a", "../b"]})
        memory.extend(rollout(T, n_timesteps=3))
        with pytest.raises(FileError, match=r"replay.json|shard-\d"):
            memory.load(tmp_path)
        assert len(memory) == N_ENVS * 15
        assert (frames_of(memory.sample(500)) % 1000).max() == 14


def test_what_does_not_fit_is_said_and_nothing_is_kept(cluster):
    with replay(alpha=0.6) as memory:
        with pytest.raises(SpecError, match="no rows"):
            memory.sample(4)
        memory.extend(rollout(environments=[0]))
        wrong = rollout()
        for trajectories, error, message in (
            (wrong.trajectories, TypeError, "needs Trajectories"),
            (rollout(environments=[0, 5]), SpecError, r"env_index 5 is not in \[0, 5\)"),
            (Trajectories(DictTensor(), wrong.trajectories), MissingKeyError, "env_index"),
        ):
            with pytest.raises(error, match=message):
                memory.extend(trajectories)
        steps = {**dict(wrong.trajectories.items()), "observation/frame": torch.zeros(N_ENVS, T, 2)}
        with pytest.raises(SpecError, match="obs"):
            memory.extend(Trajectories(wrong.info, TemporalDictTensor(steps, wrong.trajectories.lengths)))
        del steps["observation/frame"]
        with pytest.raises(MissingKeyError, match="observation/frame"):
            memory.extend(Trajectories(wrong.info, TemporalDictTensor(steps, wrong.trajectories.lengths)))
        values = {**dict(wrong.trajectories.items()), "observation/frame": torch.ones(N_ENVS, T, 1).double()}
        values["observation/frame"][1, -1] = 1e300  # of the second shard
        with pytest.raises(SpecError, match="'obs' holds float64 values that do not fit float32"):
            memory.extend(Trajectories(wrong.info, TemporalDictTensor(values, wrong.trajectories.lengths)))
        assert len(memory) == T
        index = memory.sample(4)["index"]
        for arguments, error, message in (
            ((index, torch.tensor([1.0, float("nan"), 1.0, 1.0])), SpecError, "nan"),
            ((index, torch.tensor([1.0, -1.0, 1.0, 1.0])), SpecError, "-1.0"),
            ((index, torch.ones(3)), SpecError, "3 priorities came for 4"),
            ((index + 10**6, torch.ones(4)), IndexError, "index"),
            ((index - 10**6, torch.ones(4)), IndexError, "index"),
        ):
            with pytest.raises(error, match=message):
                memory.update_priorities(*arguments)
        assert (memory.sample(50)["weight"] == 1).all()
        with pytest.raises(MissingKeyError, match=r"\['action'\]"):
            memory.sample(4, ["action"])
        with pytest.raises(SpecError, match="episode_ends"):
            memory.sample(4, episode_ends="sometimes")
    with pytest.raises(ClosedError, match="sample"):
        memory.sample(4)
    with replay() as memory:
        memory.extend(rollout())
        with pytest.raises(StateError, match="alpha"):
            memory.update_priorities(memory.sample(4)["index"], torch.ones(4))
    for arguments, message in (({"n_shards": 6}, "n_shards is 6"), ({"alpha": -1}, "alpha"), ({"beta": -1}, "beta"),
                               ({"memory_size": 0}, "memory_size"), ({"num_envs": 0}, "num_envs")):  # fmt: skip
        with pytest.raises(SpecError, match=message):
            replay(**arguments)


def test_a_shard_that_is_killed_is_said_to_be(cluster):
    with replay() as memory:
        memory.extend(rollout())
        shards = memory.stats()["shards"]
        assert [shard["rows"] for shard in shards] == [3 * T, 2 * T] and all(shard["nbytes"] > 0 for shard in shards)
        assert len({shard["node_id"] for shard in shards}) == 2
        os.kill(shards[1]["pid"], signal.SIGKILL)
        with pytest.raises(WorkerCrashed, match=r"shard 1 \(.*\) is gone, with its rows"):
            for _ in range(2):
                memory.sample(100)
        assert [shard["state"] for shard in memory.stats()["shards"]] == ["idle", "gone"]
    wait_until_gone([shard["pid"] for shard in shards])


def test_it_takes_what_a_batcher_gives(cluster):
    import gymnasium

    from rlstructs import GymEnvInf, RandomAgent, RL_Batcher

    with RL_Batcher(
        16, lambda: RandomAgent(gymnasium.spaces.Discrete(2)), {},
        lambda n_envs, seed: GymEnvInf([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed), {"n_envs": 4},
        n_processes=0, seeds=0,
    ) as batcher, RayReplay(100, batcher.n_elems(), seed=0) as memory:  # fmt: skip
        batcher.reset()
        batcher.execute()
        trajectories, _ = batcher.get()
        memory.extend(trajectories)
        steps = trajectories.trajectories
        batch = memory.sample(64)
        assert np.isin(batch["observations"][:, 0].numpy(), steps["observation/frame"][..., 0].numpy()).all()
        names = {"observations", "next_observations", "actions", "rewards", "terminated", "truncated"}
        assert names <= set(batch.keys())


def shown_with_states(seed):
    """Two environments that show what only the critic sees beside their frames."""
    import gymnasium
    from gymnasium.spaces import Box, Dict

    from rlstructs import GymEnvInf

    class Shown(gymnasium.ObservationWrapper):
        def __init__(self):
            super().__init__(gymnasium.make("CartPole-v1"))
            self.observation_space = Dict(frame=self.env.observation_space, state=Box(-9, 9, (2,)))

        def observation(self, frame):
            return {"frame": frame, "state": frame[:2]}

    return GymEnvInf([Shown() for _ in range(2)], seed)


def test_it_stores_the_states_that_other_memories_store_fed_or_extended_and_saves_them(cluster, tmp_path):
    from rlstructs import RL_Batcher
    from rlstructs.memories.torch import RandomMemory

    here, loaded = RandomMemory(20, 2, device="cpu", seed=0), RayReplay(20, 2, 1, seed=0)
    with RayReplay(20, 2, 1, seed=0) as fed, RayReplay(20, 2, 1, seed=0) as extended, loaded:
        with RL_Batcher.make(shown_with_states, n_envs=2, n_workers=0, n_timesteps=8, seed=0, memory=fed) as batcher:
            batcher.reset()
            batcher.execute()
            trajectories, _ = batcher.get()
        extended.extend(trajectories)
        extended.add_trajectories(trajectories, fed.make_feed().choose_names(trajectories.trajectories.keys()))
        here.add_trajectories(trajectories)
        fed.save(tmp_path / "replay")
        loaded.load(tmp_path / "replay")
        for memory in (fed, extended, loaded):
            found = memory.sample(16)
            assert {"states", "next_states"} < set(here.get_tensor_names()) < set(found.keys())
            assert (found["states"] == found["observations"][:, :2]).all()


def endless(seed):
    """Two environments without ends, which pay the number of the step."""
    import gymnasium

    from rlstructs import GymEnvInf

    class Endless(gymnasium.Env):
        observation_space, action_space = gymnasium.spaces.Discrete(2), gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            self.t = 0
            return 0, {}

        def step(self, action):
            self.t += 1
            return 0, float(self.t), False, False, {}

    return GymEnvInf([Endless() for _ in range(2)], seed)


@pytest.mark.parametrize("is_fed", [False, True], ids=["extended", "fed"])
def test_windows_stop_where_a_rollout_of_a_batcher_over_ray_was_left_out(cluster, is_fed, tmp_path):
    from rlstructs import RayBatcher
    from rlstructs.memories.torch import RandomMemory

    memory, here = RayReplay(40, 2, 2, seed=0), RandomMemory(40, 2, device="cpu", seed=0)
    with memory, RayBatcher.make(endless, n_envs=2, n_workers=1, n_timesteps=5, seed=0) as batcher:
        batcher.reset()
        for given in (1, 0, 1, 1, 0):
            if is_fed:
                batcher.feed(memory if given else None)
            batcher.execute()
            trajectories, _ = batcher.get()
            if given and not is_fed:
                memory.extend(trajectories)
            if given:
                here.add_trajectories(trajectories)
        memory.save(tmp_path / "replay")
        memory.load(tmp_path / "replay")  # what follows is known afterwards, too
        batcher.feed(None)
        batcher.execute()
        batcher.get()
        for _ in range(2):
            batcher.execute()
            trajectories, _ = batcher.get()
            memory.extend(trajectories)
            here.add_trajectories(trajectories)
        for each in (memory.sample(200, ["rewards"], sequence_length=3, episode_ends="never")["rewards"],
                     here.sample(["rewards"], 200, sequence_length=3, episode_ends="never")[0][0]):  # fmt: skip
            numbers = each.reshape(200, 3)
            assert (numbers.diff(dim=1) == 1).all() and {13, 14, 34, 35} <= {*numbers[:, 1].tolist()}


def test_a_batcher_over_ray_feeds_it_and_any_other_memory(cluster):
    import gymnasium

    from rlstructs import GymEnvInf, RandomAgent, RayBatcher
    from rlstructs.memories.torch import RandomMemory

    with RayBatcher(
        16, lambda: RandomAgent(gymnasium.spaces.Discrete(2)), {},
        lambda seed: GymEnvInf([gymnasium.make("CartPole-v1") for _ in range(3)], seed), {}, n_processes=1, seeds=0,
    ) as batcher, RayReplay(100, 3, seed=0) as memory:  # fmt: skip
        here = RandomMemory(100, 3, device="cpu", seed=0)
        batcher.feed(memory)
        batcher.reset()
        for fed, n_rows in ((memory, 2 * 3 * 16), (here, 3 * 16)):
            batcher.feed(fed)
            for _ in range(n_rows // (3 * 16)):
                batcher.execute()
                assert batcher.wait() == (3 * 16, 3)
            assert len(fed) == n_rows
        assert len(memory) == 2 * 3 * 16 and here.get_tensor_names()[-1] == "truncated"
        with pytest.raises(SpecError, match="this memory was made with names="):
            memory.add_trajectories(rollout(), {"obs": "observation/frame"})
