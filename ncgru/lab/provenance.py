"""Where a figure comes from: versions, machine and commit, without names of users, hosts or folders."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import ncgru

_PACKAGE = Path(ncgru.__file__).parent


def provenance() -> dict[str, Any]:
    """What one needs to know to repeat a run, as JSON: versions, processor, GPUs, commit and date (UTC)."""
    return {
        "ncgru": ncgru.__version__,
        "commit": _commit(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": _platform(),
        "cpu": _cpu(),
        "cores": _cores(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "gpus": _gpus(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _commit() -> str | None:
    """Commit of the source tree, with "+dirty" if tracked files differ from it; None for an installed package.

    A package installed below somebody else's repository must not name that one, so git has to track this very file.
    """
    if _git("ls-files", "--error-unmatch", "provenance.py") is None:
        return None
    commit = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return None if commit is None else commit + ("+dirty" if changes else "")


def _git(*arguments: str) -> str | None:
    """What git prints for the package's folder, or None if it fails or is not there."""
    # Without optional locks: `git status` would else write to the index, and disturb whoever works in the tree.
    command = ["git", "--no-optional-locks", "-C", str(_PACKAGE / "lab"), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _platform() -> str:
    """System, kernel version in numbers and architecture; whoever builds a kernel may write a name into its release."""
    version = re.match(r"[\d.]+\d", platform.release())
    return " ".join(part for part in (platform.system(), version and version[0], platform.machine()) if part)


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine()


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpus() -> list[str]:
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
