"""Saves environments of ALE: the constructor's arguments, the emulator's state, and all other attributes."""

from __future__ import annotations

from typing import Any

from rlstructs.envs.snapshots.adapters import Adapter


def save(env: Any) -> tuple[Any, ...]:
    """Describes an `AtariEnv`, with the random stream of its emulator."""
    others = {name: value for name, value in vars(env).items() if name != "ale"}
    return type(env), env._ezpickle_args, env._ezpickle_kwargs, others, env.ale.cloneState(include_rng=True)


def load(saved: tuple[Any, ...]) -> Any:
    """Makes an `AtariEnv` in a saved state."""
    from ale_py.env import AtariEnv

    kind, args, kwargs, others, state = saved
    env = kind.__new__(kind)
    env.ale = AtariEnv(*args, **kwargs).ale  # a derived class may take other arguments
    vars(env).update(others)
    env.ale.restoreState(state)
    return env


ADAPTERS = {"ale_py.env.AtariEnv": Adapter(save, load)}
