"""How many bytes a memory takes: known before they are taken, and no more than its rows need."""

from __future__ import annotations

import tracemalloc

import psutil
import pytest
import torch
from frameworks import CUDA, EVERY_KIND, KINDS, array, dtype

from rlstructs import DictTensor, OutOfMemoryError, TemporalDictTensor, Trajectories
from rlstructs.replay.rows.backing import available_bytes

MIB = 2**20
# name -> dtype and size of a row.
TENSORS = {"frame": ("uint8", 400), "x": ("float32", 17), "n": ("int32", 3), "terminated": ("bool", 1)}
ROW = 400 + 17 * 4 + 3 * 4 + 1


def make(kind, cls, memory_size, num_envs):
    memory = getattr(KINDS[kind], cls)(memory_size=memory_size, num_envs=num_envs)
    for name, (of, size) in TENSORS.items():
        memory.create_tensor(name, size=size, dtype=dtype(kind, of))
    return memory


def touch_all(kind, memory):
    """Writes to every byte of its tensors."""
    for name, (of, _) in TENSORS.items():
        memory.set_tensor_by_name(name, array(kind, [0], of))


def held(kind):
    """Bytes that this process has where the rows lie; on the host what no other shares, which is counted exactly."""
    return torch.cuda.memory_allocated() if kind in CUDA else psutil.Process().memory_full_info().uss


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize(("cls", "more"), [("RandomMemory", 16), ("PrioritizedMemory", 16 + 40)])
@pytest.mark.parametrize(("memory_size", "num_envs"), [(1, 1), (100_000, 1), (70_000, 3)], ids=str)
def test_a_memory_is_as_large_as_its_rows_and_little_more(kind, cls, more, memory_size, num_envs):
    touch_all(kind, make(kind, cls, 1, 1))  # what libraries take at first is theirs
    # Whatever else this process takes meanwhile (a library's threads, a collector) counts too: the least of three
    # is the memory's. They are kept until the end, so that none lives in what another gave back.
    memories, taken = [make(kind, cls, memory_size, num_envs) for _ in range(3)], []
    n_rows = memory_size * num_envs
    for memory in memories:
        said = memory.nbytes  # before anything is taken
        assert ROW * n_rows <= said <= (ROW + more) * n_rows + MIB
        before = held(kind)
        touch_all(kind, memory)
        taken.append(held(kind) - before)
        assert memory.nbytes == said
    assert min(taken) <= said + MIB


def test_tensors_beyond_what_the_machine_has_are_refused_before_they_are_taken():
    memory = KINDS["torch"].RandomMemory(memory_size=10**12)
    message = r"^tensor 'x': 68,000,000,000,000 bytes are needed, [\d,]+ are available$"
    with pytest.raises(OutOfMemoryError, match=message):
        memory.create_tensor("x", size=17)
    assert memory.get_tensor_names() == []


def test_tensors_that_fit_one_by_one_and_not_together_are_refused():
    memory = KINDS["torch"].RandomMemory(memory_size=int(available_bytes() * 0.6) // 4)
    memory.create_tensor("observations", size=1)
    with pytest.raises(OutOfMemoryError, match="^tensor 'next_observations': "):
        memory.create_tensor("next_observations", size=1)
    assert memory.get_tensor_names() == ["observations"]


def test_trajectories_whose_tensors_do_not_fit_together_leave_the_memory_as_it_was():
    memory = KINDS["torch"].RandomMemory(memory_size=int(available_bytes() * 0.6) // 4)
    steps = {key: torch.zeros(1, 2) for key in ("x", "y")}
    batch = Trajectories(DictTensor({"env_index": torch.tensor([0])}), TemporalDictTensor(steps, torch.tensor([2])))
    with pytest.raises(OutOfMemoryError, match="^add_trajectories: "):
        memory.add_trajectories(batch, {"x": "x", "y": "y"})
    assert memory.get_tensor_names() == []


def test_rows_of_lanes_that_are_far_apart_take_memory_by_their_number():
    memory = KINDS["torch"].RandomMemory(memory_size=100, num_envs=2)
    steps = TemporalDictTensor({"x": torch.zeros(1, 10**6)}, torch.tensor([10**6]))
    for _ in range(3):
        memory.add_trajectories(Trajectories(DictTensor({"env_index": torch.tensor([0])}), steps), {"x": "x"})
    tracemalloc.start()
    try:
        assert memory.sample_all(["x"])[0][0].shape == (100, 1)
        assert tracemalloc.get_traced_memory()[1] < 10**5
    finally:
        tracemalloc.stop()
