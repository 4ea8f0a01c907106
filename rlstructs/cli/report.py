"""The output of the command line: summaries, plots and descriptions.

It describes files, and the system for a bug report.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlstructs import __version__
from rlstructs.checks import LONGEST_NAME, clean_text
from rlstructs.cli.states import describe_checkpoints, describe_state, has_checkpoints, read_state
from rlstructs.episodes import EpisodeTracker
from rlstructs.errors import FileError, SpecError
from rlstructs.files import layout
from rlstructs.files.segments import list_parts
from rlstructs.files.zstd import codec_of
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import RolloutFolder, Trajectories
from rlstructs.workers.limits import available_bytes, n_cores
from rlstructs.workers.start import default_start_method

if TYPE_CHECKING:
    from rlstructs.cli.collect import Collected, Settings


# File ending -> the module needed to write it, besides torch and numpy.
OUT_ENDINGS: dict[str, str | None] = {".npz": None, ".pt": None, ".h5": "h5py"}
PLOT_ENDINGS: dict[str, str | None] = {".png": "matplotlib.figure"}
TRACE_ENDINGS: dict[str, str | None] = {".json": None}
# Package -> its name for `pip install`.
INSTALL = {"h5py": "h5py", "matplotlib": "matplotlib", "imageio_ffmpeg": "'imageio[ffmpeg]'"}
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
KINDS = {kind.__name__: kind for kind in (DictTensor, TemporalDictTensor, Trajectories)}
# The most episodes in the running mean of a plot.
WINDOW = 100


def is_folder(out: str | None) -> bool:
    """Whether --out names a folder: it ends in / or has no file ending."""
    return out is not None and (out.endswith("/") or not Path(out).suffix)


def check_outputs(
    out: str | None, plot: Path | None, dataset_id: str | None, trace: Path | None = None, compress: bool = False
) -> None:
    """Checks, before anything is collected, that the named files can be written.

    Raises:
        SpecError: see `check_path` and `check_folder`; or minari is not installed, or what is to be compressed not
            named.
        ImportError: there is no zstd.
    """
    if compress:
        if out is None:
            raise SpecError("--compress: is for --out")
        codec_of()
    if out is not None and is_folder(out):
        check_folder("--out", Path(out))
    elif out is not None:
        check_path("--out", Path(out), OUT_ENDINGS)
    if plot is not None:
        check_path("--plot", plot, PLOT_ENDINGS)
    if trace is not None:
        check_path("--trace", trace, TRACE_ENDINGS)
    if dataset_id is not None:
        try:
            importlib.import_module("rlstructs.integrations.minari.writing")
        except ImportError as error:
            raise SpecError(f"--minari: needs minari: {error}: pip install 'minari[hdf5]' pillow") from error


def check_path(option: str, path: Path, endings: dict[str, str | None]) -> None:
    """Checks before the collection that a file can be written.

    Raises:
        SpecError: the ending is unknown, the directory is missing or not writable, or a module is not installed.
    """
    ending = layout.ending_of(path)
    if ending not in endings:
        raise SpecError(f"{option}: the name must end in {' or '.join(endings)}, got {str(path)!r}")
    if not path.parent.is_dir():
        raise SpecError(f"{option}: there is no directory {str(path.parent)!r}")
    try:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a directory")
        tempfile.TemporaryFile(dir=path.parent).close()  # the only sure test
    except OSError as error:
        raise SpecError(f"{option}: cannot write {str(path)!r}: {error}") from error
    module = endings[ending]
    try:
        importlib.import_module(module or "torch")
    except ImportError as error:
        package = str(module).split(".")[0]
        install = f"pip install {INSTALL[package]}"
        raise SpecError(f"{option}: {path.suffix} files need {package}: {error}: {install}") from error


def check_folder(option: str, path: Path) -> None:
    """Checks before the collection that rollouts can be written to a folder.

    Raises:
        SpecError: the folder has files, cannot be made, or is not writable.
    """
    try:
        RolloutFolder(path)
        tempfile.TemporaryFile(dir=path if path.exists() else path.parent).close()
    except (FileError, OSError) as error:
        raise SpecError(f"{option}: cannot write to {str(path)!r}: {error}") from error


def summary(settings: Settings, collected: Collected, written: list[str]) -> str:
    """One line that says what was collected and which files were written."""
    totals = collected.totals
    parts = [f"{totals.n_steps:,} steps", f"{totals.n_episodes:,} episodes"]
    if totals.n_episodes:
        parts += [f"mean return {totals.mean_return:,.2f}", f"mean length {totals.mean_length:,.2f}"]
    parts.append(f"{totals.n_steps / totals.seconds:,.0f} steps/s")
    early = f"; stopped early, of {settings.n_steps:,} steps" if totals.n_steps < settings.n_steps else ""
    wrote = f"; wrote {', '.join(written)}" if written else ""
    return f"{settings.env_id}: {', '.join(parts)}{early}{wrote}"


def describe(path: Path) -> Iterator[str]:
    """Describes a file or a folder of rollouts, line by line.

    Reads a folder part by part.

    A file may hold trajectories, or the state of a batcher; a folder may hold checkpoints of a training.

    Raises:
        FileNotFoundError: there is no such file.
        FileError, SpecError: this library did not write it, or it is damaged.
    """
    if not path.suffix and not path.exists():  # other names are told apart by their endings
        raise FileNotFoundError(f"{path}: no such file")
    if path.suffix == ".pt" and path.is_file() and (state := read_state(path)) is not None:
        yield from describe_state(path, state)
        return
    if has_checkpoints(path):
        yield from describe_checkpoints(path)
        return
    paths = list_parts(path) if path.is_dir() else [path]
    try:
        headers = [layout.read_header(part) for part in paths]
    except FileError as error:
        known = "files that `rlstructs collect --out` or a `save` of this library wrote"
        raise FileError(f"{error}; info reads {known}") from error
    kind, content = headers[0]["class"], _Content()
    if kind in KINDS:
        for part in paths:
            content.add(KINDS[kind].load(part))
    in_parts = f" in {len(paths):,} files" if path.is_dir() else ""
    rows = f", {content.n_rows:,} rows" if kind in KINDS else ""
    nbytes = sum(part.stat().st_size for part in paths)
    yield f"{path}: {clean_text(kind, LONGEST_NAME)}{in_parts}{rows}, {nbytes / 1e6:,.2f} MB"
    # Names in a file may hold control sequences for the terminal.
    lines = [
        (clean_text(name, LONGEST_NAME), "x".join(map(str, _shape(headers, name))) or "scalar", spec["dtype"])
        for name, spec in headers[0]["arrays"].items()
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)] or [0, 0]
    for name, shape, dtype in lines:
        yield f"  {name:{widths[0]}}  {shape:{widths[1]}}  {dtype}"
    yield from content.lines()


def _shape(headers: list[dict[str, Any]], name: str) -> list[int]:
    """Returns the shape that an array has in all files together.

    `Trajectories.load` pads to the longest T.
    """
    shapes = [header["arrays"][name]["shape"] for header in headers if name in header["arrays"]]
    if len(shapes) == 1 or not shapes[0]:
        return list(shapes[0])
    return [sum(shape[0] for shape in shapes), *map(max, zip(*(shape[1:] for shape in shapes), strict=True))]


class _Content:
    """Gathers what `describe` reports about files read one after another."""

    def __init__(self) -> None:
        self.n_rows = 0
        self._lengths: list[torch.Tensor] = []
        self._episodes: EndedEpisodes | SpecError | None = None

    def add(self, content: Any) -> None:
        """Adds the content of the next file."""
        self.n_rows += content.n_elems()
        if isinstance(content, (TemporalDictTensor, Trajectories)):
            self._lengths.append(content.lengths)
        if isinstance(content, Trajectories) and not isinstance(self._episodes, SpecError):
            self._episodes = self._episodes or EndedEpisodes()
            try:
                self._episodes.add(content)
            except SpecError as error:
                self._episodes = error

    def lines(self) -> Iterator[str]:
        """The lines about lengths and episodes."""
        if self._lengths:
            lengths = torch.cat(self._lengths)
            yield f"lengths: {_spread(lengths)}, {int(lengths.sum()):,} steps"
        if self._episodes is not None:
            yield f"episodes: {_episodes(self._episodes)}"


class EndedEpisodes:
    """Finds the episodes that ended in trajectories.

    Trajectories must be added in the order of their rollouts.
    """

    def __init__(self) -> None:
        self._tracker, self._ended = EpisodeTracker(), list[DictTensor]()
        # Environments are renumbered from 0, because the tracker takes memory up to the largest index.
        self._known: dict[int, int] = {}

    def add(self, trajectories: Trajectories) -> None:
        """Adds the next trajectories.

        Raises:
            SpecError: a key is missing or wrong.
        """
        env_index, steps = trajectories.info["env_index"], trajectories.trajectories
        if env_index.ndim != 1 or env_index.dtype not in INTEGERS:
            raise SpecError(f"env_index is {tuple(env_index.shape)} {env_index.dtype}, expected (B,) of integers")
        needed = [f"_observation/{key}" for key in ("reward", "raw_reward", "done", "terminated", "truncated")]
        steps = steps.get([key for key in [*needed, "observation/initial_state"] if key in steps])
        for key in needed:
            if key in steps and (steps[key].ndim != 2 or steps[key].is_complex()):
                raise SpecError(f"{key!r} is {tuple(steps[key].shape)} {steps[key].dtype}, expected (B, T) of numbers")
        places = [self._known.setdefault(index, len(self._known)) for index in env_index.tolist()]
        rows = Trajectories(DictTensor({"env_index": torch.tensor(places, dtype=torch.int64)}), steps)
        # A new rollout begins where the index of the environment does not ascend.
        starts = [0, *(np.flatnonzero(np.diff(env_index.numpy()) <= 0) + 1).tolist()]
        for start, stop in zip(starts, [*starts[1:], rows.n_elems()], strict=True):
            rollout = rows.index(slice(start, stop))
            self._tracker.forget(_fresh_environments(rollout))
            self._tracker.add(rollout)
        self._ended.append(self._tracker.take())

    def all(self) -> DictTensor:
        """The columns of `RL_Batcher.episodes`."""
        ended, known = DictTensor.cat(self._ended), torch.tensor(list(self._known), dtype=torch.int64)
        return DictTensor({**dict(ended.items()), "env_index": known[ended["env_index"]]})


def ended_episodes(trajectories: Trajectories) -> DictTensor:
    """The episodes that ended in trajectories; see `EndedEpisodes`."""
    ended = EndedEpisodes()
    ended.add(trajectories)
    return ended.all()


def plot(path: Path, settings: Settings, collected: Collected) -> None:
    """Draws returns and lengths of the episodes into a PNG file."""
    figure(settings, collected).savefig(path, format="png")


def figure(settings: Settings, collected: Collected) -> Any:
    """A `matplotlib.figure.Figure` of returns and lengths over the steps at which the episodes ended."""
    # Without pyplot, because its figures and its backend are global.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    episodes, n_steps = collected.episodes(), collected.totals.n_steps
    n_envs = settings.n_envs * max(1, settings.n_workers)
    at = end_steps(episodes) * n_envs
    order = np.argsort(at, kind="stable")
    drawn = Figure(figsize=(8, 6), dpi=150, layout="constrained")
    FigureCanvasAgg(drawn)
    returns, lengths = drawn.subplots(2, 1, sharex=True)
    returns.set_title(f"{settings.env_id}, {settings.agent} agent", loc="left", fontweight="bold", pad=24)
    subtitle = f"{episodes.n_elems():,} episodes in {n_steps:,} steps of {n_envs:,} environments"
    returns.text(0, 1.03, subtitle, color="0.35", transform=returns.transAxes)
    _panel(returns, "return", at[order], episodes["return"].numpy()[order], ("#6baed6", "#08519c"))
    _panel(lengths, "length (steps)", at[order], episodes["length"].double().numpy()[order], ("#fd8d3c", "#a63603"))
    lengths.set_xlabel("environment steps")
    lengths.set_xlim(0, n_steps)
    lengths.xaxis.set_major_formatter(EngFormatter(sep=""))
    return drawn


def end_steps(episodes: DictTensor) -> np.ndarray:
    """Returns, for each episode, its environment's steps until it ended, (K,).

    Steps are counted from the environment's reset.

    Args:
        episodes: all that ended since the environments were reset; those of one environment in the order of their ends.
    """
    env_index, lengths = episodes["env_index"].numpy(), episodes["length"].numpy()
    order = np.argsort(env_index, kind="stable")
    sums = np.cumsum(lengths[order])
    is_first = np.diff(env_index[order], prepend=-1) != 0
    before = (sums - lengths[order])[is_first]
    steps = np.empty_like(sums)
    steps[order] = sums - before[np.cumsum(is_first) - 1]
    return steps


def running_means(at: np.ndarray, values: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean of the last `window` values at each step.

    Where a step has more values than that, the mean is over all of them.

    Args:
        at: the step of each value, ascending, (K,).
        values: (K,).
        window: at least 1.

    Returns:
        The distinct steps, from the first that has `window` values so far, and the mean at each.
    """
    steps, firsts, counts = np.unique(at, return_index=True, return_counts=True)
    stops = firsts + counts
    steps, firsts, stops = (array[stops >= window] for array in (steps, firsts, stops))
    starts = np.minimum(firsts, stops - window)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return steps, (sums[stops] - sums[starts]) / (stops - starts)


def _panel(axes: Any, name: str, at: np.ndarray, values: np.ndarray, colours: tuple[str, str]) -> None:
    axes.set_ylabel(f"episode {name}")
    axes.grid(color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if not values.size:
        axes.text(0.5, 0.5, "no episode ended", ha="center", va="center", transform=axes.transAxes)
        return
    window = min(values.size, WINDOW, max(10, values.size // 10))
    alpha = float(np.clip(2000 / values.size, 0.05, 0.8))
    axes.plot(at, values, ".", color=colours[0], markersize=5, markeredgewidth=0, alpha=alpha)
    axes.plot(*running_means(at, values, window), color=colours[1], linewidth=1.8, label=f"mean of {window} episodes")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.99), frameon=False)


def _episodes(found: EndedEpisodes | SpecError) -> str:
    if isinstance(found, SpecError):
        return f"not known: {found}"
    ended = found.all()
    if not ended.n_elems():
        return "none ended"
    return f"{ended.n_elems():,} ended, return {_spread(ended['return'])}, length {_spread(ended['length'])}"


def _fresh_environments(rollout: Trajectories) -> np.ndarray:
    """Returns the environments that begin an episode here.

    After a reset or a lost worker, their last episode never ended.
    """
    steps, env_index, key = rollout.trajectories, rollout.info["env_index"].numpy(), "observation/initial_state"
    if key not in steps:
        return env_index[:0]
    return np.asarray(env_index[(steps[key][:, :1].flatten(1).bool().any(dim=1) & (steps.lengths > 0)).numpy()])


def _spread(values: torch.Tensor) -> str:
    if not values.numel():
        return "none"
    low, mean, high = values.min().item(), values.double().mean().item(), values.max().item()
    return f"min {_number(low)}, mean {_number(mean)}, max {_number(high)}"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


PACKAGES = ("torch", "numpy", "gymnasium", "jax", "warp-lang", "cloudpickle", "h5py", "matplotlib", "ray", "minari")


def describe_system() -> Iterator[str]:
    """Yields a line for each fact about the system.

    Imports no package but torch, which knows about CUDA.
    """
    yield f"rlstructs: {__version__}"
    yield f"python: {platform.python_version()} ({platform.python_implementation()})"
    for package in PACKAGES:
        try:
            yield f"{package}: {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"{package}: not installed"
    yield f"platform: {platform.platform()}"
    yield f"cores: {n_cores()} of {os.cpu_count()}"
    available = available_bytes()
    yield f"memory available: {'unknown' if available is None else f'{available / 1e9:,.1f} GB'}"
    yield f"start method: {default_start_method()}"
    yield f"CUDA available: {_cuda()}"


def _cuda() -> str:
    try:
        import torch

        if not torch.cuda.is_available():
            return "no"
        return f"yes, {torch.cuda.device_count()} x {torch.cuda.get_device_name()}, version {torch.version.cuda}"
    except Exception as error:
        return f"unknown, {type(error).__name__}: {error}"
