"""What the tests see of processes; imports nothing heavy, so that workers may import it too."""

from __future__ import annotations

import os
import time

import psutil

# What the library calls shared memory where it needs a name for a moment.
PREFIX = "rls"


def worker_pids():
    """The processes that this one has started, directly or not, but for those that stay: the fork
    server and the standard library's resource tracker."""
    me = psutil.Process()
    return {
        process.pid
        for process in me.children(recursive=True)
        if process.ppid() != me.pid
        or not any(word in " ".join(process.cmdline()) for word in ("forkserver import", "resource_tracker"))
    }


class JumpingTime:
    """The module `time`, to whose monotonic clock an hour is added from the n-th look at it on."""

    def __init__(self, n):
        self.n, self.looks = n, 0

    def monotonic(self):
        self.looks += 1
        return time.monotonic() + (3600.0 if self.looks >= self.n else 0.0)


def exists(pid):
    """Whether a process has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(happened, seconds=30.0):
    """Waits for what another process does; it is an error that it has not after so many seconds."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        os.sched_yield()


def wait_until_gone(pids):
    """Waits until none of these processes is there."""
    wait_until(lambda: not any(map(exists, pids)))


def named_memory(*pids):
    """Shared memory with a name that these processes have mapped or open, and all that has a name of ours.

    Not all that there is: other programs have theirs.
    """
    found = {name for name in os.listdir("/dev/shm") if name.startswith(PREFIX)}
    for pid in pids:
        with open(f"/proc/{pid}/maps") as lines:
            found |= {line.split(maxsplit=5)[-1].strip() for line in lines}
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
            except FileNotFoundError:  # that of the listing itself
                continue
    return {name for name in found if name.startswith(("/dev/shm/", PREFIX)) and not name.endswith("(deleted)")}
