"""Environments of gymnax and Brax: every transition is that of a Python loop over their own functions."""

from __future__ import annotations

import importlib
import sys

import gymnax
import pytest
from jax_transitions import BRAX, GYMNAX, brax_functions, compare, gymnax_functions

from rlstructs.envs import JaxFunctions, from_gymnax
from rlstructs.errors import SpecError

# Of gymnax: dtypes that jax does not have, or will refuse some day. Of Brax: that nobody maintains it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype:UserWarning"),
    pytest.mark.filterwarnings("ignore:Brax System:UserWarning"),
    pytest.mark.filterwarnings("ignore:Accessing:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning"),
]
# Transitions that compile quickly; tests/jax_transitions.py compares more of all.
QUICK, ENDLESS = ("CartPole-v1", "Catch-bsuite"), ("Acrobot-v1", "FourRooms-misc", "MountainCar-v0", "Pendulum-v1")
N_STEPS = 50


@pytest.mark.parametrize(
    ("name", "limit"),
    [pytest.param(*item, marks=[pytest.mark.slow] * (item[0] not in QUICK)) for item in GYMNAX.items()],
)
def test_every_transition_of_gymnax_is_that_of_its_own_functions(name, limit):
    ends, _ = compare(*gymnax_functions(name, limit), N_STEPS)
    assert ends[1] > 0 or limit == 100, ends
    assert ends[0] > 0 or name in ENDLESS, ends


@pytest.mark.slow
@pytest.mark.parametrize(("name", "limit"), BRAX.items())
def test_every_transition_of_brax_is_that_of_its_own_functions(name, limit):
    pytest.importorskip("brax.envs")
    assert compare(*brax_functions(name, limit), N_STEPS, 1e-5)[0][1] > 0


def test_params_without_a_limit_cannot_tell_the_ends_apart():
    env, _ = gymnax.make("CartPole-v1")
    with pytest.raises(
        SpecError, match="CartPole-v1 cannot tell terminated from truncated: its params have no max_step"
    ):
        from_gymnax(env, object())


def test_without_jax_an_error_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.delitem(sys.modules, "rlstructs.envs.jax_trees", raising=False)
    with pytest.raises(ImportError, match=r"jax is needed .*pip install jax$"):
        importlib.import_module("rlstructs.envs.jax_trees")


def test_an_environment_of_gymnax_becomes_functions_of_gymnasium_s_spaces():
    functions = from_gymnax(*gymnax.make("CartPole-v1"))
    assert isinstance(functions, JaxFunctions)
    assert functions.action_space.n == 2 and functions.observation_space.shape == (4,)
