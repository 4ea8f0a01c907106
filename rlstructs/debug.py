"""Debug mode: writes poison to memory that must not be read.

`RLSTRUCTS_DEBUG=1` in the environment turns it on everywhere, `RL_Batcher(debug=True)` for one batcher.
Such memory was never written, or may no longer be read: padding of trajectories, slots that were handed out, rows that
a store does not hold. Poison is NaN in floats, the least value of signed integers and the greatest of unsigned ones;
bools have none. A sum, a mean or an index that uses it shows the mistake at once.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

VARIABLE = "RLSTRUCTS_DEBUG"


def is_on(asked: bool | None = None) -> bool:
    """Whether debug mode is on: `asked`, or the environment variable if None.

    The variable must be set, and not "0".
    """
    return os.environ.get(VARIABLE, "") not in ("", "0") if asked is None else asked


def poison(dtype: np.dtype) -> Any:
    """Returns the value of this dtype that marks memory as unreadable.

    False for bools, which have none.
    """
    if dtype.kind in "fc":
        return np.nan
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return limits.min if dtype.kind == "i" else limits.max
    return False
