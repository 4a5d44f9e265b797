"""Segments on the Hopper kernels: as right as without, however many, whatever the gates; what a serving loop sees."""

import itertools

import pytest
import torch

from flashqla import Plan, chunk_gated_delta_rule, reference, testing
from flashqla.validation import CP_THRESHOLD

DEVICE = "cuda"
NO_WORSE = 1.05  # error with segments over error without; roundings differ, so neither is always the smaller


def make(lengths, heads=(2, 4), dims=(128, 128), dtype=torch.bfloat16, **options):
    return testing.inputs(
        1, sum(lengths), *heads, *dims, lengths=lengths, dtype=dtype, device=DEVICE, **options
    )  # fmt: skip


def run(made, segment_chunks, block_dv=None, **options):
    plan = Plan.build(
        made.q.shape, made.v.shape, made.cu_seqlens.shape, block_dv=block_dv, segment_chunks=segment_chunks
    )
    with torch.no_grad():
        return chunk_gated_delta_rule(
            **made.arguments(output_final_state=True, backend="hopper", plan=plan, **options)
        )  # fmt: skip


@torch.no_grad()
def exact(made):
    arguments = {
        name: value.double() if value is not None and value.is_floating_point() else value
        for name, value in made.arguments().items()
    }
    return reference.chunked(**arguments | {"cu_seqlens": made.cu_seqlens.cpu()}, output_final_state=True)


def errors(results, expected):
    return [testing.compare(x, y).relative_l2 for x, y in zip(results, expected, strict=True)]


CASES = {
    "bench": {},
    "correlated": {"recipe": "correlated"},
    "no decay": {"gate": 0.0},
    "slow": {"gate": -0.002},
    "fast": {"gate": -0.05},
    "gated chunks": {"gate": -5.0},
    "no state": {"initial_state": False},
}


@pytest.mark.parametrize("threshold", [CP_THRESHOLD, None])
@pytest.mark.parametrize("case", CASES)
def test_error_is_no_larger_with_segments(case, threshold):
    made = make((4096,), **CASES[case])
    expected = exact(made)
    whole = errors(run(made, 0), expected)
    for segment_chunks in (8, 4, 1):
        parts = errors(run(made, segment_chunks, cp_threshold=threshold), expected)
        assert all(part < NO_WORSE * alone for part, alone in zip(parts, whole, strict=True)), (segment_chunks, parts)


@pytest.mark.parametrize("dims", [(64, 64), (64, 128), (128, 64), (128, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dims_and_dtypes(dims, dtype):
    made = make((1000, 0, 2085), dims=dims, dtype=dtype)
    expected = exact(made)
    whole = errors(run(made, 0), expected)
    for block_dv in (64, dims[1]):
        parts = errors(run(made, 3, block_dv), expected)
        assert all(part < NO_WORSE * alone for part, alone in zip(parts, whole, strict=True))


def test_error_does_not_grow_with_segments():
    made = make((262144,), heads=(1, 1), gate=0.0)
    expected = exact(made)
    whole = errors(run(made, 0), expected)
    for segments in (8, 16, 64):
        parts = errors(run(made, 4096 // segments), expected)
        assert all(part < NO_WORSE * alone for part, alone in zip(parts, whole, strict=True)), segments


def test_one_long_among_short():
    made = make((30, 20000, 0, 64, 1, 700, 64 * 16, 64 * 16 + 1, 0))
    expected = exact(made)
    whole = errors(run(made, 0), expected)
    for segment_chunks in (1, 7, 16, 300):
        parts = errors(run(made, segment_chunks), expected)
        assert all(part < NO_WORSE * alone for part, alone in zip(parts, whole, strict=True))


def test_a_strong_gate_needs_no_exact_path():
    """Above the threshold's bound nothing changes between truncated and exact segments."""
    made = make((8192,), gate=-0.2)
    cut, kept = run(made, 8), run(made, 8, cp_threshold=None)
    assert testing.compare(cut[0], kept[0]).relative_l2 < 1e-3
    coarse = run(made, 8, cp_threshold=-0.1)  # one chunk, which decays by 12.8
    assert testing.compare(coarse[0], kept[0]).relative_l2 < 1e-3


def test_the_bound_of_the_threshold_holds():
    """Eq. 7.4: a coarse threshold shows, by no more than it promises: the error is at most exp(threshold) |S|."""
    made = make((4096,), gate=-0.01, heads=(1, 1))
    kept = run(made, 8, cp_threshold=None)
    scale = float(exact(made).final_state.norm())
    for threshold in (-1.0, -2.0, -4.0):
        cut = run(made, 8, cp_threshold=threshold)
        error = float((cut[1] - kept[1]).norm())
        assert error < torch.tensor(threshold).exp() * 2 * scale


def test_long_keys_take_the_exact_path():
    """With |k|^2 = 3 and beta = 1 a step may double the state: a threshold would be wrong, and is not used."""
    made = make((4096,), gate=-0.02)
    made.beta.fill_(1.0)
    made.k.mul_(3**0.5)
    made.v.mul_(1e-3)
    cut, kept = (run(made, 8, cp_threshold=threshold) for threshold in (-0.5, None))
    assert all(torch.equal(x, y) for x, y in zip(cut, kept, strict=True))
    made.k.div_(3**0.5)
    cut, kept = (run(made, 8, cp_threshold=threshold) for threshold in (-0.5, None))
    assert not torch.equal(cut[0], kept[0])


@pytest.mark.parametrize("value_heads", [8, 64])
def test_same_bits_every_time_and_in_any_batch(value_heads):
    made = make((3000, 4097), heads=(value_heads // 4, value_heads))
    first = run(made, 6)
    for _ in range(50):
        assert all(torch.equal(x, y) for x, y in zip(first, run(made, 6), strict=True))
    halves = [
        {name: getattr(made, name)[:, start:end].contiguous() for name in testing.PER_TOKEN}
        for start, end in itertools.pairwise((0, 3000, 7097))
    ]
    for i, half in enumerate(halves):
        plan = Plan.build(half["q"].shape, half["v"].shape, segment_chunks=6)
        options = {"initial_state": made.initial_state[i : i + 1], "output_final_state": True, "plan": plan}
        with torch.no_grad():
            o, state = chunk_gated_delta_rule(**half, backend="hopper", **options)
        assert torch.equal(state, first[1][i : i + 1])
        assert torch.equal(o, first[0][:, (0, 3000)[i] : (3000, 7097)[i]])


def test_a_plan_outlives_the_offsets_it_was_made_with():
    """Offsets that change on the device, also inside a captured graph, are followed: no plan holds their contents."""
    made = make((4096, 64, 0, 4032))
    plan = Plan.build(made.q.shape, made.v.shape, made.cu_seqlens.shape, segment_chunks=4)

    def call():
        with torch.no_grad():
            return chunk_gated_delta_rule(**made.arguments(output_final_state=True, backend="hopper", plan=plan))

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for lengths in ((64, 64, 64, 8000), (0, 8192, 0, 0), (2048,) * 4):
        made.cu_seqlens.copy_(torch.tensor([0, *lengths]).cumsum(0))
        graph.replay()
        expected = exact(made)
        for eager, replayed, right in zip(call(), captured, expected, strict=True):
            assert torch.equal(eager, replayed)
            testing.check("with new offsets", eager, right, 6e-3)


def test_poisoned_memory(monkeypatch):
    made = make((2000, 0, 300))
    expected, empty = run(made, 3), torch.empty

    def poisoned(*size, **options):
        made = empty(*size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made.fill_(2**30)

    monkeypatch.setattr(torch, "empty", poisoned)
    assert all(torch.equal(x, y) for x, y in zip(expected, run(made, 3), strict=True))


def test_nothing_waits_for_the_device():
    made = make((8192,), heads=(2, 8))
    run(made, 8)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(made, 8)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_auto_cuts_where_it_should():
    made = make((32768,), heads=(2, 8))
    arguments = made.arguments(backend="hopper", output_final_state=True)
    with torch.no_grad():
        auto, never, always = (
            chunk_gated_delta_rule(**arguments, context_parallel=choice) for choice in ("auto", False, True)
        )
    assert torch.equal(auto[0], always[0]) and not torch.equal(auto[0], never[0])
    with pytest.raises(NotImplementedError, match="context_parallel: must be False or 'auto'"):
        chunk_gated_delta_rule(**make((64,)).arguments(backend="hopper", context_parallel=True))
