"""CUDA C++ to machine code through NVRTC, the compiler library that comes with PyTorch's CUDA packages.

It is found where those packages put it, else where CUDA itself is installed. The one of the CUDA version that PyTorch
was built for is preferred, because the driver is known to take what it makes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from .cubin import Cubin

STANDARD_OPTIONS = (
    "--std=c++17",
    "--device-as-default-execution-space",  # a plain constexpr function is a device function
    "--no-source-include",  # no header that happens to lie in the current folder
    "--ptxas-options=-v",  # registers and spills of each kernel in the log
)
_FILE = {
    "linux": re.compile(r"libnvrtc(?:-[0-9a-f]+)?\.so\.(\d+)(?:\.\d+)*"),
    "win32": re.compile(r"nvrtc64_(\d+)\d_\d+\.dll"),
}
_LOADER_NAMES = {
    "linux": {"13": "libnvrtc.so.13", "12": "libnvrtc.so.12", "11": "libnvrtc.so.11.2"},
    "win32": {"13": "nvrtc64_130_0.dll", "12": "nvrtc64_120_0.dll", "11": "nvrtc64_112_0.dll"},
}


class NvrtcUnavailableError(RuntimeError):
    """There is no NVRTC that could be loaded."""


class CompileError(RuntimeError):
    """The compiler refused a source; the message holds what it said."""


class Nvrtc:
    """A loaded compiler.

    Attributes:
        where: the file, or the name under which the system's loader found it.
        version: (major, minor).
        identity: what distinguishes its output from that of another one, for the cache.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        folder = Path(where).parent if os.sep in where else None
        if sys.platform == "win32" and folder:
            # The library finds its second file, the builtins, by name alone.
            self._folder = os.add_dll_directory(str(folder))
        self._library = ctypes.CDLL(where)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)
        # Two releases of one version differ in size, if in anything.
        size = Path(where).stat().st_size if folder else 0
        self.identity = f"{major.value}.{minor.value} {size}"
        if folder:
            with contextlib.suppress(OSError):  # most builds find it by themselves, or carry it inside
                ctypes.CDLL(str(folder / f"libnvrtc-builtins.so.{major.value}.{minor.value}"))

    def architectures(self) -> tuple[int, ...]:
        """The compute capabilities that it compiles for, such as 90 for 9.0, in rising order."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return tuple(sorted(found))

    def architecture_for(self, major: int, minor: int) -> str:
        """The architecture to compile for: the device's own, or an older one of the same major version."""
        fitting = [number for number in self.architectures() if major * 10 <= number <= major * 10 + minor]
        if not fitting:
            raise NvrtcUnavailableError(
                f"NVRTC {self.version[0]}.{self.version[1]} ({self.where}) does not know GPUs of compute capability "
                f"{major}.{minor}; install a PyTorch for a CUDA version that does"
            )
        return f"sm_{fitting[-1]}"

    def compile(self, sources: Mapping[str, str], entry: str, options: Sequence[str], architecture: str) -> Cubin:
        """Compile `sources[entry]`, which may include the other sources by their names.

        Raises:
            CompileError: with the compiler's messages.
        """
        headers = {name.encode(): text.encode() for name, text in sources.items() if name != entry}
        flags = [f"--gpu-architecture={architecture}".encode(), *(option.encode() for option in options)]
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            sources[entry].encode(),
            entry.encode(),
            len(headers),
            (ctypes.c_char_p * len(headers))(*headers.values()),
            (ctypes.c_char_p * len(headers))(*headers),
        )
        try:
            code = self._library.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if code:
                raise CompileError(
                    f"{entry} does not compile for {architecture}: {self._reason(code)} "
                    f"(NVRTC {self.version[0]}.{self.version[1]}, options {' '.join(options)})\n{log}"
                )
            return Cubin(self._read(program, "CUBIN"), log)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, text)
        return text.raw

    def _call(self, function: str, *arguments: object) -> None:
        code = getattr(self._library, function)(*arguments)
        if code:
            raise RuntimeError(f"{function} of {self.where} failed: {self._reason(code)}")

    def _reason(self, code: int) -> str:
        reason: bytes = self._library.nvrtcGetErrorString(code)
        return reason.decode()


@functools.cache
def load() -> Nvrtc:
    """The compiler of this installation, loaded once.

    Raises:
        NvrtcUnavailableError: there is none; the message says where it was looked for.
    """
    failures = []
    preferred = (torch.version.cuda or "").split(".")[0]
    for where in candidates(sys.platform, preferred):
        try:
            return Nvrtc(where)
        except (OSError, RuntimeError, AttributeError) as error:
            failures.append(f"{where}: {error}")
    raise NvrtcUnavailableError(
        "NVRTC, the compiler of the GPU kernels, was not found; it comes with PyTorch's CUDA packages "
        f"(this PyTorch is {torch.__version__}), or install nvidia-cuda-nvrtc; tried "
        + ("; ".join(failures) or "nothing")
    )


def candidates(platform: str, preferred: str) -> list[str]:
    """Where to look, in this order: the preferred major version before others, files before what the loader finds."""
    pattern, names = _FILE.get(platform), _LOADER_NAMES.get(platform, {})
    if pattern is None:
        return []
    found = [
        (match[1], str(path))
        for folder in _folders()
        if folder.is_dir()
        for path in sorted(folder.iterdir())
        if (match := pattern.fullmatch(path.name))
    ]
    found += names.items()
    return [where for _, where in sorted(found, key=lambda one: (one[0] != preferred, -int(one[0])))]


def _folders() -> Iterator[Path]:
    """Folders that may hold the library: NVIDIA's packages, PyTorch's own, conda's, an installation of CUDA."""
    packages = importlib.util.find_spec("nvidia")
    for root in (packages.submodule_search_locations if packages else None) or ():
        for inner in ("lib", "bin", "bin/x86_64"):
            yield from sorted(Path(root).glob(f"*/{inner}"))
    yield Path(torch.__file__).parent / "lib"
    yield from (Path(sys.prefix, inner) for inner in ("lib", "Library/bin"))
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield from (Path(os.environ[variable], inner) for inner in ("lib64", "lib", "bin", "bin/x64"))
    yield Path("/usr/local/cuda/lib64")
