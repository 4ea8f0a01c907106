"""Writes a timeline in the Chrome trace format, which Perfetto and `chrome://tracing` open.

    rings of trainer and workers ── a thread, four times a second ─> file.json, appended to

The file is a JSON array with an event on each line; readers of the format accept it without its closing bracket, so
that a program that is killed leaves a timeline. Times are whole microseconds since the timeline began, of the clock
CLOCK_MONOTONIC, which all processes of a machine share: durations are differences of them, so that they add up.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from rlstructs.errors import StateError
from rlstructs.files.opening import name_damage, open_file
from rlstructs.trace import lane as lanes
from rlstructs.trace.board import Board, BoardRecording, Excerpt, Recording
from rlstructs.trace.lane import BEGIN, NAMES, RESTART, START, UNKNOWN, VALUE

# Seconds between two looks at the rings.
PERIOD = 0.25
TRAINER = 0
ZERO = np.frombuffer(b"   0", np.uint32)[0]
# The notes of a rollout, by the name of its argument in the file, and what they are divided by.
ARGUMENTS = {
    lanes.NOTE_VERSION: ("policy_version", 1),
    lanes.NOTE_STEPS: ("steps", 1),
    lanes.NOTE_CPU: ("cpu_us", 1000),
    lanes.NOTE_DELAY: ("delay_us", 1000),
}


@contextlib.contextmanager
def record(path: str | Path | None, board: Board) -> Iterator[Timeline | None]:
    """Writes a timeline of a board's lanes, see `RL_Batcher.trace`; nothing without a path."""
    if not path:
        yield None
        return
    if board.is_traced[0]:
        raise StateError("trace: a timeline of this batcher is being written already")
    lane, before = board.lane, lanes.current
    timeline = Timeline(path, board)
    try:
        lane.look()
        lanes.current = lane  # draws of memories are phases of this trainer
        yield timeline
    finally:
        lanes.current = before
        lane.enter(lanes.LEARN)  # the last event: the present phase ends with the timeline
        try:
            timeline.close()
        finally:  # also if the disk is full
            lane.look()


class Timeline:
    """Writes what the lanes of a board record from now on, until `close`.

    Args:
        path: the file, which is replaced.
        board: of the trainer, which makes the timeline.

    Attributes:
        n_lost: events that were overwritten before they were read; known after `close`.
    """

    def __init__(self, path: str | Path, board: Board) -> None:
        self._file = open(Path(path), "wb")  # noqa: SIM115 - until `close`
        facts, own = board.facts, BoardRecording(board)
        self._error: OSError | None = None
        self._pid, self._start, self.n_lost = facts["pid"], perf_counter_ns(), 0
        self._recordings: list[tuple[Recording, list[LaneWriter]]] = [(own, self._make_lanes(TRAINER, own))]
        for node, recording in enumerate(board.nodes):
            self._recordings.append((recording, self._make_lanes(1 + facts["n_workers"] + node, recording)))
        # The records of a trainer are of its workers, or of nodes with all of their workers.
        (_, [trainer, *_]), *nodes = self._recordings
        if nodes:
            trainer.below = [each for _, each in nodes]
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._file.close)
            self._write(self._describe({**facts, "start_ns": self._start}))
            on_error.callback(own.take, goes_on=False)
            self._write(self._read_all())
            on_error.pop_all()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rlstructs-timeline", daemon=True)
        self._thread.start()

    def _make_lanes(self, tid: int, recording: Recording) -> list[LaneWriter]:
        workers = [LaneWriter(self._pid, 1 + worker, self._start, worker) for worker in recording.workers]
        return [LaneWriter(self._pid, tid, self._start, below=[[worker] for worker in workers]), *workers]

    def close(self) -> None:
        """Ends the timeline, and the file. Idempotent.

        Raises:
            OSError: the file could not be written.
        """
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        now, every = perf_counter_ns(), [lane for _, own in self._recordings for lane in own]
        with self._file as file:
            self._write(self._read_all(goes_on=False))
            self._write(line for lane in every for line in lane.end(now))
            self.n_lost = sum(lane.n_lost for lane in every)
            last = {"name": "rlstructs_end", "ph": "M", "pid": self._pid, "args": {"lost": self.n_lost}}
            file.write(json.dumps(last).encode() + b"\n]\n")
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._ended.wait(PERIOD):
                self._write(self._read_all())
        except OSError as error:
            self._error = error

    def _read_all(self, goes_on: bool = True) -> Iterator[bytes]:
        for recording, own in self._recordings:
            ahead, excerpts = recording.take(goes_on)
            for lane, excerpt in zip(own, excerpts, strict=False):  # of a node that is gone, none
                yield from lane.convert(excerpt, ahead)

    def _write(self, lines: Iterable[bytes]) -> None:
        self._file.write(b"".join(lines))
        self._file.flush()

    def _describe(self, facts: dict[str, Any]) -> Iterator[bytes]:
        place = {"ph": "M", "pid": self._pid}
        yield b"[\n" + _line({"name": "rlstructs", **place, "args": facts})
        yield _line({"name": "process_name", **place, "args": {"name": "rlstructs"}})
        order = 0
        for node, (_, own) in enumerate(self._recordings, -1):
            for lane in own:
                name = f"worker {lane.worker}" if lane.worker is not None else "trainer" if node < 0 else f"node {node}"
                yield _line({"name": "thread_name", **place, "tid": lane.tid, "args": {"name": name}})
                yield _line({"name": "thread_sort_index", **place, "tid": lane.tid, "args": {"sort_index": order}})
                order += 1


def _line(event: dict[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode() + b",\n"


class LaneWriter:
    """Turns what one lane records into lines of the file.

    Args:
        pid: of the trainer, under which all lanes stand.
        tid: the number of the lane.
        start: when the timeline began, in nanoseconds.
        worker: whose lane it is; None for the trainer's or a node's.
        below: the lanes that one of its records is about, by the index of the record.

    Attributes:
        n_lost: words that were overwritten before they were read.
    """

    def __init__(
        self, pid: int, tid: int, start: int, worker: int | None = None, below: Sequence[Sequence[LaneWriter]] = ()
    ) -> None:
        self.tid, self.worker, self.below, self.n_lost = tid, worker, below, 0
        self._pid, self._start, self._place = pid, start, {"pid": pid, "tid": tid}
        self._phase, self._since = UNKNOWN, 0  # in microseconds since the timeline began
        self._rollout: dict[str, int] | None = None
        self._is_ending = False  # with its present phase
        self._timed: Sequence[int] = ()
        # When the worker was replaced, and has not started again.
        self._replaced = deque[int]()
        # Which recording is read, how far, and whether it is of what came in the place of another.
        self._began, self._n_read, self._is_other = 0, 0, False

    def convert(self, excerpt: Excerpt, ahead: int) -> Iterator[bytes]:
        """Yields lines for an excerpt.

        Its clock is ahead of the trainer's by so many nanoseconds.
        """
        words, began, first, self._timed = excerpt
        if began != self._began:
            self._is_other, self._began, self._n_read = self._began > 0, began, 0
        n_lost, self._n_read = first - self._n_read, first + len(words)
        values, kinds = lanes.unpack(words)
        # In microseconds of the timeline, before which a phase may have begun.
        times = np.maximum((values - (ahead + self._start)) // 1000, self._since)
        if n_lost:
            self.n_lost += n_lost
            yield from self._end_rollout(self._since)
            yield from self._enter([UNKNOWN], [self._since])
        # What came in the place of a worker begins with its start, or, if its node was replaced, a recording.
        starts = [0][: len(words)] if self._is_other else np.flatnonzero(kinds == START).tolist()
        self._is_other &= not len(words)
        at = 0
        for start in starts[: len(self._replaced)]:
            yield from self._convert(values[at:start], kinds[at:start], times[at:start])
            yield from self._restart(int(times[start]))
            at = start
        yield from self._convert(values[at:], kinds[at:], times[at:])

    def _restart(self, until: int) -> Iterator[bytes]:
        """Begins the phase in which the worker is replaced, before this time."""
        time = min(max(self._since, self._replaced.popleft()), until)
        yield from self._end_rollout(time)
        yield from self._enter([RESTART], [time])

    def _convert(self, values: np.ndarray, kinds: np.ndarray, times: np.ndarray) -> Iterator[bytes]:
        """Yields lines, given what stands in words.

        Also their kinds, and the microseconds where they are times.
        """
        changes = np.flatnonzero(kinds < BEGIN)
        phases, begins = kinds[changes], times[changes]
        if self._is_ending and len(begins):
            yield from self._end_rollout(int(begins[0]))
        # Rollouts begin and end with a phase. Their lines come before those of phases: readers sort lines by their
        # times, and keep the order of lines with the same time.
        notes = np.flatnonzero((kinds >= BEGIN) & (kinds != VALUE))
        for note, n in zip(notes.tolist(), np.searchsorted(changes, notes).tolist(), strict=True):
            kind, value, time = int(kinds[note]), int(values[note + 1]), int(times[note])
            since = int(begins[n - 1]) if n else self._since
            if kind == lanes.END and n < len(begins):
                yield from self._end_rollout(int(begins[n]))
            else:
                yield from self._convert_note(kind, value, time, since)
        yield from self._enter(phases, begins)

    def _convert_note(self, kind: int, value: int, time: int, since: int) -> Iterator[bytes]:
        """Yields the lines of a note, made in a phase that began at `since`."""
        if kind == BEGIN:
            yield from self._end_rollout(since)
            self._rollout = {"number": value}
            yield _line({"name": "rollout", "ph": "B", **self._place, "ts": since, "args": {"number": value}})
            yield self._arrow("t", since, value)
        elif kind in ARGUMENTS and self._rollout is not None:
            name, divisor = ARGUMENTS[kind]
            self._rollout[name] = value // divisor
        elif kind == lanes.END:
            self._is_ending = True
        elif kind == lanes.REPLACED:
            for lane in self.below[value]:
                lane._replaced.append(time)
        elif kind in (lanes.ORDERED, lanes.DELIVERED):
            ends = "t" if self.tid != TRAINER else "s" if kind == lanes.ORDERED else "f"
            index, number = lanes.unpack_place(value)
            for lane in self.below[index]:
                if lane.worker is not None:
                    yield lane._arrow(ends, time, number, self._place)

    def _arrow(self, step: str, time: int, number: int, place: dict[str, int] | None = None) -> bytes:
        """A part of the arrow of the worker's rollout.

        Its begin (s), a step on its way (t) or its end (f).
        """
        event = {"name": "rollout", "cat": "rollout", "ph": step, "id": f"{self.worker}.{number}"}
        return _line({**event, **(place or self._place), "ts": time, **({"bp": "e"} if step == "f" else {})})

    def _end_rollout(self, time: int) -> Iterator[bytes]:
        """Ends the rollout, if one is open."""
        self._is_ending = False
        if self._rollout is not None:
            slowest, slowest_ns, timed_ns, n_timed = self._timed
            timed = {"slowest": slowest, "slowest_us": slowest_ns // 1000, "timed_us": timed_ns // 1000}
            arguments, self._rollout = {**self._rollout, **timed, "n_timed": n_timed}, None
            yield _line({"ph": "E", **self._place, "ts": time, "args": arguments})

    def _enter(self, phases: ArrayLike, begins: ArrayLike) -> Iterator[bytes]:
        """Yields the lines of the present phase and of these.

        The last one is left out: it is the present phase then.
        """
        entered, begun = np.append(self._phase, phases), np.append(self._since, begins)
        yield format_phases(entered[:-1], begun[:-1], np.diff(begun), **self._place)
        self._phase, self._since = int(entered[-1]), int(begun[-1])

    def end(self, now: int) -> Iterator[bytes]:
        """Yields the lines of what has not ended."""
        time = max(self._since, (now - self._start) // 1000)
        if self._replaced:  # and what came in its place has not recorded anything
            yield from self._restart(time)
        yield from self._enter([UNKNOWN], [time])
        yield from self._end_rollout(time)


def format_phases(phases: np.ndarray, begins: np.ndarray, lasted: np.ndarray, pid: int, tid: int) -> bytes:
    """Makes the lines of phases, given in microseconds, without those that took none.

    There may be 100,000 a second. So lines are copied from a table of one for each phase, and numbers from a table of
    all groups of four digits; JSON allows the spaces before them.
    """
    took = lasted > 0
    if not took.any():
        return b""
    begins, lasted = begins[took], lasted[took]
    lines = _make_lines(pid, tid, _count_groups(begins), _count_groups(lasted))[phases[took]]
    for field, values in (("ts", begins), ("dur", lasted)):
        groups = lines[field]
        for group in range(groups.shape[1])[::-1]:
            values, digits = np.divmod(values, 10_000)
            groups[:, group] = _four_digits()[np.where(values, digits, digits + 10_000)]
        groups[groups[:, -1] == _four_digits()[10_000], -1] = ZERO  # the number 0
    return bytes(lines)


def _count_groups(values: np.ndarray) -> int:
    return (len(str(values.max())) + 3) // 4


@functools.lru_cache
def _four_digits() -> np.ndarray:
    """All groups of four digits as four bytes each.

    First with leading zeros, then without them, so that a 0 is blank.
    """
    return np.array([f"{k:04}" for k in range(10_000)] + [f"{k or '':>4}" for k in range(10_000)], "S4").view(np.uint32)


@functools.lru_cache
def _make_lines(pid: int, tid: int, n_begin: int, n_lasted: int) -> np.ndarray:
    """The line of each phase, with room for groups of four digits."""
    heads = [f'{{"name":"{name}","ph":"X","pid":{pid},"tid":{tid},"ts":' for name in NAMES]
    names = ("head", "ts", "key", "dur", "end")
    kinds = (f"S{max(map(len, heads))}", (np.uint32, (n_begin,)), "S7", (np.uint32, (n_lasted,)), "S3")
    lines = np.zeros(len(NAMES), list(zip(names, kinds, strict=True)))
    lines["head"] = [head.ljust(lines["head"].itemsize) for head in heads]
    lines["key"], lines["end"] = b',"dur":', b"},\n"
    return lines


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """Reads the events of a file, also of one whose program was killed.

    Raises:
        FileError: it is no timeline, or no regular file.
        OSError: it cannot be read.
    """
    with open_file(path) as file, name_damage(f"{path}: no timeline of rlstructs, or a damaged one"):
        lines = io.TextIOWrapper(file, encoding="utf-8")
        if lines.readline().strip() != "[":
            raise ValueError("its first line is no bracket")
        events = []
        for line in lines:
            text = line.strip().rstrip(",")
            if not line.endswith("\n") or text == "]":
                break
            events.append(dict(json.loads(text)))
        return events
