"""That the page on speed says what the committed measurements say."""

from pathlib import Path

from benchmarks import gpu_report


def test_tables_are_those_of_the_results() -> None:
    text = gpu_report.PAGE.read_text(encoding="utf-8")
    assert gpu_report.page(text, gpu_report.results()) == text, "run: python -m benchmarks.gpu_report"


def test_every_measurement_names_its_origin() -> None:
    lines = gpu_report.results()
    assert lines
    for line in lines:
        assert all(line[name] for name in ("gpu", "torch", "cuda", "cudnn", "python", "commit", "date", "ncgru"))
        assert line["commit"] not in ("unknown", "wip")


def test_the_plot_can_be_drawn(tmp_path: Path) -> None:
    gpu_report.plot(gpu_report.results(), tmp_path / "plot.svg")
    assert "nn.GRU" in gpu_report.markdown(gpu_report.results())
    assert (tmp_path / "plot.svg").stat().st_size > 10_000
