"""Segments as the kernels number and join them, on the CPU: segments.cuh compiled for the host, and the rounding of the
scan simulated."""

import ctypes
import itertools
import math
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import flashqla
from flashqla.reference.layout import Layout
from flashqla.reference.split import segment, warm_up

C = 64
SOURCE = Path(flashqla.__file__).parent / "hopper" / "segments.cuh"
COMPILER = shutil.which("g++") or shutil.which("clang++")
HOST = """
#include <algorithm>
#include <cmath>
#include <cstring>
#define __device__
#define __forceinline__ inline
#define __shared__ static
using std::max, std::min;
static struct { unsigned x; } threadIdx;  // one thread a block: enough for what a thread does alone, and for `sort<1>`
static void __syncthreads() {}
static int __syncthreads_count(bool x) { return x; }
static unsigned __ballot_sync(unsigned, bool x) { return x; }
static unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
static int __popc(unsigned x) { return __builtin_popcount(x); }
static int __ffs(unsigned x) { return __builtin_ffs(x); }
static float __shfl_up_sync(unsigned, float x, int) { return x; }
static float __shfl_sync(unsigned, float x, int) { return x; }
#include "%s"
#include "%s"
extern "C" int owner(const int* cu_seqlens, int n, int span, int extra) {
  return segments::owner(cu_seqlens, n, span, extra);
}
extern "C" void sort(const int* cu_seqlens, int n, int items, int heads, int chunks, const float* gates,
                     float threshold, int* needed, float* decays, int* order) {
  segments::sort<1>(cu_seqlens, n, items, heads, chunks, gates, threshold, needed, decays, order);
}
extern "C" int approach(const float* gates, int slot, int step, int most, int heads, int head, float threshold) {
  return segments::approach<1>(gates, slot, step, most, heads, head, threshold);
}
"""


@pytest.fixture(scope="module")
def device_code(tmp_path_factory):
    """The device routines, as host code."""
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("segments")
    (folder / "host.cpp").write_text(HOST % (SOURCE, SOURCE.with_name("approach.cuh")))
    library = folder / "host.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", folder / "host.cpp", "-o", library], check=True)
    return ctypes.CDLL(library)


@pytest.fixture(scope="module")
def owner(device_code):
    """`segments::owner`."""

    def call(offsets, span, extra):
        array = (ctypes.c_int * len(offsets))(*offsets)
        return device_code.owner(array, len(offsets) - 1, span, extra)

    return call


def segments_of_items(owner, lengths, segment_chunks, padding):
    """What each thread block of the kernels makes of its number: {number: (sequence, segment, first token, tokens)}."""
    offsets = [0, *itertools.accumulate(lengths)]
    n, span = len(lengths), segment_chunks * C
    found = {}
    for item in range(n + (offsets[-1] + padding) // span):
        sequence, index = item, 0
        if item >= n:
            sequence = owner(offsets, span, item - n)
            index = item - n - offsets[sequence] // span + 1
        left = offsets[sequence + 1] - offsets[sequence] - index * span
        if index == 0 or left > 0:
            found[item] = (sequence, index, offsets[sequence] + index * span, min(left, span))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_every_segment_has_one_number(owner, seed):
    draw = random.Random(seed)
    sizes = [0, 1, 63, 64, 65, 200, 1000, 5000]
    lengths = [draw.choice(sizes) for _ in range(draw.randrange(1, 60))]
    segment_chunks, padding = draw.choice([1, 2, 3, 8]), draw.randrange(300)
    found = segments_of_items(owner, lengths, segment_chunks, padding)
    starts = [0, *itertools.accumulate(lengths)][:-1]
    layout = Layout.build(1, sum(lengths) + padding, C, starts, lengths)
    expected, _ = segment(layout, segment_chunks)
    mine = sorted((start, tokens) for _, _, start, tokens in found.values() if tokens)
    assert mine == sorted(zip(expected.starts, expected.lengths, strict=True))
    by_place = {(sequence, index): item for item, (sequence, index, _, _) in found.items()}
    assert len(by_place) == len(found)
    for (sequence, index), item in by_place.items():
        before = sequence if index == 1 else item - 1  # as chunk_forward and segment_scan look it up
        assert index == 0 or by_place[sequence, index - 1] == before


@pytest.mark.parametrize("threshold", [-8.0, -40.0, None])
@pytest.mark.parametrize("lengths, segment_chunks", [([20 * C + 5], 4), ([0, 700, 64, 1, 5000, 0], 3), ([9000], 40)])
def test_order_and_warm_up(device_code, owner, lengths, segment_chunks, threshold):
    """Chunks needed as the reference walks to them, and every segment in the order once, those that need all first."""
    torch.manual_seed(1)
    heads, offsets = 3, [0, *itertools.accumulate(lengths)]
    layout = Layout.build(1, sum(lengths), C, offsets[:-1], lengths)
    segments, _ = segment(layout, segment_chunks)
    decay = -torch.rand(sum(-(-length // C) for length in lengths) + 1, heads) * torch.tensor([6.0, 0.0, 0.2])

    slots = sum(lengths) // C + len(lengths)
    totals = torch.full((slots, heads, 2, C), math.nan)
    totals[:, :, 1] = 0.0
    by_token = {}  # a chunk's decay, by its first token
    for i, (start, length) in enumerate(zip(offsets, lengths, strict=False)):
        for chunk in range(-(-length // C)):
            by_token[start + chunk * C] = decay[len(by_token)]
            m = min(i, start)
            totals[m + (start - m) // C + chunk, :, 0, C - 1] = by_token[start + chunk * C] / math.log(2)
    log_carry = torch.cat(
        [
            torch.stack(
                [by_token[segments.starts[rank] + step * C] for rank in (segments.order or range(count))[:count]]
            )
            for step, count in enumerate(segments.counts)
        ]
    )
    steps = segments.steps(1)
    kept, whole = warm_up(steps[::-1], log_carry, segments.num_sequences, threshold)
    expected = {}
    for rank, index in enumerate(segments.order or range(segments.num_sequences)):
        walked = sum(kept[rows.start + rank] for rows in steps if rank < rows.stop - rows.start)
        expected[segments.starts[index]] = torch.where(whole[rank] > 0, segment_chunks + 1, walked)

    found = segments_of_items(owner, lengths, segment_chunks, 0)
    items = len(lengths) + sum(lengths) // (segment_chunks * C)
    needed, order = (
        torch.full((items, heads), -7, dtype=torch.int32),
        torch.full((items * heads,), -7, dtype=torch.int32),
    )
    decays = torch.full((items, heads), math.nan)
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (totals, needed, decays, order)]
    limit = ctypes.c_float(-math.inf if threshold is None else threshold / math.log(2))
    array = (ctypes.c_int * len(offsets))(*offsets)
    device_code.sort(array, len(lengths), items, heads, segment_chunks, pointers[0], limit, *pointers[1:])

    total = dict.fromkeys(range(items), 0)
    for item, (sequence, index, start, _) in found.items():
        if start + segment_chunks * C < offsets[sequence + 1]:  # another one follows
            total[item] = expected[start]
            gamma = sum(by_token[start + chunk * C] for chunk in range(segment_chunks)).exp()
            counts = (expected[start] > segment_chunks) & (index > 0)
            torch.testing.assert_close(decays[item], torch.where(counts, gamma, 0.0))
        else:
            assert not decays[item].any()
    expected = torch.stack([torch.as_tensor(total[item]).expand(heads) for item in range(items)]).int()
    assert torch.equal(needed, expected)
    flat = expected.flatten()
    first, second = ((flat > segment_chunks).nonzero().flatten(), ((flat > 0) & (flat <= segment_chunks)).nonzero())
    assert order.tolist() == [*first.tolist(), *second.flatten().tolist(), *[-1] * int((flat == 0).sum())]


def test_keys_outside_the_bound_take_the_exact_path(device_code):
    """One marked chunk among those walked: the whole segment; beyond them it does not matter."""
    for marked, expected in ((None, 2), (7, 9), (6, 9), (5, 2)):
        totals = torch.zeros(24, 1, 2, C)
        totals[:, 0, 0, C - 1] = -10.0
        if marked is not None:
            totals[marked, 0, 1] = -0.0
        needed, order, decays = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32), torch.zeros(4)
        array = (ctypes.c_int * 2)(0, 24 * C)
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in (totals, needed, decays, order)]
        device_code.sort(array, 1, 4, 1, 8, pointers[0], ctypes.c_float(-15.0), *pointers[1:])
        assert needed[0] == expected


def test_host_bound_is_the_kernels_grid():
    pytest.importorskip("tilelang")
    from flashqla.hopper.segments import num_segments

    for tokens, sequences, chunks in ((0, 1, 1), (63, 2, 1), (64, 1, 1), (5000, 3, 8)):
        assert num_segments(tokens, sequences, chunks) == sequences + tokens // (chunks * C)


# ---- rounding


def rounded(x):
    return x.bfloat16().float()


def chain(k, v, inverse, state, exact):
    """One head without gates through the chunk form, with the kernels' roundings (bf16 operands) or in float64."""
    dtype, cast = (torch.float64, lambda x: x) if exact else (torch.float32, rounded)
    state = state.to(dtype)
    for K, V, A in zip(k.to(dtype).split(C), v.to(dtype).split(C), inverse.to(dtype), strict=True):
        W = V - K @ cast(state)
        state = state + K.T @ cast(cast(A) @ cast(W))
    return state


def in_segments(k, v, inverse, state, segments):
    """`chain` with the local states, transitions and the scan of the kernels between."""
    cuts = zip(*(x.chunk(segments) for x in (k, v, inverse)), strict=True)
    for i, (K, V, A) in enumerate(cuts):
        if i in (0, segments - 1):
            state = chain(K, V, A, state, False)
            continue
        local = chain(K, V, A, torch.zeros_like(state), False)
        change = chain(K, torch.zeros_like(V), A, torch.eye(len(state)), False) - torch.eye(len(state))
        largest = state.abs().amax(0)
        state = local + state + (change.half().float() @ (state / largest).half().float()) * largest
    return state


@pytest.mark.parametrize("strength", [1.0, 0.02], ids=["overwritten", "kept"])
@pytest.mark.parametrize("correlated", [False, True])
def test_segments_add_no_error(strength, correlated):
    """A head that does not decay keeps every rounding of its state: more segments must not add to it."""
    torch.manual_seed(7)
    T, D = 64 * C, 64
    k, v = torch.randn(T, D, dtype=torch.float64), torch.randn(T, D, dtype=torch.float64)
    if correlated:
        k = k + 3 * math.sqrt(D) * F.normalize(torch.randn(D, dtype=torch.float64), dim=0)
    k, v = (rounded(x).double() for x in (F.normalize(k, dim=-1), v))
    beta = strength * torch.sigmoid(torch.randn(T, dtype=torch.float64) + 4 * correlated)
    chunks = zip(k.split(C), beta.split(C), strict=True)
    eye = torch.eye(C, dtype=torch.float64)
    inverse = torch.stack([torch.linalg.inv(eye + (b[:, None] * (K @ K.T)).tril(-1)) * b for K, b in chunks])
    state = torch.randn(D, D, dtype=torch.float64)
    exact = chain(k, v, inverse, state, True)

    def error(result):
        return float((result.double() - exact).norm() / exact.norm())

    whole = error(chain(k, v, inverse, state, False))
    for segments in (4, 8, 16, 32):
        assert error(in_segments(k, v, inverse, state.float(), segments)) < 1.1 * whole


@pytest.mark.parametrize("threshold", [-3.0, -10.0, -math.inf])
@pytest.mark.parametrize("step", [1, -1])
def test_approach(device_code, step, threshold):
    """Chunks that a walk of the backward's chains begins outside of its segment: eq. 7.4 in either direction."""
    torch.manual_seed(0)
    slots, heads = 40, 3
    gates = torch.zeros(slots, heads, 2, C)
    gates[:, :, 0, -1] = -torch.rand(slots, heads)
    gates[:, 1, 0, -1] = 0.0  # never decays
    gates[12, 2, 1, -1] = -0.0  # outside of the conditions
    gates[:12, 2, 1, -1] = gates[13:, 2, 1, -1] = 1.0
    gates[:, :2, 1, -1] = 1.0
    seen = set()
    for head, start in itertools.product(range(heads), range(slots)):
        most = slots - start if step == 1 else start + 1
        chunks = [start + step * i for i in range(most)]
        totals = list(itertools.accumulate(gates[chunk, head, 0, -1].item() for chunk in chunks))
        expected = next((i + 1 for i, total in enumerate(totals) if total < threshold), most)
        if head == 2 and 12 in chunks[:expected]:
            expected = most
        found = device_code.approach(
            ctypes.c_void_p(gates.data_ptr()), start, step, most, heads, head, ctypes.c_float(threshold)
        )  # fmt: skip
        assert found == expected, (head, start)
        seen.add(found == most)
    assert seen == ({True} if threshold == -math.inf else {True, False})
    assert device_code.approach(None, 0, step, 0, heads, 0, ctypes.c_float(threshold)) == 0
