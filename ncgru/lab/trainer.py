"""Training: the step, what is measured between steps, and the one loop that all runs go through."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ncgru import diagnostics
from ncgru.lab.checkpoint import flatten, random_state, restore_random_state, unflatten
from ncgru.lab.distributed import ALONE, Ranks, checked_device, process_group
from ncgru.lab.flow import gradient_profile
from ncgru.lab.journal import Journal, Listener, Result
from ncgru.lab.models import build_model
from ncgru.lab.optim import Optimizers
from ncgru.lab.recipes.recipe import Recipe, check_seed
from ncgru.lab.rundir import RunDirectory
from ncgru.lab.stopping import StopFlag, stop_on_signals

__all__ = ["Result", "StopFlag", "Trainer", "train"]

AGREE_EVERY = 10
"""Steps after which several ranks agree on whether one of them was asked to stop."""


class Trainer:
    """A run in memory: model, optimisers, data and where it stands.

    `step` needs nothing from the host but the position: it never waits for the device, and what it keeps (losses,
    carried state, optimiser state) stays there.

    Args:
        recipe: what to train.
        seed: of the model and its data.
        device: where.
        ranks: the processes that train it together.
    """

    def __init__(self, recipe: Recipe, seed: int, *, device: str = "cpu", ranks: Ranks = ALONE) -> None:
        check_seed("seed", seed)
        self.recipe = recipe
        self.seed = seed
        self.ranks = ranks
        self.device = checked_device(device, ranks)
        self.source = recipe.task.source(
            "train", batch_size=recipe.batch_size, seed=seed, rank=ranks.rank, world_size=ranks.size, device=self.device
        )
        self.model = build_model(recipe, seed).to(self.device)
        self.parameters = list(self.model.parameters())
        self.optimizers = Optimizers(
            recipe.optimizer, self.model.skew_parameters(), self.model.other_parameters(), self.device
        )
        self.position = 0
        self.carried: tuple[Tensor, ...] | None = None
        self.window_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.window_steps = 0
        self.clipped_from: Tensor | None = None
        self._forward = ranks.wrap(self.model, self.device)
        # Dropout draws from PyTorch's generators, and must differ between seeds and between ranks.
        torch.manual_seed((seed + (ranks.rank << 32)) % 2**63)

    def step(self, position: int | Tensor) -> None:
        """One update on the batch at `position`; a tensor will do where no state is carried from batch to batch."""
        batch = self.source.batch(position)
        continues = not isinstance(position, Tensor) and self.source.continues(position)
        with self._precision():
            output = self._forward(batch.inputs, self.carried if continues else None)
            loss = self.recipe.task.loss(output.outputs, batch.targets)
            objective = loss if output.penalty is None else loss + output.penalty
        # Not earlier: the update of the released code reads the last gradient during the forward.
        for parameter in self.parameters:
            parameter.grad = None
        objective.backward()
        if self.recipe.clip is not None:
            self.clipped_from = torch.nn.utils.clip_grad_norm_(self.parameters, self.recipe.clip)
        self.optimizers.step(1.0 if isinstance(position, Tensor) else self.source.learning_rate_scale(position))
        self.carried = tuple(part.detach() for part in output.state)
        self.window_sum += loss.detach()

    def advance(self) -> int:
        """Make the next step; returns how many have been made."""
        self.step(self.position)
        self.position += 1
        self.window_steps += 1
        return self.position

    def window_mean(self) -> float:
        """The mean training loss since the last call, over all ranks."""
        mean = self.ranks.mean(self.window_sum / self.window_steps).item()
        self.window_sum.zero_()
        self.window_steps = 0
        return mean

    def fault(self) -> str | None:
        """What is no longer finite, losses of this window, parameters or stored inverses; None if all is well."""
        states = (item for item in self.model.state_dict().items() if item[1].is_floating_point())
        checked = {"the training loss": self.window_sum, **dict(states)}
        finite = torch.stack([torch.isfinite(tensor).all() for tensor in checked.values()]).tolist()
        faults = [name for name, fine in zip(checked, finite, strict=True) if not fine]
        # A loss can be at fault on one rank alone.
        named = next((name for found in self.ranks.gather(faults) for name in found), None)
        return None if named is None else f"{named} was no longer finite"

    def measure(self) -> dict[str, Any]:
        """Diagnostics of the orthogonal matrices and the gradient's norm.

        To be called before anything reads the matrices after a step: the series' norm is that of the pending step.
        """
        grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads) if self.clipped_from is None else self.clipped_from
        return {
            "series_norm": _numbers(diagnostics.series_norm(self.model)),
            "orthogonality": _numbers(diagnostics.orthogonality_error(self.model)),
            "residual": _numbers(diagnostics.inverse_residual(self.model)),
            "refreshes": _numbers(diagnostics.refreshes(self.model)),
            "updates": _numbers(diagnostics.updates(self.model)),
            "grad_norm": norm.item(),
        }

    def evaluate(self, split: str) -> tuple[float, dict[str, float]]:
        """Loss and metrics on the fixed set of a split, the same on every rank."""
        recipe = self.recipe
        source = recipe.task.source(split, batch_size=recipe.eval_batch_size, device=self.device)
        count = source.batches_per_epoch if recipe.eval_batches is None else recipe.eval_batches
        if count is None:
            raise ValueError(f"eval_batches must be given for split {split!r}, whose batches never end, got None")
        sums: dict[str, Tensor] = {}
        weight = 0
        state = None
        self.model.eval()
        try:
            with torch.no_grad():
                for position in range(count):
                    batch = source.batch(position)
                    with self._precision():
                        output = self.model(batch.inputs, state if source.continues(position) else None)
                    state = output.state
                    scored = len(batch.targets)
                    for name, value in recipe.task.metrics(output.outputs, batch.targets).items():
                        sums[name] = sums.get(name, torch.zeros_like(value)) + value.double() * scored
                    weight += scored
        finally:
            self.model.train()
        metrics = {name: (total / weight).item() for name, total in sums.items()}
        loss = metrics.pop("loss")
        return loss, {**metrics, **recipe.task.derived_metrics(loss)}

    def state(self) -> dict[str, Any]:
        """All that a later sitting needs to make the same steps; every rank calls it."""
        own = {
            "random": random_state(),
            "carried": self.carried if self.source.continues(self.position) else None,
            "window_sum": self.window_sum.cpu(),
        }
        reads_gradient = self.recipe.model.released
        return {
            "position": self.position,
            "window_steps": self.window_steps,
            "model": self.model.state_dict(),
            "gradients": [parameter.grad for parameter in self.parameters] if reads_gradient else None,
            "optimizers": self.optimizers.state_dict(),
            "ranks": self.ranks.gather(own),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        if len(state["ranks"]) != self.ranks.size:
            raise ValueError(
                f"the run must be resumed by as many processes as saved it, {len(state['ranks'])}, "
                f"got {self.ranks.size}; start that many, or another run directory"
            )
        own = state["ranks"][self.ranks.rank]
        self.position, self.window_steps = state["position"], state["window_steps"]
        self.model.load_state_dict(state["model"])
        self.optimizers.load_state_dict(state["optimizers"])
        if state["gradients"] is not None:
            for parameter, gradient in zip(self.parameters, state["gradients"], strict=True):
                parameter.grad = None if gradient is None else gradient.to(self.device)
        self.carried = own["carried"] and tuple(part.to(self.device) for part in own["carried"])
        self.window_sum.copy_(own["window_sum"])
        restore_random_state(own["random"])

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self.recipe.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)


def train(
    recipe: Recipe,
    run: RunDirectory | Path | str,
    seed: int,
    *,
    device: str = "cpu",
    resume: bool = True,
    allow_other_recipe: bool = False,
    listener: Listener | None = None,
    stop: StopFlag | None = None,
) -> Result:
    """Train one seed of a recipe to its end, or go on with it from its last checkpoint.

    SIGTERM, Ctrl-C and `stop` let the step at hand finish and save its state. PyTorch's random state is left as it was.

    Args:
        recipe: what to train.
        run: the run's own directory.
        seed: of the model and its data.
        device: "cpu", "cuda" or "cuda:<number>"; under `torchrun`, "cuda" gives each process its own.
        resume: whether to go on where a run has begun; if False, such a directory is refused.
        allow_other_recipe: go on with `recipe` though the run began with another one.
        listener: who else gets the records.
        stop: set it to stop from elsewhere.

    Raises:
        LabError: the directory cannot be used, or the state cannot be saved.
        ValueError: the device is not there, or the recipe does not fit it or the number of processes.
    """
    stop = StopFlag() if stop is None else stop
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(process_group(device))
        place = checked_device(device, ranks)
        stack.enter_context(torch.random.fork_rng([] if place.type == "cpu" else [place]))
        # First, so that arguments that do not fit leave nothing on the disk.
        trainer = Trainer(recipe, seed, device=device, ranks=ranks)
        directory = _opened(run, recipe, seed, allow_other_recipe, ranks, stack)
        journal = Journal(recipe, seed, directory, listener if ranks.leads else None)
        stack.enter_context(stop_on_signals(stop))
        earlier = ranks.lead(lambda: journal.earlier_result(resume))
        if earlier is not None:
            return earlier
        _begin(trainer, journal)
        return _run(trainer, journal, stop)


def _run(trainer: Trainer, journal: Journal, stop: StopFlag) -> Result:
    """The loop."""
    recipe = trainer.recipe
    cadences = [recipe.log_every, recipe.eval_every, recipe.measure_every, recipe.checkpoint_every]
    while trainer.position < recipe.steps:
        step = trainer.advance()
        journal.stepped(step)
        last = step == recipe.steps
        log, evaluate, measure, save = (every is not None and (last or step % every == 0) for every in cadences)
        stopping = None if last else _stop_reason(stop, step, trainer.ranks)
        if not (log or evaluate or measure or save or stopping):
            continue
        fault = trainer.fault()
        if measure and not fault:  # before anything else reads the matrices
            journal.write("matrix", step, **trainer.measure())
        if log and not fault:
            journal.write("train", step, loss=trainer.window_mean(), seconds=journal.seconds)
        if evaluate and not fault:
            fault = _evaluate(trainer, journal)
        if fault:
            return journal.end(step, "failed", f"{fault} after step {step}; {journal.last_good_state()}")
        if last:
            _write_profile(trainer, journal)
        if save or stopping:
            _save(trainer, journal)
        if stopping:
            return journal.end(step, "stopped", f"{stopping}; the same command goes on from step {step}")
    return journal.end(trainer.position, "finished", None)


def _opened(
    run: RunDirectory | Path | str,
    recipe: Recipe,
    seed: int,
    allow_other_recipe: bool,
    ranks: Ranks,
    stack: contextlib.ExitStack,
) -> RunDirectory | None:
    """The run directory on the rank that leads; closed with the stack if it was opened here."""
    if isinstance(run, RunDirectory):
        return run if ranks.leads else None
    opened: list[RunDirectory] = []
    ranks.lead(lambda: opened.append(RunDirectory.open(run, recipe, seed, allow_other_recipe=allow_other_recipe)))
    return stack.enter_context(opened[0]) if opened else None


def _begin(trainer: Trainer, journal: Journal) -> None:
    """Load the last checkpoint if there is one, and log the start."""
    checkpoint = trainer.ranks.lead(journal.load)
    if checkpoint is not None:
        state = unflatten(checkpoint.tensors, checkpoint.meta["state"])
        trainer.restore(state)
        journal.restore(state["journal"])
    journal.start(trainer.position, str(trainer.device), checkpoint.warnings if checkpoint else ())
    if trainer.position == 0:
        _write_profile(trainer, journal)


def _save(trainer: Trainer, journal: Journal) -> None:
    tensors, structure = flatten({**trainer.state(), "journal": journal.state()}, "state")
    trainer.ranks.lead(lambda: journal.save(trainer.position, tensors, {"state": structure}))


def _write_profile(trainer: Trainer, journal: Journal) -> None:
    """How gradients flow along a sequence that is not trained on; for the untrained and the trained model."""
    recipe = trainer.recipe
    if recipe.measure_every is None or recipe.task.token_inputs:
        return
    source = recipe.task.source(recipe.eval_split, batch_size=recipe.eval_batch_size, device=trainer.device)
    profile = gradient_profile(trainer.model, source.batch(0).inputs)
    if profile is not None:
        journal.write("gradients", trainer.position, **profile)


def _evaluate(trainer: Trainer, journal: Journal) -> str | None:
    """Evaluate and log all splits; returns what is wrong, if a loss is not finite."""
    for split in trainer.recipe.eval_splits:
        loss, metrics = trainer.evaluate(split)
        if not math.isfinite(loss):
            return f"the loss on split {split!r} was {loss}"
        journal.write("eval", trainer.position, split=split, loss=loss, metrics=metrics, seconds=journal.seconds)
    return None


def _stop_reason(stop: StopFlag, step: int, ranks: Ranks) -> str | None:
    """Why to stop after this step, the same on all ranks; None to go on."""
    if ranks.alone:
        return stop.reason if stop else None
    if step % AGREE_EVERY or not ranks.any(bool(stop)):
        return None
    return next(reason for reason in ranks.gather(stop.reason) if reason is not None)


def _numbers(values: dict[str, Tensor]) -> dict[str, float]:
    return {name: value.item() for name, value in values.items()}
