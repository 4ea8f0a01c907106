"""Where the time went, in five lines, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlstructs.trace import lane as lanes
from rlstructs.trace.lane import NAMES

# A phase with less than this share of the time is not what a run waits for.
NOTABLE = 0.2
# Fewer rows than this in a call of the agent, and most of it is overhead.
SMALL_BATCH = 32
# An environment is slow beside the others if its steps take so many times the mean of theirs.
SLOW_ENV = 3


class Account(NamedTuple):
    """Where the time of a trainer and its workers went.

    Attributes:
        trainer: seconds by phase.
        workers: the same, the sum over all workers; and "cpu" and "delay", the processor's time, and the time that they
            waited for a processor.
        steps, rollouts, restarts: how many: steps of single environments, rollouts of single workers, replaced workers.
        slowest: of the environment whose steps take longest: its index among all, and how many times the mean of the
            others of its worker; None without others.
        facts: `n_workers`, `n_envs` (of one worker), `n_cores`, `run_ahead`, `is_inline`.
    """

    trainer: Mapping[str, float]
    workers: Mapping[str, float]
    steps: int
    rollouts: int
    restarts: int
    slowest: tuple[int, float] | None
    facts: Mapping[str, Any]

    @classmethod
    def of_cells(cls, spent: np.ndarray, cells: np.ndarray, facts: Mapping[str, Any]) -> Account:
        """Makes the account of a time.

        Args:
            spent: int64 (W + 1, N_CELLS), what the cells of lanes have grown by.
            cells: int64 (W + 1, N_CELLS), the cells at the end.
            facts: of the board.
        """
        seconds = {name: spent[:, phase] / 1e9 for phase, name in enumerate(NAMES)}
        seconds |= {"cpu": spent[:, lanes.CPU] / 1e9, "delay": spent[:, lanes.DELAY] / 1e9}
        steps, rollouts = (int(spent[1:, cell].sum()) for cell in (lanes.STEPS, lanes.ROLLOUTS))
        return cls(
            {name: float(each[0]) for name, each in seconds.items()},
            {name: float(each[1:].sum()) for name, each in seconds.items()},
            steps,
            rollouts,
            int(spent[0, lanes.RESTARTS]),
            find_slowest(cells[1:, lanes.TIMED].tolist(), facts["n_envs"]),
            facts,
        )

    @classmethod
    def of_events(cls, events: Iterable[Mapping[str, Any]]) -> Account:
        """Makes the account of a timeline; see `read_events`."""
        facts: dict[str, Any] = {"n_workers": 0, "n_envs": 1, "n_cores": 1, "run_ahead": 0, "is_inline": False}
        trainer, workers = dict.fromkeys((*NAMES, "cpu", "delay"), 0.0), dict.fromkeys((*NAMES, "cpu", "delay"), 0.0)
        ends: list[Mapping[str, Any]] = []
        timed: dict[int, Any] = {}
        n_restarts = 0
        for event in events:
            name, lane = event.get("name"), event.get("tid")
            if event["ph"] == "X" and lane <= facts["n_workers"]:  # the lanes of nodes are behind those of workers
                (workers if lane else trainer)[event["name"]] += event["dur"] / 1e6
                n_restarts += bool(lane) and name == "restart"
            elif event["ph"] == "E":
                own = event["args"]
                ends.append(own)
                workers["cpu"] += own.get("cpu_us", 0) / 1e6
                workers["delay"] += own.get("delay_us", 0) / 1e6
                timed[event["tid"]] = [own[key] for key in ("slowest", "slowest_us", "timed_us", "n_timed")]
            elif name == "rlstructs":
                facts |= event["args"]
        slowest = find_slowest(
            [timed.get(1 + worker, [0] * 4) for worker in range(facts["n_workers"])], facts["n_envs"]
        )
        steps = sum(end.get("steps", 0) for end in ends)
        return cls(trainer, workers, steps, len(ends), n_restarts, slowest, facts)

    @property
    def seconds(self) -> float:
        """The wall time."""
        return sum(self.trainer[name] for name in NAMES)

    def trainer_share(self, *phases: str) -> float:
        """The share of the trainer's time in these phases."""
        return sum(self.trainer[name] for name in phases) / max(self.seconds, 1e-9)

    def worker_share(self, *phases: str) -> float:
        """The share of the workers' time in these phases."""
        return sum(self.workers[name] for name in phases) / max(sum(self.workers[name] for name in NAMES), 1e-9)

    def busy_share(self, name: str) -> float:
        """The share of the workers' busy time that a phase, or another thing, takes."""
        return self.workers[name] / max(sum(self.workers[each] for each in BUSY), 1e-9)


# The phases of workers in rollouts.
BUSY = ("agent", "environment", "reset", "write")


def find_slowest(workers: Sequence[Sequence[int]], n_envs: int) -> tuple[int, float] | None:
    """Finds the slowest environment of all, see `Account`.

    Args:
        workers: for each its slowest environment, the time of that, and the sum and the number of the times of all.
        n_envs: E.
    """
    found = None
    for worker, (index, slowest, together, n) in enumerate(workers):
        ratio = slowest * (n - 1) / max(together - slowest, 1) if n > 1 else 0.0
        if ratio and (found is None or ratio > found[1]):
            found = worker * n_envs + index, ratio
    return found


def explain(account: Account) -> list[str]:
    """Returns five lines.

    They say what takes the time, what to do, and the numbers behind it.

    The first line names the bottleneck; `find_bottleneck` has the rules.
    """
    if not account.rollouts:
        return ["nothing to explain: no rollout has ended yet"]
    name, what, advice = find_bottleneck(account)
    facts, seconds = account.facts, account.seconds
    trainer = {"waits for rollouts": account.trainer_share("wait", "order"), "learns": account.trainer_share("learn")}
    for phase in ("update", "read", "lease", "draw", "save", "evaluate", "restart", "reset"):
        trainer[phase] = account.trainer_share(phase)
    workers = {phase: account.worker_share(phase) for phase in (*BUSY, "update", "wait for an order")}
    cpu, delay = account.busy_share("cpu"), account.busy_share("delay")
    return [
        f"{name}: {what}",
        f"to do: {advice}",
        f"trainer, {seconds:.1f} s: {_list_shares(trainer)}",
        f"workers, {facts['n_workers']} on {facts['n_cores']} cores: {_list_shares(workers)}",
        f"{account.steps:,} steps, {account.steps / max(seconds, 1e-9):,.0f} a second, {facts['n_envs']} rows a call "
        f"of the agent; in rollouts workers compute {cpu:.0%} of the time, and wait {delay:.0%} of it for a core; "
        f"restarts: {account.restarts}",
    ]


def _list_shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005) or "nothing"


def find_bottleneck(account: Account) -> tuple[str, str, str]:
    """Finds what takes the time: its name, the finding, and what to do.

    What happens to the whole run comes first (restarts, updates), then the trainer, then the workers.
    """
    wait, restart = account.trainer_share("wait", "order"), account.trainer_share("restart")
    update = account.trainer_share("update")
    learn = account.trainer_share("learn", "read", "lease", "draw", "save", "evaluate")
    if restart >= NOTABLE:
        return (
            "restarts",
            f"{account.restarts} workers were replaced, which took {restart:.0%} of the time",
            'the warnings in the log say why workers fail; on_env_failure="restart" replaces single environments',
        )
    if update >= max(NOTABLE, learn, wait):
        return (
            "update",
            f"`update` takes {update:.0%} of the time, until every agent has taken it",
            "update less often, or make the agent's `update` quicker; run_ahead=1 does not wait for it",
        )
    if account.facts["run_ahead"] == 0 and not account.facts["is_inline"] and min(learn, wait) >= NOTABLE:
        return (
            "no overlap",
            f"workers wait {account.worker_share('wait for an order'):.0%} of their time for the trainer, which then "
            f"waits {wait:.0%} of its own for them",
            "run_ahead=1 has workers collect while the trainer learns",
        )
    if learn >= wait:
        return (
            "learner",
            f"the trainer is busy {learn:.0%} of the time; workers wait for an order "
            f"{account.worker_share('wait for an order'):.0%} of theirs",
            "more workers do not help; make the learner quicker (larger batches, a GPU, fewer epochs)",
        )
    return _find_in_workers(account, f"the trainer waits {wait:.0%} of the time for rollouts")


def _find_in_workers(account: Account, waits: str) -> tuple[str, str, str]:
    """Finds what in the workers takes the time, if the trainer waits for them."""
    facts = account.facts
    n_workers, n_cores, n_envs = facts["n_workers"], facts["n_cores"], facts["n_envs"]
    environment, reset, agent = (account.busy_share(name) for name in ("environment", "reset", "agent"))
    delay = account.busy_share("delay")
    if n_workers > n_cores and delay >= NOTABLE:
        return (
            "too many workers",
            f"{waits}; {n_workers} workers share {n_cores} cores, and wait {delay:.0%} of the time of rollouts for one",
            f"n_workers={n_cores}, with more environments in each",
        )
    if agent >= max(environment, reset):
        found = f"{waits}; the agent takes {agent:.0%} of the time of rollouts at {n_envs} rows a call"
        if n_envs < SMALL_BATCH:
            return (
                "small batches",
                found,
                "more environments in each worker: a call costs nearly the same for more rows",
            )
        return "agent", found, "a smaller network, or one that is compiled; agents in workers use one thread each"
    if reset >= environment:
        found = f"{waits}; resets take {reset:.0%} of the time of rollouts, steps {environment:.0%}"
        return "reset", found, "make `reset` cheaper (keep what does not change), or make episodes longer"
    if account.slowest is not None and account.slowest[1] >= SLOW_ENV:
        index, ratio = account.slowest
        return (
            "one environment",
            f"{waits}; environment {index} takes {ratio:.0f} times the mean of the others in its worker",
            "threads=True, if it waits; get(preempt=0.9) or get(min_workers=) does not wait for the last worker",
        )
    found = f"{waits}; environments take {environment:.0%} of the time of rollouts"
    if (cpu := account.busy_share("cpu")) + delay < 0.5:
        return (
            "waiting environments",
            f"{found}, and compute {cpu:.0%} of it: they wait for something else",
            "RL_Batcher.make(threads=True) has many in a worker wait together; or more workers than cores",
        )
    if n_workers < n_cores:
        return "too few workers", found, f"more workers help up to {n_cores}, the cores"
    return "environments", found, "a quicker environment, or more machines (RayBatcher): every core is busy with them"
