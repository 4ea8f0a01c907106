"""Functions that are called with an environment, in its process.

They have their own module because a worker imports it to call them, and then imports nothing else.
"""

from __future__ import annotations

from typing import Any

import gymnasium


def call_method(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], env: gymnasium.Env[Any, Any]) -> Any:
    """Calls a method of the outermost wrapper that has it, or of the environment."""
    return env.get_wrapper_attr(name)(*args, **kwargs)


def set_attribute(name: str, value: Any, env: gymnasium.Env[Any, Any]) -> None:
    """Sets an attribute of the outermost wrapper."""
    setattr(env, name, value)


def is_wrapped(wrapper: type[gymnasium.Wrapper[Any, Any, Any, Any]], env: gymnasium.Env[Any, Any]) -> bool:
    """Whether one of the wrappers is of this class."""
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, wrapper):
            return True
        env = env.env
    return False


def set_inner_attribute(name: str, value: Any, env: gymnasium.Env[Any, Any]) -> None:
    """Sets an attribute of the environment inside all wrappers."""
    setattr(env.unwrapped, name, value)


def seed(value: int | None, env: gymnasium.Env[Any, Any]) -> tuple[bool, Any]:
    """Seeds the action space and calls the method `seed`.

    Returns whether there is such a method, and its result.
    """
    env.action_space.seed(value)
    try:
        return True, env.seed(value)
    except (AttributeError, NotImplementedError):
        return False, None
