"""How well do the examples learn? Trains them with several seeds; a line of JSON for each run, and tables at the end.

    python benchmarks/scores.py [--rows ppo dqn ...] [--seeds 0 1 2 3 4] [--out scores.jsonl] [-- --n-eval 20 ...]
    python benchmarks/scores.py --table

By itself it trains what has a target, about three quarters of an hour on two cores, and SB3's PPO too where that is
installed. The others run when `--rows` names them: Pong and HalfCheetah take long, one seed (`--seeds 0`) may do. What
follows `--` is added to every command. Runs take turns, one at a time, and each appends a line to `--out`:

    {"row": "ppo", "commit": "1c431aa", "command": "examples/ppo.py --n-steps 198656 --seed 0", "seed": 0,
     "task": "CartPole-v1", "score": 500.0, "steps": 198656, "steps_per_second": 9120, "waiting": 0.09, "seconds": 28.3}

(a run's seconds are those of the whole program, its steps/s those of the training alone; some say for how much of it
they waited for rollouts). The same command goes on where one was ended: a run that has a line is not done again, unless
what it runs has changed since the line's commit, which is its program and the library, but for what no training needs.
A commit is called `-dirty` where there are such changes that are not committed. Its lines stand while that commit is
checked out with changes, whatever they are: begin a new file then.

Programs round their steps up to whole rollouts: PPO, DQN and A2C get the most that lie within 200k, 150k and 1M, and
PPO with a transformer within 150k. The
tables at the end are of all lines that stand for these commands: means over seeds, with the standard deviation of
scores. `--table` trains nothing. Exits with 1 when a run failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LAST_LINE = re.compile(
    r"(.+): score (-?[\d.]+), (\d+) steps, (\d+) steps/s(?:, (\d+)% of the time waiting for rollouts)?"
)
SB3 = "benchmarks/ppo_sb3.py"
# The library, as git names files, but for what no training here runs.
NOT_RUN = ("distributed", "testing", "cli")
LIBRARY = ("rlstructs", "workers", *(f":(exclude)rlstructs/{name}" for name in NOT_RUN))

Line = dict[str, Any]


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

    def command(self, more: list[str]) -> list[str]:
        return [self.program, *self.arguments, *more, "--seed"]


PPO = ("--n-steps", "198656")
MEMORY = ("--n-steps", "149504")
CHEETAH = ("--env-id", "HalfCheetah-v5", "--n-eval", "10")
ROWS = (
    Row("ppo", "examples/ppo.py", PPO, target=475),
    Row("ppo-in-turn", "examples/ppo.py", (*PPO, "--run-ahead", "0"), target=475),
    Row("ppo-sb3", SB3, PPO, target=475),
    Row("ppo-sb3-dummy", SB3, (*PPO, "--dummy"), target=475),
    Row("dqn", "examples/dqn.py", ("--n-steps", "149888"), target=475),
    Row("sac", "examples/sac.py", target=-200),
    Row("a2c_recurrent", "examples/a2c_recurrent.py", ("--n-steps", "999424"), target=400),
    Row("ppo_transformer", "examples/ppo_transformer.py", MEMORY, target=400),
    Row("ppo_transformer-maze", "examples/ppo_transformer.py", (*MEMORY, "--task", "t-maze"), target=0.95),
    Row("evolution", "examples/evolution.py", target=475),
    Row("jax_dqn", "examples/jax_dqn.py", target=475),
    Row("dqn_compiled", "examples/dqn_compiled.py"),
    Row("ppo_jax", "examples/ppo_jax.py", PPO, target=475),
    Row("reinforce", "examples/reinforce.py"),
    Row("diayn", "examples/diayn.py"),
    Row("ppo-pong", "examples/ppo_atari.py", ("--n-steps", "999424")),
    Row(
        "ppo-halfcheetah", "examples/ppo.py",
        (*CHEETAH, "--n-steps", "999424", "--n-envs", "4", "--n-timesteps", "256", "--n-epochs", "10",
         "--minibatch-size", "256", "--learning-rate", "3e-4"),
    ),
    Row(
        "sac-halfcheetah", "examples/sac.py",
        (*CHEETAH, "--n-steps", "200000", "--n-hidden", "256", "--batch-size", "256", "--n-before", "10000",
         "--updates-per-step", "1", "--learning-rate", "3e-4"),
    ),
)  # fmt: skip
# Who collects and learns in turns, so that the share of the time it waited for rollouts is that of collecting.
IN_TURN = ("ppo-in-turn", "ppo-sb3", "ppo-sb3-dummy")


# What a program takes from another one.
TASKS = ("examples/memory_tasks.py",)
NEEDED = {
    SB3: ("examples/ppo.py",),
    "examples/a2c_recurrent.py": TASKS,
    "examples/ppo_transformer.py": TASKS,
    "examples/dqn_compiled.py": ("examples/jax_dqn.py",),
}


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)


def is_changed(program: str, commit: str) -> bool:
    """Whether what a program runs differs now from what it was at a commit, or that is not known."""
    needed = [program, *NEEDED.get(program, ())]
    return git("diff", "--quiet", commit, "--", *needed, *LIBRARY).returncode != 0


def commit_of(program: str) -> str:
    """The commit that is checked out, short; `-dirty` behind it when what the program runs differs from it."""
    name = git("rev-parse", "--short", "HEAD").stdout.strip()
    return f"{name}-dirty" if is_changed(program, "HEAD") else name


def stands(line: Line) -> bool:
    """Whether a run would be made by the same code now."""
    program = line["command"].split()[0]
    return line["commit"] == commit_of(program) or not is_changed(program, line["commit"])


def train(command: list[str]) -> Line:
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
    task, score, steps, speed, waiting = found.groups()
    line = {"task": task, "score": float(score), "steps": int(steps), "steps_per_second": int(speed)}
    line["seconds"] = seconds
    return line if waiting is None else {**line, "waiting": int(waiting) / 100}


def shown(scores: list[float]) -> str:
    """Their mean, and their standard deviation if there are several."""
    mean = statistics.mean(scores)
    digits = 1 if abs(mean) >= 1 else 3  # DIAYN's are shares
    spread = f" ± {statistics.stdev(scores):.{digits}f}" if len(scores) > 1 else ""
    return f"{mean:.{digits}f}{spread}"


def mean(lines: list[Line], key: str) -> float:
    return statistics.mean(line[key] for line in lines)


def table(lines: list[Line]) -> list[str]:
    """The scores that are there, as Markdown."""
    rows = ["| training | steps | target | reached it | score | steps/s | waiting |", "| --- " * 7 + "|"]
    for row in ROWS:
        own = [line for line in lines if line["row"] == row.name]
        if own:
            scores = [line["score"] for line in own]
            target = "" if row.target is None else f"{row.target:g}"
            reached = "" if row.target is None else f"{sum(s >= row.target for s in scores)} of {len(scores)}"
            waiting = f"{mean(own, 'waiting'):.0%}" if all("waiting" in line for line in own) else ""
            steps, speed = (f"{mean(own, key):,.0f}" for key in ("steps", "steps_per_second"))
            name = ", ".join([row.name, *{line["task"] for line in own if "task" in line}])
            rows.append(f"| {' | '.join([name, steps, target, reached, shown(scores), speed, waiting])} |")
    return rows


def parts(lines: list[Line]) -> list[str]:
    """How fast those are who collect and learn in turns, while they do the one and the other, as Markdown."""
    rows = ["| PPO, in turns | score | steps/s | collecting | steps/s of that | learning | steps/s of that |"]
    rows.append("| --- " * 7 + "|")
    for name in IN_TURN:
        own = [line for line in lines if line["row"] == name and 0 < line.get("waiting", 0) < 1]
        if own:
            speed, waiting = mean(own, "steps_per_second"), mean(own, "waiting")
            shares = (f"{share:.0%} | {speed / share:,.0f}" for share in (waiting, 1 - waiting))
            scores = shown([line["score"] for line in own])
            rows.append(f"| {name} | {scores} | {speed:,.0f} | {' | '.join(shares)} |")
    return rows if len(rows) > 3 else []  # one alone is in the other table


def run(options: argparse.Namespace, lines: list[Line]) -> int:
    """Trains what has no line yet, and adds those; how many failed."""
    n_failed = 0
    for row in (row for row in ROWS if row.name in options.rows):
        for seed in options.seeds:
            command = [*row.command(options.more), str(seed)]
            words, commit = " ".join(command), commit_of(row.program)
            if words in (line["command"] for line in lines):
                continue  # it is known
            try:
                found = train(command)
            except RuntimeError as error:
                print(error, file=sys.stderr)
                n_failed += 1
                continue
            line = {"row": row.name, "commit": commit, "command": words, "seed": seed, **found}
            lines.append(line)
            with options.out.open("a") as file:
                print(json.dumps(line), file=file)
            print(f"{words}: score {line['score']}, {line['seconds']} s", flush=True)
    return n_failed


def main(options: argparse.Namespace) -> int:
    known = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    commands = {" ".join(row.command(options.more)) for row in ROWS}
    mine = [line for line in known if line["command"].rpartition(" ")[0] in commands and stands(line)]
    lines = list({line["command"]: line for line in mine}.values())
    n_failed = 0 if options.table else run(options, lines)
    tables = [table(lines), parts(lines)]
    print("\n\n".join("\n".join(rows) for rows in tables if rows))
    return 1 if n_failed else 0


def is_default(row: Row) -> bool:
    is_installed = row.program != SB3 or importlib.util.find_spec("stable_baselines3") is not None
    return row.target is not None and is_installed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names, default = [row.name for row in ROWS], [row.name for row in ROWS if is_default(row)]
    words = f"of {', '.join(names)}; those with a target"
    parser.add_argument("--rows", nargs="+", default=default, choices=names, metavar="ROW", help=words)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], metavar="SEED")
    parser.add_argument("--out", type=Path, default=Path("scores.jsonl"), metavar="FILE")
    parser.add_argument("--table", action="store_true", help="of the lines that stand; trains nothing")
    parser.add_argument("more", nargs="*", metavar="ARGUMENT", help="added to every command")
    sys.exit(main(parser.parse_args()))
