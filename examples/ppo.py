r"""Proximal policy optimisation (Schulman et al., 2017) with rollouts from parallel workers.

    python examples/ppo.py --seed 1
    python examples/ppo.py --env-id HalfCheetah-v5 --n-steps 1000000 --n-envs 4 --n-timesteps 256 --n-epochs 10 \
        --minibatch-size 256 --learning-rate 3e-4 --n-eval 10

Actions may be discrete or continuous. Observations and rewards are normalised in the workers, which begin the next
rollout while the learner learns from the last one (`--run-ahead 0`: they wait for it). It prints at the end the mean
return of `--n-eval` episodes in which the policy takes its most likely action, how fast the training was, and for how
much of it the learner had nothing to learn from:

    CartPole-v1: score 500.0, 200704 steps, 47925 steps/s, 9% of the time waiting for rollouts

`--save policy.pt` keeps the policy: `play_ppo.py` plays it. `--plot curve.png` draws the returns of the training,
`--track tensorboard:runs/ppo` keeps its metrics (either needs the extra `plot`), `--track wandb:PROJECT` likewise.
`--checkpoint FOLDER` saves it every minute, at its end, and at SIGTERM, which ends it; run again it goes on from there.
`--trace run.json` writes a timeline of trainer and workers, which `rlstructs trace run.json` explains.
`--ray auto` has the workers run on a Ray cluster, `--ray local` on one of this machine (the extra `ray`). HalfCheetah
needs `gymnasium[mujoco]`. Where an observation has two entries, of which KEY says by 0 and 1 which actions are allowed,
`--action-mask KEY` forbids the others.
"""

from __future__ import annotations

import argparse
import importlib
import time
from dataclasses import dataclass

import gymnasium
import torch
from torch import nn
from tqdm import tqdm

from rlstructs import Checkpoint, DictTensor, RL_Agent, RL_Batcher, Trajectories, gae, mask_logits, transitions
from rlstructs.distributed import RayBatcher
from rlstructs.envs import GymEnvInf, NormalizeObservation, NormalizeReward, VecEnv
from rlstructs.integrations.logging import open_log


@dataclass
class Args:
    """What the command line sets."""

    env_id: str = "CartPole-v1"
    n_steps: int = 200_000  # rounded up to whole rollouts
    n_processes: int = 2
    n_envs: int = 16
    n_timesteps: int = 64
    run_ahead: int = 1
    n_epochs: int = 4
    minibatch_size: int = 512
    learning_rate: float = 1e-3
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy_weight: float = 0.0
    n_eval: int = 100
    seed: int = 0
    action_mask: str = ""
    ray: str = ""
    save: str = ""
    plot: str = ""
    track: str = ""
    checkpoint: str = ""
    trace: str = ""


def layers(n_inputs: int, n_outputs: int, scale: float) -> nn.Sequential:
    """A small network whose outputs are small at first where `scale` is."""
    last = nn.Linear(64, n_outputs)
    nn.init.orthogonal_(last.weight, scale)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(n_inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), last)


class ActorCritic(nn.Module):
    """Policy and values of observations (..., n_inputs); `keys` are those of an observation, and of a mask if any."""

    def __init__(self, n_inputs: int, n_actions: int, is_discrete: bool, keys: tuple[str, ...] = ("frame",)) -> None:
        super().__init__()
        self.actor, self.critic, self.keys = layers(n_inputs, n_actions, 0.01), layers(n_inputs, 1, 1.0), keys
        self.log_std = None if is_discrete else nn.Parameter(torch.zeros(n_actions))

    def policy(self, observations: torch.Tensor, mask: torch.Tensor | None = None) -> torch.distributions.Distribution:
        outputs = self.actor(observations) if mask is None else mask_logits(self.actor(observations), mask)
        if self.log_std is None:
            return torch.distributions.Categorical(logits=outputs, validate_args=False)
        normal = torch.distributions.Normal(outputs, self.log_std.exp(), validate_args=False)
        return torch.distributions.Independent(normal, 1, validate_args=False)

    def values(self, observations: torch.Tensor) -> torch.Tensor:
        return self.critic(observations)[..., 0]


class Policy(RL_Agent):
    """Draws actions; takes the most likely ones where `agent_info` says `greedy`."""

    def __init__(self, network: ActorCritic) -> None:
        self.network = network

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        policy = self.network.policy(*(observation[key] for key in self.network.keys))
        action = policy.mode if agent_info["greedy"][0] else policy.sample()
        return DictTensor({"action": action, "log_prob": policy.log_prob(action)}), state

    def update(self, info):
        self.network.load_state_dict(info)


def create_env(env_id: str, n_envs: int, gamma: float, seed: int) -> VecEnv:
    envs = [gymnasium.make(env_id, disable_env_checker=k > 0) for k in range(n_envs)]
    if isinstance(envs[0].action_space, gymnasium.spaces.Box):
        envs = [gymnasium.wrappers.ClipAction(env) for env in envs]
    return NormalizeReward(NormalizeObservation(GymEnvInf(envs, seed)), gamma=gamma)


def create_network(env_id: str, mask: str) -> ActorCritic:
    with gymnasium.make(env_id) as env:
        is_discrete = isinstance(env.action_space, gymnasium.spaces.Discrete)
        n_actions = env.action_space.n if is_discrete else env.action_space.shape[0]
        entries = getattr(env.observation_space, "spaces", {"frame": env.observation_space})
        [key] = (key for key in entries if key != mask)  # there is one beside the mask
        return ActorCritic(entries[key].shape[0], int(n_actions), is_discrete, (key, mask) if mask else (key,))


def learn(network: ActorCritic, optimizer: torch.optim.Optimizer, batch: Trajectories, args: Args) -> dict[str, float]:
    """A few epochs over a rollout; the losses of the last minibatch."""
    steps, key = batch.trajectories, network.keys[0]
    # One row for each step: a minibatch is then a selection of rows.
    seen = [steps[f"observation/{key}"].flatten(0, 1) for key in network.keys]
    actions, log_probs = (steps[f"action/{key}"].flatten(0, 1) for key in ("action", "log_prob"))
    with torch.no_grad():
        values, next_values = network.values(steps[f"observation/{key}"]), network.values(steps[f"_observation/{key}"])
        present = network.policy(*seen).log_prob(actions)
    advantages, targets = (each.flatten() for each in gae(
        values=values, next_values=next_values, gamma=args.gamma, lambda_=args.gae_lambda, **transitions(steps)
    ))  # fmt: skip
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    # What is clipped is the change from the present policy. The one that acted is older where workers run ahead, which
    # the weights make up for: they are 1 otherwise (Hilton et al., "Batch size-invariance", 2022, section 2), up to 2.
    advantages, log_probs = advantages * (present - log_probs).exp().clamp(max=2.0), present
    for _ in range(args.n_epochs):
        for rows in torch.randperm(len(targets)).split(args.minibatch_size):
            policy, gains = network.policy(*(part[rows] for part in seen)), advantages[rows]
            ratios = (policy.log_prob(actions[rows]) - log_probs[rows]).exp()
            clipped = ratios.clamp(1 - args.clip, 1 + args.clip)
            policy_loss = -torch.minimum(ratios * gains, clipped * gains).mean()
            value_loss = nn.functional.mse_loss(network.values(seen[0][rows]), targets[rows])
            entropy = policy.entropy().mean()
            optimizer.zero_grad()
            (policy_loss + 0.5 * value_loss - args.entropy_weight * entropy).backward()
            nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()
    return {"policy_loss": policy_loss.item(), "value_loss": value_loss.item(), "entropy": entropy.item()}


class Log:
    """A progress bar, and metrics for `--track` and a learning curve where they are asked for."""

    n_steps = property(lambda self: self.kept["n_steps"])

    def __init__(self, args: Args) -> None:
        # Before the first rollout: who lacks a package or a folder is to know it now.
        self.track = open_log(args.track, vars(args))
        self.figure = optional("matplotlib.figure").Figure(figsize=(9, 5)) if args.plot else None
        if self.figure is not None:
            self.figure.savefig(args.plot)
        self.bar = tqdm(total=args.n_steps, unit=" steps", unit_scale=True)
        self.path, self.start = args.plot, time.perf_counter()
        self.kept = {"n_steps": 0, "steps": [], "returns": [], "curve": []}  # of episodes; means of the latest 100

    def add(self, n_steps: int, episodes: DictTensor, scalars: dict[str, float]) -> None:
        self.kept["n_steps"] += n_steps
        self.kept["returns"] += episodes["return"].tolist()
        self.kept["steps"] += [self.n_steps] * episodes.n_elems()
        scalars = {"return": torch.tensor(self.kept["returns"][-100:]).mean().item(), **scalars}
        self.kept["curve"].append((self.n_steps, scalars["return"]))
        self.bar.set_postfix_str(f"return {scalars['return']:.1f}", refresh=False)
        self.bar.total = max(self.bar.total, self.n_steps)  # the last rollout is a whole one
        self.bar.update(n_steps)
        self.track(scalars, self.n_steps)

    def close(self) -> float:
        """Writes what there is to write; steps/s of the training."""
        speed = self.bar.n / (time.perf_counter() - self.start)
        self.bar.close()
        self.track.close()
        if self.figure is not None:
            axes = self.figure.subplots()
            axes.plot(self.kept["steps"], self.kept["returns"], ".", markersize=2, label="an episode")
            axes.plot(*zip(*self.kept["curve"], strict=True), label="mean of 100")
            axes.legend()
            axes.set(xlabel="steps", ylabel="return")
            self.figure.savefig(self.path)
        return speed


def optional(module: str, install: str = "--plot needs pip install matplotlib"):
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SystemExit(f"{error}: {install}") from error


def main(args: Args) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # for networks this small more are slower, and the workers need the cores
    network = create_network(args.env_id, args.action_mask)
    optimizer = torch.optim.Adam(network.parameters(), lr=args.learning_rate, eps=1e-5)
    make, where = (RayBatcher, {"address": args.ray}) if args.ray else (RL_Batcher, {})
    with make(
        args.n_timesteps, Policy, {"network": network},
        create_env, {"env_id": args.env_id, "n_envs": args.n_envs, "gamma": args.gamma}, args.n_processes, args.seed,
        agent_info=DictTensor({"greedy": torch.tensor([False])}), run_ahead=args.run_ahead, **where,
    ) as batcher, batcher.trace(args.trace):  # fmt: skip
        log, waited = Log(args), 0.0
        greedy = torch.zeros(batcher.n_elems(), dtype=torch.bool)
        checkpoint = Checkpoint(args.checkpoint, batcher=batcher, model=network, optimizer=optimizer, extra=log.kept)
        if checkpoint.restore() is None:
            batcher.reset(agent_info=DictTensor({"greedy": greedy}))
        with checkpoint.preemption():
            while log.n_steps < args.n_steps:
                start = time.perf_counter()
                batcher.execute()
                batch, _ = batcher.get()
                waited += time.perf_counter() - start
                optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - log.n_steps / args.n_steps)
                losses = learn(network, optimizer, batch, args)
                batcher.update(network.state_dict())
                log.add(int(batch.lengths.sum()), batcher.episodes(), {**batcher.metrics(), **losses})
                checkpoint.save_if_due(log.n_steps)
        speed = log.close()
        checkpoint.save(log.n_steps)
        if args.save:
            torch.save({"network": network.state_dict(), "batcher": batcher.state_dict()}, args.save)
        episodes = batcher.evaluate(args.n_eval, args.seed + 1, agent_info=DictTensor({"greedy": ~greedy}))
    print(f"{args.env_id}: score {episodes['return'].mean():.1f}, {log.n_steps} steps, {speed:.0f} steps/s, "
          f"{waited * speed / log.n_steps:.0%} of the time waiting for rollouts")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Args()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value!r}")
    main(Args(**vars(parser.parse_args())))
