"""The settings of what is stored and drawn, and a case of them: every row that is drawn is proved.

Row t of environment `lane` has the number `lane * N_EACH + t`, from which all that it holds follows.
"""

from __future__ import annotations

import copy
import pickle
import tempfile
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

import gymnasium
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces
from pair_worlds import length_of
from pairs import Rule, Table

from rlstructs import (
    Checkpoint,
    DictTensor,
    GymEnvInf,
    PackedTrajectories,
    RL_Agent,
    RL_Batcher,
    SpecError,
    TemporalDictTensor,
    Trajectories,
)
from rlstructs.memories import jax as jax_memories
from rlstructs.memories import torch as torch_memories
from rlstructs.memories import warp as warp_memories
from rlstructs.replay import (
    CachedReplayBuffer,
    ChunkReplayBuffer,
    DictTensorPrioritizedReplayBuffer,
    DictTensorReplayBuffer,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSliceSampler,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    VectorReplayBuffer,
)

N_LANES, T, CAPACITY, N_EACH, N_STEP, GAMMA, LENGTH = 3, 4, 22, 500, 3, 0.5, 3
N_DRAWN = 30
PACKED = {"packed": True, "context": 2}

SKRL = ("skrl torch", "skrl jax", "skrl warp")
ONE_LANE = ("tianshou one", "rlberry one", "torchrl list", "torchrl tensor", "torchrl memmap")
TIANSHOU = ("tianshou one", "tianshou vector", "tianshou cached")
RLBERRY = ("rlberry one", "rlberry lanes")
TORCHRL = ("torchrl list", "torchrl tensor", "torchrl memmap")
SETTINGS = {
    "surface": (*SKRL, *TIANSHOU, *RLBERRY, *TORCHRL),
    "into": ("trajectories", "rows", "fed", "mixed"),
    "out": ("sample", "n_step", "cross", "mask", "never", "packed", "stack", "all", "index", "iterate",
            "neighbours"),
    "priorities": ("no", "yes"),
    "restore": ("none", "npz", "pt", "h5", "csv", "pickle", "deepcopy", "checkpoint", "state_dict", "load while fed"),
    "shows": ("float32", "float64", "int64", "uint8", "bfloat16", "frame", "dict"),
    "acts": ("int", "float"),
    "framework": ("torch", "numpy", "jax", "warp"),
    "given": ("torch", "numpy", "jax"),
    "option": ("none", "shared", "strict", "ignore_obs_next", "save_only_last_obs"),
    "filled": ("half", "twice", "tiny"),
}  # fmt: skip


def others(*families):
    return tuple(name for name in SETTINGS["surface"] if name not in families)


RULES = [
    # What the library refuses.
    Rule({"surface": ("tianshou cached",), "priorities": ("yes",)}, "must be a plain ReplayBuffer", TypeError),
    Rule({"surface": SKRL, "restore": ("h5",)}, "the format must be one of", SpecError),
    Rule({"into": ("fed",), "filled": ("tiny",), "surface": (*SKRL, "tianshou one", "tianshou vector", *RLBERRY)},
         "rows, and a rollout up to", SpecError),
    # What there is no call for, or no sense in.
    Rule({"into": ("mixed",), "surface": ONE_LANE}, "rows of several environments in turns"),
    Rule({"surface": TORCHRL, "into": ("fed",), "filled": ("tiny",)}, "its rows wait for no room"),
    Rule({"into": ("mixed",), "option": ("save_only_last_obs",)}, "observations come as stacks"),
    Rule({"into": ("mixed",), "restore": ("load while fed",)}, "it is not fed"),
    Rule({"surface": SKRL, "out": ("stack", "neighbours")}, "memories have no stacks"),
    Rule({"surface": TIANSHOU, "out": ("cross", "mask", "never")}, "tianshou has no sequences"),
    Rule({"surface": RLBERRY, "out": ("index", "iterate", "neighbours")}, "rlberry has no indexing"),
    Rule({"surface": TORCHRL, "out": ("cross", "mask", "neighbours")}, "slices never cross"),
    Rule({"surface": others(*SKRL), "restore": ("csv",)}, "a format of skrl"),
    Rule({"surface": others(*TORCHRL), "restore": ("state_dict",)}, "a method of torchrl"),
    Rule({"into": ("trajectories", "rows"), "restore": ("load while fed",)}, "it is not fed"),
    Rule({"surface": others(*SKRL), "option": ("shared", "strict")}, "options of skrl"),
    Rule({"surface": others(*TIANSHOU), "option": ("ignore_obs_next", "save_only_last_obs")}, "options of tianshou"),
    Rule({"option": ("save_only_last_obs",),
          "out": ("sample", "n_step", "packed", "all", "index", "iterate", "neighbours")},
         "it is for stacks"),
    Rule({"option": ("save_only_last_obs",), "into": ("trajectories", "fed")}, "observations come as stacks"),
    Rule({"surface": TORCHRL, "out": ("iterate",), "priorities": ("yes",)}, "it iterates for ever"),
    Rule({"surface": SKRL, "framework": ("numpy",)}, "it is the memory's own"),
    Rule({"surface": ("skrl torch",), "framework": ("jax", "warp")}, "it is the memory's own"),
    Rule({"surface": ("skrl jax",), "framework": ("torch", "warp")}, "it is the memory's own"),
    Rule({"surface": ("skrl warp",), "framework": ("torch", "jax")}, "it is the memory's own"),
    Rule({"shows": ("bfloat16",), "given": ("numpy",)}, "numpy has none"),
    Rule({"shows": ("bfloat16",), "into": ("trajectories", "fed")}, "an environment shows none"),
    Rule({"surface": TIANSHOU, "shows": ("bfloat16",), "framework": ("numpy",)}, "numpy has none"),
    Rule({"surface": RLBERRY, "shows": ("bfloat16",), "framework": ("numpy",)}, "numpy has none"),
    Rule({"surface": TORCHRL, "shows": ("bfloat16",), "framework": ("numpy",)}, "numpy has none"),
    Rule({"into": ("trajectories", "fed"), "given": ("numpy", "jax")}, "trajectories are torch's"),
    Rule({"given": ("jax",), "shows": ("float64", "int64")}, "jax has none by default"),
    Rule({"framework": ("warp",), "shows": ("frame", "dict"), "out": ("stack", "cross", "mask", "never")},
         "arrays of warp have 4 axes"),
    Rule({"framework": ("warp",), "shows": ("frame", "dict"), "surface": RLBERRY}, "arrays of warp have 4 axes"),
]  # fmt: skip

# --- what rows hold -----------------------------------------------------------------------------------


def _episodes():
    """Of each environment and time: the step in its episode, and whether the episode ends with it, and terminated."""
    step, ends, terminated = (np.zeros(N_LANES * N_EACH, dtype) for dtype in (np.int64, bool, bool))
    for lane in range(N_LANES):
        t = episode = 0
        while t < N_EACH:
            n = min(length_of(lane, episode), N_EACH - t)
            at = lane * N_EACH + t + np.arange(n)
            step[at] = np.arange(n)
            ends[at[-1]], terminated[at[-1]] = True, episode % 2 == 0
            t, episode = t + n, episode + 1
    return step, ends, terminated


STEP, ENDS, TERMINATED = _episodes()


def digits(ids, is_final=False):
    return np.stack([ids // 40, ids % 40, STEP[ids] + (120 if is_final else 0)], -1)


def frames(ids, is_final=False):
    found = (np.asarray(ids)[..., None] * 7 + np.arange(320)) % 251
    found[..., :3] = digits(ids, is_final)
    return found.reshape(*np.shape(ids), 4, 8, 10).astype(np.uint8)


def shown(kind, ids, is_final=False):
    """The observations of rows by part; "" for the whole. bfloat16 as float32."""
    if kind == "frame":
        return {"": frames(ids, is_final)}
    if kind == "dict":
        vector = digits(ids, is_final).astype(np.float32)
        return {"a": vector, "image": frames(ids, is_final), "deep/n": vector[..., 0].astype(np.int64)}
    return {"": digits(ids, is_final).astype("float32" if kind == "bfloat16" else kind)}


def followed(kind, ids):
    """What follows rows: the final observation, or that of the next row."""
    ends = ENDS[ids]
    final, following = shown(kind, ids, True), shown(kind, np.minimum(ids + 1, N_LANES * N_EACH - 1))
    return {key: np.where(ends.reshape(ends.shape + (1,) * (final[key].ndim - ends.ndim)), final[key], following[key])
            for key in final}  # fmt: skip


def acted(kind, ids):
    return ids % 5 if kind == "int" else np.stack([ids % 5 / 4, ids % 3 / -2], -1).astype(np.float32)


def ids_of(values):
    """The rows that observations are of, int64 (...); `values` have the numbers first, on their last axis."""
    return (values[..., 0] * 40 + values[..., 1]).astype(np.int64)


SPACES = {
    **{kind: spaces.Box(0, 250, (3,), kind) for kind in ("float32", "float64", "int64", "uint8")},
    "frame": spaces.Box(0, 255, (4, 8, 10), np.uint8),
}
SPACES["dict"] = spaces.Dict(
    {"a": SPACES["float32"], "image": SPACES["frame"], "deep": spaces.Dict({"n": spaces.Box(0, 250, (), np.int64)})}
)


class Numbered(gymnasium.Env):
    """Shows the rows of one environment."""

    def __init__(self, lane, shows, acts):
        self.at, self.shows, self.acts = lane * N_EACH, shows, acts
        self.observation_space = SPACES[shows]
        self.action_space = spaces.Discrete(5) if acts == "int" else spaces.Box(-1, 1, (2,), np.float32)

    def _show(self, found):
        if self.shows != "dict":
            return found[""]
        return {"a": found["a"], "image": found["image"], "deep": {"n": found["deep/n"]}}

    def reset(self, *, seed=None, options=None):
        return self._show(shown(self.shows, np.array(self.at))), {}

    def step(self, action):
        here, self.at = np.array(self.at), self.at + 1
        assert np.array_equal(action, acted(self.acts, here))
        over, terminated = bool(ENDS[here]), bool(TERMINATED[here])
        found = self._show(followed(self.shows, here))
        return found, int(here) / 8, over and terminated, over and not terminated, {}


class Reading(RL_Agent):
    """Acts as the row that it sees says."""

    def __init__(self, shows, acts):
        self.shows, self.acts = shows, acts

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        seen = observation["a" if self.shows == "dict" else "frame"].numpy().reshape(observation.n_elems(), -1)
        return DictTensor({"action": torch.from_numpy(acted(self.acts, ids_of(seen.astype(np.int64))))}), state


def create_env(shows, acts, n_envs, seed):
    return GymEnvInf([Numbered(lane, shows, acts) for lane in range(n_envs)], seed, keep_float64=True)


# --- surfaces -----------------------------------------------------------------------------------------

NAMES = {
    "skrl": ("observations", "next_observations", "actions", "rewards", "terminated", "truncated"),
    "tianshou": ("obs", "obs_next", "act", "rew", "terminated", "truncated"),
    "torchrl": ("obs", "next/obs", "action", "next/reward", "next/terminated", "next/truncated"),
}
NAMES["rlberry"] = NAMES["skrl"]
KEYS = ("observation/frame", "_observation/frame", "action/action", "_observation/reward", "_observation/terminated",
        "_observation/truncated")  # fmt: skip


def to_numpy(value):
    if isinstance(value, torch.Tensor):
        return (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()
    if hasattr(value, "numpy") and not isinstance(value, np.ndarray):  # of warp
        return value.numpy()
    found = np.asarray(value)
    return found.astype(np.float32) if found.dtype.name == "bfloat16" else found


def flat(batch, prefix=""):
    """Names joined with / -> arrays of numpy."""
    found = {}
    for key in batch.keys():  # noqa: SIM118 - a batch of tianshou iterates over rows
        value = batch[key]
        if hasattr(value, "keys"):
            found |= flat(value, f"{prefix}{key}/")
        elif value is not None:
            found[prefix + key] = to_numpy(value)
    return found


@dataclass
class Log:
    """What a memory has to hold: by lane, the numbers of rows in order, and where a new piece begins."""

    n_lanes: int
    capacity: int
    lanes: list = field(init=False)
    begins: list = field(init=False)

    def __post_init__(self):
        self.lanes, self.begins = ([[] for _ in range(self.n_lanes)] for _ in range(2))

    def add(self, lane, ids, begins=False):
        for number, at in enumerate(ids):
            self.lanes[lane].append(int(at))
            self.begins[lane].append((begins and number == 0) or STEP[at] == 0)

    def place(self, at):
        for lane, rows in enumerate(self.lanes):
            if at in rows[-self.capacity :]:
                return lane, rows.index(at)
        raise AssertionError(f"row {at} is not there any more, or never was")

    def after(self, at):
        """The row after a row in its episode, None at its end or at the newest one."""
        lane, place = self.place(at)
        rows = self.lanes[lane]
        goes_on = not ENDS[at] and place + 1 < len(rows) and not self.begins[lane][place + 1]
        return rows[place + 1] if goes_on else None

    def before(self, at):
        lane, place = self.place(at)
        is_first = self.begins[lane][place] or place == 0 or len(self.lanes[lane]) - place == self.capacity
        return None if is_first else self.lanes[lane][place - 1]

    def window(self, at, n):
        """The row and those after it in its episode, at most n."""
        found = [at]
        while len(found) < n and (following := self.after(found[-1])) is not None:
            found.append(following)
        return found

    def present(self):
        return sorted(at for rows in self.lanes for at in rows[-self.capacity :])


class Course:
    def __init__(self, case, stack):
        self.case, self.stack, self.family = case, stack, case["surface"].split()[0]
        self.is_one = case["surface"] in ONE_LANE
        self.names = NAMES[self.family]
        self.n_lanes = 1 if self.is_one and case["into"] == "rows" else N_LANES
        is_cached = case["surface"] == "tianshou cached"
        self.each = 3 if case["filled"] == "tiny" else CAPACITY  # T is 4
        self.capacity = self.each * (N_LANES if self.is_one else 1)
        self.log = Log(1 if self.is_one else N_LANES, 10**6 if is_cached else self.capacity)
        self.t, self.batcher = 0, None
        self.memory = self.make()
        if case["into"] in ("trajectories", "fed"):
            settings = {name: case[name] for name in ("shows", "acts")}
            self.batcher = stack.enter_context(
                RL_Batcher(T, Reading, settings, create_env, settings | {"n_envs": N_LANES}, 0, 0)
            )
            self.batcher.reset()
            if case["into"] == "fed":
                self.batcher.feed(self.memory, self.keys())

    def keys(self):
        return dict(zip(self.names, KEYS, strict=True))

    # Making

    def make(self, seed=0):
        case, surface = self.case, self.case["surface"]
        has_priorities, out = case["priorities"] == "yes", case["out"]
        if self.family == "skrl":
            library = {"torch": torch_memories, "jax": jax_memories, "warp": warp_memories}[surface.split()[1]]
            cls = library.PrioritizedMemory if has_priorities else library.RandomMemory
            memory = cls(memory_size=self.each, num_envs=N_LANES, device="cpu", seed=seed,
                         strict=case["option"] == "strict")  # fmt: skip
            if case["into"] in ("rows", "mixed"):
                self.create_tensors(memory)
            if case["option"] == "shared" and not seed:
                memory.share_memory()
            return memory
        reading = {"n_step": N_STEP, "gamma": GAMMA} if out == "n_step" else {}
        reading |= {"stack_num": 2} if out == "stack" else {}
        reading["framework"] = case["framework"]
        per = {"alpha": 0.6, "beta": 0.4} if has_priorities else {}
        if self.family == "rlberry":
            memory = ChunkReplayBuffer(
                self.capacity * self.log.n_lanes, seed, n_lanes=self.log.n_lanes, enable_prioritized=has_priorities,
                episode_ends=out if out in ("cross", "mask", "never") else "cross", **reading,
            )  # fmt: skip
            if case["into"] in ("rows", "mixed"):
                for name, value in self.row_values(np.zeros(1, np.int64)).items():
                    memory.setup_entry(name, value.dtype)
            return memory
        if self.family == "tianshou":
            reading |= {case["option"]: True} if case["option"] != "none" else {}
            return self.make_tianshou(surface, has_priorities, per | reading | {"random_seed": seed})
        storage = {"list": ListStorage, "tensor": LazyTensorStorage, "memmap": LazyMemmapStorage}[surface.split()[1]]
        settings = {"storage": storage(self.capacity), "generator": seed, "batch_size": N_DRAWN} | reading
        if out == "never":
            slices = {"slice_len": LENGTH, "strict_length": False}
            cls, args = (PrioritizedSliceSampler, (self.capacity, 0.6, 0.4)) if has_priorities else (SliceSampler, ())
            return DictTensorReplayBuffer(sampler=cls(*args, **slices), **settings)
        if out == "iterate":
            return DictTensorReplayBuffer(sampler=SamplerWithoutReplacement(), **settings)
        return (DictTensorPrioritizedReplayBuffer if has_priorities else DictTensorReplayBuffer)(**per, **settings)

    def make_tianshou(self, surface, has_priorities, settings):
        if surface == "tianshou vector":
            cls = PrioritizedVectorReplayBuffer if has_priorities else VectorReplayBuffer
            return cls(self.each * N_LANES, N_LANES, **settings)
        cls = PrioritizedReplayBuffer if has_priorities else ReplayBuffer
        if surface == "tianshou one":
            return cls(self.capacity, **settings)
        return CachedReplayBuffer(cls(CAPACITY * 20, **settings), N_LANES, 12)

    def create_tensors(self, memory):
        for name, value in self.row_values(np.zeros(1, np.int64)).items():
            shape = list(value.shape[1:])
            memory.create_tensor(name, shape or 1, dtype_of(value, self.case), keep_dimensions=bool(shape))

    # Writing

    def row_values(self, ids):
        """One row for each of these numbers, as arrays of the library that is given."""
        obs, following, act, rew, terminated, truncated = self.names
        found = {f"{obs}/{key}".rstrip("/"): value for key, value in shown(self.case["shows"], ids).items()}
        found |= {f"{following}/{key}".rstrip("/"): value for key, value in followed(self.case["shows"], ids).items()}
        found |= {act: acted(self.case["acts"], ids), rew: (ids / 8).astype(np.float32)}
        found |= {terminated: ENDS[ids] & TERMINATED[ids], truncated: ENDS[ids] & ~TERMINATED[ids]}
        if self.case["option"] == "save_only_last_obs":
            for name in found:
                if name.startswith("obs"):
                    found[name] = np.stack([np.zeros_like(found[name]), found[name]], 1)
        return {name: self.give(name, value) for name, value in found.items()}

    def give(self, name, value):
        is_shown = name.split("/")[0] in ("obs", "observations", "obs_next", "next_observations") or "/obs" in name
        if self.case["given"] == "numpy":
            return value
        is_half = self.case["shows"] == "bfloat16" and is_shown
        if self.case["given"] == "torch":
            return torch.from_numpy(value).bfloat16() if is_half else torch.from_numpy(value)
        return jnp.asarray(value, jnp.bfloat16) if is_half else jnp.asarray(value)

    def write(self):
        """T more rows of each environment."""
        if self.case["into"] == "mixed" and self.t % (2 * T):
            ids = np.arange(N_LANES)[:, None] * N_EACH + self.t + np.arange(T)
            self.memory.add_trajectories(self.trajectories(ids), self.keys())
            for lane, rows in enumerate(ids):
                self.note(lane, rows)
            self.t += T
            return
        if self.case["into"] in ("rows", "mixed"):
            for _ in range(T):
                self.write_row(np.arange(self.n_lanes) * N_EACH + self.t)
                self.t += 1
            return
        self.batcher.execute()
        if self.case["into"] == "fed":
            self.batcher.wait()
        else:
            self.memory.add_trajectories(self.batcher.get()[0], self.keys())
        for lane in range(N_LANES):
            self.note(lane, lane * N_EACH + self.t + np.arange(T), True)
        self.t += T

    def trajectories(self, ids):
        """Trajectories (3, T) of these rows, as a batcher gives them."""
        shows, named = self.case["shows"], {"": "frame"}
        found = {f"observation/{named.get(key, key)}": value for key, value in shown(shows, ids).items()}
        found |= {f"_observation/{named.get(key, key)}": value for key, value in followed(shows, ids).items()}
        found |= {"action/action": acted(self.case["acts"], ids), "_observation/reward": (ids / 8).astype(np.float32)}
        found["_observation/terminated"] = ENDS[ids] & TERMINATED[ids]
        found["_observation/truncated"] = ENDS[ids] & ~TERMINATED[ids]
        found["observation/initial_state"] = STEP[ids] == 0
        steps = {key: torch.from_numpy(value) for key, value in found.items()}
        if shows == "bfloat16":
            steps |= {key: steps[key].bfloat16() for key in ("observation/frame", "_observation/frame")}
        info = DictTensor({"env_index": torch.arange(N_LANES)})
        return Trajectories(info, TemporalDictTensor(steps, torch.full((N_LANES,), T)))

    def note(self, lane, ids, is_piece=False):
        self.log.add(0 if self.is_one else lane, ids, is_piece and self.is_one)

    def write_row(self, ids):
        values = self.row_values(ids)
        if self.family == "skrl":
            self.memory.add_samples(**values)
        elif self.family == "torchrl":
            self.memory.extend(values)
        elif self.is_one:
            values = {name: value[0] for name, value in values.items()}
            self.memory.append(values) if self.family == "rlberry" else self.memory.add(nest(values))
        else:
            self.memory.append(values) if self.family == "rlberry" else self.memory.add(nest(values))
        for lane, at in enumerate(ids.tolist()):
            self.note(lane, [at])

    # Restoring

    def restore(self):
        kind = self.case["restore"]
        if kind == "none":
            return
        old = self.memory
        if kind in ("pickle", "deepcopy"):
            self.memory = pickle.loads(pickle.dumps(old)) if kind == "pickle" else copy.deepcopy(old)
        elif kind == "state_dict":
            self.memory = self.make(1)
            self.memory.load_state_dict(old.state_dict())
        else:
            self.through_files(old, kind)
        if self.case["option"] == "shared" and self.memory is not old:
            self.memory.share_memory()  # a shared one takes no other tensors from a file
        if self.case["into"] == "fed" and self.memory is not old:
            self.batcher.feed(self.memory, self.keys())

    def through_files(self, old, kind):
        folder = self.stack.enter_context(tempfile.TemporaryDirectory())
        if kind == "checkpoint":
            with closing(Checkpoint(folder, memory=old)) as checkpoint:
                checkpoint.save(1)
            self.memory = self.make(1)
            with closing(Checkpoint(folder, memory=self.memory)) as checkpoint:
                assert checkpoint.restore() == 1
            return
        suffix = "npz" if kind == "load while fed" else kind
        if self.family == "skrl" and suffix != "h5":
            path = old.save(folder, format=suffix)
        else:
            path = f"{folder}/rows.{suffix}"
            old.save(path)
        if kind != "load while fed":
            self.memory = self.make(1)
        self.memory.load(path)

    # Reading

    def check(self):
        way = self.case["out"]
        fits = any(len(self.log.window(at, LENGTH)) == LENGTH for at in self.log.present())
        if way == "never" and not fits and self.family != "torchrl":  # whose slices may be shorter
            with pytest.raises(SpecError, match="nothing to sample"):
                getattr(self, f"draw_{self.family}")(way)
            return
        drawn = getattr(self, f"draw_{self.family}")(way)
        seen = set()
        for rows in drawn:
            seen |= self.check_rows({name: each for name, each in rows.items() if not name.startswith("#")}, rows, way)
        if way == "all" or (way == "iterate" and self.family != "skrl"):
            assert sorted(seen) == self.log.present(), f"{way}: {sorted(seen)}, expected {self.log.present()}"

    def check_rows(self, rows, more, way):
        """Raises AssertionError unless rows (B, ...), or (B, L, ...), hold what they have to; returns their numbers."""
        obs, following, act, rew, terminated, truncated = self.names
        mask, n_leading = more.get("#mask"), more.get("#axes", 1)
        first = rows[f"{obs}/a" if self.case["shows"] == "dict" else obs]
        if way == "stack":
            first = first.take(-1, n_leading)
        ids = ids_of(first.reshape(*first.shape[:n_leading], -1).astype(np.int64))
        mask = np.ones(ids.shape, bool) if mask is None else mask.reshape(ids.shape)
        for at in ids[mask].ravel().tolist():
            self.log.place(at)
        last = np.array([self.log.window(at, N_STEP)[-1] for at in ids.ravel()]) if way == "n_step" else ids.ravel()
        last = last.reshape(ids.shape)
        wanted = {f"{obs}/{key}".rstrip("/"): value for key, value in shown(self.case["shows"], ids).items()}
        wanted |= {f"{following}/{key}".rstrip("/"): value for key, value in self.following(last).items()}
        wanted[act], wanted[rew] = acted(self.case["acts"], ids), ids / 8
        if way == "n_step":
            sums = [sum(row / 8 * GAMMA**k for k, row in enumerate(self.log.window(at, N_STEP))) for at in ids.ravel()]
            wanted[rew] = np.array(sums).reshape(ids.shape)
        if not more.get("#marks_ends"):
            wanted[terminated] = ENDS[last] & TERMINATED[last]
            wanted[truncated] = ENDS[last] & ~TERMINATED[last]
        if way == "stack":
            self.check_stacks(rows, wanted, ids, n_leading)
        for name, value in wanted.items():
            assert name in rows, f"{name} is missing: {sorted(rows)}"
            found = rows[name].reshape(value.shape)
            wrong = (found != value).reshape(*ids.shape, -1).any(-1) & mask
            assert not wrong.any(), (
                f"{way}: {name} of rows {ids[wrong][:5]} is {found[wrong][:2]}, expected {value[wrong][:2]}"
            )
        if "#windows" in more:
            self.check_windows(ids, mask, way)
        if "#segments" in more:
            for one, other, is_inside in zip(ids[:-1].tolist(), ids[1:].tolist(), more["#segments"], strict=True):
                assert not is_inside or self.log.after(one) == other, f"packed: row {other} does not follow {one}"
        return set(ids[mask].ravel().tolist())

    def following(self, ids):
        if self.case["option"] not in ("ignore_obs_next", "save_only_last_obs"):
            return followed(self.case["shows"], ids)
        if self.case["option"] == "save_only_last_obs":
            return followed(self.case["shows"], ids)
        after = np.array([at if (found := self.log.after(at)) is None else found for at in ids.ravel().tolist()])
        return shown(self.case["shows"], after.reshape(ids.shape))

    def check_stacks(self, rows, wanted, ids, n_leading):
        """The observations of a row and the one before it in its episode; leaves the rows themselves in `rows`."""
        obs, following, *_ = self.names
        before = np.array([at if (found := self.log.before(at)) is None else found for at in ids.ravel().tolist()])
        earlier = shown(self.case["shows"], before.reshape(ids.shape))
        for name in [name for name in rows if name.split("/")[0] == obs]:
            part = name[len(obs) + 1 :]
            assert np.array_equal(rows[name].take(0, n_leading), earlier[part]), f"stack: {name} before {ids}"
            rows[name] = rows[name].take(-1, n_leading)
        for name in [name for name in rows if name.startswith(following)]:
            if rows[name].shape != wanted[name].shape:
                rows[name] = rows[name].take(-1, n_leading)

    def check_windows(self, ids, mask, way):
        for row, valid in zip(ids, mask, strict=True):
            both = valid[:-1] & valid[1:]
            for one, other, counts in zip(row[:-1].tolist(), row[1:].tolist(), both.tolist(), strict=True):
                if way != "cross" and counts:
                    assert self.log.after(one) == other, f"{way}: row {other} does not follow {one} in its episode"
                elif way == "cross":
                    lane, place = self.log.place(one)
                    assert self.log.place(other) == (lane, place + 1), f"cross: row {other} does not follow {one}"

    def draw_skrl(self, way):
        memory, names = self.memory, self.memory.get_tensor_names()
        axes = {"#axes": 1}
        if way == "all":
            found = memory.sample_all(names, mini_batches=2)
        elif way == "index":
            memory.sample(names[:1], batch_size=N_DRAWN)
            found = memory.sample_by_index(names, memory.get_sampling_indexes())
        elif way == "n_step":
            found = memory.sample(names, batch_size=N_DRAWN, n_step=N_STEP, gamma=GAMMA)
        elif way == "packed":
            found = packed_rows(memory.sample(names, batch_size=N_DRAWN, sequence_length=LENGTH, **PACKED))
            found, axes = [[found.pop(name) for name in names]], axes | found
        elif way in ("cross", "mask", "never"):
            found = memory.sample(names, batch_size=N_DRAWN, sequence_length=LENGTH, episode_ends=way)
            axes = {"#axes": 2, "#mask": to_numpy(memory.get_sampling_mask()), "#windows": True}
            found = [[value_of(each, (N_DRAWN, LENGTH)) for each in part] for part in found]
        else:
            found = memory.sample(names, batch_size=N_DRAWN, mini_batches=3 if way == "iterate" else 1)
        self.check_priorities(
            lambda: memory.update_priorities(drawn := memory.get_sampling_indexes(), np.ones(len(drawn))),
            lambda: to_numpy(memory.get_sampling_weights()), way not in ("all", "index"),
        )  # fmt: skip
        return [dict(zip(names, map(to_numpy, part), strict=True)) | axes for part in found]

    def draw_rlberry(self, way):
        if way == "all":
            return [{tag: to_numpy(value) for tag, value in self.memory.data.items()}]
        mode = "prioritized" if self.case["priorities"] == "yes" else "uniform"
        length = LENGTH if way in ("cross", "mask", "never", "packed") else 1
        batch = self.memory.sample(N_DRAWN, length, mode, **(PACKED if way == "packed" else {}))
        info = flat(batch.info)
        self.check_priorities(
            lambda: self.memory.update_priorities(info["indices"], np.ones(info["indices"].shape)),
            lambda: info["weights"], True,
        )  # fmt: skip
        if way == "packed":
            return [packed_rows(batch.data)]
        more = {"#axes": 2, "#mask": info["mask"]} | ({"#windows": True} if length > 1 else {})
        found = flat(batch.data)
        found.pop("discount", None)
        return [found | more]

    def draw_tianshou(self, way):
        memory = self.memory
        if way == "all":
            return [flat(memory.sample(0)[0])]
        if way == "iterate":
            return [{name: each[None] for name, each in flat(row).items()} for row in memory]
        is_packed = way == "packed"
        batch, index = memory.sample(N_DRAWN, **(PACKED | {"sequence_length": LENGTH} if is_packed else {}))
        self.check_priorities(
            lambda: memory.update_weight(index, np.ones(len(index))),
            lambda: weights_of(batch) if is_packed else to_numpy(batch["weight"]),
            hasattr(memory, "update_weight"),
        )  # fmt: skip
        if is_packed:
            return [packed_rows(batch)]
        if way == "neighbours":
            obs = f"{self.names[0]}/a" if self.case["shows"] == "dict" else self.names[0]

            def numbers(rows):
                values = flat(memory[rows])[obs]
                return ids_of(values.reshape(len(values), -1).astype(np.int64)).tolist()

            here, earlier, later = numbers(index), numbers(memory.prev(index)), numbers(memory.next(index))
            for at, one, other in zip(here, earlier, later, strict=True):
                assert one == (at if self.log.before(at) is None else self.log.before(at)), f"prev of {at} is {one}"
                assert other == (at if self.log.after(at) is None else self.log.after(at)), f"next of {at} is {other}"
        return [flat(memory[index] if way in ("index", "neighbours") else batch)]

    def draw_torchrl(self, way):
        memory = self.memory
        if way == "all":
            return [flat(memory[:])]
        if way == "iterate":
            return [flat(batch) for batch in memory]
        packed = PACKED | {"slice_len": LENGTH} if way == "packed" else {}
        batch, info = memory.sample(return_info=True, **packed)
        index = to_numpy(info["index"])
        self.check_priorities(
            lambda: memory.update_priority(index, np.ones(len(index))), lambda: to_numpy(info["priority_weight"]), True
        )
        if way == "index":
            return [flat(memory[index])]
        if packed:
            return [packed_rows(batch)]
        found = flat(batch)
        return [found | {"#marks_ends": way == "never"}]

    def check_priorities(self, update, weights, can):
        if self.case["priorities"] == "yes" and can:
            found = weights()
            assert ((found > 0) & (found <= 1 + 1e-6)).all(), f"weights of importance: {found}"
            update()


def packed_rows(pack):
    """The rows of a pack of any library, and whether each but the first is in the same segment as the one before."""
    steps = pack if isinstance(pack, PackedTrajectories) else pack["steps"]
    bounds = to_numpy(pack.cu_seqlens if steps is pack else pack["cu_seqlens"])
    rows = flat(steps)
    is_inside = np.ones(bounds[-1] + 1, bool)
    is_inside[bounds] = False
    return rows | {"#segments": is_inside[1:-1]}


def weights_of(pack):
    return to_numpy((pack.info if isinstance(pack, PackedTrajectories) else pack["info"])["weight"])


def value_of(value, shape):
    found = to_numpy(value)
    return found.reshape(*shape, *found.shape[1:])


def nest(values):
    found = {}
    for name, value in values.items():
        *parents, last = name.split("/")
        inner = found
        for each in parents:
            inner = inner.setdefault(each, {})
        inner[last] = value
    return found


def dtype_of(value, case):
    """The dtype of a tensor of skrl's memories."""
    name = str(value.dtype).removeprefix("torch.")
    library = case["surface"].split()[1]
    if library == "torch":
        return getattr(torch, name)
    if library == "jax":
        return getattr(jnp, "bool_" if name == "bool" else name)
    import warp

    return getattr(warp, {"bool": "bool"}.get(name, name))


def run(case):
    with ExitStack() as stack:
        course = Course(case, stack)
        n = 3 if case["filled"] == "half" else 9
        for _ in range(n):
            course.write()
        course.check()
        course.restore()
        course.check()
        for _ in range(2):
            course.write()
            course.check()


TABLE = Table(SETTINGS, RULES, run)
