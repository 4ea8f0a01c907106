"""Replay memories with skrl's interface, the same in `rlstructs.memories.torch`, `.jax` and `.warp`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlstructs.workers.public_names import export_lazily

if TYPE_CHECKING:
    from rlstructs.memories import jax, torch, warp

__all__ = ["jax", "torch", "warp"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = export_lazily(__name__, {}, __all__)
