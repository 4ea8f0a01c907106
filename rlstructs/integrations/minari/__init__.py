"""Minari: its datasets from rollouts, and trajectories from its datasets.

from rlstructs import RL_Batcher
from rlstructs.integrations.minari import iterate_minari, to_minari

with RL_Batcher.make("Pendulum-v1", n_envs=16, n_workers=2, n_timesteps=100, seed=0) as batcher:
    dataset = to_minari("pendulum/random-v0", batcher.rollouts(n_steps=100_000), env="Pendulum-v1")
for trajectories in iterate_minari(dataset, 16):
    print(trajectories.lengths)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlstructs.workers.public_names import export_lazily

if TYPE_CHECKING:
    from rlstructs.integrations.minari.episodes import from_minari, iterate_minari
    from rlstructs.integrations.minari.writing import to_minari

_EXPORTS = {"from_minari": "episodes", "iterate_minari": "episodes", "to_minari": "writing"}

__all__ = ["from_minari", "iterate_minari", "to_minari"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = export_lazily(__name__, _EXPORTS)
