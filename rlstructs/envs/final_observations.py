"""Reads the final observations of episodes from the infos of a vector environment that resets in the same step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlstructs.envs.spaces import Leaf
from rlstructs.errors import SpecError

# The names in gymnasium, in its earlier versions, and in Stable-Baselines3.
NAMES = ("final_obs", "final_observation", "terminal_observation")


def has_finals(infos: Any) -> bool:
    """Whether infos, of whatever type, hold final observations under one of gymnasium's names."""
    each = [infos] if isinstance(infos, Mapping) else infos if _are_mappings(infos) else []
    return any(info.get(name) is not None for info in each for name in NAMES[:2])


def find_finals(infos: Any, n_envs: int, name: str) -> Any:
    """Finds the final observations in infos: one batch of the space, or an array or list of E observations.

    Args:
        infos: a dict, or a sequence of one dict for each environment.
        n_envs: E.
        name: of the vector environment.

    Raises:
        SpecError: infos hold no final observations, or are of another type.
    """
    found: Any = None
    if isinstance(infos, Mapping):
        found = _get_final(infos)
        if found is None:
            raise SpecError(f"environment: {name} ended an episode without infos['final_obs']")
    elif _are_mappings(infos) and len(infos) == n_envs:
        finals = [_get_final(info) for info in infos]
        found = None if all(final is None for final in finals) else finals
    if found is None:
        got = type(infos).__name__
        raise SpecError(f"environment: infos with 'final_obs' must be a dict or {n_envs} dicts, got {got}")
    return found


def write_finals(leaves: Mapping[str, Leaf], at: np.ndarray, finals: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes the final observations of some environments to their rows.

    Args:
        leaves: of the space, by key.
        at: int64, indexes of these environments.
        finals: what `find_finals` returned; only the observations of `at` are read.
        arrays: E rows for each key.

    Raises:
        SpecError: one is missing, or not in the space.
    """
    for key, leaf in leaves.items():
        name, n_envs = f"final observation {key!r}", len(arrays[key])
        each, row_leaf = _split_finals(leaf, finals, n_envs)
        if each is None:
            found = leaf.read(f"environment: {name}", finals, (n_envs, *leaf.shape))[at]
        else:
            found = np.stack([_read_final(row_leaf, f"environment {row}: {name}", each[row]) for row in at.tolist()])
        arrays[key][at] = found.reshape(len(at), *leaf.row_shape)


def _split_finals(leaf: Leaf, finals: Any, n_envs: int) -> tuple[Sequence[Any] | None, Leaf]:
    """Splits `finals` into one value for each environment, and the leaf that reads each; None for a single batch."""
    # In a Tuple space, a tuple is a single batch.
    is_list = isinstance(finals, list) or (isinstance(finals, tuple) and not leaf.path)
    if _is_object_array(finals) or (is_list and len(finals) == n_envs):
        return finals, leaf
    if leaf.path:  # a dict may hold arrays of objects
        try:
            values = leaf.pick(finals)
        except (TypeError, LookupError):
            return None, leaf
        if _is_object_array(values) and len(values) == n_envs:
            return values, replace(leaf, path=())
    return None, leaf


def _is_object_array(values: Any) -> bool:
    return isinstance(values, np.ndarray) and values.dtype == object and values.ndim == 1


def _read_final(leaf: Leaf, name: str, final: Any) -> np.ndarray:
    if final is None:
        raise SpecError(f"{name} is missing: the episode has ended, and infos['final_obs'] is None there")
    return leaf.read(name, final, leaf.shape)


def _get_final(info: Mapping[str, Any]) -> Any:
    return next((info[name] for name in NAMES if info.get(name) is not None), None)


def _are_mappings(infos: Any) -> bool:
    return isinstance(infos, (list, tuple, np.ndarray)) and all(isinstance(info, Mapping) for info in infos)
