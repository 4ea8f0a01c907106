"""A program whose workers look for what its main module has; printed is what differs from the main process.

Usage: python main_program.py SURFACE START_METHOD [child]
"""

import copy
import dataclasses
import enum
import functools
import io
import multiprocessing
import pickle
import sys
import typing

import gymnasium
import numpy as np
import torch

from rlstructs import GymEnvInf, RandomAgent, RL_Batcher, SharedVectorEnv
from rlstructs.workers import WorkerPool


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2

    def doubled(self):
        return 2 * self


class Sides(enum.Flag):
    LEFT = 1
    RIGHT = 2


class Config(typing.TypedDict):
    level: "Level"


class More(Config, total=False):
    sides: Sides


class Point(typing.NamedTuple):
    x: int = 3


@dataclasses.dataclass
class Settings:
    level: "Level" = Level.HIGH
    points: "list[Point]" = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    level: int = 1


class Outer:
    class Inner:
        class Most:
            def hello(self):
                return helper(3)


class Reduced:
    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return make_reduced, (self.value,)


def make_reduced(value):
    return Reduced(value)


REGISTRY = {}
FACTOR = 2
TABLE = np.arange(5)
_hidden = {"a": [1, 2]}
Name = typing.NewType("Name", int)
count = 0


def register(value):
    REGISTRY[value.__name__] = value
    return value


@register
def helper(x):
    return x * FACTOR + len(REGISTRY) + len(_hidden["a"]) + int(TABLE.sum())


@register
class Plugin:
    partner = None

    def is_whole(self):
        return REGISTRY["Plugin"] is Plugin and Plugin.partner.partner is Plugin


class Second(Plugin):
    partner = Plugin


Plugin.partner = Second


def with_hints(level: "Level", at: "Point") -> "Settings":
    return Settings(level)


def child(queue):
    queue.put((Level.HIGH, helper(1)))


def in_a_process():
    """What a process started here by the default of most programs sends back."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    found = queue.get()
    process.join()
    return found


def loaded(data):
    return torch.load(io.BytesIO(data), weights_only=False)


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


CLASSES = ["Level", "Sides", "Config", "More", "Point", "Settings", "Frozen", "Outer", "Reduced", "Plugin", "Second"]
VALUES = ["FACTOR", "TABLE"]


def imported():
    from __main__ import Level, make_reduced

    return Level.HIGH.doubled(), make_reduced(2).value, Level is sys.modules["__main__"].Level


def counted():
    global count
    count += 1
    return sys.modules["__main__"].count == count


def facts(data, torch_data):
    """What a part of the program sees of its main module; the same in every process."""
    main = sys.modules["__main__"]
    objects = pickle.loads(data)
    checks = {
        "hints of functions": lambda: repr(typing.get_type_hints(main.with_hints)),
        "loaded": lambda: repr(objects[:5]),
        "methods": lambda: (objects[6].hello(), objects[7].value, objects[8].is_whole(), objects[0].doubled()),
        "classes": lambda: [type(one) is getattr(main, type(one).__name__) for one in objects[:6]],
        "again": lambda: repr(pickle.loads(pickle.dumps(objects))[:5]) == repr(objects[:5]),
        "torch": lambda: repr(loaded(torch_data)),
        "copied": lambda: copy.deepcopy(objects[7]).value,
        "attributes": lambda: [repr(getattr(main, name)) for name in VALUES],
        "qualified": lambda: [getattr(main, name).__qualname__ for name in CLASSES],
        "nested": lambda: main.Outer.Inner.Most is type(objects[6]),
        "functions": lambda: pickle.loads(pickle.dumps(main.helper)) is main.helper,
        "hints": lambda: [repr(typing.get_type_hints(one)) for one in (main.Settings, main.Config, main.More)],
        "fields": lambda: repr([field.name for field in dataclasses.fields(main.Settings)]),
        "dataclass": lambda: repr(dataclasses.replace(main.Settings(), level=1)),
        "new type": lambda: (main.Name(3), main.Name.__supertype__),
        "imported": imported,
        "counted": counted,
        "process": in_a_process,
        "names": lambda: (main.__name__, main.__doc__, __name__, getattr(main, "__file__", None)),
        "partial": lambda: functools.partial(main.make_reduced, 4)().value,
    }  # fmt: skip
    found = {}
    for name, check in checks.items():
        try:
            found[name] = check()
        except Exception as error:
            found[name] = repr(error)
    return found


class Job:
    def __init__(self, index, *arguments):
        self.arguments = arguments

    def facts(self):
        return facts(*self.arguments)

    def nested(self, start_method, expected):
        with_pool(start_method, expected, self.arguments)


class Env(gymnasium.Env):
    """Its reward is 1 if it sees what the main process sees, else it raises what differs."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, expected=None, arguments=()):
        self.expected, self.arguments = expected, arguments

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        check(self.expected, facts(*self.arguments))
        return np.zeros(1, np.float32), 1.0, False, True, {}


def check(expected, found):
    wrong = {name: (found[name], expected[name]) for name in expected if found[name] != expected[name]}
    if wrong:
        raise AssertionError(f"found, expected: {wrong}")


def with_batcher(start_method, is_evaluation, expected, arguments):
    n_processes = 0 if start_method == "none" else 1
    with RL_Batcher(
        2, lambda: RandomAgent(Env.action_space), {}, lambda n_envs, seed: GymEnvInf([gymnasium.make(
            "Main/Env-v0", expected=expected, arguments=arguments, disable_env_checker=True)] * n_envs, seed),
        {"n_envs": 1}, n_processes=n_processes, seeds=0, start_method=start_method if n_processes else None,
    ) as batcher:  # fmt: skip
        batcher.reset()
        if is_evaluation:
            batcher.evaluate(2, seed=0)
        else:
            batcher.execute()
            batcher.get()


def with_vector_env(start_method, expected, arguments):
    n_workers = 0 if start_method == "none" else 1
    with SharedVectorEnv(
        [lambda: gymnasium.make("Main/Env-v0", expected=expected, arguments=arguments, disable_env_checker=True)],
        n_workers=n_workers, start_method=None if n_workers == 0 else start_method,
    ) as envs:  # fmt: skip
        envs.reset(seed=0)
        assert envs.step(np.zeros(1, np.int64))[1].tolist() == [1.0]


def with_pool(start_method, expected, arguments):
    with WorkerPool(2, functools.partial(make_job, arguments=arguments), start_method=start_method) as pool:
        for found in pool.call("facts"):
            check(expected, found)


def with_nested_pool(start_method, expected, arguments):
    with WorkerPool(1, functools.partial(make_job, arguments=arguments), start_method=start_method) as pool:
        pool.call("nested", start_method, expected)


def make_job(index, arguments):
    return Job(index, *arguments)


def main(surface, start_method):
    gymnasium.register("Main/Env-v0", entry_point="__main__:Env")
    objects = [Level.HIGH, Sides.LEFT | Sides.RIGHT, Point(4), Settings(points=[Point()]), Frozen(2), Second(),
               Outer.Inner.Most(), Reduced(3), Second(), More, helper, Name]  # fmt: skip
    arguments = pickle.dumps(objects), saved([Level.LOW, Settings()])
    expected = facts(*arguments)
    if __name__ != "__main__":  # multiprocessing runs it in another namespace than that of the module
        del expected["counted"]
    if surface == "pool":
        with_pool(start_method, expected, arguments)
    elif surface == "nested":
        with_nested_pool(start_method, expected, arguments)
    elif surface == "vector":
        with_vector_env(start_method, expected, arguments)
    else:
        with_batcher(start_method, surface == "evaluation", expected, arguments)
    sys.stdout.write(f"the same in {surface} {start_method}\n")


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    if sys.argv[3:]:  # in a process that multiprocessing starts, where this module is called __mp_main__
        process = multiprocessing.Process(target=main, args=sys.argv[1:3])
        process.start()
        process.join()
    else:
        main(*sys.argv[1:])
