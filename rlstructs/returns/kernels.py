# mypy: disable-error-code="valid-type,untyped-decorator,no-untyped-def,no-any-return,operator"
# ruff: noqa: UP018 # Warp needs `bool(False)` for a bool that changes in a loop
"""Warp kernels of the functions of this package, in 32 and in 64 bits.

A thread walks over one row, from its last step to its first; for n-step returns, each step has a thread. Tensors (B, T)
come as the addresses of their contiguous memory, because Warp needs as long for the arrays of a launch as for thousands
of steps. An address of 0 stands for no tensor. `t` counts steps over all rows. Values that must not count are left
out, not multiplied by 0, because they may be NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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
def _ends(terminated: wp.uint64, truncated: wp.uint64, t: wp.int32) -> bool:
    return _is_set(terminated, t) or _is_set(truncated, t)


@functools.cache
def make_kernels(dtype: Any) -> dict[str, Any]:
    """Returns the kernels by function name, for `wp.float32` or `wp.float64`.

    Warp compiles them together.
    """

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
    def after(next_values: wp.uint64, terminated: wp.uint64, t: wp.int32) -> dtype:
        if _is_set(terminated, t):
            return dtype(0.0)
        return read(next_values, t)

    makers = (_make_gae, _make_discounted_returns, _make_lambda_returns, _make_n_step_returns, _make_vtrace)
    kernel = wp.kernel(enable_backward=False, module=f"{__name__}.{dtype.__name__}")
    return {maker.__name__.removeprefix("_make_"): kernel(maker(dtype, read, write, weight, after)) for maker in makers}


def _make_gae(dtype: Any, read: Any, write: Any, weight: Any, after: Any) -> Callable:
    def gae(
        rewards: wp.uint64,
        next_values: wp.uint64,
        terminated: wp.uint64,
        truncated: wp.uint64,
        mask: wp.uint64,
        gammas: wp.uint64,
        gamma: dtype,
        n_timesteps: wp.int32,
        values: wp.uint64,
        lambdas: wp.uint64,
        lambda_: dtype,
        advantages: wp.uint64,
        targets: wp.uint64,
    ) -> None:
        end = (wp.tid() + 1) * n_timesteps
        advantage = dtype(0.0)
        next_counts = bool(False)
        for back in range(n_timesteps):
            t = end - 1 - back
            counts = _counts(mask, t)
            target = dtype(0.0)
            if counts:
                g = weight(gammas, gamma, t)
                value = read(values, t)
                delta = read(rewards, t) + g * after(next_values, terminated, t) - value
                if next_counts and not _ends(terminated, truncated, t):
                    advantage = delta + g * weight(lambdas, lambda_, t) * advantage
                else:
                    advantage = delta
                target = advantage + value
            else:
                advantage = dtype(0.0)
            write(advantages, t, advantage)
            write(targets, t, target)
            next_counts = counts

    return gae


def _make_discounted_returns(dtype: Any, read: Any, write: Any, weight: Any, after: Any) -> Callable:
    def discounted_returns(
        rewards: wp.uint64,
        next_values: wp.uint64,
        terminated: wp.uint64,
        truncated: wp.uint64,
        mask: wp.uint64,
        gammas: wp.uint64,
        gamma: dtype,
        n_timesteps: wp.int32,
        returns: wp.uint64,
    ) -> None:
        end = (wp.tid() + 1) * n_timesteps
        result = dtype(0.0)
        next_counts = bool(False)
        for back in range(n_timesteps):
            t = end - 1 - back
            counts = _counts(mask, t)
            if counts:
                if not next_counts or _ends(terminated, truncated, t):
                    result = after(next_values, terminated, t)
                result = read(rewards, t) + weight(gammas, gamma, t) * result
            else:
                result = dtype(0.0)
            write(returns, t, result)
            next_counts = counts

    return discounted_returns


def _make_lambda_returns(dtype: Any, read: Any, write: Any, weight: Any, after: Any) -> Callable:
    def lambda_returns(
        rewards: wp.uint64,
        next_values: wp.uint64,
        terminated: wp.uint64,
        truncated: wp.uint64,
        mask: wp.uint64,
        gammas: wp.uint64,
        gamma: dtype,
        n_timesteps: wp.int32,
        lambdas: wp.uint64,
        lambda_: dtype,
        returns: wp.uint64,
    ) -> None:
        end = (wp.tid() + 1) * n_timesteps
        result = dtype(0.0)
        next_counts = bool(False)
        for back in range(n_timesteps):
            t = end - 1 - back
            counts = _counts(mask, t)
            if counts:
                g = weight(gammas, gamma, t)
                reward = read(rewards, t)
                value = after(next_values, terminated, t)
                if next_counts and not _ends(terminated, truncated, t):
                    w = g * weight(lambdas, lambda_, t)
                    result = reward + (g - w) * value + w * result
                else:
                    result = reward + g * value
            else:
                result = dtype(0.0)
            write(returns, t, result)
            next_counts = counts

    return lambda_returns


def _make_n_step_returns(dtype: Any, read: Any, write: Any, weight: Any, after: Any) -> Callable:
    def n_step_returns(
        rewards: wp.uint64,
        next_values: wp.uint64,
        terminated: wp.uint64,
        truncated: wp.uint64,
        mask: wp.uint64,
        gammas: wp.uint64,
        gamma: dtype,
        n_timesteps: wp.int32,
        n: wp.int32,
        returns: wp.uint64,
    ) -> None:
        first = wp.tid()
        last = wp.min(first + n, (first / n_timesteps + 1) * n_timesteps) - 1
        result = dtype(0.0)
        discount = dtype(1.0)
        t = first
        while t <= last and _counts(mask, t):
            result = result + discount * read(rewards, t)
            discount = discount * weight(gammas, gamma, t)
            is_last = t == last or _ends(terminated, truncated, t)
            if not is_last:
                is_last = not _counts(mask, t + 1)
            if is_last:
                result = result + discount * after(next_values, terminated, t)
                last = t
            t = t + 1
        write(returns, first, result)

    return n_step_returns


def _make_vtrace(dtype: Any, read: Any, write: Any, weight: Any, after: Any) -> Callable:
    def vtrace(
        rewards: wp.uint64,
        next_values: wp.uint64,
        terminated: wp.uint64,
        truncated: wp.uint64,
        mask: wp.uint64,
        gammas: wp.uint64,
        gamma: dtype,
        n_timesteps: wp.int32,
        values: wp.uint64,
        ratios: wp.uint64,
        target_log_probs: wp.uint64,
        behaviour_log_probs: wp.uint64,
        rho_clip: dtype,
        c_clip: dtype,
        advantages: wp.uint64,
        targets: wp.uint64,
    ) -> None:
        end = (wp.tid() + 1) * n_timesteps
        correction = dtype(0.0)
        target = dtype(0.0)
        next_counts = bool(False)
        for back in range(n_timesteps):
            t = end - 1 - back
            counts = _counts(mask, t)
            advantage = dtype(0.0)
            if counts:
                g = weight(gammas, gamma, t)
                value, reward = read(values, t), read(rewards, t)
                following = after(next_values, terminated, t)
                if ratios == wp.uint64(0):
                    ratio = wp.exp(read(target_log_probs, t) - read(behaviour_log_probs, t))
                else:
                    ratio = read(ratios, t)
                rho = wp.where(ratio > rho_clip, rho_clip, ratio)  # NaN stays NaN
                delta = rho * (reward + g * following - value)
                if next_counts and not _ends(terminated, truncated, t):
                    following = target
                    correction = delta + g * wp.where(ratio > c_clip, c_clip, ratio) * correction
                else:
                    correction = delta
                target = correction + value
                advantage = rho * (reward + g * following - value)
            write(advantages, t, advantage)
            write(targets, t, wp.where(counts, target, dtype(0.0)))
            next_counts = counts

    return vtrace
