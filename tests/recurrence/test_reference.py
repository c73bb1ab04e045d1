"""The reference backend against NumPy, against autograd, and in the corners of its domain."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ncgru.recurrence import recurrence, recurrence_with_gates
from tests.recurrence import numpy_truth
from tests.recurrence.cases import KINDS, Case, make_case

SHAPES = list(itertools.product((1, 2, 7), (0, 1, 3), (1, 2, 5, 16)))  # T, B, n
ORDERS = list(itertools.product((False, True), (False, True)))  # reverse, ragged


def gradients(case: Case, hidden: Tensor) -> tuple[Tensor, ...]:
    direction = torch.linspace(-1, 2, hidden.numel(), dtype=hidden.dtype).view_as(hidden)
    return torch.autograd.grad(hidden, case.differentiable, direction)


def numpy_states(case: Case) -> Tensor:
    arrays = [None if x is None else x.detach().double().numpy() for x in case.tensors]
    lengths = None if case.lengths is None else case.lengths.numpy()
    projected, initial, weight, threshold = arrays
    assert projected is not None
    assert initial is not None
    assert weight is not None
    return torch.from_numpy(
        numpy_truth.run(projected, initial, weight, threshold, lengths, case.reset, case.nonlinearity, case.reverse)
    )


@pytest.mark.parametrize(("reverse", "ragged"), ORDERS)
@pytest.mark.parametrize(("reset", "nonlinearity"), KINDS)
def test_states_equal_numpy_and_gradients_equal_autograd(
    reset: str, nonlinearity: str, reverse: bool, ragged: bool
) -> None:
    for seed, (steps, batch, size) in enumerate(SHAPES):
        case = make_case(
            reset, nonlinearity, reverse=reverse, ragged=ragged, steps=steps, batch=batch, size=size, seed=seed
        )
        hidden, plain = case.run(), case.unroll()
        assert hidden.shape == (steps, batch, size)
        assert_close(hidden, numpy_states(case), rtol=1e-12, atol=1e-12)
        assert_close(plain, hidden, rtol=1e-12, atol=1e-12)
        assert_close(gradients(case, hidden), gradients(case, plain), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("reset", ["before", "after", "none"])
def test_gradients_across_many_blocks(reset: str, reverse: bool) -> None:
    """The backward goes through time in blocks; 70 steps of 90 rows of 64 units are several, the last one not full."""
    case = make_case(reset, reverse=reverse, ragged=True, steps=70, batch=90, size=64)
    assert_close(gradients(case, case.run()), gradients(case, case.unroll()), rtol=1e-9, atol=1e-9)


def test_modrelu_at_zero_and_without_threshold() -> None:
    """sign(0) = 0, so a pre-activation of zero stays zero even under a positive threshold, and passes no gradient."""
    z = torch.tensor([[[-2.0, -0.5, 0.0, 0.5, 2.0]]], requires_grad=True)
    initial, weight = torch.zeros(1, 5), torch.zeros(5, 5)
    for value, expected in ((1.0, [-3.0, -1.5, 0.0, 1.5, 3.0]), (-1.0, [-1.0, 0.0, 0.0, 0.0, 1.0])):
        hidden = recurrence(z, initial, weight, torch.full((5,), value), reset="none")
        assert hidden.flatten().tolist() == expected
        (gradient,) = torch.autograd.grad(hidden.sum(), z)
        assert gradient.flatten().tolist() == [float(c != 0) for c in expected]
    assert_close(recurrence(z, initial, weight, reset="none"), z)


def test_reset_after_with_tanh_is_torch_gru() -> None:
    """nn.GRU's z is 1-u, and its gates come in the same order r, z, n; b_hn has no counterpart and is zero here."""
    torch.manual_seed(0)
    gru = torch.nn.GRU(4, 6, dtype=torch.float64)
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    weight_ih, weight_hh, bias, bias_hh = (gru.get_parameter(name) for name in names)
    torch.nn.init.zeros_(bias_hh)
    x, initial = torch.randn(9, 3, 4, dtype=torch.float64), torch.randn(1, 3, 6, dtype=torch.float64)
    signs = torch.ones(18, dtype=torch.float64)
    signs[6:12] = -1
    projected = (x @ weight_ih.t() + bias) * signs
    hidden = recurrence(projected, initial[0], weight_hh * signs[:, None], reset="after", nonlinearity="tanh")
    expected, _ = gru(x, initial)
    assert_close(hidden, expected, rtol=1e-12, atol=1e-12)
    parameters = (weight_ih, weight_hh, bias)
    assert_close(
        torch.autograd.grad(hidden.square().sum(), parameters),
        torch.autograd.grad(expected.square().sum(), parameters),
        rtol=1e-9,
        atol=1e-10,
    )


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("reset", ["before", "after", "none"])
def test_padding_is_never_read(reset: str, reverse: bool) -> None:
    case = make_case(reset, ragged=True, reverse=reverse, batch=6)
    assert case.lengths is not None
    padding = torch.arange(7)[:, None] >= case.lengths
    dirty = case.projected.detach().masked_fill(padding[..., None], torch.nan).requires_grad_()
    spoiled = replace(case, projected=dirty)
    assert_close(spoiled.run(), case.run(), rtol=0, atol=0)
    found = gradients(spoiled, spoiled.run())
    assert_close(found, gradients(case, case.run()), rtol=0, atol=0)
    assert found[0][padding].abs().sum() == 0


def test_a_ragged_batch_equals_its_rows_run_alone() -> None:
    for reset, reverse in itertools.product(("before", "after", "none"), (False, True)):
        case = make_case(reset, ragged=True, reverse=reverse, batch=5)
        assert case.lengths is not None
        hidden = case.run()
        for row, length in enumerate(case.lengths.tolist()):
            final = case.initial[row]
            if length:
                alone = recurrence(
                    case.projected[:length, [row]], case.initial[[row]], case.weight, case.threshold, **case.settings
                )
                assert_close(hidden[:length, [row]], alone)
                final = alone[0 if reverse else -1, 0]
            assert_close(hidden[0 if reverse else -1, row], final)


@pytest.mark.parametrize("reset", ["before", "after", "none"])
def test_reverse_is_the_flipped_sequence(reset: str) -> None:
    case = make_case(reset, reverse=True)
    flipped = replace(case, projected=case.projected.flip(0), reverse=False)
    assert_close(case.run(), flipped.run().flip(0), rtol=0, atol=0)


def test_gates_are_what_the_states_are_made_of() -> None:
    case = make_case(ragged=True)
    assert case.lengths is not None
    hidden, gates = recurrence_with_gates(*case.tensors, case.lengths)
    assert not gates.requires_grad
    _, u, c = gates.chunk(3, -1)
    previous = torch.cat([case.initial[None], hidden[:-1]])
    assert_close((1 - u) * previous + u * c, hidden)
    assert u[torch.arange(7)[:, None] >= case.lengths].abs().sum() == 0


@pytest.mark.parametrize(("reset", "nonlinearity"), KINDS)
def test_strides_do_not_matter(reset: str, nonlinearity: str) -> None:
    case = make_case(reset, nonlinearity)
    strided = [x.detach().mT.contiguous().mT if x.dim() > 1 else x.detach() for x in case.differentiable]
    strided[-1] = torch.stack([strided[-1], strided[-1]], -1)[..., 0]
    other = case.with_tensors(*[x.requires_grad_() for x in strided])
    assert not other.weight.is_contiguous()
    assert_close(other.run(), case.run())
    assert_close(gradients(other, other.run()), gradients(case, case.run()))
    (broadcast,) = torch.autograd.grad(case.run().sum(), case.projected)
    (dense,) = torch.autograd.grad(case.run(), case.projected, torch.ones_like(case.run()))
    assert_close(broadcast, dense)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reset", ["before", "after", "none"])
def test_sixteen_bits_round_operands_only(reset: str, dtype: torch.dtype) -> None:
    case = make_case(reset, "tanh", dtype=dtype, steps=40, size=16)
    hidden = case.run()
    assert hidden.dtype == torch.float32
    exact = case.with_tensors(*[x.detach().double().requires_grad_() for x in case.differentiable])
    unit = torch.finfo(dtype).eps
    error = (hidden.double() - exact.run()).abs().max().item()
    assert 0 < error < 4 * unit
    # A state that was itself rounded would lie on the 16-bit grid.
    assert (hidden != hidden.to(dtype).float()).float().mean() > 0.9
    found, expected = gradients(case, hidden), gradients(exact, exact.run())
    assert [x.dtype for x in found] == [dtype] * 3
    for gradient, truth in zip(found, expected, strict=True):
        assert (gradient.double() - truth).norm() < 4 * unit * truth.norm()


def test_sixteen_bits_with_float32_parameters() -> None:
    case = make_case("before", dtype=torch.float32)
    mixed = replace(case, projected=case.projected.detach().bfloat16().requires_grad_())
    found = gradients(mixed, mixed.run())
    assert [x.dtype for x in found] == [torch.bfloat16, torch.float32, torch.float32, torch.float32]


def test_long_sequences_stay_stable() -> None:
    """2,000 steps with an orthogonal candidate matrix: float32 follows float64, forwards and backwards."""
    generator = torch.Generator().manual_seed(0)
    size = 12
    blocks = torch.linalg.qr(torch.randn(3, size, size, generator=generator, dtype=torch.float64))[0]
    case = make_case(steps=2000, batch=2, size=size)
    weight = blocks.reshape(3 * size, size).requires_grad_()
    threshold = torch.full((size,), -0.02, dtype=torch.float64).requires_grad_()
    wide = replace(case, weight=weight, threshold=threshold, projected=(0.1 * case.projected).detach().requires_grad_())
    narrow = wide.with_tensors(*[x.detach().float().requires_grad_() for x in wide.differentiable])
    assert_close(narrow.run().double(), wide.run(), rtol=0, atol=1e-3)
    for found, truth in zip(gradients(narrow, narrow.run()), gradients(wide, wide.run()), strict=True):
        assert found.isfinite().all()
        assert (found.double() - truth).norm() < 1e-3 * truth.norm()


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Every torch.empty is full of NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("reverse", "ragged"), ORDERS)
@pytest.mark.parametrize(("reset", "nonlinearity"), KINDS)
def test_no_uninitialised_memory_is_used(reset: str, nonlinearity: str, reverse: bool, ragged: bool) -> None:
    case = make_case(reset, nonlinearity, reverse=reverse, ragged=ragged)
    clean = (case.run(), *gradients(case, case.run()))
    with poisoned_memory():
        assert torch.empty(3).isnan().all()
        dirty = (case.run(), *gradients(case, case.run()))
    assert_close(dirty, clean, rtol=0, atol=0)


def test_numpy_truth_by_hand() -> None:
    """One unit, one step, worked out on paper: r = u = 1/2 where all gates' inputs are zero."""
    hidden = numpy_truth.run(
        np.array([[[0.0, 0.0, 1.0]]]), np.array([[2.0]]), np.array([[0.0], [0.0], [3.0]]), np.array([-1.0]), None,
        "before", "modrelu", False,
    )  # fmt: skip
    assert hidden.item() == 0.5 * 2 + 0.5 * (1 + 3 * 0.5 * 2 - 1)
