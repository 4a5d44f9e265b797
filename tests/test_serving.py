"""Pools of states, results in given buffers, states along the way: the numbers of plain calls, nothing else touched."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flashqla import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from flashqla.testing import inputs

DIMS = {"heads": 2, "value_heads": 4, "head_dim_k": 16, "head_dim_v": 32}
FUNCTIONS = [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule]
LENGTHS = (20, 0, 9, 1, 7)


def made_for(function, lengths=LENGTHS, dtype=torch.float64, **changes):
    return inputs(tokens=40, lengths=lengths, dtype=dtype, **(DIMS | changes))


@dataclasses.dataclass
class Pool:
    """Slots inside a bigger tensor, so that strides are padded and a write beside them shows."""

    whole: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def make(cls, count: int = 8, v_first: bool = False, dtype: torch.dtype = torch.float64) -> Pool:
        rows, columns = (32, 16) if v_first else (16, 32)
        whole = torch.randn(count, 3, 4, rows + 4, columns, generator=torch.Generator().manual_seed(1), dtype=dtype)
        return cls(whole, whole[:, 1, :, :rows])


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("indices", [[3, -1, 7, 0, 2], [3, 4, 7, -1, -2], [-1] * 5], ids=str)
def test_rp4_slots(function, v_first, indices, poisoned):
    """Only listed rows change, a new slot starts from zeros whatever it holds, a skipped sequence puts out zeros."""
    made, pool = made_for(function), Pool.make(v_first=v_first)
    pool.slots[7] = float("nan")
    before = pool.whole.clone()
    slots = torch.tensor(indices)
    has_state = torch.tensor([True, True, False, True, True])
    options = {"cu_seqlens": made.cu_seqlens, "state_v_first": v_first, "use_qk_l2norm_in_kernel": True}
    tensors = (made.q, made.k, made.v, made.g, made.beta)
    o, state = function(
        *tensors, initial_state=pool.slots, state_indices=slots, has_initial_state=has_state, inplace_final_state=True,
        **options,
    )  # fmt: skip
    assert state is pool.slots
    start = before[slots.clamp(min=0), 1, :, : pool.slots.shape[2]] * 1.0
    start[~has_state] = 0
    expected, final = function(*tensors, initial_state=start, output_final_state=True, **options)
    bounds = made.cu_seqlens.tolist()
    for n, slot in enumerate(indices):
        tokens = slice(bounds[n], bounds[n + 1])
        if slot < 0:
            assert not o[:, tokens].any()
        else:
            torch.testing.assert_close(o[:, tokens], expected[:, tokens])
            torch.testing.assert_close(pool.slots[slot], final[n])
            pool.slots[slot] = before[slot, 1, :, : pool.slots.shape[2]]
    assert torch.equal(pool.whole.nan_to_num(5.0), before.nan_to_num(5.0))  # all else is as it was


@pytest.mark.parametrize("function", FUNCTIONS)
def test_reading_from_a_pool(function):
    made, pool = made_for(function), Pool.make()
    before = pool.whole.clone()
    slots = torch.tensor([3, -1, 7, 3, 0], dtype=torch.int32)
    options = {"cu_seqlens": made.cu_seqlens, "output_final_state": True}
    tensors = (made.q, made.k, made.v, made.g, made.beta)
    o, final = function(*tensors, initial_state=pool.slots, state_indices=slots, **options)
    start = pool.slots[slots.clamp(min=0).long()]
    expected, state = function(*tensors, initial_state=start, **options)
    torch.testing.assert_close(o, expected)  # the skipped sequence has no tokens
    assert not final[1].any()
    torch.testing.assert_close(final[[0, 2, 3, 4]], state[[0, 2, 3, 4]])
    assert torch.equal(pool.whole, before)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_in_place_without_indices(function):
    made = made_for(function, None, batch=3)
    expected, final = function(**made.arguments(), output_final_state=True)
    state = made.initial_state.clone()
    o, returned = function(**made.arguments(initial_state=state), inplace_final_state=True)
    assert returned is state
    assert torch.equal(o, expected) and torch.equal(state, final)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_out(function):
    made = made_for(function)
    expected, final = function(**made.arguments(), output_final_state=True)
    wide = torch.full((1, 40, 6, 32), 7.0, dtype=torch.float64)
    out = wide[:, :, 1:5]
    o, state = function(**made.arguments(), out=out, output_final_state=True)
    assert o is out
    assert torch.equal(out, expected) and torch.equal(state, final)
    assert (wide[:, :, [0, 5]] == 7).all()


def test_decoding_from_a_pool_equals_one_prefill():
    """Prefill into slots, then token by token in place: as one call over everything (recipe RP1)."""
    made = inputs(batch=3, tokens=12, dtype=torch.float64, gate=-0.01, **DIMS)
    expected, final = chunk_gated_delta_rule(**made.arguments(), output_final_state=True)
    pool, slots = Pool.make(), torch.tensor([5, 1, 6])
    pool.slots[slots] = made.initial_state
    options = {"initial_state": pool.slots, "state_indices": slots, "inplace_final_state": True}

    def part(tokens):
        return [x[:, tokens] for x in (made.q, made.k, made.v, made.g, made.beta)]

    parts = [chunk_gated_delta_rule(*part(slice(0, 5)), **options)[0]]
    parts += [fused_recurrent_gated_delta_rule(*part(slice(t, t + 1)), **options)[0] for t in range(5, 12)]
    torch.testing.assert_close(torch.cat(parts, 1), expected)
    torch.testing.assert_close(pool.slots[slots], final)


@pytest.mark.parametrize("lengths", [None, (130, 64, 0, 63, 200)], ids=["dense", "packed"])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("v_first", [False, True])
def test_states_along_the_way(lengths, every, v_first):
    tokens, step = 470, 64 * every
    made = inputs(batch=1 if lengths else 2, tokens=tokens, lengths=lengths, dtype=torch.float64, **DIMS)
    options = {"state_v_first": v_first, "output_final_state": True}
    state = made.initial_state.mT.contiguous() if v_first else made.initial_state
    expected, final = chunk_gated_delta_rule(**made.arguments(initial_state=state), **options)
    rows = made.q.shape[0] * tokens // step
    states = torch.full((rows, 4, *((32, 16) if v_first else (16, 32))), float("nan"), dtype=torch.float64)
    o, state_at_end = chunk_gated_delta_rule(
        **made.arguments(initial_state=state), states=states, states_every=every, **options
    )
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(state_at_end, final)
    written = set()
    bounds = [(0, 0, tokens), (1, 0, tokens)] if lengths is None else [
        (0, a, b) for a, b in zip(made.cu_seqlens.tolist(), made.cu_seqlens.tolist()[1:], strict=False)
    ]  # fmt: skip
    for n, (b, begin, end) in enumerate(bounds):
        for j in range((end - begin) // step):
            row = (b * tokens + begin) // step + j
            assert row not in written
            written.add(row)
            prefix = [
                getattr(made, name)[b : b + 1, begin : begin + (j + 1) * step] for name in ("q", "k", "v", "g", "beta")
            ]
            _, there = chunk_gated_delta_rule(*prefix, initial_state=state[n : n + 1], **options)
            torch.testing.assert_close(states[row], there[0])
    assert written and all(states[row].isnan().all() for row in set(range(rows)) - written)


def test_a_prefix_cache_saves_the_prefix():
    """Continuing from a state along the way gives the rest of the whole call."""
    made = inputs(tokens=300, dtype=torch.float64, **DIMS)
    states = torch.empty(300 // 64, 4, 16, 32, dtype=torch.float64)
    whole, _ = chunk_gated_delta_rule(**made.arguments(), states=states, states_every=1)
    rest = [getattr(made, name)[:, 192:] for name in ("q", "k", "v", "g", "beta")]
    o, _ = chunk_gated_delta_rule(*rest, initial_state=states[2:3])
    torch.testing.assert_close(o, whole[:, 192:])


# -------------------------------------------------------------------------------------------------- operator, compiling


def arguments_of(made, pool, **changes):
    values = {"state_indices": torch.tensor([3, -1, 7, 0, 2]), "has_initial_state": torch.tensor([True] * 5)}
    values |= {"out": None, "states": None, "states_every": 0, "inplace_final_state": True} | changes
    operands = [made.q, made.k, made.v, made.g, made.beta, None, None, pool, made.cu_seqlens, None]
    options = [0.25, True, *[False] * 5, "recurrent", "reference", 0, -1, 0, -1, None]
    return [*operands, *options, *values.values()]


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.parametrize("case", ["in place", "reading", "out"])
def test_opcheck(case):
    made, pool = made_for(None, dtype=torch.float32), Pool.make(dtype=torch.float32).slots
    changes = {"in place": {}, "reading": {"inplace_final_state": False}, "out": {"out": torch.empty(1, 40, 4, 32)}}
    torch.library.opcheck(torch.ops.flashqla.gated_delta_rule_serve.default, arguments_of(made, pool, **changes[case]))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_compiled(function):
    torch._dynamo.reset()
    made = made_for(function, dtype=torch.float32)
    slots = torch.tensor([3, -1, 7, 0, 2])

    def step(pool, out):
        o, _ = function(
            **made.arguments(initial_state=pool), state_indices=slots, inplace_final_state=True, out=out, scale=0.5
        )
        return o + 1

    pools = [Pool.make(dtype=torch.float32) for _ in range(2)]
    outs = [torch.zeros(1, 40, 4, 32) for _ in range(2)]
    with torch.no_grad():
        expected = step(pools[0].slots, outs[0])
        result = torch.compile(step, fullgraph=True, backend="aot_eager")(pools[1].slots, outs[1])
    assert torch.equal(result, expected)
    assert torch.equal(outs[0], outs[1]) and torch.equal(pools[0].whole, pools[1].whole)


# ------------------------------------------------------------------------------------------------------------- refusals


BAD = {
    "float indices": ({"state_indices": torch.zeros(5)}, TypeError, "state_indices: must have dtype"),
    "number of indices": ({"state_indices": torch.zeros(3, dtype=torch.int32)}, ValueError, r"state_indices: .*\[5\]"),
    "index too large": ({"state_indices": torch.tensor([0, 1, 8, 2, 3])}, ValueError, "the pool's 8 slots, got 8"),
    "a slot twice": ({"state_indices": torch.tensor([0, 1, 1, 2, 3])}, ValueError, "written twice, got 1"),
    "no pool": ({"initial_state": None}, ValueError, "initial_state: must be given together with"),
    "half a pool": ({"initial_state": torch.zeros(8, 4, 16, 32).bfloat16()}, TypeError, "initial_state: must be"),
    "mask": ({"has_initial_state": torch.ones(5)}, TypeError, "has_initial_state: must have dtype torch.bool"),
    "out": ({"out": torch.zeros(1, 39, 4, 32)}, ValueError, r"out: must have shape \[B, T, HV, V\] = \[1, 40, 4, 32\]"),
    "dtype of out": ({"out": torch.zeros(1, 40, 4, 32).double()}, TypeError, "out: must have dtype torch.float32"),
    "states alone": ({"states": torch.zeros(0, 4, 16, 32)}, ValueError, "states_every: must be given together"),
    "every alone": ({"states_every": 1}, ValueError, "states: must be given together with states_every"),
    "every nothing": ({"states_every": 0, "states": torch.zeros(0)}, ValueError, "states_every: must be a number"),
    "no tensor": ({"out": 3}, TypeError, "out: must be a tensor or None, got int"),
    "fla": ({"backend": "fla"}, NotImplementedError, "no pools or buffers"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_refusals(case):
    changes, kind, says = BAD[case]
    made, pool = made_for(None, dtype=torch.float32), Pool.make(dtype=torch.float32).slots
    options = {"initial_state": pool, "state_indices": torch.tensor([3, -1, 7, 0, 2]), "inplace_final_state": True}
    before = pool.clone()
    with pytest.raises(kind, match=says):
        chunk_gated_delta_rule(**(made.arguments() | options | changes))
    assert torch.equal(pool, before)


def test_all_problems_at_once():
    made = made_for(None, dtype=torch.float32)
    with pytest.raises(TypeError) as raised:
        chunk_gated_delta_rule(**made.arguments(), out=torch.zeros(1).double(), state_indices=torch.zeros(5))
    assert str(raised.value).count("\n  - ") >= 3


def test_gradients_are_refused():
    made = made_for(None, dtype=torch.float32).requires_grad()
    arguments = made.arguments(out=torch.zeros(1, 40, 4, 32))
    with pytest.raises(ValueError, match=r"q: must not require gradients with .*no_grad"):
        chunk_gated_delta_rule(**arguments)
    with torch.no_grad():
        chunk_gated_delta_rule(**arguments)


def test_states_need_chunks():
    made = made_for(None, dtype=torch.float32)
    with pytest.raises(NotImplementedError, match="states: must be None token by token"):
        fused_recurrent_gated_delta_rule(**made.arguments(), states=torch.zeros(0, 4, 16, 32), states_every=1)
