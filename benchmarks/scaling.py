"""How many steps/s do how many nodes give, and what is the limit? A model, its constants, and a test of it.

    python benchmarks/scaling.py                            # the table of docs/scaling.md, of the constants below
    python benchmarks/scaling.py --measure                  # the constants, on this machine
    python benchmarks/scaling.py --network 1gbit 100mbit    # two nodes with such a link between them; needs root

`--network` makes two network namespaces, joined by a link that a token bucket shapes to each of these rates, with a Ray
node in each, and the trainer beside the first. Of each work it measures a batcher on the first node, predicts by the
model what it gives on the second one, and measures that, in turns with the first; the ratio is the median of turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import operator
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# Of what a link carries, so much is payload: 1448 of the 1514 bytes of a frame.
PAYLOAD = 1448 / 1514
# The prediction is to be so near.
TOLERANCE = 0.2
# Rollouts of a turn, those before them that do not count where workers run ahead, and turns at least.
BLOCK, SKIPPED, LEAST = 4, 2, 6
# Nodes, and the seconds within which all of them have surely answered.
MANY, SETTLED = 4, 0.3


@dataclass(frozen=True)
class Constants:
    """Of machines.

    Attributes:
        call: seconds from an order to a node until its answer is there, without any data.
        per_node: seconds that the trainer is busy with each node of a rollout.
        store: bytes/s that a node puts into its object store.
        copy: bytes/s that `get` copies out of the trainer's.
        pull: seconds until an object begins to come from another machine.
        link: bits/s of a machine's network.
    """

    call: float = 3e-3
    per_node: float = 1e-3
    store: float = 4.4e9
    copy: float = 3.4e9
    pull: float = 6e-3
    link: float = 10e9

    @property
    def network(self) -> float:
        """Bytes/s of payload."""
        return self.link * PAYLOAD / 8


@dataclass(frozen=True)
class Work:
    """What nodes do.

    Attributes:
        step: seconds that a worker takes for one step of one environment.
        nbytes: of a step, as it is sent.
        n_envs, n_timesteps: of a worker, and of a rollout.
        weights: bytes of an update.
    """

    name: str
    step: float
    nbytes: int
    n_envs: int
    n_timesteps: int
    weights: int = 40_000


# Of the first three, a step takes what it does in the rollouts of docs/measured.md: two workers over the limit.
WORKS = (
    Work("CartPole-v1", 7.2e-6, 40, 64, 128),
    Work("HalfCheetah-v5", 41e-6, 180, 16, 128),
    Work("ALE Pong, 84x84x4", 412e-6, 28_240, 8, 128, weights=6_700_000),
    Work("3D, 10 ms a step, 128x128x3", 10e-3, 49_170, 4, 64, weights=20_000_000),
)


def parts(work: Work, machine: Constants, n_nodes: int, n_workers: int) -> dict[str, float]:
    """Seconds of a rollout of nodes with so many workers each, by what takes them."""
    steps = n_workers * work.n_envs * work.n_timesteps
    return {
        "environments": work.step * work.n_envs * work.n_timesteps + machine.call + steps * work.nbytes / machine.store,
        "network": sending(n_nodes * (steps * work.nbytes + work.weights), machine),
        "trainer": n_nodes * (machine.per_node + steps * work.nbytes / machine.copy),
    }


def total(seconds: Mapping[str, float], ahead: bool) -> float:
    """Seconds of a rollout whose parts take so many.

    One after another they add up. With a run-ahead nodes collect while the network brings what they have collected
    before and the trainer copies what it has been brought: the slowest counts.
    """
    return (max if ahead else sum)(seconds.values())


def sending(nbytes: float, machine: Constants) -> float:
    """Seconds that the network takes to bring so many bytes to the trainer."""
    return machine.pull + nbytes / machine.network


def predict(work: Work, machine: Constants, n_nodes: int, n_workers: int, ahead: bool) -> tuple[float, str]:
    """Steps/s, and what they are limited by."""
    seconds = parts(work, machine, n_nodes, n_workers)
    limit = max(seconds, key=lambda name: seconds[name])
    steps = n_nodes * n_workers * work.n_envs * work.n_timesteps
    return steps / total(seconds, ahead), limit


def table(machine: Constants, n_workers: int) -> list[str]:
    """A line for each work and number of nodes."""
    lines = ["| work | nodes | workers | steps/s | share | limit |", "| --- | --- | --- | --- | --- | --- |"]
    for work in WORKS:
        for n_nodes in (1, 4, 16, 64, 157):
            speed, limit = predict(work, machine, n_nodes, n_workers, ahead=True)
            share = speed * work.step / (n_nodes * n_workers)
            lines.append(
                f"| {work.name} | {n_nodes} | {n_nodes * n_workers:,} | {speed:,.0f} | {share:.2f} | {limit} |"
            )
    return lines


# --- measuring -----------------------------------------------------------------------------------------


def batcher(work: Work, run_ahead: int, n_nodes: int = 1, **where: Any) -> Any:
    """Nodes with one worker each."""
    import gymnasium
    from distributed import create_frames
    from rollouts import create_agent, create_env

    from rlstructs import RandomAgent, RayBatcher

    env_id = "ALE/Pong-v5" if "Pong" in work.name else work.name
    if "frames" in work.name:
        made = RandomAgent, {"action_space": gymnasium.spaces.Discrete(2)}, create_frames, {"n_bytes": work.nbytes}
    else:
        env = {"env_id": env_id, "n_envs": work.n_envs, "native": False}
        made = create_agent, {"env_id": env_id, "policy": False}, create_env, env
    return RayBatcher(work.n_timesteps, *made, n_nodes, 0, n_nodes=n_nodes, run_ahead=run_ahead, **where)


def turns(steps: Sequence[Callable[[], Any]], seconds: float, run_ahead: int = 0) -> list[list[float]]:
    """Median seconds of a rollout in each turn of each: what they are compared by, as a machine's speed drifts."""
    found: list[list[float]] = [[] for _ in steps]
    skipped = SKIPPED * run_ahead  # what runs ahead has done so while the other was measured
    end = time.perf_counter() + seconds * len(steps)
    while time.perf_counter() < end or len(found[-1]) < LEAST:
        for step, medians in zip(steps, found, strict=True):
            times = []
            for _ in range(skipped + BLOCK):
                start = time.perf_counter()
                step()
                times.append(time.perf_counter() - start)
            medians.append(statistics.median(times[skipped:]))
    return found


def measure(seconds: float) -> None:
    """Prints the constants of this machine, but its network's."""
    import ray
    from distributed import stepping

    ray.init("local", num_cpus=2, object_store_memory=2**30, include_dashboard=False, logging_level="ERROR",
             log_to_driver=False)  # fmt: skip
    n_small, n_large = 100, 4_000_000
    small = replace(WORKS[0], name="frames", nbytes=n_small, n_envs=1, n_timesteps=16)
    large = replace(small, nbytes=n_large)
    with batcher(small, 0) as first, batcher(large, 0) as second, batcher(large, 0) as third:
        steps = [stepping(first, 1, False), stepping(second, 1, False), stepping(third, 1, leases=True)]
        call, whole, stored = map(statistics.median, turns(steps, seconds))
        nbytes = second.nbytes
    per_node = []
    with batcher(small, 0, n_nodes=MANY) as many:
        many.reset()
        for _ in range(LEAST):
            start = time.perf_counter()
            many.execute()
            ordered = time.perf_counter()
            time.sleep(SETTLED)  # until all nodes have answered: only the trainer's own time is wanted
            arrived = time.perf_counter()
            many.get()
            per_node.append((time.perf_counter() - arrived + ordered - start) / MANY)
    ray.shutdown()
    store, copy = nbytes / (stored - call), nbytes / (whole - stored)
    each = statistics.median(per_node)
    print(f"call {call * 1e3:.2f} ms; trainer, for each node {each * 1e3:.2f} ms; {nbytes / 1e6:.0f} MB: "
          f"into the object store {store / 1e9:.2f} GB/s, out of it {copy / 1e9:.2f} GB/s")  # fmt: skip


# --- a network -----------------------------------------------------------------------------------------

SPACES = {"rlstructs-near": "10.77.0.1", "rlstructs-far": "10.77.0.2"}
PORT = 6390
# Of real work and of frames alone; small enough for a minute at 100 Mbit/s.
TRIED = (
    Work("CartPole-v1", 0, 0, 64, 128),
    Work("HalfCheetah-v5", 0, 0, 8, 128),
    Work("ALE Pong, 84x84x4", 0, 0, 2, 64),
    Work("frames of 100 kB", 0, 100_000, 1, 64),
)


def bits_of(rate: str) -> float:
    """Bits/s, of what `tc` calls 100mbit or 1gbit."""
    return float(rate.removesuffix("mbit").removesuffix("gbit")) * (1e9 if rate.endswith("gbit") else 1e6)


def run(*command: str, **arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=True, text=True, **arguments)


@contextlib.contextmanager
def link(rate: str) -> Iterator[None]:
    """Two network namespaces, and a link of such a rate between them."""
    near, far = SPACES
    try:
        for name in SPACES:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", "veth0", "netns", near, "type", "veth", "peer", "name", "veth0", "netns", far)
        for name, address in SPACES.items():
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "veth0")
            for device in ("lo", "veth0"):
                run("ip", "-n", name, "link", "set", device, "up")
            # What passes at once is no more than what passes in a millisecond, or one packet.
            burst = str(max(int(bits_of(rate) / 8 / 1000), 16_000))
            run("tc", "-n", name, "qdisc", "add", "dev", "veth0", "root", "tbf", "rate", rate, "burst", burst,
                "latency", "50ms")  # fmt: skip
        yield
    finally:
        for name in SPACES:
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


def network(rate: str, seconds: float) -> bool:
    """Measures with a link of such a rate; whether the model was right."""
    near, far = SPACES
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=1", "--object-store-memory=300000000"]
    # A proxy is not for such a network.
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {"PYTHONPATH": _python_path(), "RAY_AUTH_MODE": "disabled"}
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "env": environment}
    with link(rate):
        run("ip", "netns", "exec", near, *ray, "--head", f"--node-ip-address={SPACES[near]}", f"--port={PORT}",
            "--include-dashboard=false", '--resources={"near": 9}', **quiet)  # fmt: skip
        run("ip", "netns", "exec", far, *ray, f"--address={SPACES[near]}:{PORT}", f"--node-ip-address={SPACES[far]}",
            '--resources={"far": 9}', **quiet)  # fmt: skip
        command = [sys.executable, __file__, "--inside", f"{SPACES[near]}:{PORT}", "--seconds", str(seconds)]
        done = run("ip", "netns", "exec", near, *command, capture_output=True, env=environment)
    is_right = True
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            is_right &= judge(rate, json.loads(line), replace(Constants(), link=bits_of(rate)))
    return is_right


def judge(rate: str, found: Mapping[str, Any], machine: Constants) -> bool:
    """Prints what was predicted and what came."""
    is_right, sent = True, sending(found["nbytes"], machine)
    for name, suffix in (("in turn", ""), ("ahead", "_ahead")):
        near, far = found["near" + suffix], found["far" + suffix]
        predicted = [total({"all but the network": each, "network": sent}, ahead=bool(suffix)) for each in near]
        ratio = statistics.median(map(operator.truediv, predicted, far))
        is_right &= abs(ratio - 1) <= TOLERANCE
        speeds = [found["n_steps"] / statistics.median(seconds) for seconds in (near, predicted, far)]
        print(f"{rate:8} {found['name']:18} {name:8} near {speeds[0]:10,.0f} steps/s, predicted {speeds[1]:10,.0f}, "
              f"measured {speeds[2]:10,.0f}: {ratio:.2f} of it, in {len(far)} turns", flush=True)  # fmt: skip
    return is_right


def inside(address: str, seconds: float) -> None:
    """Measures every work on either node; lines of JSON."""
    import ray
    from distributed import stepping

    ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    for work in TRIED:
        found: dict[str, Any] = {"name": work.name, "n_steps": work.n_envs * work.n_timesteps}
        for suffix, run_ahead in (("", 0), ("_ahead", 1)):
            with batcher(work, run_ahead, resources={"near": 1}) as near:
                with batcher(work, run_ahead, resources={"far": 1}) as far:
                    found["near" + suffix], found["far" + suffix] = turns(
                        [stepping(each, 1, leases=False) for each in (near, far)], seconds, run_ahead
                    )  # fmt: skip
                    found["nbytes"] = near.nbytes // (run_ahead + 1)
        print(json.dumps(found), flush=True)
    ray.shutdown()


def _python_path() -> str:
    return os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--network", nargs="+", metavar="RATE")
    parser.add_argument("--workers", type=int, default=64, help="of each node; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each batcher; default: %(default)s")
    parser.add_argument("--inside", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options.inside, options.seconds)
    elif options.network:
        verdicts = [network(rate, options.seconds) for rate in options.network]
        print(f"within {TOLERANCE:.0%}: {'ok' if all(verdicts) else 'NO'}")
        return 0 if all(verdicts) else 1
    elif options.measure:
        measure(options.seconds)
    else:
        print("\n".join(table(Constants(), options.workers)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
