"""Recurrent: the gated delta rule token by token, for decoding. The state of a head is read once and written once.

Inputs
    q, k         [T, H, K]            bf16 or fp16, K in {64, 128}; token and head strides of 16-byte multiples, last 1
    v            [T, HV, V]           dtype of q, V in {64, 128}; strides likewise
    g, beta      [T, HV]              fp32 or bf16, any strides; each comes in the argument of its dtype, the other is
                                      any tensor of that dtype (`G_IS_BF16`, `BETA_IS_BF16`)
    A_log        [HV]                 fp32, read with `USE_GATE` only (else any fp32 tensor)
    dt_bias      [HV]                 fp32, read with `HAS_DT_BIAS` only (likewise)
    cu_seqlens   [N + 1]              int32, read where `tokens` is 0
    indices      [N]                  int32, read with `HAS_INDICES`: slots of the states, negative: skip the sequence
    has_state    [N]                  uint8, read with `HAS_MASK`: 0: the sequence starts from zeros
    initial      [slots, HV, K, V]    fp32; the last dimension is contiguous, other strides of 16-byte multiples;
                                      [slots, HV, V, K] in the V-first variant; read with `HAS_INITIAL`
    scale        fp32;  flags  int32, a sum (see below);  tokens  int32: of every sequence, 0: see cu_seqlens
Outputs
    o            [T, HV, V]           dtype of q; 0 for skipped sequences and past cu_seqlens[-1]
    final        [slots, HV, K, V]    as initial, and may be initial; written with `WRITE_FINAL`, at the slot of the
                                      sequence with `FINAL_AT_SLOT`, else at its number (then 0 if skipped)
Definition, a token (eq. 1.1 to 1.3 and 2.3 to 2.5)
    S^T k and S^T q are taken of the state before the token, so that one pass over it suffices:
    a = exp(g),  u = beta (v - a S^T k),  o = scale (a S^T q + (k . q) u),  S = a S + k u^T.
    With `L2NORM` k and q stand for k / sqrt(k . k + 1e-6) and likewise q.

Grid: N * HV * V / 32 CTAs of four warps, blocks of 32 value columns fastest. All is in registers: a thread has K / 4
elements of S in pieces of 16 bytes, eight threads a full line of 128.
    K first: columns over 8 lanes, rows over the 16 groups of lanes; sums over rows cross the warps by shared memory,
             two buffers, so that a token has one barrier.
    V first: rows of 128 bytes of K over 8 lanes, two value columns a group; sums stay in the group.
The next token is loaded while one is computed. Each element of S is loaded and stored by one thread, in this order, so
`final` may be `initial`.
"""

import tilelang.language as T

from .gated_inverse import BETA_SIGMOID, HAS_DT_BIAS, L2NORM, NEG_EIGVAL, USE_GATE
from .pieces import EPSILON, PASS_CONFIGS, head_of_block

__all__ = ["PASS_CONFIGS", "build"]
BLOCK_DV = 32  # value columns of a CTA
THREADS = 128
LOG2_E = 1.4426950408889634

# bits of `flags`, beside the five of gated_inverse above
G_IS_BF16 = 32
BETA_IS_BF16 = 64
HAS_INITIAL = 128
WRITE_FINAL = 256
HAS_INDICES = 512
FINAL_AT_SLOT = 1024
HAS_MASK = 2048


def ctas_per_sm(dtype: str, head_dim_k: int, state_v_first: bool) -> int:
    """CTAs that share an SM: five, 96 registers a thread, but where those would spill."""
    return 4 if dtype == "float16" and head_dim_k == 128 and not state_v_first else 5


def build(dtype: str = "bfloat16", head_dim_k: int = 128, head_dim_v: int = 128, state_v_first: bool = False):
    """The kernel as a TileLang PrimFunc.

    Args:
        dtype: of q, k, v and o, "bfloat16" or "float16".
        head_dim_k, head_dim_v: K and V, 64 or 128.
        state_v_first: whether states are [slots, HV, V, K].
    """
    DK, DV, BV = head_dim_k, head_dim_v, BLOCK_DV
    blocks = DV // BV
    PIECES = DK // 16  # of four elements of S, in a thread
    COLUMNS = 2 if state_v_first else 4  # value columns of a thread
    KEYS = DK // 8 if state_v_first else DK // 16  # channels of k and q in a thread
    # what is summed over K: S^T k and S^T q for the thread's columns, k.k, q.q, k.q
    SUMS = 2 * COLUMNS + 3
    KK, QQ, KQ = 2 * COLUMNS, 2 * COLUMNS + 1, 2 * COLUMNS + 2
    STEPS = (1, 2, 4) if state_v_first else (8, 16)  # lanes that share columns
    f32, i32, i64 = "float32", "int32", "int64"
    state_rows, state_columns = (DV, DK) if state_v_first else (DK, DV)
    num_tokens, H, HV = T.dynamic("num_tokens, H, HV")
    g_size, g16_size, beta_size, beta16_size = T.dynamic("g_size, g16_size, beta_size, beta16_size")
    g_heads, g16_heads, beta_heads, beta16_heads = T.dynamic("g_heads, g16_heads, beta_heads, beta16_heads")
    a_log_size, dt_bias_size, cu_size, indices_size, mask_size, slots, final_slots = T.dynamic(
        "a_log_size, dt_bias_size, cu_size, indices_size, mask_size, slots, final_slots"
    )
    q_token, q_head, k_token, k_head, v_token, v_head, o_token, o_head = T.dynamic(
        "q_token, q_head, k_token, k_head, v_token, v_head, o_token, o_head", i64
    )
    g_token, g_head, g16_token, g16_head = T.dynamic("g_token, g_head, g16_token, g16_head", i64)
    beta_token, beta_head, beta16_token, beta16_head = T.dynamic(
        "beta_token, beta_head, beta16_token, beta16_head", i64
    )
    initial_n, initial_h, initial_row, final_n, final_h, final_row = T.dynamic(
        "initial_n, initial_h, initial_row, final_n, final_h, final_row", i64
    )

    # Of a thread: its channels of k and q, and its value columns. Functions, since a variable hides from the vectoriser
    # what divides it.
    def key(thread):
        return thread % 8 * 4 if state_v_first else thread // 8 * KEYS

    def column(i_v, thread):
        return i_v * BV + (thread // 8 * 2 if state_v_first else thread % 8 * 4)

    @T.macro
    def load_token(t, i_h, i_k, i_v, thread, q, k, v, g, g16, beta, beta16, flags, q_next, k_next, v_next, gates):
        if state_v_first:
            for c in T.unroll(DK // 32):
                for j in T.vectorized(4):
                    k_next[c * 4 + j] = k[t, i_k, c * 32 + key(thread) + j]
                for j in T.vectorized(4):
                    q_next[c * 4 + j] = q[t, i_k, c * 32 + key(thread) + j]
        else:
            for j in T.vectorized(KEYS):
                k_next[j] = k[t, i_k, key(thread) + j]
            for j in T.vectorized(KEYS):
                q_next[j] = q[t, i_k, key(thread) + j]
        for j in T.vectorized(COLUMNS):
            v_next[j] = v[t, i_h, column(i_v, thread) + j]
        if flags & G_IS_BF16 != 0:
            gates[0] = T.cast(g16[t, i_h], f32)
        else:
            gates[0] = g[t, i_h]
        if flags & BETA_IS_BF16 != 0:
            gates[1] = T.cast(beta16[t, i_h], f32)
        else:
            gates[1] = beta[t, i_h]

    @T.macro
    def activate(gates, decay, strength, flags, rate, bias, e):
        """Eq. 2.3 and 2.5."""
        if flags & USE_GATE != 0:
            gates[0] += bias[0]
            e[0] = T.exp2(-T.abs(gates[0]) * LOG2_E)
            # log(1 + e), also where 1 + e would lose e
            e[0] = T.if_then_else(e[0] < 0.01, e[0] * (1.0 - e[0] * (0.5 - e[0] * (1.0 / 3.0))), T.log(1.0 + e[0]))
            gates[0] = -rate[0] * (T.max(gates[0], 0.0) + e[0])
        decay[0] = T.exp2(gates[0] * LOG2_E)
        strength[0] = gates[1]
        if flags & BETA_SIGMOID != 0:
            strength[0] = 1.0 / (1.0 + T.exp2(-gates[1] * LOG2_E))
            if flags & NEG_EIGVAL != 0:
                strength[0] *= 2.0

    @T.macro
    def products(S, k_now, q_now, sums):
        """The thread's part of all sums over K."""
        for x in T.unroll(SUMS):
            sums[x] = 0.0
        for c in T.unroll(KEYS):
            sums[KK] += k_now[c] * k_now[c]
            sums[QQ] += q_now[c] * q_now[c]
            sums[KQ] += k_now[c] * q_now[c]
        for p in T.unroll(PIECES):
            for j in T.unroll(4):
                if state_v_first:
                    sums[p // (DK // 32)] += S[p * 4 + j] * k_now[p % (DK // 32) * 4 + j]
                    sums[COLUMNS + p // (DK // 32)] += S[p * 4 + j] * q_now[p % (DK // 32) * 4 + j]
                else:
                    sums[j] += S[p * 4 + j] * k_now[p]
                    sums[COLUMNS + j] += S[p * 4 + j] * q_now[p]

    @T.prim_func
    def recurrent(
        q: T.StridedTensor((num_tokens, H, DK), (q_token, q_head, 1), dtype),
        k: T.StridedTensor((num_tokens, H, DK), (k_token, k_head, 1), dtype),
        v: T.StridedTensor((num_tokens, HV, DV), (v_token, v_head, 1), dtype),
        g: T.StridedTensor((g_size, g_heads), (g_token, g_head), f32),
        g16: T.StridedTensor((g16_size, g16_heads), (g16_token, g16_head), "bfloat16"),
        beta: T.StridedTensor((beta_size, beta_heads), (beta_token, beta_head), f32),
        beta16: T.StridedTensor((beta16_size, beta16_heads), (beta16_token, beta16_head), "bfloat16"),
        A_log: T.Tensor((a_log_size,), f32),
        dt_bias: T.Tensor((dt_bias_size,), f32),
        cu_seqlens: T.Tensor((cu_size,), i32),
        indices: T.Tensor((indices_size,), i32),
        has_state: T.Tensor((mask_size,), "uint8"),
        initial: T.StridedTensor((slots, HV, state_rows, state_columns), (initial_n, initial_h, initial_row, 1), f32),
        final: T.StridedTensor((final_slots, HV, state_rows, state_columns), (final_n, final_h, final_row, 1), f32),
        o: T.StridedTensor((num_tokens, HV, DV), (o_token, o_head, 1), dtype),
        scale: T.float32,
        flags: T.int32,
        tokens: T.int32,
        num_sequences: T.int32,
    ):
        with T.Kernel(num_sequences * HV * blocks, threads=THREADS) as block:
            T.annotate_min_blocks_per_sm(ctas_per_sm(dtype, head_dim_k, state_v_first))
            S = T.alloc_local((4 * PIECES,), f32)
            q_next = T.alloc_local((KEYS,), dtype)
            k_next = T.alloc_local((KEYS,), dtype)
            v_next = T.alloc_local((COLUMNS,), dtype)
            gates = T.alloc_local((2,), f32)
            q_now = T.alloc_local((KEYS,), f32)
            k_now = T.alloc_local((KEYS,), f32)
            v_now = T.alloc_local((COLUMNS,), f32)
            o_local = T.alloc_local((COLUMNS,), dtype)
            sums = T.alloc_local((SUMS,), f32)
            decay = T.alloc_local((1,), f32)
            strength = T.alloc_local((1,), f32)
            rate = T.alloc_local((1,), f32)
            bias = T.alloc_local((1,), f32)
            e = T.alloc_local((1,), f32)
            r = T.alloc_local((2,), f32)
            sums_shared = T.alloc_shared((2 * 4 * 8 * 12,), f32, scope="shared")

            # of the strides, which the launcher has checked: what vector loads need
            for stride in (q_token, q_head, k_token, k_head, v_token, v_head, o_token, o_head):
                T.assume(stride % 8 == 0)
            for stride in (initial_n, initial_h, initial_row, final_n, final_h, final_row):
                T.assume(stride % 4 == 0)
            thread = T.get_thread_binding()
            warp = thread // 32
            group = thread % 32 // 8
            lane = thread % 8
            i_n = T.alloc_var(i32)
            i_h = T.alloc_var(i32)
            i_k = T.alloc_var(i32)
            start = T.alloc_var(i32)
            length = T.alloc_var(i32)
            slot = T.alloc_var(i32)
            i_v = T.alloc_var(i32)
            head_of_block(block, H, HV, blocks, 1, i_n, i_h, i_k, i_v)
            slot = i_n
            if flags & HAS_INDICES != 0:
                slot = indices[i_n]
            start = i_n * tokens
            length = tokens
            if tokens == 0:
                start = cu_seqlens[i_n]
                length = cu_seqlens[i_n + 1] - start

            for x in T.unroll(4 * PIECES):
                S[x] = 0.0
            if slot >= 0:
                if flags & HAS_INITIAL != 0:
                    fresh = T.alloc_var("bool", init=False)
                    if flags & HAS_MASK != 0:
                        fresh = has_state[i_n] == 0
                    if not fresh:
                        for p in T.unroll(PIECES):
                            for j in T.vectorized(4):
                                if state_v_first:
                                    S[p * 4 + j] = initial[
                                        slot,
                                        i_h,
                                        column(i_v, thread) + p // (DK // 32),
                                        p % (DK // 32) * 32 + key(thread) + j,
                                    ]
                                else:
                                    S[p * 4 + j] = initial[slot, i_h, key(thread) + p, column(i_v, thread) + j]
                rate[0] = 0.0
                bias[0] = 0.0
                if flags & USE_GATE != 0:
                    rate[0] = T.exp2(A_log[i_h] * LOG2_E)
                if flags & HAS_DT_BIAS != 0:
                    bias[0] = dt_bias[i_h]
                if length > 0:
                    load_token(start, i_h, i_k, i_v, thread, q, k, v, g, g16, beta, beta16, flags, q_next, k_next,
                               v_next, gates)  # fmt: skip
                for t in T.serial(length):
                    activate(gates, decay, strength, flags, rate, bias, e)
                    for c in T.unroll(KEYS):
                        k_now[c] = T.cast(k_next[c], f32)
                        q_now[c] = T.cast(q_next[c], f32)
                    for c in T.unroll(COLUMNS):
                        v_now[c] = T.cast(v_next[c], f32)
                    if t + 1 < length:
                        load_token(start + t + 1, i_h, i_k, i_v, thread, q, k, v, g, g16, beta, beta16, flags, q_next,
                                   k_next, v_next, gates)  # fmt: skip
                    products(S, k_now, q_now, sums)
                    for step in STEPS:
                        for x in T.unroll(SUMS):
                            sums[x] += T.shfl_xor(sums[x], step)
                    if not state_v_first:
                        # Two buffers: who is a token ahead writes to the one that nobody reads.
                        if group == 0:
                            for x in T.unroll(SUMS):
                                sums_shared[((t % 2 * 4 + warp) * 8 + lane) * 12 + x] = sums[x]
                        T.sync_threads()
                        for x in T.unroll(SUMS):
                            sums[x] = sums_shared[((t % 2 * 4) * 8 + lane) * 12 + x]
                        for w in T.unroll(3):
                            for x in T.unroll(SUMS):
                                sums[x] += sums_shared[((t % 2 * 4 + w + 1) * 8 + lane) * 12 + x]
                    r[0] = 1.0
                    r[1] = 1.0
                    if flags & L2NORM != 0:
                        r[0] = T.rsqrt(sums[KK] + EPSILON)
                        r[1] = T.rsqrt(sums[QQ] + EPSILON)
                    for c in T.unroll(COLUMNS):
                        # u, and k's norm with it for the update below
                        v_now[c] = strength[0] * (v_now[c] - decay[0] * r[0] * sums[c]) * r[0]
                        o_local[c] = T.cast(scale * r[1] * (decay[0] * sums[COLUMNS + c] + sums[KQ] * v_now[c]), dtype)
                    for p in T.unroll(PIECES):
                        for j in T.unroll(4):
                            if state_v_first:
                                S[p * 4 + j] = decay[0] * S[p * 4 + j] + (
                                    k_now[p % (DK // 32) * 4 + j] * v_now[p // (DK // 32)]
                                )
                            else:
                                S[p * 4 + j] = decay[0] * S[p * 4 + j] + k_now[p] * v_now[j]
                    if state_v_first:
                        if lane == 0:
                            for j in T.vectorized(COLUMNS):
                                o[start + t, i_h, column(i_v, thread) + j] = o_local[j]
                    else:
                        if thread < 8:
                            for j in T.vectorized(COLUMNS):
                                o[start + t, i_h, column(i_v, thread) + j] = o_local[j]
            else:
                for t in T.serial(length):
                    if thread < BV:
                        o[start + t, i_h, i_v * BV + thread] = 0
            if flags & WRITE_FINAL != 0:
                if flags & FINAL_AT_SLOT == 0:
                    slot = i_n
                if slot >= 0:
                    for p in T.unroll(PIECES):
                        for j in T.vectorized(4):
                            if state_v_first:
                                final[
                                    slot,
                                    i_h,
                                    column(i_v, thread) + p // (DK // 32),
                                    p % (DK // 32) * 32 + key(thread) + j,
                                ] = S[p * 4 + j]
                            else:
                                final[slot, i_h, key(thread) + p, column(i_v, thread) + j] = S[p * 4 + j]
            if i_n == num_sequences - 1:  # padding
                for t in T.serial(num_tokens - start - length):
                    if thread < BV:
                        o[start + length + t, i_h, i_v * BV + thread] = 0

    return recurrent
