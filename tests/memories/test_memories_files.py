"""Memories in files: what `save` writes, `load` gives back; what does not fit changes nothing."""

from __future__ import annotations

import csv
import json
import os
import re
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest
import torch
from frameworks import EVERY_KIND, KINDS, add, array, counted, flat, host, kind_of, make, snapshot

from rlstructs.errors import FileError, SpecError
from rlstructs.memories import formats

FORMATS = ["pt", "npz", "csv"]
TENSORS = {
    "x": ("float32", (2, 3)), "u": ("uint8", 2), "b": ("bool", 1), "i": ("int64", 1), "d": ("float64", 1),
    "h": ("float16", 1), "bf": ("bfloat16", 2), "terminated": ("bool", 1),
}  # fmt: skip


@pytest.fixture(params=EVERY_KIND)
def kind(request):
    return request.param


@pytest.fixture(params=FORMATS)
def form(request):
    return request.param


def rich(kind, n_rows=0, n_more=0, cls="RandomMemory", **settings):
    """A memory of 4 rows and 2 environments with tensors of every dtype."""
    memory = make(kind, 4, 2, TENSORS, cls=cls, **settings)
    rng = np.random.default_rng(n_rows)
    for t in range(n_rows + 1):
        n = 2 if t < n_rows else n_more
        if not n:
            break
        memory.add_samples(
            x=array(kind, rng.normal(size=(n, 2, 3))), u=array(kind, rng.integers(0, 256, (n, 2)), "uint8"),
            b=array(kind, rng.random((n, 1)) < 0.5), i=array(kind, rng.integers(-9, 9, (n, 1)), "int64"),
            d=array(kind, rng.normal(size=(n, 1)), "float64"), h=array(kind, rng.normal(size=(n, 1)), "float16"),
            bf=array(kind, rng.normal(size=(n, 2)), "bfloat16"), terminated=array(kind, rng.random((n, 1)) < 0.3),
        )  # fmt: skip
    return memory


def place(memory):
    return len(memory), memory.memory_index, memory.env_index, memory.filled


def valid_rows(memory):
    [tensors] = memory.sample_all(sorted(TENSORS))
    return [(host(tensor).shape, host(tensor).tobytes()) for tensor in tensors]


def streams(memory):
    """What its next samples are."""
    taken = []
    for settings in ({}, {"sequence_length": 2, "episode_ends": "mask"}, {"n_step": 2}):
        [tensors] = memory.sample(["x", "bf", "i"], batch_size=9, **settings)
        taken += [host(tensor).tobytes() for tensor in tensors]  # there is NaN in it
        taken += [np.asarray(memory.get_sampling_indexes()).tolist(), flat(memory.get_sampling_mask())]
        taken += [flat(memory.get_sampling_is_first())]
    return taken


@pytest.mark.parametrize(("n_rows", "n_more"), [(2, 0), (3, 1), (4, 0), (7, 1)])
@pytest.mark.parametrize("into", ["new", "same tensors", "full"])
def test_a_load_restores_rows_cursor_and_sampling(kind, form, tmp_path, n_rows, n_more, into):  # R30, S4
    memory = rich(kind, n_rows, n_more)
    memory.sample(["x"], batch_size=3)
    path = memory.save(tmp_path, format=form)
    if into == "new":
        other = KINDS[kind].RandomMemory(memory_size=4, num_envs=2, seed=9)
    else:
        other = rich(kind, 6 if into == "full" else 0)
    other.load(path if into == "new" else str(path))
    assert other.get_tensor_names() == memory.get_tensor_names()
    assert (place(other), valid_rows(other)) == (place(memory), valid_rows(memory))
    if form != "csv":
        assert snapshot(other) == snapshot(memory)
    for _ in range(3):
        assert streams(other) == streams(memory)
        for each in (memory, other):
            add(each, kind, u=np.full((2, 2), 7, np.uint8), terminated=[[True], [False]])


@pytest.mark.parametrize("name", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_a_file_restores_every_generator_of_numpy(kind, form, name, tmp_path):  # R30
    rng = np.random.Generator(getattr(np.random, name)(3))
    rng.integers(3, size=5, dtype=np.int32)  # half a number is left over
    memory, other = (KINDS[kind].RandomMemory(memory_size=4, num_envs=2, seed=seed) for seed in (rng, 0))
    memory.create_tensor("x", size=1)
    add(memory, kind, x=[[1.0], [2.0]])
    memory.sample(["x"], batch_size=3)
    other.load(memory.save(tmp_path, format=form))
    assert type(other._rng.bit_generator).__name__ == name
    drawn = []
    for each in (memory, other):
        each.sample(["x"], batch_size=50)
        drawn.append(flat(each.get_sampling_indexes()))
    assert drawn[0] == drawn[1]


def test_an_empty_memory_can_be_saved(kind, form, tmp_path):
    path = rich(kind).save(tmp_path, format=form)
    other = rich(kind, 3)
    other.load(path)
    assert (place(other), valid_rows(other)) == (place(rich(kind)), valid_rows(rich(kind)))


def test_a_memory_that_was_reset_can_be_saved(kind, form, tmp_path):
    memory = counted(kind, 4, 2, 6)
    memory.reset()
    add(memory, kind, t=[[1.0], [2.0]], e=[[0.0], [1.0]])
    other = counted(kind, 4, 2, 3)
    other.load(memory.save(tmp_path, format=form))
    assert (place(other), flat(other.sample_all(["t"])[0][0])) == ((2, 1, 0, False), [1, 2])


@pytest.mark.parametrize("n_rows", [3, 7])
def test_a_load_restores_priorities(kind, form, tmp_path, n_rows):  # R30
    settings = {"cls": "PrioritizedMemory", "beta": lambda n: min(1.0, 0.1 * n)}
    memory, other = rich(kind, n_rows, **settings), rich(kind, 5, **settings)
    memory.sample(["x"], batch_size=4)
    memory.update_priorities(memory.get_sampling_indexes(), [0.5, 3.0, 1.5, 7.0])
    other.load(memory.save(tmp_path, format=form))
    for _ in range(3):
        drawn = []
        for each in (memory, other):
            each.sample(["x"], batch_size=20)
            indexes = np.asarray(each.get_sampling_indexes())
            drawn.append((indexes.tolist(), flat(each.get_sampling_weights())))
            each.update_priorities(indexes[:3], [2.0, 9.0, 4.0])
            add(each, kind, u=np.zeros((2, 2), np.uint8))
        assert drawn[0] == drawn[1]


def test_updates_of_rows_drawn_before_a_save_come_in_time_or_not_at_all(kind, form, tmp_path):
    memory = make(kind, 4, 1, ["t"], cls="PrioritizedMemory", alpha=1.0, beta=1.0)
    add(memory, kind, t=np.arange(4.0)[:, None])
    memory.sample(["t"], batch_size=4)
    indexes = memory.get_sampling_indexes()
    add(memory, kind, t=[[4.0]])
    other = make(kind, 4, 1, ["t"], cls="PrioritizedMemory", alpha=1.0, beta=1.0)
    other.load(memory.save(tmp_path, format=form))
    other.update_priorities(indexes, np.full(4, 2.0))
    other.sample(["t"], batch_size=70)
    expected = np.where(np.asarray(other.get_sampling_indexes()) == 0, 1, 0.5)
    assert flat(other.get_sampling_weights()) == expected.tolist()


def test_rows_saved_without_priorities_get_equal_ones(kind, form, tmp_path):
    other = rich(kind, 1, cls="PrioritizedMemory")
    other.update_priorities([0], [9.0])
    other.load(rich(kind, 3).save(tmp_path, format=form))
    other.sample(["x"], batch_size=6)
    assert np.asarray(other.get_sampling_indexes()).tolist() == list(range(6))
    assert flat(other.get_sampling_weights()) == [1] * 6


@pytest.mark.parametrize("name", ["pt", "npz", "csv"])
def test_one_librarys_files_load_in_the_others(name, tmp_path):
    kinds = [kind for kind in EVERY_KIND if isinstance(kind, str)]
    saved = {kind: counted(kind, 4, 2, 6).save(tmp_path / kind, format=name) for kind in kinds}
    for kind in kinds:
        for path in saved.values():
            memory = make(kind, 4, 2)
            memory.load(path)
            assert flat(memory.sample_all(["t"])[0][0]) == [2, 2, 3, 3, 4, 4, 5, 5]


def test_pt_files_are_dictionaries_of_tensors(kind, tmp_path):
    memory = counted(kind, 4, 2, 2)
    tensors = torch.load(memory.save(tmp_path, format="pt"), weights_only=True)
    assert list(tensors)[:2] == ["e", "t"]  # as in skrl's files, which programs read by place too
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())  # programs read them all as such
    for name in ("t", "e"):
        assert tensors[name].shape == (4, 2, 1) and tensors[name].dtype == torch.float32
        np.testing.assert_array_equal(tensors[name].numpy(), host(memory.get_tensor_by_name(name)))


def test_npz_files_are_arrays_by_name(kind, tmp_path):
    memory = counted(kind, 4, 2, 2)
    with np.load(memory.save(tmp_path, format="npz"), allow_pickle=False) as arrays:
        assert list(arrays)[:2] == ["e", "t"]
        for name in ("t", "e"):
            assert arrays[name].shape == (4, 2, 1) and arrays[name].dtype == np.float32
            np.testing.assert_array_equal(arrays[name], host(memory.get_tensor_by_name(name)))


# Files of skrl's


def of_skrl(folder, form, n_rows=5, **more):
    """A file as skrl's memory of 4 rows and 2 environments writes it, with so many valid rows by flat index."""
    t = np.full(8, np.nan, np.float32)
    t[:n_rows] = np.arange(n_rows)
    tensors = {
        "b": (np.arange(8) % 2 == 1).reshape(4, 2, 1), "k": np.arange(16, dtype=np.int32).reshape(4, 2, 2),
        "t": t.reshape(4, 2, 1), "terminated": (np.arange(8) == 2).reshape(4, 2, 1), **more,
    }  # fmt: skip
    path = folder / f"26-11-21_05-17-14-776366_memory_0x7f0d.{form}"
    if form == "pt":
        torch.save({name: torch.from_numpy(array.copy()) for name, array in tensors.items()}, path)
    elif form == "npz":
        np.savez(path, **tensors)
    else:
        with open(path, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([f"{name}.{i}" for name, array in tensors.items() for i in range(array.shape[-1])])
            for row in range(n_rows):
                cells = [array.reshape(8, -1)[row].tolist() for array in tensors.values()]
                writer.writerow([cell for part in cells for cell in part])
    return path


@pytest.mark.parametrize("n_rows", [1, 5, 8])
@pytest.mark.parametrize("into", ["new", "same tensors", "prioritised"])
def test_files_that_skrl_wrote_are_loaded(kind, form, n_rows, into, tmp_path):  # S4: of no effect there
    path, tensors = of_skrl(tmp_path, form, n_rows), {}
    if into == "same tensors":
        tensors = {"b": ("bool", 1), "k": ("int32", 2), "t": ("float32", 1), "terminated": ("bool", 1)}
    memory = make(kind, 4, 2, tensors, cls="PrioritizedMemory" if into == "prioritised" else "RandomMemory")
    if tensors:
        add(memory, kind, t=[[9.0], [9.0]], k=np.zeros((2, 2), np.int32))
    memory.load(path)
    assert place(memory) == (n_rows, n_rows // 2 % 4, n_rows % 2, n_rows == 8)
    [[b, k, t, terminated]] = memory.sample_all(["b", "k", "t", "terminated"])
    assert flat(t) == list(range(n_rows)) and flat(k) == list(range(2 * n_rows))
    assert flat(b) == [row % 2 == 1 for row in range(n_rows)] and host(b).dtype == host(terminated).dtype == bool
    assert flat(terminated) == [row == 2 for row in range(n_rows)]
    for _ in range(2 if n_rows == 8 else 8 - n_rows):  # it goes on in the next place
        add(memory, kind, t=[[50.0]], k=np.zeros((1, 2), np.int32), b=[[True]], terminated=[[False]])
    assert flat(memory.get_tensor_by_name("t")) == ([50, 50] if n_rows == 8 else [0] + [1] * (n_rows > 1)) + (
        [2.0, 3, 4, 5, 6, 7] if n_rows == 8 else [2, 3, 4][: max(0, n_rows - 2)] + [50] * (8 - n_rows)
    )
    starts = {tuple(row) for row in host(memory.sample(["t"], 200, sequence_length=2, episode_ends="never")[0][0])
              .reshape(-1, 2).tolist()}  # fmt: skip
    assert n_rows != 8 or starts == {(3, 5), (4, 6), (5, 7), (6, 50), (7, 50)}  # the one that ends with 2 is alone


OF_OTHER_MEMORIES = {
    "another size": ({}, (5, 2, []), r"tensor 'b' has shape \(4, 2, 1\), this memory has \(5, 2\) rows and env"),
    "a tensor missing": ({}, (4, 2, ["z"]), r"has no tensor\(s\) \['z'\], it has \['b', 'k', 't', 'terminated'\]"),
    "another dtype": ({}, (4, 2, {"k": ("uint8", 2)}), r"tensor 'k' is int32 \(2,\), in this memory uint8 \(2,\)"),
    "another shape": ({}, (4, 2, ["k"]), r"tensor 'k' is int32 \(2,\), in this memory float32 \(1,\)"),
    "no axis": ({"x": np.zeros(8)}, (4, 2, []), r"tensor 'x' has shape \(8,\), this memory has"),
    "a name of ours": ({"__x__": np.zeros((4, 2, 1))}, (4, 2, []), "a tensor's name must be a string that does not"),
}


@pytest.mark.parametrize("form", ["pt", "npz"])
@pytest.mark.parametrize("case", OF_OTHER_MEMORIES)
def test_files_of_other_memories_of_skrl_are_refused(kind, form, case, tmp_path):
    more, (size, num_envs, tensors), message = OF_OTHER_MEMORIES[case]
    path = of_skrl(tmp_path, form, **more)
    memory = make(kind, size, num_envs, tensors)
    refused(memory, path, message)
    assert set(memory.get_tensor_names()) == set(tensors)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.0,a.1\r\n1.0\r\n", "it has a line that is not of 2 numbers"),
        ("a.0\r\n" + "1.0\r\n" * 9, "it has more than the 8 rows that there is room for"),
        ("a.0\r\n[1.0, 2.0]\r\n", "line that is not of 1 numbers"),  # what skrl makes of tensors of several axes
        ("a.0\r\n1.0\r\ntext\r\n", "could not convert string to float: .*text"),
        ("a.0\r\nTrue\r\n2\r\n", "'a' holds '2', expected True or False"),
        ("a.0,b.1\r\n1.0,1.0\r\n", "its first line does not name columns of tensors: 'b.1'"),
        ("a.0,b.0,a.1\r\n1.0,1.0,1.0\r\n", "its first line does not name columns of tensors: 'a.1'"),
        ("a\r\n1.0\r\n", "its first line does not name columns of tensors"),
        ("", "its first line does not name columns of tensors"),
    ],
)  # fmt: skip
def test_text_that_skrl_did_not_write_is_refused(kind, text, message, tmp_path):
    path = tmp_path / "x.csv"
    path.write_bytes(text.encode())
    memory = counted(kind, 4, 2, 3) if text.startswith("b") else make(kind, 4, 2)
    before = snapshot(memory)
    with pytest.raises(FileNotFoundError, match=rf"x\.json: no such file; without it .*{message}"):
        memory.load(path)
    assert snapshot(memory) == before and not memory.get_tensor_names()


def test_a_csv_file_with_a_header_alone_is_an_empty_memory(kind, tmp_path):
    path = tmp_path / "x.csv"
    path.write_bytes(b"a.0,a.1,b.0\r\n")
    memory = make(kind, 4, 2, {"a": ("float32", 2), "b": ("int32", 1)})
    add(memory, kind, a=np.ones((2, 2), np.float32), b=np.ones((2, 1), np.int32))
    memory.load(path)
    assert len(memory) == 0 and (memory.memory_index, memory.env_index) == (0, 0)
    other = make(kind, 4, 2)
    other.load(path)
    assert len(other) == 0 and not other.get_tensor_names()  # it does not say what they hold
    for name, message in (("a", "tensor 'a' has 2 numbers per row"), ("c", r"has no tensor\(s\) \['c'\]")):
        with pytest.raises(FileNotFoundError, match=message):
            make(kind, 4, 2, [name]).load(path)


def test_csv_files_are_in_the_order_of_storage_after_a_wrap_as_skrls_are(kind, tmp_path):
    memory = make(kind, 3, 2, ["a"])
    for t in range(4):
        add(memory, kind, a=[[t], [t + 10]])
    path = memory.save(tmp_path / "x.csv")
    assert path.read_text().split() == ["a.0", "3.0", "13.0", "1.0", "11.0", "2.0", "12.0"]
    other = make(kind, 3, 2)
    other.load(path)
    assert flat(other.sample_all(["a"])[0][0]) == flat(memory.sample_all(["a"])[0][0]) == [1, 11, 2, 12, 3, 13]


def test_csv_files_in_the_order_of_time_of_earlier_versions_are_loaded(kind, tmp_path, monkeypatch):
    memory = make(kind, 3, 2, ["a"])
    for t in range(4):
        add(memory, kind, a=[[t], [t + 10]])
    monkeypatch.setattr(formats, "_list_rows", lambda view: view.by_step())
    monkeypatch.setattr(formats, "STORED", "by time")
    path = memory.save(tmp_path / "x.csv")
    monkeypatch.undo()
    assert path.read_text().split() == ["a.0", "1.0", "11.0", "2.0", "12.0", "3.0", "13.0"]
    other = make(kind, 3, 2)
    other.load(path)
    assert flat(other.sample_all(["a"])[0][0]) == [1, 11, 2, 12, 3, 13]


def test_csv_files_have_a_line_for_each_valid_row(kind, tmp_path):
    memory = make(kind, 3, 2, {"e": ("float32", 1), "t": ("bool", 1), "k": ("int32", (2, 2))})
    for t in range(2):
        add(memory, kind, e=[[t + 0.5], [t + 0.25]], t=[[True], [False]],
            k=np.arange(8, dtype=np.int32).reshape(2, 2, 2))  # fmt: skip
    text = memory.save(tmp_path, format="csv").read_bytes().decode()
    assert text.split("\r\n") == [
        "e.0,k.0.0,k.0.1,k.1.0,k.1.1,t.0",
        "0.5,0,1,2,3,True", "0.25,4,5,6,7,False", "1.5,0,1,2,3,True", "1.25,4,5,6,7,False", "",
    ]  # fmt: skip
    other = make(kind, 3, 2)
    other.load(next((tmp_path / "memories").glob("*.csv")))
    assert flat(other.sample_all(["t"])[0][0]) == [True, False, True, False]  # S22


def test_csv_files_hold_any_name_and_any_float(kind, tmp_path):
    values = np.array([[np.inf, -np.inf, np.nan, 1e-45, 0.1, -0.0]], np.float32)
    memory = make(kind, 2, 1, {'a.b,"c"': ("float32", 6), "é\n": ("float32", 1)})
    memory.add_samples(**{'a.b,"c"': array(kind, values), "é\n": array(kind, [[1.0]])})
    other = make(kind, 2, 1)
    other.load(memory.save(tmp_path, format="csv"))
    assert host(other.sample_all(['a.b,"c"'])[0][0]).tobytes() == values.tobytes()


def test_names_that_begin_as_those_of_bookkeeping_do_are_loaded(form, tmp_path):
    memory, names = make("torch", 2, 1, ["__x", "x__", "__"]), ["__x", "x__", "__"]
    add(memory, "torch", **{name: [[float(n)]] for n, name in enumerate(names)})
    other = make("torch", 2, 1)
    other.load(memory.save(tmp_path, format=form))
    assert [flat(tensor) for tensor in other.sample_all(names)[0]] == [[0], [1], [2]]


def test_names_of_files_sort_by_time(kind, form, tmp_path):
    memory = counted(kind, 4, 2, 1)
    paths = [memory.save(tmp_path, format=form) for _ in range(3)]
    assert paths == sorted(paths) and len(set(paths)) == 3
    for path in paths:
        assert path.parent == tmp_path / "memories"
        assert re.fullmatch(rf"\d\d-\d\d-\d\d_\d\d-\d\d-\d\d-\d{{6}}_memory_0x[0-9a-f]+\.{form}", path.name)


def test_a_memory_is_exported_whenever_it_has_filled(kind, form, tmp_path):
    memory = make(kind, 3, 2, ["t"], export=True, export_format=form, export_directory=tmp_path)
    folder = tmp_path / "memories"
    for t in range(7):
        for n in (1, 1):  # one environment at a time
            add(memory, kind, t=np.full((n, 1), float(t)))
        assert len(list(folder.glob(f"*.{form}"))) == (t + 1) // 3
    last = make(kind, 3, 2)
    last.load(sorted(folder.glob(f"*.{form}"))[-1])
    assert flat(last.sample_all(["t"])[0][0]) == [3, 3, 4, 4, 5, 5]
    memory.save(format=form)  # goes there as well
    assert len(list(folder.glob(f"*.{form}"))) == 3


def test_an_unknown_format_makes_no_folder(kind, tmp_path):  # S23
    with pytest.raises(SpecError, match="^the format must be one of .*, got 'np'$"):
        counted(kind, 4, 2, 1).save(tmp_path, format="np")
    assert not list(tmp_path.iterdir())


def refused(memory, path, message):
    before = snapshot(memory)
    with pytest.raises(FileError, match=message):
        memory.load(path)
    assert snapshot(memory) == before
    twin = rich_twin(memory)
    if len(memory):
        assert flat(memory.sample(["u"], batch_size=5)[0][0]) == flat(twin.sample(["u"], batch_size=5)[0][0])


def rich_twin(memory):
    return rich(kind_of(memory), 6)


@pytest.mark.parametrize("keep", [0, 1, 0.3, 0.6, 0.95, -1])
def test_truncated_files_are_refused(kind, form, tmp_path, keep):
    path = rich(kind, 3, 1).save(tmp_path, format=form)
    data = path.read_bytes()
    path.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    if form == "csv" and keep == -1:  # only the end of the last line is missing: nothing is lost
        memory = rich(kind, 6)
        memory.load(path)
        assert valid_rows(memory) == valid_rows(rich(kind, 3, 1))
        return
    refused(rich(kind, 6), path, "^.*: not a file of rlstructs, or a damaged one")


@pytest.mark.parametrize("form", ["pt", "npz"])
@pytest.mark.parametrize("at", [0.1, 0.3, 0.5, 0.7])
def test_a_changed_byte_is_noticed_or_changes_nothing_else(kind, form, tmp_path, at):
    path = rich(kind, 3, 1).save(tmp_path, format=form)
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 0xFF
    path.write_bytes(bytes(data))
    memory = rich(kind, 6)
    before = snapshot(memory)
    try:
        memory.load(path)
    except FileError:
        assert snapshot(memory) == before
    else:  # it was padding
        assert (place(memory), valid_rows(memory)) == (place(rich(kind, 3, 1)), valid_rows(rich(kind, 3, 1)))


CSV = {
    "a cell that is no number": lambda lines: [lines[0], ["x", *lines[1][1:]], *lines[2:]],
    "an integer too large": lambda lines: [lines[0], *[[*line[:-2], "256", line[-1]] for line in lines[1:]]],
    "a row too few": lambda lines: lines[:-1],
    "a row too many": lambda lines: [*lines, lines[-1]],
    "a cell too few": lambda lines: [*lines[:-1], lines[-1][:-1]],
    "a column too few": lambda lines: [line[:-1] for line in lines],
    "a column too many": lambda lines: [[*line, "1"] for line in lines],
    "a column of another name": lambda lines: [["z.0", *lines[0][1:]], *lines[1:]],
    "columns the other way round": lambda lines: [line[:-2] + line[:-3:-1] for line in lines],
    "nothing": lambda lines: [],
}


@pytest.mark.parametrize("change", CSV.values(), ids=CSV)
def test_csv_files_that_were_changed_are_refused(kind, tmp_path, change):
    memory = make(kind, 4, 2, {"t": ("bool", 1), "u": ("uint8", 2)})
    for _ in range(2):
        add(memory, kind, t=[[True], [False]], u=np.ones((2, 2), np.uint8))
    path = memory.save(tmp_path, format="csv")
    with open(path, newline="") as file:
        lines = list(csv.reader(file))
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(change(lines))
    before = snapshot(memory)
    with pytest.raises(FileError, match="^.*csv: not a file of rlstructs, or a damaged one"):
        memory.load(path)
    assert snapshot(memory) == before


STATES = {
    "another version": ({"version": 99}, "version 99, this program reads version"),
    "no version": ({"version": None}, "version None, this program reads version"),
    "another program": ({"format": "others"}, "no header of rlstructs|not one of ours"),
    "another class": ({"class": "DictTensor"}, "DictTensor|not one of ours"),
}


def rewritten(path, form, change):
    """Changes what a file says of itself."""
    if form == "csv":
        beside = path.with_suffix(".json")
        beside.write_text(json.dumps(json.loads(beside.read_text()) | change))
    elif form == "npz":
        with np.load(path) as arrays:
            held = dict(arrays)
        held["__header__"] = changed(held["__header__"], change)
        with zipfile.ZipFile(path, "w") as file:
            for name, values in held.items():
                with file.open(f"{name}.npy", "w") as member:
                    np.lib.format.write_array(member, values)
    else:
        tensors = torch.load(path, weights_only=True)
        header = tensors["__header__"]
        if isinstance(header, str):
            tensors["__header__"] = json.dumps(json.loads(header) | change)
        else:
            tensors["__header__"] = torch.from_numpy(changed(header.numpy(), change))
        torch.save(tensors, path)


def changed(header, change):
    """A header with other values, stored the way it was."""
    if header.dtype == np.uint8:
        text = json.dumps(json.loads(header.tobytes()) | change)
        return np.frombuffer(text.encode(), np.uint8).copy()
    return np.array(json.dumps(json.loads(str(header)) | change))


@pytest.mark.parametrize(("change", "message"), STATES.values(), ids=STATES)
def test_files_of_other_versions_and_programs_are_refused(kind, form, tmp_path, change, message):
    path = rich(kind, 3).save(tmp_path, format=form)
    rewritten(path, form, {})
    rich(kind, 6).load(path)  # what was only written again still loads
    rewritten(path, form, change)
    refused(rich(kind, 6), path, message)


OTHERS = {
    "memory_size": (lambda kind: make(kind, 5, 2, TENSORS), "holds memory_size 5 and num_envs 2, this .* has 4 and 2"),
    "num_envs": (lambda kind: make(kind, 4, 3, TENSORS), "holds memory_size 4 and num_envs 3, this .* has 4 and 2"),
    "a tensor missing": (lambda kind: make(kind, 4, 2, ["d"]), r"has no tensor\(s\) \['b', 'bf', 'h', "),
    "another shape": (
        lambda kind: make(kind, 4, 2, TENSORS | {"u": ("uint8", 3)}),
        r"tensor 'u' is uint8 \(3,\), in this memory uint8 \(2,\)",
    ),
    "another dtype": (
        lambda kind: make(kind, 4, 2, TENSORS | {"u": ("int32", 2)}),
        r"tensor 'u' is int32 \(2,\), in this memory uint8 \(2,\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("other", "message"), OTHERS.values(), ids=OTHERS)
def test_files_of_other_memories_are_refused(kind, form, tmp_path, other, message):
    refused(rich(kind, 6), other(kind).save(tmp_path, format=form), message)


def test_files_of_other_things_are_refused(kind, tmp_path):
    for name, data in [("a.pt", b"no archive"), ("a.npz", b""), ("a.csv", b"x\n1\n"), ("a.h5", b"x"), ("a", b"x")]:
        (tmp_path / name).write_bytes(data)
        if name == "a.csv":
            (tmp_path / "a.json").write_text("[]")
        refused(rich(kind, 6), tmp_path / name, "not a file of rlstructs|the name must end in one of")
    torch.save({"x": [torch.zeros(4, 2, 1)]}, tmp_path / "b.pt")
    refused(rich(kind, 6), tmp_path / "b.pt", "not a file of rlstructs")
    torch.save({}, tmp_path / "c.pt")
    refused(make(kind, 4, 2), tmp_path / "c.pt", "it holds no tensor")
    for name in ("none.pt", "none.npz", "none.csv"):
        with pytest.raises(FileNotFoundError, match="no such file"):
            rich(kind, 6).load(tmp_path / name)


def test_a_csv_file_without_what_lies_beside_it_is_not_found(kind, tmp_path):
    path = rich(kind, 3).save(tmp_path, format="csv")
    path.with_suffix(".json").unlink()
    with pytest.raises(FileNotFoundError, match=r"\.json: no such file"):
        rich(kind, 6).load(path)


def test_a_file_in_place_of_the_folder_is_an_os_error(kind, form, tmp_path):
    (tmp_path / "memories").write_text("no folder")
    with pytest.raises(OSError, match="memories"):
        counted(kind, 4, 2, 1).save(tmp_path, format=form)
    assert (tmp_path / "memories").read_text() == "no folder"


def test_a_write_that_fails_leaves_what_was_there(kind, form, tmp_path, monkeypatch):
    memory = counted(kind, 4, 2, 1)
    old = memory.save(tmp_path, format=form)
    held = {path.name: path.read_bytes() for path in old.parent.iterdir()}

    def fail(*paths):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(PermissionError, match="Permission denied"):
        memory.save(tmp_path, format=form)
    assert {path.name: path.read_bytes() for path in old.parent.iterdir()} == held


def test_an_export_that_fails_loses_no_row(kind, tmp_path):
    (tmp_path / "memories").write_text("no folder")
    memory = make(kind, 2, 1, ["t"], export=True, export_directory=tmp_path)
    add(memory, kind, t=[[0.0]])
    with pytest.raises(OSError, match="memories"):
        add(memory, kind, t=[[1.0]])
    assert (len(memory), flat(memory.sample_all(["t"])[0][0])) == (2, [0, 1])


def test_a_tensor_that_the_csv_has_no_room_for_takes_no_memory(tmp_path):
    path = counted("torch", 4, 2, 3).save(tmp_path, format="csv")
    beside = path.with_suffix(".json")
    state = json.loads(beside.read_text())
    del state["crc32"]
    state["tensors"]["y"] = ["float32", [10**6]]
    beside.write_text(json.dumps(state | {"crc32": zlib.crc32(json.dumps(state).encode())}))
    tracemalloc.start()
    try:
        with pytest.raises(FileError, match="does not name the columns of 'y'"):
            make("torch", 4, 2, []).load(path)
        assert tracemalloc.get_traced_memory()[1] < 10**7  # a million names take ten times as much
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("stem", ["memory", "a" * 235, "é" * 125], ids=["short", "long", "accents"])
def test_a_memory_is_saved_to_the_file_that_is_named(kind, form, stem, tmp_path):
    memory, other = rich(kind, 2), rich(kind)
    named = tmp_path / "new folder" / f"{stem}.{form}"
    for given in (named, str(named)):
        assert memory.save(given) == named
    assert memory.save(named, form) == named
    beside = [named.with_suffix(".json")] if form == "csv" else []
    assert sorted(named.parent.iterdir()) == sorted([named, *beside])
    other.load(named)
    assert valid_rows(other) == valid_rows(memory)


def test_a_directory_is_one_whatever_it_is_called(form, tmp_path):
    memory = rich("torch", 2)
    (tmp_path / "there.pt").mkdir()
    for folder in ("there.pt", "runs.v2", "runs"):
        path = memory.save(tmp_path / folder, form)
        assert path.parent == tmp_path / folder / "memories" and path.suffix == f".{form}"
    assert memory.save(tmp_path / "runs").suffix == ".pt"


def test_a_name_that_ends_in_another_format_is_refused(tmp_path):
    memory = rich("torch", 2)
    for name, form, message in (
        ("a.npz", "csv", r"a\.npz: the name ends in \.npz, the format should be 'csv'; leave one of them out$"),
        ("a.h5", None, r"^the format must be one of \('pt', 'npz', 'csv'\), got 'h5'$"),
        ("a.pt", "h5", r"^the format must be one of \('pt', 'npz', 'csv'\), got 'h5'$"),
    ):
        with pytest.raises(SpecError, match=message):
            memory.save(tmp_path / name, form)
    assert not list(tmp_path.iterdir())


def test_a_csv_file_of_a_tensor_without_numbers_is_loaded_whole(tmp_path):
    np.savez(tmp_path / "rows.npz", y=np.ones((4, 2, 2), np.float32), x=np.zeros((4, 2, 0), np.float32))
    memory = make("torch", 4, 2)
    memory.load(tmp_path / "rows.npz")
    path = memory.save(tmp_path, format="csv")
    loaded = make("torch", 4, 2, {"y": ("float32", 2)})
    add(loaded, "torch", y=np.zeros((2, 2)))
    loaded.load(path)
    assert len(loaded) == 8 and (host(loaded.get_tensor_by_name("y")) == 1).all()
