"""Whole sequences the way `nn.GRU` takes them: layers, directions, batch_first, unbatched, packed; and single steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ncgru import _checks
from ncgru.nn.base import Recurrent
from ncgru.nn.wiring import side_by_side


class SequenceModule(Recurrent):
    """The calling convention of `nn.GRU`, for any cell."""

    def _build_layers(
        self, num_layers: int, batch_first: bool, dropout: float, bidirectional: bool, recompute: bool
    ) -> None:
        self.bias = self._biased  # as on nn.GRU; a cell has a parameter of this name
        self.num_layers = _checks.positive_int("num_layers", num_layers, "pass the number of stacked layers")
        self.batch_first = _checks.flag("batch_first", batch_first)
        self.dropout = _checks.probability("dropout", dropout)
        self.bidirectional = _checks.flag("bidirectional", bidirectional)
        self.recompute = _checks.flag("recompute", recompute)
        if self.dropout > 0 and num_layers == 1:
            warnings.warn(
                f"dropout={dropout} acts between layers only and has no effect with num_layers=1; "
                "add layers or put nn.Dropout after the module",
                stacklevel=3,
            )
        width = self.hidden_size * (2 if bidirectional else 1)
        for layer in range(num_layers):
            size = self.input_size if layer == 0 else width
            self._add_layer(f"_l{layer}", size, bidirectional=bidirectional)

    def forward(
        self, input: Tensor | PackedSequence, hx: Tensor | None = None
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Run the layers over a sequence.

        Args:
            input: [T, B, input_size], or [B, T, input_size] with `batch_first`, or [T, input_size] unbatched, or a
                `PackedSequence`.
            hx: the initial state [num_layers·directions, B, hidden_size], without B if unbatched; zeros if None.

        Returns:
            `output`, the last layer's states in the layout of `input` with directions·hidden_size features, and
            `h_n`, the final state of every layer and direction, shaped as `hx`.

        Raises:
            ValueError: a shape or device does not fit.
            TypeError: not a tensor, or of another dtype than the module's parameters (outside autocast).
        """
        if isinstance(input, PackedSequence):
            return self._forward_packed(input, hx)
        self._check_input(input)
        unbatched = input.dim() == 2
        time_first = input.unsqueeze(1) if unbatched else input.transpose(0, 1) if self.batch_first else input
        output, final = self._run(time_first, self._batched_state(hx, time_first.shape[1], unbatched), None)
        if unbatched:
            return output.squeeze(1), final.squeeze(1)
        return (output.transpose(0, 1) if self.batch_first else output), final

    def _forward_packed(self, input: PackedSequence, hx: Tensor | None) -> tuple[PackedSequence, Tensor]:
        if input.data.dim() != 2:
            raise ValueError(
                f"input must be packed from sequences [T, input_size], got data of shape {tuple(input.data.shape)}; "
                "flatten further dimensions first"
            )
        layout = ragged_layout(input)
        self._check_features("input", input.data, self.input_size, "input_size")
        steps, batch = layout.steps, layout.lengths.shape[0]
        padded = input.data.new_zeros(steps * batch, self.input_size).index_copy(0, layout.rows, input.data)
        state = self._batched_state(hx, batch, unbatched=False)
        if state is not None and input.sorted_indices is not None:
            state = state.index_select(1, input.sorted_indices)
        output, final = self._run(padded.view(steps, batch, self.input_size), state, layout.lengths)
        data = output.flatten(0, 1).index_select(0, layout.rows)
        if input.unsorted_indices is not None:
            final = final.index_select(1, input.unsorted_indices)
        return PackedSequence(data, input.batch_sizes, input.sorted_indices, input.unsorted_indices), final

    def _run(self, sequence: Tensor, initial: Tensor | None, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """All layers, time first: [T, B, I] -> [T, B, directions·H] and the final states."""
        finals: list[Tensor] = []
        for layer, (suffix, directions) in enumerate(self._layers):
            count = len(directions)
            states = None if initial is None else initial[layer * count : (layer + 1) * count]
            sequence, final = self._run_layer(sequence, states, suffix, directions, lengths)
            finals.append(final)
            if self.dropout > 0 and self.training and layer + 1 < self.num_layers:
                sequence = F.dropout(sequence, self.dropout)
        return sequence, side_by_side(finals)

    def _check_input(self, input: Tensor) -> None:
        layout = "[B, T, input_size]" if self.batch_first else "[T, B, input_size]"
        _checks.tensor("input", input, f"pass a tensor {layout} or a PackedSequence")
        if input.dim() not in (2, 3):
            raise ValueError(
                f"input must be {layout} or unbatched [T, input_size], got shape {tuple(input.shape)}; reshape it"
            )
        self._check_features("input", input, self.input_size, "input_size")
        if input.shape[1 if self.batch_first and input.dim() == 3 else 0] == 0:
            raise ValueError(
                f"input must have at least one time step, got T=0 in shape {tuple(input.shape)} read as {layout}; "
                "skip empty sequences (an empty batch, B=0, is fine)"
            )

    def _batched_state(self, hx: Tensor | None, batch: int, unbatched: bool) -> Tensor | None:
        """`hx` as [num_layers·directions, B, H], checked."""
        if hx is None:
            return None
        _checks.tensor("hx", hx, "pass the initial state or leave it out for zeros")
        count = sum(len(directions) for _, directions in self._layers)
        words = "[num_layers*directions, hidden_size]" if unbatched else "[num_layers*directions, B, hidden_size]"
        expected = (count, self.hidden_size) if unbatched else (count, batch, self.hidden_size)
        _checks.shape("hx", hx, expected, words)
        self._check_features("hx", hx, self.hidden_size, "hidden_size")
        return hx.unsqueeze(1) if unbatched else hx

    def _repr_options(self) -> Iterator[str]:
        defaults = {"num_layers": 1, "batch_first": False, "dropout": 0.0, "bidirectional": False}
        yield from (f"{name}={getattr(self, name)}" for name, value in defaults.items() if getattr(self, name) != value)
        yield from super()._repr_options()


class CellModule(Recurrent):
    """The calling convention of `nn.GRUCell`: one step of any cell."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """Take one step.

        Args:
            input: [B, input_size], or [input_size] unbatched.
            hx: the state [B, hidden_size], without B if unbatched; zeros if None.

        Returns:
            The next state, shaped as `hx`.
        """
        _checks.tensor("input", input, "pass a tensor [B, input_size] or [input_size]")
        if input.dim() not in (1, 2):
            raise ValueError(
                f"input must be [B, input_size] or unbatched [input_size], got shape {tuple(input.shape)}; "
                "a cell takes one step, use the module without 'Cell' for sequences"
            )
        self._check_features("input", input, self.input_size, "input_size")
        unbatched = input.dim() == 1
        if hx is not None:
            _checks.tensor("hx", hx, "pass the state or leave it out for zeros")
            words = "[hidden_size]" if unbatched else "[B, hidden_size]"
            _checks.shape("hx", hx, (*input.shape[:-1], self.hidden_size), words)
            self._check_features("hx", hx, self.hidden_size, "hidden_size")
            hx = hx.unsqueeze(0) if unbatched else hx
        suffix, directions = self._layers[0]
        weights = self._weights(suffix, directions)
        (weight,) = self._recurrent_weights(weights)
        step = input.view(1, -1, self.input_size) if unbatched else input.unsqueeze(0)
        hidden = self._run_direction(step, hx, weight, weights.inputs[0], weights.biases, suffix, None)[0]
        return hidden.squeeze(0) if unbatched else hidden


class RaggedLayout(NamedTuple):
    """Where the rows of a packed sequence lie in the padded [T·B] grid."""

    rows: Tensor
    lengths: Tensor
    steps: int


def ragged_layout(packed: PackedSequence) -> RaggedLayout:
    """The layout of `packed`, worked out on the host (where `batch_sizes` lives) and checked.

    Raises:
        ValueError: the batch sizes are not those of sequences sorted by falling length, or the indices that sort and
            unsort them are no permutations that undo each other.
    """
    sizes = packed.batch_sizes
    batch = int(sizes[0]) if sizes.numel() else 0
    falling = bool((sizes[1:] <= sizes[:-1]).all()) and bool((sizes >= 1).all())
    if sizes.dim() != 1 or not batch or not falling or int(sizes.sum()) != packed.data.shape[0]:
        raise ValueError(
            f"input must be packed in order of falling length, with batch_sizes that fall and add up to the "
            f"{packed.data.shape[0]} rows of its data, got batch_sizes {sizes.tolist()[:8]}; build it with "
            "torch.nn.utils.rnn.pack_padded_sequence or pack_sequence"
        )
    _check_order(packed, batch)
    steps = sizes.shape[0]
    present = torch.arange(batch) < sizes.unsqueeze(1)  # [T, B]
    device = packed.data.device
    rows = present.flatten().nonzero().squeeze(1).to(device, non_blocking=True)
    return RaggedLayout(rows, present.sum(0).to(device, non_blocking=True), steps)


def _check_order(packed: PackedSequence, batch: int) -> None:
    """Raise unless the indices of `packed` are permutations that undo each other, or both absent.

    What they hold is looked at on the CPU only: elsewhere the host would have to wait for it.
    """
    order, back = packed.sorted_indices, packed.unsorted_indices
    if order is None and back is None:
        return
    fits = order is not None and back is not None and _undo_each_other(order, back, batch)
    if not fits:
        shown = " and ".join("None" if index is None else str(index.tolist()[:8]) for index in (order, back))
        raise ValueError(
            f"input must have sorted_indices and unsorted_indices that number its {batch} sequences and undo each "
            f"other, got {shown}; build it with torch.nn.utils.rnn.pack_padded_sequence"
        )


def _undo_each_other(order: Tensor, back: Tensor, batch: int) -> bool:
    if any(index.shape != (batch,) or index.dtype != torch.int64 for index in (order, back)):
        return False
    if not order.device.type == back.device.type == "cpu":
        return True
    present, undone = order.sort()
    return torch.equal(present, torch.arange(batch)) and torch.equal(undone, back)
