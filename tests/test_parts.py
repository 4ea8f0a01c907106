"""The parts of the suite and the order of its tests; programs that start quickly are as others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import parts
import pytest

TESTS = Path(__file__).parent


def test_long_files_are_there():
    assert [name for name in parts.LONG_FILES if not (TESTS / name).exists()] == []


@pytest.mark.parametrize("n_workers", [1, 2, 3, 8])
def test_every_test_is_dealt_once_and_shares_begin_with_long_files(n_workers):
    names = ["tests/a.py", *(f"tests/{name}" for name in parts.LONG_FILES), "tests/b.py"]
    items = [SimpleNamespace(location=(name, number, "")) for name in names for number in range(20)]
    dealt = parts.deal(items, n_workers)
    assert Counter(map(id, dealt)) == Counter(map(id, items))
    firsts = [dealt[len(items) * worker // n_workers].location[0] for worker in range(n_workers)]
    assert set(firsts) <= {f"tests/{name}" for name in parts.LONG_FILES} and dealt[0] is items[20]


PROGRAM = """
import os, sys
print(__name__, sys.argv, os.getppid(), sys.path[0] == {folder!r}, "conftest" in sys.modules)
print(sys.stdin.read())
if len(sys.argv) > 1:
    raise ValueError("at the end")
sys.exit(3)
"""


@pytest.mark.quick
@pytest.mark.usefixtures("quick_programs")
def test_a_program_that_starts_quickly_is_as_others(subprocess_env, tmp_path):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format(folder=str(tmp_path)))
    options = {"capture_output": True, "text": True, "env": subprocess_env, "cwd": tmp_path, "input": "said"}
    for command in ([str(file)], ["-c", PROGRAM.format(folder="")]):
        quick = subprocess.run([sys.executable, *command], **options)
        usual = subprocess.run([sys.executable, "-B", *command], **options)
        assert (quick.returncode, quick.stdout, quick.stderr) == (usual.returncode, usual.stdout, usual.stderr)
        assert usual.returncode == 3 and str(os.getpid()) in usual.stdout
        quick = subprocess.run([sys.executable, *command, "fails"], **options)
        usual = subprocess.run([sys.executable, "-B", *command, "fails"], **options)
        assert (quick.returncode, quick.stdout, quick.stderr) == (usual.returncode, usual.stdout, usual.stderr)
        assert usual.returncode == 1 and "ValueError: at the end" in usual.stderr
