"""Orthogonal weights for any module: the map from a free vector to an orthogonal matrix, with the state it needs.

Shapes: n matrix size, m = n(n-1)/2.
"""

from __future__ import annotations

import functools
import math
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ncgru import _checks
from ncgru._eager import simply_computes
from ncgru.orthogonal.cayley import (
    LARGEST_ENTRY,
    inverse_cayley,
    inverse_for_signs,
    nearest_orthogonal,
    orthogonality_limit,
    require_finite,
    require_real,
    skew_part,
)
from ncgru.orthogonal.cuda import State, usable
from ncgru.orthogonal.inverse import (
    METHODS,
    exact_inverse,
    no_autocast,
    orthogonal_from_inverse,
    seal_of,
    units,
)
from ncgru.orthogonal.reading import Reading, read
from ncgru.orthogonal.skew import (
    INITS,
    haar_orthogonal,
    henaff_rotations,
    pack,
    packed_size,
    require_square,
    scornn_packed,
    unpack,
)

M = TypeVar("M", bound=nn.Module)

_state_in: Callable[[dict[str, Tensor | None]], tuple[Tensor, ...]] = operator.itemgetter(*State._fields)
"""The state out of a module's dictionary of buffers."""


class ScaledCayley(nn.Module):
    """The scaled Cayley map U = (I+A)^-1 (I-A) D from n(n-1)/2 free numbers, with the state that follows the inverse.

    It holds no parameter: the vector is the caller's (or `torch.nn.utils.parametrize`'s), and so is its optimiser. A
    read with a vector that has moved brings the state up to date once; a read with the same vector gives the same bits.

    Args:
        size: n.
        batch_shape: shape of a batch of matrices that are followed together.
        negatives: number of -1's in D, one for all matrices or one for each; they stand last. None: size // 2.
        inverse: "hyperpower", "neumann" (Algorithm 1 of the paper) or "exact".
        order: order of the series, at least 1.
        reset_every: every so many updates the inverse is exact. None: never, but for the guard.
        device: where the state lives.
        dtype: torch.float32 or torch.float64; None is PyTorch's default.

    Buffers, all part of the state dict:
        anchor `[*batch, m]`, inverse and matrix `[*batch, n, n]`: A, (I+A)^-1 and U as last read.
        signs `[*batch, n]`: the diagonals of D.
        updates, refreshes `[*batch]`: how often A has moved, and how often the guard then had to invert exactly.
        seal `[*batch]`: a sum over the bits of the state, which shows if anybody else has written to it.
    """

    anchor: Tensor
    inverse: Tensor
    matrix: Tensor
    signs: Tensor
    updates: Tensor
    refreshes: Tensor
    seal: Tensor

    def __init__(
        self,
        size: int,
        batch_shape: Sequence[int] = (),
        *,
        negatives: int | Sequence[int] | None = None,
        inverse: str = "hyperpower",
        order: int = 2,
        reset_every: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.size = _checks.positive_int("size", size, "pass the number of rows of the matrix")
        self.batch_shape = _checked_batch_shape(batch_shape)
        self.method = _checks.one_of("inverse", inverse, METHODS)
        self.order = _checks.positive_int("order", order, "pass 1, 2 (the paper's), 3, ...")
        if reset_every is not None:
            _checks.positive_int("reset_every", reset_every, "pass None for no exact inverse by the count")
        self.reset_every = reset_every
        chosen = _checks.weight_dtype(dtype)
        if chosen not in (torch.float32, torch.float64):
            raise TypeError(f"dtype must be torch.float32 or torch.float64, got {chosen}; 16 bits cannot hold U'U = I")
        self._initial_negatives = _checked_negatives(negatives, self.size, math.prod(self.batch_shape))
        self._register_state(_checks.device(device), chosen)

    def _register_state(self, device: torch.device, dtype: torch.dtype) -> None:
        """The state of A = 0: Ã = I and U = D."""
        batch, n = self.batch_shape, self.size
        signs = self._initial_signs(device, dtype)
        identity = torch.eye(n, device=device, dtype=dtype)
        self.register_buffer("anchor", torch.zeros(*batch, packed_size(n), device=device, dtype=dtype))
        self.register_buffer("inverse", identity.repeat(*batch, 1, 1))
        self.register_buffer("matrix", torch.diag_embed(signs))
        self.register_buffer("signs", signs)
        self.register_buffer("updates", torch.zeros(batch, device=device, dtype=torch.int64))
        self.register_buffer("refreshes", torch.zeros(batch, device=device, dtype=torch.int64))
        self.register_buffer("seal", seal_of(self.anchor, self.inverse, self.matrix, signs))

    def _initial_signs(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        # On the CPU whatever the default device is: on "meta" there would be no values to take along.
        counts = torch.tensor(self._initial_negatives, dtype=torch.int64, device="cpu").reshape(*self.batch_shape, 1)
        positive = torch.arange(self.size, device="cpu") < self.size - counts
        return torch.where(positive, 1.0, -1.0).to(device=device, dtype=dtype)

    @property
    def negatives(self) -> tuple[int, ...]:
        """How many -1's the D of each matrix has now; an assigned matrix may have needed others than asked for."""
        return tuple((self.signs < 0).sum(-1).reshape(-1).tolist())

    def forward(self, packed: Tensor) -> Tensor:
        """U `[*batch, n, n]` of the packed A's `[*batch, m]`, first bringing the state up to date if they have moved.

        A 16-bit `packed` is read as the state's dtype, and U returned in the 16-bit one.
        """
        state = self._state()
        self._check_packed(packed, state.anchor)
        _checks.reverse_mode(packed)
        dtype = packed.dtype
        if dtype == state.anchor.dtype:
            return read(Reading(packed, state, self.method, self.order, self.reset_every or 0))
        wide = packed.to(state.anchor.dtype)
        return read(Reading(wide, state, self.method, self.order, self.reset_every or 0)).to(dtype)

    def reading(self, packed: Tensor) -> Reading | None:
        """What `forward(packed)` would do, for a caller that does it as a part of its own; None where it has to call.

        It has to where kernels cannot run, where torch does more than compute, or where hooks want to see the call.
        """
        if not simply_computes(packed) or self._hooked:
            return None
        state = self._state()
        if packed.dtype != state.anchor.dtype or not usable(packed, state):
            return None
        self._check_packed(packed, state.anchor)
        return Reading(packed, state, self.method, self.order, self.reset_every or 0)

    @property
    def _hooked(self) -> bool:
        hooks = self._forward_hooks, self._forward_pre_hooks, self._backward_hooks, self._backward_pre_hooks
        return any(hooks) or nn.modules.module._has_any_global_hook()

    def _state(self) -> State:
        if torch.compiler.is_compiling():
            return State(self.anchor, self.inverse, self.matrix, self.signs, self.updates, self.refreshes, self.seal)
        # A module looks for an attribute in three places, which takes longer than all else that is done on the host.
        return State._make(_state_in(self._buffers))

    def right_inverse(self, matrix: Tensor) -> Tensor:
        """The packed A's of `matrix`, the state set to match: what `module.weight = matrix` calls.

        A matrix that is not orthogonal is replaced by the nearest that is, with a warning that says how far it was; use
        `assign` to get that number instead. Assigning what was last read changes nothing.
        """
        require_real("matrix", matrix)
        if self.anchor.is_meta:
            return torch.empty_like(self.anchor)
        same_kind = (matrix.dtype, matrix.device) == (self.matrix.dtype, self.matrix.device)
        if same_kind and torch.equal(matrix, self.matrix):
            return self.anchor.clone()
        packed, distance = self.assign(matrix)
        farthest = distance.max().item() if distance.numel() else 0.0
        if farthest > orthogonality_limit(self.matrix):
            warnings.warn(
                "the assigned matrix is not orthogonal: the nearest orthogonal one took its place, "
                f"{farthest:.3g} away (Frobenius norm); assign an orthogonal matrix, or call assign(matrix) to get the "
                "distance instead",
                stacklevel=2,
            )
        return packed

    @torch.no_grad()
    def assign(self, matrix: Tensor, which: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """Set the state to the orthogonal matrices nearest to `matrix`.

        The present D is kept where it gives a well-conditioned A (no entry above √2); elsewhere another is found.

        Args:
            matrix: `[*batch, n, n]`, float32 or float64, on any device; [len(which), n, n] with `which`.
            which: the places, in the flattened batch, of the matrices to set; the others keep their state bit for bit.

        Returns:
            The packed A's `[*batch, m]`, and the Frobenius distances of the nearest orthogonal matrices `[*batch]`; of
            the matrices in `which` alone where it is given.

        Raises:
            TypeError: `matrix` is not a float32 or float64 tensor.
            ValueError: `matrix` has another shape, or holds NaN or infinity.
        """
        require_real("matrix", matrix)
        n = self.size
        batch = self.batch_shape if which is None else (len(which),)
        _checks.shape("matrix", matrix, (*batch, n, n), "[*batch, n, n]" if which is None else "[len(which), n, n]")
        require_finite("matrix", matrix)
        places = list(range(self.updates.numel())) if which is None else self._checked_places(which)
        orthogonal, distance = nearest_orthogonal(matrix.detach().to(torch.float64).reshape(-1, n, n))
        signs = units(self.signs.reshape(-1, n)[places]).to(orthogonal)
        skew = inverse_for_signs(orthogonal, signs)
        kept = skew.abs().amax((-2, -1)) <= LARGEST_ENTRY  # also false for NaN
        skew = skew_part(skew)
        if not bool(kept.all()):
            found_skew, found_signs = inverse_cayley(orthogonal)
            skew = torch.where(kept[..., None, None], skew, found_skew)
            signs = torch.where(kept[..., None], signs, found_signs)
        packed = self._set_state(pack(skew), signs, places)
        return packed.reshape(*batch, packed_size(n)), distance.to(self.matrix).reshape(batch)

    @torch.no_grad()
    def sample(self, init: str = "cayley", generator: torch.Generator | None = None) -> Tensor:
        """An initial value for the packed A's `[*batch, m]`, the state set to match and its counts set to zero.

        Args:
            init: "cayley": scoRNN's, rotations by angles uniform in (0, π/2), times the D asked for at construction.
                "henaff": rotations by angles uniform in (-π, π). "haar": uniform over all orthogonal matrices.
                For the last two the D asked for at construction is taken where it fits, else one is found.
            generator: source of randomness; None is PyTorch's. Numbers are drawn on its device (None: on the CPU).
        """
        _checks.one_of("init", init, INITS)
        if self.anchor.is_meta:
            return torch.empty_like(self.anchor)
        self.updates.zero_()
        self.refreshes.zero_()
        self.signs.copy_(self._initial_signs(self.signs.device, self.signs.dtype))
        if init == "cayley":
            drawn = scornn_packed(self.size, self.batch_shape, generator=generator)
            places = list(range(self.updates.numel()))
            signs = self.signs.reshape(-1, self.size).clone()
            self._set_state(drawn.reshape(len(places), packed_size(self.size)), signs, places)
            return self.anchor.clone()
        draw = henaff_rotations if init == "henaff" else haar_orthogonal
        return self.assign(draw(self.size, self.batch_shape, generator=generator))[0]

    def _checked_places(self, which: Sequence[int]) -> list[int]:
        count = self.updates.numel()
        if not all(isinstance(place, int) and 0 <= place < count for place in which):
            raise ValueError(f"which must hold places from 0 to {count - 1}, got {list(which)}; count matrices from 0")
        return list(which)

    def _set_state(self, packed: Tensor, signs: Tensor, places: list[int]) -> Tensor:
        """Store A and D with the exact inverse at these places of the flattened batch, and return A as it is stored."""
        anchor = self.anchor.view(self.updates.numel(), packed_size(self.size))
        anchor[places] = packed.to(self.anchor)
        self.signs.view(-1, self.size)[places] = signs.to(self.signs)
        self._invert(places)
        return anchor[places]

    def _invert(self, places: list[int]) -> None:
        n = self.size
        skew = unpack(self.anchor.view(self.updates.numel(), packed_size(n))[places], n)
        inverse = exact_inverse(skew)
        signs = units(self.signs.view(-1, n)[places])
        self.signs.view(-1, n)[places] = signs
        self.inverse.view(-1, n, n)[places] = inverse
        with no_autocast(inverse.device):
            self.matrix.view(-1, n, n)[places] = orthogonal_from_inverse(inverse, skew, signs, self.method)
        self.seal.copy_(seal_of(self.anchor, self.inverse, self.matrix, self.signs))

    def _check_packed(self, packed: Tensor, anchor: Tensor) -> None:
        _checks.tensor("packed", packed, "pass the vector of the skew-symmetric matrix")
        if packed.shape != anchor.shape:
            _checks.shape("packed", packed, (*self.batch_shape, packed_size(self.size)), "[*batch, n(n-1)/2]")
        if packed.dtype not in (anchor.dtype, torch.float16, torch.bfloat16):
            raise TypeError(
                f"packed must be {anchor.dtype} as the state of this ScaledCayley, or 16-bit floating point, got "
                f"{packed.dtype}; convert both with .to(dtype)"
            )
        if packed.device != anchor.device:
            raise ValueError(
                f"packed must be on {anchor.device} as the state of this ScaledCayley, got {packed.device}; "
                "move both with .to(device)"
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ScaledCayley:
        """Moves and conversions, but never to 16 bits: `.half()` leaves the state as precise as it is."""
        before = self.anchor.dtype

        def keep_precision(tensor: Tensor) -> Tensor:
            out = fn(tensor)
            narrow = out.is_floating_point() and out.dtype not in (torch.float32, torch.float64)
            return tensor.to(out.device) if narrow else out

        super()._apply(keep_precision, recurse)  # type: ignore[no-untyped-call]
        if self.anchor.dtype != before and not self.anchor.is_meta:
            # The old digits are not enough for float64, and A's rounding to float32 has moved U.
            with torch.no_grad():
                self._invert(list(range(self.updates.numel())))
        return self

    def extra_repr(self) -> str:
        """What was asked for at construction, but D's -1's as they are now."""
        counts = self._initial_negatives if self.signs.is_meta else self.negatives
        shown = str(counts[0]) if len(set(counts)) == 1 else str(counts)
        parts = [str(self.size)]
        parts += [f"batch_shape={self.batch_shape}"] if self.batch_shape else []
        parts += [
            f"negatives={shown}",
            f"inverse={self.method!r}",
            f"order={self.order}",
            f"reset_every={self.reset_every}",
        ]
        return ", ".join(parts)


def orthogonal(
    module: M,
    name: str = "weight",
    *,
    negatives: int | Sequence[int] | None = None,
    inverse: str = "hyperpower",
    order: int = 2,
    reset_every: int | None = None,
    init: str | None = None,
) -> M:
    """Keep a square weight of `module` orthogonal from now on, whatever optimiser trains it.

    The weight becomes a `torch.nn.utils.parametrize` parametrisation: `module.name` reads as the orthogonal matrix, its
    trainable numbers are in `module.parametrizations.name.original`, and `module.name = matrix` assigns another one.

    Args:
        module: the module, changed in place.
        name: its weight, square [n, n] or a batch [..., n, n] of which every matrix is made orthogonal.
        negatives: number of -1's in D, one for all or one for each matrix; None: n // 2. Where the present weight needs
            other signs, they are found.
        inverse: "hyperpower", "neumann" or "exact", see `ScaledCayley`.
        order: order of the series.
        reset_every: every so many updates the inverse is exact; None: never, but for the guard.
        init: None starts from the orthogonal matrix nearest to the present weight; "cayley", "henaff" and "haar" draw.

    Returns:
        The module.

    Raises:
        TypeError: an argument of the wrong type, or a weight that is not float32 or float64.
        ValueError: no such parameter; a weight that is not square, not finite or already parametrised; a bad option.
    """
    weight = _checked_weight(module, name)
    if init is not None:
        _checks.one_of("init", init, INITS)
    cayley = ScaledCayley(
        weight.shape[-1],
        tuple(weight.shape[:-2]),
        negatives=negatives,
        inverse=inverse,
        order=order,
        reset_every=reset_every,
        device=weight.device,
        dtype=weight.dtype,
    )
    if not weight.is_meta:
        if init is None:
            cayley.assign(weight)
        else:
            cayley.sample(init)
        with torch.no_grad():
            weight.copy_(cayley.matrix)
    cayley.train(module.training)
    parametrize.register_parametrization(module, name, cayley)
    if isinstance(module, nn.RNNBase):
        _keep_flat_weights_fresh(module, name)
    return module


def _keep_flat_weights_fresh(module: nn.RNNBase, name: str) -> None:
    """nn.RNN and its kin run on a list of weights made once: put the present U into it for the time of each forward."""
    place = module._flat_weights_names.index(name)
    module.register_forward_pre_hook(functools.partial(_fill_flat_weight, name=name, place=place))
    module.register_forward_hook(functools.partial(_empty_flat_weight, name=name, place=place), always_call=True)
    _empty_flat_weight(module, name=name, place=place)


def _fill_flat_weight(module: nn.RNNBase, _inputs: Any, *, name: str, place: int) -> None:
    module._flat_weights[place] = getattr(module, name)


def _empty_flat_weight(module: nn.RNNBase, *_inputs_and_output: Any, name: str, place: int) -> None:
    """A result left in the list would keep its graph alive, and forbid deep copies."""
    if parametrize.is_parametrized(module, name):
        module._flat_weights[place] = None


def _checked_weight(module: nn.Module, name: str) -> nn.Parameter:
    """The parameter that can be made orthogonal, else an error that says why not."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"module must be a torch.nn.Module, got {type(module).__name__}; pass the module that owns the weight"
        )
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {type(name).__name__}; pass the weight's attribute name")
    if parametrize.is_parametrized(module, name):
        raise ValueError(
            f"name={name!r} is already parametrised; first call "
            f"torch.nn.utils.parametrize.remove_parametrizations(module, {name!r})"
        )
    weight = dict(module.named_parameters(recurse=False)).get(name)
    if weight is None:
        known = ", ".join(repr(key) for key, _ in module.named_parameters(recurse=False)) or "none"
        raise ValueError(
            f"name must be a parameter of {type(module).__name__} itself ({known}), got {name!r}; pass one of these"
        )
    if nn.parameter.is_lazy(weight):
        raise ValueError(f"name={name!r} is a parameter without a shape yet; run a first forward pass before")
    require_real(name, weight)
    require_square(name, weight)
    if not weight.is_meta:
        require_finite(name, weight)
    return weight


def _checked_batch_shape(batch_shape: Sequence[int]) -> tuple[int, ...]:
    advice = "pass a tuple of ints, () for a single matrix"
    if isinstance(batch_shape, (str, int)) or not isinstance(batch_shape, Sequence):
        raise TypeError(f"batch_shape must be a sequence of ints, got {batch_shape!r}; {advice}")
    for length in batch_shape:
        _checks.positive_int("every length in batch_shape", length, advice)
    return tuple(batch_shape)


def _checked_negatives(negatives: int | Sequence[int] | None, size: int, count: int) -> tuple[int, ...]:
    """One count of -1's for each matrix."""
    if negatives is None:
        return (size // 2,) * count
    counts = (negatives,) * count if isinstance(negatives, int) else negatives
    if isinstance(counts, str) or not isinstance(counts, Sequence):
        raise TypeError(
            f"negatives must be an int or a sequence of ints, got {negatives!r}; pass the number of -1's in D"
        )
    if len(counts) != count:
        raise ValueError(
            f"negatives must have one number for each of {count} matrices, got {len(counts)}; or pass one int"
        )
    for number in counts:
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(
                f"negatives must be an int or a sequence of ints, got {number!r}; pass the number of -1's in D"
            )
        if not 0 <= number <= size:
            raise ValueError(f"negatives must be between 0 and size={size}, got {number}; pass the number of -1's in D")
    return tuple(counts)
