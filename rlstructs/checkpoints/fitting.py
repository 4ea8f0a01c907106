"""Checks whether the state of a network or optimizer fits the one that is to load it, before anything is loaded."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from rlstructs.errors import FileError

# Settings that an optimizer has or lacks by its algorithm, whatever the version of torch. Schedulers add none of these.
SETTINGS = {
    "alpha", "beta2_decay", "betas", "etas", "history_size", "lambd", "lr_decay", "momentum", "momentum_decay",
    "ns_steps", "rho",
}  # fmt: skip
# What torch's optimizers keep for each parameter in its shape.
LIKE_PARAMETERS = {
    "acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq", "momentum_buffer", "prev",
    "square_avg", "step_size", "sum",
}  # fmt: skip


def check_fits(label: str, owner: Any, state: Any) -> None:
    """Raises FileError if a state is certainly not one that a module or optimizer of torch can load.

    Another exception says that the state is none of such an object.
    """
    if isinstance(owner, torch.nn.Module):
        _check_module(label, owner, state)
    elif isinstance(owner, torch.optim.Optimizer):
        _check_optimizer(label, owner, state)


def _check_module(label: str, owner: torch.nn.Module, state: Mapping[str, Any]) -> None:
    difference = _find_difference(owner.state_dict(), state)
    if difference is None:
        return
    try:  # a module may adapt an old state as it loads it
        copy.deepcopy(owner).load_state_dict(state)
    except Exception as error:
        raise FileError(f"{label} is another network: {difference}") from error


def _find_difference(own: Mapping[str, Any], state: Mapping[str, Any]) -> str | None:
    if own.keys() != state.keys():
        return f"it and this one do not both have {sorted(own.keys() ^ state.keys())[:3]}"
    for key, value in own.items():
        found = tuple(getattr(state[key], "shape", ()))
        is_known = isinstance(value, torch.Tensor) and not torch.nn.parameter.is_lazy(value)
        if is_known and found != tuple(value.shape):
            return f"{key!r} is {found}, here {tuple(value.shape)}"
    return None


def _check_optimizer(label: str, owner: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
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
