"""Batches that are made ahead: those of a program without, in its order, whenever threads come to read them."""

from __future__ import annotations

import gc
import itertools
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import torch
from frameworks import host
from hypothesis import given, settings
from hypothesis import strategies as st
from surfaces import EVERY_SURFACE, trajectories

from rlstructs import SpecError, StateError
from rlstructs.memories.memory import Memory
from rlstructs.memories.torch import PrioritizedMemory, RandomMemory
from rlstructs.replay import (
    CachedReplayBuffer,
    ChunkReplayBuffer,
    DictTensorReplayBuffer,
    ListStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
)
from rlstructs.replay.torchrl.buffer import DictTensorBase

LIMIT = 60
SURFACES = [case for case in EVERY_SURFACE if "Shard" not in case.id and "Cached" not in case.id]


def filled(surface, n=7):
    made = surface.make()
    made.add_trajectories(trajectories(0, n), names=surface.names)
    return made


def arguments(made):
    """What `sample` and `batches` of a memory are given."""
    if isinstance(made, Memory):
        return (made.get_tensor_names(), 8)
    if isinstance(made, ChunkReplayBuffer):
        return (8, 2, "prioritized" if made._priorities is not None else "uniform")
    return (8,)


def values(made, batch):
    """Everything that a program gets with a batch, as bytes by name."""
    if isinstance(made, Memory):
        rows = dict(zip(made.get_tensor_names(), batch[0], strict=True))
        rows |= {"index": made.get_sampling_indexes(), "mask": made.get_sampling_mask()}
        rows |= {"weights": made.get_sampling_weights()} if isinstance(made, PrioritizedMemory) else {}
    elif isinstance(made, ChunkReplayBuffer):
        rows = {**batch.data, **batch.info}
    elif isinstance(made, DictTensorBase):
        rows = dict(batch.items())
    else:
        rows = dict(_flat(batch[0])) | {"index": batch[1]}
    return {name: host(value).tobytes() for name, value in rows.items()}


def _flat(batch, prefix=""):
    for name in batch.keys():  # noqa: SIM118
        if hasattr(batch[name], "keys"):
            yield from _flat(batch[name], f"{prefix}{name}/")
        else:
            yield prefix + name, batch[name]


def rows_of(made, batch):
    if isinstance(made, Memory):
        return made.get_sampling_indexes()
    if isinstance(made, ChunkReplayBuffer):
        return batch.info["indices"]
    return batch["index"] if isinstance(made, DictTensorBase) else batch[1]


def set_priorities(made, batch, number):
    """Gives the rows of a batch new priorities, if they have any."""
    rows = rows_of(made, batch)
    given = 0.5 + (host(rows) + number) % 7
    if isinstance(made, ChunkReplayBuffer):
        if made._priorities is not None:
            made.update_priorities(rows, given)
    elif hasattr(made, "update_priorities"):
        made.update_priorities(rows, given)
    elif hasattr(made, "update_weight"):
        made.update_weight(rows, given)
    elif hasattr(made.__dict__.get("_parts", None), "sampler") and made.sampler.fields:
        made.update_priority(rows, torch.from_numpy(given))


@pytest.mark.parametrize("surface", SURFACES)
def test_batches_are_those_of_as_many_samples_also_where_the_program_samples_in_between(surface):
    plain, made = filled(surface), filled(surface)
    own = lambda memory: memory.sample(*arguments(memory))  # noqa: E731
    with made.batches(*arguments(made), prefetch=3) as batches:
        for number in range(9):
            batch = own(made) if number == 5 else next(batches)
            assert values(made, batch) == values(plain, own(plain)), number
    assert values(made, own(made)) == values(plain, own(plain))


class Never(ThreadPoolExecutor):
    """Threads that come too late: whoever takes a batch has to make it."""

    def submit(self, function, *args):
        return Future()


OPERATIONS = st.lists(st.sampled_from([*"nnnnnn", "add", "add", "priorities", "save", "sample"]), max_size=25)


@pytest.mark.parametrize("surface", [case for case in SURFACES if "warp" not in case.id and "jax" not in case.id])
@settings(max_examples=8, deadline=None)
@given(operations=OPERATIONS)
def test_batches_do_not_depend_on_when_threads_read_them(surface, operations, tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "memory.npz"
    found = []
    for threads in ("early", "late"):
        with pytest.MonkeyPatch.context() as patch:
            if threads == "late":
                patch.setattr("rlstructs.replay.draw.ahead.ThreadPoolExecutor", Never)
            made, seen = filled(surface), []
            with made.batches(*arguments(made), prefetch=2) as batches:
                for number, operation in enumerate(operations):
                    if operation == "add":
                        made.add_trajectories(trajectories(1000 * number, 3), names=surface.names)
                    elif operation == "save":
                        made.save(path)
                    else:
                        batch = made.sample(*arguments(made)) if operation == "sample" else next(batches)
                        seen.append(values(made, batch))
                        if operation == "priorities":
                            set_priorities(made, batch, number)
                    for each in batches._ahead._queue if threads == "early" else ():
                        each.future.result()
            found.append(seen)
    assert found[0] == found[1]


@pytest.mark.parametrize("surface", SURFACES)
def test_a_memory_that_was_saved_goes_on_as_one_that_loads_the_file(surface, tmp_path):
    made, path = filled(surface), tmp_path / "memory.npz"
    batches = made.batches(*arguments(made), prefetch=2)
    for number in range(3):
        set_priorities(made, next(batches), number)
        made.add_trajectories(trajectories(100 * number, 2), names=surface.names)
    made.save(path)
    other = surface.make()
    other.load(path)
    with batches, other.batches(*arguments(other), prefetch=2) as others:
        for number in range(4):
            pair = [(memory, next(each)) for memory, each in ((made, batches), (other, others))]
            assert values(*pair[0]) == values(*pair[1])
            for memory, batch in pair:
                set_priorities(memory, batch, number)
                memory.add_trajectories(trajectories(900 + 10 * number, 1), names=surface.names)


def memory_of(n_rows, capacity=100, **settings):
    made = RandomMemory(capacity, seed=0, device="cpu", **settings)
    made.create_tensor("x", 1)
    made.add_samples(x=np.arange(n_rows, dtype=np.float32)[:, None])
    return made


def test_a_batch_is_of_the_rows_there_were_when_the_one_so_many_places_before_it_was_handed_out():
    for prefetch in (0, 1, 3):
        made, newest = memory_of(10, 10_000), []
        with made.batches(["x"], batch_size=2000, prefetch=prefetch) as batches:
            for number in range(6):
                [[x]] = next(batches)
                newest.append(int(x.max()))
                made.add_samples(x=np.arange(10 * number + 10, 10 * number + 20, dtype=np.float32)[:, None])
        assert newest == [9 + 10 * max(0, number - prefetch) for number in range(6)]


def test_rows_that_were_overwritten_since_the_draw_are_drawn_again():
    made = memory_of(10, 10)
    with made.batches(["x"], batch_size=50, prefetch=2) as batches:
        for number in range(6):
            [[x]] = next(batches)
            assert (x >= number).all() and (x < number + 10).all()
            np.testing.assert_array_equal(host(made.get_sampling_indexes()), host(x).ravel() % 10)
            made.add_samples(x=np.full((1, 1), number + 10, np.float32))


def test_rows_that_are_changed_in_place_are_never_read_before():
    made = memory_of(10)
    with made.batches(["x"], batch_size=5, prefetch=2) as batches:
        next(batches)
        made.set_tensor_by_name("x", np.full((100, 1, 1), -1, np.float32))
        assert (next(batches)[0][0] == -1).all()
        live = made.get_tensor_by_name("x")
        for number in range(3):  # which the program may write to at any time
            live[:] = number
            assert (next(batches)[0][0] == number).all()


def test_an_error_comes_where_its_batch_would_have_come_and_the_next_one_follows(monkeypatch):
    made, plain = memory_of(10), memory_of(10)
    fails, gather = itertools.cycle([False, False, True]), type(made._storage.columns).gather

    def gather_or_fail(columns, names, rows):
        if columns is made._storage.columns and next(fails):
            raise StateError("damaged")
        return gather(columns, names, rows)

    monkeypatch.setattr(type(made._storage.columns), "gather", gather_or_fail)
    batches, seen = made.batches(["x"], batch_size=4, prefetch=1), []
    for _ in range(9):
        try:
            seen.append(values(made, next(batches)))
        except StateError:
            seen.append(None)
    expected = [values(plain, plain.sample(["x"], 4)) for _ in range(9)]
    assert [one for one in seen if one] == [expected[at] for at, one in enumerate(seen) if one] and None in seen
    batches.close()


def test_a_memory_without_rows_has_no_batch_until_there_are_some():
    made = memory_of(0)
    with made.batches(["x"], batch_size=2) as batches:
        with pytest.raises(SpecError, match="^nothing to sample"):
            next(batches)
        made.add_samples(x=[[3.0]])
        assert next(batches)[0][0].tolist() == [[3], [3]]


def own_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("rlstructs-prefetch")}


@pytest.mark.parametrize("way", ["close", "with", "forgotten"])
def test_threads_end_with_the_iterator(way):
    before, made = own_threads(), memory_of(10)
    batches = made.batches(["x"], batch_size=2)
    for _ in range(3):
        next(batches)
    threads = own_threads() - before
    assert threads
    if way == "close":
        batches.close()
        batches.close()
    elif way == "with":
        with batches:
            pass
    if way != "forgotten":
        assert list(batches) == []
    del batches
    gc.collect()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()


def test_what_was_drawn_ahead_is_not_lost_from_the_stream():
    made, plain = memory_of(50), memory_of(50)
    for _ in range(3):  # iterators that are left
        with made.batches(["x"], batch_size=4, prefetch=5) as batches:
            for batch in itertools.islice(batches, 2):
                assert values(made, batch) == values(plain, plain.sample(["x"], 4))


def test_windows_steps_and_packs_are_made_ahead_too():
    made, plain = (filled(next(case.values[0] for case in SURFACES if case.id == "memory of torch")) for _ in "ab")
    names = made.get_tensor_names()
    for more in ({"sequence_length": 3, "mini_batches": 2}, {"n_step": 3}, {"packed": True, "sequence_length": 3}):
        with made.batches(names, 6, **more) as batches:
            for _ in range(4):
                one, other = next(batches), plain.sample(names, 6, **more)
                assert repr(one) == repr(other)
                np.testing.assert_array_equal(host(made.get_sampling_indexes()), host(plain.get_sampling_indexes()))


def test_a_pass_without_replacement_is_a_pass_with_batches_made_ahead():
    storage = ListStorage(20)
    made = DictTensorReplayBuffer(storage=storage, sampler=SamplerWithoutReplacement(), batch_size=5, generator=0)
    made.extend({"x": torch.arange(20)})
    with made.batches(prefetch=3) as batches:
        for _ in range(2):
            assert sorted(torch.cat([next(batches)["x"] for _ in range(4)]).tolist()) == list(range(20))


def test_what_cannot_be_drawn_ahead_is_refused():
    class Own(ReplayBuffer):
        def sample_indices(self, batch_size):
            return np.zeros(batch_size, int)

    with pytest.raises(SpecError, match="^batches: a CachedReplayBuffer is for one thread"):
        CachedReplayBuffer(ReplayBuffer(9), 1, 3).batches(4)
    with pytest.raises(SpecError, match="^batches: Own chooses or reads rows in its own way"):
        Own(9).batches(4)
    for prefetch in (-1, True):
        with pytest.raises((SpecError, TypeError), match="prefetch"):
            memory_of(3).batches(["x"], 4, prefetch=prefetch)
