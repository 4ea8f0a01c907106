"""Packs against plain loops over steps: what is packed, put back, cut, drawn and joined."""

from __future__ import annotations

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rlstructs import (
    DictTensor,
    MissingKeyError,
    PackedTrajectories,
    SpecError,
    TemporalDictTensor,
    Trajectories,
)
from tests.strategies import filled

N_STATE = 3


def make_batch(seed, n_rows=4, n_timesteps=6, n_ends=0.2, dtype=torch.float32, counted=True):
    """A batch whose steps are numbered, with random lengths, ends and states; a step tells its episode, too."""
    rng = np.random.default_rng(seed)
    lengths = torch.from_numpy(rng.integers(0, n_timesteps + 1, n_rows))
    done = torch.from_numpy(rng.random((n_rows, n_timesteps)) < n_ends)
    begins = torch.from_numpy(rng.random((n_rows, n_timesteps)) < 0.5)
    begins[:, 1:] = done[:, :-1]
    steps = {
        "observation/frame": torch.randn(n_rows, n_timesteps, 2, generator=torch.Generator().manual_seed(seed)).to(
            dtype
        ),
        "observation/initial_state": begins,
        "action/h": torch.randn(n_rows, n_timesteps, N_STATE).to(dtype),
        "n": torch.arange(n_rows * n_timesteps).view(n_rows, n_timesteps),
        "_observation/reward": torch.rand(n_rows, n_timesteps).to(dtype),
        "_observation/terminated": done & (torch.rand(n_rows, n_timesteps) < 0.5),
        "_observation/done": done,
    }
    steps["_observation/truncated"] = done & ~steps["_observation/terminated"]
    info = {"env_index": torch.arange(n_rows), "agent_state/h": torch.randn(n_rows, N_STATE).to(dtype)}
    first = torch.arange(n_rows) * 100 if counted else None
    return Trajectories(DictTensor(info), TemporalDictTensor(steps, lengths, first))


def list_segments(batch, by):
    """(row, start, stop, episode, continues) of every segment, by a loop over all steps."""
    steps, found = batch.trajectories, []
    for row, length in enumerate(batch.lengths.tolist()):
        episode = 0
        for t in range(length):
            begins = bool(steps["observation/initial_state"][row, t])
            if t == 0 or (by == "episode" and (begins or bool(steps["_observation/done"][row, t - 1]))):
                if t:
                    episode += 1
                found.append([row, t, t, episode, t == 0 and not begins])
            found[-1][2] = t + 1
    return [tuple(segment) for segment in found]


def check_layout(pack, batch, segments):
    assert pack.n_elems() == int(batch.lengths.sum()) and pack.n_segments() == len(segments)
    bounds = [0, *itertools.accumulate(stop - start for _, start, stop, *_ in segments)]
    assert pack.cu_seqlens.tolist() == bounds and pack.cu_seqlens.dtype == torch.int32
    assert pack.max_seqlen == max((stop - start for _, start, stop, *_ in segments), default=0)
    places = [(s, t - start) for s, (_, start, stop, *_) in enumerate(segments) for t in range(start, stop)]
    assert list(zip(pack.segment_ids.tolist(), pack.positions.tolist(), strict=True)) == places
    for name, at in (("row", 0), ("start", 1), ("episode", 3), ("continues", 4)):
        assert pack.segments[name].tolist() == [segment[at] for segment in segments]
    for key, tensor in batch.trajectories.items():
        wanted = [tensor[row, t] for row, start, stop, *_ in segments for t in range(start, stop)]
        assert torch.equal(pack[key], torch.stack(wanted) if wanted else tensor.flatten(0, 1)[:0])


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(0, 5), st.integers(0, 7), st.sampled_from(["row", "episode"]))
def test_a_pack_holds_the_steps_of_a_loop_and_unpack_puts_them_back(seed, n_rows, n_timesteps, by):
    batch = make_batch(seed, n_rows, n_timesteps)
    pack, segments = batch.packed(by), list_segments(batch, by)
    check_layout(pack, batch, segments)
    for s, (row, start, *_, continues) in enumerate(segments):
        kept = by == "row" or continues
        assert torch.equal(pack.state["h"][s], batch.info["agent_state/h"][row] * kept)
        assert int(pack.info["env_index"][s]) == row
        assert int(pack.first_steps[s]) == row * 100 + start
    back = pack.unpack(pack)
    assert back == batch.trajectories and torch.equal(back.lengths, batch.lengths)
    assert torch.equal(pack.unpack(pack["n"]), batch.trajectories.zero_padding()["n"])


@pytest.mark.parametrize("dtype", [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64,
    torch.complex64, torch.uint16, torch.float8_e5m2,
], ids=str)  # fmt: skip
@pytest.mark.parametrize("cell", [(), (3,), (2, 3), (0,)], ids=str)
def test_every_dtype_and_shape_comes_back_exactly(dtype, cell):
    values = filled((3, 5, *cell), torch.int32).to(torch.uint8).to(dtype if dtype != torch.bool else torch.bool)
    steps = TemporalDictTensor({"nested": {"x": values}}, torch.tensor([5, 0, 2]))
    for batch in (steps, steps.temporal_slice(1, 4), steps.index([2, 0]), TemporalDictTensor({"nested/x": values})):
        pack = Trajectories(DictTensor(), batch).packed()
        assert pack["nested/x"].dtype == dtype and pack["nested/x"].shape == (int(batch.lengths.sum()), *cell)
        assert pack.unpack(pack) == batch
        for part in pack.split(3, context=1):
            assert part["nested/x"].dtype == dtype and part["nested/x"].shape == (3, *cell)


def test_a_pack_is_a_copy():
    batch = make_batch(0, 2, 3)
    for lengths in ([3, 3], [2, 3]):
        steps = TemporalDictTensor({"n": batch["n"].clone()}, torch.tensor(lengths))
        pack = Trajectories(DictTensor(), steps).packed()
        pack["n"].fill_(-1)
        assert (steps["n"] >= 0).all()


def test_gradients_flow_from_rows_to_packs_and_back():
    x = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, 4, 2, dtype=torch.float64)
    lengths = torch.tensor([4, 0, 3])
    pack = Trajectories(DictTensor(), TemporalDictTensor({"x": x}, lengths)).packed()
    (pack.unpack(pack["x"] ** 2) * weights).sum().backward()
    mask = (torch.arange(4) < lengths[:, None])[..., None]
    assert torch.equal(x.grad, torch.where(mask, 2 * x.detach() * weights, 0))


def test_ends_are_found_in_whatever_keys_there_are():
    batch = make_batch(3)
    steps = batch.trajectories
    flags = ["_observation/terminated", "_observation/truncated"]
    for keys in (["_observation/done"], flags, ["_observation/done", "observation/initial_state"]):
        pack = Trajectories(batch.info, steps.get(keys)).packed("episode")
        assert pack.cu_seqlens.tolist() == batch.packed("episode").cu_seqlens.tolist()
    with pytest.raises(MissingKeyError, match="no key says where episodes are"):
        Trajectories(batch.info, steps.get(["n"])).packed("episode")
    assert Trajectories(batch.info, steps.get(["n"])).packed().segments["continues"].all()


def test_only_the_keys_that_are_asked_for_are_packed():
    batch = make_batch(1)
    pack = batch.packed("episode", keys=["n"])
    assert list(pack) == ["n"] and pack.n_segments() == batch.packed("episode").n_segments()
    with pytest.raises(MissingKeyError, match="no key 'wrong'"):
        batch.packed(keys=["wrong"])
    with pytest.raises(SpecError, match=r"by must be one of \('row', 'episode'\), got 'step'"):
        batch.packed("step")


# Splits


def check_split(pack, packs, size, context, states=None):
    """Every step counts once, in packs of one size, and what stands before it is its segment's."""
    total = sum(int(p.mask().sum()) for p in packs)
    assert total == pack.n_elems()
    if packs:
        assert sum(p.unpack(p["n"]) for p in packs).equal(pack.unpack(pack["n"]))
        assert len({(p.n_elems(), p.n_segments(), p.max_seqlen) for p in packs}) == 1
    place = {int(n): (int(s), int(t)) for n, s, t in zip(pack["n"], pack.segment_ids, pack.positions, strict=True)}
    for part in packs:
        assert part.n_elems() == part.max_seqlen == size
        for s, (low, high) in enumerate(itertools.pairwise(part.cu_seqlens.tolist())):
            table = part.segments.index(s)
            numbers, counts = part["n"][low:high].tolist(), part.mask(torch.bool)[low:high].tolist()
            if int(table["row"]) == -1:
                assert not any(counts) and not any(numbers) and int(part.first_steps[s]) == -1
                continue
            n_before = counts.index(True)
            assert all(counts[n_before:]) and n_before <= (context or 0)
            assert part.is_context[low:high].tolist() == [not c for c in counts]
            places = [place[n] for n in numbers]
            source, first = places[0]
            assert places == [(source, first + t) for t in range(len(places))]
            of_source = pack.segments.index(source)
            assert int(table["start"]) == int(of_source["start"]) + first
            begins = bool(part["observation/initial_state"][low])
            assert bool(table["continues"]) == (not begins if first else bool(of_source["continues"]))
            if int(pack.first_steps[source]) != -1:
                assert int(part.first_steps[s]) == int(pack.first_steps[source]) + first
            if first and context is not None:
                assert n_before == min(context, first + n_before)
            wanted = pack.info["agent_state/h"][source]
            if first:
                wanted = part["action/h"][low] if states else torch.zeros(N_STATE)
            assert torch.equal(part.info["agent_state/h"][s], wanted)


@settings(deadline=None, max_examples=80)
@given(
    st.integers(0, 10**6), st.integers(0, 6), st.integers(1, 9), st.integers(1, 12), st.integers(0, 4), st.booleans()
)
def test_split_counts_every_step_once_in_packs_of_one_size(seed, n_rows, n_timesteps, size, context, with_state):
    pack = make_batch(seed, n_rows, n_timesteps, counted=seed % 2 == 0).packed(["row", "episode"][seed % 2])
    states = {"h": "action/h"} if with_state else None
    context = min(context, size - 1)
    packs = pack.split(size, context=context, states=states)
    check_split(pack, packs, size, context, states)
    if context == 0:  # all but the last are full
        assert all(p.mask().all() for p in packs[:-1])
    if pack.max_seqlen <= size:
        whole = pack.split(size)
        check_split(pack, whole, size, None)
        assert all(not p.is_context.any() for p in whole)
    else:
        with pytest.raises(SpecError, match=f"has {pack.max_seqlen} steps, a pack {size}; give context= or states="):
            pack.split(size)


@pytest.mark.parametrize(
    "keys", [["observation/initial_state"], ["_observation/done"], ["_observation/terminated"], []]
)
def test_a_row_that_is_cut_where_an_episode_begins_does_not_continue_there(keys):
    flags = torch.tensor([[False, False, True, False, False, False]])
    named = {key: flags.roll(1, 1) if "initial" in key else flags for key in keys}
    steps = TemporalDictTensor({"n": torch.arange(6)[None], **named}, torch.tensor([6]))
    parts = Trajectories(DictTensor(), steps).packed().split(3, context=0)
    assert [part.segments["continues"].tolist() for part in parts] == [[True], [not keys]]


def test_whole_segments_are_put_where_they_fit_best():
    steps = TemporalDictTensor({"n": torch.arange(30).view(6, 5)}, torch.tensor([5, 1, 4, 2, 3, 3]))
    pack = Trajectories(DictTensor(), steps).packed()
    assert [sorted(p.lengths[p.segments["row"] >= 0].tolist()) for p in pack.split(6)] == [[1, 5], [2, 4], [3, 3]]


def test_a_fixed_number_of_segments_can_be_asked_for():
    pack = make_batch(5).packed()
    needed = pack.split(8)[0].n_segments()
    for part in pack.split(8, max_segments=needed + 3):
        assert part.n_segments() == needed + 3 and int(part.cu_seqlens[-1]) == 8
        assert part.segment_ids.shape == part.positions.shape == (8,)
    with pytest.raises(SpecError, match=f"max_segments must be at least {needed} for these segments, got {needed - 1}"):
        pack.split(8, max_segments=needed - 1)


def test_wrong_splits_say_what_is_wrong():
    pack = make_batch(5).packed()
    with pytest.raises(SpecError, match="max_steps must be at least 1, got 0"):
        pack.split(0)
    with pytest.raises(TypeError, match="max_steps must be an int"):
        pack.split(2.5)
    with pytest.raises(SpecError, match="context must be below max_steps, got 4 and 4"):
        pack.split(4, context=4)
    with pytest.raises(MissingKeyError, match="no key 'action/c'"):
        pack.split(4, states={"h": "action/c"})
    with pytest.raises(MissingKeyError, match="no key 'agent_state/c'"):
        pack.split(4, states={"c": "action/h"})
    with pytest.raises(SpecError, match=r"'n' is \(14,\) int64, expected \(14, 3\) as of 'agent_state/h'"):
        pack.split(4, states={"h": "n"})
    pack.info.set("agent_state/c", pack.info["agent_state/h"])
    with pytest.raises(SpecError, match=r"a key for each part of the agent's state, \['agent_state/c'\] have none"):
        pack.split(4, states={"h": "action/h"})
    with pytest.raises(TypeError, match="split: states must map parts of the agent's state to keys, got 'h'"):
        pack.split(4, states="h")
    with pytest.raises(SpecError, match="split: this pack has been split"):
        pack.split(4, context=0)[0].split(2)


# Other forms


@pytest.mark.parametrize("by", ["row", "episode"])
@pytest.mark.parametrize("seed", range(6))
def test_packed_sequences_are_those_of_torch(by, seed):
    batch = make_batch(seed, 5, 7)
    pack = batch.packed(by)
    mine = pack.as_packed_sequence("observation/frame")
    parts = list(pack["observation/frame"].split(pack.lengths.tolist()))
    theirs = nn.utils.rnn.pack_sequence(parts, enforce_sorted=False)
    assert torch.equal(mine.batch_sizes, theirs.batch_sizes)
    lengths = pack.lengths
    assert torch.equal(lengths[mine.sorted_indices], lengths[theirs.sorted_indices])
    unpadded = nn.utils.rnn.unpack_sequence(mine)
    assert all(torch.equal(one, other) for one, other in zip(unpadded, parts, strict=True))
    assert torch.equal(pack.from_packed_sequence(mine), pack["observation/frame"])


def test_a_packed_sequence_of_other_segments_is_refused():
    one, other = make_batch(0).packed(), make_batch(1).packed()
    with pytest.raises(SpecError, match="from_packed_sequence: expected one of n_steps="):
        one.from_packed_sequence(other.as_packed_sequence("n"))
    with pytest.raises(TypeError, match="expected the PackedSequence of a network's outputs, got tuple"):
        one.from_packed_sequence((one.as_packed_sequence("n"), torch.zeros(3)))
    with pytest.raises(SpecError, match="there is no step"):
        make_batch(0, 0).packed().as_packed_sequence("n")


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_sequence_may_have_segments_of_one_length_in_any_order(order):
    values, by_length = torch.arange(6.0).view(3, 2), torch.tensor(order)
    pack = Trajectories(DictTensor(), TemporalDictTensor({"x": values}, torch.tensor([2, 2, 2]))).packed()
    sequence = nn.utils.rnn.PackedSequence(values[by_length].T.flatten(), torch.tensor([3, 3]), by_length)
    assert torch.equal(nn.utils.rnn.unpack_sequence(sequence)[0], values[0])
    assert torch.equal(pack.from_packed_sequence(sequence), pack["x"])


def test_packed_sequences_leave_out_the_empty_segments_of_a_split():
    for part in make_batch(4).packed().split(7, context=0, max_segments=9):
        lstm = nn.LSTM(2, 4)
        n = int((part.lengths > 0).sum())
        state = torch.randn(1, 9, 4)
        output, (h, _) = lstm(part.as_packed_sequence("observation/frame"), (state, state))
        outputs = part.from_packed_sequence(output)
        for s, rows in enumerate(part["observation/frame"].split(part.lengths.tolist())):
            if s < n:
                alone, (last, _) = lstm(rows[:, None], (state[:, s : s + 1], state[:, s : s + 1]))
                low = int(part.cu_seqlens[s])
                torch.testing.assert_close(outputs[low : low + len(rows)], alone[:, 0])
                torch.testing.assert_close(h[:, s], last[:, 0])


def test_nested_tensors_hold_the_segments():
    pack = make_batch(2).packed("episode")
    nested = pack.as_nested("observation/frame")
    parts = nested.unbind()
    assert len(parts) == pack.n_segments()
    assert all(
        torch.equal(a, b) for a, b in zip(parts, pack["observation/frame"].split(pack.lengths.tolist()), strict=True)
    )


def test_the_causal_mask_is_block_diagonal():
    pack = make_batch(2).packed("episode")
    for window in (None, 1, 2):
        mask = pack.causal_mask(window)
        for i, j in itertools.product(range(pack.n_elems()), repeat=2):
            same = int(pack.segment_ids[i]) == int(pack.segment_ids[j])
            assert bool(mask[i, j]) == (same and 0 <= i - j < (window or 99))


# Minibatches


def test_minibatches_hold_every_step_once_an_epoch():
    pack = make_batch(7, 5, 8).packed()
    n = pack.n_elems()
    parts = list(pack.minibatches(4, epochs=2, generator=torch.Generator().manual_seed(0)))
    sizes = [part.n_elems() for part in parts]
    assert sum(sizes) == 2 * n and set(sizes[: len(sizes) // 2 - 1]) == {4}
    for half in (parts[: len(parts) // 2], parts[len(parts) // 2 :]):
        assert sorted(torch.cat([part["n"] for part in half]).tolist()) == sorted(pack["n"].tolist())
    for part in parts:  # rows stay together
        at = [pack["n"].tolist().index(number) for number in part["n"].tolist()]
        assert torch.equal(part["observation/frame"], pack["observation/frame"][at])
    again = list(pack.minibatches(4, epochs=2, generator=torch.Generator().manual_seed(0)))
    assert all(one == other for one, other in zip(parts, again, strict=True))
    assert {p.n_elems() for p in pack.minibatches(4, drop_last=True)} == {4}
    assert not list(make_batch(7, 0).packed().minibatches(4))


def test_minibatches_of_a_split_leave_out_what_does_not_count():
    pack = make_batch(7, 5, 8).packed()
    drawn = [mini["n"] for part in pack.split(9, context=2) for mini in part.minibatches(3)]
    assert sorted(torch.cat(drawn).tolist()) == sorted(pack["n"].tolist())


def test_minibatches_of_segments_hold_each_whole_one_once():
    pack = make_batch(7, 6, 8).packed("episode").set("advantage", torch.arange(make_batch(7, 6, 8).lengths.sum()))
    parts = list(pack.minibatches(7, epochs=2, by="segment"))
    rows = [
        (int(r), int(s)) for part in parts for r, s in zip(part.segments["row"], part.segments["start"], strict=True)
    ]
    wanted = list(zip(pack.segments["row"].tolist(), pack.segments["start"].tolist(), strict=True))
    assert sorted(rows) == sorted(wanted * 2)
    for part in parts:
        assert part.n_elems() <= 7 or part.n_segments() == 1
        at = torch.tensor([pack["n"].tolist().index(n) for n in part["n"].tolist()])
        assert torch.equal(part["advantage"], pack["advantage"][at])
        assert int(part.cu_seqlens[-1]) == part.n_elems() == part.segment_ids.numel()
        assert torch.equal(
            part.unpack(part["n"])[part.unpack(torch.ones(part.n_elems())) > 0].sort().values, part["n"].sort().values
        )
    with pytest.raises(SpecError, match=r"by must be one of \('step', 'segment'\), got 'row'"):
        pack.minibatches(4, by="row")
    with pytest.raises(SpecError, match="size must be at least 1, got 0"):
        pack.minibatches(0)


# Joins


def cut_in_time(batch, cuts):
    """Consecutive rollouts of full rows, cut at these times, as a batcher would have given them."""
    parts = []
    for low, high in itertools.pairwise([0, *cuts, batch.trajectories.n_timesteps()]):
        steps = batch.trajectories.temporal_slice(low, high)
        state = batch.trajectories["action/h"][:, low] if low else batch.info["agent_state/h"]
        info = {"env_index": batch.info["env_index"], "agent_state/h": state}
        parts.append(Trajectories(DictTensor(info), steps))
    return parts


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 4), st.sets(st.integers(1, 7), max_size=3), st.booleans())
def test_join_undoes_a_cut_in_time(seed, n_rows, cuts, counted):
    batch = make_batch(seed, n_rows, 8, counted=counted)
    batch.trajectories.lengths.fill_(8)
    parts = cut_in_time(batch, sorted(cuts))
    whole, joined = batch.packed("episode"), PackedTrajectories.join(part.packed("episode") for part in parts)
    segments = {tuple(p.tolist()) for p in joined["n"].split(joined.lengths.tolist())}
    assert segments == {tuple(p.tolist()) for p in whole["n"].split(whole.lengths.tolist())}
    first = {int(p[0]): s for s, p in enumerate(joined["n"].split(joined.lengths.tolist()))}
    for s, p in enumerate(whole["n"].split(whole.lengths.tolist())):
        assert torch.equal(joined.state["h"][first[int(p[0])]], whole.state["h"][s])
        assert bool(joined.segments["continues"][first[int(p[0])]]) == bool(whole.segments["continues"][s])
    assert joined.unpack(joined) == Trajectories.cat(parts).trajectories


@pytest.mark.parametrize("flags", [("done",), ("terminated", "truncated")])
@pytest.mark.parametrize("by", ["row", "episode"])
def test_join_ends_episodes_where_flags_say_so_without_a_first_step_that_does(flags, by):
    ends = torch.tensor([[False, False, True], [False, False, False]])
    steps = {f"_observation/{flag}": ends for flag in flags}
    batch = Trajectories(DictTensor({"env_index": torch.arange(2)}), TemporalDictTensor(steps, torch.tensor([3, 3])))
    assert PackedTrajectories.join([batch.packed(by), batch.packed(by)]).lengths.tolist() == [3, 6, 3]
    misshapen = Trajectories(DictTensor({"env_index": torch.zeros(2, 1)}), batch.trajectories).packed(by)
    with pytest.raises(SpecError, match=r"join: 'env_index' is \(2, 1\) float32 in item 0, expected one number"):
        PackedTrajectories.join([misshapen])


def test_join_does_not_bridge_what_is_missing():
    batch = make_batch(11, 2, 8, n_ends=0.0)
    batch.trajectories.lengths.fill_(8)
    first, second, third = cut_in_time(batch, [2, 5])
    joined = PackedTrajectories.join([first.packed("episode"), third.packed("episode")])
    assert joined.n_segments() == 4  # by their counts
    assert PackedTrajectories.join([first.packed("episode"), second.packed("episode")]).n_segments() == 2
    with pytest.raises(TypeError, match="join: item 1 is a Trajectories"):
        PackedTrajectories.join([first.packed(), second])
    with pytest.raises(SpecError, match="item 1 has been split"):
        PackedTrajectories.join([first.packed(), second.packed().split(3, context=0)[0]])
    with pytest.raises(MissingKeyError):
        PackedTrajectories.join([first.packed(), second.packed(keys=["n"])])
    with pytest.raises(SpecError, match="there is no pack"):
        PackedTrajectories.join([])


# As a structure


@pytest.mark.parametrize(
    "how", ["clone", "to", "deepcopy", "pickle", "npz", "h5", "numpy", "jax", "warp", "tensordict"]
)
def test_copies_of_whole_packs_can_be_split_and_joined_and_those_of_parts_cannot(how, tmp_path):
    def copied(pack):
        if how in ("npz", "h5"):
            pack.save(tmp_path / f"pack.{how}")
            return PackedTrajectories.load(tmp_path / f"pack.{how}")
        if how in ("numpy", "jax", "warp", "tensordict"):
            name = "to_tensordict" if how == "tensordict" else how
            return getattr(PackedTrajectories, f"from_{how}")(getattr(pack, name)())
        if how == "pickle":
            return pickle.loads(pickle.dumps(pack))
        return copy.deepcopy(pack) if how == "deepcopy" else pack.to("cpu") if how == "to" else pack.clone()

    if how in ("jax", "tensordict"):
        pytest.importorskip(how)
    whole = make_batch(9).packed("episode")
    other = copied(whole)
    for mine, theirs in zip(other.split(4, context=1), whole.split(4, context=1), strict=True):
        assert torch.equal(mine["observation/frame"], theirs["observation/frame"])
        assert torch.equal(mine.mask(), theirs.mask())
    assert sum(map(len, other.minibatches(4, by="segment"))) == len(whole)
    assert len(PackedTrajectories.join([other, other])) == 2 * len(whole)
    # The first is full, so that all of its steps count.
    for part in whole.split(4, context=0)[0], whole.split(16)[0]:
        with pytest.raises(SpecError, match="has been split"):
            copied(part).split(2, context=0)


def test_packs_are_structures(tmp_path):
    batch = make_batch(9)
    for pack in (batch.packed("episode"), batch.packed().split(5, context=2)[0], make_batch(9, 0).packed()):
        for other in (pack.clone(), pack.to("cpu"), copy.deepcopy(pack), pickle.loads(pickle.dumps(pack))):
            assert other == pack and other.unpack(other) == pack.unpack(pack)
            assert torch.equal(other.first_steps, pack.first_steps)
        for suffix in ("npz", "pt"):
            pack.save(tmp_path / f"pack.{suffix}")
            loaded = PackedTrajectories.load(tmp_path / f"pack.{suffix}")
            assert loaded == pack and torch.equal(loaded.first_steps, pack.first_steps)
        assert PackedTrajectories.from_numpy(pack.numpy()) == pack
    assert len(pack) == 0 and "n" in pack and pack.get(["n"]).keys() == {"n"}
    with pytest.raises(MissingKeyError, match=r"no key 0, there are \['n'\]$"):  # and no advice to call `index`
        pack.get(["n"])[0]


@pytest.mark.parametrize("library", ["jax", "warp"])
def test_other_libraries_get_segment_ids_and_offsets(library):
    if library == "jax":
        pytest.importorskip("jax")
    pack = make_batch(9).packed("episode")
    arrays = getattr(pack, library)()
    assert set(arrays) == {
        "steps", "segments", "info", "cu_seqlens", "mask", "index", "row_lengths", "sizes", "segment_ids", "positions",
        "lengths",
    }  # fmt: skip
    as_list = (lambda array: np.asarray(array).tolist()) if library == "jax" else (lambda array: array.numpy().tolist())
    assert as_list(arrays["cu_seqlens"]) == pack.cu_seqlens.tolist()
    assert as_list(arrays["segment_ids"]) == pack.segment_ids.tolist()
    assert as_list(arrays["lengths"]) == pack.lengths.tolist()
    assert as_list(arrays["steps"]["observation/frame"]) == pack["observation/frame"].tolist()
    back = getattr(PackedTrajectories, f"from_{library}")(arrays)
    assert torch.equal(back.unpack(back["observation/frame"]), pack.unpack(pack["observation/frame"]))
    assert back.segments == pack.segments  # int64, also from jax, which has 32 bits


def test_unpack_refuses_what_is_not_of_this_pack():
    one, other = make_batch(0), make_batch(1)
    pack = one.packed()
    n = pack.n_elems()
    with pytest.raises(SpecError, match=rf"unpack: values is \({n + 1},\) float32, expected \({n}, ...\)"):
        pack.unpack(torch.zeros(n + 1))
    with pytest.raises(SpecError, match=r"unpack: values is \(\) float32"):
        pack.unpack(torch.zeros(()))
    with pytest.raises(SpecError, match=r"unpack: expected values of n_steps=\d+, n_segments=\d+, got a pack of"):
        pack.unpack(other.packed())
    with pytest.raises(SpecError, match="unpack: expected values"):
        pack.unpack(
            one.packed("episode") if one.packed("episode").n_segments() != pack.n_segments() else other.packed()
        )
    with pytest.raises(SpecError, match=r"set: x is \(1,\) float32"):
        pack.set("x", torch.zeros(1))
    for wrong in ({}, {"y": torch.zeros(n)}, [0.0] * n):
        with pytest.raises(TypeError, match=f"set: 'x' must be a torch.Tensor, got {type(wrong).__name__}"):
            pack.set("x", wrong)
    assert pack == one.packed()


@pytest.mark.parametrize("name", ["cu_seqlens", "mask", "index", "segments", "sizes"])
def test_damaged_trees_are_refused(name):
    tree = make_batch(0).packed().numpy()
    assert PackedTrajectories.from_numpy(tree)
    if name == "segments":
        tree[name] = {key: array[:-1] for key, array in tree[name].items()}
    elif name == "index":
        tree[name] = tree[name] + 1000
    elif name == "sizes":
        del tree[name]
    else:
        tree[name] = tree[name][:-1]
    with pytest.raises(SpecError if name != "sizes" else MissingKeyError):
        PackedTrajectories.from_numpy(tree)


@pytest.mark.parametrize("name", ["cu_seqlens", "mask", "index", "row_lengths", "sizes"])
def test_parts_of_other_dtypes_and_shapes_are_refused(name):
    tree = make_batch(0).packed().numpy()
    for wrong in (tree[name].astype(np.float32), tree[name][None], {"x": tree[name]}):
        with pytest.raises(SpecError, match=f"PackedTrajectories: '{name}' must be (int|bool).* with one axis, got "):
            PackedTrajectories.from_numpy({**tree, name: wrong})
    for sizes, what in (([6, 6], "'sizes' must have shape"), ([6, 0, 0], "max_seqlen is 0"), ([-1, 6, 0], "index")):
        with pytest.raises(SpecError, match=what):
            PackedTrajectories.from_numpy({**tree, "sizes": np.array(sizes)})
