"""`Pool`: what a supervisor asks of workers, wherever they run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from rlstructs.workers.futures import Future


class Pool(Protocol):
    """One job per worker; `WorkerPool` runs them in processes, `InlinePool` runs one in this process."""

    @property
    def n_workers(self) -> int:
        """Number of workers."""

    @property
    def pids(self) -> list[int]:
        """The process id of each worker."""

    @property
    def states(self) -> list[str]:
        """"idle", "busy" or "gone", for each worker."""

    @property
    def can_restart(self) -> bool:
        """Whether a worker that failed can be replaced."""

    def call(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of every job and returns the values by worker; raises the first failure."""

    def ask(self, method: str, *args: Any, only: Iterable[int] | None = None) -> list[Future]:
        """Asks workers (None: all) to call a method of their jobs, and returns at once."""

    def gather(self, futures: Sequence[Future]) -> list[Any]:
        """Waits for replies and returns their values; raises the first failure."""

    def settle(self, futures: Sequence[Future], n: int | None = None, *, fails_fast: bool = False) -> None:
        """Waits until `n` (None: all) of the futures are over, or, with `fails_fast`, one has failed."""

    def is_settled(self, futures: Sequence[Future], n: int | None = None, *, fails_fast: bool = False) -> bool:
        """Whether `settle` would return at once."""

    def check(self) -> dict[int, BaseException]:
        """The failures of workers that are known to be gone, by index."""

    def restart(self, successors: Mapping[int, tuple[Any, ...]]) -> list[Future]:
        """Replaces workers; for each index, the arguments that its new job is built with."""

    def close(self, *, with_earlier: bool = True) -> None:
        """Closes every job and ends every worker; raises what closing and, `with_earlier`, other calls raised."""

    def kill(self) -> None:
        """Ends every worker at once."""
