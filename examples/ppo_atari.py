r"""Proximal policy optimisation on Atari games, from frames.

    pip install ale-py opencv-python-headless
    python examples/ppo_atari.py --n-steps 999424

Hyperparameters and preparation of frames are those of CleanRL's `ppo_atari.py`: no-ops and fire after a reset, an
action for four frames of the game, 84x84 grey, stacks of four, the sign of rewards, and a learning rate that falls to
0 in `--n-annealing` steps, of which these are the first tenth. So are the games; those of gymnasium repeat actions now
and then (`--repeat-action-probability 0.25`). An episode is a whole game, whatever lives there are. With `--native`
the games of a worker are one `AtariVectorEnv` of ale-py, which does all this in C++. `--plot` and `--track` are as in
`ppo.py`. It prints the mean return of `--n-eval` games, in which actions are drawn as in the training, and its speed:

    ALE/Pong-v5: score -8.9, 999424 steps, 230 steps/s
"""

from __future__ import annotations

import argparse
import importlib
import math
import time
from dataclasses import dataclass

import gymnasium
import torch
from torch import nn
from tqdm import tqdm

from rlstructs import DictTensor, GymEnvInf, GymVectorEnv, RL_Agent, RL_Batcher, Trajectories, gae, transitions
from rlstructs.integrations.logging import open_log


@dataclass
class Args:
    """What the command line sets."""

    env_id: str = "ALE/Pong-v5"
    native: bool = False
    repeat_action_probability: float = 0.0
    max_frames: int = 108_000  # of a game, half an hour of it
    n_steps: int = 1_000_000  # rounded up to whole rollouts
    n_processes: int = 2
    n_envs: int = 4
    n_timesteps: int = 128
    run_ahead: int = 0
    n_epochs: int = 4
    n_minibatches: int = 4
    learning_rate: float = 2.5e-4
    n_annealing: int = 10_000_000
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.1
    entropy_weight: float = 0.01
    n_eval: int = 10
    seed: int = 0
    plot: str = ""
    track: str = ""
    trace: str = ""


class FireReset(gymnasium.Wrapper):
    """Presses fire, and what comes behind it, after a reset: some games do not begin before."""

    def reset(self, **arguments):
        self.env.reset(**arguments)
        for action in (1, 2):
            observation, _, terminated, truncated, info = self.env.step(action)
            if terminated or truncated:
                observation, info = self.env.reset()
        return observation, info


def make(env_id: str, repeat_action_probability: float, max_frames: int) -> gymnasium.Env:
    settings = {"repeat_action_probability": repeat_action_probability, "max_num_frames_per_episode": max_frames}
    env = gymnasium.make(env_id, frameskip=1, **settings)
    env = gymnasium.wrappers.AtariPreprocessing(env)  # 1 to 30 no-ops, 4 frames for each step, 84x84 grey
    if "FIRE" in env.unwrapped.get_action_meanings():
        env = FireReset(env)
    return gymnasium.wrappers.FrameStackObservation(env, 4)


def create_env(n_envs: int, native: bool, seed: int, **game) -> GymEnvInf | GymVectorEnv:
    if not native:
        return GymEnvInf([make(**game) for _ in range(n_envs)], seed)
    settings = {"num_threads": 1, "reward_clipping": False, "max_num_frames_per_episode": game.pop("max_frames")}
    return GymVectorEnv(gymnasium.make_vec(game.pop("env_id"), n_envs, "vector_entry_point", **settings, **game), seed)


def scaled(layer: nn.Module, scale: float = math.sqrt(2)) -> nn.Module:
    nn.init.orthogonal_(layer.weight, scale)
    nn.init.zeros_(layer.bias)
    return layer


class ActorCritic(nn.Module):
    """Policy and values of stacks of frames, uint8 (B, 4, 84, 84)."""

    def __init__(self, n_actions: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(  # of Mnih et al., 2015
            scaled(nn.Conv2d(4, 32, 8, stride=4)), nn.ReLU(),
            scaled(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU(),
            scaled(nn.Conv2d(64, 64, 3)), nn.ReLU(), nn.Flatten(),
            scaled(nn.Linear(64 * 7 * 7, 512)), nn.ReLU(),
        )  # fmt: skip
        self.actor, self.critic = scaled(nn.Linear(512, n_actions), 0.01), scaled(nn.Linear(512, 1), 1.0)

    def forward(self, frames: torch.Tensor) -> tuple[torch.distributions.Categorical, torch.Tensor]:
        """The policy, and the values (B,)."""
        features = self.layers(frames / 255)
        policy = torch.distributions.Categorical(logits=self.actor(features), validate_args=False)
        return policy, self.critic(features)[:, 0]


class Policy(RL_Agent):
    """Draws actions, and records their log-probabilities and the values for the learner."""

    def __init__(self, network: ActorCritic) -> None:
        self.network = network

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        policy, values = self.network(observation["frame"])
        action = policy.sample()
        return DictTensor({"action": action, "log_prob": policy.log_prob(action), "value": values}), state

    def update(self, info):
        self.network.load_state_dict(info)


def values_after(network: ActorCritic, batch: Trajectories) -> torch.Tensor:
    """(B, T): the value of what followed each step.

    What follows is the observation of the next step, whose value is recorded, but for the last step and where an
    episode was truncated. Where one terminated, `gae` takes 0.
    """
    steps, values = batch.trajectories, batch.trajectories["action/value"].roll(-1, dims=1)
    others = steps["_observation/truncated"].clone()
    others[:, -1] = True
    with torch.no_grad():
        values[others] = network(steps["_observation/frame"][others])[1]
    return values


def learn(network: ActorCritic, optimizer: torch.optim.Optimizer, batch: Trajectories, args: Args) -> dict[str, float]:
    """A few epochs over a rollout; the losses of the last minibatch."""
    steps = batch.trajectories
    given = transitions(steps) | {"rewards": steps["_observation/reward"].sign()}
    values, after = steps["action/value"], values_after(network, batch)
    advantages, targets = gae(values=values, next_values=after, gamma=args.gamma, lambda_=args.gae_lambda, **given)
    flat = (*(steps[key] for key in ("observation/frame", "action/action", "action/log_prob")), values)
    frames, actions, log_probs, values, advantages, targets = (x.flatten(0, 1) for x in (*flat, advantages, targets))
    for _ in range(args.n_epochs):
        for rows in torch.randperm(len(targets)).chunk(args.n_minibatches):
            policy, new_values = network(frames[rows])
            gains = (advantages[rows] - advantages[rows].mean()) / (advantages[rows].std() + 1e-8)
            ratios = (policy.log_prob(actions[rows]) - log_probs[rows]).exp()
            policy_loss = -torch.minimum(ratios * gains, ratios.clamp(1 - args.clip, 1 + args.clip) * gains).mean()
            clipped = values[rows] + (new_values - values[rows]).clamp(-args.clip, args.clip)
            errors = torch.maximum((new_values - targets[rows]) ** 2, (clipped - targets[rows]) ** 2)
            value_loss, entropy = 0.5 * errors.mean(), policy.entropy().mean()
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
    gymnasium.register_envs(optional("ale_py", "Atari games need pip install ale-py opencv-python-headless"))
    torch.manual_seed(args.seed)
    game = {name: getattr(args, name) for name in ("env_id", "repeat_action_probability", "max_frames")}
    with make(**game) as env:
        network = ActorCritic(int(env.action_space.n))
    optimizer = torch.optim.Adam(network.parameters(), lr=args.learning_rate, eps=1e-5)
    with RL_Batcher(
        args.n_timesteps, Policy, {"network": network}, create_env,
        {"n_envs": args.n_envs, "native": args.native, **game}, args.n_processes, args.seed, run_ahead=args.run_ahead,
    ) as batcher, batcher.trace(args.trace):  # fmt: skip
        log = Log(args)
        batcher.reset()
        while log.n_steps < args.n_steps:
            batcher.execute()
            batch, _ = batcher.get()
            optimizer.param_groups[0]["lr"] = args.learning_rate * max(1 - log.n_steps / args.n_annealing, 0)
            losses = learn(network, optimizer, batch, args)
            batcher.update(network.state_dict())
            log.add(int(batch.lengths.sum()), batcher.episodes(), {**batcher.metrics(), **losses})
        speed = log.close()
        episodes = batcher.evaluate(args.n_eval, args.seed + 1)
    print(f"{args.env_id}: score {episodes['return'].mean():.1f}, {log.n_steps} steps, {speed:.0f} steps/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Args()).items():
        kind = {"action": "store_true"} if value is False else {"type": type(value), "default": value}
        parser.add_argument(f"--{name.replace('_', '-')}", **kind, help=f"default: {value!r}")
    main(Args(**vars(parser.parse_args())))
