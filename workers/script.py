"""Pickles the program's main module, the script, for workers: they never import it.

Whatever a factory uses travels with it, by value. The script's other classes, functions and small plain data are
pickled one name at a time; a worker unpickles each when something first needs it (see `main_module`).
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

from rlstructs.workers import logs, main_module
from rlstructs.workers.main_module import SPAWNED_MAIN, Entry, MainModule, Script, get_namespace
from rlstructs.workers.messages import Build
from rlstructs.workers.settings import SETTINGS, read_settings

# cloudpickle's implementation module: the methods that `_Pickler` overrides are private, too.
_cloudpickle = importlib.import_module("cloudpickle.cloudpickle")

# Limits for names that no factory uses: bytes and objects of one value, and bytes of all values together.
MAX_BYTES, MAX_OBJECTS, MAX_TOTAL_BYTES = 2**16, 10_000, 2**22
IDENTIFIER = re.compile(r"[^\W\d]\w*")
MODULE_ATTRIBUTES = ("__name__", "__file__", "__doc__", "__package__")
MAIN_MODULES = ("__main__", SPAWNED_MAIN)
# Packages whose objects are plain data that can be sent if it is small.
DATA_PACKAGES = sys.stdlib_module_names - {"multiprocessing", "asyncio", "socket"}
DATA_PACKAGES |= {"numpy", "torch", "gymnasium", "cloudpickle", *MAIN_MODULES}
# Objects of this package, such as the placeholders for the script, are sent too.
OWN_PACKAGE = "rlstructs.workers"
# Types whose equal values are interchangeable: it does not matter whether two names share one object.
INTERCHANGEABLE = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset, types.ModuleType)


def make_build_request(
    setup: Callable[[int], None],
    init_worker: Callable[[int], object] | None,
    factory: Callable[..., Any],
    start_method: str,
) -> Build:
    """Makes the request that builds a job.

    A forked worker already has a copy of the main module.
    """
    if start_method == "fork":
        for value in list(_get_script_namespace().values()):
            if isinstance(value, type) and _is_defined_in_script(value):  # a worker sends back the same class
                _cloudpickle._get_or_create_tracker_id(value)
        both = factory if init_worker is None else InitialisingFactory(init_worker, factory)
        return Build.from_this_process(read_settings(SETTINGS), _dump_for_fork(setup), None, _dump_for_fork(both))
    values = [value for value in (setup, factory, init_worker) if value is not None]
    data, script = _dump_with_script(*values)
    init_data = data[2] if len(data) > 2 else None
    return Build.from_this_process(read_settings(SETTINGS), data[0], init_data, data[1], script)


class InitialisingFactory:
    """Calls `init_worker`, then builds the job.

    One pickle holds both functions, so they share their globals.

    Args:
        init_worker, factory: see `WorkerPool`.
    """

    def __init__(self, init_worker: Callable[[int], object], factory: Callable[..., Any]) -> None:
        self._init_worker, self._factory = init_worker, factory

    def __call__(self, index: int, *shared: Any) -> Any:
        """Builds the job of worker `index`."""
        with logs.keep_new_handlers():
            self._init_worker(index)
        return self._factory(index, *shared)


class PickledWithScript:
    """Takes an object and the script to another process.

    That process must run for this object alone.

    Args:
        value: the object.
    """

    def __init__(self, value: Any) -> None:
        [self._data], self._script = _dump_with_script(value)

    def __reduce__(self) -> tuple[Any, ...]:
        return main_module.unpickle_with_script, (self._script, self._data)


def _dump_for_fork(value: Any) -> bytes:
    """Pickles for a forked worker.

    There the script's functions use its copy of the main module.
    """
    main = sys.modules.get("__main__")
    file = io.BytesIO()
    pickler = _Pickler(file, {})
    if isinstance(main, types.ModuleType):
        pickler.globals_ref[id(get_namespace(main))] = _ForkedMainGlobals()
    pickler.dump(value)
    return file.getvalue()


def _dump_with_script(*values: Any) -> tuple[list[bytes], Script]:
    """Pickles each value, then everything in the script that these pickles do not hold."""
    main, names = sys.modules.get("__main__"), _get_script_namespace()
    data, sent = [], set[str]()
    for value in values:
        pickled, sent_with_it = _dump(value, names)
        data.append(pickled)
        sent |= sent_with_it
    with warnings.catch_warnings():  # the user did not ask to pickle the rest of the script
        warnings.simplefilter("ignore")
        return data, _make_script(names, sent, main.__script_names__.script if isinstance(main, MainModule) else None)


def _get_script_namespace() -> dict[str, Any]:
    """Returns the dictionary of `__main__`, which maps the script's names to their values."""
    main = sys.modules.get("__main__")
    return get_namespace(main) if isinstance(main, types.ModuleType) else {}


def _dump(value: Any, names: dict[str, Any]) -> tuple[bytes, set[str]]:
    """Pickles a value, then a dictionary of its parts named in the script.

    Returns:
        The two pickles in one, and the names in the dictionary.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, names)
    pickler.dump(value)
    memo = pickler.memo.copy()
    sent = {name: named for name, named in list(names.items()) if id(named) in memo and not _is_special(name)}
    pickler.dump(sent)
    return file.getvalue(), set(sent)


def _make_script(names: dict[str, Any], sent: Collection[str], before: Script | None) -> Script:
    """Pickles the script's names that were not sent already.

    Args:
        names: the script's names and their values.
        sent: the names that were sent with a factory.
        before: if this process is a worker, the script that it was given; otherwise None.
    """
    entries = {} if before is None else {name: entry for name, entry in before.entries.items() if name not in names}
    left_out = {} if before is None else dict(before.left_out)
    values = {name: value for name, value in list(names.items()) if name not in sent and not _is_special(name)}
    name_of = {
        id(value): name
        for name, value in reversed(list(names.items()))
        if _is_defined_in_script(value) or _has_identity(value)
    }
    queue, seen, n_bytes = _list_names_to_send(values)[::-1], set[str](), 0
    while queue:
        name = queue.pop()
        if name in seen or name not in values:
            continue
        seen.add(name)
        try:
            if n_bytes > MAX_TOTAL_BYTES:
                raise _NotSent("there is too much in the script to send all of it unasked")
            entry = _make_entry(name, values[name], names, name_of)
        except Exception as error:
            left_out[name] = str(error) if isinstance(error, _NotSent) else f"{type(error).__name__}: {error}"
            continue
        entries[name] = entry
        n_bytes += len(entry.data)
        queue += entry.needs
    annotated = set[str]().union(*(_find_names_in_annotations(names[name], names) for name in sent)) & entries.keys()
    attributes = {name: names[name] for name in MODULE_ATTRIBUTES if name in names}
    return Script(attributes, entries, left_out, tuple(sorted(annotated)))


def _list_names_to_send(values: dict[str, Any]) -> list[str]:
    """Lists the script's classes and functions, then its public data."""
    own = [name for name, value in values.items() if _is_defined_in_script(value)]
    data = [name for name, value in values.items() if not name.startswith("_") and not _is_code(value)]
    return own + data


def _make_entry(name: str, value: Any, names: dict[str, Any], name_of: dict[int, str]) -> Entry:
    """Pickles the value of one name.

    `name_of` maps the id of each object of the script to its name.
    """
    file = _LimitedBuffer()
    is_container = type(value) in (list, dict, set) and name_of.get(id(value)) == name
    content = type(value)(value) if is_container else value
    pickler = _EntryPickler(file, names, name_of, None if is_container else name)
    pickler.dump(content)
    class_id = _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(value) if isinstance(value, type) else None
    needs = (*pickler.needs, *sorted(_find_names_in_annotations(value, names) - {name}))
    return Entry(type(value) if is_container else None, file.getvalue(), class_id, needs)


def _find_names_in_annotations(value: Any, names: dict[str, Any]) -> set[str]:
    """Finds the script's names in annotations that are text: `typing.get_type_hints` looks them up."""
    if not _is_defined_in_script(value):
        return set()
    functions = [value, *(part for part in vars(value).values() if isinstance(part, types.FunctionType))]
    texts = []
    for function in functions:
        with contextlib.suppress(Exception):  # CPython 3.14 evaluates annotations only now
            texts += [text for text in function.__annotations__.values() if isinstance(text, str)]
    found = {word for text in texts for word in IDENTIFIER.findall(text)}
    return {name for name in found & names.keys() if not isinstance(names[name], types.ModuleType)}


class _MainGlobals:
    """Replaces the globals of the script's functions in a pickle.

    Unpickles as the globals of the worker's `MainModule`.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return main_module.get_main_globals, ()


class _ForkedMainGlobals:
    """Replaces the globals of the script's functions in a pickle.

    Unpickles as the globals of a forked worker's `__main__`.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return main_module.get_forked_main_globals, ()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles for workers: the script's functions keep sharing one dictionary of globals.

    Args:
        file: where the pickle is written.
        names: the script's names and their values.
    """

    def __init__(self, file: Any, names: dict[str, Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.globals_ref[id(names)] = _MainGlobals()
        self._names = names

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type):
            return self._reduce_class(obj)
        if isinstance(obj, types.FunctionType) and obj.__module__ == SPAWNED_MAIN:
            if self._uses_script_globals(obj):
                self.globals_ref[id(obj.__globals__)] = _MainGlobals()
            return self._dynamic_function_reduce(obj)
        if type(obj) is typing.NewType and obj.__module__ in MAIN_MODULES:
            return _make_new_type, (obj.__name__, obj.__supertype__, getattr(obj, "__qualname__", ""), obj.__module__)
        return super().reducer_override(obj)

    def _uses_script_globals(self, function: types.FunctionType) -> bool:
        """Whether a function's globals are the script's.

        A spawned process runs the script outside its module.
        """
        return function.__globals__ is self._names or (
            bool(self._names) and function.__globals__.get("__name__") == SPAWNED_MAIN
        )

    def _reduce_class(self, cls: type) -> Any:
        if cls.__module__ == SPAWNED_MAIN:  # a worker has no such module, or a different one
            reduced = _cloudpickle._dynamic_class_reduce(cls)
        else:
            reduced = super().reducer_override(cls)
        if isinstance(reduced, tuple) and reduced[0] is _cloudpickle._make_skeleton_class:
            kind, name, bases, namespace, *rest = reduced[1]
            # pickle finds a nested class by its qualified name.
            namespace = {**namespace, "__qualname__": cls.__qualname__}
            if typing.is_typeddict(cls) and cls.__bases__ == (dict,):  # only `TypedDict` makes such a class
                bases = (typing.TypedDict,)
            reduced = (reduced[0], (kind, name, bases, namespace, *rest), *reduced[2:])
        return reduced


class _EntryPickler(_Pickler):
    """Pickles the value of one name; the script's other objects become references.

    Only objects that have a name.

    Args:
        file, names: see `_Pickler`.
        name_of: the id of each object of the script that has a name, and that name.
        own_name: the name of the pickled value; None for the content of a container.

    Attributes:
        needs: the globals that the pickled functions use.
    """

    def __init__(self, file: Any, names: dict[str, Any], name_of: dict[int, str], own_name: str | None) -> None:
        super().__init__(file, names)
        self._name_of, self._own_name, self._n_objects = name_of, own_name, 0
        self.needs: dict[str, None] = {}

    def persistent_id(self, obj: Any) -> str | None:
        self._n_objects += 1
        if self._n_objects > MAX_OBJECTS:
            raise _NotSent("it is too large to be sent to workers unasked")
        name = self._name_of.get(id(obj))
        return name if name != self._own_name else None

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if not issubclass(kind, (type, types.FunctionType)):
            module = str(kind.__module__)
            if module.partition(".")[0] not in DATA_PACKAGES and not module.startswith(OWN_PACKAGE):
                raise _NotSent(f"it is, or holds, a {kind.__module__}.{kind.__qualname__}, which is not sent unasked")
            if _count_bytes(obj) > MAX_BYTES:
                raise _NotSent("it is too large to be sent to workers unasked")
        return super().reducer_override(obj)

    def _dynamic_function_reduce(self, func: types.FunctionType) -> Any:
        reduced = super()._dynamic_function_reduce(func)
        if self._uses_script_globals(func):
            slots = reduced[2][1]
            self.needs.update(dict.fromkeys(slots["__globals__"]))
            slots["__globals__"] = {}
            slots["_cloudpickle_submodules"] = []
        return reduced


class _LimitedBuffer(io.BytesIO):
    """Takes `MAX_BYTES` and raises `_NotSent` at more."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > MAX_BYTES:
            raise _NotSent("it is too large to be sent to workers unasked")
        return super().write(data)


class _NotSent(Exception):
    """A name is not sent; the message says why."""


def _make_new_type(name: str, supertype: Any, qualname: str, module: str) -> Any:
    new_type: Any = typing.NewType(name, supertype)  # type: ignore[misc]
    new_type.__qualname__, new_type.__module__ = qualname, module
    return new_type


def _is_special(name: str) -> bool:
    return name in MODULE_ATTRIBUTES or name in ("__builtins__", "__spec__", "__loader__", "__cached__")


def _is_defined_in_script(value: Any) -> bool:
    """Whether this is a class or function that the script defines."""
    return isinstance(value, (type, types.FunctionType)) and value.__module__ in MAIN_MODULES


def _has_identity(value: Any) -> bool:
    """Whether a copy of this data would not be as good.

    Several names may share it.
    """
    return not isinstance(value, (*INTERCHANGEABLE, type, types.FunctionType, types.BuiltinFunctionType))


def _is_code(value: Any) -> bool:
    """Whether this is a module, class or function."""
    return isinstance(value, (types.ModuleType, types.BuiltinFunctionType, type, types.FunctionType))


def _count_bytes(value: Any) -> int:
    """Counts the bytes of an array or a tensor.

    A tensor on another device counts as too large.
    """
    if type(value).__module__ == "torch.storage":  # its tensor was counted
        return 0
    if getattr(getattr(value, "device", None), "type", "cpu") != "cpu":
        return MAX_BYTES + 1
    nbytes = getattr(value, "nbytes", 0)
    return nbytes if isinstance(nbytes, int) else 0
