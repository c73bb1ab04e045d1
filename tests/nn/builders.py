"""The modules under test, by a short name each."""

from collections.abc import Callable
from typing import Any

from ncgru import GORU, NCGRU, GORUCell, NCGRUCell, ScoRNN, ScoRNNCell
from ncgru.nn.sequence import CellModule, SequenceModule

SEQUENCES: dict[str, Callable[..., SequenceModule]] = {
    "ncgru": NCGRU,
    "ncgru-r-c": lambda *args, **kwargs: NCGRU(*args, orthogonal="rc", **kwargs),
    "ncgru-r-u-c": lambda *args, **kwargs: NCGRU(*args, orthogonal="ruc", **kwargs),
    "ncgru-u-relu": lambda *args, **kwargs: NCGRU(*args, orthogonal="u", nonlinearity="relu", **kwargs),
    "cho-gru": lambda *args, **kwargs: NCGRU(*args, orthogonal="", nonlinearity="tanh", **kwargs),
    "scornn": ScoRNN,
    "scornn-tanh": lambda *args, **kwargs: ScoRNN(*args, nonlinearity="tanh", **kwargs),
    "goru": GORU,
    "goru-tanh": lambda *args, **kwargs: GORU(*args, capacity=3, nonlinearity="tanh", **kwargs),
}

CELLS: dict[str, tuple[Callable[..., CellModule], Callable[..., SequenceModule], dict[str, Any]]] = {
    "ncgru": (NCGRUCell, NCGRU, {}),
    "ncgru-r-c": (NCGRUCell, NCGRU, {"orthogonal": "rc"}),
    "cho-gru": (NCGRUCell, NCGRU, {"orthogonal": "", "nonlinearity": "tanh"}),
    "scornn": (ScoRNNCell, ScoRNN, {}),
    "goru": (GORUCell, GORU, {}),
}
