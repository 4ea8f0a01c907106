"""Computes the functions of this package, by Warp's kernels or in operations of torch.

Kernels are loaded at the first call that they compute. Torch serves all devices and dtypes, and tracing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from rlstructs.frameworks.start_warp import quiet_warp, start_warp
from rlstructs.returns.inputs import Given, Weight

LOG = logging.getLogger("rlstructs")

# The first inputs of every kernel: five tensors, gamma as tensor and as number, and T.
N_COMMON = 8
TWO_RESULTS = {"gae", "vtrace"}
THREAD_PER_STEP = {"n_step_returns"}

# Torch goes over all steps once for each doubling of T, or n times for n-step returns. With fewer rounds than
# FEWEST_ROUNDS it is as fast as a kernel. With fewer steps than FEWEST_STEPS a kernel saves less than 0.2 ms, and is
# not loaded. A kernel cannot count more than MOST_STEPS steps.
FEWEST_ROUNDS, FEWEST_STEPS, MOST_STEPS = 4, 2048, 2**30
# A thread of a GPU waits for memory at each step of its row, while torch's rounds use all of the GPU. An estimate.
MOST_TIMESTEPS_ON_GPU = 2048
THREADS_PER_BLOCK = 32  # few, so that rows spread over the processors of a GPU

# Starts a kernel: takes the name of its function, the number of its threads, and its arguments.
Start = Callable[[str, int, list[float]], None]
# For each device and dtype whose kernels are loaded; None where they cannot be.
_starts: dict[tuple[torch.device, torch.dtype], Start | None] = {}


def compute(
    name: str,
    given: Given,
    tensors: tuple[torch.Tensor | None, ...] = (),
    weights: tuple[Weight, ...] = (),
    numbers: tuple[float, ...] = (),
) -> list[torch.Tensor]:
    """Computes one of the functions.

    Args:
        name: of the function.
        given: the arguments that all functions have in common.
        tensors, weights, numbers: its other arguments, checked.

    Returns:
        Its results, in the shape of the rewards.
    """
    results = _launch(name, given, tensors, weights, numbers)
    if results is None:
        results = _IN_TORCH[name](given, *tensors, *weights, *numbers)
    return [given.shape(each) for each in results]


def _launch(
    name: str,
    given: Given,
    tensors: tuple[torch.Tensor | None, ...],
    weights: tuple[Weight, ...],
    numbers: tuple[float, ...],
) -> list[torch.Tensor] | tuple[torch.Tensor, ...] | None:
    """Computes the same by a kernel; returns None if torch must do it."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() or not _suits(name, given, numbers):
        return None
    rewards = given.rewards
    n_elems, n_timesteps = rewards.shape
    results = [torch.empty_like(rewards) for _ in range(1 + (name in TWO_RESULTS))]
    try:
        # In variables, so that their memory lives until the launch.
        gamma, *others = (_spread(weight, rewards) for weight in (given.gamma, *weights))
        inputs = [*map(_address, given[:5]), *_address_and_number(gamma), n_timesteps, *map(_address, tensors)]
        for other in others:
            inputs += _address_and_number(other)
        inputs += [*numbers, *map(_address, results)]
    except RuntimeError:  # of torch too: inside vmap, say, tensors have no memory
        return None
    start = _get_start(rewards.device, rewards.dtype)
    if start is None:
        return None
    start(name, n_elems * n_timesteps if name in THREAD_PER_STEP else n_elems, inputs)
    return results


def _suits(name: str, given: Given, numbers: tuple[float, ...]) -> bool:
    """Whether a kernel computes this correctly, and faster than torch."""
    rewards = given.rewards
    n_timesteps, n_steps, kind = rewards.shape[1], rewards.numel(), rewards.device.type
    n_rounds = numbers[0] if name == "n_step_returns" else n_timesteps.bit_length()
    if n_rounds < FEWEST_ROUNDS or not FEWEST_STEPS <= n_steps <= MOST_STEPS:
        return False
    if kind == "cuda":
        if torch.version.cuda is None or torch.cuda.is_current_stream_capturing():
            return False
        if n_timesteps > MOST_TIMESTEPS_ON_GPU and name not in THREAD_PER_STEP:
            return False
    elif kind != "cpu":
        return False
    # A dispatch mode records or replaces operations of torch, and would not see a kernel.
    return rewards.dtype in (torch.float32, torch.float64) and _get_current_dispatch_mode() is None


def _spread(weight: Weight, rewards: torch.Tensor) -> Weight:
    """Returns a number, or a tensor (B, T)."""
    if not isinstance(weight, torch.Tensor) or weight.ndim:
        return weight
    return weight.expand(rewards.shape).contiguous() if rewards.is_cuda else float(weight)


def _address_and_number(weight: Weight) -> tuple[int, float]:
    return (_address(weight), 0.0) if isinstance(weight, torch.Tensor) else (0, weight)


def _address(tensor: torch.Tensor | None) -> int:
    if tensor is None:
        return 0
    if type(tensor) is not torch.Tensor or tensor.is_neg():
        raise RuntimeError("the numbers of this tensor may lie elsewhere, or have the other sign")
    return tensor.data_ptr()


def _get_start(device: torch.device, dtype: torch.dtype) -> Start | None:
    """Returns the function that starts the kernels.

    The first process compiles them, others load the result.
    """
    key = device, dtype
    if key not in _starts:
        with quiet_warp():  # one thread at a time
            if key not in _starts:
                _starts[key] = _load(device, dtype)
    return _starts[key]


def _load(device: torch.device, dtype: torch.dtype) -> Start | None:
    try:
        wp = start_warp()
        from rlstructs.returns.kernels import make_kernels

        kernels, make_steps = make_kernels(wp.float64 if dtype == torch.float64 else wp.float32)

        def start(name: str, n_threads: int, inputs: list[float]) -> None:
            inputs = [make_steps(inputs[:N_COMMON]), *inputs[N_COMMON:]]
            if device.type == "cuda":
                stream = wp.stream_from_torch(torch.cuda.current_stream(device))
                where = {"stream": stream, "block_dim": THREADS_PER_BLOCK}
            else:
                where = {"device": "cpu"}
            wp.launch(kernels[name], n_threads, inputs, record_tape=False, **where)

        start("discounted_returns", 1, [0] * (N_COMMON + 1))  # over no step, so that the kernels are loaded here
    except Exception as error:
        LOG.warning("Warp cannot load the kernels of returns; torch computes returns instead, more slowly: %s", error)
        return None
    return start


@dataclass(frozen=True)
class _Steps:
    """Rewards and what follows them, (B, T), 0 in masked steps.

    `goes_on` is bool, the others are of one floating point dtype; `gamma` may also be a number or a tensor ().
    `next_values` is 0 after a step that terminated. `goes_on` is True where step t + 1 of the row continues the episode
    of step t; `carry` is gamma there and 0 elsewhere.
    """

    rewards: torch.Tensor
    next_values: torch.Tensor
    gamma: Weight
    goes_on: torch.Tensor
    carry: torch.Tensor

    @classmethod
    def of(cls, given: Given) -> _Steps:
        """Marks the steps after which an episode goes on."""
        goes_on, bootstraps = ~(given.terminated | given.truncated), ~given.terminated
        goes_on[:, -1:] = False
        if given.mask is not None:
            goes_on &= given.mask
            goes_on[:, :-1] &= given.mask[:, 1:]
            bootstraps &= given.mask
        gamma = _weight(given, given.gamma)
        rewards, next_values = _floats(given, given.rewards), torch.where(bootstraps, given.next_values, 0)
        return cls(rewards, next_values, gamma, goes_on, goes_on.to(rewards.dtype) * gamma)

    def up_to_cuts(self) -> torch.Tensor:
        """Returns r_t, plus gamma V(s_{t+1}) where `goes_on` is False, (B, T).

        V may be NaN elsewhere.
        """
        return self.rewards + torch.where(self.goes_on, 0, self.gamma * self.next_values)

    def backup(self, following: torch.Tensor) -> torch.Tensor:
        """Returns r_t + gamma x_{t+1}, (B, T), where x is `following`.

        Where `goes_on` is False, x is V(s_{t+1}).
        """
        backed_up = self.up_to_cuts()
        backed_up[:, :-1] += torch.where(self.goes_on[:, :-1], self.carry[:, :-1] * following[:, 1:], 0)
        return backed_up


def _gae(given: Given, values: torch.Tensor, lambda_: Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and targets."""
    steps, values = _Steps.of(given), _floats(given, values)
    deltas = steps.rewards + steps.gamma * steps.next_values - values
    advantages = _recurrence_(deltas, steps.carry * _weight(given, lambda_))
    return advantages, advantages + values


def _discounted_returns(given: Given) -> tuple[torch.Tensor]:
    steps = _Steps.of(given)
    return (_recurrence_(steps.up_to_cuts(), steps.carry),)


def _lambda_returns(given: Given, lambda_: Weight) -> tuple[torch.Tensor]:
    steps = _Steps.of(given)
    weights = steps.carry * _weight(given, lambda_)
    return (_recurrence_(steps.rewards + (steps.gamma - weights) * steps.next_values, weights),)


def _n_step_returns(given: Given, n: int) -> tuple[torch.Tensor]:
    steps = _Steps.of(given)
    returns = steps.rewards + steps.gamma * steps.next_values
    for _ in range(n - 1):
        returns = steps.backup(returns)
    return (returns,)


def _vtrace(
    given: Given,
    values: torch.Tensor,
    ratios: torch.Tensor | None,
    learned: torch.Tensor,
    acted: torch.Tensor,
    rho_clip: float,
    c_clip: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and targets; `ratios` are pi / mu, None if not known."""
    ratios = (learned - acted).exp_() if ratios is None else ratios
    steps, values, ratios = _Steps.of(given), _floats(given, values), _floats(given, ratios)
    rhos = ratios.clamp(max=rho_clip)
    deltas = rhos * (steps.rewards + steps.gamma * steps.next_values - values)
    targets = _recurrence_(deltas, steps.carry * ratios.clamp(max=c_clip)) + values
    return rhos * (steps.backup(targets) - values), targets


_IN_TORCH: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    "gae": _gae,
    "discounted_returns": _discounted_returns,
    "lambda_returns": _lambda_returns,
    "n_step_returns": _n_step_returns,
    "vtrace": _vtrace,
}


def _floats(given: Given, tensor: torch.Tensor) -> torch.Tensor:
    # Not a product, because masked values may be NaN.
    return tensor if given.mask is None else torch.where(given.mask, tensor, 0)


def _weight(given: Given, value: Weight) -> Weight:
    return _floats(given, value) if isinstance(value, torch.Tensor) and value.ndim else value


def _recurrence_(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Computes x_t = a_t + b_t x_{t+1} in place of `a`, (B, T).

    The last b of a row counts as 0, and where b is 0, x_{t+1} is left out, even if it is NaN: it is another episode.

    It takes log2(T) rounds: x_t, the sum of its first `reach` terms, adds those of x_{t+reach} times the b in between.
    A loop over T takes 2 to 30 times as long (benchmarks/returns.py).
    """
    n_timesteps, reach = a.shape[1], 1
    b = b[:, :-1]
    while reach < n_timesteps:
        a[:, :-reach] += (b * a[:, reach:]).masked_fill(b == 0, 0)
        b = b[:, :-reach] * b[:, reach:]
        reach *= 2
    return a
