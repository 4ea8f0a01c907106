"""`Checkpoint`: a training in a folder, from which it goes on.

`Preemption` handles the signals by which a cluster asks a program to stop, before it takes the machine away.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlstructs.checkpoints.folder import CheckpointFolder, read_identity, read_manifest, step_of, write_manifest
from rlstructs.checks import check_count, check_timeout
from rlstructs.errors import FileError, SpecError, StateError
from rlstructs.workers.public_names import set_module

if TYPE_CHECKING:
    from rlstructs.checkpoints.parts import Part, Restore


logger = logging.getLogger("rlstructs")


@set_module("rlstructs")
class Checkpoint:
    """Saves a training to a folder and restores it after an interruption.

    A run that was killed continues as if it had not been.

    Each checkpoint is a folder of its own in the folder. It is complete before it counts, so whenever the program is
    killed, the last one remains. Of a large memory only the rows that were written since the last checkpoint are
    written again. Reading one executes nothing from it, but for the exact state of a batcher, in which agents and some
    environments are pickled: restore a checkpoint only from someone whom you trust.

    Args:
        folder: where checkpoints are; it is made with the first one. None, or "", saves and restores nothing.
        batcher: an `RL_Batcher` or `RayBatcher`; its state is an exact one.
        memory: a memory of `rlstructs.memories`, a buffer of `rlstructs.replay`, or a `RayReplay`.
        model: a network, or anything else with `state_dict` and `load_state_dict`.
        optimizer: the same, for optimizers, schedulers or a gradient scaler.
        rng: whether the states of the global random generators of torch, numpy and Python belong to it.
        extra: what else the training has to remember: a dict, whose values are saved as they are then, and put back
            into this same dict, and into the tensors, arrays and collections in it that have the same kind and shape;
            or an object with `state_dict` and `load_state_dict`. Values of a dict are such objects, tensors, arrays,
            numbers, texts, or dicts, lists, tuples, sets and deques of these. A key of `jax.random` belongs here, and
            the state of a generator of your own.
        keep: how many checkpoints remain, the newest ones.
        exact: True, "best" or False; see `RL_Batcher.state_dict`.

    `batcher`, `memory`, `model` and `optimizer` are each one object, or a dict of several by name.

    Raises:
        FileError: the folder is one of another program.
        TypeError, SpecError: an argument has a wrong type or value.

    Example:
        progress = {"n_steps": 0}
        checkpoint = Checkpoint("runs/1", batcher=batcher, model=network, optimizer=optimizer, extra=progress)
        if checkpoint.restore() is None:
            batcher.reset()
        with checkpoint.preemption():
            while progress["n_steps"] < 1_000_000:
                batcher.execute()
                trajectories, _ = batcher.get()
                progress["n_steps"] += learn(network, optimizer, trajectories)
                checkpoint.save_if_due(progress["n_steps"], every=60)
        checkpoint.save(progress["n_steps"])  # of a run shorter than `every`, the first
    """

    def __init__(
        self,
        folder: str | Path | None,
        *,
        batcher: Any = None,
        memory: Any = None,
        model: Any = None,
        optimizer: Any = None,
        rng: bool = True,
        extra: Any = None,
        keep: int = 2,
        exact: bool | str = True,
    ) -> None:
        self._keep = check_count("keep", keep)
        if exact not in (True, False, "best"):
            raise SpecError(f"exact must be True, False or 'best', got {exact!r}")
        given = {"model": model, "optimizer": optimizer, "memory": memory, "batcher": batcher}
        self._parts = _make_parts(given, extra, rng, exact)
        self._folder = CheckpointFolder(Path(folder).absolute()) if folder else None
        # What was saved or restored last, and what is being published, each with its identity.
        self._newest: tuple[Path, bytes] | None = None
        self._pending: tuple[Path, bytes] | None = None
        self._last_time = time.monotonic()
        self._preemption = Preemption()

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints in the folder, the newest last."""
        return [] if self._folder is None else [step_of(each) for each in self._folder.find_all()]

    def save(self, step: int) -> None:
        """Saves the training between two rollouts.

        It cannot be called between `execute` and `get`, nor while a rollout is leased.

        A rollout that workers collect ahead is waited for, and belongs to the checkpoint. What an interrupted save has
        left is deleted first, and afterwards all checkpoints but the newest `keep`.

        Args:
            step: what `restore` is to return, at least that of the last checkpoint; one of the same step is replaced.

        Raises:
            StateError: another program saves to this folder; the folder has checkpoints of an earlier run, and
                `restore` was not called; or a rollout is under way or leased.
            SpecError: a part holds what a checkpoint cannot hold; the message names it.
            OSError: the folder cannot be written to, the disk is full, or an old checkpoint cannot be deleted. Whole
                checkpoints remain, the new one too if it counts already, and the next save goes on from there.
        """
        step = check_count("step", step, 0)
        if self._folder is None:
            return
        is_new = self._folder.lock()
        try:
            before = self._find_before(self._folder, step)
        except BaseException:
            if is_new:
                self._folder.unlock()
            raise
        self._folder.clean()  # what cannot be deleted is an error once the new checkpoint counts
        new = self._folder.begin(step)
        # Batchers first: what workers collect ahead is then complete, in memories too.
        parts = sorted(self._parts, key=lambda part: not part.label.startswith("batcher"))
        known = {} if before is None else read_manifest(before)[1]
        entries = {part.label: part.save(new, before, known.get(part.label, {})) for part in parts}
        write_manifest(new, step, entries)
        # The next save finds out whether an error or interrupt came before or after the checkpoint counted.
        self._pending = self._folder.published_path(new), read_identity(new)
        self._folder.publish(new)
        self._note_newest(self._pending)
        # Last: the new checkpoint counts even if an old one cannot be deleted.
        self._folder.drop_old(self._keep)

    def _find_before(self, folder: CheckpointFolder, step: int) -> Path | None:
        """Returns the checkpoint before the next one, which may share its files.

        None if the folder has none.
        """
        latest = folder.find_latest()
        if latest is None:
            return None
        found = latest, read_identity(latest)
        if found == self._pending:
            self._note_newest(found)
        if self._newest is None:
            raise StateError(
                f"save: {folder.path} holds a checkpoint of step {step_of(latest)} of an earlier run; call restore() "
                "first to go on with it, or give another folder"
            )
        if found != self._newest:
            raise StateError(f"save: another program has saved step {step_of(latest)} to {folder.path} meanwhile")
        if step < step_of(latest):
            raise SpecError(f"save: step {step} comes before that of the last checkpoint, {step_of(latest)}")
        return latest

    def _note_newest(self, newest: tuple[Path, bytes]) -> None:
        self._newest, self._pending = newest, None
        for part in self._parts:
            part.note()
        self._last_time = time.monotonic()

    def save_if_due(self, step: int, every: float = 60.0) -> bool:
        """Saves the training if `every` seconds are over or a stop was requested.

        `preemption` notes such requests; after that save the program ends. A run that is shorter than `every` saves
        nothing, and a longer one not its end: call `save` after the loop.

        Args:
            step: see `save`.
            every: seconds since the last `save` or `restore`.

        Returns:
            Whether it has saved.

        Raises:
            SystemExit: a signal came, and the training is saved: the program ends with the code 0.
        """
        if not (self.stop_requested or time.monotonic() >= self._last_time + every):
            return False
        self.save(step)
        if self.stop_requested:
            logger.info("the training is saved at step %d, the program ends", step)
            raise SystemExit(0)
        return True

    def restore(self) -> int | None:
        """Restores the newest checkpoint, after checking all of it.

        Call it when the batcher is made, and before its first `reset`, which would start other episodes: none is needed
        after an exact state. `feed` a memory before or after it.

        Returns:
            The step of the checkpoint; None if there is none yet.

        Raises:
            FileError, FileNotFoundError: the checkpoint is damaged, lacks a part, or is one of other parts: of another
                network, batcher, or size of a memory; or an object refuses its state. The message names the file, and
                nothing has changed. A batcher whose environments or agents refuse their state can only be closed.
            WorkerError: a worker of a batcher is gone, which can only be closed; nothing else has changed.
            StateError: a rollout is under way or leased, or workers write to a memory; nothing has changed.
            OSError: a file cannot be read.
        """
        if self._folder is None:
            return None
        while (latest := self._folder.find_latest()) is not None:
            try:
                with self._folder.keep(latest):
                    return self._restore(latest)
            except (FileError, OSError):
                if self._folder.find_latest() == latest:
                    raise  # otherwise a program that saves has deleted it while it was read
        return None

    def _restore(self, latest: Path) -> int:
        identity = read_identity(latest)
        step, entries = read_manifest(latest)
        with contextlib.ExitStack() as held:
            restores = []
            for part in self._parts:
                if part.label not in entries:
                    raise FileError(f"{latest}: has no {part.label}, it has {sorted(entries)}")
                restores.append(part.plan(latest, entries[part.label], held))
            _restore_all(self._parts, restores)
            self._note_newest((latest, identity))
        return step

    @property
    def stop_requested(self) -> bool:
        """Whether the last `preemption` block has noted a signal: save, and end the program."""
        return self._preemption.is_requested

    @contextlib.contextmanager
    def preemption(
        self, deadline: float | None = 25.0, signals: Sequence[int] = (signal.SIGTERM,)
    ) -> Iterator[Checkpoint]:
        """Handles a cluster's stop signal in a `with` block around the training loop.

        A signal sets `stop_requested` and does nothing else: the rollout that is under way is finished, and the next
        `save_if_due` saves and ends the program with the code 0. Workers ignore the signal meanwhile, also where it is
        sent to all processes, as Slurm does.

        Args:
            deadline: seconds from the signal to the end of the program; one that has not ended by then is ended with
                the code 128 + the number of the signal, and the last checkpoint remains. Kubernetes and Slurm kill it
                after 30 s, unless they are told otherwise. None for no deadline.
            signals: the signals.

        Raises:
            StateError: this is not the main thread, which alone can handle signals.
        """
        with self._preemption.handle(deadline, signals):
            yield self

    def close(self) -> None:
        """Lets other programs save to the folder. Idempotent.

        The end of this program does so too.
        """
        if self._folder is not None:
            self._folder.unlock()


def _make_parts(given: Mapping[str, Any], extra: Any, rng: bool, exact: bool | str) -> list[Part]:
    """Makes the parts, in the order in which they are restored."""
    from rlstructs.checkpoints import parts

    found: list[Part] = []
    for label, value in given.items():
        for name, each in parts.list_parts(label, value):
            if label == "memory":
                from rlstructs.checkpoints.memory_parts import make_memory_part

                found.append(make_memory_part(name, each))
            elif label == "batcher":
                found.append(parts.BatcherPart(name, each, exact))
            else:
                found.append(parts.StatePart(name, each))
    if isinstance(extra, dict):
        found.append(parts.ExtraPart("extra", extra))
    elif extra is not None:
        found.append(parts.StatePart("extra", extra))
    if rng:
        found.append(parts.RandomPart("random"))
    return sorted(found, key=lambda part: part.turn)


def _restore_all(parts: Sequence[Part], restores: Sequence[Restore]) -> None:
    """Restores parts; if one raises, undoes all of them."""
    backups, finishing = list[tuple[str, Callable[[], None]]](), list[Callable[[], None]]()
    try:
        for part, restore in zip(parts, restores, strict=True):
            backups.append((part.label, part.back_up()))
            if (finish := restore()) is not None:
                finishing.append(finish)
        for finish in finishing:
            finish()
    except BaseException:  # an interrupt too: half of a checkpoint is no training
        for label, put_back in reversed(backups):
            try:
                put_back()
            except Exception:
                logger.warning("%s refuses the state that it had before", label, exc_info=True)
        raise


class Preemption:
    """Notes that a signal came, and ends the program at a deadline.

    The rest is up to the program.

    Attributes:
        is_requested: whether a signal has come.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._n_blocks = 0  # nested ones that are under way
        self._deadline = 0.0
        self._has_ended: _thread.LockType | None = None  # held from the signal on, until the program goes on

    @contextlib.contextmanager
    def handle(self, deadline: float | None, signals: Sequence[int]) -> Iterator[None]:
        """Notes signals during a block; restores the earlier handlers after it.

        An outermost block first forgets signals that were noted before.

        Args:
            deadline: seconds from the first signal to the end of the program; then it is ended. None for no deadline.
            signals: the signals.

        Raises:
            StateError: this is not the main thread, which alone can handle signals.
        """
        seconds = check_timeout(deadline)
        if threading.current_thread() is not threading.main_thread():
            raise StateError("preemption: only the main thread can handle signals; enter the block there")
        if not self._n_blocks:
            self.is_requested = False
            self._call_off()
        outer, self._deadline = self._deadline, float("inf") if seconds is None else seconds
        before, has_exited = dict[int, Any](), False
        self._n_blocks += 1
        try:
            for number in signals:
                before[number] = signal.signal(number, self._note)
            yield
        except SystemExit:
            has_exited = True
            raise
        finally:
            self._n_blocks, self._deadline = self._n_blocks - 1, outer
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            # Unless the block ended with SystemExit, the deadline no longer applies.
            if not has_exited and not self._n_blocks:
                self._call_off()

    def _note(self, number: int, _: object) -> None:
        if self.is_requested:
            return
        self.is_requested = True
        if self._deadline < float("inf"):
            self._has_ended = _thread.allocate_lock()
            self._has_ended.acquire()
            # Not a threading.Timer: the code that this handler interrupts may hold its locks.
            _thread.start_new_thread(_end_late, (self._has_ended, self._deadline, number))

    def _call_off(self) -> None:
        if self._has_ended is not None and self._has_ended.locked():
            self._has_ended.release()


def _end_late(has_ended: _thread.LockType, deadline: float, number: int) -> None:
    """Ends this process, and so its workers, unless the program goes on in time."""
    until = time.monotonic() + deadline
    if not has_ended.acquire(timeout=min(deadline, threading.TIMEOUT_MAX)) and time.monotonic() >= until:
        name = signal.Signals(number).name
        sys.stderr.write(f"rlstructs: {deadline} s after {name} the program has not ended; it ends without a save\n")
        sys.stderr.flush()
        os._exit(128 + number)
