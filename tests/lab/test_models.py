"""The model as the trainer sees it: shapes, carried state, penalties, dropouts, parameters, seeds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ncgru.lab.models import SequenceModel, build_model
from ncgru.lab.recipes import ModelSpec, OptimizerSpec, Recipe
from ncgru.lab.tasks import Adding, Copying, OwnText, Parenthesis
from tests.lab.model_kinds import KINDS

TASK = Parenthesis(length=8)


def model_of(spec: ModelSpec, seed: int = 0, task: Parenthesis | Copying | Adding | OwnText = TASK) -> SequenceModel:
    recipe = Recipe("test", task, spec, OptimizerSpec(), steps=1, batch_size=2, log_every=1, headline="train")
    return build_model(recipe, seed)


@pytest.fixture
def text(tmp_path: Path) -> OwnText:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 30, encoding="utf-8")
    return OwnText(bptt=8, train=str(path))


def language_spec(**changes: object) -> ModelSpec:
    base = ModelSpec(
        "nc-gru", (7, 6), orthogonal="c", negatives=3, init="torch", embedding=6, tied=True, readout="language"
    )
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_in_two_pieces_is_the_sequence(kind: str) -> None:
    model = model_of(KINDS[kind]).eval()
    inputs = TASK.source("train", batch_size=3).batch(0).inputs
    with torch.no_grad():
        model.readout.weight.normal_()
        whole = model(inputs)
        first = model(inputs[:3])
        second = model(inputs[3:], first.state)
    torch.testing.assert_close(torch.cat((first.outputs, second.outputs)), whole.outputs)
    for end, expected in zip(second.state, whole.state, strict=True):
        torch.testing.assert_close(end, expected)
    assert whole.outputs.abs().amax() > 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_every_trained_parameter_belongs_to_one_optimiser_and_gets_a_gradient(kind: str) -> None:
    model = model_of(KINDS[kind])
    skew, other = list(model.skew_parameters()), list(model.other_parameters())
    ids = [id(parameter) for parameter in (*skew, *other)]
    assert len(ids) == len(set(ids))
    assert set(ids) == {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert model.parameter_count() == sum(parameter.numel() for parameter in (*skew, *other))
    assert bool(skew) == (kind == "scornn" or kind == "released" or kind.startswith("nc-gru"))
    batch = TASK.source("train", batch_size=3).batch(0)
    TASK.loss(model(batch.inputs).outputs, batch.targets).backward()
    for parameter in (*skew, *other):
        assert parameter.grad is not None
        assert torch.isfinite(parameter.grad).all()


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_autocast_trains(kind: str) -> None:
    model = model_of(KINDS[kind])
    batch = TASK.source("train", batch_size=3).batch(0)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(batch.inputs)
        second = model(batch.inputs, tuple(part.detach() for part in output.state))
        loss = TASK.loss(second.outputs, batch.targets)
    loss.backward()
    exact = TASK.loss(model(batch.inputs, tuple(part.detach().float() for part in output.state)).outputs, batch.targets)
    torch.testing.assert_close(loss, exact, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_decides_all_first_values_and_nothing_else(kind: str) -> None:
    before = torch.get_rng_state()
    states = [model_of(KINDS[kind], seed).state_dict() for seed in (3, 3, 4)]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert any(not torch.equal(states[0][name], states[2][name]) for name in states[0])


def test_only_scored_steps_are_read_out() -> None:
    task = Adding(length=9)
    output = model_of(ModelSpec("gru", (5,)), task=task)(task.source("train", batch_size=4).batch(0).inputs)
    assert output.outputs.shape == (1, 4, 1)
    copying = Copying(length=3)
    outputs = model_of(ModelSpec("gru", (5,)), task=copying)(copying.source("train", batch_size=4).batch(0).inputs)
    assert outputs.outputs.shape == (23, 4, 9)


def test_the_penalty_is_that_of_the_formula() -> None:
    spec = replace(KINDS["goru"], weight_decay_readout=1e-2, weight_decay_recurrent=1e-1)
    model = model_of(spec)
    inputs = TASK.source("train", batch_size=3).batch(0).inputs
    gates = [value for name, value in model.named_parameters() if name.endswith("weight_hh_free_l0")]
    assert len(gates) == 2
    expected = 0.005 * model.readout.weight.double().square().sum()
    for gate in gates:
        expected += 0.05 * gate.double().square().sum()
    penalty = model(inputs).penalty
    torch.testing.assert_close(penalty.double(), expected, rtol=1e-6, atol=0)
    assert model.eval()(inputs).penalty is None
    assert model_of(KINDS["goru"])(inputs).penalty is None


def test_the_penalties_on_outputs_are_those_of_the_formula(text: OwnText) -> None:
    spec = language_spec(activation_penalty=2.0, slowness_penalty=3.0)
    model = model_of(spec, task=text)
    seen: list[Tensor] = []
    model.layers[-1].register_forward_hook(lambda _module, _inputs, result: seen.append(result[0]))
    penalty = model(text.source("train", batch_size=2).batch(0).inputs).penalty
    (hidden,) = seen
    steps = sum((hidden[t + 1] - hidden[t]).square().mean() for t in range(len(hidden) - 1)) / (len(hidden) - 1)
    torch.testing.assert_close(penalty, 2.0 * hidden.square().mean() + 3.0 * steps)


@pytest.mark.parametrize(
    ("field", "place"), [("dropout_input", "first"), ("dropout_hidden", "second"), ("dropout", "readout")]
)
def test_dropouts_are_locked_in_time(field: str, place: str, text: OwnText) -> None:
    model = model_of(language_spec(**{field: 0.4}), task=text)
    module = {"first": model.layers[0], "second": model.layers[1], "readout": model.readout}[place]
    seen: list[Tensor] = []
    module.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].detach()))
    tokens = text.source("train", batch_size=20).batch(0).inputs
    model(tokens)
    model.eval()(tokens)
    dropped, plain = seen
    gone = dropped == 0
    assert torch.equal(gone, gone[:1].expand_as(gone))
    assert not torch.equal(gone[0, :1].expand_as(gone[0]), gone[0])  # another mask for each sequence
    assert 0.2 < gone.float().mean() < 0.6
    if place == "first":
        torch.testing.assert_close(dropped[~gone], plain[~gone] / 0.6)


def test_dropped_embeddings_are_gone_wherever_the_token_stands(text: OwnText) -> None:
    model = model_of(language_spec(dropout_embedding=0.5), task=text)
    seen: list[Tensor] = []
    model.layers[0].register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].detach()))
    tokens = text.source("train", batch_size=20).batch(0).inputs
    model(tokens)
    gone = (seen[0] == 0).all(-1)
    kinds = [bool(gone[tokens == token].all()) for token in tokens.unique()]
    assert [bool(gone[tokens == token].any()) for token in tokens.unique()] == kinds
    assert any(kinds)
    assert not all(kinds)


def test_dropouts_are_drawn_from_the_global_generator(text: OwnText) -> None:
    model = model_of(language_spec(dropout=0.5), task=text)
    tokens = text.source("train", batch_size=4).batch(0).inputs
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(model(tokens).outputs)
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
