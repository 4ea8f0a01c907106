"""Sets up every worker before it makes the user's objects.

Workers take over settings of numpy, torch, jax and gymnasium that change numbers, warnings or logs, and the
environments that the program registered with gymnasium.

The trainer reads the settings of each library that it has loaded; a worker writes them when it loads the library too,
which may be never. Everything else is for `init_worker`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import operator
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import cloudpickle

from rlstructs.errors import SpecError
from rlstructs.workers import start
from rlstructs.workers.pickling import dumps, loads
from rlstructs.workers.settings import Setting, Table, after_import, read_settings, write_settings

# The fields of a spec that may be "module:attribute".
ENTRY_POINTS = ("entry_point", "vector_entry_point")


@dataclass(frozen=True)
class Registered:
    """The environments that a process has registered.

    Attributes:
        specs: gymnasium's.
        named: objects of the main script that specs name, by name; they are sent with the specs.
    """

    specs: list[Any] = field(default_factory=list)
    named: dict[str, Any] = field(default_factory=dict)


class DeferredEntryPoint:
    """An entry point that is unpickled when its environment is made.

    A worker therefore imports no other environments.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return DeferredEntryPoint, (self._data,)

    def __deepcopy__(self, memo: Any) -> DeferredEntryPoint:
        return self  # gymnasium deep-copies specs; functions and classes stay the same, and so does this

    @functools.cached_property
    def _value(self) -> Any:
        """The entry point, unpickled once, so that its state is kept between environments."""
        return loads(self._data)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Makes the environment."""
        return self._value(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._value, name)  # gymnasium reads the `metadata` of a class before it calls it


def read_registry() -> Registered:
    """Reads the registrations of this process that can be pickled."""
    registration = sys.modules.get("gymnasium.envs.registration")
    if registration is None:
        return Registered()
    named: dict[str, Any] = {}
    specs = [_resolve(spec, named) for spec in list(registration.registry.values())]
    if not _is_picklable((specs, named)):  # leave out those that cannot be sent
        specs = [spec for spec in specs if _is_picklable(spec)]
        named = {name: value for name, value in named.items() if _is_picklable(value)}
    return Registered(specs, named)


def register_envs(registered: Registered) -> None:
    """Registers environments in this process.

    Replaces gymnasium's own ids, and keeps all other known ids.
    """
    if not registered.specs:
        return
    # Modules that are imported later may register these ids again.
    warnings.filterwarnings("ignore", ".*Overriding environment")
    from gymnasium.envs.registration import registry

    for spec in registered.specs:
        if spec.id not in registry or _is_gymnasiums(registry[spec.id]):
            registry[spec.id] = spec


def _is_gymnasiums(spec: Any) -> bool:
    return isinstance(spec.entry_point, str) and spec.entry_point.startswith("gymnasium.")


def _resolve(spec: Any, named: dict[str, Any]) -> Any:
    """Returns the spec, or a copy, with entry points that workers can find.

    Entry points in the main script stay text, and the objects that they and the wrappers name are added to `named`.
    Those in a module that is pickled by value (`cloudpickle.register_pickle_by_value`) are replaced by the objects.
    """
    for wrapper in getattr(spec, "additional_wrappers", ()):
        _resolve_entry_point(wrapper.entry_point, named)
    resolved = spec
    for name in ENTRY_POINTS:
        entry_point = getattr(spec, name, None)
        value = _resolve_entry_point(entry_point, named)
        if value is not entry_point:
            resolved = copy.copy(spec) if resolved is spec else resolved
            setattr(resolved, name, value)
    return resolved


def _resolve_entry_point(entry_point: Any, named: dict[str, Any]) -> Any:
    """Returns what to send for an entry point.

    If it names an object of the main script, adds that object to `named`.
    """
    if callable(entry_point) and not isinstance(entry_point, DeferredEntryPoint) and not _is_in_script(entry_point):
        try:
            return DeferredEntryPoint(dumps(entry_point))
        except Exception:  # `_is_picklable` will leave its spec out
            return entry_point
    if not isinstance(entry_point, str):
        return entry_point
    module_name, _, name = entry_point.partition(":")
    is_script = module_name == "__main__"
    if not name or not (is_script or _is_by_value(module_name)):
        return entry_point
    try:
        value = getattr(importlib.import_module(module_name), name)
    except Exception:  # gymnasium raises it when somebody makes this environment
        return entry_point
    if is_script:
        named[name] = value
        return entry_point
    return value


def _is_in_script(entry_point: Any) -> bool:
    return getattr(entry_point, "__module__", "__main__") == "__main__"


def _is_by_value(module_name: str) -> bool:
    """Whether cloudpickle sends the code of a module.

    It does if the module or its package was registered for that.
    """
    parts = module_name.split(".")
    packages = {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
    return bool(packages & cloudpickle.list_registry_pickle_by_value())


def _is_picklable(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


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
    registered: Registered = field(default_factory=read_registry)

    def __call__(self, index: int) -> None:
        """Sets up the worker with this index."""
        after_import("torch", _use_one_thread)
        for name, value in XLA_VARIABLES.items():
            os.environ.setdefault(name, value)
        write_libraries(self.libraries)
        # Torch warns about its own code when it unpickles quantised tensors; the trainer's filters do not cover that.
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning, r"torch\.")
        register_envs(self.registered)
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
