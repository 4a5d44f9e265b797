"""Backward, last of three kernels: dQ, dK, dg and dbeta of every chunk from the states that the two chains left.

Inputs
    q, k         [T, H, K]             bf16 or fp16, K in {64, 128}; token and head strides of 16-byte multiples, last 1
    do           [T, HV, V]            dtype of q, V in {64, 128}; strides likewise
    dv           [T, HV, V]            dtype of q, of `backward_chains`
    values       [slots, HV, 64, V]    dtype of q: U, of `backward_chains`
    states       [slots, HV, V, K]     dtype of q: S^T / c at the start of each chunk, of `backward_chains`
    dstates      [slots, HV, V, K]     dtype of q: dS'^T / d at its end, of `backward_chains`
    frames       [slots, HV, 2]        fp32: c, d
    chunks       [slots, 2]            int32: first token, number of tokens (0: nothing to do)
    gates        [slots, HV, 2, 64]    fp32: G, log2 r
    beta         [T, HV]               fp32 or bf16, any strides: as `gated_inverse` takes it
    cu_seqlens   [N + 1]               int32
    scale fp32;  flags int32, those of `gated_inverse`;  num_ctas int32, the grid
Outputs
    dq, dk       [T, H, K]             dtype of q, summed over the value heads of a key head; 0 past cu_seqlens[-1]
    dg, dbeta    [T, HV]               fp32, by the log gate and by beta after their activations; likewise
Definition
    With Gamma_ij = exp(G_i - G_j), E = scale r^q, U and dW = r dV as the chains scale them (eq. 6.9, 6.12, 6.13):
        D = StrictTril(E Gamma dO U^T),   N = -StrictTril(Gamma dW U^T),
        dQ = E exp(G) dO S^T + D K,
        n = D^T Q + exp(G_C - G) U dS'^T + N^T K,   dK = n - exp(G) dW S^T + N K,
        dbeta = <dW, U> / (beta r)^2   (section 6.5),
        dG_i = <q_i, dQ_i> + <k_i, dK_i> - 2 <k_i, n_i>,   dg = reverse cumsum of dG, plus <S', dS'>   (eq. 6.15).
    The diagonal of D takes part in no gate: its share of dQ and dK is added after dG has been formed, so that dG is as
    small as the decay makes it. With l2norm dQ and dK then lose their parts along q and k (eq. 2.4).

Grid: `num_ctas` CTAs walk the items, key heads fastest, then slots. An item is one chunk of one key head; it loops over
its value heads and sums dQ and dK in registers, always in the same order.
Warpgroups, and what they wait for
    rows (2)  dQ, and the part of dK from keys that read, as one product of 128 rows: [dO; dV] U^T, gated to [D; N],
              then [dO; dV] S^T + [D; N] K. Waits: tiles, `item_full`, `factors_full`, `scores_free`; at the end of an
              item `scores_read`, to leave the keys' sum where D and N were.
    write     n = U dS'^T + D^T Q + N^T K, and <S, dS'>. Waits: tiles, `factors_full`, `scores_full`; `sums_full`.
    producers  one warp for TMA loads (`*_free`), one that prepares the factors of a value head and turns the row sums
              of the one before into dg and dbeta (`rows_full`), two that prepare those of an item (`pair_full`) and
              clear the padding: backward_rows.py has what these three do.
Shared memory, K = V = 128: Q, K of two items (64 KB), dO, dV (16 KB each), U of two value heads (32 KB), S, dS' (32 KB
each), [D; N] 16 KB, rows 13 KB: 221 KB.
Registers (setmaxnreg): 160, producers 32.
"""

import tilelang.language as T

from .backward_rows import (
    DIAGONAL,
    DOT_STATE,
    DOT_WRITE,
    DOTS,
    GATE,
    KEY,
    NORM,
    QK,
    SCORES,
    STATE,
    TRACE,
    WRITE,
    E,
    clear_padding,
    finish_head,
    head_factors,
    item_rows,
)
from .gated_inverse import L2NORM
from .pieces import CHUNK_SIZE, LANES, PASS_CONFIGS, arrive, wgmma

__all__ = ["PASS_CONFIGS", "build"]


def build(dtype: str = "bfloat16", head_dim_k: int = 128, head_dim_v: int = 128, beta_dtype: str = "float32"):
    """The kernel as a TileLang PrimFunc.

    Args:
        dtype: of q, k, do, dv, values, states, dstates, dq and dk, "bfloat16" or "float16".
        head_dim_k, head_dim_v: K and V, 64 or 128.
        beta_dtype: of beta, "float32" or "bfloat16".
    """
    C, DK, DV = CHUNK_SIZE, head_dim_k, head_dim_v
    f32, i32, i64 = "float32", "int32", "int64"
    num_tokens, H, HV, N_plus_1, slots = T.dynamic("num_tokens, H, HV, N_plus_1, slots")
    q_token, q_head, k_token, k_head, do_token, do_head, beta_token, beta_head = T.dynamic(
        "q_token, q_head, k_token, k_head, do_token, do_head, beta_token, beta_head", i64
    )

    @T.macro
    def row_dots(X, rows, first, pairs_shared, product, dots):
        """dots_i = <X_i, x_i>, an eighth of the columns at a time for want of registers."""
        T.clear(product)
        for j in T.unroll(8):
            for r, c in T.Parallel(rows, DK // 8):
                product[r, c] += X[r, j * (DK // 8) + c] * T.cast(
                    pairs_shared[first + r // C, r % C, j * (DK // 8) + c], f32
                )
        T.reduce_sum(product, dots, dim=1)

    @T.macro
    def item_of(item, H, chunks, where):
        where[0] = chunks[T.truncdiv(item, H), 0]
        where[1] = chunks[T.truncdiv(item, H), 1]

    @T.prim_func
    def backward_chunk(
        q: T.StridedTensor((num_tokens, H, DK), (q_token, q_head, 1), dtype),
        k: T.StridedTensor((num_tokens, H, DK), (k_token, k_head, 1), dtype),
        do: T.StridedTensor((num_tokens, HV, DV), (do_token, do_head, 1), dtype),
        dv: T.Tensor((num_tokens, HV, DV), dtype),
        values: T.Tensor((slots, HV, C, DV), dtype),
        states: T.Tensor((slots, HV, DV, DK), dtype),
        dstates: T.Tensor((slots, HV, DV, DK), dtype),
        frames: T.Tensor((slots, HV, 2), f32),
        chunks: T.Tensor((slots, 2), i32),
        gates: T.Tensor((slots, HV, 2, C), f32),
        beta: T.StridedTensor((num_tokens, HV), (beta_token, beta_head), beta_dtype),
        cu_seqlens: T.Tensor((N_plus_1,), i32),
        dq: T.Tensor((num_tokens, H, DK), dtype),
        dk: T.Tensor((num_tokens, H, DK), dtype),
        dg: T.Tensor((num_tokens, HV), f32),
        dbeta: T.Tensor((num_tokens, HV), f32),
        scale: T.float32,
        flags: T.int32,
        num_ctas: T.int32,
    ):
        with T.Kernel(num_ctas, threads=512) as block:
            pairs_shared = T.alloc_shared((4, C, DK), dtype)  # Q, K, and Q, K of the next item
            x_shared = T.alloc_shared((2 * C, DV), dtype)  # [dO; dV]
            u_shared = T.alloc_shared((2, C, DV), dtype)
            s_shared = T.alloc_shared((DV, DK), dtype)
            ds_shared = T.alloc_shared((DV, DK), dtype)
            d_shared = T.alloc_shared((2 * C, C), dtype)  # [D; N]
            item_shared = T.alloc_shared((2, 4, 2 * C), f32, scope="shared")
            rows_shared = T.alloc_shared((2, 10, 2 * C), f32, scope="shared")

            X_sum = T.alloc_fragment((2 * C, DK), f32)
            X_grad = T.alloc_fragment((2 * C, DK), f32)
            D = T.alloc_fragment((2 * C, C), f32)
            D_rounded = T.alloc_fragment((2 * C, C), dtype)
            X_product = T.alloc_fragment((2 * C, DK // 8), f32)
            X_dots = T.alloc_fragment((2 * C,), f32)
            X_along = T.alloc_fragment((2 * C,), f32)
            diagonal = T.alloc_fragment((2 * C,), f32)
            factor = T.alloc_fragment((2 * C,), f32)
            gate = T.alloc_fragment((2 * C,), f32)
            W_sum = T.alloc_fragment((C, DK), f32)
            W_grad = T.alloc_fragment((C, DK), f32)
            trace = T.alloc_fragment((C, C), f32)
            W_product = T.alloc_fragment((C, DK // 8), f32)
            W_dots = T.alloc_fragment((C,), f32)
            W_along = T.alloc_fragment((C,), f32)
            where = T.alloc_local((2,), i32)
            ahead = T.alloc_local((2,), i32)

            # `pair_full[2]` is where the last, ragged chunk of a sequence lands before its end is zeroed.
            pair_full = T.alloc_barrier(arrive_count=[32, 32, 32])
            item_full = T.alloc_barrier(arrive_count=[64] * 2)
            pair_free = T.alloc_barrier(arrive_count=[12 * LANES] * 2)
            x_full = T.alloc_barrier(arrive_count=[32])
            x_free = T.alloc_barrier(arrive_count=[8 * LANES])
            u_full = T.alloc_barrier(arrive_count=[32] * 2)
            u_free = T.alloc_barrier(arrive_count=[12 * LANES] * 2)
            s_full = T.alloc_barrier(arrive_count=[32])
            s_free = T.alloc_barrier(arrive_count=[12 * LANES])
            ds_full = T.alloc_barrier(arrive_count=[32])
            ds_free = T.alloc_barrier(arrive_count=[4 * LANES])
            scores_full = T.alloc_barrier(arrive_count=[8 * LANES])
            scores_free = T.alloc_barrier(arrive_count=[4 * LANES])
            scores_read = T.alloc_barrier(arrive_count=[4 * LANES])
            sums_full = T.alloc_barrier(arrive_count=[8 * LANES])
            factors_full = T.alloc_barrier(arrive_count=[32] * 2)
            rows_full = T.alloc_barrier(arrive_count=[12 * LANES] * 2)

            thread = T.get_thread_binding()
            lane = thread % 32
            group = T.alloc_var(i32)
            items = T.alloc_var(i32)
            item = T.alloc_var(i32)
            i_k = T.alloc_var(i32)
            x = T.alloc_var(i32)  # value heads so far, for parities
            y = T.alloc_var(i32)  # items so far
            ragged = T.alloc_var(i32)  # of them
            last = T.alloc_var(i32)
            group = T.truncdiv(HV, H)
            items = slots * H
            item = block
            x = 0
            y = 0
            ragged = 0
            where[0] = 0
            where[1] = 0
            if item < items:
                item_of(item, H, chunks, where)

            if thread < 256:  # rows
                T.set_max_nreg(160, 1)
                while item < items:
                    ahead[0] = 0
                    ahead[1] = 0
                    if item + num_ctas < items:
                        item_of(item + num_ctas, H, chunks, ahead)
                    if where[1] > 0:
                        b = y % 2
                        i_k = item % H
                        T.barrier_wait(pair_full[b], (y // 2) % 2)
                        T.barrier_wait(item_full[b], (y // 2) % 2)
                        T.clear(X_sum)
                        T.clear(X_along)
                        T.clear(diagonal)
                        for _ in T.serial(group):
                            p = x % 2
                            T.barrier_wait(factors_full[p], (x // 2) % 2)
                            T.barrier_wait(x_full[0], x % 2)
                            T.barrier_wait(u_full[p], (x // 2) % 2)
                            if where[1] < C:
                                # Rows past the end belong to the next sequence or to nobody, and may be NaN.
                                for r in T.serial(C - where[1]):
                                    if thread % 128 < DV:
                                        x_shared[thread // 128 * C + where[1] + r, thread % 128] = 0
                                T.fence_proxy_async()
                                T.sync_threads(1, 256)
                            wgmma(x_shared, u_shared[p, :, :], D, transpose_B=True, clear_accum=True)
                            T.copy(item_shared[b, E, :], factor)
                            T.copy(rows_shared[p, GATE, :], gate)
                            for r in T.Parallel(2 * C):
                                factor[r] *= rows_shared[p, KEY, r]
                            T.wait_wgmma(0)
                            arrive(u_free, p, lane)
                            for r, c in T.Parallel(2 * C, C):
                                if r % C == c:
                                    rows_shared[p, SCORES, r] = D[r, c]
                            for r, c in T.Parallel(2 * C, C):
                                D_rounded[r, c] = T.Select(
                                    r % C > c,
                                    D[r, c] * factor[r] * T.exp2(gate[r] - rows_shared[p, GATE, c]),
                                    T.float32(0),
                                )
                            T.barrier_wait(scores_free[0], (x + 1) % 2)
                            T.copy(D_rounded, d_shared)
                            T.fence_proxy_async()
                            arrive(scores_full, 0, lane)  # and __syncwarp: the diagonal is in
                            T.barrier_wait(s_full[0], x % 2)
                            wgmma(x_shared, s_shared, X_grad, clear_accum=True)
                            for r in T.Parallel(2 * C):
                                diagonal[r] += factor[r] * rows_shared[p, SCORES, r]
                                factor[r] = item_shared[b, E, r] * rows_shared[p, STATE, r]
                            T.wait_wgmma(0)
                            arrive(x_free, 0, lane)
                            arrive(s_free, 0, lane)
                            for r, c in T.Parallel(2 * C, DK):
                                X_grad[r, c] *= factor[r]
                            wgmma(D_rounded, pairs_shared[2 * b + 1, :, :], X_grad)
                            T.wait_wgmma(0)
                            row_dots(X_grad, 2 * C, 2 * b, pairs_shared, X_product, X_dots)
                            for r in T.Parallel(2 * C):
                                rows_shared[p, DOTS, r] = X_dots[r]
                                X_along[r] += X_dots[r]
                            for r, c in T.Parallel(2 * C, DK):
                                X_sum[r, c] += X_grad[r, c]
                            arrive(rows_full, p, lane)
                            x += 1
                        for r in T.Parallel(2 * C):
                            if r < C:
                                item_shared[b, DIAGONAL, r] = diagonal[r]
                        # The sum of the keys' rows goes to `write`, through the memory of D and N.
                        T.barrier_wait(scores_read[0], y % 2)
                        for j in T.unroll(DK // C):
                            for r, c in T.Parallel(2 * C, C):
                                if r >= C:
                                    d_shared[r - C + j * C, c] = T.cast(X_sum[r, j * C + c], dtype)
                        arrive(sums_full, 0, lane)  # and the diagonal
                        for r in T.Parallel(2 * C):
                            X_along[r] = item_shared[b, NORM, r] * (X_along[r] + diagonal[r] * item_shared[b, QK, r])
                        for r, c in T.Parallel(2 * C, DK):
                            if r < where[1]:
                                dq[where[0] + r, i_k, c] = (
                                    X_sum[r, c]
                                    + diagonal[r] * T.cast(pairs_shared[2 * b + 1, r, c], f32)
                                    - X_along[r] * T.cast(pairs_shared[2 * b, r, c], f32)
                                )
                        arrive(pair_free, b, lane)
                        y += 1
                    where[0] = ahead[0]
                    where[1] = ahead[1]
                    item += num_ctas

            elif thread < 384:  # write
                T.set_max_nreg(160, 1)
                while item < items:
                    ahead[0] = 0
                    ahead[1] = 0
                    if item + num_ctas < items:
                        item_of(item + num_ctas, H, chunks, ahead)
                    if where[1] > 0:
                        b = y % 2
                        i_k = item % H
                        T.barrier_wait(pair_full[b], (y // 2) % 2)
                        T.clear(W_sum)
                        for h in T.serial(group):
                            p = x % 2
                            T.barrier_wait(factors_full[p], (x // 2) % 2)
                            T.barrier_wait(u_full[p], (x // 2) % 2)
                            T.barrier_wait(ds_full[0], x % 2)
                            T.barrier_wait(s_full[0], x % 2)
                            # <S, dS'> as the trace of S^T dS': fewer instructions than the products alone
                            for j in T.unroll(DV // C):
                                wgmma(
                                    s_shared[j * C : j * C + C, :],
                                    ds_shared[j * C : j * C + C, :],
                                    trace,
                                    transpose_B=True,
                                    clear_accum=j == 0,
                                )
                            T.wait_wgmma(0)
                            arrive(s_free, 0, lane)
                            for r, c in T.Parallel(C, C):
                                if r == c:
                                    rows_shared[p, TRACE, r] = trace[r, c]
                            wgmma(u_shared[p, :, :], ds_shared, W_grad, clear_accum=True)
                            T.copy(rows_shared[p, WRITE, 0:C], W_along)
                            T.wait_wgmma(0)
                            arrive(u_free, p, lane)
                            arrive(ds_free, 0, lane)
                            for r, c in T.Parallel(C, DK):
                                W_grad[r, c] *= W_along[r]
                            row_dots(W_grad, C, 2 * b + 1, pairs_shared, W_product, W_dots)
                            for r in T.Parallel(C):
                                rows_shared[p, DOT_STATE, r] = W_dots[r]
                            T.barrier_wait(scores_full[0], x % 2)
                            wgmma(d_shared[0:C, :], pairs_shared[2 * b, :, :], W_grad, transpose_A=True)
                            wgmma(d_shared[C : 2 * C, :], pairs_shared[2 * b + 1, :, :], W_grad, transpose_A=True)
                            T.wait_wgmma(0)
                            if h < group - 1:
                                arrive(scores_free, 0, lane)
                            else:
                                arrive(scores_read, 0, lane)
                            row_dots(W_grad, C, 2 * b + 1, pairs_shared, W_product, W_dots)
                            for r in T.Parallel(C):
                                rows_shared[p, DOT_WRITE, r] = W_dots[r]
                            for r, c in T.Parallel(C, DK):
                                W_sum[r, c] += W_grad[r, c]
                            if h == group - 1:
                                for r in T.Parallel(C):
                                    # r^2 of the keys with l2norm; all value heads have the same
                                    W_along[r] = T.if_then_else(
                                        T.bitwise_and(flags, L2NORM) != 0,
                                        rows_shared[p, KEY, C + r] * rows_shared[p, KEY, C + r],
                                        T.float32(0),
                                    )
                            arrive(rows_full, p, lane)
                            x += 1
                        T.barrier_wait(sums_full[0], y % 2)
                        for j in T.unroll(DK // C):
                            for r, c in T.Parallel(C, C):
                                W_sum[r, j * C + c] += T.cast(d_shared[j * C + r, c], f32)
                        arrive(scores_free, 0, lane)
                        row_dots(W_sum, C, 2 * b + 1, pairs_shared, W_product, W_dots)
                        for r in T.Parallel(C):
                            W_along[r] *= W_dots[r] + item_shared[b, DIAGONAL, r] * item_shared[b, QK, r]
                        for r, c in T.Parallel(C, DK):
                            W_sum[r, c] += item_shared[b, DIAGONAL, r] * T.cast(
                                pairs_shared[2 * b, r, c], f32
                            ) - W_along[r] * T.cast(pairs_shared[2 * b + 1, r, c], f32)
                        for r, c in T.Parallel(C, DK):
                            if r < where[1]:
                                dk[where[0] + r, i_k, c] = W_sum[r, c]
                        arrive(pair_free, b, lane)
                        y += 1
                    where[0] = ahead[0]
                    where[1] = ahead[1]
                    item += num_ctas

            else:
                T.set_max_nreg(32, 0)
                if thread < 416:  # loads
                    while item < items:
                        item_of(item, H, chunks, where)
                        if where[1] > 0:
                            b = y % 2
                            i_k = item % H
                            T.barrier_wait(pair_free[b], (y // 2 + 1) % 2)
                            land = T.if_then_else(where[1] >= C, b, 2)
                            T.tma_copy(
                                q[where[0] : where[0] + C, i_k, 0:DK],
                                pairs_shared[2 * b, :, :],
                                barrier=pair_full[land],
                            )
                            T.tma_copy(
                                k[where[0] : where[0] + C, i_k, 0:DK],
                                pairs_shared[2 * b + 1, :, :],
                                barrier=pair_full[land],
                            )
                            T.barrier_arrive(pair_full[land])
                            if where[1] < C:
                                # Rows past the end belong to the next sequence or to nobody, and may be NaN.
                                T.barrier_wait(pair_full[2], ragged % 2)
                                ragged += 1
                                for r in T.serial(C - where[1]):
                                    for c in T.Parallel(DK):
                                        pairs_shared[2 * b, where[1] + r, c] = 0
                                        pairs_shared[2 * b + 1, where[1] + r, c] = 0
                                T.fence_proxy_async()
                                T.barrier_arrive(pair_full[b])
                            for h in T.serial(group):
                                i_h = i_k * group + h
                                slot = T.truncdiv(item, H)
                                T.barrier_wait(u_free[x % 2], (x // 2 + 1) % 2)
                                T.tma_copy(values[slot, i_h, 0:C, 0:DV], u_shared[x % 2, :, :], barrier=u_full[x % 2])
                                T.barrier_arrive(u_full[x % 2])
                                T.barrier_wait(ds_free[0], (x + 1) % 2)
                                T.tma_copy(dstates[slot, i_h, 0:DV, 0:DK], ds_shared, barrier=ds_full[0])
                                T.barrier_arrive(ds_full[0])
                                T.barrier_wait(x_free[0], (x + 1) % 2)
                                for j in T.unroll(DV // 64):  # a panel of 64 columns, 128 bytes, at a time
                                    T.tma_copy(
                                        do[where[0] : where[0] + C, i_h, j * 64 : j * 64 + 64],
                                        x_shared[0:C, j * 64 : j * 64 + 64],
                                        barrier=x_full[0],
                                    )
                                    T.tma_copy(
                                        dv[where[0] : where[0] + C, i_h, j * 64 : j * 64 + 64],
                                        x_shared[C : 2 * C, j * 64 : j * 64 + 64],
                                        barrier=x_full[0],
                                    )
                                T.barrier_arrive(x_full[0])
                                T.barrier_wait(s_free[0], (x + 1) % 2)
                                T.tma_copy(states[slot, i_h, 0:DV, 0:DK], s_shared, barrier=s_full[0])
                                T.barrier_arrive(s_full[0])
                                x += 1
                            y += 1
                        item += num_ctas
                elif thread < 448:  # factors of a value head, then dg and dbeta of the one before
                    last = 0 - 1  # head, token and length of the one before; no head yet
                    while item < items:
                        item_of(item, H, chunks, where)
                        if where[1] > 0:
                            i_k = item % H
                            for h in T.serial(group):
                                i_h = i_k * group + h
                                slot = T.truncdiv(item, H)
                                p = x % 2
                                head_factors(p, slot, i_h, lane, gates, frames, rows_shared)
                                T.barrier_arrive(factors_full[p])
                                if x > 0:
                                    finish_head(
                                        x - 1, last, ahead, lane, flags, beta, rows_shared, rows_full, dg, dbeta
                                    )
                                last = i_h
                                ahead[0] = where[0]
                                ahead[1] = where[1]
                                x += 1
                        item += num_ctas
                    if x > 0:
                        finish_head(x - 1, last, ahead, lane, flags, beta, rows_shared, rows_full, dg, dbeta)
                else:  # half of an item's rows each; then the padding
                    while item < items:
                        item_of(item, H, chunks, where)
                        if where[1] > 0:
                            b = y % 2
                            T.barrier_wait(pair_full[b], (y // 2) % 2)
                            item_rows(b, thread - 448, scale, flags, pairs_shared, item_shared)
                            T.barrier_arrive(item_full[b])
                            y += 1
                        item += num_ctas
                    if thread < 480:
                        clear_padding(block, num_ctas, lane, cu_seqlens, dq, dk, dg, dbeta)

    return backward_chunk
