"""The kernels of returns load when they are needed, in any thread and process, or not at all."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

# What the programs begin with.
PROGRAM = """
    import os, signal, sys, threading, torch
    from rlstructs import discounted_returns
    from rlstructs.returns import compute

    def returns(n_elems):
        no = torch.zeros(n_elems, 256, dtype=torch.bool)
        return discounted_returns(torch.ones(n_elems, 256), torch.ones(n_elems, 256), no, no, 0.5)

    def check():
        assert torch.allclose(returns(64), torch.tensor(2.0) - 0.5 ** torch.arange(256, 0, -1.0), atol=1e-6)
"""


def run(program, **environment):
    """What a program says on its standard error; it must end well."""
    code = textwrap.dedent(PROGRAM) + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_warp_loads_with_the_first_large_call_whatever_thread_it_comes_from(subprocess_env):
    run(
        """
        returns(4)
        assert "warp" not in sys.modules
        failed = []
        threading.excepthook = failed.append
        threads = [threading.Thread(target=check) for _ in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert not failed, failed
        assert all(compute._starts.values()) and len(compute._starts) == 1
        """,
        **subprocess_env,
    )


# `returns(1)` needs no kernel: a fork in the middle of torch's own first operations, in the thread, hangs in torch.
@pytest.mark.parametrize("before", ["check()", "returns(1); threading.Thread(target=check).start()", "pass"])
def test_a_forked_child_computes_them_too(before, subprocess_env):
    """After the parent has loaded the kernels, while it loads them, and before."""
    run(
        f"""
        {before}
        child = os.fork()
        if not child:
            signal.alarm(300)
            check()
            assert all(compute._starts.values()) and len(compute._starts) == 1
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        check()
        """,
        **subprocess_env,
    )


def test_where_kernels_cannot_be_kept_torch_computes_and_one_line_says_so(subprocess_env, tmp_path):
    (tmp_path / "file").touch()
    nowhere = {name: str(tmp_path / "file") for name in ("HOME", "XDG_CACHE_HOME", "WARP_CACHE_PATH")}
    program = """
        check()
        check()
        assert list(compute._starts.values()) == [None]
        """
    said = run(program, **subprocess_env | nowhere)
    message = "Warp cannot load the kernels of returns; torch computes returns instead, more slowly: "
    assert said.count(message) == 1, said
