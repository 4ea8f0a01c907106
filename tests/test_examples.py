"""Every example runs, with tiny sizes, and so does the program in the README."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TINY = {"2_collect.py": ["--n-envs", "2", "--n-timesteps", "30", "--n-rollouts", "2"]}


def run(arguments, **options):
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=100, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("file", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_an_example_runs(file, subprocess_env, tmp_path):
    last = run([str(ROOT / "examples" / file), *TINY[file]], env=subprocess_env, cwd=tmp_path).splitlines()[-1]
    assert re.fullmatch(r"\d+ episodes, mean return [\d.]+", last)


def test_the_program_in_the_readme_prints_what_it_says(subprocess_env, tmp_path):
    readme = (ROOT / "README.md").read_text()
    program, printed = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", readme, re.DOTALL).groups()
    assert run(["-c", program], env=subprocess_env, cwd=tmp_path) == printed
