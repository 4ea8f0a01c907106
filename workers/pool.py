"""N workers as one: broadcast a request, gather the replies under one deadline, replace some, close all."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import util
from typing import Any

from workers import messages, pickling
from workers.channel import deadline_in
from workers.descriptors import check_enough
from workers.errors import WorkerError, WorkerTimeout, bare, check_owner
from workers.failures import Failure
from workers.interrupts import finished, forget_last_interrupt, uninterrupted
from workers.messages import Asked, Build, Call, Close, Post, Result, State
from workers.process import WorkerProcess, end_all
from workers.script_pickling import make_build_request
from workers.settings.log_records import LogPipe
from workers.start import default_start_method
from workers.watch import Watch

# Seconds that workers get to close their jobs.
CLOSE_DELAY = 3.0
# Seconds that the others get to close their jobs when a factory has raised.
START_PATIENCE = 1.0


def _nothing(index: int) -> None:
    pass


def _end_left(workers: list[WorkerProcess], log: LogPipe) -> None:
    """Ends the workers of a pool that was dropped."""
    with finished():  # a finalizer runs once
        end_all(workers)
        log.read_all()
        log.deliver()
        log.close()


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
        setup: called in each worker, with its index, before the factory is unpickled.
        init_worker: likewise, behind that; what it raises arrives as what the factory raises does. Handlers that it
            adds to loggers handle what this worker logs, too.
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
        setup: Callable[[int], None] = _nothing,
        init_worker: Callable[[int], object] | None = None,
        name: str = "worker",
    ) -> None:
        if n_workers < 1:
            raise ValueError(f"n_workers must be at least 1, got {n_workers}")
        forget_last_interrupt()
        self.timeout = timeout
        self._made_by = os.getpid()
        # A successor is built from the same, whatever becomes of the factory and of this process meanwhile.
        start_method = start_method or default_start_method()
        self._first = make_build_request(setup, init_worker, factory, start_method)
        self._log = LogPipe()
        self._arguments = (shared, start_method, tuple(preload), name, self._log.writer)
        self._workers: list[WorkerProcess] = []
        self._replies: dict[int, Any] = {}
        self._answers: list[tuple[int, bytes]] = []
        self._failures: dict[int, BaseException] = {}
        self._late: set[int] = set()  # those that have outrun a deadline, and may yet reply
        self._watch = Watch(self._log)
        # Not weakref.finalize: this one runs before multiprocessing joins what is left at exit,
        # and never in a forked copy of this process.
        self._finalizer = util.Finalize(self, _end_left, args=(self._workers, self._log), exitpriority=100)
        try:
            check_enough(n_workers)
            for index in range(n_workers):
                self._begin(index)
            self._send(self._workers, self._first)
            self.gather()
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, WorkerError):
                with contextlib.suppress(Exception):  # of a factory: the others may have something to close
                    self.close(START_PATIENCE)
            self.kill()
            raise

    @property
    def n_workers(self) -> int:
        return len(self._workers)

    @property
    def can_restart(self) -> bool:
        """True: a worker that failed can be replaced."""
        return True

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
        self._send(self._workers, Call(method, args))

    def ask(self, method: str, *args: Any, only: Iterable[int] | None = None) -> list[Asked]:
        """Asks workers to call `job.method(*args)`, and returns at once; what comes of it is in what is returned.

        A worker takes several requests, one behind another: they wait in its pipe, so they must be small
        (`messages.AT_ONCE` bytes in all), or the worker idle. One that is gone has failed.

        Args:
            method: of the job.
            args: its arguments.
            only: the indexes of those who are asked; None for all.
        """
        return self._send(self._chosen(only), Call(method, args), is_kept=True)

    def settle(self, asked: Sequence[Asked], n: int | None = None, *, fails_fast: bool = False) -> None:
        """Waits until `n` of what was asked (None: all) is over, or outruns the pool's timeout, which is a failure.

        Args:
            asked: what `ask` gave.
            n: how many.
            fails_fast: whether one failure is enough.
        """
        while workers := self._awaited(asked, n, fails_fast):
            self._wait(None, workers)
        for each in asked:
            if not each.is_over and not each.error and self._workers[each.index] in self._overdue():
                each.error = _late([self._workers[each.index]], self.timeout)
                self._late.add(each.index)

    def is_settled(self, asked: Sequence[Asked], n: int | None = None, *, fails_fast: bool = False) -> bool:
        """Whether `settle` would return at once."""
        return not self._awaited(asked, n, fails_fast)

    def _awaited(self, asked: Sequence[Asked], n: int | None, fails_fast: bool) -> list[WorkerProcess]:
        """Whom `settle` has to wait for; by one look at the clock, as the last deadline may pass at any moment."""
        self._drain()
        if fails_fast and any(each.error for each in asked):
            return []
        if sum(each.is_over for each in asked) >= (len(asked) if n is None else n):
            return []
        overdue, indexes = self._overdue(), {each.index for each in asked if not each.is_over}
        return [worker for worker in self._busy() if worker.index in indexes and worker not in overdue]

    def send(self, index: int, method: str, *args: Any) -> None:
        """Asks one worker to call `job.method(*args)`, and returns at once."""
        self._check_idle()
        self._send([self._workers[index]], Call(method, args))

    def post(self, post: Post, only: Iterable[int] | None = None) -> None:
        """Has workers call `job.answer` with bytes, and returns at once; the bytes it gives are among `answers`.

        Far quicker than a call, as nothing is pickled. A worker takes several, one behind another: they wait in
        its pipe, so they must be small (`messages.AT_ONCE` bytes in all), or the worker idle.

        Args:
            post: what is asked, one answer for each of its bytes objects.
            only: the indexes of those who are asked; None for all.
        """
        self._send(self._chosen(only), post, post.message)

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
        self._take_read()
        deadline = deadline_in(timeout)
        while not self._failures and not self._answers and (busy := self._busy()):
            if not self._wait(deadline, busy):
                self._raise_late(timeout)
        self._raise_failure()

    def ready(self, timeout: float | None = 0.0) -> bool:
        """Waits up to `timeout` seconds; whether every asked worker has replied.

        Takes nothing away: `gather` still returns every reply, in the workers' order.

        Raises:
            WorkerTimeout: one has outrun the pool's timeout.
            WorkerCrashed: a worker is gone.
            Exception: what a job raised, with the worker's traceback as the cause.
        """
        self._take_read()
        deadline = deadline_in(timeout)
        while not self._failures and (busy := self._busy()):
            if not self._wait(deadline, busy):
                if self._overdue():
                    self._raise_late(None)
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
        if not self.ready(timeout):
            self._raise_late(timeout)
        if not self._replies:  # only answers came
            return []
        replies, self._replies = self._replies, {}
        return [replies[index] for index in sorted(replies)]

    def check_owner(self) -> None:
        """Raises WorkerError in a forked copy of the process that has made the workers."""
        check_owner(self._made_by)

    def check(self) -> dict[int, BaseException]:
        """The failures of workers that are gone."""
        self._drain()
        return {worker.index: bare(worker.make_crash_error()) for worker in self._workers if worker.state is State.GONE}

    def restart(self, successors: Mapping[int, tuple[Any, ...]]) -> list[Asked]:
        """Replaces workers, whatever they are doing; nothing comes any more of what those were asked.

        Args:
            successors: worker index -> what the factory is called with behind `shared`.

        Returns:
            For `settle`: whether their jobs are built.
        """
        old = [self._workers[index] for index in successors]
        self._close_idle(old)
        for worker in old:
            self._watch.forget(worker)
        end_all(old)
        self._log.read_all()
        self._log.deliver()
        for worker in old:
            for each in worker.asked:
                each.end(error=bare(worker.make_crash_error()))
        asked = []
        for index, args in successors.items():
            self._late.discard(index)
            self._replies.pop(index, None)
            self._failures.pop(index, None)
            try:
                self._watch.check()
                check_enough(1)  # or the fork server would fail, and with it the workers of others
                self._begin(index)
            except WorkerError as error:
                asked.append(Asked(index, Build.label, is_over=True, error=bare(error)))
            else:
                asked += self._send([self._workers[index]], dataclasses.replace(self._first, args=args), is_kept=True)
        return asked

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

    def close(self, timeout: float | None = None, *, with_earlier: bool = True) -> None:
        """Closes every job and ends every worker, by force after `timeout` seconds. Idempotent.

        Args:
            timeout: seconds; None for 3, or the pool's own if that is less. A worker that is late already gets none.
            with_earlier: whether what jobs raised before, and nobody has asked for, is raised, too.

        Raises:
            Exception: what the first job raised while it closed; everything is gone all the same.
        """
        if not self._is_ours():
            return
        self._watch.end()
        if timeout is None:
            timeout = CLOSE_DELAY if self.timeout is None else min(CLOSE_DELAY, self.timeout)
        deadline = time.monotonic() + float(timeout)  # of numpy, too
        # A busy one reads it when it is through. One that reads no more, or is late already, is left to `kill`.
        lost = self._failures.keys() | self._late
        open_workers = [worker for worker in self._workers if worker.can_close() and worker.index not in lost]
        errors: list[BaseException] = []
        try:
            for worker in open_workers:
                with contextlib.suppress(WorkerError):  # gone: reported where it mattered
                    worker.send(Close())
            for worker in open_workers:
                errors += worker.await_close(deadline, with_earlier, self._log)
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
            self._log.read_all()
            self._log.deliver()
            self._log.close()
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

    def _begin(self, index: int) -> None:
        """Starts a worker, in the place of the one that was there."""
        with uninterrupted():  # one that is known by half is neither watched nor ended
            worker = WorkerProcess(index, *self._arguments, self.timeout)
            self._workers[index : index + 1] = [worker]
            try:
                self._watch.add(worker)
            except WorkerError:  # closed while it started, by who may not have found it
                end_all([worker])
                raise

    def _wait(self, deadline: float | None, workers: list[WorkerProcess]) -> bool:
        """Reads what comes first; False when nothing came before the deadline, or one that these workers have."""
        if self.timeout is not None:
            due = min(worker.since for worker in workers) + self.timeout
            deadline = due if deadline is None else min(due, deadline)
        has_come = self._watch.wait(deadline, self._read)
        self._log.deliver()
        return has_come

    def _drain(self) -> None:
        """Reads what has come."""
        self._take_read()
        while self._watch.wait(time.monotonic(), self._read) and self._busy():
            pass
        self._log.deliver()

    def _take_read(self) -> None:
        """Takes what was read while something was sent."""
        for worker in self._workers:
            while worker.state is State.BUSY and worker.channel.has_message():
                with uninterrupted():
                    self._take(*worker.receive())
                    self._log.read()

    def _overdue(self) -> list[WorkerProcess]:
        """Those whose reply is later than the pool's timeout allows."""
        if self.timeout is None:
            return []
        now = time.monotonic()
        return [worker for worker in self._busy() if now >= worker.since + self.timeout]

    def _raise_late(self, timeout: float | None) -> None:
        late, timeout = (self._overdue(), self.timeout) if timeout is None else (self._busy(), timeout)
        self._late |= {worker.index for worker in late}
        raise _late(late, timeout)

    def _raise_failure(self) -> None:
        if self._failures:
            raise self._failures.pop(min(self._failures))

    def _chosen(self, only: Iterable[int] | None) -> list[WorkerProcess]:
        return self._workers if only is None else [self._workers[index] for index in only]

    def _send(
        self, workers: list[WorkerProcess], request: Build | Call | Post, message: list[bytes] | None = None,
        is_kept: bool = False,
    ) -> list[Asked]:  # fmt: skip
        """Sends a request to workers, under one deadline; what fails is raised, unless it is to be kept."""
        self.check_owner()
        message = messages.frame(pickling.dumps(request)) if message is None else message  # once for all
        deadline = deadline_in(self.timeout)
        asked = []
        for worker in workers:
            try:
                asked.append(worker.send(request, message, deadline, is_kept))
            except (WorkerError, TimeoutError) as error:
                failure = self._unread(worker, request, error)
                if not is_kept:
                    raise failure from error
                asked.append(Asked(worker.index, request.label, is_over=True, error=bare(failure)))
        return asked

    def _unread(self, worker: WorkerProcess, request: Build | Call | Post, error: Exception) -> WorkerError:
        if isinstance(error, WorkerError):
            return error
        return WorkerTimeout(
            f"worker {worker.index} (pid {worker.pid}) has not read {request.label!r} within {self.timeout} s",
            worker.index,
        )

    def _busy(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers if worker.state is State.BUSY]

    def _check_idle(self, workers: list[WorkerProcess] | None = None) -> None:
        if busy := [worker for worker in (self._workers if workers is None else workers) if worker.state is State.BUSY]:
            raise RuntimeError(
                f"worker {busy[0].index} is still busy with {busy[0].last_request!r}: gather its reply first"
            )

    def _read(self, index: int, is_pipe: bool) -> None:
        """Reads what a worker has written, and never waits for the rest of it."""
        worker = self._workers[index]
        try:
            while worker.channel.read_available():
                worker.since = time.monotonic()  # it answers: what is long comes in pieces
                while worker.state is State.BUSY and worker.channel.has_message():
                    self._take(*worker.receive())
                if is_pipe:
                    return
            if is_pipe:  # another thread has read it
                return
        except EOFError:
            pass
        error = bare(worker.make_crash_error())  # it ended, with nothing more to say
        self._log.read_all()
        if all(asked.is_kept for asked in worker.asked) and worker.asked:
            for asked in worker.asked:
                asked.end(error=error)
        else:
            self._failures[index] = error
        self._watch.forget(worker)

    def _take(self, asked: Asked, reply: Any) -> None:
        index = asked.index
        self._late.discard(index)
        if isinstance(reply, bytes):
            self._answers.append((index, reply))
            return
        value: Any = None
        error: BaseException | None = None
        if isinstance(reply, Failure):
            error = reply.to_exception(index, asked.label)
        elif isinstance(reply, Exception):  # that it cannot be unpickled
            error = reply
        else:
            assert isinstance(reply, Result)
            value = reply.value
        if asked.is_kept:
            asked.end(value, error)
        elif error is not None:
            self._failures[index] = error
        else:
            self._replies[index] = value


def _late(workers: list[WorkerProcess], timeout: float | None) -> WorkerTimeout:
    return WorkerTimeout(
        f"no reply within {timeout} s to {workers[0].last_request!r} from worker(s) "
        + ", ".join(f"{worker.index} (pid {worker.pid})" for worker in workers),
        workers[0].index,
    )
