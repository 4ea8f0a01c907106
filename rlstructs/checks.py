"""Checks of what a user gives, shared by all that takes it."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlstructs.errors import SpecError


def check_count(name: str, value: Any, least: int = 1) -> int:
    """`value` as an int.

    Raises:
        TypeError, SpecError: it is no int, or below `least`.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise SpecError(f"{name} must be at least {least}, got {value}")
    return int(value)
