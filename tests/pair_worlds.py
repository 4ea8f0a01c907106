"""Environments of every class that keep a book of what they did, and agents that tell what they saw, for `pairs.py`.

An observation holds the numbers of `FIELDS`, from which `pair_books.py` proves that a row has happened, and features
that follow from them. Episodes have 1 to 6 steps, by the environment's index and the number of the episode.
"""

from __future__ import annotations

import os
import signal
from functools import partial

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from pettingzoo import ParallelEnv

from rlstructs import (
    DeviceEnv,
    DictTensor,
    GymEnv,
    GymEnvInf,
    GymEnvThreads,
    GymVectorEnv,
    ModuleAgent,
    NormalizeObservation,
    NormalizeReward,
    RL_Agent,
)
from rlstructs.envs import SharedVectorEnv
from rlstructs.integrations.pettingzoo import ParallelEnvs

FIELDS = ("index", "generation", "episode", "step", "draw", "option", "check")
# Environments of a worker: three, so that two groups differ in size; of several agents two of two slots each.
N_ENVS, N_AGENTS = 3, 2
# The step, over all episodes, in which the last environment of the last worker fails. Agents that stay away until the
# next reset take fewer steps than others.
FAILS_AT, FAILS_EARLY_AT = 9, 6
SEED = 7
# What a new life of an environment adds to its generation, which is the restart number of its worker.
LIFE = 4096
FACTOR, LIMIT = 16_807, 2_147_483_647


def checksum(*parts):
    """Below 2**20; of ints or of int64 arrays. The last part is the code of the action plus 1, or 0 after a reset."""
    total = 0 * parts[0]
    for part in parts:
        total = (total * FACTOR + part + 12_345) % LIMIT
    return total % (1 << 20)


def length_of(index, episode):
    """The steps of an episode, 1 to 6."""
    return 1 + (5 * index + 3 * episode) % 6


def features_of(numbers):
    """What an observation shows beside the numbers: float32 (..., 4), of ints (..., 7)."""
    index, _, episode, step, draw, option, check = np.moveaxis(np.asarray(numbers), -1, 0)
    return np.stack([draw / 64, step - episode / 8, index + option, check / 4096], -1).astype(np.float32)


def image_of(numbers):
    """uint8 (..., 3, 2)."""
    numbers = np.asarray(numbers)
    return (numbers[..., [[0, 2], [3, 4], [5, 6]]] % 251).astype(np.uint8)


# --- actions ------------------------------------------------------------------------------------------

ACTION_SPACES = {
    "discrete": spaces.Discrete(5, start=2),
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "multi": spaces.MultiDiscrete([3, 4]),
    "dict": spaces.Dict({"move": spaces.Discrete(3), "force": spaces.Box(-1, 1, (2,), np.float64)}),
}


def code_of(action, kind):
    """A number for an action, or int64 (...) for a batch of them: an array, or a dict of arrays."""
    if kind == "dict":
        return code_of(action["move"], "discrete") * 512 + code_of(action["force"], "box")
    array = np.asarray(action)
    if kind == "discrete":
        return array.astype(np.int64)
    if kind == "multi":
        return array[..., 0].astype(np.int64) * 4 + array[..., 1]
    steps = np.rint(np.nan_to_num(array) * 8).astype(np.int64) + 8  # padding may hold NaN
    return steps[..., 0] * 17 + steps[..., 1]


def draw_actions(kind, n, generator=None):
    """Random actions of n environments, by the names of an agent's output."""

    def integers(low, high, *shape):
        return torch.randint(low, high, (n, *shape), generator=generator, device="cpu")

    force = (integers(-8, 9, 2) / 8).float()
    if kind == "discrete":
        return {"action": integers(2, 7)}
    if kind == "multi":
        return {"action": torch.stack([integers(0, 3), integers(0, 4)], 1)}
    return {"action": force} if kind == "box" else {"action/move": integers(0, 3), "action/force": force}


# --- environments -------------------------------------------------------------------------------------


class Book:
    """The numbers of one environment, or of one agent in an environment."""

    def __init__(self, index, generation, acts, fails=""):
        self.index, self.generation, self.acts, self.fails = index, generation, acts, fails
        self.episode, self.step, self.n_steps, self.option = -1, 0, 0, 0

    def begin(self, rng, option=None):
        self.episode, self.step = self.episode + 1, 0
        self.option = self.option if option is None else int(option)
        return self._note(0, rng)

    def go(self, action, rng):
        """Numbers, reward, terminated and truncated after an action."""
        self.step, self.n_steps = self.step + 1, self.n_steps + 1
        if self.fails and self.n_steps == self.fails[1]:
            if self.fails[0] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("told to fail")
        is_over = self.step == length_of(self.index, self.episode)
        has_terminated = is_over and (self.index + self.episode) % 2 == 0
        numbers = self._note(int(code_of(action, self.acts)) + 1, rng)
        return numbers, self.step + self.index / 4, has_terminated, is_over and not has_terminated

    def _note(self, code, rng):
        told = self.index, self.generation, self.episode, self.step, int(rng.integers(1 << 16)), self.option
        return np.array([*told, checksum(*told, code)], np.int64)


def observation_space(kind):
    numbers, features = spaces.Box(0, 1 << 40, (len(FIELDS),), np.int64), spaces.Box(-1e6, 1e6, (4,), np.float32)
    if kind == "numbers":
        return numbers
    if kind == "infos":
        return features
    inner = spaces.Dict({"step": spaces.Discrete(100), "image": spaces.Box(0, 255, (3, 2), np.uint8)})
    return spaces.Dict({"book": numbers, "x": features, "inner": inner})


def observe(kind, numbers):
    if kind == "numbers":
        return numbers
    if kind == "infos":
        return features_of(numbers)
    inner = {"step": numbers[3], "image": image_of(numbers)}
    return {"book": numbers, "x": features_of(numbers), "inner": inner}


def info_of(numbers):
    return dict(zip(FIELDS, numbers.tolist(), strict=True))


class Told(gymnasium.Env):
    """Keeps a book."""

    def __init__(self, index, generation, shows, acts, fails=""):
        self.book, self.shows = Book(index, generation, acts, fails), shows
        self.observation_space, self.action_space = observation_space(shows), ACTION_SPACES[acts]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        numbers = self.book.begin(self.np_random, (options or {}).get("option"))
        return observe(self.shows, numbers), info_of(numbers)

    def step(self, action):
        assert self.action_space.contains(action), action
        numbers, *outcome = self.book.go(action, self.np_random)
        return observe(self.shows, numbers), *outcome, info_of(numbers)


class ToldParallel(ParallelEnv):
    """Two agents, each with a book of its own. The second comes in step 2 of odd episodes, and comes back in step 4."""

    metadata = {"name": "told"}  # noqa: RUF012
    possible_agents = ("first", "second")

    def __init__(self, number, generation, shows, acts, fails=""):
        self.shows, self.acts, self.agents, self.n_resets = shows, acts, [], 0
        self.books = {
            agent: Book(number * N_AGENTS + place, generation, acts, fails if place == 0 else "")
            for place, agent in enumerate(self.possible_agents)
        }

    def observation_space(self, agent):
        return observation_space(self.shows)

    def action_space(self, agent):
        return ACTION_SPACES[self.acts]

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.n_resets, self.n_steps = self.n_resets + 1, 0
        self.option = (options or {}).get("option")
        self.agents = ["first"] if self.n_resets % 2 else list(self.possible_agents)
        return self._show({agent: self.books[agent].begin(self.rng, self.option) for agent in self.agents})

    def step(self, actions):
        assert sorted(actions) == sorted(self.agents)
        self.n_steps += 1
        found = {agent: self.books[agent].go(actions[agent], self.rng) for agent in self.agents}
        told = {agent: numbers for agent, (numbers, *_) in found.items()}
        self.agents = [agent for agent, (*_, terminated, truncated) in found.items() if not terminated | truncated]
        if self.agents == ["first"] and self.n_steps in (2, 4) and "second" not in told:
            told["second"] = self.books["second"].begin(self.rng, self.option)
            self.agents = list(self.possible_agents)
        observations, infos = self._show(told)
        outcomes = [{agent: each[place] for agent, each in found.items()} for place in (1, 2, 3)]
        return observations, *outcomes, infos

    def _show(self, told):
        return {agent: observe(self.shows, numbers) for agent, numbers in told.items()}, {
            agent: info_of(numbers) for agent, numbers in told.items()
        }


class Own:
    """A `VecEnv` of a user's: its methods and nothing else."""

    def __init__(self, env):
        self._hidden = env
        self.observation_space, self.action_space = env.observation_space, env.action_space

    @property
    def absent_rows(self):
        return getattr(self._hidden, "absent_rows", np.zeros(0, np.int64))

    def n_envs(self):
        return self._hidden.n_envs()

    def reset(self, env_info=DictTensor()):  # noqa: B008
        return self._hidden.reset(env_info)

    def step(self, action):
        return self._hidden.step(action)

    def close(self):
        self._hidden.close()


class OwnInto(Own):
    """Writes its observations to the rows of a rollout."""

    def step_into(self, action, rows):
        (after, _), (following, _) = self.step(action)
        for key, tensor in after.items():
            rows[key][...] = tensor.numpy()
        ended = after["done"].nonzero()[:, 0]
        return (ended, following.index(ended)) if len(ended) else None


AUTORESET = {"same": "SameStep", "next": "NextStep", "disabled": "Disabled"}


def create_env(env, shows, acts, wrapper, fails, n_envs, seed, n_workers, in_worker):
    """The environments of a worker, of class `env`."""
    worker, generation = seed.worker_index, seed.restart_number + LIFE * getattr(seed, "life", 0)
    several = env.startswith("agents")
    n = n_envs // N_AGENTS if several else n_envs
    keys = dict.fromkeys(FIELDS, np.int64) if shows == "infos" else ()
    # Not those of an evaluation, which has another seed.
    fails = fails if worker == n_workers - 1 and not generation and seed.root == SEED else ""
    fails = fails and (fails, FAILS_EARLY_AT if env == "agents rollout" else FAILS_AT)
    told = partial(ToldParallel if several else Told, generation=generation, shows=shows, acts=acts)
    makers = [partial(told, worker * n + k, fails=fails if k == n - 1 else "") for k in range(n)]
    name, _, kind = env.partition(" ")
    if name == "JaxEnv":
        import pair_jax  # jax warns of a fork once it is used

        return wrap(pair_jax.make_env(worker * n, generation, shows, acts, fails, n, seed), wrapper)
    if several:
        made = ParallelEnvs(makers, seed, info_keys=keys, reset_at=kind)
    elif name in ("sync", "shared"):
        settings = {"autoreset_mode": AUTORESET[kind.split()[0]]}
        if name == "sync":
            vector = SyncVectorEnv(makers, **settings)
        else:
            groups, n_processes = 2 if "groups" in kind else 1, 0 if "inline" in kind else 1
            # A worker would start a fork server of its own, which imports torch anew.
            method = "fork" if in_worker else None
            vector = SharedVectorEnv(makers, n_processes, n_groups=groups, start_method=method, **settings)
        made = GymVectorEnv(vector, seed, info_keys=keys)
    else:
        plain = {"gym": GymEnv, "own ends": GymEnv, "GymEnvThreads": GymEnvThreads}.get(
            env if env.startswith("own") else name, GymEnvInf
        )
        settings = {"deferred": {"defer_resets": True}, "seeds": {"episode_seeds": True}}.get(kind, {})
        if plain is GymEnvThreads:  # the same ones are ready together in every run
            settings = {**settings, "min_ready": n, "step_timeout": 30}
        made = plain([make() for make in makers], seed, info_keys=keys, **settings)
        made = {"own": Own, "own ends": Own, "own into": OwnInto}.get(env, lambda env: env)(made)
    return wrap(made, wrapper)


def wrap(env, wrapper):
    if wrapper in ("observation", "both"):
        env = NormalizeObservation(env)
    if wrapper in ("reward", "both"):
        env = NormalizeReward(env)
    if wrapper == "DeviceEnv":
        env = DeviceEnv(env, "cpu", "cpu")
    return Own(env) if wrapper == "own" else env


# --- agents -------------------------------------------------------------------------------------------


class Plain(RL_Agent):
    """Acts at random, by torch's global generator; tells what it was given."""

    def __init__(self, acts):
        self.acts, self.version = acts, torch.zeros((), dtype=torch.int64)

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        return self._answer(observation, agent_info), state

    def _answer(self, observation, agent_info, generator=None, **told):
        n, device = observation.n_elems(), observation["reward"].device
        told = draw_actions(self.acts, n, generator) | {"version": self.version.expand(n), **told}
        if "offset" in agent_info:
            told["offset"] = agent_info["offset"]
        return DictTensor({key: tensor.to(device) for key, tensor in told.items()})

    def update(self, info):
        self.version = info["version"]


class Stateful(Plain):
    """Its state counts the steps of the episode; it has a generator of its own."""

    def seed(self, seed):
        self.generator = torch.Generator().manual_seed(seed % 2**63)

    def initial_state(self, agent_info, B):
        return DictTensor({"n": torch.zeros(B, dtype=torch.int64)})

    def __call__(self, state, observation, agent_info, history=None):
        n = torch.where(observation["initial_state"], 0, state["n"])
        state["n"].fill_(-1)  # its own, to write to
        return self._answer(observation, agent_info, self.generator, n=n), DictTensor({"n": n + 1})


class Viewing(Stateful):
    """Takes views of what is recorded."""

    takes_views = True

    def __call__(self, state, observation, agent_info, history=None):
        return super().__call__(state, observation, agent_info)


class Remembering(Plain):
    """Tells how long its history is, and a sum over it."""

    def require_history(self):
        return True

    def __call__(self, state, observation, agent_info, history=None):
        rewards = history["_observation/reward"]
        length = torch.full((observation.n_elems(),), rewards.shape[1], dtype=torch.int64)
        return self._answer(observation, agent_info, length=length, total=rewards.double().sum(1)), state


class Linear(torch.nn.Module):
    """A network over any observation of these environments; for a Box it gives a distribution."""

    def __init__(self, acts):
        super().__init__()
        self.acts, self.layer = acts, torch.nn.Linear(4, N_OUTPUTS.get(acts, 1))

    def forward(self, shown):
        shown = shown["x"] if isinstance(shown, dict) else shown
        found = self.layer((shown[:, :4] % 64 / 64).float())
        return torch.distributions.Normal(found, 0.5) if self.acts == "box" else found


N_OUTPUTS = {"discrete": 5, "box": 2, "multi": 7}


class Snapping(ModuleAgent):
    """A `ModuleAgent` whose continuous actions are on the grid that books know."""

    def __call__(self, state, observation, agent_info, history=None):
        output, state = super().__call__(state, observation, agent_info)
        told = dict(output.items())
        if told["action"].is_floating_point():
            told["action"] = (told["action"].clip(-1, 1) * 8).round() / 8
        return DictTensor(told), state


def create_agent(agent, acts, shows):
    if agent == "module":
        return Snapping(Linear(acts), ACTION_SPACES[acts], observation_space(shows))
    if agent == "jax":
        import pair_jax

        return pair_jax.make_agent(acts)
    return {"plain": Plain, "state": Stateful, "views": Viewing, "history": Remembering}[agent](acts)
