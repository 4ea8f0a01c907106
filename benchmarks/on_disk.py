"""Draws of stacked frames from a folder, beside a bare loop of `pread` over the same files in the same order.

    python benchmarks/on_disk.py
    python benchmarks/on_disk.py --rows 1135000     # 8 GB

Both are timed in turns, by the CPU time of the process, and medians are compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from rlstructs.replay import ReplayBuffer

FRAME, STACK, BATCH = (84, 84), 4, 32


def resident() -> float:
    """Megabytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def fill(path: str, n_rows: int) -> ReplayBuffer:
    """Fills a folder with frames of noise, in episodes of 1,000 steps."""
    buffer = ReplayBuffer(n_rows, stack_num=STACK, ignore_obs_next=True, random_seed=0, path=path)
    frames = np.random.default_rng(0).integers(0, 256, (1000, *FRAME), np.uint8)
    for t in range(n_rows):
        ends = {"terminated": t % 1000 == 999, "truncated": False}
        buffer.add({"obs": frames[t % 1000], "act": 0, "rew": 0.0, **ends})
    return buffer


def read_bare(descriptor: int, rows: np.ndarray, n_bytes: int) -> np.ndarray:
    """Reads one row after another into an array."""
    found = np.empty((rows.size, n_bytes), np.uint8)
    data = memoryview(found).cast("B")
    for at, row in enumerate(rows.tolist()):
        os.preadv(descriptor, [data[at * n_bytes : (at + 1) * n_bytes]], row * n_bytes)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--batches", type=int, default=200)
    args = parser.parse_args()
    n_bytes = int(np.prod(FRAME))
    with tempfile.TemporaryDirectory() as path:
        before = resident()
        buffer = fill(path, args.rows)
        grown = resident() - before
        block = buffer._storage.columns._blocks["obs"]
        descriptor, times = os.open(Path(path) / block.file, os.O_RDONLY), ([], [])
        for _ in range(args.batches):
            start = time.process_time()
            batch, rows = buffer.sample(BATCH)
            times[0].append(time.process_time() - start)
            view = buffer._table.rows()
            order = np.concatenate([view.frames(at, STACK).ravel() for at in (rows, view.next(rows))])
            start = time.process_time()
            bare = read_bare(descriptor, order, n_bytes)
            times[1].append(time.process_time() - start)
            assert (np.concatenate([batch.obs, batch.obs_next]).ravel() == bare.ravel()).all()
        os.close(descriptor)
        ours, theirs = (statistics.median(each) for each in times)
        print(f"{args.rows * n_bytes / 1e9:.1f} GB on the disk: memory grew by {grown:.0f} MB as they were written")
        print(f"a draw of {BATCH} stacks and their next: {ours * 1e6:.0f} us, bare {theirs * 1e6:.0f} us")
        print(f"{theirs / ours:.2f} of a bare loop of pread")


if __name__ == "__main__":
    main()
