"""Draws samples and reads their columns, while other threads or processes write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlstructs.replay.drawing import Selection
from rlstructs.replay.store import Storage


def sample_arrays(
    storage: Storage, n: int, select: Callable[[int], Selection], read: Callable[[Selection], Mapping[str, Any]]
) -> tuple[Selection, dict[str, Any]]:
    """Draws and reads samples; draws those again that a writer overwrites meanwhile.

    Args:
        storage: the store.
        n: number of samples.
        select: draws a given number of samples.
        read: reads them, name -> array (B, ...).

    Returns:
        The selection, and name -> array (n, ...).
    """
    names: list[str] = []

    def look(picked: Selection) -> list[Any]:
        arrays = read(picked)
        names[:] = arrays
        return list(arrays.values())

    picked, arrays = storage.sample(n, select, look)
    return picked, dict(zip(names, arrays, strict=True))
