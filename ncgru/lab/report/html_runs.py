"""Where the numbers come from, as HTML: the settings of every model and the provenance of every run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from ncgru.lab.report.groups import Model, Section
from ncgru.lab.report.html_tables import cell_class
from ncgru.lab.report.missing import progress
from ncgru.lab.report.references import flat
from ncgru.lab.report.run import FAILED, Run
from ncgru.lab.report.units import Unit
from ncgru.lab.report.values import count, duration, listing

HEADS = (
    "Model", "Seed", "How it ended", "Steps", "Time", "By the rule", "At the end",
    "Hardware", "Versions", "Commit", "Begun", "Read from",
)  # fmt: skip


def settings_html(section: Section) -> str:
    """Recipe, note and settings of every model, those first that are not the named recipe's."""
    items = "".join(f"<dt>{escape(model.label)}</dt>{_setting_lines(model)}" for model in section.models)
    return f'<details><summary>Recipes, variants and settings</summary><dl class="settings">{items}</dl></details>'


def _setting_lines(model: Model) -> str:
    run = model.runs[0]
    lines = [f"<code>{escape(run.name)}</code>"]
    lines += [escape(str(run.recipe["note"]))] if run.recipe.get("note") else []
    if run.differences is None:
        lines.append("There is no recipe of this name in this installation, so nothing can be said of differences.")
    for name, mine, theirs in run.differences or ():
        lines.append(f"Differs: <code>{escape(name)}</code> is {_value(mine)}, in the recipe {_value(theirs)}.")
    every = ", ".join(
        f"{name} = {json.dumps(value, ensure_ascii=False)}"
        for name, value in flat(run.recipe).items()
        if name != "note"
    )
    lines.append(f"<details><summary>All settings</summary><code>{escape(every)}</code></details>")
    return "".join(f"<dd>{line}</dd>" for line in lines)


def _value(value: Any) -> str:
    return f"<code>{escape(json.dumps(value, ensure_ascii=False))}</code>"


def runs_html(section: Section) -> str:
    """Every run of the section in a table."""
    unit = section.unit
    rows = "".join(_run_row(model, run, unit) for model in section.models for run in model.runs)
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in HEADS)
    region = f'class="scroll" tabindex="0" role="region" aria-label="Runs of {escape(section.title)}"'
    return (
        f"<details><summary>All {count(len(section.runs), 'run')} with their provenance</summary>"
        f'<div {region}><table class="runs">'
        f"<caption>{escape(section.title)}: every run; {escape(unit.label)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></details>"
    )


def _run_row(model: Model, run: Run, unit: Unit) -> str:
    starts = run.provenance
    final = unit.text(math.inf if run.status == FAILED else run.headline_final)
    ended = (
        run.status
        + (f": {run.reason}" if run.reason else "")
        + (f"; {len(starts)} sittings" if len(starts) > 1 else "")
    )
    numbers = [progress(run), duration(run.seconds), unit.text(run.headline_min), final]
    texts = [_each(hardware, starts), _each(_versions, starts), _each(_commit, starts), _begun(starts), run.place]
    return (
        f'<tr><th scope="row">{escape(model.label)}</th><td class="number">{run.seed}</td>'
        f"<td{cell_class(run.status)}>{escape(ended)}</td>"
        + "".join(f'<td class="number">{escape(text)}</td>' for text in numbers)
        + "".join(f"<td>{escape(text)}</td>" for text in texts)
        + "</tr>"
    )


def _each(read: Callable[[Mapping[str, Any]], str], starts: Sequence[Mapping[str, Any]]) -> str:
    """What all sittings have in common, or one after the other."""
    return "; then ".join(dict.fromkeys(read(start) for start in starts)) or "not recorded"


def hardware(start: Mapping[str, Any]) -> str:
    """What a run was made on: the GPUs, or the processor where there are none or the record says so."""
    gpus = [] if str(start.get("device", "")).startswith("cpu") else start.get("gpus") or []
    return listing(dict.fromkeys(map(str, gpus))) if gpus else str(start.get("cpu") or "unknown hardware")


def _versions(start: Mapping[str, Any]) -> str:
    names = {"ncgru": "ncgru", "torch": "torch", "python": "Python", "cuda": "CUDA"}
    return ", ".join(f"{name} {start[key]}" for key, name in names.items() if start.get(key)) or "unknown"


def _commit(start: Mapping[str, Any]) -> str:
    commit, _, dirty = str(start.get("commit") or "").partition("+")
    return commit[:12] + (f" +{dirty}" if dirty else "") if commit else "none (installed package)"


def _begun(starts: Sequence[Mapping[str, Any]]) -> str:
    """Date and time of the first start, to the minute where it is in the usual form."""
    date = str(starts[0].get("date") or "unknown") if starts else "not recorded"
    usual = re.fullmatch(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d):\d\d\+00:00", date)
    return f"{usual[1]} {usual[2]} UTC" if usual else date
