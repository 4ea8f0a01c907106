"""Which kinds of file memories are saved to."""

from __future__ import annotations

from typing import Any

from rlstructs.errors import SpecError

FORMATS = ("pt", "npz", "csv")


def checked_format(name: Any) -> str:
    """`name`, if it is one of the formats.

    Raises:
        SpecError: it is not.
    """
    if name not in FORMATS:
        raise SpecError(f"the format must be one of {FORMATS}, got {name!r}")
    return str(name)
