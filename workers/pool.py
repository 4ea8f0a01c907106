"""N workers as one: broadcast a request, gather the replies under one deadline, replace some, close all."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import util
from typing import Any

from workers import messages
from workers.descriptors import check_enough
from workers.errors import WorkerError, WorkerTimeout, bare
from workers.messages import Build, Call, Close, Failure, Post, Result, State
from workers.process import WorkerProcess, end_all
from workers.start import default_start_method
from workers.watch import Watch

# Seconds that workers get to close their jobs.
CLOSE_DELAY = 3.0


def _nothing() -> None:
    pass


class WorkerPool:
    """Jobs in worker processes, one each.

    Args:
        n_workers: how many.
        factory: `factory(index, *shared)` is called in each worker and returns its job, any object.
            Pickled by cloudpickle, so a lambda or a class of the script will do.
        shared: what is handed over while a worker starts, `SharedArena`s above all.
        start_method: "forkserver" (the default on Linux), "spawn" (elsewhere) or "fork".
        timeout: seconds within which replies must come, None for no limit. Deaths are noticed at
            once either way.
        preload: modules that the fork server imports once for all workers.
        setup: called in each worker before the factory is unpickled.
        name: what the processes are called, with their index behind it.

    Raises:
        WorkerCrashed, WorkerTimeout: a worker did not come up.
        Exception: what a factory raised, with the worker's traceback as the cause.
    """

    def __init__(
        self,
        n_workers: int,
        factory: Callable[..., Any],
        *,
        shared: tuple[Any, ...] = (),
        start_method: str | None = None,
        timeout: float | None = None,
        preload: Iterable[str] = (),
        setup: Callable[[], None] = _nothing,
        name: str = "worker",
    ) -> None:
        if n_workers < 1:
            raise ValueError(f"n_workers must be at least 1, got {n_workers}")
        self.timeout = timeout
        self._made_by = os.getpid()
        self._setup = messages.dumps(setup)
        self._arguments = (shared, start_method or default_start_method(), tuple(preload), name)
        self._workers: list[WorkerProcess] = []
        self._replies: dict[int, Any] = {}
        self._answers: list[tuple[int, bytes]] = []
        self._failures: dict[int, BaseException] = {}
        self._late: set[int] = set()  # those that have outrun a deadline, and may yet reply
        self._watch = Watch()
        # Not weakref.finalize: this one runs before multiprocessing joins what is left at exit,
        # and never in a forked copy of this process.
        self._finalizer = util.Finalize(self, end_all, args=(self._workers,), exitpriority=100)
        try:
            check_enough(n_workers)
            for index in range(n_workers):
                self._workers.append(self._started(index))
            self._send_all(self._build(factory))
            self.gather()
        except BaseException:
            self.kill()
            raise

    @property
    def n_workers(self) -> int:
        return len(self._workers)

    @property
    def pids(self) -> list[int]:
        """The process ids, by worker index."""
        return [worker.pid for worker in self._workers]

    @property
    def states(self) -> list[str]:
        """"idle", "busy" or "gone", by worker index."""
        return [worker.state.value for worker in self._workers]

    def call(self, method: str, *args: Any) -> list[Any]:
        """Calls `job.method(*args)` in every worker; the values, by worker index."""
        self.broadcast(method, *args)
        return self.gather()

    def broadcast(self, method: str, *args: Any) -> None:
        """Asks every worker to call `job.method(*args)`, and returns at once."""
        self._check_idle()
        self._send_all(Call(method, args))

    def ask(self, method: str, *args: Any, only: Iterable[int] | None = None) -> None:
        """As `broadcast`, for `settle`: a worker that is gone is one of the failures.

        Args:
            only: the indexes of those who are asked; None for all.
        """
        asked = self._workers if only is None else [self._workers[index] for index in only]
        self._check_idle(asked)
        request = Call(method, args)
        data = messages.dumps(request)
        for worker in asked:
            try:
                self._send(worker, request, data)
            except WorkerError as error:
                self._watch.forget(worker)
                self._failures[worker.index] = bare(error)

    def send(self, index: int, method: str, *args: Any) -> None:
        """Asks one worker to call `job.method(*args)`, and returns at once."""
        self._check_idle()
        self._send(self._workers[index], Call(method, args))

    def post(self, post: Post, only: Iterable[int] | None = None) -> None:
        """Has workers call `job.answer` with bytes, and returns at once; the bytes it gives are among `answers`.

        Far quicker than a call, as nothing is pickled. A worker takes several, one behind another: they wait in
        its pipe, so they must be small (`channel.AT_ONCE` bytes in all), or the worker idle.

        Args:
            post: what is asked, one answer for each of its bytes objects.
            only: the indexes of those who are asked; None for all.
        """
        for worker in self._workers if only is None else [self._workers[index] for index in only]:
            self._send(worker, post, post.message)

    def answers(self) -> list[tuple[int, bytes]]:
        """What posts were answered with: worker index and bytes, the oldest first.

        Takes nothing away: it gives the same again, until `forget_answers`.
        """
        return self._answers

    def forget_answers(self) -> None:
        """Drops what `answers` gave."""
        self._answers = []

    def await_answer(self, timeout: float | None = None) -> None:
        """Waits until there is an answer that was not forgotten, or nothing is asked.

        Args, Raises: as `gather`.
        """
        timeout = self.timeout if timeout is None else timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._failures and not self._answers and self._busy():
            if not self._wait(deadline):
                self._raise_late(timeout)
        self._raise_failure()

    def ready(self, timeout: float | None = 0.0) -> bool:
        """Waits up to `timeout` seconds; whether every asked worker has replied.

        Takes nothing away: `gather` still returns every reply, in the workers' order.

        Raises:
            WorkerCrashed: a worker is gone.
            Exception: what a job raised, with the worker's traceback as the cause.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._failures and self._busy():
            if not self._wait(deadline):
                return False
        self._raise_failure()
        return True

    def gather(self, timeout: float | None = None) -> list[Any]:
        """The replies of all that were asked, by worker index.

        Args:
            timeout: seconds; None for the pool's own.

        Raises:
            WorkerTimeout: not all replied in time; names who did not.
            WorkerCrashed: a worker is gone.
            Exception: what a job raised, with the worker's traceback as the cause.
        """
        timeout = self.timeout if timeout is None else timeout
        if not self.ready(timeout):
            self._raise_late(timeout)
        replies, self._replies = self._replies, {}
        return [replies[index] for index in sorted(replies)]

    def settle(self) -> tuple[dict[int, Any], dict[int, BaseException]]:
        """Waits until every asked worker has replied, failed, or outrun the pool's timeout.

        Takes nothing away: it gives the same again, until `forget_outcomes`.

        Returns:
            Replies and failures, by worker index. Those that failed need a `restart`.
        """
        deadline = None if self.timeout is None else time.monotonic() + self.timeout
        while self._busy() and self._wait(deadline):
            pass
        for worker in self._busy():
            self._failures[worker.index] = _late([worker], self.timeout)
        return self._replies, self._failures

    def is_settled(self) -> bool:
        """Whether `settle` would return at once."""
        while self._busy() and self._wait(time.monotonic()):
            pass
        return not self._busy()

    def check(self) -> dict[int, BaseException]:
        """The failures of workers that ended while nothing was asked of them."""
        self._wait(time.monotonic())
        return dict(self._failures)

    def forget_outcomes(self) -> None:
        """Drops the replies and failures that `settle` gave."""
        self._replies, self._failures = {}, {}

    def restart(self, factories: Mapping[int, Callable[..., Any]]) -> None:
        """Replaces workers, whatever they are doing; `settle` tells whether their jobs are built.

        Args:
            factories: worker index -> what makes its job now.
        """
        old = [self._workers[index] for index in factories]
        self._close_idle(old)
        for worker in old:
            self._watch.forget(worker)
        end_all(old)
        for index, factory in factories.items():
            self._late.discard(index)
            self._replies.pop(index, None)
            self._failures.pop(index, None)
            try:
                self._watch.check()
                check_enough(1)  # or the fork server would fail, and with it the workers of others
                self._workers[index] = self._started(index)
                self._send(self._workers[index], self._build(factory))
            except WorkerError as error:
                self._watch.forget(self._workers[index])
                self._failures[index] = bare(error)

    def _close_idle(self, workers: list[WorkerProcess]) -> None:
        """Has those that raised, and wait for the next request, close their jobs."""
        delay = CLOSE_DELAY if self.timeout is None else min(CLOSE_DELAY, self.timeout)
        idle = [worker for worker in workers if worker.state is State.IDLE and worker.can_close()]
        for worker in idle:
            with contextlib.suppress(WorkerError):
                worker.send(Close())
        deadline = time.monotonic() + delay
        for worker in idle:
            worker.await_close(deadline)

    def close(self, timeout: float | None = None) -> None:
        """Closes every job and ends every worker, by force after `timeout` seconds. Idempotent.

        Args:
            timeout: seconds; None for 3, or the pool's own if that is less. A worker that is late already gets none.

        Raises:
            Exception: what the first job raised while it closed; everything is gone all the same.
        """
        if not self._is_ours():
            return
        self._watch.end()
        if timeout is None:
            timeout = CLOSE_DELAY if self.timeout is None else min(CLOSE_DELAY, self.timeout)
        deadline = time.monotonic() + timeout
        # A busy one reads it when it is through. One that reads no more, or is late already, is left to `kill`.
        lost = self._failures.keys() | self._late
        open_workers = [worker for worker in self._workers if worker.can_close() and worker.index not in lost]
        errors: list[BaseException] = []
        try:
            for worker in open_workers:
                with contextlib.suppress(WorkerError):  # gone: reported where it mattered
                    worker.send(Close())
            for worker in open_workers:
                errors += worker.await_close(deadline)
        finally:
            self.kill(0.0 if lost else max(0.0, deadline - time.monotonic()))
        if errors:
            raise errors[0]

    def kill(self, patience: float = 0.0) -> None:
        """Ends every worker that has not ended within `patience` seconds: SIGTERM, then SIGKILL."""
        if self._is_ours():
            self._watch.end()
            for worker in self._workers:
                self._watch.forget(worker)
            end_all(self._workers, patience)
            self._finalizer.cancel()  # not before: it is there for those that an interrupt has left

    def _is_ours(self) -> bool:
        """Whether there is something to end, and this is not a forked copy of the process that has to."""
        return self._finalizer.still_active() and os.getpid() == self._made_by

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a connection, were it only half made, would close the pipe as it goes.
        raise TypeError("worker processes cannot be copied or pickled, nor what holds them")

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.close()
        else:  # what is on its way out matters more than what a job says as it closes
            with contextlib.suppress(Exception):
                self.close()

    def _build(self, factory: Callable[..., Any]) -> Build:
        return Build.here(self._setup, messages.dumps(factory))

    def _started(self, index: int) -> WorkerProcess:
        worker = WorkerProcess(index, *self._arguments, self.timeout)
        self._watch.add(worker)
        return worker

    def _wait(self, deadline: float | None) -> bool:
        """Reads what comes first; False when nothing came before the deadline."""
        return self._watch.wait(deadline, self._read)

    def _raise_late(self, timeout: float | None) -> None:
        self._late |= {worker.index for worker in self._busy()}
        raise _late(self._busy(), timeout)

    def _raise_failure(self) -> None:
        if self._failures:
            raise self._failures.pop(min(self._failures))

    def _send_all(self, request: Build | Call) -> None:
        data = messages.dumps(request)  # once for all
        for worker in self._workers:
            self._send(worker, request, data)

    def _send(self, worker: WorkerProcess, request: Build | Call | Post, data: bytes | None = None) -> None:
        deadline = None if self.timeout is None else time.monotonic() + self.timeout
        try:
            worker.send(request, data, deadline)
        except TimeoutError as error:
            raise WorkerTimeout(
                f"worker {worker.index} (pid {worker.pid}) has not read {request.label!r} within {self.timeout} s",
                worker.index,
            ) from error

    def _busy(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers if worker.state is State.BUSY]

    def _check_idle(self, workers: list[WorkerProcess] | None = None) -> None:
        if busy := [worker for worker in (self._workers if workers is None else workers) if worker.state is State.BUSY]:
            raise RuntimeError(
                f"worker {busy[0].index} is still busy with {busy[0].last_request!r}: gather its reply first"
            )

    def _read(self, index: int, is_pipe: bool) -> None:
        worker = self._workers[index]
        if worker.state is not State.BUSY or not (is_pipe or worker.channel.has_message()):
            self._watch.forget(worker)  # it ended, with nothing more to say
            self._failures[worker.index] = worker.crashed()
            return
        self._late.discard(index)
        while True:
            try:
                self._take(index, worker.receive())
            except WorkerError as error:
                self._watch.forget(worker)
                self._failures[index] = bare(error)
            except Exception as error:
                self._failures[index] = error
            if worker.state is not State.BUSY or not worker.channel.has_read():
                return

    def _take(self, index: int, reply: Any) -> None:
        if isinstance(reply, bytes):
            self._answers.append((index, reply))
        elif isinstance(reply, Failure):
            self._failures[index] = reply.to_exception(index, self._workers[index].last_request)
        else:
            assert isinstance(reply, Result)
            self._replies[index] = reply.value


def _late(workers: list[WorkerProcess], timeout: float | None) -> WorkerTimeout:
    return WorkerTimeout(
        f"no reply within {timeout} s to {workers[0].last_request!r} from worker(s) "
        + ", ".join(f"{worker.index} (pid {worker.pid})" for worker in workers),
        workers[0].index,
    )
