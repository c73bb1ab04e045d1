"""Programs: sources of the package with values for their macros, compiled once, kept on disk, loaded where needed."""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import json
import threading
from collections.abc import Mapping, Sequence

import torch

from . import driver, nvrtc
from .cache import Cache
from .cubin import Cubin
from .launch import Kernel

_FORMAT = 1
"""Part of every key in the cache; another number when entries are laid out in another way."""


class Program:
    """A source file with its macros. Obtain one by `program`, which returns the same object for the same request.

    Attributes:
        package: the Python package that the sources lie in, such as "ncgru.recurrence.cuda".
        entry: the source file's name; it may include every `.cuh` file of the package.
        defines: values of macros.
        options: further options of the compiler.
    """

    def __init__(self, package: str, entry: str, defines: Mapping[str, int | str], options: Sequence[str] = ()) -> None:
        self.package = package
        self.entry = entry
        self.defines = dict(defines)
        self.options = tuple(options)
        self._lock = threading.Lock()
        self._cubins: dict[str, Cubin] = {}
        self._modules: dict[int, driver.Module] = {}
        self._kernels: dict[tuple[str, int], Kernel] = {}

    def __repr__(self) -> str:
        macros = [f"{name}={value}" for name, value in self.defines.items()]
        return " ".join([f"{self.package}/{self.entry}", *macros, *self.options])

    def kernel(self, name: str, index: int) -> Kernel:
        """The kernel of this name on device `index`; compiles and loads the program at first use.

        Raises:
            NvrtcUnavailableError, DriverUnavailableError: there is no compiler or no driver.
            CompileError: the source is not valid.
            torch.cuda.OutOfMemoryError: the code does not fit on the device.
        """
        found = self._kernels.get((name, index))
        return found if found is not None else self._load(name, index)

    def cubin(self, architecture: str) -> Cubin:
        """Machine code for an architecture such as "sm_90", from the cache or the compiler; needs no GPU."""
        with self._lock:
            return self._compiled(architecture)

    def _load(self, name: str, index: int) -> Kernel:
        with self._lock:
            if (name, index) not in self._kernels:
                driver.load()  # first, because its absence is the clearest thing to say
                cubin = self._compiled(_architecture(index))
                try:
                    self._kernels[name, index] = self._made(name, index, cubin)
                except torch.cuda.OutOfMemoryError:
                    if torch.cuda.is_current_stream_capturing():
                        raise
                    # Code takes memory from the driver, of which PyTorch may hold all that it has freed.
                    torch.cuda.empty_cache()
                    self._kernels[name, index] = self._made(name, index, cubin)
            return self._kernels[name, index]

    def _made(self, name: str, index: int, cubin: Cubin) -> Kernel:
        if index not in self._modules:
            self._modules[index] = driver.Module(driver.context(index), cubin.image, repr(self))
        return Kernel(self._modules[index], name, cubin.parameters(name))

    def _compiled(self, architecture: str) -> Cubin:
        if architecture not in self._cubins:
            compiler, sources = nvrtc.load(), read_sources(self.package, self.entry)
            macros = [f"-D{name}={value}" for name, value in sorted(self.defines.items())]
            options = [*nvrtc.STANDARD_OPTIONS, *macros, *self.options]
            key = _key([_FORMAT, compiler.identity, architecture, options, self.entry, sources])
            cubin = _unpacked(cache().load(key))
            if cubin is None:
                cubin = compiler.compile(sources, self.entry, options, architecture)
                cache().store(key, _packed(cubin))
            self._cubins[architecture] = cubin
        return self._cubins[architecture]


_programs: dict[object, Program] = {}


def program(package: str, entry: str, defines: Mapping[str, int | str], options: Sequence[str] = ()) -> Program:
    """The program of this source and these macros; one object for each, so that it is compiled once a process."""
    key = (package, entry, tuple(options), tuple(sorted(defines.items())))
    found = _programs.get(key)
    return found if found is not None else _programs.setdefault(key, Program(package, entry, defines, options))


@functools.cache
def cache() -> Cache:
    """The cache on disk that all programs share."""
    return Cache()


@functools.cache
def read_sources(package: str, entry: str) -> dict[str, str]:
    """The entry and all headers of a package, by file name."""
    files = importlib.resources.files(package).iterdir()
    return {
        file.name: file.read_text(encoding="utf-8")
        for file in sorted(files, key=lambda file: file.name)
        if file.name == entry or file.name.endswith(".cuh")
    }


@functools.cache
def why_unavailable(index: int) -> str | None:
    """What keeps kernels from running on device `index`, or None if nothing does."""
    if torch.version.hip:
        return "this PyTorch is built for ROCm, and the kernels are written for CUDA"
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} finds no CUDA device"
    try:
        driver.load()
        _architecture(index)
    except (driver.DriverUnavailableError, nvrtc.NvrtcUnavailableError) as error:
        return str(error)
    return None


def diagnose() -> dict[str, object]:
    """The state of compiler, driver and cache, for people who look for a fault."""
    report: dict[str, object] = {"cache": cache().summary()}
    try:
        compiler = nvrtc.load()
        report["nvrtc"] = {"version": "{}.{}".format(*compiler.version), "where": compiler.where, "problem": None}
    except nvrtc.NvrtcUnavailableError as error:
        report["nvrtc"] = {"version": None, "where": None, "problem": str(error)}
    try:
        report["driver"] = {"version": driver.load().version(), "problem": None}
    except driver.DriverUnavailableError as error:
        report["driver"] = {"version": None, "problem": str(error)}
    return report


@functools.cache
def _architecture(index: int) -> str:
    return nvrtc.load().architecture_for(*torch.cuda.get_device_capability(index))


def _key(parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _packed(cubin: Cubin) -> bytes:
    log = cubin.log.encode()
    return len(log).to_bytes(8, "little") + log + cubin.image


def _unpacked(content: bytes | None) -> Cubin | None:
    if content is None:
        return None
    end = 8 + int.from_bytes(content[:8], "little")
    return Cubin(content[end:], content[8:end].decode())
