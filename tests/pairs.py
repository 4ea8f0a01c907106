r"""Settings in pairs: each value of a setting meets each value of every other one, and every row is proved.

    python tests/pairs.py
    python tests/pairs.py --seed 3 --only batchers
    python tests/pairs.py --only surfaces --case 17
    python tests/pairs.py --only batchers --case 'env=gym,processes=2 fork'

A table lists the values of each setting, and the pairs that are excluded: because the library refuses them, which is
tested, or because there is no such call. A covering array is drawn, in which every other pair meets in some case, and
the cases are run. A new setting is one line in a table, and its pairs follow.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

# Seconds that a case may take before it counts as hanging.
LIMIT = 300
N_CANDIDATES = 12


@dataclass(frozen=True)
class Rule:
    """A combination of values that is excluded.

    Attributes:
        values: two settings, or more, with values of each.
        why: why there is no such case; or the pattern of the message with which the library refuses it.
        error: what the library raises; None if there is no such call.
    """

    values: Mapping[str, Sequence[str]]
    why: str
    error: type[Exception] | None = None

    def excludes(self, case):
        return all(case.get(name) in values for name, values in self.values.items())


@dataclass(frozen=True)
class Table:
    """Settings, and what is excluded.

    Attributes:
        settings: name -> values, the first of which is the usual one.
        rules: the combinations that are excluded.
        run: runs a case, a dict of values by name; raises what goes wrong.
        strength: 2 for pairs, 1 for values that each come once.
        around: the context of all cases.
    """

    settings: Mapping[str, Sequence[str]]
    rules: Sequence[Rule]
    run: Callable[[Mapping[str, str]], None] = field(compare=False)
    strength: int = 2
    around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext

    def allows(self, case):
        return not any(rule.excludes(case) for rule in self.rules)

    def usual(self, **values):
        return {name: each[0] for name, each in self.settings.items()} | values

    def pairs(self):
        """Every pair of values of two settings that no rule excludes by itself; of strength 1 every value."""
        for names in itertools.combinations(self.settings, self.strength):
            for values in itertools.product(*(self.settings[name] for name in names)):
                if self.allows(dict(zip(names, values, strict=True))):
                    yield tuple(zip(names, values, strict=True))

    def pairs_of(self, case):
        return itertools.combinations([(name, case[name]) for name in self.settings], self.strength)

    def complete(self, case, names, missing, rng):
        """A case that is allowed, with values for these settings too, and many missing pairs; None if there is none."""
        if not names:
            return case
        name, *rest = names

        def gain(value):
            mine = (name, value)
            others = case.items() if self.strength == 2 else [()]
            return sum((mine, each) in missing or (each, mine) in missing or (mine,) in missing for each in others)

        values = rng.sample(self.settings[name], len(self.settings[name]))
        for value in sorted(values, key=gain, reverse=True):
            longer = case | {name: value}
            if self.can_go_on(longer, rest) and (found := self.complete(longer, rest, missing, rng)):
                return found
        return None

    def can_go_on(self, case, names):
        """Whether a case is allowed, and each of these settings has a value that is."""
        return self.allows(case) and all(
            any(self.allows(case | {name: value}) for value in self.settings[name]) for name in names
        )

    def cover(self, seed):
        """Cases in which every pair meets that can, and the pairs that cannot because of a third setting."""
        rng, missing, impossible, cases = random.Random(seed), set(self.pairs()), [], []
        while missing:
            pair = rng.choice(sorted(missing))
            found = []
            for _ in range(N_CANDIDATES):
                names = [name for name in self.settings if name not in dict(pair)]
                case = self.complete(dict(pair), rng.sample(names, len(names)), missing, rng)
                if case is None:
                    impossible.append(pair)
                    missing.discard(pair)
                    break
                found.append((len(missing & set(self.pairs_of(case))), len(found), case))
            else:
                case = max(found)[2]
                cases.append({name: case[name] for name in self.settings})
                missing -= set(self.pairs_of(case))
        return cases, impossible

    def refused(self):
        """A case for each pair of values that the library refuses, and its rule."""
        for rule in self.rules:
            if rule.error is not None:
                for values in itertools.product(*rule.values.values()):
                    case = self.usual(**dict(zip(rule.values, values, strict=True)))
                    others = [each for each in self.rules if each is not rule and each.excludes(case)]
                    if not others:
                        yield case, rule


def tables():
    import pair_batchers
    import pair_surfaces

    return {
        "batchers": pair_batchers.TABLE, "surfaces": pair_surfaces.TABLE, "spawned": pair_batchers.SPAWNED_TABLE,
        "ray": pair_batchers.RAY_TABLE,
    }  # fmt: skip


def run_case(table, case):
    """Runs a case; what it warns of is an error, and so is a case that hangs."""

    def give_up(*_):
        faulthandler.dump_traceback()
        raise TimeoutError(f"it hangs: {LIMIT} seconds")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LIMIT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            table.run(case)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def refuse_case(table, case, rule):
    """Runs a case that the library has to refuse."""
    import re

    try:
        run_case(table, case)
    except rule.error as error:
        assert re.search(rule.why, str(error)), f"refused by {error!r}, expected {rule.why!r}"
        return
    raise AssertionError(f"{rule.values} is not refused, expected {rule.error.__name__}: {rule.why}")


def written(case, table):
    """A case as an argument of `--case`: the settings that are not the usual ones."""
    usual = table.usual()
    return ",".join(f"{name}={value}" for name, value in case.items() if value != usual[name]) or "usual"


def read(text, table):
    given = [] if text == "usual" else [each.split("=", 1) for each in text.split(",")]
    case = table.usual(**dict(given))
    for name, value in case.items():
        assert value in table.settings.get(name, ()), f"--case: there is no {name}={value}"
    return case


def main(options):
    return sum(run_table(name, table, options) for name, table in tables().items() if options.only in (None, name))


def run_table(name, table, options):
    """Runs the cases of a table; returns how many failed."""
    with table.around():
        began = time.monotonic()
        text = options.case or ""
        cases, impossible = table.cover(options.seed) if not text or text.isdigit() else ([read(text, table)], [])
        refused = [] if text or table.strength == 1 else list(table.refused())
        cases = [cases[int(text)]] if text.isdigit() else cases
        # jax warns of a fork from the moment on in which it is used.
        cases.sort(key=lambda case: not case.get("processes", "").endswith("fork"))
        failed, ran = [], []
        for number, (case, rule) in enumerate([*((case, None) for case in cases), *refused]):
            if time.monotonic() - began > options.limit:
                break
            ran.append(case)
            if options.verbose:
                print(number, written(case, table), flush=True)
            try:
                run_case(table, case) if rule is None else refuse_case(table, case, rule)
            except Exception:
                failed.append(number)
                print(
                    f"\n{traceback.format_exc()}\n{case}\n"
                    f"python tests/pairs.py --only {name} --case '{written(case, table)}'",
                    flush=True,
                )
                if options.first:
                    break
        pairs = set(table.pairs())
        covered = pairs & {pair for case in ran for pair in table.pairs_of(case)}
        what = "pairs" if table.strength == 2 else "values"
        print(f"{name}: {len(pairs)} {what}, {len(covered)} covered, {len(impossible)} impossible because of a third "
              f"setting; {len(ran)} of {len(cases) + len(refused)} cases ran, {len(refused)} of them to be refused, "
              f"{len(failed)} failed, {time.monotonic() - began:.0f} s, seed {options.seed}", flush=True)  # fmt: skip
    return len(failed)


if __name__ == "__main__":
    import folders  # noqa: F401 - helpers are imported by name, in workers too

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the covering arrays; default: 0")
    parser.add_argument("--only", help="one table: batchers, surfaces, spawned or ray")
    parser.add_argument("--case", help="one case: its number, or its settings, as a failure prints them")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no other case begins")
    parser.add_argument("--first", action="store_true", help="stop at the first failure")
    parser.add_argument("--verbose", action="store_true", help="print each case before it runs")
    sys.exit(bool(main(parser.parse_args())))
