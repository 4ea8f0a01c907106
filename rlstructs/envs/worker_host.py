"""The environments of a `SharedVectorEnv` in worker processes."""

from __future__ import annotations

import itertools
import time
from collections import deque
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
from gymnasium.vector import AutoresetMode

from rlstructs.envs import registry
from rlstructs.envs.columns import Columns, Outcome, nbytes
from rlstructs.envs.env_group import CALL, EVERY, ONE, ROW, Description, WorkerGroup, unpacked
from rlstructs.envs.hosts import Arguments, EnvFns, Request
from rlstructs.errors import WorkerCrashed, WorkerTimeout
from workers import SharedArena, WorkerPool, messages
from workers.channel import AT_ONCE
from workers.messages import Post
from workers.start import uninterrupted

PRELOAD = ("numpy", "gymnasium.vector", "rlstructs.envs.env_group")
# Steps under way in a worker from which on its replies are read before it is asked for more: a pipe holds some
# two hundred small messages, and a worker that cannot write its own reads no others.
MANY = 64


class WorkerHost:
    """Environments in worker processes, some in each.

    Args:
        env_fns: make the environments; worker 0 gets the first of them.
        n_workers: how many workers share them.
        start_method, timeout: as `WorkerPool`'s.

    Raises:
        TypeError: what the user gave cannot be sent to a worker.
    """

    def __init__(self, env_fns: EnvFns, n_workers: int, start_method: str | None, timeout: float | None) -> None:
        self._rows = _shares(len(env_fns), n_workers)
        self._worker_of = [index for index, rows in enumerate(self._rows) for _ in range(rows.start, rows.stop)]
        # The environments that each worker was asked to step by themselves, in the order in which it replies.
        self._asked: list[deque[int]] = [deque() for _ in self._rows]
        self._arrived: list[tuple[int, Outcome]] = []
        self._steps: dict[str, Post] = {}  # to step all of them, by the types of the actions
        self._arena = SharedArena()
        try:
            self._pool = WorkerPool(
                n_workers,
                partial(WorkerGroup, env_fns=env_fns, rows=self._rows),
                shared=(self._arena,),
                start_method=start_method,
                timeout=timeout,
                preload=PRELOAD,
                setup=partial(registry.register, registry.registered()),
                name="rlstructs-environments",
            )
        except Exception as error:
            if culprit := _unpicklable(env_fns):
                raise TypeError(f"env_fns[{culprit[0]}] cannot be sent to a worker: {culprit[1]}") from error
            raise

    @property
    def pids(self) -> list[int]:
        """The process ids, by worker index."""
        return self._pool.pids

    def describe(self) -> Description:
        """As `Host.describe`."""
        self._pool.send(0, "describe")
        [described] = self._pool.gather()
        assert isinstance(described, Description)
        return described

    def attach(self, described: Description, n_envs: int, mode: AutoresetMode) -> Columns:
        """As `Host.attach`.

        Raises:
            OutOfMemoryError: the columns do not fit into memory.
        """
        spaces = described.observation_space, described.action_space
        self._arena.resize(nbytes(*spaces, n_envs))
        columns = Columns(*spaces, n_envs, self._arena.map())
        self._actions, self._at = columns.actions, columns.at
        self._pool.call("attach_here", described, n_envs, mode)
        return columns

    def call(self, method: str, arguments: Arguments) -> Request:
        """As `Host.call`."""
        posts = [Post.of(method, CALL + messages.dumps((method, arguments(rows)))) for rows in self._rows]
        return partial(self._post_each, posts)

    def step(self, actions: Any) -> Request:
        """As `Host.step`."""
        if types := self._actions.write(actions):
            if types not in self._steps:
                self._steps[types] = Post.of("step", EVERY + types.encode("ascii"))
            return partial(self._post_all, self._steps[types])
        each = self._actions.apart(actions, len(self._worker_of))
        posts = [Post.of("step", EVERY + messages.dumps(each[rows])) for rows in self._rows]
        return partial(self._post_each, posts)

    def step_some(self, envs: np.ndarray, actions: Any) -> Request:
        """As `Host.step_some`."""
        each = [self._actions.write(actions, envs, len(envs)).encode("ascii")] * len(envs)
        if not each[0]:
            each = [messages.dumps([action]) for action in self._actions.apart(actions, len(envs))]
        orders: dict[int, list[tuple[int, bytes]]] = {}
        for env, action in zip(envs.tolist(), each, strict=True):
            index = self._worker_of[env]
            orders.setdefault(index, []).append((env, ONE + ROW.pack(env - self._rows[index].start) + action))
        return partial(self._post_some, orders)

    def answers(self, timeout: float | None) -> list[Any]:
        """As `Host.answers`."""
        try:
            self._pool.gather(timeout)
        except (WorkerCrashed, WorkerTimeout) as error:
            self._locate(error)
            raise
        return [unpacked(data) for _, data in sorted(self._pool.answers())]

    def arrived(self, n: int, timeout: float | None) -> list[tuple[int, Outcome]]:
        """As `Host.arrived`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self._read_answers()
        try:
            while len(self._arrived) < n:
                self._pool.await_answer(None if deadline is None else max(0.0, deadline - time.monotonic()))
                self._read_answers()
        except (WorkerCrashed, WorkerTimeout) as error:
            self._locate(error)
            raise
        return self._arrived[:n]

    def forget_arrived(self, n: int) -> None:
        """As `Host.forget_arrived`."""
        del self._arrived[:n]

    def close(self, timeout: float | None) -> None:
        """As `Host.close`."""
        try:
            self._pool.close(timeout)
        finally:
            self._arena.close()

    def kill(self) -> None:
        """As `Host.kill`."""
        self._pool.kill()
        self._arena.close()

    def _locate(self, error: WorkerCrashed | WorkerTimeout) -> None:
        """Says in what is raised of a worker that died, or of those that are late, at which environment it was."""
        for index, (rows, state) in enumerate(zip(self._rows, self._pool.states, strict=True)):
            at, is_late = int(self._at[rows.start]), isinstance(error, WorkerTimeout) and state == "busy"
            if at >= 0 and (is_late or index == error.worker_index):
                messages.add_note(error, f"worker {index} was at environment {at}")

    def _post_all(self, post: Post) -> None:
        self._pool.forget_answers()  # to what was asked before
        self._pool.post(post)

    def _post_each(self, posts: list[Post]) -> None:
        self._pool.forget_answers()
        for index, post in enumerate(posts):
            self._pool.post(post, [index])

    def _post_some(self, orders: dict[int, list[tuple[int, bytes]]]) -> None:
        if not any(self._asked):
            self._pool.forget_answers()  # those to a step of all
        for index, order in orders.items():
            self._make_room(index, sum(len(data) for _, data in order))
            self._asked[index].extend(env for env, _ in order)
            self._pool.post(Post.of("step", *(data for _, data in order)), [index])

    def _make_room(self, index: int, n_bytes: int) -> None:
        """Sees to it that a worker will read so many bytes more."""
        if len(self._asked[index]) > MANY:
            self._pool.ready(0.0)
            self._read_answers()
        while n_bytes > AT_ONCE and self._asked[index]:
            self._pool.await_answer()
            self._read_answers()

    def _read_answers(self) -> None:
        with uninterrupted():  # an answer that was taken and not kept would be waited for, for ever
            for index, data in self._pool.answers():
                self._arrived.append((self._asked[index].popleft(), unpacked(data)))
            self._pool.forget_answers()


def _shares(n_envs: int, n_workers: int) -> list[slice]:
    """Which environments each worker has: as equal shares as can be, the larger ones first."""
    size, n_larger = divmod(n_envs, n_workers)
    starts = [index * size + min(index, n_larger) for index in range(n_workers + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(starts)]


def _unpicklable(env_fns: EnvFns) -> tuple[int, Exception] | None:
    for index, env_fn in enumerate(env_fns):
        try:
            cloudpickle.dumps(env_fn)
        except Exception as error:
            return index, error
    return None
