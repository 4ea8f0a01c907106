"""Adapters for programs that people already run.

Each module needs the package that it is named after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlstructs.workers.public_names import export_lazily

if TYPE_CHECKING:
    from rlstructs.integrations import logging, minari, pettingzoo, sb3, tianshou, torchrl

__all__ = ["logging", "minari", "pettingzoo", "sb3", "tianshou", "torchrl"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = export_lazily(__name__, {}, __all__)
