"""docs/contributing/architecture.md names what there is, and its walks pass through the modules that they name."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from helpers import count_batcher
from test_docs import OUTPUT, blocks_of
from walk import Walk

from rlstructs import RandomAgent, RL_Batcher
from rlstructs.memories.torch import RandomMemory
from rlstructs.replay import DictTensorReplayBuffer
from rlstructs.testing import Fault, FaultyEnv, create_faulty_envs

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/contributing/architecture.md").read_text()
DRAWING = (ROOT / "docs/contributing/data_flow.svg").read_text()
# What of the walks is neither the trainer nor the job: the start and the body of a worker process.
IN_WORKERS_ALONE = {"workers/loop.py", "rlstructs/worker_setup.py", "workers/failures.py"}


def tree_of(page):
    """Package -> the modules that the tree lists below it; folders end with a slash."""
    tree, parents = {}, []
    lines = next(block.lines for block in blocks_of(page) if block.kind == OUTPUT)
    for line in lines:
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        parents = parents[:depth]
        if name.endswith("/"):
            parents.append(name)
            tree["".join(parents)] = set()
        else:
            tree["".join(parents)].add(name)
    return tree


def packages():
    """Package, with a slash at its end -> its modules."""
    found = {}
    for init in [file for top in ("workers", "rlstructs") for file in (ROOT / top).rglob("__init__.py")]:
        names = {file.stem for file in init.parent.glob("*.py")} - {"__init__", "__main__"}
        found[f"{init.parent.relative_to(ROOT)}/"] = names
    return found


def test_the_tree_names_every_package_and_no_other():
    assert set(tree_of(PAGE)) == set(packages())


@pytest.mark.parametrize("package", [package for package, modules in tree_of(PAGE).items() if modules])
def test_a_package_whose_modules_are_listed_has_these_and_no_others(package):
    assert tree_of(PAGE)[package] == packages()[package]


def test_every_package_has_a_folder_of_tests_by_its_name():
    names = {package.removeprefix("rlstructs/").split("/")[0] for package in packages()} - {""}
    assert {name for name in names if not list((ROOT / "tests" / name).glob("test_*.py"))} == set()


def test_every_line_of_the_tree_has_a_caption_but_that_of_the_root():
    lines = next(block.lines for block in blocks_of(PAGE) if block.kind == OUTPUT)
    assert [line for line in lines if len(line.split(maxsplit=1)) < 2] == ["rlstructs/"]


def test_every_path_on_the_page_exists():
    paths = set(re.findall(r"`((?:workers|rlstructs|tests|docs)/[\w/.]+)`", PAGE))
    paths |= set(re.findall(r"\b(rlstructs/\w+|workers)\b", DRAWING))
    assert len(paths) > 50 and not [path for path in sorted(paths) if not (ROOT / path).exists()]


def walked(section):
    """The modules that a section of the page names in its numbered lists."""
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    items = "\n".join(line for line in text.splitlines() if re.match(r"\d+\. ", line))
    found = set(re.findall(r"`([\w/]+\.py)`", items))
    assert found
    return {path for path in found if "/" in path}


def entered(*calls):
    """The modules of the library that these calls enter, in this process."""
    walk = Walk()
    for call in calls:
        sys.setprofile(walk)
        try:
            call()
        finally:
            sys.setprofile(None)
    return set(walk.relative_files())


def test_an_observation_an_action_and_an_update_walk_as_the_page_says():
    got = []
    with count_batcher([[3, 4]], 5, autoreset=True, n_processes=0) as batcher, torch.no_grad():
        batcher.reset()
        buffer = DictTensorReplayBuffer(batch_size=4)
        inside = entered(
            batcher.execute,
            lambda: got.append(batcher.get()[0]),
            lambda: buffer.add_trajectories(got[0]),
            buffer.sample,
            lambda: batcher.update(torch.nn.Linear(1, 1)),
        )
    with count_batcher([[3, 4]], 5, autoreset=True) as batcher:
        batcher.reset()
        outside = entered(batcher.execute, batcher.get, lambda: batcher.update(1.5))
    named = {path for thing in ("an observation", "an action", "an update of weights")
             for path in walked(f"The walk of {thing}")}  # fmt: skip
    assert named - inside - outside == IN_WORKERS_ALONE & named


def test_a_row_that_a_worker_writes_walks_as_the_page_says():
    memory = RandomMemory(memory_size=10, num_envs=2, device="cpu")
    with count_batcher([[3, 4]], 5, autoreset=True, n_processes=0) as batcher:
        passed = entered(lambda: batcher.feed(memory), batcher.reset, batcher.execute, batcher.wait)
    assert walked("The walk of a row that a worker writes to a memory") - passed == set()


def test_a_crash_walks_as_the_page_says():
    faults = [Fault("kill", at="step", count=3, generations=[0])]
    with RL_Batcher(
        5, RandomAgent, {"action_space": FaultyEnv.action_space}, create_faulty_envs, {"n_envs": 1, "faults": faults},
        n_processes=1, seeds=0, on_worker_failure="restart",
    ) as batcher:  # fmt: skip
        batcher.reset()
        batcher.execute()
        passed = entered(batcher.get)
        assert batcher.stats()["restarts"] == 1
    assert walked("The walk of a crash") - passed == set()


def test_what_the_page_leaves_out_is_noticed():
    tree = tree_of("```text\na/   first\n  m   second\n  b/  third\nc/  fourth\n  n   fifth\n```\n")
    assert tree == {"a/": {"m"}, "a/b/": set(), "c/": {"n"}}
