"""Every kernel of the package compiles for every architecture, and keeps to the local memory recorded for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ncgru._cuda import ARCHITECTURES, Resources, Variant
from ncgru._cuda.variants import Measured, measure, packages, variants
from tests.cuda_support.variants import SIMPLE, STARVED


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("package", packages())
def test_kernels_keep_to_their_bounds(package: str, architecture: str) -> None:
    listed = variants(package)
    measured = list(measure(listed, [architecture]))
    assert listed
    assert {one.variant for one in measured} == set(listed)
    assert [complaint for one in measured if (complaint := one.complaint())] == []


def test_measures_every_kernel_of_every_variant() -> None:
    measured = list(measure([Variant(SIMPLE), Variant(STARVED)], ["sm_80", "sm_90"], workers=2))
    assert len(measured) == len({one[:3] for one in measured}) == 2 * 2 * 5
    complaints = [one.complaint() for one in measured if one.complaint()]
    assert len(complaints) == 2
    assert "hungry of tests.cuda_support/simple.cu FACTOR=2 --maxrregcount=24 takes" in str(complaints[0])


def test_a_bound_may_be_used_up_but_not_exceeded() -> None:
    resources = Resources(registers=255, local_bytes=16, spill_stores=12, spill_loads=20, static_shared=0)
    measured = Measured(Variant(SIMPLE, local_bytes=16), "sm_90", "scale", resources)
    assert measured.complaint() is None
    assert Measured(Variant(SIMPLE, local_bytes=15), "sm_90", "scale", resources).complaint() == (
        "scale of tests.cuda_support/simple.cu FACTOR=2 takes 16 bytes of local memory a thread on sm_90 "
        "(12 bytes of spills), but its bound is 15"
    )


def test_the_command_reports_every_kernel_and_fails_for_those_beyond_their_bounds() -> None:
    command = [sys.executable, "-m", "ncgru._cuda", "tests.cuda_support", "--architecture", "sm_90"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert len([line for line in lines if "  sm_90 " in line]) == 2 * 5
    assert "2 programs; 1 kernels beyond their bounds" in lines
    assert lines[-1].startswith("hungry of tests.cuda_support/simple.cu")
