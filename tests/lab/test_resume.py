"""A run that is stopped and resumed is the run that was not, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ncgru.lab.checkpoint import Checkpoint, load_latest, unflatten
from ncgru.lab.errors import LabError, OtherRecipeError
from ncgru.lab.recipes.recipe import OptimizerSpec, Recipe
from ncgru.lab.rundir import read_log
from ncgru.lab.trainer import train
from tests.lab.small_runs import MODELS, StopAfter, small_recipe, text_recipe, timeless_log


def checkpoint(path: Path) -> Checkpoint:
    found = load_latest(path / "checkpoints")
    assert found is not None
    return found


def state(path: Path) -> dict[str, Any]:
    """The last checkpoint's state without times."""
    found = checkpoint(path)
    whole: dict[str, Any] = unflatten(found.tensors, found.meta["state"])
    del whole["journal"]["seconds"]
    return whole


def assert_equal(mine: Any, other: Any, place: str = "state") -> None:
    """Equal to the last bit, whatever is nested how."""
    assert type(mine) is type(other), place
    if isinstance(mine, torch.Tensor):
        assert mine.dtype == other.dtype, place
        assert torch.equal(mine, other), place
    elif isinstance(mine, dict):
        assert list(mine) == list(other), place
        for key in mine:
            assert_equal(mine[key], other[key], f"{place}.{key}")
    elif isinstance(mine, (list, tuple)):
        assert len(mine) == len(other), place
        for index, (one, two) in enumerate(zip(mine, other, strict=True)):
            assert_equal(one, two, f"{place}.{index}")
    else:
        assert mine == other, place


def assert_resumes(recipe: Recipe, folder: Path, stops: list[int], device: str = "cpu") -> None:
    straight = train(recipe, folder / "straight", 3, device=device)
    assert straight.status == "finished"
    done = 0
    for steps in stops:
        result = train(recipe, folder / "pieces", 3, device=device, stop=StopAfter(steps))
        done += steps
        assert (result.status, result.step) == ("stopped", done)
    torch.manual_seed(random.randrange(1000))  # nothing may depend on what is outside
    result = train(recipe, folder / "pieces", 3, device=device)
    assert result._replace(seconds=0.0) == straight._replace(seconds=0.0)
    assert timeless_log(folder / "pieces") == timeless_log(folder / "straight")
    assert_equal(state(folder / "pieces"), state(folder / "straight"))


@pytest.mark.parametrize("model", MODELS)
def test_every_model_resumes_bit_for_bit(model: str, tmp_path: Path) -> None:
    stops = [random.randint(1, 11) for _ in range(2)]
    assert_resumes(small_recipe(model), tmp_path, stops)


@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop", "sgd"])
def test_every_optimiser_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    spec = OptimizerSpec(name=name, lr=0.01, momentum=0.9, weight_decay=1e-3, skew_lr=1e-3)
    assert_resumes(small_recipe(optimizer=spec, clip=0.1, precision="bfloat16"), tmp_path, [random.randint(1, 20)])


def test_text_resumes_bit_for_bit_with_dropouts_and_carried_state(tmp_path: Path) -> None:
    stops = [random.randint(1, 12) for _ in range(3)]
    assert_resumes(text_recipe(tmp_path / "fox.txt"), tmp_path, stops)


def test_the_global_random_state_is_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    train(text_recipe(tmp_path / "fox.txt", steps=3), tmp_path / "run", 0)
    assert torch.equal(torch.rand(3), wanted)


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    recipe = small_recipe(steps=8)
    result = train(recipe, tmp_path / "run", 0)
    records = read_log(tmp_path / "run")
    assert train(recipe, tmp_path / "run", 0) == result
    assert read_log(tmp_path / "run") == records


def test_a_begun_run_is_refused_where_it_shall_not_be_resumed(tmp_path: Path) -> None:
    train(small_recipe(), tmp_path / "run", 0, stop=StopAfter(2))
    with pytest.raises(LabError, match="has begun; resume it"):
        train(small_recipe(), tmp_path / "run", 0, resume=False)


def test_another_recipe_is_refused(tmp_path: Path) -> None:
    train(small_recipe(), tmp_path / "run", 0, stop=StopAfter(2))
    with pytest.raises(OtherRecipeError, match="clip"):
        train(small_recipe(clip=1.0), tmp_path / "run", 0)


def test_a_damaged_checkpoint_is_named_in_the_log_and_the_one_before_it_used(tmp_path: Path) -> None:
    recipe = small_recipe()
    train(recipe, tmp_path / "straight", 0)
    train(recipe, tmp_path / "run", 0, stop=StopAfter(12))
    newest = tmp_path / "run" / "checkpoints" / "step-00000012.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    train(recipe, tmp_path / "run", 0)
    starts = [record for record in read_log(tmp_path / "run") if record["kind"] == "start"]
    assert [start["step"] for start in starts] == [0, 10]
    assert newest.name in starts[1]["warnings"][0]
    assert timeless_log(tmp_path / "run") == timeless_log(tmp_path / "straight")


def test_a_checkpoint_holds_what_made_it(tmp_path: Path) -> None:
    recipe = small_recipe(steps=5)
    train(recipe, tmp_path / "run", 0)
    meta = checkpoint(tmp_path / "run").meta
    assert Recipe.from_dict(meta["recipe"]) == recipe
    assert meta["provenance"]["torch"] == str(torch.__version__)
