"""`Future`: the reply that a request to a worker will have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class Future:
    """The reply to a request, which may not have come yet.

    Attributes:
        index: the worker's index.
        label: the request's label.
        is_over: whether the reply has come, or never will.
        value: what the job replied.
        error: why there is no value. Until `is_over`, it may be a `WorkerTimeout` that a later reply replaces.
    """

    index: int
    label: str
    is_over: bool = False
    value: Any = None
    error: BaseException | None = None

    def end(self, value: Any = None, error: BaseException | None = None) -> None:
        """Keeps the reply, or the reason why there is none."""
        self.value, self.error, self.is_over = value, error, True


def gather_values(futures: Sequence[Future]) -> list[Any]:
    """Returns the values of settled futures, or raises the failure of the first worker that has one."""
    values = [each.value for each in futures if each.error is None]
    if len(values) == len(futures):
        return values
    # What failed comes before what is late.
    first = min((each for each in futures if each.error is not None), key=lambda each: (not each.is_over, each.index))
    assert first.error is not None
    raise first.error


def find_failures(futures: Sequence[Future]) -> dict[int, BaseException]:
    """The errors of futures that failed, by worker index."""
    return {future.index: future.error for future in futures if future.error is not None}
