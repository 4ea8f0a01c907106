"""rlstructs.replay's buffers of torchrl's kind beside torchrl.data's."""

from __future__ import annotations

import copy
import pickle
import tempfile
from functools import cache
from typing import Any

import torch

import rlstructs.replay as ours_module
from neighbour_rows import Call, Iterator, Row, both, on, peer
from rlstructs import DictTensor

theirs_module = peer("torchrl.data")
samplers = peer("torchrl.data.replay_buffers.samplers")
transforms = peer("torchrl.envs.transforms")
TensorDict = peer("tensordict").TensorDict

SIZES = {"observations": 17, "actions": 6, "rewards": 1, "next_observations": 17}
SMALL, LARGE = 20_000, 100_000


def flat(n: int, dtype: Any = torch.float32) -> Any:
    columns = {name: torch.rand(n, size).to(dtype) for name, size in SIZES.items()}
    return TensorDict({**columns, "terminated": torch.zeros(n, 1, dtype=torch.bool)}, [n])


def nested(n: int, n_keys: int = 1, frames: bool = False, length: int = 100) -> Any:
    """n rows as torchrl's collectors give them; every `length`-th one ends an episode."""

    def observations() -> Any:
        return {
            f"o{i}": torch.randint(0, 255, (n, 4, 84, 84), dtype=torch.uint8) if frames else torch.rand(n, 17)
            for i in range(n_keys)
        }

    flag, end = torch.zeros(n, 1, dtype=torch.bool), (torch.arange(n) % length == length - 1)[:, None]
    found = {**observations(), "action": torch.rand(n, 6)}
    found |= {name: flag.clone() for name in ("done", "terminated", "truncated")}
    following = {
        **observations(),
        "reward": torch.rand(n, 1),
        "done": end,
        "terminated": end.clone(),
        "truncated": flag.clone(),
    }
    return TensorDict({**found, "next": TensorDict(following, [n])}, [n])


def module_of(index: int, name: str) -> Any:
    """A class of ours or theirs; torchrl's samplers stand in a module of their own."""
    module = (ours_module, theirs_module)[index]
    return getattr(module, name) if hasattr(module, name) else getattr(samplers, name)


def make_buffer(
    index: int,
    size: int,
    batch: int = 256,
    sampler: Any = None,
    storage: str = "LazyTensorStorage",
    cls: str = "TensorDictReplayBuffer",
    cached: bool = False,
    **kwargs: Any,
) -> Any:
    """One of our buffers (index 0) or theirs; `sampler` is a name and its arguments."""
    more: dict[str, Any] = {}
    if sampler is not None:
        name, arguments = sampler
        more["sampler"] = module_of(index, name)(**arguments, **({"cache_values": True} if cached and index else {}))
    return module_of(index, cls)(storage=module_of(index, storage)(size), batch_size=batch, **more, **kwargs)


def write(
    call: str, variant: str, given: Any, size: int = LARGE, group: str | None = None, ours: Any = None, **kwargs: Any
) -> Row:
    """A row of `extend` or `add`; `ours` is what our buffer is given, if it is not the same."""

    def make(index: int) -> Call:
        method = getattr(make_buffer(index, size, **kwargs), call)
        rows = given if index or ours is None else ours
        return lambda: method(rows)

    return Row(call, variant, both(make, 0, 1, "torchrl"), group)


def writes() -> Iterator[Row]:
    for n in (1, 16, 256, 4096):
        yield write("extend", f"{n} rows, 5 keys", flat(n), group=f"extend flat {n}")
        yield write("extend", f"{n} rows, nested", nested(n), group=f"extend nested {n}")
        yield write("extend", f"{n} rows, nested, 8 observations", nested(n, 8))
        yield write("extend", f"{n} rows, all end", nested(n, length=1), group=f"extend nested {n}")
    rows, own = flat(16), DictTensor(dict(flat(16).items()))
    yield write("extend", "16 rows, ours a DictTensor", rows, ours=own, group="extend flat 16")
    yield write("extend", "16 rows, ours a dict", rows, ours=dict(own.items()), group="extend flat 16")
    yield write("extend", "16 rows, not contiguous", nested(32)[::2], group="extend nested 16")
    yield write("extend", "a list of 16 rows", [nested(1)[0] for _ in range(16)])
    yield write("extend", "8 rows of frames 4x84x84", nested(8, frames=True), 1000)
    yield write("extend", "4 x 64 steps, reshaped", nested(256).reshape(4, 64).reshape(-1), group="extend nested 256")
    for storage in ("LazyMemmapStorage", "ListStorage"):
        yield write("extend", f"16 rows, {storage}", rows, SMALL, storage=storage)
        yield write("add", f"nested, {storage}", nested(1)[0], SMALL, storage=storage)
    yield write("extend", "4096 rows, ListStorage", nested(4096), SMALL, storage="ListStorage")
    wide, narrow = flat(16, torch.float64), flat(16)

    def cast(index: int) -> Call:
        buffer = make_buffer(index, LARGE)
        buffer.extend(narrow)
        return lambda: buffer.extend(wide)

    yield Row("extend", "16 rows, float64 into float32", both(cast, 0, 1, "torchrl"), "extend flat 16")
    for name, one in {
        "5 keys": flat(1)[0],
        "nested": nested(1)[0],
        "nested, 8 observations": nested(1, 8)[0],
    }.items():
        yield write("add", name, one, group="add")
    yield write("add", "frames", nested(1, frames=True)[0], 1000)
    settings: Any = {"cls": "TensorDictPrioritizedReplayBuffer", "alpha": 0.6, "beta": 0.4}
    yield write("add", "nested, prioritised", nested(1)[0], **settings)
    for n in (16, 4096):
        yield write("extend", f"{n} rows, prioritised", nested(n), **settings)
    yield write("extend", "16 rows, SliceSampler", rows, sampler=("SliceSampler", {"slice_len": 8}))


def filled(n: int = SMALL, data: Any = None, **kwargs: Any) -> Any:
    """Ours and theirs with the same rows, made when they are first used; None where theirs cannot be made."""

    def make() -> Any:
        rows = nested(n) if data is None else data()

        def fill(index: int) -> Any:
            buffer = make_buffer(index, n, **kwargs)
            buffer.extend(rows.clone())
            return buffer

        ours = fill(0)
        try:
            return ours, fill(1)
        except RuntimeError:  # its compiled parts don't fit this version of torch
            return ours, None

    return cache(make)


def draws() -> Iterator[Row]:
    for n in (1, 32, 256, 4096, 65536):
        pair = filled(LARGE if n == 65536 else SMALL, batch=n)
        yield Row("sample", f"{n}, nested", on(pair, lambda b: b.sample(), "torchrl"))
        yield Row("sample", f"{n} as an argument", on(pair, lambda b, n=n: b.sample(n), "torchrl"))
    pair = filled()
    read = lambda s: (s["o0"], s["action"], s["next", "reward"], s["next", "o0"], s["next", "terminated"])
    yield Row("sample and 5 keys", "256", on(pair, lambda b: read(b.sample()), "torchrl"))
    yield Row("sample", "256, return_info", on(pair, lambda b: b.sample(return_info=True), "torchrl"))
    for n_keys in (1, 8):
        made = filled(data=lambda k=n_keys: nested(SMALL, k))
        yield Row("sample", f"256, {n_keys} observations", on(made, lambda b: b.sample(), "torchrl"))
    frames = filled(1000, lambda: nested(1000, frames=True))
    for n in (32, 256):
        yield Row("sample", f"{n} frames and next", on(frames, lambda b, n=n: b.sample(n), "torchrl"))
    for storage in ("LazyMemmapStorage", "ListStorage"):
        yield Row("sample", f"256, {storage}", on(filled(storage=storage), lambda b: b.sample(), "torchrl"))
    without = filled(sampler=("SamplerWithoutReplacement", {}))
    yield Row("sample", "256, SamplerWithoutReplacement", on(without, lambda b: b.sample(), "torchrl"))
    yield Row("for batch in buffer", "20k rows by 256", on(without, lambda b: [0 for _ in b], "torchrl"))
    for length in (8, 32):
        for n in (32, 256, 4096):
            made = filled(sampler=("SliceSampler", {"slice_len": length}), batch=max(n, length))
            yield Row(
                "sample", f"SliceSampler of {length}, {max(n, length)}", on(made, lambda b: b.sample(), "torchrl")
            )
    for name, kwargs in {
        "SliceSampler of 8, theirs cached": {"sampler": ("SliceSampler", {"slice_len": 8}), "cached": True},
        "SliceSampler, 8 slices": {"sampler": ("SliceSampler", {"num_slices": 8})},
        "SliceSamplerWithoutReplacement": {"sampler": ("SliceSamplerWithoutReplacement", {"slice_len": 8})},
        "PrioritizedSliceSampler": {
            "sampler": ("PrioritizedSliceSampler", {"max_capacity": SMALL, "alpha": 0.6, "beta": 0.4, "slice_len": 8})
        },
    }.items():
        yield Row("sample", f"256, {name}", on(filled(**kwargs), lambda b: b.sample(), "torchrl"))
    rows = nested(16)
    for name, kwargs in {"": {}, ", slices": {"sampler": ("SliceSampler", {"slice_len": 8})}}.items():
        call = lambda b: (b.extend(rows), b.sample())
        yield Row("extend 16 + sample", f"256{name}", on(filled(**kwargs), call, "torchrl"))
    for n, batch in ((1000, 64), (2048, 256), (16384, 1024)):
        made, data = filled(n, batch=batch, sampler=("SamplerWithoutReplacement", {})), nested(n)
        call = lambda b, d=data, k=n // batch: (b.extend(d), [b.sample() for _ in range(k)])
        yield Row("PPO's epoch: extend, sample all", f"{n} by {batch}", on(made, call, "torchrl"))


def prioritised() -> Iterator[Row]:
    settings: Any = {"cls": "TensorDictPrioritizedReplayBuffer", "alpha": 0.6, "beta": 0.4}

    def by_tensordict(buffer: Any) -> None:
        batch = buffer.sample()
        batch["td_error"] = batch["next", "reward"][:, 0]
        buffer.update_tensordict_priority(batch)

    def by_index(buffer: Any) -> None:
        batch = buffer.sample()
        buffer.update_priority(batch["index"], batch["next", "reward"][:, 0])

    for n in (32, 256, 4096):
        made = filled(batch=n, **settings)
        yield Row("prioritised sample", f"{n}", on(made, lambda b: b.sample(), "torchrl"))
        yield Row("prioritised sample + update_tensordict_priority", f"{n}", on(made, by_tensordict, "torchrl"))
        yield Row("prioritised sample + update_priority", f"{n}", on(made, by_index, "torchrl"))


def transformed() -> Iterator[Row]:
    rows = nested(16)
    makers = {
        "a function": lambda: lambda batch: batch,
        "DoubleToFloat": transforms.DoubleToFloat,
        "RewardScaling": lambda: transforms.RewardScaling(loc=0.0, scale=0.1, in_keys=[("next", "reward")]),
    }
    for name, make in makers.items():

        def pair(make: Any = make) -> Any:
            found = make_buffer(0, SMALL), make_buffer(1, SMALL)
            for buffer in found:
                buffer.append_transform(make())
                buffer.extend(nested(SMALL))
            return found

        made = cache(pair)
        yield Row("sample", f"256, {name} as transform", on(made, lambda b: b.sample(), "torchrl"))
        if name != "a function":
            yield Row("extend", f"16 rows, {name} as transform", on(made, lambda b: b.extend(rows), "torchrl"))


def single_rows() -> Iterator[Row]:
    """Calls that concern a few rows, at several sizes of the store."""
    for n in (1_000, 20_000, 1_000_000):
        made = filled(n, lambda n=n: flat(n))
        some, rows, one = torch.randint(0, n, (16,)), flat(16), flat(1)[0]
        for name, call in {
            "buffer[5]": lambda b: b[5],
            "buffer[10:20]": lambda b: b[10:20],
            "buffer[ids]": lambda b, i=some: b[i],
            "buffer[list]": lambda b, i=some.tolist(): b[i],
            "add": lambda b, one=one: b.add(one),
            "buffer[5] = row": lambda b, one=one: b.__setitem__(5, one),
            "buffer[ids] = rows": lambda b, i=some, rows=rows: b.__setitem__(i, rows),
            "buffer.storage[ids]": lambda b, i=some: b.storage[i],
            "len(buffer)": len,
            "buffer.write_count": lambda b: b.write_count,
            "storage, sampler": lambda b: (b.storage, b.sampler),
        }.items():
            yield Row(name, f"{n:,} stored", on(made, call, "torchrl"))
    made = filled()
    yield Row("buffer[:]", "20k rows", on(made, lambda b: b[:], "torchrl"))
    yield Row("buffer.storage[:]", "20k rows", on(made, lambda b: b.storage[:], "torchrl"))
    batches = cache(lambda: tuple(buffer.sample() for buffer in made()))
    for name, call in {
        "clone": lambda s: s.clone(),
        "['next', 'reward']": lambda s: s["next", "reward"],
        "['next']": lambda s: s["next"],
        "get": lambda s: s.get("action"),
        "set": lambda s: s.set("x", s["action"]),
        "keys": lambda s: list(s.keys()),
        "reshape": lambda s: s.reshape(4, 64),
        "[0:10]": lambda s: s[0:10],
        "repr": repr,
    }.items():
        yield Row("of a batch", name, on(batches, call, "torchrl"))


def whole_buffers() -> Iterator[Row]:
    made, rows = filled(), flat(16)
    for name, call in {
        "pickle.dumps": pickle.dumps,
        "copy.deepcopy": copy.deepcopy,
        "state_dict": lambda b: b.state_dict(),
        "repr": repr,
    }.items():
        yield Row(name, "20k rows", on(made, call, "torchrl"))
    with tempfile.TemporaryDirectory() as folder:
        path = lambda b: f"{folder}/{type(b).__module__.partition('.')[0]}"
        yield Row("dumps", "20k rows", on(made, lambda b: b.dumps(path(b)), "torchrl"))
        yield Row("loads", "20k rows", on(made, lambda b: b.loads(path(b)), "torchrl"))
    for n in (10_000, 1_000_000):
        first = lambda index, n=n: lambda: make_buffer(index, n).extend(rows)
        yield Row("construct, first extend", f"{n:,}", both(first, 0, 1, "torchrl"), bound=2.0)

        def empty(index: int, n: int = n) -> Call:
            buffer = make_buffer(index, n)
            buffer.extend(rows)
            return buffer.empty

        yield Row("empty", f"{n:,}", both(empty, 0, 1, "torchrl"))


def rows() -> Iterator[Row]:
    for part in (writes, draws, prioritised, transformed, single_rows, whole_buffers):
        yield from part()
