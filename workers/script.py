"""What of the program's main module goes to workers, which never import it.

What factories refer to travels with them, by value. What else the script defines is pickled name by name, and made
there only when it is asked for (`main_module`): its classes and functions, and small plain data.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import pickle
import re
import sys
import types
import typing
import warnings
from collections.abc import Callable, Collection
from typing import Any

import cloudpickle

from workers import main_module
from workers.main_module import SPAWNED, Entry, MainModule, Script, names_of
from workers.messages import Build
from workers.settings import log_records
from workers.settings.process_settings import SETTINGS, read_settings

# Of the implementation, as the methods to override are.
_cloudpickle = importlib.import_module("cloudpickle.cloudpickle")

# Bytes and objects that the value of one name may have, and bytes that all may have together: they are sent unasked.
MOST_BYTES, MOST_OBJECTS, MOST_IN_ALL = 2**16, 10_000, 2**22
WORD = re.compile(r"[^\W\d]\w*")
ATTRIBUTES = ("__name__", "__file__", "__doc__", "__package__")
MODULES = ("__main__", SPAWNED)
# Packages whose objects are data, small ones at least.
PLAIN = sys.stdlib_module_names - {"multiprocessing", "asyncio", "socket"}
PLAIN |= {"numpy", "torch", "gymnasium", "cloudpickle", "workers", *MODULES}
# What is no object of its own: it is the same wherever it is equal.
ATOMS = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset, types.ModuleType)


def first_request(
    setup: Callable[[int], None],
    init_worker: Callable[[int], object] | None,
    factory: Callable[..., Any],
    start_method: str,
) -> Build:
    """The request that builds a job. A forked worker has the main module itself."""
    if start_method == "fork":
        for value in list(_names().values()):
            if isinstance(value, type) and _is_own(value):  # it is the same class when it comes back
                _cloudpickle._get_or_create_tracker_id(value)
        both = factory if init_worker is None else Initialised(init_worker, factory)
        return Build.here(read_settings(SETTINGS), _plain(setup), None, _plain(both))
    values = [value for value in (setup, factory, init_worker) if value is not None]
    data, script = _packed(*values)
    return Build.here(read_settings(SETTINGS), data[0], data[2] if len(data) > 2 else None, data[1], script)


class Initialised:
    """Calls `init_worker`, then builds the job: in one pickle, so that both have the same globals.

    Args:
        init_worker, factory: as of `WorkerPool`.
    """

    def __init__(self, init_worker: Callable[[int], object], factory: Callable[..., Any]) -> None:
        self._init_worker, self._factory = init_worker, factory

    def __call__(self, index: int, *shared: Any) -> Any:
        """The job of the worker of this index."""
        with log_records.handlers_are_own():
            self._init_worker(index)
        return self._factory(index, *shared)


class Carried:
    """Carries an object to a process that is made for it, and the script with it.

    Args:
        value: the object.
    """

    def __init__(self, value: Any) -> None:
        [self._data], self._script = _packed(value)

    def __reduce__(self) -> tuple[Any, ...]:
        return main_module.unpacked, (self._script, self._data)


def _plain(value: Any) -> bytes:
    """Pickles for a forked worker: functions of the script find their globals in its copy of the main module."""
    main = sys.modules.get("__main__")
    file = io.BytesIO()
    pickler = _Pickler(file, {})
    if isinstance(main, types.ModuleType):
        pickler.globals_ref[id(names_of(main))] = _ForkedGlobals()
    pickler.dump(value)
    return file.getvalue()


def _packed(*values: Any) -> tuple[list[bytes], Script]:
    """Pickled, and what is left of the script."""
    main, names = sys.modules.get("__main__"), _names()
    data, sent = [], set[str]()
    for value in values:
        pickled, given = _dumps(value, names)
        data.append(pickled)
        sent |= given
    with warnings.catch_warnings():  # nobody asked for the rest to be pickled
        warnings.simplefilter("ignore")
        return data, _rest(names, sent, main.script if isinstance(main, MainModule) else None)


def _names() -> dict[str, Any]:
    """The script's."""
    main = sys.modules.get("__main__")
    return names_of(main) if isinstance(main, types.ModuleType) else {}


def _dumps(value: Any, names: dict[str, Any]) -> tuple[bytes, set[str]]:
    """An object and, behind it, those of its parts that have names in the script; and these names."""
    file = io.BytesIO()
    pickler = _Pickler(file, names)
    pickler.dump(value)
    memo = pickler.memo.copy()
    given = {name: named for name, named in list(names.items()) if id(named) in memo and not _is_special(name)}
    pickler.dump(given)
    return file.getvalue(), set(given)


def _rest(names: dict[str, Any], sent: Collection[str], before: Script | None) -> Script:
    """What of the script has not been sent.

    Args:
        names: the script's.
        sent: those that have been.
        before: where this process is a worker itself: what it has not asked for.
    """
    entries = {} if before is None else {name: entry for name, entry in before.entries.items() if name not in names}
    left_out = {} if before is None else dict(before.left_out)
    values = {name: value for name, value in list(names.items()) if name not in sent and not _is_special(name)}
    named = {id(value): name for name, value in reversed(list(names.items())) if _is_own(value) or _is_mutable(value)}
    own = [name for name, value in values.items() if _is_own(value)]
    others = [name for name, value in values.items() if not _is_own(value) and not name.startswith("_")
              and not _is_imported(value)]  # fmt: skip
    queue, seen, n_bytes = [*reversed(others), *reversed(own)], set[str](), 0
    while queue:
        name = queue.pop()
        if name in seen or name not in values:
            continue
        seen.add(name)
        try:
            if n_bytes > MOST_IN_ALL:
                raise _TooMuch("there is too much in the script to send all of it unasked")
            entry = _entry(name, values[name], names, named)
        except Exception as error:
            left_out[name] = str(error) if isinstance(error, _TooMuch) else f"{type(error).__name__}: {error}"
            continue
        entries[name] = entry
        n_bytes += len(entry.data)
        queue += entry.needs
    hinted = set[str]().union(*(_hinted(names[name], names) for name in sent)) & entries.keys()
    return Script({name: names[name] for name in ATTRIBUTES if name in names}, entries, left_out, tuple(sorted(hinted)))


def _entry(name: str, value: Any, names: dict[str, Any], named: dict[int, str]) -> Entry:
    file = _Small()
    is_container = type(value) in (list, dict, set) and named.get(id(value)) == name
    content = type(value)(value) if is_container else value
    pickler = _EntryPickler(file, names, named, None if is_container else name)
    pickler.dump(content)
    key = _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(value) if isinstance(value, type) else None
    needs = (*pickler.needs, *sorted(_hinted(value, names) - {name}))
    return Entry(type(value) if is_container else None, file.getvalue(), key, needs)


def _hinted(value: Any, names: dict[str, Any]) -> set[str]:
    """The names that are in annotations which are text, and that only `typing.get_type_hints` looks for."""
    if not _is_own(value):
        return set()
    functions = [value, *(part for part in vars(value).values() if isinstance(part, types.FunctionType))]
    texts = []
    for function in functions:
        with contextlib.suppress(Exception):  # annotations that CPython 3.14 does not evaluate before
            texts += [text for text in function.__annotations__.values() if isinstance(text, str)]
    found = {word for text in texts for word in WORD.findall(text)}
    return {name for name in found & names.keys() if not isinstance(names[name], types.ModuleType)}


class _MainGlobals:
    """In the place of the globals of the script's functions: those of the worker's main module."""

    def __reduce__(self) -> tuple[Any, ...]:
        return main_module.globals_of_main, ()


class _ForkedGlobals:
    """In the place of the globals of the script's functions: those of a forked worker's main module."""

    def __reduce__(self) -> tuple[Any, ...]:
        return main_module.globals_of_fork, ()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles for workers: functions of the script share the globals of their main module.

    Args:
        file: to write to.
        names: the script's.
    """

    def __init__(self, file: Any, names: dict[str, Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.globals_ref[id(names)] = _MainGlobals()
        self._names = names

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type):
            return self._reduced_class(obj)
        if isinstance(obj, types.FunctionType) and obj.__module__ == SPAWNED:
            if self._is_of_script(obj):
                self.globals_ref[id(obj.__globals__)] = _MainGlobals()
            return self._dynamic_function_reduce(obj)
        if type(obj) is typing.NewType and obj.__module__ in MODULES:
            return _new_type, (obj.__name__, obj.__supertype__, getattr(obj, "__qualname__", ""), obj.__module__)
        return super().reducer_override(obj)

    def _is_of_script(self, function: types.FunctionType) -> bool:
        """Whether its globals are the script's; a spawned process has run it in another namespace than its module."""
        return function.__globals__ is self._names or (
            bool(self._names) and function.__globals__.get("__name__") == SPAWNED
        )

    def _reduced_class(self, cls: type) -> Any:
        if cls.__module__ == SPAWNED:  # another module of that name, or none, in a worker
            reduced = _cloudpickle._dynamic_class_reduce(cls)
        else:
            reduced = super().reducer_override(cls)
        if isinstance(reduced, tuple) and reduced[0] is _cloudpickle._make_skeleton_class:
            kind, name, bases, namespace, *rest = reduced[1]
            # Pickle finds a class within another one by it.
            namespace = {**namespace, "__qualname__": cls.__qualname__}
            if typing.is_typeddict(cls) and cls.__bases__ == (dict,):  # which no class may derive from by itself
                bases = (typing.TypedDict,)
            reduced = (reduced[0], (kind, name, bases, namespace, *rest), *reduced[2:])
        return reduced


class _EntryPickler(_Pickler):
    """Pickles the value of one name: other names are references, and what its functions use are names.

    Args:
        file, names: as of `_Pickler`.
        named: what has a name, by id.
        own: the name that this is; None for what only fills it.

    Attributes:
        needs: the names that functions use.
    """

    def __init__(self, file: Any, names: dict[str, Any], named: dict[int, str], own: str | None) -> None:
        super().__init__(file, names)
        self._named, self._own, self._n_objects = named, own, 0
        self.needs: dict[str, None] = {}

    def persistent_id(self, obj: Any) -> str | None:
        self._n_objects += 1
        if self._n_objects > MOST_OBJECTS:
            raise _TooMuch("it is too large to be sent to workers unasked")
        name = self._named.get(id(obj))
        return name if name != self._own else None

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if not issubclass(kind, (type, types.FunctionType)):
            if str(kind.__module__).partition(".")[0] not in PLAIN:
                raise _TooMuch(f"it is, or holds, a {kind.__module__}.{kind.__qualname__}, which is not sent unasked")
            if _size(obj) > MOST_BYTES:
                raise _TooMuch("it is too large to be sent to workers unasked")
        return super().reducer_override(obj)

    def _dynamic_function_reduce(self, func: types.FunctionType) -> Any:
        reduced = super()._dynamic_function_reduce(func)
        if self._is_of_script(func):
            slots = reduced[2][1]
            self.needs.update(dict.fromkeys(slots["__globals__"]))
            slots["__globals__"] = {}
            slots["_cloudpickle_submodules"] = []
        return reduced


class _Small(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + len(data) > MOST_BYTES:
            raise _TooMuch("it is too large to be sent to workers unasked")
        return super().write(data)


class _TooMuch(Exception):
    """Something is not sent."""


def _new_type(name: str, supertype: Any, qualname: str, module: str) -> Any:
    made: Any = typing.NewType(name, supertype)  # type: ignore[misc]
    made.__qualname__, made.__module__ = qualname, module
    return made


def _is_special(name: str) -> bool:
    return name in ATTRIBUTES or name in ("__builtins__", "__spec__", "__loader__", "__cached__")


def _is_own(value: Any) -> bool:
    """Whether the script defines this: a class, a function."""
    return isinstance(value, (type, types.FunctionType)) and value.__module__ in MODULES


def _is_mutable(value: Any) -> bool:
    """Whether this is an object of its own, which may be known by several names."""
    return not isinstance(value, (*ATOMS, type, types.FunctionType, types.BuiltinFunctionType))


def _is_imported(value: Any) -> bool:
    return isinstance(value, (types.ModuleType, types.BuiltinFunctionType, type, types.FunctionType))


def _size(value: Any) -> int:
    """Bytes of an array or a tensor; those of another device count as many."""
    if type(value).__module__ == "torch.storage":  # of a tensor, which was measured
        return 0
    if getattr(getattr(value, "device", None), "type", "cpu") != "cpu":
        return MOST_BYTES + 1
    nbytes = getattr(value, "nbytes", 0)
    return nbytes if isinstance(nbytes, int) else 0


