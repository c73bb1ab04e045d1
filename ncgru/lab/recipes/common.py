"""What the recipes of the synthetic tasks share: the names of the models, their settings, the paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ncgru.lab.recipes.recipe import ModelSpec, PaperNumber

ROWS = ("lstm", "gru", "scornn", "goru", "nc-gru-c", "nc-gru-rc")
"""The rows of the paper's tables 1 to 4, in their order."""

MODELS = (*ROWS, "nc-gru-ruc", "cho-gru")
"""What every synthetic task is run with."""

MEASURE_EVERY = 99
"""No multiple of a reset: else every measurement would find the inverse fresh, and none the drift before a reset."""

NOTES = {
    "gru": "PyTorch's GRU, which resets after the product; the released baseline resets before it: see cho-gru.",
    "cho-gru": "TensorFlow's GRUCell, which resets before the product: what the released code calls GRU.",
}


@dataclass(frozen=True)
class Settings:
    """What one task sets for all of its models.

    Attributes:
        sizes: hidden size by kind of model.
        negatives: number of -1's in D by kind.
        reset_every: NC-GRU's updates between exact inverses.
        readout: initialisation of the read-out.
        init: initialisation by name of the model, where it is not the usual one of its kind.
        extra: further fields of `ModelSpec`, the same for all.
    """

    sizes: Mapping[str, int]
    negatives: Mapping[str, int]
    reset_every: int
    readout: str
    init: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, float] = field(default_factory=dict)

    def model(self, name: str) -> ModelSpec:
        """The model called `name`: one of `MODELS`, or `nc-gru-` and the letters of its orthogonal matrices."""
        kind, letters = ("nc-gru", name.removeprefix("nc-gru-")) if name.startswith("nc-gru-") else (name, "")
        size = self.sizes["gru" if kind == "cho-gru" else kind]
        init = self.init.get(name, "")
        spec = ModelSpec(kind, (size,), readout=self.readout, init=init, **self.extra)  # type: ignore[arg-type]
        if kind == "nc-gru":
            return replace(spec, orthogonal=letters, negatives=self.negatives[kind], reset_every=self.reset_every)
        return replace(spec, negatives=self.negatives[kind], inverse="exact") if kind == "scornn" else spec


def paper_loss(table: int, exponent: int, text: str) -> PaperNumber:
    """A loss that is printed as `text` in units of ten to the power of `exponent`."""
    digits = str(-exponent).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return PaperNumber(table, float(f"{text.replace(',', '')}e{exponent}"), text, f"×10⁻{digits}")


def paper_losses(table: int, exponent: int, texts: str) -> dict[str, PaperNumber]:
    """A column of a table, by model; `texts` are its entries from top to bottom. Cho's GRU has that of the GRU."""
    column = {row: paper_loss(table, exponent, text) for row, text in zip(ROWS, texts.split(), strict=True)}
    return {**column, "cho-gru": column["gru"]}
