"""Time of one orthogonal update on a GPU, forward and backward, against torch's own parametrisation.

A timed step reads U, takes the gradient in the free numbers, and moves them by a step of Adam's size, so that every
step has an update to do. "host" is the wall time of the calls alone, "eager" the time a step takes when the steps are
issued one after another, "graph" when they are replayed from a CUDA graph.

    python benchmarks/gpu_orthogonal.py --sizes 56 128 512 --repeats 50
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import ncgru
from ncgru.orthogonal import cuda, packed_size

Step = Callable[[], None]
RATE = 1e-3


def our_step(n: int, batch: int, method: str = "hyperpower", order: int = 2) -> tuple[Step, ncgru.ScaledCayley]:
    """One update of `batch` matrices by ncgru."""
    module = ncgru.ScaledCayley(n, (batch,), inverse=method, order=order, device="cuda")
    packed = (torch.randn(batch, packed_size(n), device="cuda") / math.sqrt(n)).requires_grad_()
    grad = torch.randn(batch, n, n, device="cuda")
    rate = RATE / math.sqrt(n)  # keeps the series within its guard at every size

    def step() -> None:
        (gradient,) = torch.autograd.grad(module(packed), packed, grad)
        with torch.no_grad():
            packed.add_(gradient.sign_(), alpha=-rate)

    return step, module


def torch_step(n: int, batch: int) -> Step:
    """The same with torch.nn.utils.parametrizations.orthogonal's Cayley map, one matrix after another."""
    layers: list[Any] = []
    for _ in range(batch):
        layer = nn.Linear(n, n, bias=False, device="cuda")
        layers.append(nn.utils.parametrizations.orthogonal(layer, orthogonal_map="cayley"))
    grad = torch.randn(n, n, device="cuda")

    def step() -> None:
        for layer in layers:
            weight = layer.parametrizations.weight.original
            (gradient,) = torch.autograd.grad(layer.weight, weight, grad)
            with torch.no_grad():
                weight.add_(gradient.sign_(), alpha=-RATE / math.sqrt(n))

    return step


def eager_time(step: Step, repeats: int) -> dict[str, float]:
    """Medians in µs: the host's part and the whole, of batches of steps."""
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    inner, host, whole = 10, [], []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(inner):
            step()
        issued = time.perf_counter()
        torch.cuda.synchronize()
        host.append((issued - start) / inner * 1e6)
        whole.append((time.perf_counter() - start) / inner * 1e6)
    return {"host": statistics.median(host), "eager": statistics.median(whole)}


def graph_time(step: Step, repeats: int) -> float | None:
    """Median µs of a step within a CUDA graph of ten; None where the step cannot be captured."""
    torch.cuda.synchronize()  # what the step needs may still be in the making
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(10):
                step()
    except RuntimeError:
        return None
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / 10)
    return statistics.median(times)


def kernel_times(n: int, batch: int, repeats: int) -> dict[str, float]:
    """Median µs on the GPU of the forward and of the backward alone, each in a graph of ten."""
    step, module = our_step(n, batch)
    step()
    state = cuda.State(*copy.deepcopy(module).buffers())
    chosen = cuda.kernels(n, 0)
    first, second = state.anchor.clone(), state.anchor + RATE / math.sqrt(n) * torch.randn_like(state.anchor).sign()
    grad = torch.randn(batch, n, n, device="cuda")
    matrix, inverse = state.matrix.clone(), state.inverse.clone()
    vectors: list[Tensor] = [second, first]

    def forward() -> None:
        chosen.follow(vectors[0], state, "hyperpower", 2, 0)
        vectors.reverse()

    def unchanged() -> None:
        chosen.follow(state.anchor, state, "hyperpower", 2, 0)

    def backward() -> None:
        chosen.gradient(grad, matrix, inverse, state.signs)

    parts = {"forward": forward, "unchanged": unchanged, "backward": backward}
    return {name: graph_time(part, repeats) or math.nan for name, part in parts.items()}


def measure(n: int, batch: int, repeats: int) -> dict[str, Any]:
    """All figures of one size."""
    step, module = our_step(n, batch)
    ours = eager_time(step, repeats)
    ours["graph"] = graph_time(step, repeats) or math.nan
    theirs = eager_time(torch_step(n, batch), max(3, repeats // 5))
    parts = kernel_times(n, batch, repeats)
    refreshes, updates = int(module.refreshes.sum()), int(module.updates.sum())
    return {"n": n, "batch": batch, "ours": ours, "torch": theirs, "gpu": parts,
            "ratio": theirs["eager"] / ours["eager"], "refreshes": refreshes, "updates": updates}  # fmt: skip


def main() -> None:
    """Print a table, and its figures as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[56, 80, 96, 118, 128, 192, 256, 512, 1024, 2048])
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args()
    problem = cuda.why_not(torch.device("cuda", 0), torch.float32)
    if problem is not None:
        raise SystemExit(f"the kernels cannot run: {problem}")
    print("    n  K |  host  eager  graph | forward unchanged backward |  torch  ratio | refreshes/updates")
    rows = []
    for n in options.sizes:
        for batch in options.batches:
            row = measure(n, batch, options.repeats if n < 1024 else max(3, options.repeats // 5))
            rows.append(row)
            ours, gpu = row["ours"], row["gpu"]
            print(
                f"{n:5d} {batch:2d} | {ours['host']:5.1f} {ours['eager']:6.1f} {ours['graph']:6.1f} | "
                f"{gpu['forward']:7.1f} {gpu['unchanged']:9.1f} {gpu['backward']:8.1f} | "
                f"{row['torch']['eager']:6.0f} {row['ratio']:6.1f} | {row['refreshes']}/{row['updates']}",
                flush=True,
            )
    print(json.dumps({"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
