"""Infos of single environments as one dict of arrays, put together by gymnasium itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from rlstructs.envs.columns import Outcome


def infos_of_all(env: VectorEnv, outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """A row for each environment of a vectorised one."""
    return _together(env, range(env.num_envs), outcomes)


def infos_of_some(envs: np.ndarray, outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """A row for each of these environments, and `env_id`, which they are."""
    batch = VectorEnv()
    batch.num_envs = envs.size
    infos = _together(batch, {env: row for row, env in enumerate(envs.tolist())}, outcomes)
    infos["env_id"] = envs
    return infos


def _together(batch: VectorEnv, rows: Sequence[int] | dict[int, int], outcomes: Iterable[Outcome]) -> dict[str, Any]:
    infos: dict[str, Any] = {}
    for outcome in outcomes:
        for env, info in outcome.infos:
            infos = batch._add_info(infos, info, rows[env])
    return infos
