"""Arguments of tianshou's buffers, and the settings that the parts of one share."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np

from rlstructs.checks import check_count, check_size
from rlstructs.errors import SpecError
from rlstructs.replay.draw.reading import Reading
from rlstructs.replay.intake.intake import ERROR, FILL, GROW
from rlstructs.replay.rows.spec import Compression, Setting

# The settings that tianshou has as well, in the order of its `options`.
THEIRS = ("stack_num", "ignore_obs_next", "save_only_last_obs", "sample_avail")
# The arguments of all buffers; programs may misspell one.
ARGUMENTS = (
    "size",
    *THEIRS,
    "random_seed",
    "framework",
    "device",
    "n_step",
    "gamma",
    "new_keys",
    "missing_keys",
    "horizon",
    "future_k",
    "compute_reward_fn",
    "weight_norm",
)
# System, our class for it, and names that only it has.
OTHERS = (
    (
        "rlberry",
        "ChunkReplayBuffer",
        frozenset(
            [
                "max_replay_size",
                "rng",
                "max_episode_steps",
                "enable_prioritized",
                "append",
                "clear",
                "end_episode",
                "setup_entry",
                "tags",
                "update_priorities",
            ]
        ),
    ),
    (
        "torchrl",
        "TensorDictReplayBuffer",
        frozenset(
            [
                "batch_size",
                "collate_fn",
                "generator",
                "pin_memory",
                "prefetch",
                "sampler",
                "storage",
                "transform",
                "writer",
                "append_transform",
                "dumps",
                "empty",
                "extend",
                "insert_transform",
                "load_state_dict",
                "loads",
                "set_rng",
                "state_dict",
                "update_priority",
                "update_tensordict_priority",
                "write_count",
            ]
        ),
    ),
)


@dataclass
class Options:
    """The settings of a `ReplayBuffer`, described there; its parts follow changes.

    Raises:
        TypeError, SpecError: a setting is invalid.
    """

    stack_num: int
    ignore_obs_next: bool
    save_only_last_obs: bool
    sample_avail: bool
    framework: str
    n_step: int
    gamma: float
    new_keys: str
    missing_keys: str
    compression: Setting = None

    def __post_init__(self) -> None:
        self.stack_num = check_count("stack_num", self.stack_num)
        if isinstance(self.compression, Compression):
            self.compression = self.compression.to_json()  # as it stands in files
        for name in THEIRS[1:]:
            setattr(self, name, bool(getattr(self, name)))
        if self.new_keys not in (ERROR, GROW) or self.missing_keys not in (ERROR, FILL):
            raise SpecError(
                f"new_keys must be {ERROR!r} or {GROW!r} and missing_keys {ERROR!r} or {FILL!r}, "
                f"got {self.new_keys!r} and {self.missing_keys!r}"
            )


@lru_cache
def reading_of(n_step: int = 1, gamma: float = 0.99, stack_num: int = 1) -> Reading:
    """Returns the reading with these settings."""
    return Reading(n_step, gamma, stack_num)


def check_lane_size(size: Any) -> int:
    """Checks the number of rows of a lane; 0 means a placeholder."""
    is_zero = isinstance(size, (int, np.integer)) and not isinstance(size, bool) and size == 0
    return 0 if is_zero else check_size("size", size)


def forward(part: str, name: str, doc: str, check: Callable[[str, Any], Any] | None = None) -> Any:
    """Makes a property for an attribute of one of a buffer's parts.

    It reads and sets the attribute.

    Args:
        part: attribute of the buffer that holds the part.
        name: attribute of the part.
        doc: docstring of the property.
        check: converts a new value, given the attribute's name, or raises; None to take any.
    """

    def set_checked(buffer: Any, value: Any) -> None:
        setattr(getattr(buffer, part), name, value if check is None else check(name, value))

    return property(attrgetter(f"{part}.{name}"), set_checked, doc=doc)


def hint_of(name: str, why: str = "has it") -> str:
    """Says which class has an argument or attribute of this name.

    "" if none has.
    """
    for system, owner, names in OTHERS:
        if name in names:
            return f"; {system}'s ReplayBuffer, which {why}, is rlstructs.replay.{owner}"
    return ""


def check_arguments(owner: str, size: Any, stack_num: Any, unknown: Mapping[str, Any]) -> None:
    """Raises TypeError if arguments are missing, misspelt, or another class's.

    The message names that class.

    Args:
        owner: the public class, for messages.
        size, stack_num: as they were given; None for no size.
        unknown: arguments that this buffer does not have. As in tianshou, they are ignored otherwise.
    """
    for name in unknown:
        close = [] if name in ARGUMENTS else difflib.get_close_matches(name, ARGUMENTS, 1, 0.8)
        if close or hint_of(name):
            hint = f"; did you mean {close[0]!r}?" if close else hint_of(name)
            raise TypeError(f"{owner}() got an unexpected keyword argument {name!r}{hint}")
    if size is None:
        raise TypeError(f"{owner}() needs a size{hint_of('storage', 'needs none')}")
    if isinstance(stack_num, np.random.Generator):
        raise TypeError(f"{owner}(): stack_num must be an int, got a generator{hint_of('rng', 'takes one')}")
