"""Decides which calls Warp's kernels compute, loads the kernels, and launches them.

They are loaded at the first such call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

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


def launch(
    name: str,
    given: Given,
    tensors: tuple[torch.Tensor | None, ...] = (),
    weights: tuple[Weight, ...] = (),
    numbers: tuple[float, ...] = (),
) -> list[torch.Tensor] | None:
    """Computes one of the functions by its kernel.

    Args:
        name: of the function.
        given: the arguments that all functions have in common.
        tensors, weights, numbers: its other arguments, checked.

    Returns:
        Its results (B, T), or None if torch must compute them.
    """
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
