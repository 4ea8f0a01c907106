"""Imports and initialises warp, and keeps it from printing."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

WARP_MAX_AXES = 4
WARP_DTYPES = "bool, integers of 8 to 64 bits, float16, bfloat16, float32 and float64"
# Held while warp is imported, or loads and compiles; a fork waits for it, so that a child finds warp whole.
_START_LOCK = threading.RLock()
os.register_at_fork(before=_START_LOCK.acquire, after_in_parent=_START_LOCK.release, after_in_child=_START_LOCK.release)


@functools.cache
def start_warp() -> Any:
    """The warp module, ready for use."""
    with _START_LOCK:
        import warp as wp

    # Its greeting, and its warning about a missing GPU driver, would mix with the output of the program.
    no_driver = b"Could not find or load the NVIDIA CUDA driver"
    with quiet_warp(), contextlib.nullcontext() if _has_cuda_driver() else _drop_lines(no_driver):
        wp.init()
    return wp


@contextlib.contextmanager
def quiet_warp() -> Iterator[None]:
    """Keeps warp from printing its greeting and its lines about compiled modules."""
    with _START_LOCK:
        import warp as wp

        # Versions before `log_level` have `quiet`.
        setting, value = ("log_level", wp.LOG_ERROR) if hasattr(wp.config, "log_level") else ("quiet", True)
        before = getattr(wp.config, setting)
        setattr(wp.config, setting, value)
        try:
            yield
        finally:
            setattr(wp.config, setting, before)


@contextlib.contextmanager
def _drop_lines(unwanted: bytes) -> Iterator[None]:
    """Buffers writes to descriptor 2; then writes them without lines with `unwanted`.

    Warp's C code writes these lines, and no setting turns them off.
    """
    try:
        stderr = os.dup(2)
    except OSError:  # it is closed, so nobody reads it
        yield
        return
    try:
        with tempfile.TemporaryFile() as held:
            os.dup2(held.fileno(), 2)
            try:
                yield
            finally:
                os.dup2(stderr, 2)
                held.seek(0)
                with open(2, "wb", closefd=False) as out:
                    out.writelines(line for line in held if unwanted not in line)
    finally:
        os.close(stderr)


def _has_cuda_driver() -> bool:
    for name in ("libcuda.so", "libcuda.so.1"):
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return True
    return False
