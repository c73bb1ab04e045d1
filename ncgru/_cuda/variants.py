"""Which programs there are, and whether each still fits into the registers of every architecture."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .cubin import Resources
from .kernels import Program

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
"""One of each generation of GPUs that the kernels are written for."""

_ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Variant:
    """A program to be checked, and the bound that was recorded for it.

    Attributes:
        program: what is compiled.
        local_bytes: how much local memory a thread of its kernels may take, on any architecture; 0 means no spills.
    """

    program: Program
    local_bytes: int = 0


class Measured(NamedTuple):
    """A kernel of a variant as it was compiled for an architecture."""

    variant: Variant
    architecture: str
    kernel: str
    resources: Resources

    def complaint(self) -> str | None:
        """What is wrong with it, or None if it keeps to its bound."""
        if self.resources.local_bytes <= self.variant.local_bytes:
            return None
        return (
            f"{self.kernel} of {self.variant.program} takes {self.resources.local_bytes} bytes of local memory a "
            f"thread on {self.architecture} ({self.resources.spill_stores} bytes of spills), but its bound is "
            f"{self.variant.local_bytes}"
        )


def packages() -> list[str]:
    """The packages of ncgru that hold kernels."""
    folders = {path.parent.relative_to(_ROOT.parent) for path in _ROOT.rglob("*.cu")}
    return sorted(".".join(folder.parts) for folder in folders)


def variants(package: str) -> list[Variant]:
    """What the module `variants` of a package lists."""
    return list(importlib.import_module(f"{package}.variants").variants())


def measure(found: Iterable[Variant], architectures: Iterable[str], workers: int = 1) -> Iterator[Measured]:
    """Compile variants, several at a time, and report each of their kernels.

    Raises:
        CompileError: a variant does not compile.
    """

    def compiled(job: tuple[Variant, str]) -> list[Measured]:
        variant, architecture = job
        resources = variant.program.cubin(architecture).resources()
        return [Measured(variant, architecture, kernel, resources[kernel]) for kernel in sorted(resources)]

    known = list(found)
    # Programs change faster than architectures, for a program compiles for one architecture at a time.
    jobs = [(variant, architecture) for architecture in architectures for variant in known]
    with ThreadPoolExecutor(workers) as pool:
        for result in pool.map(compiled, jobs):
            yield from result
