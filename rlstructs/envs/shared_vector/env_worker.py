"""The environments of one worker of a `SharedVectorEnv`, and the requests it is sent."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode

from rlstructs.envs.shared_vector.env_group import Description, EnvGroup
from rlstructs.envs.shared_vector.step_results import packed
from workers import SharedArena, pickling

# How a request begins: to step all environments of a group, to step a single one, or to call a method of a group;
# and the number of the group, or of the environment in it.
HEAD = struct.Struct("<cHI")
EVERY, ONE, CALL = b"E", b"O", b"C"
# What follows if numbers in shared memory do not say it all.
PICKLED = b"\x80"


def _apart(value: Any) -> Any:
    """A value as it would come to a process that has one environment only."""
    return pickling.loads(pickling.dumps(value))


class EnvWorker:
    """What runs in a worker: a share of each group of environments.

    Args:
        index: of this worker.
        arena: where the columns will lie.
        env_fns: make all environments there are.
        shares: which of them are whose, by worker index; a slice for each group.

    Raises:
        Exception: what an environment raised, here as in every method with a note that names it.
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
                self._groups.append(EnvGroup(env_fns[rows], rows.start, self._groups, _apart))
        except BaseException:
            with contextlib.suppress(Exception):
                self.close()
            raise

    def describe(self) -> Description:
        """Of the first environment."""
        return self._groups[0].describe()

    def attach(self, described: Description, n_envs: int, mode: AutoresetMode) -> None:
        """As `EnvGroup.attach`, in the shared memory."""
        buffer = self._arena.map()
        for group in self._groups:
            self._actions = group.attach(described, n_envs, mode, buffer).actions

    def answer(self, data: bytes) -> bytes:
        """Follows a request.

        Args:
            data: `HEAD` with `CALL`, and a pickled method with its arguments; or with `EVERY` or `ONE`, and then
                the types of the actions in shared memory, or the pickled actions.

        Returns:
            What it gave, pickled; nothing for an empty outcome.
        """
        kind, number, k = HEAD.unpack_from(data)
        group, rest = self._groups[number], data[HEAD.size :]
        try:
            if kind == CALL:
                method, arguments = pickling.loads(rest)
                return packed(getattr(group, method)(*arguments))
            if kind == EVERY:
                outcome = group.step(self._read(rest, group.rows))
            else:
                env = group.rows.start + k
                [action] = self._read(rest, slice(env, env + 1))
                outcome = group.step_one(k, action)
            return packed(outcome) if outcome.infos or outcome.objects else b""
        finally:
            group.rest()

    def close(self) -> None:
        """Closes every environment, also when one of them raises; then raises what the first did."""
        errors: list[Exception] = []
        for group in self._groups:
            try:
                group.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _read(self, data: bytes, rows: slice) -> list[Any]:
        if data.startswith(PICKLED):
            actions: list[Any] = pickling.loads(data)
            return actions
        return self._actions.read(data.decode("ascii"), rows)
