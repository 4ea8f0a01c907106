"""Saving and loading: what makes the round trip, what a damaged or foreign file does, what a failed write leaves."""

from __future__ import annotations

import json
import os
import pickle
import resource
import sys
import zipfile

import h5py
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import dict_tensors, filled, temporals

from rlstructs import DictTensor, FileError, TemporalDictTensor, Trajectories
from rlstructs.files import layout as files

ENDINGS = [".npz", ".pt", ".h5"]
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
]  # fmt: skip
quick = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=ENDINGS, ids=[ending[1:] for ending in ENDINGS])
def path(request, tmp_path):
    return tmp_path / f"file{request.param}"


def loaded(structure, path):
    structure.save(path)
    return type(structure).load(path)


def sample():
    m = TemporalDictTensor({"action/y": torch.arange(6).view(2, 3)}, torch.tensor([1, 3]))
    return Trajectories(DictTensor({"env_index": torch.arange(2)}), m)


# --- round trips ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_makes_the_round_trip(path, dtype):
    for shape in ((3, 2), (0, 3), (3, 0, 2), (), (1,)):
        d = DictTensor({"x": filled(shape, dtype, start=3)})
        assert loaded(d, path) == d


def test_special_values_make_the_round_trip(path):
    d = DictTensor(
        {
            "x": torch.tensor([float("nan"), float("inf"), -0.0]),
            "y": torch.tensor([2**63 - 1, -(2**63), 2**53 + 1]),
            "z": torch.tensor([float("nan"), 1.5, -3e38]).bfloat16(),
        }
    )
    back = loaded(d, path)
    assert back == d
    assert back["x"].signbit().tolist()[2]


def test_all_three_classes_and_their_order_make_the_round_trip(path):
    t = sample()
    info = DictTensor({"b/c": torch.zeros(2), "a": torch.zeros(2), "é ü": torch.zeros(2)})
    for structure in (t.info, t.trajectories, t, Trajectories(DictTensor(), t.trajectories), DictTensor(), info):
        assert loaded(structure, path) == structure
    assert list(loaded(info, path)) == ["b/c", "a", "é ü"]
    assert loaded(TemporalDictTensor({}, torch.tensor([1, 3])), path).lengths.tolist() == [1, 3]


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2, 3).t(), torch.arange(9.0)[::2], torch.ones(3, requires_grad=True), torch.ones(1).expand(3)],
    ids=["transposed", "strided", "gradient", "expanded"],
)  # fmt: skip
def test_tensors_of_any_layout_are_saved(path, tensor):
    back = loaded(DictTensor({"x": tensor}), path)
    assert (back == DictTensor({"x": tensor}), back["x"].requires_grad) == (True, False)


def test_a_view_is_saved_without_the_rest_and_names_do_not_share_memory(path):
    whole = torch.zeros(100_000)
    back = loaded(DictTensor({"x": whole[:10], "y": whole[:10], "z": whole[5:15]}), path)
    back["x"].fill_(1)
    assert (back["y"].sum(), back["z"].sum(), path.stat().st_size < 20_000) == (0, 0, True)


def test_what_is_loaded_is_private_and_writable(path):
    first, second = loaded(sample(), path), Trajectories.load(path)
    first.trajectories["action/y"].zero_()
    first.lengths.zero_()
    assert second == sample()


@quick
@given(dict_tensors, temporals, st.sampled_from(ENDINGS))
def test_random_structures_make_the_round_trip(tmp_path, d, m, ending):
    for structure in (d, m, Trajectories(DictTensor({"i": torch.arange(m.n_elems())}), m)):
        assert loaded(structure, tmp_path / f"file{ending}") == structure


def test_npz_and_h5_carry_the_same_names(tmp_path):
    sample().save(tmp_path / "x.npz")
    sample().save(tmp_path / "x.h5")
    with np.load(tmp_path / "x.npz", allow_pickle=False) as arrays, h5py.File(tmp_path / "x.h5") as file:
        assert set(arrays) == {"info/env_index", "trajectories/action/y", "trajectories/lengths", files.HEADER}
        for name in arrays:
            assert (file[name][()] == arrays[name]).all()


def test_the_header_says_what_is_in_a_file(path):
    sample().save(path)
    assert files.read_header(path) == {
        "format": "rlstructs",
        "version": 1,
        "class": "Trajectories",
        "arrays": {
            "info/env_index": {"dtype": "int64", "shape": [2]},
            "trajectories/action/y": {"dtype": "int64", "shape": [2, 3]},
            "trajectories/lengths": {"dtype": "int64", "shape": [2]},
        },
    }


# --- names and paths --------------------------------------------------------------------------------


def test_strings_are_paths_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for ending in ENDINGS:
        sample().save(f"file{ending}")
        assert Trajectories.load(f"file{ending}") == sample()


@pytest.mark.parametrize("name", ["file.txt", "file", "file.npz.gz", "file.NPZ", ".npz"])
def test_other_endings_are_refused(tmp_path, name):
    for act in (sample().save, Trajectories.load):
        with pytest.raises(FileError, match=rf"{name}: the name must end in one of \.npz, \.pt, \.h5$"):
            act(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_or_folder_is_named(path):
    with pytest.raises(FileNotFoundError, match=rf"^{path}: no such file$"):
        Trajectories.load(path)
    inside = path.parent / "none" / path.name
    with pytest.raises(FileNotFoundError, match=rf"^{inside}: there is no folder {inside.parent}$"):
        sample().save(inside)


@pytest.mark.parametrize(
    ("ending", "names"),
    [(ending, ["__header__"]) for ending in ENDINGS]
    + [(".npz", ["a\0b"])]
    + [(".h5", names) for names in (["a", "a/b"], [""], ["a//b"], ["/a"], ["a/"], ["a/./b"], ["."])],
    ids=lambda value: str(value).replace("\0", "NUL"),
)
def test_names_that_a_file_cannot_hold_are_refused(tmp_path, ending, names):
    with pytest.raises(FileError, match=rf"file{ending}: a {ending} file cannot hold the name"):
        DictTensor({name: torch.zeros(1) for name in names}).save(tmp_path / f"file{ending}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ending", [".npz", ".pt"])
@pytest.mark.parametrize("name", ["", "x.npy", "a//b", "../x", "/x", "a/", "\\", "__header__.npy"])
def test_odd_names_make_the_round_trip_elsewhere(tmp_path, ending, name):
    d = DictTensor({name: torch.ones(1), "a": torch.zeros(1)})
    assert loaded(d, tmp_path / f"file{ending}") == d


# --- writing ----------------------------------------------------------------------------------------


def test_saving_replaces_a_file_and_leaves_nothing_beside(path):
    DictTensor({"x": torch.zeros(3)}).save(path)
    sample().save(path)
    assert (Trajectories.load(path) == sample(), os.listdir(path.parent)) == (True, [path.name])


@pytest.fixture
def small_files():
    """The system writes no file beyond 64 KiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failed_write_leaves_the_old_file_whole_and_no_temporary(path, small_files):
    sample().save(path)
    with pytest.raises(OSError, match=str(path)):
        DictTensor({"x": torch.zeros(100_000)}).save(path)
    assert (Trajectories.load(path) == sample(), os.listdir(path.parent)) == (True, [path.name])


@pytest.mark.parametrize(("ending", "name"), [(".npz", "a\0b"), (".h5", "a//b")])
def test_what_a_file_cannot_hold_leaves_the_old_file_whole(tmp_path, ending, name):
    path = tmp_path / f"file{ending}"
    sample().save(path)
    with pytest.raises(FileError, match=f"a {ending} file cannot hold the name"):
        DictTensor({"x": torch.zeros(1), name: torch.zeros(1)}).save(path)
    assert (Trajectories.load(path) == sample(), os.listdir(tmp_path)) == (True, [path.name])


def test_a_folder_of_that_name_stays(path):
    path.mkdir()
    with pytest.raises(OSError, match=path.name):
        sample().save(path)
    with pytest.raises(FileError, match=f"^{path}: "):
        Trajectories.load(path)
    assert (path.is_dir(), os.listdir(path.parent)) == (True, [path.name])


# --- damaged and foreign files ----------------------------------------------------------------------


def refused(path, message=None, kind=Trajectories):
    """The text of the error; it is one of ours and names the file."""
    with pytest.raises(FileError, match=message) as caught:
        kind.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value)


def write(path, header, arrays):
    """A file of any header (as JSON, or raw text) and arrays, laid out like ours."""
    text = header if isinstance(header, str) else json.dumps(header)
    raw = np.frombuffer(text.encode(), np.uint8)
    if path.suffix == ".npz":
        np.savez(path, **arrays, **{files.HEADER: raw})
    elif path.suffix == ".pt":
        torch.save({files.HEADER: text, **{name: torch.from_numpy(array) for name, array in arrays.items()}}, path)
    else:
        with h5py.File(path, "w") as file:
            for name, array in (*arrays.items(), (files.HEADER, raw)):
                file[name] = array


def header(kind="DictTensor", **arrays):
    """A header as ours; arrays as name=(dtype, shape)."""
    specs = {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in arrays.items()}
    return {"format": "rlstructs", "version": 1, "class": kind, "arrays": specs}


GOOD = header(x=("float32", [3]))
X = {"x": np.ones(3, np.float32)}


def test_files_written_by_the_helper_are_read(path):
    write(path, GOOD, X)
    assert DictTensor.load(path)["x"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (header(x=("float32", [4])), "the header says"),
        (header(x=("float32", [3, 1])), "the header says"),
        (header(x=("int32", [3])), "the header says"),
        (header(x=("bfloat16", [3])), None),
        (header(x=("float32", [3]), y=("float32", [3])), "y"),
        (header(x=("float32", [2**40])), None),
        ({**GOOD, "format": "other"}, "it has no header of rlstructs"),
        ({**GOOD, "version": 2}, "version 2, this program reads version 1"),
        ({**GOOD, "version": None}, "version None"),
        ({**GOOD, "class": 3}, "its header is incomplete"),
        ({**GOOD, "class": "Trajectories"}, "holds a Trajectories, not a DictTensor"),
        ({**GOOD, "class": "Other"}, "holds a Other, not a DictTensor"),
        ({**GOOD, "arrays": []}, "its header is incomplete"),
        ({**GOOD, "arrays": {"x": 3}}, None),
        ({**GOOD, "arrays": {"x": {"dtype": [], "shape": [3]}}}, None),
        ([], "it has no header of rlstructs"),
        ("{", None),
        ("", None),
        ("[" * 100_000, None),
    ],
    ids=[
        "longer", "axes", "dtype", "bits", "missing array", "huge", "format", "version", "no version", "class",
        "other class", "unknown class", "arrays", "spec", "dtype of the spec", "list", "half", "empty", "deep",
    ],
)  # fmt: skip
def test_a_header_that_lies_is_refused(path, head, message):
    write(path, head, X)
    refused(path, message, DictTensor)


@pytest.mark.parametrize(
    ("kind", "arrays", "message"),
    [
        (DictTensor, {"x": np.ones(3), "y": np.ones(2)}, "'y' has batch size 2"),
        (TemporalDictTensor, {"y": np.ones((1, 2)), "lengths": np.array([3])}, "lengths must lie in"),
        (TemporalDictTensor, {"y": np.ones((1, 2))}, "it has no lengths"),
        (Trajectories, {"info/x": np.ones(1), "trajectories/y": np.ones((1, 2))}, "it has no lengths"),
        (Trajectories, {"trajectories/lengths": np.array([1]), "x": np.ones(1)}, "'x' belongs to neither"),
        (Trajectories, {"trajectories/lengths": np.array([1]), "info/x": np.ones(2)}, "info has 2 rows"),
    ],
    ids=["rows", "lengths", "no lengths", "no lengths of the trajectories", "part", "parts"],
)
def test_content_that_does_not_fit_its_class_is_refused(path, kind, arrays, message):
    specs = {name: (str(array.dtype), list(array.shape)) for name, array in arrays.items()}
    write(path, header(kind.__name__, **specs), arrays)
    refused(path, f"damaged: .*{message}", kind)


def test_another_class_is_refused_by_name(path):
    sample().save(path)
    for kind in (DictTensor, TemporalDictTensor):
        assert refused(path, kind=kind) == f"{path}: holds a Trajectories, not a {kind.__name__}"


def test_a_truncated_file_is_refused(path):
    sample().save(path)
    whole = path.read_bytes()
    for size in {*range(0, len(whole), 97), len(whole) - 1}:
        path.write_bytes(whole[:size])
        refused(path)


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 1000, b"hello", b"PK\x03\x04 no", b"\x89HDF\r\n\x1a\n no"],
    ids=["nothing", "zeros", "text", "zip", "hdf5"],
)  # fmt: skip
def test_bytes_of_something_else_are_refused(path, content):
    path.write_bytes(content)
    refused(path)


@quick
@given(st.sampled_from([".npz", ".pt"]), st.data())
def test_changed_bytes_are_refused_or_do_not_matter(tmp_path, ending, data):
    path = tmp_path / f"file{ending}"
    sample().save(path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        assert Trajectories.load(path) == sample()
    except FileError as error:
        assert str(error).startswith(f"{path}: ")


def test_foreign_files_are_refused(tmp_path):
    np.savez(tmp_path / "x.npz", x=np.ones(3))
    torch.save(torch.ones(3), tmp_path / "x.pt")
    torch.save({"x": torch.ones(3)}, tmp_path / "y.pt")
    with (tmp_path / "z.pt").open("wb") as file:
        pickle.dump({"x": 1}, file)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.ones(3)
        file[f"{files.HEADER}/group"] = np.ones(3)
    for name in os.listdir(tmp_path):
        refused(tmp_path / name)


def test_compressed_files_are_refused(tmp_path):
    arrays = {**X, files.HEADER: np.frombuffer(json.dumps(GOOD).encode(), np.uint8)}
    np.savez_compressed(tmp_path / "x.npz", **arrays)
    refused(tmp_path / "x.npz", "compressed", DictTensor)
    DictTensor({"x": torch.zeros(3)}).save(tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as old, zipfile.ZipFile(tmp_path / "y.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name), zipfile.ZIP_DEFLATED)
    refused(tmp_path / "y.pt", "compressed", DictTensor)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file[files.HEADER] = np.frombuffer(json.dumps(header(x=("float32", [2**20]))).encode(), np.uint8)
        file.create_dataset("x", data=np.zeros(2**20, np.float32), compression="gzip")
    refused(tmp_path / "x.h5", "is not what the file holds", DictTensor)


# --- nothing large is made, nothing is executed -------------------------------------------------------

HUGE = [2**50]  # elements


def test_arrays_larger_than_their_file_are_refused_before_memory_is_taken(tmp_path):
    head = header(x=("float32", HUGE))
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        with archive.open("x.npy", "w") as member:
            np.lib.format.write_array_header_1_0(member, {"descr": "<f4", "fortran_order": False, "shape": tuple(HUGE)})
        with archive.open(f"{files.HEADER}.npy", "w") as member:
            np.lib.format.write_array(member, np.frombuffer(json.dumps(head).encode(), np.uint8))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file[files.HEADER] = np.frombuffer(json.dumps(head).encode(), np.uint8)
        file.create_dataset("x", HUGE, np.float32, chunks=(1,))
    torch.save({files.HEADER: json.dumps(head), "x": torch.zeros(1).expand(HUGE)}, tmp_path / "x.pt")
    for name in ("x.npz", "x.h5", "x.pt"):
        refused(tmp_path / name, kind=DictTensor)


def test_a_zip_directory_that_lies_is_refused(tmp_path):
    path = tmp_path / "x.npz"
    write(path, GOOD, X)
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\x01\x02")
    content[entry + 20 : entry + 28] = b"\xff\xff\xff\x7f" * 2  # both sizes
    path.write_bytes(content)
    refused(path, "it claims more bytes than it has", DictTensor)


@pytest.mark.parametrize(
    "value",
    [3, "text", torch.nn.Parameter(torch.ones(3)), torch.ones(3, device="meta"), torch.eye(3).to_sparse(), [1]],
    ids=["int", "text", "parameter", "meta", "sparse", "list"],
)
def test_a_pt_file_holds_plain_tensors_only(tmp_path, value):
    torch.save({files.HEADER: json.dumps(GOOD), "x": value}, tmp_path / "x.pt")
    refused(tmp_path / "x.pt", "'x' is not a plain tensor|it holds more than tensors: torch._utils._reb", DictTensor)


class MakesFolder:
    """Unpickling this makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_loading_executes_nothing(tmp_path):
    made = tmp_path / "made"
    evil = np.array([MakesFolder(made)], dtype=object)
    np.savez(tmp_path / "x.npz", x=evil, **{files.HEADER: np.frombuffer(json.dumps(GOOD).encode(), np.uint8)})
    np.savez(tmp_path / "y.npz", **{files.HEADER: evil})
    torch.save({files.HEADER: json.dumps(GOOD), "x": MakesFolder(made)}, tmp_path / "x.pt")
    torch.save(MakesFolder(made), tmp_path / "y.pt", _use_new_zipfile_serialization=False)
    for name in ("x.npz", "y.npz", "x.pt", "y.pt"):
        refused(tmp_path / name, kind=DictTensor)
        assert not made.exists()
    assert "weights_only" not in refused(tmp_path / "x.pt", "more than tensors", DictTensor)
    # The files would do it, if they were trusted.
    for name, load in (("x.npz", lambda p: np.load(p, allow_pickle=True)["x"]), ("x.pt", unsafe), ("y.pt", unsafe)):
        load(tmp_path / name)
        made.rmdir()


def unsafe(path):
    return torch.load(path, weights_only=False)


def test_an_h5_file_reads_no_other_file(tmp_path):
    write(tmp_path / "other.h5", GOOD, X)
    (tmp_path / "secret").write_bytes(X["x"].tobytes())
    raw = np.frombuffer(json.dumps(GOOD).encode(), np.uint8)
    layout = h5py.VirtualLayout((3,), np.float32)
    layout[:] = h5py.VirtualSource(tmp_path / "other.h5", "x", (3,))
    for name, add in {
        "link": lambda file: file.__setitem__("x", h5py.ExternalLink(str(tmp_path / "other.h5"), "x")),
        "external": lambda file: file.create_dataset("x", 3, np.float32, external=[(str(tmp_path / "secret"), 0, 12)]),
        "virtual": lambda file: file.create_virtual_dataset("x", layout),
    }.items():
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file[files.HEADER] = raw
            add(file)
        refused(tmp_path / f"{name}.h5", "'x' lies in another file", DictTensor)


def test_without_h5py_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match=r"pip install h5py"):
        sample().save(tmp_path / "x.h5")
    (tmp_path / "y.h5").write_bytes(b"")
    with pytest.raises(ImportError, match=r"pip install h5py"):
        Trajectories.load(tmp_path / "y.h5")
    assert os.listdir(tmp_path) == ["y.h5"]


class Batch(Trajectories):
    """One of a program's own."""


def test_classes_that_are_derived_are_saved_and_loaded_as_themselves(path):
    batch = Batch(DictTensor(), TemporalDictTensor({"r": torch.ones(2, 3)}))
    batch.save(path)
    assert type(Batch.load(path)) is Batch and Batch.load(path) == batch
    assert Trajectories.load(path).trajectories == batch.trajectories


# --- names ------------------------------------------------------------------------------------------


def _saved(structure, path):
    structure.save(path)
    return type(structure).load(path) == structure


def _buffer_saved(make, path):
    buffer, other = make(), make()
    buffer.save(path)
    other.load(path)
    return len(other) == len(buffer) == 2


def _tianshou(kind):
    from rlstructs import replay

    buffer = replay.ReplayBuffer(4) if kind == "plain" else replay.PrioritizedReplayBuffer(4, 0.5, 0.5)
    for t in range(2):
        buffer.add({"obs": t, "act": 0, "rew": 0.0, "terminated": False, "truncated": False, "info": {"x": "t"}})
    return buffer


def _chunks():
    from rlstructs.replay import ChunkReplayBuffer

    buffer = ChunkReplayBuffer(4, 0)
    buffer.setup_entry("x", np.int64)
    for t in range(2):
        buffer.append({"x": t})
    return buffer


def _rows():
    from rlstructs.replay import DictTensorReplayBuffer, LazyTensorStorage

    buffer = DictTensorReplayBuffer(storage=LazyTensorStorage(4))
    buffer.extend(DictTensor({"x": torch.arange(2)}))
    return buffer


SAVERS = {
    "DictTensor": lambda path: _saved(DictTensor({"x": torch.arange(3)}), path),
    "TemporalDictTensor": lambda path: _saved(TemporalDictTensor({"x": torch.zeros(2, 3)}, torch.tensor([1, 3])), path),
    "Trajectories": lambda path: _saved(sample(), path),
    "ReplayBuffer": lambda path: _buffer_saved(lambda: _tianshou("plain"), path),
    "PrioritizedReplayBuffer": lambda path: _buffer_saved(lambda: _tianshou("prioritised"), path),
    "ChunkReplayBuffer": lambda path: _buffer_saved(_chunks, path),
    "DictTensorReplayBuffer": lambda path: _buffer_saved(_rows, path),
}
STEMS = {"200": "a" * 200, "235": "b" * 235, "longest": "c" * 251, "accents": "é" * 125, "signs": "学" * 83}


@pytest.mark.parametrize("stem", STEMS.values(), ids=STEMS)
@pytest.mark.parametrize("saver", SAVERS)
def test_whatever_name_a_file_may_have_it_can_be_saved_to(saver, stem, path):
    named = path.with_name(stem[: 255 - len(path.suffix)] + path.suffix)
    assert len(os.fsencode(named.name)) <= 255
    for _ in range(2):
        assert SAVERS[saver](named)
    assert [each.name for each in named.parent.iterdir()] == [named.name]


def test_long_names_that_begin_alike_have_temporary_names_of_their_own(tmp_path):
    first, other = (files.temporary_name(tmp_path / f"{'x' * 240}{end}.pt") for end in ("a", "b"))
    assert first != other and all(len(os.fsencode(each.name)) <= 255 for each in (first, other))


def test_a_name_that_is_too_long_is_named_and_nothing_is_left(path):
    named = path.with_name("a" * 300 + path.suffix)
    with pytest.raises(OSError, match="File name too long") as raised:
        DictTensor({"x": torch.arange(3)}).save(named)
    assert str(named) in str(raised.value) and not list(path.parent.iterdir())
