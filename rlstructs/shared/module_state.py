"""The state of a `torch.nn.Module` without the names that wrappers add to it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.utils import parametrize

from rlstructs.errors import SpecError

# The names under which `torch.compile` and the parallel wrappers hold the module that they wrap.
COMPILED, PARALLEL = "_orig_mod", "module"


class _Place(NamedTuple):
    """A module in a network.

    Attributes:
        prefix: how the keys of its tensors begin.
        plain: how they begin in the network without wrappers; None if the module is not in that network.
        module: the module.
    """

    prefix: str
    plain: str | None
    module: torch.nn.Module


def plain_state(module: torch.nn.Module) -> dict[str, Any]:
    """Returns the state dict that a module would have without its wrappers.

    Names that `torch.compile`, `DataParallel`, `DistributedDataParallel` and `AveragedModel` add are removed at any
    depth. Parametrisations are applied: there is `weight` in place of `parametrizations.weight.original`.

    Example:
        >>> network = torch.nn.Sequential(torch.nn.DataParallel(torch.nn.Linear(1, 1)))
        >>> list(network.state_dict()), list(plain_state(network))
        (['0.module.weight', '0.module.bias'], ['0.weight', '0.bias'])
    """
    state, places = module.state_dict(), {place.prefix: place for place in _places(module, "", "")}
    found: OrderedDict[str, Any] = OrderedDict()
    for key, value in state.items():
        place = _place_of(key, places)
        if place.plain is not None:
            found[place.plain + key[len(place.prefix) :]] = value
    for place in places.values():
        for name, value in _computed_tensors(place.module):
            found[f"{place.plain}{name}"] = value
    # `load_state_dict` looks up the version of each module here.
    versions: dict[str, Any] = getattr(state, "_metadata", {})
    found._metadata = {  # type: ignore[attr-defined]
        place.plain[:-1]: versions[place.prefix[:-1]]
        for place in places.values()
        if place.plain is not None and place.prefix[:-1] in versions
    }
    return found


def copy_plain(module: torch.nn.Module) -> torch.nn.Module:
    """Copies a module without its wrappers and parametrisations: the copy loads what `plain_state` returns.

    Raises:
        TypeError: it cannot be copied.
    """
    try:
        return _strip(copy.deepcopy(module))
    except Exception as error:
        raise TypeError(f"agent: a {type(module).__name__} cannot be copied: {error}") from error


def _strip(module: torch.nn.Module) -> torch.nn.Module:
    """Removes wrappers and parametrisations, in place; returns the plain module."""
    while (wrapped := _wrapped_name(module)) is not None:
        module = getattr(module, wrapped)
    if _is_parametrised(module):
        for name in list(module.parametrizations):  # type: ignore[arg-type]
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    for name, child in module.named_children():
        module._modules[name] = _strip(child)
    return module


def update_agent(agent: Any, info: Any) -> None:
    """Calls `agent.update(info)`.

    Raises:
        SpecError: the agent raised an error, which is the cause, and the update has the state dict of a wrapped module.
        Exception: any other error of the agent.
    """
    try:
        agent.update(info)
    except Exception as error:
        found = next(_wrapped_keys(info), None)
        if found is None:
            raise
        raise SpecError(
            f"update: the agent could not take the state dict of a {found[1]} (it has {found[0]!r}): call "
            f"update(module), which sends the plain module's state. The agent raised {type(error).__name__}: {error}"
        ) from error


def _wrapped_keys(info: Any) -> Iterator[tuple[str, str]]:
    """Yields keys that only a wrapped module has, each with the kind of module."""
    if isinstance(info, Mapping):
        names = [key for key in info if isinstance(key, str)]
        yield from ((key, "compiled module") for key in names if COMPILED in key.split("."))
        if names and all(key.startswith(f"{PARALLEL}.") or key == "n_averaged" for key in names):
            yield names[-1], "wrapped module"
        yield from (each for value in info.values() for each in _wrapped_keys(value))
    elif isinstance(info, (list, tuple)):
        yield from (each for value in info for each in _wrapped_keys(value))


def _wrapped_name(module: torch.nn.Module) -> str | None:
    """Returns the name under which a wrapper holds its module.

    None if the module is not a wrapper.
    """
    if COMPILED in module._modules:
        return COMPILED
    parallel = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel, torch.optim.swa_utils.AveragedModel)
    return PARALLEL if isinstance(module, parallel) else None


def _places(module: torch.nn.Module, prefix: str, plain: str) -> Iterator[_Place]:
    """Yields a module and all modules below it.

    Below a wrapper it yields only the wrapped module, below parametrisations nothing.
    """
    wrapped = _wrapped_name(module)
    if wrapped is not None:
        yield _Place(prefix, None, module)  # for its own tensors, such as `n_averaged`
        yield from _places(getattr(module, wrapped), f"{prefix}{wrapped}.", plain)
        return
    yield _Place(prefix, plain, module)
    for name, child in module._modules.items():
        if child is None:
            continue
        if name == "parametrizations" and _is_parametrised(module):
            yield _Place(f"{prefix}{name}.", None, child)
        else:
            yield from _places(child, f"{prefix}{name}.", f"{plain}{name}.")


def _place_of(key: str, places: Mapping[str, _Place]) -> _Place:
    """Finds the innermost module to which a key of the state belongs."""
    prefix = key
    while prefix and prefix not in places:
        prefix = prefix[: prefix[:-1].rfind(".") + 1]
    return places[prefix]


def _is_parametrised(module: torch.nn.Module) -> bool:
    """Whether torch's parametrisations compute some of a module's tensors.

    A submodule of the name `parametrizations` alone does not count.
    """
    parts = getattr(module, "parametrizations", None)
    return isinstance(parts, torch.nn.ModuleDict) and all(
        isinstance(part, parametrize.ParametrizationList) for part in parts.values()
    )


def _computed_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the name and the value of each tensor that a module's parametrisations compute."""
    if _wrapped_name(module) is not None or not _is_parametrised(module):
        return
    for name, parametrization in module.parametrizations.items():  # type: ignore[operator, union-attr]
        # In evaluation mode, because a spectral norm in training mode changes at every access.
        modes = [(part, part.training) for part in parametrization.modules()]
        parametrization.eval()
        try:
            with torch.no_grad():
                yield name, parametrization().detach().clone()
        finally:
            for part, mode in modes:
                part.training = mode
