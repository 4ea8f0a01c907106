"""Errors of workers that name what is to blame: a global, a terminal that is not there, each member of a group."""

from __future__ import annotations

import builtins
import threading

import gymnasium
import pytest

from rlstructs import GymEnvInf, RandomAgent, RL_Batcher, SharedVectorEnv
from rlstructs.workers import WorkerError, WorkerPool

LOCK = threading.Lock()
# Of Python 3.11 and newer.
ExceptionGroup = getattr(builtins, "ExceptionGroup", Exception)


def of_script(function):
    """A function as if it stood in the program itself: it travels by value."""
    function.__module__ = "__main__"
    return function


@of_script
def use_lock(n_envs=1, seed=0):
    with LOCK:
        return GymEnvInf([gymnasium.make("CartPole-v1")], seed)


@of_script
def create(n_envs, seed):
    return use_lock(n_envs, seed)


def closing(lock):
    return lambda **_: lock


THROUGH_GLOBALS = "the global 'LOCK' of the script that use_lock uses"


@pytest.mark.parametrize(
    ("create_env", "env_args", "blamed"),
    [
        (use_lock, {}, f"^create_env .*cannot pickle '_thread.lock' object; it is {THROUGH_GLOBALS}: make it in a "),
        (create, {}, rf"^create_env .*; it is {THROUGH_GLOBALS} \(through the global 'use_lock' of the script "),
        (closing(LOCK), {}, "^create_env .*; it is the variable 'lock' around closing.<lambda>"),
        (create_env := dict, {"n": {"a": [LOCK]}}, r"^env_args\['n'\] .*; it is \[0\] \(through \['a'\]\)"),
        (create_env, {"n": LOCK}, r"^env_args\['n'\] cannot be sent to a worker: cannot pickle '_thread.lock' object$"),
    ],
    ids=["global", "global of a global", "closure", "container", "itself"],
)
def test_the_part_that_cannot_be_sent_is_named(create_env, env_args, blamed):
    with pytest.raises(TypeError, match=blamed):
        RL_Batcher(2, lambda: RandomAgent(gymnasium.spaces.Discrete(2)), {}, create_env, env_args, 1, 0)
    if not env_args:
        with pytest.raises(TypeError, match=blamed.replace("create_env", r"env_fns\[0\]")):
            SharedVectorEnv([create_env], n_workers=1)


class Own(Exception):
    def __init__(self, speed, limit):
        super().__init__(f"{speed} is above {limit}")


class Locked(Exception):
    def __init__(self):
        super().__init__("locked")
        self.lock = threading.Lock()


class Job:
    def __init__(self, index):
        pass

    def debug(self):
        breakpoint()

    def ask(self):
        return input()

    def group(self):
        inner = ExceptionGroup("inner", [Own(3, 4), FileNotFoundError(2, "missing", "file")])
        raise ExceptionGroup("outer", [Own(1, 2), ValueError("value"), Locked(), inner])

    def own_group(self):
        class Group(ExceptionGroup):
            def __new__(cls, errors):
                return super().__new__(cls, "own", errors)

        raise Group([Own(1, 2)])


@pytest.fixture
def pool(start_method, monkeypatch):
    # Ray sets it in its driver, for good, and workers take over the environment: breakpoint() would be Ray's.
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    with WorkerPool(1, Job, start_method=start_method) as pool:
        yield pool


@pytest.mark.skipif(ExceptionGroup is Exception, reason="exception groups are Python 3.11")
def test_each_member_of_a_group_comes_as_it_would_alone(pool):
    with pytest.raises(ExceptionGroup, match="^outer") as caught:
        pool.call("group")
    own, value, locked, inner = caught.value.exceptions
    assert (type(own), str(own), repr(value)) == (Own, "1 is above 2", "ValueError('value')")
    assert isinstance(locked, WorkerError) and "Locked: locked" in str(locked)
    assert [type(error) for error in inner.exceptions] == [Own, FileNotFoundError]
    assert inner.exceptions[1].filename == "file"
    with pytest.raises(ExceptionGroup, match="own") as caught:
        pool.call("own_group")
    assert str(caught.value.exceptions[0]) == "1 is above 2"


@pytest.mark.parametrize("method", ["debug", "ask"])
def test_what_needs_a_terminal_names_what_has_one(method, pool):
    with pytest.raises(Exception) as caught:
        pool.call(method)
    text = " ".join([str(caught.value), *caught.value.__notes__])
    assert "n_processes=0" in text and "n_workers=0" in text
