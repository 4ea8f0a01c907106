"""`Host`: what runs the environments of a `SharedVectorEnv`.

`LocalHost` runs them in this process.

A host takes one request for all environments at a time, whose results `wait_for_all` returns; or any number of
requests to step or reset some environments, whose results `wait_for_some` returns as they arrive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Protocol

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from rlstructs.envs.shared_vector.arguments import Description
from rlstructs.envs.shared_vector.columns import Columns, Outcome
from rlstructs.envs.shared_vector.env_group import EnvGroup

EnvFns = Sequence[Callable[[], gymnasium.Env[Any, Any]]]
Arguments = Callable[[slice], tuple[Any, ...]]
Request = Callable[[], None]


class Host(Protocol):
    """The interface by which a `SharedVectorEnv` reaches its environments.

    Methods that return a request check their arguments; calling the request sends it.
    """

    _arrived: dict[int, Outcome]  # of environments that were stepped by `step_some`, until they are forgotten

    def describe(self) -> Description:
        """Describes the first environment."""

    def attach(self, described: Description, n_envs: int, mode: AutoresetMode) -> Columns:
        """Lays out the columns, and has every environment write to its rows of them."""

    def call(self, method: str, arguments: Arguments) -> Request:
        """Makes a request to call a method of every group.

        `arguments` returns the arguments for a slice of environments.
        """

    def step(self, actions: Any) -> Request:
        """Makes a request to step every environment."""

    def step_some(self, envs: np.ndarray, actions: Any) -> Request:
        """Makes a request to step some environments, after earlier requests to them."""

    def step_group(self, group: int, actions: Any) -> Request:
        """Makes a request to step the environments of a group, whose results arrive together."""

    def reset_some(self, mask: np.ndarray, arguments: Arguments) -> Request:
        """Requests a reset of the environments of a mask.

        It follows earlier requests to them.

        `arguments` returns the arguments of `EnvGroup.reset` for a slice of environments. The results arrive as those
        of `step_some`.
        """

    def wait_for_all(self, timeout: float | None) -> list[Any]:
        """Waits for the results of all environments, in their order.

        They are lists of values, or outcomes. Returns the same results again until the next request.
        """

    def wait_for_values(self, timeout: float | None) -> list[Any] | Exception:
        """Waits for the values of a call until all environments are through.

        Returns:
            The values; or what an environment raised, the first by index.
        """

    def wait_for_some(self, n: int, among: Sequence[int] | None, timeout: float | None) -> dict[int, Outcome]:
        """Waits for the outcomes of the first n environments, or of all `among`.

        Keeps them until they are forgotten.
        """

    def wait_for_ready(self, n: int, timeout: float | None) -> dict[int, Outcome]:
        """Waits for the outcomes of n environments; returns those of all that have arrived.

        Late ones are an error only if no outcome has arrived. Keeps them until they are forgotten.
        """

    def forget_some(self, envs: Iterable[int]) -> None:
        """Drops the outcomes of these environments."""
        for env in envs:
            del self._arrived[env]

    def close(self, timeout: float | None) -> None:
        """Closes every environment."""

    def kill(self) -> None:
        """Ends every environment without waiting."""


class LocalHost(Host):
    """Runs all environments in this process, each request as it is sent.

    Args:
        env_fns: make the environments.
        groups: environments that are stepped together.
    """

    def __init__(self, env_fns: EnvFns, groups: Sequence[range]) -> None:
        self._group, self._n_envs, self._groups = EnvGroup(env_fns, 0), len(env_fns), groups
        self._results: list[Any] = []
        self._arrived = {}
        self._error: Exception | None = None

    def describe(self) -> Description:
        return self._group.describe()

    def attach(self, described: Description, n_envs: int, mode: AutoresetMode) -> Columns:
        columns = self._group.attach(described, n_envs, mode)
        self._actions = columns.actions
        return columns

    def call(self, method: str, arguments: Arguments) -> Request:
        values = arguments(slice(None))
        return lambda: self._run(getattr(self._group, method), *values)

    def step(self, actions: Any) -> Request:
        rows = self._actions.copy(actions, self._n_envs)  # an environment may change or keep them, as in a worker
        return lambda: self._run(self._group.step, rows)

    def step_some(self, envs: np.ndarray, actions: Any) -> Request:
        rows = list(zip(envs.tolist(), self._actions.copy(actions, len(envs)), strict=True))
        return lambda: self._run_some(lambda: {env: self._group.step_one(env, action) for env, action in rows})

    def step_group(self, group: int, actions: Any) -> Request:
        return self.step_some(np.array(self._groups[group]), actions)

    def reset_some(self, mask: np.ndarray, arguments: Arguments) -> Request:
        values, envs = arguments(slice(None)), np.flatnonzero(mask).tolist()
        return lambda: self._run_some(lambda: self._group.reset(*values).split(envs))

    def wait_for_all(self, timeout: float | None) -> list[Any]:
        self._raise_error()
        return self._results

    def wait_for_values(self, timeout: float | None) -> list[Any] | Exception:
        error, self._error = self._error, None
        return self._results if error is None else error

    def wait_for_some(self, n: int, among: Sequence[int] | None, timeout: float | None) -> dict[int, Outcome]:
        self._raise_error()
        found = take_arrived(self._arrived, n, among)
        assert found is not None
        return found

    def wait_for_ready(self, n: int, timeout: float | None) -> dict[int, Outcome]:
        self._raise_error()
        return dict(self._arrived)

    def close(self, timeout: float | None) -> None:
        self._group.close()

    def kill(self) -> None:
        with contextlib.suppress(Exception):
            self._group.close()

    def _run(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._results = []
        try:
            self._results.append(function(*arguments))
        except Exception as error:  # raised by the wait, like a worker's
            self._error = error

    def _run_some(self, run: Callable[[], dict[int, Outcome]]) -> None:
        try:
            self._arrived.update(run())
        except Exception as error:
            self._error = error

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def take_arrived(arrived: dict[int, Outcome], n: int, among: Sequence[int] | None) -> dict[int, Outcome] | None:
    """Returns the first n outcomes, or all those `among`.

    None if they have not arrived yet.
    """
    if among is None:
        return {env: arrived[env] for env in islice(arrived, n)} if len(arrived) >= n else None
    return {env: arrived[env] for env in among} if all(env in arrived for env in among) else None
