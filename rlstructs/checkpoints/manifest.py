"""The file that says what is in a checkpoint, and of which step it is."""

from __future__ import annotations

import json
import secrets
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlstructs.checkpoints.folder import MANIFEST
from rlstructs.files import json_text
from rlstructs.files.opening import name_damage, read_bytes

FORMAT, VERSION = "rlstructs.Checkpoint", 1


def write_manifest(folder: Path, step: int, parts: Mapping[str, Any]) -> None:
    """Writes the manifest of a checkpoint.

    Args:
        folder: of the checkpoint.
        step: its step.
        parts: label -> what `Part.save` returned.
    """
    known = {"format": FORMAT, "version": VERSION, "id": secrets.token_hex(16), "step": step, "parts": parts}
    text = json.dumps(known)
    (folder / MANIFEST).write_text(json.dumps({"checksum": zlib.crc32(text.encode()), "manifest": text}))


def read_identity(folder: Path) -> bytes:
    """Reads the bytes of a manifest, whose random id no other checkpoint has.

    Raises:
        FileNotFoundError: there is no manifest.
    """
    return read_bytes(folder / MANIFEST)


def read_manifest(folder: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """Reads a manifest: the step, and the parts by label.

    Raises:
        FileNotFoundError: there is none.
        FileError: it is damaged, or of another version.
    """
    path = folder / MANIFEST
    with name_damage(f"{path}: damaged"):
        outer = json_text.parse(read_bytes(path))
        if zlib.crc32(outer["manifest"].encode()) != outer["checksum"]:
            raise ValueError("its checksum is wrong")
        manifest = json_text.parse(outer["manifest"])
        if manifest["format"] != FORMAT or manifest["version"] != VERSION:
            raise ValueError(f"it is of version {manifest['version']!r}, this program reads version {VERSION}")
        step, parts = manifest["step"], manifest["parts"]
        if type(step) is not int or not all(type(entry) is dict for entry in parts.values()):
            raise ValueError("it does not say what is in the checkpoint")
    return step, parts
