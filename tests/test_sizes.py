"""No file of the library has more than 400 lines, no function more than 50, except one kernel."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST_FILE_LINES, MOST_FUNCTION_LINES = 400, 50

# A kernel of Warp, which has to be one function.
LONG_FUNCTIONS = {"rlstructs/replay/sum_tree.py _draw"}


def library():
    """Path -> text of every file of the library."""
    files = [file for package in ("workers", "rlstructs") for file in (ROOT / package).rglob("*.py")]
    return {str(file.relative_to(ROOT)): file.read_text() for file in files}


def long_files(texts):
    return {path for path, text in texts.items() if len(text.splitlines()) > MOST_FILE_LINES}


def long_functions(texts):
    found = set()
    for path, text in texts.items():
        for name, node in functions(ast.parse(text)):
            if node.end_lineno - node.lineno + 1 > MOST_FUNCTION_LINES:
                found.add(f"{path} {name}")
    return found


def functions(node, prefix=""):
    """Qualified name and node of every function in a tree, its docstring and inner functions included."""
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        inner = f"{prefix}{child.name}." if is_function or isinstance(child, ast.ClassDef) else prefix
        if is_function:
            yield inner[:-1], child
        yield from functions(child, inner)


def test_no_file_is_too_long():
    assert long_files(library()) == set()


def test_no_function_is_too_long():
    assert long_functions(library()) == LONG_FUNCTIONS


def test_what_is_too_long_is_noticed():
    body = "\n".join(["        pass"] * MOST_FUNCTION_LINES)
    texts = {
        "long.py": "\n" * (MOST_FILE_LINES + 1),
        "short.py": "\n" * MOST_FILE_LINES,
        "functions.py": f"class A:\n    def f(self):\n{body}\nif True:\n    async def g():\n{body}",
        "short_function.py": f"def h():\n{body[:-13]}",
    }
    assert long_files(texts) == {"long.py"}
    assert long_functions(texts) == {"functions.py A.f", "functions.py g"}
