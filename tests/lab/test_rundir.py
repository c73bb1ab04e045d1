"""Run directories: what they hold, and whom they refuse."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ncgru.lab.checkpoint import save
from ncgru.lab.errors import CheckpointError, LabError, OtherRecipeError, RunInUseError
from ncgru.lab.rundir import RunDirectory, check_run, differences, read_log, read_recipe, run_path, run_status
from tests.lab.toy_run import ToyRecipe

X = {"x": torch.ones(1)}


def start(path: Path, steps: int = 4, **end: Any) -> None:
    """A run with a log record a step and a checkpoint every second one."""
    with RunDirectory.open(path, ToyRecipe(), seed=3) as run:
        run.restore()
        for step in range(1, steps + 1):
            run.append({"kind": "train", "step": step, "loss": 1 / step})
            if step % 2 == 0:
                run.save(step, X, {"step": step})
        if end:
            run.append({"kind": "end", **end})


def contents(path: Path) -> dict[str, bytes]:
    """Every file below `path` but for the lock."""
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name != "lock"}


def test_path_follows_the_name_of_the_recipe(tmp_path: Path) -> None:
    assert run_path(tmp_path, "adding-200/nc-gru-c@quick", 7) == tmp_path / "adding-200" / "nc-gru-c@quick" / "seed-7"


@pytest.mark.parametrize("name", ["", "/etc", "../up", "a//b", "a/..", "a/.hidden", "a b", "a\\b", "a/"])
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="recipe_name must be words joined by '/'"):
        run_path("runs", name, 0)


def test_new_run_has_its_recipe_and_an_empty_log(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "seed-3"
    with RunDirectory.open(path, ToyRecipe(sizes=(1, 2)), seed=3) as run:
        assert run.status == "new"
        assert run_status(path) == "running"
        assert run.restore() is None
        assert (run.path, run.seed) == (path, 3)
    assert run_status(path) == "new"
    document = json.loads((path / "recipe.json").read_bytes())
    recipe = ToyRecipe(sizes=[1, 2]).to_dict()
    assert document == {"format": 1, "seed": 3, **recipe}
    assert read_recipe(path) == (recipe, 3)
    assert contents(path).keys() == {"recipe.json", "log.jsonl"}


@pytest.mark.parametrize("status", ["finished", "failed", "stopped"])
def test_status_is_that_of_the_end(tmp_path: Path, status: str) -> None:
    start(tmp_path / "run", status=status)
    assert run_status(tmp_path / "run") == status
    with RunDirectory.open(tmp_path / "run", ToyRecipe(), seed=3) as run:
        assert run.status == status


def test_status_without_an_end_is_interrupted(tmp_path: Path) -> None:
    start(tmp_path / "run")
    assert run_status(tmp_path / "run") == "interrupted"
    assert run_status(tmp_path / "nothing") == "new"


def test_resume_cuts_the_log_back_to_the_checkpoint(tmp_path: Path) -> None:
    start(tmp_path / "run", steps=5, status="stopped")
    with RunDirectory.open(tmp_path / "run", ToyRecipe(), seed=3) as run:
        found = run.restore()
        assert found is not None
        assert (found.step, found.meta, found.warnings) == (4, {"step": 4}, ())
        assert [record["step"] for record in read_log(run.path)] == [1, 2, 3, 4]
        assert run.status == "interrupted"
        run.append({"kind": "train", "step": 5})
    assert [record["step"] for record in read_log(tmp_path / "run" / "log.jsonl")] == [1, 2, 3, 4, 5]


def test_resume_from_the_checkpoint_before_a_damaged_one_cuts_further(tmp_path: Path) -> None:
    start(tmp_path / "run", steps=5)
    (tmp_path / "run" / "checkpoints" / "step-00000004.safetensors").write_bytes(b"")
    with RunDirectory.open(tmp_path / "run", ToyRecipe(), seed=3) as run:
        found = run.restore()
        assert found is not None
        assert found.step == 2
        assert "step-00000004.json is refused" in found.warnings[0]
        assert [record["step"] for record in read_log(run.path)] == [1, 2]


def test_without_a_checkpoint_the_log_begins_anew(tmp_path: Path) -> None:
    start(tmp_path / "run", steps=1)
    with RunDirectory.open(tmp_path / "run", ToyRecipe(), seed=3) as run:
        assert run.restore() is None
        assert read_log(run.path) == []


def test_all_damaged_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    start(tmp_path / "run", steps=5)
    for path in (tmp_path / "run" / "checkpoints").glob("*.safetensors"):
        path.write_bytes(b"")
    before = contents(tmp_path / "run")
    with (
        RunDirectory.open(tmp_path / "run", ToyRecipe(), seed=3) as run,
        pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used"),
    ):
        run.restore()
    assert contents(tmp_path / "run") == before


def test_lost_log_is_told(tmp_path: Path) -> None:
    start(tmp_path / "run")
    (tmp_path / "run" / "log.jsonl").write_bytes(b'{"kind":"train"}\n')
    with RunDirectory.open(tmp_path / "run", ToyRecipe(), seed=3) as run:
        found = run.restore()
    assert found is not None
    assert found.step == 4
    assert [warning for warning in found.warnings if "log.jsonl has lost" in warning]


def test_a_checkpoint_of_no_run_is_refused(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", ToyRecipe(), seed=3) as run:
        save(run.checkpoints_path, 1, X, {})
        with pytest.raises(CheckpointError, match="was not saved by a run"):
            run.restore()


def test_second_opening_by_the_same_process_is_refused(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", ToyRecipe(), seed=3) as run:
        with pytest.raises(RunInUseError, match=f"in use by process {os.getpid()};"):
            RunDirectory.open(tmp_path / "run", ToyRecipe(), seed=3)
        run.append({"kind": "train", "step": 1})
        run.close()
        run.close()
    RunDirectory.open(tmp_path / "run", ToyRecipe(), seed=3).close()


def test_other_recipe_is_refused_with_the_fields_that_differ(tmp_path: Path) -> None:
    start(tmp_path / "run")
    before = contents(tmp_path / "run")
    other = ToyRecipe(steps=5, optimizer={"name": "adam", "lr": 0.5}, clip=1.0)
    with pytest.raises(OtherRecipeError) as caught:
        RunDirectory.open(tmp_path / "run", other, seed=3)
    assert str(caught.value).splitlines() == [
        f"{tmp_path / 'run'} holds a run of another recipe:",
        "  steps: 1000000 there, 5 asked for",
        "  optimizer.lr: 0.01 there, 0.5 asked for",
        "  clip: '(none)' there, 1.0 asked for",
        "choose another run directory, or allow another recipe to go on with this one",
    ]
    assert contents(tmp_path / "run") == before
    with RunDirectory.open(tmp_path / "run", other, seed=3, allow_other_recipe=True) as run:
        found = run.restore()
        assert found is not None
        assert found.step == 4
    assert read_recipe(tmp_path / "run").recipe == other.to_dict()
    RunDirectory.open(tmp_path / "run", other, seed=3).close()


def test_a_run_can_be_checked_without_a_touch(tmp_path: Path) -> None:
    check_run(tmp_path / "new", ToyRecipe(), 3)
    assert not (tmp_path / "new").exists()
    start(tmp_path / "run")
    before = contents(tmp_path)
    check_run(tmp_path / "run", ToyRecipe(), 3)
    with pytest.raises(OtherRecipeError, match="steps: 1000000 there, 5 asked for"):
        check_run(tmp_path / "run", ToyRecipe(steps=5), 3)
    check_run(tmp_path / "run", ToyRecipe(steps=5), 3, allow_other_recipe=True)
    with pytest.raises(LabError, match="is not empty and not a run directory"):
        check_run(tmp_path, ToyRecipe(), 3)
    assert contents(tmp_path) == before


def test_other_seed_is_refused_whatever_is_allowed(tmp_path: Path) -> None:
    start(tmp_path / "run")
    with pytest.raises(OtherRecipeError, match=r"seed: 3 there, 4 asked for\nchoose another run directory$"):
        RunDirectory.open(tmp_path / "run", ToyRecipe(), seed=4, allow_other_recipe=True)


def test_fields_that_a_run_does_not_depend_on_may_differ(tmp_path: Path) -> None:
    RunDirectory.open(tmp_path, ToyRecipe(seeds=(1,), note="one", paper=None), seed=1).close()
    RunDirectory.open(tmp_path, ToyRecipe(seeds=(1, 2), note="two", paper={"value": 1}), seed=1).close()
    with pytest.raises(OtherRecipeError):
        RunDirectory.open(tmp_path, ToyRecipe(optimizer={"note": "another field of that name"}), seed=1)


def test_differences_see_types_and_lists() -> None:
    there = {"a": 1, "b": {"c": [1, 2], "d": 0}, "e": True, "gone": None}
    wanted = {"a": 1.0, "b": {"c": [1, 3], "d": 0}, "e": 1}
    assert differences(there, wanted) == [
        ("a", 1, 1.0),
        ("b.c", [1, 2], [1, 3]),
        ("e", True, 1),
        ("gone", None, "(none)"),
    ]
    assert differences(there, there) == []


@pytest.mark.parametrize("below", ["", "seed-0", "a/seed-0"])
def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(LabError, match=r"file.* is a file"):
        RunDirectory.open(tmp_path / "file" / below, ToyRecipe(), seed=0)
    assert contents(tmp_path) == {"file": b"mine"}


def test_folder_of_something_else_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(LabError, match="is not empty and not a run directory"):
        RunDirectory.open(tmp_path, ToyRecipe(), seed=0)
    assert os.listdir(tmp_path) == ["thesis.txt"]
    with pytest.raises(LabError, match=r"is not a run directory: it has no recipe\.json"):
        read_recipe(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "it is not JSON"),
        ("[]", "is not in format 1"),
        ('{"format": 2, "seed": 0}', "is not in format 1"),
        ('{"format": 1}', "lacks the seed"),
    ],
)
def test_damaged_recipe_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "recipe.json").write_text(text)
    with pytest.raises(LabError, match=message):
        RunDirectory.open(tmp_path, ToyRecipe(), seed=0)
    assert (tmp_path / "recipe.json").read_text() == text


def test_opening_that_was_killed_early_can_be_repeated(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("12345\n")
    (tmp_path / ".recipe.json.tmp").write_text('{"form')
    RunDirectory.open(tmp_path, ToyRecipe(), seed=0).close()
    assert read_recipe(tmp_path).seed == 0


@pytest.fixture
def guarded() -> Iterator[Path]:
    """A folder in which this process may not write, also if it began as root."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run").mkdir()
        for path in (folder / "run", folder):
            path.chmod(0o555)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            yield folder
        finally:
            os.seteuid(user)
            for path in (folder, folder / "run"):
                path.chmod(0o755)


@pytest.mark.parametrize("name", ["run", "new", "new/seed-0"])
def test_unwritable_directory_is_refused(guarded: Path, name: str) -> None:
    with pytest.raises(
        LabError, match=r"cannot (write|make) .*access is denied; choose a folder in which you may write"
    ):
        RunDirectory.open(guarded / name, ToyRecipe(), seed=0)
    assert os.listdir(guarded) == ["run"]
    assert os.listdir(guarded / "run") == []


def test_recipe_that_json_cannot_hold_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"recipe\.task must be something JSON can hold, got object"):
        RunDirectory.open(tmp_path / "run", ToyRecipe(task=object()), seed=0)
    assert os.listdir(tmp_path) == []
