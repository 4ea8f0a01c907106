"""What a batcher may be asked for next, and why not."""

from __future__ import annotations

import contextlib
import enum
import logging
from collections.abc import Iterator

from rlstructs.errors import ClosedError, StateError

logger = logging.getLogger("rlstructs")


class Phase(enum.Enum):
    """Where a batcher is."""

    NEW = "needs a reset"
    READY = "ready"
    RUNNING = "a rollout is under way"
    LEASED = "a rollout is leased"
    ENDED = "every environment has ended"
    FAILED = "a worker failed"
    CLOSED = "closed"


NEEDED = {
    Phase.NEW: "call reset first",
    Phase.READY: "call execute first",
    Phase.RUNNING: "call get first",
    Phase.LEASED: "release it first",
    Phase.ENDED: "call reset first",
}


class Lifecycle:
    """The phase of a batcher, and what made it fail.

    Attributes:
        phase: CLOSED until there is something to close.
    """

    def __init__(self) -> None:
        self.phase = Phase.CLOSED
        self._failure: BaseException | None = None
        self._why = ""

    @property
    def is_closed(self) -> bool:
        """Whether there is nothing to close, or nothing any more."""
        return self.phase is Phase.CLOSED

    def check_open(self, call: str) -> None:
        """Raises ClosedError if the batcher is closed."""
        if self.is_closed:
            raise ClosedError(f"{call}: the batcher is closed")

    def check(self, call: str, *allowed: Phase) -> None:
        """Raises, with what is to be done first, unless the batcher is in one of these phases."""
        if self.phase in allowed:
            return
        self.check_open(call)
        if self.phase is Phase.FAILED:
            raise StateError(f"{call}: {self._why}, close the batcher") from self._failure
        raise StateError(f"{call}: {self.phase.value}, {NEEDED[self.phase]}")

    @contextlib.contextmanager
    def failing(self, call: str = "") -> Iterator[None]:
        """Marks the batcher as failed when a worker fails, and when `call` is interrupted halfway.

        Without a call an interrupt changes nothing: the workers do not know of it, and it can be waited
        for them again.
        """
        try:
            yield
        except Exception as error:
            if self.is_closed:  # by another thread
                raise ClosedError("the batcher was closed meanwhile") from error
            self.fail(error, "a worker failed before")
            raise
        except BaseException as error:
            if call:
                self.fail(error, f"{call} was interrupted before")
            raise

    def close(self) -> bool:
        """Ends it; whether it had failed. What failed is forgotten: its traceback holds whatever was in use."""
        failed = self.phase is Phase.FAILED
        self.phase, self._failure = Phase.CLOSED, None
        return failed

    def fail(self, error: BaseException, why: str) -> None:
        """From now on the batcher can only be closed."""
        self.phase, self._failure, self._why = Phase.FAILED, error, why
        logger.info("%s: %r", why, error)
