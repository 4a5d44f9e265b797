"""Every requirement is refused by name, all of one call at once, with what it must be and what it was."""

from __future__ import annotations

import pytest
import torch

from flashqla import (
    Plan,
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    fused_recurrent_gated_delta_rule,
    validation,
)
from flashqla.testing import inputs


@pytest.fixture
def made(device):
    return inputs(batch=2, tokens=8, heads=2, value_heads=4, head_dim_k=16, head_dim_v=32, device=device)


def changed(made, name):
    """Cases below change one tensor of a valid call."""
    tensor = getattr(made, name)
    return {
        "long": tensor.long(),
        "short": tensor[:1],
        "flat": tensor.flatten(),
        "list": tensor.tolist(),
        "none": None,
    }


TENSOR_CASES = [
    ("q", "list", TypeError, "q: must be a tensor, got list"),
    ("q", "none", TypeError, "q: must be a tensor, got NoneType"),
    ("q", "flat", ValueError, "q: must have 4 dimensions, got shape [512]"),
    ("k", "short", ValueError, "k: must have shape [2, 8, 2, 16] like q, got [1, 8, 2, 16]"),
    ("v", "short", ValueError, "v: must have shape [B, T, HV, V] with B = 2 and T = 8 like q, got [1, 8, 4, 32]"),
    ("g", "short", ValueError, "g: must have shape [B, T, HV] = [2, 8, 4], got [1, 8, 4]"),
    ("beta", "flat", ValueError, "beta: must have 3 dimensions, got shape [64]"),
    ("beta", "long", TypeError, "beta: must have one of the dtypes torch.float16, torch.bfloat16, torch.float32,"),
    ("v", "long", TypeError, "v: must have dtype torch.float32 like q, got torch.int64"),
    ("initial_state", "short", ValueError, "initial_state: must have shape [N, HV, K, V] = [2, 4, 16, 32], got [1,"),
    ("initial_state", "list", TypeError, "initial_state: must be a tensor, got list"),
]


@pytest.mark.parametrize("name, change, error, message", TENSOR_CASES, ids=[f"{c[0]} {c[1]}" for c in TENSOR_CASES])
@pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
def test_tensors(made, function, name, change, error, message):
    with pytest.raises(error) as caught:
        function(**made.arguments(**{name: changed(made, name)[change]}))
    assert message in str(caught.value)
    assert function.__name__ in str(caught.value)


@pytest.mark.parametrize("name", ["g", "beta"])
def test_chunks_need_gate_and_beta(made, name):
    """Only the recurrent function has a meaning for None."""
    with pytest.raises(TypeError, match=f"{name}: must be a tensor, got NoneType"):
        chunk_gated_delta_rule(**made.arguments(**{name: None}))


OPTION_CASES = [
    ({"scale": "1"}, TypeError, "scale: must be a number or None, got str"),
    ({"scale": True}, TypeError, "scale: must be a number or None, got bool"),
    ({"scale": float("nan")}, ValueError, "scale: must be finite, got nan"),
    ({"scale": 10**400}, ValueError, "scale: must be finite, got 1000"),
    ({"output_final_state": "yes"}, TypeError, "output_final_state: must be True or False, got str"),
    ({"allow_neg_eigval": True}, ValueError, "allow_neg_eigval: needs use_beta_sigmoid_in_kernel=True"),
    ({"use_gate_in_kernel": True}, ValueError, "A_log: must be a tensor of shape [HV] with use_gate_in_kernel=True"),
    ({"chunk_size": 128}, ValueError, "chunk_size: must be one of [16, 32, 64], got 128"),
    ({"context_parallel": "yes"}, ValueError, "context_parallel: must be \"auto\", True or False, got 'yes'"),
    ({"context_parallel": 1}, ValueError, 'context_parallel: must be "auto", True or False, got 1'),
    ({"cp_threshold": 0.0}, ValueError, "cp_threshold: must be a negative log decay or None, got 0.0"),
    ({"cp_threshold": float("nan")}, ValueError, "cp_threshold: must be a negative log decay or None, got nan"),
    ({"cp_threshold": -float("inf")}, ValueError, "cp_threshold: must be a negative log decay or None, got -inf"),
    ({"cp_threshold": "-10"}, TypeError, "cp_threshold: must be a number or None, got str"),
    ({"context_parallel": torch.ones(2)}, ValueError, 'context_parallel: must be "auto", True or False, got tensor'),
    (
        {"backend": "cutlass"},
        ValueError,
        "backend: must be one of ['auto', 'hopper', 'fla', 'reference'], got 'cutlass'",
    ),
    ({"cp_group": object()}, NotImplementedError, "cp_group: must be None, got object"),
    ({"cp_context": object()}, NotImplementedError, "cp_context: must be None, got object"),
    ({"gk": 1}, NotImplementedError, "gk: must be None, got int: the gated delta rule has one decay per value head"),
    ({"head_first": True}, NotImplementedError, "head_first: must be False, got True"),
    ({"initial_sate": None}, TypeError, "initial_sate: unknown keyword; did you mean initial_state?"),
    ({"xyzzy": None}, TypeError, "xyzzy: unknown keyword"),
    ({"do": None}, TypeError, "do: unknown keyword"),
    ({"plan": 3}, TypeError, "plan: must be a flashqla.Plan, got int"),
]


@pytest.mark.parametrize("options, error, message", OPTION_CASES, ids=[str(c[0]) for c in OPTION_CASES])
@pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
def test_options(made, function, options, error, message):
    with pytest.raises(error) as caught:
        function(**made.arguments(**options))
    assert message in str(caught.value)


@pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
def test_harmless_options(made, function):
    """Spelled-out defaults, hints and what the gate alone would use change nothing."""
    plain = function(**made.arguments())[0]
    extra = {"head_first": False, "chunk_size": 32, "chunk_indices": None, "A_log": "unused", "cp_context": None}
    assert torch.equal(function(**made.arguments(**extra))[0], plain)
    assert function(**made.arguments(output_final_state=None))[1] is None


def test_head_ratio(made):
    with pytest.raises(ValueError, match="v: must have a number of heads HV divisible by q's H = 2, got HV = 3"):
        chunk_gated_delta_rule(made.q, made.k, made.v[:, :, :3], made.g[..., :3], made.beta[..., :3])


def test_state_layout(made):
    with pytest.raises(ValueError) as caught:
        chunk_gated_delta_rule(**made.arguments(state_v_first=True))
    assert "initial_state: must have shape [N, HV, V, K] = [2, 4, 32, 16], got [2, 4, 16, 32]" in str(caught.value)


def test_gate_parameters(made):
    with pytest.raises(ValueError) as caught:
        chunk_gated_delta_rule(**made.arguments(use_gate_in_kernel=True, A_log=made.g[0, 0, :3], dt_bias=made.g))
    assert "A_log: must have shape [HV] = [4], got [3]" in str(caught.value)
    assert "dt_bias: must have 1 dimensions, got shape [2, 8, 4]" in str(caught.value)


def test_all_problems_at_once(made):
    with pytest.raises(TypeError) as caught:
        chunk_gated_delta_rule(
            **made.arguments(
                k=made.k[:, :, :1],
                v=made.v.bfloat16(),
                g=made.g[..., :2],
                scale="big",
                cu_seqlens=torch.zeros(3),
                typo=1,
            )
        )
    text = str(caught.value)
    assert text.startswith("chunk_gated_delta_rule: 6 problems\n")
    for name in ("typo:", "k:", "v:", "g:", "scale:", "cu_seqlens:"):
        assert f"  - {name}" in text


def test_layouts(made):
    with pytest.raises(TypeError, match=r"q: must be a dense tensor, got layout torch\.sparse_coo"):
        chunk_gated_delta_rule(**made.arguments(q=made.q.to_sparse()))


def test_devices():
    made = inputs(tokens=8)
    with pytest.raises(ValueError, match="beta: must be on cpu like q, got meta"):
        chunk_gated_delta_rule(**made.arguments(beta=made.beta.to("meta")))


@pytest.mark.parametrize("backend", ["hopper", "fla"])
def test_gpu_backends_on_the_cpu(backend):
    made = inputs(tokens=8)
    with pytest.raises(NotImplementedError, match=f'backend: "{backend}" needs tensors on a CUDA device, got cpu'):
        chunk_gated_delta_rule(**made.arguments(backend=backend))


def test_plan_must_fit(made):
    plan = Plan.build(made.q.shape, made.v.shape)
    fitting = chunk_gated_delta_rule(**made.arguments(plan=plan))[0]
    assert torch.equal(fitting, chunk_gated_delta_rule(**made.arguments())[0])
    with pytest.raises(ValueError, match="plan: was made for num_tokens = 16, this call has 8"):
        chunk_gated_delta_rule(**inputs(tokens=8, head_dim_k=16, head_dim_v=32).arguments(plan=plan))


def test_plan_lengths_must_agree(device):
    made = inputs(tokens=8, lengths=(3, 5), device=device)
    plan = Plan.build(made.q.shape, made.v.shape, lengths=(3, 5))
    assert chunk_gated_delta_rule(**made.arguments(plan=plan))[0].isfinite().all()
    other = torch.tensor([0, 4, 8])
    with pytest.raises(ValueError, match=r"plan: was made for lengths \[3, 5\], this call has \[4, 4\]"):
        chunk_gated_delta_rule(**made.arguments(plan=plan, cu_seqlens=other.to(device), cu_seqlens_cpu=other))


def test_debug_compares_the_host_copy(device, monkeypatch):
    made = inputs(tokens=8, lengths=(3, 5), device=device)
    wrong = {"cu_seqlens_cpu": torch.tensor([0, 4, 8])}
    monkeypatch.setenv("FLASHQLA_DEBUG", "1")
    with pytest.raises(ValueError, match=r"cu_seqlens_cpu: must equal cu_seqlens = \[0, 3, 8\], got \[0, 4, 8\]"):
        chunk_gated_delta_rule(**made.arguments(**wrong))


def test_context_parallel_token_by_token(made):
    with pytest.raises(NotImplementedError, match="context_parallel: must be False or 'auto' token by token"):
        fused_recurrent_gated_delta_rule(**made.arguments(context_parallel=True))


def test_gradients_of_the_outputs(made):
    with pytest.raises(ValueError) as caught:
        chunk_gated_delta_rule_bwd(**made.arguments(cu_seqlens=None), do=made.do[:1], dht=made.dht[:1])
    assert "do: must have shape [B, T, HV, V] = [2, 8, 4, 32], got [1, 8, 4, 32]" in str(caught.value)
    assert "dht: must have shape [N, HV, K, V] = [2, 4, 16, 32], got [1, 4, 16, 32]" in str(caught.value)


def test_a_valid_call_is_judged_once(monkeypatch):
    """The verdict is kept for the next call of the same shapes, dtypes and options, and for no other."""
    made = inputs(tokens=70, heads=1, value_heads=3, head_dim_k=24, head_dim_v=40)
    judged = []
    find_problems = validation.find_problems
    monkeypatch.setattr(validation, "find_problems", lambda call: judged.append(call) or find_problems(call))
    for _ in range(3):
        chunk_gated_delta_rule(**made.arguments())
    assert len(judged) == 1
    chunk_gated_delta_rule(**made.arguments(scale=0.5))
    assert len(judged) == 2
    with pytest.raises(TypeError, match="beta"):
        chunk_gated_delta_rule(**made.arguments(beta=made.beta.to(torch.int32)))
    with pytest.raises(TypeError, match="beta"):
        chunk_gated_delta_rule(**made.arguments(beta=made.beta.to(torch.int32)))


def test_offsets_on_the_host_are_judged_each_time():
    made = inputs(tokens=70, lengths=(30, 40))
    chunk_gated_delta_rule(**made.arguments())
    made.cu_seqlens[1] = 80
    with pytest.raises(ValueError, match="cu_seqlens"):
        chunk_gated_delta_rule(**made.arguments())
