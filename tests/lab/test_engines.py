"""Many runs: in a row, and on a Ray cluster whose workers get lost."""

from __future__ import annotations

import importlib
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ncgru.lab.engines import run_many
from ncgru.lab.errors import LabError, OtherRecipeError
from ncgru.lab.rundir import read_log, run_path, run_status
from ncgru.lab.trainer import Trainer, train
from tests.lab.small_runs import StopAfter, small_recipe, timeless_log

ROOT = Path(__file__).parent.parent.parent


def test_recipes_and_seeds_run_in_their_order_and_directories(tmp_path: Path) -> None:
    recipes = [small_recipe("gru"), small_recipe("nc-gru-c")]
    results = run_many(recipes, (2, 5), root=tmp_path)
    assert [(result.name, result.seed, result.status) for result in results] == [
        ("small/gru", 2, "finished"),
        ("small/gru", 5, "finished"),
        ("small/nc-gru-c", 2, "finished"),
        ("small/nc-gru-c", 5, "finished"),
    ]
    assert {result.headline_min for result in results} == {
        train(recipe, run_path(tmp_path, recipe.name, seed), seed).headline_min for recipe in recipes for seed in (2, 5)
    }
    assert len({result.headline_min for result in results}) == 4


def test_a_seed_among_others_is_the_same_as_alone(tmp_path: Path) -> None:
    run_many([small_recipe()], (0, 1), root=tmp_path)
    train(small_recipe(), tmp_path / "alone", 1)
    assert timeless_log(tmp_path / "alone") == timeless_log(run_path(tmp_path, "small/nc-gru-c", 1))


def test_seeds_of_the_recipe_are_the_default(tmp_path: Path) -> None:
    results = run_many([small_recipe(steps=2, seeds=(4, 3))], root=tmp_path)
    assert [result.seed for result in results] == [4, 3]


def test_a_seed_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Trainer.step

    def spoil(self: Trainer, position: int | torch.Tensor) -> None:
        step(self, position)
        if self.seed == 1 and self.position == 9:
            self.window_sum += math.inf

    monkeypatch.setattr(Trainer, "step", spoil)
    results = run_many([small_recipe()], (0, 1, 2), root=tmp_path)
    assert [result.status for result in results] == ["finished", "failed", "finished"]
    assert results[1].reason is not None
    # It happens after step 10, whose state is not saved any more.
    assert "no longer finite after step 10; the state of step 5 is kept" in results[1].reason


def test_after_a_stop_no_further_run_begins(tmp_path: Path) -> None:
    results = run_many([small_recipe()], (0, 1), root=tmp_path, stop=StopAfter(5))
    assert [result.status for result in results] == ["stopped"]
    assert run_status(run_path(tmp_path, "small/nc-gru-c", 1)) == "new"
    assert [result.status for result in run_many([small_recipe()], (0, 1), root=tmp_path)] == ["finished"] * 2


def test_begun_runs_are_refused_together_before_anything_runs(tmp_path: Path) -> None:
    run_many([small_recipe()], (1,), root=tmp_path)
    with pytest.raises(LabError, match="seed-1; resume them"):
        run_many([small_recipe()], (0, 1), root=tmp_path, resume=False)
    assert run_status(run_path(tmp_path, "small/nc-gru-c", 0)) == "new"


@pytest.mark.parametrize("engine", ["local", "ray"])
def test_another_recipe_is_refused_before_anything_runs(engine: str, tmp_path: Path) -> None:
    run_many([small_recipe()], (1,), root=tmp_path)
    with pytest.raises(OtherRecipeError, match=r"seed-1 holds a run of another recipe:\n  clip: None there, 1.0 asked"):
        run_many([small_recipe(clip=1.0)], (0, 1), root=tmp_path, engine=engine)
    assert run_status(run_path(tmp_path, "small/nc-gru-c", 0)) == "new"
    longer = small_recipe(steps=30)
    results = run_many([longer], (0, 1), root=tmp_path, allow_other_recipe=True)
    assert [result.step for result in results] == [30, 30]


def test_a_run_given_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="came twice"):
        run_many([small_recipe()], (0, 0), root=tmp_path)


def test_an_unknown_engine_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'local'"):
        run_many([small_recipe()], root=tmp_path, engine="locale")


def test_without_ray_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(LabError, match=re.escape('pip install "ncgru[ray]"')):
        run_many([small_recipe()], root=tmp_path, engine="ray")


def test_a_ray_cluster_that_does_not_answer_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda name: None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # but nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for given in (address, f"ray://{address}"):
            with pytest.raises(LabError, match=rf"no Ray cluster answers at {given} .*check the address"):
                run_many([small_recipe()], root=tmp_path, engine="ray", address=given)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("seed", "error"), [(-1, ValueError), (2**63, ValueError), (0.5, TypeError)])
def test_a_seed_that_cannot_be_is_refused(seed: Any, error: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(error, match="seed must be"):
        run_many([small_recipe()], (seed,), root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def ray_program(root: Path, steps: int, *options: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "tests.lab.ray_runs", str(root), "--steps", str(steps), *options],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip


def wait_for_step(path: Path, step: int) -> None:
    """Until the run's log has come so far."""
    until = time.monotonic() + 120
    while not path.exists() or max((r["step"] for r in read_log(path)), default=0) < step:
        assert time.monotonic() < until, f"{path} makes no progress"
        time.sleep(0.05)


@pytest.mark.slow
def test_ray_runs_seeds_side_by_side_and_takes_up_again_what_a_killed_worker_did(tmp_path: Path) -> None:
    logs = [run_path(tmp_path / "ray", "small/nc-gru-c", seed) / "log.jsonl" for seed in (0, 1, 2)]
    program = ray_program(tmp_path / "ray", 3000, "--workers", "2")
    try:
        for log in logs[:2]:  # two at once
            wait_for_step(log, 200)
        os.kill(int((logs[0].parent / "lock").read_text(encoding="utf-8")), signal.SIGKILL)
        said = program.communicate(timeout=240)[0]
    finally:
        program.kill()
        program.wait()
    lines = [line for line in said.splitlines() if line.startswith("result")]
    assert lines == [f"result {seed} finished 3000" for seed in (0, 1, 2)]
    heard = [[int(line.split()[2]) for line in said.splitlines() if line.startswith(f"at {seed} ")] for seed in (0, 1)]
    assert all(any(0 < step < 3000 for step in steps) for steps in heard), "nobody was told how far the runs were"
    starts = [[record["step"] for record in read_log(log) if record["kind"] == "start"] for log in logs]
    assert len(starts[0]) == 2
    assert starts[0][1] >= 150
    recipe = small_recipe(steps=3000, log_every=50, eval_every=None, measure_every=None, checkpoint_every=50)
    train(recipe, tmp_path / "alone", 0)
    assert timeless_log(logs[0].parent) == timeless_log(tmp_path / "alone")
    assert all(any((log.parent / "tensorboard").iterdir()) for log in logs)


@pytest.mark.slow
def test_ray_runs_stop_in_order_when_the_program_is_asked_to(tmp_path: Path) -> None:
    paths = [run_path(tmp_path, "small/nc-gru-c", seed) for seed in (0, 1, 2)]
    program = ray_program(tmp_path, 10**6)
    try:
        for path in paths[:2]:
            wait_for_step(path / "log.jsonl", 100)
        program.send_signal(signal.SIGTERM)
        said = program.communicate(timeout=120)[0]
    finally:
        program.kill()
        program.wait()
    stopped = [line.split()[1] for line in said.splitlines() if re.fullmatch(r"result \d stopped \d+", line)]
    assert stopped[:2] == ["0", "1"]
    # On a machine with two cores the third has not begun.
    wanted = ["stopped" if str(seed) in stopped else "new" for seed in (0, 1, 2)]
    assert [run_status(path) for path in paths] == wanted
