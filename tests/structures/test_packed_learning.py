"""Losses and gradients over packs are those over padded, masked batches: an LSTM, a transformer, three frameworks."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

from rlstructs import (
    DictTensor,
    GymEnv,
    GymEnvInf,
    MissingKeyError,
    RandomAgent,
    RL_Agent,
    RL_Batcher,
    SpecError,
    TemporalDictTensor,
    Trajectories,
    gae,
    masked_dicttensor,
    replay_agent,
    transitions,
)
from tests.structures.test_packed import list_segments, make_batch

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
N_HIDDEN, N_HEADS = 8, 2


class Transformer(nn.Module):
    """One causal layer over steps (B, T, 2) with a mask of what may be attended to, with places in their segment."""

    def __init__(self):
        super().__init__()
        self.enter, self.place = nn.Linear(2, N_HIDDEN), nn.Embedding(64, N_HIDDEN)
        self.qkv, self.out = nn.Linear(N_HIDDEN, 3 * N_HIDDEN), nn.Linear(N_HIDDEN, N_HIDDEN)

    def forward(self, frames, positions, mask):
        x = self.enter(frames) + self.place(positions)
        q, k, v = (part.unflatten(-1, (N_HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(attended.transpose(1, 2).flatten(2))


def losses(network, make_loss):
    network.zero_grad()
    loss = make_loss()
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in network.parameters()]


def assert_same(one, other, dtype):
    for a, b in zip([one[0], *one[1]], [other[0], *other[1]], strict=True):
        torch.testing.assert_close(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def rows_of_segments(pack):
    """The segments as a padded batch, (S, longest, ...), with its mask."""
    longest = int(pack.lengths.max())
    mask = torch.arange(longest) < pack.lengths[:, None]
    frames = torch.zeros(pack.n_segments(), longest, 2, dtype=pack["observation/frame"].dtype)
    frames[mask] = pack["observation/frame"]
    return frames, mask


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("by", ["row", "episode"])
@pytest.mark.parametrize("seed", range(4))
def test_an_lstm_learns_the_same(seed, by, dtype):
    pack = make_batch(seed, 5, 9, dtype=dtype).packed(by)
    lstm = nn.LSTM(2, N_STATE := 3, batch_first=True).to(dtype)
    state = (pack.state["h"][None], pack.state["h"][None].tanh())
    frames, mask = rows_of_segments(pack)
    weights = torch.randn(pack.n_elems(), N_STATE, dtype=dtype)

    def packed():
        output = pack.from_packed_sequence(lstm(pack.as_packed_sequence("observation/frame"), state)[0])
        return (output * weights).square().mean()

    def blocks():
        return (pack.run_recurrent(lstm, "observation/frame", state) * weights).square().mean()

    def padded():
        return (lstm(frames, state)[0][mask] * weights).square().mean()

    assert_same(losses(lstm, packed), losses(lstm, padded), dtype)
    assert_same(losses(lstm, blocks), losses(lstm, padded), dtype)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "LSTM projected"])
@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("n_layers", [1, 2])
@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_networks_run_over_packs_as_over_packed_sequences(kind, with_state, n_layers, batch_first):
    n_projected = 2 if "projected" in kind else 0
    settings = {"num_layers": n_layers, "batch_first": batch_first, "dtype": torch.float64}
    network = getattr(nn, kind.split()[0])(2, 3, **settings, **({"proj_size": n_projected} if n_projected else {}))
    for seed in range(3):
        for pack in [(whole := make_batch(seed, 9, 40, dtype=torch.float64).packed("episode")), *whole.split(50)]:
            state = torch.randn(n_layers, pack.n_segments(), n_projected or 3, dtype=torch.float64)
            if "LSTM" in kind:
                state = (state, torch.randn(n_layers, pack.n_segments(), 3, dtype=torch.float64))
            state = state if with_state else None
            sequence, _ = network(pack.as_packed_sequence("observation/frame"), state)
            found = pack.run_recurrent(network, "observation/frame", state)
            torch.testing.assert_close(found, pack.from_packed_sequence(sequence), rtol=0, atol=1e-12)


def test_what_cannot_run_over_a_pack_is_refused():
    pack = make_batch(0).packed()
    with pytest.raises(TypeError, match="expected an LSTM, GRU or RNN of torch, got Linear"):
        pack.run_recurrent(nn.Linear(2, 3), "observation/frame")
    with pytest.raises(SpecError, match="one direction"):
        pack.run_recurrent(nn.GRU(2, 3, bidirectional=True), "observation/frame")
    with pytest.raises(SpecError, match=rf"of \(layers, {pack.n_segments()}, ...\), got \(1, 99, 3\)"):
        pack.run_recurrent(nn.GRU(2, 3), "observation/frame", torch.zeros(1, 99, 3))
    with pytest.raises(MissingKeyError):
        pack.run_recurrent(nn.GRU(2, 3), "frame")
    with pytest.raises(SpecError, match="run_recurrent: there is no step"):
        make_batch(0, 0).packed().run_recurrent(nn.GRU(2, 3), "observation/frame")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("form", ["whole", "split"])
@pytest.mark.parametrize("seed", range(3))
def test_a_transformer_learns_the_same(seed, form, dtype):
    pack = make_batch(seed, 5, 9, dtype=dtype).packed("episode")
    network = Transformer().to(dtype)
    targets = torch.randn(pack.n_elems(), N_HIDDEN, dtype=dtype)
    pack.set("targets", targets)
    frames, mask = rows_of_segments(pack)
    longest = frames.shape[1]
    places = torch.arange(longest)

    def padded():
        causal = torch.ones(longest, longest, dtype=torch.bool).tril()
        output = network(frames, places.expand(len(frames), -1), causal)
        return (output[mask] - targets).square().sum()

    def whole():
        output = network(pack["observation/frame"][None], pack.positions[None], pack.causal_mask())
        return (output[0] - targets).square().sum()

    def split():
        total = 0.0
        for part in pack.split(12):
            output = network(part["observation/frame"][None], part.positions[None], part.causal_mask())[0]
            total = total + ((output - part["targets"]).square() * part.mask()[:, None]).sum()
        return total

    forms = {"whole": whole, "split": split}
    assert_same(losses(network, forms[form]), losses(network, padded), dtype)


@pytest.mark.parametrize("seed", range(4))
def test_an_lstm_over_cut_packs_with_states_gives_the_outputs_of_whole_ones(seed):
    batch = make_batch(seed, 5, 9)
    cell = nn.LSTM(2, 3, batch_first=True)
    pack = batch.packed("episode")
    state = pack.state["h"][None]
    output, _ = cell(pack.as_packed_sequence("observation/frame"), (state, torch.zeros_like(state)))
    outputs = pack.from_packed_sequence(output).detach()
    # The state before each step: h and c of a loop.
    before = {"h": torch.zeros(pack.n_elems(), 3), "c": torch.zeros(pack.n_elems(), 3)}
    for s in range(pack.n_segments()):
        h, c = state[:, s : s + 1], torch.zeros(1, 1, 3)
        for n in range(int(pack.cu_seqlens[s]), int(pack.cu_seqlens[s + 1])):
            before["h"][n], before["c"][n] = h[0, 0].detach(), c[0, 0].detach()
            _, (h, c) = cell(pack["observation/frame"][n][None, None], (h, c))
    for name, values in before.items():
        pack.set(f"action/{name}", values)
    pack.info.set("agent_state/c", torch.zeros_like(pack.state["h"]))
    for context in (0, 2):
        back = 0.0
        for part in pack.split(7, context=context, states={"h": "action/h", "c": "action/c"}):
            sequence = part.as_packed_sequence("observation/frame")
            output, _ = cell(sequence, (part.state["h"][None], part.state["c"][None]))
            back = back + part.unpack(part.from_packed_sequence(output))
        torch.testing.assert_close(back, pack.unpack(outputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_nested_tensor_learns_the_same(dtype):
    pack = make_batch(3, 5, 9, dtype=dtype).packed("episode")
    network = nn.Sequential(nn.Linear(2, 4), nn.Tanh()).to(dtype)
    alone = losses(network, lambda: network(pack["observation/frame"]).square().sum())
    nested = losses(network, lambda: network(pack.as_nested("observation/frame")).values().square().sum())
    assert_same(nested, alone, dtype)


def test_jax_learns_the_same():
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp

    weights = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
    n_compiled = 0

    def attend(weights, frames, segment_ids, mask):
        nonlocal n_compiled
        n_compiled += 1
        x = frames @ weights
        places = jnp.arange(len(frames))
        allowed = (segment_ids[:, None] == segment_ids) & (places[:, None] >= places)
        scores = jnp.where(allowed, x @ x.T, -jnp.inf)
        return ((jax.nn.softmax(scores) @ x) ** 2 * mask[:, None]).sum()

    step = jax.jit(jax.value_and_grad(attend))
    total, gradient = 0.0, 0.0
    batches = [make_batch(seed, 5, 9) for seed in range(3)]
    for batch in batches:
        for part in batch.packed("episode").split(12, max_segments=16):
            arrays = part.jax()
            value, found = step(weights, arrays["steps"]["observation/frame"], arrays["segment_ids"], arrays["mask"])
            total, gradient = total + value, gradient + found
    assert n_compiled == 1
    theirs = torch.tensor(weights, requires_grad=True)
    wanted = 0.0
    for batch in batches:
        for row, start, stop, *_ in list_segments(batch, "episode"):
            x = batch["observation/frame"][row, start:stop] @ theirs
            scores = (x @ x.T).masked_fill(~torch.ones(len(x), len(x), dtype=torch.bool).tril(), -torch.inf)
            wanted = wanted + ((scores.softmax(-1) @ x) ** 2).sum()
    wanted.backward()
    np.testing.assert_allclose(float(total), float(wanted.detach()), rtol=1e-5)
    np.testing.assert_allclose(np.asarray(gradient), theirs.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_warp_sums_segments_by_their_offsets():
    wp = pytest.importorskip("warp")

    @wp.kernel
    def add(values: wp.array(dtype=wp.float32), offsets: wp.array(dtype=wp.int32), sums: wp.array(dtype=wp.float32)):
        s = wp.tid()
        for n in range(offsets[s], offsets[s + 1]):
            sums[s] += values[n]

    pack = make_batch(3).packed("episode")
    arrays = pack.warp()
    sums = wp.zeros(pack.n_segments(), dtype=wp.float32)
    rewards = arrays["steps"]["_observation/reward"]
    wp.launch(add, pack.n_segments(), [rewards, arrays["cu_seqlens"], sums], device="cpu")
    wanted = [part.sum() for part in pack["_observation/reward"].split(pack.lengths.tolist())]
    torch.testing.assert_close(wp.to_torch(sums), torch.stack(wanted))


@pytest.mark.filterwarnings("ignore")
def test_a_network_is_compiled_once_for_all_packs_of_a_size():
    n_compiled = 0

    def backend(module, _):
        nonlocal n_compiled
        n_compiled += 1
        return module.forward

    network = torch.compile(Transformer(), backend=backend, dynamic=False)
    for seed in range(3):
        for part in make_batch(seed, 5, 9).packed("episode").split(12, max_segments=16):
            network(part["observation/frame"][None], part.positions[None], part.causal_mask())
    assert n_compiled == 1


# What a batcher gives


class Recurrent(RL_Agent):
    """A GRU whose state goes on from one rollout to the next."""

    def __init__(self, cell, head):
        self.cell, self.head = cell, head

    def initial_state(self, agent_info, B):
        return DictTensor({"h": torch.zeros(B, N_HIDDEN)})

    def __call__(self, state, observation, agent_info, history=None):
        fresh = self.initial_state(agent_info, observation.n_elems())
        state = masked_dicttensor(state, fresh, observation["initial_state"])
        h = self.cell(observation["frame"], state["h"])
        logits = self.head(h)
        action = torch.distributions.Categorical(logits=logits).sample()
        return DictTensor({"action": action, "logits": logits, **dict(state.items())}), DictTensor({"h": h})

    def update(self, info):
        pass


def make_env(limit):
    return lambda: gymnasium.make("CartPole-v1", max_episode_steps=limit)


def create_env(kind, n_envs, seed):
    makers = [make_env(5 + number) for number in range(n_envs)]
    if kind == "next_step":
        return gymnasium.vector.SyncVectorEnv(makers, autoreset_mode=gymnasium.vector.AutoresetMode.NEXT_STEP)
    envs = [make() for make in makers]
    return GymEnv(envs, seed) if kind == "ends" else GymEnvInf(envs, seed, defer_resets=kind == "deferred")


def make_vector(kind, n_envs, seed):
    from rlstructs import GymVectorEnv

    env = create_env(kind, n_envs, seed)
    return GymVectorEnv(env, seed) if kind == "next_step" else env


@pytest.mark.parametrize("kind", ["ends", "inf", "deferred", "next_step"])
def test_a_recurrent_agent_is_replayed_over_the_packs_of_its_rollouts(kind):
    networks = {"cell": nn.GRUCell(4, N_HIDDEN), "head": nn.Linear(N_HIDDEN, 2)}
    gru = nn.GRU(4, N_HIDDEN)
    gru.load_state_dict({f"{name}_l0": value for name, value in networks["cell"].state_dict().items()})
    packs = []
    with RL_Batcher(
        12, Recurrent, networks, make_vector, {"kind": kind, "n_envs": 3}, n_processes=0, seeds=0
    ) as batcher:
        batcher.reset()
        for number in range(3):
            batcher.execute()
            batch, n_running = batcher.get()
            # In debug mode the padding is poison, from which the agent cannot draw; a pack has none of it.
            padded = Trajectories(batch.info, batch.trajectories.zero_padding())
            agent = replay_agent(Recurrent(**networks), padded)
            for by in ("episode", "row") if number == 0 and kind == "ends" else ("episode",):
                pack = batch.packed(by)
                assert pack.n_elems() == int(batch.lengths.sum())
                output, _ = gru(pack.as_packed_sequence("observation/frame"), pack.state["h"][None])
                logits = networks["head"](pack.from_packed_sequence(output))
                torch.testing.assert_close(logits, pack["action/logits"], rtol=1e-5, atol=1e-6)
                mask = agent.mask(torch.bool)
                back = pack.unpack(logits)[:, : agent.n_timesteps()]
                torch.testing.assert_close(back[mask], agent["logits"][mask], rtol=1e-5, atol=1e-6)
            packs.append(batch.packed("episode"))
            if not n_running:
                break
    joined = type(packs[0]).join(packs)
    output, _ = gru(joined.as_packed_sequence("observation/frame"), joined.state["h"][None])
    logits = networks["head"](joined.from_packed_sequence(output))
    torch.testing.assert_close(logits, joined["action/logits"], rtol=1e-5, atol=1e-6)
    if kind == "inf":  # every episode is whole, but the first and the last ones of each environment
        assert joined.n_segments() < sum(pack.n_segments() for pack in packs)
        ended = joined["_observation/done"][joined.cu_seqlens[1:].long() - 1]
        assert int((~ended).sum()) <= 3


@pytest.mark.parametrize("n_processes", [0, 1])
def test_get_lease_and_out_are_packed_alike(n_processes):
    space = gymnasium.spaces.Dict({
        "image": gymnasium.spaces.Box(0, 255, (2, 3), np.uint8),
        "inner": gymnasium.spaces.Dict({"on": gymnasium.spaces.Discrete(2)}),
    })  # fmt: skip

    class Env(gymnasium.Env):
        observation_space, action_space = space, gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.t = 0
            return self.observe(), {}

        def observe(self):
            return {"image": np.full((2, 3), self.t, np.uint8), "inner": {"on": self.t % 2}}

        def step(self, action):
            self.t += 1
            return self.observe(), 1.0, False, self.t == 7, {}

    def run(take):
        with RL_Batcher(
            10, lambda: RandomAgent(Env.action_space), {}, lambda seed: GymEnvInf([Env(), Env()], seed), {},
            n_processes=n_processes, seeds=[0] * max(n_processes, 1),
        ) as batcher:  # fmt: skip
            batcher.reset()
            packs = []
            out = None
            for _ in range(2):
                batcher.execute()
                pack, out = take(batcher, out)
                packs.append(pack)
        return packs

    def by_get(batcher, out):
        return batcher.get()[0].packed("episode"), None

    def by_lease(batcher, out):
        with batcher.lease() as (trajectories, _):
            return trajectories.packed("episode"), None

    def by_out(batcher, out):
        if out is None:
            batch, _ = batcher.get()
            return batch.packed("episode"), batch.clone()
        batch, _ = batcher.get(out=out)
        return batch.packed("episode"), out

    wanted = run(by_get)
    assert wanted[0]["observation/image"].dtype == torch.uint8 and wanted[0].n_segments() == 4
    for take in (by_lease, by_out):
        for one, other in zip(run(take), wanted, strict=True):
            assert one == other


def test_ppo_over_minibatches_of_packs_needs_no_mask():
    batch = make_batch(2, 6, 8)
    pack = batch.packed("episode")
    values, next_values = torch.randn(2, pack.n_elems())
    told = transitions(pack)
    advantages, targets = gae(values=values, next_values=next_values, gamma=0.9, lambda_=0.9, **told)
    padded, _ = gae(
        values=pack.unpack(values), next_values=pack.unpack(next_values), gamma=0.9, lambda_=0.9, **transitions(batch)
    )
    torch.testing.assert_close(pack.unpack(advantages), padded)
    pack.set("advantage", advantages).set("target", targets)
    total = sum(mini["advantage"].sum() for mini in pack.minibatches(5))
    torch.testing.assert_close(total, padded.sum())


def test_trajectories_of_a_temporal_dict_tensor_without_info_are_packed():
    steps = TemporalDictTensor({"x": torch.ones(2, 3)}, torch.tensor([0, 0]))
    pack = Trajectories(DictTensor(), steps).packed()
    assert pack.n_elems() == pack.n_segments() == pack.max_seqlen == 0 and pack.split(4) == []
    assert torch.equal(pack.unpack(pack["x"]), torch.zeros(2, 3)) and pack.state.empty()


def test_an_agent_that_takes_packs_is_replayed_over_them_in_one_call():
    batch = make_batch(2, 6, 8)
    cell, layer = nn.GRUCell(2, 3), nn.GRU(2, 3)
    layer.load_state_dict({f"{name}_l0": value for name, value in cell.state_dict().items()})

    class Packing(RL_Agent):
        def initial_state(self, agent_info, B):
            return DictTensor({"h": torch.zeros(B, 3)})

        def __call__(self, state, observation, agent_info, history=None):
            fresh = self.initial_state(agent_info, observation.n_elems())
            h = cell(observation["frame"], masked_dicttensor(state, fresh, observation["initial_state"])["h"])
            return DictTensor({"h": h}), DictTensor({"h": h})

        def replay_packed(self, pack):
            output, _ = layer(pack.as_packed_sequence("observation/frame"), pack.state["h"][None])
            return {"h": pack.from_packed_sequence(output)}

        def wrong(self, pack):
            return {"h": torch.zeros(1)}

        def bare(self, pack):
            return torch.zeros(len(pack))

    pack = batch.packed("episode")
    outputs, padded = replay_agent(Packing(), pack), replay_agent(Packing(), batch)
    mask = padded.mask(torch.bool)
    back = pack.unpack(outputs["h"])[:, : padded.n_timesteps()]
    torch.testing.assert_close(back[mask], padded["h"][mask], rtol=1e-5, atol=1e-6)
    assert outputs["h"].requires_grad
    with pytest.raises(TypeError, match=r"RL_Agent takes no packs, it has no method replay_packed\(pack\)"):
        replay_agent(RL_Agent(), pack)
    with pytest.raises(SpecError, match=rf"'h' of wrong is \(1,\) float32, expected \({pack.n_elems()}, ...\)"):
        replay_agent(Packing(), pack, "wrong")
    with pytest.raises(TypeError, match="bare must return a mapping of names to tensors, got Tensor"):
        replay_agent(Packing(), pack, "bare")
