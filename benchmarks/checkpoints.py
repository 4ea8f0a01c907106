"""What a checkpoint costs: a training that saves every minute, and a large memory of which little is new.

    python benchmarks/checkpoints.py

The first line: examples/ppo.py's training of CartPole with its own sizes; how long a rollout with its updates takes,
and how long a save, each the median, in one run. A save a minute then takes this share of the time.

The others: a memory of 1M rows with the columns of HalfCheetah (17 + 6 + 1 + 17 + 1 numbers), full, with priorities and
without, on 4 lanes. It is saved whole; then 5% of the rows are new, or all, and it is saved again into the same folder.
Every save is on the disk when it ends. `bytes` are those of the files that the second save wrote.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from rlstructs import Checkpoint, DictTensor, RL_Batcher
from rlstructs.memories.torch import PrioritizedMemory, RandomMemory

COLUMNS = {"observations": 17, "actions": 6, "rewards": 1, "next_observations": 17, "terminated": 1}
N_ENVS = 4


def measure_training(n_saves: int) -> None:
    """Prints the times of rollouts and saves of examples/ppo.py."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    import ppo

    args = ppo.Args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    network = ppo.create_network(args.env_id, "")
    optimizer = torch.optim.Adam(network.parameters(), lr=args.learning_rate)
    arguments = {"env_id": args.env_id, "n_envs": args.n_envs, "gamma": args.gamma}
    with RL_Batcher(
        args.n_timesteps, ppo.Policy, {"network": network}, ppo.create_env, arguments, args.n_processes, 0,
        agent_info=DictTensor({"greedy": torch.tensor([False])}), run_ahead=args.run_ahead,
    ) as batcher, tempfile.TemporaryDirectory() as folder:  # fmt: skip
        checkpoint = Checkpoint(folder, batcher=batcher, model=network, optimizer=optimizer)
        batcher.reset(agent_info=DictTensor({"greedy": torch.zeros(batcher.n_elems(), dtype=torch.bool)}))
        rollouts, saves = [], []
        for number in range(n_saves):
            for _ in range(5):
                start = time.perf_counter()
                batcher.execute()
                batch, _ = batcher.get()
                ppo.learn(network, optimizer, batch, args)
                batcher.update(network.state_dict())
                rollouts.append(time.perf_counter() - start)
            start = time.perf_counter()
            checkpoint.save(number)
            saves.append(time.perf_counter() - start)
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        n_bytes = sum(path.stat().st_size for path in files) // len(checkpoint.steps)
    save = statistics.median(saves)
    print(f"PPO CartPole: a rollout and its updates {1e3 * statistics.median(rollouts):.0f} ms, a save "
          f"{1e3 * save:.0f} ms (the first {1e3 * saves[0]:.0f}), {n_bytes / 1e3:.0f} kB; one a minute takes "
          f"{save / 60:.2%} of the time")  # fmt: skip


def fill(memory: RandomMemory, n: int, rng: np.random.Generator) -> None:
    """Adds n rows to each environment."""
    for start in range(0, n, 1000):
        length = min(1000, n - start)
        block = {name: rng.random((N_ENVS, length, size), np.float32) for name, size in COLUMNS.items()}
        block["terminated"] = block["terminated"] < 0.001
        memory._write(block, slice(None), done=block["terminated"][..., 0])


def measure_memory(kind: type[RandomMemory], n_rows: int, repeats: int) -> None:
    """Prints the times of whole and incremental saves of a memory."""
    rng = np.random.default_rng(0)
    memory = kind(memory_size=n_rows // N_ENVS, num_envs=N_ENVS, device="cpu", seed=0)
    for name, size in COLUMNS.items():
        memory.create_tensor(name, size, torch.bool if name == "terminated" else torch.float32)
    memory._tensors.allocate()
    fill(memory, n_rows // N_ENVS, rng)
    wholes, parts, shares = [], [], []
    for _ in range(repeats):  # in turns
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
            checkpoint = Checkpoint(folder, memory=memory)
            wholes.append(timed(checkpoint, 0))
            fill(memory, n_rows // N_ENVS // 20, rng)
            if isinstance(memory, PrioritizedMemory):
                memory.sample(["rewards"], batch_size=256)
                memory.update_priorities(memory.get_sampling_indexes(), rng.random(256))
            parts.append(timed(checkpoint, 1))
            files = [path.stat() for path in Path(folder, "step_000000000001").rglob("*") if path.is_file()]
            shares.append(sum(each.st_size for each in files if each.st_nlink == 1) / sum(f.st_size for f in files))
    whole, part = statistics.median(wholes), statistics.median(parts)
    print(f"{kind.__name__}, {n_rows:,} rows, {memory.nbytes / 1e6:.0f} MB: whole {whole:.2f} s "
          f"({min(wholes):.2f} to {max(wholes):.2f}), with 5% new {part:.3f} s ({min(parts):.3f} to {max(parts):.3f}), "
          f"{part / whole:.1%} of the time, {statistics.median(shares):.1%} of the bytes")  # fmt: skip


def timed(checkpoint: Checkpoint, step: int) -> float:
    start = time.perf_counter()
    checkpoint.save(step)
    return time.perf_counter() - start


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n-saves", type=int, default=20, help="of the training; default: 20")
    parser.add_argument("--n-rows", type=int, default=1_000_000, help="of the memory; default: 1,000,000")
    parser.add_argument("--repeats", type=int, default=5, help="default: 5")
    options = parser.parse_args()
    measure_training(options.n_saves)
    for kind in (RandomMemory, PrioritizedMemory):
        measure_memory(kind, options.n_rows, options.repeats)
