"""The page in a real browser: drawn, answering to mouse and keyboard, alone, and safe. Needs Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ncgru.lab.report import Run, load_runs, write_report
from ncgru.lab.report.values import number, quantile
from tests.lab.browser import Browser
from tests.lab.test_report_page import evil_runs
from tests.lab.written_runs import campaign, small, write_run

pytestmark = pytest.mark.slow

LOSS = "#parenthesis-100 figure[data-chart='0']"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    campaign(folder / "runs", seeds=4)
    write_report([folder / "runs"], folder / "out", figures=False)
    return folder


@pytest.fixture
def browser(root: Path, tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path) as browser:
        browser.open(root / "out/report.html")
        browser.run(f"document.querySelector(\"{LOSS}\").scrollIntoView({{behavior: 'instant'}})")
        yield browser
        assert browser.errors == []
        assert browser.requests == [(root / "out/report.html").as_uri()]


def click(browser: Browser, text: str, figure: str = LOSS) -> None:
    """Click the button with this text as a mouse does."""
    x, y = browser.run(
        f"""(() => {{ const button = [...document.querySelectorAll("{figure} button")]
            .find((one) => one.textContent === {text!r});
            const box = button.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2]; }})()"""
    )
    browser.click(x, y)
    browser.move(1, 1)


def amount(browser: Browser, selector: str) -> int:
    found = browser.run(f'document.querySelectorAll("{selector}").length')
    assert isinstance(found, int)
    return found


def texts(browser: Browser, selector: str) -> list[str]:
    found = browser.run(f'[...document.querySelectorAll("{selector}")].map((one) => one.textContent)')
    assert isinstance(found, list)
    return found


def place(browser: Browser) -> tuple[float, float, float, float]:
    """Left, top, width and height of the loss plot in the window."""
    x, y, width, height = browser.run(
        f'(() => {{ const b = document.querySelector("{LOSS} .plot > svg").getBoundingClientRect();'
        "return [b.x, b.y, b.width, b.height]; })()"
    )
    return x, y, width, height


def parenthesis_values(root: Path, model: str, step: int) -> list[float]:
    """The training losses of a model's seeds at a step, as the logs have them."""
    runs: list[Run] = [run for run in load_runs(root / "runs") if run.name == f"parenthesis-100/{model}"]
    return [value for run in runs if (value := run.curves["train"].at(step)) is not None]


def test_every_model_has_a_median_and_a_band(browser: Browser) -> None:
    assert amount(browser, f"{LOSS} .median") == 6
    assert amount(browser, f"{LOSS} .band") == 6
    assert amount(browser, f"{LOSS} .seed") == 0
    assert all(
        d.startswith("M")
        for d in browser.run(f"[...document.querySelectorAll(\"{LOSS} .median\")].map((p) => p.getAttribute('d'))")
    )
    assert "trivial loss 0.136" in texts(browser, f"{LOSS} .reference-label")


def test_failed_seeds_are_marked(browser: Browser) -> None:
    assert "LSTM, seed 0 failed" in texts(browser, f"{LOSS} .fail title")
    assert amount(browser, f"{LOSS} .fail") == 3


def test_scale_switches_by_mouse_and_by_keyboard(browser: Browser) -> None:
    ticks = texts(browser, f"{LOSS} .plot text")
    assert "10⁻³" in ticks
    click(browser, "Logarithmic")
    linear = texts(browser, f"{LOSS} .plot text")
    assert "0.05" in linear
    assert "irreducible loss 0" in linear
    browser.run(
        f"[...document.querySelectorAll(\"{LOSS} button\")].find((b) => b.textContent === 'Logarithmic').focus()"
    )
    browser.press(" ")
    assert texts(browser, f"{LOSS} .plot text") == ticks


def test_a_logarithmic_axis_within_a_decade_has_ticks_all_along(tmp_path: Path) -> None:
    recipe = small("parenthesis-100/gru")
    curve = [{"kind": "train", "step": step, "loss": 0.142 - 3e-5 * step} for step in range(100, 2001, 100)]
    write_run(tmp_path / "runs", recipe, 0, curve)
    page = write_report([tmp_path / "runs"], tmp_path / "out", figures=False).page
    with Browser(tmp_path / "profile") as browser:
        browser.open(page)
        assert {"0.08", "0.1", "0.12", "0.14"} <= set(texts(browser, f"{LOSS} .plot text"))


def test_seeds_appear(browser: Browser) -> None:
    click(browser, "Every seed")
    assert amount(browser, f"{LOSS} .seed") == 24


def test_legend_hides_a_model(browser: Browser) -> None:
    click(browser, "scoRNN")
    assert amount(browser, f"{LOSS} .median") == 5
    pressed = browser.run(
        f'[...document.querySelectorAll("{LOSS} .legend button")].map((b) => [b.textContent, b.ariaPressed])'
    )
    assert [name for name, state in pressed if state == "false"] == ["scoRNN"]
    click(browser, "scoRNN")
    assert amount(browser, f"{LOSS} .median") == 6


def test_all_models_hidden_leaves_a_word(browser: Browser) -> None:
    for label in texts(browser, f"{LOSS} .legend button"):
        click(browser, label)
    assert amount(browser, f"{LOSS} .median") == 0
    assert any("No model is shown" in text for text in texts(browser, f"{LOSS} .plot text"))


def test_hovering_a_legend_entry_shows_its_seeds(browser: Browser) -> None:
    x, y = browser.run(
        f'(() => {{ const b = document.querySelector("{LOSS} .legend button").getBoundingClientRect();'
        "return [b.x + 5, b.y + 5]; })()"
    )
    browser.move(x, y)
    assert amount(browser, f"{LOSS} .seed") == 4
    browser.move(1, 1)
    assert amount(browser, f"{LOSS} .seed") == 0


def test_hover_reads_the_values_of_the_logs(browser: Browser, root: Path) -> None:
    x, y, width, height = place(browser)
    browser.move(x + 0.6 * width, y + 0.5 * height)
    head = browser.run(f'document.querySelector("{LOSS} .tip .head").textContent')
    step = int(head.removeprefix("iteration ").replace(",", ""))
    rows = browser.run(
        f'[...document.querySelectorAll("{LOSS} .tip tr")]'
        ".map((row) => [...row.children].slice(1).map((cell) => cell.textContent))"
    )
    shown = {row[0]: row[1:] for row in rows}
    values = parenthesis_values(root, "gru", step)
    low, median, high = (number(float(f"{quantile(values, share):.4g}")) for share in (0.25, 0.5, 0.75))
    assert shown["GRU"] == [median, f"{low} – {high}", "4 seeds"]
    browser.move(1, 1)
    assert browser.run(f'document.querySelector("{LOSS} .tip").hidden') is True


def test_nearest_seed_is_named(browser: Browser) -> None:
    click(browser, "Every seed")
    x, y, width, height = place(browser)
    browser.move(x + 0.5 * width, y + 0.5 * height)
    assert "Nearest: " in browser.run(f'document.querySelector("{LOSS} .tip").textContent')
    assert amount(browser, f"{LOSS} .seed.near") == 1


def test_keyboard_reads_values_aloud(browser: Browser) -> None:
    browser.run(f'document.querySelector("{LOSS} .plot > svg").focus()')
    spoken = f'document.querySelector("{LOSS} [aria-live]").textContent'
    browser.press("ArrowRight")
    first = browser.run(spoken)
    assert first.startswith("iteration 100; LSTM ")
    browser.press("ArrowRight")
    assert browser.run(spoken).startswith("iteration 200; ")
    browser.press("End")
    assert browser.run(spoken).startswith("iteration 20,000; ")
    browser.press("Escape")
    assert browser.run(f'document.querySelector("{LOSS} .tip").hidden') is True


def test_other_split_is_shown(browser: Browser) -> None:
    before = browser.run(f"document.querySelector(\"{LOSS} .median\").getAttribute('d')")
    click(browser, "test")
    assert browser.run(f"document.querySelector(\"{LOSS} .median\").getAttribute('d')") != before


def test_every_chart_is_drawn(browser: Browser) -> None:
    figures = amount(browser, "figure[data-chart]")
    assert figures == 11
    assert browser.run(
        "[...document.querySelectorAll('figure[data-chart]')].every((f) => f.querySelector('.median[d^=M]'))"
    )


def test_page_fits_a_narrow_window(root: Path, tmp_path: Path) -> None:
    with Browser(tmp_path, width=500, height=900) as browser:
        browser.open(root / "out/report.html")
        assert browser.run("document.documentElement.scrollWidth <= window.innerWidth")


def test_dark_and_light(root: Path, tmp_path: Path) -> None:
    grounds = []
    for dark in (False, True):
        with Browser(tmp_path / str(dark), dark=dark) as browser:
            browser.open(root / "out/report.html")
            colour = browser.run("getComputedStyle(document.body).backgroundColor")
            grounds.append(sum(map(int, colour.removeprefix("rgb(").rstrip(")").split(","))))
    light, dark_ground = grounds
    assert light > 700
    assert dark_ground < 100


def test_names_and_notes_do_nothing(tmp_path: Path) -> None:
    evil_runs(tmp_path / "runs")
    files = write_report([tmp_path / "runs"], tmp_path / "out", figures=False)
    with Browser(tmp_path / "profile") as browser:
        browser.open(files.page)
        browser.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        assert amount(browser, "img") == 0
        assert amount(browser, "figure .median") > 0
        assert browser.errors == []
        assert browser.requests == [files.page.as_uri()]
