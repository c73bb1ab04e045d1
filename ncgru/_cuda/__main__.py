"""`python -m ncgru._cuda`: compile every variant of every kernel, without a GPU, and report what they take."""

from __future__ import annotations

import argparse
import os
import sys

from . import nvrtc
from .kernels import cache
from .variants import ARCHITECTURES, Measured, measure, packages, variants


def main() -> int:
    """Print a line for each kernel; the exit code is 1 if one exceeds its recorded bound."""
    parser = argparse.ArgumentParser(prog="python -m ncgru._cuda", description=__doc__)
    parser.add_argument("package", nargs="*", help="packages with kernels (all)")
    parser.add_argument("--architecture", action="append", help=f"may be repeated ({' '.join(ARCHITECTURES)})")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="programs compiled at a time")
    options = parser.parse_args()

    compiler = nvrtc.load()
    print(f"NVRTC {compiler.version[0]}.{compiler.version[1]}: {compiler.where}; cache: {cache().folder}")
    print(f"{'registers':>9} {'local':>6} {'spilled':>7} {'shared':>6}  {'':7} kernel")
    found = [variant for package in options.package or packages() for variant in variants(package)]
    complaints = []
    for one in measure(found, options.architecture or ARCHITECTURES, options.workers):
        print(_line(one), flush=True)
        complaints += [one.complaint()] if one.complaint() else []
    print(f"{len(found)} programs; {len(complaints)} kernels beyond their bounds", *complaints, sep="\n")
    return 1 if complaints else 0


def _line(one: Measured) -> str:
    used = one.resources
    numbers = f"{used.registers:9} {used.local_bytes:6} {used.spill_stores:7} {used.static_shared:6}"
    return f"{numbers}  {one.architecture:7} {one.kernel}  ({one.variant.program})"


if __name__ == "__main__":
    sys.exit(main())
