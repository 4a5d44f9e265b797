"""Plan: host numbers only, bounds where lengths are unknown, the cheapest split of d_v."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
import random

import pytest
import torch

from flashqla import Plan, chunk_gated_delta_rule, costs
from flashqla.costs import WORTH_IT, Cut
from flashqla.plan import sequence_lengths
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


SMS = (78, 114, 132, 144)
ROWS = [(1, 64, 32768), (1, 32, 32768), (1, 8, 32768), (1, 8, 2048), (2, 64, 8192), (3, 64, 8192), (8, 64, 1024)]


@pytest.mark.parametrize("sm_count", SMS)
@pytest.mark.parametrize("batch, value_heads, tokens", ROWS)
def test_the_cut_is_the_cheapest(batch, value_heads, tokens, sm_count):
    sizes = shapes(batch=batch, tokens=tokens, heads=value_heads // 4, value_heads=value_heads)
    costs = Plan.build(*sizes, sm_count=sm_count).costs()
    whole = {cut: cost for cut, cost in costs.items() if not cut.segment_chunks}
    parts = {cut: cost for cut, cost in costs.items() if cut.segment_chunks}
    expected = {False: min(whole, key=whole.get), True: min(parts, key=parts.get)}
    worth_it = parts[expected[True]] < WORTH_IT * whole[expected[False]]
    expected["auto"] = expected[worth_it]
    for choice, cut in expected.items():
        plan = Plan.build(*sizes, sm_count=sm_count, context_parallel=choice)
        assert (plan.block_dv, plan.segment_chunks) == cut
        assert plan.cost() == costs[cut]


def test_few_long_chains_are_cut_and_many_are_not():
    few = Plan.build(*shapes(tokens=32768, heads=2, value_heads=8))
    assert few.segment_chunks and 64 <= few.blocks <= 132
    assert Plan.build(*shapes(batch=4)).segment_chunks == 0
    long_among_short = Plan.build(*shapes(tokens=32768 + 640, heads=2, value_heads=8), lengths=[32768] + [64] * 10)
    assert long_among_short.segment_chunks


@pytest.mark.parametrize("row", ROWS)
def test_more_multiprocessors_are_never_slower(row):
    batch, value_heads, tokens = row
    sizes = shapes(batch=batch, tokens=tokens, heads=value_heads, value_heads=value_heads)
    times = [Plan.build(*sizes, sm_count=sm_count).cost() for sm_count in (*SMS, 10_000)]
    assert times == sorted(times, reverse=True)


def test_segments_can_be_fixed():
    plan = Plan.build(*shapes(tokens=8192), segment_chunks=10)
    assert (plan.segment_chunks, plan.num_segments) == (10, 13)
    assert Plan.build(*shapes(tokens=8192), segment_chunks=0).num_segments == 1
    assert Plan.build(*shapes(tokens=64), context_parallel=True).segment_chunks == 0  # nothing to cut
    known = Plan.build(*shapes(tokens=300), lengths=[64, 0, 65, 130], segment_chunks=1)
    unknown = Plan.build(*shapes(tokens=300), cu_seqlens_shape=(5,), segment_chunks=1)
    assert (known.num_segments, unknown.num_segments) == (1 + 1 + 2 + 3, 4 + 4)
    assert Plan.build(*shapes(dim=80), segment_chunks=2).segment_chunks == 2


@pytest.mark.parametrize("sm_count", SMS)
@pytest.mark.parametrize("batch, value_heads, tokens", ROWS)
def test_the_cut_of_the_backward(batch, value_heads, tokens, sm_count):
    """Its two chains side by side, a multiprocessor for each thread block: faster, and no slower for steady heads."""
    sizes = shapes(batch=batch, tokens=tokens, heads=value_heads // 4, value_heads=value_heads)
    plan = Plan.build(*sizes, sm_count=sm_count)
    (work,) = plan._works()
    times = {cut: costs.chains_time(work, cut, sm_count) for cut in costs.candidates([work])}
    whole = min(time for cut, time in times.items() if not cut.segment_chunks)
    found = times[plan.backward_cut]
    if plan.backward_cut.segment_chunks:
        blocks = 2 * sum(count for _, count in costs.output_blocks(work, plan.backward_cut))
        known = costs.coefficients()["chains"][str(plan.backward_cut.block_dv)]
        steady = known["start"] + work.longest * (known["gradient"] + known["busy"] * blocks / sm_count)
        assert blocks <= sm_count and found <= WORTH_IT * whole and steady <= whole / WORTH_IT
    else:
        assert found == whole
    assert Plan.build(*sizes, sm_count=sm_count, context_parallel=False).backward_cut.segment_chunks == 0
    assert Plan.build(*sizes, sm_count=sm_count, block_dv=64, segment_chunks=5).backward_cut == (64, 5)


def test_the_backward_is_cut_where_chains_are_few_and_long():
    few = Plan.build(*shapes(tokens=32768, heads=2, value_heads=8))
    assert few.backward_cut.segment_chunks and "backward: segments of" in few.explain()
    many = Plan.build(*shapes(batch=4))
    assert many.backward_cut.segment_chunks == 0 and "backward: whole sequences" in many.explain()


def test_unknown_lengths_are_planned_for_both_extremes():
    """One plan must do for equal sequences and for a long one among short ones: it must not be lost on either."""
    unknown = Plan.build(*shapes(tokens=32768, heads=2, value_heads=8), cu_seqlens_shape=(5,))
    assert len(unknown.estimates()) == 2
    for lengths in ([8192] * 4, [32768 - 192, 64, 64, 64]):
        known = Plan.build(*shapes(tokens=32768, heads=2, value_heads=8), lengths=lengths)
        assert known.cost(Cut(unknown.block_dv, unknown.segment_chunks)) < 1.5 * known.cost()


# ---- the cost model


def test_coefficients_are_measurements():
    known = costs.coefficients()
    assert "NVIDIA" in known["gpu"] and known["sm_count"] > 0
    for name, parts in {"inverse": ("start", "chunk_head"), "states": ("start", "chunk", "shared"),
                        "scan": ("start", "segment")}.items():  # fmt: skip
        assert all(known[name][part] >= 0 for part in parts) and known[name][parts[1]] > 0
    for columns in ("64", "128"):
        assert known["output"][columns]["chunk"] > 0 <= known["output"][columns]["busy"]
        assert known["chains"][columns]["gradient"] > known["chains"][columns]["state"] > 0
    assert 0 < known["launch"] < 20


@pytest.mark.parametrize("segment_chunks", [0, 1, 3, 7, 100])
def test_blocks_hold_every_chunk_once(segment_chunks):
    work = costs.Work(((5, 2), (1, 3), (64, 1)), 2, 8, 128, 128)
    blocks = list(costs.output_blocks(work, Cut(64, segment_chunks)))
    assert sum(chunks * count for chunks, count in blocks) == (5 * 2 + 3 + 64) * 8 * 2
    assert max(chunks for chunks, _ in blocks) == min(segment_chunks or 64, 64)


@pytest.mark.parametrize("seed", range(10))
def test_makespan_is_that_of_the_schedule(seed):
    draw = random.Random(seed)
    times = [(draw.choice([1.0, 2.5, 7.0]), draw.randrange(1, 40)) for _ in range(draw.randrange(1, 5))]
    slots = draw.choice([1, 3, 16])
    tasks = list(costs.schedule(times, slots))
    assert len(tasks) == sum(count for _, count in times)
    for slot in range(slots):
        mine = sorted(task[1:] for task in tasks if task[0] == slot)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(mine))
    assert costs.makespan(times, slots) == pytest.approx(max(end for _, _, end in tasks))


def test_makespan_of_very_many_tasks():
    times = [(1.0 + 0.001 * i, 1) for i in range(costs.MOST_SIMULATED + 1)]
    exact = max(end for _, _, end in costs.schedule(times, 100))
    assert costs.makespan(times, 100) == pytest.approx(exact, rel=0.05)


def test_plot():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    plan = Plan.build(*shapes(tokens=32768, heads=2, value_heads=8))
    axes = plan.plot()
    assert len(axes.patches) == plan.blocks + 3  # and the three kernels before
    right = max(bar.get_x() + bar.get_width() for bar in axes.patches)
    assert right == pytest.approx(plan.cost(), rel=1e-6)
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"inverse", "states", "scan", "output"}
    pyplot.close("all")


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
        ({"segment_chunks": -1}, "segment_chunks: must not be negative, got -1"),
        ({"segment_chunks": 4, "context_parallel": False}, "segment_chunks: must be 0 without context_parallel, got 4"),
        ({"context_parallel": "on"}, "context_parallel: must be \"auto\", True or False, got 'on'"),
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


def test_explain_names_the_choice_and_the_alternatives():
    plan = Plan.build(*shapes(tokens=32768, heads=2, value_heads=8))
    text = plan.explain()
    assert f"{plan.num_segments} segments of at most {plan.segment_chunks} chunks" in text
    assert f"expected: {plan.cost():.0f} us (inverse " in text
    whole = min(cost for cut, cost in plan.costs().items() if not cut.segment_chunks)
    assert f"{whole:.0f} us  whole sequences" in text
    uncut = Plan.build(*shapes(tokens=64))
    assert "1 segments, each a whole sequence" in uncut.explain()


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
