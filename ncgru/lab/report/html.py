"""The report as one page that needs nothing but itself: no network, no other file, no library.

Every text from outside goes through `escape` or into a JSON block in which `<`, `>` and `&` are written as escapes. The
page also carries a content security policy that allows its own script and style by their hashes and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from urllib.parse import quote

import ncgru
from ncgru.lab.report import palette
from ncgru.lab.report.charts import Chart, charts
from ncgru.lab.report.figures import slug
from ncgru.lab.report.groups import Section
from ncgru.lab.report.html_charts import chart_data
from ncgru.lab.report.html_runs import hardware, runs_html, settings_html
from ncgru.lab.report.html_tables import table_html
from ncgru.lab.report.missing import missing, summary
from ncgru.lab.report.run import FINISHED, Run
from ncgru.lab.report.tables import headline_table, matrix_table
from ncgru.lab.report.values import count, duration, listing

TITLE = "Runs of orthogonal recurrent networks"
NO_SCRIPT = (
    "<noscript><p class='attention'>The plots need JavaScript; tables and lists are complete without.</p></noscript>"
)

Figures = Mapping[tuple[str, str], Sequence[Path]]


def page(
    sections: Sequence[Section], problems: Sequence[str] = (), figures: Figures | None = None, out: Path = Path()
) -> str:
    """The report as HTML.

    Args:
        sections: the tasks.
        problems: what could not be read or was set aside.
        figures: files by section and chart, to link to.
        out: the folder in which the page will lie.
    """
    anchors = _anchors(sections)
    drawn: list[Chart] = []
    body = [NO_SCRIPT, _attention(sections, anchors, problems)]
    body += [
        _section(section, anchor, drawn, figures or {}, out) for section, anchor in zip(sections, anchors, strict=True)
    ]
    style, script = _style(), _asset("page.js")
    runs = {id(run): run for section in sections for run in section.runs}.values()
    parts = {
        "title": escape(TITLE),
        "lede": escape(_lede(list(runs))),
        "navigation": "".join(
            f'<li><a href="#{anchor}">{escape(section.title)}</a></li>'
            for section, anchor in zip(sections, anchors, strict=True)
        ),
        "body": "\n".join(body),
        "footer": escape(f"Made by ncgru {ncgru.__version__} from {count(len(runs), 'run')}."),
        "charts": chart_data(drawn),
        "style": style,
        "style_hash": _hash(style),
        "script": script,
        "script_hash": _hash(script),
    }
    return re.sub(r"\{(\w+)\}", lambda found: parts[found[1]], _asset("page.html"))


def _section(section: Section, anchor: str, drawn: list[Chart], figures: Figures, out: Path) -> str:
    found = charts(section)
    places = []
    for chart in found:
        places.append(_figure(chart, len(drawn), figures.get((section.title, chart.key), ()), out))
        drawn.append(chart)
    matrices = matrix_table(section)
    parts = [
        f'<section id="{anchor}" aria-labelledby="{anchor}-title">',
        f'<h2 id="{anchor}-title">{escape(section.title)}</h2>',
        table_html(headline_table(section)),
        *places[:1],
        f'<div class="pair">{"".join(places[1:])}</div>' if places[1:] else "",
        table_html(matrices) if matrices else "",
        _missing(section, anchor),
        settings_html(section),
        runs_html(section),
        "</section>",
    ]
    return "\n".join(part for part in parts if part)


def _lede(runs: Sequence[Run]) -> str:
    finished = sum(run.status == FINISHED for run in runs)
    time = sum(run.seconds or 0.0 for run in runs)
    recipes = {run.name for run in runs}
    machines = dict.fromkeys(hardware(start) for run in runs for start in run.provenance)
    shown = [*list(machines)[:3], *(["others"] if len(machines) > 3 else [])]
    where = f" on {listing(shown)}" if shown else ""
    return (
        f"{count(len(runs), 'run')} of {count(len(recipes), 'recipe')}, {finished} of them finished; "
        f"{duration(time)} of training in all{where}."
    )


def _attention(sections: Sequence[Section], anchors: Sequence[str], problems: Sequence[str]) -> str:
    items = [f"<li>{escape(problem)}</li>" for problem in problems]
    items += [
        f'<li><a href="#{anchor}-missing">{escape(section.title)}</a>: {escape(words)}</li>'
        for section, anchor in zip(sections, anchors, strict=True)
        if (words := summary(section))
    ]
    if not items:
        return ""
    content = f'<h2 id="gaps">What is missing</h2><ul>{"".join(items)}</ul>'
    return f'<aside class="attention" aria-labelledby="gaps">{content}</aside>'


def _missing(section: Section, anchor: str) -> str:
    sentences = missing(section)
    if not sentences:
        return ""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<div class="attention" id="{anchor}-missing"><h2>What is missing here</h2><ul>{items}</ul></div>'


def _figure(chart: Chart, number: int, files: Sequence[Path], out: Path) -> str:
    links = " · ".join(
        f'<a href="{escape(quote(os.path.relpath(file, out)))}">{escape(file.suffix[1:].upper())}</a>' for file in files
    )
    files_text = f'<span class="files">Figure: {links}</span>' if links else ""
    return f'<figure data-chart="{number}"><figcaption><h3>{escape(chart.title)}</h3>{files_text}</figcaption></figure>'


def _anchors(sections: Sequence[Section]) -> list[str]:
    stems = [slug(section.title) for section in sections]
    return [stem if stems.count(stem) == 1 else f"{stem}-{index}" for index, stem in enumerate(stems, 1)]


def _style() -> str:
    numbers = range(len(palette.LIGHT))
    light, dark = (
        "\n".join(f"  --c{number}: {palette.colour(number, dark)};" for number in numbers) for dark in (False, True)
    )
    rules = "".join(f".c{n} {{ stroke: var(--c{n}); }} .f{n} {{ fill: var(--c{n}); }}\n" for n in numbers)
    return _asset("page.css").replace("@light@", light).replace("@dark@", dark) + rules


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
