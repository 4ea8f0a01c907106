"""What Ray runs: takes requests as bytes, answers with bytes and arrays, and lets no exception reach Ray.

    trainer                                          actor
    -------                                          -----
    call(Call("build", settings))  ───────────────>  makes the job
    call(Call("rollout", ...))  ──────────────────>  calls this method of it
           <── Result and its columns, or Failure ─

Bytes, because what Ray pickles it unpickles in its own way: classes of the script would come back as others, and
exceptions as its own. Arrays stay outside of them: they go through the object store without a copy more.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

from workers import pickling
from workers.errors import RemoteTraceback, WorkerError
from workers.failures import RAISED, Failure
from workers.messages import Call, Result

BUILD = "build"
# Ray's name for what does not wait behind other requests.
ASIDE = "aside"

Columns = dict[str, np.ndarray]


class NodeActor:
    """One job; what it is built from has a method `build`, and it has a method `report`.

    Args:
        first: index of its first worker, of all.
    """

    def __init__(self, first: int) -> None:
        self._first = first
        self._job: Any = None

    def call(self, request: bytes, *shared: Any) -> tuple[bytes, Columns]:
        """Does what is asked.

        Args:
            request: a `Call`, pickled.
            shared: more arguments, from the object store.

        Returns:
            A `Result` of the value and of the job's `report`, or a `Failure` with the worker's index before it,
            pickled; and columns.
        """
        columns: Columns = {}
        reply: Any
        try:
            call: Call = pickling.loads(request)
            value: Any = self._build(*shared, *call.args) if call.method == BUILD else self._ask(call, shared)
            if has_columns(value):
                columns, value = value.columns, value._replace(columns={})
            reply = Result((value, self._job.report()))
        except Exception as error:
            reply = self._failed(error)
        return pickling.dumps(reply), columns

    def cut(self, number: int) -> None:
        """Has the job end what it runs, in another thread than `call`."""
        if self._job is not None:
            self._job.cut(number)

    def _build(self, settings: bytes, path: list[str], *args: Any) -> tuple[str, int]:
        """Makes the job; where this is: Ray's name of the machine, and the process."""
        import ray

        _take_path(path)
        self._job = pickling.loads(settings).build(*args)
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


def has_columns(value: Any) -> bool:
    """Whether a reply is a NamedTuple with a field `columns`, arrays that go through the object store."""
    return isinstance(value, tuple) and "columns" in getattr(value, "_fields", ())


def _take_path(path: list[str]) -> None:
    """Looks for modules where the trainer does, as far as these folders are on this machine.

    In the trainer's order, where it has the same Python: what Ray has added comes behind. Else behind what is here.
    """
    is_same = os.path.dirname(os.__file__) in path
    first, then = (path, sys.path) if is_same else (sys.path, path)
    here = [folder for folder in first if folder in sys.path or os.path.exists(folder)]
    sys.path[:] = here + [folder for folder in then if folder not in here]
