"""torchrl: an iterator of TensorDicts over an `RL_Batcher`, and its environment over a `SharedVectorEnv`.

    from rlstructs.integrations.torchrl import TensorDictCollector

    for batch in TensorDictCollector(batcher, total_frames=100_000):
        loss = loss_module(advantage_module(batch))

`TensorDictCollector` needs only tensordict, `SharedVectorWrapper` torchrl.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlstructs.workers.public_names import export_lazily

if TYPE_CHECKING:
    from rlstructs.integrations.torchrl.collector import TensorDictCollector
    from rlstructs.integrations.torchrl.env import SharedVectorWrapper

_EXPORTS = {
    "SharedVectorWrapper": "env",
    "TensorDictCollector": "collector",
}

__all__ = ["SharedVectorWrapper", "TensorDictCollector"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = export_lazily(__name__, _EXPORTS)
