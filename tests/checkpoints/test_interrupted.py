"""However a save or a training is interrupted, the last whole checkpoint remains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from processes import LIMIT

from rlstructs import Checkpoint

# A child is killed before its n-th operation on a file, for every n, until one comes through.
KILLED = r"""
import os, signal, sys
import torch
torch.set_num_threads(1)
from rlstructs import Checkpoint
from rlstructs.files import segments
from rlstructs.memories.torch import RandomMemory

segments.LEAST_BYTES = 64  # several files for few rows
OPERATIONS = {"open", "os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"}

def make():
    memory = RandomMemory(memory_size=20, num_envs=2, device="cpu", seed=0)
    memory.create_tensor("x", 3)
    return memory, {"n": 0}

def add(memory, extra):
    extra["n"] += 1
    memory.add_samples(x=torch.full((2, 3), float(extra["n"])))

def check(folder, steps):
    memory, extra = make()
    checkpoint = Checkpoint(folder, memory=memory, extra=extra)
    step = checkpoint.restore()
    held = memory.get_tensor_by_name("x")[:step, 0, 0].tolist()
    assert step in steps and extra["n"] == step and held == list(map(float, range(1, step + 1))), (step, extra, held)
    return checkpoint, memory, extra

folder = sys.argv[1]
memory, extra = make()
checkpoint = Checkpoint(folder, memory=memory, extra=extra, keep=1)
for _ in range(3):
    add(memory, extra)
checkpoint.save(3)
checkpoint.close()
n, ended = 0, -signal.SIGKILL
while ended:
    n += 1
    pid = os.fork()
    if not pid:
        checkpoint, memory, extra = check(folder, range(100))
        checkpoint._keep = 1
        add(memory, extra)
        left = [n]
        def kill_at(event, arguments):
            if event in OPERATIONS and not (event == "open" and arguments[2] == os.O_RDONLY):
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(kill_at)
        checkpoint.save(extra["n"])
        os._exit(0)
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert ended in (0, -signal.SIGKILL), ended
    check(folder, range(3, 4 + n))
left_over = [name for name in os.listdir(folder) if name not in ("latest", "lock") and not name[-1].isdigit()]
assert not left_over and len(os.listdir(folder)) == 3, os.listdir(folder)
print(n)
"""

STOPPED = r"""
import sys, time
import gymnasium
from rlstructs import Checkpoint, GymEnvInf, RandomAgent, RL_Batcher

def create_env(n_envs, seed):
    return GymEnvInf([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed)

def create_agent():
    return RandomAgent(gymnasium.spaces.Discrete(2))

how, folder = sys.argv[1:]
progress = {"n": 0}
checkpoint = Checkpoint(folder, extra=progress)
with RL_Batcher(8, create_agent, {}, create_env, {"n_envs": 1}, n_processes=1, seeds=0) as batcher:
    batcher.reset()
    checkpoint.save(0)
    with checkpoint.preemption(deadline=0.2 if how == "late" else 60.0):
        print("ready", flush=True)
        while True:
            batcher.execute()
            batcher.get()
            progress["n"] += 1
            while how == "late":
                time.sleep(60)
            checkpoint.save_if_due(progress["n"])
"""

# A program gets a signal in the block, leaves that by an error, and waits for the end of the deadline's thread.
LEFT = r"""
import _thread, os, signal, sys
from rlstructs import Checkpoint

ends, n_threads = sys.argv[1] == "ends", _thread._count()
try:
    with Checkpoint(None).preemption(deadline=0.1 if ends else 60.0):
        os.kill(os.getpid(), signal.SIGTERM)
        while _thread._count() == n_threads:
            os.sched_yield()
        raise SystemExit if ends else ValueError
except (ValueError, SystemExit):
    while _thread._count() > n_threads:
        os.sched_yield()
"""


def test_a_save_that_is_killed_before_any_operation_leaves_the_last_checkpoint(subprocess_env, tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=subprocess_env)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


@pytest.mark.parametrize(("how", "code"), [("in time", 0), ("late", 128 + signal.SIGTERM)])
def test_a_program_that_is_told_to_stop_saves_within_its_deadline_or_ends(how, code, subprocess_env, tmp_path):
    command = [sys.executable, "-c", STOPPED, how, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=subprocess_env, start_new_session=True) as program:
        assert program.stdout.readline() == b"ready\n"
        os.killpg(program.pid, signal.SIGTERM)  # the workers too
        assert program.wait(LIMIT) == code
    progress = {"n": None}
    step = Checkpoint(tmp_path, extra=progress).restore()
    assert progress["n"] == step and (step > 0) == (how == "in time")


@pytest.mark.parametrize(("how", "code"), [("goes on", 0), ("ends", 128 + signal.SIGTERM)])
def test_a_program_that_goes_on_after_an_error_has_no_deadline_any_more(how, code, subprocess_env):
    done = subprocess.run([sys.executable, "-c", LEFT, how], capture_output=True, timeout=LIMIT, env=subprocess_env)
    assert done.returncode == code, done.stderr
