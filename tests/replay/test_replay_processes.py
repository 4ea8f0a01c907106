"""Two processes write one store, each a lane of its own, while this one reads it without a lock."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import replay_writers
from processes import LIMIT
from replay_writers import CAPACITY, EPISODE, make_storage

from rlstructs.replay.draw.plan import MASK_ENDS, Uniform, Windows

# Seconds that each test reads for.
SOAK = float(os.environ.get("RLSTRUCTS_SOAK_SECONDS", "1.5"))
# Seconds. Only reached when something hangs.
BATCH, LENGTH = 48, 4
NAMES = ["lane", "step", "words", "checksum"]


class Writer:
    """A process that writes a lane."""

    def __init__(self, context, storage, lane):
        self.lane = lane
        self.channel, theirs = context.Pipe()
        self.process = context.Process(target=replay_writers.run, args=(storage, lane, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def has_begun(self):
        """Whether it has written, without a wait."""
        return self.channel.poll()

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(LIMIT)
        assert self.process.exitcode == -signal.SIGKILL
        self.channel.close()

    def stop(self):
        self.channel.close()
        self.process.join(LIMIT)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        return self.process.exitcode


class Reader:
    """Samples windows and looks at every row."""

    def __init__(self, storage):
        self.storage, self.rng = storage, np.random.default_rng(0)
        self.n_rows, self.n_selected, self.n_read = np.zeros(2, int), 0, 0

    def _select(self, n):
        self.n_selected += n
        return Windows(LENGTH, MASK_ENDS).select(self.storage, Uniform(), n, self.rng)

    def read(self):
        """A batch of windows, every row of which is whole and what it is taken for."""
        picked, arrays = self.storage.sample(
            BATCH, self._select, lambda chosen: self.storage.columns.gather(NAMES, chosen.rows)
        )
        lane, step, words, checksum = arrays
        np.testing.assert_array_equal(checksum, replay_writers.checksums(lane, step, words))
        lanes, slots = self.storage.columns.places(picked.rows)
        np.testing.assert_array_equal(lane, lanes)
        np.testing.assert_array_equal(step % CAPACITY, slots)
        np.testing.assert_array_equal(step, step[:, :1] + np.arange(LENGTH))
        inside = step // EPISODE == step[:, :1] // EPISODE
        np.testing.assert_array_equal(picked.fields["mask"], inside)
        np.testing.assert_array_equal(picked.fields["is_first"], inside & (step % EPISODE == 0))
        self.n_rows += np.bincount(lane.ravel(), minlength=2)
        self.n_read += BATCH

    def read_until(self, condition, limit=LIMIT):
        """Reads once, and on until something is so; false when it is not within `limit` seconds."""
        deadline = time.monotonic() + limit
        while True:
            self.read()
            if condition():
                return True
            if time.monotonic() > deadline:
                return False

    def has_advanced(self, lane, n_rows=4 * CAPACITY):
        """What tells whether a lane got so many rows from now on."""
        head = self.storage.ring.head
        before = int(head[lane])
        return lambda: bool(head[lane] >= before + n_rows)


@pytest.fixture(params=["lane", "slot"])
def storage(request):
    return make_storage(request.param)


@pytest.fixture
def started(start_method, storage):
    """Starts writers; two of them write already."""
    context = multiprocessing.get_context(start_method)
    writers = []

    def start(lane):
        writers.append(Writer(context, storage, lane))
        return writers[-1]

    pair = [start(0), start(1)]
    assert all(writer.channel.poll(LIMIT) for writer in pair)
    yield pair, start
    with contextlib.ExitStack() as stack:
        for writer in writers:
            stack.callback(writer.stop)


def test_no_row_that_is_read_is_torn_or_unwritten(storage, started):
    writers, _ = started
    reader = Reader(storage)
    advanced = [reader.has_advanced(lane) for lane in range(2)]
    assert not reader.read_until(lambda: False, SOAK)
    # On a busy machine it takes a while until the writers catch up with the reader, which then draws again.
    assert reader.read_until(lambda: all(check() for check in advanced) and reader.n_selected > reader.n_read)
    assert (reader.n_rows > 0).all()
    assert [writer.stop() for writer in writers] == [0, 0]
    reader.read()


def test_killing_a_writer_changes_nothing_for_the_others(storage, started):
    (writer, other), start = started
    reader, rng = Reader(storage), np.random.default_rng(1)
    deadline, n_kills = time.monotonic() + SOAK, 0
    while time.monotonic() < deadline or n_kills < 2:
        reader.read_until(lambda: False, rng.random() * 0.05)
        writer.kill()
        n_kills += 1
        head = int(storage.ring.head[0])
        assert reader.read_until(reader.has_advanced(1))
        assert storage.ring.head[0] == head
        writer = start(0)
        assert reader.read_until(writer.has_begun)
        assert writer.channel.recv() >= head
        assert reader.read_until(reader.has_advanced(0))
    assert (reader.n_rows > 0).all()
    assert [writer.stop(), other.stop()] == [0, 0]


FORKED_WHILE_WRITTEN = """
import os, signal, threading, numpy as np
from rlstructs.replay.rows.spec import Spec
from rlstructs.replay.draw.plan import Selection, Uniform
from rlstructs.replay.rows.store import Storage
storage = Storage(n_lanes=1, capacity=4)
storage.columns.add("t", Spec(np.dtype("f4")))
storage.write({"t": np.ones((1, 2), "f4")})
inside, go_on = threading.Event(), threading.Event()
def write():
    with storage.lock:
        inside.set()
        go_on.wait()
threading.Thread(target=write).start()
inside.wait()
pid = os.fork()
if pid == 0:
    signal.alarm(600)  # ends it if it hangs
    storage.write({"t": np.ones((1, 1), "f4")})
    print(len(storage), flush=True)
    os._exit(0)
print(os.waitpid(pid, 0)[1])
go_on.set()
"""


def test_a_process_that_was_forked_while_a_thread_wrote_writes_on():
    command = [sys.executable, "-W", "ignore", "-c", FORKED_WHILE_WRITTEN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)
    assert done.stdout.split() == ["3", "0"]
