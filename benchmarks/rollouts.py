"""How fast are rollouts? Steps/s of rlstructs as a share of the limit, beside the peers that are installed.

    python benchmarks/rollouts.py [--rows cartpole-64 ...] [--repeats 15] [--seconds 0.5] [--profile]

The limit is what as many bare environment loops as workers reach: the same environments, stepped with
actions that were drawn before, and nothing else. Every contender of a row runs in turn, `--repeats` times
over, in one process tree; the table shows medians. Peers that start a process for each environment get at most 16 of
them, with which they are fastest, all others as many as rlstructs. `--profile` says where a worker's time goes instead,
`--contract` what it costs that workers are watched and counted, and `--trace` what a timeline costs while it is
recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import os
import runpy
import statistics
import tempfile
import time
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from rlstructs import DictTensor, GymEnvInf, GymVectorEnv, RandomAgent, RL_Agent, RL_Batcher, VecEnv
from rlstructs.rollout import job as rollout_job
from rlstructs.trace.lane import Lane
from rlstructs.workers import WorkerPool, process

Run = Callable[[float], float]  # seconds -> steps/s
CHEETAHS = Path(__file__).parent.parent / "examples/mujoco_rollout.py"
# Seconds. The two of a pair take turns so short that a noisy neighbour disturbs both alike.
TURN = 0.1


@dataclass(frozen=True)
class Task:
    """One row: an environment, how many of it, and what acts.

    Attributes:
        must, aim: shares of the limit.
        native: whether the environments are one that is vectorised itself, which is what the limit steps.
        beats: whether they are, and the limit steps gymnasium's single environments all the same.
        policy: whether a network acts, rather than random actions.
        makes: whether that is a network given to `RL_Batcher.make`, which draws and weighs its actions.
    """

    name: str
    env_id: str
    n_workers: int
    n_envs: int
    n_timesteps: int
    must: float
    aim: float
    policy: bool = False
    envpool_id: str = ""
    native: bool = False
    beats: bool = False
    makes: bool = False

    @property
    def n_all(self) -> int:
        return self.n_workers * self.n_envs


TASKS = [
    Task("cartpole-64", "CartPole-v1", 2, 64, 128, 0.70, 0.90, envpool_id="CartPole-v1"),
    Task("cartpole-8", "CartPole-v1", 2, 8, 128, 0.50, 0.75, envpool_id="CartPole-v1"),
    Task("cartpole-64-policy", "CartPole-v1", 2, 64, 128, 0.60, 0.75, policy=True, envpool_id="CartPole-v1"),
    Task("cartpole-8-make", "CartPole-v1", 2, 8, 128, 0.18, 0.25, policy=True, makes=True),
    Task("halfcheetah-8", "HalfCheetah-v5", 2, 8, 128, 0.80, 0.93, envpool_id="HalfCheetah-v4"),
    Task("cartpole-native-1024", "CartPole-v1", 2, 1024, 128, 0.60, 0.75, envpool_id="CartPole-v1", native=True),
    Task("pong-4", "ALE/Pong-v5", 2, 4, 64, 0.85, 0.95, envpool_id="Pong-v5"),
    Task("halfcheetah-rollout-8", "HalfCheetah-v5", 2, 8, 128, 1.20, 1.30, beats=True, envpool_id="HalfCheetah-v4"),
    Task("pong-native-4", "ALE/Pong-v5", 2, 4, 64, 1.30, 1.40, beats=True, envpool_id="Pong-v5"),
]


def is_playable(env_id: str) -> bool:
    """Whether the packages are installed that the environment needs."""
    packages = {"ALE/Pong-v5": ("ale_py", "cv2"), "HalfCheetah-v5": ("mujoco",)}.get(env_id, ())
    return all(importlib.util.find_spec(package) for package in packages)


def make_env(env_id: str) -> gymnasium.Env[Any, Any]:
    """One environment, as every contender but envpool steps it."""
    if not env_id.startswith("ALE/"):
        return gymnasium.make(env_id)
    import ale_py

    gymnasium.register_envs(ale_py)
    raw = gymnasium.make(env_id, frameskip=1)
    return gymnasium.wrappers.FrameStackObservation(gymnasium.wrappers.AtariPreprocessing(raw), 4)


def make_native(env_id: str, n_envs: int) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    settings: dict[str, Any] = {}
    if env_id.startswith("ALE/"):  # what `make_env` makes of single ones, in one thread
        import ale_py

        gymnasium.register_envs(ale_py)
        settings = {"num_threads": 1, "repeat_action_probability": 0.25, "reward_clipping": False,
                    "use_fire_reset": False}  # fmt: skip
    return gymnasium.make_vec(env_id, num_envs=n_envs, vectorization_mode="vector_entry_point", **settings)


def create_env(env_id: str, n_envs: int, native: bool, seed: int) -> VecEnv:
    if native and env_id.startswith("HalfCheetah"):
        cheetahs: Callable[[int, int], VecEnv] = runpy.run_path(str(CHEETAHS))["HalfCheetahs"]
        return cheetahs(n_envs, seed)
    if native:
        return GymVectorEnv(make_native(env_id, n_envs), seed)
    return GymEnvInf([make_env(env_id) for _ in range(n_envs)], seed)


class Policy(RL_Agent):
    """A 64x64 tanh network whose categorical distribution is sampled (Gumbel-max)."""

    def __init__(self) -> None:
        self.network = torch.nn.Sequential(
            torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2)
        )

    def act(self, frame: torch.Tensor) -> torch.Tensor:
        logits = self.network(frame)
        return (logits - torch.empty_like(logits).exponential_().log_()).argmax(-1)

    def initial_state(self, agent_info: DictTensor, B: int) -> DictTensor:
        return DictTensor()

    def __call__(self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: Any = None) -> Any:
        return DictTensor({"action": self.act(observation["frame"])}), state


def create_agent(env_id: str, policy: bool) -> RL_Agent:
    if policy:
        return Policy()
    with contextlib.closing(make_env(env_id)) as env:
        return RandomAgent(env.action_space)


def actor(task: Task, n_envs: int) -> Callable[[Any], np.ndarray]:
    """What acts in the trainer, for the peers that step environments from there."""
    if task.policy:
        policy = Policy()

        def act(frame: Any) -> np.ndarray:
            with torch.no_grad():
                return policy.act(torch.as_tensor(np.asarray(frame))).numpy()

        return act
    with contextlib.closing(make_env(task.env_id)) as env:
        agent = RandomAgent(env.action_space)
    nothing = DictTensor()
    rows = DictTensor({"reward": torch.zeros(n_envs)})
    return lambda _: agent(nothing, rows, nothing)[0]["action"].numpy()


def timed(step: Callable[[], int], seconds: float) -> float:
    """Steps/s of a function that takes steps and says how many."""
    steps, start = step(), time.perf_counter()
    steps = 0
    while (now := time.perf_counter()) - start < seconds:
        steps += step()
    return steps / (now - start)


# --- the limit, and ours -------------------------------------------------------------------------


class BareLoop:
    """The same environments and nothing else."""

    def __init__(self, index: int, env_id: str, n_envs: int) -> None:
        self.envs = [make_env(env_id) for _ in range(n_envs)]
        for k, env in enumerate(self.envs):
            env.action_space.seed(index * n_envs + k)
            env.reset(seed=index * n_envs + k)
        self.actions = [[env.action_space.sample() for env in self.envs] for _ in range(257)]
        if isinstance(self.envs[0].action_space, gymnasium.spaces.Discrete):
            self.actions = [[int(action) for action in row] for row in self.actions]

    def run(self, seconds: float) -> float:
        rounds = iter(range(10**9))

        def step() -> int:
            for env, action in zip(self.envs, self.actions[next(rounds) % 257], strict=True):
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()
            return len(self.envs)

        return timed(step, seconds)


class NativeLoop:
    """A vectorised environment and nothing else."""

    def __init__(self, index: int, env_id: str, n_envs: int) -> None:
        self.envs = make_native(env_id, n_envs)
        self.envs.action_space.seed(index)
        self.envs.reset(seed=index)
        self.actions = [self.envs.action_space.sample() for _ in range(257)]

    def run(self, seconds: float) -> float:
        rounds = iter(range(10**9))

        def step() -> int:
            self.envs.step(self.actions[next(rounds) % 257])
            return self.envs.num_envs

        return timed(step, seconds)


@contextlib.contextmanager
def limit(task: Task) -> Iterator[Run]:
    factory = functools.partial(NativeLoop if task.native else BareLoop, env_id=task.env_id, n_envs=task.n_envs)
    with WorkerPool(task.n_workers, factory, preload=("torch", "gymnasium")) as pool:
        yield lambda seconds: sum(pool.call("run", seconds))


def batcher(task: Task, n_processes: int, run_ahead: int = 0, **settings: Any) -> RL_Batcher:
    if task.makes:
        return RL_Batcher.make(
            task.env_id,
            Policy().network,
            n_envs=task.n_envs * max(1, n_processes),
            n_workers=n_processes,
            n_timesteps=task.n_timesteps,
            seed=0,
            run_ahead=run_ahead,
            **settings,
        )
    return RL_Batcher(
        task.n_timesteps,
        create_agent,
        {"env_id": task.env_id, "policy": task.policy},
        create_env,
        {"env_id": task.env_id, "n_envs": task.n_envs, "native": task.native or task.beats},
        n_processes,
        0,
        run_ahead=run_ahead,
        **settings,
    )


@contextlib.contextmanager
def ours(
    task: Task, leases: bool = False, run_ahead: int = 0, trace_to: Path | None = None, **settings: Any
) -> Iterator[Run]:
    with contextlib.ExitStack() as stack:
        collecting = stack.enter_context(batcher(task, task.n_workers, run_ahead, **settings))
        if trace_to is not None:
            stack.enter_context(collecting.trace(trace_to))
        collecting.reset()

        def step() -> int:
            collecting.execute()
            if leases:
                with collecting.lease():
                    pass
            else:
                collecting.get()
            return task.n_all * task.n_timesteps

        def run(seconds: float) -> float:
            step()  # what runs ahead has just begun then, as it has at the end
            speed = timed(step, seconds)
            collecting._engine.settle()  # or it would run while another is measured
            return speed

        yield run


# --- the peers -----------------------------------------------------------------------------------

# Peers with a process for each environment get as many environments as they are fastest with; the 128 of
# a row of ours would only make them slower.
MOST_PROCESSES = 16


def makers(task: Task) -> list[Callable[[], gymnasium.Env[Any, Any]]]:
    return [functools.partial(make_env, task.env_id)] * min(task.n_all, MOST_PROCESSES)


def stepping(env: Any, task: Task) -> Run:
    """Steps a vectorised environment of gymnasium's interface, and keeps what a rollout keeps."""
    frame = env.reset()[0]
    act = actor(task, len(frame))
    kept: list[Any] = []

    def step() -> int:
        nonlocal frame
        if len(kept) == task.n_timesteps:
            kept.clear()
        frame, reward, terminated, truncated, _ = env.step(act(frame))
        kept.append((frame, reward, terminated, truncated))
        return len(frame)

    return lambda seconds: timed(step, seconds)


@contextlib.contextmanager
def gymnasium_async(task: Task) -> Iterator[Run]:
    with contextlib.closing(gymnasium.vector.AsyncVectorEnv(makers(task))) as env:
        yield stepping(env, task)


@contextlib.contextmanager
def gymnasium_sync(task: Task) -> Iterator[Run]:
    envs = [functools.partial(make_env, task.env_id)] * task.n_all  # no processes
    with contextlib.closing(gymnasium.vector.SyncVectorEnv(envs)) as env:
        yield stepping(env, task)


@contextlib.contextmanager
def stable_baselines3(task: Task, in_processes: bool = True) -> Iterator[Run]:
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    envs = [functools.partial(make_env, task.env_id)] * task.n_all
    with contextlib.closing(SubprocVecEnv(makers(task)) if in_processes else DummyVecEnv(envs)) as env:
        frame = env.reset()
        act = actor(task, len(frame))

        def step() -> int:
            nonlocal frame
            frame, *_ = env.step(act(frame))
            return len(frame)

        yield lambda seconds: timed(step, seconds)


@contextlib.contextmanager
def tianshou(task: Task) -> Iterator[Run]:
    from tianshou.env import ShmemVectorEnv

    with contextlib.closing(ShmemVectorEnv(makers(task))) as env:
        frame, _ = env.reset()
        act = actor(task, len(frame))

        def step() -> int:
            nonlocal frame
            frame, _, terminated, truncated, _ = env.step(act(frame))
            ended = np.flatnonzero(terminated | truncated)
            if ended.size:
                frame[ended] = env.reset(ended)[0]
            return len(frame)

        yield lambda seconds: timed(step, seconds)


@contextlib.contextmanager
def torchrl(task: Task, is_vectorised: bool = False) -> Iterator[Run]:
    from tensordict.nn import TensorDictModule
    from torchrl.collectors import MultiSyncCollector

    make = functools.partial(_torchrl_env, task, is_vectorised)
    policy = TensorDictModule(_OneHot(Policy()), ["observation"], ["action"]) if task.policy else None
    collector = MultiSyncCollector(
        [make] * task.n_workers, policy, frames_per_batch=task.n_all * task.n_timesteps, total_frames=-1
    )
    batches = iter(collector)
    try:
        yield lambda seconds: timed(lambda: next(batches).numel(), seconds)
    finally:
        collector.shutdown()


def _torchrl_env(task: Task, is_vectorised: bool) -> Any:
    from torchrl.envs import GymWrapper, SerialEnv

    if not is_vectorised:
        return SerialEnv(task.n_envs, lambda: GymWrapper(make_env(task.env_id)))
    envs = [functools.partial(make_env, task.env_id)] * task.n_envs
    return GymWrapper(gymnasium.vector.SyncVectorEnv(envs, autoreset_mode=gymnasium.vector.AutoresetMode.DISABLED))


class _OneHot(torch.nn.Module):
    """torchrl's discrete actions are one-hot."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.network, self._policy = policy.network, policy

    def forward(self, frame: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(self._policy.act(frame), 2)


@contextlib.contextmanager
def envpool(task: Task) -> Iterator[Run]:
    import envpool as pool

    env = pool.make(task.envpool_id, env_type="gymnasium", num_envs=task.n_all, num_threads=task.n_workers)
    with contextlib.closing(env):
        yield stepping(env, task)


PEERS: dict[str, tuple[str, Callable[[Task], Any]]] = {
    "gymnasium async": ("gymnasium", gymnasium_async),
    "gymnasium sync": ("gymnasium", gymnasium_sync),
    "SB3": ("stable_baselines3", stable_baselines3),
    "SB3 dummy": ("stable_baselines3", functools.partial(stable_baselines3, in_processes=False)),
    "tianshou": ("tianshou", tianshou),
    "torchrl": ("torchrl", torchrl),
    "torchrl vector": ("torchrl", functools.partial(torchrl, is_vectorised=True)),
    "envpool": ("envpool", envpool),
}


# --- the tables ----------------------------------------------------------------------------------


def measure(task: Task, repeats: int, seconds: float, names: list[str]) -> dict[str, float]:
    """Medians of steps/s, every contender in turn."""
    contenders: dict[str, Callable[[Task], Any]] = {"limit": limit, "rlstructs": ours}
    contenders["run-ahead"] = functools.partial(ours, run_ahead=1)
    if task.native or task.beats:
        # The others step environments one by one, and the limit is what gymnasium does alone.
        contenders["lease"] = functools.partial(ours, leases=True)
        contenders["run-ahead, lease"] = functools.partial(ours, leases=True, run_ahead=1)
        names = [name for name in names if name == "envpool"]
    contenders |= {name: PEERS[name][1] for name in names}
    speeds: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        runs: dict[str, Run] = {}
        for name, contender in contenders.items():
            try:
                runs[name] = stack.enter_context(contender(task))
            except Exception as error:  # a peer that this environment is too much for
                if name in ("limit", "rlstructs"):
                    raise
                print(f"    {name} does not run {task.name}: {type(error).__name__}: {str(error)[:100]}")
        for _ in range(repeats):
            for name, run in runs.items():
                speeds.setdefault(name, []).append(run(seconds))
    return {name: statistics.median(values) for name, values in speeds.items()}


def start_up(repeats: int) -> float:
    """Median seconds until 4 workers of one CartPole are ready, once the fork server runs."""
    task = Task("start", "CartPole-v1", 4, 1, 8, 1.0, 0.3)
    took = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        batcher(task, 4).close()
        took.append(time.perf_counter() - start)
    return statistics.median(took[1:])


def profile(task: Task, n_rollouts: int) -> None:
    """Prints where the time of one worker goes, measured in this process."""
    spent = dict.fromkeys(("environments", "vectorised environment", "agent", "slots and loop"), 0.0)

    def clocked(key: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                spent[key] += time.perf_counter() - start

        return run

    with batcher(task, 0) as collecting:
        collecting.reset()
        job = collecting._engine.pool._job  # type: ignore[union-attr]
        for env in [] if task.beats else [job._env._envs] if task.native else job._env._envs:
            env.step, env.reset = clocked("environments", env.step), clocked("environments", env.reset)
        job._env.step_rows = clocked("vectorised environment", job._env.step_rows)
        agent = job._agent
        job._agent = type("Clocked", (), {
            "__call__": lambda _, *a: clocked("agent", agent)(*a),
            "initial_state": lambda _, *a: agent.initial_state(*a),
            "require_history": lambda _: False, "close": lambda _: None,
        })()  # fmt: skip
        job.rollout = clocked("slots and loop", job.rollout)
        start = time.perf_counter()
        for _ in range(n_rollouts):
            collecting.execute()
            collecting.get()
        total, steps = time.perf_counter() - start, n_rollouts * task.n_timesteps
    spent["the trainer's part"] = total - spent["slots and loop"]
    spent["slots and loop"] -= spent["vectorised environment"] + spent["agent"]
    spent["vectorised environment"] -= spent["environments"]
    for key, seconds in spent.items():
        print(f"    {key:24} {seconds / total:6.1%}   {seconds / steps * 1e6:9.1f} us a vector step")


def count_nothing(index: int) -> None:
    """Has this worker measure no times."""
    acting, lane = rollout_job.ActingAgent, Lane()
    lane.enter = lambda phase: phase
    rollout_job.ActingAgent = lambda agent, device, _, is_cut: acting(agent, device, lane, is_cut)


def contract(task: Task, n_pairs: int, seconds: float) -> None:
    """What statistics and the thread that watches the main process cost: pairs of runs with and without them."""
    with contextlib.ExitStack() as stack:
        with_it = stack.enter_context(ours(task))
        with unittest.mock.patch.object(process, "open_pidfd", lambda pid: None):
            without = stack.enter_context(ours(task, init_worker=count_nothing))
        compare(task, "the contract", with_it, without, n_pairs, seconds, 0.97)


def trace(task: Task, n_pairs: int, seconds: float) -> None:
    """What a timeline costs while it is recorded: pairs of runs with and without it."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with_it, without = (
            stack.enter_context(ours(task, trace_to=folder / "run.json")),
            stack.enter_context(ours(task)),
        )
        compare(task, "a timeline", with_it, without, n_pairs, seconds, 0.97 if "CartPole" in task.env_id else 0.99)


def compare(task: Task, what: str, with_it: Run, without: Run, n_pairs: int, seconds: float, least: float) -> None:
    """Prints the speed of one run as a share of the other's, which are measured in turn."""
    ratios = []
    for _ in range(n_pairs):
        speeds: dict[Run, list[float]] = {with_it: [], without: []}
        for turn in range(max(1, round(seconds / TURN))):
            for run in (with_it, without) if turn % 2 else (without, with_it):
                speeds[run].append(run(TURN))
        ratios.append(statistics.median(speeds[with_it]) / statistics.median(speeds[without]))
    mean = statistics.mean(ratios)
    margin = 2.045 * statistics.stdev(ratios) / len(ratios) ** 0.5  # Student's t of 29 degrees of freedom
    verdict = "ok" if mean - margin > least else "NOT SHOWN"
    print(f"{task.name:20} with / without {what}: {mean:.3f}, 95% interval {mean - margin:.3f} to "
          f"{mean + margin:.3f} of {n_pairs} pairs, must lie above {least}: {verdict}", flush=True)  # fmt: skip


def show(task: Task, speeds: dict[str, float]) -> None:
    share = speeds["rlstructs"] / speeds["limit"]
    verdict = "ok" if share >= task.must else "TOO SLOW"
    others = {name: speed for name, speed in speeds.items() if name != "limit"}
    cells = [f"{name} {speed:,.0f} ({speed / speeds['limit']:.2f})" for name, speed in others.items()]
    print(f"{task.name:20} limit {speeds['limit']:>9,.0f} | " + " | ".join(cells))
    print(f"{'':20} share {share:.2f}, must {task.must:.2f}, aim {task.aim:.2f}: {verdict}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rows = [task.name for task in TASKS if is_playable(task.env_id)]
    parser.add_argument("--rows", nargs="*", default=[*rows, "start"])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--contract", action="store_true")
    parser.add_argument("--trace", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # what a thread pool does after its work would slow whoever is measured next
    installed = [name for name, (module, _) in PEERS.items() if importlib.util.find_spec(module)]
    installed = [] if arguments.no_peers else installed
    versions = f"torch {torch.__version__}, gymnasium {gymnasium.__version__}"
    print(f"{os.cpu_count()} cores, {versions}; steps/s (share of the limit)")
    for task in TASKS:
        if task.name not in arguments.rows:
            continue
        if arguments.contract or arguments.trace:
            (contract if arguments.contract else trace)(task, 30, 4 * arguments.seconds)
        elif arguments.profile:
            print(f"{task.name}:")
            profile(task, 20)
        else:
            show(task, measure(task, arguments.repeats, arguments.seconds, installed))
    if "start" in arguments.rows and not (arguments.profile or arguments.contract or arguments.trace):
        print(f"start of 4 workers: {start_up(5):.2f} s, must 1.00, aim 0.30")


if __name__ == "__main__":
    main()
