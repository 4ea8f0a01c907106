"""`rlstructs bench tune`: what is tried, and what is said of it."""

from __future__ import annotations

import re

import numpy as np
import pytest

from rlstructs.cli.command import main
from rlstructs.cli.tune import BUSY_SHARE, BareLoop, Choice, choices, measure_speed, tune


def tried(n_cores, speed):
    found = {}
    for choice in choices(n_cores, found):
        assert choice not in found
        found[choice] = speed(choice)
    return found


@pytest.mark.parametrize("n_cores", [1, 2, 3, 8])
@pytest.mark.parametrize("n_envs", [4, 16, 64, 256])
@pytest.mark.parametrize("n_timesteps", [32, 128, 512])
def test_the_best_is_found_where_each_number_has_a_best_of_its_own(n_cores, n_envs, n_timesteps):
    for n_workers in {n_cores, max(1, n_cores - 1), max(1, n_cores // 2)}:
        wanted = Choice(n_workers, n_envs, n_timesteps)
        found = tried(n_cores, lambda choice, w=wanted: -sum(abs(a - b) for a, b in zip(choice, w, strict=True)))
        assert max(found, key=found.get) == wanted and len(found) <= 8
        assert all(1 <= choice.n_workers <= n_cores for choice in found)


def test_a_step_is_taken_once_even_if_there_is_no_time():
    assert measure_speed(lambda: 7, 0) > 0


def test_bare_loops_step_and_reset():
    loop = BareLoop(0, "CartPole-v1")
    assert loop.run(0.02) > 0
    loop.close()


def test_environments_that_wait_are_told_from_those_that_compute():
    for env_id, waits in (("CartPole-v1", False), ("waits:Waits-v0", True)):
        loop = BareLoop(0, env_id)
        assert (loop.busy_share(0.5) < BUSY_SHARE) == waits
        loop.close()


def test_environments_that_wait_are_tried_in_threads(capsys, monkeypatch):
    assert all(choice.threads for choice in choices(2, {Choice(2, 16, 128, True): 1.0}, threads=True))
    monkeypatch.setattr(f"{tune.__module__}.BUSY_SHARE", np.inf)  # short waits do, on a busy machine too
    assert main(["tune", "CartPole-v1", "--seconds", "0.01"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"best: --workers \d+ --envs 16 --timesteps 128 --threads, .* of the limit", lines[3])
    assert re.fullmatch(r"the environments wait .*: RL_Batcher.make\(threads=True\) has them wait together", lines[4])


def test_one_trial_is_run_however_short_the_time():
    untried = []
    trials = list(tune("CartPole-v1", 1, 0.01, untried))
    assert [trial.choice for trial in trials] == [Choice(1, 16, 128)]
    assert trials[0].speed > 0 and trials[0].limit > 0 and trials[0].share > 0
    assert untried == [Choice(1, envs, 128) for envs in (64, 256, 4)] + [Choice(1, 16, n) for n in (32, 512)]


@pytest.mark.parametrize("command", [["bench", "tune"], ["tune"]], ids=" ".join)
def test_the_command_prints_a_table_the_best_and_what_was_not_tried(capsys, command):
    assert main([*command, "CartPole-v1", "--seconds", "0.01"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first, header, *rows, last, untried = lines[:-5]
    assert [line.split(":")[0].split(",")[0] for line in lines[-4:-1]] == ["to do", "trainer", "workers"]
    assert re.fullmatch(r"not tried, as the time was up: --workers \d+ --envs 64 .*; --seconds gives more", untried)
    assert re.fullmatch(r"CartPole-v1, random agent; the limit is bare loops, a process for each core: \d+", first)
    assert header.split() == ["workers", "envs", "timesteps", "steps/s", "limit", "share"]
    workers, envs, timesteps, *_, share = rows[0].split()
    assert last == f"best: --workers {workers} --envs {envs} --timesteps {timesteps}, {share} of the limit"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["bench"], "the following arguments are required: WHAT; rlstructs bench --help lists .*"),
        (["bench", "tune"], "the following arguments are required: ENV_ID"),
        (["bench", "tune", "CartPole-v1", "--seconds", "0"], ".*--seconds: must be more than 0, got 0"),
        (["bench", "tune", "CartPole-v1", "--seconds", "long"], ".*--seconds: must be a number, got 'long'"),
        (["bench", "tune", "CartPol-v1"], "CartPol-v1: Environment `CartPol` doesn't exist.*"),
    ],
)
def test_wrong_arguments_of_the_command_say_what_is_wrong(capsys, arguments, words):
    assert main(arguments) == 2
    assert re.fullmatch(f"rlstructs: error: {words}\n", capsys.readouterr().err)
