"""A board: the lanes of a trainer and its workers.

They are in shared memory, which other programs of the user may read too.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol

import numpy as np

from rlstructs.trace.lane import HEAD, IS_TRACED, LEARN, N_CELLS, N_WORDS, START, TIMED, Lane
from rlstructs.trace.verdict import Account
from rlstructs.workers.arena import SharedArena
from rlstructs.workers.limits import n_cores

# The facts, then for each lane its cells and its ring, all in pages of their own: a page takes memory when it is used.
PAGE = 4096
BLOCK = PAGE + 8 * N_WORDS
NAME = "rlstructs-board"


class Excerpt(NamedTuple):
    """What a lane has recorded since the last look at it.

    Attributes:
        words: int64 (n,), as they stand in the ring.
        began: when the recording began, in nanoseconds of the lane's clock, which tells it from others.
        first: how many words the lane had recorded before these.
        timed: the cells `TIMED` of the lane.
    """

    words: np.ndarray
    began: int
    first: int
    timed: tuple[int, ...]


class Recording(Protocol):
    """Lanes whose events are recorded.

    The first is of a trainer or a node, the others are of its workers.

    Attributes:
        workers: the indexes of these workers.
    """

    workers: range

    def take(self, goes_on: bool = True) -> tuple[int, list[Excerpt]]:
        """Returns what the lanes have recorded since the last call.

        The first call begins the recording.

        Args:
            goes_on: whether the recording does.

        Returns:
            By how many nanoseconds their clock is ahead of this process's; and for each lane its excerpt, or an empty
            list if none can be reached.
        """


class Board:
    """The lanes of a trainer (row 0) and its workers (rows 1...).

    Args:
        arena: the memory.

    Attributes:
        lane: of the trainer, in its own process.
        read_others: returns the cells of workers that have their lanes elsewhere, int64 (n, N_CELLS) each.
        nodes: record those lanes.
    """

    lane: Lane
    nodes: Sequence[Recording] = ()
    read_others: Callable[[], Sequence[np.ndarray]] = staticmethod(lambda: ())

    def __init__(self, arena: SharedArena) -> None:
        self._arena = arena
        self._bytes = memoryview(arena.map())
        self._at_end: np.ndarray | None = None

    @classmethod
    def make(cls, n_workers: int, **facts: Any) -> Board:
        """Makes a board.

        Args:
            n_workers: W.
            facts: what else readers need to know, by name.
        """
        arena = SharedArena(NAME)
        arena.resize(PAGE + (n_workers + 1) * BLOCK, expected=(n_workers + 2) * PAGE)
        board = cls(arena)
        board.lane = board.make_lane(0)
        board.write_facts(n_lanes=n_workers, n_workers=n_workers, pid=os.getpid(), n_cores=n_cores(), **facts)
        return board

    @property
    def arena(self) -> SharedArena:
        """The memory, to be sent to workers."""
        return self._arena

    def close(self) -> None:
        """Frees the memory, if no timeline is being written.

        `read` returns the last cells from now on. Idempotent.
        """
        if self._at_end is None:
            self._at_end = self.read()
        self.lane.detach()
        self._bytes = memoryview(b"")
        self._arena.close()

    def write_facts(self, **facts: Any) -> None:
        """Adds facts for readers."""
        text = json.dumps({**self.facts, **facts}).encode()
        self._bytes[:PAGE] = text.ljust(PAGE, b"\0")

    @property
    def facts(self) -> dict[str, Any]:
        """The facts: W, E, T, the run-ahead, the cores, the trainer's process id."""
        text = bytes(self._bytes[:PAGE]).rstrip(b"\0")
        return dict(json.loads(text)) if text else {}

    def cells(self, row: int) -> memoryview:
        """The cells of a lane, int64 (N_CELLS,)."""
        at = PAGE + row * BLOCK
        return self._bytes[at : at + 8 * N_CELLS].cast("q")

    def ring(self, row: int) -> memoryview:
        """The ring of a lane, int64 (N_WORDS,)."""
        at = PAGE + row * BLOCK + PAGE
        return self._bytes[at : at + 8 * N_WORDS].cast("q")

    @property
    def is_traced(self) -> memoryview:
        """When the recording of events began, by `perf_counter_ns`, int64 (1,); 0 without one."""
        return self.cells(0)[IS_TRACED : IS_TRACED + 1]

    def make_lane(self, row: int) -> Lane:
        """Makes the lane of this process."""
        return Lane(self.cells(row), self.ring(row), self.is_traced, START if row else LEARN)

    def read(self) -> np.ndarray:
        """Copies the cells of all lanes, int64 (W + 1, N_CELLS)."""
        if self._at_end is not None:
            return self._at_end
        own = np.stack([np.array(self.cells(row)) for row in range(self.facts["n_lanes"] + 1)])
        return np.concatenate([own, *self.read_others()])

    def begin_account(self) -> None:
        """Forgets what has been until now; see `take_account`."""
        self._before = self._read_now()

    def take_account(self) -> Account:
        """Returns where the time went since the last call, or since `begin_account`."""
        before, self._before = self._before, self._read_now()
        return Account.of_cells(np.maximum(self._before - before, 0), self._before, self.facts)

    def _read_now(self) -> np.ndarray:
        self.lane.enter(self.lane.enter(LEARN))  # adds what the trainer has spent in its present phase
        return self.read()


class BoardRecording:
    """Has the lanes of a board record events; see `Recording`.

    Args:
        board: of this process.

    Attributes:
        workers: see `Recording`.
    """

    def __init__(self, board: Board) -> None:
        self.workers = range(board.facts["n_lanes"])
        rows = range(len(self.workers) + 1)
        self._lanes = [(board.cells(row), np.frombuffer(board.ring(row), np.int64)) for row in rows]
        self._firsts = [cells[HEAD] for cells, _ in self._lanes]
        self._heads = list(self._firsts)
        self._is_traced, self._began = board.is_traced, 0

    def take(self, goes_on: bool = True) -> tuple[int, list[Excerpt]]:
        self._began = self._began or perf_counter_ns()
        # Unlike any earlier one: lanes notice that it began anew.
        self._is_traced[0] = self._began if goes_on else 0
        # The trainer's events up to a later moment than the workers': they say which workers were replaced.
        heads = [cells[HEAD] for cells, _ in reversed(self._lanes)][::-1]
        found = [self._take_lane(row, head) for row, head in enumerate(heads)]
        if not goes_on:
            self._lanes, self._is_traced = [], memoryview(b"")  # nothing holds the shared memory
        return 0, found

    def _take_lane(self, row: int, head: int) -> Excerpt:
        cells, ring = self._lanes[row]
        first = max(self._heads[row], head - N_WORDS)
        words = ring[np.arange(first, head) % N_WORDS]
        # Those that were overwritten while they were copied are lost too; two more may be at this moment.
        n_bad = min(max(0, cells[HEAD] + 2 - N_WORDS - first), len(words))
        self._heads[row] = head
        return Excerpt(words[n_bad:], self._began, first + n_bad - self._firsts[row], tuple(cells[k] for k in TIMED))


def find_boards(proc: Path = Path("/proc")) -> dict[int, Path]:
    """Finds the boards of all programs that this user may read.

    Returns the file of each, by the process id of its trainer.
    """
    found: dict[int, Path] = {}
    for folder in proc.glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # the process of another user, or one that has ended
            for link in filter(_is_board, folder.iterdir()):
                with open(link, "rb") as file:
                    facts = read_facts(file.fileno())
                if facts.get("pid") == int(folder.parent.name):
                    found[facts["pid"]] = link
    return found


def _is_board(link: Path) -> bool:
    try:
        return os.readlink(link).startswith(f"/memfd:{NAME}")
    except OSError:  # closed meanwhile
        return False


def read_cells(fd: int, n_lanes: int) -> np.ndarray:
    """Reads the cells of a board of another program.

    They are those of its trainer and workers, int64 (n_lanes + 1, N_CELLS).
    """
    rows = [os.pread(fd, 8 * N_CELLS, PAGE + row * BLOCK) for row in range(n_lanes + 1)]
    return np.stack([np.frombuffer(row, np.int64) for row in rows])


def read_facts(fd: int) -> dict[str, Any]:
    """Reads the facts of another program's board.

    Empty if they are being written.
    """
    try:
        return dict(json.loads(os.pread(fd, PAGE, 0).rstrip(b"\0")))
    except ValueError:
        return {}
