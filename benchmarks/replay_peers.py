"""What `replay.py` compares with: the same transitions in every peer that is installed.

Each function fills its peer with `capacity` transitions and gives a call for each row of the table that it can do.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import logging
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

SIZES = {"observations": 17, "actions": 6, "rewards": 1, "next_observations": 17, "terminated": 1}
NAMES = list(SIZES)
# Rows of a draw, lanes, chunks of so many steps, slices of so many, stacks of so many frames of so many pixels.
BATCH, LANES = 256, 16
CHUNKS, SLICES = (32, 64), (64, 32)
STACKS, FRAMES, FRAME = (32, 4), 20_000, (84, 84)
EPISODE = 100

Call = Callable[[], Any]
Calls = dict[str, Call]


def content(n: int) -> dict[str, np.ndarray]:
    """n transitions, as they come from an environment; an episode ends every `EPISODE` steps."""
    rng = np.random.default_rng(0)
    steps: dict[str, np.ndarray] = {name: rng.random((n, size), np.float32) for name, size in SIZES.items()}
    steps["terminated"] = (np.arange(n) % EPISODE == EPISODE - 1)[:, None]
    return steps


def priorities() -> np.ndarray:
    """New priorities of a batch."""
    return np.random.default_rng(2).random(BATCH) + 0.01


def sb3(capacity: int) -> Calls:
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer

    def made(n_envs: int, size: int) -> tuple[Any, Call]:
        box = spaces.Box(-1, 1, (17,), np.float32)
        buffer = ReplayBuffer(size, box, spaces.Box(-1, 1, (6,), np.float32), device="cpu", n_envs=n_envs)
        rows = content(n_envs)
        arguments = (rows["observations"], rows["next_observations"], rows["actions"], rows["rewards"][:, 0])
        done, infos = rows["terminated"][:, 0], [{} for _ in range(n_envs)]
        return buffer, lambda: buffer.add(*arguments, done, infos)

    buffer, write = made(LANES, capacity)
    for _ in range(capacity // LANES):
        write()
    return {"uniform": lambda: buffer.sample(BATCH), "write 16": write, "write 1": made(1, capacity // LANES)[1]}


def skrl(capacity: int) -> Calls:
    from skrl.memories.torch import RandomMemory

    made = RandomMemory(memory_size=capacity // LANES, num_envs=LANES, device="cpu", replacement=True)
    for name, size in SIZES.items():
        made.create_tensor(name, size=size, dtype=torch.bool if name == "terminated" else torch.float32)
    rows = {name: torch.from_numpy(array) for name, array in content(LANES).items()}
    with torch.no_grad():
        for _ in range(capacity // LANES):
            made.add_samples(**rows)
    return {"uniform": lambda: made.sample(NAMES, batch_size=BATCH), "write 16": lambda: made.add_samples(**rows)}


def cpprb(capacity: int) -> Calls:
    from cpprb import PrioritizedReplayBuffer, ReplayBuffer

    shapes = {name: {"shape": size} if size > 1 else {} for name, size in SIZES.items()}
    rows, row = content(LANES), content(1)
    made, one = ReplayBuffer(capacity, shapes), ReplayBuffer(capacity, shapes)
    prioritised = PrioritizedReplayBuffer(capacity, shapes)
    for buffer in (made, prioritised):
        chunk = content(10_000)
        for _ in range(capacity // 10_000):
            buffer.add(**chunk)
    new = priorities()

    def step() -> None:
        batch = prioritised.sample(BATCH)
        prioritised.update_priorities(batch["indexes"], new)

    return {
        "uniform": lambda: made.sample(BATCH), "prioritised": step,
        "write 16": lambda: made.add(**rows), "write 1": lambda: one.add(**row),
    }  # fmt: skip


def torchrl(capacity: int) -> Calls:
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer
    from torchrl.data.replay_buffers.samplers import SliceSampler

    chunk = TensorDict({name: torch.from_numpy(array) for name, array in content(10_000).items()}, [10_000])
    chunk["next", "done"] = chunk["terminated"]
    sliced = TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity), sampler=SliceSampler(slice_len=SLICES[1], cache_values=True),
        batch_size=SLICES[0] * SLICES[1],
    )  # fmt: skip
    made = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=BATCH)
    for buffer in (made, sliced):
        for _ in range(capacity // 10_000):
            buffer.extend(chunk.clone())
    rows = chunk[:LANES].clone()
    calls = {
        "uniform": lambda: made.sample(), "write 16": lambda: made.extend(rows),
        "write 1": lambda: made.add(rows[0]), "slices": lambda: sliced.sample(),
    }  # fmt: skip
    try:
        prioritised = TensorDictPrioritizedReplayBuffer(
            alpha=0.6, beta=0.4, storage=LazyTensorStorage(capacity), batch_size=BATCH
        )
        for _ in range(capacity // 10_000):
            prioritised.extend(chunk.clone())

        def step() -> None:
            batch = prioritised.sample()
            batch["td_error"] = batch["rewards"][:, 0]
            prioritised.update_tensordict_priority(batch)

        calls["prioritised"] = step
    except RuntimeError as error:  # without its compiled part
        print(f"torchrl prioritised: does not run here: {error}", file=sys.stderr)
    return calls


def tianshou(capacity: int) -> Calls:
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
    vector, one = VectorReplayBuffer(capacity, LANES), ReplayBuffer(capacity)
    rows = Batch(**{name: column[:LANES] for name, column in columns.items() if name != "done"})
    row = rows[0]
    stacked = ReplayBuffer(FRAMES, stack_num=STACKS[1], ignore_obs_next=True, save_only_last_obs=False)
    for t in range(FRAMES):
        stacked.add(Batch(obs=_frame(t), act=0, rew=0.0, terminated=t % EPISODE == EPISODE - 1, truncated=False))
    new = priorities()

    def step() -> None:
        _, at = prioritised.sample(BATCH)
        prioritised.update_weight(at, new)

    return {
        "uniform": lambda: made.sample(BATCH), "prioritised": step, "write 16": lambda: vector.add(rows),
        "write 1": lambda: one.add(row), "stacks": lambda: stacked.get(stacked.sample_indices(STACKS[0]), "obs"),
    }  # fmt: skip


def _frame(t: int) -> np.ndarray:
    return np.full(FRAME, t % 256, np.uint8)


def rlberry(capacity: int) -> Calls:
    # Its package wants gymnasium 0.29; its buffer wants nothing.
    found = importlib.util.find_spec("rlberry")
    assert found is not None and found.origin is not None
    root = os.path.dirname(found.origin)
    for name in ("rlberry", "rlberry.agents", "rlberry.agents.utils"):
        module = types.ModuleType(name)
        module.__path__ = [os.path.join(root, *name.split(".")[1:])]
        sys.modules[name] = module
    sys.modules["rlberry"].logger = logging.getLogger("rlberry")  # type: ignore[attr-defined]
    buffers = []
    capacity = min(capacity, 200_000)  # of its lists a million take minutes to fill
    steps = content(capacity)
    rows = [{name: steps[name][t] for name in NAMES} for t in range(capacity)]
    for enable_prioritized in (False, True):
        made = importlib.import_module("rlberry.agents.utils.replay").ReplayBuffer(
            capacity, np.random.default_rng(0), enable_prioritized=enable_prioritized
        )
        for name in NAMES:
            made.setup_entry(name, steps[name].dtype)
        for row in rows:
            made.append(row)
        buffers.append(made)
    uniform, prioritised = buffers
    return {
        "chunks": lambda: uniform.sample(*CHUNKS), "write 1": lambda: uniform.append(rows[0]),
        "chunks prioritised": lambda: prioritised.sample(*CHUNKS, sampling_mode="prioritized"),
    }  # fmt: skip


def flashbax(capacity: int) -> Calls:
    import flashbax as fbx
    import jax
    import jax.numpy as jnp

    def full(buffer: Any, chunk: Any) -> Any:
        add, state = jax.jit(buffer.add, donate_argnums=0), buffer.init(steps)
        for _ in range(capacity // 10_000):
            state = add(state, chunk)
        return state

    steps = {name: jnp.asarray(array[0]) for name, array in content(1).items()}
    chunk = {name: jnp.asarray(array) for name, array in content(10_000).items()}
    # The prioritised one for transitions would draw each row with the one behind it.
    prioritised = fbx.make_prioritised_trajectory_buffer(
        add_batch_size=1, sample_batch_size=BATCH, sample_sequence_length=1, period=1, min_length_time_axis=BATCH,
        max_length_time_axis=capacity, priority_exponent=0.6,
    )  # fmt: skip
    uniform = fbx.make_item_buffer(capacity, BATCH, BATCH, add_batches=True)
    state = full(uniform, chunk)
    held = [full(prioritised, {name: column[None] for name, column in chunk.items()})]
    sample, p_sample = jax.jit(uniform.sample), jax.jit(prioritised.sample)
    update = jax.jit(prioritised.set_priorities, donate_argnums=0)
    keys = itertools.cycle(jax.random.split(jax.random.key(0), 1000))

    def step() -> None:
        batch = p_sample(held[0], next(keys))
        held[0] = jax.block_until_ready(update(held[0], batch.indices, jnp.ones(BATCH)))

    return {"uniform": lambda: jax.block_until_ready(sample(state, next(keys))), "prioritised": step}


PEERS = {
    "SB3": ("stable_baselines3", sb3), "skrl": ("skrl", skrl), "cpprb": ("cpprb", cpprb),
    "rlberry": ("rlberry", rlberry), "torchrl": ("torchrl", torchrl), "tianshou": ("tianshou", tianshou),
    "flashbax": ("flashbax", flashbax),
}  # fmt: skip


def made_peers(capacity: int) -> dict[str, Calls]:
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
