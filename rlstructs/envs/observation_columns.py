"""Gathers the observations of E environments into columns, and lays out their rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from rlstructs.envs.action_reader import ActionReader
from rlstructs.envs.env_infos import PREFIX, InfoColumns
from rlstructs.envs.spaces import FEW, Column, Leaf, example_value, list_leaves
from rlstructs.errors import SpecError
from rlstructs.shared.layout import Packing, Rows


class ObservationRows:
    """Rows for E observations, which every step overwrites.

    Args:
        leaves: key -> its leaf; other keys are for the owner to write.
        packing: layout of all keys.
        n_envs: E.

    Attributes:
        rows: all E.
        view: key -> a view of its values.
    """

    def __init__(self, leaves: Mapping[str, Leaf], packing: Packing, n_envs: int) -> None:
        self._n_envs, self._leaves = n_envs, leaves
        self.rows = Rows.zeros(packing, n_envs)
        self.view = self.rows.arrays()
        # A key with a block of its own is filled in place; one that lies in a record is copied into it.
        self._columns = [
            (Column(leaf, n_envs, self.view[key]), None)
            if key in self.rows.blocks
            else (Column(leaf, n_envs), self.view[key])
            for key, leaf in leaves.items()
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        # Rebuilt, also by `copy.deepcopy`: copied views would not be views of the copied rows.
        gathered = [column.array for column, _ in self._columns]
        return _rebuild_rows, (self._leaves, self.rows.packing, self._n_envs, self.rows.blocks, gathered)

    def example(self) -> Rows:
        """E first observations as `reset` would return them, made from the spaces alone."""
        rows = self.rows.take(np.arange(self._n_envs))
        arrays = rows.arrays()
        for key, leaf in self._leaves.items():
            arrays[key][...] = example_value(leaf)
        return rows

    def fill(self, observations: Sequence[Any], environments: Iterable[object] | None = None) -> Rows:
        """Writes every leaf as `Column.fill` does, and returns the rows.

        They are valid until the next call.
        """
        n = len(observations)
        for column, record in self._columns:
            rows = column.fill(observations, environments)
            if record is not None:
                record[:n] = rows
        return self.rows if n == self._n_envs else self.rows.take(slice(n))

    def fill_batch(self, batch: Any, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes every leaf of E batched observations to its key's array."""
        for key, leaf in self._leaves.items():
            got = leaf.read(f"environment: {leaf.describe()}", batch, (self._n_envs, *leaf.shape))
            _copy(arrays[key], got.reshape(self._n_envs, *leaf.row_shape))


def _rebuild_rows(
    leaves: Mapping[str, Leaf],
    packing: Packing,
    n_envs: int,
    blocks: Mapping[str, np.ndarray],
    gathered: Sequence[np.ndarray],
) -> ObservationRows:
    rebuilt = ObservationRows(leaves, packing, n_envs)
    for name, block in blocks.items():
        rebuilt.rows.blocks[name][...] = block
    for (column, record), array in zip(rebuilt._columns, gathered, strict=True):
        if record is not None:  # the others are the blocks
            column.array[...] = array
    return rebuilt


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copies rows; fast also where the source lies column by column in memory."""
    if source.ndim == 2 and source.shape[1] <= FEW and source.strides[0] < source.strides[1]:
        for column in range(source.shape[1]):  # numpy would copy row by row, and rows are short
            target[:, column] = source[:, column]
    else:
        np.copyto(target, source, casting="unsafe")


# Keys that every observation has, beside those of the environment's own observation space.
FLAGS = ("done", "terminated", "truncated", "initial_state")
RAW_REWARD = "raw_reward"  # where `NormalizeReward` keeps the reward before normalisation
RESERVED = ("reward", RAW_REWARD, *FLAGS, "last_action")


class RowLayout:
    """The layout of the rows of gymnasium environments.

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
