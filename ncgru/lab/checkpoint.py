"""Checkpoints that a crash cannot spoil: a pair of files, tensors and JSON, of which the JSON is written last.

    step-00001000.safetensors    the tensors
    step-00001000.json           {"format", "step", "tensors": {"file", "bytes", "sha256"}, "meta", "checksum"}

Both are written under another name, flushed to the disk and renamed. So a checkpoint exists when its JSON does, and
what a killed process leaves is the whole checkpoint or a file that nothing refers to. Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ncgru.lab.durable import TEMPORARY, replace_file, storage_error
from ncgru.lab.errors import CheckpointError, LabError
from ncgru.lab.jsontext import dumps, plain
from ncgru.lab.states import DTYPES, flatten, random_state, restore_random_state, unflatten

__all__ = [
    "Checkpoint",
    "flatten",
    "load",
    "load_latest",
    "random_state",
    "restore_random_state",
    "save",
    "steps",
    "unflatten",
]

FORMAT = 1
KEPT = 2
"""How many checkpoints stay: should the newest turn out damaged, there is one before it."""

_NAME = re.compile(r"step-(\d{8,18})(?:-\d+)?\.(json|safetensors)")
_KEYS = {"format", "step", "tensors", "meta", "checksum"}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What was saved.

    Attributes:
        step: number of training steps done.
        tensors: by name, on the CPU.
        meta: the JSON that was saved with them.
        path: the checkpoint's JSON file.
        warnings: newer checkpoints that had to be passed over, and why.
    """

    step: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]
    path: Path
    warnings: tuple[str, ...] = ()


def save(directory: Path | str, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
    """Write a checkpoint, then remove all but the newest two, and any of a later step.

    A later one can only be left over from before a resume that passed over it.

    Args:
        directory: where checkpoints lie; made if it is not there.
        step: number of training steps done.
        tensors: by name, on any device, of any strides; they may share memory.
        meta: what JSON can hold (tuples come back as lists).

    Returns:
        The path of the checkpoint's JSON file.

    Raises:
        ValueError: if `step` is negative or absurd.
        LabError: if it cannot be written (say, as the disk is full); the earlier checkpoints are all there then.
        TypeError: if `tensors` or `meta` hold what a checkpoint cannot.
    """
    directory = Path(directory)
    _check_step(step)
    content = _serialised(tensors)
    name = _free_name(directory, step)
    document = {
        "format": FORMAT,
        "step": step,
        "tensors": {"file": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()},
        "meta": plain(meta, "meta"),
    }
    document["checksum"] = _checksum(document)
    path = _json_path(directory, step)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(directory / name, content)
        replace_file(path, (dumps(document) + "\n").encode())
        _prune(directory, step)
    except OSError as error:
        action = f"write the checkpoint of step {step} ({len(content)} bytes) in {directory}"
        raise storage_error(action, error, _what_is_left(directory)) from error
    return path


def load_latest(directory: Path | str) -> Checkpoint | None:
    """The newest checkpoint that is whole, or None if there is none at all; changes nothing on the disk.

    Raises:
        CheckpointError: if there are checkpoints, but all are damaged.
    """
    refused: list[str] = []
    for step in reversed(steps(directory)):
        try:
            checkpoint = load(directory, step)
        except CheckpointError as error:
            refused.append(str(error))
        else:
            return replace(checkpoint, warnings=tuple(refused))
    if refused:
        raise CheckpointError(
            f"no checkpoint in {directory} can be used: {'; '.join(refused)}; "
            "put back a copy, or remove that folder to start from the beginning"
        )
    return None


def load(directory: Path | str, step: int) -> Checkpoint:
    """The checkpoint of one step.

    Raises:
        CheckpointError: if it is not there, or not exactly as it was saved.
    """
    directory = Path(directory)
    path = _json_path(directory, step)
    document = _document(path, step)
    tensors = _tensors(directory, document, path)
    return Checkpoint(step, tensors, document["meta"], path)


def steps(directory: Path | str) -> list[int]:
    """The steps of the checkpoints in `directory`, damaged ones too, in ascending order."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error(f"read the checkpoints in {directory}", error) from error
    matches = (_NAME.fullmatch(name) for name in names)
    found = {int(match[1]) for match in matches if match and match[2] == "json"}
    return sorted(step for step in found if _json_path(Path(directory), step).name in names)


def _check_step(step: int) -> None:
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError(f"step must be an int, got {type(step).__name__} {step!r}; pass the number of steps done")
    if not 0 <= step < 10**18:
        raise ValueError(f"step must be from 0 to 10**18 - 1, got {step}; pass the number of steps done")


def _json_path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}.json"


def _free_name(directory: Path, step: int) -> str:
    """A name for the tensors that no checkpoint refers to: one of the same step stays whole until the new one is."""
    name, number = f"step-{step:08d}.safetensors", 1
    while _json_path(directory, step).exists() and (directory / name).exists():
        name, number = f"step-{step:08d}-{number}.safetensors", number + 1
    return name


def _serialised(tensors: Mapping[str, Tensor]) -> bytes:
    from safetensors.torch import save as to_bytes

    copies = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.dtype not in DTYPES:
            found = f"{tensor.layout}, {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"tensors[{name!r}] must be a dense tensor of a common dtype, got {found}; convert it")
        # A copy each: safetensors refuses tensors that share memory, such as tied weights.
        copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return to_bytes(copies)


def _checksum(document: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in document.items() if key != "checksum"}
    return hashlib.sha256(dumps(rest).encode()).hexdigest()


def _read(path: Path, checkpoint: Path) -> bytes:
    """The bytes of one of a checkpoint's files; a pipe or a device in its place could block or never end."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise CheckpointError(f"{checkpoint} is refused: {path.name} is not a plain file")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{checkpoint} is refused: {path.name} cannot be read ({error.strerror})") from error


def _document(path: Path, step: int) -> dict[str, Any]:
    """The JSON of a checkpoint, after a look at all that does not need the tensors."""
    content = _read(path, path)
    try:
        document = json.loads(content)
        checksum = _checksum(document) if isinstance(document, dict) else None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is refused: it is not JSON, so it is cut off or no checkpoint") from None
    if not isinstance(document, dict) or not {"format", "checksum"} <= document.keys():
        raise CheckpointError(f"{path} is refused: it is not the JSON of a checkpoint")
    if document["format"] != FORMAT:
        raise CheckpointError(
            f"{path} is refused: its format is {document['format']!r}, this version reads {FORMAT}; update ncgru"
        )
    if document["checksum"] != checksum:
        raise CheckpointError(f"{path} is refused: it was changed after it was written (wrong checksum)")
    named = document.get("tensors")
    whole = document.keys() == _KEYS and isinstance(document["meta"], dict) and document["step"] == step
    if not whole or not isinstance(named, dict) or named.keys() != {"file", "bytes", "sha256"}:
        raise CheckpointError(f"{path} is refused: its fields are not those of the checkpoint of step {step}")
    match = _NAME.fullmatch(str(named["file"]))
    if not match or match[2] != "safetensors" or int(match[1]) != step:
        raise CheckpointError(f"{path} is refused: its tensors cannot lie in a file named {named['file']!r}")
    return document


def _tensors(directory: Path, document: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load as from_bytes

    named = document["tensors"]
    content = _read(directory / named["file"], path)
    if len(content) != named["bytes"]:
        raise CheckpointError(
            f"{path} is refused: {named['file']} has {len(content)} bytes instead of {named['bytes']}; it is cut off "
            "or was exchanged"
        )
    if hashlib.sha256(content).hexdigest() != named["sha256"]:
        raise CheckpointError(f"{path} is refused: {named['file']} was changed after it was written (wrong SHA-256)")
    try:
        return from_bytes(content)
    # An unknown dtype is a KeyError there, a shape that does not fit a RuntimeError.
    except (SafetensorError, KeyError, ValueError, RuntimeError, AssertionError, OverflowError) as error:
        raise CheckpointError(f"{path} is refused: {named['file']} is not in safetensors format ({error})") from error


def _prune(directory: Path, newest: int) -> None:
    """Keep the checkpoint of step `newest` and those before it, as many as are wanted and look whole."""
    keep = {newest}
    for step in reversed(steps(directory)):
        if len(keep) < KEPT and step < newest and _looks_whole(directory, step):
            keep.add(step)
    for step in set(steps(directory)) - keep:
        _json_path(directory, step).unlink()
    _remove_unnamed(directory)


def _what_is_left(directory: Path) -> str:
    """Clear up after a failure and say which checkpoint there is to go on from."""
    with contextlib.suppress(OSError, LabError):
        _remove_unnamed(directory)
    whole = [step for step in (steps(directory) if directory.is_dir() else []) if _looks_whole(directory, step)]
    return f"the checkpoint of step {whole[-1]} is intact" if whole else "there is no earlier checkpoint"


def _looks_whole(directory: Path, step: int) -> bool:
    """Whether a checkpoint would be loaded, as far as can be told without reading its tensors."""
    try:
        named = _document(_json_path(directory, step), step)["tensors"]
        return bool((directory / named["file"]).stat().st_size == named["bytes"])
    except (LabError, OSError):
        return False


def _remove_unnamed(directory: Path) -> None:
    """Remove what killed or failed processes left: temporary files, and tensors that no checkpoint refers to."""
    present = steps(directory)
    named: set[str] = set()
    damaged: set[int] = set()
    for step in present:
        try:
            named.add(_document(_json_path(directory, step), step)["tensors"]["file"])
        except LabError:
            damaged.add(step)
    for name in os.listdir(directory):
        match = _NAME.fullmatch(name)
        unnamed = match and match[2] == "safetensors" and name not in named and int(match[1]) not in damaged
        if unnamed or TEMPORARY.fullmatch(name):
            (directory / name).unlink()
