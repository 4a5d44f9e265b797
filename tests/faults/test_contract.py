"""Recipes RP: state hand-over, the grid of dtypes and head dims, options that are refused."""

from __future__ import annotations

import itertools

import pytest
import torch

from flashqla import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from flashqla.testing import check, check_outcome, compare, inputs, oracle64, outcome

pytestmark = pytest.mark.usefixtures("poisoned")

PER_TOKEN = ("q", "k", "v", "g", "beta")


@pytest.mark.parametrize("cut", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("v_first", [False, True], ids=["k first", "v first"])
def test_rp1_hand_over(device, dtype, limits, cut, v_first):
    made = inputs(
        tokens=200, recipe="faults", head_dim_k=64, head_dim_v=128, initial_state=False, dtype=dtype, device=device
    )
    made.g = 0.1 * made.g  # weak: the state matters
    head, tail = ({name: getattr(made, name)[:, rows] for name in PER_TOKEN} for rows in (slice(cut), slice(cut, None)))
    options = {"output_final_state": True, "state_v_first": v_first}
    state = chunk_gated_delta_rule(**made.arguments(), **options)[1]
    truth = oracle64(**made.arguments(), **options)
    head_o, carried = chunk_gated_delta_rule(**head, **options)
    for function in (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule):
        tail_o, final = function(**tail, initial_state=carried, **options)
        check("RP1 o", torch.cat([head_o, tail_o], 1), truth.output, limits.output)
        check("RP1 state", final, truth.final_state, limits.output)
    other = chunk_gated_delta_rule(**made.arguments(), **(options | {"state_v_first": not v_first}))[1]
    assert torch.equal(state, other.mT)


def test_rp1_transposed_state_shows(device, dtype):
    made = inputs(tokens=200, recipe="faults", dtype=dtype, device=device)
    made.g = 0.1 * made.g
    right = chunk_gated_delta_rule(**made.arguments())[0]
    wrong = chunk_gated_delta_rule(**made.arguments(initial_state=made.initial_state.mT.contiguous()))[0]
    assert compare(wrong, right).relative_l2 > 5e-2


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_rp2_dtype_grid(device, kind, limits_of):
    limits = limits_of(device, kind)
    for small, state_dtype in itertools.product((torch.float32, torch.bfloat16, kind), (torch.float32, torch.bfloat16)):
        made = inputs(tokens=70, recipe="faults", dtype=kind, device=device)
        made.g, made.beta, made.initial_state = (
            made.g.to(small),
            made.beta.to(small),
            made.initial_state.to(state_dtype),
        )
        results = outcome(chunk_gated_delta_rule, made)
        assert results["o"].dtype == kind
        assert results["final_state"].dtype == (torch.float64 if kind == torch.float64 else torch.float32)
        for name in (*PER_TOKEN, "initial_state"):
            assert results[f"d{name}"].dtype == getattr(made, name).dtype
        coarse = limits_of(device, torch.bfloat16).gradient  # of a gradient that comes back as bfloat16
        check_outcome(f"RP2 {kind} {small} {state_dtype}", results, outcome(oracle64, made), limits.output, coarse)


@pytest.mark.parametrize("scale", [None, 0.0, 1.0, 0.5, 2])
def test_rp2_scale(device, dtype, limits, scale):
    made = inputs(tokens=70, recipe="faults", dtype=dtype, device=device)
    results, truth = (outcome(function, made, scale=scale) for function in (chunk_gated_delta_rule, oracle64))
    check_outcome("RP2 scale", results, truth, *limits)
    if scale == 0.0:
        assert (results["o"] == 0).all() and (results["dq"] == 0).all()


def test_rp2_half_after_bfloat(device, limits_of):
    for kind in (torch.bfloat16, torch.float16):
        made = inputs(tokens=70, recipe="faults", dtype=kind, device=device)
        check(
            "RP2",
            chunk_gated_delta_rule(**made.arguments())[0],
            oracle64(**made.arguments()).output,
            limits_of(device, kind).output,
        )


@pytest.mark.parametrize("name", ["k", "v"])
def test_rp2_mixed_dtypes(device, name):
    made = inputs(tokens=8, dtype=torch.bfloat16, device=device)
    with pytest.raises(TypeError, match=f"{name}: must have dtype torch.bfloat16 like q, got torch.float32"):
        chunk_gated_delta_rule(**made.arguments(**{name: getattr(made, name).float()}))


def test_rp2_head_first(device):
    made = inputs(tokens=8, device=device)
    with pytest.raises(NotImplementedError, match="head_first: must be False, got True"):
        chunk_gated_delta_rule(**made.arguments(head_first=True))


DIMS = [(16, 16), (16, 48), (32, 80), (64, 128), (128, 64), (96, 96), (100, 36), (192, 128), (48, 256), (1, 1), (5, 7)]


@pytest.mark.parametrize("head_dim_k, head_dim_v", DIMS)
def test_rp3_head_dims(device, dtype, limits, head_dim_k, head_dim_v):
    made = inputs(tokens=70, recipe="faults", head_dim_k=head_dim_k, head_dim_v=head_dim_v, dtype=dtype, device=device)
    check_outcome("RP3", outcome(chunk_gated_delta_rule, made), outcome(oracle64, made), *limits)
