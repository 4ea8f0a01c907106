"""The settings of `logging` as they travel to another process: all but handlers and filters."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

# Level, whether it propagates, whether it is disabled.
Levels = dict[str, tuple[int, bool, bool]]
FLAGS = ("raiseExceptions", "logThreads", "logMultiprocessing", "logProcesses")


def loggers() -> Iterator[logging.Logger]:
    """The root, and every logger that was asked for by its name."""
    yield logging.root
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            yield logger


def levels() -> Levels:
    """What each logger lets through."""
    return {logger.name: (logger.level, logger.propagate, logger.disabled) for logger in loggers()}


def set_levels(known: Levels) -> None:
    """Sets what each of these loggers lets through; others stay as they are."""
    for name, (level, propagates, is_disabled) in known.items():
        logger = logging.getLogger(name)
        if logger.level != level:
            logger.setLevel(level)
        logger.propagate, logger.disabled = propagates, is_disabled


def kinds_of_handlers() -> set[tuple[str, str]]:
    """Which logger has a handler of which class."""
    return {(logger.name, kind(handler)) for logger in loggers() for handler in logger.handlers}


def kind(handler: logging.Handler) -> str:
    """The name of a handler's class."""
    return f"{type(handler).__module__}.{type(handler).__qualname__}"


def read() -> dict[str, Any]:
    """The settings of this process."""
    return {
        "levels": levels(),
        "disable": logging.root.manager.disable,
        "names": dict(logging._levelToName),
        "captures_warnings": logging._warnings_showwarning is not None,  # type: ignore[attr-defined]
        **{flag: getattr(logging, flag) for flag in FLAGS},
    }


def write(settings: dict[str, Any]) -> None:
    """Sets what `read` gave."""
    for number, name in settings["names"].items():
        logging.addLevelName(number, name)
    set_levels(settings["levels"])
    logging.disable(settings["disable"])
    logging.captureWarnings(settings["captures_warnings"])
    for flag in FLAGS:
        setattr(logging, flag, settings[flag])
