"""How fast are PufferLib's vectorisation and Sample Factory's sampler? Each runs in a virtual environment of its own.

    python3 -m venv puffer && puffer/bin/pip install -r benchmarks/requirements-pufferlib.txt
    python3 -m venv sf && sf/bin/pip install -r benchmarks/requirements-sample-factory.txt
    python benchmarks/vectorisers.py --pufferlib puffer/bin/python --sample-factory sf/bin/python

All collect from two workers, but for the last two of PufferLib's ways. They act with two layers of 64 units, which give
an action, its log-probability and a value. `RL_Batcher` and Sample Factory collect rollouts of 128 steps; the trainer,
which has the network, steps `SharedVectorEnv` and PufferLib. A share is that of two bare loops over the same
environments, by the same interpreter and its gymnasium. Every contender is a process that measures itself in turn with
the others, and is stopped (SIGSTOP) meanwhile. One whose interpreter is not named is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gymnasium
import torch

N_WORKERS, N_TIMESTEPS = 2, 128
Run = Callable[[float], float]  # seconds -> steps/s


class Row(NamedTuple):
    """An environment, and how many of it each worker has."""

    env_id: str
    n_envs: int

    @property
    def n_all(self) -> int:
        return N_WORKERS * self.n_envs

    def make_env(self, *_: Any, **__: Any) -> gymnasium.Env[Any, Any]:
        # Sample Factory's gymnasium has only the version before.
        has_5 = "HalfCheetah-v5" in gymnasium.registry
        return gymnasium.make(self.env_id if has_5 else self.env_id.replace("v5", "v4"))


ROWS = {"cartpole": Row("CartPole-v1", 64), "halfcheetah": Row("HalfCheetah-v5", 8)}


class ActorCritic(torch.nn.Module):
    """Returns actions, their log-probabilities and values."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        with contextlib.closing(row.make_env()) as env:
            self.is_discrete = isinstance(env.action_space, gymnasium.spaces.Discrete)
            n_in = env.observation_space.shape[0]
            n_out = int(env.action_space.n) if self.is_discrete else env.action_space.shape[0]
        hidden = torch.nn.Linear(n_in, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh()
        self.hidden, self.actor, self.critic = (
            torch.nn.Sequential(*hidden),
            torch.nn.Linear(64, n_out),
            torch.nn.Linear(64, 1),
        )

    @torch.no_grad()
    def forward(self, frame: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.hidden(frame.float())
        outputs, value = self.actor(hidden), self.critic(hidden)[:, 0]
        if self.is_discrete:
            log_probs = outputs.log_softmax(-1)
            action = torch.multinomial(log_probs.exp(), 1)
            return action[:, 0], log_probs.gather(1, action)[:, 0], value
        noise = torch.randn_like(outputs)
        return (outputs + noise).clamp(-1, 1), -0.5 * (noise.square() + 1.8379).sum(-1), value


def timed(step: Callable[[], int], seconds: float) -> float:
    """Steps/s of a function that takes steps and returns how many; the first call is not counted."""
    step()
    steps, start = 0, time.perf_counter()
    while (now := time.perf_counter()) - start < seconds:
        steps += step()
    return steps / (now - start)


# --- the contenders, each in a process of its own ------------------------------------------------


def run_bare_loop(row: Row, barrier: Any, requests: Any) -> None:
    envs = [row.make_env() for _ in range(row.n_envs)]
    for env in envs:
        env.reset(seed=0)
    actions = [[env.action_space.sample() for env in envs] for _ in range(257)]
    turns = iter(range(10**9))

    def step() -> int:
        for env, action in zip(envs, actions[next(turns) % 257]):  # noqa: B905
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
        return row.n_envs

    while True:
        seconds = requests.recv()
        barrier.wait()
        requests.send(timed(step, seconds))


@contextlib.contextmanager
def limit(row: Row) -> Iterator[Run]:
    barrier, pipes = multiprocessing.Barrier(N_WORKERS), []
    for _ in range(N_WORKERS):
        ours, theirs = multiprocessing.Pipe()
        multiprocessing.Process(target=run_bare_loop, args=(row, barrier, theirs), daemon=True).start()
        pipes.append(ours)

    def run(seconds: float) -> float:
        for pipe in pipes:
            pipe.send(seconds)
        return sum(pipe.recv() for pipe in pipes)

    yield run


@contextlib.contextmanager
def batcher(row: Row) -> Iterator[Run]:
    from rlstructs import DictTensor, GymEnvInf, RL_Agent, RL_Batcher

    class Agent(RL_Agent):  # type: ignore[misc]
        def __init__(self) -> None:
            self.network = ActorCritic(row)

        def initial_state(self, agent_info: Any, B: int) -> Any:
            return DictTensor()

        def __call__(self, state: Any, observation: Any, agent_info: Any, history: Any = None) -> Any:
            named = zip(("action", "log_prob", "value"), self.network(observation["frame"]))  # noqa: B905
            return DictTensor(dict(named)), state

    def create_env(seed: int) -> Any:
        return GymEnvInf([row.make_env() for _ in range(row.n_envs)], seed)

    with RL_Batcher(N_TIMESTEPS, Agent, {}, create_env, {}, N_WORKERS, 0) as collecting:
        collecting.reset()

        def step() -> int:
            collecting.execute()
            collecting.get()
            return row.n_all * N_TIMESTEPS

        yield lambda seconds: timed(step, seconds)


@contextlib.contextmanager
def shared_vector(row: Row) -> Iterator[Run]:
    from rlstructs import SharedVectorEnv

    network = ActorCritic(row)
    with SharedVectorEnv([row.make_env] * row.n_all, N_WORKERS) as env:
        observation, _ = env.reset(seed=0)
        kept: list[Any] = []

        def step() -> int:
            nonlocal observation
            if len(kept) == N_TIMESTEPS:
                kept.clear()
            acted = network(torch.as_tensor(observation))
            kept.append((observation, acted))
            observation, *_ = env.step(acted[0].numpy())
            return row.n_all

        yield lambda seconds: timed(step, seconds)


@contextlib.contextmanager
def pufferlib(row: Row, n_workers: int = N_WORKERS, n_batches: int = 1) -> Iterator[Run]:
    """Steps all environments at once, or in two batches one worker's while the other steps; or in no workers."""
    from pufferlib import vector
    from pufferlib.emulation import GymnasiumPufferEnv
    from pufferlib.pufferlib import EpisodeStats

    def make_env(buf: Any = None, seed: int = 0) -> Any:
        env = EpisodeStats(row.make_env())  # as its trainer has them: no infos but at the ends of episodes
        return GymnasiumPufferEnv(env, buf=buf, seed=seed)

    network = ActorCritic(row)
    settings: dict[str, Any] = {"backend": vector.Serial}
    if n_workers:
        settings = {"num_workers": n_workers, "batch_size": row.n_all // n_batches, "overwork": True}
        settings["backend"] = vector.Multiprocessing
    envs = vector.make(make_env, num_envs=row.n_all, **settings)
    envs.async_reset(0)
    kept: list[Any] = []

    def step() -> int:
        if len(kept) == N_TIMESTEPS * n_batches:
            kept.clear()
        observation, reward, terminated, truncated, *_ = envs.recv()
        acted = network(torch.as_tensor(observation))
        kept.append((observation.copy(), reward.copy(), terminated.copy(), truncated.copy(), acted))
        envs.send(acted[0].numpy())
        return len(observation)

    yield lambda seconds: timed(step, seconds)


@contextlib.contextmanager
def sample_factory(row: Row) -> Iterator[Run]:
    from sample_factory.algo.sampling.simplified_sampling_api import SyncSamplingAPI
    from sample_factory.algo.utils.env_info import obtain_env_info_in_a_separate_process
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
    from sample_factory.envs.env_utils import register_env

    register_env("row", row.make_env)
    with tempfile.TemporaryDirectory() as folder:
        settings = ["--env=row", "--experiment=row", f"--train_dir={folder}", "--device=cpu", "--use_rnn=False",
                    f"--num_workers={N_WORKERS}", f"--num_envs_per_worker={row.n_envs}", f"--rollout={N_TIMESTEPS}",
                    "--encoder_mlp_layers", "64", "64", "--nonlinearity=tanh", "--normalize_input=False",
                    "--adaptive_stddev=False", "--decorrelate_envs_on_one_worker=False"]  # fmt: skip
        cfg = parse_full_cfg(parse_sf_args(settings)[0], settings)
        sampler = SyncSamplingAPI(cfg, obtain_env_info_in_a_separate_process(cfg))
        sampler.start()

        def run(seconds: float) -> float:
            timed(lambda: sampler.get_trajectories_sync()["rewards"].numel(), 0.5)  # collected before the turn
            return timed(lambda: sampler.get_trajectories_sync()["rewards"].numel(), seconds)

        yield run


CONTENDERS: dict[str, Callable[[Row], Any]] = {
    "limit": limit,
    "RL_Batcher": batcher,
    "SharedVectorEnv": shared_vector,
    "PufferLib": pufferlib,
    "PufferLib, two batches": functools.partial(pufferlib, n_batches=N_WORKERS),
    "PufferLib, one worker": functools.partial(pufferlib, n_workers=1),
    "PufferLib, serial": functools.partial(pufferlib, n_workers=0),
    "Sample Factory": sample_factory,
}
LIBRARIES = {
    "rlstructs": ["RL_Batcher", "SharedVectorEnv"],
    "PufferLib": [name for name in CONTENDERS if name.startswith("PufferLib")],
    "Sample Factory": ["Sample Factory"],
}


def measure_on_request(row: Row, name: str) -> None:
    """Answers each line of seconds with steps/s, until there is no other."""
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the contender prints is no answer
    with CONTENDERS[name](row) as run:
        print("ready", file=answers)
        for line in sys.stdin:
            print(run(float(line)), file=answers)


# --- the turns -----------------------------------------------------------------------------------


class Contender:
    """A process, and those that it starts, which runs only while it is measured."""

    def __init__(self, python: str, row_name: str, name: str) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [python, __file__, "--rows", row_name, "--measure", name]
        pipe = subprocess.PIPE
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True, bufsize=1,
                                         env=environment, start_new_session=True)  # fmt: skip
        self._answer()
        self._signal(signal.SIGSTOP)

    def run(self, seconds: float) -> float:
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        speed = float(self._answer())
        self._signal(signal.SIGSTOP)
        return speed

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return line
        self._errors.seek(0)
        raise RuntimeError(f"{self._process.args}: {self._errors.read()[-2000:]}")

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)


def show(row_name: str, pythons: dict[str, str], repeats: int, seconds: float) -> None:
    """Prints medians of steps/s, and of the shares of the bare loops of the same turn."""
    speeds: dict[tuple[str, str], list[float]] = {}
    with contextlib.ExitStack() as stack:
        contenders = {
            (library, name): stack.enter_context(contextlib.closing(Contender(python, row_name, name)))
            for library, python in pythons.items()
            for name in ("limit", *LIBRARIES[library])
        }
        for _ in range(repeats):
            for key, contender in contenders.items():
                speeds.setdefault(key, []).append(contender.run(seconds))
    for (library, name), values in speeds.items():
        share = statistics.median(a / b for a, b in zip(values, speeds[library, "limit"], strict=True))
        print(f"{row_name:12} {library:15} {name:24} {statistics.median(values):>9,.0f} ({share:.2f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    parser.add_argument("--pufferlib", help="the interpreter of its environment")
    parser.add_argument("--sample-factory", help="the interpreter of its environment")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure_on_request(ROWS[arguments.rows[0]], arguments.measure)
        return
    pythons = {
        "rlstructs": sys.executable,
        "PufferLib": arguments.pufferlib,
        "Sample Factory": arguments.sample_factory,
    }
    print(f"{os.cpu_count()} cores, {N_WORKERS} workers; steps/s (share of the bare loops of this interpreter)")
    for row_name in arguments.rows:
        show(
            row_name,
            {library: python for library, python in pythons.items() if python},
            arguments.repeats,
            arguments.seconds,
        )


if __name__ == "__main__":
    main()
