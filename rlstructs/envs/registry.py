"""Environment ids that a program registered with gymnasium, made known to its workers."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import cloudpickle


def registered() -> list[bytes]:
    """The registrations of this process that are not gymnasium's own, pickled."""
    registration = sys.modules.get("gymnasium.envs.registration")
    if registration is None:
        return []
    specs = [
        spec
        for spec in registration.registry.values()
        if not (isinstance(spec.entry_point, str) and spec.entry_point.startswith("gymnasium."))
    ]
    if not specs:
        return []
    try:
        return [cloudpickle.dumps(specs)]
    except Exception:  # one of them cannot travel: the others do
        return [data for spec in specs for data in _pickled([spec])]


def register(pickled: list[bytes]) -> None:
    """Registers what `registered` gave, unless the id is known here."""
    if pickled:
        # The modules that register these ids are imported later, and register them again.
        warnings.filterwarnings("ignore", ".*Overriding environment")
    for data in pickled:
        specs = cloudpickle.loads(data)
        from gymnasium.envs.registration import registry

        for spec in specs:
            registry.setdefault(spec.id, spec)


def _pickled(specs: list[Any]) -> list[bytes]:
    try:
        return [cloudpickle.dumps(specs)]
    except Exception:
        return []
