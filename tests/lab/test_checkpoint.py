"""Checkpoints: byte for byte what was promised, and refused when they are not."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ncgru.lab import checkpoint
from ncgru.lab.checkpoint import load, load_latest, save, steps
from ncgru.lab.errors import CheckpointError, LabError
from ncgru.lab.states import DTYPES

META: dict[str, Any] = {"recipe": {"lr": 1e-3, "name": "ö/ü"}, "best": float("inf"), "seeds": [1, 2], "note": None}


def write_two(directory: Path) -> None:
    """Checkpoints of steps 10 and 20."""
    for step in (10, 20):
        save(directory, step, {"x": torch.arange(6.0) + step, "n": torch.tensor(step)}, META)


def files(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_tensor_file_is_safetensors_byte_for_byte(tmp_path: Path) -> None:
    save(tmp_path, 7, {"b": torch.tensor([1, -2], dtype=torch.int64), "a": torch.tensor([[1.5], [-0.0]])}, {})
    header = (
        b'{"b":{"dtype":"I64","shape":[2],"data_offsets":[0,16]},'
        b'"a":{"dtype":"F32","shape":[2,1],"data_offsets":[16,24]}}'
    )
    header += b" " * (-len(header) % 8)
    expected = struct.pack("<Q", len(header)) + header + struct.pack("<qqff", 1, -2, 1.5, -0.0)
    assert (tmp_path / "step-00000007.safetensors").read_bytes() == expected


def test_json_is_written_byte_for_byte(tmp_path: Path) -> None:
    path = save(tmp_path, 1000, {}, {"lr": 0.1, "betas": (0.9, 0.999), "done": True})
    content = (tmp_path / "step-00001000.safetensors").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    rest = (
        f'{{"format":1,"step":1000,"tensors":{{"file":"step-00001000.safetensors","bytes":{len(content)},'
        f'"sha256":"{digest}"}},"meta":{{"lr":0.1,"betas":[0.9,0.999],"done":true}}'
    )
    checksum = hashlib.sha256(f"{rest}}}".encode()).hexdigest()
    assert path == tmp_path / "step-00001000.json"
    assert path.read_text(encoding="ascii") == f'{rest},"checksum":"{checksum}"}}\n'


def test_equal_states_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_two(tmp_path / name)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    for name in files(tmp_path / "one"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_every_bit_pattern_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    noise = torch.randint(0, 2 if dtype == torch.bool else 256, (64, 8), dtype=torch.uint8, generator=generator)
    value = noise.view(dtype)
    tensors = {
        "random": value,
        "empty": value[:0],
        "scalar": value[3, 0],
        "strided": value[::3, 0],
        "turned": value.t(),
    }
    save(tmp_path, 1, tensors, {})
    loaded = load(tmp_path, 1).tensors
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == dtype
        assert loaded[name].shape == tensor.shape
        assert bits(loaded[name]) == bits(tensor)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


def test_shared_expanded_and_trained_tensors_can_be_saved(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.arange(4.0))
    tensors = {"encoder": weight, "decoder": weight, "part": weight[1:3], "same": torch.tensor([2.0]).expand(3)}
    save(tmp_path, 0, tensors, {})
    loaded = load(tmp_path, 0).tensors
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    loaded["encoder"].add_(1)
    assert torch.equal(loaded["decoder"], weight)
    assert not any(tensor.requires_grad for tensor in loaded.values())


def test_meta_comes_back(tmp_path: Path) -> None:
    save(tmp_path, 5, {}, META)
    found = load_latest(tmp_path)
    assert found is not None
    assert found.meta == META
    assert found.step == 5
    assert found.path == tmp_path / "step-00000005.json"
    assert found.warnings == ()


@pytest.mark.parametrize(
    ("tensors", "meta", "message"),
    [
        ({"x": [1.0]}, {}, r"tensors\['x'\] must be a dense tensor.*got list"),
        ({"x": torch.zeros(2, dtype=torch.complex64)}, {}, "got torch.strided, torch.complex64"),
        ({"x": torch.eye(2).to_sparse()}, {}, "got torch.sparse_coo"),
        ({}, {"loss": torch.tensor(1.0)}, r"meta\.loss must be something JSON can hold, got Tensor.*\.item\(\)"),
        ({}, {"state": [{3: 1.0}]}, r"meta\.state\[0\] must have keys of type str, got 3"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(
    tmp_path: Path, tensors: dict[str, Any], meta: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        save(tmp_path / "checkpoints", 1, tensors, meta)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("step", "error"), [(-1, ValueError), (True, TypeError), ("3", TypeError), (10**19, ValueError)]
)
def test_step_must_count(tmp_path: Path, step: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="step must be"):
        save(tmp_path, step, {}, {})


def test_last_two_are_kept_and_nothing_else(tmp_path: Path) -> None:
    for step in range(0, 60, 10):
        save(tmp_path, step, {"x": torch.ones(1)}, {})
        assert steps(tmp_path) == [step - 10, step][step == 0 :]
    assert files(tmp_path) == [f"step-000000{n}.{kind}" for n in (40, 50) for kind in ("json", "safetensors")]


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    others = ["notes.txt", "step-1.json", "step-00000001.json.bak", "step-000000001.json"]
    for name in others:
        (tmp_path / name).write_text("mine")
    for step in (1, 2, 3):
        save(tmp_path, step, {}, {})
    assert steps(tmp_path) == [2, 3]
    assert set(others) < set(files(tmp_path))


def test_what_a_crash_left_is_no_checkpoint_and_is_cleared_up(tmp_path: Path) -> None:
    left = [".step-00000030.safetensors.tmp", ".step-00000030.json.tmp", "step-00000030.safetensors"]
    for name in left:
        (tmp_path / name).write_bytes(b"half")
    assert load_latest(tmp_path) is None
    write_two(tmp_path)
    assert not set(left) & set(files(tmp_path))


def test_files_reach_the_disk_before_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, rename = os.fsync, Path.replace

    def watched_fsync(descriptor: int) -> None:
        calls.append(f"sync {os.path.basename(os.readlink(f'/proc/self/fd/{descriptor}'))}")
        fsync(descriptor)

    def watched_rename(self: Path, target: Path) -> Path:
        calls.append(f"name {target.name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "replace", watched_rename)
    save(tmp_path / "checkpoints", 1, {}, {})
    assert calls == [
        "sync .step-00000001.safetensors.tmp",
        "name step-00000001.safetensors",
        "sync checkpoints",
        "sync .step-00000001.json.tmp",
        "name step-00000001.json",
        "sync checkpoints",
    ]


def test_no_checkpoint_is_none_and_no_folder_neither(tmp_path: Path) -> None:
    assert load_latest(tmp_path) is None
    assert load_latest(tmp_path / "nothing") is None
    assert steps(tmp_path / "nothing") == []
    (tmp_path / "file").touch()
    with pytest.raises(LabError, match=r"cannot read the checkpoints in .*file"):
        load_latest(tmp_path / "file")
    with pytest.raises(LabError, match=r"cannot write the checkpoint of step 1 .*there is no earlier checkpoint"):
        save(tmp_path / "file", 1, {}, {})


def edit_json(path: Path, change: Callable[[dict[str, Any]], None], *, seal: bool = False) -> None:
    """Change a checkpoint's JSON; sealed, its checksum fits again."""
    document = json.loads(path.read_bytes())
    change(document)
    if seal:
        document["checksum"] = checkpoint._checksum(document)
    path.write_text(json.dumps(document))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def set_key(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.__setitem__(key, value)


JSON_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "it is not JSON"),
    "empty": (lambda path: path.write_bytes(b""), "it is not JSON"),
    "other JSON": (lambda path: path.write_text("[1, 2]"), "not the JSON of a checkpoint"),
    "no checksum": (lambda path: edit_json(path, lambda d: d.pop("checksum")), "not the JSON of a checkpoint"),
    "edited meta": (lambda path: edit_json(path, lambda d: d["meta"].update(best=0.0)), "was changed .*checksum"),
    "edited step": (lambda path: edit_json(path, set_key("step", 30)), "was changed .*checksum"),
    "another step": (lambda path: edit_json(path, set_key("step", 30), seal=True), "fields are not those .* step 20"),
    "new format": (lambda path: edit_json(path, set_key("format", 2), seal=True), "format is 2, .* reads 1; update"),
    "copied": (
        lambda path: path.write_bytes(path.with_name("step-00000010.json").read_bytes()),
        "fields are not those",
    ),
}

TENSOR_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (cut, r"has \d+ bytes instead of \d+; it is cut off"),
    "empty": (lambda path: path.write_bytes(b""), "has 0 bytes instead of"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"\0"), r"has \d+ bytes instead of"),
    "flipped": (flip, "was changed after it was written .*SHA-256"),
    "exchanged": (lambda path: path.with_name("step-00000010.safetensors").replace(path), "was changed .*SHA-256"),
    "gone": (lambda path: path.unlink(), "cannot be read .*No such file"),
}

DAMAGE = [(".json", *JSON_DAMAGE[name]) for name in JSON_DAMAGE]
DAMAGE += [(".safetensors", *TENSOR_DAMAGE[name]) for name in TENSOR_DAMAGE]


@pytest.mark.parametrize(
    ("suffix", "damage", "message"),
    DAMAGE,
    ids=[*(f"JSON {n}" for n in JSON_DAMAGE), *(f"tensors {n}" for n in TENSOR_DAMAGE)],
)
def test_damaged_one_is_refused_and_the_one_before_is_used(
    tmp_path: Path, suffix: str, damage: Callable[[Path], object], message: str
) -> None:
    write_two(tmp_path)
    earlier = {name: (tmp_path / name).read_bytes() for name in files(tmp_path) if "10" in name}
    damage((tmp_path / "step-00000020.json").with_suffix(suffix))
    with pytest.raises(CheckpointError, match=f"step-00000020.json is refused: .*{message}"):
        load(tmp_path, 20)
    for name, content in earlier.items():
        (tmp_path / name).write_bytes(content)
    found = load_latest(tmp_path)
    assert found is not None
    assert found.step == 10
    assert torch.equal(found.tensors["x"], torch.arange(6.0) + 10)
    assert len(found.warnings) == 1
    assert "step-00000020.json is refused" in found.warnings[0]


def test_both_damaged_is_an_error_that_names_both(tmp_path: Path) -> None:
    write_two(tmp_path)
    cut(tmp_path / "step-00000010.safetensors")
    flip(tmp_path / "step-00000020.safetensors")
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .* can be used: .*00000020\.json.*00000010\.json.*copy"
    ):
        load_latest(tmp_path)


@pytest.mark.parametrize("name", ["step-00000020.json", "step-00000020.safetensors"])
def test_every_cut_and_every_flipped_bit_is_noticed(tmp_path: Path, name: str) -> None:
    save(tmp_path, 20, {"x": torch.tensor([0.5])}, {"lr": 1e-30})
    path, whole = tmp_path / name, (tmp_path / name).read_bytes()
    damaged = [whole[:length] for length in range(len(whole) - 1)]
    damaged += [
        whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]
        for place in range(len(whole))
        for bit in range(8)
    ]
    accepted = []
    for content in damaged:
        path.write_bytes(content)
        try:
            found = load(tmp_path, 20)
        except CheckpointError:
            continue
        assert (found.tensors["x"].item(), found.meta) == (0.5, {"lr": 1e-30})
        accepted.append(content)
    # A number may be spelled differently: 1E-30 is still the same.
    assert all(content.lower() == whole for content in accepted)
    assert len(accepted) <= 1


def test_after_passing_over_a_damaged_one_saving_goes_on(tmp_path: Path) -> None:
    write_two(tmp_path)
    flip(tmp_path / "step-00000020.safetensors")
    save(tmp_path, 15, {"x": torch.zeros(1)}, {})
    assert steps(tmp_path) == [10, 15]
    assert len(files(tmp_path)) == 4


def test_a_damaged_one_does_not_take_the_place_of_a_whole_one(tmp_path: Path) -> None:
    write_two(tmp_path)
    cut(tmp_path / "step-00000020.safetensors")
    save(tmp_path, 30, {"x": torch.zeros(1)}, {})
    assert steps(tmp_path) == [10, 30]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    write_two(tmp_path)
    for value in (1.0, 2.0, 3.0):
        save(tmp_path, 20, {"x": torch.tensor(value)}, {"value": value})
        found = load(tmp_path, 20)
        assert (found.tensors["x"].item(), found.meta["value"]) == (value, value)
        assert len(files(tmp_path)) == 4
