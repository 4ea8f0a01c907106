"""What a small machine allows is enough, or a clear error says what is not."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
import threading

import psutil
import pytest
from helpers import count_batcher, rollout
from processes import LIMIT, Deadline, worker_pids

from rlstructs import ClosedError

pytestmark = pytest.mark.usefixtures("quick_programs")

WIDE = """
import os, resource, sys
import torch
from helpers import Count, Counting
from rlstructs import GymEnvInf, RL_Batcher

class Wide(Counting):
    def __call__(self, *arguments, **named):
        output, state = super().__call__(*arguments, **named)
        for n in range(40):
            output.set(f"column{n}", torch.zeros(output.n_elems()))
        return output, state

def batcher(n_workers, method):
    return RL_Batcher(5, Wide, {}, lambda seed: GymEnvInf([Count(3)], seed), {}, n_workers, 0, start_method=method)
"""


def run(text, env, **options):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WIDE + textwrap.dedent(text)],
        capture_output=True, text=True, env=env, timeout=LIMIT, **options,
    )  # fmt: skip


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_64_descriptors_are_enough_for_8_workers_with_40_columns(method, subprocess_env):
    done = run(
        f"""
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        with batcher(8, {method!r}) as made:
            made.reset()
            for _ in range(3):
                made.execute()
                print(made.get()[1])
        """,
        subprocess_env,
    )
    assert done.stdout.split() == ["8"] * 3, done.stderr


def test_32_descriptors_are_an_error_that_names_the_limit_and_the_need(subprocess_env):
    done = run(
        """
        resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
        try:
            batcher(8, None)
        except Exception as error:
            print(type(error).__name__, error)
        with batcher(2, None) as made:  # and nothing is lost
            made.reset()
        """,
        subprocess_env,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("WorkerError 8 workers need 44 file descriptors, ")
    assert "of 32 are left: raise the limit RLIMIT_NOFILE (ulimit -n), or start fewer workers" in done.stdout


@pytest.mark.quick
def test_shared_memory_has_no_name(subprocess_env):
    """Where there is a small /dev/shm it does not lie there."""
    done = run(
        """
        from processes import named_memory
        with batcher(2, None) as made:
            made.reset()
            made.execute()
            made.get()
            print(named_memory(os.getpid(), *(worker["pid"] for worker in made.stats()["workers"])))
        """,
        subprocess_env,
    )
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.root
def test_4_megabytes_of_dev_shm_hold_an_arena_of_20(subprocess_env):
    """The program gets a /dev/shm of its own."""
    text = """
        class Big(Counting):
            def __call__(self, *arguments, **named):
                output, state = super().__call__(*arguments, **named)
                output.set("big", torch.ones(output.n_elems(), 10_000))
                return output, state
        with RL_Batcher(300, Big, {}, lambda seed: GymEnvInf([Count(500)], seed), {}, 2, 0) as made:
            made.reset()
            made.execute()
            print(made.nbytes > 20 * 2**20, made.get()[0].trajectories["action/big"].sum().item(),
                  os.statvfs("/dev/shm").f_blocks * 4096)
    """
    program = [sys.executable, "-W", "ignore", "-c", WIDE + textwrap.dedent(text)]
    mount = 'mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "$@"'
    if subprocess.run(["unshare", "-m", "sh", "-c", mount, "sh", "true"], capture_output=True).returncode:
        pytest.skip("no file system can be mounted")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, "sh", *program],
        capture_output=True, text=True, env=subprocess_env, timeout=LIMIT,
    )  # fmt: skip
    assert done.stdout.split("\n")[0] == f"True 6000000.0 {4 * 2**20}", done.stderr


def test_slots_beyond_the_memory_limit_are_refused_before_the_first_write(subprocess_env):
    """What is asked for is far more than any machine has."""
    done = run(
        """
        try:
            RL_Batcher(10**9, Wide, {}, lambda seed: GymEnvInf([Count(3)], seed), {}, 1, 0)
        except MemoryError as error:
            print(type(error).__name__, error)
        """,
        subprocess_env,
    )
    assert done.stdout.startswith("OutOfMemoryError"), done.stderr
    assert "bytes are needed" in done.stdout


@pytest.mark.parametrize(("limit", "said"), [("AS", "Cannot allocate memory"), ("FSIZE", "File too large")])
def test_slots_beyond_a_limit_of_the_process_are_refused_before_the_first_write(limit, said, subprocess_env):
    """A gigabyte, which the machine has."""
    done = run(
        f"""
        import psutil, signal
        def make(n_timesteps):
            return RL_Batcher(n_timesteps, Wide, {{}}, lambda seed: GymEnvInf([Count(3)], seed), {{}}, 1, 0)
        class Big(Counting):
            def __call__(self, *arguments, **named):
                output, state = super().__call__(*arguments, **named)
                output.set("big", torch.ones(output.n_elems(), 1_000_000))
                return output, state
        Wide = Counting
        make(5).close()
        Wide = Big
        taken = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_{limit}, ({{"AS": taken + (1 << 28), "FSIZE": 1 << 20}}[{limit!r}],) * 2)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            make(250)
        except MemoryError as error:
            print(type(error).__name__, error)
        print(psutil.Process().memory_info().shared < 1 << 28, len(psutil.Process().children()) < 3)
        """,
        subprocess_env,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    assert lines[0].startswith("OutOfMemoryError shared memory: 1,000,") and f"({said})" in lines[0], done.stderr
    assert lines[1] == "True True"


@pytest.mark.slow
def test_64_workers_on_two_cores():
    before = worker_pids()
    with count_batcher([[3]] * 64, 4, autoreset=True) as batcher:
        batcher.reset()
        for _ in range(3):
            trajectories, n_running = rollout(batcher)
            assert n_running == 64 and trajectories.lengths.tolist() == [4] * 64
    assert worker_pids() == before


PHASES = ("start", "reset", "execute", "get", "update", "close")


@pytest.mark.parametrize(
    ("how", "phase", "method"),
    # Within a call of ours nothing of the program's own can raise.
    [
        *itertools.product(["SIGTERM", "SIGINT", "SIGKILL"], PHASES, ["forkserver"]),
        *itertools.product(["SIGINT"], PHASES, ["spawn", "fork"]),
        *itertools.product(["SIGKILL"], PHASES, ["fork"]),
        *itertools.product(["SIGTERM"], ["execute", "get", "close"], ["spawn", "fork"]),
        *itertools.product(["raise"], ["execute"], ["forkserver", "spawn", "fork"]),
    ],
)
def test_a_program_that_ends_in_any_phase_leaves_no_worker(how, phase, method, subprocess_env):
    """Ctrl-C goes to the whole group, as a terminal sends it."""
    text = f"""
    import signal, threading
    class Slow(Count):
        def step(self, action):
            if self.steps == 2 and {phase!r} in ("execute", "get"):
                signal.pause()
            return super().step(action)
        def reset(self, **arguments):
            if {phase!r} == "reset":
                told()
                signal.pause()
            return super().reset(**arguments)
        def close(self):
            if {phase!r} == "close":
                told()
                signal.pause()
    class Agent(Counting):
        def update(self, info):
            told()
            signal.pause()
    def told():
        os.write(1, b"ready\\n")
    def create_env(seed):
        if {phase!r} == "start":
            told()
            signal.pause()
        return GymEnvInf([Slow(9)], seed)
    made = RL_Batcher(5, Agent, {{}}, create_env, {{}}, 2, 0, start_method={method!r})
    os.write(1, " ".join(map(str, made._engine.pool.pids)).encode() + b"\\n")
    made.reset()
    if {phase!r} == "close":
        made.close()
    made.execute() if {phase!r} != "update" else made.update(1)
    if {how!r} == "raise":
        input()  # or they could be gone before they are looked at
        raise KeyError("of the trainer")
    if {phase!r} == "execute":
        told()
        signal.pause()
    threading.Timer(0.0, told).start()
    made.get()
    """
    program = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", WIDE + textwrap.dedent(text)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=subprocess_env,
        start_new_session=True,
    )  # fmt: skip
    assert program.stdout is not None and program.stderr is not None
    workers = [] if phase == "start" else [psutil.Process(int(pid)) for pid in program.stdout.readline().split()]
    if how != "raise":
        assert program.stdout.readline() == b"ready\n"
        if phase == "start":  # and what started them
            workers = psutil.Process(program.pid).children(recursive=True)
            assert workers
        if how == "SIGINT":
            os.killpg(program.pid, 2)
        else:
            os.kill(program.pid, {"SIGTERM": 15, "SIGKILL": 9}[how])
    _, errors = program.communicate(b"\n", timeout=LIMIT)
    _, alive = psutil.wait_procs(workers, timeout=LIMIT)
    assert not alive
    if how == "raise":
        assert b"KeyError: 'of the trainer'" in errors
    if how == "SIGINT":
        assert b"KeyboardInterrupt" in errors


def test_close_from_another_thread_ends_a_get_that_waits():
    with count_batcher([[3], [3]], 10**6, autoreset=True) as batcher:
        batcher.reset()
        batcher.execute()
        failures = []

        def wait():
            try:
                batcher.get()
            except BaseException as error:
                failures.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        while not batcher._engine.pool._exchange.watch._n_waiting:  # or it would hear of it before it waits
            assert waiting.is_alive()
        with Deadline(10.0):
            batcher.close()
            waiting.join(LIMIT)
        assert not waiting.is_alive()
        assert len(failures) == 1 and isinstance(failures[0], ClosedError)
        batcher.close()


def test_an_environment_that_starts_children_of_its_own(subprocess_env):
    done = run(
        """
        import subprocess
        class Parent(Count):
            def __init__(self):
                super().__init__(3)
                reads = [sys.executable, "-c", "import sys; sys.stdin.read()"]
                self.child = subprocess.Popen(reads, stdin=subprocess.PIPE)
            def close(self):
                self.child.stdin.close()
                print(self.child.wait(), flush=True)
        with RL_Batcher(5, Counting, {}, lambda seed: GymEnvInf([Parent()], seed), {}, 2, 0) as made:
            made.reset()
            made.execute()
            made.get()
        """,
        subprocess_env,
    )
    assert done.stdout.split() == ["0", "0"], done.stderr
