"""The roles of `backward_chains` for the chain of the state's gradient, from the last chunk to the first, and dV.

Definition
    The adjoint chain (eq. 6.1, 6.2, 6.4) with keys K = k, dW scaled by 1 / r as U is by r (eq. 8.1 says why), and
    E = scale r^q the factor of the query rows:
        P = Tril(E exp(G_i - G_j) Q K^T),   dU = P^T dO + diag(exp(G_C - G)) K dS',   dW = A^T dU,   dV = dW / r,
        dS = exp(G_C) dS' + (E exp(G) Q)^T dO - K^T (exp(G) dW).
    The registers hold dS' / d. d' = exp(G_C) d costs nothing; where it would leave 2^-frame, dS itself is scaled and
    d' = 1.

Warpgroups, and what they wait for
    chain (BV / 64)  keeps dS^T, 64 rows each, in registers as the A operand; per chunk K dS', P^T dO, A^T dU, Q^T dO,
                     K^T dW. Waits: `full` (tiles), `p_full`, `s_free`, `w_free` (the tiles left behind are stored).
    scores           one chunk ahead: P, the query norms with l2norm, and Q scaled in place by its rows' factors.
                     Waits: `full`, `free`.
    producers        one warp each: TMA loads and the zeroes past the end of a sequence (`free`), gate factors (`free`),
                     TMA stores of dS' (`s_full`) and of dV (`w_full`).
"""

from types import SimpleNamespace

import tilelang.language as T

from .pieces import CHUNK_SIZE, EPSILON, arrive, fetch_stage, wgmma

# rows of the factors of a chunk
WRITE, READ, VALUE, QUERY, GATE, SCALARS = range(6)
# d exp(G_C - G)   exp(G) / d'   1 / r   E   G
SPECIAL, DECAY = range(2)  # of the scalars: 0 or 1; what dS is multiplied with in a special chunk


def roles(DK: int, BV: int, ST: int, dtype: str, frame: float) -> SimpleNamespace:
    """Macros by the name of the role. Their walk has n chunks, and stores nothing of the first `warm`.

    Args:
        DK, BV: K, and the value columns of a CTA.
        ST: stages of tiles in shared memory.
        dtype: of the tiles.
        frame: log2 range of d.
    """
    C, f32 = CHUNK_SIZE, "float32"

    @T.macro
    def output_products(do_shared, p_shared, q_shared, i, PdO, S):
        wgmma(do_shared, p_shared[i % 2, :, :], PdO, transpose_A=True, clear_accum=True)
        wgmma(do_shared, q_shared[i % ST, :, :], S, transpose_A=True)

    @T.macro
    def chain(
        n, i_n, i_h, v_start, lane, has_dinitial, dinitial, q_shared, k_shared, do_shared,
        a_shared, p_shared, s0_shared, s1_shared, w_shared, factors_shared, S, S_operand, U, PdO, W, rounded, full,
        free, p_full, s_full, s_free, w_full, w_free,
    ):  # fmt: skip
        """U holds K dS', then dW."""
        row = T.alloc_fragment((C,), f32)
        special = T.alloc_local((1,), f32)
        decay = T.alloc_local((1,), f32)
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
            if st == 0:
                output_products(do_shared[0], p_shared, q_shared, i, PdO, S)
            elif st == 1:
                output_products(do_shared[1], p_shared, q_shared, i, PdO, S)
            else:
                output_products(do_shared[2], p_shared, q_shared, i, PdO, S)
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
                rounded[c, r] = U[r, c] * factors_shared[st, VALUE, c]
            T.copy(rounded, w_shared)
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

    @T.macro
    def scores(
        n, thread, lane, scale, l2norm, q_shared, k_shared, p_shared, factors_shared, P, P_rounded, full, free, p_full
    ):
        gate_row = T.alloc_fragment((C,), f32)
        query_row = T.alloc_fragment((C,), f32)
        query = T.alloc_local((8,), dtype)
        queries = T.alloc_local((16,), dtype)
        square = T.alloc_local((1,), f32)
        factor = T.alloc_local((1,), f32)
        i_row = thread // 2
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

    @T.macro
    def zero_rows(first, tile):
        for r in T.serial(C - first):
            for c in T.Parallel(BV):
                tile[first + r, c] = 0

    @T.macro
    def loads(
        n, start, length, slot, i_k, i_h, v_start, q, k, do, a, q_shared, k_shared, do_shared,
        a_shared, full, free,
    ):  # fmt: skip
        for i in T.serial(n):
            st = i % ST
            t = start + (n - 1 - i) * C
            valid = length - (n - 1 - i) * C
            land = T.if_then_else(valid >= C, st, ST)
            T.barrier_wait(free[st], (i // ST + 1) % 2)
            T.tma_copy(k[t : t + C, i_k, 0:DK], k_shared[st, :, :], barrier=full[land])
            T.tma_copy(q[t : t + C, i_k, 0:DK], q_shared[st, :, :], barrier=full[land])
            fetch_stage(st, do[t : t + C, i_h, v_start : v_start + BV], do_shared, full, land)
            T.tma_copy(a[slot + n - 1 - i, i_h, 0:C, 0:C], a_shared[st, :, :], barrier=full[land])
            T.barrier_arrive(full[land])
            if valid < C:
                # Rows past the end belong to the next sequence or to nobody, and may be NaN.
                T.barrier_wait(full[ST], 0)
                for r in T.serial(C - valid):
                    for c in T.Parallel(DK):
                        k_shared[st, valid + r, c] = 0
                        q_shared[st, valid + r, c] = 0
                if st == 0:
                    zero_rows(valid, do_shared[0])
                elif st == 1:
                    zero_rows(valid, do_shared[1])
                else:
                    zero_rows(valid, do_shared[2])
                T.fence_proxy_async()
                T.barrier_arrive(full[st])

    @T.macro
    def factors(n, warm, slot, i_h, v_start, lane, gates, frames, factors_shared, full, free):
        G = T.alloc_local((2,), f32)
        log_r = T.alloc_local((2,), f32)
        G_last = T.alloc_local((1,), f32)
        log_d = T.alloc_local((1,), f32)
        leaves = T.alloc_local((1,), f32)
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
                factors_shared[st, READ, x] = T.exp2(T.if_then_else(leaves[0] != 0, G[j], G[j] - G_last[0] - log_d[0]))
                factors_shared[st, VALUE, x] = T.exp2(-log_r[j])
                factors_shared[st, GATE, x] = G[j]
            if lane == 0:
                factors_shared[st, SCALARS, SPECIAL] = leaves[0]
                factors_shared[st, SCALARS, DECAY] = T.exp2(log_d[0] + G_last[0])
                if v_start == 0 and i >= warm:
                    frames[slot + n - 1 - i, i_h, 1] = T.exp2(log_d[0])
            log_d[0] = T.if_then_else(leaves[0] != 0, 0.0, log_d[0] + G_last[0])
            T.barrier_arrive(full[st])

    @T.macro
    def store_states(n, warm, slot, i_h, v_start, dstates, s0_shared, s1_shared, s_full, s_free):
        for i in T.serial(n):
            T.barrier_wait(s_full[i % 2], (i // 2) % 2)
            if i >= warm:
                T.fence_proxy_async()  # here and not by those who wrote: it would hold up the chain
                if i % 2 == 0:
                    T.tma_copy(s0_shared, dstates[slot + n - 1 - i, i_h, v_start : v_start + BV, 0:DK])
                else:
                    T.tma_copy(s1_shared, dstates[slot + n - 1 - i, i_h, v_start : v_start + BV, 0:DK])
                T.tma_store_wait(0)
            T.barrier_arrive(s_free[i % 2])

    @T.macro
    def store_values(n, warm, start, length, i_h, v_start, dv, w_shared, w_full, w_free):
        for i in T.serial(n):
            t = start + (n - 1 - i) * C
            valid = length - (n - 1 - i) * C
            T.barrier_wait(w_full[0], i % 2)
            if i >= warm:
                T.fence_proxy_async()
                if valid >= C:
                    T.tma_copy(w_shared, dv[t : t + C, i_h, v_start : v_start + BV])
                    T.tma_store_wait(0)
                else:
                    for r in T.serial(valid):
                        for c in T.Parallel(BV):
                            dv[t + r, i_h, v_start + c] = w_shared[r, c]
            T.barrier_arrive(w_free[0])

    return SimpleNamespace(
        chain=chain,
        scores=scores,
        loads=loads,
        factors=factors,
        store_states=store_states,
        store_values=store_values,
    )
