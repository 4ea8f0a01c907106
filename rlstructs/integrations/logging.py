"""Writes a training's metrics to TensorBoard, Weights & Biases or Trackio, behind one hook.

A log is called with metrics and a step. Any other function of these two arguments can take its place.

    from rlstructs.integrations.logging import open_log

    with open_log("tensorboard:runs/ppo") as log:
        for trajectories in batcher:
            ...
            metrics = batcher.metrics()
            log({**metrics, "loss": loss}, int(metrics["rollout/steps"]))
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rlstructs.errors import ClosedError, SpecError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Log", "TensorBoardLog", "TrackioLog", "WandbLog", "open_log"]


class Log:
    """A log that writes nothing, and the base class of the others.

    `with` closes it.

    Example:
        >>> with Log() as log:
        ...     log({"loss": 0.5}, step=100)
    """

    _is_closed = False

    def __call__(self, metrics: Mapping[str, float], step: int) -> None:
        """Writes metrics.

        Args:
            metrics: numbers by name, also tensors or arrays of one number; names with `/` are shown in groups.
            step: at which step of the training they were measured; not below that of the last call.

        Raises:
            TypeError: a value is not a number.
            ClosedError: the log is closed.
        """
        if self._is_closed:
            raise ClosedError(f"{type(self).__name__}: the log is closed")
        self._write({name: _read_number(name, value) for name, value in metrics.items()}, int(step))

    def close(self) -> None:
        """Writes the remaining metrics and closes the log. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._finish()

    def _write(self, metrics: dict[str, float], step: int) -> None:
        """Writes checked metrics."""

    def _finish(self) -> None:
        """Writes the remaining metrics."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TensorBoardLog(Log):
    """Writes scalars to files for `tensorboard --logdir`.

    Args:
        folder: where, such as `runs/ppo`; it is made. Each run needs one of its own.
        config: settings of the program, which are shown as a text.

    Raises:
        ImportError: tensorboard is not installed.
    """

    def __init__(self, folder: str, *, config: Mapping[str, Any] | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("TensorBoardLog needs tensorboard: pip install tensorboard") from error
        self._writer = SummaryWriter(folder)
        if config is not None:
            lines = json.dumps(dict(config), indent=4, default=repr).splitlines()
            self._writer.add_text("config", "\n".join(f"    {line}" for line in lines))  # Markdown for code

    def _write(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def _finish(self) -> None:
        self._writer.close()


class WandbLog(Log):
    """Writes to a run of Weights & Biases.

    Args:
        project: the project of the run.
        config: settings of the program.
        settings: further arguments of `wandb.init`, such as `mode="offline"`.

    Raises:
        ImportError: wandb is not installed.
    """

    def __init__(self, project: str, *, config: Mapping[str, Any] | None = None, **settings: Any) -> None:
        try:
            from wandb import init  # not `import wandb`: that finds the folder `wandb` of earlier runs, too
        except ImportError as error:
            raise ImportError("WandbLog needs wandb: pip install wandb") from error
        self._run = init(project=project, config=None if config is None else dict(config), **settings)

    def _write(self, metrics: dict[str, float], step: int) -> None:
        self._run.log(metrics, step=step)

    def _finish(self) -> None:
        self._run.finish()


class TrackioLog(Log):
    """Writes to a run of Trackio.

    Args:
        project: the project of the run.
        config: settings of the program.
        settings: further arguments of `trackio.init`, such as `name="first"`.

    Raises:
        ImportError: trackio is not installed.
    """

    def __init__(self, project: str, *, config: Mapping[str, Any] | None = None, **settings: Any) -> None:
        try:
            from trackio import init
        except ImportError as error:
            raise ImportError("TrackioLog needs trackio: pip install trackio") from error
        self._run = init(project=project, config=None if config is None else dict(config), **settings)

    def _write(self, metrics: dict[str, float], step: int) -> None:
        self._run.log(metrics, step=step)

    def _finish(self) -> None:
        self._run.finish()


# The name that `open_log` takes -> the class, and the default folder or project.
_LOGS: dict[str, tuple[type[TensorBoardLog] | type[WandbLog] | type[TrackioLog], str]] = {
    "tensorboard": (TensorBoardLog, "runs"),
    "wandb": (WandbLog, "rlstructs"),
    "trackio": (TrackioLog, "rlstructs"),
}


def open_log(where: str, config: Mapping[str, Any] | None = None) -> Log:
    """Opens the log that an option of a command line names.

    Args:
        where: `tensorboard`, `wandb` or `trackio`, perhaps with a folder or project, as in `tensorboard:runs/ppo`;
            `""` for a log that writes nothing. Without it the folder is `runs`, the project `rlstructs`.
        config: settings of the program, which are kept with the metrics.

    Raises:
        SpecError: there is no such log.
        ImportError: its package is not installed.
    """
    if not where:
        return Log()
    name, _, place = where.partition(":")
    if name not in _LOGS:
        known = "tensorboard[:FOLDER], wandb[:PROJECT] or trackio[:PROJECT]"
        raise SpecError(f"open_log: expected {known}, got {where!r}")
    kind, default = _LOGS[name]
    return kind(place or default, config=config)


def _read_number(name: str, value: Any) -> float:
    error: Exception | None = None
    if not isinstance(value, (str, bytes)):
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError) as raised:  # RuntimeError: a tensor of several numbers
            error = raised
    raise TypeError(f"log: {name!r} must be a number, got {value!r}") from error
