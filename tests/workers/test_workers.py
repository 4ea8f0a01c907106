"""`workers` alone: any job in N processes, over every start method."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import select
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest
from processes import LIMIT, Deadline, JumpingTime, exists, named_memory, wait_until_gone, worker_pids

from rlstructs.workers import (
    InlinePool,
    OutOfMemoryError,
    RemoteTraceback,
    SharedArena,
    WorkerCrashed,
    WorkerError,
    WorkerPool,
    WorkerTimeout,
    arena,
    limits,
)
from rlstructs.workers.interrupts import defer_interrupt
from rlstructs.workers.messages import Channel, Post

# Seconds. Only reached when something hangs.


@pytest.fixture
def method(start_method):
    return start_method


class OwnError(Exception):
    """Makes its message itself, so that `cls(*args)` does not make it again."""

    def __init__(self, code, *, detail):
        super().__init__(f"code {code}: {detail}")
        self.code, self.detail = code, detail


class NeedsThree(Exception):
    """Takes three arguments, and hands on one."""

    def __init__(self, one, two, three):
        super().__init__(one)
        self.all = one, two, three


class Wordy(Exception):
    """`cls(*args)` makes another message."""

    def __init__(self, code):
        super().__init__(f"failed with {code}")


class Poison:
    """Can be pickled, but not unpickled."""

    def __reduce__(self):
        return poison, ()


def poison():
    raise EOFError("poison")


class NoCollector:
    """Arrives as `Job`, from a module that turns the garbage collector off."""

    def __reduce__(self):
        return turn_collector_off, ()


def turn_collector_off():
    gc.disable()
    return Job


class Job:
    def __init__(self, index, *shared):
        self.index, self.shared = index, shared
        self.closed_by = None

    def identify(self):
        return self.index, os.getpid()

    def echo(self, value):
        return value

    def fail(self, index):
        if self.index == index:
            raise KeyError("nothing there", self.index)

    def fail_oddly(self, how):
        if how == "own":
            raise OwnError(7, detail="odd")
        if how == "three":
            raise NeedsThree("first", 2, [3])
        raise Wordy(3) if how == "wordy" else ValueError(threading.Lock())

    def leave(self):
        sys.exit(3)

    def exit(self, index):
        if self.index == index:
            os._exit(3)

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def give_half(self):
        """Stops in the middle of its reply."""
        threading.Thread(target=self._stop_when_full).start()
        return bytes(50_000_000)

    def _stop_when_full(self):
        gc.unfreeze()  # otherwise it is not listed
        channel = next(each for each in gc.get_objects() if isinstance(each, Channel))
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLOUT)
        while poll.poll(0):  # until the reply is being written
            pass
        os.kill(os.getpid(), signal.SIGSTOP)

    def hang(self, index):
        while self.index == index:
            signal.pause()

    def resist(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pause()

    def look_at_collector(self):
        looked_at = {id(each) for each in gc.get_objects()}
        return gc.isenabled() and gc.get_threshold()[0] > 0, id(vars(pickle)) in looked_at, id(self) in looked_at

    def give_lambda(self):
        return lambda: self.index

    def give_unpicklable(self):
        return (i for i in range(3))

    def give_poison(self):
        return Poison()

    def list_threads(self):
        return [thread.name for thread in threading.enumerate()]

    def environment(self):
        return os.environ.get("RLSTRUCTS_TEST"), os.getcwd(), os.environ["OMP_NUM_THREADS"]

    def write(self):
        self.shared[0].map()[self.index] = self.index + 1

    def answer(self, data):
        if data == b"fail":
            raise OwnError(7, detail="odd")
        if data == b"hang":
            self.hang(self.index)
        return b"%d:%s" % (self.index, data) if data != b"text" else "no bytes"


class ClosingJob(Job):
    def close(self):
        raise ValueError(f"cannot close {self.index}")


def test_jobs_answer_in_the_order_of_their_index(method):
    with WorkerPool(3, Job, start_method=method) as pool:
        answers = pool.call("identify")
        assert [index for index, _ in answers] == [0, 1, 2]
        assert [pid for _, pid in answers] == pool.pids
        assert os.getpid() not in pool.pids
        assert pool.gather(pool.ask("identify", only=[1])) == [answers[1]]


def test_the_garbage_collector_looks_at_what_a_job_makes_and_not_at_what_was_imported(method):
    with WorkerPool(1, Job, start_method=method, preload=["pickle"]) as pool:
        assert pool.call("look_at_collector") == [(True, False, True)]


def test_a_module_that_turns_the_garbage_collector_off_is_obeyed(method):
    with WorkerPool(1, NoCollector(), start_method=method) as pool:
        assert pool.call("look_at_collector") == [(False, False, True)]


def test_an_exception_arrives_as_its_own_class_with_index_and_traceback(method):
    with WorkerPool(2, Job, start_method=method) as pool:
        with pytest.raises(KeyError, match="nothing there") as caught:
            pool.call("fail", 1)
        cause = caught.value.__cause__
        assert isinstance(cause, RemoteTraceback) and cause.worker_index == 1
        assert "in fail" in str(cause) and "KeyError" in str(cause)
        assert caught.value.__notes__ == ["raised in worker 1 during 'fail'"]


def test_an_exception_arrives_as_it_was_whatever_its_constructor_does():
    with WorkerPool(1, Job) as pool:
        with pytest.raises(OwnError, match="^code 7: odd\n") as caught:
            pool.call("fail_oddly", "own")
        assert (caught.value.code, caught.value.detail) == (7, "odd")
        with pytest.raises(NeedsThree, match="^first\n") as caught:
            pool.call("fail_oddly", "three")
        assert caught.value.all == ("first", 2, [3])
        with pytest.raises(Wordy, match="^failed with 3\n"):
            pool.call("fail_oddly", "wordy")


def test_an_exception_that_cannot_be_pickled_arrives_as_text():
    with WorkerPool(1, Job) as pool:
        with pytest.raises(WorkerError, match=r"ValueError: <unlocked.* \(raised in worker 0 during 'fail_oddly'\)"):
            pool.call("fail_oddly", "lock")


def test_sys_exit_in_a_job_does_not_end_the_parent():
    with WorkerPool(1, Job) as pool, pytest.raises(WorkerError, match="SystemExit: 3"):
        pool.call("leave")


@pytest.mark.parametrize(
    ("call", "arguments", "exitcode", "words"),
    [("exit", (0,), 3, "exit code 3"), ("kill", (), -9, "exit code -9, killed by SIGKILL")],
)
def test_a_worker_that_ends_is_an_error_that_says_how(method, call, arguments, exitcode, words):
    pool = WorkerPool(2, Job, start_method=method)
    pids = pool.pids
    gone = rf"worker \d \(pid \d+\) is gone: {words}; last request: {call}$"
    with pytest.raises(WorkerCrashed, match=gone) as caught:
        pool.call(call, *arguments)
    assert caught.value.exitcode == exitcode
    pool.close()
    assert_gone(pids)


def test_a_worker_killed_while_idle_is_noticed_by_the_next_call(method):
    with WorkerPool(2, Job, start_method=method) as pool:
        os.kill(pool.pids[1], signal.SIGKILL)
        with pytest.raises(WorkerCrashed, match="worker 1 .* killed by SIGKILL"):
            while True:  # the signal takes a moment
                pool.call("identify")


def test_the_death_of_one_is_noticed_while_another_works():
    with WorkerPool(2, Job) as pool:
        futures = pool.ask("resist")
        assert not pool.is_settled(futures)
        os.kill(pool.pids[1], signal.SIGKILL)
        with pytest.raises(WorkerCrashed, match="worker 1"):
            pool.gather(futures, LIMIT)
        pool.kill()


def test_a_deadline_names_who_is_late(method):
    with WorkerPool(2, Job, start_method=method) as pool:
        pids = pool.pids
        futures = pool.ask("hang", 1)
        late = rf"no reply within 0.05 s to 'hang' from worker\(s\) .*1 \(pid {pids[1]}\)$"
        with pytest.raises(WorkerTimeout, match=late):
            pool.gather(futures, 0.05)
        pool.close(0.05)
    assert_gone(pids)


def test_half_a_reply_keeps_nobody_waiting():
    """Neither one who waits longer than the deadline, nor one who closes meanwhile."""
    pool = WorkerPool(2, Job)
    futures = pool.ask("give_half")
    deadline = time.monotonic() + LIMIT
    while [psutil.Process(pid).status() for pid in pool.pids] != [psutil.STATUS_STOPPED] * 2:
        assert time.monotonic() < deadline
        pool.settle(futures, timeout=0.01)
    with pytest.raises(WorkerTimeout, match=r"no reply within 0.2 s to 'give_half' from worker\(s\) 0 "):
        pool.gather(futures, 0.2)

    def wait():
        with pytest.raises(WorkerError, match="closed while a reply was waited for"):
            pool.gather(futures)

    waiting = threading.Thread(target=wait)
    waiting.start()
    pids = pool.pids
    pool.close(0.0)
    waiting.join(LIMIT)
    assert not waiting.is_alive()
    assert_gone(pids)


@pytest.mark.parametrize("kind", ["call", "post", "small"])
def test_requests_after_one_that_was_not_read_in_time_are_answered(kind):
    """The worker has got a part of it, and gets the rest before the next one."""
    with WorkerPool(2, Job) as pool:
        os.kill(pool.pids[0], signal.SIGSTOP)
        pool.timeout, earlier = 0.2, []
        if kind == "call":
            futures = pool.ask("echo", bytes(10**7), only=[0])
        elif kind == "post":
            futures = pool.post(Post.of("answer", b"1", bytes(10**7), b"3"), only=[0])
        else:  # until the pipe is full: nothing of the last one got into it
            while not (futures := pool.ask("echo", bytes(30_000), only=[0]))[0].is_over:
                earlier += futures
        with pytest.raises(WorkerTimeout, match=r"worker 0 \(pid \d+\) has not read '.*' within 0.2 s"):
            pool.gather(futures)
        [again] = pool.ask("echo", 4, only=[0])
        assert kind == "small" or isinstance(again.error, WorkerTimeout)
        os.kill(pool.pids[0], signal.SIGCONT)
        pool.timeout = LIMIT
        pool.settle([*earlier, again])
        assert [each.value for each in earlier] == [bytes(30_000)] * len(earlier)
        assert pool.call("identify") == [(0, pool.pids[0]), (1, pool.pids[1])]
        assert pool.gather(pool.ask("echo", 5)) == [5, 5] and pool.states == ["idle", "idle"]
        assert pool.gather(pool.post(Post.of("answer", b"x"), only=[0])) == [b"0:x"]


def test_the_deadline_of_several_is_one():
    """Four workers that do not read: they are late together."""
    with WorkerPool(4, Job) as pool:
        for pid in pool.pids:
            os.kill(pid, signal.SIGSTOP)
        pool.timeout = 0.5
        with Deadline(4 * 0.5):
            asked = pool.ask("identify", bytes(10_000_000))
        assert all(isinstance(each.error, WorkerTimeout) for each in asked)
        pool.kill()


def test_a_deadline_counts_from_the_order_also_for_those_who_only_ask():
    with WorkerPool(2, Job) as pool:
        pool.timeout = 0.1
        futures = pool.ask("hang", 1)
        assert select.select([pool._workers[0].channel], [], [], LIMIT)[0]  # it has replied, and is not late
        while not pool.is_settled(futures):
            pass
        with pytest.raises(WorkerTimeout, match=r"no reply within 0.1 s to 'hang' from worker\(s\) 1 "):
            pool.gather(futures)
        pool.kill()


@pytest.mark.parametrize("n", range(1, 16))
def test_a_deadline_may_pass_between_any_two_looks_at_the_clock(monkeypatch, n):
    with WorkerPool(2, Job) as pool:
        pool.timeout = 0.2
        asked = pool.ask("hang", 1)
        clock = JumpingTime(n)
        with monkeypatch.context() as patch:
            for name in ("replies", "messages", "process"):
                patch.setattr(f"rlstructs.workers.{name}.time", clock)
            pool.settle(asked)
        assert isinstance(asked[1].error, WorkerTimeout)
        pool.kill()


def test_who_lingers_finds_what_has_come_and_that_nothing_will():
    ours, theirs = Channel.pair()
    ours.spin(0.0)
    assert not ours.has_message()
    theirs.send("first")
    theirs.send("second")
    for message in ("first", "second"):
        ours.spin(LIMIT)
        assert ours.has_message() and ours.receive() == message
    theirs.close()
    with pytest.raises(EOFError):
        ours.spin(LIMIT)
    ours.close()


def test_a_reply_that_came_in_time_is_not_late_however_late_it_is_read():
    with WorkerPool(2, Job) as pool:
        for timeout in (None, 0.0):
            pool.timeout = None
            futures = pool.ask("identify")
            for worker in pool._workers:
                assert select.select([worker.channel], [], [], LIMIT)[0]
            pool.timeout = 1e-9
            assert [index for index, _ in pool.gather(futures, timeout)] == [0, 1]


def test_a_long_reply_that_has_begun_in_time_is_not_late():
    """It comes in pieces: the worker is woken for the next one as the one before is read."""
    with WorkerPool(1, Job) as pool:
        futures = pool.ask("echo", bytes(30_000_000))
        [worker] = pool._workers
        assert select.select([worker.channel], [], [], LIMIT)[0]
        pool.timeout, worker.since = LIMIT, worker.since - 2 * LIMIT
        assert pool.gather(futures) == [bytes(30_000_000)]


def test_what_is_asked_of_a_busy_worker_is_answered_in_its_turn(method):
    with WorkerPool(2, Job, start_method=method) as pool:
        first, second = pool.ask("identify"), pool.ask("fail", 1)
        third = pool.ask("identify", only=[1])
        pool.settle(third)
        assert third[0].value == (1, pool.pids[1])
        pool.settle(first + second)
        assert [each.value for each in first] == list(enumerate(pool.pids)) and second[0].error is None
        assert isinstance(second[1].error, KeyError)


def test_large_requests_and_large_replies_do_not_wait_for_each_other():
    with WorkerPool(2, Job, timeout=LIMIT) as pool:
        asked = [each for _ in range(4) for each in pool.ask("echo", bytes(3_000_000))]
        pool.settle(asked)
        assert all(each.error is None and len(each.value) == 3_000_000 for each in asked)


def test_so_many_are_waited_for():
    with WorkerPool(3, Job) as pool:
        asked = pool.ask("hang", 2)
        pool.settle(asked, 2)
        assert [each.is_over for each in asked] == [True, True, False]
        behind = pool.ask("identify", only=[2])
        os.kill(pool.pids[2], signal.SIGKILL)
        pool.settle(asked + behind)
        assert all(isinstance(each.error, WorkerCrashed) and each.is_over for each in (asked[2], *behind))


def test_what_came_before_a_death_counts_also_when_the_next_request_finds_it():
    with WorkerPool(1, Job) as pool:
        asked = pool.ask("identify") + pool.ask("kill")
        assert select.select([pool._workers[0].sentinel()], [], [], LIMIT)[0]
        late = pool.ask("identify")
        pool.settle(asked + late)
        assert asked[0].value == (0, pool.pids[0])
        assert isinstance(asked[1].error, WorkerCrashed) and isinstance(late[0].error, WorkerCrashed)


def test_a_fork_server_that_is_killed_at_this_moment_is_followed_by_another():
    with WorkerPool(1, Job) as pool:
        server = psutil.Process(pool.pids[0]).ppid()
    for _ in range(10):
        os.kill(server, signal.SIGKILL)
        with WorkerPool(1, Job) as pool:
            assert pool.call("identify") == [(0, pool.pids[0])]
            server = psutil.Process(pool.pids[0]).ppid()


def test_what_a_fork_server_started_at_its_very_end_is_no_second_worker(tmp_path, monkeypatch):
    (tmp_path / "ends_as_it_forks.py").write_text(
        textwrap.dedent("""
        import os, pathlib, signal, time

        first, server = pathlib.Path(__file__).with_name("first"), os.getpid()

        def before():
            global is_first
            is_first = not first.exists()
            first.touch()

        def in_server():
            if is_first:
                while not first.read_text():
                    time.sleep(0.001)
                os.kill(server, signal.SIGKILL)

        def in_worker():
            if is_first:
                first.write_text(str(os.getpid()))
                while os.getppid() == server:
                    time.sleep(0.001)

        os.register_at_fork(before=before, after_in_parent=in_server, after_in_child=in_worker)
    """)
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with WorkerPool(1, Job, preload=("ends_as_it_forks",)) as pool:
        assert pool.call("identify") == [(0, pool.pids[0])]
        first = int((tmp_path / "first").read_text())
        wait_until_gone([first])


def test_the_start_has_the_same_deadline():
    def hang(index):
        signal.pause()

    WorkerPool(2, Job).close()  # the fork server runs from here on: that is no part of what has to be in time
    before = worker_pids()
    with pytest.raises(WorkerTimeout, match="no reply within 3.0 s to 'build'"):
        WorkerPool(2, hang, timeout=3.0)
    assert worker_pids() == before


def test_a_temporary_directory_of_too_long_a_name_is_said_to_be_it(monkeypatch, tmp_path):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", str(folder))
    with pytest.raises(WorkerCrashed, match=r"AF_UNIX path too long.*, is too long: set TMPDIR to a shorter one$"):
        WorkerPool(1, Job, start_method="forkserver", preload=("json",))  # what starts a server of its own


def test_a_worker_that_resists_is_killed():
    pool = WorkerPool(1, Job)
    pids = pool.pids
    pool.ask("resist")
    pool.close(0.1)
    assert_gone(pids)


@pytest.mark.parametrize("index", [0, 1])
def test_a_factory_that_raises_leaves_no_process(method, index):
    def factory(i):
        if i == index:
            raise ZeroDivisionError("no job")
        return Job(i)

    before = worker_pids()
    with pytest.raises(ZeroDivisionError, match="no job"):
        WorkerPool(2, factory, start_method=method)
    assert worker_pids() == before


def test_a_factory_that_cannot_be_pickled_starts_nothing():
    before = worker_pids()
    with pytest.raises(TypeError, match="pickle"):
        WorkerPool(2, lambda index, held=(i for i in range(3)): held)
    assert worker_pids() == before


def test_what_closing_raises_arrives_when_all_are_gone():
    pool = WorkerPool(2, ClosingJob)
    pids = pool.pids
    with pytest.raises(ValueError, match="cannot close 0"):
        pool.close()
    assert_gone(pids)
    pool.close()


def test_values_that_cannot_be_pickled_are_errors_and_the_worker_lives():
    with WorkerPool(1, Job) as pool:
        with pytest.raises(TypeError, match="pickle"):
            pool.call("give_unpicklable")
        assert pool.call("give_lambda")[0]() == 0


def test_a_message_that_cannot_be_unpickled_is_an_error_and_the_worker_lives(method):
    with WorkerPool(2, Job, start_method=method) as pool:
        for call in (lambda: pool.ask("give_poison"), lambda: pool.ask("fail", Poison())):
            for future in call():  # each worker's
                with pytest.raises(pickle.UnpicklingError, match="a message cannot be unpickled: EOFError"):
                    pool.gather([future], LIMIT)
        assert [index for index, _ in pool.call("identify")] == [0, 1]


def test_a_reply_from_before_a_restart_is_nobodys(method):
    with WorkerPool(2, Job, start_method=method) as pool:
        old = pool.pids
        futures = pool.ask("identify")
        poll = select.poll()
        poll.register(pool._workers[1].channel.fileno(), select.POLLIN)
        assert poll.poll(LIMIT * 1000)  # it has replied, and nobody has read it
        [built] = pool.restart({1: ()})
        pool.settle([built])
        assert built.error is None and built.value is None
        assert pool.gather(futures[:1]) == [(0, old[0])]
        assert isinstance(futures[1].error, WorkerCrashed)
        answers = pool.call("identify")
        assert answers == [(0, old[0]), (1, pool.pids[1])] and pool.pids[1] != old[1]


def test_a_busy_worker_takes_no_second_request():
    with WorkerPool(1, Job) as pool:
        pool.ask("hang", 0)
        with pytest.raises(RuntimeError, match="worker 0 is still busy with 'hang'"):
            pool.call("identify")
        pool.kill()


def test_posts_are_answered_one_behind_another(method):
    with WorkerPool(2, Job, start_method=method) as pool:
        first = pool.post(Post.of("answer", b"a"), [1])
        second = pool.post(Post.of("answer", b"", b"c" * 5000), [1])
        other = pool.post(Post.of("answer", b"b"), [0])
        last = pool.post(Post.of("answer", b"\x80"), [1])
        assert pool.gather(last + second + first, LIMIT) == [b"1:\x80", b"1:", b"1:" + b"c" * 5000, b"1:a"]
        assert pool.gather(other, LIMIT) == pool.gather(other) == [b"0:b"]
        both = pool.post(Post.of("answer", b"d", b"e"))
        assert pool.gather(both, LIMIT) == [b"0:d", b"0:e", b"1:d", b"1:e"]
        pool.settle([])  # nothing is asked
        assert [index for index, _ in pool.call("identify")] == [0, 1]


def test_the_first_answer_can_be_had_while_another_worker_is_busy():
    with WorkerPool(2, Job) as pool:
        futures = pool.ask("hang", 0, only=[0]) + pool.post(Post.of("answer", b"a"), [1])
        pool.settle(futures, 1, timeout=LIMIT)
        assert futures[1].value == b"1:a" and not futures[0].is_over and pool.states == ["busy", "idle"]
        with pytest.raises(WorkerTimeout, match=r"no reply within 0.01 s to 'hang' from worker\(s\) 0 \(pid \d+\)$"):
            pool.gather(futures, 0.01)
        with pytest.raises(RuntimeError, match="worker 0 is still busy with 'hang'"):
            pool.call("identify")
        os.kill(pool.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerCrashed, match="worker 0"):
            pool.gather(futures, LIMIT)


def test_what_answering_raises_arrives_and_the_worker_lives():
    with WorkerPool(1, Job) as pool:
        first, failed, last = pool.post(Post.of("the label", b"a", b"fail", b"b"), [0])
        with pytest.raises(OwnError, match=r"code 7: odd") as caught:
            pool.gather([first, failed, last])
        assert caught.value.__notes__ == ["raised in worker 0 during 'the label'"]
        assert pool.gather([first, last], LIMIT) == [b"0:a", b"0:b"]
        with pytest.raises(TypeError, match="bytes"):
            pool.gather(pool.post(Post.of("answer", b"text"), [0]))
        assert pool.call("identify") == [(0, pool.pids[0])]


def test_a_wait_that_was_too_short_can_be_repeated():
    """A timeout of the caller's own leaves the request under way, and its later reply counts."""
    with WorkerPool(1, Job) as pool:
        futures = pool.ask("echo", bytes(30_000_000))
        with pytest.raises(WorkerTimeout, match="no reply within 0.0 s"):
            while True:
                pool.gather(futures, 0.0)
                futures = pool.ask("echo", bytes(30_000_000))
        assert pool.gather(futures, LIMIT) == [bytes(30_000_000)] and futures[0].error is None


def test_closing_does_not_wait_for_posts_that_hang():
    pool = WorkerPool(2, Job)
    pids = pool.pids
    pool.post(Post.of("answer", b"hang", b"a"), [1])
    pool.close(0.05)
    assert_gone(pids)


def test_a_worker_may_start_workers_of_its_own(method):
    def factory(index):
        with WorkerPool(1, Job, start_method=method, timeout=LIMIT) as own:
            assert own.call("identify") != [(0, os.getpid())]
        return Job(index)

    with WorkerPool(2, factory, start_method=method, timeout=LIMIT) as pool:
        assert len(set(pool.call("identify"))) == 2


def test_environment_variables_and_directory_are_those_of_the_start(method, monkeypatch, tmp_path):
    WorkerPool(1, Job, start_method=method).close()  # a fork server may run from here on
    monkeypatch.setenv("RLSTRUCTS_TEST", "now")
    monkeypatch.chdir(tmp_path)
    with WorkerPool(1, Job, start_method=method) as pool:
        assert pool.call("environment") == [("now", str(tmp_path), "1")]


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_worker_imports_nothing_heavy_by_itself(start_method):
    def factory(index):
        import sys

        class Bare:
            def imported(self):
                own = {name for name in sys.modules if name.startswith("rlstructs.")}
                heavy = {name.split(".")[0] for name in sys.modules} & {"torch", "numpy"}
                return sorted(heavy | {name for name in own if not f"{name}.".startswith("rlstructs.workers.")})

        return Bare()

    with WorkerPool(1, factory, start_method=start_method) as pool:
        assert pool.call("imported") == [[]]


def test_an_arena_is_shared_with_workers_and_resized_while_they_run(method):
    block = SharedArena()
    with WorkerPool(2, Job, shared=(block,), start_method=method) as pool:
        block.resize(10)
        pool.call("write")
        assert bytes(block.map()[:3]) == b"\x01\x02\x00"
        block.resize(5)
        assert block.nbytes == 10
    block.close()


def test_an_arena_that_does_not_fit_is_refused_before_it_is_taken():
    block = SharedArena()
    with pytest.raises(OutOfMemoryError, match=r"1,125,899,906,842,624 bytes are needed, [\d,]+ are available"):
        block.resize(2**50)
    assert block.nbytes == 0
    block.resize(2**40, expected=4096)  # address space costs nothing
    assert len(block.map()) == 2**40
    block.close()


def test_an_arena_that_is_large_enough_takes_nothing(monkeypatch):
    block = arena.SharedArena()
    block.resize(4096)
    monkeypatch.setattr(arena, "available_bytes", lambda: 0)
    block.resize(4096)
    assert block.nbytes == 4096


def test_an_arena_is_its_owners_alone():
    arena = SharedArena()
    assert stat.S_IMODE(os.fstat(arena._descriptor.fileno()).st_mode) == 0o600
    arena.close()


def test_an_arena_survives_a_stranger_that_maps_it_and_goes():  # R38
    block = SharedArena()
    block.resize(4096)
    block.map()[:2] = b"ab"
    path = f"/proc/{os.getpid()}/fd/{block._descriptor.fileno()}"
    stranger = f"import mmap, os; m = mmap.mmap(os.open({path!r}, os.O_RDWR), 4096); m[1:2] = b'c'"
    subprocess.run([sys.executable, "-c", stranger], check=True)
    assert bytes(block.map()[:2]) == b"ac"
    block.close()


def test_an_arena_without_memfd_leaves_no_name_behind(monkeypatch):
    before = named_memory(os.getpid())
    monkeypatch.delattr(os, "memfd_create")
    block = SharedArena()
    block.resize(4096)
    block.map()[:2] = b"ab"
    assert named_memory(os.getpid()) <= before
    with WorkerPool(1, Job, shared=(block,)) as pool:
        pool.call("write")
    assert bytes(block.map()[:2]) == b"\x01b"


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/a/b", "a/b", ("memory.max", "memory.current")),
        ("0::/a/b", "a", ("memory.max", "memory.current")),
        ("4:memory:/a", "memory/a", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ],
    ids=["v2", "v2-parent", "v1"],
)
def test_the_control_groups_limit_counts(tmp_path, line, folder, names):
    group = tmp_path / "root" / folder
    group.mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text(f"1:cpu:/elsewhere\n{line}\n")
    assert limits._read_group_bytes(tmp_path / "root", own) == []
    for name, value in zip(names, ("5000\n", "2000\n"), strict=True):
        (group / name).write_text(value)
    assert limits._read_group_bytes(tmp_path / "root", own) == [3000]
    # Files that nobody uses give way; version 1 has a number of its own for a group with those in it.
    (group / "memory.stat").write_text("cache 900\ntotal_inactive_file 500\ninactive_file 500\n")
    assert limits._read_group_bytes(tmp_path / "root", own) == [3500]
    (group / names[0]).write_text("max\n")
    assert limits._read_group_bytes(tmp_path / "root", own) == []


@pytest.mark.parametrize(
    ("line", "files", "unlimited"),
    [
        ("0::/a/b", {"a/b/cpu.max": "50000 100000"}, {"a/b/cpu.max": "max 100000"}),
        ("0::/a/b", {"a/cpu.max": "100000 100000", "a/b/cpu.max": "150000 100000"}, {"a/cpu.max": "max 100000"}),
        (
            "4:cpu,cpuacct:/a",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "20000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"},
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "-1"},
        ),
    ],
    ids=["v2", "v2-parent", "v1"],
)
def test_the_control_groups_quota_of_cores_counts(tmp_path, line, files, unlimited):
    own = tmp_path / "own"
    own.write_text(f"1:memory:/elsewhere\n{line}\n")
    bound = len(os.sched_getaffinity(0))

    def n_cores_with(contents):
        for name, content in contents.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{content}\n")
        return limits.n_cores(tmp_path, own)

    assert n_cores_with({}) == bound
    assert n_cores_with(files) == 1
    assert n_cores_with(unlimited) == min(bound, 2)


@pytest.mark.quick
def test_a_sandbox_without_descriptors_of_processes_is_enough(subprocess_env):
    text = textwrap.dedent("""
        import os, signal
        from rlstructs.workers import WorkerPool, start

        def refuse(*args):
            raise PermissionError(1, "not permitted")

        os.pidfd_open = refuse
        with WorkerPool(2, lambda index: [index]) as pool:
            print(pool.call("pop"))
        [server] = start._servers.values()
        os.kill(server.pid, signal.SIGKILL)
        with WorkerPool(1, lambda index: [7]) as pool:
            print(pool.call("pop"))
    """)
    done = subprocess.run(
        [sys.executable, "-c", text], env=subprocess_env, timeout=LIMIT, capture_output=True, text=True
    )
    assert done.stdout == "[0, 1]\n[7]\n", done.stderr


def test_no_variable_of_the_environment_turns_off_the_watch_over_the_main_process(monkeypatch):
    monkeypatch.setenv("RLSTRUCTS_BARE", "1")
    with WorkerPool(1, Job) as pool:
        assert "main-process-watch" in pool.call("list_threads")[0]


def test_a_sandbox_that_forbids_signals_by_descriptor_is_enough(monkeypatch):
    def refuse(fd, signum):
        raise PermissionError(1, "not permitted")

    pool = WorkerPool(2, Job)
    pids = pool.pids
    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    pool.ask("resist")
    pool.kill()
    wait_until_gone(pids)


def test_the_inline_pool_answers_as_workers_do():
    pool = InlinePool(Job)
    assert pool.call("identify") == [(0, os.getpid())]
    futures = pool.ask("fail", 0)
    with pytest.raises(KeyError, match="nothing there"):
        pool.gather(futures)
    assert pool.call("identify") == [(0, os.getpid())]
    pool.close()
    pool.close()


def test_closing_takes_little_time():
    with Deadline(20.0):
        for _ in range(20):
            WorkerPool(1, Job).close()


def assert_gone(pids):
    assert not [pid for pid in pids if exists(pid)]


def test_ctrl_c_is_put_off_whichever_thread_the_kernel_gives_it_to():
    over = threading.Event()
    other = threading.Thread(target=over.wait)  # does not block the signal
    other.start()
    try:
        for _ in range(100):
            is_through = False
            with pytest.raises(KeyboardInterrupt):
                with defer_interrupt():
                    os.kill(os.getpid(), signal.SIGINT)
                    for _ in range(1000):
                        is_through = os.getpid() == 0
                    is_through = True
                time.sleep(LIMIT)  # the kernel may take its time
            assert is_through
    finally:
        over.set()
        other.join()
