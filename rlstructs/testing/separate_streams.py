"""Checks that environments do not share a random stream."""

from __future__ import annotations

from typing import Protocol

from rlstructs.errors import SpecError
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.tree import equal
from rlstructs.testing.env_source import BY_RESET, EnvSource

# Environments that do the same for `N_STEPS` steps, with each of `N_SEEDS` seeds, are taken to share a stream.
N_SEEDS, N_STEPS = 10, 8


class ParallelRun(Protocol):
    """Runs several environments with the same actions."""

    def run_in_parallel(self, source: EnvSource, seed: int, n_steps: int) -> list[DictTensor] | None:
        """Returns the observations until an episode ends; None if environments differ, or if there is only one."""
        ...


def check_separate_streams(source: EnvSource, run: ParallelRun, seed: int) -> None:
    """Raises SpecError if all environments do the same with every seed, although the seed changes what they do."""
    if not source.is_new or source.seeded_by == BY_RESET:  # each environment gets its own seed then
        return
    traces = []
    for k in range(N_SEEDS):
        trace = run.run_in_parallel(source, seed + k, N_STEPS)
        if trace is None:
            return
        traces.append(trace)
    if any(_differ(traces[0], trace) for trace in traces[1:]):
        raise SpecError(
            f"{source.name}: all its environments do the same when they get the same actions, with each of {N_SEEDS} "
            "seeds, although the seed changes what they do: give every environment a seed of its own, such as seed + k"
        )


def _differ(one: list[DictTensor], other: list[DictTensor]) -> bool:
    if len(one) != len(other):
        return True
    pairs = zip(one, other, strict=True)
    return any(not equal(tensor, theirs[key]) for mine, theirs in pairs for key, tensor in mine.items())
