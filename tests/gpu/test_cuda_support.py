"""What only a GPU shows of compiling, loading and launching."""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time

import pytest
import torch

from ncgru import _cuda
from ncgru._cuda import Kernel, program

pytestmark = pytest.mark.gpu

MILLISECOND = 1_000_000
ONE = (1, 1, 1)

# An illegal access ends a process's use of the GPU, so it happens in a process of its own.
NULL_WRITE = """
import torch
from ncgru._cuda import program

torch.zeros(1, device="cuda")
kernel = program("tests.cuda_support", "simple.cu", {"FACTOR": 1}).kernel("scale", 0)
kernel.launch((1, 1, 1), (32, 1, 1), None, None, 32, 1.0, 0)
try:
    torch.cuda.synchronize()
except RuntimeError:
    pass
try:
    kernel.launch((1, 1, 1), (32, 1, 1), None, None, 32, 1.0, 0)
except RuntimeError as error:
    print(error)
"""


def kernel(name: str, index: int = 0, **defines: int) -> Kernel:
    return program("tests.cuda_support", "simple.cu", {"FACTOR": 2, **defines}).kernel(name, index)


def scaled(x: torch.Tensor | None, y: torch.Tensor, scale: float, offset: int, **defines: int) -> None:
    blocks = min(-(-y.numel() // 256), 1024)
    launch = kernel("scale", y.get_device(), **defines).launch
    launch((blocks, 1, 1), (256, 1, 1), x, y, y.numel(), scale, offset)


def test_nothing_is_missing() -> None:
    report = _cuda.diagnose()
    print(report)
    assert _cuda.why_unavailable(0) is None
    assert all(isinstance(part, dict) and part["problem"] is None for part in report.values())


def test_arguments_arrive() -> None:
    x, y = torch.randn(10_000, device="cuda"), torch.empty(10_000, device="cuda")
    scaled(x, y, 0.5, -3)
    torch.testing.assert_close(y, 2 * (0.5 * x - 3))
    scaled(None, y, 0.5, 2**40)
    torch.testing.assert_close(y, torch.full_like(y, 2.0**41))


def test_the_driver_and_the_compiler_count_alike() -> None:
    loaded = kernel("hungry")
    major, minor = torch.cuda.get_device_capability(0)
    used = program("tests.cuda_support", "simple.cu", {"FACTOR": 2}).cubin(f"sm_{major}{minor}").resources()["hungry"]
    assert (loaded.registers, loaded.local_bytes) == (used.registers, used.local_bytes)
    assert loaded.static_shared >= used.static_shared
    assert loaded.max_threads >= 256


def test_all_of_the_shared_memory_is_there_for_the_asking() -> None:
    through, y = kernel("through_shared"), torch.zeros(1, dtype=torch.int64, device="cuda")
    assert through.max_shared > 48 * 1024
    words = through.max_shared // 4
    through.launch(ONE, (256, 1, 1), y, words, shared=through.max_shared)
    assert y.item() == words * (words - 1) // 2
    with pytest.raises(RuntimeError, match=r"'through_shared' cannot be launched.*CUDA_ERROR_INVALID_VALUE"):
        through.launch(ONE, (256, 1, 1), y, words, shared=through.max_shared + 4096)
    through.launch(ONE, (256, 1, 1), y, 3, shared=12)
    assert y.item() == 3


def test_blocks_of_a_cooperative_launch_wait_for_each_other() -> None:
    wait, counter = kernel("wait_for_all"), torch.zeros(1, dtype=torch.int32, device="cuda")
    blocks = wait.resident_blocks(1024)
    assert blocks >= torch.cuda.get_device_properties(0).multi_processor_count
    wait.launch((blocks, 1, 1), (1024, 1, 1), counter, 10, cooperative=True)
    assert counter.item() == 10 * blocks


def test_a_cooperative_grid_that_does_not_fit_is_refused_and_harmless() -> None:
    wait, counter = kernel("wait_for_all"), torch.zeros(1, dtype=torch.int32, device="cuda")
    blocks = wait.resident_blocks(1024)
    with pytest.raises(RuntimeError, match=rf"its {blocks + 1} blocks must run at the same time, and {blocks} fit"):
        wait.launch((blocks + 1, 1, 1), (1024, 1, 1), counter, 1, cooperative=True)
    wait.launch((2, 1, 1), (32, 1, 1), counter, 1, cooperative=True)
    assert counter.item() == 2


@pytest.mark.parametrize("first_use", [False, True])
def test_a_launch_is_captured_in_a_graph(first_use: bool) -> None:
    defines = {"CAPTURED": 1} if first_use else {}
    x, y = torch.randn(1000, device="cuda"), torch.zeros(1000, device="cuda")
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    if not first_use:
        scaled(x, y, 1.0, 0)
        kernel("wait_for_all")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaled(x, y, 3.0, 1, **defines)
        kernel("wait_for_all", **defines).launch((4, 1, 1), (32, 1, 1), counter, 1, cooperative=True)
    for value in (1.0, -2.0):
        x.fill_(value)
        counter.zero_()
        graph.replay()
        torch.testing.assert_close(y, torch.full_like(y, 2 * (3 * value + 1)))
        assert counter.item() == 4


def test_it_runs_on_the_current_stream() -> None:
    spin, aside = kernel("spin"), torch.cuda.Stream()
    x, y = torch.randn(1000, device="cuda"), torch.zeros(1000, device="cuda")
    scaled(x, y, 0.0, 0)  # loading code would wait for what runs
    torch.cuda.synchronize()
    with torch.cuda.stream(aside):
        spin.launch(ONE, ONE, 300 * MILLISECOND)
    scaled(x, y, 1.0, 0)
    torch.cuda.current_stream().synchronize()
    assert not aside.query()
    torch.testing.assert_close(y, 2 * x)
    aside.synchronize()


def test_a_thread_that_never_used_the_gpu_may_launch() -> None:
    failures: list[BaseException] = []
    launch = kernel("scale").launch

    def work(y: torch.Tensor, number: int) -> None:
        try:
            for _ in range(500):
                launch(ONE, (32, 1, 1), None, y, 32, float(number), 1)
        except BaseException as error:
            failures.append(error)

    results = [torch.zeros(32, device="cuda") for _ in range(4)]
    threads = [threading.Thread(target=work, args=(y, number)) for number, y in enumerate(results)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert failures == []
    assert [y.unique().tolist() for y in results] == [[2.0 * (number + 1)] for number in range(4)]


def test_a_launch_costs_the_host_little() -> None:
    x, y = torch.randn(32, device="cuda"), torch.zeros(32, device="cuda")
    launch = kernel("scale").launch
    times = []
    for _ in range(50):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            launch(ONE, (32, 1, 1), x, y, 32, 1.0, 0)
        times.append((time.perf_counter() - start) / 100)
    print(f"a launch of five arguments: {1e6 * statistics.median(times):.2f} microseconds of the host")
    assert statistics.median(times) < 20e-6


def test_the_error_of_an_earlier_kernel_is_named() -> None:
    done = subprocess.run([sys.executable, "-c", NULL_WRITE], capture_output=True, text=True, check=False, timeout=240)
    assert "kernel 'scale' cannot be launched on cuda:0" in done.stdout, done.stderr
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in done.stdout


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_device_of_the_kernel_counts_and_not_the_current_one() -> None:
    x, y = torch.randn(1000, device="cuda:1"), torch.empty(1000, device="cuda:1")
    with torch.cuda.device(0):
        scaled(x, y, 1.0, 0)
        assert torch.cuda.current_device() == 0
    torch.testing.assert_close(y, 2 * x)
    with pytest.raises(ValueError, match="is on cuda:1"):
        kernel("scale", 0).launch(ONE, ONE, x, y, 1, 1.0, 0)
