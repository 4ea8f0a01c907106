"""`ModuleAgent`: a network as an agent."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch.distributions import Bernoulli, Categorical, Distribution, Independent, Normal

from rlstructs.agent import RL_Agent
from rlstructs.envs.spaces import list_leaves
from rlstructs.errors import SpecError
from rlstructs.shared.module_state import copy_plain
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.tree import show
from rlstructs.workers.failures import add_note
from rlstructs.workers.public_names import set_module

SUPPORTED = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box)


@set_module("rlstructs")
class ModuleAgent(RL_Agent):
    """Draws actions from a network's policy.

    Its output holds `action`, and `log_prob` (B,) where the policy is a distribution.

    Args:
        module: maps observations to a policy: for a Discrete space logits (B, n), for a MultiDiscrete one the logits of
            all its numbers side by side (B, sum(nvec)), for a MultiBinary one a logit for each bit (B, ...); for a Box
            the action, such as a mean (B, ...); or, for any of them, a `torch.distributions.Distribution`. A copy of it
            acts, which `RL_Batcher.update(module)` updates.
        action_space: Discrete, MultiDiscrete, MultiBinary or Box.
        observation_space: if it is a Dict or Tuple, the module gets a dict of its entries, named as in observations;
            otherwise, and for None, it gets `observation["frame"]`. Where it raises, it is called again without the
            rows that only reset (autoreset NEXT_STEP), whose actions nobody uses.
        device: the device of the observations.
        training: whether the module acts in training mode, as for noise that explores; otherwise it acts in evaluation
            mode, in which dropout is off and batch norms use their running statistics. The mode in which it is given
            does not matter, and stays as it is.

    Raises:
        TypeError: `module` is not a `torch.nn.Module`, or cannot be copied.
        SpecError: the action space is not supported.

    Example:
        >>> agent = ModuleAgent(torch.nn.Linear(4, 2), spaces.Discrete(2))
        >>> output, _ = agent(DictTensor(), DictTensor({"frame": torch.zeros(3, 4)}), DictTensor())
        >>> output["action"].shape, output["log_prob"].shape
        (torch.Size([3]), torch.Size([3]))
    """

    def __init__(
        self,
        module: torch.nn.Module,
        action_space: gymnasium.Space[Any],
        observation_space: gymnasium.Space[Any] | None = None,
        device: torch.device | str = "cpu",
        training: bool = False,
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"ModuleAgent: module must be a torch.nn.Module, got {type(module).__name__}")
        if not isinstance(action_space, SUPPORTED):
            kinds = ", ".join(kind.__name__ for kind in SUPPORTED)
            raise SpecError(f"ModuleAgent: an action space must be one of {kinds}, got {action_space}")
        self.module: torch.nn.Module = copy_plain(module).to(device).train(training)
        self.keeps_modes = training
        # Of a distribution: torch draws bits as floats.
        self._takes_floats = isinstance(action_space, spaces.MultiBinary) or action_space.dtype.kind == "f"
        self._last: DictTensor | None = None
        self._space, self._keys = action_space, None
        if isinstance(observation_space, (spaces.Dict, spaces.Tuple)):
            self._keys = [leaf.key for leaf in list_leaves(observation_space, "observation")]
        self._start = np.asarray(getattr(action_space, "start", 0))  # of Discrete and MultiDiscrete
        if isinstance(action_space, spaces.MultiDiscrete):
            self._sizes = action_space.nvec.reshape(-1).tolist()

    def initial_state(self, agent_info: DictTensor, B: int) -> DictTensor:
        """An empty state."""
        return DictTensor()

    def __call__(
        self,
        state: DictTensor,
        observation: DictTensor,
        agent_info: DictTensor,
        history: TemporalDictTensor | None = None,
    ) -> tuple[DictTensor, DictTensor]:
        """Draws actions, B rows, from torch's global generator.

        Raises:
            SpecError: the module's output does not fit the action space.
        """
        # A distribution is made only where a subclass asks for it: making one takes as long as the network.
        find_policy = self._run if type(self).policy is ModuleAgent.policy else self.policy
        try:
            policy = find_policy(observation)
        except Exception:
            running = _find_running(observation)
            if running is None or (self._last is None and not running.numel()):
                raise
            # The rows whose episodes have ended only reset (autoreset NEXT_STEP): nobody uses their actions, and their
            # observations may be invalid for the module, for example a mask that allows nothing.
            if self._last is not None and not running.numel():
                return self._last.index(torch.zeros_like(observation["done"], dtype=torch.int64)), state
            policy = find_policy(observation.index(running))
        self._last = self._draw(policy, observation.n_elems())
        return self._last, state

    def _draw(self, policy: Distribution | Logits | torch.Tensor, n: int) -> DictTensor:
        """Draws n rows from a policy; returns the output."""
        if isinstance(policy, torch.Tensor):
            return DictTensor({"action": policy})
        try:
            action, log_prob = policy.draw() if isinstance(policy, Logits) else draw(policy)
        except (RuntimeError, ValueError) as error:
            policy = policy.distribution() if isinstance(policy, Logits) else policy
            if (why := _find_nan(policy, self.module)) is not None:
                raise SpecError(f"agent: {why}") from error
            raise
        if action.shape != (n, *self._space.shape) or (action.is_floating_point() and not self._takes_floats):
            wanted = f"{(n, *self._space.shape)} {'floats' if self._takes_floats else 'integers'} for {self._space}"
            raise SpecError(f"agent: a {type(policy).__name__} of the module gave {show(action)}, expected {wanted}")
        if log_prob.ndim > 1:
            log_prob = log_prob.flatten(1).sum(1)
        if self._start.any():
            action = action + torch.as_tensor(self._start, device=action.device)
        if isinstance(self._space, spaces.MultiBinary):
            action = action.to(torch.int8)
        return DictTensor.trusted({"action": action, "log_prob": log_prob})

    def policy(self, observation: DictTensor) -> Distribution | torch.Tensor:
        """Returns the policy for B observations: a distribution, or actions (B, ...).

        Actions of a distribution for a Discrete or MultiDiscrete space count from 0.
        """
        found = self._run(observation)
        return found.distribution() if isinstance(found, Logits) else found

    def _run(self, observation: DictTensor) -> Distribution | Logits | torch.Tensor:
        """Runs the module on B observations.

        Returns its distribution, its logits, or the actions (B, ...).
        """
        inputs = observation["frame"] if self._keys is None else {key: observation[key] for key in self._keys}
        try:
            given = self.module(inputs)
        except Exception as error:
            found = show(inputs) if isinstance(inputs, torch.Tensor) else {key: show(inputs[key]) for key in inputs}
            seen = [inputs] if isinstance(inputs, torch.Tensor) else [*inputs.values()]
            if (why := _find_other_dtype(seen, self.module)) is not None:
                raise SpecError(f"agent: {why}; the module was called with observations {found}") from error
            add_note(error, f"the module of the agent was called with observations {found}")
            raise
        space, n = self._space, observation.n_elems()
        if isinstance(given, Distribution):
            return given
        if isinstance(space, spaces.Discrete):
            return Logits(_check_shape(given, (n, int(space.n)), space))
        if isinstance(space, spaces.MultiDiscrete):
            given = _check_shape(given, (n, sum(self._sizes)), space)
            return Logits(_pad(given, tuple(self._sizes)).reshape(n, *space.shape, max(self._sizes)))
        given = _check_shape(given, (n, *space.shape), space)
        return Logits(given, are_bits=True) if isinstance(space, spaces.MultiBinary) else given

    def exploration_hint(self, observation: DictTensor) -> str | None:
        """Returns a hint if the module never explores a Box, otherwise None.

        It never does if it returns the same actions twice.
        """
        if not isinstance(self._space, spaces.Box):
            return None
        first, second = self.policy(observation), self.policy(observation)
        if isinstance(first, Distribution) or isinstance(second, Distribution) or not torch.equal(first, second):
            return None
        return (
            "agent: the module returns an action for its Box, always the same one for an observation, so that nothing "
            "explores: return a distribution, such as torch.distributions.Normal(mean, std), to draw from it"
        )

    def update(self, info: Any) -> None:
        """Loads a state dict into the module."""
        self.module.load_state_dict(info)


class Logits(NamedTuple):
    """The logits of a policy of which no distribution was made.

    Attributes:
        logits: of the values of each number, (B, ..., n), or of each bit, (B, ...).
        are_bits: whether they are those of bits.
    """

    logits: torch.Tensor
    are_bits: bool = False

    def distribution(self) -> Distribution:
        """Makes the distribution."""
        kind = Bernoulli if self.are_bits else Categorical
        return kind(logits=self.logits, validate_args=False)

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws like `distribution().sample()`; returns actions and log-probabilities, of one number or bit each."""
        if self.are_bits:
            return _draw_bits(self.logits, self.logits.sigmoid())
        given = self.logits if self.logits.is_floating_point() else self.logits.to(torch.get_default_dtype())
        logits = given.log_softmax(-1)
        return _draw_numbers(logits, logits.exp())


def draw(policy: Distribution) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws like `policy.sample()`, in fewer calls.

    Returns actions, and log-probabilities (B, ...) to be summed.
    """
    base: Any = policy
    while type(base) is Independent:  # whose log-probabilities are sums
        base = base.base_dist
    if type(base) is Categorical and "probs" not in vars(base):  # given probabilities may be invalid
        return _draw_numbers(base.logits, base.probs)
    if type(base) is Bernoulli:
        return _draw_bits(base.logits, base.probs)
    if type(base) is Normal:
        action = torch.normal(base.loc.detach(), base.scale.detach())
        deviation = (action - base.loc) / base.scale
        return action, deviation.square() * -0.5 - base.scale.log() - math.log(math.sqrt(2 * math.pi))
    action = policy.sample()
    return action, policy.log_prob(action)


def _draw_numbers(logits: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws a number in each row of normalised logits and probabilities (..., n).

    Raises:
        ValueError: a row has NaN.
    """
    # As `torch.multinomial` does it, with the same random numbers and fewer checks.
    drawn = (probs.detach() / torch.empty_like(probs).exponential_()).argmax(-1, keepdim=True)
    log_prob = logits.gather(-1, drawn).squeeze(-1)
    if math.isnan(log_prob.detach().sum().item()):  # of the numbers of a row, NaN is the largest
        raise ValueError("logits or probabilities are NaN")
    return drawn.squeeze(-1), log_prob


def _draw_bits(logits: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws bits, as floats."""
    bits = torch.bernoulli(probs.detach())
    return bits, -torch.nn.functional.binary_cross_entropy_with_logits(logits, bits, reduction="none")


def _pad(logits: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """Splits logits (B, sum(sizes)) by number, (B, k, max(sizes)).

    Values that a number lacks have probability 0.
    """
    if min(sizes) == max(sizes):
        return logits
    return torch.nn.functional.pad(logits, (0, 1), value=-torch.inf)[:, _find_places(sizes)]


@functools.lru_cache
def _find_places(sizes: tuple[int, ...]) -> torch.Tensor:
    """Returns the columns of each number's values in a row of logits.

    int64 (k, max(sizes)), padded with `sum(sizes)`.
    """
    places, first = torch.full((len(sizes), max(sizes)), sum(sizes), device="cpu"), 0
    for row, size in zip(places, sizes, strict=True):
        row[:size] = torch.arange(first, first + size)
        first += size
    return places


def _find_running(observation: DictTensor) -> torch.Tensor | None:
    """Returns rows to show in place of finished episodes, int64 (B,).

    Each row is replaced by a running episode's, unless it runs itself. Empty if no episode runs, None if none has
    ended.
    """
    if "done" not in observation or (done := observation["done"]).ndim != 1 or not done.any():
        return None
    running = done.logical_not().nonzero()[:, 0]
    return torch.where(done, running[0], torch.arange(len(done), device=done.device)) if running.numel() else running


def _find_nan(policy: Distribution, module: torch.nn.Module) -> str | None:
    """Describes NaN in a distribution: its row, and the module's parameters.

    None if there is no NaN.
    """
    for name in ("logits", "probs", "loc", "scale"):
        values = getattr(policy, name, None)
        if isinstance(values, torch.Tensor) and values.isnan().any():
            row = int(values.isnan().nonzero()[0][0])
            lost = [key for key, tensor in module.named_parameters() if tensor.isnan().any()]
            where = f"its parameters {lost} hold NaN" if lost else "its parameters hold none: look at what it computes"
            return f"the module's {name} are NaN in row {row}; {where}"
    return None


def _find_other_dtype(seen: list[torch.Tensor], module: torch.nn.Module) -> str | None:
    """Describes different float dtypes of observations and the module's parameters.

    None if they agree.
    """
    given = {tensor.dtype for tensor in seen if tensor.is_floating_point()}
    own = {tensor.dtype for tensor in module.parameters() if tensor.is_floating_point()}
    if not given or not own or given & own:
        return None
    names = [" and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) for dtypes in (own, given)]
    return (
        f"the module's parameters are {names[0]}, the observations are {names[1]}: give it as "
        f"module.to({next(iter(given))}), or convert them in its forward"
    )


def _check_shape(given: Any, shape: tuple[int, ...], space: gymnasium.Space[Any]) -> torch.Tensor:
    """Returns the module's output; raises SpecError unless it has this shape.

    It must be a tensor.
    """
    if not isinstance(given, torch.Tensor) or tuple(given.shape) != shape:
        found = f"a tensor {tuple(given.shape)}" if isinstance(given, torch.Tensor) else type(given).__name__
        hint = "; compute values and what else there is in the trainer" if isinstance(given, tuple) else ""
        raise SpecError(
            f"agent: the module must return a tensor {shape} or a distribution for {space}, got {found}{hint}"
        )
    return given
