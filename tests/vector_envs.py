"""Environments for the tests of vectorised ones; imports nothing heavy, so that workers may import it too."""

from __future__ import annotations

import os
import signal
import sys

import gymnasium
import numpy as np
from gymnasium import spaces


class Basket(gymnasium.Env):
    """A nested space, a nested action, infos of every kind that come and go, episodes of random lengths."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}  # noqa: RUF012
    observation_space = spaces.Dict({
        "frame": spaces.Box(-10, 10, (2, 3), np.float32),
        "count": spaces.Discrete(100),
        "parts": spaces.Tuple([spaces.MultiBinary(3), spaces.Box(-np.inf, np.inf, (), np.float64),
                               spaces.MultiDiscrete([4, 5])]),
        "word": spaces.Text(5),
    })  # fmt: skip
    action_space = spaces.Dict({"move": spaces.Discrete(3), "force": spaces.Box(-1, 1, (2,), np.float32)})

    def __init__(self, render_mode=None):
        self.render_mode, self.gain, self.given = render_mode, 1.0, []

    def _observation(self, total):
        rng = self.np_random
        return {
            "frame": (rng.normal(size=(2, 3)) * self.gain).astype(np.float32),
            "count": np.int64(self.steps),
            "parts": (rng.integers(2, size=3, dtype=np.int8), np.array(total), np.array([self.steps % 4, 1])),
            "word": "abcde"[: 1 + self.steps % 5],
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.length = 0, int(self.np_random.integers(1, 9))
        self.given.append(options)
        return self._observation(0.0), {"seen": options is not None, "length": self.length, "why": "reset"}

    def step(self, action):
        self.steps += 1
        total = float(action["force"].sum() + action["move"])
        ended, kind = self.steps == self.length, self.np_random.integers(3)
        info = {}
        if self.np_random.random() < 0.7:
            info = {"total": total, "kind": kind, "at": np.full((2, 2), self.steps), "deep": {"er": self.steps}}
            info |= {"flag": bool(kind), "names": ["a", self.steps], "type": type(action["move"]).__name__}
        return self._observation(total), total * self.gain, ended and kind > 0, ended and kind == 0, info

    def render(self):
        return np.full((2, 2, 3), self.steps, np.uint8)

    def doubled(self, number, plus=0):
        """Twice a number, more or less."""
        return 2 * number + plus


class Same(gymnasium.Env):
    """Writes every observation, and info, into the same array; episodes of two steps."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.array, self.number, self.info = np.zeros(2), 0, {"array": np.zeros(1), "number": 0}

    def _next(self, steps):
        self.steps = steps
        self.number += 1
        self.array[:] = self.number
        self.info["array"][:] = self.info["number"] = self.number
        return self.array

    def reset(self, *, seed=None, options=None):
        return self._next(0), self.info

    def step(self, action):
        return self._next(self.steps + 1), 1.0, self.steps == 2, False, self.info


class Echo(gymnasium.Env):
    """Tells in an info what it was given to do, and keeps it."""

    observation_space = spaces.Discrete(10, start=-2)

    def __init__(self, action_space):
        self.action_space, self.kept = action_space, []

    def reset(self, *, seed=None, options=None):
        return -2, {}

    def step(self, action):
        self.kept.append(action)
        given = {"type": type(action).__name__, "dtype": str(getattr(action, "dtype", "")), "repr": repr(action)}
        return 3, 0, False, False, {"given": given, "kept": repr(self.kept)}


class Failing(gymnasium.Env):
    """Does one thing wrong in one of its methods: raises, ends its process, or hangs."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, where="", how="raise"):
        self.where, self.how = where, how
        self._fail("constructor")

    def _fail(self, where):
        if self.where != where:
            return
        if self.how == "raise":
            raise KeyError(f"lost in {where}")
        if self.how == "odd":
            raise OddError(7, detail=where)
        if self.how == "exit":
            os._exit(3)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while self.how == "hang":
            signal.pause()

    def reset(self, *, seed=None, options=None):
        self._fail("reset")
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self._fail("step")
        return np.ones(1, np.float32), 1.0, False, False, {}

    def act(self):
        """Nothing, or what is to go wrong."""
        self._fail("act")
        return "acted"

    def close(self):
        self._fail("close")


class OddError(Exception):
    """Takes more than a message, and makes its message itself."""

    def __init__(self, code, *, detail):
        super().__init__(f"code {code}: {detail}")


class Gate(gymnasium.Env):
    """Its steps wait until somebody has written to a pipe with a name; action 1 does not wait."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, path):
        self.path, self.steps = path, 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        if action == 0:
            with open(self.path, "rb") as pipe:
                pipe.read()
        self.steps += 1
        return np.full(1, self.steps, np.float32), 1.0, False, False, {"action": repr(action)}


class Process(gymnasium.Env):
    """Tells in infos of the process that it is in."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        info = {"pid": os.getpid(), "drawn": float(np.random.random()), "torch": "torch" in sys.modules}
        return np.zeros(1, np.float32), info


class Telling(Process):
    """Tells in infos values of every type."""

    told = (
        np.bool_(True), np.float64(0.1), np.float32(0.1), np.float16(0.1), np.longdouble(0.1), np.int8(-3),
        np.uint64(2**64 - 1), np.longlong(-1), np.complex64(1j), np.datetime64("2020"), True, 2**70, 0.5, None, "text",
        b"bytes", [np.float32(1)], {"deep": np.int16(4)}, np.float64("nan"),
    )  # fmt: skip

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {"told": list(self.told)}


class Pair(gymnasium.Env):
    """A Dict of two observations, written into the same arrays at every step; episodes of random lengths."""

    observation_space = spaces.Dict({
        "near": spaces.Box(-np.inf, np.inf, (2,), np.float32), "count": spaces.Discrete(50),
    })  # fmt: skip
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.near = np.zeros(2, np.float32)

    def _observation(self):
        self.near[:] = self.np_random.normal(size=2)
        return {"near": self.near, "count": self.steps}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.length = 0, int(self.np_random.integers(1, 12))
        return self._observation(), {}

    def step(self, action):
        self.steps += 1
        return self._observation(), float(action), self.steps == self.length, False, {"steps": self.steps}
