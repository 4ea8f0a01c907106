"""What is imported when, and in which direction: the rows of the architecture."""

from __future__ import annotations

import ast
import graphlib
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Longest prefix wins. A module imports from rows above its own, or from its own package.
ROWS = {
    "workers": 0,
    "rlstructs.errors": 1,
    "rlstructs.structures": 2,
    "rlstructs.checks": 1.2,
    "rlstructs.copying": 1.2,
    "rlstructs.debug": 1.2,
    "rlstructs.seeding": 2,
    "rlstructs.moments": 2,
    "rlstructs.rows": 2.5,
    "rlstructs.replay": 2,
    "rlstructs.replay.backing": 1.5,
    "rlstructs.replay.sum_tree": 2.5,
    "rlstructs.replay.tensor_columns": 2.5,
    "rlstructs.replay.samplers": 3,
    "rlstructs.replay.values": 2.7,
    "rlstructs.replay.expand": 3,
    "rlstructs.replay.reading": 3,
    "rlstructs.replay.slices": 3.5,
    "rlstructs.replay.selection": 3,
    "rlstructs.replay.storage": 3,
    "rlstructs.replay.prioritised": 3,
    "rlstructs.replay.step_writer": 3,
    "rlstructs.memories": 4,
    "rlstructs.replay.buffers": 4.5,
    "rlstructs.agent": 3,
    "rlstructs.envs": 3,
    "rlstructs.envs.registry": 2,
    "rlstructs.library_settings": 1.2,
    "rlstructs.streams": 1.2,
    "rlstructs.worker_setup": 2.5,
    "rlstructs.envs.shared_vector_env": 6,
    "rlstructs.episodes": 3,
    "rlstructs.return_steps": 3,
    "rlstructs.returns": 3.5,
    "rlstructs.recorded": 3.7,
    "rlstructs.steps": 3.5,
    "rlstructs.slots": 4,
    "rlstructs.generations": 4.5,
    "rlstructs.batch": 5,
    "rlstructs.lifecycle": 4,
    "rlstructs.lease": 4.5,
    "rlstructs.outputs": 4,
    "rlstructs.module_state": 4,
    "rlstructs.weights": 4,
    "rlstructs.settings": 4,
    "rlstructs.random_agent": 4,
    "rlstructs.testing": 4,
    "rlstructs.probe": 3.2,
    "rlstructs.rollout": 5,
    "rlstructs.evaluation": 5.1,
    "rlstructs.job": 5.2,
    "rlstructs.member": 5.3,
    "rlstructs.books": 5.4,
    "rlstructs.crew": 5.5,
    "rlstructs.batcher_state": 5.5,
    "rlstructs.batcher": 6,
    "rlstructs.distributed": 7,
    "rlstructs.cli": 7,
    "rlstructs.collect": 7,
    "rlstructs.play": 7,
    "rlstructs.report": 7,
    "rlstructs.tune": 7,
    "rlstructs": 7,
}
ALLOWED_BELOW = {"workers": {"cloudpickle", "_posixshmem"}}
HEAVY = ("torch", "numpy", "gymnasium", "jax", "warp", "h5py", "tensordict", "matplotlib", "ray")


def modules():
    """Module name -> file, of the library."""
    files = [file for package in ("workers", "rlstructs") for file in (ROOT / package).rglob("*.py")]
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}
    assert len(names) > 20
    return names


def imports(file, names):
    """What a file imports when it is imported: its own parents, and those of what it names, too."""
    tree = ast.parse(file.read_text())
    typing_only = {
        id(node)
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and ast.unparse(test.test) == "TYPE_CHECKING"
        for node in ast.walk(test)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & set(names)
            found |= {node.module} | submodules
    return {parent for name in found for parent in with_parents(name)}


def with_parents(name):
    parts = name.split(".")
    return {".".join(parts[:n]) for n in range(1, len(parts) + 1)}


def row(name):
    return ROWS[max((prefix for prefix in ROWS if f"{name}.".startswith(f"{prefix}.")), key=len)]


def package(name, names):
    return name if names[name].name == "__init__.py" else name.rpartition(".")[0]


def is_package(name, names):
    return names[name].name == "__init__.py"


def test_imports_go_one_way():
    names = modules()
    graph = {name: imports(file, names) & set(names) - {name} for name, file in names.items()}
    # A package's __init__ imports nothing of ours, so what reaches it on the way down reaches nothing else.
    for name in names:
        if is_package(name, names):
            assert not graph[name], f"{name} imports {graph[name]}"
    edges = {name: {target for target in targets if not is_package(target, names)} for name, targets in graph.items()}
    for name, targets in edges.items():
        for target in targets:
            assert row(target) < row(name) or (
                row(target) == row(name) and package(target, names) == package(name, names)
            ), f"{name} (row {row(name)}) imports {target} (row {row(target)})"
    assert len(list(graphlib.TopologicalSorter(edges).static_order())) >= len(names) - 5


def test_a_wrong_import_would_be_seen(tmp_path):
    file = tmp_path / "bad.py"
    file.write_text("def f():\n    from rlstructs.batcher import RL_Batcher\n")
    assert imports(file, modules()) == {"rlstructs", "rlstructs.batcher"}
    assert row("rlstructs.batcher") > row("rlstructs.envs.gym_env") > row("workers.pool")


def test_workers_imports_the_standard_library_and_cloudpickle():
    names = modules()
    for name, file in names.items():
        if row(name) == 0:
            roots = {target.split(".")[0] for target in imports(file, names)} - {"workers"}
            assert roots <= sys.stdlib_module_names | ALLOWED_BELOW["workers"], name


def loaded_by(statement):
    """Which heavy packages a statement loads in a new interpreter."""
    code = f"import sys\n{statement}\nprint(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("statement", "loaded"),
    [
        ("import workers.pool, workers.loop, workers.server", set()),
        ("import rlstructs", set()),
        ("from rlstructs import DictTensor, TemporalDictTensor, Trajectories", {"torch", "numpy"}),
        ("from rlstructs import RL_Batcher, RL_Agent, VecEnv, replay_agent", {"torch", "numpy"}),
        ("from rlstructs import gae, transitions", {"torch", "numpy"}),
        ("from rlstructs import RayBatcher", {"torch", "numpy"}),
        ("import rlstructs.cli", set()),
        ("import rlstructs.memories.torch", {"torch", "numpy"}),
        ("import rlstructs.replay.storage", {"numpy"}),
        ("import rlstructs.testing", set()),
        ("from rlstructs.testing import check_agent", {"torch", "numpy", "gymnasium"}),
        ("from rlstructs import SharedVectorEnv", {"numpy", "gymnasium"}),
        ("from rlstructs import GymEnv", {"torch", "numpy", "gymnasium"}),  # that the check can fail
    ],
)
def test_only_what_is_needed_is_loaded(statement, loaded):
    assert loaded_by(statement) == loaded


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
    "workers", "rlstructs", "rlstructs.distributed", "rlstructs.envs", "rlstructs.memories", "rlstructs.replay",
    "rlstructs.testing",
]  # fmt: skip


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_resolves(name):
    module = importlib.import_module(name)
    assert sorted(module.__all__) == module.__all__ and set(module.__all__) == set(module._EXPORTS)
    for exported in module.__all__:
        assert getattr(module, exported).__name__.rpartition(".")[2] == ALIASES.get(exported, exported)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing
