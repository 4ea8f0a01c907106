"""What the environments of a `SharedVectorEnv` have in common, and whether each is an object of its own."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import gymnasium
from gymnasium.spaces.utils import is_space_dtype_shape_equiv

from rlstructs.checks import PETTINGZOO_HINT
from rlstructs.envs.space_tree import are_equal
from rlstructs.errors import SpecError


class OtherSpacesError(SpecError, RuntimeError):
    """Environments have different spaces; gymnasium raises a RuntimeError then."""


class Description(NamedTuple):
    """Attributes of the first environment; `bounds_differ` allows the others other bounds of observations."""

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None
    bounds_differ: bool = False

    def check(self, k: int, env: gymnasium.Env[Any, Any]) -> None:
        """Raises OtherSpacesError if the spaces of environment k are not these."""
        found, wanted = env.observation_space, self.observation_space
        if not are_equal(found, wanted) and not (self.bounds_differ and is_space_dtype_shape_equiv(found, wanted)):
            rule = "shapes and dtypes must be equal" if self.bounds_differ else 'observation_mode="same"'
            raise OtherSpacesError(f"env_fns: observation_space of environment {k} is {found}, not {wanted} ({rule})")
        if not are_equal(env.action_space, self.action_space):
            raise OtherSpacesError(
                f"env_fns: action_space of environment {k} is {env.action_space}, not {self.action_space}"
            )


def innermost(env: Any) -> Any:
    """The environment inside all wrappers."""
    while isinstance(env, gymnasium.Wrapper):
        env = env.env
    return env


def copy_if_taken(env: Any, taken: set[int]) -> Any:
    """Copies an environment that is taken already: `[lambda: env] * n` is common, and works in n processes."""
    if id(innermost(env)) in taken:
        try:
            env = copy.deepcopy(env)
        except Exception as error:
            raise SpecError(
                f"env_fns: {env} is given twice and cannot be copied ({error!r}), each function has to make its own"
            ) from error
    taken.add(id(innermost(env)))
    return env


def check_spaces(env: Any) -> None:
    for name in ("observation_space", "action_space"):
        if not isinstance(space := getattr(env, name, None), gymnasium.Space):
            wanted = f"needed is an environment whose {name} is a gymnasium.Space"
            agents = PETTINGZOO_HINT if hasattr(env, "possible_agents") or hasattr(env, "max_num_agents") else ""
            raise SpecError(f"env_fns: {wanted}, got {type(env).__name__} where it is {space!r}{agents}")
