"""How fast is each call that users make, and its neighbours? CPU time of rlstructs over that of the original.

    python benchmarks/neighbours.py                     every row; prints those above their bound, and a summary
    python benchmarks/neighbours.py --quick             a third of the rows, in five minutes
    python benchmarks/neighbours.py --rows skrl add     rows whose label has all these words, each printed; the first
                                                        may be a system
    python benchmarks/neighbours.py --json rows.jsonl   writes a line of JSON for every row, too

A row is one call in one variant: a number of rows or lanes, a dtype given or stored, a kind of array, some of the
lanes, a missing key, a dict observation, frames, infos, a size of batch; after a wrap, after one ragged add, shared,
exported. The call and the original's, where that is installed, take turns in one process with one torch thread; a
number is the lower quartile of the CPU time of the process. Two bounds hold for a row, unless it names another:

- at most 1.3 times the original's time;
- at most 3 times the fastest row of its group, whose rows move the same things, given in different ways (where more
  bytes are moved, so much more time is allowed).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import logging
import os
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import numpy as np
import torch
from neighbour_rows import Call, Maker, NotInstalled, Row

SYSTEMS = (
    "skrl",
    "skrl_jax",
    "skrl_warp",
    "tianshou",
    "torchrl",
    "rlberry",
    "sb3",
    "files",
    "stepping",
    "batcher",
    "programs",
)
BOUND, GROUP_BOUND = 1.3, 3.0
SECONDS = 0.006  # of one turn
ROUNDS, QUICK_ROUNDS, SLOW_ROUNDS = 13, 7, 3
SLOW = 0.2  # seconds of a call that is measured in fewer rounds, one call in each
QUICK_SHARE = 3  # of so many rows one is quick
Clock = Callable[[], float]


def micros(call: Call, n: int, clock: Clock) -> float:
    started = clock()
    for _ in range(n):
        call()
    return (clock() - started) / n * 1e6


def prepared(make: Maker, clock: Clock) -> tuple[Call, int]:
    """A call that is warm, and how often it is called in a turn."""
    call = make()
    call(), call()
    one = min(micros(call, 1, clock) for _ in range(3))
    n = max(1, min(500, int(SECONDS * 1e6 / max(one, 0.5))))
    for _ in range(min(n, 10)):
        call()
    return call, n


def measure(row: Row, rounds: int) -> dict[str, float]:
    """Microseconds of each contender of a row, by its name."""
    clock = time.perf_counter if row.is_wall_time else time.process_time
    ready = {}
    for name, make in row.contenders.items():
        with going_on_without(name):
            ready[name] = prepared(make, clock)
    if any(micros(call, 1, clock) > SLOW * 1e6 for call, _ in ready.values()):
        rounds = SLOW_ROUNDS
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(rounds):
        for name, (call, n) in ready.items():
            with going_on_without(name):
                times[name].append(micros(call, n, clock))
    return {name: sorted(found)[len(found) // 4] for name, found in times.items() if len(found) == rounds}


@contextlib.contextmanager
def going_on_without(name: str) -> Iterator[None]:
    """Lets an original fail: it cannot do it, or its compiled parts don't fit this version of torch."""
    try:
        yield
    except Exception:
        if name == "ours":
            raise


def all_rows(words: list[str], quick: bool) -> Iterator[Row]:
    """The rows of every system that is installed and whose labels have the words."""
    for system in [words[0]] if words and words[0] in SYSTEMS else SYSTEMS:
        try:
            module = importlib.import_module(f"neighbour_rows.{system}")
        except NotInstalled as error:
            print(f"{system}: left out, {error}", flush=True)
            continue
        for row in module.rows():
            row.label = f"{system} {row.call} | {row.variant}"
            chosen = all(word in row.label for word in words)
            if chosen and not (quick and zlib.crc32(row.label.encode()) % QUICK_SHARE):
                yield row


class Table:
    """What was measured, and which rows are above their bounds."""

    def __init__(self, shows_all: bool, path: str | None):
        self.shows_all, self.path = shows_all, path
        self.n_rows = 0
        self.slow: list[str] = []
        self.failed: list[str] = []
        self.groups: dict[str, list[tuple[Row, float]]] = {}
        if path:
            open(path, "w").close()

    def add(self, row: Row, times: dict[str, float]) -> None:
        self.n_rows += 1
        ours = times["ours"]
        ratios = {name: ours / micros for name, micros in times.items() if name != "ours"}
        is_slow = any(ratio > row.bound for ratio in ratios.values())
        if is_slow:
            self.slow.append(row.label)
        if is_slow or self.shows_all:
            parts = [f"{name} {micros:,.1f}" for name, micros in times.items()]
            parts += [f"x {ratio:.2f}" for ratio in ratios.values()]
            print(f"{row.label:100s} {'  '.join(parts)}{f'  > {row.bound}' if is_slow else ''}", flush=True)
        if row.group:
            self.groups.setdefault(f"{row.label.partition(' ')[0]} {row.group}", []).append((row, ours))
        if self.path:
            with open(self.path, "a") as file:
                print(json.dumps({"row": row.label, "bound": row.bound, "micros": times}), file=file)

    def fail(self, row: Row, error: Exception) -> None:
        self.failed.append(row.label)
        print(f"{row.label:100s} {type(error).__name__}: {error}", flush=True)

    def finish(self) -> bool:
        """Compares the rows of each group, prints the summary, and says whether all bounds hold."""
        cliffs = []
        for name, rows in self.groups.items():
            for row, ours in rows:
                fastest = min(other * max(1.0, row.n_bytes / each.n_bytes) for each, other in rows)
                if ours > GROUP_BOUND * fastest:
                    cliffs.append(row.label)
                    print(
                        f"{row.label:100s} ours {ours:,.1f}  fastest of {name!r} {fastest:,.1f}  x {ours / fastest:.2f}"
                    )
        print(
            f"{self.n_rows} rows: {len(self.slow)} above their bound beside the original, {len(cliffs)} above "
            f"{GROUP_BOUND} times the fastest of their group, {len(self.failed)} failed"
        )
        return not (self.slow or cliffs or self.failed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=[], metavar="WORD")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--all", action="store_true", help="print every row")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, numpy {np.__version__}; microseconds, one thread")
    table = Table(arguments.all or bool(arguments.rows), arguments.json)
    for row in all_rows(arguments.rows, arguments.quick):
        try:
            table.add(row, measure(row, QUICK_ROUNDS if arguments.quick else ROUNDS))
        except Exception as error:
            table.fail(row, error)
        finally:
            row.close()
        gc.collect()
    sys.exit(not table.finish())


if __name__ == "__main__":
    main()
