"""Settings of a whole process, such as levels of logging, which workers take over from the process that starts them.

Settings are tables of what reads and what writes each of them. What a process has is pickled setting by setting, so
that one that cannot travel keeps no other from it.
"""

from __future__ import annotations

import contextlib
import decimal
import locale
import logging
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from workers import pickling
from workers.settings import log_records, log_settings, warning_filters

logger = logging.getLogger("workers")


class Setting(NamedTuple):
    """What reads a setting of this process, and what writes it."""

    read: Callable[[], Any]
    write: Callable[[Any], object]

    @classmethod
    def attribute(cls, owner: Any, name: str) -> Setting:
        """A setting that is an attribute, of a module perhaps."""
        return cls(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


Table = Mapping[str, Setting]


def read_settings(table: Table) -> dict[str, bytes]:
    """The settings of this process, pickled by name; without those that cannot be had or pickled."""
    found = {}
    for name, setting in table.items():
        try:
            found[name] = pickling.dumps(setting.read())
        except Exception as error:
            logger.debug("workers do not take over %s: %r", name, error)
    return found


def write_settings(table: Table, values: Mapping[str, bytes]) -> None:
    """Sets what differs in this process from what `read_settings` gave in another."""
    for name, data in values.items():
        try:
            value = pickling.loads(data)
            if table[name].read() != value:
                table[name].write(value)
        except Exception as error:
            logger.warning("%s could not be taken over by a worker: %r", name, error)


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Around what imports modules that the other process has already: what they warn of as they load is known there.

    Filters of warnings and levels of logging that they set as they load do not take the place of those in force.
    """
    levels = log_settings.levels()
    with warning_filters.quiet():
        yield
    log_settings.set_levels(levels)


def _set_traceback_limit(limit: int | None) -> None:
    if limit is None:
        del sys.tracebacklimit
    else:
        sys.tracebacklimit = limit


def _format_of_warnings() -> Any:
    """A function of the user's; None for Python's own."""
    function = warnings.formatwarning
    return None if function.__module__ == "warnings" else function


def _set_locale(name: str) -> None:
    locale.setlocale(locale.LC_ALL, name)


SETTINGS: Table = {
    "sys.setrecursionlimit": Setting(sys.getrecursionlimit, sys.setrecursionlimit),
    "sys.tracebacklimit": Setting(lambda: getattr(sys, "tracebacklimit", None), _set_traceback_limit),
    "locale.setlocale": Setting(lambda: locale.setlocale(locale.LC_ALL), _set_locale),
    "decimal.setcontext": Setting(decimal.getcontext, decimal.setcontext),
    "socket.setdefaulttimeout": Setting(socket.getdefaulttimeout, socket.setdefaulttimeout),
    "logging": Setting(log_settings.read, log_settings.write),
    "logging's handlers": Setting(log_settings.kinds_of_handlers, log_records.leave_to_parent),
    "warnings.filters": Setting(warning_filters.read, warning_filters.write),
    "warnings.defaultaction": Setting.attribute(warnings, "defaultaction"),
    "warnings.formatwarning": Setting(_format_of_warnings, Setting.attribute(warnings, "formatwarning").write),
}
if hasattr(sys, "set_int_max_str_digits"):  # not in the first releases of CPython 3.10
    SETTINGS = {
        **SETTINGS,
        "sys.set_int_max_str_digits": Setting(sys.get_int_max_str_digits, sys.set_int_max_str_digits),
    }
