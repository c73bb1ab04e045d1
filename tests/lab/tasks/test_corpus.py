"""Texts as numbered tokens, against plain Python."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from ncgru.lab.tasks import OwnText
from ncgru.lab.tasks.corpus import Corpus, build_corpus, lines_of, split_corpus

TEXTS = {
    "train": " the cat saw the dog \n a dog\n\nthe naïve  猫 sees\n",
    "valid": "the dog\n",
    "test": "a cat\r\nsaw 😀 dogs",
}


def _slow_tokens(text: str, unit: str) -> list[str]:
    lines = text.removesuffix("\n").split("\n")
    return [token for line in lines for token in [*(line.split() if unit == "word" else line.strip()), "<eos>"]]


def _read(corpus: Corpus, split: str) -> list[str]:
    return [corpus.vocabulary[token] for token in corpus.tokens[split].tolist()]


@pytest.mark.parametrize("unit", ["word", "character"])
def test_tokens_spell_the_text(unit: str) -> None:
    corpus = build_corpus(TEXTS, unit)
    for split, text in TEXTS.items():
        assert _read(corpus, split) == _slow_tokens(text, unit)
        assert corpus.tokens[split].dtype == torch.int64


def test_vocabularies_are_sorted_and_hold_every_type_once() -> None:
    types = {unit: {t for text in TEXTS.values() for t in _slow_tokens(text, unit)} for unit in ("word", "character")}
    assert build_corpus(TEXTS, "word").vocabulary == tuple(sorted(types["word"]))
    characters = build_corpus(TEXTS, "character").vocabulary
    assert characters == ("<eos>", *sorted(types["character"] - {"<eos>"}))


def test_vocabulary_does_not_depend_on_the_order_of_the_lines() -> None:
    turned = {split: "\n".join(reversed(lines_of(text))) for split, text in TEXTS.items()}
    for unit in ("word", "character"):
        assert build_corpus(turned, unit).vocabulary == build_corpus(TEXTS, unit).vocabulary


def test_one_text_is_divided_into_consecutive_parts() -> None:
    text = "".join(f"line {k} here\n" for k in range(50))
    corpus = split_corpus(text, (0.5, 0.3, 0.2), "word")
    assert [len(corpus.tokens[split]) for split in ("train", "valid", "test")] == [100, 60, 40]
    together = [token for split in ("train", "valid", "test") for token in _read(corpus, split)]
    assert together == _slow_tokens(text, "word")


def test_unigram_loss_against_a_loop() -> None:
    corpus = build_corpus({"train": "a a b c\nb a\n", "test": "a b\nc\n"}, "word")
    train, test = _slow_tokens("a a b c\nb a\n", "word"), _slow_tokens("a b\nc\n", "word")
    counts = Counter(train)
    expected = -sum(math.log(counts[token] / len(train)) for token in test) / len(test)
    assert corpus.unigram_loss("test") == pytest.approx(expected, rel=1e-12)


def test_unigram_loss_adds_one_where_training_lacks_a_type() -> None:
    corpus = build_corpus({"train": "a a b\n", "test": "a d\n"}, "word")
    expected = -sum(math.log(count / 8) for count in (3, 1, 2)) / 3  # a, d, <eos> of 4 tokens and 4 types
    assert corpus.unigram_loss("test") == pytest.approx(expected, rel=1e-12)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "story.txt"
    path.write_text("once upon a time there was a cat\n" * 40, encoding="utf-8")
    return path


def test_own_text_in_one_file(text_file: Path) -> None:
    task = OwnText(train=str(text_file), unit="word", bptt=7)
    assert task.name == "text-word-story"
    assert task.input_size == task.output_size == 8
    assert sum(len(tokens) for tokens in task.corpus.tokens.values()) == 40 * 9
    inputs, targets = task.source("train", batch_size=2).batch(0)
    assert inputs.shape == targets.shape
    assert 0 < task.trivial_loss < math.log(8)
    assert task.irreducible_loss is None


def test_own_text_in_three_files(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(f"{name} words\n" * 5, encoding="utf-8")
    task = OwnText(train=str(tmp_path / "a"), valid=str(tmp_path / "b"), test=str(tmp_path / "c"), unit="word")
    assert task.corpus.vocabulary == ("<eos>", "a", "b", "c", "words")
    assert _read(task.corpus, "valid")[:3] == ["b", "words", "<eos>"]


def test_only_training_segments_are_random_and_only_if_asked_for(text_file: Path) -> None:
    def lengths(task: OwnText, split: str) -> set[int]:
        source = task.source(split, batch_size=2, seed=4)
        return {source.segment(k).length for k in range(source.epoch_start(1) - 1)}

    by_chance, fixed = (OwnText(train=str(text_file), bptt=20, random_length=flag) for flag in (True, False))
    assert len(lengths(by_chance, "train")) > 3
    assert lengths(fixed, "train") == lengths(by_chance, "test") == {20}


def test_a_byte_order_mark_is_no_character(text_file: Path) -> None:
    plain = OwnText(train=str(text_file)).corpus
    text_file.write_bytes(b"\xef\xbb\xbf" + text_file.read_bytes())
    assert OwnText(train=str(text_file)).corpus.vocabulary == plain.vocabulary


def test_the_text_is_read_only_when_it_is_needed() -> None:
    task = OwnText(train="no such file.txt")
    assert task.name == "text-character-no such file"
    with pytest.raises(FileNotFoundError, match=r"no such file\.txt does not exist"):
        _ = task.input_size


def test_metrics_of_a_language_task(text_file: Path) -> None:
    outputs = torch.randn(5, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    task = OwnText(train=str(text_file), unit="word")
    targets = outputs.argmax(-1)
    targets[0] = (targets[0] + 1) % 8
    terms = [
        math.log(sum(math.exp(o) for o in outputs[t, b])) - outputs[t, b, targets[t, b]].item()
        for t in range(5)
        for b in range(2)
    ]
    metrics = task.metrics(outputs, targets)
    assert metrics["loss"].item() == pytest.approx(sum(terms) / 10, rel=1e-12)
    assert metrics["accuracy"].item() == pytest.approx(0.8)
    assert task.derived_metrics(2.0)["perplexity"] == pytest.approx(math.e**2)
    assert task.derived_metrics(1e4)["perplexity"] == math.inf
    assert OwnText(train=str(text_file)).derived_metrics(2.0)["bits_per_character"] == pytest.approx(2 / math.log(2))
