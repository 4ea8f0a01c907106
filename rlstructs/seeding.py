"""Where every random stream comes from.

Streams are derived by `numpy.random.SeedSequence`, so that no two of them overlap, and are keyed by
the global index of the environment, so that they do not depend on how many processes share the work.
"""

from __future__ import annotations

import contextlib
import operator
import random
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from rlstructs.errors import SpecError

# First element of a spawn key: what a stream is for.
_ENVIRONMENT, _WORKER, _GLOBALS, _AGAIN, _INT32 = 0, 1, 2, 3, 4
# The seeds that fit into int32.
BELOW = 2**31


class EnvSeed(int):
    """The seed that a worker's environments get when the batcher was given one int.

    As an int it is a seed of its own, different for each worker; `for_environments` gives each of the
    worker's environments a seed that depends on the global index of the environment only.

    Attributes:
        generation: how often the streams were begun anew: with the successor of a worker, or a state that was loaded.
    """

    root: int
    worker_index: int
    generation: int

    def __new__(cls, root: int, worker_index: int, generation: int = 0) -> EnvSeed:
        made = super().__new__(cls, _derived(root, *_again(generation), _WORKER, worker_index))
        made.root, made.worker_index, made.generation = root, worker_index, generation
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return EnvSeed, (self.root, self.worker_index, self.generation)

    def for_environments(self, n_envs: int) -> list[int]:
        """A seed for each of the worker's environments, below 2**32."""
        first = self.worker_index * n_envs
        again = _again(self.generation)
        return [_derived(self.root, *again, _ENVIRONMENT, first + k) for k in range(n_envs)]


def draw_seed() -> int:
    """A seed that nobody gave: entropy of the system, below 2**63, whatever the global streams are seeded with."""
    return secrets.randbits(63)


def as_given(seeds: Sequence[int]) -> int | list[int]:
    """What a batcher is given to have these seeds, one for each worker: the int that they come from, or themselves."""
    roots = {seed.root if isinstance(seed, EnvSeed) else None for seed in seeds}
    root = roots.pop() if len(roots) == 1 else None
    return [int(seed) for seed in seeds] if root is None else root


def next_seed(seed: int, generation: int) -> int:
    """The seed that a worker which had `seed` has when its streams are begun anew for the `generation`-th time."""
    if isinstance(seed, EnvSeed):
        return EnvSeed(seed.root, seed.worker_index, generation)
    return _derived(seed, *_again(generation))


def _again(generation: int) -> tuple[int, ...]:
    return (_AGAIN, generation) if generation else ()


def environment_seeds(seed: int | Sequence[int], n_envs: int) -> list[int]:
    """A seed for each environment of one vectorised environment.

    Args:
        seed: an `EnvSeed`; an int s, for s + k in environment k, as in rlstructures; or one for each.
        n_envs: how many environments.

    Raises:
        TypeError: a seed is no int.
        SpecError: a sequence of another length, or a seed below 0.
    """
    if isinstance(seed, EnvSeed):
        return seed.for_environments(n_envs)
    if isinstance(seed, (int, np.integer)):
        seeds = [operator.index(seed) + k for k in range(n_envs)]
    else:
        try:
            seeds = [operator.index(value) for value in seed]
        except TypeError as error:
            raise TypeError(f"seed: needs an int, or a sequence of {n_envs}, got {seed!r}") from error
    if len(seeds) != n_envs or min(seeds, default=0) < 0:
        raise SpecError(f"seed: needs an int >= 0, or {n_envs} of them, got {seed!r}")
    return seeds


def int32_seed(seed: int) -> int:
    """A seed for what takes none from 2**31 on: itself if it is below, or else one that is derived from it.

    What a worker's environments get may be larger, and so may seeds of one's own. Cutting off their upper bits would
    give some of them the same streams.

    Example:
        >>> int32_seed(7), int32_seed(2**31), int32_seed(2**32)
        (7, 1728974362, 1910394651)
    """
    seed = operator.index(seed)
    return seed if 0 <= seed < BELOW else _derived(abs(seed), _INT32, int(seed < 0)) % BELOW


def seed_global_streams(seed: int, agent_seed: int | None) -> None:
    """Seeds the global streams of `random`, numpy and torch, from which agents and environments draw."""
    states = np.random.SeedSequence(
        [int(seed), 0 if agent_seed is None else 1 + int(agent_seed)], spawn_key=(_GLOBALS,)
    ).generate_state(3)
    random.seed(int(states[0]))
    np.random.seed(int(states[1]))
    torch.manual_seed(int(states[2]))


def seed_worker_streams(seeds: Sequence[int], agent_seeds: Sequence[int] | None, index: int) -> None:
    """Seeds the global streams of a worker, before it has a job; one that takes its place is seeded anew with its job.

    Args:
        seeds, agent_seeds: one for each worker.
        index: of the worker.
    """
    seed_global_streams(seeds[index], None if agent_seeds is None else agent_seeds[index])


class PrivateStreams:
    """Global random streams, and one torch thread, of one's own inside a `with` block.

    What runs in this process in place of a worker leaves the caller's streams as they were.
    """

    def __init__(self) -> None:
        self._states: Any = _states()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        before, n_threads = _states(), torch.get_num_threads()
        _restore(self._states)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            self._states = _states()
            _restore(before)
            torch.set_num_threads(n_threads)


def _derived(root: int, *key: int) -> int:
    return int(np.random.SeedSequence(root, spawn_key=key).generate_state(1)[0])


def _states() -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def _restore(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    seed = torch.initial_seed()
    torch.set_rng_state(states[2])
    if states[3] is not None:
        torch.cuda.set_rng_state_all(states[3])
    elif torch.initial_seed() != seed:  # meanwhile all was seeded, with what GPUs would have begun with
        torch.cuda.manual_seed_all(torch.initial_seed())
