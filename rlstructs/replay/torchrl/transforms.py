"""What is done to batches on their way out of a buffer, and to rows on their way in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlstructs.errors import SpecError
from rlstructs.public_names import set_module


@set_module("rlstructs.replay")
class Transform:
    """Changes batches that are read, and the other way round rows that are written.

    Batches are private copies, and may be changed in place: what is stored does not follow.

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
        """What a batch becomes that is read."""
        return batch

    def inv(self, batch: Any) -> Any:
        """What rows become that are written; None if they are not to be."""
        return batch

    def __call__(self, batch: Any) -> Any:
        return self.forward(batch)


@set_module("rlstructs.replay")
class Compose(Transform):
    """Transforms one after another; on the way in the other way round.

    Args:
        transforms: each a `Transform`, or something else that takes a batch and gives one, as a module of
            torch does; if it has an `inv`, rows that are written go through that.
    """

    def __init__(self, *transforms: Any) -> None:
        self._transforms = [as_transform(each) for each in transforms]

    def forward(self, batch: Any) -> Any:
        """See `Transform`."""
        for transform in self._transforms:
            batch = transform(batch)
            if batch is None:
                raise TypeError(f"{_name(transform)} gave None, not a batch")
        return batch

    def inv(self, batch: Any) -> Any:
        """See `Transform`."""
        for transform in reversed(self._transforms):
            batch = transform.inv(batch)
            if batch is None:
                return None
        return batch

    @property
    def has_inverse(self) -> bool:
        """Whether rows are changed on the way in."""
        return any(_inverts(transform) for transform in self._transforms)

    def append(self, transform: Any) -> None:
        """Adds one at the end."""
        self._transforms.append(as_transform(transform))

    def insert(self, index: int, transform: Any) -> None:
        """Adds one before the `index`-th; from the end if negative.

        Raises:
            SpecError: there is no such place.
        """
        n = len(self._transforms)
        if not -n <= index <= n:
            raise SpecError(f"index {index} is not in [{-n}, {n}]: there are {n} transforms")
        self._transforms.insert(index, as_transform(transform))

    @property
    def parts(self) -> list[Transform]:
        """The transforms, in a list of their own."""
        return list(self._transforms)

    def __len__(self) -> int:
        return len(self._transforms)

    def __getitem__(self, index: int) -> Any:
        """The `index`-th, as it was given."""
        found = self._transforms[index]
        return found.function if isinstance(found, Called) else found

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(_name, self._transforms))})"


class Inverted(Transform):
    """A transform the other way round: its `forward` is for rows that are written."""

    def __init__(self, transform: Transform) -> None:
        self.transform = transform

    def forward(self, batch: Any) -> Any:
        """See `Transform`."""
        return self.transform.inv(batch)

    def inv(self, batch: Any) -> Any:
        """See `Transform`."""
        return self.transform.forward(batch)


class Called(Transform):
    """Something that takes a batch and gives one."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def forward(self, batch: Any) -> Any:
        """See `Transform`."""
        return self.function(batch)

    def inv(self, batch: Any) -> Any:
        """See `Transform`."""
        inverse = getattr(self.function, "inv", None)
        return batch if inverse is None else inverse(batch)


def as_transform(given: Any) -> Transform:
    """A transform, or what makes one of something that can be called.

    Raises:
        TypeError: it cannot.
    """
    if isinstance(given, Transform):
        return given
    if not callable(given):
        raise TypeError(f"a transform must take a batch, got {type(given).__name__}")
    return Called(given)


def composed(given: Any) -> Compose:
    """Transforms of a buffer: those that a `Compose` holds, that which is given, or none.

    Raises:
        TypeError: it is no transform.
    """
    if type(given) is Compose:  # one that does more is one transform
        return given
    return Compose() if given is None else Compose(given)


def _inverts(transform: Transform) -> bool:
    if isinstance(transform, Compose):
        return transform.has_inverse
    if isinstance(transform, Called):
        return hasattr(transform.function, "inv")
    return type(transform).inv is not Transform.inv


def _name(transform: Transform) -> str:
    if isinstance(transform, Called):
        return getattr(transform.function, "__name__", type(transform.function).__name__)
    return repr(transform) if isinstance(transform, Compose) else type(transform).__name__
