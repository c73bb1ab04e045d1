"""A CUDA driver without a GPU: it takes what the real one takes, through C, and writes down what it is asked."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass, field
from typing import Any

PRIMARY_CONTEXT, OTHER_CONTEXT = 0xC0, 0xC1
STREAM = 0x57
SUCCESS, OUT_OF_MEMORY, INVALID_VALUE, ILLEGAL_ADDRESS, COOPERATIVE_LAUNCH_TOO_LARGE = 0, 2, 1, 700, 720
NAMES = {1: b"CUDA_ERROR_INVALID_VALUE", 2: b"CUDA_ERROR_OUT_OF_MEMORY", 700: b"CUDA_ERROR_ILLEGAL_ADDRESS"}
NAMES[720] = b"CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"
BLOCKS_PER_MULTIPROCESSOR, MULTIPROCESSORS, SHARED_BYTES = 3, 10, 200_000


@dataclass
class Launch:
    """What one launch was given."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    stream: int
    arguments: tuple[bytes, ...]
    cooperative: bool
    context: int


@dataclass
class FakeDriver:
    """A library with the driver's functions.

    Attributes:
        parameters: sizes of the parameters of its kernels, which the real driver reads from the machine code.
        fails: the code that a function returns, by its name.
        launches: what was launched.
        called: the names of the functions that were called.
        current: the context of each thread, by the thread's number; none unless told.
    """

    parameters: tuple[int, ...] = ()
    fails: dict[str, int] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)
    called: list[str] = field(default_factory=list)
    current: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        signatures: dict[str, tuple[type[Any], ...]] = {
            "cuInit": (c_uint,),
            "cuDriverGetVersion": (POINTER(c_int),),
            "cuGetErrorName": (c_int, POINTER(c_char_p)),
            "cuGetErrorString": (c_int, POINTER(c_char_p)),
            "cuDeviceGet": (POINTER(c_int), c_int),
            "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
            "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
            "cuCtxGetCurrent": (POINTER(c_void_p),),
            "cuCtxSetCurrent": (c_void_p,),
            "cuCtxPushCurrent_v2": (c_void_p,),
            "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
            "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
            "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
            "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
            "cuFuncGetAttribute": (POINTER(c_int), c_int, c_void_p),
            "cuFuncSetAttribute": (c_void_p, c_int, c_int),
            "cuOccupancyMaxActiveBlocksPerMultiprocessor": (POINTER(c_int), c_void_p, c_int, c_size_t),
            "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_void_p), c_void_p),
            "cuLaunchCooperativeKernel": (c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_void_p)),
        }
        for name, types in signatures.items():
            setattr(self, name, ctypes.CFUNCTYPE(c_int, *types)(self._function(name)))

    def _function(self, name: str) -> Callable[..., int]:
        behaviour: Callable[..., None] = getattr(self, f"_{name}", lambda *arguments: None)

        def function(*arguments: Any) -> int:
            self.called.append(name)
            if name in self.fails:
                return self.fails[name]
            behaviour(*arguments)
            return SUCCESS

        return function

    @property
    def contexts(self) -> list[int]:
        """The stack of contexts of the calling thread."""
        return self.current.setdefault(threading.get_ident(), [])

    def _cuDriverGetVersion(self, version: Any) -> None:
        version[0] = 13000

    def _cuGetErrorName(self, code: int, name: Any) -> None:
        name[0] = NAMES.get(code)

    def _cuGetErrorString(self, code: int, text: Any) -> None:
        text[0] = b"what it means"

    def _cuDeviceGetAttribute(self, value: Any, which: int, device: int) -> None:
        value[0] = {16: MULTIPROCESSORS, 97: SHARED_BYTES}[which]

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> None:
        context[0] = PRIMARY_CONTEXT

    def _cuCtxGetCurrent(self, context: Any) -> None:
        context[0] = self.contexts[-1] if self.contexts else None

    def _cuCtxSetCurrent(self, context: int) -> None:
        self.contexts[-1:] = [context]

    def _cuCtxPushCurrent_v2(self, context: int) -> None:
        self.contexts.append(context)

    def _cuCtxPopCurrent_v2(self, context: Any) -> None:
        context[0] = self.contexts.pop()

    def _cuModuleLoadData(self, module: Any, image: bytes) -> None:
        module[0] = 0xA0

    def _cuModuleGetFunction(self, function: Any, module: int, name: bytes) -> None:
        function[0] = 0xF0

    def _cuFuncGetAttribute(self, value: Any, which: int, function: int) -> None:
        value[0] = {0: 1024, 1: 100, 3: 0, 4: 40}[which]

    def _cuOccupancyMaxActiveBlocksPerMultiprocessor(self, blocks: Any, *_: object) -> None:
        blocks[0] = BLOCKS_PER_MULTIPROCESSOR

    def _cuLaunchKernel(self, *arguments: Any) -> None:
        self._launched(*arguments[:-1], cooperative=False)

    def _cuLaunchCooperativeKernel(self, *arguments: Any) -> None:
        self._launched(*arguments, cooperative=True)

    def _launched(self, function: int, *rest: Any, cooperative: bool) -> None:
        values = tuple(ctypes.string_at(rest[8][place], size) for place, size in enumerate(self.parameters))
        self.launches.append(Launch(rest[:3], rest[3:6], rest[6], rest[7] or 0, values, cooperative, self.contexts[-1]))
