"""Folders of files that follow one another: `part_000000.npz`, `part_000001.npz`, ..."""

from __future__ import annotations

import re
from pathlib import Path

from rlstructs.errors import FileError

_NAME = re.compile(r"part_(\d{6,})\.npz")


def part_path(folder: Path, number: int) -> Path:
    """The path of a part, counted from 0."""
    return folder / f"part_{number:06}.npz"


def list_parts(folder: str | Path) -> list[Path]:
    """The parts in a folder, in order.

    Raises:
        FileNotFoundError: there is no such folder.
        FileError: it has no part, or one is missing before the last.
    """
    folder = Path(folder)
    numbers = sorted(int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)))
    if not numbers:
        raise FileError(f"{folder}: a folder without part_000000.npz, which save_rollouts writes")
    if numbers != list(range(len(numbers))):
        missing = next(number for number, found in enumerate(numbers) if number != found)
        raise FileError(f"{folder}: {part_path(folder, missing).name} is missing")
    return [part_path(folder, number) for number in numbers]
