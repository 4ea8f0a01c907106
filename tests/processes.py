"""What the tests see of processes; imports nothing heavy, so that workers may import it too."""

from __future__ import annotations

import psutil


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


def exists(pid):
    """Whether a process has not ended."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
