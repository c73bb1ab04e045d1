"""Finds the Penn Treebank for the tests that read it; where there is none, they are not selected."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FILES = ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt")


def _penn_folder() -> Path | None:
    """The folder with the word files: shared data beside the project, else NCGRU_DATA."""
    root = Path(__file__).parents[3]
    named = os.environ.get("NCGRU_DATA")
    candidates = [root.parent / "shared" / "data" / "ptb", *([Path(named)] if named else [])]
    return next((folder for folder in candidates if all((folder / file).is_file() for file in FILES)), None)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "penn: reads the Penn Treebank; deselected where its files are not to be found")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _penn_folder() is not None:
        return
    without = [item for item in items if item.get_closest_marker("penn")]
    if without:
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if not item.get_closest_marker("penn")]


@pytest.fixture(scope="session")
def penn_folder() -> Path:
    folder = _penn_folder()
    assert folder is not None
    return folder
