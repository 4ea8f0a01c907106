"""What `ArrayDict` does with each of its arrays, of whichever library they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import distributions

from rlstructs.errors import SpecError

# Of what a distribution is made, where each of it has the axes of the batch in front.
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
# Those that are made either of probabilities or of logits.
OF_PROBABILITIES = (distributions.Bernoulli, distributions.Categorical)


def around(name: str) -> Iterator[str]:
    """The names in which one is nested: `a/b` and `a` of `a/b/c`."""
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name


def shape(value: Any) -> tuple[int, ...] | None:
    """The axes of an array, or those of the batch of a distribution; None of anything else."""
    sizes = value.batch_shape if isinstance(value, distributions.Distribution) else getattr(value, "shape", None)
    return None if sizes is None else tuple(sizes)


def are_rows(value: Any) -> bool:
    """Whether it is a list, or an array of objects, of mappings: of vector environments infos come as both."""
    is_array = type(value) is np.ndarray and value.dtype == object and value.ndim == 1
    return (
        (is_array or isinstance(value, (list, tuple)))
        and len(value) > 0
        and all(isinstance(each, Mapping) for each in value)
    )


def rows(value: Any, index: Any) -> Any:
    """Some rows of an array or a distribution; anything else as it is.

    Raises:
        SpecError: it is a distribution of which rows cannot be taken.
    """
    if hasattr(value, "shape"):
        return value[index] if value.shape else value
    sizes = shape(value)
    if not sizes:
        return value
    # Numbers for the batch's elements, so that no index reaches the axes behind.
    return _picked(value, sizes, torch.arange(int(np.prod(sizes)), device="cpu").reshape(sizes)[index])


def _picked(value: Any, sizes: tuple[int, ...], at: torch.Tensor) -> Any:
    """The distribution of those elements, of any shape, of a batch of this shape."""
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
        # They were checked, and torch's checks fail where none is left.
        picked = kind(**parameters, validate_args=False)
    picked._validate_args = value._validate_args
    return picked


def _made_of(value: Any) -> tuple[str, ...]:
    """The names of the arguments with which a distribution is made."""
    kind = type(value)
    if kind in PARAMETERS:
        return PARAMETERS[kind]
    if kind in OF_PROBABILITIES:
        return ("probs",) if value._param is vars(value).get("probs") else ("logits",)  # the other is made of it
    raise SpecError(f"rows of the distribution {kind.__name__} cannot be taken; put its parameters into the batch")


def cat(values: list[Any]) -> Any:
    """Arrays of one library, one behind another."""
    if isinstance(values[0], torch.Tensor):
        return torch.cat(values)
    return _library(values[0]).concatenate(values)


def stack(values: list[Any], axis: int) -> Any:
    """Arrays of one library along a new axis."""
    if isinstance(values[0], torch.Tensor):
        return torch.stack(values, axis)
    return _library(values[0]).stack(values, axis)


def stacked(values: Sequence[Any]) -> np.ndarray:
    """Values of which some are None as rows: zeros stand for None among numbers of one shape, else all are objects."""
    given = [np.asarray(array(value)) for value in values if value is not None]
    if given and len({each.shape for each in given}) == 1 and all(each.dtype.kind in "biufc" for each in given):
        absent = np.zeros_like(given[0])
        return np.stack([absent if value is None else np.asarray(array(value)) for value in values])
    found = np.empty(len(values), object)
    for at, value in enumerate(values):
        found[at] = array(value)
    return found


def _library(value: Any) -> Any:
    """numpy, or what has its functions for such an array."""
    if type(value).__module__.partition(".")[0] in ("jax", "jaxlib"):
        import jax.numpy

        return jax.numpy
    return np


def tensor(value: Any, dtype: torch.dtype | None, device: torch.device | str | int) -> Any:
    """Numbers as a tensor, which shares numpy's memory where that may be written; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype)
    host = np.asarray(value)
    host = host if host.flags.writeable else host.copy()  # jax's, above all
    return torch.as_tensor(host, dtype=dtype, device=device) if host.dtype.kind in "biufc" else value


def array(value: Any) -> Any:
    """A tensor as numpy has it; anything else as it is."""
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value


def array_of(values: Sequence[Any]) -> Any:
    """A list as an array, or as a tensor if it is of tensors; as an array of objects if those have other shapes."""
    try:
        if values and all(isinstance(value, torch.Tensor) for value in values):
            return torch.stack(list(values))
        return np.asarray(values)
    except (ValueError, RuntimeError):
        found = np.empty(len(values), object)
        found[:] = values
        return found


def cleared(value: Any, index: Any) -> Any:
    """An array whose rows at an index have been filled with zeros; of anything else 0, or None."""
    if isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and value.dtype != object):
        value[index] = 0
    elif isinstance(value, np.ndarray):
        value[index] = None
    else:
        return type(value)(0) if isinstance(value, (bool, int, float, np.number, np.bool_)) else None
    return value


def nulls(value: Any) -> np.ndarray:
    """Where it is NaN or None, bools of its shape."""
    if isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16:
        value = value.float()
    host = np.asarray(array(value))
    if host.dtype == object:
        found: np.ndarray = np.frompyfunc(lambda each: each is None or each != each, 1, 1)(host).astype(bool)
        return found
    return np.isnan(host) if host.dtype.kind in "fc" else np.zeros(host.shape, bool)


def show(value: Any) -> str:
    """Shape and dtype, if it has some."""
    sizes, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return repr(value) if sizes is None or isinstance(value, Mapping) else f"{tuple(sizes)} {dtype}"
