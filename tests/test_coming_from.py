"""The table of docs/questions/coming_from.md names what there is: every class and method that is said to be here is."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs/questions/coming_from.md"
# Of each system: where its classes are here, and which of them have its methods.
SYSTEMS = {
    "rlstructures": ("rlstructs", ["RL_Batcher"]),
    "skrl": ("rlstructs.memories.torch", ["PrioritizedMemory"]),
    "rlberry": ("rlstructs.replay", ["ChunkReplayBuffer"]),
    "tianshou": ("rlstructs.replay", ["PrioritizedReplayBuffer"]),
    "torchrl": ("rlstructs.replay", ["DictTensorPrioritizedReplayBuffer"]),
}


def rows():
    """(system, what it is called there, what it is called here) of each row of the table."""
    table = PAGE.read_text().partition("\n\n|")[2].partition("\n\n")[0]
    system = ""
    for line in table.splitlines()[2:]:
        first, there, here = (cell.strip() for cell in line.strip("|").split(" | "))
        system = first or system
        yield system, there, here


def names(cell):
    return [name for name in re.findall(r"`([^`(]+)[^`]*`", cell) if re.fullmatch(r"[A-Za-z_]\w*", name)]


@pytest.mark.parametrize(("system", "there", "here"), list(rows()))
def test_what_is_said_to_be_here_is_here(system, there, here):
    module_name, classes = SYSTEMS[system]
    module = importlib.import_module(module_name)
    wanted = names(there) if here.startswith("the same") else []
    wanted += [name for name in names(here) if name[0].isupper()]
    owners = [module, importlib.import_module("rlstructs"), *(getattr(module, name) for name in classes)]
    assert not [name for name in wanted if not any(hasattr(owner, name) for owner in owners)]


def test_the_table_has_all_five():
    found = list(rows())
    assert {system for system, _, _ in found} == set(SYSTEMS)
    assert sum(len(names(there)) for _, there, _ in found) > 80
