"""Arguments and methods of other systems' `ReplayBuffer`: messages name the class that has them here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

# Who has it, the class here, and what tells it.
OTHERS = (
    ("rlberry", "ChunkReplayBuffer", frozenset([
        "max_replay_size", "rng", "max_episode_steps", "enable_prioritized",
        "append", "clear", "end_episode", "setup_entry", "tags", "update_priorities",
    ])),
    ("torchrl", "TensorDictReplayBuffer", frozenset([
        "batch_size", "collate_fn", "generator", "pin_memory", "prefetch", "sampler", "storage", "transform", "writer",
        "append_transform", "dumps", "empty", "extend", "insert_transform", "load_state_dict", "loads", "set_rng",
        "state_dict", "update_priority", "update_tensordict_priority", "write_count",
    ])),
)  # fmt: skip


def hint_of(name: str, why: str = "has it") -> str:
    """Which class has an argument or attribute of this name; "" if none has."""
    for system, owner, names in OTHERS:
        if name in names:
            return f"; {system}'s ReplayBuffer, which {why}, is rlstructs.replay.{owner}"
    return ""


def check_arguments(owner: str, size: Any, stack_num: Any, unknown: Mapping[str, Any]) -> None:
    """Raises TypeError if arguments are missing or unknown, and names the class that takes them.

    Args:
        owner: the public class, for messages.
        size, stack_num: as they were given; None for no size.
        unknown: arguments that no buffer of tianshou's has.
    """
    if unknown:
        name = next(iter(unknown))
        raise TypeError(f"{owner}() got an unexpected keyword argument {name!r}{hint_of(name)}")
    if size is None:
        raise TypeError(f"{owner}() needs a size{hint_of('storage', 'needs none')}")
    if isinstance(stack_num, np.random.Generator):
        raise TypeError(f"{owner}(): stack_num must be an int, got a generator{hint_of('rng', 'takes one')}")
