"""Provenance: enough to repeat a run, nothing about whoever ran it."""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

import ncgru
from ncgru.lab import provenance as module
from ncgru.lab.provenance import provenance

FIELDS = {"ncgru", "commit", "torch", "python", "platform", "cpu", "cores", "threads", "cuda", "gpus", "date"}


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_fields_are_json_and_true() -> None:
    found = json.loads(json.dumps(provenance()))
    assert found.keys() == FIELDS
    assert found["ncgru"] == ncgru.__version__
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert found["cores"] >= 1
    assert found["cpu"]
    assert found["commit"] is None or re.fullmatch(r"[0-9a-f]{40}(\+dirty)?", found["commit"])
    age = datetime.now(UTC) - datetime.fromisoformat(found["date"])
    assert -1 <= age.total_seconds() < 60
    assert found["date"].endswith("+00:00")


def test_no_user_host_or_path_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "somebody-special")
    text = json.dumps(provenance())
    for private in (
        getpass.getuser(),
        socket.gethostname(),
        str(Path.home()),
        os.getcwd(),
        str(Path(ncgru.__file__).parent),
    ):
        assert private not in text
    assert not re.search(r'["\s]/\w', text)


def test_release_of_the_kernel_is_cut_to_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.release", lambda: "6.1.7-built-by-somebody+")
    assert " 6.1.7 " in provenance()["platform"]
    monkeypatch.setattr("platform.release", lambda: "somebody")
    assert "somebody" not in provenance()["platform"]


def test_commit_is_that_of_the_tree_that_holds_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lab").mkdir()
    source = tmp_path / "lab" / "provenance.py"
    source.write_text("1\n")
    monkeypatch.setattr(module, "_PACKAGE", tmp_path)
    assert provenance()["commit"] is None
    git(tmp_path, "init", "--quiet")
    (tmp_path / "other").touch()
    git(tmp_path, "add", "other")
    git(tmp_path, "commit", "--quiet", "--message", "Something else")
    assert provenance()["commit"] is None, "the repository around an installed package is not its source"
    git(tmp_path, "add", "lab")
    git(tmp_path, "commit", "--quiet", "--message", "Source")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert provenance()["commit"] == commit
    (tmp_path / "untracked").touch()
    assert provenance()["commit"] == commit
    source.write_text("2\n")
    assert provenance()["commit"] == f"{commit}+dirty"


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance()["commit"] is None
