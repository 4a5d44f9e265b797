"""Segment scan: from the local end states of `segment_states` to the true ones, in place.

Inputs, by the number of the segment (segments.cuh)
    transitions  [segments, HV, K, K]   fp16: M - gamma I transposed
    decays       [segments, HV]         fp32: gamma; 0: the state is true already
    cu_seqlens   [N + 1]                int32, on the device
    segment_chunks   int32: chunks of a segment
In and out
    states       [segments, HV, V, K]   fp32, transposed: N, becomes S_end; of all but a sequence's last segment
Definition
    S_end = N + gamma S_start + (M - gamma I) S_start, S_start = S_end of the segment before (eq. 7.3). Only the last
    product is rounded: S to fp16, after a scale for each column that brings its largest element to 1.

Grid: N * HV * V / 64 CTAs. Most find nothing to do: heads that decay, sequences of one or two segments.
Roles
    chain      four warps: S^T, 64 rows, in registers as the A operand. While a product is under way, the state that
               went into it is stored. Waits: `full`.
    producer   one warp: finds the segments that count, loads their matrices and N by TMA. Waits: `free`.
Shared memory, K = 128: three stages of a matrix and N (32 KB each): 192 KB.
Registers: no limit but 255; no spills.
"""

import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout

from .chunk_forward import CHUNK_SIZE, LANES, PASS_CONFIGS, ROWS  # noqa: F401

STAGES = 3
SEGMENT, GAMMA = range(2)  # of what the producer says of a stage; no segment: the end
TINY = 1e-30  # least scale


def build(head_dim_k: int = 128, head_dim_v: int = 128):
    """The kernel as a TileLang PrimFunc.

    Args:
        head_dim_k, head_dim_v: K and V, 64 or 128.
    """
    DK, DV, BV, ST = head_dim_k, head_dim_v, ROWS, STAGES
    blocks = DV // BV
    fp16, f32, i32 = "float16", "float32", "int32"
    HV, N_plus_1, segments = T.dynamic("HV, N_plus_1, segments")

    @T.macro
    def finish(i, S, change, largest, gamma, n0_shared, n1_shared, n2_shared):
        # A buffer a stage, as in chunk_forward.
        if i % ST == 0:
            for r, c in T.Parallel(BV, DK):
                S[r, c] = n0_shared[r, c] + gamma[0] * S[r, c] + largest[r] * change[r, c]
        elif i % ST == 1:
            for r, c in T.Parallel(BV, DK):
                S[r, c] = n1_shared[r, c] + gamma[0] * S[r, c] + largest[r] * change[r, c]
        else:
            for r, c in T.Parallel(BV, DK):
                S[r, c] = n2_shared[r, c] + gamma[0] * S[r, c] + largest[r] * change[r, c]

    @T.prim_func
    def segment_scan(
        states: T.Tensor((segments, HV, DV, DK), f32),
        transitions: T.Tensor((segments, HV, DK, DK), fp16),
        decays: T.Tensor((segments, HV), f32),
        cu_seqlens: T.Tensor((N_plus_1,), i32),
        segment_chunks: T.int32,
    ):
        with T.Kernel((N_plus_1 - 1) * HV * blocks, threads=128 + 32) as block:
            change_shared = T.alloc_shared((ST, DK, DK), fp16)
            n0_shared = T.alloc_shared((BV, DK), f32)
            n1_shared = T.alloc_shared((BV, DK), f32)
            n2_shared = T.alloc_shared((BV, DK), f32)
            says_shared = T.alloc_shared((ST, 2), f32, scope="shared")
            S = T.alloc_fragment((BV, DK), f32)
            S_operand = T.alloc_fragment((BV, DK), fp16)
            change = T.alloc_fragment((BV, DK), f32)
            largest = T.alloc_fragment((BV,), f32)  # of a row of S^T
            gamma = T.alloc_local((1,), f32)
            decay = T.alloc_local((1,), f32)  # a lane's segment's
            full = T.alloc_barrier(arrive_count=[32] * ST)
            free = T.alloc_barrier(arrive_count=[4 * LANES] * ST)
            T.annotate_layout({b: make_full_bank_swizzled_layout(b) for b in (n0_shared, n1_shared, n2_shared)})

            thread = T.get_thread_binding()
            lane = thread % 32
            i_n = T.alloc_var(i32)
            i_h = T.alloc_var(i32)
            column = T.alloc_var(i32)
            span = T.alloc_var(i32)
            start = T.alloc_var(i32)
            first = T.alloc_var(i32)  # number of segment s is first + s, from 1 on
            last = T.alloc_var(i32)  # segment before a sequence's last one
            i = T.alloc_var(i32, init=0)  # rounds of the ring
            s = T.alloc_var(i32)
            held = T.alloc_var(i32, init=-1)  # segment whose end S is
            i_n = T.truncdiv(block, HV * blocks)
            i_h = T.truncdiv(block - i_n * (HV * blocks), blocks)
            column = (block - i_n * (HV * blocks) - i_h * blocks) * BV
            span = segment_chunks * CHUNK_SIZE
            start = cu_seqlens[i_n]
            first = N_plus_1 - 2 + T.truncdiv(start, span)
            last = T.truncdiv(cu_seqlens[i_n + 1] - start + span - 1, span) - 2
            T.pdl_trigger()
            T.pdl_sync()

            if last > 0:
                if thread < 128:
                    T.barrier_wait(full[0], 0)
                    s = T.cast(says_shared[0, SEGMENT], i32)
                    while s > 0:
                        if held != s - 1:
                            held = T.if_then_else(s == 1, i_n, first + s - 1)
                            for r, c in T.Parallel(BV, DK):
                                S[r, c] = states[held, i_h, column + r, c]
                            held = -1  # it lies in memory already
                        gamma[0] = says_shared[i % ST, GAMMA]
                        T.reduce_absmax(S, largest, dim=1)
                        for r in T.Parallel(BV):
                            largest[r] = T.max(largest[r], TINY)
                        for r, c in T.Parallel(BV, DK):
                            S_operand[r, c] = S[r, c] / largest[r]
                        T.wgmma_gemm(
                            S_operand, change_shared[i % ST, :, :], change, policy=T.GemmWarpPolicy.FullRow,
                            clear_accum=True,
                        )  # fmt: skip
                        if held > 0:
                            for r, c in T.Parallel(BV, DK):
                                states[first + held, i_h, column + r, c] = S[r, c]
                        held = s
                        T.wait_wgmma(0)
                        finish(i, S, change, largest, gamma, n0_shared, n1_shared, n2_shared)
                        T.sync_warp()
                        if lane < LANES:
                            T.barrier_arrive(free[i % ST])
                        i += 1
                        T.barrier_wait(full[i % ST], (i // ST) % 2)
                        s = T.cast(says_shared[i % ST, SEGMENT], i32)
                        if s != held + 1:
                            for r, c in T.Parallel(BV, DK):
                                states[first + held, i_h, column + r, c] = S[r, c]
                else:
                    for j in T.serial(last):
                        if j % 32 == 0:
                            decay[0] = T.if_then_else(
                                j + lane < last, decays[first + T.min(j + lane, last - 1) + 1, i_h], 0.0
                            )
                        gamma[0] = T.shfl_sync(decay[0], j % 32)
                        if gamma[0] > 0.0:
                            st = i % ST
                            T.barrier_wait(free[st], (i // ST + 1) % 2)
                            if lane == 0:
                                says_shared[st, SEGMENT] = T.cast(j + 1, f32)
                                says_shared[st, GAMMA] = gamma[0]
                            T.tma_copy(transitions[first + j + 1, i_h, 0:DK, 0:DK], change_shared[st, :, :],
                                       barrier=full[st])  # fmt: skip
                            if st == 0:
                                T.tma_copy(states[first + j + 1, i_h, column : column + BV, 0:DK], n0_shared,
                                           barrier=full[st])  # fmt: skip
                            elif st == 1:
                                T.tma_copy(states[first + j + 1, i_h, column : column + BV, 0:DK], n1_shared,
                                           barrier=full[st])  # fmt: skip
                            else:
                                T.tma_copy(states[first + j + 1, i_h, column : column + BV, 0:DK], n2_shared,
                                           barrier=full[st])  # fmt: skip
                            T.barrier_arrive(full[st])
                            i += 1
                    T.barrier_wait(free[i % ST], (i // ST + 1) % 2)
                    if lane == 0:
                        says_shared[i % ST, SEGMENT] = 0.0
                    T.barrier_arrive(full[i % ST])

    return segment_scan
