"""rlstructs.integrations.sb3's buffers beside stable_baselines3's."""

from __future__ import annotations

import pickle
from functools import cache
from itertools import cycle
from typing import Any

import numpy as np
from gymnasium import spaces

import rlstructs.integrations.sb3 as ours_module
from neighbour_rows import Call, Iterator, Row, both, on, peer

theirs_module = peer("stable_baselines3.common.buffers")

BOX = spaces.Box(-1, 1, (17,), np.float32)
ACTION = spaces.Box(-1, 1, (6,), np.float32)
FRAME = spaces.Box(0, 255, (4, 84, 84), np.uint8)
LINKED: Any = {"handle_timeout_termination": False, "optimize_memory_usage": True}


def box_dict(n_keys: int) -> spaces.Dict:
    return spaces.Dict({f"k{i}": BOX for i in range(n_keys)})


def draw(space: Any, n: int) -> Any:
    if isinstance(space, spaces.Dict):
        return {name: draw(each, n) for name, each in space.items()}
    return np.stack([np.asarray(space.sample()) for _ in range(n)])


def make_rows(n: int, space: Any = BOX, action: Any = ACTION, done: bool = False, info: Any = None) -> list[Any]:
    """The arguments of `add`: observations, the next ones, actions, rewards, ends, infos."""
    actions = draw(action, n).reshape(n, -1)
    rewards = np.random.rand(n).astype(np.float32)
    return [draw(space, n), draw(space, n), actions, rewards, np.full(n, done), [dict(info or {}) for _ in range(n)]]


def add(
    variant: str,
    n: int = 16,
    given: list[Any] | None = None,
    space: Any = BOX,
    action: Any = ACTION,
    size: int = 100_000,
    cls: str = "ReplayBuffer",
    group: str | None = None,
    **kwargs: Any,
) -> Row:
    rows = make_rows(n, space, action) if given is None else given
    steps = cycle([rows, [rows[1], rows[0], *rows[2:]]])  # each step goes on where the one before ended

    def make(module: Any) -> Call:
        buffer = getattr(module, cls)(size, space, action, device="cpu", n_envs=n, **kwargs)
        for _ in range(size // n if space is FRAME else 0):
            buffer.add(*next(steps))  # its memory is there: only then a frame's bytes are what is measured
        return lambda: buffer.add(*next(steps))

    contenders = both(make, ours_module, theirs_module, "sb3")
    return Row(f"{cls}.add", variant, contenders, group and f"{group}, {n}")


def writes() -> Iterator[Row]:
    for n in (1, 4, 8, 16, 64, 256, 4096):
        yield add(f"n_envs={n}", n, group="add")
    for n in (1, 16, 256):
        info = {"TimeLimit.truncated": False, "terminal_observation": None}
        yield add(f"n_envs={n}, TimeLimit.truncated in infos", n, make_rows(n, info=info), group="add")
        yield add(f"n_envs={n}, all end", n, make_rows(n, done=True), group="add")
    plain = make_rows(16)
    for index, name, array in [
        (0, "observations float64", plain[0].astype(np.float64)),
        (3, "rewards float64", plain[3].astype(np.float64)),
        (2, "actions float64", plain[2].astype(np.float64)),
        (4, "ends uint8", plain[4].astype(np.uint8)),
        (0, "observations transposed", np.random.rand(17, 16).astype(np.float32).T),
        (0, "a list", list(plain[0])),
    ]:
        yield add(f"n_envs=16, {name}", 16, [*plain[:index], array, *plain[index + 1 :]], group="add")
    yield add("n_envs=16, no timeouts handled", handle_timeout_termination=False, group="add")
    yield add("n_envs=16, optimize_memory_usage", group="add", **LINKED)
    for name, kwargs in {
        "Discrete actions": {"action": spaces.Discrete(4)},
        "Discrete observations": {"space": spaces.Discrete(5)},
        "float64 Box": {"space": spaces.Box(-1, 1, (17,), np.float64)},
    }.items():
        yield add(f"n_envs=1, {name}", 1, group="add", **kwargs)
    for n in (1, 8):
        yield add(f"frames, n_envs={n}", n, space=FRAME, size=2000)
        yield add(f"frames, n_envs={n}, optimize_memory_usage", n, space=FRAME, size=2000, **LINKED)
    for n_keys in (1, 3, 8):
        for n in (1, 16):
            yield add(f"{n_keys} keys, n_envs={n}", n, space=box_dict(n_keys), cls="DictReplayBuffer")
    wide = make_rows(16, box_dict(3))
    wide[0] = {name: x.astype(np.float64) for name, x in wide[0].items()}
    yield add("3 keys, n_envs=16, float64", 16, wide, box_dict(3), cls="DictReplayBuffer")
    yield add("n_envs=16", cls="NStepReplayBuffer", n_steps=3, gamma=0.99)


def filled(cls: str = "ReplayBuffer", n: int = 1, space: Any = BOX, size: int = 20_000, **kwargs: Any) -> Any:
    def make() -> Any:
        pair = [
            getattr(m, cls)(size, space, ACTION, device="cpu", n_envs=n, **kwargs) for m in (ours_module, theirs_module)
        ]
        step, end = make_rows(n, space), make_rows(n, space, done=True)
        for t in range(size // n):
            for buffer in pair:
                buffer.add(*(end if t % 100 == 99 else step))
        return tuple(pair)

    return cache(make)


def sample(variant: str, pair: Any, n: int, cls: str = "ReplayBuffer") -> Row:
    return Row(f"{cls}.sample", f"{n}, {variant}", on(pair, lambda b: b.sample(n), "sb3"))


def reads() -> Iterator[Row]:
    for n_envs in (1, 16):
        pair = filled(n=n_envs)
        for n in (1, 32, 256, 4096, 65536):
            yield sample(f"n_envs={n_envs}", pair, n)
    yield sample("optimize_memory_usage", filled(n=16, **LINKED), 256)
    frames = filled(space=FRAME, size=1000)
    for n in (32, 256):
        yield sample("frames", frames, n)
    yield sample("frames, optimize_memory_usage", filled(space=FRAME, size=1000, **LINKED), 32)
    yield sample("8 keys", filled("DictReplayBuffer", 16, box_dict(8)), 256, "DictReplayBuffer")
    steps = filled("NStepReplayBuffer", 16, n_steps=3, gamma=0.99)
    for n in (32, 256, 4096):
        yield sample("n_steps=3", steps, n, "NStepReplayBuffer")
    pair = filled(n=16)
    dumped = cache(lambda: tuple(pickle.dumps(buffer) for buffer in pair()))
    yield Row("pickle.dumps", "20k rows", on(pair, pickle.dumps, "sb3"))
    yield Row("pickle.loads", "20k rows", on(dumped, pickle.loads, "sb3"))
    for name, call in {
        "size(), full, pos": lambda b: (b.size(), b.full, b.pos),
        "rewards": lambda b: b.rewards,
        "observations": lambda b: b.observations,
        "rewards.mean()": lambda b: b.rewards.mean(),
        "observations.mean()": lambda b: b.observations.mean(),
    }.items():
        yield Row(f"buffer.{name}", "20k rows", on(pair, call, "sb3"))
    yield Row("buffer.reset", "20k rows", on(filled(n=16), lambda b: b.reset(), "sb3"))
    for n in (10_000, 1_000_000):
        make = lambda module, n=n: lambda: module.ReplayBuffer(n, BOX, ACTION, device="cpu")
        yield Row("ReplayBuffer()", f"{n:,}", both(make, ours_module, theirs_module, "sb3"), bound=2.0)


def rows() -> Iterator[Row]:
    yield from writes()
    yield from reads()
