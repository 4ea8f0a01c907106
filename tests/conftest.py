"""Fixtures that several test files share."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import sys
from importlib.metadata import version

# Threads of torch that wait for work would keep turning, on cores that other tests, workers and programs need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import hypothesis
import parts
import programs
import pytest
from folders import PYTHONPATH

from rlstructs.batcher import start
from rlstructs.envs.shared_vector import hosts

# Until the tests are collected: what is made by then stays, and looking at it would take a quarter of the time.
gc.disable()

# A shell that starts this in the background has it ignore Ctrl-C, and so would every program that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# tianshou compiles functions with numba, which takes half a minute.
os.environ.setdefault("NUMBA_DISABLE_JIT", "1")

# Fixes the default: torchrl sets another one when it is imported, unless there is one.
multiprocessing.get_start_method()

# minari and tianshou 2 have no release for Python 3.10.
if sys.version_info < (3, 11):
    collect_ignore_glob = ["integrations/test_minari.py", "integrations/test_tianshou*.py"]

# By default hypothesis fails what takes more than 200 ms, which on a busy machine anything may.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

# One fork server for the workers of batchers and of vector environments. It imports what the tests' own modules import,
# as each worker would otherwise when it unpickles an environment.
OWN_PRELOAD = hosts.PRELOAD
start.PRELOAD = hosts.PRELOAD = (
    *start.PRELOAD, *hosts.PRELOAD, "rlstructs.batcher.batcher", "rlstructs.testing.faulty_env", "psutil",
    "pytest", "helpers", "processes",
)  # fmt: skip

# `fork` copies the locks that threads of other tests hold: its cases have a process of their own (test_fork.py).
IS_FORK = "TEST_FORK" in os.environ
START_METHODS = ["fork"] if IS_FORK else ["forkserver", "spawn"]


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    items[:] = [item for item in items if (start_method_of(item) == "fork") == IS_FORK]
    parts.mark(items)
    result = yield  # those of the other part are left out
    items[:] = parts.deal(items, getattr(config, "workerinput", {"workercount": 1})["workercount"])
    return result


# What torch 2.7 and Warp 1.11, the lowest that the tests' packages take, lack on a CPU.
LACKING = [
    ("torch", "2.7.", re.compile(r"\"(index|where)_cpu\" not implemented for '(UInt(16|32|64)|Float8_\w+)'")),
    ("warp-lang", "1.11.", re.compile("is bfloat16, which warp lacks|module 'warp' has no attribute 'bfloat16'")),
]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    except Exception as error:
        for package, lowest, message in LACKING:
            if message.search(str(error)) and version(package).startswith(lowest):
                pytest.skip(f"{package} {version(package)}: {error}")
        raise


@pytest.hookimpl(tryfirst=True)  # after xdist's own hook no other is called
def pytest_runtestloop():
    # Many tests collect garbage, which would otherwise look at all that pytest and the libraries hold: for a second.
    gc.collect()
    gc.freeze()
    gc.enable()


def start_method_of(item):
    """Of a test that has it as a parameter, None of others."""
    found = getattr(item, "callspec", None)
    return found.params.get("start_method") if found else None


@pytest.fixture(params=START_METHODS)
def start_method(request):
    return request.param


@pytest.fixture
def own_preload(monkeypatch):
    """Workers of vector environments are forked from a server that has imported what it has without the tests."""
    monkeypatch.setattr(hosts, "PRELOAD", OWN_PRELOAD)


@pytest.fixture
def subprocess_env(tmp_path):
    """The environment of a program that the test runs: finds the library and the helpers."""
    # Unbuffered, a line and its end are two writes: what several workers print at once would be mixed.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    # Stable-Baselines3 would write its logs into a new folder of the system's temporary directory.
    return {**inherited, "PYTHONPATH": PYTHONPATH, "SB3_LOGDIR": str(tmp_path / "sb3_logs")}


@pytest.fixture
def quick_programs():
    """Programs of the test start without importing torch anew; see `programs.py`."""
    with programs.quick_programs():
        yield


@pytest.fixture
def small_training(tmp_path, monkeypatch):
    """For trainings of small networks: one thread of torch, and logs that end with the test.

    Several threads would wait for each other on a busy machine. Stable-Baselines3 would write its logs into a new
    folder of the system's temporary directory.
    """
    import torch

    monkeypatch.setenv("SB3_LOGDIR", str(tmp_path / "sb3_logs"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
