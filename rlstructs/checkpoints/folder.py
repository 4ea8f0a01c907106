"""The folder of checkpoints: its file names, and how it changes safely.

    step_000000010000/        a checkpoint, complete by itself
    step_000000020000_2/      the second one of its step, which replaces the first
    latest                    the name of the newest one
    lock                      held by the process that saves

A checkpoint is written to `step_... .new`, synced and renamed; then `latest` is replaced, and the oldest one is renamed
to `... .old` and deleted. `latest` never names leftovers of an interrupted save; the next save deletes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlstructs.errors import FileError, StateError
from rlstructs.files.layout import replace_file
from rlstructs.files.opening import name_damage, open_file, parse_json, read_bytes

LATEST, LOCK = "latest", "lock"
# A checkpoint: its step, and its number if it is not the first one of that step.
NAME = re.compile(r"step_(\d{12,})(?:_(\d+))?")
NEW, OLD = ".new", ".old"
# The file of a checkpoint that says what is in it.
MANIFEST = "checkpoint.json"
# Seconds to wait for the lock: a process that was killed leaves it to others a moment later.
LOCK_DELAY, LOCK_POLL = 5.0, 0.05
# How many files are written to the disk at a time.
N_SYNCS = 8


class CheckpointFolder:
    """A folder of checkpoints.

    Args:
        path: the folder; it need not exist.

    Raises:
        FileError: it is no folder, or one of another program.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: tuple[int, int] | None = None  # the open lock file, and the process that holds it
        self._release: Callable[[], object] | None = None
        self._check()

    def _check(self) -> None:
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise FileError(f"{self.path}: this is a file, expected a folder of checkpoints, or a new one")
        others = sorted(entry.name for entry in self.path.iterdir() if not _is_ours(entry.name))
        if others and self.find_latest() is None:
            raise FileError(f"{self.path}: this is not a folder of checkpoints, it holds {others[:3]}")

    def find_latest(self) -> Path | None:
        """The newest checkpoint; None if there is none.

        Raises:
            FileError, FileNotFoundError: the file `latest` names none.
        """
        missing = None
        while (name := self._read_latest()) is not None:
            if (self.path / name).is_dir():
                return self.path / name
            if name == missing:
                raise FileNotFoundError(f"{self.path / name}: this checkpoint is missing, which {LATEST!r} names")
            missing = name  # another program may have saved since, and deleted it
        return None

    def _read_latest(self) -> str | None:
        try:
            name = read_bytes(self.path / LATEST).decode("ascii", "replace").strip()
        except FileNotFoundError:
            return None
        if not NAME.fullmatch(name):
            raise FileError(f"{self.path / LATEST}: damaged: it does not name a checkpoint")
        return name

    def find_all(self) -> list[Path]:
        """The checkpoints, the newest last."""
        if not self.path.is_dir():
            return []
        latest = self.find_latest()
        found = [entry for entry in self.path.iterdir() if NAME.fullmatch(entry.name) and (entry / MANIFEST).exists()]
        # An interrupted save may have renamed its checkpoint already, which is then newer than the latest.
        return sorted((entry for entry in found if latest and _order(entry) <= _order(latest)), key=_order)

    @contextlib.contextmanager
    def keep(self, checkpoint: Path) -> Iterator[None]:
        """Keeps other programs from deleting a checkpoint during a block.

        Only if the file system has locks.

        Raises:
            FileNotFoundError: it is gone.
        """
        with open_file(checkpoint / MANIFEST) as file:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            try:
                yield
            finally:
                with contextlib.suppress(OSError):  # a forked child may have the file open
                    fcntl.flock(file, fcntl.LOCK_UN)

    def lock(self) -> bool:
        """Keeps other processes from saving to this folder.

        Until `unlock` or the end of this process.

        Returns:
            False if this process holds the lock already.

        Raises:
            StateError: another process holds it.
        """
        if self._has_lock():
            return False
        self.unlock()
        deadline = time.monotonic() + LOCK_DELAY
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            # Opened anew each time: the folder may be deleted meanwhile.
            file = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            # An interrupt from here on leaves a lock that the next call releases first.
            release = self._release = weakref.finalize(self, _release_lock, file, os.getpid())
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = os.read(file, 200).decode(errors="replace").strip() or "another program"
                release()
                if time.monotonic() >= deadline:
                    raise StateError(
                        f"{self.path}: {holder} saves to this folder; give each training its own"
                    ) from None
                time.sleep(LOCK_POLL)
            except OSError:  # the file system has no locks
                break
        self._held = file, os.getpid()
        with contextlib.suppress(OSError):  # a full disk: the lock is held without its text
            os.ftruncate(file, 0)
            os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        return True

    def _has_lock(self) -> bool:
        """Whether this process holds the lock file that is there now.

        A forked child has the file of its parent, and a deleted folder takes its lock file along.
        """
        if self._held is None:
            return False
        file, owner = self._held
        try:
            return owner == os.getpid() and os.path.samestat(os.fstat(file), os.stat(self.path / LOCK))
        except FileNotFoundError:
            return False

    def unlock(self) -> None:
        """Lets other processes save. Idempotent."""
        self._held = None
        if self._release is not None:
            self._release()
            self._release = None

    def clean(self) -> list[OSError]:
        """Deletes the leftovers of interrupted saves.

        Returns:
            The errors for entries that cannot be deleted.
        """
        kept = {entry.name for entry in self.find_all()}
        ours = (entry for entry in self.path.iterdir() if _is_ours(entry.name) and entry.name not in (LATEST, LOCK))
        return _delete_all(entry for entry in ours if entry.name not in kept)

    def begin(self, step: int) -> Path:
        """Makes a folder to write a checkpoint to."""
        # After all others of its step, so that the newest checkpoint always comes last by name.
        stems = (NAME.fullmatch(_stem(entry.name)) for entry in self.path.iterdir())
        turn = 1 + max((int(match[2] or 1) for match in stems if match and int(match[1]) == step), default=0)
        new = self.path / f"step_{step:012}{f'_{turn}' if turn > 1 else ''}{NEW}"
        new.mkdir()
        return new

    @staticmethod
    def published_path(new: Path) -> Path:
        """The final place of a folder that `begin` returned."""
        return new.with_suffix("")

    def publish(self, new: Path) -> Path:
        """Makes a written folder, which `begin` returned, the newest checkpoint; returns its path."""
        path = self.published_path(new)
        with replace_file(self.path / LATEST) as temporary:
            temporary.write_text(f"{path.name}\n")
            _sync_all([temporary, *_list_tree(new)])
            new.rename(path)
            _sync(self.path)
        _sync(self.path)
        return path

    def drop_old(self, keep: int) -> None:
        """Deletes all but the newest `keep` checkpoints, and the leftovers of interrupted saves.

        Of several of the same step, the last one has replaced the others.

        Raises:
            OSError: something cannot be deleted; everything else is.
        """
        found = self.find_all()
        newest = {step_of(entry): entry for entry in found}  # the last one of each step
        kept = list(newest.values())[-keep:]
        errors = _delete_all(entry for entry in found if entry not in kept) + self.clean()
        if errors:
            raise errors[0]


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint, from its name."""
    return _order(checkpoint)[0]


def _order(checkpoint: Path) -> tuple[int, int]:
    match = NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


def _release_lock(file: int, owner: int) -> None:
    """Releases the lock of the process `owner`, and closes the file."""
    # Closing alone would leave the lock to a forked child, which has the file open too; nor may a child release it.
    if os.getpid() == owner:
        with contextlib.suppress(OSError):  # the file system has no locks
            fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


def _is_ours(name: str) -> bool:
    return name in (LATEST, LOCK) or NAME.fullmatch(_stem(name)) is not None or name.startswith(f".{LATEST}.")


def _stem(name: str) -> str:
    return name.removesuffix(NEW).removesuffix(OLD)


def _delete_all(entries: Iterable[Path]) -> list[OSError]:
    """Deletes checkpoints and leftovers; returns the errors of those that remain."""
    errors = []
    for entry in entries:
        try:
            _delete(entry)
        except OSError as error:
            errors.append(error)
    return errors


def _delete(entry: Path) -> None:
    if entry.is_symlink() or not entry.is_dir():  # a checkpoint that was moved elsewhere stays there
        entry.unlink(missing_ok=True)
        return
    if NAME.fullmatch(entry.name):  # so that nobody sees a checkpoint that lacks files
        if _is_kept(entry):
            return
        old = entry.with_name(f"{entry.name}{OLD}")
        _delete(old)
        entry.rename(old)
        entry = old
    shutil.rmtree(entry)


def _is_kept(checkpoint: Path) -> bool:
    """Whether another program reads a checkpoint; see `CheckpointFolder.keep`."""
    try:
        with open_file(checkpoint / MANIFEST) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (FileError, OSError):  # there is nothing to read, or the file system has no locks
        return False
    return False


def _list_tree(folder: Path) -> Iterator[Path]:
    """Yields a folder, its subfolders and its files, without files already synced.

    Files with another hard link, in an earlier checkpoint, are on the disk already.
    """
    for parent, _, names in os.walk(folder):
        yield Path(parent)
        yield from (path for path in (Path(parent, name) for name in names) if path.stat().st_nlink == 1)


def _sync_all(paths: Iterable[Path]) -> None:
    """Writes files and folders to the disk, several at a time for speed."""
    with ThreadPoolExecutor(N_SYNCS) as pool:
        list(pool.map(_sync, paths))


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
            os.fsync(number)  # some file systems cannot sync a folder
    finally:
        os.close(number)


FORMAT, VERSION = "rlstructs.Checkpoint", 1


def write_manifest(folder: Path, step: int, parts: Mapping[str, Any]) -> None:
    """Writes the manifest of a checkpoint.

    Args:
        folder: of the checkpoint.
        step: its step.
        parts: label -> what `Part.save` returned.
    """
    known = {"format": FORMAT, "version": VERSION, "id": secrets.token_hex(16), "step": step, "parts": parts}
    text = json.dumps(known)
    (folder / MANIFEST).write_text(json.dumps({"checksum": zlib.crc32(text.encode()), "manifest": text}))


def read_identity(folder: Path) -> bytes:
    """Reads the bytes of a manifest, whose random id no other checkpoint has.

    Raises:
        FileNotFoundError: there is no manifest.
    """
    return read_bytes(folder / MANIFEST)


def read_manifest(folder: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """Reads a manifest: the step, and the parts by label.

    Raises:
        FileNotFoundError: there is none.
        FileError: it is damaged, or of another version.
    """
    path = folder / MANIFEST
    with name_damage(f"{path}: damaged"):
        outer = parse_json(read_bytes(path))
        if zlib.crc32(outer["manifest"].encode()) != outer["checksum"]:
            raise ValueError("its checksum is wrong")
        manifest = parse_json(outer["manifest"])
        if manifest["format"] != FORMAT or manifest["version"] != VERSION:
            raise ValueError(f"it is of version {manifest['version']!r}, this program reads version {VERSION}")
        step, parts = manifest["step"], manifest["parts"]
        if type(step) is not int or not all(type(entry) is dict for entry in parts.values()):
            raise ValueError("it does not say what is in the checkpoint")
    return step, parts
