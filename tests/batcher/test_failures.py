"""What fails ends in an error that says what failed, soon, and leaves nothing behind."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
from collections import Counter

import numpy as np
import psutil
import pytest
import torch
from helpers import Count, Counting, count_batcher, create_gym, rollout
from processes import LIMIT, Deadline, exists, named_memory, wait_until, worker_pids

from rlstructs import (
    ClosedError,
    DictTensor,
    GymEnvInf,
    GymVectorEnv,
    OutOfMemoryError,
    RemoteTraceback,
    RL_Agent,
    RL_Batcher,
    SharedVectorEnv,
    StateError,
    WorkerCrashed,
    WorkerError,
    WorkerTimeout,
)
from rlstructs.batcher.transport import Batch
from rlstructs.testing import Fault, create_faulty_envs
from rlstructs.workers.pool import CLOSE_DELAY
from rlstructs.workers.process import WorkerProcess

pytestmark = pytest.mark.usefixtures("quick_programs")

# Seconds in which a failure has to arrive, and `close` to return: the contract's own numbers.


class SimulatorError(Exception):
    """A user's own exception."""


class Failing(Count):
    """Raises in one of its methods, in the environments of one seed."""

    def __init__(self, where, armed):
        if armed and where == "constructor":
            raise SimulatorError("lost in constructor")
        super().__init__(100)
        self.where, self.armed = where, armed

    def _fail(self, where):
        if self.armed and self.where == where:
            raise SimulatorError(f"lost in {where}")

    def reset(self, **arguments):
        self._fail("reset")
        return super().reset(**arguments)

    def step(self, action):
        if self.steps == 3:
            self._fail("step")
            if self.armed and self.where == "hang":
                signal.pause()
            if self.armed and self.where == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)

    def close(self):
        self._fail("close")


class FailingAgent(Counting):
    def __init__(self, where):
        super().__init__()
        self.where, self.calls = where, 0
        if where == "constructor":
            raise SimulatorError("lost in constructor")

    def initial_state(self, agent_info, B):
        if self.where == "initial_state":
            raise SimulatorError("lost in initial_state")
        return super().initial_state(agent_info, B)

    def __call__(self, *arguments, **named):
        self.calls += 1
        if self.where == "call" and self.calls == 3:
            raise SimulatorError("lost in call")
        return super().__call__(*arguments, **named)

    def update(self, info):
        raise SimulatorError("lost in update")

    def close(self):
        if self.where == "close":
            raise SimulatorError("lost in close")


def failing(where, **arguments):
    """Two workers of two environments; the second worker's fail."""
    return RL_Batcher(
        10, Counting, {}, lambda seed: GymEnvInf([Failing(where, seed >= 10) for _ in range(2)], seed), {}, 2,
        [0, 10], **arguments,
    )  # fmt: skip


def run_through(where, **arguments):
    with failing(where, **arguments) as batcher, Deadline():  # a start may take longer
        batcher.reset()
        rollout(batcher)


@pytest.mark.parametrize("where", ["constructor", "reset", "step", "close"])
def test_what_an_environment_raises_arrives_as_it_is(where, start_method):  # CV76, CV77, R36
    before = worker_pids()
    with pytest.raises(SimulatorError, match=rf"^lost in {where}(\n|$)") as caught:
        run_through(where, start_method=start_method)
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteTraceback) and cause.worker_index == 1
    assert f"SimulatorError: lost in {where}" in str(cause) and "worker 1" in str(cause)
    assert 'test_failures.py", line' in str(cause)
    assert worker_pids() == before


@pytest.mark.parametrize("where", ["constructor", "initial_state", "call", "update", "close"])
def test_what_an_agent_raises_arrives_as_it_is(where, start_method):
    with (
        pytest.raises(SimulatorError, match=f"lost in {where}") as caught,
        RL_Batcher(
            10,
            FailingAgent,
            {"where": where},
            create_gym,
            {"env_id": "CartPole-v1", "n_envs": 1},
            2,
            0,
            start_method=start_method,
        ) as batcher,
        Deadline(),
    ):  # fmt: skip - a start may take longer
        batcher.reset()
        if where == "update":
            batcher.update(None)
        batcher.execute()
        if where == "call":
            batcher.get()
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteTraceback) and cause.worker_index in (0, 1)
    assert "SimulatorError" in str(cause) and f"worker {cause.worker_index}" in str(cause)


class Exhausted(Count):
    def step(self, action):
        raise StopIteration("no data is left")


@pytest.mark.parametrize("n_processes", [0, 1])
def test_an_iteration_that_stops_is_an_exception_as_any_other(n_processes):
    with RL_Batcher(10, Counting, {}, lambda seed: GymEnvInf([Exhausted(5)], seed), {}, n_processes, 0) as batcher:
        batcher.reset()
        with pytest.raises(StopIteration, match="no data is left"):
            rollout(batcher)


class Stopped(Count):
    """Raises a RuntimeError whose cause is a StopIteration, of its own or of a generator of its own."""

    def __init__(self, where):
        super().__init__(5)
        self.where = where

    def step(self, action):
        if self.where == "generator":
            next(self._draw())
        try:
            next(iter(()))
        except StopIteration as error:
            raise RuntimeError("the data set is empty") from error

    def _draw(self):
        yield next(iter(()))


@pytest.mark.parametrize("where", ["environment", "generator"])
@pytest.mark.parametrize("n_processes", [0, 1])
@pytest.mark.parametrize("n_groups", [1, 2])
def test_an_error_whose_cause_is_an_iteration_that_stopped_arrives_as_it_is(where, n_processes, n_groups):
    def create_env(seed):
        if n_groups == 1:
            return GymEnvInf([Stopped(where)], seed)
        return GymVectorEnv(SharedVectorEnv([lambda: Stopped(where)] * 2, 0, n_groups=n_groups), seed)

    words = {"environment": "the data set is empty", "generator": "generator raised StopIteration"}[where]
    with RL_Batcher(10, Counting, {}, create_env, {}, n_processes, 0) as batcher:
        batcher.reset()
        with pytest.raises(RuntimeError, match=words) as caught:
            rollout(batcher)
    assert n_processes or isinstance(caught.value.__cause__, StopIteration)


@pytest.mark.parametrize("n_processes", [0, 1])
def test_what_a_rollout_raises_comes_with_get(n_processes):
    def create_env(seed):
        return GymEnvInf([Failing("step", True)], seed)

    with RL_Batcher(10, Counting, {}, create_env, {}, n_processes, 0) as batcher:
        batcher.reset()
        batcher.execute()
        with pytest.raises(SimulatorError, match="lost in step"):
            batcher.get()


def test_after_a_failure_every_call_says_so_and_close_is_quick():
    batcher = failing("step")
    batcher.reset()
    batcher.execute()
    with pytest.raises(SimulatorError):
        batcher.get()
    for call in (batcher.reset, batcher.execute, batcher.get, lambda: batcher.get(False), lambda: batcher.update(1)):
        with pytest.raises(StateError, match="a worker failed before, close the batcher") as caught:
            call()
        assert isinstance(caught.value.__cause__, SimulatorError)
    with Deadline():
        batcher.close()
    batcher.close()


def test_the_users_error_is_not_hidden_by_what_closing_raises():
    with pytest.raises(KeyError, match="of the trainer"), failing("close") as batcher:
        batcher.reset()
        raise KeyError("of the trainer")


@pytest.mark.parametrize("n_processes", [0, 1])
def test_the_debugging_batcher_raises_the_same(n_processes):
    with (
        pytest.raises(SimulatorError, match="lost in step"),
        RL_Batcher(
            10, Counting, {}, lambda seed: GymEnvInf([Failing("step", True)], seed), {}, n_processes, [0]
        ) as batcher,
    ):
        batcher.reset()
        rollout(batcher)


@pytest.mark.parametrize("phase", ["idle", "polling", "stepping"])
def test_a_killed_worker_is_an_error_that_says_so(phase, start_method):  # CV78
    with failing("hang", start_method=start_method) as batcher:
        batcher.reset()
        if phase != "idle":
            batcher.execute()
        pid = batcher._engine.pool.pids[1]
        os.kill(pid, signal.SIGKILL)
        with Deadline(), pytest.raises(WorkerCrashed, match=rf"worker 1 \(pid {pid}\) is gone: .*SIGKILL") as caught:
            if phase == "polling":
                while True:
                    batcher.get(blocking=False)
            batcher.get() if phase == "stepping" else batcher.execute() or batcher.get()
        assert caught.value.exitcode == -signal.SIGKILL
        with Deadline():
            batcher.close()


def test_a_worker_that_kills_itself_in_a_step_is_an_error():
    with Deadline(), pytest.raises(WorkerCrashed, match="last request: rollout"):
        run_through("kill")


class EndingAgent(Counting):
    """Ends the process that it is in."""

    def __init__(self, where, how):
        super().__init__()
        self.where, self.how = where, how

    def _end(self, where):
        if self.where == where:
            os.kill(os.getpid(), signal.SIGKILL) if self.how == "kill" else os._exit(3)

    def __call__(self, *arguments, **named):
        self._end("call")
        return super().__call__(*arguments, **named)

    def update(self, info):
        self._end("update")


WORDS = {"kill": "exit code -9, killed by SIGKILL", "exit": "exit code 3"}
# Worker 0 tries the agent as it starts.
REQUESTS = {"init": "build", "reset": "reset", "step": "rollout", "call": "build", "update": "update"}


@pytest.mark.parametrize(
    ("how", "where", "start_method"),
    [*itertools.product(WORDS, [*REQUESTS, "close"], ["forkserver"]),
     *itertools.product(["kill"], ["init", "update", "close"], ["spawn"]),
     *itertools.product(["kill", "exit"], ["step", "close"], ["fork"])],
)  # fmt: skip
def test_a_worker_may_end_in_any_phase(how, where, start_method):
    """Also in its constructor, in `update` and in `close`; of what it had to say no more is expected."""
    before = worker_pids()
    in_env = where in ("init", "reset", "step", "close")
    env_args = {"n_envs": 2, "faults": [Fault(how, at=where, worker=1)] if in_env else []}

    def run():
        with (
            RL_Batcher(
                4,
                EndingAgent,
                {"where": where, "how": how},
                create_faulty_envs,
                env_args,
                2,
                0,
                start_method=start_method,
            ) as batcher,
            Deadline(),
        ):  # a start may take longer
            batcher.reset()
            batcher.update(None)
            rollout(batcher)

    if where == "close":
        run()
    else:
        gone = rf"^worker \d \(pid \d+\) is gone: {WORDS[how]}; last request: {REQUESTS[where]}"
        with pytest.raises(WorkerCrashed, match=gone):
            run()
    assert worker_pids() == before


@pytest.mark.parametrize("policy", ["raise", "restart"])
@pytest.mark.parametrize("phase", ["idle", "rollout"])
def test_the_fork_server_may_be_killed(policy, phase, subprocess_env):
    """Its workers end with it: they are an error, or replaced by those of another server."""
    text = textwrap.dedent(f"""
        import psutil
        from helpers import Counting, rollout
        from processes import exists
        from rlstructs import RL_Batcher, WorkerCrashed
        from rlstructs.testing import create_faulty_envs

        with RL_Batcher(
            4, Counting, {{}}, create_faulty_envs, {{"n_envs": 1}}, 2, 0, on_worker_failure={policy!r}
        ) as batcher:
            batcher.reset()
            rollout(batcher)
            pids = batcher._engine.pool.pids
            server = psutil.Process(psutil.Process(pids[0]).ppid())
            if {phase!r} == "rollout":
                batcher.execute()
            server.kill()
            psutil.wait_procs([psutil.Process(pid) for pid in pids if exists(pid)], 5)
            try:
                if {phase!r} == "idle":
                    batcher.execute()
                batcher.get()
                rollout(batcher)  # where the one before was over sooner than the server, this one is lost
                print(rollout(batcher)[0].lengths.tolist(), batcher.stats()["restarts"])
            except WorkerCrashed:
                print("WorkerCrashed")
        print(any(map(exists, pids)))
    """)
    done = subprocess.run(
        [sys.executable, "-c", text], env=subprocess_env, timeout=LIMIT, capture_output=True, text=True
    )
    said = "WorkerCrashed" if policy == "raise" else "[4, 4] 2"
    assert done.stdout.splitlines() == [said, "False"], done.stderr


def test_a_fork_server_that_hangs_is_an_error_after_the_timeout_and_another_takes_its_place(subprocess_env):
    text = textwrap.dedent("""
        import psutil
        from helpers import Counting, rollout
        from processes import Deadline
        from rlstructs import RL_Batcher, WorkerTimeout
        from rlstructs.testing import create_faulty_envs

        def batcher(timeout=None):
            return RL_Batcher(4, Counting, {}, create_faulty_envs, {"n_envs": 1}, 1, 0, timeout=timeout)

        with batcher() as first:
            server = psutil.Process(psutil.Process(first._engine.pool.pids[0]).ppid())
            server.suspend()
            try:
                with Deadline():
                    batcher(timeout=1.0)
            except WorkerTimeout as error:
                print(error)
            with batcher(timeout=600.0) as second:
                for made in (first, second):
                    made.reset()
                    print(rollout(made)[0].lengths.tolist())
            server.resume()
    """)
    done = subprocess.run(
        [sys.executable, "-c", text], env=subprocess_env, timeout=LIMIT, capture_output=True, text=True
    )
    said = "worker 0 was not started within 1.0 s: the fork server does not answer"
    assert done.stdout.splitlines() == [said, "[4]", "[4]"], done.stderr


def test_a_fork_server_that_still_imports_is_late_but_not_replaced(subprocess_env):
    text = textwrap.dedent("""
        import psutil
        from helpers import Counting, rollout
        from rlstructs import RL_Batcher, WorkerTimeout
        from rlstructs.testing import create_faulty_envs

        def batcher(timeout):
            return RL_Batcher(4, Counting, {}, create_faulty_envs, {"n_envs": 1}, 1, 0, timeout=timeout)

        def servers():
            return [child.pid for child in psutil.Process().children() if "forkserver" in " ".join(child.cmdline())]

        n_fds = []
        for _ in range(3):
            try:
                batcher(timeout=0.01)
            except WorkerTimeout as error:
                print(error)
            n_fds.append(psutil.Process().num_fds())
        with batcher(timeout=600.0) as made:
            made.reset()
            print(rollout(made)[0].lengths.tolist(), len(servers()), len(set(n_fds)))
        for child in psutil.Process(servers()[0]).children():
            child.wait(600)  # those that nobody waits for any more
    """)
    done = subprocess.run(
        [sys.executable, "-c", text], env=subprocess_env, timeout=LIMIT, capture_output=True, text=True
    )
    late = "worker 0 was not started within 0.01 s: the fork server does not answer"
    assert done.stdout.splitlines() == [late] * 3 + ["[4] 1 1"], done.stderr
    assert not done.stderr


def wait_for_reply(batcher, worker):
    """Waits until a worker has replied; the reply stays where it is."""
    assert select.select([batcher._engine.pool._workers[worker].channel], [], [], LIMIT)[0]


def test_a_hanging_environment_is_an_error_after_the_timeout_and_close_ends_it():
    batcher = failing("hang", timeout=LIMIT)
    pids = batcher._engine.pool.pids
    batcher.reset()
    batcher.execute()
    wait_for_reply(batcher, 0)
    batcher._engine.pool.timeout = 1.0  # not before: a start, and the other one, may take longer
    with pytest.raises(WorkerTimeout, match=r"no reply within 1.0 s to 'rollout' from worker\(s\) 1"):
        batcher.get()
    with Deadline():
        batcher.close()
    assert not any(exists(pid) for pid in pids)


class Interrupted(Count):
    """Interrupts the trainer while it works, once, after a file is there."""

    def __init__(self, where, pid, file):
        super().__init__(100)
        self.where, self.pid, self.file = where, pid, file

    def _interrupt(self, where):
        if self.where == where:
            self.where = None
            while not os.path.exists(self.file):
                pass
            os.kill(self.pid, signal.SIGINT)

    def reset(self, **arguments):
        if self.episode == 0:
            self._interrupt("reset")
        return super().reset(**arguments)

    def step(self, action):
        if self.steps == 5:
            self._interrupt("step")
        return super().step(action)


def interrupted(where, n_processes, file="/"):
    pid = os.getpid()
    return RL_Batcher(
        10, Counting, {}, lambda seed: GymEnvInf([Interrupted(where, pid, file)], seed), {}, n_processes, [0]
    )


def test_an_interrupted_reset_is_said_to_have_been_and_is_called_again_and_close_is_quick():
    batcher = interrupted("reset", 1)
    batcher.reset()
    with pytest.raises(KeyboardInterrupt):
        batcher.reset()
    for call in (batcher.execute, batcher.get):
        with pytest.raises(StateError, match=": a reset or a rollout was interrupted, call reset first$"):
            call()
    batcher.update(1.0)
    batcher.reset()
    assert rollout(batcher)[0].lengths.tolist() == [10]
    with Deadline():
        batcher.close()


def test_an_interrupted_rollout_of_the_debugging_batcher_is_finished_first():
    batcher = interrupted("step", 0)
    batcher.reset()
    with pytest.raises(KeyboardInterrupt):
        batcher.execute()
    assert batcher.get()[0].trajectories["observation/frame"][0, :, 1].tolist() == list(range(10))
    batcher.close()


def test_a_rollout_survives_an_interrupted_get(tmp_path):
    with interrupted("step", 1, tmp_path / "go") as batcher:
        batcher.reset()
        batcher.execute()
        with pytest.raises(KeyboardInterrupt):
            (tmp_path / "go").touch()
            batcher.get()
        trajectories, _ = batcher.get()
        assert trajectories.trajectories["observation/frame"][0, :, 1].tolist() == list(range(10))


@pytest.mark.parametrize("closed", ["sys.stdout = None", "sys.stdout.close()", "sys.stderr = None", "os.close(1)"])
@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_workers_need_no_standard_streams(closed, method, subprocess_env, tmp_path):
    text = textwrap.dedent(f"""
        import os, sys
        from helpers import count_batcher, rollout
        {closed}
        with count_batcher([[3]], 5, autoreset=True, start_method={method!r}) as batcher:
            batcher.reset()
            rollout(batcher)
        open({str(tmp_path / "done")!r}, "x")
    """)
    subprocess.run([sys.executable, "-W", "ignore", "-c", text], env=subprocess_env, timeout=LIMIT, capture_output=True)
    assert (tmp_path / "done").exists()


def test_a_stopped_worker_is_an_error_after_the_timeout_and_close_ends_it(start_method):
    batcher = count_batcher([[3], [3]], 5, autoreset=True, start_method=start_method)
    batcher.reset()
    batcher._engine.pool.timeout = 3.0  # not before: a spawned worker may need longer to start
    pids = batcher._engine.pool.pids
    os.kill(pids[1], signal.SIGSTOP)
    with Deadline(), pytest.raises(WorkerTimeout, match=r"^no reply within 3.0 s to 'update' from worker\(s\) 1 "):
        batcher.update(bytes(10**7))
    with Deadline():
        batcher.close()
    assert not any(exists(pid) for pid in pids)


def test_close_ends_busy_workers_when_the_fork_server_is_gone_too(subprocess_env):
    text = textwrap.dedent("""
        import os, signal
        import psutil
        from helpers import Count, Counting
        from processes import exists, worker_pids
        from rlstructs import GymEnvInf, RL_Batcher

        class Hanging(Count):
            def step(self, action):
                signal.pause()

        batcher = RL_Batcher(5, Counting, {}, lambda seed: GymEnvInf([Hanging(9)], seed), {}, 2, 0)
        batcher.reset()
        batcher.execute()
        pids = batcher._engine.pool.pids
        psutil.Process(psutil.Process(pids[0]).ppid()).kill()
        batcher.close()
        print(any(exists(pid) for pid in pids))
    """)
    done = subprocess.run(
        [sys.executable, "-c", text], env=subprocess_env, timeout=LIMIT, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("False\n", "")


def in_a_daemon(result):
    with count_batcher([[3]], 5, autoreset=True) as batcher:
        batcher.reset()
        result.put(rollout(batcher)[1])


@pytest.mark.slow
def test_a_daemonic_process_may_have_a_batcher():
    context = multiprocessing.get_context("spawn")
    result = context.SimpleQueue()
    child = context.Process(target=in_a_daemon, args=(result,), daemon=True)
    child.start()
    child.join(LIMIT)
    assert (child.exitcode, result.empty() or result.get()) == (0, 1)


@pytest.mark.parametrize("timeout", [float("inf"), 1e12])
def test_any_long_timeout_will_do(timeout):
    with count_batcher([[3]], 5, timeout=timeout) as batcher:
        batcher.reset()
        assert rollout(batcher)[1] == 0


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.int64])
def test_a_timeout_may_be_a_number_of_numpy(kind):
    with count_batcher([[3]], 5, timeout=kind(60)) as batcher:
        batcher.reset()
        assert rollout(batcher)[1] == 0
    with SharedVectorEnv([lambda: Count(9)], 1, timeout=kind(60)) as env:
        env.reset()
        env.step_async([0])
        assert env.step_wait(timeout=kind(60))[1].tolist() == [1]
        env.send([0], [0])
        assert env.recv(timeout=kind(60))[1].tolist() == [2]
        env.close(timeout=kind(60))


@pytest.mark.parametrize(
    ("timeout", "kind"), [(0, ValueError), (-1.0, ValueError), ("3", TypeError), (True, TypeError)]
)
def test_a_timeout_that_is_none_is_refused(timeout, kind):
    with pytest.raises(kind, match=f"^timeout must be .*got {timeout!r}"):
        count_batcher([[3]], 5, timeout=timeout)


@pytest.mark.parametrize("n_timesteps", [10**12, 2**62, 2**63, 10**30])
def test_slots_that_do_not_fit_are_refused_before_they_are_taken(n_timesteps):
    with pytest.raises(OutOfMemoryError, match="bytes are needed"):
        count_batcher([[3, 3]], n_timesteps)


def test_nothing_is_printed(capfd):
    with count_batcher([[3, 3]], 5) as batcher:
        batcher.reset()
        rollout(batcher)
    with pytest.raises(SimulatorError):
        run_through("step")
    assert capfd.readouterr() == ("", "")


PROGRAM = """
import os, signal, sys
import torch
from helpers import Count, Counting
from rlstructs import GymEnvInf, RL_Batcher

class Slow(Count):
    def step(self, action):
        if LONG_STEP and self.steps == 2:
            print(os.getpid(), flush=True)
            while True:
                sum(range(10**9)) if LONG_STEP == "in C" else signal.pause()
        return super().step(action)

batcher = RL_Batcher(
    5, Counting, {}, lambda seed: GymEnvInf([Slow(9)], seed), {}, 2, 0, start_method=METHOD
)
batcher.reset()
print(*batcher._engine.pool.pids, flush=True)
if LONG_STEP:
    batcher.execute()
if FORKED and not os.fork():
    print(os.getpid(), flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
@pytest.mark.parametrize("forked", [False, True])
@pytest.mark.parametrize("long_step", [False, True, "in C"])
def test_when_the_main_process_is_killed_no_worker_stays(method, long_step, forked, subprocess_env):  # CV79
    text = f"LONG_STEP, FORKED, METHOD = {long_step!r}, {forked}, {method!r}\n{PROGRAM}"
    program = subprocess.Popen([sys.executable, "-W", "ignore", "-c", text], stdout=subprocess.PIPE, env=subprocess_env)
    assert program.stdout is not None
    workers = [int(pid) for pid in program.stdout.readline().split()]
    lines = [program.stdout.readline() for _ in range(2 * bool(long_step) + forked)]
    family = psutil.Process(program.pid).children(recursive=True)
    fork = [process for process in family if process.pid not in workers and f"{process.pid}\n".encode() in lines]
    others = [process for process in family if process not in fork]
    assert {process.pid for process in others} >= set(workers) and len(fork) == forked
    assert not named_memory(program.pid, *workers)
    program.kill()
    program.wait()
    try:
        with Deadline(1.0):
            wait_until(lambda: not any(map(runs, others)))
        assert not named_memory()
    finally:
        for process in fork:
            process.kill()
        program.stdout.close()


def test_a_forked_copy_that_leaves_the_block_ends_nobody():
    with count_batcher([[99], [99]], 5, autoreset=True) as batcher:
        batcher.reset()
        batcher.execute()
        pid = os.fork()
        if not pid:
            try:
                batcher.close()
            finally:
                os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert batcher.get()[1] == 2
        assert rollout(batcher)[1] == 2


# What a forked copy of the trainer may try. Nothing of it may be seen in the trainer's own rollouts.
TRIES = {
    "close": lambda batcher, lease: batcher.close(),
    "leave the block": lambda batcher, lease: batcher.__exit__(None, None, None),
    "get": lambda batcher, lease: batcher.get(),
    "execute": lambda batcher, lease: batcher.execute(agent_info=DictTensor({"add": torch.full((2,), 7.0)})),
    "reset": lambda batcher, lease: batcher.reset(agent_info=DictTensor({"add": torch.full((2,), 7.0)})),
    "update": lambda batcher, lease: batcher.update(torch.full((1000,), 7.0)),
    "evaluate": lambda batcher, lease: batcher.evaluate(2, 0),
    "load_state_dict": lambda batcher, lease: batcher.load_state_dict(batcher.state_dict()),
    "release a lease": lambda batcher, lease: lease and lease.release(),
}


class Adding(RL_Agent):
    """Puts out what its `agent_info` and its last update say."""

    updated = 0.0

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        said = agent_info["add"] + self.updated
        return DictTensor({"action": torch.zeros(len(said), dtype=torch.int64), "said": said}), state

    def update(self, info):
        self.updated = float(info.mean())


@pytest.mark.parametrize("n_processes", [0, 2])
@pytest.mark.parametrize("phase", ["ready", "running", "leased"])
def test_nothing_that_a_forked_copy_of_the_trainer_does_is_seen_in_its_rollouts(phase, n_processes):
    """Also in a rollout that is under way, and in memory that is lent: all of it is shared with the copy."""
    n_envs = 2 // (n_processes or 1)
    with RL_Batcher(
        5, Adding, {}, lambda seed: GymEnvInf([Count(1000) for _ in range(n_envs)], seed), {}, n_processes, 0,
        agent_info=DictTensor({"add": torch.zeros(1)}), debug=True,
    ) as batcher:  # fmt: skip
        batcher.update(torch.full((1000,), 0.5))
        batcher.reset(agent_info=DictTensor({"add": torch.full((2,), 1.0)}))
        rollout(batcher)
        first, lease = 5, None
        for name, attempt in TRIES.items():
            if phase != "ready":
                batcher.execute()
            if phase == "leased":
                lease = batcher.lease()
                frames = lease.trajectories.trajectories["observation/frame"][:, :, 1]
                assert frames.tolist() == [[first + t for t in range(5)]] * 2
            pid = os.fork()
            if not pid:
                try:
                    attempt(batcher, lease)
                    status = 1 + 2 * (name in ("close", "leave the block", "release a lease"))
                except WorkerError as error:
                    status = 2 + ("forked copy" in str(error))
                except StateError:
                    status = 3
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3, name
            if phase == "leased":
                assert frames.tolist() == [[first + t for t in range(5)]] * 2, name
                lease.release()
                first += 5
            for _ in range(2):
                if phase != "running":
                    batcher.execute()
                batch, n_running = batcher.get()
                steps = batch.trajectories
                assert (n_running, batch.lengths.tolist()) == (2, [5, 5]), name
                assert steps["observation/frame"][:, :, 1].tolist() == [[first + t for t in range(5)]] * 2, name
                assert (steps["action/said"] == 1.5).all() and (batch.info["policy_version"] == 1).all(), name
                first += 5
                if phase == "running":
                    break


@pytest.mark.parametrize("timeout", [None, 1.0])
def test_a_hang_in_close_is_over_in_time(timeout, start_method):
    fault = Fault("hang", at="close", worker=1, ignore_sigterm=True)
    batcher = faulty(fault, n_workers=2, start_method=start_method)
    batcher._engine.pool.timeout = timeout  # not before: a first start may take longer
    pids = batcher._engine.pool.pids
    batcher.reset()
    rollout(batcher)
    with Deadline():
        batcher.close()
    assert not any(map(exists, pids))


def test_a_program_ends_though_the_fork_server_never_tells_it_how_a_worker_ended(subprocess_env):
    text = """
        import psutil
        from test_failures import faulty
        batcher = faulty()
        server = psutil.Process(psutil.Process(batcher._engine.pool.pids[0]).ppid())
        server.suspend()
        batcher.close()
        print(server.pid, flush=True)
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(text)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=subprocess_env) as program:
        server = psutil.Process(int(program.stdout.readline()))  # it has the program's output too
        try:
            with Deadline():
                assert program.wait(LIMIT) == 0
        finally:
            server.kill()


def test_a_handler_of_a_signal_may_close_while_a_rollout_is_copied(monkeypatch):
    batcher = faulty(n_workers=2)
    batcher.reset()
    batcher.execute()
    read = Batch.read

    def closing(batch, out=None):
        signal.raise_signal(signal.SIGUSR1)
        return read(batch, out)

    before = signal.signal(signal.SIGUSR1, lambda *_: batcher.close())
    try:
        monkeypatch.setattr(Batch, "read", closing)
        with pytest.raises(ClosedError):
            batcher.get()
    finally:
        signal.signal(signal.SIGUSR1, before)
    for call in (batcher.execute, batcher.get, batcher.reset, batcher.lease, batcher.stats):
        with pytest.raises(ClosedError):
            call()


@pytest.mark.quick
def test_an_interrupted_close_leaves_no_worker(subprocess_env):
    text = textwrap.dedent("""
        import os, signal, threading
        from helpers import Count, Counting
        from processes import exists
        from rlstructs import GymEnvInf, RL_Batcher

        class Slow(Count):
            def close(self):
                os.kill(trainer, signal.SIGINT)
                signal.pause()

        trainer = os.getpid()
        batcher = RL_Batcher(5, Counting, {}, lambda seed: GymEnvInf([Slow(5)], seed), {}, 2, 0)
        batcher.reset()
        pids = batcher._engine.pool.pids
        try:
            batcher.close()
        except KeyboardInterrupt:
            print("interrupted")
        batcher.close()
        print([exists(pid) for pid in pids])
    """)
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, env=subprocess_env, timeout=LIMIT, text=True
    )
    assert done.stdout == "interrupted\n[False, False]\n", done.stderr


def faulty(*faults, n_workers=1, **arguments):
    """Workers of one environment each, episodes of 10 steps, rollouts of 4."""
    env_args = {"n_envs": 1, "faults": list(faults)}
    return RL_Batcher(4, Counting, {}, create_faulty_envs, env_args, n_workers, 0, **arguments)


def said_by(text, subprocess_env):
    """What a program prints; it must print no error."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(text)],
        env=subprocess_env, timeout=LIMIT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stderr == "" and done.returncode == 0, done
    return done.stdout.splitlines()


def test_a_worker_that_dies_as_it_is_sent_much_is_noticed_though_its_child_holds_the_pipe():
    with faulty(Fault("child", at="init", fork=True, seconds=60)) as batcher:
        batcher.reset()
        pid = batcher._engine.pool.pids[0]
        os.kill(pid, signal.SIGSTOP)
        killing = threading.Thread(target=kill_when_full, args=(pid, batcher._engine.pool._workers[0].channel))
        killing.start()
        gone = "killed by SIGKILL; last request: reset, before end_evaluation$"
        with Deadline(), pytest.raises(WorkerCrashed, match=gone):
            batcher._engine.pool.call("end_evaluation", bytes(10**7))  # an update goes through shared memory
        killing.join()


def kill_when_full(pid, channel):
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLOUT)
    while poll.poll(0):  # until it is being written
        pass
    os.kill(pid, signal.SIGKILL)


def test_a_program_that_a_broken_pipe_ends_does_not_end_with_its_worker(subprocess_env):
    text = """
        import logging, os, signal
        from processes import exists
        from test_failures import faulty, rollout
        logging.disable()
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        with faulty(n_workers=2, on_worker_failure="restart") as batcher:
            batcher.reset()
            pid = batcher._engine.pool.pids[1]
            os.kill(pid, signal.SIGKILL)
            while exists(pid):
                pass
            batcher._engine.pool.check = lambda: {}  # so that it is noticed only as it is written to
            print(rollout(batcher)[0].lengths.tolist(), rollout(batcher)[0].lengths.tolist())
    """
    assert said_by(text, subprocess_env) == ["[4, 0] [4, 4]"]


def test_what_is_found_as_it_closes_says_when_it_was_raised():
    batcher = faulty(Fault("raise", count=1, worker=1), n_workers=2)  # a rollout that nobody waits for ends soon
    batcher.reset()
    batcher.execute()
    with pytest.raises(RuntimeError) as caught:
        batcher.close()
    assert caught.value.__notes__[1:] == ["raised in worker 1 during 'rollout'"]
    assert caught.value.__notes__[0] == "raised by environment 0 (FaultyEnv) in step"


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_where_workers_are_restarted_what_nobody_asked_for_is_lost_as_it_closes(run_ahead):
    fault = Fault("raise", count=1, worker=1)
    with faulty(fault, n_workers=2, on_worker_failure="restart", run_ahead=run_ahead) as batcher:
        batcher.reset()
        batcher.execute()


class Forking(Count):
    def step(self, action):
        if self.steps == 1 and not os.fork():
            sys.exit(0)  # which comes back through the agent's rollout
        return super().step(action)


def test_a_copy_of_a_worker_that_its_environment_forks_off_is_not_a_second_worker():
    with RL_Batcher(4, Counting, {}, lambda seed: GymEnvInf([Forking(1000)], seed), {}, 1, 0) as batcher:
        batcher.reset()
        frames = [rollout(batcher)[0].trajectories["observation/frame"][0, :, 1].tolist() for _ in range(3)]
        assert frames == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_a_forked_copy_of_the_trainer_may_exit_as_any_program_does(subprocess_env):
    text = """
        import os, sys
        from test_failures import faulty, rollout
        batcher = faulty(n_workers=2)
        batcher.reset()
        batcher.execute()
        pid = os.fork()
        if not pid:
            sys.exit(0)
        print(os.waitpid(pid, 0)[1], batcher.get()[0].lengths.tolist(), rollout(batcher)[0].lengths.tolist())
        batcher.close()
    """
    assert said_by(text, subprocess_env) == ["0 [4, 4] [4, 4]"]


def test_ctrl_c_ends_the_waiting_for_a_fork_server_that_hangs(subprocess_env):
    text = """
        import os, signal, threading
        import psutil
        from processes import Deadline
        from test_failures import faulty
        first = faulty()
        server = psutil.Process(psutil.Process(first._engine.pool.pids[0]).ppid())
        server.suspend()
        try:
            with Deadline():
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
                faulty()
        except KeyboardInterrupt:
            print("interrupted")
        server.resume()
        first.close()
    """
    assert said_by(text, subprocess_env) == ["interrupted"]


def test_a_handler_of_a_signal_may_close_in_the_middle_of_anything(monkeypatch):
    batcher = faulty(n_workers=2)
    batcher.reset()
    pids = batcher._engine.pool.pids
    before = signal.signal(signal.SIGUSR1, lambda *_: batcher.close())
    read_replies = WorkerProcess.read_replies

    def interrupted(worker):  # under the lock of those who wait
        signal.raise_signal(signal.SIGUSR1)
        return read_replies(worker)

    try:
        batcher.execute()
        monkeypatch.setattr(WorkerProcess, "read_replies", interrupted)
        with Deadline(), pytest.raises(ClosedError, match="the batcher was closed meanwhile"):
            batcher.get()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not any(map(exists, pids))


class Leaving(Count):
    """Leaves a program running that has all the worker's descriptors."""

    def __init__(self):
        super().__init__(9)
        if not os.fork():
            signal.alarm(600)
            signal.pause()


def test_closing_does_not_wait_for_a_program_that_an_environment_has_left_running():
    batcher = RL_Batcher(3, Counting, {}, lambda seed: GymEnvInf([Leaving()], seed), {}, 1, 0)
    batcher.reset()
    [left] = psutil.Process(batcher._engine.pool.pids[0]).children()
    with Deadline(CLOSE_DELAY):
        batcher.close()
    assert exists(left.pid)
    left.kill()


def test_closing_many_waits_once_for_a_fork_server_that_is_stopped(subprocess_env):
    text = """
        import psutil
        from processes import Deadline
        from test_failures import faulty
        batcher = faulty(n_workers=6)
        server = psutil.Process(psutil.Process(batcher._engine.pool.pids[0]).ppid())
        server.suspend()
        with Deadline(3.0):
            batcher.close()
        print(True)
        server.resume()
    """
    assert said_by(text, subprocess_env) == ["True"]


@pytest.mark.parametrize("policy", ["raise", "restart"])
def test_one_who_only_asks_whether_a_rollout_is_there_gets_the_timeout_too(policy):
    fault = Fault("hang", count=6, worker=1, generations=[0])
    with faulty(fault, n_workers=2, on_worker_failure=policy) as batcher:
        batcher.reset()
        rollout(batcher)
        restart = batcher._engine.pool.restart

        def patient(successors):
            batcher._engine.pool.timeout = None
            return restart(successors)

        batcher._engine.pool.restart = patient
        batcher.execute()
        wait_for_reply(batcher, 0)
        batcher._engine.pool.timeout = 0.2  # not before: a first start, and the other one, may take longer
        found = (None, None)
        try:
            with Deadline():
                while found == (None, None):
                    found = batcher.get(blocking=False)
        except WorkerTimeout as error:
            assert policy == "raise" and "worker(s) 1" in str(error)
        else:
            assert policy == "restart" and found[0].lengths.tolist() == [4, 0]


@pytest.mark.parametrize("ending", ["pass", "raise KeyError('of the trainer')", "sys.exit(4)", "del batcher"])
def test_a_program_that_never_closes_ends_by_itself(ending, subprocess_env):  # R37
    text = textwrap.dedent(f"""
        import sys
        from helpers import count_batcher
        batcher = count_batcher([[3], [500]], 400)
        batcher.reset()
        batcher.execute()
        print(*batcher._engine.pool.pids, flush=True)
        {ending}
    """)
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, env=subprocess_env, timeout=LIMIT, text=True
    )
    assert done.returncode == {"p": 0, "r": 1, "s": 4, "d": 0}[ending[0]]
    assert (done.stderr.strip() == "") == (ending[0] != "r")
    assert not any(exists(int(pid)) for pid in done.stdout.split())


def test_a_forked_copy_of_the_main_process_leaves_the_workers_alone():
    with count_batcher([[3]], 5, autoreset=True) as batcher:
        batcher.reset()
        child = multiprocessing.get_context("fork").Process(target=lambda: None)
        child.start()
        child.join(LIMIT)
        assert child.exitcode == 0
        rollout(batcher)


SCRIPT = """
import gymnasium, torch
from helpers import Count
from rlstructs import DictTensor, GymEnvInf, RL_Agent, RL_Batcher

class OwnError(Exception):
    pass

class Agent(RL_Agent):
    calls = 0
    def initial_state(self, agent_info, B):
        return DictTensor()
    def __call__(self, state, observation, agent_info, history=None):
        self.calls += 1
        if self.calls > 5:
            raise OwnError("own")
        return DictTensor({"action": torch.zeros(observation.n_elems(), dtype=torch.int64)}), state

gymnasium.register("Own-v0", entry_point=lambda: Count(3))
batcher = RL_Batcher(
    4, Agent, {}, lambda seed: GymEnvInf([gymnasium.make("Own-v0", disable_env_checker=True)], seed), {}, 2, 0
)
batcher.reset()
batcher.execute()
print(batcher.get()[0].trajectories["_observation/done"].int().tolist())
call = Agent.__call__
batcher.execute()
try:
    batcher.get()
except OwnError as error:
    print(error, Agent.__call__ is call)
"""


@pytest.mark.parametrize("how", [pytest.param("file", marks=pytest.mark.quick), "stdin", "command"])
def test_a_script_needs_no_guard_and_keeps_its_own_classes(how, subprocess_env, tmp_path):
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    arguments = {"file": [str(file)], "stdin": ["-"], "command": ["-c", SCRIPT]}[how]
    done = subprocess.run(
        [sys.executable, *arguments], input=SCRIPT, capture_output=True, env=subprocess_env, timeout=LIMIT, text=True
    )
    assert (done.stdout, done.stderr) == ("[[0, 0, 1, 0], [0, 0, 1, 0]]\nown True\n", "")


def runs(process):
    """Whether a process has not ended; the standard library's resource tracker is not ours to end."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def held():
    """Processes, file descriptors, shared memory and objects of ours that this program has now."""
    gc.collect()
    me, ours = psutil.Process(), "rlstructs."
    objects = Counter(kind for kind in map(kind_of, gc.get_objects()) if kind.startswith(ours))
    return len(me.children(recursive=True)), me.num_fds(), named_memory(me.pid), objects


def kind_of(thing):
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def own_memory(*pids):
    """Bytes that are each process's alone."""
    return [psutil.Process(pid).memory_full_info().uss for pid in pids]


def leaks(once, n_calls, n_bytes, *pids):
    """Whether the memory of one of these grows by so many bytes a call, in each of three rounds of calls.

    A leak does; what an allocator keeps, for this test or those before it, does in one round.
    """
    growing = set(pids)
    for _ in range(3):
        before = own_memory(*pids)
        for _ in range(n_calls):
            once()
        after = own_memory(*pids)
        growing &= {pid for pid, early, late in zip(pids, before, after, strict=True)
                    if late - early >= n_calls * n_bytes}  # fmt: skip
        if not growing:
            break
    return bool(growing)


@pytest.mark.slow
def test_creating_and_closing_leaves_nothing_behind():
    def once():
        with count_batcher([[3], [4]], 5, autoreset=True) as batcher:
            batcher.reset()
            rollout(batcher)

    for _ in range(20):
        once()
    before = held()
    assert not leaks(once, 50, 40_000, os.getpid())
    assert held() == before


@pytest.mark.slow
def test_thousands_of_rollouts_leave_nothing_behind():
    with count_batcher([[3], [4]], 5, autoreset=True) as batcher:
        batcher.reset()
        pids = (os.getpid(), *batcher._engine.pool.pids)
        kept = [rollout(batcher)[0] for _ in range(100)]  # R39: handed out, they hold no descriptor
        for _ in range(1000):
            rollout(batcher)
        batcher.episodes()
        before = held()

        def once():
            for _ in range(4000):
                rollout(batcher)
            batcher.episodes()

        assert not leaks(once, 1, 4000 * 400, *pids)
        assert held() == before and len(kept) == 100


def test_several_batchers_work_side_by_side():
    batchers = [count_batcher([[3]], 5, autoreset=True) for _ in range(4)]
    for batcher in batchers:
        batcher.reset()
        batcher.execute()
    for batcher in reversed(batchers):
        assert batcher.get()[1] == 1
        batcher.close()
