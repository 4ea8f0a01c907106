from __future__ import annotations

import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import threading
import zipfile
from collections import defaultdict
from importlib.util import find_spec

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import Count, count_batcher, create_gym, rollout
from matplotlib.image import imread
from processes import LIMIT

from rlstructs import DictTensor, RandomAgent, RL_Agent, RL_Batcher, TemporalDictTensor, Trajectories, load_rollouts
from rlstructs.cli import command, report
from rlstructs.cli.collect import Settings, collect
from rlstructs.cli.command import main
from rlstructs.structures import trajectories
from rlstructs.testing import Fault, FaultyEnv, create_faulty_envs

# Seconds; only reached when something hangs.
ABOUT = ("author", "author_email", "code_permalink", "algorithm_name", "description")
SMALL = ["--workers", "0", "--envs", "2", "--timesteps", "10", "--steps", "60"]


class OddError(Exception):
    """As awkward as a class of a user's can be: its arguments are not its message, which has two lines."""

    def __init__(self, first, second):
        self.first = first

    def __str__(self):
        return "it went\n  wrong"


class MuteError(Exception):
    """Cannot even say what it is."""

    def __str__(self):
        raise ValueError


class Faulty(Count):
    """Raises `error`, or leaves the process, in one of its methods; in `step` at step 25 of its life."""

    def __init__(self, where, error=OddError):
        super().__init__(length=3)
        self.where, self.error, self.life = where, error, 0
        self._fail("constructor")

    def _fail(self, where):
        if where == self.where:
            if self.error is None:
                os._exit(5)
            raise self.error(1, 2)

    def reset(self, **arguments):
        self._fail("reset")
        return super().reset(**arguments)

    def step(self, action):
        self.life += 1
        if self.life == 25:
            self._fail("step")
        return super().step(action)

    def close(self):
        self._fail("close")


class Stuck(Count):
    """Says so, and never comes back from its constructor."""

    def __init__(self):
        os.write(2, b"stuck\n")
        threading.Event().wait()


class Worded(Count):
    observation_space = spaces.Text(5)

    def __init__(self):
        super().__init__(length=3)


class Frames(Count):
    """Shows noise that moves."""

    observation_space = spaces.Box(0, 255, (40, 40), np.uint8)

    def _observation(self):
        return np.roll(np.random.default_rng(self.episode).integers(0, 256, (40, 40), np.uint8), self.steps, axis=1)


class Fixed(RL_Agent):
    """Always does the same."""

    def __init__(self, action):
        self.action = action

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        return DictTensor({"action": torch.full((observation.n_elems(),), self.action)}), state


def takes_both(action_space, observation_space):
    assert action_space == Count.action_space and observation_space == Count.observation_space
    return Fixed(1)


def takes_one(*, action_space, more=0):
    return Fixed(more + int(action_space == Count.action_space) + 1)


def takes_any(**given):
    return Fixed(len(given) + 1)


def takes_none():
    return Fixed(4)


class Choosing(torch.nn.Module):
    """Chooses action 2."""

    def forward(self, frame):
        return torch.tensor([0.0, 0, 1e4, 0, 0]).expand(len(frame), 5)


an_agent, network, makes_network = Fixed(3), Choosing(), lambda: Choosing()


def raises():
    raise OddError(1, 2)


def returns_none():
    pass


not_callable = 3

ENVIRONMENTS = {
    "Cli/Count-v0": (Count, {"length": 3}),
    "Cli/Long-v1": (Count, {"length": 10_000}),
    "Cli/Worded-v0": (Worded, {}),
    "Cli/Frames-v0": (Frames, {"length": 7}),
    "Cli/Mute-v0": (Faulty, {"where": "step", "error": lambda *_: MuteError()}),
    "Cli/Pipe-v0": (Faulty, {"where": "step", "error": lambda *_: BrokenPipeError("lost its server")}),
    "Cli/Gone-v0": (Faulty, {"where": "step", "error": None}),
    **{f"Cli/{where}-v0": (Faulty, {"where": where}) for where in ("constructor", "reset", "step", "close")},
}


@pytest.fixture(autouse=True)
def ids():
    for env_id, (entry_point, arguments) in ENVIRONMENTS.items():
        gymnasium.register(env_id, entry_point, kwargs=arguments, disable_env_checker=True)
    yield
    for env_id in ENVIRONMENTS:
        del gymnasium.registry[env_id]


@pytest.fixture
def run(capsys):
    """`run(*arguments)` gives the exit code and what was printed on stdout and stderr."""

    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


def brute_force_episodes(trajectories):
    """Returns and lengths of the episodes, step by step."""
    going, ended = defaultdict(list), []
    steps = trajectories.trajectories
    for row, env in enumerate(trajectories.info["env_index"].tolist()):
        for t in range(int(steps.lengths[row])):
            going[env].append(steps["_observation/reward"][row, t].item())
            if steps["_observation/done"][row, t]:
                ended.append((sum(going[env]), len(going.pop(env))))
    returns, lengths = zip(*ended, strict=True)
    return np.array(returns), np.array(lengths)


def collected(batcher, n_rollouts):
    return Trajectories.cat(rollout(batcher)[0] for _ in range(n_rollouts))


@pytest.mark.parametrize(("ending", "n_workers"), [(".npz", 2), (".pt", 0), (".h5", 0)])
def test_collect_writes_what_the_batcher_gives(run, tmp_path, ending, n_workers):
    out = tmp_path / f"x{ending}"
    options = ["--workers", n_workers, "--envs", 2, "--timesteps", 16, "--steps", 100, "--seed", 3, "--out", out]
    code, _, _ = run("collect", "CartPole-v1", *options)
    assert code == 0
    n_rollouts = -(-100 // (16 * 2 * max(1, n_workers)))
    with RL_Batcher(
        n_timesteps=16,
        create_agent=lambda: RandomAgent(spaces.Discrete(2)),
        agent_args={},
        create_env=create_gym,
        env_args={"env_id": "CartPole-v1", "n_envs": 2},
        n_processes=n_workers,
        seeds=3,
    ) as batcher:
        batcher.reset()
        assert Trajectories.load(out) == collected(batcher, n_rollouts)


def test_compressed_files_have_the_same_trajectories_and_frames_once(run, tmp_path):
    options = ["collect", "Cli/Frames-v0", *SMALL, "--steps", 400, "--seed", 3]
    outs = [tmp_path / "raw.npz", tmp_path / "x.npz", tmp_path / "x.h5", f"{tmp_path}/x/"]
    for out in outs:
        assert run(*options, "--out", out, *["--compress"] * (out != outs[0]))[0] == 0
    raw, *others = map(Trajectories.load, outs)
    assert all(other == raw for other in others) and raw["observation/frame"].shape[2:] == (40, 40)
    assert outs[1].stat().st_size < 0.7 * outs[0].stat().st_size  # of noise, with what ended an episode
    lines = [run("info", out)[1].splitlines()[1:] for out in outs]
    assert all(other == lines[0] for other in lines)
    code, _, stderr = run("collect", "Cli/Frames-v0", *SMALL, "--compress")
    assert code == 2 and stderr.endswith("--compress: is for --out\n")


def test_collect_writes_a_folder_and_a_dataset_while_it_runs(run, tmp_path, monkeypatch):
    minari = pytest.importorskip("minari")
    from rlstructs.integrations.minari import from_minari, to_minari

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    monkeypatch.setattr(trajectories, "PART_NBYTES", 9_000)
    options = ["collect", "CartPole-v1", *SMALL, "--steps", 400, "--seed", 3]
    assert run(*options, "--out", tmp_path / "x.npz")[0] == 0
    code, stdout, _ = run(*options, "--out", f"{tmp_path}/x/", "--minari", "cart/x-v0", "--plot", tmp_path / "x.png")
    assert code == 0 and stdout.endswith(f"steps/s; wrote {tmp_path}/x/, cart/x-v0, {tmp_path}/x.png\n")
    whole, parts = Trajectories.load(tmp_path / "x.npz"), list(load_rollouts(tmp_path / "x"))
    assert Trajectories.load(tmp_path / "x") == Trajectories.cat(parts) == whole and 2 < len(parts) < 20
    of_file, of_folder = (run("info", tmp_path / name)[1].splitlines() for name in ("x.npz", "x"))
    assert of_folder[1:] == of_file[1:] and f": Trajectories in {len(parts)} files, 40 rows, " in of_folder[0]
    to_minari("cart/whole-v0", [whole], "CartPole-v1", **dict.fromkeys(ABOUT, "x"), eval_env="CartPole-v1")
    assert from_minari("cart/x-v0") == from_minari("cart/whole-v0")
    metadata = minari.load_dataset("cart/x-v0").storage.metadata
    assert metadata["algorithm_name"] == "random" and "seed 3" in metadata["description"]


def test_summary_bar_and_info_agree_with_a_count_step_by_step(run, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # by which older versions of tqdm cut their bar
    out, plot = tmp_path / "x.npz", tmp_path / "x.png"
    code, stdout, stderr = run("collect", "CartPole-v1", *SMALL, "--steps", 1000, "--out", out, "--plot", plot)
    assert code == 0
    returns, lengths = brute_force_episodes(Trajectories.load(out))
    summary = f"CartPole-v1: 1,000 steps, {len(returns)} episodes, mean return {returns.mean():.2f}, "
    summary += f"mean length {lengths.mean():.2f}, "
    assert re.fullmatch(re.escape(summary) + rf"[\d,]+ steps/s; wrote {out}, {plot}\n", stdout)
    assert re.search(rf"100%.* steps/s, episodes={len(returns)}, mean_return={returns.mean():.2f}\]\n$", stderr)
    code, stdout, _ = run("info", out)
    assert code == 0
    assert stdout.splitlines()[-1] == (
        f"episodes: {len(returns)} ended, "
        f"return min {returns.min():.2f}, mean {returns.mean():.2f}, max {returns.max():.2f}, "
        f"length min {lengths.min()}, mean {lengths.mean():.2f}, max {lengths.max()}"
    )


def test_collect_steps_environments_in_threads(run, tmp_path):
    out = tmp_path / "rollouts.npz"
    assert run("collect", "CartPole-v1", *SMALL, "--threads", "--out", out)[0] == 0
    assert Trajectories.load(out).trajectories["policy_version"].unique().tolist() == [0]


def test_collect_runs_ten_thousand_steps_of_eight_environments_by_default(run):
    code, stdout, _ = run("collect", "Cli/Count-v0", "--workers", 0)
    assert code == 0
    # 10 rollouts of 8 x 128 steps: each environment has 426 episodes of 3 steps in its 1280.
    assert stdout.startswith("Cli/Count-v0: 10,240 steps, 3,408 episodes, mean return 6.00, mean length 3.00, ")


def test_a_masked_environment_is_collected_with_actions_that_it_allows(run, tmp_path):
    out = tmp_path / "x.npz"
    command = ["collect", "masked_env:Masked-v0", "--workers", 0, "--envs", 2, "--steps", 256]
    code, stdout, _ = run(*command, "--action-mask", "action_mask", "--out", out)
    assert code == 0 and stdout.startswith("Masked-v0: 256 steps, 50 episodes, mean return 5.00, ")
    steps = Trajectories.load(out).trajectories
    assert (steps["observation/action_mask"].gather(-1, steps["action/action"][..., None]) == 1).all()
    code, _, stderr = run(*command, "--action-mask", "mask")
    assert code == 2 and "RandomAgent: the mask 'mask' is not a key of the observation, which has [" in stderr
    code, _, stderr = run(*command)
    assert code == 2 and "is forbidden" in stderr


def test_an_agent_of_ones_own_reads_its_mask_itself(run):
    code, _, stderr = run("collect", "CartPole-v1", "--agent", "module:agent", "--action-mask", "mask")
    assert code == 2 and "--action-mask: is for --agent random; module:agent has to read its mask itself" in stderr


def test_the_seed_decides_what_is_collected(run, tmp_path):
    first, same, other = (tmp_path / f"{name}.npz" for name in ("first", "same", "other"))
    for out, seed in ((first, 1), (same, 1), (other, 2)):
        assert run("collect", "CartPole-v1", *SMALL, "--seed", seed, "--out", out)[0] == 0
    assert Trajectories.load(first) == Trajectories.load(same)
    assert Trajectories.load(first) != Trajectories.load(other)


def test_an_id_without_version_means_the_newest(run):
    assert run("collect", "Cli/Long", *SMALL)[1].startswith("Cli/Long-v1: 60 steps, 0 episodes, ")


@pytest.mark.parametrize(
    ("factory", "action"),
    [("takes_both", 1), ("takes_one", 2), ("takes_any", 3), ("takes_none", 4), ("an_agent", 3), ("network", 2),
     ("makes_network", 2), ("Choosing", 2)],
)  # fmt: skip
def test_the_factory_gets_the_spaces_that_it_takes(run, tmp_path, factory, action):
    out = tmp_path / "x.npz"
    assert run("collect", "Cli/Count-v0", *SMALL, "--agent", f"test_cli:{factory}", "--out", out)[0] == 0
    assert (Trajectories.load(out).trajectories["action/action"] == action).all()


WORLD = """
import gymnasium
from helpers import Count
from test_cli import Fixed, Stuck

for environment, arguments in ((Count, {"length": 3}), (Stuck, {})):
    name = environment.__name__
    gymnasium.register(f"{name}-v0", f"world:{name}", kwargs=arguments, disable_env_checker=True)

def agent():
    return Fixed(3)
"""


@pytest.fixture
def start(tmp_path, subprocess_env, quick_programs):
    """`start(*arguments)` runs the installed command, as it were, in a directory that holds `world.py`."""
    (tmp_path / "world.py").write_text(WORLD)
    script = tmp_path / "bin" / "rlstructs"
    script.parent.mkdir()
    # A test run in the background may have been told to ignore SIGINT, and its children with it.
    heard = "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    script.write_text(heard + "from rlstructs.cli.command import main\nsys.exit(main())\n")
    started = []

    def start(*arguments):
        process = subprocess.Popen(
            [sys.executable, script, *map(str, arguments)],
            cwd=tmp_path, env=subprocess_env, start_new_session=True, bufsize=0,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.quick
def test_modules_of_the_current_directory_give_environments_and_agents(start, tmp_path):
    options = ["--workers", 2, "--envs", 1, "--timesteps", 6, "--steps", 24, "--agent", "world:agent"]
    process = start("collect", "world:Count-v0", *options, "--out", "x.npz")
    stdout, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, stderr
    assert stdout.startswith(b"Count-v0: 24 steps, 8 episodes, ")
    assert b"WARN" not in stderr
    assert (Trajectories.load(tmp_path / "x.npz").trajectories["action/action"] == 3).all()


def read_until(stream, text):
    seen = b""
    while text not in seen:
        more = os.read(stream.fileno(), 1 << 16)
        assert more, seen.decode()
        seen += more
    return seen


@pytest.mark.parametrize(("n_workers", "outputs"), [(0, ["--out=x/", "--minari=x-v0"]), (2, ["--out=x.npz"])])
def test_ctrl_c_keeps_what_was_collected_and_leaves_no_worker(start, tmp_path, subprocess_env, n_workers, outputs):
    if "--minari=x-v0" in outputs:
        minari = pytest.importorskip("minari")
    subprocess_env["MINARI_DATASETS_PATH"] = str(tmp_path / "datasets")
    options = ["--workers", n_workers, "--envs", 1, "--timesteps", 8, "--steps", 1_000_000, *outputs]
    process = start("collect", "world:Count-v0", *options, "--plot", "x.png")
    seen = read_until(process.stderr, b"episodes=")
    os.killpg(process.pid, signal.SIGINT)
    # Workers hold these pipes too: their ends are only seen once all of them are gone.
    stdout, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == 130, stderr
    assert b"Traceback" not in seen + stderr and b"error" not in seen + stderr
    names = [option.partition("=")[2] for option in outputs]
    kept = Trajectories.load(tmp_path / names[0])
    n_steps, (returns, _) = int(kept.lengths.sum()), brute_force_episodes(kept)
    assert 0 < n_steps < 1_000_000
    beginning = f"Count-v0: {n_steps:,} steps, {len(returns):,} episodes, mean return 6.00, mean length 3.00, "
    ending = f"stopped early, of 1,000,000 steps; wrote {', '.join([*names, 'x.png'])}\n"
    pattern = re.escape(beginning) + r"[\d,]+ steps/s; " + re.escape(ending)
    assert re.fullmatch(pattern, stdout.decode())
    assert imread(tmp_path / "x.png").shape[2] == 4
    if "x-v0" in names:
        dataset = minari.MinariDataset(tmp_path / "datasets" / "x-v0" / "data")
        assert dataset.total_steps == n_steps and len(dataset) == -(-n_steps // 3)


@pytest.fixture
def default_sigint():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_only_the_first_ctrl_c_interrupts(default_sigint):
    with command.one_interrupt():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_no_ctrl_c_interrupts_what_is_being_written(default_sigint):
    with command.one_interrupt() as no_more_interrupts:
        no_more_interrupts()
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_caller_stays(default_sigint):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with command.one_interrupt() as no_more_interrupts:
        no_more_interrupts()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_ctrl_c_before_the_first_rollout_says_that_there_is_nothing(start, tmp_path):
    process = start("collect", "world:Stuck-v0", "--workers", 2, "--out", "x.npz")
    read_until(process.stderr, b"stuck")
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == 130, stderr
    assert stdout == b"" and stderr.endswith(b"rlstructs: interrupted before anything was collected\n")
    assert b"Traceback" not in stderr
    assert not (tmp_path / "x.npz").exists()


@pytest.mark.quick
def test_help_imports_nothing_heavy(subprocess_env):
    program = """
import sys
from rlstructs.cli.command import main
try:
    main(["collect", "--help"])
finally:
    print(sorted({"torch", "numpy", "gymnasium", "tqdm", "matplotlib"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], env=subprocess_env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("\n[]\n")
    for option in ("--workers W", "--envs N", "--timesteps T", "--steps S", "--agent", "--seed", "--out", "--plot"):
        assert option in done.stdout


ERRORS = {
    "no command": ([], "the following arguments are required: COMMAND; rlstructs --help lists .*"),
    "no environment": (["collect"], "the following arguments are required: ENV_ID"),
    "unknown option": (["collect", "Cli/Count-v0", "--out=x.npz", "--nope"], "unrecognized arguments: --nope"),
    "unknown id": (["collect", "CartPol-v1"], "CartPol-v1: Environment `CartPol` doesn't exist.*`CartPole`.*"),
    "unknown version": (["collect", "CartPole-v9"], "CartPole-v9: Environment version `v9` .* doesn't exist.*"),
    "unknown namespace": (["collect", "None/Such-v0"], "None/Such-v0: Namespace None not found.*"),
    "malformed id": (["collect", "a b"], "a b: Malformed environment ID: a b.*"),
    "unknown module": (["collect", "nomodule:X-v0"], "nomodule:X-v0: cannot import 'nomodule': .*"),
    "negative workers": (["collect", "Cli/Count-v0", "--workers", "-1"], ".*--workers: must be at least 0, got -1"),
    "no environments": (["collect", "Cli/Count-v0", "--envs", "0"], ".*--envs: must be at least 1, got 0"),
    "no timesteps": (["collect", "Cli/Count-v0", "--timesteps", "0"], ".*--timesteps: must be at least 1, got 0"),
    "no steps": (["collect", "Cli/Count-v0", "--steps", "0"], ".*--steps: must be at least 1, got 0"),
    "steps no int": (["collect", "Cli/Count-v0", "--steps", "1.5"], ".*--steps: must be an integer, got '1.5'"),
    "negative seed": (["collect", "Cli/Count-v0", "--seed", "-1"], ".*--seed: must be at least 0, got -1"),
    "unsupported space": (
        ["collect", "Cli/Worded-v0", "--workers", "1"],
        r"observation: space Text\(.*\) is not supported; .*",
    ),
    "agent no name": (["collect", "Cli/Count-v0", "--agent", "best"], "--agent: .* module:factory, got 'best'"),
    "agent no module": (
        ["collect", "Cli/Count-v0", "--agent", "nomodule:x"],
        "--agent nomodule:x: cannot import 'nomodule': .*",
    ),
    "agent no attribute": (
        ["collect", "Cli/Count-v0", "--agent", "test_cli:x"],
        "--agent test_cli:x: .* has no attribute 'x'",
    ),
    "agent not callable": (
        ["collect", "Cli/Count-v0", "--agent", "test_cli:not_callable"],
        "--agent .*: must be callable, .* int",
    ),
    "agent of another class": (
        ["collect", "Cli/Count-v0", *SMALL, "--agent", "test_cli:returns_none"],
        "--agent test_cli:returns_none: must return an RL_Agent or a torch.nn.Module, got NoneType",
    ),
    "agent raises": (["collect", "Cli/Count-v0", *SMALL, "--agent", "test_cli:raises"], "OddError: it went wrong .*"),
    # The id is unknown too: it has not been looked at yet.
    "out ending": (["collect", "None-v0", "--out", "x.csv"], r"--out: .* \.npz or \.pt or \.h5, got 'x\.csv'"),
    "out directory": (["collect", "None-v0", "--out", "no/x.npz"], "--out: there is no directory 'no'"),
    "out is directory": (["collect", "None-v0", "--out", "folder.npz"], "--out: cannot write 'folder.npz': .* direc.*"),
    "out folder": (["collect", "None-v0", "--out", "no/x/"], "--out: cannot write to 'no/x': .* no folder no"),
    "out has files": (["collect", "None-v0", "--out", "full/"], "--out: cannot .* an empty folder, it has 'x.npz'"),
    "info of another folder": (["info", "full"], "full: a folder without part_000000.npz, which save_rollouts .*"),
    "minari id": (
        ["collect", "Cli/Count-v0", *SMALL, "--minari", "x"],
        "to_minari: dataset_id must be .*, got 'x'" if find_spec("minari") else "--minari: needs minari: .*",
    ),
    "plot ending": (["collect", "None-v0", "--plot", "x.jpg"], r"--plot: .* must end in \.png, got 'x\.jpg'"),
    "plot directory": (["collect", "None-v0", "--plot", "no/x.png"], "--plot: there is no directory 'no'"),
    "out too large": (
        ["collect", "Cli/Count-v0", *SMALL, "--steps", "1000000000000", "--out", "x.npz"],
        r"--out: 1,000,000,000,000 steps are up to [\d,.]+ GB, .* are available; use fewer --steps",
    ),
    "rollout too large": (
        ["collect", "Cli/Count-v0", *SMALL, "--timesteps", "1000000000000"],
        "shared memory: .* bytes are needed.*",
    ),
    "info of nothing": (["info"], "one of the arguments FILE --system is required"),
    "info of two things": (["info", "x.npz", "--system"], ".*--system: not allowed with argument FILE"),
    "info missing": (["info", "no.npz"], "no.npz: no such file"),
    "info missing folder": (["info", "no/such"], "no/such: no such file"),
    "info missing state": (["info", "no.pt"], "no.pt: no such file"),
    "info damaged": (["info", "damaged.npz"], "damaged.npz: not a file of rlstructs, or a damaged one: .*"),
    "info weights": (
        ["info", "weights.pt"],
        "weights.pt: not a file of rlstructs, .*; info reads files that `rlstructs collect --out` or a `save` .* wrote",
    ),
    "info crafted": (["info", "crafted.pt"], "crafted.pt: damaged: .*'int' object has no attribute 'get'"),
    "info cut": (["info", "cut.pt"], "cut.pt: not a file of rlstructs, or a damaged one: .*"),
    "info pipe": (["info", "pipe.pt"], "pipe.pt: is a named pipe, expected a regular file; info reads .*"),
    "info compressed": (["info", "packed.pt"], "packed.pt: not a file of .*: it is compressed; info reads .*"),
    "info ending": (["info", "x.txt"], r"x.txt: the name must end in one of \.npz, \.pt, \.h5; info reads .*"),
}


@pytest.mark.parametrize(("arguments", "message"), ERRORS.values(), ids=ERRORS)
def test_an_error_is_one_line_and_exit_code_2(run, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x.npz").touch()
    (tmp_path / "damaged.npz").write_bytes(b"PK nothing of the kind")
    whole = tmp_path / "whole.pt"
    DictTensor({"x": torch.zeros(1000)}).save(whole)
    torch.save({"weight": torch.zeros(3)}, tmp_path / "weights.pt")
    torch.save({"format": "rlstructs.RL_Batcher", "batcher": 3}, tmp_path / "crafted.pt")
    (tmp_path / "cut.pt").write_bytes(whole.read_bytes()[:500])
    os.mkfifo(tmp_path / "pipe.pt")
    with zipfile.ZipFile("crafted.pt") as old, zipfile.ZipFile("packed.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for name in old.namelist():
            packed.writestr(name, old.read(name))
    before = sorted(tmp_path.iterdir())
    code, stdout, stderr = run(*arguments)
    assert (code, stdout) == (2, "")
    assert re.fullmatch(f"rlstructs: error: {message}\n", stderr)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("option", "modules", "install"),
    [
        ("--plot=x.png", ["matplotlib", "matplotlib.figure"], "matplotlib"),
        ("--out=x.h5", ["h5py"], "h5py"),
        ("--minari=x-v0", ["minari", "rlstructs.integrations.minari.writing"], "'minari[hdf5]' pillow"),
    ],
)
def test_a_package_that_is_not_there_is_missed_before_anything_runs(run, monkeypatch, option, modules, install):
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)  # what makes an import fail
    code, stdout, stderr = run("collect", "None-v0", option)
    assert (code, stdout) == (2, "")
    words = rf"--\w+: (?:\.\w+ files need|needs) {modules[0]}: .*: pip install {re.escape(install)}"
    assert re.fullmatch(f"rlstructs: error: {words}\n", stderr)


FAULTS = {
    "Cli/constructor-v0": r"OddError: it went wrong \(in worker 0; --debug shows the traceback\)",
    "Cli/reset-v0": r"OddError: it went wrong \(in worker 0; .*\)",
    "Cli/step-v0": r"OddError: it went wrong \(in worker 0; .*\)",
    "Cli/close-v0": r"OddError: it went wrong \(in worker 0; .*\)",
    "Cli/Mute-v0": r"MuteError: its message cannot be shown \(in worker 0; .*\)",
    "Cli/Pipe-v0": r"BrokenPipeError: lost its server \(in worker 0; .*\)",
    "Cli/Gone-v0": r"worker 0 \(pid \d+\) is gone: exit code 5; last request: rollout",
}


@pytest.mark.parametrize(("env_id", "message"), FAULTS.items(), ids=FAULTS)
def test_a_failing_environment_ends_in_one_line_and_keeps_earlier_rollouts(run, tmp_path, env_id, message):
    out = tmp_path / "x.npz"
    code, stdout, stderr = run("collect", env_id, *SMALL, "--workers", 1, "--out", out)
    assert code == 2
    assert "Traceback" not in stderr
    assert re.fullmatch(f"rlstructs: error: (?:{message})", stderr.splitlines()[-1])
    # Step 25 is in the third rollout of 10 steps; `close` comes after all three.
    n_steps = {"Cli/constructor-v0": 0, "Cli/reset-v0": 0, "Cli/close-v0": 60}.get(env_id, 40)
    early = "" if n_steps == 60 else "; stopped early, of 60 steps"
    assert re.fullmatch(rf"{env_id}: {n_steps} steps, .* steps/s{early}; wrote {out}\n" if n_steps else "", stdout)
    assert out.exists() == (n_steps > 0)
    assert not out.exists() or int(Trajectories.load(out).lengths.sum()) == n_steps


@pytest.mark.parametrize("n_workers", [0, 1])
def test_debug_raises_what_was_raised(n_workers):
    with pytest.raises(OddError) as caught:
        main(["collect", "Cli/step-v0", *SMALL, "--workers", str(n_workers), "--debug"])
    assert (caught.value.__cause__ is None) == (n_workers == 0)


@pytest.mark.parametrize("autoreset", [True, False])
def test_info_counts_episodes_as_the_batcher_does_through_resets(run, tmp_path, autoreset):
    """A reset drops the episodes that are going; without autoreset rollouts have fewer and fewer rows."""
    parts, ended = [], []
    with count_batcher([[2, 5], [4, 9]], n_timesteps=3, autoreset=autoreset, n_processes=2) as batcher:
        for n_rollouts in (2, 3, 1, 2):
            batcher.reset()
            parts.append(collected(batcher, n_rollouts))
            ended.append(batcher.episodes())
    Trajectories.cat(parts).save(tmp_path / "x.npz")
    found = report.ended_episodes(Trajectories.load(tmp_path / "x.npz"))
    assert found == DictTensor.cat(ended)
    stdout = run("info", tmp_path / "x.npz")[1]
    assert stdout.splitlines()[-1].startswith(f"episodes: {found.n_elems()} ended, return min 3.00, mean ")


INFO = {
    "DictTensor": (
        DictTensor({"x": torch.zeros(3, 2, dtype=torch.uint8), "flag": torch.zeros(3, dtype=torch.bool)}),
        ["DictTensor, 3 rows", "  x     3x2  uint8", "  flag  3    bool"],
    ),
    "TemporalDictTensor": (
        TemporalDictTensor({"x": torch.zeros(2, 4, dtype=torch.bfloat16)}, torch.tensor([1, 4])),
        ["TemporalDictTensor, 2 rows", "  x        2x4  bfloat16", "  lengths  2    int64",
         "lengths: min 1, mean 2.50, max 4, 5 steps"],
    ),
    "Trajectories without rewards": (
        Trajectories(DictTensor({"env_index": torch.arange(2)}), TemporalDictTensor({"x": torch.zeros(2, 4)})),
        ["Trajectories, 2 rows", "  info/env_index        2    int64", "  trajectories/x        2x4  float32",
         "  trajectories/lengths  2    int64", "lengths: min 4, mean 4.00, max 4, 8 steps",
         "episodes: not known: episodes: the trajectories have no _observation/reward"],
    ),
    "Trajectories without env_index": (
        Trajectories(DictTensor(), TemporalDictTensor({}, torch.tensor([], dtype=torch.int64))),
        ["Trajectories, 0 rows", "  trajectories/lengths  0  int64", "lengths: none, 0 steps",
         "episodes: not known: DictTensor: no key 'env_index', there are []"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("ending", [".npz", ".hdf5"])
@pytest.mark.parametrize(("content", "lines"), INFO.values(), ids=INFO)
def test_info_says_what_is_in_a_file(run, tmp_path, content, lines, ending):
    path = tmp_path / f"x{ending}"
    content.save(path)
    code, stdout, stderr = run("info", path)
    first, *rest = stdout.splitlines()
    assert (code, stderr, rest) == (0, "", lines[1:])
    assert re.fullmatch(rf"{path}: {lines[0]}, 0\.00 MB", first)


@pytest.mark.parametrize("exact", [False, True])
def test_info_says_what_is_in_the_state_of_a_batcher(run, tmp_path, exact):
    with RL_Batcher.make("CartPole-v1", n_envs=2, n_workers=0, n_timesteps=10, seed=7) as batcher:
        batcher.reset()
        batcher.execute()
        batcher.get()
        torch.save(batcher.state_dict(exact=exact), tmp_path / "state.pt")
    code, stdout, stderr = run("info", tmp_path / "state.pt")
    first, *rest = stdout.splitlines()
    kind, version = ("exact state", 2) if exact else ("state", 1)
    assert re.fullmatch(rf".*state.pt: {kind} of rlstructs.RL_Batcher, version {version}, 0\.\d\d MB", first)
    lines = ["  workers: 1, with 2 environments each; seeds: 7", "  steps: 20; updates: 0"]
    ahead = ["  phase: READY", "  n_timesteps: 10", "  run_ahead: 0",
             "  environments: 2 x CartPole-v1, brought back by pickle"]  # fmt: skip
    lines += ahead if exact else ["  environments: new ones will begin new episodes"]
    assert (code, stderr, rest) == (0, "", lines)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_pipe_that_nobody_reads_ends_it_silently(start, subprocess_env, unbuffered):
    subprocess_env["PYTHONUNBUFFERED"] = unbuffered
    process = start("info", "--system")
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(LIMIT) == 141


def test_the_package_can_be_run_as_the_command(subprocess_env):
    command = [sys.executable, "-m", "rlstructs", "--version"]
    done = subprocess.run(command, env=subprocess_env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("rlstructs 0.")


def test_info_system_names_versions_and_imports_none_of_them(subprocess_env):
    program = """
import sys
from rlstructs.cli.command import main
main(["info", "--system"])
print(sorted({"gymnasium", "jax", "warp", "h5py", "matplotlib"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], env=subprocess_env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("\n[]\n")
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines()[:-1])
    for package in ("torch", "numpy", "gymnasium", "cloudpickle"):
        assert said[package] == importlib.metadata.version(package)
    assert said["start method"] in ("forkserver", "spawn")
    assert re.fullmatch(r"\d+ of \d+", said["cores"]) and re.match("yes|no", said["CUDA available"])
    assert {"rlstructs", "python", "jax", "warp-lang", "platform", "memory available"} <= said.keys()


@pytest.mark.parametrize(("env_id", "has_episodes"), [("Cli/Count-v0", True), ("Cli/Long-v1", False)])
def test_a_plot_is_drawn_with_and_without_episodes(run, tmp_path, env_id, has_episodes):
    path = tmp_path / "x.png"
    assert run("collect", env_id, *SMALL, "--plot", path)[0] == 0
    pixels = imread(path)
    assert pixels.shape == (900, 1200, 4)
    # The line of the mean return, which is blue.
    assert (np.abs(pixels[:, :, :3] - np.array([0x08, 0x51, 0x9C]) / 255).max(axis=2) < 0.02).any() == has_episodes


def test_plotting_leaves_pyplot_alone(subprocess_env, tmp_path):
    program = f"""
import sys
from rlstructs.cli.command import main
assert main(["collect", "CartPole-v1", "--workers=0", "--steps=100", "--plot={tmp_path}/x.png"]) == 0
print([name for name in sys.modules if name.startswith("matplotlib.pyplot")], "matplotlib.figure" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], env=subprocess_env, capture_output=True, text=True)
    assert done.stdout.endswith("\n[] True\n"), done.stderr


def test_end_steps_counts_the_steps_of_each_environment():
    episodes = DictTensor({"env_index": torch.tensor([4, 0, 4, 4, 0]), "length": torch.tensor([3, 7, 2, 1, 5])})
    assert report.end_steps(episodes).tolist() == [3, 7, 5, 6, 12]


def test_a_figure_shows_each_episode_at_the_step_at_which_it_ended():
    settings = Settings("CartPole-v1", "random", n_workers=0, n_envs=3, n_timesteps=20, n_rollouts=8, seed=0)
    collected = collect(settings, keep=True)
    axes = report.figure(settings, collected).axes
    points = [panel.lines[0].get_xydata() for panel in axes]
    rows = collected.trajectories()
    done = rows.trajectories["_observation/done"].view(8, 3, 20).transpose(0, 1).reshape(3, 160)
    ends = sorted(3 * (t + 1) for _, t in done.nonzero().tolist())
    assert points[0][:, 0].tolist() == points[1][:, 0].tolist() == ends
    shown = zip(points[0][:, 1].tolist(), points[1][:, 1].tolist(), strict=True)
    assert sorted(shown) == sorted(zip(*brute_force_episodes(rows), strict=True))
    assert [panel.get_ylabel() for panel in axes] == ["episode return", "episode length (steps)"]
    assert axes[1].get_xlabel() == "environment steps" and "CartPole-v1" in axes[0].get_title(loc="left")


@pytest.mark.parametrize("window", [1, 2, 4, 7])
def test_running_means_are_means_of_a_window_or_of_all_that_end_together(window):
    at = np.array([1, 2, 2, 2, 5, 6, 6])
    values = np.array([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0])
    steps, means = report.running_means(at, values, window)
    expected = {}
    for step in np.unique(at):
        n = max(window, int((at == step).sum()))
        so_far = values[at <= step]
        if so_far.size >= window:
            expected[step] = so_far[-n:].mean()
    assert steps.tolist() == list(expected)
    np.testing.assert_allclose(means, list(expected.values()))


def test_episodes_of_a_file_are_those_of_the_batcher_when_workers_are_lost():
    faults = [Fault("kill", at="step", count=6, worker=1, generations=[0])]
    env_args = {"n_envs": 1, "length": 7, "faults": faults}
    agent_args, how = {"action_space": FaultyEnv.action_space}, {"on_worker_failure": "restart"}
    with RL_Batcher(5, RandomAgent, agent_args, create_faulty_envs, env_args, 2, 0, **how) as batcher:
        batcher.reset()
        batches = [collected(batcher, 4)]
        batcher.reset()
        batches.append(collected(batcher, 3))
        ended = batcher.episodes()
    assert report.ended_episodes(Trajectories.cat(batches)) == ended


def test_episodes_of_those_who_came_first_do_not_end_those_of_others():
    def rollout(rows, first, done):
        steps = {
            "observation/initial_state": torch.tensor(first), "_observation/done": torch.tensor(done),
            "_observation/reward": torch.ones(len(rows), 2),
        }  # fmt: skip
        lengths = torch.full((len(rows),), 2)
        return Trajectories(DictTensor({"env_index": torch.tensor(rows)}), TemporalDictTensor(steps, lengths))

    yes, no, last = [True, False], [False, False], [False, True]
    parts = [
        rollout([0, 1], [yes, yes], [last, no]), rollout([0], [yes], [last]), rollout([0, 1], [yes, no], [last, last]),
    ]  # fmt: skip
    found = report.ended_episodes(Trajectories.cat(parts))
    assert sorted(zip(found["env_index"].tolist(), found["length"].tolist(), strict=True)) == [
        (0, 2), (0, 2), (0, 2), (1, 4),
    ]  # fmt: skip
