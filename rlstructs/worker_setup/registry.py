"""Copies the environments that a program registered with gymnasium to its workers."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import sys
import warnings
from typing import Any

import cloudpickle

from rlstructs.workers.pickling import dumps, loads

# The fields of a spec that may be "module:attribute".
ENTRY_POINTS = ("entry_point", "vector_entry_point")


@dataclasses.dataclass(frozen=True)
class Registered:
    """The environments that a process has registered.

    Attributes:
        specs: gymnasium's.
        named: objects of the main script that specs name, by name; they are sent with the specs.
    """

    specs: list[Any] = dataclasses.field(default_factory=list)
    named: dict[str, Any] = dataclasses.field(default_factory=dict)


class DeferredEntryPoint:
    """An entry point that is unpickled when its environment is made.

    A worker therefore imports no other environments.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return DeferredEntryPoint, (self._data,)

    def __deepcopy__(self, memo: Any) -> DeferredEntryPoint:
        return self  # gymnasium deep-copies specs; functions and classes stay the same, and so does this

    @functools.cached_property
    def _value(self) -> Any:
        """The entry point, unpickled once, so that its state is kept between environments."""
        return loads(self._data)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Makes the environment."""
        return self._value(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._value, name)  # gymnasium reads the `metadata` of a class before it calls it


def read_registry() -> Registered:
    """Reads the registrations of this process that can be pickled."""
    registration = sys.modules.get("gymnasium.envs.registration")
    if registration is None:
        return Registered()
    named: dict[str, Any] = {}
    specs = [_resolve(spec, named) for spec in list(registration.registry.values())]
    if not _is_picklable((specs, named)):  # leave out those that cannot be sent
        specs = [spec for spec in specs if _is_picklable(spec)]
        named = {name: value for name, value in named.items() if _is_picklable(value)}
    return Registered(specs, named)


def register(registered: Registered) -> None:
    """Registers environments in this process.

    Replaces gymnasium's own ids, and keeps all other known ids.
    """
    if not registered.specs:
        return
    # Modules that are imported later may register these ids again.
    warnings.filterwarnings("ignore", ".*Overriding environment")
    from gymnasium.envs.registration import registry

    for spec in registered.specs:
        if spec.id not in registry or _is_gymnasiums(registry[spec.id]):
            registry[spec.id] = spec


def _is_gymnasiums(spec: Any) -> bool:
    return isinstance(spec.entry_point, str) and spec.entry_point.startswith("gymnasium.")


def _resolve(spec: Any, named: dict[str, Any]) -> Any:
    """Returns the spec, or a copy, with entry points that workers can find.

    Entry points in the main script stay text, and the objects that they and the wrappers name are added to `named`.
    Those in a module that is pickled by value (`cloudpickle.register_pickle_by_value`) are replaced by the objects.
    """
    for wrapper in getattr(spec, "additional_wrappers", ()):
        _resolve_entry_point(wrapper.entry_point, named)
    resolved = spec
    for field in ENTRY_POINTS:
        entry_point = getattr(spec, field, None)
        value = _resolve_entry_point(entry_point, named)
        if value is not entry_point:
            resolved = copy.copy(spec) if resolved is spec else resolved
            setattr(resolved, field, value)
    return resolved


def _resolve_entry_point(entry_point: Any, named: dict[str, Any]) -> Any:
    """Returns what to send for an entry point.

    If it names an object of the main script, adds that object to `named`.
    """
    if callable(entry_point) and not isinstance(entry_point, DeferredEntryPoint) and not _is_in_script(entry_point):
        try:
            return DeferredEntryPoint(dumps(entry_point))
        except Exception:  # `_is_picklable` will leave its spec out
            return entry_point
    if not isinstance(entry_point, str):
        return entry_point
    module_name, _, name = entry_point.partition(":")
    is_script = module_name == "__main__"
    if not name or not (is_script or _is_by_value(module_name)):
        return entry_point
    try:
        value = getattr(importlib.import_module(module_name), name)
    except Exception:  # gymnasium raises it when somebody makes this environment
        return entry_point
    if is_script:
        named[name] = value
        return entry_point
    return value


def _is_in_script(entry_point: Any) -> bool:
    return getattr(entry_point, "__module__", "__main__") == "__main__"


def _is_by_value(module_name: str) -> bool:
    """Whether cloudpickle sends the code of a module.

    It does if the module or its package was registered for that.
    """
    parts = module_name.split(".")
    packages = {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
    return bool(packages & cloudpickle.list_registry_pickle_by_value())


def _is_picklable(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True
