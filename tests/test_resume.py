"""A training that is killed with all of its processes comes to the same in the end; tests/resume.py has more."""

from __future__ import annotations

import random
import signal

import resume


def test_a_training_that_is_killed_comes_to_the_same(subprocess_env, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", subprocess_env["PYTHONPATH"])
    for folder in ("undisturbed", "killed"):
        (tmp_path / folder).mkdir()
    wanted = resume.last_line(resume.start("ppo", tmp_path / "undisturbed", 8))
    # It is killed as soon as it has a checkpoint of the third rollout, in the middle of the next ones.
    program = resume.start("ppo", tmp_path / "killed", 8)
    resume.wait_for(program, tmp_path / "killed" / "latest")
    resume.kill_tree(program)
    assert program.returncode == -signal.SIGKILL
    assert list(resume.disturb("ppo", tmp_path / "killed", 8, 0, 0.0, random.Random(0))) == [(wanted, 0)]
