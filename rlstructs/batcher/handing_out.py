"""`HandOut`: gives each rollout to the caller once, copied or lent."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from rlstructs.batcher import out_argument
from rlstructs.batcher.batch import ROW_INFO, Batch
from rlstructs.batcher.engine import Engine
from rlstructs.batcher.lease import Borrowed
from rlstructs.batcher.lifecycle import Lifecycle, Phase
from rlstructs.errors import StateError
from rlstructs.shared.reading import specs_of_steps
from rlstructs.structures.trajectories import Trajectories
from workers.interrupts import defer_interrupt, forget_last_interrupt

L = TypeVar("L", bound=Borrowed)
GiveBack = Callable[[], None]


class HandOut:
    """What `RL_Batcher.get` and `lease` do.

    Args:
        engine: runs the rollouts.
        life: of the batcher.
        device: where trajectories are wanted.
    """

    def __init__(self, engine: Engine, life: Lifecycle, device: torch.device) -> None:
        self._engine, self._life, self._device = engine, life, device
        # What a `get` was about to return when it was interrupted; the next one does.
        self._kept: tuple[Trajectories, int] | None = None
        # A lease that is not released, the batch it is of, and how many environments run.
        self._lent: tuple[weakref.ref[Any], Batch, int] | None = None

    def get(
        self, blocking: bool, out: Trajectories | None, at_least: int | None, preempt: float | None
    ) -> tuple[Trajectories, int] | tuple[None, None]:
        """Copies the oldest rollouts; the arguments are those of `RL_Batcher.get`."""
        self._life.check("get", Phase.RUNNING)
        if self._kept is not None:
            return self._finish(*self._kept)
        engine, cuts = self._engine, preempt is not None
        n = engine.n_awaited(at_least, preempt)
        if out is not None:
            layout = engine.transport.layout
            steps = specs_of_steps(layout.observation, layout.action)
            size = engine.transport.n_rows_at_most(), layout.n_timesteps
            out_argument.check(out, {**layout.info, **ROW_INFO}, steps, size)
        with self._life.failing():
            if not blocking and not engine.is_ready(n, cuts):
                return None, None
            orders = engine.collect(n, cuts)
            batch = engine.batch(orders)
            trajectories = batch.read(out)
        with defer_interrupt():  # or a second `get` would hand out what is over
            n_running = engine.end(orders, trajectories)
            batch.release()
            self._kept = trajectories, n_running
        return self._finish(trajectories, n_running)

    def _finish(self, trajectories: Trajectories, n_running: int) -> tuple[Trajectories, int]:
        """Moves them to the device, and lets the next rollout be asked for."""
        found = trajectories if self._device.type == "cpu" else trajectories.to(self._device)
        try:
            with defer_interrupt():
                self._kept, self._life.phase = None, Phase.READY if n_running else Phase.ENDED
        except BaseException as error:
            if not isinstance(error, Exception):  # an interrupt that was put off: nobody has them yet
                self._kept, self._life.phase = (trajectories, n_running), Phase.RUNNING
            raise
        return found, n_running

    def lease(self, make: Callable[[Batch, Trajectories, int, GiveBack], L]) -> L:
        """Lends the oldest rollouts.

        Args:
            make: makes the lease of a batch, its trajectories, the number of environments that still run, and what
                gives the batch back.
        """
        self._life.check("lease", Phase.RUNNING)
        if self._kept is not None:
            raise StateError("lease: an interrupted get has copied the rollout: get it")
        with self._life.failing():
            orders = self._engine.collect()
            batch = self._engine.batch(orders)
            trajectories = batch.lend()
        with defer_interrupt():  # until there is somebody who gives the lease back, or lets go of it
            n_running = self._engine.end(orders, trajectories)
            lease = make(batch, trajectories, n_running, lambda: self._take_back(batch, n_running))
            self._lent, self._life.phase = (weakref.ref(lease), batch, n_running), Phase.LEASED
        return lease

    def drop_lease(self) -> None:
        """Takes back what is leased, if nobody has the lease any more, who could release it."""
        if self._life.phase is Phase.LEASED and self._life.is_ours and self._lent is not None:
            forget_last_interrupt()  # its traceback may hold the lease
            if self._lent is not None and self._lent[0]() is None:
                self._take_back(*self._lent[1:])

    def _take_back(self, batch: Batch, n_running: int) -> None:
        """Ends a lease."""
        if self._life.is_ours and self._life.phase is Phase.LEASED:  # and not closed, or failed, meanwhile
            batch.release()
            self._lent, self._life.phase = None, Phase.READY if n_running else Phase.ENDED

    def forget(self) -> None:
        """Drops what an interrupted `get` was about to return."""
        self._kept = None

    def close(self) -> None:
        """Lets go of what is leased."""
        self._lent = None
