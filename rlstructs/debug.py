"""Debug mode: what was never written, or is no longer anybody's, is poisoned rather than zero.

`RLSTRUCTS_DEBUG=1` in the environment turns it on everywhere, `RL_Batcher(debug=True)` for one batcher.
Poison is NaN in floats, the least value of signed integers and the greatest of unsigned ones; a bool has none.
A sum, a mean or an index that takes in the padding of a trajectory, or a row that a store does not hold, then
shows at once.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

VARIABLE = "RLSTRUCTS_DEBUG"


def is_on(asked: bool | None = None) -> bool:
    """Whether debug mode is on: what was asked for, or, with None, what the environment says."""
    return os.environ.get(VARIABLE, "") not in ("", "0") if asked is None else asked


def poison(dtype: np.dtype) -> Any:
    """The value that marks what is not to be read, of this dtype."""
    if dtype.kind in "fc":
        return np.nan
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return limits.min if dtype.kind == "i" else limits.max
    return False
