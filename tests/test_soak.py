"""The soak, for seconds in place of minutes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def test_workers_are_killed_and_stopped_and_nothing_wrong_is_handed_out(subprocess_env):
    limits = ["--minutes", "0.15", "--timeout", "10", "--patience", "60"]
    program = [sys.executable, str(Path(__file__).parent / "soak.py"), *limits]
    done = subprocess.run(program, capture_output=True, text=True, env=subprocess_env, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    verified = re.findall(r"^(.*): ([\d,]+) transitions .* verified, (\d+) restarts", done.stdout, re.MULTILINE)
    assert [env_id for env_id, _, _ in verified] == ["CartPole-v1", "HalfCheetah-v5"]
    assert sum(int(restarts) for _, _, restarts in verified) > 0
    assert done.stdout.endswith("nothing is left: processes, descriptors and shared memory are as before\n")
