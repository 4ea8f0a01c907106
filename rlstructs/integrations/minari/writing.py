"""`to_minari`: writes rollouts to a dataset of Minari."""

from __future__ import annotations

import contextlib
import inspect
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import minari
from gymnasium.envs.registration import EnvSpec
from minari.data_collector.episode_buffer import EpisodeBuffer
from minari.dataset.minari_dataset import parse_dataset_id
from minari.dataset.minari_storage import MinariStorage
from minari.namespace import create_namespace, list_local_namespaces
from minari.storage.datasets_root_dir import get_dataset_path
from minari.utils import _generate_dataset_metadata

from rlstructs.envs.env_infos import PREFIX
from rlstructs.envs.gym_envs import env_factory, find_env
from rlstructs.errors import SpecError
from rlstructs.integrations.minari.episodes import STEPS, Episode, EpisodeJoiner, SpaceColumns
from rlstructs.rollout.makers import select_arguments
from rlstructs.structures.trajectories import Trajectories

# Unfinished episodes are written part by part once they have so many bytes in all.
MOST_HELD = 32 << 20
SPACES = ("observation_space", "action_space")


def to_minari(
    dataset_id: str,
    batches: Iterable[Trajectories],
    env: str | EnvSpec | gymnasium.Env[Any, Any] | Callable[..., Any] | None = None,
    unfinished: str = "truncate",
    **metadata: Any,
) -> minari.MinariDataset:
    """Writes rollouts to a new dataset of Minari, one after the other.

    An episode that continues from one rollout to the next is one episode of the dataset. Where steps are missing (after
    a `reset`, the loss of a worker, or a rollout that was not given) the previous episode ends, and is unfinished. In
    trajectories that were made by hand, without `first_steps`, a step continues the previous one if it begins with the
    observation that this led to.

    Memory: the current rollout, and up to 32 MB of episodes that continue. If these cannot be written part by part
    (`unfinished="drop"`, other formats than HDF5, JPEG), all episodes that continue are held.

    Args:
        dataset_id: `name-v0` or `namespace/name-v0`, as Minari takes it.
        batches: rollouts in the order in which they were made, such as `batcher.rollouts(n_steps=...)`. They have the
            keys of a batcher's: `env_index`, those of the spaces, reward, terminated and truncated. What `info_keys`
            asked for becomes the infos of the dataset, rows of `env_info` the options of episodes.
        env: the environment, its id, its spec, its class, or a function that makes it, as `RL_Batcher.make` takes it;
            None if both spaces are given.
        unfinished: the treatment of an episode without end: "truncate" marks its last step as truncated, as Minari's
            `DataCollector` does, "drop" leaves it out.
        **metadata: other arguments of `minari.create_dataset_from_buffers`: `algorithm_name`, `author`,
            `author_email`, `code_permalink`, `description`, `eval_env`, `requirements`, `ref_max_score`, ..., and
            `observation_space`, `action_space`, `data_format`. Frames are stored without loss unless `jpeg_encoding`.

    Returns:
        The dataset. Its spaces have the dtypes of the trajectories, where float64 observations may be float32.

    Raises:
        SpecError: there is such a dataset, its id is malformed, a space is not supported, there is no episode, or
            trajectories do not fit the spaces; the message names the key. No error and no Ctrl-C leaves a dataset.
        TypeError: Minari has no such argument.
    """
    path, settings = _check_id(dataset_id), _find_settings(metadata, unfinished)
    spec, observations, actions = _find_spaces(env, settings)
    described = _describe(dataset_id, spec, settings)
    with _new_folder(path, dataset_id) as folder:
        writer = None
        for batch in batches:
            if writer is None:
                columns = observations.fit(batch.trajectories), actions.fit(batch.trajectories)
                storage = _create_storage(folder, spec, columns, settings)
                storage.update_metadata(described)
                writer = _Writer(storage, columns, unfinished)
            writer.add(batch)
        if writer is None or not writer.end():
            raise SpecError(f"to_minari: {dataset_id}: there is no episode to write")
    return minari.load_dataset(dataset_id)


class _Writer:
    """Writes rollouts to a storage of Minari."""

    def __init__(self, storage: Any, columns: tuple[SpaceColumns, SpaceColumns], unfinished: str) -> None:
        self._storage, (self._observations, self._actions) = storage, columns
        self._joiner, self._drops = EpisodeJoiner(*columns), unfinished == "drop"
        # Of Minari's formats only HDF5 appends to an episode, and not to frames that it has encoded.
        self._can_append = storage.FORMAT == "hdf5" and not storage.jpeg_encoding and not self._drops
        self._n_episodes = 0

    def add(self, batch: Trajectories) -> None:
        """Writes the episodes that end in a rollout, and parts of large ones.

        Such parts hold steps of episodes that continue.
        """
        self._write(self._joiner.add(batch))
        going = self._joiner.going
        if self._can_append and sum(episode.nbytes for episode in going) > MOST_HELD:
            # The last step stays: it may have to be marked as truncated.
            self._storage.update_episodes([self._take(episode, 1) for episode in going if episode.n_held > 1])

    def end(self) -> int:
        """Writes the episodes that go on; returns how many episodes were written in all."""
        self._write(self._joiner.end())
        return self._n_episodes

    def _write(self, episodes: Iterable[Episode]) -> None:
        buffers, in_parts = [], []
        for episode in episodes:
            if episode.is_over or not self._drops:
                episode.truncate()
                in_parts += [episode] if episode.number is not None else []
                buffers.append(self._take(episode))
        if buffers:
            self._storage.update_episodes(buffers)
        if in_parts:  # Minari has counted the steps of the last part alone
            counts = [{"total_steps": episode.n_written} for episode in in_parts]
            self._storage.update_episode_metadata(counts, [episode.number for episode in in_parts])

    def _take(self, episode: Episode, n_left: int = 0) -> EpisodeBuffer:
        """Takes the steps out of an episode, in the form that Minari writes.

        The last `n_left` steps stay.
        """
        options = None
        if episode.number is None:
            episode.number, self._n_episodes = self._n_episodes, self._n_episodes + 1
            options = episode.options or None
        arrays = episode.take(n_left)
        return EpisodeBuffer(
            id=episode.number,
            options=options,
            observations=self._observations.nest(arrays),
            actions=self._actions.nest(arrays),
            infos={key.removeprefix(PREFIX): array for key, array in arrays.items() if key.startswith(PREFIX)},
            **{name: arrays[name] for name in STEPS},
        )


def _check_id(dataset_id: str) -> Path:
    """The path of a dataset that does not exist yet."""
    try:
        parse_dataset_id(dataset_id)
    except (TypeError, ValueError) as error:  # TypeError where the version is missing
        raise SpecError(f"to_minari: dataset_id must be name-v0 or namespace/name-v0, got {dataset_id!r}") from error
    path = Path(get_dataset_path(dataset_id)).absolute()
    if path.exists():
        raise SpecError(f"to_minari: there is a dataset {dataset_id!r} in {path}; choose another version")
    return path


def _find_settings(metadata: Mapping[str, Any], unfinished: str) -> dict[str, Any]:
    """The arguments of Minari's function, with its defaults but for JPEG."""
    if unfinished not in ("truncate", "drop"):
        raise SpecError(f"to_minari: unfinished must be 'truncate' or 'drop', got {unfinished!r}")
    known = inspect.signature(minari.create_dataset_from_buffers).parameters
    settings = {name: parameter.default for name, parameter in known.items()}
    settings = {name: settings[name] for name in settings if name not in ("dataset_id", "buffer", "env")}
    if unknown := sorted(set(metadata) - set(settings)):
        raise TypeError(f"to_minari: Minari takes no {unknown}, but {sorted(settings)}")
    return {**settings, "jpeg_encoding": False, **metadata}


def _find_spaces(env: Any, settings: Mapping[str, Any]) -> tuple[EnvSpec | None, SpaceColumns, SpaceColumns]:
    """The spec of an environment, and the columns of its spaces."""
    found, spec = {name: settings[name] for name in SPACES}, None
    if isinstance(env, (str, EnvSpec)):
        spec = gymnasium.spec(find_env(env)) if isinstance(env, str) else env
    if env is None and None in found.values():
        raise SpecError("to_minari: needs env, or both observation_space and action_space")
    if env is not None and (spec is None or None in found.values()):
        with _made(env) as made:
            spec = getattr(made, "spec", None) if spec is None else spec
            found = {name: _find_space(made, name) if space is None else space for name, space in found.items()}
    observations, actions = (SpaceColumns(found[name], name.removesuffix("_space")) for name in SPACES)
    return _storable(spec if isinstance(spec, EnvSpec) else None), observations, actions


@contextlib.contextmanager
def _made(env: Any) -> Iterator[Any]:
    """Yields an environment: the given one, or a new one, closed at the end."""
    if hasattr(env, SPACES[0]) and hasattr(env, "step") and not isinstance(env, type):
        yield env
        return
    if not isinstance(env, (str, EnvSpec)) and not callable(env):
        raise TypeError(
            f"to_minari: env must be an id, an EnvSpec or a gymnasium.Env, got {type(env).__name__}; a class, or a "
            "function that makes an environment, will do too"
        )
    factory = env_factory(env, None)
    made = factory(**select_arguments(factory, {"n_envs": 1, "num_envs": 1, "seed": 0}, only_named=True))
    try:
        yield made
    finally:
        if hasattr(made, "close"):
            made.close()


def _find_space(env: Any, name: str) -> gymnasium.Space[Any]:
    """A space of an environment, or of each one of a vectorised environment."""
    space = getattr(env, f"single_{name}", getattr(env, name, None))
    if not isinstance(space, gymnasium.Space):
        raise SpecError(f"to_minari: env makes a {type(env).__name__}, which has no {name}")
    return space


def _storable(spec: EnvSpec | None) -> EnvSpec | None:
    """Returns the spec of an environment, or None without a JSON form.

    An entry point that is a class has none, for example.
    """
    try:
        if spec is not None:
            spec.to_json()
        return spec
    except (TypeError, ValueError) as error:
        warnings.warn(f"to_minari: the dataset will not name its environment: {error}", stacklevel=4)
        return None


def _describe(dataset_id: str, spec: EnvSpec | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a dataset, as Minari makes them of these arguments."""
    given = {**settings, "dataset_id": dataset_id, "env_spec": spec}
    found: dict[str, Any] = _generate_dataset_metadata(
        **{name: given[name] for name in inspect.signature(_generate_dataset_metadata).parameters}
    )
    return found


def _create_storage(
    folder: Path, spec: EnvSpec | None, columns: tuple[SpaceColumns, SpaceColumns], settings: Mapping[str, Any]
) -> MinariStorage:
    observations, actions = columns
    data_format = {} if settings["data_format"] is None else {"data_format": settings["data_format"]}
    return MinariStorage.new(
        folder / "data",
        observation_space=observations.space,
        action_space=actions.space,
        env_spec=spec,
        jpeg_encoding=settings["jpeg_encoding"],
        **data_format,
    )


@contextlib.contextmanager
def _new_folder(path: Path, dataset_id: str) -> Iterator[Path]:
    """Yields a folder that Minari does not list, to become the dataset.

    Renames it at the end, or removes it after an error.
    """
    # Minari cannot write to a relative path, and mkdtemp would hide the folder from other users for good.
    folder = Path(get_dataset_path()).absolute() / f".{secrets.token_hex(8)}"
    try:
        folder.mkdir()
        yield folder
        namespace = parse_dataset_id(dataset_id)[0]
        if namespace is not None and namespace not in list_local_namespaces():
            create_namespace(namespace)
        os.rename(folder, path)  # fails if another program has made the dataset meanwhile
    finally:
        shutil.rmtree(folder, ignore_errors=True)
