"""Leaves windows and clocks of pygame out: environments of gymnasium make them again when they next render."""

from __future__ import annotations

from typing import Any

from rlstructs.envs.snapshots.adapters import Adapter


def _leave_out(thing: Any) -> None:
    return None


ADAPTERS = dict.fromkeys(("pygame.surface.Surface", "pygame.time.Clock"), Adapter(_leave_out, _leave_out))
