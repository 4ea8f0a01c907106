"""`RayBatcher` over real Ray clusters: the batches of `RL_Batcher`, wherever workers run; nothing hangs or is left."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import cloudpickle
import gymnasium
import numpy as np
import psutil
import pytest
import torch
from clusters import (
    Broken,
    Noisy,
    add_node,
    create_cartpoles,
    create_failing,
    pids_in,
    pids_of,
    ray_cluster,
)
from helpers import Counting, rollout
from processes import LIMIT, JumpingTime, exists, wait_until, wait_until_gone

from rlstructs import (
    ClosedError,
    DictTensor,
    GymEnv,
    GymEnvInf,
    GymVectorEnv,
    OutOfMemoryError,
    RandomAgent,
    RayBatcher,
    RayReplay,
    RemoteTraceback,
    RL_Batcher,
    SharedVectorEnv,
    SpecError,
    StateError,
    TemporalDictTensor,
    Trajectories,
    WorkerCrashed,
    WorkerError,
    WorkerTimeout,
)
from rlstructs.batcher.worker_record import RolloutOrder
from rlstructs.cli.command import main
from rlstructs.distributed.cluster import ASIDE, BUILD, NodeActor
from rlstructs.distributed.supervisor import NodeRecord
from rlstructs.rollout.progress import RolloutReply
from rlstructs.testing import Fault, FaultyEnv, Ledger, create_faulty_envs
from rlstructs.workers import pickling
from rlstructs.workers.messages import Call, Future

pytest.importorskip("ray", reason="ray is not installed: pip install ray")

N_ENVS = 3


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster(3) as made:
        yield made


# --- the same as on one machine ---------------------------------------------------------------------


def agent_info(n, right):
    return DictTensor({"right": torch.full((n,), right)})


def cartpoles(make, n_processes, autoreset=True, **arguments):
    return make(
        12, Noisy, {}, create_cartpoles, {"n_envs": N_ENVS, "autoreset": autoreset}, n_processes, 5,
        agent_info=agent_info(1, 0.5), env_info=DictTensor({"low": torch.zeros(1), "high": torch.zeros(1)}),
        agent_seeds=list(range(n_processes)), **arguments,
    )  # fmt: skip


def reset(batcher):
    n = batcher.n_elems()
    low = torch.linspace(-0.05, -0.01, n)
    batcher.reset(agent_info(n, 0.6), DictTensor({"low": low, "high": -low}))


def story(batcher, n_rollouts):
    """All that a trainer may see of some rollouts between which this and that is done."""
    seen = []
    reset(batcher)
    for number in range(n_rollouts):
        batcher.execute(agent_info(batcher.n_elems(), 0.3) if number == 2 else None)
        trajectories, n_running = batcher.get()
        seen.append((trajectories.info, trajectories.trajectories, n_running))
        if not n_running:
            reset(batcher)
        weights = {"a": torch.arange(3.0) + number, "b": torch.tensor(number, dtype=torch.bfloat16)}
        batcher.update(weights)
        weights["a"].fill_(-1)  # which is the trainer's own business
        if number == 1:
            seen.append(batcher.evaluate(10, seed=1))
    statistics = batcher.statistics()
    seen.append([(name, kept.count, kept.mean.tolist(), kept.m2.tolist()) for name, kept in statistics.items()])
    seen += [batcher.episodes(), batcher.policy_version, batcher.n_elems()]
    state = batcher.state_dict()
    times = ("seconds", "environment", "agent", "busy")
    seen.append([{key: value for key, value in worker.items() if key not in times} for worker in state["workers"]])
    seen.append({key: state[key] for key in ("batcher", "weights_version", "dropped_episodes")})
    return seen


@pytest.mark.parametrize(
    ("n_nodes", "n_processes", "arguments"),
    [
        (1, 2, {}),
        (2, 3, {"run_ahead": 1}),
        (3, 3, {"autoreset": False, "debug": True}),
    ],
    ids=["1 node", "2 nodes ahead", "3 nodes that end"],
)
def test_all_is_as_on_one_machine(cluster, n_nodes, n_processes, arguments):
    with cartpoles(RL_Batcher, n_processes, **arguments) as batcher:
        expected = story(batcher, 6)
    with cartpoles(RayBatcher, n_processes, n_nodes=n_nodes, **arguments) as batcher:
        assert len({node["node_id"] for node in batcher.stats()["nodes"]}) == n_nodes
        for one, other in zip(story(batcher, 6), expected, strict=True):
            assert one == other


def test_a_state_goes_on_with_nodes_and_without(cluster):
    def numbers(batcher, state):
        batcher.load_state_dict(state)
        reset(batcher)
        return rollout(batcher)[0]

    with cartpoles(RL_Batcher, 2) as alone, cartpoles(RayBatcher, 2, n_nodes=2) as nodes:
        reset(nodes)
        rollout(nodes)
        state = nodes.state_dict()
        expected = numbers(alone, state)
        assert numbers(nodes, state) == expected
        assert nodes.state_dict()["workers"][1]["stream"] == 1
        reset(nodes)  # and an instance of before the state goes on too
        assert rollout(nodes)[0].info["policy_version"].tolist() == [0] * 6


def test_a_state_goes_on_in_the_same_way_when_a_node_is_found_dead(cluster):
    arguments = {"on_worker_failure": "restart"}
    with cartpoles(RL_Batcher, 2) as alone, cartpoles(RayBatcher, 2, n_nodes=2, **arguments) as nodes:
        reset(nodes)
        state = nodes.state_dict()
        nodes.load_state_dict(state)  # whose streams are behind those that follow
        nodes.load_state_dict(nodes.state_dict())
        for batcher in (alone, nodes):
            if batcher is nodes:
                kill(of_actors(nodes)[1])
            batcher.load_state_dict(state)
            reset(batcher)
        assert rollout(nodes)[0] == rollout(alone)[0]
        assert [worker["stream"] for worker in nodes.state_dict()["workers"]] == [1, 1]


def test_an_exact_state_goes_on_bit_for_bit(cluster):
    def go_on(batcher):
        found = []
        for number in range(4):
            if number:
                batcher.execute()
            found.append(batcher.get())
            batcher.update({"a": torch.arange(3.0) - number, "b": torch.tensor(number, dtype=torch.bfloat16)})
        moments = {name: (kept.count, kept.m2.tolist()) for name, kept in batcher.statistics().items()}
        batcher.state_dict(exact=True)  # waits for what is under way: nodes tell their steps when a rollout is over
        return found, batcher.episodes(), moments, [worker["steps"] for worker in batcher.stats()["workers"]]

    arguments = {"n_nodes": 2, "run_ahead": 1}
    with cartpoles(RayBatcher, 3, **arguments) as batcher:
        reset(batcher)
        for number in range(3):
            batcher.execute(agent_info(9, 0.3) if number == 1 else None)
            batcher.get()
            batcher.update({"a": torch.arange(3.0) + number, "b": torch.tensor(number, dtype=torch.bfloat16)})
        batcher.execute()
        state = batcher.state_dict(exact=True)
        expected = go_on(batcher)
    assert [each["method"] for each in state["exact"]["environments"]] == ["pickle"] * 9
    with cartpoles(RayBatcher, 3, **arguments) as other:
        other.load_state_dict(state)
        assert go_on(other) == expected
    with cartpoles(RL_Batcher, 3, run_ahead=1) as alone, pytest.raises(SpecError, match="workers is None in the exact"):
        alone.load_state_dict(state)


def test_an_exact_state_of_environments_in_groups_goes_on_bit_for_bit(cluster):
    def create_env(seed):
        fns = [lambda: gymnasium.make("CartPole-v1")] * 3
        return GymVectorEnv(SharedVectorEnv(fns, 0, n_groups=2, autoreset_mode="SameStep"), seed)

    def make():
        return RayBatcher(12, Noisy, {}, create_env, {}, 2, 5, n_nodes=2, agent_info=agent_info(1, 0.5))

    def go_on(batcher):
        return [rollout(batcher)[0] for _ in range(3)]

    with make() as batcher:
        batcher.reset(agent_info(6, 0.6))
        rollout(batcher)
        state = batcher.state_dict(exact=True)
        expected = go_on(batcher)
        batcher.load_state_dict(state)
        assert go_on(batcher) == expected
    with make() as other:
        other.load_state_dict(state)
        assert go_on(other) == expected


class Sizes(gymnasium.Env):
    """Its episodes take as many steps as its size, or never end where that is None."""

    action_space, observation_space = gymnasium.spaces.Discrete(5), gymnasium.spaces.Box(-1, 1, (1,))

    def __init__(self, size):
        self.size = size

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(1, np.float32), 1.0, self.steps == self.size, False, {}


def test_an_evaluation_of_environments_without_ends_ends(cluster):
    def create_env(seed):
        return GymEnvInf([Sizes(5), Sizes(None)], seed)

    with RayBatcher(4, RandomAgent, {"action_space": Sizes.action_space}, create_env, {}, 3, 5, n_nodes=2) as batcher:
        batcher.reset()
        with pytest.warns(UserWarning, match=r"5 of 9 episodes ended within max_steps=14, .* 1 \(0 of 2\), 3 \("):
            found = batcher.evaluate(9, seed=1, max_steps=14)
        assert found["env_index"].tolist() == [0, 0, 2, 2, 4] and found["length"].tolist() == [5] * 5
        assert batcher.evaluate(1, seed=1)["env_index"].tolist() == [0]
        assert rollout(batcher)[0].lengths.tolist() == [4] * 6


@pytest.fixture
def connect(cluster):
    """Connects to the cluster; afterwards this process is connected to it."""
    import ray

    def connect():
        if not ray.is_initialized():
            ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)

    yield connect
    connect()


HAS_GONE = "^the connection to Ray was shut down meanwhile$"


@pytest.mark.parametrize("connects_again", [False, True])
def test_calls_of_a_batcher_after_the_connection_to_ray_was_shut_down_say_so_at_once(connect, connects_again):
    import ray

    def make(**arguments):
        return cartpoles(RayBatcher, 1, n_nodes=1, **arguments)

    with make() as batcher, make(on_worker_failure="restart") as busy:
        reset(batcher)
        reset(busy)
        busy.execute()
        ray.shutdown()
        if connects_again:
            connect()
        with pytest.raises(WorkerError, match=HAS_GONE):
            batcher.update({"a": torch.zeros(3), "b": torch.zeros(10**6)})
        with pytest.raises(WorkerError, match=HAS_GONE):
            batcher.evaluate(1, seed=1) if connects_again else batcher.execute()
        with pytest.raises(WorkerError, match=HAS_GONE):
            busy.get()
    assert ray.is_initialized() == connects_again


@pytest.mark.parametrize("connects_again", [False, True])
def test_calls_of_a_memory_after_the_connection_to_ray_was_shut_down_say_so_at_once(connect, connects_again, tmp_path):
    import ray

    steps = TemporalDictTensor({name: torch.zeros(2, 4) for name in ("obs", "_obs", "reward")}, torch.full((2,), 4))
    trajectories = Trajectories(DictTensor({"env_index": torch.arange(2)}), steps)
    with RayReplay(9, 2, 1, alpha=0.5, names={"obs": "obs", "next": "_obs", "reward": "reward"}) as memory:
        memory.extend(trajectories)
        memory.save(tmp_path)
        ray.shutdown()
        if connects_again:
            connect()
        for call in (
            lambda: memory.extend(trajectories), lambda: memory.sample(3), lambda: memory.update_priorities([0], [1.0]),
            lambda: len(memory), lambda: memory.save(tmp_path), lambda: memory.load(tmp_path),
        ):  # fmt: skip
            with pytest.raises(WorkerError, match=HAS_GONE):
                call()
        assert memory.stats()["rows"] == 8
    assert ray.is_initialized() == connects_again


def test_an_example_trains_to_the_same_score(cluster, subprocess_env):
    example = str(Path(__file__).parents[2] / "examples" / "ppo.py")
    arguments = ["--n-envs", "2", "--n-timesteps", "16", "--n-steps", "1024", "--n-eval", "10"]
    scores = []
    for where in ([], ["--ray", cluster.address]):
        command = [sys.executable, example, *arguments, *where]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=subprocess_env)
        assert done.returncode == 0, done.stderr
        scores.append(re.search(r"CartPole-v1: score ([0-9.]+), 1024 steps", done.stdout)[1])
    assert scores[0] == scores[1]


def test_the_command_collects_on_a_cluster_what_it_does_on_a_machine(cluster, subprocess_env, tmp_path):
    arguments = ["collect", "CartPole-v1", "--workers", "3", "--envs", "2", "--timesteps", "20", "--steps", "240"]
    for name, where in (("alone", []), ("nodes", ["--ray", cluster.address, "--nodes", "2"])):
        code = "import sys; from rlstructs.cli.command import main; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", code, *arguments, *where, "--out", f"{name}.npz"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=subprocess_env, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("CartPole-v1: 240 steps, ")
    assert Trajectories.load(tmp_path / "alone.npz") == Trajectories.load(tmp_path / "nodes.npz")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "0", "--ray", "auto"], "--workers: 0 runs in this process; --ray needs at least 1"),
        (["--nodes", "2"], "--nodes: is for --ray"),
    ],
    ids=["workers", "nodes"],
)
def test_what_does_not_go_with_a_cluster_is_said(capsys, arguments, message):
    assert main(["collect", "CartPole-v1", *arguments]) == 2
    assert capsys.readouterr().err == f"rlstructs: error: {message}\n"


# --- handing out --------------------------------------------------------------------------------------


def test_a_lease_is_what_get_copies_and_cannot_be_written_to(cluster):
    with cartpoles(RL_Batcher, 3) as alone, cartpoles(RayBatcher, 3, n_nodes=2) as batcher:
        reset(alone)
        reset(batcher)
        for _ in range(4):  # there are episodes that end
            expected, _ = rollout(alone)
            batcher.execute()
            with batcher.lease() as (parts, n_running):
                assert n_running == 9 and [part.node for part in parts] == [0, 1]
                for name, tensor in expected.trajectories.items():
                    if tensor.dtype is not torch.bfloat16:
                        assert (np.concatenate([part[name] for part in parts]) == tensor.numpy()).all()
                for name, tensor in expected.info.items():
                    assert (np.concatenate([part.info[name] for part in parts]) == tensor.numpy()).all()
                assert [length for part in parts for length in part.lengths] == [12] * 9
                assert not any(array.flags.writeable for part in parts for array in (*part.values(), part.lengths))
                assert not any(array.flags.writeable for part in parts for array in part.info.values())
                with pytest.raises(StateError, match="^execute: a rollout is leased, release it first$"):
                    batcher.execute()
        assert batcher.episodes() == alone.episodes()
        metrics, expected_metrics = batcher.metrics(), alone.metrics()
        assert metrics["episode/count"] > 0 and metrics.keys() == expected_metrics.keys()
        for name in metrics.keys() - {"rollout/steps_per_second", "rollout/waiting_share"}:
            assert metrics[name] == expected_metrics[name]
        batcher.execute()
        lease = batcher.lease()
        lease.release()
        lease.release()
        with pytest.raises(StateError, match="^the lease has been released; `get` gives what may be kept$"):
            _ = lease.parts
        batcher.execute()


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_reset_drops_the_rollouts_that_nobody_asked_for(cluster, run_ahead):
    with cartpoles(RL_Batcher, 2, run_ahead=run_ahead) as alone:
        with cartpoles(RayBatcher, 2, n_nodes=2, run_ahead=run_ahead) as batcher:
            found = []
            for each in (alone, batcher):
                reset(each)
                each.execute()
                with pytest.raises(KeyboardInterrupt):
                    with each.lease():
                        signal.raise_signal(signal.SIGINT)
                each.execute()
                reset(each)
                found.append(story(each, 2))
    assert found[0] == found[1]


def counting(n_processes=4, n_nodes=2, env_args=None, **arguments):
    """Workers of two environments that count, or fail as `env_args` say."""
    return RayBatcher(5, Counting, {}, create_failing, env_args or {}, n_processes, 7, n_nodes=n_nodes, **arguments)


def steps_of(trajectories):
    """Of each row the number of its first step."""
    return trajectories.trajectories["observation/frame"][:, 0, 1].tolist()


def test_what_is_handed_out_and_how(cluster):
    with counting(n_processes=3, run_ahead=1) as batcher:
        batcher.reset()
        batcher.execute()
        kept, _ = batcher.get()
        batcher.execute()
        same, _ = batcher.get(out=kept)
        assert steps_of(kept) == steps_of(same) == [5] * 6
        batcher.execute()
        while (found := batcher.get(blocking=False)) == (None, None):
            pass
        assert steps_of(found[0]) == [10] * 6
        rows = []
        for _ in range(6):
            batcher.execute()
            some, n_running = batcher.get(min_nodes=1)
            rows += zip(some.info["env_index"].tolist(), steps_of(some), strict=True)
            assert n_running == 6 and some.n_elems() in (2, 4, 6)
        for row in range(6):  # nothing is left out, and nothing twice
            steps = [step for index, step in rows if index == row]
            assert steps == list(range(15, 15 + 5 * len(steps), 5))
        batcher.execute()
        for arguments, error, message in (
            ({"min_workers": 1}, SpecError, "^get: min_workers is for RL_Batcher; .* give min_nodes$"),
            ({"min_nodes": 1, "preempt": 0.5}, SpecError, "^get: min_nodes lets the others go on and preempt ends"),
            ({"min_nodes": 3}, SpecError, "^get: min_nodes is 3, there are 2$"),
            ({"min_nodes": 0}, SpecError, "^get: min_nodes must be at least 1, got 0$"),
            ({"out": kept.slice(0, 2)}, SpecError, "cpu, expected .* or more on cpu"),
        ):
            with pytest.raises(error, match=message):
                batcher.get(**arguments)
        pids = pids_of(batcher)
        assert len(set(pids)) == 5 and all(exists(pid) for pid in pids)
        batcher.close()
        batcher.close()
        wait_until_gone(pids)
        for call in (batcher.reset, batcher.execute, batcher.get, batcher.lease, batcher.stats):
            with pytest.raises(ClosedError, match=": the batcher is closed$"):
                call()


def test_a_rollout_survives_an_interrupted_get(cluster, tmp_path):
    file = tmp_path / "go"
    env_args = {"how": "interrupt", "worker": 0, "n_envs": 1, "file": str(file), "pid": os.getpid()}
    with counting(n_processes=1, n_nodes=1, env_args=env_args) as batcher:
        batcher.reset()
        batcher.execute()
        with pytest.raises(KeyboardInterrupt):
            file.touch()
            batcher.get()
        assert steps_of(batcher.get()[0]) == [0] and steps_of(rollout(batcher)[0]) == [5]


class Endless(Counting):
    """Slow; leaves a file when it has begun, and when it is closed."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def __call__(self, state, observation, agent_info, history=None):
        (self.folder / f"steps-{os.getpid()}").touch()
        time.sleep(0.01)
        return super().__call__(state, observation, agent_info)

    def close(self):
        (self.folder / f"closed-{os.getpid()}").touch()


def endless(folder):
    """Rollouts whose end nobody will see, of a worker on each of two nodes."""
    env_args = {"n_envs": 1, "length": 10**9}
    return RayBatcher(10**5, Endless, {"folder": folder}, create_failing, env_args, 2, 7, n_nodes=2)


def test_close_ends_rollouts_that_are_under_way_and_closes_agents(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("rlstructs.distributed.pool.CLOSING", LIMIT)
    with endless(tmp_path) as batcher:
        pids = [worker["pid"] for worker in batcher.stats()["workers"]]
        batcher.reset()
        batcher.execute()
        wait_until(lambda: len(list(tmp_path.glob("steps-*"))) == 2)
        start = time.monotonic()
    assert time.monotonic() - start < LIMIT  # not by force
    assert {path.name for path in tmp_path.glob("closed-*")} == {f"closed-{pid}" for pid in pids}
    wait_until_gone(pids)


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_nodes_that_are_late_can_be_preempted(cluster, run_ahead):
    env_args = {"how": "slow", "worker": 1, "n_envs": 1, "length": 10**9}  # a minute for a whole rollout
    with RayBatcher(
        600, Counting, {}, create_failing, env_args, 2, 7, n_nodes=2, run_ahead=run_ahead
    ) as batcher:  # fmt: skip
        batcher.reset()
        batcher.execute()
        first, _ = batcher.get(preempt=0.5)
        batcher.execute()
        second, _ = batcher.get(preempt=0.5)
        for trajectories in (first, second):
            whole, part = trajectories.lengths.tolist()
            assert whole == 600 and 0 < part < 600
        assert steps_of(first) == [0, 0] and steps_of(second) == first.lengths.tolist()


def test_close_in_another_thread_ends_a_get(cluster, tmp_path):
    batcher = endless(tmp_path)
    pids = pids_of(batcher)
    batcher.reset()
    batcher.execute()
    caught = []

    def get():
        try:
            batcher.get()
        except ClosedError as error:
            caught.append(error)

    thread = threading.Thread(target=get, daemon=True)
    thread.start()
    wait_until(lambda: len(list(tmp_path.glob("steps-*"))) == 2)
    batcher.close()
    thread.join(LIMIT)
    assert not thread.is_alive() and [str(error) for error in caught] == ["the batcher was closed meanwhile"]
    wait_until_gone(pids)
    assert len(list(tmp_path.glob("closed-*"))) == 2


def test_it_cannot_be_pickled(cluster):
    with counting(n_processes=1, n_nodes=1) as batcher:
        with pytest.raises(TypeError, match="^the nodes of a batcher cannot be copied or pickled, nor what holds them"):
            cloudpickle.dumps(batcher._engine.pool)
        with pytest.raises(TypeError, match="pickle"):
            cloudpickle.dumps(batcher)


# --- failures -----------------------------------------------------------------------------------------


def kill(pid, signum=signal.SIGKILL):
    """Sends a signal that ends a process, and waits until it has."""
    process = psutil.Process(pid)
    process.send_signal(signum)
    process.wait(LIMIT)


def of_actors(batcher):
    return [node["pid"] for node in batcher.stats()["nodes"]]


def check_lost(batcher, lost, n_restarts):
    """What was handed out last is nothing of node 1, and all of node 0; then all goes on."""
    trajectories, n_running = batcher.get()
    assert n_running == 8 and trajectories.info["env_index"].tolist() == list(range(8))
    assert trajectories.lengths.tolist() == [5] * 4 + [0] * 4
    assert not any(tensor[4:].any() for _, tensor in trajectories.trajectories.items())
    first = steps_of(trajectories)[0]
    for turn in range(2):
        following, _ = rollout(batcher)
        assert following.lengths.tolist() == [5] * 8
        assert steps_of(following) == [first + 5 * (turn + 1)] * 4 + [5 * turn] * 4
        assert (following.info["policy_version"] == batcher.policy_version).all()
        assert (following.trajectories["action/given"] == batcher.policy_version).all()
    stats = batcher.stats()
    assert (stats["restarts"], stats["lost_rollouts"]) == (n_restarts, lost)


def waiting(file, worker=3, **arguments):
    """Worker 3, of node 1, waits in its first rollout for its end; `file` is there when it does."""
    return counting(env_args={"how": "wait", "worker": worker, "file": str(file)}, **arguments)


def test_a_node_that_is_removed_in_the_middle_of_a_rollout_is_replaced_on_what_is_left(cluster, tmp_path):
    added = [add_node(cluster, resources={"simulator": 2}) for _ in range(2)]
    machines = {node_id: machine for machine, node_id in added}
    file = tmp_path / "there"
    with waiting(file, on_worker_failure="restart", resources={"simulator": 1}) as batcher:
        before = batcher.stats()
        assert {node["node_id"] for node in before["nodes"]} == set(machines)
        batcher.reset()
        batcher.update(1.0)
        batcher.execute()
        wait_until(file.exists)
        left, lost = (node["node_id"] for node in before["nodes"])
        cluster.remove_node(machines[lost])
        check_lost(batcher, 2, 2)
        after = batcher.stats()
        assert [node["node_id"] for node in after["nodes"]] == [left, left]
        assert [worker["restarts"] for worker in after["workers"]] == [0, 0, 1, 1]
        assert [worker["stream"] for worker in batcher.state_dict()["workers"]] == [0, 0, 1, 1]
    cluster.remove_node(machines[left])
    wait_until_gone(pids_in(before) + pids_in(after))


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_an_actor_that_is_killed_is_replaced(cluster, tmp_path, run_ahead):
    file = tmp_path / "there"
    with waiting(file, on_worker_failure="restart", run_ahead=run_ahead, max_restarts=2) as batcher:
        before = batcher.stats()
        batcher.reset()
        weights = torch.tensor(1.0)
        batcher.update(weights)
        weights.fill_(-1)  # the successor gets what it was
        batcher.execute()
        wait_until(file.exists)
        kill(of_actors(batcher)[1])
        check_lost(batcher, 2, 2)
        kill(of_actors(batcher)[0])
        with pytest.raises(WorkerCrashed, match=r"^node 0 \(.*\) is gone, with workers 0 to 1; last request: rollout$"):
            rollout(batcher)  # that is two more than may be replaced
            rollout(batcher)
        after = batcher.stats()
    wait_until_gone(pids_in(before) + pids_in(after))


@pytest.mark.parametrize("what", ["worker", "node"])
def test_a_successor_acts_with_the_last_update_of_an_exact_state(cluster, what):
    def make():
        return RayBatcher(
            5, Counting, {}, lambda seed: GymEnvInf([Sizes(9), Sizes(7)], seed), {}, 4, 5, n_nodes=2,
            on_worker_failure="restart",
        )  # fmt: skip

    with make() as batcher:
        batcher.reset()
        batcher.update(torch.tensor(3.0))
        rollout(batcher)
        state = batcher.state_dict(exact=True)
    with make() as other:
        other.load_state_dict(state)
        kill(of_actors(other)[1] if what == "node" else other.stats()["workers"][3]["pid"])
        batches = [rollout(other)[0] for _ in range(3)]
        assert other.stats()["restarts"] == (2 if what == "node" else 1)
    assert sum(batch.lengths.sum() for batch in batches) >= 2 * 40  # of two rollouts at least
    for batch in batches:
        given = batch.trajectories["action/given"]
        assert (given[batch.trajectories.mask().bool()] == 3).all()


def test_when_just_a_reply_is_lost_what_came_behind_it_is_run_again():
    record, reply = NodeRecord(n_ordered=4), RolloutReply([0], (0, 0.0, 0.0, 0.0), 0, {})
    record.orders += [RolloutOrder(number, Future(0, "rollout")) for number in range(4)]
    for order in record.orders:
        order.request.end(reply)
    record.orders[1].request.end(error=WorkerError("the reply is lost"))
    record.lose()
    record.begin_successor()
    assert [(order.is_lost, order.is_done) for order in record.orders] == [
        (False, True), (True, False), (False, False), (False, False)
    ]  # fmt: skip
    assert (record.n_lost, record.first_number) == (1, 2)
    record.orders[2].request.end(reply)  # of the successor, which then fails
    record.orders[3].request.end(error=WorkerError("gone"))
    record.lose()
    assert [order.is_lost for order in record.orders] == [False, True, False, True]
    assert record.orders[2].is_done


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_node_that_was_not_told_what_it_should_be_hands_out_nothing(cluster, run_ahead):
    def lengths(batcher):
        """After information of which Ray brings nothing to node 1; what was ordered before is as it should be."""
        batcher.reset(agent_info(4, 0.5))
        rollout(batcher)
        batcher.execute(agent_info(4, 1.0))
        [asked] = [asked for asked, _ in batcher._engine._supervisor._unconfirmed if asked.index == 1]
        batcher._engine.pool.settle([asked])
        asked.error = WorkerError("the reply of node 1 to 'set_infos' is lost")
        for _ in range(run_ahead):
            assert batcher.get()[0].lengths.tolist() == [5] * 4
            batcher.execute()
        return batcher.get()[0].lengths.tolist()

    arguments = {"agent_info": agent_info(1, 0.5), "n_processes": 2, "run_ahead": run_ahead}
    message = "^the reply of node 1 to 'set_infos' is lost"
    with counting(**arguments) as batcher, pytest.raises(WorkerError, match=message):
        lengths(batcher)
    with counting(**arguments, on_worker_failure="restart") as batcher:
        assert lengths(batcher) == [5, 5, 0, 0]
        trajectories, _ = rollout(batcher)
        assert trajectories.lengths.tolist() == [5] * 4
        assert trajectories.info["agent_info/right"].tolist() == [1.0] * 4


def test_without_restarts_it_is_said_which_node_is_gone(cluster, tmp_path):
    file = tmp_path / "there"
    batcher = waiting(file)
    pids = pids_of(batcher)
    batcher.reset()
    batcher.execute()
    wait_until(file.exists)
    kill(of_actors(batcher)[1])
    message = r"^node 1 \(.*\) is gone, with workers 2 to 3; last request: rollout$"
    with pytest.raises(WorkerCrashed, match=message) as caught:
        batcher.get()
    assert caught.value.worker_index == 2 and "ActorDiedError" in type(caught.value.__cause__).__name__
    with pytest.raises(StateError, match="^execute: a worker failed before, close the batcher$"):
        batcher.execute()
    batcher.close()
    wait_until_gone(pids)


def test_a_node_replaces_its_workers_by_itself_as_one_machine_does(cluster):
    env_args = {"how": "kill", "worker": 3, "length": 7, "in_episode": 1}  # in the second rollout
    arguments = {"on_worker_failure": "restart"}
    with counting(env_args=env_args, **arguments) as batcher:
        with RL_Batcher(5, Counting, {}, create_failing, env_args, 4, 7, **arguments) as alone:
            alone.reset()
            expected = [(rollout(alone), alone.episodes()) for _ in range(4)]
        actors = of_actors(batcher)
        batcher.reset()
        assert [(rollout(batcher), batcher.episodes()) for _ in range(4)] == expected
        assert expected[1][0][0].lengths.tolist() == [5] * 6 + [0] * 2
        stats = batcher.stats()
        assert of_actors(batcher) == actors and (stats["restarts"], stats["lost_rollouts"]) == (1, 1)
        assert [worker["restarts"] for worker in stats["workers"]] == [0, 0, 0, 1]
        kill(actors[1])  # while it does nothing: what it is asked next is lost
        assert rollout(batcher)[0].lengths.tolist() == [5] * 4 + [0] * 4
        assert rollout(batcher)[0].lengths.tolist() == [5] * 8
        stats = batcher.stats()
        assert [worker["restarts"] for worker in stats["workers"]] == [0, 0, 1, 2]
        assert [worker["lost_rollouts"] for worker in stats["workers"]] == [0, 0, 1, 2]
        assert [worker["stream"] for worker in batcher.state_dict()["workers"]] == [0, 0, 1, 2]
        assert set(batcher.episodes()["length"].tolist()) == {7}


def test_a_node_that_does_not_answer_is_late(cluster, monkeypatch):
    monkeypatch.setattr("rlstructs.distributed.pool.MENDING", 0.5)
    batcher = counting(n_processes=2, timeout=LIMIT)
    pids = pids_of(batcher)
    batcher.reset()
    batcher._engine.pool.timeout = 2.0  # not before: workers have to start
    os.kill(of_actors(batcher)[1], signal.SIGSTOP)
    with pytest.raises(WorkerTimeout, match=r"^no reply within 4.5 s to 'rollout' from node 1 \("):
        rollout(batcher)
    batcher.close()
    wait_until_gone(pids)


class Looking:
    """Settings and job of a node in one."""

    def build(self):
        return self

    def report(self):
        return {}

    def look_at_collector(self):
        looked_at = {id(each) for each in gc.get_objects()}
        return gc.isenabled() and gc.get_threshold()[0] > 0, id(vars(pickle)) in looked_at


def test_the_collector_of_a_node_leaves_out_what_was_imported(cluster):
    import ray

    actor = ray.remote(concurrency_groups={ASIDE: 1})(NodeActor).remote(0)
    for call in Call(BUILD, (pickling.dumps(Looking()), sys.path)), Call("look_at_collector", ()):
        reply, _ = ray.get(actor.call.remote(pickling.dumps(call)))
    assert pickling.loads(reply).value == (True, False)
    ray.kill(actor)


class FailingUpdate(Counting):
    def update(self, info):
        raise Broken("lost in update", 7)


@pytest.mark.parametrize("how", ["constructor", "raise", "kill", "update"])
def test_what_an_environment_or_agent_raises_arrives_as_it_is(cluster, how):
    class Own(Broken):
        """Of the script: no other process can import it."""

    def create_env(seed):
        try:
            return create_failing(seed, 2, how, 3)
        except Broken as error:
            raise Own("here", 8) from error

    kind = {"constructor": Own, "kill": WorkerCrashed}.get(how, Broken)
    update = how == "update"
    with pytest.raises(kind) as caught:
        with RayBatcher(
            5, FailingUpdate if update else Counting, {}, create_env, {}, 4, 7, n_nodes=2
        ) as batcher:  # fmt: skip
            batcher.reset()
            if update:
                batcher.update(1.0)
            rollout(batcher)
    error = caught.value
    worker = error.__cause__.worker_index if update else 3
    if how == "kill":
        assert error.worker_index == 3 and "SIGKILL" in str(error)
        assert str(error).startswith("on node 1 (") and "whose worker 0 is worker 2 of all: worker 1 (pid" in str(error)
        return
    assert type(error) is kind and error.code == (8 if how == "constructor" else 7)
    assert isinstance(error.__cause__, RemoteTraceback) and error.__cause__.worker_index == worker
    assert "lost in" in str(error.__cause__) or "no licence" in str(error.__cause__)
    *origin, raised, where = error.__notes__
    assert all(note.startswith("raised by environment ") for note in origin)
    assert raised.startswith(f"raised in worker {worker} during ")
    assert where.startswith(f"on node {worker // 2} (") and where.endswith(f"worker {worker // 2 * 2} of all")


def test_what_an_evaluation_raises_changes_nothing(cluster):
    def create_env(seed):
        how = "raise" if seed.root == 3 else ""
        return create_failing(seed, 2, how, 3)

    with RayBatcher(5, Counting, {}, create_env, {}, 4, 7, n_nodes=2) as batcher:
        batcher.reset()
        rollout(batcher)
        for _ in range(2):
            with pytest.raises(Broken, match="lost in step") as caught:
                batcher.evaluate(8, seed=3)
            assert caught.value.__cause__.worker_index == 3
        assert steps_of(rollout(batcher)[0]) == [5] * 8


DRIVER = """
    import sys
    import ray
    from clusters import create_failing, pids_of
    from helpers import Counting
    from rlstructs import RayBatcher

    batcher = RayBatcher(
        5, Counting, {}, create_failing, {"how": "wait", "worker": 3, "file": sys.argv[2]}, 4, 7, n_nodes=2,
        address=sys.argv[1],
    )
    batcher.reset()
    batcher.execute()
    print(*pids_of(batcher), flush=True)
    sys.stdin.read()
"""


def test_a_trainer_that_is_killed_leaves_nothing(cluster, subprocess_env, tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(DRIVER), cluster.address, str(tmp_path / "there")]
    driver = subprocess.Popen(
        command, env=subprocess_env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    line = ""
    while not line[:1].isdigit():  # Ray may print as well
        line = driver.stdout.readline()
        assert line
    pids = [int(pid) for pid in line.split()]
    assert len(pids) == 6 and all(exists(pid) for pid in pids)
    wait_until((tmp_path / "there").exists)
    driver.kill()
    driver.communicate()
    wait_until_gone(pids)


# --- what cannot be -----------------------------------------------------------------------------------


class Large(Counting):
    """Puts out a megabyte in each step."""

    def __call__(self, state, observation, agent_info, history=None):
        output, state = super().__call__(state, observation, agent_info)
        return output + DictTensor({"large": torch.zeros(observation.n_elems(), 2**20, dtype=torch.uint8)}), state


def test_a_node_that_has_answered_in_time_is_not_late_while_its_reply_is_on_its_way(cluster):
    import ray

    machine, node_id = add_node(cluster, resources={"far": 1})
    with RayBatcher(
        9, Large, {}, create_failing, {}, 1, 7, n_nodes=1, resources={"far": 1}, timeout=LIMIT
    ) as batcher:  # fmt: skip
        assert batcher.stats()["nodes"][0]["node_id"] == node_id
        batcher.reset()
        batcher.execute()
        [node] = batcher._engine.pool.nodes
        assert ray.wait([node.requests[0].reference], timeout=LIMIT, fetch_local=False)[0]  # it has answered, there
        node.since -= 1000  # long ago
        assert batcher.get()[0].lengths.tolist() == [9, 9]
    cluster.remove_node(machine)


def test_a_rollout_comes_to_the_trainer_while_it_does_something_else(cluster):
    machine, _ = add_node(cluster, resources={"far": 1})
    with RayBatcher(9, Large, {}, create_failing, {}, 1, 7, n_nodes=1, resources={"far": 1}) as batcher:
        batcher.reset()
        batcher.execute()
        [node] = batcher._engine.pool.nodes
        _, columns = node.requests[0].reply.result(LIMIT)
        assert columns["action/large"].nbytes == 18 * 2**20
        assert batcher.get(blocking=False)[0].lengths.tolist() == [9, 9]
    cluster.remove_node(machine)


def test_an_object_store_that_is_too_small_is_said_to_be(cluster):
    message = (
        r"^rollouts and updates take 10[0-9],[0-9,]+ bytes of the object store of .*, which has 83,886,080; Ray "
        "writes what is above 80% of it to a disk: start Ray there with a larger object_store_memory, or take"
    )
    with pytest.raises(OutOfMemoryError, match=message):
        RayBatcher(25, Large, {}, create_failing, {}, 2, 7, n_nodes=1)
    with RayBatcher(2, Large, {}, create_failing, {}, 1, 7, n_nodes=1) as batcher:
        batcher.reset()
        rollout(batcher)
        with pytest.raises(OutOfMemoryError, match="^rollouts and updates take 7[0-9],"):
            batcher.update(torch.zeros(8 * 2**20))
        batcher.update(1.0)
        for turn in range(40):  # what is handed out is given back
            assert rollout(batcher)[0].info["policy_version"].tolist() == [1, 1], turn


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"n_nodes": 3, "n_processes": 2}, SpecError, "^n_nodes is 3, which is more than n_processes, 2$"),
        ({"n_nodes": 0}, SpecError, "^n_nodes must be at least 1, got 0$"),
        ({"n_processes": 0}, SpecError, "^n_processes must be at least 1, got 0$"),
        ({"timeout": 0}, SpecError, "^timeout must be above 0 seconds, got 0$"),
        ({"seeds": [1]}, SpecError, "^seeds: needs 2 seeds of at least 0, one for each of the processes, got"),
        ({"agent_args": {"lock": threading.Lock()}}, TypeError, r"^agent_args\['lock'\] cannot be sent to a worker: "),
    ],
    ids=["nodes", "no nodes", "no processes", "no time", "seeds", "lock"],
)
def test_what_is_wrong_with_an_argument_is_said_before_anything_starts(cluster, arguments, error, message):
    needed = {
        "n_timesteps": 5, "create_agent": Counting, "agent_args": {}, "create_env": create_failing, "env_args": {},
        "n_processes": 2, "seeds": 7,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        RayBatcher(**{**needed, **arguments})


def test_what_no_machine_has_is_said_at_once(cluster):
    message = "^resources: no machine of the cluster has {'GPU': 1}; all together have {.*'CPU': 3.0"
    with pytest.raises(SpecError, match=message):
        counting(n_nodes=1, resources={"GPU": 1})


def test_actors_run_where_there_is_room_and_the_one_that_finds_none_says_so(cluster, monkeypatch, caplog):
    with contextlib.ExitStack() as stack:
        places = []
        for _ in range(3):  # each takes all of a machine
            batcher = stack.enter_context(counting(n_processes=1, n_nodes=1, resources={"CPU": 1}, timeout=LIMIT))
            places.append(batcher.stats()["nodes"][0]["node_id"])
        assert len(set(places)) == 3
        monkeypatch.setattr("rlstructs.distributed.pool.PLACING", 0.5)
        monkeypatch.setattr("rlstructs.distributed.pool.MENDING", 0.5)
        with pytest.raises(WorkerTimeout, match=r"^node 0 was not placed and built within 2.0 s; it needs {'CPU': 1}"):
            counting(n_nodes=1, timeout=0.5, resources={"CPU": 1})
        assert "node 0 was not placed and built within 0.5 s; it needs {'CPU': 1}, and free are {" in caplog.text
        for n in range(1, 12):  # the deadline may pass between any two looks at the clock
            with monkeypatch.context() as patch, pytest.raises(WorkerTimeout, match="node 0 was not placed and built"):
                clock = JumpingTime(n)
                for module in ("pool", "cluster"):  # both look at it
                    patch.setattr(f"rlstructs.distributed.{module}.time", clock)
                counting(n_nodes=1, timeout=0.1, resources={"CPU": 1})


@pytest.mark.parametrize("there", ["None", "types.ModuleType('ray')"], ids=["nothing", "a folder called ray"])
def test_without_ray_it_is_said_what_to_install(subprocess_env, there):
    text = f"import sys, types; sys.modules['ray'] = {there}" + textwrap.dedent("""
        import rlstructs
        print(rlstructs.RayBatcher.__name__)
        for make in (lambda: rlstructs.RayBatcher(1, None, {}, None, {}, 1, 0), lambda: rlstructs.RayReplay(1, 1)):
            try:
                make()
            except ImportError as error:
                print(error)
    """)
    done = subprocess.run([sys.executable, "-c", text], env=subprocess_env, capture_output=True, text=True, check=True)
    needs = [f"{name} needs ray: pip install ray" for name in ("RayBatcher", "RayReplay")]
    assert done.stdout.splitlines() == ["RayBatcher", *needs]


def create_ending(seed):
    return GymEnv([gymnasium.make("CartPole-v1", max_episode_steps=n) for n in (1, 400)], seed)


def test_environments_that_run_again_with_a_worker_that_a_node_replaced_are_in_the_rollout(cluster):
    agent_args = {"action_space": gymnasium.spaces.Discrete(2)}
    found = []
    for cls, more in ((RL_Batcher, {}), (RayBatcher, {"n_nodes": 1})):
        with cls(3, RandomAgent, agent_args, create_ending, {}, 2, 0, on_worker_failure="restart", **more) as batcher:
            batcher.reset()
            assert rollout(batcher)[1] == 2
            pid = batcher.stats()["workers"][1]["pid"]
            os.kill(pid, signal.SIGKILL)
            wait_until_gone([pid])
            batcher.update({})  # it is found dead here, and not in the rollout
            found.append([rollout(batcher) for _ in range(2)])
    assert found[0] == found[1]
    trajectories, n_running = found[1][0]
    assert trajectories.info["env_index"].tolist() == [1, 2, 3]
    assert trajectories.lengths.tolist() == [3, 1, 3] and n_running == 2


@pytest.mark.parametrize("n_nodes", [1, 2])
def test_an_environment_that_fails_costs_its_own_row_alone(cluster, n_nodes):
    faults = [Fault("raise", count=3, env_index=5, generations=[0]), Fault("raise", count=6, env_index=1)]

    def story(make, **arguments):
        with make(
            4, lambda: RandomAgent(FaultyEnv.action_space), {}, create_faulty_envs,
            {"n_envs": 3, "faults": faults, "length": 7}, 2, 0, on_env_failure="restart", **arguments,
        ) as batcher:  # fmt: skip
            batcher.reset()
            ledger, seen = Ledger(), []
            for _ in range(6):
                batcher.execute()
                trajectories, n_running = batcher.get()
                ledger.add(trajectories)
                seen += [trajectories.lengths.tolist(), n_running, trajectories.trajectories]
            state = [worker["env_restarts"] for worker in batcher.state_dict()["workers"]]
            return [*seen, batcher.episodes(), batcher.stats()["env_restarts"], state,
                    {name: n for name, n in batcher.metrics().items() if "env_restarts" in name}]  # fmt: skip

    here, there = story(RL_Batcher), story(RayBatcher, n_nodes=n_nodes)
    assert here[0] == [4, 4, 4, 4, 4, 2] and here[-3] == [0, 3, 0, 0, 0, 1] and here[-2] == [[0, 3, 0], [0, 0, 1]]
    assert all(mine == theirs for mine, theirs in zip(here, there, strict=True))
