"""Replay memories with skrl's interface, the same in `rlstructs.memories.torch`, `.jax` and `.warp`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlstructs.memories import jax, torch, warp

_EXPORTS = {"jax": "jax", "torch": "torch", "warp": "warp"}

__all__ = ["jax", "torch", "warp"]

if not TYPE_CHECKING:

    def __getattr__(name):
        if name not in _EXPORTS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(f"{__name__}.{_EXPORTS[name]}")

    def __dir__():
        return __all__
