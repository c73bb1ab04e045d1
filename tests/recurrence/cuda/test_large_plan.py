"""The arithmetic of `large.cu`'s launches: everything is covered once, and what must run at once fits."""

from __future__ import annotations

import pytest

from ncgru.recurrence.cuda.kind import Kind, Limits
from ncgru.recurrence.cuda.large import GLOBAL, REGISTERS, SLICE, TILE, Design

H200 = Limits(multiprocessors=132, shared=232448)
A100 = Limits(multiprocessors=108, shared=166912)
CONSUMER = Limits(multiprocessors=84, shared=101376)
TINY = Limits(multiprocessors=3, shared=60000)

SIZES = (1, 16, 17, 129, 200, 256, 430, 512, 1000, 1024, 1150, 1536, 2000, 2048)


def designs(limits: Limits, sizes: tuple[int, ...] = SIZES) -> list[Design]:
    return [
        Design(Kind(hidden, storage, reset, "tanh"), limits, backward)
        for hidden in sizes
        for storage in ("float32", "bfloat16")
        for reset in ("before", "after", "none")
        for backward in (False, True)
    ]


@pytest.mark.parametrize("limits", [H200, A100, CONSUMER, TINY])
def test_launches_cover_every_unit_row_and_direction_once(limits: Limits) -> None:
    for design in designs(limits, (17, 40) if limits == TINY else SIZES):
        for batch in (1, 2, 8, 9, 64, 257, 5000):
            for directions in (1, 2):
                tiles = [
                    (direction, tile)
                    for launch in design.launches(batch, directions)
                    for direction in range(launch.first_direction, launch.first_direction + launch.grid[2])
                    for group in range(launch.grid[1])
                    for tile in range(launch.first + group * launch.tiles, launch.first + (group + 1) * launch.tiles)
                    if tile < -(-batch // TILE)
                ]
                assert sorted(tiles) == [(d, t) for d in range(directions) for t in range(-(-batch // TILE))]
                for launch in design.launches(batch, directions):
                    assert launch.grid[0] * launch.width * SLICE >= design.kind.hidden


@pytest.mark.parametrize("limits", [H200, A100, CONSUMER])
def test_every_launch_can_be_resident_and_has_its_own_exchange(limits: Limits) -> None:
    for design in designs(limits):
        for batch in (1, 64, 5000):
            launches = design.launches(batch, 2)
            taken = 0
            for launch in launches:
                assert launch.exchange == taken
                taken += launch.grid[1] * launch.grid[2] * launch.tiles * 4 * design.vectors * design.pairs * 128
                assert launch.grid[0] * launch.grid[1] * launch.grid[2] <= limits.multiprocessors
                assert design.shared_bytes(launch.width, launch.stack, launch.tiles) <= limits.shared
            assert design.exchange_words(launches) == taken


def test_every_group_of_a_launch_has_rows() -> None:
    for design in designs(H200):
        for batch in range(1, 400, 7):
            for launch in design.launches(batch, 1):
                last = launch.first + (launch.grid[1] - 1) * launch.tiles
                assert last * TILE < batch


def test_matrices_stay_on_the_chip_where_they_fit() -> None:
    held = {hidden: Design(Kind(hidden, "float32", "before", "tanh"), H200, False).held for hidden in SIZES}
    assert GLOBAL not in held[1024]
    assert GLOBAL not in held[1150]
    assert REGISTERS in held[1150]
    assert Design(Kind(2048, "float32", "before", "tanh"), H200, False).streams
    assert not Design(Kind(2048, "bfloat16", "before", "tanh"), H200, False).streams
    assert Design(Kind(1024, "float32", "before", "tanh"), CONSUMER, False).streams


def test_a_gpu_can_be_too_small() -> None:
    assert not Design(Kind(2048, "float32", "before", "tanh"), TINY, False).possible
    assert all(design.possible for limits in (H200, A100, CONSUMER) for design in designs(limits))


def test_both_passes_are_one_program() -> None:
    for forward, backward in zip(*[iter(designs(H200))] * 2, strict=True):
        assert forward.defines == backward.defines


def test_large_batches_take_wide_blocks() -> None:
    design = Design(Kind(512, "bfloat16", "before", "tanh"), H200, False)
    assert [launch.width for launch in design.launches(16, 1)] == [design.narrow]
    assert [launch.width for launch in design.launches(256, 1)] == [design.wide]
    assert design.wide > design.narrow


def test_several_tiles_are_stacked() -> None:
    """As many as a group has, where that many fit, so that none is multiplied for nothing."""
    for hidden, storage, batch, stack in (
        (1024, "float32", 16, 1),
        (1024, "float32", 32, 2),
        (1024, "float32", 64, 4),
        (1150, "float32", 20, 3),
        (512, "float32", 64, 1),
        (512, "bfloat16", 64, 1),
        (1024, "bfloat16", 64, 2),
        (1024, "bfloat16", 256, 2),
    ):
        design = Design(Kind(hidden, storage, "before", "tanh"), H200, False)
        assert {launch.stack for launch in design.launches(batch, 1)} == {stack}, (hidden, storage, batch)


def test_every_launch_has_a_kernel() -> None:
    for design in designs(H200):
        for batch in (1, 9, 17, 33, 64, 257):
            for launch in design.launches(batch, 1):
                assert design.kernels[launch.width, launch.stack] == launch.kernel
