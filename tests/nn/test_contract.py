"""One contract for every module: whatever `nn.GRU` survives, these survive."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ncgru.nn.sequence import SequenceModule
from tests.nn.builders import SEQUENCES

pytestmark = pytest.mark.parametrize("name", SEQUENCES)


def build(name: str, hidden: int = 6, **settings: object) -> SequenceModule:
    torch.manual_seed(1)
    return SEQUENCES[name](4, hidden, **settings)


def apply(module: SequenceModule, *args: Tensor) -> tuple[Tensor, Tensor]:
    output, h_n = module(*args)
    assert isinstance(output, Tensor)
    return output, h_n


@pytest.mark.parametrize(
    ("steps", "batch", "hidden"), [(1, 3, 6), (5, 0, 6), (5, 1, 6), (5, 3, 7), (5, 3, 1), (1, 0, 1)]
)
def test_sizes(name: str, steps: int, batch: int, hidden: int) -> None:
    module = build(name, hidden, num_layers=2, bidirectional=True)
    x = torch.randn(steps, batch, 4, requires_grad=True)
    output, h_n = apply(module, x)
    assert output.shape == (steps, batch, 2 * hidden)
    assert h_n.shape == (4, batch, hidden)
    (output.sum() + h_n.sum()).backward()
    assert x.grad is not None
    for param in module.parameters():  # GORU of one unit has no angles
        assert param.numel() == 0 or (param.grad is not None and bool(param.grad.isfinite().all()))


def test_shapes_are_those_of_nn_gru(name: str) -> None:
    for batch_first in (False, True):
        settings = {"num_layers": 2, "bidirectional": True, "batch_first": batch_first}
        ours, theirs = build(name, **settings), nn.GRU(4, 6, **settings)
        for x in (torch.randn(5, 3, 4), torch.randn(5, 4)):
            assert [t.shape for t in apply(ours, x)] == [t.shape for t in theirs(x)]


def test_non_contiguous_input_and_state(name: str) -> None:
    module = build(name)
    wide, state = torch.randn(3, 5, 8), torch.randn(6, 3)
    x, h0 = wide.transpose(0, 1)[..., ::2], state.t().unsqueeze(0)
    assert not x.is_contiguous()
    assert not h0.is_contiguous()
    for found, expected in zip(apply(module, x, h0), apply(module, x.contiguous(), h0.contiguous()), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_leaving_hx_out_means_zeros(name: str) -> None:
    module, x = build(name), torch.randn(5, 3, 4)
    assert torch.equal(apply(module, x)[0], apply(module, x, torch.zeros(1, 3, 6))[0])


def test_float64(name: str) -> None:
    module = build(name, dtype=torch.float64)
    output, h_n = apply(module, torch.randn(5, 3, 4, dtype=torch.float64))
    assert output.dtype == h_n.dtype == torch.float64
    assert all(param.dtype == torch.float64 for param in module.parameters())


def test_double_after_the_fact_is_float64_accurate(name: str) -> None:
    module = build(name).double()
    for key, weight in ((key, getattr(module, f"weight_hh{key}")) for _, keys in module._layers for key in keys):
        assert weight.dtype == torch.float64, key
        if name == "ncgru-r-u-c":
            for block in weight.split(6):
                torch.testing.assert_close(block @ block.t(), torch.eye(6, dtype=torch.float64), rtol=0, atol=1e-13)


def test_bfloat16_autocast(name: str) -> None:
    module, x = build(name, num_layers=2), torch.randn(5, 3, 4)
    expected = apply(module, x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        output, h_n = apply(module, x)
    assert output.dtype == h_n.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, rtol=0.1, atol=0.05)
    output.float().sum().backward()
    assert all(param.grad is not None and param.grad.dtype == torch.float32 for param in module.parameters())


@pytest.mark.parametrize("made_so", [False, True])
def test_bfloat16_module_keeps_a_in_float32(name: str, made_so: bool) -> None:
    module = build(name, dtype=torch.bfloat16) if made_so else build(name).bfloat16()
    output, h_n = apply(module, torch.randn(5, 3, 4, dtype=torch.bfloat16))
    assert output.dtype == h_n.dtype == torch.bfloat16
    for key, param in module.named_parameters():
        assert param.dtype == (torch.float32 if key.startswith("skew") else torch.bfloat16)
    output.float().sum().backward()


def test_train_and_eval_agree_without_dropout(name: str) -> None:
    module, x = build(name), torch.randn(5, 3, 4)
    assert torch.equal(apply(module.train(), x)[0], apply(module.eval(), x)[0])


def test_dropout_acts_between_layers_in_training_only(name: str) -> None:
    module, x = build(name, num_layers=2, dropout=0.5), torch.randn(5, 3, 4)
    with torch.no_grad():
        for key, param in module.named_parameters():
            if key.startswith("weight_ih"):
                param.normal_()
    assert not torch.equal(apply(module, x)[0], apply(module, x)[0])
    output, h_n = apply(module, x)
    assert torch.equal(h_n[0], apply(module, x)[1][0]), "the first layer sees no dropout"
    assert torch.equal(h_n[1], output[-1]), "nothing is dropped after the last layer"
    module.eval()
    assert torch.equal(apply(module, x)[0], apply(module, x)[0])


def train(module: SequenceModule, optimizer: torch.optim.Optimizer, x: Tensor) -> float:
    optimizer.zero_grad()
    loss = apply(module, x)[0].square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def test_deepcopy_and_pickle_go_on_bit_for_bit(name: str) -> None:
    module, x = build(name), torch.randn(5, 3, 4)
    train(module, torch.optim.Adam(module.parameters()), x)
    twins = [module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    losses = []
    for twin in twins:
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        losses.append([train(twin, optimizer, x) for _ in range(4)])
    assert losses[0] == losses[1] == losses[2]


def test_state_dict_resumes_bit_for_bit(name: str) -> None:
    x = torch.randn(5, 3, 4)
    module = build(name, num_layers=2, bidirectional=True)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for _ in range(3):
        train(module, optimizer, x)
    stream = io.BytesIO()
    torch.save([module.state_dict(), optimizer.state_dict()], stream)
    stream.seek(0)
    states = torch.load(stream, weights_only=True)
    other = SEQUENCES[name](4, 6, num_layers=2, bidirectional=True)
    other.load_state_dict(states[0])
    follower = torch.optim.Adam(other.parameters(), lr=0.01)
    follower.load_state_dict(states[1])
    assert [train(other, follower, x) for _ in range(4)] == [train(module, optimizer, x) for _ in range(4)]


def test_to_a_device(name: str) -> None:
    module = build(name).to("meta")
    output, h_n = apply(module, torch.empty(5, 3, 4, device="meta"))
    assert output.shape == (5, 3, 6)
    assert h_n.device.type == "meta"


@pytest.mark.parametrize("assign", [False, True])
def test_made_on_meta_and_loaded_later(name: str, assign: bool) -> None:
    source, x = build(name), torch.randn(5, 3, 4)
    module = SEQUENCES[name](4, 6, device="meta")
    if not assign:
        module.to_empty(device="cpu")
    module.load_state_dict(source.state_dict(), assign=assign)
    assert torch.equal(apply(module, x)[0], apply(source, x)[0])


def test_made_on_the_cpu_where_meta_is_the_default(name: str) -> None:
    with torch.device("meta"):
        module = SEQUENCES[name](4, 6, device="cpu")
        other = SEQUENCES[name](4, 6)
    assert bool(apply(module, torch.randn(5, 3, 4))[0].isfinite().all())
    assert {tensor.device.type for tensor in [*other.parameters(), *other.buffers()]} == {"meta"}


def test_one_16_bit_type_under_autocast_to_the_other(name: str) -> None:
    module = build(name).half()
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = apply(module, torch.randn(5, 3, 4).half())
    assert output.dtype == torch.bfloat16


def test_made_on_meta_and_filled_later(name: str) -> None:
    with torch.device("meta"):
        module = SEQUENCES[name](4, 6)
    module.to_empty(device="cpu")
    module.reset_parameters()
    output, _ = apply(module, torch.randn(5, 3, 4))
    assert bool(output.isfinite().all())
    assert all(not count.any() for key, count in module.state_dict().items() if key.endswith(("updates", "refreshes")))
    if "r-u-c" in name:
        matrices = module.weight_hh_l0.view(3, 6, 6)
        torch.testing.assert_close(matrices @ matrices.mT, torch.eye(6).expand(3, 6, 6))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(name: str, use_reentrant: bool) -> None:
    module, x = build(name, num_layers=2), torch.randn(5, 3, 4, requires_grad=True)
    apply(module, x)[0].square().sum().backward()
    expected = {key: param.grad.clone() for key, param in module.named_parameters() if param.grad is not None}
    module.zero_grad()
    output: Tensor = checkpoint(lambda given: apply(module, given)[0], x, use_reentrant=use_reentrant)
    output.square().sum().backward()
    for key, param in module.named_parameters():
        torch.testing.assert_close(param.grad, expected[key])


def test_compiles_without_a_graph_break(name: str) -> None:
    module, x = build(name, num_layers=2, bidirectional=True), torch.randn(5, 3, 4)
    expected, expected_h = apply(module, x)
    expected.sum().backward()
    gradients = [param.grad.clone() for param in module.parameters() if param.grad is not None]
    module.zero_grad()
    torch._dynamo.reset()
    output, h_n = torch.compile(module, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(h_n, expected_h)
    output.sum().backward()
    for param, gradient in zip(module.parameters(), gradients, strict=True):
        torch.testing.assert_close(param.grad, gradient)


def test_compiled_for_any_length_and_batch(name: str) -> None:
    module = build(name, num_layers=2, bidirectional=True)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for steps, batch in ((5, 3), (7, 2), (9, 4)):
        x, h0 = torch.randn(steps, batch, 4), torch.randn(4, batch, 6)
        torch.testing.assert_close(compiled(x, h0), apply(module, x, h0))


def test_exports(name: str) -> None:
    module, x = build(name).eval(), torch.randn(5, 3, 4)
    program = torch.export.export(module, (x,))
    torch.testing.assert_close(program.module()(x), apply(module, x))
    sizes = {0: torch.export.Dim("steps", max=1000), 1: torch.export.Dim("batch", max=1000)}
    free = torch.export.export(module, (x,), dynamic_shapes=(sizes,)).module()
    x = torch.randn(8, 2, 4)
    torch.testing.assert_close(free(x), apply(module, x))


def test_gradcheck(name: str) -> None:
    module = build(name, 3, dtype=torch.float64)
    with torch.no_grad():
        for key, param in module.named_parameters():
            if key.startswith("bias"):
                param[-3:] = 0.5  # modReLU with a positive threshold has no kink where z is not 0
            elif key.startswith("weight_ih"):
                param.normal_()
    keys = [key for key, _ in module.named_parameters()]

    def run(x: Tensor, h0: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        made: tuple[Tensor, Tensor] = torch.func.functional_call(module, dict(zip(keys, values, strict=True)), (x, h0))
        return made

    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    h0 = torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True)
    values = [param.detach().clone().requires_grad_() for param in module.parameters()]
    assert torch.autograd.gradcheck(run, (x, h0, *values))
    assert torch.autograd.gradgradcheck(run, (x, h0, *values))


def test_repr_shows_what_differs_from_the_defaults(name: str) -> None:
    text = repr(build(name, num_layers=2, batch_first=True, bias=False))
    assert "4, 6, num_layers=2, batch_first=True" in text
    assert "bias=False" in text
    assert "bidirectional" not in text


def test_flatten_parameters_is_harmless(name: str) -> None:
    module = build(name)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    module.flatten_parameters()
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
