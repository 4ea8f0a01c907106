"""The program's main module in workers, which never import it: what it defines is found there under `__main__`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "main_program.py"
METHODS = ["forkserver", "spawn", "fork"]


def said_by(env, *command, text=None, cwd=None):
    """The last line of what a program prints; what it says of an error if it fails."""
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=env, input=text, cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1] if done.stdout else done.stderr


@pytest.mark.parametrize(
    ("surface", "method"),
    [("pool", "forkserver"), ("pool", "spawn"), ("pool", "fork"), ("batcher", "spawn"), ("batcher", "none"),
     ("evaluation", "forkserver"), ("vector", "forkserver"), ("vector", "none"), ("nested", "forkserver")],
)  # fmt: skip
def test_a_worker_finds_in_main_what_the_main_process_does(surface, method, subprocess_env):
    assert said_by(subprocess_env, PROGRAM, surface, method) == f"the same in {surface} {method}"


WAYS = {
    "module": ["-m", "main_program"],
    "package": ["-m", "package.program"],
    "text": ["-c", PROGRAM.read_text()],
    "input": ["-"],
    "runpy": ["-c", f"import runpy; runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"],
}


@pytest.mark.parametrize("way", WAYS)
def test_however_the_program_is_run(way, subprocess_env, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "program.py").write_text(PROGRAM.read_text())
    text = PROGRAM.read_text() if way == "input" else None
    said = said_by(subprocess_env, *WAYS[way], "pool", "forkserver", text=text, cwd=tmp_path)
    assert said == "the same in pool forkserver"


@pytest.mark.parametrize("method", METHODS)
def test_in_a_process_that_multiprocessing_has_spawned(method, subprocess_env):
    assert said_by(subprocess_env, PROGRAM, "pool", method, "child") == f"the same in pool {method}"


PREAMBLE = """
import pickle, sys, threading
from rlstructs.workers import WorkerPool

METHOD = sys.argv[1]


class Asked:
    def __init__(self, index, function=None):
        self.function = function

    def ask(self, *arguments):
        return self.function(*arguments)


def asked(function, *arguments):
    import functools
    with WorkerPool(1, functools.partial(Asked, function=function), start_method=METHOD) as pool:
        return pool.call("ask", *arguments)[0]


"""


def run(env, text, *arguments, tmp_path):
    (tmp_path / "script.py").write_text(PREAMBLE + text)
    return said_by(env, tmp_path / "script.py", *arguments)


@pytest.mark.parametrize("method", METHODS)
def test_the_code_of_the_program_runs_once(method, subprocess_env, tmp_path):
    text = """
with open(__file__ + ".runs", "a") as file:
    file.write("top ")

if __name__ == "__main__":
    with open(__file__ + ".runs", "a") as file:
        file.write("main ")

class Never:
    pass

assert asked(lambda: sys.modules["__main__"].Never().__class__.__name__) == "Never"
print(open(__file__ + ".runs").read())
"""
    assert run(subprocess_env, text, method, tmp_path=tmp_path) == "top main "


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_what_is_not_sent_says_why(method, subprocess_env, tmp_path):
    text = """
LOCK = threading.Lock()
HUGE = bytes(10**7)

def locked():
    return LOCK

def reason(name):
    try:
        getattr(sys.modules["__main__"], name)
    except AttributeError as error:
        return str(error)

print(asked(reason, "LOCK"), asked(reason, "HUGE"), asked(reason, "nothing"), sep="|")
try:
    asked(lambda: sys.modules["__main__"].locked())
except NameError as error:
    print(error, error.__notes__[0], sep="|")
"""
    (tmp_path / "script.py").write_text(PREAMBLE + text)
    command = [sys.executable, tmp_path / "script.py", method]
    done = subprocess.run(command, env=subprocess_env, capture_output=True, text=True, check=True)
    attributes, names = done.stdout.splitlines()
    no = "module '__main__' has no attribute '{}' in this worker"
    assert attributes.split("|") == [
        f"{no.format('LOCK')}: TypeError: cannot pickle '_thread.lock' object",
        f"{no.format('HUGE')}: it is too large to be sent to workers unasked",
        no.format("nothing"),
    ]
    reason = "'LOCK' of the script was not sent to this worker: TypeError: cannot pickle '_thread.lock' object"
    assert names.split("|") == ["name 'LOCK' is not defined", reason]


@pytest.mark.parametrize("method", METHODS)
def test_exceptions_of_the_program_are_its_own_when_they_come_back(method, subprocess_env, tmp_path):
    text = """
seen = []

class Broken(Exception):
    def where(self):
        return seen

def fail():
    seen.append("worker")
    raise sys.modules["__main__"].Broken("here")

before = vars(Broken)["where"]
try:
    asked(fail)
except Broken as error:
    print(error, error.where() is seen, seen, vars(Broken)["where"] is before)
"""
    assert run(subprocess_env, text, method, tmp_path=tmp_path) == "here True [] True"


@pytest.mark.parametrize("method", METHODS)
def test_two_pools_have_a_main_module_each(method, subprocess_env, tmp_path):
    text = """
count = 0

def add(n):
    global count
    count += n
    return sys.modules["__main__"].count if METHOD != "fork" else count

with WorkerPool(1, lambda index: Asked(index, add), start_method=METHOD) as one:
    with WorkerPool(2, lambda index: Asked(index, add), start_method=METHOD) as two:
        print(one.call("ask", 1), two.call("ask", 10), one.call("ask", 1), two.call("ask", 10), count)
"""
    assert run(subprocess_env, text, method, tmp_path=tmp_path) == "[1] [10, 10] [2] [20, 20] 0"


@pytest.mark.parametrize("method", METHODS)
def test_no_name_of_the_script_is_hidden_by_what_finds_them(method, subprocess_env, tmp_path):
    text = """
NAMES = ["find", "find_all", "find_now", "loads", "script", "namespace", "explain"]
for name in NAMES:
    globals()[name] = f"mine: {name}"

def look():
    main = sys.modules["__main__"]
    return [name for name in NAMES if getattr(main, name) != f"mine: {name}" or vars(main)[name] != getattr(main, name)]

print(asked(look))
"""
    assert run(subprocess_env, text, method, tmp_path=tmp_path) == "[]"


@pytest.mark.parametrize("method", METHODS)
def test_a_replaced_worker_has_the_main_module_of_its_start(method, subprocess_env, tmp_path):
    text = """
import os, signal

LIMIT = 1

class Late:
    limit = 1

def limits():
    return LIMIT, (sys.modules["__main__"].Late.limit if METHOD != "fork" else 1)

with WorkerPool(1, lambda index, *again: Asked(index, limits), start_method=METHOD) as pool:
    LIMIT = Late.limit = 2
    os.kill(pool.pids[0], signal.SIGKILL)
    pool.settle(pool.restart({0: ()}))
    print(pool.call("ask"))
"""
    assert run(subprocess_env, text, method, tmp_path=tmp_path) == "[(1, 1)]"


@pytest.mark.parametrize("method", METHODS)
def test_entry_points_that_name_the_program_are_found(method, subprocess_env, tmp_path):
    text = """
import types
import cloudpickle, gymnasium, numpy as np
from rlstructs import GymEnvInf, RandomAgent, RL_Batcher, SharedVectorEnv
from gymnasium.envs.registration import WrapperSpec

class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)
    table = np.zeros(10**6)  # more than is sent unasked

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 1.0 + len(self.table), False, False, {}

class Vector(gymnasium.vector.SyncVectorEnv):
    def __init__(self, num_envs, **_):
        super().__init__([Env] * num_envs)

class Add(gymnasium.RewardWrapper):
    def reward(self, reward):
        return reward + 3

by_value = types.ModuleType("by_value")
exec("from __main__ import Env", vars(by_value))
sys.modules["by_value"] = by_value
cloudpickle.register_pickle_by_value(by_value)

gymnasium.register("Main-v0", entry_point="__main__:Env", vector_entry_point="__main__:Vector")
gymnasium.register("Wrapped-v0", entry_point="__main__:Env", additional_wrappers=(
    WrapperSpec("Add", "__main__:Add", {}),))
gymnasium.register("ByValue-v0", entry_point="by_value:Env")

def of_batcher(env_id):
    with RL_Batcher(
        1, lambda: RandomAgent(Env.action_space), {},
        lambda n_envs, seed: GymEnvInf([gymnasium.make(env_id, disable_env_checker=True)], seed), {"n_envs": 1},
        n_processes=1, seeds=0, start_method=METHOD,
    ) as batcher:
        batcher.reset()
        batcher.execute()
        return batcher.get()[0].trajectories["_observation/reward"].item()

with SharedVectorEnv([
    lambda: gymnasium.make("Main-v0", disable_env_checker=True),
    lambda: gymnasium.make("Wrapped-v0", disable_env_checker=True),
    lambda: gymnasium.make_vec("Main-v0", num_envs=1).envs[0],
    lambda: gymnasium.make("ByValue-v0", disable_env_checker=True),
], n_workers=1, start_method=METHOD) as envs:
    envs.reset(seed=0)
    rewards = envs.step(np.zeros(4, np.int64))[1].tolist()
print([of_batcher(env_id) for env_id in ("Main-v0", "Wrapped-v0", "ByValue-v0")], rewards)
"""
    found = run(subprocess_env, text, method, tmp_path=tmp_path)
    assert found == "[1000001.0, 1000004.0, 1000001.0] [1000001.0, 1000004.0, 1000001.0, 1000001.0]"


def test_nodes_of_a_cluster_find_the_program_too(subprocess_env, tmp_path):
    pytest.importorskip("ray", reason="ray is not installed: pip install ray")
    text = """
import gymnasium, numpy as np, ray
from rlstructs import GymEnvInf, RandomAgent, RayBatcher

class Level:
    def __init__(self, n):
        self.n = n

class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        level = pickle.loads(LEVEL)
        is_same = type(level) is sys.modules["__main__"].Level
        return np.zeros(1, np.float32), float(level.n + is_same), False, False, {}

LEVEL = pickle.dumps(Level(4))
gymnasium.register("Main-v0", entry_point="__main__:Env")
ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
with RayBatcher(
    1, lambda: RandomAgent(Env.action_space), {},
    lambda n_envs, seed: GymEnvInf([gymnasium.make("Main-v0", disable_env_checker=True)], seed), {"n_envs": 1},
    n_nodes=1, n_processes=2, seeds=0,
) as batcher:
    batcher.reset()
    batcher.execute()
    print(batcher.get()[0].trajectories["_observation/reward"].flatten().tolist())
"""
    assert run(subprocess_env, text, "none", tmp_path=tmp_path) == "[5.0, 5.0]"
