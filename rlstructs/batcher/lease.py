"""`Lease`: a rollout that stays where the workers wrote it until it is released.

with batcher.lease() as (trajectories, n_running):
    loss(trajectories)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from rlstructs.errors import StateError
from rlstructs.shared.reading import Loan
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import Trajectories
from rlstructs.structures.tree import missing_key_error
from rlstructs.workers.interrupts import defer_interrupt
from rlstructs.workers.public_names import set_module

L = TypeVar("L", bound="BaseLease")

RELEASED = "the lease has been released: workers may write to its memory again; `get` gives what may be kept"


class LeasedTensor(torch.Tensor):
    """A view of leased memory that raises StateError after the release, in debug mode.

    Views of it are LeasedTensors too. `torch.compile` and `torch.func` do not take them: clone them first.
    """

    _loan: Loan

    @classmethod
    def of(cls, tensor: torch.Tensor, loan: Loan) -> LeasedTensor:
        """Guards a tensor; the memory is the same."""
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
            loans.pop(0, None)  # the address of tensors without elements
            result = func(*args, **kwargs)
            return torch.utils._pytree.tree_map_only(torch.Tensor, lambda made: cls._guard_view(made, loans), result)

    @classmethod
    def _guard_view(cls, made: torch.Tensor, loans: Mapping[int, Loan]) -> torch.Tensor:
        """Guards a result that lies in leased memory; returns others as they are."""
        loan = loans.get(_storage(made))
        return made if loan is None or isinstance(made, cls) else cls.of(made, loan)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _storage(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory; 0 if it has no single one."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse tensors, and those of torch.func
        return 0


class BaseLease:
    """Base class of leases: lends a rollout for a `with` block.

    It unpacks into the rollout and `n_running`.

    Args:
        content: the rollout.
        n_running: the number of environments that still run.
        give_back: called once, by the release.

    Attributes:
        n_running: the number of environments that still run.
    """

    #: The error message if the content is used after the release.
    released = RELEASED

    # Whether the `with` block has begun, and whether anybody has seen the content.
    _is_entered = _is_seen = False
    _content: Any = None

    def __init__(self, content: Any, n_running: int, give_back: Callable[[], None]) -> None:
        self._content, self.n_running, self._give_back = content, n_running, give_back

    @property
    def content(self) -> Any:
        """The rollout.

        Raises:
            StateError: the lease has been released.
        """
        if self._content is None:
            raise StateError(self.released)
        self._is_seen = True
        return self._content

    def release(self) -> None:
        """Gives the rollout back. Idempotent."""
        with defer_interrupt():
            self._content = None
            give_back, self._give_back = self._give_back, _do_nothing
            give_back()

    def __del__(self) -> None:
        # An interrupt before the block begins, or as it ends, leaves nobody who could release the lease. A lease whose
        # content was seen outside of a block is not released here: there may still be views of it.
        if self._content is not None and (self._is_entered or not self._is_seen):
            self.release()

    def __enter__(self: L) -> L:
        self._is_entered = True
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __iter__(self) -> Iterator[Any]:
        if not self._is_entered:  # the unpacked content would outlive the lease
            self.release()
            raise StateError("a lease is for a block: with batcher.lease() as (trajectories, n_running): ...")
        return iter((self.content, self.n_running))


@set_module("rlstructs")
class Lease(BaseLease):
    """A rollout without a copy; `RL_Batcher.lease` makes it.

    Use it in a `with` block, or `release` it. Its tensors are on the CPU, and values beyond a row's length are
    undefined. After the release they hold whatever the workers write next, so keep only clones. A `backward` through
    them then raises torch's error about tensors that were modified in place. In debug mode any use of such a tensor
    raises `StateError`; numpy arrays, and arrays of other libraries, that share its memory hold poison.

    Args:
        trajectories: the rollout; its steps lie in a `Loan`.
        n_running: the number of environments that still run.
        give_back: called once, by the release.
        is_guarded: whether views raise when they are used after the release.

    Attributes:
        n_running: the number of environments that still run.
    """

    def __init__(
        self, trajectories: Trajectories, n_running: int, give_back: Callable[[], None], *, is_guarded: bool = False
    ) -> None:
        steps = trajectories.trajectories
        assert isinstance(steps._tensors, Loan)
        loan = self._loan = steps._tensors
        if is_guarded:
            guarded = {key: LeasedTensor.of(view, loan) for key, view in loan.views.items()}
            steps = TemporalDictTensor.trusted(loan.with_views(guarded), steps.lengths, steps.first_steps)
        super().__init__(Trajectories.trusted(trajectories.info, steps), n_running, give_back)

    @property
    def trajectories(self) -> Trajectories:
        """The rollout, equal to what `get` would return.

        Raises:
            StateError: the lease has been released.
        """
        trajectories: Trajectories = self.content
        return trajectories

    def is_view(self, key: str) -> bool:
        """Whether a key of `trajectories` is a view of the slots, not a copy.

        If an environment was reset in the rollout, `_observation/...` is a copy, made at the first use. Every key is a
        copy if some environments had ended before the rollout, or if it lies in several slot buffers, as it may after
        `get(min_workers=...)`.

        Raises:
            MissingKeyError: there is no such key.
            StateError: the lease has been released.
        """
        steps = self.trajectories.trajectories
        if key not in steps:
            raise missing_key_error("lease", key, steps)
        return key in self._loan.views

    def release(self) -> None:
        """Gives the memory back to the workers. Idempotent."""
        with defer_interrupt():
            self._loan.close(RELEASED)
            super().release()


def _do_nothing() -> None:
    pass
