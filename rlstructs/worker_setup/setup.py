"""Sets up every worker before it makes the user's objects.

Workers take over settings of numpy, torch, jax and gymnasium that change numbers, warnings or logs.

The trainer reads the settings of each library that it has loaded; a worker writes them when it loads the library too,
which may be never. Everything else is for `init_worker`.
"""

from __future__ import annotations

import contextlib
import operator
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlstructs.errors import SpecError
from rlstructs.worker_setup import registry
from rlstructs.worker_setup.registry import Registered
from rlstructs.workers import start
from rlstructs.workers.settings import Setting, Table, after_import, read_settings, write_settings

# The precision of float32 products: older names before newer ones, which exist from torch 2.9 on. Unless it is set
# itself, each follows from the ones before it, and torch refuses to set older ones where newer ones differ.
OLDER_PRECISIONS = ("backends.cuda.matmul.allow_tf32", "backends.cudnn.allow_tf32")
PRECISIONS = ("cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn", "mkldnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
NEWER_PRECISIONS = ("backends.fp32_precision", *(f"backends.{name}.fp32_precision" for name in PRECISIONS))
JAX = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable")
# What has XLA use one thread on the CPU, in processes whose environment does not say otherwise.
XLA_VARIABLES = {"NPROC": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
# What determinism is made of besides `use_deterministic_algorithms`.
ATTRIBUTES = (
    "utils.deterministic.fill_uninitialized_memory",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
)


def read_libraries() -> dict[str, dict[str, bytes]]:
    """Reads the settings of each library that this process has loaded."""
    return {name: read_settings(table()) for name, table in TABLES.items() if name in sys.modules}


def write_libraries(values: dict[str, dict[str, bytes]]) -> None:
    """Writes settings that `read_libraries` returned, for each library once this process loads it."""
    for name, settings in values.items():
        after_import(name, partial(_write, name, settings))


def _write(name: str, settings: dict[str, bytes]) -> None:
    table = TABLES[name]()
    write_settings(table, {setting: data for setting, data in settings.items() if setting in table})


def numpy_settings() -> Table:
    """Settings of numpy: what it does about errors."""
    import numpy as np

    return {
        "numpy.seterrcall": Setting(np.geterrcall, np.seterrcall),
        "numpy.seterr": Setting(np.geterr, _set_numpy_errors),
    }


def _set_numpy_errors(modes: dict[str, Any]) -> None:
    import numpy as np

    if np.geterrcall() is None:  # the function or file could not be sent
        modes = {kind: "warn" if mode in ("call", "log") else mode for kind, mode in modes.items()}
    np.seterr(**modes)


def torch_settings() -> Table:
    """Settings of torch: dtype, precision, determinism and warnings."""
    import torch

    return {
        **_attributes(torch, OLDER_PRECISIONS),
        "torch.set_float32_matmul_precision": Setting(
            torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
        ),
        **_attributes(torch, (*NEWER_PRECISIONS, *ATTRIBUTES)),
        "torch.set_default_dtype": Setting(torch.get_default_dtype, torch.set_default_dtype),
        "torch.use_deterministic_algorithms": Setting(_determinism, lambda value: _set_determinism(*value)),
        "torch.set_flush_denormal": Setting(_flushes_denormals, torch.set_flush_denormal),
        "torch.set_warn_always": Setting(torch.is_warn_always_enabled, torch.set_warn_always),
    }


def _attributes(torch: Any, names: Iterable[str]) -> dict[str, Setting]:
    """Settings for those of these attributes that this release of torch has."""
    found = {}
    for name in names:
        path, _, attribute = name.rpartition(".")
        with contextlib.suppress(AttributeError, RuntimeError):  # RuntimeError: other settings forbid reading it
            owner = operator.attrgetter(path)(torch)
            getattr(owner, attribute)
            found[f"torch.{name}"] = Setting.attribute(owner, attribute)
    return found


def _determinism() -> tuple[bool, bool]:
    import torch

    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_determinism(mode: bool, warn_only: bool) -> None:
    import torch

    torch.use_deterministic_algorithms(mode, warn_only=warn_only)


def _flushes_denormals() -> bool:
    """Whether this thread's processor rounds denormal numbers to 0.

    torch has no function that tells.
    """
    return sys.float_info.min * float("0.5") == 0.0


def gymnasium_settings() -> Table:
    """Settings of gymnasium: its log level."""
    from gymnasium import logger

    return {"gymnasium.logger.min_level": Setting.attribute(logger, "min_level")}


def jax_settings() -> Table:
    """Settings of jax: the dtypes, the precision and the random streams of its numbers."""
    import jax

    config: Any = jax.config
    return {name: Setting(partial(getattr, config, name), partial(config.update, name)) for name in JAX}


# By module name.
TABLES: dict[str, Callable[[], Table]] = {
    "numpy": numpy_settings,
    "torch": torch_settings,
    "gymnasium": gymnasium_settings,
    "jax": jax_settings,
}


@dataclass(frozen=True)
class WorkerSetup:
    """Copies the trainer's settings and registrations to a worker; picklable.

    Also seeds the worker's global random streams.

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
        for name, value in XLA_VARIABLES.items():
            os.environ.setdefault(name, value)
        write_libraries(self.libraries)
        # Torch warns about its own code when it unpickles quantised tensors; the trainer's filters do not cover that.
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning, r"torch\.")
        registry.register(self.registered)
        self.seed(index)


def _use_one_thread() -> None:
    """Makes torch use one thread.

    W workers with a thread for each core would compete for the cores.
    """
    import torch

    torch.set_num_threads(1)


def check_init_worker(init_worker: Callable[[int], object] | None) -> Callable[[int], object] | None:
    """Returns the function or None; raises TypeError for anything else."""
    if init_worker is None or callable(init_worker):
        return init_worker
    raise TypeError(f"init_worker must be a function, which is called with a worker's index, got {init_worker!r}")


def check_start_method(start_method: Any) -> None:
    """Raises SpecError unless this is a start method's name or None.

    None stands for the default.
    """
    try:
        start.check_start_method(start_method)
    except ValueError as error:
        raise SpecError(str(error)) from None
