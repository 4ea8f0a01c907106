"""What does it cost that workers write to a replay memory, beside rollouts that the trainer adds to it?

    python benchmarks/feeding.py [--rows cartpole-64 halfcheetah-8 pong-4] [--repeats 9] [--rollouts 8]

A table in Markdown. Every row of it has the same environments and random actions, in two workers:

- alone: `execute` and `wait`, and no memory;
- fed: `execute` and `wait`, workers write to the memory;
- fed, drawn: the trainer meanwhile draws 256 rows for each 64 that are collected;
- lease, drawn: the same draws, then `lease` and `add_trajectories`;
- get, drawn: the same draws, then `get` and `add_trajectories`.

Numbers are rows per second, medians of `--repeats` turns that all contenders take one after another, and their share of
"alone". The last column is the CPU time of the trainer over that of the workers while it only waits for a fed memory.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator

import psutil
from rollouts import TASKS, Task, create_agent, create_env, is_playable

from rlstructs import RL_Batcher
from rlstructs.memories.torch import RandomMemory

NAMES = ["observations", "actions", "rewards", "next_observations", "terminated"]
BATCH_SIZE, ROWS_PER_BATCH = 256, 64
# As many rows as take so many bytes in a rollout, about half of those that they take in a memory.
MEMORY_BYTES = 1 << 27


class Contender:
    """A batcher, its memory, and one of the ways to bring rows to it."""

    def __init__(self, task: Task, how: str) -> None:
        self.batcher = RL_Batcher(
            task.n_timesteps, create_agent, {"env_id": task.env_id, "policy": False}, create_env,
            {"env_id": task.env_id, "n_envs": task.n_envs, "native": False}, task.n_workers, 0,
        )  # fmt: skip
        bytes_per_step = self.batcher.nbytes // (task.n_all * task.n_timesteps)
        size = min(1_000_000, MEMORY_BYTES // bytes_per_step) // task.n_all
        self.memory = RandomMemory(memory_size=size, num_envs=task.n_all, device="cpu", seed=0)
        self.n_draws = task.n_all * task.n_timesteps // ROWS_PER_BATCH
        if how.startswith("fed"):
            self.batcher.feed(self.memory)
        self.batcher.reset()
        self.bring: Callable[[], int] = {
            "alone": self.wait, "fed": self.wait, "fed, drawn": self.wait, "lease, drawn": self.lease,
            "get, drawn": self.get,
        }[how]  # fmt: skip
        self.draws = how.endswith("drawn")

    def run_rollout(self) -> int:
        self.batcher.execute()
        if self.draws and len(self.memory):
            for _ in range(self.n_draws):
                self.memory.sample(NAMES, BATCH_SIZE)
        return self.bring()

    def wait(self) -> int:
        n_rows, _ = self.batcher.wait()
        return n_rows

    def lease(self) -> int:
        with self.batcher.lease() as (trajectories, _):
            self.memory.add_trajectories(trajectories)
            return int(trajectories.lengths.sum())

    def get(self) -> int:
        trajectories, _ = self.batcher.get()
        self.memory.add_trajectories(trajectories)
        return int(trajectories.lengths.sum())

    def run(self, n_rollouts: int) -> tuple[float, float]:
        """Rows/s of so many rollouts, and the CPU time of the trainer over that of the workers."""
        before, start = self.cpu_seconds(), time.perf_counter()
        n_rows = sum(self.run_rollout() for _ in range(n_rollouts))
        seconds = time.perf_counter() - start
        trainer, workers = (now - then for now, then in zip(self.cpu_seconds(), before, strict=True))
        return n_rows / seconds, trainer / workers

    def cpu_seconds(self) -> tuple[float, float]:
        """Of the trainer, and of all workers."""
        times = [psutil.Process(worker["pid"]).cpu_times() for worker in self.batcher.stats()["workers"]]
        return time.process_time(), sum(each.user + each.system for each in times)


HOW = ["alone", "fed", "fed, drawn", "lease, drawn", "get, drawn"]


@contextlib.contextmanager
def contenders(task: Task) -> Iterator[dict[str, Contender]]:
    with contextlib.ExitStack() as opened:
        made = {how: Contender(task, how) for how in HOW}
        for each in made.values():
            opened.enter_context(each.batcher)
        yield made


def measure(task: Task, n_repeats: int, n_rollouts: int) -> str:
    with contenders(task) as made:
        for each in made.values():
            each.run(2)
        speeds: dict[str, list[float]] = {how: [] for how in HOW}
        shares = []
        for _ in range(n_repeats):
            for how, each in made.items():
                speed, share = each.run(n_rollouts)
                speeds[how].append(speed)
                if how == "fed":
                    shares.append(share)
    middle = {how: statistics.median(found) for how, found in speeds.items()}
    cells = [f"{middle[how]:,.0f} ({middle[how] / middle['alone']:.2f})" for how in HOW]
    return f"| {task.name} | {' | '.join(cells)} | {statistics.median(shares):.1%} |"


if __name__ == "__main__":
    tasks = {task.name: task for task in TASKS if task.name in ("cartpole-64", "halfcheetah-8", "pong-4")}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=tasks, default=list(tasks))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rollouts", type=int, default=8, help="of each turn")
    given = parser.parse_args()
    print(f"| environment | {' | '.join(HOW)} | trainer's CPU |")
    print("| --- " * (len(HOW) + 2) + "|")
    for name in given.rows:
        if is_playable(tasks[name].env_id):
            print(measure(tasks[name], given.repeats, given.rollouts), flush=True)
