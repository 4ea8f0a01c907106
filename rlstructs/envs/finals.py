"""The final observations of episodes, as a vector environment that resets in the same step gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlstructs.envs.spaces import Leaf
from rlstructs.errors import SpecError

# gymnasium's name, that of its earlier versions, and Stable-Baselines3's.
NAMES = ("final_obs", "final_observation", "terminal_observation")


def has_finals(infos: Any) -> bool:
    """Whether infos, whatever they are, hold final observations under a name of gymnasium's."""
    each = [infos] if isinstance(infos, Mapping) else infos if _are_many(infos) else []
    return any(info.get(name) is not None for info in each for name in NAMES[:2])


def finals_of(infos: Any, n_envs: int, name: str) -> Any:
    """The final observations: as one, as the space is batched, or an array or list of E.

    Args:
        infos: a dict, or one for each environment.
        n_envs: E.
        name: of the vector environment.

    Raises:
        SpecError: there are none, or infos are neither.
    """
    found: Any = None
    if isinstance(infos, Mapping):
        found = _final(infos)
        if found is None:
            raise SpecError(f"environment: {name} ended an episode without infos['final_obs']")
    elif _are_many(infos) and len(infos) == n_envs:
        finals = [_final(info) for info in infos]
        found = None if all(final is None for final in finals) else finals
    if found is None:
        raise SpecError(f"environment: infos must be a dict, got {type(infos).__name__}")
    return found


def put_finals(leaves: Mapping[str, Leaf], at: np.ndarray, finals: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes the final observations of some environments to their rows.

    Args:
        leaves: of the space, by key.
        at: int64, which environments.
        finals: E final observations as one, or an array or list of E, of which only those are read.
        arrays: of each key, E rows.

    Raises:
        SpecError: one is missing, or not in the space.
    """
    for key, leaf in leaves.items():
        name, n_envs = f"final observation {key!r}", len(arrays[key])
        each, read = _one_by_one(leaf, finals, n_envs)
        if each is None:
            found = leaf.read(f"environment: {name}", finals, (n_envs, *leaf.shape))[at]
        else:
            found = np.stack([_read_final(read, f"environment {row}: {name}", each[row]) for row in at.tolist()])
        arrays[key][at] = found.reshape(len(at), *leaf.row_shape)


def _one_by_one(leaf: Leaf, finals: Any, n_envs: int) -> tuple[Sequence[Any] | None, Leaf]:
    """What each environment gave, and how the leaf is read from that; None if all gave one thing together."""
    # Of a Tuple space a tuple is a batch.
    is_list = isinstance(finals, list) or (isinstance(finals, tuple) and not leaf.path)
    if _are_objects(finals) or (is_list and len(finals) == n_envs):
        return finals, leaf
    if leaf.path:  # a dict may hold arrays of objects
        try:
            values = leaf.pick(finals)
        except (TypeError, LookupError):
            return None, leaf
        if _are_objects(values) and len(values) == n_envs:
            return values, replace(leaf, path=())
    return None, leaf


def _are_objects(values: Any) -> bool:
    return isinstance(values, np.ndarray) and values.dtype == object and values.ndim == 1


def _read_final(leaf: Leaf, name: str, final: Any) -> np.ndarray:
    if final is None:
        raise SpecError(f"{name} is missing: the episode has ended, and infos['final_obs'] is None there")
    return leaf.read(name, final, leaf.shape)


def _final(info: Mapping[str, Any]) -> Any:
    return next((info[name] for name in NAMES if info.get(name) is not None), None)


def _are_many(infos: Any) -> bool:
    return isinstance(infos, (list, tuple, np.ndarray)) and all(isinstance(info, Mapping) for info in infos)
