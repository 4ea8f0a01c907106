"""How much memory it takes to write rollouts to a dataset of Minari and to a folder, beside how much is written.

    python benchmarks/datasets.py

For Pendulum, and for an environment whose observations are dicts of 10 kB, two workers collect 100,000 steps, which are
written while they come and read again. Growth is by how much the peak of resident memory exceeds that before the first
rollout is written. Each episode that is read has the digest of the episode that `get` gave.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from pathlib import Path

import gymnasium
import minari
import numpy as np
from gymnasium import spaces

from rlstructs import RL_Batcher, load_rollouts, save_rollouts
from rlstructs.integrations.minari import to_minari

KEYS = ("action/action", "_observation/reward", "_observation/frame", "_observation/image", "_observation/state")


class Large(gymnasium.Env):
    """Observations of 10 kB of which every byte changes; episodes of 1,000 steps."""

    observation_space = spaces.Dict(
        {"image": spaces.Box(0, 255, (84, 84), np.uint8), "state": spaces.Box(-np.inf, np.inf, (736,), np.float32)}
    )
    action_space = spaces.Box(-1, 1, (4,), np.float32)

    def _observe(self):
        image = np.frombuffer(self.np_random.bytes(84 * 84), np.uint8).reshape(84, 84)
        return {"image": image, "state": self.np_random.standard_normal(736, np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action):
        self.steps += 1
        return self._observe(), float(action.sum()), False, self.steps == 1000, {}


def digest(columns):
    """The digest of an episode: key -> array or hash of its steps."""
    hashes = [found if hasattr(found, "digest") else hashlib.sha256(found) for _, found in sorted(columns.items())]
    return hashlib.sha256(b"".join(each.digest() for each in hashes)).hexdigest()


class Watch:
    """Passes rollouts on, and takes digests of their episodes and the growth of memory."""

    def __init__(self):
        self.digests, self._going = Counter(), {}

    def follow(self, rollouts):
        for number, rollout in enumerate(rollouts):
            if number == 0:
                Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
                self._before = peak()
            self._add(rollout)
            yield rollout
            del rollout
        self.digests.update(digest(columns) for columns in self._going.values())

    def growth(self):
        return peak() - self._before

    def _add(self, rollout):
        steps = rollout.trajectories
        for row, env in enumerate(rollout.info["env_index"].tolist()):
            ends = [*(steps["_observation/done"][row].nonzero().flatten() + 1).tolist(), int(rollout.lengths[row])]
            for start, stop in zip([0, *ends], ends, strict=False):
                for key in KEYS if stop > start else ():
                    if key in steps:
                        columns = self._going.setdefault(env, defaultdict(hashlib.sha256))
                        columns[key].update(steps[key][row, start:stop].numpy())
                if stop > start and steps["_observation/done"][row, stop - 1]:
                    self.digests[digest(self._going.pop(env))] += 1


def peak():
    """The peak of resident memory, bytes."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def episode_digest(episode):
    """The digest of an episode that Minari has read."""
    seen = episode.observations if isinstance(episode.observations, dict) else {"frame": episode.observations}
    following = {f"_observation/{key}": np.ascontiguousarray(array[1:]) for key, array in seen.items()}
    return digest({**following, "action/action": episode.actions, "_observation/reward": episode.rewards})


def write_dataset(name, env, rollouts, folder):
    """Writes a dataset; returns a function that reads the digests of its episodes."""
    os.environ["MINARI_DATASETS_PATH"] = str(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Minari asks for an author and so on
        to_minari(f"{name}-v0", rollouts, env)
    return lambda: Counter(map(episode_digest, minari.load_dataset(f"{name}-v0").iterate_episodes()))


def write_folder(name, env, rollouts, folder):
    """Writes a folder; returns a function that reads the digests of its episodes."""
    save_rollouts(folder / name, rollouts)

    def read():
        watch = Watch()
        for part in load_rollouts(folder / name):
            watch._add(part)
        watch.digests.update(digest(columns) for columns in watch._going.values())
        return watch.digests

    return read


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--folder", help="where to write; default: a temporary one")
    options = parser.parse_args()
    print(f"{'written':24} {'steps':>9} {'episodes':>8} {'MB':>8} {'growth, MB':>10} {'steps/s':>8}  bytes")
    for name, make in (("Pendulum", lambda: gymnasium.make("Pendulum-v1")), ("Large", Large)):
        for write in (write_dataset, write_folder):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                watch, start = Watch(), time.perf_counter()
                with RL_Batcher.make(make, n_envs=8, n_workers=2, n_timesteps=100, seed=0) as batcher:
                    read = write(name, make(), watch.follow(batcher.rollouts(n_steps=options.steps)), Path(folder))
                growth, seconds = watch.growth() / 1e6, time.perf_counter() - start
                nbytes = sum(path.stat().st_size for path in Path(folder).rglob("*")) / 1e6
                verdict = "equal" if read() == watch.digests else "DIFFERENT"
                n = watch.digests.total()
                row = f"{name + ', ' + write.__name__.removeprefix('write_'):24} {options.steps:9,} {n:8,}"
                print(f"{row} {nbytes:8,.1f} {growth:10,.1f} {options.steps / seconds:8,.0f}  {verdict}", flush=True)


if __name__ == "__main__":
    main()
