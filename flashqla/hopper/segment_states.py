"""Segment states: for every segment of a sequence the state it leaves behind, and its transition where that counts.

Inputs
    k            [T, H, K]             bf16 or fp16, K in {64, 128}; token and head strides of 16-byte multiples, last 1
    v            [T, HV, V]            dtype of k, V in {64, 128}; strides likewise
    a            [slots, HV, 64, 64]   dtype of k: the inverse of `gated_inverse`
    gates        [slots, HV, 2, 64]    fp32: log2 decay summed over the chunk (G), log2 key scale (r)
    cu_seqlens   [N + 1]               int32, on the device
    initial      [N, HV, K, V]         fp32, any strides; read if `has_initial`
    needed       [segments, HV]        int32, and
    decays       [segments, HV]        fp32, and
    order        [segments * HV]       int32: of `segment_order`
    segment_chunks, has_initial        int32: chunks of a segment
Outputs, by the number of the segment (segments.cuh); not written for the last segment of a sequence
    states       [segments, HV, V, K]      fp32, transposed: the end state N reached from 0; of a sequence's first
                                           segment the true one, from `initial`
    transitions  [segments, HV, K, K]      fp16: M - gamma I transposed; written where decays > 0
Definition
    Eq. 7.1: S_end = M S_start + N, by the chain of eq. 8.1 to 8.7 without outputs. Columns of M are columns of a state
    that starts at I and gets no values. Where fewer chunks than all are needed (eq. 7.4) these are walked, from 0, and
    M is dropped.

Grid: segments * HV * (V + K) / 64 CTAs in `order`; the 64-column blocks of N, then those of M, side by side.
Warpgroups, and what they wait for
    chain      S^T, 64 rows, in registers as the A operand; per chunk K S, A W, K^T U. Waits: `full`.
    producers  one warp each: TMA loads, gate factors. Both wait: `free`.
Shared memory, K = 128: three stages of K (16 KB), V and A (8 KB each), factors 3 KB: 99 KB, two CTAs an SM.
Registers (setmaxnreg): chain 216, producers 40.
"""

import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout

from .pieces import (
    CHUNK_SIZE,
    FRAME,
    LANES,
    PASS_CONFIGS,
    ROWS,
    SEGMENTS,
    arrive,
    fetch_stage,
    first_chunk,
    load_stage,
    segment_of_item,
    transposed,
    wgmma,
)

__all__ = ["PASS_CONFIGS", "build"]
STAGES = 3

# rows of the factors of a chunk, eq. 8.1 and 8.7, and its scalars
VALUE, STATE, KEEP, SCALARS = range(4)
SPECIAL, DECAY, FRAME_OUT = range(3)


def build(dtype: str = "bfloat16", head_dim_k: int = 128, head_dim_v: int = 128):
    """The kernel as a TileLang PrimFunc.

    Args:
        dtype: of k, v and a, "bfloat16" or "float16".
        head_dim_k, head_dim_v: K and V, 64 or 128.
    """
    C, DK, DV, BV, ST = CHUNK_SIZE, head_dim_k, head_dim_v, ROWS, STAGES
    value_blocks, blocks = DV // BV, (DV + DK) // BV
    frame = FRAME if dtype == "bfloat16" else -1.0  # fp16: every chunk is special, as in chunk_forward
    f32, i32, i64 = "float32", "int32", "int64"
    num_tokens, H, HV, N, N_plus_1, slots, segments, pairs = T.dynamic(
        "num_tokens, H, HV, N, N_plus_1, slots, segments, pairs"
    )
    k_token, k_head, v_token, v_head = T.dynamic("k_token, k_head, v_token, v_head", i64)
    initial_n, initial_h, initial_k, initial_v = T.dynamic("initial_n, initial_h, initial_k, initial_v", i64)

    @T.macro
    def load_values(i, V, f, special, is_transition, v_shared, factors_shared):
        if is_transition == 0:
            load_stage(i, v_shared, V)
        T.copy(factors_shared[i % ST, VALUE, :], f)
        special[0] = factors_shared[i % ST, SCALARS, SPECIAL]

    @T.macro
    def start_chunk(i, S, S_operand, U, k_shared):
        T.copy(S, S_operand)
        wgmma(S_operand, k_shared[i % ST, :, :], U, transpose_B=True, clear_accum=True)  # (K S)^T

    @T.macro
    def chunk(i, S, U, W, U_operand, V, f, k_shared, a_shared):
        for r, c in T.Parallel(BV, C):
            W[r, c] = V[c, r] * f[c] - U[r, c]
        wgmma(W, a_shared[i % ST, :, :], U, transpose_B=True, clear_accum=True)
        T.wait_wgmma(0)
        T.copy(U, U_operand)
        wgmma(U_operand, k_shared[i % ST, :, :], S)

    @T.macro
    def special_chunk(i, S, U, W, U_operand, V, f, decay, k_shared, a_shared, factors_shared):
        """Eq. 8.7, and the way to a new frame."""
        for r, c in T.Parallel(BV, C):
            W[r, c] = V[c, r] * f[c] - factors_shared[i % ST, STATE, c] * U[r, c]
        decay[0] = factors_shared[i % ST, SCALARS, DECAY]
        for r, c in T.Parallel(BV, DK):
            S[r, c] *= decay[0]
        wgmma(W, a_shared[i % ST, :, :], U, transpose_B=True, clear_accum=True)
        T.wait_wgmma(0)
        for r, c in T.Parallel(BV, C):
            U_operand[r, c] = U[r, c] * factors_shared[i % ST, KEEP, c]
        wgmma(U_operand, k_shared[i % ST, :, :], S)
        T.wait_wgmma(0)

    @T.prim_func
    def segment_states(
        k: T.StridedTensor((num_tokens, H, DK), (k_token, k_head, 1), dtype),
        v: T.StridedTensor((num_tokens, HV, DV), (v_token, v_head, 1), dtype),
        a: T.Tensor((slots, HV, C, C), dtype),
        gates: T.Tensor((slots, HV, 2, C), f32),
        cu_seqlens: T.Tensor((N_plus_1,), i32),
        initial: T.StridedTensor((N, HV, DK, DV), (initial_n, initial_h, initial_k, initial_v), f32),
        needed: T.Tensor((segments, HV), i32),
        decays: T.Tensor((segments, HV), f32),
        order: T.Tensor((pairs,), i32),
        states: T.Tensor((segments, HV, DV, DK), f32),
        transitions: T.Tensor((segments, HV, DK, DK), "float16"),
        segment_chunks: T.int32,
        has_initial: T.int32,
    ):
        with T.Kernel(pairs * blocks, threads=256) as block:
            T.import_source(SEGMENTS)
            T.annotate_min_blocks_per_sm(2)
            k_shared = T.alloc_shared((ST, C, DK), dtype)
            v0_shared = T.alloc_shared((C, BV), dtype)
            v1_shared = T.alloc_shared((C, BV), dtype)
            v2_shared = T.alloc_shared((C, BV), dtype)
            v_shared = (v0_shared, v1_shared, v2_shared)
            a_shared = T.alloc_shared((ST, C, C), dtype)
            factors_shared = T.alloc_shared((ST, 4, C), f32, scope="shared")

            S = T.alloc_fragment((BV, DK), f32)  # S^T
            S_operand = T.alloc_fragment((BV, DK), dtype)
            U = T.alloc_fragment((BV, C), f32)  # K S, then U
            W = T.alloc_fragment((BV, C), dtype)
            U_operand = T.alloc_fragment((BV, C), dtype)
            V = T.alloc_fragment((C, BV), dtype)
            f = T.alloc_fragment((C,), f32)
            special = T.alloc_local((1,), f32)
            decay = T.alloc_local((1,), f32)
            gamma = T.alloc_local((1,), f32)  # of the segment
            G = T.alloc_local((2,), f32)
            log_r = T.alloc_local((2,), f32)
            G_last = T.alloc_local((1,), f32)
            log_c = T.alloc_local((1,), f32)
            c_before = T.alloc_local((1,), f32)
            gated = T.alloc_local((1,), f32)
            leaves = T.alloc_local((1,), f32)

            full = T.alloc_barrier(arrive_count=[64] * ST)
            free = T.alloc_barrier(arrive_count=[4 * LANES] * ST)
            T.annotate_layout({V: transposed(BV, C)} | {b: make_full_bank_swizzled_layout(b) for b in v_shared})

            thread = T.get_thread_binding()
            lane = thread % 32
            item = T.alloc_var(i32)
            i_h = T.alloc_var(i32)
            i_k = T.alloc_var(i32)
            i_n = T.alloc_var(i32)
            segment = T.alloc_var(i32)
            column = T.alloc_var(i32)  # first of the CTA's, in N or in M
            is_transition = T.alloc_var(i32)
            start = T.alloc_var(i32)
            slot = T.alloc_var(i32)
            n = T.alloc_var(i32)  # chunks to walk; 0: nothing to do
            from_zero = T.alloc_var(i32, init=0)
            T.pdl_trigger()
            T.pdl_sync()
            item = T.truncdiv(block, blocks)
            column = block - item * blocks
            is_transition = T.if_then_else(column >= value_blocks, 1, 0)
            column = (column - is_transition * value_blocks) * BV
            n = 0
            item = order[item]
            if item >= 0:
                i_h = item
                item = T.truncdiv(item, HV)
                i_h = i_h - item * HV
                i_k = T.truncdiv(i_h, T.truncdiv(HV, H))
                segment_of_item(item, N, cu_seqlens, segment_chunks, i_n, segment)
                first_chunk(i_n, segment, cu_seqlens, segment_chunks, start, slot)
                start = start + segment * (segment_chunks * C)
                n = needed[item, i_h]
                gamma[0] = decays[item, i_h]
                if n > segment_chunks:
                    n = segment_chunks
                else:
                    from_zero = 1
                    slot = slot + (segment_chunks - n)
                    start = start + (segment_chunks - n) * C
                if is_transition != 0 and gamma[0] == 0.0:
                    n = 0

            if n > 0:
                if thread < 128:
                    T.set_max_nreg(216, 1)
                    if is_transition != 0:
                        for r, c in T.Parallel(BV, DK):
                            S[r, c] = T.if_then_else(c == column + r, 1.0, 0.0)
                        T.clear(V)
                    elif segment == 0 and has_initial != 0 and from_zero == 0:
                        for r, c in T.Parallel(BV, DK):
                            S[r, c] = initial[i_n, i_h, c, column + r]
                    else:
                        T.clear(S)
                    T.barrier_wait(full[0], 0)
                    load_values(0, V, f, special, is_transition, v_shared, factors_shared)
                    start_chunk(0, S, S_operand, U, k_shared)
                    T.wait_wgmma(0)
                    for i in T.serial(n - 1):
                        # Here nothing is in flight; U = (K S)^T, and the values of chunk i are in registers.
                        if special[0] != 0:
                            special_chunk(i, S, U, W, U_operand, V, f, decay, k_shared, a_shared, factors_shared)
                            T.barrier_wait(full[(i + 1) % ST], ((i + 1) // ST) % 2)
                            start_chunk(i + 1, S, S_operand, U, k_shared)
                        else:
                            chunk(i, S, U, W, U_operand, V, f, k_shared, a_shared)
                            T.barrier_wait(full[(i + 1) % ST], ((i + 1) // ST) % 2)
                            T.wait_wgmma(0)
                            start_chunk(i + 1, S, S_operand, U, k_shared)
                        arrive(free, i % ST, lane)
                        load_values(i + 1, V, f, special, is_transition, v_shared, factors_shared)
                        T.wait_wgmma(0)
                    if special[0] != 0:
                        special_chunk(n - 1, S, U, W, U_operand, V, f, decay, k_shared, a_shared, factors_shared)
                    else:
                        chunk(n - 1, S, U, W, U_operand, V, f, k_shared, a_shared)
                        T.wait_wgmma(0)
                    decay[0] = factors_shared[(n - 1) % ST, SCALARS, FRAME_OUT]
                    if is_transition != 0:
                        for r, c in T.Parallel(BV, DK):
                            S[r, c] = S[r, c] * decay[0] - T.if_then_else(c == column + r, gamma[0], 0.0)
                        for r, c in T.Parallel(BV, DK):
                            transitions[item, i_h, column + r, c] = T.cast(
                                T.max(T.min(S[r, c], 65504.0), -65504.0), "float16"
                            )
                    else:
                        for r, c in T.Parallel(BV, DK):
                            states[item, i_h, column + r, c] = S[r, c] * decay[0]
                else:
                    T.set_max_nreg(40, 0)
                    if thread < 128 + 32:  # loads
                        for i in T.serial(n):
                            st = i % ST
                            t = start + i * C
                            T.barrier_wait(free[st], (i // ST + 1) % 2)
                            T.tma_copy(k[t : t + C, i_k, 0:DK], k_shared[st, :, :], barrier=full[st])
                            T.tma_copy(a[slot + i, i_h, 0:C, 0:C], a_shared[st, :, :], barrier=full[st])
                            if is_transition == 0:
                                fetch_stage(st, v[t : t + C, i_h, column : column + BV], v_shared, full, st)
                            T.barrier_arrive(full[st])
                    elif thread < 128 + 64:  # factors, eq. 8.1
                        log_c[0] = 0.0
                        for i in T.serial(n):
                            st = i % ST
                            G_last[0] = gates[slot + i, i_h, 0, C - 1]
                            for j in T.unroll(2):
                                G[j] = gates[slot + i, i_h, 0, lane + 32 * j]
                                log_r[j] = gates[slot + i, i_h, 1, lane + 32 * j]
                            T.barrier_wait(free[st], (i // ST + 1) % 2)
                            gated[0] = T.if_then_else(G_last[0] < -frame, 1.0, 0.0)
                            leaves[0] = T.if_then_else(log_c[0] + G_last[0] < -frame, 1.0, 0.0)
                            c_before[0] = T.exp2(log_c[0])
                            if leaves[0] != 0:
                                for j in T.unroll(2):
                                    x = lane + 32 * j
                                    factors_shared[st, STATE, x] = T.exp2(G[j] * gated[0]) * c_before[0]
                                    factors_shared[st, KEEP, x] = T.exp2((G_last[0] - G[j]) * gated[0])
                                log_c[0] = 0.0
                            for j in T.unroll(2):
                                factors_shared[st, VALUE, lane + 32 * j] = T.exp2(
                                    -log_r[j] - log_c[0] - G[j] * (1.0 - gated[0])
                                )
                            log_c[0] = log_c[0] + G_last[0] * (1.0 - gated[0])
                            if lane == 0:
                                factors_shared[st, SCALARS, SPECIAL] = leaves[0]
                                factors_shared[st, SCALARS, DECAY] = T.exp2(G_last[0] * gated[0]) * c_before[0]
                                factors_shared[st, SCALARS, FRAME_OUT] = T.exp2(log_c[0])
                            T.barrier_arrive(full[st])

    return segment_states
