"""A kernel that is ready to be launched, at the price of a few microseconds."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from ctypes import c_int, c_void_p

import torch
from torch import Tensor

from . import driver
from .driver import Module

Dimensions = tuple[int, int, int]
Argument = Tensor | tuple[Tensor, int] | int | float | bytes | None

_VALUES = frozenset((bool, int, float, bytes))
"""What is passed as it is; looked up by type, which is several times as fast as isinstance."""

# A launch asks for the current stream each time; this way is ten times as fast as the public one.
_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current_stream(index: int) -> int:
    """The driver's address of PyTorch's current stream on a device."""
    if _raw_stream is not None:
        return _raw_stream(index)
    return int(torch.cuda.current_stream(index).cuda_stream)


def current_device() -> int:
    """The number of PyTorch's current device in this thread."""
    return torch.cuda.current_device()


class _Packed:
    """Memory for one launch: its arguments, their addresses, and what else the driver is given by address."""

    def __init__(self, layout: struct.Struct, offsets: Sequence[int]) -> None:
        self.values = ctypes.create_string_buffer(max(layout.size, 1))
        first = ctypes.addressof(self.values)
        self.addresses = (c_void_p * max(len(offsets), 1))(*(first + offset for offset in offsets))
        self.stream = c_void_p()
        self.context = c_void_p()
        self.context_address = ctypes.byref(self.context)


class Kernel:
    """A kernel of a loaded module.

    Attributes:
        name: its name in the source.
        index: the number of its device.
        registers: how many a thread takes.
        local_bytes: local memory a thread: what has spilled, and arrays that are not in registers.
        static_shared: bytes of shared memory a block takes without asking.
        max_shared: bytes of shared memory that a launch may ask for on top of these.
        max_threads: the most threads a block may have.
    """

    def __init__(self, module: Module, name: str, parameters: Sequence[int]) -> None:
        self.name = name
        self.index = module.context.index
        self._context = module.context
        self._driver = module.context.driver
        self._handle = module.function(name)
        self._parameters = tuple(parameters)
        # A parameter of 8 bytes is an address or a 64-bit integer, of 4 a float; others are passed as their bytes.
        self._layout = struct.Struct("=" + "".join({8: "q", 4: "f"}.get(size, f"{size}s") for size in parameters))
        self._offsets = [sum(parameters[:place]) for place in range(len(parameters))]
        # Launches in several threads at once each take one of these; taking and giving back are atomic.
        self._free: list[_Packed] = []
        self._launch = self._driver.library.cuLaunchKernel
        self._launch_cooperative = self._driver.library.cuLaunchCooperativeKernel
        self._current_context = self._driver.library.cuCtxGetCurrent
        self.registers = self._attribute(driver.REGISTERS)
        self.local_bytes = self._attribute(driver.LOCAL_BYTES)
        self.static_shared = self._attribute(driver.STATIC_SHARED)
        self.max_threads = self._attribute(driver.MAX_THREADS)
        self.max_shared = self._context.attribute(driver.SHARED_BYTES_PER_BLOCK) - self.static_shared
        with self._context.current():
            self._driver.call("cuFuncSetAttribute", self._handle, driver.MAX_DYNAMIC_SHARED, self.max_shared)

    def blocks_per_multiprocessor(self, threads: int, shared: int = 0) -> int:
        """How many blocks of this size one multiprocessor holds at a time."""
        blocks = c_int()
        with self._context.current():
            self._driver.call(
                "cuOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(blocks), self._handle, threads, shared
            )
        return blocks.value

    def resident_blocks(self, threads: int, shared: int = 0) -> int:
        """How many blocks of this size the whole device holds at a time, if nothing else runs on it."""
        return self.blocks_per_multiprocessor(threads, shared) * self._context.attribute(driver.MULTIPROCESSORS)

    def launch(
        self,
        grid: Dimensions,
        block: Dimensions,
        *arguments: Argument,
        shared: int = 0,
        cooperative: bool = False,
    ) -> None:
        """Launch on the current stream of the kernel's device.

        Args:
            grid: blocks in x, y and z.
            block: threads of a block in x, y and z.
            *arguments: a tensor, a tensor with an offset in bytes, or None (a null pointer) for a pointer, an int for
                a 64-bit integer, a float for a float, bytes for a structure.
            shared: bytes of dynamic shared memory a block.
            cooperative: all blocks run at the same time, so that they may wait for each other, or the launch fails.

        Raises:
            TypeError: the arguments are not those of the kernel.
            ValueError: a tensor is on another device.
            RuntimeError: the driver refuses, or an earlier kernel has failed.
        """
        try:
            packed = self._free.pop()
        except IndexError:
            packed = _Packed(self._layout, self._offsets)
        self._pack(packed, arguments)
        packed.stream.value = current_stream(self.index)
        self._current_context(packed.context_address)
        if not packed.context.value and current_device() == self.index:
            # This thread, as autograd's, has not used its device yet; cuBLAS warns the user where it finds it so.
            self._driver.call("cuCtxSetCurrent", self._context.handle)
            packed.context.value = self._context.handle
        if packed.context.value == self._context.handle:
            code = self._start(grid, block, shared, packed, cooperative)
        else:
            # Another device is current.
            self._driver.call("cuCtxPushCurrent_v2", self._context.handle)
            try:
                code = self._start(grid, block, shared, packed, cooperative)
            finally:
                self._driver.call("cuCtxPopCurrent_v2", packed.context_address)
        self._free.append(packed)
        if code:
            raise self._launch_error(code, grid, block, shared)

    def _start(self, grid: Dimensions, block: Dimensions, shared: int, packed: _Packed, cooperative: bool) -> int:
        if cooperative:
            code: int = self._launch_cooperative(self._handle, *grid, *block, shared, packed.stream, packed.addresses)
        else:
            code = self._launch(self._handle, *grid, *block, shared, packed.stream, packed.addresses, None)
        return code

    def _pack(self, packed: _Packed, arguments: Sequence[Argument]) -> None:
        values: list[int | float | bytes] = []
        for argument in arguments:
            kind = type(argument)
            if kind in _VALUES:
                values.append(argument)  # type: ignore[arg-type]
            elif kind is Tensor and argument.get_device() == self.index:  # type: ignore[union-attr]
                values.append(argument.data_ptr())  # type: ignore[union-attr]
            elif argument is None:
                values.append(0)
            else:
                tensor, offset = argument if isinstance(argument, tuple) else (argument, 0)
                if not isinstance(tensor, Tensor):
                    raise self._misfit(arguments, f"{type(tensor).__name__} is none of these")
                if tensor.get_device() != self.index:
                    raise ValueError(
                        f"kernel {self.name!r} runs on cuda:{self.index}, but its argument {len(values)} is on "
                        f"{tensor.device}; move the tensor"
                    )
                values.append(tensor.data_ptr() + offset)
        try:
            self._layout.pack_into(packed.values, 0, *values)
        except struct.error as error:
            raise self._misfit(arguments, str(error)) from error

    def _misfit(self, arguments: Sequence[Argument], reason: str) -> TypeError:
        return TypeError(
            f"kernel {self.name!r} takes {len(self._parameters)} arguments of {self._parameters} bytes (8: tensor, "
            f"tensor and offset, None or int; 4: float), got {[type(argument).__name__ for argument in arguments]}: "
            f"{reason}"
        )

    def _launch_error(self, code: int, grid: Dimensions, block: Dimensions, shared: int) -> Exception:
        threads = block[0] * block[1] * block[2]
        what = f"kernel {self.name!r} cannot be launched on cuda:{self.index} with grid {grid}, block {block}"
        what += f" and {shared} bytes of shared memory"
        if code == driver.COOPERATIVE_LAUNCH_TOO_LARGE:
            what += (
                f" (its {grid[0] * grid[1] * grid[2]} blocks must run at the same time, and "
                f"{self.resident_blocks(threads, shared)} fit)"
            )
        return self._driver.error(code, what)

    def _attribute(self, which: int) -> int:
        value = c_int()
        with self._context.current():
            self._driver.call("cuFuncGetAttribute", ctypes.byref(value), which, self._handle)
        return value.value
