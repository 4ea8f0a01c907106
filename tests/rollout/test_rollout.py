"""Rollouts in this process: `acquire` against a model in plain Python, and `RolloutJob`."""

from __future__ import annotations

import copy

import gymnasium
import numpy as np
import pytest
import torch
from helpers import Count, Counting
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gym_env import Buffer, Recording
from test_spaces import every_space, stacked

from rlstructs import (
    DeviceEnv,
    DictTensor,
    GymEnv,
    GymEnvInf,
    MissingKeyError,
    RandomAgent,
    RL_Agent,
    SpecError,
    TemporalDictTensor,
    Trajectories,
    masked_dicttensor,
    replay_agent,
)
from rlstructs.envs.row_adapter import row_env
from rlstructs.rollout.job import RolloutJob
from rlstructs.rollout.job_specs import JobSettings, Specs, first_step
from rlstructs.rollout.progress import Progress
from rlstructs.rollout.rollout import ActingAgent, acquire
from rlstructs.seeding import PrivateStreams, seed_global_streams
from rlstructs.shared.layout import Layout
from rlstructs.shared.slots import SlotBuffers, Slots
from rlstructs.shared.weights import Outbox
from rlstructs.structures.arrays import specs_of
from rlstructs.workers import SharedArena

NO_INFO = DictTensor()
FLAGS = ("done", "terminated", "truncated", "initial_state")


class Plain:
    """An environment of a user's own: nothing but the protocol."""

    def __init__(self, env):
        self.env = env

    def n_envs(self):
        return self.env.n_envs()

    def reset(self, env_info):
        return self.env.reset(env_info)

    def step(self, action):
        return self.env.step(action)

    def close(self):
        self.env.close()


WRAPPERS = {
    "native": lambda env: env,
    "plain": Plain,
    "device": lambda env: DeviceEnv(env, "cpu", "cpu"),
}


class Run:
    """An agent in environments, with slots of its own: what a worker and a batcher do, in one place."""

    def __init__(self, env, agent, n_timesteps, agent_info=NO_INFO, wrapped=WRAPPERS["native"]):
        self.env, self.agent, self.agent_info = row_env(wrapped(env)), agent, agent_info
        observation, n = env.example().tensors(), env.n_envs()
        probe = copy.deepcopy(agent)
        state = probe.initial_state(agent_info, n)
        with PrivateStreams()():
            output, _ = probe(state, observation, agent_info)
        info = {f"agent_state/{key}": spec for key, spec in specs_of(state).items()}
        self.layout = Layout(n, n_timesteps, specs_of(observation), specs_of(output), info)
        arena = SharedArena()
        arena.resize(self.layout.reserved_nbytes)
        self.slots = Slots(self.layout, arena.map())
        arena.close()
        self.reset()

    def reset(self):
        n = self.env.n_envs()
        self.progress = Progress(self.env.reset_rows(NO_INFO), np.arange(n))

    def chunk(self):
        rows = self.progress.running
        [self.progress] = acquire(ActingAgent(self.agent), [self.env], [self.slots], [self.progress], self.agent_info)
        lengths = torch.from_numpy(self.slots.lengths[rows])
        steps = self.slots.read(None if rows.size == self.slots.n else rows, int(lengths.max()))
        index = torch.from_numpy(rows)
        info = {name: self.slots.column(name)[index] for name in self.layout.info}
        return Trajectories(DictTensor({**info, "env_index": index}), TemporalDictTensor(steps, lengths))


# --- acquire against a model ---------------------------------------------------------------------


class Model:
    """One `Count` environment and the row of a `Counting` agent, in plain Python."""

    def __init__(self, length, truncates, autoreset, resets):
        self.length, self.truncates, self.autoreset, self.resets = length, truncates, autoreset, resets
        self.episode = -1
        self.reset()

    def reset(self):
        self.n, self.running = 0, True
        self.start()

    def start(self):
        self.episode += 1
        self.steps = 0
        self.seen = {"frame": [self.episode, 0], "reward": 0, "last_action": 0, **dict.fromkeys(FLAGS, False)}
        self.seen["initial_state"] = True

    def step(self):
        """What a row holds of one step."""
        seen, n = self.seen, self.n
        if seen["initial_state"] and self.resets:
            n = 0
        self.steps, self.n = self.steps + 1, n + 1
        done = self.steps == self.length
        after = {
            "frame": [self.episode, self.steps], "reward": self.steps, "last_action": n % 5, "done": done,
            "terminated": done and not self.truncates, "truncated": done and self.truncates, "initial_state": False,
        }  # fmt: skip
        self.seen = after
        if done and self.autoreset:
            self.start()
        self.running = not done or self.autoreset
        return {
            **{f"observation/{key}": value for key, value in seen.items()},
            **{f"_observation/{key}": value for key, value in after.items()},
            "action/action": n % 5, "action/n": n, "action/given": 0, "action/seed": 0,
        }  # fmt: skip

    def chunk(self, n_timesteps):
        """The state before the first step, and the steps."""
        before, steps = self.n, []
        while self.running and len(steps) < n_timesteps:
            steps.append(self.step())
        return before, steps


def assert_same_chunk(trajectories, wanted):
    """`wanted`: env_index -> (state, steps)."""
    steps = trajectories.trajectories
    assert trajectories.info["env_index"].tolist() == list(wanted)
    assert trajectories.info["agent_state/n"].tolist() == [state for state, _ in wanted.values()]
    assert steps.lengths.tolist() == [len(rows) for _, rows in wanted.values()]
    assert steps.n_timesteps() == max(steps.lengths.tolist())
    assert set(steps) == set(next(iter(wanted.values()))[1][0])
    for key, tensor in steps.items():
        for b, (_, rows) in enumerate(wanted.values()):
            assert tensor[b, : len(rows)].tolist() == [row[key] for row in rows], (key, b)
            assert not tensor[b, len(rows) :].any(), f"padding of {key}"


@pytest.mark.parametrize("wrapped", WRAPPERS.values(), ids=WRAPPERS.keys())
@settings(max_examples=80, deadline=None)
@given(
    table=st.lists(st.tuples(st.integers(1, 7), st.booleans()), min_size=1, max_size=4),
    n_timesteps=st.integers(1, 6),
    autoreset=st.booleans(),
    resets=st.booleans(),
    calls=st.lists(st.sampled_from(["chunk", "chunk", "chunk", "reset"]), min_size=1, max_size=6),
)
def test_rollouts_are_those_of_a_model_in_plain_python(wrapped, table, n_timesteps, autoreset, resets, calls):
    """Also for a user's own environment, which says less about what changed."""
    env = (GymEnvInf if autoreset else GymEnv)([Count(length, truncates) for length, truncates in table], 0)
    run = Run(env, Counting(resets), n_timesteps, wrapped=wrapped)
    models = [Model(length, truncates, autoreset, resets) for length, truncates in table]
    for call in calls:
        if call == "reset" or not run.progress.running.size:
            run.reset()
            for model in models:
                model.reset()
        else:
            wanted = {k: model.chunk(n_timesteps) for k, model in enumerate(models) if model.running}
            assert_same_chunk(run.chunk(), wanted)
        left = [model for model in models if model.running]
        assert run.progress.running.tolist() == [k for k, model in enumerate(models) if model.running]
        for key, array in run.progress.observation.arrays().items():
            assert array.tolist() == [model.seen[key] for model in left], key


# --- other observations, actions and agents ------------------------------------------------------


class Transitions(Recording):
    """Keeps the observation before and after each step."""

    def reset(self, **arguments):
        self.transitions = getattr(self, "transitions", [])
        return super().reset(**arguments)

    def step(self, action):
        before = self.shown[-1]
        found = super().step(action)
        self.transitions.append((before, found[0]))
        return found


@pytest.mark.parametrize("wrapped", WRAPPERS.values(), ids=WRAPPERS.keys())
@pytest.mark.parametrize("cls", [GymEnv, GymEnvInf])
@every_space
def test_every_space_in_a_rollout(space, cls, wrapped):  # R35
    envs = [Transitions(space, space, length) for length in (2, 9, 5)]
    run = Run(cls(envs, 0, keep_float64=True), RandomAgent(space), 4, wrapped=wrapped)
    seen = dict.fromkeys(range(3), 0)
    for _ in range(2):
        trajectories = run.chunk()
        for b, k in enumerate(trajectories.info["env_index"].tolist()):
            length = int(trajectories.lengths[b])
            start, seen[k] = seen[k], seen[k] + length
            before, after = zip(*envs[k].transitions[start : seen[k]], strict=True)
            given_actions = envs[k].actions[start : seen[k]]
            steps = trajectories.trajectories
            for prefix, samples in (("observation", before), ("_observation", after), ("action/action", given_actions)):
                for key, rows in stacked(space, samples, prefix).items():
                    key = f"{key}/frame" if key in ("observation", "_observation") else key
                    found = steps[key][b, :length].numpy().reshape(rows.shape)
                    assert np.array_equal(found.astype(rows.dtype), rows), (key, k)
            assert all(space.contains(action) for action in given_actions)


def test_final_observations_of_an_array_that_is_written_into_again():  # R1
    run = Run(GymEnvInf([Buffer(2), Buffer(3)], 0), RandomAgent(Buffer.action_space), 6)
    steps = run.chunk().trajectories
    assert steps["observation/frame"][..., 0].tolist() == [[0, 1] * 3, [0, 1, 2] * 2]
    assert steps["_observation/frame"][..., 0].tolist() == [[1, 2] * 3, [1, 2, 3] * 2]


@pytest.mark.parametrize("cls", [GymEnv, GymEnvInf])
@pytest.mark.parametrize("flags", [(True, False), (False, True), (True, True)])
def test_both_flags_of_an_end_are_recorded(cls, flags):  # R3
    ending = Recording(length=2, terminated=flags[0], truncated=flags[1])
    steps = Run(cls([ending, Recording(length=9)], 0), RandomAgent(ending.action_space), 3).chunk().trajectories
    for name, flag in zip(("done", "terminated", "truncated"), (True, *flags), strict=True):
        assert steps[f"_observation/{name}"].tolist() == [[False, flag, False], [False] * 3]
        assert not steps[f"observation/{name}"].any()


class Recurrent(RL_Agent):
    """A GRU that starts anew with each episode; puts out probabilities and an action drawn from them."""

    def __init__(self):
        self.cell, self.head = torch.nn.GRUCell(4, 8), torch.nn.Linear(8, 2)

    def initial_state(self, agent_info, B):
        return DictTensor({"h": torch.zeros(B, 8)})

    def __call__(self, state, observation, agent_info, history=None):
        fresh = self.initial_state(agent_info, state.n_elems())
        h = masked_dicttensor(state, fresh, observation["initial_state"])["h"]
        h = self.cell(observation["frame"], h)
        probabilities = self.head(h).softmax(-1)
        action = torch.multinomial(probabilities.detach(), 1)[:, 0]
        return DictTensor({"action": action, "probabilities": probabilities}), DictTensor({"h": h})


@pytest.mark.parametrize("cls", [GymEnv, GymEnvInf])
def test_a_replay_gives_the_recorded_probabilities(cls):  # CV73
    with PrivateStreams()():
        seed_global_streams(4, None)
        env = cls([gymnasium.make("CartPole-v1") for _ in range(3)], 0)
        agent = Recurrent()
        run, n_chunks = Run(env, agent, 7), 0
        while n_chunks < 4 and run.progress.running.size:
            trajectories, n_chunks = run.chunk(), n_chunks + 1
            replayed, mask = replay_agent(agent, trajectories), trajectories.mask(torch.bool)
            recorded = trajectories.trajectories["action/probabilities"]
            assert recorded.grad_fn is None and replayed["probabilities"].requires_grad
            torch.testing.assert_close(replayed["probabilities"][mask], recorded[mask])
        assert n_chunks > 1 and trajectories.info["agent_state/h"].any()


class Historian(RL_Agent):
    """Keeps what it is shown; its output is the sum of the rewards in its history."""

    def __init__(self):
        self.shown = []

    def require_history(self):
        return True

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        B, total = observation.n_elems(), torch.zeros(observation.n_elems())
        if history is not None:
            self.shown.append(history)
            total = (history["_observation/reward"] * history.mask()).sum(1)
        return DictTensor({"action": torch.zeros(B, dtype=torch.int64), "total": total}), state


@pytest.mark.parametrize("cls", [GymEnv, GymEnvInf])
def test_history_is_what_the_slots_hold_so_far(cls):
    agent = Historian()
    run = Run(cls([Count(2), Count(9), Count(4)], 0), agent, 4)
    for _ in range(2):
        agent.shown.clear()
        trajectories = run.chunk()
        steps = trajectories.trajectories
        assert len(agent.shown) == steps.n_timesteps()
        for t, history in enumerate(agent.shown):
            running = steps.lengths > t
            assert history.lengths.tolist() == [t] * int(running.sum())
            assert set(history) == set(steps)
            for key, tensor in history.items():
                assert torch.equal(tensor, steps[key][running, :t]), (key, t)
        replayed, mask = replay_agent(agent, trajectories), trajectories.mask(torch.bool)
        assert torch.equal(replayed["total"][mask], steps["action/total"][mask])


class Informed(RL_Agent):
    """Records its `eps`, also in its state; whether gradients are on."""

    def initial_state(self, agent_info, B):
        return DictTensor({"eps": agent_info["eps"].clone()})

    def __call__(self, state, observation, agent_info, history=None):
        B = observation.n_elems()
        grad = torch.full((B,), torch.is_grad_enabled())
        action = torch.zeros(B, dtype=torch.int64)
        return DictTensor({"action": action, "eps": agent_info["eps"], "mine": state["eps"], "grad": grad}), state


def test_the_agent_gets_the_info_of_those_that_run_and_no_gradients():
    eps = DictTensor({"eps": torch.tensor([0.5, 0.25, 0.125])})
    run = Run(GymEnv([Count(5), Count(1), Count(5)], 0), Informed(), 2, agent_info=eps)
    for rows in ([0, 1, 2], [0, 2]):
        trajectories = run.chunk()
        steps, mask = trajectories.trajectories, trajectories.mask(torch.bool)
        assert trajectories.info["env_index"].tolist() == rows
        for key in ("action/eps", "action/mine"):
            assert torch.equal(steps[key][mask], eps["eps"][rows][:, None].expand(-1, 2)[mask])
        assert not steps["action/grad"].any()


class Remembering(RL_Agent):
    """Gives back the observation it got as its state, and records what it then finds there."""

    def initial_state(self, agent_info, B):
        return DictTensor({"last": torch.full((B, 2), -1.0)})

    def __call__(self, state, observation, agent_info, history=None):
        action = torch.zeros(observation.n_elems(), dtype=torch.int64)
        return DictTensor({"action": action, "last": state["last"]}), DictTensor({"last": observation["frame"]})


@pytest.mark.parametrize("first", [99, 2], ids=["all", "some"])
@pytest.mark.parametrize("n_timesteps", [1, 3])
def test_an_observation_kept_as_state_keeps_its_value(n_timesteps, first):
    run = Run(GymEnv([Count(first), Count(99)], 0), Remembering(), n_timesteps)
    seen = [run.chunk().trajectories["action/last"][-1, :, 1] for _ in range(4)]
    assert torch.cat(seen).tolist() == list(range(-1, 4 * n_timesteps - 1))


# --- agents that change their mind ---------------------------------------------------------------


class Fickle(RL_Agent):
    """Gives something else from its fourth call on."""

    def __init__(self, output=None, state=None):
        self.output, self.state, self.calls = output, state, 0

    def initial_state(self, agent_info, B):
        return DictTensor({"n": torch.zeros(B)})

    def __call__(self, state, observation, agent_info, history=None):
        B = observation.n_elems()
        self.calls += 1
        output = DictTensor({"action": torch.zeros(B, dtype=torch.int64), "value": torch.zeros(B, 2)})
        state = DictTensor({"n": torch.zeros(B)})
        if self.calls > 3:
            output = self.output(dict(output.items())) if self.output else output
            state = self.state(B) if self.state else state
        return output, state


@pytest.mark.parametrize("lengths", [(9, 9, 9), (2, 9, 9)], ids=["all", "some"])
@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        (lambda o: DictTensor({"action": o["action"]}), MissingKeyError, "no 'value' in its output any more"),
        (lambda o: DictTensor({**o, "more": o["value"]}), SpecError, r"output \['more'\] was not in its first step"),
        (lambda o: DictTensor({**o, "value": o["value"].double()}), SpecError, r"'value' is .* float64, expected"),
        (lambda o: DictTensor({**o, "value": o["value"][:, :1]}), SpecError, r"'value' is \(\d, 1\) float32, expected"),
        (lambda o: DictTensor({k: t[:1] for k, t in o.items()}), SpecError, r"'action' is \(1,\) int64, expected"),
        (lambda o: DictTensor({**o, "action": o["action"].int()}), SpecError, r"'action' is .* int32, expected"),
        (lambda o: o, TypeError, "its output must be a DictTensor, got dict"),
        (lambda o: None, TypeError, "its output must be a DictTensor, got NoneType"),
    ],
    ids=["dropped", "added", "dtype", "shape", "rows", "action", "dict", "none"],
)
def test_an_output_that_changes_is_refused(lengths, output, error, message):
    run = Run(GymEnv([Count(length) for length in lengths], 0), Fickle(output=output), 5)
    with pytest.raises(error, match=f"^agent: .*{message}"):
        run.chunk()


@pytest.mark.parametrize("lengths", [(9, 9, 9), (2, 9, 9), (4, 9, 9)], ids=["all", "some", "fewer"])
@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (lambda B: DictTensor({"n": torch.zeros(B + 1)}), SpecError, r"'n' is \(\d,\) float32, expected \(\d,\)"),
        (lambda B: DictTensor({"n": torch.zeros(1)}), SpecError, r"'n' is \(1,\) float32, expected \(\d,\)"),
        (lambda B: DictTensor({"n": torch.zeros(B, 1)}), SpecError, r"'n' is \(\d, 1\) float32, expected \(\d,\)"),
        (lambda B: DictTensor({"n": torch.zeros(B).double()}), SpecError, "'n' is .* float64, expected"),
        (lambda B: DictTensor({"m": torch.zeros(B)}), MissingKeyError, "no 'n' in its state"),
        (lambda B: DictTensor(), MissingKeyError, "no 'n' in its state"),
        (lambda B: None, TypeError, "its next state must be a DictTensor, got NoneType"),
    ],
    ids=["more", "one", "shape", "dtype", "key", "empty", "none"],
)
def test_a_state_that_changes_is_refused_by_the_next_rollout_at_the_latest(lengths, state, error, message):
    """`fewer`: an environment ends in the very step that gives the wrong state."""
    run = Run(GymEnv([Count(length) for length in lengths], 0), Fickle(state=state), 4)
    with pytest.raises(error, match=f"^agent: .*{message}"):
        run.chunk(), run.chunk()


# --- RolloutJob ----------------------------------------------------------------------------------


class Jobs:
    """W jobs over one arena, in this process."""

    def __init__(self, create_env, create_agent, n_workers=1, n_timesteps=3, **changed):
        arena, self.weights = SharedArena(), SharedArena()
        arguments = {
            "agent_args": {}, "env_args": {}, "seeds": [100 * worker for worker in range(n_workers)],
            "agent_seeds": None, "agent_info": NO_INFO, "env_info": NO_INFO, "device": None, **changed,
        }  # fmt: skip
        job_settings = JobSettings(create_agent=create_agent, create_env=create_env, **arguments)
        self.all = [RolloutJob(worker, arena, self.weights, job_settings) for worker in range(n_workers)]
        self.described = [job.describe() for job in self.all]
        n, specs = self.described[0]
        info = {f"agent_state/{key}": spec for key, spec in specs.state.items()}
        for name in ("agent_info", "env_info"):
            info |= {f"{name}/{key}": spec for key, spec in specs_of(arguments[name]).items()}
        layout = Layout(n * n_workers, n_timesteps, specs.observation, specs.action, info)
        generations = SlotBuffers(layout, 1, n_workers)
        arena.resize(generations.reserved_nbytes)
        [self.slots] = generations.slots(arena.map())
        for job in self.all:
            job.attach(generations)

    def rollout(self):
        """Of each, where it stopped."""
        return [job.rollout(1, {})[0] for job in self.all]


@pytest.fixture
def private():
    """Jobs seed the global streams and set the number of threads of their process."""
    with PrivateStreams()():
        yield


def count_env(seed, lengths=((2, 4), (3, 9)), cls=GymEnv):
    return cls([Count(length) for length in lengths[seed // 100]], seed)


@pytest.mark.usefixtures("private")
def test_jobs_write_into_their_own_slots_until_all_have_ended():
    jobs = Jobs(count_env, Counting, n_workers=2, agent_seeds=[5, 6])
    assert [n for n, _ in jobs.described] == [2, 2] and jobs.described[1][1] is None
    for job in jobs.all:
        job.reset({})
    assert jobs.rollout() == [[1], [1]]
    assert jobs.slots.lengths.tolist() == [2, 3, 3, 3]
    steps = jobs.slots.read(None, 3)
    assert steps["_observation/reward"].tolist() == [[1, 2, 0], [1, 2, 3], [1, 2, 3], [1, 2, 3]]
    assert steps["action/seed"].tolist() == [[5, 5, 0], [5] * 3, [6] * 3, [6] * 3]
    assert jobs.rollout() == [[], [1]]
    assert jobs.rollout() == [[], []]
    assert jobs.slots.column("agent_state/n").tolist()[3] == 6
    for job in jobs.all:
        job.reset({})
    assert jobs.rollout() == [[1], [1]]
    assert jobs.slots.read(None, 3)["observation/frame"][:, 0, 0].tolist() == [1] * 4


@pytest.mark.usefixtures("private")
def test_a_job_reads_its_rows_of_the_infos():
    jobs = Jobs(
        count_env, Informed, n_workers=2, agent_info=DictTensor({"eps": torch.zeros(1)}),
        env_info=DictTensor({"length": torch.zeros(1, dtype=torch.int64)}),
    )  # fmt: skip
    jobs.slots.column("env_info/length").copy_(torch.tensor([1, 2, 3, 4]))
    jobs.slots.column("agent_info/eps").copy_(torch.tensor([0.5, 0.25, 0.125, 1]))
    for job in jobs.all:
        job.reset({})
        job.rollout(1, {})
    assert jobs.slots.lengths.tolist() == [1, 2, 3, 3]
    assert jobs.slots.read(None, 1)["action/eps"][:, 0].tolist() == [0.5, 0.25, 0.125, 1]


@pytest.mark.usefixtures("private")
def test_finding_the_specs_uses_no_random_number():
    class Drawing(Counting):
        def __call__(self, state, observation, agent_info, history=None):
            return DictTensor({"action": torch.randint(50, (1,))}), state

    jobs = Jobs(lambda seed: GymEnv([Recording(length=9)], seed), Drawing)
    jobs.all[0].reset({})
    jobs.all[0].rollout(1, {})
    seed_global_streams(0, None)
    assert jobs.slots.read(None, 3)["action/action"].tolist() == [[int(torch.randint(50, (1,))) for _ in range(3)]]


@pytest.mark.usefixtures("private")
def test_an_environment_without_an_example_is_made_twice_and_closed_once():
    """Finding the specs resets it, and a reset cannot be undone."""
    made = []

    class Logged(Plain):
        closed = False

        def close(self):
            self.closed = True

    def create_env(seed):
        made.append(Logged(count_env(seed)))
        return made[-1]

    jobs = Jobs(create_env, Counting, n_workers=2)
    assert [env.closed for env in made] == [True, False, False]
    for job in jobs.all:
        job.reset({})
        job.rollout(1, {})
    assert jobs.slots.read(None, 3)["observation/frame"][:, 0].tolist() == [[0, 0]] * 4


@pytest.mark.usefixtures("private")
def test_the_agent_that_finds_the_specs_is_seeded_and_closed():
    """An agent may have no generator before it is seeded."""
    made = []

    class Logged(Counting):
        def __init__(self):
            super().__init__()
            self.log = []
            made.append(self)

        def seed(self, seed):
            self.log.append(("seed", seed))

        def close(self):
            self.log.append("close")

    jobs = Jobs(count_env, Logged, agent_seeds=[3])
    jobs.all[0].close()
    assert [agent.log for agent in made] == [[("seed", 3), "close"]] * 2


@pytest.mark.usefixtures("private")
def test_an_update_hands_over_copies():
    jobs = Jobs(count_env, Counting)
    info = {"w": torch.ones(3), "name": "x"}
    packed = Outbox(jobs.weights, 1, lambda asked: None).pack(info)
    info["w"].zero_()
    jobs.all[0].update(packed)
    given_info = jobs.all[0].agent.given
    assert given_info["name"] == "x" and given_info["w"].tolist() == [1, 1, 1]


@pytest.mark.usefixtures("private")
def test_closing_closes_both_although_the_agent_raises():
    class Raising(Counting):
        armed = False

        def close(self):
            if self.armed:
                raise ValueError("cannot close")

    recording = Recording()
    jobs = Jobs(lambda seed: GymEnv([recording], seed), Raising)
    Raising.armed = True
    with pytest.raises(ValueError, match="cannot close"):
        jobs.all[0].close()
    assert recording.n_closed == 1


class Odd(RL_Agent):
    """Wrong from the first step."""

    def __init__(self, initial=None, output=None, state=None):
        self.initial, self.gives = initial, (output, state)

    def initial_state(self, agent_info, B):
        return DictTensor({"n": torch.zeros(B)}) if self.initial is None else self.initial

    def __call__(self, state, observation, agent_info, history=None):
        output, following = self.gives
        return DictTensor({"action": torch.zeros(2).long()}) if output is None else output, following or state


@pytest.mark.usefixtures("private")
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"initial": {}}, TypeError, "initial_state must be a DictTensor, got dict"),
        ({"initial": DictTensor({"n": torch.zeros(3)})}, SpecError, r"initial_state: 'n' has shape \(3,\), expected"),
        ({"output": [1]}, TypeError, "its output must be a DictTensor, got list"),
        ({"output": DictTensor({"action": torch.zeros(1)})}, SpecError, r"its output: 'action' has shape \(1,\)"),
        ({"output": DictTensor({"action": torch.tensor(1)})}, SpecError, r"its output: 'action' has shape \(\)"),
        ({"state": 3}, TypeError, "its next state must be a DictTensor, got int"),
        ({"state": DictTensor({"n": torch.zeros(1)})}, SpecError, r"its next state: 'n' has shape \(1,\)"),
        ({"state": DictTensor({"m": torch.zeros(2)})}, SpecError, "its next state is DictTensor.*its initial one"),
        ({"state": DictTensor({"n": torch.zeros(2).double()})}, SpecError, "its next state is DictTensor.*float64"),
    ],
    ids=["initial-type", "initial-rows", "output-type", "output-rows", "output-axis", "state-type", "state-rows",
         "state-key", "state-dtype"],
)  # fmt: skip
def test_an_agent_that_is_wrong_from_the_start_is_refused_by_name(wrong, error, message):
    with pytest.raises(error, match=f"^agent: {message}"):
        Jobs(count_env, lambda: Odd(**wrong))


@pytest.mark.usefixtures("private")
@pytest.mark.parametrize("kind", [Odd, Historian])
@pytest.mark.parametrize("returned", [DictTensor({"action": torch.zeros(2), "n": torch.zeros(2)}), None, (1, 2, 3)])
def test_an_agent_that_returns_no_pair_is_refused_by_name(returned, kind):
    class Alone(kind):
        def __call__(self, *arguments, **more):
            return returned

    name = type(returned).__name__
    with pytest.raises(TypeError, match=f"^agent: it must return its output and its next state, got {name}$"):
        Jobs(count_env, Alone)


def test_an_initial_state_is_moved_to_where_observations_are():
    class Moved(Counting):
        def __call__(self, state, observation, agent_info, history=None):
            assert state["n"].device == observation["initial_state"].device
            return DictTensor({"action": state["n"] % 5}), state

    observation = DictTensor({"initial_state": torch.ones(2, dtype=torch.bool, device="meta")})
    assert first_step(Moved(), observation, NO_INFO, 2)[1].device() == torch.device("meta")


def test_what_two_have_found_must_be_the_same():
    def found(**changed):
        return Specs(**{"observation": {"x": ((2,), torch.float32)}, "action": {"action": ((), torch.int64)},
                        "state": {}, "statistics": {}, **changed})  # fmt: skip

    found().check_like(found(), "node 1")
    with pytest.raises(SpecError, match=r"^node 1: observation 'x' has rows of \(\(3,\), torch.float32\), of "):
        found(observation={"x": ((3,), torch.float32)}).check_like(found(), "node 1")
    with pytest.raises(MissingKeyError, match="^node 1: action: .*'action'.* missing"):
        found(action={}).check_like(found(), "node 1")
    with pytest.raises(SpecError, match="^node 1: state: unknown .*'h'"):
        found(state={"h": ((), torch.float32)}).check_like(found(), "node 1")


@pytest.mark.usefixtures("private")
def test_an_agent_may_read_any_key_of_its_history_from_the_start():
    class Reading(Historian):
        def __call__(self, state, observation, agent_info, history=None):
            assert history is not None and history["action/action"].shape[:2] == history["_observation/done"].shape[:2]
            return super().__call__(state, observation, agent_info, history)

    jobs = Jobs(count_env, Reading)
    jobs.all[0].reset({})
    assert jobs.rollout()[0] == [1]  # the first one has ended


class Embedding(Counting):
    """Looks its past actions up in a table."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(5, 3)

    def require_history(self):
        return True

    def __call__(self, state, observation, agent_info, history=None):
        assert self.table(history["action/action"]).shape == (len(observation), history.n_timesteps(), 3)
        return super().__call__(state, observation, agent_info)


@pytest.mark.usefixtures("private")
def test_past_actions_are_of_the_dtype_of_actions_before_there_are_any():
    jobs = Jobs(count_env, Embedding)
    jobs.all[0].reset({})
    assert jobs.rollout() == [[1]]
