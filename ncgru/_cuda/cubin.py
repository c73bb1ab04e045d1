"""What is known of compiled code without a GPU: resources and parameters of its kernels."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_KERNEL_INFO = ".nv.info."
_SIZED, _PARAMETER = 0x04, 0x17
"""In a section of kernel information: an attribute that states its size, and the one that describes a parameter."""


@dataclass(frozen=True)
class Resources:
    """What a kernel takes of the chip, as the assembler reported it.

    Attributes:
        registers: a thread.
        local_bytes: local memory a thread: what has spilled, and arrays that are not in registers.
        spill_stores: bytes that the code stores for want of registers.
        spill_loads: bytes that the code loads for want of registers.
        static_shared: bytes of static shared memory a block.
    """

    registers: int
    local_bytes: int
    spill_stores: int
    spill_loads: int
    static_shared: int


@dataclass(frozen=True)
class Cubin:
    """Machine code of one architecture, and what the compiler said about it."""

    image: bytes
    log: str

    def resources(self) -> dict[str, Resources]:
        """The resources of each kernel, by name."""
        return dict(_reported(self.log))

    def parameters(self, kernel: str) -> tuple[int, ...]:
        """The size in bytes of each parameter of a kernel.

        Raises:
            ValueError: there is no such kernel; the message lists those that there are.
        """
        sections = dict(_sections(self.image))
        name = _KERNEL_INFO + kernel
        if name not in sections:
            kernels = sorted(found.removeprefix(_KERNEL_INFO) for found in sections if found.startswith(_KERNEL_INFO))
            raise ValueError(f'there is no kernel {kernel!r}, only {", ".join(kernels) or "none"}; is it extern "C"?')
        return tuple(size for _, size in sorted(_parameters(sections[name])))


def _reported(log: str) -> Iterator[tuple[str, Resources]]:
    """Kernels and resources in the assembler's verbose output: a part each, the functions that it calls included."""
    _, *parts = re.split(r"Compiling entry function '(\w+)'", log)
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        yield (
            name,
            Resources(
                registers=max(_numbers(r"Used (\d+) registers", text), default=0),
                # The second is there where functions are called, and counts theirs too.
                local_bytes=max(_numbers(r"(\d+) bytes (?:stack frame|cumulative stack size)", text), default=0),
                spill_stores=sum(_numbers(r"(\d+) bytes spill stores", text)),
                spill_loads=sum(_numbers(r"(\d+) bytes spill loads", text)),
                static_shared=sum(_numbers(r"(\d+) bytes smem", text)),
            ),
        )


def _numbers(pattern: str, text: str) -> list[int]:
    return [int(found) for found in re.findall(pattern, text)]


def _sections(image: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the sections of a 64-bit ELF file, as far as they occupy it."""
    if image[:5] != b"\x7fELF\x02":
        raise ValueError(f"machine code must be a 64-bit ELF file, but it starts with {image[:5]!r}")
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count, names = struct.unpack_from("<HHH", image, 58)
    headers = [struct.unpack_from("<IIQQQQ", image, table + index * size) for index in range(count)]
    first_name = headers[names][4]
    for name, _, _, _, offset, length in headers:
        start = first_name + name
        yield image[start : image.index(b"\0", start)].decode(), image[offset : offset + length]


def _parameters(information: bytes) -> Iterator[tuple[int, int]]:
    """Place and size of each parameter in a kernel's section of attributes."""
    at = 0
    while at < len(information):
        kind, attribute, size = struct.unpack_from("<BBH", information, at)
        at += 4
        if kind != _SIZED:
            continue  # what follows the kind is the value itself
        if attribute == _PARAMETER:
            _, place, _, flags = struct.unpack_from("<IHHI", information, at)
            yield place, flags >> 18
        at += size
