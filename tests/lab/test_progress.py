"""What people see while a run goes on."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from ncgru.lab import progress, recipes
from ncgru.lab.journal import Result
from ncgru.lab.progress import Lines, Several, TensorBoard, watching
from ncgru.lab.rundir import run_path
from ncgru.lab.trainer import train
from tests.lab.small_runs import StopAfter, small_recipe, timeless_log


def test_lines_show_loss_best_rate_and_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setattr("ncgru.lab.journal.TELL_SECONDS", 0.0)
    shown = io.StringIO()
    train(small_recipe(), tmp_path / "run", 0, listener=Lines(Console(file=shown, width=40)))
    first, *between, last = shown.getvalue().splitlines()
    assert first == "small/nc-gru-c seed 0: starts at step 0 of 24"
    assert len(between) == 20, "all steps but those before the first loss"
    for line in between:
        assert re.fullmatch(
            r"small/nc-gru-c seed 0: step \d+/24  loss [\d.]+  best [\d.]+  [\d.]+/s  \d:\d\d:\d\d left", line
        ), line
    assert re.fullmatch(r"small/nc-gru-c seed 0: finished at step 24  best [\d.]+  \d+ s", last)


def test_a_resumed_run_still_shows_the_best_of_its_earlier_sitting(tmp_path: Path) -> None:
    first = train(small_recipe(), tmp_path / "run", 0, stop=StopAfter(9))
    assert first.headline_min is not None
    lines = Lines(Console(file=io.StringIO()))
    lines.on_start(small_recipe(), 0, 9, 24, first.headline_min)
    lines.on_record({"kind": "train", "loss": first.headline_min + 1})
    assert (lines.loss, lines.best) == (first.headline_min + 1, first.headline_min)

    class Start(Lines):
        def _print(self, line: str) -> None:
            starts.append((line, self.best))

    starts: list[tuple[str, float | None]] = []
    train(small_recipe(), tmp_path / "run", 0, listener=Start(Console(file=io.StringIO())))
    assert starts[0] == ("small/nc-gru-c seed 0: goes on from step 9 of 24", first.headline_min)


def test_lines_bear_a_run_that_falls_back_to_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    shown = io.StringIO()
    lines = Lines(Console(file=shown)).beside()
    lines.on_start(small_recipe(), 0, 5, 24, None)
    lines.on_record({"kind": "train", "step": 8, "loss": 0.5})
    for step in (8, 5, 9):
        lines.on_step(step)
    assert re.findall(r"step (\d+)/24", shown.getvalue()) == ["8", "9"]


def test_two_runs_at_once_have_a_bar_each() -> None:
    shown = io.StringIO()
    with watching(Console(file=shown, force_terminal=True, width=100, color_system=None)) as listener:
        both = [Several([listener]).beside() for _ in range(2)]
        for seed, one in enumerate(both):
            one.on_start(small_recipe(), seed, 0, 24, None)
        for seed, one in enumerate(both):
            one.on_record({"kind": "train", "step": 12, "loss": 0.25 + seed})
            one.on_step(12)
    first, second = drawn(shown, 2)
    assert "small/nc-gru-c #0" in first
    assert "50% loss 0.25" in first
    assert "small/nc-gru-c #1" in second
    assert "50% loss 1.25" in second


def drawn(shown: io.StringIO, count: int) -> list[str]:
    """The last lines that stand in a terminal, without its codes."""
    return re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", shown.getvalue()).splitlines()[-count:]


@pytest.mark.parametrize("width", [80, 100])
def test_a_terminal_gets_a_line_a_run(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ncgru.lab.journal.TELL_SECONDS", 0.0)
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=width, color_system=None)
    with watching(console) as listener:
        result = train(small_recipe(), tmp_path / "run", 0, listener=listener)
        stopped = train(small_recipe(), tmp_path / "other", 1, listener=listener, stop=StopAfter(5))
    first, second = drawn(shown, 2)
    assert first.startswith("small/nc-gru-c #0 ")
    assert f"100% loss {result.headline_final:.3g}  best {result.headline_min:.3g}" in first
    assert ("━" in first) == (width == 100)
    assert stopped.status == "stopped"
    assert second.startswith("small/nc-gru-c #1 stopped ")


@pytest.mark.parametrize("width", [70, 80, 110])
def test_a_long_name_gives_way_and_no_figure_does(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    recipe = recipes.get("denoise-corrected-200/nc-gru-ruc@quick")
    with watching(Console(file=shown, force_terminal=True, width=width, color_system=None)) as listener:
        listener.on_start(recipe, 0, 0, 1500, None)
        listener.on_record({"kind": "train", "loss": 0.08061})
        listener.on_record({"kind": "eval", "split": "test", "loss": 0.1234})
        for step in (500, 1000):
            listener.on_step(step)
    (line,) = drawn(shown, 1)
    assert re.fullmatch(r"denoise-corr\S+… #0 .* 67% loss 0\.0806  best test 0\.123 \d+/s 0:00:\d\d *", line), line


@pytest.mark.parametrize("terminal", [True, False])
def test_the_end_of_a_run_that_went_elsewhere_is_told(terminal: bool) -> None:
    shown = io.StringIO()
    result = Result("small/gru", 3, "finished", 24, 0.125, 0.5, None, 7.2)
    with watching(Console(file=shown, force_terminal=terminal, width=100, color_system=None)) as listener:
        listener.on_end(result)
    assert "small/gru seed 3: finished at step 24  best 0.125  7 s\n" in shown.getvalue()


def test_tensorboard_has_the_curves_of_the_log(tmp_path: Path) -> None:
    recipe = small_recipe()
    place = run_path(tmp_path, recipe.name, 0)
    for stop in (StopAfter(11), None):
        train(recipe, place, 0, listener=TensorBoard(tmp_path), stop=stop)
    events = EventAccumulator(str(place / "tensorboard")).Reload()
    logged = [(r["step"], r["loss"]) for r in timeless_log(place) if r["kind"] == "train"]
    assert [(point.step, point.value) for point in events.Scalars("loss/train")] == [
        (step, pytest.approx(loss)) for step, loss in logged
    ]
    assert any(tag.startswith("orthogonality/") for tag in events.Tags()["scalars"])
