"""How fast is replay? Microseconds of rlstructs as multiples of the limit, beside the peers that are installed.

    python benchmarks/replay.py [--rows uniform ...] [--capacity 1000000] [--repeats 9] [--no-peers]

Every store holds `--capacity` transitions (observation 17, action 6, reward, next observation 17, end), really
written. The limit is `numpy.take` of the same columns at indexes that were drawn before. The contenders of a row
take turns, `--repeats` times over; the table shows medians. Writing is compared with SB3 instead.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

SIZES = {"observations": 17, "actions": 6, "rewards": 1, "next_observations": 17, "terminated": 1}
NAMES = list(SIZES)
BATCH, LANES = 256, 16

Call = Callable[[], Any]

# Row: (of ours, at most so many times the limit, the aim); writing in times of SB3.
MUST = {
    "uniform": {"torch": (2.1, 1.3), "warp": (3.5, 2.5), "jax": (7.0, 4.0)},
    "prioritised": {"torch": (5.0, 3.0)},
    "write": {"": (1.0, 0.6)},
}


def content(n: int) -> dict[str, np.ndarray]:
    """n transitions, as they come from an environment."""
    rng = np.random.default_rng(0)
    steps: dict[str, np.ndarray] = {name: rng.random((n, size), np.float32) for name, size in SIZES.items()}
    steps["terminated"] = steps["terminated"] < 0.01
    return steps


def memory(kind: str, name: str, capacity: int) -> Any:
    """One of ours, full."""
    module = importlib.import_module(f"rlstructs.memories.{kind}")
    made = getattr(module, name)(memory_size=capacity // LANES, num_envs=LANES, seed=0)
    for tensor, size in SIZES.items():
        made.create_tensor(tensor, size=size, dtype=bool if tensor == "terminated" else None)
    fill(made, capacity)
    return made


def fill(made: Any, capacity: int) -> None:
    from rlstructs import DictTensor, TemporalDictTensor, Trajectories

    chunk = 1000
    steps = {name: torch.from_numpy(array) for name, array in content(LANES * chunk).items()}
    steps = {name: tensor.view(LANES, chunk, -1) for name, tensor in steps.items()}
    info = DictTensor({"env_index": torch.arange(LANES)})
    batch = Trajectories(info, TemporalDictTensor(steps, torch.full((LANES,), chunk)))
    while not made.filled:
        made.add_trajectories(batch, {name: name for name in NAMES})


def limit(capacity: int) -> Call:
    columns = [content(capacity)[name] for name in NAMES]
    rng = np.random.default_rng(1)
    rows = itertools.cycle([rng.integers(capacity, size=BATCH) for _ in range(1000)])

    def take() -> Any:
        at = next(rows)
        return [np.take(column, at, axis=0) for column in columns]

    return take


def ours(kind: str, capacity: int) -> Call:
    made = memory(kind, "RandomMemory", capacity)
    if kind == "jax":
        import jax

        return lambda: jax.block_until_ready(made.sample(NAMES, batch_size=BATCH))
    return lambda: made.sample(NAMES, batch_size=BATCH)


def ours_prioritised(kind: str, capacity: int) -> Call:
    made = memory(kind, "PrioritizedMemory", capacity)
    priorities = itertools.cycle(np.random.default_rng(2).random((1000, BATCH)) + 0.01)

    def step() -> None:
        made.sample(NAMES, batch_size=BATCH)
        made.get_sampling_weights()
        made.update_priorities(made.get_sampling_indexes(), next(priorities))

    return step


def ours_write(kind: str, capacity: int, given_as: str) -> Call:
    made = memory(kind, "RandomMemory", capacity)
    convert = {"numpy": _as_it_is, "torch": torch.from_numpy, "jax": _to_jax, "warp": _to_warp}[given_as]
    given = {name: convert(array) for name, array in content(LANES).items()}
    return lambda: made.add_samples(**given)


def _as_it_is(array: np.ndarray) -> np.ndarray:
    return array


def _to_jax(array: np.ndarray) -> Any:
    import jax

    return jax.device_put(array)


def _to_warp(array: np.ndarray) -> Any:
    import warp

    return warp.array(array, device="cpu")


def sb3(capacity: int) -> tuple[Any, Call, Call]:
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer

    box = spaces.Box(-1, 1, (17,), np.float32)
    buffer = ReplayBuffer(capacity, box, spaces.Box(-1, 1, (6,), np.float32), device="cpu", n_envs=LANES)
    rows = content(LANES)
    arguments = (rows["observations"], rows["next_observations"], rows["actions"], rows["rewards"][:, 0])
    done, infos = rows["terminated"][:, 0], [{} for _ in range(LANES)]

    def write() -> None:
        buffer.add(*arguments, done, infos)

    for _ in range(capacity // LANES):
        write()
    return buffer, lambda: buffer.sample(BATCH), write


def skrl(capacity: int) -> tuple[Any, Call, Call]:
    from skrl.memories.torch import RandomMemory

    made = RandomMemory(memory_size=capacity // LANES, num_envs=LANES, device="cpu")
    for name, size in SIZES.items():
        made.create_tensor(name, size=size, dtype=torch.bool if name == "terminated" else torch.float32)
    rows = {name: torch.from_numpy(array) for name, array in content(LANES).items()}
    with torch.no_grad():
        for _ in range(capacity // LANES):
            made.add_samples(**rows)
    return made, lambda: made.sample(NAMES, batch_size=BATCH), lambda: made.add_samples(**rows)


def cpprb(capacity: int) -> tuple[Any, Call, Call]:
    from cpprb import PrioritizedReplayBuffer, ReplayBuffer

    shapes = {name: {"shape": size} if size > 1 else {} for name, size in SIZES.items()}
    rows = content(LANES)
    made = ReplayBuffer(capacity, shapes)
    prioritised = PrioritizedReplayBuffer(capacity, shapes)
    for buffer in (made, prioritised):
        chunk = content(10_000)
        for _ in range(capacity // 10_000):
            buffer.add(**chunk)
    priorities = np.random.default_rng(2).random(BATCH) + 0.01

    def step() -> None:
        batch = prioritised.sample(BATCH)
        prioritised.update_priorities(batch["indexes"], priorities)

    return step, lambda: made.sample(BATCH), lambda: made.add(**rows)


def torchrl(capacity: int) -> tuple[Any, Call, Call]:
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer

    chunk = TensorDict({name: torch.from_numpy(array) for name, array in content(10_000).items()}, [10_000])
    made = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=BATCH)
    prioritised = TensorDictPrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=LazyTensorStorage(capacity), batch_size=BATCH
    )
    for buffer in (made, prioritised):
        for _ in range(capacity // 10_000):
            buffer.extend(chunk.clone())
    rows = chunk[:LANES].clone()

    def step() -> None:
        batch = prioritised.sample()
        batch["td_error"] = batch["rewards"][:, 0]
        prioritised.update_tensordict_priority(batch)

    return step, lambda: made.sample(), lambda: made.extend(rows)


def tianshou(capacity: int) -> tuple[Any, Call, Call]:
    from tianshou.data import Batch, PrioritizedReplayBuffer, ReplayBuffer, VectorReplayBuffer

    steps = content(capacity)
    columns = {
        "obs": steps["observations"], "act": steps["actions"], "rew": steps["rewards"][:, 0].astype(float),
        "terminated": steps["terminated"][:, 0], "truncated": np.zeros(capacity, bool),
        "done": steps["terminated"][:, 0], "obs_next": steps["next_observations"],
    }  # fmt: skip
    made, prioritised = ReplayBuffer(capacity), PrioritizedReplayBuffer(capacity, alpha=0.6, beta=0.4)
    for buffer in (made, prioritised):
        buffer.add(Batch(**{name: column[0] for name, column in columns.items()}))
        buffer.set_batch(Batch(**columns))
        buffer._size = capacity
    prioritised.init_weight(np.arange(capacity))
    vector = VectorReplayBuffer(capacity, LANES)
    rows = Batch(**{name: column[:LANES] for name, column in columns.items() if name != "done"})
    priorities = np.random.default_rng(2).random(BATCH) + 0.01

    def step() -> None:
        _, at = prioritised.sample(BATCH)
        prioritised.update_weight(at, priorities)

    return step, lambda: made.sample(BATCH), lambda: vector.add(rows)


def flashbax(capacity: int) -> tuple[Any, Call, Call | None]:
    import flashbax as fbx
    import jax
    import jax.numpy as jnp

    steps = {name: jnp.asarray(array[0]) for name, array in content(1).items()}
    chunk = {name: jnp.asarray(array) for name, array in content(10_000).items()}
    kinds = []
    for make, more in ((fbx.make_item_buffer, {}), (fbx.make_prioritised_flat_buffer, {"priority_exponent": 0.6})):
        buffer = make(capacity, BATCH, BATCH, add_batches=True) if not more else make(
            capacity, BATCH, BATCH, add_sequences=True, **more
        )  # fmt: skip
        add = jax.jit(buffer.add, donate_argnums=0)
        state = buffer.init(steps)
        for _ in range(capacity // 10_000):
            state = add(state, chunk)
        kinds.append((state, jax.jit(buffer.sample), buffer))
    keys = itertools.cycle(jax.random.split(jax.random.key(0), 1000))
    (state, sample, _), (p_state, p_sample, p_buffer) = kinds
    update = jax.jit(p_buffer.set_priorities, donate_argnums=0)
    held = [p_state]

    def step() -> None:
        batch = p_sample(held[0], next(keys))
        held[0] = jax.block_until_ready(update(held[0], batch.indices, jnp.ones(BATCH)))

    return step, lambda: jax.block_until_ready(sample(state, next(keys))), None


PEERS = {
    "SB3": ("stable_baselines3", sb3), "skrl": ("skrl", skrl), "cpprb": ("cpprb", cpprb),
    "torchrl": ("torchrl", torchrl), "tianshou": ("tianshou", tianshou), "flashbax": ("flashbax", flashbax),
}  # fmt: skip
WITHOUT_PRIORITIES = ("SB3", "skrl")


def measured(calls: dict[str, Call], repeats: int) -> dict[str, float]:
    """Microseconds of each call, the median of interleaved repetitions."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(20):
            call()
    for _ in range(repeats):
        for name, call in calls.items():
            found[name].append(timed(call))
    return {name: statistics.median(times) for name, times in found.items()}


def timed(call: Call, seconds: float = 0.1) -> float:
    n, started = 0, time.perf_counter()
    while (now := time.perf_counter()) < started + seconds:
        call()
        n += 1
    return (now - started) / n * 1e6


def show(row: str, times: dict[str, float], unit: str) -> None:
    cells = [f"{name} {micros:.0f} us ({micros / times[unit]:.2f})" for name, micros in times.items()]
    print(f"{row}: " + " | ".join(cells))
    for kind, (must, aim) in MUST[row].items():
        ratio = times[f"rlstructs {kind}".strip()] / times[unit]
        verdict = "ok" if ratio <= must else "TOO SLOW"
        print(f"    {kind or 'numpy'}: {ratio:.2f} x {unit}, must {must}, aim {aim}: {verdict}", flush=True)


def jax_writes(repeats: int) -> None:
    times = measured({f"{n:,} rows": ours_write("jax", n, "jax") for n in (1_008, 1_000_000 // LANES * LANES)}, repeats)
    print("jax write: " + " | ".join(f"{name} {micros:.0f} us" for name, micros in times.items()), flush=True)


def file_speeds(capacity: int) -> None:
    """Saving and loading beside numpy's own of the same arrays, and the most memory that it takes."""
    import psutil

    made = memory("torch", "RandomMemory", capacity)
    columns = {name: tensor.numpy() for name, tensor in made.tensors.items()}
    size = sum(column.nbytes for column in columns.values())
    before = psutil.Process().memory_info().rss
    with tempfile.TemporaryDirectory() as folder:
        numpy_file = os.path.join(folder, "numpy.npz")
        numpy_save, _ = _watched(lambda: np.savez(numpy_file, **columns))
        numpy_load, _ = _watched(lambda: [np.load(numpy_file)[name] for name in columns])
        for kind in ("npz", "pt"):
            save, peak_save = _watched(lambda kind=kind: made.save(folder, format=kind))
            [path] = [entry.path for entry in os.scandir(os.path.join(folder, "memories")) if entry.name.endswith(kind)]
            load, peak_load = _watched(lambda path=path: made.load(path))
            peak = 1 + (max(peak_save, peak_load) - before) / size
            fast = save <= 2 * numpy_save and load <= 2 * numpy_load
            print(
                f"files {kind}: {size / 1e6:.0f} MB, save {save:.2f} s (numpy {numpy_save:.2f}), load {load:.2f} s "
                f"(numpy {numpy_load:.2f}), must 2 x numpy: {'ok' if fast else 'TOO SLOW'}; "
                f"peak {peak:.2f} x its size, must 1.2: {'ok' if peak <= 1.2 else 'TOO MUCH'}",
                flush=True,
            )


def _watched(call: Call) -> tuple[float, int]:
    """Seconds, and the most bytes of resident memory meanwhile."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak
    started = time.perf_counter()
    call()
    seconds = time.perf_counter() - started
    with open("/proc/self/status") as file:
        [line] = [line for line in file if line.startswith("VmHWM")]
    return seconds, int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=[*MUST, "jax-write", "files"])
    parser.add_argument("--capacity", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--no-peers", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    capacity = arguments.capacity // LANES * LANES
    peers = {} if arguments.no_peers else made_peers(capacity)
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, numpy {np.__version__}; microseconds (times the limit)")
    if "uniform" in arguments.rows:
        calls = {"limit": limit(capacity)} | {f"rlstructs {kind}": ours(kind, capacity) for kind in MUST["uniform"]}
        show("uniform", measured(calls | {name: peer[1] for name, peer in peers.items()}, arguments.repeats), "limit")
    if "prioritised" in arguments.rows:
        calls = {"limit": limit(capacity)}
        calls |= {f"rlstructs {kind}": ours_prioritised(kind, capacity) for kind in ("torch", "warp", "jax")}
        calls |= {name: peer[0] for name, peer in peers.items() if name not in WITHOUT_PRIORITIES}
        show("prioritised", measured(calls, arguments.repeats), "limit")
    if "write" in arguments.rows and "SB3" in peers:
        # SB3 and we are given numpy arrays, skrl torch tensors; so are we once more, and each library's own.
        calls = {"rlstructs": ours_write("torch", capacity, "numpy")}
        calls |= {f"rlstructs {kind}": ours_write(kind, capacity, kind) for kind in ("torch", "warp", "jax")}
        calls |= {name: peer[2] for name, peer in peers.items() if peer[2] is not None}
        show("write", measured(calls, arguments.repeats), "SB3")
    if "jax-write" in arguments.rows:
        jax_writes(arguments.repeats)
    if "files" in arguments.rows:
        file_speeds(capacity)


def made_peers(capacity: int) -> dict[str, tuple[Any, Call, Any]]:
    """The peers that are installed and work, full."""
    peers = {}
    for name, (module, make) in PEERS.items():
        if not importlib.util.find_spec(module):
            continue
        try:
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                peers[name] = make(capacity)
        except Exception as error:
            print(f"{name}: does not run here: {type(error).__name__}: {error}")
    return peers


if __name__ == "__main__":
    main()
