r"""Kills trainings again and again, and compares what they come to with what they come to undisturbed.

    python tests/resume.py --kills 100
    python tests/resume.py --programs ppo sac --kills 10 --seed 3

Each program trains for a while with a checkpoint in a folder, and prints at the end the checksums of its final weights,
of the rows and priorities of its memory, and of its scores. It runs once undisturbed. Then the whole tree of its
processes, trainer and workers, is killed (SIGKILL) at random moments, about half of them while a checkpoint is written,
and it is started again, until that has happened as often as asked; the last run goes on to the end. It must print the
same.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from pathlib import Path

PROGRAMS = ("ppo", "sac", "a2c", "dqn", "jax")
# Rollouts of a program, and how many come between two checkpoints.
N_ROLLOUTS = {"ppo": 120, "sac": 80, "a2c": 120, "dqn": 40, "jax": 120}
N_BETWEEN = {"ppo": 3, "sac": 3, "a2c": 3, "dqn": 2, "jax": 3}


def digest(*arrays):
    """A checksum of arrays or tensors."""
    import numpy as np

    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


def digest_memory(memory):
    """Checksums of the rows that are there, and of the priorities."""
    storage = memory._storage
    rows = storage.view().every_row()
    found = digest(*storage.gather(sorted(storage.columns.specs), rows), storage.ring.counters)
    priorities = getattr(memory, "_priorities", None)
    return found, "" if priorities is None else digest(priorities.tree.values[rows])


def train(name, folder, n_rollouts):
    """Trains, with checkpoints in a folder, and prints checksums."""
    import torch

    from rlstructs import Checkpoint

    torch.manual_seed(0)
    torch.set_num_threads(1)
    made = MAKERS[name]()
    batcher, memory, models, optimizers, act, learn = made
    progress = {"n": 0, "returns": [], "losses": []}
    with batcher:
        if memory is not None:
            batcher.feed(memory)
        memories = {} if memory is None else {"memory": memory}
        checkpoint = Checkpoint(folder, batcher=batcher, model=models, optimizer=optimizers, extra=progress, **memories)
        if checkpoint.restore() is None:
            batcher.reset(**act(0))
        while progress["n"] < n_rollouts:
            batcher.execute(**act(progress["n"]))
            batch = batcher.get()[0] if memory is None else batcher.wait()[0]
            progress["losses"].append(learn(batch, progress["n"]))
            batcher.update(models["actor"].state_dict())
            progress["returns"] += batcher.episodes()["return"].tolist()
            progress["n"] += 1
            if progress["n"] % N_BETWEEN[name] == 0:
                checkpoint.save(progress["n"])
        weights = digest(*(value for model in models.values() for value in model.state_dict().values()))
        rows = ("", "") if memory is None else digest_memory(memory)
        scores = digest(torch.tensor(progress["returns"]), torch.tensor(progress["losses"]))
    print("weights", weights, "rows", rows[0], "priorities", rows[1], "scores", scores, len(progress["returns"]))


def examples():
    """The folder of the examples, importable."""
    folder = str(Path(__file__).parent.parent / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)


def make_ppo():
    """PPO of CartPole, with workers that run ahead."""
    examples()
    import ppo
    import torch

    from rlstructs import DictTensor, RL_Batcher

    args = ppo.Args(n_envs=4, n_timesteps=16, n_epochs=2, minibatch_size=64)
    network = ppo.create_network(args.env_id, "")
    optimizer = torch.optim.Adam(network.parameters(), lr=args.learning_rate)
    batcher = RL_Batcher(
        args.n_timesteps, ppo.Policy, {"network": network}, ppo.create_env,
        {"env_id": args.env_id, "n_envs": args.n_envs, "gamma": args.gamma}, 2, 0,
        agent_info=DictTensor({"greedy": torch.tensor([False])}), run_ahead=1,
    )  # fmt: skip
    infos = DictTensor({"greedy": torch.zeros(8, dtype=torch.bool)})

    def learn(batch, n):
        return ppo.learn(network, optimizer, batch, args)["policy_loss"]

    return batcher, None, {"actor": network}, optimizer, lambda n: {} if n else {"agent_info": infos}, learn


def make_a2c():
    """A2C with an LSTM, whose state goes on from rollout to rollout."""
    examples()
    import a2c_recurrent as a2c
    import torch

    from rlstructs import DictTensor, RL_Batcher

    args = a2c.Args(n_envs=4, n_timesteps=16, n_hidden=16)
    network = a2c.Network(2, 2, args.n_hidden)
    optimizer = torch.optim.Adam(network.parameters(), lr=args.learning_rate)
    batcher = RL_Batcher(
        args.n_timesteps, a2c.Policy, {"network": network}, a2c.create_env,
        {"task": args.task, "n_envs": args.n_envs, "gamma": args.gamma}, 2, 0,
        agent_info=DictTensor({"greedy": torch.tensor([False])}),
    )  # fmt: skip
    infos = DictTensor({"greedy": torch.zeros(8, dtype=torch.bool)})

    def learn(batch, n):
        return a2c.learn(network, optimizer, batch, args)["policy_loss"]

    return batcher, None, {"actor": network}, optimizer, lambda n: {} if n else {"agent_info": infos}, learn


def make_sac():
    """SAC of HalfCheetah, from a memory that workers write to."""
    examples()
    import sac
    import torch

    from rlstructs import DictTensor, RL_Batcher
    from rlstructs.memories.torch import RandomMemory

    args = sac.Args(env_id="HalfCheetah-v5", n_envs=2, n_timesteps=8, batch_size=32, n_hidden=32)
    learner = sac.Learner(args)
    batcher = RL_Batcher(
        args.n_timesteps, sac.Policy, {"actor": learner.actor}, sac.create_env,
        {"env_id": args.env_id, "n_envs": args.n_envs}, 2, 0,
        agent_info=DictTensor({"greedy": torch.tensor([False])}),
    )  # fmt: skip
    memory = RandomMemory(memory_size=100, num_envs=4, device="cpu", seed=0)  # a ring that wraps
    infos = DictTensor({"greedy": torch.zeros(4, dtype=torch.bool)})

    def learn(batch, n):
        return learner.learn(memory)["critic_loss"] if n > 3 else 0.0

    models = {"actor": learner.actor, "learner": learner}
    return batcher, memory, models, learner.optimizers, lambda n: {} if n else {"agent_info": infos}, learn


def make_dqn():
    """DQN of Pong, from four frames, with prioritised replay."""
    import torch

    from rlstructs import DictTensor, RL_Batcher
    from rlstructs.memories.torch import PrioritizedMemory

    def network():
        layers = torch.nn.Conv2d(4, 4, 8, 8), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(400, 6)
        return torch.nn.Sequential(*layers)

    q, target = network(), network()
    target.load_state_dict(q.state_dict())
    optimizer = torch.optim.Adam(q.parameters(), lr=1e-3)
    batcher = RL_Batcher(
        8, make_q_policy, {"network": q}, create_pong, {"n_envs": 2}, 2, 0,
        agent_info=DictTensor({"epsilon": torch.zeros(1)}),
    )  # fmt: skip
    memory = PrioritizedMemory(memory_size=60, num_envs=4, device="cpu", seed=0)
    names = ["observations", "actions", "rewards", "next_observations", "terminated"]

    def learn(batch, n):
        if n < 2:
            return 0.0
        [[now, actions, rewards, following, terminated]] = memory.sample(names, batch_size=16, n_step=3)
        with torch.no_grad():
            targets = rewards[:, 0] + 0.97 * target(following / 255.0).amax(1) * ~terminated[:, 0]
        values = q(now / 255.0).gather(1, actions)[:, 0]
        loss = (memory.get_sampling_weights() * (values - targets).square()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        memory.update_priorities(memory.get_sampling_indexes(), (values - targets).detach().abs() + 1e-3)
        if n % 5 == 0:
            target.load_state_dict(q.state_dict())
        return loss.item()

    def act(n):
        return {"agent_info": DictTensor({"epsilon": torch.full((4,), max(0.1, 1 - n / 20))})}

    return batcher, memory, {"actor": q, "target": target}, optimizer, act, learn


def make_q_policy(network):
    import torch

    from rlstructs import DictTensor, RL_Agent

    class Policy(RL_Agent):
        def __init__(self, network):
            self.network = network

        def initial_state(self, agent_info, B):
            return DictTensor()

        def __call__(self, state, observation, agent_info, history=None):
            best = self.network(observation["frame"] / 255.0).argmax(1)
            explores = torch.rand(len(best)) < agent_info["epsilon"]
            return DictTensor({"action": torch.where(explores, torch.randint_like(best, 6), best)}), state

        def update(self, info):
            self.network.load_state_dict(info)

    return Policy(network)


def create_pong(n_envs, seed):
    import ale_py
    import gymnasium

    from rlstructs import GymEnvInf

    gymnasium.register_envs(ale_py)

    def make():
        env = gymnasium.make("ALE/Pong-v5", frameskip=1)
        env = gymnasium.wrappers.AtariPreprocessing(env, noop_max=5, screen_size=80)
        return gymnasium.wrappers.FrameStackObservation(env, 4)

    return GymEnvInf([make() for _ in range(n_envs)], seed)


def make_jax():
    """Environments and an agent in jax, whose rollouts are compiled, with a memory that workers write to."""
    import torch
    from jax_walk import WALK

    from rlstructs import JaxAgent, JaxEnv, RL_Batcher
    from rlstructs.memories.torch import RandomMemory

    network = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    params = OrderedDict((name, value.numpy().copy()) for name, value in network.state_dict().items())
    batcher = RL_Batcher(
        8, lambda: JaxAgent(act_in_jax, params, torch.zeros(()).numpy()), {}, lambda seed: JaxEnv(WALK, 2, seed), {},
        2, 0, run_ahead=1,
    )  # fmt: skip
    memory = RandomMemory(memory_size=60, num_envs=4, device="cpu", seed=0)

    def learn(batch, n):
        [[seen, rewards]] = memory.sample(["observations/wide", "rewards"], batch_size=16)
        loss = (network(seen).mean(1) - rewards[:, 0]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return batcher, memory, {"actor": network}, optimizer, lambda n: {}, learn


def act_in_jax(params, state, observation, key):
    """Draws an action; the state is the sum of what was drawn in the episode."""
    import jax

    drawn = jax.random.normal(key, (2,)) + observation["wide"] @ params["weight"].T + params["bias"] - state
    way = (drawn.sum() > 0).astype(int)
    return {"action": {"way": way, "push": jax.numpy.tanh(drawn)}}, state + drawn.sum()


MAKERS = {"ppo": make_ppo, "sac": make_sac, "a2c": make_a2c, "dqn": make_dqn, "jax": make_jax}


def start(name, folder, n_rollouts):
    command = [sys.executable, __file__, "--run", name, "--folder", str(folder), "--n-rollouts", str(n_rollouts)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def kill_tree(program):
    """Kills a program, and all processes that it has started: they are in its process group."""
    os.killpg(program.pid, signal.SIGKILL)
    program.communicate()


def read(path):
    return path.read_text() if path.exists() else None


def wait_for(program, path, before=None):
    """Waits until a program has written something else to a file, or has ended."""
    while program.poll() is None and read(path) == before:
        time.sleep(0.002)


def last_line(program):
    output, _ = program.communicate()
    assert program.returncode == 0, f"exit code {program.returncode}"
    return output.splitlines()[-1]


def is_saving(folder):
    """Whether a checkpoint is being written, or was when the program was killed."""
    return any(entry.name.endswith((".new", ".old")) for entry in Path(folder).glob("*"))


def disturb(name, folder, n_rollouts, n_kills, longest, rng):
    """Runs a program that is killed so often; returns its last line, and how many of the kills came in a save."""
    in_saves = 0
    for _ in range(n_kills):
        program = start(name, folder, n_rollouts)
        until, is_aimed = time.monotonic() + rng.uniform(0.1, longest), rng.random() < 0.5
        while program.poll() is None and (time.monotonic() < until or (is_aimed and not is_saving(folder))):
            time.sleep(0.002)
        time.sleep(rng.uniform(0.0, 0.05) if is_aimed else 0.0)
        if program.poll() is not None:  # it came to its end: once more from the beginning
            line = last_line(program)
            for entry in sorted(Path(folder).rglob("*"), reverse=True):
                entry.rmdir() if entry.is_dir() else entry.unlink()
            yield line, in_saves
            continue
        kill_tree(program)
        in_saves += is_saving(folder)
    yield last_line(start(name, folder, n_rollouts)), in_saves


def main(options):
    """Compares each program with itself."""
    rng, wrong = random.Random(options.seed), 0
    for number, name in enumerate(options.programs):
        n_rollouts = options.n_rollouts or N_ROLLOUTS[name]
        n_kills = len(range(number, options.kills, len(options.programs)))
        with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
            began = time.monotonic()
            wanted = last_line(start(name, first, n_rollouts))
            longest = time.monotonic() - began
            found = list(disturb(name, second, n_rollouts, n_kills, longest, rng))
        lines = {line for line, _ in found}
        wrong += lines != {wanted}
        print(f"{name}: {n_kills} kills, {found[-1][1]} of them in a save, {len(found)} runs came to the end: "
              f"{'the same' if lines == {wanted} else 'NOT THE SAME'}\n  {wanted}", flush=True)  # fmt: skip
        for line in lines - {wanted}:
            print(f"  {line}", flush=True)
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS, help="all by default")
    parser.add_argument("--kills", type=int, default=100, help="over all programs; default: 100")
    parser.add_argument("--n-rollouts", type=int, default=0, help="of each program; default: its own number")
    parser.add_argument("--seed", type=int, default=0, help="of the moments; default: 0")
    parser.add_argument("--run", choices=PROGRAMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        train(given.run, given.folder, given.n_rollouts or N_ROLLOUTS[given.run])
    else:
        sys.exit(main(given))
