"""The log of a run: one JSON object a line, added to at the end and cut back to a checkpoint on resume."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ncgru.lab.durable import storage_error
from ncgru.lab.errors import LabError
from ncgru.lab.jsontext import decode_not_finite, dumps, encode_not_finite, plain


class Log:
    """A log open for writing; each record reaches the operating system at once, so a killed process loses none.

    Args:
        path: made if it is not there; a torn last line is cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self.truncate(_whole_lines(path))
        except OSError as error:
            raise storage_error(f"write {path}", error) from error

    @property
    def size(self) -> int:
        """Bytes written: what a checkpoint remembers."""
        return os.fstat(self._descriptor).st_size

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one record; NaN and infinities become the strings that `read_log` turns back.

        Raises:
            LabError: if it cannot be written (say, as the disk is full); the log is as it was before then.
        """
        line = (dumps(encode_not_finite(plain(record, "record"))) + "\n").encode()
        before = self.size
        try:
            written = os.write(self._descriptor, line)
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
        except OSError as error:
            os.ftruncate(self._descriptor, before)
            raise storage_error(f"write {self.path}", error) from error

    def sync(self) -> int:
        """Flush to the disk and return the size."""
        os.fsync(self._descriptor)
        return self.size

    def truncate(self, size: int) -> None:
        """Cut the log back to `size` bytes; a shorter one stays as it is."""
        if size < self.size:
            os.ftruncate(self._descriptor, size)

    def close(self) -> None:
        """Flush and close."""
        if self._descriptor >= 0:
            os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1


def read_log(path: Path | str) -> list[dict[str, Any]]:
    """The records of a log, also while it is written to; a torn last line is left out.

    Args:
        path: the log, or the run directory in which it lies.

    Raises:
        LabError: if there is no log, or a line before the last is damaged.
    """
    path = Path(path)
    path = path / "log.jsonl" if path.is_dir() else path
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise storage_error(f"read {path}", error) from error
    if not lines[-1]:
        lines.pop()
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            records.append(decode_not_finite(record))
        elif number < len(lines):
            raise LabError(f"line {number} of {path} is damaged: {line[:60]!r}; mend it or remove the line")
    return records


def _whole_lines(path: Path) -> int:
    """Bytes up to the end of the last whole line."""
    return path.read_bytes().rfind(b"\n") + 1
