"""What a batcher hands out, as rows for the lanes of a store."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from rlstructs.replay.roles import is_beside

# Keys of trajectories that say where episodes end and begin.
STEP_ENDS = ("_observation/terminated", "_observation/truncated", "_observation/done")
STEP_START = "observation/initial_state"


def named_steps(names: Mapping[str, str], keys: Collection[str]) -> dict[str, str]:
    """Which key of trajectories is what here, where some of the keys are nested.

    Args:
        names: name here -> key; `observation/frame` stands for whatever an environment shows.
        keys: of the trajectories: of a Dict or Tuple of actions `action/action/left`, and of observations
            `observation/image`, beside what else there is.

    Returns:
        name here -> key; `actions` is then `actions/left` and so on. What is not there at all is left as it is.

    Example:
        >>> named_steps({"actions": "action/action"}, ["action/action/left", "action/action/right", "action/value"])
        {'actions/left': 'action/action/left', 'actions/right': 'action/action/right'}
    """
    found: dict[str, str] = {}
    for name, key in names.items():
        parent, _, last = key.rpartition("/")
        inside = [] if key in keys else _inside(key, keys)
        if not inside and key not in keys and last == "frame" and parent in ("observation", "_observation"):
            inside, key = [each for each in _inside(parent, keys) if not is_beside(each)], parent
        found |= {f"{name}/{each}": f"{key}/{each}" for each in inside} or {name: names[name]}
    return found


def _inside(key: str, keys: Collection[str]) -> list[str]:
    """What is nested under a key, by the rest of its name."""
    return [each[len(key) + 1 :] for each in keys if each.startswith(f"{key}/")]


def key_of(name: str, names: Mapping[str, str]) -> str:
    """The key of trajectories of a name, one that is nested too: of `actions/left` that of `actions` and `/left`."""
    first, slash, rest = name.partition("/")
    if name in names or first not in names:
        return names.get(name, name)
    key = names[first]
    return f"{key.removesuffix('/frame') if key.endswith('observation/frame') else key}{slash}{rest}"


def rounds(lanes: np.ndarray) -> Iterator[Any]:
    """Which rows to write together, so that none of them are of one lane; in order."""
    if np.unique(lanes).size == lanes.size:
        if lanes.size:
            yield slice(None)
        return
    seen: dict[int, int] = {}
    turn = np.empty(lanes.size, np.int64)
    for at, lane in enumerate(lanes.tolist()):
        turn[at] = seen[lane] = seen.get(lane, -1) + 1
    for number in range(turn.max() + 1):
        yield np.flatnonzero(turn == number)


def as_slice(lanes: np.ndarray) -> Any:
    """Lanes that follow one another as a slice: then a block is one copy."""
    first = int(lanes[0])
    return slice(first, first + lanes.size) if (np.diff(lanes) == 1).all() else lanes
