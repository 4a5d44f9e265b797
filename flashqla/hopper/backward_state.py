"""The roles of `backward_chains` for the chain of the state: its value at the start of each chunk, and U.

Definition
    The chunk form (eq. 3.3, 3.4, 3.6) with keys K = k, U scaled by r (eq. 8.1 says why r enters so):
        W = V / r - exp(G) K S,   U = A W,   S' = exp(G_C) S + K^T diag(exp(G_C - G)) U.
    The registers hold S / c. c' = exp(G_C) c costs nothing; where it would leave 2^-frame, S is scaled, and c' = 1.

Warpgroups, and what they wait for
    chain (BV / 64)  keeps S^T, 64 rows each, in registers as the A operand of every wgmma: K S, A W, K^T U. Waits:
                     `full` (tiles), `s_free`, `w_free` (the tiles it leaves behind have been stored).
    producers        one warp each: TMA loads and the zeroes past the end of a sequence (`free`), gate factors (`free`),
                     TMA stores of S (`s_full`) and of U (`w_full`).
"""

from types import SimpleNamespace

import tilelang.language as T

from .pieces import CHUNK_SIZE, arrive, fetch_stage, load_stage, wgmma

# rows of the factors of a chunk
VALUE, READ, KEEP, SCALARS = range(4)
# 1 / r   c exp(G)   what U is multiplied with before it joins S
SPECIAL, DECAY = range(2)  # of the scalars: 0 or 1; what S is multiplied with in a special chunk


def roles(DK: int, BV: int, ST: int, dtype: str, frame: float) -> SimpleNamespace:
    """Macros by the name of the role. Their walk has n chunks, and stores nothing of the first `warm`.

    Args:
        DK, BV: K, and the value columns of a CTA.
        ST: stages of tiles in shared memory.
        dtype: of the tiles.
        frame: log2 range of c.
    """
    C, f32 = CHUNK_SIZE, "float32"

    @T.macro
    def chain(
        n, lane, k_shared, v_shared, a_shared, s0_shared, s1_shared, u_shared, factors_shared, S,
        S_operand, U, W, V, rounded, full, free, s_full, s_free, u_full, u_free,
    ):  # fmt: skip
        """U holds K S, then U."""
        value = T.alloc_fragment((C,), f32)
        read = T.alloc_fragment((C,), f32)
        keep = T.alloc_fragment((C,), f32)
        special = T.alloc_local((1,), f32)
        decay = T.alloc_local((1,), f32)
        for i in T.serial(n):
            st = i % ST
            T.barrier_wait(full[st], (i // ST) % 2)
            load_stage(st, v_shared, V)
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
                rounded[c, r] = U[r, c]
            T.copy(rounded, u_shared)
            arrive(u_full, 0, lane)
            T.wait_wgmma(0)
            arrive(free, st, lane)

    @T.macro
    def zero_rows(first, tile):
        for r in T.serial(C - first):
            for c in T.Parallel(BV):
                tile[first + r, c] = 0

    @T.macro
    def loads(
        n, start, length, slot, i_k, i_h, v_start, k, v, a, k_shared, v_shared, a_shared, full,
        free,
    ):  # fmt: skip
        for i in T.serial(n):
            st = i % ST
            t = start + i * C
            valid = length - i * C
            land = T.if_then_else(valid >= C, st, ST)
            T.barrier_wait(free[st], (i // ST + 1) % 2)
            T.tma_copy(k[t : t + C, i_k, 0:DK], k_shared[st, :, :], barrier=full[land])
            T.tma_copy(a[slot + i, i_h, 0:C, 0:C], a_shared[st, :, :], barrier=full[land])
            fetch_stage(st, v[t : t + C, i_h, v_start : v_start + BV], v_shared, full, land)
            T.barrier_arrive(full[land])
            if valid < C:
                # Rows past the end belong to the next sequence or to nobody, and may be NaN.
                T.barrier_wait(full[ST], 0)
                for r in T.serial(C - valid):
                    for c in T.Parallel(DK):
                        k_shared[st, valid + r, c] = 0
                if st == 0:
                    zero_rows(valid, v_shared[0])
                elif st == 1:
                    zero_rows(valid, v_shared[1])
                else:
                    zero_rows(valid, v_shared[2])
                T.fence_proxy_async()
                T.barrier_arrive(full[st])

    @T.macro
    def factors(n, warm, start, length, slot, i_h, v_start, lane, gates, frames, chunks, factors_shared, full, free):
        """Also what `backward_chunk` has to know of each chunk."""
        G = T.alloc_local((2,), f32)
        log_r = T.alloc_local((2,), f32)
        G_last = T.alloc_local((1,), f32)
        log_c = T.alloc_local((1,), f32)
        leaves = T.alloc_local((1,), f32)
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
                factors_shared[st, KEEP, x] = T.exp2(T.if_then_else(leaves[0] != 0, G_last[0] - G[j], -log_c[0] - G[j]))
            if lane == 0:
                factors_shared[st, SCALARS, SPECIAL] = leaves[0]
                factors_shared[st, SCALARS, DECAY] = T.exp2(log_c[0] + G_last[0])
                if v_start == 0 and i >= warm:
                    frames[slot + i, i_h, 0] = T.exp2(log_c[0])
                    if i_h == 0:
                        chunks[slot + i, 0] = start + i * C
                        chunks[slot + i, 1] = T.min(length - i * C, C)
            log_c[0] = T.if_then_else(leaves[0] != 0, 0.0, log_c[0] + G_last[0])
            T.barrier_arrive(full[st])

    @T.macro
    def no_chunks(i_n, end, first, lane, N, slots, chunks):
        """Nothing is there from slot `first`, behind the last chunk of sequence i_n, to the first of the next."""
        next_slot = T.alloc_var("int32")
        next_slot = T.min(i_n + 1, end)
        next_slot = next_slot + T.truncdiv(end - next_slot, C)
        if i_n == N - 1:
            next_slot = slots
        for i in T.serial(T.truncdiv(next_slot - first + 31, 32)):
            if first + i * 32 + lane < next_slot:
                chunks[first + i * 32 + lane, 0] = 0
                chunks[first + i * 32 + lane, 1] = 0

    @T.macro
    def store_states(n, warm, slot, i_h, v_start, states, s0_shared, s1_shared, s_full, s_free):
        for i in T.serial(n):
            T.barrier_wait(s_full[i % 2], (i // 2) % 2)
            if i >= warm:
                T.fence_proxy_async()  # here and not by those who wrote: it would hold up the chain
                if i % 2 == 0:
                    T.tma_copy(s0_shared, states[slot + i, i_h, v_start : v_start + BV, 0:DK])
                else:
                    T.tma_copy(s1_shared, states[slot + i, i_h, v_start : v_start + BV, 0:DK])
                T.tma_store_wait(0)
            T.barrier_arrive(s_free[i % 2])

    @T.macro
    def store_values(n, warm, slot, i_h, v_start, values, u_shared, u_full, u_free):
        for i in T.serial(n):
            T.barrier_wait(u_full[0], i % 2)
            if i >= warm:
                T.fence_proxy_async()
                T.tma_copy(u_shared, values[slot + i, i_h, 0:C, v_start : v_start + BV])
                T.tma_store_wait(0)
            T.barrier_arrive(u_free[0])

    return SimpleNamespace(
        chain=chain,
        loads=loads,
        factors=factors,
        no_chunks=no_chunks,
        store_states=store_states,
        store_values=store_values,
    )
