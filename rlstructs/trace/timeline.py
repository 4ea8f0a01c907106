"""Writes a timeline in the Chrome trace format, which Perfetto and `chrome://tracing` open.

    rings of trainer and workers ── a thread, four times a second ─> file.json, appended to

The file is a JSON array with an event on each line; readers of the format accept it without its closing bracket, so
that a program that is killed leaves a timeline. Times are whole microseconds since the timeline began, of the clock
CLOCK_MONOTONIC, which all processes of a machine share: durations are differences of them, so that they add up.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np

from rlstructs.trace import lane as lanes
from rlstructs.trace.board import Board
from rlstructs.trace.lane import HEAD, N_EVENTS, NAMES, START, UNKNOWN

# Seconds between two looks at the rings, which hold some seconds of the quickest workers.
PERIOD = 0.25
TRAINER = 0
# The notes of a rollout, by the name of its argument in the file, and what they are divided by.
ARGUMENTS = {
    lanes.NOTE_VERSION: ("policy_version", 1),
    lanes.NOTE_STEPS: ("steps", 1),
    lanes.NOTE_CPU: ("cpu_us", 1000),
    lanes.NOTE_DELAY: ("delay_us", 1000),
}


class Timeline:
    """Writes what the lanes of a board record from now on, until `close`.

    Args:
        path: the file, which is replaced.
        board: of the trainer, which makes the timeline.

    Attributes:
        n_lost: events that were overwritten before they were read; known after `close`.
    """

    def __init__(self, path: str | Path, board: Board) -> None:
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - until `close`
        self._start = perf_counter_ns()
        facts = board.facts
        self._pid, self._is_traced, self.n_lost = facts["pid"], board.is_traced, 0
        n_lanes = facts["n_lanes"] + 1
        self._readers = [LaneReader(board, row, facts["pid"], self._start) for row in range(n_lanes)]
        self._write(self._describe(facts))
        self._ended = threading.Event()
        self._is_traced[0] = self._start  # unlike any earlier one: lanes notice that it began anew
        self._thread = threading.Thread(target=self._run, name="rlstructs-timeline", daemon=True)
        self._thread.start()

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the timeline, and the file. Idempotent."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        self._is_traced[0] = 0
        now = perf_counter_ns()
        self._write(self._read_all())
        self._write(line for reader in self._readers for line in reader.end(now))
        self.n_lost = sum(reader.n_lost for reader in self._readers)
        self._readers, self._is_traced = [], memoryview(b"")  # nothing holds the shared memory
        last = {"name": "rlstructs_end", "ph": "M", "pid": self._pid, "args": {"lost": self.n_lost}}
        self._file.write(json.dumps(last) + "\n]\n")
        self._file.close()

    def _run(self) -> None:
        while not self._ended.wait(PERIOD):
            self._write(self._read_all())

    def _read_all(self) -> Iterator[str]:
        # The trainer's events come first, as they say which workers were replaced; those of workers up to before them.
        heads = [reader.head for reader in self._readers[1:]]
        trainer = self._readers[TRAINER]
        yield from trainer.read(trainer.head)
        for worker, time in trainer.replaced:
            self._readers[1 + worker].replaced_at.append(time)
        trainer.replaced.clear()
        for reader, head in zip(self._readers[1:], heads, strict=True):
            yield from reader.read(head)

    def _write(self, lines: Iterator[str]) -> None:
        self._file.write("".join(lines))
        self._file.flush()

    def _describe(self, facts: dict[str, Any]) -> Iterator[str]:
        pid = facts["pid"]
        yield "[\n" + _line({"name": "rlstructs", "ph": "M", "pid": pid, "args": {**facts, "start_ns": self._start}})
        yield _line({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": "rlstructs"}})
        for row in range(len(self._readers)):
            name = "trainer" if row == TRAINER else f"worker {row - 1}"
            yield _line({"name": "thread_name", "ph": "M", "pid": pid, "tid": row, "args": {"name": name}})
            yield _line({"name": "thread_sort_index", "ph": "M", "pid": pid, "tid": row, "args": {"sort_index": row}})


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":")) + ",\n"


class LaneReader:
    """Turns the events of one lane into lines of the file.

    Args:
        board, row: the lane.
        pid: of the trainer, under which all lanes stand.
        start: when the timeline began, in nanoseconds.

    Attributes:
        n_lost: events that were overwritten before they were read.
        replaced: of the trainer: workers that were replaced, and when.
        replaced_at: of a worker: when it was, until its successor's first event; one time for each.
    """

    def __init__(self, board: Board, row: int, pid: int, start: int) -> None:
        self._cells, self._row, self._start = board.cells(row), row, start
        self._ring = np.frombuffer(board.ring(row), np.int64).reshape(N_EVENTS, 2)
        self._n, self.n_lost = self._cells[HEAD], 0
        self._phase, self._since = UNKNOWN, 0  # in microseconds since the timeline began
        self._place = f'"pid":{pid},"tid":{row},"ts":'
        self._slice = f'{{"name":"%s","ph":"X",{self._place}%d,"dur":%d}},\n'
        self._rollout: dict[str, int] | None = None
        self._is_ending = False
        self.replaced: list[tuple[int, int]] = []
        self.replaced_at = deque[int]()

    @property
    def head(self) -> int:
        """How many events there are."""
        return int(self._cells[HEAD])

    def read(self, head: int) -> Iterator[str]:
        """Yields lines for the events that came since the last call, up to a head."""
        first = max(self._n, head - N_EVENTS)
        events = self._ring[np.arange(first, head) % N_EVENTS]
        # Those that were overwritten while they were copied are lost too.
        n_bad = min(max(0, self._cells[HEAD] - N_EVENTS - first), len(events))
        events, n_lost = events[n_bad:], first + n_bad - self._n
        self._n = head
        if n_lost:
            self.n_lost += n_lost
            yield from self._end_rollout()
            yield self._enter(UNKNOWN, self._since)
        yield from self._convert(events)

    def _convert(self, events: np.ndarray) -> Iterator[str]:
        times, kinds = events[:, 0], events[:, 1] & 0xFF
        at = 0
        for cut in [*np.flatnonzero((kinds >= lanes.BEGIN) | (kinds == START)).tolist(), len(events)]:
            yield from self._convert_phases(times[at:cut], kinds[at:cut])
            at = cut
            if cut < len(events) and kinds[cut] != START:
                yield from self._convert_note(int(times[cut]), int(kinds[cut]), int(events[cut, 1]) >> 8)
                at += 1

    def _convert_phases(self, times: np.ndarray, kinds: np.ndarray) -> Iterator[str]:
        if not len(times):
            return
        times = np.maximum(self._to_us(times), self._since)  # of a phase that began before the timeline
        if self.replaced_at and kinds[0] == START:
            yield self._enter(lanes.RESTART, max(self._since, self._to_us(self.replaced_at.popleft())))
            yield from self._end_rollout()
        yield self._enter(int(kinds[0]), int(times[0]))
        if self._is_ending:
            yield from self._end_rollout()
        if len(times) == 1:
            return
        fields: list[Any] = [None] * (3 * len(times) - 3)
        fields[0::3] = [NAMES[kind] for kind in kinds[:-1].tolist()]
        fields[1::3], fields[2::3] = times[:-1].tolist(), np.diff(times).tolist()
        yield (self._slice * (len(times) - 1)) % tuple(fields)
        self._phase, self._since = int(kinds[-1]), int(times[-1])

    def _enter(self, phase: int, time: int) -> str:
        """Begins a phase at this microsecond; returns the line of the one before, which ends."""
        line = self._slice % (NAMES[self._phase], self._since, time - self._since) if time > self._since else ""
        self._phase, self._since = phase, time
        return line

    def _convert_note(self, time: int, kind: int, value: int) -> Iterator[str]:
        if kind == lanes.BEGIN:
            yield from self._end_rollout()
            self._rollout = {"number": value}
            at = f"{self._place}{self._since}"  # with the phase that it begins with
            yield f'{{"name":"rollout","ph":"B",{at},"args":{{"number":{value}}}}},\n'
            yield self._arrow("t", at, self._row - 1, value)
        elif kind in ARGUMENTS and self._rollout is not None:
            name, divisor = ARGUMENTS[kind]
            self._rollout[name] = value // divisor
        elif kind == lanes.END:
            self._is_ending = True  # with its last phase
        elif kind == lanes.REPLACED:
            self.replaced.append((value, time))
        elif kind in (lanes.ORDERED, lanes.DELIVERED):
            yield self._arrow(
                "s" if kind == lanes.ORDERED else "f", f"{self._place}{self._to_us(time)}", value & 0xFFFF, value >> 16
            )

    def _arrow(self, step: str, at: str, worker: int, number: int) -> str:
        end = ',"bp":"e"' if step == "f" else ""
        return f'{{"name":"rollout","cat":"rollout","ph":"{step}","id":"{worker}.{number}",{at}{end}}},\n'

    def _to_us(self, time: Any) -> Any:
        """The microseconds since the timeline began, of nanoseconds of the clock."""
        return (time - self._start) // 1000

    def _end_rollout(self) -> Iterator[str]:
        """Ends the rollout at the begin of the present phase, if one is open."""
        self._is_ending = False
        if self._rollout is not None:
            cells = self._cells
            timed = {"slowest": cells[lanes.SLOWEST], "slowest_us": cells[lanes.SLOWEST_NS] // 1000,
                     "timed_us": cells[lanes.TIMED_NS] // 1000, "n_timed": cells[lanes.N_TIMED]}  # fmt: skip
            arguments = json.dumps({**self._rollout, **timed}, separators=(",", ":"))
            self._rollout = None
            yield f'{{"ph":"E",{self._place}{self._since},"args":{arguments}}},\n'

    def end(self, now: int) -> Iterator[str]:
        """Yields the lines of what has not ended."""
        yield self._enter(UNKNOWN, self._to_us(now))
        yield from self._end_rollout()


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """Reads the events of a file, also of one whose program was killed.

    Raises:
        ValueError: it is no timeline.
    """
    with open(path, encoding="utf-8") as file:
        if file.readline().strip() != "[":
            raise ValueError(f"{path}: expected a timeline of rlstructs, whose first line is a bracket")
        events = []
        for line in file:
            text = line.strip().rstrip(",")
            if not line.endswith("\n") or text == "]":
                break
            events.append(json.loads(text))
        return events
