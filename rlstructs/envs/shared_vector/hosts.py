"""`WorkerHost` runs the environments of a `SharedVectorEnv` in worker processes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from rlstructs.envs.shared_vector.arguments import Description
from rlstructs.envs.shared_vector.columns import EMPTY, Columns, Outcome, count_bytes, unpack
from rlstructs.envs.shared_vector.env_group import CALL, EVERY, HEAD, ONE, EnvWorker
from rlstructs.envs.shared_vector.local_host import Arguments, EnvFns, Host, LocalHost, Request, take_arrived
from rlstructs.errors import WorkerCrashed, WorkerTimeout
from rlstructs.seeding import WorkerStreams
from rlstructs.worker_setup import WorkerSetup
from rlstructs.workers import SharedArena, WorkerPool, failures, pickling
from rlstructs.workers.interrupts import defer_interrupt
from rlstructs.workers.messages import AT_ONCE, Future, Post, deadline_in, gather_values
from rlstructs.workers.pickling import explain_pickle_error

PRELOAD = ("numpy", "gymnasium.vector", "rlstructs.envs.shared_vector.env_group")
# With more steps under way than this, a worker's replies are read before it gets another request: a pipe holds about
# two hundred small messages, and a worker that cannot write its replies reads no requests.
MANY = 64

# By worker, its requests: the environments of each, and its content.
Requests = dict[int, list[tuple[Sequence[int], bytes]]]


@dataclass(frozen=True)
class WorkerOptions:
    """The start settings of the workers of a `SharedVectorEnv`.

    Attributes:
        start_method, timeout, init_worker: those of `WorkerPool`.
        streams: seeds the global random streams of workers.
    """

    start_method: str | None
    timeout: float | None
    init_worker: Callable[[int], object] | None
    streams: WorkerStreams


def start_host(env_fns: EnvFns, n_workers: int, groups: Sequence[range], options: WorkerOptions) -> Host:
    """Makes the environments, in worker processes or, with no workers, in this process."""
    if n_workers:
        return WorkerHost(env_fns, n_workers, groups, options)
    if options.init_worker is not None:
        options.init_worker(0)
    return LocalHost(env_fns, groups)


class WorkerHost(Host):
    """Runs environments in worker processes, some in each.

    Args:
        env_fns: make the environments.
        n_workers: number of workers; the first one gets the first environments of each group.
        groups: environments that are stepped together.
        options: how workers are started.

    Raises:
        TypeError: `env_fns` or `init_worker` cannot be sent to a worker.
    """

    def __init__(self, env_fns: EnvFns, n_workers: int, groups: Sequence[range], options: WorkerOptions) -> None:
        shared = [split_evenly(group, n_workers) for group in groups]
        # For each worker, its share of each group; for each environment, its worker, its group and its index in the
        # worker's share of the group.
        self._shares = [[_slice(shares[index]) for shares in shared] for index in range(n_workers)]
        places = [(index, group, mine) for group, shares in enumerate(shared) for index, mine in enumerate(shares)]
        # For each share, ordered by environment, the index of its future among those of a request to all.
        self._order = [index * len(groups) + group for index, group, _ in places]
        self._place_of = [(index, group, env - mine[0]) for index, group, mine in places for env in mine]
        self._futures: list[Future] = []  # of the last request to all environments, by worker and group
        # For each worker, the environments of each request of `step_some`, in the order of its replies.
        self._sent: list[deque[tuple[Sequence[int], Future]]] = [deque() for _ in self._shares]
        self._arrived = {}
        self._steps: dict[str, Post] = {}  # requests to step all environments, by the types of the actions
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
        [described] = self._pool.gather(self._pool.ask("describe", only=[0]))
        assert isinstance(described, Description)
        return described

    def attach(self, described: Description, n_envs: int, mode: AutoresetMode) -> Columns:
        """Lays out the columns in shared memory.

        Raises:
            OutOfMemoryError: the columns do not fit into memory.
        """
        spaces = described.observation_space, described.action_space
        self._arena.resize(count_bytes(*spaces, n_envs))
        columns = Columns(*spaces, n_envs, self._arena.map())
        self._actions, self._at = columns.actions, columns.at
        self._pool.call("attach", described, n_envs, mode)
        return columns

    def call(self, method: str, arguments: Arguments) -> Request:
        return self._make_request(method, CALL, lambda rows: pickling.dumps((method, arguments(rows))))

    def step(self, actions: Any) -> Request:
        self._pool.check_owner()  # first, so that a forked process overwrites no actions of its parent
        if types := self._actions.write(actions):
            if types not in self._steps:
                parts = [HEAD.pack(EVERY, group, 0) + types.encode("ascii") for group in range(len(self._shares[0]))]
                self._steps[types] = Post.of("step", *parts)
            return partial(self._post_all, self._steps[types])
        each = self._actions.split(actions, len(self._place_of))
        return self._make_request("step", EVERY, lambda rows: pickling.dumps(each[rows]))

    def step_some(self, envs: np.ndarray, actions: Any) -> Request:
        self._pool.check_owner()
        each = [self._actions.write(actions, envs, len(envs)).encode("ascii")] * len(envs)
        if not each[0]:
            each = [pickling.dumps([action]) for action in self._actions.split(actions, len(envs))]
        requests: Requests = {}
        for env, action in zip(envs.tolist(), each, strict=True):
            index, group, k = self._place_of[env]
            requests.setdefault(index, []).append((range(env, env + 1), HEAD.pack(ONE, group, k) + action))
        return partial(self._post_some, requests)

    def step_group(self, group: int, actions: Any) -> Request:
        self._pool.check_owner()
        shares = [mine[group] for mine in self._shares]
        start, stop = shares[0].start, shares[-1].stop
        types, head = self._actions.write(actions, slice(start, stop), stop - start), HEAD.pack(EVERY, group, 0)
        if types:
            data = [head + types.encode("ascii")] * len(shares)
        else:
            each = self._actions.split(actions, stop - start)
            data = [head + pickling.dumps(each[rows.start - start : rows.stop - start]) for rows in shares]
        requests: Requests = {
            index: [(range(rows.start, rows.stop), part)]
            for index, (rows, part) in enumerate(zip(shares, data, strict=True))
        }
        return partial(self._post_some, requests)

    def reset_some(self, mask: np.ndarray, arguments: Arguments) -> Request:
        self._pool.check_owner()
        requests: Requests = {}
        for index, mine in enumerate(self._shares):
            for group, rows in enumerate(mine):
                if envs := (rows.start + np.flatnonzero(mask[rows])).tolist():
                    data = HEAD.pack(CALL, group, 0) + pickling.dumps(("reset", arguments(rows)))
                    requests.setdefault(index, []).append((envs, data))
        return partial(self._post_some, requests)

    def wait_for_all(self, timeout: float | None) -> list[Any]:
        try:
            replies = self._pool.gather(self._futures, timeout)
        except (WorkerCrashed, WorkerTimeout) as error:
            self._add_places(error)
            raise
        if not any(replies):  # as in most steps, everything is in shared memory
            return []
        return [unpack(replies[index]) for index in self._order]

    def wait_for_values(self, timeout: float | None) -> list[Any] | Exception:
        missing = self._futures
        while missing:
            self._pool.settle(missing, timeout=timeout, fails_fast=True)
            try:
                gather_values(missing)
            except (WorkerCrashed, WorkerTimeout) as error:
                self._add_places(error)
                raise
            except Exception:  # of an environment: the others' results are waited for
                pass
            missing = [future for future in missing if not future.is_over]
        try:
            return self.wait_for_all(None)
        except Exception as error:
            return error

    def wait_for_some(self, n: int, among: Sequence[int] | None, timeout: float | None) -> dict[int, Outcome]:
        deadline = deadline_in(timeout)
        try:
            self._take_outcomes()
            while (found := take_arrived(self._arrived, n, among)) is None:
                self._wait_for_one(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except (WorkerCrashed, WorkerTimeout) as error:
            self._add_places(error)
            raise
        return found

    def wait_for_ready(self, n: int, timeout: float | None) -> dict[int, Outcome]:
        try:
            self.wait_for_some(n, None, timeout)
        except WorkerTimeout:
            if not self._arrived:
                raise
        self._pool.is_settled([])  # reads what has arrived
        self._take_outcomes()
        return dict(self._arrived)

    def close(self, timeout: float | None) -> None:
        try:
            self._pool.close(timeout)
        finally:
            self._arena.close()

    def kill(self) -> None:
        self._pool.kill()
        self._arena.close()

    def _add_places(self, error: WorkerCrashed | WorkerTimeout) -> None:
        """Adds notes to an error: which environments the failed workers were stepping.

        These are the worker that died, or all late ones.
        """
        for index, (mine, state) in enumerate(zip(self._shares, self._pool.states, strict=True)):
            is_late = isinstance(error, WorkerTimeout) and state == "busy"
            for at in self._at[[rows.start for rows in mine]].tolist():
                if at >= 0 and (is_late or index == error.worker_index):
                    failures.add_note(error, f"worker {index} was at environment {at}")

    def _post_all(self, post: Post) -> None:
        self._futures = self._post(post)

    def _make_request(self, label: str, kind: bytes, data: Callable[[slice], bytes]) -> Request:
        """Makes a request to each group in each worker.

        `data` returns its content for a slice of environments.
        """
        posts = [
            Post.of(label, *(HEAD.pack(kind, group, 0) + data(rows) for group, rows in enumerate(mine)))
            for mine in self._shares
        ]
        return partial(self._post_each, posts)

    def _post_each(self, posts: list[Post]) -> None:
        self._futures = [future for index, post in enumerate(posts) for future in self._post(post, [index])]

    def _post_some(self, requests: Requests) -> None:
        for index, steps in requests.items():
            self._make_room(index, sum(len(data) for _, data in steps))
            futures = self._post(Post.of("step", *(data for _, data in steps)), [index])
            self._sent[index].extend(zip((envs for envs, _ in steps), futures, strict=True))

    def _post(self, post: Post, only: list[int] | None = None) -> list[Future]:
        """Sends a request; raises if a worker is gone or does not read."""
        futures = self._pool.post(post, only)
        for future in futures:
            if future.error is not None:
                raise future.error
        return futures

    def _make_room(self, index: int, n_bytes: int) -> None:
        """Reads replies until a worker can take a request of so many bytes."""
        if len(self._sent[index]) > MANY:
            self._pool.is_settled([])  # reads what has arrived
            self._take_outcomes()
        while n_bytes > AT_ONCE and self._sent[index]:
            self._wait_for_one()

    def _wait_for_one(self, timeout: float | None = None) -> None:
        """Waits for the next reply to a request of `step_some`."""
        oldest = [sent[0][1] for sent in self._sent if sent]  # each worker replies in order
        self._pool.settle(oldest, 1, timeout=timeout, fails_fast=True)
        gather_values([future for future in oldest if future.error is not None])
        self._take_outcomes()

    def _take_outcomes(self) -> None:
        """Takes the outcomes of the requests of `step_some` that are over."""
        for sent in self._sent:
            while sent and sent[0][1].is_over:
                envs, future = sent[0]
                [data] = gather_values([future])
                outcomes = unpack(data).split(envs) if data else dict.fromkeys(envs, EMPTY)
                with defer_interrupt():  # an outcome that was taken and not kept would be waited for forever
                    sent.popleft()
                    self._arrived.update(outcomes)


def _slice(envs: range) -> slice:
    return slice(envs.start, envs.stop)


def batch_spaces(host: Host, described: Description, n_envs: int) -> gymnasium.Space[Any]:
    """Batches the observation spaces of all environments.

    Asks for their bounds if these may differ.
    """
    if not described.bounds_differ:
        return batch_space(described.observation_space, n_envs)
    host.call("call", lambda rows: ("observation_space", (), {}))()
    return batch_differing_spaces([space for some in host.wait_for_all(None) for space in some])


def split_evenly(envs: range, n: int) -> list[range]:
    """Splits environments into n parts of nearly equal size.

    The first parts get one more if necessary.
    """
    size, n_larger = divmod(len(envs), n)
    starts = [index * size + min(index, n_larger) for index in range(n + 1)]
    return [envs[start:stop] for start, stop in pairwise(starts)]
