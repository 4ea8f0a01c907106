"""Starts workers, and the engine that runs rollouts in them."""

from __future__ import annotations

import contextlib
import itertools
from functools import partial
from typing import TypeVar

from rlstructs.batcher.arguments import RunSettings
from rlstructs.batcher.engine import Engine
from rlstructs.batcher.supervisor import Supervisor
from rlstructs.batcher.transport import Contents, SlotTransport
from rlstructs.errors import SpecError
from rlstructs.rollout.job import JobFactory
from rlstructs.rollout.job_specs import JobSettings
from rlstructs.seeding import PrivateStreams, seed_worker_streams
from rlstructs.shared import weights
from rlstructs.shared.layout import COUNT, FIRST_BEHIND, Layout
from rlstructs.shared.slots import SlotBuffers
from rlstructs.structures.arrays import specs_of
from rlstructs.trace.board import Board
from rlstructs.worker_setup import WorkerSetup
from rlstructs.workers import InlinePool, SharedArena, WorkerPool
from rlstructs.workers.pickling import explain_pickle_error
from rlstructs.workers.pool import Pool

E = TypeVar("E", bound=Engine)

# The modules that the fork server imports before it forks workers.
PRELOAD = ("torch", "gymnasium", "rlstructs.rollout.job", "rlstructs.envs.gym_env")


def start_engine(settings: JobSettings, run: RunSettings, debug: bool, make: type[E]) -> E:
    """Starts an engine whose workers are processes of this machine.

    With no processes, one job in this process.

    Args:
        settings: how jobs are built.
        run: how rollouts are run.
        debug: whether memory that was not written holds poison.
        make: the class of the engine.

    Raises:
        Exception: what the constructor of `RL_Batcher` raises.
    """
    board = Board.make(
        run.n_workers, n_timesteps=run.n_timesteps, run_ahead=run.run_ahead, is_inline=not run.n_processes
    )
    arenas = SharedArena(), SharedArena(), board.arena
    slots_arena, weights_arena, _ = arenas
    pool = start_pool(settings, run, arenas)
    try:
        supervisor = Supervisor(pool, run.on_worker_failure, run.max_restarts, run.run_ahead, board)
        contents = find_contents(supervisor, settings, run.n_timesteps)
        slot_buffers = SlotBuffers(contents.layout, run.run_ahead + 1, len(contents.blocks))
        slots_arena.resize(slot_buffers.reserved_nbytes, expected=slot_buffers.nbytes)
        transport = SlotTransport(contents, supervisor.records, slot_buffers, slots_arena.map(), debug)
        own = run.n_processes == 0
        for slots in transport.slots:
            slots.is_shared = own
        supervisor.attach(slot_buffers, transport.slots if own else None)
        board.write_facts(n_envs=contents.n_envs)
        outbox = weights.LocalOutbox() if own else weights.Outbox(weights_arena, run.run_ahead + 1, pool.settle)
        board.begin_account()
        return make(settings, supervisor, transport, outbox, *arenas)
    except BaseException:
        with contextlib.suppress(Exception):
            pool.close()
        raise


def find_contents(supervisor: Supervisor, settings: JobSettings, n_timesteps: int) -> Contents:
    """Asks workers what rollouts hold, and sets the supervisor's statistics.

    Raises:
        SpecError: workers differ.
    """
    found = supervisor.describe_jobs()
    n_envs, specs = found[0]
    assert specs is not None
    noun, sizes = supervisor.noun, supervisor.record_sizes
    for index, own in enumerate(found):
        if own.n_envs != n_envs:
            raise SpecError(f"create_env: {noun} {index} has {own.n_envs} environments, {noun} 0 has {n_envs}")
    for index, own in enumerate(found):
        if own.specs is not None:  # each node finds its own
            own.specs.check_like(specs, f"{noun} {index}")
    supervisor.set_statistics(specs.statistics)
    info = {f"agent_state/{key}": spec for key, spec in specs.state.items()}
    for name, example in (("agent_info", settings.agent_info), ("env_info", settings.env_info)):
        info.update({f"{name}/{key}": spec for key, spec in specs_of(example).items()})
    if specs.has_step_versions:
        info[FIRST_BEHIND] = COUNT
    ends = itertools.accumulate(size * n_envs for size in sizes)
    blocks = [range(end - size * n_envs, end) for size, end in zip(sizes, ends, strict=True)]
    n_elems = n_envs * sum(sizes)
    return Contents(Layout(n_elems, n_timesteps, specs.observation, specs.action, info), blocks, n_envs, specs.hint)


def start_pool(settings: JobSettings, run: RunSettings, shared: tuple[SharedArena, SharedArena, SharedArena]) -> Pool:
    """Starts workers and builds their jobs.

    With no processes, builds one job in this one.

    Raises:
        TypeError: an object of the user cannot be sent to a worker; the message names it.
        WorkerError: a worker could not start.
        Exception: what building a job raised.
    """
    try:
        if run.n_processes:
            return WorkerPool(
                run.n_processes,
                JobFactory(settings),
                shared=shared,
                start_method=run.start_method,
                timeout=run.timeout,
                preload=PRELOAD,
                setup=WorkerSetup(partial(seed_worker_streams, settings.seeds, settings.agent_seeds)),
                init_worker=run.init_worker,
                name="rlstructs-worker",
            )
        factory = JobFactory(settings.with_copied_arguments())
    except Exception as error:
        objects = {"init_worker": run.init_worker if run.n_processes else None} | settings.objects()
        if why := explain_pickle_error(objects):
            raise TypeError(why) from error
        raise
    # Nothing is pickled from here on: what the job raises says itself what is wrong.
    return InlinePool(factory, shared=shared, around=PrivateStreams(), init_worker=run.init_worker)
