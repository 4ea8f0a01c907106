"""How many bytes a memory takes: known before they are taken, and no more than its rows need."""

from __future__ import annotations

import psutil
import pytest
from frameworks import KINDS, dtype

from rlstructs import OutOfMemoryError

MIB = 2**20
# name -> dtype and size of a row.
TENSORS = {"frame": ("uint8", 400), "x": ("float32", 17), "n": ("int32", 3), "terminated": ("bool", 1)}
ROW = 400 + 17 * 4 + 3 * 4 + 1


def make(kind, cls, memory_size, num_envs):
    memory = getattr(KINDS[kind], cls)(memory_size=memory_size, num_envs=num_envs, device="cpu")
    for name, (of, size) in TENSORS.items():
        memory.create_tensor(name, size=size, dtype=dtype(kind, of))
    return memory


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("cls", "more"), [("RandomMemory", 16), ("PrioritizedMemory", 16 + 40)])
@pytest.mark.parametrize(("memory_size", "num_envs"), [(1, 1), (100_000, 1), (70_000, 3)], ids=str)
def test_a_memory_is_as_large_as_its_rows_and_little_more(kind, cls, more, memory_size, num_envs):
    memory = make(kind, cls, memory_size, num_envs)
    n_rows = memory_size * num_envs
    said = memory.nbytes  # before anything is taken
    assert ROW * n_rows <= said <= (ROW + more) * n_rows + MIB
    before = psutil.Process().memory_info().rss
    _ = memory.tensors
    taken = psutil.Process().memory_info().rss - before
    assert taken <= said + MIB
    assert memory.nbytes == said


def test_tensors_beyond_what_the_machine_has_are_refused_before_they_are_taken():
    memory = KINDS["torch"].RandomMemory(memory_size=10**12)
    with pytest.raises(OutOfMemoryError, match=r"^tensor 'x': 68,000,000,000,000 bytes are needed, [\d,]+ are available$"):
        memory.create_tensor("x", size=17)
    assert memory.get_tensor_names() == ()
