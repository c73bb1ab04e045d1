"""The directory of one run: its recipe, log and checkpoints, used by one process at a time.

recipe.json                          {"format": 1, "seed": k, "recipe": {...}}
log.jsonl                            what happened, see `RunDirectory.append`
checkpoints/step-00001000.json       and .safetensors, the last two
tensorboard/                         event files
lock                                 held while a process works here
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from torch import Tensor

from ncgru.lab import checkpoint as checkpoints
from ncgru.lab.checkpoint import Checkpoint
from ncgru.lab.durable import replace_file, storage_error
from ncgru.lab.errors import CheckpointError, LabError, OtherRecipeError
from ncgru.lab.jsontext import dumps, plain
from ncgru.lab.lock import Lock, is_held
from ncgru.lab.log import Log, read_log

__all__ = [
    "RunDirectory",
    "SavedRecipe",
    "check_run",
    "differences",
    "read_log",
    "read_recipe",
    "run_path",
    "run_status",
]

FORMAT = 1
_ADDED = ("format", "seed")
_LOG_BYTES = "log_bytes"
_PART = re.compile(r"[A-Za-z0-9_@+][A-Za-z0-9_@+.,=-]*")
_IRRELEVANT = ("note", "paper", "seeds")
"""Fields of a recipe on which a single run does not depend."""


class Recipe(Protocol):
    """What a run directory needs of a recipe."""

    def to_dict(self) -> dict[str, Any]:
        """The recipe as JSON."""


class SavedRecipe(NamedTuple):
    """What stands in a run's recipe.json: the recipe as `to_dict` gave it, and the seed."""

    recipe: dict[str, Any]
    seed: int


def run_path(root: Path | str, recipe_name: str, seed: int) -> Path:
    """Where the run of a recipe with a seed lies under `root`."""
    for part in recipe_name.split("/"):
        if not _PART.fullmatch(part):
            raise ValueError(f"recipe_name must be words joined by '/', got {recipe_name!r}; rename the recipe")
    return Path(root, *recipe_name.split("/"), f"seed-{seed}")


class RunDirectory:
    """A run directory open for work; `open` makes one. Also a context manager that closes it.

    Attributes:
        path: the directory.
        seed: of the run.
    """

    def __init__(self, path: Path, seed: int, lock: Lock) -> None:
        self.path = path
        self.seed = seed
        self._lock = lock
        self._log = Log(self.log_path)

    @classmethod
    def open(cls, path: Path | str, recipe: Recipe, seed: int, *, allow_other_recipe: bool = False) -> Self:
        """Open the run at `path`, or make it.

        Args:
            path: the run's own directory, such as `run_path` gives.
            recipe: what is to be run.
            seed: with which seed.
            allow_other_recipe: go on with `recipe` if another one is there, and write it down.

        Raises:
            OtherRecipeError: if another recipe or seed is there; the text shows the fields that differ.
            RunInUseError: if another process works there.
            LabError: if `path` is a file, cannot be written to, or holds something else.
        """
        path = Path(path)
        wanted = _saved(recipe, seed)
        try:
            _check_place(path)
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(f"make the run directory {path}", error) from error
        lock = Lock(path / "lock")
        try:
            _settle_recipe(path, wanted, allow_other_recipe)
            return cls(path, seed, lock)
        except BaseException:
            lock.release()
            raise

    @property
    def log_path(self) -> Path:
        """The log's file."""
        return self.path / "log.jsonl"

    @property
    def checkpoints_path(self) -> Path:
        """Where the checkpoints lie."""
        return self.path / "checkpoints"

    @property
    def tensorboard_path(self) -> Path:
        """Where TensorBoard's event files go."""
        return self.path / "tensorboard"

    @property
    def status(self) -> str:
        """How the run stands by its log: "new", "interrupted", "finished", "failed" or "stopped"."""
        return _status(self.log_path)

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a record to the log.

        Args:
            record: with "kind" ("start", "train", "eval", "matrix", "gradients" or "end") and what belongs to it.
        """
        if not isinstance(record.get("kind"), str):
            raise ValueError(f"record must have a 'kind' of type str, got {record.get('kind')!r}; name what it records")
        self._log.append(record)

    def save(self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
        """Write a checkpoint that remembers how far the log has come; see `checkpoint.save`."""
        try:
            log_bytes = self._log.sync()
        except OSError as error:
            raise storage_error(f"write {self.log_path}", error) from error
        return checkpoints.save(self.checkpoints_path, step, tensors, {**meta, _LOG_BYTES: log_bytes})

    def restore(self) -> Checkpoint | None:
        """The newest whole checkpoint, with the log cut back to it; None, and an empty log, if there is none yet.

        Raises:
            CheckpointError: if there are checkpoints, but all are damaged; nothing is changed then.
        """
        found = checkpoints.load_latest(self.checkpoints_path)
        if found is None:
            self._log.truncate(0)
            return None
        log_bytes = found.meta.pop(_LOG_BYTES, None)
        if not isinstance(log_bytes, int):
            raise CheckpointError(
                f"{found.path} was not saved by a run: it does not say how long the log was; remove it"
            )
        if log_bytes > self._log.size:
            lost = f"{self.log_path} has lost {log_bytes - self._log.size} bytes since {found.path.name} was written"
            found = replace(found, warnings=(*found.warnings, lost))
        self._log.truncate(log_bytes)
        return found

    def close(self) -> None:
        """Flush the log and let other processes in; closing twice is harmless."""
        self._log.close()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def check_run(path: Path | str, recipe: Recipe, seed: int, *, allow_other_recipe: bool = False) -> None:
    """Raise what `RunDirectory.open` would say of the place and of the recipe there, and touch nothing.

    So the last of many runs can be refused before the first one has been trained.
    """
    path = Path(path)
    try:
        _check_place(path)
    except OSError as error:
        raise storage_error(f"read the run directory {path}", error) from error
    _is_settled(path, _saved(recipe, seed), allow_other_recipe)


def run_status(path: Path | str) -> str:
    """How the run in a directory stands: as `RunDirectory.status`, or "running" while some process works there."""
    path = Path(path)
    return "running" if is_held(path / "lock") else _status(path / "log.jsonl")


def read_recipe(path: Path | str) -> SavedRecipe:
    """The recipe and the seed of the run in the directory `path`.

    Raises:
        LabError: if there is none, or it is damaged.
    """
    file = Path(path) / "recipe.json"
    try:
        document = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise LabError(
            f"{path} is not a run directory: it has no recipe.json; pass one that `ncgru train` made"
        ) from None
    except OSError as error:
        raise storage_error(f"read {file}", error) from error
    except (ValueError, RecursionError):
        raise LabError(f"{file} is damaged: it is not JSON; put back a copy, or choose another run directory") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise LabError(f"{file} is not in format {FORMAT}, which this version reads; choose another run directory")
    if not isinstance(document.get("seed"), int):
        raise LabError(f"{file} is damaged: it lacks the seed; put back a copy, or choose another run directory")
    return SavedRecipe({key: value for key, value in document.items() if key not in _ADDED}, document["seed"])


def differences(there: object, wanted: object, place: str = "") -> list[tuple[str, object, object]]:
    """The fields in which two JSON values differ, as (dotted name, there, wanted); "(none)" for no such field."""
    if not (isinstance(there, dict) and isinstance(wanted, dict)):
        same = type(there) is type(wanted) and there == wanted
        return [] if same else [(place, there, wanted)]
    found: list[tuple[str, object, object]] = []
    for key in [*wanted, *(key for key in there if key not in wanted)]:
        found += differences(there.get(key, "(none)"), wanted.get(key, "(none)"), f"{place}.{key}" if place else key)
    return found


def _check_place(path: Path) -> None:
    """Raise if `path` is a file or a folder of something else, before anything is written there."""
    if path.is_dir():
        if not (path / "recipe.json").exists() and set(p.name for p in path.iterdir()) - {"lock", ".recipe.json.tmp"}:
            raise LabError(f"{path} is not empty and not a run directory (no recipe.json); choose another one")
    elif path.exists() or path.is_symlink():
        raise LabError(f"{path} is a file, but a run needs a directory; choose another one")


def _saved(recipe: Recipe, seed: int) -> SavedRecipe:
    """What is to stand in recipe.json."""
    fields = plain(recipe.to_dict(), "recipe")
    return SavedRecipe({key: value for key, value in fields.items() if key not in _ADDED}, seed)


def _is_settled(path: Path, wanted: SavedRecipe, allow_other: bool) -> bool:
    """Whether the recipe is written down already; raise if another one is that may not be replaced."""
    if not (path / "recipe.json").exists():
        return False
    there = read_recipe(path)
    found = [
        difference
        for difference in differences(there._asdict(), wanted._asdict())
        if difference[0].removeprefix("recipe.").split(".")[0] not in _IRRELEVANT
    ]
    if found and (not allow_other or there.seed != wanted.seed):
        raise OtherRecipeError(_other_recipe(path, found, there.seed != wanted.seed))
    return not found


def _settle_recipe(path: Path, wanted: SavedRecipe, allow_other: bool) -> None:
    """Write the recipe down, or compare it with the one that is there."""
    if _is_settled(path, wanted, allow_other):
        return
    document = {"format": FORMAT, "seed": wanted.seed, **wanted.recipe}
    try:
        replace_file(path / "recipe.json", (dumps(document) + "\n").encode())
    except OSError as error:
        raise storage_error(f"write {path / 'recipe.json'}", error) from error


def _other_recipe(path: Path, found: list[tuple[str, object, object]], other_seed: bool) -> str:
    lines = [
        f"  {field.removeprefix('recipe.')}: {there!r} there, {wanted!r} asked for" for field, there, wanted in found
    ]
    advice = "choose another run directory" + ("" if other_seed else ", or allow another recipe to go on with this one")
    return "\n".join([f"{path} holds a run of another recipe:", *lines, advice])


def _status(log: Path) -> str:
    records = read_log(log) if log.exists() else []
    if not records:
        return "new"
    last = records[-1]
    return str(last.get("status")) if last.get("kind") == "end" else "interrupted"
