"""`rlstructs trace` explains a timeline; `rlstructs top` shows a running program."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlstructs.errors import SpecError

# Seconds between two looks at a program.
PERIOD = 0.5
TO_TOP = "\033[H\033[J"


def add_parsers(commands: Any, common: argparse.ArgumentParser, count: Callable[[str], int]) -> None:
    """Adds the two commands to the parser; `count` reads a number from 1 on."""
    parser = commands.add_parser(
        "trace",
        parents=[common],
        allow_abbrev=False,
        help="say what a timeline shows: where the time went, and what to do",
        description="Says in five lines where the time went in a timeline, and what to do about it.",
    )
    parser.set_defaults(run=_trace)
    file_help = "what batcher.trace or collect --trace wrote, also of a program that was killed"
    parser.add_argument("file", metavar="FILE", type=Path, help=file_help)
    parser = commands.add_parser(
        "top",
        parents=[common],
        allow_abbrev=False,
        help="show what the workers of a running program do",
        description="Shows twice a second what a running program and its workers do, until it ends or Ctrl-C. "
        "It reads memory that the program shares with its workers, and changes nothing.",
    )
    parser.set_defaults(run=_top)
    pid_help = "process id of the program; default: the only one of this user that runs a batcher"
    parser.add_argument("pid", metavar="PID", type=int, nargs="?", help=pid_help)
    parser.add_argument("--times", metavar="N", type=count, help="end after so many looks; default: none")


def _trace(options: argparse.Namespace) -> int:
    from rlstructs.files.opening import name_damage
    from rlstructs.trace.timeline import read_events
    from rlstructs.trace.verdict import Account, explain

    events = read_events(options.file)
    with name_damage(f"{options.file}: no timeline of rlstructs, or a damaged one"):
        lines = explain(Account.of_events(events))
    print("\n".join(lines))
    return 0


def _top(options: argparse.Namespace) -> int:
    from rlstructs.trace.board import find_boards

    boards = find_boards()
    if options.pid is None and len(boards) > 1:
        raise SpecError(f"several programs run a batcher: give one of the process ids {sorted(boards)}")
    if not boards or (options.pid is not None and options.pid not in boards):
        which = "of this user" if options.pid is None else str(options.pid)
        raise SpecError(f"no program {which} runs a batcher on this machine")
    board = boards[next(iter(boards)) if options.pid is None else options.pid]
    clear = TO_TOP if sys.stdout.isatty() else ""
    for text in itertools.islice(watch(board), options.times):
        print(clear + text, flush=True)
    return 0


def watch(board: Path) -> Iterator[str]:
    """Yields what a program does, twice a second until it ends.

    Args:
        board: the file in /proc that `find_boards` found.
    """
    from rlstructs.trace.board import read_cells, read_facts

    with contextlib.suppress(OSError), open(board, "rb") as file:  # it has ended
        fd, before, looked = file.fileno(), None, 0.0
        # Another file may get the number of a board that was closed. A program that starts goes on writing facts.
        while os.path.samestat(os.stat(board), os.fstat(fd)):
            if facts := read_facts(fd):
                cells, now = read_cells(fd, facts["n_lanes"]), time.perf_counter()
                if before is not None:
                    yield describe(facts, cells, cells - before, now - looked)
                before, looked = cells, now
            time.sleep(PERIOD)


def describe(facts: dict[str, Any], cells: Any, spent: Any, seconds: float) -> str:
    """Describes a program.

    Args:
        facts: of its board.
        cells: of its board, now.
        spent: how much the cells grew in these seconds.
    """
    from rlstructs.trace import lane as lanes

    def share(row: int, phase: int) -> str:
        return f"{spent[row, phase] / max(1, spent[row, : len(lanes.NAMES)].sum()):.0%}"

    shape = f"{facts['n_workers']} workers of {facts.get('n_envs', '?')} environments, {facts['n_timesteps']} timesteps"
    steps, episodes = int(spent[1:, lanes.STEPS].sum()), int(cells[1:, lanes.EPISODES].sum())
    trainer = [f"{name} {share(0, phase)}" for phase, name in enumerate(lanes.NAMES) if share(0, phase) != "0%"]
    lines = [
        f"process {facts['pid']}: {shape}, run_ahead={facts['run_ahead']}",
        f"{steps / seconds:,.0f} steps/s; in all {int(cells[1:, lanes.STEPS].sum()):,} steps, {episodes:,} episodes, "
        f"{cells[0, lanes.RESTARTS]} restarts, {cells[0, lanes.VERSION]} updates",
        f"trainer: {', '.join(trainer) or 'no phase has ended since the last look'}",
        f"{'worker':>6} {'pid':>8} {'steps/s':>9} {'rollouts':>9} {'behind':>6} {'agent':>6} {'envs':>6} {'reset':>6} "
        f"{'write':>6} {'update':>6} {'waits':>6}",
    ]
    for row in range(1, len(cells)):
        shares = lanes.AGENT, lanes.ENVIRONMENT, lanes.RESET, lanes.WRITE, lanes.UPDATE, lanes.ORDERLESS
        lines.append(
            f"{row - 1:6} {cells[row, lanes.PID]:8} {spent[row, lanes.STEPS] / seconds:9,.0f} "
            f"{cells[row, lanes.ROLLOUTS]:9} {max(0, cells[0, lanes.VERSION] - cells[row, lanes.VERSION]):6} "
            + " ".join(f"{share(row, phase):>6}" for phase in shares)
        )
    return "\n".join(lines)
