"""Limits of the control groups that this process is in."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

from workers import limits

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


def available_bytes() -> int | None:
    """How much memory can still be taken here, in bytes: of the machine and of its control groups."""
    known = [limit for limit in (_machine_bytes(), *_group_bytes()) if limit is not None]
    return min(known) if known else None


def _machine_bytes() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024  # the file counts in KiB
    return None


def _group_bytes(root: Path = limits.ROOT, own: Path = limits.OWN) -> list[int]:
    """What each limit of this process's control groups leaves: version 2, then version 1."""
    found = []
    for folder, version in limits.folders("memory", root, own):
        names = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit there
            limit, usage = (int((folder / f"memory.{name}").read_text()) for name in names)
            found.append(max(0, limit - usage + _reclaimable(folder / "memory.stat")))
    return found


def _reclaimable(statistics: Path) -> int:
    """Bytes of a control group that hold files nobody uses: they count as used, and give way."""
    with contextlib.suppress(OSError, ValueError):
        counts = dict(line.split() for line in statistics.read_text().splitlines())
        return int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))
    return 0
