"""How fast is replay? Microseconds of rlstructs as multiples of the limit, beside the peers that are installed.

    python benchmarks/replay.py [--rows uniform ...] [--capacity 1000000] [--repeats 9] [--no-peers]
    python benchmarks/replay.py --growth growth.png

Every store holds `--capacity` transitions (observation 17, action 6, reward, next observation 17, end), really
written. The limit of a draw is numpy's `take` of the same columns at rows that were drawn before; writing is
compared with SB3 instead. The contenders of a row take turns, `--repeats` times over; the table shows medians.
`--growth` draws and updates in stores of 10 thousand to 10 million transitions.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import torch
from replay_peers import (
    BATCH,
    CHUNKS,
    EPISODE,
    FRAME,
    FRAMES,
    LANES,
    NAMES,
    SIZES,
    SLICES,
    STACKS,
    Call,
    Calls,
    content,
    made_peers,
    priorities,
)

# Row: what ours must reach and aim at, in multiples of its unit: the limit, or SB3.
MUST = {
    "uniform": {"torch": (2.1, 1.3), "warp": (3.5, 2.5), "jax": (7.0, 4.0)},
    "prioritised": {"torch": (5.0, 3.0)},
    "chunks": {"": (2.0, 1.3)},
    "slices": {},
    "stacks": {"": (2.0, 1.3)},
    "write 16": {"": (1.0, 0.6)},
    "write 1": {},
}
GROWTH = (10_000, 100_000, 1_000_000, 10_000_000)


# The limits


def limit(capacity: int, shape: tuple[int, ...] = (BATCH,), length: int = 1) -> Call:
    """`take` of every column at windows of `length` rows."""
    columns = [content(capacity)[name] for name in NAMES]
    rng = np.random.default_rng(1)
    windows = np.arange(length) if length > 1 else np.zeros((), int)
    drawn = [rng.integers(capacity - length, size=shape)[..., None] + windows for _ in range(300)]
    rows = itertools.cycle([each if length > 1 else each[..., 0] for each in drawn])

    def take() -> Any:
        at = next(rows)
        return [np.take(column, at, axis=0) for column in columns]

    return take


def stack_limit() -> Call:
    frames = np.zeros((FRAMES, *FRAME), np.uint8)
    frames += np.arange(FRAMES, dtype=np.uint8)[:, None, None]
    rng = np.random.default_rng(1)
    drawn = [rng.integers(FRAMES - STACKS[1], size=STACKS[0]) for _ in range(99)]
    rows = itertools.cycle([each[:, None] + np.arange(STACKS[1]) for each in drawn])
    return lambda: np.take(frames, next(rows), axis=0)


# Ours


def memory(kind: str, name: str, capacity: int) -> Any:
    """A memory of skrl's kind, full."""
    module = importlib.import_module(f"rlstructs.memories.{kind}")
    made = getattr(module, name)(memory_size=capacity // LANES, num_envs=LANES, seed=0)
    for tensor, size in SIZES.items():
        made.create_tensor(tensor, size=size, dtype=bool if tensor == "terminated" else None)
    for batch in batches():
        if made.filled:
            return made
        made.add_trajectories(batch, {name: name for name in NAMES})
    return made


def batches() -> Any:
    """Trajectories without end, an episode every `EPISODE` steps."""
    from rlstructs import DictTensor, TemporalDictTensor, Trajectories

    chunk = 10 * EPISODE
    steps = {name: torch.from_numpy(array) for name, array in content(LANES * chunk).items()}
    steps = {name: tensor.view(LANES, chunk, -1) for name, tensor in steps.items()}
    info = DictTensor({"env_index": torch.arange(LANES)})
    return itertools.repeat(Trajectories(info, TemporalDictTensor(steps, torch.full((LANES,), chunk))))


def draws(kind: str, capacity: int) -> Call:
    made = memory(kind, "RandomMemory", capacity)
    return _awaited(kind, lambda: made.sample(NAMES, batch_size=BATCH))


def prioritised_draws(kind: str, capacity: int) -> Call:
    made = memory(kind, "PrioritizedMemory", capacity)
    new = itertools.cycle(np.random.default_rng(2).random((1000, BATCH)) + 0.01)

    def step() -> Any:
        batch = made.sample(NAMES, batch_size=BATCH)
        weights = made.get_sampling_weights()
        made.update_priorities(made.get_sampling_indexes(), next(new))
        return batch, weights

    return _awaited(kind, step)


def memory_write(kind: str, capacity: int, given_as: str) -> Call:
    made = memory(kind, "RandomMemory", capacity)
    convert = {"numpy": _as_it_is, "torch": torch.from_numpy, "jax": _to_jax, "warp": _to_warp}[given_as]
    given = {name: convert(array) for name, array in content(LANES).items()}
    return lambda: made.add_samples(**given)


def _awaited(kind: str, call: Call) -> Call:
    if kind != "jax":
        return call
    import jax

    return lambda: jax.block_until_ready(call())


def _as_it_is(array: np.ndarray) -> np.ndarray:
    return array


def _to_jax(array: np.ndarray) -> Any:
    import jax

    return jax.device_put(array)


def _to_warp(array: np.ndarray) -> Any:
    import warp

    return warp.array(array, device="cpu")


def episodes(capacity: int) -> Calls:
    """tianshou's kind."""
    from rlstructs.replay import PrioritizedReplayBuffer, ReplayBuffer, VectorReplayBuffer

    steps = {name: array[:, 0] if array.shape[1] == 1 else array for name, array in content(capacity).items()}
    steps["truncated"] = np.zeros(capacity, bool)
    names = {"obs": "observations", "act": "actions", "rew": "rewards", "obs_next": "next_observations"}
    rows = {name: steps[names.get(name, name)] for name in (*names, "terminated", "truncated")}
    made = ReplayBuffer.from_data(**rows, done=rows["terminated"])
    vector, one = VectorReplayBuffer(capacity, LANES), ReplayBuffer(capacity)
    prioritised = PrioritizedReplayBuffer(capacity, alpha=0.6, beta=0.4)
    prioritised.update(made)
    first, some = ({name: array[at] for name, array in rows.items()} for at in (0, slice(0, LANES)))
    new = priorities()

    def step() -> None:
        _, at = prioritised.sample(BATCH)
        prioritised.update_weight(at, new)

    return {
        "uniform": lambda: made.sample(BATCH), "prioritised": step,
        "write 16": lambda: vector.add(some), "write 1": lambda: one.add(first),
    }  # fmt: skip


def stacks() -> Call:
    from rlstructs.replay import ReplayBuffer

    made = ReplayBuffer(FRAMES, stack_num=STACKS[1], ignore_obs_next=True)
    for t in range(FRAMES):
        ends = {"terminated": t % EPISODE == EPISODE - 1, "truncated": False}
        made.add({"obs": np.full(FRAME, t % 256, np.uint8), "act": 0, "rew": 0.0, **ends})
    return lambda: made.get(made.sample_indices(STACKS[0]), "obs")


def dict_tensors(capacity: int) -> Calls:
    """torchrl's kind."""
    from rlstructs import DictTensor
    from rlstructs.replay import (
        DictTensorPrioritizedReplayBuffer,
        DictTensorReplayBuffer,
        SliceSampler,
        TensorStorage,
    )

    rows = DictTensor({name: torch.from_numpy(array) for name, array in content(capacity).items()})
    n, length = SLICES
    made = DictTensorReplayBuffer(storage=TensorStorage(capacity), batch_size=BATCH, generator=0)
    sliced = DictTensorReplayBuffer(
        storage=TensorStorage(capacity), sampler=SliceSampler(slice_len=length), batch_size=n * length, generator=0
    )
    prioritised = DictTensorPrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=TensorStorage(capacity), batch_size=BATCH, generator=0
    )
    for buffer in (made, sliced, prioritised):
        buffer.extend(rows)
    some, one = rows.slice(0, LANES), rows.slice(0)
    new = torch.from_numpy(priorities())

    def step() -> None:
        prioritised.update_priority(prioritised.sample()["index"], new)

    return {
        "uniform": made.sample, "prioritised": step, "slices": sliced.sample,
        "write 16": lambda: made.extend(some), "write 1": lambda: made.add(one),
    }  # fmt: skip


def chunks(capacity: int) -> Calls:
    """rlberry's kind."""
    from rlstructs.replay import ChunkReplayBuffer

    steps = content(1)
    row = {name: array[0] for name, array in steps.items()}
    buffers = []
    for enable_prioritized in (False, True):
        made = ChunkReplayBuffer(capacity, 0, enable_prioritized=enable_prioritized, n_lanes=LANES)
        for name in NAMES:
            made.setup_entry(name, steps[name].dtype)
        for batch in itertools.islice(batches(), -(-capacity // (10 * EPISODE * LANES))):
            made.add_trajectories(batch, {name: name for name in NAMES})
        buffers.append(made)
    uniform, prioritised = buffers
    one = ChunkReplayBuffer(capacity, 0)
    for name in NAMES:
        one.setup_entry(name, steps[name].dtype)
    return {
        "chunks": lambda: uniform.sample(*CHUNKS), "write 1": lambda: one.append(row),
        "chunks prioritised": lambda: prioritised.sample(*CHUNKS, sampling_mode="prioritized"),
    }  # fmt: skip


def contenders(row: str, capacity: int, made: dict[str, Calls]) -> Calls:
    """The limit and those of ours that a row measures."""
    if row == "uniform":
        calls = {"limit": limit(capacity)} | {f"rlstructs {kind}": draws(kind, capacity) for kind in MUST[row]}
    elif row == "prioritised":
        kinds = ("torch", "warp", "jax")
        calls = {"limit": limit(capacity)} | {f"rlstructs {kind}": prioritised_draws(kind, capacity) for kind in kinds}
    elif row == "chunks":
        calls = {"limit": limit(capacity, (CHUNKS[0],), CHUNKS[1]), "rlstructs": made["chunks"]["chunks"]}
        calls["rlstructs prioritised"] = made["chunks"]["chunks prioritised"]
    elif row == "slices":
        calls = {"limit": limit(capacity, (SLICES[0],), SLICES[1])}
    elif row == "stacks":
        calls = {"limit": stack_limit(), "rlstructs": stacks()}
    elif row == "write 16":
        # SB3 and we are given numpy arrays, skrl torch tensors; so are we once more, and each library's own.
        calls = {"rlstructs": memory_write("torch", capacity, "numpy")}
        calls |= {f"rlstructs {kind}": memory_write(kind, capacity, kind) for kind in ("torch", "warp", "jax")}
    else:
        calls = {}
    kinds_of = {"episodes": "ReplayBuffer", "tensors": "DictTensorReplayBuffer", "chunks": "ChunkReplayBuffer"}
    return calls | {name: made[kind][row] for kind, name in kinds_of.items() if row in made[kind] and kind != row}


# Measuring


def measured(calls: Calls, repeats: int) -> dict[str, float]:
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


def show(row: str, times: dict[str, float]) -> None:
    unit = "SB3" if row.startswith("write") else "limit"
    if unit not in times:
        print(f"{row}: " + " | ".join(f"{name} {micros:.0f} us" for name, micros in times.items()), flush=True)
        return
    cells = [f"{name} {micros:.0f} us ({micros / times[unit]:.2f})" for name, micros in times.items()]
    print(f"{row}: " + " | ".join(cells), flush=True)
    for kind, (must, aim) in MUST[row].items():
        ratio = times[f"rlstructs {kind}".strip()] / times[unit]
        verdict = "ok" if ratio <= must else "TOO SLOW"
        print(f"    {kind or 'numpy'}: {ratio:.2f} x {unit}, must {must}, aim {aim}: {verdict}", flush=True)


def growth(path: str, repeats: int) -> None:
    """Draws and updates in stores of every size, and a plot of them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found: dict[str, list[float]] = {}
    for capacity in GROWTH:
        rounded = capacity // LANES * LANES
        calls = {
            "numpy take": limit(rounded), "uniform": draws("torch", rounded),
            "prioritised, with update": prioritised_draws("torch", rounded),
        }  # fmt: skip
        times = measured(calls, repeats)
        shown = " | ".join(f"{name} {micros:.0f} us" for name, micros in times.items())
        print(f"{capacity:>10,}: {shown}", flush=True)
        for name, micros in times.items():
            found.setdefault(name, []).append(micros)
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name, micros in found.items():
        axes.plot(GROWTH, micros, marker="o", label=name)
    axes.set(xscale="log", xlabel="stored transitions", ylabel=f"microseconds for {BATCH}", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    print(f"wrote {path}")


def jax_writes(repeats: int) -> None:
    sizes = (1_008, 1_000_000 // LANES * LANES)
    times = measured({f"{n:,} rows": memory_write("jax", n, "jax") for n in sizes}, repeats)
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
    parser.add_argument("--growth", metavar="FILE.png")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, numpy {np.__version__}; microseconds (times the limit)")
    if arguments.growth:
        growth(arguments.growth, arguments.repeats)
        return
    capacity = arguments.capacity // LANES * LANES
    peers = {} if arguments.no_peers else made_peers(capacity)
    made = {"episodes": episodes(capacity), "tensors": dict_tensors(capacity), "chunks": chunks(capacity)}
    for row in MUST:
        if row in arguments.rows:
            calls = contenders(row, capacity, made)
            for name, peer in peers.items():
                same = {key: call for key, call in peer.items() if f"{key} ".startswith(f"{row} ")}
                calls |= {f"{name}{key.removeprefix(row)}": call for key, call in same.items()}
            show(row, measured(calls, arguments.repeats))
    if "jax-write" in arguments.rows:
        jax_writes(arguments.repeats)
    if "files" in arguments.rows:
        file_speeds(capacity)


if __name__ == "__main__":
    main()
