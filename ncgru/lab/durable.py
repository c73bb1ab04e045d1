"""Files that are there whole or not at all, whatever happens to the process, the disk or the power."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from pathlib import Path

from ncgru.lab.errors import LabError

TEMPORARY = re.compile(r"\..+\.tmp")
"""Names of files that were being written; one that is left over belongs to a process that was killed."""

_ADVICE = {
    errno.ENOSPC: "the disk is full; free some space and start again to resume",
    errno.EDQUOT: "the disk quota is used up; free some space and start again to resume",
    errno.EFBIG: "a file may not become that large here; raise the limit (ulimit -f) and start again to resume",
    errno.EACCES: "access is denied; choose a folder in which you may write",
    errno.EPERM: "access is denied; choose a folder in which you may write",
    errno.EROFS: "the disk is read-only; choose a folder in which you may write",
    errno.ENOTDIR: "a part of this path is a file; choose another folder",
    errno.EEXIST: "there is a file of that name; choose another folder",
    errno.EISDIR: "there is a folder of that name; remove it or choose another one",
}


def storage_error(action: str, error: OSError, kept: str = "") -> LabError:
    """The error to raise when `action`, such as "write <path>", has failed; `kept` says what is not lost."""
    advice = _ADVICE.get(error.errno or 0) or f"{error.strerror or error}; check the disk"
    return LabError(f"cannot {action}: {advice}" + (f" ({kept})" if kept else ""))


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` survive a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Put `content` at `path`: at any moment the file there is the old one or the new one, never a part of it.

    Raises:
        OSError: if it cannot be written; what was at `path` is still there then.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_directory(path.parent)
