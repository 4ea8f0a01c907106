"""SharedVectorEnv beside gymnasium's: with no workers by CPU time, with two by wall time."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from neighbour_rows import Call, Iterator, Row
from rlstructs import SharedVectorEnv


def box(*shape: int) -> spaces.Box:
    return spaces.Box(-1, 1, shape or (4,), np.float32)


SPACES: dict[str, Any] = {
    "Box 4": box(),
    "Box 376": box(376),
    "frame": spaces.Box(0, 255, (84, 84, 4), np.uint8),
    "float64": spaces.Box(-1, 1, (17,), np.float64),
    "Discrete": spaces.Discrete(16),
    "MultiDiscrete": spaces.MultiDiscrete([4, 5, 6]),
    "MultiBinary": spaces.MultiBinary(8),
    "Dict of 4": spaces.Dict({f"k{i}": box() for i in range(4)}),
    "Dict of 32": spaces.Dict({f"k{i}": box() for i in range(32)}),
    "nested": spaces.Dict(
        {"a": spaces.Dict({"x": box(), "y": spaces.Discrete(3)}), "b": spaces.Tuple((box(), box(8)))}
    ),
    "Tuple": spaces.Tuple((box(), spaces.Discrete(3), box(8))),
    "Text": spaces.Text(32),
    "Graph": spaces.Graph(box(), spaces.Discrete(3)),
    "Sequence": spaces.Sequence(box()),
    "OneOf": spaces.OneOf((box(), spaces.Discrete(3))),
}
# Of these gymnasium's AsyncVectorEnv cannot share memory.
UNSHARED = ("Graph", "Sequence", "OneOf", "Text")
INFOS: dict[str, Any] = {
    "none": lambda t: {},
    "a number": lambda t: {"x": 1.0},
    "8 numbers": lambda t: {f"x{i}": float(i) for i in range(8)},
    "an array": lambda t: {"p": np.zeros(8, np.float32)},
    "text": lambda t: {"s": "hello"},
    "a list": lambda t: {"l": [1, 2, 3]},
    "nested": lambda t: {"a": {"b": 1.0, "c": {"d": 2}}},
    "now and then": lambda t: {"x": 1.0} if t % 10 == 0 else {},
    "mixed": lambda t: {"x": t if t % 2 else "odd"},
    "an object": lambda t: {"o": {1, 2}},
}
DISCRETE = spaces.Discrete(2)
ACTIONS: dict[str, Any] = {
    "Dict of 6": spaces.Dict({f"a{i}": spaces.Discrete(3) for i in range(6)}),
    "Box 6": box(6),
    "Tuple": spaces.Tuple((spaces.Discrete(3), box(2))),
    "MultiDiscrete": spaces.MultiDiscrete([3, 4]),
}


class Fake(gymnasium.Env):
    """An environment that costs nearly nothing."""

    def __init__(self, space: str = "Box 4", info: str = "none", length: int = 200, action: str = ""):
        self.observation_space = SPACES[space]
        self.action_space = ACTIONS.get(action, DISCRETE)
        self.observation_space.seed(0)
        self._observations = [self.observation_space.sample() for _ in range(4)]
        self._info, self._length, self.t = INFOS[info], length, 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.t = 0
        return self._observations[0], self._info(0)

    def step(self, action: Any) -> Any:
        self.t += 1
        return self._observations[self.t & 3], 1.0, self.t >= self._length, False, self._info(self.t)


def functions(n: int, *args: Any) -> list[Any]:
    return [partial(Fake, *args)] * n


def step(variant: str, n: int = 8, n_workers: int = 0, args: Any = (), action: str = "", **kwargs: Any) -> Row:
    """A row of `step`, beside the vector environment of gymnasium that does the same."""
    fns, space = functions(n, *args), ACTIONS.get(action, DISCRETE)
    space.seed(0)
    actions = gymnasium.vector.utils.batch_space(space, n).sample()

    def make(create: Any) -> Call:
        env = row.closing(create())
        env.reset(seed=0)
        if kwargs.get("autoreset_mode") is not AutoresetMode.DISABLED:
            return lambda: env.step(actions)

        def step_and_reset() -> None:
            _, _, terminated, truncated, _ = env.step(actions)
            if (ended := terminated | truncated).any():
                env.reset(options={"reset_mask": ended})

        return step_and_reset

    makers = {"ours": lambda: SharedVectorEnv(fns, n_workers, **kwargs)}
    if n_workers:
        more = {"shared_memory": False} if args and args[0] in UNSHARED else {}
        makers["async"] = lambda: AsyncVectorEnv(fns, **more, **kwargs)
    else:
        makers["sync"] = lambda: SyncVectorEnv(fns, **kwargs)
    contenders = {name: lambda create=create: make(create) for name, create in makers.items()}
    row = Row(f"step, {n_workers} workers", variant, contenders, is_wall_time=bool(n_workers))
    return row


def rows() -> Iterator[Row]:
    for n_workers in (0, 2):
        for space in SPACES:
            yield step(f"8 of {space}", 8, n_workers, (space,))
        for info in INFOS:
            yield step(f"8, {info} in info", 8, n_workers, ("Box 4", info))
        for n in (2, 32, 128) if not n_workers else (2, 16):
            yield step(f"{n} of Box 4", n, n_workers)
        for length in (1, 5):
            yield step(f"8, episodes of {length}", 8, n_workers, ("Box 4", "none", length))
            yield step(f"8, episodes of {length}, 8 numbers", 8, n_workers, ("Box 4", "8 numbers", length))
        for mode in AutoresetMode:
            yield step(f"8, episodes of 5, {mode.name}", 8, n_workers, ("Box 4", "none", 5), autoreset_mode=mode)
        for action in ACTIONS:
            yield step(f"8, {action} actions", 8, n_workers, ("Box 4", "none", 200, action), action=action)
        yield step("8 frames, copy=False", 8, n_workers, ("frame",), copy=False)
        yield from calls(n_workers)


def calls(n_workers: int) -> Iterator[Row]:
    fns = functions(8)
    theirs = AsyncVectorEnv if n_workers else SyncVectorEnv
    for name, call in {
        "reset": lambda e: e.reset(),
        "reset(seed=1)": lambda e: e.reset(seed=1),
        "get_attr": lambda e: e.get_attr("t"),
        "call": lambda e: e.call("get_wrapper_attr", "t"),
        "set_attr": lambda e: e.set_attr("q", 1),
    }.items():

        def make(cls: Any, call: Any = call) -> Call:
            env = row.closing(SharedVectorEnv(fns, n_workers) if cls is None else cls(fns))
            env.reset()
            return lambda: call(env)

        row = Row(f"{name}, {n_workers} workers", "8", {}, is_wall_time=bool(n_workers))
        row.contenders |= {"ours": partial(make, None), "gymnasium": partial(make, theirs)}
        yield row
    if n_workers:

        def life(cls: Any, n: int) -> None:
            env = SharedVectorEnv(functions(n), 2) if cls is None else cls(functions(n))
            env.reset()
            env.close()

        for n in (2, 8):
            contenders = {"ours": lambda n=n: partial(life, None, n), "gymnasium": lambda n=n: partial(life, theirs, n)}
            yield Row("construct, reset, close", f"{n}", contenders, is_wall_time=True)
