"""Rows that the memories of jax and warp have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from neighbour_rows import Call, Iterator, Row, both, on

BASE = {"observations": 17, "actions": 6, "rewards": 1, "next_observations": 17, "terminated": 1}
PPO = {
    "observations": 17,
    "actions": 6,
    "rewards": 1,
    "terminated": 1,
    "truncated": 1,
    "log_prob": 1,
    "values": 1,
    "returns": 1,
    "advantages": 1,
}
READ = ["observations", "actions", "log_prob", "values", "returns", "advantages"]
ENDS = ("terminated", "truncated")


@dataclass
class Kind:
    """A framework: its memories, how an array gets into it, its dtypes, and how to wait for what it computes."""

    ours: Any
    theirs: Any
    convert: Callable[[Any], Any]
    bool_dtype: Any
    int8: Any
    float32: Any
    kwargs: dict[str, Any]
    awaited: Callable[[Call], Call]

    def make(self, cls: Any, n_envs: int, sizes: Any, rows: int, ends: Any = None, **kwargs: Any) -> Any:
        memory = cls(memory_size=rows or max(64, 100_000 // n_envs), num_envs=n_envs, **self.kwargs, **kwargs)
        for name, size in sizes.items():
            dtype = (ends or self.bool_dtype) if name in ENDS else self.float32
            memory.create_tensor(name, size=size, dtype=dtype)
        return memory

    def values(self, n: int, sizes: Any, dtypes: Any = None, convert: Any = None) -> dict[str, Any]:
        found = {}
        for name, size in sizes.items():
            if name not in ("returns", "advantages"):
                array = np.zeros((n, 1), bool) if name in ENDS else np.random.rand(n, size).astype(np.float32)
                found[name] = (convert or self.convert)(array.astype((dtypes or {}).get(name, array.dtype)))
        return found

    def add(
        self,
        variant: str,
        n_envs: int,
        n: int = 0,
        sizes: Any = BASE,
        rows: int = 0,
        ends: Any = None,
        dtypes: Any = None,
        convert: Any = None,
    ) -> Row:
        given = self.values(n or n_envs, sizes, dtypes, convert)

        def make(cls: Any) -> Call:
            memory = self.make(cls, n_envs, sizes, rows, ends)
            return lambda: memory.add_samples(**given)

        group = None if n else f"add, {n_envs}, {len(sizes)}"
        return Row("Memory.add_samples", variant, both(make, self.ours, self.theirs, "skrl"), group)

    def filled(self, n_envs: int, rows: int, sizes: Any) -> Any:
        def make() -> Any:
            given, found = self.values(n_envs, sizes), []
            for cls in (self.ours, self.theirs):
                memory = self.make(cls, n_envs, sizes, rows, replacement=True)
                for _ in range(rows):
                    memory.add_samples(**given)
                found.append(memory)
            return tuple(found)

        return cache(make)

    def read(self, call: str, variant: str, pair: Any, function: Callable[[Any], Any]) -> Row:
        contenders = on(pair, function, "skrl")
        return Row(call, variant, {name: lambda m=make: self.awaited(m()) for name, make in contenders.items()})


def rows_of(kind: Kind) -> Iterator[Row]:
    for n_envs in (1, 16, 256, 4096):
        yield kind.add(f"E={n_envs}", n_envs)
        yield kind.add(f"PPO's step, E={n_envs}", n_envs, sizes=PPO, rows=64)
    yield kind.add("8 of 16", 16, 8)
    yield kind.add("64 rows into 1 environment", 1, 64)
    yield kind.add("E=16, int8 ends", 16, ends=kind.int8, dtypes={"terminated": np.int8})
    yield kind.add("E=16, float32 given for ends", 16, dtypes={"terminated": np.float32})
    names, pair = list(BASE), kind.filled(16, 640, BASE)
    for n in (1, 32, 256, 4096, 65536):
        yield kind.read("Memory.sample", f"{n}", pair, lambda m, n=n: m.sample(names, batch_size=n))
    sequences = lambda m: m.sample(names, batch_size=256, sequence_length=8)
    yield kind.read("Memory.sample", "256 sequences of 8", pair, sequences)
    parts = lambda m: m.sample(names, batch_size=4096, mini_batches=8)
    yield kind.read("Memory.sample", "4096 in 8 parts", pair, parts)
    for n_envs, n_rows in ((16, 128), (256, 64), (4096, 24)):
        pair, size = kind.filled(n_envs, n_rows, PPO), f"{n_envs} x {n_rows}"
        for n in (1, 4, 32):
            whole = lambda m, n=n: m.sample_all(READ, mini_batches=n)
            yield kind.read("Memory.sample_all", f"{size} in {n} parts", pair, whole)
        yield kind.read("Memory.get_tensor_by_name", size, pair, lambda m: m.get_tensor_by_name("values"))
        new = kind.convert(np.zeros((n_rows, n_envs, 1), np.float32))
        yield kind.read(
            "Memory.set_tensor_by_name", size, pair, lambda m, new=new: m.set_tensor_by_name("returns", new)
        )
        given = kind.values(n_envs, PPO)
        step = lambda m, v=given: (m.add_samples(**v), m.get_tensor_by_name("values"))[1]
        yield kind.read("add_samples + get_tensor_by_name", size, pair, step)
