"""Backward, first of three kernels: the states at the chunk starts and the corrected values, computed once more.

Inputs
    k            [T, H, K]             bf16 or fp16, K in {64, 128}; token and head strides of 16-byte multiples, last 1
    v            [T, HV, V]            dtype of k, V in {64, 128}; strides likewise
    a            [slots, HV, 64, 64]   dtype of k: the inverse of `gated_inverse` with its flag `GATED`
    gates        [slots, HV, 2, 64]    fp32: log2 decay summed over the chunk (G), log2 key scale (r)
    cu_seqlens   [N + 1]               int32, on the device
    initial      [N, HV, K, V]         fp32, any strides; read if `has_initial` (int32, a run-time switch)
Outputs
    states       [slots, HV, V, K]     dtype of k: S^T / c at the start of each chunk
    values       [slots, HV, 64, V]    dtype of k: U, the corrected values; rows past the end of a sequence are 0
    frames       [slots, HV, 2]        fp32: c of the chunk, at index 0
    chunks       [slots, 2]            int32: first token and number of tokens; 0 tokens where a slot holds no chunk
Definition
    The chunk form (eq. 3.3, 3.4, 3.6) with keys K = k, U scaled by r (eq. 8.1 says why r enters so):
        W = V / r - exp(G) K S,   U = A W,   S' = exp(G_C) S + K^T diag(exp(G_C - G)) U.
    The registers hold S / c. c' = exp(G_C) c costs nothing; where it would leave 2^-FRAME, S is
    scaled, and c' = 1.

Grid: N * HV * V / BV CTAs, value blocks fastest.
Warpgroups, and what they wait for
    chain (BV / 64)  keeps S^T, 64 rows each, in registers as the A operand of every wgmma: K S, A W, K^T U. Waits:
                     `full` (tiles), `s_free`, `u_free` (the tiles it leaves behind have been stored).
    producers        one warp each: TMA loads and the zeroes past the end of a sequence (`free`), gate factors (`free`),
                     TMA stores of S (`s_full`) and of U (`u_full`).
Shared memory, K = V = BV = 128: three stages of K, V (16 KB each) and A (8 KB), two S of 32 KB, U 16 KB, factors 3 KB:
203 KB.
Registers (setmaxnreg): chain 232, producers 24.
"""

import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout

from .chunk_forward import CHUNK_SIZE, LANES, PASS_CONFIGS, ROWS, transposed

__all__ = ["PASS_CONFIGS", "build"]
STAGES = 3
FRAME = 44.0  # log2 range of c and of d: `backward_chunk` multiplies S / c and dS' / d, and sums 16384 products

# rows of the factors of a chunk
VALUE, READ, KEEP, SCALARS = range(4)
# 1 / r   c exp(G)   what U is multiplied with before it joins S
SPECIAL, DECAY, FRAME_OUT = range(3)  # of the scalars: 0 or 1; what S is multiplied with in a special chunk; c'


def build(dtype: str = "bfloat16", head_dim_k: int = 128, head_dim_v: int = 128, block_dv: int = 128):
    """The kernel as a TileLang PrimFunc.

    Args:
        dtype: of k, v, a, states and values, "bfloat16" or "float16".
        head_dim_k, head_dim_v: K and V, 64 or 128.
        block_dv: value columns of a CTA, 64 or 128, at most V.
    """
    C, DK, DV, BV, ST = CHUNK_SIZE, head_dim_k, head_dim_v, block_dv, STAGES
    blocks, chains = DV // BV, BV // ROWS
    chain_threads = 128 * chains
    frame = FRAME if dtype == "bfloat16" else -1.0  # fp16 has no exponents to spare: a frame a chunk
    f32, i32, i64 = "float32", "int32", "int64"
    num_tokens, H, HV, N, N_plus_1, slots = T.dynamic("num_tokens, H, HV, N, N_plus_1, slots")
    k_token, k_head, v_token, v_head = T.dynamic("k_token, k_head, v_token, v_head", i64)
    initial_n, initial_h, initial_k, initial_v = T.dynamic("initial_n, initial_h, initial_k, initial_v", i64)

    def wgmma(A, B, accumulator, **options):
        return T.wgmma_gemm(A, B, accumulator, policy=T.GemmWarpPolicy.FullRow, **options)

    @T.macro
    def arrive(barrier, index, lane):
        """One arrival a warp: 32 would queue at the same word."""
        T.sync_warp()
        if lane < LANES:
            T.barrier_arrive(barrier[index])

    @T.prim_func
    def backward_state(
        k: T.StridedTensor((num_tokens, H, DK), (k_token, k_head, 1), dtype),
        v: T.StridedTensor((num_tokens, HV, DV), (v_token, v_head, 1), dtype),
        a: T.Tensor((slots, HV, C, C), dtype),
        gates: T.Tensor((slots, HV, 2, C), f32),
        cu_seqlens: T.Tensor((N_plus_1,), i32),
        initial: T.StridedTensor((N, HV, DK, DV), (initial_n, initial_h, initial_k, initial_v), f32),
        states: T.Tensor((slots, HV, DV, DK), dtype),
        values: T.Tensor((slots, HV, C, DV), dtype),
        frames: T.Tensor((slots, HV, 2), f32),
        chunks: T.Tensor((slots, 2), i32),
        has_initial: T.int32,
    ):
        with T.Kernel(N * HV * blocks, threads=128 * (chains + 1)) as block:
            k_shared = T.alloc_shared((ST, C, DK), dtype)
            v0_shared = T.alloc_shared((C, BV), dtype)
            v1_shared = T.alloc_shared((C, BV), dtype)
            v2_shared = T.alloc_shared((C, BV), dtype)
            a_shared = T.alloc_shared((ST, C, C), dtype)
            s0_shared = T.alloc_shared((BV, DK), dtype)
            s1_shared = T.alloc_shared((BV, DK), dtype)
            u_shared = T.alloc_shared((C, BV), dtype)
            factors_shared = T.alloc_shared((ST, 4, C), f32, scope="shared")

            S = T.alloc_fragment((BV, DK), f32)  # S^T; all of the chain is transposed
            S_operand = T.alloc_fragment((BV, DK), dtype)
            U = T.alloc_fragment((BV, C), f32)  # K S, then U
            W = T.alloc_fragment((BV, C), dtype)
            V = T.alloc_fragment((C, BV), dtype)
            U_rounded = T.alloc_fragment((C, BV), dtype)
            value = T.alloc_fragment((C,), f32)
            read = T.alloc_fragment((C,), f32)
            keep = T.alloc_fragment((C,), f32)
            special = T.alloc_local((1,), f32)
            decay = T.alloc_local((1,), f32)
            G = T.alloc_local((2,), f32)
            log_r = T.alloc_local((2,), f32)
            G_last = T.alloc_local((1,), f32)
            log_c = T.alloc_local((1,), f32)
            leaves = T.alloc_local((1,), f32)

            # `full[ST]` is where the last, ragged chunk of a sequence lands before its end is zeroed.
            full = T.alloc_barrier(arrive_count=[64] * ST + [32])
            free = T.alloc_barrier(arrive_count=[4 * chains * LANES] * ST)
            s_full = T.alloc_barrier(arrive_count=[4 * chains * LANES] * 2)
            s_free = T.alloc_barrier(arrive_count=[32] * 2)
            u_full = T.alloc_barrier(arrive_count=[4 * chains * LANES])
            u_free = T.alloc_barrier(arrive_count=[32])
            T.annotate_layout(
                {V: transposed(BV, C), U_rounded: transposed(BV, C)}
                | {b: make_full_bank_swizzled_layout(b) for b in (v0_shared, v1_shared, v2_shared, u_shared)}
            )

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
            next_slot = T.alloc_var(i32)
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
                T.set_max_nreg(232, 1)
                if has_initial != 0:
                    for r, c in T.Parallel(BV, DK):
                        S[r, c] = initial[i_n, i_h, c, v_start + r]
                else:
                    T.clear(S)
                for i in T.serial(n):
                    st = i % ST
                    T.barrier_wait(full[st], (i // ST) % 2)
                    # A buffer a stage: TileLang 0.1.15 drops the offset of a slice when it copies by ldmatrix.
                    if st == 0:
                        T.copy(v0_shared, V)
                    elif st == 1:
                        T.copy(v1_shared, V)
                    else:
                        T.copy(v2_shared, V)
                    T.copy(S, S_operand)
                    wgmma(S_operand, k_shared[st, :, :], U, transpose_B=True, clear_accum=True)  # (K S)^T
                    T.copy(factors_shared[st, VALUE, :], value)
                    T.copy(factors_shared[st, READ, :], read)
                    T.copy(factors_shared[st, KEEP, :], keep)
                    T.barrier_wait(s_free[i % 2], (i // 2 + 1) % 2)
                    if i % 2 == 0:
                        T.copy(S_operand, s0_shared)
                    else:
                        T.copy(S_operand, s1_shared)
                    arrive(s_full, i % 2, lane)
                    T.wait_wgmma(0)
                    for r, c in T.Parallel(BV, C):
                        W[r, c] = V[c, r] * value[c] - read[c] * U[r, c]
                    special[0] = factors_shared[st, SCALARS, SPECIAL]
                    if special[0] != 0:
                        decay[0] = factors_shared[st, SCALARS, DECAY]
                        for r, c in T.Parallel(BV, DK):
                            S[r, c] *= decay[0]
                    wgmma(W, a_shared[st, :, :], U, transpose_B=True, clear_accum=True)
                    T.barrier_wait(u_free[0], (i + 1) % 2)
                    T.wait_wgmma(0)
                    for r, c in T.Parallel(BV, C):
                        W[r, c] = U[r, c] * keep[c]
                    wgmma(W, k_shared[st, :, :], S)
                    for c, r in T.Parallel(C, BV):
                        U_rounded[c, r] = U[r, c]
                    T.copy(U_rounded, u_shared)
                    arrive(u_full, 0, lane)
                    T.wait_wgmma(0)
                    arrive(free, st, lane)

            else:
                T.set_max_nreg(24, 0)
                if thread < chain_threads + 32:  # loads
                    for i in T.serial(n):
                        st = i % ST
                        t = start + i * C
                        valid = length - i * C
                        land = T.if_then_else(valid >= C, st, ST)
                        T.barrier_wait(free[st], (i // ST + 1) % 2)
                        T.tma_copy(k[t : t + C, i_k, 0:DK], k_shared[st, :, :], barrier=full[land])
                        T.tma_copy(a[slot + i, i_h, 0:C, 0:C], a_shared[st, :, :], barrier=full[land])
                        if st == 0:
                            T.tma_copy(v[t : t + C, i_h, v_start : v_start + BV], v0_shared, barrier=full[land])
                        elif st == 1:
                            T.tma_copy(v[t : t + C, i_h, v_start : v_start + BV], v1_shared, barrier=full[land])
                        else:
                            T.tma_copy(v[t : t + C, i_h, v_start : v_start + BV], v2_shared, barrier=full[land])
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
                elif thread < chain_threads + 64:  # factors, and what `backward_chunk` has to know of each chunk
                    log_c[0] = 0.0
                    for i in T.serial(n):
                        st = i % ST
                        G_last[0] = gates[slot + i, i_h, 0, C - 1]
                        for j in T.unroll(2):
                            G[j] = gates[slot + i, i_h, 0, lane + 32 * j]
                            log_r[j] = gates[slot + i, i_h, 1, lane + 32 * j]
                        T.barrier_wait(free[st], (i // ST + 1) % 2)
                        leaves[0] = T.if_then_else(log_c[0] + G_last[0] < -frame, 1.0, 0.0)
                        for j in T.unroll(2):
                            x = lane + 32 * j
                            factors_shared[st, VALUE, x] = T.exp2(-log_r[j])
                            factors_shared[st, READ, x] = T.exp2(log_c[0] + G[j])
                            factors_shared[st, KEEP, x] = T.exp2(
                                T.if_then_else(leaves[0] != 0, G_last[0] - G[j], -log_c[0] - G[j])
                            )
                        if lane == 0:
                            factors_shared[st, SCALARS, SPECIAL] = leaves[0]
                            factors_shared[st, SCALARS, DECAY] = T.exp2(log_c[0] + G_last[0])
                            if v_start == 0:
                                frames[slot + i, i_h, 0] = T.exp2(log_c[0])
                                if i_h == 0:
                                    chunks[slot + i, 0] = start + i * C
                                    chunks[slot + i, 1] = T.min(length - i * C, C)
                        log_c[0] = T.if_then_else(leaves[0] != 0, 0.0, log_c[0] + G_last[0])
                        T.barrier_arrive(full[st])
                    if i_h == 0:
                        if v_start == 0:
                            # Up to the first slot of the next sequence, or the last of all, nothing is there.
                            next_slot = T.min(i_n + 1, start + length)
                            next_slot = next_slot + T.truncdiv(start + length - next_slot, C)
                            if i_n == N - 1:
                                next_slot = slots
                            for i in T.serial(T.truncdiv(next_slot - slot - n + 31, 32)):
                                if slot + n + i * 32 + lane < next_slot:
                                    chunks[slot + n + i * 32 + lane, 0] = 0
                                    chunks[slot + n + i * 32 + lane, 1] = 0
                elif thread < chain_threads + 96:  # stores of S
                    for i in T.serial(n):
                        T.barrier_wait(s_full[i % 2], (i // 2) % 2)
                        T.fence_proxy_async()  # here and not by those who wrote: it would hold up the chain
                        if i % 2 == 0:
                            T.tma_copy(s0_shared, states[slot + i, i_h, v_start : v_start + BV, 0:DK])
                        else:
                            T.tma_copy(s1_shared, states[slot + i, i_h, v_start : v_start + BV, 0:DK])
                        T.tma_store_wait(0)
                        T.barrier_arrive(s_free[i % 2])
                else:  # stores of U
                    for i in T.serial(n):
                        T.barrier_wait(u_full[0], i % 2)
                        T.fence_proxy_async()
                        T.tma_copy(u_shared, values[slot + i, i_h, 0:C, v_start : v_start + BV])
                        T.tma_store_wait(0)
                        T.barrier_arrive(u_free[0])
            T.pdl_sync()  # runs beside `backward_adjoint`; what follows may rely on both

    return backward_state
