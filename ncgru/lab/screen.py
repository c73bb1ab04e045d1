"""What the command `ncgru` prints: tables of recipes, of results and of the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ncgru.lab.journal import Result
from ncgru.lab.recipes import Recipe

PIPE_WIDTH = 160


def console(stderr: bool = False, wide: bool = False) -> Console:
    """The console; a wide one leaves lines whole that go into a file or a pipe."""
    made = Console(stderr=stderr)
    if wide and not made.is_terminal:
        made.width = max(made.width, PIPE_WIDTH)
    return made


def recipe_tables(rows: Sequence[tuple[Recipe, float | None]]) -> list[Table]:
    """Recipes with their expected seconds, a table a task: one for all would not fit into eighty columns."""
    by_task: dict[str, list[tuple[Recipe, float | None]]] = {}
    for row in rows:
        by_task.setdefault(row[0].name.partition("/")[0], []).append(row)
    return [_recipe_table(group) for group in by_task.values()]


def result_table(results: Sequence[Result]) -> Table:
    """How runs ended."""
    table = Table(box=None, pad_edge=False)
    for column in ("recipe", "seed", "status", "steps", "best", "last"):
        table.add_column(column, justify="left" if column in ("recipe", "status") else "right", overflow="fold")
    for result in results:
        numbers = ["–" if x is None else f"{x:.4g}" for x in (result.headline_min, result.headline_final)]
        table.add_row(result.name, str(result.seed), result.status, f"{result.step:,}", *numbers)
    return table


def doctor_table(found: Mapping[str, Any]) -> Table:
    """What `doctor.examine` found."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in found["machine"].items():
        text = ", ".join(value) if isinstance(value, list) else str(value or "")
        table.add_row(name, text or "none")
    for device, backends in found["devices"].items():
        table.add_row(f"backend on {device}", f"{backends['auto']}: {backends['reason']}")
        for name, verdict in backends["by_name"].items():
            table.add_row(f"  {name}", verdict)
        table.add_row("  orthogonal update", backends["orthogonal_update"])
    for part, state in found["gpu_kernels"].items():
        there = [f"{name} {value}" for name, value in state.items() if name != "problem" and value is not None]
        table.add_row(f"GPU kernels: {part}", state["problem"] or ", ".join(there))
    for name, version in found["packages"].items():
        table.add_row(name, version or "not installed")
    penn = found["penn_treebank"]
    table.add_row("Penn Treebank", penn["folder"] or penn["problem"])
    return table


def _recipe_table(rows: Sequence[tuple[Recipe, float | None]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("recipe", no_wrap=True)
    table.add_column("units", justify="right", overflow="fold")
    for column in ("steps", "paper", "CPU time"):
        table.add_column(column, justify="right", no_wrap=True)
    for recipe, seconds in rows:
        paper = "–" if recipe.paper is None else f"{recipe.paper.text} {recipe.paper.unit}"
        paper = paper.replace("bits per character", "bpc")
        units = ", ".join(map(str, recipe.model.hidden_sizes))
        table.add_row(recipe.name, units, f"{recipe.steps:,}", paper, _about(seconds))
    return table


def _about(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"≈ {seconds / size:.0f} {unit}"
    return f"≈ {max(seconds, 1):.0f} s"
