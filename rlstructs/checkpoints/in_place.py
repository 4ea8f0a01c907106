"""Checks whether the values of a checkpoint fit, and writes them in place.

Other objects may hold the present values: an optimizer its parameters, a learner an array of statistics. A value of
another kind or shape replaces the present one, unless that is a tensor that is learned.
"""

from __future__ import annotations

import bisect
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from rlstructs.errors import FileError

# Collections that are refilled in place; a tuple is replaced if one of its items changes.
FILLED = (dict, OrderedDict, Counter, list, deque, set)


class Plan:
    """Finds where each value goes; nothing changes before `write`."""

    def __init__(self) -> None:
        self._writes: list[Callable[[], None]] = []
        self._contents: dict[int, Any] = {}  # the new contents of collections, by their ids
        # The ends of the memory that is written, sorted by its starts, and the values that are written there.
        self._starts: list[int] = []
        self._claims: list[tuple[int, Any]] = []

    def write(self) -> None:
        """Writes all values."""
        for write in self._writes:
            write()

    def fit(self, name: str, own: Any, saved: Any) -> Any:
        """Plans to write a value into an object.

        Args:
            name: of the value, for messages.
            own: the present object.
            saved: the value.

        Returns:
            The object to use from then on: `own`, or `saved` if it cannot be written into `own`.

        Raises:
            FileError: `own` is or holds a learned tensor, and the value does not fit.
        """
        if isinstance(own, (torch.Tensor, np.ndarray)):
            if _is_like(own, saved) and self._claim(own, saved):
                self._writes.append(partial(_copy, own, saved))
                return own
        elif type(own) is type(saved) and type(own) in (*FILLED, tuple):
            return self._fit_collection(name, own, saved)
        _check_free(name, own, saved)
        return saved

    def _fit_collection(self, name: str, own: Any, saved: Any) -> Any:
        if isinstance(own, dict):
            content: Any = {
                key: self.fit(f"{name}[{key!r}]", own[key], value) if key in own else value
                for key, value in saved.items()
            }
            left = [(f"{name}[{key!r}]", value) for key, value in own.items() if key not in saved]
        elif isinstance(own, set):
            content, left = saved, []
        else:
            values = enumerate(saved)
            content = [self.fit(f"{name}[{at}]", own[at], each) if at < len(own) else each for at, each in values]
            left = [(f"{name}[{at}]", own[at]) for at in range(len(saved), len(own))]
        for its_name, value in left:
            _check_free(its_name, value, None)
        if type(own) is tuple:
            return own if _are_same(own, content) else tuple(content)
        is_other = isinstance(own, deque) and own.maxlen != saved.maxlen
        if is_other or not _are_same(self._contents.setdefault(id(own), content), content):
            return deque(content, saved.maxlen) if is_other else type(own)(content)
        self._writes.append(partial(_fill, own, content))
        return own

    def _claim(self, own: Any, saved: Any) -> bool:
        """Claims memory for a saved value; False if another value already claims it.

        Two names of one array here may be two arrays in the checkpoint.
        """
        if not saved.size if isinstance(saved, np.ndarray) else not saved.numel():
            return True
        start, end = _find_bytes(own)
        at = bisect.bisect_left(self._starts, start)
        for other in range(max(0, at - 1), min(at + 1, len(self._starts))):
            its_end, its_value = self._claims[other]
            if self._starts[other] < end and start < its_end:
                return (self._starts[other], its_end) == (start, end) and _bits(saved) == _bits(its_value)
        self._starts.insert(at, start)
        self._claims.insert(at, (end, saved))
        return True


def keep(own: Any) -> Callable[[], None]:
    """Copies the contents of an object; returns a function that writes them back."""
    writes = list(_list_copies(own))

    def put_back() -> None:
        for write in writes:
            write()

    return put_back


def _list_copies(own: Any) -> Iterator[Callable[[], None]]:
    if isinstance(own, torch.Tensor) and _is_writable(own):
        yield partial(_copy, own, own.detach().clone())
    elif isinstance(own, np.ndarray) and _is_writable(own):
        yield partial(_copy, own, own.copy())
    elif type(own) in FILLED:
        yield partial(_fill, own, own.copy())
    for _, value in _list_values("", own):
        yield from _list_copies(value)


def _list_values(name: str, own: Any) -> Iterator[tuple[str, Any]]:
    """Yields the names and values in a collection."""
    if isinstance(own, dict):
        yield from ((f"{name}[{key!r}]", value) for key, value in own.items())
    elif isinstance(own, (list, tuple, deque)):
        yield from ((f"{name}[{at}]", value) for at, value in enumerate(own))


def _copy(own: Any, saved: Any) -> None:
    if isinstance(own, np.ndarray):
        own[...] = saved
    else:
        with torch.no_grad():
            own.copy_(saved)


def _fill(own: Any, content: Any) -> None:
    content = content.copy()
    own.clear()
    own.extend(content) if isinstance(own, (list, deque)) else own.update(content)


def _is_learned(own: Any) -> bool:
    """Whether this is a tensor that an optimizer may hold."""
    return isinstance(own, torch.nn.Parameter) or (isinstance(own, torch.Tensor) and own.is_leaf and own.requires_grad)


def _is_like(own: Any, saved: Any) -> bool:
    is_same_kind = isinstance(saved, np.ndarray if isinstance(own, np.ndarray) else torch.Tensor)
    if not is_same_kind or not _is_writable(own) or own.shape != saved.shape or own.dtype != saved.dtype:
        return False
    return isinstance(own, np.ndarray) or own.requires_grad or not saved.requires_grad


def _is_writable(own: Any) -> bool:
    if isinstance(own, np.ndarray):
        return bool(own.flags.writeable and 0 not in own.strides)
    if torch.nn.parameter.is_lazy(own) or own.layout is not torch.strided:
        return False
    if own.is_inference() or own.is_quantized or own.is_nested:
        return False
    return all(n <= 1 or step for n, step in zip(own.shape, own.stride(), strict=True))  # no element is repeated


def _check_free(name: str, own: Any, saved: Any) -> None:
    """Raises FileError if an object to be replaced is, or holds, a learned tensor."""
    if _is_learned(own):
        raise FileError(
            f"{name} is {_describe(saved)}, here {_describe(own)}, which others may hold: values can be written into "
            "it if shape and dtype are the same; give a network, or what else has a state_dict, as model="
        )
    for its_name, value in _list_values(name, own):
        _check_free(its_name, value, None)


def _describe(value: Any) -> str:
    if value is None:
        return "not in the checkpoint"
    if not isinstance(value, (torch.Tensor, np.ndarray)):
        return f"a {type(value).__name__}"
    if isinstance(value, torch.Tensor) and torch.nn.parameter.is_lazy(value):
        return f"a {type(value).__name__} without a shape"
    return f"a {type(value).__name__} of shape {tuple(value.shape)} and {str(value.dtype).removeprefix('torch.')}"


def _are_same(own: Any, content: Any) -> bool:
    """Whether two collections hold the same objects.

    Equal immutable objects count as the same.
    """
    if isinstance(own, dict):
        return [*own] == [*content] and _are_same([*own.values()], [*content.values()])
    if isinstance(own, set):
        return bool(own == content)
    return len(own) == len(content) and all(
        a is b or (type(a) is type(b) and isinstance(a, (int, float, complex, str, bytes)) and a == b)
        for a, b in zip(own, content, strict=True)
    )


def _find_bytes(own: Any) -> tuple[int, int]:
    """Returns the start and end addresses of a tensor's or array's memory."""
    if isinstance(own, np.ndarray):
        start, steps, size = own.__array_interface__["data"][0], [*own.strides], own.itemsize
    else:
        size = own.element_size()
        start, steps = own.data_ptr(), [step * size for step in own.stride()]
    reach = [(n - 1) * step for n, step in zip(own.shape, steps, strict=True)]
    return start + sum(min(0, each) for each in reach), start + sum(max(0, each) for each in reach) + size


def _bits(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    data: bytes = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return data


# Settings that an optimizer has or lacks by its algorithm, whatever the version of torch. Schedulers add none of these.
SETTINGS = {
    "alpha",
    "beta2_decay",
    "betas",
    "etas",
    "history_size",
    "lambd",
    "lr_decay",
    "momentum",
    "momentum_decay",
    "ns_steps",
    "rho",
}
# Optimizer state that has the shape of its parameter.
LIKE_PARAMETERS = {
    "acc_delta",
    "ax",
    "exp_avg",
    "exp_avg_sq",
    "exp_inf",
    "grad_avg",
    "max_exp_avg_sq",
    "momentum_buffer",
    "prev",
    "square_avg",
    "step_size",
    "sum",
}


def check_optimizer(label: str, owner: Any, state: Any) -> None:
    """Raises FileError if a state is certainly not one of this optimizer.

    The optimizer itself would load it.

    Does nothing for other objects. Any other exception means that `state` is not a state of an optimizer at all.
    """
    if not isinstance(owner, torch.optim.Optimizer):
        return
    found, own = state["param_groups"], owner.param_groups
    sizes, own_sizes = ([len(group["params"]) for group in groups] for groups in (found, own))
    if sizes != own_sizes:
        raise FileError(f"{label} has groups of {sizes} parameters, this one has {own_sizes}")
    settings, own_settings = (SETTINGS & {key for group in groups for key in group} for groups in (found, own))
    if settings != own_settings:
        raise FileError(f"{label} is another optimizer: it has {sorted(settings)}, this one has {sorted(own_settings)}")
    if not type(owner).__module__.startswith("torch.optim."):
        return
    numbers, parameters = ([each for group in groups for each in group["params"]] for groups in (found, own))
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in state["state"].get(number, {}).items():
            if key in LIKE_PARAMETERS and isinstance(value, torch.Tensor) and value.shape != parameter.shape:
                raise FileError(
                    f"{label} is of another network: {key!r} of parameter {number} is {tuple(value.shape)}, "
                    f"the parameter is {tuple(parameter.shape)}"
                )
