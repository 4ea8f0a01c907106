"""`Lease`: a rollout that lies where the workers wrote it, for as long as nobody writes there again.

    with batcher.lease() as (trajectories, n_running):
        loss(trajectories)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from rlstructs.errors import StateError
from rlstructs.shared.lent import Lent
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import Trajectories
from rlstructs.structures.tree import missing_key_error
from workers.interrupts import defer_interrupt

B = TypeVar("B", bound="Borrowed")

RELEASED = "the lease has been released: what it gave is written again; `get` gives what may be kept"


class Loan:
    """What tensors of a lease have in common: whether it still holds."""

    def __init__(self) -> None:
        self.is_open = True


class LeasedTensor(torch.Tensor):
    """In debug mode, a view of leased memory, and each view of it; raises StateError once the lease is released.

    `torch.compile` and `torch.func` do not take it: clone it for them.
    """

    _loan: Loan

    @classmethod
    def of(cls, tensor: torch.Tensor, loan: Loan) -> LeasedTensor:
        """The same memory, guarded."""
        made = tensor.as_subclass(cls)
        made._loan = loan
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leased = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        if not all(tensor._loan.is_open for tensor in leased):
            raise StateError(RELEASED)
        with torch._C.DisableTorchFunctionSubclass():
            loans = {_storage(tensor): tensor._loan for tensor in leased}
            loans.pop(0, None)  # of tensors without elements
            result = func(*args, **kwargs)
            return torch.utils._pytree.tree_map_only(torch.Tensor, lambda made: cls._again(made, loans), result)

    @classmethod
    def _again(cls, made: torch.Tensor, loans: Mapping[int, Loan]) -> torch.Tensor:
        loan = loans.get(_storage(made))
        return made if loan is None or isinstance(made, cls) else cls.of(made, loan)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _storage(tensor: torch.Tensor) -> int:
    """Where a tensor's memory begins; 0 if it has none that can be told."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse ones, and those of torch.func
        return 0


class Borrowed:
    """Something for a `with` block, given back at its end; unpacks into that and `n_running`.

    Args:
        given: what it is.
        n_running: of environments.
        give_back: is called once, by the release.

    Attributes:
        n_running: the number of environments that still run.
    """

    #: What is said to who asks for it later.
    released = RELEASED

    # Whether its block has begun, or somebody has seen what it is.
    _is_entered = _is_seen = False
    _given: Any = None

    def __init__(self, given: Any, n_running: int, give_back: Callable[[], None]) -> None:
        self._given, self.n_running, self._give_back = given, n_running, give_back

    @property
    def given(self) -> Any:
        """What it is.

        Raises:
            StateError: the lease has been released.
        """
        if self._given is None:
            raise StateError(self.released)
        self._is_seen = True
        return self._given

    def release(self) -> None:
        """Gives it back. Idempotent."""
        with defer_interrupt():
            self._given = None
            give_back, self._give_back = self._give_back, _nothing
            give_back()

    def __del__(self) -> None:
        # An interrupt may come before its block begins, or as that ends: nobody could release it any more. Nor can who
        # dropped it having seen what it is, but there may be views of that.
        if self._given is not None and (self._is_entered or not self._is_seen):
            self.release()

    def __enter__(self: B) -> B:
        self._is_entered = True
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __iter__(self) -> Iterator[Any]:
        if not self._is_entered:  # what it unpacks into would outlive it, and nobody would release it
            self.release()
            raise StateError("a lease is for a block: with batcher.lease() as (trajectories, n_running): ...")
        return iter((self.given, self.n_running))


class Lease(Borrowed):
    """A rollout without a copy; `RL_Batcher.lease` makes it.

    Use it in a `with` block, or `release` it. Its tensors are on the CPU; what lies behind a row's
    length is of no meaning. After its end they hold whatever is written next: nothing of it may be
    kept but what was cloned. A `backward` through them then raises, as torch says of what was modified in
    place. In debug mode any use of such a tensor raises `StateError`; an array of numpy, or what another
    library made of it, holds poison.

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
        steps, self._loan = trajectories.trajectories, Loan()
        assert isinstance(steps._tensors, Lent)
        self._lent = steps._tensors
        if is_guarded:
            guarded = {key: LeasedTensor.of(view, self._loan) for key, view in self._lent.views.items()}
            steps = TemporalDictTensor.trusted(self._lent.with_views(guarded), steps.lengths)
        super().__init__(Trajectories(trajectories.info, steps), n_running, give_back)

    @property
    def trajectories(self) -> Trajectories:
        """What `get` would give.

        Raises:
            StateError: the lease has been released.
        """
        given: Trajectories = self.given
        return given

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
            raise missing_key_error("lease", key, steps)
        return key in self._lent.views

    def release(self) -> None:
        """Gives the memory back to the workers. Idempotent."""
        with defer_interrupt():
            if self._loan.is_open:
                self._loan.is_open = False
                self._lent.close(RELEASED)
                super().release()


def _nothing() -> None:
    pass
