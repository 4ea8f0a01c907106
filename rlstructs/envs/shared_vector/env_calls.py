"""Sends requests to the environments of a `SharedVectorEnv`, and waits for results.

It checks the order of the calls.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode

from rlstructs.checks import check_count
from rlstructs.envs.shared_vector.arguments import RESET_MASK, check_env_ids, expand_seeds, split_options
from rlstructs.envs.shared_vector.columns import Columns, Outcome
from rlstructs.envs.shared_vector.local_host import Arguments, Host, LocalHost, Request
from rlstructs.errors import ClosedError, SpecError, StateError, WorkerTimeout
from rlstructs.workers.interrupts import defer_first_interrupt, defer_interrupt

# Seeds, options and mask of a reset.
ResetArguments = tuple[list[int | None], dict[str, Any] | None, np.ndarray | None]
Infos = TypeVar("Infos")
Step = tuple[Any, np.ndarray, np.ndarray, np.ndarray, Infos]


class EnvCalls:
    """The requests to the environments, and which environments were reset or sent.

    Args:
        order: says which call may come next.
        host: where the environments are.
        columns: their observations, rewards and flags.
        groups: int64, the environments of each group.
        mode: what happens to an environment whose episode ends.
    """

    def __init__(
        self, order: CallOrder, host: Host, columns: Columns, groups: Sequence[np.ndarray], mode: AutoresetMode
    ) -> None:
        self._order, self._host, self._columns, self._groups, self._mode = order, host, columns, groups, mode
        self._n_envs = n_envs = len(columns.rewards)
        # Environments that have an observation; that will have one after the reset under way; that were sent and not
        # received.
        self._was_reset, self._will_be_reset, self._is_sent = (np.zeros(n_envs, bool) for _ in range(3))
        self._are_all_reset = False

    def check_reset(self, seed: int | Sequence[int | None] | None, options: dict[str, Any] | None) -> ResetArguments:
        """Checks the arguments of a reset, and splits them into seeds, options and mask."""
        seeds = expand_seeds(seed, self._n_envs)
        env_options, mask = split_options(options, self._n_envs)
        known = self._will_be_reset if self._order.pending is Pending.RESET else self._was_reset
        if mask is not None and not (mask | known).all():
            never = np.flatnonzero(~(mask | known)).tolist()
            raise StateError(f"reset: environments {never} were never reset, {RESET_MASK} must name them too")
        return seeds, env_options, mask

    def reset(
        self,
        seeds: Sequence[int | None],
        options: dict[str, Any] | Sequence[dict[str, Any] | None] | None,
        mask: np.ndarray | None,
    ) -> None:
        """Starts a reset of all environments, or only of those in the mask.

        `options` are for all, or a list with an entry for each.
        """
        self._will_be_reset = self._was_reset | (True if mask is None else mask)
        each = [options] * self._n_envs if options is None or isinstance(options, dict) else options
        self.call("reset", Pending.RESET, lambda rows: (seeds[rows], each[rows], None if mask is None else mask[rows]))

    def finish_reset(
        self, timeout: float | None, copy: bool, merge: Callable[[list[Outcome]], Infos]
    ) -> tuple[Any, Infos]:
        """Waits for a reset; returns observations and infos. Its arguments are those of `finish_step`."""
        outcomes = self._wait(Pending.RESET, timeout)
        self._was_reset = self._will_be_reset
        self._are_all_reset = bool(self._was_reset.all())
        self._columns.keep_objects(outcomes)
        return self._order.finish(lambda: (self._columns.batch(copy), merge(outcomes)))

    def step(self, actions: Any) -> None:
        """Starts a step of all environments."""
        self._order.check_free("step")
        self._check_running("step")
        self._send(Pending.STEP, self._host.step(actions))

    def finish_step(self, timeout: float | None, copy: bool, merge: Callable[[list[Outcome]], Infos]) -> Step[Infos]:
        """Waits for a step of all environments.

        Args:
            timeout: see `SharedVectorEnv.step_wait`.
            copy: whether observations are copies; otherwise they are views.
            merge: makes the infos from the outcomes.

        Returns:
            Observations, rewards, terminations, truncations and infos.
        """
        outcomes, columns = self._wait(Pending.STEP, timeout), self._columns
        columns.keep_objects(outcomes)
        return self._order.finish(
            lambda: (
                columns.batch(copy),
                columns.rewards.copy(),
                columns.terminations.copy(),
                columns.truncations.copy(),
                merge(outcomes),
            )
        )

    def step_some(self, actions: Any, env_ids: Sequence[int] | np.ndarray | None) -> None:
        """Starts steps of some environments, beside those that are under way."""
        self._order.check_free("send", Pending.SEND)
        envs = check_env_ids("send", env_ids, self._n_envs)
        if self._is_sent[envs].any():
            raise StateError(f"send: environments {envs[self._is_sent[envs]].tolist()} were sent and not received")
        self._check_running("send", envs)
        group = self._find_group(envs)
        request = self._host.step_some(envs, actions) if group is None else self._host.step_group(group, actions)
        self._send_some(envs, request)

    def reset_some(
        self, envs: np.ndarray, seeds: Sequence[int | None], options: dict[str, Any] | None
    ) -> dict[int, Outcome]:
        """Resets some environments, beside steps of others that are under way.

        Returns outcomes by environment.

        Waits for steps of these environments, and drops their results.

        Args:
            envs: int64, indexes of the environments.
            seeds: one for each environment of all.
            options: each environment gets a copy of them.
        """
        self._order.check_free("reset", Pending.SEND)
        if (busy := envs[self._is_sent[envs]]).size:
            self.wait_for_some(None, busy, None)
            self.mark_received(busy)
        mask, each, ids = np.zeros(self._n_envs, bool), [options] * self._n_envs, envs.tolist()
        mask[envs] = True
        self._send_some(envs, self._host.reset_some(mask, lambda rows: (seeds[rows], each[rows], mask[rows])))
        outcomes = self._order.wait(partial(self._host.wait_for_some, len(ids), ids), None)
        self._columns.keep_objects(outcomes.values())
        self.mark_received(envs)
        if not self._are_all_reset:
            self._was_reset |= mask
            self._are_all_reset = bool(self._was_reset.all())
        return outcomes

    def wait_for_some(
        self, n: int | None, env_ids: Sequence[int] | np.ndarray | None, timeout: float | None
    ) -> dict[int, Outcome]:
        """Waits for steps of n environments, or of `env_ids`; returns outcomes by environment."""
        self._order.check_pending(Pending.SEND)
        n_sent = int(self._is_sent.sum())
        among = None if env_ids is None else self._check_sent(n, env_ids)
        n = n_sent if n is None else check_count("n", n)
        if n > n_sent:
            raise SpecError(f"recv: {n} environments are wanted, {n_sent} were sent and not received")
        outcomes = self._order.wait(partial(self._host.wait_for_some, n, among), timeout)
        self._columns.keep_objects(outcomes.values())
        return outcomes

    def wait_for_ready(self, n: int, timeout: float | None) -> dict[int, Outcome]:
        """Waits for steps of n environments.

        Returns outcomes of all that are ready, by environment.

        Args:
            n: the number; of all that were sent, if those are fewer.
            timeout: the seconds after which it returns those that are ready, if any is; None for the host's.
        """
        self._order.check_pending(Pending.SEND)
        n = min(check_count("min_envs", n), int(self._is_sent.sum()))
        outcomes = self._order.wait(partial(self._host.wait_for_ready, n), timeout)
        self._columns.keep_objects(outcomes.values())
        return outcomes

    @property
    def sent(self) -> np.ndarray:
        """The environments that were sent and not received, int64, ascending."""
        return np.flatnonzero(self._is_sent)

    def mark_received(self, envs: np.ndarray) -> None:
        """Notes that the results of these environments were returned to the caller."""
        with defer_interrupt():  # all or nothing: an environment that is sent and has no outcome is waited for forever
            self._host.forget_some(envs.tolist())
            self._is_sent[envs] = False
            self._order.pending = Pending.SEND if self._is_sent.any() else None

    def call(self, method: str, pending: Pending, arguments: Arguments) -> None:
        """Starts a call of a method of every group.

        `arguments` returns the arguments for a slice of environments.
        """
        self._send(pending, self._host.call(method, arguments))

    def wait_for_values(self, timeout: float | None) -> list[Any]:
        """Waits for a call, and returns its values.

        Raises an environment's error once all have finished.
        """
        self._order.check_pending(Pending.CALL)
        values = self._order.wait(self._host.wait_for_values, timeout)
        self._order.pending = None
        if isinstance(values, Exception):
            raise values
        return values

    def apply(self, function: Callable[[Any], Any], env_ids: Sequence[int] | np.ndarray | None = None) -> list[Any]:
        """Calls a function with each of these environments, in its process.

        Returns the values by ascending index.

        Raises:
            SpecError: `env_ids` are not indexes of environments, each once.
            Exception: what the function raised, after all have been called.
        """
        self._order.check_free("call")
        envs = check_env_ids("call", env_ids, self._n_envs)
        only = None if envs.size == self._n_envs else envs.tolist()
        self.call("apply", Pending.CALL, lambda rows: (function, only))
        return [value for values in self.wait_for_values(None) for value in values]

    def _find_group(self, envs: np.ndarray) -> int | None:
        """Returns the index of the group that consists of these environments.

        None if there is none, or only one group.
        """
        if len(self._groups) > 1:
            for index, group in enumerate(self._groups):
                if np.array_equal(envs, group):
                    return index
        return None

    def _check_sent(self, n: int | None, env_ids: Sequence[int] | np.ndarray) -> list[int]:
        """Returns `env_ids` as a list; raises unless all of them were sent."""
        if n is not None:
            raise SpecError(f"recv: either n or env_ids, got n={n} and env_ids")
        envs = check_env_ids("recv", env_ids, self._n_envs)
        if not self._is_sent[envs].all():
            raise StateError(f"recv: environments {envs[~self._is_sent[envs]].tolist()} were not sent")
        found: list[int] = envs.tolist()
        return found

    def _check_running(self, call: str, envs: Any = slice(None)) -> None:
        """Raises unless these environments can be stepped."""
        if not (self._are_all_reset or self._was_reset[envs].all()):
            raise ResetNeeded(f"{call}: call reset first, an environment was never reset")
        if self._mode is AutoresetMode.DISABLED:
            ended = self._columns.terminations | self._columns.truncations
            if ended[envs].any():
                which = np.arange(self._n_envs)[envs][ended[envs]].tolist()
                raise StateError(f"{call}: environments {which} have ended, reset them by {RESET_MASK} first")

    def _send_some(self, envs: np.ndarray, request: Request) -> None:
        """Sends a request to some environments, whose results `wait_for_some` returns."""

        def send() -> None:
            request()
            self._is_sent[envs] = True

        self._send(Pending.SEND, send)

    def _send(self, pending: Pending, request: Request) -> None:
        try:
            self._order.send(pending, request)
        except BaseException as error:
            if self._order.failure is error and isinstance(self._host, LocalHost) and not isinstance(error, Exception):
                # It was interrupted halfway, in this process: after a reset of all environments, work can go on.
                self._order.failure = self._order.pending = None
                self._was_reset, self._are_all_reset = np.zeros(self._n_envs, bool), False
                self._is_sent[:] = False
            raise

    def _wait(self, pending: Pending, timeout: float | None) -> list[Outcome]:
        self._order.check_pending(pending)
        return self._order.wait(self._host.wait_for_all, timeout)


T = TypeVar("T")


class EnvClosedError(ClosedEnvironmentError, ClosedError):  # type: ignore[misc]
    """A call after `close`."""


class PendingCallError(AlreadyPendingCallError, StateError):  # type: ignore[misc]
    """A call while another one is under way."""


class NoCallError(NoAsyncCallError, StateError):  # type: ignore[misc]
    """A wait without a call."""


class Pending(enum.Enum):
    """The call that is under way."""

    RESET = "reset"
    STEP = "step"
    CALL = "call"
    SEND = "send"

    @property
    def wait(self) -> str:
        """Name of the method that waits for it."""
        return "recv" if self is Pending.SEND else f"{self.value}_wait"


class CallOrder:
    """Tracks the call that is under way, and whether anything has failed.

    Attributes:
        pending: the call under way, None for none.
        is_closed: whether the environment was closed.
        failure: the error of a worker or an environment, after which only `close` is allowed; None for none.
    """

    def __init__(self) -> None:
        self.pending: Pending | None = None
        self.is_closed = False
        self.failure: BaseException | None = None

    def check_free(self, call: str, allowed: Pending | None = None) -> None:
        """Raises if another call than `allowed` is under way.

        Also if no call is possible any more.
        """
        self._check_alive(call)
        if self.pending not in (None, allowed):
            pending = self.pending
            assert pending is not None
            raise PendingCallError(f"{call}: {pending.value} is under way, call {pending.wait} first", pending.value)

    def check_pending(self, wanted: Pending) -> None:
        """Raises unless this call is under way."""
        if self.is_closed or self.failure is not None:
            self._check_alive(wanted.wait)
        if self.pending is not wanted:
            raise NoCallError(f"{wanted.wait}: nothing was asked for", wanted.value)

    def send(self, pending: Pending, request: Callable[[], None]) -> None:
        """Sends a request.

        If that fails halfway, only some environments have the request: nothing but `close` is possible then.
        """
        with defer_first_interrupt():  # an interrupt waits until all environments have the request
            try:
                request()
                self.pending = pending
            except BaseException as error:
                self.failure = error
                raise

    def wait(self, receive: Callable[[float | None], T], timeout: float | None) -> T:
        """Waits for results.

        After an interrupt, or a timeout of the caller's own, it can be called again.
        """
        try:
            return receive(timeout)
        except Exception as error:
            if self.is_closed:  # by another thread
                raise EnvClosedError("the environment was closed meanwhile") from error
            if timeout is None or not isinstance(error, WorkerTimeout):
                self.failure = error
            raise

    def finish(self, collect: Callable[[], T]) -> T:
        """Collects the results and ends the call.

        After an interrupt, one can wait for it again.
        """
        try:
            results = collect()
        except Exception:  # infos that cannot be merged, now or later
            self.pending = None
            raise
        self.pending = None
        return results

    def _check_alive(self, call: str) -> None:
        if self.is_closed:
            raise EnvClosedError(f"{call}: the environment is closed")
        if self.failure is not None:
            raise StateError(f"{call}: an environment failed before, close this one") from self.failure
