"""The Hopper backward: right through the public autograd path, against float64; the same bits every time."""

import pytest
import torch

from flashqla import Plan, chunk_gated_delta_rule, testing

DEVICE = "cuda"
NAMES = ("q", "k", "v", "g", "beta", "initial_state")
LIMITS = dict.fromkeys(NAMES, 1e-2) | {"g": 2e-2}  # relative L2; bf16 rounding of the operands alone is 3e-3
LENGTHS = (100, 0, 64, 1, 333, 65)


def make(*sizes, dtype=torch.bfloat16, **options):
    return testing.inputs(*sizes, dtype=dtype, device=DEVICE, **options)


def gradients(made, loss="both", backend="hopper", **options):
    """Gradients of every leaf of `made`, by name."""
    made = made.requires_grad()
    o, state = chunk_gated_delta_rule(**made.arguments(output_final_state=True, backend=backend, **options))
    outputs = {"both": (o, state), "output": (o,), "state": (state,)}[loss]
    given = {"both": (made.do, made.dht), "output": (made.do,), "state": (made.dht,)}[loss]
    leaves = {name: getattr(made, name) for name in NAMES if getattr(made, name) is not None}
    found = torch.autograd.grad(outputs, list(leaves.values()), [x.to(y) for x, y in zip(given, outputs, strict=True)])
    return dict(zip(leaves, found, strict=True))


def agree(made, limits=LIMITS, **options):
    mine = gradients(made, **options)
    exact = gradients(made.to(torch.float64), backend="reference", **options)
    for name, gradient in mine.items():
        assert gradient.dtype == getattr(made, name).dtype
        testing.check(f"d{name}", gradient, exact[name], limits[name])


@pytest.mark.parametrize("heads", [(1, 1), (2, 6), (1, 7), (4, 16), (16, 48)])
def test_head_ratios(heads):
    agree(make(2, 200, *heads, 128, 128))


@pytest.mark.parametrize("sizes", [(64, 64), (64, 128), (128, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_head_dimensions(sizes, dtype):
    agree(make(1, 500, 2, 4, *sizes, dtype=dtype))


@pytest.mark.parametrize("gate", [0.0, -0.3, -1.0, -5.0, -20.0])
def test_gates_of_every_strength(gate):
    agree(make(1, 1000, 2, 4, 128, 128, gate=gate))


def test_resets_among_mild_gates():
    made = make(1, 3000, 2, 4, 128, 128, gate=-0.01)
    torch.manual_seed(1)
    made.g[torch.rand(made.g.shape, device=DEVICE) < 0.01] = -300.0
    agree(made)


@pytest.mark.parametrize("gate", [-5.0, -10.0])
def test_rn1_strong_decay_dg(gate):
    """Each head by itself, and nothing but rounding at the first token without an initial state."""
    made = make(1, 256, 2, 4, 128, 128, gate=gate, initial_state=False)
    found = gradients(made, loss="output")
    mine = found["g"]
    exact = gradients(made.to(torch.float64), loss="output", backend="reference")["g"]
    # rounding of row sums that cancel there, next to summands of the size of v dv
    assert mine[:, 0].abs().max() <= 1e-6 * (made.v * found["v"]).sum(-1).abs().max()
    for head in range(4):
        testing.check(f"dg of head {head}", mine[..., head], exact[..., head], 2e-2)


@pytest.mark.parametrize("loss", ["output", "state"])
def test_losses(loss):
    agree(make(2, 300, 2, 4, 128, 128), loss=loss)


@pytest.mark.parametrize("padding", [0, 60])
def test_packed(padding):
    agree(make(1, sum(LENGTHS) + padding, 2, 8, 128, 128, lengths=LENGTHS))


def test_padding_gets_zero_whatever_it_holds():
    made = make(1, sum(LENGTHS) + 60, 2, 8, 128, 128, lengths=LENGTHS)
    for name in ("q", "k", "v", "g", "beta", "do"):
        getattr(made, name)[:, sum(LENGTHS) :] = float("nan")
    for name, gradient in gradients(made).items():
        assert gradient.isfinite().all(), name
        if name != "initial_state":
            assert (gradient[:, sum(LENGTHS) :] == 0).all(), name


def test_nan_stays_in_its_sequence():
    made = make(1, sum(LENGTHS), 2, 4, 128, 128, lengths=LENGTHS)
    clean = gradients(made)
    first = LENGTHS[0]
    for name in ("q", "k", "v", "do"):
        getattr(made, name).data[:, first : first + 64] = float("nan")
    found = gradients(made)
    for name in NAMES[:5]:
        assert torch.equal(found[name][:, :first], clean[name][:, :first]), name
        assert torch.equal(found[name][:, first + 64 :], clean[name][:, first + 64 :]), name


def test_activations_inside():
    made = make(2, 300, 2, 8, 128, 128)
    torch.manual_seed(2)
    made.q.mul_(3.0)
    made.k.mul_(5.0)
    made.beta.copy_(torch.randn_like(made.beta))
    agree(made, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)


def test_beta_zero_and_tiny():
    made = make(1, 300, 2, 4, 128, 128)
    made.beta[:, ::3] = 0.0
    made.beta[:, 1::3] = 1e-6
    agree(made)


@pytest.mark.parametrize("needed", [("v",), ("initial_state",), ("q", "g"), ("beta",)])
def test_only_what_is_needed(needed):
    made = make(1, 300, 2, 4, 128, 128)
    every = gradients(made)
    leaves = [getattr(made, name).requires_grad_() for name in needed]
    o, state = chunk_gated_delta_rule(**made.arguments(output_final_state=True, backend="hopper"))
    found = torch.autograd.grad((o, state), leaves, (made.do, made.dht))
    for name, gradient in zip(needed, found, strict=True):
        assert torch.equal(gradient, every[name]), name


def test_gradient_of_stride_0():
    made = make(2, 200, 2, 4, 128, 128).requires_grad()
    o, _ = chunk_gated_delta_rule(**made.arguments(backend="hopper"))
    (mine,) = torch.autograd.grad(o.sum(), [made.v], retain_graph=True)
    (plain,) = torch.autograd.grad(o, [made.v], torch.ones_like(o))
    assert torch.equal(mine, plain)


def with_segments(made, segment_chunks, block_dv=128, **options):
    shapes = made.q.shape, made.v.shape, made.cu_seqlens.shape
    return gradients(made, plan=Plan.build(*shapes, block_dv=block_dv, segment_chunks=segment_chunks), **options)


@pytest.mark.parametrize("block_dv", [64, 128])
@pytest.mark.parametrize("gate", [None, 0.0, -0.002, -0.05, -5.0])
def test_error_is_no_larger_with_segments(gate, block_dv):
    """A head that does not decay, among others; 1 to 64 segments."""
    lengths = (4096, 0, 300, 65, 64)
    made = make(1, sum(lengths) + 20, 2, 4, 128, 128, lengths=lengths, gate=gate)
    made.g[..., 1] = 0.0
    exact = gradients(made.to(torch.float64), backend="reference")
    whole = with_segments(made, 0, block_dv)
    for segment_chunks in (1, 3, 16, 63):
        for name, gradient in with_segments(made, segment_chunks, block_dv).items():
            without, found = (testing.compare(x, exact[name]).relative_l2 for x in (whole[name], gradient))
            assert found <= 1.05 * without + 1e-5, (segment_chunks, name, found, without)


def test_segments_without_a_threshold_change_no_bit():
    lengths = (2000, 0, 300, 65, 64)
    made = make(1, sum(lengths), 2, 4, 128, 128, lengths=lengths)
    whole = with_segments(made, 0)
    for segment_chunks in (1, 5, 16):
        for name, gradient in with_segments(made, segment_chunks, cp_threshold=None).items():
            assert torch.equal(gradient, whole[name]), (segment_chunks, name)


def test_error_does_not_grow_with_length():
    """65,536 tokens in 64 segments."""
    made = make(1, 65536, 1, 2, 128, 128, lengths=(65536,))
    made.g[..., 1] = 0.0
    exact = gradients(made.to(torch.float64), backend="reference")
    for name, gradient in with_segments(made, 16).items():
        testing.check(f"d{name}", gradient, exact[name], LIMITS[name])


def test_same_bits_in_1000_runs():
    """Mixed lengths, while another stream copies."""
    made = make(1, sum(LENGTHS), 2, 8, 128, 128, lengths=LENGTHS)
    first = gradients(made)
    noise, side = torch.empty(2, 1 << 26, device=DEVICE), torch.cuda.Stream()
    for run in range(1000):
        with torch.cuda.stream(side):
            noise[1].copy_(noise[0])
        again = gradients(made)
        assert all(torch.equal(first[name], again[name]) for name in first), run
