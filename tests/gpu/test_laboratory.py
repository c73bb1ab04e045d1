"""Runs of the laboratory on a GPU: what is resumed is what was not stopped, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ncgru.lab.engines import run_many
from ncgru.lab.rundir import read_log
from ncgru.lab.trainer import train
from tests.lab.small_runs import MODELS, small_recipe, text_recipe
from tests.lab.test_resume import assert_resumes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("model", MODELS)
def test_every_model_resumes_bit_for_bit(model: str, tmp_path: Path) -> None:
    stops = [random.randint(1, 11) for _ in range(2)]
    assert_resumes(small_recipe(model), tmp_path, stops, device="cuda")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_text_resumes_bit_for_bit_with_dropouts_and_carried_state(precision: str, tmp_path: Path) -> None:
    stops = [random.randint(1, 12) for _ in range(3)]
    assert_resumes(text_recipe(tmp_path / "fox.txt", precision=precision), tmp_path, stops, device="cuda")


def test_the_log_names_the_gpu_and_a_run_may_move_to_the_cpu(tmp_path: Path) -> None:
    run_many([small_recipe(steps=10)], (0,), root=tmp_path, device="cuda")
    path = tmp_path / "small" / "nc-gru-c" / "seed-0"
    (start,) = [record for record in read_log(path) if record["kind"] == "start"]
    assert start["device"].startswith("cuda")
    assert start["provenance"]["gpus"]
    assert train(small_recipe(), path, 0, allow_other_recipe=True).step == 24
