"""Logs: what is written can be read again by the package that it is written for."""

from __future__ import annotations

import importlib.util
import sqlite3
import sys

import pytest
import torch

from rlstructs import ClosedError, SpecError
from rlstructs.integrations.logging import Log, TensorBoardLog, TrackioLog, WandbLog, open_log

VALUES = {"rollout/steps": [0.0, 100.0, 200.0], "loss": [0.5, 0.25, float("inf")]}
STEPS = [0, 10, 20]


def write(log):
    for step, steps, loss in zip(STEPS, *VALUES.values(), strict=True):
        log({"rollout/steps": int(steps), "loss": torch.tensor(loss)}, step)
    log.close()
    log.close()
    with pytest.raises(ClosedError, match=f"^{type(log).__name__}: the log is closed$"):
        log({}, 30)


@pytest.mark.parametrize(("where", "folder"), [("tensorboard:a/b", "a/b"), ("tensorboard", "runs")])
def test_tensorboard_reads_what_is_written_for_it(where, folder, tmp_path, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.chdir(tmp_path)
    write(open_log(where, {"seed": 3, "make": Log}))
    found = accumulator.EventAccumulator(str(tmp_path / folder)).Reload()
    for name, values in VALUES.items():
        assert [(each.step, each.value) for each in found.Scalars(name)] == list(zip(STEPS, values, strict=True))
    [config] = found.Tensors("config/text_summary")
    assert b'"seed": 3' in config.tensor_proto.string_val[0]


def test_wandb_gets_what_is_written_for_it(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the test extra is to stay light")
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    write(WandbLog("tests", config={"seed": 3}, mode="offline"))
    [run] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = run.read_bytes()
    assert all(name.encode() in content for name in (*VALUES, "seed"))


def test_trackio_gets_what_is_written_for_it(tmp_path, monkeypatch):
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("trackio is not installed: the test extra is to stay light")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # before it is imported
    write(TrackioLog("tests", config={"seed": 3}))
    with sqlite3.connect(tmp_path / "tests.db") as database:
        rows = database.execute("select step, metrics from metrics order by step").fetchall()
    assert [step for step, _ in rows] == STEPS and '"loss"' in rows[0][1]


@pytest.mark.parametrize(
    ("make", "package", "module", "install"),
    [
        (lambda: TensorBoardLog("a"), "tensorboard", "torch.utils.tensorboard", "tensorboard"),
        (lambda: WandbLog("a"), "wandb", "wandb", "wandb"),
        (lambda: TrackioLog("a"), "trackio", "trackio", "trackio"),
    ],
    ids=["tensorboard", "wandb", "trackio"],
)
def test_a_log_whose_package_is_missing_says_what_to_install(make, package, module, install, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"Log needs {package}: pip install {install}$"):
        make()


def test_a_folder_that_wandb_left_is_not_taken_for_the_package(tmp_path, monkeypatch):
    if importlib.util.find_spec("wandb") is not None:
        pytest.skip("wandb is installed")
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="^WandbLog needs wandb"):
        WandbLog("a")
    sys.modules.pop("wandb", None)


@pytest.mark.parametrize("value", ["0.5", [1.0, 2.0], torch.zeros(2), None], ids=["text", "list", "tensor", "None"])
def test_what_is_no_number_is_refused(value):
    with Log() as log, pytest.raises(TypeError, match="^log: 'loss' must be a number, got "):
        log({"return": 1.0, "loss": value}, 1)


def test_no_name_is_a_log_that_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(open_log(""))
    assert not list(tmp_path.iterdir())


def test_an_unknown_log_is_refused():
    words = r"^open_log: expected tensorboard\[:FOLDER\], wandb\[:PROJECT\] or trackio\[:PROJECT\], got 'mlflow:a'$"
    with pytest.raises(SpecError, match=words):
        open_log("mlflow:a")
