"""The environments of a `SharedVectorEnv` in worker processes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from rlstructs.envs.shared_vector.columns import Columns, nbytes
from rlstructs.envs.shared_vector.env_group import Description
from rlstructs.envs.shared_vector.env_worker import CALL, EVERY, HEAD, ONE, EnvWorker
from rlstructs.envs.shared_vector.hosts import Arguments, EnvFns, Request, first_of, shares_of
from rlstructs.envs.shared_vector.step_results import NOTHING, Outcome, unpacked
from rlstructs.errors import WorkerCrashed, WorkerTimeout
from rlstructs.worker_setup.setup import WorkerSetup
from rlstructs.worker_setup.streams import WorkerStreams
from workers import SharedArena, WorkerPool, failures, pickling
from workers.channel import deadline_in
from workers.interrupts import defer_interrupt
from workers.messages import AT_ONCE, Post
from workers.pickle_errors import explain_pickle_error

PRELOAD = ("numpy", "gymnasium.vector", "rlstructs.envs.shared_vector.env_worker")
# Steps under way in a worker from which on its replies are read before it is asked for more: a pipe holds some
# two hundred small messages, and a worker that cannot write its own reads no others.
MANY = 64


@dataclass(frozen=True)
class WorkerOptions:
    """How the workers of a `SharedVectorEnv` are started, and what they begin with.

    Attributes:
        start_method, timeout, init_worker: as `WorkerPool`'s.
        streams: seed their global random streams.
    """

    start_method: str | None
    timeout: float | None
    init_worker: Callable[[int], object] | None
    streams: WorkerStreams


class WorkerHost:
    """Environments in worker processes, some in each.

    Args:
        env_fns: make the environments.
        n_workers: how many workers share them; the first has the first of each group.
        groups: which are stepped together.
        options: how workers are started, and begin.

    Raises:
        TypeError: what the user gave cannot be sent to a worker.
    """

    def __init__(
        self,
        env_fns: EnvFns,
        n_workers: int,
        groups: Sequence[range],
        options: WorkerOptions,
    ) -> None:
        shared = [shares_of(group, n_workers) for group in groups]
        # Of each worker its share of each group; and in the order of the environments: whose, of which group, which.
        self._shares = [[_slice(shares[index]) for shares in shared] for index in range(n_workers)]
        places = [(index, group, mine) for group, shares in enumerate(shared) for index, mine in enumerate(shares)]
        self._workers = [index for index, _, _ in places]
        self._place_of = [(index, group, env - mine[0]) for index, group, mine in places for env in mine]
        # What each worker was asked to step by `step_some`, in the order in which it replies.
        self._asked: list[deque[range]] = [deque() for _ in self._shares]
        self._arrived: dict[int, Outcome] = {}
        self._steps: dict[str, Post] = {}  # to step all of them, by the types of the actions
        self._arena = SharedArena()
        try:
            self._pool = WorkerPool(
                n_workers,
                partial(EnvWorker, env_fns=env_fns, shares=self._shares),
                shared=(self._arena,),
                start_method=options.start_method,
                timeout=options.timeout,
                preload=PRELOAD,
                setup=WorkerSetup(options.streams),
                init_worker=options.init_worker,
                name="rlstructs-environments",
            )
        except Exception as error:
            objects = {f"env_fns[{index}]": env_fn for index, env_fn in enumerate(env_fns)}
            if why := explain_pickle_error({"init_worker": options.init_worker} | objects):
                raise TypeError(why) from error
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
        self._pool.call("attach", described, n_envs, mode)
        return columns

    def call(self, method: str, arguments: Arguments) -> Request:
        """As `Host.call`."""
        return self._posting(method, CALL, lambda rows: pickling.dumps((method, arguments(rows))))

    def step(self, actions: Any) -> Request:
        """As `Host.step`."""
        self._pool.check_owner()  # before actions are written where those of another process lie
        if types := self._actions.write(actions):
            if types not in self._steps:
                parts = [HEAD.pack(EVERY, group, 0) + types.encode("ascii") for group in range(len(self._shares[0]))]
                self._steps[types] = Post.of("step", *parts)
            return partial(self._post_all, self._steps[types])
        each = self._actions.apart(actions, len(self._place_of))
        return self._posting("step", EVERY, lambda rows: pickling.dumps(each[rows]))

    def step_some(self, envs: np.ndarray, actions: Any) -> Request:
        """As `Host.step_some`."""
        self._pool.check_owner()
        each = [self._actions.write(actions, envs, len(envs)).encode("ascii")] * len(envs)
        if not each[0]:
            each = [pickling.dumps([action]) for action in self._actions.apart(actions, len(envs))]
        orders: dict[int, list[tuple[range, bytes]]] = {}
        for env, action in zip(envs.tolist(), each, strict=True):
            index, group, k = self._place_of[env]
            orders.setdefault(index, []).append((range(env, env + 1), HEAD.pack(ONE, group, k) + action))
        return partial(self._post_some, orders)

    def step_group(self, group: int, actions: Any) -> Request:
        """As `Host.step_group`."""
        self._pool.check_owner()
        shares = [mine[group] for mine in self._shares]
        start, stop = shares[0].start, shares[-1].stop
        types, head = self._actions.write(actions, slice(start, stop), stop - start), HEAD.pack(EVERY, group, 0)
        if types:
            data = [head + types.encode("ascii")] * len(shares)
        else:
            each = self._actions.apart(actions, stop - start)
            data = [head + pickling.dumps(each[rows.start - start : rows.stop - start]) for rows in shares]
        orders = {
            index: [(range(rows.start, rows.stop), part)]
            for index, (rows, part) in enumerate(zip(shares, data, strict=True))
        }
        return partial(self._post_some, orders)

    def answers(self, timeout: float | None) -> list[Any]:
        """As `Host.answers`."""
        try:
            self._pool.gather(timeout)
        except (WorkerCrashed, WorkerTimeout) as error:
            self._locate(error)
            raise
        answers = self._pool.answers()
        if not any(data for _, data in answers):  # mostly: numbers in shared memory say it all
            return []
        given: list[deque[bytes]] = [deque() for _ in self._shares]
        for index, data in answers:
            given[index].append(data)
        # One that raised has given nothing: that is raised before anyone uses what the others gave.
        return [unpacked(given[index].popleft()) for index in self._workers if given[index]]

    def arrived(self, n: int, among: Sequence[int] | None, timeout: float | None) -> dict[int, Outcome]:
        """As `Host.arrived`."""
        deadline = deadline_in(timeout)
        self._read_answers()
        try:
            while (found := first_of(self._arrived, n, among)) is None:
                self._pool.await_answer(None if deadline is None else max(0.0, deadline - time.monotonic()))
                self._read_answers()
        except (WorkerCrashed, WorkerTimeout) as error:
            self._locate(error)
            raise
        return found

    def forget_arrived(self, envs: Iterable[int]) -> None:
        """As `Host.forget_arrived`."""
        for env in envs:
            del self._arrived[env]

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
        for index, (mine, state) in enumerate(zip(self._shares, self._pool.states, strict=True)):
            is_late = isinstance(error, WorkerTimeout) and state == "busy"
            for at in self._at[[rows.start for rows in mine]].tolist():
                if at >= 0 and (is_late or index == error.worker_index):
                    failures.add_note(error, f"worker {index} was at environment {at}")

    def _post_all(self, post: Post) -> None:
        self._pool.forget_answers()  # to what was asked before
        self._pool.post(post)

    def _posting(self, label: str, kind: bytes, data: Callable[[slice], bytes]) -> Request:
        """To ask each group in each worker; `data` gives what for its environments."""
        posts = [
            Post.of(label, *(HEAD.pack(kind, group, 0) + data(rows) for group, rows in enumerate(mine)))
            for mine in self._shares
        ]
        return partial(self._post_each, posts)

    def _post_each(self, posts: list[Post]) -> None:
        self._pool.forget_answers()
        for index, post in enumerate(posts):
            self._pool.post(post, [index])

    def _post_some(self, orders: dict[int, list[tuple[range, bytes]]]) -> None:
        if not any(self._asked):
            self._pool.forget_answers()  # those to a step of all
        for index, order in orders.items():
            self._make_room(index, sum(len(data) for _, data in order))
            self._asked[index].extend(envs for envs, _ in order)
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
        with defer_interrupt():  # an answer that was taken and not kept would be waited for, for ever
            for index, data in self._pool.answers():
                envs = self._asked[index].popleft()
                self._arrived.update(unpacked(data).of_each(envs) if data else dict.fromkeys(envs, NOTHING))
            self._pool.forget_answers()


def _slice(envs: range) -> slice:
    return slice(envs.start, envs.stop)
