"""Runs the project's CUDA kernels on a CPU, so that a machine without a GPU proves what they compute.

    from tests.emulator import compile_kernels

    kernels = compile_kernels("recurrence", "small.cu", HIDDEN=7, LANES=8, UNITS=1, STORAGE=0, RESET=0, PHI=0)
    kernels.launch("small_forward_1", (batch, directions), threads, [projected, initial, None, ..., steps, batch, 0])

The sources are those that the GPU gets, except for `device.cuh`, in whose place the emulator puts its own: the same
functions in C++. A source holds no PTX, then, and includes nothing but its neighbours. What else of CUDA C++ the
emulator knows stands in `emulator.h`; add what a kernel needs.

Arguments are contiguous CPU tensors (or one with an offset in bytes, or None) for pointers, and Python numbers, in
the order of the kernel's parameters; count and sizes of elements are checked. A launch returns once the grid is
through, and raises `EmulationError` for a deadlock (it says who waits where), for lanes of a warp that disagree, for
writes beyond a tensor or a shared array, and for other misuse. Beyond both ends of a tensor lie NaNs, and shared
memory starts as NaNs. So fill the tensors that a kernel has to write with NaN beforehand, and look at them
afterwards.

Threads run one at a time, in an order drawn with `seed`, each until it waits or polls: a forgotten barrier shows as a
wrong result under some seed, so run a few. With `at_once` all blocks of the grid are under way together, as in a
cooperative launch; a thread that waits for another block must poll with `load_relaxed` or an atomic operation. What
`store_relaxed` wrote reaches other blocks late and in any order, but for words between which the block had a `fence`.

What it does not show: speed, the order in which other blocks see plain writes and atomic operations, misaligned
accesses, and the last bits of the GPU's own functions (expf, tanhf, tensor cores).
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import ncgru

_Value = Any  # ctypes has no public name for what its numbers and pointers have in common
Argument = torch.Tensor | tuple[torch.Tensor, int] | int | float | bytes | None

_HERE = Path(__file__).parent
_PACKAGE = Path(ncgru.__file__).parent
_OPTIONS = [
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-march=native",
    "-Wno-unknown-pragmas",
]
_GUARD = 256  # bytes before and after a tensor


class EmulationError(RuntimeError):
    """The kernel did what it must not do."""


def compile_kernels(part: str, source: str, **defines: int | str) -> Kernels:
    """The kernels in `ncgru/{part}/cuda/{source}`, compiled with `defines`; kept for the session."""
    return _compiled(_PACKAGE / part / "cuda" / source, tuple(sorted(defines.items())))


def compile_file(source: Path, **defines: int | str) -> Kernels:
    """The kernels in a file of its own."""
    return _compiled(source, tuple(sorted(defines.items())))


class Kernels:
    """Compiled kernels."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))

    def launch(
        self,
        name: str,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        arguments: Sequence[Argument],
        *,
        shared: int = 0,
        at_once: bool = False,
        seed: int = 0,
    ) -> None:
        """Run a kernel; `shared` is the dynamic shared memory of a block in bytes."""
        grid, block = _three(grid), _three(block)
        threads = block[0] * block[1] * block[2]
        if min(grid) < 1 or not 32 <= threads <= 1024 or threads % 32:
            raise ValueError(f"grid must be positive and block 32 to 1024 threads in whole warps, got {grid}, {block}")
        guarded: dict[int, _Guarded] = {}
        values = self._values(name, arguments, guarded)
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        message = ctypes.create_string_buffer(4096)
        failed = self._library.emulate(
            ctypes.cast(getattr(self._library, f"call_{name}"), ctypes.c_void_p),
            pointers,
            (ctypes.c_uint * 3)(*grid),
            (ctypes.c_uint * 3)(*block),
            ctypes.c_size_t(shared),
            int(at_once),
            ctypes.c_uint64(seed),
            message,
            ctypes.c_size_t(len(message)),
        )
        overrun = [argument.index for argument in guarded.values() if not argument.hand_back()]
        if failed:
            raise EmulationError(f"{name}: {message.value.decode()}")
        if overrun:
            raise EmulationError(f"{name}: writes beyond the tensor in argument {overrun[0]}")

    def _values(self, name: str, arguments: Sequence[Argument], guarded: dict[int, _Guarded]) -> list[_Value]:
        kinds, sizes = ctypes.create_string_buffer(64), (ctypes.c_int * 64)()
        count = getattr(self._library, f"describe_{name}")(kinds, sizes)
        if count != len(arguments):
            raise TypeError(f"{name} has {count} parameters, got {len(arguments)} arguments")
        return [
            _value(f"argument {i} of {name}", chr(kinds.raw[i]), sizes[i], argument, i, guarded)
            for i, argument in enumerate(arguments)
        ]


def _value(what: str, kind: str, size: int, argument: Argument, index: int, guarded: dict[int, _Guarded]) -> _Value:
    """One argument as C has it. `kind` and `size` come from emulator.h's Parameter."""
    if kind == "i" and isinstance(argument, int):
        return (ctypes.c_int64 if size == 8 else ctypes.c_int32)(argument)
    if kind == "f" and isinstance(argument, int | float):
        return (ctypes.c_double if size == 8 else ctypes.c_float)(argument)
    if kind == "s" and isinstance(argument, bytes) and len(argument) == size:
        return (ctypes.c_char * size).from_buffer_copy(argument)
    if kind in "pP" and argument is None:
        return ctypes.c_void_p(None)
    if kind in "pP" and isinstance(argument, tuple):
        tensor, offset = argument
        start = guarded.setdefault(tensor.untyped_storage().data_ptr(), _Guarded(tensor, index)).address
        return ctypes.c_void_p(start + int(tensor.storage_offset()) * tensor.element_size() + offset)
    if kind in "pP" and isinstance(argument, torch.Tensor):
        same = size in (0, argument.element_size()) and (kind == "p" or argument.is_floating_point())
        if not same or not argument.is_contiguous() or argument.device.type != "cpu":
            raise TypeError(
                f"{what} must be a contiguous CPU tensor with elements of {size} bytes, got {argument.dtype}"
            )
        storage = argument.untyped_storage()
        copy = guarded.setdefault(storage.data_ptr(), _Guarded(argument, index))
        return ctypes.c_void_p(copy.address + int(argument.storage_offset()) * argument.element_size())
    raise TypeError(f"{what} must be of kind {kind!r} and size {size}, got {type(argument).__name__}")


class _Guarded:
    """A copy of a tensor's whole storage (views of one storage stay so) between two guards."""

    def __init__(self, tensor: torch.Tensor, index: int) -> None:
        self.index = index
        storage = tensor.untyped_storage()
        self._original = torch.empty(0, dtype=torch.uint8).set_(storage)
        # NaNs in 16 bits as in 32, each unlike its neighbours: a NaN that a kernel read here and
        # wrote there is noticed.
        words = torch.arange((storage.nbytes() + 3 * _GUARD + 1) // 2) % 127 + (0xFF81 - 0x10000)
        self._poison = words.to(torch.int16).view(torch.uint8)
        self._room = self._poison.clone()
        start = _GUARD + (storage.data_ptr() - self._room.data_ptr()) % _GUARD
        self._inside = slice(start, start + storage.nbytes())
        self._room[self._inside] = self._original
        self.address = self._room.data_ptr() + start

    def hand_back(self) -> bool:
        """Copy what the kernel wrote into the tensor; whether the guards are whole."""
        self._original.copy_(self._room[self._inside])
        self._room[self._inside] = self._poison[self._inside]
        return torch.equal(self._room, self._poison)


def _three(x: int | tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z, *_ = (*((x,) if isinstance(x, int) else x), 1, 1)
    return x, y, z


# ---------------------------------------------------------------------------------------------------------- compiling


@functools.cache
def _folder() -> Path:
    """Where this session compiles."""
    folder = Path(tempfile.mkdtemp(prefix="ncgru-emulator-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def _runtime() -> Path:
    """The emulator's own part of every library."""
    compiled = _folder() / "runtime.o"
    _compile(["-O2", "-c", str(_HERE / "runtime.cpp"), "-o", str(compiled)])
    return compiled


@functools.cache
def _sources(folder: Path) -> Path:
    """A copy of the kernels' sources with the emulator's device.cuh."""
    copy = Path(tempfile.mkdtemp(dir=_folder()))
    for file in [*folder.glob("*.cu"), *folder.glob("*.cuh"), _HERE / "device.cuh", _HERE / "emulator.h"]:
        shutil.copy(file, copy)
    return copy


@functools.cache
def _compiled(source: Path, defines: tuple[tuple[str, int | str], ...]) -> Kernels:
    sources = _sources(source.parent)
    options = [f"-D{name}={value}" for name, value in defines]
    expanded = _compile(
        ["-E", "-x", "c++", "-include", str(sources / "emulator.h"), *options, str(sources / source.name)]
    )
    handle, path = tempfile.mkstemp(suffix=".ii", dir=sources)
    with os.fdopen(handle, "w") as file:
        file.write(_translate(expanded))
    library = Path(path).with_suffix(".so")
    _compile(["-shared", path, str(_runtime()), "-o", str(library)])
    return Kernels(library)


def _translate(text: str) -> str:
    """Preprocessed CUDA C++ as C++: shared arrays are asked for, kernels become callable from Python."""
    declaration = re.compile(
        r"__shared__\s+(?:__attribute__\(\(aligned\(\d+\)\)\)\s*)?([\w\s]+?)\s*\b(\w+)((?:\[[^]]*\])*)\s*;"
    )
    text = declaration.sub(
        r"static char \2_site; \1 (&\2)\3 = "
        r"*static_cast<\1 (*)\3>(emulator::shared_array(&\2_site, sizeof(\1\3)));",
        text,
    )
    if "__shared__" in text:
        raise ValueError("the emulator knows `__shared__ [__align__(n)] type name[...]...;`, one declaration at a time")
    kernels = re.findall(r'extern "C"\s+__global__\s+void\s+(\w+)\s*\(', text)
    entry = 'extern "C" __attribute__((visibility("default")))'
    for kernel in kernels:
        text += f"\n{entry} void call_{kernel}(void** values) {{ emulator::call({kernel}, values); }}"
        text += f"\n{entry} int describe_{kernel}(char* kinds, int* sizes) {{"
        text += f" return emulator::describe({kernel}, kinds, sizes); }}"
    return text.replace("__global__", "")


def _compile(arguments: list[str]) -> str:
    done = subprocess.run(["g++", *_OPTIONS, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulationError(f"the C++ compiler refuses:\n{done.stderr}")
    return done.stdout
