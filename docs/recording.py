r"""Records a training that is killed twice, and ends as the same training does undisturbed, as an animated drawing.

    python docs/recording.py                  writes docs/recording.svg
    python docs/recording.py --train FOLDER   the training that is recorded, with a checkpoint after each rollout

The drawing shows what a terminal showed, and when. First the training runs undisturbed. Then a shell starts it until it
succeeds, and a worker and after that the trainer get SIGKILL.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

from rlstructs import Checkpoint, RL_Batcher, Trajectories, WorkerCrashed, gae, transitions

N_STEPS, N_BETWEEN = 61_440, 5  # of the training; rollouts between two lines that it prints
KILLS = {"worker": 20_480, "trainer": 40_960}  # who is killed once this step was printed
COLUMNS, WIDTH, LINE, TOP = 78, 720, 19, 34  # characters, pixels
SHOWN, HELD = 12.0, 5.0  # seconds: of all lines, and of the last picture
COLOURS = {"$": "#8cc4ff", "SIGKILL": "#ff9d6b", "score": "#8fe388"}
EVENT = "--- SIGKILL to the {who}, process {pid} ---"


def train(folder: str) -> None:
    """PPO on CartPole."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    networks = {
        name: torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, n))
        for name, n in (("actor", 2), ("critic", 1))
    }
    optimizer = torch.optim.Adam([each for network in networks.values() for each in network.parameters()], lr=2e-3)
    progress = {"steps": 0, "returns": []}
    settings = {"n_envs": 16, "n_workers": 2, "seed": 0, "run_ahead": 1, "init_worker": introduce}
    with RL_Batcher.make("CartPole-v1", networks["actor"], **settings) as batcher:
        checkpoint = Checkpoint(folder, batcher=batcher, model=networks, optimizer=optimizer, extra=progress)
        if checkpoint.restore() is None:
            batcher.reset()
        print(f"trainer: process {os.getpid()}, at step {progress['steps']:,}", flush=True)
        while progress["steps"] < N_STEPS:
            batcher.execute()
            rollout, _ = batcher.get()
            learn(networks, optimizer, rollout)
            batcher.update(networks["actor"])
            progress["steps"] += int(rollout.lengths.sum())
            progress["returns"] += batcher.episodes()["return"].tolist()
            checkpoint.save(progress["steps"])
            if progress["steps"] % (N_BETWEEN * 2048) == 0:
                latest = progress["returns"][-50:]
                print(f"step {progress['steps']:6,}   return {sum(latest) / len(latest):.1f}", flush=True)
        score = batcher.evaluate(20, seed=1)["return"].mean()
    weights = b"".join(
        each.numpy().tobytes() for network in networks.values() for each in network.state_dict().values()
    )
    print(f"score {score:.1f}, weights {hashlib.sha256(weights).hexdigest()[:32]}", flush=True)


def introduce(index: int) -> None:
    """Says who a worker is."""
    os.write(1, f"worker {index}: process {os.getpid()}\n".encode())  # in one piece: the other may write, too


def learn(networks: dict[str, torch.nn.Module], optimizer: torch.optim.Optimizer, rollout: Trajectories) -> None:
    actor, critic = networks["actor"], networks["critic"]
    with torch.no_grad():
        values, next_values = (critic(rollout[key])[..., 0] for key in ("observation/frame", "_observation/frame"))
    advantages, targets = gae(values=values, next_values=next_values, gamma=0.99, lambda_=0.95, **transitions(rollout))
    rollout.trajectories.set("advantage", (advantages - advantages.mean()) / advantages.std())
    rollout.trajectories.set("target", targets)
    for part in rollout.packed().minibatches(256, epochs=6):
        policy = torch.distributions.Categorical(logits=actor(part["observation/frame"]))
        ratio = (policy.log_prob(part["action/action"]) - part["action/log_prob"]).exp()
        gain = torch.minimum(ratio * part["advantage"], ratio.clamp(0.8, 1.2) * part["advantage"]).mean()
        error = (critic(part["observation/frame"])[..., 0] - part["target"]).square().mean()
        optimizer.zero_grad()
        (0.01 * error - gain - 0.005 * policy.entropy().mean()).backward()
        torch.nn.utils.clip_grad_norm_([*actor.parameters(), *critic.parameters()], 0.5)
        optimizer.step()


class Line(NamedTuple):
    """A line of the terminal, and when it was shown, in seconds."""

    time: float
    text: str


def record() -> list[Line]:
    """Runs the training undisturbed, and then with two kills."""
    lines: list[Line] = []
    train_it = f"{sys.executable} -u {Path(__file__)} --train"
    with tempfile.TemporaryDirectory() as folder:
        for command, shown, kills in (
            (f"{train_it} {folder}/undisturbed", "python train.py undisturbed", {}),
            (f"until {train_it} {folder}/killed; do :; done", "until python train.py killed; do :; done", dict(KILLS)),
        ):
            lines += run(command, shown, kills, lines[-1].time + 1 if lines else 0.0)
    return lines


def run(command: str, shown: str, kills: dict[str, int], start: float) -> list[Line]:
    """Runs a command of the shell, and kills as it is told; returns what the terminal shows."""
    lines, pids, began = [Line(start, f"$ {shown}")], {}, time.perf_counter()
    program = subprocess.Popen(
        ["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    for text in program.stdout:
        lines.append(Line(start + time.perf_counter() - began, as_shown(text)))
        if found := re.match(r"(trainer|worker)[ \d]*: process (\d+)", text):
            pids[found[1]] = int(found[2])
        elif found := re.match(r"step +([\d,]+)", text):
            for who in [who for who, step in kills.items() if int(found[1].replace(",", "")) >= step]:
                del kills[who]
                os.kill(pids[who], signal.SIGKILL)
                now = start + time.perf_counter() - began
                lines.append(Line(now, EVENT.format(who=who, pid=pids[who])))
    assert program.wait() == 0, lines
    return lines


def as_shown(text: str) -> str:
    """A line as a reader of the drawing should see it: without paths of this machine."""
    text = re.sub(r"^bash: line \d+: +(\d+) (\w+) .*", r"bash: \1 \2", text.rstrip())
    return text if len(text) <= COLUMNS else f"{text[: COLUMNS - 3]}..."


def draw(lines: list[Line]) -> str:
    """The drawing: each line appears when it did, in a clock that runs faster, and all begins anew after a while."""
    pace = SHOWN / lines[-1].time
    whole, height = SHOWN + HELD, TOP + LINE * len(lines) + 8
    style, texts = [], []
    for number, line in enumerate(lines):
        share = 100 * line.time * pace / whole
        style.append(f"@keyframes k{number}{{0%,{share:.2f}%{{opacity:0}}{share + 0.01:.2f}%,100%{{opacity:1}}}}"
                     f"#l{number}{{animation:k{number} {whole:.1f}s infinite}}")  # fmt: skip
        colour = next((each for word, each in COLOURS.items() if word in line.text), "#dfe5ec")
        y = TOP + LINE * number + 12
        texts.append(f'<text id="l{number}" x="14" y="{y}" fill="{colour}">{html.escape(line.text)}</text>')
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-size="14" '
        'font-family="ui-monospace, Menlo, Consolas, monospace">',
        "<title>A training whose worker and trainer are killed ends with the same score and the same weights</title>",
        f"<style>text{{white-space:pre}}@media (prefers-reduced-motion:no-preference){{{''.join(style)}}}</style>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#1b222c"/>',
        *(f'<circle cx="{x}" cy="16" r="5" fill="#4a5666"/>' for x in (18, 36, 54)),
        *texts,
        "</svg>\n",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", metavar="FOLDER", help="train, with a checkpoint there")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".svg"))
    arguments = parser.parse_args()
    if arguments.train:
        try:
            train(arguments.train)
        except WorkerCrashed as error:
            raise SystemExit(f"WorkerCrashed: {error}") from None
    else:
        lines = record()
        ends = [line.text for line in lines if line.text.startswith("score")]
        assert len(ends) == 2 and ends[0] == ends[1], ends
        arguments.out.write_text(draw(lines))


if __name__ == "__main__":
    main()
