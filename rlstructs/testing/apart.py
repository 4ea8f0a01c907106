"""Whether each of several environments has a stream of its own."""

from __future__ import annotations

from typing import Protocol

from rlstructs.errors import SpecError
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.tree import equal
from rlstructs.testing.sources import BY_RESET, EnvSource

# With how many seeds environments have to do the same before it is no coincidence, and in how many steps of each.
N_SEEDS, N_STEPS = 10, 8


class Alike(Protocol):
    """What runs several environments with the same actions."""

    def alike(self, source: EnvSource, seed: int, n_steps: int) -> list[DictTensor] | None:
        """What all of them show until one ends; None if they differ."""
        ...


def check_apart(source: EnvSource, run: Alike, seed: int) -> None:
    """Raises SpecError if environments that were given one seed for all do the same where another seed changes it."""
    if not source.is_new or source.seeded_by == BY_RESET:  # whose seeds are given one by one
        return
    found = []
    for k in range(N_SEEDS):
        trace = run.alike(source, seed + k, N_STEPS)
        if trace is None:
            return
        found.append(trace)
    if any(_differ(found[0], trace) for trace in found[1:]):
        raise SpecError(
            f"{source.name}: all its environments do the same when they get the same actions, with each of {N_SEEDS} "
            "seeds, and something else with each: give every environment a seed of its own, such as seed + k"
        )


def _differ(one: list[DictTensor], other: list[DictTensor]) -> bool:
    if len(one) != len(other):
        return True
    pairs = zip(one, other, strict=True)
    return any(not equal(tensor, theirs[key]) for mine, theirs in pairs for key, tensor in mine.items())
