"""Runs that go on in other processes, told to a listener from their logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ncgru.lab.journal import Listener
from ncgru.lab.jsontext import decode_not_finite
from ncgru.lab.lock import is_held
from ncgru.lab.recipes.recipe import Recipe


class Follower:
    """Tells a listener what another process writes into a run's log; not how the run ends.

    Args:
        recipe: of the run.
        seed: of the run.
        path: the run's directory.
        listener: who is told.
    """

    def __init__(self, recipe: Recipe, seed: int, path: Path, listener: Listener) -> None:
        self.recipe = recipe
        self.seed = seed
        self.path = path
        self.listener = listener
        self._read = 0
        self._started = False

    def look(self) -> None:
        """Tell what has been written since the last look; nothing as long as no process works on the run."""
        # A log that lies there from an earlier sitting is cut back before the run goes on.
        if not self._started and not is_held(self.path / "lock"):
            return
        records = self._new_records()
        if not self._started:
            starts = [record["step"] for record in records if record.get("kind") == "start"]
            if not starts:
                return
            self._started = True
            self.listener.on_start(self.recipe, self.seed, starts[-1], self.recipe.steps, None)
        for record in records:
            if record.get("kind") != "end":
                self.listener.on_record(record)
        if records:
            self.listener.on_step(records[-1]["step"])

    def _new_records(self) -> list[dict[str, Any]]:
        """The whole lines behind those that were read; after a lost worker the log may have become shorter."""
        try:
            with (self.path / "log.jsonl").open("rb") as log:
                self._read = min(self._read, log.seek(0, 2))
                log.seek(self._read)
                lines = log.read().split(b"\n")
        except OSError:
            return []
        self._read += sum(len(line) + 1 for line in lines[:-1])
        return [record for line in lines[:-1] if (record := _record(line)) is not None]


def _record(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None for the rest of one, where a log was cut back and has grown again."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return decode_not_finite(record) if isinstance(record, dict) and "step" in record else None
