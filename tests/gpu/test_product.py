"""Products of float32 by two parts of float16, on a GPU: as exact as torch's, the same in every bit, in a layer."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import Tensor

from ncgru import GORU, NCGRU
from ncgru.recurrence.cuda import product
from ncgru.recurrence.cuda.gpu import gpu
from ncgru.recurrence.cuda.product import Operand, Result, operand, products
from tests.gpu.helpers import DEVICE, assert_same_but_for_rounding
from tests.recurrence.cuda.proof import unwritten_is_nan

pytestmark = pytest.mark.gpu

LAYOUTS = [(True, True), (True, False), (False, False)]
SHAPES = [(4096, 768, 512), (1400, 3450, 1150), (513, 129, 4001), (236, 118, 28032), (1, 40, 100), (300, 7, 33)]


def matrix(rows: int, columns: int, along: bool, offset: int = 0, gap: int = 0) -> Tensor:
    """Random numbers, rows or columns of which lie together, from an offset on and with gaps."""
    shape = (rows, columns) if along else (columns, rows)
    room = torch.randn(offset + shape[0] * (shape[1] + gap), device=DEVICE)
    x = room[offset:].as_strided(shape, (shape[1] + gap, 1))
    return x if along else x.t()


def made(a: Tensor, b: Tensor, room: int = product.ROOM, tiling: product.Tiling | None = None) -> Tensor:
    out = torch.full((a.shape[0], b.shape[1]), torch.nan, device=DEVICE)
    tilings = product.TILINGS if tiling is None else (tiling,)
    with unwritten_is_nan():
        problems = [(operand(a, 1), operand(b, 0), Result(out, 0, b.shape[1]))]
        products(gpu(0), a.shape[1], problems, room, tilings)
    return out


def assert_as_exact_as_torch(found: Tensor, a: Tensor, b: Tensor) -> None:
    """By the norm of all errors; sums of a few numbers may be two roundings worse."""
    truth = a.double() @ b.double()
    assert found.isfinite().all()
    error, usual = (float((x.double() - truth).norm() / truth.norm()) for x in (found, a @ b))
    assert error <= max(usual, 2**-22), (error, usual)


@pytest.mark.parametrize(("a_along", "b_along"), LAYOUTS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_errs_no_more_than_torch(m: int, n: int, k: int, a_along: bool, b_along: bool) -> None:
    torch.manual_seed(0)
    a, b = matrix(m, k, a_along), matrix(k, n, not b_along)
    for tiling in product.TILINGS:
        assert_as_exact_as_torch(made(a, b, tiling=tiling), a, b)
    assert_as_exact_as_torch(made(a, b, room=4 * (m + n) * k // 3 + 2**14), a, b)


@pytest.mark.parametrize(("a_along", "b_along"), LAYOUTS)
@pytest.mark.parametrize(("offset", "gap"), [(1, 0), (2, 2), (3, 1), (0, 4)])
def test_places_in_memory(a_along: bool, b_along: bool, offset: int, gap: int) -> None:
    torch.manual_seed(1)
    a, b = matrix(300, 500, a_along, offset, gap), matrix(500, 264, not b_along, offset, gap)
    assert_as_exact_as_torch(made(a, b), a, b)


def test_zeros_in_front() -> None:
    torch.manual_seed(2)
    a, b = torch.randn(3000, 300, device=DEVICE), torch.randn(3000, 200, device=DEVICE)
    shifted = torch.zeros_like(b)
    shifted[70:] = b[:-70]
    for room in (product.ROOM, 2**20):
        out = torch.full((300, 200), torch.nan, device=DEVICE)
        with unwritten_is_nan():
            late = Operand(b, 0, 200, 2930, 200, False, 70)
            products(gpu(0), 3000, [(operand(a.t(), 1), late, Result(out, 0, 200))], room)
        assert_as_exact_as_torch(out, a.t(), shifted)


@pytest.mark.parametrize(("a_along", "b_along"), LAYOUTS)
def test_twenty_runs_agree_in_every_bit(a_along: bool, b_along: bool) -> None:
    torch.manual_seed(3)
    a, b = matrix(700, 5000, a_along), matrix(5000, 300, not b_along)
    first, aside, work = made(a, b), torch.cuda.Stream(), torch.randn(2048, 2048, device=DEVICE)
    for number in range(20):
        if number % 2:
            with torch.cuda.stream(aside):
                torch.mm(work, work)
        assert torch.equal(made(a, b), first)
    torch.cuda.synchronize()


def test_gradients_that_decay_meet_inputs_that_occur_early() -> None:
    """Each number as exact as torch's, or a few roundings, though late gradients are 2^40 times as large."""
    torch.manual_seed(4)
    steps, batch = 400, 16
    dz = torch.randn(steps * batch, 384, device=DEVICE)
    dz *= torch.exp2(torch.linspace(-40, 0, steps, device=DEVICE).floor()).repeat_interleave(batch)[:, None]
    x = torch.zeros(steps * batch, 200, device=DEVICE)
    rows = torch.arange(steps * batch, device=DEVICE)
    x[rows, rows // (2 * batch)] = 1
    truth, sizes = dz.double().t() @ x.double(), dz.double().abs().t() @ x.double()
    found, usual = (((y - truth).abs() / sizes.clamp(min=1e-300)).max() for y in (made(dz.t(), x), dz.t() @ x))
    assert float(found) <= 2 * float(usual) + 2**-22


def test_what_is_not_finite_stays_where_it_is() -> None:
    torch.manual_seed(5)
    for a_along, b_along in LAYOUTS:
        for what in (torch.inf, -torch.inf, torch.nan):
            a, b = matrix(200, 300, a_along), matrix(300, 150, not b_along)
            a[2, 40], b[269, 7], a[5] = what, what, 0
            assert torch.equal(made(a, b).isfinite(), (a @ b).isfinite())


def layer_results(module: torch.nn.Module, x: Tensor, h0: Tensor) -> list[Tensor]:
    """Output, and the gradients of input and parameters."""
    leaves = [x.detach().requires_grad_(), *module.parameters()]
    output, _ = module(leaves[0], h0)
    loss = (output * torch.arange(output.numel(), device=DEVICE).cos().view_as(output)).sum()
    return [output.detach(), *torch.autograd.grad(loss, leaves)]


def layer(kind: type, bidirectional: bool = False) -> tuple[torch.nn.Module, Tensor, Tensor]:
    """A layer of a phi without jumps, an input and initial states."""
    torch.manual_seed(6)
    settings = {"nonlinearity": "tanh", "bidirectional": bidirectional, "backend": "cuda", "device": DEVICE}
    x, h0 = torch.randn(64, 64, 512, device=DEVICE), torch.randn(1 + bidirectional, 64, 512, device=DEVICE)
    return kind(512, 512, **settings), x, h0


@pytest.mark.parametrize("kind", [NCGRU, GORU])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_layers_by_products_of_both_kinds(kind: type, bidirectional: bool) -> None:
    module, x, h0 = layer(kind, bidirectional)
    with mock.patch.object(product, "products", wraps=products) as spy:
        ours = layer_results(copy.deepcopy(module), x, h0)
        assert spy.call_count >= 3
    for _ in range(3):
        assert all(torch.equal(*pair) for pair in zip(layer_results(copy.deepcopy(module), x, h0), ours, strict=True))
    with mock.patch.object(product, "LEAST_WORK", float("inf")):
        theirs = layer_results(copy.deepcopy(module), x, h0)
    for mine, its in zip(ours, theirs, strict=True):
        assert_same_but_for_rounding(mine, its)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # the same leaves with and without a graph
def test_graphs() -> None:
    module, x, h0 = layer(NCGRU)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = layer_results(module, x, h0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layer_results(module, x, h0)
    for _ in range(2):
        graph.replay()
        for mine, its in zip(found, expected, strict=True):
            assert_same_but_for_rounding(mine, its)
