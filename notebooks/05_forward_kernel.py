# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: jupyter,tags,-all
#     formats: ipynb,py:percent
#     notebook_metadata_filter: kernelspec,jupytext,-all
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 05 The forward kernel, level by level
#
# The equations are known (notebooks 02 to 04). This notebook turns them into kernels for Hopper, in six levels. A
# level is a small, *complete* kernel in [TileLang](https://github.com/tile-ai/tilelang) that adds one idea to the
# level before. Each is compiled here for sm_90a, which needs nvcc and no GPU, and its registers, shared memory and
# machine instructions are listed. On a Hopper GPU each is also checked against float64 and timed; elsewhere the same
# arithmetic, with the same roundings, is checked in PyTorch.
#
# | level | idea |
# |---|---|
# | 1 | a matrix product on Tensor Cores: $KK^\top$ of a chunk |
# | 2 | the inverse by substitution, one thread a column |
# | 3 | the whole chunk step, the state in shared memory |
# | 4 | the state in registers, as the operand of its own products |
# | 5 | a producer warp loads ahead: TMA and barriers |
# | 6 | more roles: scores, factors and stores leave the chain |
#
# What a streaming multiprocessor (SM) offers, 132 times on an H200: four schedulers with Tensor Cores, 65,536
# registers, 228 KB of shared memory. Four warps of 32 threads make a *warpgroup*, which issues matrix products
# together (`wgmma`). The tensor memory accelerator (TMA) copies whole tiles when one thread asks. An *mbarrier* in
# shared memory counts arrivals.

# %%
import contextlib
import json
import os
import pathlib
import random
import re
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
warnings.filterwarnings("ignore", message="IProgress")  # of a progress bar that is not used
import matplotlib.pyplot as plt
import tilelang
import tilelang.language as T
import torch

import flashqla
from flashqla import reference, testing
from flashqla.hopper import resources
from flashqla.hopper.compile import TARGET, find_nvcc, in_parallel, select
from flashqla.reference.chunked import cut
from flashqla.reference.layout import Layout
from flashqla.testing import check

plt.style.use("./flashqla.mplstyle")
cfg = testing.notebook_config()
C, D, ROWS = 64, 128, 64  # chunk; K = V; value columns of one warpgroup
BF16, F32 = "bfloat16", "float32"
SCALE, LOG2_E = D**-0.5, 1.4426950408889634

# numbers that bf16 can hold, so that only the computation rounds; the truth in float64
made = testing.inputs(
    tokens=256, heads=1, value_heads=2, head_dim_k=D, head_dim_v=D, dtype=torch.bfloat16, initial_state=False
)
exact = made.to(torch.float64)
truth = reference.chunked(exact.q, exact.k, exact.v, exact.g, exact.beta, output_final_state=True)
chunks = cut(Layout.of(exact.q, None, C), exact.q, exact.k, exact.v, exact.g, exact.beta, None)


@dataclass(frozen=True)
class Level:
    """A kernel to compile: `build` makes the TileLang function, `options` are the compiler passes' switches."""

    name: str
    build: Callable
    options: tuple = ((tilelang.PassConfigKey.TL_ENABLE_FAST_MATH, True),)

    @property
    def module(self):
        return SimpleNamespace(PASS_CONFIGS=dict(self.options))


def rounded(x):
    """What a 16-bit operand keeps of it."""
    return x.bfloat16().float()


# %% [markdown]
# ## Level 1: one product
#
# A kernel runs on a grid of *thread blocks* (CTAs); here one for each chunk and key head, with one warpgroup each. A
# block copies its tile of keys to shared memory, multiplies, and copies the result out. `T.alloc_shared` is memory of
# the block, `T.alloc_fragment` a matrix spread over the registers of its threads. `T.gemm` becomes `wgmma`, which
# takes its second operand (and here both) from shared memory and accumulates in float32 registers.


# %%
def gram():
    """k [T, H, D] -> K K^T of every chunk [T / C, H, C, C] fp32."""
    H, slots = T.dynamic("H, slots")

    @T.prim_func
    def gram(k: T.Tensor((slots * C, H, D), BF16), out: T.Tensor((slots, H, C, C), F32)):
        with T.Kernel(slots, H, threads=128) as (i_c, i_h):
            k_shared = T.alloc_shared((C, D), BF16)
            product = T.alloc_fragment((C, C), F32)
            T.copy(k[i_c * C : i_c * C + C, i_h, 0:D], k_shared)
            T.gemm(k_shared, k_shared, product, transpose_B=True, clear_accum=True)
            T.copy(product, out[i_c, i_h, 0:C, 0:C])

    return gram


level_1 = Level("1 product", gram)
keys = made.k[0, :, 0].view(-1, C, D).float()
_ = check("level 1: float32 sums of bf16 products", keys @ keys.mT, chunks.k @ chunks.k.mT, 1e-6)

# %% [markdown]
# The CUDA that TileLang writes, and the machine code that nvcc makes of it, can be read. `HGMMA` is `wgmma`:
# `64x64x16` multiplies a $64 \times 16$ by a $16 \times 64$ piece, so eight of them make $K = 128$.

# %%
has_nvcc = find_nvcc() is not None


def interesting(text, pattern, width=96, most=14):
    """The lines that match, cut to the page."""
    lines = [line.strip() for line in text.splitlines() if re.search(pattern, line)]
    print("\n".join(line[:width] + (" ..." if len(line) > width else "") for line in lines[:most]))


if has_nvcc:
    source, threads, shared = resources.lower(level_1)
    with tempfile.TemporaryDirectory() as folder:
        resources.run_nvcc(source, pathlib.Path(folder), level_1)
        sass = resources.disassemble(pathlib.Path(folder) / "kernel.cubin")
    print(f"{threads} threads, {shared} bytes of shared memory\n")
    interesting(source, r"__global__|wgmma|__syncthreads")
    print()
    if sass:
        interesting(re.sub(r"(?m)^\s*/\*[0-9a-f]{4,}\*/\s*", "", sass), r"HGMMA|WARPGROUP|BAR\.")
else:
    print("skipped: needs nvcc")


# %% [markdown]
# ## Level 2: the inverse, simply
#
# $KK^\top$ again; then $L = \mathrm{stril}(\mathrm{diag}(\beta) KK^\top)$ and substitution (eq. 5.1). Columns of the
# inverse do not depend on each other, so thread $c$ computes column $c$ in 64 registers; the loops are unrolled,
# because registers have no index. Gate, $\beta$ and rounding come last: the output is the mixing matrix $(\Gamma \circ
# A)\,\mathrm{diag}(\beta)$ of eq. 3.4, and the summed gates in powers of two, as the hardware has `exp2`.
# `T.sync_threads` lets all threads of the block see what others wrote.


# %%
def inverse():
    """k, g, beta -> mixing [T / C, HV, C, C] bf16 (eq. 3.4), gates [T / C, HV, C] fp32: log2 of gamma."""
    H, HV, slots = T.dynamic("H, HV, slots")

    @T.prim_func
    def inverse(
        k: T.Tensor((slots * C, H, D), BF16),
        g: T.Tensor((slots * C, HV), F32),
        beta: T.Tensor((slots * C, HV), F32),
        mixing: T.Tensor((slots, HV, C, C), BF16),
        gates: T.Tensor((slots, HV, C), F32),
    ):
        with T.Kernel(slots, HV, threads=128) as (i_c, i_h):
            k_shared = T.alloc_shared((C, D), BF16)
            lower_shared = T.alloc_shared((C, C), F32)
            G_shared = T.alloc_shared((C,), F32, scope="shared")
            beta_shared = T.alloc_shared((C,), F32, scope="shared")
            mixing_shared = T.alloc_shared((C, C), BF16)
            product = T.alloc_fragment((C, C), F32)
            column = T.alloc_local((C,), F32)
            total = T.alloc_local((1,), F32)
            thread = T.get_thread_binding()
            T.copy(k[i_c * C : i_c * C + C, T.truncdiv(i_h, T.truncdiv(HV, H)), 0:D], k_shared)
            for r in T.Parallel(C):
                G_shared[r] = g[i_c * C + r, i_h] * LOG2_E
            for r in T.Parallel(C):
                beta_shared[r] = beta[i_c * C + r, i_h]
            T.gemm(k_shared, k_shared, product, transpose_B=True, clear_accum=True)
            for r, c in T.Parallel(C, C):
                lower_shared[r, c] = beta_shared[r] * product[r, c]
            T.clear(column)
            if thread == 0:  # a prefix sum of 64 numbers, the lazy way
                total[0] = 0.0
                for r in T.serial(C):
                    total[0] += G_shared[r]
                    G_shared[r] = total[0]
            T.sync_threads()
            if thread < C:
                for r in T.unroll(C):  # eq. 5.1
                    total[0] = T.if_then_else(thread == r, 1.0, 0.0)
                    for j in T.unroll(r):
                        total[0] -= lower_shared[r, j] * column[j]
                    column[r] = total[0]
                for r in T.unroll(C):
                    decay = T.exp2(T.min(G_shared[r] - G_shared[thread], 0.0))
                    mixing_shared[r, thread] = column[r] * decay * beta_shared[thread]
            T.sync_threads()
            T.copy(mixing_shared, mixing[i_c, i_h, 0:C, 0:C])
            T.copy(G_shared, gates[i_c, i_h, 0:C])

    return inverse


level_2 = Level("2 inverse", inverse)


def mixing_like_kernel(chunk):
    """Eq. 5.1 and 3.4 in float32, rounded once."""
    lower = chunks.beta[chunk].float() * (chunks.k[chunk // 2] @ chunks.k[chunk // 2].T).float()
    rows = []
    for r in range(C):
        row = torch.eye(C)[r]
        for j in range(r):
            row = row - lower[r, j] * rows[j]
        rows.append(row)
    return rounded(torch.stack(rows) * chunks.decay[chunk].float() * chunks.beta[chunk].float().T)


mixing = torch.stack([mixing_like_kernel(chunk) for chunk in range(len(chunks.v))])
_ = check("level 2: float32 substitution, rounded once", mixing, chunks.mixing, 3e-3)

# %% [markdown]
# Half of the threads wait, and each step waits for the previous one. The production kernel does notebook 04 instead:
# substitution only in $16 \times 16$ blocks, by one warp for each head, and merges on Tensor Cores.
#
# ## Level 3: the chunk step, state in shared memory
#
# Now the chain, equations 3.3 to 3.6: one block for each value head walks over its chunks. The state stays on the
# chip, in float32 registers between products and as a bf16 copy in shared memory where products need it. Everything is
# written as if there were one thread: copies and products complete before the next line, TileLang inserts the
# synchronisation.


# %%
def state_in_shared(scale=SCALE):
    """q, k, v, mixing, gates -> o [T, HV, D] bf16, final state [HV, D, D] fp32."""
    H, HV, slots = T.dynamic("H, HV, slots")

    @T.prim_func
    def state_in_shared(
        q: T.Tensor((slots * C, H, D), BF16),
        k: T.Tensor((slots * C, H, D), BF16),
        v: T.Tensor((slots * C, HV, D), BF16),
        mixing: T.Tensor((slots, HV, C, C), BF16),
        gates: T.Tensor((slots, HV, C), F32),
        o: T.Tensor((slots * C, HV, D), BF16),
        final: T.Tensor((HV, D, D), F32),
    ):
        with T.Kernel(HV, threads=256) as i_h:
            q_shared = T.alloc_shared((C, D), BF16)
            k_shared = T.alloc_shared((C, D), BF16)
            v_shared = T.alloc_shared((C, D), BF16)
            mixing_shared = T.alloc_shared((C, C), BF16)
            G_shared = T.alloc_shared((C,), F32, scope="shared")
            S_shared = T.alloc_shared((D, D), BF16)
            W_shared = T.alloc_shared((C, D), BF16)
            P_shared = T.alloc_shared((C, C), BF16)
            S = T.alloc_fragment((D, D), F32)
            X = T.alloc_fragment((C, D), F32)
            O = T.alloc_fragment((C, D), F32)
            P = T.alloc_fragment((C, C), F32)
            i_k = T.truncdiv(i_h, T.truncdiv(HV, H))
            T.clear(S)
            for i in T.serial(slots):
                rows = i * C
                T.copy(k[rows : rows + C, i_k, 0:D], k_shared)
                T.copy(q[rows : rows + C, i_k, 0:D], q_shared)
                T.copy(v[rows : rows + C, i_h, 0:D], v_shared)
                T.copy(mixing[i, i_h, 0:C, 0:C], mixing_shared)
                T.copy(gates[i, i_h, 0:C], G_shared)
                T.copy(S, S_shared)
                T.gemm(k_shared, S_shared, X, clear_accum=True)
                for r, c in T.Parallel(C, D):  # eq. 3.3
                    W_shared[r, c] = v_shared[r, c] - T.exp2(G_shared[r]) * X[r, c]
                T.gemm(mixing_shared, W_shared, X, clear_accum=True)  # eq. 3.4
                T.gemm(q_shared, k_shared, P, transpose_B=True, clear_accum=True)
                for r, c in T.Parallel(C, C):
                    P_shared[r, c] = T.if_then_else(
                        r >= c, scale * P[r, c] * T.exp2(T.min(G_shared[r] - G_shared[c], 0.0)), 0.0
                    )
                T.gemm(q_shared, S_shared, O, clear_accum=True)
                for r, c in T.Parallel(C, D):
                    O[r, c] *= scale * T.exp2(G_shared[r])
                T.copy(X, W_shared)
                T.gemm(P_shared, W_shared, O)  # eq. 3.5
                T.copy(O, o[rows : rows + C, i_h, 0:D])
                for r, c in T.Parallel(C, D):
                    W_shared[r, c] = X[r, c] * T.exp2(G_shared[C - 1] - G_shared[r])
                for r, c in T.Parallel(D, D):
                    S[r, c] *= T.exp2(G_shared[C - 1])
                T.gemm(k_shared, W_shared, S, transpose_A=True)  # eq. 3.6
            T.copy(S, final[i_h, 0:D, 0:D])

    return state_in_shared


level_3 = Level("3 state in shared memory", state_in_shared)


def forward_like_kernel(head):
    """Equations 3.3 to 3.6 in float32 with every operand of a product rounded, as levels 3 to 6 do."""
    S, outputs = torch.zeros(D, D), []
    for i in range(head, len(chunks.v), 2):  # chunk-heads of this head
        Q, K, V = chunks.q[i // 2].float(), chunks.k[i // 2].float(), chunks.v[i].float()
        gamma, Gamma, late = chunks.gamma[i].float(), chunks.decay[i].float(), chunks.decay[i, -1, :, None].float()
        S_operand = rounded(S)
        W = rounded(V - gamma * (K @ S_operand))
        U = mixing[i] @ W
        P = rounded(SCALE * Gamma * (Q @ K.T))
        outputs.append(rounded(SCALE * gamma * (Q @ S_operand) + P @ rounded(U)))
        S = gamma[-1] * S + K.T @ rounded(late * U)
    return torch.cat(outputs), S


for head in range(2):
    o, S = forward_like_kernel(head)
    check(f"level 3: output of head {head}", o, truth.output[0, :, head], 1e-2)
    check(f"level 3: state of head {head}", S, truth.final_state[0, head], 1e-2)

# %% [markdown]
# ## Level 4: the state as an operand in registers
#
# Level 3 writes the state to shared memory in every chunk, only so that `wgmma` can read it: its *second* operand must
# lie there. Its *first* operand may be in registers. So transpose everything: $(KS)^\top = S^\top K^\top$, with
# $S^\top$ first. The same for $U^\top = W^\top T^\top$, $O^\top = S^\top Q^\top + U^\top P^\top$ and $S'^\top =
# \gamma_C S^\top + U^\top \mathrm{diag}(\gamma_C/\gamma) K$. The result of each is the first operand of the next.
#
# And it fits without moving anything. Row $r$ and column $c$ of a float32 accumulator lie in the thread given by the
# formula below, and a 16-bit first operand expects them in that very thread:

# %%
r, c = torch.meshgrid(torch.arange(64), torch.arange(64), indexing="ij")
thread = r // 16 * 32 + r % 8 * 4 + c % 8 // 2  # accumulator of wgmma, two neighbours of a row in one thread
# first operand, 64 x 16: four registers a thread, each with two neighbours: rows r and r + 8, columns c and c + 8
operand = r // 16 * 32 + r % 16 % 8 * 4 + c % 16 % 8 // 2
check("level 4: accumulator and operand agree", operand.float(), thread.float(), 1e-9)
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
left.imshow(thread, cmap="tab20b")
left.set(title="Thread of each element of a 64 x 64 accumulator", xlabel="column", ylabel="row (a value column)")
right.imshow(thread[:16, :16], cmap="viridis")
for row in range(16):
    for column in range(16):
        lane = int(thread[row, column])
        right.text(column, row, lane, ha="center", va="center", fontsize=6.5, color="w" if lane < 18 else "k")
right.set(title="The first warp's corner, lanes 0 to 31", xlabel="column", ylabel="row")
for ax in (left, right):
    ax.grid(False)
plt.show()


# %% [markdown]
# One warpgroup owns 64 rows of $S^\top$, that is 64 value columns. Columns of the state never mix, so $V = 128$
# becomes two blocks that know nothing of each other, and 64 heads fill 128 SMs. The price: both compute $P$, and the
# values must be read transposed.


# %%
def state_in_registers(scale=SCALE):
    """As level 3; a block owns ROWS value columns."""
    H, HV, slots = T.dynamic("H, HV, slots")
    full_row = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def state_in_registers(
        q: T.Tensor((slots * C, H, D), BF16),
        k: T.Tensor((slots * C, H, D), BF16),
        v: T.Tensor((slots * C, HV, D), BF16),
        mixing: T.Tensor((slots, HV, C, C), BF16),
        gates: T.Tensor((slots, HV, C), F32),
        o: T.Tensor((slots * C, HV, D), BF16),
        final: T.Tensor((HV, D, D), F32),
    ):
        with T.Kernel(D // ROWS, HV, threads=128) as (i_v, i_h):
            q_shared = T.alloc_shared((C, D), BF16)
            k_shared = T.alloc_shared((C, D), BF16)
            v_shared = T.alloc_shared((C, ROWS), BF16)
            mixing_shared = T.alloc_shared((C, C), BF16)
            G_shared = T.alloc_shared((C,), F32, scope="shared")
            P_shared = T.alloc_shared((C, C), BF16)
            o_shared = T.alloc_shared((C, ROWS), BF16)
            S = T.alloc_fragment((ROWS, D), F32)  # S^T, and so on
            S_operand = T.alloc_fragment((ROWS, D), BF16)
            U = T.alloc_fragment((ROWS, C), F32)
            U_operand = T.alloc_fragment((ROWS, C), BF16)
            O = T.alloc_fragment((ROWS, C), F32)
            P = T.alloc_fragment((C, C), F32)
            i_k = T.truncdiv(i_h, T.truncdiv(HV, H))
            start = i_v * ROWS
            T.clear(S)
            for i in T.serial(slots):
                rows = i * C
                T.copy(k[rows : rows + C, i_k, 0:D], k_shared)
                T.copy(q[rows : rows + C, i_k, 0:D], q_shared)
                T.copy(v[rows : rows + C, i_h, start : start + ROWS], v_shared)
                T.copy(mixing[i, i_h, 0:C, 0:C], mixing_shared)
                T.copy(gates[i, i_h, 0:C], G_shared)
                T.gemm(q_shared, k_shared, P, transpose_B=True, clear_accum=True, policy=full_row)
                for r, c in T.Parallel(C, C):
                    P_shared[r, c] = T.if_then_else(
                        r >= c, scale * P[r, c] * T.exp2(T.min(G_shared[r] - G_shared[c], 0.0)), 0.0
                    )
                T.copy(S, S_operand)  # rounds, in place
                T.gemm(S_operand, k_shared, U, transpose_B=True, clear_accum=True, policy=full_row)
                for r, c in T.Parallel(ROWS, C):
                    U_operand[r, c] = v_shared[c, r] - T.exp2(G_shared[c]) * U[r, c]
                T.gemm(U_operand, mixing_shared, U, transpose_B=True, clear_accum=True, policy=full_row)
                T.gemm(S_operand, q_shared, O, transpose_B=True, clear_accum=True, policy=full_row)
                for r, c in T.Parallel(ROWS, C):
                    O[r, c] *= scale * T.exp2(G_shared[c])
                T.copy(U, U_operand)
                T.gemm(U_operand, P_shared, O, transpose_B=True, policy=full_row)
                for r, c in T.Parallel(ROWS, C):
                    o_shared[c, r] = O[r, c]
                T.copy(o_shared, o[rows : rows + C, i_h, start : start + ROWS])
                for r, c in T.Parallel(ROWS, C):
                    U_operand[r, c] = U[r, c] * T.exp2(G_shared[C - 1] - G_shared[c])
                for r, c in T.Parallel(ROWS, D):
                    S[r, c] *= T.exp2(G_shared[C - 1])
                T.gemm(U_operand, k_shared, S, policy=full_row)
            for r, c in T.Parallel(ROWS, D):
                final[i_h, c, start + r] = S[r, c]

    return state_in_registers


level_4 = Level("4 state in registers", state_in_registers)
V_1, U_1, K_1 = chunks.v[0], chunks.mixing[0] @ chunks.v[0], chunks.k[0]
_ = check("level 4: transposed, in two halves", torch.cat([(U_1.T[:64] @ K_1), (U_1.T[64:] @ K_1)]), (K_1.T @ U_1).T)

# %% [markdown]
# Is it faster? On the H200 where it was timed **no, a little slower** on its own (the end of this notebook times it).
# While tiles are loaded nothing computes, and while it computes nothing is loaded. This level only shortens what the
# next one overlaps.
#
# ## Level 5: a producer warp, TMA and barriers
#
# Give the loading to a warp of its own, which runs ahead by as many chunks as there are *stages* (buffers) of tiles.
# The warpgroup that computes is the *consumer*. They meet at two arrays of mbarriers:
#
# - **`full[stage]`**: "the tiles of this stage are in". Who waits: the consumer, before it touches the stage. Who
#   arrives: the producers; TMA adds the bytes that it still owes, so the barrier opens when the last byte is there.
# - **`free[stage]`**: "everybody has read this stage". Who waits: the producers, before they overwrite it. Who
#   arrives: all 128 consumers, after the last product that reads the stage has *completed*.
#
# An mbarrier opens when its count is reached and counts anew: it has *phases*. A wait names a parity and returns when
# the phase of that parity has completed. Chunk $i$ is the $\lfloor i / \text{stages} \rfloor$-th use of its stage, so
# the consumer waits for the parity of that number. The producer wants the *previous* use to be over, hence the parity
# plus one, which for the first use is "already completed": nobody has to pretend to free the empty stages.
#
# `wgmma_gemm` only starts a product; `wait_wgmma(n)` waits until at most $n$ groups are still running. So $KS$,
# $QK^\top$ and $QS$ are started together. `fence_proxy_async` makes ordinary stores visible to Tensor Cores and TMA,
# which see memory through another path. From here on we place all synchronisation by hand and switch TileLang's off.

# %%
STAGES = 2
OWN_BARRIERS = (
    *Level.__dataclass_fields__["options"].default,
    (tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC, True),
    (tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED, True),
)


def producer_and_consumer(scale=SCALE, stages=STAGES):
    """As level 4; threads 0 to 127 compute, one warp loads tiles, one warp gates."""
    H, HV, slots = T.dynamic("H, HV, slots")
    full_row = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def producer_and_consumer(
        q: T.Tensor((slots * C, H, D), BF16),
        k: T.Tensor((slots * C, H, D), BF16),
        v: T.Tensor((slots * C, HV, D), BF16),
        mixing: T.Tensor((slots, HV, C, C), BF16),
        gates: T.Tensor((slots, HV, C), F32),
        o: T.Tensor((slots * C, HV, D), BF16),
        final: T.Tensor((HV, D, D), F32),
    ):
        with T.Kernel(D // ROWS, HV, threads=256) as (i_v, i_h):
            q_shared = T.alloc_shared((stages, C, D), BF16)
            k_shared = T.alloc_shared((stages, C, D), BF16)
            v_shared = T.alloc_shared((stages, C, ROWS), BF16)
            mixing_shared = T.alloc_shared((stages, C, C), BF16)
            G_shared = T.alloc_shared((stages, C), F32, scope="shared")
            P_shared = T.alloc_shared((C, C), BF16)
            o_shared = T.alloc_shared((C, ROWS), BF16)
            S = T.alloc_fragment((ROWS, D), F32)
            S_operand = T.alloc_fragment((ROWS, D), BF16)
            U = T.alloc_fragment((ROWS, C), F32)
            U_operand = T.alloc_fragment((ROWS, C), BF16)
            O = T.alloc_fragment((ROWS, C), F32)
            P = T.alloc_fragment((C, C), F32)
            full = T.alloc_barrier(arrive_count=[64] * stages)  # two warps
            free = T.alloc_barrier(arrive_count=[128] * stages)  # one warpgroup
            i_k = T.truncdiv(i_h, T.truncdiv(HV, H))
            start = i_v * ROWS
            thread = T.get_thread_binding()
            if thread < 128:  # consumer
                T.clear(S)
                for i in T.serial(slots):
                    st = i % stages
                    T.barrier_wait(full[st], (i // stages) % 2)
                    T.copy(S, S_operand)
                    T.wgmma_gemm(S_operand, k_shared[st, :, :], U, transpose_B=True, clear_accum=True, policy=full_row)
                    T.wgmma_gemm(
                        q_shared[st, :, :], k_shared[st, :, :], P, transpose_B=True, clear_accum=True, policy=full_row
                    )
                    T.wgmma_gemm(S_operand, q_shared[st, :, :], O, transpose_B=True, clear_accum=True, policy=full_row)
                    T.wait_wgmma(2)  # K S is complete, the other two run
                    for r, c in T.Parallel(ROWS, C):
                        U_operand[r, c] = v_shared[st, c, r] - T.exp2(G_shared[st, c]) * U[r, c]
                    T.wait_wgmma(0)
                    T.wgmma_gemm(
                        U_operand, mixing_shared[st, :, :], U, transpose_B=True, clear_accum=True, policy=full_row
                    )
                    for r, c in T.Parallel(C, C):
                        P_shared[r, c] = T.if_then_else(
                            r >= c, scale * P[r, c] * T.exp2(T.min(G_shared[st, r] - G_shared[st, c], 0.0)), 0.0
                        )
                    T.fence_proxy_async()
                    T.sync_threads(1, 128)  # P is complete, and the previous output has been stored
                    T.wait_wgmma(0)
                    for r, c in T.Parallel(ROWS, C):
                        O[r, c] *= scale * T.exp2(G_shared[st, c])
                    T.copy(U, U_operand)
                    T.wgmma_gemm(U_operand, P_shared, O, transpose_B=True, policy=full_row)
                    T.wait_wgmma(0)
                    for r, c in T.Parallel(ROWS, C):
                        U_operand[r, c] = U[r, c] * T.exp2(G_shared[st, C - 1] - G_shared[st, c])
                    for r, c in T.Parallel(ROWS, D):
                        S[r, c] *= T.exp2(G_shared[st, C - 1])
                    T.wgmma_gemm(U_operand, k_shared[st, :, :], S, policy=full_row)
                    for r, c in T.Parallel(ROWS, C):
                        o_shared[c, r] = O[r, c]
                    T.wait_wgmma(0)
                    T.barrier_arrive(free[st])  # nothing reads this stage any more
                    T.fence_proxy_async()
                    T.sync_threads(1, 128)  # the output is complete, and P has been read
                    T.copy(o_shared, o[i * C : i * C + C, i_h, start : start + ROWS])
                for r, c in T.Parallel(ROWS, D):
                    final[i_h, c, start + r] = S[r, c]
            elif thread < 160:  # one warp: tiles
                for i in T.serial(slots):
                    st = i % stages
                    T.barrier_wait(free[st], (i // stages + 1) % 2)
                    T.tma_copy(k[i * C : i * C + C, i_k, 0:D], k_shared[st, :, :], barrier=full[st])
                    T.tma_copy(q[i * C : i * C + C, i_k, 0:D], q_shared[st, :, :], barrier=full[st])
                    T.tma_copy(v[i * C : i * C + C, i_h, start : start + ROWS], v_shared[st, :, :], barrier=full[st])
                    T.tma_copy(mixing[i, i_h, 0:C, 0:C], mixing_shared[st, :, :], barrier=full[st])
                    T.barrier_arrive(full[st])
            elif thread < 192:  # one warp: gates
                for i in T.serial(slots):
                    st = i % stages
                    T.barrier_wait(free[st], (i // stages + 1) % 2)
                    for r in T.Parallel(C):
                        G_shared[st, r] = gates[i, i_h, r]
                    T.barrier_arrive(full[st])

    return producer_and_consumer


level_5 = Level("5 producer warp", producer_and_consumer, OWN_BARRIERS)
if has_nvcc:
    source, _, _ = resources.lower(level_5)
    interesting(source, r"full\[.*(wait|arrive)|free\[.*(wait|arrive)|tma_load|warpgroup_arrive|wait_wgmma", most=40)
else:
    print("skipped: needs nvcc")

# %% [markdown]
# ## A machine to try barriers on
#
# Barriers are hard to get right and harder to test: a missing one may give right results for months. Here is a small
# simulator of what matters. A role is a Python generator; it waits, works for a time, and arrives. Work says which
# buffers it reads and writes, with the chunk it means. Afterwards every read is checked: was the right chunk in the
# buffer, and did nobody write meanwhile? If all roles wait, it is a deadlock.
#
# Durations are in cycles. Those of products are counted ($2mnk / 4096$, an SM's Tensor Cores are one resource); the
# others are round assumptions. The picture is about who waits for whom.


# %%
class Barrier:
    """An mbarrier: opens when `count` have arrived, and begins anew."""

    def __init__(self, name, count):
        self.name, self.count, self.arrived, self.phases, self.opened = name, count, 0, 0, [0.0]

    def arrive(self, now):
        self.arrived += 1
        if self.arrived == self.count:
            self.arrived, self.phases = 0, self.phases + 1
            self.opened.append(now)

    def passes(self, parity):
        return self.phases % 2 != parity


@dataclass
class Work:
    role: str
    label: str
    chunk: int
    start: float
    end: float
    reads: tuple
    writes: tuple


def simulate(roles, spread=1.0, seed=0):
    """Run the roles; returns all work done. Raises on deadlock, and on a read of the wrong or a changing buffer.

    spread: each duration is multiplied by something between 1 / spread and spread.
    """
    draw = random.Random(seed)
    now, waiting, done, tensor_free = dict.fromkeys(roles, 0.0), {}, [], 0.0
    running = dict(roles)
    while running:
        ready = [name for name in running if name not in waiting or waiting[name][0].passes(waiting[name][1])]
        if not ready:
            stuck = ", ".join(f"{name} at {barrier.name}" for name, (barrier, _) in waiting.items())
            raise AssertionError(f"deadlock: {stuck}")
        name = min(ready, key=now.get)
        if name in waiting:
            now[name] = max(now[name], waiting.pop(name)[0].opened[-1])
            continue
        step = next(running[name], None)
        if step is None:
            del running[name]
        elif step[0] == "wait":
            waiting[name] = step[1:]
        elif step[0] == "arrive":
            step[1].arrive(now[name])
        else:
            _, label, chunk, cycles, reads, writes, tensor = step
            cycles *= spread ** draw.uniform(-1, 1)
            start = max(now[name], tensor_free) if tensor else now[name]
            now[name] = start + cycles
            tensor_free = now[name] if tensor else tensor_free
            done.append(Work(name, label, chunk, start, now[name], reads, writes))
    for work in done:
        for buffer in work.reads:
            written = [w for w in done if buffer in w.writes]
            before = [w for w in written if w.end <= work.start]
            during = [w for w in written if w.start < work.end and w.end > work.start]
            if during or not before or max(before, key=lambda w: w.end).chunk != work.chunk:
                raise AssertionError(f"race: {work.role} reads {buffer} for chunk {work.chunk}, which is not in it")
    return done


def product(m, n, k):
    return 2 * m * n * k / 4096


def do(label, chunk, cycles, reads=(), writes=(), tensor=False):
    return ("work", label, chunk, cycles, tuple(reads), tuple(writes), tensor)


def roles_of_level_5(n, stages=STAGES, wait_free=True, wait_full=True, flip=0, count=1):
    full = [Barrier(f"full[{s}]", 1) for s in range(stages)]
    free = [Barrier(f"free[{s}]", count) for s in range(stages)]

    def load():
        for i in range(n):
            st = i % stages
            if wait_free:
                yield "wait", free[st], (i // stages + 1 + flip) % 2
            yield do("load", i, 700, writes=[f"tiles {st}"])
            yield "arrive", full[st]

    def consumer():
        for i in range(n):
            st = i % stages
            tiles = [f"tiles {st}"]
            if wait_full:
                yield "wait", full[st], (i // stages) % 2
            yield do("KS", i, product(C, 64, D), tiles, tensor=True)
            yield do("QK, QS", i, product(C, C, D) + product(C, 64, D), tiles, tensor=True)
            yield do("AW", i, product(C, 64, C), tiles, tensor=True)
            yield do("P", i, 300, tiles, ["P"])
            yield do("PU", i, product(C, 64, C), ["P"], tensor=True)
            yield do("KU", i, product(D, 64, C), tiles, ["O"], tensor=True)
            yield "arrive", free[st]
            yield do("store", i, 300, ["O"])

    return {"load warp": load(), "consumer": consumer()}


def draw_schedule(ax, done, title, until):
    rows = list(dict.fromkeys(work.role for work in done))
    for work in done:
        if work.start < until:
            y = rows.index(work.role)
            ax.barh(
                y, work.end - work.start, left=work.start, color=f"C{work.chunk % 5}", edgecolor="white", height=0.8
            )
            width = min(work.end, until) - work.start
            if width > until / 130 * len(work.label):  # it fits
                style = dict(ha="center", va="center", fontsize=7.5 if width > until / 40 else 6, color="white")
                ax.text(work.start + width / 2, y, work.label, **style)
    ax.set_yticks(range(len(rows)), rows)
    ax.set(title=title, xlim=(0, until))
    ax.invert_yaxis()
    ax.grid(False)


one, two = (simulate(roles_of_level_5(12, stages)) for stages in (1, 2))
fig, axes = plt.subplots(2, 1, figsize=(10, 3.4), sharex=True)
for ax, done, stages in zip(axes, (one, two), (1, 2), strict=True):
    draw_schedule(ax, done, f"Level 5 with {stages} stage{'s' * (stages > 1)} (a colour for each chunk)", 6000)
axes[1].set_xlabel("cycles")
plt.show()
print(f"cycles a chunk: {max(w.end for w in one) / 12:.0f} with one stage, {max(w.end for w in two) / 12:.0f} with two")
assert max(w.end for w in two) < max(w.end for w in one)

# %% [markdown]
# With one stage loads and products alternate, which is levels 3 and 4. With two, loads hide. Now take the barriers
# out, one at a time, and see what the simulator says. A race shows only with an unlucky timing, so each variant runs
# 20 times with durations up to ten times shorter or longer:


# %%
def verdict(make, tries=20):
    """What goes wrong, or that nothing does."""
    for seed in range(tries):
        try:
            simulate(make(), spread=10.0, seed=seed)
        except AssertionError as error:
            return str(error)
    return "nothing goes wrong"


mistakes = {
    "as it is": {},
    "no wait for full": {"wait_full": False},
    "no wait for free": {"wait_free": False},
    "wrong parity of free": {"flip": 1},
    "free expects one arrival more": {"count": 2},
}
found = {name: verdict(lambda options=options: roles_of_level_5(8, **options)) for name, options in mistakes.items()}
for name, text in found.items():
    print(f"{name:30} {text}")
assert found["as it is"] == "nothing goes wrong" and all(
    text.startswith(("race", "deadlock")) for name, text in found.items() if name != "as it is"
)


# %% [markdown]
# ## Level 6: more roles
#
# In level 5 the consumer still does work that is not on the chain of states: scores $P$, exponentials, the store of
# $O$. They get roles of their own; the chain is left with five products and what lies between them.
#
# - **scores**, a warpgroup: $P$ of the next chunk, into one of two buffers. It waits for `full`, as the chain does.
# - **factors**, a warp: $\gamma$ and $\gamma_C/\gamma$, once for all who need them.
# - **output**, a warp: stores $O$ by TMA.
#
# Three barriers come with them:
#
# - **`scores_full[2]`**: "P is in". The chain waits, the scores warpgroup arrives.
# - **`o_full`**: "O is complete in shared memory". The output warp waits, the chain arrives.
# - **`o_free`**: "O has been read by TMA". The chain waits before it writes the next O, the output warp arrives.
#
# Two are *not* there. Scores read a stage and never arrive at `free`: the chain does, after it has waited for
# `scores_full`, at which the scores warpgroup arrives when it has read. And nothing keeps the scores from overwriting
# a $P$ that is still in use: with two stages and two buffers, $P$ of chunk $i$ is only begun after `full` of chunk
# $i$, which needs `free` of chunk $i - 2$, at which the chain arrives after it has used that $P$. What other barriers
# imply is left out, and has a comment instead.
#
# `set_max_nreg` moves registers from roles that need few to the chain: 168 a thread at launch become 232, 128 and 40.

# %%
GATE, GAMMA, KEEP = range(3)  # rows of the factors: log2 gamma, gamma, gamma_C / gamma


def warpgroup_roles(scale=SCALE, stages=STAGES):
    """As level 5; a warpgroup for the chain, one for scores, one with a warp each for tiles, factors and output."""
    H, HV, slots = T.dynamic("H, HV, slots")
    full_row = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def warpgroup_roles(
        q: T.Tensor((slots * C, H, D), BF16),
        k: T.Tensor((slots * C, H, D), BF16),
        v: T.Tensor((slots * C, HV, D), BF16),
        mixing: T.Tensor((slots, HV, C, C), BF16),
        gates: T.Tensor((slots, HV, C), F32),
        o: T.Tensor((slots * C, HV, D), BF16),
        final: T.Tensor((HV, D, D), F32),
    ):
        with T.Kernel(D // ROWS, HV, threads=384) as (i_v, i_h):
            q_shared = T.alloc_shared((stages, C, D), BF16)
            k_shared = T.alloc_shared((stages, C, D), BF16)
            v_shared = T.alloc_shared((stages, C, ROWS), BF16)
            mixing_shared = T.alloc_shared((stages, C, C), BF16)
            P_shared = T.alloc_shared((2, C, C), BF16)
            o_shared = T.alloc_shared((C, ROWS), BF16)
            factors_shared = T.alloc_shared((stages, 3, C), F32, scope="shared")
            S = T.alloc_fragment((ROWS, D), F32)
            S_operand = T.alloc_fragment((ROWS, D), BF16)
            U = T.alloc_fragment((ROWS, C), F32)
            U_operand = T.alloc_fragment((ROWS, C), BF16)
            O = T.alloc_fragment((ROWS, C), F32)
            P = T.alloc_fragment((C, C), F32)
            P_rounded = T.alloc_fragment((C, C), BF16)
            full = T.alloc_barrier(arrive_count=[64] * stages)  # tiles and factors warps
            free = T.alloc_barrier(arrive_count=[128] * stages)  # chain
            scores_full = T.alloc_barrier(arrive_count=[128] * 2)
            o_full = T.alloc_barrier(arrive_count=[128])
            o_free = T.alloc_barrier(arrive_count=[32])
            i_k = T.truncdiv(i_h, T.truncdiv(HV, H))
            start = i_v * ROWS
            thread = T.get_thread_binding()
            if thread < 128:  # chain
                T.set_max_nreg(232, 1)
                T.clear(S)
                for i in T.serial(slots):
                    st = i % stages
                    T.barrier_wait(full[st], (i // stages) % 2)
                    T.copy(S, S_operand)
                    T.wgmma_gemm(S_operand, k_shared[st, :, :], U, transpose_B=True, clear_accum=True, policy=full_row)
                    T.wgmma_gemm(S_operand, q_shared[st, :, :], O, transpose_B=True, clear_accum=True, policy=full_row)
                    T.wait_wgmma(1)  # K S
                    for r, c in T.Parallel(ROWS, C):
                        U_operand[r, c] = v_shared[st, c, r] - factors_shared[st, GAMMA, c] * U[r, c]
                    T.wait_wgmma(0)  # Q S
                    T.wgmma_gemm(
                        U_operand, mixing_shared[st, :, :], U, transpose_B=True, clear_accum=True, policy=full_row
                    )
                    for r, c in T.Parallel(ROWS, C):
                        O[r, c] *= scale * factors_shared[st, GAMMA, c]
                    for r, c in T.Parallel(ROWS, D):
                        S[r, c] *= factors_shared[st, GAMMA, C - 1]
                    T.wait_wgmma(0)  # U
                    T.copy(U, U_operand)
                    T.barrier_wait(scores_full[i % 2], (i // 2) % 2)
                    T.wgmma_gemm(U_operand, P_shared[i % 2, :, :], O, transpose_B=True, policy=full_row)
                    T.wait_wgmma(0)  # O
                    for r, c in T.Parallel(ROWS, C):
                        U_operand[r, c] = U[r, c] * factors_shared[st, KEEP, c]
                    T.wgmma_gemm(U_operand, k_shared[st, :, :], S, policy=full_row)
                    T.barrier_wait(o_free[0], (i + 1) % 2)
                    for r, c in T.Parallel(ROWS, C):
                        o_shared[c, r] = O[r, c]
                    T.fence_proxy_async()
                    T.barrier_arrive(o_full[0])
                    T.wait_wgmma(0)  # S
                    T.barrier_arrive(free[st])  # stage and P of chunk i have been read
                for r, c in T.Parallel(ROWS, D):
                    final[i_h, c, start + r] = S[r, c]
            elif thread < 256:  # scores
                T.set_max_nreg(128, 0)
                for i in T.serial(slots):
                    st = i % stages
                    T.barrier_wait(full[st], (i // stages) % 2)  # also: P of chunk i - 2 has been used
                    T.wgmma_gemm(
                        q_shared[st, :, :], k_shared[st, :, :], P, transpose_B=True, clear_accum=True, policy=full_row
                    )
                    T.wait_wgmma(0)
                    for r, c in T.Parallel(C, C):
                        P[r, c] *= scale * T.exp2(T.min(factors_shared[st, GATE, r] - factors_shared[st, GATE, c], 0.0))
                    for r, c in T.Parallel(C, C):
                        P_rounded[r, c] = T.Select(r >= c, P[r, c], T.float32(0))
                    T.copy(P_rounded, P_shared[i % 2, :, :])
                    T.fence_proxy_async()
                    T.barrier_arrive(scores_full[i % 2])
            else:
                T.set_max_nreg(40, 0)
                if thread < 256 + 32:  # tiles
                    for i in T.serial(slots):
                        st = i % stages
                        T.barrier_wait(free[st], (i // stages + 1) % 2)
                        T.tma_copy(k[i * C : i * C + C, i_k, 0:D], k_shared[st, :, :], barrier=full[st])
                        T.tma_copy(q[i * C : i * C + C, i_k, 0:D], q_shared[st, :, :], barrier=full[st])
                        T.tma_copy(
                            v[i * C : i * C + C, i_h, start : start + ROWS], v_shared[st, :, :], barrier=full[st]
                        )
                        T.tma_copy(mixing[i, i_h, 0:C, 0:C], mixing_shared[st, :, :], barrier=full[st])
                        T.barrier_arrive(full[st])
                elif thread < 256 + 64:  # factors
                    for i in T.serial(slots):
                        st = i % stages
                        T.barrier_wait(free[st], (i // stages + 1) % 2)
                        for r in T.Parallel(C):
                            factors_shared[st, GATE, r] = gates[i, i_h, r]
                        for r in T.Parallel(C):
                            factors_shared[st, GAMMA, r] = T.exp2(gates[i, i_h, r])
                        for r in T.Parallel(C):
                            factors_shared[st, KEEP, r] = T.exp2(gates[i, i_h, C - 1] - gates[i, i_h, r])
                        T.barrier_arrive(full[st])
                elif thread < 256 + 96:  # output
                    for i in T.serial(slots):
                        T.barrier_wait(o_full[0], i % 2)
                        T.tma_copy(o_shared, o[i * C : i * C + C, i_h, start : start + ROWS])
                        T.tma_store_wait(0)
                        T.barrier_arrive(o_free[0])

    return warpgroup_roles


level_6 = Level("6 warpgroup roles", warpgroup_roles, OWN_BARRIERS)


# %% [markdown]
# The same roles for the simulator, and again one barrier less at a time:


# %%
def roles_of_level_6(n, stages=STAGES, buffers=2, without=()):
    full = [Barrier(f"full[{s}]", 2) for s in range(stages)]
    free = [Barrier(f"free[{s}]", 1) for s in range(stages)]
    scores_full = [Barrier(f"scores_full[{s}]", 1) for s in range(buffers)]
    o_full, o_free = Barrier("o_full", 1), Barrier("o_free", 1)

    def waits(name, barrier, parity):
        if name not in without:
            yield "wait", barrier, parity % 2

    def loads(label, buffer, cycles):
        for i in range(n):
            st = i % stages
            yield from waits("free", free[st], i // stages + 1)
            yield do(label, i, cycles, writes=[f"{buffer} {st}"])
            yield "arrive", full[st]

    def chain():
        for i in range(n):
            st = i % stages
            tiles, factors, P = f"tiles {st}", f"factors {st}", f"P {i % buffers}"
            yield from waits("full", full[st], i // stages)
            yield do("KS", i, product(C, 64, D), [tiles], tensor=True)
            yield do("QS", i, product(C, 64, D), [tiles, factors], tensor=True)
            yield do("AW", i, product(C, 64, C), [tiles, factors], tensor=True)
            yield from waits("scores_full", scores_full[i % buffers], i // buffers)
            yield do("PU", i, product(C, 64, C), [P], tensor=True)
            yield from waits("o_free", o_free, i + 1)
            yield do("O", i, 150, writes=["O"])
            yield "arrive", o_full
            yield do("KU", i, product(D, 64, C), [tiles, factors], tensor=True)
            yield "arrive", free[st]

    def scores():
        for i in range(n):
            st = i % stages
            yield from waits("full", full[st], i // stages)
            yield do("QK", i, product(C, C, D), [f"tiles {st}"], tensor=True)
            yield do("P", i, 300, [f"factors {st}"], [f"P {i % buffers}"])
            yield "arrive", scores_full[i % buffers]

    def output():
        for i in range(n):
            yield from waits("o_full", o_full, i)
            yield do("store", i, 500, ["O"])
            yield "arrive", o_free

    return {
        "chain": chain(),
        "scores": scores(),
        "tiles warp": loads("load", "tiles", 700),
        "factors warp": loads("exp", "factors", 250),
        "output warp": output(),
    }


six = simulate(roles_of_level_6(12))
fig, axes = plt.subplots(2, 1, figsize=(10, 4.6), sharex=True, height_ratios=[2, 4])
draw_schedule(axes[0], two, "Level 5", 6000)
draw_schedule(axes[1], six, "Level 6", 6000)
axes[1].set_xlabel("cycles (products counted, the rest assumed)")
plt.show()

barriers = ("full", "free", "scores_full", "o_full", "o_free")
found = {f"without {name}": verdict(lambda name=name: roles_of_level_6(8, without=(name,))) for name in barriers}
found["a single P buffer"] = verdict(lambda: roles_of_level_6(8, buffers=1))
found["three stages, two P"] = verdict(lambda: roles_of_level_6(8, stages=3))
found["as it is"] = verdict(lambda: roles_of_level_6(8))
for name, text in found.items():
    print(f"{name:22} {textwrap.shorten(text, 90, placeholder=' ...')}")
assert [name for name, text in found.items() if text == "nothing goes wrong"] == ["as it is"]

# %% [markdown]
# Each barrier of the kernel is needed, and one for $P$ would be as soon as there are three stages: the argument above
# used that there are as many as buffers of $P$. The production kernel has three stages and two buffers, and its scores
# warpgroup waits for `free` of chunk $i - 2$.
#
# ## What the compiler made of them
#
# All levels and, last, the two production kernels, compiled here. *HGMMA* are matrix products, *LDSM*/*STSM* load and
# store operands in the layout of Tensor Cores, *UTMALDG*/*UTMASTG* are TMA, *BAR* waits of the whole block, *SYNCS*
# mbarriers.

# %%
levels = [level_1, level_2, level_3, level_4, level_5, level_6]
if has_nvcc:
    production = {}
    for variant in select():
        production.setdefault(variant.kernel, variant)
    compiled = levels + [production[name] for name in ("gated_inverse", "chunk_forward") if name in production]
    with contextlib.redirect_stderr(sys.stdout):  # its progress bar is no error
        measured = in_parallel(lambda level, _: resources.resources(level), compiled, None, "compiling")
    shown = [name for name in resources.INSTRUCTIONS if name != "HMMA"]
    header = ("threads", "regs", "spills", "KB", *shown)
    widths = [max(len(name), 4) + 1 for name in header]
    print(f"{'':24}" + "".join(f"{name:>{width}}" for name, width in zip(header, widths, strict=True)))
    for level, used in zip(compiled, measured, strict=True):
        name = level.name if isinstance(level, Level) else level.kernel
        counts = [used.sass[instruction] if used.sass else "-" for instruction in shown]
        cells = (used.threads, used.registers, used.spill_stores + used.spill_loads, used.shared // 1024, *counts)
        print(f"{name:24}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))
        assert not used.serialised, used.serialised
    by_level = dict(zip([level.name for level in compiled], measured, strict=True))
    assert all(by_level[level.name].spill_loads == 0 for level in levels), "a level spills registers"
else:
    print("skipped: needs nvcc")

# %% [markdown]
# Read it like this. From level 3 to 4 the block barriers nearly vanish, as nothing of the chain goes through shared
# memory. Level 5 brings TMA and mbarriers. No level uses LDSM: values are read transposed element by element, which
# the production kernel does with `ldmatrix` (and the output with `stmatrix`). And *registers* are why the roles exist:
# 255 is the most a thread can have. (The production kernel's spills are in its small roles; its main loop has none.)
#
# What else the production kernel does ([the Hopper schedule](../derivations/08_hopper_schedule.md)): no gates in the
# loop (notebook 03, version D); the next $KS$ is started before the output is stored; arrivals by one lane a warp;
# packed sequences, ragged ends, states in and out, key norms; a loop rotated so that nothing is in flight at its end.
#
# ## On the GPU
#
# Every level against float64 on small inputs, with outputs full of NaN beforehand, then the time of 16/64 heads and
# 8,192 tokens. Without a GPU the committed times are drawn, if there are any.


# %%
def median_ms(run, repetitions=15):
    """Median time of replays of a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repetitions):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[repetitions // 2]


def arrays(made):
    """Inputs and NaN-filled outputs of the levels for a call of one sequence."""
    q, k, v, g, beta = (getattr(made, name)[0].contiguous() for name in testing.PER_TOKEN)
    slots, HV = len(q) // C, v.shape[1]
    nan = float("nan")
    mixing = torch.full((slots, HV, C, C), nan, dtype=torch.bfloat16, device=q.device)
    gates = torch.full((slots, HV, C), nan, device=q.device)
    return q, k, v, g, beta, mixing, gates, torch.full_like(v, nan), torch.full((HV, D, D), nan, device=q.device)


results = {}
if cfg.needs_hopper():
    kernels = {
        level.name: tilelang.compile(
            level.build(), target=TARGET, execution_backend="tvm_ffi", pass_configs=dict(level.options)
        )
        for level in levels
    }
    q, k, v, g, beta, mixing, gates, o, final = arrays(made.to("cuda"))
    out = torch.full((len(q) // C, 1, C, C), float("nan"), device="cuda")
    kernels[level_1.name](k, out)
    check("level 1 on the GPU", out[:, 0], chunks.k @ chunks.k.mT, 1e-6)
    kernels[level_2.name](k, g, beta, mixing, gates)
    check("level 2 on the GPU", mixing.flatten(0, 1), chunks.mixing, 3e-3)
    for level in levels[2:]:
        for poison in (o, final):
            poison.fill_(float("nan"))
        kernels[level.name](q, k, v, mixing, gates, o, final)
        check(f"level {level.name}: output", o, truth.output[0], 1e-2)
        check(f"level {level.name}: state", final, truth.final_state[0], 1e-2)

    big = testing.inputs(
        tokens=8192,
        heads=16,
        value_heads=64,
        head_dim_k=D,
        head_dim_v=D,
        dtype=torch.bfloat16,
        device="cuda",
        initial_state=False,
    )
    q, k, v, g, beta, mixing, gates, o, final = arrays(big)
    out = torch.empty(len(q) // C, 16, C, C, device="cuda")
    milliseconds = {level_1.name: median_ms(lambda: kernels[level_1.name](k, out))}
    milliseconds[level_2.name] = median_ms(lambda: kernels[level_2.name](k, g, beta, mixing, gates))
    for level in levels[2:]:
        run = kernels[level.name]
        milliseconds[level.name] = median_ms(lambda run=run: run(q, k, v, mixing, gates, o, final))
    arguments = big.arguments(output_final_state=True)
    milliseconds["the package, both launches"] = median_ms(lambda: flashqla.chunk_gated_delta_rule(**arguments))
    results["level_ms"] = milliseconds
else:
    path = pathlib.Path("results/h200/notebooks.json")
    if path.exists():
        committed = json.loads(path.read_text())["notebooks"]["05_forward_kernel"]
        results = committed.get("results", {})

if "level_ms" in results:
    milliseconds = results["level_ms"]
    fig, ax = plt.subplots(figsize=(9, 3))
    bars = ax.barh(list(milliseconds), list(milliseconds.values()), color=["C5", "C1", *["C0"] * 4, "C2"])
    ax.bar_label(bars, [f" {ms:.3f} ms" for ms in milliseconds.values()], fontsize=8)
    ax.set(xlabel="milliseconds on an H200, 16/64 heads, 8192 tokens", title="Levels (orange: inverse, blue: chain)")
    ax.invert_yaxis()
    ax.margins(x=0.12)
    plt.show()
else:
    print("no times of the levels: none measured here, none committed")

# %% [markdown]
# A chain (levels 3 to 6) needs the inverse (level 2) before it; the package's bar has both. Overlap pays, not the
# choice of memory: on the H200 the same products took a quarter of the time from level 4 to 5.
#
# ## Exercises
#
# 1. Does level 6 fit into an SM with three stages? With four? What, besides the stages, must change for three (see the
#    simulator's verdict)?

# %% jupyter={"source_hidden": true}
# Solution 1: bytes of a stage, of the rest, and 227 KB for a block
stage = 2 * (2 * C * D + C * ROWS + C * C) + 4 * 3 * C
rest = 2 * (2 * C * C + C * ROWS)
for stages in (2, 3, 4):
    size = stages * stage + rest
    print(f"{stages} stages: {size / 1024:.0f} KB, {'fits' if size <= 227 * 1024 else 'does not fit'}")
print("three stages need three buffers of P, or a wait for the stage of chunk i - 2:")
print("  three stages, three P:", verdict(lambda: roles_of_level_6(8, stages=3, buffers=3)))

# %% [markdown]
# 2. Write the parity that a producer waits for, for chunks 0 to 7 and two stages, and say for each which completed
#    phase of `free` it asks for. Check it with a simulated barrier.

# %% jupyter={"source_hidden": true}
# Solution 2: use u = i // 2 of a stage may begin when u phases of its barrier have completed; parity u + 1 says so
for i in range(8):
    use, barrier = i // STAGES, Barrier("free", 1)
    for _ in range(use):
        barrier.arrive(0.0)
    passes = barrier.passes((use + 1) % 2)  # `use` phases have completed
    early = Barrier("free", 1)
    for _ in range(use - 1):
        early.arrive(0.0)
    print(f"chunk {i}: stage {i % STAGES}, parity {(use + 1) % 2}, asks for {use} completed phases")
    assert passes and (use == 0 or not early.passes((use + 1) % 2))

# %% [markdown]
# 3. Level 2 computes $KK^\top$ once a value head. With four value heads on a key head, how much of its Tensor Core
#    work is repeated, and is that why it is slow?

# %% jupyter={"source_hidden": true}
# Solution 3: three of four products, but a product is 256 cycles; the substitution is 63 steps in a row, each a sum
repeated = 3 * product(C, C, D)
steps = sum(range(C))
print(f"repeated: {repeated:.0f} tensor cycles a group; substitution: {steps} multiply-adds in a row, in each thread")
_ = check("exercise 3", torch.tensor(float(steps)), torch.tensor(C * (C - 1) / 2))

# %% [markdown]
# Next: [06 The backward](06_backward.ipynb).
