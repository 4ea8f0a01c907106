"""Runs families of environments: are their rows right, how fast are they, and how are they brought back?

    python tests/integrations/families.py                          every family that is installed, a process for each
    python tests/integrations/families.py --names MiniGrid NLE     some of them
    python tests/integrations/families.py --seconds 0.2            shorter turns

Each is checked by `check_env`, collected with random actions by one worker, in turns with a bare loop of the same
environment, and asked for an exact state. The table in docs/works_with.md, and the list below it, are
what this prints.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass

os.environ |= {"OMP_NUM_THREADS": "1", "SDL_VIDEODRIVER": "dummy", "MUJOCO_GL": os.environ.get("MUJOCO_GL", "egl")}


@dataclass
class Family:
    """Environments of one package.

    Args:
        name: what people call it.
        packages: what is installed beside rlstructs.
        imports: the modules that say whether all that it needs is installed.
        code: defines `make`: an id of gymnasium, or a function that makes one environment.
        n_envs: the environments of the worker; 1 where a process holds no more.
        is_single: whether `make` makes one gymnasium environment, which a bare loop can step.
        is_seeded: whether its steps follow from its seed, which `check_env` asks of an environment.
    """

    name: str
    packages: str
    imports: str
    code: str
    n_envs: int = 4
    is_single: bool = True
    is_seeded: bool = True


PETTINGZOO = """
from rlstructs.integrations.pettingzoo import ParallelEnvs

def make(seed):
    from {module} import {env}
    return ParallelEnvs([{env}.{maker}] * 2, seed)
"""


def of_gymnasium(name, packages, imports, env_id):
    """A family that registers its environments when the first of its modules is imported."""
    return Family(name, packages, imports, f'make = "{imports.split()[0]}:{env_id}"')


def of_pettingzoo(name, packages, imports, module, env, n_agents, maker="parallel_env"):
    """A family of several agents; `n_envs` of a batcher counts these."""
    code = PETTINGZOO.format(module=module, env=env, maker=maker)
    return Family(name, packages, imports, code, 2 * n_agents, is_single=False)


CRAFTER = """
import gymnasium

class Crafter(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 255, (64, 64, 3), "uint8")
    action_space = gymnasium.spaces.Discrete(17)

    def reset(self, *, seed=None, options=None):
        import crafter

        if seed is not None or not hasattr(self, "game"):
            self.game = crafter.Env(seed=seed)
        return self.game.reset(), {}

    def step(self, action):
        frame, reward, done, info = self.game.step(action)
        is_cut = done and bool(info["discount"])  # at its time limit
        return frame, reward, done and not is_cut, is_cut, info

make = Crafter
"""
ROBOSUITE = """
def make():
    import robosuite
    from robosuite.wrappers import GymWrapper
    settings = {"has_renderer": False, "has_offscreen_renderer": False}
    return GymWrapper(robosuite.make("Lift", "Panda", use_camera_obs=False, **settings))
"""
MINIGRID = """
import gymnasium

def make():
    from minigrid.wrappers import ImgObsWrapper
    return ImgObsWrapper(gymnasium.make("MiniGrid-DoorKey-6x6-v0"))
"""
METAWORLD = """
import gymnasium

def make():
    import metaworld
    return gymnasium.make("Meta-World/MT1", env_name="reach-v3")
"""
MINIWORLD = """
import gymnasium

def make():
    import pyglet
    pyglet.options["headless"] = True  # before its windows are imported
    import miniworld
    return gymnasium.make("MiniWorld-OneRoom-v0")
"""
MO_GYMNASIUM = """
def make():
    import mo_gymnasium
    from mo_gymnasium.wrappers import LinearReward
    return LinearReward(mo_gymnasium.make("minecart-v0"))  # a reward is one number
"""
RETRO = """
def make():
    import pyglet
    pyglet.options["headless"] = True  # before its windows are imported
    import stable_retro
    return stable_retro.make("Airstriker-Genesis-v0")
"""
GYMNAX = """
import gymnax

make = gymnax.make("CartPole-v1")
"""
ATARI = """
def make(num_envs):
    from ale_py.vector_env import AtariVectorEnv
    return AtariVectorEnv("pong", num_envs)
"""
ENVPOOL = """
from rlstructs import GymVectorEnv, int32_seed

def make(n_envs, seed):
    import envpool
    settings = {"num_envs": n_envs, "seed": int32_seed(seed)}
    envs = envpool.make("CartPole-v1", env_type="gymnasium", **settings)
    return GymVectorEnv(envs, seed=None, autoreset_mode="NextStep")
"""
JUMANJI = """
def make():
    import jumanji
    from jumanji.wrappers import JumanjiToGymWrapper
    return JumanjiToGymWrapper(jumanji.make("Snake-v1"))
"""
BRAX = """
from brax import envs

make = envs.create("inverted_pendulum", backend="generalized")
"""
OPEN_SPIEL = """
from rlstructs.integrations.pettingzoo import ParallelEnvs

def make(seed):
    import pyspiel
    from shimmy import OpenSpielCompatibilityV0

    def make_one():
        return OpenSpielCompatibilityV0(env=pyspiel.load_game("kuhn_poker"))

    return ParallelEnvs([make_one] * 2, seed)
"""

FAMILIES = [
    Family("Classic control", "gymnasium", "gymnasium", 'make = "CartPole-v1"'),
    Family("Box2D", "gymnasium[box2d]", "Box2D", 'make = "LunarLander-v3"'),
    Family("MuJoCo", "gymnasium[mujoco]", "mujoco", 'make = "HalfCheetah-v5"'),
    of_gymnasium("ALE, one by one", "ale-py", "ale_py", "ALE/Pong-v5"),
    Family("ALE, vectorised", "ale-py", "ale_py", ATARI, is_single=False),
    Family("MiniGrid", "minigrid", "minigrid", MINIGRID),
    Family("Crafter", "crafter", "crafter", CRAFTER, is_seeded=False),
    of_gymnasium("ViZDoom", "vizdoom", "vizdoom.gymnasium_wrapper", "VizdoomBasic-v1"),
    of_gymnasium("dm_control", "shimmy[dm-control]", "shimmy dm_control", "dm_control/cheetah-run-v0"),
    Family("MetaWorld", "metaworld", "metaworld", METAWORLD),
    of_gymnasium("highway-env", "highway-env", "highway_env", "highway-fast-v0"),
    of_gymnasium("PyBullet", "pybullet_envs_gymnasium", "pybullet_envs_gymnasium", "HalfCheetahBulletEnv-v0"),
    Family("MiniWorld", "miniworld", "miniworld", MINIWORLD),
    Family("robosuite", "robosuite", "robosuite", ROBOSUITE),
    of_gymnasium("Gymnasium-Robotics", "gymnasium-robotics", "gymnasium_robotics", "FetchReach-v4"),
    Family("MO-Gymnasium", "mo-gymnasium", "mo_gymnasium", MO_GYMNASIUM),
    of_gymnasium("Flappy Bird", "flappy-bird-gymnasium", "flappy_bird_gymnasium", "FlappyBird-v0"),
    of_gymnasium("PyFlyt", "PyFlyt", "PyFlyt.gym_envs", "PyFlyt/QuadX-Hover-v1"),
    of_gymnasium("panda-gym", "panda-gym", "panda_gym", "PandaReach-v3"),
    Family("stable-retro", "stable-retro", "stable_retro", RETRO, n_envs=1),
    of_gymnasium("AnyTrading", "gym-anytrading", "gym_anytrading", "stocks-v0"),
    of_gymnasium("bsuite", "shimmy[bsuite]", "shimmy bsuite", "bsuite/catch-v0"),
    Family("EnvPool", "envpool", "envpool", ENVPOOL, is_single=False),
    Family("Jumanji", "jumanji", "jumanji", JUMANJI),
    Family("gymnax", "gymnax", "gymnax", GYMNAX, is_single=False),
    Family("Brax", "brax", "brax", BRAX, is_single=False),
    of_pettingzoo("PettingZoo MPE", "mpe2", "mpe2", "mpe2", "simple_spread_v3", 3),
    of_pettingzoo("PettingZoo SISL", "pettingzoo[sisl]", "pettingzoo pygame", "pettingzoo.sisl", "pursuit_v5", 8),
    of_pettingzoo(
        "PettingZoo classic",
        "pettingzoo[classic]",
        "pettingzoo pygame",
        "pettingzoo.classic",
        "connect_four_v3",
        2,
        "env",
    ),
    of_pettingzoo(
        "PettingZoo Butterfly",
        "pettingzoo[butterfly]",
        "pettingzoo pymunk",
        "pettingzoo.butterfly",
        "pistonball_v6",
        20,
    ),
    Family("OpenSpiel", "shimmy[openspiel]", "pyspiel", OPEN_SPIEL, n_envs=4, is_single=False),
]


def makers_of(family):
    """The first argument of `RL_Batcher.make`, and a function that makes one environment."""
    import gymnasium

    names = {"__name__": "family"}
    exec(compile(family.code, family.name, "exec"), names)  # what the page shows is what runs
    make = names["make"]
    return make, (lambda: gymnasium.make(make)) if isinstance(make, str) else make


class BareLoop:
    """Steps one environment with actions drawn from its space."""

    def __init__(self, make):
        self.env = make()
        self.env.action_space.seed(0)
        self.env.reset(seed=0)

    def run(self, seconds):
        """Steps per second."""
        env, n, start = self.env, 0, time.perf_counter()
        while (taken := time.perf_counter() - start) < seconds:
            for _ in range(16):
                *_, terminated, truncated, _ = env.step(env.action_space.sample())
                n += 1
                if terminated or truncated:
                    env.reset()
        return n / taken


def collect(batcher, seconds):
    """Steps per second."""
    n, start = 0, time.perf_counter()
    while (taken := time.perf_counter() - start) < seconds:
        for rollout in batcher.rollouts(n_steps=1):
            n += int(rollout.lengths.sum())
    return n / taken


def method_of(batcher):
    """How the environments of a batcher are brought back."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = batcher.state_dict(exact="best")
    return "-" if caught else ", ".join(sorted({each["method"] for each in state["exact"]["environments"]}))


def run_family(family, seconds):
    """Checks and measures a family; returns a row of the table."""
    from rlstructs import RL_Batcher, SpecError
    from rlstructs.testing import check_env

    make, make_one = makers_of(family)
    row = {}
    if family.is_single:
        try:
            check_env(make_one(), n_steps=100, uses_seed=family.is_seeded)
        except SpecError as error:  # it breaks gymnasium's rules, and may work all the same
            row["check"] = re.split(r"; | \(", str(error).splitlines()[0])[0]
    settings = {"n_envs": family.n_envs, "n_workers": 1, "n_timesteps": 32, "seed": 0}
    settings["episode_seeds"] = family.is_single  # so that an episode can be played again
    with RL_Batcher.make(make, **settings) as batcher:
        collect(batcher, 0)
        shares, bare = [], BareLoop(make_one) if family.is_single else None
        for _ in range(3):
            own = collect(batcher, seconds)
            shares.append((own, own / bare.run(seconds) if bare else 0.0))
        row["speed"], row["share"] = (statistics.median(column) for column in zip(*shares, strict=True))
        row["exact"] = method_of(batcher)
    return row


def run_apart(family, seconds):
    """Runs a family in a process of its own; returns its row, or what went wrong."""
    command = [sys.executable, __file__, "--run", family.name, "--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"error": " / ".join(done.stderr.strip().splitlines()[-2:])}
    return json.loads(lines[-1])


def is_installed(family):
    return all(importlib.util.find_spec(name.split(".")[0]) for name in family.imports.split())


def line_of(family, row):
    """A row of the page's table."""
    share = f"{row['share']:.2f}" if row["share"] else ""
    return f"| {family.name} `{family.packages}` | {row['speed']:,.0f} | {share} | {row['exact']} |"


HEAD = """\
| environments, package | steps/s | of a bare loop | exact state |
| --- | --- | --- | --- |"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", default=[family.name for family in FAMILIES])
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if arguments.run:
        [family] = [family for family in FAMILIES if family.name == arguments.run]
        print(json.dumps(run_family(family, arguments.seconds)))
        return
    print(HEAD)
    checks = []
    for family in FAMILIES:
        if family.name in arguments.names:
            row = run_apart(family, arguments.seconds) if is_installed(family) else {"error": "not installed"}
            print(f"{family.name}: {row['error']}" if "error" in row else line_of(family, row), flush=True)
            checks += [f"- **{family.name}**: {row['check']}"] if "check" in row else []
    print("", *checks, sep="\n")


if __name__ == "__main__":
    main()
