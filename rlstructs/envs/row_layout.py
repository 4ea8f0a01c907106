"""The keys, shapes and dtypes of the rows that `GymEnv` and `GymVectorEnv` fill."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import gymnasium
import numpy as np

from rlstructs.envs.action_reader import ActionReader
from rlstructs.envs.info_columns import PREFIX, InfoColumns
from rlstructs.envs.observation_columns import ObservationRows
from rlstructs.envs.spaces import list_leaves
from rlstructs.errors import SpecError
from rlstructs.shared.packing import Packing

# Keys that every observation has, beside those of the environment's own observation space.
FLAGS = ("done", "terminated", "truncated", "initial_state")
RAW_REWARD = "raw_reward"  # where `NormalizeReward` keeps the reward before normalisation
RESERVED = ("reward", RAW_REWARD, *FLAGS, "last_action")


class RowLayout:
    """How the rows of gymnasium environments are made up.

    A row holds the entries of the observation space, then the reward, the flags, the last action and the infos.

    Args:
        observation_space, action_space: of one environment.
        keep_float64: whether float64 columns stay float64.
        infos: the columns of infos.
        clip_actions: whether environments get actions clipped to the bounds of their Box.

    Attributes:
        leaves: of the observation space, by key.
        actions: reads the agent's actions.
        last_actions: leaves of the action space, by the key of their last action.
        packing: of all keys.

    Raises:
        SpecError: a space is not supported, or an entry has a reserved name.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        keep_float64: bool,
        infos: InfoColumns,
        clip_actions: bool = False,
    ) -> None:
        self.leaves = {leaf.name: leaf for leaf in list_leaves(observation_space, "observation", keep_float64)}
        self.actions = ActionReader(action_space, keep_float64, clip_actions)
        refuse_reserved(self.leaves)
        self.last_actions = {f"last_{ActionReader.key(leaf)}": leaf for leaf in self.actions.leaves}
        specs = {key: (leaf.row_shape, leaf.dtype) for key, leaf in self.leaves.items()}
        specs["reward"] = (), np.dtype(np.float32)
        specs |= {flag: ((), np.dtype(bool)) for flag in FLAGS}
        specs |= {key: (leaf.shape, leaf.dtype) for key, leaf in self.last_actions.items()}
        self.packing = Packing(specs | infos.specs)

    def allocate(self, n_envs: int) -> tuple[ObservationRows, ObservationRows]:
        """Allocates rows for steps, and rows for first observations, whose `initial_state` is True."""
        after, fresh = (ObservationRows(self.leaves, self.packing, n_envs) for _ in range(2))
        fresh.view["initial_state"][:] = True
        return after, fresh


def is_reserved(key: str) -> bool:
    """Whether a key is one that this library adds to the environment's observation."""
    return key.split("/")[0] in RESERVED or key.startswith(PREFIX)


def refuse_reserved(keys: Iterable[str]) -> None:
    """Raises SpecError if an entry of an observation has a reserved name."""
    for key in keys:
        if is_reserved(key):
            raise SpecError(f"observation: an entry may not be called {key!r}; reserved are {(*RESERVED, PREFIX)}")
