"""Tables as HTML."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from ncgru.lab.report.run import FAILED
from ncgru.lab.report.tables import Table


def table_html(table: Table) -> str:
    """The table with its caption, its heads in one row or two, and its notes."""
    head = _heads(table)
    first = next((start for start, group, _ in _starts(table.groups) if group), None)
    rows = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(
            f"<td{cell_class(text, index == first)}>{escape(text)}</td>" for index, text in enumerate(row) if index
        )
        + "</tr>"
        for row in table.rows
    )
    notes = "".join(f"<p>{escape(note)}</p>" for note in table.notes)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}"><table>'
        f"<caption>{escape(table.title)}</caption><thead>{head}</thead><tbody>{rows}</tbody></table></div>"
        f'<div class="notes">{notes}</div>'
    )


def _heads(table: Table) -> str:
    """One row of heads, or two where some stand over several columns; the others reach over both rows then."""
    above: list[str] = []
    below: list[str] = []
    two = any(group for group, _, _ in table.groups)
    for start, group, width in _starts(table.groups):
        if group:
            above.append(f'<th scope="colgroup" colspan="{width}">{escape(group)}</th>')
        rows = ' rowspan="2"' if two and not group else ""
        cells = [f'<th scope="col"{rows}>{escape(head)}</th>' for head in table.columns[start : start + width]]
        (below if group else above).extend(cells)
    return "".join(f"<tr>{''.join(row)}</tr>" for row in (above, below) if row)


def _starts(groups: Iterable[tuple[str, str, int]]) -> list[tuple[int, str, int]]:
    """Where each group of columns begins, its head and its width."""
    starts, column = [], 0
    for group, _, width in groups:
        starts.append((column, group, width))
        column += width
    return starts


def cell_class(text: str, main: bool = False) -> str:
    """The attribute for a cell that needs to be seen."""
    return ' class="bad"' if FAILED in text else ' class="main"' if main else ""
