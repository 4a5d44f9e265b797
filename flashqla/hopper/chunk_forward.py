"""Fused chunk forward of the gated delta rule on SM90: state chain and output of one value head in one CTA."""

import tilelang
import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout

LOG2E = 1.4426950408889634
C = 64  # tokens per chunk
ROWS = 64  # rows of S^T one warpgroup owns: the M of one wgmma

PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
    tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True,
    tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True,
}

# TileLang 0.1.15 counts the accumulator registers of all warpgroups of a gemm in each thread's fence.
from tilelang.cuda.intrinsics.macro.wgmma_macro_generator import TensorCoreIntrinEmitter as _E

_E.wgmma_accum_regs = property(lambda self: self.wgmma_num_inst_m * self.warp_cols * self.local_size_out)


def build(dtype="bfloat16", head_dim_k=128, head_dim_v=128, block_dv=128, stages=3, registers=None):
    """..."""
    DK, DV, BV, ST = head_dim_k, head_dim_v, block_dv, stages
    limit = 60.0 if dtype == "bfloat16" else -1.0
    SPLITS = DV // BV
    CHAINS = BV // ROWS  # chain warpgroups
    THREADS = 128 * (CHAINS + 2)
    chain_regs, output_regs, producer_regs = registers or ((208, 72, 24) if CHAINS == 2 else (232, 128, 40))
    f32, i32 = "float32", "int32"
    FULL_ROW = T.GemmWarpPolicy.FullRow
    tokens, H, HV, N, slots = T.dynamic("tokens, H, HV, N, slots")
    q_st, q_sh, k_st, k_sh, v_st, v_sh = T.dynamic("q_st, q_sh, k_st, k_sh, v_st, v_sh")
    in_n, in_h, in_k, in_v = T.dynamic("in_n, in_h, in_k, in_v")
    out_n, out_h, out_k, out_v = T.dynamic("out_n, out_h, out_k, out_v")
    N1 = T.dynamic("N1")

    def transposed(rows, columns):
        """[column, row] fragment that holds its elements in the same registers as the [row, column] accumulator of a wgmma."""
        return T.Fragment(
            [columns, rows],
            forward_thread_fn=lambda c, r: (r // 16) * 32 + (r % 8) * 4 + (c % 8) // 2,
            forward_index_fn=lambda c, r: (c // 8) * 4 + ((r % 16) // 8) * 2 + c % 2,
        )

    @T.macro
    def arrive(barrier, index, lane):
        T.sync_warp()
        if lane == 0:
            T.barrier_arrive(barrier[index])

    @T.macro
    def load_v(st, V, v0_s, v1_s, v2_s):
        # One buffer a stage: TileLang's ldmatrix copy ignores the offset of a slice.
        if st == 0:
            T.copy(v0_s, V)
        elif st == 1:
            T.copy(v1_s, V)
        else:
            T.copy(v2_s, V)

    @T.macro
    def load(i, V, f, special, v0_s, v1_s, v2_s, gx_s):
        load_v(i % ST, V, v0_s, v1_s, v2_s)
        T.copy(gx_s[i % ST, 0, :], f)
        special[0] = gx_s[i % ST, 5, 0]

    @T.macro
    def begin(i, S, Sb, U, k_s):
        T.copy(S, Sb)
        T.wgmma_gemm(Sb, k_s[i % ST, :, :], U, transpose_B=True, clear_accum=True, policy=FULL_ROW)

    @T.macro
    def middle(i, S, Sb, U, O, W, Ub, V, f, q_s, k_s, a_s, p_s, p_full):
        for r, c in T.Parallel(BV, C):
            W[r, c] = V[c, r] * f[c] - U[r, c]
        T.wgmma_gemm(W, a_s[i % ST, :, :], U, transpose_B=True, clear_accum=True, policy=FULL_ROW)
        T.wgmma_gemm(Sb, q_s[i % ST, :, :], O, transpose_B=True, clear_accum=True, policy=FULL_ROW)
        T.wait_wgmma(1)
        T.copy(U, Ub)
        T.wgmma_gemm(Ub, k_s[i % ST, :, :], S, policy=FULL_ROW)
        T.barrier_wait(p_full[0], i % 2)
        T.wait_wgmma(1)
        T.wgmma_gemm(Ub, p_s, O, transpose_B=True, policy=FULL_ROW)

    @T.macro
    def middle_special(i, S, Sb, U, O, W, Ub, V, f, y, q_s, k_s, a_s, p_s, gx_s, p_full):
        for r, c in T.Parallel(BV, C):
            W[r, c] = V[c, r] * f[c] - gx_s[i % ST, 2, c] * U[r, c]
        y[0] = gx_s[i % ST, 5, 1]
        for r, c in T.Parallel(BV, DK):
            S[r, c] *= y[0]
        T.wgmma_gemm(Sb, q_s[i % ST, :, :], O, transpose_B=True, clear_accum=True, policy=FULL_ROW)
        T.wgmma_gemm(W, a_s[i % ST, :, :], U, transpose_B=True, clear_accum=True, policy=FULL_ROW)
        T.wait_wgmma(0)
        for r, c in T.Parallel(BV, C):
            O[r, c] *= gx_s[i % ST, 2, c]
        T.copy(U, Ub)
        T.barrier_wait(p_full[0], i % 2)
        T.wgmma_gemm(Ub, p_s, O, transpose_B=True, policy=FULL_ROW)
        T.wait_wgmma(0)
        for r, c in T.Parallel(BV, C):
            Ub[r, c] = U[r, c] * gx_s[i % ST, 3, c]
        T.wgmma_gemm(Ub, k_s[i % ST, :, :], S, policy=FULL_ROW)
        T.wait_wgmma(0)

    @T.macro
    def store(i, O, Ot, gx_s, o_s, free, o_full, o_free, lane):
        T.barrier_wait(o_free[0], (i + 1) % 2)
        for c, r in T.Parallel(C, BV):
            Ot[c, r] = O[r, c] * gx_s[i % ST, 1, c]
        T.copy(Ot, o_s)
        T.fence_proxy_async()
        arrive(o_full, 0, lane)
        arrive(free, i % ST, lane)

    @T.prim_func
    def chunk_forward(
        q: T.StridedTensor((tokens, H, DK), (q_st, q_sh, 1), dtype),
        k: T.StridedTensor((tokens, H, DK), (k_st, k_sh, 1), dtype),
        v: T.StridedTensor((tokens, HV, DV), (v_st, v_sh, 1), dtype),
        a: T.Tensor((slots, HV, C, C), dtype),
        gates: T.Tensor((slots, HV, 2, C), f32),
        cu_seqlens: T.Tensor((N1,), i32),
        initial: T.StridedTensor((N, HV, DK, DV), (in_n, in_h, in_k, in_v), f32),
        final: T.StridedTensor((N, HV, DK, DV), (out_n, out_h, out_k, out_v), f32),
        o: T.Tensor((tokens, HV, DV), dtype),
        scale: T.float32,
        has_initial: T.int32,
        has_final: T.int32,
    ):
        with T.Kernel(N * HV * SPLITS, threads=THREADS) as bid:
            q_s = T.alloc_shared((ST, C, DK), dtype)
            k_s = T.alloc_shared((ST, C, DK), dtype)
            v0_s = T.alloc_shared((C, BV), dtype)
            v1_s = T.alloc_shared((C, BV), dtype)
            v2_s = T.alloc_shared((C, BV), dtype)
            a_s = T.alloc_shared((ST, C, C), dtype)
            gx_s = T.alloc_shared((ST, 6, C), f32, scope="shared")
            p_s = T.alloc_shared((C, C), dtype)
            o_s = T.alloc_shared((C, BV), dtype)

            S = T.alloc_fragment((BV, DK), f32)
            Sb = T.alloc_fragment((BV, DK), dtype)
            U = T.alloc_fragment((BV, C), f32)
            W = T.alloc_fragment((BV, C), dtype)
            Vt = T.alloc_fragment((C, BV), dtype)
            Ub = T.alloc_fragment((BV, C), dtype)
            f = T.alloc_fragment((C,), f32)
            Ot = T.alloc_fragment((C, BV), dtype)
            special = T.alloc_local((1,), f32)
            lc = T.alloc_local((1,), f32)
            decays = T.alloc_local((1,), f32)
            fresh = T.alloc_local((1,), f32)
            c0 = T.alloc_local((1,), f32)
            G = T.alloc_local((2,), f32)
            lk = T.alloc_local((2,), f32)
            gC = T.alloc_local((1,), f32)
            P = T.alloc_fragment((C, C), f32)
            Pb = T.alloc_fragment((C, C), dtype)
            O = T.alloc_fragment((BV, C), f32)

            full = T.alloc_barrier(arrive_count=[64] * ST + [32])
            free = T.alloc_barrier(arrive_count=[4 * (CHAINS + 1)] * ST)
            p_full = T.alloc_barrier(arrive_count=[4])
            o_full = T.alloc_barrier(arrive_count=[4 * CHAINS])
            o_free = T.alloc_barrier(arrive_count=[32])

            T.annotate_layout(
                {
                    Vt: transposed(BV, C),
                    Ot: transposed(BV, C),
                    v0_s: make_full_bank_swizzled_layout(v0_s),
                    v1_s: make_full_bank_swizzled_layout(v1_s),
                    v2_s: make_full_bank_swizzled_layout(v2_s),
                    o_s: make_full_bank_swizzled_layout(o_s),
                }
            )

            tx = T.get_thread_binding()
            lane = tx % 32
            i_n = T.alloc_var(i32)
            i_h = T.alloc_var(i32)
            i_k = T.alloc_var(i32)
            v0 = T.alloc_var(i32)
            start = T.alloc_var(i32)
            length = T.alloc_var(i32)
            n = T.alloc_var(i32)
            slot0 = T.alloc_var(i32)
            i_n = T.truncdiv(bid, HV * SPLITS)
            i_h = T.truncdiv(bid - i_n * (HV * SPLITS), SPLITS)
            v0 = (bid - i_n * (HV * SPLITS) - i_h * SPLITS) * BV
            i_k = T.truncdiv(i_h, T.truncdiv(HV, H))
            start = cu_seqlens[i_n]
            length = cu_seqlens[i_n + 1] - start
            n = T.truncdiv(length + (C - 1), C)
            slot0 = T.min(i_n, start)
            slot0 = slot0 + T.truncdiv(start - slot0, C)

            if tx < 128 * CHAINS:
                T.set_max_nreg(chain_regs, 1)
                if has_initial != 0:
                    for r, c in T.Parallel(BV, DK):
                        S[r, c] = initial[i_n, i_h, c, v0 + r]
                else:
                    T.clear(S)
                gC[0] = 1.0
                if n > 0:
                    T.barrier_wait(full[0], 0)
                    load(0, Vt, f, special, v0_s, v1_s, v2_s, gx_s)
                    begin(0, S, Sb, U, k_s)
                    T.wait_wgmma(0)
                    for i in T.serial(n - 1):
                        if special[0] != 0:
                            middle_special(i, S, Sb, U, O, W, Ub, Vt, f, gC, q_s, k_s, a_s, p_s, gx_s, p_full)
                            T.barrier_wait(full[(i + 1) % ST], ((i + 1) // ST) % 2)
                            begin(i + 1, S, Sb, U, k_s)
                        else:
                            middle(i, S, Sb, U, O, W, Ub, Vt, f, q_s, k_s, a_s, p_s, p_full)
                            T.barrier_wait(full[(i + 1) % ST], ((i + 1) // ST) % 2)
                            T.wait_wgmma(1)
                            begin(i + 1, S, Sb, U, k_s)
                            T.wait_wgmma(1)
                        store(i, O, Ot, gx_s, o_s, free, o_full, o_free, lane)
                        load(i + 1, Vt, f, special, v0_s, v1_s, v2_s, gx_s)
                        T.wait_wgmma(0)
                    if special[0] != 0:
                        middle_special(n - 1, S, Sb, U, O, W, Ub, Vt, f, gC, q_s, k_s, a_s, p_s, gx_s, p_full)
                    else:
                        middle(n - 1, S, Sb, U, O, W, Ub, Vt, f, q_s, k_s, a_s, p_s, p_full)
                        T.wait_wgmma(0)
                    gC[0] = gx_s[(n - 1) % ST, 5, 3]
                    store(n - 1, O, Ot, gx_s, o_s, free, o_full, o_free, lane)
                if has_final != 0:
                    for r, c in T.Parallel(BV, DK):
                        final[i_n, i_h, c, v0 + r] = S[r, c] * gC[0]
            elif tx < 128 * (CHAINS + 1):
                T.set_max_nreg(output_regs, 0)
                for i in T.serial(n):
                    st = i % ST
                    T.barrier_wait(full[st], (i // ST) % 2)
                    T.wgmma_gemm(q_s[st, :, :], k_s[st, :, :], P, transpose_B=True, clear_accum=True, policy=FULL_ROW)
                    T.wait_wgmma(0)
                    if gx_s[st, 5, 0] != 0:
                        for x, y in T.Parallel(C, C):
                            P[x, y] *= T.exp2(gx_s[st, 4, x] - gx_s[st, 4, y])
                    for x, y in T.Parallel(C, C):
                        Pb[x, y] = T.Select(x >= y, P[x, y], T.float32(0))
                    if i > 0:
                        T.barrier_wait(free[(i - 1) % ST], ((i - 1) // ST) % 2)
                    T.copy(Pb, p_s)
                    T.fence_proxy_async()
                    arrive(p_full, 0, lane)
                    arrive(free, st, lane)
            else:
                T.set_max_nreg(producer_regs, 0)
                base = 128 * (CHAINS + 1)
                if tx < base + 32:
                    for i in T.serial(n):
                        st = i % ST
                        t0 = start + i * C
                        valid = length - i * C
                        T.barrier_wait(free[st], (i // ST + 1) % 2)
                        land = T.if_then_else(valid >= C, st, ST)
                        T.tma_copy(k[t0 : t0 + C, i_k, 0:DK], k_s[st, :, :], barrier=full[land])
                        T.tma_copy(q[t0 : t0 + C, i_k, 0:DK], q_s[st, :, :], barrier=full[land])
                        T.tma_copy(a[slot0 + i, i_h, 0:C, 0:C], a_s[st, :, :], barrier=full[land])
                        if st == 0:
                            T.tma_copy(v[t0 : t0 + C, i_h, v0 : v0 + BV], v0_s, barrier=full[land])
                        elif st == 1:
                            T.tma_copy(v[t0 : t0 + C, i_h, v0 : v0 + BV], v1_s, barrier=full[land])
                        else:
                            T.tma_copy(v[t0 : t0 + C, i_h, v0 : v0 + BV], v2_s, barrier=full[land])
                        T.barrier_arrive(full[land])
                        if valid < C:
                            T.barrier_wait(full[ST], 0)
                            for r in T.serial(C - valid):
                                for c in T.Parallel(DK):
                                    k_s[st, valid + r, c] = 0
                                for c in T.Parallel(BV):
                                    if st == 0:
                                        v0_s[valid + r, c] = 0
                                    elif st == 1:
                                        v1_s[valid + r, c] = 0
                                    else:
                                        v2_s[valid + r, c] = 0
                            T.fence_proxy_async()
                            T.barrier_arrive(full[st])
                elif tx < base + 64:
                    lc[0] = 0.0
                    for i in T.serial(n):
                        st = i % ST
                        slot = slot0 + i
                        gC[0] = gates[slot, i_h, 0, C - 1]
                        for j in T.unroll(2):
                            G[j] = gates[slot, i_h, 0, lane + 32 * j]
                            lk[j] = gates[slot, i_h, 1, lane + 32 * j]
                        T.barrier_wait(free[st], (i // ST + 1) % 2)
                        # Special chunks leave the gate-free frame: a decay beyond its range, or a new frame.
                        decays[0] = T.if_then_else(gC[0] < -limit, 1.0, 0.0)
                        fresh[0] = T.if_then_else(lc[0] + gC[0] < -limit, 1.0, 0.0)
                        c0[0] = T.exp2(lc[0])
                        if fresh[0] != 0:
                            for j in T.unroll(2):
                                x = lane + 32 * j
                                gx_s[st, 2, x] = T.exp2(G[j] * decays[0]) * c0[0]
                                gx_s[st, 3, x] = T.exp2((gC[0] - G[j]) * decays[0])
                                gx_s[st, 4, x] = G[j] * decays[0]
                            lc[0] = 0.0
                        for j in T.unroll(2):
                            x = lane + 32 * j
                            gx_s[st, 0, x] = T.exp2(-lk[j] - lc[0] - G[j] * (1.0 - decays[0]))
                            gx_s[st, 1, x] = T.exp2(lc[0] + G[j] * (1.0 - decays[0])) * scale
                        lc[0] = lc[0] + gC[0] * (1.0 - decays[0])
                        if lane == 0:
                            gx_s[st, 5, 0] = fresh[0]
                            gx_s[st, 5, 1] = T.exp2(gC[0] * decays[0]) * c0[0]
                            gx_s[st, 5, 3] = T.exp2(lc[0])
                        T.barrier_arrive(full[st])
                elif tx < base + 96:
                    for i in T.serial(n):
                        valid = length - i * C
                        T.barrier_wait(o_full[0], i % 2)
                        if valid >= C:
                            T.tma_copy(o_s, o[start + i * C : start + i * C + C, i_h, v0 : v0 + BV])
                            T.tma_store_wait(0)
                        else:
                            for r in T.serial(valid):
                                for c in T.Parallel(BV):
                                    o[start + i * C + r, i_h, v0 + c] = o_s[r, c]
                        T.barrier_arrive(o_free[0])

    return chunk_forward
