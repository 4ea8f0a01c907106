"""Families of environments that are installed work, and their page shows the code that runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import FAMILIES, is_installed, run_apart
from test_docs import blocks_of

PAGE = Path(__file__).parents[2] / "docs/works_with.md"


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if is_installed(family)], ids=lambda family: family.name
)
def test_an_installed_family_works(family):
    row = run_apart(family, 0.01)
    assert "error" not in row, row["error"]
    assert row["speed"] > 0


def test_the_page_shows_the_code_that_runs():
    blocks = {block.kind.split('"')[1]: "\n".join(block.lines) for block in blocks_of(PAGE.read_text())[1:]}
    shown = {family.name: family.code.strip() for family in FAMILIES if family.name in blocks}
    assert shown == blocks and len(blocks) > 8


def test_the_page_has_a_row_for_each_family_and_the_id_of_those_that_have_one():
    lines = PAGE.read_text().splitlines()
    rows = [line.split("|")[1].strip() for line in lines if line.startswith("| ")][2:]
    assert rows == [f"{family.name} `{family.packages}`" for family in FAMILIES]
    ids = [line for line in lines if line.startswith("- **") and line.endswith('"`')]
    named = [family for family in FAMILIES if family.code.startswith("make = ")]
    assert ids == [f"- **{family.name}**: `{family.code.removeprefix('make = ')}`" for family in named]
