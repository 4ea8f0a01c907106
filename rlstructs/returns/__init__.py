"""Returns, targets and advantages over `(B, T)`: GAE, discounted, lambda and n-step returns, V-trace.

Every function takes transitions as the batcher records them, rows of T steps with any number of episodes, and returns
a number for each transition. The arguments are

- `rewards`: floating point (B, T), the reward of step t;
- `values`: floating point (B, T), V of the observation before step t;
- `next_values`: floating point (B, T), V of the observation after step t, at the end of an episode the final one;
- `terminated`, `truncated`: bool (B, T), or numbers that are 0 for False: how step t ended its episode, if it did;
- `gamma`, `lambda_`: in [0, 1], a number or a tensor () or (B, T); the weight at t applies to what follows step t;
- `mask`: which steps count, in the form of `terminated`; None for all;
- `cu_seqlens`: int32 (S + 1,), where segments begin in packed steps; then all that is (B, T) here is (N,), results too.

`transitions` takes rewards, ends and mask out of a batch or a pack (`Trajectories.packed`); you add values and weights.

In the equations V(s_{t+1}) is `next_values`, but 0 after a step that terminated. V(s_{t+1}) also replaces the value
that would come from step t + 1 if the row has no such step of the episode: at the end of the episode or of the row, and
before a masked step. Masked steps are ignored, even if they hold NaN; their results are 0.

Results are contiguous, on the device of `rewards`, and of the wider dtype of `rewards` and `next_values`. No gradient
flows through them: it would move targets towards values.

Raises:
    TypeError: an argument is no tensor, or no number. All messages name the argument.
    SpecError: an argument has a wrong shape, device or kind of dtype, or is a number out of range. Values in tensors
        are not checked, because that would wait for a GPU.

Every function is a recurrence x_t = a_t + b_t x_{t+1} with its own a and b; n-step returns take n steps of it. For
float32 and float64, from 2048 steps in all, a kernel of Warp computes it on a CPU or CUDA device, else operations of
torch, which round differently. The first such call loads the kernels; on a new machine it compiles them, which takes
seconds, and Warp keeps them on disk. Where it cannot, as without a folder to write to, a warning says so, and torch
computes all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlstructs.workers.public_names import export_lazily

if TYPE_CHECKING:
    from rlstructs.returns.functions import (
        Transitions,
        discounted_returns,
        gae,
        lambda_returns,
        n_step_returns,
        transitions,
        vtrace,
    )

_EXPORTS = {
    "Transitions": "functions",
    "discounted_returns": "functions",
    "gae": "functions",
    "lambda_returns": "functions",
    "n_step_returns": "functions",
    "transitions": "functions",
    "vtrace": "functions",
}

__all__ = ["Transitions", "discounted_returns", "gae", "lambda_returns", "n_step_returns", "transitions", "vtrace"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = export_lazily(__name__, _EXPORTS)
