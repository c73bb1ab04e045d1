"""Batches are a pure function of seed, stream and position, on any device, for any rank."""

from __future__ import annotations

import pytest
import torch

from ncgru.lab.tasks import Adding, Batch, Copying, Denoise, Parenthesis, Task
from ncgru.lab.tasks.counter import sequence_keys, stream_key
from tests.lab.tasks.synthetic_tasks import MAKERS

ALL = pytest.mark.parametrize("kind", list(MAKERS))


def _equal(first: Batch, second: Batch) -> bool:
    return torch.equal(first.inputs, second.inputs) and torch.equal(first.targets, second.targets)


@ALL
def test_a_position_gives_the_same_batch_whatever_came_before(kind: str) -> None:
    task = MAKERS[kind](12)
    source = task.source("train", batch_size=4, seed=9)
    straight = [source.batch(k) for k in range(6)]
    fresh = task.source("train", batch_size=4, seed=9)
    for k in (5, 0, 3):
        assert _equal(fresh.batch(k), straight[k])


@ALL
def test_seeds_splits_and_positions_differ(kind: str) -> None:
    task = MAKERS[kind](12)
    batches = [
        task.source("train", batch_size=4, seed=0).batch(0),
        task.source("train", batch_size=4, seed=0).batch(1),
        task.source("train", batch_size=4, seed=1).batch(0),
        task.source("test", batch_size=4, seed=0).batch(0),
    ]
    for k, batch in enumerate(batches):
        assert not any(torch.equal(batch.inputs, other.inputs) for other in batches[:k])


@ALL
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_together_have_the_joint_batch(kind: str, world_size: int) -> None:
    task = MAKERS[kind](12)
    joint = task.source("train", batch_size=12, seed=3).batch(4)
    parts = [
        task.source("train", batch_size=12, seed=3, rank=rank, world_size=world_size).batch(4)
        for rank in range(world_size)
    ]
    assert torch.equal(torch.cat([part.inputs for part in parts], 1), joint.inputs)
    assert torch.equal(torch.cat([part.targets for part in parts], 1), joint.targets)


@ALL
def test_batch_sizes_walk_through_the_same_sequences(kind: str) -> None:
    task = MAKERS[kind](12)
    small = task.source("train", batch_size=3)
    large = task.source("train", batch_size=6).batch(1)
    assert torch.equal(torch.cat([small.batch(2).inputs, small.batch(3).inputs], 1), large.inputs)


@ALL
def test_several_seeds_side_by_side(kind: str) -> None:
    task = MAKERS[kind](12)
    together = task.source("train", batch_size=4, seed=[5, 2]).batch(7)
    first, second = (task.source("train", batch_size=4, seed=seed).batch(7) for seed in (5, 2))
    assert torch.equal(together.inputs, torch.cat([first.inputs, second.inputs], 1))
    assert torch.equal(together.targets, torch.cat([first.targets, second.targets], 1))


@ALL
def test_the_position_may_be_a_tensor_that_changes_in_place(kind: str) -> None:
    source = MAKERS[kind](12).source("train", batch_size=4)
    position = torch.zeros((), dtype=torch.int64)
    for k in range(3):
        assert _equal(source.batch(position), source.batch(k))
        position += 1


@ALL
def test_one_graph_serves_all_positions(kind: str) -> None:
    source = MAKERS[kind](12).source("train", batch_size=4)
    compiled = torch.compile(source.batch, fullgraph=True, backend="eager")
    for k in (0, 1, 50):
        assert _equal(compiled(torch.tensor(k)), source.batch(k))


@ALL
def test_everything_happens_on_the_device_and_no_value_is_read(kind: str) -> None:
    # A meta tensor has no values: reading one, or mixing it with a tensor of the host, raises.
    task = MAKERS[kind](12)
    source = task.source("train", batch_size=4, device="meta")
    inputs, targets = source.batch(torch.zeros((), dtype=torch.int64, device="meta"))
    outputs = torch.zeros(*targets.shape[:2], task.output_size, device="meta")
    assert {inputs.device.type, targets.device.type} == {"meta"}
    assert {value.device.type for value in task.metrics(outputs, targets).values()} == {"meta"}


@ALL
def test_dtype_of_the_inputs(kind: str) -> None:
    task = MAKERS[kind](12)
    single = task.source("train", batch_size=4).batch(0).inputs
    double = task.source("train", batch_size=4, dtype=torch.float64).batch(0).inputs
    assert double.dtype == torch.float64
    assert torch.equal(single.double(), double)


@ALL
def test_sequences_can_be_made_from_their_keys(kind: str) -> None:
    task = MAKERS[kind](12)
    keys = sequence_keys(stream_key(torch.tensor(1), "test"), torch.tensor([2, 0]))
    some = task.generate(keys)
    first = task.source("test", batch_size=4, seed=1).batch(0)
    assert torch.equal(some.inputs, first.inputs[:, [2, 0]])


@pytest.mark.parametrize("task", [Adding(length=5, train_size=12), Copying(length=3, train_size=12)])
def test_a_fixed_training_set_comes_round_in_the_same_order(task: Task) -> None:
    source = task.source("train", batch_size=4)
    assert source.batches_per_epoch == 3
    assert source.epoch_start(2) == 6
    assert _equal(source.batch(1), source.batch(7))
    assert not _equal(source.batch(0), source.batch(1))


def test_a_fixed_set_that_is_no_whole_number_of_batches_wraps_within_a_batch() -> None:
    source = Adding(length=5, train_size=6).source("train", batch_size=4)
    assert source.batches_per_epoch == 2
    assert torch.equal(source.batch(1).inputs[:, 2:], source.batch(0).inputs[:, :2])


@pytest.mark.parametrize(
    ("task", "train", "test"),
    [
        (Adding(), 2000, 200),
        (Copying(), None, 20),
        (Copying(train_size=20_000), 400, 20),
        (Parenthesis(), None, 32),
        (Denoise(test_size=1000), None, 20),
    ],
)
def test_sizes_of_the_sets(task: Task, train: int | None, test: int) -> None:
    assert task.source("train", batch_size=50).batches_per_epoch == train
    assert task.source("test", batch_size=50).batches_per_epoch == test


def test_synthetic_batches_start_anew_at_an_unscaled_rate() -> None:
    source = Parenthesis(length=3).source("train", batch_size=2)
    assert not source.continues(5)
    assert source.learning_rate_scale(5) == 1.0


def test_names() -> None:
    assert Parenthesis(length=200).name == "parenthesis-200"
    assert Denoise(length=400).name == "denoise-400"
    assert Denoise(variant="corrected").name == "denoise-corrected-200"
    assert Adding(length=400).name == "adding-400"
    assert Copying(length=2000).name == "copying-2000"
