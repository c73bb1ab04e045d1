"""The CUDA driver through ctypes: modules, kernels, occupancy, launches.

Everything happens in the primary context of a device, the one that PyTorch uses, so tensors and streams are shared.
A launch goes to PyTorch's current stream of the kernel's device, whatever device is current in the calling thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Iterator
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any

import torch

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"

# A launch calls those with None, and gives them objects of the right types: to let ctypes convert costs a microsecond.
_FUNCTIONS: dict[str, list[Any] | None] = {
    "cuInit": [c_uint],
    "cuDriverGetVersion": [POINTER(c_int)],
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
    "cuGetErrorString": [c_int, POINTER(c_char_p)],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuCtxGetCurrent": None,
    "cuCtxSetCurrent": [c_void_p],
    "cuCtxPushCurrent_v2": [c_void_p],
    "cuCtxPopCurrent_v2": [POINTER(c_void_p)],
    "cuThreadExchangeStreamCaptureMode": [POINTER(c_int)],
    "cuModuleLoadData": [POINTER(c_void_p), c_char_p],
    "cuModuleGetFunction": [POINTER(c_void_p), c_void_p, c_char_p],
    "cuFuncGetAttribute": [POINTER(c_int), c_int, c_void_p],
    "cuFuncSetAttribute": [c_void_p, c_int, c_int],
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": [POINTER(c_int), c_void_p, c_int, c_size_t],
    "cuLaunchKernel": None,
    "cuLaunchCooperativeKernel": None,
}

OUT_OF_MEMORY = 2
COOPERATIVE_LAUNCH_TOO_LARGE = 720

MULTIPROCESSORS, SHARED_BYTES_PER_BLOCK = 16, 97
"""Attributes of a device; the shared memory is what a block gets if it asks for more than the usual 48 KB."""

MAX_THREADS, STATIC_SHARED, LOCAL_BYTES, REGISTERS, MAX_DYNAMIC_SHARED = 0, 1, 3, 4, 8
"""Attributes of a kernel."""

_RELAXED = 2
"""A mode of stream capture: calls that a capture forbids, such as loading code, are allowed in this thread."""


class DriverUnavailableError(RuntimeError):
    """There is no CUDA driver that could be used."""


class Driver:
    """The driver's functions, whose failures are exceptions with the driver's own names for them."""

    def __init__(self, library: Any) -> None:
        """Declare and initialise `library`; tests pass one of their own."""
        self.library = library
        try:
            for name, types in _FUNCTIONS.items():
                function = getattr(library, name)
                if types is not None:
                    function.argtypes = types
        except AttributeError as error:
            raise DriverUnavailableError(f"the CUDA driver is too old: {error}; install a newer one") from error
        code = library.cuInit(0)
        if code:
            raise DriverUnavailableError(f"the CUDA driver does not start: {self.reason(code)}")

    def call(self, function: str, *arguments: object, doing: str = "") -> None:
        """Call a function; `doing` says for what, in an error.

        Raises:
            torch.cuda.OutOfMemoryError: the device's memory is full.
            RuntimeError: anything else that the driver reports.
        """
        code = getattr(self.library, function)(*arguments)
        if code:
            raise self.error(code, doing or function)

    def error(self, code: int, doing: str) -> Exception:
        """The exception that stands for the driver's error."""
        if code == OUT_OF_MEMORY:
            return torch.cuda.OutOfMemoryError(f"CUDA out of memory: {doing}: {self.reason(code)}")
        return RuntimeError(f"{doing}: {self.reason(code)}")

    def reason(self, code: int) -> str:
        """The driver's name and text for one of its errors."""
        name, text = c_char_p(), c_char_p()
        self.library.cuGetErrorName(code, ctypes.byref(name))
        self.library.cuGetErrorString(code, ctypes.byref(text))
        if not name.value:
            return f"CUDA error {code}"
        return f"{name.value.decode()} ({(text.value or b'').decode()})"

    def version(self) -> str:
        """The newest CUDA that the driver knows."""
        version = c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        return f"{version.value // 1000}.{version.value % 1000 // 10}"


@functools.cache
def load() -> Driver:
    """The driver of this machine, loaded once.

    Raises:
        DriverUnavailableError: there is none, or no GPU that it can use.
    """
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise DriverUnavailableError(
            f"there is no CUDA driver on this machine ({error}); the GPU kernels need an NVIDIA GPU and its driver"
        ) from error
    return Driver(library)


class Context:
    """The primary context of a device.

    Attributes:
        driver: the driver that it belongs to.
        index: the device's number, as in "cuda:0".
        handle: the driver's address of it.
    """

    def __init__(self, driver: Driver, index: int) -> None:
        self.driver = driver
        self.index = index
        self._device, handle = c_int(), c_void_p()
        doing = f"cuda:{index} cannot be used"
        driver.call("cuDeviceGet", ctypes.byref(self._device), index, doing=doing)
        driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(handle), self._device, doing=doing)
        self.handle = handle.value

    def attribute(self, which: int) -> int:
        """An attribute of the device."""
        value = c_int()
        self.driver.call("cuDeviceGetAttribute", ctypes.byref(value), which, self._device)
        return value.value

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the context current in this thread, with everything allowed even while a graph is captured."""
        driver = self.driver
        mode = c_int(_RELAXED)
        driver.call("cuCtxPushCurrent_v2", self.handle)
        try:
            driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
            try:
                yield
            finally:
                driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        finally:
            driver.call("cuCtxPopCurrent_v2", ctypes.byref(c_void_p()))


@functools.cache
def context(index: int) -> Context:
    """The primary context of this machine's device."""
    return Context(load(), index)


class Module:
    """Machine code loaded into a context. It stays there as long as the process lives."""

    def __init__(self, context: Context, image: bytes, name: str) -> None:
        self.context = context
        self.name = name
        self._handle = c_void_p()
        with context.current():
            doing = f"{name} cannot be loaded on cuda:{context.index}"
            context.driver.call("cuModuleLoadData", ctypes.byref(self._handle), image, doing=doing)

    def function(self, kernel: str) -> c_void_p:
        """The driver's address of a kernel."""
        handle = c_void_p()
        with self.context.current():
            doing = f"kernel {kernel!r} of {self.name} cannot be loaded on cuda:{self.context.index}"
            call = self.context.driver.call
            call("cuModuleGetFunction", ctypes.byref(handle), self._handle, kernel.encode(), doing=doing)
        return handle
