"""What a training step of one layer costs the host: its calls of torch operators and its time.

Without a GPU the kernels and the reading of U are left out: launches do nothing, and the tensors are on the CPU, small
enough that the operators' work hardly counts. With one, the host's time is that until all work is issued, beside
nn.GRU's at the same shape; "step" is the whole time, with the device's. "ScaledCayley" is the reading of U alone.

    python benchmarks/host_overhead.py
    python benchmarks/host_overhead.py --update 56 300
    python benchmarks/host_overhead.py --steps 200 --batch 16 --hidden 56
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import ncgru
from ncgru import _cuda
from ncgru.orthogonal import cuda
from ncgru.recurrence import dispatch
from ncgru.recurrence.cuda import gpu
from ncgru.recurrence.cuda.kind import Limits

Step = Callable[[], None]
INNER = 20


@dataclass(frozen=True)
class Idle:
    """A machine that runs nothing."""

    limits: Limits

    def launch(
        self,
        source: str,
        defines: Mapping[str, int],
        name: str,
        grid: tuple[int, int, int],
        threads: int,
        arguments: Sequence[Tensor | int | None],
        **options: Any,
    ) -> None:
        """Launch nothing."""


PROPERTIES = mock.Mock(multi_processor_count=132, shared_memory_per_block_optin=232448)


class IdleKernel:
    """A kernel of the orthogonal update that packs its arguments, as a real one does, and runs nothing."""

    index = -1

    def resident_blocks(self, threads: int, shared: int) -> int:
        """More than enough."""
        return 132

    def launch(self, grid: Any, block: Any, *arguments: Any, shared: int = 0, cooperative: bool = False) -> None:
        """Look at the arguments."""
        values = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments]
        assert values


class IdleProgram:
    """What `_cuda.program` returns, for the CPU."""

    def kernel(self, name: str, index: int) -> IdleKernel:
        """Any."""
        return IdleKernel()


class Reading(nn.Module):
    """A `ScaledCayley` with its vector."""

    def __init__(self, size: int, device: str) -> None:
        super().__init__()
        self.cayley = ncgru.ScaledCayley(size, (1,), device=device)
        self.packed = nn.Parameter(self.cayley.sample())

    def forward(self, input: Tensor) -> Tensor:
        """U [1, n, n], whatever the input is."""
        u: Tensor = self.cayley(self.packed)
        return u


class Given(nn.Module):
    """In the place of a `ScaledCayley`: matrices that are there already."""

    def __init__(self, matrices: Tensor) -> None:
        super().__init__()
        self.matrices = nn.Parameter(matrices.detach().clone())

    def forward(self, packed: Tensor) -> Tensor:
        """The matrices, whatever `packed` is."""
        return self.matrices


@contextmanager
def idle_kernels() -> Iterator[None]:
    """CPU tensors run by kernels that do nothing."""
    idle = Idle(Limits(multiprocessors=132, shared=232448))

    def machine_of(tensor: Tensor) -> Idle:
        return idle

    def nothing(*args: Any) -> None:
        return None

    with (
        mock.patch.object(dispatch, "_why_not_cuda", nothing),
        mock.patch.object(dispatch, "_how_cuda", nothing),
        mock.patch.object(gpu, "machine_of", machine_of),
        mock.patch.object(_cuda, "program", return_value=IdleProgram()),
        mock.patch.object(cuda, "usable", lambda changing, others: cuda.laid_out_plainly(-1, others)),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=PROPERTIES),
    ):
        yield


def training_step(module: nn.Module, input: Tensor) -> tuple[Callable[[], Tensor], Step]:
    """A forward, and a whole step with a loss whose gradient costs next to nothing."""
    parameters = list(module.parameters())
    picks = not isinstance(module, Reading)  # the output out of the results

    def forward() -> Tensor:
        output: Tensor = module(input)[0] if picks else module(input)
        return output

    grad = torch.randn_like(forward())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        forward().backward(grad)

    return forward, step


def microseconds(step: Callable[[], object], repeats: int, synchronize: Callable[[], None]) -> tuple[float, float]:
    """Medians of the time until a step's work is issued, and until it is done."""
    for _ in range(5):
        step()
    issued, done = [], []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        for _ in range(INNER):
            step()
        issued.append((time.perf_counter() - start) / INNER * 1e6)
        synchronize()
        done.append((time.perf_counter() - start) / INNER * 1e6)
    return statistics.median(issued), statistics.median(done)


def operators(step: Callable[[], object]) -> Counter[str]:
    """Torch operators that the step calls, without those that operators call themselves."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    events = [event for event in profile.events() if event.name.startswith(("aten::", "ncgru::"))]
    return Counter(event.name for event in events if not _inside_an_operator(event))


def _inside_an_operator(event: Any) -> bool:
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith("aten::"):
            return True
        parent = parent.cpu_parent
    return False


def measure(name: str, module: nn.Module, input: Tensor, repeats: int) -> dict[str, Any]:
    """One line of results."""
    synchronize = torch.cuda.synchronize if input.is_cuda else lambda: None
    forward, step = training_step(module, input)
    forward_host, _ = microseconds(forward, repeats, synchronize)
    host, whole = microseconds(step, repeats, synchronize)
    calls = operators(step)
    return {
        "module": name,
        "forward_host": round(forward_host, 1),
        "host": round(host, 1),
        "step": round(whole, 1),
        "forward_calls": sum(operators(forward).values()),
        "calls": sum(calls.values()),
        "most_called": dict(calls.most_common(40)),
    }


def modules(hidden: int, device: str) -> dict[str, nn.Module]:
    """What is measured; on the CPU with U given."""
    made: dict[str, nn.Module] = {
        "NCGRU": ncgru.NCGRU(hidden, hidden, backend="cuda", device=device),
        "NCGRU both ways": ncgru.NCGRU(hidden, hidden, bidirectional=True, backend="cuda", device=device),
        "ScoRNN": ncgru.ScoRNN(hidden, hidden, backend="cuda", device=device),
        "GORU": ncgru.GORU(hidden, hidden, backend="cuda", device=device),
    }
    if device == "cpu":
        for module in made.values():
            for name, part in list(module.named_children()):
                setattr(module, name, Given(part.matrix))
    return {**made, "nn.GRU": nn.GRU(hidden, hidden, device=device)}


def readings(sizes: Sequence[int], device: str) -> dict[str, nn.Module]:
    """The orthogonal update alone."""
    return {f"ScaledCayley n={size}": Reading(size, device) for size in sizes}


def main() -> None:
    """Measure and print: a table, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--steps", type=int, default=200 if on_gpu else 2, help="T")
    parser.add_argument("--batch", type=int, default=16 if on_gpu else 2, help="B")
    parser.add_argument("--hidden", type=int, default=56 if on_gpu else 8, help="H, and the number of inputs")
    parser.add_argument("--repeats", type=int, default=30, help=f"timed rounds of {INNER} steps")
    parser.add_argument("--update", type=int, nargs="+", metavar="N", help="the orthogonal update alone, of N rows")
    parser.add_argument("--calls", action="store_true", help="list the operators that a step calls")
    options = parser.parse_args()
    device = "cuda" if on_gpu else "cpu"
    input = torch.randn(options.steps, options.batch, options.hidden, device=device)
    results = []
    print(f"{'µs a step':<18}{'forward, host':>14}{'host':>10}{'step':>10}{'calls forward':>15}{'calls':>7}")
    with nullcontext() if on_gpu else idle_kernels():
        chosen = readings(options.update, device) if options.update else modules(options.hidden, device)
        for name, module in chosen.items():
            row = measure(name, module, input, options.repeats)
            results.append(row)
            times = f"{row['forward_host']:>14}{row['host']:>10}{row['step']:>10}"
            print(f"{name:<18}{times}{row['forward_calls']:>15}{row['calls']:>7}")
            if options.calls:
                print("  " + ", ".join(f"{count} {call}" for call, count in row["most_called"].items()))
    where = torch.cuda.get_device_name() if on_gpu else "cpu, idle kernels"
    print(json.dumps({"device": where, "torch": torch.__version__, **vars(options), "results": results}))


if __name__ == "__main__":
    main()
