"""Plan: host numbers only, bounds where lengths are unknown, the cheapest split of d_v."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch

from flashqla import Plan, chunk_gated_delta_rule
from flashqla.plan import COST_PER_CHUNK, sequence_lengths
from flashqla.testing import inputs


def shapes(batch: int = 1, tokens: int = 8192, heads: int = 16, value_heads: int = 64, dim: int = 128):
    return (batch, tokens, heads, dim), (batch, tokens, value_heads, dim)


def test_dense():
    plan = Plan.build(*shapes(batch=3, tokens=130))
    assert (plan.num_sequences, plan.num_tokens, plan.max_seqlen, plan.num_chunks) == (3, 390, 130, 9)
    assert (plan.num_heads, plan.num_value_heads, plan.head_dim_k, plan.head_dim_v) == (16, 64, 128, 128)
    assert not plan.packed and plan.lengths is None and plan.chunk_size == 64


def test_packed_with_known_lengths():
    plan = Plan.build(*shapes(tokens=300), cu_seqlens_shape=(5,), lengths=[64, 0, 65, 1])
    assert (plan.num_sequences, plan.max_seqlen, plan.num_chunks) == (4, 65, 1 + 0 + 2 + 1)
    assert plan.packed and plan.lengths == (64, 0, 65, 1)


@pytest.mark.parametrize("lengths", [(300,), (0, 0, 300), (1,) * 300, (63, 64, 65, 108), (7, 200)])
def test_packed_bound_holds(lengths):
    known = Plan.build(*shapes(tokens=300), lengths=lengths)
    bound = Plan.build(*shapes(tokens=300), cu_seqlens_shape=(len(lengths) + 1,))
    assert bound.num_chunks == 300 // 64 + len(lengths)
    assert known.num_chunks <= bound.num_chunks and known.max_seqlen <= bound.max_seqlen
    assert known.num_sequences == bound.num_sequences and bound.lengths is None


def test_nothing_to_do():
    for plan in (Plan.build(*shapes(batch=0)), Plan.build(*shapes(tokens=0), cu_seqlens_shape=(1,), lengths=())):
        assert plan.chains == plan.blocks == plan.num_chunks == 0
        assert "0 independent chains" in plan.explain()


@pytest.mark.parametrize(
    "sequences, value_heads",
    [(1, 64), (1, 32), (2, 64), (3, 64), (8, 64)],
    ids=["64 chains", "32 chains", "128 chains", "192 chains", "512 chains"],
)
def test_block_dv_is_the_cheapest(sequences, value_heads):
    plan = Plan.build(*shapes(batch=sequences, value_heads=value_heads), sm_count=132)
    costs = {
        columns: -(-sequences * value_heads * 128 // columns // 132) * COST_PER_CHUNK[columns] for columns in (128, 64)
    }
    assert plan.block_dv == min(costs, key=costs.get)


def test_few_chains_share_a_state_between_blocks():
    assert Plan.build(*shapes(value_heads=16)).block_dv == 64


def test_block_dv_of_other_dims():
    assert Plan.build(*shapes(dim=64)).block_dv == 64
    assert Plan.build(*shapes(dim=80)).block_dv == 80
    assert Plan.build(*shapes(), block_dv=128).block_dv == 128
    with pytest.raises(ValueError, match="block_dv: must divide V = 128, got 48"):
        Plan.build(*shapes(), block_dv=48)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"q_shape": (1, 8, 2)}, r"q_shape: must be 4 sizes, none of them negative, got \[1, 8, 2\]"),
        ({"v_shape": (1, -8, 2, 128)}, r"v_shape: must be 4 sizes, none of them negative, got \[1, -8, 2, 128\]"),
        ({"block_dv": 0}, "block_dv: must divide V = 128, got 0"),
        ({"block_dv": -64}, "block_dv: must divide V = 128, got -64"),
        ({"sm_count": 0}, "sm_count: must be at least 1, got 0"),
    ],
    ids=str,
)
def test_nonsense_is_refused(wrong, message):
    q_shape, v_shape = shapes()
    with pytest.raises(ValueError, match=message):
        Plan.build(**({"q_shape": q_shape, "v_shape": v_shape} | wrong))


def test_copies_and_pickles():
    plan = Plan.build(*shapes(tokens=300), lengths=[64, 0, 65, 1])
    assert copy.deepcopy(plan) == pickle.loads(pickle.dumps(plan)) == plan


def test_explain_names_the_choice_and_the_alternative():
    text = Plan.build(*shapes()).explain()
    for columns, verdict in ((64, "chosen"), (128, "alternative")):
        cost = COST_PER_CHUNK[columns]
        assert f"{columns} columns a block: 1 waves x {cost} = {cost:.2f} ({verdict})" in text


def test_hashable_and_frozen():
    plan = Plan.build(*shapes())
    assert plan == Plan.build(*shapes()) and hash(plan) == hash(Plan.build(*shapes()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.block_dv = 32


def test_mismatches_name_every_difference():
    plan = Plan.build(*shapes())
    assert plan.mismatches(*shapes()) == []
    assert plan.mismatches(*shapes(tokens=64, heads=8)) == [
        "was made for num_tokens = 8192, this call has 64",
        "was made for num_heads = 16, this call has 8",
    ]
    assert plan.mismatches(*shapes(), (2,)) == ["was made for packed = False, this call has True"]


def test_wrong_lengths_are_listed_at_once():
    with pytest.raises(ValueError) as caught:
        Plan.build(*shapes(tokens=64), cu_seqlens_shape=(5,), lengths=[-1, 66])
    for part in ("must not be negative, got -1", "at most T = 64, got 65", "must be 4 in number"):
        assert part in str(caught.value)


def test_sequence_lengths():
    assert sequence_lengths([0, 5, 5, 9], 9) == (5, 0, 4)
    assert sequence_lengths([0], 9) == ()
    with pytest.raises(ValueError) as caught:
        sequence_lengths([2, 1, 12], 9)
    for part in ("start with 0, got 2", "negative length for sequence 0 (2 is followed by 1)", "T = 9, got 12"):
        assert part in str(caught.value)


def test_no_device_is_read():
    """Shapes of tensors that have no values are enough."""
    q, v = (torch.empty(shape, device="meta") for shape in shapes())
    assert Plan.build(q.shape, v.shape) == Plan.build(*shapes())


def test_a_plan_that_served_inference_also_trains():
    made = inputs(tokens=70, lengths=(30, 40))
    plan = Plan.build(made.q.shape, made.v.shape, made.cu_seqlens.shape, (30, 40))
    with torch.inference_mode():
        chunk_gated_delta_rule(**made.arguments(plan=plan))
    made.q.requires_grad_()
    chunk_gated_delta_rule(**made.arguments(plan=plan))[0].sum().backward()
    assert made.q.grad is not None
