"""The parts of a checkpoint; each writes its own file or folder.

It checks the file before anything is restored.
"""

from __future__ import annotations

import contextlib
import copy
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rlstructs.batcher.batcher import RL_Batcher
from rlstructs.batcher.state import check_between_rollouts, give_up, plan_load
from rlstructs.checkpoints import in_place
from rlstructs.checkpoints.in_place import check_optimizer
from rlstructs.checkpoints.trees import load_tree, save_tree
from rlstructs.checks import clean_text
from rlstructs.errors import FileError, OutOfMemoryError, SpecError, StateError, WorkerError
from rlstructs.files.opening import read_bytes
from rlstructs.seeding import collect_states, plan_states

# Restores a part; returns a function to call when all parts are restored.
Restore = Callable[[], Callable[[], None] | None]
# A part's entry in the manifest.
Entry = dict[str, Any]


class Part(ABC):
    """A part of a checkpoint.

    Args:
        label: its name in messages and in the manifest.

    Attributes:
        turn: when it is restored: first what can be put back, then batchers, whose environments and agents may refuse
            a state, then memories, which refuse nothing that was checked, and random states last.
    """

    turn = 0

    def __init__(self, label: str) -> None:
        self.label = label

    @abstractmethod
    def save(self, folder: Path, before: Path | None, known: Entry) -> Entry:
        """Writes the part.

        Args:
            folder: of the new checkpoint.
            before: the checkpoint that this object saved or restored last; None if it is gone.
            known: the part's entry in the manifest of that checkpoint; {} for none.

        Raises:
            SpecError: a checkpoint cannot hold it.
            StateError: it cannot be saved now.
        """

    @abstractmethod
    def plan(self, folder: Path, entry: Entry, held: ExitStack) -> Restore:
        """Checks the part in a checkpoint, and returns a function that restores it.

        Args:
            folder: of the checkpoint.
            entry: what `save` returned.
            held: closes files after the restoring.

        Raises:
            FileNotFoundError, FileError: a file is missing or damaged, or does not fit.
            StateError: it cannot be restored now.
        """

    def back_up(self) -> Callable[[], None]:
        """Saves the present state; the returned function restores it.

        For a memory that function does nothing.
        """
        return lambda: None

    def note(self) -> None:  # noqa: B027, only parts that share files with the next checkpoint need it
        """Records that the last saved or restored checkpoint is the newest one."""


class TreePart(Part):
    """A part that is one tree in one file; a base class."""

    @property
    def _file(self) -> str:
        return f"{self.label.replace('/', '.')}.pt"

    def save(self, folder: Path, before: Path | None, known: Entry) -> Entry:
        path = folder / self._file
        save_tree(path, self.label, self._collect())
        data = read_bytes(path)
        return {"file": self._file, "bytes": len(data), "checksum": zlib.crc32(data)}

    def plan(self, folder: Path, entry: Entry, held: ExitStack) -> Restore:
        path = folder / self._file
        data = read_bytes(path)
        if entry != {"file": self._file, "bytes": len(data), "checksum": zlib.crc32(data)}:
            raise FileError(f"{path}: damaged: its checksum is wrong")
        with _name_errors(path):
            restore = self._plan(load_tree(path, data))

        def restore_with_names() -> Callable[[], None] | None:
            with _name_errors(path):
                return restore()

        return restore_with_names

    def _collect(self) -> Any:
        raise NotImplementedError

    def _plan(self, tree: Any) -> Restore:
        raise NotImplementedError


class StatePart(TreePart):
    """An object with `state_dict` and `load_state_dict`."""

    def __init__(self, label: str, owner: Any) -> None:
        super().__init__(label)
        if not is_stateful(owner):
            raise TypeError(f"{label} must have state_dict and load_state_dict, got a {type(owner).__name__}")
        self._owner = owner

    def _collect(self) -> Any:
        return self._owner.state_dict()

    def _plan(self, tree: Any) -> Restore:
        check_optimizer(self.label, self._owner, tree)
        return lambda: _load(self.label, self._owner, tree)

    def back_up(self) -> Callable[[], None]:
        return _back_up(self._owner)


class BatcherPart(TreePart):
    """A batcher.

    Args:
        exact: see `RL_Batcher.state_dict`.
    """

    turn = 1

    def __init__(self, label: str, owner: Any, exact: bool | str) -> None:
        if not isinstance(owner, RL_Batcher):
            raise TypeError(f"{label} must be an RL_Batcher or RayBatcher, got a {type(owner).__name__}")
        super().__init__(label)
        self._owner, self._exact = owner, exact

    def _collect(self) -> Any:
        check_between_rollouts(self._owner._life, self._owner._delivery, "save")
        return self._owner.state_dict(exact=self._exact)

    def _plan(self, tree: Any) -> Restore:
        return plan_load(self._owner._engine, self._owner._life, tree)

    def back_up(self) -> Callable[[], None]:
        return lambda: give_up(self._owner._life)


class ExtraPart(TreePart):
    """A dict of values, or of objects with `state_dict` and `load_state_dict`.

    Other values are restored as `in_place` describes.
    """

    def __init__(self, label: str, values: dict[str, Any]) -> None:
        super().__init__(label)
        self._values = values

    def _collect(self) -> Any:
        return {key: value.state_dict() if is_stateful(value) else value for key, value in self._values.items()}

    def _plan(self, tree: Any) -> Restore:
        if missing := sorted(map(str, self._values.keys() - tree.keys())):
            raise FileError(f"{self.label} has no {missing}, it has {sorted(map(str, tree))}")
        plan, values, states = in_place.Plan(), dict[str, Any](), dict[str, Any]()
        for key, value in tree.items():
            name, own = f"{self.label}[{key!r}]", self._values.get(key)
            if is_stateful(own):
                check_optimizer(name, own, value)
                states[key] = value
            else:
                values[key] = plan.fit(name, own, value)

        def restore() -> None:
            plan.write()
            for key in tree:
                if key in states:
                    _load(f"{self.label}[{key!r}]", self._values[key], states[key])
                else:
                    self._values[key] = values[key]

        return restore

    def back_up(self) -> Callable[[], None]:
        before = dict(self._values)
        put_back = [_back_up(each) if is_stateful(each) else in_place.keep(each) for each in before.values()]

        def put_all_back() -> None:
            self._values.clear()
            self._values.update(before)
            for each in put_back:
                each()

        return put_all_back


class RandomPart(TreePart):
    """The global random generators."""

    turn = 4

    def _collect(self) -> Any:
        return collect_states()

    def _plan(self, tree: Any) -> Restore:
        return plan_states(tree)

    def back_up(self) -> Callable[[], None]:
        return plan_states(collect_states())


@contextlib.contextmanager
def _name_errors(path: Path) -> Iterator[None]:
    """Turns errors of a tree that does not fit into FileErrors.

    The message names the tree's file.
    """
    try:
        yield
    except FileError as error:
        if str(path) in str(error):
            raise
        raise FileError(f"{path}: {error}") from (error.__cause__ or error)
    except (StateError, WorkerError, OutOfMemoryError):  # the file is not the cause
        raise
    except Exception as error:  # another program's tree may hold anything
        raise FileError(f"{path}: does not fit: {clean_text(error)}") from error


def _load(name: str, owner: Any, state: Any) -> None:
    try:
        owner.load_state_dict(state)
    except Exception as error:
        raise FileError(f"{name} refuses its state: {type(error).__name__}: {clean_text(error)}") from error


def _back_up(owner: Any) -> Callable[[], None]:
    state = copy.deepcopy(owner.state_dict())
    return lambda: owner.load_state_dict(state)


def is_stateful(value: Any) -> bool:
    """Whether an object has `state_dict` and `load_state_dict`."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def list_parts(label: str, given: Any) -> list[tuple[str, Any]]:
    """Returns label and object of each part that was given.

    `given` is one object, a dict of several, or None.

    Raises:
        SpecError: a name cannot be that of a file.
    """
    if given is None:
        return []
    if not isinstance(given, Mapping):
        return [(label, given)]
    for name in given:
        if not (isinstance(name, str) and name.replace("_", "").replace("-", "").isalnum() and name.isascii()):
            raise SpecError(f"{label} has the name {name!r}; expected letters, digits, '_' and '-'")
    return [(f"{label}/{name}", each) for name, each in given.items()]
