"""The released code's update: against the update written out in NumPy, and how far it drifts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ncgru import NCGRU, diagnostics
from ncgru.lab import recipes
from ncgru.lab.models import build_model
from ncgru.lab.optim import Optimizers
from ncgru.lab.recipes import Recipe
from ncgru.lab.released import ReleasedCayley, follow_as_released
from ncgru.orthogonal import pack

SIZE, NEGATIVES, RESET, LR, ADAM_LIKE = 5, 2, 4, 1e-3, 0.05


class Published:
    """The update for U_r and U_c as the published scripts make it, in float64; A moves by a step of its own size."""

    def __init__(self, skews: list[np.ndarray]) -> None:
        self.skews = skews
        self.signs = np.diag([1.0] * (SIZE - NEGATIVES) + [-1.0] * NEGATIVES)
        self.inverses = [np.linalg.inv(np.eye(SIZE) + skew) for skew in skews]
        self.matrices = [self.matrix(k) for k in range(len(skews))]
        self.iteration = 0

    def matrix(self, k: int) -> np.ndarray:
        return np.asarray(self.inverses[k] @ (np.eye(SIZE) - self.skews[k]) @ self.signs)

    def update(self, gradient_of_r: np.ndarray) -> None:
        series_start = None
        for k in reversed(range(len(self.skews))):  # c before r
            v = self.inverses[k].T @ gradient_of_r @ (self.signs + self.matrices[k].T)
            slope = v.T - v
            self.skews[k] = self.skews[k] - ADAM_LIKE * slope
            start = self.inverses[k] if series_start is None else series_start
            ratio = start @ (LR * slope)
            series = (np.eye(SIZE) + ratio + ratio @ ratio) @ start
            exact = self.iteration % RESET == 0
            self.inverses[k] = np.linalg.inv(np.eye(SIZE) + self.skews[k]) if exact else series
            self.matrices[k] = self.matrix(k)
            series_start = self.inverses[k]
        self.iteration += 1


def module_and_truth(count: int, weight_decay: float = 0.0) -> tuple[ReleasedCayley, nn.Parameter, Published]:
    cayley = ReleasedCayley(
        SIZE, count, negatives=(NEGATIVES,) * count, order=2, reset_every=RESET, lr=LR, weight_decay=weight_decay
    )
    cayley.double()
    packed = nn.Parameter(cayley.sample(generator=torch.Generator().manual_seed(3)) * 1.0)
    packed.data += 0.3
    cayley.anchor.copy_(packed.detach())
    cayley._invert(list(range(count)))
    return cayley, packed, Published([unpacked(row) for row in packed.detach()])


def unpacked(row: Tensor) -> np.ndarray:
    skew = np.zeros((SIZE, SIZE))
    skew[np.triu_indices(SIZE, 1)] = row.numpy()
    return skew - skew.T


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_it_is_the_published_update(count: int, weight_decay: float) -> None:
    decay = weight_decay if count == 2 else 0.0
    cayley, packed, truth = module_and_truth(count, decay)
    slopes = torch.from_numpy(np.random.default_rng(0).normal(size=(11, count, SIZE, SIZE)))
    optimizer = torch.optim.SGD([packed], lr=ADAM_LIKE)
    for slope in slopes:
        matrices = cayley(packed)
        np.testing.assert_allclose(matrices.detach().numpy(), np.stack(truth.matrices), atol=1e-12)
        packed.grad = None
        (matrices * slope).sum().backward()
        optimizer.step()
        truth.update(slope[0].numpy() + decay * truth.matrices[0])
    np.testing.assert_allclose(pack(torch.from_numpy(np.stack(truth.skews))).numpy(), packed.detach().numpy())
    assert cayley.updates.tolist() == [len(slopes) - 1] * count


def test_a_second_read_changes_nothing() -> None:
    cayley, packed, _ = module_and_truth(2)
    (cayley(packed) * torch.randn(2, SIZE, SIZE, dtype=torch.float64)).sum().backward()
    torch.optim.SGD([packed], lr=ADAM_LIKE).step()
    first = cayley(packed)
    assert torch.equal(cayley(packed), first)
    assert cayley.updates.tolist() == [1, 1]


def test_a_gradient_that_is_gone_is_an_error() -> None:
    cayley, packed, _ = module_and_truth(1)
    cayley(packed).sum().backward()
    packed.data += 1e-3
    packed.grad = None
    with pytest.raises(RuntimeError, match="clear gradients after the forward pass"):
        cayley(packed)


@pytest.mark.parametrize("letters", ["r", "ruc"])
def test_there_is_no_released_code_for_other_matrices(letters: str) -> None:
    with pytest.raises(ValueError, match="orthogonal='c' or 'rc'"):
        follow_as_released(NCGRU(3, 4, orthogonal=letters), 1e-3)


def drift(recipe: Recipe, steps: int) -> dict[str, list[float]]:
    """‖UᵀU - I‖ of each matrix before every step of a training."""
    model = build_model(recipe)
    source = recipe.task.source("train", batch_size=recipe.batch_size)
    optimizers = Optimizers(recipe.optimizer, model.skew_parameters(), model.other_parameters(), torch.device("cpu"))
    errors: dict[str, list[float]] = {}
    for step in range(steps):
        batch = source.batch(step)
        output = model(batch.inputs)
        for name, error in diagnostics.orthogonality_error(model).items():
            errors.setdefault(name.rpartition(".")[2], []).append(error.item())
        for parameter in model.parameters():
            parameter.grad = None
        (recipe.task.loss(output.outputs, batch.targets) + output.penalty).backward()
        optimizers.step()
    return errors


def short(name: str) -> Recipe:
    return recipes.get(name).with_settings({"length": "20"})


def test_it_leaves_the_orthogonal_matrices_where_algorithm_1_stays() -> None:
    released = drift(short("parenthesis-100/nc-gru-c@released"), 60)
    faithful = drift(short("parenthesis-100/nc-gru-c"), 60)
    (drifted,), (kept,) = released.values(), faithful.values()
    assert drifted[1] < 1e-5  # the first update is exact, and the fiftieth
    assert drifted[50] < 1e-5
    assert drifted[49] > 0.05
    assert max(kept) < drifted[49] / 100


def test_with_two_matrices_the_first_is_lost_at_once() -> None:
    """U_r follows A_c's inverse, so it is wrong from the first update that is not exact."""
    errors = drift(short("parenthesis-100/nc-gru-rc@released"), 40)
    assert list(errors) == ["r", "c"]
    assert min(errors["r"][2:]) > 0.5
    assert errors["c"][2] < 0.05
