"""The kernels of the orthogonal update, run on the CPU, against the operations that specify them."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ncgru.orthogonal import METHODS, ScaledCayley, cuda, packed_size
from ncgru.orthogonal.cuda import large
from ncgru.orthogonal.cuda.small import chunk_of, rows_of, shared_bytes
from ncgru.orthogonal.inverse import gradient_of, seal_of
from tests.orthogonal.emulated import kernels_on_the_cpu
from tests.orthogonal.measure import moved

EPSILON = torch.finfo(torch.float32).eps
LARGE = {"largest_small": 1}
CLUSTERS = {"clusters": True}
WAYS = pytest.mark.parametrize("options", [{}, CLUSTERS, LARGE], ids=["small", "clusters", "large"])


def started(
    n: int, batch: int, method: str = "hyperpower", order: int = 2, reset_every: int | None = None
) -> ScaledCayley:
    """A module whose A has a norm of about 2."""
    module = ScaledCayley(n, (batch,), inverse=method, order=order, reset_every=reset_every)
    packed = torch.randn(batch, packed_size(n), generator=torch.Generator().manual_seed(0)) / math.sqrt(n)
    with torch.no_grad():
        module(packed)
    return module


def step(module: ScaledCayley, size: float, seed: int) -> Tensor:
    """The A's after a step whose norm is about `size`."""
    return moved(module.anchor, size / (2 * math.sqrt(module.size)), seed)


def follow(module: ScaledCayley, packed: Tensor, **options: Any) -> Tensor:
    with kernels_on_the_cpu(**options), torch.no_grad():
        u: Tensor = module(packed)
    return u


def assert_alike(ours: ScaledCayley, theirs: ScaledCayley) -> None:
    """The same state up to rounding, and the same counts."""
    assert torch.equal(ours.anchor, theirs.anchor)
    assert torch.equal(ours.updates, theirs.updates)
    assert torch.equal(ours.refreshes, theirs.refreshes)
    assert torch.equal(ours.seal, seal_of(ours.anchor, ours.inverse, ours.matrix, ours.signs))
    assert (ours.inverse - theirs.inverse).abs().max() <= 2 * EPSILON
    assert (ours.matrix - theirs.matrix).abs().max() <= 4 * EPSILON


@WAYS
@pytest.mark.parametrize(
    ("method", "order"),
    [("hyperpower", 2), ("hyperpower", 1), ("hyperpower", 3), ("neumann", 2), ("neumann", 1), ("exact", 2)],
)
@pytest.mark.parametrize("n", [2, 3, 17])
def test_states_follow_as_specified(n: int, method: str, order: int, options: dict[str, Any]) -> None:
    module = started(n, 2, method, order, reset_every=4)
    twin = copy.deepcopy(module)
    for number, size in enumerate([1e-4, 1e-4, 1e-4, 10 ** (-4 / (order + 1)), 0.0, 30.0]):
        packed = step(module, size, number)
        if number % 2:
            packed[0] = module.anchor[0]
        u = follow(module, packed, **options)
        with torch.no_grad():
            twin(packed)
        assert torch.equal(u, module.matrix)
        assert_alike(module, twin)


@pytest.mark.parametrize(
    "options",
    [{"max_shared": 44 << 10}, {}, CLUSTERS, {**CLUSTERS, "max_shared": 44 << 10}, LARGE],
    ids=["chunks", "small", "clusters", "clusters in chunks", "large"],
)
@pytest.mark.parametrize("n", [32, 33, 64])
def test_middle_sizes(n: int, options: dict[str, Any]) -> None:
    module = started(n, 1)
    twin = copy.deepcopy(module)
    for number, size in enumerate((1e-4, 0.05)):
        packed = step(module, size, number)
        follow(module, packed, **options)
        with torch.no_grad():
            twin(packed)
        assert_alike(module, twin)


@pytest.mark.parametrize("n", [97, 129, 193])
def test_larger_sizes_and_their_gradients(n: int) -> None:
    module = started(n, 1)
    twin = copy.deepcopy(module)
    packed = step(module, 1e-3, 1).requires_grad_()
    grad = torch.randn(1, n, n, generator=torch.Generator().manual_seed(2))
    with kernels_on_the_cpu(clusters=True):
        (gradient,) = torch.autograd.grad(module(packed), packed, grad)
    with torch.no_grad():
        twin(packed)
    assert_alike(module, twin)
    truth = gradient_of(
        grad.double(), None, *(value.double() for value in (module.matrix, module.inverse, module.signs))
    )
    assert truth is not None
    assert (gradient - truth).abs().max() <= 8 * EPSILON * (1 + truth.abs().max())


@pytest.mark.parametrize(
    ("method", "order"), [("hyperpower", 1), ("hyperpower", 2), ("hyperpower", 4), ("neumann", 3), ("exact", 2)]
)
@pytest.mark.parametrize(
    ("n", "batch", "tiles", "blocks"),
    [(70, 3, (32, 32), 5), (45, 2, (32, 64), 1), (97, 2, (64, 64), 4), (131, 1, (128, 64), 3), (3, 5, (128, 64), 7)],
)
def test_products_in_tiles_of_every_shape(
    n: int, batch: int, tiles: tuple[int, int], blocks: int, method: str, order: int
) -> None:
    """The series, its first exact repair, and the gradient."""
    options: dict[str, Any] = {**LARGE, "tiles": tiles, "blocks": blocks}
    module = started(n, batch, method, order)
    twin = copy.deepcopy(module)
    for number, size in enumerate([1e-4, 10 ** (-4 / (order + 1))]):
        packed = step(module, size, number)
        follow(module, packed, **options)
        with torch.no_grad():
            twin(packed)
        assert_alike(module, twin)
    grad = torch.randn(batch, n, n, generator=torch.Generator().manual_seed(2))
    with kernels_on_the_cpu(**options):
        (gradient,) = torch.autograd.grad(module(packed.requires_grad_()), packed, grad)
    truth = gradient_of(
        grad.double(), None, *(value.double() for value in (module.matrix, module.inverse, module.signs))
    )
    assert truth is not None
    assert (gradient - truth).abs().max() <= 8 * EPSILON * (1 + truth.abs().max())


@WAYS
@pytest.mark.parametrize("n", [2, 7, 33])
def test_gradients(n: int, options: dict[str, Any]) -> None:
    module = started(n, 2)
    packed = step(module, 1e-3, 1).requires_grad_()
    grad = torch.randn(2, n, n, generator=torch.Generator().manual_seed(2))
    with kernels_on_the_cpu(**options):
        (gradient,) = torch.autograd.grad(module(packed), packed, grad)
        (through_sum,) = torch.autograd.grad(module(packed).sum(), packed)
    wide = [value.double() for value in (module.matrix, module.inverse, module.signs)]
    for ours, given in ((gradient, grad), (through_sum, torch.ones_like(grad))):
        truth = gradient_of(given.double(), None, *wide)
        assert truth is not None
        assert (ours - truth).abs().max() <= 8 * EPSILON * (1 + truth.abs().max())


@pytest.mark.parametrize("n", [35, 36, 38])
def test_gradients_may_lie_anywhere(n: int) -> None:
    """Operands are copied as many numbers at a time as lie together."""
    module = started(n, 1)
    packed = step(module, 1e-3, 1).requires_grad_()
    room = torch.empty(n * n + 3)
    values = torch.randn(n * n, generator=torch.Generator().manual_seed(2))
    gradients: list[Tensor] = []
    with kernels_on_the_cpu(largest_small=1):
        for first in range(4):
            grad = room[first : first + n * n].copy_(values).view(1, n, n)
            gradients += torch.autograd.grad(module(packed), packed, grad)
    for gradient in gradients[1:]:
        assert torch.equal(gradient, gradients[0])


def test_second_derivatives_go_through_torch() -> None:
    module = started(3, 1)
    packed = step(module, 1e-3, 1).requires_grad_()
    results = []
    for used in (True, False):
        with kernels_on_the_cpu() if used else torch.enable_grad():
            (first,) = torch.autograd.grad(module(packed).pow(3).sum(), packed, create_graph=True)
            results.append(torch.autograd.grad(first.square().sum(), packed)[0])
    assert torch.allclose(results[0], results[1], atol=1e-4)


@pytest.mark.parametrize("buffer", ["anchor", "inverse", "matrix", "signs", "seal"])
@WAYS
def test_tampering_is_repaired_and_counted(options: dict[str, Any], buffer: str) -> None:
    module = started(6, 3)
    packed, before = module.anchor.clone(), copy.deepcopy(module)
    values = getattr(module, buffer)
    if buffer == "seal":
        values[1] += 1
    else:
        values[1].view(-1)[-1].neg_()
    twin = copy.deepcopy(module)
    follow(module, packed, **options)
    with torch.no_grad():
        twin(packed)
    assert_alike(module, twin)
    assert (module.refreshes - before.refreshes).tolist() == [0, 1, 0]


@WAYS
@pytest.mark.parametrize("method", METHODS)
def test_nan_stays_with_its_matrix_and_goes_with_it(method: str, options: dict[str, Any]) -> None:
    module = started(5, 2, method)
    good = module.anchor.clone()
    bad = good.clone()
    bad[0, 3] = math.nan
    u = follow(module, bad, **options)
    assert u[0].isnan().any()
    assert torch.equal(u[1], module.matrix[1])
    assert not u[1].isnan().any()
    twin = copy.deepcopy(module)
    follow(module, good, **options)
    with torch.no_grad():
        twin(good)
    assert_alike(module, twin)


def test_batches_larger_than_a_launch() -> None:
    module = started(4, 11)
    twin = copy.deepcopy(module)
    packed = step(module, 1e-3, 1).requires_grad_()
    grads = []
    for used in (True, False):
        with kernels_on_the_cpu() if used else torch.enable_grad():
            follower = module if used else twin
            grads.append(torch.autograd.grad(follower(packed).square().sum(), packed)[0])
    assert_alike(module, twin)
    assert torch.allclose(grads[0], grads[1], atol=1e-5)


def test_reading_raises_the_versions_of_the_state() -> None:
    """So that autograd notices if it has saved a buffer elsewhere."""
    module = started(3, 1)
    before = module.matrix._version
    follow(module, step(module, 1e-3, 1))
    assert module.matrix._version > before


def test_reading_again_leaves_earlier_backward_passes_alone() -> None:
    module = started(4, 1)
    packed = step(module, 1e-3, 1).requires_grad_()
    with kernels_on_the_cpu():
        once = module(packed).pow(3).sum()
        later = (packed.detach() + 1e-3).requires_grad_()
        again = module(packed).pow(3).sum()
        module(later).sum().backward()
        once.backward()
        first = packed.grad
        packed.grad = None
        again.backward()
    assert first is not None
    assert packed.grad is not None
    assert torch.equal(first, packed.grad)


@pytest.mark.parametrize("shared_limit", [99 << 10, 163 << 10, 227 << 10])
def test_every_small_size_fits_into_shared_memory(shared_limit: int) -> None:
    limit = shared_limit - cuda.STATIC_SHARED
    for n in range(2, cuda.LARGEST_SMALL + 1):
        chunk = chunk_of(n, limit)
        assert chunk is not None
        assert n <= rows_of(n) < n + 32
        assert shared_bytes(rows_of(n), chunk) <= limit
    assert chunk_of(128, 227 << 10) == 128


@pytest.mark.parametrize("shared_limit", [99 << 10, 163 << 10, 227 << 10])
def test_tiles_fit_into_shared_memory_and_the_best_are_chosen(shared_limit: int) -> None:
    limit = shared_limit - cuda.STATIC_SHARED
    for n in (161, 300, 512, 1024, 1150, 2048, 20000):
        for count in (1, 3, 16):
            shape = large.shape_of(n, count, 132, limit)
            assert large.shared_bytes(shape) <= limit
            others = [other for other in large.SHAPES if large.shared_bytes(other) <= limit]
            assert all(large.clocks(shape, n, count, 132) <= large.clocks(other, n, count, 132) for other in others)
    assert large.shape_of(1024, 1, 132, limit) == (128, 64)


def test_why_not() -> None:
    assert "not on a GPU" in str(cuda.why_not(torch.device("cpu"), torch.float32))
    if not torch.cuda.is_available():
        assert cuda.why_not(torch.device("cuda", 0), torch.float32) is not None
    assert "float32" in str(cuda.why_not(torch.device("cuda", 0), torch.float64))
