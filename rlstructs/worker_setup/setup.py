"""Sets up every worker before it makes anything of the user's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlstructs.errors import SpecError
from rlstructs.worker_setup import registry
from rlstructs.worker_setup.library_settings import read_libraries, write_libraries
from rlstructs.worker_setup.registry import Registered
from rlstructs.workers import start
from rlstructs.workers.settings.on_import import after_import


@dataclass(frozen=True)
class WorkerSetup:
    """Copies the trainer's settings and registrations to a worker, and seeds its global random streams; picklable.

    Args:
        seed: called with the index of the worker; seeds the streams.
        libraries: the settings of libraries.
        registered: the registered environments.
    """

    seed: Callable[[int], None]
    libraries: dict[str, dict[str, bytes]] = field(default_factory=read_libraries)
    registered: Registered = field(default_factory=registry.read_registry)

    def __call__(self, index: int) -> None:
        """Sets up the worker with this index."""
        after_import("torch", _use_one_thread)
        write_libraries(self.libraries)
        # Torch warns about its own code when it unpickles quantised tensors; the trainer's filters do not cover that.
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning, r"torch\.")
        registry.register(self.registered)
        self.seed(index)


def _use_one_thread() -> None:
    """Sets one torch thread: W workers with a thread for each core each would compete for the cores."""
    import torch

    torch.set_num_threads(1)


def check_init_worker(init_worker: Callable[[int], object] | None) -> Callable[[int], object] | None:
    """Returns the function or None; raises TypeError for anything else."""
    if init_worker is None or callable(init_worker):
        return init_worker
    raise TypeError(f"init_worker must be a function, which is called with a worker's index, got {init_worker!r}")


def check_start_method(start_method: Any) -> None:
    """Raises SpecError unless this is the name of a start method, or None for the default."""
    try:
        start.check_start_method(start_method)
    except ValueError as error:
        raise SpecError(str(error)) from None
