"""Sets a child's import path before it imports anything, and keeps imports from the garbage collector.

multiprocessing starts processes by `python -c`, which looks for modules in the current directory first: a `queue.py`
or a clone of a package there would be executed in place of the module that this process has loaded.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.machinery
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from multiprocessing import util
from typing import Any

# Characters of the statement that sets the path; Linux limits one argument of a command to 128 KiB.
MAX_LENGTH = 100_000
SUFFIXES = frozenset(importlib.machinery.all_suffixes())

# Finds modules where this process found them, although its path has changed since.
_FINDER = """
import _frozen_importlib_external as external
class Found:
    def find_spec(name, path=None, target=None):
        return external.PathFinder.find_spec(name, [found[name]]) if name in found else None
sys.meta_path.insert(0, Found)
"""

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
    """Prepends to a command of `python -c` a statement that sets this process's import path.

    The statement imports only `sys`, which is built in. Folders that a changed PYTHONPATH adds come last.
    """
    path = get_import_path()
    first = f"import sys; path = {path!a}; sys.path[:] = path + [one for one in sys.path if one and one not in path]"
    if shadowed := _find_shadowed_modules(path):
        finder = f"found = {shadowed!a}{_FINDER}"
        first += f"; exec({finder!a}, {{'sys': sys}})"
    if len(first) > MAX_LENGTH:  # only leave out the current directory
        first = "import sys; sys.path[:] = [one for one in sys.path if one]"
    return f"{first}; {command}"


@contextlib.contextmanager
def change_commands_of_children(
    change: Callable[[str], str] = prepend_import_path, fds: Sequence[int] = ()
) -> Iterator[None]:
    """Changes the `-c` commands with which multiprocessing starts processes in this block, in this thread.

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
    """Changes the `-c` command of a command line; a frozen program has none, and its line stays as it is."""
    words = list(args[1:])  # the first is bytes: `python -bb` forbids comparing it with text
    if "-c" not in words:
        return args
    at = words.index("-c") + 2
    command = args[at]
    assert isinstance(command, str)
    return [*args[:at], change(command), *args[at + 1 :]]


def renew_lock() -> None:
    """Replaces the lock in a forked copy: a thread that does not exist here may have held it."""
    global _lock
    _lock = threading.Lock()


def _find_shadowed_modules(path: Sequence[str]) -> dict[str, str]:
    """Finds the loaded modules that an import would now take from another folder.

    The path has changed since they were imported: a folder that comes first now has a module of the same name.

    Returns:
        The name of each such module, and the folder that it was loaded from.
    """
    folders = _find_module_folders()
    shadowed, seen = dict[str, str](), set[str]()
    for folder in path:
        for name in _find_importable(folder, folders.keys() - seen):
            seen.add(name)
            if not _is_same_folder(folders[name], folder):
                shadowed[name] = folders[name]
    return shadowed


def _find_module_folders() -> dict[str, str]:
    """Finds the folder that each loaded top-level module or package was loaded from."""
    found = {}
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        # The script is called `__main__` here; its spec, if it has one, has the name of its module.
        if "." in name or not isinstance(spec, importlib.machinery.ModuleSpec) or name != spec.name:
            continue
        if not isinstance(spec.origin, str) or not spec.has_location:
            continue
        folder = os.path.dirname(spec.origin)
        found[name] = os.path.dirname(folder) if spec.submodule_search_locations else folder
    return found


def _find_importable(folder: str, names: Set[str]) -> set[str]:
    """Finds which of these names are modules or packages in a folder."""
    found = set()
    with contextlib.suppress(OSError):  # there is no such folder, or it is an archive
        for entry in os.listdir(folder):
            name = entry.partition(".")[0]
            if name in names and (
                entry[len(name) :] in SUFFIXES or os.path.exists(os.path.join(folder, entry, "__init__.py"))
            ):
                found.add(name)
    return found


def _is_same_folder(one: str, other: str) -> bool:
    return one == other or os.path.realpath(one) == os.path.realpath(other)


@contextlib.contextmanager
def uncollected_imports() -> Iterator[None]:
    """Turns the garbage collector off while a block imports modules, and exempts what exists after it for good.

    Importing torch makes 250,000 objects, which stay. Looking at them in each collection takes a sixth of the time of
    the imports, and later, in a process that was forked, 0.1 s and a copy of the memory that they are in.
    """
    threshold = gc.get_threshold()
    gc.set_threshold(0)  # not `gc.disable()`: a module that does that as it is imported means it
    try:
        yield
    finally:
        gc.freeze()
        if not gc.get_threshold()[0]:
            gc.set_threshold(*threshold)
