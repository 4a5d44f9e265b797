"""The Hopper forward: right at every shape it takes, against float64 and against the same sequence alone."""

import pytest
import torch
import torch.nn.functional as F

from flashqla import chunk_gated_delta_rule, testing

FORWARD = 6e-3  # relative L2 of o and of the state; bf16 rounding alone is 1.7e-3, the peers have 4.0e-3
DEVICE = "cuda"


def both(made, **options):
    """Kernels and float64, without gradients."""
    arguments = dict(q=made.q, k=made.k, v=made.v, g=made.g, beta=made.beta, initial_state=made.initial_state)
    with torch.no_grad():
        mine = chunk_gated_delta_rule(
            **arguments, cu_seqlens=made.cu_seqlens, output_final_state=True, backend="hopper", **options
        )
        exact = testing.oracle64(**arguments, cu_seqlens=made.cu_seqlens, output_final_state=True, **options)
    return mine, exact


def agree(mine, exact, limit=FORWARD):
    for name, x, y in zip(("o", "final_state"), mine, exact, strict=True):
        testing.check(name, x, y, limit)


@pytest.mark.parametrize("heads", [(1, 1), (2, 6), (1, 7), (4, 16), (2, 2), (1, 8), (16, 48)])
def test_head_ratios(heads):
    made = testing.inputs(2, 200, *heads, 128, 128, dtype=torch.bfloat16, device=DEVICE)
    agree(*both(made))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", [0.0, -0.3, -1.0, -2.0, -5.0, -20.0])
def test_gates_of_every_strength(gate, dtype):
    made = testing.inputs(1, 1000, 2, 4, 128, 128, gate=gate, dtype=dtype, device=DEVICE)
    agree(*both(made))


def test_resets_among_mild_gates():
    made = testing.inputs(1, 3000, 2, 4, 128, 128, gate=-0.01, dtype=torch.bfloat16, device=DEVICE)
    torch.manual_seed(1)
    made.g[torch.rand(made.g.shape, device=DEVICE) < 0.01] = -300.0
    agree(*both(made))


def test_error_does_not_grow_with_length():
    errors = []
    for tokens in (512, 4096, 32768):
        made = testing.inputs(1, tokens, 1, 2, 128, 128, gate=-1e-4, dtype=torch.bfloat16, device=DEVICE)
        mine, exact = both(made)
        errors.append(testing.compare(mine[0][:, -64:], exact[0][:, -64:]).relative_l2)
    assert max(errors) < FORWARD, errors


def test_rm1_more_than_2_to_the_31_elements():
    heads, last, tokens = 64, 64, 262208  # 262208 * 64 * 128 > 2^31
    torch.manual_seed(0)
    q, k, v = (torch.empty(1, tokens, heads, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
    for x in (q, k, v):
        x.normal_()
    k /= k.norm(dim=-1, keepdim=True)
    g, beta = -torch.rand(1, tokens, heads, device=DEVICE), torch.rand(1, tokens, heads, device=DEVICE)
    for x in (q, k, v, g, beta):
        x[:, -last:] = x[:, :last]
    offsets = torch.tensor([0, last, tokens - last, tokens], dtype=torch.int32, device=DEVICE)
    with torch.no_grad():
        o, state = chunk_gated_delta_rule(
            q, k, v, g, beta, cu_seqlens=offsets, output_final_state=True, backend="hopper"
        )
    assert torch.equal(o[:, -last:], o[:, :last]) and torch.equal(state[2], state[0])


def test_rv7_many_documents():
    documents, heads = 2050, 32  # documents * heads > 65535
    made = testing.inputs(
        1, documents * 16, heads, heads, 64, 64, lengths=(16,) * documents, dtype=torch.bfloat16, device=DEVICE
    )
    with torch.no_grad():
        o, state = chunk_gated_delta_rule(
            made.q, made.k, made.v, made.g, made.beta, initial_state=made.initial_state,
            cu_seqlens=made.cu_seqlens, output_final_state=True, backend="hopper",
        )  # fmt: skip
        last, last_state = chunk_gated_delta_rule(
            *(x[:, -16:].contiguous() for x in (made.q, made.k, made.v, made.g, made.beta)),
            initial_state=made.initial_state[-1:], output_final_state=True, backend="hopper",
        )  # fmt: skip
    assert torch.equal(o[:, -16:], last) and torch.equal(state[-1:], last_state)


def test_sequences_do_not_depend_on_their_batch():
    made = testing.inputs(1, 700, 2, 8, 128, 128, lengths=(73, 0, 427, 200), dtype=torch.bfloat16, device=DEVICE)
    with torch.no_grad():
        together, _ = chunk_gated_delta_rule(
            made.q, made.k, made.v, made.g, made.beta, initial_state=made.initial_state, cu_seqlens=made.cu_seqlens,
            output_final_state=True, backend="hopper",
        )  # fmt: skip
        for i, (start, end) in enumerate(((0, 73), (73, 73), (73, 500), (500, 700))):
            alone, _ = chunk_gated_delta_rule(
                *(x[:, start:end].contiguous() for x in (made.q, made.k, made.v, made.g, made.beta)),
                initial_state=made.initial_state[i : i + 1], output_final_state=True, backend="hopper",
            )  # fmt: skip
            assert torch.equal(together[:, start:end], alone)


@pytest.mark.parametrize("offset", [1, 4, 8])
def test_misaligned_and_strided_views(offset):
    tokens, heads, value_heads = 300, 2, 4
    torch.manual_seed(2)
    width = (2 * heads + value_heads) * 128
    fused = torch.randn(1, tokens, width + 8, dtype=torch.bfloat16, device=DEVICE)[..., offset : offset + width]
    q, k, v = fused.split([heads * 128, heads * 128, value_heads * 128], -1)
    q, k, v = q.unflatten(-1, (heads, 128)), k.unflatten(-1, (heads, 128)), v.unflatten(-1, (value_heads, 128))
    gates = torch.rand(1, tokens, value_heads, 2, device=DEVICE)
    options = dict(use_qk_l2norm_in_kernel=True, output_final_state=True, backend="hopper")
    with torch.no_grad():
        viewed = chunk_gated_delta_rule(q, k, v, -gates[..., 0], gates[..., 1], **options)
        plain = chunk_gated_delta_rule(
            *(x.contiguous().clone() for x in (q, k, v, -gates[..., 0], gates[..., 1])), **options
        )
    assert all(torch.equal(x, y) for x, y in zip(viewed, plain, strict=True))


def test_columns_split_or_not_give_the_same_bits():
    from flashqla import Plan

    made = testing.inputs(1, 500, 2, 8, 128, 128, dtype=torch.bfloat16, device=DEVICE)
    results = []
    for block_dv in (64, 128):
        plan = Plan.build(made.q.shape, made.v.shape, block_dv=block_dv)
        with torch.no_grad():
            results.append(
                chunk_gated_delta_rule(
                    made.q, made.k, made.v, made.g, made.beta, output_final_state=True, backend="hopper", plan=plan
                )
            )
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_overwrite_law():
    torch.manual_seed(3)
    k = F.normalize(torch.randn(1, 1000, 2, 128, device=DEVICE), dim=-1).bfloat16()
    v = torch.randn(1, 1000, 4, 128, device=DEVICE).bfloat16()
    g = -3 * torch.rand(1, 1000, 4, device=DEVICE)
    with torch.no_grad():
        o, _ = chunk_gated_delta_rule(k, k, v, g, torch.ones_like(g), scale=1.0, backend="hopper")
    testing.check("o = v", o, v, 1e-2)
