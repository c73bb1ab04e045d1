"""Bad arguments: an error that names the argument, the rule and the value, and nothing changed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from ncgru import GORU, NCGRU, BackendUnavailableError, ModReLU, NCGRUCell, ScaledCayley, ScoRNN

CONSTRUCTORS: list[tuple[type[nn.Module], dict[str, Any], type[Exception], str]] = [
    (NCGRU, {"hidden_size": 0}, ValueError, "hidden_size must be at least 1, got 0"),
    (NCGRU, {"input_size": -1}, ValueError, "input_size must be at least 1, got -1"),
    (NCGRU, {"input_size": 2.5}, TypeError, "input_size must be an int, got float 2.5"),
    (NCGRU, {"num_layers": 0}, ValueError, "num_layers must be at least 1, got 0"),
    (NCGRU, {"num_layers": True}, TypeError, "num_layers must be an int, got bool True"),
    (NCGRU, {"bias": 3}, TypeError, "bias must be True or False, got int 3"),
    (NCGRU, {"dropout": 1.5}, ValueError, "dropout must be from 0 to 1, got 1.5"),
    (NCGRU, {"orthogonal": "x"}, ValueError, "orthogonal must be letters out of 'ruc', each at most once, got 'x'"),
    (NCGRU, {"orthogonal": "cc"}, ValueError, "orthogonal must be letters out of 'ruc', each at most once, got 'cc'"),
    (NCGRU, {"orthogonal": None}, TypeError, "orthogonal must be a str of letters"),
    (NCGRU, {"nonlinearity": "tahn"}, ValueError, "did you mean 'tanh'?"),
    (NCGRU, {"negatives": 6}, ValueError, "negatives must be between 0 and hidden_size=5, got 6"),
    (NCGRU, {"negatives": -1}, ValueError, "negatives must be between 0 and hidden_size=5, got -1"),
    (NCGRU, {"negatives": 2.0}, TypeError, "negatives must be an int or a sequence of ints, got 2.0"),
    (NCGRU, {"negatives": [1, 2]}, ValueError, "negatives must be one int, or one for each of the letters 'c'"),
    (NCGRU, {"inverse": "newton"}, ValueError, "inverse must be one of"),
    (NCGRU, {"order": 0}, ValueError, "order must be at least 1, got 0"),
    (NCGRU, {"reset_every": 0}, ValueError, "reset_every must be at least 1, got 0"),
    (NCGRU, {"orthogonal": "", "inverse": "exakt"}, ValueError, "did you mean 'exact'?"),
    (NCGRU, {"orthogonal": "", "order": 0}, ValueError, "order must be at least 1, got 0"),
    (NCGRU, {"orthogonal": "", "reset_every": -1}, ValueError, "reset_every must be at least 1, got -1"),
    (NCGRU, {"device": "nonsense"}, ValueError, "device must be a torch.device or its name, got 'nonsense'"),
    (NCGRU, {"backend": "cude"}, ValueError, "did you mean 'cuda'?"),
    (NCGRU, {"backend": "cuda"}, BackendUnavailableError, "finds no CUDA device"),
    (NCGRU, {"dtype": torch.int64}, TypeError, "dtype must be a floating-point torch.dtype, got torch.int64"),
    (ScoRNN, {"negatives": 6}, ValueError, "negatives must be between 0 and hidden_size=5, got 6"),
    (GORU, {"capacity": 0}, ValueError, "capacity must be at least 1, got 0"),
    (GORU, {"style": "fft"}, ValueError, "hidden_size must be a power of 2, at least 2, for style='fft', got 5"),
    (GORU, {"style": "fft", "hidden_size": 8, "capacity": 4}, ValueError, r"capacity must be log2\(hidden_size\)=3"),
]


@pytest.mark.parametrize(("cls", "wrong", "error", "message"), CONSTRUCTORS)
def test_constructors(cls: type[nn.Module], wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cls(**{"input_size": 3, "hidden_size": 5, **wrong})


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (("no tensor",), TypeError, "input must be a torch.Tensor, got str"),
        ((torch.zeros(3),), ValueError, r"input must be \[T, B, input_size\] or unbatched"),
        ((torch.zeros(2, 2, 2, 3),), ValueError, r"got shape \(2, 2, 2, 3\)"),
        ((torch.zeros(4, 2, 4),), ValueError, "input must have input_size=3 as its last dimension"),
        ((torch.zeros(0, 2, 3),), ValueError, "at least one time step, got T=0"),
        ((torch.zeros(0, 3),), ValueError, "at least one time step, got T=0"),
        ((torch.zeros(4, 2, 3, dtype=torch.float64),), TypeError, "module's dtype torch.float32, got torch.float64"),
        ((torch.zeros(4, 2, 3, dtype=torch.int64),), TypeError, "module's dtype torch.float32, got torch.int64"),
        ((torch.zeros(4, 2, 3).to_sparse(),), TypeError, "input must be a dense tensor, got a sparse or nested one"),
        ((torch.zeros(4, 2, 3, device="meta"),), ValueError, "module's device cpu, was on meta"),
        (
            (torch.zeros(4, 2, 3), torch.zeros(2, 5)),
            ValueError,
            r"hx must have shape \[num_layers\*directions, B, hidden_size\]",
        ),
        (
            (torch.zeros(4, 3), torch.zeros(1, 1, 5)),
            ValueError,
            r"hx must have shape \[num_layers\*directions, hidden_size\]",
        ),
        ((torch.zeros(4, 2, 3), torch.zeros(1, 2, 6)), ValueError, r"= \(1, 2, 5\), got \(1, 2, 6\)"),
        ((torch.zeros(4, 2, 3), torch.zeros(1, 2, 5).double()), TypeError, "hx must have the module's dtype"),
        ((torch.zeros(4, 2, 3), [0.0]), TypeError, "hx must be a torch.Tensor, got list"),
    ],
)
def test_forward(args: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        NCGRU(3, 5)(*args)


@pytest.mark.parametrize("device", ["mps", "cuda:77"])
@pytest.mark.parametrize("make", [partial(NCGRU, 3, 5), partial(ScaledCayley, 3), partial(ModReLU, 3)])
def test_devices_that_are_not_there(make: Callable[..., nn.Module], device: str) -> None:
    if device != "mps" or not torch.backends.mps.is_available():
        with pytest.raises(ValueError, match=f"device must be one that this machine has, got '{device}'"):
            make(device=device)


@pytest.mark.parametrize("make", [partial(ScaledCayley, 3), partial(ModReLU, 3)])
def test_devices_of_the_parts(make: Callable[..., nn.Module]) -> None:
    with pytest.raises(ValueError, match=r"device must be a torch\.device or its name, got 'nonsense'"):
        make(device="nonsense")


def test_autocast_leaves_float64_alone() -> None:
    module = NCGRU(3, 5, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=r"module's dtype torch\.float64"):
        module(torch.zeros(4, 2, 3))


# torch's own forward mode uses torch.jit, which torch deprecates.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_forward_mode_derivatives_are_refused_and_not_zero() -> None:
    module = NCGRU(3, 5, dtype=torch.float64)
    x, along = torch.randn(2, 4, 2, 3, dtype=torch.float64)
    for differentiate in (
        lambda: torch.func.jvp(lambda x: module(x)[0], (x,), (along,)),
        lambda: torch.func.jacfwd(lambda skew: module.cayley_l0(skew))(module.skew_l0.detach()),
    ):
        with pytest.raises(NotImplementedError, match=r"use torch\.autograd\.functional\.jvp"):
            differentiate()
    found = torch.autograd.functional.jvp(lambda x: module(x)[0], x, along)[1]
    difference = (module(x + 1e-6 * along)[0] - module(x - 1e-6 * along)[0]) / 2e-6
    torch.testing.assert_close(found, difference, rtol=1e-6, atol=1e-7)


def test_matrices_that_hold_no_numbers() -> None:
    for weight in (torch.zeros(15, 5, device="meta"), torch.zeros(15, 5, dtype=torch.complex64)):
        with pytest.raises(TypeError, match="weight must hold real numbers"):
            NCGRU(3, 5).set_weight_hh(weight)
    with pytest.raises(ValueError, match=r"which must hold places from 0 to 1, got \[5\]"):
        ScaledCayley(3, (2,)).assign(torch.eye(3)[None], which=[5])


def test_batch_first_reads_time_from_the_second_dimension() -> None:
    module = NCGRU(3, 5, batch_first=True)
    with pytest.raises(ValueError, match="at least one time step"):
        module(torch.zeros(2, 0, 3))
    assert module(torch.zeros(0, 2, 3))[0].shape == (0, 2, 5)


@pytest.mark.parametrize("sizes", [[1, 2], [2, 0], [], [3, 1]])
def test_packed_in_unknown_order(sizes: list[int]) -> None:
    packed = pack_sequence([torch.zeros(2, 3), torch.zeros(1, 3)])
    wrong = PackedSequence(packed.data, torch.tensor(sizes, dtype=torch.int64), None, None)
    with pytest.raises(ValueError, match="packed in order of falling length"):
        NCGRU(3, 5)(wrong)


@pytest.mark.parametrize(
    ("order", "back"),
    [
        ([2, 1, 0], [2, 1, 0]), ([0, 1], [0]), ([0, 5], [0, 1]), ([0, 0], [0, 0]), ([0, 1], [1, 0]),
        ([0.0, 1.0], [0.0, 1.0]), (None, [1, 0]),
    ],
)  # fmt: skip
def test_packed_with_indices_that_do_not_order_it(order: list[float] | None, back: list[float]) -> None:
    packed = pack_sequence([torch.zeros(2, 3), torch.zeros(1, 3)])
    given = None if order is None else torch.tensor(order)
    wrong = PackedSequence(packed.data, packed.batch_sizes, given, torch.tensor(back))
    with pytest.raises(ValueError, match=r"that number its 2 sequences and undo each other, got .*pack_padded"):
        NCGRU(3, 5)(wrong)


def test_packed_from_sequences_of_another_rank() -> None:
    with pytest.raises(ValueError, match=r"packed from sequences \[T, input_size\], got data of shape \(2, 4, 3\)"):
        NCGRU(3, 5)(pack_sequence([torch.zeros(2, 4, 3)]))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((torch.zeros(2, 2, 3),), r"input must be \[B, input_size\]"),
        ((torch.zeros(2, 4),), "input must have input_size=3"),
        ((torch.zeros(2, 3), torch.zeros(3, 5)), r"hx must have shape \[B, hidden_size\] = \(2, 5\)"),
        ((torch.zeros(3), torch.zeros(1, 5)), r"hx must have shape \[hidden_size\] = \(5,\)"),
    ],
)
def test_cell_forward(args: tuple[torch.Tensor, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NCGRUCell(3, 5)(*args)


def test_dropout_without_a_second_layer_warns() -> None:
    with pytest.warns(UserWarning, match="has no effect with num_layers=1"):
        NCGRU(3, 5, dropout=0.5)


def test_modrelu_size() -> None:
    with pytest.raises(ValueError, match="num_features=4 as its last dimension"):
        ModReLU(4)(torch.zeros(3, 5))
