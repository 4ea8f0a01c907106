"""The workflows: each step is a script of the repository, and what releases check is true of it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ACTIONS = {"actions/checkout", "actions/setup-python", "actions/upload-artifact", "actions/download-artifact"}


def steps_of(path):
    jobs = yaml.safe_load(path.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def test_there_is_a_workflow_for_changes_and_one_for_releases():
    # YAML reads the key `on` as True.
    assert {path.stem: set(yaml.safe_load(path.read_text())[True]) for path in WORKFLOWS} == {
        "checks": {"pull_request", "push"},
        "release": {"push"},
    }


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_only_scripts_of_the_repository(path):
    for step in steps_of(path):
        assert ("run" in step) != ("uses" in step)
        if "uses" in step:
            assert step["uses"].partition("@")[0] in ACTIONS
        else:
            [line] = step["run"].strip().splitlines()
            script, *arguments = shlex.split(re.sub(r"\$\{\{ [\w.]+ \}\}", "value", line))
            assert script.startswith(".ci/") and os.access(ROOT / script, os.X_OK)
            assert all(re.fullmatch(r"[\w./]+", each) for each in arguments)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_job_has_a_limit_of_time_and_only_one_may_publish(path):
    jobs = yaml.safe_load(path.read_text())["jobs"]
    assert all("timeout-minutes" in job for job in jobs.values())
    writers = {name for name, job in jobs.items() if "write" in job.get("permissions", {}).values()}
    assert writers == ({"publish"} if path.stem == "release" else set())


def test_a_release_is_refused_where_the_tag_is_not_the_version():
    found = subprocess.run([ROOT / ".ci/release", "check", "v0.0.1"], capture_output=True, text=True)
    assert found.returncode == 1 and "expected v" in found.stderr


def test_version_changelog_and_citation_agree():
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "rlstructs/__init__.py").read_text(), re.M)[1]
    found = subprocess.run([ROOT / ".ci/release", "check", f"v{version}"], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
