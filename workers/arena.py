"""One anonymous block of shared bytes.

memfd on Linux: nothing in /dev/shm, so it cannot leak and does not meet a container's 64 MB limit
there. Elsewhere shm_open, unlinked at once. The block is created empty, its descriptor travels to a
worker as it starts, and it gets its size once that is known.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
from collections.abc import Iterator

from workers.descriptors import Descriptor
from workers.errors import OutOfMemoryError
from workers.interrupts import uninterrupted
from workers.limits import available_bytes


class SharedArena:
    """Shared memory of this process and of the workers it was given to.

    Example:
        >>> arena = SharedArena()
        >>> arena.resize(4096)
        >>> arena.map()[:3] = b"abc"
        >>> bytes(arena.map()[:3])
        b'abc'
        >>> arena.close()
    """

    def __init__(self) -> None:
        with uninterrupted():  # until it has an owner
            self._descriptor = Descriptor(_anonymous_file())
        self._map: mmap.mmap | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return os.fstat(self._descriptor.fileno()).st_size

    def resize(self, nbytes: int, expected: int | None = None) -> None:
        """Gives the block its size; never shrinks it, and what was written stays.

        Args:
            nbytes: size in bytes. A page costs memory only when it is first touched.
            expected: how many of them will be touched, if not all.

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
        with _told(nbytes):
            os.ftruncate(self._descriptor.fileno(), nbytes)
        self._map = None

    def map(self) -> mmap.mmap:
        """The bytes as one buffer; views of it keep it alive."""
        if self._map is None or len(self._map) != self.nbytes:
            with _told(self.nbytes):
                self._map = mmap.mmap(self._descriptor.fileno(), self.nbytes)
        return self._map

    def map_privately(self, offset: int, nbytes: int) -> mmap.mmap:
        """A part of the bytes as they are now; what is written to it stays in this process.

        Args:
            offset: where it begins, a multiple of `mmap.ALLOCATIONGRANULARITY`.
            nbytes: how long it is. As long as others write there, so long does it change where nothing was written.
        """
        with _told(nbytes):
            return mmap.mmap(self._descriptor.fileno(), nbytes, access=mmap.ACCESS_COPY, offset=offset)

    def close(self) -> None:
        """Lets go of the descriptor; the memory is freed when the last view of it goes."""
        self._map = None
        self._descriptor.close()

    def __getstate__(self) -> Descriptor:
        return self._descriptor

    def __setstate__(self, descriptor: Descriptor) -> None:
        self._descriptor, self._map = descriptor, None


@contextlib.contextmanager
def _told(nbytes: int) -> Iterator[None]:
    """Has a limit of this process, which nothing tells before, raise what other limits do."""
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
        os.fchmod(fd, 0o600)  # it is made with 0777: whoever may look into /proc/<pid>/fd could open it
        return fd
    return _unlinked_shm()


def _unlinked_shm() -> int:
    import _posixshmem  # only where there is no memfd

    name = f"/rls{secrets.token_hex(6)}"  # macOS allows 31 characters
    fd: int = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
    _posixshmem.shm_unlink(name)
    return fd
