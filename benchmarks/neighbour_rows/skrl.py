"""rlstructs.memories.torch beside skrl.memories.torch."""

from __future__ import annotations

import tempfile
from functools import cache
from typing import Any

import torch

from neighbour_rows import Call, Iterator, Maker, Row, both, on, peer
from rlstructs import DictTensor, TemporalDictTensor, Trajectories
from rlstructs.memories.torch import PrioritizedMemory, RandomMemory

SK = peer("skrl.memories.torch").RandomMemory

Sizes = dict[str, Any]
Dtypes = dict[str, Any]
Values = dict[str, Any]

BASE: Sizes = {"observations": 17, "actions": 6, "rewards": 1, "next_observations": 17, "terminated": 1}
PPO: Sizes = {
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
NAMES = list(BASE)
ENDS = ("terminated", "truncated")
BOOL: Dtypes = {"terminated": torch.bool, "truncated": torch.bool}
MOST_ROWS = 100_000


def make_memory(cls: Any, n_envs: int, sizes: Sizes = BASE, dtypes: Dtypes = BOOL, rows: int = 0, **kwargs: Any) -> Any:
    memory = cls(memory_size=rows or max(64, MOST_ROWS // n_envs), num_envs=n_envs, device="cpu", **kwargs)
    for name, size in sizes.items():
        memory.create_tensor(name, size=size, dtype=dtypes.get(name, torch.float32))
    return memory


def values(n: int, sizes: Sizes = BASE, dtypes: Dtypes = BOOL, ends: float = 0.0) -> Values:
    """n rows; of the ends so many are set."""
    found = {}
    for name, size in sizes.items():
        dtype = dtypes.get(name, torch.float32)
        found[name] = (torch.rand(n, 1) < ends).to(dtype) if name in ENDS else (torch.rand(n, size) * 2).to(dtype)
    return found


def ppo_values(n: int) -> Values:
    given = {name: size for name, size in PPO.items() if name not in ("returns", "advantages")}
    return values(n, given) | {"states": None, "next_observations": torch.rand(n, 17)}


def adds(memory: Any, *given: Values) -> Call:
    """Adds these rows, one of `given` after the other."""
    if len(given) == 1:
        only = given[0]
        return lambda: memory.add_samples(**only)
    turn = [0]

    def add() -> None:
        turn[0] += 1
        memory.add_samples(**given[turn[0] % len(given)])

    return add


def add(
    variant: str,
    n_envs: int,
    *given: Values,
    sizes: Sizes = BASE,
    dtypes: Dtypes = BOOL,
    group: str | None = None,
    before: Any = None,
    live: tuple[str, ...] = (),
    ours: Any = RandomMemory,
    rows: int = 0,
    **kwargs: Any,
) -> Row:
    """A row of `add_samples`; `before` does something to the memory first, `live` names exposed tensors."""
    given = given or (values(n_envs, sizes, dtypes),)

    def make(cls: Any) -> Call:
        memory = make_memory(cls, n_envs, sizes, dtypes, rows, **kwargs)
        if before is not None:
            before(memory)
        kept = [memory.get_tensor_by_name(name) for name in live]
        call = adds(memory, *given)
        return lambda kept=kept: call()

    n_bytes = sum(x.numel() for x in given[0].values() if x is not None)
    return Row("Memory.add_samples", variant, both(make, ours, SK, "skrl"), group and f"{group}, E={n_envs}", n_bytes)


def changed(n: int, **more: Any) -> Values:
    return values(n) | more


def sizes_of_writes() -> Iterator[Row]:
    for n_envs in (1, 8, 16, 64, 256, 1024, 4096, 8192):
        yield add(f"E={n_envs}", n_envs, group="add")
    for n_envs in (1, 16, 256, 4096):
        for share in (0.01, 1.0):
            yield add(f"E={n_envs}, {share:.0%} end", n_envs, values(n_envs, ends=share), group="add")
    for n in (1, 4, 8):
        yield add(f"{n} of 16 environments", 16, values(n), group="part")
    yield add("256 of 4096 environments", 4096, values(256))
    for n in (2, 16, 64, 256, 4096):
        yield add(f"{n} rows into 1 environment", 1, values(n), group="several rows")
    for n_envs in (1, 16):
        yield add(f"a row without axis, E={n_envs}", n_envs, {name: x[0] for name, x in values(1).items()})


def kinds_of_values() -> Iterator[Row]:
    """How 16 rows can be given; all move the same."""
    plain = values(16)
    for name, dtype in [
        ("rewards", torch.float64),
        ("observations", torch.float64),
        ("observations", torch.float16),
        ("rewards", torch.int64),
        ("actions", torch.int64),
        ("terminated", torch.float32),
        ("terminated", torch.uint8),
    ]:
        yield add(f"{name} given as {dtype}", 16, plain | {name: plain[name].to(dtype)}, group="add")
    yield add("float column, float given", 16, dtypes={}, group="add")
    yield add("float column, bool given", 16, values(16), dtypes={}, group="add")
    for dtype in (torch.float16, torch.bfloat16):
        yield add(f"{dtype} column and given", 16, dtypes=BOOL | {"observations": dtype}, group="add")
    whole = BASE | {"actions": 1}
    for given, dtype in ((torch.int64, torch.int64), (torch.int32, torch.int64), (torch.int32, torch.int32)):
        rows = values(16, whole, BOOL | {"actions": given})
        yield add(
            f"{dtype} column, {given} given", 16, rows, sizes=whole, dtypes=BOOL | {"actions": dtype}, group="add"
        )
    for name, tensor in {
        "transposed": torch.rand(17, 16).T,
        "every second row": torch.rand(32, 17)[::2],
        "a slice of columns": torch.rand(16, 34)[:, :17],
        "expanded": torch.rand(1, 17).expand(16, 17),
        "with a gradient": torch.rand(16, 17, requires_grad=True),
    }.items():
        yield add(f"observations {name}", 16, changed(16, observations=tensor), group="add")
    yield add(
        "every second call with float64 rewards", 16, plain, changed(16, rewards=plain["rewards"].double()), group="add"
    )
    for name, dtypes in {
        "as stored": {},
        "rewards float64": {"rewards": torch.float64},
        "ends float32": {"terminated": torch.float32},
        "all float64": dict.fromkeys(NAMES[:4], torch.float64),
    }.items():
        arrays = {key: x.to(dtypes.get(key, x.dtype)).numpy() for key, x in plain.items()}
        make = {"ours": lambda arrays=arrays: adds(make_memory(RandomMemory, 16), arrays)}
        yield Row("Memory.add_samples", f"numpy, {name}", make, "add, E=16")


def keys_of_writes() -> Iterator[Row]:
    yield add("an unknown key", 16, changed(16, extra=torch.rand(16, 3)), group="add")
    yield add("a key that is None", 16, changed(16, states=None), group="add")
    yield add(
        "no columns of ends", 16, sizes={name: size for name, size in BASE.items() if name != "terminated"}, group="add"
    )
    yield add("observations alone", 16, sizes={"observations": 17}, group="add")
    yield add("truncated too", 16, sizes=BASE | {"truncated": 1}, group="add")
    for missing in ("terminated", "rewards"):
        yield add(
            f"{missing} not given", 16, {name: x for name, x in values(16).items() if name != missing}, group="add"
        )
    many = {f"k{i}": 4 for i in range(32)} | {"observations": 4, "terminated": 1}
    yield add("34 tensors", 16, sizes=many)


def states_of_writes() -> Iterator[Row]:
    """What happened to the memory before."""
    yield add(
        "lanes out of step: 8 of 16 were added once", 16, before=lambda m: m.add_samples(**values(8)), group="add"
    )
    yield add("after a wrap", 16, before=lambda m: adds_many(m, values(16), 80), rows=64, group="add")
    yield add(
        "16 of 16 after share_memory", 16, before=lambda m: (m.add_samples(**values(16)), m.share_memory()), group="add"
    )
    with tempfile.TemporaryDirectory() as folder:
        yield add("export=True, far from full", 16, group="add", export=True, export_directory=folder)
    yield add("PrioritizedMemory (theirs: RandomMemory)", 16, ours=PrioritizedMemory, group="add")
    strict = {"ours": lambda: adds(make_memory(RandomMemory, 16, strict=True), values(16))}
    yield Row("Memory.add_samples", "strict=True", strict, "add, E=16")
    rest = {name: x for name, x in values(16).items() if name != "rewards"}
    yield add("an exposed tensor omitted", 16, rest, live=("rewards",), group="add")

    def ragged() -> Call:
        memory = make_memory(RandomMemory, 16)
        memory.add_trajectories(trajectories(16, 4, torch.tensor([4] * 15 + [2])), {name: name for name in NAMES})
        return adds(memory, values(16))

    contenders = {"ours": ragged, "skrl": lambda: adds(make_memory(SK, 16), values(16))}
    yield Row("Memory.add_samples", "after a ragged add_trajectories", contenders, "add, E=16")


def adds_many(memory: Any, given: Values, n: int) -> None:
    for _ in range(n):
        memory.add_samples(**given)


def steps_of_skrl() -> Iterator[Row]:
    """What skrl's agents write in a step."""
    live = ("values", "returns", "advantages", "rewards", "terminated", "truncated")
    for n_envs in (1, 16, 256, 4096):
        given = ppo_values(n_envs)
        yield add(f"PPO's step, E={n_envs}", n_envs, given, sizes=PPO, rows=64, group="PPO")
        yield add(f"PPO's step, E={n_envs}, tensors exposed", n_envs, given, sizes=PPO, rows=64, live=live, group="PPO")
    for name, more in {
        "rewards float64": {"rewards": torch.rand(16, 1).double()},
        "ends float32": {"terminated": torch.zeros(16, 1)},
        "observations strided": {"observations": torch.rand(16, 34)[:, ::2]},
    }.items():
        yield add(f"PPO's step, {name}", 16, ppo_values(16) | more, sizes=PPO, rows=64, group="PPO")

    def recurrent(cls: Any) -> Call:
        memory = make_memory(cls, 16, PPO, rows=64)
        memory.create_tensor("rnn_policy_0", size=(2, 128), dtype=torch.float32, keep_dimensions=True)
        return adds(memory, ppo_values(16) | {"rnn_policy_0": torch.rand(2, 16, 128).transpose(0, 1)})

    yield Row("Memory.add_samples", "PPO_RNN's step", both(recurrent, RandomMemory, SK, "skrl"))

    def frames(cls: Any, n_envs: int, dtype: Any) -> Call:
        sizes = {
            "observations": 84 * 84 * 4,
            "next_observations": 84 * 84 * 4,
            "actions": 1,
            "rewards": 1,
            "terminated": 1,
        }
        memory = make_memory(cls, n_envs, sizes, BOOL | {"observations": dtype, "next_observations": dtype}, 200)
        frame = torch.randint(0, 255, (n_envs, 84 * 84 * 4), dtype=torch.uint8).to(dtype)
        more = {
            "actions": torch.rand(n_envs, 1),
            "rewards": torch.rand(n_envs, 1),
            "terminated": torch.zeros(n_envs, 1, dtype=torch.bool),
        }
        return adds(memory, {"observations": frame, "next_observations": frame.clone()} | more)

    for n_envs, dtype in ((1, torch.uint8), (8, torch.uint8), (16, torch.uint8), (8, torch.float32)):
        make = both(lambda cls, n=n_envs, d=dtype: frames(cls, n, d), RandomMemory, SK, "skrl")
        yield Row("Memory.add_samples", f"frames 84x84x4 {dtype}, E={n_envs}", make)


def full(cls: Any, rows: int, n_envs: int, sizes: Sizes = BASE, **kwargs: Any) -> Any:
    """A full memory whose episodes have 100 steps."""
    memory = make_memory(cls, n_envs, sizes, rows=rows, **kwargs)
    steps, ends = values(n_envs, sizes), values(n_envs, sizes, ends=1.0)
    with torch.no_grad():
        for t in range(rows):
            memory.add_samples(**(ends if t % 100 == 99 else steps))
    return memory


def sample(
    pair: Any, variant: str, group: str | None = None, n_bytes: float = 1.0, names: Any = NAMES, **kwargs: Any
) -> Row:
    contenders = on(pair, lambda m: m.sample(names, **kwargs), "skrl")
    return Row("Memory.sample", variant, contenders, group, n_bytes)


def draws() -> Iterator[Row]:
    pair = cache(lambda: (full(RandomMemory, 6250, 16), full(SK, 6250, 16, replacement=True)))
    for n in (1, 32, 256, 4096, 65536):
        yield sample(pair, f"{n} of 100k", batch_size=n)
    for parts in (4, 32):
        yield sample(pair, f"4096 in {parts} parts", batch_size=4096, mini_batches=parts)
    for length in (8, 32):
        for n in (1, 32, 256):
            yield sample(pair, f"{n} sequences of {length}", batch_size=n, sequence_length=length)
    yield sample(pair, "256, names as a tuple", "draw 256", names=tuple(NAMES), batch_size=256)
    yield sample(pair, "256, one name", names=["rewards"], batch_size=256)
    yield sample(pair, "256, names that there are not", names=[*NAMES, "states", "next_states"], batch_size=256)
    plain = lambda m: m.sample(NAMES, batch_size=256)
    for variant, kwargs in {
        "n_step=3": {"n_step": 3},
        "sequences of 8, masked": {"sequence_length": 8, "episode_ends": "mask"},
        "sequences of 8, never across": {"sequence_length": 8, "episode_ends": "never"},
    }.items():
        theirs = {} if "n_step" in kwargs else {"sequence_length": 8}
        makers: dict[str, Maker] = {
            "ours": lambda kw=kwargs: lambda: pair()[0].sample(NAMES, batch_size=256, **kw),
            "skrl": lambda kw=theirs: lambda: pair()[1].sample(NAMES, batch_size=256, **kw),
        }
        yield Row("Memory.sample", f"256, {variant} (theirs without)", makers)
    own = {"ours": lambda: lambda: plain(pair()[0])}
    yield Row("Memory.sample", "256, as the fastest of its group", own, "draw 256")
    for n in (1, 16, 256, 4096, 65536):
        indexes = torch.randint(0, MOST_ROWS, (n,))
        kinds = {"torch": indexes}
        if n in (256, 4096):
            kinds |= {"a list": indexes.tolist(), "numpy": indexes.numpy(), "int32": indexes.int()}
        for kind, given in kinds.items():
            contenders = on(pair, lambda m, given=given: m.sample_by_index(NAMES, indexes=given), "skrl")
            yield Row("Memory.sample_by_index", f"{n}, {kind}", contenders, f"by index {n}")
    no_twice = cache(lambda: (full(RandomMemory, 6250, 16, replacement=False), full(SK, 6250, 16)))
    yield sample(no_twice, "256, replacement=False", batch_size=256)
    single = cache(lambda: (full(RandomMemory, 10_000, 1), full(SK, 10_000, 1, replacement=True)))
    for n in (1, 64, 256):
        yield sample(single, f"{n} of 10k, E=1", batch_size=n)
    for n_envs in (1, 16, 256, 4096, 16384):
        rows = max(16, 65536 // n_envs)
        lanes = cache(lambda n=n_envs, r=rows: (full(RandomMemory, r, n), full(SK, r, n, replacement=True)))
        rows_in = values(n_envs)
        yield sample(lanes, f"256, E={n_envs}", batch_size=256)
        call = lambda m, v=rows_in: (m.add_samples(**v), plain(m))
        yield Row("Memory.add_samples + sample 256", f"E={n_envs}", on(lanes, call, "skrl"))


def whole_reads() -> Iterator[Row]:
    """What is read of an on-policy memory."""
    for n_envs, rows in ((1, 2048), (16, 32), (16, 128), (64, 128), (256, 64), (4096, 24)):
        pair = cache(lambda n=n_envs, r=rows: (full(RandomMemory, r, n, PPO), full(SK, r, n, PPO)))
        size = f"{n_envs} x {rows}"
        for parts in (1, 4, 32):
            call = lambda m, p=parts: m.sample_all(READ, mini_batches=p)
            yield Row("Memory.sample_all", f"{size} in {parts} parts", on(pair, call, "skrl"))
            read = lambda m, p=parts: [x.sum() for batch in m.sample_all(READ, mini_batches=p) for x in batch]
            yield Row("Memory.sample_all, summed", f"{size} in {parts} parts", on(pair, read, "skrl"))
        call = lambda m: m.sample_all(READ, mini_batches=4, sequence_length=8)
        yield Row("Memory.sample_all", f"{size}, sequences of 8", on(pair, call, "skrl"))
        call = lambda m, n=n_envs * rows: m.sample(READ, batch_size=n, mini_batches=4)
        yield Row("Memory.sample", f"{size}, all in 4 parts", on(pair, call, "skrl"))
        new = torch.rand(rows, n_envs, 1)
        call = lambda m, new=new: m.set_tensor_by_name("returns", new)
        yield Row("Memory.set_tensor_by_name", size, on(pair, call, "skrl"))
        yield Row("Memory.get_tensor_by_name", size, on(pair, lambda m: m.get_tensor_by_name("values"), "skrl"))
        call = lambda m: m.get_tensor_by_name("values") * 2 + m.get_tensor_by_name("rewards")
        yield Row("live tensors, values * 2 + rewards", size, on(pair, call, "skrl"))
        yield Row("GAE on live tensors", size, on(pair, lambda m, r=rows: advantages(m, r), "skrl"))


def advantages(memory: Any, n_rows: int) -> None:
    """The part of skrl's PPO update that works on its memory."""
    rewards, values_ = memory.get_tensor_by_name("rewards"), memory.get_tensor_by_name("values")
    done = memory.get_tensor_by_name("terminated") | memory.get_tensor_by_name("truncated")
    going_on, found, last = done.logical_not(), torch.zeros_like(rewards), values_[-1]
    advantage: Any = 0
    for t in reversed(range(n_rows)):
        following = values_[t + 1] if t < n_rows - 1 else last
        advantage = rewards[t] - values_[t] + 0.99 * going_on[t] * (following + 0.95 * advantage)
        found[t] = advantage
    memory.set_tensor_by_name("values", values_)
    memory.set_tensor_by_name("returns", found + values_)
    memory.set_tensor_by_name("advantages", (found - found.mean()) / (found.std() + 1e-8))


def trajectories(n_envs: int, n_timesteps: int, lengths: Any) -> Any:
    steps = {
        name: torch.zeros(n_envs, n_timesteps, 1, dtype=torch.bool)
        if name in ENDS
        else torch.rand(n_envs, n_timesteps, size)
        for name, size in BASE.items()
    }
    return Trajectories(DictTensor({"env_index": torch.arange(n_envs)}), TemporalDictTensor(steps, lengths))


def small_things() -> Iterator[Row]:
    pair = cache(lambda: (full(RandomMemory, 640, 16), full(SK, 640, 16)))
    calls = {
        "len(memory)": len,
        "memory.filled, memory_index": lambda m: (m.filled, m.memory_index),
        "memory.tensors['rewards']": lambda m: m.tensors["rewards"],
        "memory.get_tensor_names": lambda m: m.get_tensor_names(),
        "memory.reset": lambda m: m.reset(),
    }
    for name, call in calls.items():
        yield Row(name, "640 x 16", on(pair, call, "skrl"))
    for n_timesteps, n_envs in ((1, 16), (5, 16), (32, 16), (128, 16), (32, 1), (1, 4096), (24, 4096)):
        batch = trajectories(n_envs, n_timesteps, torch.full((n_envs,), n_timesteps))
        steps = [{name: x[:, t].clone() for name, x in batch.trajectories.items()} for t in range(n_timesteps)]

        def ours(batch: Any = batch, n: int = n_envs) -> Call:
            memory = make_memory(RandomMemory, n, rows=max(300, MOST_ROWS // n))
            return lambda: memory.add_trajectories(batch, {name: name for name in NAMES})

        def theirs(steps: Any = steps, n: int = n_envs) -> Call:
            memory = make_memory(SK, n, rows=max(300, MOST_ROWS // n))
            return lambda: [memory.add_samples(**step) for step in steps]

        contenders = {"ours": ours, "skrl": theirs}
        yield Row("Memory.add_trajectories", f"{n_envs} x {n_timesteps}, theirs step by step", contenders)


def rows() -> Iterator[Row]:
    for part in (
        sizes_of_writes,
        kinds_of_values,
        keys_of_writes,
        states_of_writes,
        steps_of_skrl,
        draws,
        whole_reads,
        small_things,
    ):
        yield from part()
