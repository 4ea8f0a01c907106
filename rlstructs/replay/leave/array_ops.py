"""Operations of `ArrayDict` on its arrays, which may be of any library."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import distributions

from rlstructs.errors import SpecError

# The parameters of distributions, whose first axes are those of the batch.
PARAMETERS: dict[type, tuple[str, ...]] = {
    distributions.Beta: ("concentration1", "concentration0"),
    distributions.Cauchy: ("loc", "scale"),
    distributions.Dirichlet: ("concentration",),
    distributions.Exponential: ("rate",),
    distributions.Gamma: ("concentration", "rate"),
    distributions.Laplace: ("loc", "scale"),
    distributions.LogNormal: ("loc", "scale"),
    distributions.MultivariateNormal: ("loc", "scale_tril"),
    distributions.Normal: ("loc", "scale"),
    distributions.Poisson: ("rate",),
    distributions.StudentT: ("df", "loc", "scale"),
    distributions.Uniform: ("low", "high"),
}
# Distributions with probabilities or logits.
OF_PROBABILITIES = (distributions.Bernoulli, distributions.Categorical)


def around(name: str) -> Iterator[str]:
    """Yields the parents of a name: `a/b` and `a` of `a/b/c`."""
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name


def shape(value: Any) -> tuple[int, ...] | None:
    """Returns the shape of an array, or a distribution's batch shape.

    None for anything else.
    """
    sizes = value.batch_shape if isinstance(value, distributions.Distribution) else getattr(value, "shape", None)
    return None if sizes is None else tuple(sizes)


def are_rows(value: Any) -> bool:
    """Whether a value is a list or an array of mappings.

    Vector environments return infos in this form.
    """
    is_array = type(value) is np.ndarray and value.dtype == object and value.ndim == 1
    return (
        (is_array or isinstance(value, (list, tuple)))
        and len(value) > 0
        and all(isinstance(each, Mapping) for each in value)
    )


def rows(value: Any, index: Any) -> Any:
    """Takes rows of an array or a distribution; returns anything else unchanged.

    Raises:
        SpecError: it is a distribution without known parameters.
    """
    if hasattr(value, "shape"):
        return value[index] if value.shape else value
    sizes = shape(value)
    if not sizes:
        return value
    # Numbers the elements of the batch, so that the index cannot reach further axes.
    return _picked(value, sizes, torch.arange(int(np.prod(sizes)), device="cpu").reshape(sizes)[index])


def _picked(value: Any, sizes: tuple[int, ...], at: torch.Tensor) -> Any:
    """Takes elements of a distribution of batch shape `sizes`.

    `at` has the numbers of these elements.
    """
    kind: Any = type(value)
    if kind is distributions.Independent:
        base = _picked(value.base_dist, sizes, at)
        picked = kind(base, value.reinterpreted_batch_ndims, validate_args=False)
    else:
        parameters = {}
        for name in _made_of(value):
            whole = getattr(value, name)
            inside = whole.shape[len(sizes) :]
            parameters[name] = whole.reshape(-1, *inside)[at.reshape(-1)].reshape(*at.shape, *inside)
        # Already checked; torch's checks fail for an empty batch.
        picked = kind(**parameters, validate_args=False)
    picked._validate_args = value._validate_args
    return picked


def _made_of(value: Any) -> tuple[str, ...]:
    """Returns the names of the parameters of a distribution."""
    kind = type(value)
    if kind in PARAMETERS:
        return PARAMETERS[kind]
    if kind in OF_PROBABILITIES:
        return ("probs",) if value._param is vars(value).get("probs") else ("logits",)  # torch derives the other
    raise SpecError(f"rows of the distribution {kind.__name__} cannot be taken; put its parameters into the batch")


def cat(values: list[Any]) -> Any:
    """Concatenates arrays of one library."""
    return torch.cat(values) if isinstance(values[0], torch.Tensor) else _library(values[0]).concatenate(values)


def stack(values: list[Any], axis: int) -> Any:
    """Stacks arrays of one library along a new axis."""
    return (torch if isinstance(values[0], torch.Tensor) else _library(values[0])).stack(values, axis)


def stacked(values: Sequence[Any]) -> Any:
    """Stacks values and Nones.

    None becomes zero among numbers of one shape. Otherwise all become objects.
    """
    held = [value for value in values if value is not None]
    if held and all(isinstance(value, torch.Tensor) and value.shape == held[0].shape for value in held):
        return torch.stack([torch.zeros_like(held[0]) if value is None else value for value in values])
    given = [np.asarray(array(value)) for value in held]
    if given and len({each.shape for each in given}) == 1 and all(each.dtype.kind in "biufc" for each in given):
        absent = np.zeros_like(given[0])
        return np.stack([absent if value is None else np.asarray(array(value)) for value in values])
    return _objects([array(value) for value in values])


def _objects(values: Sequence[Any]) -> np.ndarray:
    found = np.empty(len(values), object)
    for at, value in enumerate(values):
        found[at] = value
    return found


def _library(value: Any) -> Any:
    """Returns the module with numpy's functions for such an array."""
    if type(value).__module__.partition(".")[0] in ("jax", "jaxlib"):
        import jax.numpy

        return jax.numpy
    return np


def tensor(value: Any, dtype: torch.dtype | None, device: torch.device | str | int) -> Any:
    """Converts numbers to a tensor; returns anything else unchanged.

    The tensor shares memory with a numpy array that can be written to.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype)
    host = np.asarray(value)
    host = host if host.flags.writeable else host.copy()  # as of jax
    return torch.as_tensor(host, dtype=dtype, device=device) if host.dtype.kind in "biufc" else value


def array(value: Any) -> Any:
    """Converts a tensor to a numpy array; returns anything else unchanged."""
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value


def of_objects(value: Any) -> Any:
    """Converts an array of texts to one of objects; returns anything else unchanged."""
    return value.astype(object) if type(value) is np.ndarray and value.dtype.kind in "US" else value


def array_of(values: Sequence[Any]) -> Any:
    """Converts a list to an array or tensor.

    If the shapes differ, it becomes an array of objects.
    """
    try:
        if values and all(isinstance(value, torch.Tensor) for value in values):
            return torch.stack(list(values))
        return of_objects(np.asarray(values))
    except (ValueError, RuntimeError):
        return _objects(values)


def cleared(value: Any, index: Any) -> Any:
    """Fills rows of an array with zeros, in place.

    Returns the array; for anything else it returns 0 or None.
    """
    if isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and value.dtype != object):
        value[index] = 0
    elif isinstance(value, np.ndarray):
        value[index] = None
    else:
        return type(value)(0) if isinstance(value, (bool, int, float, np.number, np.bool_)) else None
    return value


def at_least_2d(value: Any) -> Any:
    """Adds axes in front of an array or number until it has two.

    A distribution gets one batch axis if it has none.
    """
    if isinstance(value, distributions.Distribution):
        return value if value.batch_shape else value.expand((1,))
    if isinstance(value, torch.Tensor):
        return torch.atleast_2d(value)  # type: ignore[no-untyped-call]
    return _library(value).atleast_2d(value)


def nulls(value: Any) -> np.ndarray:
    """Marks values that are NaN or None, bool of the same shape."""
    if isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16:
        value = value.float()
    host = np.asarray(array(value))
    if host.dtype == object:
        found: np.ndarray = np.frompyfunc(lambda each: each is None or each != each, 1, 1)(host).astype(bool)
        return found
    return np.isnan(host) if host.dtype.kind in "fc" else np.zeros(host.shape, bool)


def show(value: Any) -> str:
    """Describes a value by shape and dtype; by its repr without these."""
    sizes, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return repr(value) if sizes is None or isinstance(value, Mapping) else f"{tuple(sizes)} {dtype}"


V = TypeVar("V", bound="ArrayValues")


class ArrayValues(dict[str, Any]):
    """Base class of `ArrayDict`: operations on values, independent of names."""

    def _arrays(self) -> dict[str, Any]:
        """Returns all values except empty batches, by name."""
        raise NotImplementedError

    def _set(self, name: str, value: Any) -> None:
        """Sets an array."""
        raise NotImplementedError

    def _like(self: V, items: Any) -> V:
        """Creates another batch of this kind."""
        raise NotImplementedError

    def _of_same_names(self, given: Any) -> dict[str, Any]:
        """Returns the arrays of another batch.

        Raises:
            ValueError: its names are others.
        """
        raise NotImplementedError

    # Rows

    def __len__(self) -> int:
        shapes = map(shape, self._arrays().values())
        sizes = next((sizes for sizes in shapes if sizes is not None), (0,))
        if not sizes:
            raise TypeError("a batch without an axis for rows has no length")
        return sizes[0]

    def __bool__(self) -> bool:
        """Whether it has arrays, even without rows."""
        return bool(self._arrays())

    @property
    def shape(self) -> list[int]:
        """The shortest length of each axis that all arrays have."""
        shapes = [shape(value) or () for value in self._arrays().values()]
        return [min(sizes) for sizes in zip(*shapes, strict=False)]

    # Conversion

    def apply_values_transform(self: V, values_transform: Callable[[Any], Any], inplace: bool = False) -> V | None:
        """Applies a function to each array; returns a new batch, or None if `inplace`."""
        made = self._mapped(values_transform)
        if not inplace:
            return made
        self._put(made)
        return None

    def _mapped(self: V, function: Callable[[Any], Any]) -> V:
        made: V = self._like({**self, **{name: function(value) for name, value in self._arrays().items()}})
        return made

    def to_torch(self: V, dtype: torch.dtype | None = None, device: torch.device | str | int = "cpu") -> V:
        """Converts numbers to tensors, which share numpy's memory; `dtype` None keeps their dtypes."""
        return self._mapped(lambda value: tensor(value, dtype, device))

    def to_torch_(self, dtype: torch.dtype | None = None, device: torch.device | str | int = "cpu") -> None:
        """Converts to torch, in place."""
        self.apply_values_transform(lambda value: tensor(value, dtype, device), inplace=True)

    def to_numpy(self: V) -> V:
        """Converts tensors to numpy arrays, which share memory on the CPU."""
        return self._mapped(array)

    def to_numpy_(self) -> None:
        """Converts to numpy, in place."""
        self.apply_values_transform(array, inplace=True)

    def to_at_least_2d(self: V) -> V:
        """Gives arrays of fewer than two axes more in front, as numpy's `atleast_2d` does."""
        return self._mapped(at_least_2d)

    def isnull(self: V) -> V:
        """Marks values that are NaN or None, by arrays of bool."""
        return self._mapped(nulls)

    def hasnull(self) -> bool:
        """Whether a value is NaN or None."""
        return any(nulls(value).any() for value in self._arrays().values())

    # Arithmetic

    def __add__(self: V, other: Any) -> V:
        """Adds the arrays of another batch, or a number."""
        return self._with(operator.add, other)

    def __mul__(self: V, other: Any) -> V:
        """Multiplies by the arrays of another batch, or by a number."""
        return self._with(operator.mul, other)

    def __truediv__(self: V, other: Any) -> V:
        """Divides by the arrays of another batch, or by a number."""
        return self._with(operator.truediv, other)

    def __iadd__(self: V, other: Any) -> V:
        return self._put(self + other)

    def __imul__(self: V, other: Any) -> V:
        return self._put(self * other)

    def __itruediv__(self: V, other: Any) -> V:
        return self._put(self / other)

    def _with(self: V, function: Callable[[Any, Any], Any], other: Any) -> V:
        if not isinstance(other, Mapping):
            return self._mapped(lambda value: function(value, other))
        others = self._of_same_names(other)
        return self._like({**self, **{name: function(value, others[name]) for name, value in self._arrays().items()}})

    def _put(self: V, made: V) -> V:
        for name, value in made._arrays().items():
            self._set(name, value)
        return self

    # Cleared

    @staticmethod
    def empty(batch: V, index: Any = None) -> V:
        """Returns a copy of a batch with zeros in some rows, or in all."""
        return copy.deepcopy(batch).empty_(index)

    def empty_(self: V, index: Any = None) -> V:
        """Fills rows with zeros, or with None for objects.

        Values that are not arrays become 0 or None.

        Args:
            index: of the rows; None for all.

        Returns:
            The batch.
        """
        for name, value in self._arrays().items():
            self._set(name, cleared(value, ... if index is None else index))
        return self
