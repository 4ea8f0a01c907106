"""Leaves windows, fonts and clocks of pygame out: environments of gymnasium make them again when they next render."""

from __future__ import annotations

from typing import Any

from rlstructs.envs.snapshots.adapters import Adapter


def _leave_out(thing: Any) -> None:
    return None


NAMES = ("pygame.freetype.Font", "pygame.surface.Surface", "pygame.time.Clock")
ADAPTERS = dict.fromkeys(NAMES, Adapter(_leave_out, _leave_out))
