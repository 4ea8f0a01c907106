"""How an exception in a worker reaches the parent."""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from typing import Any, NamedTuple

from workers.errors import RemoteTraceback, WorkerError
from workers.pickling import dumps, loads

# Begins the note on an exception that says where it comes from.
RAISED = "raised in worker "


class Failure(NamedTuple):
    """The reply when the job raised: the exception, pickled apart so that it may fail alone."""

    exception: bytes | None
    summary: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return cls(_pickled(error), _summary(error), text)

    def to_exception(self, worker_index: int, request: str) -> BaseException:
        """The exception to raise in the parent: the original class where it can be had."""
        where = f"{RAISED}{worker_index} during {request!r}"
        error = _unpickled(self.exception)
        if error is None:
            error = WorkerError(f"{self.summary} ({where})", worker_index)
        else:
            add_note(error, where)
            if isinstance(error, ModuleNotFoundError) and error.name in sys.modules:
                module = f"sys.modules[{error.name!r}]"
                add_note(error, f"it is loaded here: cloudpickle.register_pickle_by_value({module}) sends all of it")
        error.__cause__ = RemoteTraceback(self.text, worker_index)
        return error


def add_note(error: BaseException, note: str) -> None:
    """Adds a line to what is shown of an exception."""
    # The exceptions' own add_note is CPython 3.11; the attribute is all there is to it.
    try:
        error.__notes__ = [*getattr(error, "__notes__", ()), note]
    except Exception:  # slots, or a __setattr__ that refuses: the cause still names the worker
        return


# Where an object lies, in its repr.
ADDRESS = re.compile(r"\b0x[0-9a-f]+")


def _pickled(error: BaseException) -> bytes | None:
    # SystemExit and KeyboardInterrupt would end the parent, quietly: they come as a WorkerError.
    if not isinstance(error, Exception):
        return None
    # Pickle calls the class with what the constructor has made of its arguments: a message made of a
    # message, often. Then it is put together without the constructor.
    for sent in (_Group(error),) if _is_group(error) else (error, _Parts(error)):
        with contextlib.suppress(BaseException):  # SystemExit too, of a __reduce__ or a constructor
            data = dumps(sent)
            if ADDRESS.sub("", _summary(loads(data))) == ADDRESS.sub("", _summary(error)):
                return data
    return None


class _Parts:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        error = self._error
        return _put_together, (type(error), error.args, dict(vars(error)))


def _put_together(cls: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any]) -> Exception:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


def _is_group(error: BaseException) -> bool:
    """Whether it is an ExceptionGroup, Python's (3.11) or that of the package `exceptiongroup`."""
    return any(base.__name__ == "BaseExceptionGroup" for base in type(error).__mro__)


class _Group:
    """An ExceptionGroup whose members travel as each would alone; one that cannot is a WorkerError."""

    def __init__(self, error: Any) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        error = self._error
        members = [_pickled(member) or dumps(WorkerError(_summary(member))) for member in error.exceptions]
        return _put_group_together, (type(error), error.message, members, dict(vars(error)))


def _put_group_together(cls: Any, message: str, members: list[bytes], attributes: dict[str, Any]) -> Any:
    [base] = [base for base in cls.__mro__ if base.__name__ == "BaseExceptionGroup"]
    group = base.__new__(cls, message, [loads(member) for member in members])
    group.__dict__.update(attributes)
    return group


def _summary(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def _unpickled(data: bytes | None) -> BaseException | None:
    try:
        error = None if data is None else loads(data)
    except (Exception, SystemExit):
        return None
    return error if isinstance(error, Exception) else None
