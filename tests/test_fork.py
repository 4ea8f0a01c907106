"""The same tests under the start method `fork`, in a process of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
# Those with tests that take a start method of ours.
NAMES = (
    "batcher", "failures", "memories", "recovery", "shared_vector_env", "shared_vector_env_failures", "worker_logs",
    "worker_streams", "workers",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_same_with_fork(name, subprocess_env):
    [file] = FOLDER.rglob(f"test_{name}.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(
        command, env={**subprocess_env, "TEST_FORK": "1"}, capture_output=True, text=True, cwd=FOLDER.parent
    )
    assert done.returncode == 0 and re.search(r"^\d+ passed", done.stdout, re.MULTILINE), done.stdout + done.stderr
