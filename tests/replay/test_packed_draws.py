"""Every surface draws packs alike: windows of one episode, with context in front, whatever was overwritten."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch
from frameworks import host
from surfaces import CAPACITY, EVERY_SURFACE, N_LANES, SURFACES, TORCHRL, Surface

from rlstructs import DictTensor, PackedTrajectories, TemporalDictTensor, Trajectories
from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.replay import (
    ChunkReplayBuffer,
    DictTensorReplayBuffer,
    ListStorage,
    PrioritizedSliceSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)

LENGTH, N = 4, 24
SLICES = {"slice_len": LENGTH, "strict_length": False}
SAMPLERS = {
    "SliceSampler": lambda: SliceSampler(**SLICES),
    "PrioritizedSliceSampler": lambda: PrioritizedSliceSampler(CAPACITY, 0.6, 0.4, **SLICES),
    "SliceSamplerWithoutReplacement": lambda: SliceSamplerWithoutReplacement(**SLICES),
    "SamplerWithoutReplacement": lambda: SamplerWithoutReplacement(),
}


def with_sampler(sampler):
    def create():
        return DictTensorReplayBuffer(storage=ListStorage(CAPACITY), sampler=sampler(), generator=0)

    return Surface(create, TORCHRL, is_one=True)


def packs(param):
    """Whether a surface has packs at all."""
    return not any(name in str(param.id) for name in ("HER", "Shard"))


DRAWN = [
    *(param for param in EVERY_SURFACE if packs(param)),
    *(pytest.param(with_sampler(sampler), id=name) for name, sampler in SAMPLERS.items()),
]


def fill(surface, seed, n_batches=6):
    """A memory of the surface with trajectories whose frames are numbered, some of them overwritten."""
    made, rng = surface.make(), np.random.default_rng(seed)
    for number in range(n_batches):
        lengths = rng.integers(0, 7, N_LANES)
        numbers = torch.arange(N_LANES * 7).reshape(N_LANES, 7) + 100 * number + 1
        done = torch.from_numpy(rng.random((N_LANES, 7)) < 0.2)
        steps = {
            "observation/frame": numbers.float(), "_observation/frame": numbers + 0.5, "action/action": numbers,
            "_observation/reward": numbers.float(), "_observation/terminated": done,
            "_observation/truncated": torch.zeros_like(done),
        }  # fmt: skip
        info = DictTensor({"env_index": torch.arange(N_LANES)})
        batch = Trajectories(info, TemporalDictTensor(steps, torch.from_numpy(lengths)))
        made.add_trajectories(batch, surface.names)
    return made


def draw(made, names, n=N, **settings):
    """A pack, and the drawn rows and weights of its windows."""
    if isinstance(made, DictTensorReplayBuffer):
        is_slices = isinstance(made.sampler, SliceSampler)
        n, length = (LENGTH * n, {}) if is_slices else (n, {"slice_len": LENGTH})
        pack, info = made.sample(n, return_info=True, packed=True, **length, **settings)
        return pack, info["index"], info.get("priority_weight")
    if isinstance(made, ChunkReplayBuffer):
        mode = "uniform" if made._priorities is None else "prioritized"
        pack, info = made.sample(n, LENGTH, mode, packed=True, **settings)
        return pack, info["indices"][:, 0], info["weights"]
    if hasattr(made, "create_tensor"):
        pack = made.sample(list(names), n, sequence_length=LENGTH, packed=True, **settings)
        return pack, made.get_sampling_indexes(), made.get_sampling_weights()
    pack, rows = made.sample(n, packed=True, sequence_length=LENGTH, **settings)
    return pack, rows, dict(pack.info.items()).get("weight")


def tree(pack):
    """The arrays of a pack of any library."""
    if isinstance(pack, PackedTrajectories):
        pack = pack.numpy()
    return {
        "steps": {name: host(value) for name, value in pack["steps"].items()},
        "cu_seqlens": host(pack["cu_seqlens"]),
        "mask": host(pack["mask"]).astype(bool),
        "info": {name: host(value) for name, value in pack["info"].items()},
        "continues": host(pack["segments"]["continues"]).astype(bool),
    }


@pytest.mark.parametrize("surface", DRAWN)
@pytest.mark.parametrize("context", [0, 3])
@pytest.mark.parametrize("n_batches", [1, 6])
def test_windows_are_what_a_loop_over_the_episodes_finds(surface, context, n_batches):
    made = fill(surface, seed=context + n_batches, n_batches=n_batches)
    episodes = {frame: episode for episode in surface.episodes(made, surface.frame) for frame in episode}
    pack, rows, weights = draw(made, surface.names, context=context, states={"h": surface.frame})
    found = tree(pack)
    frames, bounds, mask = found["steps"][surface.frame].reshape(-1), found["cu_seqlens"], found["mask"]
    actions, seen = found["steps"][surface.action].reshape(-1), set()
    assert np.array_equal(actions, frames)
    assert len(bounds) - 1 == len(host(rows)) and len(frames) == bounds[-1]
    assert np.array_equal(host(found["info"]["sampling_index"]).reshape(-1), host(rows).reshape(-1))
    for s, (start, stop) in enumerate(itertools.pairwise(bounds)):
        window, counts = frames[start:stop], mask[start:stop]
        anchor = float(window[counts][0])
        episode = episodes[anchor]
        at = episode.index(anchor)
        assert window.tolist() == episode[max(0, at - context) : at + LENGTH]
        assert counts.tolist() == [frame >= anchor for frame in window]
        assert float(found["info"]["agent_state/h"].reshape(len(bounds) - 1, -1)[s, 0]) == window[0]
        seen.add(anchor)
    assert len(seen) > 1
    if weights is not None:
        assert len(host(weights)) == len(bounds) - 1
        assert np.allclose(host(weights), 1)  # all priorities are alike


@pytest.mark.parametrize("surface", DRAWN)
def test_a_pack_of_a_fixed_size_holds_whole_windows(surface):
    made, shapes = fill(surface, seed=5), set()
    for _ in range(3):
        pack, rows, _ = draw(made, surface.names, context=2, max_steps=30)
        found = tree(pack)
        mask, bounds, n = found["mask"], found["cu_seqlens"], len(host(rows))
        shapes.add((len(mask), len(bounds)) if n == N else (len(mask),))
        assert not mask[bounds[n] :].any() and (np.diff(bounds[: n + 1]) <= LENGTH + 2).all() and n >= 5
        assert not found["steps"][surface.frame][bounds[n] :].any()
    assert {shape[0] for shape in shapes} == {30}


@pytest.mark.parametrize("surface", [param for param in DRAWN if "rioritized" in param.id or "lanes" in param.id])
def test_windows_begin_with_rows_of_high_priority(surface):
    made = fill(surface, seed=3)
    _, rows, _ = draw(made, surface.names, n=200)
    rows = np.unique(host(rows))
    priorities = np.zeros(len(rows))
    priorities[:2] = 1.0, 3.0
    if isinstance(made, ChunkReplayBuffer):
        made.update_priorities(rows[:, None], priorities[:, None])
    else:
        update = getattr(made, "update_priority", None) or made.update_weight
        update(rows, priorities)
    _, again, _ = draw(made, surface.names, n=200)
    assert np.isin(host(again), rows[:2]).mean() > 0.9


@pytest.mark.parametrize("name", ["VectorReplayBuffer", "ChunkReplayBuffer of lanes"])
def test_windows_that_were_overwritten_are_replaced_by_others_of_any_length(name, monkeypatch):
    surface = SURFACES[name]
    made, answers = fill(surface, seed=7), iter([np.arange(N) % 3 == 0, np.arange(N // 3) % 2 == 0])
    episodes = {frame: episode for episode in surface.episodes(made, surface.frame) for frame in episode}
    monkeypatch.setattr(made._storage, "find_overwritten", lambda picked: next(answers, None))
    pack, _, _ = draw(made, surface.names, context=2)
    found = tree(pack)
    frames, mask = found["steps"][surface.frame].reshape(-1), found["mask"]
    assert np.array_equal(found["steps"][surface.action].reshape(-1), frames)
    for start, stop in itertools.pairwise(found["cu_seqlens"]):
        window = frames[start:stop].tolist()
        anchor = window[int(mask[start:stop].argmax())]
        at = episodes[anchor].index(anchor)
        assert window == episodes[anchor][max(0, at - 2) : at + LENGTH]
    assert next(answers, None) is None  # both were asked for


def test_packs_of_threads_beside_a_writer_are_whole():
    made, stop = ChunkReplayBuffer(64, 0), threading.Event()
    made.setup_entry("n", np.int64)
    made.setup_entry("terminated", bool)

    def write():
        t = 0
        while not stop.is_set():
            made.append({"n": t, "terminated": t % 9 == 8})
            t += 1

    made.append({"n": -1, "terminated": True})
    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(200):
            pack, _ = made.sample(16, 5, packed=True, context=2)
            inner = pack.positions > 0
            numbers = pack["n"]
            assert torch.equal(numbers[inner], numbers[inner.nonzero()[:, 0] - 1] + 1)
            first, last = numbers[pack.cu_seqlens[:-1].long()], numbers[pack.cu_seqlens[1:].long() - 1]
            assert torch.equal(first // 9, last // 9)
    finally:
        stop.set()
        thread.join()


def test_wrong_arguments_are_named():
    chunks = fill(SURFACES["ChunkReplayBuffer"], 1)
    rows = fill(SURFACES["VectorReplayBuffer"], 1)
    slices = fill(with_sampler(SAMPLERS["SliceSampler"]), 1)
    single = fill(SURFACES["DictTensorReplayBuffer"], 1)
    for made, args in ((chunks, (4, 2)), (rows, (4,)), (single, (4,))):
        with pytest.raises(SpecError, match="packed=True"):
            made.sample(*args, context=2)
    with pytest.raises(SpecError, match="max_steps must be at least 6"):
        rows.sample(4, packed=True, sequence_length=5, context=1, max_steps=5)
    with pytest.raises(MissingKeyError, match="states needs column"):
        rows.sample(4, packed=True, states={"h": "absent"})
    with pytest.raises(SpecError, match="leave slice_len out"):
        slices.sample(8, packed=True, slice_len=4)
    with pytest.raises(SpecError, match="slice_len must say"):
        single.sample(8, packed=True)
    her = fill(SURFACES["HERReplayBuffer"], 1)
    with pytest.raises(SpecError, match="relabels"):
        her.sample(4, packed=True)
    unmarked = DictTensorReplayBuffer(storage=ListStorage(8))
    unmarked.extend({"x": torch.arange(4)})
    with pytest.raises(SpecError, match="nothing says where episodes end"):
        unmarked.sample(4, packed=True, slice_len=2)
    changed = DictTensorReplayBuffer(storage=ListStorage(8), transform=lambda batch: batch)
    changed.extend({"x": torch.arange(4), "done": torch.zeros(4, dtype=torch.bool)})
    with pytest.raises(SpecError, match="transforms"):
        changed.sample(4, packed=True, slice_len=2)
