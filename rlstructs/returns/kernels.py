# mypy: disable-error-code="valid-type,untyped-decorator,no-untyped-def,no-any-return,operator"
# ruff: noqa: SIM108 # Warp computes both sides of a conditional expression
"""Warp kernels of the functions of this package, in 32 and in 64 bits.

A thread walks over one row, from its last step to its first; for n-step returns, each step has a thread. Tensors (B, T)
come as the addresses of their contiguous memory, because Warp needs as long for the arrays of a launch as for thousands
of steps. An address of 0 stands for no tensor. `t` counts steps over all rows. Values that must not count are left
out, not multiplied by 0, because they may be NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import warp as wp


@wp.func
def _is_set(flags: wp.uint64, t: wp.int32) -> bool:
    return wp.array(ptr=flags, shape=(t + 1,), dtype=wp.bool)[t]


@wp.func
def _counts(mask: wp.uint64, t: wp.int32) -> bool:
    if mask == wp.uint64(0):
        return True
    return _is_set(mask, t)


@wp.func
def _goes_on(steps: Any, t: wp.int32, end: wp.int32) -> bool:
    if _is_set(steps.terminated, t) or _is_set(steps.truncated, t) or t + 1 == end:
        return False
    return _counts(steps.mask, t + 1)


@functools.cache
def make_kernels(dtype: Any) -> tuple[dict[str, Any], Callable]:
    """Makes the kernels for `wp.float32` or `wp.float64`, which Warp compiles together.

    Returns:
        The kernels by function name; and the function that makes their first argument of the numbers in `steps`.
    """
    addresses = ("rewards", "next_values", "terminated", "truncated", "mask", "gammas")
    kinds = dict.fromkeys(addresses, wp.uint64) | {"gamma": dtype, "n_timesteps": wp.int32}
    Steps = wp.struct(type(f"Steps_{dtype.__name__}", (), {"__annotations__": kinds, "__module__": __name__}))

    def make_steps(numbers: Iterable[float]) -> Any:
        steps = Steps()
        for name, number in zip(kinds, numbers, strict=True):
            setattr(steps, name, number)
        return steps

    @wp.func
    def read(values: wp.uint64, t: wp.int32) -> dtype:
        return wp.array(ptr=values, shape=(t + 1,), dtype=dtype)[t]

    @wp.func
    def write(values: wp.uint64, t: wp.int32, value: Any) -> None:
        array = wp.array(ptr=values, shape=(t + 1,), dtype=dtype)
        array[t] = value

    @wp.func
    def weight(weights: wp.uint64, number: Any, t: wp.int32):
        if weights == wp.uint64(0):
            return number
        return read(weights, t)

    @wp.func
    def after(steps: Any, t: wp.int32) -> dtype:
        if _is_set(steps.terminated, t):
            return dtype(0.0)
        return read(steps.next_values, t)

    makers = (_make_gae, _make_discounted_returns, _make_lambda_returns, _make_n_step_returns, _make_vtrace)
    kernel = wp.kernel(enable_backward=False, module=f"{__name__}.{dtype.__name__}")
    kernels = {}
    for maker in makers:
        function = maker(dtype, read, write, weight, after)
        function.__annotations__["steps"] = Steps
        kernels[function.__name__] = kernel(function)
    return kernels, make_steps


def _make_gae(dtype: Any, read: Any, write: Any, weight: Any, after: Any) -> Callable:
    def gae(
        steps: Any,
        values: wp.uint64,
        lambdas: wp.uint64,
        lambda_: dtype,
        advantages: wp.uint64,
        targets: wp.uint64,
    ) -> None:
        end = (wp.tid() + 1) * steps.n_timesteps
        advantage = dtype(0.0)
        for back in range(steps.n_timesteps):
            t = end - 1 - back
            counts = _counts(steps.mask, t)
            target = dtype(0.0)
            if counts:
                g = weight(steps.gammas, steps.gamma, t)
                value = read(values, t)
                delta = read(steps.rewards, t) + g * after(steps, t) - value
                if _goes_on(steps, t, end):
                    advantage = delta + g * weight(lambdas, lambda_, t) * advantage
                else:
                    advantage = delta
                target = advantage + value
            else:
                advantage = dtype(0.0)
            write(advantages, t, advantage)
            write(targets, t, target)

    return gae


def _make_discounted_returns(dtype: Any, read: Any, write: Any, weight: Any, after: Any) -> Callable:
    def discounted_returns(
        steps: Any,
        returns: wp.uint64,
    ) -> None:
        end = (wp.tid() + 1) * steps.n_timesteps
        result = dtype(0.0)
        for back in range(steps.n_timesteps):
            t = end - 1 - back
            counts = _counts(steps.mask, t)
            if counts:
                if not _goes_on(steps, t, end):
                    result = after(steps, t)
                result = read(steps.rewards, t) + weight(steps.gammas, steps.gamma, t) * result
            else:
                result = dtype(0.0)
            write(returns, t, result)

    return discounted_returns


def _make_lambda_returns(dtype: Any, read: Any, write: Any, weight: Any, after: Any) -> Callable:
    def lambda_returns(
        steps: Any,
        lambdas: wp.uint64,
        lambda_: dtype,
        returns: wp.uint64,
    ) -> None:
        end = (wp.tid() + 1) * steps.n_timesteps
        result = dtype(0.0)
        for back in range(steps.n_timesteps):
            t = end - 1 - back
            counts = _counts(steps.mask, t)
            if counts:
                g = weight(steps.gammas, steps.gamma, t)
                reward = read(steps.rewards, t)
                value = after(steps, t)
                if _goes_on(steps, t, end):
                    w = g * weight(lambdas, lambda_, t)
                    result = reward + (g - w) * value + w * result
                else:
                    result = reward + g * value
            else:
                result = dtype(0.0)
            write(returns, t, result)

    return lambda_returns


def _make_n_step_returns(dtype: Any, read: Any, write: Any, weight: Any, after: Any) -> Callable:
    def n_step_returns(
        steps: Any,
        n: wp.int32,
        returns: wp.uint64,
    ) -> None:
        first = wp.tid()
        end = (first / steps.n_timesteps + 1) * steps.n_timesteps
        last = wp.min(first + n, end) - 1
        result = dtype(0.0)
        discount = dtype(1.0)
        t = first
        while t <= last and _counts(steps.mask, t):
            result = result + discount * read(steps.rewards, t)
            discount = discount * weight(steps.gammas, steps.gamma, t)
            if t == last or not _goes_on(steps, t, end):
                result = result + discount * after(steps, t)
                last = t
            t = t + 1
        write(returns, first, result)

    return n_step_returns


def _make_vtrace(dtype: Any, read: Any, write: Any, weight: Any, after: Any) -> Callable:
    def vtrace(
        steps: Any,
        values: wp.uint64,
        ratios: wp.uint64,
        target_log_probs: wp.uint64,
        behaviour_log_probs: wp.uint64,
        rho_clip: dtype,
        c_clip: dtype,
        advantages: wp.uint64,
        targets: wp.uint64,
    ) -> None:
        end = (wp.tid() + 1) * steps.n_timesteps
        correction = dtype(0.0)
        target = dtype(0.0)
        for back in range(steps.n_timesteps):
            t = end - 1 - back
            counts = _counts(steps.mask, t)
            advantage = dtype(0.0)
            if counts:
                g = weight(steps.gammas, steps.gamma, t)
                value, reward = read(values, t), read(steps.rewards, t)
                following = after(steps, t)
                if ratios == wp.uint64(0):
                    ratio = wp.exp(read(target_log_probs, t) - read(behaviour_log_probs, t))
                else:
                    ratio = read(ratios, t)
                rho = wp.where(ratio > rho_clip, rho_clip, ratio)  # NaN stays NaN
                delta = rho * (reward + g * following - value)
                if _goes_on(steps, t, end):
                    following = target
                    correction = delta + g * wp.where(ratio > c_clip, c_clip, ratio) * correction
                else:
                    correction = delta
                target = correction + value
                advantage = rho * (reward + g * following - value)
            write(advantages, t, advantage)
            write(targets, t, wp.where(counts, target, dtype(0.0)))

    return vtrace
