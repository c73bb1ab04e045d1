"""Recurrent modules that take the place of PyTorch's own, their cells, and modReLU."""

from ncgru.nn.goru import GORU, GORUCell
from ncgru.nn.modrelu import ModReLU, modrelu
from ncgru.nn.ncgru import NCGRU, NCGRUCell
from ncgru.nn.scornn import ScoRNN, ScoRNNCell

__all__ = ["GORU", "GORUCell", "ModReLU", "NCGRU", "NCGRUCell", "ScoRNN", "ScoRNNCell", "modrelu"]
