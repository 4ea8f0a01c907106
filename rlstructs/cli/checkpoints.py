"""Describes checkpoints of a training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlstructs.checkpoints.folder import LATEST, MANIFEST, CheckpointFolder
from rlstructs.checkpoints.manifest import read_manifest
from rlstructs.checks import LONGEST_NAME, clean_text


def has_checkpoints(path: Path) -> bool:
    """Whether this is a checkpoint, or a folder of some."""
    return path.is_dir() and ((path / MANIFEST).exists() or (path / LATEST).exists())


def describe_checkpoints(path: Path) -> Iterator[str]:
    """Describes a checkpoint, or all in a folder, line by line.

    Raises:
        FileError, FileNotFoundError: it is damaged.
    """
    for checkpoint in [path] if (path / MANIFEST).exists() else CheckpointFolder(path).find_all():
        step, parts = read_manifest(checkpoint)
        nbytes = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
        yield f"{checkpoint}: checkpoint of step {step:,}, {nbytes / 1e6:,.2f} MB"
        for label, entry in parts.items():
            where = clean_text(str(entry.get("file", entry.get("folder"))), LONGEST_NAME)
            kind = f", a {clean_text(str(entry['class']), LONGEST_NAME)}" if "class" in entry else ""
            yield f"  {clean_text(label, LONGEST_NAME)}: {where}{kind}"
