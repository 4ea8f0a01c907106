"""What `RL_Batcher.state_dict` gives: dicts, lists, tensors, numbers and texts, and the checks of one that is given.

    format, version         which layout this is
    seeds                   what the batcher was made with, or had drawn, in a state that is not too old
    batcher                 what must be the same in the one that takes it: n_processes (0 as 1), n_envs, seeds,
                            agent_seeds, keys
    weights_version         how often `update` was called
    workers                 by worker: which part of its streams it has, and its counters
    episodes                those that ended and were not taken; dropped_episodes
    statistics              by name: count, mean, m2
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlstructs.batcher.engine import Engine
from rlstructs.errors import SpecError
from rlstructs.moments import Moments
from rlstructs.seeding import seeds_argument
from rlstructs.shared.layout import Layout
from rlstructs.structures.arrays import TensorSpec

State = dict[str, Any]

FORMAT, VERSION = "rlstructs.RL_Batcher", 1
# What messages begin with.
FAILED = "load_state_dict: "


def batcher_of(layout: Layout, seeds: Sequence[int], agent_seeds: Sequence[int] | None) -> State:
    """What must be the same in the batcher that takes a state; one seed for each worker."""
    keys = {f"observation/{key}": _shown(spec) for key, spec in layout.observation.items()}
    keys |= {f"action/{key}": _shown(spec) for key, spec in layout.action.items()}
    keys |= {key: _shown(spec) for key, spec in layout.info.items()}
    return {
        "n_processes": len(seeds),
        "n_envs": layout.n_slots // len(seeds),
        "seeds": [int(seed) for seed in seeds],
        "agent_seeds": None if agent_seeds is None else [int(seed) for seed in agent_seeds],
        "keys": keys,
    }


def of_engine(engine: Engine) -> State:
    """What `RL_Batcher.state_dict` gives."""
    settings, supervisor, episodes = engine.settings, engine.supervisor, engine.transport.episodes
    return {
        "format": FORMAT,
        "version": VERSION,
        "seeds": seeds_argument(settings.seeds),
        "batcher": batcher_of(engine.transport.layout, settings.seeds, settings.agent_seeds),
        "weights_version": engine.policy_version,
        "workers": supervisor.state(),
        "episodes": episodes.peek(),
        "dropped_episodes": episodes.n_dropped,
        "statistics": of_statistics(supervisor.statistics),
    }


def of_statistics(statistics: Mapping[str, Moments]) -> State:
    """Moments as numbers and tensors."""
    return {
        name: {"count": kept.count, "mean": _copied(kept.mean), "m2": _copied(kept.m2)}
        for name, kept in statistics.items()
    }


def _copied(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(array))


def to_statistics(state: State) -> dict[str, Moments]:
    """What `of_statistics` was given."""
    return {
        name: Moments(kept["count"], *(kept[part].detach().cpu().numpy().copy() for part in ("mean", "m2")))
        for name, kept in state.items()
    }


def check(state: Any, own: State) -> None:
    """Raises SpecError, which names what differs, unless a batcher whose own state is `own` can take `state`."""
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        what = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise SpecError(f"load_state_dict: needs what RL_Batcher.state_dict gave, got {what!r}")
    if state.get("version") != VERSION:
        raise SpecError(f"load_state_dict: the state is of version {state.get('version')!r}, needed is {VERSION}")
    try:
        _check_same("batcher", state.get("batcher"), own["batcher"])
    except SpecError as error:
        if str(error).startswith(f"{FAILED}seeds is") and "seeds" in state:
            raise SpecError(f"{error}; make the batcher with seeds={state['seeds']!r}") from None
        raise
    given, needed = ({key: value for key, value in each.items() if key != "seeds"} for each in (state, own))
    _check_form("state", given, needed)
    for name, kept in state["statistics"].items():
        if not (kept["mean"].isfinite().all() and kept["m2"].isfinite().all() and (kept["m2"] >= 0).all()):
            raise SpecError(f"load_state_dict: statistics of {name!r} are not finite, or negative")
    _check_episodes(state["episodes"], own["batcher"]["n_processes"] * own["batcher"]["n_envs"])


def _check_same(where: str, given: Any, own: Any) -> None:
    """Raises unless both are equal; looks into dicts, to name what differs."""
    if isinstance(own, dict) and isinstance(given, dict):
        for key in {**own, **given}:
            name = key if where in ("batcher", "keys") else f"{where}/{key}"
            _check_same(str(name), given.get(key, "missing"), own.get(key, "missing"))
    elif type(given) is not type(own) or given != own:
        raise SpecError(f"{FAILED}{where} is {given!r} in the state, in this batcher it is {own!r}")


def _check_form(where: str, given: Any, own: Any) -> None:
    """Raises unless a value has the form of another: keys, lengths, types, dtypes, and shapes of statistics."""
    if type(given) is not type(own):
        raise SpecError(f"load_state_dict: {where} must be a {type(own).__name__}, got {type(given).__name__}")
    if isinstance(own, dict):
        if given.keys() != own.keys():
            found = sorted(map(str, given))
            raise SpecError(f"load_state_dict: {where} has the keys {found}, needed are {sorted(own)}")
        for key in own:
            _check_form(f"{where}[{key!r}]", given[key], own[key])
    elif isinstance(own, list):
        if len(given) != len(own):
            raise SpecError(f"load_state_dict: {where} has {len(given)} entries, needed are {len(own)}")
        for at, pair in enumerate(zip(given, own, strict=True)):
            _check_form(f"{where}[{at}]", *pair)
    elif isinstance(own, torch.Tensor):
        same = given.shape == own.shape or (given.ndim == 1 and "episodes" in where)
        if given.dtype != own.dtype or given.layout != torch.strided or not same:
            raise SpecError(f"load_state_dict: {where} is {tuple(given.shape)} {given.dtype}, "
                            f"expected {tuple(own.shape)} {own.dtype}")  # fmt: skip
    elif isinstance(own, (int, float)) and not 0 <= given < math.inf:
        raise SpecError(f"load_state_dict: {where} must not be negative, got {given}")


def _check_episodes(episodes: dict[str, torch.Tensor], n_envs: int) -> None:
    counts = {key: len(column) for key, column in episodes.items()}
    if len(set(counts.values())) != 1:
        raise SpecError(f"load_state_dict: episodes has columns of different lengths: {counts}")
    env_index, length = episodes["env_index"], episodes["length"]
    if ((env_index < 0) | (env_index >= n_envs)).any() or (length < 1).any():
        raise SpecError(f"load_state_dict: episodes has an env_index not in [0, {n_envs}), or a length below 1")


def _shown(spec: TensorSpec) -> str:
    return f"{str(spec[1]).removeprefix('torch.')} {tuple(spec[0])}"
