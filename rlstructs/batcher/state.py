"""The state dict of a batcher: makes one, and checks one that is loaded.

It holds dicts, lists, tensors, numbers and texts:

    format, version         of the layout of the state
    seeds                   the `seeds` argument of the batcher; missing in older states
    batcher                 what must be the same in the batcher that loads it: n_processes (0 counts as 1), n_envs,
                            seeds, agent_seeds, keys
    weights_version         how often `update` was called
    steps                   how many steps were handed out; missing in older states
    workers                 by worker: how often its streams have started anew, and its counters, of which older states
                            lack env_restarts
    episodes                those that ended and were not taken; dropped_episodes
    statistics              by name: count, mean, m2
    exact                   see `exact_state`; only in exact states, whose version is 2
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from rlstructs.batcher import exact_state
from rlstructs.batcher.engine import Delivery, Engine
from rlstructs.batcher.lifecycle import Lifecycle, Phase
from rlstructs.errors import SpecError, StateError
from rlstructs.moments import Moments
from rlstructs.seeding import seeds_argument
from rlstructs.shared.layout import Layout
from rlstructs.structures.arrays import TensorSpec
from rlstructs.workers.interrupts import defer_first_interrupt

State = dict[str, Any]

FORMAT, VERSION, EXACT_VERSION = "rlstructs.RL_Batcher", 1, 2
# How every message begins.
FAILED = "load_state_dict: "


def _describe_batcher(layout: Layout, seeds: Sequence[int], agent_seeds: Sequence[int] | None) -> State:
    """Returns the settings that must be equal in the batcher that loads a state.

    There is one seed for each worker.
    """
    keys = {f"observation/{key}": _format_spec(spec) for key, spec in layout.observation.items()}
    keys |= {f"action/{key}": _format_spec(spec) for key, spec in layout.action.items()}
    keys |= {key: _format_spec(spec) for key, spec in layout.info.items()}
    return {
        "n_processes": len(seeds),
        "n_envs": layout.n_slots // len(seeds),
        "seeds": [int(seed) for seed in seeds],
        "agent_seeds": None if agent_seeds is None else [int(seed) for seed in agent_seeds],
        "keys": keys,
    }


def make_state(engine: Engine) -> State:
    """Makes a plain state."""
    settings, episodes = engine.settings, engine.episodes
    return {
        "format": FORMAT,
        "version": VERSION,
        "seeds": seeds_argument(settings.seeds),
        "batcher": _describe_batcher(engine.layout, settings.seeds, settings.agent_seeds),
        "weights_version": engine.policy_version,
        "steps": engine.meter.n_steps,
        "workers": engine.get_states(),
        "episodes": episodes.peek(),
        "dropped_episodes": episodes.n_dropped,
        "statistics": _pack_statistics(engine.statistics),
    }


def _pack_statistics(statistics: Mapping[str, Moments]) -> State:
    """Returns the moments as numbers and tensors, copied."""
    return {
        name: {
            "count": kept.count,
            "mean": torch.tensor(kept.mean, device="cpu"),
            "m2": torch.tensor(kept.m2, device="cpu"),
        }
        for name, kept in statistics.items()
    }


def unpack_statistics(state: State) -> dict[str, Moments]:
    """Returns the moments of a state's statistics, copied."""
    return {
        name: Moments(kept["count"], *(kept[each].detach().cpu().numpy().copy() for each in ("mean", "m2")))
        for name, kept in state.items()
    }


def check(state: Any, own: State) -> State:
    """Returns a state, with entries added that older states lack.

    Raises:
        SpecError: a batcher whose own state is `own` cannot load it; the message names what differs.
    """
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        what = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise SpecError(f"load_state_dict: needs what RL_Batcher.state_dict gave, got {what!r}")
    if state.get("version") == EXACT_VERSION and "exact" in state:
        state = {**state, "version": VERSION}
        del state["exact"]
    if state.get("version") != VERSION:
        raise SpecError(f"load_state_dict: the state is of version {state.get('version')!r}, expected {VERSION}")
    try:
        _check_same("batcher", state.get("batcher"), own["batcher"])
    except SpecError as error:
        if str(error).startswith(f"{FAILED}seeds is") and "seeds" in state:
            raise SpecError(f"{error}; make the batcher with seeds={state['seeds']!r}") from None
        raise
    state = {"steps": 0, **state, "workers": _add_counters(state.get("workers"), own["workers"])}
    given, needed = ({key: value for key, value in each.items() if key != "seeds"} for each in (state, own))
    _check_form("state", given, needed)
    for name, kept in state["statistics"].items():
        if not (kept["mean"].isfinite().all() and kept["m2"].isfinite().all() and (kept["m2"] >= 0).all()):
            raise SpecError(f"load_state_dict: statistics of {name!r} are not finite, or negative")
    _check_episodes(state["episodes"], own["batcher"]["n_processes"] * own["batcher"]["n_envs"])
    found: State = state
    return found


def _add_counters(workers: Any, own: list[State]) -> Any:
    """Adds the counters that older states lack; other values stay as they are."""
    if not isinstance(workers, list):
        return workers
    n_envs = len(own[0]["env_restarts"])
    return [{"env_restarts": [0] * n_envs, **each} if isinstance(each, dict) else each for each in workers]


def _check_same(where: str, given: Any, own: Any) -> None:
    """Raises SpecError unless both are equal.

    Compares dicts key by key, so that the message names the difference.
    """
    if isinstance(own, dict) and isinstance(given, dict):
        for key in {**own, **given}:
            name = key if where in ("batcher", "keys") else f"{where}/{key}"
            _check_same(str(name), given.get(key, "missing"), own.get(key, "missing"))
    elif type(given) is not type(own) or given != own:
        raise SpecError(f"{FAILED}{where} is {given!r} in the state, in this batcher it is {own!r}")


def _check_form(where: str, given: Any, own: Any) -> None:
    """Raises SpecError unless two values have the same structure.

    Keys, lengths, types and dtypes must agree; shapes too, except of columns of episodes.
    """
    if type(given) is not type(own):
        raise SpecError(f"load_state_dict: {where} must be a {type(own).__name__}, got {type(given).__name__}")
    if isinstance(own, dict):
        if given.keys() != own.keys():
            found = sorted(map(str, given))
            raise SpecError(f"load_state_dict: {where} has the keys {found}, expected {sorted(own)}")
        for key in own:
            _check_form(f"{where}[{key!r}]", given[key], own[key])
    elif isinstance(own, list):
        if len(given) != len(own):
            raise SpecError(f"load_state_dict: {where} has {len(given)} entries, expected {len(own)}")
        for at, pair in enumerate(zip(given, own, strict=True)):
            _check_form(f"{where}[{at}]", *pair)
    elif isinstance(own, torch.Tensor):
        same = given.shape == own.shape or (given.ndim == 1 and "episodes" in where)
        if given.dtype != own.dtype or given.layout != torch.strided or not same:
            raise SpecError(
                f"load_state_dict: {where} is {tuple(given.shape)} {given.dtype}, "
                f"expected {tuple(own.shape)} {own.dtype}"
            )
    elif isinstance(own, (int, float)) and not 0 <= given < math.inf:
        raise SpecError(f"load_state_dict: {where} must not be negative, got {given}")


def _check_episodes(episodes: dict[str, torch.Tensor], n_envs: int) -> None:
    """Raises SpecError unless these are columns of episodes of `n_envs` environments."""
    counts = {key: len(column) for key, column in episodes.items()}
    if len(set(counts.values())) != 1:
        raise SpecError(f"load_state_dict: episodes has columns of different lengths: {counts}")
    env_index, length = episodes["env_index"], episodes["length"]
    if ((env_index < 0) | (env_index >= n_envs)).any() or (length < 1).any():
        raise SpecError(f"load_state_dict: episodes has an env_index not in [0, {n_envs}), or a length below 1")


def _format_spec(spec: TensorSpec) -> str:
    """Returns dtype and shape of a key as text."""
    return f"{str(spec[1]).removeprefix('torch.')} {tuple(spec[0])}"


# The phases in which an exact state can be taken.
EXACT_PHASES = Phase.NEW, Phase.READY, Phase.RUNNING, Phase.LEASED, Phase.ENDED


def take_state(engine: Engine, life: Lifecycle, delivery: Delivery, exact: bool | str) -> dict[str, Any]:
    """Makes what `RL_Batcher.state_dict` returns."""
    life.check_open("state_dict")
    if exact not in (False, True, "best"):
        raise SpecError(f"state_dict: exact must be False, True or 'best', got {exact!r}")
    if exact is False:
        return make_state(engine)
    life.check("state_dict", *EXACT_PHASES)
    delivery.check_handed_out("state_dict")
    with life.note_failures("state_dict", engine.is_halfway):
        found = engine.take_exact(exact == "best")
    if isinstance(found, Exception):
        raise found
    exact_part = exact_state.pack(found, engine.exact_settings, engine.noun, delivery.find_phase())
    return {**make_state(engine), "version": EXACT_VERSION, "exact": exact_part}


def plan_load(engine: Engine, life: Lifecycle, state: dict[str, Any]) -> Callable[[], Callable[[], None]]:
    """Checks the argument of `RL_Batcher.load_state_dict`; changes nothing.

    Raises what `load_state_dict` raises.

    Returns:
        A function that loads the state, which runs the code of environments and agents. It returns another function,
        to be called last: that writes to the memory that is fed, which may have been restored meanwhile.
    """
    life.check("load_state_dict", Phase.NEW, Phase.READY, Phase.ENDED, Phase.INTERRUPTED)
    checked = check(state, make_state(engine))
    if "exact" in state:
        found, phase = exact_state.unpack(state["exact"], engine.exact_settings, engine.job_state_class)
        load = partial(engine.load_exact, found)
    else:
        load, phase = partial(engine.load, checked, unpack_statistics(checked["statistics"])), Phase.NEW

    def load_first() -> Callable[[], None]:
        with defer_first_interrupt(), life.note_failures("load_state_dict"):
            load()
        return finish

    def finish() -> None:
        with defer_first_interrupt(), life.note_failures("load_state_dict"):
            engine.write_waiting()
            life.phase = phase

    return load_first


def give_up(life: Lifecycle) -> None:
    """Makes a batcher whose state failed to load allow only `close`."""
    if life.phase is not Phase.FAILED:
        life.fail(StateError("other parts of its checkpoint were not restored"), "its checkpoint was not restored")


def check_between_rollouts(life: Lifecycle, delivery: Delivery, call: str) -> None:
    """Raises StateError while a rollout is under way or leased.

    Raises ClosedError if the batcher is closed.
    """
    delivery.drop_lease()
    life.check(call, *(phase for phase in Phase if phase not in (Phase.RUNNING, Phase.LEASED)))
