"""The folder of checkpoints: who holds its lock, and what an error leaves."""

from __future__ import annotations

import errno
import functools
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from manifests import change_manifest
from processes import LIMIT

from rlstructs import Checkpoint, StateError
from rlstructs.files import segments
from rlstructs.memories.torch import RandomMemory

# `first` holds the lock, whatever the event is, until it releases it.
HELD = r"""
import os, resource, signal, sys
from pathlib import Path
from rlstructs import StateError
from rlstructs.checkpoints import folder

folder.LOCK_DELAY = 0.0
first, second = (folder.CheckpointFolder(Path(sys.argv[1])) for _ in range(2))
{event}
try:
    second.lock()
except StateError as error:
    print(error)
first.unlock()
assert second.lock()
"""
# Files may have no bytes, as on a full disk.
FULL = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
assert first.lock() and not first.lock()
"""
# A forked child releases the lock that it has from its parent.
FORKED = """
first.lock()
if not os.fork():
    first.unlock()
    os._exit(0)
os.wait()
"""

# A forked child saves with the object of its parent, which holds the lock; then the parent lets it.
SHARED = r"""
import os, sys
from rlstructs import Checkpoint, StateError
from rlstructs.checkpoints import folder

folder.LOCK_DELAY = 0.0
checkpoint = Checkpoint(sys.argv[1], extra={"n": 1})
checkpoint.save(1)
for _ in range(2):
    if not os.fork():
        try:
            checkpoint.save(2)
            print("saved", flush=True)
        except StateError as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
    checkpoint.close()
assert checkpoint.steps == [1, 2]
"""


def test_a_save_counts_although_the_oldest_checkpoint_cannot_be_deleted(tmp_path, monkeypatch):
    def fail(path):
        raise PermissionError(f"{path} stays")

    checkpoint = Checkpoint(tmp_path, extra={"n": 1}, keep=1)
    checkpoint.save(1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", fail)
        with pytest.raises(PermissionError, match=r"step_000000000001\.old stays"):
            checkpoint.save(2)
    assert checkpoint.steps == [2]
    checkpoint.save(3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "lock", "step_000000000003"]


@pytest.mark.parametrize(("event", "holder"), [(FULL, "another program"), (FORKED, r"process \d+ on .*")])
def test_a_lock_is_held_until_its_owner_releases_it(event, holder, subprocess_env, tmp_path):
    command = [sys.executable, "-c", HELD.format(event=event), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=subprocess_env)
    assert done.returncode == 0, done.stderr
    assert re.search(f"{holder} saves to this folder", done.stdout)


def test_a_forked_child_saves_once_its_parent_has_closed_its_checkpoint(subprocess_env, tmp_path):
    command = [sys.executable, "-c", SHARED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=subprocess_env)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r".*process \d+ on .* saves to this folder; .*\nsaved\n", done.stdout)


def test_a_child_that_has_the_lock_open_does_not_keep_it(tmp_path, monkeypatch):
    monkeypatch.setattr("rlstructs.checkpoints.folder.LOCK_DELAY", 0.0)
    checkpoint, other = (Checkpoint(tmp_path, extra={"n": n}) for n in range(2))
    checkpoint.save(1)
    assert other.restore() == 1
    files = [int(each.name) for each in Path("/proc/self/fd").iterdir() if each.resolve() == tmp_path / "lock"]
    assert files
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=files):  # as a forked one has it
        with pytest.raises(StateError, match="saves to this folder"):
            other.save(2)
        checkpoint.close()
        other.save(2)


def memory_of(first):
    """A memory that is full of rows, the first of which is this number."""
    memory = RandomMemory(memory_size=20, num_envs=2, device="cpu", seed=0)
    memory.create_tensor("x", 3)
    for n in range(20):
        memory.add_samples(x=torch.full((2, 3), float(first + n)))
    return memory


def rows(memory):
    return memory.sample_all(["x"])[0][0]


@pytest.fixture
def small_files(monkeypatch):
    monkeypatch.setattr(segments, "LEAST_BYTES", 1)


@pytest.mark.usefixtures("small_files")
def test_a_checkpoint_that_another_training_put_in_the_same_place_is_noticed(tmp_path):
    folder = tmp_path / "runs"
    memory, other = memory_of(0), memory_of(100)
    checkpoint, its_checkpoint = (Checkpoint(folder, memory=each) for each in (memory, other))
    checkpoint.save(100)
    shutil.rmtree(folder)
    its_checkpoint.save(100)  # it does not have to wait for a lock of a file that is gone
    its_checkpoint.close()
    with pytest.raises(StateError, match="another program has saved step 100"):
        checkpoint.save(200)
    shutil.rmtree(folder)
    checkpoint.save(200)
    again = memory_of(7)
    assert Checkpoint(folder, memory=again).restore() == 200 and torch.equal(rows(again), rows(memory))


@pytest.mark.usefixtures("small_files")
def test_checkpoints_of_the_same_step_that_were_replaced_twice_are_noticed(tmp_path):
    memory, other = memory_of(0), memory_of(100)
    checkpoint, its_checkpoint = (Checkpoint(tmp_path, memory=each, keep=1) for each in (memory, other))
    checkpoint.save(5)
    assert its_checkpoint.restore() == 5
    for _ in range(2):
        memory.add_samples(x=torch.zeros(2, 3))
        checkpoint.save(5)
        assert len(list(tmp_path.glob("step_*"))) == 1
    checkpoint.close()
    with pytest.raises(StateError, match="another program has saved step 5"):
        its_checkpoint.save(6)


def test_a_lock_of_a_deleted_folder_is_taken_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("rlstructs.checkpoints.folder.LOCK_DELAY", 0.0)
    first, second = (Checkpoint(tmp_path / "runs", extra={"n": n}) for n in range(2))
    first.save(1)
    shutil.rmtree(tmp_path / "runs")
    second.save(1)
    with pytest.raises(StateError, match="saves to this folder"):
        first.save(2)
    shutil.rmtree(tmp_path / "runs")
    first.save(2)
    with pytest.raises(StateError, match="saves to this folder"):
        second.save(3)
    assert first.steps == [2]


def test_a_checkpoint_of_an_earlier_version_has_no_id_and_is_restored(tmp_path):
    Checkpoint(tmp_path, extra={"n": 3}).save(1)
    change_manifest(tmp_path / "step_000000000001", lambda known: known.pop("id"))
    again = Checkpoint(tmp_path, extra=(extra := {"n": 0}))
    assert again.restore() == 1 and extra == {"n": 3}
    again.save(2)
    assert again.steps == [1, 2]


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    checkpoint = Checkpoint("runs", extra={"n": 1})
    monkeypatch.chdir(tmp_path / "there")
    checkpoint.save(1)
    monkeypatch.chdir(tmp_path)
    checkpoint.save(2)
    assert checkpoint.restore() == 2 and checkpoint.steps == [1, 2]
    assert len(os.listdir("here/runs")) == 4 and not os.listdir("there")


def test_a_checkpoint_that_was_moved_and_linked_to_is_restored_and_left_where_it_is(tmp_path):
    folder, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    Checkpoint(folder, extra={"n": 1}).save(1)
    shutil.move(folder / "step_000000000001", elsewhere)
    (folder / "step_000000000001").symlink_to(elsewhere)
    checkpoint = Checkpoint(folder, extra={"n": 0}, keep=1)
    assert checkpoint.restore() == 1
    for step in (2, 3):
        checkpoint.save(step)
    assert sorted(os.listdir(folder)) == ["latest", "lock", "step_000000000003"]
    assert (elsewhere / "checkpoint.json").exists()


def test_what_an_interrupted_save_left_does_not_stop_others_if_it_cannot_be_deleted(tmp_path, monkeypatch):
    checkpoint = Checkpoint(tmp_path, extra={"n": 1}, keep=1)
    checkpoint.save(1)
    (left := tmp_path / "step_000000000002.new").mkdir()
    delete = shutil.rmtree

    def fail(path):
        if path == left:
            raise PermissionError(f"{path} stays")
        delete(path)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", fail)
        for step in (2, 3):
            with pytest.raises(PermissionError, match=r"step_000000000002\.new stays"):
                checkpoint.save(step)
            assert checkpoint.steps == [step] and len(os.listdir(tmp_path)) == 4
    checkpoint.save(3)
    assert sorted(os.listdir(tmp_path)) == ["latest", "lock", "step_000000000003_2"]


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("has_locks", [True, False])
def test_a_restore_beside_a_program_that_saves_gives_one_of_its_checkpoints(has_locks, tmp_path, monkeypatch):
    memory, extra = memory_of(0), {"n": 0}
    saving = Checkpoint(tmp_path, memory=memory, extra=extra, keep=1)

    def save():
        extra["n"] += 1
        memory.add_samples(x=torch.full((2, 3), 20.0 + extra["n"]))
        saving.save(extra["n"])

    def open_file(*arguments, left, real=os.open, **others):
        left[0] -= 1
        if not left[0]:  # the other program saves, and deletes what is being read
            save()
        return real(*arguments, **others)

    if not has_locks:
        monkeypatch.setattr("fcntl.flock", lambda *_: os.stat(tmp_path / "there is none"))
    save()
    n, is_over = 0, False
    while not is_over:
        n += 1
        restored, its_extra, left = memory_of(7), {"n": 0}, [n]
        with monkeypatch.context() as patch:
            patch.setattr("rlstructs.files.opening.os.open", functools.partial(open_file, left=left))
            step = Checkpoint(tmp_path, memory=restored, extra=its_extra).restore()
        is_over = left[0] > 0
        assert step == its_extra["n"] and rows(restored)[:, 0].max() == 20.0 + step
        assert extra["n"] - step in (0, 1)
    assert n > 20
    save()
    assert saving.steps == [extra["n"]]  # what was kept for its reader is deleted


def test_a_checkpoint_stays_while_it_is_read(tmp_path):
    saving = Checkpoint(tmp_path, extra={"n": 1}, keep=1)
    saving.save(1)
    with saving._folder.keep(tmp_path / "step_000000000001"):
        saving.save(2)
        assert saving.steps == [1, 2]
        assert Checkpoint(tmp_path, extra={"n": 0}).restore() == 2
    saving.save(3)
    assert saving.steps == [3]


@pytest.mark.usefixtures("small_files")
def test_a_full_disk_is_an_oserror_that_names_the_file(tmp_path):
    memory, model = memory_of(0), torch.nn.Linear(40, 40)
    checkpoint = Checkpoint(tmp_path, memory=memory, model=model, extra={"n": torch.zeros(999)})
    checkpoint.save(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for nbytes in range(0, 9000, 281):
            memory.add_samples(x=torch.zeros(2, 3))
            resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
            with pytest.raises(OSError, match="File too large") as caught:
                checkpoint.save(1)
            assert caught.value.errno == errno.EFBIG and str(tmp_path) in str(caught.value.filename)
            assert Checkpoint(tmp_path, memory=memory_of(0)).restore() == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    checkpoint.save(1)
