"""Starts the workers of a batcher."""

from __future__ import annotations

from functools import partial

from rlstructs.batcher.arguments import RunSettings
from rlstructs.rollout.job import JobFactory
from rlstructs.rollout.job_settings import JobSettings
from rlstructs.seeding import PrivateStreams, seed_worker_streams
from rlstructs.worker_setup.setup import WorkerSetup
from rlstructs.workers import InlinePool, SharedArena, WorkerPool
from rlstructs.workers.pickle_errors import explain_pickle_error
from rlstructs.workers.pool_protocol import Pool

# The modules that the fork server imports before it forks workers.
PRELOAD = ("torch", "gymnasium", "rlstructs.rollout.job", "rlstructs.envs.gym_env")


def start_pool(settings: JobSettings, run: RunSettings, shared: tuple[SharedArena, SharedArena]) -> Pool:
    """Starts workers and builds their jobs; with no processes, builds one job in this one.

    Raises:
        TypeError: an object of the user cannot be sent to a worker; the message names it.
        WorkerError: a worker could not start.
        Exception: what building a job raised.
    """
    try:
        if run.n_processes == 0:
            factory = JobFactory(settings.with_copied_arguments())
            return InlinePool(factory, shared=shared, around=PrivateStreams(), init_worker=run.init_worker)
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
    except Exception as error:
        objects = {"init_worker": run.init_worker if run.n_processes else None} | settings.objects()
        if why := explain_pickle_error(objects):
            raise TypeError(why) from error
        raise
