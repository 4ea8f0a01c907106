"""torchrl: an iterator of TensorDicts over an `RL_Batcher`, and its environment over a `SharedVectorEnv`.

    from rlstructs.integrations.torchrl import TensorDictCollector

    for batch in TensorDictCollector(batcher, total_frames=100_000):
        loss = loss_module(advantage_module(batch))

`TensorDictCollector` needs only tensordict, `SharedVectorWrapper` torchrl.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlstructs.integrations.torchrl.collector import TensorDictCollector
    from rlstructs.integrations.torchrl.env import SharedVectorWrapper

_EXPORTS = {
    "SharedVectorWrapper": "env",
    "TensorDictCollector": "collector",
}

__all__ = ["SharedVectorWrapper", "TensorDictCollector"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
