"""`ParallelEnvs`: PettingZoo environments as one vectorised environment, with a slot for each agent."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rlstructs.checks import other_words
from rlstructs.envs.env_infos import PREFIX, InfoColumns, InfoKeys
from rlstructs.envs.observation_columns import ObservationRows, RowLayout
from rlstructs.envs.row_env import NO_ROWS, RowDefaults, Step, check_running, split_options, step_pairs
from rlstructs.envs.spaces import example_value, nest
from rlstructs.envs.stepping import SingleEnv, reward_array
from rlstructs.envs.vec_env import NO_INFO
from rlstructs.errors import SpecError
from rlstructs.integrations.pettingzoo.agents import AgentGroup, Shown, make_environments, read_agents, read_spaces
from rlstructs.seeding import environment_seeds
from rlstructs.shared.layout import Rows, Target
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.workers.public_names import set_module

AGENT_INDEX = "agent_index"
# When an environment that has ended begins anew.
STEP, ROLLOUT, RESET = "step", "rollout", "reset"


@set_module("rlstructs.integrations.pettingzoo")
class ParallelEnvs(RowDefaults):
    """Environments of several agents; every agent has a slot.

    Slot `k * A + a` is agent a of environment k, each with A possible agents.

    An agent acts as long as it is in the environment. While it is absent, because it has died or joins later, its slot
    waits: the environment gets no action from it, and rollouts hold no step of it, so that slots have different
    `lengths`. The episode of an agent ends with its own `terminated` or `truncated` and its own final observation; an
    agent that leaves without either was truncated. When it returns, another episode begins. An environment ends when no
    agent is left.

    An observation has the keys that `GymEnv` lists, and `info/agent_index`, int64 (B,): which of `possible_agents`
    this is. The row of an agent that waits has `initial_state`, and zeros, or the nearest legal values.

    Args:
        makers: functions that make an environment each, such as `simple_spread_v3.parallel_env`. One whose agents act
            one after another (AEC) is converted by PettingZoo: `aec_to_parallel` where its metadata say
            `is_parallelizable`, `turn_based_aec_to_parallel` elsewhere.
        seed: environment k gets `seed + k`, or a stream of its own when the seed comes from `RL_Batcher(seeds=int)`; or
            a sequence with a seed for each. Used at the first reset only.
        keep_float64: keep float64 observations and actions, rather than turn them into float32.
        reset_at: when an environment that has ended begins anew. "step": in the same step, as in `GymEnvInf`, so that
            all slots always run. "rollout": as in `GymEnvInf(defer_resets=True)`, when the next rollout of `RL_Batcher`
            begins. "reset": at the next `reset` only, as in `GymEnv`.
        info_keys: which numbers of the agents' infos are recorded, as in `GymEnv`.

    Attributes:
        agents: the names of the A possible agents, in order.
        observation_space, action_space: of each agent.

    Raises:
        TypeError: `makers` are no functions that make PettingZoo environments.
        SpecError: none are given, environments differ in their agents, spaces differ between agents, or one is not
            supported.

    Example:
        >>> from mpe2 import simple_spread_v3
        >>> env = ParallelEnvs([simple_spread_v3.parallel_env, simple_spread_v3.parallel_env], seed=0)
        >>> observation, running = env.reset()
        >>> observation["frame"].shape, observation["info/agent_index"].tolist()
        (torch.Size([6, 18]), [0, 1, 2, 0, 1, 2])
        >>> (after, _), _ = env.step(DictTensor({"action": torch.zeros(6, dtype=torch.int64)}))
        >>> after["reward"].shape
        torch.Size([6])
        >>> env.close()
    """

    @other_words(seeds="seed")
    def __init__(
        self,
        makers: Sequence[Callable[[], Any]],
        seed: int | Sequence[int],
        *,
        keep_float64: bool = False,
        reset_at: str = STEP,
        info_keys: InfoKeys = (),
    ) -> None:
        if reset_at not in (STEP, ROLLOUT, RESET):
            raise SpecError(f"reset_at must be {STEP!r}, {ROLLOUT!r} or {RESET!r}, got {reset_at!r}")
        self._reset_at, self._infos = reset_at, InfoColumns(info_keys)
        envs = make_environments(makers)
        self.agents = read_agents(envs)
        self.observation_space, self.action_space = read_spaces(envs, self.agents)
        self._groups = [AgentGroup(env, k, self.agents, self.observation_space) for k, env in enumerate(envs)]
        self._seeds: list[int] | None = environment_seeds(seed, len(envs))
        layout = RowLayout(self.observation_space, self.action_space, keep_float64, _with_index(self._infos))
        self._actions, self._last_actions = layout.actions, layout.last_actions
        self._after, self._fresh = layout.allocate(self.n_envs())
        # The row of an agent that waits.
        self._blank = nest(self.observation_space, (example_value(leaf) for leaf in layout.leaves.values()))
        self._index = np.arange(self.n_envs()) % len(self.agents)
        self._fresh.view[PREFIX + AGENT_INDEX][:] = self._index
        self._names = [f"{k} (agent {agent!r})" for k in range(len(envs)) for agent in self.agents]
        self._options: list[dict[str, Any] | None] = [None] * len(envs)
        # Numbers of the running environments, None before the first reset; and their slots.
        self._running: np.ndarray | None = None
        self._slots, self._absent = NO_ROWS, NO_ROWS

    def n_envs(self) -> int:
        """Number of slots, E: environments times possible agents."""
        return len(self._groups) * len(self.agents)

    def reset(self, env_info: DictTensor = NO_INFO) -> tuple[DictTensor, torch.Tensor]:
        """Starts an episode in every environment.

        Args:
            env_info: E rows, or empty. Rows of agents of one environment must be equal; they become the `options` of
                its resets, as `{key: number or list}`, now and whenever it resets itself.
        """
        return self.reset_rows(env_info).tensors(), torch.arange(self.n_envs(), device="cpu")

    def step(self, action: DictTensor) -> tuple[tuple[DictTensor, torch.Tensor], tuple[DictTensor, torch.Tensor]]:
        """Steps the running environments; see `VecEnv.step`.

        Args:
            action: `action`, or `action/<key>` for a structured space; one row for each running slot.

        Raises:
            StateError: no environment runs.
            MissingKeyError, SpecError: the action does not fit the action space, or an environment returned something
                wrong.
        """
        check_running(self._running)
        running = torch.from_numpy(self._slots.copy())
        return step_pairs(self.step_rows(action), running)

    def close(self) -> None:
        """Closes every environment, even if some raise; then raises the first error."""
        with contextlib.ExitStack() as stack:  # calls the last one first, so that the first error is raised at the end
            for group in self._groups:
                stack.callback(group.close)

    @property
    def may_idle(self) -> bool:
        running = [] if self._running is None else self._running.tolist()
        return not all(all(self._groups[k].acts) for k in running)

    @property
    def absent_rows(self) -> np.ndarray:
        return self._absent

    @property
    def defers_resets(self) -> bool:
        return self._reset_at == ROLLOUT

    def single_envs(self) -> Sequence[SingleEnv]:
        return [SingleEnv(group.env) for group in self._groups]

    def example(self) -> Rows:
        """First observations as `reset` would return them, made from the spaces alone."""
        return self._fresh.example()

    def reset_rows(self, env_info: DictTensor) -> Rows:
        """Resets, and returns the observation as rows that nobody else uses."""
        self._options = self._read_options(env_info)
        everyone = np.arange(len(self._groups))
        first = self._reset(everyone, self._seeds)
        self._seeds = None  # only now: a reset after an interrupted one needs the same seeds
        self._set_running(everyone)
        return first

    def revive_rows(self, which: np.ndarray | None = None) -> tuple[np.ndarray, Rows]:
        """Starts an episode in every environment that has ended.

        Then all run; see `RowEnv.revive_rows`.
        """
        assert self._running is not None
        everyone = np.arange(len(self._groups))
        ended = np.setdiff1d(everyone, self._running)
        first = self._reset(ended, None)
        self._set_running(everyone)
        return self._slots_of(ended), first

    def step_rows(self, action: DictTensor, target: Target | None = None) -> Step:
        """Steps, and returns rows of its own that stay valid until the next step."""
        running, n = check_running(self._running), len(self.agents)
        actions, columns = self._actions.read(action, running.size * n)
        shown: list[Shown | None] = []
        fresh: dict[int, Shown | None] = {}  # first observations, by the row whose episode ended
        is_over = np.zeros(running.size, bool)
        for at, k in enumerate(running.tolist()):
            group = self._groups[k]
            own = group.step(actions[at * n : (at + 1) * n])
            if not any(group.acts):
                is_over[at] = True
                if self._reset_at == STEP:
                    if self._infos:  # the reset may change them
                        own = [one if one is None else one._replace(info=copy.deepcopy(one.info)) for one in own]
                    own = _join(own, group.reset(None, self._options[k]), at * n, fresh)
            shown += own
        after, idle = self._write(shown, columns)
        if fresh:
            rows = np.array(list(fresh), np.int64)
            return Step(after, rows, self._fill(self._fresh, list(fresh.values()), rows), None, idle)
        if self._reset_at == STEP or not is_over.any():
            return Step(after, NO_ROWS, None, None, idle)
        self._set_running(running[~is_over])
        return Step(after, NO_ROWS, None, np.flatnonzero(np.repeat(~is_over, n)), idle)

    def _reset(self, which: np.ndarray, seeds: Sequence[int] | None) -> Rows:
        """Starts episodes in these environments; returns a row for each of their slots."""
        shown: list[Shown | None] = []
        for k in which.tolist():
            shown += self._groups[k].reset(None if seeds is None else seeds[k], self._options[k])
        self._absent = _find(one is None for one in shown)
        return self._fill(self._fresh, shown, self._slots_of(which)).take(np.arange(len(shown)))

    def _write(self, shown: list[Shown | None], actions: dict[str, np.ndarray]) -> tuple[Rows, np.ndarray]:
        """Writes the result of a step; returns the rows and the idle ones.

        Idle rows are those of agents that did not act.
        """
        n, view = len(shown), self._after.view
        after = self._fill(self._after, shown, self._slots)
        steps = [_WAITING if one is None else one for one in shown]
        view["reward"][:n] = reward_array([one.reward for one in steps], self._names_of(self._slots))
        view["terminated"][:n] = [one.terminated for one in steps]
        view["truncated"][:n] = [one.truncated for one in steps]
        np.logical_or(view["terminated"], view["truncated"], out=view["done"])
        view["initial_state"][:n] = [one.is_first for one in steps]
        for key, leaf in self._last_actions.items():
            view[key][:n] = actions[leaf.key]
        self._absent = _find(one is None for one in shown)
        idle = np.flatnonzero(view["initial_state"][:n])
        for key in self._last_actions:
            view[key][idle] = 0
        return after, idle

    def _fill(self, rows: ObservationRows, shown: list[Shown | None], slots: np.ndarray) -> Rows:
        """Writes observations, indexes and infos of these slots."""
        names, view = self._names_of(slots), rows.view
        filled = rows.fill([self._blank if one is None else one.observation for one in shown], names)
        view[PREFIX + AGENT_INDEX][: len(shown)] = self._index[slots]
        if self._infos:
            for row, (name, one) in enumerate(zip(names, shown, strict=True)):
                self._infos.write(view, row, {} if one is None else one.info, name)
        return filled

    def _read_options(self, env_info: DictTensor) -> list[dict[str, Any] | None]:
        found, n = split_options(env_info, self.n_envs()), len(self.agents)
        for slot, options in enumerate(found):
            if options != (first := found[slot - slot % n]):
                raise SpecError(
                    f"env_info: the rows of environment {slot // n} must be equal for all its agents, "
                    f"got {first} and {options}"
                )
        return found[::n]

    def _set_running(self, running: np.ndarray) -> None:
        self._running, self._slots = running, self._slots_of(running)

    def _slots_of(self, environments: np.ndarray) -> np.ndarray:
        n = len(self.agents)
        return (environments[:, None] * n + np.arange(n)).reshape(-1)

    def _names_of(self, slots: np.ndarray) -> list[str]:
        return self._names if slots.size == len(self._names) else [self._names[slot] for slot in slots.tolist()]


# The other columns of the row of an agent that waits.
_WAITING = Shown(None, None)


def _with_index(infos: InfoColumns) -> InfoColumns:
    """Adds the column of the agent's index."""
    dtypes = {key.removeprefix(PREFIX): dtype for key, (_, dtype) in infos.specs.items()}
    if AGENT_INDEX in dtypes:
        raise SpecError(f"info_keys: {AGENT_INDEX!r} is recorded always, leave it out")
    return InfoColumns({**dtypes, AGENT_INDEX: np.int64})


def _join(
    ended: list[Shown | None], first: list[Shown | None], row: int, fresh: dict[int, Shown | None]
) -> list[Shown | None]:
    """Joins the results of a step with the first observations of the next episode.

    Args:
        ended: the agents' results of the step that ended an environment.
        first: the agents' results of the reset.
        row: of the first agent.
        fresh: receives first observations of agents that saw the end, by row.

    Returns:
        The results that follow the step: final observations, and first ones of agents that waited.
    """
    for place, one in enumerate(first):
        if one is not None and ended[place] is not None:
            fresh[row + place] = one
    return [begun if one is None else one for one, begun in zip(ended, first, strict=True)]


def _find(flags: Any) -> np.ndarray:
    """Returns the indexes of true flags, int64 (K,)."""
    return np.array([place for place, flag in enumerate(flags) if flag], np.int64)
