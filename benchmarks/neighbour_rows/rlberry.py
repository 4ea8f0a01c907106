"""rlstructs.replay.ChunkReplayBuffer beside rlberry's ReplayBuffer, which is installed without its dependencies."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import types
from functools import cache
from typing import Any

import numpy as np
import torch

from neighbour_rows import Call, Iterator, NotInstalled, Row, both, on
from rlstructs.replay import ChunkReplayBuffer


def _import_theirs() -> Any:
    """Imports the module of the buffer alone: the package itself wants an old gymnasium."""
    spec = importlib.util.find_spec("rlberry")
    if spec is None or spec.origin is None:
        raise NotInstalled("No module named 'rlberry'")
    root = os.path.dirname(spec.origin)
    for name in ("rlberry", "rlberry.agents", "rlberry.agents.utils"):
        module = types.ModuleType(name)
        module.__path__ = [os.path.join(root, *name.split(".")[1:])]
        sys.modules[name] = module
    sys.modules["rlberry"].logger = logging.getLogger("rlberry")  # type: ignore[attr-defined]
    return importlib.import_module("rlberry.agents.utils.replay").ReplayBuffer


THEIRS = _import_theirs()
ROW = {
    "observations": np.random.rand(17).astype(np.float32),
    "actions": np.random.rand(6).astype(np.float32),
    "rewards": np.float32(0.5),
    "dones": np.bool_(False),
}
DTYPES: dict[str, Any] = {"observations": np.float32, "actions": np.float32, "rewards": np.float32, "dones": bool}


def make_buffer(cls: Any, capacity: int = 100_000, dtypes: Any = DTYPES, **kwargs: Any) -> Any:
    buffer = cls(capacity, np.random.default_rng(0), **kwargs)
    for name, dtype in dtypes.items():
        buffer.setup_entry(name, dtype)
    return buffer


def append(
    variant: str, row: Any, dtypes: Any = DTYPES, capacity: int = 100_000, group: str | None = "append", **kwargs: Any
) -> Row:
    def make(cls: Any) -> Call:
        buffer = make_buffer(cls, capacity, dtypes, **kwargs)
        return lambda: buffer.append(row)

    return Row("append", variant, both(make, ChunkReplayBuffer, THEIRS, "rlberry"), group)


def writes() -> Iterator[Row]:
    yield append("as stored", ROW)
    for variant, more, dtypes in [
        ("Python's scalars", {"rewards": 0.5, "dones": False}, {}),
        ("float64", {"observations": np.random.rand(17)}, {}),
        ("a list", {"observations": [0.1] * 17}, {}),
        ("a torch tensor", {"observations": torch.rand(17)}, {}),
        ("an int", {"actions": 3}, {"actions": np.int64}),
        ("an int into float", {"actions": 3}, {}),
        ("an array of no axes", {"rewards": np.array(0.5)}, {}),
        ("float32 into float64", {}, {"rewards": np.float64}),
    ]:
        yield append(variant, ROW | more, DTYPES | dtypes)
    yield append("prioritised", ROW, enable_prioritized=True)
    yield append("max_episode_steps=50", ROW, max_episode_steps=50)
    frame = np.random.randint(0, 255, (4, 84, 84), dtype=np.uint8)
    yield append("a frame 4x84x84", ROW | {"observations": frame}, DTYPES | {"observations": np.uint8}, 1000, None)

    def episode(cls: Any, length: int) -> Call:
        buffer = make_buffer(cls)
        return lambda: ([buffer.append(ROW) for _ in range(length)], buffer.end_episode())

    for length in (1, 10, 100):
        make = lambda cls, n=length: episode(cls, n)
        yield Row("append + end_episode", f"{length} steps", both(make, ChunkReplayBuffer, THEIRS, "rlberry"))


def reads() -> Iterator[Row]:
    @cache
    def pair() -> Any:
        made = [make_buffer(cls, 20_000, enable_prioritized=True) for cls in (ChunkReplayBuffer, THEIRS)]
        for t in range(20_000):
            for buffer in made:
                buffer.append(ROW)
                if t % 100 == 99:
                    buffer.end_episode()
        return tuple(made)

    for n in (1, 32, 256, 4096):
        for length in (1, 8, 32):
            if n * length <= 40_000:
                yield Row("sample", f"{n} x {length}", on(pair, lambda b, n=n, k=length: b.sample(n, k), "rlberry"))
        draw = lambda b, n=n: b.sample(n, 8, sampling_mode="prioritized")
        yield Row("sample, prioritised", f"{n} x 8", on(pair, draw, "rlberry"))
        new = np.random.rand(n, 8)
        call = lambda b, draw=draw, new=new: b.update_priorities(draw(b).info["indices"], new)
        yield Row("sample, update_priorities", f"{n} x 8", on(pair, call, "rlberry"))
    for name, call in {
        "len": len,
        "data, tags, dtypes": lambda b: (b.data, b.tags, b.dtypes),
        "data[tag]": lambda b: b.data["rewards"],
        "data[tag][-1]": lambda b: b.data["rewards"][-1],
    }.items():
        yield Row(name, "20k rows", on(pair, call, "rlberry"))
    make = lambda cls: lambda: make_buffer(cls, 1_000_000, enable_prioritized=True)
    yield Row("construct", "1M rows, prioritised", both(make, ChunkReplayBuffer, THEIRS, "rlberry"), bound=2.0)


def rows() -> Iterator[Row]:
    yield from writes()
    yield from reads()
