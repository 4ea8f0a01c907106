"""Sets a child's import path before its imports; hides imports from garbage collection.

multiprocessing starts processes by `python -c`, which looks for modules in the current directory first: a `queue.py`
or a clone of a package there would be executed in place of the module that this process has loaded.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import util
from typing import Any

# Characters of the statement that sets the path; Linux limits one argument of a command to 128 KiB.
MAX_LENGTH = 100_000

_lock = threading.Lock()


def get_import_path() -> list[str]:
    """Returns `sys.path` with absolute folders, so that it means the same in another directory."""
    try:
        directory = os.getcwd()
    except FileNotFoundError:  # the current directory was deleted: no module is found there
        directory = None
    entries = [entry for entry in sys.path if isinstance(entry, str)]
    if directory is None:
        return [entry for entry in entries if os.path.isabs(entry)]
    return [os.path.join(directory, entry) if entry else directory for entry in entries]


def prepend_import_path(command: str) -> str:
    """Prepends a statement that sets the import path to a `python -c` command.

    It sets this process's path in the child.

    The statement imports only `sys`, which is built in. Folders that a changed PYTHONPATH adds come last.
    """
    path = get_import_path()
    first = f"import sys; path = {path!a}; sys.path[:] = path + [one for one in sys.path if one and one not in path]"
    if len(first) > MAX_LENGTH:  # only leave out the current directory
        first = "import sys; sys.path[:] = [one for one in sys.path if one]"
    return f"{first}; {command}"


@contextlib.contextmanager
def change_commands_of_children(
    change: Callable[[str], str] = prepend_import_path, fds: Sequence[int] = ()
) -> Iterator[None]:
    """Changes the `-c` commands of processes that multiprocessing starts here.

    It applies in this block and thread.

    Args:
        change: takes multiprocessing's command and returns the new one.
        fds: more descriptors that the processes inherit.
    """
    thread = threading.get_ident()

    def launch(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        if threading.get_ident() == thread:
            args, passfds = change_command(args, change), [*passfds, *fds]
        return unchanged(path, args, passfds)

    with _lock:
        unchanged, util.spawnv_passfds = util.spawnv_passfds, launch
        try:
            yield
        finally:
            util.spawnv_passfds = unchanged


def change_command(
    args: Sequence[bytes | str], change: Callable[[str], str] = prepend_import_path
) -> Sequence[bytes | str]:
    """Changes the `-c` command of a command line.

    A frozen program has none, and its line stays as it is.
    """
    words = list(args[1:])  # the first is bytes: `python -bb` forbids comparing it with text
    if "-c" not in words:
        return args
    at = words.index("-c") + 2
    command = args[at]
    assert isinstance(command, str)
    return [*args[:at], change(command), *args[at + 1 :]]


def renew_lock() -> None:
    """Replaces the lock in a forked copy.

    A thread that does not exist there may have held it.
    """
    global _lock
    _lock = threading.Lock()


@contextlib.contextmanager
def uncollected_imports() -> Iterator[None]:
    """Turns the garbage collector off while a block imports modules.

    Afterwards all existing objects are exempt from collection for good.

    Importing torch makes 250,000 objects, which stay. Looking at them in each collection takes a sixth of the time of
    the imports, and later, in a process that was forked, 0.1 s and a copy of the memory that they are in.
    """
    threshold = gc.get_threshold()
    gc.set_threshold(0)  # not `gc.disable()`: a module may call that itself, and it must last
    try:
        yield
    finally:
        gc.freeze()
        if not gc.get_threshold()[0]:
            gc.set_threshold(*threshold)
