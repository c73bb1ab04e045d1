"""Losses against loops, and the baselines against the data."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from ncgru.lab.tasks import Adding, Copying, Denoise, Parenthesis
from ncgru.lab.tasks.denoise import lost_nats
from ncgru.lab.tasks.synthetic import SyntheticTask
from tests.lab.tasks import numpy_truth
from tests.lab.tasks.synthetic_tasks import MAKERS

ALL = pytest.mark.parametrize("kind", list(MAKERS))


def _case(kind: str) -> tuple[SyntheticTask, Tensor, Tensor]:
    """A task, random outputs of the right shape in float64, and targets."""
    task = MAKERS[kind](6)
    targets = task.source("train", batch_size=3, seed=1, dtype=torch.float64).batch(0).targets
    shape = (task.source("train", batch_size=3).batch(0).inputs.shape[0] - task.first_scored_step, 3, task.output_size)
    return task, torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), targets


def _slow_loss(kind: str, outputs: Tensor, targets: Tensor) -> float:
    terms = []
    for step, row in np.ndindex(*outputs.shape[:2]):
        output, target = outputs[step, row].numpy(), targets[step, row].numpy()
        if kind == "parenthesis":
            wanted = np.concatenate([np.arange(6) == count for count in target])
            terms += [(o - w) ** 2 for o, w in zip(output, wanted, strict=True)]
        elif kind == "adding":
            terms.append((output[0] - target[0]) ** 2)
        else:
            terms.append(math.log(sum(math.exp(o) for o in output)) - output[target])
    return float(np.mean(terms))


@ALL
def test_loss_equals_a_loop(kind: str) -> None:
    task, outputs, targets = _case(kind)
    assert task.loss(outputs, targets).item() == pytest.approx(_slow_loss(kind, outputs, targets), rel=1e-12)


@ALL
def test_row_losses_are_the_losses_of_the_rows(kind: str) -> None:
    task, outputs, targets = _case(kind)
    rows = task.row_losses(outputs, targets)
    alone = torch.stack([task.loss(outputs[:, k : k + 1], targets[:, k : k + 1]) for k in range(3)])
    torch.testing.assert_close(rows, alone)
    torch.testing.assert_close(rows.mean(), task.loss(outputs, targets))


@ALL
def test_gradient_of_the_loss(kind: str) -> None:
    task, outputs, targets = _case(kind)
    assert torch.autograd.gradcheck(lambda o: task.loss(o, targets), outputs.requires_grad_())


@ALL
def test_half_precision_outputs_are_scored_in_float32(kind: str) -> None:
    task, outputs, targets = _case(kind)
    rounded = outputs.to(torch.bfloat16)
    loss = task.loss(rounded, targets.float() if kind == "adding" else targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(_slow_loss(kind, rounded.double(), targets), rel=1e-5)


@ALL
def test_perfect_and_wrong_answers(kind: str) -> None:
    task, _, targets = _case(kind)
    if kind == "adding":
        perfect = targets.clone()
    else:
        classes = task.output_size // (3 if kind == "parenthesis" else 1)
        hot = (targets.unsqueeze(-1) == torch.arange(classes)).double()
        perfect = hot.flatten(2) if kind == "parenthesis" else 100 * hot
    metrics = task.metrics(perfect, targets)
    assert metrics["accuracy"].item() == 1.0
    assert metrics["loss"].item() == pytest.approx(0, abs=1e-12)
    assert task.metrics(-perfect if kind != "adding" else perfect + 1, targets)["accuracy"].item() == 0.0
    assert set(task.derived_metrics(0.5)) >= {"share_of_trivial"}


def test_accuracy_of_recall_leaves_the_silence_out() -> None:
    task = Copying(length=5)
    targets = task.source("train", batch_size=2).batch(0).targets
    outputs = torch.zeros(25, 2, 9)
    outputs[..., 0] = 1  # always silent: right for 15 of 25 steps, but nothing is recalled
    assert task.metrics(outputs, targets)["accuracy"].item() == 0.0


@pytest.mark.parametrize(("length", "value"), [(100, 0.1356), (200, 0.1380)])
def test_trivial_loss_of_parenthesis(length: int, value: float) -> None:
    task = Parenthesis(length=length)
    assert round(task.trivial_loss, 4) == value
    targets = task.source("test", batch_size=1600).batch(0).targets
    constant = (targets.unsqueeze(-1) == torch.arange(6)).double().mean((0, 1, 2)).repeat(3)
    assert task.loss(constant.expand(length, 1600, 18), targets).item() == pytest.approx(task.trivial_loss, rel=3e-3)


def test_trivial_loss_of_long_parenthesis_is_that_of_uniform_counts() -> None:
    assert Parenthesis(length=100_000).trivial_loss == pytest.approx(5 / 36, rel=1e-4)


@pytest.mark.parametrize(
    ("task", "symbols", "value"),
    [
        (Denoise(length=200), 9, 9.987e-2),
        (Denoise(length=400, variant="corrected"), 9, 5.231e-2),
        (Copying(length=1000), 8, 2.0387e-2),
        (Copying(length=2000), 8, 1.0294e-2),
    ],
)
def test_trivial_loss_of_recall(task: Denoise | Copying, symbols: int, value: float) -> None:
    assert task.trivial_loss == pytest.approx(value, rel=1e-4)
    targets = task.source("train", batch_size=3).batch(0).targets
    outputs = torch.full((task.length + 20, 3, task.output_size), -1e4, dtype=torch.float64)
    outputs[: task.length + 10, :, 0] = 0
    outputs[task.length + 10 :, :, 1 : symbols + 1] = 0
    assert task.loss(outputs, targets).item() == pytest.approx(task.trivial_loss, rel=1e-12)
    assert task.derived_metrics(task.trivial_loss)["nats_per_symbol"] == pytest.approx(math.log(symbols))


def test_trivial_loss_of_adding() -> None:
    task = Adding(length=50)
    targets = task.source("test", batch_size=10_000).batch(0).targets
    assert task.loss(torch.ones(1, 10_000, 1), targets).item() == pytest.approx(1 / 6, abs=4 * 0.002)
    assert task.trivial_loss == pytest.approx(1 / 6)


@pytest.mark.parametrize(("places", "sequences"), [(20, 1500), (60, 6000), (209, 20_000)])
def test_irreducible_loss_of_published_denoise_against_a_simulation(places: int, sequences: int) -> None:
    alone, _ = numpy_truth.lost_symbols(places, sequences)
    assert lost_nats(places) == pytest.approx(alone, rel=0.04)


def test_irreducible_loss_in_the_figures_that_the_derivation_gives() -> None:
    assert lost_nats(209) == pytest.approx(1.543, abs=5e-4)
    assert lost_nats(409) == pytest.approx(0.809, abs=5e-4)
    _, together = numpy_truth.lost_symbols(209, 20_000)
    assert together == pytest.approx(0.891, rel=0.04)
    assert Denoise(length=200).irreducible_loss == pytest.approx(1.543 / 220, rel=1e-3)


def test_nothing_is_irreducible_in_the_other_synthetic_tasks() -> None:
    for task in (Denoise(variant="corrected"), Copying(), Adding(), Parenthesis()):
        assert task.irreducible_loss == 0.0


def test_what_is_scored() -> None:
    assert Adding(length=40).first_scored_step == 39
    assert [task.first_scored_step for task in (Denoise(), Copying(), Parenthesis())] == [0, 0, 0]
