"""Timelines: lanes add up, show what happened, and survive whatever ends the program."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import gymnasium
import numpy as np
import psutil
import pytest
import torch
from clusters import ray_cluster
from gymnasium import spaces
from helpers import count_batcher, rollout

from rlstructs import GymEnvInf, GymVectorEnv, RandomAgent, RayBatcher, RL_Batcher, SharedVectorEnv
from rlstructs.distributed.batcher import NodeRecording
from rlstructs.errors import FileError, StateError
from rlstructs.memories.torch import RandomMemory
from rlstructs.trace import lane as lanes
from rlstructs.trace.timeline import read_events

ROOT = Path(__file__).parent.parent.parent
START_METHODS = ["forkserver", pytest.param("spawn", marks=pytest.mark.slow), "fork"]
WORKER_PHASES = {"wait for an order", "agent", "environment", "reset", "write", "update", "evaluate", "start"}
TRAINER_PHASES = {"learn", "wait", "read", "lease", "order", "draw", "save", "restart", "update", "evaluate", "reset"}
NODE_PHASES = {"wait for an order", "wait", "read", "reset", "update", "evaluate", "restart"}


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


def batcher_of(create_env, n_workers=2, make=RL_Batcher, **arguments):
    return make(
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


def check(events, n_workers, n_nodes=0):
    """Checks that lanes have no holes and no overlaps; returns the parts of each arrow."""
    spans, depth, arrows = defaultdict(list), defaultdict(int), defaultdict(list)
    for event in events:
        assert event["ph"] in "XBEMstf", event
        if event["ph"] == "X":
            spans[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            lane = WORKER_PHASES if event["tid"] else TRAINER_PHASES
            lane = NODE_PHASES if event["tid"] > n_workers else lane
            assert event["name"] in lane | {"restart", "not recorded"}
        elif event["ph"] in "BE":
            depth[event["tid"]] += 1 if event["ph"] == "B" else -1
            assert depth[event["tid"]] in (0, 1), "a rollout in a rollout"
        elif event["ph"] in "stf":
            arrows[event["id"]].append((event["ts"], event["ph"]))
    assert set(spans) == set(range(1 + n_workers + n_nodes))
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
        before = time.perf_counter()
        with batcher.trace(tmp_path / "run.json") as timeline:
            within = time.perf_counter()
            for _ in range(4):
                rollout(batcher)
                batcher.update(None)
            within = time.perf_counter() - within
        before = time.perf_counter() - before
    assert timeline.n_lost == 0
    events = read_events(tmp_path / "run.json")
    assert events == json.loads((tmp_path / "run.json").read_text())
    for lane in sums(events).values():
        assert within - 1e-5 <= sum(lane.values()) / 1e6 <= before
    arrows = check(events, 2)
    assert [arrows[f"{worker}.{number}"] for worker in range(2) for number in range(4)] == ["stf"] * 8
    ends = [event["args"] for event in events if event["ph"] == "E"]
    assert sorted(end["number"] for end in ends if end["number"] < 4) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all(end["steps"] == 10 for end in ends if end["number"] < 4)  # a fifth may have begun
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


FORMAT = {  # of Chrome's traces: what an event has, by its kind
    "M": {"name": str, "pid": int, "args": dict},
    "X": {"name": str, "pid": int, "tid": int, "ts": int, "dur": int},
    "B": {"name": str, "pid": int, "tid": int, "ts": int, "args": dict},
    "E": {"pid": int, "tid": int, "ts": int, "args": dict},
    **{step: {"name": str, "cat": str, "id": str, "pid": int, "tid": int, "ts": int} for step in "stf"},
}


def load(events):
    """A database with the tables of Perfetto's trace processor that a timeline fills: slices, and their arguments.

    Raises unless the events have the format, and slices of a lane nest: none overlaps the end of another.
    """
    database = sqlite3.connect(":memory:")
    database.execute("create table slice (id integer primary key, tid, name, ts, dur, depth)")
    database.execute("create table args (id, key, value)")
    open_slices = defaultdict(list)
    for event in events:
        for key, kind in FORMAT[event["ph"]].items():
            assert type(event[key]) is kind and (kind is not int or event[key] >= 0), event
    for event in sorted((event for event in events if event["ph"] in "BEX"), key=lambda event: event["ts"]):
        stack = open_slices[event["tid"]]
        while stack and stack[-1][1] is not None and stack[-1][1] <= event["ts"]:
            stack.pop()
        if event["ph"] == "E":
            [(row, end)] = stack
            assert end is None, "a phase goes on beyond its rollout"
            database.execute("update slice set dur = ? - ts where id = ?", (event["ts"], row))
            stack.clear()
            database.executemany("insert into args values (?, ?, ?)", [(row, *each) for each in event["args"].items()])
            continue
        end = event["ts"] + event["dur"] if event["ph"] == "X" else None
        assert all(other is None or (end is not None and end <= other) for _, other in stack), event
        values = event["tid"], event["name"], event["ts"], event.get("dur", -1), len(stack)
        row = database.execute("insert into slice (tid, name, ts, dur, depth) values (?, ?, ?, ?, ?)", values).lastrowid
        stack.append((row, end))
    return database


@pytest.mark.parametrize("n_workers", [0, 2])
def test_queries_find_what_batches_and_stats_say(tmp_path, n_workers):
    with batcher_of(waiting(2, 0.001, length=7), n_workers, memory=RandomMemory(50, 2 * max(1, n_workers))) as batcher:
        with batcher.trace(tmp_path / "run.json"):
            batcher.reset()
            n_steps = sum(int(rollout(batcher)[0].lengths.sum()) for _ in range(4))
        stats = batcher.stats()["workers"]
    query = load(read_events(tmp_path / "run.json")).execute
    own = "select sum(value) from args where key = 'steps'"
    assert query(own).fetchall() == [(n_steps,)] and n_steps == 4 * 5 * 2 * len(stats)
    for worker in stats:
        lane = (1 + worker["worker"],)
        rollouts = "from slice join args using (id) where tid = ? and name = 'rollout' and key = 'number'"
        assert query(f"select value {rollouts} order by ts", lane).fetchall() == [(0,), (1,), (2,), (3,)]
        phases = "select sum(dur), count(*) from slice where tid = ? and depth = 1 and name in "
        for names, seconds in ("('agent', '')", "agent_seconds"), ("('environment', 'reset')", "environment_seconds"):
            found, n = query(phases + names, lane).fetchone()
            # Times are cut to microseconds, and phases of less are left out, at most as many as there are others.
            assert abs(found / 1e6 - worker[seconds]) <= 3e-6 * max(n, 20)
        assert query("select count(*) from slice where tid = ? and depth > 1", lane).fetchall() == [(0,)]


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


def test_a_rollout_that_goes_on_from_one_timeline_to_the_next_keeps_its_times(tmp_path):
    with batcher_of(waiting(1, 0.02, length=100), 1) as batcher:
        batcher.reset()
        with batcher.trace(tmp_path / "a"):
            batcher.execute()
        begins = time.perf_counter()
        with batcher.trace(tmp_path / "b"):
            batcher.get()
            rollout(batcher)
        took = time.perf_counter() - begins
    events = read_events(tmp_path / "b")
    check(events, 1)
    assert max(event["ts"] + event.get("dur", 0) for event in events if "ts" in event) / 1e6 <= took


def test_a_disk_that_is_full_is_an_error_and_leaves_the_batcher_as_it_was(tmp_path):
    with batcher_of(waiting(1, 0.0)) as batcher:
        batcher.reset()
        with pytest.raises(OSError, match="No space"), batcher.trace("/dev/full"):
            rollout(batcher)
        with batcher.trace(tmp_path / "run.json"):
            rollout(batcher)
    check(read_events(tmp_path / "run.json"), 2)


def test_a_file_that_cannot_be_written_changes_nothing(tmp_path):
    with batcher_of(waiting(1, 0.0)) as batcher:
        with pytest.raises(FileNotFoundError), batcher.trace(tmp_path / "none" / "run.json"):
            pass
        with open(tmp_path / "other", "wb") as file:  # an open file's number is no path
            with pytest.raises(TypeError), batcher.trace(file.fileno()):
                pass
            file.write(b"whole")
        assert (tmp_path / "other").read_bytes() == b"whole"
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
    assert "rlstructs: learn" not in names and "rlstructs: wait for an order" not in names


def test_a_profiler_of_torch_shows_the_phases_of_rollouts_in_its_process(tmp_path):
    with batcher_of(waiting(1, 0.0), 0) as batcher:
        batcher.reset()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            rollout(batcher)
        rollout(batcher)
    counts = {event.key: event.count for event in profiler.key_averages()}
    assert counts["rlstructs: agent"] == 5 and counts["rlstructs: reset"] == 1
    assert counts["rlstructs: environment"] == 6  # once more after the reset


class Node:
    """Stands for the pool, a node, its actor, and the reply to a call; its clock is ahead, and runs too fast."""

    def __init__(self, ahead):
        self.ahead, self.workers, self.nodes, self.actor, self.rng = ahead, range(1), [self], self, random.Random(0)

    def compute(self):
        for _ in range(self.rng.randrange(5000)):  # the ways there and back, which differ
            pass

    def ask_aside(self, index, method, *args):
        self.sent = time.perf_counter_ns()
        return self

    def future(self):
        return self

    def result(self, timeout):
        self.compute()
        self.ahead += 2000
        clock = time.perf_counter_ns() + self.ahead
        self.compute()
        return clock, []


def test_the_clock_of_a_node_is_known_to_within_the_time_that_a_call_takes():
    node = Node(ahead=-(10**12))
    recording = NodeRecording(node, 0)
    for _ in range(200):
        ahead, excerpts = recording.take()
        took = time.perf_counter_ns() - node.sent
        assert excerpts == [] and abs(ahead - node.ahead) <= took


def test_without_a_file_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with batcher_of(waiting(1, 0.0)) as batcher, batcher.trace("") as timeline:
        batcher.reset()
        rollout(batcher)
    assert timeline is None and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_nodes_and_their_workers_are_traced(tmp_path):
    with ray_cluster(2), batcher_of(waiting(1, 0.01), 3, RayBatcher, n_nodes=2, on_worker_failure="restart") as batcher:
        batcher.reset()
        with batcher.trace(tmp_path / "run.json") as timeline:
            for _ in range(3):
                rollout(batcher)
                batcher.update(None)
        pid = batcher.stats()["nodes"][1]["pid"]
        with batcher.trace(tmp_path / "killed.json"):
            rollout(batcher)
            os.kill(pid, signal.SIGKILL)
            psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], 30)
            for _ in range(3):
                rollout(batcher)
    assert timeline.n_lost == 0
    events = read_events(tmp_path / "run.json")
    arrows = check(events, 3, 2)
    # From the trainer by the node to the worker, and back.
    assert [arrows[f"{worker}.{number}"] for worker in range(3) for number in range(3)] == ["stttf"] * 9
    names = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    assert names == {0: "trainer", 1: "worker 0", 2: "worker 1", 3: "worker 2", 4: "node 0", 5: "node 1"}
    assert sum(event["ph"] == "E" for event in events) == 9
    found = sums(events)
    assert all(found[worker]["environment"] >= 14 * 10_000 for worker in (1, 2, 3))
    assert {"wait", "read", "update", "wait for an order"} <= set(found[4]) & set(found[5])
    events = read_events(tmp_path / "killed.json")
    check(events, 3, 2)
    found = sums(events)
    assert all(found[lane]["restart"] > 0 for lane in (0, 3, 5)) and not any(
        "restart" in found[lane] for lane in (1, 2)
    )


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
    assert load(events).execute("select count(*) from slice where name = 'rollout' and dur > 0").fetchone()[0] > 1


@pytest.mark.slow
def test_the_picture_of_the_readme_is_drawn_from_timelines(tmp_path):
    program = ROOT / "benchmarks/timelines.py"
    subprocess.run(
        [sys.executable, program, "--folder", tmp_path, "--seconds", "1", "--ms", "5"], check=True, timeout=300
    )
    for theme in "light", "dark":
        name = f"timelines-{theme}.svg"
        drawn, kept = (ElementTree.parse(folder / name).getroot() for folder in (tmp_path, ROOT / "docs"))
        for own in drawn, kept:
            texts = [element.text for element in own.iter("{http://www.w3.org/2000/svg}text")]
            assert {"trainer", "process 5", "worker 1"} <= set(texts)
            assert sum(int(text.split()[0]) > 0 for text in texts if " steps in " in text and text.endswith("ms")) == 2


def test_what_is_no_timeline_is_refused(tmp_path):
    (tmp_path / "run.json").write_text('{"a": 1}')
    with pytest.raises(FileError, match="run.json: no timeline"):
        read_events(tmp_path / "run.json")


def test_a_lane_without_a_ring_records_nothing():
    lane = lanes.Lane()
    lane.note(lanes.BEGIN, 1)
    assert lane.enter(lanes.AGENT) == lanes.ORDERLESS and lane.enter(lanes.WRITE) == lanes.AGENT
    assert lane.cells[lanes.AGENT] > 0 and lane.cells[lanes.HEAD] == 0
