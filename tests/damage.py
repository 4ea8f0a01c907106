"""Files of every kind: what loading them does when they are damaged, and saving them when the disk is full.

    python tests/damage.py damage Trajectories.h5
    python tests/damage.py fill Trajectories.h5
    python tests/damage.py fill_disk /mnt/small Trajectories.h5

do it in a process of its own: a library written in C might crash. Each case is printed as it begins.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlstructs import DictTensor, FileError, TemporalDictTensor, Trajectories
from rlstructs.memories.torch import PrioritizedMemory, RandomMemory
from rlstructs.replay.buffer import Buffer

# Bytes; changes of each file.
CUT, N_FLIPS = 64, 250


@dataclass(frozen=True)
class Subject:
    """Something that is saved.

    Attributes:
        save: writes it into a folder; returns the file, and what lies beside it.
        target: what the file is loaded into, which holds something else; None for a class that makes an object.
        load: the object with what the path holds.
        content: all that an object holds, comparable.
    """

    save: Callable[[Path], list[Path]]
    target: Callable[[], Any]
    load: Callable[[Any, Path], Any]
    content: Callable[[Any], Any]


def say(text: str) -> None:
    """Prints at once: it is the last word if the process crashes."""
    print(text, flush=True)  # noqa: T201


def cuts(data: bytes) -> Iterator[tuple[str, bytes]]:
    """The beginning of a file, of every 64th length; and all but its last byte."""
    for size in [*range(0, len(data), CUT), len(data) - 1]:
        yield f"the first {size} of {len(data)} bytes", data[:size]


def flips(data: bytes, n: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """A file with one to eight bytes changed; a bit of a byte, or all of it."""
    rng = random.Random(seed)
    for case in range(n):
        changed = bytearray(data)
        for _ in range(rng.choice([1, 1, 2, 8])):
            at = rng.randrange(len(data))
            changed[at] = changed[at] ^ (1 << rng.randrange(8)) if rng.random() < 0.5 else rng.randrange(256)
        yield f"change {case} of seed {seed}", bytes(changed)


def damage(subject: Subject, folder: Path, seed: int = 0) -> int:
    """Loads every damaged form of a file; returns how many were refused.

    Raises:
        AssertionError: one was neither refused with a FileError nor read as it was written.
    """
    first, *_ = files = subject.save(folder)
    loaded = subject.load(subject.target(), first)
    expected = subject.content(loaded)
    target, n_refused = subject.target(), 0
    before = None if target is None else subject.content(target)
    for file in files:
        whole = file.read_bytes()
        for case, data in (*cuts(whole), *flips(whole, N_FLIPS, seed)):
            say(f"{file.name}: {case}")
            file.write_bytes(data)
            try:
                loaded = subject.load(target, first)
            except FileError as error:
                assert str(error).startswith(str(first)), error
                assert target is None or subject.content(target) == before, f"{file.name}: {case}: changed the target"
                n_refused += 1
                continue
            except BaseException as error:
                raise AssertionError(f"{file.name}: {case}: {error!r}") from error
            assert subject.content(loaded) == expected, f"{file.name}: {case}: wrong content was loaded"
            target = subject.target()
        file.write_bytes(whole)
    return n_refused


@contextlib.contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """The system writes no file beyond so many bytes: EFBIG, as a full disk gives ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fill(subject: Subject, folder: Path, step: int = 256) -> int:
    """Saves where there is room for less than the file, of every `step`-th size; returns how often.

    Raises:
        AssertionError: a save did not fail as it should, or left something behind.
    """
    files = subject.save(folder)
    largest = max(file.stat().st_size for file in files)
    for room in range(0, largest, step):
        say(f"room for {room} of {largest} bytes")
        with files_of_at_most(room):
            fails_whole(subject, folder, files)
    return len(range(0, largest, step))


def fails_whole(subject: Subject, folder: Path, files: list[Path]) -> None:
    """A save that fails says which file, and leaves the old ones whole and no other."""
    before = {file: file.read_bytes() for file in files}
    everything = sorted(folder.rglob("*"))
    try:
        subject.save(folder)
    except OSError as error:
        # A memory's files have names of their own each time.
        named = Path(error.filename)
        assert (named.parent, named.suffix in [file.suffix for file in files]) == (files[0].parent, True), error
        assert not named.name.startswith("."), f"names a temporary file: {error}"
    else:
        raise AssertionError("it was saved")
    assert {file: file.read_bytes() for file in files} == before, "an old file was changed"
    assert sorted(folder.rglob("*")) == everything, "something was left behind"


# --- what is saved -----------------------------------------------------------------------------------


def _trajectories() -> Trajectories:
    steps = {"action/action": torch.arange(10).view(2, 5), "done": torch.rand(2, 5) < 0.5, "x": torch.randn(2, 5, 3)}
    return Trajectories(DictTensor({"env_index": torch.arange(2)}), TemporalDictTensor(steps, torch.tensor([1, 5])))


def _structure(made: Any, suffix: str) -> Subject:
    kind = type(made)

    def save(folder: Path) -> list[Path]:
        made.save(folder / f"x{suffix}")
        return [folder / f"x{suffix}"]

    return Subject(save, lambda: None, lambda _, path: kind.load(path), _bytes_of)


def _bytes_of(structure: Any) -> Any:
    if isinstance(structure, Trajectories):
        return _bytes_of(structure.info), _bytes_of(structure.trajectories)
    arrays = structure.numpy()
    return [(name, str(array.dtype), array.shape, array.tobytes()) for name, array in arrays.items()]


def _memory(cls: Any, suffix: str) -> Subject:
    def filled(n: int) -> Any:
        memory = cls(memory_size=4, num_envs=2, seed=n)
        memory.create_tensor("x", size=3, dtype=torch.float32)
        memory.create_tensor("half", size=1, dtype=torch.bfloat16)
        memory.create_tensor("terminated", size=1, dtype=torch.bool)
        for t in range(n):
            x = torch.full((2, 3), float(t)).cumsum(1)
            memory.add_samples(x=x, half=x[:, :1].bfloat16(), terminated=x[:, :1] == 2)
        return memory

    def save(folder: Path) -> list[Path]:
        path = filled(3).save(folder, format=suffix[1:])
        return [path, path.with_suffix(".json")] if suffix == ".csv" else [path]

    def load(memory: Any, path: Path) -> Any:
        memory.load(path)
        return memory

    def content(memory: Any) -> Any:
        names = memory.get_tensor_names()
        arrays = [tensor.float().numpy().tobytes() for tensor in memory.sample_all(names)[0]]
        more = {name: array.tobytes() for name, array in memory._more_arrays().items()}
        return list(names), arrays, more, len(memory), memory._state()

    return Subject(save, lambda: filled(6), load, content)


def _buffer(suffix: str) -> Subject:
    def filled(n: int) -> Buffer:
        buffer = Buffer(2, 5, seed=n)
        for t in range(n):
            frames = np.full((2, 1, 40), t % 3, np.float32)  # so wide that the next one is stored once
            half = torch.full((2, 1), float(t)).bfloat16()
            ends = np.full((2, 1), t % 3 == 2)
            buffer._intake.write({"obs": frames, "obs_next": frames + 1, "half": half, "terminated": ends})
        return buffer

    def save(folder: Path) -> list[Path]:
        filled(4).save(folder / f"x{suffix}")
        return [folder / f"x{suffix}"]

    def load(buffer: Buffer, path: Path) -> Buffer:
        buffer.load(path)
        return buffer

    def content(buffer: Buffer) -> Any:
        rows = buffer._storage.view().every_row()
        arrays = [array.tobytes() for array in buffer._storage.gather(list(buffer._specs), rows)]
        times = buffer._storage.episodes.times(rows).tolist()
        return list(buffer._specs), arrays, times, rows.tolist(), buffer._rng.bit_generator.state

    return Subject(save, lambda: filled(7), load, content)


def subjects() -> dict[str, Subject]:
    """Everything that is saved, by class and kind of file."""
    torch.manual_seed(0)
    whole = _trajectories()
    found = {}
    for suffix in (".npz", ".pt", ".h5"):
        for made in (whole.info, whole.trajectories, whole):
            found[f"{type(made).__name__}{suffix}"] = _structure(made, suffix)
        found[f"Buffer{suffix}"] = _buffer(suffix)
    for suffix in (".npz", ".pt", ".csv"):
        for cls in (RandomMemory, PrioritizedMemory):
            found[f"{cls.__name__}{suffix}"] = _memory(cls, suffix)
    return found


def main(act: str, *names: str) -> None:
    faulthandler.enable()
    if act == "fill_disk":
        folder = Path(names[0])
        for name in names[1:]:
            say(name)
            files = subjects()[name].save(folder)
            room = os.open(folder / "filler", os.O_CREAT | os.O_WRONLY)
            with contextlib.suppress(OSError):
                while True:
                    os.write(room, bytes(256))
            fails_whole(subjects()[name], folder, files)
            os.close(room)
            for file in (folder / "filler", *files):
                file.unlink()
        return
    for name in names:
        say(name)
        with tempfile.TemporaryDirectory() as folder:
            say(str({"damage": damage, "fill": fill}[act](subjects()[name], Path(folder))))


if __name__ == "__main__":
    main(*sys.argv[1:])
