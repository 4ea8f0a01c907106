"""Steps environments one after another, in a worker or in the trainer's process.

`EnvGroup` has some of the environments; `EnvWorker` has one worker's, and answers requests.

Observations, rewards and flags are written to the columns; everything else is returned as an `Outcome`.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from rlstructs.envs.env_list import KEPT, EnvList, LivesRule, RestartPolicy, close_in_time
from rlstructs.envs.shared_vector.arguments import Description, check_spaces, copy_if_taken, innermost
from rlstructs.envs.shared_vector.columns import Columns, Outcome, pack
from rlstructs.envs.spaces import copy_sample, flatten_space, nest
from rlstructs.envs.stepping import add_origin
from rlstructs.errors import SpecError
from rlstructs.workers import SharedArena, pickling

# A request begins with its kind, the index of a group, and the index of an environment in the group. Kinds are: step
# all environments of the group, step that one environment, and call a method of the group.
HEAD = struct.Struct("<cHI")
EVERY, ONE, CALL = b"E", b"O", b"C"
# First byte of pickled actions; the dtypes of actions in shared memory never begin with it.
PICKLED = b"\x80"
# Attributes of a group that are views of its columns, and what it returns of a step.
VIEWS = ("_outcome", "_objects", "_observations", "_rewards", "_terminations", "_truncations", "_at", "_restarts")
# The key of infos of environments that have failed and were made anew; its value says what they raised.
ENV_FAILURE = "env_failure"
# What the next step of an environment that is not stepped does: a reset, or, until it is reset, nothing.
RESET, HELD = range(2)


class EnvGroup(EnvList):
    """Some of the environments of a `SharedVectorEnv`.

    Args:
        env_fns: make the environments.
        first: index of the first environment among all; the others follow it.
        others: further groups in this process.
        copy_argument: copies what `call` and `set_attr` give to one environment.

    Attributes:
        rows: the environments' indexes among all.

    Raises:
        Exception: what an environment raised, here and in every method with a note that names it.
    """

    def __init__(
        self,
        env_fns: Iterable[Callable[[], gymnasium.Env[Any, Any]]],
        first: int,
        others: Iterable[EnvGroup] = (),
        copy_argument: Callable[[Any], Any] = lambda value: value,
    ) -> None:
        self._first, self._copy_argument = first, copy_argument
        self._env_fns, self._others = list(env_fns), others
        self._envs = []
        taken = {id(innermost(env)) for group in others for env in group._envs}
        for k, env_fn in enumerate(self._env_fns):
            try:
                self._envs.append(copy_if_taken(env_fn(), taken))
                check_spaces(self._envs[k])
            except Exception as error:
                add_origin(error, "its constructor", None, first + k)
                with contextlib.suppress(Exception):
                    self.close()
                raise
        self._set_envs(self._envs, [None] * len(self._envs))  # the seeds are the last ones that `reset` was given
        self._policy = RestartPolicy()
        self.rows = slice(first, first + len(self._envs))
        self._names = range(first, self.rows.stop)

    def describe(self) -> Description:
        """Describes the first environment."""
        env = self._envs[0]
        return Description(env.observation_space, env.action_space, dict(env.metadata or {}), env.render_mode)

    def attach(self, described: Description, n_envs: int, mode: AutoresetMode, buffer: Any = None) -> Columns:
        """Makes the columns; environments then write to their rows.

        Args:
            described: the spaces that all environments must have.
            n_envs: number of environments in all groups.
            mode: what happens to an environment whose episode ends.
            buffer: the memory of the columns; None to allocate it.

        Returns:
            The columns.

        Raises:
            OtherSpacesError: an environment has other spaces.
        """
        for k, env in enumerate(self._envs):
            described.check(self._first + k, env)
        spaces = described.observation_space, described.action_space
        self._columns, self._mode = Columns(*spaces, n_envs, buffer), mode
        self._space, self._described = described.observation_space, described
        self._leaves = {column.leaf.key: column.leaf for column in self._columns.observations}
        self._find_rows()
        self.mark_idle()
        self._idle: dict[int, int] = {}  # environments that are not stepped: what their next step does instead
        self._has_flags = True  # whether some flags may be set
        self._picked: list[list[Any]] = [[] for _ in self._envs]  # the last values of `_objects`
        return self._columns

    def _find_rows(self) -> None:
        columns, mine = self._columns, self.rows
        self._outcome: Any = None  # of the call under way; an exact state has none
        self._objects, self._has_objects = columns.objects, bool(columns.objects)
        self._observations = [column.select(mine) for column in columns.observations]
        self._rewards = columns.rewards[mine]
        self._terminations, self._truncations = columns.terminations[mine], columns.truncations[mine]
        self._at, self._restarts = columns.at[mine.start : mine.start + 1], columns.restarts[mine]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in VIEWS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._find_rows()
        self.set_policy(self._policy)

    def set_policy(self, policy: RestartPolicy) -> None:
        """Sets what happens to environments that fail."""
        self._policy = policy
        rule = LivesRule(partial(_make_by, self._env_fns), policy.limit, policy.first + self._first)
        self._lives.set_rule(rule if policy.is_on else None)

    def mark_idle(self) -> None:
        """Notes that no environment of the group is busy."""
        self._at[0] = -1

    def reset(
        self, seeds: Sequence[int | None], options: Sequence[dict[str, Any] | None], mask: np.ndarray | None
    ) -> Outcome:
        """Resets the environments of the mask; the rows of the others keep their values.

        Args:
            seeds: one for each environment.
            options: for each environment; it gets a copy, which it may change.
            mask: bool, one for each environment; None for all.
        """
        outcome = self._outcome = Outcome([], [])
        for k in range(len(self._envs)) if mask is None else np.flatnonzero(mask).tolist():
            self._at[0] = self._first + k
            if (seed := seeds[k]) is not None:
                self._stream_seeds[k] = seed
                self._new_seeds.pop(k, None)
            observation, info = self._begin_episode(k, seed, options[k])
            self._terminations[k] = self._truncations[k] = False
            self._write_one(k, observation)
            self._take_info(k, info)
        self._outcome = None
        return outcome

    def step(self, actions: Iterable[Any]) -> Outcome:
        """Steps all environments."""
        outcome, have_own_memory, envs = Outcome([], []), self._have_own_memory, self._envs
        self._outcome = outcome
        self._lives.n_steps += 1
        if self._idle:
            envs = envs.copy()
            for k in self._idle:
                envs[k] = _Idle(self, k)
        if self._has_flags:
            self._terminations[:] = self._truncations[:] = self._has_flags = False
        observations = self._step_envs(envs, actions, self._rewards)
        if not have_own_memory:  # each was written when it was made
            pass
        elif not self._have_own_memory or (self._idle and HELD in self._idle.values()):  # some are `KEPT`
            for k, observation in enumerate(observations):
                self._write_one(k, observation)
        else:
            for column in self._observations:
                column.fill(observations, self._names)
            if self._has_objects:
                self._picked = self._objects.pick_all(observations)
                outcome.objects.extend(enumerate(self._picked, self._first))
        self._outcome = None
        return outcome

    def step_one(self, k: int, action: Any) -> Outcome:
        """Steps environment k of the group."""
        outcome = self._outcome = Outcome([], [])
        self._lives.count_one(k)
        self._terminations[k] = self._truncations[k] = False
        env = _Idle(self, k) if k in self._idle else self._envs[k]
        [observation] = self._step_envs([env], [action], self._rewards, k)
        self._write_one(k, observation)
        self._outcome = None
        return outcome

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Calls a method of each environment, or reads an attribute; returns the values."""

        def call_one(k: int, env: Any) -> Any:
            self._at[0] = self._first + k
            found = env.get_wrapper_attr(name)
            if callable(found) and (args or kwargs):
                own_args, own_kwargs = self._copy_argument((args, kwargs))
                return found(*own_args, **own_kwargs)
            return found() if callable(found) else found

        return self._for_each(name, call_one)

    def apply(self, function: Callable[[Any], Any], only: Sequence[int] | None = None) -> list[Any]:
        """Calls a function with each environment, or with those in `only`.

        `only` holds indexes among all environments.
        """

        def call_one(k: int, env: Any) -> Any:
            self._at[0] = self._first + k
            return function(env)

        mine = None if only is None else [k - self._first for k in only]
        return self._for_each("apply", call_one, mine)

    def render(self) -> list[Any]:
        """Calls `render` of each environment; returns the values."""
        return self.call("render", (), {})

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        """Sets an attribute of each environment to its value of `values`."""
        self._for_each("set_attr", lambda k, env: env.set_wrapper_attr(name, self._copy_argument(values[k])))

    def _keep(self, row: int, observation: Any) -> Any:
        self._write_one(row, observation)
        return observation

    def _take_info(self, row: int, info: Any) -> None:
        if info:  # a copy: environments of one class may share its values, and write into them again
            self._outcome.infos.append((self._first + row, _copy_info(info)))

    def _end(self, row: int, observation: Any, reward: Any, terminated: bool, truncated: bool, info: Any) -> Any:
        self._terminations[row], self._truncations[row], self._has_flags = terminated, truncated, True
        if self._mode is AutoresetMode.NEXT_STEP:
            self._idle[row] = RESET
        elif self._mode is AutoresetMode.SAME_STEP:
            # Copies: the reset may write into the same arrays.
            final = {"final_obs": copy_sample(self._space, observation), "final_info": _copy_info(info)}
            self._outcome.infos.append((self._first + row, final))
            observation, info = self._reset_in_step(row, observation)
        self._take_info(row, info)
        return observation

    def _fail(self, row: int, k: int, error: Exception) -> tuple[Any, Any]:
        self._replace(k, error, in_reset=False)
        failure, holds = {ENV_FAILURE: _describe(error)}, self._policy.holds
        self._terminations[k], self._truncations[k], self._has_flags = False, not holds, True
        observation, info = KEPT, dict[str, Any](failure)
        if holds or self._mode is not AutoresetMode.SAME_STEP:
            if holds or self._mode is AutoresetMode.NEXT_STEP:
                self._idle[k] = HELD if holds else RESET
        else:
            final = {"final_obs": self._copy_last(k), "final_info": failure}
            self._outcome.infos.append((self._first + k, final))
            observation, shown = self._begin_episode(k)
            info = {**shown, **failure}
        self._take_info(k, info)
        return observation, 0.0

    def _reset_in_step(self, k: int, kept: Any) -> tuple[Any, Any]:
        """Resets environment k in a step.

        Returns `kept` instead of an observation if it fails and is held.
        """
        if not self._policy.holds:
            return self._begin_episode(k)
        try:
            return self._start_episode(k)
        except Exception as error:
            self._replace(k, error, in_reset=True)
            self._idle[k] = HELD
            return kept, {ENV_FAILURE: _describe(error)}

    def _begin_episode(
        self, k: int, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, Mapping[str, Any]]:
        """Starts an episode of environment k.

        If it fails, it is made anew, and its info says so.
        """
        (observation, info), failure = self._begin(k, self._start_episode, seed, options)
        return observation, info if failure is None else {**info, ENV_FAILURE: _describe(failure)}

    def _start_episode(
        self, k: int, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, Mapping[str, Any]]:
        started = self._reset_one(k, self._new_seeds.get(k, seed), options)
        self._new_seeds.pop(k, None)
        self._idle.pop(k, None)
        return started

    def _replace(self, k: int, error: Exception, in_reset: bool) -> None:
        super()._replace(k, error, in_reset)
        self._restarts[k] = self._lives.counts[k]

    def _check_new(self, env: Any, k: int) -> None:
        try:
            if any(innermost(env) is innermost(each) for group in (self, *self._others) for each in group._envs):
                raise SpecError(f"env_fns[{self._first + k}] gave an environment again that had failed, or is in use")
            check_spaces(env)
            self._described.check(self._first + k, env)
        except BaseException:
            close_in_time({self._first + k: env})
            raise

    def _copy_last(self, k: int) -> Any:
        """The last observation of environment k."""
        arrays = (column.array[k].copy() for column in self._observations)
        objects = iter(self._picked[k])
        return nest(self._space, (next(arrays if leaf.is_array else objects) for leaf in flatten_space(self._space)))

    def _write_one(self, k: int, observation: Any) -> None:
        if observation is KEPT:
            return
        for column in self._observations:
            column.put(k, observation, self._first + k)
        if self._has_objects:
            self._picked[k] = self._objects.pick(observation)
            self._outcome.objects.append((self._first + k, self._picked[k]))


class _Idle(NamedTuple):
    """Stands for an environment whose step only resets it.

    It also stands for one that waits for a reset.
    """

    group: EnvGroup
    k: int

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Any]:
        """Resets the environment, if that is due."""
        is_held = self.group._idle[self.k] == HELD
        observation, info = (KEPT, None) if is_held else self.group._reset_in_step(self.k, KEPT)
        return observation, 0.0, False, False, info


def _make_by(env_fns: Sequence[Callable[[], Any]], k: int, number: int, seed: Any) -> Any:
    return env_fns[k]()


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _copy_info(info: Any) -> Any:
    """Copies the dicts and arrays of an info.

    Other values are kept, as gymnasium keeps them.
    """
    if isinstance(info, dict):
        return {key: _copy_info(value) for key, value in info.items()}
    return info.copy() if isinstance(info, np.ndarray) else info


def _copy_by_pickling(value: Any) -> Any:
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
                self._groups.append(EnvGroup(env_fns[rows], rows.start, self._groups, _copy_by_pickling))
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
