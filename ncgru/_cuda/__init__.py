"""GPU kernels without a compiler on the user's machine: CUDA C++ in the package, NVRTC, a cache on disk, the driver.

Private to ncgru. Importing it loads no library and needs no GPU; torch is the only dependency.

    from ncgru._cuda import program, why_unavailable

    reason = why_unavailable(index)                 # None, or a sentence: no driver, no compiler, an unknown GPU
    small = program("ncgru.recurrence.cuda", "small.cu", {"HIDDEN": 56, "LANES": 8})  # cheap; compiles nothing yet
    kernel = small.kernel("small_forward_1", index)                               # compiles and loads at first use
    kernel.launch((blocks, 1, 1), (threads, 1, 1), tensor, None, steps, 0.5, shared=4096, cooperative=False)

A source includes the `.cuh` files of its package by their names, and nothing else. Kernels are `extern "C"`; their
parameters are pointers and 64-bit integers (8 bytes), `float` (4 bytes), or structures (passed as `bytes`). A function
without `__device__` or `__host__` is a device function; the language is C++17.

`Kernel` has `registers`, `local_bytes`, `static_shared`, `max_shared` (dynamic shared memory that a launch may ask
for; every kernel is allowed it), `max_threads`, `blocks_per_multiprocessor(threads, shared)` and
`resident_blocks(threads, shared)`. A launch goes to PyTorch's current stream of the kernel's device, may be captured
in a graph, and may come from any thread. Keep a kernel rather than ask for it anew: asking takes a microsecond.

`Program.cubin("sm_90")` compiles without a GPU; its `resources()` are registers and spills, its `parameters(name)` the
sizes of a kernel's parameters.

A package with `.cu` files has a module `variants` with a function `variants()`, which returns a `Variant` for each
program that the launcher may ask for (or a choice that covers them): `Variant(program(...), local_bytes=0)`. The tests,
and `python -m ncgru._cuda`, compile them for `ARCHITECTURES` and refuse kernels that take more local memory than that.
"""

from __future__ import annotations

from .cubin import Cubin, Resources
from .driver import DriverUnavailableError
from .kernels import Program, diagnose, program, why_unavailable
from .launch import Kernel
from .nvrtc import CompileError, NvrtcUnavailableError
from .variants import ARCHITECTURES, Variant

__all__ = [
    "ARCHITECTURES",
    "CompileError",
    "Cubin",
    "DriverUnavailableError",
    "Kernel",
    "NvrtcUnavailableError",
    "Program",
    "Resources",
    "Variant",
    "diagnose",
    "program",
    "why_unavailable",
]
