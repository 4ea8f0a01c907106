"""Lines of code: 300 at most in a file of the library, 40 in a function, 520 in a class with all that it inherits.

The first line of a docstring has 14 words at most.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST_FILE_LINES, MOST_FUNCTION_LINES, MOST_CLASS_LINES = 300, 40, 520
MOST_FIRST_WORDS = 14

# Longer than the limit: how many lines they have, which may only become fewer. Kernels of Warp have to be one function.
LONG_FUNCTIONS = {
    "rlstructs/replay/draw/sum_tree.py _draw": 67,
    "rlstructs/replay/keep/saving.py _restorer": 48,
    "rlstructs/replay/torchrl/buffer.py DictTensorReplayBuffer.__init__": 46,
    "rlstructs/rollout/rollout.py Rollout.run": 50,
}


def library():
    """Path -> text of every file of the library."""
    files = [file for package in ("workers", "rlstructs") for file in (ROOT / package).rglob("*.py")]
    return {str(file.relative_to(ROOT)): file.read_text() for file in files}


tree_of = functools.cache(ast.parse)


@functools.cache
def code_lines(text):
    """The numbers of the lines that hold code: no blank ones, no comments, no docstrings."""
    prose = set()
    for node in ast.walk(tree_of(text)):
        may_have_one = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if may_have_one and ast.get_docstring(node):
            prose |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(text.splitlines(), 1)
    return {n for n, line in lines if line.strip() and not line.strip().startswith("#")} - prose


def size(node, code):
    return len(code & set(range(node.lineno, node.end_lineno + 1)))


def long_files(texts):
    return {path for path, text in texts.items() if len(code_lines(text)) > MOST_FILE_LINES}


def long_functions(texts):
    """Path and name of every function that is too long -> how many lines it has."""
    found = {}
    for path, text in texts.items():
        code = code_lines(text)
        for name, node in functions(tree_of(text)):
            if size(node, code) > MOST_FUNCTION_LINES:
                found[f"{path} {name}"] = size(node, code)
    return found


def functions(node, prefix=""):
    """Qualified name and node of every function in a tree, its docstring and inner functions included."""
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        inner = f"{prefix}{child.name}." if is_function or isinstance(child, ast.ClassDef) else prefix
        if is_function:
            yield inner[:-1], child
        yield from functions(child, inner)


def long_classes(texts):
    """Path and name of every class that has too many lines of code together with all classes that it inherits from."""
    found = {}  # (path, name) -> number of lines, keys of base classes
    for path, text in texts.items():
        tree, code = tree_of(text), code_lines(text)
        home = {node.name: (path, node.name) for node in tree.body if isinstance(node, ast.ClassDef)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                folder = node.module.replace(".", "/")
                for name in node.names:
                    home[name.asname or name.name] = f"{folder}.py", name.name
                    home[f"{name.asname or name.name}."] = f"{folder}/{name.name}.py", ""  # it may be a module
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                bases = [_resolve(base, home) for base in node.bases]
                found[path, node.name] = size(node, code), bases

    def inherited(key):
        return {key}.union(*(inherited(base) for base in found[key][1] if base in found))

    return {" ".join(key) for key in found if sum(found[each][0] for each in inherited(key)) > MOST_CLASS_LINES}


def _resolve(base, home):
    """Path and name of a base class, which may be an attribute of a module."""
    base = base.value if isinstance(base, ast.Subscript) else base
    if isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name):
        return home.get(f"{base.value.id}.", ("", ""))[0], base.attr
    return home.get(base.id) if isinstance(base, ast.Name) else None


def long_first_lines(texts):
    """Path and first line of every docstring that begins with too many words."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = set()
    for path, text in texts.items():
        for node in ast.walk(tree_of(text)):
            first = ((ast.get_docstring(node) if isinstance(node, kinds) else "") or "").split("\n\n")[0]
            if len(first.split()) > MOST_FIRST_WORDS:
                found.add(f"{path} {first}")
    return found


def test_no_first_line_is_too_long():
    assert long_first_lines(library()) == set()


def test_no_file_is_too_long():
    assert long_files(library()) == set()


def test_no_function_is_too_long():
    assert long_functions(library()) == LONG_FUNCTIONS


def test_no_class_is_too_long_with_what_it_inherits():
    assert long_classes(library()) == set()


def test_what_is_too_long_is_noticed():
    body = "\n".join(["        pass"] * MOST_FUNCTION_LINES)
    texts = {
        "long.py": "pass\n" * (MOST_FILE_LINES + 1),
        "short.py": f'"""Text.\n\n{"More." * 3}\n"""\n\n# Why.\n' + "pass\n" * MOST_FILE_LINES,
        "functions.py": f"class A:\n    def f(self):\n        'Text.'\n{body}\nif True:\n    async def g():\n{body}",
        "short_function.py": f"def h():\n{body[:-13]}",
    }
    assert long_files(texts) == {"long.py"}
    words = "w " * MOST_FIRST_WORDS
    first_lines = {"long.py": f"'{words}w'", "short.py": f"'{words}'\ndef f():\n    '{words}\\n\\n{words}'"}
    assert long_first_lines(first_lines) == {f"long.py {words}w"}
    assert long_functions(texts) == {
        "functions.py A.f": MOST_FUNCTION_LINES + 1,
        "functions.py g": MOST_FUNCTION_LINES + 1,
    }
    half = "\n".join(["    pass"] * (MOST_CLASS_LINES // 2 - 1))
    texts = {
        "rlstructs/a.py": f"class A:\n{half}\nclass Other(A):\n{half}",
        "rlstructs/b.py": f"from rlstructs.a import A, Other as O\nclass B(A):\n{half}\n    pass\nclass C(O, A): pass",
        "rlstructs/c.py": "from rlstructs import a\nclass D(a.Other): pass\nclass E(a.A): pass",
    }
    assert long_classes(texts) == {"rlstructs/b.py B", "rlstructs/b.py C", "rlstructs/c.py D"}
