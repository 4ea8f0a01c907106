"""`NodePool`: a `Pool` whose workers are actors of Ray; errors of nodes."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from rlstructs.distributed import cluster
from rlstructs.distributed.cluster import (
    ASIDE,
    BUILD,
    Bell,
    Columns,
    Node,
    NodeActor,
    NodeFailure,
    Place,
    Placement,
    Request,
    wait_for_ring,
)
from rlstructs.errors import OutOfMemoryError, WorkerCrashed, WorkerError, WorkerTimeout
from rlstructs.workers import failures, pickling
from rlstructs.workers.errors import strip_traceback
from rlstructs.workers.imports import get_import_path
from rlstructs.workers.interrupts import defer_interrupt, forget_last_interrupt
from rlstructs.workers.messages import Call, Future, gather_values

logger = logging.getLogger("rlstructs")

# Seconds that Ray has to place an actor and to start its process; also the seconds between two warnings.
PLACING = 60.0
# Seconds that a node has to replace workers itself, in addition to twice the time of a worker.
MENDING = 5.0
# Seconds that nodes have to close their jobs.
CLOSING = 6.0
# Seconds between two checks of the connection to Ray: without it no reply would ever come.
LOOKING = 1.0


class NodePool:
    """Jobs in actors of Ray, one each.

    Args:
        settings: the settings that jobs are built from, pickled; they go into the object store, once.
        job_arguments: for each node, the arguments of the settings' `build`.
        sizes: the number of workers of each node.
        placement: where nodes run.
        timeout: seconds that their workers have to answer; None for no limit.

    Raises:
        SpecError: no machine can ever run a node.
        WorkerError: a node could not start.
        Exception: what a job raised as it was built.
    """

    #: The word for a node in messages.
    noun = "node"

    def __init__(
        self,
        settings: bytes,
        job_arguments: Sequence[tuple[Any, ...]],
        sizes: Sequence[int],
        placement: Placement,
        timeout: float | None,
    ) -> None:
        placement.check()
        forget_last_interrupt()
        # Of the actors: Ray would start a cluster for requests without one, and another one does not know them.
        self._connection = cluster.read_connection()
        self._settings, self._job_arguments = cluster.import_ray().put(settings), job_arguments
        self._placement, self.timeout = placement, timeout
        # The lock guards the requests: `close` may be called while another thread waits for replies.
        self._lock, self._bell, self._is_over = threading.RLock(), Bell(), False
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        self._workers = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self.nodes: list[Node] = []
        try:
            for index in range(len(job_arguments)):
                self.nodes.append(self._start(index))
            self.gather([self._build(node) for node in self.nodes], fails_fast=True)
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, WorkerError):
                with contextlib.suppress(Exception):  # a factory raised: the other jobs may have to close
                    self.close()
            self.kill()
            raise

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("the nodes of a batcher cannot be copied or pickled, nor what holds them")

    @property
    def n_workers(self) -> int:
        """The number of nodes."""
        return len(self._job_arguments)

    @property
    def pids(self) -> list[int]:
        """The process id of each actor, 0 until it is placed."""
        return [node.pid for node in self.nodes]

    @property
    def states(self) -> list[str]:
        """ "idle", "busy" or "gone", for each node."""
        return [node.state for node in self.nodes]

    @property
    def can_restart(self) -> bool:
        """True: a node that is gone is replaced on the rest of the cluster."""
        return True

    def call(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of every job; returns the values, by node."""
        return self.gather(self.ask(method, *args), fails_fast=True)

    def ask(self, method: str, *args: Any, only: Iterable[int] | None = None) -> list[Future]:
        """Asks nodes to call a method of their jobs, and returns at once.

        The returned futures get the results. A node may get several requests, which it answers one after another.

        Args:
            method: the name of the job's method.
            args: its arguments; references of Ray come last, and arrive as the objects that they refer to.
            only: the indexes of the nodes to ask; None for all.
        """
        self.check_connection()
        kind = cluster.import_ray().ObjectRef
        shared = [arg for arg in args if isinstance(arg, kind)]
        call = Call(method, tuple(arg for arg in args if not isinstance(arg, kind)))
        request = pickling.dumps(call)  # once for all
        nodes = self.nodes if only is None else [self.nodes[index] for index in only]
        return [self._ask(node, method, request, shared, self._limit()) for node in nodes]

    def settle(self, asked: Sequence[Future], n: int | None = None, *, fails_fast: bool = False) -> None:
        """Waits until `n` requests are over; one that misses its deadline counts as failed.

        Args:
            asked: the requests, as returned by `ask`.
            n: how many to wait for; None for all.
            fails_fast: whether to stop at the first failure.
        """
        with self._bell.listen() as rings:
            while nodes := self._find_awaited(asked, n, fails_fast):
                self._wait(nodes, rings)
        with self._lock:
            for each in asked:
                if not each.is_over and not each.error and self.nodes[each.index].is_overdue():
                    each.error = self._make_timeout_error(self.nodes[each.index])
                    self.nodes[each.index].is_late = True

    def is_settled(self, asked: Sequence[Future], n: int | None = None, *, fails_fast: bool = False) -> bool:
        """Whether `settle` would return at once."""
        return not self._find_awaited(asked, n, fails_fast)

    def cut(self, index: int, number: int) -> None:
        """Makes a node end its rollouts below this number; returns at once.

        They end after the current step.
        """
        self.ask_aside(index, "cut", number)

    def ask_aside(self, index: int, method: str, *args: Any) -> Any:
        """Asks a node for a call in another thread.

        The method is one of its job. Returns Ray's reference to the value, at once; None if the node is gone.
        """
        node = self.nodes[index]
        if node.error is not None or not self._is_connected():
            return None
        return node.actor.call_aside.options(concurrency_group=ASIDE).remote(method, *args)

    def check(self) -> dict[int, BaseException]:
        """The errors of nodes that are known to be gone, by index."""
        return {node.index: node.error for node in self.nodes if node.error is not None}

    def restart(self, successors: Mapping[int, tuple[Any, ...]]) -> list[Future]:
        """Replaces nodes, whatever they are doing; their unfinished requests fail.

        Args:
            successors: by node index, more arguments of the settings' `build`.

        Returns:
            The requests to build the new jobs, for `settle`.
        """
        for index in successors:
            self._end(self.nodes[index], WorkerCrashed(f"{self.nodes[index]} was replaced"))
        with self._lock, defer_interrupt():  # otherwise `kill` could miss a node
            self._check_open()
            for index in successors:
                report, self.nodes[index] = self.nodes[index].report, self._start(index)
                self.nodes[index].report = report
        return [self._build(self.nodes[index], *args) for index, args in successors.items()]

    def close(self, *, with_earlier: bool = True) -> None:
        """Closes every job and ends every actor, by force after some seconds. Idempotent.

        Args:
            with_earlier: has no effect: only errors of closing jobs are raised.

        Raises:
            Exception: the first exception of a job that was closed; every actor has ended all the same.
        """
        self._is_over = True
        deadline, left = time.monotonic() + CLOSING, CLOSING
        asked: list[Future] = []
        try:
            asked = self.ask("close", only=[node.index for node in self.nodes if not (node.error or node.is_late)])
            with self._bell.listen() as rings:
                while left > 0 and not self._are_over(asked):
                    wait_for_ring(rings, left)
                    left = deadline - time.monotonic()
        except WorkerError as error:  # the connection was shut down, and with it the actors
            logger.debug("closed without a word to the %ss: %s", self.noun, error)
        finally:
            self.kill()
        if errors := [each.error for each in asked if each.error and not isinstance(each.error, WorkerError)]:
            raise errors[0]

    def kill(self) -> None:
        """Ends every actor at once; its worker processes end with it."""
        with self._lock:
            self._is_over = True
            for node in self.nodes:
                if node.error is None:
                    self._end(node, WorkerCrashed(f"{node} was closed"))

    def _check_open(self) -> None:
        if self._is_over:  # by another thread
            raise WorkerError("the nodes were ended meanwhile")
        self.check_connection()

    def check_connection(self) -> None:
        """Raises WorkerError unless the connection used to start the actors is open."""
        if not self._is_connected():
            raise WorkerError("the connection to Ray was shut down meanwhile")

    def _is_connected(self) -> bool:
        return self._connection is not None and self._connection == cluster.read_connection()

    def _end(self, node: Node, error: WorkerError) -> None:
        """Ends an actor, by force."""
        if self._is_connected():
            with contextlib.suppress(Exception):
                cluster.import_ray().kill(node.actor)
        self._give_up(node, error)

    def _give_up(self, node: Node, error: WorkerError) -> None:
        """Marks a node as gone, and its requests as failed."""
        with self._lock:
            if node.error is None:
                node.error = error
            while node.requests:
                node.requests.popleft().asked.end(error=strip_traceback(node.error))
        self._bell.ring()

    def _start(self, index: int) -> Node:
        """Starts an actor; it takes requests even before Ray has placed it."""
        others = [node.node_id for node in self.nodes if node.index != index and node.state != "gone"]
        machine, workers = self._placement.choose(others), self._workers[index]
        options = self._placement.make_options(machine)
        make_actor = cluster.import_ray().remote(concurrency_groups={ASIDE: 1})(NodeActor).options(**options).remote
        found = (machine.node_id, machine.address) if machine else ("", "")
        return Node(index, workers, make_actor(workers.start), self.noun, *found)

    def _build(self, node: Node, *args: Any) -> Future:
        """Asks a node to build its job."""
        request = pickling.dumps(Call(BUILD, (get_import_path(), *self._job_arguments[node.index], *args)))
        limit = self._limit()
        return self._ask(node, BUILD, request, [self._settings], None if limit is None else PLACING + limit)

    def _limit(self) -> float | None:
        """Seconds that a node has to answer; None for no limit."""
        return None if self.timeout is None else 2 * self.timeout + MENDING

    def _ask(self, node: Node, method: str, request: bytes, shared: list[Any], limit: float | None) -> Future:
        asked = Future(node.index, method)
        with self._lock:
            if node.error is not None:
                asked.end(error=strip_traceback(node.error))
                return asked
            if not node.requests:
                node.since = time.monotonic()
            reference = node.actor.call.remote(request, *shared)
            node.requests.append(Request(reference, reference.future(), asked, limit))
            node.requests[-1].reply.add_done_callback(self._bell.ring)
        return asked

    def gather(self, asked: Sequence[Future], *, fails_fast: bool = False) -> list[Any]:
        """Waits for requests and returns their values.

        Raises the first error once all are over or, with `fails_fast`, once one has failed.
        """
        self.settle(asked, fails_fast=fails_fast)
        return gather_values(asked)

    def _find_awaited(self, asked: Sequence[Future], n: int | None, fails_fast: bool) -> list[Node]:
        """Finds the nodes that `settle` has to wait for.

        Looks at the clock only once, as a deadline may pass meanwhile.
        """
        self._check_open()
        self._receive_all()
        self._extend_deadlines()
        if fails_fast and any(each.error for each in asked):
            return []
        if sum(each.is_over for each in asked) >= (len(asked) if n is None else n):
            return []
        indexes = {each.index for each in asked if not each.is_over}
        with self._lock:
            return [node for node in self.nodes if node.index in indexes and node.requests and not node.is_overdue()]

    def _wait(self, nodes: Sequence[Node], rings: SimpleQueue[None]) -> None:
        """Waits for a reply, or for the first deadline of these nodes.

        Warns of nodes that are placed too slowly.
        """
        with self._lock:
            limits = [(node, node.requests[0].limit) for node in nodes if node.requests]
            ends = [node.since + limit for node, limit in limits if limit is not None]
            ends += [node.placing_since + PLACING for node in nodes if not node.is_built()]
        wait_for_ring(rings, max(0.0, min([LOOKING, *(end - time.monotonic() for end in ends)])))
        now = time.monotonic()
        with self._lock:
            unplaced = [node for node in nodes if not node.is_built() and now >= node.placing_since + PLACING]
        for node in unplaced:
            node.placing_since = now
            logger.warning("%s", self._describe_unplaced(node, now - node.since))

    def _extend_deadlines(self) -> None:
        """Extends the deadline once for late nodes that have answered.

        A long reply takes time to arrive here.
        """
        with self._lock:
            late = {
                node.requests[0].reference: node for node in self.nodes if node.is_overdue() and not node.has_answered
            }
            if late:
                there, _ = cluster.import_ray().wait(list(late), num_returns=len(late), timeout=0.0, fetch_local=False)
                for reference in there:
                    late[reference].since, late[reference].has_answered = time.monotonic(), True

    def _are_over(self, asked: Sequence[Future]) -> bool:
        """Whether all these requests are over, after the replies that have come are received."""
        self._receive_all()
        return all(each.is_over for each in asked)

    def _receive_all(self) -> None:
        """Receives all replies that have come."""
        for node in self.nodes:
            while self._receive(node):
                pass

    def _receive(self, node: Node) -> bool:
        """Receives the reply to a node's oldest request; False if there is none yet."""
        with self._lock:
            if not (node.requests and node.requests[0].reply.done()):
                return False
            with defer_interrupt():
                reply, columns = self._unpickle_reply(node)
                if node.error is None:
                    self._end_oldest(node, reply, columns)
        return True

    def _end_oldest(self, node: Node, reply: Any, columns: Columns) -> None:
        """Ends a node's oldest request with a reply."""
        error: BaseException | None = None
        if isinstance(reply, Exception):
            error = reply
        elif isinstance(reply, NodeFailure):
            error = make_job_error(node, self._describe_place(node), reply)
        asked = node.requests.popleft().asked
        node.since, node.is_late, node.has_answered = time.monotonic(), False, False
        if error is not None:
            asked.end(error=error)
        else:
            value, node.report = reply
            if asked.label == BUILD:
                self._set_place(node, value)
            asked.end(value._replace(columns=columns) if columns else value)

    def _unpickle_reply(self, node: Node) -> tuple[Any, Columns]:
        """Unpickles a node's reply; returns an exception instead if only the reply is lost."""
        try:
            data, columns = node.requests[0].reply.result()
            return pickling.loads(data), columns
        except Exception as error:  # Ray's error, which says why there is no reply
            if cluster.is_death(error):
                self._give_up(node, make_crash_error(node, self._describe_losses(node), error))
                return None, {}
            return make_loss_error(node, error), {}

    def _set_place(self, node: Node, place: Place) -> None:
        """Records where a node runs."""
        machine = cluster.list_machines().get(place.node_id)
        node.node_id, node.pid, node.address = *place, machine.address if machine else "unknown"

    def _describe_place(self, node: Node) -> str:
        """Says on which node something happened."""
        return f"on {node}, whose worker 0 is worker {node.workers.start} of all"

    def _describe_losses(self, node: Node) -> str:
        """Says what was lost with a node."""
        return f"workers {node.workers.start} to {node.workers.stop - 1}"

    def _make_timeout_error(self, node: Node) -> WorkerTimeout:
        """Makes the error for a node that has missed a deadline."""
        request = node.requests[0]
        assert request.limit is not None
        if node.is_built():
            text = f"no reply within {request.limit} s to {request.asked.label!r} from {node}"
        else:
            text = self._describe_unplaced(node, request.limit)
        return WorkerTimeout(text, node.workers.start)

    def _describe_unplaced(self, node: Node, seconds: float) -> str:
        """Says that a node was not placed in time, and what it needs."""
        return (
            f"{node} was not placed and built within {seconds:.1f} s; it needs {self._placement}, "
            f"and free are {cluster.import_ray().available_resources()}"
        )


def make_job_error(node: Node, place: str, reply: NodeFailure) -> BaseException:
    """Makes the error for a node's reply that its oldest request failed.

    `place` says where, for example "on node 0".
    """
    error = reply.failure.to_exception(reply.worker_index, node.requests[0].asked.label)
    if isinstance(error, WorkerError):
        error.args, error.worker_index = (f"{place}: {error}",), reply.worker_index
    else:
        failures.add_note(error, place)
    return error


def make_crash_error(node: Node, losses: str, error: Exception) -> WorkerError:
    """Makes the error for a node that is gone, from Ray's error.

    `losses` says what is lost with it.
    """
    label = node.requests[0].asked.label
    crashed = WorkerCrashed(f"{node} is gone, with {losses}; last request: {label}", node.workers.start)
    crashed.__cause__ = error.with_traceback(None)
    return crashed


def make_loss_error(node: Node, error: Exception) -> Exception:
    """Makes the error for a lost reply of a running node.

    It is made from Ray's error.
    """
    text = f"the reply of {node} to {node.requests[0].asked.label!r} is lost"
    lost: Exception = WorkerError(f"{text}: {error}", node.workers.start)
    if cluster.is_full(error):
        lost = OutOfMemoryError(f"{text}: its machine's object store is full: {error}")
    lost.__cause__ = error.with_traceback(None)
    return lost
