"""The tensors of a memory by name, as skrl's programs read and assign them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any


class LiveTensors(dict[str, Any]):
    """Tensors by name, in the order in which they were made.

    Args:
        names: of the tensors.
        get: what gives the one of a name.
        put: what copies values into it.
    """

    def __init__(self, names: Iterable[str], get: Callable[[str], Any], put: Callable[[str, Any], None]) -> None:
        super().__init__((name, get(name)) for name in names)
        self._get, self._put = get, put

    def __setitem__(self, name: str, values: Any) -> None:
        """Copies values into a tensor.

        Raises:
            MissingKeyError, SpecError: there is no such tensor and they make none, or they do not fit.
        """
        self._put(name, values)
        super().__setitem__(name, self._get(name))  # jax has a copy

    def __reduce__(self) -> Any:
        # What is copied or saved has nothing to do with the memory any more, and torch loads it.
        return OrderedDict, (), None, None, iter(self.items())
