"""A training that is killed with all of its processes comes to the same in the end; tests/resume.py has more."""

from __future__ import annotations

import random
import signal

import pytest
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


@pytest.mark.slow
def test_ten_kills_of_compiled_rollouts_change_nothing(subprocess_env, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", subprocess_env["PYTHONPATH"])
    for folder in ("undisturbed", "killed"):
        (tmp_path / folder).mkdir()
    wanted = resume.last_line(resume.start("jax", tmp_path / "undisturbed", 240))
    # Each time it is killed as soon as it has a newer checkpoint, of the eighty that there are.
    latest = tmp_path / "killed" / "latest"
    for _ in range(10):
        before = resume.read(latest)
        program = resume.start("jax", tmp_path / "killed", 240)
        resume.wait_for(program, latest, before)
        resume.kill_tree(program)
        assert program.returncode == -signal.SIGKILL and resume.read(latest) != before
    assert resume.last_line(resume.start("jax", tmp_path / "killed", 240)) == wanted
