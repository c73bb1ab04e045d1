"""The step, what is logged about it, and what becomes of a run whose loss is no longer finite."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ncgru import diagnostics
from ncgru.lab.checkpoint import load_latest
from ncgru.lab.distributed import Ranks
from ncgru.lab.journal import Listener, Result
from ncgru.lab.recipes.recipe import OptimizerSpec, Recipe
from ncgru.lab.rundir import read_log
from ncgru.lab.trainer import Trainer, train
from tests.lab.small_runs import StopAfter, small_recipe, text_recipe


def of_kind(path: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_log(path) if record["kind"] == kind]


def plain_losses(recipe: Recipe, seed: int, steps: int) -> list[float]:
    """The task losses of a loop written with PyTorch's own optimisers and nothing of the trainer's step."""
    trainer = Trainer(recipe, seed)
    model, spec = trainer.model, recipe.optimizer
    optimizers = [torch.optim.Adam(model.other_parameters(), spec.lr, spec.betas, spec.eps)]
    if skew := list(model.skew_parameters()):
        optimizers.append(torch.optim.Adam(skew, spec.skew_lr or spec.lr, spec.betas, spec.eps))
    losses = []
    for position in range(steps):
        batch = trainer.source.batch(position)
        output = model(batch.inputs)
        loss = recipe.task.loss(output.outputs, batch.targets)
        for optimizer in optimizers:
            optimizer.zero_grad()
        (loss + (0 if output.penalty is None else output.penalty)).backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("model", ["gru", "nc-gru-c"])
def test_logged_means_are_those_of_a_plain_loop_without_the_penalty(model: str, tmp_path: Path) -> None:
    recipe = small_recipe(model, optimizer=OptimizerSpec(lr=0.01, skew_lr=0.003))
    train(recipe, tmp_path / "run", 5)
    losses = torch.tensor(plain_losses(recipe, 5, 24)).view(-1, 4).mean(1)
    logged = of_kind(tmp_path / "run", "train")
    assert [record["step"] for record in logged] == [4, 8, 12, 16, 20, 24]
    torch.testing.assert_close(torch.tensor([record["loss"] for record in logged]), losses, rtol=1e-4, atol=0)


def test_records_come_at_their_cadences_and_at_the_end(tmp_path: Path) -> None:
    train(small_recipe(steps=22, log_every=5), tmp_path / "run", 0)
    steps = {kind: [r["step"] for r in of_kind(tmp_path / "run", kind)] for kind in ("train", "eval", "matrix", "end")}
    assert steps == {"train": [5, 10, 15, 20, 22], "eval": [8, 16, 22], "matrix": [6, 12, 18, 22], "end": [22]}


def test_the_end_and_the_listener_tell_what_the_log_does(tmp_path: Path) -> None:
    heard: list[Any] = []

    class Ear(Listener):
        def on_start(self, recipe: Recipe, seed: int, step: int, total: int, best: float | None) -> None:
            heard.append((recipe.name, seed, step, total, best))

        def on_step(self, step: int) -> None:
            assert 0 < step <= 24

        def on_record(self, record: dict[str, Any]) -> None:
            heard.append(record)

        def on_end(self, result: Result) -> None:
            heard.append(result)

    result = train(small_recipe(), tmp_path / "run", 2, listener=Ear())
    assert heard[0] == ("small/nc-gru-c", 2, 0, 24, None)
    assert heard[1:-1] == read_log(tmp_path / "run")
    assert heard[-1] is result
    losses = [record["loss"] for record in of_kind(tmp_path / "run", "train")]
    assert (result.headline_min, result.headline_final) == (min(losses), losses[-1])
    end = of_kind(tmp_path / "run", "end")[0]
    assert (end["status"], end["headline_min"], end["reason"]) == ("finished", min(losses), None)


def test_the_headline_is_read_where_the_selecting_split_is_least(tmp_path: Path) -> None:
    result = train(text_recipe(tmp_path / "fox.txt", eval_every=5), tmp_path / "run", 0)
    evaluations = of_kind(tmp_path / "run", "eval")
    least = min((record for record in evaluations if record["split"] == "valid"), key=lambda record: record["loss"])
    wanted = [r["loss"] for r in evaluations if r["split"] == "test" and r["step"] == least["step"]]
    assert [result.headline_min] == wanted
    assert result.headline_final == evaluations[-1]["loss"]


def test_evaluation_is_the_mean_over_the_whole_split(tmp_path: Path) -> None:
    recipe = small_recipe()
    trainer = Trainer(recipe, 0)
    trainer.advance()
    loss, metrics = trainer.evaluate("test")
    whole = recipe.task.source("test", batch_size=8).batch(0)
    with torch.no_grad():
        wanted = recipe.task.metrics(trainer.model(whole.inputs).outputs, whole.targets)
    assert loss == pytest.approx(wanted["loss"].item(), rel=1e-6)
    assert metrics["accuracy"] == pytest.approx(wanted["accuracy"].item(), rel=1e-6)
    assert metrics["share_of_trivial"] == loss / recipe.task.trivial_loss
    assert trainer.model.training


def test_evaluation_of_a_text_carries_the_state_and_weighs_segments_by_length(tmp_path: Path) -> None:
    recipe = text_recipe(tmp_path / "fox.txt")
    trainer = Trainer(recipe, 0)
    loss, _ = trainer.evaluate("valid")
    source = recipe.task.source("valid", batch_size=2)
    assert source.batches_per_epoch is not None
    segments = [source.batch(position) for position in range(source.batches_per_epoch)]
    assert len(segments[-1].targets) < 12
    trainer.model.eval()
    with torch.no_grad():  # all segments in one piece
        output = trainer.model(torch.cat([segment.inputs for segment in segments]))
        wanted = recipe.task.loss(output.outputs, torch.cat([segment.targets for segment in segments]))
    assert loss == pytest.approx(wanted.item(), rel=1e-5)


def test_measurement_sees_the_pending_step_and_changes_nothing() -> None:
    trainer, other = Trainer(small_recipe(), 0), Trainer(small_recipe(), 0)
    for _ in range(3):
        trainer.advance()
        other.advance()
        measured = trainer.measure()
    assert next(iter(measured["series_norm"].values())) > 0
    assert next(iter(measured["updates"].values())) == 3
    grads = [parameter.grad for parameter in trainer.parameters]
    wanted = torch.stack([grad.norm() for grad in grads if grad is not None]).norm()
    assert measured["grad_norm"] == pytest.approx(wanted.item(), rel=1e-6)
    trainer.advance()
    other.advance()
    for mine, theirs in zip(trainer.parameters, other.parameters, strict=True):
        assert torch.equal(mine, theirs)


def test_clipping_bounds_the_gradient_and_the_log_has_its_norm_before() -> None:
    trainer = Trainer(small_recipe(clip=1e-3), 0)
    trainer.advance()
    grads = [parameter.grad for parameter in trainer.parameters if parameter.grad is not None]
    assert torch.nn.utils.get_total_norm(grads).item() == pytest.approx(1e-3, rel=1e-3)
    free = Trainer(small_recipe(), 0)
    free.advance()
    assert trainer.measure()["grad_norm"] == pytest.approx(free.measure()["grad_norm"], rel=1e-6)


def test_bfloat16_is_autocast_and_leaves_the_matrices_alone() -> None:
    seen: list[torch.dtype] = []
    trainer = Trainer(small_recipe("nc-gru-rc", precision="bfloat16"), 0)
    trainer.model.register_forward_hook(lambda *args: seen.append(args[-1].outputs.dtype))
    for _ in range(5):
        trainer.advance()
    assert set(seen) == {torch.bfloat16}
    assert all(parameter.dtype == torch.float32 for parameter in trainer.parameters)
    assert all(error < 1e-5 for error in diagnostics.orthogonality_error(trainer.model).values())


def test_gradients_of_a_step_live_until_its_successor_has_looked_at_them() -> None:
    trainer = Trainer(small_recipe(), 0)
    trainer.advance()
    before = [copy.copy(parameter.grad) for parameter in trainer.parameters]
    seen: list[list[Tensor | None]] = []
    trainer.model.register_forward_pre_hook(lambda *_: seen.append([p.grad for p in trainer.parameters]))
    trainer.advance()
    for mine, wanted in zip(seen[0], before, strict=True):
        assert mine is not None
        assert wanted is not None
        assert torch.equal(mine, wanted)


def test_a_tensor_serves_as_position() -> None:
    counted, given = Trainer(small_recipe(), 0), Trainer(small_recipe(), 0)
    position = torch.zeros((), dtype=torch.int64)
    for number in range(3):
        counted.step(number)
        given.step(position)
        position += 1
    for mine, theirs in zip(counted.parameters, given.parameters, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("steps_before", [0, 12])
def test_a_loss_that_is_not_finite_ends_the_run_with_its_last_good_state(steps_before: int, tmp_path: Path) -> None:
    recipe = small_recipe()
    if steps_before:
        train(recipe, tmp_path / "run", 0, stop=StopAfter(steps_before))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(recipe.task), "loss", lambda *_: torch.full((), math.nan, requires_grad=True))
        result = train(recipe, tmp_path / "run", 0)
    kept = f"state of step {steps_before} is kept" if steps_before else "nothing was saved"
    assert result.status == "failed"
    assert result.reason is not None
    assert "the training loss was no longer finite" in result.reason
    assert kept in result.reason
    assert of_kind(tmp_path / "run", "end")[-1]["status"] == "failed"
    assert all(math.isfinite(record["loss"]) for record in of_kind(tmp_path / "run", "train"))
    saved = load_latest(tmp_path / "run" / "checkpoints")
    assert (saved.step if saved else 0) == steps_before
    # From the good state it can go on.
    train(recipe, tmp_path / "whole", 0)
    assert train(recipe, tmp_path / "run", 0).headline_min == train(recipe, tmp_path / "whole", 0).headline_min


def test_a_huge_learning_rate_fails_and_never_saves_what_is_not_finite(tmp_path: Path) -> None:
    spec = OptimizerSpec(name="sgd", lr=1e30)
    result = train(small_recipe("gru", optimizer=spec, checkpoint_every=1), tmp_path / "run", 0)
    assert result.status == "failed"
    saved = load_latest(tmp_path / "run" / "checkpoints")
    assert saved is None or all(bool(t.isfinite().all()) for t in saved.tensors.values() if t.is_floating_point())


def test_a_missing_gpu_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"machine has, got 'cuda'.*use device cpu"):
        train(small_recipe(), tmp_path / "run", 0, device="cuda")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("device", ["gpu", "meta", "cpu:x"])
def test_an_unknown_device_is_refused(device: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="device must be cpu, cuda or cuda:<number>"):
        train(small_recipe(), tmp_path / "run", 0, device=device)


def test_a_batch_that_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size must be a multiple of world_size=2, got 3; pass 4"):
        Trainer(replace(small_recipe(), batch_size=3), 0, ranks=Ranks(0, 2))
