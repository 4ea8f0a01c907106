"""What environments give beside numbers in shared memory: on its way through a pipe, and as gymnasium's infos."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import VectorEnv

from workers import failures, pickling


class Outcome(NamedTuple):
    """What a step or reset gave beside what the columns hold.

    Attributes:
        infos: index of an environment and an info of it that is not empty, in the order of gymnasium's.
        objects: index of an environment and the parts of its observation that are no arrays.
    """

    infos: list[tuple[int, Mapping[str, Any]]]
    objects: list[tuple[int, list[Any]]]

    def of_each(self, envs: Iterable[int]) -> dict[int, Outcome]:
        """The part of each of these environments, which are all that it is of."""
        parts = {env: Outcome([], []) for env in envs}
        for env, info in self.infos:
            parts[env].infos.append((env, info))
        for env, picked in self.objects:
            parts[env].objects.append((env, picked))
        return parts


NOTHING = Outcome([], [])


def infos_of_all(env: VectorEnv, outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """A row for each environment of a vectorised one."""
    return _together(env, range(env.num_envs), outcomes)


def infos_of_some(envs: np.ndarray, outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """A row for each of these environments, and `env_id`, which they are."""
    batch = VectorEnv()
    batch.num_envs = envs.size
    infos = _together(batch, {env: row for row, env in enumerate(envs.tolist())}, outcomes)
    infos["env_id"] = envs
    return infos


def packed(value: Any) -> bytes:
    """A value as bytes.

    Raises:
        Exception: something in it cannot be pickled; a note names the environment, if it is an info of one.
    """
    try:  # numbers, strings and arrays, which pickle alone handles ten times as fast as cloudpickle
        buffer = io.BytesIO()
        _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
        return buffer.getvalue()
    except Exception:
        return _packed_slowly(value)


def unpacked(data: bytes) -> Any:
    """What `packed` packed; nothing stands for an empty outcome."""
    return pickling.loads(data) if data else NOTHING


def _packed_slowly(value: Any) -> bytes:
    try:
        return pickling.dumps(value)
    except Exception as error:
        for env, info in value.infos if isinstance(value, Outcome) else ():
            for key in info:
                if not _can_be_packed(info[key]):
                    failures.add_note(error, f"info {key!r} of environment {env} cannot be sent to the trainer")
        raise


def _can_be_packed(value: Any) -> bool:
    try:
        pickling.dumps(value)
    except Exception:
        return False
    return True


def _together(batch: VectorEnv, rows: Sequence[int] | dict[int, int], outcomes: Iterable[Outcome]) -> dict[str, Any]:
    infos: dict[str, Any] = {}
    for outcome in outcomes:
        for env, info in outcome.infos:
            infos = batch._add_info(infos, info, rows[env])
    return infos


def _as_number(value: np.generic) -> tuple[Any, ...]:
    return type(value), (value.item(),)


class _Pickler(pickle.Pickler):
    # numpy itself packs a scalar as bytes with a dtype, which takes three times as long.
    dispatch_table = dict.fromkeys((np.dtype(letter).type for letter in "?bBhHiIlLqQefd"), _as_number)
