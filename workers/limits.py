"""Cores and memory that this process may use, within the limits of its control groups."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

# Where control groups are mounted, and the file that lists those of this process.
ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def list_groups(controller: str, root: Path = ROOT, own: Path = OWN) -> Iterator[tuple[Path, int]]:
    """Lists the folders of this process's control groups for a controller, the innermost first.

    Yields:
        The folder, and the version of control groups that it follows, 1 or 2.
    """
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
    """Counts the cores that this process may use: its CPU affinity, within the quotas of its control groups."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder, version in list_groups("cpu", root, own):
        with contextlib.suppress(OSError, ValueError):  # a missing file or the word "max" means no limit
            if version == 2:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            else:
                quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if quota > 0 and period > 0:  # -1 means no limit
                found = min(found, math.ceil(quota / period))
    return found


def available_bytes() -> int | None:
    """Returns how many bytes of memory this process can still allocate; None if that is unknown.

    The machine's free memory and the limits of this process's control groups count.
    """
    known = [limit for limit in (_read_machine_bytes(), *_read_group_bytes()) if limit is not None]
    return min(known) if known else None


def _read_machine_bytes() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024  # the file counts in KiB
    return None


def _read_group_bytes(root: Path = ROOT, own: Path = OWN) -> list[int]:
    """Reads how many bytes the limit of each of this process's control groups leaves."""
    found = []
    for folder, version in list_groups("memory", root, own):
        names = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
        with contextlib.suppress(OSError, ValueError):  # a missing file or the word "max" means no limit
            limit, usage = (int((folder / f"memory.{name}").read_text()) for name in names)
            found.append(max(0, limit - usage + _read_reclaimable_bytes(folder / "memory.stat")))
    return found


def _read_reclaimable_bytes(statistics: Path) -> int:
    """Reads how many bytes cache files for a control group: they count as used, but the kernel frees them."""
    with contextlib.suppress(OSError, ValueError):
        counts = dict(line.split() for line in statistics.read_text().splitlines())
        return int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))
    return 0
