"""`EnvThreads`: one thread for each environment, in which it is stepped, reset and closed."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import os
import queue
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any

import torch

from rlstructs.envs.array_values import copy_value
from rlstructs.envs.stepping import NO_RESULT, read_reset
from rlstructs.errors import EnvTimeout, StateError
from rlstructs.workers.failures import add_note

# Seconds between two looks at whether a wait is to end.
POLL = 0.01
NO_ACTION = object()


@dataclass
class Call:
    """A call of environment k in its thread.

    It is a step, a reset, or a step and the reset that follows it.

    Attributes:
        k: the index of the environment.
        action: of the step; `NO_ACTION` for a reset.
        seed, options: of the reset.
        began: when it was begun, in the seconds of `time.monotonic`.
        result: what the step returned, with copies of observation and reward; `NO_RESULT` before.
        first: observation, a copy, and info of the reset, if there was one.
        error: what was raised.
        in_reset: whether the step has ended, so that the reset has begun.
        is_noted: whether its owner has counted it.
    """

    k: int
    action: Any = NO_ACTION
    seed: int | None = None
    options: Mapping[str, Any] | None = None
    began: float = field(default_factory=monotonic)
    result: Any = NO_RESULT
    first: tuple[Any, Any] | None = None
    error: BaseException | None = None
    in_reset: bool = False
    is_noted: bool = False

    def run(self, env: Any, copy_observation: Callable[[Any], Any]) -> None:
        """Makes the call; keeps what it raises."""
        try:
            if self.action is not NO_ACTION:
                self.result = env.step(copy.deepcopy(self.action))
                observation, reward, terminated, truncated, info = self.result
                self.result = copy_observation(observation), copy_value(reward), terminated, truncated, info
                if not (terminated or truncated):
                    return
            self.in_reset = True
            arguments: dict[str, Any] = {} if self.seed is None else {"seed": self.seed}
            arguments |= {} if self.options is None else {"options": copy.deepcopy(self.options)}
            observation, info = read_reset(env.reset(**arguments), env, self.k)
            self.first = copy_observation(observation), info
        except BaseException as error:  # SystemExit too: it ends the worker, and not the thread alone
            self.error = error


class EnvThreads:
    """The threads of a list of environments.

    A thread that hangs cannot be ended: it is left, and its environment gets another one.

    Args:
        copy_observation: copies an observation, which its environment may change.
        step_timeout: the seconds that a call may take; None for any number.

    Attributes:
        under_way: the calls that have not returned, by environment, the oldest first.
        returned: those that have, and that nobody has taken yet.
    """

    def __init__(self, copy_observation: Callable[[Any], Any], step_timeout: float | None) -> None:
        self._copy, self._step_timeout = copy_observation, step_timeout
        self.under_way: dict[int, Call] = {}
        self.returned: list[Call] = []
        self._answers: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._threads: dict[int, _Thread] = {}
        self._pid = os.getpid()
        self._left = set[int]()  # the environments whose thread hangs and was left

    def __getstate__(self) -> dict[str, Any]:
        self.wait(len(self.under_way))
        return {"copy": self._copy, "step_timeout": self._step_timeout, "returned": self.returned}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["copy"], state["step_timeout"])  # type: ignore[misc]
        self.returned = state["returned"]

    def begin(self, env: Any, call: Call) -> None:
        """Begins a call of an environment, of which no other one is under way."""
        self.under_way[call.k] = call
        self._left.discard(call.k)
        self._thread(call.k).put(partial(self._make, env, call))

    def wait(
        self,
        n: int,
        max_wait: float | None = None,
        until: float | None = None,
        is_over: Callable[[], bool] | None = None,
    ) -> None:
        """Waits until n calls, or all, have returned and not been taken.

        Args:
            n: the number of calls.
            max_wait: the seconds after the first of them in which the others have to return; None for any number.
            until: the time at which to stop waiting; None for no such time.
            is_over: called at times; the wait ends if it returns True.

        Raises:
            StateError: a call was under way when this process was forked.
        """
        self._receive_all()
        if self._pid != os.getpid() and (lost := [k for k in self.under_way if not self._threads[k].is_alive()]):
            raise StateError(f"environments {sorted(lost)} were in a step when this process was forked")
        n, first = min(n, len(self.returned) + len(self.under_way)), monotonic() if self.returned else None
        while len(self.returned) < n:
            now = monotonic()
            if (until is not None and now >= until) or (is_over is not None and is_over()):
                return
            if first is not None and max_wait is not None and now >= first + max_wait:
                return
            ends = [] if until is None else [until]
            ends += [] if is_over is None else [now + POLL]
            ends += [] if self._step_timeout is None else [self._oldest() + self._step_timeout]
            ends += [] if first is None or max_wait is None else [first + max_wait]
            with contextlib.suppress(queue.Empty):
                self._receive(self._answers.get(timeout=max(0.0, min(ends) - now) if ends else None))
            self._receive_all()
            first = monotonic() if first is None and self.returned else first

    def take(self, only: Container[int] | None = None) -> list[Call]:
        """Takes the calls that have returned, by environment.

        Of all environments, or `only` of some.
        """
        calls = sorted(self.returned, key=lambda call: call.k)
        self.returned = [] if only is None else [call for call in calls if call.k not in only]
        return calls if only is None else [call for call in calls if call.k in only]

    def close(self, envs: Sequence[Any], close: Callable[[int, Any], None], seconds: float) -> list[int]:
        """Closes environments in their threads.

        Returns those that do not return from a call in so many seconds.

        Args:
            envs: the environments.
            close: closes one, given its index and it; must not raise.
            seconds: how long to wait for calls that are under way.
        """
        busy, end = set(self.under_way), monotonic() + seconds
        done = {k: threading.Event() for k in range(len(envs)) if k not in self._left}
        for k, event in done.items():
            self._thread(k).put(partial(_close, close, k, envs[k], event))
        for k, event in done.items():
            event.wait(max(0.0, end - monotonic()) if k in busy else None)
        for thread in self._threads.values():
            thread.end()
        self._threads, self.under_way, self.returned = {}, {}, []
        return [*self._left, *(k for k, event in done.items() if not event.is_set())]

    def _oldest(self) -> float:
        return next(iter(self.under_way.values())).began

    def _thread(self, k: int) -> _Thread:
        if k not in self._threads or not self._threads[k].is_alive():  # a fork has only the thread that made it
            self._threads[k] = _Thread(k)
        return self._threads[k]

    def _make(self, env: Any, call: Call) -> None:
        call.run(env, self._copy)
        self._answers.put(call)

    def _receive(self, call: Call) -> None:
        if self.under_way.get(call.k) is call:  # nobody waits any more for a call that came too late
            del self.under_way[call.k]
            self.returned.append(call)

    def _receive_all(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._receive(self._answers.get_nowait())
        while self._step_timeout is not None and self.under_way and self._oldest() + self._step_timeout < monotonic():
            call = self.under_way.pop(next(iter(self.under_way)))
            thread = self._threads.pop(call.k)
            self._left.add(call.k)
            thread.end()
            error = self._explain(call, thread)
            self.returned.append(Call(call.k, call.action, result=call.result, error=error, in_reset=call.in_reset))

    def _explain(self, call: Call, thread: _Thread) -> EnvTimeout:
        doing, limit = "reset" if call.in_reset else "step", f"step_timeout={self._step_timeout:g} seconds"
        error = EnvTimeout(f"environment {call.k} has not returned from {doing} within {limit}")
        frames = thread.show()
        if frames:
            add_note(error, f"its thread is here:\n{frames}")
        return error


class _Thread:
    """A thread that makes the calls it is given.

    It ends when it is told to, or when nobody has this object any more.
    """

    def __init__(self, k: int) -> None:
        inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        # The thread's own context has numpy's error state.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(_serve, inbox), name=f"rlstructs-env-{k}", daemon=True
        )
        self._inbox = inbox
        weakref.finalize(self, inbox.put, None)
        self._thread.start()

    def put(self, call: Callable[[], object]) -> None:
        """Has a call made after all earlier ones."""
        self._inbox.put(call)

    def end(self) -> None:
        """Ends the thread after the calls that it was given."""
        self._inbox.put(None)

    def is_alive(self) -> bool:
        """Whether the thread still runs, in this process."""
        return self._thread.is_alive()

    def show(self) -> str:
        """Where the thread is, as lines of a traceback."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame)[-5:]).rstrip()


def _close(close: Callable[[int, Any], None], k: int, env: Any, is_done: threading.Event) -> None:
    try:
        close(k, env)
    finally:
        is_done.set()


def _serve(inbox: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    with torch.no_grad():  # as in the thread of the rollout; torch keeps it by thread
        while (call := inbox.get()) is not None:
            call()
            del call
