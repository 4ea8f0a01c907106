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
    "no close": (changed(close=None), r"^Broken is no VecEnv: it has no method close\(\)$"),
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
        r"^Broken.step, first pair: running has to be those that were stepped, \[0, 1, 2\], got \[2, 1, 0\]$",
    ),
    "those left in another order": (
        changed(second=lambda o, r: (o, r.flip(0))), r"some of \[0, 1, 2\], in that order, got \[2, 1, 0\]"
    ),
    "one that comes back": (Revives, r"some of \[2\], in that order, got \[0, 2\]; one that has stopped comes back"),
    "initial_state after a step": (
        changed(first=with_key("initial_state", flag(True))),
        "^Broken.step, first pair: 'initial_state' is True; this is what followed a step",
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
    "always the same seed": (SeededByItself, "^SeededByItself: seed=0 and seed=1 give the same 100 steps; if ther"),
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
    "a longer observation": (stepping((0, np.zeros(3, np.float32))), r"'frame' has shape \(3,\), the space says"),
    "an observation of text": (stepping((0, ["a", "b"])), "'frame' has dtype <U1, and values that the space's float32"),
    "a space of text": (gym(observation_space=spaces.Text(3)), r"^observation: space Text\(.*\) is not supported"),
    "a generator of its own": (
        gym(observation=own_generator),
        r"^Broken: two environments made with seed=0 differ, .* seeded with the seed that reset gets: super\(\)",
    ),
    "no chance": (
        gym(observation=lambda self: np.zeros(2, np.float32)),
        "^Broken: seed=0 and seed=1 give the same 100 steps; if there is no chance in it, check with uses_seed=False",
    ),
    "a close that fails": (gym(close=lambda self: 1 / 0), r"^Broken.close raised ZeroDivisionError"),
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
        Keeps, "^Keeps: its output 'change' at t=0 of rollout 1 depends on an observation of the rollout before"
    ),
    "a generator without a seed": (
        DrawsByItself, "^DrawsByItself: two agents made alike, .* put out different 'noise' at t=0 of rollout 0; draw"
    ),
    "a replay from another state": (
        ReplaysFromNothing, r"^ReplaysFromNothing: replay_agent gives another '.*' at t=\d than the agent did; call_re"
    ),
    "a replay of less": (ReplaysOther, "^ReplaysOther: replay_agent gives no 'total', which the agent put out$"),
    "a history of a word": (
        agent(require_history=lambda self: "yes"), "^Broken.require_history must return a bool, got 'yes'$"
    ),
    "a close that fails": (agent(close=lambda self: 1 / 0), "^Broken.close raised ZeroDivisionError"),
}  # fmt: skip
