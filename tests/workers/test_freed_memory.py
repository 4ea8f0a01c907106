"""Large batches take the memory of those that were freed."""

import platform
import subprocess
import sys

import pytest

# The first batches are small: the C library would keep memory for more of the same size without help, too.
DRAWS = """
import numpy as np
from rlstructs.replay import Batch, ReplayBuffer

buffer = ReplayBuffer(100, stack_num=4, ignore_obs_next=True)
for _ in range(100):
    buffer.add(Batch(obs=np.zeros((84, 84), np.uint8), act=0, rew=0.0, terminated=False, truncated=False, info={}))
buffer.sample(8)
def take():
    buffer.sample(64)
"""
ROLLOUTS = """
import gymnasium
import numpy as np
from rlstructs import RL_Batcher

class Frames(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 255, (84, 84), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros((84, 84), np.uint8), {}

    def step(self, action):
        return np.zeros((84, 84), np.uint8), 0.0, False, False, {}

def batches(n_timesteps):
    with RL_Batcher.make(Frames, n_envs=4, n_workers=1, n_timesteps=n_timesteps) as batcher:
        batcher.reset()
        while True:
            batcher.execute()
            yield batcher.get()

next(batches(8))
large = batches(64)
def take():
    next(large)
"""
COUNT = """
from resource import RUSAGE_SELF, getrusage
def count():
    before = getrusage(RUSAGE_SELF).ru_minflt
    take()
    return getrusage(RUSAGE_SELF).ru_minflt - before
print(sorted(count() for _ in range(21))[10])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep freed memory by other rules")
@pytest.mark.parametrize("program", [DRAWS, ROLLOUTS], ids=["draws", "get"])
def test_large_batches_take_memory_that_was_freed(program):
    """In a process of its own, as it depends on all that was freed before."""
    done = subprocess.run([sys.executable, "-c", program + COUNT], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 50  # of the 800 pages and more in a batch, the faults in half of the calls
