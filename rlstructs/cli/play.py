"""`rlstructs play`: shows an agent in a window or a video.

A worker process renders it, and records the video.

    trainer                                    the worker
    -------                                    ----------
    reset(), execute()  ── requests ────────>  steps and renders the environment
    get(), episodes()   <── rewards, ends ───
                                               each frame ──>  ffmpeg ──> .name.mp4
    renames the file once the worker has ended

Each frame goes to ffmpeg at once, so that neither process holds more than one frame, however long an episode is.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import load_env_creator

from rlstructs.batcher.batcher import RL_Batcher
from rlstructs.cli.makers import NamedAgent
from rlstructs.envs.gym_env import GymEnv
from rlstructs.errors import SpecError
from rlstructs.files.layout import temporary_name
from rlstructs.rollout.makers import Makers

# File ending of a video -> the module needed to write it.
VIDEO_ENDINGS: dict[str, str | None] = {".mp4": "imageio_ffmpeg"}
# Steps of a rollout; the worker replies after each rollout.
N_TIMESTEPS = 32
# Environment variables that choose the screen on Linux; the last one is for SDL, and only users set it.
SCREENS = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")
# Drivers that SDL, and so pygame, uses without a screen; their windows are invisible.
INVISIBLE = ("dummy", "offscreen")
# Modules of environments with other windows. Without a screen, ALE shows nothing, and GLFW ends the process.
OTHER_WINDOWS = ("ale_py", "gymnasium.envs.mujoco")


@dataclass(frozen=True)
class Settings:
    """The arguments of `rlstructs play`.

    Attributes:
        env_id: id in gymnasium's registry.
        agent: name of the agent for `makers.find_agent`.
        n_episodes: number of episodes.
        max_steps: steps after which an episode is truncated; None for the environment's own limit.
        seed: seed of environment and agent.
        video: the file to write; None for a window.
        fps: frames per second of the video; None for the `render_fps` of the environment's metadata.
    """

    env_id: str
    agent: str
    n_episodes: int
    max_steps: int | None
    seed: int
    video: Path | None
    fps: float | None


def play(settings: Settings) -> None:
    """Plays episodes; prints a line for each, and one for the video.

    Raises:
        SpecError: the environment cannot be rendered in this way.
        OSError: the video cannot be written.
        KeyboardInterrupt: Ctrl-C; the recording so far is kept.
        Exception: environment or agent raised; nothing is kept.
    """
    stopped_by: KeyboardInterrupt | None
    if settings.video is None:
        stopped_by = _run(settings, None)
    else:
        temporary = temporary_name(settings.video.absolute())  # the worker may be in another directory
        try:
            stopped_by = _run(settings, temporary)
            if temporary.exists():  # Ctrl-C may have come before the first frame
                check_whole(temporary)
                os.replace(temporary, settings.video)
                print(f"wrote {settings.video}", flush=True)
        finally:
            temporary.unlink(missing_ok=True)
    if stopped_by is not None:
        raise stopped_by


def _run(settings: Settings, path: Path | None) -> KeyboardInterrupt | None:
    """Plays episodes and completes the video; returns the interrupt, if any."""
    maker = Makers(partial(_make, settings, path), NamedAgent(settings.agent), n_envs=1, kind=GymEnv)
    try:
        with RL_Batcher(
            n_timesteps=N_TIMESTEPS,
            create_agent=maker.create_agent,
            agent_args={},
            create_env=maker.create_env,
            env_args={},
            n_processes=1,
            seeds=settings.seed,
        ) as batcher:
            for number in range(1, settings.n_episodes + 1):
                batcher.reset()
                n_running: int | None = 1
                while n_running:
                    batcher.execute()
                    _, n_running = batcher.get()
                ended = batcher.episodes()
                steps = f"{ended['length'].item():,} steps"
                print(f"episode {number}: return {ended['return'].item():,.2f}, {steps}", flush=True)
    except KeyboardInterrupt as error:
        return error
    return None


def _make(settings: Settings, path: Path | None) -> gymnasium.Env[Any, Any]:
    """Makes the environment, which renders itself in a window or to a file."""
    mode = "human" if path is None else "rgb_array"
    _check_mode(settings.env_id, mode)
    if path is not None:  # without a screen SDL would complain
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    env = gymnasium.make(settings.env_id, render_mode=mode)
    if settings.max_steps is not None:
        env = gymnasium.wrappers.TimeLimit(env, settings.max_steps)
    if path is None:
        return Window(env, settings.env_id)
    fps = settings.fps or env.metadata.get("render_fps")
    if not fps:
        raise SpecError(f"{settings.env_id}: its metadata has no render_fps: give --fps")
    return Recorder(env, path, fps)


def _check_mode(env_id: str, mode: str) -> None:
    """Raises SpecError if the environment's class does not support a render mode.

    `gymnasium.make` only warns, and many constructors fail with an unhelpful assertion.
    """
    creator = gymnasium.spec(env_id).entry_point
    metadata = getattr(load_env_creator(creator) if isinstance(creator, str) else creator, "metadata", None)
    if not isinstance(metadata, Mapping):  # the entry point is a function: its environments are not known yet
        return
    # Gymnasium can also show arrays in a window.
    enough = {"rgb_array"} if mode == "rgb_array" else {"human", "rgb_array", "rgb_array_list"}
    modes = metadata.get("render_modes") or []
    if not enough.intersection(modes):
        raise SpecError(f"{env_id}: cannot be rendered: {mode!r} is needed, its render modes are {list(modes)}")


class Window(gymnasium.Wrapper):  # type: ignore[misc]
    """An environment that shows itself; raises if its window has no screen.

    Environments that print text need no screen.

    Args:
        env: made with `render_mode="human"`.
        env_id: its name in messages.

    Raises:
        SpecError: there is no screen for its window.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], env_id: str) -> None:
        super().__init__(env)
        self._env_id = env_id
        self._check(any(base.__module__.startswith(OTHER_WINDOWS) for base in type(env.unwrapped).__mro__))

    def reset(self, **arguments: Any) -> Any:
        """Resets the environment, and checks that there is a screen for its window."""
        found = self.env.reset(**arguments)
        pygame = sys.modules.get("pygame")  # only the first reset opens the window
        self._check(pygame is not None and pygame.display.get_init() and pygame.display.get_driver() in INVISIBLE)
        return found

    def _check(self, needs_screen: bool) -> None:
        if needs_screen and sys.platform == "linux" and not any(map(os.environ.get, SCREENS)):
            raise SpecError(
                f"{self._env_id}: there is no screen to show it on, neither DISPLAY nor WAYLAND_DISPLAY is set: "
                "record it with --video FILE.mp4"
            )


class Recorder(gymnasium.Wrapper):  # type: ignore[misc]
    """Writes a frame to an H.264 video after every reset and step.

    Args:
        env: made with `render_mode="rgb_array"`.
        path: the file; the first frame creates it, `close` completes it.
        fps: frames per second.

    Raises:
        SpecError: a frame is not uint8 (H, W, 3), or frames have different sizes.
        OSError: ffmpeg cannot write it.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], path: Path, fps: float) -> None:
        super().__init__(env)
        self._path, self._fps = path, float(fps)
        self._shape: tuple[int, ...] = ()
        self._writer: Generator[None, np.ndarray | None, None] | None = None

    def reset(self, **arguments: Any) -> Any:
        """Resets the environment and records a frame."""
        found = self.env.reset(**arguments)
        self._record()
        return found

    def step(self, action: Any) -> Any:
        """Steps the environment and records a frame."""
        found = self.env.step(action)
        self._record()
        return found

    def close(self) -> None:
        """Completes the video and closes the environment."""
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            super().close()

    def _record(self) -> None:
        frame = self.env.render()
        if not isinstance(frame, np.ndarray) or frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            found = f"{frame.dtype} {frame.shape}" if isinstance(frame, np.ndarray) else type(frame).__name__
            raise SpecError(f"render: must return an array of uint8 (H, W, 3), got {found}")
        # Repeats the last row or column of an odd size, because H.264 halves the resolution of colours.
        even = np.pad(frame, ((0, frame.shape[0] % 2), (0, frame.shape[1] % 2), (0, 0)), mode="edge")
        if self._writer is None:
            self._shape, self._writer = frame.shape, self._start_writer(*even.shape[:2])
        if frame.shape != self._shape:
            raise SpecError(f"render: frames of a video must have one shape, got {frame.shape} after {self._shape}")
        self._writer.send(np.ascontiguousarray(even))

    def _start_writer(self, height: int, width: int) -> Generator[None, np.ndarray | None, None]:
        import imageio_ffmpeg

        # A larger macro block would scale frames to multiples of its size. With zero latency ffmpeg holds no frames
        # back, so that it can finish in the 3 seconds that a worker has to close.
        writer: Generator[None, np.ndarray | None, None] = imageio_ffmpeg.write_frames(
            str(self._path),
            (width, height),
            fps=self._fps,
            codec="libx264",
            macro_block_size=1,
            output_params=["-tune", "zerolatency"],
        )
        writer.send(None)
        return writer


def check_whole(path: Path) -> None:
    """Raises OSError unless an MP4 file is complete.

    After a full disk or a killed worker, boxes of the format are missing; there is no other sign.
    """
    size, at = path.stat().st_size, 0
    kinds: set[bytes] = set()
    with path.open("rb") as file:
        while at < size:
            file.seek(at)
            length, kind, long_length = struct.unpack(">I4sQ", file.read(16).ljust(16, b"\0"))
            kinds.add(kind)
            at += max(8, long_length if length == 1 else length)
    if at != size or b"moov" not in kinds:  # the index, which ffmpeg writes last
        raise OSError(f"the video was cut off after {size:,} bytes")
