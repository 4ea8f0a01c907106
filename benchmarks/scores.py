"""How well do the examples learn? Trains each of them with several seeds; a line of JSON for each run.

    python benchmarks/scores.py [--rows ppo dqn ...] [--seeds 0 1 2 3 4] [--out scores.jsonl] [-- --n-eval 20 ...]

What follows `--` is added to every command. Runs take turns, one at a time, and each appends a line to `--out`:

    {"row": "ppo", "commit": "1c431aa", "command": "examples/ppo.py --seed 0", "seed": 0, "score": 500.0,
     "steps": 200704, "steps_per_second": 9120, "seconds": 28.3}

(a run's seconds are those of the whole program, its steps/s those of the training alone; some say for how much of it
they waited for rollouts). A run whose commit and command are in the file already is not done again, so that the same
command goes on where one was ended; a commit with changes is called `-dirty` whatever they are: begin a new file then.
At the end a table says how many seeds reached the target. Exits with 1 when a run failed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LAST_LINE = re.compile(
    r".+: score (-?[\d.]+), (\d+) steps, (\d+) steps/s(?:, (\d+)% of the time waiting for rollouts)?"
)


@dataclass(frozen=True)
class Row:
    """One training.

    Attributes:
        program: an example, or what it is compared with.
        arguments: of it, beside the seed.
        target: the score that is to be reached; None where none was set.
    """

    name: str
    program: str
    arguments: tuple[str, ...] = ()
    target: float | None = None


CHEETAH = ("--env-id", "HalfCheetah-v5", "--n-eval", "10")
ROWS = (
    Row("ppo", "examples/ppo.py", target=475),
    Row("ppo-in-turn", "examples/ppo.py", ("--run-ahead", "0"), target=475),
    Row("ppo-sb3", "benchmarks/ppo_sb3.py", target=475),
    Row("ppo-sb3-dummy", "benchmarks/ppo_sb3.py", ("--dummy",), target=475),
    Row("dqn", "examples/dqn.py", target=475),
    Row("sac", "examples/sac.py", target=-200),
    Row("a2c_recurrent", "examples/a2c_recurrent.py", target=400),
    Row("reinforce", "examples/reinforce.py"),
    Row("evolution", "examples/evolution.py", target=475),
    Row("jax_dqn", "examples/jax_dqn.py", target=475),
    Row("diayn", "examples/diayn.py"),
    Row("ppo-pong", "examples/ppo_atari.py"),
    Row(
        "ppo-halfcheetah", "examples/ppo.py",
        (*CHEETAH, "--n-steps", "1000000", "--n-envs", "4", "--n-timesteps", "256", "--n-epochs", "10",
         "--minibatch-size", "256", "--learning-rate", "3e-4"),
    ),
    Row(
        "sac-halfcheetah", "examples/sac.py",
        (*CHEETAH, "--n-steps", "200000", "--n-hidden", "256", "--batch-size", "256", "--n-before", "10000",
         "--updates-per-step", "1", "--learning-rate", "3e-4"),
    ),
)  # fmt: skip


def commit() -> str:
    """The commit that is checked out, short; `-dirty` behind it when files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def train(command: list[str]) -> dict[str, Any]:
    """Runs an example; its score, steps, steps/s and seconds.

    Raises:
        RuntimeError: it failed, or did not end with a score.
    """
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    found = LAST_LINE.fullmatch(lines[-1]) if lines and done.returncode == 0 else None
    if found is None:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    seconds = round(time.perf_counter() - start, 1)
    score, steps, speed, waiting = found.groups()
    line = {"score": float(score), "steps": int(steps), "steps_per_second": int(speed), "seconds": seconds}
    return line if waiting is None else {**line, "waiting": int(waiting) / 100}


def table(lines: list[dict[str, Any]]) -> list[str]:
    """A line for each row of the scores that are there."""
    shown = [f"{'row':16} {'target':>7} {'reached':>8}  scores"]
    for row in ROWS:
        scores = sorted(line["score"] for line in lines if line["row"] == row.name)
        if scores:
            target = "" if row.target is None else f"{row.target:g}"
            reached = "" if row.target is None else f"{sum(s >= row.target for s in scores)}/{len(scores)}"
            shown.append(f"{row.name:16} {target:>7} {reached:>8}  {' '.join(f'{s:.1f}' for s in scores)}")
    return shown


def main(options: argparse.Namespace) -> int:
    name = commit()
    known = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    lines = [line for line in known if line["commit"] == name]
    n_failed = 0
    for row in (row for row in ROWS if row.name in options.rows):
        for seed in options.seeds:
            command = [row.program, *row.arguments, *options.more, "--seed", str(seed)]
            shown = " ".join(command)
            if shown in (line["command"] for line in lines):
                continue
            try:
                line = {"row": row.name, "commit": name, "command": shown, "seed": seed, **train(command)}
            except RuntimeError as error:
                print(error, file=sys.stderr)
                n_failed += 1
                continue
            lines.append(line)
            with options.out.open("a") as file:
                print(json.dumps(line), file=file)
            print(f"{shown}: score {line['score']}, {line['seconds']} s", flush=True)
    print("\n".join(table(lines)))
    return 1 if n_failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [row.name for row in ROWS]
    parser.add_argument("--rows", nargs="+", default=names, choices=names, metavar="ROW", help=", ".join(names))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], metavar="SEED")
    parser.add_argument("--out", type=Path, default=Path("scores.jsonl"), metavar="FILE")
    parser.add_argument("more", nargs="*", metavar="ARGUMENT", help="added to every command")
    sys.exit(main(parser.parse_args()))
