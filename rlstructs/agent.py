"""Agents, and how they are replayed over trajectories."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, overload

import torch

from rlstructs.checks import MODULE_HINT, check_methods
from rlstructs.copying import deep_copy
from rlstructs.errors import SpecError
from rlstructs.frameworks.torch import as_device
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.packed import PackedTrajectories
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import Trajectories
from rlstructs.structures.tree import TensorMap, check_same_keys, show
from rlstructs.workers.public_names import set_module

# Longer lists and dicts in an agent are not searched for networks: they hold data, and the search would slow rollouts.
MOST_PARTS = 100


@set_module("rlstructs")
class RL_Agent:
    """Acts on a batch of environments at once; subclass it.

    Row j of every argument and result belongs to the same environment. Workers call it without
    gradients, and with its networks in evaluation mode (see `keeps_modes`). `agent_info` lies on the CPU, everything
    else on the batcher's device. `rlstructs.testing.check_agent` checks one.

    Example:
        >>> class Alternating(RL_Agent):
        ...     def initial_state(self, agent_info, B):
        ...         return DictTensor({"n": torch.zeros(B, dtype=torch.int64)})
        ...     def __call__(self, state, observation, agent_info, history=None):
        ...         n = torch.where(observation["initial_state"], 0, state["n"])
        ...         return DictTensor({"action": n % 2}), DictTensor({"n": n + 1})
        >>> agent = Alternating()
        >>> observation = DictTensor({"initial_state": torch.tensor([True, False])})
        >>> output, state = agent(DictTensor({"n": torch.tensor([5, 5])}), observation, DictTensor())
        >>> output["action"], state["n"]
        (tensor([0, 1]), tensor([1, 6]))
    """

    #: True saves a copy of the observation at every step: `__call__` gets views of what is recorded. Set it only if
    #: `__call__` neither writes to its arguments, except the state, nor keeps them, in the state or elsewhere. A class
    #: that defines its own `__call__` has to set it again.
    takes_views: ClassVar[bool] = False

    #: False acts in evaluation mode: while workers and `RL_Batcher.evaluate` call the agent, the `torch.nn.Module` that
    #: it is, and those in its attributes, in lists and dicts there and in agents there, do not train, so that dropout
    #: is off and batch norms use their running statistics; afterwards they are in the mode that they were in. True
    #: leaves them in their own mode.
    keeps_modes: bool = False

    def initial_state(self, agent_info: DictTensor, B: int) -> DictTensor:
        """Returns the state before the first step after a reset.

        `RL_Batcher.reset` resets environments, and so may workers between two rollouts.

        Args:
            agent_info: B rows, or empty.
            B: number of environments that were reset.

        Returns:
            B rows, or an empty DictTensor for an agent without state.
        """
        raise NotImplementedError(f"{type(self).__name__} must define initial_state(agent_info, B)")

    def __call__(
        self,
        state: DictTensor,
        observation: DictTensor,
        agent_info: DictTensor,
        history: TemporalDictTensor | None = None,
    ) -> tuple[DictTensor, DictTensor]:
        """Acts for one step.

        Args:
            state: B rows. Where an environment resets itself in a rollout, the agent has to reset its state: replace
                the rows where `observation["initial_state"]`, for example with `masked_dicttensor`.
            observation: B rows.
            agent_info: B rows, or empty.
            history: the steps of this rollout so far, B x t, if `require_history`.

        Unless the class sets `takes_views`, all arguments belong to the agent: it may keep them and write to them.

        Returns:
            The output, with the `action` for the environment and anything else to be recorded; and the next state, with
            the keys of `state`. B rows each.
        """
        raise NotImplementedError(f"{type(self).__name__} must define __call__(state, observation, agent_info)")

    def call_replay(
        self, trajectories: Trajectories, t: int, state: DictTensor | None
    ) -> tuple[DictTensor, DictTensor]:
        """Replays one step: returns what the agent would do at time t.

        Args:
            trajectories: B trajectories; rows that have ended before t take part, so mask their results.
            t: the timestep.
            state: the state returned at t - 1; None at t = 0, for the recorded state.

        Returns:
            The output and the next state, as `__call__` returns them.
        """
        if state is None:
            if t != 0:
                raise SpecError(f"call_replay: a state is needed at t={t}")
            # Copies, here and below: agents may write to them, and the trajectories may be replayed again.
            state = trajectories.info.truncate_key("agent_state/").clone()
        steps, is_shown = trajectories.trajectories, takes_views(self)
        info = trajectories.info.truncate_key("agent_info/").to("cpu")
        observation = steps.temporal_index(t).truncate_key("observation/")
        if not is_shown:
            info, observation = info.clone(), observation.clone()
        if self.require_history():
            history = steps.temporal_slice(0, t)
            return self(state, observation, info, history=history if is_shown else history.clone())
        return self(state, observation, info)

    def require_history(self) -> bool:
        """Whether `__call__` needs the steps of the rollout so far; False by default."""
        return False

    def update(self, info: Any) -> None:
        """Takes what `RL_Batcher.update` was given, usually new weights."""
        raise NotImplementedError(f"{type(self).__name__} must define update(info)")

    def seed(self, seed: int) -> None:
        """Seeds the agent's own random streams; the global streams are seeded before.

        It is called when the agent is made, with the worker's entry of `agent_seeds` or else of `seeds`; for a copy
        that is evaluated; and when the batcher loads a state.
        """

    def copy_for_evaluation(self) -> RL_Agent:
        """Returns an agent that acts like this one, for `RL_Batcher.evaluate`.

        `evaluate` seeds, runs and closes it.

        The default is `copy.deepcopy`. Define it if the agent holds something that cannot be copied, such as a lock, an
        open file or a tensor with a history, or something that the copy may share. The copy must not change this agent,
        nor close what this agent still needs.

        Raises:
            TypeError: something in the agent cannot be copied; the message names it.
        """
        return deep_copy(self)

    def close(self) -> None:
        """Frees the resources of the agent."""


def takes_views(agent: Any) -> bool:
    """Whether the agent's class sets `takes_views`.

    Only the class that defines `__call__`, and classes derived from it, count.
    """
    for cls in type(agent).__mro__:
        if "takes_views" in vars(cls):
            return vars(cls)["takes_views"] is True
        if "__call__" in vars(cls):
            break
    return False


@contextlib.contextmanager
def evaluation_mode(agent: Any) -> Iterator[None]:
    """Puts the agent's networks in evaluation mode in a `with` block.

    Networks of an agent with `keeps_modes` are left alone.
    """
    # The flag alone, not `eval()`: it can be put back, part by part, and a network may be the trainer's own.
    parts = [part for network in _networks(agent) for part in network.modules() if getattr(part, "training", False)]
    for part in parts:
        part.training = False
    try:
        yield
    finally:
        for part in parts:
            part.training = True


def _networks(agent: Any) -> Iterator[torch.nn.Module]:
    """Yields the networks that an agent is or holds."""
    left, seen = [agent], set()
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        is_agent = value is agent or isinstance(value, RL_Agent)
        if is_agent and getattr(value, "keeps_modes", False):
            continue
        if isinstance(value, torch.nn.Module):
            yield value
        if is_agent:
            left += getattr(value, "__dict__", {}).values()
        elif isinstance(value, (list, tuple, dict)) and len(value) <= MOST_PARTS:
            left += value.values() if isinstance(value, dict) else value


@set_module("rlstructs")
class RL_Agent_CheckDevice(RL_Agent):
    """Checks the devices of an agent's arguments and results.

    Other methods and attributes are the agent's own.

    Args:
        agent: the agent; `.agent`.
        device: required of states, observations, outputs and trajectories; `.device`.

    Raises:
        SpecError: in a call, something is on another device; the message names it.
    """

    def __init__(self, agent: RL_Agent, device: torch.device | str) -> None:
        if isinstance(agent, torch.nn.Module) and not hasattr(agent, "initial_state"):
            raise TypeError(f"agent must be an RL_Agent, got {type(agent).__name__}{MODULE_HINT}")
        self.agent = agent
        self.device = as_device(device)

    def initial_state(self, agent_info: DictTensor, B: int) -> DictTensor:
        """Calls the agent's own method between checks."""
        self._check("agent_info", agent_info, torch.device("cpu"))
        state = self.agent.initial_state(agent_info, B)
        self._check("the initial state", state, self.device)
        return state

    def __call__(
        self,
        state: DictTensor,
        observation: DictTensor,
        agent_info: DictTensor,
        history: TemporalDictTensor | None = None,
    ) -> tuple[DictTensor, DictTensor]:
        """Calls the agent's own method between checks."""
        self._check("agent_info", agent_info, torch.device("cpu"))
        for name, value in (("state", state), ("observation", observation), ("history", history)):
            self._check(name, value, self.device)
        if history is None:
            return self._check_result(self.agent(state, observation, agent_info))
        return self._check_result(self.agent(state, observation, agent_info, history=history))

    def call_replay(
        self, trajectories: Trajectories, t: int, state: DictTensor | None
    ) -> tuple[DictTensor, DictTensor]:
        """Calls the agent's own method between checks."""
        self._check("trajectories", trajectories.trajectories, self.device)
        self._check("state", state, self.device)
        return self._check_result(self.agent.call_replay(trajectories, t, state))

    def require_history(self) -> bool:
        """Calls the agent's own method."""
        return self.agent.require_history()

    def update(self, info: Any) -> None:
        """Calls the agent's own method."""
        self.agent.update(info)

    def seed(self, seed: int) -> None:
        """Calls the agent's own method, if it has one."""
        if callable(getattr(self.agent, "seed", None)):
            self.agent.seed(seed)

    def copy_for_evaluation(self) -> RL_Agent_CheckDevice:
        """The agent's own copy, with the same checks."""
        return RL_Agent_CheckDevice(copy_agent(self.agent), self.device)

    def close(self) -> None:
        """Calls the agent's own method."""
        self.agent.close()

    def _check_result(self, result: tuple[DictTensor, DictTensor]) -> tuple[DictTensor, DictTensor]:
        self._check("the output", result[0], self.device)
        self._check("the next state", result[1], self.device)
        return result

    def _check(self, name: str, value: DictTensor | TemporalDictTensor | None, device: torch.device) -> None:
        for key, tensor in () if value is None else value.items():
            if tensor.device != device:
                raise SpecError(f"{name}: {key!r} is on {tensor.device}, expected {device}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "agent":  # missing while the object is being copied
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.agent, name)


def copy_agent(agent: Any) -> Any:
    """Copies an agent with its `copy_for_evaluation`, or deeply if it has no such method.

    Raises:
        TypeError: the method returns no other agent, or something in the agent cannot be copied.
    """
    if not callable(getattr(agent, "copy_for_evaluation", None)):
        return deep_copy(agent)
    made, name = agent.copy_for_evaluation(), f"{type(agent).__name__}.copy_for_evaluation"
    if made is agent:
        raise TypeError(f"{name} must return another agent, it returned the agent itself, which must not change")
    check_methods(f"{name} must return an RL_Agent", made, "initial_state", "__call__", "require_history", "close")
    return made


@overload
def replay_agent(
    agent: RL_Agent, trajectories: Trajectories, replay_method_name: str = "call_replay"
) -> TemporalDictTensor: ...


@overload
def replay_agent(
    agent: RL_Agent, trajectories: PackedTrajectories, replay_method_name: str = "call_replay"
) -> DictTensor: ...


def replay_agent(
    agent: RL_Agent, trajectories: Trajectories | PackedTrajectories, replay_method_name: str = "call_replay"
) -> TemporalDictTensor | DictTensor:
    """Replays an agent over trajectories, step by step; gradients flow to its parameters.

    Args:
        agent: the agent.
        trajectories: B trajectories, with `agent_state/` in `info`, as from the batcher; or a pack of them, for an
            agent that has a method `replay_packed(pack) -> output`, which computes all N steps in one call.
        replay_method_name: name of a `method(trajectories, t, state) -> (output, state)` like `call_replay`; with a
            pack, of one like `replay_packed`.

    Returns:
        The outputs, (B, max(lengths), ...), on the device of `trajectories`, with their lengths. Outputs in the padding
        are computed from padding: mask them. If no trajectory has a step, as when a worker was lost, they are
        (B, 0, ...), with the keys and dtypes of other replays, and a loss of them has gradients of 0. Those
        of a pack are (N, ...).

    Raises:
        MissingKeyError, SpecError: the keys of an output differ from those at step 0, or one of a pack is not (N, ...).
        TypeError: the agent takes no packs, or returns no mapping of one.
    """
    if isinstance(trajectories, PackedTrajectories):
        return _replay_pack(agent, trajectories, replay_method_name)
    method, state, outputs = _find_method(agent, replay_method_name), None, []
    lengths = trajectories.lengths.clone()
    n_timesteps = int(lengths.max()) if lengths.numel() else 0
    for t in range(n_timesteps):
        output, state = method(trajectories, t, state)
        # Copies: the agent may return its state as output, and write to it later.
        outputs.append({key: tensor.clone() for key, tensor in output.items()})
        check_same_keys(f"replay_agent: the output at t={t}", outputs[0], output.keys())
    if not outputs:
        return TemporalDictTensor(_replay_nothing(method, trajectories), lengths)
    # Stacked once, because writing steps into a zero tensor would make backward super-linear in T.
    stacked = {key: torch.stack([output[key] for output in outputs], dim=1).to(lengths.device) for key in outputs[0]}
    return TemporalDictTensor(stacked, lengths)


def _replay_pack(agent: Any, pack: PackedTrajectories, name: str) -> DictTensor:
    name = "replay_packed" if name == "call_replay" else name
    if not hasattr(agent, name):
        raise TypeError(f"replay_agent: {type(agent).__name__} takes no packs, it has no method {name}(pack)")
    output = getattr(agent, name)(pack)
    if not isinstance(output, (Mapping, TensorMap)):
        raise TypeError(f"replay_agent: {name} must return a mapping of names to tensors, got {type(output).__name__}")
    output = DictTensor(dict(output.items()))
    for key, tensor in output.items():
        if tensor.ndim < 1 or len(tensor) != pack.n_elems():
            raise SpecError(f"replay_agent: {key!r} of {name} is {show(tensor)}, expected ({pack.n_elems()}, ...)")
    return output


def _replay_nothing(method: Callable[..., Any], trajectories: Trajectories) -> dict[str, torch.Tensor]:
    """Returns the outputs (B, 0, ...) of a replay without steps.

    Replays one step of padding to find the keys and shapes.
    """
    n, steps = trajectories.n_elems(), trajectories.trajectories
    rows = max(1, n)  # a policy cannot be drawn from without a row
    info = {key: tensor if n else tensor.new_zeros((1, *tensor.shape[1:])) for key, tensor in trajectories.info.items()}
    padding = {key: tensor.new_zeros((rows, 1, *tensor.shape[2:])) for key, tensor in steps.items()}
    lengths = trajectories.lengths.new_zeros(rows)
    try:
        output, _ = method(Trajectories(DictTensor(info), TemporalDictTensor(padding, lengths)), 0, None)
    except Exception:  # padding need not make sense to an agent: its mask allows nothing, for example
        names = [key for key in steps if key.startswith("action/")]
        recorded = {key.removeprefix("action/"): steps[key][:, :0].detach() for key in names}
        is_traced = torch.is_grad_enabled()
        return {key: t.requires_grad_(is_traced and t.is_floating_point()) for key, t in recorded.items()}
    return {key: tensor.to(lengths.device)[:n, None][:, :0] for key, tensor in output.items()}


def replay_agent_stateless(agent: RL_Agent, trajectories: Trajectories, replay_method_name: str) -> Any:
    """Calls `agent.<replay_method_name>(trajectories)` once for all steps; returns its result."""
    return _find_method(agent, replay_method_name)(trajectories)


def _find_method(agent: Any, name: str) -> Callable[..., Any]:
    """Returns the agent's replay method; raises TypeError for a network without one."""
    if isinstance(agent, torch.nn.Module) and not hasattr(agent, name):
        raise TypeError(f"agent: {type(agent).__name__} has no {name}{MODULE_HINT}")
    return getattr(agent, name)  # type: ignore[no-any-return]


class EmptyHistory(TemporalDictTensor):
    """A history of no steps, for an agent that has not acted yet.

    It has every key: one that is not known is an empty tensor (B, 0).
    """

    @classmethod
    def of(cls, observation: DictTensor) -> EmptyHistory:
        """A history of as many environments as the observation has rows."""
        steps = {key: tensor[:, None][:, :0] for key, tensor in observation.items()}
        following = {f"_observation/{key}": tensor for key, tensor in steps.items()}
        # Actions have the dtype and the shape of `last_action`.
        actions = {
            f"action/{key.removeprefix('last_')}": tensor
            for key, tensor in steps.items()
            if key.partition("/")[0] == "last_action"
        }
        return cls({f"observation/{key}": tensor for key, tensor in steps.items()} | actions | following)

    def __getitem__(self, key: str) -> torch.Tensor:
        return super().__getitem__(key) if key in self else torch.zeros(self.n_elems(), 0, device=self.device())
