"""`Delivery`: hands out each rollout once, copied or leased."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from rlstructs.batcher import arguments as out_argument
from rlstructs.batcher.engine import Engine
from rlstructs.batcher.equal_actions import EqualActions
from rlstructs.batcher.lease import BaseLease
from rlstructs.batcher.lifecycle import Lifecycle, Phase
from rlstructs.batcher.transport import ROW_INFO, Batch
from rlstructs.errors import StateError
from rlstructs.shared.reading import specs_of_steps
from rlstructs.structures.trajectories import Trajectories
from rlstructs.workers.interrupts import defer_interrupt, forget_last_interrupt

L = TypeVar("L", bound=BaseLease)
GiveBack = Callable[[], None]


class Delivery:
    """Hands rollouts out, by `RL_Batcher.get` and `lease`.

    Args:
        engine: runs the rollouts.
        life: the lifecycle of the batcher.
        device: the device that trajectories are copied to.
    """

    def __init__(self, engine: Engine, life: Lifecycle, device: torch.device) -> None:
        self._engine, self._life, self._device = engine, life, device
        self._equal_actions = EqualActions(engine.n_envs, engine.n_elems // engine.n_envs)
        # What an interrupted `get` was about to return; the next one returns it.
        self._kept: tuple[Trajectories, int] | None = None
        self._out: Trajectories | None = None  # the `out` that it lies in
        # The lease that is not released, its batch, and how many environments run.
        self._leased: tuple[weakref.ref[Any], Batch, int] | None = None

    def get(
        self, blocking: bool, out: Trajectories | None, at_least: int | None, preempt: float | None
    ) -> tuple[Trajectories, int] | tuple[None, None]:
        """Copies the oldest rollouts; the arguments are those of `RL_Batcher.get`."""
        self._life.check("get", Phase.RUNNING)
        if self._kept is not None:
            return self._finish(self._move_kept(*self._kept, out), self._kept[1])
        engine, cuts = self._engine, preempt is not None
        n = engine.count_awaited(at_least, preempt)
        if out is not None:
            self._check_out(out, engine.transport.max_rows())
        with self._life.note_failures():
            if not blocking and not engine.is_ready(n, cuts):
                return None, None
            orders, batch = engine.collect(n, cuts)
            trajectories = batch.read(out)
        self._check_actions(trajectories)
        with defer_interrupt():  # or the next `get` would hand out the same rollout
            n_running = engine.end_rollouts(orders, batch, trajectories)
            batch.release()
            self._kept, self._out = (trajectories, n_running), out
        return self._finish(trajectories, n_running)

    def _move_kept(self, trajectories: Trajectories, n_running: int, out: Trajectories | None) -> Trajectories:
        """Copies what an interrupted `get` was about to return to where the next one wants it."""
        if out is self._out:
            return trajectories
        if out is None:
            trajectories = trajectories.clone()
        else:
            self._check_out(out, trajectories.n_elems())
            trajectories = out_argument.copy(trajectories, out)
        with defer_interrupt():
            self._kept, self._out = (trajectories, n_running), out
        return trajectories

    def wait(self, blocking: bool, at_least: int | None, preempt: float | None) -> tuple[int, int] | tuple[None, None]:
        """Ends the oldest rollouts without reading their rows; the arguments are those of `RL_Batcher.wait`."""
        self._life.check("wait", Phase.RUNNING)
        if self._kept is not None:  # of an interrupted `get`
            trajectories, n_running = self._finish(*self._kept)
            return int(trajectories.lengths.sum()), n_running
        engine, cuts = self._engine, preempt is not None
        n = engine.count_awaited(at_least, preempt)
        with self._life.note_failures():
            if not blocking and not engine.is_ready(n, cuts):
                return None, None
            orders, batch = engine.collect(n, cuts)
            trajectories = batch.lend_episodes()
        self._check_actions(None if self._equal_actions.is_over else batch.lend())
        with defer_interrupt():
            n_running = engine.end_rollouts(orders, batch, trajectories)
            batch.release()
            self._set_phase_after(n_running)
        return int(trajectories.lengths.sum()), n_running

    def _check_actions(self, trajectories: Trajectories | None) -> None:
        """Warns, of the first rollouts, if workers draw equal actions."""
        if trajectories is not None and not self._equal_actions.is_over:
            self._equal_actions.add(trajectories)

    def _check_out(self, out: Trajectories, n_rows: int) -> None:
        """Raises unless a rollout of so many rows fits into `out`."""
        layout = self._engine.transport.layout
        steps = specs_of_steps(layout.observation, layout.action)
        out_argument.check(out, {**layout.info, **ROW_INFO}, steps, (n_rows, layout.n_timesteps))

    def _finish(self, trajectories: Trajectories, n_running: int) -> tuple[Trajectories, int]:
        """Moves the trajectories to the device, and ends the phase of this rollout."""
        found, out = trajectories if self._device.type == "cpu" else trajectories.to(self._device), self._out
        try:
            with defer_interrupt():
                self._kept = self._out = None
                self._set_phase_after(n_running)
        except BaseException as error:
            if not isinstance(error, Exception):  # an interrupt that was put off: the caller has not got them
                self._kept, self._out, self._life.phase = (trajectories, n_running), out, Phase.RUNNING
            raise
        return found, n_running

    def _set_phase_after(self, n_running: int) -> None:
        self._life.phase = Phase.READY if n_running else Phase.ENDED

    def lease(self, make: Callable[[Batch, Trajectories, int, GiveBack], L]) -> L:
        """Lends the oldest rollouts.

        Args:
            make: makes the lease from a batch, its trajectories, the number of environments that still run, and the
                function that gives the batch back.
        """
        self._life.check("lease", Phase.RUNNING)
        self.check_handed_out("lease")
        with self._life.note_failures():
            orders, batch = self._engine.collect()
            trajectories = batch.lend()
        self._check_actions(trajectories)
        with defer_interrupt():  # until the lease can be released, by its holder or by `drop_lease`
            n_running = self._engine.end_rollouts(orders, batch, trajectories)
            lease = make(batch, trajectories, n_running, lambda: self._take_back(batch, n_running))
            self._leased, self._life.phase = (weakref.ref(lease), batch, n_running), Phase.LEASED
        return lease

    def drop_lease(self) -> None:
        """Ends a lease that no longer exists, and that nobody can release any more."""
        if self._life.phase is Phase.LEASED and self._life.is_ours and self._leased is not None:
            forget_last_interrupt()  # its traceback may hold the lease
            if self._leased is not None and self._leased[0]() is None:
                self._take_back(*self._leased[1:])

    def _take_back(self, batch: Batch, n_running: int) -> None:
        """Ends a lease, unless the batcher was closed, or has failed, meanwhile."""
        if self._life.is_ours and self._life.phase is Phase.LEASED:
            batch.release()
            self._leased = None
            self._set_phase_after(n_running)

    def check_handed_out(self, call: str) -> None:
        """Raises StateError if an interrupted `get` has left a rollout to the next one."""
        if self._kept is not None:
            raise StateError(f"{call}: an interrupted get has copied the rollout: get it")

    def find_phase(self) -> Phase:
        """The phase after the release of what is leased; otherwise the present one."""
        if self._life.phase is not Phase.LEASED or self._leased is None:
            return self._life.phase
        return Phase.READY if self._leased[2] else Phase.ENDED

    def forget(self) -> None:
        """Drops what an interrupted `get` was about to return."""
        self._kept = self._out = None

    def close(self) -> None:
        """Drops what is leased."""
        self._leased = None
