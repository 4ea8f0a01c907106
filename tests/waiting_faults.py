"""Environments in threads that hang, raise, reset slowly or exit, at random: an error or a restart, and nothing left.

    python tests/waiting_faults.py RUNS

runs each kind of fault so many times, with random settings. Each environment has a process and a socket of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import gymnasium
import numpy as np
from processes import Deadline, wait_until, wait_until_gone
from soak import held

from rlstructs import EnvTimeout, GymEnvThreads, RandomAgent, RL_Batcher
from rlstructs.workers import WorkerCrashed, WorkerTimeout

# Seconds: of a step; and of a worker, which has to start in them, too.
STEP_TIMEOUT, TIMEOUT = 0.4, 15.0


def hang(folder):
    with open(Path(folder, "gate"), "rb"):  # until somebody opens it when all is over, so that this thread ends
        pass


def fail(folder):
    raise RuntimeError("told to fail")


# What happens, in a step or, with "reset", in a reset.
FAULTS = {
    "raise": fail,
    "raise in reset": fail,
    "hang": hang,
    "hang in reset": hang,
    "hang in C": lambda folder: ctypes.CDLL(None).pause(),
    "slow reset": lambda folder: time.sleep(3 * STEP_TIMEOUT),
    "hold the interpreter": lambda folder: ctypes.PyDLL(None).pause(),
    "exit": lambda folder: sys.exit(3),
    "exit at once": lambda folder: os._exit(3),
}
# Those that end their worker, or stop all of it: they cannot be in this process.
ENDS = ("hold the interpreter", "exit", "exit at once")
LATE = ("hang", "hang in reset", "hang in C", "slow reset")


class Fragile(gymnasium.Env):
    """Has a process and a socket; the first of all that comes to its fault has it, and removes the file `fault`."""

    observation_space = gymnasium.spaces.Box(0, 1e9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, kind, folder, at):
        self.kind, self.folder, self.at, self.n_steps, self.n_resets = kind, folder, at, 0, 0
        self.process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        Path(folder, "pids", str(self.process.pid)).touch()
        self.sockets = socket.socketpair()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n_resets += 1
        if "reset" in self.kind and self.n_resets == self.at:
            self.meet_fault()
        return self.show(), {}

    def step(self, action):
        self.n_steps += 1
        if "reset" not in self.kind and self.n_steps == self.at:
            self.meet_fault()
        return self.show(), 1.0, self.n_steps % 3 == 0, False, {}

    def close(self):
        self.process.kill()
        self.process.communicate()
        for each in self.sockets:
            each.close()

    def meet_fault(self):
        with contextlib.suppress(FileNotFoundError):
            Path(self.folder, "fault").unlink()
            FAULTS[self.kind](self.folder)

    def show(self):
        return np.array([self.n_steps], np.float32)


def create_env(n_envs, seed, kind, folder, at, **pace):
    envs = [Fragile(kind, folder, at + k) for k in range(n_envs)]
    # Others may take longer than that where programs wait for a core.
    return GymEnvThreads(envs, seed, step_timeout=STEP_TIMEOUT if kind in LATE else None, **pace)


def run(kind, rng):
    """Collects until the fault has shown itself and is over; raises unless it ended as its settings say."""
    n_processes = rng.choice([1, 2] if kind in (*ENDS, "hang in C") else [0, 1, 2])
    on_env, on_timeout, on_worker = (rng.choice(["raise", "restart"]) for _ in range(3))
    on_worker = on_worker if n_processes else "raise"
    pace = {"deadline": rng.choice([None, 0.05]), "on_env_timeout": on_timeout, "at": rng.randint(2, 9)}
    settings = {"on_env_failure": on_env, "on_worker_failure": on_worker, "run_ahead": rng.choice([0, 1])}
    wanted = "raise" if on_worker == "raise" else "restart"
    if kind not in ENDS and (on_env == "restart" or (kind in LATE and on_timeout == "restart")):
        wanted = "new environment"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "fault").touch()
        Path(folder, "pids").mkdir()
        os.mkfifo(gate := Path(folder, "gate"))
        env_args = {"n_envs": rng.randint(1, 4), "kind": kind, "folder": folder, **pace}
        with Deadline(4 * TIMEOUT):
            found = collect(n_processes, env_args, settings)
        os.close(os.open(gate, os.O_RDWR))
        assert found == wanted, f"{found}, expected {wanted}: {n_processes} workers, {env_args}, {settings}"
        wait_until_gone(map(int, os.listdir(Path(folder, "pids"))))
    return found


def collect(n_processes, env_args, settings):
    """Collects until the fault is over; how it ended."""
    errors = EnvTimeout, RuntimeError, WorkerCrashed, WorkerTimeout, SystemExit
    with contextlib.closing(
        RL_Batcher(
            4, lambda: RandomAgent(Fragile.action_space), {}, create_env, env_args, n_processes, 0, timeout=TIMEOUT,
            **settings,
        )
    ) as batcher:  # fmt: skip
        try:
            batcher.reset()
            while True:
                batcher.execute()
                batcher.get()
                stats = batcher.stats()
                if sum(stats["env_restarts"]) or stats["restarts"]:
                    break
        except errors:
            return "raise"
        batcher.execute()
        batcher.get()
        return "new environment" if sum(stats["env_restarts"]) else "restart"


def left():
    """What a run may have left in this process."""
    return held(), threading.active_count()


def main(n_runs):
    run("raise", random.Random(0))  # starts what stays
    before = left()
    for kind in FAULTS:
        ends = []
        for k in range(n_runs):
            ends.append(run(kind, random.Random(f"{kind} {k}")))
            wait_until(lambda: left() == before)
        counts = ", ".join(f"{name} {ends.count(name)}" for name in sorted(set(ends)))
        sys.stdout.write(f"{kind}: {counts}\n")
        sys.stdout.flush()
    sys.stdout.write("nothing is left: processes, threads and descriptors are as before\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
