"""Errors of the laboratory: each text is complete in itself, so that it can be shown without a traceback."""

from __future__ import annotations


class LabError(Exception):
    """Something outside the program is not as it must be: a file, a folder, a device, another process."""


class CheckpointError(LabError):
    """A checkpoint is there but cannot be trusted or understood."""


class RunInUseError(LabError):
    """Another process works in the run directory."""


class OtherRecipeError(LabError):
    """The run directory holds the run of another recipe."""
