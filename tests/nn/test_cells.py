"""The contract of the cells: whatever `nn.GRUCell` survives, these survive."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

from ncgru.nn.sequence import CellModule
from tests.nn.builders import CELLS

pytestmark = pytest.mark.parametrize("name", CELLS)


def build(name: str, hidden: int = 6, **settings: object) -> CellModule:
    torch.manual_seed(1)
    make, _, options = CELLS[name]
    return make(4, hidden, **options, **settings)


@pytest.mark.parametrize(("batch", "hidden"), [(0, 6), (1, 6), (3, 7), (3, 1), (0, 1)])
def test_sizes(name: str, batch: int, hidden: int) -> None:
    cell = build(name, hidden)
    x = torch.randn(batch, 4, requires_grad=True)
    h = cell(x, cell(x))
    assert h.shape == nn.GRUCell(4, hidden)(x).shape == (batch, hidden)
    h.sum().backward()
    assert x.grad is not None
    for param in cell.parameters():  # GORU of one unit has no angles
        assert param.numel() == 0 or (param.grad is not None and bool(param.grad.isfinite().all()))


def test_non_contiguous_input_and_state(name: str) -> None:
    cell = build(name)
    x, h = torch.randn(4, 6).t()[::2], torch.randn(6, 3).t()
    assert not x.is_contiguous()
    torch.testing.assert_close(cell(x, h), cell(x.contiguous(), h.contiguous()), rtol=0, atol=1e-6)
    torch.testing.assert_close(cell(x), cell(x, torch.zeros(3, 6)), rtol=0, atol=0)


def test_precisions(name: str) -> None:
    cell, x = build(name), torch.randn(3, 4)
    expected = cell(x, cell(x))
    wide = copy.deepcopy(cell).double()
    assert wide(x.double()).dtype == torch.float64
    torch.testing.assert_close(wide(x.double(), wide(x.double())).float(), expected)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = cell(x, cell(x))
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), expected, rtol=0.1, atol=0.05)
    narrow.float().sum().backward()
    assert all(param.grad is not None and param.grad.dtype == torch.float32 for param in cell.parameters())
    assert cell.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def train(cell: CellModule, x: Tensor) -> list[float]:
    """Losses of four steps of plain gradient descent through three steps of time."""
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = cell(x, cell(x, cell(x))).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_copies_and_states_go_on_bit_for_bit(name: str) -> None:
    cell, x = build(name), torch.randn(3, 4)
    train(cell, x)
    stream = io.BytesIO()
    torch.save(cell.state_dict(), stream)
    stream.seek(0)
    loaded = CELLS[name][0](4, 6, **CELLS[name][2])
    loaded.load_state_dict(torch.load(stream, weights_only=True))
    twins = [copy.deepcopy(cell), pickle.loads(pickle.dumps(cell)), loaded]
    expected = train(cell.eval(), x)
    assert [train(twin, x) for twin in twins] == [expected] * 3


def test_to_a_device(name: str) -> None:
    cell = build(name).to("meta")
    assert cell(torch.empty(3, 4, device="meta")).shape == (3, 6)


def test_compiles_and_exports(name: str) -> None:
    cell, x, h = build(name), torch.randn(3, 4), torch.randn(3, 6)
    torch._dynamo.reset()
    compiled = torch.compile(cell, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, h), cell(x, h))
    (found,) = torch.autograd.grad(compiled(x, h).sum(), [cell.get_parameter("weight_ih")])
    (expected,) = torch.autograd.grad(cell(x, h).sum(), [cell.get_parameter("weight_ih")])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.export.export(cell, (x, h)).module()(x, h), cell(x, h))
    torch._dynamo.reset()
    free = torch.compile(cell, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(free(x[:2], h[:2]), cell(x[:2], h[:2]))


def test_gradcheck(name: str) -> None:
    cell = build(name, 3, dtype=torch.float64)
    with torch.no_grad():
        cell.get_parameter("bias")[-3:] = 0.5  # modReLU with a positive threshold has no kink where z is not 0
        cell.get_parameter("weight_ih").normal_()
    keys = [key for key, _ in cell.named_parameters()]

    def run(x: Tensor, h: Tensor, *values: Tensor) -> Tensor:
        made: Tensor = torch.func.functional_call(cell, dict(zip(keys, values, strict=True)), (x, h))
        return made

    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    h = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    values = [param.detach().clone().requires_grad_() for param in cell.parameters()]
    assert torch.autograd.gradcheck(run, (x, h, *values))
    assert torch.autograd.gradgradcheck(run, (x, h, *values))
