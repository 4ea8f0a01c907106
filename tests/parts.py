"""The two parts of the suite, and the order in which workers of xdist get their tests.

`pytest` runs the quick part, `pytest -m slow` the rest, and `pytest -m ""` both. A test is slow if it is marked so, as
whole files are by `pytestmark`, and if one of these makes it slow:

- it starts a Ray cluster, or programs of its own, each of which imports torch anew (`SLOW_FIXTURES`);
- its workers are spawned: each imports torch anew.

The mark `quick` keeps such a test in the quick part: of each package some that show its main promises.
"""

from __future__ import annotations

from itertools import chain

import pytest

SLOW_FIXTURES = {"cluster", "subprocess_env"}
# Files that take long, the longest first. A worker that gets one of them last would work on it alone.
LONG_FILES = (
    "distributed/test_distributed.py", "distributed/test_ray_replay.py", "test_docs.py", "test_examples.py",
    "test_fork.py", "test_soak.py", "batcher/test_failures.py", "batcher/test_interrupted_cells.py",
)  # fmt: skip


def mark(items):
    """Marks those as slow that are."""
    for item in items:
        if item.get_closest_marker("slow") is None and is_slow(item):
            item.add_marker(pytest.mark.slow)


def is_slow(item):
    """Whether a test that has no mark is slow."""
    if item.get_closest_marker("quick") is not None:
        return False
    params = item.callspec.params if hasattr(item, "callspec") else {}
    is_spawned = "spawn" in [value for value in params.values() if isinstance(value, str)]
    return is_spawned or not SLOW_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))


def deal(items, n_workers):
    """The items in an order in which each of the equal shares that workers get begins with long files."""
    files = {}
    for item in items:
        files.setdefault(item.location[0], []).append(item)
    long = [files.pop(name) for name in [f"tests/{name}" for name in LONG_FILES] if name in files]
    rest = list(chain(*files.values()))
    dealt = []
    for worker in range(n_workers):
        dealt += chain(*long[worker::n_workers])
        end = len(items) * (worker + 1) // n_workers - len(dealt)
        dealt += rest[: max(0, end)]
        del rest[: max(0, end)]
    return dealt + rest
