"""Parses JSON that may be malicious.

Python's own parser accepts very long numbers, repeated names and NaN, and turns a text of brackets into objects of
thirty times its size. Here all of these are errors.
"""

from __future__ import annotations

import json
import math
from typing import Any

# The most characters of an integer and of another number. The state of a random generator has integers of 39 digits.
LONGEST_INTEGER, LONGEST_NUMBER = 40, 40
# A text may have 2000 lists and objects, plus one per 6 of its characters, and 2000 quotes, plus one per 3.
PER_CONTAINER, PER_QUOTE, ALWAYS_ALLOWED = 6, 3, 2000


def parse(text: str | bytes) -> Any:
    """Parses a JSON text.

    Raises:
        ValueError: it is not JSON as rlstructs writes it.
        RecursionError: it is nested too deeply.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")  # json.loads would guess the encoding of bytes
    for signs, least in (("[{", PER_CONTAINER), ('"', PER_QUOTE)):
        if sum(map(text.count, signs)) > ALWAYS_ALLOWED + len(text) // least:
            raise ValueError("its text consists mostly of brackets or quotes")
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
        raise ValueError("its text has an object with a repeated name")
    for name in found:
        name.encode()  # raises for half of a surrogate pair
    return found


def _parse_integer(digits: str) -> int:
    if len(digits) > LONGEST_INTEGER:
        raise ValueError(f"its text has an integer of {len(digits):,} characters")
    return int(digits)


def _parse_number(digits: str) -> float:
    number = float(digits) if len(digits) <= LONGEST_NUMBER else math.inf
    if not math.isfinite(number):
        raise ValueError(f"its text has the number {digits[:LONGEST_NUMBER]}, which is too long or not finite")
    return number


def _parse_constant(name: str) -> float:
    if name == "Infinity":  # the value of a setting without a limit
        return math.inf
    raise ValueError(f"its text has {name} as a number")
