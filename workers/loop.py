"""What a worker does: build the job from its factory, then read, call, reply, until the pipe closes.

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

The worker ends by itself when the pipe closes and, at once, when the main process dies: a thread
watches that. End of file alone would miss a worker in the middle of a long call, and a main process
with a forked child that holds the pipe open.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from typing import Any

from workers import failures, main_module, messages, pickling
from workers.channel import Channel
from workers.descriptors import Descriptor
from workers.error_hints import add_hint
from workers.settings import log_records
from workers.settings.process_settings import SETTINGS, quiet_imports, write_settings
from workers.start_errors import suggest_next_step

# One thread each: W workers with a thread pool per core each would fight over the cores.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
# Seconds. A worker that is asked so soon after its answer looks for the next request so long before it sleeps: to be
# woken takes as long as to step a few environments. One that is asked later, as something is computed between two
# steps, sleeps at once: the computation may want its core.
SOON = 120e-6
# Seconds that a worker that ends waits for its parent to read what it has logged.
LOG_DELAY = 1.0

_parent, _self = 0, os.getpid()


def _note_fork() -> None:
    global _parent, _self
    _parent, _self = _self, os.getpid()


os.register_at_fork(after_in_child=_note_fork)


def run(
    index: int,
    channel: Channel,
    shared: tuple[Any, ...],
    log: Descriptor,
    main_process: Descriptor | None,
    dies_with_parent: bool = False,
) -> None:
    """The body of a worker process."""
    log_records.send_records(log.fileno())
    os.set_inheritable(channel.fileno(), False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    unblock_sigint()
    try:
        try:
            if dies_with_parent:
                die_with_parent()
            if main_process is not None:
                end_with(main_process.fileno())
        except Exception as error:  # no thread, for one: the reply to the first request
            channel.send(failures.Failure.of(_with_step(error)))
            return
        serve(index, channel, shared)
    except EOFError:
        pass  # the parent is gone or has let go: nobody to tell


def _with_step(error: Exception) -> Exception:
    if step := suggest_next_step(error):
        failures.add_note(error, step.lstrip("; "))
    return error


def serve(index: int, channel: Channel, shared: tuple[Any, ...]) -> None:
    """Answers requests until one says to close."""
    job: Any = None
    pid = os.getpid()
    is_asked_soon = False
    while True:
        answered = time.perf_counter()
        try:
            if is_asked_soon:
                channel.linger(SOON)
            request = channel.receive()
        except EOFError:
            raise
        except Exception as error:  # arguments that cannot be unpickled here
            channel.send(failures.Failure.of(error))
            continue
        is_asked_soon = isinstance(request, bytes) and time.perf_counter() - answered < SOON
        if isinstance(request, bytes):
            for data in messages.apart(request):
                answer = _answer(job, data)
                end_copy(pid)
                _reply(channel, answer)
            continue
        reply: Any
        try:
            value = None
            if isinstance(request, messages.Build):
                job = _build(request, index, shared)
            elif isinstance(request, messages.Close):
                close_job(job)
                log_records.send_rest(LOG_DELAY)
            else:
                value = getattr(job, request.method)(*request.args)
            reply = messages.Result(value)
        except BaseException as error:
            reply = _failure(error)
        end_copy(pid)
        _reply(channel, reply)
        if isinstance(request, messages.Close):
            return


def end_copy(pid: int) -> None:
    """Ends a copy that an environment has forked off and that came back from it: there is one worker at this pipe."""
    if os.getpid() != pid:
        os._exit(1)


def close_job(job: Any) -> None:
    """Closes a job that has a `close`."""
    close = getattr(job, "close", None)
    if close is not None:
        close()


def end_with(pidfd: int) -> None:
    """Ends this process as soon as the one behind `pidfd` has died."""

    def watch() -> None:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, name="main-process-watch", daemon=True).start()


def die_with_parent() -> None:
    """Has the kernel kill this process when the thread that started it ends, where it can.

    The watching thread alone would miss a main process that dies while a step of an environment, written
    in C, holds the interpreter.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if _parent not in (0, os.getppid()):  # it ended before: another worker may have been started instead
        os._exit(1)


def unblock_sigint() -> None:
    """Ends the blocking of SIGINT under which a worker is started."""
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
        pass  # no usable stderr
    loads = pickling.loads if request.script is None else main_module.install(request.script).loads
    with quiet_imports():
        setup = loads(request.setup)
    write_settings(SETTINGS, request.settings)
    setup(index)
    with quiet_imports():
        init_worker = None if request.init_worker is None else loads(request.init_worker)
    with log_records.handlers_are_own():
        if init_worker is not None:
            init_worker(index)
    with quiet_imports():
        factory = loads(request.factory)
    return factory(index, *shared, *request.args)


def _answer(job: Any, data: bytes) -> Any:
    try:
        return messages.RAW + job.answer(data)
    except BaseException as error:
        return _failure(error)


def _failure(error: BaseException) -> failures.Failure:
    """What the parent is sent, with what a user does not see from there."""
    add_hint(error)
    return failures.Failure.of(error)


def _reply(channel: Channel, reply: Any) -> None:
    log_records.send_rest()  # before what may have the parent read it
    try:
        if isinstance(reply, bytes):
            channel.send_framed(messages.framed(reply))
        else:
            channel.send(reply)
    except EOFError:
        raise
    except Exception as error:  # the value cannot be pickled: its place is taken by why
        channel.send(failures.Failure.of(error))
    try:
        sys.stdout.flush()
    except (AttributeError, ValueError, OSError):
        pass  # closed, or none at all
