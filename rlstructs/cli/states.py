"""Describes checkpoints, and the saved state of a batcher."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlstructs.batcher.state import FORMAT
from rlstructs.checkpoints.folder import LATEST, MANIFEST, CheckpointFolder, read_manifest
from rlstructs.checks import LONGEST_NAME, clean_text
from rlstructs.errors import FileError
from rlstructs.files.opening import is_of_system, open_file
from rlstructs.files.tree_archive import read_outline


def read_state(path: Path) -> dict[str, Any] | None:
    """Reads a saved state of a batcher; None if the file holds something else.

    `RL_Batcher.state_dict` returned it, and `torch.save` wrote it.
    """
    try:
        with open_file(path) as file:
            state = read_outline(file)
    except Exception as error:  # whoever reads it as trajectories says what is wrong
        if is_of_system(error) or isinstance(error, FileError):
            raise
        return None
    return state if isinstance(state, dict) and state.get("format") == FORMAT else None


def describe_state(path: Path, state: dict[str, Any]) -> list[str]:
    """Describes a state, line by line.

    Raises:
        FileError: it is damaged.
    """
    size = f"{path.stat().st_size / 1e6:,.2f} MB"
    try:
        return list(_describe(path, state, size))
    except Exception as error:  # a crafted state may hold anything
        raise FileError(f"{path}: damaged: {clean_text(error)}") from error


def _describe(path: Path, state: dict[str, Any], size: str) -> Iterator[str]:
    exact = state.get("exact")
    kind = "exact state" if exact else "state"
    yield f"{path}: {kind} of {FORMAT}, version {_text(state.get('version'))}, {size}"
    batcher = state.get("batcher") or {}
    n_workers, n_envs = batcher.get("n_processes"), batcher.get("n_envs")
    yield f"  workers: {_text(n_workers)}, with {_text(n_envs)} environments each; seeds: {_text(state.get('seeds'))}"
    yield f"  steps: {_text(state.get('steps'))}; updates: {_text(state.get('weights_version'))}"
    for worker in state.get("workers") or []:
        if worker.get("restarts"):
            yield f"  restarts: {_text(worker['restarts'])}, lost rollouts: {_text(worker.get('lost_rollouts'))}"
    if not exact:
        yield "  environments: new ones will begin new episodes"
        return
    yield f"  phase: {_text(exact.get('phase'))}"
    for name in ("n_timesteps", "run_ahead", "nodes"):
        if name in (settings := exact.get("settings", {})):
            yield f"  {name}: {_text(settings[name])}"
    counts = Counter((_text(each.get("name")), _text(each.get("method"))) for each in exact.get("environments", []))
    for (name, method), n in counts.items():
        yield f"  environments: {n:,} x {name}, brought back by {method}"


def _text(value: Any) -> str:
    """Returns a value from a file as text without control sequences for the terminal."""
    return clean_text(str(value), LONGEST_NAME)


def has_checkpoints(path: Path) -> bool:
    """Whether this is a checkpoint, or a folder of some."""
    return path.is_dir() and ((path / MANIFEST).exists() or (path / LATEST).exists())


def describe_checkpoints(path: Path) -> Iterator[str]:
    """Describes a checkpoint, or all in a folder, line by line.

    Raises:
        FileError, FileNotFoundError: it is damaged.
    """
    for checkpoint in [path] if (path / MANIFEST).exists() else CheckpointFolder(path).find_all():
        step, parts = read_manifest(checkpoint)
        nbytes = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
        yield f"{checkpoint}: checkpoint of step {step:,}, {nbytes / 1e6:,.2f} MB"
        for label, entry in parts.items():
            where = clean_text(str(entry.get("file", entry.get("folder"))), LONGEST_NAME)
            kind = f", a {clean_text(str(entry['class']), LONGEST_NAME)}" if "class" in entry else ""
            yield f"  {clean_text(label, LONGEST_NAME)}: {where}{kind}"
