"""What is imported when, and in which direction: the rows of the architecture."""

from __future__ import annotations

import ast
import doctest
import graphlib
import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# What a package, or a module at the root of `rlstructs`, may import: itself, and what stands on a line above its own.
ORDER = """
workers
errors
checks copying debug
frameworks worker_setup
files
structures seeding moments trace
shared replay agent
envs memories episodes returns action_masks
random_agent module_agent jax_agent
rollout
exact
batcher testing
distributed integrations
checkpoints
cli
__main__
"""
LINES = {name: number for number, line in enumerate(ORDER.split("\n")) for name in line.split()}
ALLOWED_BELOW = {"workers": {"cloudpickle", "_posixshmem"}}
HEAVY = ("torch", "numpy", "gymnasium", "jax", "warp", "h5py", "tensordict", "matplotlib", "ray")


def modules():
    """Module name -> file, of the library."""
    # The link to `workers` is not followed.
    files = {file: file.relative_to(ROOT) for file in (ROOT / "rlstructs").rglob("*.py")}
    files |= {file: "rlstructs" / file.relative_to(ROOT) for file in (ROOT / "workers").rglob("*.py")}
    names = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): file for file, path in files.items()}
    assert len(names) > 20
    return names


def imports(file, names, only_at_run_time=False):
    """What a file imports, for types alone too: the modules, and the packages that these lie in."""
    tree = ast.parse(file.read_text())
    left_out = {
        id(node)
        for test in ast.walk(tree)
        if only_at_run_time and isinstance(test, ast.If) and ast.unparse(test.test) == "TYPE_CHECKING"
        for node in ast.walk(test)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & set(names)
            found |= submodules or {node.module}
    return {parent for name in found for parent in with_parents(name)}


def with_parents(name):
    parts = name.split(".")
    return {".".join(parts[:n]) for n in range(1, len(parts) + 1)}


def package(name):
    """The package of a module: what stands behind `rlstructs.`; None for `rlstructs` itself."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else None


def is_package(name, names):
    return names[name].name == "__init__.py"


def wrong_imports(names):
    """What imports a package that does not stand above its own."""
    found = []
    for name, file in names.items():
        own = package(name)
        if own is None or is_package(name, names):
            continue
        for target in sorted(imports(file, names) & set(names)):
            other = package(target)
            if other not in (None, own) and LINES[other] >= LINES[own]:
                found.append(f"{name} imports {target}")
    return found


def test_packages_import_only_what_stands_above_them():
    assert wrong_imports(modules()) == []


@pytest.mark.parametrize(
    "statement",
    [
        "from rlstructs.batcher.batcher import RL_Batcher",
        "def f():\n    from rlstructs.batcher import batcher",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import rlstructs.batcher.batcher",
        "import rlstructs.memories.torch",  # of the same line
    ],
)
def test_a_wrong_import_is_seen(statement, tmp_path):
    file = tmp_path / "bad.py"
    file.write_text(statement)
    found = wrong_imports(modules() | {"rlstructs.envs.bad": file})
    assert found and all(line.startswith("rlstructs.envs.bad imports rlstructs.") for line in found)


# The surfaces over the replay store.
SURFACES = ("rlstructs.replay.tianshou", "rlstructs.replay.torchrl", "rlstructs.replay.rlberry", "rlstructs.memories")


def surface(name):
    """The surface that a module is of, or None."""
    return next((each for each in SURFACES if f"{name}.".startswith(f"{each}.")), None)


def wrong_imports_of_surfaces(names):
    """What of `rlstructs.replay` and `rlstructs.memories` imports a surface, other than the one that it is of."""
    found = []
    for name, file in names.items():
        own = surface(name)
        if is_package(name, names) or (own is None and package(name) != "replay"):
            continue
        others = {target for target in imports(file, names) & set(names) if surface(target) not in (None, own)}
        found += [f"{name} imports {target}" for target in sorted(others)]
    return found


def test_surfaces_share_the_core_and_nothing_else():
    assert wrong_imports_of_surfaces(modules()) == []


@pytest.mark.parametrize("name", ["rlstructs.replay.bad", "rlstructs.replay.torchrl.bad", "rlstructs.memories.bad"])
def test_an_import_of_a_surface_is_seen(name, tmp_path):
    file = tmp_path / "bad.py"
    file.write_text("from rlstructs.replay.tianshou.transitions import OBS")
    found = wrong_imports_of_surfaces(modules() | {name: file})
    assert f"{name} imports rlstructs.replay.tianshou.transitions" in found


def test_every_package_has_its_line():
    assert {package(name) for name in modules()} - {None} <= set(LINES)


# A package's __init__ imports nothing of ours but these, so what reaches it on the way down reaches nothing else.
LIGHT = {"rlstructs", "rlstructs.workers", "rlstructs.workers.public_names"}


def circle(names):
    """Modules that import each other in a circle, for types alone too; [] if there are none."""
    graph = {name: imports(file, names) & set(names) - {name} for name, file in names.items()}
    edges = {name: {target for target in found if not is_package(target, names)} for name, found in graph.items()}
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_modules_import_each_other_in_no_circle():
    names = modules()
    for name, file in names.items():
        if is_package(name, names) or name in LIGHT:
            found = imports(file, names, only_at_run_time=True) & set(names) - {name}
            assert found <= LIGHT, f"{name} imports {found}"
    assert circle(names) == []


@pytest.mark.parametrize(
    "statement", ["import {}", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import {}"]
)
def test_a_circle_is_seen(statement, tmp_path):
    names = {f"rlstructs.rollout.{stem}": tmp_path / f"{stem}.py" for stem in ("one", "other")}
    for (_, file), imported in zip(names.items(), reversed(names), strict=True):
        file.write_text(statement.format(imported))
    assert set(circle(modules() | names)) == set(names)


def test_workers_imports_the_standard_library_and_cloudpickle():
    names = modules()
    for name, file in names.items():
        if package(name) == "workers":
            found = imports(file, names)
            assert {package(target) for target in found & set(names)} <= {None, "workers"}, name
            roots = {target.split(".")[0] for target in found} - {"rlstructs"}
            assert roots <= sys.stdlib_module_names | ALLOWED_BELOW["workers"], name


def loaded_by(statement, modules=HEAVY):
    """Which of these modules a statement loads in a new interpreter."""
    code = f"import sys\n{statement}\nprint(*[name for name in {modules} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("statement", "loaded"),
    [
        ("from rlstructs.workers import pool, loop, fork_server", set()),
        ("import rlstructs", set()),
        ("from rlstructs import DictTensor, TemporalDictTensor, Trajectories", {"torch", "numpy"}),
        ("from rlstructs import RL_Batcher, RL_Agent, VecEnv, replay_agent", {"torch", "numpy"}),
        ("from rlstructs import gae, transitions", {"torch", "numpy"}),
        ("from rlstructs import RayBatcher", {"torch", "numpy"}),
        ("import rlstructs.cli.command", set()),
        ("import rlstructs.memories.torch", {"torch", "numpy"}),
        ("import rlstructs.replay.rows.store", {"numpy"}),
        ("import rlstructs.testing", set()),
        ("from rlstructs.testing import check_agent", {"torch", "numpy", "gymnasium"}),
        ("from rlstructs import SharedVectorEnv", {"numpy", "gymnasium"}),
        ("from rlstructs import GymEnv", {"torch", "numpy", "gymnasium"}),  # that the check can fail
    ],
)
def test_only_what_is_needed_is_loaded(statement, loaded):
    assert loaded_by(statement) == loaded


PROCESS_MACHINERY = ("multiprocessing", "cloudpickle", *(f"rlstructs.workers.{x}" for x in ("errors", "start", "pool")))


@pytest.mark.parametrize("module", ["rlstructs.errors", "rlstructs.checks"])
def test_errors_and_checks_load_nothing_that_starts_processes(module):
    assert loaded_by(f"import {module}", PROCESS_MACHINERY) == set()
    loaded = loaded_by("from rlstructs.errors import WorkerError", PROCESS_MACHINERY)  # that the check can fail
    assert "rlstructs.workers.errors" in loaded


# A program's own `workers`: a file, a package, or a folder without an `__init__`.
OWN_WORKERS = {"file": "workers.py", "package": "workers/__init__.py", "folder": "workers/of_the_user.py"}
OWN_PROGRAM = """
import gymnasium, {name}
from rlstructs import RL_Batcher
def make():
    import {name}
    env = gymnasium.make("CartPole-v1")
    env.reset(options={{"low": {name}.LOW, "high": {name}.LOW}})
    return gymnasium.wrappers.TransformObservation(env, lambda o: o * 0 + {name}.LOW, env.observation_space)
for n_workers in (0, 1):
    with RL_Batcher.make(make, None, n_envs=1, n_workers=n_workers, n_timesteps=1) as batcher:
        batcher.reset(), batcher.execute()
        print(batcher.get()[0].trajectories["observation/frame"].flatten().tolist())
"""


@pytest.mark.parametrize("kind", OWN_WORKERS)
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_program_may_have_its_own_workers(kind, start_method, tmp_path, subprocess_env):
    file = tmp_path / OWN_WORKERS[kind]
    file.parent.mkdir(exist_ok=True)
    file.write_text("LOW = 0.25")
    name = ".".join(Path(OWN_WORKERS[kind]).with_suffix("").parts).removesuffix(".__init__")
    program = OWN_PROGRAM.format(name=name).replace("n_timesteps=1", f"n_timesteps=1, start_method={start_method!r}")
    (tmp_path / "main.py").write_text(program)
    command = [sys.executable, "-B", str(tmp_path / "main.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=subprocess_env)
    assert (done.stdout, done.stderr) == ("[0.25, 0.25, 0.25, 0.25]\n" * 2, "")


def test_ours_is_not_called_workers():
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; import workers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent)
    assert "ModuleNotFoundError: No module named 'workers'; that of rlstructs is 'rlstructs.workers'" in done.stderr


# What torchrl and tianshou call it, and what it is called here.
ALIASES = {
    "Batch": "ArrayDict",
    "ImmutableDatasetWriter": "ImmutableWriter",
    "LazyMemmapStorage": "MemmapStorage",
    "LazyTensorStorage": "TensorStorage",
    "TensorDictMaxValueWriter": "MaxValueWriter",
    "TensorDictPrioritizedReplayBuffer": "DictTensorPrioritizedReplayBuffer",
    "TensorDictReplayBuffer": "DictTensorReplayBuffer",
    "TensorDictRoundRobinWriter": "RoundRobinWriter",
}
PACKAGES = [
    "rlstructs", "rlstructs.distributed", "rlstructs.envs", "rlstructs.memories", "rlstructs.replay",
    "rlstructs.returns", "rlstructs.testing", "rlstructs.workers",
]  # fmt: skip


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_resolves(name):
    module = importlib.import_module(name)
    exports = dir(module) if name == "rlstructs.memories" else module._EXPORTS
    assert sorted(module.__all__) == module.__all__ and set(module.__all__) == set(exports)
    for exported in module.__all__:
        assert getattr(module, exported).__name__.rpartition(".")[2] == ALIASES.get(exported, exported)
    assert set(module.__all__) <= set(dir(module)), "a shell completes names by this"
    assert not {"TYPE_CHECKING", "annotations", "sys"} & set(dir(module))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing


def test_packages_need_no_import_of_their_own():
    program = "import rlstructs; rlstructs.memories.torch.RandomMemory; rlstructs.integrations.logging.Log"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, cwd=ROOT)


FRAMEWORKS = ["rlstructs.memories.torch", "rlstructs.memories.jax", "rlstructs.memories.warp"]


@pytest.mark.parametrize("package", [*PACKAGES, *FRAMEWORKS])
def test_exported_classes_name_the_package_that_exports_them(package):
    """And so do pickles of them, which outlive the place of a file; doctest finds them where they are defined."""
    module = importlib.import_module(package)
    classes = {name: found for name in module.__all__ if isinstance(found := getattr(module, name), type)}
    for name, cls in classes.items():
        assert cls.__module__ in {*PACKAGES, *FRAMEWORKS}, name
        assert pickle.loads(pickle.dumps(cls)) is cls
        if ">>>" in (cls.__doc__ or "") and package not in FRAMEWORKS:
            home = importlib.import_module(f"{package}.{module._EXPORTS[name]}")
            found = [each.name for each in doctest.DocTestFinder().find(home)]
            assert any(each.endswith(f".{cls.__name__}") for each in found), name
