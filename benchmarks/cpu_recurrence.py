"""Forward and backward of one recurrent layer on the CPU: ncgru against nn.GRU, nn.LSTM and a plain autograd loop.

Every candidate includes its input projection and the gradients of its weights. `ncgru` is NCGRU with one orthogonal
matrix, whose A is moved before each step, so that following its inverse is included too; `autograd` is the same cell
with a free matrix; `products` is nothing but the matrix products that such a layer makes forward and backward, one for
the input and those of every step. The candidates take turns within each repeat, so that what else the machine does
meets them all.
Prints a table, then one line of JSON.

    python benchmarks/cpu_recurrence.py --threads 2 --repeats 15
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ncgru import NCGRU
from ncgru.recurrence import unrolled

# T, B, H, input size: parenthesis, parenthesis, denoise, adding, copying, character PTB
SHAPES = (
    (100, 16, 56, 7),
    (200, 16, 56, 7),
    (220, 128, 118, 10),
    (400, 50, 80, 2),
    (1020, 50, 96, 10),
    (100, 32, 430, 430),
)


class PlainLoop(torch.nn.Module):
    """A gated layer with modReLU as a plain autograd loop."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.weight_ih = torch.nn.Parameter(torch.randn(3 * size, inputs) / inputs**0.5)
        self.bias = torch.nn.Parameter(torch.zeros(3 * size))
        self.weight_hh = torch.nn.Parameter(torch.linalg.qr(torch.randn(3, size, size))[0].reshape(3 * size, size))
        self.threshold = torch.nn.Parameter(torch.empty(size).uniform_(-0.1, 0.1))

    def forward(self, x: Tensor) -> Tensor:
        projected = torch.nn.functional.linear(x, self.weight_ih, self.bias)
        initial = x.new_zeros(x.shape[1], self.weight_hh.shape[1])
        return unrolled(projected, initial, self.weight_hh, self.threshold, None, "before", "modrelu", False)


def candidates(inputs: int, size: int) -> dict[str, torch.nn.Module]:
    return {
        "ncgru": NCGRU(inputs, size),
        "nn.GRU": torch.nn.GRU(inputs, size),
        "nn.LSTM": torch.nn.LSTM(inputs, size),
        "autograd": PlainLoop(inputs, size),
    }


def training_step(module: torch.nn.Module, x: Tensor, gradient: Tensor) -> Callable[[], None]:
    skew = list(module.skew_parameters()) if isinstance(module, NCGRU) else []

    def step() -> None:
        module.zero_grad(set_to_none=True)
        with torch.no_grad():
            for parameter in skew:
                parameter.add_(torch.randn_like(parameter), alpha=1e-4)
        output = module(x)
        (output if isinstance(output, Tensor) else output[0]).backward(gradient)

    return step


def products(x: Tensor, size: int) -> Callable[[], None]:
    """The products of a gated layer with reset before, and of its backward, on arbitrary numbers."""
    steps, batch, inputs = x.shape
    rows = x.flatten(0, 1)
    states, d_gates = torch.randn(steps * batch, size), torch.randn(steps * batch, 3 * size)
    weight_ih, weight_ru, weight_c = (
        torch.randn(*shape) for shape in ((inputs, 3 * size), (size, 2 * size), (size, size))
    )
    state, d_ru = torch.randn(batch, size), torch.randn(batch, 2 * size)
    gates, other = torch.empty(batch, 2 * size), torch.empty(batch, size)

    def step() -> None:
        torch.mm(rows, weight_ih)
        for _ in range(steps):
            torch.mm(state, weight_ru, out=gates)
            torch.mm(state, weight_c, out=other)
        for _ in range(steps):
            torch.mm(state, weight_c, out=other)
            torch.mm(d_ru, weight_ru.t(), out=other)
        torch.mm(d_gates.t(), rows)
        torch.mm(d_gates[:, : 2 * size].t(), states)
        torch.mm(d_gates[:, 2 * size :].t(), states)

    return step


def measure(shape: tuple[int, int, int, int], repeats: int) -> dict[str, float]:
    """Median seconds of each candidate."""
    steps, batch, size, inputs = shape
    torch.manual_seed(0)
    x, gradient = torch.randn(steps, batch, inputs), torch.randn(steps, batch, size)
    runs = {name: training_step(module, x, gradient) for name, module in candidates(inputs, size).items()}
    runs["products"] = products(x, size)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def commit() -> str:
    """The commit of this checkout, with a + if files have changed since."""
    root = Path(__file__).resolve().parent
    call = ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    result = subprocess.run(call, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--shapes", type=int, nargs="*", help="which of the shapes, by position from 0; default all")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    names = [*candidates(1, 1), "products"]
    print(
        f"{'T':>5} {'B':>4} {'H':>4} {'I':>4} | "
        + " ".join(f"{name + ' ms':>11}" for name in names)
        + " | GRU/ncgru LSTM/ncgru autograd/ncgru"
    )
    results = []
    for shape in SHAPES if arguments.shapes is None else [SHAPES[k] for k in arguments.shapes]:
        medians = measure(shape, arguments.repeats)
        row = " ".join(f"{medians[name] * 1e3:11.2f}" for name in names)
        ratios = [medians[name] / medians["ncgru"] for name in names[1:4]]
        print(
            "{:5} {:4} {:4} {:4} | ".format(*shape) + row + " | {:9.2f} {:10.2f} {:14.2f}".format(*ratios), flush=True
        )
        results.append({"shape": dict(zip("TBHI", shape, strict=True)), "seconds": medians})
    facts = {
        "benchmark": "cpu_recurrence",
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        "threads": arguments.threads,
        "repeats": arguments.repeats,
        "results": results,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
