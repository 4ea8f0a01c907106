"""How fast are returns? Microseconds of GAE and V-trace beside a loop over time, and torchrl where it is installed.

    python benchmarks/returns.py [--rows 64x128 ...] [--repeats 15] [--device cpu] [--no-peers] [--before TREE]

Every contender gets the same tensors (B, T) of 32 bits, with an end in one of a hundred steps, and takes its turn,
`--repeats` times over, in one process. The table shows medians, and multiples of ours. "loop" goes over time with
vectors of B, "loop, time first" over tensors whose memory has time as its first axis, so that those vectors are
contiguous; torchrl's `vec_` does not, of V-trace it has only the loop.

`--before` compares this tree with an earlier one, in place of all that: a process for each, in turns, and the median
of the times of one over those of the other. Both keep freed memory, or it would be chance which of them asks for pages.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rlstructs import gae, vtrace

GAMMA, LAMBDA = 0.99, 0.95
# What must hold in every row, as a multiple of ours.
MUST = 1.0
# What must hold as a share of the time of an earlier tree, that of version 0.1.0 without kernels.
MUST_OF_BEFORE = {"64x128": 0.6, "8x2048": 0.45, "1024x2048": 0.35}
Contender = Callable[[], Any]


def arguments(n_elems: int, n_timesteps: int, device: str) -> dict[str, torch.Tensor]:
    """What both functions take, but for the weights."""
    generator = torch.Generator().manual_seed(0)
    names = ("rewards", "values", "next_values", "target_log_probs", "behaviour_log_probs")
    floats = {name: torch.randn(n_elems, n_timesteps, generator=generator) for name in names}
    ends = ("terminated", "truncated")
    flags = {name: torch.rand(n_elems, n_timesteps, generator=generator) < 0.005 for name in ends}
    return {name: tensor.to(device) for name, tensor in (floats | flags).items()}


def loop(a: dict[str, torch.Tensor], deltas: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The recurrence as it is written in most programs."""
    weights = weights * ~(a["terminated"] | a["truncated"])
    sums, following = torch.empty_like(deltas), torch.zeros_like(deltas[:, 0])
    for t in reversed(range(deltas.shape[1])):
        following = deltas[:, t] + weights[:, t] * following
        sums[:, t] = following
    return sums


def loop_gae(a: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    deltas = a["rewards"] + GAMMA * a["next_values"] * ~a["terminated"] - a["values"]
    advantages = loop(a, deltas, torch.full_like(deltas, GAMMA * LAMBDA))
    return advantages, advantages + a["values"]


def loop_vtrace(a: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    rhos = (a["target_log_probs"] - a["behaviour_log_probs"]).exp().clamp(max=1)
    after = GAMMA * a["next_values"] * ~a["terminated"]
    targets = a["values"] + loop(a, rhos * (a["rewards"] + after - a["values"]), GAMMA * rhos)
    goes_on = ~(a["terminated"] | a["truncated"])[:, :-1]
    after[:, :-1] = torch.where(goes_on, GAMMA * targets[:, 1:], after[:, :-1])
    return rhos * (a["rewards"] + after - a["values"]), targets


def torchrl(a: dict[str, torch.Tensor]) -> dict[str, dict[str, Contender]]:
    """Its functions, which want a last axis."""
    from torchrl.objectives.value import functional

    a = {name: tensor[..., None] for name, tensor in a.items()}
    rest = {"reward": a["rewards"], "done": a["terminated"] | a["truncated"], "terminated": a["terminated"]}
    values = {"state_value": a["values"], "next_state_value": a["next_values"]}
    log_probs = a["target_log_probs"], a["behaviour_log_probs"]
    return {
        "gae": {
            "torchrl": lambda: functional.generalized_advantage_estimate(GAMMA, LAMBDA, **values, **rest),
            "torchrl vec_": lambda: functional.vec_generalized_advantage_estimate(GAMMA, LAMBDA, **values, **rest),
        },
        "vtrace": {"torchrl": lambda: functional.vtrace_advantage_estimate(GAMMA, *log_probs, **values, **rest)},
    }


def contenders(a: dict[str, torch.Tensor], with_peers: bool) -> dict[str, dict[str, Contender]]:
    """For each function its name, and who computes it."""
    log_probs = ("target_log_probs", "behaviour_log_probs")
    without = {name: tensor for name, tensor in a.items() if name not in log_probs}
    time_first = {name: tensor.t().contiguous().t() for name, tensor in a.items()}
    found: dict[str, dict[str, Contender]] = {
        "gae": {
            "rlstructs": lambda: gae(**without, gamma=GAMMA, lambda_=LAMBDA),
            "loop": lambda: loop_gae(a),
            "loop, time first": lambda: loop_gae(time_first),
        },
        "vtrace": {
            "rlstructs": lambda: vtrace(**a, gamma=GAMMA),
            "loop": lambda: loop_vtrace(a),
            "loop, time first": lambda: loop_vtrace(time_first),
        },
    }
    if with_peers:
        for name, peers in torchrl(a).items():
            found[name] |= peers
    return found


def timed(run: Contender, device: str) -> float:
    """Seconds of one call."""
    synchronize = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def measure(runs: dict[str, Contender], repeats: int, device: str) -> dict[str, float]:
    """Medians of seconds, every contender in turn; all must agree."""
    wanted = runs["rlstructs"]()
    for run in runs.values():  # which is also what warms them up
        for mine, theirs in zip(wanted, run(), strict=True):
            torch.testing.assert_close(mine, theirs.reshape(mine.shape), rtol=1e-3, atol=1e-3)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            seconds[name].append(timed(run, device))
    return {name: statistics.median(values) for name, values in seconds.items()}


def show(title: str, seconds: dict[str, float]) -> None:
    """One row of the table, and what must hold on it."""
    ours = seconds["rlstructs"]
    cells = (f"{name} {value * 1e6:,.0f} ({value / ours:.1f})" for name, value in seconds.items())
    slower = min(value for name, value in seconds.items() if name != "rlstructs") / ours
    verdict = "ok" if slower >= MUST else "TOO SLOW"
    print(f"{title:20} {' | '.join(cells)}: the next takes {slower:.1f}, must {MUST}: {verdict}", flush=True)


def answer(device: str) -> None:
    """Times what each line asks for, such as "gae 64x128", until there is none."""
    runs: dict[str, Contender] = {}
    for line in sys.stdin:
        name, row = line.split()
        if line not in runs:
            made = contenders(arguments(*map(int, row.split("x")), device), False)
            runs[line] = made[name]["rlstructs"]
            for _ in range(3):  # which loads what is needed, too
                timed(runs[line], device)
        first = timed(runs[line], device)
        n_more = min(int(0.005 / first), 20)
        print(statistics.median([first, *(timed(runs[line], device) for _ in range(n_more))]), flush=True)


def compare(rows: list[str], repeats: int, device: str, before: Path) -> None:
    """One row for each function and shape: this tree beside the earlier one, in turns."""
    command = [sys.executable, __file__, "--answer", "--device", device]
    trees = {"before": before.resolve(), "now": Path(__file__).resolve().parents[1]}
    kept = {"MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_MMAP_THRESHOLD_": str(2**32)}
    processes = {
        name: subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **kept, "PYTHONPATH": str(tree)},
        )
        for name, tree in trees.items()
    }
    for row in rows:
        for function in ("gae", "vtrace"):
            seconds: dict[str, list[float]] = {name: [] for name in processes}
            for turn in range(repeats):
                for name in list(processes)[:: 1 if turn % 2 else -1]:
                    process = processes[name]
                    print(function, row, file=process.stdin, flush=True)
                    seconds[name].append(float(process.stdout.readline()))
            share = statistics.median(now / then for then, now in zip(seconds["before"], seconds["now"], strict=True))
            cells = " | ".join(f"{name} {statistics.median(values) * 1e6:,.0f}" for name, values in seconds.items())
            must = MUST_OF_BEFORE.get(row, 1.0)
            print(
                f"{function + ' ' + row:20} {cells}: {share:.2f}, must {must}: {'ok' if share <= must else 'TOO SLOW'}"
            )
    for process in processes.values():
        process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=["64x128", "8x2048", "1024x2048"])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--before", type=Path, help="the folder of an earlier tree")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)  # a second one is not always free, and no contender would know
    if options.answer:
        return answer(options.device)
    if options.before:
        return compare(options.rows, options.repeats, options.device, options.before)
    with_peers = not options.no_peers and importlib.util.find_spec("torchrl") is not None
    print(f"torch {torch.__version__} on {options.device}; microseconds, and multiples of ours")
    for row in options.rows:
        n_elems, n_timesteps = map(int, row.split("x"))
        for name, runs in contenders(arguments(n_elems, n_timesteps, options.device), with_peers).items():
            show(f"{name} {row}", measure(runs, options.repeats, options.device))


if __name__ == "__main__":
    main()
