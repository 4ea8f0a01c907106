"""Checks of what a user gives, and of what a file says, shared by all that takes it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlstructs.errors import SpecError
from workers import start

# The dtypes that arrays in files have, by name; of this machine's byte order.
DTYPES = {
    name: np.dtype(name)
    for name in ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
                 "float16", "float32", "float64", "complex64", "complex128")
}  # fmt: skip
# Axes of an array at most, and numbers of one.
MOST_AXES, MOST_NUMBERS = 32, 1 << 62
# Characters of an error's own text that go into ours: what a file says of itself may be of any length.
LONGEST_REASON = 500


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


def check_size(name: str, size: Any) -> int:
    """As `check_count`; floats that are whole numbers are counts too, for sizes are written as 1e6."""
    return check_count(name, int(size) if isinstance(size, (float, np.floating)) and size.is_integer() else size)


def holds(dtype: np.dtype[Any], values: np.ndarray) -> bool:
    """Whether these numbers, as this dtype, are what they were; rounded where it is a float."""
    if dtype.kind == "f" or np.can_cast(values.dtype, dtype):
        return True
    with np.errstate(invalid="ignore"):  # NaN is no whole number
        return bool((values.astype(dtype) == values).all())


# What is said of a state that is (layers, B, ...).
BATCH_FIRST = "; permute it to batch first, by `.transpose(0, 1)`: a recurrent layer of torch has (layers, B, ...)"


def batch_first(shape: tuple[int, ...], n: int) -> str:
    """What to do about a tensor of n rows that has them on its second axis; "" for any other."""
    if len(shape) < 2 or shape[0] == n or shape[1] != n:
        return ""
    return BATCH_FIRST


def check_start_method(start_method: Any) -> None:
    """Raises SpecError unless it is the name of a start method, or None for the default one."""
    try:
        start.check_start_method(start_method)
    except ValueError as error:
        raise SpecError(str(error)) from None


def check_gamma(gamma: Any) -> None:
    """Raises TypeError or SpecError unless it is a number from 0 to 1."""
    if isinstance(gamma, bool) or not isinstance(gamma, (int, float, np.number)):
        raise TypeError(f"gamma must be a number, got {gamma!r}")
    if not 0 <= gamma <= 1:
        raise SpecError(f"gamma must be in [0, 1], got {gamma}")


def several(name: str, keys: Any, noun: str = "names") -> tuple[Any, ...]:
    """Names as a tuple.

    Raises:
        SpecError: it is a single one, which would be taken for one name for each of its letters.
    """
    if isinstance(keys, str):
        raise SpecError(f"{name} must be several {noun}, got the string {keys!r}")
    return tuple(keys)


def check_timeout(timeout: Any) -> float | None:
    """A timeout, None or a number of seconds above 0, as a number of Python: times are not numbers of 32 bits.

    Raises:
        TypeError, SpecError: it is something else.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float, np.number)):
        raise TypeError(f"timeout must be a number of seconds or None, got {timeout!r}")
    if not timeout > 0:
        raise SpecError(f"timeout must be above 0 seconds, got {timeout}")
    return timeout.item() if isinstance(timeout, np.number) else timeout


def called(how: str, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """What a factory returns.

    Args:
        how: it is called, for the message.
        factory: of the user's.
        arguments: its arguments.

    Raises:
        TypeError: it does not take these arguments; says so.
        Exception: what it raises.
    """
    try:
        return factory(**arguments)
    except TypeError as error:
        if misfit := _misfit(factory, arguments):  # it may have raised this itself
            raise TypeError(f"{how}, here with {', '.join(arguments)}: {misfit}") from error
        raise


def _misfit(factory: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Why a factory cannot be called with these arguments, "" if it can, or has no signature."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(**arguments)
    except TypeError as error:
        return str(error)
    return ""


def check_made(needed: str, made: Any, *methods: str) -> None:
    """Raises TypeError unless what a factory made has these methods."""
    for method in methods:
        if not callable(getattr(made, method, None)):
            raise TypeError(f"{needed}, got {type(made).__name__} without {method}(){_wrapping(made)}")


def _wrapping(made: Any) -> str:
    """What makes a VecEnv of environments of gymnasium, which may not be imported here."""
    if hasattr(made, "num_envs"):
        return ": return GymVectorEnv(envs, seed)"
    if isinstance(made, (list, tuple)) or hasattr(made, "observation_space"):
        return ": return GymEnvInf([env, ...], seed)"
    return ""


def is_size(n: Any) -> bool:
    """Whether this is a length that an axis can have."""
    return type(n) is int and 0 <= n <= MOST_NUMBERS


def reason(error: object) -> str:
    """An error's own text, as a message of ours may show it: of bounded length, without control characters."""
    return shown(str(error), LONGEST_REASON)


def shown(text: str, longest: int = 200) -> str:
    """Text that a file has in it, as a terminal may get it: without control characters, and of bounded length."""
    start = text[:longest]
    if not start.isprintable():
        start = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in start)
    return start + (f"... ({len(text):,} characters)" if len(text) > longest else "")
