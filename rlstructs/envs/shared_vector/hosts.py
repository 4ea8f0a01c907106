"""Where the environments of a `SharedVectorEnv` are: what it asks of any such place, and this process as one.

A host is asked for one thing at a time, which `answers` then gives; or for any number of steps of single
environments, which come out of `arrived` as they are made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, pairwise
from typing import Any, Protocol

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from rlstructs.envs.shared_vector.columns import Columns
from rlstructs.envs.shared_vector.env_group import Description, EnvGroup
from rlstructs.envs.shared_vector.step_results import Outcome

EnvFns = Sequence[Callable[[], gymnasium.Env[Any, Any]]]
Arguments = Callable[[slice], tuple[Any, ...]]
Request = Callable[[], None]


class Host(Protocol):
    """What a `SharedVectorEnv` knows of where its environments are.

    What is wrong with a request is found when it is made; calling it sends it.
    """

    def describe(self) -> Description:
        """What the first environment says of itself."""

    def attach(self, described: Description, n_envs: int, mode: AutoresetMode) -> Columns:
        """Gives every environment its rows of the columns."""

    def call(self, method: str, arguments: Arguments) -> Request:
        """To call a method of every group; `arguments` gives those for the environments of a group."""

    def step(self, actions: Any) -> Request:
        """To step every environment."""

    def step_some(self, envs: np.ndarray, actions: Any) -> Request:
        """To step some environments, as soon as what they were asked for before is done."""

    def step_group(self, group: int, actions: Any) -> Request:
        """As `step_some`, the environments of a group, which arrive together."""

    def answers(self, timeout: float | None) -> list[Any]:
        """What the environments gave, some at a time, in order: values of the method, outcomes of steps.

        Can be had again until the next request.
        """

    def arrived(self, n: int, among: Sequence[int] | None, timeout: float | None) -> dict[int, Outcome]:
        """What environments of `step_some` gave: the first n that have stepped, or all of some. Until forgotten."""

    def forget_arrived(self, envs: Iterable[int]) -> None:
        """Drops what these gave."""

    def close(self, timeout: float | None) -> None:
        """Closes every environment."""

    def kill(self) -> None:
        """Ends them without waiting for any."""


class LocalHost:
    """All environments in this process; what they are asked for is done at once.

    Args:
        env_fns: make them.
        groups: which are stepped together.
    """

    def __init__(self, env_fns: EnvFns, groups: Sequence[range]) -> None:
        self._group, self._n_envs, self._groups = EnvGroup(env_fns, 0), len(env_fns), groups
        self._answers: list[Any] = []
        self._arrived: dict[int, Outcome] = {}
        self._error: Exception | None = None

    def describe(self) -> Description:
        """As `Host.describe`."""
        return self._group.describe()

    def attach(self, described: Description, n_envs: int, mode: AutoresetMode) -> Columns:
        """As `Host.attach`."""
        columns = self._group.attach(described, n_envs, mode)
        self._actions = columns.actions
        return columns

    def call(self, method: str, arguments: Arguments) -> Request:
        """As `Host.call`."""
        values = arguments(slice(None))
        return lambda: self._keep(getattr(self._group, method), *values)

    def step(self, actions: Any) -> Request:
        """As `Host.step`."""
        rows = self._apart(actions, slice(None), self._n_envs)
        return lambda: self._keep(self._group.step, rows)

    def step_some(self, envs: np.ndarray, actions: Any) -> Request:
        """As `Host.step_some`."""
        rows = list(zip(envs.tolist(), self._apart(actions, envs, len(envs)), strict=True))
        return lambda: self._step_some(rows)

    def step_group(self, group: int, actions: Any) -> Request:
        """As `Host.step_group`."""
        return self.step_some(np.array(self._groups[group]), actions)

    def answers(self, timeout: float | None) -> list[Any]:
        """As `Host.answers`."""
        self._raise_error()
        return self._answers

    def arrived(self, n: int, among: Sequence[int] | None, timeout: float | None) -> dict[int, Outcome]:
        """As `Host.arrived`."""
        self._raise_error()
        found = first_of(self._arrived, n, among)
        assert found is not None
        return found

    def forget_arrived(self, envs: Iterable[int]) -> None:
        """As `Host.forget_arrived`."""
        for env in envs:
            del self._arrived[env]

    def close(self, timeout: float | None) -> None:
        """As `Host.close`."""
        self._group.close()

    def kill(self) -> None:
        """As `Host.kill`."""
        with contextlib.suppress(Exception):
            self._group.close()

    def _apart(self, actions: Any, envs: Any, n: int) -> list[Any]:
        """An action for each environment, in memory of its own: one may change or keep it, as in a worker."""
        types = self._actions.write(actions, envs, n)
        return self._actions.read(types, envs) if types else self._actions.apart(actions, n)

    def _keep(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._answers = []
        try:
            self._answers.append(function(*arguments))
        except Exception as error:  # is raised where it is waited for, as a worker's
            self._error = error

    def _step_some(self, rows: list[tuple[int, Any]]) -> None:
        try:
            for env, action in rows:
                self._arrived[env] = self._group.step_one(env, action)
        except Exception as error:
            self._error = error

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def first_of(arrived: dict[int, Outcome], n: int, among: Sequence[int] | None) -> dict[int, Outcome] | None:
    """The first n that have arrived, or all of some; None if they have not yet."""
    if among is None:
        return {env: arrived[env] for env in islice(arrived, n)} if len(arrived) >= n else None
    return {env: arrived[env] for env in among} if all(env in arrived for env in among) else None


def shares_of(envs: range, n: int) -> list[range]:
    """Environments in n parts as equal as can be, the larger ones first."""
    size, n_larger = divmod(len(envs), n)
    starts = [index * size + min(index, n_larger) for index in range(n + 1)]
    return [envs[start:stop] for start, stop in pairwise(starts)]
