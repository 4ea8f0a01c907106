"""`ReplayBuffer`: tianshou's replay buffer, which knows the episodes of its rows."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlstructs.checks import clean_text
from rlstructs.errors import FileError, SpecError
from rlstructs.public_names import set_module
from rlstructs.replay import saving
from rlstructs.replay.buffer import FILL, GROW
from rlstructs.replay.given import flat_items
from rlstructs.replay.tianshou import transitions
from rlstructs.replay.tianshou.edits import EpisodeEdits
from rlstructs.replay.tianshou.transitions import DONE, FLAGS, OBS_NEXT
from rlstructs.replay.values import host_array

if TYPE_CHECKING:
    from typing_extensions import Self

HDF5 = ".h5"


@set_module("rlstructs.replay")
class ReplayBuffer(EpisodeEdits):
    """The newest `size` transitions of one environment, and which episodes they are of.

    Each key of a transition is a column that comes with the first row, with its dtype and shape; nested ones have
    names joined with `/`. A row id is the slot of a row, in [0, size). What is read is copied. One thread writes;
    others may `sample`.

    Infos are in each row what the environment said in that step. Their numbers widen (bool, int, float, complex; longer
    ones), as long as no value is lost; what cannot be one column of numbers (text, None, lists that grow, dicts that
    were numbers) becomes one of objects, which are sampled in numpy's arrays of objects. Rows without such a key hold 0
    in numbers and None in objects. `save` writes what JSON holds. All other keys keep their dtype and shape.

    Args:
        size: how many; 0 for a placeholder that takes none.
        stack_num: of how many rows `obs`, `obs_next`, `info` and `policy` are made when they are read; the first row
            of the episode stands for those before it. May be assigned later.
        ignore_obs_next: do not store it: it is then the `obs` of the next row, or the row's own where none follows.
            So it is too as long as it is never given.
        save_only_last_obs: observations come as stacks; store the last of each.
        sample_avail: draw only rows that have `stack_num - 1` others before them in their episode.
        random_seed: a generator, an int, or None for one from torch's global generator.
        framework: what samples are made of: "numpy" (a dict of arrays with attributes), "torch" (a `DictTensor`,
            which is without objects; `get` has them), "jax" or "warp". Row ids and objects are numpy's in any case.
        device: where samples are wanted.
        n_step, gamma: what `sample` makes of rewards, see there.
        new_keys: keys that there were not before "grow" a column, zero in the rows before; or are an "error".
        missing_keys: keys that there were before "fill" with zeros; or are an "error".

    Raises:
        TypeError, SpecError: an argument is not what is needed.

    Example:
        >>> buffer = ReplayBuffer(size=4)
        >>> for t in range(5):
        ...     index, ep_return, ep_len, ep_start = buffer.add(
        ...         {"obs": t, "act": 0, "rew": 1.0, "terminated": t == 2, "truncated": False}
        ...     )
        >>> buffer.obs, buffer.done
        (array([4, 1, 2, 3]), array([False, False,  True, False]))
        >>> buffer.prev([0, 1, 2, 3]), buffer.next([0, 1, 2, 3]), buffer.unfinished_index()
        (array([3, 1, 1, 3]), array([0, 2, 2, 0]), array([0]))
        >>> batch, rows = buffer.sample(0)  # all, in order
        >>> rows, batch.obs, batch.obs_next
        (array([1, 2, 3, 0]), array([1, 2, 3, 4]), array([2, 2, 4, 4]))
        >>> buffer
        ReplayBuffer(4 of 4 rows: obs int64, act int64, rew float64, terminated bool, truncated bool)
    """

    @classmethod
    def from_data(
        cls, obs: Any, act: Any, rew: Any, terminated: Any, truncated: Any, done: Any = None, obs_next: Any = None,
        **settings: Any,
    ) -> Self:  # fmt: skip
        """A full buffer of rows in order, copied: arrays, nested mappings of them, or datasets of HDF5.

        Args:
            obs, act, rew, terminated, truncated: (n, ...).
            done: (n,), where episodes end. An end that is not terminated is one that was truncated; None for the ends
                that the flags say.
            obs_next: (n, ...), or None.
            settings: of the constructor, but `size`.

        Raises:
            MissingKeyError, SpecError: one is missing, or they have not all n rows.
        """
        given = {"obs": obs, "act": act, "rew": rew, "terminated": terminated, "truncated": truncated,
                 OBS_NEXT: obs_next}  # fmt: skip
        arrays = {
            name: value if isinstance(value, torch.Tensor) else host_array(name, value)
            for name, value in flat_items({key: value for key, value in given.items() if value is not None}, "").items()
        }
        transitions.check_required(arrays)
        n = len(transitions.as_column(FLAGS[0], arrays[FLAGS[0]], 1))
        buffer = cls(n, **settings)
        rows = transitions.as_transitions(arrays, "from_data", buffer._ignored, 1, buffer.save_only_last_obs)
        if wrong := [name for name, values in rows.items() if len(values) != n]:
            raise SpecError(f"{wrong[0]!r} has {len(rows[wrong[0]])} rows, 'terminated' has {n}")
        if done is not None:
            ends = transitions.as_flags(DONE, host_array(DONE, done))
            if ends.shape != (n,):
                raise SpecError(f"'done' has shape {ends.shape}, needed is ({n},)")
            rows[FLAGS[1]] = rows[FLAGS[1]] | (ends & ~rows[FLAGS[0]])
        if n:
            buffer._write({name: values[None] for name, values in rows.items()}, unknown=GROW, missing=FILL)
            buffer._recount()
        return buffer

    # Files

    def save_hdf5(self, path: str | Path, compression: str | None = None) -> None:
        """Writes all that there is to an HDF5 file, whole or not at all; needs the extra `hdf5`.

        Args:
            path: with any ending.
            compression: None, "gzip" or "lzf".
        """
        saving.save(self, Path(path), HDF5, compression)

    @classmethod
    def load_hdf5(cls, path: str | Path, device: Any = None) -> Self:
        """A buffer just as it was when `save_hdf5` wrote it: the next samples are those that would have come then.

        Of a subclass its constructor is called if it takes the same arguments. What it has of its own is in no file.

        Args:
            path: of the file.
            device: where samples are wanted.

        Raises:
            FileNotFoundError: there is no such file.
            FileError: it is damaged, of another version, or of another class.
        """
        return cls._loaded(path, {"device": device})

    @classmethod
    def _loaded(cls, path: str | Path, given: Mapping[str, Any]) -> Self:
        settings = saving.own_state(Path(path), cls.__name__, HDF5).get("settings")
        try:
            buffer = cls._of_settings(settings, given)
        except (ImportError, MemoryError):
            raise
        except Exception as error:  # whatever they are
            raise FileError(f"{path}: its settings do not make a {cls.__name__}: {clean_text(error)}") from error
        saving.load(buffer, Path(path), HDF5)
        return buffer

    @classmethod
    def _of_settings(cls, settings: Any, given: Mapping[str, Any]) -> Self:
        """A buffer with settings from a file, and others."""
        arguments = {**settings, **given}
        try:
            inspect.signature(cls).bind(**arguments)
        except TypeError:  # of a subclass: those of its constructor are in no file
            buffer, ours = cls.__new__(cls), f"{__name__.partition('.')[0]}."
            known: Any = next(kind for kind in cls.__mro__ if kind.__module__.startswith(ours))
            known.__init__(buffer, **arguments)
            return buffer
        return cls(**arguments)

    def _settings(self) -> dict[str, Any]:
        """The arguments of the constructor, as JSON has them."""
        reading = self._reading
        return {
            "size": self._lane_size,
            "stack_num": self.stack_num,
            "ignore_obs_next": self.ignore_obs_next,
            "save_only_last_obs": self.save_only_last_obs,
            "sample_avail": self.sample_avail,
            "framework": self.framework,
            "n_step": reading.n_step,
            "gamma": reading.gamma,
            "new_keys": self._unknown,
            "missing_keys": self._missing,
        }

    def _state(self) -> dict[str, Any]:
        return {"settings": self._settings()}

    def __repr__(self) -> str:
        shown = [f"{name} {spec.dtype}{list(spec.shape) or ''}" for name, spec in self._specs.items()]
        columns = f": {', '.join(shown)}" if shown else ""
        return f"{type(self).__name__}({len(self)} of {self.maxsize} rows{columns})"
