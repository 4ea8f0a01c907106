"""`SharedVectorEnv`: gymnasium environments in worker processes, stepped together from the trainer.

    trainer                                        worker w of W
    -------                                        -------------
    SharedVectorEnv()  ── env_fns, by value ────>  makes its share of the environments
                       <── spaces, metadata ─────  (worker 0)
    sizes one shared arena  ── spaces ──────────>  maps it, and finds its rows
    step_async()   writes the actions  ── a few bytes ──>  steps its environments one after another,
                                                   writes observations, rewards and flags
    step_wait()    <── infos, if there are any ──
    copies observations, rewards and flags

One message each way and worker, however many environments it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from rlstructs.checks import check_count, check_timeout
from rlstructs.envs.shared_vector.arguments import (
    RESET_MASK,
    SAME,
    autoreset_mode_of,
    env_fns_of,
    env_ids_of,
    group_count,
    observation_spaces_of,
    options_of,
    seeds_of,
    start_method_of,
    value_for_each,
    worker_count,
)
from rlstructs.envs.shared_vector.call_order import CallOrder, Pending
from rlstructs.envs.shared_vector.env_group import Description
from rlstructs.envs.shared_vector.hosts import Arguments, Host, LocalHost, Request, shares_of
from rlstructs.envs.shared_vector.step_results import Outcome, infos_of_all, infos_of_some
from rlstructs.envs.shared_vector.worker_host import WorkerHost, WorkerOptions
from rlstructs.errors import SpecError, StateError, WorkerCrashed, WorkerTimeout
from rlstructs.worker_setup.setup import check_init_worker
from rlstructs.worker_setup.streams import WorkerStreams
from workers.interrupts import defer_interrupt

# Names that `call` leaves to methods of the vectorised environment itself.
OWN = ("reset", "step", "close")

Stepped = tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]


class SharedVectorEnv(VectorEnv):  # type: ignore[misc]
    """Takes the place of gymnasium's `AsyncVectorEnv`, with several environments in each process.

    What it returns is what `SyncVectorEnv` returns for the same seeds, in every autoreset mode. It differs in
    what it refuses: a step of an environment that has ended in mode DISABLED, or was never reset; an observation with
    a number that the dtype of its space cannot hold; and in that it leaves the `options` of `reset` as they are, and
    takes observations of any dtype where no number is changed by that of the space. `send` and `recv` step environments
    without waiting for the slowest of them.

    Args:
        env_fns: make the environments, which have equal spaces. May be lambdas. Where one returns an environment that
            another has returned already, a copy of it is used, as in a process of its own.
        n_workers: processes among which they are shared, in order; 0 steps them in this process, one after
            another; None for as many as there are cores, or environments if those are fewer. Those of one worker share
            what modules and classes keep; with as many workers as environments none do, as in gymnasium's.
        autoreset_mode: what becomes of an environment whose episode ends.
        copy: whether observations are copies. Otherwise they are views of what the next step overwrites.
        start_method: "forkserver" (the default on Linux), "spawn" (elsewhere) or "fork".
        timeout: seconds within which workers must answer, None for no limit. A worker that dies or raises is
            noticed at once either way.
        n_groups: how many groups the environments form, one after another and as equal as can be. Every worker has
            some of each, and steps a group that is sent as one: the trainer can compute for one group while the
            workers step another (`GymVectorEnv` does, in a rollout).
        observation_mode: "same" if what they observe has one space; "different" if bounds differ, but not shapes and
            dtypes; or such spaces of one's own, of all environments and of a single one.
        max_concurrency: at most so many workers, of which each steps one environment at a time.
        context: gymnasium's name of `start_method`.
        shared_memory, daemon: gymnasium's, and without effect: arrays are always shared and all else is pickled;
            workers always end with this process, and may start processes of their own.
        seed: what the global random streams of workers (of `random`, numpy and torch) follow from, each worker having
            its own; None for those of this process as they are now, which they leave as they are. Two that are made
            with the same have the same streams. With no workers environments draw from those of this process.
        init_worker: `init_worker(index)` is called in each worker before environments are made, with the index of the
            worker; with no workers once in this process, with 0. May be a lambda.

    Attributes:
        env_fns: those that were given.
        groups: int64, which environments each group has.

    Raises:
        SpecError, TypeError: an argument is not what is needed, or spaces differ (also a RuntimeError then).
        OutOfMemoryError: the observations do not fit into memory.
        WorkerError: a worker did not come up.
        Exception: what an environment raised, with a note that names it, and the worker's traceback as its
            cause. After that, and after a worker died or was late, it can only be closed; what `call`,
            `get_attr`, `set_attr` and `render` raise changes nothing.

    Example:
        >>> import gymnasium
        >>> with SharedVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 4, n_workers=2) as envs:
        ...     observations, infos = envs.reset(seed=42)
        ...     observations, rewards, terminations, truncations, infos = envs.step(np.array([0, 1, 0, 1]))
        >>> observations.shape, rewards
        ((4, 4), array([1., 1., 1., 1.]))
    """

    def __init__(
        self,
        env_fns: Iterable[Callable[[], gymnasium.Env[Any, Any]]],
        n_workers: int | None = None,
        *,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        copy: bool = True,
        start_method: str | None = None,
        timeout: float | None = None,
        n_groups: int = 1,
        observation_mode: str | tuple[gymnasium.Space[Any], gymnasium.Space[Any]] = SAME,
        max_concurrency: int | None = None,
        context: str | None = None,
        shared_memory: bool = True,
        daemon: bool = True,
        seed: int | None = None,
        init_worker: Callable[[int], object] | None = None,
    ) -> None:
        self._order = CallOrder()
        self.closed, self._is_closing = True, False  # until there is something to close
        makers = env_fns_of(env_fns)
        timeout = check_timeout(timeout)
        spaces = observation_spaces_of(observation_mode)
        start_method = start_method_of(start_method, context)
        self.env_fns, self.num_envs, self.copy = makers, len(makers), bool(copy)
        self.autoreset_mode = autoreset_mode_of(autoreset_mode)
        groups = shares_of(range(self.num_envs), group_count(n_groups, self.num_envs))
        self.groups = tuple(np.array(group) for group in groups)
        n_workers = worker_count(n_workers, len(groups[-1]), max_concurrency)
        init_worker = check_init_worker(init_worker)
        streams = WorkerStreams.of_this_process() if seed is None else WorkerStreams.of_seed(check_count("seed", seed))
        self._host: Host
        if n_workers:
            options = WorkerOptions(start_method, timeout, init_worker, streams)
            self._host = WorkerHost(makers, n_workers, groups, options)
        else:
            if init_worker is not None:
                init_worker(0)
            self._host = LocalHost(makers, groups)
        try:
            described = self._host.describe()._replace(bounds_differ=observation_mode != SAME)
            if spaces is not None:
                described = described._replace(observation_space=spaces[1])
            self._columns = self._host.attach(described, self.num_envs, self.autoreset_mode)
            self.observation_space = self._batched(described) if spaces is None else spaces[0]
        except BaseException:
            self._host.kill()
            raise
        self.metadata = {**described.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = described.render_mode
        self.single_observation_space = described.observation_space
        self.single_action_space = described.action_space
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        # Which environments have an observation, will have one when a reset is over, were sent and not received.
        self._was_reset, self._will_be, self._is_out = (np.zeros(self.num_envs, bool) for _ in range(3))
        self._are_all_reset = False
        self._call_errors: list[Exception] = []
        self.closed = False

    def _batched(self, described: Description) -> gymnasium.Space[Any]:
        if not described.bounds_differ:
            return batch_space(described.observation_space, self.num_envs)
        self._host.call("call", lambda rows: ("observation_space", (), {}))()
        return batch_differing_spaces([space for some in self._host.answers(None) for space in some])

    @property
    def np_random(self) -> tuple[np.random.Generator, ...]:
        """The generator of each environment."""
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> tuple[int, ...]:
        """The seed of each environment."""
        return self.get_attr("np_random_seed")

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Starts an episode in every environment, or in those of a mask.

        Waits for what is under way, and drops it: a cell of a notebook that was interrupted can be run again.
        (`reset_async` refuses then, as gymnasium's.)

        Args:
            seed: environment k gets `seed + k`; or a sequence with a seed or None for each.
            options: each environment gets a copy of them. With `reset_mask`, bool (N,), which is not handed on,
                only the environments that it names are reset, the others' observations stay as they are.

        Returns:
            Observations of all environments, (N, ...), and infos.

        Raises:
            SpecError, TypeError: `seed` or `reset_mask` is not what is needed; nothing was reset.
            StateError: the mask leaves out an environment that was never reset.
            Exception: what an environment raised, in a step that was under way, too.
        """
        self._order.check_free("reset", self._order.pending)
        arguments = self._reset_arguments(seed, options)  # before anything is dropped
        self._drop()
        self._reset_async(*arguments)
        return self.reset_wait()

    def reset_async(
        self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """As `reset`, but does not wait; `reset_wait` does."""
        self._order.check_free("reset")
        self._reset_async(*self._reset_arguments(seed, options))

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """What `reset_async` asked for.

        Args:
            timeout: seconds; None for what the constructor was given. After a timeout of this call's own the
                reset is still under way, and can be waited for again.
        """
        outcomes = self._answers(Pending.RESET, timeout)
        self._was_reset = self._will_be
        self._are_all_reset = bool(self._was_reset.all())
        self._columns.keep(outcomes)
        return self._order.over(lambda: (self._columns.batch(self.copy), infos_of_all(self, outcomes)))

    def step(self, actions: Any) -> Stepped:
        """Steps every environment.

        Args:
            actions: a batch of what `action_space` has; row k is for environment k.

        Returns:
            Observations (N, ...), rewards float64 (N,), terminations and truncations bool (N,), and infos, with
            `final_obs` and `final_info` in mode SAME_STEP.

        Raises:
            ResetNeeded: an environment was never reset.
            StateError: in mode DISABLED, one has ended and was not reset; none has been stepped. Or something
                is under way.
            SpecError: there is not an action for each.
            Exception: what an environment raised.
        """
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """As `step`, but does not wait; `step_wait` does."""
        self._order.check_free("step")
        self._check_running("step")
        self._send(Pending.STEP, self._host.step(actions))

    def step_wait(self, timeout: float | None = None) -> Stepped:
        """What `step_async` asked for; `timeout` as in `reset_wait`."""
        outcomes, columns = self._answers(Pending.STEP, timeout), self._columns
        columns.keep(outcomes)
        return self._order.over(
            lambda: (
                columns.batch(self.copy),
                columns.rewards.copy(),
                columns.terminations.copy(),
                columns.truncations.copy(),
                infos_of_all(self, outcomes),
            )
        )

    def send(self, actions: Any, env_ids: Sequence[int] | np.ndarray | None = None) -> None:
        """Steps some environments, without waiting: `recv` gives those that are through first.

        Args:
            actions: n rows of what `action_space` has; row k is for environment `env_ids[k]`.
            env_ids: int (n,), which environments; None for all. Each once, and none that was sent and not received.

        Raises:
            SpecError: ids or actions are not what is needed; none has been stepped.
            ResetNeeded, StateError: as `step`.
        """
        self._order.check_free("send", Pending.SEND)
        envs = env_ids_of("send", env_ids, self.num_envs)
        if self._is_out[envs].any():
            raise StateError(f"send: environments {envs[self._is_out[envs]].tolist()} were sent and not received")
        self._check_running("send", envs)
        group = self._group_of(envs)
        request = self._host.step_some(envs, actions) if group is None else self._host.step_group(group, actions)

        def send() -> None:
            request()
            self._is_out[envs] = True

        self._send(Pending.SEND, send)

    def recv(
        self,
        n: int | None = None,
        timeout: float | None = None,
        *,
        env_ids: Sequence[int] | np.ndarray | None = None,
    ) -> Stepped:
        """The first n environments that are ready, of those that were sent; they can be sent again then.

        A worker steps its environments in the order in which they were sent: a slow one delays those sent to the
        same worker after it, and no others but those of its group, if that was sent whole.

        Args:
            n: how many; None for all that were sent.
            timeout: as in `reset_wait`.
            env_ids: int (n,), which environments, in place of the first that are ready.

        Returns:
            As `step`, with a row for each of the n environments, by ascending index; `infos["env_id"]`, int64
            (n,), says which they are. Copies, whatever `copy` says.

        Raises:
            StateError: nothing was sent, or not these.
            SpecError: fewer than n were sent, or `env_ids` are not what is needed.
            Exception: what an environment raised.
        """
        self._order.check_pending(Pending.SEND)
        n_out = int(self._is_out.sum())
        among = None if env_ids is None else self._sent(n, env_ids)
        n = n_out if n is None else check_count("n", n)
        if n > n_out:
            raise SpecError(f"recv: {n} environments are wanted, {n_out} were sent and not received")
        arrived = self._order.answered(partial(self._host.arrived, n, among), timeout)
        envs = np.array(sorted(arrived), np.int64)
        outcomes = [arrived[env] for env in envs.tolist()]
        columns = self._columns
        columns.keep(outcomes)
        received = (
            columns.batch_of(envs),
            columns.rewards[envs],
            columns.terminations[envs],
            columns.truncations[envs],
            infos_of_some(envs, outcomes),
        )
        with defer_interrupt():  # all of it or nothing: what is out and does not arrive is waited for, for ever
            self._host.forget_arrived(arrived)
            self._is_out[envs] = False
            self._order.pending = Pending.SEND if envs.size < n_out else None
        return received

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """What a method of each environment gives, or the attribute of this name where it is no method.

        Raises:
            Exception: what an environment raised, once all have been called.
        """
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """As `call`, but does not wait; `call_wait` does."""
        if name in OWN:
            raise ValueError(f"call: {name!r} is a method of the vectorised environment itself, call that")
        self._order.check_free("call")
        self._ask("call", Pending.CALL, lambda rows: (name, args, kwargs))

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """What `call_async` asked for; `timeout` as in `reset_wait`."""
        return tuple(value for values in self._values(timeout) for value in values)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """The attribute of this name of each environment, or what it gives where it is a method."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Sets an attribute of each environment.

        Args:
            name: of the attribute.
            values: a list or tuple with one for each; anything else is for all.

        Raises:
            SpecError: not as many values as environments; none was set.
        """
        self._order.check_free("set_attr")
        each = value_for_each(values, self.num_envs)
        self._ask("set_attr", Pending.CALL, lambda rows: (name, each[rows]))
        self._values(None)

    def render(self) -> tuple[Any, ...]:
        """What `render` of each environment gives."""
        self._order.check_free("render")
        self._ask("render", Pending.CALL, lambda rows: ())
        return self.call_wait()

    def close(self, *, timeout: float | None = None, terminate: bool = False) -> None:
        """Closes every environment and ends every worker, within seconds whatever they are doing. Idempotent.

        Args:
            timeout: seconds that workers get; None for 3, or the constructor's if that is less.
            terminate: ends them without waiting.

        Raises:
            Exception: what an environment raised as it was closed; all is gone all the same.
        """
        if self.closed:
            if self._is_closing:
                self._host.kill()  # what an interrupted `close` has left
            return
        self._is_closing = self.closed = self._order.is_closed = True
        failure, self._order.failure = self._order.failure, None  # its traceback holds whatever was in use
        try:
            if terminate:
                self._host.kill()
            else:
                self._host.close(timeout)
        except Exception:
            self._is_closing = False
            if failure is None:  # otherwise that has been reported
                raise
        self._is_closing = False

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """As `close`."""
        self.close(timeout=timeout, terminate=terminate)

    def __enter__(self) -> SharedVectorEnv:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is not None and self._order.failure is None:
            self._order.failure = error  # what is on its way out matters more than what closing raises
        self.close()

    def _reset_arguments(
        self, seed: int | Sequence[int | None] | None, options: dict[str, Any] | None
    ) -> tuple[list[int | None], dict[str, Any] | None, np.ndarray | None]:
        """Seeds, options and mask as environments take them."""
        seeds = seeds_of(seed, self.num_envs)
        handed_on, mask = options_of(options, self.num_envs)
        known = self._will_be if self._order.pending is Pending.RESET else self._was_reset
        if mask is not None and not (mask | known).all():
            never = np.flatnonzero(~(mask | known)).tolist()
            raise StateError(f"reset: environments {never} were never reset, {RESET_MASK} must name them too")
        return seeds, handed_on, mask

    def _reset_async(
        self, seeds: list[int | None], options: dict[str, Any] | None, mask: np.ndarray | None
    ) -> None:
        self._will_be = self._was_reset | (True if mask is None else mask)
        self._ask("reset", Pending.RESET, lambda rows: (seeds[rows], options, None if mask is None else mask[rows]))

    def _drop(self) -> None:
        """Waits for what is under way, and forgets what it gives."""
        pending = self._order.pending
        if pending is None:
            return
        wait = {Pending.RESET: self.reset_wait, Pending.STEP: self.step_wait, Pending.CALL: self.call_wait}
        try:
            wait.get(pending, self.recv)()
        except Exception:
            if self.closed or self._order.failure is not None:
                raise

    def _group_of(self, envs: np.ndarray) -> int | None:
        """Which group these are; None if they are none, or all there are."""
        if len(self.groups) > 1:
            for index, group in enumerate(self.groups):
                if np.array_equal(envs, group):
                    return index
        return None

    def _sent(self, n: int | None, env_ids: Sequence[int] | np.ndarray) -> list[int]:
        """Environments that were sent and can be received."""
        if n is not None:
            raise SpecError(f"recv: either n or env_ids, got n={n} and env_ids")
        envs = env_ids_of("recv", env_ids, self.num_envs)
        if not self._is_out[envs].all():
            raise StateError(f"recv: environments {envs[~self._is_out[envs]].tolist()} were not sent")
        found: list[int] = envs.tolist()
        return found

    def _check_running(self, call: str, envs: Any = slice(None)) -> None:
        """Raises unless these environments can be stepped."""
        if not (self._are_all_reset or self._was_reset[envs].all()):
            raise ResetNeeded(f"{call}: call reset first, an environment was never reset")
        if self.autoreset_mode is AutoresetMode.DISABLED:
            ended = self._columns.terminations | self._columns.truncations
            if ended[envs].any():
                which = np.arange(self.num_envs)[envs][ended[envs]].tolist()
                raise StateError(f"{call}: environments {which} have ended, reset them by {RESET_MASK} first")

    def _ask(self, method: str, pending: Pending, arguments: Arguments) -> None:
        self._send(pending, self._host.call(method, arguments))

    def _send(self, pending: Pending, request: Request) -> None:
        try:
            self._order.ask(pending, request)
        except BaseException as error:
            if self._order.failure is error and isinstance(self._host, LocalHost) and not isinstance(error, Exception):
                # Interrupted halfway, in this process: a reset of all of them is all that is needed.
                self._order.failure = self._order.pending = None
                self._was_reset, self._are_all_reset = np.zeros(self.num_envs, bool), False
                self._is_out[:] = False
            raise

    def _answers(self, pending: Pending, timeout: float | None) -> list[Outcome]:
        self._order.check_pending(pending)
        return self._order.answered(self._host.answers, timeout)

    def _values(self, timeout: float | None) -> list[Any]:
        """What a call gave; what one of them raised, once all are through."""
        self._order.check_pending(Pending.CALL)
        values = self._order.answered(self._all_values, timeout)
        errors, self._call_errors, self._order.pending = self._call_errors, [], None
        if errors:  # of the first environments, not of the quickest worker
            raise min(errors, key=lambda error: getattr(error.__cause__, "worker_index", 0))
        return values

    def _all_values(self, timeout: float | None) -> list[Any]:
        while True:
            try:
                return self._host.answers(timeout)
            except (WorkerCrashed, WorkerTimeout):
                raise
            except Exception as error:
                if self.closed:
                    raise
                self._call_errors.append(error)
