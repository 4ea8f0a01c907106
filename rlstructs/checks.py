"""Checks of arguments and of the contents of files, for the whole library."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import numpy as np

from rlstructs.errors import SpecError

F = TypeVar("F", bound=Callable[..., Any])

# The dtypes of arrays in files, by name, in the byte order of this machine.
DTYPES = {
    name: np.dtype(name)
    for name in (
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    )
}
# The most axes of an array, and the longest axis.
MOST_AXES, MOST_NUMBERS = 32, 1 << 62
# Stands for an unknown step number; see `TemporalDictTensor.first_steps`.
UNKNOWN = -1
# The most characters that messages and tables show of a text, and of a name, that came from a file.
LONGEST_TEXT, LONGEST_NAME = 500, 200


def warn_caller(text: str) -> None:
    """Warns at the line outside of this library that called it."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "rlstructs":
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level)


def other_words(**words: str) -> Callable[[F], F]:
    """Decorates a function whose arguments have other names elsewhere, such as `other_words(seeds="seed")`.

    A call with such a name raises a TypeError that names the right argument.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs:
                if name in words:
                    own = function.__qualname__.removesuffix(".__init__")
                    raise TypeError(f"{own}() has {words[name]}= in the place of {name}=")
            return function(*args, **kwargs)

        return cast("F", call)

    return decorate


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Returns `value` as an int.

    Raises:
        TypeError: it is not an int.
        SpecError: it is below `least`.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise SpecError(f"{name} must be at least {least}, got {value}")
    return int(value)


def check_size(name: str, size: Any) -> int:
    """Returns a size as an int; also takes whole floats such as 1e6.

    Otherwise like `check_count`.
    """
    return check_count(name, int(size) if isinstance(size, (float, np.floating)) and size.is_integer() else size)


def can_hold(dtype: np.dtype[Any], values: np.ndarray) -> bool:
    """Whether a dtype can hold these numbers; a float dtype may round them."""
    if dtype.kind == "f" or np.can_cast(values.dtype, dtype):
        return True
    with np.errstate(invalid="ignore"):  # NaN cannot be cast to an integer
        return bool((values.astype(dtype) == values).all())


# The hint for a state that is (layers, B, ...).
BATCH_FIRST_HINT = "; permute it to batch first, by `.transpose(0, 1)`: a recurrent layer of torch has (layers, B, ...)"

MODULE_HINT = ": a torch.nn.Module is made an agent by ModuleAgent(module, action_space)"
PETTINGZOO_HINT = (
    ", an environment of several agents: return rlstructs.integrations.pettingzoo.ParallelEnvs([make, ...], seed), "
    "which has a slot for each agent of each environment; n_envs of RL_Batcher.make counts slots"
)


def hint_batch_first(shape: tuple[int, ...], n: int) -> str:
    """Returns a hint if a tensor has its n rows on the second axis.

    "" for any other tensor.
    """
    if len(shape) < 2 or shape[0] == n or shape[1] != n:
        return ""
    return BATCH_FIRST_HINT


def check_number(name: str, value: Any) -> None:
    """Raises TypeError unless the value is a number, which True and False are not."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise TypeError(f"{name} must be a number, got {value!r}")


def check_gamma(gamma: Any) -> None:
    """Raises TypeError or SpecError unless gamma is a number from 0 to 1."""
    check_number("gamma", gamma)
    if not 0 <= gamma <= 1:
        raise SpecError(f"gamma must be in [0, 1], got {gamma}")


def check_names(name: str, keys: Any, noun: str = "names") -> tuple[Any, ...]:
    """Returns several names as a tuple.

    Raises:
        SpecError: it is a single string, whose letters would be taken for names.
    """
    if isinstance(keys, str):
        raise SpecError(f"{name} must be several {noun}, got the string {keys!r}")
    return tuple(keys)


def check_timeout(timeout: Any, name: str = "timeout") -> float | None:
    """Returns a timeout as a Python number of seconds, or None.

    A float32 would be too coarse to be added to a time.

    Raises:
        TypeError: it is neither None nor a number.
        SpecError: it is not above 0.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float, np.number)):
        raise TypeError(f"{name} must be a number of seconds or None, got {timeout!r}")
    if not timeout > 0:
        raise SpecError(f"{name} must be above 0 seconds, got {timeout}")
    return timeout.item() if isinstance(timeout, np.number) else timeout


def call_factory(how: str, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Calls a user's factory.

    Args:
        how: says what the library calls, and with which arguments; the message begins with it.
        factory: the factory.
        arguments: its arguments.

    Raises:
        TypeError: it does not take these arguments; the message says so.
        Exception: what the factory raises.
    """
    try:
        return factory(**arguments)
    except TypeError as error:
        if misfit := _find_signature_error(factory, arguments):  # otherwise the factory itself raised the error
            raise TypeError(f"{how}, here with {', '.join(arguments)}: {misfit}") from error
        raise


def _find_signature_error(factory: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Returns why a factory cannot be called with these arguments, or "".

    "" too if it has no signature.
    """
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(**arguments)
    except TypeError as error:
        return str(error)
    return ""


def check_methods(needed: str, made: Any, *methods: str) -> None:
    """Raises TypeError unless an object that a factory made has these methods."""
    for method in methods:
        if not callable(getattr(made, method, None)):
            raise TypeError(f"{needed}, got {type(made).__name__} without {method}(){hint_wrapper(made)}")


def hint_wrapper(made: Any) -> str:
    """Returns a hint: how to make a VecEnv or an agent of this.

    "" if there is none; imports nothing.
    """
    if hasattr(made, "state_dict") and hasattr(made, "forward"):
        return MODULE_HINT
    if hasattr(made, "possible_agents") or hasattr(made, "max_num_agents"):
        return PETTINGZOO_HINT
    if hasattr(made, "num_envs"):
        return ": return GymVectorEnv(envs, seed)"
    if isinstance(made, (list, tuple)) or hasattr(made, "observation_space"):
        return ": return GymEnvInf([env, ...], seed)"
    return ""


def is_size(n: Any) -> bool:
    """Whether `n` can be the length of an axis."""
    return type(n) is int and 0 <= n <= MOST_NUMBERS


def clean_text(text: object, longest: int = LONGEST_TEXT) -> str:
    """Makes text from a file or an error safe for a terminal.

    Shortens it, and escapes control characters.
    """
    whole = str(text)
    start = whole[:longest]
    if not start.isprintable():
        start = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in start)
    return start + (f"... ({len(whole):,} characters)" if len(whole) > longest else "")
