"""A storage of replay buffers that the tests of several files share."""

from __future__ import annotations

import torch

from rlstructs.replay import TensorStorage
from rlstructs.replay.rows.on_device import TensorColumns


class DeviceStorage(TensorStorage):
    """Rows in tensors, as they are on a GPU, but on the CPU."""

    def columns(self):
        return TensorColumns(1, self.max_size, "lane", torch.device("cpu"))
