"""Numbers a row in `backward_chunk`: their table, the factors at the beginning, dg and dbeta at the end.

The macros are what three of its producer warps do. One prepares the factors of a value head (`head_factors`) and then
turns the row sums of the head before into gradients (`finish_head`), two rows a lane; two prepare the factors of an
item (`item_rows`), and one of these clears the gradients of the padding (`clear_padding`).
Definition, with G, r, c, d, n as in `backward_chunk` and x_i = <k_i, the part of n_i from dS'>
    dG_i = <q_i, dQ_i> + <k_i, dK_i> - 2 <k_i, n_i>,   dg = reverse cumsum of dG, plus <S', dS'>   (eq. 6.15),
    <S', dS'> = exp(G_C) <S, dS'> + sum of all x,   dbeta_i = <dW_i, U_i> / (beta_i r_i)^2   (section 6.5).
    Every dG_i has -x_i: in dg_i the sum of all x, less that of the rows from i on, leaves the x of the rows before i.
    They are summed as such: where the last rows' writes are undecayed, the difference would be one of large numbers.
"""

import tilelang.language as T

from .gated_inverse import BETA_SIGMOID, L2NORM, NEG_EIGVAL, SMALLEST_BETA
from .pieces import CHUNK_SIZE, EPSILON

# Rows of numbers that the warpgroups share, of 128: one a row of [Q; K]. Per item:
E, NORM, QK, DIAGONAL = range(4)
# E; 1   (r^q)^2 with l2norm, else 0   with l2norm <q, k>   the diagonal of D, summed over the value heads
# Per value head, double-buffered, what it needs and what comes back:
GATE, STATE, KEY, WRITE, DOTS, SCORES, DOT_WRITE, DOT_STATE, TRACE, DECAY = range(10)
# G; G   c exp(G); -c r exp(G)   1; -r   d exp(G_C - G)   <q, dQ>; <k, dK - n>   <dO, U>; <dV, U>   <k, n>
# <k, the part of n from dS'>   summands of <S, dS'>   [0]: c d exp(G_C)
LN2 = 0.6931471805599453


@T.macro
def item_rows(b, row, scale, flags, pairs_shared, item_shared):
    """The factors of one chunk and key head, a row a thread, into the rows `b`; eq. 2.4 for the query."""
    DK, dtype = pairs_shared.shape[2], pairs_shared.dtype
    left = T.alloc_local((8,), dtype)
    right = T.alloc_local((8,), dtype)
    square = T.alloc_local((1,), "float32")
    dot = T.alloc_local((1,), "float32")
    item_shared[b, E, row] = scale
    item_shared[b, E, CHUNK_SIZE + row] = 1.0
    item_shared[b, NORM, row] = 0.0
    item_shared[b, QK, row] = 0.0
    if T.bitwise_and(flags, L2NORM) != 0:
        square[0] = 0.0
        dot[0] = 0.0
        for j in T.serial(DK // 8):
            for e in T.vectorized(8):
                left[e] = pairs_shared[2 * b, row, j * 8 + e]
            for e in T.vectorized(8):
                right[e] = pairs_shared[2 * b + 1, row, j * 8 + e]
            for e in T.unroll(8):
                square[0] += T.cast(left[e], "float32") * T.cast(left[e], "float32")
                dot[0] += T.cast(left[e], "float32") * T.cast(right[e], "float32")
        item_shared[b, E, row] = scale * T.rsqrt(square[0] + EPSILON)
        item_shared[b, NORM, row] = 1.0 / (square[0] + EPSILON)
        item_shared[b, QK, row] = dot[0]


@T.macro
def head_factors(p, slot, i_h, lane, gates, frames, rows_shared):
    """The factors of one chunk and value head, into the rows `p`."""
    G = T.alloc_local((2,), "float32")
    log_r = T.alloc_local((2,), "float32")
    G_last = T.alloc_local((1,), "float32")
    frame = T.alloc_local((2,), "float32")  # c, d
    G_last[0] = gates[slot, i_h, 0, CHUNK_SIZE - 1]
    for j in T.unroll(2):
        G[j] = gates[slot, i_h, 0, lane + 32 * j]
        log_r[j] = gates[slot, i_h, 1, lane + 32 * j]
    frame[0] = frames[slot, i_h, 0]
    frame[1] = frames[slot, i_h, 1]
    for j in T.unroll(2):
        r = lane + 32 * j
        rows_shared[p, GATE, r] = G[j]
        rows_shared[p, GATE, CHUNK_SIZE + r] = G[j]
        rows_shared[p, STATE, r] = T.exp2(G[j]) * frame[0]
        rows_shared[p, STATE, CHUNK_SIZE + r] = -T.exp2(G[j] + log_r[j]) * frame[0]
        rows_shared[p, KEY, r] = 1.0
        rows_shared[p, KEY, CHUNK_SIZE + r] = -T.exp2(log_r[j])
        rows_shared[p, WRITE, r] = T.exp2(G_last[0] - G[j]) * frame[1]
    if lane == 0:
        rows_shared[p, DECAY, 0] = T.exp2(G_last[0]) * frame[0] * frame[1]


@T.macro
def finish_head(x, i_h, where, lane, flags, beta, rows_shared, rows_full, dg, dbeta):
    """dg and dbeta of one chunk and value head, the x-th of the CTA, from its row sums. Waits: `rows_full`."""
    betas = T.alloc_local((2,), "float32")
    d_gate = T.alloc_local((2,), "float32")  # dG + x, then sums of it
    carried = T.alloc_local((2,), "float32")  # x, then sums of it
    total = T.alloc_local((1,), "float32")
    p = x % 2
    for j in T.unroll(2):
        betas[j] = 0.5
        if lane + 32 * j < where[1]:
            betas[j] = T.cast(beta[where[0] + lane + 32 * j, i_h], "float32")
            if T.bitwise_and(flags, BETA_SIGMOID) != 0:
                betas[j] = 1.0 / (1.0 + T.exp2(-betas[j] / LN2))
                if T.bitwise_and(flags, NEG_EIGVAL) != 0:
                    betas[j] *= 2.0
    T.barrier_wait(rows_full[p], (x // 2) % 2)
    total[0] = 0.0
    for j in T.unroll(2):
        r = lane + 32 * j
        d_gate[j] = 0.0
        carried[j] = 0.0
        if r < where[1]:
            carried[j] = rows_shared[p, DOT_STATE, r]
            d_gate[j] = rows_shared[p, DOTS, r] + rows_shared[p, DOTS, CHUNK_SIZE + r]
            d_gate[j] -= rows_shared[p, DOT_WRITE, r] - carried[j]
        total[0] += rows_shared[p, TRACE, r] * rows_shared[p, DECAY, 0]
    total[0] = T.warp_reduce_sum(total[0])
    # Suffix sums of 64 rows, two a lane; of what rows carry into S' the prefix sums, without the row itself.
    for step in T.unroll(5):
        for j in T.unroll(2):
            up = T.shfl_down(d_gate[j], 1 << step)
            if lane + (1 << step) < 32:
                d_gate[j] += up
            down = T.shfl_up(carried[j], 1 << step)
            if lane >= (1 << step):
                carried[j] += down
    d_gate[0] += T.shfl_sync(d_gate[1], 0)
    first_half = T.shfl_sync(carried[0], 31)
    for j in T.unroll(2):
        before = T.shfl_up(carried[j], 1)
        d_gate[j] += T.Select(lane > 0, before, T.float32(0))
    d_gate[1] += first_half
    for j in T.unroll(2):
        r = lane + 32 * j
        if r < where[1]:
            dg[where[0] + r, i_h] = d_gate[j] + total[0]
            betas[j] = T.max(betas[j], SMALLEST_BETA)
            dbeta[where[0] + r, i_h] = -rows_shared[p, SCORES, CHUNK_SIZE + r] / (
                rows_shared[p, KEY, CHUNK_SIZE + r] * betas[j] * betas[j]
            )


@T.macro
def clear_padding(bx, num_ctas, lane, cu_seqlens, dq, dk, dg, dbeta):
    """Zeros for the tokens past the last sequence; thread block `bx` takes every `num_ctas`th."""
    HV = dg.shape[1]
    token = T.alloc_var("int32")
    token = cu_seqlens[cu_seqlens.shape[0] - 1] + bx
    while token < dq.shape[0]:
        for h in T.serial(dq.shape[1]):
            for c in T.Parallel(dq.shape[2]):
                dq[token, h, c] = 0
                dk[token, h, c] = 0
        for j in T.serial(T.truncdiv(HV + 31, 32)):
            if j * 32 + lane < HV:
                dg[token, j * 32 + lane] = 0
                dbeta[token, j * 32 + lane] = 0
        token += num_ctas
