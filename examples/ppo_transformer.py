r"""Proximal policy optimisation with a causal transformer, over packed episodes without padding.

    python examples/ppo_transformer.py [--task t-maze] --seed 1

Workers act from a window of the latest observations, the agent's state. The learner packs the steps of each episode
behind the window that was recorded before them, so that the transformer sees what it saw when it acted. It prints the
mean return of `--n-eval` episodes in which the policy takes its most likely action, and how fast the training was:

    T-maze of 20 steps: score 1.000, 149504 steps, 5041 steps/s

`--device cuda` attends by `varlen_attn`, in bfloat16, if torch has it. `--plot` and `--track` are as in `ppo.py`.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from memory_tasks import TASKS, create_env
from torch import nn
from tqdm import tqdm

from rlstructs import DictTensor, RL_Agent, RL_Batcher, Trajectories, gae, transitions
from rlstructs.integrations.logging import open_log

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # an older torch
    varlen_attn = None


@dataclass
class Args:
    """What the command line sets."""

    task: str = "cart-pole"  # or t-maze
    n_steps: int = 150_000  # rounded up to whole rollouts
    n_processes: int = 2
    n_envs: int = 16
    n_timesteps: int = 64
    n_epochs: int = 4
    minibatch_size: int = 512
    window: int = 24  # steps that a layer attends to
    n_layers: int = 1
    n_heads: int = 2
    n_features: int = 32
    learning_rate: float = 1e-3
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy_weight: float = 0.01
    n_eval: int = 100
    seed: int = 0
    device: str = "cpu"
    plot: str = ""
    track: str = ""
    trace: str = ""


def attention(ids: torch.Tensor, window: int) -> Callable[..., torch.Tensor]:
    """Attention, (N, heads, features), to the latest steps of the same segment; `ids`, (N,), are ascending."""
    if ids.is_cuda and varlen_attn is not None:
        bounds = nn.functional.pad(ids.bincount().cumsum(0), (1, 0)).int()
        cuts = bounds, bounds, *[int(bounds.diff().max())] * 2
        return lambda *qkv: varlen_attn(*(x.bfloat16() for x in qkv), *cuts, window_size=(window - 1, 0)).float()
    back = torch.arange(len(ids), device=ids.device)[:, None] - torch.arange(len(ids), device=ids.device)
    allowed, attend = (ids[:, None] == ids) & (back >= 0) & (back < window), nn.functional.scaled_dot_product_attention
    return lambda *qkv: attend(*(x.transpose(0, 1)[None] for x in qkv), allowed)[0].transpose(0, 1)


class Layer(nn.Module):
    """Attention with rotary places (Su et al., "RoFormer", 2021) and a feed-forward network, behind a norm each."""

    def __init__(self, n: int, n_heads: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out, self.n_heads = nn.LayerNorm(n), nn.Linear(n, 3 * n), nn.Linear(n, n), n_heads
        self.mix = nn.Sequential(nn.LayerNorm(n), nn.Linear(n, 4 * n), nn.GELU(), nn.Linear(4 * n, n))

    def forward(self, x: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(1, (3, self.n_heads, -1)).unbind(1)  # (N, heads, features)
        angles = torch.arange(len(x))[:, None, None] * 100.0 ** -torch.linspace(0, 1, q.shape[-1] // 2)
        turns = torch.polar(torch.ones_like(angles), angles).to(x.device)
        q, k = (torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous()) * turns for y in (q, k))
        x = x + self.out(attend(*(torch.view_as_real(y).flatten(-2) for y in (q, k)), v).flatten(1))
        return x + self.mix(x)


class ActorCritic(nn.Module):
    """A causal transformer over observations; policies and values are linear in its features."""

    def __init__(self, n_inputs: int, n_actions: int, args: Args) -> None:
        super().__init__()
        n = args.n_features
        self.layers = nn.ModuleList(Layer(n, args.n_heads) for _ in range(args.n_layers))
        self.enter, self.norm, self.window = nn.Linear(n_inputs, n), nn.LayerNorm(n), args.window
        self.actor, self.critic = nn.Linear(n, n_actions), nn.Linear(n, 1)
        nn.init.orthogonal_(self.actor.weight, 0.01)

    def forward(self, state: DictTensor, observations: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Features of observations (N, n_inputs), from them and what came before them in their segments, `ids` (N,).

        Before segment s came the last `n_before[s]` rows of `window[s]`, of a state of S rows.
        """
        window, n_before = state["window"], state["n_before"]
        counts = torch.arange(-window.shape[1], 0, device=ids.device) >= -n_before[:, None]
        ids = torch.cat([counts.nonzero()[:, 0], ids])
        order = ids.argsort(stable=True)
        x, attend = self.enter(torch.cat([window[counts], observations])[order]), attention(ids[order], self.window)
        for layer in self.layers:
            x = layer(x, attend)
        return self.norm(x)[order.argsort()[-len(observations) :]]

    def policy(self, features: torch.Tensor) -> torch.distributions.Categorical:
        return torch.distributions.Categorical(logits=self.actor(features), validate_args=False)


class Policy(RL_Agent):
    """Draws actions; takes the most likely ones where `agent_info` says `greedy`."""

    def __init__(self, network: ActorCritic) -> None:
        self.network = network

    def initial_state(self, agent_info, B):
        # The upper layers attend to features that come of earlier observations still.
        shape = B, len(self.network.layers) * (self.network.window - 1), self.network.enter.in_features
        return DictTensor({"window": torch.zeros(shape), "n_before": torch.zeros(B, dtype=torch.int64)})

    def __call__(self, state, observation, agent_info, history=None):
        state.set("n_before", torch.where(observation["initial_state"], 0, state["n_before"]))
        policy = self.network.policy(self.network(state, observation["frame"], torch.arange(state.n_elems())))
        action = policy.mode if agent_info["greedy"][0] else policy.sample()
        window = torch.cat([state["window"], observation["frame"][:, None]], 1)[:, 1:]
        state = {"window": window, "n_before": (state["n_before"] + 1).clamp(max=window.shape[1])}
        return DictTensor({"action": action, "log_prob": policy.log_prob(action)}), DictTensor(state)

    def update(self, info):
        self.network.load_state_dict(info)


def learn(network: ActorCritic, optimizer: torch.optim.Optimizer, batch: Trajectories, args: Args) -> dict[str, float]:
    """A few epochs over the episodes of a rollout; the losses of the last minibatch."""
    pack = batch.packed("episode").to(args.device)
    for part in pack.minibatches(args.minibatch_size, args.n_epochs, by="segment"):
        # Behind the last step of a segment comes the observation that followed it, for its value.
        last, numbers = part.cu_seqlens[1:].long() - 1, torch.arange(part.n_segments(), device=args.device)
        seen = torch.cat([part["observation/frame"], part["_observation/frame"][last]])
        features = network(part.state, seen, torch.cat([part.segment_ids, numbers]))
        values, behind = network.critic(features)[:, 0].split([part.n_elems(), len(last)])
        advantages, targets = gae(
            values=values.detach(), next_values=values.roll(-1).index_copy(0, last, behind).detach(), gamma=args.gamma,
            lambda_=args.gae_lambda, **transitions(part),
        )  # fmt: skip
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        policy = network.policy(features[: part.n_elems()])
        ratios = (policy.log_prob(part["action/action"]) - part["action/log_prob"]).exp()
        clipped = ratios.clamp(1 - args.clip, 1 + args.clip) * advantages
        policy_loss = -torch.minimum(ratios * advantages, clipped).mean()
        value_loss, entropy = nn.functional.mse_loss(values, targets), policy.entropy().mean()
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
    name, make = TASKS[args.task]
    env = make()
    network = ActorCritic(env.observation_space.shape[0], int(env.action_space.n), args)
    optimizer = torch.optim.Adam(network.parameters(), lr=args.learning_rate, eps=1e-5)
    with RL_Batcher(
        args.n_timesteps, Policy, {"network": network},
        create_env, {"task": args.task, "n_envs": args.n_envs, "gamma": args.gamma}, args.n_processes, args.seed,
        agent_info=DictTensor({"greedy": torch.tensor([False])}),
    ) as batcher, batcher.trace(args.trace):  # fmt: skip
        network.to(args.device)
        log, greedy = Log(args), torch.zeros(batcher.n_elems(), dtype=torch.bool)
        batcher.reset(agent_info=DictTensor({"greedy": greedy}))
        while log.n_steps < args.n_steps:
            batcher.execute()
            batch, _ = batcher.get()
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - log.n_steps / args.n_steps)
            losses = learn(network, optimizer, batch, args)
            batcher.update(network.state_dict())
            log.add(int(batch.lengths.sum()), batcher.episodes(), {**batcher.metrics(), **losses})
        speed = log.close()
        episodes = batcher.evaluate(args.n_eval, args.seed + 1, agent_info=DictTensor({"greedy": ~greedy}))
    print(f"{name}: score {episodes['return'].mean():.3f}, {log.n_steps} steps, {speed:.0f} steps/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Args()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value!r}")
    main(Args(**vars(parser.parse_args())))
