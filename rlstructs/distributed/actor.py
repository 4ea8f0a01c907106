"""What Ray runs: takes requests as bytes, answers with bytes and arrays, and lets no exception reach Ray.

    trainer                                          actor
    -------                                          -----
    call(Call("build", settings))  ───────────────>  makes a NodeJob, its workers start
    call(Call("rollout", ...))  ──────────────────>  one rollout of all its workers
           <── Result and its columns, or Failure ─

Bytes, because what Ray pickles it unpickles in its own way: classes of the script would come back as others, and
exceptions as its own. Arrays stay outside of them: they go through the object store without a copy more.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from rlstructs.distributed.node import NodeJob
from rlstructs.distributed.parts import Columns
from workers import messages
from workers.errors import RemoteTraceback, WorkerError
from workers.messages import RAISED, Call, Failure, Result

BUILD = "build"


class NodeActor:
    """One node.

    Args:
        first: index of its first worker, of all.
    """

    def __init__(self, first: int) -> None:
        self._first = first
        self._job: NodeJob | None = None

    def call(self, request: bytes, *shared: Any) -> tuple[bytes, Columns]:
        """Does what is asked.

        Args:
            request: a `Call`, pickled.
            shared: more arguments, from the object store.

        Returns:
            A `Result` of the value and of `NodeJob.report`, or a `Failure` with the worker's index before it, pickled;
            and the columns of a rollout.
        """
        columns: Columns = {}
        reply: Any
        try:
            call: Call = messages.loads(request)
            value: Any = self._build(*call.args) if call.method == BUILD else self._ask(call, shared)
            if call.method == "rollout":
                value, columns = value
            assert self._job is not None
            reply = Result((value, self._job.report()))
        except Exception as error:
            reply = self._failed(error)
        return messages.dumps(reply), columns

    def _build(self, path: list[str], settings: bytes, *args: Any) -> tuple[str, int]:
        """Makes the job; where this is: Ray's name of the machine, and the process."""
        import ray

        # What the trainer finds on its machine may be at the same place on this one, or not.
        sys.path.extend(folder for folder in path if folder not in sys.path)
        self._job = NodeJob(messages.loads(settings), *args)
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def _ask(self, call: Call, shared: tuple[Any, ...]) -> Any:
        return getattr(self._job, call.method)(*call.args, *shared)

    def _failed(self, error: Exception) -> tuple[int, Failure]:
        """Which worker of all it was, and what happened."""
        cause = error.__cause__
        if not isinstance(cause, RemoteTraceback):
            index = error.worker_index if isinstance(error, WorkerError) else None
            return self._first + (index or 0), Failure.of(error)
        # Of a worker of this node: its traceback is what the trainer should see, and not by which way it came.
        notes = getattr(error, "__notes__", [])
        if notes and notes[-1].startswith(RAISED):
            notes.pop()
        return self._first + cause.worker_index, Failure.of(error)._replace(text=cause.text)
