"""A disk without room: an error in time, and the checkpoint before is still there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
# A file system of the test's own needs no rights where users may have their own name space of mounts.
MOUNT = ["unshare", "--mount", "--map-root-user", "sh", "-c", 'mount -t tmpfs -o size=160k tmpfs "$0" && exec "$@"']


def can_mount() -> bool:
    """Whether this machine lets us mount; where it does not, a limit on file sizes has to do."""
    try:
        return subprocess.run([*MOUNT, "/mnt", "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.parametrize("kind", ["limit", "tmpfs"] if can_mount() else ["limit"])
def test_full_disk_costs_no_checkpoint(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-m", "tests.lab.full_disk", kind, str(tmp_path)]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*MOUNT, str(tmp_path), *command] if kind == "tmpfs" else command,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    reason = "the disk is full; free some space" if kind == "tmpfs" else "a file may not become that large here"
    assert len(report["save"]) >= 6
    assert len(report["log"]) == 1
    for error in report["save"]:
        assert error.startswith("cannot write the checkpoint of step 30 (")
        assert reason in error
        assert error.endswith("(the checkpoint of step 20 is intact)")
    assert len(report["open"]) >= 3
    for error in report["log"] + report["open"]:
        assert error.startswith("cannot write ")
        assert reason in error
