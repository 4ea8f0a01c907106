"""What single environments answer to `reset` and `step`: which one it was, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlstructs.errors import SpecError
from workers.failures import add_note

STEP = ("observation", "reward", "terminated", "truncated", "info")
RESET = ("observation", "info")
# What an answer of gym is like, before its version 0.26.
OLD_STEP = 4
OLD = "gym's old interface: wrap it, by shimmy's GymV21CompatibilityV0 for one"
# Begins the note that names an environment.
ORIGIN = "raised by "
#: In the place of an answer that has not come yet.
NONE_YET = object()


def name_of(env: Any) -> str:
    """The id under which an environment is registered, or the name of its class."""
    spec = getattr(env, "spec", None)
    found = getattr(spec, "id", None) or getattr(getattr(spec, "config", None), "task_id", None)
    if isinstance(found, str):
        return found
    return type(getattr(env, "unwrapped", env)).__name__


def add_origin(error: Exception, call: str, env: Any, k: int | None = None) -> None:
    """Says in what an environment raised which one it was, unless that is said already.

    Args:
        call: of it, that raised.
        env: it; or a vector environment.
        k: its number, None of a vector environment.
    """
    if not any(str(note).startswith(ORIGIN) for note in getattr(error, "__notes__", ())):
        which = "environments" if k is None else f"environment {k}"
        add_note(error, f"{ORIGIN}{which} ({name_of(env)}) in {call}")


def blame_step(error: Exception, answer: Any, env: Any, k: int) -> None:
    """Names the environment whose step has raised `error`, or whose answer has: then raises what is wrong with it.

    Raises:
        SpecError: the answer is not gymnasium's.
    """
    trace = error.__traceback__
    if answer is not NONE_YET and trace is not None and trace.tb_next is None:  # not raised in the environment
        check_step(answer, env, k)
    add_origin(error, "step", env, k)


def checked_reset(answer: Any, env: Any, k: int | None = None) -> tuple[Any, Any]:
    """Observation and info, of what `reset` of environment k, or of a vector environment, gave.

    Raises:
        SpecError: it is something else.
    """
    if isinstance(answer, (tuple, list)) and len(answer) == len(RESET):
        return tuple(answer)
    wanted = f"reset must give {_order(RESET)}, got {_shown(answer)}"
    raise SpecError(f"{_who(env, k)}: {wanted}; an observation alone is {OLD}")


def check_step(answer: Any, env: Any, k: int | None = None) -> None:
    """Raises SpecError if what `step` gave is not what a step gives; of a vector environment only how many values."""
    if not isinstance(answer, (tuple, list)) or len(answer) != len(STEP):
        is_old = isinstance(answer, (tuple, list)) and len(answer) == OLD_STEP
        hint = f"; (observation, reward, done, info) is {OLD}" if is_old else ""
        raise SpecError(f"{_who(env, k)}: step must give {_order(STEP)}, got {_shown(answer)}{hint}")
    for name, value in zip(STEP[1:4], answer[1:4], strict=True):
        if k is not None and not _is_number(value):
            wanted = "a number" if name == "reward" else "a bool"
            raise SpecError(f"{_who(env, k)}: {name} must be {wanted}, got {value!r}")


def _who(env: Any, k: int | None) -> str:
    return f"environment ({name_of(env)})" if k is None else f"environment {k} ({name_of(env)})"


def _order(names: Sequence[str]) -> str:
    return f"{len(names)} values, ({', '.join(names)})"


def _shown(found: Any) -> str:
    """What came, in a few words."""
    if isinstance(found, (tuple, list)):
        return f"{len(found)}, ({', '.join(type(value).__name__ for value in found)})"
    shape = getattr(found, "shape", None)
    return type(found).__name__ if shape is None else f"{type(found).__name__} of shape {tuple(shape)}"


def _is_number(value: Any) -> bool:
    if isinstance(value, (bool, int, float, np.number, np.bool_)):
        return True
    try:
        given = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except (TypeError, ValueError):
        return False
    return given.size == 1 and given.dtype.kind in "biuf" and not isinstance(value, (list, tuple))
