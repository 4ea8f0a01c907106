"""Adapters: save objects that pickle cannot save, within a pickle.

Simulators written in C, for example.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple


class Adapter(NamedTuple):
    """Saves objects of one class.

    Attributes:
        save: returns a picklable description of an object.
        load: makes an object in the same state from such a description.
    """

    save: Callable[[Any], Any]
    load: Callable[[Any], Any]


def _leave_out(thing: Any) -> None:
    return None


# Windows, fonts and clocks of pygame: environments of gymnasium make them again when they next render.
_PYGAME = ("pygame.freetype.Font", "pygame.surface.Surface", "pygame.time.Clock")
# By the full name of the class, so that its module need not be imported.
_adapters: dict[str, Adapter] = dict.fromkeys(_PYGAME, Adapter(_leave_out, _leave_out))
# Adapters of this package, which are imported when they are needed: the name of a class, and its module.
_READY = {
    "ale_py.env.AtariEnv": "ale",
    "gymnasium.envs.mujoco.mujoco_rendering.MujocoRenderer": "mujoco",
    "mujoco._structs.MjData": "mujoco",
    "mujoco._structs.MjModel": "mujoco",
}


def register(kind: type | str, save: Callable[[Any], Any], load: Callable[[Any], Any]) -> None:
    """Registers functions that save and load objects of a class in exact states.

    They also serve for classes derived from it.

    For simulators whose objects pickle cannot save. An environment that holds such an object, at any depth and below
    any wrappers, is then pickled with it. Call it in the workers: in the module that defines the environment, or in
    `init_worker`.

    Args:
        kind: the class, or its full name, such as "simulator.core.World".
        save: `save(thing)` returns a picklable description of the object.
        load: `load(saved)` makes an object in the same state; a function of a module, or one that can be pickled.

    Raises:
        TypeError: `save` or `load` is no function.

    Example:
        >>> import itertools
        >>> class Stream:
        ...     def __init__(self, at):
        ...         self.at, self.rows = at, (row for row in itertools.count(at))  # a generator cannot be pickled
        >>> register(Stream, lambda stream: stream.at, Stream)
    """
    for name, function in (("save", save), ("load", load)):
        if not callable(function):
            raise TypeError(f"register: {name} must be a function, got {function!r}")
    _adapters[kind if isinstance(kind, str) else _full_name(kind)] = Adapter(save, load)


def find_adapter(kind: type) -> Adapter | None:
    """Returns the adapter of a class, or of its nearest base class.

    None if there is none.
    """
    for cls in kind.__mro__:
        name = _full_name(cls)
        if name in _adapters:
            return _adapters[name]
        if name in _READY:
            return _read_ready(name)
    return None


def _read_ready(name: str) -> Adapter:
    module = importlib.import_module(f"rlstructs.exact.{_READY[name]}")
    found: Adapter = module.ADAPTERS[name]
    _adapters[name] = found
    return found


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
