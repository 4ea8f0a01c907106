"""`RL_Batcher.lease`: what `get` gives, without a copy, until it is released."""

from __future__ import annotations

import copy
import gc
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from helpers import count_batcher, create_gym, rollout

from rlstructs import ClosedError, DictTensor, MissingKeyError, RL_Agent, RL_Batcher, StateError, Trajectories

KINDS = {
    "no episode ends": (count_batcher, {"table": [[99, 99], [99, 99]], "n_timesteps": 4, "autoreset": True}),
    "episodes end and begin": (count_batcher, {"table": [[3, 5], [2, 99]], "n_timesteps": 4, "autoreset": True}),
    "environments end": (count_batcher, {"table": [[3, 9], [7, 99]], "n_timesteps": 4}),
    "in this process": (count_batcher, {"table": [[3, 5]], "n_timesteps": 4, "autoreset": True, "n_processes": 0}),
}


class Half(RL_Agent):
    """Acts at random in bfloat16, a dtype that numpy has not."""

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        n = observation.n_elems()
        action = torch.rand(n, 1)
        return DictTensor({"action": action, "half": action.to(torch.bfloat16)}), DictTensor()


def pendulum(**arguments):
    return RL_Batcher(
        5, Half, {}, create_gym, {"env_id": "Pendulum-v1", "n_envs": 3, "max_episode_steps": 8}, 2, 1, **arguments
    )


KINDS["pendulum"] = (pendulum, {})


@pytest.fixture(params=KINDS)
def make(request):
    create, arguments = KINDS[request.param]
    return partial(create, **arguments)


@pytest.mark.parametrize("debug", [False, True])
def test_a_lease_is_what_get_gives(make, debug):
    with make(debug=False) as got, make(debug=debug) as leased:
        for one in (got, leased):
            one.reset()
        n_running = got.n_elems()
        for _ in range(6):
            if not n_running:
                break
            trajectories, n_running = rollout(got)
            leased.execute()
            with leased.lease() as lease:
                assert lease.trajectories == trajectories and lease.n_running == n_running
                assert list(lease.trajectories.trajectories.keys()) == list(trajectories.trajectories.keys())
                assert lease.trajectories.trajectories.specs() == trajectories.trajectories.specs()
                again, number = lease
                assert again is lease.trajectories and number == n_running
        assert leased.episodes() == got.episodes()


def test_a_view_lies_in_shared_memory_and_a_copy_does_not(make):
    with make() as batcher:
        batcher.reset()
        shared = np.frombuffer(batcher._engine.arenas[0].map(), np.uint8)
        seen, n_running = set(), batcher.n_elems()
        for _ in range(3):
            if not n_running:
                break
            batcher.execute()
            with batcher.lease() as lease:
                n_running = lease.n_running
                for key, tensor in lease.trajectories.trajectories.items():
                    is_shared = 0 <= tensor.data_ptr() - shared.ctypes.data < shared.size
                    assert is_shared == lease.is_view(key), key
                    seen.add(is_shared)
                with pytest.raises(MissingKeyError, match="^lease: no key 'frame', there are"):
                    lease.is_view("frame")
        assert True in seen


def test_only_next_observations_of_rollouts_with_a_reset_are_copies():
    with count_batcher([[6, 6], [6, 6]], 4, autoreset=True) as batcher:
        batcher.reset()
        for turn in range(4):
            batcher.execute()
            with batcher.lease() as lease:
                copies = {key for key in lease.trajectories.trajectories if not lease.is_view(key)}
                following = {key for key in lease.trajectories.trajectories if key.startswith("_observation/")}
                assert copies == (following if turn in (1, 2) else set())
                key = "_observation/frame"
                assert lease.trajectories.trajectories[key] is lease.trajectories.trajectories[key]  # made once


def test_slots_are_written_again_only_after_the_release():
    with count_batcher([[99], [99]], 3, autoreset=True) as batcher:
        batcher.reset()
        batcher.execute()
        lease = batcher.lease()
        kept = lease.trajectories.trajectories["observation/frame"]
        as_it_was = kept.clone()
        for call in (batcher.execute, batcher.reset, batcher.get, batcher.lease):
            with pytest.raises(StateError, match=f"^{call.__name__}: a rollout is leased, release it first$"):
                call()
        batcher.update(2.0)  # what agents know is not in the slots
        assert torch.equal(kept, as_it_was)
        lease.release()
        lease.release()
        trajectories, _ = rollout(batcher)
        assert torch.equal(kept, trajectories.trajectories["observation/frame"])  # a view, of no use now
        assert set(trajectories.trajectories["action/given"].flatten().tolist()) == {2.0}


def test_a_released_lease_gives_nothing():
    with count_batcher([[99]], 3) as batcher:
        with pytest.raises(StateError, match="^lease: there was no reset, call reset first$"):
            batcher.lease()
        batcher.reset()
        with pytest.raises(StateError, match="^lease: no rollout is under way, call execute first$"):
            batcher.lease()
        batcher.execute()
        with batcher.lease() as lease:
            pass
        for use in (lambda: lease.trajectories, lambda: list(lease), lambda: lease.is_view("action/n")):
            with pytest.raises(StateError, match="^the lease has been released: .*`get` gives what may be kept$"):
                use()


def test_what_the_block_raises_ends_the_lease_too():
    with count_batcher([[99]], 3) as batcher:
        batcher.reset()
        batcher.execute()
        with pytest.raises(ZeroDivisionError), batcher.lease():
            raise ZeroDivisionError
        assert rollout(batcher)[1] == 1


def test_after_the_last_lease_every_environment_has_ended():
    with count_batcher([[2], [2]], 3) as batcher:
        batcher.reset()
        batcher.execute()
        with batcher.lease() as (trajectories, n_running):
            assert (trajectories.lengths.tolist(), n_running) == ([2, 2], 0)
        with pytest.raises(StateError, match="^execute: every environment has ended, call reset first$"):
            batcher.execute()
        batcher.reset()
        assert rollout(batcher)[0].lengths.tolist() == [2, 2]


def test_what_was_copied_out_is_private():
    with count_batcher([[3], [4]], 6, autoreset=True) as batcher:
        batcher.reset()
        batcher.execute()
        with batcher.lease() as (trajectories, _):
            kept = [
                trajectories.clone(), pickle.loads(pickle.dumps(trajectories)), trajectories.slice(0, 2).clone(),
                Trajectories.cat([trajectories]), Trajectories.from_numpy(trajectories.numpy()),
            ]  # fmt: skip
            wanted = trajectories.clone()
        rollout(batcher)
        assert all(copy == wanted for copy in kept)


@pytest.mark.parametrize("order", ["close first", "release first"])
def test_a_batcher_may_be_closed_while_a_rollout_is_leased(order):
    batcher = count_batcher([[99], [99]], 3)
    batcher.reset()
    batcher.execute()
    lease = batcher.lease()
    actions = lease.trajectories.trajectories["action/n"]
    batcher.close()
    assert actions.tolist() == [[0, 1, 2]] * 2  # the memory lives as long as its last view
    lease.release()
    with pytest.raises(ClosedError, match="^execute: the batcher is closed$"):
        batcher.execute()


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(
    "loss", [lambda x, w: (x * w).sum(), lambda x, w: (x[0, 1:] * w).sum()], ids=["whole", "slice"]
)
def test_a_backward_after_the_release_raises_and_is_not_wrong(debug, loss):
    with count_batcher([[99], [99]], 3, autoreset=True, debug=debug) as batcher:
        batcher.reset()
        batcher.execute()
        weight = torch.ones(2, requires_grad=True)
        with batcher.lease() as (trajectories, _):
            frames = trajectories.trajectories["observation/frame"]
            loss(frames, weight).backward()  # in the block all is well
            late = loss(frames, weight)
        with pytest.raises(RuntimeError, match="modified by an inplace operation|the lease has been released"):
            late.backward()
        rollout(batcher)
        batcher.execute()
        kept, _ = batcher.get()
        late = loss(kept.trajectories["observation/frame"], weight)
        batcher.execute()
        batcher.get(out=kept)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            late.backward()


def test_a_copy_that_was_not_made_before_the_release_is_not_made_after_it():
    with count_batcher([[2], [3]], 4, autoreset=True) as batcher:
        batcher.reset()
        batcher.execute()
        with batcher.lease() as lease:
            steps = lease.trajectories.trajectories
            assert not lease.is_view("_observation/frame") and not lease.is_view("_observation/reward")
            made = steps["_observation/reward"]
            kept = made.clone()
        assert torch.equal(steps["_observation/reward"], kept)  # a copy is a copy
        with pytest.raises(StateError, match="^the lease has been released"):
            steps["_observation/frame"]


def test_a_lease_is_for_a_block():
    with count_batcher([[99]], 3, autoreset=True) as batcher:
        batcher.reset()
        batcher.execute()
        with pytest.raises(StateError, match=r"^a lease is for a block: with batcher.lease\(\) as"):
            _trajectories, _n_running = batcher.lease()
        assert rollout(batcher)[1] == 1


# --- debug mode ---------------------------------------------------------------------------------------


@pytest.fixture
def leased():
    """A batcher in debug mode, and its lease."""
    with count_batcher([[99], [99]], 3, debug=True) as batcher:
        batcher.reset()
        batcher.execute()
        with batcher.lease() as lease:
            yield lease
    gc.collect()


USES = {
    "itself": lambda frames: frames,
    "a slice": lambda frames: frames[0, 1:],
    "a view of a view": lambda frames: frames[:1].squeeze(0)[1:],
    "one of several": lambda frames: frames.unbind(1)[1],
    "transposed": lambda frames: frames.mT,
    "detached": lambda frames: frames.detach(),
    "written in place": lambda frames: frames.add_(1),
}


@pytest.mark.parametrize("how", USES)
def test_a_leased_tensor_and_views_of_it_raise_when_used_after_the_release(leased, how):
    kept = USES[how](leased.trajectories.trajectories["observation/frame"])
    assert kept.sum() > 0
    leased.release()
    for use in (
        lambda: kept + 1, lambda: torch.stack([kept]), lambda: kept[0], lambda: kept.clone(), lambda: kept.numpy(),
        lambda: kept.tolist(), lambda: kept.zero_(), lambda: kept.shape, lambda: repr(kept),
        lambda: torch.nn.functional.linear(kept, torch.ones(1, kept.shape[-1])),
    ):  # fmt: skip
        with pytest.raises(StateError, match="^the lease has been released"):
            use()


def test_a_released_tensor_is_told_from_one_of_the_present_lease():
    with count_batcher([[99], [99]], 3, autoreset=True, debug=True) as batcher:
        batcher.reset()
        batcher.execute()
        with batcher.lease() as (trajectories, _):
            old = trajectories.trajectories["observation/frame"]
        batcher.execute()
        with batcher.lease() as (trajectories, _):
            new = trajectories.trajectories["observation/frame"]
            for use in (lambda: torch.cat([old, new]), lambda: torch.cat([new, old]), lambda: old - new):
                with pytest.raises(StateError, match="^the lease has been released"):
                    use()
            assert torch.cat([new, new]).shape == (4, 3, 2)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save", "clone"])
def test_copies_of_leased_tensors_are_plain_and_private(leased, how, tmp_path):
    frames = leased.trajectories.trajectories["observation/frame"]
    if how == "torch.save":
        torch.save(frames, tmp_path / "frames.pt")
    made = {
        "deepcopy": lambda: copy.deepcopy(leased.trajectories).trajectories["observation/frame"],
        "pickle": lambda: pickle.loads(pickle.dumps(leased.trajectories)).trajectories["observation/frame"],
        "torch.save": lambda: torch.load(tmp_path / "frames.pt", weights_only=True),
        "clone": lambda: leased.trajectories.clone().trajectories["observation/frame"],
    }[how]()
    wanted = frames.tolist()
    leased.release()
    assert type(made) is torch.Tensor and made.tolist() == wanted


def test_what_was_computed_from_a_leased_tensor_is_no_longer_leased(leased):
    frames = leased.trajectories.trajectories["observation/frame"]
    computed = [frames + 1, frames.clone(), frames.sum(), frames[frames > 1], frames.double(), torch.relu(frames)]
    computed += frames.max(dim=1)
    wanted = [tensor.tolist() for tensor in computed]
    assert all(type(tensor) is torch.Tensor for tensor in computed)
    leased.release()
    assert [tensor.tolist() for tensor in computed] == wanted


def test_a_loss_of_leased_tensors_has_gradients(leased):
    layer = torch.nn.Linear(2, 1)
    layer(leased.trajectories.trajectories["observation/frame"]).sum().backward()
    assert type(layer.weight.grad) is torch.Tensor
    leased.release()
    assert layer.weight.grad.isfinite().all()


def test_arrays_of_numpy_hold_poison_after_the_release(leased):
    array = leased.trajectories.trajectories["observation/frame"].numpy()
    leased.release()
    assert (array != array).all()
