"""The networks of the laboratory: recurrent layers between an optional embedding and a read-out."""

from ncgru.lab.models.sequence import ModelOutput, SequenceModel, build_model

__all__ = ["ModelOutput", "SequenceModel", "build_model"]
