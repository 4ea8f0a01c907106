"""Beyond one machine: the batcher's interface over Ray. Needs the extra `ray`, which is imported when it is used.

    from rlstructs import RayBatcher

    with RayBatcher(128, create_agent, {}, create_env, {"n_envs": 8}, n_processes=64, seeds=0, n_nodes=4) as batcher:
        batcher.reset()
        batcher.execute()
        trajectories, n_running = batcher.get()

A *node* is here what one Ray actor runs: one `RL_Batcher`, with its worker processes and their shared memory. A *shard*
of a `RayReplay` is an actor that keeps the rows of some of the environments.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlstructs.distributed.batcher import RayBatcher
    from rlstructs.distributed.parts import Part
    from rlstructs.distributed.replay import RayReplay

_EXPORTS = {"Part": "parts", "RayBatcher": "batcher", "RayReplay": "replay"}

__all__ = ["Part", "RayBatcher", "RayReplay"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
