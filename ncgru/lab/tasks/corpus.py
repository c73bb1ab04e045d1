"""Text as numbered tokens: lines end in `<eos>`, everything else is a word or a character."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

EOS = "<eos>"
UNITS = ("character", "word")
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text in three parts.

    Attributes:
        vocabulary: the types of all parts in the order of their numbers: sorted, characters by code point (so that
            `<eos>`, which takes the place of the newline, comes before all that can be seen).
        tokens: the parts by name, each int64 [N].
    """

    vocabulary: tuple[str, ...]
    tokens: Mapping[str, Tensor]

    def unigram_loss(self, split: str) -> float:
        """Cross-entropy in nats of `split` under the token frequencies of the training part.

        If the training part lacks a type, one is added to each count, as the loss would be infinite.
        """
        types = len(self.vocabulary)
        counts, seen = (torch.bincount(self.tokens[part], minlength=types).double() for part in ("train", split))
        if not counts.all():
            counts += 1
        return float((seen * (counts.sum() / counts).log()).sum() / seen.sum())


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, else raise: FileNotFoundError if it is not there, ValueError if it is no text."""
    if not path.is_file():
        raise FileNotFoundError(
            f"the text file {path} does not exist or is not a file; name yours, for example with --set text=my.txt"
        )
    return decode(path, path.read_bytes())


def decode(path: Path, raw: bytes) -> str:
    """The bytes as UTF-8 text, else raise ValueError."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} must be UTF-8 text, but byte {error.start} (0x{raw[error.start]:02x}) is not; "
            f"convert it, for example with: iconv -f LATIN1 -t UTF-8"
        ) from error
    if not text.strip():
        raise ValueError(f"{path} must hold text, but it is empty; pass a file with at least a few lines")
    return text


def build_corpus(texts: Mapping[str, str], unit: str) -> Corpus:
    """Number the tokens of the parts by one vocabulary."""
    return _word_corpus(texts) if unit == "word" else _character_corpus(texts)


def split_corpus(text: str, fractions: Sequence[float], unit: str) -> Corpus:
    """A corpus whose parts are consecutive shares of one text's tokens."""
    whole = build_corpus({"all": text}, unit)
    tokens = whole.tokens["all"]
    ends = [round(len(tokens) * sum(fractions[:k])) for k in range(len(fractions) + 1)]
    if min(b - a for a, b in pairwise(ends)) < 2:
        raise ValueError(
            f"each part of the text must have at least two tokens, but {len(tokens)} tokens in "
            f"shares {tuple(fractions)} give one less; use a longer text"
        )
    return Corpus(whole.vocabulary, {split: tokens[ends[k] : ends[k + 1]] for k, split in enumerate(SPLITS)})


def lines_of(text: str) -> list[str]:
    """The lines without blanks at their ends; a newline at the end of the text starts no further line."""
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.strip() for line in lines]


def _word_corpus(texts: Mapping[str, str]) -> Corpus:
    words = {part: [word for line in lines_of(text) for word in (*line.split(), EOS)] for part, text in texts.items()}
    vocabulary = tuple(sorted(set().union(*words.values())))
    numbers = {word: k for k, word in enumerate(vocabulary)}
    return Corpus(vocabulary, {part: torch.tensor([numbers[word] for word in w]) for part, w in words.items()})


def _character_corpus(texts: Mapping[str, str]) -> Corpus:
    codes = {part: _code_points("".join(line + "\n" for line in lines_of(text))) for part, text in texts.items()}
    types = torch.unique(torch.cat(list(codes.values())))
    vocabulary = tuple(EOS if code == ord("\n") else chr(code) for code in types.tolist())
    return Corpus(vocabulary, {part: torch.searchsorted(types, c) for part, c in codes.items()})


def _code_points(text: str) -> Tensor:
    """The characters' code points, int32: no Python object a character."""
    return torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32)
