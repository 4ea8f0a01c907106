"""The module `__main__` of a worker, which holds the trainer's script.

The worker never imports the script.

Whatever the factories use travels with them. Every other name of the script travels as a pickle of its own, which is
unpickled when something reads that attribute (`pickle.load` and `from __main__ import` do) or the module's `__dict__`
(`typing.get_type_hints` and dataclasses do).
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

from rlstructs.workers.pickling import Unpickler

# The second name of the main module in processes that multiprocessing spawns.
SPAWNED_MAIN = "__mp_main__"
_real_dict: Any = vars(types.ModuleType)["__dict__"]
# The methods that fill containers, which are made empty because they may contain themselves.
_FILL: dict[type, Callable[[Any, Any], None]] = {
    list: list.extend,
    dict: dict.update,
    set: set.update,
}
_MISSING = object()


class Entry(NamedTuple):
    """The pickled value of one name of the script.

    Attributes:
        container: list, dict or set if `data` is the content of one; None for anything else.
        data: the pickle; other names of the script are persistent ids in it.
        class_id: cloudpickle's id of a class; None for anything else.
        needs: the globals that its functions use.
    """

    container: type | None
    data: bytes
    class_id: str | None
    needs: tuple[str, ...]


class Script(NamedTuple):
    """The part of the main module that did not travel with the factories.

    Attributes:
        attributes: its `__file__`, `__doc__` and so on.
        entries: the pickled values, by name.
        left_out: the names that were not sent, each with the reason.
        annotated: the entries that annotations in the factories' part mention.
    """

    attributes: dict[str, Any]
    entries: dict[str, Entry]
    left_out: dict[str, str]
    annotated: tuple[str, ...] = ()


class MainModule(types.ModuleType):
    """The module `__main__` of a worker; its attributes are those of the script alone.

    Args:
        script: the pickled names.
    """

    # Its one attribute that is not the script's: a method of any other name would hide a global of that name.
    __slots__ = ("__script_names__",)

    def __init__(self, script: Script) -> None:
        super().__init__("__main__")
        spec = _Spec(script.attributes.get("__package__"))
        get_namespace(self).update(script.attributes, __builtins__=builtins, __spec__=spec)
        self.__script_names__ = ScriptNames(script, get_namespace(self))

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        self.__script_names__.find_all()
        return get_namespace(self)

    def __dir__(self) -> list[str]:
        return sorted(get_namespace(self).keys() | self.__script_names__.script.entries.keys())

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__script_names__.find(name)
        except Exception as error:
            why = self.__script_names__.explain(name, error)
            text = f"module '__main__' has no attribute {name!r} in this worker"
            cause = error if name in self.__script_names__.script.entries else None
            raise AttributeError(f"{text}: {why}" if why else text, name=name, obj=self) from cause


class ScriptNames:
    """The names of the script in a worker, each unpickled on first use.

    Args:
        script: the part of the main module that did not travel with the factories.
        namespace: the dictionary of the main module.
    """

    def __init__(self, script: Script, namespace: dict[str, Any]) -> None:
        self.script, self.namespace = script, namespace
        self._lock = threading.RLock()
        self._building: dict[str, Any] = {}
        self._queue: list[str] = []
        self._find_errors: dict[str, str] = {}

    def loads(self, data: bytes) -> Any:
        """Unpickles a value of `script`.

        Adds the script's names that came with it to the module.
        """
        loader = _Loader(self, data)
        value, names = loader.load(), loader.load()
        for name, named in names.items():
            self.namespace.setdefault(name, named)
        for name in self.script.annotated:
            self._try_to_find(name)
        return value

    def find(self, name: str) -> Any:
        """Returns the value of a name; unpickles it the first time.

        Raises:
            KeyError: the script has no such name.
            Exception: the value cannot be unpickled here.
        """
        with self._lock:
            value = self.find_now(name)
            while not self._building and self._queue:
                self._try_to_find(self._queue.pop())
            return value

    def find_all(self) -> None:
        """Unpickles every name that can be unpickled here."""
        for name in self.script.entries:
            self._try_to_find(name)

    def explain(self, name: str, error: Exception) -> str | None:
        """Says why a name is not available; None if the script lacks it."""
        why = self._find_errors.get(name) or self.script.left_out.get(name)
        if why is None and name in self.script.entries:
            why = f"{type(error).__name__}: {error}"
        return why

    def _try_to_find(self, name: str) -> None:
        try:
            self.find(name)
        except Exception as error:  # raised again by code that uses the name
            self._find_errors[name] = f"{type(error).__name__}: {error}"

    def find_now(self, name: str) -> Any:
        """Returns the value of a name; leaves the names it needs for later."""
        if (value := self.namespace.get(name, _MISSING)) is not _MISSING:
            return value
        if name in self._building:
            if self._building[name] is _MISSING:
                raise pickle.UnpicklingError(f"{name!r} of the script contains itself")
            return self._building[name]
        entry = self.script.entries[name]
        self._building[name] = _MISSING
        try:
            value = self._unpickle(name, entry)
        finally:
            del self._building[name]
        self._queue += [needed for needed in entry.needs if needed in self.script.entries]
        return self.namespace.setdefault(name, value)

    def _unpickle(self, name: str, entry: Entry) -> Any:
        keep = partial(self._building.__setitem__, name)
        if entry.container is None:
            return _Loader(self, entry.data, entry.class_id, keep).load()
        value = entry.container()
        keep(value)
        _FILL[entry.container](value, _Loader(self, entry.data).load())
        return value


class _Spec(importlib.machinery.ModuleSpec):
    """A spec without a file.

    Processes that multiprocessing spawns from here therefore do not run the script again.

    Args:
        package: the package that relative imports of the script start from.
    """

    def __init__(self, package: str | None) -> None:
        super().__init__("__main__", None)
        self._package = package or ""

    @property
    def parent(self) -> str:
        return self._package


class _Loader(Unpickler):
    """Unpickles a value of the script.

    The script's other names come from the main module.

    Args:
        names: those of the script.
        data: the pickle.
        class_id: cloudpickle's id of the value if it is a class, otherwise None.
        keep: called with the value, a class or function, before it is filled: it may refer to itself.
    """

    def __init__(
        self, names: ScriptNames, data: bytes, class_id: str | None = None, keep: Callable[[Any], None] | None = None
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._names, self._class_id, self._keep = names, class_id, keep

    def persistent_load(self, name: str) -> Any:
        """Returns the value of a name of the script."""
        return self._names.find_now(name)

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if not module.startswith("cloudpickle"):
            return found
        if name == "_function_setstate":
            return partial(self._fill_function, found)
        if self._keep is not None and name in ("_make_skeleton_class", "_make_skeleton_enum", "_make_function"):
            return partial(self._make_and_keep, found, name)
        return found

    def _make_and_keep(self, make: Callable[..., Any], name: str, *arguments: Any) -> Any:
        skeleton = make(*arguments)
        # A pickled function is the first function in its pickle. The bases of a class come before it.
        is_value = name == "_make_function" if self._class_id is None else self._class_id in arguments[4:6]
        if is_value and self._keep is not None:
            self._keep(skeleton)
            self._keep = None
        return skeleton

    def _fill_function(self, set_state: Any, function: Any, state: Any) -> None:
        names = self._names.namespace
        if function.__globals__ is names:  # keep the values that other functions use already
            new = state[1]["__globals__"]
            state[1]["__globals__"] = {name: value for name, value in new.items() if name not in names}
        set_state(function, state)


def install(script: Script) -> MainModule:
    """Gives this process a main module with this script; the previous one stays alive."""
    global _previous
    _previous = sys.modules.get("__main__")
    module = MainModule(script)
    sys.modules["__main__"] = sys.modules[SPAWNED_MAIN] = module
    return module


def get_namespace(module: types.ModuleType) -> dict[str, Any]:
    """Returns the dictionary of a module; unlike `MainModule.__dict__`, this unpickles nothing."""
    names: dict[str, Any] = _real_dict.__get__(module)
    return names


def explain_left_out(name: str) -> str | None:
    """Says why a name of the script was not sent to this worker.

    None for any other name.
    """
    module = sys.modules.get("__main__")
    return module.__script_names__.script.left_out.get(name) if isinstance(module, MainModule) else None


def get_main_globals() -> dict[str, Any]:
    """Returns the globals of the script's functions in this worker."""
    module = sys.modules.get("__main__")
    return get_namespace(module) if isinstance(module, MainModule) else {"__name__": "__main__"}


def get_forked_main_globals() -> dict[str, Any]:
    """Returns the globals of the script's functions and classes in this forked worker."""
    return get_namespace(sys.modules["__main__"])


def unpickle_with_script(script: Script, data: bytes) -> Any:
    """Unpickles a `script_pickling.PickledWithScript`, and makes its script this process's main module."""
    return install(script).__script_names__.loads(data)


_previous: types.ModuleType | None = None
