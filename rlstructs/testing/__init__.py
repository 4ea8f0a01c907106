"""Checks for your environments and agents, and environments that fail on purpose.

from rlstructs.testing import check_agent, check_env

check_env(create_env, {"n_envs": 4})
check_agent(create_agent, create_env(n_envs=4, seed=0))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlstructs.workers.public_names import export_lazily

if TYPE_CHECKING:
    from rlstructs.testing.agent_check import check_agent
    from rlstructs.testing.env_check import check_env
    from rlstructs.testing.faulty_env import Fault, FaultyEnv, create_faulty_envs
    from rlstructs.testing.ledger import Ledger, verify

_EXPORTS = {
    "Fault": "faulty_env",
    "FaultyEnv": "faulty_env",
    "Ledger": "ledger",
    "check_agent": "agent_check",
    "check_env": "env_check",
    "create_faulty_envs": "faulty_env",
    "verify": "ledger",
}

__all__ = ["Fault", "FaultyEnv", "Ledger", "check_agent", "check_env", "create_faulty_envs", "verify"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = export_lazily(__name__, _EXPORTS)
