"""Days of failures in minutes: workers are killed and stopped at random while they collect.

    python tests/soak.py --minutes 15
    python tests/soak.py --table

CartPole and HalfCheetah run under `on_worker_failure="restart"`, with and without a run-ahead, copied and leased, each
with a replay memory that fills and is drawn from; in one of them the workers write to the memory, which holds one more
rollout than are under way and is drawn from all the while. About every two seconds a worker is killed, or stopped so
that it outruns its deadline; now and then an environment raises, hangs or ends its process by itself. In two of them
environments raise often, and are made anew by `on_env_failure="restart"`. Every observation holds a checksum that its
environment put in, the action before it, and its number, which is the reward; every agent puts out which
update it has had. All of it is verified, in every transition that is handed out and every row that is drawn.
`--table` measures how long it takes until each kind of failure is over.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import textwrap
import time
import zlib
from dataclasses import dataclass, field

import gymnasium
import numpy as np
import psutil
import torch
from processes import named_memory, worker_pids

from rlstructs import GymEnvInf, RandomAgent, RL_Batcher
from rlstructs.memories.torch import PrioritizedMemory, RandomMemory
from rlstructs.replay.intake.trajectories import NAMES as USUAL
from rlstructs.testing import Fault, create_faulty_envs

N_FIELDS = 6  # checksum of the action, environment, generation, episode, step, checksum
# Steps after which an environment has failed by itself, on average; and those after which it has raised, where it is
# then made anew.
MEAN_STEPS, MEAN_STEPS_ANEW = 100_000, 2_000
# So many lives of an environment count as a generation.
LIVES = 4096
TIMEOUT, EVERY = 2.0, 2.0  # seconds
# Seconds that a rollout may take beyond its deadline: successors start meanwhile.
PATIENCE = 3.0
NAMES = ["observations", "next_observations"]
# Of a memory that workers feed.
FED = {**USUAL, "versions": "action/version", "policy_version": "policy_version"}


class Checked(gymnasium.Wrapper):
    """Adds to each observation whose it is, and a checksum of all that is in it."""

    def __init__(self, env, env_index, generation, mean_steps):
        super().__init__(env)
        self.mean_steps = mean_steps
        low, high = np.full(N_FIELDS, -np.inf, np.float32), np.full(N_FIELDS, np.inf, np.float32)
        space = env.observation_space
        self.observation_space = gymnasium.spaces.Box(
            np.concatenate([space.low.astype(np.float32), low]), np.concatenate([space.high.astype(np.float32), high])
        )
        self.fields = [0, env_index, generation, -1, 0]
        self.rng = random.Random(1000 * env_index + generation)

    def reset(self, **arguments):
        observation, info = self.env.reset(**arguments)
        self.fields = [0, *self.fields[1:3], self.fields[3] + 1, 0]
        return self._checked(observation), info

    def step(self, action):
        if self.mean_steps and self.rng.random() < 1 / self.mean_steps:
            raise RuntimeError("the environment has failed by itself")
        if self.rng.random() < 1 / MEAN_STEPS:
            how = self.rng.choice(["raise", "hang", "exit"])
            if how == "raise":
                raise RuntimeError("the environment has failed by itself")
            if how == "exit":
                os._exit(3)
            signal.pause()
        observation, _, *rest = self.env.step(action)
        self.fields[0], self.fields[4] = crc_of(np.asarray(action)), self.fields[4] + 1
        return (self._checked(observation), float(self.fields[4]), *rest)

    def _checked(self, observation):
        found = np.concatenate([observation, self.fields, [0]]).astype(np.float32)
        found[-1] = checksum(found)
        return found


def checksum(observation):
    """Of all but the last number; float32 holds it exactly."""
    return crc_of(observation[:-1])


def crc_of(array):
    return zlib.crc32(array.tobytes()) % (1 << 24)


def create_env(env_id, n_envs, seed, mean_steps=None):
    first, generation = seed.worker_index * n_envs, LIVES * seed.restart_number + seed.life
    return GymEnvInf([Checked(gymnasium.make(env_id), first + k, generation, mean_steps) for k in range(n_envs)], seed)


class Agent(RandomAgent):
    """Puts out how many updates it has had; each is that number, many times."""

    version = 0.0

    def __call__(self, *arguments, **named):
        output, state = super().__call__(*arguments, **named)
        output.set("version", torch.full((output.n_elems(),), self.version))
        return output, state

    def update(self, info):
        [self.version] = info.unique().tolist()


def create_agent(env_id):
    return Agent(gymnasium.make(env_id).action_space)


@dataclass
class Soak:
    """One batcher, its memory, and what was seen of it."""

    env_id: str
    n_workers: int
    n_envs: int
    n_timesteps: int
    timeout: float = TIMEOUT
    patience: float = PATIENCE
    run_ahead: int = 0
    leases: bool = False
    feeds: bool = False
    recovers: bool = False
    transitions: int = 0
    drawn: int = 0
    lost: int = 0
    slowest: float = 0.0
    expected: dict = field(default_factory=dict)

    def __post_init__(self):
        arguments = {"env_id": self.env_id}
        env_args = {**arguments, "n_envs": self.n_envs, "mean_steps": MEAN_STEPS_ANEW if self.recovers else None}
        self.batcher = RL_Batcher(
            self.n_timesteps, create_agent, arguments, create_env, env_args,
            self.n_workers, 0, timeout=self.timeout, on_worker_failure="restart", run_ahead=self.run_ahead,
            on_env_failure="restart" if self.recovers else "raise",
        )  # fmt: skip
        self.name = f"{self.env_id}, run_ahead={self.run_ahead}{', leased' * self.leases}{', fed' * self.feeds}"
        n_all = self.n_workers * self.n_envs
        if self.feeds:
            size = (self.run_ahead + 2) * self.n_timesteps
            self.memory = PrioritizedMemory(memory_size=size, num_envs=n_all, device="cpu", seed=0)
            self.batcher.feed(self.memory, FED)
        else:
            self.memory = RandomMemory(memory_size=2000, num_envs=n_all, seed=0)
        self.batcher.reset()

    def turn(self, harm):
        """One rollout, harmed or not, verified."""
        self._timed(self.batcher.execute)
        harmed = harm(self.batcher.stats()["workers"]) if harm else None
        if self.feeds:
            self._timed(self._wait)
        elif self.leases:
            with self._timed(self.batcher.lease) as (trajectories, _):
                self._keep(trajectories)
        else:
            self._keep(self._timed(self.batcher.get)[0])
        self._draw()
        self._timed(self.batcher.update, torch.full((10_000,), self.batcher.policy_version + 1.0))
        return harmed

    def _wait(self):
        """Draws until the rollout is over."""
        while (n_steps := self.batcher.wait(blocking=False)[0]) is None:
            if len(self.memory):
                self._draw()
        n_lost = self.memory.num_envs - n_steps // self.n_timesteps
        self.lost, self.transitions = self.lost + n_lost, self.transitions + n_steps

    def _draw(self):
        names = [*FED] if self.feeds else NAMES
        drawn = {name: rows.numpy() for name, rows in zip(names, self.memory.sample(names, 64)[0], strict=True)}
        before, after = (drawn[name] for name in NAMES)
        self._check_pairs(before, after)
        self.drawn += len(before)
        if self.feeds:
            actions = [crc_of(action) for action in drawn["actions"]]
            assert (np.array(actions, np.float32) == after[:, -N_FIELDS]).all(), f"{self.name}: another's action"
            assert (drawn["rewards"][:, 0] == after[:, -2]).all(), f"{self.name}: another's reward"
            assert (drawn["versions"] == drawn["policy_version"]).all(), f"{self.name}: another's weights"
            self.memory.update_priorities(self.memory.get_sampling_indexes(), np.full(len(before), 0.5))

    def _keep(self, trajectories):
        self._verify(trajectories)
        self.memory.add_trajectories(trajectories)

    def _verify(self, trajectories):
        lengths = trajectories.lengths.tolist()
        if self.recovers:  # a worker is lost where none of its environments has made a step
            blocks = [lengths[start : start + self.n_envs] for start in range(0, len(lengths), self.n_envs)]
            self.lost += sum(len(block) for block in blocks if not any(block))
        else:
            assert set(lengths) <= {0, self.n_timesteps}, f"{self.name}: lengths {lengths}"
            self.lost += sum(length == 0 for length in lengths)
        mask = trajectories.mask(torch.bool)
        steps = trajectories.trajectories
        before, after = (steps[f"{side}/frame"][mask].numpy() for side in ("observation", "_observation"))
        self._check_pairs(before, after)
        assert (steps["_observation/reward"][mask].numpy() == after[:, -2]).all(), f"{self.name}: another's reward"
        actions = [crc_of(action) for action in steps["action/action"][mask].numpy()]
        assert (np.array(actions, np.float32) == after[:, -N_FIELDS]).all(), f"{self.name}: another's action"
        versions = trajectories.info["policy_version"][:, None]
        assert (steps["action/version"] == versions)[mask].all(), f"{self.name}: another's weights"
        assert (versions >= self.batcher.policy_version - self.run_ahead).all(), f"{self.name}: weights are too old"
        at, done = 0, steps["_observation/done"][mask].tolist()
        for env_index, length in zip(trajectories.info["env_index"].tolist(), lengths, strict=True):
            for row in range(at, at + length):
                self._check_place(env_index, before[row, -5:-1].astype(int).tolist(), done[row])
            at += length
            self.transitions += length

    def _check_place(self, env_index, place, done):
        """A transition is the one after the last that this environment had, or the first of a successor's."""
        assert place[0] == env_index
        _, generation, episode, step = place
        expected = self.expected.get(env_index, (0, 0, 0))
        is_first = generation > expected[0] and (episode, step) == (0, 0)
        assert is_first or (generation, episode, step) == expected, f"{self.name}: {place}, expected {expected}"
        self.expected[env_index] = (generation, episode + 1, 0) if done else (generation, episode, step + 1)

    def _timed(self, call, *arguments):
        started = time.monotonic()
        found = call(*arguments)
        took = time.monotonic() - started
        self.slowest = max(self.slowest, took)
        assert took < self.timeout + self.patience, f"{self.name}: {took:.1f} s for {call.__name__}"
        return found

    def _check_pairs(self, before, after):
        for row in (*before, *after):
            assert row[-1] == checksum(row), f"{self.name}: {row} is not what an environment gave"
        follows = (before[:, -5:-2] == after[:, -5:-2]).all(axis=1) & (before[:, -2] + 1 == after[:, -2])
        assert follows.all(), f"{self.name}: a transition leads elsewhere"

    def close(self):
        stats = self.batcher.stats()
        assert stats["lost_rollouts"] * self.n_envs == self.lost, "the lost ones were not counted exactly"
        self.batcher.close()
        self.memory = None  # which may lie in shared memory
        return stats


def harm(rng, workers):
    """Kills a worker, or stops it for ever."""
    worker = rng.choice(workers)
    how = rng.choice([signal.SIGKILL, signal.SIGSTOP])
    try:
        os.kill(worker["pid"], how)
    except ProcessLookupError:
        return None
    return how.name


def soak(minutes, *limits):
    Soak("CartPole-v1", 1, 1, 1, None).close()  # what the fork server takes is taken once
    rng, before = random.Random(0), held()
    soaks = [
        Soak("CartPole-v1", 2, 8, 64, *limits, recovers=True), Soak("HalfCheetah-v5", 2, 2, 32, *limits, run_ahead=2),
        Soak("CartPole-v1", 2, 4, 32, *limits, run_ahead=1, leases=True, recovers=True),
        Soak("CartPole-v1", 2, 4, 32, *limits, run_ahead=1, feeds=True),
    ]  # fmt: skip
    end, next_harm, sizes, counts = time.monotonic() + 60 * minutes, 0.0, [], {}
    while (now := time.monotonic()) < end:
        victim = None
        if now >= next_harm:
            victim, next_harm = rng.choice(soaks), now + rng.uniform(0.5, 1.5) * EVERY
        for each in soaks:
            harmed = each.turn((lambda workers: harm(rng, workers)) if each is victim else None)
            if harmed:
                counts[harmed] = counts.get(harmed, 0) + 1
        sizes.append(psutil.Process().memory_info().rss)
    for each in soaks:
        stats = each.close()
        print(f"{each.name}: {each.transitions:,} transitions and {each.drawn:,} drawn rows verified, "
              f"{stats['restarts']} restarts, {each.lost} rollouts of environments lost and counted, "
              f"{sum(stats['env_restarts'])} environments made anew, "
              f"slowest rollout {each.slowest:.2f} s")  # fmt: skip
    half = len(sizes) // 2
    grown = max(sizes[half:]) - max(sizes[: max(half, 1)])
    print(f"{counts} in {minutes} minutes; resident memory grew by {grown / 1e6:.1f} MB in the second half")
    assert grown < 20e6, "resident memory grows"
    assert held() == before, f"left behind: {before} before, {held()} after"
    print("nothing is left: processes, descriptors and shared memory are as before")


def held():
    """What this process has: workers, descriptors, mappings of shared memory, and such memory with a name."""
    gc.collect()  # nothing of ours waits for it, but of libraries something may
    shared = [entry.path for entry in psutil.Process().memory_maps(grouped=False) if "memfd:" in entry.path]
    return worker_pids(), len(os.listdir("/proc/self/fd")), shared, named_memory(os.getpid())


EVENTS = {
    "an environment raises": Fault("raise", count=3, worker=1, generations=[0], error=RuntimeError("lost")),
    "a worker exits": Fault("exit", count=3, worker=1, generations=[0]),
    "a worker is killed (SIGKILL)": Fault("kill", count=3, worker=1, generations=[0]),
    "a worker hangs": Fault("hang", count=3, worker=1, generations=[0], ignore_sigterm=True),
}


def table():
    """Seconds until each failure is over, and until `close` is: medians of three."""
    Soak("CartPole-v1", 1, 1, 1, None).close()  # the fork server runs from here on
    print(f"timeout={TIMEOUT:g}\n\n| event | on_worker_failure | what you see | seconds | close |")
    print("| --- | --- | --- | --- | --- |")
    for event, fault in EVENTS.items():
        for policy in ("raise", "restart"):
            runs = [_over(fault, policy) for _ in range(3)]
            over, closed = (statistics.median(column) for column in zip(*[run[1:] for run in runs], strict=True))
            print(f"| {event} | {policy} | {runs[0][0]} | {over:.2f} | {closed:.2f} |", flush=True)
    for event, signum in ENDINGS.items():
        print(f"| {event} | | no worker is left | {statistics.median(_ended(signum) for _ in range(3)):.2f} | |")


def _over(fault, policy):
    batcher = RL_Batcher(
        100, create_agent, {"env_id": "CartPole-v1"}, create_faulty_envs, {"n_envs": 2, "faults": [fault]}, 2, 0,
        timeout=TIMEOUT, on_worker_failure=policy,
    )  # fmt: skip
    batcher.reset()
    seen = "its lengths are 0, the others' rollouts are kept; `stats()` counts it"
    started = time.monotonic()
    batcher.execute()
    try:
        batcher.get()
    except RuntimeError as error:
        seen = f"`{type(error).__name__}`"
    over = time.monotonic()
    batcher.close()
    return seen, over - started, time.monotonic() - over


FOLDER = os.path.dirname(os.path.abspath(__file__))
# Ctrl-C goes to the whole group, as a terminal sends it.
ENDINGS = {"the trainer is killed (SIGKILL)": signal.SIGKILL, "Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM}


def _ended(signum):
    """Seconds until a trainer and its workers have ended."""
    program = textwrap.dedent("""
        import signal
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs have it ignored
        from soak import Soak
        kept = Soak("CartPole-v1", 2, 8, 64, timeout=60.0)
        print(*[worker["pid"] for worker in kept.batcher.stats()["workers"]], flush=True)
        signal.pause()
    """)
    trainer = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=FOLDER,
        start_new_session=True,
    )  # fmt: skip
    workers = [psutil.Process(int(pid)) for pid in trainer.stdout.readline().split()]
    started = time.monotonic()
    if signum == signal.SIGINT:
        os.killpg(trainer.pid, signum)
    else:
        trainer.send_signal(signum)
    trainer.wait()
    while any(runs(worker) for worker in workers):  # not until they are reaped, which is not ours to do
        assert time.monotonic() < started + 30
    return time.monotonic() - started


def runs(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--timeout", type=float, default=TIMEOUT)
    parser.add_argument("--patience", type=float, default=PATIENCE, help="seconds for successors to start")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("rlstructs").setLevel(logging.ERROR)  # each failure is a warning there
    table() if arguments.table else soak(arguments.minutes, arguments.timeout, arguments.patience)
