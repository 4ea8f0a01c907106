"""`PartsLease`: a rollout that stays in the object store until it is released.

    with batcher.lease() as (parts, n_running):
        for part in parts:
            frames = part["observation/frame"]  # numpy, read-only
"""

from __future__ import annotations

from rlstructs.batcher.lease import BaseLease
from rlstructs.distributed.node_parts import Part
from rlstructs.workers.public_names import set_module


@set_module("rlstructs")
class PartsLease(BaseLease):
    """A rollout without a copy; `RayBatcher.lease` makes it.

    Use it in a `with` block, or `release` it. Arrays that are kept longer do not change, but their object store is not
    freed.

    Attributes:
        n_running: the number of environments that still run.
    """

    released = "the lease has been released; `get` gives what may be kept"

    @property
    def parts(self) -> list[Part]:
        """One `Part` per node, in the order of the nodes.

        Raises:
            StateError: the lease has been released.
        """
        parts: list[Part] = self.content
        return parts
