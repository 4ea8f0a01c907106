"""What every worker does first, before anything of the user's is there."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

from rlstructs.worker_setup import registry
from rlstructs.worker_setup.library_settings import read_libraries, write_libraries
from rlstructs.worker_setup.registry import Registered
from workers.settings.on_import import after_import


@dataclass(frozen=True)
class WorkerSetup:
    """Takes over what the trainer has set and registered, and seeds the global random streams; picklable.

    Args:
        seed: called with the index of the worker; seeds them.
    """

    seed: Callable[[int], None]
    libraries: dict[str, dict[str, bytes]] = field(default_factory=read_libraries)
    registered: Registered = field(default_factory=registry.registered)

    def __call__(self, index: int) -> None:
        """What the worker of this index does."""
        after_import("torch", _use_one_thread)
        write_libraries(self.libraries)
        # Torch warns of itself as it unpickles quantised tensors of an update; not what the trainer's filters are for.
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning, r"torch\.")
        registry.register(self.registered)
        self.seed(index)


def _use_one_thread() -> None:
    """W workers with a thread for each core would fight over the cores; a forked one has as many as the trainer."""
    import torch

    torch.set_num_threads(1)


def check_init_worker(init_worker: Callable[[int], object] | None) -> Callable[[int], object] | None:
    """What was given; raises TypeError unless it is a function, or None."""
    if init_worker is None or callable(init_worker):
        return init_worker
    raise TypeError(f"init_worker must be a function, which is called with a worker's index, got {init_worker!r}")
