"""Debug mode: what is not to be read is poisoned, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import count_batcher, rollout

from rlstructs.debug import is_on, poison


@pytest.fixture(params=["argument", "variable"])
def debugged(request, monkeypatch):
    """Arguments that turn debug mode on."""
    if request.param == "argument":
        return {"debug": True}
    monkeypatch.setenv("RLSTRUCTS_DEBUG", "1")
    return {}


def collected(**arguments):
    with count_batcher([[2, 4], [3, 9]], 5, **arguments) as batcher:
        batcher.reset()
        return rollout(batcher)[0]


def test_padding_is_poisoned_and_all_else_as_ever(debugged):
    plain, poisoned = collected(debug=False), collected(**debugged)
    assert torch.equal(plain.lengths, poisoned.lengths) and plain.info == poisoned.info
    mask = plain.mask(torch.bool)
    assert not mask.all()
    for key, tensor in poisoned.trajectories.items():
        assert torch.equal(tensor[mask], plain.trajectories[key][mask])
        inside = tensor[~mask]
        if tensor.dtype.is_floating_point:
            assert inside.isnan().all(), key
        elif tensor.dtype is torch.int64:
            assert (inside == torch.iinfo(torch.int64).min).all(), key


def test_slots_are_poisoned_before_they_are_written_again(debugged):
    with count_batcher([[9], [9]], 3, autoreset=True, **debugged) as batcher:
        batcher.reset()
        first, _ = rollout(batcher)
        kept = first.trajectories["observation/frame"].clone()
        batcher._slots.release()
        assert np.isnan(batcher._slots.read(None, 3)["observation/frame"].numpy()).all()
        second, _ = rollout(batcher)
        assert torch.equal(first.trajectories["observation/frame"], kept)
        assert second.trajectories["observation/frame"][:, :, 1].tolist() == [[3, 4, 5]] * 2


def test_it_is_off_unless_asked_for(monkeypatch):
    monkeypatch.delenv("RLSTRUCTS_DEBUG", raising=False)
    assert not is_on() and is_on(True)
    monkeypatch.setenv("RLSTRUCTS_DEBUG", "0")
    assert not is_on()
    monkeypatch.setenv("RLSTRUCTS_DEBUG", "1")
    assert is_on() and not is_on(False)


def test_poison_is_what_the_documentation_says():
    assert np.isnan(poison(np.dtype(np.float16))) and np.isnan(poison(np.dtype(np.complex64)))
    assert poison(np.dtype(np.int16)) == -(2**15) and poison(np.dtype(np.uint8)) == 255
    assert poison(np.dtype(bool)) is False
