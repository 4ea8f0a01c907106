"""Files whose large columns are packed hold what they would hold otherwise."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from rlstructs import DictTensor, FileError, TemporalDictTensor, Trajectories, load_rollouts, save_rollouts
from rlstructs.errors import OutOfMemoryError
from rlstructs.files import layout, zstd

ENDINGS = (".npz", ".pt", ".h5")


def frames(shape, dtype, seed=0):
    """Frames on which a little changes from step to step."""
    found = torch.zeros(*shape, dtype=torch.uint8)
    rng = np.random.default_rng(seed)
    for b, t in np.ndindex(*shape[:2]):
        found[b, t, t % shape[2]] = int(rng.integers(256)) if dtype == torch.uint8 else 1
    return found.to(dtype)


def rollout(seed=0, n_timesteps=9):
    shape = (3, n_timesteps + 1, 20, 30)
    steps = {"x": torch.randn(3, n_timesteps, 200), "h": torch.randn(3, n_timesteps, 300).bfloat16()}
    for name, dtype in (("frame", torch.uint8), ("deep/mask", torch.bool)):
        whole = frames(shape, dtype, seed)
        steps[f"observation/{name}"], steps[f"_observation/{name}"] = whole[:, :-1], whole[:, 1:].clone()
        steps[f"_observation/{name}"][1, 4] = frames((1, 1, 20, 30), dtype, 9)[0, 0]  # where an episode ended
    steps["_observation/small"] = torch.zeros(3, n_timesteps, dtype=torch.uint8)
    return Trajectories(DictTensor({"env_index": torch.arange(3)}), TemporalDictTensor(steps, torch.tensor([9, 4, 0])))


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("piece", [100, 1 << 20])
def test_what_is_read_is_what_was_written(ending, piece, tmp_path, monkeypatch):
    monkeypatch.setattr(zstd, "PIECE", piece)
    whole = rollout()
    for each in (whole, whole.trajectories, whole.info, DictTensor({"one": torch.zeros(1, 600, dtype=torch.uint8)}),
                 TemporalDictTensor({"none": torch.zeros(0, 5, 600, dtype=torch.uint8)})):  # fmt: skip
        paths = tmp_path / f"raw{ending}", tmp_path / f"packed{ending}"
        for path, compress in zip(paths, (False, True), strict=True):
            each.save(path, compress=compress)
            assert type(each).load(path) == each
        raw, packed = ([(name, about["dtype"], about["shape"]) for name, about in arrays.items()]
                       for arrays in (layout.read_header(path)["arrays"] for path in paths))  # fmt: skip
        assert raw == packed


def test_frames_are_stored_once(tmp_path):
    once = TemporalDictTensor({"observation/frame": frames((3, 400, 20, 30), torch.uint8)})
    both = TemporalDictTensor({**dict(once.items()), "_observation/frame": once["observation/frame"].roll(-1, 1)})
    sizes = []
    for each in (once, both):
        each.save(tmp_path / "x.npz", compress=True)
        sizes.append((tmp_path / "x.npz").stat().st_size)
    assert sizes[1] < sizes[0] + 3000 < 0.1 * once["observation/frame"].nbytes


def test_folders_of_rollouts_are_packed(tmp_path):
    rollouts = [rollout(seed) for seed in range(3)]
    save_rollouts(tmp_path / "x", rollouts, compress=True)
    assert Trajectories.cat(load_rollouts(tmp_path / "x")) == Trajectories.cat(rollouts)
    assert layout.read_header(next((tmp_path / "x").glob("*.npz")))["packed"]


def changed(path, change):
    """Writes a file again with other packed bytes, and right checksums."""
    with layout.open_reader(path) as (reader, header):
        arrays = {name: layout._read(reader, name) for name in header["arrays"]}
    packed = json.loads(json.dumps(header["packed"]))
    change(arrays, packed)
    path.unlink()
    layout.write(path, header["class"], arrays, {"trajectories/h": "bfloat16"}, packed=packed)


FRAME, AFTER = "trajectories/observation/frame", "trajectories/_observation/frame"


def flip(arrays, packed):
    arrays[FRAME][len(arrays[FRAME]) // 2] ^= 255


def claim(arrays, packed):
    packed[FRAME]["shape"][2] = 1 << 40


def claim_less(arrays, packed):
    packed[FRAME]["shape"][2] -= 1


def be_no_bools(arrays, packed):
    name = "trajectories/observation/deep/mask"
    rows = np.full((3, 9 * 600), 2, np.uint8)
    pieces = [zstd.codec_of().compress(row.tobytes()) for row in rows]
    arrays[name], packed[name]["sizes"] = np.frombuffer(b"".join(pieces), np.uint8), [len(each) for each in pieces]


DAMAGES = {
    "bytes": (flip, f"array '{FRAME}' is packed, and does not unpack"),
    "large": (claim, f"array '{FRAME}' is packed as .* bytes in 3 pieces"),
    "small": (claim_less, f"the pieces of array '{FRAME}' hold other numbers of bytes"),
    "sizes": (lambda arrays, packed: packed[FRAME]["sizes"].append(1), "is packed as .* bytes in 4 pieces"),
    "dtype": (lambda arrays, packed: packed[FRAME].update(dtype="int64"), "is packed as int64"),
    "shape": (lambda arrays, packed: packed[FRAME].update(shape=[3, -1, 600]), r"is packed as uint8 \[3, -1, 600\]"),
    "another": (lambda arrays, packed: packed[AFTER].update(follows="trajectories/x"), "which is float32"),
    "none": (lambda arrays, packed: packed[AFTER].update(follows="y"), "x.npz: .*'y'"),
    "no array": (lambda arrays, packed: packed.update(y=packed[FRAME]), "x.npz: .*'y'"),
    "bools": (be_no_bools, "bools that are neither true nor false"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_columns_are_named(damage, tmp_path):
    change, message = DAMAGES[damage]
    rollout().save(tmp_path / "x.npz", compress=True)
    changed(tmp_path / "x.npz", change)
    with pytest.raises(FileError, match=message):
        Trajectories.load(tmp_path / "x.npz")


def test_what_does_not_fit_into_memory_is_not_begun(tmp_path, monkeypatch):
    rollout().save(tmp_path / "x.npz", compress=True)
    monkeypatch.setattr(zstd, "available_bytes", lambda: 1000)
    with pytest.raises(
        OutOfMemoryError, match="16,200 bytes are needed for array 'trajectories/.*', 1,000 are available"
    ):
        Trajectories.load(tmp_path / "x.npz")
