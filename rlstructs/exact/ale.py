"""Saves environments of ALE: the constructor's arguments, the emulator's state, and all other attributes.

With sticky actions the emulator also remembers its last action, which its saved state lacks. As long as it happens to
repeat that action, the next frames depend on it. `find_last_action` tries all actions, plays some frames and compares.
"""

from __future__ import annotations

import math
from typing import Any

from rlstructs.exact.adapters import Adapter

# The accepted probability that a search for the last action plays too few frames.
RISK = 1e-15


def save(env: Any) -> tuple[Any, ...]:
    """Describes an `AtariEnv`, with the random stream of its emulator.

    The environment is not changed.
    """
    others = {name: value for name, value in vars(env).items() if name != "ale"}
    state = env.ale.cloneState(include_rng=True)
    last = find_last_action(env, state)
    return type(env), env._ezpickle_args, env._ezpickle_kwargs, others, state, last


def load(saved: tuple[Any, ...]) -> Any:
    """Makes an `AtariEnv` in a saved state."""
    from ale_py.env import AtariEnv

    kind, args, kwargs, others, state, last = saved
    env = kind.__new__(kind)
    env.ale = AtariEnv(*args, **kwargs).ale  # a derived class may take other arguments
    vars(env).update(others)
    env.ale.restoreState(state)
    if last is not None:
        set_last_action(env.ale, state, last)
    return env


def find_last_action(env: Any, state: Any) -> int | None:
    """Returns an action with the same effect as the last one, or None.

    None where the last action has no effect.

    Args:
        env: the environment; afterwards it behaves as before.
        state: that of its emulator.

    Raises:
        TypeError: actions are continuous, or are always repeated: there are too many of them to try.
    """
    ale = env.ale
    chance = ale.getFloat("repeat_action_probability")
    if chance == 0 or ale.game_over():
        return None
    if env.continuous or chance >= 1:
        raise TypeError("the emulator repeats actions that it does not tell: use repeat_action_probability=0")
    expected = _play(ale, chance)
    actions: list[int] = [each.value for each in ale.getLegalActionSet()]
    for action in actions:
        set_last_action(ale, state, action)
        if _play(ale, chance) == expected:
            set_last_action(ale, state, action)
            return int(action)
    raise TypeError("no action has the effect of the emulator's last one")


def set_last_action(ale: Any, state: Any, action: int) -> None:
    """Brings an emulator to a state with this last action."""
    ale.restoreState(state)
    plain = ale.cloneState()  # without the random stream, so that some frames repeat no action
    for _ in range(_count_frames(ale.getFloat("repeat_action_probability"))):
        ale.restoreState(plain)
        ale.act(action)
    ale.restoreState(state)


def _play(ale: Any, chance: float) -> list[bytes]:
    """Plays frames until the last action has no more effect.

    Returns the state after each frame.
    """
    states = []
    for _ in range(_count_frames(chance)):
        ale.act(0)
        states.append(ale.cloneState(include_rng=True).serialize())
    return states


def _count_frames(chance: float) -> int:
    """Returns a number of frames that ends the last action's effect almost surely.

    Among so many frames, one does not repeat it.
    """
    return math.ceil(math.log(RISK) / math.log(chance))


ADAPTERS = {"ale_py.env.AtariEnv": Adapter(save, load)}
