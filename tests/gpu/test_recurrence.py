"""The recurrence by kernels, against float64 and against plain PyTorch in the same precision. Skips nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ncgru.recurrence import available_backends, recurrence, resolve_backend
from ncgru.recurrence.cuda.gpu import gpu
from ncgru.recurrence.cuda.kind import Kind, Limits
from tests.gpu import covering
from tests.gpu.covering import REGIMES, kind
from tests.gpu.helpers import DEVICE, Recorder, assert_same_but_for_rounding, leaf
from tests.recurrence.cases import KINDS, make_case
from tests.recurrence.cuda.proof import Case, Inputs, inputs, prove, prove_as_a_whole, run, scattered

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("hidden", covering.SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernels_are_what_runs_here(hidden: int, dtype: torch.dtype) -> None:
    assert available_backends()[0] == "cuda"
    for reset in covering.RESETS:
        assert resolve_backend("auto", device=DEVICE, dtype=dtype, hidden_size=hidden, reset=reset).name == "cuda"


@pytest.mark.parametrize(("number", "one"), list(enumerate(covering.kinds())), ids=str)
def test_errs_at_most_twice_as_much_as_pytorch(number: int, one: Kind) -> None:
    for case in covering.cases(number, one):
        prove(gpu(0), case, DEVICE)


# A single unit has too few numbers for a mean.
@pytest.mark.parametrize(
    "one", [one for one in covering.kinds() if one.nonlinearity == "tanh" and one.hidden > 1], ids=str
)
def test_errors_of_all_steps_together(one: Kind) -> None:
    prove_as_a_whole(gpu(0), Case(one, 100, 33, "both", lengths=True), DEVICE)


@pytest.mark.parametrize("case", covering.LONG, ids=str)
def test_long_sequences_err_at_most_twice_as_much_as_pytorch(case: Case) -> None:
    prove(gpu(0), case, DEVICE)


@pytest.mark.parametrize("storage", ["float32", "float16"])
@pytest.mark.parametrize(
    ("limits", "hidden", "batch", "why"),
    [
        (Limits(1, 232448), 128, 3, "two rows a block"),
        (Limits(16, 232448), 200, 70, "wide blocks, several tiles a group"),
        (Limits(4, 160000), 199, 300, "several slices a block, and part after part of the batch"),
        (Limits(9, 80000), 129, 40, "stacks of four tiles, the last of them not full"),
        (Limits(9, 64000), 129, 24, "stacks of three"),
        (Limits(84, 101376), 1024, 40, "matrices read from the L2 cache at each step"),
        (Limits(84, 101376), 2048, 20, "all of them"),
    ],
)
def test_designs_for_smaller_gpus(limits: Limits, hidden: int, batch: int, why: str, storage: str) -> None:
    """The programs that smaller GPUs get run on this one as well."""
    machine = Recorder(limits)
    prove(machine, Case(kind(hidden, storage, "before", "modrelu"), 5, batch, "both", lengths=True), DEVICE)
    assert machine.launched, why


def test_large_batches_take_other_kernels() -> None:
    names = []
    for hidden, batch in ((128, 1), (128, 257), (512, 1), (512, 257)):
        machine, case = Recorder(), Case(kind(hidden, "float32", "before", "modrelu"), 2, batch)
        run(machine, case, inputs(case, DEVICE))
        names.append({name for name, _ in machine.launched} - {"large_prepare"})
    assert names[0] == {"small_forward_1", "small_backward_1"}
    assert names[1] == {"small_forward_2", "small_backward_2"}
    assert names[2] == {"large_forward_narrow", "large_backward_narrow"}
    assert names[3] == {"large_forward_wide_2", "large_backward_wide_2"}


@pytest.mark.parametrize("one", REGIMES, ids=str)
def test_twenty_runs_agree_in_every_bit(one: Kind) -> None:
    """Also while another stream keeps the GPU busy, so that blocks start at other times in each run."""
    case = Case(one, 50, 33, "both", lengths=True)
    given = inputs(case, DEVICE)
    first, aside, work = run(gpu(0), case, given), torch.cuda.Stream(), torch.randn(2048, 2048, device=DEVICE)
    for number in range(20):
        if number % 2:
            with torch.cuda.stream(aside):
                torch.mm(work, work)
        for name, again in run(gpu(0), case, given).items():
            assert torch.equal(again, first[name]), (number, name)
    torch.cuda.synchronize()


@pytest.mark.parametrize("one", REGIMES, ids=str)
def test_tensors_may_lie_in_memory_in_any_way(one: Kind) -> None:
    case = Case(one, 5, 17, "both", lengths=True)
    given = inputs(case, DEVICE)
    everywhere: dict[str, Any] = {name: None if x is None else scattered(x) for name, x in vars(given).items()}
    found = run(gpu(0), case, Inputs(**everywhere))
    for name, expected in run(gpu(0), case, given).items():
        if name == "d_weight":  # torch's product takes another way where memory is aligned otherwise
            torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(found[name], expected), name


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("size", [40, 140])
@pytest.mark.parametrize(("reset", "nonlinearity"), KINDS)
def test_the_public_function_equals_the_reference(reset: str, nonlinearity: str, size: int, reverse: bool) -> None:
    """With gradients of all its inputs, which are views; and 16-bit parameters."""
    for dtype in (torch.float32, torch.bfloat16):
        case = make_case(reset, nonlinearity, reverse=reverse, ragged=True, size=size, dtype=dtype, batch=9)
        lengths = None if case.lengths is None else scattered(case.lengths.to(DEVICE))
        tensors = [leaf(x) for x in case.differentiable]
        results = {}
        for backend in ("cuda", "reference"):
            moved = case.with_tensors(*(scattered_view(x) for x in tensors))
            hidden = recurrence(*moved.tensors, lengths, **case.settings, backend=backend)
            gradients = torch.autograd.grad(hidden.square().sum(), tensors)
            assert [x.dtype for x in gradients] == [dtype] * len(gradients)
            results[backend] = [hidden, *gradients]
        near = 1e-4 if dtype == torch.float32 else 3e-2
        for ours, plain in zip(results["cuda"], results["reference"], strict=True):
            assert_same_but_for_rounding(ours, plain, near)


def scattered_view(x: Tensor) -> Tensor:
    """The same numbers with others between them, differentiably."""
    return torch.stack([x, -x], -1)[..., 0]


def test_gradients_may_be_expanded() -> None:
    case = make_case(size=140, dtype=torch.float32)
    tensors = [leaf(x) for x in case.differentiable]
    hidden = recurrence(*case.with_tensors(*tensors).tensors, backend="cuda")
    expanded = torch.autograd.grad(hidden, tensors, torch.ones((), device=DEVICE).expand_as(hidden), retain_graph=True)
    whole = torch.autograd.grad(hidden, tensors, torch.ones_like(hidden))
    for ours, expected in zip(expanded, whole, strict=True):
        assert torch.equal(ours, expected)
