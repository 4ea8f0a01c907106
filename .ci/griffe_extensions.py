"""For mkdocs: how griffe has to read docstrings and signatures, so that the reference shows what users need."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import griffe


class DocstringExamples(griffe.Extension):
    """Renames the sections `Example:` of docstrings, because griffe knows code by the name `Examples:` only."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)


class DefaultValues(griffe.Extension):
    """Shows the values of defaults that are named constants: `= "raise"` in place of `= RAISE`."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        self._replace_in(pkg)

    def _replace_in(self, obj: griffe.Object) -> None:
        for member in obj.members.values():
            if member.is_alias:
                continue
            if member.is_function:
                for parameter in member.parameters:
                    parameter.default = _value_of(parameter.default, member)
            elif member.is_module or member.is_class:
                self._replace_in(member)


def _value_of(default: Any, function: griffe.Function) -> Any:
    """The text of a default: of a constant its value, of anything else the default as it is."""
    if not isinstance(default, griffe.ExprName) or not default.name.isupper():
        return default
    module, name = function.module, default.name
    try:
        path, _, name = function.resolve(name).rpartition(".")
        module = function.modules_collection.get_member(path)
    except griffe.NameResolutionError:  # griffe does not see `A, B = "a", "b"`
        pass
    except KeyError:  # it comes from another package
        return default
    return _constants(module.filepath).get(name, default)


@cache
def _constants(path: Path) -> dict[str, str]:
    """The texts, numbers and empty objects that a module assigns to names, as they are written."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for name, value in pairs:
                is_shown = isinstance(value, ast.Constant) or ast.unparse(value) == "DictTensor()"
                if isinstance(name, ast.Name) and is_shown:
                    found[name.id] = ast.unparse(value).replace("'", '"')
    return found
