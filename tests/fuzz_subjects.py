"""Everything that is saved and loaded, by class and kind of file, for `fuzz_files.py`."""

from __future__ import annotations

import contextlib
import gc
import io
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import folders  # noqa: F401 - finds `test_dict_tensor_replay_buffer_files` in a program too
import numpy as np
import torch
from frameworks import KINDS, array, make
from replay_rows import rows as transitions
from test_dict_tensor_replay_buffer_files import SAMPLERS, made
from test_dict_tensor_replay_buffer_files import rows as next_rows

from rlstructs import DictTensor, EmptyBufferError, FileError, SpecError, TemporalDictTensor, Trajectories
from rlstructs.cli import report
from rlstructs.distributed import replay_files
from rlstructs.distributed.shard import ShardSettings, columns_of
from rlstructs.replay import (
    CachedReplayBuffer,
    ChunkReplayBuffer,
    Compression,
    HERReplayBuffer,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    VectorReplayBuffer,
)
from rlstructs.replay.intake.trajectories import Steps
from rlstructs.replay.keep import saving
from rlstructs.replay.rows import on_disk


@dataclass(frozen=True)
class Subject:
    """Something that is saved.

    Attributes:
        save: writes it into a folder; returns the file that is loaded, and what else is changed.
        target: what it is loaded into; None for a class that makes an object.
        load: what came of it.
        use: calls its methods; what they raise is a fault.
        content: all that a target holds, comparable.
    """

    save: Callable[[Path], list[Path]]
    target: Callable[[], Any]
    load: Callable[[Any, Path], Any]
    use: Callable[[Any, Path], None]
    content: Callable[[Any], Any]


@contextlib.contextmanager
def unless_empty() -> Iterator[None]:
    """Lets pass that there is nothing to draw, and that a row does not decode: a file may say so."""
    try:
        yield
    except Exception as error:
        if str(error).startswith("the compressed bytes of row "):
            return
        if not str(error).startswith(("nothing to sample", "batch_size is")) and "within one episode" not in str(error):
            raise


# --- structures ---------------------------------------------------------------------------------------


def _structures() -> dict[str, Any]:
    steps = {"action/action": torch.arange(10).view(2, 5), "x": torch.randn(2, 5, 3), "h": torch.ones(2, 5).bfloat16()}
    for key in ("reward", "raw_reward"):
        steps[f"_observation/{key}"] = torch.randn(2, 5)
    for key in ("done", "terminated", "truncated"):
        steps[f"_observation/{key}"] = torch.rand(2, 5) < 0.5
    info = DictTensor({"env_index": torch.arange(2), "u": torch.ones(2, 2, dtype=torch.complex64)})
    temporal = TemporalDictTensor(steps, torch.tensor([1, 5]))
    return {"DictTensor": info, "TemporalDictTensor": temporal, "Trajectories": Trajectories(info, temporal)}


def _packed() -> Trajectories:
    """Frames, and the next ones, which a compressed file has once."""
    frames = torch.arange(2 * 6 * 300, dtype=torch.uint8).view(2, 6, 15, 20)
    steps = {"observation/frame": frames[:, :5].clone(), "_observation/frame": frames[:, 1:].clone()}
    steps["_observation/mask"] = frames[:, :5] > 9
    return Trajectories(DictTensor({"env_index": torch.arange(2)}), TemporalDictTensor(steps, torch.tensor([1, 5])))


def _structure(whole: Any, suffix: str, compress: bool = False) -> Subject:
    kind = type(whole)

    def save(folder: Path) -> list[Path]:
        whole.save(folder / f"x{suffix}", compress=compress)
        return [folder / f"x{suffix}"]

    def use(loaded: Any, path: Path) -> None:
        repr(loaded)
        len(loaded)
        loaded.clone().save(path.with_name(f"again{suffix}"))
        loaded.index(slice(0, 1))
        if isinstance(loaded, Trajectories):
            with contextlib.suppress(FileError, report.SpecError):
                list(report.describe(path))

    return Subject(save, lambda: None, lambda _, path: kind.load(path), use, lambda _: None)


# --- memories -----------------------------------------------------------------------------------------

TENSORS = {"x": ("float32", (2, 3)), "u": ("uint8", 2), "bf": ("bfloat16", 2), "terminated": ("bool", 1)}


def _memory(kind: str, cls: str, suffix: str) -> Subject:
    def add(memory: Any, rng: np.random.Generator) -> None:
        memory.add_samples(
            x=array(kind, rng.normal(size=(2, 2, 3))), u=array(kind, rng.integers(0, 256, (2, 2)), "uint8"),
            bf=array(kind, rng.normal(size=(2, 2)), "bfloat16"), terminated=array(kind, rng.random((2, 1)) < 0.3),
        )  # fmt: skip

    def filled(n: int) -> Any:
        memory, rng = make(kind, 4, 2, TENSORS, cls=cls), np.random.default_rng(n)
        for _ in range(n):
            add(memory, rng)
        if n:
            memory.sample(["x"], batch_size=3)
            if cls == "PrioritizedMemory":
                memory.update_priorities(memory.get_sampling_indexes(), np.arange(3.0) + 0.5)
        return memory

    def save(folder: Path) -> list[Path]:
        path = filled(6).save(folder, format=suffix[1:])
        return [path, path.with_suffix(".json")] if suffix == ".csv" else [path]

    def load(memory: Any, path: Path) -> Any:
        memory.load(path)
        return memory

    def use(memory: Any, path: Path) -> None:
        _draw(memory)
        if memory.get_tensor_names() == sorted(TENSORS):
            for n in range(3):
                add(memory, np.random.default_rng(n))
            _draw(memory)
        memory.save(path.parent / "again", format=suffix[1:])
        memory.reset()

    def content(memory: Any) -> Any:
        arrays, _, state = saving.contents(memory)
        return state, {name: np.asarray(values).tobytes() for name, values in arrays.items()}

    return Subject(save, lambda: filled(3), load, use, content)


def _draw(memory: Any) -> None:
    repr(memory)
    names = memory.get_tensor_names()
    assert 0 <= len(memory) <= 8 and 0 <= memory.memory_index <= 4 and memory.filled in (True, False)
    if len(memory):
        with unless_empty():
            memory.sample(names, batch_size=4)
            if hasattr(memory, "update_priorities"):
                memory.update_priorities(memory.get_sampling_indexes(), np.ones(4))
        for settings in ({"sequence_length": 2, "episode_ends": "mask"}, {"n_step": 2}):
            with unless_empty():
                memory.sample(names, batch_size=4, **settings)
        memory.sample_all(names)


def _shards() -> Subject:
    """What a `RayReplay` writes, read without Ray."""
    settings = ShardSettings(4, 0.6, {"x": "x", "terminated": "_observation/terminated"})
    header = {"format": "npz", "alpha": 0.6}

    def shard(seed: int) -> Any:
        made, rng = settings.build(2, seed), np.random.default_rng(seed)
        values = {"x": rng.normal(size=(2, 5, 2)), "terminated": rng.random((2, 5)) < 0.3}
        steps = Steps(values, 5, np.array([5, 3]), np.arange(2), values["terminated"])
        made.extend({"x": torch.float64, "terminated": torch.bool}, 1.0, columns_of(steps))
        return made

    def save(folder: Path) -> list[Path]:
        data = [np.asarray(shard(seed).save().columns["data"]) for seed in range(2)]
        replay_files.write(folder / "r", header, np.random.default_rng(0).bit_generator.state, data)
        return [folder / "r" / replay_files.HEADER, *sorted((folder / "r").glob("shard-*"))]

    def load(target: Any, path: Path) -> Any:
        generator, files = replay_files.read(path.parent, header, 2)
        for each, file in zip(target, files, strict=True):
            with replay_files.open_shard(file) as data:
                each.load({"data": data})
        for each in target:
            each.use_loaded()
        return [*target, generator]

    def use(loaded: Any, path: Path) -> None:
        loaded[-1].random(3)
        for each in loaded[:-1]:
            each.report()
            with unless_empty():
                each.sample(["x"], 4, {"sequence_length": 2})
            each.save()

    def content(target: Any) -> Any:
        return [np.asarray(each.save().columns["data"])[-2000:].tobytes() for each in target]

    return Subject(save, lambda: [shard(7), shard(8)], load, use, content)


# --- buffers ------------------------------------------------------------------------------------------


# The column of `_rows` that is compressed.
FRAMES = {"frame": "zstd:1"}


def _rows(n: int, t: int) -> dict[str, Any]:
    return transitions([t] * n, [t % 4 == 3, *[False] * (n - 1)], frame=np.full((n, 80), t, np.float32))


def _goals(n: int, t: int) -> dict[str, Any]:
    goal = {"observation": np.full((n, 2), t), "achieved_goal": np.full((n, 1), t), "desired_goal": np.zeros((n, 1))}
    flags = {"terminated": np.array([t % 4 == 3] * n), "truncated": np.zeros(n, bool)}
    return {"obs": goal, "obs_next": goal, "act": np.zeros(n), "rew": np.zeros(n), **flags}


def _filled(make_buffer: Callable[[], Any], add: Callable[[Any, int], Any]) -> Callable[[int], Any]:
    def filled(n: int) -> Any:
        buffer = make_buffer()
        for t in range(n):
            add(buffer, t)
        return buffer

    return filled


def _buffer(filled: Callable[[int], Any], add: Any, draw: Any, suffix: str, whole: bool = False) -> Subject:
    """A buffer that is loaded into another one; or, if `whole`, made of a compressed file."""

    def save(folder: Path) -> list[Path]:
        path, buffer = folder / f"x{suffix}", filled(7)
        with unless_empty():
            draw(buffer)
        buffer.save_hdf5(path, compression="lzf" if whole == "lzf" else "gzip") if whole else buffer.save(path)
        return [path / "buffer.npz" if path.is_dir() else path]

    def load(target: Any, path: Path) -> Any:
        if whole:
            return type(filled(0)).load_hdf5(path)
        target.load(path.parent if path.name == "buffer.npz" else path)
        return target

    def use(buffer: Any, path: Path) -> None:
        # What settings of a file make of it may take other rows.
        is_other = whole and buffer._settings() != filled(0)._settings()
        for t in range(4):
            repr(buffer)
            len(buffer)
            with contextlib.suppress(*[SpecError] * is_other):
                if len(buffer):
                    with unless_empty():
                        draw(buffer)
                add(buffer, t)
        buffer.save(path.parent / f"again{suffix if suffix[1:] in ('npz', 'pt', 'h5') else '.npz'}")

    def content(buffer: Any) -> Any:
        if buffer is None:
            return None
        arrays, _, state = saving.contents(buffer)
        return state, {name: np.asarray(values).tobytes() for name, values in arrays.items()}

    return Subject(save, (lambda: None) if whole else lambda: filled(3), load, use, content)


def _folder(filled: Callable[[Any, int], Any], add: Any, draw: Any) -> Subject:
    """The folder of a buffer, which is opened in a copy of its own."""

    def save(folder: Path) -> list[Path]:
        buffer = filled(folder / "rows", 7)
        draw(buffer)
        del buffer
        gc.collect()
        (folder / "rows" / on_disk.LOCK).unlink()
        return [folder / "rows" / on_disk.MANIFEST, *sorted((folder / "rows").glob("*.bin"))]

    def load(target: Any, path: Path) -> Any:
        copy = path.parent / "again"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        for file in path.parent.glob("*.*"):
            shutil.copy(file, copy)
        try:
            return filled(copy, 0)
        finally:
            gc.collect()  # of what was opened in vain

    def use(buffer: Any, path: Path) -> None:
        for t in range(9):
            for call in (draw, lambda buffer: buffer[:], lambda buffer, t=t: add(buffer, t)):
                # What columns of a manifest make of it may take other rows.
                with contextlib.suppress(EmptyBufferError, SpecError), unless_empty():
                    call(buffer)

    return Subject(save, lambda: None, load, use, lambda _: None)


def _state_dict(filled: Callable[[int], Any], add: Any, draw: Any) -> Subject:
    """A state that the program has read itself, from a file of torch's."""
    base = _buffer(filled, add, draw, ".npz")

    def save(folder: Path) -> list[Path]:
        buffer = filled(7)
        draw(buffer)
        torch.save(buffer.state_dict(), folder / "x.state")
        return [folder / "x.state"]

    def load(target: Any, path: Path) -> Any:
        try:
            state = torch.load(io.BytesIO(path.read_bytes()), weights_only=True)
        except Exception as error:
            raise FileError(f"{path}: torch does not read it") from error
        target.load_state_dict(state)
        return target

    return Subject(save, base.target, load, base.use, base.content)


def _tianshou(make_buffer: Any, n: int, rows: Any = _rows, stacked: bool = True) -> tuple[Any, Any, Any]:
    def add(buffer: Any, t: int) -> None:
        batch = rows(n, t)
        buffer.add(batch if stacked else {key: _first(value) for key, value in batch.items()})

    def draw(buffer: Any) -> None:
        _, index = buffer.sample(4)
        buffer.unfinished_index(), buffer.prev(index), buffer.next(index)
        if hasattr(buffer, "update_weight"):
            buffer.update_weight(index, np.arange(1.0, 1 + len(index)))

    return _filled(make_buffer, add), add, draw


def _first(value: Any) -> Any:
    return {key: _first(each) for key, each in value.items()} if isinstance(value, dict) else value[0]


def _chunks() -> tuple[Any, Any, Any]:
    def make_buffer() -> Any:
        buffer = ChunkReplayBuffer(12, 0, enable_prioritized=True, n_lanes=2, n_step=2)
        for tag, dtype in (("observations", np.float32), ("rewards", np.float32), ("terminated", bool)):
            buffer.setup_entry(tag, dtype)
        return buffer

    def add(buffer: Any, t: int) -> None:
        rewards, ends = np.full(2, t, np.float32), [t % 4 == 3, False]
        buffer.append({"observations": np.full((2, 3), t, np.float32), "rewards": rewards, "terminated": ends})

    def draw(buffer: Any) -> None:
        for mode in ("uniform", "prioritized"):
            batch = buffer.sample(4, 2, mode)
            if batch is not None:
                buffer.update_priorities(batch.info["indices"], np.ones((4, 2)))

    return _filled(make_buffer, add), add, draw


def _dict_tensor(sampler: str, storage: str) -> tuple[Any, Any, Any]:
    def draw(buffer: Any) -> None:
        buffer.sample()
        _ = buffer[:]

    def add(buffer: Any, t: int) -> None:
        buffer.extend(next_rows(2 * t, 2))

    return _filled(lambda: made(sampler, storage, 12), add), add, draw


def _reward(achieved: Any, desired: Any) -> Any:
    return -np.abs(achieved - desired).reshape(len(achieved), -1).sum(axis=1)


def _buffers() -> dict[str, tuple[Any, Any, Any]]:
    settings = {"stack_num": 2, "n_step": 2}
    found = {
        "ReplayBuffer": _tianshou(lambda: ReplayBuffer(6, **settings), 1, stacked=False),
        "VectorReplayBuffer": _tianshou(lambda: VectorReplayBuffer(10, 2, framework="torch"), 2),
        "PrioritizedVectorReplayBuffer": _tianshou(
            lambda: PrioritizedVectorReplayBuffer(10, 2, alpha=0.6, beta=0.4), 2
        ),
        "CachedReplayBuffer": _tianshou(lambda: CachedReplayBuffer(ReplayBuffer(9), 2, 20), 2),
        "HERReplayBuffer": _tianshou(lambda: HERReplayBuffer(9, _reward, 4), 1, _goals, stacked=False),
        "ChunkReplayBuffer": _chunks(),
        "ReplayBuffer compressed": _tianshou(lambda: ReplayBuffer(6, **settings, compression=FRAMES), 1, stacked=False),
        "VectorReplayBuffer compressed": _tianshou(lambda: VectorReplayBuffer(10, 2, compression=FRAMES), 2),
    }
    # Of a file of compressed rows, read where they are not.
    packed, plain = (_tianshou(lambda each=each: VectorReplayBuffer(10, 2, compression=each), 2)
                     for each in (FRAMES, None))  # fmt: skip
    found["VectorReplayBuffer unpacked"] = (lambda n: (packed if n == 7 else plain)[0](n), *plain[1:])
    for sampler in SAMPLERS:
        found[f"DictTensorReplayBuffer {sampler}"] = _dict_tensor(sampler, "list")
    return found


def _folders() -> dict[str, Subject]:
    """Folders of rows, raw and compressed."""
    found = {}
    for what, compression in (("", None), ("compressed ", FRAMES), ("limited ", Compression(FRAMES, 16 * 320))):
        for cls, sizes, n in ((ReplayBuffer, (6,), 1), (VectorReplayBuffer, (10, 2), 2)):
            _, add, draw = _tianshou(None, n, stacked=n > 1)

            def filled(
                path: Path,
                n_added: int,
                cls: Any = cls,
                sizes: Any = sizes,
                compression: Any = compression,
                add: Any = add,
            ) -> Any:
                buffer = cls(*sizes, stack_num=2, n_step=2, path=path, compression=compression)
                for t in range(n_added):
                    add(buffer, t)
                return buffer

            found[f"{cls.__name__} {what}folder.rows"] = _folder(filled, add, draw)
    return found


def subjects() -> dict[str, Subject]:
    """Everything, by name; the kind of file is what the name ends in."""
    torch.manual_seed(0)
    found = {f"{name}{suffix}": _structure(made, suffix)
             for name, made in _structures().items() for suffix in (".npz", ".pt", ".h5")}  # fmt: skip
    found |= {f"Trajectories packed{suffix}": _structure(_packed(), suffix, True) for suffix in (".npz", ".pt", ".h5")}
    for kind in ("torch", "jax", "warp"):
        assert kind in KINDS
        for cls in ("RandomMemory", "PrioritizedMemory"):
            for suffix in (".npz", ".pt", ".csv"):
                found[f"{kind}.{cls}{suffix}"] = _memory(kind, cls, suffix)
    found["RayReplay.folder"] = _shards()
    found |= _folders()
    for name, (filled, add, draw) in _buffers().items():
        for suffix in (".npz", ".pt", ".h5"):
            found[f"{name}{suffix}"] = _buffer(filled, add, draw, suffix)
        if hasattr(filled(0), "save_hdf5") and not name.startswith("HER"):
            found[f"{name}.gzip"] = _buffer(filled, add, draw, ".gzip", whole="gzip")
            found[f"{name}.lzf"] = _buffer(filled, add, draw, ".lzf", whole="lzf")
        if name.startswith("DictTensor"):
            found[f"{name}.d"] = _buffer(filled, add, draw, ".d")
            found[f"{name}.state"] = _state_dict(filled, add, draw)
    return found
