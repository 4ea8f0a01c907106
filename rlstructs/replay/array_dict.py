"""`ArrayDict`: what a sample is when it is no `DictTensor`."""

from __future__ import annotations

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

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={_show(value)}" for name, value in self.items())
        return f"{type(self).__name__}({shown})"


def _show(value: Any) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return repr(value) if shape is None else f"{tuple(shape)} {dtype}"
