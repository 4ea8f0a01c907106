"""The folder of checkpoints: who holds its lock, and what an error leaves."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import LIMIT

from rlstructs import Checkpoint, StateError

# The lock of a program whose files may have no bytes, as on a full disk.
FULL = r"""
import resource, signal, sys
from pathlib import Path
from rlstructs import StateError
from rlstructs.checkpoints import folder

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
folder.LOCK_DELAY = 0.0
first, second = (folder.CheckpointFolder(Path(sys.argv[1])) for _ in range(2))
assert first.lock() and not first.lock()
try:
    second.lock()
except StateError as error:
    print(error)
first.unlock()
assert second.lock()
"""

# A forked child releases the lock that it has from its parent.
FORKED = r"""
import os, sys
from pathlib import Path
from rlstructs import StateError
from rlstructs.checkpoints import folder

folder.LOCK_DELAY = 0.0
first, second = (folder.CheckpointFolder(Path(sys.argv[1])) for _ in range(2))
first.lock()
if not os.fork():
    first.unlock()
    os._exit(0)
os.wait()
try:
    second.lock()
except StateError as error:
    print(error)
first.unlock()
assert second.lock()
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


@pytest.mark.parametrize(("program", "holder"), [(FULL, "another program"), (FORKED, r"process \d+ on .*")])
def test_a_lock_is_held_until_its_owner_releases_it(program, holder, subprocess_env, tmp_path):
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=subprocess_env)
    assert done.returncode == 0, done.stderr
    assert re.search(f"{holder} saves to this folder", done.stdout)


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
