"""Cores and memory that control groups leave this process, and that it keeps."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

# Where control groups are mounted, and the file that lists those of this process.
ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Bytes of a large array, see `keep_freed_memory`.
LARGE = 8 << 20


def list_groups(controller: str, root: Path = ROOT, own: Path = OWN) -> Iterator[tuple[Path, int]]:
    """Lists the folders of this process's control groups for a controller, the innermost first.

    Yields:
        The folder, and the version of control groups that it follows, 1 or 2.
    """
    yield from _groups_in(_read(str(own)).decode() if own.exists() else "", controller, root)


@lru_cache(maxsize=8)
def _groups_in(text: str, controller: str, root: Path) -> list[tuple[Path, int]]:
    """Returns the groups that a file lists.

    The result is cached, because it is nearly always the same file.
    """
    found = []
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controllers
        group = base / path.strip("/")
        for folder in (group, *group.parents):
            found.append((folder, 1 if controllers else 2))
            if folder == base:
                break
    return found


def n_cores(root: Path = ROOT, own: Path = OWN) -> int:
    """Counts the cores that this process may use.

    These are its CPU affinity, within the quotas of its control groups.
    """
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
    """Returns the bytes of memory that this process can still allocate.

    None if that is unknown.

    The machine's free memory and the limits of this process's control groups count.
    """
    machine = _read_machine_bytes()
    known = [*([] if machine is None else [machine]), *_read_group_bytes(enough=machine)]
    return min(known) if known else None


def _read_machine_bytes() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(_read("/proc/meminfo").split(b"MemAvailable:")[1].split(None, 1)[0]) * 1024  # the file counts in KiB
    return None


def _read_group_bytes(root: Path = ROOT, own: Path = OWN, enough: int | None = None) -> list[int]:
    """Returns the bytes that each control group's limit leaves.

    Where at least `enough` is left, it may return less than that limit leaves.
    """
    found = []
    for folder, version in list_groups("memory", root, own):
        names = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
        with contextlib.suppress(OSError, ValueError):  # a missing file or the word "max" means no limit
            limit, usage = (int(_read(f"{folder}/memory.{name}")) for name in names)
            is_enough = enough is not None and limit - usage >= enough  # its statistics take the kernel longest
            more = 0 if is_enough else _read_reclaimable_bytes(f"{folder}/memory.stat")
            found.append(max(0, limit - usage + more))
    return found


def _read_reclaimable_bytes(statistics: str) -> int:
    """Reads how many bytes of a control group are reclaimable cache.

    They count as used, but the kernel frees them.
    """
    with contextlib.suppress(OSError, ValueError):
        words = _read(statistics).split()
        counts = dict(zip(words[::2], words[1::2], strict=True))
        return int(counts.get(b"total_inactive_file", counts.get(b"inactive_file", 0)))
    return 0


def _read(path: str) -> bytes:
    """Reads a file of the kernel; columns ask for several before they are allocated."""
    with open(path, "rb", buffering=0) as file:
        return file.read()


@lru_cache(maxsize=1)
def keep_freed_memory() -> None:
    """Has the C library keep the memory of freed arrays for the next ones.

    glibc gives arrays above 128 kB back to the system as they are freed, and each page of the next one costs a fault:
    copies of a large batch took several times as long as those of a small one. Its limit follows the largest array that
    was freed, here one whose pages are never touched; up to twice as much stays with the process.
    """
    bytes(LARGE)
