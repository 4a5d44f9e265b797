"""The layer and the model: equations, packed sequences, hand-over between prefill and decode, gradients."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from flashqla import reference
from flashqla.nn import GatedDeltaNet, LanguageModel, LayerState, ModelConfig, causal_convolution

SMALL = ModelConfig(
    vocab_size=40, hidden_size=24, num_heads=2, num_value_heads=4, head_dim_k=8, head_dim_v=6, mlp_size=32
)


def small_layer(**changes) -> GatedDeltaNet:
    torch.manual_seed(0)
    sizes = dict(hidden_size=24, num_heads=2, num_value_heads=4, head_dim_k=8, head_dim_v=6)
    return GatedDeltaNet(**{**sizes, **changes}).double()


def small_model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(SMALL).double()


def assert_close(mine: torch.Tensor, expected: torch.Tensor, limit: float = 1e-12) -> None:
    assert mine.shape == expected.shape
    assert torch.isfinite(mine).all()
    error = (mine - expected).norm() / expected.norm().clamp(min=1)
    assert error <= limit, f"relative L2 {error:.1e}"


# The convolution


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 17])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_convolution_equals_conv1d(length, width):
    x, weight = torch.randn(3, length, 5, dtype=torch.float64), torch.randn(5, 1, width, dtype=torch.float64)
    y, state = causal_convolution(x, weight)
    padded = F.pad(x.mT, (width - 1, 0))
    expected = F.conv1d(padded, weight, groups=5).mT if length else x
    assert_close(y, expected)
    assert torch.equal(state, padded[..., padded.shape[-1] - (width - 1) :].mT)


def test_convolution_does_not_leak_between_sequences():
    lengths = [0, 1, 2, 3, 0, 9, 1]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    weight = torch.randn(5, 1, 4, dtype=torch.float64)
    x = torch.randn(1, sum(lengths) + 3, 5, dtype=torch.float64)  # three tokens of padding
    before = torch.randn(len(lengths), 3, 5, dtype=torch.float64)
    x[:, sum(lengths) :] = torch.nan
    y, state = causal_convolution(x, weight, before, cu_seqlens)
    for i, (start, stop) in enumerate(itertools.pairwise(cu_seqlens)):
        alone, alone_state = causal_convolution(x[:, start:stop], weight, before[i : i + 1])
        assert torch.equal(y[:, start:stop], alone)
        assert torch.equal(state[i : i + 1], alone_state)
    assert torch.equal(y[:, sum(lengths) :], torch.zeros(1, 3, 5, dtype=torch.float64))


def test_convolution_gradients():
    x = torch.randn(1, 7, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 1, 4, dtype=torch.float64, requires_grad=True)
    state = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    cu_seqlens = torch.tensor([0, 2, 6])
    assert torch.autograd.gradcheck(lambda *inputs: causal_convolution(*inputs, cu_seqlens), (x, weight, state))


# The layer


def test_layer_equals_its_equations():
    layer = small_layer()
    x = torch.randn(2, 21, 24, dtype=torch.float64)
    y, state = layer(x)
    assert state is None

    qkv = F.conv1d(F.pad(layer.in_proj_qkv(x).mT, (3, 0)), layer.conv1d.weight, groups=layer.conv1d.groups).mT
    q, k, v = F.silu(qkv).split([16, 16, 24], dim=-1)
    q, k, v = q.unflatten(-1, (2, 8)), k.unflatten(-1, (2, 8)), v.unflatten(-1, (4, 6))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    g = -layer.A_log.exp() * F.softplus(layer.in_proj_a(x) + layer.dt_bias)
    o = reference.recurrent(q, k, v, g, layer.in_proj_b(x).sigmoid()).output
    normed = o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.norm.weight
    expected = layer.out_proj((normed * F.silu(layer.in_proj_z(x).unflatten(-1, (4, 6)))).flatten(-2))
    assert_close(y, expected)


def test_parameters_have_the_published_names_and_shapes():
    layer = GatedDeltaNet(32, num_heads=2, num_value_heads=4, head_dim_k=8, head_dim_v=16)
    assert {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()} == {
        "A_log": (4,),
        "dt_bias": (4,),
        "in_proj_qkv.weight": (2 * 16 + 64, 32),
        "in_proj_z.weight": (64, 32),
        "in_proj_b.weight": (4, 32),
        "in_proj_a.weight": (4, 32),
        "conv1d.weight": (96, 1, 4),
        "norm.weight": (16,),
        "out_proj.weight": (32, 64),
    }
    assert (layer.A_log.exp() > 0).all()
    step_size = F.softplus(layer.dt_bias)
    assert (step_size > 0.9e-3).all()
    assert (step_size < 1.1e-1).all()


@pytest.mark.parametrize("cut", [0, 1, 2, 5, 64, 65, 70])
def test_layer_continues_from_its_state(cut):
    layer = small_layer()
    x = torch.randn(2, 70, 24, dtype=torch.float64)
    whole, whole_state = layer(x, return_state=True)
    first, state = layer(x[:, :cut], return_state=True)
    second, state = layer(x[:, cut:], state=state, return_state=True)
    assert_close(torch.cat([first, second], dim=1), whole)
    assert_close(state.convolution, whole_state.convolution)
    assert_close(state.delta, whole_state.delta)


def test_steps_equal_forward():
    layer = small_layer()
    x = torch.randn(3, 9, 24, dtype=torch.float64)
    whole, whole_state = layer(x, return_state=True)
    state, steps = None, []
    for t in range(9):
        y, state = layer.step(x[:, t], state)
        steps.append(y)
    assert_close(torch.stack(steps, dim=1), whole)
    assert isinstance(state, LayerState)
    assert_close(state.delta, whole_state.delta)


def test_packed_equals_one_by_one():
    layer = small_layer()
    lengths = [3, 0, 70, 1]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    x = torch.randn(1, sum(lengths), 24, dtype=torch.float64)
    packed, state = layer(x, cu_seqlens=cu_seqlens, return_state=True)
    for i, (start, stop) in enumerate(itertools.pairwise(cu_seqlens)):
        alone, alone_state = layer(x[:, start:stop], return_state=True)
        assert_close(packed[:, start:stop], alone)
        assert_close(state.delta[i : i + 1], alone_state.delta)
    # and packed sequences continue as packed sequences
    more, _ = layer(x, cu_seqlens=cu_seqlens, state=state)
    again, _ = layer(torch.cat([x[:, 3:73], x[:, 3:73]], dim=1))
    assert_close(more[:, 3:73], again[:, 70:])


def test_every_parameter_gets_a_gradient():
    layer = small_layer()
    layer(torch.randn(2, 10, 24, dtype=torch.float64))[0].square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_no_gradient_across_sequences():
    layer = small_layer()
    x = torch.randn(1, 20, 24, dtype=torch.float64, requires_grad=True)
    y, _ = layer(x, cu_seqlens=torch.tensor([0, 7, 20]))
    y[:, 7:].sum().backward()
    assert torch.equal(x.grad[:, :7], torch.zeros_like(x.grad[:, :7]))
    assert x.grad[:, 7:].abs().sum() > 0


def test_autocast_keeps_the_gate_in_float32():
    torch.manual_seed(0)
    layer = GatedDeltaNet(24, num_heads=2, head_dim_k=8, head_dim_v=8)
    x = torch.randn(1, 50, 24)
    exact, _ = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, state = layer(x, return_state=True)
    assert rounded.dtype == torch.bfloat16
    assert state.delta.dtype == torch.float32
    assert (rounded - exact).norm() <= 2e-2 * exact.norm()


def test_compiles_to_one_graph():
    layer = small_layer()
    x, cu_seqlens = torch.randn(1, 70, 24, dtype=torch.float64), torch.tensor([0, 5, 70])
    expected, _ = layer(x, cu_seqlens=cu_seqlens)
    compiled, _ = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, cu_seqlens=cu_seqlens)
    assert_close(compiled, expected)


@pytest.mark.parametrize("wrong", [{"num_heads": 2, "num_value_heads": 3}, {"num_heads": 0}, {"conv_kernel_size": 0}])
def test_wrong_sizes_are_refused(wrong):
    with pytest.raises(ValueError, match=r"must be (a multiple|at least)"):
        small_layer(**wrong)


# The model


def test_model_starts_from_a_uniform_guess():
    torch.manual_seed(0)
    model = LanguageModel()
    tokens = torch.randint(256, (1, 200))
    loss = F.cross_entropy(model(tokens)[0][0, :-1], tokens[0, 1:])
    assert loss.item() == pytest.approx(5.545, abs=0.1)
    assert "head" not in dict(model.named_parameters())


def test_model_decodes_what_it_prefills():
    model = small_model()
    tokens = torch.randint(40, (2, 30))
    whole, whole_state = model(tokens, return_state=True)
    logits, state = model(tokens[:, :20], return_state=True)
    assert_close(logits, whole[:, :20])
    for t in range(20, 30):
        logits, state = model.step(tokens[:, t], state)
        assert_close(logits, whole[:, t])
    for mine, expected in zip(state, whole_state, strict=True):
        assert_close(mine.delta, expected.delta)


def test_generate():
    model = small_model()
    prompt = torch.randint(40, (2, 5))
    greedy = model.generate(prompt, temperature=0)
    tokens = torch.stack([next(greedy)[0] for _ in range(6)], dim=1)
    logits = model(torch.cat([prompt, tokens], dim=1))[0]
    assert torch.equal(tokens, logits[:, 4:-1].argmax(-1))

    def draw(seed: int) -> torch.Tensor:
        drawn = model.generate(prompt, generator=torch.Generator().manual_seed(seed))
        return torch.stack([next(drawn)[0] for _ in range(20)])

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert torch.is_grad_enabled()
