"""rlstructs.replay's buffers of tianshou's kind beside tianshou.data's."""

from __future__ import annotations

import copy
import pickle
from functools import cache
from typing import Any

import numpy as np
import torch

import rlstructs.replay as ours_module
from neighbour_rows import Call, Iterator, Row, both, on, peer

theirs_module = peer("tianshou.data")
Batch = theirs_module.Batch

Rows = dict[str, Any]
TIME_LIMIT = {"TimeLimit.truncated": False, "episode_step": 3}


def make_rows(n: int | None = None, obs: Any = None, ends: bool = False, dtype: Any = np.float32, **more: Any) -> Rows:
    """n rows, or one without an axis."""
    lead = () if n is None else (n,)
    found = {
        "obs": np.random.rand(*lead, 17).astype(dtype) if obs is None else obs,
        "act": np.random.rand(*lead, 6).astype(np.float32),
        "rew": np.float64(0.5) if n is None else np.random.rand(n),
        "terminated": np.bool_(ends) if n is None else np.full(n, ends),
        "truncated": np.bool_(False) if n is None else np.zeros(n, bool),
        "obs_next": np.random.rand(*lead, 17).astype(dtype) if obs is None else copy.deepcopy(obs),
    }
    return {**found, **more}


def dict_obs(n_keys: int, *lead: int) -> Rows:
    return {f"k{i}": np.random.rand(*lead, 4).astype(np.float32) for i in range(n_keys)}


def n_bytes(tree: Any) -> float:
    if isinstance(tree, dict):
        return sum(n_bytes(each) for each in tree.values())
    return float(np.asarray(tree).nbytes)


def pairs_of(call: str) -> Any:
    return lambda variant, make, **kw: Row(call, variant, both(make, ours_module, theirs_module, "tianshou"), **kw)


def add_one(
    variant: str, given: Rows, size: int = 20_000, group: str | None = "one", convert: Any = None, **kwargs: Any
) -> Row:
    """`ReplayBuffer.add` of one row, a tianshou Batch unless `convert` makes something else of it for ours."""

    def make(module: Any) -> Call:
        buffer = module.ReplayBuffer(size, **kwargs)
        batch = Batch(**given) if module is theirs_module or convert is None else convert(given)
        return lambda: buffer.add(batch)

    contenders = both(make, ours_module, theirs_module, "tianshou")
    return Row("ReplayBuffer.add", variant, contenders, group, n_bytes(given))


def add_lanes(
    variant: str,
    n: int,
    given: Rows | None = None,
    total: int | None = None,
    cls: str = "VectorReplayBuffer",
    ids: Any = None,
    before: Any = None,
    group: str | None = "lanes",
    convert: Any = None,
    **kwargs: Any,
) -> Row:
    given = make_rows(n) if given is None else given

    def make(module: Any) -> Call:
        buffer = getattr(module, cls)(total or max(20_000, n * 20), n, **kwargs)
        if before is not None:
            before(buffer)
        batch = Batch(**given) if module is theirs_module or convert is None else convert(given)
        return lambda: buffer.add(batch, buffer_ids=ids)

    contenders = both(make, ours_module, theirs_module, "tianshou")
    return Row(f"{cls}.add", variant, contenders, group and f"{group}, {n}", n_bytes(given))


def single_writes() -> Iterator[Row]:
    plain = make_rows()
    for name, convert in {"": None, ", a dict": dict, ", our Batch": lambda rows: ours_module.Batch(**rows)}.items():
        yield add_one(f"a row{name}", plain, convert=convert)
    for variant, more in {
        "info {}": {"info": {}},
        "numbers in info": {"info": {"x": 1.0, "y": 2}},
        "TimeLimit's info": {"info": TIME_LIMIT},
        "text in info": {"info": {"s": "ab", "x": 1.0}},
        "an array in info": {"info": {"p": np.random.rand(8)}},
        "nested info": {"info": {"a": {"x": 1.0, "y": 2.0, "z": 3.0}, "b": {"x": 1.0, "y": 2.0}, "c": 1}},
        "an end": {"terminated": np.bool_(True)},
        "Python's scalars": {"rew": 0.5, "terminated": False, "truncated": False},
        "act a list": {"act": [0.1] * 6},
        "obs a list": {"obs": [0.1] * 17, "obs_next": [0.1] * 17},
        "act an int": {"act": 3},
        "rew float32": {"rew": np.float32(0.5)},
        "terminated 0": {"terminated": 0},
        "policy's keys": {"policy": {"logits": np.random.rand(6)}},
    }.items():
        yield add_one(variant, plain | more)
        yield add_one(f"{variant}, a dict", plain | more, convert=dict)
    yield add_one("torch's tensors", {name: torch.as_tensor(x) for name, x in plain.items()})
    yield add_one("no obs_next", {name: x for name, x in plain.items() if name != "obs_next"})
    for n_keys in (3, 8):
        yield add_one(f"dict observations, {n_keys} keys", make_rows(obs=dict_obs(n_keys)))
    frame = np.random.randint(0, 255, (4, 84, 84), dtype=np.uint8)
    yield add_one("frames 4x84x84", make_rows(obs=frame), 2000, group=None)
    settings: Any = {"ignore_obs_next": True, "stack_num": 4}
    yield add_one("frames, the last of a stack", make_rows(obs=frame), 2000, None, save_only_last_obs=True, **settings)
    yield add_one("frames 84x84, ignore_obs_next", make_rows(obs=frame[0]), 2000, None, **settings)


def writes_of_lanes() -> Iterator[Row]:
    for n in (1, 8, 16, 64, 256, 4096):
        yield add_lanes(f"{n} lanes", n)
        yield add_lanes(f"{n} lanes, a dict", n, convert=dict)
        yield add_lanes(f"{n} lanes, info Batch()", n, make_rows(n, info=Batch()))
        yield add_lanes(f"{n} lanes, ids given", n, ids=np.arange(n))
        yield add_lanes(f"{n} lanes, all end", n, make_rows(n, ends=True))
        if n > 1:
            yield add_lanes(f"half of {n} lanes", n, make_rows(n // 2), ids=np.arange(n // 2))
    for variant, more in {
        "numbers in info": {"info": Batch(x=np.random.rand(16), y=np.arange(16))},
        "info a list of dicts": {"info": np.array([{"x": 1.0, "y": i} for i in range(16)], object)},
        "TimeLimit's info": {"info": Batch({"TimeLimit.truncated": np.zeros(16, bool), "env_id": np.arange(16)})},
        "text in info": {"info": Batch(s=np.array(["a"] * 16, object))},
        "rew float32": {"rew": np.random.rand(16).astype("f")},
        "PPO's keys": {"policy": Batch(hidden=np.random.rand(16, 64).astype(np.float32))},
        "act a list": {"act": [[0.1] * 6] * 16},
    }.items():
        yield add_lanes(f"16 lanes, {variant}", 16, make_rows(16) | more)
    yield add_lanes("16 lanes, permuted ids", 16, ids=np.random.permutation(16))
    yield add_lanes("16 lanes, one by its id", 16, make_rows(1), ids=[3], group=None)
    yield add_lanes("16 lanes, dict observations, 8 keys", 16, make_rows(16, obs=dict_obs(8, 16)))
    yield add_lanes("16 lanes, torch's tensors", 16, {name: torch.as_tensor(x) for name, x in make_rows(16).items()})
    yield add_lanes("16 lanes, float64 obs", 16, make_rows(16, dtype=np.float64))
    for n in (4, 16, 64):
        alone = lambda b: b.add(Batch(**make_rows(1)), buffer_ids=[1])
        yield add_lanes(f"{n} lanes, one was added alone before", n, before=alone)
    frames = make_rows(8, obs=np.random.randint(0, 255, (8, 4, 84, 84), dtype=np.uint8))
    yield add_lanes("8 lanes, frames 4x84x84", 8, frames, 2000, group=None)
    settings: Any = {"save_only_last_obs": True, "ignore_obs_next": True, "stack_num": 4}
    yield add_lanes("8 lanes, frames, the last of a stack", 8, frames, 8000, group=None, **settings)
    yield add_lanes("16 lanes", 16, cls="PrioritizedVectorReplayBuffer", alpha=0.6, beta=0.4)
    of_cache = pairs_of("CachedReplayBuffer.add")
    for n, period in ((1, 100), (16, 100), (64, 100), (16, 1)):
        yield of_cache(f"{n} lanes, an end every {period}", lambda module, n=n, p=period: cached(module, n, p))

    def growing(module: Any) -> Call:
        buffer = module.VectorReplayBuffer(20_000, 16)
        step = Batch(**make_rows(16, info=Batch(x=np.zeros(16))))
        end = Batch(**make_rows(16, ends=True, info=Batch(x=np.zeros(16), final=np.ones(16))))
        return in_turn(buffer, step, end, 20, {})

    yield pairs_of("VectorReplayBuffer.add")("16 lanes, a key at the end only", growing)


def in_turn(buffer: Any, step: Any, end: Any, period: int, kwargs: Rows) -> Call:
    """Adds an end every `period` calls."""
    count = [0]

    def add() -> None:
        count[0] += 1
        buffer.add(end if count[0] % period == 0 else step, **kwargs)

    return add


def cached(module: Any, n: int, period: int) -> Call:
    buffer = module.CachedReplayBuffer(module.ReplayBuffer(20_000), n, 500)
    ids = {"buffer_ids": np.arange(n)}
    return in_turn(buffer, Batch(**make_rows(n)), Batch(**make_rows(n, ends=True)), period, ids)


def filled(
    module: Any, cls: str, n_rows: int = 20_000, lanes: int = 16, info: Any = None, obs: Any = None, **kwargs: Any
) -> Any:
    length = kwargs.pop("length", 100)
    n = lanes if "Vector" in cls else None
    buffer = getattr(module, cls)(n_rows, *([lanes] if n else []), **kwargs)
    for t in range(n_rows // (n or 1)):
        rows = make_rows(n, ends=t % length == length - 1, obs=obs(n) if obs else None)
        buffer.add(Batch(**rows, **({"info": info(n)} if info else {})))
    return buffer


def pair(cls: str, **kwargs: Any) -> Any:
    return cache(lambda: (filled(ours_module, cls, **kwargs), filled(theirs_module, cls, **kwargs)))


def reads() -> Iterator[Row]:
    vector = pair("VectorReplayBuffer")
    for n in (1, 32, 256, 4096, 0, None):
        yield Row("VectorReplayBuffer.sample", f"{n}", on(vector, lambda b, n=n: b.sample(n), "tianshou"))
        yield Row(
            "VectorReplayBuffer.sample_indices", f"{n}", on(vector, lambda b, n=n: b.sample_indices(n), "tianshou")
        )
        if n:
            ids = np.random.randint(0, 20_000, n)
            for name, call in {
                ".prev": lambda b, i=ids: b.prev(i),
                ".next": lambda b, i=ids: b.next(i),
                "[ids]": lambda b, i=ids: b[i],
                ".get obs": lambda b, i=ids: b.get(i, "obs"),
                ".get stack 4": lambda b, i=ids: b.get(i, "obs", stack_num=4),
            }.items():
                yield Row(f"VectorReplayBuffer{name}", f"{n}", on(vector, call, "tianshou"))
    ids = np.random.randint(0, 20_000, 64)
    for name, call in {
        "buffer[5]": lambda b: b[5],
        "buffer[:]": lambda b: b[:],
        "buffer[10:20]": lambda b: b[10:20],
        "buffer[[1, 2, 3, 4]]": lambda b: b[[1, 2, 3, 4]],
        "len(buffer)": len,
        "buffer.obs": lambda b: b.obs,
        "buffer.rew[ids]": lambda b: b.rew[ids],
        "buffer.done": lambda b: b.done,
        "buffer.info": lambda b: b.info,
        "terminated[ids] | truncated[ids]": lambda b: b.terminated[ids] | b.truncated[ids],
        "unfinished_index, last_index": lambda b: (b.unfinished_index(), b.last_index),
        "200 rows by index": lambda b: [b[i] for i in range(200)],
    }.items():
        yield Row(name, "16 lanes, 20k rows", on(vector, call, "tianshou"))
    yield Row("buffer.reset", "16 lanes", on(pair("VectorReplayBuffer", n_rows=1600), lambda b: b.reset(), "tianshou"))
    single = pair("ReplayBuffer", n_rows=5000)
    for n in (1, 64, 256, 0):
        yield Row("ReplayBuffer.sample", f"{n}", on(single, lambda b, n=n: b.sample(n), "tianshou"))
    yield Row("ReplayBuffer[5]", "5k rows", on(single, lambda b: b[5], "tianshou"))
    yield Row("n-step indices", "64", on(single, lambda b: b.next(b.next(b.sample_indices(64))), "tianshou"))
    yield Row("pickle.dumps", "5k rows", on(single, pickle.dumps, "tianshou"))
    yield Row("copy.deepcopy", "5k rows", on(single, copy.deepcopy, "tianshou"))
    dumped = cache(lambda: tuple(pickle.dumps(buffer) for buffer in single()))
    yield Row("pickle.loads", "5k rows", on(dumped, pickle.loads, "tianshou"))


def reads_of_kinds() -> Iterator[Row]:
    kinds: dict[str, Any] = {
        "numbers in info": {"info": lambda n: Batch(x=np.zeros(n), y=np.zeros(n))},
        "text in info": {"info": lambda n: Batch(s=np.array(["a"] * n, object))},
        "dict observations, 8 keys": {"obs": lambda n: dict_obs(8, n)},
    }
    for name, kwargs in kinds.items():
        made = pair("VectorReplayBuffer", n_rows=4000, **kwargs)
        for n in (64, 256):
            yield Row("VectorReplayBuffer.sample", f"{n}, {name}", on(made, lambda b, n=n: b.sample(n), "tianshou"))
    frame = lambda n: np.random.randint(0, 255, (n, 84, 84), dtype=np.uint8)
    made = pair("VectorReplayBuffer", obs=frame, n_rows=4000, stack_num=4, ignore_obs_next=True)
    for n in (1, 32, 256):
        yield Row(
            "VectorReplayBuffer.sample", f"{n} stacks of 4 x 84x84", on(made, lambda b, n=n: b.sample(n), "tianshou")
        )
    yield Row("VectorReplayBuffer[7]", "stacks of 4 x 84x84", on(made, lambda b: b[7], "tianshou"))
    made = pair("VectorReplayBuffer", obs=lambda n: np.stack([frame(n)] * 4, 1), n_rows=1000)
    for n in (32, 256):
        yield Row(
            "VectorReplayBuffer.sample", f"{n} of 4x84x84 and next", on(made, lambda b, n=n: b.sample(n), "tianshou")
        )


def prioritised() -> Iterator[Row]:
    made = pair("PrioritizedVectorReplayBuffer", alpha=0.6, beta=0.4)

    def sample_and_update(buffer: Any, weights: Any) -> None:
        _, ids = buffer.sample(len(weights))
        buffer.update_weight(ids, weights)

    for n in (1, 32, 256, 4096):
        weights, ids = np.random.rand(n), np.random.randint(0, 20_000, n)
        yield Row("Prioritized.sample", f"{n}", on(made, lambda b, n=n: b.sample(n), "tianshou"))
        call = lambda b, w=weights: sample_and_update(b, w)
        yield Row("Prioritized.sample + update_weight", f"{n}", on(made, call, "tianshou"))
        yield Row("Prioritized.get_weight", f"{n}", on(made, lambda b, i=ids: b.get_weight(i), "tianshou"))
    every, weights = np.arange(20_000), np.random.rand(20_000)
    some, tensor = np.random.randint(0, 20_000, 256), torch.rand(256)
    for variant, call in {
        "256, torch": lambda b: b.update_weight(some, tensor),
        "20k": lambda b: b.update_weight(every, weights),
        "one": lambda b: b.update_weight(np.array([3]), np.array([0.5])),
    }.items():
        yield Row("Prioritized.update_weight", variant, on(made, call, "tianshou"))
    yield Row("Prioritized.set_beta", "", on(made, lambda b: b.set_beta(0.5), "tianshou"))


def hindsight() -> Iterator[Row]:
    def goal(n: int | None) -> Rows:
        lead = (n,) if n else ()
        sizes = {"observation": 10, "achieved_goal": 3, "desired_goal": 3}
        return {name: np.random.rand(*lead, size).astype(np.float32) for name, size in sizes.items()}

    def reward(achieved: Any, desired: Any) -> Any:
        return -(np.linalg.norm(achieved - desired, axis=-1) > 0.05).astype(np.float32)

    settings: Any = {"compute_reward_fn": reward, "horizon": 50, "future_k": 4}
    made = pair("HERVectorReplayBuffer", obs=goal, n_rows=8000, length=50, **settings)
    for n in (1, 64, 256, 4096):
        yield Row("HERVectorReplayBuffer.sample", f"{n}", on(made, lambda b, n=n: b.sample(n), "tianshou"))
    ids, given = np.random.randint(0, 8000, 64), Batch(**make_rows(16, obs=goal(16)))
    yield Row("HERVectorReplayBuffer[ids]", "64", on(made, lambda b: b[ids], "tianshou"))
    yield Row("HERVectorReplayBuffer.add", "16 lanes", on(made, lambda b: b.add(given), "tianshou"))


def growth() -> Iterator[Row]:
    """Calls that concern a few rows, of a large buffer."""
    for n in (10_000, 1_000_000):
        ends = np.arange(n) % 100 == 99
        arrays = {
            "obs": np.random.rand(n, 4).astype(np.float32),
            "act": np.zeros(n),
            "rew": np.zeros(n),
            "terminated": ends,
            "truncated": np.zeros(n, bool),
            "done": ends,
            "obs_next": np.random.rand(n, 4).astype(np.float32),
        }
        made = cache(lambda a=arrays: tuple(m.ReplayBuffer.from_data(**a) for m in (ours_module, theirs_module)))
        row = Batch(**{name: x[0] for name, x in arrays.items() if name != "done"})
        some = np.arange(64)
        for name, call in {
            "add + sample 32": lambda b, row=row: (b.add(row), b.sample(32)),
            "sample_indices(None)": lambda b: b.sample_indices(None),
            "unfinished_index": lambda b: b.unfinished_index(),
            "buffer[5]": lambda b: b[5],
            "buffer.done": lambda b: b.done,
            "buffer[10:20]": lambda b: b[10:20],
            "hasnull": lambda b: b.hasnull(),
            "sample(0)": lambda b: b.sample(0),
            "set_array_at_key, 64": lambda b: b.set_array_at_key(np.zeros(64), "adv", some),
            "set_array_at_key": lambda b, n=n: b.set_array_at_key(np.zeros(n), "adv"),
        }.items():
            yield Row(name, f"{n:,} stored", on(made, call, "tianshou"))


def rows() -> Iterator[Row]:
    for part in (single_writes, writes_of_lanes, reads, reads_of_kinds, prioritised, hindsight, growth):
        yield from part()
