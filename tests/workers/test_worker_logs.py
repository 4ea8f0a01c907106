"""Log records of workers, in the handlers of the trainer."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import warnings

import numpy as np
import pytest
from gymnasium import spaces
from helpers import Count

from rlstructs import GymEnv, RandomAgent, RL_Batcher, SharedVectorEnv, WorkerCrashed, WorkerTimeout
from rlstructs.workers import WorkerPool
from rlstructs.workers.start import START_METHODS


class Logs(Count):
    """Logs at each step."""

    def __init__(self):
        super().__init__(3)

    def step(self, action):
        logging.getLogger("of.an.environment").warning("step %d of %r", self.steps, self, extra={"lock": LOCK})
        logging.getLogger("of.an.environment").debug("not to be seen")
        return super().step(action)


LOCK = threading.Lock()


def make_batcher(start_method):
    create_agent = lambda: RandomAgent(spaces.Discrete(2))  # noqa: E731
    return RL_Batcher(1, create_agent, {}, lambda seed: GymEnv([Logs()], seed), {}, 2, 0, start_method=start_method)


def make_vector(start_method):
    return SharedVectorEnv([Logs] * 2, 2, start_method=start_method)


def step(made):
    made.reset()
    if isinstance(made, RL_Batcher):
        made.execute()
        made.get()
    else:
        made.step(np.array([0, 0]))


@pytest.mark.parametrize("make", [make_batcher, make_vector])
def test_records_of_workers_reach_the_trainers_handlers(make, start_method, caplog):
    with caplog.at_level(logging.INFO), make(start_method) as made:
        step(made)
        found = [record for record in caplog.records if record.name == "of.an.environment"]
        assert len(found) == 2
        pids = made._host.pids if make is make_vector else made._engine.pool.pids
        assert {record.process for record in found} == set(pids)
    assert {record.processName.rpartition("-")[2] for record in found} == {"0", "1"}
    for record in found:
        assert record.getMessage().startswith("step 0 of <") and record.levelno == logging.WARNING
        assert record.args is None and record.funcName == "step" and "lock" in record.lock


class Job:
    """Logs what it is told."""

    def __init__(self, index):
        self.index = index

    def log(self, n, size=10):
        for k in range(n):
            logging.getLogger("job").warning("%d %s", k, "x" * size)

    def fail(self):
        try:
            raise ZeroDivisionError("at work")
        except ZeroDivisionError:
            logging.getLogger("job").exception("it failed")

    def wrong(self):
        logging.getLogger("job").warning("%d", "no number")

    def die(self, signum):
        logging.getLogger("job").error("last words")
        os.kill(os.getpid(), signum) if signum else os._exit(3)

    def hang(self):
        logging.getLogger("job").error("last words")
        while True:
            signal.pause()

    def fork(self):
        pid = os.fork()
        if not pid:
            logging.getLogger("job").warning("of a child %s", "x" * 9000)
            os._exit(0)
        os.waitpid(pid, 0)

    def warn(self):
        warnings.warn("look out", stacklevel=1)

    def close(self):
        logging.getLogger("job").warning("closed")


def messages_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "job"]


@pytest.mark.parametrize("signum", [0, signal.SIGKILL, signal.SIGSEGV])
def test_what_was_logged_before_a_crash_is_seen(signum, start_method, caplog):
    with WorkerPool(1, Job, start_method=start_method) as pool:
        with pytest.raises(WorkerCrashed):
            pool.call("die", signum)
        assert messages_of(caplog) == ["last words"]


def test_what_was_logged_before_a_hang_is_seen_while_it_is_waited_for(start_method, caplog):
    with WorkerPool(1, Job, start_method=start_method) as pool:
        futures = pool.ask("hang")
        for _ in range(600):  # a minute, on a busy machine
            pool.settle(futures, timeout=0.1)
            if messages_of(caplog):
                break
        with pytest.raises(WorkerTimeout):
            pool.gather(futures, 0.0)
        assert messages_of(caplog) == ["last words"]


def test_a_worker_never_waits_for_a_trainer_that_does_not_read(start_method, caplog):
    with WorkerPool(2, Job, start_method=start_method) as pool:
        asked = pool.ask("log", 10000, 1000)
        pool.settle(asked)
        assert all(each.error is None for each in asked)
        pool.call("log", 1)
    lost = [record.getMessage() for record in caplog.records if record.name == "rlstructs.workers"]
    found = messages_of(caplog)
    n_lost = sum(int(text.split()[0]) for text in lost)
    assert all(text.endswith("log records were dropped: they came faster than they were read") for text in lost)
    assert len(found) + n_lost == 20000 + 2 + 2


def test_records_come_with_their_tracebacks_and_in_order(start_method, caplog):
    with WorkerPool(1, Job, start_method=start_method) as pool:
        pool.call("fail")
        pool.call("log", 3)
        pool.call("wrong")  # says so on stderr, and nothing fails
        pool.call("log", 1, 100_000)
        pool.call("fork")
    assert "ZeroDivisionError: at work" in caplog.records[0].exc_text and caplog.records[0].exc_info is None
    found = messages_of(caplog)
    assert found[:4] == ["it failed", *(f"{k} {'x' * 10}" for k in range(3))]
    # What one process writes is in order; the child may be through before the rest of the longest is there.
    assert sorted(found[4:]) == ["0 " + "x" * 100_000, "closed", "of a child " + "x" * 9000]


def test_warnings_that_are_captured_are_records(start_method, caplog):
    logging.captureWarnings(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            with WorkerPool(1, Job, start_method=start_method) as pool:
                pool.call("warn")
    finally:
        logging.captureWarnings(False)
    found = [record for record in caplog.records if "UserWarning: look out" in record.getMessage()]
    assert [record.name for record in found] == ["py.warnings"]


def test_a_handler_that_raises_harms_no_batcher(caplog, capsys):
    class Raises(logging.Filter):
        def filter(self, record):
            raise ZeroDivisionError("of a filter")

    refuses = Raises()
    logging.getLogger("job").addFilter(refuses)
    try:
        with WorkerPool(1, Job) as pool:
            assert pool.call("log", 1) == [None]
    finally:
        logging.getLogger("job").removeFilter(refuses)
    assert "ZeroDivisionError: of a filter" in capsys.readouterr().err


PROGRAM = """
    import logging, sys
    from rlstructs.workers import WorkerPool
    from test_worker_logs import Job

    logging.basicConfig(format="trainer: %(name)s %(message)s", level="INFO", stream=sys.stdout)
    alone = logging.getLogger("alone")
    alone.propagate = False
    alone.addHandler(logging.FileHandler(sys.argv[2] + "/alone"))
    logging.getLogger("quiet").setLevel("ERROR")

    class Speaks:
        def __init__(self, index):
            logging.info("of the root")
            alone.info("of its own")
            logging.getLogger("quiet").warning("never")

    def init_worker(index):
        handler = logging.FileHandler(f"{sys.argv[2]}/{index}")
        logging.getLogger().addHandler(handler)
        logging.info("of init_worker")

    WorkerPool(2, Speaks, start_method=sys.argv[1], init_worker=init_worker).close()
"""


@pytest.mark.usefixtures("quick_programs")
@pytest.mark.parametrize("method", START_METHODS)
def test_each_record_is_handled_once_and_by_handlers_of_init_worker_too(method, subprocess_env, tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), method, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=subprocess_env)
    assert done.returncode == 0 and not done.stderr, done.stderr
    said = ["trainer: root of init_worker"] * 2 + ["trainer: root of the root"] * 2
    assert sorted(done.stdout.splitlines()) == said
    assert (tmp_path / "alone").read_text().splitlines() == ["of its own"] * 2
    for index in range(2):  # no more and no less than what this worker logged and the root handles
        assert (tmp_path / str(index)).read_text().splitlines() == ["of init_worker", "of the root"]
