"""What the tests see of processes; imports nothing heavy, so that workers may import it too."""

from __future__ import annotations

import contextlib
import os
import time

import psutil

# What the library calls shared memory where it needs a name for a moment.
PREFIX = "rls"
# Seconds. What takes longer hangs, however many other programs wait for a core; a hang is all that this is to find.
LIMIT = 600.0
# Words in the commands of processes that a program starts once and keeps.
STAYING = ("forkserver import", "resource_tracker", "program_server")


def worker_pids():
    """The processes that this one has started, directly or not, but for those that stay: the fork
    server, the server of programs and the standard library's resource tracker."""
    me, pids = psutil.Process(), set()
    for process in me.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends meanwhile
            if process.ppid() != me.pid or not any(word in command_of(process) for word in STAYING):
                pids.add(process.pid)
    return pids


def command_of(process):
    """The command of a process; "" if it has ended and its parent has not asked how."""
    try:
        return " ".join(process.cmdline())
    except psutil.ZombieProcess:
        return ""


class JumpingTime:
    """The module `time`, to whose monotonic clock an hour is added from the n-th look at it on."""

    def __init__(self, n):
        self.n, self.looks = n, 0

    def monotonic(self):
        self.looks += 1
        return time.monotonic() + (3600.0 if self.looks >= self.n else 0.0)


def exists(pid):
    """Whether a process has not ended. One with threads is a zombie before the last of them has let go of its pipes."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE or len(os.listdir(f"/proc/{pid}/task")) > 1
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return False


def wait_until(happened, seconds=LIMIT):
    """Waits for what another process does; it is an error that it has not after so many seconds."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        os.sched_yield()


class Deadline:
    """Fails where a block takes longer than it may, on a machine that has a core for each program that wants one.

    On a busy one, where nobody can say how long anything takes, it fails where the block hangs.
    """

    def __init__(self, seconds=5.0):
        self.seconds = seconds

    def __enter__(self):
        self.was_busy, self.started = is_busy(), time.monotonic()

    def __exit__(self, *_):
        took = time.monotonic() - self.started
        assert took < (LIMIT if self.was_busy or is_busy() else self.seconds)


def is_busy():
    """Whether programs wait for cores, now or in the last minute."""
    with open("/proc/loadavg") as file:
        load, _, _, runnable, _ = file.read().split()
    n_cores = len(os.sched_getaffinity(0))
    return float(load) > n_cores / 2 or int(runnable.split("/")[0]) > n_cores


def wait_until_gone(pids):
    """Waits until none of these processes is there."""
    wait_until(lambda: not any(map(exists, pids)))


def named_memory(*pids):
    """Names of shared memory and semaphores that these processes have mapped or open, and of all that is called ours.

    Not all names that there are: other programs have theirs.
    """
    inodes, device = set(), os.stat("/dev/shm").st_dev
    for pid in pids:
        with open(f"/proc/{pid}/maps") as lines:  # address, permissions, offset, device, inode, path
            inodes |= {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                status = os.stat(f"/proc/{pid}/fd/{fd}")
            except FileNotFoundError:  # that of the listing itself
                continue
            if status.st_dev == device:
                inodes.add(status.st_ino)
    # By inode, as a semaphore is mapped before it gets its name.
    with os.scandir("/dev/shm") as entries:
        return {entry.name for entry in entries if entry.name.startswith(PREFIX) or entry.inode() in inodes}
