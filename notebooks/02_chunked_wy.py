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
# # 02 The chunk form: from a loop to matrix products
#
# The token loop of notebook 01 is exact and slow: every token waits for the one before, and each step is a
# matrix-vector product, which no GPU likes. Here we cut the sequence into chunks of $C$ tokens and derive, from the
# loop and nothing else, a form in which a chunk costs a handful of matrix products and only one state a chunk is
# passed on. The literature calls it the *WY form*, after a way to write products of reflections $I - 2 k k^\top$.
#
# The proofs are [derivations 3](../derivations/03_chunk_wy.md), the code is
# [`flashqla/reference/chunked.py`](../flashqla/reference/chunked.py). Rows of a chunk are tokens, so $Q, K, V, U$ and
# $O$ have $q_i^\top, k_i^\top, \dots$ as rows. $K$ and $V$ are matrices where they are multiplied, and the sizes of a
# key and a value where something is counted (the code below writes `K_`, `V_` for the matrices). $\circ$ multiplies
# entry by entry, $\mathrm{diag}(x)$ has $x$ on its diagonal, and tril and stril keep the lower triangle with and
# without the diagonal.

# %%
import time

import matplotlib.pyplot as plt
import torch
from torch.utils.flop_counter import FlopCounterMode

from flashqla import reference, testing
from flashqla.reference.chunked import cut, state_chain
from flashqla.reference.layout import Layout
from flashqla.testing import check

plt.style.use("./flashqla.mplstyle")
torch.set_default_dtype(torch.float64)

T, C, K, V = 256, 64, 32, 24
made = testing.inputs(tokens=T, heads=1, value_heads=1, head_dim_k=K, head_dim_v=V, dtype=torch.float64)
made.g = 4 * testing.inputs(tokens=T, heads=1, value_heads=1, dtype=torch.float64, seed=3).g  # a decay one can see
q, k, v, g, beta = (getattr(made, name)[0, :, 0] for name in ("q", "k", "v", "g", "beta"))
S_0, scale = made.initial_state[0, 0], K**-0.5

# the library's view of the same chunks, to compare with: chunks.decay is Gamma, chunks.inverse A, chunks.scores P
layout = Layout.of(made.q, None, C)
chunks = cut(layout, made.q, made.k, made.v, made.g, made.beta, scale)

# %% [markdown]
# ## 1 Unroll the recurrence inside a chunk
#
# Take one chunk with rows $0 \dots C - 1$ and call the state before it $S$. Apply $S_t = a_t S_{t-1} + k_t u_t^\top$
# (eq. 1.1) again and again. With $G_i = \sum_{m \le i} g_m$ *inside the chunk* (eq. 2.1), $\gamma_i = \exp(G_i)$, what
# is left of $S$ at row $i$, and $\Gamma_{ij} = \exp(G_i - G_j)$ for $i \ge j$, else 0 (eq. 2.2),
#
# $$ a_t S_{t-1} \;=\; \gamma_t\, S + \sum_{j < t} \Gamma_{tj}\, k_j u_j^\top . $$
#
# The state before token $t$ is the old state, decayed, plus all writes so far, each decayed since it was made. The
# unknowns are the rows $u_j$. First the loop, keeping everything we want to predict:


# %%
def token_loop(q, k, v, g, beta, S):
    decayed, writes, outputs = [], [], []
    for t in range(len(q)):
        S = g[t].exp() * S
        decayed.append(S)
        writes.append(beta[t] * (v[t] - S.T @ k[t]))
        S = S + torch.outer(k[t], writes[-1])
        outputs.append(scale * S.T @ q[t])
    return torch.stack(decayed), torch.stack(writes), torch.stack(outputs), S


first = slice(0, C)
Q, K_, V_, b = q[first], k[first], v[first], beta[first]
decayed, U_loop, O_loop, S_loop = token_loop(Q, K_, V_, g[first], b, S_0)

G = g[first].cumsum(0)  # eq. 2.1
gamma = G.exp()
Gamma = (G[:, None] - G).masked_fill(torch.ones(C, C).triu(1).bool(), -torch.inf).exp()  # eq. 2.2
t = 40
unrolled = gamma[t] * S_0 + sum(Gamma[t, j] * torch.outer(K_[j], U_loop[j]) for j in range(t))
check("unrolled eq. 1.1 at token 40", unrolled, decayed[t], 1e-12)
_ = check("eq. 2.2", Gamma, chunks.decay[0], 1e-12)

# %% [markdown]
# The exponent is masked *before* `exp`: above the diagonal $G_i - G_j$ is positive and may overflow, and infinity times
# the zero of a mask is NaN.
#
# ## 2 A triangular system appears
#
# Put the unrolled state into $u_t = \beta_t (v_t - a_t S_{t-1}^\top k_t)$ (eq. 1.2):
#
# $$ u_t = \beta_t \Big( v_t - \gamma_t S^\top k_t - \sum_{j<t} \Gamma_{tj}\,(k_t^\top k_j)\, u_j \Big) . $$
#
# Each $u_t$ needs the earlier $u_j$: a write depends on what was written before under similar keys. Stack the $u_t$ as
# rows of $U$ and move the sum to the left. With $L = \mathrm{stril}(\mathrm{diag}(\beta) K K^\top)$ (eq. 3.1) and
# $W = V - \Lambda K S$ (eq. 3.3), $\Lambda = \mathrm{diag}(\gamma)$, it reads
#
# $$ (I + \Gamma \circ L)\; U = \mathrm{diag}(\beta)\, W . $$
#
# $W$ is what the values leave to write once the past has been subtracted. This is where the triangular inverse comes
# from. It is no trick: it is the token loop, restricted to the $C$ tokens of a chunk, written as forward substitution.

# %%
L = (b[:, None] * (K_ @ K_.T)).tril(-1)  # eq. 3.1
W = V_ - gamma[:, None] * (K_ @ S_0)  # eq. 3.3
system = torch.eye(C) + Gamma * L
U = torch.linalg.solve_triangular(system, b[:, None] * W, upper=False, unitriangular=True)
check("(I + Gamma o L) U = diag(beta) W", U, U_loop, 1e-12)

states = state_chain(layout, chunks, made.initial_state.clone())  # the library, all chunks
check("eq. 3.3", W, states.residual[0], 1e-12)
_ = check("eq. 3.4", U, states.corrected[0], 1e-12)

# %% [markdown]
# The decay can be moved out of the inverse: $(I + \Gamma \circ L)^{-1} = \Gamma \circ A$ with $A = (I + L)^{-1}$ (eq.
# 3.2 and 4.1; notebook 03 proves it), so
#
# $$ U = (\Gamma \circ A)\,\mathrm{diag}(\beta)\, W \qquad \text{(eq. 3.4)} . $$
#
# Why an inverse, when solving is enough? $A$ depends on keys and $\beta$ only: it is ready before any state is known.

# %%
A = torch.linalg.solve_triangular(torch.eye(C) + L, torch.eye(C), upper=False, unitriangular=True)  # eq. 3.2
check("eq. 3.2", A, chunks.inverse[0], 1e-12)
_ = check("eq. 3.4 with the gate outside", (Gamma * A) @ (b[:, None] * W), U_loop, 1e-12)

# %% [markdown]
# ## 3 Output and next state
#
# The unrolled state gives the rest for free. At token $i$ the output reads $S_i = \gamma_i S + \sum_{j \le i}
# \Gamma_{ij} k_j u_j^\top$, and the state of the last row is passed on:
#
# $$ O = s \Lambda Q S + P U, \quad P = s\,\Gamma \circ (Q K^\top) \quad \text{(eq. 3.5)}, \qquad
# S' = \gamma_C S + K^\top \mathrm{diag}(\gamma_C / \gamma)\, U \quad \text{(eq. 3.6)} . $$
#
# $\gamma_C$ is the decay of the whole chunk, that is $\gamma$ of its last row, and $\gamma_C / \gamma_j$ what the rest
# of the chunk leaves of write $j$. $P$ is causal attention without softmax inside the chunk, masked by the zeros of
# $\Gamma$; $s\Lambda Q S$ is what the past contributes.

# %%
P = scale * Gamma * (Q @ K_.T)
O = scale * gamma[:, None] * (Q @ S_0) + P @ U  # eq. 3.5
late = Gamma[-1]  # gamma_C / gamma_j as a row of Gamma: never a division by an underflowed gamma
S_next = gamma[-1] * S_0 + K_.T @ (late[:, None] * U)  # eq. 3.6
check("eq. 3.5: scores", P, chunks.scores[0], 1e-12)
check("eq. 3.5", O, O_loop, 1e-12)
_ = check("eq. 3.6", S_next, S_loop, 1e-12)

# %% [markdown]
# What these matrices look like. $\Gamma$ fades with distance. For random keys $L$ is small, so that $A = I - L + L^2 -
# \dots$ is roughly $I - L$: the third picture resembles the second with the colours exchanged (notebook 04 has keys for
# which it does not). $P$ is $\Gamma$ times query-key similarity.

# %%
fig, axes = plt.subplots(1, 4, figsize=(11, 2.7))
for ax, (title, matrix) in zip(
    axes, {r"$\Gamma$": Gamma, r"$L$": L, r"$A - I$": A - torch.eye(C), r"$P$": P}.items(), strict=True
):
    limit = float(matrix.abs().max())
    if title == r"$\Gamma$":
        image = ax.imshow(matrix, vmin=0, vmax=1)
    else:
        image = ax.imshow(matrix, cmap="RdBu_r", vmin=-limit, vmax=limit)
    ax.grid(False)
    ax.set(title=title, xlabel="token j (written)")
    fig.colorbar(image, ax=ax, shrink=0.72)
axes[0].set_ylabel("token i (reads)")
plt.show()

# %% [markdown]
# ## 4 All chunks
#
# Everything before $W$ is independent of the state, so all chunks can do it at once. Only $W$, $U$ and $S'$ form a
# chain, and it has $T / C$ links instead of $T$. ($O$ needs $S$ too, but nothing waits for it.)


# %%
def chunk_form(q, k, v, g, beta, S, size):
    outputs = []
    for start in range(0, len(q), size):
        Q, K_, V_, b = (x[start : start + size] for x in (q, k, v, beta))
        n = len(Q)
        G = g[start : start + size].cumsum(0)
        Gamma = (G[:, None] - G).masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).exp()
        gamma = G.exp()[:, None]
        L, identity = (b[:, None] * (K_ @ K_.T)).tril(-1), torch.eye(n, dtype=q.dtype)
        A = torch.linalg.solve_triangular(L, identity, upper=False, unitriangular=True)  # of I + L
        W = V_ - gamma * (K_ @ S)
        U = (Gamma * A) @ (b[:, None] * W)
        outputs.append(scale * gamma * (Q @ S) + scale * (Gamma * (Q @ K_.T)) @ U)
        S = gamma[-1] * S + K_.T @ (Gamma[-1][:, None] * U)
    return torch.cat(outputs), S


library = reference.chunked(**made.arguments(), output_final_state=True)
for size in (16, 64, 100):
    O, S_T = chunk_form(q, k, v, g, beta, S_0, size)
    check(f"eq. 3.1 to 3.6, chunks of {size}: output", O, library.output[0, :, 0], 1e-12)
    check(f"eq. 3.1 to 3.6, chunks of {size}: state", S_T, library.final_state[0, 0], 1e-12)
oracle = testing.oracle64(**made.arguments())  # the token loop of the library
check("chunk form against the token loop", O, oracle.output[0, :, 0], 1e-12)
first, second = [x[:100] for x in (q, k, v, g, beta)], [x[100:] for x in (q, k, v, g, beta)]
O_1, S_1 = chunk_form(*first, S_0, 64)
O_2, _ = chunk_form(*second, S_1, 64)
_ = check("two calls with the state handed over", torch.cat([O_1, O_2]), O, 1e-12)

# %% [markdown]
# The result does not depend on the chunk size (100 does not even divide 256: the last chunk is short), nor on where a
# sequence is cut into calls. Chunk size is purely a matter of cost.
#
# ## 5 What a token costs
#
# Multiplications and additions of one chunk; a product of $[m, k]$ and $[k, n]$ counts $2mkn$, triangles are counted as
# full squares:
#
# | product | operations | a token |
# |---|---|---|
# | $K S$, $Q S$, $K^\top U$ | $3 \cdot 2 C K V$ | $6 K V$ |
# | $K K^\top$, $Q K^\top$ | $2 \cdot 2 C^2 K$ | $4 C K$ |
# | $(\Gamma \circ A)\,\mathrm{diag}(\beta) W$, $P U$ | $2 \cdot 2 C^2 V$ | $4 C V$ |
# | inverse, by substitution (notebook 04) | $C^3 / 3$ | $C^2 / 3$ |
#
# The first line does not depend on $C$; the others grow with it. $C = 1$ has the fewest operations and no
# parallelism. Large $C$ is attention again, with cost quadratic in length. Next to the count, the time of our
# `chunk_form` on this machine; PyTorch's counter checks the products:

# %%
tokens, dim = 2048, 128
big = testing.inputs(tokens=tokens, heads=1, value_heads=1, head_dim_k=dim, head_dim_v=dim, dtype=torch.float64)
arguments = [getattr(big, name)[0, :, 0].float() for name in ("q", "k", "v", "g", "beta")]
sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def seconds(size):
    start = time.perf_counter()
    chunk_form(*arguments, torch.zeros(dim, dim, dtype=torch.float32), size)
    return time.perf_counter() - start


measured = [min(seconds(size) for _ in range(2)) / tokens * 1e6 for size in sizes]
counted = {
    r"$KS,\ QS,\ K^\top U$: $6KV$": [6 * dim * dim for _ in sizes],
    r"$KK^\top,\ QK^\top$: $4CK$": [4 * size * dim for size in sizes],
    r"$(\Gamma \circ A)\,\mathrm{diag}(\beta) W,\ PU$: $4CV$": [4 * size * dim for size in sizes],
    r"inverse: $C^2/3$": [size**2 / 3 for size in sizes],
}
fig, (left, right) = plt.subplots(1, 2)
left.stackplot(sizes, [[x / 1e3 for x in row] for row in counted.values()], labels=counted, alpha=0.85)
left.set(xscale="log", xlabel="chunk size C", ylabel="thousand operations a token", title="Counted, K = V = 128")
left.legend(loc="upper left", fontsize=8)
right.plot(sizes, measured, marker="o", color="C4")
right.set(
    xscale="log", yscale="log", xlabel="chunk size C", ylabel="microseconds a token", title="Measured, this machine"
)
for ax in (left, right):
    ax.set_xticks([1, 4, 16, 64, 256], [1, 4, 16, 64, 256])
    ax.minorticks_off()
plt.show()
print(f"fastest here: C = {sizes[measured.index(min(measured))]}")
with FlopCounterMode(display=False) as counter:  # counts products, not the substitution
    seconds(64)
by_hand = tokens * (6 * dim * dim + 4 * 64 * dim + 4 * 64 * dim)
_ = check("products at C = 64", torch.tensor(float(by_hand)), torch.tensor(float(counter.get_total_flops())), 0)

# %% [markdown]
# On a GPU the products run on *Tensor Cores*, units that multiply small matrices, and the smallest piece that keeps
# them busy has 64 rows. That, the on-chip memory that $[C, C]$ matrices take, and the chain's length meet at $C = 64$,
# the size that this package and its peers use.
#
# ## Exercises
#
# 1. Set $C = T$ and $S = 0$: write the whole layer as one lower triangular matrix $M$ with $O = M V$.

# %% jupyter={"source_hidden": true}
# Solution 1: O = P U, U = (Gamma o A) diag(beta) V
n = 96
G_all = g[:n].cumsum(0)
Gamma_all = (G_all[:, None] - G_all).masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).exp()
A_all = torch.linalg.inv(torch.eye(n) + (beta[:n, None] * (k[:n] @ k[:n].T)).tril(-1))
M = scale * (Gamma_all * (q[:n] @ k[:n].T)) @ (Gamma_all * A_all) @ torch.diag(beta[:n])
short = made.arguments(initial_state=None) | {name: getattr(made, name)[:, :n] for name in testing.PER_TOKEN}
_ = check("exercise 1: O = M V", M @ v[:n], reference.recurrent(**short).output[0, :, 0], 1e-12)

# %% [markdown]
# 2. The last chunk of a sequence is usually ragged. A kernel computes it at full size anyway. Fill the missing rows
#    with $q = k = v = 0$, $g = 0$, $\beta = 0$ and show that neither the outputs nor the state change.

# %% jupyter={"source_hidden": true}
# Solution 2: such a row writes u = 0 and does not decay
ragged = [x[:50] for x in (q, k, v, g, beta)]
padded = [torch.cat([x, x.new_zeros(14, *x.shape[1:])]) for x in ragged]
O_ragged, S_ragged = token_loop(*ragged, S_0)[2:]
O_padded, S_padded = chunk_form(*padded, S_0, 64)
check("exercise 2: output", O_padded[:50], O_ragged, 1e-12)
_ = check("exercise 2: state", S_padded, S_ragged, 1e-12)

# %% [markdown]
# 3. A chunk maps the state affinely, $S' = M S + N$ (eq. 7.1). Find $M$ from eq. 3.3, 3.4 and 3.6 and check it.
#    (Notebook 07 will use it to work on several parts of one sequence at the same time.)

# %% jupyter={"source_hidden": true}
# Solution 3: put W into U into S'; eq. 7.2 is this after diag(gamma_C / gamma) (Gamma o A) Lambda = gamma_C A
M = gamma[-1] * torch.eye(K) - K_.T @ torch.diag(late) @ (Gamma * A) @ torch.diag(b) @ torch.diag(gamma) @ K_
N = K_.T @ torch.diag(late) @ (Gamma * A) @ torch.diag(b) @ V_
check("eq. 7.1", M @ S_0 + N, S_loop, 1e-12)
_ = check("eq. 7.2", M, gamma[-1] * (torch.eye(K) - K_.T @ (A * b) @ K_), 1e-12)

# %% [markdown]
# Next: [03 Algebraic rewrites](03_algebraic_rewrites.ipynb), which makes the chunk cheaper without changing it.
