"""Packed windows of memories: rows of one episode in order, with context in front, whatever the ring does."""

from __future__ import annotations

import importlib

import gymnasium
import numpy as np
import pytest
import torch

from rlstructs import GymEnvInf, PackedTrajectories, RandomAgent, RL_Batcher, SpecError
from rlstructs.errors import MissingKeyError, StateError
from rlstructs.memories.torch import PrioritizedMemory, RandomMemory

NAMES = ["n", "episode", "h"]
N_ENVS, SIZE = 3, 20


def make_memory(cls, n_rows, seed=0, **settings):
    """A memory whose rows have a number, counted by environment, and the number of their episode."""
    memory = cls(memory_size=SIZE, num_envs=N_ENVS, device="cpu", seed=seed, **settings)
    rng = np.random.default_rng(seed)
    for name, dtype in (("n", torch.int64), ("episode", torch.int64), ("terminated", torch.bool)):
        memory.create_tensor(name, 1, dtype)
    memory.create_tensor("truncated", 1, torch.bool)
    memory.create_tensor("h", 2, torch.float32)
    episode = np.zeros(N_ENVS, np.int64)
    for t in range(n_rows):
        ends = rng.random(N_ENVS) < 0.2
        numbers = torch.arange(N_ENVS) * 1000 + t
        memory.add_samples(
            n=numbers[:, None], episode=torch.from_numpy(episode.copy())[:, None],
            terminated=torch.from_numpy(ends)[:, None], truncated=torch.zeros(N_ENVS, 1, dtype=torch.bool),
            h=torch.stack([numbers, -numbers], 1).float(),
        )  # fmt: skip
        episode += ends
    return memory


def stored(memory):
    """(environment, step) -> episode, of all rows, and the newest step."""
    [[numbers, episodes]] = memory.sample_all(["n", "episode"])
    found = {divmod(int(n), 1000): int(e) for n, e in zip(numbers, episodes, strict=True)}
    return found, max(t for _, t in found)


@pytest.mark.parametrize("cls", [RandomMemory, PrioritizedMemory])
@pytest.mark.parametrize("n_rows", [1, 7, SIZE, 53])
@pytest.mark.parametrize(("length", "context"), [(1, 0), (4, 0), (4, 3), (30, 2), (1, 5)])
def test_windows_are_what_a_loop_over_the_rows_finds(cls, n_rows, length, context):
    memory = make_memory(cls, n_rows)
    rows, _ = stored(memory)
    pack = memory.sample(NAMES, 40, sequence_length=length, packed=True, context=context, states={"h": "h"})
    assert isinstance(pack, PackedTrajectories) and pack.n_segments() == 40
    mask, indexes = pack.mask(torch.bool), memory.get_sampling_indexes()
    assert torch.equal(memory.get_sampling_mask(), mask)
    [[anchors]] = memory.sample_by_index(["n"], indexes)
    is_first = memory.get_sampling_is_first()
    for s in range(40):
        at = slice(int(pack.cu_seqlens[s]), int(pack.cu_seqlens[s + 1]))
        env, anchor = divmod(int(anchors[s]), 1000)
        episode = rows[env, anchor]
        low = high = anchor
        while anchor - low < context and rows.get((env, low - 1)) == episode:
            low -= 1
        while high - anchor < length - 1 and rows.get((env, high + 1)) == episode:
            high += 1
        wanted = list(range(low, high + 1))
        assert (pack["n"][at, 0] - 1000 * env).tolist() == wanted
        assert (pack["episode"][at] == episode).all()
        assert mask[at].tolist() == [t >= anchor for t in wanted]
        assert torch.equal(pack.is_context[at], ~mask[at])
        assert pack.state["h"][s].tolist() == [1000 * env + low, -1000 * env - low]
        if (env, low - 1) in rows:
            began = rows[env, low - 1] != episode
            assert is_first[at].tolist() == [began] + [False] * (len(wanted) - 1)
            assert bool(pack.segments["continues"][s]) == (not began)


def test_rows_are_drawn_evenly_and_by_priority():
    memory = make_memory(RandomMemory, SIZE)
    memory.sample(["n"], 60_000, sequence_length=3, packed=True)
    counts = np.bincount(memory.get_sampling_indexes().numpy(), minlength=SIZE * N_ENVS)
    assert abs(counts / 1000 - 1).max() < 0.15
    memory = make_memory(PrioritizedMemory, SIZE, alpha=1.0, beta=1.0)
    memory.update_priorities(torch.arange(SIZE * N_ENVS), torch.zeros(SIZE * N_ENVS))
    memory.update_priorities(torch.tensor([7, 8]), torch.tensor([1.0, 3.0]))
    memory.sample(["n"], 4000, sequence_length=3, packed=True, context=1)
    counts = np.bincount(memory.get_sampling_indexes().numpy())
    assert counts[:7].sum() == 0 and abs(counts[8] / counts[7] - 3) < 0.3
    assert memory.get_sampling_weights().shape == (4000,)
    memory.update_priorities(memory.get_sampling_indexes(), torch.ones(4000))


@pytest.mark.parametrize("cls", [RandomMemory, PrioritizedMemory])
def test_a_pack_of_a_fixed_size_holds_whole_windows(cls):
    memory = make_memory(cls, 53)
    sizes = set()
    for _ in range(5):
        pack = memory.sample(NAMES, 16, sequence_length=6, packed=True, context=2, max_steps=40)
        sizes.add((pack.n_elems(), pack.n_segments(), pack.max_seqlen))
        n = int((pack.segments["row"] >= 0).sum())
        assert len(memory.get_sampling_indexes()) == n
        assert len(memory.get_sampling_mask()) == int(pack.cu_seqlens[n])
        assert not pack.mask()[int(pack.cu_seqlens[n]) :].any()
        if cls is PrioritizedMemory:
            assert len(memory.get_sampling_weights()) == n
    assert sizes == {(40, 17, 40)}


@pytest.mark.parametrize("library", ["jax", "warp"])
def test_memories_of_other_libraries_draw_the_same_packs(library):
    pytest.importorskip(library)
    theirs = importlib.import_module(f"rlstructs.memories.{library}").RandomMemory
    made = make_memory(RandomMemory, 30)
    with_torch = made.sample(["n", "h"], 8, sequence_length=4, packed=True, context=1, max_steps=30)
    other = theirs(memory_size=SIZE, num_envs=N_ENVS, seed=0)
    [arrays] = made.sample_all(["n", "episode", "terminated", "truncated", "h"])
    dtypes = dict(
        zip(
            ["n", "episode", "terminated", "truncated", "h"], ["int32", "int32", "bool", "bool", "float32"], strict=True
        )
    )
    for name, dtype in dtypes.items():
        other.create_tensor(name, arrays[list(dtypes).index(name)].shape[1], other.framework.dtype_from_name(dtype))
    steps = dict(zip(dtypes, arrays, strict=True))
    for t in range(SIZE):
        rows = {name: values.view(SIZE, N_ENVS, -1)[t].numpy() for name, values in steps.items()}
        other.add_samples(**{name: rows[name].astype(dtypes[name]) for name in rows})
    pack = other.sample(["n", "h"], 8, sequence_length=4, packed=True, context=1, max_steps=30)
    assert type(pack["steps"]["n"]).__module__.partition(".")[0] in ("jax", "jaxlib", "warp")
    shape = tuple(pack["steps"]["n"].shape)
    assert shape == tuple(with_torch["n"].shape) and pack["segment_ids"].shape == (30,)


def test_a_fed_memory_gives_packs_while_workers_write():
    memory = RandomMemory(memory_size=64, num_envs=4, device="cpu", seed=0)

    def create_env(n_envs, seed):
        return GymEnvInf([gymnasium.make("CartPole-v1", max_episode_steps=9) for _ in range(n_envs)], seed)

    with RL_Batcher(
        16, lambda: RandomAgent(gymnasium.spaces.Discrete(2)), {}, create_env, {"n_envs": 2}, n_processes=2, seeds=0
    ) as batcher:
        batcher.reset()
        batcher.feed(memory)
        for number in range(6):
            batcher.execute()
            if number:
                pack = memory.sample(
                    ["observations", "next_observations", "truncated"], 32, sequence_length=5, packed=True, context=2
                )
                inner = pack.segment_ids[1:] == pack.segment_ids[:-1]
                assert torch.equal(pack["observations"][1:][inner], pack["next_observations"][:-1][inner])
                assert not pack["truncated"][:-1][inner].any()
            batcher.wait()


def test_windows_take_no_more_memory_than_their_episodes():
    memory, other = make_memory(RandomMemory, 40), make_memory(RandomMemory, 40)
    pack = memory.sample(NAMES, 9, sequence_length=10**12, packed=True, context=10**12)
    wanted = other.sample(NAMES, 9, sequence_length=SIZE, packed=True, context=SIZE)
    assert all(torch.equal(pack[name], wanted[name]) for name in NAMES)
    assert torch.equal(pack.cu_seqlens, wanted.cu_seqlens) and torch.equal(pack.mask(), wanted.mask())


def test_wrong_arguments_are_named():
    memory = make_memory(RandomMemory, 9)
    with pytest.raises(SpecError, match="max_steps must be at least 7, a window and its context, got 6"):
        memory.sample(NAMES, 4, sequence_length=5, packed=True, context=2, max_steps=6)
    with pytest.raises(SpecError, match="context must be at least 0, got -1"):
        memory.sample(NAMES, 4, packed=True, context=-1)
    with pytest.raises(SpecError, match="n_step must be 1, got 3"):
        memory.sample(NAMES, 4, packed=True, n_step=3)
    with pytest.raises(SpecError, match="leave mini_batches and episode_ends out"):
        memory.sample(NAMES, 4, 2, packed=True)
    with pytest.raises(TypeError, match="packed: states must map parts of the agent's state to keys, got 'h'"):
        memory.sample(NAMES, 4, packed=True, states="h")
    with pytest.raises(MissingKeyError, match="no tensor 'c'"):
        memory.sample(NAMES, 4, packed=True, states={"c": "c"})
    plain = RandomMemory(memory_size=4, device="cpu")
    plain.create_tensor("x", 1)
    plain.add_samples(x=torch.zeros(3, 1))
    with pytest.raises(StateError, match="says where episodes end"):
        plain.sample(["x"], 2, packed=True)
    with pytest.raises(SpecError, match="packed=True"):
        memory.sample(NAMES, 4, context=2)
