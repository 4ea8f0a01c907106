"""How much does a replay of frames take, and what does it cost to compress them?

    python benchmarks/frames.py [--steps 100000] [--games Pong Breakout MsPacman] [--parts bytes draws collecting]
    python benchmarks/frames.py --games CartPole-v1     # 64x64x3 renderings

Parallel workers play Atari games, 84x84 grey frames, or environments of gymnasium that are rendered; what acts holds a
random action for a random time, so that things move. Each contender is a process of its own that reads the same
rollouts and keeps them for stacks of four and their next observations: rlstructs raw and compressed, in memory and on
the disk, and what is installed of torchrl's `CompressedListStorage` and `sb3-extra-buffers`, which keep a stack before
and one after each step. Bytes are what the process holds more than before, by step, and what its files take; times are
those of its processors. Per step the figures are the same from some ten thousand steps on, but for what 8 bytes of
bookkeeping and a segment of 64 kB of each environment add.

Then, for the first game: a draw of raw stacks beside `numpy.take` of as many bytes, and what collecting into a
compressed memory costs, fed by two workers, beside a raw one, in turns.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import torch

from rlstructs import DictTensor, GymEnvInf, RL_Agent, RL_Batcher, Trajectories
from rlstructs.replay import VectorReplayBuffer

STACK, BATCH = 4, 32
N_WORKERS, N_ENVS, N_TIMESTEPS = 2, 4, 64
N_ALL = N_WORKERS * N_ENVS
# Steps for which an action is held, at most.
LONGEST = 16
SETTINGS = {"rlstructs": None, "rlstructs zstd:1": "zstd:1", "rlstructs zstd": "zstd",
            "rlstructs on disk": None, "rlstructs on disk, zstd": "zstd"}  # fmt: skip
PARTS = ["bytes", "draws", "collecting"]
# The bytes of a step at most, of rlstructs with zstd.
MUST = {"Pong": 600, "Breakout": 700, "MsPacman": 1600}
METHODS = {"sb3-extra-buffers rle-jit": "rle-jit", "sb3-extra-buffers zstd3": "zstd3"}


class Mover(RL_Agent):
    """Holds a random action for a random time."""

    def __init__(self, n_actions: int) -> None:
        self._n_actions = n_actions

    def initial_state(self, agent_info: Any, B: int) -> DictTensor:
        return DictTensor({"action": torch.zeros(B, dtype=torch.int64), "left": torch.zeros(B, dtype=torch.int64)})

    def __call__(self, state: Any, observation: Any, agent_info: Any, history: Any = None) -> Any:
        left, is_over = state["left"] - 1, state["left"] <= 0
        action = torch.where(is_over, torch.randint_like(left, self._n_actions), state["action"])
        left = torch.where(is_over, torch.randint_like(left, LONGEST), left)
        return DictTensor({"action": action}), DictTensor({"action": action, "left": left})


def make_rendered(env_id: str) -> gymnasium.Env:
    env = gymnasium.wrappers.AddRenderObservation(gymnasium.make(env_id, render_mode="rgb_array"))
    return gymnasium.wrappers.ResizeObservation(env, (64, 64))


def create_env(game: str, n_envs: int, seed: int) -> GymEnvInf:
    if "-v" in game:
        return GymEnvInf([make_rendered(game) for _ in range(n_envs)], seed)
    import ale_py

    gymnasium.register_envs(ale_py)
    raw = [gymnasium.make(f"ALE/{game}-v5", frameskip=1) for _ in range(n_envs)]
    return GymEnvInf([gymnasium.wrappers.AtariPreprocessing(env) for env in raw], seed)


def create_batcher(game: str) -> RL_Batcher:
    env = create_env(game, 1, 0)
    n_actions = int(env.action_space.n)
    env.close()
    return RL_Batcher(
        N_TIMESTEPS, Mover, {"n_actions": n_actions}, create_env, {"game": game, "n_envs": N_ENVS}, N_WORKERS, 0
    )


def play(game: str, n_steps: int, folder: Path) -> None:
    """Writes rollouts of so many steps, a file each."""
    folder.mkdir(parents=True)
    with create_batcher(game) as batcher:
        batcher.reset()
        for number in range(-(-n_steps // (N_ALL * N_TIMESTEPS))):
            batcher.execute()
            batcher.get()[0].save(folder / f"{number:05}.npz", compress=True)


def rollouts(folder: Path) -> Iterator[Trajectories]:
    for path in sorted(folder.glob("*.npz")):
        yield Trajectories.load(path)


def stacked(folder: Path) -> Iterator[dict[str, np.ndarray]]:
    """The steps of all environments, one after another, with stacks before and after each."""
    stacks = None
    for rollout in rollouts(folder):
        steps = {key: tensor.numpy() for key, tensor in rollout.trajectories.items()}
        for t in range(N_TIMESTEPS):
            frame, after = steps["observation/frame"][:, t], steps["_observation/frame"][:, t]
            stacks = np.repeat(frame[:, None], STACK, axis=1) if stacks is None else stacks
            following = np.concatenate([stacks[:, 1:], after[:, None]], axis=1)
            done = steps["_observation/terminated"][:, t] | steps["_observation/truncated"][:, t]
            yield {"obs": stacks, "next": following, "action": steps["action/action"][:, t],
                   "reward": steps["_observation/reward"][:, t], "done": done}  # fmt: skip
            begins = steps["observation/frame"][:, t + 1] if t + 1 < N_TIMESTEPS else after
            stacks = np.where(
                done.reshape(-1, *[1] * (stacks.ndim - 1)), np.repeat(begins[:, None], STACK, axis=1), following
            )


def of_rlstructs(name: str, n: int, folder: Path) -> tuple[Any, Any, Callable[[Any], Any]]:
    path = folder if "disk" in name else None
    buffer = VectorReplayBuffer(n, N_ALL, stack_num=STACK, compression=SETTINGS[name], path=path)
    return buffer, rollouts, buffer.add_trajectories


def of_torchrl(name: str, n: int, folder: Path) -> tuple[Any, Callable[[Path], Iterator[Any]], Callable[[Any], Any]]:
    from tensordict import TensorDict
    from torchrl.data import CompressedListStorage, ReplayBuffer

    buffer = ReplayBuffer(storage=CompressedListStorage(n), batch_size=BATCH)

    def add(step: dict[str, np.ndarray]) -> None:
        buffer.extend(TensorDict(step, batch_size=[N_ALL]))  # flat, as what is nested would not be compressed

    return buffer, stacked, add


def of_extra_buffers(
    name: str, n: int, folder: Path
) -> tuple[Any, Callable[[Path], Iterator[Any]], Callable[[Any], Any]]:
    from sb3_extra_buffers.compressed import CompressedReplayBuffer, find_buffer_dtypes

    frames = gymnasium.spaces.Box(0, 255, (STACK, *shape_of(folder)), np.uint8)
    dtypes = find_buffer_dtypes(frames.shape, np.uint8, METHODS[name])
    buffer = CompressedReplayBuffer(n, frames, gymnasium.spaces.Discrete(18), "cpu", N_ALL, dtypes=dtypes,
                                    compression_method=METHODS[name], handle_timeout_termination=False)  # fmt: skip
    infos = [{} for _ in range(N_ALL)]

    def add(step: dict[str, np.ndarray]) -> None:
        buffer.add(step["obs"], step["next"], step["action"][:, None], step["reward"], step["done"], infos)

    return buffer, stacked, add


CONTENDERS: dict[str, Any] = dict.fromkeys(SETTINGS, of_rlstructs)
if importlib.util.find_spec("torchrl"):
    CONTENDERS["torchrl CompressedListStorage"] = of_torchrl
if importlib.util.find_spec("sb3_extra_buffers"):
    CONTENDERS |= dict.fromkeys(METHODS, of_extra_buffers)


def resident() -> int:
    """The bytes of the process's own memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    info = psutil.Process().memory_info()
    return int(info.rss - info.shared)


def shape_of(folder: Path) -> tuple[int, ...]:
    """The shape of the frames in a folder, or in the one around it."""
    first = min([*folder.glob("*.npz"), *folder.parent.glob("*.npz")])
    return tuple(Trajectories.load(first)["observation/frame"].shape[2:])


def contend(name: str, folder: Path, repeats: int) -> dict[str, float]:
    """Keeps the rollouts of a folder: bytes and microseconds of a step, microseconds of a draw."""
    torch.set_num_threads(1)
    n = len(list(folder.glob("*.npz"))) * N_ALL * N_TIMESTEPS
    with tempfile.TemporaryDirectory(dir=folder) as few, tempfile.TemporaryDirectory(dir=folder) as all_rows:
        return keep(name, folder, repeats, n, (Path(few), Path(all_rows)))


def keep(name: str, folder: Path, repeats: int, n: int, rows: tuple[Path, Path]) -> dict[str, float]:
    buffer, read, add = CONTENDERS[name](name, N_ALL * N_TIMESTEPS, rows[0])
    for item in itertools.islice(read(folder), N_TIMESTEPS):  # what is taken once
        add(item)
    buffer.sample(BATCH)
    del buffer, add, item
    before = resident()
    buffer, read, add = CONTENDERS[name](name, n, rows[1])
    spent = 0.0
    for item in read(folder):
        started = time.process_time()
        add(item)
        spent += time.process_time() - started
    del item
    nbytes = resident() - before
    on_disk = sum(512 * file.stat().st_blocks for file in rows[1].iterdir())
    draw = timed(lambda: buffer.sample(BATCH), repeats)
    return {"bytes": nbytes / n, "disk": on_disk / n, "add": spent / n * 1e6, "draw": draw}


def timed(call: Callable[[], Any], repeats: int, seconds: float = 0.1) -> float:
    """Microseconds of a processor, the median of some repetitions."""
    found = []
    call()
    for _ in range(repeats):
        n, started = 0, time.process_time()
        while (now := time.process_time()) < started + seconds:
            call()
            n += 1
        found.append((now - started) / n * 1e6)
    return statistics.median(found)


def compare(game: str, folder: Path, repeats: int) -> None:
    n = len(list(folder.glob("*.npz"))) * N_ALL * N_TIMESTEPS
    frame = math.prod(shape_of(folder))
    print(f"{game}, {n:,} steps; stacks before and after each step, raw, would take {2 * STACK * frame:,} bytes a step")
    for name in CONTENDERS:
        command = [sys.executable, __file__, "--contender", name, "--folder", str(folder), "--repeats", str(repeats)]
        output = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
        found = json.loads(output.splitlines()[-1])  # others print, too
        most = MUST.get(game) if name == "rlstructs zstd" else 1.1 * frame if name == "rlstructs" else None
        verdict = "" if most is None else f", must {most:,.0f}: {'ok' if found['bytes'] <= most else 'TOO MUCH'}"
        disk = f", {found['disk']:,.0f} on the disk" if found["disk"] else ""
        print(f"    {name:<32} {found['bytes']:>8,.0f} bytes a step{disk}, add {found['add']:>6,.0f} us a step, "
              f"draw of {BATCH} {found['draw']:>7,.0f} us{verdict}", flush=True)  # fmt: skip


def compare_draws(folder: Path, repeats: int) -> None:
    """Draws of raw stacks beside `numpy.take` of as many bytes."""
    torch.set_num_threads(1)
    n = len(list(folder.glob("*.npz"))) * N_ALL * N_TIMESTEPS
    buffer, read, add = of_rlstructs("rlstructs", n, folder)
    for rollout in read(folder):
        add(rollout)
    frames, rng = np.random.default_rng(0).integers(0, 255, (n, 84, 84), np.uint8), np.random.default_rng(1)
    rows = itertools.cycle([rng.integers(n - STACK, size=BATCH)[:, None] + np.arange(STACK) for _ in range(300)])
    for what, call, n_takes in (
        (f"{BATCH} stacks of {STACK}", lambda: buffer.get(buffer.sample_indices(BATCH), "obs"), 1),
        (f"a sample of {BATCH}, stacks of observations and next ones", lambda: buffer.sample(BATCH), 2),
    ):
        took = timed(call, repeats)
        bare = timed(lambda n_takes=n_takes: [np.take(frames, next(rows), axis=0) for _ in range(n_takes)], repeats)
        print(f"{what}: {took:.0f} us, numpy.take of as many bytes {bare:.0f} us, {took / bare:.2f} times, must 2: "
              f"{'ok' if took <= 2 * bare else 'TOO SLOW'}", flush=True)  # fmt: skip


def compare_collecting(game: str, repeats: int) -> None:
    """Collecting into raw and into compressed memories, which two workers feed, in turns: seconds of all processors."""
    with create_batcher(game) as batcher:
        batcher.reset()
        settings = (None, "zstd:1", "zstd")
        buffers = [VectorReplayBuffer(40_000, N_ALL, stack_num=STACK, ignore_obs_next=True, compression=each)
                   for each in settings]  # fmt: skip
        spent: list[list[float]] = [[] for _ in settings]
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        for turn in range(repeats + 1):
            for buffer, found in zip(buffers, spent, strict=True):
                batcher.feed(buffer)
                started = sum(sum(each.cpu_times()[:2]) for each in processes)
                for _ in range(4):
                    batcher.execute()
                    batcher.wait()
                found += [sum(sum(each.cpu_times()[:2]) for each in processes) - started] * (turn > 0)
    raw = statistics.median(spent[0])
    for setting, found in zip(settings[1:], spent[1:], strict=True):
        ratio = statistics.median(raw / each for raw, each in zip(spent[0], found, strict=True))
        print(f"collecting {game} into {setting}, fed by {N_WORKERS} workers: {ratio:.2f} of the speed of a raw memory "
              f"({raw / (4 * N_ALL * N_TIMESTEPS) * 1e6:.0f} us a step), must 0.93: "
              f"{'ok' if ratio >= 0.93 else 'TOO SLOW'}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--games", nargs="+", default=["Pong", "Breakout", "MsPacman"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--folder", type=Path, help="of rollouts, a folder for each game; those that are there are read"
    )
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender is not None:
        print(json.dumps(contend(arguments.contender, arguments.folder, arguments.repeats)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if arguments.folder is None else arguments.folder
        for game in arguments.games:
            if not (folder / game).exists():
                play(game, arguments.steps, folder / game)
            if "bytes" in arguments.parts:
                compare(game, folder / game, arguments.repeats)
        if "draws" in arguments.parts:
            compare_draws(folder / arguments.games[0], arguments.repeats)
        if "collecting" in arguments.parts:
            compare_collecting(arguments.games[0], arguments.repeats)


if __name__ == "__main__":
    main()
