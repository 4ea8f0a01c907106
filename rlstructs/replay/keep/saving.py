"""Saves and loads buffers: rows, counters, episodes, the sampler's state, and the random stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rlstructs.checks import clean_text
from rlstructs.errors import FileError, OutOfMemoryError
from rlstructs.files import layout
from rlstructs.files.archives import Reader
from rlstructs.replay.intake.roles import source_of
from rlstructs.replay.keep.checks import (
    Claims,
    check_counter_spec,
    check_counters,
    check_episodes,
    check_slots,
    following_in,
    generator_in,
    spec_in,
    to_save,
    whole,
)
from rlstructs.replay.keep.restoring import (
    EPISODES,
    INNER,
    LENGTHS,
    LINKS,
    MORE,
    OBJECTS,
    PACKED,
    RING,
    ROWS,
    SavedArrays,
    check_column,
    count_bytes,
    make_room,
    restore_columns,
)
from rlstructs.replay.keep.stored import Stored
from rlstructs.replay.rows import objects as object_files
from rlstructs.replay.rows.backing import available_bytes
from rlstructs.replay.rows.columns import Columns
from rlstructs.replay.rows.episodes import BYTES_PER_ROW, EPISODE
from rlstructs.replay.rows.linked import LinkedColumns, check_link
from rlstructs.replay.rows.objects import OBJECT
from rlstructs.replay.rows.spec import Spec
from rlstructs.replay.rows.store import Storage
from rlstructs.seeding import generator_state

# Settings of a buffer that may be in a file. Those in SIZES are at most the number of rows; those in READ_AT_ONCE may
# also be up to MOST_READ.
READ_AT_ONCE, MOST_READ = ("stack_num", "n_step"), 1024
SETTINGS = (
    "ignore_obs_next",
    "save_only_last_obs",
    "sample_avail",
    "framework",
    "gamma",
    "new_keys",
    "missing_keys",
    "compression",
    "alpha",
    "beta",
    "weight_norm",
    "horizon",
    "future_k",
    "main",
)
SIZES = ("size", "total_size", "buffer_num", "cached_buffer_num", "max_episode_length", *READ_AT_ONCE)


B = TypeVar("B", bound="Stored")
Arrays = dict[str, Any]
# Arrays by name, dtypes that numpy lacks, and the rest as JSON.
Contents = tuple[Arrays, dict[str, str], dict[str, Any]]
Found = tuple[SavedArrays, Mapping[str, Any], dict[str, Spec], dict[str, str]]


class Form:
    """The format of a buffer's contents in a file; files of memories have another.

    Attributes:
        has_every_slot: whether a file has all slots, those without rows too.
    """

    has_every_slot = False

    def kind(self, buffer: Any) -> str:
        """Returns the class in the header."""
        return type(buffer).__name__

    def name(self, name: str) -> str:
        """Returns the name in a file of an array of `contents`."""
        return name

    def group(self, arrays: str, number: int) -> str:
        """Returns a group's name in a folder of segments.

        A file may have several buffers, counted by `number`.
        """
        return f"{arrays}{number}"

    def write(self, buffer: Any, arrays: Arrays, dtypes: dict[str, str], state: dict[str, Any]) -> Contents:
        """Turns the contents of a buffer into those of a file."""
        return arrays, dtypes, state

    def read(self, buffer: Any, path: Any, arrays: SavedArrays, state: Mapping[str, Any]) -> Found:
        """Inverts `write`, and checks sizes and columns.

        Returns:
            The arrays and the state, the columns after the load, and the source of each linked one.

        Raises:
            FileError, ValueError, KeyError, TypeError: the file does not fit the buffer.
        """
        columns = buffer._storage.columns
        n_lanes, capacity = whole("n_lanes", state["n_lanes"], 1), whole("capacity", state["capacity"], 1)
        if n_lanes != columns.n_lanes or not buffer._takes_capacity(capacity):
            held = f"{n_lanes} lanes of {capacity} rows"
            raise FileError(f"{path}: holds {held}, this buffer has {columns.n_lanes} of {columns.capacity}")
        whole("n_slots", state["n_slots"], 0, capacity)
        return arrays, state, *_columns_in(buffer, path, arrays, state)

    def storage(self, buffer: Any) -> Storage:
        """Returns the store of a buffer, with all columns."""
        storage: Storage = buffer._storage
        return storage

    def adopt(self, buffer: Any, specs: Mapping[str, Spec]) -> None:
        """Is called after a file has replaced the columns by others.

        `specs` has the specs of the new columns.
        """


def save(buffer: Stored, path: Path, suffix: str | None = None, compression: str | None = None) -> None:
    """Writes a buffer to a file while its locks are held.

    `suffix` is the format if it is not the ending of the path.
    """
    with buffer._hold_locks():
        layout.write(path, buffer._form.kind(buffer), *contents(buffer), suffix, compression)


def contents(buffer: Stored) -> Contents:
    """Returns the contents of a file.

    They are arrays, some of them views; dtypes that numpy lacks; and the rest as JSON.
    """
    storage = buffer._form.storage(buffer)
    buffer._stream.n_saves += 1
    storage.counters.settle()  # a file is read twice as it is written, and both have to give the same
    columns, n_slots = storage.columns, used_slots(buffer)
    arrays: Arrays = {RING: to_save(storage.ring)}
    if storage.episodes is not None:
        arrays[EPISODES] = np.ascontiguousarray(storage.episodes.columns.slots_to_file(EPISODE, n_slots))
    arrays |= {MORE + name: array for name, array in buffer._more_arrays().items()}
    dtypes: dict[str, str] = {}
    for name, spec in columns.specs.items():
        if isinstance(columns, LinkedColumns) and name in columns.links:
            arrays |= {f"{LINKS}{name}/{part}": array for part, array in columns.link_arrays(name).items()}
        elif spec.is_object:
            arrays[OBJECTS + name] = object_files.to_json(name, _held_objects(buffer, name, n_slots))
        elif columns.is_compressed(name):
            packed = columns.flat[name].packed(n_slots)
            arrays |= {PACKED + name: packed, LENGTHS + name: packed.lengths}
        else:
            arrays[ROWS + name] = columns.slots_to_file(name, n_slots)
            dtypes |= {ROWS + name: "bfloat16"} if spec.is_bfloat16 else {}
    state: dict[str, Any] = {
        "n_lanes": columns.n_lanes,
        "capacity": columns.capacity,
        "alignment": storage.alignment,
        "n_slots": n_slots,
        "following": storage.counters.following().tolist(),
        "columns": {name: [spec.dtype.name, spec.shape, spec.is_bfloat16] for name, spec in columns.specs.items()},
        "linked": {name: link.source for name, link in columns.links.items()},
        "rng": generator_state(buffer._rng),
        "own": buffer._state(),
        "inner": {},
    }
    for key, inner in buffer._inner().items():
        its_arrays, its_dtypes, its_state = contents(inner)
        arrays |= {f"{INNER}{key}/{name}": array for name, array in its_arrays.items()}
        dtypes |= {f"{INNER}{key}/{name}": dtype for name, dtype in its_dtypes.items()}
        state["inner"][key] = {"class": type(inner).__name__, "state": its_state}
    written: Contents = buffer._form.write(buffer, arrays, dtypes, state)
    return written


def used_slots(buffer: Stored) -> int:
    """Counts the slots that hold the rows of every lane."""
    ring = buffer._storage.ring
    if not len(buffer) and not buffer._form.has_every_slot:
        return 0
    if buffer._keeps_dropped or buffer._form.has_every_slot:
        return ring.capacity
    in_front = (ring.base % ring.capacity == 0) & (ring.reserved - ring.base <= ring.capacity)
    return int((ring.reserved - ring.base).max()) if in_front.all() else ring.capacity


def _held_objects(buffer: Stored, name: str, n_slots: int) -> np.ndarray:
    """Returns the first slots of a column of objects, (n_lanes, n_slots).

    Empty rows hold None.
    """
    columns, rows = buffer._storage.columns, buffer._storage.view().every_row()
    if buffer._keeps_dropped:
        rows = np.arange(columns.n_rows)
    held = np.full((columns.n_lanes, columns.capacity), None, object)
    held[columns.places(rows)] = columns.flat[name][rows]
    return held[:, :n_slots]


def load_new(kind: str, make: Callable[[Mapping[str, Any]], B], path: Path, suffix: str | None = None) -> B:
    """Makes a buffer from the settings in a file, and restores it.

    `Stored._state` has written the settings.

    Raises:
        FileNotFoundError, FileError: there is no such file, or it holds a buffer of another class, or is damaged.
    """
    with layout.open_reader(path, suffix, compressed=True) as (reader, header):
        layout.check_class(path, header, kind)
        _check_sizes(path, SavedArrays(reader, {RING: RING}), header["state"])
        buffer = make(dict(header["state"]["own"]))
        _load(buffer, path, reader, header)
    return buffer


def _check_sizes(path: Any, arrays: SavedArrays, state: Any) -> None:
    """Checks the sizes and settings in a file before creating a buffer.

    Raises:
        OutOfMemoryError: the buffer would not fit in memory.
        ValueError, KeyError, TypeError: the sizes are impossible, or differ from the settings.
    """
    n_lanes, capacity = whole("n_lanes", state["n_lanes"], 1), whole("capacity", state["capacity"], 1)
    check_counter_spec(arrays.specs[RING], n_lanes)
    n_rows = n_lanes * capacity
    for inner in state["inner"].values():
        sizes = inner["state"]["n_lanes"], inner["state"]["capacity"]
        n_rows += math.prod(whole("a size", size, 1) for size in sizes)
    require_room(path, n_rows * BYTES_PER_ROW)
    settings = state["own"].get("settings")
    for each in (settings, settings.get("main")) if isinstance(settings, dict) else ():
        for name, value in each.items() if isinstance(each, dict) else ():
            if name in SIZES:
                whole(f"the setting {name!r}", value, 0, max(n_rows, MOST_READ if name in READ_AT_ONCE else 0))
            elif name not in SETTINGS:  # a user's class might accept it
                raise FileError(f"{path}: has an unknown setting {name!r}")


def load(buffer: Stored, path: Path, suffix: str | None = None) -> None:
    """Restores a buffer while its locks are held.

    Nothing changes if the file does not fit.
    """
    buffer._storage.counters.check_writable()
    with layout.open_reader(path, suffix, compressed=True) as (reader, header):
        _load(buffer, path, reader, header)


def _load(buffer: Stored, path: Path, reader: Reader, header: Mapping[str, Any]) -> None:
    layout.check_class(path, header, buffer._form.kind(buffer))
    reader.verify()
    with buffer._hold_locks():
        restorer(buffer, path, reader, header)()


def restorer(buffer: Stored, source: Any, reader: Reader, header: Mapping[str, Any]) -> Callable[[], None]:
    """Checks the result of `contents`; returns a function that restores a buffer.

    Args:
        buffer: the buffer, which changes only when the function is called.
        source: name of the file, for messages.
        reader: of the arrays.
        header: `class`, `state`, and the names of the arrays in `arrays`.

    Raises:
        FileError, ValueError, KeyError, TypeError: it does not fit.
    """
    make = _restorer(buffer, source, SavedArrays(reader, {name: name for name in header["arrays"]}), header)
    return lambda: make()()


# Makes room for the contents of a file, and returns a function that restores them; it raises only errors of reading.
MakeRoom = Callable[[], Callable[[], None]]


def _restorer(
    buffer: Stored, path: Any, arrays: SavedArrays, header: Mapping[str, Any], n_bytes_beside: int = 0
) -> MakeRoom:
    layout.check_class(path, header, buffer._form.kind(buffer))
    arrays, state, specs, linked = buffer._form.read(buffer, path, arrays, header["state"])
    n_lanes, capacity, n_slots = state["n_lanes"], state["capacity"], state["n_slots"]
    storage, alignment = buffer._storage, whole("alignment", state["alignment"], 1)
    columns, fresh = storage.columns, {} if storage.columns.specs else linked
    will_link = {name: source for name, source in fresh.items() if buffer._intake.can_link(name, specs)}
    n_bytes = n_bytes_beside + count_bytes(storage, specs, will_link, arrays, (capacity, n_slots))
    require_room(path, n_bytes, columns)
    objects = {name: arrays.read(OBJECTS + name) for name, spec in specs.items() if spec.dtype == OBJECT}
    require_room(path, sum(map(object_files.nbytes_of, objects.values())), columns)
    if alignment % capacity or (alignment != capacity and not buffer._may_be_aligned):
        raise ValueError(f"its alignment is {alignment}, its capacity {capacity}")
    claims = Claims(check_counters(arrays.read(RING), n_lanes, capacity), columns.order, specs)
    counters = claims.ring.counters
    check_slots(n_slots, claims.ring)
    if not specs and len(claims.ring):
        raise ValueError(f"it has {len(claims.ring)} rows, but no column")
    episodes = claims.by_lane(arrays.read(EPISODES)) if EPISODES in arrays.specs else None
    if episodes is not None:
        check_episodes(episodes, claims.ring)
    links = {name: {part: arrays.read(f"{LINKS}{name}/{part}") for part in ("at", "newest")} for name in linked}
    for name, parts in links.items():
        check_link(name, parts, arrays.specs[f"{LINKS}{name}/values"], specs[name], (n_lanes, capacity))
    more = {name: arrays.read(MORE + name) for name in arrays.inside(MORE).specs}
    generator, following = generator_in(state["rng"]), following_in(state, n_lanes)
    restore_own = buffer._restorer(state["own"], more, claims)
    values = {name: object_files.from_json(name, text, (n_lanes, n_slots)) for name, text in objects.items()}
    inner_rooms = _inner_restorers(buffer, path, arrays, state, n_bytes)

    def make_all_room() -> Callable[[], None]:
        restore_inner = [make_one() for make_one in inner_rooms]
        drop_rows = make_room(storage, specs, will_link, capacity)

        def restore() -> None:
            for restore_one in restore_inner:
                restore_one()
            drop_rows()
            storage.alignment = alignment
            buffer._form.adopt(buffer, specs)
            for name, array in values.items():
                storage.columns.restore_slots(name, 0, array)
            restore_columns(storage, arrays, linked, links, n_slots, counters)
            storage.restore(counters, episodes, following)
            buffer._rng = generator
            restore_own()

        return restore

    return make_all_room


def _inner_restorers(
    buffer: Stored, path: Any, arrays: SavedArrays, state: Mapping[str, Any], n_bytes: int
) -> list[MakeRoom]:
    """Checks the inner buffers; returns the functions that restore them.

    The outer buffer needs `n_bytes` beside theirs.
    """
    restorers = []
    for key, inner in buffer._inner().items():
        if _strict(buffer, state["inner"][key]["state"]["columns"]) != _strict(buffer, state["columns"]):
            raise ValueError(f"the buffer {key!r} in it has other columns than it has")
        restorers.append(_restorer(inner, path, arrays.inside(f"{INNER}{key}/"), state["inner"][key], n_bytes))
    return restorers


def _columns_in(
    buffer: Stored, path: Any, arrays: SavedArrays, state: Mapping[str, Any]
) -> tuple[dict[str, Spec], dict[str, str]]:
    """Returns the columns of a file, and each linked one's source.

    They are checked: they must fit the buffer.
    """
    columns = buffer._storage.columns
    lead = columns.lead(state["n_slots"])
    arrays.check(EPISODES, np.int32, (*lead, 2))
    specs = {name: spec_in(name, *spec) for name, spec in state["columns"].items()}
    linked = dict(state["linked"])
    if columns.specs and specs != columns.specs and _strict(buffer, specs) != _strict(buffer, columns.specs):
        raise FileError(f"{path}: has columns {clean_text(_shown(specs))}, this buffer {_shown(columns.specs)}")
    if specs != columns.specs and not buffer._storage.is_private:
        held = f"has columns {clean_text(_shown(specs))}, this buffer {_shown(columns.specs)}"
        raise FileError(f"{path}: {held}, which processes share: load it into a new buffer, and feed that")
    for name, spec in specs.items():
        if spec.dtype == OBJECT:
            dtype, shape = arrays.specs[OBJECTS + name]
            if not buffer._intake.keeps_objects(name) or name in linked or dtype != np.uint8 or len(shape) != 1:
                raise ValueError(f"column {name!r} cannot be of objects")
        elif name not in linked:
            check_column(columns, arrays, name, spec, state["n_slots"])
    for name, source in linked.items():
        if type(source) is not str or source != source_of(name) or source in linked:
            raise ValueError(f"column {name!r} cannot be stored through {source!r}")
        if name not in specs or specs[name] != specs.get(source):
            raise ValueError(f"column {name!r} is stored through {source!r}, which is not like it")
    if specs:
        buffer._intake.check_columns(specs)
    return specs, linked


def _strict(buffer: Stored, specs: Mapping[str, Any]) -> dict[str, Any]:
    """Selects the columns that must be equal in a file and in a buffer."""
    return {name: spec for name, spec in specs.items() if not buffer._intake.keeps_objects(name)}


def require_room(path: Any, n_bytes: int, columns: Columns | None = None) -> None:
    """Raises OutOfMemoryError unless this many bytes are available.

    They are counted on the device of the columns, if they are on one.
    """
    if not n_bytes:
        return
    available = available_bytes() if columns is None or columns.on_host else columns.available_bytes()
    if available is not None and n_bytes > available:
        raise OutOfMemoryError(f"{path}: {n_bytes:,} bytes are needed, {available:,} are available")


def _shown(specs: Mapping[str, Spec]) -> str:
    return ", ".join(f"{name} {spec.dtype}{spec.shape}" for name, spec in sorted(specs.items()))
