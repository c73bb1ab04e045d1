"""The unit in which a table speaks: a power of ten of the loss, bits per character, or perplexity."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ncgru.lab.report.values import number

PLAIN = {"loss": "loss", "bits_per_character": "bits per character", "perplexity": "perplexity"}
LANGUAGE = {"character": "bits_per_character", "word": "perplexity"}
"""How models of language are measured, by what they predict."""

SUPERSCRIPTS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")


@dataclass(frozen=True)
class Unit:
    """How a mean loss is shown.

    Attributes:
        metric: `loss`, `bits_per_character` or `perplexity`.
        scale: what the shown figure is to be multiplied by.
        label: for the head of a table.
    """

    metric: str = "loss"
    scale: float = 1.0
    label: str = "loss"

    @classmethod
    def of(cls, papers: Iterable[Mapping[str, Any] | None], task: object = None) -> Unit:
        """The unit of the first of the paper's numbers, else the usual one of the task, as a recipe describes it."""
        for paper in papers:
            if paper is not None:
                metric, text = str(paper.get("metric", "loss")), str(paper.get("unit") or "")
                power = re.search(r"10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)", text)
                scale = 10.0 ** int(power[1].translate(SUPERSCRIPTS)) if power else 1.0
                return cls(
                    metric, scale, f"{PLAIN.get(metric, metric)} ×{power[0]}" if power else PLAIN.get(metric, metric)
                )
        metric = LANGUAGE.get(str(task.get("unit")), "loss") if isinstance(task, Mapping) else "loss"
        return cls(metric, label=PLAIN[metric])

    def value(self, loss: float | None) -> float | None:
        """The figure for a mean loss in nats or squares."""
        if loss is None:
            return None
        if self.metric == "perplexity":
            return math.exp(loss) if loss < 700 else math.inf
        return (loss / math.log(2) if self.metric == "bits_per_character" else loss) / self.scale

    def text(self, loss: float | None) -> str:
        """The figure as written; an infinite one is that of a failed seed."""
        value = self.value(loss)
        return "failed" if value == math.inf else number(value)

    def paper(self, paper: Mapping[str, Any] | None) -> str:
        """The paper's figure, as it is printed there where the unit is the same."""
        if paper is None:
            return "–"
        return str(paper["text"]) if Unit.of([paper]) == self else number(float(paper["value"]) / self.scale)
