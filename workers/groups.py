"""Limits of the control groups that this process is in."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def folders(controller: str, root: Path = ROOT, own: Path = OWN) -> Iterator[tuple[Path, int]]:
    """The folder of each group that limits what a controller counts, the innermost first, and its version, 2 or 1."""
    for line in own.read_text().splitlines() if own.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controllers
        group = base / path.strip("/")
        for folder in (group, *group.parents):
            yield folder, 1 if controllers else 2
            if folder == base:
                break


def n_cores(root: Path = ROOT, own: Path = OWN) -> int:
    """How many cores this process may use: those that it is bound to, within the quotas of its control groups."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder, version in folders("cpu", root, own):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit there
            if version == 2:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            else:
                quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if quota > 0 and period > 0:  # -1 is no limit
                found = min(found, math.ceil(quota / period))
    return found
