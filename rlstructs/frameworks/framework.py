"""The protocol of a framework: the differences between memories for torch, jax and warp."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

# `isbuiltin` of dtypes that other packages add to numpy, such as 8-bit floats.
NOT_NUMPYS = 2


class Framework(Protocol):
    """One library's names of dtypes and devices, and its arrays.

    Attributes:
        library: "torch", "jax" or "warp".
        has_live_arrays: whether arrays of `live_array` follow the store's memory.
    """

    library: str
    has_live_arrays: bool

    def dtype(self, dtype: Any) -> Any:
        """Returns the library's dtype for one of its own or numpy's.

        None gives its default float.

        Raises:
            SpecError: it has none like it.
        """

    def host_dtype(self, dtype: Any) -> np.dtype | None:
        """numpy's dtype for one of the library's; None for bfloat16."""

    def dtype_from_name(self, name: str) -> Any:
        """The library's dtype with this name, which is the one in numpy or torch."""

    def dtype_name(self, dtype: Any) -> str:
        """The name of a dtype, for `dtype_from_name`."""

    def device(self, device: Any) -> Any:
        """Returns the library's device for a device or a name.

        None gives its default device.

        Raises:
            SpecError: it has no such device.
        """

    def device_name(self, device: Any) -> str:
        """The name of a device, for `device`."""

    def device_of_rows(self, device: Any) -> torch.device | None:
        """Returns torch's device on which a memory keeps its rows as tensors.

        None for arrays in host memory.
        """

    def to_torch(self, value: Any) -> Any:
        """Copies an array of the library on a GPU to a tensor.

        Returns tensors and anything else unchanged.
        """

    def hand_over(self, arrays: list[Any], dtypes: list[Any], device: Any) -> list[Any]:
        """Turns arrays of numpy or torch, which nobody else holds, into the library's."""

    def live_array(self, array: Any, dtype: Any, name: str, shared: tuple[Any, int] | None = None) -> Any:
        """Returns one of the library's arrays over the store's memory.

        A copy if its arrays cannot be written to.

        Args:
            array: of numpy or torch.
            dtype: the library's.
            name: of the array, for messages.
            shared: torch's storage of the memory, and bytes before the array, if processes share it.
        """

    def as_indexes(self, rows: np.ndarray) -> Any:
        """Row ids in the form that the library's agents take."""

    def draw_seed(self) -> int:
        """Draws a seed from the generator that programs for this library seed."""


def copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a view of another library's GPU memory, and waits for the copy.

    That library may reuse the memory at once.
    """
    copy = tensor.detach().clone()
    torch.cuda.current_stream(tensor.device).synchronize()
    return copy
