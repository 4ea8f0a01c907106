"""`PartsLease`: a rollout where it lies in the object store.

    with batcher.lease() as (parts, n_running):
        for part in parts:
            frames = part["observation/frame"]  # numpy, read-only
"""

from __future__ import annotations

from rlstructs.batcher.lease import Borrowed
from rlstructs.distributed.parts import Part
from workers.public_names import set_module


@set_module("rlstructs")
class PartsLease(Borrowed):
    """A rollout without a copy; `RayBatcher.lease` makes it.

    Use it in a `with` block, or `release` it. Arrays that are kept beyond stay as they are, and the object store that
    they lie in stays taken.

    Attributes:
        n_running: the number of environments that still run.
    """

    released = "the lease has been released; `get` gives what may be kept"

    @property
    def parts(self) -> list[Part]:
        """Of each node its part, in the order of the nodes.

        Raises:
            StateError: the lease has been released.
        """
        parts: list[Part] = self.given
        return parts
