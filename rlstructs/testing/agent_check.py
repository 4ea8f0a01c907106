"""`check_agent`: checks an agent's behaviour in rollouts and replays."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle
import torch

from rlstructs.agent import RL_Agent, evaluation_mode, replay_agent
from rlstructs.checks import MODULE_HINT
from rlstructs.envs.vec_env import VecEnv
from rlstructs.errors import SpecError
from rlstructs.rollout.job_specs import check_batch_first, repeat_row
from rlstructs.seeding import PrivateStreams, WorkerStreams, seed_global_streams
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.tree import equal
from rlstructs.testing.env_source import check_pickles
from rlstructs.testing.recording import CheckedAgent, Moment, Recording, record_rollout, record_script

METHODS = ("initial_state", "__call__", "call_replay", "require_history", "update", "seed", "close")
# Tolerances for floats of a replay, which computes them again, with gradients.
RELATIVE, ABSOLUTE = 1e-3, 1e-5
# The global streams, in the order of `WorkerStreams.roots`.
STREAMS = ("random", "numpy", "torch")
# The default of an argument that may be None.
NOTHING: Any = object()


def check_agent(
    agent: RL_Agent | Callable[..., RL_Agent],
    observation: DictTensor | VecEnv,
    agent_args: Mapping[str, Any] | None = None,
    *,
    agent_info: DictTensor | None = None,
    update: Any = NOTHING,
    n_steps: int = 20,
    seed: int = 0,
    replay: bool = True,
    replayed: Sequence[str] = (),
) -> None:
    """Runs an agent and checks all that `RL_Batcher` and `replay_agent` rely on.

    Raises at the first mistake.

    It checks the methods, also `update` and `close`; the pickling of the factory; keys, dtypes, rows and devices of
    states and outputs; that the seed decides the outputs; that a replay gives the recorded outputs; and that an agent
    with `takes_views` keeps no views of observations and writes into none. It warns if the factory seeds a global
    random stream that the agent then draws from: the agents of all workers would draw the same numbers.

    Args:
        agent: preferably the `create_agent` of a batcher; or an agent, which is copied.
        observation: an example of B rows; or an environment, which is run and not closed.
        agent_args: arguments for a factory.
        agent_info: one row, as for `RL_Batcher`.
        update: an update as for `RL_Batcher.update`; if it is left out, the agent's `update` is not called.
        n_steps, seed: of a rollout; the seed is for the global random streams, and for `agent.seed`.
        replay: whether to check `replay_agent`.
        replayed: names of outputs, such as logits, that must not depend on what the agent did before the replay; not
            of random draws.

    Raises:
        TypeError, SpecError: something is wrong; the message names the method or key, and says what to change.

    Example:
        >>> class Squeezing(RL_Agent):
        ...     def initial_state(self, agent_info, B):
        ...         return DictTensor()
        ...     def __call__(self, state, observation, agent_info, history=None):
        ...         return DictTensor({"action": observation["frame"].sum(1).squeeze()}), state
        >>> check_agent(Squeezing, DictTensor({"frame": torch.rand(3, 4)}))
        Traceback (most recent call last):
        rlstructs.SpecError: Squeezing.__call__ of 1 row: the output 'action' has shape (), expected (1, ...)
    """
    with PrivateStreams()(), contextlib.closing(_AgentCheck(agent, dict(agent_args or {}), agent_info, seed)) as check:
        script = check.check_calls(observation, n_steps)
        rollout = check.check_repetition(script)
        check.check_streams(script)
        if replay:
            check.check_replay(rollout, replayed)
        if update is not NOTHING:
            check.check_update(update, script)
        check.check_close()


class _AgentCheck:
    """Makes equal agents, as workers do, and compares their outputs."""

    def __init__(self, agent: Any, agent_args: dict[str, Any], agent_info: DictTensor | None, seed: int) -> None:
        self._make, self._info, self._seed = _factory(agent, agent_args), agent_info, seed
        self._open: list[Any] = []
        seed_global_streams(seed, seed)
        first = self._make()
        self._open.append(first)
        self._name = type(first).__name__
        for method in METHODS:
            if not callable(getattr(first, method, None)):
                hint = MODULE_HINT if isinstance(first, torch.nn.Module) else ": subclass rlstructs.RL_Agent"
                raise TypeError(f"{self._name} has no method {method}(){hint}")

    def check_calls(self, source: DictTensor | VecEnv, n_steps: int) -> list[Moment]:
        """Runs an agent on a source, then on fewer of its rows.

        It takes 1, 2 and all rows. Returns what the agent saw on the source.
        """
        agent = self._make_checked()
        script = record_script(agent, source, self._info, n_steps)
        first = script[0].observation
        self._check_batch_first(first)
        for n in sorted({1, 2, first.n_elems()}):
            rows = torch.arange(n, device="cpu")
            moment = first.index(rows % first.n_elems())
            record_rollout(agent, [Moment(rows, moment, moment)], self._info)
        return script

    def _check_batch_first(self, observation: DictTensor) -> None:
        """Checks that no state has the shape (layers, B, ...).

        It looks right if there are B layers.
        """
        agent, info = self._make_seeded(), repeat_row(self._info, observation.n_elems())
        with torch.no_grad(), evaluation_mode(agent):
            state = agent.initial_state(info.clone(), observation.n_elems())
            check_batch_first(self._name, agent, state.to(observation.device() or "cpu"), observation, info)

    def check_repetition(self, script: list[Moment]) -> Recording:
        """Checks that two equal agents act equally in two rollouts; returns the first rollout."""
        rollouts = self._record_two(script)
        if (found := _first_difference(rollouts, self._record_two(script))) is not None:
            raise SpecError(
                f"{self._name}: two agents that were made and seeded alike gave different outputs, first {found}; draw "
                "from torch's global generator, or from one of your own that `seed(seed)` seeds"
            )
        if not self._make_checked().takes_views:
            return rollouts[0]
        if (found := _first_difference(rollouts, self._record_two(script, overwrite=True))) is not None:
            raise SpecError(
                f"{self._name}: its output {found} depends on an observation of the previous rollout, which has been "
                "overwritten since; clone what the agent keeps, or leave out takes_views"
            )
        return rollouts[0]

    def check_streams(self, script: list[Moment]) -> None:
        """Warns if an agent draws from a global stream seeded without the worker's seed."""
        self._make_seeded(self._seed + 1)
        elsewhere = WorkerStreams.of_this_process().roots
        agent = self._make_checked()
        before = WorkerStreams.of_this_process().roots
        record_rollout(agent, script, self._info)
        after = WorkerStreams.of_this_process().roots
        states = zip(STREAMS, elsewhere, before, after, strict=True)
        if shared := [name for name, other, first, last in states if other == first != last]:
            warnings.warn(
                f"{self._name}: draws from the global stream of {' and '.join(shared)}, which is seeded as the agent "
                "is made, so the agents of all workers draw the same numbers; seed a stream only where it is put back "
                "afterwards, torch's in `with torch.random.fork_rng(devices=[]):`",
                stacklevel=3,
            )

    def check_replay(self, rollout: Recording, replayed: Sequence[str]) -> None:
        """Checks that a replay gives the recorded outputs.

        Also if the agent has acted before.
        """
        keys = list(rollout.outputs[0].keys())
        if lacking := sorted(set(replayed) - set(keys)):
            raise SpecError(f"check_agent: replayed names {lacking}, but the agent's outputs are {keys}")
        fresh = self._make_seeded()
        CheckedAgent(fresh, self._name).begin(repeat_row(self._info, rollout.n_rows), rollout.n_rows)
        why = "call_replay has to start from the recorded state and see what the agent saw"
        self._compare(fresh, rollout, keys, why)
        used = self._make_seeded()
        record_rollout(CheckedAgent(used, self._name), rollout.script, self._info)
        self._compare(used, rollout, replayed, "it depends on something that the agent keeps outside its state")

    def check_update(self, info: Any, script: list[Moment]) -> None:
        """Checks that an agent takes an update and acts afterwards."""
        agent = self._make_seeded()
        agent.update(cloudpickle.loads(cloudpickle.dumps(info)))
        record_rollout(CheckedAgent(agent, self._name), script[:1], self._info)

    def check_close(self) -> None:
        """Checks that agents can be closed."""
        while self._open:
            try:
                self._open.pop().close()
            except Exception as error:
                raise SpecError(f"{self._name}.close raised {error!r}") from error

    def close(self) -> None:
        """Closes the agents that are still open after an error."""
        while self._open:
            with contextlib.suppress(Exception):
                self._open.pop().close()

    def _make_seeded(self, seed: int | None = None) -> Any:
        seed = self._seed if seed is None else seed
        seed_global_streams(seed, seed)
        agent = self._make()
        self._open.append(agent)
        agent.seed(seed)
        return agent

    def _make_checked(self) -> CheckedAgent:
        return CheckedAgent(self._make_seeded(), self._name)

    def _record_two(self, script: list[Moment], overwrite: bool = False) -> list[Recording]:
        agent = self._make_checked()
        return [record_rollout(agent, script, self._info, overwrite) for _ in range(2)]

    def _compare(self, agent: Any, rollout: Recording, keys: Sequence[str], why: str) -> None:
        with evaluation_mode(agent):
            outputs = replay_agent(agent, rollout.trajectories())
        for key in keys:
            if key not in outputs:
                raise SpecError(f"{self._name}: replay_agent gives no {key!r}, which is an output of the agent")
            for t in range(outputs.n_timesteps()):
                if not _is_close(rollout.outputs[t][key], outputs[key][:, t]):
                    message = f"replay_agent gives a different {key!r} at t={t} than the agent did"
                    raise SpecError(f"{self._name}: {message}; {why}")


def _factory(agent: Any, agent_args: dict[str, Any]) -> Callable[[], Any]:
    """Returns a function that makes agents as a worker does.

    From a pickled factory or a pickled agent.
    """
    if isinstance(agent, type) or not hasattr(agent, "initial_state"):
        if isinstance(agent, torch.nn.Module):
            raise TypeError(f"check_agent: needs an agent, got {type(agent).__name__}{MODULE_HINT}")
        if not callable(agent):
            raise TypeError(f"check_agent: needs an agent, or a factory of agents, got {type(agent).__name__}")
        check_pickles("create_agent", agent)
        for key, value in agent_args.items():
            check_pickles(f"agent_args[{key!r}]", value)
        pickled = cloudpickle.dumps((agent, agent_args))

        def make() -> Any:
            create, arguments = cloudpickle.loads(pickled)
            return create(**arguments)

        return make
    if agent_args:
        raise SpecError(f"check_agent: agent_args need a factory, got an agent ({type(agent).__name__})")
    try:
        copied = cloudpickle.dumps(agent)
    except Exception as error:
        name = type(agent).__name__
        raise TypeError(f"{name} cannot be copied ({error!r}): pass a factory and agent_args") from error
    return lambda: cloudpickle.loads(copied)


def _is_close(recorded: torch.Tensor, replayed: torch.Tensor) -> bool:
    if recorded.shape != replayed.shape or recorded.dtype != replayed.dtype:
        return False
    if recorded.dtype.is_floating_point or recorded.dtype.is_complex:
        return torch.allclose(recorded, replayed.detach(), RELATIVE, ABSOLUTE, equal_nan=True)
    return equal(recorded, replayed)


def _first_difference(rollouts: list[Recording], others: list[Recording]) -> str | None:
    for number, (mine, theirs) in enumerate(zip(rollouts, others, strict=True)):
        for t, (one, other) in enumerate(zip(mine.outputs, theirs.outputs, strict=True)):
            for key in one:
                if not equal(one[key], other[key]):
                    return f"{key!r} at t={t} of rollout {number}"
    return None
