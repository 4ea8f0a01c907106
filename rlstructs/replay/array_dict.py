"""`ArrayDict` and `RowDict`: what a sample is when it is no `DictTensor`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ArrayDict(dict[str, Any]):
    """A dict, name -> array. What is nested has names joined with `/`, and is reached as such too.

    Attributes are items. What is nested comes as a dict of its own: `batch["obs/speed"] = 0` changes this one,
    `batch.obs.speed = 0` does not.

    Example:
        >>> batch = ArrayDict({"obs/image": 1, "obs/speed": 2, "act": 3})
        >>> batch["obs/speed"], batch["obs"]["speed"], batch.obs.speed, batch.act
        (2, 2, 2, 3)
        >>> "obs" in batch, "info" in batch
        (True, False)
    """

    def __missing__(self, name: str) -> Any:
        start = f"{name}/"
        inside = {key[len(start) :]: value for key, value in self.items() if key.startswith(start)}
        if not inside:
            raise KeyError(f"no {name!r} in this batch, there are {sorted(self)}")
        return ArrayDict(inside)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or any(key.startswith(f"{name}/") for key in self)

    def get(self, name: str, default: Any = None) -> Any:
        """What is there under a name, or `default`."""
        try:
            return self[name]
        except KeyError:
            return default

    def __setitem__(self, name: str, value: Any) -> None:
        """Puts something under a name, in the place of what was nested there; what is nested gets names of its own."""
        for key in [key for key in self if key.startswith(f"{name}/")]:
            del self[key]
        if not isinstance(value, Mapping):
            super().__setitem__(name, value)
            return
        super().pop(name, None)
        for key, inside in value.items():
            self[f"{name}/{key}"] = inside

    def pop(self, name: str, *default: Any) -> Any:
        """Takes out what is there under a name, all that is nested too."""
        if name not in self or super().__contains__(name):
            return super().pop(name, *default)
        inside = self[name]
        for key in inside:
            del self[f"{name}/{key}"]
        return inside

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(str(error.args[0])) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        try:
            self.pop(name)
        except KeyError as error:
            raise AttributeError(str(error.args[0])) from None

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={_show(value)}" for name, value in self.items())
        return f"{type(self).__name__}({shown})"


class RowDict(ArrayDict):
    """An `ArrayDict` of arrays with a row each: its length is theirs, and an index that is no name picks rows.

    As of a `DictTensor`, iterating gives the names.

    Example:
        >>> import numpy as np
        >>> batch = RowDict({"obs/x": np.arange(4), "rew": np.ones(4)})
        >>> len(batch), list(batch), batch[1:3], batch.obs[[3, 0]].x
        (4, ['obs/x', 'rew'], RowDict(obs/x=(2,) int64, rew=(2,) float64), array([3, 0]))
    """

    def __len__(self) -> int:
        first = next((value for value in self.values() if hasattr(value, "shape")), ())
        return len(first)

    def __bool__(self) -> bool:
        """Whether it holds anything, of which there may be no rows, or a single one without an axis for rows."""
        return any(True for _ in self)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            return super().__getitem__(index)
        picked = {name: value[index] if hasattr(value, "shape") else value for name, value in self.items()}
        return type(self)(picked)

    def __missing__(self, name: str) -> Any:
        return RowDict(super().__missing__(name))


def _show(value: Any) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return repr(value) if shape is None else f"{tuple(shape)} {dtype}"
