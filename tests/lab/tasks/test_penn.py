"""The Penn Treebank: finding it, proving it, numbering it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ncgru.lab.tasks import PennTreebank
from ncgru.lab.tasks.penn import FILES, data_folders, find_penn, read_penn, spaced


def test_folders_follow_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCGRU_DATA", str(tmp_path))
    assert data_folders() == [tmp_path, tmp_path / "ptb"]
    monkeypatch.setenv("NCGRU_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_folders() == [tmp_path / "ncgru", tmp_path / "ncgru" / "ptb"]
    monkeypatch.delenv("NCGRU_DATA")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_folders()[0] == tmp_path / ".cache" / "ncgru"


@pytest.mark.parametrize("below", [".", "ptb"])
def test_files_are_found_in_the_folder_or_in_its_ptb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    monkeypatch.setenv("NCGRU_DATA", str(tmp_path))
    (tmp_path / below).mkdir(exist_ok=True)
    for file in FILES.values():
        (tmp_path / below / file).touch()
    assert find_penn() == tmp_path / below


def test_a_missing_file_is_named_with_the_places_and_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCGRU_DATA", str(tmp_path))
    (tmp_path / "ptb.train.txt").touch()
    (tmp_path / "ptb.test.txt").touch()
    task = PennTreebank(unit="word")  # describing it needs no data
    with pytest.raises(FileNotFoundError) as error:
        task.source("train", batch_size=2)
    message = str(error.value)
    assert "ptb.valid.txt not found" in message
    assert "ptb.train.txt not" not in message
    for part in (str(tmp_path), str(tmp_path / "ptb"), "NCGRU_DATA", "LDC"):
        assert part in message


def test_a_wrong_file_is_named_with_both_checksums(tmp_path: Path) -> None:
    for file in FILES.values():
        (tmp_path / file).write_text("not the treebank\n")
    with pytest.raises(
        ValueError, match=r"ptb\.train\.txt must have SHA-256 fcea919f.*, got [0-9a-f]{64} \(17 bytes\)"
    ):
        read_penn(tmp_path, "word")


def test_layout_of_the_character_file() -> None:
    assert spaced("ab_c\nd\n") == b"a b _ c \nd \n"


@pytest.mark.penn
@pytest.mark.parametrize(
    ("unit", "types", "counts"),
    [
        ("word", 10_000, (929_589, 73_760, 82_430)),
        ("character", 50, (5_017_482, 393_042, 442_423)),
    ],
)
def test_the_real_files(
    penn_folder: Path, monkeypatch: pytest.MonkeyPatch, unit: str, types: int, counts: tuple[int, int, int]
) -> None:
    monkeypatch.setenv("NCGRU_DATA", str(penn_folder))
    task = PennTreebank(unit=unit, bptt=100)
    corpus = task.corpus
    assert task.input_size == task.output_size == types
    assert tuple(len(corpus.tokens[split]) for split in ("train", "valid", "test")) == counts
    assert task.name == f"ptb-{unit}"
    derived = task.derived_metrics(task.trivial_loss)
    if unit == "word":
        assert round(derived["perplexity"]) == 639
        opening = "<eos> no it was n't black monday <eos>"
        assert (
            " ".join(corpus.vocabulary[t] for t in [corpus.tokens["train"][-1], *corpus.tokens["test"][:7]]) == opening
        )
    else:
        assert round(derived["bits_per_character"], 3) == 4.346
        opening = "no_it_was_n't_black_monday"
        assert "".join(corpus.vocabulary[t] for t in corpus.tokens["test"][: len(opening)]) == opening


@pytest.mark.penn
def test_one_changed_letter_is_noticed(penn_folder: Path, tmp_path: Path) -> None:
    for file in FILES.values():
        shutil.copy(penn_folder / file, tmp_path / file)
    path = tmp_path / "ptb.valid.txt"
    path.chmod(0o600)
    path.write_bytes(path.read_bytes().replace(b"consumers", b"Consumers", 1))
    with pytest.raises(ValueError, match=r"ptb\.valid\.txt must have SHA-256 c9fe6985"):
        read_penn(tmp_path, "character")
