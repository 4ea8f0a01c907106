"""Environment ids that a program registered with gymnasium, made known to its workers."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import cloudpickle


def registered() -> list[bytes]:
    """The registrations of this process, pickled."""
    registration = sys.modules.get("gymnasium.envs.registration")
    if registration is None:
        return []
    specs = list(registration.registry.values())
    try:
        return [cloudpickle.dumps(specs)]
    except Exception:  # one of them cannot travel: the others do
        return [data for spec in specs for data in _pickled([spec])]


def register(pickled: list[bytes]) -> None:
    """Registers what `registered` gave, in place of gymnasium's own; other ids that are known here stay."""
    if pickled:
        # The modules that register these ids are imported later, and register them again.
        warnings.filterwarnings("ignore", ".*Overriding environment")
    for data in pickled:
        specs = cloudpickle.loads(data)
        from gymnasium.envs.registration import registry

        for spec in specs:
            if spec.id not in registry or _is_gymnasiums(registry[spec.id]):
                registry[spec.id] = spec


def _is_gymnasiums(spec: Any) -> bool:
    return isinstance(spec.entry_point, str) and spec.entry_point.startswith("gymnasium.")


def _pickled(specs: list[Any]) -> list[bytes]:
    try:
        return [cloudpickle.dumps(specs)]
    except Exception:
        return []
