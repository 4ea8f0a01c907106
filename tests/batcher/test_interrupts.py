"""Ctrl-C anywhere: in a write, whatever was there is as it was; in a `get`, the rollout can still be had."""

from __future__ import annotations

import gc
import itertools
import linecache
import os
import signal
import sys

import numpy as np
import pytest
from gymnasium.error import NoAsyncCallError
from helpers import Count, count_batcher, rollout
from processes import worker_pids

import rlstructs.replay
from rlstructs import SharedVectorEnv, SpecError, StateError
from rlstructs.batcher.engine import Delivery
from rlstructs.replay.rows.spec import Spec
from rlstructs.replay.rows.step_writer import StepWriter
from rlstructs.replay.rows.store import Storage

N_LANES, CAPACITY, WIDTH = 2, 4, 64
FOLDER = rlstructs.replay.__path__[0]


class Store:
    """A store whose `next` is stored through `obs`, and what it should hold."""

    def __init__(self, is_quick):
        self.storage = Storage(N_LANES, CAPACITY)
        obs = Spec(np.dtype(np.float32), (WIDTH,))
        self.storage.add_columns({"obs": obs, "done": Spec(np.dtype(bool)), "next": obs}, {"next": "obs"})
        self.storage.track_episodes()
        self.writer = StepWriter(self.storage, ("done",)) if is_quick else None
        self.rows = []

    def write(self, number):
        """Writes a row for each lane, what each led to only sometimes being what comes next."""
        obs = np.full((N_LANES, WIDTH), number, np.float32) + np.arange(N_LANES, dtype=np.float32)[:, None] / 4
        following, done = (obs + 1 if number % 3 else -obs), np.full(N_LANES, number % 3 == 0)
        row = {"obs": obs, "done": done, "next": following}
        try:
            if self.writer is None or not self.writer.write(row):
                block = {name: values[:, None] for name, values in row.items()}
                self.storage.write(block, done=done[:, None])
        finally:
            if int(self.storage.ring.head[0]) > len(self.rows):
                self.rows.append((obs[:, 0], following[:, 0]))

    def check(self):
        storage = self.storage
        assert storage.ring.head.tolist() == [len(self.rows)] * N_LANES
        for lane in range(N_LANES):
            for step in range(int(storage.ring.oldest()[lane]), len(self.rows)):
                row = storage.columns.rows(np.array([lane]), np.array([step % CAPACITY]))
                obs, following = storage.gather(["obs", "next"], row)
                wanted = [part[lane] for part in self.rows[step]]
                assert [np.unique(obs).tolist(), np.unique(following).tolist()] == [[value] for value in wanted]


def interrupted(call, at):
    """Whether `call` was interrupted: as the `at`-th line of the replay core that it reaches begins."""
    lines = itertools.count(1)

    def trace(frame, event, _):
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        # As a `with` ends, the interpreter looks for signals only when what it held is free.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not line.startswith("with ") and next(lines) == at:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("is_quick", [True, False])
@pytest.mark.parametrize("n_before", [1, 3, 6])
def test_a_write_that_is_interrupted_anywhere_changes_no_row_that_was_there(is_quick, n_before):
    for at in itertools.count(1):
        store = Store(is_quick)
        for number in range(n_before):
            store.write(number)
        was_interrupted = interrupted(lambda store=store: store.write(n_before), at)
        store.check()
        for number in range(n_before + 2, n_before + 5):
            store.write(number)
            store.check()
        if not was_interrupted:
            break
    assert at > 20


def signalled(call, at):
    """What `call` returns, or None if SIGINT interrupts it, which comes as the `at`-th line of ours is reached.

    A real one, so that it comes later where it is blocked. Also whether there was such a line.
    """
    lines, [folder] = itertools.count(1), rlstructs.__path__

    def trace(frame, event, _):
        return trace_lines if frame.f_code.co_filename.startswith(folder) and not is_forgotten(frame) else None

    def trace_lines(frame, event, _):
        if event == "line" and next(lines) == at:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return trace_lines

    def is_forgotten(frame):  # the interpreter itself drops what a `__del__` raises
        return frame is not None and (frame.f_code.co_name == "__del__" or is_forgotten(frame.f_back))

    before, found = sys.gettrace(), None
    sys.settrace(trace)
    try:
        found = call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return found, next(lines) > at


@pytest.fixture
def interrupt_late(monkeypatch):
    """Has the next `get` be interrupted as it is about to return."""

    def finish(self, *args):
        monkeypatch.undo()
        raise KeyboardInterrupt

    def interrupt(get, **arguments):
        monkeypatch.setattr(Delivery, "_finish", finish)
        with pytest.raises(KeyboardInterrupt):
            get(**arguments)

    return interrupt


@pytest.mark.parametrize("given", [(False, True), (True, False), (True, True)], ids=str)
def test_the_get_after_an_interrupted_one_gives_the_rollout_in_the_memory_that_it_was_given(given, interrupt_late):
    def place(trajectories):
        return trajectories["observation/frame"].data_ptr()

    with count_batcher([[10**6, 2]], 3, n_processes=0) as batcher:
        batcher.reset()
        outs = [(made := rollout(batcher)[0]).clone(), made]
        batcher.reset()
        batcher.execute()
        first, second = (out if is_given else None for out, is_given in zip(outs, given, strict=True))
        interrupt_late(batcher.get, out=first)
        found, n_running = batcher.get(out=second)
        assert place(found) == place(second) if second is not None else place(found) not in map(place, outs)
        assert found["observation/frame"][:, :, 1].tolist() == [[0, 1, 2], [0, 1, 0]] and n_running == 1
        assert found.lengths.tolist() == [3, 2] and found.info["env_index"].tolist() == [0, 1]
        assert rollout(batcher)[0]["observation/frame"][:, :, 1].tolist() == [[3, 4, 5]]


def test_the_out_of_a_get_after_an_interrupted_one_is_checked(interrupt_late):
    with count_batcher([[10**6]], 3, autoreset=True, n_processes=0) as batcher:
        batcher.reset()
        out, _ = rollout(batcher)
        batcher.execute()
        interrupt_late(batcher.get)
        with pytest.raises(SpecError, match=r"get: out 'lengths' is \(0,\) .*, expected \(1,\)"):
            batcher.get(out=out.slice(0, 0))
        assert batcher.get(out=out)[0]["observation/frame"].data_ptr() == out["observation/frame"].data_ptr()


@pytest.mark.parametrize(("n_processes", "policy"), [(0, "raise"), (2, "raise"), (2, "restart")])
def test_a_get_that_is_interrupted_anywhere_loses_nothing_but_what_it_was_about_to_return(n_processes, policy):
    table = [[10**6]] * n_processes or [[10**6]]
    with count_batcher(table, 3, autoreset=True, n_processes=n_processes, on_worker_failure=policy) as batcher:
        batcher.reset()
        n_lost = 0
        for at in itertools.count(1):
            batcher.execute()
            found, was_there = signalled(batcher.get, at)
            try:
                found = found or batcher.get()
            except StateError:
                n_lost += 1
            else:
                first = 3 * (at - 1)
                frames = found[0].trajectories["observation/frame"][:, :, 1]
                assert frames.tolist() == [[first, first + 1, first + 2]] * len(table)
            if not was_there:
                break
        assert at > 100 and n_lost < 10  # in the very return


@pytest.mark.parametrize("first", [1, *(pytest.param(first, marks=pytest.mark.slow) for first in (2, 3))])
def test_a_close_that_is_interrupted_anywhere_is_gone_on_with(first):
    count_batcher([[3]], 2).close()  # the fork server runs from here on
    gc.collect()  # what other tests have left
    n_open = len(os.listdir("/proc/self/fd"))
    for at in itertools.count(first, 9):
        batcher = count_batcher([[3]], 2)
        _, was_there = signalled(batcher.close, at)
        with open(os.devnull) as mine:  # has the first number that is free: nobody closes that a second time
            batcher.close()
            del batcher
            gc.collect()
            assert os.fstat(mine.fileno()) and not worker_pids()
        assert len(os.listdir("/proc/self/fd")) <= n_open
        if not was_there:
            break
    assert at > 50


def test_a_reset_that_is_interrupted_anywhere_is_none_or_whole_or_wanted_again():
    at, was_there, ends = 1, True, set()
    while was_there:
        with count_batcher([[2, 10**6]], 3, n_processes=0) as batcher:
            batcher.reset()
            while was_there:
                rollout(batcher)  # the first environment ends in it
                _, was_there = signalled(batcher.reset, at)
                at += 1
                try:
                    trajectories, _ = rollout(batcher)
                except StateError as error:
                    assert str(error) == "execute: a reset or a rollout was interrupted, call reset first"
                    ends.add("again")
                else:
                    ends.add(tuple(trajectories.trajectories["observation/frame"][:, 0, 1].tolist()))
                batcher.reset()
    assert at > 30 and ends == {(3,), (0, 0), "again"}


@pytest.mark.parametrize("n_processes", [0, 2])
def test_a_lease_that_is_interrupted_anywhere_can_be_had_again_or_is_over(n_processes):
    table = [[10**6]] * n_processes or [[10**6]]
    seen = []

    def look():
        with batcher.lease() as (trajectories, _):
            seen.append(trajectories.trajectories["observation/frame"][:, :, 1].tolist())

    with count_batcher(table, 3, autoreset=True, n_processes=n_processes) as batcher:
        batcher.reset()
        n_again = n_over = 0
        for at in itertools.count(1):
            batcher.execute()
            _, was_there = signalled(look, at)
            try:
                look()
                n_again += 1
            except StateError as error:
                assert "call execute first" in str(error)  # and not to be released by nobody
                n_over += 1
            first = 3 * (at - 1)
            assert all(frames == [[first, first + 1, first + 2]] * len(table) for frames in seen)
            seen.clear()
            if not was_there:
                break
        assert n_again > 20 and n_over > 5


@pytest.mark.parametrize("call", ["step", "recv"])
def test_a_step_of_a_shared_vector_environment_that_is_interrupted_anywhere_gives_the_newest_or_ends_it(call):
    """Never what was answered to an earlier one."""
    envs = SharedVectorEnv([lambda: Count(10**6)] * 2, 2)
    try:
        envs.reset()
        last, at = 0, 1

        def step():
            if call == "step":
                return envs.step([0, 0])
            envs.send([0, 0])
            return envs.recv()

        was_there = True
        while was_there:
            found, was_there = signalled(step, at)
            try:
                while found is None:
                    try:
                        found = envs.recv() if call == "recv" else envs.step_wait()
                    except NoAsyncCallError:  # it had not begun, or was just handing out
                        found = step()
                steps = [int(frame[1]) for frame in found[0]]
                assert steps in ([last + 1] * 2, [last + 2] * 2)  # the next one, or that was lost in the very return
                last, at = steps[0], at + 1
            except StateError as error:  # halfway asked: it can only be closed, and says so
                assert str(error).endswith("an environment failed before, close this one")
                envs.close()
                envs = SharedVectorEnv([lambda: Count(10**6)] * 2, 2)
                envs.reset()
                last, at = 0, at + 10  # making another takes longer than all else here
        assert at > 100
    finally:
        envs.close()
