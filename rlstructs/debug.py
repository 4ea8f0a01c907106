"""Debug mode: memory that was never written, or that nobody may read any more, holds poison.

`RLSTRUCTS_DEBUG=1` in the environment turns it on everywhere, `RL_Batcher(debug=True)` for one batcher.
Poison is NaN in floats, the least value of signed integers and the greatest of unsigned ones; bools have none.
A sum, a mean or an index that uses padding of a trajectory, or a row that a store does not hold, then shows at once.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

VARIABLE = "RLSTRUCTS_DEBUG"


def is_on(asked: bool | None = None) -> bool:
    """Whether debug mode is on: as the argument says, or the environment variable if it is None."""
    return os.environ.get(VARIABLE, "") not in ("", "0") if asked is None else asked


def poison(dtype: np.dtype) -> Any:
    """The value of this dtype that marks memory nobody may read."""
    if dtype.kind in "fc":
        return np.nan
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return limits.min if dtype.kind == "i" else limits.max
    return False
