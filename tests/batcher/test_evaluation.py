"""`RL_Batcher.evaluate`: so many episodes of a frozen agent, and the training goes on as if there had been none."""

from __future__ import annotations

import io
import math
import os
import signal
import threading

import gymnasium
import numpy as np
import pytest
import torch
from helpers import SPACING, Count, Counting, count_batcher, create_gym, rollout

from rlstructs import (
    DictTensor,
    GymEnv,
    GymEnvInf,
    RandomAgent,
    RL_Agent,
    RL_Agent_CheckDevice,
    RL_Batcher,
    SpecError,
    StateError,
    WorkerCrashed,
    WorkerError,
)
from rlstructs.batcher import evaluation


def cartpoles(n_processes=2, n_envs=2, **arguments):
    return RL_Batcher(
        16, lambda: RandomAgent(gymnasium.spaces.Discrete(2)), {}, create_gym,
        {"env_id": "CartPole-v1", "n_envs": n_envs}, n_processes, 5, **arguments,
    )  # fmt: skip


@pytest.mark.parametrize("autoreset", [False, True])
@pytest.mark.parametrize(("table", "n_processes"), [([[3, 7], [2, 20]], 2), ([[3, 7, 5]], 1), ([[3, 7]], 0)])
@pytest.mark.parametrize("n", [1, 4, 11])
def test_every_environment_gives_the_same_number_of_episodes(table, n_processes, autoreset, n):
    with count_batcher(table, 4, autoreset, n_processes) as batcher:
        batcher.reset()
        rollout(batcher)
        lengths = [length for row in table for length in row]
        found = batcher.evaluate(n, [SPACING * worker for worker in range(len(table))])
        wanted = [
            (env, length, sum(range(1, length + 1)))
            for env, length in enumerate(lengths)
            for _ in range(n // len(lengths) + (env < n % len(lengths)))
        ]
        assert list(zip(*(found[key].tolist() for key in ("env_index", "length", "return")), strict=True)) == wanted
        assert found.n_elems() == n and found["terminated"].all() and not found["truncated"].any()
        assert found.specs() == batcher.episodes().specs()


@pytest.mark.parametrize("n_processes", [0, 2])
@pytest.mark.parametrize("leased", [False, True])
def test_the_training_goes_on_as_if_there_had_been_no_evaluation(n_processes, leased):
    with cartpoles(n_processes) as undisturbed, cartpoles(n_processes) as evaluated:
        for batcher in (undisturbed, evaluated):
            batcher.reset()
        for turn in range(4):
            trajectories, _ = rollout(undisturbed)
            evaluated.execute()
            if leased:
                with evaluated.lease() as lease:
                    evaluated.evaluate(5, turn)
                    assert lease.trajectories == trajectories
            else:
                assert evaluated.get()[0] == trajectories
                evaluated.evaluate(5, turn)
            assert evaluated.episodes() == undisturbed.episodes()


def test_the_same_seed_gives_the_same_episodes_whatever_was_trained_meanwhile():
    with cartpoles() as batcher:
        batcher.reset()
        first = batcher.evaluate(9, 3)
        rollout(batcher)
        assert batcher.evaluate(9, 3) == first
        assert batcher.evaluate(9, 4) != first


class Balance(RL_Agent):
    """Pushes where the pole falls; the same at every call."""

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        return DictTensor({"action": (observation["frame"][:, 2] > 0).long()}), DictTensor()


def test_episodes_do_not_depend_on_how_many_workers_play_them():
    found = []
    for n_processes, n_envs in ((1, 4), (2, 2), (4, 1)):
        arguments = {"env_id": "CartPole-v1", "n_envs": n_envs}
        with RL_Batcher(10, Balance, {}, create_gym, arguments, n_processes, 0) as batcher:
            batcher.reset()
            found.append(batcher.evaluate(10, 7))
    assert found[0] == found[1] == found[2]
    assert len(set(found[0]["length"].tolist())) > 2


class Pays(gymnasium.Env):
    """The reward is the action; three steps."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(100)

    def reset(self, **arguments):
        super().reset(**arguments)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(1, np.float32), float(action), False, self.steps == 3, {}


class Told(RL_Agent):
    """Acts as the last update says plus what its info says, one more at every call."""

    def __init__(self):
        self.base = 0

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        self.base += 1
        return DictTensor({"action": agent_info["more"] + self.base}), DictTensor()

    def update(self, info):
        self.base = info


def test_a_copy_of_the_agent_as_it_is_now_acts():
    def more(value):
        return DictTensor({"more": torch.full((2,), value)})

    example = DictTensor({"more": torch.zeros(1, dtype=torch.int64)})
    with RL_Batcher(2, Told, {}, lambda seed: GymEnvInf([Pays()], seed), {}, 2, 0, agent_info=example) as batcher:
        batcher.reset(agent_info=more(10))
        batcher.update(20)
        assert batcher.evaluate(4, 0)["return"].tolist() == [31.0 + 32 + 33, 34.0 + 35 + 36] * 2
        rollout(batcher)
        assert batcher.evaluate(2, 0, agent_info=more(0))["return"].tolist() == [23.0 + 24 + 25] * 2
        actions = rollout(batcher)[0].trajectories["action/action"]
        assert actions.tolist() == [[33, 34]] * 2  # neither the copy's steps nor its info


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 0), SpecError, "^n_episodes must be at least 1, got 0$"),
        ((2.5, 0), TypeError, "^n_episodes must be an int, got 2.5$"),
        ((1, -1), SpecError, "^seed: must not be negative, got -1$"),
        ((1, [1]), SpecError, "^seed: needs 2 seeds"),
        ((1, 0.5), TypeError, "^seed: needs an int, or one for each of 2 processes, got 0.5$"),
        ((1, 0, DictTensor({"x": torch.zeros(4)})), SpecError, "^agent_info: unknown key"),
    ],
)
def test_what_is_not_needed_is_refused_and_nothing_is_lost(arguments, error, message):
    with cartpoles() as batcher:
        batcher.reset()
        with pytest.raises(error, match=message):
            batcher.evaluate(*arguments)
        assert rollout(batcher)[1] == 4


def test_it_comes_between_rollouts():
    with cartpoles() as batcher:
        with pytest.raises(StateError, match="^evaluate: there was no reset, call reset first$"):
            batcher.evaluate(1, 0)
        batcher.reset()
        batcher.execute()
        with pytest.raises(StateError, match="^evaluate: a rollout is under way, call get or wait first$"):
            batcher.evaluate(1, 0)
        assert batcher.get()[1] == 4


class Dumb:
    """A VecEnv without rewards."""

    def n_envs(self):
        return 1

    def reset(self, env_info):
        return DictTensor({"frame": torch.zeros(1, 1)}), torch.arange(1)

    def step(self, action):
        seen = DictTensor({"frame": torch.zeros(1, 1)}), torch.arange(1)
        return seen, seen

    def close(self):
        pass


def test_an_environment_without_rewards_cannot_be_evaluated():
    with RL_Batcher(2, Counting, {"resets": False}, lambda seed: Dumb(), {}, 1, 0) as batcher:
        batcher.reset()
        with pytest.raises(SpecError, match="^evaluate: the environment gives no 'reward' of shape "):
            batcher.evaluate(1, 0)


class Locked(Balance):
    """Cannot be copied."""

    def __init__(self):
        self.lock = threading.Lock()


class Picky(Count):
    """Refuses to be evaluated: in its constructor, or in a step."""

    def __init__(self, seed, where):
        super().__init__(9)
        self.refuses = where if seed.root == 99 and seed.worker_index == 1 else None
        if self.refuses == "constructor":
            raise OSError("no licence for another one")

    def step(self, action):
        if self.refuses == "step" and self.steps == 5:
            raise OSError("no licence for another step")
        return super().step(action)


@pytest.mark.parametrize("policy", ["raise", "restart"])
@pytest.mark.parametrize("where", ["constructor", "step"])
def test_what_an_environment_raises_in_an_evaluation_leaves_the_training_as_it_is(policy, where):
    def create(**arguments):
        return RL_Batcher(
            4, Counting, {}, lambda seed: GymEnvInf([Picky(seed, where)], seed), {}, 2, 0, on_worker_failure=policy
        )

    with create() as undisturbed, create() as evaluated:
        for batcher in (undisturbed, evaluated):
            batcher.reset()
        for _ in range(2):
            assert rollout(evaluated)[0] == rollout(undisturbed)[0]
            with pytest.raises(OSError, match="^no licence for another"):
                evaluated.evaluate(4, 99)
        assert evaluated.evaluate(2, 98)["length"].tolist() == [9, 9]
        assert evaluated.stats()["restarts"] == 0


class NoLicence(Exception):
    """Cannot be pickled."""

    def __init__(self):
        super().__init__("no licence")
        self.lock = threading.Lock()


@pytest.mark.parametrize("policy", ["raise", "restart"])
@pytest.mark.parametrize("error", [NoLicence, SystemExit])
def test_what_cannot_be_brought_over_from_an_evaluation_leaves_the_training_as_it_is_too(policy, error):
    def create_env(seed):
        if seed.root == 99:
            raise error
        return GymEnvInf([Count(9)], seed)

    with RL_Batcher(4, Counting, {}, create_env, {}, 2, 0, on_worker_failure=policy) as batcher:
        batcher.reset()
        with pytest.raises(WorkerError, match="raised in worker 0"):
            batcher.evaluate(2, 99)
        assert rollout(batcher)[1] == 2 and batcher.stats()["restarts"] == 0


class Closing(Counting):
    """Says when it is closed."""

    closed = 0

    def close(self):
        Closing.closed += 1


def test_the_copy_of_the_agent_is_closed_when_there_are_no_environments_for_it():
    def create_env(seed):
        if seed.root == 99:
            raise OSError("no licence")
        return GymEnvInf([Count(9)], seed)

    with RL_Batcher(4, Closing, {}, create_env, {}, 0, 0) as batcher:
        batcher.reset()
        before = Closing.closed
        with pytest.raises(OSError, match="no licence"):
            batcher.evaluate(1, 99)
        assert Closing.closed == before + 1


@pytest.mark.parametrize(("policy", "n_processes"), [("raise", 2), ("restart", 2), ("raise", 0)])
def test_an_agent_that_cannot_be_copied_cannot_be_evaluated_and_goes_on_training(policy, n_processes):
    arguments = {"env_id": "CartPole-v1", "n_envs": 1}
    with RL_Batcher(3, Locked, {}, create_gym, arguments, n_processes, 0, on_worker_failure=policy) as batcher:
        batcher.reset()
        with pytest.raises(TypeError, match="cannot pickle"):
            batcher.evaluate(2, 0)
        assert rollout(batcher)[1] == max(1, n_processes) and batcher.stats()["restarts"] == 0


class Holding(Balance):
    """Has something, at some depth, that cannot be copied."""

    def __init__(self, what):
        self.parts, self.network = {"list": [1, what]}, torch.nn.Sequential(torch.nn.Linear(4, 2))
        if isinstance(what, torch.Tensor):
            self.network[0].last = what

    def close(self):
        if isinstance(what := self.parts["list"][1], io.IOBase):
            what.close()


def nothing():
    yield 1


UNCOPYABLE = {
    "a lock": (threading.Lock, r"parts\['list'\]\[1\] \(of type lock\)"),
    "a generator": (nothing, r"parts\['list'\]\[1\] \(of type generator\)"),
    "an open file": (lambda: open(os.devnull), r"parts\['list'\]\[1\] \(of type TextIOWrapper\)"),  # noqa: SIM115
    "a tensor with a history": (
        lambda: torch.ones(1, requires_grad=True) * 2, r"(network\.0\.last|parts\['list'\]\[1\]) \(of type Tensor\)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("checks_device", [False, True])
@pytest.mark.parametrize("n_processes", [0, 1])
@pytest.mark.parametrize(("make", "told"), UNCOPYABLE.values(), ids=UNCOPYABLE)
def test_the_error_names_what_in_an_agent_cannot_be_copied_and_the_method_to_define(
    n_processes, make, told, checks_device
):
    def create_agent():
        agent = Holding(make())
        return RL_Agent_CheckDevice(agent, "cpu") if checks_device else agent

    with RL_Batcher(3, create_agent, {}, create_gym, {"env_id": "CartPole-v1", "n_envs": 1}, n_processes, 0) as batcher:
        batcher.reset()
        message = rf"^Holding cannot be copied for an evaluation: its attribute {told} cannot be copied: .*; define "
        with pytest.raises(TypeError, match=rf"{message}Holding.copy_for_evaluation\(\)"):
            batcher.evaluate(2, 0)
        assert rollout(batcher)[1] == 1


class OwnCopy(Told):
    """Holds a lock, and makes copies without it, of which there are as many as it says."""

    def __init__(self):
        super().__init__()
        self.lock, self.n_copies = threading.Lock(), 0

    def copy_for_evaluation(self):
        self.n_copies += 1
        made = OwnCopy()
        made.__dict__.update({**self.__dict__, "lock": threading.Lock()})
        return made


@pytest.mark.parametrize("checks_device", [False, True])
@pytest.mark.parametrize("n_processes", [0, 2])
def test_an_agent_may_say_how_it_is_copied(n_processes, checks_device):
    def play(agent_class):
        def create_agent():
            return RL_Agent_CheckDevice(agent_class(), "cpu") if checks_device else agent_class()

        info = DictTensor({"more": torch.zeros(max(1, n_processes), dtype=torch.int64)})
        with RL_Batcher(
            2, create_agent, {}, lambda seed: GymEnvInf([Pays()], seed), {}, n_processes, 0, agent_info=info
        ) as batcher:
            batcher.update(2)
            batcher.reset(agent_info=info)
            return batcher.evaluate(4, 0), rollout(batcher)[0], batcher.evaluate(4, 0)

    assert play(OwnCopy) == play(Told)


@pytest.mark.parametrize(
    ("copied", "told"),
    [(lambda self: self, "must return another agent, it returned the agent itself"),
     (lambda self: None, "must return an RL_Agent, got NoneType without initial_state")],
    ids=["itself", "nothing"],
)  # fmt: skip
def test_a_copy_that_is_none_is_refused(copied, told):
    made = type("Odd", (Balance,), {"copy_for_evaluation": copied})
    with RL_Batcher(3, made, {}, create_gym, {"env_id": "CartPole-v1", "n_envs": 1}, 1, 0) as batcher:
        batcher.reset()
        with pytest.raises(TypeError, match=rf"^Odd.copy_for_evaluation {told}"):
            batcher.evaluate(2, 0)
        assert rollout(batcher)[1] == 1


def test_arguments_that_only_pickling_copies_can_be_evaluated():
    def create_env(module, seed):
        return GymEnvInf([Count(module.floor(3.5))], seed)

    with RL_Batcher(3, Counting, {}, create_env, {"module": math}, 1, 0) as batcher:
        batcher.reset()
        assert batcher.evaluate(2, 0)["length"].tolist() == [3, 3]


class Drawing(Count):
    """Draws from a generator that it was given."""

    def __init__(self, rng):
        super().__init__(3)
        self.rng = rng

    def _observation(self):
        return np.array([self.rng.random(), self.steps], np.float32)


def test_an_evaluation_has_arguments_of_its_own():
    def create():
        return RL_Batcher(
            5, Counting, {}, lambda rng, seed: GymEnvInf([Drawing(rng)], seed), {"rng": np.random.default_rng(0)}, 1, 0
        )

    with create() as undisturbed, create() as evaluated:
        for batcher in (undisturbed, evaluated):
            batcher.reset()
        evaluated.evaluate(3, 1)
        assert rollout(evaluated)[0] == rollout(undisturbed)[0]


@pytest.mark.parametrize("n_processes", [0, 1])
def test_what_an_agent_does_to_its_info_is_not_seen_outside(n_processes):
    class Greedy(Told):
        def __call__(self, state, observation, agent_info, history=None):
            output, state = super().__call__(state, observation, agent_info)
            agent_info["more"].add_(1)
            return output, state

    info = DictTensor({"more": torch.zeros(1, dtype=torch.int64)})
    with RL_Batcher(
        2, Greedy, {}, lambda seed: GymEnvInf([Pays()], seed), {}, n_processes, 0, agent_info=info
    ) as batcher:
        batcher.reset(agent_info=info)
        batcher.evaluate(1, 0, agent_info=info)
        assert info["more"].tolist() == [0]


def test_each_worker_may_die_once_in_an_evaluation(tmp_path):
    class Each(Fragile):
        def step(self, action):
            self.dies = self.seed.root == 99 and not (self.mark).exists() and self.steps == 1 + self.seed.worker_index
            if self.dies:
                self.mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return Count.step(self, action)

    def create_env(seed):
        env = Each(tmp_path, seed, 0)
        env.seed, env.mark = seed, tmp_path / str(seed.worker_index)
        return GymEnvInf([env], seed)

    with RL_Batcher(1, Counting, {}, create_env, {}, 4, 0, on_worker_failure="restart") as batcher:
        batcher.reset()
        assert batcher.evaluate(4, 99)["length"].tolist() == [5] * 4
        assert batcher.stats()["restarts"] == 4


class Fragile(Count):
    """Ends its process in the second step of an evaluation, as often as there are files left to say so."""

    def __init__(self, folder, seed, where):
        super().__init__(5)
        self.folder, self.dies = folder, seed.root == 99 and seed.worker_index == where

    def step(self, action):
        if self.dies and self.steps == 1 and (left := os.listdir(self.folder)):
            os.remove(os.path.join(self.folder, left[0]))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


@pytest.mark.parametrize("autoreset", [False, True])
@pytest.mark.parametrize(("policy", "n_deaths"), [("raise", 1), ("restart", 1), ("restart", 2), ("restart", 3)])
def test_a_worker_that_dies_plays_its_episodes_anew_or_ends_the_batcher(policy, n_deaths, autoreset, tmp_path):
    def create_env(seed):
        return (GymEnvInf if autoreset else GymEnv)([Fragile(tmp_path, seed, 1) for _ in range(2)], seed)

    for number in range(n_deaths):
        (tmp_path / str(number)).touch()
    with RL_Batcher(3, Counting, {}, create_env, {}, 2, 0, on_worker_failure=policy) as batcher:
        batcher.reset()
        rollout(batcher)
        if policy == "raise" or n_deaths == 3:
            with pytest.raises(WorkerCrashed, match="^worker 1 .*killed by SIGKILL; last request: evaluate$"):
                batcher.evaluate(6, 99)
            return
        found = batcher.evaluate(6, 99)
        assert found["env_index"].tolist() == [0, 0, 1, 1, 2, 3] and set(found["length"].tolist()) == {5}
        assert batcher.stats()["restarts"] == n_deaths and batcher.stats()["lost_rollouts"] == 0
        trajectories, _ = rollout(batcher)
        assert trajectories.trajectories["observation/frame"][:, 0, 1].tolist() == [3, 3, 0, 0]  # begun anew


class Raising(Count):
    """Raises in its fifth step, unless it is in an evaluation or in a successor."""

    def __init__(self, seed):
        super().__init__(100)
        self.fails = seed.root == 0 and seed.restart_number == 0 and seed.worker_index == 1

    def step(self, action):
        if self.fails and self.steps == 4:
            raise OSError("lost")
        return super().step(action)


def test_a_worker_whose_rollout_ahead_has_failed_is_replaced_for_the_evaluation():
    def create_env(seed):
        return GymEnvInf([Raising(seed)], seed)

    with RL_Batcher(4, Counting, {}, create_env, {}, 2, 0, on_worker_failure="restart", run_ahead=1) as batcher:
        batcher.reset()
        rollout(batcher)
        with pytest.warns(UserWarning, match="^evaluate: 0 of 2 episodes ended within max_steps=8"):
            batcher.evaluate(2, 99, max_steps=8)
        lengths = [rollout(batcher)[0].lengths.tolist() for _ in range(2)]
        assert lengths == [[4, 0], [4, 4]] and batcher.stats()["restarts"] == 1


def test_a_worker_that_dies_as_the_evaluation_ends_plays_its_episodes_anew(tmp_path):
    class Closing(Fragile):
        def close(self):
            if self.dies and (left := os.listdir(self.folder)):
                os.remove(os.path.join(self.folder, left[0]))
                os.kill(os.getpid(), signal.SIGKILL)

        def step(self, action):
            return Count.step(self, action)

    def create_env(seed):
        return GymEnvInf([Closing(tmp_path, seed, 1)], seed)

    (tmp_path / "once").touch()
    with RL_Batcher(2, Counting, {}, create_env, {}, 2, 0, on_worker_failure="restart") as batcher:
        batcher.reset()
        found = batcher.evaluate(4, 99)
        assert found["env_index"].tolist() == [0, 0, 1, 1] and set(found["length"].tolist()) == {5}
        assert batcher.stats()["restarts"] == 1


ENDLESS = 10**9


@pytest.mark.parametrize("autoreset", [False, True])
@pytest.mark.parametrize(("table", "n_processes"), [([[10, ENDLESS], [6, 31]], 2), ([[10, ENDLESS, 6, 31]], 0)])
def test_an_evaluation_ends_after_the_most_steps_and_says_what_is_missing(table, n_processes, autoreset):
    seeds = [SPACING * worker for worker in range(len(table))]

    def played(batcher, n, max_steps):
        with pytest.warns(UserWarning, match=f"of {n} episodes ended within max_steps={max_steps}") as caught:
            found = batcher.evaluate(n, seeds, max_steps=max_steps)
        assert [warning.filename for warning in caught] == [__file__]
        return str(caught[0].message), list(zip(found["env_index"].tolist(), found["length"].tolist(), strict=True))

    with count_batcher(table, 4, autoreset, n_processes) as batcher:
        batcher.reset()
        text, found = played(batcher, 4, 30)
        assert found == [(0, 10), (2, 6)] and text.endswith("missing are those of environment 1 (0 of 1), 3 (0 of 1)")
        text, found = played(batcher, 5, 31)
        assert found == [(0, 10)] * (1 + autoreset) + [(2, 6), (3, 31)]
        assert text.startswith("evaluate: 4 of 5") if autoreset else text.startswith("evaluate: 3 of 5")
        assert rollout(batcher)[0].lengths.tolist() == [4] * 4
    if autoreset:
        with count_batcher(table, 4, autoreset, n_processes) as batcher:
            batcher.reset()
            assert played(batcher, 100, 30)[1] == [(0, 10)] * 3 + [(2, 6)] * 5
            assert batcher.evaluate(1, seeds, max_steps=10)["length"].tolist() == [10]


def test_an_evaluation_without_ends_ends(monkeypatch):
    monkeypatch.setattr(evaluation, "MOST_QUIET", 200)
    with count_batcher([[10, ENDLESS, ENDLESS]], 16, True, 0) as batcher:
        batcher.reset()
        found = batcher.evaluate(5, 0)
        assert found["env_index"].tolist() == [0] * 5 and found["length"].tolist() == [10] * 5
    with count_batcher([[ENDLESS, ENDLESS]], 16, False, 0) as batcher:
        batcher.reset()
        with pytest.warns(UserWarning, match=r"0 of 3 episodes ended, .*environment 0 \(0 of 2\), 1 \(0 of 1\)$"):
            assert batcher.evaluate(3, 0).n_elems() == 0
        assert rollout(batcher)[0].lengths.tolist() == [16, 16]


def test_a_warning_of_missing_episodes_names_the_first_environments():
    with count_batcher([[ENDLESS] * 10], 4, True, 0) as batcher:
        batcher.reset()
        with pytest.warns(UserWarning, match=r"7 \(0 of 1\) and 2 more$"):
            batcher.evaluate(10, 0, max_steps=8)


@pytest.mark.parametrize("max_steps", [0, -1, 1.5, True, "10"])
def test_the_most_steps_are_a_count(max_steps):
    with cartpoles(0) as batcher:
        batcher.reset()
        with pytest.raises((SpecError, TypeError), match="max_steps"):
            batcher.evaluate(1, 0, max_steps=max_steps)
