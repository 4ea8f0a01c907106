"""`LiveTensors`: what `Memory.tensors` and `tensors_view` return."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any


class LiveTensors(dict[str, Any]):
    """Tensors by name, in order of creation.

    Args:
        names: names of the tensors.
        get: returns the tensor of a name.
        put: copies values into the tensor of a name.
    """

    def __init__(self, names: Iterable[str], get: Callable[[str], Any], put: Callable[[str, Any], None]) -> None:
        super().__init__((name, get(name)) for name in names)
        self._get, self._put = get, put

    def __setitem__(self, name: str, values: Any) -> None:
        """Copies values into a tensor.

        Raises:
            MissingKeyError, SpecError: there is no such tensor and none can be created, or the values do not fit.
        """
        self._put(name, values)
        super().__setitem__(name, self._get(name))  # for jax, whose array is a copy

    def __reduce__(self) -> Any:
        # Copies and pickles are independent of the memory; torch.load accepts an OrderedDict.
        return OrderedDict, (), None, None, iter(self.items())
