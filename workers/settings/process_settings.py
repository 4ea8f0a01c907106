"""Settings of a whole process, such as logging levels, that workers take over from their parent.

A table holds the functions that read and write each setting. Each value is pickled separately, so that one
that cannot be pickled does not affect the others.
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

from rlstructs.workers import pickling
from rlstructs.workers.settings import log_records, log_settings, warning_filters

logger = logging.getLogger("rlstructs.workers")


class Setting(NamedTuple):
    """The functions that read and write one setting of this process."""

    read: Callable[[], Any]
    write: Callable[[Any], object]

    @classmethod
    def attribute(cls, owner: Any, name: str) -> Setting:
        """Makes a setting of an attribute, for example of a module."""
        return cls(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


Table = Mapping[str, Setting]


def read_settings(table: Table) -> dict[str, bytes]:
    """Pickles the settings of this process, by name; leaves out those that cannot be read or pickled."""
    found = {}
    for name, setting in table.items():
        try:
            found[name] = pickling.dumps(setting.read())
        except Exception as error:
            logger.debug("workers do not take over %s: %r", name, error)
    return found


def write_settings(table: Table, values: Mapping[str, bytes]) -> None:
    """Applies the settings that `read_settings` returned in another process, where they differ here."""
    for name, data in values.items():
        try:
            value = pickling.loads(data)
            if table[name].read() != value:
                table[name].write(value)
        except Exception as error:
            logger.warning("%s could not be taken over by a worker: %r", name, error)


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Silences warnings in a block that imports modules: the parent has imported them and shown the warnings.

    Undoes changes that the modules make to warning filters and logging levels.
    """
    levels = log_settings.read_levels()
    try:
        with warning_filters.ignore_warnings():
            yield
    finally:
        log_settings.write_levels(levels)


def _set_traceback_limit(limit: int | None) -> None:
    if limit is None:
        del sys.tracebacklimit
    else:
        sys.tracebacklimit = limit


def _read_warning_format() -> Any:
    """Returns the user's function that formats warnings; None for Python's own."""
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
    "logging's handlers": Setting(log_settings.read_handler_classes, log_records.leave_to_parent),
    "warnings.filters": Setting(warning_filters.read, warning_filters.write),
    "warnings.defaultaction": Setting.attribute(warnings, "defaultaction"),
    "warnings.formatwarning": Setting(_read_warning_format, Setting.attribute(warnings, "formatwarning").write),
}
if hasattr(sys, "set_int_max_str_digits"):  # not in the first releases of CPython 3.10
    SETTINGS = {
        **SETTINGS,
        "sys.set_int_max_str_digits": Setting(sys.get_int_max_str_digits, sys.set_int_max_str_digits),
    }
