"""Leaves SIGTERM to the main process, if that handles it: clusters send it to all processes of a program at once.

The main process then finishes what it does, for which it needs its workers; they end with it. A handler, and not
SIG_IGN: programs that an environment starts would inherit that, and could no longer be ended by SIGTERM.
"""

from __future__ import annotations

import os
import signal
from typing import Any

# The line of /proc/PID/status with the signals that a process handles, as a hexadecimal mask.
CAUGHT = b"SigCgt:"


def leave_sigterm_to(main_pid: int) -> None:
    """Has this process ignore SIGTERM as long as the process `main_pid` handles it."""
    own_pid = os.getpid()

    def handle(number: int, _: Any) -> None:
        # A forked child of this process is not meant: its parent may end it.
        if os.getpid() != own_pid or not handles_sigterm(main_pid):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, handle)


def handles_sigterm(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM; False where the system does not say."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            masks = [line.split()[1] for line in file if line.startswith(CAUGHT)]
    except OSError:
        return False
    return bool(masks) and bool(int(masks[0], 16) >> (signal.SIGTERM - 1) & 1)
