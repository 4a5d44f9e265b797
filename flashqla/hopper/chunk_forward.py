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
    SPLITS = DV // BV
    CHAINS = BV // ROWS  # chain warpgroups
    THREADS = 128 * (CHAINS + 2)
    chain_regs, output_regs, producer_regs = registers or ((168, 152, 24) if CHAINS == 2 else (216, 208, 40))
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
            q_s0 = T.alloc_shared((C, DK), dtype)
            q_s1 = T.alloc_shared((C, DK), dtype)
            k_s = T.alloc_shared((ST, C, DK), dtype)
            v_s0 = T.alloc_shared((C, BV), dtype)
            v_s1 = T.alloc_shared((C, BV), dtype)
            a_s = T.alloc_shared((ST, C, C), dtype)
            gx_s = T.alloc_shared((ST, 6, C), f32, scope="shared")
            s_s = T.alloc_shared((BV, DK), dtype)
            u_s = T.alloc_shared((BV, C), dtype)
            o_s = T.alloc_shared((C, BV), dtype)

            S = T.alloc_fragment((BV, DK), f32)
            Sb = T.alloc_fragment((BV, DK), dtype)
            U = T.alloc_fragment((BV, C), f32)
            W = T.alloc_fragment((BV, C), dtype)
            Vt = T.alloc_fragment((C, BV), dtype)
            Ub = T.alloc_fragment((BV, C), dtype)
            Ud = T.alloc_fragment((BV, C), dtype)
            gC = T.alloc_local((1,), f32)
            Q = T.alloc_fragment((C, DK), dtype)
            P = T.alloc_fragment((C, C), f32)
            Pb = T.alloc_fragment((C, C), dtype)
            O = T.alloc_fragment((C, BV), f32)

            full = T.alloc_barrier(arrive_count=[64] * ST + [32])
            free = T.alloc_barrier(arrive_count=[128 * (CHAINS + 1)] * ST)
            q_full = T.alloc_barrier(arrive_count=[32] * 2)
            q_free = T.alloc_barrier(arrive_count=[128] * 2)
            v_full = T.alloc_barrier(arrive_count=[32] * 3)
            v_free = T.alloc_barrier(arrive_count=[128 * CHAINS] * 2)
            s_full = T.alloc_barrier(arrive_count=[128 * CHAINS])
            s_free = T.alloc_barrier(arrive_count=[128])
            u_full = T.alloc_barrier(arrive_count=[128 * CHAINS])
            u_free = T.alloc_barrier(arrive_count=[128])
            o_full = T.alloc_barrier(arrive_count=[128])
            o_free = T.alloc_barrier(arrive_count=[32])

            T.annotate_layout(
                {
                    Vt: transposed(BV, C),
                    q_s0: make_full_bank_swizzled_layout(q_s0),
                    q_s1: make_full_bank_swizzled_layout(q_s1),
                    v_s0: make_full_bank_swizzled_layout(v_s0),
                    v_s1: make_full_bank_swizzled_layout(v_s1),
                    o_s: make_full_bank_swizzled_layout(o_s),
                }
            )

            tx = T.get_thread_binding()
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
                for i in T.serial(n):
                    st = i % ST
                    T.copy(S, Sb)
                    T.barrier_wait(full[st], (i // ST) % 2)
                    T.wgmma_gemm(Sb, k_s[st, :, :], U, transpose_B=True, clear_accum=True, policy=FULL_ROW)
                    T.barrier_wait(s_free[0], (i + 1) % 2)
                    T.copy(Sb, s_s)
                    T.fence_proxy_async()
                    T.barrier_arrive(s_full[0])
                    gC[0] = gx_s[st, 0, C - 1]
                    T.wait_wgmma(0)
                    T.barrier_wait(v_full[i % 2], (i // 2) % 2)
                    if i % 2 == 0:
                        T.copy(v_s0, Vt)
                    else:
                        T.copy(v_s1, Vt)
                    T.barrier_arrive(v_free[i % 2])
                    for r, c in T.Parallel(BV, C):
                        W[r, c] = Vt[c, r] - gx_s[st, 1, c] * U[r, c]
                    T.wgmma_gemm(W, a_s[st, :, :], U, transpose_B=True, clear_accum=True, policy=FULL_ROW)
                    for r, c in T.Parallel(BV, DK):
                        S[r, c] *= gC[0]
                    T.wait_wgmma(0)
                    for r, c in T.Parallel(BV, C):
                        Ud[r, c] = U[r, c] * gx_s[st, 2, c]
                    T.wgmma_gemm(Ud, k_s[st, :, :], S, policy=FULL_ROW)
                    for r, c in T.Parallel(BV, C):
                        Ub[r, c] = U[r, c]
                    T.barrier_wait(u_free[0], (i + 1) % 2)
                    T.copy(Ub, u_s)
                    T.fence_proxy_async()
                    T.barrier_arrive(u_full[0])
                    T.wait_wgmma(0)
                    T.barrier_arrive(free[st])
                if has_final != 0:
                    for r, c in T.Parallel(BV, DK):
                        final[i_n, i_h, c, v0 + r] = S[r, c]
            elif tx < 128 * (CHAINS + 1):
                T.set_max_nreg(output_regs, 1)
                for i in T.serial(n):
                    st = i % ST
                    T.barrier_wait(q_full[i % 2], (i // 2) % 2)
                    if i % 2 == 0:
                        T.copy(q_s0, Q)
                    else:
                        T.copy(q_s1, Q)
                    T.barrier_arrive(q_free[i % 2])
                    T.barrier_wait(full[st], (i // ST) % 2)
                    T.wgmma_gemm(Q, k_s[st, :, :], P, transpose_B=True, clear_accum=True, policy=FULL_ROW)
                    T.barrier_wait(s_full[0], i % 2)
                    T.wgmma_gemm(Q, s_s, O, transpose_B=True, clear_accum=True, policy=FULL_ROW)
                    T.wait_wgmma(1)
                    for x, y in T.Parallel(C, C):
                        P[x, y] = T.if_then_else(x >= y, P[x, y] * T.exp2(gx_s[st, 4, x] - gx_s[st, 5, y]), 0.0)
                    T.copy(P, Pb)
                    T.wait_wgmma(0)
                    T.barrier_arrive(s_free[0])
                    for x, y in T.Parallel(C, BV):
                        O[x, y] *= gx_s[st, 3, x]
                    T.barrier_arrive(free[st])
                    T.barrier_wait(u_full[0], i % 2)
                    T.wgmma_gemm(Pb, u_s, O, transpose_B=True, policy=FULL_ROW)
                    T.wait_wgmma(0)
                    T.barrier_arrive(u_free[0])
                    T.barrier_wait(o_free[0], (i + 1) % 2)
                    T.copy(O, o_s)
                    T.fence_proxy_async()
                    T.barrier_arrive(o_full[0])
            else:
                T.set_max_nreg(producer_regs, 0)
                base = 128 * (CHAINS + 1)
                lane = tx % 32
                if tx < base + 32:
                    for i in T.serial(n):
                        st = i % ST
                        valid = length - i * C
                        T.barrier_wait(free[st], (i // ST + 1) % 2)
                        land = T.if_then_else(valid >= C, st, ST)
                        T.tma_copy(k[start + i * C : start + i * C + C, i_k, 0:DK], k_s[st, :, :], barrier=full[land])
                        T.tma_copy(a[slot0 + i, i_h, 0:C, 0:C], a_s[st, :, :], barrier=full[land])
                        T.barrier_arrive(full[land])
                        if valid < C:
                            T.barrier_wait(full[ST], 0)
                            for r in T.serial(C - valid):
                                for c in T.Parallel(DK):
                                    k_s[st, valid + r, c] = 0
                            T.fence_proxy_async()
                            T.barrier_arrive(full[st])
                elif tx < base + 64:
                    for i in T.serial(n):
                        st = i % ST
                        T.barrier_wait(free[st], (i // ST + 1) % 2)
                        for x in T.Parallel(C):
                            gx_s[st, 0, x] = T.exp2(gates[slot0 + i, i_h, 0, x])
                        for x in T.Parallel(C):
                            gx_s[st, 1, x] = T.exp2(gates[slot0 + i, i_h, 0, x] + gates[slot0 + i, i_h, 1, x])
                        for x in T.Parallel(C):
                            gx_s[st, 2, x] = T.exp2(gates[slot0 + i, i_h, 0, C - 1] - gates[slot0 + i, i_h, 0, x] + gates[slot0 + i, i_h, 1, x])
                        for x in T.Parallel(C):
                            gx_s[st, 3, x] = T.exp2(gates[slot0 + i, i_h, 0, x]) * scale
                        for x in T.Parallel(C):
                            gx_s[st, 4, x] = gates[slot0 + i, i_h, 0, x] + T.log2(scale)
                        for x in T.Parallel(C):
                            gx_s[st, 5, x] = gates[slot0 + i, i_h, 0, x] - gates[slot0 + i, i_h, 1, x]
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
                else:
                    for i in T.serial(n):
                        t0 = start + i * C
                        valid = length - i * C
                        land = T.if_then_else(valid >= C, i % 2, 2)
                        T.barrier_wait(v_free[i % 2], (i // 2 + 1) % 2)
                        if i % 2 == 0:
                            T.tma_copy(v[t0 : t0 + C, i_h, v0 : v0 + BV], v_s0, barrier=v_full[land])
                        else:
                            T.tma_copy(v[t0 : t0 + C, i_h, v0 : v0 + BV], v_s1, barrier=v_full[land])
                        T.barrier_arrive(v_full[land])
                        if valid < C:
                            T.barrier_wait(v_full[2], 0)
                            for r in T.serial(C - valid):
                                for c in T.Parallel(BV):
                                    if i % 2 == 0:
                                        v_s0[valid + r, c] = 0
                                    else:
                                        v_s1[valid + r, c] = 0
                            T.barrier_arrive(v_full[i % 2])
                        T.barrier_wait(q_free[i % 2], (i // 2 + 1) % 2)
                        if i % 2 == 0:
                            T.tma_copy(q[t0 : t0 + C, i_k, 0:DK], q_s0, barrier=q_full[i % 2])
                        else:
                            T.tma_copy(q[t0 : t0 + C, i_k, 0:DK], q_s1, barrier=q_full[i % 2])
                        T.barrier_arrive(q_full[i % 2])

    return chunk_forward
