"""Damaged files of every kind are refused or read as they were written; a full disk leaves old files whole."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path
from unittest import mock

import damage
import h5py
import numpy as np
import pytest
import torch

from rlstructs import DictTensor, FileError
from rlstructs.errors import OutOfMemoryError
from rlstructs.files import archives, layout, opening
from rlstructs.files import pickled as pickles
from rlstructs.memories.torch import RandomMemory
from rlstructs.replay import ReplayBuffer
from rlstructs.replay.keep import saving

HERE = Path(__file__).parents[1]
SUBJECTS = damage.subjects()


def run(*arguments):
    """What `damage.py` printed, in a process of its own: libhdf5 and torch are written in C."""
    done = subprocess.run(
        [sys.executable, HERE / "damage.py", *arguments], capture_output=True, text=True, cwd=HERE.parent, timeout=300
    )
    last = "\n".join(done.stdout.splitlines()[-2:])
    assert done.returncode == 0, f"ended with {done.returncode} after\n{last}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.parametrize("name", [name for name in SUBJECTS if not name.endswith(".h5")])
def test_a_cut_or_changed_file_is_refused_or_read_as_it_was_written(name, tmp_path, capsys):
    n_refused = damage.damage(SUBJECTS[name], tmp_path)
    n_cases = sum(line.count(": ") for line in capsys.readouterr().out.splitlines())
    # What is not refused had its change where nothing is read: dates, padding.
    assert n_cases > damage.N_FLIPS and n_refused > n_cases / 2


def test_a_cut_or_changed_hdf5_file_crashes_nothing_and_is_read_as_it_was_written():
    names = [name for name in SUBJECTS if name.endswith(".h5")]
    printed = run("damage", *names).splitlines()
    refused = [int(line) for line in printed if line.isdigit()]
    assert len(refused) == len(names) == 4
    assert sum(refused) > 0.98 * sum(": " in line for line in printed)  # nearly every byte matters


def test_damage_that_is_read_as_data_would_be_seen(tmp_path):
    path = tmp_path / "x"
    careless = damage.Subject(
        lambda folder: [path] if path.write_bytes(bytes(range(200))) else [], lambda: None,
        lambda _, path: path.read_bytes(), bytes,
    )  # fmt: skip
    with pytest.raises(AssertionError, match="wrong content was loaded"):
        damage.damage(careless, tmp_path)
    crashing = damage.Subject(careless.save, careless.target, lambda _, path: path.read_bytes()[150:][0], str)
    with pytest.raises(AssertionError, match="IndexError"):
        damage.damage(crashing, tmp_path)


def test_a_number_that_was_changed_is_told_from_a_table_that_was(tmp_path):
    path = tmp_path / "x.h5"
    DictTensor({"x": torch.arange(1000)}).save(path)
    with h5py.File(path, "r+") as file:
        file["x"][7] = 8
    with pytest.raises(FileError, match="'x': its checksum is wrong"):
        DictTensor.load(path)


def test_compressed_hdf5_files_have_checksums_too(tmp_path):
    path = tmp_path / "x.h5"
    x = np.random.default_rng(0).integers(0, 4, 20_000)
    for compression in ("gzip", "lzf"):
        layout.write(path, "Anything", {"x": x}, compression=compression)
        with h5py.File(path) as file:
            [chunk, *_] = file["x"].iter_chunks()
            place = file["x"].id.get_chunk_info_by_coord((chunk[0].start,))
        content = bytearray(path.read_bytes())
        with layout.open_reader(path, compressed=True) as (reader, _):
            reader.verify()
        content[place.byte_offset + place.size // 2] ^= 4
        path.write_bytes(content)
        with pytest.raises(FileError, match="damaged"), layout.open_reader(path, compressed=True) as (reader, _):
            reader.verify()


def test_hdf5_filters_of_others_are_refused_before_libhdf5_looks_for_a_plugin(tmp_path):
    path = tmp_path / "x.h5"
    x = np.random.default_rng(0).integers(0, 255, 4096, np.uint8)
    layout.write(path, "Anything", {"x": x})
    with h5py.File(path, "r+") as file:
        del file["x"]
        made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        made.set_chunk((4096,))
        made.set_filter(31999, h5py.h5z.FLAG_OPTIONAL, ())
        space = h5py.h5s.create_simple(x.shape)
        h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_UINT8, space, made).write(h5py.h5s.ALL, h5py.h5s.ALL, x)
    for compressed in (False, True):
        with pytest.raises(FileError, match="'x' is compressed"), layout.open_reader(path, compressed=compressed):
            pass


def test_pt_files_have_checksums_whatever_the_program_has_set(tmp_path):
    options = pytest.importorskip("torch.serialization")
    if not hasattr(options, "set_crc32_options"):
        pytest.skip("this torch always computes them")
    options.set_crc32_options(False)
    try:
        DictTensor({"x": torch.arange(3)}).save(tmp_path / "x.pt")
        assert not options.get_crc32_options()
    finally:
        options.set_crc32_options(True)
    assert DictTensor.load(tmp_path / "x.pt")["x"].tolist() == [0, 1, 2]


def test_a_csv_file_with_a_huge_cell_takes_no_memory_for_it(tmp_path):
    subject = SUBJECTS["RandomMemory.csv"]
    path, _ = subject.save(tmp_path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], "1" * 100_000 + lines[2], *lines[3:]]))
    memory = subject.target()
    before = subject.content(memory)
    with pytest.raises(FileError, match="checksum is wrong"):
        memory.load(path)
    assert subject.content(memory) == before


# --- files that were made to do harm -------------------------------------------------------------------

HEAD = {"format": "rlstructs", "version": 1, "class": "DictTensor", "arrays": {}}


def pt_of(path, pickled, **data):
    """A .pt file of this pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", pickled)
        for key, values in data.items():
            archive.writestr(f"x/data/{key}", values)


def refused_for_little(path):
    """The file is refused, and took no memory to speak of."""
    tracemalloc.start()
    try:
        with pytest.raises(FileError) as caught:
            DictTensor.load(path)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
    return str(caught.value)


@pytest.mark.parametrize(
    "pickled",
    [b"\x80\x02}r\xff\xff\xff\x07.", b"\x80\x05\x96" + (1 << 45).to_bytes(8, "little") + b".",
     b"\x80\x02\x8a" + b"\xff" * 3],
    ids=["an object of number 2**27", "32 terabytes", "a number that is cut"],
)  # fmt: skip
def test_a_pickle_that_asks_for_memory_gets_none(tmp_path, pickled):
    pt_of(tmp_path / "x.pt", pickled)
    refused_for_little(tmp_path / "x.pt")


def names_of_ours():
    """What the two modules that read pickles hold by name."""
    kept = vars(pickles.StoredTensor).keys(), pickles.read_tensor.__defaults__
    return dict(vars(archives)), dict(vars(pickles)), *kept


def test_a_pickle_changes_nothing_of_ours(tmp_path):
    before = names_of_ours()
    for name in ("torch._utils\n_rebuild_tensor_v2", "collections\nOrderedDict", "torch\nfloat32"):
        state = b"}X\x03\0\0\0keyK\1s"
        for build in (state + b"b", b"N" + state + b"\x86b"):  # its dictionary; its attributes
            pt_of(tmp_path / "x.pt", b"\x80\x02c" + name.encode() + b"\n" + build + b".")
            refused_for_little(tmp_path / "x.pt")
    after = names_of_ours()
    assert after == before


def test_tensors_that_share_their_bytes_or_hold_objects_are_refused(tmp_path):
    x = torch.zeros(1 << 16)
    specs = {f"x{n}": {"dtype": "float32", "shape": [1 << 16]} for n in range(99)}
    torch.save({layout.HEADER: json.dumps(HEAD | {"arrays": specs}), **dict.fromkeys(specs, x)}, tmp_path / "x.pt")
    refused_for_little(tmp_path / "x.pt")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x0"] = x.numpy()
        for name in specs:
            if name != "x0":
                file[name] = file["x0"]
        file[layout.HEADER] = np.frombuffer(json.dumps(HEAD | {"arrays": specs}).encode(), np.uint8)
    assert "is not what the file holds" in refused_for_little(tmp_path / "x.h5")
    with pytest.raises(ValueError, match="is not what the file holds"):
        spec = archives.StoredTensor("0", np.dtype(object), (1,))
        pt_of(tmp_path / "y.pt", b"", **{"0": bytes(8)})
        with mock.patch.object(archives.Unpickler, "load", lambda self: {layout.HEADER: "", "x": spec}):
            with archives.READERS[".pt"](tmp_path / "y.pt"):
                pass


def test_hdf5_arrays_that_say_that_they_are_larger_than_the_file_are_refused(tmp_path):
    path, n = tmp_path / "x.h5", 1 << 30
    header = HEAD | {"arrays": {"x": {"dtype": "uint8", "shape": [n]}}}
    with h5py.File(path, "w", libver="earliest") as file:
        file[layout.HEADER] = np.frombuffer(json.dumps(header).encode(), np.uint8)
        made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        made.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        made.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        dataset = h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_UINT8, h5py.h5s.create_simple((n,)), made)
        offset = dataset.get_offset()
        del dataset
    with open(path, "r+b") as file:
        file.truncate(offset + 10)
        file.seek(40)  # where it says how long it is
        file.write((offset + 10).to_bytes(8, "little"))
    refused_for_little(path)


def test_a_file_is_not_written_through_a_link_that_lies_in_wait(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    for ending in (".npz", ".pt", ".h5"):
        with layout.replace_file(tmp_path / f"x{ending}") as temporary:
            temporary.symlink_to(victim)
            with pytest.raises(FileExistsError):
                layout.WRITERS[ending](temporary, "{}", {"x": np.ones(3)}, {"x": "float64"})
            temporary.unlink()
            temporary.write_text("")
        temporary.symlink_to(victim)  # from before
        DictTensor({"x": torch.ones(3)}).save(tmp_path / f"x{ending}")
        assert DictTensor.load(tmp_path / f"x{ending}").n_elems() == 3
    assert victim.read_text() == "untouched"


def test_a_csv_file_of_more_columns_than_there_is_memory_changes_nothing(tmp_path):
    path, _ = SUBJECTS["RandomMemory.csv"].save(tmp_path)
    memory = RandomMemory(memory_size=4, num_envs=2)
    with mock.patch.object(saving, "available_bytes", lambda: 64):
        with pytest.raises(OutOfMemoryError, match=r"csv: 232 bytes are needed, 64 are available$"):
            memory.load(path)
    assert memory.get_tensor_names() == []


def test_a_compressed_file_whose_texts_need_more_memory_than_there_is_changes_nothing(tmp_path):
    path, buffer = tmp_path / "x.h5", ReplayBuffer(4)
    row = {"obs": 1.0, "act": 1, "rew": 1.0, "terminated": False, "truncated": False}
    buffer.add({**row, "info": {"x": "text"}})
    arrays, dtypes, state = saving.contents(buffer)
    bomb = np.zeros(2**24, np.uint8)  # some kilobytes in the file
    layout.write(path, "ReplayBuffer", {**arrays, "objects/info/x": bomb}, dtypes, state, compression="gzip")
    assert path.stat().st_size < 2**20
    target = ReplayBuffer(4)
    target.add({**row, "obs": 2.0, "info": {"x": "of the target"}})
    with mock.patch.object(saving, "available_bytes", lambda: 2**20):
        with pytest.raises(OutOfMemoryError, match=r"x\.h5: 16,[\d,]+ bytes are needed, 1,048,576 are available$"):
            target.load(path)
    assert target[:].obs.tolist() == [2.0] and target[:].info.x.tolist() == ["of the target"]


# --- a full disk --------------------------------------------------------------------------------------


def test_where_there_is_no_room_the_old_file_stays_and_the_error_names_it():
    printed = run("fill", *SUBJECTS).splitlines()
    assert [int(line) > 1 for line in printed if line.isdigit()] == [True] * len(SUBJECTS)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 100 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", folder], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no file system can be mounted: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.root
def test_a_full_disk_leaves_old_files_whole(small_disk):
    printed = run("fill_disk", str(small_disk), *SUBJECTS)
    assert re.findall(r"^[A-Z]\w+\.\w+$", printed, re.M) == list(SUBJECTS)


@contextlib.contextmanager
def failing(n, number):
    """The n-th time that a file is opened or read, the system says `number`; gives how many times are left."""
    left = [n]

    def count():
        left[0] -= 1
        if not left[0]:
            raise OSError(number, os.strerror(number))

    class File(io.FileIO):
        def __init__(self, path, mode, *, buffering, opener=None):
            count()
            super().__init__(path, mode, opener=opener)

        def readinto(self, data):
            count()
            return super().readinto(data)

    with mock.patch.object(opening, "open", File, create=True):
        yield left


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", SUBJECTS)
def test_an_error_of_the_system_is_not_taken_for_damage(name, number, tmp_path):
    subject, target = SUBJECTS[name], SUBJECTS[name].target()
    first, *_ = subject.save(tmp_path)
    for n in itertools.count(1):
        with failing(n, number) as left:
            try:
                subject.load(target, first)
            except OSError as error:
                assert error.errno == number
            else:
                assert left[0] > 0  # no error was hidden
                break
    assert n > 3


@pytest.mark.parametrize("name", ["open", "_check_regular"])
def test_an_interrupt_as_a_file_is_opened_closes_it_once(name, tmp_path):
    path, others, real = tmp_path / "x.npz", [], getattr(opening, name, open)
    path.write_bytes(b"12")

    def interrupt(*arguments, **options):
        if (opened := real(*arguments, **options)) is not None:  # `open`: nobody has what it returns
            opened.close()
        if others or opened is not None:  # of two checks, the second one, when the file is open
            others.append(path.open("rb", buffering=0))
            raise KeyboardInterrupt
        others.append(None)

    with mock.patch.object(opening, name, interrupt, create=True), pytest.raises(KeyboardInterrupt) as caught:
        opening.open_file(path)
    assert caught.value.__context__ is None
    with others.pop() as of_another_thread:  # it may have got the number that was freed
        assert of_another_thread.read() == b"12"
