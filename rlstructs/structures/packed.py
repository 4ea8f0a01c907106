"""`PackedTrajectories`: the steps of trajectories one after another, without padding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from rlstructs.checks import check_count
from rlstructs.errors import SpecError
from rlstructs.structures import segments as seg
from rlstructs.structures.arrays import as_array, map_tree, to_tensordict
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.pack_layout import NAMES, SHOWN, Layout, run_in_blocks, sort_state
from rlstructs.structures.segments import BY, FILLER, STATE, Piece
from rlstructs.structures.temporal_dict_tensor import FIRST_STEPS, TemporalDictTensor
from rlstructs.structures.tree import TensorMap, check_same_keys, flatten, show, show_fields
from rlstructs.workers.public_names import set_module

GROUPS = ("steps", "segments", "info")
# What other libraries are given beside the tensors and the layout.
DERIVED = ("segment_ids", "positions", "lengths")
STEP, SEGMENT = UNITS = ("step", "segment")


@set_module("rlstructs")
class PackedTrajectories(TensorMap):
    """A map name -> tensor (N, ...) of N steps, segment after segment.

    `Trajectories.packed` makes one.

    A segment is a row of a batch, or the part of an episode in it. Step n of segment s is
    `pack[key][pack.cu_seqlens[s] + n]`. S is the number of segments.

    Attributes:
        cu_seqlens: int32 (S + 1,), where each segment begins, and the end of the last, as FlashAttention takes them.
        max_seqlen: the length of the longest segment; in packs of `split` their size, which is the same for all.
        segments: S rows of
            `row` int64, the row of the batch; `start` int64, the step of that row with which the segment begins;
            `episode` int64, counted in its row; `continues` bool, whether the episode began before the segment, taken
            for True at the beginning of a row if nothing tells. Segments that only fill a pack up have a row of -1.
        info: S rows of the batch's `info`, with the agent's state before the segment's first step as
            `agent_state/...`. By row it is what was recorded; by episode it is 0 where an episode begins: use
            `masked_dicttensor(own, pack.state, pack.segments["continues"])` for an agent that begins with another one.

    Example:
        >>> reward = torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]])
        >>> done = torch.tensor([[False, True, False], [False, False, False]])
        >>> following = {"reward": reward, "done": done}
        >>> steps = TemporalDictTensor({"_observation": following}, torch.tensor([3, 1]))
        >>> pack = PackedTrajectories.of(DictTensor(), steps, by="episode")
        >>> pack
        PackedTrajectories(n_steps=4, n_segments=3, device=cpu, _observation/reward=(4,) float32, \
_observation/done=(4,) bool)
        >>> pack["_observation/reward"], pack.cu_seqlens
        (tensor([1., 2., 3., 4.]), tensor([0, 2, 3, 4], dtype=torch.int32))
        >>> pack.unpack(pack["_observation/reward"] * 10)
        tensor([[10., 20., 30.],
                [40.,  0.,  0.]])
    """

    _kind = "PackedTrajectories"

    def __init__(self, steps: Mapping[str, torch.Tensor], layout: Layout) -> None:
        """Wraps tensors (N, ...) that are known to fit; use `Trajectories.packed`."""
        self._tensors, self._layout = steps, layout

    @classmethod
    def of(
        cls, info: DictTensor, steps: TemporalDictTensor, by: str = seg.ROW, keys: Iterable[str] | None = None
    ) -> PackedTrajectories:
        """Packs a batch; see `Trajectories.packed`."""
        if by not in BY:
            raise SpecError(f"packed: by must be one of {BY}, got {by!r}")
        chosen = steps if keys is None else steps.get(keys)
        layout = Layout.of(info, steps, by)
        index, is_full = layout.index, layout.n_steps == len(steps) * steps.n_timesteps()
        places = as_array(index)
        return cls({key: seg.flat(tensor, index, places, is_full) for key, tensor in chosen.items()}, layout)

    # What there is

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """int32 (S + 1,): where each segment begins, and the end of the last."""
        return self._layout.cu_seqlens

    @property
    def max_seqlen(self) -> int:
        """The length of the longest segment, or the size of a pack of `split`."""
        return self._layout.max_seqlen

    @property
    def segments(self) -> DictTensor:
        """Which part of which row each segment is, S rows."""
        return self._layout.segments

    @property
    def first_steps(self) -> torch.Tensor:
        """The number of each segment's first step in its environment's count.

        int64 (S,); -1 where it is not known.

        As with `TemporalDictTensor.first_steps`, `==`, `numpy`, `jax` and `warp` leave it out.
        """
        return self._layout.first_steps

    @property
    def info(self) -> DictTensor:
        """The batch's `info` for each segment, S rows."""
        return self._layout.info

    def n_elems(self) -> int:
        """Number of steps, N."""
        return self._layout.n_steps

    def n_segments(self) -> int:
        """Number of segments, S."""
        return self._layout.n_segments

    def device(self) -> torch.device:
        """The device of all tensors."""
        return self._layout.device

    @property
    def lengths(self) -> torch.Tensor:
        """int64 (S,): the number of steps of each segment."""
        return self._layout.lengths()

    @property
    def segment_ids(self) -> torch.Tensor:
        """int64 (N,): the segment of each step."""
        return self._layout.segment_ids()

    @property
    def positions(self) -> torch.Tensor:
        """int64 (N,): the place of each step in its segment."""
        return self._layout.positions()

    @property
    def is_context(self) -> torch.Tensor:
        """Marks the steps that are only context, bool (N,).

        They are repeated in front of a segment, for what comes after them.
        """
        return ~self.mask(torch.bool) & (self._layout.index != FILLER)

    @property
    def state(self) -> DictTensor:
        """The agent's state before the first step of each segment, S rows.

        Empty if there is none.
        """
        return self.info.truncate_key(STATE)

    def mask(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns a mask (N,), 1 in steps that count.

        It is 0 in those that are repeated as context, or fill a pack up.
        """
        mask = self._layout.mask
        return torch.ones_like(self._layout.index, dtype=dtype) if mask is None else mask.to(dtype)

    def get(self, keys: Iterable[str]) -> PackedTrajectories:
        """The same pack with some of the tensors, which are shared."""
        return PackedTrajectories(self._pick(keys), self._layout)

    def set(self, key: str, value: torch.Tensor) -> PackedTrajectories:
        """Adds or replaces a tensor (N, ...), in place, such as advantages for `minibatches`.

        Returns:
            This object.

        Raises:
            TypeError: the value is not a tensor; nothing changes.
            SpecError: it has another number of steps or another device; nothing changes.
        """
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"set: {key!r} must be a torch.Tensor, got {type(value).__name__}")
        self._layout.check_steps("set", key, value)
        self._tensors = {**self._tensors, **flatten({key: value}, "set")}
        return self

    def causal_mask(self, window: int | None = None) -> torch.Tensor:
        """Returns which steps each step may attend to, bool (N, N).

        They are itself and the steps before it in its segment.

        Args:
            window: only so many steps, itself included; None for all.
        """
        ids, places = self.segment_ids, torch.arange(self.n_elems(), device=self.device())
        back = places[:, None] - places
        allowed = (ids[:, None] == ids) & (back >= 0)
        return allowed if window is None else allowed & (back < check_count("window", window))

    # Back, and to torch's other forms

    def unpack(self, values: Any) -> Any:
        """Puts values of steps back to where the steps were, with gradients.

        Args:
            values: a tensor (N, ...), a mapping of such, or a pack of the same steps.

        Returns:
            A tensor (B, T, ...), 0 in the padding and in steps that do not count here; of a mapping or a pack a
            `TemporalDictTensor`. The sum over all packs of a `split` is the whole batch.

        Raises:
            SpecError: there are other steps in `values`.
        """
        layout = self._layout
        if isinstance(values, PackedTrajectories):
            if not layout.is_same(values._layout):
                raise SpecError(f"unpack: expected values of {layout}, got a pack of {values._layout}")
            values = values._tensors
        if isinstance(values, torch.Tensor):
            return layout.put_back("values", values)
        tensors = {key: layout.put_back(repr(key), value) for key, value in flatten(values, "unpack").items()}
        return TemporalDictTensor.trusted(tensors, layout.row_lengths.clone())

    def as_packed_sequence(self, key: str) -> PackedSequence:
        """Returns the steps of a key for `torch.nn.LSTM` and its like.

        With gradients. A state of such a network has S rows.

        Segments without steps are left out; only packs of `split` have some, at the end.

        Raises:
            MissingKeyError: there is no such key.
            SpecError: there is no step: torch has no empty sequences.
        """
        values = self[key]
        self._check_steps("as_packed_sequence")
        form = self._layout.time_major()
        return PackedSequence(values.index_select(0, form.steps), form.batch_sizes, form.by_length, form.ranks)

    def _check_steps(self, owner: str) -> None:
        if not self.n_elems():
            raise SpecError(f"{owner}: there is no step, and torch has no empty sequences")

    def from_packed_sequence(self, sequence: PackedSequence) -> torch.Tensor:
        """Puts a network's output for an `as_packed_sequence` in this pack's order, (N, ...).

        Sequences that torch packed from the same segments are taken, too.

        Raises:
            TypeError: it is no packed sequence, such as the pair of outputs and states that an LSTM returns.
            SpecError: the sequence is one of other segments.
        """
        if not isinstance(sequence, PackedSequence):
            got = type(sequence).__name__
            raise TypeError(f"from_packed_sequence: expected the PackedSequence of a network's outputs, got {got}")
        form = self._layout.time_major()
        if not torch.equal(sequence.batch_sizes, form.batch_sizes):
            raise SpecError(
                f"from_packed_sequence: expected one of {self._layout}, got one of n_steps={len(sequence.data)}"
            )
        places, ranks = form.places, sequence.unsorted_indices
        if ranks is not None:  # torch's own functions order segments of one length as they like
            places = places + (ranks - form.ranks)[self.segment_ids]
        return sequence.data.index_select(0, places)

    def run_recurrent(self, network: nn.RNNBase, key: str, state: Any = None) -> torch.Tensor:
        """Runs a `torch.nn.LSTM`, `GRU` or `RNN` over the steps of a key, with gradients.

        On a CPU blocks of time are computed, which hold little padding: torch is slow with what `as_packed_sequence`
        returns.

        Args:
            network: with one direction.
            key: of its inputs, (N, features).
            state: before the first step of each segment, as the network takes it, with S rows; None for 0.

        Returns:
            Its outputs, (N, features), in the order of this pack. `as_packed_sequence` gives the last states, too.

        Raises:
            MissingKeyError: there is no such key.
            TypeError: the network is another one.
            SpecError: there is no step; the network has two directions; the state has not S rows.
        """
        if not isinstance(network, nn.RNNBase):
            raise TypeError(f"run_recurrent: expected an LSTM, GRU or RNN of torch, got {type(network).__name__}")
        if network.bidirectional:
            raise SpecError("run_recurrent: expected a network with one direction, use as_packed_sequence for two")
        if self.device().type != "cpu":
            return self.from_packed_sequence(network(self.as_packed_sequence(key), state)[0])
        self._check_steps("run_recurrent")
        form = self._layout.time_major()
        return run_in_blocks(network, self[key], form, sort_state(state, form, self.n_segments()))

    def as_nested(self, key: str) -> torch.Tensor:
        """Returns the steps of a key as a nested tensor, with gradients.

        Its shape is (S, ragged, ...), its layout torch's `jagged`.

        Raises:
            MissingKeyError: there is no such key.
        """
        offsets = self.cu_seqlens.long()
        return torch.nested.nested_tensor_from_jagged(self[key], offsets, max_seqlen=max(self.max_seqlen, 1))

    # Parts

    def split(
        self,
        max_steps: int = 4096,
        *,
        context: int | None = None,
        states: Mapping[str, str] | None = None,
        max_segments: int | None = None,
    ) -> list[PackedTrajectories]:
        """Splits into packs of exactly `max_steps` steps each.

        A network that is compiled for one of them serves for all.

        Each step counts once (`mask`). Without `context` and `states` segments stay whole, and what is left free in
        each pack is filled with zeros. With one of them, a segment that does not fit is cut, and all packs but the last
        are full; where a segment goes on, it `continues`.

        Args:
            max_steps: of each pack.
            context: how many steps before a cut are repeated behind it, to warm a state up or to attend to; 0 for none.
            states: part of the agent's state -> key of the state before each step, where the agent puts it out; the
                state before the first step of a piece is taken from there. None for a state of 0 behind a cut.
            max_segments: S of each pack, which is filled up with empty segments; None for the most that a pack needs.

        Returns:
            The packs; none if there is no step.

        Raises:
            TypeError, SpecError: an argument is invalid, or does not leave room for the segments.
            MissingKeyError: a key of `states` is missing.
        """
        size = check_count("max_steps", max_steps)
        if self._layout.mask is not None:
            raise SpecError("split: this pack has been split, or drawn with a context; split the pack that it is from")
        context, read = self._check_cuts(context, states, size)
        lengths = self.lengths.tolist()
        plan = seg.lay_out(lengths, size) if context is None else seg.cut_and_fill(lengths, size, context)
        # Steps that fill up are a segment of their own.
        needed = max((len(p) + (sum(x.size for x in p) < size) for p in plan), default=0)
        if max_segments is None:
            max_segments = needed
        elif check_count("max_segments", max_segments) < needed:
            raise SpecError(f"split: max_segments must be at least {needed} for these segments, got {max_segments}")
        return [self._part(pieces, read)._fill_up(size, max_segments) for pieces in plan]

    def _check_cuts(
        self, context: int | None, states: Mapping[str, str] | None, size: int
    ) -> tuple[int | None, Mapping[str, str]]:
        """Checks how `split` may cut; None for not at all.

        Returns which key each part of the state is read from.
        """
        read = {STATE + name: key for name, key in seg.check_states("split", states).items()}
        for name, key in read.items():
            cell = tuple(self.info[name].shape[1:])
            if self[key].shape[1:].numel() != self.info[name].shape[1:].numel():
                raise SpecError(
                    f"split: {key!r} is {show(self[key])}, expected {(self.n_elems(), *cell)} as of {name!r}"
                )
        if read and (missing := [name for name in self.info if name.startswith(STATE) and name not in read]):
            raise SpecError(f"split: states must name a key for each part of the agent's state, {missing} have none")
        if context is None and states is None:
            return None, read
        context = 0 if context is None else check_count("context", context, 0)
        if context >= size:
            raise SpecError(f"split: context must be below max_steps, got {context} and {size}")
        return context, read

    def _part(self, pieces: Sequence[Piece], read: Mapping[str, str] | None = None) -> PackedTrajectories:
        """Makes the pack of some pieces.

        Where one begins inside of a segment, its state is read from these keys, or 0.
        """
        layout, at, places = self._layout.take(pieces)
        is_cut = torch.tensor([piece.start > piece.context for piece in pieces], device=self.device())
        if read is not None and is_cut.any():
            info, first = dict(layout.info.items()), at[layout.cu_seqlens[:-1].long()]
            layout = layout.with_begins(is_cut & seg.begins_at(self._tensors, first))
            for name in [name for name in info if name.startswith(STATE)]:
                there = self[read[name]][first] if name in read else torch.zeros_like(info[name])
                there = there.to(info[name].dtype).view_as(info[name])
                info[name] = torch.where(is_cut.view(-1, *[1] * (there.ndim - 1)), there, info[name])
            layout = layout.with_info(info)
        return PackedTrajectories({key: seg.take_steps(t, at, places) for key, t in self._tensors.items()}, layout)

    def _fill_up(self, size: int, n_segments: int) -> PackedTrajectories:
        tensors = {key: seg.grow(tensor, size - self.n_elems()) for key, tensor in self._tensors.items()}
        return PackedTrajectories(tensors, self._layout.fill_up(size, n_segments))

    def minibatches(
        self,
        size: int,
        epochs: int = 1,
        *,
        by: str = STEP,
        drop_last: bool = False,
        generator: torch.Generator | None = None,
    ) -> Iterator[Any]:
        """Goes over all steps that count in random order, `epochs` times, in parts.

        Args:
            size: steps of each part; whole segments are put together as long as they have no more, so that a longer
                one is alone.
            epochs: how often each step comes.
            by: "step" for a `DictTensor` of steps, "segment" for a `PackedTrajectories` of whole segments.
            drop_last: whether to leave out a last part with fewer steps; only by step.
            generator: of the random order.

        Raises:
            TypeError, SpecError: an argument is invalid.
        """
        size, epochs = check_count("size", size), check_count("epochs", epochs)
        if by not in UNITS:
            raise SpecError(f"minibatches: by must be one of {UNITS}, got {by!r}")
        if by == SEGMENT and (drop_last or self._layout.mask is not None):
            raise SpecError("minibatches: by='segment' takes whole packs, which were not split, and has no drop_last")
        return self._go_over(size, epochs, by, drop_last, generator)

    def _go_over(
        self, size: int, epochs: int, by: str, drop_last: bool, generator: torch.Generator | None
    ) -> Iterator[Any]:
        device = "cpu" if generator is None else generator.device
        lengths = self.lengths.tolist()
        steps = self.mask(torch.bool).nonzero()[:, 0]
        for _ in range(epochs):
            if by == SEGMENT:
                drawn = torch.randperm(len(lengths), generator=generator, device=device).tolist()
                for group in seg.group([number for number in drawn if lengths[number]], lengths, size):
                    yield self._part([Piece(number, 0, lengths[number]) for number in group])
                continue
            order = steps[torch.randperm(len(steps), generator=generator, device=device).to(self.device())]
            for low in range(0, len(order), size):
                part = order[low : low + size]
                if len(part) == size or not drop_last:
                    places = as_array(part)
                    yield DictTensor.trusted({k: seg.take_steps(t, part, places) for k, t in self._tensors.items()})

    @staticmethod
    def join(packs: Iterable[PackedTrajectories]) -> PackedTrajectories:
        """Puts the packs of consecutive rollouts together.

        An episode that goes on from one to the next is one segment.

        A segment at the beginning of a row goes on from the latest segment of the same `env_index` that reached the
        end of its row, if it `continues` and that one does not end an episode by the keys of its pack; where steps are
        counted (`first_steps`) the count has to go on, too.

        Returns:
            A pack of all steps, of which `unpack` gives what `Trajectories.cat` would of the batches.

        Raises:
            TypeError, MissingKeyError, SpecError: an item is no pack, has other keys, was split, or has no `env_index`.
        """
        parts = list(packs)
        if not parts:
            raise SpecError("join: there is no pack")
        for number, part in enumerate(parts):
            if not isinstance(part, PackedTrajectories):
                raise TypeError(f"join: item {number} is a {type(part).__name__}, not a PackedTrajectories")
            check_same_keys(f"join: item {number}", parts[0], part)
            if part._layout.mask is not None:
                raise SpecError(f"join: item {number} has been split, or drawn with a context")
            if (env_index := part.info["env_index"]).ndim != 1:
                raise SpecError(
                    f"join: 'env_index' is {show(env_index)} in item {number}, expected one number a segment"
                )
        layouts = [part._layout for part in parts]
        groups = seg.find_chains([part._layout.ends(part._tensors) for part in parts])
        tensors = DictTensor.cat(DictTensor.trusted(part._tensors) for part in parts)
        whole = PackedTrajectories(dict(tensors.items()), Layout.side_by_side(layouts))
        joined = whole._part([Piece(number, 0, length) for group in groups for number, length in group])
        return PackedTrajectories(joined._tensors, joined._layout.merge([len(group) for group in groups]))

    # As a structure

    def _tree(self) -> dict[str, Any]:
        return {"steps": self._tensors, **self._layout.tree()}

    def _shown(self) -> dict[str, Any]:
        """The tree, and what follows from it, for those who compute in other libraries."""
        return {**self._content(), **{name: getattr(self, name) for name in DERIVED}}

    def to_tensordict(self) -> Any:
        """A `tensordict.TensorDict` of the same tensors, not copied, without batch axes.

        A key with `/` becomes a key of a nested TensorDict. Needs the extra `tensordict`.
        """
        return to_tensordict(self._shown(), ())

    def _content(self) -> dict[str, Any]:
        """The tree without the count of a batcher, which begins anywhere."""
        tree = self._tree()
        del tree[FIRST_STEPS]
        return tree

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> PackedTrajectories:
        tree = self._tree()
        sizes = tree.pop("sizes")  # two numbers for this side, wherever the tensors go
        return self._from_trusted({**map_tree(function, tree), "sizes": sizes})

    @classmethod
    def _from_trusted(cls, tree: Mapping[str, Any]) -> PackedTrajectories:
        return cls(tree["steps"], Layout.from_tree(tree))

    @classmethod
    def _from_tree(cls, tree: Mapping[str, Any]) -> PackedTrajectories:
        found: dict[str, Any] = {name: {} for name in GROUPS}
        for name, leaf in tree.items():  # in files, the names of a group's tensors have its name in front
            group, _, key = name.partition("/")
            if isinstance(leaf, Mapping) and name in GROUPS:
                found[name] = flatten(leaf, cls._kind)
            elif key and group in GROUPS:
                found[group][key] = leaf
            elif name in NAMES:
                found[name] = seg.widen(name, leaf)
            elif name not in DERIVED:
                raise SpecError(f"{cls._kind}: unknown entry {name!r}")
        check_same_keys(cls._kind, (*GROUPS, *SHOWN), found.keys() - {FIRST_STEPS})
        found["segments"] = {name: seg.widen(name, leaf) for name, leaf in found["segments"].items()}
        if found["sizes"].shape != (3,):
            raise SpecError(f"{cls._kind}: 'sizes' must have shape (3,), got {show(found['sizes'])}")
        made = cls._from_trusted(found)
        made._layout.check(found["mask"])
        for key, tensor in made.items():
            made._layout.check_steps(cls._kind, repr(key), tensor)
        return made

    def __repr__(self) -> str:
        return show_fields(f"PackedTrajectories({self._layout}, device={self.device()}", self)
