"""That a layer as one step of autograd, its kernels emulated, computes what the reference backend does."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from ncgru.nn import base
from ncgru.nn.layer import run_layer
from ncgru.nn.sequence import SequenceModule
from ncgru.orthogonal import cuda, parametrization, reading
from ncgru.orthogonal.inverse import follow_inverse, gradient_of
from ncgru.recurrence import dispatch
from ncgru.recurrence.cuda import gpu, operator, product
from tests.nn.builders import SEQUENCES
from tests.recurrence.cuda.emulated import Emulated

STEPS, BATCH, INPUTS = 4, 3, 5


def _projected_dtype(module: SequenceModule, input: Tensor, dtype: torch.dtype) -> torch.dtype:
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else dtype


class FollowingBySpecification:
    """In the place of the kernels of the orthogonal update."""

    def follow(self, packed: Tensor, state: cuda.State, *settings: Any) -> tuple[Tensor, Tensor]:
        follow_inverse(packed.detach(), *state, *settings)
        return state.matrix.clone(), state.inverse.clone()

    def gradient(self, *tensors: Tensor) -> Tensor:
        gradient = gradient_of(tensors[0], None, *tensors[1:])
        assert gradient is not None
        return gradient


@contextmanager
def emulated_gpu() -> Iterator[mock.Mock]:
    """CPU tensors run by emulated kernels; yields a spy on the layers that take the short way."""
    with (
        mock.patch.object(parametrization, "usable", lambda packed, state: packed.dtype == torch.float32),
        mock.patch.object(cuda, "kernels", return_value=FollowingBySpecification()),
        mock.patch.object(reading, "following", nullcontext()),
        mock.patch.object(dispatch, "_why_not_cuda", return_value=None),
        mock.patch.object(dispatch, "_how_cuda", return_value=""),
        mock.patch.object(gpu, "machine_of", return_value=Emulated()),
        mock.patch.object(base.Recurrent, "_projected_dtype", _projected_dtype),
        mock.patch.object(base, "run_layer", wraps=run_layer) as spy,
    ):
        yield spy


def pair(name: str, hidden: int = 6, **settings: object) -> tuple[SequenceModule, SequenceModule]:
    """A module that runs on kernels, and one with the same parameters that runs on the reference backend."""
    torch.manual_seed(3)
    ours = SEQUENCES[name](INPUTS, hidden, **settings)
    theirs = copy.deepcopy(ours)
    ours.backend, theirs.backend = "cuda", "reference"
    return ours, theirs


def results(module: SequenceModule, x: Tensor, *states: Tensor, lengths: Tensor | None = None) -> list[Tensor]:
    """Output, final state, and the gradients of everything."""
    x = x.clone().requires_grad_()
    leaves = [state.clone().requires_grad_() for state in states]
    if lengths is None:
        output, final = module(x, *leaves)
    else:
        packed, final = module(pack_padded_sequence(x, lengths, enforce_sorted=False), *leaves)
        output = packed.data
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    loss = (output.float() * weights).sum() + final.float().square().sum()
    wanted = [x, *leaves, *module.parameters()]
    gradients = torch.autograd.grad(loss, wanted)
    assert [g.dtype for g in gradients] == [leaf.dtype for leaf in wanted]
    return [output, final, *gradients]


def assert_same(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for mine, its in zip(found, expected, strict=True):
        assert mine.dtype == its.dtype
        scale = max(1.0, float(its.detach().abs().max())) if its.numel() else 1.0
        torch.testing.assert_close(mine, its, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_equals_the_reference(name: str, bidirectional: bool) -> None:
    ours, theirs = pair(name, num_layers=2, bidirectional=bidirectional)
    x, h0 = torch.randn(STEPS, BATCH, INPUTS), torch.randn(4 if bidirectional else 2, BATCH, 6)
    with emulated_gpu() as spy:
        assert_same(results(ours, x, h0), results(theirs, x, h0), 1e-5)
        assert_same(results(ours, x), results(theirs, x), 1e-5)
    assert spy.call_count == 4


@pytest.mark.parametrize("name", SEQUENCES)
def test_packed_sequences_without_biases(name: str) -> None:
    ours, theirs = pair(name, bias=False, bidirectional=True)
    x, lengths = torch.randn(STEPS, BATCH, INPUTS), torch.tensor([2, 4, 1])
    with emulated_gpu() as spy:
        assert_same(results(ours, x, lengths=lengths), results(theirs, x, lengths=lengths), 1e-5)
    assert spy.called


@pytest.mark.parametrize("name", SEQUENCES)
def test_large_matrices(name: str) -> None:
    ours, theirs = pair(name, hidden=130)
    x = torch.randn(2, BATCH, INPUTS)
    with emulated_gpu() as spy:
        assert_same(results(ours, x), results(theirs, x), 1e-5)
    assert spy.called


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("least_side", [1, 6], ids=["all", "but for those of the input"])
def test_products_of_our_own(monkeypatch: pytest.MonkeyPatch, name: str, bidirectional: bool, least_side: int) -> None:
    monkeypatch.setattr(product, "LEAST_WORK", 0)
    monkeypatch.setattr(product, "LEAST_SIDE", least_side)
    ours, theirs = pair(name, bidirectional=bidirectional)
    x, h0 = torch.randn(3, 8, INPUTS), torch.randn(2 if bidirectional else 1, 8, 6)
    with emulated_gpu(), mock.patch.object(product, "products", wraps=product.products) as spy:
        assert_same(results(ours, x, h0), results(theirs, x, h0), 1e-5)
        assert_same(results(ours, x[:1]), results(theirs, x[:1]), 1e-5)
    assert spy.called
    monkeypatch.setattr(operator, "allows_tf32", lambda: True)
    with emulated_gpu(), mock.patch.object(product, "products") as never:
        results(ours, x)
    assert not never.called


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
def test_16_bits(name: str, how: str) -> None:
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    ours, theirs = pair(name, dtype=dtype)
    x = torch.randn(STEPS, BATCH, INPUTS, dtype=dtype)
    with emulated_gpu() as spy, torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        found, expected = results(ours, x), results(theirs, x)
    assert_same(found, expected, 3e-2)
    assert found[0].dtype == torch.bfloat16
    assert spy.called


@pytest.mark.parametrize("wanted", ["x", "weight_ih_l0", "bias_l0", "weight_hh_free_l0", "skew_l0"])
def test_one_gradient_alone(wanted: str) -> None:
    found = []
    for module in pair("ncgru"):
        x = torch.linspace(-1, 1, STEPS * BATCH * INPUTS).view(STEPS, BATCH, INPUTS)
        module.requires_grad_(False)
        leaf = x if wanted == "x" else module.get_parameter(wanted)
        leaf.requires_grad_()
        with emulated_gpu():
            found.append(torch.autograd.grad(module(x)[0].square().sum(), [leaf]))
    assert_same([found[0][0]], [found[1][0]], 1e-5)


def test_an_orthogonal_update_is_a_part_of_the_step() -> None:
    """Unless somebody wants to see the call of the module that makes it."""
    ours, theirs = pair("ncgru-r-c", bidirectional=True)
    x = torch.randn(STEPS, BATCH, INPUTS)
    for module in (ours, theirs):
        with torch.no_grad():
            next(iter(module.skew_parameters())).add_(0.01)
    with emulated_gpu() as spy:
        assert_same(results(ours, x), results(theirs, x), 1e-5)
        assert spy.call_args.args[5] is not None
        seen: list[str] = []
        ours.cayley_l0.register_forward_hook(lambda *call: seen.append("called"))
        assert_same(results(ours, x), results(theirs, x), 1e-5)
        assert spy.call_args.args[5] is None
    assert seen == ["called"]
    assert ours.cayley_l0.updates.tolist() == theirs.cayley_l0.updates.tolist() == [1] * 4


def test_only_the_final_state_has_a_gradient() -> None:
    found = []
    for module in pair("ncgru", bidirectional=True):
        with emulated_gpu():
            final = module(torch.ones(STEPS, BATCH, INPUTS))[1]
            found.append(torch.autograd.grad(final.square().sum(), list(module.parameters())))
    assert_same(list(found[0]), list(found[1]), 1e-5)


def test_no_rows() -> None:
    ours, theirs = pair("ncgru", bidirectional=True)
    x = torch.randn(STEPS, 0, INPUTS)
    with emulated_gpu():
        assert_same(results(ours, x), results(theirs, x), 0.0)


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("on", ["kernels", "reference"])
def test_recomputing_finds_the_same_gradients(name: str, on: str) -> None:
    ours, theirs = pair(name, bidirectional=True)
    ours.recompute = True
    ours.backend = "cuda" if on == "kernels" else "reference"
    x, h0 = torch.randn(STEPS, BATCH, INPUTS), torch.randn(2, BATCH, 6)
    lengths = torch.tensor([2, 4, 1])
    with emulated_gpu():
        assert_same(results(ours, x, h0), results(theirs, x, h0), 1e-5)
        assert_same(results(ours, x, lengths=lengths), results(theirs, x, lengths=lengths), 1e-5)


@pytest.mark.parametrize("hidden", [6, 130])
@pytest.mark.parametrize("on", ["kernels", "reference"])
def test_recomputing_keeps_no_gates(hidden: int, on: str) -> None:
    kept = {}
    for recompute in (False, True):
        module, _ = pair("ncgru", hidden, recompute=recompute)
        module.backend = "cuda" if on == "kernels" else "reference"
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with emulated_gpu(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            module(torch.randn(STEPS, 64, INPUTS))
        kept[recompute] = sum(size for size in sizes.values() if size >= 4 * STEPS * 64 * INPUTS)
    assert kept[False] - kept[True] >= 4 * STEPS * 64 * 3 * hidden


def test_checkpointing() -> None:
    ours, _ = pair("ncgru")
    x = torch.randn(STEPS, BATCH, INPUTS, requires_grad=True)
    with emulated_gpu():
        plain = torch.autograd.grad(ours(x)[0].sum(), [x, *ours.parameters()])
        again = torch.autograd.grad(checkpoint(ours, x, use_reentrant=False)[0].sum(), [x, *ours.parameters()])
    assert_same(list(plain), list(again), 0.0)


def test_refuses_second_derivatives() -> None:
    ours, _ = pair("ncgru")
    x = torch.randn(STEPS, BATCH, INPUTS, requires_grad=True)
    with emulated_gpu():
        (first,) = torch.autograd.grad(ours(x)[0].square().sum(), [x], create_graph=True)
        with pytest.raises(RuntimeError, match="backend='reference'"):
            first.sum().backward()


# torch's own forward mode uses torch.jit, which torch deprecates.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_refuses_forward_mode() -> None:
    ours, _ = pair("ncgru")
    with emulated_gpu(), forward_ad.dual_level():
        x = forward_ad.make_dual(torch.randn(STEPS, BATCH, INPUTS), torch.ones(STEPS, BATCH, INPUTS))
        with pytest.raises(NotImplementedError, match="forward-mode derivatives"):
            ours(x)


def test_notices_that_an_output_was_changed() -> None:
    ours, _ = pair("ncgru")
    with emulated_gpu():
        output = ours(torch.randn(STEPS, BATCH, INPUTS))[0]
        loss = output.sum()
        output.detach().zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("on", ["kernels", "reference"])
def test_recomputing_sees_substituted_parameters(on: str) -> None:
    module, _ = pair("ncgru")
    module.backend = "cuda" if on == "kernels" else "reference"
    other = {name: (value.detach() * 1.3 + 0.1).requires_grad_() for name, value in module.named_parameters()}
    x, found = torch.randn(STEPS, BATCH, INPUTS), []
    for module.recompute in (False, True):
        with emulated_gpu():
            output = torch.func.functional_call(module, other, (x,))[0]
            found.append(torch.autograd.grad(output.square().sum(), list(other.values())))
    assert_same(list(found[0]), list(found[1]), 1e-5)


@pytest.mark.parametrize("on", ["kernels", "reference"])
@pytest.mark.parametrize("changed", ["input", "weight_ih_l0", "weight_hh_free_l0"])
def test_recomputing_notices_a_change(on: str, changed: str) -> None:
    module, _ = pair("ncgru", recompute=True)
    module.backend = "cuda" if on == "kernels" else "reference"
    x = torch.randn(STEPS, BATCH, INPUTS)
    with emulated_gpu():
        loss = module(x)[0].sum()
        with torch.no_grad():
            (x if changed == "input" else module.get_parameter(changed)).add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("name", ["ncgru", "cho-gru", "goru"])
def test_recomputing_in_16_bits_finds_the_same_gates(name: str) -> None:
    ours, theirs = pair(name, hidden=32)
    theirs.recompute, theirs.backend = True, "cuda"
    x = torch.randn(STEPS, 16, INPUTS)
    with emulated_gpu(), torch.autocast("cpu", torch.bfloat16):
        for kept, again in zip(results(ours, x), results(theirs, x), strict=True):
            assert float((kept - again).detach().norm()) <= 1e-3 * float(kept.detach().norm())


def test_frozen_matrices_get_no_gradient_of_unwritten_memory() -> None:
    ours, _ = pair("ncgru")
    for name, parameter in ours.named_parameters():
        parameter.requires_grad_(not name.startswith(("skew", "weight_hh_free")))
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        with emulated_gpu(), torch.autograd.set_detect_anomaly(True):
            ours(torch.randn(STEPS, BATCH, INPUTS))[0].sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)


def test_refuses_batched_gradients() -> None:
    ours, _ = pair("ncgru")
    x = torch.randn(STEPS, BATCH, INPUTS, requires_grad=True)
    with emulated_gpu():
        output = ours(x)[0]
        with pytest.raises(RuntimeError, match="backend='reference'"):
            torch.autograd.grad(output, [x], torch.randn(2, *output.shape), is_grads_batched=True)
