"""What a whole sequence module and its cell share: sizes, input weights, biases, and the step of the recurrence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ncgru import _checks
from ncgru._eager import simply_computes
from ncgru.nn.layer import Weights, final_states, project, run_layer, tensors_of
from ncgru.nn.wiring import Wiring
from ncgru.orthogonal.reading import Reading
from ncgru.recurrence import recurrence, resolve_backend
from ncgru.recurrence.cuda.operator import kind_now

NONLINEARITIES = ("modrelu", "tanh", "relu")


class Recurrent(nn.Module):
    """Parameters of recurrent layers, whichever cell they run.

    A layer has one or two *directions*, each with a suffix of its own ("_l0", "_l0_reverse"; "" in a cell) and:

    - `weight_ih{suffix}` [G·H, I]: the input weights, one block of H rows for each of the cell's `rows`;
    - `bias{suffix}` [G·H]: in the same order; the block of c is modReLU's threshold, or additive for tanh and relu.

    A subclass adds the recurrent matrices (`_add_recurrent`): those of the letters in `_structured` it makes itself
    (`_matrices`), the rows of the others are `weight_hh_free{suffix}` [F·H, H].
    """

    rows: ClassVar[str]
    reset: ClassVar[Literal["before", "after", "none"]]
    threshold_offset: ClassVar[float] = 0.0
    recompute = False

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool,
        nonlinearity: str,
        backend: str,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.input_size = _checks.positive_int("input_size", input_size, "pass the number of input features")
        self.hidden_size = _checks.positive_int("hidden_size", hidden_size, "pass the number of hidden units")
        self._biased = _checks.flag("bias", bias)
        self.nonlinearity = _checks.one_of("nonlinearity", nonlinearity, NONLINEARITIES)
        self._device = _checks.device(device)
        self._dtype = _checks.weight_dtype(dtype)
        self._layers: list[tuple[str, tuple[str, ...]]] = []
        self._resolved: dict[tuple[str, torch.device, torch.dtype], str] = {}
        self.backend = backend
        self._check_backend()

    def _check_backend(self) -> None:
        """Refuse a backend that cannot run here, though the module may yet have to move to its device."""
        elsewhere = self.backend == "cuda" and self._device.type != "cuda"
        self._resolve(torch.device("cuda") if elsewhere else self._device, self._dtype)

    def _backend_on(self, device: torch.device, dtype: torch.dtype) -> str:
        """The name of the backend that runs this module for tensors of this kind; found out once for each."""
        if torch.compiler.is_compiling():
            return self._resolve(device, dtype)
        asked = self.backend, device, dtype
        found = self._resolved.get(asked)
        if found is None:
            found = self._resolved[asked] = self._resolve(device, dtype)
        return found

    def _resolve(self, device: torch.device, dtype: torch.dtype) -> str:
        choice = resolve_backend(
            self.backend,
            device=device,
            dtype=dtype,
            hidden_size=self.hidden_size,
            reset=self.reset,
            nonlinearity=self.nonlinearity,
        )
        return choice.name

    def _add_layer(self, suffix: str, input_size: int, *, bidirectional: bool) -> None:
        """Register one layer's parameters, uninitialised."""
        directions = (suffix, f"{suffix}_reverse") if bidirectional else (suffix,)
        size = len(self.rows) * self.hidden_size
        for direction in directions:
            self._add_parameter(f"weight_ih{direction}", size, input_size)
            if self._biased:
                self._add_parameter(f"bias{direction}", size)
        self._add_recurrent(suffix, directions)
        self._layers.append((suffix, directions))
        self._wiring = Wiring(self.rows, self._structured, self.hidden_size, self.nonlinearity, self.threshold_offset)

    def _add_parameter(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> None:
        """Register an uninitialised parameter."""
        self.register_parameter(name, nn.Parameter(torch.empty(shape, device=self._device, dtype=dtype or self._dtype)))

    def _add_recurrent(self, suffix: str, directions: tuple[str, ...]) -> None:
        """Register the recurrent parameters of a layer."""
        raise NotImplementedError

    @property
    def _structured(self) -> str:
        """Letters of the recurrent matrices that are made from something else."""
        raise NotImplementedError

    def _matrices(self, suffix: str, directions: tuple[str, ...]) -> Tensor | None:
        """The matrices of `_structured` [D·S, H, H] of a layer, directions outermost; None where there are none."""
        raise NotImplementedError

    def _reading(self, suffix: str) -> Reading | None:
        """What makes the structured matrices of a layer, where kernels can do that as a part of running it."""
        return None

    def _weights(self, suffix: str, directions: tuple[str, ...], reading: Reading | None = None) -> Weights:
        """All parameters of a layer, with the structured matrices made; or what a reading makes them from."""
        some_free = len(self._structured) < len(self.rows)
        return Weights(
            self._matrices(suffix, directions) if reading is None else reading.packed,
            [self._parameter(f"weight_hh_free{direction}") for direction in directions] if some_free else [],
            [self._parameter(f"weight_ih{direction}") for direction in directions],
            [self._parameter(f"bias{direction}") for direction in directions] if self._biased else [],
        )

    def _parameter(self, name: str) -> Tensor:
        """A parameter, or what stands in its place (under `torch.nn.utils.parametrize`); faster than an attribute."""
        found: Tensor | None = self._parameters.get(name)
        return getattr(self, name) if found is None else found

    def _recurrent_weights(self, weights: Weights) -> Sequence[Tensor]:
        """The assembled recurrent matrices [G·H, H] of a layer, one for each direction."""
        count, dtype = len(weights.inputs), weights.inputs[0].dtype
        whole = self._wiring.weight(weights.matrices, weights.free, count, dtype)
        return whole.chunk(count) if count > 1 else [whole]

    def _long(self, name: str) -> Tensor:
        """A parameter in float32 where it has 16 bits: what is assembled from several needs one dtype for all."""
        parameter: Tensor = getattr(self, name)
        return parameter.to(long_dtype(parameter.dtype))

    def _run_layer(
        self,
        input: Tensor,
        initial: Tensor | None,
        suffix: str,
        directions: tuple[str, ...],
        lengths: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """One layer over a whole sequence: [T, B, I] and the states before it [D, B, H] -> [T, B, D·H] and the last."""
        reading = self._reading(suffix)
        weights = self._weights(suffix, directions, reading)
        dtype = self._projected_dtype(input, weights.inputs[0].dtype)
        recompute = self.recompute and torch.is_grad_enabled()
        on_gpu = self._backend_on(input.device, dtype) == "cuda"
        if on_gpu and simply_computes(input, initial, *tensors_of(weights)):
            _checks.reverse_mode(input, initial, *tensors_of(weights))
            kind = kind_now(dtype, self.hidden_size, self.reset, self.nonlinearity)
            return run_layer(self._wiring, kind, input, initial, weights, reading, lengths, recompute)
        if reading is not None:
            weights = weights._replace(matrices=self._matrices(suffix, directions))
        run = self._run_by_operators if on_gpu else self._run_one_by_one
        arguments = (input, initial, weights, directions, lengths)
        output = _run_twice(run, arguments, (input, initial, *tensors_of(weights))) if recompute else run(*arguments)
        return output, final_states(output, len(directions))

    def _projected_dtype(self, input: Tensor, dtype: torch.dtype) -> torch.dtype:
        """The dtype of W x. Autocast is asked about on GPUs alone: only their kernels depend on it."""
        autocast = input.is_cuda and torch.is_autocast_enabled("cuda")
        return torch.get_autocast_dtype("cuda") if autocast and dtype != torch.float64 else dtype

    def _run_by_operators(
        self,
        input: Tensor,
        initial: Tensor | None,
        weights: Weights,
        directions: tuple[str, ...],
        lengths: Tensor | None,
    ) -> Tensor:
        """All directions of a layer by one projection and one launch: what `run_layer` does, as torch can trace it."""
        count, size = len(directions), self.hidden_size
        projected = project(self._wiring, input, weights.inputs, weights.biases)
        if initial is None:
            initial = projected.new_zeros((count, projected.shape[1], size), dtype=torch.float32)
        weight = self._wiring.weight(weights.matrices, weights.free, count, weights.inputs[0].dtype)
        threshold = self._wiring.threshold(weights.biases, weights.inputs)
        _checks.reverse_mode(projected, initial, weight, threshold)
        hidden: Tensor
        hidden, _ = torch.ops.ncgru.recurrence_cuda(
            projected,
            initial,
            weight.view(count, -1, size),
            None if threshold is None else threshold.view(count, size),
            lengths,
            self.reset,
            self.nonlinearity,
            False,
        )
        return hidden.to(projected.dtype)

    def _run_one_by_one(
        self,
        input: Tensor,
        initial: Tensor | None,
        weights: Weights,
        directions: tuple[str, ...],
        lengths: Tensor | None,
    ) -> Tensor:
        """The directions of a layer one after the other, on any backend."""
        states = [None] * len(directions) if initial is None else initial.unbind()
        biases = [weights.biases[d : d + 1] for d in range(len(directions))]
        parts = zip(self._recurrent_weights(weights), weights.inputs, biases, directions, strict=True)
        outputs = [self._run_direction(input, state, *part, lengths) for state, part in zip(states, parts, strict=True)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def _run_direction(
        self,
        input: Tensor,
        initial: Tensor | None,
        weight: Tensor,
        weight_ih: Tensor,
        bias: Sequence[Tensor],
        direction: str,
        lengths: Tensor | None,
    ) -> Tensor:
        """One direction of one layer over a whole sequence: [T, B, I] -> [T, B, H]; `bias` has one tensor or none."""
        projected = project(self._wiring, input, [weight_ih], bias)
        if initial is None:
            initial = projected.new_zeros(projected.shape[1], self.hidden_size)
        threshold = self._wiring.threshold(bias, [weight_ih])
        hidden = recurrence(
            projected,
            _joined(initial, projected),
            _joined(weight, projected),
            None if threshold is None else _joined(threshold, projected),
            lengths,
            reset=self.reset,
            nonlinearity=self.nonlinearity,
            reverse=direction.endswith("_reverse"),
            backend=self.backend,
        )
        return hidden.to(projected.dtype)

    def _check_features(self, name: str, value: Tensor, size: int, meaning: str) -> None:
        """Raise unless `value` is a floating tensor with `size` features, of the weights' device and dtype."""
        if value.dim() == 0 or value.shape[-1] != size:
            raise ValueError(
                f"{name} must have {meaning}={size} as its last dimension, got shape {tuple(value.shape)}; "
                f"reshape it or build the module with that size"
            )
        weight = getattr(self, f"weight_ih{self._layers[0][1][0]}")
        if value.layout is not torch.strided or value.is_nested:
            raise TypeError(
                f"{name} must be a dense tensor, got a sparse or nested one; pass value.to_dense() or pack it"
            )
        if value.device != weight.device:
            raise ValueError(
                f"{name} must be on the module's device {weight.device}, was on {value.device}; move one with .to()"
            )
        if value.dtype != weight.dtype and not _autocast_joins(value, weight):
            raise TypeError(
                f"{name} must have the module's dtype {weight.dtype}, got {value.dtype}; convert one of them with .to()"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to shadow the assembled matrices: what was written there would never be used."""
        if name.startswith("weight_hh") and any(name == f"weight_hh{d}" for _, ds in self._layers for d in ds):
            advice = "call set_weight_hh" if hasattr(self, "set_weight_hh") else "set the parameters it is made of"
            raise AttributeError(f"{name} is assembled from other parameters and cannot be set; {advice}")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """`weight_hh{suffix}` reads as the assembled matrix [G·H, H]; it is no parameter of its own."""
        if name.startswith("weight_hh"):
            for suffix, directions in self.__dict__.get("_layers", ()):
                for index, direction in enumerate(directions):
                    if name == f"weight_hh{direction}":
                        return self._recurrent_weights(self._weights(suffix, directions))[index]
        return super().__getattr__(name)

    def flatten_parameters(self) -> None:
        """Do nothing: it is here because scripts written for `nn.GRU` call it."""

    def extra_repr(self) -> str:
        """The arguments that differ from the defaults, for `print(module)`."""
        return ", ".join([f"{self.input_size}, {self.hidden_size}", *self._repr_options()])

    def _repr_options(self) -> Iterator[str]:
        if not self._biased:
            yield "bias=False"
        if self.backend != "auto":
            yield f"backend={self.backend!r}"
        if self.recompute:
            yield "recompute=True"


def _autocast_joins(value: Tensor, weight: Tensor) -> bool:
    """Whether autocast brings tensors of two dtypes together; it leaves float64 alone."""
    joined = value.is_floating_point() and torch.float64 not in (value.dtype, weight.dtype)
    return joined and torch.is_autocast_enabled(value.device.type)


def _run_twice(run: Callable[..., Tensor], arguments: tuple[Any, ...], tensors: Sequence[Tensor | None]) -> Tensor:
    """`run(*arguments)` now, and again in the backward, which is refused if one of the `tensors` has changed since."""
    if torch.compiler.is_compiling():
        return checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]
    versions = _versions(tensors)

    def checked(*same: Any) -> Tensor:
        if _versions(tensors) != versions:
            raise RuntimeError(
                "a tensor that recompute=True needs in the backward has been modified by an inplace operation since; "
                "call backward() before changing inputs or parameters, or pass recompute=False"
            )
        return run(*same)

    return checkpoint(checked, *arguments, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]


def _versions(tensors: Sequence[Tensor | None]) -> list[int]:
    return [tensor._version for tensor in tensors if tensor is not None and not tensor.is_inference()]


def _joined(value: Tensor, projected: Tensor) -> Tensor:
    """`value` as wide as `projected` at least; float32 where they are of two 16-bit types."""
    return value.to(torch.promote_types(value.dtype, projected.dtype))


def he_uniform_(weight: Tensor, fan_in: int) -> None:
    """Fill `weight` uniformly in ±√(6 / fan_in)."""
    bound = math.sqrt(6 / fan_in)
    nn.init.uniform_(weight, -bound, bound)


def long_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 in the place of the 16-bit types; what A and the matrices made from it are kept in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
