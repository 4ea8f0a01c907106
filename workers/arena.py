"""One anonymous block of shared bytes.

On Linux it is a memfd: it has no name in /dev/shm, so it cannot leak, and a container's limit of 64 MB there does not
apply. Elsewhere it comes from shm_open and is unlinked at once. The block is empty at first, its descriptor travels to
each worker that starts, and it gets its size once that is known.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
from collections.abc import Iterator

from rlstructs.workers.descriptors import Descriptor
from rlstructs.workers.errors import OutOfMemoryError
from rlstructs.workers.interrupts import defer_interrupt
from rlstructs.workers.limits import available_bytes
from rlstructs.workers.public_names import set_module


@set_module("rlstructs.workers")
class SharedArena:
    """Memory that this process shares with the workers it was passed to.

    Example:
        >>> arena = SharedArena()
        >>> arena.resize(4096)
        >>> arena.map()[:3] = b"abc"
        >>> bytes(arena.map()[:3])
        b'abc'
        >>> arena.close()
    """

    def __init__(self) -> None:
        with defer_interrupt():  # nobody would close a descriptor without an owner
            self._descriptor = Descriptor(_anonymous_file())
        self._map: mmap.mmap | None = None

    @classmethod
    def of(cls, descriptor: Descriptor) -> SharedArena:
        """The block of a descriptor, which belongs to it from now on."""
        made = cls.__new__(cls)
        made.__setstate__(descriptor)
        return made

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return os.fstat(self._descriptor.fileno()).st_size

    def resize(self, nbytes: int, expected: int | None = None) -> None:
        """Enlarges the block and keeps its content; a smaller size changes nothing.

        Args:
            nbytes: the new size in bytes. A page takes memory only when it is first touched.
            expected: how many bytes will be touched; None for all the new ones.

        Raises:
            OutOfMemoryError: the machine does not have `expected` bytes.
        """
        if nbytes <= self.nbytes:
            return
        needed, available = nbytes - self.nbytes if expected is None else expected, available_bytes()
        if available is not None and needed > available:
            raise OutOfMemoryError(
                f"shared memory: {needed:,} bytes are needed, {available:,} are available; "
                "use fewer environments, fewer timesteps or smaller observations"
            )
        with _translate_memory_errors(nbytes):
            os.ftruncate(self._descriptor.fileno(), nbytes)
        self._map = None

    def map(self) -> mmap.mmap:
        """Maps the block into this process; views of the buffer keep it alive."""
        if self._map is None or len(self._map) != self.nbytes:
            with _translate_memory_errors(self.nbytes):
                self._map = mmap.mmap(self._descriptor.fileno(), self.nbytes)
        return self._map

    def map_privately(self, offset: int, nbytes: int) -> mmap.mmap:
        """Maps a part of the block; only this process sees what it writes to the buffer.

        A page that was not written to here changes when another process writes to it.

        Args:
            offset: where the part begins, a multiple of `mmap.ALLOCATIONGRANULARITY`.
            nbytes: its length in bytes.
        """
        with _translate_memory_errors(nbytes):
            return mmap.mmap(self._descriptor.fileno(), nbytes, access=mmap.ACCESS_COPY, offset=offset)

    def fileno(self) -> int:
        """The descriptor of the block."""
        return self._descriptor.fileno()

    def close(self) -> None:
        """Closes the descriptor; the last view that goes frees the memory."""
        self._map = None
        self._descriptor.close()

    def __getstate__(self) -> Descriptor:
        return self._descriptor

    def __setstate__(self, descriptor: Descriptor) -> None:
        self._descriptor, self._map = descriptor, None


@contextlib.contextmanager
def _translate_memory_errors(nbytes: int) -> Iterator[None]:
    """Turns ENOMEM and the like into OutOfMemoryError: limits of a process show only when they are hit."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOMEM, errno.EFBIG, errno.ENOSPC):
            raise
        raise OutOfMemoryError(
            f"shared memory: {nbytes:,} bytes are more than this process may take ({error.strerror}): raise its limits "
            "(ulimit -v, ulimit -f), or use fewer environments, fewer timesteps or smaller observations"
        ) from error


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("rlstructs", os.MFD_CLOEXEC)
        os.fchmod(fd, 0o600)  # its mode is 0777 at first: any user who sees /proc/<pid>/fd could open it
        return fd
    return _unlinked_shm()


def _unlinked_shm() -> int:
    import _posixshmem  # only where there is no memfd

    name = f"/rls{secrets.token_hex(6)}"  # macOS allows 31 characters
    fd: int = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
    _posixshmem.shm_unlink(name)
    return fd
