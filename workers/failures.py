"""Sends an exception of a worker to the parent, which raises it again."""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from typing import Any, NamedTuple

from rlstructs.workers.errors import RemoteTraceback, WorkerError
from rlstructs.workers.pickling import dumps, loads

# The beginning of the note that names the worker and the request.
RAISED = "raised in worker "


class Failure(NamedTuple):
    """The reply when the job raised.

    Attributes:
        exception: a pickle of its own, so that the reply arrives even if this fails; None if it cannot be pickled.
        summary: its class and message.
        text: its traceback.
    """

    exception: bytes | None
    summary: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return cls(_try_to_pickle(error), _summarise(error), text)

    def to_exception(self, worker_index: int, request: str) -> BaseException:
        """Returns the exception to raise in the parent.

        It has its own class if possible, otherwise it is a WorkerError.
        """
        where = f"{RAISED}{worker_index} during {request!r}"
        error = _try_to_unpickle(self.exception)
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
    """Adds a line to an exception, which tracebacks show below its message."""
    # BaseException.add_note is new in CPython 3.11; it does no more than this.
    try:
        error.__notes__ = [*getattr(error, "__notes__", ()), note]
    except Exception:  # the class has slots or refuses attributes; its cause still names the worker
        return


# The address of an object in its repr.
ADDRESS = re.compile(r"\b0x[0-9a-f]+")


def _try_to_pickle(error: BaseException) -> bytes | None:
    """Pickles an exception.

    None if that fails, or if unpickling it would give another message.
    """
    # SystemExit and KeyboardInterrupt would end the parent without a word: they arrive as a WorkerError.
    if not isinstance(error, Exception):
        return None
    # Unpickling calls the class with `args`, which a constructor may have changed: often it puts a message into a
    # message. Such an exception is rebuilt without its constructor.
    for sent in (_PickledGroup(error),) if _is_group(error) else (error, _PickledParts(error)):
        with contextlib.suppress(BaseException):  # a __reduce__ or a constructor may even raise SystemExit
            data = dumps(sent)
            if ADDRESS.sub("", _summarise(loads(data))) == ADDRESS.sub("", _summarise(error)):
                return data
    return None


class _PickledParts:
    """Pickles an exception so that unpickling does not call its constructor."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        error = self._error
        return _rebuild, (type(error), error.args, dict(vars(error)))


def _rebuild(cls: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any]) -> Exception:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


def _is_group(error: BaseException) -> bool:
    """Whether this is an ExceptionGroup: Python's own (3.11) or one of the package `exceptiongroup`."""
    return any(base.__name__ == "BaseExceptionGroup" for base in type(error).__mro__)


class _PickledGroup:
    """Pickles each member of an ExceptionGroup separately.

    A member that cannot be pickled becomes a WorkerError.
    """

    def __init__(self, error: Any) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        error = self._error
        members = [_try_to_pickle(member) or dumps(WorkerError(_summarise(member))) for member in error.exceptions]
        return _rebuild_group, (type(error), error.message, members, dict(vars(error)))


def _rebuild_group(cls: Any, message: str, members: list[bytes], attributes: dict[str, Any]) -> Any:
    [base] = [base for base in cls.__mro__ if base.__name__ == "BaseExceptionGroup"]
    group = base.__new__(cls, message, [loads(member) for member in members])
    group.__dict__.update(attributes)
    return group


def _summarise(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def _try_to_unpickle(data: bytes | None) -> BaseException | None:
    try:
        error = None if data is None else loads(data)
    except (Exception, SystemExit):
        return None
    return error if isinstance(error, Exception) else None
