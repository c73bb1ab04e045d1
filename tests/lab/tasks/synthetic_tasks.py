"""The synthetic tasks by the name of their slow version, at any length."""

from __future__ import annotations

from collections.abc import Callable

from ncgru.lab.tasks import Adding, Copying, Denoise, Parenthesis
from ncgru.lab.tasks.synthetic import SyntheticTask

MAKERS: dict[str, Callable[[int], SyntheticTask]] = {
    "parenthesis": lambda length: Parenthesis(length=length),
    "denoise": lambda length: Denoise(length=length),
    "denoise-corrected": lambda length: Denoise(length=length, variant="corrected"),
    "copying": lambda length: Copying(length=length),
    "adding": lambda length: Adding(length=length),
}
