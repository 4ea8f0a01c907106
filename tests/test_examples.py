"""Every example runs, with tiny sizes."""

from __future__ import annotations

import copy
import importlib
import json
import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from processes import LIMIT

from rlstructs import DictTensor, GymEnvInf, RL_Batcher
from rlstructs.testing import check_env
from rlstructs.trace.timeline import read_events

pytestmark = pytest.mark.usefixtures("quick_programs")

ROOT = Path(__file__).parent.parent
SMALL = ["--n-envs", "2", "--n-timesteps", "30", "--n-rollouts", "2"]
MEMORY = [*SMALL, "--memory-size", "40"]
TRAINING = ["--n-envs", "2", "--n-timesteps", "8", "--n-steps", "64", "--n-eval", "2"]
SCORE = r"-?[\d.]+, \d+ steps, \d+ steps/s"
WAITED = r"\d+% of the time waiting for rollouts"
# What to run, and what its last line is.
RUNS = {
    "1_structures.py": ([], r"jax: \(3, 4\) float32, and back: True"),
    "2_collect.py": (SMALL, r"\d+ episodes, mean return [\d.]+"),
    "central_inference.py": ([*SMALL, "--n-envs", "4"], r"\d+ episodes, mean return [\d.]+"),
    "collect_to_memory.py": (MEMORY, r"CartPole-v1: 160 rows of 4 environments, 0\.0 MB"),
    "collect_to_memory.py HalfCheetah-v5": (
        [*MEMORY, "--env-id", "HalfCheetah-v5"], r"HalfCheetah-v5: 160 rows of 4 environments, 0\.0 MB"
    ),
    "native_vector_env.py": (
        [*SMALL, "--n-timesteps", "250"], r"\d+ episodes, mean length [\d.]+"
    ),
    "native_vector_env.py CartPole-v1": (
        [*SMALL, "--env-id", "CartPole-v1"], r"\d+ episodes, mean length [\d.]+"
    ),
    "overlap.py": (SMALL, r"240 steps, \d+ steps/s"),
    "overlap.py --run-ahead 0": ([*SMALL, "--run-ahead", "0"], r"240 steps, \d+ steps/s"),
    "offline_dataset.py": (
        [*SMALL, "--n-epochs", "1", "--n-eval", "2", "--plot", "curve.png"], rf"CartPole-v1: score {SCORE}"
    ),
    "ppo.py": ([*TRAINING, "--plot", "curve.png"], rf"CartPole-v1: score {SCORE}, {WAITED}"),
    "ppo.py HalfCheetah-v5": ([*TRAINING, "--env-id", "HalfCheetah-v5"], rf"HalfCheetah-v5: score {SCORE}, {WAITED}"),
    "ppo.py Masked-v0": (
        [*TRAINING, "--env-id", "masked_env:Masked-v0", "--action-mask", "action_mask"],
        rf"masked_env:Masked-v0: score 5.0, \d+ steps, \d+ steps/s, {WAITED}",
    ),
    "ppo_atari.py": (
        [*TRAINING, "--n-processes", "1", "--n-envs", "1", "--n-eval", "1", "--max-frames", "500"],
        rf"ALE/Pong-v5: score {SCORE}",
    ),
    "ppo_atari.py --native": (
        [*TRAINING, "--native", "--n-processes", "1", "--n-envs", "1", "--n-eval", "1", "--max-frames", "500"],
        rf"ALE/Pong-v5: score {SCORE}",
    ),
    "dqn_atari.py": (
        [*TRAINING, "--n-processes", "1", "--n-envs", "1", "--n-eval", "1", "--max-frames", "500", "--n-before", "32",
         "--n-updates", "1", "--batch-size", "4", "--compress", "--prefetch", "2"],
        rf"ALE/Pong-v5: score {SCORE}, \d+ MB",
    ),
    "ppo_compiled.py": (TRAINING, rf"CartPole-v1: score {SCORE}, {WAITED}"),
    "ppo_jax.py": (TRAINING, rf"CartPole-v1: score {SCORE}, {WAITED}"),
    "mujoco_rollout.py": (SMALL, r"4 HalfCheetahs by mujoco\.rollout: 240 steps, \d+ steps/s"),
    "mujoco_rollout.py --gymnasium": ([*SMALL, "--gymnasium"], r"4 HalfCheetahs by gymnasium: 240 steps, \d+ steps/s"),
    "dqn.py": ([*TRAINING, "--n-before", "32"], rf"CartPole-v1: score {SCORE}"),
    "sac.py": ([*TRAINING, "--n-before", "32"], rf"Pendulum-v1: score {SCORE}"),
    "sac.py HalfCheetah-v5": (
        [*TRAINING, "--n-before", "32", "--env-id", "HalfCheetah-v5"], rf"HalfCheetah-v5: score {SCORE}"
    ),
    "a2c_recurrent.py": (TRAINING, rf"CartPole-v1 without velocities: score {SCORE}"),
    "a2c_recurrent.py --task t-maze": ([*TRAINING, "--task", "t-maze"], rf"T-maze of 20 steps: score {SCORE}"),
    "ppo_transformer.py": ([*TRAINING, "--window", "4"], rf"CartPole-v1 without velocities: score {SCORE}"),
    "ppo_transformer.py --task t-maze": (
        [*TRAINING, "--task", "t-maze", "--n-layers", "2"], rf"T-maze of 20 steps: score {SCORE}"
    ),
    "reinforce.py": ([*TRAINING, "--n-timesteps", "500"], rf"CartPole-v1: score {SCORE}"),
    "multi_agent.py": (TRAINING, rf"simple_spread_v3: score {SCORE}"),
    "multi_agent.py --policies each": ([*TRAINING, "--policies", "each"], rf"simple_spread_v3: score {SCORE}"),
    "evolution.py": ([*TRAINING, "--n-timesteps", "500"], rf"CartPole-v1: score {SCORE}"),
    "diayn.py": (TRAINING, rf"CartPole-v1 with 4 skills: score {SCORE}"),
    "jax_dqn.py": ([*TRAINING, "--n-before", "32", "--n-updates", "2"], rf"CartPole-v1: score {SCORE}"),
    "dqn_compiled.py": (
        [*TRAINING, "--n-before", "32", "--n-updates", "2"], rf"Breakout-MinAtar: score {SCORE}"
    ),
    "waiting_envs.py": (
        ["--n-envs", "3", "--n-timesteps", "8", "--n-steps", "64", "--n-eval", "2", "--mean", "0.001"],
        r"Chase: score -?[\d.]+, \d+ steps, \d+ steps/s, \d+% by an earlier policy",
    ),
    "waiting_envs.py --threads 0": (
        ["--threads", "0", "--n-envs", "2", "--n-timesteps", "8", "--n-steps", "64", "--n-eval", "2"],
        r"Chase: score -?[\d.]+, 64 steps, \d+ steps/s, 0% by an earlier policy",
    ),
    "warp_gather.py": (
        ["--n-envs", "2", "--n-repeats", "2"],
        r"largest difference (0\.0e\+00|\d\.\de-0[5-9]) of up to [\d.]+, "
        r"warp \d+ us, torch \d+ us: [\d.]+ times as fast",
    ),
}  # fmt: skip
QUICK = ("1_structures.py", "2_collect.py")


def run(arguments, **options):
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=LIMIT, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.quick] * (name in QUICK)) for name in RUNS])
def test_an_example_runs(name, subprocess_env, tmp_path):
    arguments, words = RUNS[name]
    file = ROOT / "examples" / name.split()[0]
    if is_traced := "RL_Batcher" in file.read_text():
        arguments = [*arguments, "--trace", "run.json"]
    assert re.fullmatch(words, run([str(file), *arguments], env=subprocess_env, cwd=tmp_path).splitlines()[-1])
    if is_traced:
        assert "rollout" in {event.get("name") for event in read_events(tmp_path / "run.json")}


def test_every_example_is_run():
    run_below = {"play_ppo.py", "memory_tasks.py"}
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == {name.split()[0] for name in RUNS} | run_below


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_uses_what_is_public(path):
    text = path.read_text()
    assert len(text.splitlines()) < 250
    imported = re.findall(r"^\s*from (rlstructs[\w.]*|workers[\w.]*) import \(?([\w\s,]+)", text, re.MULTILINE)
    names = {name for module, found in imported for name in [*module.split("."), *re.findall(r"\w+", found)]}
    assert imported and "workers" not in names and not [name for name in names if name.startswith("_")]


@pytest.mark.parametrize("name", ["reinforce.py", "evolution.py"])
def test_an_example_with_padding_learns_the_same_where_that_is_poison(name, subprocess_env, tmp_path):
    lines = set()
    for debug in ("0", "1"):
        arguments = [str(ROOT / "examples" / name), *TRAINING, "--n-timesteps", "500", "--n-eval", "8"]
        printed = run(arguments, env={**subprocess_env, "RLSTRUCTS_DEBUG": debug}, cwd=tmp_path).splitlines()
        lines.add(printed[-1].rsplit(",", 1)[0])  # without the speed
    assert len(lines) == 1


def test_what_a_training_saved_can_be_played(subprocess_env, tmp_path):
    run([str(ROOT / "examples/ppo.py"), *TRAINING, "--save", "policy.pt"], env=subprocess_env, cwd=tmp_path)
    command = ["play", "CartPole-v1", "--agent", "examples.play_ppo:agent", "--video", "ppo.mp4"]
    lines = run(["-m", "rlstructs.cli", *command], env=subprocess_env, cwd=tmp_path).splitlines()
    assert re.fullmatch(r"episode 1: return (\d+)\.00, \1 steps", lines[0]) and lines[1] == "wrote ppo.mp4"


def test_what_was_not_saved_cannot_be_played(subprocess_env, tmp_path):
    command = [sys.executable, "-m", "rlstructs.cli", "play", "CartPole-v1", "--agent", "examples.play_ppo:agent"]
    done = subprocess.run(
        [*command, "--video", "ppo.mp4"], capture_output=True, text=True, env=subprocess_env, cwd=tmp_path, timeout=100
    )
    words = "policy.pt: no such file, first run python examples/ppo.py --save policy.pt"
    assert done.returncode == 2 and words in done.stderr


@pytest.fixture
def transformer(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("ppo_transformer")


@pytest.mark.parametrize("n_layers", [1, 2])
@pytest.mark.parametrize("task", ["cart-pole", "t-maze"])
def test_a_transformer_over_packs_is_the_one_that_acted(transformer, task, n_layers):
    args = transformer.Args(task=task, n_layers=n_layers, window=5)
    network = transformer.ActorCritic(2, {"cart-pole": 2, "t-maze": 3}[task], args)
    torch.nn.init.orthogonal_(network.actor.weight, 2.0)
    infos = {"agent_info": DictTensor({"greedy": torch.tensor([False])})}
    with RL_Batcher(
        40, transformer.Policy, {"network": network},
        transformer.create_env, {"task": task, "n_envs": 3, "gamma": 0.99}, 0, 0, **infos,
    ) as batcher:  # fmt: skip
        batcher.reset(agent_info=DictTensor({"greedy": torch.zeros(3, dtype=torch.bool)}))
        for _ in range(3):  # the second begins in the middle of episodes
            batcher.execute()
            pack = batcher.get()[0].packed("episode")
            policy = network.policy(network(pack.state, pack["observation/frame"], pack.segment_ids))
            log_probs = policy.log_prob(pack["action/action"])
            torch.testing.assert_close(log_probs, pack["action/log_prob"], rtol=0, atol=1e-5)


def test_attention_of_variable_length_is_that_with_a_mask(transformer, monkeypatch):
    def varlen_attn(q, k, v, begins, _, longest, __, *, window_size):
        assert longest == begins.diff().max() and q.dtype == torch.bfloat16 and begins.dtype == torch.int32
        parts = []
        for low, high in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True):
            back = torch.arange(high - low)[:, None] - torch.arange(high - low)
            allowed = (back >= -window_size[1]) & (back <= window_size[0])
            own = (x[low:high].transpose(0, 1) for x in (q, k, v))
            parts.append(torch.nn.functional.scaled_dot_product_attention(*own, allowed).transpose(0, 1))
        return torch.cat(parts)

    class OnCuda(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(transformer, "varlen_attn", varlen_attn)
    ids, qkv = torch.tensor([0, 0, 0, 0, 0, 1, 2, 2, 2]), torch.randn(3, 9, 2, 4).bfloat16().float()
    found, expected = (transformer.attention(each, 3)(*qkv) for each in (ids.as_subclass(OnCuda), ids))
    torch.testing.assert_close(found.as_subclass(torch.Tensor), expected, rtol=0, atol=0.02)


def test_the_turn_of_the_maze_is_told_at_its_beginning_alone(transformer):
    _, make = transformer.TASKS["t-maze"]
    shown = {}
    for seed, goal in ((seed, goal) for seed in range(8) for goal in (1, 2)):
        env = make()
        first, _ = env.reset(seed=seed)
        rows = [first, *(env.step(0)[0] for _ in range(20))]
        assert env.step(0)[1:3] == (-0.1, False)  # there is a wall
        _, reward, terminated, _, _ = env.step(goal)
        assert terminated and reward == (first[0] == {1: -1, 2: 1}[goal])
        shown.setdefault(float(first[0]), []).append(np.stack(rows)[1:])
    assert set(shown) == {-1.0, 1.0}
    assert all(np.array_equal(rows, shown[1.0][0]) for each in shown.values() for rows in each)


def test_dqn_refuses_continuous_actions(subprocess_env, tmp_path):
    command = [sys.executable, str(ROOT / "examples/dqn.py"), "--env-id", "Pendulum-v1"]
    done = subprocess.run(command, capture_output=True, text=True, env=subprocess_env, cwd=tmp_path, timeout=LIMIT)
    assert done.returncode == 1
    assert re.fullmatch(r"Pendulum-v1: --env-id needs a Discrete .*, got Box\(.*\): try sac.py\n", done.stderr)


class Frames(gymnasium.Env):
    """Frames at random, rewards that exceed 1, and episodes that terminate."""

    observation_space = gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._draw(), {}

    def step(self, action):
        return self._draw(), float(self.np_random.integers(-3, 4)), self.np_random.random() < 0.15, False, {}

    def _draw(self):
        return self.np_random.integers(0, 256, (4, 84, 84), np.uint8)


def update_by_formulas(network, optimizer, steps, orders, args):
    """An update of PPO step by step (Schulman et al., 2017), with clipped values as in OpenAI's baselines."""
    rewards, values, ends = steps["_observation/reward"].sign(), steps["action/value"], steps["_observation/terminated"]
    (n, n_timesteps), advantages = rewards.shape, torch.zeros_like(rewards)
    for row in range(n):
        with torch.no_grad():
            value_after, later = network(steps["_observation/frame"][row, -1:])[1][0], 0.0
        for t in reversed(range(n_timesteps)):
            goes_on = 0.0 if ends[row, t] else 1.0
            error = rewards[row, t] + args.gamma * value_after * goes_on - values[row, t]
            later = advantages[row, t] = error + args.gamma * args.gae_lambda * goes_on * later
            value_after = values[row, t]
    size = n * n_timesteps // args.n_minibatches
    for places in (order[start : start + size] for order in orders for start in range(0, len(order), size)):
        row, t = places // n_timesteps, places % n_timesteps
        policy, found = network(steps["observation/frame"][row, t])
        gain, old = advantages[row, t], values[row, t]
        gain, wanted = (gain - gain.mean()) / (gain.std() + 1e-8), gain + old
        ratio = (policy.log_prob(steps["action/action"][row, t]) - steps["action/log_prob"][row, t]).exp()
        surrogate = torch.min(ratio * gain, ratio.clamp(1 - args.clip, 1 + args.clip) * gain).mean()
        near = old + (found - old).clamp(-args.clip, args.clip)
        value_loss = torch.max((found - wanted).square(), (near - wanted).square()).mean() / 2
        loss = -surrogate + value_loss / 2 - args.entropy_weight * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        optimizer.step()


@pytest.fixture
def in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("in_float64")
def test_an_update_of_ppo_atari_is_that_of_its_formulas(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    ppo = importlib.import_module("ppo_atari")
    torch.manual_seed(0)
    network, args = ppo.ActorCritic(3), ppo.Args()
    torch.nn.init.orthogonal_(network.actor.weight, 1.0)  # the first policy is nearly uniform otherwise
    other = copy.deepcopy(network)
    optimizers = [torch.optim.Adam(each.parameters(), lr=2.5e-4, eps=1e-5) for each in (network, other)]
    with RL_Batcher(
        16, ppo.Policy, {"network": network}, lambda seed: GymEnvInf([Frames() for _ in range(4)], seed), {}, 0, 0
    ) as batcher:
        batcher.reset()
        for seed in range(3):
            batcher.execute()
            batch, _ = batcher.get()
            assert batch.trajectories["_observation/terminated"].any()
            torch.manual_seed(seed)
            orders = [torch.randperm(64) for _ in range(args.n_epochs)]
            update_by_formulas(other, optimizers[1], batch.trajectories, orders, args)
            torch.manual_seed(seed)
            ppo.learn(network, optimizers[0], batch, args)
            for found, expected in zip(network.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)
            batcher.update(network.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_dqn_learns_the_same_from_compressed_frames_bit_for_bit(monkeypatch, prefetch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    dqn = importlib.import_module("dqn_atari")
    small = {"n_steps": 80, "n_processes": 1, "n_envs": 2, "n_timesteps": 8, "n_before": 32, "n_updates": 2}
    small |= {"batch_size": 4, "n_eval": 1, "max_frames": 200, "memory_size": 60, "n_between_copies": 4}
    small["prefetch"] = prefetch
    n_threads = torch.get_num_threads()
    try:
        raw, packed, other = (
            dqn.main(dqn.Args(**small, **more)).state_dict() for more in ({}, {"compress": True}, {"seed": 1})
        )
    finally:
        torch.set_num_threads(n_threads)
    assert all(torch.equal(raw[name], packed[name]) for name in raw)
    assert not any(torch.equal(raw[name], other[name]) for name in raw)


def test_a_plot_that_cannot_be_written_is_known_before_the_training(subprocess_env, tmp_path):
    command = [sys.executable, str(ROOT / "examples/ppo.py"), "--plot", "missing/curve.png"]
    done = subprocess.run(command, capture_output=True, text=True, env=subprocess_env, cwd=tmp_path, timeout=LIMIT)
    assert done.returncode == 1 and "missing/curve.png" in done.stderr.splitlines()[-1]


def test_a_training_draws_its_curve_and_keeps_its_metrics(subprocess_env, tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("tensorboard")
    arguments = [*TRAINING, "--plot", "curve.png", "--track", "tensorboard:run"]
    run([str(ROOT / "examples/ppo.py"), *arguments], env=subprocess_env, cwd=tmp_path)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    written = b"".join(path.read_bytes() for path in (tmp_path / "run").iterdir())
    assert b"policy_loss" in written and b"rollout/waiting_share" in written


@pytest.mark.parametrize(
    ("command", "module", "words"),
    [
        (["ppo.py", "--plot=curve.png"], "matplotlib", "--plot needs pip install matplotlib"),
        (["ppo_atari.py"], "ale_py", "Atari games need pip install ale-py opencv-python-headless"),
        (["dqn_atari.py"], "ale_py", "Atari games need pip install ale-py opencv-python-headless"),
    ],
)
def test_an_example_that_lacks_a_package_says_so_before_it_trains(command, module, words, subprocess_env, tmp_path):
    (tmp_path / f"{module}.py").write_text("raise ImportError('not here')")
    environment = {**subprocess_env, "PYTHONPATH": os.pathsep.join([str(tmp_path), subprocess_env["PYTHONPATH"]])}
    arguments = [sys.executable, str(ROOT / "examples" / command[0]), *command[1:]]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert done.stderr == f"not here: {words}\n"


def test_every_example_that_learns_keeps_its_metrics_where_it_is_told_to():
    texts = {path.name: path.read_text() for path in (ROOT / "examples").glob("*.py")}
    learns = {name for name, text in texts.items() if ".backward()" in text or "class Log:" in text}
    assert len(learns) > 10 and learns == {name for name, text in texts.items() if "open_log(args.track, " in text}


def test_an_example_says_which_package_its_log_lacks(subprocess_env, tmp_path):
    (tmp_path / "tensorboard.py").write_text("raise ImportError('not here')")
    environment = {**subprocess_env, "PYTHONPATH": os.pathsep.join([str(tmp_path), subprocess_env["PYTHONPATH"]])}
    command = [sys.executable, str(ROOT / "examples/ppo.py"), "--track", "tensorboard:run"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=LIMIT)
    assert done.returncode == 1 and not (tmp_path / "run").exists()
    words = "ImportError: TensorBoardLog needs tensorboard: pip install tensorboard"
    assert done.stderr.splitlines()[-1] == words


def test_a_memory_of_jax_says_what_it_needs(subprocess_env, tmp_path):
    (tmp_path / "jax.py").write_text("raise ImportError('no jax')")
    path = os.pathsep.join([str(tmp_path), subprocess_env["PYTHONPATH"]])
    command = [sys.executable, str(ROOT / "examples/collect_to_memory.py")]
    done = subprocess.run(command, capture_output=True, text=True, env={**subprocess_env, "PYTHONPATH": path})
    assert done.returncode == 1
    assert "jax is needed for its memories: pip install jax" in done.stderr.splitlines()[-1]


def test_what_trainings_share_is_the_same_in_each():
    texts = [path.read_text() for path in (ROOT / "examples").glob("*.py")]
    shared = [text[text.index("class Log:") : text.index("def main(")] for text in texts if "class Log:" in text]
    assert len(set(shared)) == 1


# Those whose numbers the seed alone decides, and no network, which another processor computes otherwise.
@pytest.mark.parametrize("name", ["1_structures.py", "collect_to_memory.py", "native_vector_env.py", "warp_gather.py"])
def test_an_example_prints_what_its_header_says(name, subprocess_env, tmp_path):
    file = ROOT / "examples" / name
    lines = re.findall(r"^    (.+)$", file.read_text().split('"""')[1], re.MULTILINE)
    *_, command = (line for line in lines if line.startswith(f"python examples/{name}"))
    shown = [without_times(line) for line in lines[lines.index(command) + 1 :] if line != "..."]
    _, _, *arguments = command.split()
    printed = run([str(file), *arguments], env=subprocess_env, cwd=tmp_path).splitlines()
    rest = iter(map(without_times, printed))
    assert len(shown) > 1 and all(line in rest for line in shown), printed


def without_times(line):
    return re.sub(r"[\d.]+e-\d+|\d+ us|[\d.]+ times", "#", line)


def test_help_says_what_an_example_does_and_what_its_defaults_are(subprocess_env, tmp_path):
    printed = run([str(ROOT / "examples/ppo.py"), "--help"], env=subprocess_env, cwd=tmp_path)
    assert "rollouts from parallel workers.\n" in printed
    assert re.search(r"--n-steps N_STEPS +default: 200000\n", printed)


def test_each_row_of_a_population_acts_by_its_own_network():
    outputs_of = runpy.run_path(str(ROOT / "examples/evolution.py"))["outputs_of"]
    parameters, observations = torch.randn(5, 4 * 3 + 3 + 3 * 2 + 2), torch.randn(5, 4)
    outputs = outputs_of(parameters, observations, [4, 3, 2])
    for own, observation, output in zip(parameters, observations, outputs, strict=True):
        first, biases, second, last = own.split([4 * 3, 3, 3 * 2, 2])
        hidden = (observation @ first.view(4, 3) + biases).tanh()
        torch.testing.assert_close(output, hidden @ second.view(3, 2) + last)


def test_cheetahs_that_are_stepped_together_do_what_those_of_gymnasium_do():
    HalfCheetahs = runpy.run_path(str(ROOT / "examples/mujoco_rollout.py"))["HalfCheetahs"]
    check_env(HalfCheetahs, {"n_envs": 2})
    together, singles = HalfCheetahs(2, 5), [gymnasium.make("HalfCheetah-v5") for _ in range(2)]
    first, _ = together.reset()
    for k, env in enumerate(singles):
        np.testing.assert_array_equal(env.reset(seed=5 + k)[0], first["frame"][k])
    actions = np.random.default_rng(0).uniform(-1, 1, (1000, 2, 6)).astype(np.float32)
    for t, action in enumerate(actions):
        for env, state in zip(singles, together.states, strict=True):  # they would drift apart
            env.unwrapped.set_state(state[1:10], state[10:])
        (after, _), (following, _) = together.step(DictTensor({"action": torch.from_numpy(action)}))
        for k, env in enumerate(singles):
            frame, reward, *ends, _ = env.step(action[k])
            np.testing.assert_allclose(after["frame"][k], frame, rtol=0, atol=1e-6)
            assert abs(after["reward"][k].item() - reward) < 1e-6
            assert [after["terminated"][k].item(), after["truncated"][k].item()] == ends == [False, t == 999]
    assert following["initial_state"].all() and not torch.equal(following["frame"], after["frame"])


def test_memories_of_each_library_give_batches_and_masked_sequences(subprocess_env, tmp_path):
    arguments, _ = RUNS["collect_to_memory.py"]
    file = ROOT / "examples/collect_to_memory.py"
    lines = run([str(file), *arguments], env=subprocess_env, cwd=tmp_path).splitlines()
    batches, sequences = lines[:3], lines[3:6]
    for line, kind in zip(batches, ("torch", "jax", "warp"), strict=True):
        assert re.match(rf"{kind}: observations .*64, 4\]?\) (torch\.)?float32, rewards .*64, 1\]?\) ", line)
    counts = {line.split(": ")[1] for line in sequences}  # the same seed draws the same
    assert len(counts) == 1 and re.fullmatch(r"16 sequences of 8 steps, \d+ of 128 count", counts.pop())


@pytest.mark.parametrize("path", ["steps.h5", "steps.npz"])
def test_a_dataset_is_written_by_one_program_and_read_by_another(path, subprocess_env, tmp_path):
    file = str(ROOT / "examples/offline_dataset.py")
    sizes = ["--path", path, "--n-envs", "2", "--n-timesteps", "512", "--n-rollouts", "4", "--n-eval", "4"]
    first = run([file, *sizes, "--n-epochs", "0"], env=subprocess_env, cwd=tmp_path).splitlines()
    assert len(first) == 1
    found = re.fullmatch(rf"{path}: 8192 steps of 4 environments, \d+ episodes, mean return ([\d.]+)", first[0])
    second = run([file, *sizes, "--n-rollouts", "0"], env=subprocess_env, cwd=tmp_path).splitlines()
    words = r"(clone|weighted): loss [\d.]+, 4 episodes, mean return ([\d.]+)"
    clone, weighted = (re.fullmatch(words, line).groups() for line in second[:2])
    # Learning from what went well is better than doing the same.
    assert (clone[0], weighted[0]) == ("clone", "weighted")
    assert float(weighted[1]) > 2 * max(float(found[1]), float(clone[1]))


def test_scores_are_written_down_and_not_measured_again(subprocess_env, tmp_path):
    arguments = ["--rows", "reinforce", "--seeds", "3", "--out", "scores.jsonl", "--", *TRAINING]
    for n_runs in (1, 0):
        lines = run([str(ROOT / "benchmarks/scores.py"), *arguments], env=subprocess_env, cwd=tmp_path).splitlines()
        assert len(lines) == n_runs + 3 and lines[-1].startswith("| reinforce, CartPole-v1 | ")
    [line] = (tmp_path / "scores.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert found["command"] == f"examples/reinforce.py {' '.join(TRAINING)} --seed 3"
    assert found["seed"] == 3 and found["score"] > 0 and found["steps"] >= 64


def test_a_score_stands_until_what_it_ran_changes(tmp_path):
    scores = runpy.run_path(str(ROOT / "benchmarks/scores.py"))
    scores["git"].__globals__["ROOT"] = tmp_path

    def commit(*names):
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(time.time_ns()))
        author = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
        for command in (["add", "."], [*author, "commit", "-q", "-m", "a change"]):
            assert scores["git"](*command).returncode == 0

    assert scores["git"]("init", "-q").returncode == 0
    library = ("rlstructs/rollout/rollout.py", "rlstructs/cli/command.py")
    commit("examples/ppo.py", "examples/dqn.py", *library, "README.md")
    line = {"command": "examples/ppo.py --seed 0", "commit": scores["commit_of"]("examples/ppo.py")}
    commit("README.md", "examples/dqn.py", "rlstructs/cli/command.py")
    assert scores["stands"](line)
    (tmp_path / "examples/ppo.py").write_text("a change that is not committed")
    assert not scores["stands"](line)
    assert scores["commit_of"]("examples/ppo.py").endswith("-dirty")
    assert not scores["commit_of"]("examples/dqn.py").endswith("-dirty")
    commit("examples/ppo.py")
    newer = {**line, "commit": scores["commit_of"]("examples/ppo.py")}
    assert scores["stands"](newer) and not scores["stands"](line)
    commit("rlstructs/rollout/rollout.py")
    assert not scores["stands"](newer)


def test_tables_of_scores_have_means_spreads_and_how_long_collecting_took():
    scores = runpy.run_path(str(ROOT / "benchmarks/scores.py"))
    line = {"row": "ppo-in-turn", "task": "CartPole-v1", "steps": 2048, "steps_per_second": 900, "waiting": 0.25}
    ours = [{**line, "score": score} for score in (470.0, 480.0)]
    peers = [{**line, "row": "ppo-sb3", "score": 400.0, "steps_per_second": 300, "waiting": 0.5}]
    *_, first, second = scores["table"]([*peers, *ours, {**line, "row": "diayn", "score": 0.8}])[:4]
    assert first == "| ppo-in-turn, CartPole-v1 | 2,048 | 475 | 1 of 2 | 475.0 ± 7.1 | 900 | 25% |"
    assert second == "| ppo-sb3, CartPole-v1 | 2,048 | 475 | 0 of 1 | 400.0 | 300 | 50% |"
    assert scores["parts"]([*peers, *ours])[2:] == [
        "| ppo-in-turn | 475.0 ± 7.1 | 900 | 25% | 3,600 | 75% | 1,200 |",
        "| ppo-sb3 | 400.0 | 300 | 50% | 600 | 50% | 600 |",
    ]
    assert scores["parts"](ours) == []
