"""`RL_Batcher.get(out=)`: rollouts in memory that the caller keeps."""

from __future__ import annotations

import pytest
import torch
from helpers import Counting, count_batcher, create_counts, rollout
from test_lease import KINDS, pendulum

from rlstructs import MissingKeyError, RL_Batcher, SpecError, TemporalDictTensor, Trajectories


def room_for(batcher):
    """A rollout of every environment with all timesteps, to be overwritten."""
    batcher.reset()
    first, _ = rollout(batcher)
    n, missing = first.n_elems(), batcher._engine.layout.n_timesteps - first.trajectories.n_timesteps()
    steps = {key: torch.cat([t, t.new_zeros(n, missing, *t.shape[2:])], 1) for key, t in first.trajectories.items()}
    return Trajectories(first.info, TemporalDictTensor(steps, first.lengths))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("debug", [False, True])
def test_what_is_written_to_out_is_what_get_gives(kind, debug):
    create, arguments = KINDS[kind]
    with create(**arguments, debug=debug) as plain, create(**arguments, debug=debug) as kept:
        out = room_for(kept)
        room_for(plain)
        plain.reset()
        kept.reset()
        n_running = 1
        while n_running:
            trajectories, n_running = rollout(plain)
            kept.execute()
            written, number = kept.get(out=out)
            assert written == trajectories and number == n_running
            n_rows, n_timesteps = trajectories.n_elems(), trajectories.trajectories.n_timesteps()
            for key, tensor in written.trajectories.items():
                target = out.trajectories[key]
                assert tensor.data_ptr() == target.data_ptr() and tensor.dtype == target.dtype
                assert tuple(tensor.shape[:2]) == (n_rows, n_timesteps)
                same = torch.equal(tensor.nan_to_num(7), trajectories.trajectories[key].nan_to_num(7))
                assert same, key  # in the padding too
            for key, tensor in written.info.items():
                assert tensor.data_ptr() == out.info[key].data_ptr()
            assert written.lengths.data_ptr() == out.lengths.data_ptr()
            if arguments.get("autoreset") or create is pendulum:
                break


class WithNothing(Counting):
    """Puts out, beside its actions, a column of no numbers."""

    def __call__(self, state, observation, agent_info, history=None):
        output, state = super().__call__(state, observation, agent_info, history)
        return output.set("nothing", torch.zeros(output.n_elems(), 0)), state


def test_columns_of_no_numbers_can_be_written_to():
    with RL_Batcher(3, WithNothing, {}, create_counts, {"table": [[5, 5]], "autoreset": True}, 1, [0]) as batcher:
        batcher.reset()
        out, _ = rollout(batcher)
        batcher.execute()
        written, _ = batcher.get(out=out)
        assert written.trajectories["action/nothing"].shape == (2, 3, 0)
        assert written.trajectories["observation/frame"].data_ptr() == out.trajectories["observation/frame"].data_ptr()


def changed(out, key, tensor):
    """`out` with another tensor."""
    steps = {**dict(out.trajectories.items()), key: tensor}
    return Trajectories(out.info, TemporalDictTensor({k: t for k, t in steps.items() if t is not None}, out.lengths))


def with_lengths(out, lengths):
    """`out` with other lengths."""
    return Trajectories(out.info, TemporalDictTensor.trusted(dict(out.trajectories.items()), lengths))


def test_what_does_not_fit_is_refused_and_the_rollout_can_still_be_had():
    with count_batcher([[9, 9], [9, 9]], 3, autoreset=True) as batcher:
        out = room_for(batcher)
        frames = "observation/frame"
        batcher.execute()
        for wrong, error, message in (
            (out.trajectories, TypeError, "^get: out must be a Trajectories, got TemporalDictTensor$"),
            (changed(out, frames, None), MissingKeyError, r"^get: out: key\(s\) \['observation/frame'\] are missing"),
            (changed(out, "more", torch.zeros(4, 3)), SpecError, r"^get: out: unknown key\(s\) \['more'\]"),
            (changed(out, frames, torch.zeros(4, 3, 2, dtype=torch.float64)), SpecError,
             r"^get: out 'observation/frame' is \(4, 3, 2\) float64 on cpu, expected \(4, 3, 2\) float32 or more "),
            (changed(out, frames, torch.zeros(4, 3, 1)), SpecError, r"'observation/frame' is \(4, 3, 1\) float32"),
            (changed(out, frames, torch.zeros(4, 3)), SpecError, r"'observation/frame' is \(4, 3\) float32"),
            (changed(out, frames, torch.zeros(1, 1, 2).expand(4, 3, 2)), SpecError, "'observation/frame' is expanded"),
            (changed(out, frames, out.trajectories["_observation/frame"]), SpecError, "share memory$"),
            (changed(out, frames, torch.zeros(4, 3, 2, requires_grad=True)), SpecError, "must neither require a grad"),
            (with_lengths(out, torch.tensor([3]).expand(4)), SpecError, "'lengths' is expanded"),
            (with_lengths(out, torch.zeros(4, dtype=torch.int32)), SpecError, r"'lengths' is \(4,\) int32"),
            (out.slice(0, 3), SpecError, r"is \(3,\) .*, expected \(4,\) \w+ or more"),
            (Trajectories(out.info, out.trajectories.temporal_slice(0, 2)), SpecError, r"is \(4, 2"),
        ):  # fmt: skip
            with pytest.raises(error, match=message):
                batcher.get(out=wrong)
        trajectories, _ = batcher.get(out=out)
        assert trajectories.lengths.tolist() == [3] * 4


def test_without_waiting_nothing_is_written_until_all_of_it_is_there():
    with count_batcher([[9], [9]], 3, autoreset=True) as batcher:
        out = room_for(batcher)
        batcher.execute()
        while (got := batcher.get(blocking=False, out=out)) == (None, None):
            pass
        assert got[0].trajectories["action/n"].data_ptr() == out.trajectories["action/n"].data_ptr()
