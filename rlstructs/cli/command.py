"""The command `rlstructs`.

It collects rollouts, shows an agent, describes files, and finds where time goes.

    rlstructs collect CartPole-v1 --workers 2 --steps 200000 --out rollouts.npz --plot returns.png
    rlstructs play CartPole-v1 --agent my_agents:trained --video cartpole.mp4
    rlstructs info rollouts.npz
    rlstructs info --system
    rlstructs tune CartPole-v1 --seconds 20
    rlstructs trace run.json
    rlstructs top

Exit codes: 0; 2 after an error, which prints one line on stderr; 130 after Ctrl-C, which keeps what was collected or
recorded; 141, silently, when the reader of the output has gone (`| head`).
Heavy modules are imported where they are needed, so that `--help` is quick.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rlstructs import __version__
from rlstructs.cli import watch
from rlstructs.errors import OutOfMemoryError, RemoteTraceback, RLError, SpecError, WorkerError
from rlstructs.workers.limits import n_cores

if TYPE_CHECKING:
    from rlstructs.cli.collect import Collected, Settings

INTERRUPTED, FAILED, UNREAD = 130, 2, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: arguments of the command line; None for those of this program.

    Returns:
        The exit code.
    """
    debug = False
    try:
        options = _parser().parse_args(arguments)
        debug = options.debug
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("rlstructs: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # environments may raise anything
        if isinstance(error, BrokenPipeError) and _is_unread():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter would complain at exit
            return UNREAD
        if debug:
            raise
        print(f"rlstructs: error: {_message_line(error)}", file=sys.stderr)
        return FAILED


def _is_unread() -> bool:
    """Whether the reader of the output has closed its end of the pipe."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except OSError:  # a notebook's
        return False
    return bool(poll.poll(0))


class _Parser(argparse.ArgumentParser):
    """Raises an error instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        if message.endswith((": COMMAND", ": WHAT")):
            message += f"; {self.prog} --help lists what there is"
        raise SpecError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="rlstructs", description="Rollouts of gymnasium environments in parallel workers.")
    parser.add_argument("--version", action="version", version=f"rlstructs {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_collect(commands, common)
    _add_play(commands, common)
    _add_info(commands, common)
    _add_tune(commands, common)
    watch.add_parsers(commands, common, _int_from(1))
    bench = commands.add_parser("bench", help="measure on this machine", description="Measures on this machine.")
    _add_tune(bench.add_subparsers(metavar="WHAT", required=True), common)
    return parser


def _add_collect(commands: Any, common: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "collect",
        parents=[common],
        allow_abbrev=False,
        help="run an agent in an environment and write what happened",
        description="Runs an agent in many copies of an environment, in worker processes, and writes the "
        "trajectories. Ctrl-C ends it early and keeps what was collected.",
    )
    parser.set_defaults(run=_collect)
    add = parser.add_argument
    add("env_id", metavar="ENV_ID", help="what gymnasium.make takes: CartPole-v1, ALE/Pong-v5, module:EnvId")
    for option, metavar, least, default, text in (
        ("--workers", "W", 0, n_cores(), "worker processes, 0 for none; default: the cores, %(default)s"),
        ("--envs", "N", 1, 8, "environments in each worker; default: %(default)s"),
        ("--timesteps", "T", 1, 128, "steps of each environment in one rollout; default: %(default)s"),
        ("--steps", "S", 1, 10_000, "environment steps in all, rounded up to whole rollouts; default: %(default)s"),
        ("--seed", "SEED", 0, 0, "of environments and agents; default: %(default)s"),
    ):
        add(option, metavar=metavar, type=_int_from(least), default=default, help=text)
    add("--threads", action="store_true", help="step each environment in a thread of its own: for those that wait")
    _add_agent(parser)
    add("--action-mask", metavar="KEY", help="of the observation: which actions the agent random may draw, by 0 and 1")
    add("--ray", metavar="ADDRESS", help="of a Ray cluster to run the workers on; auto for the one of this machine")
    add("--nodes", metavar="N", type=_int_from(1), help="actors of Ray that share the workers; default: one a machine")
    out_help = "write the trajectories: to a file, .npz, .pt or .h5, at the end; or to a folder, part by part"
    add("--out", metavar="FILE|FOLDER/", help=out_help)
    add("--compress", action="store_true", help="store frames once in --out, and compressed")
    add("--minari", metavar="ID", help="write the episodes to a dataset of Minari, name-v0 or namespace/name-v0")
    add("--trace", metavar="FILE.json", type=Path, help="write a timeline, which `rlstructs trace` explains")
    add("--plot", metavar="FILE.png", type=Path, help="draw returns and lengths of the episodes")


def _add_agent(parser: argparse.ArgumentParser) -> None:
    agent_help = "random, or module:name of an RL_Agent, a torch.nn.Module, or a function that makes one in each "
    agent_help += "worker and is given observation_space and action_space if it takes them; default: %(default)s"
    parser.add_argument("--agent", metavar="AGENT", default="random", help=agent_help)


def _add_play(commands: Any, common: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "play",
        parents=[common],
        allow_abbrev=False,
        help="show or record what an agent does",
        description="Shows episodes of an agent in a window, or records them, rendered in a worker process. "
        "Ctrl-C ends it early and keeps what was recorded.",
    )
    parser.set_defaults(run=_play)
    add = parser.add_argument
    add("env_id", metavar="ENV_ID", help="as for collect")
    _add_agent(parser)
    add("--video", metavar="FILE.mp4", type=Path, help="record it, in place of a window")
    add("--episodes", metavar="E", type=_int_from(1), default=1, help="how many; default: %(default)s")
    add("--max-steps", metavar="S", type=_int_from(1), help="ends an episode that goes on; default: the environment's")
    add("--fps", metavar="F", type=_read_positive, help="frames per second of the video; default: the environment's")
    add("--seed", metavar="SEED", type=_int_from(0), default=0, help="of environment and agent; default: %(default)s")


def _add_info(commands: Any, common: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "info",
        parents=[common],
        allow_abbrev=False,
        help="say what is in a file, or what a bug report needs",
        description="Says what is in a file of trajectories, a batcher's state or a folder of checkpoints, "
        "or what a bug report needs.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    file_help = "what rlstructs wrote: .npz, .pt, .h5, a folder of collect or of checkpoints, a batcher's state (.pt)"
    what.add_argument("file", metavar="FILE", type=Path, nargs="?", help=file_help)
    what.add_argument("--system", action="store_true", help="versions, platform, cores, memory")
    parser.set_defaults(run=_info)


def _add_tune(commands: Any, common: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "tune",
        parents=[common],
        allow_abbrev=False,
        help="find how many workers, environments and timesteps are fastest",
        description="Tries numbers of workers, environments and timesteps with a random agent, and prints the best. "
        "The limit is bare loops of the same environments, one process for each core.",
    )
    parser.set_defaults(run=_tune)
    parser.add_argument("env_id", metavar="ENV_ID", help="as for collect")
    seconds_help = "after which no other trial begins; default: %(default)g"
    parser.add_argument("--seconds", metavar="S", type=_read_positive, default=20.0, help=seconds_help)


def _collect(options: argparse.Namespace) -> int:
    from rlstructs.cli import report
    from rlstructs.cli.collect import Collected, run_rollouts, write_rollouts

    if options.action_mask is not None and options.agent != "random":
        raise SpecError(f"--action-mask: is for --agent random; {options.agent} has to read its mask itself")
    report.check_outputs(options.out, options.plot, options.minari, options.trace, options.compress)
    if options.nodes is not None and options.ray is None:
        raise SpecError("--nodes: is for --ray")
    if options.ray is not None and options.workers == 0:
        raise SpecError("--workers: 0 runs in this process; --ray needs at least 1")
    settings, collected = _settings(options), Collected()
    folder = Path(options.out) if report.is_folder(options.out) else None
    keep = options.out is not None and folder is None
    with (
        one_interrupt() as no_more_interrupts,
        contextlib.closing(_then(run_rollouts(settings, collected, keep), no_more_interrupts)) as rollouts,
    ):
        try:
            write_rollouts(rollouts, settings, folder, options.minari, options.compress)
        except SpecError:
            if collected.stopped_by is None or collected.rollouts:  # otherwise it is that there is no episode
                raise
        if collected.rollouts:
            print(report.summary(settings, collected, _write(options, settings, collected)), flush=True)
    if isinstance(collected.stopped_by, KeyboardInterrupt):
        if not collected.rollouts:
            print("rlstructs: interrupted before anything was collected", file=sys.stderr)
        return INTERRUPTED
    if collected.stopped_by is not None:
        raise collected.stopped_by
    return 0


def _then(rollouts: Iterator[Any], function: Callable[[], None]) -> Generator[Any, None, None]:
    """Yields all items, then calls a function."""
    yield from rollouts
    function()


@contextlib.contextmanager
def one_interrupt() -> Iterator[Callable[[], None]]:
    """Lets only the first Ctrl-C interrupt.

    A second one could destroy what is being written.

    Yields a function; after a call of it the first Ctrl-C is ignored too.
    """

    def ignore() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def interrupt(*_: Any) -> None:
        ignore()
        raise KeyboardInterrupt

    # Only the main thread may set handlers; a program's own handler, or that of a background job, stays.
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield ignore
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _settings(options: argparse.Namespace) -> Settings:
    from rlstructs.cli.collect import Settings
    from rlstructs.cli.makers import find_agent
    from rlstructs.envs.gym_envs import find_env

    _find_modules_here()
    n_per_rollout = options.timesteps * options.envs * max(1, options.workers)
    find_agent(options.agent)  # fails at once here; workers call it again
    return Settings(
        env_id=find_env(options.env_id),
        agent=options.agent,
        n_workers=options.workers,
        n_envs=options.envs,
        n_timesteps=options.timesteps,
        n_rollouts=math.ceil(options.steps / n_per_rollout),
        seed=options.seed,
        ray=options.ray,
        n_nodes=options.nodes,
        action_mask=options.action_mask,
        trace=options.trace,
        threads=options.threads,
    )


def _play(options: argparse.Namespace) -> int:
    from rlstructs.cli import report
    from rlstructs.cli.makers import find_agent
    from rlstructs.cli.play import VIDEO_ENDINGS, Settings, play
    from rlstructs.envs.gym_envs import find_env

    if options.video is not None:
        report.check_path("--video", options.video, VIDEO_ENDINGS)
    elif options.fps is not None:
        raise SpecError("--fps: is for --video; a window goes at the environment's own pace")
    _find_modules_here()
    find_agent(options.agent)  # fails at once here; the worker calls it again
    settings = Settings(
        env_id=find_env(options.env_id),
        agent=options.agent,
        n_episodes=options.episodes,
        max_steps=options.max_steps,
        seed=options.seed,
        video=options.video,
        fps=options.fps,
    )
    with one_interrupt():
        play(settings)
    return 0


def _find_modules_here() -> None:
    # For --agent and module:EnvId. Last, as workers get this path too and import the library by it: nothing in the
    # current directory takes the place of an installed module.
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)


def _tune(options: argparse.Namespace) -> int:
    from rlstructs.cli.tune import print_trials
    from rlstructs.envs.gym_envs import find_env

    _find_modules_here()
    print_trials(find_env(options.env_id), n_cores(), options.seconds)
    return 0


def _write(options: argparse.Namespace, settings: Settings, collected: Collected) -> list[str]:
    from rlstructs.cli import report

    if options.out is not None and not report.is_folder(options.out):
        collected.trajectories().save(options.out, compress=options.compress)
    if options.plot is not None:
        report.plot(options.plot, settings, collected)
    return [str(path) for path in (options.out, options.minari, options.plot, options.trace) if path is not None]


def _info(options: argparse.Namespace) -> int:
    if options.system:
        from rlstructs.cli.report import describe_system

        lines = describe_system()
    else:
        from rlstructs.cli import report

        lines = report.describe(options.file)
    for line in lines:
        print(line)
    return 0


def _int_from(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return read


def _read_positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
    return value


def _message_line(error: Exception) -> str:
    """Returns the message of an error in one line.

    Errors that are not this library's also show their class and worker.
    """
    try:
        message = " ".join(str(error).split())
    except Exception:
        message = "its message cannot be shown"
    if isinstance(error, (RLError, WorkerError, OutOfMemoryError, FileNotFoundError)):
        return message
    cause = error.__cause__
    where = f"in worker {cause.worker_index}; " if isinstance(cause, RemoteTraceback) else ""
    return f"{type(error).__name__}: {message} ({where}--debug shows the traceback)"
