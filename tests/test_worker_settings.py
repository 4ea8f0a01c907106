"""What workers take over from the trainer as they start: settings of the process, and of numpy, torch and others."""

from __future__ import annotations

import decimal
import locale
import logging
import pickle
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import gymnasium
import jax
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import Count

from rlstructs import GymEnv, RandomAgent, RL_Batcher, SharedVectorEnv
from rlstructs.worker_setup import TABLES, read_libraries
from rlstructs.workers.settings import read_settings, write_settings  # noqa: F401 - a program of a test uses it
from rlstructs.workers.start import START_METHODS


class OwnWarning(UserWarning):
    """Of this file, which workers import by name."""


class AnErrorCall:
    """Takes what numpy says."""

    def write(self, text):
        """Nothing."""


def set_attribute(owner, name, value):
    return lambda: setattr(owner, name, value)


def logger(name):
    return logging.getLogger(f"test_worker_settings.{name}")


# What a script does, and what tells of it; the value is to be the same in a worker, and another one before.
# fmt: off
MEMBERS = {
    "default dtype": (lambda: torch.set_default_dtype(torch.float64), lambda: torch.ones(1).dtype),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True),
        torch.are_deterministic_algorithms_enabled,
    ),
    "deterministic, warns only": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        lambda: (
            torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
    ),
    "filled memory": (
        set_attribute(torch.utils.deterministic, "fill_uninitialized_memory", False),
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
    ),
    "matmul precision": (
        lambda: torch.set_float32_matmul_precision("medium"), torch.get_float32_matmul_precision
    ),
    "cudnn.deterministic": (
        set_attribute(torch.backends.cudnn, "deterministic", True), lambda: torch.backends.cudnn.deterministic
    ),
    "cudnn.benchmark": (
        set_attribute(torch.backends.cudnn, "benchmark", True), lambda: torch.backends.cudnn.benchmark
    ),
    "cudnn.allow_tf32": (
        set_attribute(torch.backends.cudnn, "allow_tf32", False), lambda: torch.backends.cudnn.allow_tf32
    ),
    "denormals": (
        lambda: torch.set_flush_denormal(True), lambda: float(torch.tensor([1e-310], dtype=torch.float64) * 1) == 0
    ),
    "warn always": (lambda: torch.set_warn_always(True), torch.is_warn_always_enabled),
    "numpy errors": (lambda: np.seterr(divide="raise", under="call"), np.geterr),
    "numpy error call": (lambda: np.seterrcall(AnErrorCall()), lambda: type(np.geterrcall()).__name__),
    "gymnasium's logger": (
        set_attribute(gymnasium.logger, "min_level", 40), lambda: sys.modules["gymnasium"].logger.min_level
    ),
    "jax x64": (lambda: jax.config.update("jax_enable_x64", True), lambda: str(jax.numpy.ones(1).dtype)),
    "jax precision": (
        lambda: jax.config.update("jax_default_matmul_precision", "highest"),
        lambda: jax.config.jax_default_matmul_precision,
    ),
    "recursion": (lambda: sys.setrecursionlimit(2345), sys.getrecursionlimit),
    "decimals": (lambda: decimal.setcontext(decimal.Context(prec=5)), lambda: str(decimal.Decimal(1) / 3)),
    "locale": (
        lambda: locale.setlocale(locale.LC_NUMERIC, "C.UTF-8"), lambda: locale.setlocale(locale.LC_NUMERIC)
    ),
    "warnings": (
        lambda: warnings.filterwarnings("error", "never .* this", OwnWarning, r"some\.module", 7),
        lambda: ("error", "never .* this", "OwnWarning", r"some\.module", 7) in [
            (action, getattr(message, "pattern", None), category.__name__, getattr(module, "pattern", None), line)
            for action, message, category, module, line in warnings.filters
        ],
    ),
    "warnings' order": (
        lambda: (warnings.simplefilter("error", OwnWarning), warnings.simplefilter("ignore", OwnWarning)),
        lambda: [each[0] for each in warnings.filters if each[2].__name__ == "OwnWarning" and each[1] is None],
    ),
    "format of warnings": (
        set_attribute(warnings, "formatwarning", lambda message, *rest: f"so: {message}"),
        lambda: warnings.formatwarning("this", UserWarning, "file", 1),
    ),
    "captured warnings": (
        lambda: logging.captureWarnings(True), lambda: logging._warnings_showwarning is not None
    ),
    "level of the root": (lambda: logging.getLogger().setLevel("DEBUG"), lambda: logging.getLogger().level),
    "level": (lambda: logger("level").setLevel(17), lambda: logger("level").level),
    "propagation": (set_attribute(logger("alone"), "propagate", False), lambda: logger("alone").propagate),
    "a logger that is disabled": (set_attribute(logger("off"), "disabled", True), lambda: logger("off").disabled),
    "disabled levels": (lambda: logging.disable(15), lambda: logging.root.manager.disable),
    "names of levels": (lambda: logging.addLevelName(5, "TRACE"), lambda: logging.getLevelName(5)),
}
# fmt: on


def told():
    return {name: read() for name, (_, read) in MEMBERS.items()}


class Tells(Count):
    """Notes, in a file, how its process is set as it is made."""

    def __init__(self, folder):
        super().__init__(3)
        with (Path(folder) / f"{id(self)}-{np.random.rand()}").open("wb") as file:
            pickle.dump(told(), file)


def create_telling(folder, seed):
    return GymEnv([Tells(folder)], seed)


def make_batcher(folder, n_workers, start_method):
    create_agent = lambda: RandomAgent(spaces.Discrete(2))  # noqa: E731
    return RL_Batcher(2, create_agent, {}, create_telling, {"folder": folder}, n_workers, 0, start_method=start_method)


def make_vector(folder, n_workers, start_method):
    return SharedVectorEnv([lambda: Tells(folder)] * max(1, n_workers), n_workers, start_method=start_method)


SURFACES = {"RL_Batcher": make_batcher, "SharedVectorEnv": make_vector}


pytestmark = pytest.mark.usefixtures("quick_programs")


def run(program, env, *arguments):
    """Runs a program of its own: settings are those of a whole process."""
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("method", START_METHODS)
@pytest.mark.parametrize("surface", SURFACES)
def test_workers_are_set_as_the_trainer_is(surface, method, subprocess_env, tmp_path):
    program = """
        import pathlib, pickle, sys
        import test_worker_settings as here
        surface, method, folder = sys.argv[1:]
        before = here.told()
        for set_it, _ in here.MEMBERS.values():
            set_it()
        wanted = here.told()
        assert [name for name in here.MEMBERS if wanted[name] == before[name]] == []
        here.SURFACES[surface](folder, 2, method).close()
        found = [pickle.loads(file.read_bytes()) for file in pathlib.Path(folder).iterdir()]
        assert len(found) >= 2
        for each in found:
            differs = {name: (each[name], wanted[name]) for name in wanted if each[name] != wanted[name]}
            assert not differs, differs
    """
    run(program, subprocess_env, surface, method, str(tmp_path))


@pytest.mark.parametrize("make", SURFACES.values(), ids=SURFACES)
def test_with_no_workers_nothing_is_set(make, tmp_path):
    before = told()
    make(str(tmp_path), 0, None).close()
    assert told() == before


@pytest.mark.parametrize("name", TABLES)
def test_every_setting_can_be_sent_and_is_written_only_where_it_differs(name, subprocess_env):
    program = """
        import sys
        import test_worker_settings as here
        table = here.TABLES[sys.argv[1]]()
        values = here.read_settings(table)
        assert values.keys() == table.keys()
        written = []
        here.write_settings({name: setting._replace(write=written.append) for name, setting in table.items()}, values)
        assert not written, written
        assert here.read_settings(here.TABLES[sys.argv[1]]()) == values
    """
    run(program, subprocess_env, name)


PRECISIONS = {
    "matmul, high": lambda: torch.set_float32_matmul_precision("high"),
    "matmul, medium": lambda: torch.set_float32_matmul_precision("medium"),
    "tf32": set_attribute(torch.backends.cuda.matmul, "allow_tf32", True),
    "no tf32": set_attribute(torch.backends.cudnn, "allow_tf32", False),
    "newer, all": set_attribute(torch.backends, "fp32_precision", "tf32"),
    "newer, one": lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    "newer, mkldnn": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "older and newer": lambda: (
        torch.set_float32_matmul_precision("high"),
        setattr(torch.backends.cuda.matmul, "fp32_precision", "ieee"),
    ),
}


def precisions():
    return {name: data for name, data in read_libraries()["torch"].items() if "tf32" in name or "precision" in name}


class TellsPrecisions(Count):
    def __init__(self):
        super().__init__(3)
        self.precisions = precisions()


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch 2.9 has these settings")
@pytest.mark.parametrize("name", PRECISIONS)
def test_workers_multiply_as_precisely_as_the_trainer_by_whichever_name(name, subprocess_env):
    program = """
        import sys
        import test_worker_settings as here
        here.PRECISIONS[sys.argv[1]]()
        with here.SharedVectorEnv([here.TellsPrecisions], 1) as envs:
            assert envs.get_attr("precisions") == (here.precisions(),), (envs.get_attr("precisions"), here.precisions())
    """
    run(program, subprocess_env, name)
