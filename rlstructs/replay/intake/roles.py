"""The meanings of column names, in the vocabulary of every interface.

observation             next observation            reward          where an episode ends
obs                     obs_next                    rew             terminated, truncated, done
observations            next_observations           rewards         terminated, truncated, done, dones
observation             next/observation            next/reward     next/terminated, next/truncated, next/done
observation/frame       _observation/frame          ...             _observation/terminated, ...
"""

from __future__ import annotations

from collections.abc import Iterable

REWARDS = ("rew", "reward", "rewards")
ENDS = ("terminated", "truncated", "done", "dones")
NEXT_PARENTS = ("next/", "_observation/")
SEEN = ("obs", "observation", "observations", "pixels")
# Entries of a batcher's observations that the environment does not show, beside the last action.
BESIDE = ("reward", "raw_reward", "done", "terminated", "truncated", "initial_state")
INFO = "info/"


def is_info(name: str) -> bool:
    """Whether a column holds an info of an environment."""
    return name.startswith("info") and name.partition("/")[0] == "info"


def is_reward(name: str) -> bool:
    """Whether a column holds the reward of its step, and not an observed reward."""
    last = name.rpartition("/")[2]
    return last in REWARDS and (name == f"_observation/{last}" or not _is_seen(name))


def is_end(name: str) -> bool:
    """Whether an episode ends where a column is true."""
    parent, _, last = name.rpartition("/")
    return last in ENDS and (not parent or f"{parent}/" in NEXT_PARENTS)


def is_after(name: str) -> bool:
    """Whether a column holds what comes after its step."""
    return is_end(name) or (source_of(name) is not None and not is_reward(name))


def source_of(name: str) -> str | None:
    """Returns the column whose next row has the same content.

    For example `obs` for `obs_next`; None if there is none.
    """
    first, slash, rest = name.partition("/")
    if first == "obs_next":
        return f"obs{slash}{rest}"
    if first.startswith("next_"):
        return f"{first.removeprefix('next_')}{slash}{rest}"
    if first == "next" and rest:
        return rest
    if first == "_observation" and rest:
        return f"observation/{rest}"
    return None


def is_observation(name: str) -> bool:
    """Whether a column holds what an environment shows, before or after the step."""
    shown = (source_of(name) or name).removeprefix("observation/")
    return _is_seen(name) and not is_beside(shown)


def is_beside(key: str) -> bool:
    """Whether a key of a batcher's observations is not from the environment."""
    first = key.partition("/")[0]
    return first in BESIDE or first.startswith("last_action") or key.startswith(INFO)


def _is_seen(name: str) -> bool:
    return (source_of(name) or name).partition("/")[0] in SEEN


def ends_among(names: Iterable[str]) -> list[str]:
    """Lists the columns that end an episode where they are true.

    In torchrl a `done` beside `next/done` belongs to the time before the step and ends nothing.
    """
    ends = [name for name in names if is_end(name)]
    return [name for name in ends if "/" in name] or ends
