"""Sets up every worker before it makes anything of the user's.

Settings of numpy, torch, gymnasium, jax and warp, which workers take over from the trainer.

The trainer reads the settings of each library that it has loaded; a worker writes them when it loads the library too,
which may be never. Three kinds are left out: torch's default device, because workers compute on the host by default;
torch's number of threads, which is one; and settings of a `with` block, such as `torch.no_grad`.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlstructs.errors import SpecError
from rlstructs.worker_setup import registry
from rlstructs.worker_setup.registry import Registered
from rlstructs.workers import start
from rlstructs.workers.settings import Setting, Table, after_import, read_settings, write_settings

# How float32 is multiplied: older names before newer ones, which exist from torch 2.9 on. Each follows from those
# before it unless it is set itself, and torch refuses to set older ones where newer ones differ.
OLDER_PRECISIONS = ("backends.cuda.matmul.allow_tf32", "backends.cudnn.allow_tf32")
PRECISIONS = ("cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn", "mkldnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
NEWER_PRECISIONS = ("backends.fp32_precision", *(f"backends.{name}.fp32_precision" for name in PRECISIONS))
# Other attributes of torch.
ATTRIBUTES = (
    "utils.deterministic.fill_uninitialized_memory",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_accumulation",
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.benchmark_limit",
    "backends.cudnn.deterministic",
    "backends.mkldnn.enabled",
    "backends.mkldnn.deterministic",
    "backends.opt_einsum.enabled",
    "backends.opt_einsum.strategy",
    "backends.quantized.engine",
)
# Kernels of attention; `torch.backends.cuda` has one function for each to read, and one to set, whether it is on.
ATTENTION = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
# Modules whose classes are among torch's safe globals wherever they are imported.
ADD_SAFE_GLOBALS = ("torch.", "tensordict.")
JAX = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_debug_nans",
    "jax_debug_infs",
    "jax_disable_jit",
    "jax_enable_checks",
    "jax_log_compiles",
    "jax_traceback_filtering",
)


def read_libraries() -> dict[str, dict[str, bytes]]:
    """Reads the settings of each library that this process has loaded."""
    return {name: read_settings(table()) for name, table in TABLES.items() if name in sys.modules}


def write_libraries(values: dict[str, dict[str, bytes]]) -> None:
    """Writes settings that `read_libraries` returned, for each library when this process has loaded it."""
    for name, settings in values.items():
        after_import(name, partial(_write, name, settings))


def _write(name: str, settings: dict[str, bytes]) -> None:
    table = TABLES[name]()
    write_settings(table, {setting: data for setting, data in settings.items() if setting in table})


def numpy_settings() -> Table:
    """Settings of numpy: calculation, errors and printing."""
    import numpy as np

    return {
        "numpy.seterrcall": Setting(np.geterrcall, np.seterrcall),
        "numpy.seterr": Setting(np.geterr, _set_numpy_errors),
        "numpy.setbufsize": Setting(np.getbufsize, np.setbufsize),
        "numpy.set_printoptions": Setting(np.get_printoptions, _set_numpy_print),
    }


def _set_numpy_errors(modes: dict[str, Any]) -> None:
    import numpy as np

    if np.geterrcall() is None:  # the function or file could not be sent
        modes = {kind: "warn" if mode in ("call", "log") else mode for kind, mode in modes.items()}
    np.seterr(**modes)


def _set_numpy_print(options: dict[str, Any]) -> None:
    import numpy as np

    np.set_printoptions(**options)


def torch_settings() -> Table:
    """Settings of torch: calculation, checks, warnings and printing."""
    import torch

    printing: Any = torch._tensor_str.PRINT_OPTS
    invariants: Any = torch.sparse.check_sparse_tensor_invariants
    return {
        **_attributes(torch, OLDER_PRECISIONS),
        "torch.set_float32_matmul_precision": Setting(
            torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
        ),
        **_attributes(torch, (*NEWER_PRECISIONS, *ATTRIBUTES)),
        "torch.set_default_dtype": Setting(torch.get_default_dtype, torch.set_default_dtype),
        "torch.use_deterministic_algorithms": Setting(_determinism, lambda value: _set_determinism(*value)),
        "torch.set_flush_denormal": Setting(_flushes_denormals, torch.set_flush_denormal),
        "torch.autograd.set_detect_anomaly": Setting(_anomaly, lambda value: _set_anomaly(*value)),
        "torch.set_warn_always": Setting(torch.is_warn_always_enabled, torch.set_warn_always),
        "torch.set_printoptions": Setting(lambda: dict(vars(printing)), lambda value: vars(printing).update(value)),
        "torch.distributions": Setting.attribute(torch.distributions.Distribution, "_validate_args"),
        "torch.sparse": Setting(
            invariants.is_enabled, lambda value: invariants.enable() if value else invariants.disable()
        ),
        **dict(_newer_torch_settings(torch)),
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


def _newer_torch_settings(torch: Any) -> Iterator[tuple[str, Setting]]:
    """Yields settings whose functions only some releases of torch have."""
    cuda = torch.backends.cuda
    pairs = [(cuda, f"{kernel}_enabled", f"enable_{kernel}") for kernel in ATTENTION]
    pairs.append((torch.backends.mha, "get_fastpath_enabled", "set_fastpath_enabled"))
    for owner, read, write in pairs:
        if hasattr(owner, read):
            yield f"{owner.__name__}.{write}", Setting(getattr(owner, read), getattr(owner, write))
    if hasattr(torch.serialization, "get_safe_globals"):
        yield "torch.serialization.add_safe_globals", Setting(_safe_globals, torch.serialization.add_safe_globals)


def _safe_globals() -> list[Any]:
    """Classes that the program allows `torch.load` to read, without those that libraries add as they are imported.

    A worker would import these libraries to read the list; tensordict takes a second.
    """
    import torch

    found = torch.serialization.get_safe_globals()
    return [each for each in found if not getattr(each, "__module__", "").startswith(ADD_SAFE_GLOBALS)]


def _determinism() -> tuple[bool, bool]:
    import torch

    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_determinism(mode: bool, warn_only: bool) -> None:
    import torch

    torch.use_deterministic_algorithms(mode, warn_only=warn_only)


def _anomaly() -> tuple[bool, bool]:
    import torch

    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _set_anomaly(mode: bool, check_nan: bool) -> None:
    import torch

    torch.set_anomaly_enabled(mode, check_nan)


def _flushes_denormals() -> bool:
    """Whether this thread's processor rounds denormal numbers to 0; torch has no function that tells."""
    return sys.float_info.min * float("0.5") == 0.0


def gymnasium_settings() -> Table:
    """Settings of gymnasium: its log level."""
    from gymnasium import logger

    return {"gymnasium.logger.min_level": Setting.attribute(logger, "min_level")}


def jax_settings() -> Table:
    """Settings of jax: calculation, checks and messages."""
    import jax

    config: Any = jax.config
    return {
        name: Setting(partial(getattr, config, name), partial(config.update, name))
        for name in JAX
        if hasattr(config, name)
    }


def warp_settings() -> Table:
    """Settings of warp: compilation, checks and messages."""
    import warp

    plain = (bool, int, float, str, type(None))
    names = [name for name, value in vars(warp.config).items() if name[0] != "_" and isinstance(value, plain)]
    return {f"warp.config.{name}": Setting.attribute(warp.config, name) for name in names if name != "version"}


# By module name.
TABLES: dict[str, Callable[[], Table]] = {
    "numpy": numpy_settings,
    "torch": torch_settings,
    "gymnasium": gymnasium_settings,
    "jax": jax_settings,
    "warp": warp_settings,
}


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
