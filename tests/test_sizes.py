"""No file of the library has more than 400 lines, no function more than 50, except one kernel.

And no class has a body of more than 700 lines, with those of its bases in the library.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST_FILE_LINES, MOST_FUNCTION_LINES, MOST_CLASS_LINES = 400, 50, 700

# A kernel of Warp, which has to be one function.
LONG_FUNCTIONS = {"rlstructs/replay/sum_tree.py _draw"}
# Packages whose classes may be longer, with those below them.
MAY_HAVE_LONG_CLASSES = ("rlstructs.replay",)


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


def long_classes(texts):
    """Name -> lines of each class that is too long with all its bases in the library, decorators and docstrings too."""
    own, bases = {}, {}
    for path, text in texts.items():
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        tree = ast.parse(text)
        known = imported_names(tree)
        for name, node in classes(tree):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            own[f"{module}.{name}"] = node.end_lineno - first + 1
            bases[f"{module}.{name}"] = [resolved(ast.unparse(base).partition("[")[0], module, known)
                                         for base in node.bases]  # fmt: skip

    def every_base(name):
        return {name} & own.keys() | {each for base in bases.get(name, ()) for each in every_base(base)}

    lines = {name: sum(own[each] for each in every_base(name)) for name in own}
    return {name: n for name, n in lines.items() if n > MOST_CLASS_LINES}


def classes(node, prefix=""):
    """Qualified name and node of every class in a tree."""
    for child in ast.iter_child_nodes(node):
        is_class = isinstance(child, ast.ClassDef)
        is_scope = is_class or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        inner = f"{prefix}{child.name}." if is_scope else prefix
        if is_class:
            yield inner[:-1], child
        yield from classes(child, inner)


def imported_names(tree):
    """Name in a module -> what it is imported from, `package.module.name`."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.asname: each.name for each in node.names if each.asname}
        elif isinstance(node, ast.ImportFrom):
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return found


def resolved(name, module, known):
    """The full name of a class, as a module names it in its code."""
    first, dot, rest = name.partition(".")
    return f"{known[first]}{dot}{rest}" if first in known else f"{module}.{name}"


def test_no_file_is_too_long():
    assert long_files(library()) == set()


def test_no_function_is_too_long():
    assert long_functions(library()) == LONG_FUNCTIONS


def test_no_class_is_too_long():
    wrong = {name for name in long_classes(library()) if not name.startswith(MAY_HAVE_LONG_CLASSES)}
    assert wrong == set()


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


def test_a_class_that_is_too_long_with_its_bases_is_noticed():
    half = "\n".join(["    x = 1"] * (MOST_CLASS_LINES // 2 - 1))
    texts = {
        "a/base.py": f"class Base:\n{half}\nclass Other(dict[str, int]):\n{half}",
        "a/middle.py": f"from a import base\nclass Middle(base.Base):\n{half}",
        "b.py": "from a.middle import Middle as M\n@final\nclass Long(M):\n    pass",
    }
    assert long_classes(texts) == {"b.Long": MOST_CLASS_LINES + 3}
