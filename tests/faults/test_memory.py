"""Recipes RM: strided views, the head map, dirty memory."""

from __future__ import annotations

import math

import pytest
import torch

from flashqla import chunk_gated_delta_rule
from flashqla.testing import check_outcome, compare, inputs, oracle64, outcome, poisoned_empty

DIMS = {"head_dim_k": 64, "head_dim_v": 64, "recipe": "faults"}


@pytest.mark.parametrize("value_heads", [2, 4])
def test_rm3_views(device, dtype, poisoned, value_heads):
    tokens, heads, dim = 130, 2, 64
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    sizes = (heads * dim, heads * dim, value_heads * dim)
    fused = (randn(1, tokens, sum(sizes)) / 8).to(dtype)
    q, k, v = (part.view(1, tokens, -1, dim) for part in fused.split(sizes, dim=-1))
    pair = torch.rand(1, tokens, value_heads, 2, generator=generator).to(device)
    pool, do = randn(2, value_heads, dim, dim), randn(1, value_heads, tokens, dim).to(dtype)
    views = {"q": q, "k": k, "v": v, "g": -pair[..., 1], "beta": pair[..., 0], "initial_state": pool[::2]}
    assert not (q.is_contiguous() or views["beta"].is_contiguous())

    def run(arguments: dict, gradient: torch.Tensor) -> list[torch.Tensor]:
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in arguments.items()}
        o, state = chunk_gated_delta_rule(**leaves, output_final_state=True)
        return [o, state, *torch.autograd.grad(o, leaves.values(), gradient)]

    before = [tensor.clone() for tensor in (fused, pair, pool, do)]
    from_views = run(views, do.transpose(1, 2))
    contiguous = {name: tensor.contiguous() for name, tensor in views.items()}
    for mine, expected in zip(from_views, run(contiguous, do.transpose(1, 2).contiguous()), strict=True):
        assert torch.equal(mine, expected)
    for tensor, kept in zip((fused, pair, pool, do), before, strict=True):
        assert torch.equal(tensor, kept), "an input was written to"


@pytest.mark.parametrize("heads, value_heads", [(2, 2), (2, 4), (2, 6), (2, 8), (2, 10), (1, 7), (4, 12)])
def test_rm5_head_map(device, dtype, limits, poisoned, heads, value_heads):
    made = inputs(tokens=70, heads=heads, value_heads=value_heads, dtype=dtype, device=device, **DIMS)
    grouped = outcome(chunk_gated_delta_rule, made)
    check_outcome("RM5", grouped, outcome(oracle64, made), *limits)
    group = value_heads // heads
    apart = inputs(tokens=70, heads=value_heads, value_heads=value_heads, dtype=dtype, device=device, **DIMS)
    for name in ("v", "g", "beta", "initial_state", "do", "dht"):
        setattr(apart, name, getattr(made, name))
    apart.q, apart.k = (x.repeat_interleave(group, dim=2) for x in (made.q, made.k))
    limit = 1e-12 if dtype == torch.float64 else 1e-3
    for name in ("o", "final_state", "dv", "dg", "dbeta", "dinitial_state"):
        assert compare(grouped[name], outcome(chunk_gated_delta_rule, apart)[name]).relative_l2 <= limit, name
    # Value heads of one group are interchangeable.
    order = torch.arange(value_heads, device=device).view(heads, group).flip(1).flatten()
    for name in ("v", "g", "beta", "do"):
        setattr(made, name, getattr(made, name)[:, :, order])
    made.initial_state, made.dht = made.initial_state[:, order], made.dht[:, order]
    permuted = outcome(chunk_gated_delta_rule, made)
    for name in ("o", "dv", "dg", "dbeta"):
        assert compare(permuted[name], grouped[name][:, :, order]).relative_l2 <= limit, name


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("tokens, lengths", [(64, None), (700, None), (256, (73, 0, 42, 94))])
def test_rm7_dirty_allocator(device, dtype, tokens, lengths, state, parallel):
    made = inputs(tokens=tokens, lengths=lengths, initial_state=state, dtype=dtype, device=device, **DIMS)
    options = {"context_parallel": parallel, "backend": "reference" if parallel else "auto"}
    clean = outcome(chunk_gated_delta_rule, made, **options)
    with poisoned_empty():
        assert (
            torch.empty(3).isnan().all()
            and torch.empty_like(made.g).isnan().all()
            and made.g.new_empty(2).isnan().all()
        )
        dirty = outcome(chunk_gated_delta_rule, made, **options)
    for name, tensor in dirty.items():
        assert torch.equal(tensor, clean[name]), name


CANARY, MARGIN = 0xAB, 4096


@pytest.mark.parametrize("tokens, lengths", [(1, None), (63, None), (65, None), (129, None), (129, (1, 63, 65))])
def test_rm6_canary(device, dtype, monkeypatch, tokens, lengths):
    """Nothing is written beside what `torch.empty` and its kin have given out."""
    made = inputs(tokens=tokens, lengths=lengths, dtype=dtype, device=device, **DIMS)
    expected, blocks = outcome(chunk_gated_delta_rule, made), []
    empty = torch.empty

    def fenced(shape, dtype: torch.dtype, where: torch.device) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        block = empty(size + 2 * MARGIN, dtype=torch.uint8, device=where).fill_(CANARY)
        blocks.append((block, size))
        return block[MARGIN : MARGIN + size].view(dtype).view(shape)

    def like(tensor, *shape, dtype=None, device=None, **_):
        shape = shape[0] if shape and not isinstance(shape[0], int) else shape
        return fenced(tuple(shape), dtype or tensor.dtype, device or tensor.device)

    def fresh(*shape, dtype=None, device=None, **_):
        shape = shape[0] if shape and not isinstance(shape[0], int) else shape
        return fenced(tuple(shape), dtype or torch.get_default_dtype(), device or torch.device("cpu"))

    monkeypatch.setattr(torch, "empty", fresh)
    monkeypatch.setattr(torch, "empty_like", lambda tensor, **options: like(tensor, tensor.shape, **options))
    monkeypatch.setattr(torch.Tensor, "new_empty", like)
    results = outcome(chunk_gated_delta_rule, made)
    monkeypatch.undo()
    assert len(blocks) > 3
    for block, size in blocks:
        assert (block[:MARGIN] == CANARY).all() and (block[MARGIN + size :] == CANARY).all()
    for name, tensor in results.items():
        assert torch.equal(tensor, expected[name]), name
