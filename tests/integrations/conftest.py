"""Fixtures of the tests of integrations."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def stable_baselines3_logs(tmp_path, monkeypatch):
    """`learn` writes its logs into a folder of the system's temporary directory unless this names another."""
    monkeypatch.setenv("SB3_LOGDIR", str(tmp_path / "logs"))


@pytest.fixture(autouse=True)
def one_thread_of_torch():
    """Networks are small here: several threads would wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
