"""Base class of the replay buffers.

A buffer has a store with an intake, a random stream, and an exporter.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlstructs.replay.draw.reading import Reading
from rlstructs.replay.intake.arrays import generator_of
from rlstructs.replay.intake.intake import Intake
from rlstructs.replay.keep import saving
from rlstructs.replay.keep.saving import Form
from rlstructs.replay.keep.stored import Stored
from rlstructs.replay.leave.export import Exporter
from rlstructs.replay.rows.columns import Columns
from rlstructs.replay.rows.folder import make_storage
from rlstructs.replay.rows.spec import Setting, Spec
from rlstructs.seeding import Stream
from rlstructs.structures.trajectories import Trajectories


class Buffer(Stored):
    """Base class: a store with named columns, which the first rows define.

    Args:
        n_lanes: number of rings.
        capacity: rows per lane.
        seed: a generator, an int, or None to draw a seed from torch's global generator.
        framework: library of the samples, "torch", "numpy", "jax" or "warp".
        device: of samples; None for the library's default device.
        reading: how rows are read when they are sampled.
        columns: to store the rows in; None for host memory.
        compression, path: which columns are compressed, and a folder for the rows; see `Memory`.
    """

    _intake: Intake
    _form = Form()

    def __init__(
        self,
        n_lanes: int,
        capacity: int,
        *,
        seed: np.random.Generator | int | None = None,
        framework: str = "torch",
        device: Any = None,
        reading: Reading | None = None,
        columns: Columns | None = None,
        compression: Setting = None,
        path: str | Path | None = None,
    ) -> None:
        self._export = Exporter(framework, device)
        self._stream = Stream(generator_of(seed))
        self._reading = Reading() if reading is None else reading
        settings: Any = {"columns": columns, "compression": compression, "path": path}
        self._storage = make_storage(self._form.kind(self), n_lanes, capacity, **settings)
        self._storage.track_episodes()
        self._intake = Intake(self._storage, type(self).__name__)

    @property
    def framework(self) -> str:
        """Library of the samples."""
        return self._export.framework

    @property
    def nbytes(self) -> int:
        """Bytes of rows and bookkeeping; a frame that is stored once counts once."""
        return self._storage.nbytes

    @property
    def _specs(self) -> dict[str, Spec]:
        return self._storage.columns.specs

    def add_trajectories(self, trajectories: Trajectories, names: Mapping[str, str] | None = None) -> None:
        """Appends the valid steps of a batch of `RL_Batcher.get`.

        The lane of a trajectory is its `env_index`; a buffer of one lane appends one trajectory after another.

        Args:
            trajectories: the batch.
            names: column -> key of the trajectories; None for the usual columns of this buffer.

        Raises:
            TypeError, MissingKeyError, SpecError: an argument does not fit; nothing is added.
        """
        self._intake.add_trajectories(trajectories, names)

    def make_feed(self) -> Intake:
        """Returns the interface that `RL_Batcher.feed` uses."""
        return self._intake

    # Files and copies

    def save(self, path: str | Path) -> None:
        """Saves rows, counters, episodes, priorities and the random stream to a file, atomically.

        Args:
            path: ends in `.npz`, `.pt` or `.h5` (which needs the extra `hdf5`).
        """
        saving.save(self, Path(path))

    def load(self, path: str | Path) -> None:
        """Restores a file of `save`, random stream included.

        The next samples are those that would have followed the save.

        Raises:
            FileNotFoundError: there is no such file.
            FileError: it is damaged, of another version, or of a buffer of another size or class; nothing changes.
        """
        saving.load(self, Path(path))
