"""One process at a time in a directory."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from ncgru.lab.durable import storage_error
from ncgru.lab.errors import RunInUseError

_ATTEMPTS = 5
_PAUSE = 0.02  # seconds; `is_held` of another process may have the lock for a moment


class Lock:
    """The lock of a directory, held from construction until `release`, or until the process ends, however it ends.

    Args:
        path: the lock's file, made if it is not there; it names the process that holds it.

    Raises:
        RunInUseError: if it is held already, also by this process.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise storage_error(f"write {path}", error) from error
        if not self._acquired_in_time():
            holder = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise RunInUseError(
                f"{path.parent} is in use by process {holder or '(unknown)'}; "
                "wait until it has ended, stop it, or choose another run directory"
            )
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            os.close(self._descriptor)
            raise storage_error(f"write {path}", error) from error

    def _acquired_in_time(self) -> bool:
        for _ in range(_ATTEMPTS):
            if _acquired(self._descriptor):
                return True
            time.sleep(_PAUSE)
        return False

    def release(self) -> None:
        """Let others in."""
        if self._descriptor >= 0:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = -1


def is_held(path: Path) -> bool:
    """Whether some process holds the lock whose file is `path`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _acquired(descriptor)
    finally:
        os.close(descriptor)


def _acquired(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
