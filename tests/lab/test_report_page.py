"""The page and the figures: whole, alone, safe against what names and notes hold, and the same bytes every time."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ncgru.lab.errors import LabError
from ncgru.lab.report import ReportFiles, write_report
from tests.lab.written_runs import end, finished, gradients, records, small, write_run

EVIL = """</script><script>alert(1)</script><img src=x onerror=alert(1)> & "a" 'b' $x_$ {style} ]]> --> \\u003c"""
EMPTY = {"meta", "link", "br", "img", "hr", "input"}


class Reader(HTMLParser):
    """The page's elements with their attributes and texts; complains of tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def all(self, tag: str) -> Iterator[dict[str, str | None]]:
        return (attributes for name, attributes in self.elements if name == tag)

    def text(self, tag: str) -> str:
        return "".join(text for name, text in self.texts if name == tag)


def evil_runs(root: Path) -> None:
    recipe = replace(small("parenthesis-100/nc-gru-c"), note=EVIL)
    write_run(root, recipe, 0, [*records(recipe, 0, 1e-3), gradients(2000), end(2000)])
    broken = [*records(recipe, 1, 1e-3, until=500), end(500, "failed", EVIL)]
    broken[0]["provenance"] = {**broken[0]["provenance"], "cpu": EVIL, "commit": EVIL, "date": EVIL}
    write_run(root, recipe, 1, broken)
    own = write_run(root, small("parenthesis-100/gru"), 0, [*records(small("parenthesis-100/gru"), 0, 1e-3), end(2000)])
    description = json.loads((own / "recipe.json").read_text())
    (own / "recipe.json").write_text(json.dumps({**description, "name": f"_{EVIL}/_{EVIL}", "batch_size": EVIL}))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> ReportFiles:
    root = tmp_path_factory.mktemp("evil")
    evil_runs(root / "runs")
    return write_report([root / "runs"], root / "out")


@pytest.fixture(scope="module")
def page(report: ReportFiles) -> Reader:
    return Reader(report.page.read_text(encoding="utf-8"))


def test_what_names_and_notes_hold_is_text(page: Reader) -> None:
    assert len(list(page.all("script"))) == 2
    assert list(page.all("img")) == []
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert EVIL in page.text("dd")
    assert any(EVIL in text for tag, text in page.texts if tag == "li")
    assert any(text == f"_{EVIL.partition('/')[0]}" for tag, text in page.texts if tag == "h2")


def test_page_needs_nothing_from_elsewhere(page: Reader, report: ReportFiles) -> None:
    assert list(page.all("link")) == []
    assert all("src" not in attributes for _, attributes in page.elements)
    text = report.page.read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\s\"'<]*", text)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in text
    links = [attributes["href"] for attributes in page.all("a")]
    anchors = {attributes.get("id") for _, attributes in page.elements}
    for link in links:
        assert link is not None
        if link.startswith("#"):
            assert link[1:] in anchors
        else:
            assert (report.page.parent / link).is_file()


def test_policy_allows_the_pages_own_script_and_style_alone(page: Reader, report: ReportFiles) -> None:
    (policy,) = (a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    text = report.page.read_text(encoding="utf-8")
    for directive, pattern in (("style-src", r"<style>(.*?)</style>"), ("script-src", r"<script>(.*?)</script>")):
        (content,) = re.findall(pattern, text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy


def test_chart_data_are_strict_json(report: ReportFiles) -> None:
    text = report.page.read_text(encoding="utf-8")
    (block,) = re.findall(r'<script type="application/json" id="charts">(.*?)</script>', text)
    charts = json.loads(block)
    assert [chart["title"] for chart in charts][:2] == ["Loss", "Orthogonality error"]
    labels = {series["label"] for chart in charts for view in chart["views"] for series in view["series"]}
    assert "NC-GRU(U_c)" in labels
    for chart in charts:
        for view in chart["views"]:
            for series in view["series"]:
                assert len(series["x"]) == len(series["median"]) == len(series["n"])


def test_tables_and_controls_are_accessible(page: Reader) -> None:
    tables = list(page.all("table"))
    assert len(list(page.all("caption"))) == len(tables) > 2
    assert all(attributes.get("scope") for attributes in page.all("th"))
    (html,) = page.all("html")
    assert html["lang"] == "en"
    assert len({attributes["id"] for _, attributes in page.elements if "id" in attributes}) == sum(
        "id" in attributes for _, attributes in page.elements
    )


def test_failures_and_provenance_are_there(page: Reader) -> None:
    items = page.text("li")
    assert "1 run failed" in items
    assert "NC-GRU(U_c), seed 1 failed at step 500 of 2,000" in items
    assert "ncgru 0.1.0, torch 2.13.0, Python 3.12.4" in page.text("td")
    assert "0123456789ab" in page.text("td")
    assert "2026-11-18 12:00 UTC" in page.text("td")
    assert "steps" in page.text("code")


def test_same_runs_give_the_same_bytes(report: ReportFiles, tmp_path: Path) -> None:
    evil_runs(tmp_path / "runs")
    again = write_report([tmp_path / "runs"], tmp_path / "out")
    assert again.page.read_bytes() == report.page.read_bytes()
    assert again.tables.read_bytes() == report.tables.read_bytes()
    assert len(again.figures) == len(report.figures) > 4
    for one, other in zip(again.figures, report.figures, strict=True):
        assert one.name == other.name
        assert one.read_bytes() == other.read_bytes(), one.name


def test_figures_are_png_and_pdf_in_print_resolution(report: ReportFiles) -> None:
    assert {file.suffix for file in report.figures} == {".png", ".pdf"}
    for file in report.figures:
        content = file.read_bytes()
        assert content.startswith(b"\x89PNG" if file.suffix == ".png" else b"%PDF-")
        assert b"CreationDate" not in content
    png = next(file for file in report.figures if file.suffix == ".png").read_bytes()
    width, height = int.from_bytes(png[16:20]), int.from_bytes(png[20:24])
    assert (width, height) == (780, 525)


def test_figures_are_left_out_on_request(tmp_path: Path) -> None:
    finished(tmp_path / "runs", small("adding-200/gru"), 1e-3, [0])
    files = write_report([tmp_path / "runs"], tmp_path / "out", figures=False)
    assert files.figures == ()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["report.html", "tables.md"]
    assert "adding-200" in files.tables.read_text(encoding="utf-8")


def test_runs_without_a_single_value_make_a_page(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", small("adding-200/gru"), 0, [])
    files = write_report([tmp_path / "runs"], tmp_path / "out")
    page = Reader(files.page.read_text(encoding="utf-8"))
    assert files.figures == ()
    assert "GRU, seed 0 was interrupted at step 0 of 2,000" in page.text("li")


def test_out_that_is_a_file_is_refused(tmp_path: Path) -> None:
    finished(tmp_path / "runs", small("adding-200/gru"), 1e-3, [0])
    (tmp_path / "out").write_text("mine")
    with pytest.raises(LabError, match="write the report to"):
        write_report([tmp_path / "runs"], tmp_path / "out", figures=False)
    assert (tmp_path / "out").read_text() == "mine"
