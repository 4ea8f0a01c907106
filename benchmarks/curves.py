"""Draws learning curves of PPO on CartPole against wall-clock time: `examples/ppo.py` beside Stable-Baselines3's PPO.

    python benchmarks/curves.py [--contenders ours ...] [--seeds 0 1 2 3 4] [--n-steps 198656] [--out FILE]

All contenders have the same environments, layers, hyperparameters and number of steps (`ppo_sb3.py` says what differs).
They take turns, seed by seed, each in a process of its own. Time begins when imports are done, before environments and
workers are made. After each rollout the mean return of the latest 100 episodes of the training is written down; a line
is the mean of that over seeds, a band reaches from the smallest to the largest. The table has the seconds of a training
and those until 475 is reached. Needs matplotlib; Stable-Baselines3 is left out where it is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
TARGET = 475
CONTENDERS = {"rlstructs": "ours", "SB3, DummyVecEnv": "dummy", "SB3, SubprocVecEnv": "subproc"}
Curve = list[tuple[float, float]]  # (seconds, mean return of the latest 100 episodes)


def train_ours(seed: int, n_steps: int) -> Curve:
    """The loop of `examples/ppo.py`, which writes down times."""
    import torch

    sys.path.insert(0, str(ROOT / "examples"))
    from ppo import Args, Policy, create_env, create_network, learn

    from rlstructs import DictTensor, RL_Batcher

    args = Args(seed=seed, n_steps=n_steps)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    start, curve, returns, done = time.perf_counter(), [], deque(maxlen=100), 0
    network = create_network(args.env_id, "")
    optimizer = torch.optim.Adam(network.parameters(), lr=args.learning_rate, eps=1e-5)
    env_args = {"env_id": args.env_id, "n_envs": args.n_envs, "gamma": args.gamma}
    with RL_Batcher(
        args.n_timesteps, Policy, {"network": network}, create_env, env_args, args.n_processes, seed,
        agent_info=DictTensor({"greedy": torch.tensor([False])}), run_ahead=args.run_ahead,
    ) as batcher:  # fmt: skip
        batcher.reset(agent_info=DictTensor({"greedy": torch.zeros(batcher.n_elems(), dtype=torch.bool)}))
        while done < n_steps:
            batcher.execute()
            batch, _ = batcher.get()
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - done / n_steps)
            learn(network, optimizer, batch, args)
            batcher.update(network.state_dict())
            done += int(batch.lengths.sum())
            returns.extend(batcher.episodes()["return"].tolist())
            curve.append((time.perf_counter() - start, float(np.mean(returns))))
    return curve


def train_sb3(seed: int, n_steps: int, kind: str) -> Curve:
    """Stable-Baselines3's PPO, with a callback that writes down times."""
    import torch
    from ppo_sb3 import Args, DummyVecEnv, SubprocVecEnv, create_model
    from stable_baselines3.common.callbacks import BaseCallback

    args = Args(seed=seed, n_steps=n_steps)
    torch.set_num_threads(1)
    start, curve = time.perf_counter(), []

    class Recorder(BaseCallback):
        def _on_rollout_start(self) -> None:  # after the learning from the rollout before
            if self.num_timesteps:
                self.record()

        def _on_step(self) -> bool:
            return True

        def record(self) -> None:
            returns = [episode["r"] for episode in self.model.ep_info_buffer]
            curve.append((time.perf_counter() - start, float(np.mean(returns))))

    recorder = Recorder()
    vec_env = {"dummy": DummyVecEnv, "subproc": SubprocVecEnv}[kind]
    model = create_model(args, vec_env, lambda left: args.learning_rate * left)
    model.learn(n_steps, callback=recorder)
    recorder.record()
    model.get_env().close()
    return curve


def run(kind: str, seed: int, n_steps: int) -> Curve:
    """One training in a process of its own."""
    command = [sys.executable, __file__, "--run", kind, "--seeds", str(seed), "--n-steps", str(n_steps)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def print_table(curves: dict[str, list[Curve]]) -> None:
    print(f"| PPO, CartPole-v1 | seconds of a training | seconds to {TARGET} |\n| --- | --- | --- |")
    for name, runs in curves.items():
        reached = [next((at for at, value in run if value >= TARGET), None) for run in runs]
        times = [at for at in reached if at is not None]
        until = f"{np.mean(times):.1f} ({len(times)} of {len(runs)})" if times else f"(0 of {len(runs)})"
        print(f"| {name} | {np.mean([run[-1][0] for run in runs]):.1f} | {until} |")


def draw(curves: dict[str, list[Curve]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for index, (name, runs) in enumerate(curves.items()):
        # Seeds have their rollouts at slightly different times: mean over seeds of both, rollout by rollout.
        times, values = np.array(runs).transpose(2, 0, 1)
        axes.plot(times.mean(0), values.mean(0), color=f"C{index}", label=name)
        axes.fill_between(times.mean(0), values.min(0), values.max(0), color=f"C{index}", alpha=0.2, linewidth=0)
    axes.axhline(500, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xlabel="seconds of training, two cores", ylabel="return, latest 100 episodes", xlim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)


def main(options: argparse.Namespace) -> None:
    has_sb3 = importlib.util.find_spec("stable_baselines3") is not None
    contenders = {name: kind for name, kind in CONTENDERS.items()
                  if kind in options.contenders and (kind == "ours" or has_sb3)}  # fmt: skip
    curves = {name: [] for name in contenders}
    for seed in options.seeds:
        for name, kind in contenders.items():
            curves[name].append(run(kind, seed, options.n_steps))
    print_table(curves)
    draw(curves, options.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", choices=list(CONTENDERS.values()), nargs="+", default=list(CONTENDERS.values()))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--n-steps", type=int, default=198_656)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "curves" / "cartpole.png")
    parser.add_argument("--run", choices=list(CONTENDERS.values()), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run is None:
        main(given)
    else:
        [seed] = given.seeds
        own = given.run == "ours"
        print(json.dumps(train_ours(seed, given.n_steps) if own else train_sb3(seed, given.n_steps, given.run)))
