"""`__main__` in a worker: the trainer's script, though nobody imports it.

What the factories refer to has travelled with them. What else the script defines came beside it, each name pickled
apart, and is made when it is first asked for: as an attribute (`pickle.load` and `from __main__ import` do so), or
when the module's `__dict__` is (`typing.get_type_hints` and dataclasses do so).
"""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import pickle
import sys
import threading
import types
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from workers.pickling import Unpickler

# Another name of the main module, in processes that multiprocessing has spawned.
SPAWNED = "__mp_main__"
_real_dict: Any = vars(types.ModuleType)["__dict__"]
# Containers that are made first and filled later, as they may contain, in the end, themselves.
_FILL: dict[type, Callable[[Any, Any], None]] = {
    list: list.extend, dict: dict.update, set: set.update,
}  # fmt: skip
_MISSING = object()


class Entry(NamedTuple):
    """The value of one name of the script.

    Attributes:
        kind: list, dict or set, of whose content `data` is; None for anything else.
        data: pickled; other names of the script are persistent ids in it.
        key: cloudpickle's id of a class; None for anything else.
        needs: the names of globals that its functions use.
    """

    kind: type | None
    data: bytes
    key: str | None
    needs: tuple[str, ...]


class Script(NamedTuple):
    """What the main module has besides what travelled with the factories.

    Attributes:
        attributes: its `__file__`, `__doc__` and so on.
        entries: by name.
        left_out: by name why it was not sent.
        hinted: the entries that are in annotations of what travelled with the factories.
    """

    attributes: dict[str, Any]
    entries: dict[str, Entry]
    left_out: dict[str, str]
    hinted: tuple[str, ...] = ()


class MainModule(types.ModuleType):
    """The module.

    Args:
        script: what it has.
    """

    __slots__ = ("_building", "_failed", "_lock", "_queue", "_script")

    def __init__(self, script: Script) -> None:
        super().__init__("__main__")
        self._script = script
        self._lock = threading.RLock()
        self._building: dict[str, Any] = {}
        self._queue: list[str] = []
        self._failed: dict[str, str] = {}
        spec = _Spec(script.attributes.get("__package__"))
        names_of(self).update(script.attributes, __builtins__=builtins, __spec__=spec)

    @property
    def script(self) -> Script:
        """What it has besides what travelled with the factories."""
        return self._script

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        for name in self._script.entries:
            self._find_needed(name)
        return names_of(self)

    def __dir__(self) -> list[str]:
        return sorted(names_of(self).keys() | self._script.entries.keys())

    def __getattr__(self, name: str) -> Any:
        try:
            return self.find(name)
        except Exception as error:
            why = self._failed.get(name) or self._script.left_out.get(name)
            if why is None and name in self._script.entries:
                why = f"{type(error).__name__}: {error}"
            text = f"module '__main__' has no attribute {name!r} in this worker"
            raise AttributeError(f"{text}: {why}" if why else text, name=name, obj=self) from (
                error if name in self._script.entries else None
            )

    def loads(self, data: bytes) -> Any:
        """Unpickles what `script.dumps` gave; the names of the script that are in it belong to this module then."""
        loader = _Loader(self, data)
        value, names = loader.load(), loader.load()
        for name, named in names.items():
            names_of(self).setdefault(name, named)
        for name in self._script.hinted:
            self._find_needed(name)
        return value

    def find(self, name: str) -> Any:
        """The value of a name, which is made if it was not yet.

        Raises:
            KeyError: there is none.
            Exception: it cannot be made here.
        """
        with self._lock:
            value = self._find(name)
            while not self._building and self._queue:
                self._find_needed(self._queue.pop())
            return value

    def _find_needed(self, name: str) -> None:
        try:
            self.find(name)
        except Exception as error:  # it is missing where it is used, if it ever is
            self._failed[name] = f"{type(error).__name__}: {error}"

    def _find(self, name: str) -> Any:
        if (value := names_of(self).get(name, _MISSING)) is not _MISSING:
            return value
        if name in self._building:
            if self._building[name] is _MISSING:
                raise pickle.UnpicklingError(f"{name!r} of the script contains itself")
            return self._building[name]
        entry = self._script.entries[name]
        self._building[name] = _MISSING
        try:
            value = self._make(name, entry)
        finally:
            del self._building[name]
        self._queue += [needed for needed in entry.needs if needed in self._script.entries]
        return names_of(self).setdefault(name, value)

    def _make(self, name: str, entry: Entry) -> Any:
        begin = partial(self._building.__setitem__, name)
        if entry.kind is None:
            return _Loader(self, entry.data, entry.key, begin).load()
        value = entry.kind()
        begin(value)
        _FILL[entry.kind](value, _Loader(self, entry.data).load())
        return value


class _Spec(importlib.machinery.ModuleSpec):
    """Has processes that multiprocessing spawns from here not run the script again.

    Args:
        package: what relative imports of the script are relative to.
    """

    def __init__(self, package: str | None) -> None:
        super().__init__("__main__", None)
        self._package = package or ""

    @property
    def parent(self) -> str:
        return self._package


class _Loader(Unpickler):
    """Unpickles into the main module.

    Args:
        main: the module.
        data: pickled.
        key, begin: cloudpickle's id of the class that is the value (None: it is a function, or something else), and
            what is called with that class or function before it is filled.
    """

    def __init__(
        self, main: MainModule, data: bytes, key: str | None = None, begin: Callable[[Any], None] | None = None
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._main, self._key, self._begin = main, key, begin

    def persistent_load(self, name: str) -> Any:
        """A name of the script."""
        return self._main._find(name)

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if not module.startswith("cloudpickle"):
            return found
        if name == "_function_setstate":
            return partial(self._fill_function, found)
        if self._begin is not None and name in ("_make_skeleton_class", "_make_skeleton_enum", "_make_function"):
            return partial(self._begun, found, name)
        return found

    def _begun(self, make: Callable[..., Any], name: str, *arguments: Any) -> Any:
        made = make(*arguments)
        # Of functions the first is the value itself: the pickle of a function begins with it. Of classes, bases come
        # before it.
        is_value = name == "_make_function" if self._key is None else self._key in arguments[4:6]
        if is_value and self._begin is not None:
            self._begin(made)
            self._begin = None
        return made

    def _fill_function(self, set_state: Any, function: Any, state: Any) -> None:
        names = names_of(self._main)
        if function.__globals__ is names:  # what is there already is what other functions use
            given = state[1]["__globals__"]
            state[1]["__globals__"] = {name: value for name, value in given.items() if name not in names}
        set_state(function, state)


def install(script: Script) -> MainModule:
    """Makes a main module of this process; the one before it stays alive."""
    global _before
    _before = sys.modules.get("__main__")
    module = MainModule(script)
    sys.modules["__main__"] = sys.modules[SPAWNED] = module
    return module


def names_of(module: types.ModuleType) -> dict[str, Any]:
    """The dictionary that is behind a module, without anything being made for it."""
    names: dict[str, Any] = _real_dict.__get__(module)
    return names


def why_left_out(name: str) -> str | None:
    """Why a name of the script is not in this worker; None if it is, or is none."""
    module = sys.modules.get("__main__")
    return module.script.left_out.get(name) if isinstance(module, MainModule) else None


def globals_of_main() -> dict[str, Any]:
    """What functions of the script have for globals in this worker."""
    module = sys.modules.get("__main__")
    return names_of(module) if isinstance(module, MainModule) else {"__name__": "__main__"}


def globals_of_fork() -> dict[str, Any]:
    """What functions of the script have for globals in this forked worker, as its classes do."""
    return names_of(sys.modules["__main__"])


def unpacked(script: Script, data: bytes) -> Any:
    """What `script.Carried` carries; for a process that is made for this alone."""
    return install(script).loads(data)


_before: types.ModuleType | None = None
