"""Draws the first picture of the README: where the time goes with a process for each environment, and with rollouts.

    python benchmarks/timelines.py [--folder docs] [--ms 10] [--seconds 3]

Both step six HalfCheetahs with one network, one after the other: gymnasium's `AsyncVectorEnv`, whose environments note
when they are stepped, and a batcher, whose timeline is read. The picture shows so many milliseconds of each from an
order of the trainer on: those with the most steps, which other programs have disturbed least. Where these leave no such
time, `chrt -f 1` before the command has them wait meanwhile.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch

from rlstructs import RL_Batcher
from rlstructs.trace.timeline import read_events

ENV_ID, N_ENVS, N_WORKERS, N_TIMESTEPS = "HalfCheetah-v5", 6, 2, 16
# Colours on a light and on a dark page: of text, and of what a process does.
THEMES = {
    "light": {"text": "#1f2933", "lane": "#eef1f4", "environment": "#2b7fbf", "agent": "#e07b00", "other": "#9aa5b1"},
    "dark": {"text": "#e4e7eb", "lane": "#262d36", "environment": "#4098d7", "agent": "#f0a020", "other": "#7b8794"},
}
KINDS = {"environment": "environment", "reset": "environment", "agent": "agent", "wait": "", "wait for an order": ""}
WIDTH, LEFT, LANE, PITCH = 880, 92, 20, 25


class Span(NamedTuple):
    """What a process does, a key of a theme, and the seconds when it begins and ends."""

    kind: str
    begin: float
    end: float


class Run(NamedTuple):
    """A run: the spans of each process, and when the trainer gave orders and when steps ended, ascending seconds."""

    lanes: dict[str, list[Span]]
    orders: np.ndarray
    steps: np.ndarray

    def find_part(self, length: float) -> tuple[float, int]:
        """When the part of this length with the most steps begins, and how many they are."""
        begins = self.orders[len(self.orders) // 4 :]
        begins = begins[begins < self.steps[-1] - length]
        counts = np.searchsorted(self.steps, begins + length) - np.searchsorted(self.steps, begins)
        return float(begins[counts.argmax()]), int(counts.max())


class Policy(torch.nn.Module):
    """Distributions of actions."""

    def __init__(self) -> None:
        super().__init__()
        layers, tanh = torch.nn.Linear, torch.nn.Tanh
        self.layers = torch.nn.Sequential(layers(17, 64), tanh(), layers(64, 64), tanh(), layers(64, 6))

    def forward(self, frame: torch.Tensor) -> torch.distributions.Distribution:
        return torch.distributions.Normal(self.layers(frame), 0.1)


class Noted(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Notes when it is stepped; saves that as it is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__(gymnasium.make(ENV_ID))
        self.path, self.times = path, list[tuple[float, float]]()

    def step(self, action: Any) -> Any:
        began = time.perf_counter()
        result = super().step(action)
        self.times.append((began, time.perf_counter()))
        return result

    def close(self) -> None:
        np.save(self.path, self.times)
        super().close()


def run_processes(folder: Path, seconds: float) -> Run:
    """Steps environments in a process each."""
    paths, policy = [folder / f"{k}.npy" for k in range(N_ENVS)], Policy()
    envs = gymnasium.vector.AsyncVectorEnv([partial(Noted, path) for path in paths])
    trainer, frame, end = list[Span](), envs.reset()[0], time.perf_counter() + seconds
    while (now := time.perf_counter()) < end:
        with torch.no_grad():
            actions = policy(torch.as_tensor(frame, dtype=torch.float32)).sample().numpy()
        trainer.append(Span("agent", now, time.perf_counter()))
        frame = envs.step(actions)[0]
    envs.close()
    times = [np.load(path) for path in paths]
    lanes = {f"process {k}": [Span("environment", *each) for each in own.tolist()] for k, own in enumerate(times)}
    orders = np.array([span.end for span in trainer])
    return Run({"trainer": trainer, **lanes}, orders, np.sort(np.concatenate(times)[:, 1]))


def run_rollouts(folder: Path, seconds: float) -> Run:
    """Collects rollouts."""
    settings = {"n_envs": N_ENVS, "n_workers": N_WORKERS, "n_timesteps": N_TIMESTEPS}
    with RL_Batcher.make(ENV_ID, Policy(), **settings) as batcher, batcher.trace(folder / "run.json"):
        end = time.perf_counter() + seconds
        for _ in batcher.rollouts():
            if time.perf_counter() > end:
                break
    names = ["trainer", *(f"worker {k}" for k in range(N_WORKERS))]
    lanes: dict[str, list[Span]] = {name: [] for name in names}
    orders, steps = list[float](), list[float]()
    for event in read_events(folder / "run.json"):
        if event["ph"] != "X":
            continue
        begin, name = event["ts"] / 1e6, event["name"]
        end = begin + event["dur"] / 1e6
        lanes[names[event["tid"]]].append(Span(KINDS.get(name, "other"), begin, end))
        orders += [begin] * (name == "order")
        steps += [end] * (N_ENVS // N_WORKERS) * (name == "environment")
    return Run(lanes, np.array(orders), np.sort(steps))


def draw(runs: dict[str, Run], length: float, theme: dict[str, str]) -> str:
    """Draws runs above each other."""
    parts, y = list[str](), 22
    for title, run in runs.items():
        begin, n_steps = run.find_part(length)
        parts.append(f'<text x="0" y="{y}" font-weight="600">{title}</text>')
        parts.append(f'<text x="{WIDTH - 2}" y="{y}" text-anchor="end">{n_steps} steps in {length * 1e3:g} ms</text>')
        y += 12
        for name, spans in run.lanes.items():
            parts.append(f'<text x="0" y="{y + 15}" font-size="13">{name}</text>')
            parts += draw_lane(spans, begin, length, y, theme)
            y += PITCH
        y += 30
    at = LEFT
    for kind, name in (("environment", "environment"), ("agent", "agent"), ("other", "other work"), ("lane", "waits")):
        parts.append(f'<rect x="{at}" y="{y - 22}" width="14" height="14" fill="{theme[kind]}"/>')
        parts.append(f'<text x="{at + 20}" y="{y - 10}" font-size="13">{name}</text>')
        at += 130
    head = f'viewBox="0 0 {WIDTH} {y}" font-family="system-ui, sans-serif" font-size="15" fill="{theme["text"]}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {head}>', *parts, "</svg>\n"])


def draw_lane(spans: list[Span], begin: float, length: float, y: int, theme: dict[str, str]) -> Iterator[str]:
    """Draws what a process does in a part of the time."""
    scale = (WIDTH - LEFT) / length
    yield f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT}" height="{LANE}" fill="{theme["lane"]}"/>'
    for kind in ("other", "agent", "environment"):
        path = ""
        for span in spans:
            first, last = max(span.begin - begin, 0.0), min(span.end - begin, length)
            if span.kind == kind and last > first:
                path += (
                    f"M{LEFT + first * scale:.1f} {y}h{(last - first) * scale:.1f}v{LANE}H{LEFT + first * scale:.1f}z"
                )
        yield f'<path d="{path}" fill="{theme[kind]}"/>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent.parent / "docs")
    parser.add_argument("--ms", type=float, default=10)
    parser.add_argument("--seconds", type=float, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            "A process for each environment (AsyncVectorEnv) wakes at every step":
                run_processes(Path(folder), arguments.seconds),
            f"rlstructs: workers have the agent too, and wake once in {N_TIMESTEPS} steps":
                run_rollouts(Path(folder), arguments.seconds),
        }  # fmt: skip
    for name, theme in THEMES.items():
        (arguments.folder / f"timelines-{name}.svg").write_text(draw(runs, arguments.ms / 1e3, theme))


if __name__ == "__main__":
    main()
