"""Makes the errors that the trainer raises for failures of nodes."""

from __future__ import annotations

from rlstructs.distributed import cluster
from rlstructs.distributed.actor import NodeFailure
from rlstructs.distributed.node_handle import Node
from rlstructs.errors import OutOfMemoryError, WorkerCrashed, WorkerError
from rlstructs.workers import failures


def make_job_error(node: Node, place: str, reply: NodeFailure) -> BaseException:
    """Makes the error for a reply that says that a node's oldest request failed; `place` says where: "on node 0"."""
    error = reply.failure.to_exception(reply.worker_index, node.requests[0].asked.label)
    if isinstance(error, WorkerError):
        error.args, error.worker_index = (f"{place}: {error}",), reply.worker_index
    else:
        failures.add_note(error, place)
    return error


def make_crash_error(node: Node, losses: str, error: Exception) -> WorkerError:
    """Makes the error for a node that is gone, from Ray's error; `losses` says what is gone with it."""
    label = node.requests[0].asked.label
    crashed = WorkerCrashed(f"{node} is gone, with {losses}; last request: {label}", node.workers.start)
    crashed.__cause__ = error.with_traceback(None)
    return crashed


def make_loss_error(node: Node, error: Exception) -> Exception:
    """Makes the error for a lost reply of a node that still runs, from Ray's error."""
    text = f"the reply of {node} to {node.requests[0].asked.label!r} is lost"
    lost: Exception = WorkerError(f"{text}: {error}", node.workers.start)
    if cluster.is_full(error):
        lost = OutOfMemoryError(f"{text}: its machine's object store is full: {error}")
    lost.__cause__ = error.with_traceback(None)
    return lost
