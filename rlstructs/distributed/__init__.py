"""Batchers and memories over several machines, which Ray connects; needs the extra `ray`.

    from rlstructs import RayBatcher

    with RayBatcher(128, create_agent, {}, create_env, {"n_envs": 8}, n_processes=64, seeds=0, n_nodes=4) as batcher:
        batcher.reset()
        batcher.execute()
        trajectories, n_running = batcher.get()

A *node* is one Ray actor with its own worker processes and their shared memory. A *shard* of a `RayReplay` is an actor
that keeps the rows of some of the environments. Ray is imported when a batcher or a memory is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlstructs.workers.public_names import export_lazily

if TYPE_CHECKING:
    from rlstructs.distributed.batcher import RayBatcher
    from rlstructs.distributed.replay import RayReplay
    from rlstructs.distributed.transport import Part

_EXPORTS = {"Part": "transport", "RayBatcher": "batcher", "RayReplay": "replay"}

__all__ = ["Part", "RayBatcher", "RayReplay"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = export_lazily(__name__, _EXPORTS)
