"""`check_env` and `check_agent` find what is wrong; `FaultyEnv` fails as it is told to; `verify` sees everything."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import gymnasium
import numpy as np
import psutil
import pytest
import torch
from broken import (
    AGENTS,
    ENVIRONMENTS,
    GYMNASIUM,
    VECTORS,
    CountsOutside,
    Ending,
    Gym,
    Holds,
    HoldsLock,
    Keeps,
    Sums,
    Survives,
    Vector,
    Walk,
    WritesIntoInfo,
    WritesIntoObservation,
)
from gymnasium import spaces, wrappers
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from helpers import Count, Counting, create_gym
from processes import LIMIT, Deadline
from vector_envs import Same

from rlstructs import (
    DictTensor,
    GymEnv,
    GymEnvInf,
    GymVectorEnv,
    NormalizeObservation,
    NormalizeReward,
    RandomAgent,
    RL_Agent,
    RL_Agent_CheckDevice,
    RL_Batcher,
    SharedVectorEnv,
    SpecError,
)
from rlstructs.errors import WorkerCrashed, WorkerTimeout
from rlstructs.seeding import EnvSeed
from rlstructs.testing import Fault, FaultyEnv, Ledger, check_agent, check_env, create_faulty_envs, verify

ROOT = Path(__file__).parents[2]
INFO = DictTensor({"epsilon": torch.tensor([0.5])})
FRAME = torch.linspace(-1.5, 1.5, 6).view(3, 2)
SEEN = DictTensor({"frame": FRAME, "initial_state": torch.tensor([True, False, True])})

# --- check_env ---------------------------------------------------------------------------------------


def test_what_returns_and_episodes_need_is_missed():
    class WithoutFlags(Walk):
        def reset(self, *arguments, **settings):
            observation, running = super().reset(*arguments, **settings)
            return without_flags(observation), running

        def step(self, *arguments, **settings):
            (last, ran), (observation, running) = super().step(*arguments, **settings)
            return (without_flags(last), ran), (without_flags(observation), running)

    def without_flags(observation):
        return DictTensor({k: v for k, v in observation.items() if k not in ("reward", "done")})

    with pytest.warns(UserWarning, match="observations lack 'reward', 'done', which `episodes` and `evaluate` need"):
        check_env(WithoutFlags)


def test_good_environments_pass():
    check_env(Walk)
    check_env(Ending)
    check_env(Walk(3))
    check_env(Gym)
    check_env(Gym())
    check_env(lambda: gymnasium.make("CartPole-v1"))
    check_env(gymnasium.make("CartPole-v1"))
    check_env(gymnasium.make, {"id": "CartPole-v1", "max_episode_steps": 30})
    check_env(create_gym, {"env_id": "CartPole-v1", "n_envs": 2, "autoreset": True})
    check_env(create_gym, {"env_id": "CartPole-v1", "n_envs": 2, "autoreset": False})
    check_env(GymEnv([Count(3), Count(5)], 0), env_info=DictTensor({"length": torch.tensor([4])}))
    check_env(lambda seed: GymEnvInf([Count(3), Count(5)], seed), uses_seed=False)
    check_env(create_faulty_envs, {"n_envs": 2}, uses_seed=False)
    check_env(lambda: FaultyEnv(length=3), uses_seed=False)
    check_env(lambda seed: create_faulty_envs(2, seed, autoreset=False), uses_seed=False)


def test_actions_of_ones_own():
    given = []

    def act(observation):
        given.append(observation.n_elems())
        return DictTensor({"action": torch.zeros(observation.n_elems(), dtype=torch.int64)})

    environment = Ending()
    environment.action_space = None
    check_env(environment, act=act, n_steps=12)
    assert given == [3, 3, 3, 2, 1] * 2 + [3, 3]


def test_structured_actions_and_observations_pass():
    class Nested(Gym):
        action_space = spaces.Dict({"push": spaces.Box(-1, 1, (2,), np.float64), "grip": spaces.MultiDiscrete([2, 3])})
        observation_space = spaces.Dict({"image": spaces.Box(0, 255, (2, 2), np.uint8), "n": spaces.Discrete(9)})

        def observation(self):
            return {"image": self.np_random.integers(0, 255, (2, 2), np.uint8), "n": 3}

    check_env(Nested)


@pytest.mark.parametrize(("broken", "message"), ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_what_is_wrong_with_an_environment_is_said(broken, message):
    with pytest.raises((SpecError, TypeError), match=message):
        check_env(broken)


def with_note(message):
    """A pattern of a message that a note follows, which says which environment it was."""
    return message.replace("$", r"(?:\n|$)")


@pytest.mark.parametrize(("broken", "message"), GYMNASIUM.values(), ids=GYMNASIUM)
@pytest.mark.parametrize("form", ["class", "object"])
def test_what_is_wrong_with_a_gymnasium_environment_is_said(broken, message, form):
    with pytest.raises((SpecError, TypeError), match=with_note(message)):
        check_env(broken if form == "class" else broken())


@pytest.mark.parametrize(("broken", "message"), GYMNASIUM.values(), ids=GYMNASIUM)
def test_what_is_wrong_below_a_gym_env_is_said(broken, message):
    """Of a single answer; what it takes several resets to see is for those that are given by themselves."""
    if any(word in message for word in ("seed", "reset must take", "close")):
        pytest.skip("needs more than an answer")
    for make in (GymEnv, GymEnvInf):
        with pytest.raises((SpecError, TypeError), match=with_note(message)):
            check_env(lambda seed, make=make: make([broken() for _ in range(2)], seed))


@pytest.mark.parametrize(("arguments", "message"), VECTORS.values(), ids=VECTORS)
def test_what_is_wrong_with_a_vector_environment_is_said(arguments, message):
    with pytest.raises((SpecError, TypeError), match=with_note(message)):
        check_env(lambda seed: GymVectorEnv(Vector(**arguments), seed))


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_good_vector_environments_pass(mode):
    check_env(lambda seed: GymVectorEnv(Vector(mode), seed))
    check_env(GymVectorEnv(Vector(mode), 0))
    check_env(lambda seed: GymVectorEnv(Vector(mode, flaw="survives"), seed), keeps_state=True)
    check_env(lambda seed: NormalizeReward(NormalizeObservation(GymVectorEnv(Vector(mode), seed))))


WRAPPED = {
    "none": lambda env: env,
    "running means": lambda env: wrappers.NormalizeReward(wrappers.NormalizeObservation(env)),
    "stacks": lambda env: wrappers.FrameStackObservation(env, 2),
    "time": lambda env: wrappers.TimeAwareObservation(env, flatten=False),
    "delays": lambda env: wrappers.DelayObservation(env, 1),
    "statistics": wrappers.RecordEpisodeStatistics,
    "resets": wrappers.Autoreset,
}


@pytest.mark.parametrize(
    ("env_id", "wrap"),
    [("CartPole-v1", wrap) for wrap in WRAPPED]
    + [(env_id, "none") for env_id in ("Pendulum-v1", "FrozenLake-v1", "Blackjack-v1", "MountainCar-v0", "Hopper-v5")],
)
def test_gymnasiums_own_environments_pass(env_id, wrap):
    def make():
        return WRAPPED[wrap](gymnasium.make(env_id))

    check_env(make, n_steps=30)
    check_env(make(), n_steps=30)
    check_env(lambda seed: GymEnvInf([make() for _ in range(2)], seed), n_steps=30)


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.value)
def test_vector_environments_of_gymnasium_pass(mode):
    makers = [lambda: gymnasium.make("CartPole-v1", max_episode_steps=4)] * 2

    def create(vector, **arguments):
        return lambda seed: GymVectorEnv(vector(makers, **arguments, autoreset_mode=mode), seed)

    check_env(create(SyncVectorEnv), n_steps=20)
    check_env(create(AsyncVectorEnv), n_steps=20)
    check_env(create(SharedVectorEnv, n_workers=2), n_steps=20)
    check_env(create(SharedVectorEnv, n_workers=0, copy=False), n_steps=20)


def test_one_array_for_all_observations_is_found_where_final_ones_are_lost_in_it():
    """As gymnasium's own vector environments keep no copy of the final observation."""

    def create(vector):
        return lambda seed: GymVectorEnv(vector([Same] * 2, autoreset_mode=AutoresetMode.SAME_STEP), seed)

    with pytest.raises(SpecError, match="^GymVectorEnv: the final observations of .* episodes equal the first ones"):
        check_env(create(SyncVectorEnv), uses_seed=False)
    check_env(create(SharedVectorEnv), uses_seed=False)


def test_environments_without_chance_that_end_where_they_begin_pass():
    class Loop(Gym):
        observation_space = spaces.Discrete(3)

        def observation(self):
            return self.steps % 3

        def step(self, action):
            self.steps += 1
            return self.observation(), 1.0, self.steps == 3, False, {}

    check_env(Loop, uses_seed=False)
    check_env(lambda seed: GymEnvInf([Loop() for _ in range(2)], seed), uses_seed=False)


def test_a_state_that_is_meant_to_survive_may():
    check_env(Survives, keeps_state=True)
    check_env(Survives(), keeps_state=True)


def test_what_was_put_around_an_environment_to_watch_it_is_gone():
    inner, vector = Gym(), Vector()
    env, envs = GymEnvInf([inner], 0), GymVectorEnv(vector, 0)
    check_env(env)
    check_env(envs)
    assert env._envs == [inner] and envs._envs is vector
    with pytest.raises(SpecError):
        check_env(broken_envs := GymEnvInf([GYMNASIUM["a reward that is NaN"][0]()], 0))
    assert type(broken_envs._envs[0]).__name__ == "Broken"


def test_factories_have_to_travel_and_to_take_a_seed():
    with pytest.raises(TypeError, match=r"^env_args\['lock'\] cannot be pickled, so that no worker can get it"):
        check_env(Holds, {"lock": threading.Lock()})
    lock = threading.Lock()
    with pytest.raises(TypeError, match="^create_env cannot be pickled"):
        check_env(lambda seed: (lock, Walk(seed))[1])
    with pytest.raises(SpecError, match="^create_env must take seed=: RL_Batcher calls"):
        check_env(lambda: Walk())
    with pytest.raises(TypeError, match="^check_env: needs an environment, or what makes one, got int$"):
        check_env(3)
    with pytest.raises(SpecError, match=r"^check_env: env_args are for what makes an environment, got one \(Walk\)$"):
        check_env(Walk(), {"n_envs": 3})
    with pytest.raises(TypeError, match=r"^dict is not a VecEnv: it has no method n_envs\(\)$"):
        check_env(lambda seed: {})
    with pytest.raises(TypeError, match=r"^SyncVectorEnv is not a VecEnv: .* n_envs\(\), put it into a GymVectorEnv$"):
        check_env(SyncVectorEnv([Gym]))
    with pytest.raises(TypeError, match="unexpected keyword argument 'n_envs'"):
        check_env(gymnasium.make, {"id": "CartPole-v1", "n_envs": 2})


def test_every_environment_is_closed_also_after_an_error():
    made = []

    class Closes(Walk):
        def __init__(self, seed=0):
            super().__init__(seed)
            self.n_closed = 0
            made.append(self)

        def close(self):
            self.n_closed += 1

    closes = Closes()
    check_env(closes, n_steps=3)
    assert closes.n_closed == 2
    closes = type("Broken", (Closes,), {"step": lambda self, action: 1 / 0})()
    with pytest.raises(ZeroDivisionError):  # its own errors are its own
        check_env(closes)
    assert closes.n_closed == 1


def test_random_streams_of_the_caller_stay():
    states = torch.get_rng_state(), np.random.get_state()[1].tolist()
    check_env(Walk)
    check_agent(Sums, SEEN)
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == np.random.get_state()[1].tolist()


# --- check_agent -------------------------------------------------------------------------------------


def example(name):
    """A module of the examples, whose names begin with a number."""
    spec = importlib.util.spec_from_file_location("an_example", ROOT / "examples" / name)
    module = importlib.util.module_from_spec(spec)
    sys.modules["an_example"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def cart_poles(autoreset):
    return create_gym("CartPole-v1", 3, 0, autoreset)


@pytest.mark.parametrize("autoreset", [True, False])
def test_good_agents_pass(autoreset):
    counts = (GymEnvInf if autoreset else GymEnv)([Count(3), Count(7)], 0)
    check_agent(Counting, counts, update=3.0, replayed=["n", "given"])
    check_agent(Counting(), SEEN)
    check_agent(RL_Agent_CheckDevice(Counting(), "cpu"), SEEN)
    check_agent(Sums, SEEN, agent_info=INFO, replayed=["total"])
    check_agent(RandomAgent(spaces.Discrete(2)), cart_poles(autoreset))
    for space in (spaces.Box(-1, 1, (3,)), spaces.Dict({"a": spaces.Discrete(3), "b": spaces.MultiBinary(2)})):
        check_agent(RandomAgent, SEEN, {"action_space": space})


class Noisy(Counting):
    """Draws from a global stream, if `draw` does."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def __call__(self, *args, **kwargs):
        self.draw()
        return super().__call__(*args, **kwargs)


@pytest.mark.parametrize(
    ("name", "seed", "draw"),
    [
        ("random", lambda: random.seed(0), lambda: random.random()),
        ("numpy", lambda: np.random.seed(0), lambda: np.random.rand()),
        ("torch", lambda: torch.manual_seed(0), lambda: torch.rand(1)),
    ],
)
def test_agents_that_would_draw_the_same_in_all_workers_are_warned_of(name, seed, draw):
    def make(seeds, draws):
        if seeds:
            seed()
        return Noisy(draw if draws else int)

    check_agent(make, SEEN, {"seeds": False, "draws": True})
    check_agent(make, SEEN, {"seeds": True, "draws": False})
    message = f"^Noisy: draws from the global stream of {name}, which is seeded as the agent is made"
    with pytest.warns(UserWarning, match=message):
        check_agent(make, SEEN, {"seeds": True, "draws": True})


def test_agents_of_the_examples_pass():
    policy = example("2_collect.py").Policy
    arguments = {"n_inputs": 4, "n_actions": 2}
    weights = policy(**arguments).network.state_dict()
    check_agent(policy, cart_poles(False), arguments, update=weights, n_steps=40, replayed=["logits"])
    skill = DictTensor({"skill": torch.tensor([0.3])})
    check_agent(example("offline_dataset.py").Controller, cart_poles(True), agent_info=skill)


class Remembers(RL_Agent):
    """Looks at its own last action."""

    def initial_state(self, agent_info, B):
        return DictTensor()

    def require_history(self):
        return True

    def __call__(self, state, observation, agent_info, history):
        n = history.n_timesteps()
        assert history.lengths.tolist() == [n] * observation.n_elems()
        last = history["action/action"][:, -1] if n else torch.zeros(observation.n_elems(), dtype=torch.int64)
        assert n == 0 or torch.equal(history["_observation/frame"][:, -1], observation["frame"])
        return DictTensor({"action": 1 - last, "n": torch.full_like(last, n)}), state


def test_agents_with_a_history_pass():
    check_agent(Remembers, cart_poles(False), n_steps=30, replayed=["n", "action"])
    check_agent(Remembers, cart_poles(True))


@pytest.mark.parametrize(("broken", "message"), AGENTS.values(), ids=AGENTS)
def test_what_is_wrong_with_an_agent_is_said(broken, message):
    with pytest.raises((SpecError, TypeError), match=message):
        check_agent(broken, SEEN, agent_info=INFO)


@pytest.mark.parametrize("broken", [WritesIntoObservation, WritesIntoInfo, Keeps])
def test_agents_may_write_into_what_they_get_and_keep_it_unless_they_say_that_views_do(broken):
    class Derived(broken):  # what the class above says is not of this one's __call__
        def __call__(self, state, observation, agent_info, history=None):
            return super().__call__(state, observation, agent_info)

    check_agent(Derived, SEEN, agent_info=INFO)
    with pytest.raises(SpecError, match="takes_views"):
        check_agent(type("Same", (broken,), {}), SEEN, agent_info=INFO)


def test_what_a_replay_depends_on_beside_the_state_is_found_where_it_counts():
    check_agent(CountsOutside, SEEN)
    with pytest.raises(SpecError, match="^CountsOutside: .* gives a different 'n' at t=0 than the agent did; it"):
        check_agent(CountsOutside, SEEN, replayed=["n"])
    with pytest.raises(SpecError, match=r"^check_agent: replayed names \['logits'\], but the agent's outputs are \["):
        check_agent(Sums, SEEN, replayed=["logits"])
    check_agent(AGENTS["a replay of less"][0], SEEN, replay=False)


def test_agents_have_to_travel():
    lock = threading.Lock()
    with pytest.raises(TypeError, match="^create_agent cannot be pickled"):
        check_agent(lambda: (lock, Sums())[1], SEEN)
    with pytest.raises(TypeError, match=r"^agent_args\['lock'\] cannot be pickled"):
        check_agent(Sums, SEEN, {"lock": lock})
    with pytest.raises(TypeError, match="^HoldsLock cannot be copied .*: pass a factory and agent_args$"):
        check_agent(HoldsLock(), SEEN)
    check_agent(HoldsLock, SEEN)
    with pytest.raises(SpecError, match=r"^check_agent: agent_args need a factory, got an agent \(Sums\)$"):
        check_agent(Sums(), SEEN, {"lock": 3})
    with pytest.raises(TypeError, match="^check_agent: needs an agent, or a factory of agents, got int$"):
        check_agent(3, SEEN)


def test_an_update_is_tried_where_it_is_given():
    class NoUpdate(Sums):
        update = RL_Agent.update

    check_agent(NoUpdate, SEEN)
    with pytest.raises(NotImplementedError, match=r"^NoUpdate must define update\(info\)$"):
        check_agent(NoUpdate, SEEN, update={"weight": torch.zeros(1)})


# --- FaultyEnv ---------------------------------------------------------------------------------------


def faulty(*faults, **arguments):
    arguments = {"n_envs": 2, "faults": faults, "length": 3} | arguments
    options = {name: arguments.pop(name) for name in ("n_processes", "timeout") if name in arguments}
    return RL_Batcher(
        n_timesteps=4, create_agent=lambda: RandomAgent(FaultyEnv.action_space), agent_args={},
        create_env=create_faulty_envs, env_args=arguments, seeds=0, **{"n_processes": 2, **options},
    )  # fmt: skip


def rollouts(batcher, n=1):
    """As many batches, after a reset."""
    batcher.reset()
    found = []
    for _ in range(n):
        batcher.execute()
        found.append(batcher.get()[0])
    return found


def test_a_fault_strikes_in_chosen_calls_of_chosen_environments():
    calls = [
        (at, count, worker, env, generation)
        for at in ("init", "reset", "step", "close") for count in (1, 2) for worker in (0, 1)
        for env in (2 * worker, 2 * worker + 1) for generation in (0, 1)
    ]  # fmt: skip

    def struck(**where):
        fault = Fault("raise", **where)
        return [
            (at, count, worker, env, generation) for at, count, worker, env, generation in calls
            if fault.strikes(at, count) and fault.concerns(worker=worker, env_index=env, generation=generation)
        ]  # fmt: skip

    assert struck() == [call for call in calls if call[:2] == ("step", 1)]
    assert struck(at="reset", count=None) == [call for call in calls if call[0] == "reset"]
    assert struck(at="close", worker=1, count=2) == [call for call in calls if call[:3] == ("close", 2, 1)]
    assert struck(env_index=3, generations=[0]) == [("step", 1, 1, 3, 0)]
    assert struck(generations=range(1, 9), worker=0) == [("step", 1, 0, env, 1) for env in (0, 1)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "explode"}, "kind must be one of"), ({"kind": "raise", "at": "run"}, "at must be one of"),
        ({"kind": "nan", "at": "close"}, "needs at='reset' or"), ({"kind": "kill", "count": 0}, "at least 1, got 0"),
    ],
    ids=str,
)  # fmt: skip
def test_faults_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(SpecError, match=f"^Fault: .*{message}"):
        Fault(**arguments)


def test_without_faults_it_counts():
    env = FaultyEnv(env_index=4, generation=2, length=2, truncates=True)
    seen = [env.reset()[0], env.step(1)[0]]
    observation, reward, terminated, truncated, info = env.step(3)
    assert [list(one[:4]) for one in (*seen, observation)] == [[4, 2, 0, step] for step in range(3)]
    assert (reward, terminated, truncated, info) == (2.0, False, True, {})
    assert env.reset()[0][2] == 1 and env.observation_space.contains(observation)
    assert len({float(one[4]) for one in (*seen, observation)}) == 3


@pytest.mark.parametrize("at", ["init", "reset", "step", "close"])
def test_an_exception_comes_from_where_it_was_asked_for(at):
    fault = Fault("raise", at=at, worker=1, error=KeyError("asked for", at))
    with pytest.raises(KeyError, match=f"'asked for', '{at}'"):
        with faulty(fault) as batcher:
            verify(rollouts(batcher)[0])


class NeedsThree(Exception):
    def __init__(self, one, two, three):
        super().__init__(one)


def test_an_exception_may_be_made_where_it_is_raised():
    for error, expected in ((KeyError, KeyError), (lambda: NeedsThree(1, 2, 3), NeedsThree)):
        env = FaultyEnv([Fault("raise", at="reset", error=error)])
        with pytest.raises(expected):
            env.reset()


@pytest.mark.parametrize(
    ("fault", "message"),
    [(Fault("exit", code=7), "it exited with code 7|code 7"), (Fault("kill", count=2), "SIGKILL")],
    ids=["exit", "kill"],
)
def test_a_process_is_ended(fault, message):
    with faulty(fault) as batcher, pytest.raises(WorkerCrashed, match=message):
        rollouts(batcher)


@pytest.mark.parametrize("more", [{}, {"in_c": True, "ignore_sigterm": True}], ids=str)
def test_a_hang_is_ended_from_outside(more):
    with faulty(Fault("hang", worker=1, **more), timeout=LIMIT) as batcher:
        batcher._engine.pool.timeout = 1.0  # not before: a start may take longer
        with Deadline(30.0), pytest.raises(WorkerTimeout):
            rollouts(batcher)


@pytest.mark.parametrize("in_c", [False, True])
def test_a_hang_ends_by_itself_and_in_c_lets_nothing_else_run(in_c):
    for seconds in (0.6, 6.0, 60.0):  # longer where a busy machine lets others wait
        seen, took = seen_during_a_hang(seconds, in_c)
        assert took >= seconds
        if in_c or max(seen) < seconds - 0.05:
            break
    assert len(seen) == 2 and [each >= seconds - 0.05 for each in seen] == [in_c, in_c]


def seen_during_a_hang(seconds, in_c):
    """When a signal's handler and a thread that are due after 0.1 s ran, and how long the hang took."""
    env = FaultyEnv([Fault("hang", seconds=seconds, in_c=in_c)])
    env.reset()
    begun, seen = time.monotonic(), []

    def see(*_):
        seen.append(time.monotonic() - begun)

    handler = signal.signal(signal.SIGALRM, see)
    timer = threading.Timer(0.1, see)
    try:
        timer.start()
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        assert env.step(0)[1] == 1
        return seen, time.monotonic() - begun
    finally:
        timer.join()
        signal.signal(signal.SIGALRM, handler)


def test_memory_is_taken_up_to_a_limit():
    # As the allocators count it: the system may reclaim pages meanwhile, and freed ones may be taken again.
    env = FaultyEnv([Fault("allocate", limit=100 << 20)])
    env.reset()
    tracemalloc.start()
    try:
        env.step(0)
        assert 100 << 20 <= tracemalloc.get_traced_memory()[0] < 101 << 20
        env.close()
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()


def limited(n_envs, seed, faults):
    import resource

    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))
    return create_faulty_envs(n_envs, seed, faults)


def test_memory_without_end_meets_the_limit_of_the_worker():
    with RL_Batcher(
        n_timesteps=4, create_agent=lambda: RandomAgent(FaultyEnv.action_space), agent_args={}, create_env=limited,
        env_args={"n_envs": 1, "faults": [Fault("allocate", limit=4 << 30)]}, n_processes=1, seeds=0,
    ) as batcher, pytest.raises(MemoryError):  # fmt: skip
        rollouts(batcher)


def test_an_observation_of_another_shape_is_refused_and_nan_is_handed_out():
    with faulty(Fault("shape", count=2, worker=1)) as batcher:
        with pytest.raises(SpecError, match=r"has shape \(6,\), the space says \(5,\)"):
            rollouts(batcher)
    with faulty(Fault("nan", count=2, env_index=3)) as batcher:
        [batch] = rollouts(batcher)
    assert batch.trajectories["_observation/frame"].isnan().any(dim=2).nonzero().tolist() == [[3, 1]]
    assert batch.trajectories["_observation/reward"].isnan().nonzero().tolist() == [[3, 1]]
    with pytest.raises(AssertionError, match=r"^trajectory 3, t=1 \(.*\): what followed holds what no FaultyEnv gave$"):
        verify(batch)


@pytest.mark.parametrize("fork", [False, True])
def test_children_end_with_the_environment(fork):
    env = FaultyEnv([Fault("child", at="reset", fork=fork)])
    env.reset()
    [pid] = env.damage.children
    child = psutil.Process(pid)
    assert child.ppid() == os.getpid() and child.is_running()
    env.close()
    assert not child.is_running() and env.damage.children == []
    env.close()


def test_children_of_a_worker_do_not_keep_it_from_closing():
    with faulty(Fault("child", at="reset"), Fault("child", at="step", fork=True)) as batcher:
        verify(rollouts(batcher)[0])
        children = {process.pid: process for process in psutil.Process().children(recursive=True)
                    if "sleep" in process.name()}  # fmt: skip
        assert len(children) == 4
    assert not any(process.is_running() for process in children.values())


def test_a_fault_of_a_constructor_leaves_no_children():
    faults = [Fault("child", at="init"), Fault("raise", at="init", env_index=1)]
    with pytest.raises(RuntimeError, match="a deliberate fault"):
        create_faulty_envs(2, 0, faults)
    assert not [process for process in psutil.Process().children() if "sleep" in process.name()]


def test_the_seed_says_which_worker_it_is():
    env = create_faulty_envs(3, EnvSeed(5, 2, 4), length=2)
    assert [one[:2].tolist() for one in env.reset()[0]["frame"]] == [[6, 4], [7, 4], [8, 4]]
    assert create_faulty_envs(1, 7).reset()[0]["frame"][0, :2].tolist() == [0, 0]


# --- verify ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def batch():
    """Six steps of four environments, whose episodes have three."""
    with faulty(n_processes=0) as batcher:
        return rollouts(batcher, 2)[1]


def put(batch, key, row, t, change):
    """A copy of a batch with one value changed."""
    copy = batch.clone()
    copy.trajectories[key][row, t] = change(copy.trajectories[key][row, t])
    return copy


TAMPERED = {
    "another environment": ("observation/frame", lambda x: x + torch.tensor([1.0, 0, 0, 0, 0]), "the observation ho"),
    "a fraction": ("_observation/frame", lambda x: x + 0.5, "what followed holds what no FaultyEnv gave"),
    "a checksum": ("_observation/frame", lambda x: x - torch.tensor([0.0, 0, 0, 0, 1]), "what followed holds"),
    "infinity": ("observation/frame", lambda x: x / 0, "the observation holds"),
    "an action": ("action/action", lambda x: (x + 1) % 5, "what followed holds what no FaultyEnv gave"),
    "a last action": ("_observation/last_action", lambda x: x + 1, "last_action is not the action"),
    "a reward": ("_observation/reward", lambda x: -x, "the reward is not the step"),
    "done": ("_observation/done", lambda x: ~x, "done is not terminated or truncated"),
    "a start": ("observation/initial_state", lambda x: ~x, "the observation holds|initial_state does not say"),
    "a start after a step": ("_observation/initial_state", lambda x: ~x, "initial_state is set after a step"),
}


@pytest.mark.parametrize(("key", "change", "message"), TAMPERED.values(), ids=TAMPERED)
def test_every_value_of_a_transition_is_verified(batch, key, change, message):
    verify(batch)
    n = 0
    for row, length in enumerate(batch.lengths.tolist()):
        for t in range(length):
            n += 1
            with pytest.raises(AssertionError, match=rf"^trajectory {row}, t={t} \(environment .*\): ({message})"):
                verify(put(batch, key, row, t, change))
    assert n > 6


def test_transitions_have_to_follow_each_other(batch):
    steps, other = batch.trajectories, batch.clone()
    assert steps["_observation/done"][:, :3].any()
    for key in steps:
        steps_of = other.trajectories[key]
        steps_of[:, [0, 2]] = steps_of[:, [2, 0]]
    with pytest.raises(AssertionError, match="t=1 .*: (it is not what followed|the episode had ended before)"):
        verify(other)
    ended = batch.clone()
    for key in ("done", "terminated"):
        ended.trajectories[f"_observation/{key}"][0, 0] ^= True
    with pytest.raises(AssertionError, match="^trajectory 0, t=1 .*: (the episode had ended before|it is not what)"):
        verify(ended)
    mixed = batch.clone()
    mixed.info["env_index"][:2] = mixed.info["env_index"][:2].flip(0)
    with pytest.raises(AssertionError, match="it is of another environment than env_index says"):
        verify(mixed)


def test_only_valid_steps_are_looked_at(batch):
    cut = batch.clone()
    cut.lengths[1] = 2
    cut.trajectories["_observation/reward"][1, 2:] = 0
    verify(cut)


@pytest.mark.parametrize("autoreset", [True, False])
def test_a_ledger_finds_what_is_missing_and_what_comes_twice(autoreset):
    with faulty(n_processes=0, autoreset=autoreset, length=6) as batcher:
        first, second = rollouts(batcher, 2)
        third, fourth = rollouts(batcher, 2)
    ledger = Ledger()
    for number, batch in enumerate((first, second, third, fourth)):
        if number == 2:
            ledger.reset()
        ledger.add(batch)
    assert ledger.n_transitions == sum(int(batch.lengths.sum()) for batch in (first, second, third, fourth))
    assert ledger.generations == {0: 0, 1: 0}
    with pytest.raises(AssertionError, match="handed out before"):
        ledger.add(first)
    for batches, words in (
        ([first, first], "it was handed out before"), ([second], "some are missing"),
        ([first, second, second], "handed out before"), ([first, second, fourth], "some are missing"),
    ):  # fmt: skip
        ledger = Ledger()
        with pytest.raises(AssertionError, match=rf"^trajectory 0: environment 0 begins with .*{words}$"):
            for batch in batches:
                ledger.add(batch)
    if autoreset:  # a reset of which it is not told
        ledger = Ledger()
        ledger.add(first)
        with pytest.raises(AssertionError, match="some are missing"):
            ledger.add(third)


def test_a_successor_begins_anew():
    def batch(generation, n):
        env = create_faulty_envs(2, EnvSeed(0, 0, generation), length=3)
        with RL_Batcher(
            n_timesteps=4, create_agent=lambda: RandomAgent(FaultyEnv.action_space), agent_args={},
            create_env=lambda seed: env, env_args={}, n_processes=0, seeds=0,
        ) as batcher:  # fmt: skip
            return rollouts(batcher, n)

    ledger, again = Ledger(), Ledger()
    for one in (*batch(0, 2), *batch(2, 1)):
        ledger.add(one)
    assert ledger.generations == {0: 2, 1: 2} and ledger.n_transitions == 24
    with pytest.raises(AssertionError, match="handed out before"):
        ledger.add(batch(1, 1)[0])
    again.add(batch(0, 1)[0])
    with pytest.raises(AssertionError, match="some are missing"):
        again.add(batch(1, 2)[1])


def test_batches_of_other_environments_are_told():
    with RL_Batcher(
        n_timesteps=4, create_agent=lambda: RandomAgent(spaces.Discrete(2)), agent_args={}, create_env=create_gym,
        env_args={"env_id": "CartPole-v1", "n_envs": 1}, n_processes=0, seeds=0,
    ) as batcher:  # fmt: skip
        [batch] = rollouts(batcher)
    with pytest.raises(AssertionError, match=r"^observation/frame has shape .*, a FaultyEnv's would be \(B, T, 5\)$"):
        verify(batch)


def test_signals_are_as_they_were():
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


class Global(gymnasium.Env):
    """Draws from a global random stream, whatever seed `reset` gets."""

    observation_space, action_space = spaces.Box(0, 1, (2,), np.float64), spaces.Discrete(2)

    def __init__(self, draw):
        self.draw = draw

    def reset(self, *, seed=None, options=None):
        return np.array([self.draw(), self.draw()]), {}

    def step(self, action):
        return np.array([self.draw(), 0.5]), 0.0, False, False, {}


class Mixed(Global):
    """Begins as `reset` is told to, and then draws from a global stream."""

    def reset(self, *, seed=None, options=None):
        gymnasium.Env.reset(self, seed=seed)
        return self.np_random.random(2), {}


DRAWS = {"random": lambda: random.random(), "numpy": lambda: np.random.rand(), "torch": lambda: torch.rand(()).item()}
WAYS = {
    "instance": lambda make: make(), "function": lambda make: make,
    "list": lambda make: lambda seed: GymEnvInf([make()], seed),
    "vector": lambda make: lambda seed: GymVectorEnv(gymnasium.vector.SyncVectorEnv([make]), seed),
}  # fmt: skip


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("way", WAYS)
def test_an_environment_that_ignores_the_seed_of_its_reset_is_refused(draw, way):
    message = "ignores its seed: with seed=0 and seed=1 .* super\\(\\).reset\\(seed=seed\\)"
    with pytest.raises(SpecError, match=message):
        check_env(WAYS[way](lambda: Global(DRAWS[draw])), n_steps=5)
    check_env(WAYS[way](lambda: Global(DRAWS[draw])), n_steps=5, uses_seed=False)
    if way == "instance":
        check_env(Mixed(DRAWS[draw]), n_steps=5)
