"""Parses JSON that may have been made to do harm.

Python's own parser takes numbers of any length, repeated names and NaN, and turns a text of brackets into objects of
thirty times its size. Here all that is an error.
"""

from __future__ import annotations

import json
import math
from typing import Any

# The most digits of an integer, which the state of a random generator needs 39 of, and characters of another number.
LONGEST_INTEGER, LONGEST_NUMBER = 40, 40
# A text has at most one list or object per 6 characters and one quote per 3; up to 2000 are always allowed.
PER_CONTAINER, PER_TEXT, ANY_NUMBER = 6, 3, 2000


def parse(text: str | bytes) -> Any:
    """Parses a JSON text.

    Raises:
        ValueError: it is not JSON, or not such as rlstructs writes.
        RecursionError: it is nested too deeply.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")  # json.loads would guess the encoding of bytes
    for signs, least in (("[{", PER_CONTAINER), ('"', PER_TEXT)):
        if sum(map(text.count, signs)) > ANY_NUMBER + len(text) // least:
            raise ValueError("its text is made of little but brackets or quotes")
    return json.loads(
        text,
        object_pairs_hook=_make_object,
        parse_int=_parse_integer,
        parse_float=_parse_number,
        parse_constant=_parse_constant,
    )


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("its text has a name twice")
    for name in found:
        name.encode()  # raises for half of a surrogate pair
    return found


def _parse_integer(digits: str) -> int:
    if len(digits) > LONGEST_INTEGER:
        raise ValueError(f"its text has a whole number of {len(digits):,} digits")
    return int(digits)


def _parse_number(digits: str) -> float:
    number = float(digits) if len(digits) <= LONGEST_NUMBER else math.inf
    if not math.isfinite(number):
        raise ValueError(f"its text has the number {digits[:LONGEST_NUMBER]}, which is too long or not finite")
    return number


def _parse_constant(name: str) -> float:
    if name == "Infinity":  # a setting that has no limit
        return math.inf
    raise ValueError(f"its text has {name} for a number")
