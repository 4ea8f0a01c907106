"""Transforms of batches that are read, and of rows that are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlstructs.errors import SpecError
from rlstructs.workers.public_names import set_module


@set_module("rlstructs.replay")
class Transform:
    """Changes batches that are read, and does the inverse to rows that are written.

    Batches are private copies: changing one in place does not change what is stored.

    Example:
        >>> class Scaled(Transform):
        ...     def forward(self, batch):
        ...         batch.set("reward", batch["reward"] * 10)
        ...         return batch
        ...
        ...     def inv(self, batch):
        ...         batch.set("reward", batch["reward"] / 10)
        ...         return batch
        >>> import torch
        >>> from rlstructs.replay import DictTensorReplayBuffer
        >>> buffer = DictTensorReplayBuffer(transform=Scaled())
        >>> row = buffer.add({"reward": torch.tensor(5.0)})
        >>> buffer.sample(1)["reward"]
        tensor([5.])
    """

    def forward(self, batch: Any) -> Any:
        """Changes a batch that is read, and returns it."""
        return batch

    def inv(self, batch: Any) -> Any:
        """Changes rows that are written, and returns them; None to drop them."""
        return batch

    def __call__(self, batch: Any) -> Any:
        return self.forward(batch)


@set_module("rlstructs.replay")
class Compose(Transform):
    """Several transforms, one after another.

    Rows that are written pass through them in reverse order.

    Args:
        transforms: each a `Transform`, or any function of a batch that returns one, such as a module of torch; if it
            has an `inv`, rows that are written pass through that.

    Attributes:
        parts: the transforms.
    """

    def __init__(self, *transforms: Any) -> None:
        self.parts = [as_transform(each) for each in transforms]

    def forward(self, batch: Any) -> Any:
        for transform in self.parts:
            batch = transform(batch)
            if batch is None:
                raise TypeError(f"{_name(transform)} returned None, not a batch")
        return batch

    def inv(self, batch: Any) -> Any:
        for transform in reversed(self.parts):
            batch = transform.inv(batch)
            if batch is None:
                return None
        return batch

    @property
    def has_inverse(self) -> bool:
        """Whether a transform changes rows that are written."""
        return any(map(_has_inverse, self.parts))

    def append(self, transform: Any) -> None:
        """Adds a transform at the end."""
        self.parts.append(as_transform(transform))

    def insert(self, index: int, transform: Any) -> None:
        """Adds a transform before the `index`-th; a negative index counts from the end.

        Raises:
            SpecError: there is no such place.
        """
        n = len(self.parts)
        if not -n <= index <= n:
            raise SpecError(f"index {index} is not in [{-n}, {n}]: there are {n} transforms")
        self.parts.insert(index, as_transform(transform))

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> Any:
        """Returns the `index`-th transform, as it was given."""
        found = self.parts[index]
        return found.function if isinstance(found, FunctionTransform) else found

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(_name, self.parts))})"


class Inverted(Transform):
    """A transform whose `forward` changes rows that are written, and whose `inv` changes batches."""

    def __init__(self, transform: Transform) -> None:
        self.transform = transform

    def forward(self, batch: Any) -> Any:
        return self.transform.inv(batch)

    def inv(self, batch: Any) -> Any:
        return self.transform.forward(batch)


class FunctionTransform(Transform):
    """A function of a batch as a transform."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def forward(self, batch: Any) -> Any:
        return self.function(batch)

    def inv(self, batch: Any) -> Any:
        return self.function.inv(batch) if hasattr(self.function, "inv") else batch


def as_transform(given: Any) -> Transform:
    """Converts a function to a transform.

    Raises:
        TypeError: it is neither a function nor a transform.
    """
    if isinstance(given, Transform):
        return given
    if not callable(given):
        raise TypeError(f"a transform must be a function of a batch, got {type(given).__name__}")
    return FunctionTransform(given)


def compose(given: Any) -> Compose:
    """Makes the transforms of a buffer from one, or from None.

    A `Compose` is returned as it is; None stands for no transforms.

    Raises:
        TypeError: it is not a transform.
    """
    if type(given) is Compose:  # an instance of a subclass is one transform
        return given
    return Compose() if given is None else Compose(given)


def _has_inverse(transform: Transform) -> bool:
    if isinstance(transform, Compose):
        return transform.has_inverse
    if isinstance(transform, FunctionTransform):
        return hasattr(transform.function, "inv")
    return type(transform).inv is not Transform.inv


def _name(transform: Transform) -> str:
    if isinstance(transform, FunctionTransform):
        return getattr(transform.function, "__name__", type(transform.function).__name__)
    return repr(transform) if isinstance(transform, Compose) else type(transform).__name__
