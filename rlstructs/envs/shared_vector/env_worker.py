"""The environments of one worker of a `SharedVectorEnv`, and its answers to requests."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode

from rlstructs.envs.shared_vector.arguments import Description
from rlstructs.envs.shared_vector.columns import pack
from rlstructs.envs.shared_vector.env_group import EnvGroup
from rlstructs.workers import SharedArena, pickling

# A request begins with its kind, the index of a group, and the index of an environment in the group. Kinds are: step
# all environments of the group, step that one environment, and call a method of the group.
HEAD = struct.Struct("<cHI")
EVERY, ONE, CALL = b"E", b"O", b"C"
# First byte of pickled actions; the dtypes of actions in shared memory never begin with it.
PICKLED = b"\x80"


def _copy(value: Any) -> Any:
    """Copies a value by pickling, as between separate processes."""
    return pickling.loads(pickling.dumps(value))


class EnvWorker:
    """One worker's share of each group of environments.

    Args:
        index: of this worker.
        arena: the shared memory for the columns.
        env_fns: make the environments of all workers.
        shares: for each worker, one slice of the environments per group.

    Raises:
        Exception: what an environment raised, here or in a method; a note names the environment.
    """

    def __init__(
        self,
        index: int,
        arena: SharedArena,
        *,
        env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        shares: Sequence[Sequence[slice]],
    ) -> None:
        self._arena = arena
        self._groups: list[EnvGroup] = []
        try:
            for rows in shares[index]:
                self._groups.append(EnvGroup(env_fns[rows], rows.start, self._groups, _copy))
        except BaseException:
            with contextlib.suppress(Exception):
                self.close()
            raise

    def describe(self) -> Description:
        """Describes the first environment."""
        return self._groups[0].describe()

    def attach(self, described: Description, n_envs: int, mode: AutoresetMode) -> None:
        """Attaches every group to columns in the shared memory; see `EnvGroup.attach`."""
        buffer = self._arena.map()
        for group in self._groups:
            self._actions = group.attach(described, n_envs, mode, buffer).actions

    def answer(self, data: bytes) -> bytes:
        """Carries out a request.

        Args:
            data: `HEAD` with `CALL`, and the pickled name of a method with its arguments; or `HEAD` with `EVERY` or
                `ONE`, and the dtypes of the actions in shared memory or the pickled actions.

        Returns:
            The pickled result; no bytes for an empty outcome.
        """
        kind, number, k = HEAD.unpack_from(data)
        group, rest = self._groups[number], data[HEAD.size :]
        try:
            if kind == CALL:
                method, arguments = pickling.loads(rest)
                return pack(getattr(group, method)(*arguments))
            if kind == EVERY:
                outcome = group.step(self._read_actions(rest, group.rows))
            else:
                env = group.rows.start + k
                [action] = self._read_actions(rest, slice(env, env + 1))
                outcome = group.step_one(k, action)
            return pack(outcome) if outcome.infos or outcome.objects else b""
        finally:
            group.mark_idle()

    def close(self) -> None:
        """Closes every environment, even if some raise; then raises the first error."""
        with contextlib.ExitStack() as stack:  # calls the last one first, so that the first error is raised at the end
            for group in self._groups:
                stack.callback(group.close)

    def _read_actions(self, data: bytes, rows: slice) -> list[Any]:
        if data.startswith(PICKLED):
            actions: list[Any] = pickling.loads(data)
            return actions
        return self._actions.read(data.decode("ascii"), rows)
