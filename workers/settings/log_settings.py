"""Reads and writes the settings of `logging` that workers take over: all but handlers and filters."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

# By a logger's name: its level, whether it propagates, whether it is disabled.
Levels = dict[str, tuple[int, bool, bool]]
FLAGS = ("raiseExceptions", "logThreads", "logMultiprocessing", "logProcesses")


def list_loggers() -> Iterator[logging.Logger]:
    """Lists the root and every logger that exists."""
    yield logging.root
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            yield logger


def read_levels() -> Levels:
    """Reads the level and flags of every logger."""
    return {logger.name: (logger.level, logger.propagate, logger.disabled) for logger in list_loggers()}


def write_levels(levels: Levels) -> None:
    """Sets the level and flags of these loggers; other loggers do not change."""
    for name, (level, propagates, is_disabled) in levels.items():
        logger = logging.getLogger(name)
        if logger.level != level:
            logger.setLevel(level)
        logger.propagate, logger.disabled = propagates, is_disabled


def read_handler_classes() -> set[tuple[str, str]]:
    """Reads the handlers of all loggers, as pairs of a logger's name and a class's name."""
    return {(logger.name, name_class(handler)) for logger in list_loggers() for handler in logger.handlers}


def name_class(handler: logging.Handler) -> str:
    """Returns the full name of a handler's class."""
    return f"{type(handler).__module__}.{type(handler).__qualname__}"


def read() -> dict[str, Any]:
    """Reads the settings of this process."""
    return {
        "levels": read_levels(),
        "disable": logging.root.manager.disable,
        "names": dict(logging._levelToName),
        "captures_warnings": logging._warnings_showwarning is not None,  # type: ignore[attr-defined]
        **{flag: getattr(logging, flag) for flag in FLAGS},
    }


def write(settings: dict[str, Any]) -> None:
    """Applies settings that `read` returned in another process."""
    for number, name in settings["names"].items():
        logging.addLevelName(number, name)
    write_levels(settings["levels"])
    logging.disable(settings["disable"])
    logging.captureWarnings(settings["captures_warnings"])
    for flag in FLAGS:
        setattr(logging, flag, settings[flag])
