"""Backward, second of three kernels: its two chains of states, side by side, each with thread blocks of its own.

The chain of the state's gradient (backward_adjoint.py) runs from the last chunk to the first, the chain of the state
(backward_state.py) from the first to the last. Neither needs the other, and with few sequences and heads neither fills
the multiprocessors alone.

Inputs
    q, k         [T, H, K]             bf16 or fp16, K in {64, 128}; token and head strides of 16-byte multiples, last 1
    v, do        [T, HV, V]            dtype of q, V in {64, 128}; strides likewise
    a            [slots, HV, 64, 64]   dtype of q: the inverse of `gated_inverse` with its flag `GATED`
    gates        [slots, HV, 2, 64]    fp32: log2 decay summed over the chunk (G), log2 key scale (r)
    cu_seqlens   [N + 1]               int32, on the device
    initial      [N, HV, K, V]         fp32, any strides; read if `has_initial`
    dfinal       [N, HV, K, V]         fp32, any strides; read if `has_dfinal`
    segment_chunks, num_items          int32: chunks of a segment (segments.cuh), and how many segments the grid has
                                       room for; NO_SEGMENTS and N where every sequence is a single one
    threshold    fp32: log2 decay below which what lies beyond it is forgotten (eq. 7.4); -inf: never
    scale        fp32;  with_state, has_initial, has_dfinal, has_dinitial, l2norm   int32, run-time switches
Outputs
    dv           [T, HV, V]            dtype of q; rows past cu_seqlens[-1] become 0
    dstates      [slots, HV, V, K]     dtype of q: dS'^T / d, the gradient of the state at the end of each chunk
    states       [slots, HV, V, K]     dtype of q: S^T / c, the state at the start of each chunk
    values       [slots, HV, 64, V]    dtype of q: U, the corrected values; rows past the end of a sequence are 0
    frames       [slots, HV, 2]        fp32: c and d of the chunk
    chunks       [slots, 2]            int32: first token and number of tokens; 0 tokens where a slot holds no chunk
    dinitial     [N, HV, K, V]         fp32, any strides; written if `has_dinitial`
    Without `with_state` there are no thread blocks for the state, and states, values, c and chunks are not written.

Grid: num_items * HV * V / BV CTAs for the gradient, which takes longer, then as many for the state; value blocks
fastest. A CTA has a segment of a sequence. Its walk begins as many chunks before the segment (of the gradient: behind
it) as the head's decay demands (eq. 7.4), if need be where the sequence does, and stores nothing there.
Warpgroups: chain (BV / 64), scores (of the gradient alone), producers. The two files above say what they do.
Shared memory, K = V = BV = 128: two stages of Q, K, dO or V (16 KB each) and A (8 KB), two of P (8 KB), two states of
32 KB, dV or U 16 KB, factors 3 KB: 211 KB. With BV = 64 three stages: 205 KB.
Registers (setmaxnreg): chain 208 (of the state 232), scores 72, producers 24 with two chain warpgroups; 232, 128, 40
with one.
"""

from pathlib import Path

import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout

from . import backward_adjoint, backward_state
from .pieces import (
    CHUNK_SIZE,
    LANES,
    PASS_CONFIGS,
    ROWS,
    SEGMENTS,
    first_chunk,
    head_of_block,
    segment_of_item,
    transposed,
)

__all__ = ["PASS_CONFIGS", "build"]

SOURCE = SEGMENTS + Path(__file__).with_name("approach.cuh").read_text()
FRAME = 44.0  # log2 range of c and of d: `backward_chunk` multiplies S / c and dS' / d, and sums 16384 products


def build(dtype: str = "bfloat16", head_dim_k: int = 128, head_dim_v: int = 128, block_dv: int = 128):
    """The kernel as a TileLang PrimFunc.

    Args:
        dtype: of all but gates, frames and the states that a caller sees, "bfloat16" or "float16".
        head_dim_k, head_dim_v: K and V, 64 or 128.
        block_dv: value columns of a CTA, 64 or 128, at most V.
    """
    C, DK, DV, BV = CHUNK_SIZE, head_dim_k, head_dim_v, block_dv
    blocks, chains = DV // BV, BV // ROWS
    ST = 2 if chains == 2 else 3
    chain_threads, scores_threads = 128 * chains, 128 * (chains + 1)
    frame = FRAME if dtype == "bfloat16" else -1.0  # fp16 has no exponents to spare: a frame a chunk
    f32, i32, i64 = "float32", "int32", "int64"
    num_tokens, H, HV, N, N_plus_1, slots = T.dynamic("num_tokens, H, HV, N, N_plus_1, slots")
    q_token, q_head, k_token, k_head, v_token, v_head, do_token, do_head = T.dynamic(
        "q_token, q_head, k_token, k_head, v_token, v_head, do_token, do_head", i64
    )
    initial_n, initial_h, initial_k, initial_v = T.dynamic("initial_n, initial_h, initial_k, initial_v", i64)
    dfinal_n, dfinal_h, dfinal_k, dfinal_v = T.dynamic("dfinal_n, dfinal_h, dfinal_k, dfinal_v", i64)
    dinitial_n, dinitial_h, dinitial_k, dinitial_v = T.dynamic("dinitial_n, dinitial_h, dinitial_k, dinitial_v", i64)
    adjoint = backward_adjoint.roles(DK, BV, ST, dtype, frame)
    state = backward_state.roles(DK, BV, ST, dtype, frame)

    @T.prim_func
    def backward_chains(
        q: T.StridedTensor((num_tokens, H, DK), (q_token, q_head, 1), dtype),
        k: T.StridedTensor((num_tokens, H, DK), (k_token, k_head, 1), dtype),
        v: T.StridedTensor((num_tokens, HV, DV), (v_token, v_head, 1), dtype),
        do: T.StridedTensor((num_tokens, HV, DV), (do_token, do_head, 1), dtype),
        a: T.Tensor((slots, HV, C, C), dtype),
        gates: T.Tensor((slots, HV, 2, C), f32),
        cu_seqlens: T.Tensor((N_plus_1,), i32),
        initial: T.StridedTensor((N, HV, DK, DV), (initial_n, initial_h, initial_k, initial_v), f32),
        dfinal: T.StridedTensor((N, HV, DK, DV), (dfinal_n, dfinal_h, dfinal_k, dfinal_v), f32),
        dv: T.Tensor((num_tokens, HV, DV), dtype),
        dstates: T.Tensor((slots, HV, DV, DK), dtype),
        states: T.Tensor((slots, HV, DV, DK), dtype),
        values: T.Tensor((slots, HV, C, DV), dtype),
        frames: T.Tensor((slots, HV, 2), f32),
        chunks: T.Tensor((slots, 2), i32),
        dinitial: T.StridedTensor((N, HV, DK, DV), (dinitial_n, dinitial_h, dinitial_k, dinitial_v), f32),
        scale: T.float32,
        threshold: T.float32,
        segment_chunks: T.int32,
        num_items: T.int32,
        with_state: T.int32,
        has_initial: T.int32,
        has_dfinal: T.int32,
        has_dinitial: T.int32,
        l2norm: T.int32,
    ):
        with T.Kernel(num_items * HV * blocks * (1 + with_state), threads=128 * (chains + 2)) as block:
            T.import_source(SOURCE)
            q_shared = T.alloc_shared((ST, C, DK), dtype)
            k_shared = T.alloc_shared((ST, C, DK), dtype)
            # dO or V, a buffer for each stage (`load_stage`)
            v0_shared = T.alloc_shared((C, BV), dtype)
            v1_shared = T.alloc_shared((C, BV), dtype)
            v2_shared = T.alloc_shared((C, BV), dtype) if ST == 3 else v1_shared
            v_shared = (v0_shared, v1_shared, v2_shared)
            a_shared = T.alloc_shared((ST, C, C), dtype)
            p_shared = T.alloc_shared((2, C, C), dtype)
            s0_shared = T.alloc_shared((BV, DK), dtype)
            s1_shared = T.alloc_shared((BV, DK), dtype)
            w_shared = T.alloc_shared((C, BV), dtype)  # dV or U
            factors_shared = T.alloc_shared((ST, 6, C), f32, scope="shared")

            S = T.alloc_fragment((BV, DK), f32)  # dS^T or S^T; all of the chains is transposed
            S_operand = T.alloc_fragment((BV, DK), dtype)
            U = T.alloc_fragment((BV, C), f32)
            W = T.alloc_fragment((BV, C), dtype)
            PdO = T.alloc_fragment((BV, C), f32)
            V = T.alloc_fragment((C, BV), dtype)
            rounded = T.alloc_fragment((C, BV), dtype)
            P = T.alloc_fragment((C, C), f32)
            P_rounded = T.alloc_fragment((C, C), dtype)

            # `full[ST]` is where the last, ragged chunk of a sequence lands before its end is zeroed.
            full = T.alloc_barrier(arrive_count=[64] * ST + [32])
            free = T.alloc_barrier(arrive_count=[4 * chains * LANES] * ST)
            p_full = T.alloc_barrier(arrive_count=[4 * LANES] * 2)
            s_full = T.alloc_barrier(arrive_count=[4 * chains * LANES] * 2)
            s_free = T.alloc_barrier(arrive_count=[32] * 2)
            w_full = T.alloc_barrier(arrive_count=[4 * chains * LANES])
            w_free = T.alloc_barrier(arrive_count=[32])
            T.annotate_layout(
                {V: transposed(BV, C), rounded: transposed(BV, C)}
                | {b: make_full_bank_swizzled_layout(b) for b in (v0_shared, v1_shared, v2_shared, w_shared)}
            )

            thread = T.get_thread_binding()
            lane = thread % 32
            is_state = T.alloc_var(i32)
            item = T.alloc_var(i32)
            i_n = T.alloc_var(i32)
            segment = T.alloc_var(i32)
            i_h = T.alloc_var(i32)
            i_k = T.alloc_var(i32)
            v_start = T.alloc_var(i32)
            start = T.alloc_var(i32)  # first token of the walk; of its earliest chunk
            length = T.alloc_var(i32)  # from there to the end of the sequence
            slot = T.alloc_var(i32)
            own = T.alloc_var(i32)  # chunks of the segment
            most = T.alloc_var(i32)  # chunks of the sequence before or behind it
            warm = T.alloc_var(i32)  # of these, the walk begins with so many
            ends = T.alloc_var(i32)  # whether the segment is the last of its sequence
            T.pdl_sync()  # what follows reads what the kernel before has written
            is_state = T.if_then_else(block >= num_items * HV * blocks, 1, 0)
            head_of_block(block - is_state * (num_items * HV * blocks), H, HV, blocks, BV, item, i_h, i_k, v_start)
            segment_of_item(item, N, cu_seqlens, segment_chunks, i_n, segment)
            first_chunk(i_n, segment, cu_seqlens, segment_chunks, start, slot)
            length = cu_seqlens[i_n + 1] - start - segment * (segment_chunks * C)
            start = start + segment * (segment_chunks * C)
            own = T.max(T.min(T.truncdiv(length + (C - 1), C), segment_chunks), 0)  # 0 also where nobody owns the item
            ends = T.if_then_else(length <= own * C and (own > 0 or segment == 0), 1, 0)
            most = segment * segment_chunks
            if is_state == 0:
                most = T.truncdiv(length + (C - 1), C) - own
            if own == 0:
                most = 0
            warm = T.call_extern(
                i32,
                "segments::approach<32>",
                T.address_of(gates[0, 0, 0, 0]),
                slot + T.if_then_else(is_state != 0, -1, own),
                T.if_then_else(is_state != 0, -1, 1),
                most,
                HV,
                i_h,
                threshold,
            )

            if is_state != 0:
                slot = slot - warm
                start = start - warm * C
                length = length + warm * C
                if thread < chain_threads:
                    T.set_max_nreg(232, 1)
                    if has_initial != 0 and warm == most:
                        for r, c in T.Parallel(BV, DK):
                            S[r, c] = initial[i_n, i_h, c, v_start + r]
                    else:
                        T.clear(S)
                    state.chain(
                        own + warm, lane, k_shared, v_shared, a_shared, s0_shared, s1_shared,
                        w_shared, factors_shared, S, S_operand, U, W, V, rounded, full, free, s_full, s_free, w_full,
                        w_free,
                    )  # fmt: skip
                elif thread < scores_threads:
                    T.set_max_nreg(24, 0)
                else:
                    T.set_max_nreg(24, 0)
                    if thread < scores_threads + 32:
                        state.loads(
                            own + warm, start, length, slot, i_k, i_h, v_start, k, v, a, k_shared, v_shared,
                            a_shared, full, free,
                        )  # fmt: skip
                    elif thread < scores_threads + 64:
                        state.factors(
                            own + warm, warm, start, length, slot, i_h, v_start, lane, gates, frames, chunks,
                            factors_shared, full, free,
                        )  # fmt: skip
                        if ends != 0 and i_h == 0 and v_start == 0:
                            state.no_chunks(i_n, start + length, slot + own + warm, lane, N, slots, chunks)
                    elif thread < scores_threads + 96:
                        state.store_states(
                            own + warm, warm, slot, i_h, v_start, states, s0_shared, s1_shared, s_full, s_free
                        )
                    else:
                        state.store_values(own + warm, warm, slot, i_h, v_start, values, w_shared, w_full, w_free)

            elif thread < chain_threads:
                T.set_max_nreg(208 if chains == 2 else 232, 1)
                if has_dfinal != 0 and warm == most:
                    for r, c in T.Parallel(BV, DK):
                        S[r, c] = dfinal[i_n, i_h, c, v_start + r]
                else:
                    T.clear(S)
                adjoint.chain(
                    own + warm, i_n, i_h, v_start, lane, T.if_then_else(segment == 0, has_dinitial, 0), dinitial,
                    q_shared, k_shared, v_shared, a_shared, p_shared, s0_shared, s1_shared,
                    w_shared, factors_shared, S, S_operand, U, PdO, W, rounded, full, free, p_full, s_full, s_free,
                    w_full, w_free,
                )  # fmt: skip
            elif thread < scores_threads:
                T.set_max_nreg(72 if chains == 2 else 128, 0)
                adjoint.scores(
                    own + warm, thread - chain_threads, lane, scale, l2norm, q_shared, k_shared, p_shared,
                    factors_shared, P, P_rounded, full, free, p_full,
                )  # fmt: skip
            else:
                T.set_max_nreg(24 if chains == 2 else 40, 0)
                if thread < scores_threads + 32:
                    adjoint.loads(
                        own + warm, start, length, slot, i_k, i_h, v_start, q, k, do, a, q_shared, k_shared,
                        v_shared, a_shared, full, free,
                    )  # fmt: skip
                elif thread < scores_threads + 64:
                    adjoint.factors(
                        own + warm, warm, slot, i_h, v_start, lane, gates, frames, factors_shared, full, free
                    )
                elif thread < scores_threads + 96:
                    adjoint.store_states(
                        own + warm, warm, slot, i_h, v_start, dstates, s0_shared, s1_shared, s_full, s_free
                    )
                else:
                    adjoint.store_values(own + warm, warm, start, length, i_h, v_start, dv, w_shared, w_full, w_free)
                    if ends != 0 and i_n == N - 1:
                        for r in T.serial(num_tokens - start - length):
                            for c in T.Parallel(BV):
                                dv[start + length + r, i_h, v_start + c] = 0

    return backward_chains
