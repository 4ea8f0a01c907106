"""`pairs.py`: pairs of settings meet, and what the library does in them is proved."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from pairs import Rule, Table, read, refuse_case, run_case, tables, written

TABLES = tables()
# Cases of each table in the quick part, and seconds after which no other case begins in the slow one.
N_QUICK = {"batchers": 5, "surfaces": 15}
LIMITS = {"batchers": 70, "surfaces": 40, "spawned": 30, "ray": 30}


def draw(table, number, **values):
    """A case that is allowed, by its number."""
    rng = random.Random(number)
    names = [name for name in table.settings if name not in values]
    return table.complete(values, rng.sample(names, len(names)), set(), rng)


@pytest.mark.parametrize("number", range(N_QUICK["batchers"]))
def test_every_row_of_a_batcher_is_proved(number):
    processes = ("0", "1 forkserver", "2 forkserver")[number % 3]
    run_case(TABLES["batchers"], draw(TABLES["batchers"], number, processes=processes))


@pytest.mark.parametrize("number", range(N_QUICK["surfaces"]))
def test_every_row_that_is_drawn_is_proved(number):
    run_case(TABLES["surfaces"], draw(TABLES["surfaces"], number))


# One of each rule; the program has the others.
REFUSED = [(table, *each) for table in TABLES.values() if table.strength == 2 for each in {id(rule): (case, rule)
           for case, rule in table.refused()}.values()]  # fmt: skip


@pytest.mark.parametrize(("table", "case", "rule"), REFUSED, ids=[written(case, table) for table, case, _ in REFUSED])
def test_settings_that_do_not_go_together_are_refused_by_name(table, case, rule):
    refuse_case(table, case, rule)


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITS)
def test_pairs_of_settings_hold(name, subprocess_env):
    program = str(Path(__file__).with_name("pairs.py"))
    command = [sys.executable, program, "--only", name, "--seed", "4", "--limit", str(LIMITS[name])]
    found = subprocess.run(command, env=subprocess_env, capture_output=True, text=True, timeout=1800)
    assert found.returncode == 0, found.stdout + found.stderr
    assert " 0 failed" in found.stdout


class TestTable:
    SETTINGS = {"a": ("1", "2", "3"), "b": ("1", "2"), "c": ("1", "2"), "d": ("1", "2", "3")}  # noqa: RUF012
    RULES = (
        Rule({"a": ("1",), "b": ("2",)}, "", None),
        # With the third, a=3 and d=3 never meet.
        Rule({"a": ("3",), "c": ("2",)}, "", None), Rule({"c": ("1",), "d": ("3",)}, "not so", ValueError),
    )  # fmt: skip

    def table(self, run=lambda case: None):
        return Table(self.SETTINGS, self.RULES, run)

    @pytest.mark.parametrize("seed", range(5))
    def test_each_pair_that_is_allowed_meets_in_a_case(self, seed):
        table = self.table()
        cases, impossible = table.cover(seed)
        assert all(table.allows(case) and case.keys() == self.SETTINGS.keys() for case in cases)
        met = {pair for case in cases for pair in table.pairs_of(case)}
        assert impossible == [(("a", "3"), ("d", "3"))]
        assert met == set(table.pairs()) - set(impossible)
        assert len(cases) < 12  # of 36

    def test_a_case_is_read_as_it_is_written(self):
        table = self.table()
        for case in (table.usual(), table.usual(a="2", d="3")):
            assert read(written(case, table), table) == case

    def test_a_combination_that_is_refused_has_to_be_refused_by_its_message(self):
        [(case, rule)] = self.table().refused()
        assert case == {"a": "1", "b": "1", "c": "1", "d": "3"}
        for error, passes in ((ValueError("not so"), True), (ValueError("other"), False), (None, False)):

            def run(case, error=error):
                if error is not None:
                    raise error

            if passes:
                refuse_case(self.table(run), case, rule)
            else:
                with pytest.raises(AssertionError, match="refused"):
                    refuse_case(self.table(run), case, rule)
