"""Stores in memory or in folders, and the manifest of a folder.

A folder that a program left, or was killed with, has every row that was whole. Their episodes end there: nothing of
another program follows them. Priorities and the random stream are not in it; files of `save` have them.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlstructs.checks import UNKNOWN, clean_text
from rlstructs.errors import FileError, SpecError
from rlstructs.replay.keep.checks import check_counters, check_episodes, spec_in
from rlstructs.replay.rows.columns import Columns
from rlstructs.replay.rows.compressed import CompressedBlock
from rlstructs.replay.rows.episodes import EPISODE, Episodes
from rlstructs.replay.rows.lanes import ALL, EDITS, FLOOR, HEAD, LANE, REWRITES, Counters
from rlstructs.replay.rows.linked import LinkedColumns, make_link
from rlstructs.replay.rows.on_disk import CHECKSUM, MANIFEST, Disk, Existing, FileBlock, checksum_of
from rlstructs.replay.rows.records import Record
from rlstructs.replay.rows.spec import Compression, Setting, Spec
from rlstructs.replay.rows.store import Storage
from rlstructs.workers.limits import keep_freed_memory

FORMAT, VERSION = "rlstructs rows", 1


def make_storage(
    kind: str,
    n_lanes: int,
    capacity: int,
    order: str = LANE,
    columns: Columns | None = None,
    compression: Setting = None,
    path: str | Path | None = None,
) -> Storage:
    """Makes a store, or opens that of a folder.

    Args:
        kind: of the memory: a folder is opened by the same kind.
        n_lanes, capacity, order, columns: see `Storage`.
        compression: which columns are compressed.
        path: a folder for the rows; None for memory.

    Raises:
        SpecError: the settings do not go together, or the folder holds something else.
        StateError: another memory has the folder open.
        FileError: the folder is damaged, of another version, or of a memory of another kind or size.
    """
    if columns is not None and not columns.on_host and (path is not None or compression is not None):
        what, where = "path" if compression is None else "compression", getattr(columns, "device", None)
        raise SpecError(f"{what} needs rows in host memory, and they lie on {where}: give device='cpu'")
    keep_freed_memory()  # for batches of frames
    disk = None if path is None else Disk(path)
    storage = Storage(n_lanes, capacity, order=order, backing=disk, columns=columns)
    storage.columns.compression = Compression.of(compression)
    if disk is not None:
        _open(storage, disk, kind)
    return storage


def _open(storage: Storage, disk: Disk, kind: str) -> None:
    columns = storage.columns
    sizes = {"kind": kind, "n_lanes": columns.n_lanes, "capacity": columns.capacity, "order": columns.order}
    sizes["compression"] = columns.compression.to_json()
    if disk.held is not None:
        try:
            _restore(storage, disk, disk.held, sizes)
        except FileError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            text = f"{disk.path / MANIFEST}: {type(error).__name__}: {clean_text(error)}"
            raise FileError(text) from error
    kept = weakref.ref(storage)  # a clock lives no longer than its store, but may be collected later

    def write() -> None:
        if (present := kept()) is not None:
            disk.write({"format": FORMAT, "version": VERSION, **sizes, **_describe(present)})

    storage.clock.on_columns = write
    write()


def _describe(storage: Storage) -> dict[str, Any]:
    """Returns the part of a manifest that changes with the columns."""
    columns, found = storage.columns, dict[str, Any]()
    for name, spec in columns.specs.items():
        block: Any = columns._blocks[name]
        own = {"dtype": spec.dtype.name, "shape": spec.shape, "fill": spec.fill, "is_bfloat16": spec.is_bfloat16}
        inside: Any = block.block if isinstance(block, Record) else block
        own["record"] = list(block.specs) if isinstance(block, Record) else None
        if isinstance(block, CompressedBlock):
            own["files"] = block.files
        else:
            own |= {"file": inside.file, "by_row": isinstance(block, FileBlock)}
        if (link := columns.links.get(name)) is not None:
            own |= {"source": link.source, "link": link.file}
        found[name] = own
    episodes: Any = None if storage.episodes is None else storage.episodes.columns._blocks[EPISODE]
    counters: Any = storage.counters._block
    files = {"counters": counters.file, "episodes": episodes and episodes.file}
    return {"capacity": columns.capacity, **files, "columns": found}


def _restore(storage: Storage, disk: Disk, held: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    """Makes a new store use the files of a manifest."""
    where = disk.path / MANIFEST
    if held.get("format") != FORMAT or held.get("version") != VERSION:
        text = clean_text(f"version {held.get('version')!r} of {held.get('format')!r}")
        raise FileError(f"{where}: is {text}, expected version {VERSION} of {FORMAT!r}")
    if held.get(CHECKSUM) != checksum_of(held):
        raise FileError(f"{where}: its checksum is another one; it is damaged")
    if (own := {name: held.get(name) for name in sizes}) != sizes:
        raise FileError(f"{where}: holds {clean_text(_shown(own))}, this memory is {_shown(sizes)}")
    columns = storage.columns
    assert isinstance(columns, LinkedColumns)
    storage.counters = Counters(columns.n_lanes, Existing(disk, held["counters"]))
    _restore_columns(columns, disk, held["columns"])
    storage._map()
    if held["episodes"] is not None:
        storage.episodes = Episodes(storage.ring, columns.order, Existing(disk, held["episodes"]))
        storage.episodes.columns.clock, storage.episodes.columns._backing = storage.clock, disk
    _settle(storage)


def _restore_columns(columns: LinkedColumns, disk: Disk, held: Mapping[str, Any]) -> None:
    specs = {name: _spec(name, each) for name, each in held.items()}
    blocks: dict[str, Any] = {}
    for name, each in held.items():
        if (group := each["record"]) is not None:
            allocate = partial(Existing(disk, each["file"]).allocate, "record")
            blocks[name] = blocks.get(group[0]) or Record(
                {other: specs[other] for other in group}, columns.n_rows, allocate
            )
        elif (level := columns.compression.level_of(each.get("source", name), specs[name])) is not None:
            files, most = Existing(disk, *each["files"]), columns.compression.max_bytes
            blocks[name] = block = CompressedBlock(name, specs[name], columns, level, files, most)
            block.recover()
        elif each["by_row"]:
            if not disk.is_large(specs[name]):
                raise ValueError(f"column {name!r} is too small to be read by row: {specs[name].nbytes} bytes")
            file = disk.check(each["file"], specs[name].nbytes * columns.n_rows)
            blocks[name] = FileBlock(disk, file, specs[name], columns.n_rows)
        else:
            blocks[name] = Existing(disk, each["file"]).allocate(name, specs[name].nbytes * columns.n_rows)
    for name, each in held.items():
        if (source := each.get("source")) is not None:
            columns.links[name] = make_link(columns, source, specs[source], Existing(disk, each["link"]))
    columns._blocks, columns.specs = blocks, specs
    columns._map()


def _settle(storage: Storage) -> None:
    """Ends the episodes of the program that is gone."""
    ring, counters = storage.ring, storage.counters
    held = ring.counters.copy()
    held[FLOOR] = np.minimum(held[FLOOR], held[HEAD])  # rows of workers may have been taken back
    check_counters(held, ring.n_lanes, ring.capacity)
    ring.floor[...] = held[FLOOR]
    if storage.episodes is not None:
        storage.episodes.reopen(np.flatnonzero(ring.reserved > ring.head))
        check_episodes(storage.episodes.columns.cells[EPISODE], ring)
    storage.clock.expose(False)
    storage.clock.count(REWRITES, EDITS)
    ring.skip_lost(ALL)
    counters.continuity.restore(np.full(ring.n_lanes, UNKNOWN), ring.head)
    if storage.episodes is not None:
        storage.end_episodes()


def _spec(name: str, each: Mapping[str, Any]) -> Spec:
    spec, fill = spec_in(name, each["dtype"], each["shape"], each["is_bfloat16"]), each["fill"]
    if spec.is_object or type(fill) not in (type(None), bool, int, float):
        raise ValueError(f"column {name!r} is {spec.dtype}, and unwritten rows {fill!r}")
    if fill is not None:
        spec.dtype.type(fill)  # raises unless a row can have it
    return replace(spec, fill=fill)


def _shown(sizes: Mapping[str, Any]) -> str:
    text = "{kind!r} of {n_lanes} lanes of {capacity} rows in order {order!r}".format(**sizes)
    return text if sizes["compression"] is None else f"{text}, compression {sizes['compression']!r}"
