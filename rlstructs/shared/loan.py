"""Tensors on loan: views of shared memory, and copies where no view is possible."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping

import torch

from rlstructs.errors import StateError


class Loan(Mapping[str, torch.Tensor]):
    """Tensors by name, to be used until the loan is closed.

    Args:
        views: views of shared memory.
        copies: copies, or functions that make one at the first use.

    Attributes:
        is_open: whether the views may still be used.
    """

    def __init__(
        self,
        views: Mapping[str, torch.Tensor],
        copies: Mapping[str, torch.Tensor | Callable[[], torch.Tensor]],
    ) -> None:
        self.views, self.copies, self.is_open = views, dict(copies), True

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.views:
            return self.views[key]
        found = self.copies[key]
        if not isinstance(found, torch.Tensor):
            found = self.copies[key] = found()
        return found

    def __contains__(self, key: object) -> bool:
        return key in self.views or key in self.copies

    def __iter__(self) -> Iterator[str]:
        return itertools.chain(self.views, self.copies)

    def __len__(self) -> int:
        return len(self.views) + len(self.copies)

    def with_views(self, views: Mapping[str, torch.Tensor]) -> Loan:
        """Replaces the views of these copies."""
        other = Loan(views, {})
        other.copies = self.copies
        return other

    def close(self, why: str) -> None:
        """Ends the loan. Idempotent.

        Autograd is told that the views change, and copies that were not made yet are refused, with the message `why`.
        """
        if not self.is_open:
            return
        self.is_open = False
        for view in self.views.values():
            torch.autograd.graph.increment_version(view)
        for key, copy in self.copies.items():
            if not isinstance(copy, torch.Tensor):
                self.copies[key] = functools.partial(_refuse, why)


def _refuse(why: str) -> torch.Tensor:
    raise StateError(why)
