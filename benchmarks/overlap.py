"""What does it save to collect while the trainer learns, and what do batches and updates cost?

    python benchmarks/overlap.py [--rows learners leases updates] [--seconds 4] [--repeats 5]

A table in Markdown: transitions per second with `run_ahead=1` and without, in turns, with a learner that takes as long
as the collection of a batch: on the CPU, or waiting as for a GPU. Then a lease of a batch of 500 MB, and an update of
ten million parameters beside as many bytes copied in this process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import gymnasium
import numpy as np
import torch
from rollouts import create_agent

from rlstructs import DictTensor, GymEnvInf, RandomAgent, RL_Agent, RL_Batcher

ENV_ID, N_ENVS, N_TIMESTEPS = "CartPole-v1", 32, 128
N_PARAMETERS, LARGE = 10_000_000, 1 << 20


def create_env(n_envs: int, seed: int) -> GymEnvInf:
    return GymEnvInf([gymnasium.make(ENV_ID, disable_env_checker=True) for _ in range(n_envs)], seed)


class Large(gymnasium.Env):  # type: ignore[misc]
    """Observations of a megabyte that never end."""

    observation_space = gymnasium.spaces.Box(0, 255, (LARGE,), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)
    frame = np.zeros(LARGE, np.uint8)

    def reset(self, **_: object) -> tuple[np.ndarray, dict[str, object]]:
        return self.frame, {}

    def step(self, _: object) -> tuple[np.ndarray, float, bool, bool, dict[str, object]]:
        return self.frame, 1.0, False, False, {}


class Learner(RL_Agent):
    """Copies what it is given, as `load_state_dict` does, or keeps it."""

    def __init__(self, copies: bool) -> None:
        self.copies, self.weights = copies, torch.zeros(N_PARAMETERS)

    def initial_state(self, agent_info: DictTensor, B: int) -> DictTensor:
        return DictTensor()

    def __call__(
        self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: object = None
    ) -> tuple[DictTensor, DictTensor]:
        return DictTensor({"action": torch.zeros(observation.n_elems(), dtype=torch.int64)}), state

    def update(self, info: dict[str, torch.Tensor]) -> None:
        if self.copies:
            self.weights.copy_(info["weights"])
        else:
            self.weights = info["weights"]


def computing(seconds: float) -> None:
    """Learns on the CPU."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def collected(n_workers: int, run_ahead: int, learn: Callable[[], None], seconds: float) -> float:
    """Transitions per second of training."""
    with RL_Batcher(
        N_TIMESTEPS, create_agent, {"env_id": ENV_ID, "policy": False}, create_env, {"n_envs": N_ENVS}, n_workers, 0,
        run_ahead=run_ahead,
    ) as batcher:  # fmt: skip
        batcher.reset()
        n, started = 0, 0.0
        for turn in range(1_000_000):
            if turn == 3:  # whatever is taken once
                n, started = 0, time.perf_counter()
            batcher.execute()
            trajectories, _ = batcher.get()
            n += int(trajectories.lengths.sum())
            learn()
            batcher.update(None)
            if turn > 3 and time.perf_counter() - started > seconds:
                break
        return n / (time.perf_counter() - started)


def overlap(what: str, n_workers: int, waits: bool, must: float | None, arguments: argparse.Namespace) -> None:
    """One row: with a run-ahead beside without."""
    ratios = []
    for _ in range(arguments.repeats):
        alone = collected(n_workers, 0, lambda: None, arguments.seconds / 4)
        took = n_workers * N_ENVS * N_TIMESTEPS / alone

        def learn(took: float = took) -> None:
            time.sleep(took) if waits else computing(took)

        one_by_one = collected(n_workers, 0, learn, arguments.seconds)
        ratios.append(collected(n_workers, 1, learn, arguments.seconds) / one_by_one)
    found = statistics.median(ratios)
    verdict = "at most 1.33" if must is None else f"{must}: {'ok' if found >= must else 'TOO SLOW'}"
    show(what, f"**{found:.2f} times** ({min(ratios):.2f} to {max(ratios):.2f})", verdict)


def leases(repeats: int) -> None:
    """A batch of 500 MB, leased, with every column looked at."""
    with RL_Batcher(
        62, RandomAgent, {"action_space": gymnasium.spaces.Discrete(2)},
        lambda seed: GymEnvInf([Large() for _ in range(4)], seed), {}, 2, 0,
    ) as batcher:  # fmt: skip
        batcher.reset()
        found = []
        for _ in range(repeats):
            batcher.execute()
            while not batcher._engine.is_ready():
                pass
            started = time.perf_counter()
            lease = batcher.lease()
            steps = lease.trajectories.trajectories
            nbytes = sum(steps[key].nbytes for key in steps if key.startswith("observation/"))
            found.append(time.perf_counter() - started)
            lease.release()
    milliseconds = statistics.median(found) * 1e3
    verdict = "ok" if milliseconds < 1 else "TOO SLOW"
    show(f"`lease` of {nbytes / 1e6:.0f} MB", f"{milliseconds:.2f} ms", f"1: {verdict}")


def updates(copied: bool, repeats: int) -> None:
    """Ten million parameters to two workers, beside copies of as many bytes."""
    weights = torch.rand(N_PARAMETERS)
    target = torch.empty_like(weights)
    with RL_Batcher(
        1, Learner, {"copies": copied}, lambda seed: GymEnvInf([gymnasium.make(ENV_ID)], seed), {}, 2, 0
    ) as batcher:  # fmt: skip
        for _ in range(3):
            batcher.update({"weights": weights})
        ratios, copies = [], []
        for _ in range(repeats * 4):
            started = time.perf_counter()
            target.copy_(weights)
            half = time.perf_counter()
            batcher.update({"weights": weights})
            copies.append(half - started)
            ratios.append((time.perf_counter() - half) / (half - started))
    found = statistics.median(ratios)
    what = f"whose agents {'copy them' if copied else 'keep the tensors that they are given'}"
    show(f"`update` of {N_PARAMETERS:,} parameters to 2 workers, {what}",
         f"{found:.2f} copies of them ({statistics.median(copies) * 1e3:.1f} ms)",
         f"3: {'ok' if found <= 3 else 'TOO SLOW'}")  # fmt: skip


def show(what: str, found: str, must: str) -> None:
    """A row of the table."""
    print(f"| {what} | {found} | {must} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rows = ("learners", "leases", "updates")
    parser.add_argument("--rows", nargs="+", choices=rows, default=rows)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    show("on two cores", "found", "must")
    show(*["---"] * 3)
    if "learners" in arguments.rows:
        overlap("one worker, a learner on the CPU", 1, False, 1.4, arguments)
        overlap("two workers, a learner that waits", 2, True, 1.4, arguments)
        overlap("two workers, a learner on the CPU", 2, False, None, arguments)
    if "leases" in arguments.rows:
        leases(arguments.repeats)
    if "updates" in arguments.rows:
        updates(True, arguments.repeats)
        updates(False, arguments.repeats)


if __name__ == "__main__":
    main()
