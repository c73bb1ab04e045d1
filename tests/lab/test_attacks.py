"""Files made to do harm, with checksums that fit: each is refused, and none is ever unpickled."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from ncgru.lab import checkpoint
from ncgru.lab.checkpoint import load, load_latest, save
from ncgru.lab.errors import CheckpointError

LAB = Path(checkpoint.__file__).parent


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.mark,)


def packed(header: bytes | dict[str, Any], data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with any header and any claim on its length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def one(dtype: str = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, Any]:
    """The header of a file with one tensor."""
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


HEADERS = {
    "nothing": b"",
    "too short for a length": b"\x08\0\0",
    "header longer than the file": packed(one(), b"\0" * 4, 10**6),
    "header of 2^64 - 1 bytes": packed(one(), b"\0" * 4, 2**64 - 1),
    "header of 2^63 bytes": packed(one(), b"\0" * 4, 2**63),
    "header of no bytes": packed(b"", b"\0" * 4),
    "header no JSON": packed(b"{x:", b"\0" * 4),
    "header a list": packed(b"[]"),
    "header not UTF-8": packed(b'{"\xff":1}'),
    "header bottomless": packed(b"[" * 100_000),
    "data missing": packed(one(), b""),
    "data too long": packed(one(), b"\0" * 8),
    "offsets beyond the data": packed(one(offsets=(0, 400)), b"\0" * 4),
    "offsets backwards": packed(one(offsets=(4, 0)), b"\0" * 4),
    "offsets negative": packed(one(offsets=(-4, 0)), b"\0" * 4),
    "offsets overlap": packed({**one(), "y": one()["x"]}, b"\0" * 4),
    "hole in the data": packed(one(offsets=(4, 8)), b"\0" * 8),
    "shape too large": packed(one(shape=(2,)), b"\0" * 4),
    "shape overflows": packed(one(shape=(2**33, 2**33)), b"\0" * 4),
    "shape negative": packed(one(shape=(-1, -1)), b"\0" * 4),
    "shape a string": packed(one(shape="1"), b"\0" * 4),
    "dtype unknown": packed(one(dtype="PICKLE"), b"\0" * 4),
    "dtype of four bits": packed(one(dtype="F4", shape=(8,)), b"\0" * 4),
    "no dtype": packed({"x": {"shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4),
}


def plant(directory: Path, content: bytes, **changes: Any) -> None:
    """Make `content` the tensors of the checkpoint of step 20, with a JSON that vouches for it."""
    document = json.loads((directory / "step-00000020.json").read_bytes())
    digest = hashlib.sha256(content).hexdigest()
    document["tensors"] = {"file": "step-00000020.safetensors", "bytes": len(content), "sha256": digest} | changes
    document["checksum"] = checkpoint._checksum(document)
    (directory / "step-00000020.safetensors").write_bytes(content)
    (directory / "step-00000020.json").write_text(json.dumps(document))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A folder with checkpoints of steps 10 and 20."""
    for step in (10, 20):
        save(tmp_path / "checkpoints", step, {"x": torch.tensor([float(step)])}, {})
    return tmp_path / "checkpoints"


def check_refused(directory: Path, message: str) -> None:
    """Check that step 20 is refused, and step 10 taken in its place."""
    with pytest.raises(CheckpointError, match=f"step-00000020.json is refused: .*{message}"):
        load(directory, 20)
    found = load_latest(directory)
    assert found is not None
    assert found.step == 10
    assert found.tensors["x"].item() == 10


@pytest.mark.parametrize("name", HEADERS)
def test_nonsense_in_the_header_is_refused(directory: Path, name: str) -> None:
    plant(directory, HEADERS[name])
    check_refused(directory, "is not in safetensors format")


def test_planting_itself_is_not_what_is_refused(directory: Path) -> None:
    plant(directory, packed(one(), struct.pack("<f", 2.5)))
    assert load(directory, 20).tensors["x"].item() == 2.5


@pytest.mark.parametrize("kind", ["pickle", "torch.save", "torch.save, old"])
def test_a_disguised_pickle_is_not_executed(directory: Path, kind: str) -> None:
    mark = directory.parent / "executed"
    buffer = io.BytesIO()
    if kind == "pickle":
        pickle.dump(Payload(str(mark)), buffer)
    else:
        torch.save(Payload(str(mark)), buffer, _use_new_zipfile_serialization=kind == "torch.save")
    plant(directory, buffer.getvalue())
    check_refused(directory, "is not in safetensors format")
    (directory / "step-00000020.json").write_bytes(buffer.getvalue())
    check_refused(directory, "it is not JSON")
    assert not mark.exists()
    pickle.loads(pickle.dumps(Payload(str(mark))))
    assert mark.exists(), "the payload would not have done anything"


@pytest.mark.parametrize(
    "name",
    [
        "../step-00000020.safetensors",
        "/etc/hostname",
        "step-00000010.safetensors",
        "step-00000020.json",
        "",
        ".",
        None,
        3,
    ],
)
def test_tensors_elsewhere_are_refused(directory: Path, name: object) -> None:
    content = (directory / "step-00000020.safetensors").read_bytes()
    (directory.parent / "step-00000020.safetensors").write_bytes(content)
    plant(directory, content, file=name)
    check_refused(directory, "its tensors cannot lie in a file named")


def test_names_of_tensors_are_never_paths(directory: Path) -> None:
    names = ["../outside", "/outside", "a/b", "..", "", "\0"]
    header = {
        name: {"dtype": "U8", "shape": [1], "data_offsets": [place, place + 1]} for place, name in enumerate(names)
    }
    plant(directory, packed(header, b"\1" * len(names)))
    before = sorted(directory.parent.rglob("*"))
    assert set(load(directory, 20).tensors) == set(names)
    assert sorted(directory.parent.rglob("*")) == before


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "device"])
def test_only_plain_files_are_read(directory: Path, suffix: str, kind: str) -> None:
    path = (directory / "step-00000020.json").with_suffix(suffix)
    outside = directory.parent / "outside"
    path.replace(outside)
    if kind == "link":
        path.symlink_to(outside)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    check_refused(directory, "is not a plain file")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"format":' * 100_000,
        '{"format": 1, "checksum": ' + "9" * 5000 + "}",
        "\ufeff{}",
        "\0" * 64,
        "NaN",
    ],
    ids=["lists", "dicts", "digits", "mark", "zeros", "NaN"],
)
def test_nonsense_in_the_json_is_refused(directory: Path, text: str) -> None:
    (directory / "step-00000020.json").write_text(text, encoding="utf-8")
    check_refused(directory, "it is not")


@pytest.mark.parametrize(
    "changes",
    [{"meta": []}, {"more": 1}, {"tensors": None}, {"tensors": {}}, {"step": 10}, {"step": None}],
    ids=str,
)
def test_fields_of_the_wrong_kind_are_refused(directory: Path, changes: dict[str, Any]) -> None:
    path = directory / "step-00000020.json"
    document = json.loads(path.read_bytes()) | changes
    document["checksum"] = checkpoint._checksum(document)
    path.write_text(json.dumps(document))
    check_refused(directory, "its fields are not those of the checkpoint of step 20")


def test_a_checksum_over_half_a_character_is_no_crash(directory: Path) -> None:
    (directory / "step-00000020.json").write_text('{"format": 1, "checksum": "", "meta": {"x": "\\ud800"}}')
    check_refused(directory, "checksum")


def test_the_laboratory_has_no_way_to_unpickle() -> None:
    modules = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
    calls = {"torch.load", "torch.save", "numpy.load", "np.load"}
    found = []
    for path in sorted(LAB.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found += [(path.name, alias.name) for alias in node.names if alias.name.split(".")[0] in modules]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in modules:
                found.append((path.name, str(node.module)))
            elif isinstance(node, ast.Attribute) and ast.unparse(node) in calls:
                found.append((path.name, ast.unparse(node)))
    assert not found
