"""Derives the seeds of all random streams; seeds, reads, sets and saves global streams.

Streams are derived by `numpy.random.SeedSequence`, so that no two of them overlap. They are keyed by the global index
of the environment, so that they do not depend on the number of processes. torch is imported where it is used, because
workers of a `SharedVectorEnv` may never load it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import multiprocessing
import operator
import os
import random
import secrets
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import context
from typing import Any

import numpy as np

from rlstructs.errors import SpecError
from rlstructs.workers.interrupts import defer_interrupt
from rlstructs.workers.settings import after_import

logger = logging.getLogger("rlstructs")

# The first element of a spawn key: the purpose of the stream. `WorkerStreams` has longer keys than other streams.
_ENVIRONMENT, _WORKER, _GLOBALS, _RESTART, _INT32, _EPISODE, _LIFE, _NEXT_STREAM, _AGENT = range(9)
_WORKER_STREAM = 4
_RANDOM, _NUMPY, _TORCH = range(3)
# Seeds below this fit into int32.
INT32_LIMIT = 2**31


class EnvSeed(int):
    """The seed of a worker's environments if the batcher was given one int.

    Its value as an int differs between workers. `for_environments` gives each of the worker's environments a seed that
    depends only on the global index of the environment.

    Attributes:
        restart_number: times the streams have started anew, because the worker was replaced or a state was loaded.
        life: how often the one environment for which they are made was restarted; 0 for all of a worker.
    """

    root: int
    worker_index: int
    restart_number: int
    life: int

    def __new__(cls, root: int, worker_index: int, restart_number: int = 0, life: int = 0) -> EnvSeed:
        made = super().__new__(cls, _derive_seed(root, *_restart_key(restart_number), _WORKER, worker_index))
        made.root, made.worker_index, made.restart_number, made.life = root, worker_index, restart_number, life
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return EnvSeed, (self.root, self.worker_index, self.restart_number, self.life)

    def for_environments(self, n_envs: int) -> list[int]:
        """A seed for each of the worker's environments, below 2**32."""
        first = self.worker_index * n_envs
        again = _restart_key(self.restart_number)
        return [_derive_seed(self.root, *again, _ENVIRONMENT, first + k) for k in range(n_envs)]


def draw_seed() -> int:
    """Draws a seed below 2**63 from the system's entropy, not from the global streams."""
    return secrets.randbits(63)


def seeds_argument(seeds: Sequence[int]) -> int | list[int]:
    """Returns the argument `seeds` that gives a batcher these seeds.

    There is one seed for each worker; the argument is one int, or the list.
    """
    roots = {seed.root if isinstance(seed, EnvSeed) else None for seed in seeds}
    root = roots.pop() if len(roots) == 1 else None
    return [int(seed) for seed in seeds] if root is None else root


def next_seed(seed: int, restart_number: int) -> int:
    """Returns the seed that replaces a worker's `seed` after a restart.

    Its streams start anew for the `restart_number`-th time.
    """
    if isinstance(seed, EnvSeed):
        return EnvSeed(seed.root, seed.worker_index, restart_number)
    return _derive_seed(seed, *_restart_key(restart_number))


def life_seed(seed: int, index: int, number: int) -> int:
    """Returns the seed for making one of a worker's environments anew.

    An `EnvSeed` stays one, of the same worker.

    Args:
        seed: of the worker.
        index: of the environment, among all.
        number: how often it was made anew, this time included.
    """
    if isinstance(seed, EnvSeed):
        return EnvSeed(_derive_seed(seed.root, _LIFE, index, number), seed.worker_index, seed.restart_number, number)
    return _derive_seed(seed, _LIFE, index, number)


def _restart_key(restart_number: int) -> tuple[int, ...]:
    return (_RESTART, restart_number) if restart_number else ()


def check_seeds(name: str, seeds: Any, n: int, owners: str, or_int: bool = True) -> list[int]:
    """Returns one seed for each of `n` environments or processes, as ints.

    An `EnvSeed` stays one.

    Args:
        name: the argument's name.
        seeds: the argument.
        n: how many are needed.
        owners: "environments" or "processes".
        or_int: whether the argument might have been one int; the message then says so.

    Raises:
        TypeError: `seeds` is not a sequence of ints.
        SpecError: the sequence has another length, or a seed is below 0.
    """
    try:
        found = [seed if isinstance(seed, EnvSeed) else operator.index(seed) for seed in seeds]
    except TypeError as error:
        wanted = f"{'an int, or ' if or_int else ''}one for each of {n} {owners}"
        raise TypeError(f"{name}: needs {wanted}, got {seeds!r}") from error
    if len(found) != n or min(found, default=0) < 0:
        raise SpecError(f"{name}: needs {n} seeds of at least 0, one for each of the {owners}, got {found}")
    return found


def environment_seeds(seed: int | Sequence[int], n_envs: int) -> list[int]:
    """A seed for each environment of one vectorised environment.

    Args:
        seed: an `EnvSeed`; an int s, for s + k in environment k, as in rlstructures; or one int for each.
        n_envs: number of environments.

    Raises:
        TypeError: a seed is not an int.
        SpecError: the sequence has another length, or a seed is below 0.
    """
    if isinstance(seed, EnvSeed):
        return seed.for_environments(n_envs)
    if isinstance(seed, (int, np.integer)):
        if seed < 0:
            raise SpecError(f"seed: must not be negative, got {seed}")
        return [int(seed) + k for k in range(n_envs)]
    return check_seeds("seed", seed, n_envs, "environments")


def episode_seed(seed: int, number: int) -> int:
    """Returns the seed of an environment's episode, below 2**32.

    `seed` is the environment's, `number` the episode's.
    """
    return _derive_seed(seed, _EPISODE, number)


def int32_seed(seed: int) -> int:
    """Returns a seed below 2**31.

    It is the given one if that is small enough, otherwise derived from it.

    Seeds of a worker's environments may be larger, and so may your own. If their upper bits were dropped, some of them
    would give the same stream.

    Example:
        >>> int32_seed(7), int32_seed(2**31), int32_seed(2**32)
        (7, 1728974362, 1910394651)
    """
    seed = operator.index(seed)
    return seed if 0 <= seed < INT32_LIMIT else _derive_seed(abs(seed), _INT32, int(seed < 0)) % INT32_LIMIT


def next_stream(seed: int, number: int) -> int:
    """Returns the seed of an environment's stream after its `number`-th restart.

    `seed` is the one of the stream before.
    """
    return _derive_seed(abs(int(seed)), _NEXT_STREAM, number)


def agent_seed(seed: int, number: int) -> int:
    """Returns the seed of the `number`-th stream of actions in an environment, below 2**32.

    `seed` is the environment's.
    """
    return _derive_seed(seed, _AGENT, number)


def seed_global_streams(seed: int, agent_seed: int | None) -> None:
    """Seeds the global streams of `random`, numpy and torch.

    Agents and environments draw from these.
    """
    import torch

    states = np.random.SeedSequence(
        [int(seed), 0 if agent_seed is None else 1 + int(agent_seed)], spawn_key=(_GLOBALS,)
    ).generate_state(3)
    random.seed(int(states[0]))
    np.random.seed(int(states[1]))
    torch.manual_seed(int(states[2]))


def seed_worker_streams(seeds: Sequence[int], agent_seeds: Sequence[int] | None, index: int) -> None:
    """Seeds the global streams of a worker before it has a job.

    The job of a replacement seeds them again.

    Args:
        seeds, agent_seeds: one for each worker.
        index: index of the worker.
    """
    seed_global_streams(seeds[index], None if agent_seeds is None else agent_seeds[index])


class PrivateStreams:
    """Gives a `with` block private global random streams, and one torch thread.

    Work that runs in this process instead of a worker does not change the caller's streams then.
    """

    def __init__(self) -> None:
        self._states: Any = read_streams()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        import torch

        has_begun = False
        try:
            with defer_interrupt():
                before, n_threads = read_streams(), torch.get_num_threads()
                restore_streams(self._states)
                torch.set_num_threads(1)
                has_begun = True
            yield
        finally:
            if has_begun:
                with defer_interrupt():
                    self._states = read_streams()
                    restore_streams(before)
                    torch.set_num_threads(n_threads)


def _derive_seed(root: int, *key: int) -> int:
    return int(np.random.SeedSequence(root, spawn_key=key).generate_state(1)[0])


def read_streams() -> tuple[Any, ...]:
    """Returns the states of the global streams of `random`, numpy and torch.

    Also those of GPUs in use.
    """
    import torch

    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    return random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state(), cuda


def restore_streams(states: tuple[Any, ...]) -> None:
    """Sets the global streams to the states that `read_streams` returned."""
    import torch

    random.setstate(states[0])
    np.random.set_state(states[1])
    seed = torch.initial_seed()
    torch.set_rng_state(states[2])
    if states[3] is not None:
        torch.cuda.set_rng_state_all(states[3])
    elif torch.initial_seed() != seed and _has_gpus():  # torch was seeded meanwhile, which seeds GPUs too
        torch.cuda.manual_seed_all(torch.initial_seed())


@functools.cache
def _has_gpus() -> bool:
    """Whether this process may use GPUs.

    To seed GPUs before their first use, torch formats a traceback.
    """
    import torch

    return torch.cuda.device_count() > 0


@dataclass(frozen=True)
class WorkerStreams:
    """Seeds the global streams of a worker.

    torch's with 64 bits, the others with 128.

    Attributes:
        roots: seeds that the streams of `random`, numpy and torch are derived from.
    """

    roots: tuple[int, int, int]

    @classmethod
    def of_seed(cls, seed: int) -> WorkerStreams:
        """Derives the streams from a seed."""
        return cls((seed, seed, seed))

    @classmethod
    def of_this_process(cls) -> WorkerStreams:
        """Derives the streams from the present state of this process's streams, without changing it."""
        of_numpy = _hash(np.random.get_state(legacy=False))
        torch = sys.modules.get("torch")
        # Nobody has seeded torch before it is loaded: numpy's state makes the program reproducible.
        of_torch = of_numpy if torch is None else _hash(torch.get_rng_state().numpy())
        return cls((_hash(random.getstate()), of_numpy, of_torch))

    def __call__(self, index: int) -> None:
        """Seeds the streams of this process, which is the worker with this index."""
        random.seed(int.from_bytes(self._words(_RANDOM, index).tobytes(), "little"))
        np.random.seed(self._words(_NUMPY, index))
        low, high = self._words(_TORCH, index)[:2].tolist()
        after_import("torch", partial(_seed_torch, low | high << 32))

    def _words(self, stream: int, index: int) -> np.ndarray:
        """Derives uint32 (4,) for one stream of one worker."""
        return np.random.SeedSequence(self.roots[stream], spawn_key=(_WORKER_STREAM, stream, index)).generate_state(4)


def _seed_torch(seed: int) -> None:
    sys.modules["torch"].manual_seed(seed)


def _hash(state: Any) -> int:
    """Hashes the whole state of a generator to 128 bits."""
    digest = hashlib.sha256()
    for part in _split_bytes(state):
        digest.update(part)
    return int.from_bytes(digest.digest()[:16], "little")


def _split_bytes(state: Any) -> Sequence[bytes]:
    if isinstance(state, dict):
        return [part for key in sorted(state) for part in (repr(key).encode(), *_split_bytes(state[key]))]
    return [state.tobytes() if isinstance(state, np.ndarray) else repr(state).encode()]


def collect_states() -> dict[str, Any]:
    """Returns the states of the global streams by name, for `plan_states`.

    Those of GPUs are included only if the program uses them.
    """
    python, of_numpy, of_torch, cuda = read_streams()
    return {"torch": of_torch, "cuda": cuda or [], "numpy": of_numpy, "python": python}


def plan_states(states: Mapping[str, Any]) -> Callable[[], None]:
    """Checks states, and returns a function that restores them.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: they are not states that `collect_states` returned.
    """
    import torch

    torch.Generator().set_state(states["torch"])
    random.Random().setstate(states["python"])
    np.random.RandomState().set_state(states["numpy"])
    cuda = list(states["cuda"])

    def restore() -> None:
        n_here = torch.cuda.device_count() if cuda else 0
        if n_here < len(cuda):
            logger.warning("the checkpoint has random states of %d GPUs, there are %d", len(cuda), n_here)
        restore_streams((states["python"], states["numpy"], states["torch"], cuda[:n_here]))

    return restore


class Stream:
    """The generator that a memory draws from, another one in each process.

    numpy's generators have a lock that a fork copies as it is: where another thread was drawing, a forked child would
    wait for it for ever. And copies of a generator in several processes draw the same numbers. So a child that is
    forked, and a copy that is sent to a child, get a new generator: its seed follows from the state that the parent's
    had when it was created or loaded, and from the number of the copy. The parent's own stream goes on as if there were
    no copies.

    A copy or pickle that stays in its process, or that another program loads, continues the stream.

    Args:
        generator: numpy's.

    Attributes:
        generator: the present one; `restart` sets another.
        n_saves: how often its state was saved.
    """

    n_saves = 0

    def __init__(self, generator: np.random.Generator) -> None:
        self.restart(generator)
        _streams.add(self)

    def restart(self, generator: np.random.Generator) -> None:
        """Begins another stream."""
        self.generator, self._root, self._n_copies = generator, _digest(generator), 0

    def derive(self, *numbers: int) -> np.random.Generator:
        """Makes the generator of a copy, whose numbers no other copy has."""
        kind: Any = type(self.generator.bit_generator)
        return np.random.Generator(kind(np.random.SeedSequence([self._root, *numbers])))

    def count_copy(self) -> int:
        """Counts one more copy for another process; returns its number."""
        self._n_copies += 1
        return self._n_copies

    def __getstate__(self) -> dict[str, Any]:
        if context.get_spawning_popen() is not None:  # for a process that is being started
            return {"generator": self.derive(self.count_copy()), "process": None}
        return {"generator": self.generator, "process": _token, "root": self._root, "n_copies": self._n_copies}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.restart(state["generator"])
        if state["process"] is not None:
            self._root, self._n_copies = state["root"], state["n_copies"]
            if state["process"] != _token and multiprocessing.parent_process() is not None:
                _arrived[self._root] += 1
                name = multiprocessing.current_process().name.encode()
                self.restart(self.derive(int.from_bytes(name, "big"), _arrived[self._root]))
        _streams.add(self)


def generator_state(generator: np.random.Generator) -> dict[str, Any]:
    """Returns the state of a generator in the types of JSON."""
    state: dict[str, Any] = _plain(generator.bit_generator.state)
    return state


def _plain(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {name: _plain(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, (np.ndarray, np.generic)) else state


def _digest(generator: np.random.Generator) -> int:
    state = repr(generator_state(generator)).encode()
    return int.from_bytes(hashlib.blake2b(state, digest_size=16).digest(), "big")


_streams: weakref.WeakSet[Stream] = weakref.WeakSet()
_token = os.urandom(16)  # of this process
_arrived: Counter[int] = Counter()  # root -> how many copies were received from other processes


def _count_fork() -> None:
    for stream in list(_streams):
        stream.count_copy()


def _renew_streams() -> None:
    global _token
    _token = os.urandom(16)
    for stream in list(_streams):
        stream.restart(stream.derive(stream.count_copy()))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_parent=_count_fork, after_in_child=_renew_streams)
