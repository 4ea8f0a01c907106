"""Fixtures of the tests of integrations."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def stable_baselines3_logs(tmp_path, monkeypatch):
    """`learn` writes its logs into a folder of the system's temporary directory unless this names another."""
    monkeypatch.setenv("SB3_LOGDIR", str(tmp_path / "logs"))
