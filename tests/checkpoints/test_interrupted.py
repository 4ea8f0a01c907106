"""However a save or a training is interrupted, the last whole checkpoint remains."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest
from processes import LIMIT

from rlstructs import Checkpoint
from rlstructs.checkpoints.folder import CheckpointFolder

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
    memory = RandomMemory(memory_size=60, num_envs=2, device="cpu", seed=0)
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

# A save is interrupted, or fails, before its n-th operation on a file, for every n; each time the next one counts.
INTERRUPTED = r"""
import sys
import torch
torch.set_num_threads(1)
from rlstructs import Checkpoint
from rlstructs.checkpoints import folder
from rlstructs.files import segments
from rlstructs.memories.torch import RandomMemory

segments.LEAST_BYTES, folder.LOCK_DELAY = 64, 0.0
OPERATIONS = {"open", "os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "fcntl.flock"}

def make():
    memory = RandomMemory(memory_size=20, num_envs=2, device="cpu", seed=0)
    memory.create_tensor("x", 3)
    return memory, {"n": 0}

def add():
    extra["n"] += 1
    memory.add_samples(x=torch.full((2, 3), float(extra["n"])))

left = [0]
def fail(event, _):
    if event in OPERATIONS and left[0]:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt if sys.argv[2] == "KeyboardInterrupt" else OSError(5, "it fails")

memory, extra = make()
sys.addaudithook(fail)
n, is_over = 0, False
while not is_over:
    checkpoint = Checkpoint(sys.argv[1], memory=memory, extra=extra, keep=1)
    checkpoint.restore()
    add()
    checkpoint.save(extra["n"])
    if n % 2:
        checkpoint.close()  # the lock is taken anew
    add()
    n += 1
    left[0] = n
    try:
        checkpoint.save(extra["n"])
    except (KeyboardInterrupt, OSError):
        pass
    is_over, left[0] = left[0] > 0, 0
    add()
    checkpoint.save(extra["n"])
    restored, its_extra = make()
    assert Checkpoint(sys.argv[1], memory=restored, extra=its_extra).restore() == its_extra["n"] == extra["n"]
    assert torch.equal(*(each.sample_all(["x"])[0][0] for each in (restored, memory)))
    checkpoint.close()
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

# A program gets a signal in the block, leaves that by an error, enters it again or does not, and waits for the end of
# the deadline's thread.
LEFT = r"""
import _thread, contextlib, os, signal, sys
from rlstructs import Checkpoint

how, n_threads, checkpoint = sys.argv[1], _thread._count(), Checkpoint(None)
try:
    with checkpoint.preemption(deadline={"ends": 0.1, "goes on": 60.0, "enters it again": 4.0}[how]):
        os.kill(os.getpid(), signal.SIGTERM)
        while _thread._count() == n_threads:
            os.sched_yield()
        raise ValueError if how == "goes on" else SystemExit
except (ValueError, SystemExit):
    with checkpoint.preemption() if how == "enters it again" else contextlib.nullcontext():
        while _thread._count() > n_threads:
            os.sched_yield()
"""


def test_a_save_that_is_killed_before_any_operation_leaves_the_last_checkpoint(subprocess_env, tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=subprocess_env)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "OSError"])
def test_a_save_that_is_interrupted_at_any_operation_is_followed_by_the_next(error, subprocess_env, tmp_path):
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "runs"), error]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=subprocess_env)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 40


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_run_whose_save_was_interrupted_as_it_counted_is_saved_at_a_signal(error, tmp_path, monkeypatch):
    def interrupted(folder, new, publish=CheckpointFolder.publish):
        publish(folder, new)
        raise error

    progress = {"n": 1}
    checkpoint = Checkpoint(tmp_path, extra=progress)
    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(CheckpointFolder, "publish", interrupted)
        checkpoint.save(1)
    progress["n"] = 2
    with pytest.raises(SystemExit), checkpoint.preemption(None):
        os.kill(os.getpid(), signal.SIGTERM)
        checkpoint.save_if_due(2, every=1e9)
    checkpoint.close()
    progress["n"] = 0
    assert Checkpoint(tmp_path, extra=progress).restore() == progress["n"] == 2


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


@pytest.mark.parametrize(("how", "code"), [("goes on", 0), ("enters it again", 0), ("ends", 128 + signal.SIGTERM)])
def test_a_program_that_goes_on_after_an_error_has_no_deadline_any_more(how, code, subprocess_env):
    done = subprocess.run([sys.executable, "-c", LEFT, how], capture_output=True, timeout=LIMIT, env=subprocess_env)
    assert done.returncode == code, done.stderr


@pytest.mark.parametrize("how", ["saves and ends", "ends"])
def test_a_signal_of_an_earlier_block_does_not_end_a_later_one(how, tmp_path):
    checkpoint = Checkpoint(tmp_path, extra={"n": 1})
    with contextlib.suppress(SystemExit), checkpoint.preemption():
        os.kill(os.getpid(), signal.SIGTERM)
        if how == "saves and ends":
            checkpoint.save_if_due(1, every=1e9)
    assert checkpoint.stop_requested  # for the program to look at
    with checkpoint.preemption():
        assert not checkpoint.stop_requested and not checkpoint.save_if_due(2, every=1e9)
        with pytest.raises(SystemExit), checkpoint.preemption():
            os.kill(os.getpid(), signal.SIGTERM)
            with checkpoint.preemption():  # the signal was one of this block too
                checkpoint.save_if_due(3, every=1e9)
    assert checkpoint.steps[-1] == 3


def test_a_block_that_cannot_handle_a_signal_leaves_the_handlers(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(OSError, match="Invalid argument"), Checkpoint(None).preemption(signals=(15, 9)):
        pass
    assert signal.getsignal(signal.SIGTERM) == before
