"""Tables: the paper's numbers against ours, and what was measured of the orthogonal matrices.

A table is the same object whether it is shown in a terminal, written as Markdown or put into the page.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ncgru.lab.report.groups import SOLVED_SHARE, Model, Section, Spread, changes, sections, solved_below, state_of
from ncgru.lab.report.run import Run
from ncgru.lab.report.units import Unit
from ncgru.lab.report.values import count, number

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table as RichTable

MARKDOWN_SIGNS = re.compile(r"([\\`*_{}\[\]<>()#+!|~])")


@dataclass(frozen=True)
class Table:
    """A table of texts.

    Attributes:
        title: what it is about.
        groups: heads that stand over several columns: (head, its short form, number of columns); together all columns.
        columns: heads of the columns; the first column names its row.
        rows: texts, one for each column.
        notes: sentences below it.
        dispensable: numbers of the columns that a narrow terminal does not show, the first to go first.
    """

    title: str
    groups: tuple[tuple[str, str, int], ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    dispensable: tuple[int, ...] = ()

    def heads(self) -> list[str]:
        """Column heads that can stand alone, without the heads above them."""
        above = [short for _, short, width in self.groups for _ in range(width)]
        return [f"{short}, {head}" if short else head for short, head in zip(above, self.columns, strict=True)]

    def markdown(self) -> str:
        """The table in Markdown, with its title and its notes."""
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        rows = [[_markdown(text) for text in row] for row in (self.heads(), *self.rows)]
        lines = [f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:])]
        notes = [_markdown(note) for note in self.notes]
        return "\n".join([f"### {_markdown(self.title)}", "", *lines, *(part for note in notes for part in ("", note))])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        for left_out in range(len(self.dispensable) + 1):
            table = self._rich(self.dispensable[:left_out])
            width = console.measure(table, options=options.update(max_width=1000)).maximum
            if width <= options.max_width + (self._slack() if left_out else 0):
                break
        yield table
        yield from (Text(note, style="dim") for note in self.notes)
        yield Text()

    def _slack(self) -> int:
        """By how much names of rows can become narrower that go on in further lines, but are not cut within a word."""
        names = [row[0] for row in self.rows]
        words = [word for name in names for word in name.split()]
        return max(map(len, names), default=0) - max(map(len, words), default=0)

    def _rich(self, without: Collection[int]) -> RichTable:
        """The table for a terminal, without some columns."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            title=Text(self.title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False,
            collapse_padding=True,
        )  # fmt: skip
        kept = [index for index in range(len(self.columns)) if index not in without]
        for index in kept:
            head = self.heads()[index].replace(", ", "\n", 1)
            inner = 0 < index < len(self.columns) - 1
            table.add_column(Text(head), justify="right" if index else "left", overflow="fold", no_wrap=inner)
        for row in self.rows:
            table.add_row(*(Text(row[index]) for index in kept))
        return table


@dataclass(frozen=True)
class Comparison:
    """The headline tables, one a task; a rich console prints it."""

    tables: tuple[Table, ...]

    def markdown(self) -> str:
        """All tables in Markdown."""
        return "\n\n".join(table.markdown() for table in self.tables) + "\n"

    def __rich__(self) -> RenderableType:
        from rich.console import Group

        return Group(*self.tables)


def comparison_table(runs: Iterable[Run]) -> Comparison:
    """The paper's numbers against ours, a table for each task."""
    return Comparison(tuple(headline_table(section) for section in sections(runs)))


def headline_table(section: Section) -> Table:
    """A section's models: what the paper has, the spread of ours over seeds, and how many seeds there are."""
    unit = section.unit
    with_paper = any(model.paper is not None for model in section.models)
    with_solved = any(model.solved() is not None for model in section.models)
    groups = [("", "", 2 if with_paper else 1), (*rule_names(section), 3), ("At the end", "End", 2)]
    columns = ["Model", *(["Paper"] if with_paper else []), "median", "quartiles", "best", "median", "quartiles"]
    columns += [*(["Solved"] if with_solved else []), "Seeds"]
    groups.append(("", "", 2 if with_solved else 1))
    rows = []
    for model in section.models:
        least, final = model.minimum, model.final
        row = [model.label, *([unit.paper(model.paper)] if with_paper else [])]
        row += [_provisional(model, unit.text(least.median)), _quartiles(unit, least), unit.text(least.best)]
        row += [unit.text(final.median), _quartiles(unit, final)]
        row += [_solved(model)] if with_solved else []
        rows.append((*row, state_of(model)))
    return Table(
        f"{section.title}: {unit.label}",
        tuple(groups),
        tuple(columns),
        tuple(rows),
        _notes(section, unit, with_solved),
        dispensable=(6, 3) if with_paper else (5, 2),
    )


def rule_names(section: Section) -> tuple[str, str]:
    """How the headline number is chosen, as the head of its columns, in full and in short."""
    rules = {(run.headline, run.select) for run in section.runs}
    if len(rules) > 1:
        return "By the paper's rule", "Rule"
    ((headline, select),) = rules
    if select is None:
        return f"Minimum over training ({headline})", "Minimum"
    return f"{headline.capitalize()} at the minimum of {select}", f"{headline.capitalize()} at best {select}"


def matrix_table(section: Section) -> Table | None:
    """What was measured of the orthogonal matrices, each figure the worst of a model's seeds and matrices."""
    rows = []
    for model in section.models:
        errors, norms = _measured(model, "orthogonality"), _measured(model, "series_norm")
        if errors or norms:
            rows.append((
                model.label,
                number(_largest(errors)),
                number(max((values[-1] for values in errors), default=None)),
                number(_largest(norms)),
                f"{_share(norms):.0%}" if norms else "–",
                _refreshes(model),
            ))  # fmt: skip
    if not rows:
        return None
    groups = (("", "", 1), ("‖UᵀU − I‖₂", "‖UᵀU − I‖₂", 2), ("‖Ã δA‖₂", "‖Ã δA‖₂", 2), ("", "", 1))
    columns = ("Model", "largest", "last", "largest", "at 1 or above", "Refreshes by the guard")
    note = "Each figure is the worst over seeds and matrices. The Neumann series needs ‖Ã δA‖₂ below 1."
    return Table(f"{section.title}: orthogonal matrices", groups, columns, tuple(rows), (note,))


def _notes(section: Section, unit: Unit, with_solved: bool) -> tuple[str, ...]:
    notes = [_rule_note(section)]
    if section.changes:
        notes.append(f"All models differ from their recipes in {section.changes}.")
    if any(changes(run) != section.changes for run in section.runs):
        notes.append("Settings in brackets differ from the recipe of that name.")
    goal = section.reference(solved_below)
    if with_solved and goal is not None:
        notes.append(
            f"Solved: the headline series came to {unit.text(goal)} or below, within {SOLVED_SHARE:.0%} of the way "
            "from the irreducible to the trivial loss."
        )
    trivial = section.reference(lambda run: run.trivial_loss)
    irreducible = section.reference(lambda run: run.irreducible_loss)
    if trivial is not None:
        known = "is not known" if irreducible is None else f"is {unit.text(irreducible)}"
        notes.append(f"In this unit the trivial loss is {unit.text(trivial)}, the irreducible loss {known}.")
    if any(model.provisional for model in section.models):
        notes.append("“So far”: no seed has ended yet; the numbers are over seeds that go on.")
    return tuple(notes)


def _rule_note(section: Section) -> str:
    rules = {
        f"the least {run.headline} loss over training"
        if run.select is None
        else f"the {run.headline} loss where the {run.select} loss is least"
        for run in section.runs
    }
    return (
        f"{rule_names(section)[0]}: {' or '.join(sorted(rules))}, which is the paper's rule. It is chosen after the "
        "fact and flatters noisy curves, so the value at the end of training stands beside it. Median and quartiles "
        "are over the seeds that ended; a failed one counts with the minimum that it reached, and at the end as worse "
        "than any number."
    )


def _provisional(model: Model, text: str) -> str:
    return f"{text} so far" if model.provisional else text


def _quartiles(unit: Unit, spread: Spread) -> str:
    low, high = unit.text(spread.low), unit.text(spread.high)
    return low if low == high else f"{low}\N{NO-BREAK SPACE}–\N{NO-BREAK SPACE}{high}"


def _solved(model: Model) -> str:
    solved = model.solved()
    return "–" if solved is None else f"{solved} of {len(model.counted)}"


def _measured(model: Model, quantity: str) -> list[list[float]]:
    curves = [curve for run in model.runs for curve in run.matrices.get(quantity, {}).values()]
    return [[float(value) for value in curve.values] for curve in curves if len(curve)]


def _largest(curves: Sequence[Sequence[float]]) -> float | None:
    """The largest value, NaN and all: a matrix that is no more is not an orthogonal one."""
    return float(np.nan_to_num(np.concatenate(curves), nan=np.inf).max()) if curves else None


def _share(curves: Sequence[Sequence[float]]) -> float:
    return float(np.mean(~(np.concatenate(curves) < 1)))


def _refreshes(model: Model) -> str:
    """The most refreshes that a matrix of a seed needed, with its updates."""
    worst: tuple[float, float] | None = None
    for run in model.runs:
        for name, curve in run.matrices.get("refreshes", {}).items():
            updates = run.matrices.get("updates", {}).get(name)
            if len(curve) and updates is not None and len(updates):
                last = (float(curve.values[-1]), float(updates.values[-1]))
                worst = last if worst is None else max(worst, last)
    return "–" if worst is None else f"{worst[0]:,.0f} in {count(round(worst[1]), 'update')}"


def _markdown(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return MARKDOWN_SIGNS.sub(r"\\\1", " ".join(text.split()))
