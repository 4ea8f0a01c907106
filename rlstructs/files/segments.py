"""A folder of arrays in files that successive folders share.

Long arrays are cut into several files.

    whole.npz          the arrays that are not cut; its header describes all arrays
    rows_00000.npz     the first slots of the arrays of the group "rows"
    rows_00001.npz     the next ones, and so on

A file of which no slot has changed since an earlier folder is a hard link to the file there, so that each folder is
complete by itself: any of them may be deleted or copied.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlstructs.checks import DTYPES, clean_text
from rlstructs.errors import FileError
from rlstructs.files import layout
from rlstructs.files.archives import READERS, Reader, file_checksum, npz_checksum

WHOLE, ENDING = "whole.npz", ".npz"
KIND = "Segment"
# The most files of a group, and the fewest bytes of a file that is not the only one of its group.
MOST_FILES, LEAST_BYTES = 128, 1 << 20


@dataclass(frozen=True)
class Cut:
    """The cuts of an array.

    Attributes:
        group: arrays of a group lie in the same files.
        shape: the shape in which the array is cut.
        axis: the axis of slots; all arrays of a group have as many.
        capacity: the most slots that there can be, which decides how many are in a file.
        row_bytes: None; or, of an array of bytes whose slots have different numbers of them, how many an item of
            `shape` usually has. Such an array is cut along its first axis, and its parts have one axis.
    """

    group: str
    shape: tuple[int, ...]
    axis: int
    capacity: int
    row_bytes: int | None = None


@dataclass(frozen=True)
class Content:
    """The contents of a folder.

    Attributes:
        kind: the class that the arrays belong to.
        arrays: by name, as `layout.write` takes them; those that are cut are numpy arrays, or objects that can be
            sliced and reshaped like them.
        dtypes: the dtypes that numpy lacks, by the name of the array that holds their bits.
        state: anything else, as JSON.
        cuts: of the arrays that are cut.
        changed: group -> which slots may have changed since the earlier folder, bool (capacity,). Of other groups the
            contents are compared.
    """

    kind: str
    arrays: Mapping[str, Any]
    dtypes: Mapping[str, str]
    state: Mapping[str, Any]
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    changed: Mapping[str, np.ndarray] = field(default_factory=dict)


def write(
    folder: Path, content: Content, before: Path | None = None, known: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Writes a folder, which must not exist.

    Args:
        folder: the folder.
        content: what it holds.
        before: an earlier folder, in the same file system, whose files it may share; None for none.
        known: the result of this function for that one.

    Returns:
        The checksum of each file, by its name.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir()
    earlier = _find_groups(before)
    shared = set[str]()
    groups: dict[str, dict[str, Any]] = {}
    for group in dict.fromkeys(cut.group for cut in content.cuts.values()):
        groups[group] = _write_group(folder, group, content, before, earlier.get(group), shared)
    whole = {name: array for name, array in content.arrays.items() if name not in content.cuts}
    dtypes = {name: dtype for name, dtype in content.dtypes.items() if name in whole}
    shapes = {name: list(content.arrays[name].shape) for name in content.cuts}
    layout.write(
        folder / WHOLE, content.kind, whole, dtypes, {"own": content.state, "groups": groups, "shapes": shapes}
    )
    found = {name: each for name, each in (known or {}).items() if name in shared}
    return found | {path.name: file_checksum(path) for path in folder.iterdir() if path.name not in found}


def _write_group(
    folder: Path,
    group: str,
    content: Content,
    before: Path | None,
    earlier: Mapping[str, Any] | None,
    shared: set[str],
) -> dict[str, Any]:
    """Writes the files of a group; returns the group's record for the header.

    The names of files that are hard links are added to `shared`.
    """
    cuts = {name: cut for name, cut in content.cuts.items() if cut.group == group}
    arrays = {name: content.arrays[name].reshape(cut.shape) for name, cut in cuts.items()}
    described = _describe_group(cuts, content)
    per_file, n_slots = described["per_file"], described["n_slots"]
    # Files of other arrays, or cut in another way, cannot be shared.
    n_before = earlier["n_slots"] if earlier and earlier == {**described, "n_slots": earlier["n_slots"]} else 0
    changed = content.changed.get(group)
    dtypes = {name: dtype for name, dtype in content.dtypes.items() if name in cuts}
    for number, (start, stop) in enumerate(_segments(n_slots, per_file)):
        pieces = {name: _slice(array, cuts[name].axis, start, stop) for name, array in arrays.items()}
        path = folder / _file_name(group, number)
        is_known = stop == min(start + per_file, n_before)
        if before is not None and is_known and (changed is None or not changed[start:stop].any()):
            old = before / path.name
            if (changed is not None or _holds(old, pieces)) and _link(old, path):
                shared.add(path.name)
                continue
        layout.write(path, KIND, pieces, dtypes, {"slots": [start, stop]})
    return described


def _describe_group(cuts: Mapping[str, Cut], content: Content) -> dict[str, Any]:
    first = next(iter(cuts.values()))
    n_slots, described, n_bytes = first.shape[first.axis], {}, 0
    for name, cut in cuts.items():
        dtype, shape = content.arrays[name].dtype, [*cut.shape]
        shape[cut.axis] = 1
        n_bytes += (dtype.itemsize if cut.row_bytes is None else cut.row_bytes) * math.prod(shape)
        described[name] = [dtype.name, content.dtypes.get(name), shape, cut.axis]
        described[name] += [] if cut.row_bytes is None else [cut.row_bytes]
    per_file = max(-(-first.capacity // MOST_FILES), -(-LEAST_BYTES // max(n_bytes, 1)))
    return {"per_file": per_file, "n_slots": n_slots, "arrays": described}


def _segments(n_slots: int, per_file: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + per_file, n_slots)) for start in range(0, n_slots, per_file))


def _slice(array: Any, axis: int, start: int, stop: int) -> Any:
    return array[(slice(None),) * axis + (slice(start, stop),)]


def _file_name(group: str, number: int) -> str:
    return f"{group}_{number:05}{ENDING}"


def _find_groups(folder: Path | None) -> Mapping[str, Any]:
    """Reads the groups in the header of an earlier folder.

    Returns {} if it cannot be read.
    """
    if folder is None:
        return {}
    try:
        groups: Mapping[str, Any] = layout.read_header(folder / WHOLE)["state"]["groups"]
        return {name: each for name, each in groups.items() if type(each) is dict and type(each["n_slots"]) is int}
    except (FileError, OSError, KeyError, TypeError, AttributeError):
        return {}


def _holds(path: Path, pieces: Mapping[str, Any]) -> bool:
    """Whether a file holds these arrays, by their checksums."""
    try:
        with READERS[ENDING](path) as archive:
            return all(archive.checksum_of(name) == npz_checksum(piece) for name, piece in pieces.items())
    except (OSError, KeyError, ValueError):
        return False


def _link(old: Path, new: Path) -> bool:
    """Creates a hard link; returns False if that fails.

    The file may be gone, or the file system may lack links.
    """
    try:
        os.link(old, new)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def open_folder(folder: Path) -> Iterator[tuple[Reader, dict[str, Any]]]:
    """Opens a folder; yields a reader and a header, as for one file.

    Raises:
        FileNotFoundError: a file is missing.
        FileError: the folder is damaged, or not one of rlstructs.
    """
    path = folder / WHOLE
    with layout.open_reader(path) as (_, header):
        pass
    with READERS[ENDING](path) as archive:
        try:
            reader = SegmentReader(folder, archive, header)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise FileError(f"{path}: damaged: {clean_text(error)}") from error
        # Names are enough: `reader.spec_of` knows the dtypes and shapes.
        with reader.opened:
            yield reader, {**header, "arrays": dict.fromkeys([*header["arrays"], *reader.cut]), "state": reader.state}


@dataclass(frozen=True)
class _CutArray:
    """The record of an array that is cut.

    Attributes:
        dtype: of the array.
        shape: of the array.
        cut_shape: the shape in which it is cut.
        axis: the axis of slots.
        group: its group.
        per_file: slots per file.
        is_ragged: whether slots have different numbers of bytes; see `Cut.row_bytes`.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    cut_shape: tuple[int, ...]
    axis: int
    group: str
    per_file: int
    is_ragged: bool

    @property
    def n_slots(self) -> int:
        return self.cut_shape[self.axis]

    def piece_shape(self, start: int, stop: int) -> tuple[int, ...]:
        return (*self.cut_shape[: self.axis], stop - start, *self.cut_shape[self.axis + 1 :])


class SegmentReader:
    """A `Reader` of a folder, as if all arrays were in one file.

    Args:
        folder: the folder.
        whole: the open file of arrays that are not cut.
        header: its header.

    Attributes:
        cut: the arrays that are cut.
        state: the state that was written; see `Content`.
        opened: holds the file that was read last.
    """

    def __init__(self, folder: Path, whole: Reader, header: Mapping[str, Any]) -> None:
        self._folder, self._whole, self.text = folder, whole, whole.text
        self.opened, self._name, self._ends = contextlib.ExitStack(), "", dict[str, np.ndarray]()
        self._archive: Reader | None = None
        state = header["state"]
        self.state, self.cut = state["own"], dict[str, _CutArray]()
        for group, known in state["groups"].items():
            if not (group.replace("_", "").isalnum() and group.isascii()):  # it is part of file names
                raise ValueError(f"{group!r} is not a group of arrays")
            per_file, n_slots = _count(known["per_file"], 1), _count(known["n_slots"], 0)
            for name, (dtype, _, shape, axis, *row_bytes) in known["arrays"].items():
                cut_shape = [_count(n, 0) for n in shape]
                cut_shape[_count(axis, 0)] = n_slots
                own = tuple(_count(n, 0) for n in state["shapes"][name])
                fits = len(own) == 1 and dtype == "uint8" if row_bytes else math.prod(own) == math.prod(cut_shape)
                if not fits or name in header["arrays"] or name in self.cut:
                    raise ValueError(f"the shape of {name!r} is not that of its files")
                place = axis, group, per_file, bool(row_bytes)
                self.cut[name] = _CutArray(DTYPES[dtype], own, tuple(cut_shape), *place)

    def spec_of(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        if name not in self.cut:
            return self._whole.spec_of(name)
        return self.cut[name].dtype, self.cut[name].shape

    def verify(self) -> None:
        """Raises ValueError, FileError or FileNotFoundError if a file is damaged, missing or another one."""
        self._whole.verify()
        by_group = itertools.groupby(self.cut.items(), key=lambda item: item[1].group)
        for _, members in by_group:
            cuts = dict(members)
            first = next(iter(cuts.values()))
            for number, (start, stop) in enumerate(_segments(first.n_slots, first.per_file)):
                self._verify_file(cuts, number, start, stop)

    def _verify_file(self, cuts: Mapping[str, _CutArray], number: int, start: int, stop: int) -> None:
        path = self._folder / _file_name(next(iter(cuts.values())).group, number)
        with layout.open_reader(path) as (reader, header):
            layout.check_class(path, header, KIND)
            wanted = {
                name: (cut.dtype, reader.spec_of(name)[1][:1] if cut.is_ragged else cut.piece_shape(start, stop))
                for name, cut in cuts.items()
            }
            if header["state"] != {"slots": [start, stop]} or header["arrays"].keys() != cuts.keys():
                raise ValueError("it is another file of the folder")
            if any(reader.spec_of(name) != spec for name, spec in wanted.items()):
                raise ValueError("its arrays are not those of the folder")
            reader.verify()

    def read_into(self, name: str, array: np.ndarray, first: int = 0) -> None:
        if name not in self.cut:
            self._whole.read_into(name, array, first)
        elif self.cut[name].is_ragged:
            self._read_ragged(name, array, first)
        elif self.cut[name].axis == 0:
            self._read_in_order(name, array.reshape(-1), first)
        else:
            assert not first  # numbers that follow one another are in many files: `read_slots` reads parts of these
            self._read_across(name, array.reshape(self.cut[name].cut_shape), 0)

    def read_slots(self, name: str, array: np.ndarray, start: int) -> None:
        if name in self.cut:
            self._read_across(name, array, start)
        else:
            self._whole.read_slots(name, array, start)

    def _open(self, group: str, number: int) -> Reader:
        """Opens a file, and closes the last one.

        A file stays open until another is asked for, because its arrays are read in pieces.
        """
        name = _file_name(group, number)
        if self._archive is None or self._name != name:
            self.opened.close()
            self._archive, self._name = self.opened.enter_context(READERS[ENDING](self._folder / name)), name
        return self._archive

    def _read_in_order(self, name: str, numbers: np.ndarray, first: int) -> None:
        """Reads numbers of an array whose files follow one another."""
        cut = self.cut[name]
        per_file = cut.per_file * math.prod(cut.cut_shape[1:])
        done = 0
        while done < numbers.size:
            number, skipped = divmod(first + done, per_file)
            part = numbers[done : done + per_file - skipped]
            self._open(cut.group, number).read_into(name, part, skipped)
            done += part.size

    def _read_ragged(self, name: str, array: np.ndarray, first: int) -> None:
        """Reads an array of which each file has its own number of bytes."""
        cut, done = self.cut[name], 0
        ends = self._ends_of(name)
        for number in range(int(np.searchsorted(ends, first, side="right")), len(ends)):
            begin = int(ends[number - 1]) if number else 0
            part = array[done : int(ends[number]) - first]
            self._open(cut.group, number).read_into(name, part, first + done - begin)
            done += part.size
            if done == array.size:
                return
        if done < array.size:
            raise ValueError(f"its files have {done} bytes of {name!r}, expected {array.size}")

    def _ends_of(self, name: str) -> np.ndarray:
        """Returns where the bytes of each file end in an array, int64."""
        if name not in self._ends:
            cut, sizes = self.cut[name], []
            for number, _ in enumerate(_segments(cut.n_slots, cut.per_file)):
                sizes.append(self._open(cut.group, number).spec_of(name)[1][0])
            self._ends[name] = np.cumsum(sizes, dtype=np.int64)
        return self._ends[name]

    def _read_across(self, name: str, array: np.ndarray, first: int) -> None:
        """Reads slots of an array whose files hold some slots of every lane.

        `first` is the first of these slots.
        """
        cut, end = self.cut[name], first + array.shape[1]
        assert cut.axis == 1
        for number, (start, stop) in enumerate(_segments(cut.n_slots, cut.per_file)):
            low, high = max(start, first), min(stop, end)
            if low < high:
                piece = np.empty(cut.piece_shape(low, high), cut.dtype)
                self._open(cut.group, number).read_slots(name, piece, low - start)
                array[:, low - first : high - first] = piece


def _count(value: Any, least: int) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{clean_text(repr(value))} is not a size")
    return value


_NAME = re.compile(r"part_(\d{6,})\.npz")


def part_path(folder: Path, number: int) -> Path:
    """Returns the path of a part, counted from 0."""
    return folder / f"part_{number:06}.npz"


def list_parts(folder: str | Path) -> list[Path]:
    """Lists the parts in a folder, in order.

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
