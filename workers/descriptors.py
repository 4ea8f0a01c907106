"""A file descriptor that travels to a child while it is being started."""

from __future__ import annotations

import os
from multiprocessing import reduction
from typing import Any


class Descriptor:
    """Owns a file descriptor; pickled into a starting process, it is a duplicate there."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    def fileno(self) -> int:
        if self._fd is None:
            raise ValueError("the file descriptor is closed")
        return self._fd

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.fileno()),)


def _received(duplicate: Any) -> Descriptor:
    return Descriptor(duplicate.detach())
