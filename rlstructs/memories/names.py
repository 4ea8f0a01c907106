"""Checks names of tensors and of file formats, and finds the tensors that mark ends of episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlstructs.errors import SpecError
from rlstructs.replay.roles import ENDS
from rlstructs.replay.values import find_marks

FORMATS = ("pt", "npz", "csv")


def check_format(name: Any) -> str:
    """Returns `name` if it is a file format.

    Raises:
        SpecError: it is not one.
    """
    if name not in FORMATS:
        raise SpecError(f"the format must be one of {FORMATS}, got {name!r}")
    return str(name)


def check_name(name: Any) -> None:
    """Raises SpecError unless a tensor may have this name; files keep other arrays under names like __ring__."""
    if not isinstance(name, str) or not name or (len(name) > 4 and name.startswith("__") and name.endswith("__")):
        raise SpecError(f"a tensor's name must be a string that does not begin and end with '__', got {name!r}")


def find_ends(block: Mapping[str, Any]) -> np.ndarray | None:
    """Marks the rows (n, T) that end an episode, bool; None if no tensor says so."""
    return find_marks({name: block[name] for name in ENDS if name in block})
