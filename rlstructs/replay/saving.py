"""Saves and loads buffers: rows, counters, episodes, the sampler's state, and the random stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlstructs.checks import clean_text
from rlstructs.errors import FileError, OutOfMemoryError
from rlstructs.files import layout
from rlstructs.files.archives import Reader
from rlstructs.replay import object_files
from rlstructs.replay.backing import available_bytes
from rlstructs.replay.claims import (
    Claims,
    check_counters,
    check_episodes,
    check_slots,
    dtype_called,
    flag,
    generator_in,
    plain_state,
    row_shape,
    whole,
)
from rlstructs.replay.columns import Spec
from rlstructs.replay.episodes import BYTES_PER_ROW, EPISODE
from rlstructs.replay.linked_columns import LinkedColumns, check_arrays, unlinked
from rlstructs.replay.objects import OBJECT
from rlstructs.replay.ring import HEAD, N_COUNTERS
from rlstructs.replay.roles import source_of

if TYPE_CHECKING:
    from rlstructs.replay.buffer import Buffer
    from rlstructs.replay.store import Storage

# Names of arrays in a file. Those of columns begin with ROWS, so they differ from all others.
ROWS, RING, EPISODES, LINKS, MORE = "rows/", "ring", "episodes", "links/", "more/"
# Prefix of the encoded text of a column of objects.
OBJECTS = "objects/"
# Settings of a buffer that may be in a file. Those in SIZES are at most the number of rows; those in READ_AT_ONCE may
# also be up to MOST_READ.
READ_AT_ONCE, MOST_READ = ("stack_num", "n_step"), 1024
SETTINGS = (
    "ignore_obs_next", "save_only_last_obs", "sample_avail", "framework", "gamma", "new_keys", "missing_keys", "alpha",
    "beta", "weight_norm", "horizon", "future_k", "main",
)  # fmt: skip
SIZES = ("size", "total_size", "buffer_num", "cached_buffer_num", "max_episode_length", *READ_AT_ONCE)
# Prefix of the arrays of an inner buffer.
INNER = "inner/"


def save(buffer: Buffer, path: Path, suffix: str | None = None, compression: str | None = None) -> None:
    """Writes a buffer while its locks are held; `suffix` says which kind of file, if the name does not."""
    with buffer._hold_locks():
        layout.write(path, type(buffer).__name__, *contents(buffer), suffix, compression)


def contents(buffer: Buffer) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    """The contents of a file: arrays, some of them views; dtypes that numpy lacks; and the rest as JSON."""
    storage = buffer._storage
    columns, n_slots = storage.columns, _used_slots(buffer)
    arrays: dict[str, Any] = {RING: storage.ring.counters.copy()}
    for name in columns.specs:
        if isinstance(columns, LinkedColumns) and name in columns.links:
            arrays |= {f"{LINKS}{name}/{part}": array for part, array in columns.link_arrays(name).items()}
        elif columns.specs[name].is_object:
            arrays[OBJECTS + name] = object_files.encoded(name, _held_objects(storage, name, n_slots))
        else:
            arrays[ROWS + name] = columns.slots_to_file(name, n_slots)
    assert storage.episodes is not None
    arrays[EPISODES] = np.ascontiguousarray(storage.episodes.columns.cells[EPISODE][:, :n_slots])
    arrays |= {MORE + name: array for name, array in buffer._more_arrays().items()}
    bits = [name for name, spec in columns.specs.items() if spec.is_bfloat16]
    dtypes = {ROWS + name: "bfloat16" for name in bits if name not in columns.links}
    state: dict[str, Any] = {
        "n_lanes": columns.n_lanes,
        "capacity": columns.capacity,
        "alignment": storage.alignment,
        "n_slots": n_slots,
        "columns": {name: [spec.dtype.name, spec.shape, spec.is_bfloat16] for name, spec in columns.specs.items()},
        "linked": {name: link.source for name, link in columns.links.items()},
        "rng": plain_state(buffer._rng),
        "own": buffer._state(),
        "inner": {},
    }
    for key, inner in buffer._inner().items():
        its_arrays, its_dtypes, its_state = contents(inner)
        arrays |= {f"{INNER}{key}/{name}": array for name, array in its_arrays.items()}
        dtypes |= {f"{INNER}{key}/{name}": dtype for name, dtype in its_dtypes.items()}
        state["inner"][key] = {"class": type(inner).__name__, "state": its_state}
    return arrays, dtypes, state


def _held_objects(storage: Storage, name: str, n_slots: int) -> np.ndarray:
    """The first slots of every lane of a column of objects, (n_lanes, n_slots); None in empty rows."""
    columns, rows = storage.columns, storage.span().every_row()
    whole = np.full((columns.n_lanes, columns.capacity), None, object)
    whole[columns.places(rows)] = columns.flat[name][rows]
    return whole[:, :n_slots]


def own_state(path: Path, kind: str, suffix: str | None = None) -> dict[str, Any]:
    """Reads the settings of a saved buffer.

    Raises:
        FileNotFoundError, FileError: there is no such file, or it holds a buffer of another class.
    """
    with layout.open_reader(path, suffix, compressed=True) as (reader, header):
        layout.check_class(path, header, kind)
        _check_sizes(path, reader, header["state"])
        return dict(header["state"]["own"])


def load(buffer: Buffer, path: Path, suffix: str | None = None) -> None:
    """Restores a buffer; changes nothing if the file does not fit."""
    with layout.open_reader(path, suffix, compressed=True) as (reader, header):
        layout.check_class(path, header, type(buffer).__name__)
        reader.verify()
        restore = restorer(buffer, path, reader, header)
        restore()


def restorer(buffer: Buffer, source: Any, reader: Reader, header: Mapping[str, Any]) -> Callable[[], None]:
    """Checks the result of `contents` and returns a function that restores a buffer from it.

    Args:
        buffer: the buffer, which changes only when the function is called.
        source: name of the file, for messages.
        reader: of the arrays.
        header: `class`, `state`, and the names of the arrays in `arrays`.

    Raises:
        FileError, ValueError, KeyError, TypeError: it does not fit.
    """
    layout.check_class(source, header, type(buffer).__name__)
    return _restorer(buffer, source, reader, header)


def _used_slots(buffer: Buffer) -> int:
    """The number of slots that hold the rows of every lane."""
    ring = buffer._storage.ring
    if not len(buffer):
        return 0
    in_front = (ring.base % ring.capacity == 0) & (ring.reserved - ring.base <= ring.capacity)
    return int((ring.reserved - ring.base).max()) if in_front.all() else ring.capacity


def _restorer(buffer: Buffer, path: Any, reader: Reader, header: Mapping[str, Any]) -> Callable[[], None]:
    storage, state = buffer._storage, header["state"]
    columns = storage.columns
    n_lanes, capacity = whole("n_lanes", state["n_lanes"], 1), whole("capacity", state["capacity"], 1)
    n_slots, alignment = whole("n_slots", state["n_slots"], 0, capacity), whole("alignment", state["alignment"], 1)
    if n_lanes != columns.n_lanes or not buffer._takes_capacity(capacity):
        raise FileError(
            f"{path}: holds {n_lanes} lanes of {capacity} rows, this buffer has {columns.n_lanes} of {columns.capacity}"
        )
    specs, linked = _columns_of(buffer, path, reader, state)
    objects = {name: _any(reader, OBJECTS + name) for name, spec in specs.items() if spec.is_object}
    n_bytes = sum(_nbytes(*reader.spec_of(name)) for name in header["arrays"])
    n_bytes += sum(map(object_files.nbytes_of, objects.values()))
    n_bytes += _nbytes_per_new_row(buffer, specs, linked) * n_lanes * capacity
    _require_room(path, n_bytes)
    if alignment % capacity or (alignment != capacity and not buffer._may_be_aligned):
        raise ValueError(f"its alignment is {alignment}, its capacity {capacity}")
    counters = _read(reader, RING, np.int64, (N_COUNTERS, n_lanes))
    claims = Claims(check_counters(counters, n_lanes, capacity), columns.order, specs)
    check_slots(n_slots, claims.ring)
    if not specs and len(claims.ring):
        raise ValueError(f"it has {len(claims.ring)} rows of no column")
    episodes = _read(reader, EPISODES, np.int32, (n_lanes, n_slots, 2))
    check_episodes(episodes, claims.ring)
    links = _links_in(reader, linked, specs, (n_lanes, capacity))
    more = {name[len(MORE) :]: _any(reader, name) for name in header["arrays"] if name.startswith(MORE)}
    generator = generator_in(state["rng"])
    restore_own = buffer._restorer(state["own"], more, claims)
    values = {name: object_files.decoded(name, text, (n_lanes, n_slots)) for name, text in objects.items()}
    restore_inner = _inner_restorer(buffer, path, reader, header)

    def restore() -> None:
        restore_inner()
        storage.clear()
        storage.alignment = alignment
        if storage.columns.capacity != capacity:
            storage.grow(capacity)
        _make_columns(buffer, specs, linked)
        numbers = {name: spec for name, spec in specs.items() if name not in values}
        _restore_columns(storage, numbers, linked, links, counters, reader)
        for name, rows in values.items():
            columns.put_cells(name, slice(None), slice(0, n_slots), rows)
        storage.restore(counters, episodes)
        buffer._rng = generator
        restore_own()

    return restore


def _nbytes_per_new_row(buffer: Buffer, specs: Mapping[str, Spec], linked: Mapping[str, str]) -> int:
    """Bytes per row of the columns that a buffer without columns has to make; 0 if it has some."""
    if buffer._storage.columns.specs:
        return 0
    return sum(spec.nbytes for name, spec in specs.items() if name not in linked or not buffer._is_linked(name, specs))


def _links_in(
    reader: Reader, linked: Iterable[str], specs: Mapping[str, Spec], shape: tuple[int, int]
) -> dict[str, dict[str, np.ndarray]]:
    links = {name: _parts(reader, f"{LINKS}{name}/", ("at", "values", "newest")) for name in linked}
    for name, parts in links.items():
        check_arrays(name, parts, specs[name], shape)
    return links


def _inner_restorer(buffer: Buffer, path: Any, reader: Reader, header: Mapping[str, Any]) -> Callable[[], None]:
    """Checks the inner buffers and returns a function that restores them."""
    restores, state = [], header["state"]
    for key, inner in buffer._inner().items():
        if _strict(buffer, state["inner"][key]["state"]["columns"]) != _strict(buffer, state["columns"]):
            raise ValueError(f"the buffer {key!r} in it has other columns than it has")
        restores.append(restorer(inner, path, *_of_inner(key, reader, header)))

    def restore() -> None:
        for restore_one in restores:
            restore_one()

    return restore


def _columns_of(
    buffer: Buffer, path: Any, reader: Reader, state: Mapping[str, Any]
) -> tuple[dict[str, Spec], dict[str, str]]:
    """Reads the columns of a file, and the source of each linked one; checks that they fit the buffer."""
    columns, lead = buffer._storage.columns, (state["n_lanes"], state["n_slots"])
    specs = {name: _spec(name, *spec) for name, spec in state["columns"].items()}
    linked = dict(state["linked"])
    if columns.specs and _strict(buffer, specs) != _strict(buffer, columns.specs):
        raise FileError(f"{path}: has columns {clean_text(_shown(specs))}, this buffer {_shown(columns.specs)}")
    for name, spec in specs.items():
        if spec.is_object:
            dtype, shape = reader.spec_of(OBJECTS + name)
            if not buffer._keeps_objects(name) or name in linked or dtype != np.uint8 or len(shape) != 1:
                raise ValueError(f"column {name!r} cannot be of objects")
        elif name not in linked:
            wanted = spec.dtype, (*lead, *spec.shape)
            if reader.spec_of(ROWS + name) != wanted:
                raise ValueError(f"column {name!r} is {reader.spec_of(ROWS + name)}, its header says {wanted}")
    for name, source in linked.items():
        if type(source) is not str or source != source_of(name) or source in linked:
            raise ValueError(f"column {name!r} cannot be stored through {source!r}")
        if name not in specs or specs[name] != specs.get(source):
            raise ValueError(f"column {name!r} is stored through {source!r}, which is not like it")
    if specs:
        buffer._check_columns(specs)
    return specs, linked


def _restore_columns(
    storage: Storage,
    specs: Mapping[str, Spec],
    linked: Mapping[str, str],
    links: Mapping[str, Mapping[str, np.ndarray]],
    counters: np.ndarray,
    reader: Reader,
) -> None:
    """Reads the columns of a file into a store, in which other columns may be linked than in the file."""
    columns = storage.columns
    for name, spec in specs.items():
        if isinstance(columns, LinkedColumns) and name in columns.links:
            if name in links:
                columns.restore_link(name, links[name], counters[HEAD])
                continue
            columns.unlink(name)
        array = _any(reader, ROWS + linked.get(name, name))
        if name in links:
            array = unlinked(array, links[name], counters, columns.capacity)
        columns.put_cells(name, slice(None), slice(0, array.shape[1]), columns.converted(name, array, spec))


def _of_inner(key: str, reader: Reader, header: Mapping[str, Any]) -> tuple[Reader, dict[str, Any]]:
    """The reader and the header of an inner buffer."""
    start = f"{INNER}{key}/"
    names = [name[len(start) :] for name in header["arrays"] if name.startswith(start)]
    return _Inside(reader, start), {**header["state"]["inner"][key], "arrays": names}


class _Inside:
    """A reader of the arrays whose names begin with `start`."""

    def __init__(self, reader: Reader, start: str) -> None:
        self.text, self._reader, self._start = reader.text, reader, start

    def spec_of(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        return self._reader.spec_of(self._start + name)

    def verify(self) -> None:
        self._reader.verify()

    def read_into(self, name: str, array: np.ndarray) -> None:
        self._reader.read_into(self._start + name, array)


def _make_columns(buffer: Buffer, specs: Mapping[str, Spec], linked: Mapping[str, str]) -> None:
    """Creates the missing columns of a file; a column that is linked in the file is linked here if possible."""
    columns = buffer._storage.columns
    if columns.specs:
        buffer._storage.exchange({}, [name for name, spec in columns.specs.items() if specs.get(name) != spec])
        buffer._storage.add_columns({name: spec for name, spec in specs.items() if name not in columns.specs})
        return
    links = {name: source for name, source in linked.items() if buffer._is_linked(name, specs)}
    buffer._storage.add_columns(specs, links)


def _spec(name: str, dtype: Any, shape: Any, is_bfloat16: Any) -> Spec:
    if dtype == OBJECT.name and shape == [] and is_bfloat16 is False:
        return Spec(OBJECT)
    spec = Spec(dtype_called(name, dtype), row_shape(name, shape), 0, flag("whether it is bfloat16", is_bfloat16))
    if spec.is_bfloat16 and spec.dtype != np.int16:
        raise ValueError(f"column {name!r} is bfloat16, which {spec.dtype} does not hold")
    return spec


def _strict(buffer: Buffer, specs: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that must be equal in a file and in a buffer."""
    return {name: spec for name, spec in specs.items() if not buffer._keeps_objects(name)}


def _check_sizes(path: Any, reader: Reader, state: Any) -> None:
    """Checks the sizes and settings in a file before a buffer is created from it.

    Raises:
        OutOfMemoryError: the buffer would not fit in memory.
        ValueError, KeyError, TypeError: the sizes make no sense, or differ from the settings.
    """
    n_lanes, capacity = whole("n_lanes", state["n_lanes"], 1), whole("capacity", state["capacity"], 1)
    if reader.spec_of(RING) != (np.dtype(np.int64), (N_COUNTERS, n_lanes)):
        raise ValueError(f"it has counters of other than {n_lanes} lanes")
    n_rows = n_lanes * capacity
    for inner in state["inner"].values():
        sizes = inner["state"]["n_lanes"], inner["state"]["capacity"]
        n_rows += math.prod(whole("a size", size, 1) for size in sizes)
    _require_room(path, n_rows * BYTES_PER_ROW)
    settings = state["own"].get("settings")
    for each in (settings, settings.get("main")) if isinstance(settings, dict) else ():
        for name, value in each.items() if isinstance(each, dict) else ():
            if name in SIZES:
                whole(f"the setting {name!r}", value, 0, max(n_rows, MOST_READ if name in READ_AT_ONCE else 0))
            elif name not in SETTINGS:  # a user's class might accept it
                raise FileError(f"{path}: has a setting {name!r}, which is none of ours")


def _require_room(path: Any, n_bytes: int) -> None:
    if (available := available_bytes()) is not None and n_bytes > available:
        raise OutOfMemoryError(f"{path}: {n_bytes:,} bytes are needed, {available:,} are available")


def _shown(specs: Mapping[str, Spec]) -> str:
    return ", ".join(f"{name} {spec.dtype}{spec.shape}" for name, spec in sorted(specs.items()))


def _nbytes(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * math.prod(shape)


def _any(reader: Reader, name: str) -> np.ndarray:
    dtype, shape = reader.spec_of(name)
    array = np.empty(shape, dtype)
    reader.read_into(name, array)
    return array


def _read(reader: Reader, name: str, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    if reader.spec_of(name) != (np.dtype(dtype), shape):
        raise ValueError(f"{name!r} is {reader.spec_of(name)}, needed is {np.dtype(dtype)} {shape}")
    return _any(reader, name)


def _parts(reader: Reader, prefix: str, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    return {name: _any(reader, prefix + name) for name in names}
