"""Saves models and data of MuJoCo in full.

Derived quantities too, as rewards are computed from them.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any

from rlstructs.exact.adapters import Adapter

# Most bytes are zeros. Higher levels take longer and save little.
LEVEL = 1


def save_model(model: Any) -> bytes:
    """Describes an `MjModel`; equal models give the same object, which is pickled once."""
    return _compress(model.__getstate__())


def load_model(saved: bytes) -> Any:
    """Makes an equal `MjModel`."""
    import mujoco

    model = mujoco.MjModel.__new__(mujoco.MjModel)
    model.__setstate__(zlib.decompress(saved))
    return model


def save_data(data: Any) -> tuple[Any, int, bytes]:
    """Describes an `MjData`: its model, the rest of its pickle, and the model's place.

    Place: the offset of the model's bytes in the pickle, or -1.
    """
    whole, model = data.__getstate__(), data.model.__getstate__()
    at = whole.find(model)
    if at < 0:
        return data.model, -1, zlib.compress(whole, LEVEL)
    return data.model, at, zlib.compress(whole[:at] + whole[at + len(model) :], LEVEL)


def load_data(saved: tuple[Any, int, bytes]) -> Any:
    """Makes an equal `MjData`, whose `model` is an equal one of its own."""
    import mujoco

    model, at, rest = saved[0], saved[1], zlib.decompress(saved[2])
    data = mujoco.MjData.__new__(mujoco.MjData)
    data.__setstate__(rest if at < 0 else rest[:at] + model.__getstate__() + rest[at:])
    return data


def save_renderer(renderer: Any) -> tuple[Any, ...]:
    """Describes gymnasium's renderer without its windows, which it makes again."""
    return type(renderer), {**vars(renderer), "viewer": None, "_viewers": {}}


def load_renderer(saved: tuple[Any, ...]) -> Any:
    """Makes an equal renderer without windows."""
    kind, attributes = saved
    renderer = kind.__new__(kind)
    vars(renderer).update(attributes)
    return renderer


@functools.lru_cache(maxsize=8)
def _compress(model: bytes) -> bytes:
    return zlib.compress(model, LEVEL)


ADAPTERS = {
    "mujoco._structs.MjModel": Adapter(save_model, load_model),
    "mujoco._structs.MjData": Adapter(save_data, load_data),
    "gymnasium.envs.mujoco.mujoco_rendering.MujocoRenderer": Adapter(save_renderer, load_renderer),
}
