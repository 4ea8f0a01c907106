"""The settings of a batcher, and a case of them: rollouts of which every row, episode and memory is proved."""

from __future__ import annotations

import contextlib
import gc
import inspect
import io
import tempfile
import warnings
from contextlib import ExitStack

import numpy as np
import psutil
import torch
from clusters import ray_cluster
from pair_books import Ledger, array
from pair_worlds import N_ENVS, SEED, create_agent, create_env
from pairs import Rule, Table
from processes import command_of, wait_until, worker_pids

from rlstructs import (
    Checkpoint,
    DictTensor,
    RayBatcher,
    RL_Batcher,
    SpecError,
    StateError,
    TemporalDictTensor,
    Trajectories,
)
from rlstructs.memories.jax import RandomMemory as JaxMemory
from rlstructs.memories.torch import PrioritizedMemory, RandomMemory
from rlstructs.replay import (
    CachedReplayBuffer,
    ChunkReplayBuffer,
    DictTensorReplayBuffer,
    ListStorage,
    ReplayBuffer,
    VectorReplayBuffer,
)

T, N_TURNS, CAPACITY = 5, 7, 24
# The turn before which something happens, and the one before which a state is taken.
AT_INTERLUDE, AT_STATE, N_AGAIN = 2, 4, 2

VECTORS = ("sync same", "sync next", "sync disabled", "shared same", "shared next", "shared same groups",
           "shared next groups", "shared same inline groups")  # fmt: skip
SHARED = tuple(name for name in VECTORS if name.startswith("shared") and "inline" not in name)
AGENTS = ("agents step", "agents rollout", "agents reset")
# Environments that do not tell which of them has failed.
JAX = ("JaxEnv", "JaxEnv compiled")
NAMELESS = ("sync same", "sync next", "sync disabled", "own", "own ends", "own into", *AGENTS, *JAX)
# Environments that have to end, all, before a reset.
WAITS = ("gym", "own ends", "agents reset")
IN_TORCH = ("plain", "state", "views", "history", "module")
THREADS = ("GymEnvThreads", "GymEnvThreads seeds")
IDLES = ("sync next", "shared next", "shared next groups", *AGENTS)
ENV_RESTARTS = ("env restart after raise",) if "on_env_failure" in inspect.signature(RL_Batcher).parameters else ()
STATES = ("exact same", "exact new", "best new", "plain same", "plain new", "checkpoint")
SETTINGS = {
    "env": ("GymEnvInf", "gym", "GymEnvInf deferred", "GymEnvInf seeds", "GymEnvThreads", "GymEnvThreads seeds",
            *VECTORS, "own", "own ends", "own into", *AGENTS, *JAX),
    "processes": ("0", "1 forkserver", "2 forkserver", "2 fork"),
    "ahead": ("0", "1", "2"),
    "failure": ("none", "restart after raise", "restart after kill", "raise", *ENV_RESTARTS),
    "take": ("get", "out", "lease", "wait", "poll", "rollouts"),
    "memory": ("none", "RandomMemory", "PrioritizedMemory", "jax", "export", "ReplayBuffer", "VectorReplayBuffer",
               "CachedReplayBuffer", "ChunkReplayBuffer", "DictTensorReplayBuffer"),
    "early": ("none", "preempt", "min_workers"),
    "state": ("none", *STATES),
    "moment": ("between rollouts", "under way"),
    "wrapper": ("none", "observation", "reward", "both", "DeviceEnv", "own"),
    "device": ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",),
    "agent": (*IN_TORCH, "jax"),
    "info": ("none", "agent_info", "env_info", "both"),
    "shows": ("numbers", "infos", "dict"),
    "acts": ("discrete", "box", "multi", "dict"),
    "debug": ("no", "yes"),
    "interlude": ("none", "reset", "evaluate", "late feed"),
    "way": ("constructor", "make"),
    "over": ("this machine",),
}  # fmt: skip
# Where workers take seconds to start, each value comes once.
RAY = {name: values[:1] for name, values in SETTINGS.items()} | {
    "env": ("GymEnvInf", "gym", "GymEnvInf deferred", "GymEnvThreads", "sync next", "shared same", "own",
            "agents step", "JaxEnv compiled"),
    "processes": ("2 forkserver",),
    "ahead": ("0", "1"),
    "failure": ("none", "restart after raise", "restart after kill", "raise"),
    "take": ("get", "out", "wait", "poll", "rollouts"),
    "memory": ("none", "RandomMemory", "VectorReplayBuffer", "ChunkReplayBuffer"),
    "early": ("none", "preempt", "min_workers"),
    "state": ("none", *STATES),
    "moment": ("between rollouts", "under way"),
    "wrapper": ("none", "both"),
    "agent": ("plain", "state", "jax"),
    "info": ("none", "both"),
    "shows": ("infos", "dict"),
    "acts": ("discrete", "dict"),
    "interlude": ("none", "reset", "evaluate", "late feed"),
    "over": ("Ray",),
}  # fmt: skip
SPAWNED = RAY | {"processes": ("1 spawn", "2 spawn"), "over": ("this machine",)}
NORMALIZED = ("observation", "both")
RULES = [
    # What the library refuses.
    Rule({"info": ("env_info", "both"), "env": VECTORS}, "env_info: .* takes no options for single env", SpecError),
    Rule({"info": ("env_info", "both"), "env": JAX}, "env_info: environments in jax take none", SpecError),
    Rule({"agent": ("history",), "env": (*IDLES, *THREADS)},
         "an agent that requires a history cannot act in", SpecError),
    Rule({"wrapper": NORMALIZED, "shows": ("numbers",)}, "the observation is not floating-point", SpecError),
    Rule({"agent": ("module",), "acts": ("dict",)}, "an action space must be one of", SpecError),
    # `make` refuses these, which test_jax_rollouts shows; a forked worker may hang before it can refuse anything.
    Rule({"processes": ("2 fork",), "env": JAX}, "jax hangs where it is forked"),
    Rule({"processes": ("2 fork",), "agent": ("jax",)}, "jax hangs where it is forked"),
    Rule({"processes": ("2 fork",), "memory": ("jax",)}, "jax warns of a fork"),
    Rule({"env": SHARED, "state": ("exact same", "exact new", "checkpoint")},
         "SharedVectorEnv\\) cannot be brought back: pickle: TypeError: worker processes cannot be copied", SpecError),
    Rule({"failure": ENV_RESTARTS, "env": NAMELESS},
         "does not tell which of its environments has failed", SpecError),
    Rule({"failure": ENV_RESTARTS, "wrapper": ("own", "DeviceEnv")}, "does not tell which of its env", SpecError),
    Rule({"state": ("checkpoint",), "moment": ("under way",)}, "save: a rollout is under way", StateError),
    # What there is no call for, or no sense in.
    Rule({"env": ("JaxEnv compiled",), "agent": IN_TORCH}, "they are stepped, as JaxEnv are"),
    Rule({"env": ("JaxEnv",), "agent": ("jax",)}, "they are compiled"),
    Rule({"env": JAX, "shows": ("infos",)}, "their infos are not recorded"),
    Rule({"state": ("none",), "moment": ("under way",)}, "no state is taken"),
    Rule({"take": ("rollouts",), "moment": ("under way",)}, "they begin rollouts themselves"),
    Rule({"agent": ("module",), "info": ("agent_info", "both")}, "a module is given none"),
    Rule({"take": ("lease", "rollouts"), "early": ("preempt", "min_workers")}, "they wait for all workers"),
    Rule({"take": ("rollouts",), "info": ("agent_info", "env_info", "both")}, "they reset without an info"),
    Rule({"failure": ("restart after kill",), "processes": ("0",)}, "it would end this process"),
    Rule({"failure": ("raise",), "state": STATES}, "the batcher has failed by then"),
    Rule({"failure": ("restart after raise",), "processes": ("0",), "state": STATES}, "the batcher has failed by then"),
    Rule({"memory": ("none",), "interlude": ("late feed",)}, "there is no memory"),
]  # fmt: skip


def make_memory(kind, n, seed=0):
    """A memory with a lane for each of n environments, or with one for all."""
    skrl = {"memory_size": CAPACITY, "num_envs": n, "seed": seed}
    if kind in ("RandomMemory", "PrioritizedMemory"):
        return {"RandomMemory": RandomMemory, "PrioritizedMemory": PrioritizedMemory}[kind](device="cpu", **skrl)
    if kind == "jax":
        return JaxMemory(device="cpu", **skrl)
    if kind == "export":
        return RandomMemory(device="cpu", export=True, export_directory=tempfile.gettempdir(), **skrl)
    if kind == "ReplayBuffer":
        return ReplayBuffer(CAPACITY * n, random_seed=seed)
    if kind == "VectorReplayBuffer":
        return VectorReplayBuffer(CAPACITY * n, n, random_seed=seed)
    if kind == "CachedReplayBuffer":
        return CachedReplayBuffer(ReplayBuffer(CAPACITY * n, random_seed=seed), n, CAPACITY)
    if kind == "ChunkReplayBuffer":
        return ChunkReplayBuffer(CAPACITY * n, seed, n_lanes=n)
    return DictTensorReplayBuffer(storage=ListStorage(CAPACITY * n), batch_size=4, generator=seed)


def content(memory):
    """Rows by column, of each lane, in order; the version is of fed memories alone."""
    found = {}
    for number, owner in enumerate([memory, *getattr(memory, "_inner", dict)().values()]):
        store = owner._storage
        rows = store.view().every_row()
        names = sorted(name for name in store.columns.specs if name != "policy_version")
        values = store.gather(names, rows)
        columns = {name: np.asarray(store.columns.host(name, each)) for name, each in zip(names, values, strict=True)}
        if store.episodes is not None:  # some surfaces keep them only from the moment on in which they are needed
            columns["begins"] = store.episodes.begin(rows)
        columns["lane"] = lanes = store.columns.lanes(rows)
        for lane in range(store.columns.n_lanes):
            found[number, lane] = {name: each[lanes == lane] for name, each in columns.items()}
    return found


def is_one_lane(memory):
    return memory._storage.columns.n_lanes == 1


def assert_fed(memory, twin, n_hidden):
    """Raises unless each lane of a fed memory has the rows of its twin, but for at most so many of the oldest."""
    wanted = content(twin)
    for place, found in content(memory).items():
        own = wanted[place]
        n, n_own = len(found["lane"]), len(own["lane"])
        assert n_own - n_hidden <= n <= n_own, f"lane {place} has {n} rows, added were {n_own}"
        if not n:  # a memory that is fed has its columns before it has rows
            continue
        for name in found.keys() & own.keys():
            after = n > 0 and name == "begins" and n < n_own  # whether the first one begins is not seen
            assert_equal(found[name][after:], own[name][n_own - n + after :], f"fed, lane {place}: {name}")
        assert found.keys() ^ own.keys() <= {"begins"}, f"fed: {sorted(found)}, added: {sorted(own)}"


def assert_equal(found, wanted, what):
    same = found.shape == wanted.shape and found.dtype == wanted.dtype
    equals = {"equal_nan": True} if wanted.dtype.kind == "f" else {}
    assert same and np.array_equal(found, wanted, **equals), (
        f"{what}: {found.dtype} {found.shape}, expected {wanted.dtype} {wanted.shape}\n{found}\nexpected\n{wanted}"
    )


class Course:
    """Rollouts of one batcher, with a memory that it feeds and a twin of it, to which what is handed out is added."""

    def __init__(self, case, stack):
        self.case, self.stack = case, stack
        self.n_processes, self.ahead = int(case["processes"][0]), int(case["ahead"])
        self.n_workers = max(1, self.n_processes)
        self.n_envs = N_ENVS + case["env"].startswith("agents")  # of one worker
        self.n = self.n_workers * self.n_envs
        self.ledger, self.version, self.turns, self.kept = Ledger(self.n_envs), 0, 0, None
        self.is_under_way = False
        if case["failure"] in ENV_RESTARTS:  # the last environment, and no worker
            self.ledger.anew.add(self.n - 1)
        self.has_agent_info, self.has_env_info = (case["info"] in (name, "both") for name in ("agent_info", "env_info"))
        self.memory = self.twin = None
        if case["memory"] != "none":
            self.memory, self.twin = (make_memory(case["memory"], self.n) for _ in range(2))
        self.batcher = self.make_batcher()
        if self.memory is not None and case["interlude"] != "late feed":
            self.batcher.feed(self.memory)
        self.iteration = None

    def make_batcher(self):
        case = self.case
        env_args = {name: case[name] for name in ("env", "shows", "acts", "wrapper")}
        env_args |= {"fails": case["failure"].rpartition(" ")[2].replace("none", ""), "n_workers": self.n_workers}
        env_args["in_worker"] = self.n_processes > 0
        agent_args = {name: case[name] for name in ("agent", "acts", "shows")}
        examples = {"agent_info": DictTensor({"offset": torch.zeros(1, dtype=torch.int64)}),
                    "env_info": DictTensor({"option": torch.zeros(1, dtype=torch.int64)})}  # fmt: skip
        settings = {name: example for name, example in examples.items() if case["info"] in (name, "both")}
        settings |= {
            "device": case["device"], "timeout": 60, "run_ahead": self.ahead, "debug": case["debug"] == "yes",
            "on_worker_failure": "restart" if case["failure"].startswith("restart") else "raise",
            "start_method": case["processes"][2:] or None,
        }  # fmt: skip
        if case["failure"] in ENV_RESTARTS:
            settings["on_env_failure"] = "restart"
        if case["way"] == "make":

            def create(n_envs, seed, **arguments):
                return create_env(n_envs=n_envs, seed=seed, **arguments)

            made = RL_Batcher.make(
                create, lambda: create_agent(**agent_args), n_envs=self.n, n_workers=self.n_processes, n_timesteps=T,
                seed=SEED, env_args=env_args, **settings,
            )  # fmt: skip
        else:
            cls, more = (RayBatcher, {"n_nodes": 2}) if case["over"] == "Ray" else (RL_Batcher, {})
            made = cls(
                T, create_agent, agent_args, create_env, env_args | {"n_envs": self.n_envs}, self.n_processes, SEED,
                **settings, **more,
            )  # fmt: skip
        return self.stack.enter_context(made)

    # Calls

    def reset(self):
        infos = {}
        if self.has_agent_info:
            infos["agent_info"] = self.numbers("offset")
        if self.has_env_info:
            infos["env_info"] = self.numbers("option", per=2)  # equal for the agents of one environment
        self.batcher.reset(**infos)
        self.ledger.note_reset(self.n)

    def numbers(self, name, per=1):
        return DictTensor({name: 100 * self.turns + torch.arange(self.n) // per})

    def begin(self):
        """Orders the next rollout."""
        self.turns += 1
        self.is_under_way = True
        if self.has_agent_info and self.turns % 2:
            self.batcher.execute(self.numbers("offset"))
        elif self.case["take"] != "rollouts":
            self.batcher.execute()

    def turn(self):
        """One rollout; returns it, or None where it was only waited for."""
        if not self.is_under_way:
            self.begin()
        self.is_under_way = False
        if self.case["take"] == "rollouts":
            batch, n_running = next(self.iterate()), None
        else:
            batch, n_running = self.take()
        if batch is not None:
            self.ledger.add(batch, self.case)
            self.check_padding(batch)
            self.ledger.check_episodes(self.batcher.episodes())
            if self.twin is not None and (self.case["interlude"] != "late feed" or self.turns > AT_INTERLUDE):
                self.twin.add_trajectories(batch)
        self.check_memory()
        self.update()
        if n_running == 0:
            self.reset()
        return batch

    def iterate(self):
        if self.iteration is None:
            self.iteration = self.batcher.rollouts()
        # It begins anew by itself where all have ended.
        if not self.batcher._engine._transport.n_running():
            self.ledger.note_reset(self.n)
        return self.iteration

    def take(self):
        how, early = self.case["take"], {}
        if self.case["early"] == "preempt":
            early = {"preempt": 0.5}
        elif self.case["early"] == "min_workers":
            early = {"min_nodes" if self.case["over"] == "Ray" and how != "wait" else "min_workers": 1}
        if how == "lease":
            with self.batcher.lease() as (trajectories, n_running):
                found = trajectories.clone()
            return found, n_running
        if how == "wait":
            n_steps, n_running = self.batcher.wait(**early)
            self.ledger.n_steps += n_steps
            return None, n_running
        if how == "poll":
            while True:
                found, n_running = self.batcher.get(blocking=False, **early)
                if found is not None:
                    return found, n_running
        if how == "out" and self.kept is not None:
            found, n_running = self.batcher.get(out=self.kept, **early)
            rewards = [each.trajectories["_observation/reward"] for each in (found, self.kept)]
            same = rewards[0].data_ptr() == rewards[1].data_ptr()
            assert same == (self.case["device"] == "cpu") or not rewards[0].numel(), "get(out=) copied to other memory"
            return found.clone(), n_running
        found, n_running = self.batcher.get(**early)
        if how == "out":
            self.kept = widen(found, self.n)
        return found, n_running

    def update(self):
        self.version += 1
        if self.case["agent"] == "module":
            torch.manual_seed(self.version)
            made = create_agent(**{name: self.case[name] for name in ("agent", "acts", "shows")})
            self.batcher.update(made.module)
        else:
            self.batcher.update({"version": torch.tensor(self.batcher.policy_version + 1)})

    # Checks

    def check_padding(self, batch):
        if self.case["take"] == "lease":
            return
        is_padding = ~batch.trajectories.mask().cpu().numpy().astype(bool)
        for key, tensor in batch.trajectories.items():
            values = array(tensor)[is_padding]
            if self.case["debug"] == "no":
                assert not values.any(), f"the padding of {key} is not zero"
            elif values.dtype.kind == "f":
                assert np.isnan(values).all(), f"the padding of {key} is not NaN"

    def check_memory(self):
        if self.memory is None or self.case["take"] == "wait":
            return
        # Rows that rollouts under way may overwrite are not seen.
        assert_fed(self.memory, self.twin, (self.ahead + 1) * T * (self.n if is_one_lane(self.memory) else 1))

    def check_end(self):
        stats = self.batcher.stats()
        lost = stats["lost_rollouts"]
        for env, generations in self.ledger.generations.items():
            restarts = stats["workers"][env // self.n_envs]["restarts"]
            limit = 1 + restarts + self.case["state"].startswith(("plain", "best"))
            limit += N_TURNS * (env in self.ledger.anew)
            assert len(generations) <= limit, f"environment {env} has had {generations}, of {restarts} restarts"
        # Of a state copies are stepped, which may end a worker between two rollouts.
        is_sure = not self.ahead and self.case["early"] == "none" and self.case["state"] == "none"
        assert not is_sure or bool(lost) == bool(stats["restarts"]), f"{lost} lost, {stats['restarts']} restarts"
        is_told = self.case["failure"].startswith("restart") and self.case["state"] == self.case["early"] == "none"
        # Where all have to end before a reset, it may come before any has taken the steps after which it fails.
        is_short = self.case["env"] in WAITS and self.case["interlude"] in ("reset", "late feed")
        assert stats["restarts"] or is_short or not is_told, "no worker was replaced"
        assert int(self.batcher.metrics()["rollout/steps"]) == self.ledger.n_steps

    # What comes between

    def interlude(self):
        kind = self.case["interlude"]
        if kind == "reset":
            self.reset()
        elif kind == "evaluate":
            found = self.batcher.evaluate(self.n + 1, seed=3)
            assert found.n_elems() == self.n + 1
            for env, length, total in zip(*(found[k].tolist() for k in ("env_index", "length", "return")), strict=True):
                assert total == length * (length + 1) / 2 + length * env / 4, "an episode of the evaluation is wrong"
        elif kind == "late feed":
            self.reset()  # drops what is under way, which no memory would get
            self.batcher.feed(self.memory)

    def go_on_from_state(self):
        """Takes a state, goes on, comes back to it in the same batcher or in a new one, and goes on again."""
        kind, _, where = self.case["state"].partition(" ")
        if self.case["moment"] == "under way":
            self.begin()
        if kind == "checkpoint":
            return self.go_on_from_checkpoint()
        exact = {"exact": True, "best": "best", "plain": False}[kind]
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            state = self.batcher.state_dict(exact=exact)
        begins_anew = exact == "best" and self.case["env"] in SHARED
        assert begins_anew == any("begin new episodes" in str(each.message) for each in warned), warned
        rows = None if self.memory is None else save(self.memory)
        marks = self.mark()
        first = [self.turn() for _ in range(N_AGAIN)]
        state = through_file(state)
        if where == "new":
            self.batcher.close()
            self.batcher, self.iteration = self.make_batcher(), None
        self.is_under_way = marks[-1]
        self.load(state, rows, exact)
        self.go_back(marks, exact)
        if begins_anew:
            self.ledger.lost.update(range(self.n))
        second = [self.turn() for _ in range(N_AGAIN)]
        self.compare(first, second, exact and not begins_anew)
        return None

    def go_on_from_checkpoint(self):
        folder = self.stack.enter_context(tempfile.TemporaryDirectory())
        memories = {} if self.memory is None else {"memory": self.memory}
        with contextlib.closing(Checkpoint(folder, batcher=self.batcher, **memories)) as checkpoint:
            checkpoint.save(1)
        marks = self.mark()
        first = [self.turn() for _ in range(N_AGAIN)]
        self.batcher.close()
        self.batcher, self.iteration = self.make_batcher(), None
        if self.memory is not None:
            self.memory = make_memory(self.case["memory"], self.n, seed=1)
            self.batcher.feed(self.memory)
            memories = {"memory": self.memory}
        with contextlib.closing(Checkpoint(folder, batcher=self.batcher, **memories)) as checkpoint:
            assert checkpoint.restore() == 1
        self.go_back(marks, True)
        second = [self.turn() for _ in range(N_AGAIN)]
        self.compare(first, second, True)

    def mark(self):
        twin = None if self.twin is None else save(self.twin)
        return self.ledger.copy(), twin, self.turns, self.version, self.is_under_way

    def go_back(self, marks, exact):
        self.ledger, twin, self.turns, self.version, self.is_under_way = marks[0].copy(), *marks[1:]
        if twin is not None:
            self.twin = restore(self.case["memory"], self.n, twin)
        if not exact:
            self.ledger.sums.clear()
            self.update()  # agents stay as they are
            self.reset()
            self.is_under_way = False

    def load(self, state, rows, exact):
        if self.memory is None:
            self.batcher.load_state_dict(state)
            return
        self.batcher.feed(None)
        self.memory = restore(self.case["memory"], self.n, rows)
        if exact and not self.is_under_way:
            self.batcher.load_state_dict(state)
            self.batcher.feed(self.memory)
        else:
            self.batcher.feed(self.memory)
            self.batcher.load_state_dict(state)

    def compare(self, first, second, exact):
        is_timed = self.case["early"] != "none" and self.n_workers > 1
        if exact and not is_timed and self.case["take"] != "wait":
            for one, other in zip(first, second, strict=True):
                assert one.lengths.tolist() == other.lengths.tolist(), f"{one.lengths} != {other.lengths}"
                assert one.info == other.info, f"after the exact state: {other.info}, expected {one.info}"
                wanted, found, mask = one.trajectories, other.trajectories, array(one.trajectories.mask()).astype(bool)
                assert wanted.keys() == found.keys()
                for key, tensor in wanted.items():
                    assert_equal(array(found[key])[mask], array(tensor)[mask], f"after the exact state: {key}")


def save(memory):
    file = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        if hasattr(memory, "export"):
            path = memory.save(folder, format="npz")
        else:
            path = f"{folder}/memory.npz"
            memory.save(path)
        with open(path, "rb") as made:
            file.write(made.read())
    return file.getvalue()


def restore(kind, n, data):
    memory = make_memory(kind, n, seed=1)
    with tempfile.NamedTemporaryFile(suffix=".npz") as file:
        file.write(data)
        file.flush()
        memory.load(file.name)
    return memory


def through_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def widen(batch, n):
    """Memory of n rows and T timesteps for `get(out=)`."""

    def wide(tensor, *sizes):
        return torch.full((*sizes, *tensor.shape[len(sizes) :]), 0, dtype=tensor.dtype)

    info = DictTensor({key: wide(tensor, n) for key, tensor in batch.info.items()})
    steps = {key: wide(tensor, n, T) for key, tensor in batch.trajectories.items()}
    return Trajectories(info, TemporalDictTensor(steps, torch.zeros(n, dtype=torch.int64)))


def run(case):
    before = worker_pids()
    fails = case["failure"] == "raise" or (case["failure"].startswith("restart") and case["processes"] == "0")
    with ExitStack() as stack:
        course = Course(case, stack)
        try:
            if case["take"] != "rollouts":
                course.reset()
            for number in range(N_TURNS):
                if number == AT_INTERLUDE:
                    course.interlude()
                if number == AT_STATE and case["state"] != "none":
                    course.go_on_from_state()
                course.turn()
            course.check_end()
        except (RuntimeError, ValueError) as error:  # jax raises the other for what its callbacks raise
            if not fails or "told to fail" not in str(error):
                raise
        else:
            assert not fails or case["env"] in WAITS, "no failure was raised"
    del course
    gc.collect()
    if case["over"] == "Ray":  # which ends actors after it has said so, and starts workers of its own in advance
        wait_until(lambda: all(map(waits_for_ray, worker_pids() - before)))
    else:
        left = worker_pids() - before
        assert not left, f"processes are left: {left}"


def waits_for_ray(pid):
    """Whether a process is a worker that Ray has started in advance; whether it has ended, too."""
    try:
        command = command_of(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True
    return command.startswith("ray::IDLE") or "ray/_private/workers" in command


@contextlib.contextmanager
def around_ray():
    with ray_cluster(2), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="ray")
        yield


TABLE = Table(SETTINGS, RULES, run)
SPAWNED_TABLE = Table(SPAWNED, RULES, run, strength=1)
RAY_TABLE = Table(RAY, RULES, run, strength=1, around=around_ray)
