"""The Hopper recurrence: right with every option, in place in a pool, handed over from a prefill, in graphs."""

import pytest
import torch

from flashqla import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, is_supported, testing

DEVICE = "cuda"
OUTPUT, STATE = 4e-3, 1e-5  # relative L2: o is rounded to 16 bits, the state is fp32 throughout


def decode(made, **options):
    arguments = made.arguments(backend="hopper", use_qk_l2norm_in_kernel=True) | options
    with torch.no_grad():
        return fused_recurrent_gated_delta_rule(**arguments)


def exact(made, **options):
    offsets = None if made.cu_seqlens is None else made.cu_seqlens.cpu()
    arguments = made.arguments(output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=offsets) | options
    return testing.oracle64(**arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (64, 128), (128, 64)], ids=str)
@pytest.mark.parametrize("shape", [(7, 1, None), (3, 9, None), (1, 100, (1, 0, 64, 20, 8))], ids=str)
def test_against_float64(dtype, v_first, dims, shape):
    batch, tokens, lengths = shape
    made = testing.inputs(batch, tokens, 2, 6, *dims, lengths=lengths, dtype=dtype, device=DEVICE)
    expected = exact(made)
    state = made.initial_state.mT.contiguous() if v_first else made.initial_state
    with testing.poisoned_empty():
        o, final = decode(made, initial_state=state, state_v_first=v_first, output_final_state=True)
    real = tokens if lengths is None else sum(lengths)
    assert not o[:, real:].any()
    testing.check("o", o[:, :real], expected.output[:, :real], OUTPUT)
    testing.check("final_state", final.mT if v_first else final, expected.final_state, STATE)


@pytest.mark.parametrize("beta_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_activations_inside(beta_dtype, negative, bias):
    made = testing.inputs(5, 6, 1, 7, 128, 128, dtype=torch.bfloat16, device=DEVICE)
    made.q.mul_(3)
    made.k.mul_(0.01)
    made.g = 6 * torch.randn_like(made.g)  # logits, of both tails of softplus
    made.beta = (2 * torch.randn_like(made.beta)).to(beta_dtype)
    options = {
        "use_gate_in_kernel": True,
        "A_log": torch.linspace(-4, 2, 7, device=DEVICE),
        "dt_bias": torch.linspace(-3, 3, 7, device=DEVICE) if bias else None,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": negative,
        "scale": 0.3,
    }
    o, final = decode(made, output_final_state=True, **options)
    expected = exact(made, **options)
    testing.check("o", o, expected.output, OUTPUT)
    testing.check("final_state", final, expected.final_state, STATE)


@pytest.mark.parametrize("v_first", [False, True])
def test_rp4_slots(v_first):
    """In place in a pool with padded strides: listed rows change, -1 is skipped, a new slot starts from zeros."""
    made = testing.inputs(5, 3, 2, 4, 128, 128, dtype=torch.bfloat16, device=DEVICE)
    whole = torch.randn(9, 2, 4, 136, 128, device=DEVICE)
    pool = whole[:, 1, :, :128]
    pool[7] = float("nan")
    before = whole.clone()
    slots = torch.tensor([3, -1, 0, 7, 8], device=DEVICE)
    has_state = torch.tensor([True, True, True, False, True], device=DEVICE)
    options = {"state_indices": slots, "has_initial_state": has_state, "inplace_final_state": True}
    o, state = decode(made, initial_state=pool, state_v_first=v_first, **options)
    assert state is pool and not o[1].any()
    start = before[slots.clamp(min=0), 1, :, :128]
    start[3] = 0
    expected = exact(made, initial_state=start.mT if v_first else start)
    live = [0, 2, 3, 4]
    testing.check("o", o[live], expected.output[live], OUTPUT)
    result = pool[slots[live]]
    testing.check("states", result.mT if v_first else result, expected.final_state[live], STATE)
    pool[slots[live]] = before[slots[live], 1, :, :128]
    assert torch.equal(whole.nan_to_num(7.0), before.nan_to_num(7.0))


def test_buffers_are_used_where_they_lie():
    made = testing.inputs(4, 2, 2, 4, 128, 128, dtype=torch.bfloat16, device=DEVICE)
    expected, _ = decode(made)
    wide = torch.full((4, 2, 6, 128), 7.0, dtype=torch.bfloat16, device=DEVICE)
    for function in (fused_recurrent_gated_delta_rule, chunk_gated_delta_rule):
        wide.fill_(7)
        with torch.no_grad():
            o, _ = function(**made.arguments(backend="hopper", use_qk_l2norm_in_kernel=True), out=wide[:, :, 1:5])
        assert o.data_ptr() == wide[:, :, 1:5].data_ptr()
        assert (wide[:, :, [0, 5]] == 7).all()
        testing.check("out", o, expected, 1e-2)


def test_what_cannot_be_used_in_place_is_refused():
    made = testing.inputs(4, 1, 2, 4, 128, 128, dtype=torch.bfloat16, device=DEVICE)
    crooked = torch.zeros(4, 4, 128, 129, device=DEVICE)[..., :128]
    with pytest.raises(NotImplementedError, match="initial_state: a pool needs a contiguous last dimension"):
        decode(made, initial_state=crooked, inplace_final_state=True)
    narrow = torch.empty(4, 1, 4, 129, dtype=torch.bfloat16, device=DEVICE)[..., :128]
    with pytest.raises(NotImplementedError, match="out: needs a contiguous last dimension"):
        decode(made, out=narrow)


@pytest.mark.parametrize("cut", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("v_first", [False, True])
def test_rp1_handed_over_from_a_prefill(cut, v_first):
    made = testing.inputs(1, 200, 2, 4, 128, 128, recipe="faults", dtype=torch.bfloat16, device=DEVICE)
    made.g = made.g / 10
    expected = exact(made, initial_state=None)

    def part(tokens):
        return {name: getattr(made, name)[:, tokens] for name in ("q", "k", "v", "g", "beta")}

    options = {"state_v_first": v_first, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    with torch.no_grad():
        first, state = chunk_gated_delta_rule(**part(slice(0, cut)), backend="hopper", **options)
        parts = [first]
        for t in range(cut, 200):
            o, state = fused_recurrent_gated_delta_rule(
                **part(slice(t, t + 1)), initial_state=state, backend="hopper", **options
            )
            parts.append(o)
    testing.check("o", torch.cat(parts, 1), expected.output, 6e-3)
    testing.check("final_state", state.mT if v_first else state, expected.final_state, 6e-3)


def test_graph_of_decoding_replayed_100_times():
    """One token of every sequence in place in a pool, tokens and slots new at every replay; nothing waits."""
    N, HV = 16, 8
    pool = torch.zeros(32, HV, 128, 128, device=DEVICE)
    slots = torch.zeros(N, dtype=torch.int32, device=DEVICE)
    static = testing.inputs(N, 1, 4, HV, 128, 128, dtype=torch.bfloat16, device=DEVICE)
    out = torch.empty_like(static.v)

    def step():
        decode(static, initial_state=pool, state_indices=slots, inplace_final_state=True, out=out)

    slots.copy_(torch.arange(N))
    step()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    pool.normal_()
    mirror = pool.clone()
    for seed in range(100):
        fresh = testing.inputs(N, 1, 4, HV, 128, 128, dtype=torch.bfloat16, device=DEVICE, seed=seed)
        for name in ("q", "k", "v", "g", "beta"):
            getattr(static, name).copy_(getattr(fresh, name))
        order = torch.randperm(32, generator=torch.Generator().manual_seed(seed))[:N].to(torch.int32)
        order[seed % N] = -1
        slots.copy_(order)
        graph.replay()
        o, _ = decode(fresh, initial_state=mirror, state_indices=order.to(DEVICE), inplace_final_state=True)
        assert torch.equal(o, out) and torch.equal(pool, mirror), seed


def test_same_bits():
    made = testing.inputs(64, 8, 4, 16, 128, 128, dtype=torch.bfloat16, device=DEVICE)
    first = decode(made, output_final_state=True)
    for _ in range(100):
        assert all(torch.equal(x, y) for x, y in zip(first, decode(made, output_final_state=True), strict=True))


def test_it_is_what_auto_takes():
    made = testing.inputs(2, 1, 2, 4, 128, 128, dtype=torch.bfloat16, device=DEVICE)
    assert is_supported(**made.arguments(), function=fused_recurrent_gated_delta_rule) == (True, [])


@pytest.mark.parametrize("packed", [False, True])
def test_prefill_from_a_pool_waits_for_nothing_and_is_captured(packed):
    """The chunk kernels between a gather and a scatter of the listed slots, one of them skipped."""
    lengths = (100, 0, 37, 64) if packed else None
    made = testing.inputs(
        1 if packed else 4, 201 if packed else 70, 2, 4, 128, 128, lengths=lengths, dtype=torch.bfloat16, device=DEVICE
    )
    before = torch.randn(8, 4, 128, 128, device=DEVICE)
    pool, slots = before.clone(), torch.tensor([6, 1, -1, 0], dtype=torch.int32, device=DEVICE)
    out = torch.full_like(made.v, 7)

    def prefill():
        with torch.no_grad():
            chunk_gated_delta_rule(
                **made.arguments(initial_state=pool), state_indices=slots, inplace_final_state=True, out=out,
                backend="hopper",
            )  # fmt: skip

    prefill()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            prefill()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    pool.copy_(before)
    graph.replay()
    with torch.no_grad():
        o, final = chunk_gated_delta_rule(
            **made.arguments(initial_state=before[slots.clamp(min=0).long()]), output_final_state=True, backend="hopper"
        )
    live = [0, 1, 3]
    assert torch.equal(pool[slots[live].long()], final[live])
    rest = [2, 3, 4, 5, 7]
    assert torch.equal(pool[rest], before[rest])
    if packed:
        assert torch.equal(out[:, :100], o[:, :100]) and not out[:, 100:137].any()
        assert torch.equal(out[:, 137:], o[:, 137:])
    else:
        assert torch.equal(out[live], o[live]) and not out[2].any()
