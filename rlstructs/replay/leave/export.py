"""Converts samples to arrays of torch, numpy, jax or warp; `GatheredColumn` looks like one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.lib.mixins import NDArrayOperatorsMixin

from rlstructs.errors import SpecError
from rlstructs.replay.intake.arrays import from_bits
from rlstructs.replay.leave.array_dict import ArrayDict
from rlstructs.replay.rows.objects import OBJECT
from rlstructs.replay.rows.spec import Spec
from rlstructs.structures.arrays import fit_to_jax
from rlstructs.structures.dict_tensor import DictTensor

FRAMEWORKS = ("torch", "numpy", "jax", "warp")
UNSIGNED = {"uint16": torch.uint16, "uint32": torch.uint32, "uint64": torch.uint64}


class Exporter:
    """Converts private arrays to batches.

    Args:
        framework: "torch" (a `DictTensor`), "numpy", "jax" or "warp" (an `ArrayDict` of its arrays).
        device: of torch, jax or warp; None for the CPU in torch, and for the default device of jax and warp.

    Raises:
        SpecError: there is no such framework, or the device of numpy is not the CPU.
    """

    def __init__(self, framework: str, device: Any = None) -> None:
        if framework not in FRAMEWORKS:
            raise SpecError(f"framework must be one of {FRAMEWORKS}, got {framework!r}")
        if framework == "numpy" and device is not None:
            if str(device) != "cpu":
                raise SpecError(f"device must be None or the CPU for numpy, got {device!r}")
            device = None
        self.framework, self.device = framework, device
        self._library: Any = None

    def __call__(self, arrays: Mapping[str, Any], specs: Mapping[str, Spec]) -> Any:
        """Converts arrays that nobody else holds to a batch.

        An array without a spec keeps its dtype.
        """
        if self.framework == "torch":
            return DictTensor.trusted({name: self._tensor(array, specs.get(name)) for name, array in arrays.items()})
        return ArrayDict.trusted(zip(arrays, self._converted(arrays, specs), strict=True))

    def with_objects(self, arrays: Mapping[str, Any], specs: Mapping[str, Spec]) -> Any:
        """Makes a batch; arrays of objects remain numpy arrays, and a `DictTensor` omits them."""
        objects = {name for name, array in arrays.items() if array.dtype == OBJECT}
        batch = self({name: array for name, array in arrays.items() if name not in objects}, specs)
        if self.framework == "torch":
            return batch
        # [()] of a single row is its object.
        return ArrayDict.trusted((n, a[()] if n in objects else batch[n]) for n, a in arrays.items())

    def one(self, name: str, array: Any, spec: Spec | None = None) -> Any:
        """Converts one array.

        An array of objects remains a numpy array, or becomes its object if it has no axes.
        """
        if array.dtype == OBJECT:
            return array[()]
        if self.framework == "numpy":
            return _to_numpy(array, spec)
        return self({name: array}, {} if spec is None else {name: spec})[name]

    def _tensor(self, array: Any, spec: Spec | None) -> torch.Tensor:
        tensor: torch.Tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
        if spec is not None and spec.is_bfloat16:
            tensor = tensor.view(torch.bfloat16)
        elif spec is not None and spec.dtype.kind == "u" and spec.dtype.name in UNSIGNED:
            tensor = tensor.view(UNSIGNED[spec.dtype.name])  # stored as signed on a device
        return tensor if self.device is None else tensor.to(self.device)

    def _converted(self, arrays: Mapping[str, Any], specs: Mapping[str, Spec]) -> list[Any]:
        if self.framework == "numpy":
            if not any(spec.is_bfloat16 for spec in specs.values()):  # nearly always, and then all are of numpy
                return [a if type(a) is np.ndarray else _host(a, specs.get(name)) for name, a in arrays.items()]
            return [_to_numpy(array, specs.get(name)) for name, array in arrays.items()]
        bits = {name for name in arrays if name in specs and specs[name].is_bfloat16}
        host = {name: _host(array, specs.get(name)) for name, array in arrays.items()}
        library = self._find_library()
        if self.framework == "jax":
            host = {name: fit_to_jax(name, array) for name, array in host.items()}
        dtypes = [library.dtype_from_name("bfloat16") if n in bits else library.dtype(a.dtype) for n, a in host.items()]
        return list(library.hand_over(list(host.values()), dtypes, library.device(self.device)))

    def _find_library(self) -> Any:
        if self._library is None:
            if self.framework == "jax":
                from rlstructs.frameworks.jax import Jax

                self._library = Jax()
            else:
                from rlstructs.frameworks.warp import Warp

                self._library = Warp()
        return self._library

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_library": None}


def _host(array: Any, spec: Spec | None) -> np.ndarray:
    """Converts values of a column, of numpy or torch, to a numpy array."""
    if isinstance(array, np.ndarray):
        return array
    values: np.ndarray = array.cpu().numpy()
    return values if spec is None else values.view(spec.dtype)


def _to_numpy(array: Any, spec: Spec | None) -> np.ndarray:
    """Converts a column's values to numpy; bfloat16 becomes float32."""
    values = _host(array, spec)
    return from_bits(values) if spec is not None and spec.is_bfloat16 else values


class GatheredColumn(NDArrayOperatorsMixin):
    """A column of a buffer, `(n, ...)`, whose rows are gathered when indexed.

    It has no bytes of its own. Any other operation of a numpy array copies the whole column.

    Args:
        shape, dtype: of the column.
        gather: returns the values of row ids (n,).
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, gather: Callable[[np.ndarray], np.ndarray]) -> None:
        self.shape, self.ndim, self.dtype, self._gather = shape, len(shape), dtype, gather

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        return self._at(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Copies the whole column, and sets rows of the copy.

        From then on this object has the copy.
        """
        own = np.array(self)
        own[index], self._gather = value, own.__getitem__

    def __iter__(self) -> Iterator[Any]:
        return iter(np.asarray(self))

    def _at(self, index: Any) -> Any:
        """Returns the values at an index, in private memory."""
        n = len(self)
        if type(index) is int and -n <= index < n:
            return self._gather(np.array([index % n]))[0]
        first, *inside = index if isinstance(index, tuple) and index else (index,)
        if isinstance(first, slice):
            return self._gather(np.arange(len(self))[first])[(slice(None), *inside)]
        first = np.asarray(first)
        if first.dtype == bool and first.ndim and first.shape == self.shape[: first.ndim]:
            # numpy replaces a mask, of several axes too, by the indexes where it is true.
            first, *others = first.nonzero()
            inside = [*others, *inside]
        if first.dtype.kind not in "iu":  # None, ..., and indexes that numpy refuses
            return np.asarray(self)[index]
        values = self._gather(self._rows(first).reshape(-1))
        # Beside other arrays, numpy needs one of the same shape.
        at = np.arange(first.size).reshape(first.shape)
        return values[(at, *inside)] if inside else values.reshape((*first.shape, *self.shape[1:]))[()]

    def _rows(self, index: np.ndarray) -> np.ndarray:
        """Converts integers to row ids, int64 of the same shape."""
        n = len(self)
        if index.size and (index.min() < -n or index.max() >= n):
            np.arange(n)[index]  # raises as numpy does
        at = index.astype(np.int64, copy=False)
        return np.asarray(np.where(at < 0, at + n, at))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._gather(np.arange(len(self))).astype(self.dtype if dtype is None else dtype, copy=False)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **settings: Any) -> Any:
        whole = (np.asarray(each) if isinstance(each, GatheredColumn) else each for each in inputs)
        out = settings.pop("out", ())
        if all(each is not self for each in out):
            return getattr(ufunc, method)(*whole, **settings, **({"out": out} if out else {}))
        own = np.array(self)  # what it shows from then on
        getattr(ufunc, method)(*whole, out=own, **settings)
        self._gather = own.__getitem__
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(np.asarray(self), name)

    def __repr__(self) -> str:
        return repr(np.asarray(self))
