"""Backward, second of three kernels: the chain of the state's gradient, from the last chunk to the first, and dV.

Inputs
    q, k         [T, H, K]             bf16 or fp16, K in {64, 128}; token and head strides of 16-byte multiples, last 1
    do           [T, HV, V]            dtype of q, V in {64, 128}; strides likewise
    a            [slots, HV, 64, 64]   dtype of q: the inverse of `gated_inverse` with its flag `GATED`
    gates        [slots, HV, 2, 64]    fp32: log2 decay summed over the chunk (G), log2 key scale (r)
    cu_seqlens   [N + 1]               int32, on the device
    dfinal       [N, HV, K, V]         fp32, any strides; read if `has_dfinal`
    scale        fp32;  has_dfinal, has_dinitial, l2norm   int32, run-time switches
Outputs
    dv           [T, HV, V]            dtype of q; rows past cu_seqlens[-1] become 0
    dstates      [slots, HV, V, K]     dtype of q: dS'^T / d, the gradient of the state at the end of each chunk
    frames       [slots, HV, 2]        fp32: d of the chunk, at index 1
    dinitial     [N, HV, K, V]         fp32, any strides; written if `has_dinitial`
Definition
    The adjoint chain (eq. 6.1, 6.2, 6.4) with keys K = k, dW scaled by 1 / r as U is by r (eq. 8.1 says why), and
    E = scale r^q the factor of the query rows:
        P = Tril(E exp(G_i - G_j) Q K^T),   dU = P^T dO + diag(exp(G_C - G)) K dS',   dW = A^T dU,   dV = dW / r,
        dS = exp(G_C) dS' + (E exp(G) Q)^T dO - K^T (exp(G) dW).
    The registers hold dS' / d. d' = exp(G_C) d costs nothing; where it would leave 2^-FRAME, dS itself is scaled and
    d' = 1.

Grid: N * HV * V / BV CTAs, value blocks fastest.
Warpgroups, and what they wait for
    chain (BV / 64)  keeps dS^T, 64 rows each, in registers as the A operand; per chunk K dS', P^T dO, A^T dU, Q^T dO,
                     K^T dW. Waits: `full` (tiles), `p_full`, `s_free`, `w_free` (the tiles left behind are stored).
    scores           one chunk ahead: P, the query norms with l2norm, and Q scaled in place by its rows' factors.
                     Waits: `full`, `free`.
    producers        one warp each: TMA loads and the zeroes past the end of a sequence (`free`), gate factors (`free`),
                     TMA stores of dS' (`s_full`) and of dV (`w_full`).
Shared memory, K = V = BV = 128: two stages of Q, K, dO (16 KB each) and A (8 KB), two of P (8 KB), two dS' of 32 KB,
dV 16 KB, factors 3 KB: 211 KB. With BV = 64 three stages: 205 KB.
Registers (setmaxnreg): chain 208, scores 72, producers 24 with two chain warpgroups; 232, 128, 40 with one.
"""

import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout

from .backward_state import FRAME
from .chunk_forward import CHUNK_SIZE, EPSILON, LANES, PASS_CONFIGS, ROWS, transposed

__all__ = ["PASS_CONFIGS", "build"]

# rows of the factors of a chunk
WRITE, READ, VALUE, QUERY, GATE, SCALARS = range(6)
# d exp(G_C - G)   exp(G) / d'   1 / r   E   G
SPECIAL, DECAY = range(2)  # of the scalars: 0 or 1; what dS is multiplied with in a special chunk


def build(dtype: str = "bfloat16", head_dim_k: int = 128, head_dim_v: int = 128, block_dv: int = 128):
    """The kernel as a TileLang PrimFunc.

    Args:
        dtype: of q, k, do, a, dv and dstates, "bfloat16" or "float16".
        head_dim_k, head_dim_v: K and V, 64 or 128.
        block_dv: value columns of a CTA, 64 or 128, at most V.
    """
    C, DK, DV, BV = CHUNK_SIZE, head_dim_k, head_dim_v, block_dv
    blocks, chains = DV // BV, BV // ROWS
    ST = 2 if chains == 2 else 3
    chain_threads, scores_threads = 128 * chains, 128 * (chains + 1)
    registers_chain, registers_scores, registers_producer = (208, 72, 24) if chains == 2 else (232, 128, 40)
    frame = FRAME if dtype == "bfloat16" else -1.0  # fp16 has no exponents to spare: a frame a chunk
    f32, i32, i64 = "float32", "int32", "int64"
    num_tokens, H, HV, N, N_plus_1, slots = T.dynamic("num_tokens, H, HV, N, N_plus_1, slots")
    q_token, q_head, k_token, k_head, do_token, do_head = T.dynamic(
        "q_token, q_head, k_token, k_head, do_token, do_head", i64
    )
    dfinal_n, dfinal_h, dfinal_k, dfinal_v = T.dynamic("dfinal_n, dfinal_h, dfinal_k, dfinal_v", i64)
    dinitial_n, dinitial_h, dinitial_k, dinitial_v = T.dynamic("dinitial_n, dinitial_h, dinitial_k, dinitial_v", i64)

    def wgmma(A, B, accumulator, **options):
        return T.wgmma_gemm(A, B, accumulator, policy=T.GemmWarpPolicy.FullRow, **options)

    @T.macro
    def arrive(barrier, index, lane):
        """One arrival a warp: 32 would queue at the same word."""
        T.sync_warp()
        if lane < LANES:
            T.barrier_arrive(barrier[index])

    @T.prim_func
    def backward_adjoint(
        q: T.StridedTensor((num_tokens, H, DK), (q_token, q_head, 1), dtype),
        k: T.StridedTensor((num_tokens, H, DK), (k_token, k_head, 1), dtype),
        do: T.StridedTensor((num_tokens, HV, DV), (do_token, do_head, 1), dtype),
        a: T.Tensor((slots, HV, C, C), dtype),
        gates: T.Tensor((slots, HV, 2, C), f32),
        cu_seqlens: T.Tensor((N_plus_1,), i32),
        dfinal: T.StridedTensor((N, HV, DK, DV), (dfinal_n, dfinal_h, dfinal_k, dfinal_v), f32),
        dv: T.Tensor((num_tokens, HV, DV), dtype),
        dstates: T.Tensor((slots, HV, DV, DK), dtype),
        frames: T.Tensor((slots, HV, 2), f32),
        dinitial: T.StridedTensor((N, HV, DK, DV), (dinitial_n, dinitial_h, dinitial_k, dinitial_v), f32),
        scale: T.float32,
        has_dfinal: T.int32,
        has_dinitial: T.int32,
        l2norm: T.int32,
    ):
        with T.Kernel(N * HV * blocks, threads=128 * (chains + 2)) as block:
            q_shared = T.alloc_shared((ST, C, DK), dtype)
            k_shared = T.alloc_shared((ST, C, DK), dtype)
            do_shared = T.alloc_shared((ST, C, BV), dtype)
            a_shared = T.alloc_shared((ST, C, C), dtype)
            p_shared = T.alloc_shared((2, C, C), dtype)
            s0_shared = T.alloc_shared((BV, DK), dtype)
            s1_shared = T.alloc_shared((BV, DK), dtype)
            w_shared = T.alloc_shared((C, BV), dtype)
            factors_shared = T.alloc_shared((ST, 6, C), f32, scope="shared")

            S = T.alloc_fragment((BV, DK), f32)  # dS^T; all of the chain is transposed
            S_operand = T.alloc_fragment((BV, DK), dtype)
            U = T.alloc_fragment((BV, C), f32)  # K dS', then dW
            PdO = T.alloc_fragment((BV, C), f32)
            W = T.alloc_fragment((BV, C), dtype)  # dU, then dW
            W_rounded = T.alloc_fragment((C, BV), dtype)
            row = T.alloc_fragment((C,), f32)
            special = T.alloc_local((1,), f32)
            decay = T.alloc_local((1,), f32)
            P = T.alloc_fragment((C, C), f32)
            P_rounded = T.alloc_fragment((C, C), dtype)
            gate_row = T.alloc_fragment((C,), f32)
            query_row = T.alloc_fragment((C,), f32)
            query = T.alloc_local((8,), dtype)
            queries = T.alloc_local((16,), dtype)
            square = T.alloc_local((1,), f32)
            factor = T.alloc_local((1,), f32)
            G = T.alloc_local((2,), f32)
            log_r = T.alloc_local((2,), f32)
            G_last = T.alloc_local((1,), f32)
            log_d = T.alloc_local((1,), f32)
            leaves = T.alloc_local((1,), f32)

            # `full[ST]` is where the last, ragged chunk of a sequence lands before its end is zeroed.
            full = T.alloc_barrier(arrive_count=[64] * ST + [32])
            free = T.alloc_barrier(arrive_count=[4 * chains * LANES] * ST)
            p_full = T.alloc_barrier(arrive_count=[4 * LANES] * 2)
            s_full = T.alloc_barrier(arrive_count=[4 * chains * LANES] * 2)
            s_free = T.alloc_barrier(arrive_count=[32] * 2)
            w_full = T.alloc_barrier(arrive_count=[4 * chains * LANES])
            w_free = T.alloc_barrier(arrive_count=[32])
            T.annotate_layout({W_rounded: transposed(BV, C), w_shared: make_full_bank_swizzled_layout(w_shared)})

            T.pdl_trigger()  # `backward_state` needs nothing from here: it may fill the SMs that this leaves
            thread = T.get_thread_binding()
            lane = thread % 32
            i_n = T.alloc_var(i32)
            i_h = T.alloc_var(i32)
            i_k = T.alloc_var(i32)
            v_start = T.alloc_var(i32)
            start = T.alloc_var(i32)
            length = T.alloc_var(i32)
            n = T.alloc_var(i32)
            slot = T.alloc_var(i32)
            i_n = T.truncdiv(block, HV * blocks)
            i_h = T.truncdiv(block - i_n * (HV * blocks), blocks)
            v_start = (block - i_n * (HV * blocks) - i_h * blocks) * BV
            i_k = T.truncdiv(i_h, T.truncdiv(HV, H))
            start = cu_seqlens[i_n]
            length = cu_seqlens[i_n + 1] - start
            n = T.truncdiv(length + (C - 1), C)
            slot = T.min(i_n, start)
            slot = slot + T.truncdiv(start - slot, C)

            if thread < chain_threads:
                T.set_max_nreg(registers_chain, 1)
                if has_dfinal != 0:
                    for r, c in T.Parallel(BV, DK):
                        S[r, c] = dfinal[i_n, i_h, c, v_start + r]
                else:
                    T.clear(S)
                for i in T.serial(n):
                    st = i % ST
                    T.barrier_wait(full[st], (i // ST) % 2)
                    T.copy(S, S_operand)
                    special[0] = factors_shared[st, SCALARS, SPECIAL]
                    if special[0] != 0:
                        decay[0] = factors_shared[st, SCALARS, DECAY]
                        for r, c in T.Parallel(BV, DK):
                            S[r, c] *= decay[0]
                    wgmma(S_operand, k_shared[st, :, :], U, transpose_B=True, clear_accum=True)  # (K dS')^T
                    T.copy(factors_shared[st, WRITE, :], row)
                    T.barrier_wait(p_full[i % 2], (i // 2) % 2)
                    wgmma(do_shared[st, :, :], p_shared[i % 2, :, :], PdO, transpose_A=True, clear_accum=True)
                    wgmma(do_shared[st, :, :], q_shared[st, :, :], S, transpose_A=True)
                    T.barrier_wait(s_free[i % 2], (i // 2 + 1) % 2)
                    if i % 2 == 0:
                        T.copy(S_operand, s0_shared)
                    else:
                        T.copy(S_operand, s1_shared)
                    arrive(s_full, i % 2, lane)
                    T.wait_wgmma(1)  # K dS' and P^T dO
                    for r, c in T.Parallel(BV, C):
                        W[r, c] = PdO[r, c] + row[c] * U[r, c]
                    wgmma(W, a_shared[st, :, :], U, clear_accum=True)  # (A^T dU)^T
                    T.copy(factors_shared[st, READ, :], row)
                    T.barrier_wait(w_free[0], (i + 1) % 2)
                    T.wait_wgmma(0)
                    for r, c in T.Parallel(BV, C):
                        W[r, c] = -U[r, c] * row[c]
                    wgmma(W, k_shared[st, :, :], S)
                    for c, r in T.Parallel(C, BV):
                        W_rounded[c, r] = U[r, c] * factors_shared[st, VALUE, c]
                    T.copy(W_rounded, w_shared)
                    arrive(w_full, 0, lane)
                    T.wait_wgmma(0)
                    arrive(free, st, lane)
                if has_dinitial != 0:
                    decay[0] = 1.0
                    if n > 0:
                        # of the chunk processed last: its d times its decay, unless that made a new frame
                        decay[0] = T.if_then_else(special[0] != 0, 1.0, factors_shared[(n - 1) % ST, SCALARS, DECAY])
                    for r, c in T.Parallel(BV, DK):
                        dinitial[i_n, i_h, c, v_start + r] = S[r, c] * decay[0]

            elif thread < scores_threads:
                T.set_max_nreg(registers_scores, 0)
                i_row = (thread - chain_threads) // 2
                half = thread % 2
                for i in T.serial(n):
                    st = i % ST
                    T.barrier_wait(full[st], (i // ST) % 2)
                    wgmma(q_shared[st, :, :], k_shared[st, :, :], P, transpose_B=True, clear_accum=True)
                    factor[0] = scale
                    if l2norm != 0:
                        # eq. 2.4 for the query of each row, two threads a row
                        square[0] = 0.0
                        for j in T.serial(DK // 16):
                            for e in T.vectorized(8):
                                query[e] = q_shared[st, i_row, half * (DK // 2) + j * 8 + e]
                            for e in T.unroll(8):
                                square[0] += T.cast(query[e], f32) * T.cast(query[e], f32)
                        square[0] += T.shfl_xor(square[0], 1)
                        factor[0] = scale * T.rsqrt(square[0] + EPSILON)
                    if half == 0:
                        factors_shared[st, QUERY, i_row] = factor[0]
                    T.wait_wgmma(0)
                    T.sync_threads(1, 128)  # Q has been read, and the rows' factors are in
                    factor[0] = factor[0] * factors_shared[st, READ, i_row]
                    for j in T.unroll(DK // 32):
                        for l in T.unroll(2):
                            for e in T.vectorized(8):
                                queries[l * 8 + e] = q_shared[st, i_row, half * (DK // 2) + j * 16 + l * 8 + e]
                        for e in T.unroll(16):
                            queries[e] = T.cast(T.cast(queries[e], f32) * factor[0], dtype)
                        for l in T.unroll(2):
                            for e in T.vectorized(8):
                                q_shared[st, i_row, half * (DK // 2) + j * 16 + l * 8 + e] = queries[l * 8 + e]
                    T.copy(factors_shared[st, GATE, :], gate_row)
                    T.copy(factors_shared[st, QUERY, :], query_row)
                    for x, y in T.Parallel(C, C):
                        P_rounded[x, y] = T.Select(
                            x >= y,
                            P[x, y] * query_row[x] * T.exp2(gate_row[x] - factors_shared[st, GATE, y]),
                            T.float32(0),
                        )
                    if i > 1:
                        # the scores of chunk i - 2 have been used
                        T.barrier_wait(free[(i - 2) % ST], ((i - 2) // ST) % 2)
                    T.copy(P_rounded, p_shared[i % 2, :, :])
                    T.fence_proxy_async()
                    arrive(p_full, i % 2, lane)

            else:
                T.set_max_nreg(registers_producer, 0)
                if thread < scores_threads + 32:  # loads
                    for i in T.serial(n):
                        st = i % ST
                        t = start + (n - 1 - i) * C
                        valid = length - (n - 1 - i) * C
                        land = T.if_then_else(valid >= C, st, ST)
                        T.barrier_wait(free[st], (i // ST + 1) % 2)
                        T.tma_copy(k[t : t + C, i_k, 0:DK], k_shared[st, :, :], barrier=full[land])
                        T.tma_copy(q[t : t + C, i_k, 0:DK], q_shared[st, :, :], barrier=full[land])
                        T.tma_copy(do[t : t + C, i_h, v_start : v_start + BV], do_shared[st, :, :], barrier=full[land])
                        T.tma_copy(a[slot + n - 1 - i, i_h, 0:C, 0:C], a_shared[st, :, :], barrier=full[land])
                        T.barrier_arrive(full[land])
                        if valid < C:
                            # Rows past the end belong to the next sequence or to nobody, and may be NaN.
                            T.barrier_wait(full[ST], 0)
                            for r in T.serial(C - valid):
                                for c in T.Parallel(DK):
                                    k_shared[st, valid + r, c] = 0
                                    q_shared[st, valid + r, c] = 0
                                for c in T.Parallel(BV):
                                    do_shared[st, valid + r, c] = 0
                            T.fence_proxy_async()
                            T.barrier_arrive(full[st])
                elif thread < scores_threads + 64:  # factors
                    log_d[0] = 0.0
                    for i in T.serial(n):
                        st = i % ST
                        G_last[0] = gates[slot + n - 1 - i, i_h, 0, C - 1]
                        for j in T.unroll(2):
                            G[j] = gates[slot + n - 1 - i, i_h, 0, lane + 32 * j]
                            log_r[j] = gates[slot + n - 1 - i, i_h, 1, lane + 32 * j]
                        T.barrier_wait(free[st], (i // ST + 1) % 2)
                        leaves[0] = T.if_then_else(log_d[0] + G_last[0] < -frame, 1.0, 0.0)
                        for j in T.unroll(2):
                            x = lane + 32 * j
                            factors_shared[st, WRITE, x] = T.exp2(log_d[0] + G_last[0] - G[j])
                            factors_shared[st, READ, x] = T.exp2(
                                T.if_then_else(leaves[0] != 0, G[j], G[j] - G_last[0] - log_d[0])
                            )
                            factors_shared[st, VALUE, x] = T.exp2(-log_r[j])
                            factors_shared[st, GATE, x] = G[j]
                        if lane == 0:
                            factors_shared[st, SCALARS, SPECIAL] = leaves[0]
                            factors_shared[st, SCALARS, DECAY] = T.exp2(log_d[0] + G_last[0])
                            if v_start == 0:
                                frames[slot + n - 1 - i, i_h, 1] = T.exp2(log_d[0])
                        log_d[0] = T.if_then_else(leaves[0] != 0, 0.0, log_d[0] + G_last[0])
                        T.barrier_arrive(full[st])
                elif thread < scores_threads + 96:  # stores of dS'
                    for i in T.serial(n):
                        T.barrier_wait(s_full[i % 2], (i // 2) % 2)
                        T.fence_proxy_async()  # here and not by those who wrote: it would hold up the chain
                        if i % 2 == 0:
                            T.tma_copy(s0_shared, dstates[slot + n - 1 - i, i_h, v_start : v_start + BV, 0:DK])
                        else:
                            T.tma_copy(s1_shared, dstates[slot + n - 1 - i, i_h, v_start : v_start + BV, 0:DK])
                        T.tma_store_wait(0)
                        T.barrier_arrive(s_free[i % 2])
                else:  # stores of dV, and padding
                    for i in T.serial(n):
                        t = start + (n - 1 - i) * C
                        valid = length - (n - 1 - i) * C
                        T.barrier_wait(w_full[0], i % 2)
                        T.fence_proxy_async()
                        if valid >= C:
                            T.tma_copy(w_shared, dv[t : t + C, i_h, v_start : v_start + BV])
                            T.tma_store_wait(0)
                        else:
                            for r in T.serial(valid):
                                for c in T.Parallel(BV):
                                    dv[t + r, i_h, v_start + c] = w_shared[r, c]
                        T.barrier_arrive(w_free[0])
                    if i_n == N - 1:
                        for r in T.serial(num_tokens - start - length):
                            for c in T.Parallel(BV):
                                dv[start + length + r, i_h, v_start + c] = 0

    return backward_adjoint
