"""The model that the trainer sees: embedding, recurrent layers, read-out, dropouts and penalties.

Shapes: T time, B batch, I input size, K outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ncgru.lab.models.initial import initialise_readout
from ncgru.lab.models.layer import RecurrentLayer
from ncgru.lab.recipes.recipe import ModelSpec, Recipe
from ncgru.lab.tasks import Task
from ncgru.nn.orthogonal import OrthogonalRecurrent


class ModelOutput(NamedTuple):
    """What a forward pass gives.

    Attributes:
        outputs: [scored steps, B, K].
        state: each layer's last state, to go on with; an LSTM layer has two tensors, others one.
        penalty: what the objective has beyond the task's loss, while training; None for nothing.
    """

    outputs: Tensor
    state: tuple[Tensor, ...]
    penalty: Tensor | None


class SequenceModel(nn.Module):
    """Recurrent layers for a task.

    Args:
        spec: the model.
        task: gives the sizes of input and output and the first scored step.
        skew_lr: learning rate of the A's, which the released code's update needs.
    """

    def __init__(self, spec: ModelSpec, task: Task, skew_lr: float = 1e-3) -> None:
        super().__init__()
        self.spec = spec
        self.first_scored_step = task.first_scored_step
        width = task.input_size
        self.embedding: nn.Embedding | None = None
        if spec.embedding is not None:
            self.embedding = nn.Embedding(task.input_size, spec.embedding)
            nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
            width = spec.embedding
        layers = []
        for size in spec.hidden_sizes:
            layers.append(RecurrentLayer(spec, width, size, skew_lr))
            width = size
        self.layers = nn.ModuleList(layers)
        self.readout = nn.Linear(width, task.output_size)
        initialise_readout(self.readout, spec.readout, task.input_size)
        if spec.tied and self.embedding is not None:
            self.readout.weight = self.embedding.weight

    def forward(self, inputs: Tensor, state: tuple[Tensor, ...] | None = None) -> ModelOutput:
        """Run over a batch.

        Args:
            inputs: [T, B, I], or int64 tokens [T, B].
            state: `state` of an earlier output; zeros if None.
        """
        sequence = inputs if self.embedding is None else self._embed(self.embedding, inputs)
        earlier = None if state is None else list(state)
        reached: list[Tensor] = []
        plain = sequence
        for number, layer in enumerate(self.layers, start=1):
            assert isinstance(layer, RecurrentLayer)
            given = None if earlier is None else tuple(earlier[len(reached) : len(reached) + layer.state_size])
            plain, final = layer(sequence, given)
            reached += final
            last = number == len(self.layers)
            sequence = self._locked_dropout(plain, self.spec.dropout if last else self.spec.dropout_hidden)
        outputs = self.readout(sequence[self.first_scored_step :])
        return ModelOutput(outputs, tuple(reached), self._penalty(plain, sequence) if self.training else None)

    def skew_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters behind the orthogonal matrices."""
        for module in self.modules():
            if isinstance(module, OrthogonalRecurrent):
                yield from module.skew_parameters()

    def other_parameters(self) -> Iterator[nn.Parameter]:
        """All other parameters that are trained."""
        skew = {id(parameter) for parameter in self.skew_parameters()}
        return (p for p in self.parameters() if p.requires_grad and id(p) not in skew)

    def parameter_count(self) -> int:
        """How many numbers are trained; an orthogonal matrix has n(n-1)/2 of them, a tied weight counts once."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)

    def _embed(self, embedding: nn.Embedding, tokens: Tensor) -> Tensor:
        """Embedded tokens [T, B, I]: first whole token types are dropped, then entries, the same at all steps."""
        weight = embedding.weight
        if self.training and self.spec.dropout_embedding > 0:
            weight = weight * F.dropout(weight.new_ones(weight.shape[0], 1), self.spec.dropout_embedding)
        return self._locked_dropout(F.embedding(tokens, weight), self.spec.dropout_input)

    def _locked_dropout(self, sequence: Tensor, share: float) -> Tensor:
        """Dropout with one mask for all steps of a sequence."""
        if not self.training or share == 0:
            return sequence
        return sequence * F.dropout(sequence.new_ones(1, *sequence.shape[1:]), share)

    def _penalty(self, plain: Tensor, dropped: Tensor) -> Tensor | None:
        """Weight decay that is part of the objective, and the penalties on the last layer's outputs."""
        spec = self.spec
        terms: list[Tensor] = []
        if spec.weight_decay_readout > 0:
            terms.append(0.5 * spec.weight_decay_readout * self.readout.weight.square().sum())
        if spec.weight_decay_recurrent > 0:
            matrices = [layer.gate_matrices() for layer in self.layers if isinstance(layer, RecurrentLayer)]
            terms += [0.5 * spec.weight_decay_recurrent * m.square().sum() for m in matrices if m is not None]
        if spec.activation_penalty > 0:
            terms.append(spec.activation_penalty * dropped.float().square().mean())
        if spec.slowness_penalty > 0 and len(plain) > 1:
            terms.append(spec.slowness_penalty * plain.float().diff(dim=0).square().mean())
        return torch.stack(terms).sum() if terms else None


def build_model(recipe: Recipe, seed: int = 0) -> SequenceModel:
    """The recipe's model on the CPU, its first values drawn from `seed` alone; PyTorch's random state is untouched."""
    optimizer = recipe.optimizer
    skew_lr = optimizer.lr if optimizer.skew_lr is None else optimizer.skew_lr
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SequenceModel(recipe.model, recipe.task, skew_lr)
