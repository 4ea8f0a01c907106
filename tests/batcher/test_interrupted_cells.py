"""A notebook's cell that collects, interrupted by Ctrl-C and run again."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys

import pytest
from gymnasium.error import AlreadyPendingCallError
from helpers import Count, Counting, count_batcher, rollout
from processes import wait_until_gone, worker_pids
from test_interrupts import signalled

from rlstructs import GymEnvInf, RL_Batcher, SharedVectorEnv, StateError
from rlstructs.testing import check_env

pytestmark = pytest.mark.usefixtures("quick_programs")

ENDLESS = 10**6
KINDS = [(0, 0, "raise"), (1, 1, "raise"), (2, 0, "raise"), (2, 2, "restart"), (0, 1, "raise")]


def made(n_processes, run_ahead=0, policy="raise", **arguments):
    """A batcher of two environments a worker, in which nothing ends."""
    table = [[ENDLESS] * 2] * (n_processes or 1)
    policies = {"run_ahead": run_ahead, "on_worker_failure": policy}
    return count_batcher(table, 3, autoreset=True, n_processes=n_processes, **policies, **arguments)


def starts(trajectories):
    """Episode and step that each environment's rollout begins with."""
    return trajectories.trajectories["observation/frame"][:, 0].tolist()


@pytest.mark.parametrize(("n_processes", "run_ahead", "policy"), KINDS)
def test_a_reset_drops_the_rollouts_that_nobody_asked_for(n_processes, run_ahead, policy, start_method):
    n_envs = 2 * (n_processes or 1)
    with made(n_processes, run_ahead, policy, start_method=start_method) as batcher:
        batcher.reset()
        rollout(batcher)
        batcher.execute()
        batcher.reset()
        assert batcher.episodes().n_elems() == 0
        for first in (0, 3, 6):
            assert starts(rollout(batcher)[0]) == [[1, first]] * n_envs
        batcher.execute()
        batcher.update(1.0) if run_ahead else None
        batcher.reset()
        batcher.reset()
        batcher.update(2.0)
        trajectories, n_running = rollout(batcher)
        assert (starts(trajectories), n_running) == ([[3, 0]] * n_envs, n_envs)
        assert set(trajectories.trajectories["action/given"].flatten().tolist()) == {2.0}


@pytest.mark.parametrize("n_processes", [0, 2])
def test_what_a_reset_drops_has_been_run_whatever_was_asked_of_it(n_processes):
    def numbers(gets):
        with RL_Batcher(
            5, Counting, {}, lambda seed: GymEnvInf([Drawn() for _ in range(2)], seed), {}, n_processes, 0
        ) as batcher:
            batcher.reset()
            batcher.execute()
            batcher.get() if gets else None
            batcher.reset()
            return rollout(batcher)[0].trajectories["observation/frame"].tolist()

    assert numbers(gets=True) == numbers(gets=False)


class Drawn(Count):
    """Shows what the environment's own stream gives."""

    def __init__(self):
        super().__init__(ENDLESS)

    def reset(self, *, seed=None, options=None):
        super(Count, self).reset(seed=seed)
        return super().reset(seed=seed)

    def _observation(self):
        return self.np_random.random(2, "float32")


@pytest.mark.parametrize(("n_processes", "run_ahead", "policy"), [(0, 0, "raise"), (2, 0, "raise"), (2, 1, "restart")])
def test_a_reset_with_a_rollout_under_way_that_is_interrupted_anywhere_can_be_called_again(
    n_processes, run_ahead, policy
):
    with made(n_processes, run_ahead, policy) as batcher:
        batcher.reset()
        was_there, at = True, 1
        while was_there:
            batcher.execute()
            _, was_there = signalled(batcher.reset, at)
            batcher.reset()
            trajectories, n_running = rollout(batcher)
            assert n_running == 2 * (n_processes or 1)
            assert {step for _, step in starts(trajectories)} == {0}
            at += 7
        assert at > 100


@pytest.mark.parametrize(("n_processes", "run_ahead", "policy"), KINDS)
@pytest.mark.parametrize("call", ["execute", "update"])
@pytest.mark.slow
def test_execute_and_update_are_finished_before_an_interrupt_goes_through(n_processes, run_ahead, policy, call):
    n_envs, step, n_done = 2 * (n_processes or 1), 3 * run_ahead, 0
    with made(n_processes, run_ahead, policy) as batcher:
        batcher.reset()
        was_there = True
        for at in itertools.count(1, 2):
            if not was_there:
                break
            version, number = batcher.policy_version, float(at)
            if call == "update":
                _, was_there = signalled(lambda number=number: batcher.update(number), at)
                if batcher.policy_version == version:
                    batcher.update(number)
                else:
                    n_done += 1
                assert batcher.policy_version == version + 1
                rollouts = [rollout(batcher) for _ in range(run_ahead + 1)]
                trajectories, _ = rollouts[-1]
                assert set(trajectories.trajectories["action/given"].flatten().tolist()) == {number}
                assert set(trajectories.info["policy_version"].tolist()) == {version + 1}
            else:
                _, was_there = signalled(batcher.execute, at)
                try:
                    trajectories, _ = batcher.get()
                    n_done += 1
                except StateError as error:
                    assert str(error) == "get: no rollout is under way, call execute first"
                    trajectories, _ = rollout(batcher)
                assert starts(trajectories) == [[0, step - 3 * run_ahead]] * n_envs
                step += 3
        assert n_done > 10


@pytest.mark.parametrize("n_processes", [0, 2])
@pytest.mark.slow
def test_an_evaluation_that_is_interrupted_anywhere_can_be_made_again_and_leaves_the_training(n_processes):
    table = [[4, 7]] * (n_processes or 1)
    seeds = [100 * worker for worker in range(n_processes or 1)]
    with count_batcher(table, 3, autoreset=True, n_processes=n_processes) as batcher:
        batcher.reset()
        expected, step, was_there, at = batcher.evaluate(4, seeds), 0, True, 1
        while was_there:
            _, was_there = signalled(lambda: batcher.evaluate(4, seeds), at)
            frames = rollout(batcher)[0].trajectories["observation/frame"]
            assert frames[0, 0].tolist() == [step // 4, step % 4]
            assert batcher.evaluate(4, seeds) == expected
            step, at = step + 3, at + 29
        assert at > 300


class TwiceInterrupted(Count):
    """Interrupts its process twice in one step, once in its life."""

    def step(self, action):
        found = super().step(action)
        if self.steps == 2 and self.episode == 0:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("this is never reached")
        return found


def test_a_second_interrupt_goes_through_at_once_and_a_reset_starts_anew():
    with RL_Batcher(5, Counting, {}, lambda seed: GymEnvInf([TwiceInterrupted(9)], seed), {}, 0, [0]) as batcher:
        batcher.reset()
        with pytest.raises(KeyboardInterrupt):
            batcher.execute()
        for call in (batcher.get, batcher.execute, lambda: batcher.evaluate(1, 0)):
            with pytest.raises(StateError, match=": a reset or a rollout was interrupted, call reset first$"):
                call()
        batcher.update(3.0)
        batcher.reset()
        trajectories, _ = rollout(batcher)
        assert starts(trajectories) == [[1, 0]] and trajectories.lengths.tolist() == [5]
    with SharedVectorEnv([lambda: TwiceInterrupted(9)], 0) as envs:
        envs.reset()
        envs.step([0])
        with pytest.raises(KeyboardInterrupt):
            envs.step([0])
        with pytest.raises(AlreadyPendingCallError.__mro__[1], match="call reset first"):
            envs.step([0])
        assert envs.reset()[0].tolist() == [[1, 0]] and envs.step([0])[0].tolist() == [[1, 1]]


def test_a_first_reset_that_is_interrupted_is_seeded_when_it_is_called_again():
    def first_frames(*interrupts):
        env = GymEnvInf([Drawn(), OnceInterrupted(*interrupts), Drawn()], 7)
        for _ in interrupts:
            with pytest.raises(KeyboardInterrupt):
                env.reset()
        return env.reset()[0]["frame"].tolist()

    assert first_frames() == first_frames("one")


class OnceInterrupted(Drawn):
    """Interrupts its first reset."""

    def __init__(self, *interrupts):
        super().__init__()
        self._interrupts = list(interrupts)

    def reset(self, **arguments):
        found = super().reset(**arguments)
        if self._interrupts and self._interrupts.pop():
            signal.raise_signal(signal.SIGINT)
        return found


# --- what a cell leaves --------------------------------------------------------------------------


def shown(error):
    """Keeps an exception as a notebook does that has shown it."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__


@pytest.fixture
def no_last_error():
    yield
    for name in ("last_type", "last_value", "last_traceback"):
        if hasattr(sys, name):
            delattr(sys, name)


def interrupted_in(cell):
    """Runs it, to where it interrupts itself."""
    try:
        cell()
    except KeyboardInterrupt as error:
        shown(error)
        return
    raise AssertionError("not interrupted")


@pytest.mark.parametrize("kind", ["batcher", "environments"])
def test_workers_of_what_a_cell_has_made_end_when_the_cell_makes_it_anew(kind, no_last_error):
    """Nothing else refers to it than the traceback of the interrupt, which is kept."""

    def make():
        return made(2) if kind == "batcher" else SharedVectorEnv([lambda: Count(9)] * 2, 2)

    def cell(is_interrupted=True):
        envs = make()
        envs.reset()
        first.extend(worker_pids() - set(first))
        if is_interrupted:
            signal.raise_signal(signal.SIGINT)
        return envs

    gc.collect()
    first = list(worker_pids())
    n_before = len(first)
    gc.disable()
    try:
        interrupted_in(cell)
        mine = first[n_before:]
        assert len(mine) == 2
        made_anew = cell(is_interrupted=False)
        wait_until_gone(mine)
        assert len(first) == n_before + 4
        made_anew.close()
    finally:
        gc.enable()


def test_a_lease_that_only_the_traceback_of_an_interrupt_holds_is_dropped(no_last_error):
    def look():
        lease = batcher.lease()
        assert lease.trajectories
        signal.raise_signal(signal.SIGINT)

    def look_in_a_block():
        try:
            with batcher.lease() as (trajectories, _):
                assert len(starts(trajectories)) == 2
        except KeyboardInterrupt as error:
            shown(error)

    with made(1) as batcher:
        for again in ("reset", "execute"):
            batcher.reset()
            batcher.execute()
            interrupted_in(look)
            getattr(batcher, again)()
        was_there, at = True, 1
        while was_there:
            batcher.reset()
            batcher.execute()
            _, was_there = signalled(look_in_a_block, at)
            at += 1
        batcher.execute()
        kept = batcher.lease()
        with pytest.raises(StateError, match="^reset: a rollout is leased, release it first$"):
            batcher.reset()  # somebody may still look at it
        kept.release()
        batcher.reset()


@pytest.mark.parametrize("at", range(1, 400, 23))
@pytest.mark.slow
def test_a_constructor_that_is_interrupted_anywhere_leaves_no_worker(at, no_last_error):
    gc.collect()
    before = worker_pids()
    try:
        found, _ = signalled(lambda: made(1), at)
        if found is not None:
            found.close()
    finally:
        assert worker_pids() <= before


# --- vector environments ---------------------------------------------------------------------------


@pytest.mark.parametrize("n_workers", [0, 2])
@pytest.mark.parametrize("asked", ["reset_async", "step_async", "call_async", "send", "send some"])
def test_reset_drops_what_environments_were_asked_for(n_workers, asked):
    with SharedVectorEnv([lambda: Count(9)] * 3, n_workers) as envs:
        envs.reset()
        arguments = {"step_async": [[0, 0, 0]], "call_async": ["render"], "send": [[0, 0, 0]],
                     "send some": [[0, 0], [0, 2]]}.get(asked, [])  # fmt: skip
        getattr(envs, asked.split()[0])(*arguments)
        with pytest.raises(AlreadyPendingCallError):  # as gymnasium's
            envs.reset_async()
        with pytest.raises(TypeError, match="^reset: seed must be an int"):
            envs.reset(seed="x")
        n_resets = 2 if asked == "reset_async" else 1
        assert envs.reset(seed=0)[0].tolist() == [[n_resets, 0]] * 3
        assert envs.step([0, 0, 0])[0].tolist() == [[n_resets, 1]] * 3
        envs.send([0, 0, 0])
        assert len(envs.recv(1)[0]) == 1
        assert envs.reset()[0].tolist() == [[n_resets + 1, 0]] * 3
        envs.send([0, 0, 0])
        assert envs.recv()[0].tolist() == [[n_resets + 1, 1]] * 3


@pytest.mark.parametrize(("n_workers", "call"), [(0, "step"), (2, "step"), (2, "send")])
@pytest.mark.slow
def test_a_cell_of_vector_environments_that_is_interrupted_anywhere_can_be_run_again(n_workers, call):
    def cell():
        envs.reset()
        for _ in range(2):
            if call == "step":
                envs.step([0, 0])
            else:
                envs.send([0, 0])
                envs.recv(1)
                envs.recv()

    with SharedVectorEnv([lambda: Count(9)] * 2, n_workers) as envs:
        was_there, at = True, 1
        while was_there:
            _, was_there = signalled(cell, at)
            cell()
            assert {int(frame[1]) for frame in envs.step([0, 0])[0]} == {3}
            at += 3
        assert at > 100


def test_an_environment_that_was_interrupted_still_keeps_the_contract():
    env = GymEnvInf([Count(5), Count(3)], 0)
    signalled(env.reset, 10)
    check_env(env)


# --- a program -------------------------------------------------------------------------------------

PROGRAM = """
import collections, os, random, signal, sys, threading
from test_interrupted_cells import made, shown, starts

cell = compile('''
batcher.reset()
for number in range(8):
    batcher.execute()
    trajectories, n_running = batcher.get()
    assert starts(trajectories) == [[starts(trajectories)[0][0], 3 * number]] * n_running
    batcher.update(float(number))
''', "cell", "exec")
chance, failures = random.Random(0), collections.Counter()
for kind in [(2, 0, "raise"), (2, 1, "restart"), (0, 0, "raise")]:
    batcher = made(*kind)
    for loop in range(N_LOOPS):
        timer = threading.Timer(chance.random() * 0.05, os.kill, (os.getpid(), signal.SIGINT))
        for is_again in (False, True):
            try:
                None if is_again else timer.start()
                exec(cell)
                None if is_again else timer.join()
            except KeyboardInterrupt as error:
                failures["interrupted"] += is_again
                shown(error)
            except Exception as error:
                failures[f"{kind}: {error!r}"] += 1
    batcher.close()
print(dict(failures))
"""


def test_cells_that_a_signal_interrupts_at_any_time_can_be_run_again(subprocess_env):
    program = PROGRAM.replace("N_LOOPS", os.environ.get("RLSTRUCTS_INTERRUPTS", "15"))
    done = subprocess.run([sys.executable, "-c", program], env=subprocess_env, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("{'interrupted': 0}\n", ""), done.stderr
