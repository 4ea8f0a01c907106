"""`rlstructs play`: every frame is in the video, in one size; nothing half-written is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import cv2
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from processes import LIMIT

from rlstructs import DictTensor, RL_Agent
from rlstructs.cli.command import main
from rlstructs.cli.play import SCREENS, check_whole

# Seconds; only reached when something hangs.
FPS = 20
# Grey levels from one frame to the next, more than compression blurs.
STEP = 12


class Painted(gymnasium.Env):
    """Frame t of an episode, the one of its reset being 0, is grey of level `STEP * t`; in the trainer it fails.

    Args:
        length: of an episode.
        shape: of a frame.
        grows: whether frames become larger in step 3.
        trainer: process id in which it may not be.
    """

    metadata = {"render_modes": ["human", "rgb_array"], "render_fps": FPS}  # noqa: RUF012
    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, trainer, render_mode=None, length=5, shape=(32, 64, 3), grows=False):
        assert trainer != os.getpid()
        self.render_mode, self.length, self.shape, self.grows = render_mode, length, shape, grows

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(1, np.float32), 2.0, self.steps == self.length, False, {}

    def render(self):
        height = self.shape[0] + 2 * (self.grows and self.steps == 3)
        return np.full((height, *self.shape[1:]), STEP * self.steps % 240, np.uint8)


class Timeless(Painted):
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012


class Blind(Painted):
    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012


class Driven(Painted):
    """Its return is the number of letters in the name of SDL's driver."""

    def step(self, action):
        return *super().step(action)[:1], len(os.environ["SDL_VIDEODRIVER"]), True, False, {}


class Still(RL_Agent):
    """Always does the same."""

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        return DictTensor({"action": torch.zeros(observation.n_elems(), dtype=torch.int64)}), state


class Torn(Painted):
    """Raises in its third step."""

    def step(self, action):
        if self.steps == 2:
            raise RuntimeError("torn")
        return super().step(action)


ENVIRONMENTS = {
    "Play/Painted-v0": (Painted, {}),
    "Play/Odd-v0": (Painted, {"shape": (31, 45, 3)}),
    "Play/Long-v0": (Painted, {"length": 10_000}),
    "Play/Grey-v0": (Painted, {"shape": (32, 32)}),
    "Play/Growing-v0": (Painted, {"grows": True}),
    "Play/Timeless-v0": (Timeless, {}),
    "Play/Blind-v0": (Blind, {}),
    "Play/Torn-v0": (Torn, {}),
    "Play/Driven-v0": (Driven, {}),
}


@pytest.fixture(autouse=True)
def ids():
    for env_id, (entry_point, arguments) in ENVIRONMENTS.items():
        gymnasium.register(env_id, entry_point, kwargs={"trainer": os.getpid(), **arguments}, disable_env_checker=True)
    yield
    for env_id in ENVIRONMENTS:
        del gymnasium.registry[env_id]


@pytest.fixture
def play(capsys, monkeypatch, tmp_path):
    """`play(*arguments)`, in an empty folder, gives the exit code and what was printed on stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def play(*arguments):
        code = main(["play", *map(str, arguments)])
        return code, *capsys.readouterr()

    return play


def frames_of(path):
    """(F, H, W, 3), and frames per second."""
    video, frames = cv2.VideoCapture(str(path)), []
    while (found := video.read())[0]:
        frames.append(found[1])
    return np.stack(frames), video.get(cv2.CAP_PROP_FPS)


def test_a_video_has_the_frames_of_every_reset_and_step(play, tmp_path):
    code, stdout, stderr = play("Play/Painted-v0", "--episodes", 2, "--video", "x.mp4")
    assert (code, stderr) == (0, "")
    lines = [f"episode {number}: return 10.00, 5 steps" for number in (1, 2)]
    assert stdout.splitlines() == [*lines, "wrote x.mp4"]
    frames, fps = frames_of(tmp_path / "x.mp4")
    assert frames.shape == (12, 32, 64, 3) and fps == FPS
    levels = STEP * np.tile(np.arange(6), 2)
    assert (abs(frames.astype(int) - levels[:, None, None, None]) < STEP / 2).all()
    assert list(tmp_path.iterdir()) == [tmp_path / "x.mp4"]


def test_frames_of_an_odd_size_are_not_scaled_but_get_a_row_and_a_column(play, tmp_path):
    assert play("Play/Odd-v0", "--video", "x.mp4")[0] == 0
    assert frames_of(tmp_path / "x.mp4")[0].shape == (6, 32, 46, 3)


def test_options_decide_over_length_and_speed_and_take_the_place_of_the_environments(play, tmp_path):
    (tmp_path / "x.mp4").write_text("an older one")
    options = ["--max-steps", 3, "--fps", 12.5, "--video", "x.mp4", "--agent", "test_play:Still"]
    code, stdout, _ = play("Play/Timeless-v0", *options)
    assert code == 0 and stdout.startswith("episode 1: return 6.00, 3 steps\n")
    frames, fps = frames_of(tmp_path / "x.mp4")
    assert len(frames) == 4 and fps == 12.5


@pytest.mark.parametrize(("env_id", "shape"), [("CartPole-v1", (400, 600, 3)), ("ALE/Pong-v5", (210, 160, 3))])
def test_environments_of_gymnasium_are_recorded(play, tmp_path, env_id, shape):
    code, stdout, _ = play(env_id, "--max-steps", 6, "--video", "x.mp4", "--seed", 3)
    assert code == 0 and re.match(r"episode 1: return .*, 6 steps\n", stdout)
    frames, _ = frames_of(tmp_path / "x.mp4")
    assert frames.shape == (7, *shape) and (frames[0] != frames[-1]).any()


def test_the_seed_decides_what_is_played(play):
    options = ["--episodes", 5, "--video", "x.mp4"]
    first, same, other = (play("CartPole-v1", *options, "--seed", seed) for seed in (1, 1, 2))
    assert first == same != other


def test_without_a_video_it_plays_in_a_window(play, tmp_path, monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")  # a window that nobody sees
    code, stdout, _ = play("CartPole-v1", "--max-steps", 3)
    assert code == 0 and re.fullmatch(r"episode 1: return 3\.00, 3 steps\n", stdout)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("env_id", ["CartPole-v1", "ALE/Pong-v5", "HalfCheetah-v5"])
def test_without_a_screen_a_window_is_an_error_that_names_the_video(play, monkeypatch, env_id):
    for name in SCREENS:
        monkeypatch.delenv(name, raising=False)
    code, stdout, stderr = play(env_id, "--max-steps", 3)
    assert (code, stdout) == (2, "")
    words = "there is no screen to show it on, neither .* is set: record it with --video FILE.mp4"
    assert re.fullmatch(f"rlstructs: error: {env_id}: {words}\n", stderr)


def test_without_a_screen_an_environment_that_needs_no_window_is_played(play, monkeypatch):
    for name in SCREENS:
        monkeypatch.delenv(name, raising=False)
    assert play("Play/Painted-v0") == (0, "episode 1: return 10.00, 5 steps\n", "")


@pytest.mark.parametrize(("chosen", "driver"), [(None, "dummy"), ("offscreen", "offscreen")])
def test_a_video_needs_no_driver_of_a_screen(play, monkeypatch, chosen, driver):
    if chosen is None:
        monkeypatch.delenv("SDL_VIDEODRIVER", raising=False)
    else:
        monkeypatch.setenv("SDL_VIDEODRIVER", chosen)
    _, stdout, _ = play("Play/Driven-v0", "--video", "x.mp4")
    assert stdout.startswith(f"episode 1: return {len(driver)}.00, 1 steps\n")


ERRORS = {
    "unknown id": (["CartPol-v1"], "CartPol-v1: Environment `CartPol` doesn't exist.*"),
    "unknown agent": (["Play/Painted-v0", "--agent", "test_play:x"], "--agent test_play:x: .* has no attribute 'x'"),
    "no agent": (["Play/Painted-v0", "--agent", "test_play:FPS"], "--agent test_play:FPS: must be callable, .* int"),
    "agent of nothing": (
        ["Play/Painted-v0", "--agent", "builtins:dict"],
        "--agent builtins:dict: must return an RL_Agent or a torch.nn.Module, got dict",
    ),
    "no episodes": (["Play/Painted-v0", "--episodes", "0"], ".*--episodes: must be at least 1, got 0"),
    "ending": (["Play/Painted-v0", "--video", "x.gif"], r"--video: the name must end in \.mp4, got 'x\.gif'"),
    "folder": (["Play/Painted-v0", "--video", "no/x.mp4"], "--video: there is no directory 'no'"),
    "speed of a window": (["Play/Painted-v0", "--fps", "30"], "--fps: is for --video; a window goes at .* own pace"),
    "no speed": (["Play/Timeless-v0", "--video", "x.mp4"], "Play/Timeless-v0: its metadata has no render_fps: .*--fps"),
    "cannot be shown": (["Play/Blind-v0"], r"Play/Blind-v0: .* 'human' is needed, its render modes are \['ansi'\]"),
    "cannot be recorded": (
        ["Play/Blind-v0", "--video", "x.mp4"], r".*: 'rgb_array' is needed, its render modes are \['ansi'\]"
    ),
    "no picture": (
        ["Play/Grey-v0", "--video", "x.mp4"], r"render: must return an array of uint8 \(H, W, 3\), got uint8 \(32, 32\)"
    ),
    "changing size": (
        ["Play/Growing-v0", "--video", "x.mp4"],
        r"render: frames .* must have one shape, got \(34, 64, 3\) after \(32, 64, 3\)",
    ),
    "environment raises": (["Play/Torn-v0", "--video", "x.mp4"], r"RuntimeError: torn \(in worker 0; .*\)"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), ERRORS.values(), ids=ERRORS)
def test_an_error_is_one_line_and_leaves_no_file(play, tmp_path, arguments, message):
    code, stdout, stderr = play(*arguments)
    assert (code, stdout) == (2, "")
    assert re.fullmatch(f"rlstructs: error: {message}\n", stderr)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("share", [0, 0.5, 0.999])
def test_a_video_that_was_cut_off_is_no_video(play, tmp_path, share):
    path = tmp_path / "x.mp4"
    assert play("Play/Painted-v0", "--video", path)[0] == 0
    check_whole(path)
    os.truncate(path, int(share * path.stat().st_size))
    with pytest.raises(OSError, match=r"^the video was cut off after [\d,]+ bytes$"):
        check_whole(path)


def test_imageio_is_missed_before_anything_runs(play, monkeypatch):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)  # what makes an import fail
    code, stdout, stderr = play("None-v0", "--video", "x.mp4")
    assert (code, stdout) == (2, "")
    assert re.fullmatch(r"rlstructs: error: --video: \.mp4 files need imageio_ffmpeg: .*\n", stderr)


WORLD = """
import gymnasium
from test_play import Painted, Still

gymnasium.register("Long-v0", "world:Painted", kwargs={"trainer": None, "length": 7}, disable_env_checker=True)
"""


def test_ctrl_c_keeps_what_was_recorded_and_leaves_no_worker(subprocess_env, quick_programs, tmp_path):
    (tmp_path / "world.py").write_text(WORLD)
    # A test run in the background may have been told to ignore SIGINT, and its children with it.
    program = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    program += "from rlstructs.cli.command import main; sys.exit(main())"
    options = ["--agent", "world:Still", "--episodes", "1000000", "--video", "x.mp4"]
    with subprocess.Popen(
        [sys.executable, "-c", program, "play", "world:Long-v0", *options],
        cwd=tmp_path, env=subprocess_env, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            assert process.stdout.readline() == b"episode 1: return 14.00, 7 steps\n"
            os.killpg(process.pid, signal.SIGINT)
            # The worker holds these pipes too: their ends are only seen once it is gone.
            stdout, stderr = process.communicate(timeout=LIMIT)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, stderr) == (130, b"rlstructs: interrupted\n")
    *episodes, last = stdout.splitlines()
    assert last == b"wrote x.mp4"
    assert len(frames_of(tmp_path / "x.mp4")[0]) >= 8 * (1 + len(episodes))
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"world.py", "x.mp4"}
