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


def is_reward(name: str) -> bool:
    """Whether a column holds the reward of its step."""
    return name.rpartition("/")[2] in REWARDS


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
    """Whether a column holds what an agent saw, or will see after its step."""
    return (source_of(name) or name).partition("/")[0] in ("obs", "observation", "observations", "pixels")


def ends_among(names: Iterable[str]) -> list[str]:
    """Those whose truth ends an episode.

    Beside `next/done` a `done` is what was there before the step, as torchrl has it, and ends nothing.
    """
    ends = [name for name in names if is_end(name)]
    return [name for name in ends if "/" in name] or ends
