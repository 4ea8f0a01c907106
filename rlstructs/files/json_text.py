"""JSON that others may have written: what we write ourselves, and nothing that takes long or means two things.

Python's own parser takes numbers of any length, names that come twice, and NaN; and it makes of a text of brackets
objects that take thirty times the memory.
"""

from __future__ import annotations

import json
import math
from typing import Any

# Digits of a whole number: the state of a random generator has 39. Characters of other numbers.
LONGEST_INTEGER, LONGEST_NUMBER = 40, 40
# Characters that each list, object or text has at least on average, and how many there may be in any case.
PER_CONTAINER, PER_TEXT, ANY_NUMBER = 6, 3, 2000


def parse(text: str | bytes) -> Any:
    """What a JSON text says.

    Raises:
        ValueError: it is none, or nothing of ours.
        RecursionError: it is nested too deeply.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")  # strictly: json would guess the encoding
    for signs, least in (("[{", PER_CONTAINER), ('"', PER_TEXT)):
        if sum(map(text.count, signs)) > ANY_NUMBER + len(text) // least:
            raise ValueError("its text is made of little but brackets or quotes")
    return json.loads(
        text, object_pairs_hook=_object, parse_int=_integer, parse_float=_number, parse_constant=_constant
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("its text has a name twice")
    for name in found:
        name.encode()  # half of a character is none
    return found


def _integer(digits: str) -> int:
    if len(digits) > LONGEST_INTEGER:
        raise ValueError(f"its text has a whole number of {len(digits):,} digits")
    return int(digits)


def _number(digits: str) -> float:
    number = float(digits) if len(digits) <= LONGEST_NUMBER else math.inf
    if not math.isfinite(number):
        raise ValueError(f"its text has the number {digits[:LONGEST_NUMBER]}, which is none")
    return number


def _constant(name: str) -> float:
    if name == "Infinity":  # a setting that has no limit
        return math.inf
    raise ValueError(f"its text has {name} for a number")
