"""The same tests under the start method `fork`, in a process of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
# Those with tests that take a start method of ours; each line is one process. Memories start the threads of jax.
NAMES = (
    ("memories",),
    ("failures", "recovery", "worker_streams", "shared_vector_env"),
    ("batcher", "shared_vector_env_failures", "worker_logs", "workers"),
)


@pytest.mark.parametrize("names", NAMES, ids=" ".join)
def test_it_is_the_same_with_fork(names, subprocess_env):
    files = [str(file) for name in names for file in FOLDER.rglob(f"test_{name}.py")]
    assert len(files) == len(names)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", *files]
    done = subprocess.run(
        command, env={**subprocess_env, "TEST_FORK": "1"}, capture_output=True, text=True, cwd=FOLDER.parent
    )
    assert done.returncode == 0 and re.search(r"^\d+ passed", done.stdout, re.MULTILINE), done.stdout + done.stderr
