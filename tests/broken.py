"""Environments and agents that do one thing wrong each, and the words of the error that says so."""

from __future__ import annotations

import os
import threading

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from rlstructs import DictTensor, RL_Agent

NO_INFO = DictTensor()


class Walk:
    """Three random walks of 3, 4 and 5 steps. `autoreset`: as `GymEnvInf`, not as `GymEnv`."""

    action_space = spaces.Discrete(2)
    autoreset = True

    def __init__(self, seed=0):
        self.generator = np.random.default_rng(seed)
        self.lengths = torch.tensor([3, 4, 5])

    def n_envs(self):
        return 3

    def close(self):
        pass

    def observation(self, at, start=False, done=False, reward=0.0):
        """Of the walks `self.rows`."""
        n = len(at)
        flag = torch.full((n,), False)
        done = flag | done
        return DictTensor({
            "frame": self.places[self.rows].clone(), "step": at.clone(), "reward": torch.full((n,), reward),
            "done": done, "terminated": done.clone(), "truncated": flag.clone(), "initial_state": flag | start,
        })  # fmt: skip

    def reset(self, env_info=NO_INFO):
        self.rows = torch.arange(3)
        self.places, self.steps = torch.from_numpy(self.generator.normal(size=(3, 2))).float(), torch.zeros(3).long()
        return self.observation(self.steps, start=True), self.rows

    def step(self, action):
        before = self.rows
        self.places = self.places + torch.from_numpy(self.generator.normal(size=(3, 2))).float()
        self.steps = self.steps + 1
        ended = self.steps[before] == self.lengths[before]
        after = self.observation(self.steps[before], done=ended, reward=1.0)
        if not self.autoreset:
            self.rows = before[~ended]
            return (after, before), (after.index(~ended), self.rows)
        self.steps[ended] = 0
        following = self.observation(self.steps, start=ended)
        following["reward"].copy_(torch.where(ended, 0.0, 1.0))
        return (after, before), (following, self.rows)


class Ending(Walk):
    """Those that end stop."""

    autoreset = False


def changed(base=Walk, **methods):
    """A subclass with other methods; `first`, `second` and `begin` change what step and reset give, in place or not."""
    first, second, begin = (methods.pop(name, None) for name in ("first", "second", "begin"))

    def step(self, action):
        pairs = base.step(self, action)
        return tuple((pair if change is None else change(*pair)) for change, pair in zip((first, second), pairs,
                                                                                         strict=True))  # fmt: skip

    def reset(self, env_info=NO_INFO):
        pair = base.reset(self, env_info)
        return pair if begin is None else begin(*pair)

    if first or second:
        methods["step"] = step
    if begin:
        methods["reset"] = reset
    return type("Broken", (base,), methods)


def with_key(key, change):
    """Changes one key of an observation."""
    return lambda observation, running: (
        DictTensor({**dict(observation.items()), key: change(observation[key])}), running
    )  # fmt: skip


def more(make):
    """Adds the key `more`."""
    return lambda observation, running: (
        DictTensor({**dict(observation.items()), "more": make(observation.n_elems())}), running
    )  # fmt: skip


def without(*keys):
    return lambda observation, running: (observation.get([k for k in observation if k not in keys]), running)


def everywhere(change, base=Walk):
    return changed(base, first=change, second=change, begin=change)


class CountsUp(Walk):
    def n_envs(self):
        self.n = getattr(self, "n", 2) + 1
        return self.n


class Reuses(Walk):
    """Has one buffer for all its frames."""

    buffer = None

    def observation(self, *args, **kwargs):
        made = super().observation(*args, **kwargs)
        if self.buffer is None:
            self.buffer = torch.zeros(3, 2)
        self.buffer[: len(made)] = made["frame"]
        return DictTensor({**dict(made.items()), "frame": self.buffer[: len(made)]})


class Revives(Ending):
    """Brings one back that has stopped."""

    def step(self, action):
        first, (following, running) = super().step(action)
        if self.steps[0] == 5:
            self.rows = running = torch.tensor([0, 2])
            following = self.observation(self.steps[running])
        return first, (following, running)


class ClosesOnce(Walk):
    open = True

    def close(self):
        if not self.open:
            raise RuntimeError("closed twice")
        self.open = False


class Unseeded(Walk):
    def __init__(self, seed=0):
        super().__init__(int.from_bytes(os.urandom(4), "little"))


class SeededByItself(Walk):
    def __init__(self, seed=0):
        super().__init__(7)


class SeededAlike(Walk):
    """All three walk alike, for five steps."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.lengths = torch.tensor([5, 5, 5])
        self.generator = Repeating(self.generator)


class Repeating:
    """A generator that draws the same for each of three."""

    def __init__(self, generator):
        self.generator = generator

    def normal(self, size):
        return np.repeat(self.generator.normal(size=(1, *size[1:])), size[0], axis=0)


class Loses(Walk):
    """Shows what a reset gave in the place of where an episode ended."""

    def step(self, action):
        (after, before), (following, running) = super().step(action)
        ended = after["done"]
        self.places[ended] = torch.from_numpy(self.generator.normal(size=(int(ended.sum()), 2))).float()
        for pair in (after, following):
            pair["frame"][ended] = self.places[ended]
        after.set("step", torch.where(ended, 0, after["step"]))
        return (after, before), (following, running)


class Holds(Walk):
    """Cannot be pickled."""

    def __init__(self, seed=0, lock=None):
        super().__init__(seed)


def pairs_of(value):
    return changed(step=lambda self, action: value)


def begins_with(value):
    return changed(reset=lambda self, env_info=NO_INFO: value)


def writes_into_action(self, action):
    action["action"].zero_()
    return Walk.step(self, action.__class__({"action": action["action"]}))


def flag(value):
    return lambda tensor: torch.full_like(tensor, value)


ENVIRONMENTS = {
    "no environments": (changed(n_envs=lambda self: 0), r"^Broken.n_envs must be an int of at least 1, got 0$"),
    "a float of environments": (changed(n_envs=lambda self: 3.0), r"^Broken.n_envs must be an int .*, got 3.0$"),
    "more and more environments": (CountsUp, r"^CountsUp.n_envs was 3, and is \d after reset$"),
    "no close": (changed(close=None), r"^Broken is not a VecEnv: it has no method close\(\)$"),
    "a reset without env_info": (changed(reset=lambda self: None), r"^Broken.reset must take env_info, a DictTensor"),
    "a reset of the observation alone": (
        begins_with(DictTensor()), r"^Broken.reset must be a pair of observation and running, got DictTensor$"
    ),
    "an observation that is a dict": (
        begins_with(({"frame": torch.zeros(3)}, torch.arange(3))),
        r"^Broken.reset: an observation must be a DictTensor, got dict$",
    ),
    "an observation without keys": (begins_with((NO_INFO, torch.arange(3))), "^Broken.reset: .* at least one key$"),
    "running as a list": (changed(begin=lambda o, r: (o, [0, 1, 2])), "^Broken.reset: running must be .*got list"),
    "running of floats": (changed(begin=lambda o, r: (o, r.float())), r"^Broken.reset: running must be int64 .*float"),
    "some that do not run": (
        changed(begin=lambda o, r: (o, r[1:])),
        r"^Broken.reset: all environments have to run after it: running is \[1, 2\], expected \[0, 1, 2\]$",
    ),
    "a row too few": (
        changed(begin=lambda o, r: (o.slice(0, 2), r)),
        r"^Broken.reset: 'frame' has shape \(2, 2\), expected \(3, ...\), a row for each environment that runs$",
    ),
    "another dtype": (
        changed(first=with_key("frame", torch.Tensor.double)),
        r"^Broken.step, first pair: 'frame' has rows of \(2,\) float64, before \(2,\) float32; keys, dtypes and shapes",
    ),
    "another shape": (
        changed(second=with_key("frame", lambda x: x[:, None])),
        r"^Broken.step, second pair: 'frame' has rows of \(1, 2\) float32, before",
    ),
    "a key too few": (changed(second=without("step")), r"^Broken.step, second pair: no 'step' any more, there are \["),
    "a key too many": (changed(first=more(torch.zeros)), r"^Broken.step, first pair: \['more'\] was not there"),
    "a dtype that numpy has not": (
        everywhere(with_key("frame", torch.Tensor.bfloat16)), "'frame' is bfloat16, which cannot be recorded; convert"
    ),
    "flags of ints": (everywhere(with_key("done", torch.Tensor.int)), r"'done' must be bool, .*got \(3,\) int32$"),
    "rewards with an axis": (everywhere(with_key("reward", lambda x: x[:, None])), "'reward' must be one number"),
    "a first observation of a later step": (
        changed(begin=with_key("initial_state", flag(False))),
        r"^Broken.reset: 'initial_state' has to be True in a first observation, got",
    ),
    "a first observation that has ended": (
        changed(begin=with_key("done", flag(True))), "^Broken.reset: 'done' has to be False in a first observation"
    ),
    "three parts": (
        pairs_of((torch.zeros(3), torch.arange(3), 0)), r"^Broken.step must return two pairs .*\(Tensor, Tensor, int\)$"
    ),
    "no pairs": (pairs_of((torch.zeros(3), torch.zeros(3))), "^Broken.step, first pair must be a pair .*, got Tensor$"),
    "a first pair of those left": (
        changed(Ending, first=lambda o, r: (o.index(~o["done"]), r[~o["done"]])),
        r"^Broken.step, first pair: 'frame' has shape \(2, 2\), expected \(3, ...\), a row for each .* is stepped$",
    ),
    "others in the first pair": (
        changed(first=lambda o, r: (o, r.flip(0))),
        r"^Broken.step, first pair: running has to name those that were stepped, \[0, 1, 2\], got \[2, 1, 0\]$",
    ),
    "those left in another order": (
        changed(second=lambda o, r: (o, r.flip(0))), r"some of \[0, 1, 2\], in that order, got \[2, 1, 0\]"
    ),
    "one that comes back": (Revives, r"some of \[2\], in that order, got \[0, 2\]; one that has stopped comes back"),
    "initial_state after a step": (
        changed(first=with_key("initial_state", flag(True))),
        "^Broken.step, first pair: 'initial_state' is True; the first pair holds what the step led to",
    ),
    "done, but neither terminated nor truncated": (
        changed(first=with_key("done", flag(True))),
        r"^Broken.step, first pair: 'done' is \[True, True, True\], expected 'terminated' or 'truncated', \[False,",
    ),
    "one that stops without an end": (
        everywhere(without("terminated", "truncated"), changed(Ending, first=with_key("done", flag(False)))),
        "^Broken.step: environment 0 stopped, but its 'done' is False in the first pair$",
    ),
    "one that stops without flags": (
        everywhere(without("done", "terminated", "truncated"), Ending),
        "^Broken.step: environment 0 stopped, and no key says that its episode ended; give bool keys",
    ),
    "one that begins again unseen": (
        changed(second=with_key("initial_state", flag(False))),
        "^Broken.step: environment 0 ended its episode and goes on, but its 'initial_state' is False in the second",
    ),
    "one that begins without an end": (
        changed(second=with_key("initial_state", flag(True))),
        "^Broken.step, second pair: 'initial_state' of environment 0 is True, but its episode did not end",
    ),
    "an end in a first observation": (
        changed(second=with_key("done", lambda done: torch.tensor([True, False, False]))),
        "^Broken.step: 'done' of environment 0, whose episode goes on, is False in the first pair and True in the sec",
    ),
    "frames that differ without an end": (
        changed(second=with_key("frame", lambda x: x + 1)),
        "^Broken.step: 'frame' of environment 0, whose episode goes on, is .* in the first pair and .*; they have to",
    ),
    "one buffer": (
        Reuses, r"^Reuses.step wrote into what Reuses.reset handed out before \(hand out a new .*\): 'frame' was"
    ),
    "an action that is written into": (
        changed(step=writes_into_action), "^Broken.step wrote into the action that it was given: 'action' was"
    ),
    "no seed": (
        Unseeded, "^Unseeded: two environments made with seed=0 differ, first in 'frame' of the first observation"
    ),
    "always the same seed": (SeededByItself, "^SeededByItself: seed=0 and seed=1 give the same 100 steps; if it "),
    "a reward that is NaN": (
        changed(first=with_key("reward", flag(float("nan"))), second=with_key("reward", flag(float("nan")))),
        "^Broken.step, first pair: 'reward' has to be finite numbers, got nan in row 0$",
    ),
    "an observation that is NaN": (
        everywhere(with_key("frame", lambda x: x.index_fill(0, torch.tensor([1]), float("nan")))),
        r"^Broken.reset: 'frame' holds NaN, got \[nan, nan\] in row 1$",
    ),
    "an observation out of bounds": (
        changed(observation_space=spaces.Dict({"frame": spaces.Box(-0.01, 0.01, (2,)), "step": spaces.Discrete(9)})),
        r"^Broken: 'frame' is .* at \[0, 0\], the space says -0.00\d+ to 0.00\d+",
    ),
    "final observations that are those of a reset": (
        Loses, "^Loses: the final observations of .* episodes equal the first ones of the next episodes: the reset "
    ),
    "one seed for all": (SeededAlike, "^SeededAlike: all its environments do the same when they get the same actions"),
    "a second close": (ClosesOnce, r"^ClosesOnce.close raised RuntimeError\('closed twice'\); it has to work at any"),
    "no action space": (changed(action_space=None), "^Broken has no action_space to draw actions from: check with act"),
}  # fmt: skip


# --- gymnasium's --------------------------------------------------------------------------------------


class Gym(gymnasium.Env):
    """Random numbers, for eight steps."""

    action_space = spaces.Box(-1, 1, (2,), np.float32)
    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observation(), {}

    def observation(self):
        return self.np_random.normal(size=2).astype(np.float32)

    def step(self, action):
        self.steps += 1
        return self.observation(), 1.0, self.steps == 8, False, {}


def gym(**methods):
    return type("Broken", (Gym,), methods)


def stepping(*change):
    """With some of the five parts of a step replaced."""

    def step(self, action):
        result = list(Gym.step(self, action))
        for at, value in change:
            result[at] = value
        return tuple(result)

    return gym(step=step)


def own_generator(self):
    if not hasattr(self, "own"):
        self.own = np.random.default_rng()
    return self.own.normal(size=2).astype(np.float32)


class Survives(Gym):
    """Goes on where the episode before has stopped."""

    total = 0.0

    def observation(self):
        self.total += 0.25
        return super().observation() + np.float32(self.total)


class SeededOnce(Gym):
    """Takes the seed of its first reset, and no other."""

    def reset(self, *, seed=None, options=None):
        if not hasattr(self, "own"):
            self.own = np.random.default_rng(seed)
        self.steps = 0
        return self.observation(), {}

    def observation(self):
        return self.own.normal(size=2).astype(np.float32)


GYMNASIUM = {
    "a reset without options": (
        gym(reset=lambda self, seed=None: (0, {})), "^Broken.reset must take seed= and options=, as gymnasium.Env.reset"
    ),
    "a reset of the observation alone": (
        gym(reset=lambda self, seed=None, options=None: np.zeros(2)),
        r"^Broken.reset must return \(observation, info dict\), got array\(\[0., 0.\]\) \(ndarray\)$",
    ),
    "a step of four": (
        gym(step=lambda self, action: (np.zeros(2), 1.0, False, {})),
        r"^Broken.step must return \(observation, reward, terminated, truncated, info\), got \(ndarray, float,",
    ),
    "an end that is a number": (stepping((2, 1)), r"^Broken.step: terminated must be a bool, got 1 \(int\)$"),
    "a cut that is None": (stepping((3, None)), r"^Broken.step: truncated must be a bool, got None \(NoneType\)$"),
    "a reward that is none": (stepping((1, None)), "^environment 0: reward must be a number, got None$"),
    "a longer observation": (stepping((0, np.zeros(3, np.float32))), r"has shape \(3,\), the space says"),
    "an observation of text": (stepping((0, ["a", "b"])), "has dtype <U1, and values that the space's float32"),
    "a space of text": (gym(observation_space=spaces.Text(3)), r"^observation: space Text\(.*\) is not supported"),
    "a generator of its own": (
        gym(observation=own_generator),
        r"^Broken: two environments made with seed=0 differ, .* seeded with the seed that reset gets: super\(\)",
    ),
    "no chance": (
        gym(observation=lambda self: np.zeros(2, np.float32)),
        "^Broken: seed=0 and seed=1 give the same 100 steps; if it is deterministic, check with uses_seed=False",
    ),
    "a close that fails": (gym(close=lambda self: 1 / 0), r"^Broken.close raised ZeroDivisionError"),
    "a reward that is NaN": (stepping((1, float("nan"))), "^Broken.step: reward is nan, it has to be a finite number$"),
    "a reward without bound": (stepping((1, -np.inf)), "^Broken.step: reward is -inf, it has to be a finite number$"),
    "a NaN": (
        stepping((0, np.array([0, np.nan], np.float32))),
        r"^Broken.step: 'frame' holds NaN at \[1\], which is in no space$",
    ),
    "a NaN at a reset": (
        gym(reset=lambda self, seed=None, options=None: (np.full(2, np.nan, np.float32), {})),
        r"^Broken.reset: 'frame' holds NaN at \[0\], which is in no space$",
    ),
    "a value above its bound": (
        gym(observation_space=spaces.Box(-1, 1, (2,)), observation=lambda self: np.array([0, 1.5], np.float32)),
        r"^Broken.reset: 'frame' is 1.5 at \[1\], the space says -1.0 to 1.0; keep to the bounds",
    ),
    "a value below its bound": (
        gym(observation_space=spaces.Box(np.array([-1, -2]), np.inf, (2,), np.float64),
            observation=lambda self: np.array([0, -3.0])),
        r"^Broken.reset: 'frame' is -3.0 at \[1\], the space says -2.0 to inf",
    ),
    "a frame outside of its bytes": (
        gym(observation_space=spaces.Box(0, 200, (2,), np.uint8), observation=lambda self: np.full(2, 255, np.uint8)),
        r"^Broken.reset: 'frame' is 255 at \[0\], the space says 0 to 200",
    ),
    "a number that is too large": (
        gym(observation_space=spaces.Discrete(3, start=1), observation=lambda self: 4),
        "^Broken.reset: 'frame' is 4, the space says 1 to 3",
    ),
    "one of several that is too large": (
        gym(observation_space=spaces.MultiDiscrete([3, 4]), observation=lambda self: np.array([2, 4])),
        r"^Broken.reset: 'frame' is 4 at \[1\], the space says 0 to 3",
    ),
    "a bit that is none": (
        gym(observation_space=spaces.MultiBinary(2), observation=lambda self: np.array([2, 0], np.int8)),
        r"^Broken.reset: 'frame' is 2 at \[0\], the space says 0 to 1",
    ),
    "an entry too many": (
        gym(observation_space=spaces.Dict({"n": spaces.Discrete(3)}), observation=lambda self: {"n": 1, "more": 2}),
        r"^Broken.reset: the observation has the entries \['n', 'more'\], the space has \['n'\]$",
    ),
    "an entry too few": (
        gym(observation_space=spaces.Dict({"n": spaces.Discrete(3), "more": spaces.Discrete(3)}),
            observation=lambda self: {"n": 1}),
        r"^Broken.reset: the observation has the entries \['n'\], the space has \['more', 'n'\]$",
    ),
    "an entry too many inside": (
        gym(observation_space=spaces.Tuple([spaces.Dict({"n": spaces.Discrete(3)})]),
            observation=lambda self: ({"n": 1, "more": 2},)),
        r"^Broken.reset: the observation's 0 has the entries \['n', 'more'\], the space has \['n'\]$",
    ),
    "a part too many": (
        gym(observation_space=spaces.Tuple([spaces.Discrete(3)]), observation=lambda self: (1, 2)),
        "^Broken.reset: the observation must be a tuple of 1, got 2$",
    ),
    "no dict": (
        gym(observation_space=spaces.Dict({"n": spaces.Discrete(3)}), observation=lambda self: np.zeros(1)),
        r"^Broken.reset: the observation must be a dict with \['n'\], got ndarray$",
    ),
    "an info that is None": (stepping((4, None)), r"^Broken.step: info must be a dict, got None \(NoneType\)$"),
    "an info at a reset that is None": (
        gym(reset=lambda self, seed=None, options=None: (np.zeros(2, np.float32), None)),
        r"^Broken.reset must return \(observation, info dict\), got \(ndarray, NoneType\)$",
    ),
    "an info that is a list": (stepping((4, [])), r"^Broken.step: info must be a dict, got \[\] \(list\)$"),
    "an end that is a number of numpy": (stepping((2, np.int64(0))), "^Broken.step: terminated must be a bool, got "),
    "an end that is an array": (stepping((3, np.array([False]))), "^Broken.step: truncated must be a bool, got "),
    "a state that survives a reset": (Survives, "^Survives: (after another reset with seed=0|two environments made)"),
    "a generator that a reset does not seed": (
        SeededOnce, "^SeededOnce: (after another reset with seed=0|two environments made with seed=0 differ)"
    ),
}  # fmt: skip


# --- gymnasium's vector environments -------------------------------------------------------------------


class Vector(gymnasium.vector.VectorEnv):
    """Three random walks of 3, 4 and 5 steps, in any autoreset mode; a flaw is what it does wrong."""

    def __init__(self, mode="SameStep", flaw=None, **changes):
        self.num_envs, self.metadata = 3, {"autoreset_mode": mode}
        self.single_observation_space, self.single_action_space = spaces.Box(-99, 99, (2,)), spaces.Discrete(2)
        self.mode, self.flaw, self.changes, self.lengths = mode, flaw, changes, np.array([3, 4, 5])
        self.offset = 0.0

    def reset(self, *, seed=None, options=None):
        mask = np.full(3, True)
        if options is not None and self.flaw != "mask":
            mask = options["reset_mask"]
        if seed is not None:
            seeds = seed if isinstance(seed, list) else [seed + k for k in range(3)]
            self.rngs = [np.random.default_rng(seeds[0] if self.flaw == "one seed" else each) for each in seeds]
            self.places, self.steps, self.ended = np.zeros((3, 2), np.float32), np.zeros(3, int), np.full(3, False)
        self._begin(mask)
        return self.places.copy(), self.changes.get("reset_infos", {})

    def _begin(self, mask):
        for k in np.flatnonzero(mask):
            self.places[k] = self.rngs[k].uniform(-1, 1, 2) + self.offset
        self.steps[mask], self.ended[mask] = 0, False

    def step(self, actions):
        idle = self.ended.copy() if self.mode == "NextStep" else np.full(3, False)
        self._begin(idle)
        for k in np.flatnonzero(~idle):
            self.places[k] += self.rngs[k].uniform(-1, 1, 2)
        self.steps[~idle] += 1
        ended = ~idle & (self.steps == self.lengths)
        if self.flaw == "survives":
            self.offset += 0.01
        self.ended, infos, rewards = ended.copy(), {}, np.where(idle & (self.flaw != "idle"), 0.0, 1.0)
        finals = self.places.copy()
        if ended.any() and self.mode == "SameStep":
            self._begin(ended)
        if self.mode == "SameStep" and ended.any():
            finals = self.places.copy() if self.flaw == "finals" else finals
            infos = {"final_obs": finals, "_final_obs": ended if self.flaw != "final mask" else ~ended}
        result = self.places.copy(), rewards, ended, np.full(3, False), infos
        return tuple(self.changes.get(name, value) for name, value in zip(PARTS, result, strict=True))


PARTS = "observations", "rewards", "terminations", "truncations", "infos"
LOST = "the final observations of .* episodes equal the first ones of the next episodes: the reset has overwritten"
IDLE = r"^Vector.step: environment 0 may only reset in the step after the end of its episode \(autoreset mode"
ALIKE = r"^GymVectorEnv: all its environments do the same when they get the same actions, with each of 10 seeds, al"
VECTORS = {
    "final observations that are the reset's": ({"flaw": "finals"}, LOST),
    "a mask that is ignored": (
        {"mode": "Disabled", "flaw": "mask"},
        r"^Vector.reset changed the observation of environment \d, which is not in options\['reset_mask'\]",
    ),
    "one seed for all": ({"flaw": "one seed"}, ALIKE),
    "one seed for all, in another mode": ({"mode": "NextStep", "flaw": "one seed"}, ALIKE),
    "a state that survives": ({"flaw": "survives"}, "^GymVectorEnv: after another reset with seed=0 the same actions"),
    "a step after an end that is paid": ({"mode": "NextStep", "flaw": "idle"}, IDLE),
    "a mask of others": ({"flaw": "final mask"}, r"^Vector.step: infos\['_final_obs'\] is \[.*, but the episodes that"),
    "flags that are ints": (
        {"terminations": np.zeros(3, int)}, "^Vector.step: terminated must be an array of bool, got int64$"
    ),
    "cuts that are floats": (
        {"truncations": [0.0, 0.0, 0.0]}, "^Vector.step: truncated must be an array of bool, got float64$"
    ),
    "rewards that are NaN": (
        {"rewards": np.array([0, np.nan, 0])}, "^Vector.step: reward is nan, it has to be a finite number$"
    ),
    "rewards of too many": ({"rewards": np.zeros(4)}, r"^environment: reward must be 3 numbers, got \(4,\) float64$"),
    "a NaN": (
        {"observations": np.full((3, 2), np.nan, np.float32)}, r"^Vector.step: 'frame' holds NaN at \[0, 0\]"
    ),
    "values out of bounds": (
        {"observations": np.full((3, 2), 100, np.float32)},
        r"^Vector.step: 'frame' is 100.0 at \[0, 0\], the space says -99.0 to 99.0",
    ),
    "observations of too few": (
        {"observations": np.zeros((2, 2), np.float32)}, r"has shape \(2, 2\), the space says \(3, 2\)"
    ),
    "infos that are None": ({"infos": None}, r"^Vector.step: infos must be a dict, got None \(NoneType\)$"),
    "infos at a reset that are None": (
        {"reset_infos": None}, r"^Vector.reset: infos must be a dict, got None \(NoneType\)$"
    ),
    "a mask of infos that is too short": (
        {"mode": "NextStep", "infos": {"n": np.zeros(3), "_n": np.full(2, True)}},
        r"^Vector.step: infos\['_n'\], the mask of 'n', must be \(3,\) bool, got \(2,\) bool$",
    ),
    "a mask of infos of ints": (
        {"mode": "NextStep", "infos": {"n": np.zeros(3), "_n": np.ones(3, int)}}, r"be \(3,\) bool, got \(3,\) int64$"
    ),
}  # fmt: skip


# --- agents -------------------------------------------------------------------------------------------


class Sums(RL_Agent):
    """Adds up what it sees; its state begins with 1."""

    def initial_state(self, agent_info, B):
        return DictTensor({"sum": torch.ones(B, 2)})

    def __call__(self, state, observation, agent_info, history=None):
        total = state["sum"] + observation["frame"]
        noise = torch.rand(len(total))
        return DictTensor({"action": (total[:, 0] + noise > 0).long(), "total": total}), DictTensor({"sum": total})

    def update(self, info):
        pass


def agent(**methods):
    """`Sums` with other methods; `output` and `following` change what a step gives."""
    output, following = methods.pop("output", None), methods.pop("following", None)

    def call(self, state, observation, agent_info, history=None):
        result = Sums.__call__(self, state, observation, agent_info)
        return tuple(part if change is None else change(part) for change, part in zip((output, following), result,
                                                                                      strict=True))  # fmt: skip

    if output or following:
        methods["__call__"] = call
    return type("Broken", (Sums,), methods)


def key(name, change):
    return lambda tensors: DictTensor({**dict(tensors.items()), name: change(tensors)})


class WritesIntoObservation(Sums):
    takes_views = True

    def __call__(self, state, observation, agent_info, history=None):
        observation["frame"].clamp_(-1, 0)
        return super().__call__(state, observation, agent_info)


class WritesIntoInfo(Sums):
    takes_views = True

    def __call__(self, state, observation, agent_info, history=None):
        agent_info["epsilon"].mul_(0.5)
        return super().__call__(state, observation, agent_info)


class Keeps(Sums):
    """What it saw at the end of a rollout counts in the next."""

    takes_views = True
    last = None

    def __call__(self, state, observation, agent_info, history=None):
        output, following = super().__call__(state, observation, agent_info)
        before = 0 if self.last is None or len(self.last) != len(output) else self.last
        self.last = observation["frame"]
        return output + DictTensor({"change": self.last - before}), following


class DrawsByItself(Sums):
    def __init__(self):
        self.generator = np.random.default_rng()

    def __call__(self, state, observation, agent_info, history=None):
        output, following = super().__call__(state, observation, agent_info)
        return output + DictTensor({"noise": torch.from_numpy(self.generator.normal(size=len(output)))}), following


class CountsOutside(Sums):
    n = 0

    def __call__(self, state, observation, agent_info, history=None):
        self.n += 1
        output, following = super().__call__(state, observation, agent_info)
        return output + DictTensor({"n": torch.full((len(output),), self.n)}), following


class ReplaysFromNothing(Sums):
    def call_replay(self, trajectories, t, state):
        if state is None:
            state = DictTensor({"sum": torch.zeros(trajectories.n_elems(), 2)})
        return super().call_replay(trajectories, t, state)


class ReplaysOther(Sums):
    def call_replay(self, trajectories, t, state):
        output, following = super().call_replay(trajectories, t, state)
        return output.get(["action"]), following


class GrowsLater(Sums):
    n = 0

    def __call__(self, state, observation, agent_info, history=None):
        self.n += 1
        output, following = super().__call__(state, observation, agent_info)
        return output + DictTensor({"late": torch.zeros(len(output))} if self.n > 3 else {}), following


class HoldsLock(Sums):
    def __init__(self):
        self.lock = threading.Lock()


AGENTS = {
    "not an agent": (type("Broken", (), {"initial_state": None}), r"^Broken has no method initial_state\(\): subclass"),
    "a state that is a dict": (
        agent(initial_state=lambda self, agent_info, B: {}),
        "^Broken.initial_state of 3 rows: the initial state must be a DictTensor, got dict$",
    ),
    "a state of one row": (
        agent(initial_state=lambda self, agent_info, B: DictTensor({"sum": torch.ones(1, 2)})),
        r"^Broken.initial_state of 3 rows: the initial state 'sum' has shape \(1, 2\), expected \(3, ...\)$",
    ),
    "a state of a dtype that cannot be recorded": (
        agent(initial_state=lambda self, agent_info, B: DictTensor({"sum": torch.ones(B, 2).to(torch.float8_e5m2)})),
        "the initial state: 'sum' is torch.float8_e5m2, which cannot be recorded",
    ),
    "the output alone": (
        agent(__call__=lambda self, state, observation, agent_info: DictTensor()),
        "^Broken.__call__ of 3 rows must return its output and the next state, got DictTensor$",
    ),
    "an output that is a dict": (agent(output=dict), "^Broken.__call__ of 3 rows: the output must be .*, got dict$"),
    "an output without an axis": (
        agent(output=key("value", lambda o: o["total"].mean())),
        r"^Broken.__call__ of 3 rows: the output 'value' has shape \(\), expected \(3, ...\)$",
    ),
    "an axis lost in a batch of one": (
        agent(output=key("action", lambda o: o["action"].squeeze(0))),
        r"^Broken.__call__ of 1 row: the output 'action' has shape \(\), expected \(1, ...\)$",
    ),
    "a width that is the number of rows": (
        agent(output=key("all", lambda o: o["total"].sum(1).expand(len(o), -1))),
        r"^Broken.__call__ of 1 row: the output: 'all' has rows of \(1,\) float32, before \(3,\) float32",
    ),
    "an output that comes later": (GrowsLater, r"the output: \['late'\] was not there at first; it has to be as in"),
    "an output elsewhere": (
        agent(output=lambda o: o.to("meta")),
        "^Broken.__call__ of 3 rows: the output 'action' is on meta, the observation on cpu$",
    ),
    "another state": (
        agent(following=key("sum", lambda s: s["sum"].double())),
        r"the next state: 'sum' has rows of \(2,\) float64, before \(2,\) float32; it has to be as in the initial",
    ),
    "a state too many": (agent(following=key("more", lambda s: s["sum"])), r"the next state: \['more'\] was not there"),
    "no state any more": (agent(following=lambda s: DictTensor()), "the next state: no 'sum' any more, there are "),
    "an observation that is written into": (
        WritesIntoObservation,
        "^WritesIntoObservation.__call__ of 3 rows wrote into the observation that it was given, and that is recorded; "
        "clone it first, or leave out takes_views: 'frame' was",
    ),
    "an agent_info that is written into": (
        WritesIntoInfo,
        "^WritesIntoInfo.__call__ of 3 rows wrote into the agent_info that .* or leave out takes_views: 'epsilon' was",
    ),
    "an observation that is kept": (
        Keeps, "^Keeps: its output 'change' at t=0 of rollout 1 depends on an observation of the previous rollout"
    ),
    "a generator without a seed": (
        DrawsByItself, "^DrawsByItself: two agents .* gave different outputs, first 'noise' at t=0 of rollout 0; draw"
    ),
    "a replay from another state": (
        ReplaysFromNothing, r"^ReplaysFromNothing: replay_agent gives a different '.*' at t=\d than the agent did; call"
    ),
    "a replay of less": (ReplaysOther, "^ReplaysOther: .* gives no 'total', which is an output of the agent$"),
    "a history of a word": (
        agent(require_history=lambda self: "yes"), "^Broken.require_history must return a bool, got 'yes'$"
    ),
    "a close that fails": (agent(close=lambda self: 1 / 0), "^Broken.close raised ZeroDivisionError"),
}  # fmt: skip
