"""The cache on disk: whole entries only, whoever writes, whatever breaks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ncgru._cuda.cache import Cache, default_folder

# Stores and loads the same few keys over and over; every store holds another number of equal bytes.
RACER = """
import sys
from pathlib import Path
from ncgru._cuda.cache import Cache

cache, me = Cache(Path(sys.argv[1])), int(sys.argv[2])
for round in range(150):
    key = f"key{round % 3}"
    assert cache.store(key, bytes([me]) * (1000 + 7919 * (round % 5))), cache.problem
    found = cache.load(key)
    assert found is not None and len(set(found)) == 1, cache.problem
assert cache.problem is None, cache.problem
"""


def entry(folder: Path, key: str = "key") -> Path:
    return folder / f"{key}.cubin"


def aged(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_keeps_what_it_is_given(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "new" / "folder")
    assert cache.load("key") is None
    assert cache.store("key", b"content")
    assert Cache(cache.folder).load("key") == b"content"
    assert cache.store("empty", b"")
    assert cache.load("empty") == b""
    assert cache.problem is None
    assert cache.summary()["entries"] == 2


def test_processes_may_race(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RACER, str(tmp_path)]
    racers = [subprocess.Popen([*command, str(number)]) for number in range(1, 5)]
    assert [racer.wait(timeout=200) for racer in racers] == [0, 0, 0, 0]
    assert sorted(os.listdir(tmp_path)) == [f"key{number}.cubin" for number in range(3)]


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "longer", "foreign"])
def test_a_damaged_entry_is_not_used_and_is_replaced(damage: str, tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.store("key", b"content")
    whole = entry(tmp_path).read_bytes()
    damaged = {
        "truncated": whole[:-1],
        "empty": b"",
        "flipped": whole[:-1] + bytes([whole[-1] ^ 1]),
        "longer": whole + b"x",
        "foreign": b"another format" + whole,
    }
    entry(tmp_path).write_bytes(damaged[damage])
    assert cache.load("key") is None
    assert "was damaged" in str(cache.problem)
    assert cache.store("key", b"content")
    assert cache.load("key") == b"content"


def test_a_folder_that_cannot_be_used_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = Cache(tmp_path / "file")
    assert cache.load("key") is None
    assert not cache.store("key", b"content")
    assert str(tmp_path / "file") in str(cache.summary()["problem"])


def test_an_entry_that_cannot_be_read_is_no_error(tmp_path: Path) -> None:
    entry(tmp_path).mkdir()
    cache = Cache(tmp_path)
    assert cache.load("key") is None
    assert not cache.store("key", b"content")
    assert cache.problem
    assert list(tmp_path.glob("*.partial")) == []


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    cache = Cache(tmp_path)
    assert not cache.store("key", b"content")
    assert "No space left" in str(cache.problem)
    assert os.listdir(tmp_path) == []


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for variable in ("NCGRU_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    cache = Cache()
    assert cache.load("key") is None
    assert not cache.store("key", b"content")
    assert cache.summary() == {
        "folder": None,
        "entries": 0,
        "bytes": 0,
        "problem": "Could not determine home directory.",
    }


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=3500)
    for age, key in ((300, "a"), (200, "b"), (100, "c")):
        cache.store(key, bytes(1000))
        aged(entry(tmp_path, key), age)
    assert cache.load("a") is not None
    cache.store("d", bytes(1000))
    assert {path.stem for path in tmp_path.iterdir()} == {"a", "c", "d"}
    cache.store("large", bytes(9000))
    assert {path.stem for path in tmp_path.iterdir()} == {"large"}


def test_files_of_killed_writers_are_removed(tmp_path: Path) -> None:
    for name, age in (("old.partial", 7200), ("fresh.partial", 10), ("other.txt", 7200)):
        (tmp_path / name).touch()
        aged(tmp_path / name, age)
    Cache(tmp_path).store("key", b"content")
    assert sorted(os.listdir(tmp_path)) == ["fresh.partial", "key.cubin", "other.txt"]


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {}, "home/.cache/ncgru"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "home/.cache/ncgru"),
        ("linux", {"XDG_CACHE_HOME": "{}/xdg"}, "xdg/ncgru"),
        ("linux", {"XDG_CACHE_HOME": "{}/xdg", "NCGRU_CACHE": "{}/own"}, "own"),
        ("darwin", {"XDG_CACHE_HOME": "{}/xdg"}, "home/Library/Caches/ncgru"),
        ("win32", {"LOCALAPPDATA": "{}/local"}, "local/ncgru/Cache"),
        ("win32", {}, "home/AppData/Local/ncgru/Cache"),
    ],
)
def test_the_folder_is_where_the_platform_wants_it(
    platform: str, variables: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("NCGRU_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value.format(tmp_path))
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert default_folder() == tmp_path / expected
