"""Programs: compiled once a process and once a machine, and honest about what is missing."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ncgru import _cuda
from ncgru._cuda import Cubin, DriverUnavailableError, NvrtcUnavailableError, Program, driver, kernels, nvrtc, program
from ncgru._cuda.cache import Cache
from tests.cuda_support.fake_driver import OUT_OF_MEMORY, FakeDriver

HERE = "tests.cuda_support"

# Torch first, so that all that is loaded afterwards is the doing of ncgru.
QUIET_IMPORT = """
import sys
import torch
loaded = []
sys.addaudithook(lambda event, args: loaded.append(args[0]) if event == "ctypes.dlopen" else None)
import ncgru, ncgru._cuda
assert not [name for name in loaded if name], loaded
assert not torch.cuda.is_initialized()
"""

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="shows what a machine without a GPU says")


class Compilations(list[str]):
    """The architectures that were compiled for, in order."""


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compilations:
    """Count what is really compiled, and keep a cache of one's own."""
    seen = Compilations()
    compiler = nvrtc.load()
    compile_really = compiler.compile

    def counted(sources: dict[str, str], entry: str, options: Sequence[str], architecture: str) -> Cubin:
        seen.append(architecture)
        return compile_really(sources, entry, options, architecture)

    monkeypatch.setattr(compiler, "compile", counted)
    on_disk = Cache(tmp_path)
    monkeypatch.setattr(kernels, "cache", lambda: on_disk)
    return seen


def fresh(**defines: int) -> Program:
    """A program as another process would see it."""
    return Program(HERE, "simple.cu", {"FACTOR": 2, **defines})


def test_the_same_request_is_the_same_program() -> None:
    found = program(HERE, "simple.cu", {"FACTOR": 2, "OTHER": 1})
    assert program(HERE, "simple.cu", {"OTHER": 1, "FACTOR": 2}) is found
    assert program(HERE, "simple.cu", {"FACTOR": 3, "OTHER": 1}) is not found
    assert program(HERE, "simple.cu", {"FACTOR": 2, "OTHER": 1}, ["-lineinfo"]) is not found
    assert repr(found) == "tests.cuda_support/simple.cu FACTOR=2 OTHER=1"


def test_threads_compile_once(compilations: Compilations) -> None:
    shared, found = fresh(), []
    threads = [threading.Thread(target=lambda: found.append(shared.cubin("sm_90"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(cubin is found[0] for cubin in found)
    assert compilations == ["sm_90"]


def test_another_process_takes_it_from_the_disk(compilations: Compilations) -> None:
    first, again = fresh().cubin("sm_90"), fresh().cubin("sm_90")
    assert compilations == ["sm_90"]
    assert again == first
    assert again.resources()["scale"].registers > 0


def test_whatever_matters_is_compiled_anew(compilations: Compilations, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh().cubin("sm_90")
    fresh().cubin("sm_80")
    fresh(FACTOR=3).cubin("sm_90")
    Program(HERE, "simple.cu", {"FACTOR": 2}, ["-lineinfo"]).cubin("sm_90")
    assert len(compilations) == 4
    sources = kernels.read_sources(HERE, "simple.cu")
    header = {"arithmetic.cuh": sources["arithmetic.cuh"] + "// edited\n"}
    with monkeypatch.context() as edited:
        edited.setattr(kernels, "read_sources", lambda package, entry: {**sources, **header})
        fresh().cubin("sm_90")
    with monkeypatch.context() as updated:
        updated.setattr(nvrtc.load(), "identity", "99.0 1")
        fresh().cubin("sm_90")
    assert len(compilations) == 6
    fresh().cubin("sm_90")
    assert len(compilations) == 6


def test_a_damaged_entry_is_compiled_again_and_replaced(compilations: Compilations, tmp_path: Path) -> None:
    whole = fresh().cubin("sm_90").image
    (stored,) = tmp_path.glob("*.cubin")
    stored.write_bytes(stored.read_bytes()[:100])
    assert fresh().cubin("sm_90").image == whole
    assert fresh().cubin("sm_90").image == whole
    assert compilations == ["sm_90", "sm_90"]


def test_without_a_folder_it_is_kept_in_memory(
    compilations: Compilations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    broken = Cache(tmp_path / "file")
    monkeypatch.setattr(kernels, "cache", lambda: broken)
    shared = fresh()
    assert shared.cubin("sm_90") is shared.cubin("sm_90")
    assert compilations == ["sm_90"]
    report = _cuda.diagnose()
    assert isinstance(report["cache"], dict)
    assert str(tmp_path / "file") in str(report["cache"]["problem"])


def test_a_program_sees_the_headers_of_its_package_alone() -> None:
    assert set(kernels.read_sources(HERE, "simple.cu")) == {"simple.cu", "arithmetic.cuh"}


@without_gpu
def test_without_a_gpu_it_says_what_is_missing() -> None:
    assert "finds no CUDA device" in str(_cuda.why_unavailable(0))
    with pytest.raises(DriverUnavailableError, match="there is no CUDA driver on this machine"):
        fresh().kernel("scale", 0)


@without_gpu
def test_the_report_names_every_part() -> None:
    report = _cuda.diagnose()
    assert isinstance(report["nvrtc"], dict)
    assert isinstance(report["driver"], dict)
    assert report["nvrtc"]["problem"] is None
    assert report["nvrtc"]["where"] == nvrtc.load().where
    assert "no CUDA driver" in report["driver"]["problem"]


def test_without_a_compiler_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> nvrtc.Nvrtc:
        raise NvrtcUnavailableError("not found")

    monkeypatch.setattr(nvrtc, "load", missing)
    assert _cuda.diagnose()["nvrtc"] == {"version": None, "where": None, "problem": "not found"}


def test_importing_loads_no_library() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", QUIET_IMPORT], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def on_a_full_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A driver whose device has no memory left for code."""
    library = FakeDriver(fails={"cuModuleLoadData": OUT_OF_MEMORY})
    context = driver.Context(driver.Driver(library), 0)
    monkeypatch.setattr(driver, "load", lambda: context.driver)
    monkeypatch.setattr(driver, "context", lambda index: context)
    monkeypatch.setattr(kernels, "_architecture", lambda index: "sm_90")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return library


def test_memory_that_pytorch_does_not_use_is_given_to_the_code(
    on_a_full_gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", on_a_full_gpu.fails.clear)
    shared = fresh()
    assert shared.kernel("scale", 0) is shared.kernel("scale", 0)
    assert shared.kernel("spin", 0) is not shared.kernel("scale", 0)
    assert on_a_full_gpu.called.count("cuModuleLoadData") == 2


def test_where_there_is_no_memory_pytorchs_error_says_so_and_a_later_try_may_succeed(
    on_a_full_gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    shared = fresh()
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"simple\.cu FACTOR=2 cannot be loaded on cuda:0"):
        shared.kernel("scale", 0)
    on_a_full_gpu.fails.clear()
    assert shared.kernel("scale", 0).name == "scale"
