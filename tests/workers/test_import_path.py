"""Workers import what the main process imports, whatever lies in the current directory; what errors of a start say."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import zipfile

import pytest

from rlstructs.workers import WorkerCrashed, WorkerPool

METHODS = ["forkserver", "spawn", "fork"]
# Of the standard library what multiprocessing imports, and what workers do; packages that are loaded before and later.
NAMES = [
    "multiprocessing", "queue", "signal", "random", "socket", "pickle", "threading", "selectors", "tempfile", "bdb",
    "struct", "warnings", "ctypes", "faulthandler", "torch", "numpy", "gymnasium", "cloudpickle", "rlstructs",
]  # fmt: skip

SURFACES = {
    "pool": """
from rlstructs.workers import WorkerPool
class Job:
    def __init__(self, index):
        pass
    def look(self):
        import queue, sys
        return sys.path, queue.__file__
with WorkerPool(1, Job, start_method=METHOD) as pool:
    path, file = pool.call("look")[0]
import queue
print(path == [entry or os.getcwd() for entry in sys.path], file == queue.__file__)
""",
    "batcher": """
import gymnasium
from rlstructs import GymEnvInf, RandomAgent, RL_Batcher
with RL_Batcher(
    2, lambda: RandomAgent(gymnasium.spaces.Discrete(2)), {},
    lambda n_envs, seed: GymEnvInf([gymnasium.make("CartPole-v1")], seed), {"n_envs": 1},
    n_processes=1, seeds=0, start_method=METHOD,
) as batcher:
    batcher.reset()
    batcher.execute()
    print(batcher.get()[1] == 1, batcher.evaluate(1, seed=0) is not None)
""",
    "vector": """
import gymnasium
from rlstructs import SharedVectorEnv
with SharedVectorEnv([lambda: gymnasium.make("CartPole-v1")], n_workers=1, start_method=METHOD) as envs:
    print(envs.reset(seed=0)[0].shape == (1, 4), True)
""",
}


def hostile(folder):
    """Fills a folder with modules that leave their names when they are executed, and fail."""
    for name in NAMES:
        (folder / f"{name}.py").write_text(trap(folder))
    (folder / "rlstructs").mkdir()
    (folder / "rlstructs" / "__init__.py").write_text(trap(folder))
    return folder


def trap(folder):
    note = f"open({str(folder / 'executed')!r}, 'a').write(__name__ + ' ')"
    return f"{note}\nraise ImportError('of the current directory')\n"


def executed(folder):
    return (folder / "executed").read_text() if (folder / "executed").exists() else ""


def program(tmp_path, text):
    (tmp_path / "programs").mkdir()
    path = tmp_path / "programs" / "program.py"
    path.write_text(f"import os, sys\nMETHOD = sys.argv[1]\n{text}")
    return path


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "here").mkdir()
    return hostile(tmp_path / "here")


def run(command, cwd, env):
    return subprocess.run([sys.executable, *map(str, command)], cwd=cwd, env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("surface", "method"),
    [("pool", "forkserver"), ("pool", "spawn"), ("pool", "fork"), ("batcher", "forkserver"), ("vector", "spawn")],
)
def test_nothing_of_the_current_directory_is_executed(surface, method, folder, tmp_path, subprocess_env):
    done = run([program(tmp_path, SURFACES[surface]), method], folder, subprocess_env)
    assert (done.stdout.split(), executed(folder)) == (["True", "True"], ""), done.stderr


@pytest.mark.parametrize("flags", [["-P"] if sys.version_info >= (3, 11) else ["-B"], ["-s"], ["-X", "dev"]], ids=str)
def test_under_flags_of_python(flags, folder, tmp_path, subprocess_env):
    done = run([*flags, program(tmp_path, SURFACES["pool"]), "forkserver"], folder, subprocess_env)
    assert (done.stdout.split(), executed(folder)) == (["True", "True"], ""), done.stderr


def test_the_command_executes_nothing_of_the_current_directory(folder, subprocess_env):
    command = "import sys; sys.path.remove(''); from rlstructs.cli.command import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["collect", "CartPole-v1", "--workers", "1", "--envs", "1", "--steps", "20"]
    done = run(["-c", command, *arguments], folder, subprocess_env)
    assert (done.returncode, executed(folder)) == (0, ""), done.stderr


@pytest.mark.parametrize("method", METHODS)
def test_what_the_program_has_added_to_its_path_is_found(method, tmp_path, subprocess_env):
    (tmp_path / "lib").mkdir()
    job = "class Job:\n    def __init__(self, index): pass\n    def of(self): return 1"
    (tmp_path / "lib" / "added.py").write_text(job)
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "added_later.py").write_text("value = 2")
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as archive:
        archive.writestr("zipped.py", "value = 3")
    text = """
import pathlib
from rlstructs.workers import WorkerPool
sys.path[:0] = ["lib", str(pathlib.Path("packed.zip").resolve())]
sys.path.append(pathlib.Path("no text"))
import added, zipped

class Later:
    def __init__(self, index):
        import added_later, zipped
        self.found = added_later.value + zipped.value
    def of(self):
        return self.found

with WorkerPool(1, added.Job, start_method=METHOD) as pool:
    found = pool.call("of")
sys.path.append(os.path.abspath("later"))
with WorkerPool(1, Later, start_method=METHOD) as pool:
    print(found, pool.call("of"))
"""
    done = run([program(tmp_path, text), method], tmp_path, subprocess_env)
    assert done.stdout.strip() == "[1] [5]", done.stderr


class Job:
    def __init__(self, index):
        pass

    def identify(self):
        return os.getpid()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise ValueError('no licence')", "the fork server raised as it imported 'failing': ValueError: no licence; "),
        ("import sys; sys.exit('no licence')", "raised as it imported 'failing': SystemExit: no licence; "),
        ("import os; os.kill(os.getpid(), 9)", "ended twice: .*killed by SIGKILL as it imported 'failing'"),
        ("raise ValueError('x' * 100_000)", "the fork server raised as it imported 'failing': ValueError: xxx"),
    ],
)
def test_a_preload_that_fails_says_why(code, said, tmp_path, monkeypatch):
    (tmp_path / "failing.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WorkerCrashed, match=f"worker 0 could not be started: .*{said}"):
        WorkerPool(1, Job, start_method="forkserver", preload=("json", "failing", str(len(code))))


def test_a_preload_that_is_not_there_is_left_to_who_needs_it():
    with WorkerPool(1, Job, start_method="forkserver", preload=("no_such_module",)) as pool:
        assert pool.call("identify") == pool.pids


def test_a_fork_that_fails_says_what_to_do_and_leaves_the_server(tmp_path, monkeypatch):
    (tmp_path / "forks_once.py").write_text(
        textwrap.dedent("""
        import errno, os

        fork, n = os.fork, 0

        def fork_once():
            global n
            n += 1
            if n == 2:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            return fork()

        os.fork = fork_once
    """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    with WorkerPool(1, Job, start_method="forkserver", preload=("forks_once",)) as first:
        with pytest.raises(WorkerCrashed, match=r"^worker 0 could not be started: BlockingIOError.*ulimit -u.*fewer"):
            WorkerPool(1, Job, start_method="forkserver", preload=("forks_once",))
        with WorkerPool(1, Job, start_method="forkserver", preload=("forks_once",)) as pool:
            assert first.call("identify") + pool.call("identify") == [*first.pids, *pool.pids]


def test_a_worker_without_another_thread_says_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "no_thread.py").write_text(
        textwrap.dedent("""
        import os, threading

        def refuse(*_, **__):
            raise RuntimeError("can't start new thread")

        os.register_at_fork(after_in_child=lambda: setattr(threading.Thread, "start", refuse))
    """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="can't start new thread") as caught:
        WorkerPool(1, Job, start_method="forkserver", preload=("no_thread",))
    assert "ulimit -u" in caught.value.__notes__[0]


def test_without_a_temporary_folder_the_next_step_is_named(tmp_path, subprocess_env):
    text = """
import tempfile
from rlstructs.workers import WorkerPool
class Job:
    def __init__(self, index):
        pass
tempfile._candidate_tempdir_list = lambda: [os.path.abspath("missing")]
try:
    WorkerPool(1, Job, start_method="forkserver")
except RuntimeError as error:
    print(error)
WorkerPool(1, Job, start_method="spawn").close()
print("fine")
"""
    done = run([program(tmp_path, text), "forkserver"], tmp_path, subprocess_env)
    said, fine = done.stdout.splitlines()
    assert "could not be started: FileNotFoundError" in said and "set TMPDIR to a folder that exists" in said
    assert fine == "fine"


def test_a_folder_of_the_socket_that_was_removed_is_made_again(tmp_path, subprocess_env):
    text = """
import shutil
from multiprocessing import process
from rlstructs.workers import WorkerPool
class Job:
    def __init__(self, index):
        pass
    def value(self):
        return 1
WorkerPool(1, Job, start_method="forkserver").close()
shutil.rmtree(process.current_process()._config["tempdir"])
with WorkerPool(1, Job, start_method="forkserver") as pool:
    print(pool.call("value"))
"""
    done = run([program(tmp_path, text), "forkserver"], tmp_path, subprocess_env)
    assert done.stdout.strip() == "[1]", done.stderr
