"""The states of the global random generators: torch's, numpy's and Python's."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

logger = logging.getLogger("rlstructs")


def collect_states() -> dict[str, Any]:
    """The states, for `plan_states`; those of GPUs only if the program uses them."""
    uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if uses_cuda else [],
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
    }


def plan_states(states: Mapping[str, Any]) -> Callable[[], None]:
    """Checks states, and returns a function that restores them.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: they are not what `collect_states` gave.
    """
    torch.Generator().set_state(states["torch"])
    random.Random().setstate(states["python"])
    np.random.RandomState().set_state(states["numpy"])
    cuda = list(states["cuda"])

    def restore() -> None:
        torch.set_rng_state(states["torch"])
        np.random.set_state(states["numpy"])
        random.setstate(states["python"])
        n_here = torch.cuda.device_count() if cuda else 0
        if n_here < len(cuda):
            logger.warning("the checkpoint has random states of %d GPUs, there are %d", len(cuda), n_here)
        for index, state in enumerate(cuda[:n_here]):
            torch.cuda.set_rng_state(state, index)

    return restore
