"""Every python block of README.md and docs/ runs, and prints what stands below it.

The python blocks of a page are one program, in order, run in a process of its own. A `text` block right after one of
them is all that it prints, `...` standing for what differs from run to run; a block without one prints nothing. What
has a title (```python title="...") is the code of another library: it has to be python, and is not run.

The commands of a `sh` block run one after another in a folder that has the examples, benchmarks and tests, with small
sizes added to them. A `text` block after it shows lines that they print, other numbers perhaps.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from processes import LIMIT

pytestmark = pytest.mark.usefixtures("quick_programs")

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
FENCE, TITLED, OUTPUT, SHELL = "```python", "```python title=", "```text", "```sh"
END_OF_BLOCK = "-- end of a block --"
# What makes a command of the pages small; those that begin otherwise are an error. The last value of an option counts.
SMALL = {
    "python benchmarks/adoption.py": "--rows cleanrl-ppo --n-envs 2 --repeats 1 --steps 256",
    "python benchmarks/checkpoints.py": "--n-rows 2000 --repeats 1 --n-saves 1",
    "python benchmarks/curves.py": "--contenders ours dummy --seeds 0 --n-steps 2048 --out curve.png",
    "python benchmarks/feeding.py": "--rows cartpole-64 --repeats 1 --rollouts 1",
    "python benchmarks/frames.py": "--steps 400 --repeats 1",
    "python benchmarks/jax_rollouts.py": "--rows cartpole --repeats 1",
    "python benchmarks/neighbours.py": "--rows torchrl write_count",
    "python benchmarks/overlap.py": "--rows updates --repeats 1",
    "python benchmarks/replay.py": "--rows uniform --capacity 2000 --repeats 1 --no-peers",
    "python benchmarks/returns.py": "--rows 64x128 --repeats 1 --no-peers",
    "python benchmarks/rollouts.py": "--rows cartpole-8 --seconds 0.02 --repeats 1 --no-peers",
    "python benchmarks/scores.py": "--rows dqn --seeds 0 -- --n-steps 128 --n-before 64 --n-eval 1",
    "python benchmarks/stepping.py": "--rows cartpole-2 --seconds 0.02 --repeats 1 --no-peers",
    "python benchmarks/vectorisers.py": "--rows cartpole --seconds 0.02 --repeats 1 --pufferlib= --sample-factory=",
    "python benchmarks/waiting.py": "--quick --no-peers",
    "python examples/ppo.py": "--n-steps 64 --n-envs 2 --n-timesteps 8 --n-eval 2",
    "python tests/integrations/families.py": "--names Box2D --seconds 0.02",
    "python tests/walk.py": "",
    "rlstructs tune": "--seconds 0.1",
    "rlstructs collect": "--envs 2 --steps 400",
    "rlstructs info": "",
    "rlstructs play": "--max-steps 20",
}
# What is not run: an installation, which `.ci/run` does, what takes minutes whatever it is told, and the test suite.
NOT_RUN = (
    "#", "pip ", "python3 -m venv ", "mkdocs ", "python benchmarks/replay.py --growth ", "python tests/soak.py",
    "git ", "cd ", ".ci/", ".venv/bin/",
)  # fmt: skip


@dataclass(frozen=True)
class Block:
    """A fenced block: its kind, the number of its first line, from 1, and its lines."""

    kind: str
    line: int
    lines: list[str]


def blocks_of(page: str) -> list[Block]:
    """The fenced blocks of a page."""
    found, opened = [], None
    lines = page.splitlines()
    for number, line in enumerate(lines):
        if opened is None and line.startswith("```"):
            opened = number
        elif opened is not None and line == "```":
            found.append(Block(lines[opened], opened + 2, lines[opened + 1 : number]))
            opened = None
    assert opened is None, f"the block at line {opened} has no end"
    return found


def program_of(page: str) -> str:
    """What is run: each line where it stands on the page, so that a traceback names the line of the page."""
    lines = [""] * (len(page.splitlines()) + 1)
    for block in blocks_of(page):
        if block.kind == FENCE:
            lines[block.line - 1 : block.line - 1 + len(block.lines)] = block.lines
            lines[block.line - 1 + len(block.lines)] = f"print({END_OF_BLOCK!r}, flush=True)"
    return "\n".join(lines)


def outputs_of(page: str) -> list[str]:
    """What each block that is run has to print."""
    lines, outputs = page.splitlines(), []
    following = {block.line: block for block in blocks_of(page)}
    for block in blocks_of(page):
        if block.kind == FENCE:
            after = following.get(block.line + len(block.lines) + 3)  # its end, one empty line, the next fence
            is_output = after is not None and after.kind == OUTPUT and not lines[after.line - 3]
            outputs.append("".join(f"{line}\n" for line in after.lines) if is_output else "")
    return outputs


def run(page: str, folder: Path, environment: dict[str, str]) -> list[str]:
    """What each block prints."""
    program = folder / "program.py"
    program.write_text(program_of(page))
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=LIMIT, env=environment, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # a warning would be the first thing that a reader sees
    return done.stdout.split(f"{END_OF_BLOCK}\n")[:-1]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def fits(printed: str, wanted: str) -> bool:
    """Whether this is what was wanted, in which `...` stands for anything."""
    return re.fullmatch(".*".join(map(re.escape, wanted.split("..."))), printed, re.DOTALL) is not None


def with_programs() -> list[Any]:
    """The pages that have programs; that of the README is quick."""
    found = [page for page in PAGES if f"{FENCE}\n" in page.read_text()]
    return [pytest.param(page, marks=[pytest.mark.quick] * (page.name == "README.md")) for page in found]


@pytest.mark.parametrize("page", with_programs(), ids=name_of)
def test_a_page_prints_what_it_says(page, subprocess_env, tmp_path):
    text = page.read_text()
    printed, wanted = run(text, tmp_path, subprocess_env), outputs_of(text)
    assert len(printed) == len(wanted)
    for own, should in zip(printed, wanted, strict=True):
        if not fits(own, should):
            assert own == should  # shows where they differ


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_what_it_is(page):
    kinds = {block.kind for block in blocks_of(page.read_text())}
    assert not {kind for kind in kinds if kind not in (FENCE, OUTPUT, SHELL) and not kind.startswith(TITLED)}


COMPOUND = (ast.For, ast.While, ast.If, ast.With, ast.Try, ast.FunctionDef, ast.ClassDef)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_prompt_takes_what_is_pasted(page):
    """Before Python 3.13 it ends what is indented at an empty line only."""
    for block in blocks_of(page.read_text()):
        if block.kind.startswith(FENCE):
            body = ast.parse("\n".join(block.lines)).body
            ends = {node.end_lineno for node in body if isinstance(node, COMPOUND) and node.end_lineno > node.lineno}
            assert not [line for line in sorted(ends) if line < len(block.lines) and block.lines[line]]


def test_the_readme_installs_and_shows_a_program_at_once():
    shell, program, output, *_ = blocks_of((ROOT / "README.md").read_text())
    assert [block.kind for block in (shell, program, output)] == [SHELL, FENCE, OUTPUT]
    assert "pip install" in "".join(shell.lines) and shell.line < 20 and output.line + len(output.lines) <= 30


def small(command: str) -> str | None:
    """A command as it is run here; None for one that is not."""
    if command.startswith(NOT_RUN):
        return None
    [sizes] = [sizes for start, sizes in SMALL.items() if f"{command} ".startswith(f"{start} ")]
    return f"{command} {sizes}"


def shape(line: str) -> str:
    """A line without its numbers."""
    return re.sub(r"-?[\d.,]*\d", "0", line)


def commands() -> list[Any]:
    """Blocks with commands that are run, and the lines that are shown below them, of all pages."""
    found = []
    for page in PAGES:
        text = page.read_text()
        blocks = blocks_of(text)
        following = {block.line: block.lines for block in blocks if block.kind == OUTPUT}
        for block in blocks:
            own = [command for line in block.lines if block.kind == SHELL and (command := small(line))]
            if own:
                shown = following.get(block.line + len(block.lines) + 3, [])
                found.append(pytest.param(own, shown, id=f"{name_of(page)}:{block.line}"))
    return found


@pytest.mark.parametrize(("lines", "shown"), commands())
def test_commands_run(lines, shown, subprocess_env, tmp_path):
    for folder in ("examples", "benchmarks", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    programs = {"python": sys.executable, "rlstructs": f"{sys.executable} -m rlstructs.cli"}
    script = [f'{name}() {{ {program} "$@"; }}' for name, program in programs.items()]
    done = subprocess.run(
        ["bash", "-euc", "\n".join([*script, *lines])], capture_output=True, text=True, timeout=LIMIT,
        env=subprocess_env, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert {shape(line) for line in shown} <= {shape(line) for line in done.stdout.splitlines()}


def test_a_command_without_a_small_size_is_noticed():
    assert small("rlstructs play CartPole-v1") == "rlstructs play CartPole-v1 --max-steps 20"
    assert small("python3 -m venv .venv") is None
    for command in ("rlstructs collects", "python setup.py", "ls"):
        with pytest.raises(ValueError, match="not enough values"):
            small(command)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_code_of_other_libraries_is_python(page):
    for block in blocks_of(page.read_text()):
        if block.kind.startswith(TITLED):
            ast.parse("\n".join(block.lines))


@pytest.mark.parametrize("module", ["rlstructs", "rlstructs.replay", "rlstructs.testing"])
def test_every_public_name_is_in_the_reference(module):
    reference = "\n".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    described = set(re.findall(r"^::: ([\w.]+)$", reference, re.MULTILINE))
    named = set(re.findall(r"`(\w+)`", reference))  # second names of what is described
    names = importlib.import_module(module).__all__
    assert not [name for name in names if f"{module}.{name}" not in described and name not in named]


def test_every_page_can_be_found():
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = {str(page.relative_to(ROOT / "docs")) for page in DOCS}
    assert pages == set(re.findall(r"[\w/]+\.md", navigation))


@pytest.mark.quick
def test_a_block_that_prints_something_else_is_noticed(subprocess_env, tmp_path):
    page = "# A page\n\n```python\nprint(1)\n```\n\n```text\n2\n```\n\n"
    page += "```python\nprint(3, 0.5)\n```\n\n```text\n3 ...\n```\n"
    printed, wanted = run(page, tmp_path, subprocess_env), outputs_of(page)
    assert (printed, wanted) == (["1\n", "3 0.5\n"], ["2\n", "3 ...\n"])
    assert [fits(*pair) for pair in zip(printed, wanted, strict=True)] == [False, True]


@pytest.mark.quick
def test_an_error_names_the_line_of_the_page(subprocess_env, tmp_path):
    with pytest.raises(AssertionError, match="line 4, in"):
        run("# A page\n\n```python\n1 / 0\n```\n", tmp_path, subprocess_env)


WIDTH = 90  # of a block of code, which then does not scroll on a desktop


@pytest.mark.parametrize("page", [page for page in PAGES if "contributing" not in page.parts], ids=name_of)
def test_a_block_of_python_or_output_does_not_scroll(page):
    blocks = [block for block in blocks_of(page.read_text()) if block.kind != SHELL]
    assert not [line for block in blocks for line in block.lines if len(line) > WIDTH]


def tables_of(page: Path) -> list[list[list[str]]]:
    """The tables of a page: rows of cells, without the row of dashes."""
    found: list[list[list[str]]] = []
    before = ""
    for line in page.read_text().splitlines():
        if line.startswith("|") and not before.startswith("|"):
            found.append([])
        if line.startswith("|") and not line.startswith("| ---"):
            found[-1].append([cell.strip() for cell in line[1:-1].split("|")])
        before = line
    return found


def test_a_number_of_the_readme_stands_on_the_page_that_explains_it():
    kept = {"measured.md": "work (2 workers)", "questions/failures.md": "event"}
    for name, title in kept.items():
        [own] = [table for table in tables_of(ROOT / "README.md") if table[0][0] == title]
        [whole] = [table for table in tables_of(ROOT / "docs" / name) if table[0][0] == title]
        columns = [whole[0].index(head) for head in own[0]]
        assert own == [[row[column] for column in columns] for row in whole]


def test_the_recorded_training_ends_twice_with_the_same_result():
    drawing = (ROOT / "docs/recording.svg").read_text()
    shown = re.findall(r"<text [^>]*>([^<]*)</text>", drawing)
    undisturbed, killed = (line for line in shown if line.startswith("score"))
    assert undisturbed == killed and sum("SIGKILL to the" in line for line in shown) == 2
    assert len(drawing) < 500_000


def speed_of(cell: str) -> float:
    return float(cell.strip("*").partition(" ")[0].replace(",", ""))


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs/measured.md"], ids=name_of)
def test_only_the_fastest_contender_of_a_row_is_bold(page):
    tables = [table for table in tables_of(page) if "gymnasium async" in table[0]]
    assert tables
    for head, *rows in tables:
        for row in rows:
            speeds = [speed_of(cell) for name, cell in zip(head[1:], row[1:], strict=True) if name != "limit"]
            assert [speed_of(cell) for cell in row[1:] if "**" in cell] in ([], [max(speeds)])


@pytest.mark.parametrize(
    "word", ["checkpoint", "resume", "offline", "Minari", "Jupyter", "wandb", "callback", "pdb", "tutorial", "Colab"]
)
def test_the_search_finds_what_users_ask_for(word):
    assert any(re.search(rf"\b{word}", page.read_text(), re.IGNORECASE) for page in DOCS)


def test_the_pages_can_be_read_without_building_the_site():
    for page in DOCS:
        text = page.read_text()
        entries = re.findall(r"^::: [\w.]+\.(\w+)$", text, re.MULTILINE)
        shown = re.sub(r"^:::.*$", "", text, flags=re.MULTILINE)
        assert "--8<--" not in text
        assert not [name for name in entries if not re.search(rf"\b{name}\b", shown, re.IGNORECASE)]
