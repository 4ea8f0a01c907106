"""`NodePool`: a `Pool` whose workers are actors of Ray."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from rlstructs.distributed import cluster
from rlstructs.distributed.actor import ASIDE, BUILD, Columns, NodeActor
from rlstructs.distributed.cluster import Placement
from rlstructs.distributed.node_handle import Bell, Node, Request, _await
from rlstructs.errors import OutOfMemoryError, WorkerCrashed, WorkerError, WorkerTimeout
from workers import failures, pickling
from workers.errors import strip_traceback
from workers.failures import Failure
from workers.futures import Future
from workers.import_path import get_import_path
from workers.interrupts import defer_interrupt, forget_last_interrupt
from workers.messages import Call, Result

logger = logging.getLogger("rlstructs")

# Seconds that Ray has to place an actor and to start its process; without a limit, from one warning to the next.
PLACING = 60.0
# Seconds that a node has, beside what its workers have and once more for a successor, to mend what it can itself.
MENDING = 5.0
# Seconds that nodes get to close their batchers.
CLOSING = 6.0
# Seconds after which it is looked whether there still is a connection to Ray: without one nothing ever comes.
LOOKING = 1.0


class NodePool:
    """Jobs in actors of Ray, one each.

    Args:
        settings: what jobs are built from, pickled; goes into the object store, once.
        parts: for each node what makes its job of that.
        sizes: how many workers each has.
        placement: where they run.
        timeout: seconds that their workers have to answer, None for no limit.

    Raises:
        SpecError: no machine can ever have one.
        WorkerError: one did not come up.
        Exception: what a job raised as it was built.
    """

    #: What one is called.
    noun = "node"

    def __init__(
        self, settings: bytes, parts: Sequence[tuple[Any, ...]], sizes: Sequence[int], placement: Placement,
        timeout: float | None,
    ) -> None:  # fmt: skip
        placement.check()
        forget_last_interrupt()
        self._settings, self._parts = cluster.ray().put(settings), parts
        self._placement, self.timeout = placement, timeout
        # What was asked is looked at under it: `close` may be called while another thread waits for replies.
        self._lock, self._bell, self._is_over = threading.RLock(), Bell(), False
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        self._workers = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self.nodes: list[Node] = []
        try:
            for index in range(len(parts)):
                self.nodes.append(self._started(index))
            self.values([self._build(node) for node in self.nodes], fails_fast=True)
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, WorkerError):
                with contextlib.suppress(Exception):  # of a factory: the others may have something to close
                    self.close()
            self.kill()
            raise

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("the nodes of a batcher cannot be copied or pickled, nor what holds them")

    @property
    def n_workers(self) -> int:
        """How many nodes there are."""
        return len(self._parts)

    @property
    def pids(self) -> list[int]:
        """The process id of each actor, 0 until it is placed."""
        return [node.pid for node in self.nodes]

    @property
    def states(self) -> list[str]:
        """"idle", "busy" or "gone", for each node."""
        return [node.state for node in self.nodes]

    @property
    def can_restart(self) -> bool:
        """True: a node that is gone is replaced on what is left of the cluster."""
        return True

    def call(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of every job; the values, by node."""
        return self.values(self.ask(method, *args), fails_fast=True)

    def ask(self, method: str, *args: Any, only: Iterable[int] | None = None) -> list[Future]:
        """Asks nodes to call a method of their jobs, and returns at once; what comes of it is in what is returned.

        A node takes several requests, one behind another.

        Args:
            method: of the job.
            args: its arguments; those that are references of Ray come last, and arrive as what they refer to.
            only: the indexes of those who are asked; None for all.
        """
        kind = cluster.ray().ObjectRef
        shared = [arg for arg in args if isinstance(arg, kind)]
        call = Call(method, tuple(arg for arg in args if not isinstance(arg, kind)))
        request = pickling.dumps(call)  # once for all
        nodes = self.nodes if only is None else [self.nodes[index] for index in only]
        return [self._ask(node, method, request, shared, self._limit()) for node in nodes]

    def settle(self, asked: Sequence[Future], n: int | None = None, *, fails_fast: bool = False) -> None:
        """Waits until `n` of what was asked (None: all) is over, or outruns its deadline, which is a failure.

        Args:
            asked: what `ask` gave.
            n: how many.
            fails_fast: whether one failure is enough.
        """
        with self._bell.heard() as rings:
            while nodes := self._awaited(asked, n, fails_fast):
                self._wait(nodes, rings)
        with self._lock:
            for each in asked:
                if not each.is_over and not each.error and self.nodes[each.index].is_overdue():
                    each.error = self._late(self.nodes[each.index])
                    self.nodes[each.index].is_late = True

    def is_settled(self, asked: Sequence[Future], n: int | None = None, *, fails_fast: bool = False) -> bool:
        """Whether `settle` would return at once."""
        return not self._awaited(asked, n, fails_fast)

    def cut(self, index: int, number: int) -> None:
        """Has a node end its rollouts below this number after the step that it is in; nobody waits for it."""
        node = self.nodes[index]
        if node.error is None and cluster.ray().is_initialized():
            node.actor.cut.options(concurrency_group=ASIDE).remote(number)

    def check(self) -> dict[int, BaseException]:
        """The failures of nodes that are known to be gone."""
        return {node.index: node.error for node in self.nodes if node.error is not None}

    def restart(self, successors: Mapping[int, tuple[Any, ...]]) -> list[Future]:
        """Replaces nodes, whatever they are doing; nothing comes any more of what those were asked.

        Args:
            successors: index -> what the job is built with behind its settings.

        Returns:
            For `settle`: whether their jobs are built.
        """
        for index in successors:
            self._end(self.nodes[index], WorkerCrashed(f"{self.nodes[index]} was replaced"))
        with self._lock, defer_interrupt():  # or `kill` could miss one
            self._check_open()
            for index in successors:
                report, self.nodes[index] = self.nodes[index].report, self._started(index)
                self.nodes[index].report = report
        return [self._build(self.nodes[index], *args) for index, args in successors.items()]

    def close(self, *, with_earlier: bool = True) -> None:
        """Closes every job and ends every actor, by force after some seconds. Idempotent.

        Args:
            with_earlier: without effect: nodes only say what they raise as they close.

        Raises:
            Exception: what the first job raised while it closed; everything is gone all the same.
        """
        self._is_over = True
        deadline, left = time.monotonic() + CLOSING, CLOSING
        asked: list[Future] = []
        try:
            if cluster.ray().is_initialized():
                asked = self.ask("close", only=[node.index for node in self.nodes if not (node.error or node.is_late)])
            with self._bell.heard() as rings:
                while left > 0 and not self._all_over(asked):
                    _await(rings, left)
                    left = deadline - time.monotonic()
        finally:
            self.kill()
        if errors := [each.error for each in asked if each.error and not isinstance(each.error, WorkerError)]:
            raise errors[0]

    def kill(self) -> None:
        """Ends every actor; its worker processes end with it."""
        with self._lock:
            self._is_over = True
            for node in self.nodes:
                if node.error is None:
                    self._end(node, WorkerCrashed(f"{node} was closed"))

    def _check_open(self) -> None:
        if self._is_over:  # by another thread
            raise WorkerError("the nodes were ended meanwhile")
        if not cluster.ray().is_initialized():
            raise WorkerError("the connection to Ray was shut down meanwhile")

    def _end(self, node: Node, error: WorkerError) -> None:
        """Ends an actor, by force."""
        if cluster.ray().is_initialized():  # or it would be begun anew
            with contextlib.suppress(Exception):
                cluster.ray().kill(node.actor)
        self._give_up(node, error)

    def _give_up(self, node: Node, error: WorkerError) -> None:
        """Nothing comes any more of what a node was asked."""
        with self._lock:
            if node.error is None:
                node.error = error
            while node.asked:
                node.asked.popleft().asked.end(error=strip_traceback(node.error))
        self._bell.ring()

    def _started(self, index: int) -> Node:
        """An actor that Ray is to place; it takes requests already."""
        others = [node.node_id for node in self.nodes if node.index != index and node.state != "gone"]
        machine, workers = self._placement.choose(others), self._workers[index]
        options = self._placement.options(machine)
        actor = cluster.ray().remote(concurrency_groups={ASIDE: 1})(NodeActor).options(**options).remote(workers.start)
        found = (machine.node_id, machine.address) if machine else ("", "")
        return Node(index, workers, actor, self.noun, *found)

    def _build(self, node: Node, *args: Any) -> Future:
        request = pickling.dumps(Call(BUILD, (get_import_path(), *self._parts[node.index], *args)))
        limit = self._limit()
        return self._ask(node, BUILD, request, [self._settings], None if limit is None else PLACING + limit)

    def _limit(self) -> float | None:
        """Seconds that a node has to answer."""
        return None if self.timeout is None else 2 * self.timeout + MENDING

    def _ask(self, node: Node, method: str, request: bytes, shared: list[Any], limit: float | None) -> Future:
        asked = Future(node.index, method)
        with self._lock:
            if node.error is not None:
                asked.end(error=strip_traceback(node.error))
                return asked
            if not node.asked:
                node.since = time.monotonic()
            reference = node.actor.call.remote(request, *shared)
            node.asked.append(Request(reference, reference.future(), asked, limit))
            node.asked[-1].reply.add_done_callback(self._bell.ring)
        return asked

    def values(self, asked: Sequence[Future], *, fails_fast: bool = False) -> list[Any]:
        """Waits for what was asked; raises what the first of them has failed with, once all, or one, is over."""
        self.settle(asked, fails_fast=fails_fast)
        for each in asked:
            if each.error is not None:
                raise each.error
        return [each.value for each in asked]

    def _awaited(self, asked: Sequence[Future], n: int | None, fails_fast: bool) -> list[Node]:
        """Whom `settle` has to wait for; by one look at the clock, as the last deadline may pass at any moment."""
        self._check_open()
        self._take()
        self._prolong()
        if fails_fast and any(each.error for each in asked):
            return []
        if sum(each.is_over for each in asked) >= (len(asked) if n is None else n):
            return []
        indexes = {each.index for each in asked if not each.is_over}
        with self._lock:
            return [node for node in self.nodes if node.index in indexes and node.asked and not node.is_overdue()]

    def _wait(self, nodes: Sequence[Node], rings: SimpleQueue[None]) -> None:
        """Until something comes, or the first of these is overdue; warns of those that are long to be placed."""
        with self._lock:
            ends = [node.since + limit for node in nodes if node.asked and (limit := node.asked[0].limit) is not None]
            ends += [node.waited + PLACING for node in nodes if not node.is_built()]
        _await(rings, max(0.0, min([LOOKING, *(end - time.monotonic() for end in ends)])))
        now = time.monotonic()
        with self._lock:
            unplaced = [node for node in nodes if not node.is_built() and now >= node.waited + PLACING]
        for node in unplaced:
            node.waited = now
            logger.warning("%s", self._unplaced(node, now - node.since))

    def _prolong(self) -> None:
        """Gives a node that has answered its time once more: to bring a long reply to this machine takes its own."""
        with self._lock:
            late = {node.asked[0].reference: node for node in self.nodes
                    if node.is_overdue() and not node.has_answered}  # fmt: skip
            if late:
                there, _ = cluster.ray().wait(list(late), num_returns=len(late), timeout=0.0, fetch_local=False)
                for reference in there:
                    late[reference].since, late[reference].has_answered = time.monotonic(), True

    def _all_over(self, asked: Sequence[Future]) -> bool:
        """Whether all that was asked is over, with what has come."""
        self._take()
        return all(each.is_over for each in asked)

    def _take(self) -> None:
        """Takes the replies that are there."""
        for node in self.nodes:
            while self._receive(node):
                pass

    def _receive(self, node: Node) -> bool:
        """Takes the reply to what a node was asked first, if it is there; whether it was."""
        with self._lock:
            if not (node.asked and node.asked[0].reply.done()):
                return False
            with defer_interrupt():
                reply, columns = self._reply(node)
                if node.error is None:
                    self._end_first(node, reply, columns)
        return True

    def _end_first(self, node: Node, reply: Any, columns: Columns) -> None:
        """What a node was asked first is over."""
        asked = node.asked.popleft().asked
        node.since, node.is_late, node.has_answered = time.monotonic(), False, False
        if isinstance(reply, Exception):
            asked.end(error=reply)
        elif not isinstance(reply, Result):
            asked.end(error=self._failure(node, asked, *reply))
        else:
            value, node.report = reply.value
            if asked.label == BUILD:
                self._placed(node, *value)
            asked.end(value._replace(columns=columns) if columns else value)

    def _reply(self, node: Node) -> tuple[Any, Columns]:
        """What a node has replied, or the exception to raise when just that is lost."""
        try:
            data, columns = node.asked[0].reply.result()
            return pickling.loads(data), columns
        except Exception as error:  # of Ray: it says why there is none
            if cluster.is_death(error):
                self._give_up(node, self._gone(node, error))
                return None, {}
            return self._lost(node, error), {}

    def _placed(self, node: Node, node_id: str, pid: int) -> None:
        machine = cluster.machines().get(node_id)
        node.node_id, node.pid, node.address = node_id, pid, machine.address if machine else "unknown"

    def _failure(self, node: Node, asked: Future, worker_index: int, failure: Failure) -> BaseException:
        """What to raise for what a node, or a worker of it, has raised."""
        error = failure.to_exception(worker_index, asked.label)
        where = self._where(node)
        if isinstance(error, WorkerError):
            error.args, error.worker_index = (f"{where}: {error}",), worker_index
        else:
            failures.add_note(error, where)
        return error

    def _where(self, node: Node) -> str:
        """How what happened on a node is described."""
        return f"on {node}, whose worker 0 is worker {node.workers.start} of all"

    def _held(self, node: Node) -> str:
        """What is gone with a node."""
        return f"workers {node.workers.start} to {node.workers.stop - 1}"

    def _gone(self, node: Node, error: Exception) -> WorkerError:
        """The error that says how a node ended."""
        label = node.asked[0].asked.label
        gone = WorkerCrashed(f"{node} is gone, with {self._held(node)}; last request: {label}", node.workers.start)
        gone.__cause__ = error.with_traceback(None)
        return gone

    def _lost(self, node: Node, error: Exception) -> Exception:
        """What to raise for a reply that does not come from a node that is there."""
        text = f"the reply of {node} to {node.asked[0].asked.label!r} is lost"
        lost: Exception = WorkerError(f"{text}: {error}", node.workers.start)
        if cluster.is_full(error):
            lost = OutOfMemoryError(f"{text}: its machine's object store is full: {error}")
        lost.__cause__ = error.with_traceback(None)
        return lost

    def _late(self, node: Node) -> WorkerTimeout:
        request = node.asked[0]
        assert request.limit is not None
        late = f"no reply within {request.limit} s to {request.asked.label!r} from {node}"
        return WorkerTimeout(late if node.is_built() else self._unplaced(node, request.limit), node.workers.start)

    def _unplaced(self, node: Node, seconds: float) -> str:
        return (f"{node} was not placed and built within {seconds:.1f} s; it needs {self._placement}, "
                f"and free are {cluster.ray().available_resources()}")  # fmt: skip
