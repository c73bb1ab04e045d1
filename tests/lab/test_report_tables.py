"""The tables: what stands in them, against numbers computed here, and how it is written."""

from __future__ import annotations

import io
import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ncgru.lab import recipes
from ncgru.lab.report import Comparison, Run, comparison_table, load_runs
from ncgru.lab.report.groups import sections
from ncgru.lab.report.missing import missing, summary
from ncgru.lab.report.references import differences
from ncgru.lab.report.run import Curve
from ncgru.lab.report.tables import matrix_table
from ncgru.lab.report.units import Unit
from ncgru.lab.report.values import count, duration, listing, number, quantile
from tests.lab.written_runs import end, finished, records, small, write_run

GRU, NC = "parenthesis-100/gru", "parenthesis-100/nc-gru-c"


def minima(recipe_name: str, best: float, seeds: range) -> list[float]:
    """The least training loss of each seed, from the records themselves."""
    logs = [records(small(recipe_name), seed, best) for seed in seeds]
    return [min(record["loss"] for record in log if record["kind"] == "train") for log in logs]


def cells(comparison: Comparison, row: int = 0) -> dict[str, str]:
    (table,) = comparison.tables
    return dict(zip(table.heads(), table.rows[row], strict=True))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.floats(0, 1))
def test_quantiles_are_numpys(values: list[float], share: float) -> None:
    assert quantile(values, share) == pytest.approx(float(np.quantile(values, share)), abs=1e-6)


def test_quantiles_with_failed_seeds() -> None:
    assert quantile([1.0, 2.0, math.inf], 0.5) == 2.0
    assert quantile([1.0, math.inf], 0.5) == math.inf
    assert quantile([math.inf, math.inf], 0.5) == math.inf
    assert quantile([1.0, math.inf], 0.0) == 1.0
    assert math.isnan(quantile([], 0.5))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.2861, "0.286"), (29.94, "29.9"), (16295.05, "16,295"), (0.0, "0"), (1.0, "1.00"), (2.04e-5, "2.04×10⁻⁵"),
        (9.996e-4, "0.00100"), (999_999.0, "1.00×10⁶"), (-0.5, "−0.500"), (math.nan, "–"), (None, "–"), (math.inf, "∞"),
        (-math.inf, "−∞"), (9.996, "10.0"),
    ],
)  # fmt: skip
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"), (0.0, "0 s"), (2.25, "2.2 s"), (48.4, "48 s"), (59.7, "1 min"), (725.0, "12 min 5 s"),
        (7200.0, "2 h"), (12000.0, "3 h 20 min"),
    ],
)  # fmt: skip
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_words() -> None:
    assert [listing([]), listing("a"), listing("abc")] == ["", "a", "a, b and c"]
    assert [count(1, "run"), count(1200, "run"), count(2, "entry", "entries")] == ["1 run", "1,200 runs", "2 entries"]


def test_headline_table_has_the_papers_number_and_the_spread_of_ours(tmp_path: Path) -> None:
    finished(tmp_path, small(NC), 1e-3, range(5))
    least = [1e3 * value for value in minima(NC, 1e-3, range(5))]
    low, median, high = statistics.quantiles(least, n=4, method="inclusive")
    (table,) = comparison_table(load_runs(tmp_path)).tables
    row = cells(comparison_table(load_runs(tmp_path)))
    assert table.title == "parenthesis-100: loss ×10⁻³"
    assert row["Model"] == "NC-GRU(U_c)"
    assert row["Paper"] == "0.286"
    assert row["Minimum, median"] == number(median)
    assert row["Minimum, quartiles"].split() == [number(low), "–", number(high)]
    assert row["Minimum, best"] == number(min(least))
    assert row["Seeds"] == "5"
    assert row["Solved"] == "5 of 5"
    assert "the least train loss over training, which is the paper's rule" in table.notes[0]
    assert table.notes[1] == "All models differ from their recipes in steps=2000, eval_every=100."


def test_another_task_is_said_and_not_held_against_the_papers_number(tmp_path: Path) -> None:
    finished(tmp_path, small(GRU).with_settings({"length": "20"}), 1e-3)
    (table,) = comparison_table(load_runs(tmp_path)).tables
    assert "Paper" not in table.heads()
    assert table.notes[1] == "All models differ from their recipes in length=20, steps=2000, eval_every=100."


def test_failed_seed_is_seen_and_is_worst_at_the_end(tmp_path: Path) -> None:
    recipe = small(NC)
    finished(tmp_path, recipe, 1e-3, [0])
    write_run(tmp_path, recipe, 1, [*records(recipe, 1, 1e-3, until=1500), end(1500, "failed", "loss was nan")])
    row = cells(comparison_table(load_runs(tmp_path)))
    assert row["End, median"] == "failed"
    assert row["Seeds"] == "1 + 1 failed"
    assert row["Minimum, median"] != "failed"


def test_seed_that_failed_before_its_first_value(tmp_path: Path) -> None:
    write_run(tmp_path, small(NC), 0, [end(10, "failed", "loss was nan")])
    row = cells(comparison_table(load_runs(tmp_path)))
    assert (row["Minimum, median"], row["End, median"], row["Solved"]) == ("failed", "failed", "0 of 1")


def test_seeds_that_go_on_do_not_count_beside_those_that_ended(tmp_path: Path) -> None:
    recipe = small(NC)
    finished(tmp_path, recipe, 1e-3, [0])
    write_run(tmp_path, recipe, 1, records(recipe, 1, 1e-9))
    row = cells(comparison_table(load_runs(tmp_path)))
    assert row["Minimum, best"] == number(1e3 * minima(NC, 1e-3, range(1))[0])
    assert row["Seeds"] == "1 + 1 interrupted"


def test_numbers_of_runs_that_go_on_are_called_so(tmp_path: Path) -> None:
    write_run(tmp_path, small(NC), 0, records(small(NC), 0, 1e-3, until=500))
    write_run(tmp_path, small(NC), 1, [])
    (table,) = comparison_table(load_runs(tmp_path)).tables
    assert table.rows[0][2].endswith(" so far")
    assert any("So far" in note for note in table.notes)


def test_only_own_changes_stand_in_a_models_name(tmp_path: Path) -> None:
    finished(tmp_path, small(GRU), 1e-3)
    finished(tmp_path / "wide", small(GRU).with_settings({"hidden_size": "64"}), 1e-3)
    (table,) = comparison_table(load_runs(tmp_path)).tables
    assert [row[0] for row in table.rows] == ["GRU", "GRU (hidden_sizes=64)"]
    assert "Settings in brackets differ from the recipe of that name." in table.notes


def test_another_length_is_another_section(tmp_path: Path) -> None:
    finished(tmp_path, small(GRU), 1e-3)
    finished(tmp_path / "short", small(GRU).with_settings({"length": "20"}), 1e-3)
    titles = [section.title for section in sections(load_runs(tmp_path))]
    assert titles == ["parenthesis-100 · length 100", "parenthesis-100 · length 20"]


def test_ablations_have_sections_of_their_own(tmp_path: Path) -> None:
    for name in (GRU, NC, f"{NC}@exact", f"{NC}@neumann-1", f"{NC}@reset-1"):
        finished(tmp_path, small(name), 1e-3, [0])
    found = {section.title: [model.recipe for model in section.models] for section in sections(load_runs(tmp_path))}
    assert found == {
        "parenthesis-100": [GRU, NC],
        "parenthesis-100, inverse": [NC, f"{NC}@exact", f"{NC}@neumann-1"],
        "parenthesis-100, cadence": [NC, f"{NC}@reset-1"],
    }


def test_every_recipe_is_its_own_and_has_a_label_of_its_own() -> None:
    runs = [Run(recipes.get(name).to_dict(), 0, "finished", 1) for name in recipes.names()]
    assert all(differences(json.loads(json.dumps(run.recipe))) == () for run in runs)
    shown = sections(runs)
    assert {run.name for section in shown for run in section.runs} == set(recipes.names())
    for section in shown:
        labels = [model.label for model in section.models]
        assert len(set(labels)) == len(labels)
    assert len({section.title for section in shown}) == len(shown)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    recipe = small(NC, seeds=(0, 1, 2, 3, 4))
    finished(tmp_path, recipe, 1e-3, [0])
    write_run(tmp_path, recipe, 1, [*records(recipe, 1, 1e-3, until=300), end(300, "failed", "the loss was nan.")])
    (section,) = sections(load_runs(tmp_path))
    assert missing(section)[:2] == [
        "NC-GRU(U_c), seed 1 failed at step 300 of 2,000: the loss was nan.",
        "NC-GRU(U_c): the recipe's seeds 2 to 4 were not run.",
    ]
    assert "parenthesis-100/lstm" in missing(section)[2]
    assert "nc-gru-c@" not in missing(section)[2]
    assert summary(section).startswith("1 run failed, 3 seeds not run, ")


def test_matrix_table_shows_the_worst(tmp_path: Path) -> None:
    recipe = small(f"{NC}@released")
    finished(tmp_path, recipe, 1e-3)
    finished(tmp_path, small(GRU), 1e-3)
    (section,) = sections(load_runs(tmp_path))
    table = matrix_table(section)
    assert table is not None
    errors = [
        record["orthogonality"]["rnn.weight_hh_l0.c"]
        for seed in range(3)
        for record in records(recipe, seed, 1e-3)
        if record["kind"] == "matrix"
    ]
    (row,) = table.rows
    assert row[:2] == ("NC-GRU(U_c) @released", number(max(errors)))
    assert row[4:] == ("0%", "2 in 2,000 updates")


def test_no_matrix_table_without_orthogonal_matrices(tmp_path: Path) -> None:
    finished(tmp_path, small(GRU), 1e-3)
    (section,) = sections(load_runs(tmp_path))
    assert matrix_table(section) is None


def test_units_of_language_tasks() -> None:
    bits = Unit.of([None, {"metric": "bits_per_character", "text": "1.385", "value": 1.385, "unit": "bpc"}])
    assert bits.label == "bits per character"
    assert bits.text(math.log(2) * 1.5) == "1.50"
    perplexity = Unit.of([{"metric": "perplexity", "text": "77.00", "value": 77.0, "unit": ""}])
    assert perplexity.text(math.log(77.0)) == "77.0"
    assert perplexity.text(1e6) == "failed"
    assert Unit.of([None]) == Unit()
    assert Unit.of([None], {"kind": "OwnText", "unit": "character"}) == bits
    assert Unit.of([None], {"kind": "OwnText", "unit": "word"}) == perplexity
    assert Unit.of([None], {"kind": "Adding", "length": 200}) == Unit()


def test_number_of_the_paper_in_another_unit_is_converted() -> None:
    unit = Unit.of([{"metric": "loss", "text": "0.286", "value": 0.286e-3, "unit": "×10⁻³"}])
    assert unit.paper({"metric": "loss", "text": "29.9", "value": 29.9e-5, "unit": "×10⁻⁵"}) == "0.299"
    assert unit.paper({"metric": "loss", "text": "0.28†", "value": 0.28e-3, "unit": "×10⁻³"}) == "0.28†"


def test_selected_headline_is_named(tmp_path: Path) -> None:
    recipe = {"name": "own/task", "headline": "test", "select": "valid", "task": {"length": 1}}
    runs = [Run(recipe, seed, "finished", 10, headline_min=1.0, headline_final=2.0) for seed in range(2)]
    (table,) = comparison_table(runs).tables
    assert table.heads()[1] == "Test at best valid, median"
    assert "the test loss where the valid loss is least" in table.notes[0]


def test_markdown_shows_names_as_they_are() -> None:
    curves = {"train": Curve.of([(1, 0.5)])}
    name = "own/a|b_c*d\n<b>`x`</b>"
    (line,) = [
        line
        for line in comparison_table([Run({"name": name}, 0, "finished", 1, curves=curves)]).markdown().splitlines()
        if line.startswith("| a")
    ]
    assert line.startswith(r"| a\|b\_c\*d \<b\>\`x\`\</b\> |")


@pytest.mark.parametrize("width", [80, 140])
def test_terminal_shows_all_numbers_and_no_markup(tmp_path: Path, width: int) -> None:
    finished(tmp_path, small(NC), 1e-3)
    run = Run({"name": "own/[red]bad[/red]"}, 0, "finished", 1, headline_min=0.5, headline_final=0.5)
    screen = io.StringIO()
    Console(file=screen, width=width).print(comparison_table([*load_runs(tmp_path), run]))
    text = screen.getvalue()
    assert "0.286" in text
    assert "[red]bad[/red]" in text
    assert max(map(len, text.splitlines())) <= width
    heads = [line for line in text.splitlines() if "median" in line and "best" in line]
    assert [line.count("quartiles") for line in heads] == [1, 2] if width == 80 else [2, 2]


def test_a_narrow_terminal_drops_quartiles_before_it_cuts_a_name(tmp_path: Path) -> None:
    recipe = small("adding-200/nc-gru-c")
    for seed in (0, 1):
        write_run(tmp_path, recipe, seed, [*records(recipe, seed, 0.16), end(2000, "stopped")])
    screen = io.StringIO()
    Console(file=screen, width=80).print(comparison_table(load_runs(tmp_path)))
    lines = screen.getvalue().splitlines()
    (row,) = [line for line in lines if "NC-GRU" in line]
    assert row.split()[0] == "NC-GRU(U_c)"
    assert "so far" in row
    assert not any("quartiles" in line for line in lines if "Solved" in line and "Seeds" in line)
