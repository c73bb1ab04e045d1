"""Finding NVRTC, compiling for GPUs that are not there, and what a failure says."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncgru._cuda import ARCHITECTURES, CompileError, NvrtcUnavailableError, nvrtc
from ncgru._cuda.cubin import Cubin
from ncgru._cuda.kernels import read_sources

PLAIN = 'extern "C" __global__ void plain(float* x, long long n, float s) { if (threadIdx.x < n) x[threadIdx.x] *= s; }'


def compiled(text: str, *options: str, architecture: str = "sm_90") -> Cubin:
    return nvrtc.load().compile({"plain.cu": text}, "plain.cu", [*nvrtc.STANDARD_OPTIONS, *options], architecture)


def test_it_is_found_in_a_package() -> None:
    compiler = nvrtc.load()
    assert Path(compiler.where).is_file()
    assert compiler.version >= (11, 8)
    assert compiler.identity.startswith("{}.{} ".format(*compiler.version))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_for_every_architecture(architecture: str) -> None:
    options = [*nvrtc.STANDARD_OPTIONS, "-DFACTOR=2"]
    cubin = nvrtc.load().compile(read_sources("tests.cuda_support", "simple.cu"), "simple.cu", options, architecture)
    assert set(cubin.resources()) == {"scale", "through_shared", "wait_for_all", "spin", "hungry"}
    assert cubin.parameters("scale") == (8, 8, 8, 4, 8)
    assert cubin.parameters("spin") == (8,)
    assert all(0 < used.registers <= 255 for used in cubin.resources().values())
    assert all(used.local_bytes == used.spill_stores == 0 for used in cubin.resources().values())


def test_reports_spills_and_static_shared_memory() -> None:
    options = [*nvrtc.STANDARD_OPTIONS, "-DFACTOR=2", "--maxrregcount=24"]
    cubin = nvrtc.load().compile(read_sources("tests.cuda_support", "simple.cu"), "simple.cu", options, "sm_90")
    starved = cubin.resources()["hungry"]
    assert starved.registers <= 24
    assert min(starved.local_bytes, starved.spill_stores, starved.spill_loads) > 0
    shared = compiled('extern "C" __global__ void s() { __shared__ volatile float x[100]; x[threadIdx.x] = 1; }')
    assert shared.resources()["s"].static_shared == 400


def test_spills_of_called_functions_count() -> None:
    body = "float v[64]; for (int i = 0; i < 64; ++i) v[i] = x[i * 32]; __syncthreads();"
    body += "for (int i = 0; i < 64; ++i) x[i * 32] = v[63 - i] * v[(i + 5) % 64];"
    called = "__noinline__ __device__ void work(float* x) {" + body.replace("for", '_Pragma("unroll") for') + "}"
    kernel = 'extern "C" __global__ void outer(float* x) { work(x + threadIdx.x); work(x + 2 * threadIdx.x); }'
    used = compiled(called + kernel, "--maxrregcount=24").resources()["outer"]
    assert min(used.local_bytes, used.spill_stores, used.spill_loads) > 100


def test_parameters_may_be_structures_or_missing() -> None:
    cubin = compiled(
        'struct Big { float x[5]; }; extern "C" __global__ void none() {}'
        'extern "C" __global__ void big(const __grid_constant__ Big b, float* y) { *y = b.x[3]; }'
    )
    assert cubin.parameters("none") == ()
    assert cubin.parameters("big") == (20, 8)
    with pytest.raises(ValueError, match=r"no kernel 'bigger', only big, none; is it extern"):
        cubin.parameters("bigger")
    with pytest.raises(ValueError, match="ELF"):
        Cubin(b"no machine code", "").parameters("big")


def test_an_error_shows_what_the_compiler_said() -> None:
    with pytest.raises(CompileError, match=r"(?s)plain.cu does not compile for sm_90.*-DX=1.*plain.cu\(1\).*speling"):
        compiled("speling mistake;", "-DX=1")
    with pytest.raises(CompileError, match="sm_12345"):
        compiled(PLAIN, architecture="sm_12345")


def test_only_the_given_headers_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stray.cuh").write_text("#define STRAY 1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CompileError, match=r"stray\.cuh"):
        compiled('#include "stray.cuh"\n' + PLAIN)


def test_architecture_is_the_devices_own_or_an_older_one_of_its_generation() -> None:
    compiler = nvrtc.load()
    assert compiler.architecture_for(9, 0) == "sm_90"
    assert compiler.architecture_for(8, 5) == "sm_80"
    with pytest.raises(NvrtcUnavailableError, match=r"does not know GPUs of compute capability 99\.1; install"):
        compiler.architecture_for(99, 1)


@pytest.mark.parametrize(
    ("platform", "preferred", "names", "expected"),
    [
        ("linux", "12", ["libnvrtc.so.13", "libnvrtc.so.12"], ["libnvrtc.so.12", "libnvrtc.so.13"]),
        ("linux", "", ["libnvrtc.so.12", "libnvrtc.so.13"], ["libnvrtc.so.13", "libnvrtc.so.12"]),
        ("linux", "12", ["libnvrtc.alt.so.12", "libnvrtc-builtins.so.12.9", "libnvrtc.so"], []),
        ("linux", "11", ["libnvrtc-672ee683.so.11.2"], ["libnvrtc-672ee683.so.11.2"]),
        ("win32", "13", ["nvrtc64_120_0.dll", "nvrtc64_130_0.dll"], ["nvrtc64_130_0.dll", "nvrtc64_120_0.dll"]),
        ("win32", "12", ["nvrtc64_120_0.alt.dll", "nvrtc-builtins64_129.dll"], []),
    ],
)
def test_files_are_sought_in_order_of_preference(
    platform: str,
    preferred: str,
    names: list[str],
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in names:
        (tmp_path / name).touch()
    monkeypatch.setattr(nvrtc, "_folders", lambda: [tmp_path, tmp_path / "missing"])
    found = nvrtc.candidates(platform, preferred)
    assert [Path(where).name for where in found if Path(where).parent == tmp_path] == expected
    # The names that the system's loader may know follow.
    assert any(Path(where).parent != tmp_path for where in found)


def test_an_installation_of_cuda_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libnvrtc.so.12").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert str(tmp_path / "lib64" / "libnvrtc.so.12") in nvrtc.candidates("linux", "12")
    assert nvrtc.candidates("darwin", "") == []


def test_where_there_is_none_the_error_says_where_it_was_sought(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "candidates", lambda platform, preferred: ["libnvrtc.so.999"])
    with pytest.raises(NvrtcUnavailableError, match=r"install nvidia-cuda-nvrtc; tried libnvrtc\.so\.999: "):
        nvrtc.load.__wrapped__()
