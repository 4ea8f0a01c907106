"""How much is lost where environments fail now and then?

    python benchmarks/failures.py [--envs 8] [--workers 2] [--timesteps 128] [--rollouts 40] [--shares 0.001 0.01 0.05]

A table in Markdown: CartPole, of which each step fails with a given probability. "worker" is
`on_worker_failure="restart"`, which replaces all environments of a worker; "environment" is `on_env_failure="restart"`,
which makes one anew. Of the steps that were ordered, how many came back; how many rows had none, and how many rollouts.
"""

from __future__ import annotations

import argparse
import logging
import time

import gymnasium

from rlstructs import RL_Batcher

POLICIES = {"worker": {"on_worker_failure": "restart"}, "environment": {"on_env_failure": "restart"}}


class Failing(gymnasium.Wrapper):  # type: ignore[misc]
    """Fails in a share of its steps, by its own stream."""

    def __init__(self, share: float) -> None:
        super().__init__(gymnasium.make("CartPole-v1", disable_env_checker=True))
        self.share = share

    def step(self, action: int) -> tuple[object, float, bool, bool, dict[str, object]]:
        if self.unwrapped.np_random.random() < self.share:
            raise RuntimeError("the simulator has lost its connection")
        return self.env.step(action)  # type: ignore[no-any-return]


def measure(share: float, policy: str, arguments: argparse.Namespace) -> str:
    """One row of the table."""
    with RL_Batcher.make(
        lambda: Failing(share), n_envs=arguments.envs, n_workers=arguments.workers, n_timesteps=arguments.timesteps,
        seed=0, **POLICIES[policy],
    ) as batcher:  # fmt: skip
        batcher.reset()
        lengths, began = [], time.perf_counter()
        for _ in range(arguments.rollouts):
            batcher.execute()
            lengths.append(batcher.get()[0].lengths)
        seconds = time.perf_counter() - began
    n_ordered = arguments.rollouts * arguments.envs * arguments.timesteps
    n_steps = sum(int(each.sum()) for each in lengths)
    n_empty_rows = sum(int((each == 0).sum()) for each in lengths)
    n_empty = sum(not each.any() for each in lengths)
    return (
        f"| {100 * share:g}% | {policy} | {100 * n_steps / n_ordered:.1f}% | "
        f"{n_empty_rows} of {arguments.rollouts * arguments.envs} | {n_empty} of {arguments.rollouts} | "
        f"{n_steps / seconds:,.0f} |"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timesteps", type=int, default=128)
    parser.add_argument("--rollouts", type=int, default=40)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.001, 0.01, 0.05])
    arguments = parser.parse_args()
    logging.getLogger("rlstructs").setLevel(logging.ERROR)  # each failure is a warning there
    print("| failing steps | replaced | steps | rows without a step | rollouts without a step | steps per second |")
    print("| --- | --- | --- | --- | --- | --- |")
    for share in arguments.shares:
        for policy in POLICIES:
            print(measure(share, policy, arguments), flush=True)


if __name__ == "__main__":
    main()
