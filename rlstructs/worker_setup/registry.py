"""Environment ids that a program registered with gymnasium, made known to its workers."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import sys
import warnings
from typing import Any

import cloudpickle

from workers.pickling import dumps, loads

# The fields of a spec that may be "module:attribute".
ENTRY_POINTS = ("entry_point", "vector_entry_point")


@dataclasses.dataclass(frozen=True)
class Registered:
    """Registrations of a process.

    Attributes:
        specs: gymnasium's.
        named: what they name of the script, by its name there: it travels with them.
    """

    specs: list[Any] = dataclasses.field(default_factory=list)
    named: dict[str, Any] = dataclasses.field(default_factory=dict)


class Deferred:
    """An entry point that is unpickled when its environment is made, so that a worker imports no others."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return Deferred, (self._data,)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Makes the environment."""
        return loads(self._data)(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(loads(self._data), name)  # gymnasium asks a class for its `metadata` before it calls it


def registered() -> Registered:
    """The registrations of this process that can be pickled."""
    registration = sys.modules.get("gymnasium.envs.registration")
    if registration is None:
        return Registered()
    named: dict[str, Any] = {}
    specs = [_resolved(spec, named) for spec in list(registration.registry.values())]
    if not _travels((specs, named)):  # one of them does not: the others do
        specs = [spec for spec in specs if _travels(spec)]
        named = {name: value for name, value in named.items() if _travels(value)}
    return Registered(specs, named)


def register(registered: Registered) -> None:
    """Registers what `registered` gave, in place of gymnasium's own; other ids that are known here stay."""
    if not registered.specs:
        return
    # The modules that register these ids are imported later, and register them again.
    warnings.filterwarnings("ignore", ".*Overriding environment")
    from gymnasium.envs.registration import registry

    for spec in registered.specs:
        if spec.id not in registry or _is_gymnasiums(registry[spec.id]):
            registry[spec.id] = spec


def _is_gymnasiums(spec: Any) -> bool:
    return isinstance(spec.entry_point, str) and spec.entry_point.startswith("gymnasium.")


def _resolved(spec: Any, named: dict[str, Any]) -> Any:
    """A spec whose entry points a worker finds.

    Those in the script stay text, and what they name is added to `named`, with what the wrappers name. Those in a
    module that travels by value (`cloudpickle.register_pickle_by_value`) are replaced by what they name.
    """
    for wrapper in getattr(spec, "additional_wrappers", ()):
        _value(wrapper.entry_point, named)
    resolved = spec
    for field in ENTRY_POINTS:
        entry_point = getattr(spec, field, None)
        value = _value(entry_point, named)
        if value is not entry_point:
            resolved = copy.copy(spec) if resolved is spec else resolved
            setattr(resolved, field, value)
    return resolved


def _value(entry_point: Any, named: dict[str, Any]) -> Any:
    """What is to be sent for an entry point; what it names in the script is added to `named`."""
    if callable(entry_point) and not isinstance(entry_point, Deferred) and not _is_in_script(entry_point):
        try:
            return Deferred(dumps(entry_point))
        except Exception:  # `_travels` will leave its spec out
            return entry_point
    if not isinstance(entry_point, str):
        return entry_point
    module_name, _, name = entry_point.partition(":")
    is_script = module_name == "__main__"
    if not name or not (is_script or _is_by_value(module_name)):
        return entry_point
    try:
        value = getattr(importlib.import_module(module_name), name)
    except Exception:  # gymnasium's to say, should anybody make this environment
        return entry_point
    if is_script:
        named[name] = value
        return entry_point
    return value


def _is_in_script(entry_point: Any) -> bool:
    return getattr(entry_point, "__module__", "__main__") == "__main__"


def _is_by_value(module_name: str) -> bool:
    """Whether cloudpickle was told to send a module's code, of it or of a package that it is in."""
    parts = module_name.split(".")
    packages = {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
    return bool(packages & cloudpickle.list_registry_pickle_by_value())


def _travels(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True
