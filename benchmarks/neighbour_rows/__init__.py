"""The rows of `neighbours.py`, a module for each system; `rows()` of a module yields them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

Call = Callable[[], Any]
Maker = Callable[[], Call]


class NotInstalled(Exception):
    """A peer is not installed, so that there is nothing to compare with."""


def peer(name: str) -> Any:
    """A module of a peer."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotInstalled(str(error)) from error


@dataclass
class Row:
    """One call in one variant.

    Attributes:
        call: what is called.
        variant: how.
        contenders: name -> what makes the call that is measured; the first is `ours`.
        group: rows of one group move the same things, given in different ways.
        n_bytes: what is moved, to compare rows of a group.
        bound: the most that ours may take, in multiples of each other contender.
        is_wall_time: whether to measure wall time, where processes or threads work.
        label: system, call and variant.
    """

    call: str
    variant: str
    contenders: dict[str, Maker]
    group: str | None = None
    n_bytes: float = 1.0
    bound: float = 1.3
    is_wall_time: bool = False
    label: str = ""
    _stack: ExitStack = field(default_factory=ExitStack)

    def closing(self, thing: Any) -> Any:
        """Closes `thing` when the row is measured."""
        self._stack.callback(thing.close)
        return thing

    def close(self) -> None:
        self.contenders.clear()
        self._stack.close()


def both(make: Callable[[Any], Call], ours: Any, theirs: Any, name: str) -> dict[str, Maker]:
    """The contenders of a row: `make` of our class or module, and of the original's."""
    return {"ours": lambda: make(ours), name: lambda: make(theirs)}


def on(pair: Callable[[], tuple[Any, Any]], call: Callable[[Any], Any], name: str) -> dict[str, Maker]:
    """The contenders of a row: the same call of two things; `pair` is cached, and makes them for several rows."""
    return {"ours": lambda: partial(call, pair()[0]), name: lambda: partial(call, pair()[1])}


__all__ = ["Call", "Iterable", "Iterator", "Maker", "NotInstalled", "Row", "both", "on", "peer"]
