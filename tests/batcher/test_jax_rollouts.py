"""Rollouts of environments and agents that are functions of jax: one compiled call, and like all other rollouts."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium
import jax
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import through_file
from jax_walk import LIMIT, PARAMS, WALK, Stepping, bias, make_batcher
from processes import wait_until_gone

from rlstructs import GymEnv, JaxAgent, RL_Batcher, SpecError
from rlstructs.envs import jax_trees
from rlstructs.memories.jax import RandomMemory as JaxMemory
from rlstructs.memories.torch import RandomMemory

TESTS = Path(__file__).parent.parent


def rollout(batcher):
    batcher.execute()
    return batcher.get()[0]


def assert_same(one, other, but=()):
    for ours, theirs in ((one.info, other.info), (one.trajectories, other.trajectories)):
        assert set(ours.keys()) == set(theirs.keys())
        for key, tensor in ours.items():
            assert key in but or torch.equal(tensor, theirs[key]), key
    assert torch.equal(one.lengths, other.lengths)


def play(batcher, n=4, start=0):
    """n rollouts, copied, with an update after each."""
    found = []
    for number in range(start, start + n):
        found.append(rollout(batcher))
        batcher.update({**PARAMS, "w": np.float32(number)})
    return found


def start(batcher):
    batcher.reset(agent_info=bias())
    return batcher


# Where each step is written: to its place if rows are wide. Another T, as what is compiled is kept.
@pytest.mark.parametrize(("wide", "n_timesteps"), [(64, 7), (1, 8)])
def test_one_compiled_call_gives_the_rows_of_an_agent_and_environments_that_are_called_step_by_step(
    monkeypatch, wide, n_timesteps
):
    monkeypatch.setattr("rlstructs.envs.jax_env.WIDE", wide)
    sizes = {"n_timesteps": n_timesteps}
    with make_batcher(**sizes) as compiled, make_batcher(cls=Stepping, **sizes) as stepped:
        for one, other in zip(play(start(compiled)), play(start(stepped)), strict=True):
            assert_same(one, other)
        seen = one.trajectories
        assert seen["_observation/terminated"].any() and seen["_observation/done"].sum() > 2
        # The agent's state begins anew with each episode.
        begins = seen["observation/initial_state"]
        assert begins.any() and (seen["action/n"][begins] == 1).all() and seen["action/n"].max() <= LIMIT


def test_finals_are_kept_and_the_next_observation_is_the_first_of_an_episode():
    with RL_Batcher.make(WALK, n_envs=4, n_workers=0, n_timesteps=60, seed=0) as batcher:
        batcher.reset()
        steps = rollout(batcher).trajectories
    done, following = steps["_observation/done"][:, :-1], steps["observation/initial_state"][:, 1:]
    assert torch.equal(done, following)
    at, shown = steps["_observation/at"][..., 0], steps["observation/at"][..., 0]
    assert torch.equal(at, shown + 2 * steps["action/action/way"] - 1)  # of ends too
    assert torch.equal(steps["_observation/terminated"], (at <= 0) | (at >= 6))
    assert torch.equal(steps["_observation/reward"], at * 0.5)
    assert torch.equal(steps["_observation/last_action/push"], steps["action/action/push"])
    assert steps["_observation/truncated"].any()
    goes_on = ~done
    assert torch.equal(at[:, :-1][goes_on], shown[:, 1:][goes_on])
    assert (shown[:, 1:][done] >= 1).all() and (shown[:, 1:][done] < 5).all()
    assert (steps["observation/reward"][:, 1:][done] == 0).all()


def test_the_second_rollout_compiles_nothing():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **more: compiled.append(event) if "backend_compile" in event else None
    )
    with make_batcher(n_timesteps=11) as batcher:
        rollout(start(batcher))
        assert compiled
        batcher.update({**PARAMS, "w": 2.0})
        compiled.clear()
        play(batcher, 2)
        rollout(start(batcher))
    assert not compiled


def test_rows_do_not_depend_on_the_number_of_workers_nor_on_how_they_are_handed_out():
    with make_batcher(2, run_ahead=1) as one, make_batcher(0, run_ahead=1) as other:
        start(one), start(other)
        assert_same(rollout(one), rollout(other))
        one.update({**PARAMS, "w": np.float32(1)}), other.update({**PARAMS, "w": np.float32(1)})
        for batcher in (one, other):
            batcher.execute()
        with one.lease() as leased:
            expected, _ = other.get()
            assert_same(leased.trajectories, expected)
        out = rollout(one)
        rollout(other)
        assert out.info["policy_version"].tolist() == [1] * 4
        one.execute(), other.execute()
        one.get(out=out)
        assert_same(out, other.get()[0])


def test_rollouts_in_this_process_are_the_memory_that_the_compiled_call_returned(monkeypatch):
    made = []

    def note(array):
        made.append(array)
        return jax_trees.tensor_of_jax(array)

    monkeypatch.setattr("rlstructs.envs.jax_env.tensor_of_jax", note)
    memory = JaxMemory(memory_size=64, num_envs=4)
    with make_batcher() as batcher, make_batcher(2) as other:
        start(batcher), start(other)
        first, expected = rollout(batcher), rollout(other)
        kept = first.clone()
        made.clear()
        with jax.transfer_guard("disallow"):
            found = rollout(batcher)
            arrays = found.trajectories.jax(view=True)
            memory.add_trajectories(found)
        addresses = [array.unsafe_buffer_pointer() for array in made]
        assert len(set(addresses)) == len(addresses) == len(list(found.trajectories.keys()))
        for key, tensor in found.trajectories.items():
            assert tensor.is_contiguous()
            assert arrays[key].unsafe_buffer_pointer() == tensor.data_ptr() and tensor.data_ptr() in addresses, key
        assert_same(found, rollout(other))
        batcher.execute()
        with batcher.lease() as leased:
            addresses = [array.unsafe_buffer_pointer() for array in made[len(addresses) :]]
            assert leased.trajectories.trajectories["_observation/wide"].data_ptr() in addresses
        # They are the caller's: later rollouts are written to other memory.
        assert_same(first, kept)
        assert_same(first, expected)


def test_a_memory_that_is_fed_has_what_add_trajectories_would_store():
    with make_batcher() as fed, make_batcher() as other:
        memories = [RandomMemory(memory_size=64, num_envs=4) for _ in range(2)]
        fed.feed(memories[0])
        for one, expected in zip(play(start(fed)), play(start(other)), strict=True):
            assert_same(one, expected)
            memories[1].add_trajectories(expected)
        for name in memories[1].get_tensor_names():
            ours, theirs = (memory.get_tensor_by_name(name) for memory in memories)
            assert torch.allclose(ours, theirs, 0, 0, equal_nan=True), name


def test_a_worker_that_was_killed_is_replaced_and_the_others_rows_go_on():
    with make_batcher(2, on_worker_failure="restart") as batcher, make_batcher() as other:
        start(batcher), start(other)
        assert_same(rollout(batcher), rollout(other))
        pid = batcher._engine.pool.pids[1]
        os.kill(pid, signal.SIGKILL)
        wait_until_gone([pid])
        for _ in range(2):
            after, expected = rollout(batcher), rollout(other)
            assert after.lengths.tolist() == [7] * 4
            for key, tensor in after.trajectories.items():
                assert torch.equal(tensor[:2], expected.trajectories[key][:2]), key
        assert batcher.stats()["restarts"] == 1


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_an_exact_state_goes_on_with_the_same_bits(run_ahead):
    with make_batcher(run_ahead=run_ahead) as batcher:
        play(start(batcher), 3)
        state = through_file(batcher.state_dict(exact=True))
        expected = play(batcher, 3, start=3)
    with make_batcher(run_ahead=run_ahead) as other:
        other.load_state_dict(state)
        for one, two in zip(play(other, 3, start=3), expected, strict=True):
            assert_same(one, two)


def test_updates_take_any_pytree_of_the_same_shapes_and_refuse_others():
    with make_batcher() as batcher:
        start(batcher)
        batcher.update(jax.tree.map(jax.numpy.asarray, {**PARAMS, "w": 5.0}))
        assert rollout(batcher).info["policy_version"].tolist() == [1] * 4
        with pytest.raises(
            SpecError, match=r"update: params: 'layers/0' is float32 \(2, 2\), expected float32 \(3, 2\)"
        ):
            batcher.update({**PARAMS, "layers": (np.ones((2, 2), np.float32),)})


def test_make_takes_functions_and_draws_random_actions_without_an_agent():
    with RL_Batcher.make(WALK, n_envs=4, n_workers=0, n_timesteps=50, seed=0) as batcher:
        batcher.reset()
        steps = rollout(batcher).trajectories
        episodes = batcher.evaluate(4, seed=1)
    assert 0.3 < steps["action/action/way"].float().mean() < 0.7
    push = steps["action/action/push"]
    assert push.min() < -0.8 and push.max() > 0.8 and push.abs().max() <= 1
    assert len(episodes["return"]) == 4


def impure_reset(key, params):
    return np.random.rand(), np.random.rand(3)


COUNTER = []


def counting_step(key, state, action, params):
    COUNTER.append(1)
    state, seen, *rest = WALK.step(key, state, action, params)
    return state, {**seen, "wide": seen["wide"] + len(COUNTER)}, *rest


def keeping_step(key, state, action, params):
    earlier, COUNTER[:] = COUNTER[-1:], [state["at"]]
    state = {**state, "at": sum(earlier, state["at"])}
    return WALK.step(key, state, action, params)


def branching_step(key, state, action, params):
    return WALK.step(key, state, action, params) if state["at"] > 0 else None


def printing_step(key, state, action, params):
    print(state["at"])  # noqa: T201
    return WALK.step(key, state, action, params)


def growing_step(key, state, action, params):
    state, *rest = WALK.step(key, state, action, params)
    return {**state, "at": state["at"] * jax.numpy.ones(2)}, *rest


def complex_step(key, state, action, params):
    state, seen, _, *rest = WALK.step(key, state, action, params)
    return state, seen, 1j, *rest


def short_step(key, state, action, params):
    return WALK.step(key, state, action, params)[:4]


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({"reset": impure_reset}, "walk: reset is not a pure function: called again with the same arguments"),
        ({"step": counting_step}, "walk: step is not a pure function: called again with the same arguments"),
        ({"step": keeping_step}, "walk: step is not a pure function"),
        ({"step": branching_step}, "walk: step is not a pure function .*: TracerBoolConversionError"),
        ({"step": printing_step}, "walk: step prints '.*Trace.*use jax.debug.print"),
        ({"step": growing_step}, r"walk: the state that step returns: 'at' is float32 \(2,\), expected int32 \(\)"),
        ({"step": complex_step}, r"walk: step: reward must be one real number, got complex64 \(\)"),
        ({"step": short_step}, r"walk: step must return \(state, .*info\), got 4 values"),
        (
            {"observation_space": spaces.Dict({"at": spaces.Discrete(7), "wide": spaces.Box(-9, 9, (2,))})},
            r"walk: reset: observation 'wide' has shape \(3,\), its space \(2,\)",
        ),
    ],
)
def test_functions_that_are_not_pure_are_refused_with_their_name(functions, message):
    with pytest.raises(SpecError, match=message):
        RL_Batcher.make(dataclasses.replace(WALK, **functions), n_envs=2, n_workers=0)


def test_an_agent_that_is_not_pure_is_refused():
    def forgetful(params, state, observation, key):
        return {"log_prob": 0.0}, state

    def changing(params, state, observation, key):
        return 0, (state, state)

    for act, message in (
        (forgetful, "agent: no 'action' in its output, there are \\['log_prob'\\]"),
        (changing, "agent: the state that act returns"),
        (lambda params, state, observation, key: 0, "agent: act must return \\(action, state\\), got int32 \\(\\)"),
        (lambda params, state, observation, key: (int(state), state), "agent: act is not a pure function"),
    ):
        with pytest.raises((SpecError, KeyError), match=message):
            RL_Batcher.make(WALK, JaxAgent(act, None, np.float32(0)), n_envs=2, n_workers=0)


def move(**more):
    return {"action": {"way": 1, "push": jax.numpy.zeros(2)}, **more}


def test_an_agent_that_keeps_what_it_was_shown_is_refused_although_it_cannot_be_pickled_any_more():
    kept = []

    def act(params, state, observation, key):
        kept.append(observation["at"])
        return move(n=len(kept)), state

    with pytest.raises(SpecError, match="agent: act is not a pure function: called again with the same arguments"):
        RL_Batcher.make(WALK, JaxAgent(act), n_envs=2, n_workers=0)


def test_what_is_no_array_is_refused_with_its_place():
    def named(params, state, observation, key):
        return move(name="walker"), state

    with pytest.raises(SpecError, match=r"agent: act takes or returns .* no array: .*str"):
        RL_Batcher.make(WALK, JaxAgent(named), n_envs=2, n_workers=0)
    functions = dataclasses.replace(WALK, params={**WALK.params, "kind": "steep"})
    with pytest.raises(SpecError, match=r"walk: reset takes or returns .* no array: .*str"):
        RL_Batcher.make(functions, n_envs=2, n_workers=0)
    for leaf in (jax.nn.relu, "steep"):
        with pytest.raises(SpecError, match=r"JaxAgent: params\['kind'\] is a .*, expected an array or a number"):
            JaxAgent(named, {"kind": leaf})


def with_observation(seen):
    """The walk with another observation."""

    def reset(key, params):
        return WALK.reset(key, params)[0], seen

    def step(key, state, action, params):
        state, _, *rest = WALK.step(key, state, action, params)
        return state, seen, *rest

    return dataclasses.replace(WALK, reset=reset, step=step)


def test_observations_that_cannot_be_stored_are_refused_with_their_name():
    for seen, message in (
        ({"a/b": 0.0, "a": {"b": 1.0}}, "two arrays are called 'a/b'"),
        ({"at": jax.numpy.bfloat16(0)}, "walk: observation 'at' is bfloat16, which numpy lacks; make it float32"),
    ):
        with pytest.raises(SpecError, match=message):
            RL_Batcher.make(with_observation(seen), n_envs=2, n_workers=0)


@pytest.mark.parametrize(
    ("initial", "dtype"), [(0, torch.int32), (np.float64(0), torch.float32), (jax.numpy.bfloat16(0), torch.bfloat16)]
)
@pytest.mark.parametrize("cls", [JaxAgent, Stepping])
def test_states_and_outputs_have_the_dtypes_that_jax_gives_them(cls, initial, dtype):
    def act(params, state, observation, key):
        return move(n=state), state + 1

    agent = cls(act, {"unused": 1.0}, initial)
    with RL_Batcher.make(WALK, agent, n_envs=2, n_workers=0, n_timesteps=5, seed=0) as batcher:
        batcher.reset()
        steps = rollout(batcher).trajectories
        batcher.update({"unused": 2.0})
        rollout(batcher)
    assert steps["action/n"].dtype == dtype
    assert steps["action/n"][:, 0].tolist() == [0, 0] and steps["action/n"].max() >= 1


def test_workers_of_environments_in_jax_are_not_forked():
    with pytest.raises(SpecError, match="start_method: .*jax.*forkserver.*got 'fork'"):
        RL_Batcher.make(WALK, n_envs=2, n_workers=2, start_method="fork")


FORKING = """
import sys
from rlstructs import RandomAgent, RL_Batcher, SpecError

def create_env(seed):
    from jax_walk import WALK
    from rlstructs import JaxEnv
    return JaxEnv(WALK, 1, seed)

assert "jax" not in sys.modules  # a process that has started jax may hang in the fork itself
try:
    RL_Batcher(3, RandomAgent, {}, create_env, {}, 2, 0, start_method="fork")
except SpecError as error:
    print(error)
"""


@pytest.mark.slow
def test_an_environment_that_a_forked_worker_makes_is_refused(subprocess_env):
    env = {**subprocess_env, "PYTHONPATH": os.pathsep.join([str(TESTS), subprocess_env.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, env=env)
    assert done.stdout.startswith("start_method: jax hangs if it is forked; expected 'forkserver'"), done.stderr


def test_an_agent_in_jax_acts_for_the_environments_that_still_run_and_is_compiled_once():
    traced = []

    def act(params, state, observation, key):
        traced.append(key)
        return jax.random.bernoulli(key).astype(int), state + 1

    def create_env(seed):
        return GymEnv([gymnasium.make("CartPole-v1", max_episode_steps=3 + k) for k in range(5)], seed)

    with RL_Batcher(20, lambda: JaxAgent(act, None, np.int32(0)), {}, create_env, {}, 0, 1) as batcher:
        batcher.reset()
        found = rollout(batcher)
    assert found.lengths.tolist() == [3, 4, 5, 6, 7]
    # Twice for the check of each agent, that of the specs and that of the rollout, and once to compile it.
    assert len(traced) == 2 * 2 + 1, "it was compiled again for fewer environments"
