"""`Lease`: a rollout that lies where the workers wrote it, for as long as nobody writes there again.

    with batcher.lease() as (trajectories, n_running):
        loss(trajectories)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from rlstructs.errors import StateError
from rlstructs.slots import Lent
from rlstructs.structures.base import missing_key
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import Trajectories

RELEASED = "the lease has been released: what it gave is written again; `get` gives what may be kept"


class Loan:
    """What tensors of a lease have in common: whether it still holds."""

    def __init__(self) -> None:
        self.is_open = True


class LeasedTensor(torch.Tensor):
    """In debug mode, a view of leased memory, and each view of it; raises StateError once the lease is released."""

    _loan: Loan

    @classmethod
    def of(cls, tensor: torch.Tensor, loan: Loan) -> LeasedTensor:
        """The same memory, guarded."""
        made = tensor.as_subclass(cls)
        made._loan = loan
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leased = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs or {})) if isinstance(leaf, cls)]
        with torch._C.DisableTorchFunctionSubclass():
            loans = {tensor.untyped_storage().data_ptr(): tensor._loan for tensor in leased}
            if not all(loan.is_open for loan in loans.values()):
                raise StateError(RELEASED)
            result = func(*args, **(kwargs or {}))
            return torch.utils._pytree.tree_map_only(torch.Tensor, lambda made: cls._again(made, loans), result)

    @classmethod
    def _again(cls, made: torch.Tensor, loans: Mapping[int, Loan]) -> torch.Tensor:
        if made.layout is not torch.strided:
            return made
        loan = loans.get(made.untyped_storage().data_ptr())
        return made if loan is None or isinstance(made, cls) else cls.of(made, loan)


class Lease:
    """A rollout without a copy; `RL_Batcher.lease` makes it.

    Use it in a `with` block, or `release` it. Its tensors are on the CPU; what lies behind a row's
    length is of no meaning. After its end they hold whatever is written next: nothing of it may be
    kept but what was cloned. In debug mode a tensor that is used then raises `StateError`, and an
    array of numpy holds poison.

    Args:
        trajectories: whose steps are what `Slots.lend` gives.
        n_running: of environments.
        give_back: is called once, by the release.
        is_guarded: whether views raise when they are used after it.

    Attributes:
        n_running: the number of environments that still run.
    """

    def __init__(
        self, trajectories: Trajectories, n_running: int, give_back: Callable[[], None], *, is_guarded: bool = False
    ) -> None:
        steps, self.n_running = trajectories.trajectories, n_running
        self._loan, self._give_back = Loan(), give_back
        lent = steps._tensors
        assert isinstance(lent, Lent)
        self._views = lent.views.keys()
        if is_guarded:
            guarded = {key: LeasedTensor.of(view, self._loan) for key, view in lent.views.items()}
            steps = TemporalDictTensor.trusted(Lent(guarded, lent.copies), steps.lengths)
        self._trajectories: Trajectories | None = Trajectories(trajectories.info, steps)

    @property
    def trajectories(self) -> Trajectories:
        """What `get` would give.

        Raises:
            StateError: the lease has been released.
        """
        if self._trajectories is None:
            raise StateError(RELEASED)
        return self._trajectories

    def is_view(self, key: str) -> bool:
        """Whether what `trajectories` has under this key is a view of what the workers wrote, and no copy.

        A copy is `_observation/...` of a rollout in which an environment was reset, made when it is first
        asked for; and everything of a rollout in which some environments had ended before.

        Raises:
            MissingKeyError: there is no such key.
            StateError: the lease has been released.
        """
        steps = self.trajectories.trajectories
        if key not in steps:
            raise missing_key("lease", key, steps)
        return key in self._views

    def release(self) -> None:
        """Gives the memory back to the workers. Idempotent."""
        if self._loan.is_open:
            self._trajectories, self._loan.is_open = None, False
            self._give_back()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __iter__(self) -> Iterator[Any]:
        return iter((self.trajectories, self.n_running))
