"""Records a video of what an environment renders."""

from __future__ import annotations

import struct
from collections.abc import Generator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from rlstructs.errors import SpecError


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
