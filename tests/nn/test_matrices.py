"""The recurrent matrices: which are orthogonal, how they start, how they are set, and what trains them."""

import math
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from ncgru import GORU, NCGRU, ModReLU, NCGRUCell, ScoRNN, diagnostics
from ncgru.nn.modrelu import modrelu

SUBSETS = ["".join(chosen) for count in range(4) for chosen in combinations("ruc", count)]


def haar(size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    q: Tensor = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    return q


def defect(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix.mT @ matrix - torch.eye(matrix.shape[-1], dtype=matrix.dtype), 2))


@pytest.mark.parametrize("letters", SUBSETS)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_every_subset_stays_orthogonal_under_training(letters: str, bidirectional: bool) -> None:
    torch.manual_seed(0)
    module = NCGRU(3, 10, num_layers=2, bidirectional=bidirectional, orthogonal=letters)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    before = module.weight_hh_l1.detach().clone()
    for _ in range(20):
        optimizer.zero_grad()
        module(torch.randn(6, 4, 3))[0].square().sum().backward()
        optimizer.step()
    for suffix in ["_l0", "_l1"] + (["_l0_reverse", "_l1_reverse"] if bidirectional else []):
        for letter, block in zip("ruc", getattr(module, f"weight_hh{suffix}").detach().split(10), strict=True):
            assert (defect(block) < 2e-6) == (letter in letters), (suffix, letter)
    assert bool((module.weight_hh_l1 != before).any())


@pytest.mark.parametrize("letters", SUBSETS)
def test_trainable_numbers(letters: str) -> None:
    n, inputs = 7, 3
    count = sum(param.numel() for param in NCGRU(inputs, n, orthogonal=letters).parameters())
    assert count == 3 * n * inputs + 3 * n + len(letters) * n * (n - 1) // 2 + (3 - len(letters)) * n * n


def test_no_optimiser_touches_what_is_not_trained() -> None:
    module = NCGRU(3, 5, orthogonal="ruc")
    assert {key for key, _ in module.named_parameters()} == {"weight_ih_l0", "bias_l0", "skew_l0"}
    assert [param is module.skew_l0 for param in module.skew_parameters()] == [True]
    assert [param for param in NCGRU(3, 5, orthogonal="").skew_parameters()] == []


def test_keys_of_a_saved_state_stay_as_they_are() -> None:
    """Files that people have saved have these."""
    cayley = ("anchor", "inverse", "matrix", "signs", "updates", "refreshes", "seal")
    both = ("l0", "l0_reverse")
    assert set(NCGRU(3, 4, orthogonal="rc", bidirectional=True).state_dict()) == {
        *(f"{name}_{end}" for name in ("weight_ih", "bias", "weight_hh_free") for end in both),
        "skew_l0",
        *(f"cayley_l0.{name}" for name in cayley),
    }
    assert set(ScoRNN(3, 4, bias=False).state_dict()) == {
        "weight_ih_l0", "skew_l0", *(f"cayley_l0.{name}" for name in cayley)
    }  # fmt: skip
    assert set(NCGRUCell(3, 4, orthogonal="").state_dict()) == {"weight_ih", "bias", "weight_hh_free"}
    assert set(GORU(3, 4).state_dict()) == {"weight_ih_l0", "bias_l0", "weight_hh_free_l0", "angles_l0"}


def test_letters_keep_their_places_whatever_order_they_are_given_in() -> None:
    assert NCGRU(3, 5, orthogonal="cr").orthogonal == "rc"


@pytest.mark.parametrize(("negatives", "expected"), [(None, [2, 2]), (4, [4, 4]), ([0, 5], [0, 5])])
def test_negatives(negatives: int | list[int] | None, expected: list[int]) -> None:
    module = NCGRU(3, 5, bidirectional=True, orthogonal="rc", negatives=negatives)
    signs = module.cayley_l0.signs
    assert (signs < 0).sum(-1).tolist() == expected * 2
    assert bool((signs[:, 1:] <= signs[:, :-1]).all()), "the -1's stand last"


def test_initial_values() -> None:
    torch.manual_seed(0)
    n, inputs = 200, 40
    module = NCGRU(inputs, n)
    gate = math.sqrt(6 / (inputs + n))
    blocks = [*module.weight_ih_l0.split(n), *module.weight_hh_free_l0.split(n)]
    for block, bound in zip(
        (block.detach() for block in blocks), [gate, gate, math.sqrt(6 / inputs), gate, gate], strict=True
    ):
        assert bound * 0.99 < float(block.abs().max()) <= bound
        assert abs(float(block.mean())) < 0.02 * bound
    assert bool((module.bias_l0[: 2 * n] == 0).all())
    assert 0.095 < float(module.bias_l0[2 * n :].detach().abs().max()) <= 0.1
    entries = torch.zeros(n, n)
    above = torch.triu_indices(n, n, 1)
    entries[above[0], above[1]] = module.skew_l0[0].detach()
    pairs = entries.diagonal(1)[::2]
    assert bool(((pairs <= 0) & (pairs > -1)).all()), "-tan(s/2) of angles s from (0, pi/2)"
    assert torch.count_nonzero(entries) == n // 2
    assert float(NCGRU(inputs, n, orthogonal="ruc").weight_ih_l0[:n].detach().abs().max()) > gate


def test_initial_values_of_scornn_and_goru() -> None:
    torch.manual_seed(0)
    n = 200
    for module in (ScoRNN(40, n), GORU(40, n)):
        for key, param in module.named_parameters():
            if key.startswith("weight"):
                assert 0.0099 < float(param.detach().abs().max()) <= 0.01, key
    assert bool((ScoRNN(40, n).bias_l0 == 0).all())
    reset, update, candidate = GORU(40, n).bias_l0.detach().split(n)
    assert bool((reset == 2).all())
    assert bool((candidate == 0.01).all())
    assert 0.95 * math.sqrt(3 / n) < float(update.abs().max()) <= math.sqrt(3 / n)
    angles = GORU(40, n).angles_l0.detach()
    assert -math.pi <= float(angles.min()) < -3 < 3 < float(angles.max()) <= math.pi
    assert bool((GORU(3, 5, nonlinearity="tanh").bias_l0[10:] == 0).all())


def test_reset_recurrent_draws_other_matrices_and_says_which_exist() -> None:
    module = NCGRU(3, 8, orthogonal="rc")
    for init in ("henaff", "haar", "cayley"):
        before = module.weight_hh_l0.detach().clone()
        module.reset_recurrent(init, generator=torch.Generator().manual_seed(3))
        assert all(float(error) < 2e-6 for error in diagnostics.orthogonality_error(module).values())
        assert not torch.equal(module.weight_hh_l0, before)
    with pytest.raises(ValueError, match="did you mean 'haar'"):
        module.reset_recurrent("har")


def test_assembled_weight_is_read_only() -> None:
    module = NCGRU(3, 5)
    assert module.weight_hh_l0.shape == (15, 5)
    assert "weight_hh_l0" not in module.state_dict()
    with pytest.raises(AttributeError):
        _ = module.weight_hh_l1
    for value in (torch.zeros(15, 5), nn.Parameter(torch.zeros(15, 5))):
        with pytest.raises(
            AttributeError, match=r"weight_hh_l0 is assembled from other parameters.*call set_weight_hh"
        ):
            module.weight_hh_l0 = value
        with pytest.raises(AttributeError, match="cannot be set; set the parameters it is made of"):
            GORU(3, 5).weight_hh_l0 = value
    assert bool((module.weight_hh_l0 != 0).any())


@pytest.mark.parametrize("sign", [1, -1])
def test_setting_orthogonal_matrices_of_either_determinant(sign: int) -> None:
    module = NCGRU(3, 6, 2, orthogonal="rc", bidirectional=True, dtype=torch.float64)
    others = {
        key: getattr(module, key).detach().clone() for key in ("weight_hh_l1", "weight_hh_l0", "weight_hh_l0_reverse")
    }
    given = torch.cat([sign * haar(6, 1), torch.randn(6, 6, dtype=torch.float64), haar(6, 2)])
    given[0] *= sign
    distance = module.set_weight_hh(given, layer=1, reverse=True)
    assert set(distance) == {"r", "c"}
    assert max(distance.values()) < 1e-12
    torch.testing.assert_close(module.weight_hh_l1_reverse.detach(), given, rtol=0, atol=1e-12)
    assert all(torch.equal(getattr(module, key), value) for key, value in others.items())
    assert all(count == 0 for count in diagnostics.refreshes(module).values())


def test_setting_a_matrix_takes_the_nearest_and_says_how_far() -> None:
    module = ScoRNN(3, 6, dtype=torch.float64)
    target = haar(6, 5)
    stretch = torch.diag(torch.linspace(0.5, 2, 6, dtype=torch.float64))
    distance = module.set_weight_hh(target @ stretch)["c"]
    torch.testing.assert_close(module.weight_hh_l0.detach(), target, rtol=0, atol=1e-12)
    assert distance == pytest.approx(float((stretch - torch.eye(6, dtype=torch.float64)).norm()))


def test_setting_refuses_what_does_not_fit() -> None:
    module = NCGRU(3, 5)
    with pytest.raises(
        ValueError, match=r"weight must have shape \[3\*hidden_size, hidden_size\] = \(15, 5\), got \(5, 5\)"
    ):
        module.set_weight_hh(torch.eye(5))
    with pytest.raises(ValueError, match="weight must be finite"):
        module.set_weight_hh(torch.full((15, 5), torch.nan))
    with pytest.raises(ValueError, match="layer must be from 0 to 0, got 1"):
        module.set_weight_hh(torch.zeros(15, 5), layer=1)
    with pytest.raises(ValueError, match="reverse must be False"):
        module.set_weight_hh(torch.zeros(15, 5), reverse=True)
    assert defect(module.weight_hh_l0[10:].detach()) < 2e-6


def test_from_gru_carries_what_can_be_carried() -> None:
    torch.manual_seed(0)
    gru = nn.GRU(3, 5, num_layers=2, bidirectional=True, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        for direction in ("l0", "l0_reverse", "l1", "l1_reverse"):
            getattr(gru, f"weight_hh_{direction}")[10:] = 0  # then it does not matter where the reset gate acts
    with pytest.warns(UserWarning, match="resets before the recurrent product"):
        module = NCGRU.from_gru(gru, orthogonal="", nonlinearity="tanh")
    x = torch.randn(4, 7, 3, dtype=torch.float64)
    with torch.no_grad():
        for direction in ("l0", "l0_reverse", "l1", "l1_reverse"):
            getattr(gru, f"bias_hh_{direction}")[10:] = 0
    with pytest.warns(UserWarning, match="nn.GRU"):
        module = NCGRU.from_gru(gru, orthogonal="", nonlinearity="tanh")
    for found, expected in zip(module(x), gru(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_from_gru_stays_in_evaluation() -> None:
    with pytest.warns(UserWarning, match="nn.GRU"):
        module = NCGRU.from_gru(nn.GRU(3, 5, num_layers=2, dropout=0.5, bias=False).eval())
    assert not any(part.training for part in module.modules())
    assert module.dropout == 0.5
    assert not module.bias


def test_from_gru_makes_chosen_matrices_orthogonal() -> None:
    with pytest.warns(UserWarning, match=r"up to 1\.\d+ \(Frobenius\) from the given ones"):
        module = NCGRU.from_gru(nn.GRU(3, 5))
    assert defect(module.weight_hh_l0[10:].detach()) < 2e-6
    with pytest.raises(TypeError, match=r"gru must be a torch\.nn\.GRU, got LSTM"):
        NCGRU.from_gru(nn.LSTM(3, 5))  # type: ignore[arg-type]


def test_goru_matrix_is_orthogonal_and_has_as_many_angles_as_pairs() -> None:
    for n, expected in [(64, 2 * 32 + 2 * 31), (5, 8)]:
        module = GORU(3, n)
        assert module.angles_l0.numel() == expected
        assert defect(module.weight_hh_l0[2 * n :].detach()) < 2e-6
    assert GORU(3, 8, style="fft").angles_l0.numel() == 3 * 4


def test_modrelu_values_and_gradient() -> None:
    z = torch.tensor([-2.0, -0.5, 0.0, 0.5, 2.0])
    torch.testing.assert_close(modrelu(z, torch.tensor(-1.0)), torch.tensor([-1.0, 0.0, 0.0, 0.0, 1.0]))
    torch.testing.assert_close(modrelu(z, torch.tensor(1.0)), torch.tensor([-3.0, -1.5, 0.0, 1.5, 3.0]))
    module = ModReLU(5).double()
    with torch.no_grad():
        module.threshold.copy_(torch.tensor([-0.5, 0.5, 0.2, -0.1, 0.3]))
    assert torch.autograd.gradcheck(module, torch.tensor([[-2.0, 1.0, 3.0, 0.05, -0.4]]).double().requires_grad_())


def test_a_loop_over_the_cell_updates_once_a_step() -> None:
    cell = NCGRUCell(3, 5)
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
    for step in range(3):
        h = None
        for t in range(4):
            h = cell(torch.full((2, 3), float(t)), h)
        assert h is not None
        h.sum().backward()
        optimizer.step()
        assert [int(count) for count in diagnostics.updates(cell).values()] == [step]
