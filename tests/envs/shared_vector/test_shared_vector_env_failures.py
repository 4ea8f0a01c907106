"""What fails in a `SharedVectorEnv` ends in an error that says what failed, soon, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap

import cloudpickle
import psutil
import pytest
from processes import Deadline, exists, named_memory, wait_until, wait_until_gone, worker_pids
from vector_envs import Failing, Gate, OddError

from rlstructs import RemoteTraceback, SharedVectorEnv, StateError, WorkerCrashed, WorkerError, WorkerTimeout

# Seconds in which a failure has to arrive, and `close` to return.
ACTIONS = [0] * 4


def failing(where, how="raise", n_workers=2, **arguments):
    """Four environments on two workers, the last of which fails."""
    return SharedVectorEnv([Failing] * 3 + [functools.partial(Failing, where, how)], n_workers, **arguments)


def run_through(where, how="raise", n_workers=2, timeout=None, **arguments):
    first = timeout if where == "constructor" else None
    with failing(where, how, n_workers, timeout=first, **arguments) as env, Deadline(5.0 + (timeout or 0.0)):
        if timeout is not None:
            env._host._pool.timeout = timeout
        env.reset()
        env.step(ACTIONS)
        env.call("act")


# What a note says of an environment that does not exist yet.
ORIGINS = {"constructor": "in its constructor"}


@pytest.mark.parametrize("where", ["constructor", "reset", "step", "act", "close"])
def test_what_an_environment_raises_arrives_as_it_is_with_its_number(where, start_method):
    before = worker_pids()
    with pytest.raises(KeyError, match=f"lost in {where}") as caught:
        run_through(where, start_method=start_method)
    assert caught.value.__notes__[0] == f"raised by environment 3 {ORIGINS.get(where, f'(Failing) in {where}')}"
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteTraceback) and cause.worker_index == 1
    assert f'self._fail("{where}")' in str(cause) and "KeyError" in str(cause)
    assert worker_pids() == before


@pytest.mark.parametrize("where", ["constructor", "reset", "step", "act", "close"])
def test_in_this_process_it_is_the_same(where):
    with pytest.raises(KeyError, match=f"lost in {where}") as caught:
        run_through(where, n_workers=0)
    assert caught.value.__notes__ == [f"raised by environment 3 {ORIGINS.get(where, f'(Failing) in {where}')}"]


def test_environments_in_this_process_are_closed_when_a_later_one_cannot_be_made(tmp_path):
    class Closing(Failing):
        def close(self):
            (tmp_path / "closed").touch()

    with pytest.raises(KeyError, match="lost in constructor"):
        SharedVectorEnv([Closing, functools.partial(Failing, "constructor")], 0)
    assert (tmp_path / "closed").exists()


@pytest.mark.parametrize("where", ["reset", "step", "act"])
def test_what_its_arguments_do_not_make_again_arrives_as_it_was(where):
    with pytest.raises(OddError, match=f"^code 7: {where}\n") as caught:
        run_through(where, "odd")
    assert f"raised by environment 3 (Failing) in {where}" in caught.value.__notes__


@pytest.mark.parametrize("n_workers", [0, 2])
def test_after_a_failure_it_can_only_be_closed(n_workers):
    env = failing("step", n_workers=n_workers)
    env.reset()
    with pytest.raises(KeyError):
        env.step(ACTIONS)
    calls = [env.reset, lambda: env.step(ACTIONS), lambda: env.send(ACTIONS), env.render, lambda: env.get_attr("where")]
    for call in (*calls, env.step_wait, env.recv):
        with pytest.raises(StateError, match="an environment failed before, close this one") as caught:
            call()
        assert isinstance(caught.value.__cause__, KeyError)
    with Deadline():
        env.close()
    env.close()


@pytest.mark.parametrize("n_workers", [0, 2])
def test_after_a_call_that_failed_it_goes_on(n_workers):
    with failing("act", n_workers=n_workers) as env:
        env.reset()
        for _ in range(2):
            with pytest.raises(KeyError, match="lost in act"):
                env.call("act")
            assert env.step(ACTIONS)[1].tolist() == [1.0] * 4
        env.set_attr("where", "")
        assert env.call("act") == ("acted",) * 4


def test_an_info_that_cannot_be_sent_is_named():
    class Odd(Failing):
        def step(self, action):
            return *super().step(action)[:4], {"fine": 1, "odd": (i for i in range(3))}

    with SharedVectorEnv([Failing] * 3 + [Odd], 2) as env:
        env.reset()
        with pytest.raises(TypeError, match="cannot pickle 'generator' object") as caught:
            env.step(ACTIONS)
        assert caught.value.__notes__[0] == "info 'odd' of environment 3 cannot be sent to the trainer"


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps, cloudpickle.dumps])
def test_it_cannot_be_copied_and_goes_on_after_an_attempt(copied):
    with failing("") as env:
        env.reset()
        with pytest.raises(TypeError, match="worker processes cannot be copied or pickled, nor what holds them"):
            copied(env)
        gc.collect()  # half a copy would close the pipes
        assert env.step(ACTIONS)[1].tolist() == [1.0] * 4


def test_a_forked_copy_of_the_program_can_neither_use_nor_end_its_workers():
    with failing("") as env:
        env.reset()
        pid = os.fork()
        if not pid:
            status = 1
            with contextlib.suppress(BaseException):
                try:
                    env.step(ACTIONS)
                except WorkerError:
                    env.close()
                    status = 0
            os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        assert env.step(ACTIONS)[1].tolist() == [1.0] * 4


@pytest.mark.parametrize("n_workers", [0, 2])
def test_what_a_sent_environment_raises_is_received(n_workers):
    with failing("step", n_workers=n_workers) as env:
        env.reset()
        env.send([0, 0], [2, 3])
        with pytest.raises(KeyError, match="lost in step") as caught:
            env.recv()
        assert caught.value.__notes__[0] == "raised by environment 3 (Failing) in step"


@pytest.mark.parametrize("phase", ["idle", "stepping", "sent"])
def test_a_killed_worker_is_an_error_that_says_so(phase, start_method):
    with failing("step", "hang", start_method=start_method) as env:
        env.reset()
        if phase != "idle":
            env.step_async(ACTIONS) if phase == "stepping" else env.send(ACTIONS)
        pid = env._host.pids[1]
        os.kill(pid, signal.SIGKILL)
        with Deadline(), pytest.raises(WorkerCrashed, match=rf"worker 1 \(pid {pid}\) is gone: .*SIGKILL") as caught:
            if phase == "idle":
                env.step(ACTIONS)
            env.step_wait() if phase == "stepping" else env.recv()
        assert caught.value.exitcode == -signal.SIGKILL
        assert phase != "idle" or not hasattr(caught.value, "__notes__")
        with Deadline():
            env.close()


@pytest.mark.parametrize(("how", "words"), [("exit", "exit code 3"), ("kill", "killed by SIGKILL")])
@pytest.mark.parametrize("where", ["constructor", "reset", "step", "act", "close"])
def test_a_worker_that_ends_in_any_method_is_an_error_or_has_closed(where, how, words):
    before = worker_pids()
    if where == "close":  # there is nothing left to lose
        run_through(where, how)
    else:
        label = {"constructor": "build", "act": "call"}.get(where, where)
        with pytest.raises(WorkerCrashed, match=f"worker 1 .* is gone: .*{words}; last request: {label}") as caught:
            run_through(where, how)
        assert where == "constructor" or caught.value.__notes__ == ["worker 1 was at environment 3"]
    assert worker_pids() == before


@pytest.mark.parametrize("where", ["constructor", "reset", "step", "act"])
def test_a_hang_is_an_error_when_there_is_a_timeout(where):
    failing("").close()  # the fork server runs from here on: that is no part of what has to be in time
    before = worker_pids()
    label = {"constructor": "build", "act": "call"}.get(where, where)
    with pytest.raises(WorkerTimeout, match=rf"no reply within 3.0 s to '{label}' from worker\(s\) .*1 ") as caught:
        run_through(where, "hang", timeout=3.0)
    assert where == "constructor" or caught.value.__notes__ == ["worker 1 was at environment 3"]
    assert worker_pids() == before


def assert_late(receive, notes):
    """What is received for a while is late, and these notes say where workers hang, once no other is late too."""

    def is_noted():
        with pytest.raises(WorkerTimeout, match="no reply within") as caught:
            receive()
        return caught.value.__notes__ == notes

    wait_until(is_noted)


def test_a_late_or_lost_group_is_named_and_the_others_stay_what_they_were():
    with SharedVectorEnv([Failing] * 6 + [functools.partial(Failing, "step", "hang")] * 2, 2, n_groups=2) as env:
        env.reset()
        first, second = env.groups
        env.send(ACTIONS, second)
        env.send(ACTIONS, first)  # worker 0 is through with the second, worker 1 never will be
        assert_late(lambda: env.recv(env_ids=first, timeout=0.5), ["worker 1 was at environment 6"])
        os.kill(env._host.pids[1], signal.SIGKILL)
        with Deadline(), pytest.raises(WorkerCrashed, match="worker 1 .* is gone") as caught:
            env.recv(env_ids=first)
        assert caught.value.__notes__ == ["worker 1 was at environment 6"]


def test_late_environments_are_named_also_when_they_were_sent_by_themselves():
    with SharedVectorEnv([functools.partial(Failing, "step", "hang")] * 6, 3) as env:
        env.reset()
        env.send([0, 0, 0], [1, 4, 5])
        notes = ["worker 0 was at environment 1", "worker 2 was at environment 4"]
        assert_late(lambda: env.recv(timeout=0.5), notes)


@pytest.mark.parametrize("pending", ["reset", "step", "send", "call"])
def test_closing_while_something_is_pending_takes_little_time(pending, start_method):
    before = worker_pids()
    env = failing({"reset": "reset", "call": "act"}.get(pending, "step"), "hang", start_method=start_method)
    if pending == "reset":
        env.reset_async()
    else:
        env.reset()
        {"step": env.step_async, "send": env.send, "call": lambda _: env.call_async("act")}[pending](ACTIONS)
    with Deadline():
        env.close(timeout=0.1)
    assert worker_pids() == before


def test_terminating_waits_for_nobody():
    env = failing("step", "hang")
    pids = env._host.pids
    env.reset()
    env.step_async(ACTIONS)
    with Deadline():
        env.close(terminate=True)
    assert not any(map(exists, pids))


def test_the_programs_error_is_not_hidden_by_what_closing_raises():
    with pytest.raises(ZeroDivisionError), failing("close") as env:
        env.reset()
        raise ZeroDivisionError


def test_an_environment_that_nobody_holds_leaves_nothing(start_method):
    before, n_open = worker_pids(), None
    for _ in range(3):
        env = SharedVectorEnv([Failing] * 4, 2, start_method=start_method)
        env.reset()
        env.step_async(ACTIONS)
        del env
        gc.collect()
        assert worker_pids() == before
        n_open = n_open or psutil.Process().num_fds()
        assert psutil.Process().num_fds() <= n_open


def test_views_of_a_closed_environment_stay_readable():
    env = SharedVectorEnv([Failing] * 4, 2, copy=False)
    env.reset()
    observations, *_ = env.step(ACTIONS)
    env.close()
    assert observations.tolist() == [[1.0]] * 4


PROGRAM = """
    import os, signal, sys
    import gymnasium, numpy as np
    from processes import named_memory
    from rlstructs import SharedVectorEnv
    from vector_envs import Failing

    class Told:
        pass

    class Own(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.zeros(1, np.float32), {}

        def step(self, action):
            if action == 1:
                signal.pause()
            return np.ones(1, np.float32), 1.0, False, False, {"told": Told()}

    envs = SharedVectorEnv([Own] * 4, 2, start_method=sys.argv[1])
    print(*envs._host.pids, flush=True)
    envs.reset()
    assert all(type(told) is Told for told in envs.step([0] * 4)[4]["told"])
    # What has no name is gone with the last process that has it.
    assert not named_memory(os.getpid(), *envs._host.pids)
    ending = sys.argv[2]
    if ending != "idle":
        envs.step_async([1] * 4)
    if ending == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if ending == "raise":
        raise SystemExit(7)
"""


@pytest.mark.parametrize(("ending", "status"), [("idle", 0), ("pending", 0), ("raise", 7), ("kill", -9)])
@pytest.mark.usefixtures("quick_programs")
def test_a_program_that_ends_without_closing_leaves_nothing(ending, status, start_method, tmp_path, subprocess_env):
    # A script without a guard, whose classes come back as they are.
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM))
    done = subprocess.run(
        [sys.executable, str(script), start_method, ending], capture_output=True, text=True, env=subprocess_env
    )
    assert (done.returncode, done.stderr) == (status, "")
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    with Deadline():
        wait_until_gone(pids)
    assert not named_memory()


def test_it_can_be_closed_by_another_thread(tmp_path):
    import threading

    from rlstructs import ClosedError

    path = str(tmp_path / "gate")
    os.mkfifo(path)
    env = SharedVectorEnv([functools.partial(Gate, path)] * 2, 2)
    env.reset()
    env.step_async([0, 0])
    closer = threading.Timer(0.05, lambda: env.close(timeout=0.1))
    closer.start()
    with Deadline(), pytest.raises(ClosedError, match="closed"):
        env.step_wait()
    closer.join()


@pytest.mark.parametrize("n_workers", [0, 1, 3])
def test_every_environment_is_called_also_when_one_of_them_raises(n_workers):
    class Refusing(Failing):
        n_calls = 0

        def count(self, refuses=()):
            self.n_calls += 1
            if self.first in refuses:
                raise KeyError(f"refused by {self.first}")

        @property
        def level(self):
            return self.n_calls

        @level.setter
        def level(self, value):
            if value < 0:
                raise KeyError("negative")
            self.n_calls = value

    def made(first):
        env = Refusing()
        env.first = first
        return env

    with SharedVectorEnv([functools.partial(made, k) for k in range(4)], n_workers) as env:
        with pytest.raises(KeyError, match="refused by 1"):
            env.call("count", (1, 2))
        assert env.get_attr("n_calls") == (1, 1, 1, 1)
        with pytest.raises(KeyError, match="negative"):
            env.set_attr("level", [-1, 5, -1, 7])
        assert env.get_attr("n_calls") == (1, 5, 1, 7)
