"""Nested states, taken apart and put together through files: nothing changes by a bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ncgru import NCGRU
from ncgru.lab.checkpoint import flatten, load, random_state, restore_random_state, save, unflatten
from ncgru.lab.errors import CheckpointError

Parameters = Iterable[Tensor]
OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adam, lr in a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2), foreach=False),
    "adam, amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, betas=(0.85, 0.99)),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, alpha=0.9, momentum=0.5, centered=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "sgd, momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
}


def through_files(state: object, directory: Path) -> Any:
    """What `state` is after a checkpoint was written and read."""
    tensors, structure = flatten(state, "state")
    save(directory, 1, tensors, {"structure": structure})
    found = load(directory, 1)
    return unflatten(found.tensors, found.meta["structure"])


def same(one: Any, two: Any) -> bool:
    """Whether two states are equal in every type and bit."""
    if type(one) is not type(two):
        return False
    if isinstance(one, Tensor):
        kinds = (one.dtype, one.shape) == (two.dtype, two.shape)
        return kinds and one.reshape(-1).view(torch.uint8).tolist() == two.reshape(-1).view(torch.uint8).tolist()
    if isinstance(one, dict):
        return list(one) == list(two) and all(map(same, one.values(), two.values()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two or (one != one and two != two))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        hidden = model(torch.randn(5, 3, 2))[0]
        (hidden - torch.rand_like(hidden)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    torch.manual_seed(1)
    model = NCGRU(2, 4)
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 3)
    whole = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict(), "random": random_state()}
    state = through_files(whole, tmp_path)
    assert same(state, whole)
    train(model, optimizer, 3)

    torch.manual_seed(2)
    other = NCGRU(2, 4)
    other_optimizer = OPTIMIZERS[name](other.parameters())
    other.load_state_dict(state["model"])
    other_optimizer.load_state_dict(state["optimizer"])
    restore_random_state(state["random"])
    train(other, other_optimizer, 3)
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert same(other_optimizer.state_dict(), optimizer.state_dict())
    assert torch.equal(torch.rand(3), restored_rand(whole, train_steps=3, model=model))


def restored_rand(whole: dict[str, Any], train_steps: int, model: nn.Module) -> Tensor:
    """The random numbers that follow `train_steps` steps after the state `whole`."""
    restore_random_state(whole["random"])
    for _ in range(train_steps):
        hidden = model(torch.randn(5, 3, 2))[0]
        torch.rand_like(hidden)
    return torch.rand(3)


def test_capturable_adam_comes_back(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.rand(3))
    plain = torch.optim.Adam([weight], lr=0.1)
    weight.grad = torch.rand(3)
    plain.step()
    captured = torch.optim.Adam([weight], lr=torch.tensor(0.1), capturable=True)
    captured.load_state_dict(plain.state_dict() | {"param_groups": captured.state_dict()["param_groups"]})
    before = captured.state_dict()
    assert before["state"][0]["step"].dtype == torch.float32
    state = through_files(before, tmp_path)
    assert same(state, before)
    other = torch.optim.Adam([weight], lr=torch.tensor(0.5), capturable=True)
    other.load_state_dict(state)
    assert same(other.state_dict(), before)


def test_generators_come_back(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    torch.rand(7, generator=generator)
    state = through_files({"global": random_state(), "own": generator.get_state()}, tmp_path)
    expected = torch.rand(5), torch.randn(5), torch.rand(5, generator=generator)
    restore_random_state(state["global"])
    generator.set_state(state["own"])
    assert same((torch.rand(5), torch.randn(5), torch.rand(5, generator=generator)), expected)


def leaves() -> st.SearchStrategy[Any]:
    tensors = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3).map(torch.tensor)
    return st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), tensors)


def nested(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.one_of(st.text(max_size=3), st.integers(), st.tuples(st.integers()), st.none())
    lists = st.lists(children, max_size=3)
    return st.one_of(lists, lists.map(tuple), st.dictionaries(keys, children, max_size=3))


@given(st.recursive(leaves(), nested, max_leaves=12))
def test_any_nesting_comes_back(state: object) -> None:
    tensors, structure = flatten(state, "s")
    assert same(unflatten(tensors, json.loads(json.dumps(structure))), state)


def test_names_tell_the_place_and_never_collide() -> None:
    one, two, three = torch.tensor(1), torch.tensor(2), torch.tensor(3)
    state = {"a": {"b": one}, "a.b": two, "list": [three]}
    tensors, structure = flatten(state, "model")
    assert list(tensors) == ["model.a.b", "model.a.b~2", "model.list.0"]
    assert same(unflatten(tensors, structure), state)


def test_a_state_that_looks_like_a_structure_comes_back() -> None:
    state = {
        "tensor": "s.x",
        "x": torch.tensor(1),
        "inner": {"tuple": [1], "dict": [[1, 2]]},
        "other": {"tensor": "s.x"},
    }
    assert same(unflatten(*flatten(state, "s")), state)


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", torch.eye(2).to_sparse(), 1j, torch.ones(1) * 1j])
def test_what_cannot_be_held_is_refused_by_its_place(value: object) -> None:
    with pytest.raises(TypeError, match=r"model\.layers\.1 must be"):
        flatten({"layers": [0, value]}, "model")


@pytest.mark.parametrize(
    "structure",
    [
        {"tensor": "missing"},
        {"tensor": "x", "more": 1},
        {"tensor": ["x"]},
        {"dict": [[1]]},
        {"dict": {"a": 1}},
        {"dict": [[{"dict": []}, 1]]},
        {"dict": [[[1], 1]]},
        {"dict": [[{"tuple": [[1]]}, 1]]},
        {"tuple": 3},
        {"a": 1},
        {},
    ],
    ids=str,
)
def test_a_structure_that_flatten_does_not_make_is_refused(structure: object) -> None:
    with pytest.raises(CheckpointError, match="the structure of a state"):
        unflatten({"x": torch.ones(1)}, structure)


def test_bottomless_structure_is_refused() -> None:
    structure: list[Any] = []
    for _ in range(100_000):
        structure = [structure]
    with pytest.raises(CheckpointError, match="nested too deeply"):
        unflatten({}, structure)
