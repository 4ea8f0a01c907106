"""Pickles environments and agents: tensors as bytes beside the pickle, simulators by their adapters.

Adapters save objects that pickle cannot save. Simulators written in C need them, for example; those for ALE and MuJoCo
are here. With sticky actions ALE's emulator also remembers its last action, which its saved state lacks. As long as it
happens to repeat that action, the next frames depend on it. `_find_last_action` tries all actions, plays some frames
and compares. MuJoCo's data are saved in full, derived quantities too, as rewards are computed from them.
"""

from __future__ import annotations

import copyreg
import functools
import io
import math
import pickle
import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch

from rlstructs.workers import pickling

STORAGE = "storage"
# The accepted probability that a search for the last action of ALE plays too few frames.
RISK = 1e-15
# Spaces of frames are large arrays of one number, and most bytes of simulators are zeros. Higher levels take longer and
# save little.
LEVEL = 1


class Pickled(NamedTuple):
    """A pickled object.

    Attributes:
        data: the pickle, compressed, uint8.
        storages: the memory of its tensors, uint8 each.
    """

    data: np.ndarray
    storages: list[np.ndarray]

    def as_tensors(self) -> dict[str, Any]:
        """Converts to a dict of tensors, which `torch.load(weights_only=True)` reads."""
        return {
            "pickled": torch.from_numpy(self.data),
            "storages": [torch.from_numpy(storage) for storage in self.storages],
        }

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Any]) -> Pickled:
        """The pickle of what `as_tensors` returned; may share its memory."""
        return cls(_as_bytes(tensors["pickled"]), [_as_bytes(storage) for storage in tensors["storages"]])


def dumps(thing: Any, tokens: Mapping[int, Any] | None = None) -> Pickled:
    """Pickles an object by value, as cloudpickle does.

    Tensors that share memory still do when they are unpickled.

    Args:
        thing: the object.
        tokens: by the `id` of an object in it, what `loads` will call `resolve` with in place of that object.

    Raises:
        Exception: something in it cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, tokens or {})
    pickler.dump(thing)
    data = bytearray(zlib.compress(file.getbuffer(), LEVEL))
    return Pickled(np.frombuffer(data, np.uint8), pickler.read_storages())


def loads(pickled: Pickled, resolve: Callable[[Any], Any] | None = None) -> Any:
    """Makes a new object from a pickle of `dumps`.

    Runs code of whoever made the pickle.

    Args:
        pickled: the pickle.
        resolve: returns the object for a token; see `dumps`.
    """
    return _Unpickler(pickled, resolve).load()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle has no types
    def __init__(self, file: io.BytesIO, tokens: Mapping[int, Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._tokens = tokens
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}  # by address of the object in C

    def persistent_id(self, thing: Any) -> Any:
        if isinstance(thing, torch.UntypedStorage):
            return STORAGE, self._number(thing), None, str(thing.device)
        if isinstance(thing, torch.storage.TypedStorage):
            storage = thing._untyped_storage
            return STORAGE, self._number(storage), thing.dtype, str(storage.device)
        return self._tokens.get(id(thing))

    def _number(self, storage: torch.UntypedStorage) -> int:
        return self._storages.setdefault(storage._cdata, (len(self._storages), storage))[0]

    def reducer_override(self, thing: Any) -> Any:
        adapter = find_adapter(type(thing))
        if adapter is not None:
            return adapter.load, (adapter.save(thing),)
        ezpickle = sys.modules.get("gymnasium.utils.ezpickle")
        if ezpickle is not None and isinstance(thing, ezpickle.EzPickle):
            # Its own way makes a new environment and drops the state.
            return copyreg.__newobj__, (type(thing),), dict(vars(thing)), None, None, _set_attributes  # type: ignore[attr-defined]
        return super().reducer_override(thing)

    def read_storages(self) -> list[np.ndarray]:
        """Copies the memory of all tensors."""
        return [_bytes_of(storage) for _, storage in self._storages.values()]


class _Unpickler(pickling.Unpickler):
    def __init__(self, pickled: Pickled, resolve: Callable[[Any], Any] | None) -> None:
        super().__init__(io.BytesIO(zlib.decompress(pickled.data.data)))
        self._bytes, self._resolve = pickled.storages, resolve
        self._storages: dict[int, torch.UntypedStorage] = {}

    def persistent_load(self, token: Any) -> Any:
        if token[0] != STORAGE:
            if self._resolve is None:
                raise pickle.UnpicklingError(f"nothing stands for {token[0]!r}")
            return self._resolve(token)
        _, number, dtype, device = token
        if number not in self._storages:
            self._storages[number] = _make_storage(self._bytes[number], device)
        storage = self._storages[number]
        if dtype is None:
            return storage
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _set_attributes(thing: Any, attributes: dict[str, Any]) -> None:
    vars(thing).update(attributes)


def _bytes_of(storage: torch.UntypedStorage) -> np.ndarray:
    """Copies the bytes of a storage on any device."""
    raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return raw.cpu().clone().numpy()


def _make_storage(raw: np.ndarray, device: str) -> torch.UntypedStorage:
    return torch.tensor(raw, dtype=torch.uint8, device=device).untyped_storage()


def _as_bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().numpy()


class Adapter(NamedTuple):
    """Saves objects of one class.

    Attributes:
        save: returns a picklable description of an object.
        load: makes an object in the same state from such a description.
    """

    save: Callable[[Any], Any]
    load: Callable[[Any], Any]


def register(kind: type | str, save: Callable[[Any], Any], load: Callable[[Any], Any]) -> None:
    """Registers functions that save and load objects of a class in exact states.

    They also serve for classes derived from it.

    For simulators whose objects pickle cannot save. An environment that holds such an object, at any depth and below
    any wrappers, is then pickled with it. Call it in the workers: in the module that defines the environment, or in
    `init_worker`.

    Args:
        kind: the class, or its full name, such as "simulator.core.World".
        save: `save(thing)` returns a picklable description of the object.
        load: `load(saved)` makes an object in the same state; a function of a module, or one that can be pickled.

    Raises:
        TypeError: `save` or `load` is no function.

    Example:
        >>> import itertools
        >>> class Stream:
        ...     def __init__(self, at):
        ...         self.at, self.rows = at, (row for row in itertools.count(at))  # a generator cannot be pickled
        >>> register(Stream, lambda stream: stream.at, Stream)
    """
    for name, function in (("save", save), ("load", load)):
        if not callable(function):
            raise TypeError(f"register: {name} must be a function, got {function!r}")
    _adapters[kind if isinstance(kind, str) else _full_name(kind)] = Adapter(save, load)


def find_adapter(kind: type) -> Adapter | None:
    """Returns the adapter of a class, or of its nearest base class.

    None if there is none.
    """
    for cls in kind.__mro__:
        name = _full_name(cls)
        if name in _adapters:
            return _adapters[name]
    return None


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _save_atari(env: Any) -> tuple[Any, ...]:
    """Describes an `AtariEnv`, with the random stream of its emulator.

    The environment is not changed.
    """
    others = {name: value for name, value in vars(env).items() if name != "ale"}
    state = env.ale.cloneState(include_rng=True)
    last = _find_last_action(env, state)
    return type(env), env._ezpickle_args, env._ezpickle_kwargs, others, state, last


def _load_atari(saved: tuple[Any, ...]) -> Any:
    """Makes an `AtariEnv` in a saved state."""
    from ale_py.env import AtariEnv

    kind, args, kwargs, others, state, last = saved
    env = kind.__new__(kind)
    env.ale = AtariEnv(*args, **kwargs).ale  # a derived class may take other arguments
    vars(env).update(others)
    env.ale.restoreState(state)
    if last is not None:
        _set_last_action(env.ale, state, last)
    return env


def _find_last_action(env: Any, state: Any) -> int | None:
    """Returns an action with the same effect as the last one, or None.

    None where the last action has no effect.

    Args:
        env: the environment; afterwards it behaves as before.
        state: that of its emulator.

    Raises:
        TypeError: actions are continuous, or are always repeated: there are too many of them to try.
    """
    ale = env.ale
    chance = ale.getFloat("repeat_action_probability")
    if chance == 0 or ale.game_over():
        return None
    if env.continuous or chance >= 1:
        raise TypeError("the emulator repeats actions that it does not tell: use repeat_action_probability=0")
    expected = _play(ale, chance)
    actions: list[int] = [each.value for each in ale.getLegalActionSet()]
    for action in actions:
        _set_last_action(ale, state, action)
        if _play(ale, chance) == expected:
            _set_last_action(ale, state, action)
            return int(action)
    raise TypeError("no action has the effect of the emulator's last one")


def _set_last_action(ale: Any, state: Any, action: int) -> None:
    """Brings an emulator to a state with this last action."""
    ale.restoreState(state)
    plain = ale.cloneState()  # without the random stream, so that some frames repeat no action
    for _ in range(_count_frames(ale.getFloat("repeat_action_probability"))):
        ale.restoreState(plain)
        ale.act(action)
    ale.restoreState(state)


def _play(ale: Any, chance: float) -> list[bytes]:
    """Plays frames until the last action has no more effect.

    Returns the state after each frame.
    """
    states = []
    for _ in range(_count_frames(chance)):
        ale.act(0)
        states.append(ale.cloneState(include_rng=True).serialize())
    return states


def _count_frames(chance: float) -> int:
    """Returns a number of frames that ends the last action's effect almost surely.

    Among so many frames, one does not repeat it.
    """
    return math.ceil(math.log(RISK) / math.log(chance))


def _save_model(model: Any) -> bytes:
    """Describes an `MjModel`; equal models give the same object, which is pickled once."""
    return _compress(model.__getstate__())


def _load_model(saved: bytes) -> Any:
    """Makes an equal `MjModel`."""
    import mujoco

    model = mujoco.MjModel.__new__(mujoco.MjModel)
    model.__setstate__(zlib.decompress(saved))
    return model


def _save_data(data: Any) -> tuple[Any, int, bytes]:
    """Describes an `MjData`: its model, the rest of its pickle, and the model's place.

    Place: the offset of the model's bytes in the pickle, or -1.
    """
    whole, model = data.__getstate__(), data.model.__getstate__()
    at = whole.find(model)
    if at < 0:
        return data.model, -1, zlib.compress(whole, LEVEL)
    return data.model, at, zlib.compress(whole[:at] + whole[at + len(model) :], LEVEL)


def _load_data(saved: tuple[Any, int, bytes]) -> Any:
    """Makes an equal `MjData`, whose `model` is an equal one of its own."""
    import mujoco

    model, at, rest = saved[0], saved[1], zlib.decompress(saved[2])
    data = mujoco.MjData.__new__(mujoco.MjData)
    data.__setstate__(rest if at < 0 else rest[:at] + model.__getstate__() + rest[at:])
    return data


def _save_renderer(renderer: Any) -> tuple[Any, ...]:
    """Describes gymnasium's renderer without its windows, which it makes again."""
    return type(renderer), {**vars(renderer), "viewer": None, "_viewers": {}}


def _load_renderer(saved: tuple[Any, ...]) -> Any:
    """Makes an equal renderer without windows."""
    kind, attributes = saved
    renderer = kind.__new__(kind)
    vars(renderer).update(attributes)
    return renderer


@functools.lru_cache(maxsize=8)
def _compress(model: bytes) -> bytes:
    return zlib.compress(model, LEVEL)


def _leave_out(thing: Any) -> None:
    return None


def _refuse_client(client: Any) -> None:
    """Refuses to copy a client of PyBullet.

    It holds the number of a simulator; its copy would step, and at last end, the same one.
    """
    raise TypeError("PyBullet's client is only the number of a simulator, which a copy would share")


# Windows, fonts and clocks of pygame: environments of gymnasium make them again when they next render.
_PYGAME = ("pygame.freetype.Font", "pygame.surface.Surface", "pygame.time.Clock")
# By the full name of the class, so that its module need not be imported.
_adapters = {
    "ale_py.env.AtariEnv": Adapter(_save_atari, _load_atari),
    "gymnasium.envs.mujoco.mujoco_rendering.MujocoRenderer": Adapter(_save_renderer, _load_renderer),
    "mujoco._structs.MjData": Adapter(_save_data, _load_data),
    "mujoco._structs.MjModel": Adapter(_save_model, _load_model),
    "pybullet_utils.bullet_client.BulletClient": Adapter(_refuse_client, _refuse_client),
    **dict.fromkeys(_PYGAME, Adapter(_leave_out, _leave_out)),
}
