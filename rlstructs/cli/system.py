"""What a bug report needs: versions, platform, cores, memory."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator

from rlstructs import __version__
from rlstructs.workers.limits import available_bytes, n_cores
from rlstructs.workers.start import default_start_method

PACKAGES = ("torch", "numpy", "gymnasium", "jax", "warp-lang", "cloudpickle", "h5py", "matplotlib", "ray", "minari")


def describe_system() -> Iterator[str]:
    """Yields a line for each thing; imports none of the packages but torch, which knows of CUDA."""
    yield f"rlstructs: {__version__}"
    yield f"python: {platform.python_version()} ({platform.python_implementation()})"
    for package in PACKAGES:
        try:
            yield f"{package}: {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"{package}: not installed"
    yield f"platform: {platform.platform()}"
    yield f"cores: {n_cores()} of {os.cpu_count()}"
    available = available_bytes()
    yield f"memory available: {'unknown' if available is None else f'{available / 1e9:,.1f} GB'}"
    yield f"start method: {default_start_method()}"
    yield f"CUDA available: {_cuda()}"


def _cuda() -> str:
    try:
        import torch

        if not torch.cuda.is_available():
            return "no"
        return f"yes, {torch.cuda.device_count()} x {torch.cuda.get_device_name()}, version {torch.version.cuda}"
    except Exception as error:
        return f"unknown, {type(error).__name__}: {error}"
