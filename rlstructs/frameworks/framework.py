"""What differs between torch, jax and warp: dtypes, and how arrays leave. All else is one memory."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

# Of a numpy dtype's `isbuiltin`: it is not numpy's own, as 8-bit floats are.
OF_OTHERS = 2


class Framework(Protocol):
    """How one library names its dtypes and takes arrays."""

    def dtype(self, dtype: Any) -> Any:
        """The library's own name of a dtype, its default float for None."""

    def host_dtype(self, dtype: Any) -> np.dtype | None:
        """numpy's name of it; None for bfloat16."""

    def named(self, name: str) -> Any:
        """The dtype of this name, as numpy and torch call it."""

    def name_of(self, dtype: Any) -> str:
        """The name of a dtype, for `named`."""

    def device(self, device: Any) -> Any:
        """The library's own name of a device, its default one for None."""

    def name_of_device(self, device: Any) -> str:
        """The name of a device, for `device`."""

    def device_of_rows(self, device: Any) -> torch.device | None:
        """torch's name of a device on which the rows of its memories lie as tensors; None for arrays on the host."""

    def tensor_of(self, value: Any) -> Any:
        """One of the library's arrays on a GPU as torch's, a copy if the library is another; all else as it is."""

    def hand_over(self, arrays: list[Any], dtypes: list[Any], device: Any) -> list[Any]:
        """Arrays of numpy or torch that nobody else holds as the library's."""

    def live(self, array: Any, dtype: Any, name: str) -> Any:
        """The store's own memory as one of the library's arrays; a copy where those cannot be written to."""

    def indexes(self, rows: np.ndarray) -> Any:
        """Row ids as the library's agents take them."""

    def new_seed(self) -> int:
        """A seed from the library's global generator, so that seeding that seeds the memory."""


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a view of another library's memory on a GPU, which that library may take back at once."""
    copy = tensor.detach().clone()
    torch.cuda.current_stream(tensor.device).synchronize()
    return copy
