"""The programs of the tests, as a package with kernels lists its own; one of them has too few registers."""

from __future__ import annotations

from ncgru._cuda import Variant, program

SIMPLE = program("tests.cuda_support", "simple.cu", {"FACTOR": 2})
STARVED = program("tests.cuda_support", "simple.cu", {"FACTOR": 2}, ["--maxrregcount=24"])


def variants() -> list[Variant]:
    """One that keeps to its bound, and one that does not."""
    return [Variant(SIMPLE), Variant(STARVED)]
