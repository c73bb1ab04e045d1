"""Every kind of model at a size for tests."""

from __future__ import annotations

from ncgru.lab.recipes import ModelSpec

KINDS = {
    "lstm": ModelSpec("lstm", (6, 5)),
    "lstm-torch": ModelSpec("lstm", (6, 5), init="torch"),
    "gru": ModelSpec("gru", (6, 5)),
    "cho-gru": ModelSpec("cho-gru", (6, 5)),
    "scornn": ModelSpec("scornn", (6, 5), negatives=2, inverse="exact"),
    "goru": ModelSpec("goru", (6, 5)),
    **{
        f"nc-gru-{letters}": ModelSpec("nc-gru", (6, 5), orthogonal=letters, negatives=2, reset_every=3)
        for letters in ("c", "r", "u", "rc", "ru", "uc", "ruc")
    },
    "nc-gru-haar": ModelSpec("nc-gru", (6, 5), orthogonal="rc", inverse="hyperpower", angles="haar"),
    "released": ModelSpec("nc-gru", (6, 5), orthogonal="rc", negatives=2, reset_every=3, released=True),
}
