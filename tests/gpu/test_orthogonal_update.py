"""The orthogonal update by kernels, against float64 and against the torch operations that specify it."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ncgru import ScaledCayley, orthogonal
from ncgru.orthogonal import METHODS, cuda, pack, packed_size, unpack
from ncgru.orthogonal.inverse import gradient_of, seal_of

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
SIZES = (2, 3, 7, 16, 31, 32, 33, 56, 96, 118, 127, 128, 129, 161, 192, 255, 256, 257, 430, 512,
         1000, 1024, 2048)  # fmt: skip
EPSILON = torch.finfo(torch.float32).eps


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)


def started(n: int, batch: int, method: str = "hyperpower", order: int = 2, reset_every: int | None = None) -> Any:
    """A module whose A has a norm of about 2, and that A."""
    module = ScaledCayley(n, (batch,), inverse=method, order=order, reset_every=reset_every, device=DEVICE)
    packed = normal(batch, packed_size(n)) / math.sqrt(n)
    with torch.no_grad():
        module(packed)
    return module, packed


def step(packed: Tensor, n: int, size: float, seed: int) -> Tensor:
    """A step δA whose norm is about `size`."""
    return size / (2 * math.sqrt(n)) * normal(*packed.shape, seed=seed)


def follow_by_torch(module: ScaledCayley, packed: Tensor) -> None:
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(cuda, "usable", lambda changing, others: False)
        module(packed)


def errors(module: ScaledCayley, packed: Tensor) -> tuple[float, float]:
    """How far the stored inverses and U's are from the true ones, at most."""
    n = module.size
    skew = unpack(packed.double(), n)
    identity = torch.eye(n, device=DEVICE, dtype=torch.float64)
    inverse = torch.linalg.inv(identity + skew)
    u = (2 * inverse - identity) * module.signs.double().unsqueeze(-2)
    return float((module.inverse - inverse).abs().max()), float((module.matrix - u).abs().max())


def assert_sealed(module: ScaledCayley) -> None:
    assert torch.equal(module.seal, seal_of(module.anchor, module.inverse, module.matrix, module.signs))


def same_state(first: ScaledCayley, second: ScaledCayley) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.buffers(), second.buffers(), strict=True))


def gradients(module: ScaledCayley, packed: Tensor, grad: Tensor) -> Tensor:
    vector = packed.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(module(vector), vector, grad)
    return gradient


def test_the_kernels_can_run_here() -> None:
    assert cuda.why_not(DEVICE, torch.float32) is None
    assert "float64" in str(cuda.why_not(DEVICE, torch.float64))


@pytest.mark.parametrize(
    ("method", "order"),
    [("hyperpower", 2), ("hyperpower", 1), ("hyperpower", 3), ("hyperpower", 5), ("neumann", 2), ("neumann", 1),
     ("neumann", 4), ("exact", 2)],
)  # fmt: skip
@pytest.mark.parametrize("n", SIZES)
def test_states_follow_as_specified(n: int, method: str, order: int) -> None:
    if n > 600 and (method, order) not in (("hyperpower", 2), ("neumann", 2), ("exact", 2)):
        pytest.skip("other orders of large matrices take the same products")
    batch = 1 + n % 3 if n > 300 else 1 + n % 6
    module = ScaledCayley(n, (batch,), inverse=method, order=order, reset_every=4, device=DEVICE)
    twin = copy.deepcopy(module)
    packed = torch.zeros(batch, packed_size(n), device=DEVICE)
    path = [2.0, 1e-4, 1e-4, 1e-4, 10 ** (-4 / (order + 1)), 0.0, 1e-4, 30.0, 1e-4]
    for number, size in enumerate(path):
        packed = packed + step(packed, n, size, number)
        if batch > 1 and number % 2:
            packed[0] = module.anchor[0]
        with torch.no_grad():
            u = module(packed)
        follow_by_torch(twin, packed)
        assert torch.equal(u, module.matrix)
        assert torch.equal(module.anchor, packed)
        assert_sealed(module)
        assert module.updates.tolist() == twin.updates.tolist(), number
        assert module.refreshes.tolist() == twin.refreshes.tolist(), number
        for ours, theirs in zip(errors(module, packed), errors(twin, packed), strict=True):
            assert ours <= 2 * theirs + 2 * EPSILON, (number, size, ours, theirs)


@pytest.mark.parametrize("n", SIZES)
def test_gradients_are_as_accurate_as_torch(n: int) -> None:
    batch = 1 + n % 6 if n < 600 else 1
    module, packed = started(n, batch)
    for grad in (normal(batch, n, n, seed=5), torch.ones((), device=DEVICE).expand(batch, n, n)):
        ours = gradients(module, packed, grad)
        truth = gradient_of(grad.double(), None, module.matrix.double(), module.inverse.double(), module.signs.double())
        theirs = gradient_of(grad, None, module.matrix, module.inverse, module.signs)
        assert truth is not None
        assert theirs is not None
        limit = 2 * float((theirs - truth).abs().max()) + EPSILON * float(truth.abs().max())
        assert float((ours - truth).abs().max()) <= limit


def test_one_row_needs_no_kernel() -> None:
    module = ScaledCayley(1, (2,), device=DEVICE)
    vector = torch.zeros(2, 0, device=DEVICE, requires_grad=True)
    module(vector).sum().backward()
    assert module.updates.tolist() == [0, 0]


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (40,)])
def test_batches_of_any_shape(shape: tuple[int, ...]) -> None:
    module = ScaledCayley(20, shape, device=DEVICE)
    packed = normal(*shape, packed_size(20)).requires_grad_()
    u = module(packed)
    assert u.shape == (*shape, 20, 20)
    (gradient,) = torch.autograd.grad(u.sum(), packed)
    assert gradient.shape == packed.shape
    assert max(errors(module, packed.detach())) < 1e-6


@pytest.mark.parametrize("buffer", ["anchor", "inverse", "matrix", "signs", "seal"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [20, 300])
def test_tampering_is_noticed_repaired_and_counted(n: int, method: str, buffer: str) -> None:
    module, packed = started(n, 3, method)
    before = copy.deepcopy(module)
    values = getattr(module, buffer)
    if buffer == "seal":
        values[1] += 1
    else:
        values[1].view(-1)[-1].neg_()
    with torch.no_grad():
        module(packed)
    assert (module.refreshes - before.refreshes).tolist() == [0, 1, 0]
    assert max(errors(module, packed)) < 2e-6
    assert_sealed(module)
    assert torch.equal(module.matrix[::2], before.matrix[::2])


@pytest.mark.parametrize("spoilt", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [5, 20, 128, 300])
def test_numbers_without_sense_stay_with_their_matrix_and_go_with_it(n: int, method: str, spoilt: float) -> None:
    module, packed = started(n, 2, method)
    bad = packed.clone()
    bad[0, 3] = spoilt
    with torch.no_grad():
        u = module(bad)
    if not math.isfinite(spoilt):
        assert u[0].isnan().any()
    assert torch.equal(u[1], module.matrix[1])
    assert not u[1].isnan().any()
    with torch.no_grad():
        module(packed)
    assert max(errors(module, packed)) < 2e-6
    assert_sealed(module)


@pytest.mark.parametrize("size", [1.0, 1e2, 1e4])
@pytest.mark.parametrize("n", [20, 56, 128, 300, 1024])
def test_a_huge_step_is_inverted_exactly(n: int, size: float) -> None:
    module, packed = started(n, 1)
    count = module.refreshes.item()
    packed = packed + step(packed, n, size, 3)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        module(packed)
    follow_by_torch(twin, packed)
    assert module.refreshes.item() == count + 1
    assert max(errors(module, packed)) <= 2 * max(errors(twin, packed)) + EPSILON


@pytest.mark.parametrize("n", [7, 56, 118, 128, 200, 300, 1024])
def test_twenty_runs_agree_in_every_bit(n: int) -> None:
    module, packed = started(n, 2)
    grad = normal(2, n, n, seed=9)
    results = []
    for _ in range(20):
        run = copy.deepcopy(module)
        outcome = []
        for number, size in enumerate((1e-3, 0.05, 1e-3, 10.0)):
            moved = packed + step(packed, n, size, number)
            outcome.append(gradients(run, moved, grad))
        results.append((run, outcome))
    first, expected = results[0]
    for run, outcome in results[1:]:
        assert same_state(run, first)
        assert all(torch.equal(a, b) for a, b in zip(outcome, expected, strict=True))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [30, 128, 192, 300])
def test_workspaces_may_hold_anything(n: int, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, packed = started(n, 2, method)
    twin = copy.deepcopy(module)
    grad = normal(2, n, n, seed=2)
    paths = [(packed + step(packed, n, size, 1)) for size in (1e-3, 0.05, 10.0)]
    clean = [gradients(module, moved, grad) for moved in paths]
    empty, empty_like, new_empty = torch.empty, torch.empty_like, Tensor.new_empty

    def poisoned(tensor: Tensor) -> Tensor:
        return tensor.fill_(math.nan if tensor.is_floating_point() else -123456789)

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poisoned(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poisoned(empty_like(*a, **k)))
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: poisoned(new_empty(*a, **k)))
    for moved, expected in zip(paths, clean, strict=True):
        assert torch.equal(gradients(twin, moved, grad), expected)
    assert same_state(module, twin)


@pytest.mark.parametrize("n", [56, 128, 300])
def test_a_captured_update_is_the_same_update(n: int) -> None:
    eager, packed = started(n, 2)
    captured = copy.deepcopy(eager)
    grad = normal(2, n, n, seed=4)

    def train(module: ScaledCayley, vector: Tensor, rate: Tensor) -> None:
        (gradient,) = torch.autograd.grad(module(vector), vector, grad)
        with torch.no_grad():
            vector.sub_(gradient.sign() * rate)

    rates = [1e-4, 1e-4, 0.0, 3e-3, 1.0, 1e-4]
    ours = packed.clone().requires_grad_()
    rate = torch.zeros((), device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        train(captured, ours, rate)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train(captured, ours, rate)
    theirs = packed.clone().requires_grad_()
    for value in rates:
        rate.fill_(value)
        graph.replay()
        train(eager, theirs, torch.tensor(value, device=DEVICE))
    assert torch.equal(ours, theirs)
    assert same_state(captured, eager)


@pytest.mark.parametrize("n", [56, 300])
def test_tf32_changes_no_bit(n: int) -> None:
    module, packed = started(n, 1)
    twin = copy.deepcopy(module)
    moved, grad = packed + step(packed, n, 1e-3, 1), normal(1, n, n, seed=3)
    plain = gradients(module, moved, grad)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert torch.equal(gradients(twin, moved, grad), plain)
    finally:
        torch.set_float32_matmul_precision(before)
    assert same_state(module, twin)


@pytest.mark.parametrize("n", [56, 300])
def test_other_streams_and_threads(n: int) -> None:
    module, packed = started(n, 1)
    twin = copy.deepcopy(module)
    moved, grad = packed + step(packed, n, 1e-3, 1), normal(1, n, n, seed=3)
    plain = gradients(module, moved, grad)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        other = gradients(twin, moved, grad)
    side.synchronize()
    assert torch.equal(plain, other)


@pytest.mark.parametrize("n", [192, 1024])
def test_updates_on_several_streams_at_once_leave_each_other_alone(n: int) -> None:
    """All launches for large matrices meet at one word in memory."""
    module, packed = started(n, 1)
    grad = normal(1, n, n, seed=3)
    path = [packed + step(packed, n, 1e-3, number) for number in range(20)]

    def train(follower: ScaledCayley) -> list[Tensor]:
        return [gradients(follower, moved, grad) for moved in path]

    twins = [copy.deepcopy(module) for _ in range(4)]
    expected = train(module)
    streams = [torch.cuda.Stream() for _ in twins]
    torch.cuda.synchronize()
    outcomes: list[list[Tensor]] = [[] for _ in twins]
    for moved in path:
        for twin, stream, outcome in zip(twins, streams, outcomes, strict=True):
            with torch.cuda.stream(stream):
                outcome.append(gradients(twin, moved, grad))
    torch.cuda.synchronize()
    for twin, outcome in zip(twins, outcomes, strict=True):
        assert same_state(twin, module)
        assert all(torch.equal(a, b) for a, b in zip(outcome, expected, strict=True))


class Layer(nn.Module):
    """Two uses of one orthogonal matrix in a forward pass."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.cayley = ScaledCayley(n, device=DEVICE)
        self.skew = nn.Parameter(normal(packed_size(n)) / math.sqrt(n))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(x @ self.cayley(self.skew)) @ self.cayley(self.skew))


def train(model: Any, layer: Layer) -> list[Tensor]:
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-3)
    outputs = []
    for number in range(6):
        optimizer.zero_grad()
        out = model(normal(4, layer.cayley.size, seed=number))
        outputs.append(out.detach())
        out.square().sum().backward()
        optimizer.step()
    return outputs


@pytest.mark.parametrize("n", [24, 300])
def test_compiled_and_checkpointed_and_autocast_modules_train_alike(n: int) -> None:
    layer = Layer(n)
    compiled, cast = copy.deepcopy(layer), copy.deepcopy(layer)
    plain = train(layer, layer)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        outputs = train(torch.compile(compiled, fullgraph=True, backend="aot_eager"), compiled)
    for ours, theirs in zip(outputs, plain, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert torch.equal(compiled.cayley.updates, layer.cayley.updates)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        train(cast, cast)
    assert cast.cayley.updates.item() == layer.cayley.updates.item()
    assert max(errors(cast.cayley, cast.cayley.anchor[None])) < 1e-6


def test_second_derivatives() -> None:
    module = ScaledCayley(5, (2,), device=DEVICE)
    vector = (0.3 * normal(2, 10)).requires_grad_()
    (first,) = torch.autograd.grad(module(vector).pow(3).sum(), vector, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), vector)

    def in_float64(packed: Tensor) -> Tensor:
        u: Tensor = copy.deepcopy(module).double()(packed)
        return u.pow(3).sum()

    wide = vector.detach().double().requires_grad_()
    (first_wide,) = torch.autograd.grad(in_float64(wide), wide, create_graph=True)
    (expected,) = torch.autograd.grad(first_wide.square().sum(), wide)
    assert torch.allclose(second.double(), expected, rtol=1e-4, atol=1e-3)


def test_a_long_training_stays_orthogonal_without_the_host() -> None:
    layer: Any = orthogonal(nn.Linear(118, 118, device=DEVICE))
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-3)
    steady = normal(118, 118, seed=1)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        for number in range(300):
            optimizer.zero_grad()
            (layer.weight * (steady + normal(118, 118, seed=2 + number))).sum().backward()
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    (module,) = layer.parametrizations.weight
    with torch.no_grad():
        assert max(errors(module, module.anchor[None])) < 1e-6
        u = layer.weight.double()
    assert torch.linalg.matrix_norm(u.mT @ u - torch.eye(118, device=DEVICE), 2) < 1e-6


def test_pack_and_the_kernels_agree_on_the_order() -> None:
    module, packed = started(6, 1)
    with torch.no_grad():
        module(packed)
    c = module.matrix[0].double() * module.signs[0].double()
    identity = torch.eye(6, device=DEVICE, dtype=torch.float64)
    skew = torch.linalg.solve(identity + c, identity - c)
    assert torch.allclose(pack(skew), packed[0].double(), atol=1e-5)
