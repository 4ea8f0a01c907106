"""The soak, for seconds in place of minutes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import LIMIT

pytestmark = pytest.mark.usefixtures("quick_programs")


def test_workers_are_killed_and_stopped_and_nothing_wrong_is_handed_out(subprocess_env):
    limits = ["--minutes", "0.15", "--timeout", "10", "--patience", f"{LIMIT:g}"]
    program = [sys.executable, str(Path(__file__).parent / "soak.py"), *limits]
    done = subprocess.run(program, capture_output=True, text=True, env=subprocess_env, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    verified = re.findall(r"^(.*): ([\d,]+) transitions .* verified, (\d+) restarts", done.stdout, re.MULTILINE)
    names = ["CartPole-v1, run_ahead=0", "HalfCheetah-v5, run_ahead=2", "CartPole-v1, run_ahead=1, leased",
             "CartPole-v1, run_ahead=1, fed"]  # fmt: skip
    assert [name for name, _, _ in verified] == names
    assert sum(int(restarts) for _, _, restarts in verified) > 0
    assert done.stdout.endswith("nothing is left: processes, descriptors and shared memory are as before\n")
