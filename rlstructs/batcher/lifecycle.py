"""What a batcher may be asked for next, and why not."""

from __future__ import annotations

import contextlib
import enum
import logging
import os
from collections.abc import Callable, Iterator

from rlstructs.errors import ClosedError, StateError
from workers.errors import check_owner

logger = logging.getLogger("rlstructs")


class Phase(enum.Enum):
    """Where a batcher is."""

    NEW = "there was no reset"
    READY = "no rollout is under way"
    RUNNING = "a rollout is under way"
    LEASED = "a rollout is leased"
    ENDED = "every environment has ended"
    INTERRUPTED = "a reset or a rollout was interrupted"
    FAILED = "a worker failed"
    CLOSED = "closed"


NEEDED = {
    Phase.NEW: "call reset first",
    Phase.READY: "call execute first",
    Phase.RUNNING: "call get first",
    Phase.LEASED: "release it first",
    Phase.ENDED: "call reset first",
    Phase.INTERRUPTED: "call reset first",
}


class Lifecycle:
    """The phase of a batcher, and what made it fail."""

    def __init__(self) -> None:
        self._phase, self._is_over = Phase.CLOSED, False
        self._failure: BaseException | None = None
        self._why = ""
        self._made_by = os.getpid()

    @property
    def phase(self) -> Phase:
        """CLOSED until there is something to close.

        Raises:
            ClosedError: it is set when another thread, or a signal handler, has closed the batcher meanwhile.
        """
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        if self._is_over:
            raise ClosedError("the batcher was closed meanwhile")
        self._phase = phase

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that has made it, and no forked copy."""
        return os.getpid() == self._made_by

    @property
    def is_closed(self) -> bool:
        """Whether there is nothing to close, or nothing any more."""
        return self.phase is Phase.CLOSED

    def check_open(self, call: str) -> None:
        """Raises ClosedError if the batcher is closed."""
        if self.is_closed:
            raise ClosedError(f"{call}: the batcher is closed")

    def check(self, call: str, *allowed: Phase) -> None:
        """Raises, with what is to be done first, unless the batcher is in one of these phases, and of this process."""
        self.check_open(call)
        check_owner(self._made_by)
        if self.phase in allowed:
            return
        if self.phase is Phase.FAILED:
            raise StateError(f"{call}: {self._why}, close the batcher") from self._failure
        raise StateError(f"{call}: {self.phase.value}, {NEEDED[self.phase]}")

    @contextlib.contextmanager
    def failing(self, call: str = "", is_halfway: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Marks the batcher as failed when a worker fails, and when `call` is interrupted.

        Args:
            call: its name; without one an interrupt changes nothing: the workers do not know of it, and they can be
                waited for again.
            is_halfway: whether an interrupted call cannot be made again, as just some workers were told of it.
        """
        try:
            yield
        except Exception as error:
            if self.is_closed:  # by another thread
                raise ClosedError("the batcher was closed meanwhile") from error
            self.fail(error, "a worker failed before")
            raise
        except BaseException as error:
            if call and is_halfway():
                self.fail(error, f"{call} was interrupted before")
            raise

    def close(self) -> bool:
        """Ends it; whether it had failed. What failed is forgotten: its traceback holds whatever was in use."""
        failed = self.phase is Phase.FAILED
        self._phase, self._is_over, self._failure = Phase.CLOSED, True, None
        return failed

    def fail(self, error: BaseException, why: str) -> None:
        """From now on the batcher can only be closed."""
        if self._is_over:
            return
        self._phase, self._failure, self._why = Phase.FAILED, error, why
        logger.info("%s: %r", why, error)
