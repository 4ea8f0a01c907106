"""A checkpoint gives back what was saved, or says what does not fit and changes nothing."""

from __future__ import annotations

import random
import re
import shutil

import jax
import numpy as np
import pytest
import torch
from frameworks import KINDS
from manifests import change_manifest
from surfaces import CAPACITY, EVERY_SURFACE, N_LANES

from rlstructs import Checkpoint, DictTensor, FileError, SpecError, StateError, TemporalDictTensor, Trajectories
from rlstructs.cli.command import main
from rlstructs.files import layout, segments
from rlstructs.memories.torch import PrioritizedMemory, RandomMemory
from rlstructs.replay import ReplayBuffer
from rlstructs.replay.keep import saving


def steps(first):
    """Six steps of each lane; episodes end at places of their own."""
    numbers = torch.arange(first, first + 6 * N_LANES).reshape(N_LANES, 6)
    ends, never = numbers % 5 == 0, torch.zeros(N_LANES, 6, dtype=torch.bool)
    tensors = {
        "observation/frame": numbers.float(), "_observation/frame": numbers + 0.5, "action/action": numbers,
        "_observation/reward": numbers.float(), "_observation/terminated": ends, "_observation/truncated": never,
        "observation/initial_state": never,
    }  # fmt: skip
    info = DictTensor({"env_index": torch.arange(N_LANES)})
    return Trajectories(info, TemporalDictTensor(tensors, torch.full((N_LANES,), 6)))


def content(memory):
    """Everything that a file of a memory would hold."""
    arrays, _, state = saving.contents(memory)
    return {name: np.asarray(array).tobytes() for name, array in arrays.items()}, state


def network(n=3):
    torch.manual_seed(n)
    model = torch.nn.Sequential(torch.nn.Linear(n, 4), torch.nn.BatchNorm1d(4))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def train(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()


def bits(tree):
    return {name: value.numpy().tobytes() for name, value in tree.items()}


@pytest.mark.parametrize("surface", [case for case in EVERY_SURFACE if case.id != "Shard"])
def test_a_memory_comes_back_bit_for_bit_after_several_checkpoints(surface, tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "LEAST_BYTES", 1)  # a few rows in each file
    memory = surface.make()
    checkpoint = Checkpoint(tmp_path / "runs", memory={"replay": memory}, rng=False)
    for n in range(6):  # the rings wrap
        memory.add_trajectories(steps(100 * n), surface.names)
        checkpoint.save(n)
    saved = content(memory)
    checkpoint.close()
    again = surface.make()
    resumed = Checkpoint(tmp_path / "runs", memory={"replay": again}, rng=False)
    assert resumed.restore() == 5 and content(again) == saved
    for each, which in ((memory, checkpoint), (again, resumed)):
        each.add_trajectories(steps(900), surface.names)
        which.close()
    resumed.save(6)
    assert content(again) == content(memory)
    third = surface.make()
    assert Checkpoint(tmp_path / "runs", memory={"replay": third}, rng=False).restore() == 6
    assert content(third) == content(memory)


def big_memory():
    memory = RandomMemory(memory_size=20_000, num_envs=2, device="cpu", seed=0)
    memory.create_tensor("observations", 16, torch.float32)
    memory.create_tensor("terminated", 1, torch.bool)
    return memory


def fill(memory, n):
    rows = torch.arange(n).float()[None, :, None].expand(2, n, 16)
    tensors = {"observation/frame": rows, "_observation/terminated": rows[..., 0] % 7 == 0}
    batch = Trajectories(DictTensor({"env_index": torch.arange(2)}), TemporalDictTensor(tensors, torch.full((2,), n)))
    memory.add_trajectories(batch, {"observations": "observation/frame", "terminated": "_observation/terminated"})


def n_written(folder):
    """How many of a checkpoint's files another one does not have too, and of how many."""
    counts = [path.stat().st_nlink for path in folder.rglob("rows_*.npz")]
    return counts.count(1), len(counts)


def test_only_rows_that_are_new_are_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "LEAST_BYTES", 1 << 17)
    memory = big_memory()
    fill(memory, 20_000)
    checkpoint = Checkpoint(tmp_path, memory=memory)
    checkpoint.save(0)
    fill(memory, 1000)
    checkpoint.save(1)
    new, n_files = n_written(tmp_path / "step_000000000001")
    assert 1 <= new <= 2 and n_files > 8
    checkpoint.close()
    again = Checkpoint(tmp_path, memory=(restored := big_memory()))
    again.restore()
    fill(restored, 1000)
    again.save(2)
    assert 1 <= n_written(tmp_path / "step_000000000002")[0] <= 2


@pytest.mark.parametrize("how", ["a live tensor", "set_tensor_by_name", "load"])
def test_rows_that_the_program_changes_in_place_are_noticed(how, tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "LEAST_BYTES", 1 << 17)
    memory = big_memory()
    fill(memory, 20_000)
    tensor = memory.get_tensor_by_name("observations") if how == "a live tensor" else None
    checkpoint = Checkpoint(tmp_path / "runs", memory=memory)
    checkpoint.save(0)
    if tensor is not None:
        tensor[3, 1, 2] = -1.0
    elif how == "load":
        other = big_memory()
        other.tensors["observations"] = torch.full((20_000, 2, 16), 3.0)
        fill(other, 20_000)
        other.tensors["observations"][3, 1, 2] = -1.0
        memory.load(other.save(tmp_path / "other.npz"))
    else:
        changed = memory.get_tensor_by_name("observations").clone()
        changed[3, 1, 2] = -1.0
        memory.set_tensor_by_name("observations", changed)
    checkpoint.save(1)
    again = big_memory()
    Checkpoint(tmp_path / "runs", memory=again).restore()
    assert content(again) == content(memory)
    assert again.get_tensor_by_name("observations")[3, 1, 2] == -1.0
    assert n_written(tmp_path / "runs/step_000000000001")[0] == 1


def test_a_deleted_checkpoint_takes_nothing_from_the_others(tmp_path):
    memory = big_memory()
    fill(memory, 10_000)
    checkpoint = Checkpoint(tmp_path, memory=memory, keep=1)
    for step in range(3):
        checkpoint.save(step)
    assert checkpoint.steps == [2]
    again = big_memory()
    assert Checkpoint(tmp_path, memory=again).restore() == 2 and content(again) == content(memory)


def test_a_training_goes_on_with_the_same_numbers(tmp_path):
    model, optimizer = network()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    extra = {
        "n": 0, "returns": np.arange(3.0), "mean": np.float64(2.5), "key": jax.random.key(7), "scheduler": scheduler,
        "old_key": jax.random.PRNGKey(3), "half": jax.numpy.full(2, 1.5, "bfloat16"),
        "nested": {"a": [torch.ones(2), (1, None)]},
    }  # fmt: skip
    checkpoint = Checkpoint(tmp_path, model=model, optimizer={"adam": optimizer}, extra=extra)
    assert checkpoint.restore() is None and checkpoint.steps == []
    for _ in range(4):
        train(model, optimizer)
        scheduler.step()
        extra["n"] += 1
    checkpoint.save(4)
    train(model, optimizer)
    wanted = bits(model.state_dict()), torch.rand(2).tolist(), np.random.rand(), random.random(), scheduler.last_epoch
    again, its_optimizer = network()
    its_scheduler = torch.optim.lr_scheduler.StepLR(its_optimizer, 3)
    found = {**dict.fromkeys(extra), "scheduler": its_scheduler}
    assert Checkpoint(tmp_path, model=again, optimizer={"adam": its_optimizer}, extra=found).restore() == 4
    train(again, its_optimizer)
    numbers = torch.rand(2).tolist(), np.random.rand(), random.random(), its_scheduler.last_epoch
    assert (bits(again.state_dict()), *numbers) == wanted
    assert found["n"] == 4 and found["returns"].tolist() == [0, 1, 2] and found["mean"] == 2.5
    assert jax.random.normal(found["key"]) == jax.random.normal(extra["key"])
    assert found["half"].tolist() == [1.5, 1.5] and found["half"].dtype == "bfloat16"
    assert found["old_key"].tolist() == [0, 3] and found["nested"]["a"][1] == (1, None)


def saved_training(folder, n=3):
    memory = PrioritizedMemory(memory_size=50, num_envs=2, device="cpu", seed=0)
    memory.create_tensor("observations", n)
    memory.add_samples(observations=torch.ones(2, n))
    model, optimizer = network(n)
    checkpoint = Checkpoint(folder, memory=memory, model=model, optimizer=optimizer, extra={"n": 1})
    return checkpoint, memory, model


def test_whatever_byte_is_damaged_is_noticed_before_anything_is_restored(tmp_path):
    checkpoint, _, _ = saved_training(tmp_path / "whole")
    checkpoint.save(3)
    again, memory, model = saved_training(tmp_path / "damaged")
    for file in sorted(path for path in (tmp_path / "whole/step_000000000003").rglob("*") if path.is_file()):
        shutil.rmtree(tmp_path / "damaged", ignore_errors=True)
        shutil.copytree(tmp_path / "whole", tmp_path / "damaged")
        path = tmp_path / "damaged" / file.relative_to(tmp_path / "whole")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 255
        path.write_bytes(data)
        before = content(memory), bits(model.state_dict()), torch.get_rng_state().tolist()
        with pytest.raises(FileError, match=re.escape(str(path.parent))):
            again.restore()
        path.unlink()
        with pytest.raises(FileNotFoundError, match=re.escape(path.name)):
            again.restore()
        assert (content(memory), bits(model.state_dict()), torch.get_rng_state().tolist()) == before


def test_a_header_that_cuts_an_axis_that_is_not_there_is_damaged(tmp_path):
    checkpoint, memory, _ = saved_training(tmp_path)
    checkpoint.save(3)
    change_manifest(tmp_path / "step_000000000003", lambda known: known["parts"]["memory"].pop("checksums"))
    path = tmp_path / "step_000000000003/memory/whole.npz"
    with layout.open_reader(path) as (reader, header):
        arrays = {name: np.empty(shape, dtype) for name in header["arrays"] for dtype, shape in [reader.spec_of(name)]}
        for name, array in arrays.items():
            reader.read_into(name, array)
    header["state"]["groups"]["rows"]["arrays"]["observations"][-1] = 9
    layout.write(path, header["class"], arrays, {}, header["state"])
    before = content(memory)
    with pytest.raises(FileError, match=re.escape(f"{path}: damaged: ")):
        checkpoint.restore()
    assert content(memory) == before


@pytest.mark.parametrize("how", ["a file", "all files"])
@pytest.mark.parametrize("surface", [case for case in EVERY_SURFACE if case.id != "Shard"])
def test_rows_of_another_checkpoint_are_refused_and_nothing_is_restored(how, surface, tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "LEAST_BYTES", 1)
    memory = surface.make()
    checkpoint = Checkpoint(tmp_path, memory=memory, rng=False)
    for n in range(2):
        memory.add_trajectories(steps(100 * n), surface.names)
        checkpoint.save(n)
    old, new = (tmp_path / f"step_{n:012}/memory" for n in range(2))
    differ = [path for path in old.iterdir() if path.read_bytes() != (new / path.name).read_bytes()]
    assert len(differ) > 1
    memory.add_trajectories(steps(200), surface.names)
    before = content(memory)
    for files_ in [differ] if how == "all files" else [[path] for path in differ]:
        kept = {path.name: (new / path.name).read_bytes() for path in files_}
        for path in files_:
            (new / path.name).unlink()  # it may be a link
            shutil.copy(path, new)
        with pytest.raises(FileError, match=re.escape(f"{new}/") + r"\S+: damaged: its checksum is not that of this"):
            checkpoint.restore()
        assert content(memory) == before
        for name, data in kept.items():
            (new / name).write_bytes(data)
    assert checkpoint.restore() == 1


def test_a_manifest_without_checksums_of_a_memory_is_one_of_an_earlier_version(tmp_path):
    checkpoint, memory, _ = saved_training(tmp_path)
    checkpoint.save(3)
    saved = content(memory)
    change_manifest(tmp_path / "step_000000000003", lambda known: known["parts"]["memory"].pop("checksums"))
    memory.add_samples(observations=torch.zeros(2, 3))
    assert checkpoint.restore() == 3 and content(memory) == saved
    checkpoint.save(4)
    (tmp_path / "step_000000000004/memory/rows_00000.npz").unlink()
    with pytest.raises(FileNotFoundError, match=r"rows_00000\.npz"):
        checkpoint.restore()
    assert content(memory) == saved


def test_what_does_not_fit_is_named_and_nothing_is_restored(tmp_path):
    saved_training(tmp_path)[0].save(3)
    model = network()[0]
    memory = PrioritizedMemory(memory_size=50, num_envs=2, device="cpu")
    for arguments, words in (
        ({"model": network(4)[0]}, "model refuses its state: RuntimeError: .*size mismatch for 0.weight"),
        ({"model": torch.nn.Linear(3, 4)}, "model refuses its state: RuntimeError: .*Missing key"),
        ({"memory": RandomMemory(memory_size=51, num_envs=2)}, "holds memory_size 50 and num_envs 2, .* has 51 and 2"),
        ({"memory": ReplayBuffer(100)}, "holds a Memory, not a ReplayBuffer"),
        ({"optimizer": torch.optim.Adam([model[0].weight])}, r"groups of \[4\] parameters, this one has \[1\]"),
        ({"extra": {"n": 1, "other": 2}}, r"extra has no \['other'\], it has \['n'\]"),
        ({"model": {"actor": model}}, "has no model/actor, it has .*'model'"),
    ):
        given = arguments.get("model", model)
        own = given if isinstance(given, torch.nn.Module) else model  # a network is put back if it took a part
        before = bits(own.state_dict()), len(memory)
        with pytest.raises(FileError, match=words):
            Checkpoint(tmp_path, **{"memory": memory, "model": model, **arguments}).restore()
        assert (bits(own.state_dict()), len(memory)) == before
    assert Checkpoint(tmp_path, model=model, rng=False).restore() == 3  # a part is enough


def test_arguments_that_make_no_sense_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"model must have state_dict and load_state_dict, got a int"):
        Checkpoint(tmp_path, model=3)
    with pytest.raises(TypeError, match=r"memory/a must be a memory of rlstructs.memories, .* got a dict"):
        Checkpoint(tmp_path, memory={"a": {}})
    with pytest.raises(SpecError, match=r"model has the name '\.\./a'"):
        Checkpoint(tmp_path, model={"../a": network()[0]})
    with pytest.raises(SpecError, match="keep must be at least 1"):
        Checkpoint(tmp_path, keep=0)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileError, match=r"this is not a folder of checkpoints, it holds \['notes.txt'\]"):
        Checkpoint(tmp_path)
    with pytest.raises(FileError, match="this is a file"):
        Checkpoint(tmp_path / "notes.txt")
    with pytest.raises(SpecError, match=r"extra\['a'\]\[0\] is a object, which a checkpoint cannot hold"):
        Checkpoint(tmp_path / "runs", extra={"a": [object()]}).save(0)
    Checkpoint(tmp_path / "runs", extra={"a": 1}).save(0)  # what the failed one left is gone
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["latest", "lock", "step_000000000000"]


def test_a_folder_has_one_training_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("rlstructs.checkpoints.folder.LOCK_DELAY", 0.0)
    first, second = (Checkpoint(tmp_path, extra={"n": n}) for n in range(2))
    first.save(5)
    with pytest.raises(StateError, match=r"process \d+ on .* saves to this folder"):
        second.save(6)
    first.close()
    with pytest.raises(StateError, match=r"holds a checkpoint of step 5 of an earlier run; call restore\(\) first"):
        second.save(6)
    assert second.restore() == 5
    second.save(5)
    with pytest.raises(SpecError, match="step 4 comes before that of the last checkpoint, 5"):
        second.save(4)
    second.close()
    with pytest.raises(StateError, match="another program has saved step 5"):
        first.save(7)
    second.save(6)
    assert second.steps == [5, 6]


def test_the_command_says_what_is_in_a_folder(tmp_path, capsys):
    checkpoint = saved_training(tmp_path / "runs")[0]
    checkpoint.save(3)
    assert main(["info", str(tmp_path / "runs")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r".*step_000000000003: checkpoint of step 3, 0\.0\d MB", lines[0])
    assert "  memory: memory, a PrioritizedMemory" in lines and "  model: model.pt" in lines


def test_without_a_folder_nothing_is_saved():
    checkpoint = Checkpoint(None, model=network()[0])
    checkpoint.save(1)
    assert checkpoint.restore() is None and checkpoint.steps == [] and checkpoint.save_if_due(1, every=0.0)


def test_rows_of_a_device_are_cut_too(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "LEAST_BYTES", 1)
    made = []
    for _ in range(2):
        made.append(KINDS["torch-tensors"].PrioritizedMemory(memory_size=CAPACITY, num_envs=2))
        made[-1].create_tensor("observations", 3)
    memory, again = made
    checkpoint = Checkpoint(tmp_path, memory=memory)
    for step in range(2):
        memory.add_samples(observations=torch.full((2, 3), float(step)))
        checkpoint.save(step)
    Checkpoint(tmp_path, memory=again).restore()
    assert content(again) == content(memory)
