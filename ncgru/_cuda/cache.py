"""Machine code kept on disk, so that each kernel is compiled once a machine and not once a process.

An entry is a file that appears whole or not at all, carries its own checksum, and is named by everything that it
depends on: so nothing is ever stale, and any number of processes may read and write at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

LIMIT = 256 * 2**20
"""Bytes that all entries together may take; the least recently used are removed first."""

_MAGIC = b"ncgru machine code 1\n"
_DIGEST = hashlib.sha256().digest_size
_SUFFIX, _TEMPORARY = ".cubin", ".partial"
_ABANDONED = 3600.0
"""Seconds after which an unfinished file belongs to a process that was killed."""


def default_folder() -> Path:
    """NCGRU_CACHE, else `ncgru` in the user's cache folder.

    Raises:
        RuntimeError: the user has no home folder.
    """
    chosen = os.environ.get("NCGRU_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return Path(local or Path.home() / "AppData" / "Local") / "ncgru" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "ncgru"
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says to ignore a relative path.
    return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "ncgru"


class Cache:
    """Entries in a folder. Where it cannot be used, nothing is found and nothing is kept: never an error.

    Attributes:
        folder: where the entries are; None if there is no such place.
        problem: why an entry could not be read or kept the last time, or None.
    """

    def __init__(self, folder: Path | None = None, limit: int = LIMIT) -> None:
        self.problem: str | None = None
        self._limit = limit
        self.folder = folder
        if folder is None:
            try:
                self.folder = default_folder()
            except RuntimeError as error:
                self.problem = str(error)

    def load(self, key: str) -> bytes | None:
        """The entry of this key, or None if there is none or it is damaged."""
        if self.folder is None:
            return None
        path = self.folder / (key + _SUFFIX)
        try:
            found = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self.problem = str(error)
            return None
        content = found[len(_MAGIC) + _DIGEST :]
        if found[: len(_MAGIC) + _DIGEST] != _MAGIC + hashlib.sha256(content).digest():
            self.problem = f"{path} was damaged"
            return None
        with contextlib.suppress(OSError):  # its time says when it was last of use
            os.utime(path)
        return content

    def store(self, key: str, content: bytes) -> bool:
        """Keep an entry, replacing what was there; whether that worked."""
        if self.folder is None:
            return False
        try:
            # Others must not be able to put code here.
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write(self.folder / (key + _SUFFIX), _MAGIC + hashlib.sha256(content).digest() + content)
            self._prune(key + _SUFFIX)
        except OSError as error:
            self.problem = str(error)
            return False
        return True

    def summary(self) -> dict[str, object]:
        """The folder, how much is in it, and whether it can be used, tried out just now."""
        entries: list[tuple[float, int, Path]] = []
        if self.folder is not None:
            self._try_out(self.folder)
            with contextlib.suppress(OSError):
                entries = list(self._entries())
        return {
            "folder": None if self.folder is None else str(self.folder),
            "entries": len(entries),
            "bytes": sum(size for _, size, _ in entries),
            "problem": self.problem,
        }

    def _try_out(self, folder: Path) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, suffix=_TEMPORARY):
                pass
        except OSError as error:
            self.problem = str(error)

    def _write(self, path: Path, content: bytes) -> None:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=_TEMPORARY)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        """Last use, size and path of each entry. Another process may remove one meanwhile."""
        assert self.folder is not None
        for path in self.folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                yield status.st_mtime, status.st_size, path

    def _prune(self, newest: str) -> None:
        """Remove the least recently used entries beyond the limit, and what killed processes have left."""
        assert self.folder is not None
        entries = sorted(self._entries())
        excess = sum(size for _, size, _ in entries) - self._limit
        for _, size, path in entries:
            if excess <= 0:
                break
            if path.name != newest:
                path.unlink(missing_ok=True)
                excess -= size
        for path in self.folder.glob(f"*{_TEMPORARY}"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - _ABANDONED:
                    path.unlink()
