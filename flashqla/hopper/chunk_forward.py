"""Chunk forward: the state chain and the output of one value head, or of a block of its value columns, in one CTA.

Inputs
    q, k         [T, H, K]             bf16 or fp16, K in {64, 128}; token and head strides of 16-byte multiples, last 1
    v            [T, HV, V]            dtype of q, V in {64, 128}; strides likewise
    a            [slots, HV, 64, 64]   dtype of q: the inverse of `gated_inverse`
    gates        [slots, HV, 2, 64]    fp32: log2 decay summed over the chunk (G), log2 key scale (r)
    cu_seqlens   [N + 1]               int32, on the device
    initial      [N, HV, K, V]         fp32, any strides; read if `has_initial`
    states       [segments, HV, V, K]  fp32: the end states of segments (segment_scan.py), numbered as segments.cuh says
    segment_chunks, num_items          int32: chunks of a segment, and how many segments the grid has room for;
                                       NO_SEGMENTS and N where every sequence is a single one
    scale        fp32;  has_initial, has_final, l2norm   int32, run-time switches
Outputs
    o            [T, HV, V]            dtype of q; rows past cu_seqlens[-1] become 0
    final        [N, HV, K, V]         fp32, any strides; written if `has_final`
Definition
    The chunk form (eq. 3.3 to 3.6) in the chunk's own frame, where no gate is left (eq. 8.1 to 8.6): a state S of
    frame c stands for c S, and with f_i = 1 / (exp(G_i) r_i c)
        W = f V - K S,   U = A W,   O = c exp(G) scale (Q S + Tril(Q K^T) U),   S' = S + K^T U,   c' = exp(G_C) c.
    c and 1 / exp(G) stay within 2^+-FRAME: a chunk that would leave it is `special` and takes eq. 8.7, gates and all.

Grid: num_items * HV * V / BV CTAs, value blocks fastest, then heads: CTAs side by side share K, Q and the inverse in
L2. A CTA has a segment of a sequence (eq. 7.1), which starts from the end state of the one before.
Warpgroups, and what they wait for
    chain (BV / 64)  keeps S^T, 64 rows each, in registers as the A operand of every wgmma; per chunk K S, A W, Q S,
                     K^T U, P U, and the output rounded, transposed by stmatrix. Waits: `full` (tiles), `scores_full`,
                     `o_free`.
    scores           P = Tril(Q K^T) of the chunk ahead; with l2norm also the query norms. Waits: `full`, `free`.
    producers        one warp each: TMA loads and the zeroes past the end of a sequence (`free`), gate factors (`free`),
                     TMA stores (`o_full`).
Shared memory, K = V = BV = 128: three stages of Q, K, V (16 KB each) and A (8 KB), two of P (8 KB), O 16 KB, factors
5 KB: 205 KB.
Registers (setmaxnreg): chain 208, scores 72, producers 24 with two chain warpgroups; 232, 128, 40 with one.
"""

import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout

from .pieces import (
    CHUNK_SIZE,
    EPSILON,
    FRAME,
    LANES,
    PASS_CONFIGS,
    ROWS,
    SEGMENTS,
    arrive,
    fetch_stage,
    first_chunk,
    head_of_block,
    load_stage,
    segment_of_item,
    transposed,
    wgmma,
)

__all__ = ["CHUNK_SIZE", "EPSILON", "LANES", "PASS_CONFIGS", "ROWS", "build", "transposed"]
STAGES = 3

# rows of the factors of a chunk
VALUE, OUTPUT, STATE, KEEP, GATE, SCALARS = range(6)
# eq. 8.1:  f      c exp(G) scale   c exp(G)   exp(G_C - G)   G
SPECIAL, DECAY, FRAME_OUT = range(3)  # of the scalars: 0 or 1; what S is multiplied with in a special chunk; c'


def build(dtype: str = "bfloat16", head_dim_k: int = 128, head_dim_v: int = 128, block_dv: int = 128):
    """The kernel as a TileLang PrimFunc.

    Args:
        dtype: of q, k, v, a and o, "bfloat16" or "float16".
        head_dim_k, head_dim_v: K and V, 64 or 128.
        block_dv: value columns of a CTA, 64 or 128, at most V.
    """
    C, DK, DV, BV, ST = CHUNK_SIZE, head_dim_k, head_dim_v, block_dv, STAGES
    blocks, chains = DV // BV, BV // ROWS
    chain_threads, scores_threads = 128 * chains, 128 * (chains + 1)
    registers_chain, registers_scores, registers_producer = (208, 72, 24) if chains == 2 else (232, 128, 40)
    # fp16 has no exponents to spare: every chunk is special there.
    frame = FRAME if dtype == "bfloat16" else -1.0
    f32, i32, i64 = "float32", "int32", "int64"
    num_tokens, H, HV, N, N_plus_1, slots, segments = T.dynamic("num_tokens, H, HV, N, N_plus_1, slots, segments")
    q_token, q_head, k_token, k_head, v_token, v_head, o_token, o_head = T.dynamic(
        "q_token, q_head, k_token, k_head, v_token, v_head, o_token, o_head", i64
    )
    initial_n, initial_h, initial_k, initial_v = T.dynamic("initial_n, initial_h, initial_k, initial_v", i64)
    final_n, final_h, final_k, final_v = T.dynamic("final_n, final_h, final_k, final_v", i64)

    @T.macro
    def load_values(i, V, f, special, v_shared, factors_shared):
        load_stage(i, v_shared, V)
        T.copy(factors_shared[i % ST, VALUE, :], f)
        special[0] = factors_shared[i % ST, SCALARS, SPECIAL]

    @T.macro
    def start_chunk(i, S, S_operand, U, k_shared):
        T.copy(S, S_operand)
        wgmma(S_operand, k_shared[i % ST, :, :], U, transpose_B=True, clear_accum=True)  # (K S)^T

    @T.macro
    def chunk(i, S, S_operand, U, O, W, U_operand, V, f, q_shared, k_shared, a_shared, p_shared, scores_full):
        for r, c in T.Parallel(BV, C):
            W[r, c] = V[c, r] * f[c] - U[r, c]
        wgmma(W, a_shared[i % ST, :, :], U, transpose_B=True, clear_accum=True)
        wgmma(S_operand, q_shared[i % ST, :, :], O, transpose_B=True, clear_accum=True)
        T.wait_wgmma(1)  # U
        T.copy(U, U_operand)
        wgmma(U_operand, k_shared[i % ST, :, :], S)
        T.barrier_wait(scores_full[i % 2], (i // 2) % 2)
        T.wait_wgmma(1)  # Q S
        wgmma(U_operand, p_shared[i % 2, :, :], O, transpose_B=True)

    @T.macro
    def special_chunk(i, S, S_operand, U, O, W, U_operand, V, f, decay, q_shared, k_shared, a_shared, p_shared,
                      factors_shared, scores_full):  # fmt: skip
        """Eq. 8.7, and the way to a new frame: rare, so one step after the other."""
        for r, c in T.Parallel(BV, C):
            W[r, c] = V[c, r] * f[c] - factors_shared[i % ST, STATE, c] * U[r, c]
        decay[0] = factors_shared[i % ST, SCALARS, DECAY]
        for r, c in T.Parallel(BV, DK):
            S[r, c] *= decay[0]
        wgmma(S_operand, q_shared[i % ST, :, :], O, transpose_B=True, clear_accum=True)
        wgmma(W, a_shared[i % ST, :, :], U, transpose_B=True, clear_accum=True)
        T.wait_wgmma(0)
        for r, c in T.Parallel(BV, C):
            O[r, c] *= factors_shared[i % ST, STATE, c]
        T.copy(U, U_operand)
        T.barrier_wait(scores_full[i % 2], (i // 2) % 2)
        wgmma(U_operand, p_shared[i % 2, :, :], O, transpose_B=True)
        T.wait_wgmma(0)
        for r, c in T.Parallel(BV, C):
            U_operand[r, c] = U[r, c] * factors_shared[i % ST, KEEP, c]
        wgmma(U_operand, k_shared[i % ST, :, :], S)
        T.wait_wgmma(0)

    @T.macro
    def round_output(i, O, O_rounded, factors_shared, o_shared):
        for c, r in T.Parallel(C, BV):
            O_rounded[c, r] = O[r, c] * factors_shared[i % ST, OUTPUT, c]
        T.copy(O_rounded, o_shared)

    @T.macro
    def finish_chunk(i, free, o_full, lane):
        T.fence_proxy_async()  # o_shared goes to TMA
        arrive(o_full, 0, lane)
        arrive(free, i % ST, lane)

    @T.prim_func
    def chunk_forward(
        q: T.StridedTensor((num_tokens, H, DK), (q_token, q_head, 1), dtype),
        k: T.StridedTensor((num_tokens, H, DK), (k_token, k_head, 1), dtype),
        v: T.StridedTensor((num_tokens, HV, DV), (v_token, v_head, 1), dtype),
        a: T.Tensor((slots, HV, C, C), dtype),
        gates: T.Tensor((slots, HV, 2, C), f32),
        cu_seqlens: T.Tensor((N_plus_1,), i32),
        initial: T.StridedTensor((N, HV, DK, DV), (initial_n, initial_h, initial_k, initial_v), f32),
        final: T.StridedTensor((N, HV, DK, DV), (final_n, final_h, final_k, final_v), f32),
        states: T.Tensor((segments, HV, DV, DK), f32),
        o: T.StridedTensor((num_tokens, HV, DV), (o_token, o_head, 1), dtype),
        scale: T.float32,
        segment_chunks: T.int32,
        num_items: T.int32,
        has_initial: T.int32,
        has_final: T.int32,
        l2norm: T.int32,
    ):
        with T.Kernel(num_items * HV * blocks, threads=128 * (chains + 2)) as block:
            T.import_source(SEGMENTS)
            q_shared = T.alloc_shared((ST, C, DK), dtype)
            k_shared = T.alloc_shared((ST, C, DK), dtype)
            v0_shared = T.alloc_shared((C, BV), dtype)
            v1_shared = T.alloc_shared((C, BV), dtype)
            v2_shared = T.alloc_shared((C, BV), dtype)
            v_shared = (v0_shared, v1_shared, v2_shared)
            a_shared = T.alloc_shared((ST, C, C), dtype)
            p_shared = T.alloc_shared((2, C, C), dtype)
            o_shared = T.alloc_shared((C, BV), dtype)
            factors_shared = T.alloc_shared((ST, 6, C), f32, scope="shared")

            S = T.alloc_fragment((BV, DK), f32)  # S^T; all of the chain is transposed
            S_operand = T.alloc_fragment((BV, DK), dtype)
            U = T.alloc_fragment((BV, C), f32)  # K S, then U
            O = T.alloc_fragment((BV, C), f32)
            W = T.alloc_fragment((BV, C), dtype)
            U_operand = T.alloc_fragment((BV, C), dtype)
            V = T.alloc_fragment((C, BV), dtype)
            f = T.alloc_fragment((C,), f32)
            O_rounded = T.alloc_fragment((C, BV), dtype)
            special = T.alloc_local((1,), f32)
            decay = T.alloc_local((1,), f32)
            P = T.alloc_fragment((C, C), f32)
            P_rounded = T.alloc_fragment((C, C), dtype)
            query = T.alloc_local((8,), dtype)
            square = T.alloc_local((1,), f32)
            G = T.alloc_local((2,), f32)
            log_r = T.alloc_local((2,), f32)
            G_last = T.alloc_local((1,), f32)
            log_c = T.alloc_local((1,), f32)
            c_before = T.alloc_local((1,), f32)
            gated = T.alloc_local((1,), f32)  # 1 for a chunk whose decay exceeds the frame
            leaves = T.alloc_local((1,), f32)  # 1 for a special chunk

            # `full[ST]` is where the last, ragged chunk of a sequence lands before its end is zeroed.
            full = T.alloc_barrier(arrive_count=[64] * ST + [32])
            free = T.alloc_barrier(arrive_count=[4 * (chains + 1) * LANES] * ST)
            scores_full = T.alloc_barrier(arrive_count=[4 * LANES] * 2)
            o_full = T.alloc_barrier(arrive_count=[4 * chains * LANES])
            o_free = T.alloc_barrier(arrive_count=[32])
            T.annotate_layout(
                {V: transposed(BV, C), O_rounded: transposed(BV, C)}
                | {b: make_full_bank_swizzled_layout(b) for b in (*v_shared, o_shared)}
            )

            thread = T.get_thread_binding()
            lane = thread % 32
            item = T.alloc_var(i32)
            i_n = T.alloc_var(i32)
            segment = T.alloc_var(i32)
            before = T.alloc_var(i32)  # number of the segment before this one
            i_h = T.alloc_var(i32)
            i_k = T.alloc_var(i32)
            v_start = T.alloc_var(i32)
            start = T.alloc_var(i32)
            length = T.alloc_var(i32)  # from here to the end of the sequence
            n = T.alloc_var(i32)
            slot = T.alloc_var(i32)
            T.pdl_sync()  # what follows reads what the kernels before have written
            head_of_block(block, H, HV, blocks, BV, item, i_h, i_k, v_start)
            segment_of_item(item, N, cu_seqlens, segment_chunks, i_n, segment)
            before = T.if_then_else(segment == 1, i_n, item - 1)
            first_chunk(i_n, segment, cu_seqlens, segment_chunks, start, slot)
            length = cu_seqlens[i_n + 1] - start - segment * (segment_chunks * C)
            start = start + segment * (segment_chunks * C)
            n = T.max(T.min(T.truncdiv(length + (C - 1), C), segment_chunks), 0)  # 0 also where nobody owns the item

            if thread < chain_threads:
                T.set_max_nreg(registers_chain, 1)
                if segment > 0:
                    if n > 0:
                        for r, c in T.Parallel(BV, DK):
                            S[r, c] = states[before, i_h, v_start + r, c]
                elif has_initial != 0:
                    for r, c in T.Parallel(BV, DK):
                        S[r, c] = initial[i_n, i_h, c, v_start + r]
                else:
                    T.clear(S)
                decay[0] = 1.0
                if n > 0:
                    T.barrier_wait(full[0], 0)
                    load_values(0, V, f, special, v_shared, factors_shared)
                    start_chunk(0, S, S_operand, U, k_shared)
                    T.wait_wgmma(0)
                    for i in T.serial(n - 1):
                        # Here nothing is in flight; U = (K S)^T, and the values of chunk i are in registers.
                        if special[0] != 0:
                            special_chunk(i, S, S_operand, U, O, W, U_operand, V, f, decay, q_shared, k_shared,
                                          a_shared, p_shared, factors_shared, scores_full)  # fmt: skip
                            T.barrier_wait(full[(i + 1) % ST], ((i + 1) // ST) % 2)
                            T.barrier_wait(o_free[0], (i + 1) % 2)
                            start_chunk(i + 1, S, S_operand, U, k_shared)
                        else:
                            chunk(i, S, S_operand, U, O, W, U_operand, V, f, q_shared, k_shared, a_shared, p_shared,
                                  scores_full)  # fmt: skip
                            T.barrier_wait(full[(i + 1) % ST], ((i + 1) // ST) % 2)
                            T.barrier_wait(o_free[0], (i + 1) % 2)
                            T.wait_wgmma(1)  # S
                            start_chunk(i + 1, S, S_operand, U, k_shared)
                            T.wait_wgmma(1)  # O
                        load_values(i + 1, V, f, special, v_shared, factors_shared)
                        round_output(i, O, O_rounded, factors_shared, o_shared)
                        finish_chunk(i, free, o_full, lane)
                        T.wait_wgmma(0)
                    if special[0] != 0:
                        special_chunk(n - 1, S, S_operand, U, O, W, U_operand, V, f, decay, q_shared, k_shared,
                                      a_shared, p_shared, factors_shared, scores_full)  # fmt: skip
                    else:
                        chunk(n - 1, S, S_operand, U, O, W, U_operand, V, f, q_shared, k_shared, a_shared, p_shared,
                              scores_full)  # fmt: skip
                        T.wait_wgmma(0)
                    decay[0] = factors_shared[(n - 1) % ST, SCALARS, FRAME_OUT]
                    T.barrier_wait(o_free[0], n % 2)
                    round_output(n - 1, O, O_rounded, factors_shared, o_shared)
                    finish_chunk(n - 1, free, o_full, lane)
                # the last segment: of a sequence without tokens, its first
                if has_final != 0 and length <= n * C and (n > 0 or segment == 0):
                    for r, c in T.Parallel(BV, DK):
                        final[i_n, i_h, c, v_start + r] = S[r, c] * decay[0]

            elif thread < scores_threads:
                T.set_max_nreg(registers_scores, 0)
                row = (thread - chain_threads) // 2
                half = thread % 2
                for i in T.serial(n):
                    st = i % ST
                    T.barrier_wait(full[st], (i // ST) % 2)
                    wgmma(q_shared[st, :, :], k_shared[st, :, :], P, transpose_B=True, clear_accum=True)
                    T.wait_wgmma(0)
                    if factors_shared[st, SCALARS, SPECIAL] != 0:
                        for x, y in T.Parallel(C, C):
                            P[x, y] *= T.exp2(factors_shared[st, GATE, x] - factors_shared[st, GATE, y])
                    for x, y in T.Parallel(C, C):
                        P_rounded[x, y] = T.Select(x >= y, P[x, y], T.float32(0))
                    if l2norm != 0:
                        # eq. 2.4 for the query of each row, two threads a row; it joins the row's output factor
                        square[0] = 0.0
                        for j in T.serial(DK // 16):
                            for e in T.vectorized(8):
                                query[e] = q_shared[st, row, half * (DK // 2) + j * 8 + e]
                            for e in T.unroll(8):
                                square[0] += T.cast(query[e], f32) * T.cast(query[e], f32)
                        square[0] += T.shfl_xor(square[0], 1)
                        if half == 0:
                            factors_shared[st, OUTPUT, row] *= T.rsqrt(square[0] + EPSILON)
                    if i > 1:
                        T.barrier_wait(
                            free[(i - 2) % ST], ((i - 2) // ST) % 2
                        )  # the scores of chunk i - 2 have been used
                    T.copy(P_rounded, p_shared[i % 2, :, :])
                    T.fence_proxy_async()
                    arrive(scores_full, i % 2, lane)
                    arrive(free, st, lane)

            else:
                T.set_max_nreg(registers_producer, 0)
                if thread < scores_threads + 32:  # loads
                    for i in T.serial(n):
                        st = i % ST
                        t = start + i * C
                        valid = length - i * C
                        land = T.if_then_else(valid >= C, st, ST)
                        T.barrier_wait(free[st], (i // ST + 1) % 2)
                        T.tma_copy(k[t : t + C, i_k, 0:DK], k_shared[st, :, :], barrier=full[land])
                        T.tma_copy(q[t : t + C, i_k, 0:DK], q_shared[st, :, :], barrier=full[land])
                        T.tma_copy(a[slot + i, i_h, 0:C, 0:C], a_shared[st, :, :], barrier=full[land])
                        fetch_stage(st, v[t : t + C, i_h, v_start : v_start + BV], v_shared, full, land)
                        T.barrier_arrive(full[land])
                        if valid < C:
                            # Rows past the end belong to the next sequence or to nobody, and may be NaN.
                            T.barrier_wait(full[ST], 0)
                            for r in T.serial(C - valid):
                                for c in T.Parallel(DK):
                                    k_shared[st, valid + r, c] = 0
                                for c in T.Parallel(BV):
                                    if st == 0:
                                        v0_shared[valid + r, c] = 0
                                    elif st == 1:
                                        v1_shared[valid + r, c] = 0
                                    else:
                                        v2_shared[valid + r, c] = 0
                            T.fence_proxy_async()
                            T.barrier_arrive(full[st])
                elif thread < scores_threads + 64:  # factors, eq. 8.1
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
                                factors_shared[st, GATE, x] = G[j] * gated[0]
                            log_c[0] = 0.0
                        for j in T.unroll(2):
                            x = lane + 32 * j
                            factors_shared[st, VALUE, x] = T.exp2(-log_r[j] - log_c[0] - G[j] * (1.0 - gated[0]))
                            factors_shared[st, OUTPUT, x] = T.exp2(log_c[0] + G[j] * (1.0 - gated[0])) * scale
                        log_c[0] = log_c[0] + G_last[0] * (1.0 - gated[0])
                        if lane == 0:
                            factors_shared[st, SCALARS, SPECIAL] = leaves[0]
                            factors_shared[st, SCALARS, DECAY] = T.exp2(G_last[0] * gated[0]) * c_before[0]
                            factors_shared[st, SCALARS, FRAME_OUT] = T.exp2(log_c[0])
                        T.barrier_arrive(full[st])
                elif thread < scores_threads + 96:  # stores
                    for i in T.serial(n):
                        t = start + i * C
                        valid = length - i * C
                        T.barrier_wait(o_full[0], i % 2)
                        if valid >= C:
                            T.tma_copy(o_shared, o[t : t + C, i_h, v_start : v_start + BV])
                            T.tma_store_wait(0)
                        else:
                            for r in T.serial(valid):
                                for c in T.Parallel(BV):
                                    o[t + r, i_h, v_start + c] = o_shared[r, c]
                        T.barrier_arrive(o_free[0])
                elif item == N - 1:  # padding
                    for r in T.serial(num_tokens - start - length):
                        for c in T.Parallel(BV):
                            o[start + length + r, i_h, v_start + c] = 0

    return chunk_forward
