"""Packed sequences beside padded ones: how much a network need not compute, and what that saves.

    python benchmarks/sequences.py --quick

For lengths drawn from gamma distributions with coefficients of variation of 0.3, 1 and 2 it prints the coefficient of
the lengths that the batch really has (their standard deviation over their mean), the share of steps that are padding,
the time of a learner's step (forward, loss, backward) over packs as a share of the same over padded, masked batches,
for an LSTM in blocks of time (`run_recurrent`), the same over torch's packed sequences, and a causal transformer. Then
that of packing as a share of copying the same bytes, for observations of 16 and of 1024 floats. At the end, the time of
drawing packed windows of such rows as a share of drawing as many as sequences. CPU time, best of some rounds, in turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from rlstructs import DictTensor, TemporalDictTensor, Trajectories
from rlstructs.memories.torch import RandomMemory

N_INPUTS, N_WIDE, N_HEADS = 16, 1024, 4


def measure(functions: dict[str, Callable[[], object]], n_rounds: int) -> dict[str, float]:
    """The least CPU time of each, in seconds, taken in turns."""
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(n_rounds):
        for name, function in functions.items():
            start = time.process_time()
            function()
            best[name] = min(best[name], time.process_time() - start)
    return best


def make_batch(cv: float, n_rows: int, n_timesteps: int, n_inputs: int = N_INPUTS) -> Trajectories:
    """A batch whose lengths are drawn with this coefficient of variation; the longest has `n_timesteps`."""
    rng = np.random.default_rng(0)
    shape = 1 / cv**2
    drawn = rng.gamma(shape, 1 / shape, n_rows)
    lengths = np.clip(np.round(drawn / drawn.max() * n_timesteps), 1, n_timesteps).astype(np.int64)
    steps = {
        "observation/frame": torch.randn(n_rows, n_timesteps, n_inputs),
        "action/action": torch.randint(4, (n_rows, n_timesteps)),
        "_observation/reward": torch.randn(n_rows, n_timesteps),
        "_observation/done": torch.zeros(n_rows, n_timesteps, dtype=torch.bool),
    }
    return Trajectories(DictTensor(), TemporalDictTensor(steps, torch.from_numpy(lengths)))


class Lstm(nn.Module):
    """An LSTM, and a head for every step."""

    def __init__(self, n_hidden: int) -> None:
        super().__init__()
        self.memory = nn.LSTM(N_INPUTS, n_hidden, batch_first=True)
        self.head = nn.Sequential(nn.Linear(n_hidden, n_hidden), nn.Tanh(), nn.Linear(n_hidden, 1))

    def padded(self, batch: Trajectories) -> torch.Tensor:
        output = self.head(self.memory(batch["observation/frame"])[0])
        mask = batch.mask()
        return (output[..., 0].square() * mask).sum() / mask.sum()

    def packed(self, batch: Trajectories) -> torch.Tensor:
        pack = batch.packed(keys=["observation/frame"])
        return self.head(pack.run_recurrent(self.memory, "observation/frame")).square().mean()

    def sequence(self, batch: Trajectories) -> torch.Tensor:
        pack = batch.packed(keys=["observation/frame"])
        output, _ = self.memory(pack.as_packed_sequence("observation/frame"))
        return self.head(output.data).square().mean()


class Transformer(nn.Module):
    """A causal layer with a feed-forward part."""

    def __init__(self, n_hidden: int, max_steps: int) -> None:
        super().__init__()
        self.max_steps = max_steps
        self.enter, self.qkv = nn.Linear(N_INPUTS, n_hidden), nn.Linear(n_hidden, 3 * n_hidden)
        self.head = nn.Sequential(nn.Linear(n_hidden, 4 * n_hidden), nn.GELU(), nn.Linear(4 * n_hidden, 1))

    def attend(self, frames: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        x = self.enter(frames)
        q, k, v = (part.unflatten(-1, (N_HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.head(x + attended.transpose(1, 2).flatten(2))[..., 0]

    def padded(self, batch: Trajectories) -> torch.Tensor:
        mask = batch.mask()
        return (self.attend(batch["observation/frame"], None).square() * mask).sum() / mask.sum()

    def packed(self, batch: Trajectories) -> torch.Tensor:
        parts = batch.packed(keys=["observation/frame"]).split(self.max_steps)
        frames = torch.stack([part["observation/frame"] for part in parts])
        allowed = torch.stack([part.causal_mask() for part in parts])[:, None]
        mask = torch.stack([part.mask() for part in parts])
        return (self.attend(frames, allowed).square() * mask).sum() / mask.sum()


def compare_learners(batch: Trajectories, n_hidden: int, n_rounds: int) -> list[str]:
    """The time of a step of the LSTM, the LSTM over packed sequences and the transformer, as shares of padded ones."""
    lstm, transformer = Lstm(n_hidden), Transformer(n_hidden, batch.trajectories.n_timesteps())
    found = []
    for padded, *others in ((lstm.padded, lstm.packed, lstm.sequence), (transformer.padded, transformer.packed)):
        for other in others:
            torch.testing.assert_close(padded(batch), other(batch))
        forms = {form.__name__: lambda form=form: form(batch).backward() for form in (padded, *others)}
        times = measure(forms, n_rounds)
        found += [f"{times[form.__name__] / times['padded']:.2f}" for form in others]
    return found


def compare_packing(batch: Trajectories, n_rounds: int) -> str:
    pack = batch.packed()
    times = measure(
        {
            "copy": lambda: [[tensor.clone() for tensor in pack.values()] for _ in range(20)],
            "pack": lambda: [batch.packed() for _ in range(20)],
        },
        n_rounds,
    )
    return f"{times['pack'] / times['copy']:.2f}"


def compare_draws(n_inputs: int, n_rounds: int) -> str:
    memory, length = RandomMemory(memory_size=2000, num_envs=8, device="cpu", seed=0), 16
    names = ["observations", "actions", "rewards"]
    for name, size in (*zip(names, (n_inputs, 1, 1), strict=True), ("terminated", 1)):
        memory.create_tensor(name, size, torch.bool if name == "terminated" else torch.float32)
    for t in range(2000):
        rows = {name: torch.zeros(8, n_inputs if name == "observations" else 1) for name in names}
        memory.add_samples(**rows, terminated=torch.full((8, 1), t % 100 == 99))
    times = measure(
        {
            "sequences": lambda: [memory.sample(names, 256, sequence_length=length) for _ in range(5)],
            "packed": lambda: [memory.sample(names, 256, sequence_length=length, packed=True) for _ in range(5)],
        },
        n_rounds,
    )
    return f"{times['packed'] / times['sequences']:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds")
    parser.add_argument("--n-hidden", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    n_rows, n_timesteps, n_rounds = (16, 128, 3) if args.quick else (64, 256, 9)
    print("variation  of lengths  padding  LSTM  packed sequences  transformer  packing / copy, wide")
    for cv in (0.3, 1.0, 2.0):
        batch = make_batch(cv, n_rows, n_timesteps)
        padding = 1 - float(batch.mask().mean())
        spread = float(batch.lengths.double().std(unbiased=False) / batch.lengths.double().mean())
        lstm, sequences, transformer = compare_learners(batch, args.n_hidden, n_rounds)
        packing = [compare_packing(each, n_rounds) for each in (batch, make_batch(cv, n_rows, n_timesteps, N_WIDE))]
        print(f"{cv:9}  {spread:10.2f}  {padding:7.2f}  {lstm:>4}  {sequences:>16}  {transformer:>11}  "
              f"{packing[0]:>14}, {packing[1]}", flush=True)  # fmt: skip
    draws = [compare_draws(n_inputs, n_rounds) for n_inputs in (N_INPUTS, N_WIDE)]
    print(f"packed windows / sequences: {draws[0]}, wide {draws[1]}")


if __name__ == "__main__":
    main()
