"""The keys of a transition in tianshou, and the conversion of rows.

    obs, act, rew, terminated, truncated     are required
    done                                     is terminated or truncated; computed when it is read
    obs_next                                 is optional; without it, it is the obs of the next row
    info, policy, and any other key          are optional

Each may be nested: `obs` is then `obs/image`, `obs/speed` and so on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.replay.draw.reading import ANCHOR, LAST, NEXT, SUM, Source, Sources
from rlstructs.replay.intake.arrays import flat_items, host_array, is_mapping
from rlstructs.replay.intake.infos import info_items
from rlstructs.replay.intake.roles import INFO, is_beside, is_info
from rlstructs.replay.leave.array_dict import ArrayDict
from rlstructs.replay.rows.spec import Spec

OBS, ACT, REW, DONE, OBS_NEXT = "obs", "act", "rew", "done", "obs_next"
FLAGS = ("terminated", "truncated")
REQUIRED = (OBS, ACT, REW, *FLAGS)
RESERVED = (*REQUIRED, DONE, OBS_NEXT, "info", "policy")
# Keys that may be added without a value; they are empty then.
ADDED_EMPTY = ("info", "policy")
# Keys that a batch has even if they were never stored.
MAY_BE_EMPTY = (*ADDED_EMPTY, OBS_NEXT)
# Keys that are read in stacks.
STACKED = (OBS, OBS_NEXT, "info", "policy")


def top(name: str) -> str:
    """Returns the first part of a name: `obs` of `obs/image`."""
    return name.partition("/")[0]


class TransitionDict(ArrayDict):
    """An `ArrayDict` with tianshou's keys.

    It has `info`, `policy` and `obs_next` until they are removed, empty if they were never stored. `keys` are the names
    at the top; iteration gives the names of all arrays, nested ones joined with `/`.

    Example:
        >>> batch = TransitionDict({"obs/x": 1})
        >>> batch.obs.x, batch.info, "info" in batch, list(batch.keys()), list(batch)
        (1, ArrayDict(), True, ['obs', 'obs_next', 'info', 'policy'], ['obs/x'])
    """

    def __missing__(self, name: str) -> Any:
        return self._nested(name) if name in self._given_empty() else super().__missing__(name)

    def __contains__(self, name: object) -> bool:
        return name in self._given_empty() or super().__contains__(name)

    def __delitem__(self, name: str) -> None:
        given = self._given_empty()
        if name not in given or dict.__contains__(self, name) or self._inside(name):
            super().__delitem__(name)
        vars(self)["_given"] = tuple(each for each in given if each != name)

    def _given_empty(self) -> tuple[str, ...]:
        """Returns the names that a batch has even if they are empty."""
        given: tuple[str, ...] = vars(self).get("_given", MAY_BE_EMPTY)
        return given

    def _like(self, items: Any) -> Any:
        made = super()._like(items)
        vars(made).update(vars(self))
        return made

    def keys(self) -> Any:
        """Returns the names at the top, in tianshou's order."""
        names = dict.fromkeys([*map(top, self), *self._given_empty()])
        return dict.fromkeys([*(name for name in RESERVED if name in names), *names]).keys()


def specs_of(columns: Mapping[str, Spec]) -> dict[str, Spec]:
    """Returns the specs of a batch's keys, in tianshou's order.

    The keys are the columns, and keys that are computed from them.
    """
    names = list(columns)
    if names:
        names.append(DONE)
    if not any(top(name) == OBS_NEXT for name in names):
        names += [OBS_NEXT + name[len(OBS) :] for name in names if top(name) == OBS]
    names.sort(key=lambda name: RESERVED.index(top(name)) if top(name) in RESERVED else len(RESERVED))
    return {name: columns[stored_as(name, columns)] for name in names}


def stored_as(name: str, columns: Collection[str]) -> str:
    """Returns the column from which a key is read."""
    if name in columns:
        return name
    return FLAGS[0] if name == DONE else OBS + name[len(OBS_NEXT) :]


def check_names(names: Iterable[str]) -> None:
    """Raises SpecError if one name is nested in another: `obs/image` in `obs`."""
    every = set(names)
    for name in every:
        parents = {name[:end] for end, letter in enumerate(name) if letter == "/"}
        if both := parents & every:
            raise SpecError(f"{min(both)!r} cannot be an array and have {name!r} in it")


def check_specs(specs: Mapping[str, Spec], taken: Iterable[str]) -> None:
    """Raises ValueError unless columns like these can hold transitions.

    Args:
        specs: by name.
        taken: other keys of their batches.
    """
    check_names(specs)
    check_required(specs)
    wrong = [name for name in specs if top(name) in {DONE, *taken}]
    wrong += [name for name in FLAGS if specs[name].dtype != np.bool_ or specs[name].shape]
    wrong += [REW] * (specs[REW].dtype.kind not in "biuf")
    if wrong:
        raise ValueError(f"column {wrong[0]!r} is {specs[wrong[0]]}, which a transition cannot have")


def check_required(names: Iterable[str]) -> None:
    """Raises MissingKeyError or SpecError unless the required keys are among these names."""
    every = set(names)
    tops = {top(name) for name in every}
    if lacking := [name for name in REQUIRED if name not in tops]:
        hint = "" if tops.issuperset(FLAGS) else "; 'done' does not say which of them an end is"
        raise MissingKeyError(f"key(s) {lacking} are missing, got {sorted(tops)}{hint}")
    if nested := [name for name in (REW, *FLAGS) if name not in every]:
        raise SpecError(f"{nested[0]!r} must be an array, got one that is nested")


def as_transitions(batch: Any, owner: str, ignored: Iterable[str], n_axes: int, only_last: bool) -> dict[str, Any]:
    """Converts a batch to rows of columns.

    Args:
        batch: as for `flat_items`; values that are None in every row are left out, except infos.
        owner: caller, for messages.
        ignored: keys that are left out.
        n_axes: number of axes in front of the axes of a row: 0 or 1.
        only_last: whether to take only the last of each stack of observations.

    Returns:
        Name -> `(n, *shape)`, of the library of the values; flags are bool and rewards floats; for infos see
        `info_items`.

    Raises:
        TypeError, SpecError: it is no batch, or a value does not fit.
    """
    rows: dict[str, Any] = {}
    others, infos = _split_infos(batch, owner)
    for name, value in flat_items(others, owner).items():
        if _is_nothing(value) or top(name) in ignored:
            continue
        rows[name] = as_column(name, value, n_axes, only_last)
        if n_axes == 0:
            rows[name] = rows[name][None]
    for name, value in infos.items():
        items = info_items(name, value, n_axes, owner)
        if twice := rows.keys() & items.keys():
            raise SpecError(f"{owner}: key {sorted(twice)[0]!r} is given twice")
        rows |= items
    return rows


def _split_infos(batch: Any, owner: str) -> tuple[Any, dict[str, Any]]:
    """Splits a batch into its infos, by name, and the rest.

    Infos are not converted. Returns the rest first.
    """
    if not is_mapping(batch) or not any(isinstance(key, str) and is_info(key) for key in batch.keys()):  # noqa: SIM118
        return batch, {}
    if isinstance(batch, ArrayDict):
        batch = dict(dict.items(batch))  # or nested arrays would come twice
    items = {key: batch[key] for key in batch.keys()}  # noqa: SIM118
    infos = {key: items.pop(key) for key in list(items) if isinstance(key, str) and is_info(key)}
    return items, infos


def _is_nothing(value: Any) -> bool:
    """Whether a value is None, or None in every row."""
    if type(value) is np.ndarray and value.dtype == object and value.size:
        return all(each is None for each in value.flat)
    return value is None


def as_columns(values: Mapping[str, Any], n_axes: int, only_last: bool) -> dict[str, Any]:
    """Calls `as_column` for values by name."""
    return {name: as_column(name, value, n_axes, only_last) for name, value in values.items()}


def as_column(name: str, value: Any, n_axes: int, only_last: bool = False) -> Any:
    """Converts a value so that its column takes it after a cast.

    It has `n_axes` axes in front of the axes of a row.
    """
    is_array = all(hasattr(value, attribute) for attribute in ("__getitem__", "ndim", "__array__"))
    if not is_array or isinstance(value, np.flexible):
        value = host_array(name, value)  # numbers, texts, lists, and warp's arrays, which have no plain indexing
    if value.ndim < n_axes:
        raise SpecError(f"{name!r} has shape {tuple(value.shape)}, expected a first axis of rows")
    if only_last and top(name) in (OBS, OBS_NEXT):
        if value.ndim == n_axes or value.shape[n_axes] == 0:
            raise SpecError(f"{name!r} has shape {tuple(value.shape)}: there is no axis of which to save the last")
        value = value[(slice(None),) * n_axes + (-1,)]
    if name in FLAGS:
        if math.prod(value.shape[n_axes:]) != 1:  # single environments that return arrays have further axes
            raise SpecError(f"{name!r} has shape {tuple(value.shape)}, expected one bool for each row")
        return as_flags(name, value).reshape(value.shape[:n_axes])
    return as_rewards(name, value) if top(name) == REW else value


def as_flags(name: str, value: Any) -> np.ndarray:
    """Converts numbers that are 0 or 1 to bool."""
    flags = host_array(name, value)
    if flags.dtype == bool:
        return flags
    if flags.dtype.kind not in "biuf" or not ((flags == 0) | (flags == 1)).all():
        raise SpecError(f"{name!r} must hold bools, or 0 and 1, got {flags.dtype}: {np.unique(flags)[:4]}")
    return flags.astype(bool)


def as_rewards(name: str, value: Any) -> Any:
    """Converts numbers to float64, unless they are floats already."""
    if type(value) is np.ndarray and value.dtype.kind == "f":
        return value
    if (isinstance(value, torch.Tensor) and value.is_floating_point()) or "bfloat16" in str(value.dtype):
        return value
    rewards = host_array(name, value)
    if rewards.dtype.kind not in "biuf":
        raise SpecError(f"{name!r} must hold numbers, got {rewards.dtype}")
    return rewards if rewards.dtype.kind == "f" else rewards.astype(np.float64)


def trajectory_names(keys: Collection[str], ignores_next: bool) -> dict[str, str]:
    """Chooses a key of a batcher's trajectories for each column."""
    start, following = "observation/", "_observation/"
    seen = [key[len(start) :] for key in keys if key.startswith(start) and not is_beside(key[len(start) :])]
    at = {"": "frame"} if seen == ["frame"] else {f"/{key}": key for key in seen}
    names = {OBS + here: start + key for here, key in at.items()}
    if not ignores_next:
        names |= {OBS_NEXT + here: following + key for here, key in at.items()}
    infos = [key for key in keys if key.startswith(following + INFO)]
    names |= {key.removeprefix(following): key for key in infos}
    return names | {ACT: "action/action", REW: f"{following}reward"} | {flag: following + flag for flag in FLAGS}


def raw_numbers(raw: Any, spec: Spec) -> Any:
    """Converts stored values for another column: bits of bfloat16 become numbers."""
    if not spec.is_bfloat16:
        return raw
    tensor = raw if isinstance(raw, torch.Tensor) else torch.from_numpy(raw)
    return tensor.view(torch.bfloat16)


def ends_of(rows: Mapping[str, Any]) -> np.ndarray:
    """Marks the ends of episodes, bool (n,)."""
    return np.asarray(np.logical_or(*(host_array(name, rows[name]) for name in FLAGS)))


@lru_cache
def sources_of(names: tuple[str, ...], columns: tuple[str, ...], stacked: tuple[str, ...] | None = STACKED) -> Sources:
    """Returns the way to read keys of a batch.

    Args:
        names: of columns, or of keys that are computed from them.
        columns: the names of all columns.
        stacked: the first parts of the names that are stacked; None for all names.
    """
    sources = {}
    for name in names:
        first, place = top(name), ANCHOR
        if name == REW:
            place = SUM
        elif name in (DONE, *FLAGS) or first == OBS_NEXT:
            place = LAST if name == DONE or name in columns else NEXT
        stored = FLAGS if name == DONE else (stored_as(name, columns),)
        sources[name] = Source(stored, place, stacked is None or first in stacked)
    return Sources(sources)
