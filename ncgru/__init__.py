"""Recurrent networks whose recurrent matrices stay orthogonal while they train.

`NCGRU` takes the place of `nn.GRU`; `ScoRNN` and `GORU` stand beside it; `orthogonal(module, "weight")` makes a square
weight of any module orthogonal.
"""

from ncgru import diagnostics
from ncgru.nn import GORU, NCGRU, GORUCell, ModReLU, NCGRUCell, ScoRNN, ScoRNNCell
from ncgru.orthogonal import ScaledCayley, cayley, inverse_cayley, nearest_orthogonal, orthogonal
from ncgru.recurrence import BackendUnavailableError, available_backends, resolve_backend

__version__ = "0.1.0"

__all__ = [
    "GORU",
    "NCGRU",
    "BackendUnavailableError",
    "GORUCell",
    "ModReLU",
    "NCGRUCell",
    "ScaledCayley",
    "ScoRNN",
    "ScoRNNCell",
    "__version__",
    "available_backends",
    "cayley",
    "diagnostics",
    "inverse_cayley",
    "nearest_orthogonal",
    "orthogonal",
    "resolve_backend",
]
