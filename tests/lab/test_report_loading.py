"""Runs are read in whatever state they are, and result files give back what went into them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ncgru.lab.report import Run, comparison_table, export_results, load_runs
from ncgru.lab.report.run import Curve, headline_value
from ncgru.lab.rundir import RunDirectory
from tests.lab.written_runs import PROVENANCE, end, gradients, records, small, write_run

RECIPE = small("parenthesis-100/nc-gru-c")


def only(*paths: Path) -> Run:
    (run,) = load_runs(*paths)
    return run


def test_finished_run(tmp_path: Path) -> None:
    log = records(RECIPE, 3, 1e-3)
    write_run(tmp_path, RECIPE, 3, [*log, end(2000)])
    run = only(tmp_path)
    train = [record["loss"] for record in log if record["kind"] == "train"]
    assert (run.name, run.seed, run.status, run.step, run.seconds) == (RECIPE.name, 3, "finished", 2000, 20.0)
    assert (run.headline_min, run.headline_final) == (min(train), train[-1])
    assert run.curves["train"].values.tolist() == train
    assert run.curves["train"].steps.tolist() == list(range(100, 2001, 100))
    assert run.trivial_loss == RECIPE.task.trivial_loss
    assert run.irreducible_loss == 0
    assert run.provenance == (PROVENANCE,)
    assert set(run.matrices["orthogonality"]) == {"rnn.weight_hh_l0.c"}
    assert run.place == f"{tmp_path.name}/parenthesis-100/nc-gru-c/seed-3"


def test_differences_name_settings_and_leave_out_what_changes_no_loss(tmp_path: Path) -> None:
    write_run(tmp_path, RECIPE, 0, [])
    assert only(tmp_path).differences == (("steps", 2000, 20_000), ("eval_every", 100, 1000))


def test_unknown_recipe_has_no_differences_and_still_its_baselines(tmp_path: Path) -> None:
    write_run(tmp_path, replace(RECIPE, name="mine/own"), 0, records(RECIPE, 0, 1e-3))
    run = only(tmp_path)
    assert run.differences is None
    assert run.trivial_loss == RECIPE.task.trivial_loss


@pytest.mark.parametrize("status", ["failed", "stopped"])
def test_status_and_reason_of_the_last_record(tmp_path: Path, status: str) -> None:
    write_run(tmp_path, RECIPE, 0, [*records(RECIPE, 0, 1e-3, until=700), end(700, status, "for this")])
    run = only(tmp_path)
    assert (run.status, run.reason, run.step) == (status, "for this", 700)


def test_resumed_run_is_not_stopped_any_more(tmp_path: Path) -> None:
    log = [*records(RECIPE, 0, 1e-3, until=700), end(700, "stopped", "asked to")]
    second = {**PROVENANCE, "gpus": ["A GPU"]}
    log.append({"kind": "start", "step": 700, "provenance": second, "seed": 0, "warnings": ["a checkpoint was bad"]})
    write_run(tmp_path, RECIPE, 0, log)
    run = only(tmp_path)
    assert (run.status, run.reason) == ("interrupted", None)
    assert run.provenance == (PROVENANCE, second)
    assert run.problems == ("a checkpoint was bad",)


def test_torn_last_line_is_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, RECIPE, 0, records(RECIPE, 0, 1e-3, until=700), torn='{"kind": "train", "st')
    assert only(tmp_path).step == 700


def test_run_at_work_is_running(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", RECIPE, 5) as directory:
        directory.append({"kind": "start", "step": 0, "provenance": PROVENANCE, "seed": 5})
        assert only(tmp_path).status == "running"
    run = only(tmp_path)
    assert (run.status, run.seed, run.headline_min) == ("interrupted", 5, None)


def test_loss_that_is_no_number_stays_in_the_curve(tmp_path: Path) -> None:
    log = [*records(RECIPE, 0, 1e-3, until=500), {"kind": "train", "step": 600, "loss": "NaN", "seconds": 6.0}]
    write_run(tmp_path, RECIPE, 0, [*log, end(600, "failed", "nan")])
    run = only(tmp_path)
    assert math.isnan(run.curves["train"].values[-1])
    assert run.headline_min is not None
    assert math.isfinite(run.headline_min)


def test_damaged_directory_is_reported_and_the_others_are_read(tmp_path: Path) -> None:
    write_run(tmp_path, RECIPE, 0, records(RECIPE, 0, 1e-3))
    write_run(tmp_path, RECIPE, 1, [])
    damaged = tmp_path / "parenthesis-100/nc-gru-c/seed-1"
    (damaged / "recipe.json").write_text("{")
    (write_run(tmp_path, RECIPE, 2, []) / "log.jsonl").write_text('{"kind": "train"}\n{}\n')
    runs = load_runs(tmp_path)
    assert [run.seed for run in runs] == [0]
    assert len(runs.problems) == 2
    assert all("could not be read" in problem for problem in runs.problems)


@pytest.mark.parametrize(("made", "message"), [(False, "must exist"), (True, "must lead to runs")])
def test_paths_without_runs_are_refused(tmp_path: Path, made: bool, message: str) -> None:
    place = tmp_path / "runs"
    if made:
        place.mkdir()
    with pytest.raises(ValueError, match=message):
        load_runs(place)


def test_headline_is_read_where_the_selecting_split_is_least() -> None:
    curves = {"valid": Curve.of([(1, 3.0), (2, 1.0), (3, 2.0)]), "test": Curve.of([(1, 9.0), (2, 8.0), (3, 7.0)])}
    assert headline_value({"headline": "test", "select": "valid"}, curves) == 8.0
    assert headline_value({"headline": "test", "select": None}, curves) == 7.0
    assert headline_value({"headline": "train"}, curves) is None


def test_curves_are_thinned_with_both_ends_kept() -> None:
    curve = Curve.of([(step, float(step)) for step in range(1000)])
    thin = curve.thinned(300)
    assert len(thin) == 300
    assert (thin.steps[0], thin.steps[-1]) == (0, 999)
    assert np.all(np.diff(thin.steps) > 0)
    assert curve.thinned(1000) is curve


def test_the_same_seed_twice_counts_once_and_is_named(tmp_path: Path) -> None:
    for place, until in (("first", 500), ("second", 900)):
        log = records(RECIPE, 0, 1e-3, until=until)
        log[0]["provenance"] = {**PROVENANCE, "date": place}
        write_run(tmp_path / place, RECIPE, 0, log)
    runs = load_runs(tmp_path / "first", tmp_path / "second")
    assert [run.step for run in runs] == [900]
    (problem,) = runs.problems
    assert "second/parenthesis-100/nc-gru-c/seed-0 is shown" in problem


def test_other_settings_make_another_run(tmp_path: Path) -> None:
    write_run(tmp_path / "a", RECIPE, 0, [])
    write_run(tmp_path / "b", small("parenthesis-100/nc-gru-c", batch_size=8), 0, [])
    assert len(load_runs(tmp_path)) == 2


def test_result_file_gives_the_runs_back(tmp_path: Path) -> None:
    log = [*records(RECIPE, 0, 1e-3), gradients(0), gradients(2000)]
    write_run(tmp_path / "runs", RECIPE, 0, [*log, end(2000)])
    failed = [*records(RECIPE, 1, 1e-3, until=500), {"kind": "train", "step": 600, "loss": "Infinity", "seconds": 6.0}]
    write_run(tmp_path / "runs", RECIPE, 1, [*failed, end(600, "failed", "not finite")])
    runs = load_runs(tmp_path / "runs")
    file = export_results(runs, tmp_path / "results/parenthesis.jsonl")
    again = load_runs(tmp_path / "results")
    assert again.problems == []
    for one, other in zip(runs, again, strict=True):
        for name in ("recipe", "seed", "status", "reason", "step", "seconds", "provenance", "headline_min"):
            assert getattr(one, name) == getattr(other, name), name
        assert one.differences == other.differences
        np.testing.assert_allclose(one.curves["test"].values, other.curves["test"].values, rtol=1e-5)
    assert [record["step"] for record in again[0].gradients] == [0, 2000]
    assert comparison_table(again).markdown() == comparison_table(runs).markdown()
    assert export_results(again, tmp_path / "again.jsonl").read_bytes() == file.read_bytes()


def test_result_files_are_strict_json_and_small(tmp_path: Path) -> None:
    recipe = small(RECIPE.name, steps=10_000, log_every=1)
    write_run(tmp_path, recipe, 0, records(recipe, 0, 1e-3))
    (line,) = export_results(load_runs(tmp_path), tmp_path / "r.jsonl").read_text().splitlines()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    content = json.loads(line, parse_constant=refuse)
    assert len(content["curves"]["train"]["step"]) == 300
    assert len(line) < 60_000
    assert content["recipe"]["name"] == recipe.name


def test_a_run_and_its_export_are_one(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", RECIPE, 0, [*records(RECIPE, 0, 1e-3), end(2000)])
    file = export_results(load_runs(tmp_path / "runs"), tmp_path / "results.jsonl")
    write_run(tmp_path / "runs", RECIPE, 1, [*records(RECIPE, 1, 1e-3), end(2000)])
    runs = load_runs(file, tmp_path / "runs")
    assert [run.seed for run in runs] == [0, 1]
    assert runs.problems == []


def test_where_nothing_can_be_read_the_error_says_why(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("milk, bread\n")
    with pytest.raises(ValueError, match=r"none in .*notes.txt; pass the folder.*\nnotes.txt has lines"):
        load_runs(tmp_path / "notes.txt")


@pytest.mark.parametrize("line", ["no json", "[]", '{"format": 7}', '{"format": 1, "recipe": {}}'])
def test_bad_lines_are_reported_and_the_others_are_read(tmp_path: Path, line: str) -> None:
    write_run(tmp_path / "runs", RECIPE, 0, [*records(RECIPE, 0, 1e-3), end(2000)])
    file = export_results(load_runs(tmp_path / "runs"), tmp_path / "results.jsonl")
    file.write_text(f"{line}\n{file.read_text()}")
    runs = load_runs(file)
    assert len(runs) == 1
    (problem,) = runs.problems
    assert "results.jsonl has lines that are no results: line 1" in problem
