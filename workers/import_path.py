"""Where child processes look for modules: where this process does, before they import anything.

`python -c`, by which multiprocessing starts its processes, looks into the current directory first: a `queue.py` or a
clone of a package there would be executed instead of what this process has loaded.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from multiprocessing import util
from typing import Any

# What the statement below may take of a command line, which is at most 128 KiB for one argument on Linux.
MOST = 100_000
SUFFIXES = frozenset(importlib.machinery.all_suffixes())

# Finds modules that this process has loaded where it has found them, though its path has changed since.
_FINDER = """
import _frozen_importlib_external as external
class Found:
    def find_spec(name, path=None, target=None):
        return external.PathFinder.find_spec(name, [found[name]]) if name in found else None
sys.meta_path.insert(0, Found)
"""

_lock = threading.Lock()


def import_path() -> list[str]:
    """This process's `sys.path` with absolute folders, so that it means the same in another directory."""
    try:
        here = os.getcwd()
    except FileNotFoundError:  # deleted under this process, which finds nothing there either
        here = None
    entries = [entry for entry in sys.path if isinstance(entry, str)]
    if here is None:
        return [entry for entry in entries if os.path.isabs(entry)]
    return [os.path.join(here, entry) if entry else here for entry in entries]


def with_import_path(command: str) -> str:
    """A command of `python -c` that first of all takes this process's import path.

    `sys` is part of the interpreter, so that importing it looks nowhere. What a changed PYTHONPATH adds comes last.
    """
    path = import_path()
    first = f"import sys; path = {path!a}; sys.path[:] = path + [one for one in sys.path if one and one not in path]"
    if hidden := _hidden(path):
        finder = f"found = {hidden!a}{_FINDER}"
        first += f"; exec({finder!a}, {{'sys': sys}})"
    if len(first) > MOST:  # at least the current directory is no part of it
        first = "import sys; sys.path[:] = [one for one in sys.path if one]"
    return f"{first}; {command}"


@contextlib.contextmanager
def sent_to_children(change: Callable[[str], str] = with_import_path, fds: Sequence[int] = ()) -> Iterator[None]:
    """Changes the `-c` commands by which multiprocessing starts processes in this block, in this thread.

    Args:
        change: makes the command from multiprocessing's.
        fds: descriptors that the processes get, too.
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
    args: Sequence[bytes | str], change: Callable[[str], str] = with_import_path
) -> Sequence[bytes | str]:
    """A command line whose `-c` command is changed; one that has none (a frozen program) stays as it is."""
    words = list(args[1:])  # the first is bytes, which must not be compared with text
    if "-c" not in words:
        return args
    at = words.index("-c") + 2
    command = args[at]
    assert isinstance(command, str)
    return [*args[:at], change(command), *args[at + 1 :]]


def disown() -> None:
    """In a forked copy of this process: whatever another thread was starting there is not started here."""
    global _lock
    _lock = threading.Lock()


def _hidden(path: Sequence[str]) -> dict[str, str]:
    """Loaded modules that would now be found elsewhere, and the folders where they are.

    The path has changed since they were imported; a module of the same name lies in a folder that came before.
    """
    folders = _folders_of_modules()
    hidden, seen = dict[str, str](), set[str]()
    for folder in path:
        for name in _names_in(folder, folders.keys() - seen):
            seen.add(name)
            if not _same(folders[name], folder):
                hidden[name] = folders[name]
    return hidden


def _folders_of_modules() -> dict[str, str]:
    """The folder in which each loaded module and package lies, those within packages left out."""
    found = {}
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        # A script that is run has a name of its own; its spec, if any, says which module it is.
        if "." in name or not isinstance(spec, importlib.machinery.ModuleSpec) or name != spec.name:
            continue
        if not isinstance(spec.origin, str) or not spec.has_location:
            continue
        folder = os.path.dirname(spec.origin)
        found[name] = os.path.dirname(folder) if spec.submodule_search_locations else folder
    return found


def _names_in(folder: str, names: Set[str]) -> set[str]:
    """Which of these names would be imported from a folder: as modules or packages."""
    found = set()
    with contextlib.suppress(OSError):  # no folder, or an archive
        for entry in os.listdir(folder):
            name = entry.partition(".")[0]
            if name in names and (
                entry[len(name) :] in SUFFIXES or os.path.exists(os.path.join(folder, entry, "__init__.py"))
            ):
                found.add(name)
    return found


def _same(one: str, other: str) -> bool:
    return one == other or os.path.realpath(one) == os.path.realpath(other)
