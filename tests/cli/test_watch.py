"""`collect --trace`, `rlstructs trace` and `rlstructs top`."""

from __future__ import annotations

import collections
import itertools
import os
import re
import subprocess
import sys

import pytest

from rlstructs.cli import watch
from rlstructs.cli.command import main
from rlstructs.trace.board import Board, find_boards

PROGRAM = """
import sys
from rlstructs import RL_Batcher
with RL_Batcher.make("CartPole-v1", n_envs=4, n_workers=2, n_timesteps=20, seed=0) as batcher:
    for n, _ in enumerate(batcher.rollouts()):
        batcher.update(None)
        if n == 5:
            print("begun", flush=True)
        if n > 5:
            sys.stdin.readline()
            break
"""


@pytest.fixture
def program():
    """A program that has collected some rollouts, and ends when its input does."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdout.readline() == b"begun\n"
        yield started
        started.stdin.close()


def test_a_timeline_of_collect_is_explained(tmp_path, capsys):
    path = str(tmp_path / "run.json")
    assert main(["collect", "CartPole-v1", "--workers", "2", "--envs", "2", "--steps", "2000", "--trace", path]) == 0
    assert path in capsys.readouterr().out
    assert main(["trace", path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and lines[1].startswith("to do: ") and lines[4].startswith("2,048 steps")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "\xff",
        "[\n{]\n",
        "[\n5\n",
        f"[\n{'[' * 100_000}\n",
        '[\n{"ph":"E","tid":1}\n',
        '[\n{"ph":"X","tid":0,"name":"a"}\n',
    ],
    ids=lambda content: content[:20],
)
def test_what_is_no_timeline_is_refused(tmp_path, capsys, content):
    path = tmp_path / "run.json"
    path.write_text(content, encoding="latin-1")
    assert main(["trace", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"rlstructs: error: {path}: no timeline of rlstructs, or a damaged one: ")


def test_a_named_pipe_is_refused_as_a_timeline(tmp_path, capsys):
    os.mkfifo(tmp_path / "run.json")
    assert main(["trace", str(tmp_path / "run.json")]) == 2
    assert "run.json: is a named pipe, expected a regular file" in capsys.readouterr().err


def test_a_file_of_another_ending_is_refused(capsys, tmp_path):
    assert main(["collect", "CartPole-v1", "--trace", str(tmp_path / "run.txt")]) == 2
    assert "--trace: the name must end in .json" in capsys.readouterr().err


def test_top_shows_a_program_until_it_ends(program, capsys, monkeypatch):
    monkeypatch.setattr(watch, "PERIOD", 0.01)
    assert main(["top", str(program.pid), "--times", "2"]) == 0
    first, speed, _, header, *workers = capsys.readouterr().out.splitlines()[:6]
    assert first == f"process {program.pid}: 2 workers of 2 environments, 20 timesteps, run_ahead=0"
    assert re.search(r"in all \d+ steps, \d+ episodes, 0 restarts, \d+ updates", speed)
    assert header.split()[:4] == ["worker", "pid", "steps/s", "rollouts"]
    assert [line.split()[0] for line in workers] == ["0", "1"]
    assert all(int(line.split()[3]) >= 6 for line in workers)
    looks = watch.watch(find_boards()[program.pid])
    next(looks)
    program.stdin.close()
    program.wait(60)
    assert list(looks) == []


def test_top_finds_a_program_that_closes_other_files_meanwhile(program, monkeypatch):
    def closed_meanwhile(link):
        if next(counts[link.parent]) == 0:
            raise FileNotFoundError(link)
        return found(link)

    counts, found = collections.defaultdict(itertools.count), os.readlink
    monkeypatch.setattr(os, "readlink", closed_meanwhile)
    assert program.pid in find_boards()


def test_top_ends_where_another_file_has_the_number_of_the_board(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "PERIOD", 0.01)
    board, link = Board.make(1, n_timesteps=1, run_ahead=0), tmp_path / "board"
    link.symlink_to(f"/proc/self/fd/{board.arena.fileno()}")
    looks = watch.watch(link)
    assert "1 workers of ? environments" in next(looks)
    board.write_facts(n_envs=4)  # by a program that still starts
    assert "1 workers of 4 environments" in next(looks)
    link.unlink()
    link.write_text("")
    assert list(looks) == list(watch.watch(tmp_path / "gone")) == []
    board.close()


def test_top_says_that_there_is_no_such_program(capsys):
    assert main(["top", "1"]) == 2
    assert capsys.readouterr().err == "rlstructs: error: no program 1 runs a batcher on this machine\n"
