"""Proves rows of the environments of `pair_worlds.py`: that each has happened, once, and follows the one before."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from pair_worlds import FIELDS, checksum, code_of, features_of, image_of, length_of

INDEX, GENERATION, EPISODE, STEP, DRAW, OPTION, CHECK = range(len(FIELDS))


def array(tensor):
    return tensor.cpu().numpy()


def episode_after(env, index, episode):
    """The number of the episode after this one, if it ends by itself; see `pair_jax` for those of a JaxEnv."""
    return 2 * (episode // 2 + length_of(index, episode)) + 1 if env.startswith("JaxEnv") else episode + 1


def numbers_of(steps, prefix, shows):
    """The numbers in observations, int64 (B, T, 7)."""
    if shows == "infos":
        return np.stack([array(steps[f"{prefix}info/{name}"]) for name in FIELDS], -1)
    return array(steps[prefix + ("frame" if shows == "numbers" else "book")]).astype(np.int64)


def actions_of(steps, key, kind):
    """The codes of actions, int64 (B, T)."""
    if kind == "dict":
        return code_of({name: array(steps[f"{key}/{name}"]) for name in ("move", "force")}, kind)
    return code_of(array(steps[key]), kind)


def mistakes(batch, case):
    """Every mistake that there may be, and in which steps (B, T) it is."""
    steps, info, shows = batch.trajectories, batch.info, case["shows"]
    seen, after = (numbers_of(steps, prefix, shows) for prefix in ("observation/", "_observation/"))
    flags = {key: array(each) for key, each in steps.items() if key.endswith(("ed", "done", "initial_state"))}
    starts, done = flags["observation/initial_state"], flags["_observation/done"]
    acted = actions_of(steps, "action/action", case["acts"])
    led = np.where(starts, 0, actions_of(steps, "observation/last_action", case["acts"]) + 1)
    yield "the observation did not happen", seen[..., CHECK] != checksum(*np.moveaxis(seen[..., :CHECK], -1, 0), led)
    right = checksum(*np.moveaxis(after[..., :CHECK], -1, 0), acted + 1)
    yield "what followed did not happen", after[..., CHECK] != right
    yield "it is of another environment", seen[..., INDEX] != array(info["env_index"])[:, None]
    yield "what followed is of another episode", (seen[..., :STEP] != after[..., :STEP]).any(-1)
    yield "what followed is not the next step", seen[..., STEP] + 1 != after[..., STEP]
    yield "initial_state is wrong", starts != (seen[..., STEP] == 0)
    yield "initial_state follows a step", flags["_observation/initial_state"]
    yield "last_action is wrong", actions_of(steps, "_observation/last_action", case["acts"]) != acted
    is_over = after[..., STEP] == length_of(after[..., INDEX], after[..., EPISODE])
    even = (after[..., INDEX] + after[..., EPISODE]) % 2 == 0
    yield "done is wrong", done != is_over
    yield "terminated is wrong", flags["_observation/terminated"] != (is_over & even)
    yield "truncated is wrong", flags["_observation/truncated"] != (is_over & ~even)
    reward = array(steps["_observation/raw_reward" if case["wrapper"] in ("reward", "both") else "_observation/reward"])
    yield "the reward is wrong", reward != after[..., STEP] + after[..., INDEX] / 4
    if shows != "numbers":
        for prefix, numbers in (("observation/", seen), ("_observation/", after)):
            yield from _wrong_features(steps, prefix, numbers, case)
    yield from _wrong_told(steps, info, seen, starts, case)
    # The first transition of a row has none before it.
    follows = np.ones(done.shape, bool)
    following = episode_after(case["env"], after[..., INDEX], after[..., EPISODE])
    begins = starts[:, 1:] & (seen[:, 1:, EPISODE] == following[:, :-1])
    follows[:, 1:] = np.where(done[:, :-1], begins, (after[:, :-1] == seen[:, 1:]).all(-1))
    yield "it does not follow the transition before", ~follows


def _wrong_features(steps, prefix, numbers, case):
    key = "frame" if case["shows"] == "infos" else "x"
    if case["wrapper"] not in ("observation", "both"):
        yield f"{prefix}{key} is wrong", (array(steps[prefix + key]) != features_of(numbers)).any(-1)
    else:
        yield f"{prefix}{key} is not normalised", ~(np.abs(array(steps[prefix + key])) <= 10).all(-1)
    if case["shows"] == "dict":
        yield f"{prefix}inner/step is wrong", array(steps[prefix + "inner/step"])[..., 0] != numbers[..., STEP]
        wrong = array(steps[prefix + "inner/image"]) != image_of(numbers)
        yield f"{prefix}inner/image is wrong", wrong.any((-1, -2))


def _wrong_told(steps, info, seen, starts, case):
    """What the agent told of what it was given."""
    if case["info"] in ("env_info", "both"):
        yield "env_info is another one", seen[..., OPTION] != array(info["env_info/option"])[:, None]
    if case["agent"] == "module":
        return
    # Where a step may be older than its rollout, each has its own.
    versions = array(steps["policy_version"] if "policy_version" in steps else info["policy_version"][:, None])
    yield "the agent has had other updates", array(steps["action/version"]) != versions
    if case["info"] in ("agent_info", "both"):
        wrong = array(steps["action/offset"]) != array(info["agent_info/offset"])[:, None]
        if "policy_version" in steps:
            # The first step may have been chosen in a rollout before; the ledger checks it.
            wrong[:, 0] = False
        yield "agent_info is another one", wrong
    if case["agent"] in ("state", "views", "jax"):
        yield "the agent's state is wrong", array(steps["action/n"]) != seen[..., STEP]
        first = np.zeros(seen.shape[:2], bool)
        first[:, 0] = ~starts[:, 0] & (array(info["agent_state/n"]) != seen[:, 0, STEP])
        yield "agent_state is wrong", first
    if case["agent"] == "history":
        yield "the history is of another length", array(steps["action/length"]) != np.arange(seen.shape[1])
        sums = np.cumsum(array(steps["_observation/reward"]).astype(np.float64), 1)
        sums = np.concatenate([np.zeros_like(sums[:, :1]), sums[:, :-1]], 1)
        yield "the history is another one", np.abs(array(steps["action/total"]) - sums) > 1e-9


def check_batch(batch, case):
    """Raises AssertionError unless every row of a batch has happened."""
    valid = array(batch.trajectories.mask()).astype(bool)
    if not valid.size:
        return
    check_pack(batch, valid)
    for mistake, where in mistakes(batch, case):
        found = np.argwhere(where & valid)
        if found.size:
            row, t = found[0]
            numbers = numbers_of(batch.trajectories, "observation/", case["shows"])[row, t].tolist()
            raise AssertionError(f"row {row}, t={t} ({dict(zip(FIELDS, numbers, strict=True))}): {mistake}")


def check_pack(batch, valid):
    """Raises AssertionError unless a pack of a batch holds its steps, and is unpacked to them."""
    for by in ("row", "episode"):
        pack = batch.packed(by)
        assert len(pack.positions) == pack.cu_seqlens[-1] == valid.sum(), f"packed by {by}: {len(pack.positions)} steps"
        for key, values in batch.trajectories.items():
            found = array(pack.unpack(pack[key]))[valid]
            assert np.array_equal(found, array(values)[valid], equal_nan=True), f"packed by {by}: {key}"


@dataclass
class Ledger:
    """What was handed out of each environment, so that nothing is missing and nothing comes twice.

    Args:
        n_envs: environments of one worker.

    Attributes:
        reached: environment -> generation, episode and step that come next.
        renewed: environments that may begin any later episode, because of a reset.
        lost: environment -> how often its worker may have been replaced: so often a length of 0 was handed out for it,
            or, where it had ended and so had no row, for all that its worker still ran.
        anew: environments that fail by themselves, and are made anew where they do.
        episodes: those that have ended since they were taken: environment, return, length, terminated.
        n_steps: the steps of all environments.
        generations: of each environment, those that were seen.
        offsets: environment -> `agent_info` of its last row with a step, and of its rows since.
    """

    n_envs: int
    reached: dict = field(default_factory=dict)
    renewed: set = field(default_factory=set)
    lost: Counter = field(default_factory=Counter)
    anew: set = field(default_factory=set)
    episodes: list = field(default_factory=list)
    sums: dict = field(default_factory=dict)
    n_steps: int = 0
    generations: dict = field(default_factory=dict)
    offsets: dict = field(default_factory=dict)

    def copy(self):
        return copy.deepcopy(self)

    def note_reset(self, n):
        self.renewed |= set(range(n))
        self.sums.clear()

    def add(self, batch, case):
        check_batch(batch, case)
        steps, shows = batch.trajectories, case["shows"]
        seen, after = (numbers_of(steps, prefix, shows) for prefix in ("observation/", "_observation/"))
        done, terminated = (array(steps[f"_observation/{name}"]) for name in ("done", "terminated"))
        envs = array(batch.info["env_index"]).tolist()
        lengths = dict(zip(envs, batch.lengths.tolist(), strict=True))
        for first in {env // self.n_envs * self.n_envs for env in envs}:
            own = range(first, first + self.n_envs)
            if not any(lengths.get(env) for env in own):
                self.lost.update(env for env in own if env not in lengths)
        for row, env in enumerate(envs):
            length = int(batch.lengths[row])
            if case["agent"] != "module" and case["info"] in ("agent_info", "both"):
                self._check_offset(env, int(batch.info["agent_info/offset"][row]), steps["action/offset"][row, :length])
            if not length:
                self.lost[env] += 1
                continue
            self.check(env, tuple(seen[row, 0, GENERATION:DRAW].tolist()))
            generation, episode, step = after[row, length - 1, GENERATION:DRAW].tolist()
            is_over = done[row, length - 1]
            self.reached[env] = (
                (generation, episode_after(case["env"], env, episode), 0) if is_over else (generation, episode, step)
            )
            self.renewed.discard(env)
            self.n_steps += length
            self.generations.setdefault(env, set()).add(generation)
            self._sum(env, after[row, :length], done[row], terminated[row])

    def _check_offset(self, env, own, chosen):
        """Raises AssertionError unless the first step was chosen with an `agent_info` since the last step."""
        known = self.offsets.get(env, set()) | {own}
        if len(chosen):
            assert int(chosen[0]) in known, f"environment {env}: agent_info {int(chosen[0])}, expected one of {known}"
            known = {own}
        self.offsets[env] = known

    def check(self, env, first):
        """Raises AssertionError unless an environment may go on with this generation, episode and step."""
        wanted = self.reached.get(env, (0, 0, 0))
        is_later = first > wanted and first[2] == 0
        may_restart = self.lost[env] > 0 and first[0] > wanted[0] and is_later
        begins = first[2] == 0 and (first[1] == 0 or env in self.renewed)
        is_anew = env in self.anew and begins and first != wanted
        if first == wanted or may_restart or is_anew or (env in self.renewed and is_later):
            if first[0] > wanted[0] or is_anew:
                self.lost[env] = max(self.lost[env] - 1, 0)
                self.sums.pop(env, None)
            return
        kind = "it comes twice" if first < wanted else "some are missing"
        raise AssertionError(f"environment {env} goes on at (generation, episode, step) {first}, not {wanted}: {kind}")

    def _sum(self, env, after, done, terminated):
        for t in range(len(after)):
            total, n = self.sums.get(env, (0.0, 0))
            self.sums[env] = total + after[t, STEP] + env / 4, n + 1
            if done[t]:
                self.episodes.append((env, *self.sums.pop(env), bool(terminated[t])))

    def check_episodes(self, found):
        """Raises AssertionError unless these are the episodes that have ended since the last call."""
        names = ("env_index", "return", "length", "terminated")
        rows = sorted(zip(*(found[name].tolist() for name in names), strict=True))
        assert rows == sorted(self.episodes), f"episodes {rows}, expected {sorted(self.episodes)}"
        self.episodes.clear()
