"""`set_module` and `export_lazily` for rlstructs, and the check that `workers` is the package that belongs to it.

Packages, and modules with exported classes, import this before anything of `workers`.
"""

from __future__ import annotations

import workers

if not getattr(workers, "__rlstructs_workers__", False):
    raise ImportError(
        f"rlstructs needs its own package 'workers', but found {getattr(workers, '__file__', workers)!r} "
        "in its place; rename that file or folder"
    )

from workers.public_names import export_lazily, set_module

__all__ = ["export_lazily", "set_module"]
