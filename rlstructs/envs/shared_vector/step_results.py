"""Results of steps that lie in no shared memory: pickled for a pipe, and merged into gymnasium's infos."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import VectorEnv

from rlstructs.workers import failures, pickling


class Outcome(NamedTuple):
    """Results of a step or reset of some environments that are not in the columns.

    Attributes:
        infos: pairs of an environment's index and an info that is not empty, in gymnasium's order.
        objects: pairs of an environment's index and the leaves of its observation that are no arrays.
    """

    infos: list[tuple[int, Mapping[str, Any]]]
    objects: list[tuple[int, list[Any]]]

    def split(self, envs: Iterable[int]) -> dict[int, Outcome]:
        """Splits an outcome of these environments into one for each."""
        outcomes = {env: Outcome([], []) for env in envs}
        for env, info in self.infos:
            outcomes[env].infos.append((env, info))
        for env, picked in self.objects:
            outcomes[env].objects.append((env, picked))
        return outcomes


EMPTY = Outcome([], [])


def merge_infos(env: VectorEnv, outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Merges infos into arrays with a row for each environment of a vectorised one."""
    return _merge(env, range(env.num_envs), outcomes)


def merge_some_infos(envs: np.ndarray, outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Merges infos into arrays with a row for each of these environments; `env_id` holds their indexes."""
    batch = VectorEnv()
    batch.num_envs = envs.size
    infos = _merge(batch, {env: row for row, env in enumerate(envs.tolist())}, outcomes)
    infos["env_id"] = envs
    return infos


def split_infos(envs: Iterable[int], outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """The info of each of these environments, in their order; what an environment does not tell is an empty dict."""
    found: dict[int, dict[str, Any]] = {env: {} for env in envs}
    for outcome in outcomes:
        for env, info in outcome.infos:
            if env in found:
                found[env].update(info)
    return list(found.values())


def pack(value: Any) -> bytes:
    """Pickles a value.

    Raises:
        Exception: something in it cannot be pickled; if it is in an info, a note names the environment.
    """
    try:  # pickle alone takes a tenth of cloudpickle's time for numbers, strings and arrays
        buffer = io.BytesIO()
        _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
        return buffer.getvalue()
    except Exception:
        return _pack_slowly(value)


def unpack(data: bytes) -> Any:
    """Unpickles what `pack` returned; no bytes stand for an empty outcome."""
    return pickling.loads(data) if data else EMPTY


def _pack_slowly(value: Any) -> bytes:
    try:
        return pickling.dumps(value)
    except Exception as error:
        for env, info in value.infos if isinstance(value, Outcome) else ():
            for key in info:
                if not _is_picklable(info[key]):
                    failures.add_note(error, f"info {key!r} of environment {env} cannot be sent to the trainer")
        raise


def _is_picklable(value: Any) -> bool:
    try:
        pickling.dumps(value)
    except Exception:
        return False
    return True


def _merge(batch: VectorEnv, rows: Sequence[int] | dict[int, int], outcomes: Iterable[Outcome]) -> dict[str, Any]:
    infos: dict[str, Any] = {}
    for outcome in outcomes:
        for env, info in outcome.infos:
            infos = batch._add_info(infos, info, rows[env])
    return infos


def _reduce_number(value: np.generic) -> tuple[Any, ...]:
    return type(value), (value.item(),)


class _Pickler(pickle.Pickler):
    # numpy's own pickles of scalars, bytes with a dtype, take three times as long.
    dispatch_table = dict.fromkeys((np.dtype(letter).type for letter in "?bBhHiIlLqQefd"), _reduce_number)
