"""What a training or serving loop sees of the Hopper forward: repeatability, graphs, no waiting, no compiling."""

import pytest
import torch

from flashqla import Plan, chunk_gated_delta_rule, testing

DEVICE = "cuda"
LENGTHS = (1238, 0, 33, 519, 64, 1)


def call(made, **options):
    with torch.no_grad():
        return chunk_gated_delta_rule(
            made.q, made.k, made.v, made.g, made.beta, initial_state=made.initial_state, cu_seqlens=made.cu_seqlens,
            output_final_state=True, backend="hopper", **options,
        )  # fmt: skip


def made(lengths=LENGTHS, heads=(4, 16), **options):
    return testing.inputs(
        1, sum(lengths), *heads, 128, 128, lengths=lengths, dtype=torch.bfloat16, device=DEVICE, **options
    )


@pytest.mark.parametrize("lengths", [(64,), (4096,), (33,), (16789,), LENGTHS])
def test_rr2_same_bits_1000_times(lengths):
    inputs, side = made(lengths), torch.cuda.Stream()
    block = torch.empty(2**28, dtype=torch.int32, device=DEVICE)
    first = call(inputs)
    differences = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for i in range(1000):
        if i % 50 == 0:
            with torch.cuda.stream(side):
                block.copy_(block.flip(0))  # another stream keeps the memory busy
        for x, y in zip(first, call(inputs), strict=True):
            differences += (x != y).sum()
    assert int(differences) == 0


@pytest.mark.parametrize("packed", [False, True])
def test_rr5_graph_with_new_contents(packed):
    inputs = made() if packed else testing.inputs(2, 1000, 4, 16, 128, 128, dtype=torch.bfloat16, device=DEVICE)
    call(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(inputs)
    for seed in range(100):
        fresh = made(seed=seed) if packed else testing.inputs(
            2, 1000, 4, 16, 128, 128, dtype=torch.bfloat16, device=DEVICE, seed=seed
        )  # fmt: skip
        for name in ("q", "k", "v", "g", "beta", "initial_state"):
            getattr(inputs, name).copy_(getattr(fresh, name))
        graph.replay()
        if seed % 10 == 0:
            assert all(torch.equal(x, y) for x, y in zip(captured, call(fresh), strict=True))


def test_rf2_nothing_waits_for_the_device():
    inputs = made()
    plan = Plan.build(inputs.q.shape, inputs.v.shape, inputs.cu_seqlens.shape)
    call(inputs, plan=plan)
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(inputs, plan=plan)
        call(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_rr1_nothing_compiles_after_the_first_calls():
    from flashqla.hopper import compile

    call(made())
    before = compile.builds()
    for tokens in (1, 63, 64, 65, 1000, 8192):
        for batch in (1, 3):
            call(testing.inputs(batch, tokens, 4, 16, 128, 128, dtype=torch.bfloat16, device=DEVICE))
    for lengths in ((1,) * 300, (64, 0, 7)):
        call(made(lengths))
        call(made(lengths), scale=0.5)
    assert compile.builds() == before


def test_rm7_dirty_memory():
    inputs = made()
    clean = call(inputs)
    for _ in range(3):
        dirt = torch.full((2**28,), float("nan"), device=DEVICE)
        del dirt
        assert all(torch.equal(x, y) for x, y in zip(clean, call(inputs), strict=True))


def test_rr8_time_per_token_is_flat():
    times = {}
    for tokens in (16384, 32760, 131072):
        inputs = made((tokens,), (2, 16), initial_state=False)
        call(inputs)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20_000_000)  # the calls queue up behind it: what is timed is the device, not the host
        begin.record()
        for _ in range(5):
            call(inputs)
        end.record()
        end.synchronize()
        times[tokens] = begin.elapsed_time(end) / tokens
    assert max(times.values()) < 1.2 * min(times.values()), times


def test_rr9_side_stream():
    inputs, side = made(), torch.cuda.Stream()
    expected = call(inputs)
    q = inputs.q.clone()
    inputs.q.fill_(float("nan"))
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        inputs.q.copy_(q)  # the producer is on the side stream too
        result = call(inputs)
    side.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(expected, result, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_rr9_not_the_current_device():
    here = testing.inputs(1, 200, 2, 4, 128, 128, dtype=torch.bfloat16, device="cuda:0")
    there = here.to("cuda:1")
    with torch.cuda.device(0):
        pairs = [testing.outcome(chunk_gated_delta_rule, made, backend="hopper") for made in (here, there)]
    for name, tensor in pairs[0].items():
        assert pairs[1][name].device == torch.device("cuda:1")
        assert torch.equal(tensor.cpu(), pairs[1][name].cpu()), name
