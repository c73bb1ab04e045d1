"""Products of float32 by two parts of float16, on the emulator, and the arithmetic of their launches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ncgru.recurrence.cuda import product
from ncgru.recurrence.cuda.kind import Limits
from ncgru.recurrence.cuda.product import TILINGS, Operand, Result, Tiling, operand, plan, products, worth
from tests.recurrence.cuda.emulated import H200, Emulated
from tests.recurrence.cuda.proof import assert_norms_close, unwritten_is_nan

LAYOUTS = [(True, True), (True, False), (False, False)]


def matrix(rows: int, columns: int, along: bool, offset: int = 0, gap: int = 0) -> Tensor:
    """Random numbers, rows or columns of which lie together, from an offset on and with gaps, where NaNs lie."""
    shape = (rows, columns) if along else (columns, rows)
    room = torch.full((offset + shape[0] * (shape[1] + gap) + gap,), torch.nan)
    x = room[offset:].as_strided(shape, (shape[1] + gap, 1)).copy_(torch.randn(shape))
    return x if along else x.t()


def made(
    a: Tensor,
    b: Tensor,
    machine: Emulated | None = None,
    out: Tensor | None = None,
    room: int = product.ROOM,
    tilings: tuple[Tiling, ...] = TILINGS,
) -> Tensor:
    """A B by the kernels, with NaN wherever nothing has been written."""
    out = torch.full((a.shape[0], b.shape[1]), torch.nan) if out is None else out
    with unwritten_is_nan():
        result = Result(out, 0, out.stride(0))
        products(machine or Emulated(), a.shape[1], [(operand(a, 1), operand(b, 0), result)], room, tilings)
    return out


def assert_as_exact_as_torch(found: Tensor, a: Tensor, b: Tensor) -> None:
    assert_norms_close("product", found, a.double() @ b.double(), a @ b)


@pytest.mark.parametrize(("a_along", "b_along"), LAYOUTS)
@pytest.mark.parametrize("tiling", TILINGS, ids=lambda tiling: tiling.columns)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (130, 70, 100), (33, 129, 20), (128, 64, 32)])
def test_layouts_and_shapes(m: int, n: int, k: int, tiling: Tiling, a_along: bool, b_along: bool) -> None:
    torch.manual_seed(0)
    a, b = matrix(m, k, a_along), matrix(k, n, not b_along)
    assert_as_exact_as_torch(made(a, b, tilings=(tiling,)), a, b)


@pytest.mark.parametrize(("a_along", "b_along"), LAYOUTS)
@pytest.mark.parametrize(("offset", "gap"), [(1, 0), (2, 2), (4, 3), (0, 4)])
def test_places_in_memory(a_along: bool, b_along: bool, offset: int, gap: int) -> None:
    torch.manual_seed(1)
    a, b, out = (
        matrix(18, 36, a_along, offset, gap),
        matrix(36, 20, not b_along, offset, gap),
        matrix(18, 20, True, offset, gap),
    )
    around = out.untyped_storage().nbytes() // 4 - out.numel()
    assert_as_exact_as_torch(made(a, b, out=out), a, b)
    assert torch.empty(0).set_(out.untyped_storage()).isnan().sum() == around


@pytest.mark.parametrize(("a_along", "b_along"), LAYOUTS)
def test_slices_of_k(a_along: bool, b_along: bool) -> None:
    torch.manual_seed(2)
    a, b = matrix(40, 1500, a_along), matrix(1500, 50, not b_along)
    (part,) = _plan_of(a, b).parts
    assert part.slices > 1
    assert_as_exact_as_torch(made(a, b), a, b)


@pytest.mark.parametrize(("a_along", "b_along"), LAYOUTS)
@pytest.mark.parametrize("slices", [False, True])
def test_parts(a_along: bool, b_along: bool, slices: bool) -> None:
    """Rows of C one part after the other, or stretches of K."""
    torch.manual_seed(3)
    m, k = (300, 70) if a_along else (40, 3000)
    a, b = matrix(m, k, a_along, 3), matrix(k, 24, not b_along, 2)
    machine = Emulated(Limits(132 if slices else 1, 232448))
    room = 4 * m * k // 3
    parts = _plan_of(a, b, room, machine.limits).parts
    assert len(parts) > 2
    assert a_along or slices == (parts[0].slices > 1)
    assert_as_exact_as_torch(made(a, b, machine, room=room), a, b)


def test_parts_of_what_has_zeros_in_front() -> None:
    """Zeros that end within a part, before it and behind it; and behind what is there."""
    torch.manual_seed(4)
    a, b = torch.randn(320, 20), torch.randn(320, 24)
    for before, length in ((40, 280), (100, 100), (0, 250), (320, 0)):
        shifted = torch.zeros(320, 24)
        shifted[before : before + length] = b[:length]
        out = torch.full((20, 24), torch.nan)
        late = Operand(b, 0, 24, length, 24, False, before)
        with unwritten_is_nan():
            problems = [(operand(a.t(), 1), late, Result(out, 0, 24))]
            products(Emulated(), 320, problems, room=4 * 44 * 100)
        assert_as_exact_as_torch(out, a.t(), shifted)


def test_six_products_of_six_operands() -> None:
    torch.manual_seed(5)
    left, right = [torch.randn(50, n) for n in (130, 20, 9)], [torch.randn(50, n) for n in (40, 131, 8)]
    a, b = [operand(x.t(), 1) for x in left], [operand(x, 0) for x in right]
    pairs = [(0, 0), (0, 1), (1, 1), (1, 2), (2, 0), (2, 2)]
    out = torch.full((6, 130 * 131), torch.nan)
    with unwritten_is_nan():
        results = [Result(out, n * out.shape[1], right[j].shape[1]) for n, (_, j) in enumerate(pairs)]
        products(Emulated(), 50, [(a[i], b[j], c) for (i, j), c in zip(pairs, results, strict=True)])
    for row, (i, j) in zip(out, pairs, strict=True):
        size = left[i].shape[1], right[j].shape[1]
        assert_as_exact_as_torch(row[: size[0] * size[1]].view(size), left[i].t(), right[j])
        assert row[size[0] * size[1] :].isnan().all()


@pytest.mark.parametrize("along", [True, False])
def test_the_order_of_threads_does_not_matter(along: bool) -> None:
    torch.manual_seed(6)
    a, b = matrix(70, 400, along), matrix(400, 40, not along)
    first = made(a, b)
    for seed in range(1, 4):
        assert torch.equal(made(a, b, Emulated(seed=seed)), first)


def test_gradients_that_decay_meet_inputs_that_occur_early() -> None:
    """Elementwise as exact as torch's, over 40 powers of two between one step and another."""
    torch.manual_seed(7)
    dz = torch.randn(2000, 20) * torch.exp2(torch.linspace(-40, 0, 2000).floor())[:, None]
    x = torch.zeros(2000, 60)
    x[torch.arange(2000), torch.arange(2000) // 50 + 20 * torch.randint(2, (2000,))] = 1
    for a, b in ((dz.t(), x), (x.t(), dz)):
        truth = a.double() @ b.double()
        sizes = a.double().abs() @ b.double().abs()
        error, usual = (((y - truth).abs() / sizes.clamp(min=1e-300)).max() for y in (made(a, b), a @ b))
        assert error <= 2 * usual + 2**-22
        assert torch.equal(made(a, b)[:, sizes.sum(0) == 0], (a @ b)[:, sizes.sum(0) == 0])


@pytest.mark.parametrize(("a_along", "b_along"), LAYOUTS)
@pytest.mark.parametrize("powers", [(-126, -10), (-90, 90), (90, -90), (-146, 60), (122, -100), (60, -124)])
def test_sizes(a_along: bool, b_along: bool, powers: tuple[int, int]) -> None:
    """Lines of any size, also of zeros alone and of what is too small to be normal."""
    torch.manual_seed(8)
    a, b = matrix(20, 40, a_along), matrix(40, 24, not b_along)
    a.mul_(torch.exp2(torch.randint(-2, 3, (20, 1)).float())).mul_(2.0 ** (powers[0] // 2)).mul_(
        2.0 ** (powers[0] - powers[0] // 2)
    )
    b.mul_(2.0 ** (powers[1] // 2)).mul_(2.0 ** (powers[1] - powers[1] // 2))
    a[3], b[:, 5] = 0, 0
    found, truth = made(a, b), a.double() @ b.double()
    bar = 2**-21 * (a.double().abs() @ b.double().abs()) + 2.0**-148
    assert ((found - truth).abs() <= bar).all()
    assert (found[3] == 0).all()
    assert (found[:, 5] == 0).all()


@pytest.mark.parametrize(("a_along", "b_along"), LAYOUTS)
@pytest.mark.parametrize("what", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_where_it_is(a_along: bool, b_along: bool, what: float) -> None:
    torch.manual_seed(9)
    a, b = matrix(20, 70, a_along), matrix(70, 24, not b_along)
    a[2, 40], b[69, 7], a[5] = what, what, 0
    assert torch.equal(made(a, b).isfinite(), (a @ b).isfinite())
    a, b = a.nan_to_num(1, 1, 1), b.nan_to_num(1, 1, 1)
    a[6, 3] = torch.finfo(torch.float32).max
    assert torch.isfinite(made(a, b * 1e-3)).all()


def test_what_cannot_be_said_is_refused() -> None:
    with pytest.raises(ValueError, match="must lie together"):
        operand(torch.empty(4, 6, 2)[..., 0], 1)
    a, b, c = torch.randn(4, 8), torch.randn(8, 4), torch.empty(2, 4, 4)
    mixed = [
        (operand(a, 1), operand(b, 0), Result(c, 0, 4)),
        (operand(a.t().contiguous().t(), 1), operand(b, 0), Result(c, 16, 4)),
    ]
    with pytest.raises(ValueError, match="alike"):
        products(Emulated(), 8, mixed)
    with pytest.raises(ValueError, match="where columns of A lie together"):
        product.product(Emulated(), mixed[1][0].tensor, b.t().contiguous().t(), c[0])


def _plan_of(a: Tensor, b: Tensor, room: int = product.ROOM, limits: Limits = H200) -> product.Plan:
    shapes = [(x.lines, x.length, x.pitch, x.along_k, x.before, 1) for x in (operand(a, 1), operand(b, 0))]
    return plan(limits, a.shape[1], tuple(shapes), ((0, 1, b.shape[1], 1),), room)


A100 = Limits(multiprocessors=108, shared=166912)


@pytest.mark.parametrize("limits", [H200, A100])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [128, 512, 768, 1000, 1150, 2048])
@pytest.mark.parametrize("count", [1400, 3200, 32768, 131072])
def test_plans(count: int, size: int, layout: tuple[bool, bool], limits: Limits) -> None:
    """All of C and of K, within the room; blocks that fit on a multiprocessor, as many as it is to have."""
    m, n, k = {(True, True): (count, 3 * size, size), (True, False): (count, size, 3 * size)}.get(
        layout, (3 * size, size, count)
    )
    shapes = (m, k, k if layout[0] else m, layout[0], 0, 4), (n, k, k if layout[1] else n, layout[1], 0, 4)
    found = plan(limits, k, shapes, ((0, 1, n, 4),))
    padded = -(-k // 32) * 32
    kept = min(4 * (m + n) * padded, product.ROOM + 4 * n * padded * layout[0])
    parts = max(4 * m * n * part.slices if part.slices > 1 else 0 for part in found.parts)
    assert found.room <= 1.05 * kept + parts + 2**22
    rows, steps = 0, 0
    for part in found.parts:
        along, blocks = -(-n // part.defines["TILE_N"]), part.defines["BLOCKS"]
        *_, stages, share, more = product._REST.unpack(part.problems[-product._REST.size :])
        assert part.grid == (-(-_rows_of(part) // 128) * along, part.slices, 1)
        assert (part.slices - 1) * share < stages <= part.slices * share
        assert more == (not layout[0] and steps > 0)
        assert blocks * (part.shared + 1024) <= limits.shared + 1024
        assert part.outs == (4 * n * rows if layout[0] else 0,)
        assert part.sources == ((4 * rows * k, 0) if layout[0] else (4 * 32 * steps * m, 4 * 32 * steps * n))
        rows, steps = (rows + _rows_of(part), stages) if layout[0] else (m, steps + stages)
    assert (rows, steps) == (m, padded // 32)


def _rows_of(part: product._Part) -> int:
    rows: int = product._PROBLEM.unpack_from(part.problems)[6]
    return rows


def test_small_tiles_where_large_ones_leave_multiprocessors_idle() -> None:
    def columns(m: int, n: int, k: int) -> int:
        found = plan(H200, k, ((m, k, k, True, 0, 4), (n, k, k, True, 0, 4)), ((0, 1, n, 4),))
        return found.parts[0].defines["TILE_N"]

    assert columns(32768, 3072, 1024) == 128
    assert columns(3200, 3000, 1000) == 64


def test_when_it_is_worth_it() -> None:
    assert worth(H200, (32768, 3072, 1024))
    assert worth(H200, (1150, 1150, 1400), (3450, 1150, 1400))
    assert not worth(H200, (1150, 1150, 1400))
    assert not worth(H200, (32768, 3072, 100))
    assert not worth(Limits(84, 101376, fast_halves=False), (32768, 3072, 1024))
