"""The errors that the trainer raises for what has happened on a node."""

from __future__ import annotations

from rlstructs.distributed import cluster
from rlstructs.distributed.node_handle import Node
from rlstructs.errors import OutOfMemoryError, WorkerCrashed, WorkerError
from workers import failures
from workers.failures import Failure


def make_job_error(node: Node, place: str, worker_index: int, failure: Failure) -> BaseException:
    """Makes the error for an exception of a node's job or of its worker, in the oldest request.

    Args:
        place: where it happened, such as "on node 0".
        worker_index: the index of the worker, counted over all nodes.
        failure: the exception.
    """
    error = failure.to_exception(worker_index, node.requests[0].asked.label)
    if isinstance(error, WorkerError):
        error.args, error.worker_index = (f"{place}: {error}",), worker_index
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
    """Makes the error for a lost reply of a node that is not gone, from Ray's error."""
    text = f"the reply of {node} to {node.requests[0].asked.label!r} is lost"
    lost: Exception = WorkerError(f"{text}: {error}", node.workers.start)
    if cluster.is_full(error):
        lost = OutOfMemoryError(f"{text}: its machine's object store is full: {error}")
    lost.__cause__ = error.with_traceback(None)
    return lost
