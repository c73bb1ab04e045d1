"""Predicting the next token of a text: the Penn Treebank, or any text of one's own."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ncgru._checks import flag, one_of, positive_int
from ncgru.lab.tasks.base import Task, check_split, checked_seeds, rank_rows, row_cross_entropies
from ncgru.lab.tasks.corpus import SPLITS, UNITS, Corpus, build_corpus, read_text, split_corpus
from ncgru.lab.tasks.penn import find_penn, read_penn
from ncgru.lab.tasks.segments import CorpusSource


@dataclass(frozen=True)
class LanguageTask(Task):
    """Next-token prediction; the loss is the cross-entropy in nats a token.

    The text is read when it is first needed, so a task can be described where there are no data.

    Attributes:
        unit: `character` or `word`.
        bptt: steps in a segment, or their usual mean.
        random_length: whether lengths of training segments are random; evaluation always uses `bptt`.
    """

    unit: str = "character"
    bptt: int = 100
    random_length: bool = True

    token_inputs = True
    splits = SPLITS

    def __post_init__(self) -> None:
        one_of("unit", self.unit, UNITS)
        positive_int("bptt", self.bptt, "pass the number of steps in a segment")
        flag("random_length", self.random_length)

    @cached_property
    @abstractmethod
    def corpus(self) -> Corpus:
        """The text in numbered tokens; reads files at first use."""

    @property
    def input_size(self) -> int:
        return len(self.corpus.vocabulary)

    @property
    def output_size(self) -> int:
        return len(self.corpus.vocabulary)

    @cached_property
    def trivial_loss(self) -> float:
        """Cross-entropy of the test part under the training part's token frequencies p: -(1/N) sum_i ln p(token i)."""
        return self.corpus.unigram_loss("test")

    @property
    def irreducible_loss(self) -> None:
        """Unknown: nobody knows the entropy of a text."""
        return None

    def source(
        self,
        split: str,
        *,
        batch_size: int,
        seed: int | Sequence[int] = 0,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> CorpusSource:
        """See `Task.source`. The seed moves only random lengths; several seeds need `random_length=False`."""
        seeds = checked_seeds(seed)
        random = self.random_length and check_split(self, split) == "train"
        if random and len(seeds) > 1:
            raise ValueError(
                f"seed must be a single one where segments have random lengths, got {len(seeds)}; "
                f"set random_length=False or train the seeds one by one"
            )
        return CorpusSource(
            self.corpus.tokens[check_split(self, split)],
            batch_size,
            rank_rows(batch_size, rank, world_size),
            self.bptt,
            length_seed=seeds[0] if random else None,
            copies=len(seeds),
            device=device,
        )

    def row_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy in nats, the mean over the segment."""
        return row_cross_entropies(self._check_outputs(outputs, *targets.shape), targets)

    def row_accuracies(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Share of tokens whose prediction comes first."""
        return (outputs.argmax(-1) == targets).to(torch.float32).mean(0)

    def derived_metrics(self, loss: float) -> dict[str, float]:
        """Adds bits per character (loss / ln 2) or perplexity (exp loss)."""
        metrics = super().derived_metrics(loss)
        if self.unit == "character":
            return {**metrics, "bits_per_character": loss / math.log(2)}
        return {**metrics, "perplexity": math.exp(loss) if loss < 700 else math.inf}


@dataclass(frozen=True)
class PennTreebank(LanguageTask):
    """The Penn Treebank: 50 characters or 10,000 words, `<eos>` included.

    Its files are looked for in NCGRU_DATA or else in the user's cache folder, and checked by SHA-256.
    """

    @property
    def name(self) -> str:
        return f"ptb-{self.unit}"

    @cached_property
    def corpus(self) -> Corpus:
        return read_penn(find_penn(), self.unit)


@dataclass(frozen=True)
class OwnText(LanguageTask):
    """A text of the user's: three UTF-8 files, or one that is divided.

    Attributes:
        train: path of the training text, or of the whole text.
        valid: path of the validation text.
        test: path of the test text.
        fractions: shares of training, validation and test part where there is one file.
    """

    train: str = ""
    valid: str | None = None
    test: str | None = None
    fractions: tuple[float, float, float] = (0.9, 0.05, 0.05)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.train:
            raise ValueError("train must be the path of a text file, got an empty one; pass train='my.txt'")
        if (self.valid is None) != (self.test is None):
            given, missing = ("valid", "test") if self.test is None else ("test", "valid")
            raise ValueError(
                f"valid and test must be given together, got only {given}={getattr(self, given)!r}; "
                f"pass {missing} too, or neither to divide {self.train!r} by `fractions`"
            )
        if len(self.fractions) != 3 or not all(f > 0 for f in self.fractions) or abs(sum(self.fractions) - 1) > 1e-6:
            raise ValueError(
                f"fractions must be three positive shares that add up to 1, got {self.fractions}; "
                f"pass for example (0.9, 0.05, 0.05)"
            )

    @property
    def name(self) -> str:
        return f"text-{self.unit}-{Path(self.train).stem}"

    @cached_property
    def corpus(self) -> Corpus:
        if self.valid is None or self.test is None:
            return split_corpus(read_text(Path(self.train)), self.fractions, self.unit)
        paths = {"train": self.train, "valid": self.valid, "test": self.test}
        return build_corpus({split: read_text(Path(path)) for split, path in paths.items()}, self.unit)
