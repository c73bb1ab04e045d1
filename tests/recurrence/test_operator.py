"""The operators: autograd of higher order, compilation, export, autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ncgru.recurrence import recurrence, unrolled
from tests.recurrence.cases import KINDS, Case, make_case


def away_from_kinks(reset: str, nonlinearity: str, *, reverse: bool, ragged: bool) -> Case:
    """A small case whose candidates' pre-activations keep clear of the corners of modReLU and relu."""
    for seed in range(200):
        case = make_case(reset, nonlinearity, reverse=reverse, ragged=ragged, steps=3, batch=2, size=2, seed=seed)
        if nonlinearity == "tanh" or _distance_to_kink(case) > 0.02:
            return case
    raise AssertionError("no seed keeps clear of the kinks")


def _distance_to_kink(case: Case) -> float:
    """The smallest shift of the candidate's input that changes which units are active, from a scan of shifts."""
    size = case.initial.shape[1]
    reference = _pattern(case)
    for shift in torch.linspace(-0.05, 0.05, 41).tolist():
        moved = case.projected.detach().clone()
        moved[..., -size:] += shift
        other = case.with_tensors(moved, *case.differentiable[1:])
        if not torch.equal(_pattern(other), reference):
            return 0.0
    return 0.05


def _pattern(case: Case) -> Tensor:
    gates: Tensor = torch.ops.ncgru.recurrence(*case.positional)[1]
    return gates[..., -case.initial.shape[1] :].sign()


@pytest.mark.parametrize(("reverse", "ragged"), [(False, False), (True, True)])
@pytest.mark.parametrize(("reset", "nonlinearity"), KINDS)
def test_gradcheck_and_gradgradcheck(reset: str, nonlinearity: str, reverse: bool, ragged: bool) -> None:
    case = away_from_kinks(reset, nonlinearity, reverse=reverse, ragged=ragged)

    def run(*tensors: Tensor) -> Tensor:
        return case.with_tensors(*tensors).run()

    assert torch.autograd.gradcheck(run, case.differentiable)
    assert torch.autograd.gradgradcheck(run, case.differentiable, fast_mode=True)


def test_higher_orders_where_inputs_depend_on_each_other() -> None:
    """Orders two and three equal autograd's of the plain loop, also where weight and input come from one tensor."""
    case = make_case("before", "tanh", steps=3, size=3)
    x = torch.linspace(-1, 1, 9, dtype=torch.float64, requires_grad=True)

    def derivatives(function: Any) -> list[Tensor]:
        projected, weight = case.projected.detach() * x.square(), case.weight.detach() * x[:, None]
        value = function(projected, weight).square().sum()
        found = []
        for _ in range(3):
            (gradient,) = torch.autograd.grad(value, x, create_graph=True)
            found.append(gradient)
            value = gradient.square().sum()
        return found

    initial = case.initial.detach()
    ours = derivatives(lambda p, w: recurrence(p, initial, w, nonlinearity="tanh"))
    plain = derivatives(lambda p, w: unrolled(p, initial, w, None, None, "before", "tanh", False))
    assert_close(ours, plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("reset", "nonlinearity"), KINDS)
def test_opcheck(reset: str, nonlinearity: str) -> None:
    for ragged, dtype in ((False, torch.float32), (True, torch.float64), (True, torch.bfloat16)):
        case = make_case(reset, nonlinearity, ragged=ragged, dtype=dtype, steps=3, size=2)
        torch.library.opcheck(torch.ops.ncgru.recurrence.default, case.positional)
        hidden, gates = (x.detach() for x in torch.ops.ncgru.recurrence(*case.positional))
        inputs = (torch.ones_like(hidden), *case.positional[:5], hidden, gates, *case.positional[5:])
        detached = tuple(x.detach() if isinstance(x, Tensor) else x for x in inputs)
        torch.library.opcheck(torch.ops.ncgru.recurrence_backward.default, detached)


def layer(case: Case) -> Any:
    """A function around the operation with work before and behind it."""

    def run(projected: Tensor, initial: Tensor, weight: Tensor, threshold: Tensor | None) -> Tensor:
        hidden = recurrence(projected * 2, initial, weight, threshold, case.lengths, **case.settings)
        return torch.tanh(hidden)

    return run


# Inductor's own imports use torch.jit, which torch deprecates.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("reset", ["before", "none"])
def test_compile_fullgraph(reset: str, backend: str) -> None:
    torch.compiler.reset()
    case = make_case(reset, ragged=True, dtype=torch.float32)
    run = layer(case)
    compiled: Any = torch.compile(run, fullgraph=True, backend=backend)
    expected, found = run(*case.tensors), compiled(*case.tensors)
    assert_close(found, expected)
    assert_close(
        torch.autograd.grad(found.sum(), case.differentiable), torch.autograd.grad(expected.sum(), case.differentiable)
    )


def test_export_with_a_free_batch() -> None:
    class Module(torch.nn.Module):
        def forward(self, projected: Tensor, initial: Tensor, weight: Tensor, threshold: Tensor) -> Tensor:
            return recurrence(projected, initial, weight, threshold)

    case = make_case(dtype=torch.float32)
    batch = torch.export.Dim("batch", min=1)
    inputs = tuple(x.detach() for x in case.differentiable)
    program = torch.export.export(Module(), inputs, dynamic_shapes=({1: batch}, {0: batch}, None, None))
    other = make_case(dtype=torch.float32, batch=11)
    assert_close(program.module()(*[x.detach() for x in other.differentiable]), other.run())


@pytest.mark.parametrize("reset", ["before", "after", "none"])
def test_autocast_rounds_the_projected_input_only(reset: str) -> None:
    case = make_case(reset, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = case.run()
        found = torch.autograd.grad(hidden.sum(), case.differentiable, retain_graph=True)
    outside = torch.autograd.grad(hidden.sum(), case.differentiable)
    rounded = case.with_tensors(case.projected.bfloat16(), *case.differentiable[1:])
    assert hidden.dtype == torch.float32
    assert_close(hidden, rounded.run(), rtol=0, atol=0)
    assert_close(found, outside, rtol=0, atol=0)
    assert_close(found, torch.autograd.grad(rounded.run().sum(), case.differentiable), rtol=0, atol=0)
    assert [x.dtype for x in found] == [torch.float32] * len(found)


def test_autocast_leaves_float64_alone() -> None:
    case = make_case()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(case.run(), make_case().run(), rtol=0, atol=0)
        assert case.run().dtype == torch.float64


def test_second_order_under_autocast_stays_accurate() -> None:
    case = make_case("before", "tanh", dtype=torch.float32)

    def curvature() -> Tensor:
        (gradient,) = torch.autograd.grad(case.run().sum(), case.projected, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), case.weight)[0]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = curvature()
    exact = curvature()
    assert rounded.dtype == torch.float32
    assert (rounded - exact).norm() < 0.05 * exact.norm()


def test_only_some_inputs_need_gradients() -> None:
    case = make_case(dtype=torch.float32)
    weight = case.weight
    frozen = case.with_tensors(*[x if x is weight else x.detach() for x in case.differentiable])
    (alone,) = torch.autograd.grad(frozen.run().sum(), weight)
    assert_close(alone, torch.autograd.grad(case.run().sum(), weight)[0], rtol=0, atol=0)
    with torch.no_grad():
        assert not case.run().requires_grad
