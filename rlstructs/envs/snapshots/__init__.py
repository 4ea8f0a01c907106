"""The public names of `rlstructs.exact`: states of environments within their episodes.

`register` adds functions that save the objects of a simulator; those for ALE and MuJoCo are built in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlstructs.workers.public_names import export_lazily

if TYPE_CHECKING:
    from rlstructs.exact.env_state import EnvState, bring_back, take_state
    from rlstructs.exact.pickler import register

_EXPORTS = {
    "EnvState": "env_state",
    "bring_back": "env_state",
    "register": "pickler",
    "take_state": "env_state",
}

__all__ = ["EnvState", "bring_back", "register", "take_state"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = export_lazily("rlstructs.exact", _EXPORTS)
