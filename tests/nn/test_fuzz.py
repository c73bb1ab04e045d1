"""Random arguments for every constructor and forward: a result or a documented error, and nothing changed."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from ncgru import GORU, NCGRU, BackendUnavailableError, GORUCell, NCGRUCell, ScoRNN, ScoRNNCell, orthogonal

CLASSES = [NCGRU, NCGRUCell, ScoRNN, ScoRNNCell, GORU, GORUCell]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
NEGATIVES = st.one_of(st.none(), st.integers(0, 2), st.lists(st.integers(0, 2), max_size=3))
SENSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "input_size": st.integers(1, 4),
    "hidden_size": st.sampled_from([1, 2, 3, 4, 5, 8]),
    "num_layers": st.integers(1, 2),
    "bias": st.booleans(),
    "batch_first": st.booleans(),
    "dropout": st.sampled_from([0, 0.0, 0.5, 1]),
    "bidirectional": st.booleans(),
    "orthogonal": st.sampled_from(["", "c", "rc", "ruc", "cr"]),
    "nonlinearity": st.sampled_from(["modrelu", "tanh", "relu"]),
    "negatives": NEGATIVES,
    "inverse": st.sampled_from(["exact", "neumann", "hyperpower"]),
    "order": st.integers(1, 3),
    "reset_every": st.one_of(st.none(), st.integers(1, 3)),
    "capacity": st.one_of(st.none(), st.integers(1, 4)),
    "style": st.sampled_from(["tunable", "fft"]),
    "backend": st.sampled_from(["auto", "reference"]),
    "recompute": st.booleans(),
    "device": st.sampled_from([None, "cpu", torch.device("cpu")]),
    "dtype": st.sampled_from([None, *FLOATS]),
}
ODD = st.one_of(
    st.integers(-2, 6), st.floats(-1, 2), st.booleans(), st.none(), st.lists(st.integers(-1, 6), max_size=3),
    st.sampled_from(["", "c", "x", "tanh", "cuda", "cuda:99", "mps", "float32", torch.int32, torch.zeros(2), object]),
)  # fmt: skip
SHAPES = st.lists(st.integers(0, 4), max_size=4)
DTYPES = st.sampled_from([*FLOATS, torch.int64, torch.bool, torch.complex64])
TENSORS = st.builds(lambda shape, dtype: torch.ones(shape, dtype=dtype), SHAPES, DTYPES)


def attempt(call: Callable[[], Any], seen: Counter[str], what: str) -> Any:
    """What `call` returns, or the documented error it raised, which must say what must be; counted in `seen`."""
    try:
        result = call()
    except (ValueError, TypeError, BackendUnavailableError) as error:
        result = error
    refused = isinstance(result, Exception)
    assert not refused or any(words in str(result) for words in (" must ", "cannot run")), result
    seen[f"{what} {'refused' if refused else 'done'}"] += 1
    return result


@st.composite
def constructions(draw: st.DrawFn) -> tuple[type[nn.Module], dict[str, Any]]:
    """A class and its arguments: all sensible, or one or two of them odd."""
    cls = draw(st.sampled_from(CLASSES))
    names = list(inspect.signature(cls).parameters)
    keywords = {name: draw(SENSIBLE[name]) for name in names if name.endswith("_size") or draw(st.booleans())}
    if draw(st.integers(0, 2)) == 2:
        keywords.update({name: draw(ODD) for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=2))})
    return cls, keywords


def fitting_input(data: st.DataObject, module: Any) -> tuple[Any, Any]:
    """An input and a state of the right shapes and dtype, in any layout the module takes."""
    steps, batch, dtype = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 3)), next(module.parameters()).dtype
    layers = sum(len(directions) for _, directions in module._layers)
    packed = False
    if isinstance(module, (NCGRUCell, ScoRNNCell, GORUCell)):
        layout, state = [batch, module.input_size], [batch, module.hidden_size]
    else:
        layout = [batch, steps, module.input_size] if module.batch_first else [steps, batch, module.input_size]
        state = [layers, batch, module.hidden_size]
        packed = batch > 0 and data.draw(st.booleans())
    x: Any = torch.ones(layout, dtype=dtype)
    if packed:
        lengths = data.draw(st.lists(st.integers(1, steps), min_size=batch, max_size=batch))
        x = pack_padded_sequence(x, lengths, module.batch_first, enforce_sorted=False)
    return x, torch.ones(state, dtype=dtype) if data.draw(st.booleans()) else None


def spoilt(data: st.DataObject, x: Any, hx: Any) -> tuple[Any, Any]:
    """One of the two replaced by something else, or a packed batch of which one part is wrong."""
    if isinstance(x, PackedSequence) and data.draw(st.booleans()):
        numbers = torch.tensor(data.draw(st.lists(st.integers(-1, 4), max_size=3)), dtype=torch.int64)
        part = data.draw(st.sampled_from(["data", "batch_sizes", "sorted_indices", "unsorted_indices"]))
        return x._replace(**{part: data.draw(TENSORS) if part == "data" else numbers}), hx
    other = data.draw(st.one_of(TENSORS, ODD))
    return (other, hx) if data.draw(st.booleans()) else (x, other)


@pytest.mark.filterwarnings("ignore:dropout=.*has no effect:UserWarning")
def test_any_arguments_give_a_result_or_a_documented_error() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(constructions(), st.data())
    def check(construction: tuple[type[nn.Module], dict[str, Any]], data: st.DataObject) -> None:
        cls, keywords = construction
        module = attempt(lambda: cls(**keywords), seen, "constructor")
        if isinstance(module, Exception):
            return
        arguments = fitting_input(data, module)
        if data.draw(st.booleans()):
            arguments = spoilt(data, *arguments)
        before = {key: value.clone() for key, value in module.state_dict().items()}
        result = attempt(lambda: module(*arguments), seen, "forward")
        if not isinstance(result, Exception):
            first = result if isinstance(result, Tensor) else result[0]
            assert bool((first.data if isinstance(first, PackedSequence) else first).isfinite().all())
        for key, value in module.state_dict().items():
            assert torch.equal(value, before[key]), key

    check()
    # Were nearly all calls refused, or none, the test would show little.
    assert min(seen[f"{what} {end}"] for what in ("constructor", "forward") for end in ("done", "refused")) >= 100, seen
    assert sum(count for what, count in seen.items() if what.startswith("constructor")) >= 1000


@st.composite
def weights_and_options(draw: st.DrawFn) -> tuple[Tensor, dict[str, Any]]:
    """A square weight and sensible options; every second time one of them is odd."""
    weight = torch.ones(*draw(st.lists(st.integers(1, 3), max_size=2)), *[draw(st.integers(1, 4))] * 2)
    keywords = {name: draw(SENSIBLE[name]) for name in ("inverse", "order", "reset_every") if draw(st.booleans())}
    keywords["init"] = draw(st.sampled_from([None, "cayley", "haar", "henaff"]))
    if draw(st.booleans()):
        return weight, keywords
    if draw(st.booleans()):
        return draw(st.one_of(TENSORS, st.just(torch.full((2, 2), torch.nan)))), keywords
    return weight, {**keywords, draw(st.sampled_from([*keywords, "name", "negatives"])): draw(ODD)}


def test_any_weight_becomes_orthogonal_or_gives_a_documented_error() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=500, deadline=None)
    @given(weights_and_options())
    def check(drawn: tuple[Tensor, dict[str, Any]]) -> None:
        weight, keywords = drawn
        module = nn.Module()
        module.weight = nn.Parameter(weight.clone(), requires_grad=weight.is_floating_point())
        result = attempt(lambda: orthogonal(module, **keywords), seen, "orthogonal")
        if isinstance(result, Exception):
            assert torch.allclose(module.weight, weight, rtol=0, atol=0, equal_nan=True)
            assert list(module.state_dict()) == ["weight"]
            return
        found = module.weight.detach()
        identity = torch.eye(found.shape[-1], dtype=found.dtype).expand_as(found)
        torch.testing.assert_close(found.mT @ found, identity)

    check()
    assert min(seen[f"orthogonal {end}"] for end in ("done", "refused")) >= 50, seen
