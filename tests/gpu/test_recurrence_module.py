"""Recurrent modules on the kernels, as people use them: autograd, autocast, compilation, graphs, streams, memory."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from ncgru import GORU, NCGRU, ScoRNN
from tests.gpu.helpers import DEVICE, assert_same_but_for_rounding, leaf
from tests.nn.builders import SEQUENCES
from tests.recurrence.cases import KINDS, make_case
from tests.recurrence.cuda.proof import assert_norms_close

pytestmark = pytest.mark.gpu

SIZES = (56, 140)
INPUT = 12


def build(name: str, hidden: int, **settings: Any) -> Any:
    """A module with biases, so that nothing is zero."""
    torch.manual_seed(1)
    module = SEQUENCES[name](INPUT, hidden, backend="cuda", device=DEVICE, **settings)
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if key.startswith("bias"):
                parameter.normal_(std=0.1)
    return module


def by(backend: str, module: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A copy of the module on another backend."""
    other = copy.deepcopy(module).to(dtype)
    other.backend = backend
    return other


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)


def data_of(output: Tensor | PackedSequence) -> Tensor:
    return output.data if isinstance(output, PackedSequence) else output


def uneven(like: Tensor) -> Tensor:
    """Numbers for every place, drawn without a generator, which a graph could not capture."""
    return torch.arange(like.numel(), device=like.device).cos().view(like.shape)


Call = Callable[[Any, Tensor, Tensor], tuple[Any, Tensor]]


def results(module: Any, call: Call, x: Tensor, hx: Tensor) -> dict[str, Tensor]:
    """Output, final states, and all gradients of a fixed function of both."""
    dtype = next(module.parameters()).dtype
    leaves = {"x": leaf(x.to(dtype)), "hx": leaf(hx.to(dtype)), **dict(module.named_parameters())}
    output, final = call(module, leaves["x"], leaves["hx"])
    output = data_of(output)
    loss = (output.float() * uneven(output)).sum() + (final.float() * uneven(final)).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {"output": output.detach(), "final": final.detach(), **dict(zip(leaves, gradients, strict=True))}


def assert_as_good_as_plain(module: Any, call: Call, x: Tensor, hx: Tensor, plain: Call | None = None) -> None:
    """A number on the other side of modReLU's jump, in ours or in the usual, outweighs all roundings, so that with
    modReLU the bar is twice as wide and one input of three may fail; elsewhere none may."""
    jumps = module.nonlinearity == "modrelu"
    found = [_worse_than_plain(module, call, each, hx, plain) for each in ((x, -x, x.flip(-1)) if jumps else (x,))]
    failures = [text for text in found if text is not None]
    assert len(failures) <= jumps, "\n".join(failures)


def _worse_than_plain(module: Any, call: Call, x: Tensor, hx: Tensor, plain: Call | None) -> str | None:
    ours = results(module, call, x, hx)
    exact = results(by("reference", module, torch.float64), plain or call, x, hx)
    usual = results(by("reference", module), call, x, hx)
    slack = 2.0 if module.nonlinearity == "modrelu" else 1.0
    try:
        for name, truth in exact.items():
            assert_norms_close(name, ours[name].double(), truth, usual[name].double(), slack)
    except AssertionError as error:
        return str(error)
    return None


def simply(module: Any, x: Tensor, hx: Tensor) -> tuple[Any, Tensor]:
    return module(x, hx)  # type: ignore[no-any-return]


def packed(module: Any, x: Tensor, hx: Tensor) -> tuple[Any, Tensor]:
    lengths = [3, 20, 1, 7, 20, 11, 2, 5, 19]
    return module(pack_padded_sequence(x, lengths, enforce_sorted=False), hx)  # type: ignore[no-any-return]


def batch_first(module: Any, x: Tensor, hx: Tensor) -> tuple[Any, Tensor]:
    return module(x.transpose(0, 1), hx)  # type: ignore[no-any-return]


@pytest.mark.parametrize("hidden", SIZES)
@pytest.mark.parametrize("name", SEQUENCES)
def test_modules_err_at_most_twice_as_much_as_plain(name: str, hidden: int) -> None:
    x, hx = normal(20, 9, INPUT), normal(4, 9, hidden)
    deep = build(name, hidden, num_layers=2, bidirectional=True)
    assert_as_good_as_plain(deep, simply, x, hx)
    assert_as_good_as_plain(deep, packed, x, hx)
    assert_as_good_as_plain(build(name, hidden, batch_first=True), batch_first, x, hx[:1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", SIZES)
@pytest.mark.parametrize("name", ["cho-gru", "scornn-tanh", "goru-tanh"])
def test_autocast(name: str, hidden: int, dtype: torch.dtype) -> None:
    def cast(module: Any, x: Tensor, hx: Tensor) -> tuple[Any, Tensor]:
        with torch.autocast("cuda", dtype=dtype):
            output, final = module(x, hx)
        assert output.dtype == dtype
        return output, final

    module = build(name, hidden, num_layers=2, bidirectional=True)
    assert_as_good_as_plain(module, cast, normal(20, 9, INPUT), normal(4, 9, hidden), plain=simply)


@pytest.mark.parametrize("hidden", SIZES)
def test_leaving_hx_out_means_zeros(hidden: int) -> None:
    module, x = build("ncgru", hidden), normal(20, 9, INPUT)
    assert torch.equal(module(x)[0], module(x, x.new_zeros(1, 9, hidden))[0])


@pytest.mark.parametrize("name", ["ncgru", "scornn", "goru"])
def test_empty_batches(name: str) -> None:
    module = build(name, 140, bidirectional=True)
    found = results(module, simply, normal(5, 0, INPUT), normal(2, 0, 140))
    assert found["output"].shape == (5, 0, 280)
    assert all(not found[key].any() for key, _ in module.named_parameters())


# Compilers and graphs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", SIZES)
@pytest.mark.parametrize(("name", "backend"), [("ncgru", "inductor"), ("goru", "aot_eager"), ("scornn", "aot_eager")])
def test_compiled_modules_compute_the_same(name: str, backend: str, hidden: int) -> None:
    torch.compiler.reset()
    module, x, hx = build(name, hidden, bidirectional=True), normal(20, 9, INPUT), normal(2, 9, hidden)
    expected = results(copy.deepcopy(module), simply, x, hx)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler's own making
        compiled: Any = torch.compile(module, fullgraph=True, backend=backend)
        found = results(module, lambda _, x, hx: compiled(x, hx), x, hx)
    for key, value in expected.items():
        assert_same_but_for_rounding(found[key], value)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # the same leaves with and without a graph
@pytest.mark.parametrize("hidden", SIZES)
@pytest.mark.parametrize("name", ["ncgru", "scornn", "goru"])
def test_a_captured_training_step_is_the_same_step(name: str, hidden: int) -> None:
    module = build(name, hidden, bidirectional=True)
    x, hx = normal(20, 9, INPUT), normal(2, 9, hidden)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results(module, simply, x, hx)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(module, simply, x, hx)
    for seed in (5, 6):
        x.copy_(normal(20, 9, INPUT, seed=seed))
        graph.replay()
        for key, value in results(module, simply, x, hx).items():
            assert_same_but_for_rounding(captured[key], value)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("hidden", SIZES)
def test_graphed_callables_train_alike(hidden: int) -> None:
    x = normal(20, 9, INPUT)
    losses = []
    for graphed in (False, True):
        module = build("ncgru", hidden)
        run: Any = torch.cuda.make_graphed_callables(module, (x.clone().requires_grad_(),)) if graphed else module
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        found = []
        for seed in range(6):
            optimizer.zero_grad()
            loss = run(normal(20, 9, INPUT, seed=seed).requires_grad_())[0].square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        losses.append(torch.stack(found))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [40, 140])
@pytest.mark.parametrize(("reset", "nonlinearity"), KINDS)
def test_opcheck(reset: str, nonlinearity: str, size: int) -> None:
    for ragged, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        case = make_case(reset, nonlinearity, ragged=ragged, dtype=dtype, steps=3, size=size)
        projected = leaf(case.projected)
        weights = [None if x is None else leaf(x[None]) for x in case.tensors[1:]]
        rest = [*weights, None if case.lengths is None else case.lengths.to(DEVICE)]
        settings = (reset, nonlinearity, False)
        torch.library.opcheck(torch.ops.ncgru.recurrence_cuda.default, (projected, *rest, *settings))
        with torch.no_grad():
            hidden, gates = torch.ops.ncgru.recurrence_cuda(projected, *rest, *settings)
        inputs = [torch.ones_like(hidden), *rest, hidden, gates]
        detached = [x if x is None else x.detach() for x in inputs]
        torch.library.opcheck(torch.ops.ncgru.recurrence_cuda_backward.default, (*detached, *settings))


# Streams, memory, limits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", SIZES)
def test_another_stream_computes_the_same(hidden: int) -> None:
    module, x, hx = build("ncgru", hidden), normal(200, 9, INPUT), normal(1, 9, hidden)
    expected = results(module, simply, x, hx)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        found = results(module, simply, x, hx)
    torch.cuda.current_stream().wait_stream(side)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def kept_bytes(module: nn.Module, x: Tensor) -> int:
    """Memory that a forward pass in training leaves allocated."""
    module(x)  # whatever is made once
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    output = module(x)
    after = torch.cuda.memory_allocated()
    del output
    return after - before


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("steps", "batch", "hidden"), [(200, 16, 56), (220, 128, 118), (400, 64, 256), (100, 32, 1000)]
)
def test_a_forward_pass_keeps_no_more_than_that_of_nn_gru(
    steps: int, batch: int, hidden: int, dtype: torch.dtype, bidirectional: bool
) -> None:
    x = normal(steps, batch, hidden).to(dtype).requires_grad_()
    settings: Any = {"bidirectional": bidirectional, "device": DEVICE, "dtype": dtype}
    ours = kept_bytes(NCGRU(hidden, hidden, backend="cuda", **settings), x)
    theirs = kept_bytes(nn.GRU(hidden, hidden, **settings), x)
    matrices = 2 * 4 * hidden * hidden * (1 + bidirectional)  # U and its inverse; no activations, and nn.GRU has none
    print(f"{ours / 2**20:.1f} MiB, {matrices / 2**20:.1f} of them matrices, nn.GRU {theirs / 2**20:.1f} MiB")
    assert ours - matrices <= theirs


@pytest.mark.parametrize("hidden", SIZES)
def test_out_of_memory_is_torchs_error_and_passes(hidden: int) -> None:
    """The states of all steps take a half, a fifth and an eighth of the room: too much for the projection, for the
    gates, and for the gradients."""
    room = 2**28
    module, x, hx = build("ncgru", hidden), normal(20, 9, INPUT), normal(1, 9, hidden)
    expected = results(module, simply, x, hx)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
    try:
        for share in (2, 5, 8):
            batch = room // (share * 200 * 4 * hidden)
            long = torch.zeros(1, 1, INPUT, device=DEVICE).expand(200, batch, INPUT)
            with pytest.raises(torch.OutOfMemoryError):
                module(long)[0].sum().backward()
            gc.collect()  # the error's frames
            for key, value in results(module, simply, x, hx).items():
                assert torch.equal(value, expected[key]), key
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("module", [NCGRU, ScoRNN, GORU])
def test_second_derivatives_are_refused(module: Any) -> None:
    x = leaf(normal(5, 3, INPUT))
    output, _ = module(INPUT, 56, backend="cuda", device=DEVICE)(x)
    (first,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"cannot be differentiated again; build the module .*backend='reference'"):
        first.square().sum().backward()
