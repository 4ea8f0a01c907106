"""`mask_logits`: forbids actions, as gymnasium's `Discrete.sample(mask)` does."""

from __future__ import annotations

import torch

from rlstructs.errors import SpecError

IGNORED_HINT = (
    "; give ignored= the rows whose actions nobody uses: padding, and those that only reset, where "
    "observation['done'] under autoreset NEXT_STEP (under SAME_STEP there are none)"
)


def mask_logits(logits: torch.Tensor, mask: torch.Tensor, ignored: torch.Tensor | None = None) -> torch.Tensor:
    """Gives forbidden actions the lowest logit, so that none of them is drawn.

    Allowed actions whose logit is that low themselves, or minus infinity, are raised above it.

    Args:
        logits: floats (..., n), one for each action of a Discrete space.
        mask: bool, or the numbers 0 and 1, (..., n), on the same device: 1 allows an action.
        ignored: bool (...,), the rows whose action nobody uses, such as padding: their mask may allow nothing, and all
            of their actions are then equally likely. None for no such row.

    Returns:
        (..., n) of the dtype of `logits`, with gradients for the actions that are allowed.

    Raises:
        SpecError: a shape differs, a number of the mask is neither 0 nor 1, or a row allows nothing; the message names
            the row.

    Example:
        >>> logits = mask_logits(torch.zeros(2, 3), torch.tensor([[1, 0, 1], [0, 0, 1]]))
        >>> torch.distributions.Categorical(logits=logits).probs
        tensor([[0.5000, 0.0000, 0.5000],
                [0.0000, 0.0000, 1.0000]])
    """
    if mask.shape != logits.shape:
        raise SpecError(f"mask_logits: the mask has shape {tuple(mask.shape)}, expected {tuple(logits.shape)}")
    hint = IGNORED_HINT if ignored is None else ""
    forbidden, lowest = ~read_mask("mask_logits: the mask", mask, ignored, hint), torch.finfo(logits.dtype).min
    smallest = logits.detach().amin().item() if logits.numel() else 0.0
    if smallest < lowest / 4 or smallest != smallest:  # NaN, which rows that nobody uses may hold, hides others
        logits = _raise_lowest(logits, forbidden, lowest)
    return logits.masked_fill(forbidden, lowest)


def _raise_lowest(logits: torch.Tensor, forbidden: torch.Tensor, lowest: float) -> torch.Tensor:
    """Raises very low logits, so that an allowed action is drawn.

    Only in rows where the allowed actions are all near the lowest value; keeps their order.
    """
    highest = logits.detach().masked_fill(forbidden, -torch.inf).amax(-1, keepdim=True)
    is_low = (highest < lowest / 4) & (highest > -torch.inf)
    return (logits - highest.masked_fill(~is_low, 0)).clamp(min=lowest / 2)


def read_mask(what: str, mask: torch.Tensor, ignored: torch.Tensor | None, hint: str = "") -> torch.Tensor:
    """Returns which actions a mask allows, bool (..., n).

    Raises what `mask_logits` raises; `what` names the mask in the message.
    """
    allowed = mask if mask.dtype == torch.bool else mask == 1
    if allowed is not mask and not torch.equal(allowed, mask != 0):
        strange = mask[(mask != 0) & ~allowed][0].item()
        raise SpecError(f"{what} must hold 0 and 1, got {strange}")
    nothing = ~allowed.any(-1)
    if ignored is not None:
        nothing &= ~ignored
    if nothing.any():
        row = nothing.nonzero()[0].tolist()
        raise SpecError(f"{what} allows no action in row {row[0] if len(row) == 1 else tuple(row)}{hint}")
    return allowed
