"""Two processes under torchrun make the steps that one makes with the joint batch, and only the first writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ncgru.lab.distributed import Ranks, checked_device, process_group
from ncgru.lab.rundir import read_log
from ncgru.lab.trainer import Trainer, train
from tests.lab.rank_runs import MODELS, STEPS
from tests.lab.small_runs import small_recipe, timeless_log

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes have left their traces."""
    folder = tmp_path_factory.mktemp("ranks")
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tests.lab.rank_runs", str(folder)]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.parametrize("model", MODELS)
def test_two_processes_are_one_with_the_joint_batch(model: str, folder: Path) -> None:
    alone = Trainer(small_recipe(model, clip=0.5), 0)
    for _ in range(STEPS):
        alone.advance()
    shared = load_file(folder / f"{model}-rank-0.safetensors")
    for name, tensor in alone.model.state_dict().items():
        torch.testing.assert_close(shared[name], tensor, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("model", MODELS)
def test_both_processes_hold_the_same_model_to_the_last_bit(model: str, folder: Path) -> None:
    first, second = (load_file(folder / f"{model}-rank-{rank}.safetensors") for rank in (0, 1))
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_log_is_that_of_one_process_to_rounding(folder: Path, tmp_path: Path) -> None:
    train(small_recipe(), tmp_path / "alone", 0)
    alone, shared = timeless_log(tmp_path / "alone"), timeless_log(folder / "straight")
    assert [(record["kind"], record["step"]) for record in shared] == [(r["kind"], r["step"]) for r in alone]
    for mine, wanted in zip(shared, alone, strict=True):
        if "loss" in wanted:
            assert mine["loss"] == pytest.approx(wanted["loss"], rel=1e-4)
    assert sum(record["kind"] == "start" for record in read_log(folder / "straight")) == 1


@pytest.mark.parametrize("run", ["", "text-"])
def test_a_stop_that_one_process_hears_stops_both_and_resumes_bit_for_bit(run: str, folder: Path) -> None:
    assert timeless_log(folder / f"{run}pieces") == timeless_log(folder / f"{run}straight")


def test_an_error_of_the_process_that_writes_reaches_the_other(folder: Path) -> None:
    first, second = (Path(folder, f"error-{rank}").read_text(encoding="utf-8") for rank in (0, 1))
    assert first == second
    assert "held" in first


def test_alone_there_is_nobody_to_ask() -> None:
    with process_group("cpu") as ranks:
        assert ranks == Ranks(0, 1)
        assert ranks.gather("x") == ["x"]
        assert ranks.any(True)
        assert not ranks.any(False)


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="cuda:0 to cuda:1, got cuda:2; start fewer processes"):
        checked_device("cuda", Ranks(2, 3))
    assert checked_device("cuda") == torch.device("cuda", 0)
    assert checked_device("cuda:1", Ranks(2, 3)) == torch.device("cuda", 1)


def test_resuming_with_another_number_of_processes_is_refused() -> None:
    trainer = Trainer(small_recipe(), 0)
    state = trainer.state()
    state["ranks"] = state["ranks"] * 2
    with pytest.raises(ValueError, match="as many processes as saved it, 2, got 1"):
        Trainer(small_recipe(), 0).restore(state)
