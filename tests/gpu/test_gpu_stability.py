"""Over many calls: no leak, no hang, the same bits; random cases; memory that grows with tokens alone."""

import gc
import itertools
import resource
import subprocess
import sys

import pytest
import torch

from flashqla import chunk_gated_delta_rule, testing

DEVICE = "cuda"
LENGTHS = (130, 0, 64, 1, 65)


def leaves(lengths=LENGTHS, heads=(2, 4)):
    sizes = (1, sum(lengths), *heads, 128, 128)
    return testing.inputs(*sizes, lengths=lengths, dtype=torch.bfloat16, device=DEVICE).requires_grad()


def forward_and_backward(made):
    o, state = chunk_gated_delta_rule(**made.arguments(output_final_state=True))
    wanted = [getattr(made, name) for name in (*testing.PER_TOKEN, "initial_state")]
    return torch.autograd.grad((o, state), wanted, (made.do, made.dht))


def forward_alone(made):
    with torch.no_grad():
        return chunk_gated_delta_rule(**made.arguments(output_final_state=True))


@pytest.mark.parametrize("call", [forward_alone, forward_and_backward])
def test_10000_calls_leak_nothing(call):
    """Neither memory of the GPU, nor of the host, nor compiled kernels: offsets are new objects in every call."""
    from flashqla.hopper import compile

    made = leaves()

    def calls(count):
        for _ in range(count):
            made.cu_seqlens = made.cu_seqlens.clone()
            call(made)
        torch.cuda.synchronize()
        gc.collect()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), compile.builds()

    before = calls(1000)
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB, and never falls
    after = calls(10_000)
    assert after == before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - host < 32 * 1024


def test_rr2_same_gradients_300_times():
    made = leaves()
    first = forward_and_backward(made)
    for _ in range(300):
        assert all(torch.equal(x, y) for x, y in zip(first, forward_and_backward(made), strict=True))


RAGGED = """
import sys, torch
from flashqla import chunk_gated_delta_rule, testing
value_heads, state = int(sys.argv[1]), sys.argv[2]
around = [63, 64, 65] * 20
for lengths in ([1238, 1199, 1240, 1216, 1187, 1203, 519], [512] + [6] * 48, [1] * 300, [8192] + [1] * 64, around):
    made = testing.inputs(1, sum(lengths), value_heads // 2, value_heads, 128, 128, lengths=lengths,
                          initial_state=state != "none", dtype=torch.bfloat16, device="cuda").requires_grad()
    if state == "zeros":
        made.initial_state.data.zero_()
    wanted = [getattr(made, name) for name in testing.PER_TOKEN]
    for _ in range(100):
        o, final = chunk_gated_delta_rule(**made.arguments(output_final_state=True))
        torch.autograd.grad((o, final), wanted, (made.do, made.dht))
    torch.cuda.synchronize()
    part = slice(0, lengths[0])
    o, _ = chunk_gated_delta_rule(**made.arguments(context_parallel=False))
    alone, _ = chunk_gated_delta_rule(*(getattr(made, name)[:, part] for name in testing.PER_TOKEN),
                                      initial_state=None if state == "none" else made.initial_state[:1],
                                      context_parallel=False)
    testing.check("first sequence", o[:, part], alone, 1e-3)
print("done")
"""


@pytest.mark.parametrize("state", ["none", "zeros", "random"])
@pytest.mark.parametrize("value_heads", [4, 32, 48])
def test_rv2_no_hang(value_heads, state):
    """In a process of its own: a hang is a failure after a minute, and not the end of all tests."""
    command = [sys.executable, "-c", RAGGED, str(value_heads), state]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0 and ran.stdout.endswith("done\n"), ran.stderr[-2000:]


def test_random_cases(tmp_path):
    """Half a minute of them; ten minutes: python -m flashqla selftest --fuzz 600."""
    command = [sys.executable, "-m", "flashqla", "selftest", "--device", DEVICE, "--fuzz", "30"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout[-4000:]


def test_rm2_many_states():
    """The last of 4200 x 32 states (8.8 GB) is right."""
    count, heads = 4200, 32
    made = testing.inputs(1, 8, heads, heads, 128, 128, lengths=(1,), dtype=torch.bfloat16, device=DEVICE)
    q, k, v, g, beta = (getattr(made, name)[:, :1].repeat_interleave(count, 1) for name in testing.PER_TOKEN)
    states = made.initial_state.expand(count, -1, -1, -1).contiguous()
    offsets = torch.arange(count + 1, dtype=torch.int32, device=DEVICE)
    with torch.no_grad():
        options = {"output_final_state": True, "backend": "hopper"}
        _, finals = chunk_gated_delta_rule(q, k, v, g, beta, initial_state=states, cu_seqlens=offsets, **options)
        first = (getattr(made, name)[:, :1] for name in testing.PER_TOKEN)
        _, alone = chunk_gated_delta_rule(*first, initial_state=made.initial_state, **options)
    assert torch.equal(finals[-1], alone[0]) and torch.equal(finals[count // 2], alone[0])


@pytest.mark.parametrize("call", [forward_alone, forward_and_backward])
def test_rf3_memory_grows_with_tokens(call):
    peaks = []
    for tokens in (8192, 16384, 32768):
        made = leaves((tokens,), (16, 32))
        call(made)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        call(made)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - start)
    growth = [later - earlier for earlier, later in itertools.pairwise(peaks)]
    print(f"{call.__name__}: {growth[1] / 16384 / 1024:.0f} KiB a token with 16/32 heads")
    assert growth[1] <= 2.1 * growth[0]
