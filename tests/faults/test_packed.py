"""Recipes RV: packed sequences, empty ones, padding, bad offsets."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from flashqla import chunk_gated_delta_rule
from flashqla.testing import check, check_outcome, compare, inputs, oracle64, outcome

pytestmark = pytest.mark.usefixtures("poisoned")

PER_TOKEN = ("q", "k", "v", "g", "beta")


def packed(tokens: int, lengths, **changes):
    defaults = {"heads": 2, "value_heads": 4, "head_dim_k": 64, "head_dim_v": 64, "recipe": "faults"}
    return inputs(tokens=tokens, lengths=lengths, **(defaults | changes))


def one_by_one(made, lengths) -> dict[str, torch.Tensor]:
    """The outcome of a packed call, from a separate dense call for every sequence."""
    parts, start = [], 0
    for index, length in enumerate(lengths):
        rows = slice(start, start + length)
        single = {name: getattr(made, name)[:, rows] for name in (*PER_TOKEN, "do")}
        state = None if made.initial_state is None else made.initial_state[index : index + 1]
        part = type(made)(**single, initial_state=state, cu_seqlens=None, dht=made.dht[index : index + 1])
        parts.append(outcome(chunk_gated_delta_rule, part))
        start += length
    return {name: torch.cat([part[name] for part in parts], dim=0 if "state" in name else 1) for name in parts[0]}


@pytest.mark.parametrize("given", [True, False], ids=["initial state", "no initial state"])
@pytest.mark.parametrize("lengths", [(0, 5, 0, 128, 0), (0,), (0, 0, 64), (64, 0)])
def test_rv1_empty_sequences(device, dtype, lengths, given):
    made = packed(sum(lengths), lengths, initial_state=given, dtype=dtype, device=device)
    results = outcome(chunk_gated_delta_rule, made)
    full = [index for index, length in enumerate(lengths) if length]
    empty = [index for index, length in enumerate(lengths) if not length]
    without = packed(sum(lengths), [lengths[index] for index in full], initial_state=given, device=device, dtype=dtype)
    for name in (*PER_TOKEN, "do"):
        setattr(without, name, getattr(made, name))
    without.dht = made.dht[full]
    without.initial_state = made.initial_state[full] if given else None
    expected = outcome(chunk_gated_delta_rule, without)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert torch.equal(results[name], expected[name]), name
    kept = made.initial_state if given else torch.zeros_like(made.dht)
    assert torch.equal(results["final_state"][empty], kept[empty])
    assert torch.equal(results["final_state"][full], expected["final_state"])
    if given:
        assert torch.equal(results["dinitial_state"][empty], made.dht[empty])
        assert torch.equal(results["dinitial_state"][full], expected["dinitial_state"])


@pytest.mark.parametrize("state", ["none", "zeros", "random"])
@pytest.mark.parametrize(
    "lengths",
    [(124, 120, 124, 122, 119, 120, 52), (64, *[6] * 12), (1,) * 40, (500, *[1] * 16), (63, 64, 65) * 3],
    ids=["even", "long and short", "single tokens", "one long", "around a chunk"],
)
def test_rv2_ragged(device, lengths, state):
    made = packed(sum(lengths), lengths, initial_state=state != "none", dtype=torch.bfloat16, device=device)
    if state == "zeros":
        made.initial_state.zero_()
    results, expected = outcome(chunk_gated_delta_rule, made), one_by_one(made, lengths)
    check_outcome("RV2", results, expected, 1e-3, 1e-3)


ACTIVATIONS = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


@pytest.mark.parametrize("activations", [{}, ACTIVATIONS], ids=["plain", "activations inside"])
def test_rv3_poisoned_tail(device, dtype, activations):
    if activations:
        parameters = torch.tensor([-1.0, 0.0, 0.5, 1.0], device=device, dtype=torch.float32)
        activations = activations | {"A_log": parameters, "dt_bias": parameters}
    made = packed(256, (73, 42, 94), dtype=dtype, device=device)
    for name in (*PER_TOKEN, "do"):
        getattr(made, name)[:, 209:] = 0
    clean = outcome(chunk_gated_delta_rule, made, **activations)
    for name in (*PER_TOKEN, "do"):
        getattr(made, name)[:, 209:] = float("nan")
    results = outcome(chunk_gated_delta_rule, made, **activations)
    for name, tensor in results.items():
        assert torch.equal(tensor, clean[name]), name
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert (results[name][:, 209:] == 0).all(), name


BAD = {
    "decreasing": ([0, 64, 32, 128], "never decrease"),
    "late start": ([5, 64, 128], "start with 0"),
    "past the end": ([0, 64, 300], "end at or before T = 128"),
    "negative": ([0, -3, 128], "negative length"),
}


@pytest.mark.parametrize("place", ["cu_seqlens", "cu_seqlens_cpu"])
@pytest.mark.parametrize("case", BAD)
def test_rv4_bad_values(device, monkeypatch, case, place):
    offsets, message = BAD[case]
    monkeypatch.setenv("FLASHQLA_DEBUG", "1" if device.type == "cuda" and place == "cu_seqlens" else "0")
    made = packed(128, [128 // (len(offsets) - 1)] * (len(offsets) - 1), device=device)
    made.cu_seqlens = torch.tensor(offsets, device=device)
    extra = {"cu_seqlens_cpu": torch.tensor(offsets)} if place == "cu_seqlens_cpu" else {}
    with pytest.raises(ValueError, match=message):
        chunk_gated_delta_rule(**made.arguments(**extra))


def test_rv4_bad_shapes(device):
    made = packed(128, (64, 64), device=device)
    two = inputs(batch=2, tokens=128, heads=2, value_heads=4, device=device)
    offsets = made.cu_seqlens
    cases = [
        (ValueError, "q: must have batch size 1", two.arguments(cu_seqlens=offsets)),
        (ValueError, "initial_state: must have shape", made.arguments(initial_state=made.initial_state[:1])),
        (ValueError, r"cu_seqlens: must have shape \[N \+ 1\]", made.arguments(cu_seqlens=offsets[None])),
        (TypeError, "cu_seqlens: must have dtype", made.arguments(cu_seqlens=offsets.float())),
        (TypeError, "cu_seqlens: must be a tensor, got list", made.arguments(cu_seqlens=[0, 64, 128])),
        (ValueError, "cu_seqlens_cpu: must have shape", made.arguments(cu_seqlens_cpu=torch.tensor([0, 128]))),
        (ValueError, "cu_seqlens_cpu: is the host copy", made.arguments(cu_seqlens=None, cu_seqlens_cpu=offsets.cpu())),
    ]
    for error, message, arguments in cases:
        with pytest.raises(error, match=message):
            chunk_gated_delta_rule(**arguments)


def test_rv4_survives_optimised_python():
    script = (
        "import torch, flashqla\n"
        "x = torch.zeros(1, 8, 1, 4); s = torch.zeros(1, 8, 1)\n"
        "try: flashqla.chunk_gated_delta_rule(x, x, x, s, s, cu_seqlens=torch.tensor([0, 9]))\n"
        "except ValueError as error: print('refused:', error)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-O", "-c", script], capture_output=True, text=True, env=os.environ, check=True
    )
    assert "refused: chunk_gated_delta_rule: cu_seqlens: must end at or before T = 8, got 9" in ran.stdout


def test_rv5_isolation(device, dtype):
    lengths = (73, 42, 94)
    made = packed(209, lengths, gate=0.0, dtype=dtype, device=device)
    made.beta = torch.ones_like(made.beta)
    results = outcome(chunk_gated_delta_rule, made)
    limit = 1e-12 if dtype == torch.float64 else 1e-3
    check_outcome("RV5", results, one_by_one(made, lengths), limit, limit)
    other = packed(209, lengths, gate=0.0, dtype=dtype, device=device, seed=1)
    for name in (*PER_TOKEN, "do"):
        getattr(other, name)[:, 73:] = getattr(made, name)[:, 73:]
    other.initial_state[1:], other.dht[1:] = made.initial_state[1:], made.dht[1:]
    changed = outcome(chunk_gated_delta_rule, other)
    for name, tensor in results.items():
        rest = (slice(1, None),) if "state" in name else (slice(None), slice(73, None))
        assert torch.equal(tensor[rest], changed[name][rest]), f"{name} of sequences 1 and 2 depends on sequence 0"
    made.do[:, :73], made.do[:, 115:] = 0, 0
    made.dht.zero_()
    from_one = outcome(chunk_gated_delta_rule, made)
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert from_one[name][:, 73:115].abs().sum() > 0, name
        assert (from_one[name][:, :73] == 0).all() and (from_one[name][:, 115:] == 0).all(), name
    assert (from_one["dinitial_state"][[0, 2]] == 0).all()


@pytest.mark.parametrize("shift", [1, 17, 63, 64])
def test_rv6_no_op_shift(device, dtype, rerun_limit, shift):
    made = packed(130, None, dtype=dtype, device=device)
    front = packed(shift, None, dtype=dtype, device=device, seed=1)
    front.g, front.beta = torch.zeros_like(front.g), torch.zeros_like(front.beta)
    front.do.zero_()
    longer = {name: torch.cat([getattr(front, name), getattr(made, name)], 1) for name in (*PER_TOKEN, "do")}
    moved = type(made)(**longer, initial_state=made.initial_state, cu_seqlens=None, dht=made.dht)
    plain, shifted = (outcome(chunk_gated_delta_rule, case) for case in (made, moved))
    assert shifted["dbeta"][:, :shift].abs().sum() > 0, "a token that writes nothing still has a gradient of beta"
    truth = outcome(oracle64, moved)
    check("RV6 dbeta", shifted["dbeta"], truth["dbeta"], 1e-10 if dtype == torch.float64 else 2e-2)
    shifted = {name: x if "state" in name else x[:, shift:] for name, x in shifted.items()}
    check_outcome("RV6", shifted, plain, rerun_limit, rerun_limit)


def test_rv7_many_documents(device, dtype):
    documents, length = 410, 16
    dims = {"heads": 2, "value_heads": 2, "head_dim_k": 16, "head_dim_v": 16}
    made = packed(documents * length, [length] * documents, dtype=dtype, device=device, **dims)
    o, state = chunk_gated_delta_rule(**made.arguments(output_final_state=True))
    for half in (slice(0, documents // 2), slice(documents // 2, documents)):
        rows = slice(half.start * length, half.stop * length)
        part = {name: getattr(made, name)[:, rows] for name in PER_TOKEN}
        offsets = made.cu_seqlens[half.start : half.stop + 1] - made.cu_seqlens[half.start]
        part |= {"initial_state": made.initial_state[half], "cu_seqlens": offsets}
        half_o, half_state = chunk_gated_delta_rule(**part, output_final_state=True)
        assert compare(o[:, rows], half_o).relative_l2 <= 1e-6
        assert compare(state[half], half_state).relative_l2 <= 1e-6


@pytest.mark.parametrize("parallel", ["auto", True])
@pytest.mark.parametrize("case", ["no batch", "no tokens", "no sequences", "only empty sequences"])
def test_rv11_nothing_to_do(device, dtype, case, parallel):
    batch, tokens, lengths = {
        "no batch": (0, 65, None),
        "no tokens": (2, 0, None),
        "no sequences": (1, 0, ()),
        "only empty sequences": (1, 0, (0, 0)),
    }[case]
    made = packed(tokens, lengths, batch=batch, dtype=dtype, device=device)
    results = outcome(chunk_gated_delta_rule, made, context_parallel=parallel, backend="reference")
    assert results["o"].shape == made.v.shape
    assert torch.equal(results["final_state"], made.initial_state)
    assert torch.equal(results["dinitial_state"], made.dht)
    assert all(results[f"d{name}"].shape == getattr(made, name).shape for name in PER_TOKEN)
