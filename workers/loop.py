"""The worker's side: builds the job, then reads requests, calls and replies.

    parent                          worker
    ------                          ------
    Build(args)  ────────────────>  job = factory(index, *shared, *args)
           <──────────────────────  Result | Failure
    Call(method, args)  ─────────>  job.method(*args)
           <──────────────────────  Result | Failure
    Post: bytes, bytes, ...  ────>  job.answer(bytes), for each
           <──────────────────────  bytes | Failure, for each
    Close  ──────────────────────>  job.close()
           <──────────────────────  Result | Failure, then the process ends

The worker ends when the pipe closes, and a thread ends it at once when the main process dies. The end of the
pipe alone would not end a worker in the middle of a long call, nor one whose pipe a forked child of the main
process still holds open.
"""

from __future__ import annotations

import bdb
import contextlib
import ctypes
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from rlstructs.workers import failures, logs, main_module, messages, pickling
from rlstructs.workers.arena import Descriptor
from rlstructs.workers.errors import suggest_next_step
from rlstructs.workers.failures import add_note
from rlstructs.workers.imports import uncollected_imports
from rlstructs.workers.interrupts import leave_sigterm_to
from rlstructs.workers.main_module import explain_left_out
from rlstructs.workers.messages import Channel
from rlstructs.workers.settings import SETTINGS, quiet_imports, write_settings

# Set to 1 in each worker: W workers with a thread per core each would compete for the cores.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
PR_SET_PDEATHSIG = 1  # from linux/prctl.h
# Seconds that a worker polls for the next request before it sleeps, if the last request came that soon: waking a
# process takes as long as stepping a few environments. If the last request came later, the worker sleeps at once: the
# trainer computes between steps and may need the core.
SPIN_TIME = 120e-6
# Seconds that a closing worker waits for its parent to read the last log records.
LOG_DELAY = 1.0

# The process that forked this one (0: none did), and this process.
_parent_pid, _own_pid = 0, os.getpid()


def _note_fork() -> None:
    global _parent_pid, _own_pid
    _parent_pid, _own_pid = _own_pid, os.getpid()


os.register_at_fork(after_in_child=_note_fork)


def run(
    index: int,
    channel: Channel,
    shared: tuple[Any, ...],
    log: Descriptor,
    main_process: Descriptor | None,
    dies_with_parent: bool,
    main_pid: int,
) -> None:
    """Runs a worker process until it must close or its parent is gone."""
    logs.send_records(log.fileno())
    os.set_inheritable(channel.fileno(), False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    unblock_sigint()
    leave_sigterm_to(main_pid)
    try:
        try:
            if dies_with_parent:
                die_with_parent()
            if main_process is not None:
                exit_when_readable(main_process)
        except Exception as error:  # the system may refuse a thread; this replies to the first request
            channel.send(failures.Failure.of(_add_next_step(error)))
            return
        serve(index, channel, shared)
    except EOFError:
        pass  # the parent is gone or has closed the pipe: there is nobody to tell


def _add_next_step(error: Exception) -> Exception:
    if step := suggest_next_step(error):
        failures.add_note(error, step.lstrip("; "))
    return error


def serve(index: int, channel: Channel, shared: tuple[Any, ...]) -> None:
    """Answers requests until one asks to close."""
    job: Any = None
    pid = os.getpid()
    comes_soon = False
    while True:
        replied = time.perf_counter()
        try:
            if comes_soon:
                channel.spin(SPIN_TIME)
            request = channel.receive()
        except EOFError:
            raise
        except Exception as error:  # the arguments cannot be unpickled here
            channel.send(failures.Failure.of(error))
            continue
        comes_soon = isinstance(request, bytes) and time.perf_counter() - replied < SPIN_TIME
        if isinstance(request, bytes):
            for data in messages.split_post(request):
                answer = _answer(job, data)
                exit_if_copy(pid)
                _reply(channel, answer)
            continue
        reply: Any
        try:
            value = None
            if isinstance(request, messages.Build):
                job = _build(request, index, shared)
            elif isinstance(request, messages.Close):
                close_job(job)
                logs.send_rest(LOG_DELAY)
            else:
                value = getattr(job, request.method)(*request.args)
            reply = messages.Result(value)
        except BaseException as error:
            reply = _make_failure(error)
        exit_if_copy(pid)
        _reply(channel, reply)
        if isinstance(request, messages.Close):
            return


def exit_if_copy(pid: int) -> None:
    """Ends this process unless it is `pid`.

    An environment may fork, and the copy must not reply in its place.
    """
    if os.getpid() != pid:
        os._exit(1)


def close_job(job: Any) -> None:
    """Calls the job's `close`, if it has one."""
    close = getattr(job, "close", None)
    if close is not None:
        close()


def exit_when_readable(pidfd: Descriptor) -> None:
    """Starts a thread that ends this process when the process of `pidfd` dies."""

    def watch() -> None:
        poll = select.poll()
        poll.register(pidfd.fileno(), select.POLLIN)
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, name="main-process-watch", daemon=True).start()


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its starting thread ends.

    Only Linux can.

    The thread that watches the main process does not run while an environment's C code holds the interpreter.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if _parent_pid not in (0, os.getppid()):  # it ended before this call, and the kernel sends nothing
        os._exit(1)


def unblock_sigint() -> None:
    """Unblocks SIGINT, which `interrupts.block_sigint` blocked in the thread that started this process."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _build(request: messages.Build, index: int, shared: tuple[Any, ...]) -> Any:
    os.environ.clear()
    os.environ.update(request.environ)
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    if request.directory is not None:
        os.chdir(request.directory)
    try:
        faulthandler.enable()
    except (AttributeError, ValueError, RuntimeError, OSError):
        pass  # there is no usable stderr
    loads: Callable[[bytes], Any] = pickling.loads
    if request.script is not None:
        loads = main_module.install(request.script).__script_names__.loads
    with quiet_imports(), uncollected_imports():
        setup = loads(request.setup)
    write_settings(SETTINGS, request.settings)
    setup(index)
    with quiet_imports(), uncollected_imports():
        init_worker = None if request.init_worker is None else loads(request.init_worker)
    with logs.keep_new_handlers():
        if init_worker is not None:
            init_worker(index)
    with quiet_imports(), uncollected_imports():
        factory = loads(request.factory)
    return factory(index, *shared, *request.args)


def _answer(job: Any, data: bytes) -> Any:
    try:
        return messages.RAW + job.answer(data)
    except BaseException as error:
        return _make_failure(error)


def _make_failure(error: BaseException) -> failures.Failure:
    """Makes the reply for an exception, with advice for the user.

    The user sees only the parent.
    """
    add_hint(error)
    return failures.Failure.of(error)


def _reply(channel: Channel, reply: Any) -> None:
    logs.send_rest()  # first: the reply makes the parent read the log
    try:
        if isinstance(reply, bytes):
            channel.send_framed(messages.frame(reply))
        else:
            channel.send(reply)
    except EOFError:
        raise
    except Exception as error:  # the value cannot be pickled: send the reason instead
        channel.send(failures.Failure.of(error))
    try:
        sys.stdout.flush()
    except (AttributeError, ValueError, OSError):
        pass  # stdout is closed, or there is none


NO_TERMINAL = (
    "a worker has no terminal: debug in the main process, with n_processes=0 of a batcher or n_workers=0 of a "
    "SharedVectorEnv"
)


def add_hint(error: BaseException) -> None:
    """Adds advice, if there is any, to an exception of this worker."""
    if isinstance(error, bdb.BdbQuit) and not error.args:  # raised by breakpoint()
        error.args = (NO_TERMINAL,)
    elif isinstance(error, EOFError) and "when reading a line" in str(error):  # raised by input()
        add_note(error, NO_TERMINAL)
    elif isinstance(error, NameError) and (why := explain_left_out(error.name or "")):
        add_note(error, f"{error.name!r} of the script was not sent to this worker: {why}")
