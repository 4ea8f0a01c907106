"""The options of a reset, for each environment."""

from __future__ import annotations

from typing import Any

from rlstructs.errors import SpecError
from rlstructs.structures.dict_tensor import DictTensor


def split_options(env_info: DictTensor, n_envs: int) -> list[dict[str, Any] | None]:
    """Turns rows of options into a dict for each environment."""
    if not isinstance(env_info, DictTensor):
        raise TypeError(f"env_info must be a DictTensor, got {type(env_info).__name__}")
    if env_info.empty():
        return [None] * n_envs
    if env_info.n_elems() != n_envs:
        raise SpecError(f"env_info: has {env_info.n_elems()} rows, expected {n_envs}")
    columns = {key: tensor.tolist() for key, tensor in env_info.items()}
    return [{key: values[k] for key, values in columns.items()} for k in range(n_envs)]
