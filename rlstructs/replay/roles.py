"""What the names of columns mean, in the words of every interface that this library has.

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
# What a batcher's observations hold beside what the environment shows, and the last action.
BESIDE = ("reward", "raw_reward", "done", "terminated", "truncated", "initial_state")
INFO = "info/"


def is_info(name: str) -> bool:
    """Whether a column holds what an environment says beside all else, whatever that is."""
    return name.startswith("info") and name.partition("/")[0] == "info"


def is_reward(name: str) -> bool:
    """Whether a column holds the reward of its step, and not one that was seen before it."""
    last = name.rpartition("/")[2]
    return last in REWARDS and (name == f"_observation/{last}" or not _is_seen(name))


def is_end(name: str) -> bool:
    """Whether the truth of a column ends an episode."""
    parent, _, last = name.rpartition("/")
    return last in ENDS and (not parent or f"{parent}/" in NEXT_PARENTS)


def is_after(name: str) -> bool:
    """Whether a column holds what is there after its step."""
    return is_end(name) or (source_of(name) is not None and not is_reward(name))


def source_of(name: str) -> str | None:
    """The column that holds in the next row what this one holds in its own, or None: `obs` of `obs_next`."""
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
    """Whether a column holds what an environment showed, or shows after its step."""
    shown = (source_of(name) or name).removeprefix("observation/")
    return _is_seen(name) and not is_beside(shown)


def is_beside(key: str) -> bool:
    """Whether an entry of a batcher's observations is nothing that the environment shows."""
    first = key.partition("/")[0]
    return first in BESIDE or first.startswith("last_action") or key.startswith(INFO)


def _is_seen(name: str) -> bool:
    return (source_of(name) or name).partition("/")[0] in SEEN


def ends_among(names: Iterable[str]) -> list[str]:
    """Those whose truth ends an episode.

    Beside `next/done` a `done` is what was there before the step, as torchrl has it, and ends nothing.
    """
    ends = [name for name in names if is_end(name)]
    return [name for name in ends if "/" in name] or ends
