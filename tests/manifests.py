"""Changes what the manifest of a checkpoint says."""

from __future__ import annotations

import json
import zlib


def change_manifest(checkpoint, change):
    """Calls `change` with the manifest, a dict, and writes it again with its checksum."""
    path = checkpoint / "checkpoint.json"
    known = json.loads(json.loads(path.read_text())["manifest"])
    change(known)
    text = json.dumps(known)
    path.write_text(json.dumps({"checksum": zlib.crc32(text.encode()), "manifest": text}))
