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

A step takes one message to each worker and one back, however many environments it has.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rlstructs.checks import check_count, check_timeout, other_words
from rlstructs.envs.env_list import RAISE, RESTART, RestartPolicy, check_policy
from rlstructs.envs.gym_envs import env_factory, find_env
from rlstructs.envs.shared_vector.arguments import (
    SAME,
    Spaces,
    check_autoreset_mode,
    check_env_fns,
    check_group_count,
    check_observation_mode,
    choose_start_method,
    choose_worker_count,
    expand_values,
)
from rlstructs.envs.shared_vector.columns import merge_infos, merge_some_infos
from rlstructs.envs.shared_vector.env_calls import CallOrder, EnvCalls, Pending
from rlstructs.envs.shared_vector.hosts import WorkerOptions, batch_spaces, split_evenly, start_host
from rlstructs.errors import SpecError
from rlstructs.seeding import WorkerStreams
from rlstructs.worker_setup import check_init_worker
from rlstructs.workers.public_names import set_module

# Methods of the vectorised environment itself, which `call` refuses.
OWN = ("reset", "step", "close")

StepResult = tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]


@set_module("rlstructs")
class SharedVectorEnv(VectorEnv):  # type: ignore[misc]
    """Replaces gymnasium's `AsyncVectorEnv`, with several environments in each process.

    It returns what `SyncVectorEnv` returns for the same seeds, in every autoreset mode. Unlike that it refuses to step
    an environment that has ended in mode DISABLED, or was never reset, and it refuses an observation with a number that
    the dtype of its space cannot hold. It does not change the `options` of `reset`, and takes observations of any dtype
    whose numbers the dtype of the space holds unchanged. `send` and `recv` step environments without waiting for the
    slowest of them.

    Args:
        env_fns: make the environments, which have equal spaces. May be lambdas. Where one returns an environment that
            another has returned already, a copy is used, as in a process of its own.
        n_workers: number of processes that share the environments, in order; 0 steps them in this process, one after
            another; None for one per core. There are at most as many as environments of a group. Environments of one
            worker share the state of modules and classes; with as many workers as environments none do, as in
            `AsyncVectorEnv`.
        autoreset_mode: what happens to an environment whose episode ends.
        copy: whether observations are copies. Otherwise they are views that the next step overwrites.
        start_method: "forkserver" (the default on Linux), "spawn" (elsewhere) or "fork".
        timeout: seconds within which workers must answer, None for no limit. A worker that dies or raises is
            noticed at once either way.
        n_groups: number of groups that the environments form, in order and as equal as possible. Every worker has
            some environments of each group, and steps a group that is sent whole at once: the trainer can compute for
            one group while the workers step another (`GymVectorEnv` does, in a rollout).
        observation_mode: "same" if observation spaces are equal; "different" if bounds differ, but not shapes and
            dtypes; or a tuple of two such spaces, of all environments and of a single one.
        max_concurrency: the most workers, each of which steps one environment at a time.
        context: gymnasium's name of `start_method`.
        shared_memory, daemon: gymnasium's; they have no effect. Arrays are always shared and all else is pickled;
            workers always end with this process, and may start processes of their own.
        seed: seeds the global random streams of workers (of `random`, numpy and torch), which differ from worker to
            worker; equal seeds give equal streams. None to derive them from the present state of this process's
            streams, without changing that. With no workers, environments draw from this process's streams.
        init_worker: `init_worker(index)` is called in each worker before environments are made, with the index of the
            worker; with no workers once in this process, with 0. May be a lambda.
        on_env_failure: "raise" raises what an environment raises in `step` or `reset`; "restart" closes it and makes it
            anew by its function, and all others go on. Its episode is truncated: the step shows the last observation
            once more, with reward 0, and `infos["env_failure"]` says what was raised (in mode SAME_STEP,
            `infos["final_info"]` too). The new environment begins an episode as after any other end; its seed follows
            from the last one that `reset` was given. The log has the traceback, as a warning.
        max_env_restarts: how often each environment may be made anew in all; None for any number. Then, or if it fails
            more than three times in a row without a step in between, the error is raised.

    Attributes:
        env_fns: the functions that were given.
        groups: int64, the environments of each group.

    Raises:
        SpecError, TypeError: an argument is wrong, or spaces differ (also a RuntimeError then).
        OutOfMemoryError: the observations do not fit into memory.
        WorkerError: a worker did not start.
        Exception: what an environment raised, with a note that names it, and the worker's traceback as its
            cause. After that, and after a worker died or was late, only `close` is possible; errors of `call`,
            `get_attr`, `set_attr` and `render` change nothing.

    Example:
        >>> import gymnasium
        >>> with SharedVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 4, n_workers=2) as envs:
        ...     observations, infos = envs.reset(seed=42)
        ...     observations, rewards, terminations, truncations, infos = envs.step(np.array([0, 1, 0, 1]))
        >>> observations.shape, rewards
        ((4, 4), array([1., 1., 1., 1.]))
    """

    @other_words(n_processes="n_workers", seeds="seed", n_envs="env_fns", num_envs="env_fns")
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
        on_env_failure: str = RAISE,
        max_env_restarts: int | None = None,
    ) -> None:
        self._order = CallOrder()
        self.closed, self._is_closing = True, False  # until there is something to close
        makers = check_env_fns(env_fns)
        timeout = check_timeout(timeout)
        check_policy(on_env_failure, max_env_restarts)
        spaces = check_observation_mode(observation_mode)
        start_method = choose_start_method(start_method, context)
        self.env_fns, self.num_envs, self.copy = makers, len(makers), bool(copy)
        self.autoreset_mode = check_autoreset_mode(autoreset_mode)
        groups = split_evenly(range(self.num_envs), check_group_count(n_groups, self.num_envs))
        self.groups = tuple(np.array(group) for group in groups)
        n_workers = choose_worker_count(n_workers, len(groups[-1]), max_concurrency)
        streams = WorkerStreams.of_this_process() if seed is None else WorkerStreams.of_seed(check_count("seed", seed))
        options = WorkerOptions(start_method, timeout, check_init_worker(init_worker), streams)
        self._host = start_host(makers, n_workers, groups, options)
        self._attach(spaces, bounds_differ=observation_mode != SAME)
        self._policy = RestartPolicy(on_env_failure == RESTART, max_env_restarts)
        if self._policy.is_on:
            self._set_policy(self._policy)
        self.closed = False

    @property
    def env_restarts(self) -> np.ndarray:
        """The number of restarts of each environment, int64 (N,)."""
        return self._columns.restarts.copy()

    def hold_failed(self, policy: RestartPolicy | None) -> bool:
        """Makes failed environments wait for a reset by a mask.

        It is for rollouts, which leave them out until then.

        Args:
            policy: their policy otherwise; None for the constructor's.

        Returns:
            Whether failed environments are replaced at all.
        """
        policy = (policy or self._policy)._replace(holds=True)
        if policy.is_on:
            self._set_policy(policy)
        return policy.is_on

    def _set_policy(self, policy: RestartPolicy) -> None:
        self._calls.call("set_policy", Pending.CALL, lambda rows: (policy,))
        self._calls.wait_for_values(None)

    @property
    def np_random(self) -> tuple[np.random.Generator, ...]:
        """The generator of each environment."""
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> tuple[int, ...]:
        """The seed of each environment."""
        return self.get_attr("np_random_seed")

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Starts an episode in every environment, or in those of a mask.

        Waits for a call that is under way, and drops its results: an interrupted cell of a notebook can be run again.
        (`reset_async` refuses, like gymnasium's.)

        Args:
            seed: environment k gets `seed + k`; or a sequence with a seed or None for each.
            options: each environment gets a copy of them, without `reset_mask`, bool (N,). If there is a mask, only
                the environments that it names are reset, and the others' observations stay as they are.

        Returns:
            Observations of all environments, (N, ...), and infos.

        Raises:
            SpecError, TypeError: `seed` or `reset_mask` is wrong; nothing was reset.
            StateError: the mask leaves out an environment that was never reset.
            Exception: what an environment raised, also in a step that was under way.
        """
        self._order.check_free("reset", self._order.pending)
        arguments = self._calls.check_reset(seed, options)  # before anything is dropped
        self._drop_pending()
        self._calls.reset(*arguments)
        return self.reset_wait()

    def reset_async(
        self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """Starts what `reset` does; `reset_wait` waits for it."""
        self._order.check_free("reset")
        self._calls.reset(*self._calls.check_reset(seed, options))

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Waits for the reset that `reset_async` started; returns what `reset` returns.

        Args:
            timeout: seconds; None for the constructor's timeout. After a timeout given here the reset is still under
                way, and one can wait for it again.
        """
        return self._calls.finish_reset(timeout, self.copy, partial(merge_infos, self))

    def step(self, actions: Any) -> StepResult:
        """Steps every environment.

        Args:
            actions: a batch of `action_space`; row k is for environment k.

        Returns:
            Observations (N, ...), rewards float64 (N,), terminations and truncations bool (N,), and infos, with
            `final_obs` and `final_info` in mode SAME_STEP.

        Raises:
            ResetNeeded: an environment was never reset.
            StateError: in mode DISABLED, one has ended and was not reset; none has been stepped. Or another call
                is under way.
            SpecError: the number of actions is not the number of environments.
            Exception: what an environment raised.
        """
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Starts what `step` does; `step_wait` waits for it."""
        self._calls.step(actions)

    def step_wait(self, timeout: float | None = None) -> StepResult:
        """Waits for the step that `step_async` started; `timeout` as in `reset_wait`."""
        return self._calls.finish_step(timeout, self.copy, partial(merge_infos, self))

    def send(self, actions: Any, env_ids: Sequence[int] | np.ndarray | None = None) -> None:
        """Starts a step of some environments; `recv` returns results as they come.

        Args:
            actions: n rows of `action_space`; row k is for environment `env_ids[k]`.
            env_ids: int (n,), indexes of environments; None for all. No duplicates, and none that was sent and not
                received.

        Raises:
            SpecError: `env_ids` or actions are wrong; none has been stepped.
            ResetNeeded, StateError: as in `step`.
        """
        self._calls.step_some(actions, env_ids)

    def recv(
        self,
        n: int | None = None,
        timeout: float | None = None,
        *,
        env_ids: Sequence[int] | np.ndarray | None = None,
        min_envs: int | None = None,
    ) -> StepResult:
        """Waits for environments that were sent.

        Returns the first n that are ready; with `min_envs`, waits for so many and returns all that are.

        They can be sent again then. A worker steps its environments in the order in which they were sent: a slow one
        delays those sent later to the same worker, and otherwise only its group, if that was sent whole.

        Args:
            n: number of environments; None for all that were sent.
            timeout: as in `reset_wait`. With `min_envs`, the environments that are ready by then are returned, and only
                if there are none it is a `WorkerTimeout`.
            env_ids: int (n,), indexes of environments to wait for, rather than the first that are ready.
            min_envs: the number of environments to wait for, in place of `n`; then all that are ready are returned.
                If fewer were sent, all of them are waited for.

        Returns:
            What `step` returns, with a row for each of the n environments, by ascending index; `infos["env_id"]`,
            int64 (n,), holds the indexes. Always copies, whatever `copy` is.

        Raises:
            StateError: no environment was sent, or not these.
            SpecError: fewer than n were sent, `env_ids` are wrong, or `min_envs` is given beside `n` or `env_ids`.
            Exception: what an environment raised.
        """
        calls, columns = self._calls, self._columns
        if min_envs is None:
            arrived = calls.wait_for_some(n, env_ids, timeout)
        elif n is None and env_ids is None:
            arrived = calls.wait_for_ready(min_envs, timeout)
        else:
            raise SpecError(f"recv: min_envs is given, and n={n} or env_ids={env_ids} too: give one of them")
        envs = np.array(sorted(arrived), np.int64)
        received = (
            columns.batch_some(envs),
            columns.rewards[envs],
            columns.terminations[envs],
            columns.truncations[envs],
            merge_some_infos(envs, [arrived[env] for env in envs.tolist()]),
        )
        calls.mark_received(envs)
        return received

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls a method of each environment, or reads an attribute, and returns the values.

        Raises:
            Exception: what an environment raised, after all have been called.
        """
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Starts what `call` does; `call_wait` waits for it."""
        if name in OWN:
            raise ValueError(f"call: {name!r} is a method of the vectorised environment itself, call that")
        self._order.check_free("call")
        self._calls.call("call", Pending.CALL, lambda rows: (name, args, kwargs))

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Waits for the call that `call_async` started; `timeout` as in `reset_wait`."""
        return tuple(value for values in self._calls.wait_for_values(timeout) for value in values)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Reads an attribute of each environment; calls it if it is a method."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Sets an attribute of each environment.

        Args:
            name: of the attribute.
            values: a list or tuple with one value for each; anything else is one value for all.

        Raises:
            SpecError: the number of values is not the number of environments; no attribute was set.
        """
        self._order.check_free("set_attr")
        each = expand_values(values, self.num_envs)
        self._calls.call("set_attr", Pending.CALL, lambda rows: (name, each[rows]))
        self._calls.wait_for_values(None)

    def render(self) -> tuple[Any, ...]:
        """Calls `render` of each environment, and returns the values."""
        self._order.check_free("render")
        self._calls.call("render", Pending.CALL, lambda rows: ())
        return self.call_wait()

    def close(self, *, timeout: float | None = None, terminate: bool = False) -> None:
        """Closes every environment and ends every worker, within seconds whatever they are doing. Idempotent.

        Args:
            timeout: seconds that workers get; None for 3, or the constructor's timeout if that is less.
            terminate: whether to end workers without waiting.

        Raises:
            Exception: what an environment raised when it was closed; everything is closed nevertheless.
        """
        if self.closed:
            if self._is_closing:
                self._host.kill()  # an interrupted `close` has left workers
            return
        self._is_closing = self.closed = self._order.is_closed = True
        failure, self._order.failure = self._order.failure, None  # its traceback keeps objects alive
        try:
            if terminate:
                self._host.kill()
            else:
                self._host.close(timeout)
        except Exception:
            self._is_closing = False
            if failure is None:  # otherwise the user has seen an error
                raise
        self._is_closing = False

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Closes everything."""
        self.close(timeout=timeout, terminate=terminate)

    def __enter__(self) -> SharedVectorEnv:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is not None and self._order.failure is None:
            self._order.failure = error  # matters more than an error of closing
        self.close()

    def _attach(self, spaces: Spaces | None, bounds_differ: bool) -> None:
        """Makes the columns, and takes metadata and spaces from environment 0.

        `spaces` replace its observation space, if they are given.
        """
        try:
            described = self._host.describe()._replace(bounds_differ=bounds_differ)
            if spaces is not None:
                described = described._replace(observation_space=spaces[1])
            self._columns = self._host.attach(described, self.num_envs, self.autoreset_mode)
            self.observation_space = batch_spaces(self._host, described, self.num_envs) if spaces is None else spaces[0]
        except BaseException:
            self._host.kill()
            raise
        self.metadata = {**described.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = described.render_mode
        self.single_observation_space = described.observation_space
        self.single_action_space = described.action_space
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._calls = EnvCalls(self._order, self._host, self._columns, self.groups, self.autoreset_mode)

    def _drop_pending(self) -> None:
        """Waits for the call that is under way, and drops its results."""
        pending = self._order.pending
        if pending is None:
            return
        wait = {Pending.RESET: self.reset_wait, Pending.STEP: self.step_wait, Pending.CALL: self.call_wait}
        try:
            wait.get(pending, self.recv)()
        except Exception:
            if self.closed or self._order.failure is not None:
                raise


# gymnasium's names for stepping environments in this process and in others.
SYNC, ASYNC = "sync", "async"


@other_words(n_processes="n_workers", n_envs="num_envs")
def make_vec(
    env: str | EnvSpec | Callable[..., gymnasium.Env[Any, Any]],
    num_envs: int = 1,
    n_workers: int | None = None,
    *,
    vectorization_mode: str | None = None,
    vector_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Callable[[gymnasium.Env[Any, Any]], gymnasium.Env[Any, Any]]] | None = None,
    **kwargs: Any,
) -> SharedVectorEnv:
    """Makes equal environments, which worker processes step: `gymnasium.make_vec` for `SharedVectorEnv`.

    Args:
        env: an id or spec of gymnasium's registry, or a function that makes one environment. May be a lambda.
        num_envs: number of environments.
        n_workers: number of processes that share the environments; 0 steps them in this process, None for one per
            core; there are at most as many as environments.
        vectorization_mode: gymnasium's: "sync" is `n_workers=0`; "async" and None change nothing.
        vector_kwargs: further arguments of `SharedVectorEnv`.
        wrappers: are applied to each environment, in this order.
        kwargs: further arguments of `gymnasium.make`, or of the function.

    Raises:
        SpecError, TypeError: an argument is wrong, or the id is not in the registry.
        Exception: what the constructor of `SharedVectorEnv` raises.

    Example:
        >>> with make_vec("CartPole-v1", num_envs=4, n_workers=2) as envs:
        ...     observations, infos = envs.reset(seed=42)
        >>> observations.shape
        (4, 4)
    """
    check_count("num_envs", num_envs)
    mode = getattr(vectorization_mode, "value", vectorization_mode)  # a member of gymnasium's enumeration
    if mode not in (None, SYNC, ASYNC):
        raise SpecError(f"vectorization_mode must be {SYNC!r}, {ASYNC!r} or None, got {vectorization_mode!r}")
    if mode == SYNC:
        if n_workers:
            raise SpecError(f"vectorization_mode {SYNC!r} steps in this process, n_workers is {n_workers}: give one")
        n_workers = 0
    make = partial(_make_one, env_factory(env, kwargs), tuple(wrappers or ()))
    envs = SharedVectorEnv([make] * num_envs, n_workers, **(vector_kwargs or {}))
    if isinstance(env, (str, EnvSpec)):
        envs.spec = copy.deepcopy(gymnasium.spec(find_env(env)) if isinstance(env, str) else env)
        envs.spec.kwargs.update(kwargs)
    return envs


def _make_one(make: Callable[..., Any], wrappers: Sequence[Callable[..., Any]]) -> Any:
    env = make()
    for wrap in wrappers:
        env = wrap(env)
    return env
