"""Every refusal names the argument, the rule, the value and the way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ncgru.lab.tasks import Adding, Copying, Denoise, OwnText, Parenthesis, PennTreebank
from tests.lab.tasks.synthetic_tasks import MAKERS

ALL = pytest.mark.parametrize("kind", list(MAKERS))


@ALL
@pytest.mark.parametrize("length", [0, -3])
def test_length_below_one(kind: str, length: int) -> None:
    with pytest.raises(ValueError, match=rf"length must be at least 1, got {length}; pass the task's T"):
        MAKERS[kind](length)


@ALL
@pytest.mark.parametrize("length", [1.5, "100", True])
def test_length_of_another_type(kind: str, length: Any) -> None:
    with pytest.raises(TypeError, match="length must be an int, got"):
        MAKERS[kind](length)


@ALL
def test_the_shortest_length_works(kind: str) -> None:
    batch = MAKERS[kind](3 if kind == "adding" else 1).source("train", batch_size=64).batch(0)
    assert batch.inputs.isfinite().all()


@pytest.mark.parametrize("length", [1, 2])
def test_adding_needs_three_steps(length: int) -> None:
    with pytest.raises(
        ValueError, match=rf"length must be at least 3, got {length}; each half needs room for its mark"
    ):
        Adding(length=length)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Copying(train_size=0), "train_size must be at least 1, got 0; pass the number of training sequences"),
        (lambda: Copying(test_size=0), "test_size must be at least 1, got 0"),
        (lambda: Denoise(variant="publishd"), r"variant must be one of .*, got 'publishd'; did you mean 'published'\?"),
        (lambda: PennTreebank(unit="words"), r"unit must be one of .*, got 'words'; did you mean 'word'\?"),
        (lambda: PennTreebank(bptt=0), "bptt must be at least 1, got 0; pass the number of steps in a segment"),
        (lambda: OwnText(), "train must be the path of a text file"),
        (lambda: OwnText(train="a", valid="b"), "valid and test must be given together, got only valid='b'; pass test"),
        (lambda: OwnText(train="a", test="b"), "valid and test must be given together, got only test='b'; pass valid"),
        (lambda: OwnText(train="a", fractions=(0.5, 0.5, 0.5)), r"fractions must be three positive .* got \(0.5, 0.5"),
        (lambda: OwnText(train="a", fractions=(1.1, -0.2, 0.1)), "fractions must be three positive"),
    ],
)
def test_wrong_fields(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "tset"}, r"split must be one of 'train', 'test', got 'tset'; did you mean 'test'\?"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"world_size": 0}, "world_size must be at least 1, got 0"),
        ({"rank": 2, "world_size": 2}, r"rank must be from 0 to 1 \(world_size - 1\), got 2"),
        ({"rank": -1}, "rank must be from 0 to 0"),
        ({"batch_size": 10, "world_size": 4}, "batch_size must be a multiple of world_size=4, got 10; pass 12"),
        ({"split": "test", "batch_size": 48}, "batch_size must divide the 1600 test sequences, got 48; pass 40"),
        ({"seed": []}, "seed must be an int or hold at least one"),
        ({"seed": 2**63}, "seed must fit into 64 bits"),
    ],
)
def test_wrong_sources(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Parenthesis(length=5).source(**{"split": "train", "batch_size": 8, **arguments})


def test_wrong_positions() -> None:
    source = Parenthesis(length=5).source("train", batch_size=2)
    with pytest.raises(ValueError, match="position must be at least 0, got -1; batches are counted from 0"):
        source.batch(-1)
    with pytest.raises(TypeError, match=r"position must be an int, got float 1\.0"):
        source.batch(1.0)  # type: ignore[arg-type]


def test_a_fresh_source_has_no_epochs() -> None:
    with pytest.raises(ValueError, match="epoch_start needs a fixed set of data"):
        Parenthesis().source("train", batch_size=2).epoch_start(1)


@ALL
def test_outputs_of_another_shape(kind: str) -> None:
    task = MAKERS[kind](5)
    targets = task.source("train", batch_size=2).batch(0).targets
    outputs = torch.zeros(2, targets.shape[0], task.output_size)
    with pytest.raises(
        ValueError, match=r"outputs must have shape \[scored steps, batch, output_size\] = .*, got \(2, "
    ):
        task.loss(outputs, targets)  # batch first


def _text(folder: Path, content: bytes) -> OwnText:
    path = folder / "mine.txt"
    path.write_bytes(content)
    return OwnText(train=str(path), unit="word", bptt=5)


@pytest.mark.parametrize("content", [b"", b" \n\n\t"])
def test_an_empty_text(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ValueError, match=r"mine\.txt must hold text, but it is empty; pass a file with"):
        _ = _text(tmp_path, content).corpus


def test_a_text_that_is_not_utf8(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mine\.txt must be UTF-8 text, but byte 3 \(0xe9\) is not; convert it"):
        _ = _text(tmp_path, "café au lait".encode("latin-1")).corpus


def test_a_folder_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist or is not a file; name yours"):
        _ = OwnText(train=str(tmp_path)).corpus


def test_a_text_too_short_to_divide(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="each part of the text must have at least two tokens, but 4 tokens in shares"):
        _ = _text(tmp_path, b"one two three\n").corpus


def test_a_text_too_short_for_the_batch(tmp_path: Path) -> None:
    task = _text(tmp_path, b"one two three\n" * 10)
    with pytest.raises(ValueError, match="batch_size must leave at least two tokens a column, got 20 for 36 tokens"):
        task.source("train", batch_size=20)


def test_several_seeds_with_random_lengths(tmp_path: Path) -> None:
    task = _text(tmp_path, b"one two three\n" * 10)
    with pytest.raises(ValueError, match="seed must be a single one where segments have random lengths, got 2"):
        task.source("train", batch_size=2, seed=[0, 1])
    assert task.source("test", batch_size=1, seed=[0, 0]).batch(0).inputs.shape == (1, 2)


def test_a_tensor_as_position_of_a_text(tmp_path: Path) -> None:
    source = _text(tmp_path, b"one two three\n" * 10).source("train", batch_size=2)
    with pytest.raises(TypeError, match="position must be an int for a text, got a tensor; use segment"):
        source.batch(torch.tensor(0))
