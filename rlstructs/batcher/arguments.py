"""Checks the arguments of a batcher, and brings them into one form.

This includes the arguments of `make` and of `get(out=)`.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from rlstructs.agent import RL_Agent
from rlstructs.checks import MODULE_HINT, check_count, check_timeout, warn_caller
from rlstructs.envs.env_list import check_policy
from rlstructs.errors import SpecError
from rlstructs.seeding import EnvSeed, check_seeds
from rlstructs.shared.module_state import copy_plain
from rlstructs.structures.arrays import TensorSpec, check_dtype, specs_of
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import Trajectories
from rlstructs.structures.tree import check_same_keys, show
from rlstructs.worker_setup import check_init_worker, check_start_method
from rlstructs.workers.limits import n_cores

#: The values of `on_worker_failure`.
RAISE, RESTART = POLICIES = ("raise", "restart")


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """The arguments of `RL_Batcher` that say how rollouts are run."""

    n_timesteps: int
    n_processes: int
    start_method: str | None
    timeout: float | None
    on_worker_failure: str
    max_restarts: int | None
    run_ahead: int
    init_worker: Callable[[int], object] | None = None
    on_env_failure: str = RAISE
    max_env_restarts: int | None = None

    @property
    def n_workers(self) -> int:
        """W, which is 1 if the rollouts run in this process."""
        return max(1, self.n_processes)

    def check(self) -> RunSettings:
        """Returns the settings, with the timeout as a Python number.

        Raises:
            SpecError, TypeError: one of them is wrong; the message names it.
        """
        check_count("n_timesteps", self.n_timesteps, 1)
        check_count("n_processes", self.n_processes, 0)
        check_start_method(self.start_method)
        timeout = check_timeout(self.timeout)
        if self.on_worker_failure not in POLICIES:
            raise SpecError(f"on_worker_failure must be one of {POLICIES}, got {self.on_worker_failure!r}")
        if self.max_restarts is not None:
            check_count("max_restarts", self.max_restarts, 0)
        check_policy(self.on_env_failure, self.max_env_restarts)
        check_count("run_ahead", self.run_ahead, 0)
        check_init_worker(self.init_worker)
        return dataclasses.replace(self, timeout=timeout)


def info_example(name: str, info: DictTensor | None) -> DictTensor:
    """Returns one row of the user's example, copied to the CPU; empty if None."""
    if info is None:
        return DictTensor()
    if not isinstance(info, DictTensor):
        raise TypeError(f"{name} must be a DictTensor, got {type(info).__name__}")
    for key, tensor in info.items():
        if tensor.ndim == 0 or tensor.shape[0] < 1:
            raise SpecError(f"{name}: example {key!r} has shape {tuple(tensor.shape)}, expected (1, ...)")
        check_dtype(name, key, tensor.dtype)
    return info.slice(0, 1).to("cpu").clone()


def seeds_of(seeds: int | Sequence[int], n_workers: int, name: str = "seeds") -> list[int]:
    """One seed per worker: the given ones, or streams derived from one int.

    Raises:
        TypeError: `seeds` is neither an int nor a sequence of ints.
        SpecError: there are not as many seeds as workers, or one is below 0.
    """
    if isinstance(seeds, (int, np.integer)) and not isinstance(seeds, bool):
        if seeds < 0:
            raise SpecError(f"{name}: must not be negative, got {seeds}")
        return [EnvSeed(int(seeds), worker) for worker in range(n_workers)]
    return check_seeds(name, seeds, n_workers, "processes")


def check_factory(name: str, factory: Any) -> Any:
    """Returns the factory; raises TypeError for an agent, a network or a non-callable."""
    is_network = isinstance(factory, torch.nn.Module) and not isinstance(factory, RL_Agent)
    if not callable(factory) or isinstance(factory, RL_Agent) or is_network:
        got = f"{type(factory).__name__}{MODULE_HINT if is_network else ''}"
        raise TypeError(f"{name} must be a function or a class, which each worker calls, got {got}")
    return factory


def arguments_of(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a factory, copied into a dict.

    Raises:
        TypeError: they are no mapping.
    """
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} must be a mapping of names to values, got {type(given).__name__}")
    return dict(given)


def agent_seeds_of(seeds: Sequence[int] | None, n_workers: int) -> list[int] | None:
    """One agent seed per worker, or None if there are none.

    Raises:
        TypeError: `seeds` is no sequence of ints.
        SpecError: there are not as many seeds as workers, or one is below 0.
    """
    return None if seeds is None else check_seeds("agent_seeds", seeds, n_workers, "processes", or_int=False)


def warn_of_overlap(seeds: Sequence[int], n_envs: int) -> None:
    """Warns once if listed seeds give two environments the same stream; `n_envs` is E."""
    if isinstance(seeds[0], EnvSeed):
        return
    for one, seed in enumerate(seeds):
        for other in range(one + 1, len(seeds)):
            shift = seeds[other] - seed
            if abs(shift) < n_envs:
                first, second = max(shift, 0), max(-shift, 0)
                warn_caller(
                    f"seeds: environments of processes {one} and {other} have the same streams, e.g. environment "
                    f"{first} of process {one} and environment {second} of process {other} (global "
                    f"{one * n_envs + first} and {other * n_envs + second}); "
                    f"space them by at least {n_envs}, or give one int"
                )
                return


def check_info(name: str, info: DictTensor, example: DictTensor, n_elems: int) -> None:
    """Raises unless `info` has `n_elems` rows that match its example, on the CPU.

    Keys, dtypes and shapes must be those of the example.
    """
    if not isinstance(info, DictTensor):
        raise TypeError(f"{name} must be a DictTensor, got {type(info).__name__}")
    check_same_keys(name, example.keys(), info.keys())
    for key, (shape, dtype) in specs_of(example).items():
        tensor = info[key]
        if tuple(tensor.shape) != (n_elems, *shape) or tensor.dtype != dtype:
            raise SpecError(
                f"{name}: {key!r} is {tuple(tensor.shape)} {tensor.dtype}, "
                f"expected {(n_elems, *shape)} {dtype} ({n_elems} environments)"
            )
        if tensor.device.type != "cpu":
            raise SpecError(f"{name}: {key!r} is on {tensor.device}, expected the CPU")


def count_awaited(at_least: int | None, preempt: float | None, noun: str, n_workers: int, n_running: int) -> int | None:
    """The number of workers (or nodes) that `get` waits for; None for all.

    Args:
        at_least: `min_workers` or `min_nodes` of `get`.
        preempt: of `get`.
        noun: "worker" or "node".
        n_workers: how many workers or nodes there are.
        n_running: how many of them have environments that still run.

    Raises:
        SpecError, TypeError: an argument of `get` is wrong.
    """
    if at_least is not None:
        if preempt is not None:
            raise SpecError(f"get: min_{noun}s lets the others go on and preempt ends them: give one of the two")
        check_count(f"get: min_{noun}s", at_least, 1)
        if at_least > n_workers:
            raise SpecError(f"get: min_{noun}s is {at_least}, there are {n_workers}")
        return min(at_least, n_running)
    if preempt is None:
        return None
    if isinstance(preempt, bool) or not isinstance(preempt, (int, float, np.number)):
        raise TypeError(f"get: preempt must be a fraction of the workers or None, got {preempt!r}")
    if not 0 < preempt <= 1:
        raise SpecError(f"get: preempt must be above 0 and up to 1, got {preempt}")
    return math.ceil(preempt * n_running)


Specs = Mapping[str, TensorSpec]


def check(out: Trajectories, info: Specs, steps: Specs, lead: tuple[int, int]) -> None:
    """Raises unless a rollout can be written to `out`.

    Args:
        out: the argument.
        info, steps: for each key, the dtype and the shape, without rows and timesteps, that will be written.
        lead: the most rows and the most timesteps that will be written.

    Raises:
        TypeError: `out` is no `Trajectories`.
        SpecError: its keys, dtypes or shapes differ, it is too small, not on the CPU, or cannot be written to.
    """
    if not isinstance(out, Trajectories):
        raise TypeError(f"get: out must be a Trajectories, got {type(out).__name__}")
    _check("lengths", out.lengths, ((), torch.int64), lead[:1])
    places: dict[int, str] = {}
    for tensors, specs, axes in ((out.info, info, lead[:1]), (out.trajectories, steps, lead)):
        check_same_keys("get: out", specs, tensors.keys())
        for key, spec in specs.items():
            _check(key, tensors[key], spec, axes)
            other = places.setdefault(tensors[key].data_ptr(), key) if tensors[key].numel() else key
            if other != key:
                raise SpecError(f"get: out {key!r} and {other!r} share memory")


def _check(key: str, tensor: torch.Tensor, spec: TensorSpec, lead: tuple[int, ...]) -> None:
    """Raises SpecError unless a tensor has room for `lead` rows and timesteps.

    Its values must match the spec.
    """
    (shape, dtype), n = spec, len(lead)
    is_large = tensor.ndim == n + len(shape) and all(tensor.shape[axis] >= lead[axis] for axis in range(n))
    if not is_large or tuple(tensor.shape[n:]) != tuple(shape) or tensor.dtype != dtype or tensor.device.type != "cpu":
        needed = f"{(*lead, *shape)} {str(dtype).removeprefix('torch.')}"
        raise SpecError(f"get: out {key!r} is {show(tensor)} on {tensor.device}, expected {needed} or more on cpu")
    if tensor.requires_grad or tensor.is_inference():
        raise SpecError(f"get: out {key!r} must neither require a gradient nor be made in inference mode")
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    if tensor.numel() and any(stride == 0 and size > 1 for stride, size in steps):
        raise SpecError(f"get: out {key!r} is expanded: several of its elements share memory")


def copy(trajectories: Trajectories, out: Trajectories) -> Trajectories:
    """Copies a rollout to `out`, which was checked; returns it there."""
    there = cut(out, trajectories.n_elems(), trajectories.trajectories.n_timesteps())
    for key, tensor in trajectories.info.items():
        there.info[key].copy_(tensor)
    for key, tensor in trajectories.trajectories.items():
        there.trajectories[key].copy_(tensor)
    there.lengths.copy_(trajectories.lengths)
    return there


def cut(out: Trajectories, n_rows: int, n_timesteps: int) -> Trajectories:
    """Views of the first rows and timesteps."""
    steps = {key: tensor[:n_rows, :n_timesteps] for key, tensor in out.trajectories.items()}
    first = out.trajectories.first_steps
    return Trajectories.trusted(
        DictTensor.trusted({key: tensor[:n_rows] for key, tensor in out.info.items()}),
        TemporalDictTensor.trusted(steps, out.lengths[:n_rows], None if first is None else first[:n_rows]),
    )


# Arguments of `make` that are those of `GymEnvThreads`.
OF_THREADS = ("min_ready", "max_wait", "deadline", "step_timeout", "on_env_timeout")
# Arguments of the constructor that `make` sets, and from which of its own.
SET = {"create_env": "env", "create_agent": "agent", "agent_args": "agent", "n_processes": "n_workers", "seeds": "seed"}


def constructor_arguments(
    cls: type,
    env: Any,
    agent: Any,
    n_envs: int,
    n_workers: int | None,
    env_args: Mapping[str, Any] | None,
    device: Any,
    episode_seeds: bool,
    clip_actions: bool,
    threads: bool,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Translates the arguments of `make` into those of the constructor of `cls`.

    `settings` are added to them.

    Raises:
        SpecError, TypeError: one of them is wrong; the message names it.
    """
    from rlstructs.envs.gym_env import GymEnvInf  # imports gymnasium
    from rlstructs.envs.gym_envs import env_factory
    from rlstructs.envs.gym_threads import GymEnvThreads
    from rlstructs.rollout.makers import Makers

    if not isinstance(threads, bool):
        raise TypeError(f"threads must be a bool, got {threads!r}")
    given = {name: value for name, value in settings.items() if name in OF_THREADS}
    if given and not threads:
        raise SpecError(f"{min(given)}: is for environments in threads of their own: give threads=True, too")
    settings = {name: value for name, value in settings.items() if name not in given}
    _check_settings(cls, settings, env)
    n_workers = _count_workers(check_count("n_envs", n_envs), n_workers)
    if isinstance(agent, torch.nn.Module) and not isinstance(agent, RL_Agent):
        agent = copy_plain(agent)  # a wrapped or parametrised module cannot be sent to a worker
    elif agent is not None and not callable(agent):
        raise TypeError(f"agent must be an RL_Agent, a torch.nn.Module or a function, got {type(agent).__name__}")
    kind = partial(GymEnvThreads if threads else GymEnvInf, episode_seeds=episode_seeds, **given)
    makers = Makers(env_factory(env, env_args), agent, n_envs // max(1, n_workers), device, kind, clip_actions, threads)
    return {
        **settings,
        "create_agent": makers.create_agent,
        "agent_args": {},
        "create_env": makers.create_env,
        "env_args": {},
        "n_processes": n_workers,
        "device": device,
    }


def _check_settings(cls: Any, settings: Mapping[str, Any], env: Any) -> None:
    """Checks further arguments of `make`.

    Raises:
        TypeError: one is unknown to `make` and the constructor, or `make` sets it itself.
        SpecError: workers would be forked, for environments in jax.
    """
    from rlstructs.envs.jax_functions import FORKED, is_functional  # imports gymnasium

    if settings.get("start_method") == "fork" and is_functional(env):
        raise SpecError(FORKED)
    own, more = (list(inspect.signature(each).parameters) for each in (cls.make, cls))
    for name in settings:
        if name in SET:
            raise TypeError(f"{cls.__name__}.make() has {SET[name]}= in the place of {name}=")
        if name not in more:
            close = difflib.get_close_matches(name, {*own, *more} - {*SET, "settings"}, 1)
            hint = f". Did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{cls.__name__}.make() got an unexpected keyword argument {name!r}{hint}")


def _count_workers(n_envs: int, n_workers: int | None) -> int:
    """Returns the given number of workers, or chooses one.

    It is the largest that divides `n_envs` and leaves each worker a core.
    """
    if n_workers is None:
        return next(n for n in range(min(n_cores(), n_envs), 0, -1) if n_envs % n == 0)
    check_count("n_workers", n_workers, 0)
    if n_workers and n_envs % n_workers:
        raise SpecError(f"n_envs must be a multiple of n_workers, got {n_envs} environments for {n_workers} workers")
    return n_workers
