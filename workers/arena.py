"""An anonymous block of shared bytes, and its way to running workers."""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
import os
import pickle
import resource
import secrets
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from typing import Any

import cloudpickle

from rlstructs.workers import pickling
from rlstructs.workers.errors import OutOfMemoryError, WorkerError
from rlstructs.workers.interrupts import defer_interrupt
from rlstructs.workers.limits import available_bytes
from rlstructs.workers.public_names import set_module


@set_module("rlstructs.workers")
class SharedArena:
    """Memory that this process shares with the workers it was passed to.

    Args:
        name: what the links in /proc/<pid>/fd call it, where the system has such names.

    Example:
        >>> arena = SharedArena()
        >>> arena.resize(4096)
        >>> arena.map()[:3] = b"abc"
        >>> bytes(arena.map()[:3])
        b'abc'
        >>> arena.close()
    """

    def __init__(self, name: str = "rlstructs") -> None:
        with defer_interrupt():  # nobody would close a descriptor without an owner
            self._descriptor = Descriptor(_anonymous_file(name))
        self._map: mmap.mmap | None = None

    @classmethod
    def of(cls, descriptor: Descriptor) -> SharedArena:
        """Returns a block that owns this descriptor from now on."""
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
        """Maps a part of the block privately.

        Only this process sees what it writes there. A page that was not written to here changes when another process
        writes to it.

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
        """Closes the descriptor; the memory is freed with its last view."""
        self._map = None
        self._descriptor.close()

    def __getstate__(self) -> Descriptor:
        return self._descriptor

    def __setstate__(self, descriptor: Descriptor) -> None:
        self._descriptor, self._map = descriptor, None


@contextlib.contextmanager
def _translate_memory_errors(nbytes: int) -> Iterator[None]:
    """Turns ENOMEM and the like into OutOfMemoryError.

    Limits of a process show only when they are hit.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOMEM, errno.EFBIG, errno.ENOSPC):
            raise
        raise OutOfMemoryError(
            f"shared memory: {nbytes:,} bytes are more than this process may take ({error.strerror}): raise its limits "
            "(ulimit -v, ulimit -f), or use fewer environments, fewer timesteps or smaller observations"
        ) from error


def _anonymous_file(name: str) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.fchmod(fd, 0o600)  # its mode is 0777 at first: any user who sees /proc/<pid>/fd could open it
        return fd
    return _unlinked_shm()


def _unlinked_shm() -> int:
    import _posixshmem  # only where there is no memfd

    name = f"/rls{secrets.token_hex(6)}"  # macOS allows 31 characters
    fd: int = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
    _posixshmem.shm_unlink(name)
    return fd


# Descriptors that this process keeps open for each worker: its pipe, two of its process object, and its pidfd. The
# second number is how many more it needs while the last worker starts, for the fork server, too.
PER_WORKER, WHILE_STARTING = 4, 12
# The errors of a system call that a sandbox forbids, or that the kernel lacks.
FORBIDDEN = errno.EPERM, errno.EACCES, errno.ENOSYS


class Descriptor:
    """Owns a file descriptor; pickling it into a starting process duplicates it there."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    def fileno(self) -> int:
        if self._fd is None:
            raise ValueError("the file descriptor is closed")
        return self._fd

    def close(self) -> None:
        with defer_interrupt():  # closing it twice might close another file that has got its number
            if self._fd is not None:
                fd, self._fd = self._fd, None
                os.close(fd)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` may be gone when a program ends
        if self._fd is not None:
            close(self._fd)

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive_descriptor, (reduction.DupFd(self.fileno()),)


def open_pidfd(pid: int) -> Descriptor | None:
    """Opens a descriptor that becomes readable when a process ends.

    None if it has ended, or if the system has no such descriptors.
    """
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return Descriptor(os.pidfd_open(pid))
    except OSError as error:
        if error.errno not in (errno.ESRCH, *FORBIDDEN):
            raise
        return None


def check_enough(n_workers: int) -> None:
    """Raises WorkerError if this process may not open enough descriptors for `n_workers` more workers."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with contextlib.suppress(OSError):  # there is no /proc
        left = limit - len(os.listdir("/proc/self/fd"))
        needed = PER_WORKER * n_workers + WHILE_STARTING
        if limit != resource.RLIM_INFINITY and needed > left:
            raise WorkerError(
                f"{n_workers} workers need {needed} file descriptors, {left} of {limit} are left: raise the limit "
                "RLIMIT_NOFILE (ulimit -n), or start fewer workers"
            )


def _receive_descriptor(duplicate: Any) -> Descriptor:
    fd = duplicate.detach()
    os.set_inheritable(fd, False)  # programs that an environment starts must not have it
    return Descriptor(fd)


def pack(thing: Any) -> bytes:
    """Pickles an object; its `SharedArena`s travel as names.

    They have to stay open here until all processes have attached the object.
    """
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(thing)
    return file.getvalue()


def attach(data: bytes) -> Any:
    """Unpickles the result of `pack`, from this process or another.

    It uses the same memory.

    Raises:
        WorkerError: the memory cannot be opened.
    """
    return _Unpickler(io.BytesIO(data)).load()


def can_attach(data: bytes) -> bool:
    """Whether `attach` can open the memory.

    It cannot outside Linux, nor where /proc hides processes (hidepid).
    """
    try:
        attach(data)
    except WorkerError:
        return False
    return True


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle has no types
    def persistent_id(self, thing: Any) -> Any:
        return (os.getpid(), thing.fileno()) if isinstance(thing, SharedArena) else None


class _Unpickler(pickling.Unpickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._arenas: dict[tuple[int, int], SharedArena] = {}

    def persistent_load(self, place: tuple[int, int]) -> SharedArena:
        if place not in self._arenas:
            self._arenas[place] = SharedArena.of(_open(*place))
        return self._arenas[place]


def _open(pid: int, fd: int) -> Descriptor:
    if pid == os.getpid():
        return Descriptor(os.dup(fd))
    path = f"/proc/{pid}/fd/{fd}"
    try:
        return Descriptor(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        raise WorkerError(f"{path}, shared memory of the trainer, cannot be opened: {error.strerror}") from error
