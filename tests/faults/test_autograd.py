"""Recipes RA: which gradients, for which loss, in which layout and mode."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flashqla import chunk_gated_delta_rule
from flashqla.testing import check, check_outcome, inputs, oracle64, outcome

pytestmark = pytest.mark.usefixtures("poisoned")

NAMES = ("q", "k", "v", "g", "beta", "initial_state")
DIMS = {"heads": 2, "value_heads": 4, "head_dim_k": 64, "head_dim_v": 128, "recipe": "faults"}


@pytest.mark.parametrize("lengths", [None, (100, 0, 28)], ids=["dense", "packed"])
@pytest.mark.parametrize("state", [False, True], ids=["no initial state", "initial state"])
def test_ra1_flag_grid(device, dtype, lengths, state, limits):
    made = inputs(tokens=130, lengths=lengths, initial_state=state, dtype=dtype, device=device, **DIMS)
    for l2norm, v_first, sigmoid in itertools.product((False, True), repeat=3):
        flags = {"use_qk_l2norm_in_kernel": l2norm, "state_v_first": v_first, "use_beta_sigmoid_in_kernel": sigmoid}
        flags["allow_neg_eigval"] = sigmoid
        results = outcome(chunk_gated_delta_rule, made, **flags)
        for name in made.arguments():
            tensor = getattr(made, name)
            if tensor is not None and name != "cu_seqlens":
                assert results[f"d{name}"].dtype == tensor.dtype
                assert name == "initial_state" or results[f"d{name}"].shape == tensor.shape
        check_outcome(f"RA1 {flags}", results, outcome(oracle64, made, **flags), *limits)
        parallel = outcome(chunk_gated_delta_rule, made, context_parallel=True, backend="reference", **flags)
        check_outcome("RA1 parallel", parallel, results, *limits)


def test_ra1_without_final_state(device, dtype):
    made = inputs(tokens=130, dtype=dtype, device=device, **DIMS)
    made.dht.zero_()
    leaves = made.requires_grad()
    o, state = chunk_gated_delta_rule(**leaves.arguments())
    assert state is None
    expected = outcome(chunk_gated_delta_rule, made)
    gradients = torch.autograd.grad(o, [getattr(leaves, name) for name in NAMES], made.do)
    for name, gradient in zip(NAMES, gradients, strict=True):
        assert torch.equal(gradient, expected[f"d{name}"]), name


@pytest.mark.parametrize("loss", ["o", "final_state", "both"])
def test_ra2_which_loss(device, dtype, limits, loss):
    made = inputs(tokens=130, dtype=dtype, device=device, **DIMS)
    leaves, exact = made.requires_grad(), made.requires_grad()

    def gradients(of, function) -> list[torch.Tensor | None]:
        o, state = function(**of.arguments(output_final_state=True))
        parts = {"o": [(o * made.do.to(o)).sum()], "final_state": [(state * made.dht.to(state)).sum()]}
        parts["both"] = parts["o"] + parts["final_state"]
        return torch.autograd.grad(sum(parts[loss]), [getattr(of, name) for name in NAMES], allow_unused=True)

    for name, mine, truth in zip(
        NAMES, gradients(leaves, chunk_gated_delta_rule), gradients(exact, oracle64), strict=True
    ):
        if name == "q" and loss == "final_state":
            assert mine is None or (mine == 0).all()
        else:
            assert mine.abs().sum() > 0
            check(f"RA2 {loss} d{name}", mine, truth, limits.gradient)


def test_ra2_no_state_is_zero_state(device, dtype):
    none = inputs(tokens=130, initial_state=False, dtype=dtype, device=device, **DIMS)
    zeros = inputs(tokens=130, initial_state=True, dtype=dtype, device=device, **DIMS)
    zeros.initial_state.zero_()
    for name in ("do", "dht"):
        setattr(zeros, name, getattr(none, name))
    for name in NAMES[:5]:
        setattr(zeros, name, getattr(none, name))
    with_none, with_zeros = outcome(chunk_gated_delta_rule, none), outcome(chunk_gated_delta_rule, zeros)
    assert "dinitial_state" not in with_none
    for name, tensor in with_none.items():
        assert torch.equal(tensor, with_zeros[name]), name


@pytest.mark.parametrize("wanted", NAMES)
def test_ra2_only_what_is_needed(device, dtype, wanted):
    made = inputs(tokens=70, dtype=dtype, device=device, **DIMS)
    expected = outcome(chunk_gated_delta_rule, made)
    leaf = getattr(made, wanted).clone().requires_grad_()
    o, state = chunk_gated_delta_rule(**made.arguments(**{wanted: leaf}, output_final_state=True))
    torch.autograd.backward((o, state), (made.do, made.dht))
    assert torch.equal(leaf.grad, expected[f"d{wanted}"])
    assert all(getattr(made, name).grad is None for name in NAMES)


LAYOUTS = {
    "stride 0": lambda o, w: o.sum(),
    "transposed": lambda o, w: (o.transpose(1, 2) * w.transpose(1, 2)).sum(),
    "every second": lambda o, w: (o[:, ::2] * w[:, ::2]).sum(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ra3_gradient_layouts(device, dtype, layout):
    made = inputs(tokens=130, dtype=dtype, device=device, **DIMS)
    leaves = made.requires_grad()
    tensors = [getattr(leaves, name) for name in NAMES]
    o, _ = chunk_gated_delta_rule(**leaves.arguments())
    strided = torch.autograd.grad(LAYOUTS[layout](o, made.do), tensors, retain_graph=True)
    ones = torch.ones_like(o) if layout == "stride 0" else made.do.clone()
    if layout == "every second":
        ones[:, 1::2] = 0
    for name, mine, expected in zip(NAMES, strided, torch.autograd.grad(o, tensors, ones.contiguous()), strict=True):
        assert torch.equal(mine, expected), name


@pytest.mark.parametrize("tokens", [1, 8, 64, 65])
def test_ra5_modes(device, dtype, tokens):
    made = inputs(tokens=tokens, dtype=dtype, device=device, **DIMS)
    leaves = made.requires_grad()
    o, state = chunk_gated_delta_rule(**leaves.arguments(output_final_state=True))
    assert o.requires_grad and state.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            quiet_o, quiet_state = chunk_gated_delta_rule(**leaves.arguments(output_final_state=True))
        assert not quiet_o.requires_grad
        assert torch.equal(o, quiet_o) and torch.equal(state, quiet_state)
    assert not chunk_gated_delta_rule(**made.arguments())[0].requires_grad


def test_ra5_refused_at_the_call(device):
    made = inputs(tokens=8, device=device, **DIMS).requires_grad()
    with pytest.raises(TypeError, match="q: must have one of the dtypes"):
        chunk_gated_delta_rule(**made.arguments(q=made.q.detach().long()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_ra6_checkpoint(device, dtype, reentrant):
    made = inputs(tokens=600, lengths=(73, 0, 400, 94), dtype=dtype, device=device, **DIMS)
    expected = outcome(chunk_gated_delta_rule, made)
    leaves = made.requires_grad()
    tensors = [getattr(leaves, name) for name in NAMES]

    def layer(*tensors: torch.Tensor):
        keywords = dict(zip(NAMES, tensors, strict=True))
        return chunk_gated_delta_rule(**keywords, cu_seqlens=made.cu_seqlens, output_final_state=True)

    o, state = checkpoint(layer, *tensors, use_reentrant=reentrant)
    torch.autograd.backward((o, state), (made.do, made.dht))
    assert torch.equal(o, expected["o"]) and torch.equal(state, expected["final_state"])
    for name, tensor in zip(NAMES, tensors, strict=True):
        assert torch.equal(tensor.grad, expected[f"d{name}"]), name
