"""`RandomAgent`: uniform random actions of any supported action space."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from rlstructs.action_masks import read_mask
from rlstructs.agent import RL_Agent
from rlstructs.envs.action_reader import ActionReader
from rlstructs.envs.spaces import Leaf, list_leaves
from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.workers.public_names import set_module

logger = logging.getLogger("rlstructs")


@set_module("rlstructs")
class RandomAgent(RL_Agent):
    """Draws each action from its space, uniformly.

    Numbers of a Box that have one bound come from an exponential distribution that starts there, numbers without
    bounds from a standard normal one.

    It draws up to 512 batches of actions ahead, which take about 16 megabytes at most.

    Args:
        action_space: Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of them.
        mask: the key of the observation that says which actions are allowed, by 0 and 1, or by bools; for Discrete(n),
            n of them, and for MultiDiscrete those of its entries one after another. Where an episode has ended, the
            action does not count and nothing need be allowed. None to allow all actions.

    Raises:
        SpecError: the space is not supported, or not with a mask; or at a step, the mask has another shape, holds other
            numbers, or allows nothing: the message names the row of the observation.
        MissingKeyError: at a step, the observation has no such key.

    Example:
        >>> agent = RandomAgent(spaces.Box(-1, 1, (3,)))
        >>> observation = DictTensor({"reward": torch.zeros(2)})
        >>> output, _ = agent(DictTensor(), observation, DictTensor())
        >>> output["action"].shape
        torch.Size([2, 3])
    """

    #: It uses only the number of rows, and the mask, which it does not change.
    takes_views: ClassVar[bool] = True
    _was_updated = False

    def __init__(self, action_space: gymnasium.Space[Any], mask: str | None = None) -> None:
        self._masked = None if mask is None else _MaskedDraws(action_space, mask)
        found = [] if self._masked else list_leaves(action_space, "action")
        row_bytes = sum(NUMBER_BYTES * math.prod(leaf.shape) for leaf in found)
        self._draws = {
            ActionReader.key(leaf): _DrawnAhead(_draw_function(leaf), len(found), row_bytes) for leaf in found
        }

    def initial_state(self, agent_info: DictTensor, B: int) -> DictTensor:
        """An empty state."""
        return DictTensor()

    def __call__(
        self,
        state: DictTensor,
        observation: DictTensor,
        agent_info: DictTensor,
        history: TemporalDictTensor | None = None,
    ) -> tuple[DictTensor, DictTensor]:
        """Random actions, B rows."""
        if self._masked is not None:
            return DictTensor.trusted({"action": self._masked(observation)}), state
        n = observation.n_elems()
        return DictTensor.trusted({key: draw(n) for key, draw in self._draws.items()}), state

    def update(self, info: Any) -> None:
        """Does nothing, because the agent does not learn.

        The first time that it gets weights it says so in the log.
        """
        if info is not None and not self._was_updated:
            self._was_updated = True
            logger.warning("update: a RandomAgent does not learn; give the batcher the agent or network that does")

    def seed(self, seed: int) -> None:
        """Drops actions drawn ahead.

        The next actions come from the newly seeded global stream of torch.
        """
        for draw in self._draws.values():
            draw.forget()
        if self._masked is not None:
            self._masked.forget()


# The most batches, and the most rows of all batches together. A draw takes a few calls for any number of rows, each
# with cold caches: one draw per step took longer than everything else that a rollout adds to its environments.
BATCHES_AHEAD, ROWS_AHEAD = 512, 2**16
# The most bytes of all batches and leaves: draws of wide spaces take so long that the calls do not matter.
BYTES_AHEAD = 2**24
# Bytes of a drawn number, and of a tensor without its numbers.
NUMBER_BYTES, TENSOR_BYTES = 8, 512


def _batches_ahead(n: int, n_leaves: int, row_bytes: int) -> int:
    """Returns the number of batches of n rows to draw at once.

    It is equal for all leaves of a space.

    Args:
        n: rows of a batch.
        n_leaves: leaves of the space.
        row_bytes: bytes of the numbers in a row of all leaves.
    """
    n_bytes = n_leaves * TENSOR_BYTES + n * row_bytes
    return max(1, min(BATCHES_AHEAD, ROWS_AHEAD // max(1, n), BYTES_AHEAD // n_bytes))


class _DrawnAhead:
    """Draws many batches of a leaf at once, and returns them one by one."""

    def __init__(self, draw: Callable[[int], torch.Tensor], n_leaves: int, row_bytes: int) -> None:
        self._draw, self._sizes = draw, (n_leaves, row_bytes)
        self._batches: list[torch.Tensor] = []
        self._n = 0

    def __call__(self, n: int) -> torch.Tensor:
        if not self._batches or n != self._n:
            # A new tensor each time, because the caller owns what was handed out.
            n_batches = _batches_ahead(n, *self._sizes)
            drawn = self._draw(n_batches * n)
            self._batches = list(drawn.reshape(n_batches, n, *drawn.shape[1:]).unbind())
            self._n = n
        return self._batches.pop()

    def forget(self) -> None:
        """Drops the batches that were drawn ahead."""
        self._batches = []


class _MaskedDraws:
    """Draws actions of a Discrete or MultiDiscrete space that a mask allows.

    The mask is a key of the observation.
    """

    def __init__(self, space: gymnasium.Space[Any], key: str) -> None:
        if not isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
            raise SpecError(f"RandomAgent: mask needs a Discrete or MultiDiscrete action space, got {space}")
        [leaf] = list_leaves(space, "action")
        self._key, self._space, self._leaf = key, space, leaf
        sizes = [space.n] if isinstance(space, spaces.Discrete) else space.nvec.flat
        self._sizes, self._start = [int(n) for n in sizes], torch.tensor(space.start, dtype=torch.int64, device="cpu")
        self._dtype = torch.from_numpy(np.zeros(0, leaf.dtype)).dtype
        self._what = f"RandomAgent: the mask {key!r}"
        entries = [f"{self._what} for entry {k} of the action" for k in range(len(self._sizes))]
        self._names = entries if leaf.shape else [self._what]
        self._n = sum(self._sizes)
        self._scores = _DrawnAhead(partial(_draw_scores, self._n), 1, NUMBER_BYTES * self._n)

    def __call__(self, observation: DictTensor) -> torch.Tensor:
        """Draws B actions."""
        mask, n = self._read(observation), observation.n_elems()
        ended = observation["done"].to("cpu") if "done" in observation else None
        # Each allowed action has a random score, and the highest wins.
        masks, scores = (each.split(self._sizes, 1) for each in (mask, self._scores(n)))  # type: ignore[no-untyped-call]
        allowed = (read_mask(name, part, ended) for name, part in zip(self._names, masks, strict=True))
        drawn = [score.masked_fill_(~part, -1).argmax(1) for score, part in zip(scores, allowed, strict=True)]
        return torch.stack(drawn, 1).reshape(n, *self._leaf.shape).add_(self._start).to(self._dtype)

    def _read(self, observation: DictTensor) -> torch.Tensor:
        """The mask of all entries of the action, (B, n)."""
        if self._key not in observation:
            raise MissingKeyError(f"{self._what} is not a key of the observation, which has {[*observation.keys()]}")
        mask = observation[self._key]
        if math.prod(mask.shape[1:]) != self._n:
            shape = tuple(mask.shape[1:])
            raise SpecError(f"{self._what} has rows of shape {shape}, expected ({self._n},) for {self._space}")
        return mask.to("cpu").reshape(len(mask), self._n)

    def forget(self) -> None:
        """Drops the scores that were drawn ahead."""
        self._scores.forget()


def _draw_scores(n_actions: int, n: int) -> torch.Tensor:
    return torch.rand((n, n_actions), device="cpu")


def _draw_function(leaf: Leaf) -> Callable[[int], torch.Tensor]:
    """A function that takes B and draws B values of one leaf."""
    space, dtype = leaf.space, torch.from_numpy(np.zeros(0, leaf.dtype)).dtype
    if isinstance(space, spaces.Discrete):
        return partial(_draw_whole_numbers, int(space.start), int(space.start) + int(space.n), leaf.shape, dtype)
    if isinstance(space, spaces.MultiBinary):
        return partial(_draw_whole_numbers, 0, 2, leaf.shape, dtype)
    if isinstance(space, spaces.MultiDiscrete):
        low = space.start.astype(object)
        return _WholeNumbers(low, low + space.nvec.astype(object) - 1, leaf.dtype)
    assert isinstance(space, spaces.Box)
    if dtype.is_floating_point:
        return _RealNumbers(space, dtype)
    return _WholeNumbers(space.low.astype(object), space.high.astype(object), leaf.dtype)


def _draw_whole_numbers(low: int, end: int, shape: tuple[int, ...], dtype: torch.dtype, n: int) -> torch.Tensor:
    return torch.randint(low, end, (n, *shape), dtype=dtype, device="cpu")


class _WholeNumbers:
    """Draws whole numbers between two bounds, both included, exact over all 64 bits."""

    def __init__(self, low: np.ndarray, high: np.ndarray, dtype: np.dtype[Any]) -> None:
        self._dtype, self._shape = torch.from_numpy(np.zeros(0, dtype)).dtype, low.shape
        # uint64 is drawn as int64, lowered by 2**63.
        self._lowered = dtype == np.uint64
        shift = 2**63 if self._lowered else 0
        lows, highs = ([int(v) - shift for v in bound.flat] for bound in (low, high))
        spans = [high - low for low, high in zip(lows, highs, strict=True)]
        self._low, self._high = self._tensor(lows), self._tensor(highs)
        # A random float64 has 53 bits, which is enough for spans below 2**32.
        self._count = self._tensor([s + 1 for s in spans]).double() if max(spans, default=0) < 2**32 else None
        # Wider spans: random bits are drawn until they lie within the bounds, two attempts or fewer on average.
        self._base = self._tensor([low if s < 2**63 else 0 for low, s in zip(lows, spans, strict=True)])
        self._mask = self._tensor([(1 << s.bit_length()) - 1 if s < 2**63 else -1 for s in spans])

    def __call__(self, n: int) -> torch.Tensor:
        if self._count is not None:
            drawn = torch.rand((n, *self._shape), dtype=torch.float64, device="cpu")
            drawn = drawn.mul_(self._count).long().add_(self._low)
        else:
            drawn = self._bits(n)
            while (outside := (drawn < self._low) | (drawn > self._high)).any():
                drawn = torch.where(outside, self._bits(n), drawn)
        if self._lowered:
            return drawn.bitwise_xor_(torch.tensor(-(2**63), device="cpu")).view(self._dtype)
        return drawn.to(self._dtype)

    def _bits(self, n: int) -> torch.Tensor:
        bits = torch.empty((n, *self._shape), dtype=torch.int64, device="cpu").random_(-(2**63), None)
        return bits.bitwise_and_(self._mask).add_(self._base)

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device="cpu").reshape(self._shape)


class _RealNumbers:
    """Draws floats between bounds, either of which may be infinite."""

    def __init__(self, space: spaces.Box, dtype: torch.dtype) -> None:
        self._dtype, self._shape = dtype, space.shape
        low, high = (torch.from_numpy(bound.astype(np.float64)) for bound in (space.low, space.high))
        self._below, self._above = low.isfinite(), high.isfinite()
        self._bounded = bool((self._below & self._above).all())
        # The outermost values of the dtype that lie within the bounds; 0 without a bound.
        largest, zero = torch.finfo(dtype).max, torch.zeros((), dtype=torch.float64, device="cpu")
        self._low = torch.where(self._below, _round_towards(low.clamp(-largest, largest), dtype, torch.inf), zero)
        self._high = torch.where(self._above, _round_towards(high.clamp(-largest, largest), dtype, -torch.inf), zero)
        self._span = self._high - self._low

    def __call__(self, n: int) -> torch.Tensor:
        shape = (n, *self._shape)
        drawn = torch.addcmul(self._low, torch.rand(shape, device="cpu"), self._span)
        if not self._bounded:
            beyond = torch.empty(shape, device="cpu").exponential_()
            one_sided = torch.where(self._below, self._low + beyond, self._high - beyond)
            drawn = torch.where(self._below & self._above, drawn, one_sided)
            drawn = torch.where(self._below | self._above, drawn, torch.randn(shape, device="cpu").double())
        return drawn.to(self._dtype)


def _round_towards(bound: torch.Tensor, dtype: torch.dtype, direction: float) -> torch.Tensor:
    """Rounds `bound`, float64, to the next value of `dtype` in this direction."""
    rounded = bound.to(dtype).double()
    if dtype != torch.float32:  # only float32 is rounded from float64; bounds of other dtypes are exact
        return rounded
    further = torch.nextafter(rounded.float(), torch.tensor(direction, dtype=torch.float32, device="cpu")).double()
    wrong = rounded < bound if direction > 0 else rounded > bound
    return torch.where(wrong, further, rounded)
