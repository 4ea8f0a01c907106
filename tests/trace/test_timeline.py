"""Timelines: lanes add up, show what happened, and survive whatever ends the program."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict

import gymnasium
import numpy as np
import psutil
import pytest
import torch
from gymnasium import spaces
from helpers import count_batcher, rollout

from rlstructs import GymEnvInf, GymVectorEnv, RandomAgent, RL_Batcher, SharedVectorEnv
from rlstructs.errors import StateError
from rlstructs.memories.torch import RandomMemory
from rlstructs.trace import lane as lanes
from rlstructs.trace.timeline import read_events

START_METHODS = ["forkserver", pytest.param("spawn", marks=pytest.mark.slow), "fork"]
WORKER_PHASES = {"wait for an order", "agent", "environment", "reset", "write", "update", "evaluate", "start"}
TRAINER_PHASES = {"learn", "wait", "read", "lease", "order", "draw", "save", "restart", "update", "evaluate", "reset"}


class Waiting(gymnasium.Env):
    """Each step waits, and its reward is how long; an episode has `length` of them."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, seconds=0.0, length=5):
        self.seconds, self.length, self.n, self.never = seconds, length, 0, threading.Event()

    def reset(self, *, seed=None, options=None):
        self.n = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.n += 1
        began = time.perf_counter()
        self.never.wait(self.seconds)
        return np.zeros(2, np.float32), time.perf_counter() - began, self.n == self.length, False, {}

    def __deepcopy__(self, memo):
        return type(self)(self.seconds, self.length)


def waiting(n_envs, seconds, length=5):
    return lambda seed: GymEnvInf([Waiting(seconds, length) for _ in range(n_envs)], seed)


def batcher_of(create_env, n_workers=2, **arguments):
    return RL_Batcher(
        n_timesteps=5, create_agent=lambda: RandomAgent(spaces.Discrete(2)), agent_args={}, create_env=create_env,
        env_args={}, n_processes=n_workers, seeds=0, **arguments,
    )  # fmt: skip


def sums(events):
    """Lane -> phase -> microseconds."""
    found = defaultdict(lambda: defaultdict(float))
    for event in events:
        if event["ph"] == "X":
            found[event["tid"]][event["name"]] += event["dur"]
    return found


def check(events, n_workers):
    """Checks what the format asks for, and that lanes have no holes and no overlaps."""
    spans, depth, arrows = defaultdict(list), defaultdict(int), defaultdict(list)
    for event in events:
        assert event["ph"] in "XBEMstf", event
        if event["ph"] == "X":
            spans[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            assert event["name"] in (WORKER_PHASES if event["tid"] else TRAINER_PHASES) | {"restart", "not recorded"}
        elif event["ph"] in "BE":
            depth[event["tid"]] += 1 if event["ph"] == "B" else -1
            assert depth[event["tid"]] in (0, 1), "a rollout in a rollout"
        elif event["ph"] in "stf":
            arrows[event["id"]].append((event["ts"], event["ph"]))
    assert set(spans) == set(range(n_workers + 1))
    for lane in spans.values():
        lane.sort()
        assert lane[0][0] == 0
        assert all(abs(end - begin) < 0.002 for (_, end), (begin, _) in itertools.pairwise(lane))
    assert not any(depth.values())
    ends = {lane[-1][1] for lane in spans.values()}
    assert max(ends) - min(ends) < 0.02 * max(ends)
    return {name: "".join(step for _, step in sorted(own)) for name, own in arrows.items()}


@pytest.mark.parametrize("start_method", START_METHODS)
@pytest.mark.parametrize("run_ahead", [0, 1])
def test_lanes_have_no_holes_and_arrows_lead_from_an_order_to_its_delivery(tmp_path, start_method, run_ahead):
    with batcher_of(waiting(2, 0.0), start_method=start_method, run_ahead=run_ahead) as batcher:
        batcher.reset()
        with batcher.trace(tmp_path / "run.json") as timeline:
            for _ in range(4):
                rollout(batcher)
                batcher.update(None)
    assert timeline.n_lost == 0
    events = read_events(tmp_path / "run.json")
    assert events == json.loads((tmp_path / "run.json").read_text())
    arrows = check(events, 2)
    assert [arrows[f"{worker}.{number}"] for worker in range(2) for number in range(4)] == ["stf"] * 8
    ends = [event["args"] for event in events if event["ph"] == "E"]
    assert sorted(end["number"] for end in ends if end["number"] < 4) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all(end["steps"] == 10 for end in ends)
    assert {end["policy_version"] for end in ends if end["number"] == 3} == {3 - run_ahead}
    assert {"update", "agent", "write", "environment", "reset"} <= set(sums(events)[1])


@pytest.mark.parametrize("n_workers", [0, 2])
def test_time_that_environments_wait_is_in_their_phase(tmp_path, n_workers):
    with batcher_of(waiting(1, 0.02, length=100), n_workers) as batcher:
        batcher.reset()
        with batcher.trace(tmp_path / "run.json"):
            trajectories, _ = rollout(batcher)
    events = read_events(tmp_path / "run.json")
    check(events, max(1, n_workers))
    for worker in range(max(1, n_workers)):
        steps = [e["dur"] / 1e6 for e in events if e.get("tid") == worker + 1 and e.get("name") == "environment"]
        own = trajectories.trajectories["_observation/reward"][worker].tolist()
        longer = sorted(shown - took for shown, took in zip(steps, own, strict=True))
        # Of five steps one at least is not interrupted by other programs in the lines around the wait.
        assert all(took >= 0.02 for took in own) and 0 <= longer[0] < 0.001


def test_clocks_of_workers_are_those_of_the_trainer(tmp_path):
    with batcher_of(waiting(1, 0.0)) as batcher:
        batcher.reset()
        with batcher.trace(tmp_path / "run.json"):
            for _ in range(20):
                rollout(batcher)
    times = defaultdict(dict)
    for event in read_events(tmp_path / "run.json"):
        if event["ph"] in "stf":
            times[event["id"]][event["ph"]] = event["ts"]
    assert len(times) == 40
    assert all(each["s"] <= each["t"] + 100 and each["t"] <= each["f"] + 100 for each in times.values())


def test_leases_draws_saves_and_evaluations_are_phases(tmp_path):
    memory = RandomMemory(10, 4)
    with batcher_of(waiting(2, 0.0), memory=memory) as batcher:
        batcher.reset()
        with batcher.trace(tmp_path / "run.json"):
            batcher.execute()
            with batcher.lease():
                pass
            memory.sample(["rewards"], 4)
            batcher.evaluate(4, seed=1)
            batcher.state_dict()
        memory.sample(["rewards"], 4)
    found = sums(read_events(tmp_path / "run.json"))
    assert {"lease", "wait", "draw", "evaluate", "save", "learn", "order"} <= set(found[0])
    assert "evaluate" in found[1]


def test_groups_of_a_shared_vector_env_are_traced(tmp_path):
    def create(seed):
        return GymVectorEnv(SharedVectorEnv([lambda: Waiting(0.0)] * 4, n_workers=2, n_groups=2), seed)

    with batcher_of(create, 1) as batcher:
        batcher.reset()
        with batcher.trace(tmp_path / "run.json"):
            rollout(batcher)
    events = read_events(tmp_path / "run.json")
    check(events, 1)
    assert [event["args"]["steps"] for event in events if event["ph"] == "E"] == [20]


def test_a_replaced_worker_has_a_restart_in_its_lane(tmp_path):
    with count_batcher([[3], [3]], 4, autoreset=True, on_worker_failure="restart") as batcher:
        batcher.reset()
        with batcher.trace(tmp_path / "run.json"):
            rollout(batcher)
            kill_worker(batcher, 1)
            rollout(batcher)
            rollout(batcher)
    events = read_events(tmp_path / "run.json")
    check(events, 2)
    found = sums(events)
    assert {"restart", "start"} <= set(found[2]) and "restart" not in found[1] and "restart" in found[0]


def kill_worker(batcher, worker):
    """Kills it, and waits until it has ended."""
    pid = batcher.stats()["workers"][worker]["pid"]
    process = psutil.Process(pid)
    os.kill(pid, signal.SIGKILL)
    psutil.wait_procs([process], 30)


def test_preempted_rollouts_are_traced(tmp_path):
    with batcher_of(waiting(1, 0.0)) as batcher:
        batcher.reset()
        with batcher.trace(tmp_path / "run.json"):
            for _ in range(3):
                batcher.execute()
                batcher.get(preempt=0.5)
    check(read_events(tmp_path / "run.json"), 2)


def test_events_that_do_not_fit_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("rlstructs.trace.timeline.PERIOD", 3600)
    with RL_Batcher.make(lambda: Waiting(0.0), n_envs=1, n_workers=1, n_timesteps=5000, seed=0) as batcher:
        batcher.reset()
        with batcher.trace(tmp_path / "run.json") as timeline:
            for _ in range(4):
                rollout(batcher)
    assert timeline.n_lost > 0
    events = read_events(tmp_path / "run.json")
    assert sums(events)[1]["not recorded"] > 0
    assert events[-1]["args"]["lost"] == timeline.n_lost


def test_a_second_timeline_begins_anew(tmp_path):
    with batcher_of(waiting(1, 0.0)) as batcher:
        batcher.reset()
        for name in "ab":
            with batcher.trace(tmp_path / name):
                with pytest.raises(StateError, match="is being written already"), batcher.trace(tmp_path / "c"):
                    pass
                rollout(batcher)
            rollout(batcher)
            events = read_events(tmp_path / name)
            check(events, 2)
            assert sum(event["ph"] == "E" for event in events) == 2
    assert not (tmp_path / "c").exists()


def test_a_file_that_cannot_be_written_changes_nothing(tmp_path):
    with batcher_of(waiting(1, 0.0)) as batcher:
        with pytest.raises(FileNotFoundError), batcher.trace(tmp_path / "none" / "run.json"):
            pass
        with batcher.trace(tmp_path / "run.json"):
            pass


def test_a_profiler_of_torch_shows_the_phases(tmp_path):
    with batcher_of(waiting(1, 0.0)) as batcher:
        batcher.reset()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            rollout(batcher)
            batcher.update(None)
    names = {event.key for event in profiler.key_averages()}
    assert {"rlstructs: order", "rlstructs: wait", "rlstructs: read", "rlstructs: update"} <= names


PROGRAM = """
import os, signal, sys
from rlstructs import RL_Batcher
with RL_Batcher.make("CartPole-v1", n_envs=4, n_workers=2, n_timesteps=20, seed=0) as batcher:
    with batcher.trace(sys.argv[1]) as timeline:
        for _ in batcher.rollouts():
            if os.path.getsize(sys.argv[1]) > 20000:
                os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_program_that_is_killed_leaves_a_timeline(tmp_path):
    program = subprocess.run([sys.executable, "-c", PROGRAM, tmp_path / "run.json"], timeout=120)
    assert program.returncode == -signal.SIGKILL
    with pytest.raises(json.JSONDecodeError):
        json.loads((tmp_path / "run.json").read_text())
    events = read_events(tmp_path / "run.json")
    assert {"agent", "environment"} <= set(sums(events)[1])


def test_what_is_no_timeline_is_refused(tmp_path):
    (tmp_path / "run.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match="expected a timeline"):
        read_events(tmp_path / "run.json")


def test_a_lane_without_a_ring_records_nothing():
    lane = lanes.Lane()
    lane.note(lanes.BEGIN, 1)
    assert lane.enter(lanes.AGENT) == lanes.ORDERLESS and lane.enter(lanes.WRITE) == lanes.AGENT
    assert lane.cells[lanes.AGENT] > 0 and lane.cells[lanes.HEAD] == 0
