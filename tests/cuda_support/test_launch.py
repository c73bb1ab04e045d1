"""What a launch hands to the driver, and what the driver's errors become; on a driver that only writes down."""

from __future__ import annotations

import struct
import threading

import pytest
import torch

from ncgru._cuda import DriverUnavailableError, Kernel, driver, launch
from tests.cuda_support import fake_driver
from tests.cuda_support.fake_driver import OTHER_CONTEXT, PRIMARY_CONTEXT, STREAM, FakeDriver

# Tensors of the CPU are on the device of this number, so they may stand for those of a GPU here.
CPU = -1
ONE = (1, 1, 1)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    monkeypatch.setattr(launch, "current_stream", lambda index: STREAM)
    monkeypatch.setattr(launch, "current_device", lambda: 0)
    return FakeDriver()


def make_kernel(library: FakeDriver, *parameters: int, index: int = CPU) -> Kernel:
    library.parameters = parameters
    context = driver.Context(driver.Driver(library), index)
    return Kernel(driver.Module(context, b"image", "a program"), "name", parameters)


def test_arguments_reach_the_driver_as_the_kernel_wants_them(library: FakeDriver) -> None:
    kernel = make_kernel(library, 8, 8, 8, 4, 8, 4, 12, 8)
    tensor = torch.zeros(3)[1:]
    kernel.launch((2, 3, 4), (32, 2, 1), tensor, None, -(2**40), 0.5, 7, 3, b"twelve bytes", (tensor, 40), shared=4096)
    (seen,) = library.launches
    assert (seen.grid, seen.block, seen.shared, seen.stream) == ((2, 3, 4), (32, 2, 1), 4096, STREAM)
    assert seen.arguments == tuple(
        struct.pack(kind, value)
        for kind, value in (
            ("q", tensor.data_ptr()),
            ("q", 0),
            ("q", -(2**40)),
            ("f", 0.5),
            ("q", 7),
            ("f", 3.0),
            ("12s", b"twelve bytes"),
            ("q", tensor.data_ptr() + 40),
        )
    )
    assert not seen.cooperative


def test_a_kernel_may_take_nothing_and_be_cooperative(library: FakeDriver) -> None:
    make_kernel(library).launch(ONE, ONE, cooperative=True)
    (seen,) = library.launches
    assert seen.cooperative
    assert seen.arguments == ()


@pytest.mark.parametrize("arguments", [(1,), (1, 2.0, 3), (1.0, 2.0), ("1", 2.0), (1, None, None)])
def test_arguments_of_other_number_or_type_are_refused(library: FakeDriver, arguments: tuple[int, ...]) -> None:
    kernel = make_kernel(library, 8, 4)
    with pytest.raises(TypeError, match=r"kernel 'name' takes 2 arguments of \(8, 4\) bytes .* got \['"):
        kernel.launch(ONE, ONE, *arguments)
    assert library.launches == []


def test_a_tensor_elsewhere_is_refused(library: FakeDriver) -> None:
    kernel = make_kernel(library, 8, 8, index=1)
    with pytest.raises(ValueError, match=r"'name' runs on cuda:1, but its argument 1 is on cpu; move the tensor"):
        kernel.launch(ONE, ONE, None, torch.zeros(1))
    with pytest.raises(ValueError, match="argument 0 is on cpu"):
        kernel.launch(ONE, ONE, (torch.zeros(1), 4), None)


def test_attributes_and_occupancy(library: FakeDriver) -> None:
    kernel = make_kernel(library)
    assert (kernel.registers, kernel.local_bytes, kernel.static_shared, kernel.max_threads) == (40, 0, 100, 1024)
    assert kernel.max_shared == fake_driver.SHARED_BYTES - 100
    assert kernel.blocks_per_multiprocessor(128) == 3
    assert kernel.resident_blocks(128, 1000) == 30


def test_a_thread_gets_its_context_and_keeps_its_own(library: FakeDriver) -> None:
    kernel = make_kernel(library)
    assert library.contexts == []
    kernel.launch(ONE, ONE)
    assert library.contexts == []
    library.contexts.append(OTHER_CONTEXT)
    kernel.launch(ONE, ONE)
    assert library.contexts == [OTHER_CONTEXT]
    library.contexts.append(PRIMARY_CONTEXT)
    library.called.clear()
    kernel.launch(ONE, ONE)
    assert library.called == ["cuCtxGetCurrent", "cuLaunchKernel"]
    assert {seen.context for seen in library.launches} == {PRIMARY_CONTEXT}


def test_a_thread_of_the_device_keeps_its_context(library: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "current_device", lambda: CPU)
    kernel = make_kernel(library)
    kernel.launch(ONE, ONE)
    assert library.contexts == [PRIMARY_CONTEXT]
    library.called.clear()
    kernel.launch(ONE, ONE)
    assert library.called == ["cuCtxGetCurrent", "cuLaunchKernel"]


def test_loading_is_allowed_while_a_graph_is_captured(library: FakeDriver) -> None:
    make_kernel(library)
    load = library.called.index("cuModuleLoadData")
    assert library.called[load - 2 : load + 3] == [
        "cuCtxPushCurrent_v2",
        "cuThreadExchangeStreamCaptureMode",
        "cuModuleLoadData",
        "cuThreadExchangeStreamCaptureMode",
        "cuCtxPopCurrent_v2",
    ]


def test_errors_carry_the_drivers_names(library: FakeDriver) -> None:
    kernel = make_kernel(library)
    library.fails["cuLaunchKernel"] = fake_driver.ILLEGAL_ADDRESS
    with pytest.raises(
        RuntimeError,
        match=r"kernel 'name' cannot .* cuda:-1 .*\(1, 1, 1\).* 8 bytes.*CUDA_ERROR_ILLEGAL_ADDRESS \(what",
    ):
        kernel.launch(ONE, ONE, shared=8)
    library.fails["cuLaunchKernel"] = 4321
    with pytest.raises(RuntimeError, match="CUDA error 4321"):
        kernel.launch(ONE, ONE)
    library.fails["cuLaunchKernel"] = fake_driver.OUT_OF_MEMORY
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"CUDA out of memory: kernel 'name'"):
        kernel.launch(ONE, ONE)
    del library.fails["cuLaunchKernel"]
    kernel.launch(ONE, ONE)
    assert library.contexts == []


def test_a_cooperative_grid_that_does_not_fit_is_an_error_with_its_measure(library: FakeDriver) -> None:
    library.fails["cuLaunchCooperativeKernel"] = fake_driver.COOPERATIVE_LAUNCH_TOO_LARGE
    kernel = make_kernel(library)
    with pytest.raises(RuntimeError, match=r"its 62 blocks must run at the same time, and 30 fit.*_TOO_LARGE"):
        kernel.launch((31, 2, 1), ONE, cooperative=True)


def test_loading_fails_with_the_programs_name(library: FakeDriver) -> None:
    library.fails["cuModuleLoadData"] = fake_driver.OUT_OF_MEMORY
    with pytest.raises(torch.cuda.OutOfMemoryError, match="a program cannot be loaded on cuda:-1"):
        make_kernel(library)
    assert library.contexts == []
    library.fails = {"cuModuleGetFunction": fake_driver.INVALID_VALUE}
    with pytest.raises(RuntimeError, match=r"kernel 'name' of a program cannot be loaded.*CUDA_ERROR_INVALID_VALUE"):
        make_kernel(library)


def test_a_driver_that_does_not_start_is_unavailable(library: FakeDriver) -> None:
    assert driver.Driver(library).version() == "13.0"
    library.fails["cuInit"] = 700
    with pytest.raises(DriverUnavailableError, match="does not start: CUDA_ERROR_ILLEGAL_ADDRESS"):
        driver.Driver(library)
    with pytest.raises(DriverUnavailableError, match=r"too old: .*cuInit"):
        driver.Driver(object())


def test_threads_do_not_see_each_others_arguments(library: FakeDriver) -> None:
    kernel = make_kernel(library, 8, 8)

    def work(first: int) -> None:
        for number in range(first, first + 200):
            kernel.launch((number + 1, 1, 1), ONE, number, -number)

    threads = [threading.Thread(target=work, args=(1000 * place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(library.launches) == 1600
    for seen in library.launches:
        number = seen.grid[0] - 1
        assert seen.arguments == (struct.pack("q", number), struct.pack("q", -number))
