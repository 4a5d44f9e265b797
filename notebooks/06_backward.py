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
# # 06 The backward: every gradient by hand, then the kernels
#
# Autograd could differentiate the token loop, but it would keep a state for every token. This notebook derives the
# gradients of one chunk from one product rule, checks each against autograd of the very formulas of notebook 02,
# compares two ways through the triangular system, and then cuts the whole into kernels: *two chains, then everything
# else in parallel*. What that costs in memory traffic is counted by code that runs the formulas.

# %%
import itertools
from collections import Counter

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import SymLogNorm

import flashqla
from flashqla import reference, testing
from flashqla.reference.backward import adjoint_chain, adjoint_form, textbook_form
from flashqla.reference.chunked import cut, state_chain
from flashqla.reference.layout import Layout
from flashqla.testing import check

plt.style.use("./flashqla.mplstyle")
torch.set_default_dtype(torch.float64)

C, D = 64, 32
made = testing.inputs(tokens=C, heads=1, value_heads=1, head_dim_k=D, head_dim_v=D, dtype=torch.float64)
made.g = 4 * testing.inputs(tokens=C, heads=1, value_heads=1, dtype=torch.float64, seed=3).g  # a decay one can see
s = D**-0.5

# %% [markdown]
# ## 1 One chunk, and what is known
#
# The forward of a chunk is equations 3.1 to 3.6. Two gradients come from outside: $dO$ from the layer above, and
# $dS'$, the gradient of the state at the chunk's end, from the chunk behind. The gradients of $q, k, v, g, \beta$ and
# of the state $S$ at its start are wanted. Below, autograd gets the formulas exactly as notebook 02 has them, and
# keeps the gradients of the intermediate results too: the truth for each step.
#
# One rule is used throughout. If $F = XZ$, then $dX = dF\,Z^\top$ and $dZ = X^\top dF$. (For $F = X \circ Z$ it is $dX
# = dF \circ Z$.) Longer proofs are in [derivations 6](../derivations/06_backward.md).

# %%
q, k, v, g, beta = (getattr(made, name)[0, :, 0].clone().requires_grad_() for name in testing.PER_TOKEN)
S = made.initial_state[0, 0].clone().requires_grad_()
dO, dS_end = made.do[0, :, 0], made.dht[0, 0]


def chunk(q, k, v, g, beta, S):
    """Equations 2.1, 2.2 and 3.1 to 3.6, with every intermediate result."""
    G = g.cumsum(0)
    Gamma = (G[:, None] - G).masked_fill(torch.ones(C, C).triu(1).bool(), -torch.inf).exp()
    gamma, b = G.exp()[:, None], beta[:, None]
    L = (b * (k @ k.T)).tril(-1)
    A = torch.linalg.solve_triangular(torch.eye(C) + L, torch.eye(C), upper=False, unitriangular=True)
    W = v - gamma * (k @ S)
    U = (Gamma * A) @ (b * W)
    P = s * Gamma * (q @ k.T)
    O = s * gamma * (q @ S) + P @ U
    S_end = gamma[-1] * S + k.T @ (Gamma[-1][:, None] * U)
    return dict(G=G, Gamma=Gamma, gamma=gamma, L=L, A=A, W=W, U=U, P=P, O=O, S_end=S_end)


values = chunk(q, k, v, g, beta, S)
library = reference.chunked(**made.arguments(), output_final_state=True)
check("eq. 3.5", values["O"], library.output[0, :, 0], 1e-12)
check("eq. 3.6", values["S_end"], library.final_state[0, 0], 1e-12)

loss = (values["O"] * dO).sum() + (values["S_end"] * dS_end).sum()
wanted = dict(q=q, k=k, v=v, g=g, beta=beta, S=S) | {name: values[name] for name in ("U", "W", "A", "G")}
truth = dict(zip(wanted, torch.autograd.grad(loss, wanted.values(), retain_graph=True), strict=True))

# from here on nothing is differentiated by torch
Q, K, V, b, S = (x.detach() for x in (q, k, v, beta[:, None], S))
G, Gamma, gamma, L, A, W, U, P, O, S_end = (x.detach() for x in values.values())
late = Gamma[-1][:, None]  # gamma_C / gamma

# %% [markdown]
# ## 2 The adjoint chain
#
# $U$ occurs twice: in the output $O = \dots + PU$ and in the state $S' = \dots + K^\top
# \mathrm{diag}(\gamma_C/\gamma)\,U$. So
#
# $$ dU = P^\top dO + \mathrm{diag}(\gamma_C/\gamma)\, K\, dS' \qquad \text{(eq. 6.1)} $$
#
# $U = (\Gamma \circ A)\,\mathrm{diag}(\beta)\,W$ is linear in $W$, and $W = V - \Lambda K S$ in $V$ and $S$:
#
# $$ Y = (\Gamma \circ A)^\top dU, \qquad dV = dW = \mathrm{diag}(\beta)\, Y \qquad \text{(eq. 6.2, 6.3)} $$
#
# $S$ occurs in $S'$, in $O$ and in $W$, in this order:
#
# $$ dS = \gamma_C\, dS' + s\, Q^\top \Lambda\, dO - K^\top \Lambda\, dV \qquad \text{(eq. 6.4)} $$
#
# $dS$ is the $dS'$ of the chunk before. That is all that is sequential in the backward, and it has the shape of the
# forward chain, run from the last chunk to the first.

# %%
dU = P.T @ dO + late * (K @ dS_end)  # eq. 6.1
Y = (Gamma * A).T @ dU  # eq. 6.2
dV = b * Y  # eq. 6.3
dS = gamma[-1] * dS_end + s * Q.T @ (gamma * dO) - K.T @ (gamma * dV)  # eq. 6.4
check("eq. 6.1: dU", dU, truth["U"], 1e-12)
check("eq. 6.3: dW", dV, truth["W"], 1e-12)
check("eq. 6.3: dV", dV, truth["v"], 1e-12)
check("eq. 6.4: dS", dS, truth["S"], 1e-12)

layout = Layout.of(made.q, None, C)
chunks = cut(layout, made.q, made.k, made.v, made.g, made.beta, s)
states = state_chain(layout, chunks, made.initial_state.clone())
adjoints = adjoint_chain(layout, chunks, dO[None], made.dht.clone())
_ = check("eq. 6.2: Y, against the library", Y, adjoints.multiplier[0], 1e-12)

# %% [markdown]
# ## 3 Through the triangular system, as a textbook does it
#
# What remains is the gradient through $A$, that is through $K$, $\beta$ and the gates inside the system. The direct
# way: differentiate the product $U = T W$ with $T = \tilde A\,\mathrm{diag}(\beta)$ and $\tilde A = \Gamma \circ A$,
# then the inverse. From $A(I + L) = I$ follows $\delta A = -A\,\delta L\,A$, hence
#
# $$ dT = \mathrm{tril}(dU\,W^\top), \qquad d\tilde A = dT\,\mathrm{diag}(\beta) \qquad \text{(eq. 6.5)} $$
#
# $$ dL = -\mathrm{stril}\big(A^\top (\Gamma \circ d\tilde A) A^\top\big), \qquad N = \mathrm{diag}(\beta)\,dL \qquad
# \text{(eq. 6.6)} $$
#
# $N$ is the gradient by the entries of $KK^\top$. $\beta$ is a factor of $T$'s columns and of $L$'s rows (eq. 6.7),
# and $\Gamma$ is a factor of $\tilde A$, so its logarithm gets gradient times value, $E = d\tilde A \circ \Gamma \circ
# A$ (eq. 6.8).

# %%
dT = (dU @ W.T).tril()  # eq. 6.5
dA_gated = dT * b.T
check("eq. 6.5: dA, lower part", (Gamma * dA_gated).tril(), truth["A"].tril(), 1e-12)
dL = -(A.T @ (Gamma * dA_gated) @ A.T).tril(-1)  # eq. 6.6
N_textbook = b * dL
dbeta_textbook = (dT * Gamma * A).sum(0) + (dL * (K @ K.T)).sum(1)  # eq. 6.7
E_textbook = dA_gated * Gamma * A  # eq. 6.8
check("eq. 6.7: dbeta", dbeta_textbook, truth["beta"], 1e-12)
textbook = textbook_form(chunks, states, adjoints)
_ = check("eq. 6.6: N, against the library", N_textbook, textbook.d_gram[0], 1e-12)

# %% [markdown]
# ## 4 Through the triangular system, by its adjoint
#
# The better way does not differentiate the inverse at all. Write the system as $U = \mathrm{diag}(\beta) Z$ with $Z =
# W - (\Gamma \circ \mathrm{stril}(KK^\top))\,U$ and vary everything:
#
# $$ (I + \Gamma \circ L)\, \delta U = \mathrm{diag}(\delta\beta)\, Z + \mathrm{diag}(\beta) \big(\delta W -
# \delta(\Gamma \circ \mathrm{stril}(KK^\top))\, U\big) . $$
#
# The matrix on the left is that of the forward, so $Y$ is the gradient by the right side. Read it off:
#
# $$ F = \Gamma \circ \mathrm{stril}(Y U^\top), \qquad N = -\mathrm{diag}(\beta) F \qquad \text{(eq. 6.9)} $$
#
# $$ d\beta_i = \langle Y_i, Z_i\rangle = \langle Y_i, W_i\rangle - \sum_j (F \circ KK^\top)_{ij}
# \qquad \text{(eq. 6.10)} $$
#
# and $E = -\mathrm{diag}(\beta)(F \circ KK^\top)$ (eq. 6.11). One product of $C \times C \times V$ instead of that and
# two of $C \times C \times C$, nothing transposed, and **no division by $\beta$**.

# %%
F = Gamma * (Y @ U.T).tril(-1)  # eq. 6.9
N = -b * F
dbeta = (Y * W).sum(1) - (F * (K @ K.T)).sum(1)  # eq. 6.10
E = -b * F * (K @ K.T)  # eq. 6.11
check("eq. 6.9: the two N", N, N_textbook, 1e-12)
check("eq. 6.10: dbeta", dbeta, truth["beta"], 1e-12)
_ = check("eq. 6.11: E, against the library", E, adjoint_form(chunks, states, adjoints).pairs[0], 1e-12)


# %% [markdown]
# The two $E$ are *not* equal: they say how the loss depends on $\log\Gamma_{ij}$, once where it stands in front of the
# inverse, once where it stands in the system. A gate never changes a single $\Gamma_{ij}$, though. $g_t$ enters all
# those that reach from before token $t$ to $t$ or later, and summed over these the two agree:


# %%
def crossing(X):
    """Sum of X_ij over i >= t > j, for each t."""
    return torch.stack([X[t:, :t].sum() for t in range(C)])


check("sums of E over each boundary", crossing(E), crossing(E_textbook), 1e-11)
fig, axes = plt.subplots(1, 3, figsize=(10, 3.2))
norm = SymLogNorm(1e-3, vmin=-1, vmax=1)
for ax, (name, X) in zip(axes, {"textbook form": E_textbook, "adjoint form": E}.items(), strict=False):
    image = ax.imshow(X.tril(-1), cmap="RdBu_r", norm=norm)
    ax.set(title=f"E, {name}", xlabel="column j", ylabel="row i")
    ax.grid(False)
bar = fig.colorbar(image, ax=axes[1], ticks=[-1, -1e-2, 0, 1e-2, 1])
bar.ax.set_title("d loss / d log Γ", fontsize=8, pad=10)
axes[2].plot(crossing(E_textbook), linewidth=4, alpha=0.4, label="textbook")
axes[2].plot(crossing(E), label="adjoint", color="C1")
axes[2].set(title="summed over each boundary", xlabel="token t", ylabel="share of dg")
axes[2].legend()
plt.show()

# %% [markdown]
# ## 5 Queries, keys, gates
#
# $Q$ occurs in $O$ twice, $K$ in $W$, in $S'$, in $P$ and on both sides of $KK^\top$. With $dP = dO\,U^\top$ and $D =
# s\,\Gamma \circ dP$,
#
# $$ dQ = s\,\Lambda\, dO\, S^\top + D K \qquad \text{(eq. 6.12)} $$
#
# $$ dK = -\Lambda\, dV\, S^\top + \mathrm{diag}(\gamma_C/\gamma)\, U\, dS'^\top + D^\top Q + (N + N^\top) K \qquad
# \text{(eq. 6.13)} $$

# %%
dP = dO @ U.T
scores = s * Gamma * dP  # D
q_read = s * gamma * (dO @ S.T)
k_read = -gamma * (dV @ S.T)
k_write = late * (U @ dS_end.T)
dQ = q_read + scores @ K  # eq. 6.12
dK = k_read + k_write + scores.T @ Q + (N + N.T) @ K  # eq. 6.13
check("eq. 6.12: dQ", dQ, truth["q"], 1e-12)
_ = check("eq. 6.13: dK", dK, truth["k"], 1e-12)

# %% [markdown]
# A gate $g_t$ is in exactly those factors that carry something across the boundary in front of token $t$:
# $\Gamma_{ij}$ with $i \ge t > j$, $\gamma_i$ with $i \ge t$, $\gamma_C/\gamma_j$ with $j < t$, and $\gamma_C$. Each
# factor's logarithm gets gradient times value. Add them up:
#
# $$ dg_t = \sum_{i \ge t > j} (E + P \circ dP)_{ij} + \sum_{i \ge t} r_i + \sum_{j < t} w_j + \gamma_C \langle S,
# dS'\rangle \qquad \text{(eq. 6.14)} $$
#
# with $r_i$ what row $i$ reads from $S$ and $w_j$ what row $j$ leaves in $S'$. Kernels like the *row form* better (eq.
# 6.15): $dG_i = \langle q_i, dq_i\rangle + \langle k_i, dk_i\rangle - 2\langle k_i, n_i\rangle$, with $n_i$ the part
# of $dk_i$ from keys that write. It needs nothing but rows that are there anyway.

# %%
r = (Q * q_read).sum(1) + (K * k_read).sum(1)
w = (K * k_write).sum(1)
carried = gamma[-1] * (S * dS_end).sum()
boundary = torch.stack([r[t:].sum() + w[:t].sum() for t in range(C)])
dg = crossing(E + P * dP) + boundary + carried  # eq. 6.14
check("eq. 6.14: dg", dg, truth["g"], 1e-12)

n = k_write + scores.T @ Q + N.T @ K
dG = (Q * dQ).sum(1) + (K * dK).sum(1) - 2 * (K * n).sum(1)  # eq. 6.15
dG[-1] += (S_end * dS_end).sum()
_ = check("eq. 6.15: dg by rows", dG.flip(0).cumsum(0).flip(0), truth["g"], 1e-11)


# %% [markdown]
# Which one for a kernel? In exact arithmetic they are equal. In float32 the row form takes the difference of large
# sums: where strong gates leave hardly anything of the past, $dg$ is tiny and drowns. Below, the same chunk with ever
# stronger gates, all in float32 against float64.


# %%
def both_forms(gate, dtype):
    """dg of one chunk with this gate on every token, by eq. 6.14 and by eq. 6.15."""
    exact = testing.inputs(tokens=C, heads=1, value_heads=1, head_dim_k=D, head_dim_v=D, gate=gate, dtype=torch.float64)
    x = exact.to(dtype)
    layout = Layout.of(x.q, None, C)
    found = cut(layout, x.q, x.k, x.v, x.g, x.beta, s)
    start, end = x.initial_state[0, 0], x.dht[0, 0]
    states = state_chain(layout, found, x.initial_state.clone())
    adjoints = adjoint_chain(layout, found, x.do[:, :, 0], x.dht.clone())
    system = adjoint_form(found, states, adjoints)
    Q, K, dO = found.q[0], found.k[0], x.do[0, :, 0]
    U, N, Gamma, gamma, P = states.corrected[0], system.d_gram[0], found.decay[0], found.gamma[0], found.scores[0]
    dP = dO @ U.T
    D_ = s * Gamma * dP
    q_read, k_read = s * gamma * (dO @ start.T), -gamma * (adjoints.d_values[0] @ start.T)
    k_write = Gamma[-1][:, None] * (U @ end.T)
    dQ = q_read + D_ @ K
    n = k_write + D_.T @ Q + N.T @ K
    dK = k_read + n + N @ K
    r, w = (Q * q_read).sum(1) + (K * k_read).sum(1), (K * k_write).sum(1)
    pairs = crossing(system.pairs[0] + P * dP)
    sums = pairs + torch.stack([r[t:].sum() + w[:t].sum() for t in range(C)]) + gamma[-1] * (start * end).sum()
    dG = (Q * dQ).sum(1) + (K * dK).sum(1) - 2 * (K * n).sum(1)
    dG[-1] += (states.final[0, 0] * end).sum()
    return sums, dG.flip(0).cumsum(0).flip(0)


gates = [-0.01, -0.03, -0.1, -0.3, -1, -3, -6, -10, -15, -20]
errors = []
for gate in gates:
    exact, _ = both_forms(gate, torch.float64)
    errors.append([float((found - exact).norm() / exact.norm()) for found in both_forms(gate, torch.float32)])
by_sums, by_rows = zip(*errors, strict=True)
fig, ax = plt.subplots(figsize=(7, 3.2))
ax.plot([-x for x in gates], by_sums, "o-", label="sums over the boundary (eq. 6.14)")
ax.plot([-x for x in gates], by_rows, "o-", label="row form (eq. 6.15)")
ax.axhline(1, color="0.5", linestyle=":")
ax.set(xscale="log", yscale="log", xlabel="-g of every token", ylabel="relative error of dg in float32")
ax.set(title="A gradient that is small, and one that has drowned")
ax.legend()
plt.show()
assert max(by_sums) < 1e-5 < max(by_rows)

# %% [markdown]
# Does it matter? The gradient is small there, so its *absolute* error is not large, and a sum over a sequence is ruled
# by other tokens. But it is an error that no test with mild gates sees. The library's reference uses eq. 6.14; a
# kernel in the row form has to say what it gives up.
#
# ## 6 A whole sequence, and grouped heads
#
# Forward chain, backward chain, everything else: below, a sequence of several chunks and two value heads on one key
# head. $dQ$ and $dK$ are sums over the group. This is the structure that the kernels will have.


# %%
class Machine:
    """Runs the formulas; notes what crosses device memory, by name, and rounds as a GPU would if asked.

    Tensors in `on_chip[kernel]` are where they are needed already: to load or store them costs nothing.
    A product counts as "on the chain" when autograd says that it depends on the state handed in.
    """

    def __init__(self, rounding=False, on_chip=None):
        self.rounding, self.on_chip, self.kernel = rounding, on_chip or {}, None
        self.bytes, self.products, self.chained = Counter(), Counter(), Counter()

    def _pass(self, name, x, size):
        if name not in self.on_chip.get(self.kernel, ()):
            self.bytes[self.kernel] += size * x.numel()
        return x.bfloat16().float() if self.rounding and size == 2 else x

    def load(self, piece, names, size=2):
        found = [self._pass(name, piece[name], size) for name in names.split()]
        return found if len(found) > 1 else found[0]

    def store(self, piece, name, x, size=2):
        piece[name] = self._pass(name, x, size)

    def mm(self, a, b):
        self.products[self.kernel] += 1
        self.chained[self.kernel] += a.requires_grad or b.requires_grad
        return a.bfloat16().float() @ b.bfloat16().float() if self.rounding else a @ b


def gate_factors(G):
    """gamma [C, 1], Gamma [C, C], gamma_C / gamma [C, 1] of one chunk's prefix sums [C]."""
    upper = torch.ones(C, C).triu(1).bool()
    decay = (G[:, None] - G).masked_fill(upper, -torch.inf).exp()
    return G.exp()[:, None], decay, decay[-1][:, None]


def state_pass(m, pieces, S):
    """Chain 1, first chunk to last: the state S at the start of every chunk, and U."""
    m.kernel = "state chain"
    for x in pieces:
        K, V, A = m.load(x, "K V A")  # A is (Gamma o A) diag(beta), from the inverse kernel of the forward
        gamma, _, late = gate_factors(m.load(x, "G", size=4))
        m.store(x, "S", S)
        U = m.mm(A, V - gamma * m.mm(K, S))
        m.store(x, "U", U)
        S = gamma[-1] * S + m.mm(K.T, late * U)


def adjoint_pass(m, pieces, dS):
    """Chain 2, last chunk to first: the gradient dS' at the end of every chunk, and dV."""
    m.kernel = "adjoint chain"
    for x in reversed(pieces):
        Q, K, A, dO = m.load(x, "Q K A dO")
        gamma, Gamma, late = gate_factors(m.load(x, "G", size=4))
        m.store(x, "dS", dS)
        P = s * Gamma * m.mm(Q, K.T)
        dU = m.mm(P.T, dO) + late * m.mm(K, dS)  # eq. 6.1
        dV = m.mm(A.T, dU)  # eq. 6.2, 6.3: A carries beta
        m.store(x, "dV", dV)
        dS = gamma[-1] * dS + s * m.mm(Q.T, gamma * dO) - m.mm(K.T, gamma * dV)  # eq. 6.4
    return dS


def chunk_gradients(m, group):
    """All that is left, for one chunk of one key head and the value heads of its group: chunks in any order."""
    m.kernel = "chunk gradients"
    Q, K = m.load(group[0], "Q K")  # once for the group
    gram = m.mm(K, K.T)
    dQ, dK = 0, 0
    for x in group:
        V, dO, U, dV, S, dS = m.load(x, "V dO U dV S dS")
        beta, G = m.load(x, "beta G", size=4)
        gamma, Gamma, late = gate_factors(G)
        D = s * Gamma * m.mm(dO, U.T)
        N = -Gamma * m.mm(dV, U.T).tril(-1)  # eq. 6.9, as dV = diag(beta) Y
        q_read, k_read, k_write = s * gamma * m.mm(dO, S.T), -gamma * m.mm(dV, S.T), late * m.mm(U, dS.T)
        W = V - gamma * m.mm(K, S)
        dq = q_read + m.mm(D, K)  # eq. 6.12
        n = k_write + m.mm(D.T, Q) + m.mm(N.T, K)
        dk = k_read + n + m.mm(N, K)  # eq. 6.13
        # eq. 6.10 with Y = dV / beta: exact where beta is not 0; a kernel treats 0 apart (exercise 1)
        m.store(x, "dbeta", ((dV * W).sum(1) + (N * gram).sum(1)) / beta, size=4)
        dG = (Q * dq).sum(1) + (K * (dk - 2 * n)).sum(1)  # eq. 6.15
        S_end = gamma[-1] * S + m.mm(K.T, late * U)
        dG[-1] = dG[-1] + (S_end * dS).sum()
        m.store(x, "dg", dG.flip(0).cumsum(0).flip(0), size=4)
        dQ, dK = dQ + dq, dK + dk
    m.store(group[0], "dQ", dQ)
    m.store(group[0], "dK", dK)


def split_backward(m, made, scale=s):
    """Gradients of one key head and its group, `made` of [1, T, 1 or R, ...], by the three passes."""
    global s
    s, before = scale, s
    R, chunks = made.v.shape[2], made.q.shape[1] // C
    made = made.to(torch.float32 if m.rounding else torch.float64)
    found = cut(Layout.of(made.q, None, C), made.q, made.k, made.v, made.g, made.beta, s)
    mixing = found.mixing.view(chunks, R, C, C)
    heads = [[] for _ in range(R)]
    for j, c in itertools.product(range(R), range(chunks)):
        rows = slice(c * C, c * C + C)
        piece = {"Q": made.q[0, rows, 0], "K": made.k[0, rows, 0], "V": made.v[0, rows, j], "dO": made.do[0, rows, j]}
        piece |= {"A": mixing[c, j], "beta": made.beta[0, rows, j], "G": made.g[0, rows, j].cumsum(0)}
        heads[j].append(piece)
    d_initial = []
    for j, pieces in enumerate(heads):
        state_pass(m, pieces, made.initial_state[0, j])
        d_initial.append(adjoint_pass(m, pieces, made.dht[0, j]))
    for c in range(chunks):
        chunk_gradients(m, [pieces[c] for pieces in heads])
    s = before

    def tokens(name, heads):
        return torch.stack([torch.cat([piece[name] for piece in pieces]) for pieces in heads], 1)[None]

    gradients = {"dq": tokens("dQ", heads[:1]), "dk": tokens("dK", heads[:1]), "dv": tokens("dV", heads)}
    gradients |= {"dg": tokens("dg", heads), "dbeta": tokens("dbeta", heads)}
    return gradients | {"dinitial_state": torch.stack(d_initial)[None]}


grouped = testing.inputs(tokens=4 * C, heads=1, value_heads=2, head_dim_k=D, head_dim_v=D, dtype=torch.float64)
mine = split_backward(Machine(), grouped)
library = reference.backward(**grouped.arguments(), do=grouped.do, dht=grouped.dht)
for name, gradient in mine.items():
    check(f"two chains, then chunks: {name}", gradient, getattr(library, name), 1e-10)
loop = testing.outcome(testing.oracle64, grouped)
_ = check("library against autograd of the token loop: dk", library.dk, loop["dk"], 1e-10)


# %% [markdown]
# ## 7 Why cut it like this
#
# - **The two chains do not need each other.** $S$ runs forwards and needs $K, V$; $dS$ runs backwards and needs $dO$
#   and no $S$. So both run at the same time, in one launch, each on its own SMs.
# - **Nothing else is sequential.** Given $S, dS', U, dV$ of a chunk, its gradients depend on no other chunk: a third
#   kernel takes chunks in any order, on every SM, however few heads there are.
# - **The third kernel goes by key head.** It loops over the value heads of the group and adds $dQ$ and $dK$ in
#   registers. No atomic additions, so the sum has one order and the result is bitwise the same each time, and $dQ$ and
#   $dK$ are written once.
#
# What must be in memory between the kernels are $S$ and $dS'$ of every chunk, in 16 bits. Two alternatives: save $S$
# and $U$ in the forward (no state chain now, but the memory is held until the backward, as long as all other layers
# take); or compute a chunk's gradients inside the adjoint chain ($dS'$ and $dV$ stay on the chip, but then all
# products are sequential, and value heads of a group must add up $dQ$ and $dK$ through memory, not even counted here).
# The same functions run all three; the machine is told what is on the chip, and counts.


# %%
D_real = 128
real = testing.inputs(tokens=2 * C, heads=1, value_heads=4, head_dim_k=D_real, head_dim_v=D_real, dtype=torch.float64)
real.dht.requires_grad_()  # so that what hangs on the adjoint chain shows
parts = 2 * 4  # chunks times value heads


def walk(on_chip=None):
    machine = Machine(on_chip=on_chip)
    split_backward(machine, real, D_real**-0.5)
    return machine


ours, inside = walk(), walk({"adjoint chain": {"dS"}, "chunk gradients": {"Q", "K", "dO", "G", "dV", "dS"}})
saving = walk({"state chain": {"K", "V", "A", "G"}})  # the forward has these anyway: left are the writes of S and U
saving.bytes["forward, extra"] = saving.bytes.pop("state chain")
real.dht.requires_grad_(False)
real.initial_state.requires_grad_()
forwards = walk()  # and now what hangs on the state chain
designs = {
    "two chains, then chunks": ours,
    "S and U saved by the forward": saving,
    "gradients inside the chain": inside,
}

kernels = ("state chain", "adjoint chain", "chunk gradients", "forward, extra")
print(f"KiB of memory traffic a chunk and value head, K = V = {D_real}, four value heads a key head")
print(f"{'':30}" + "".join(f"{name:>17}" for name in kernels) + f"{'sum':>8}")
for name, machine in designs.items():
    cells = [machine.bytes[kernel] / parts / 1024 for kernel in kernels]
    print(f"{name:30}" + "".join(f"{cell:17.1f}" for cell in cells) + f"{sum(cells):8.1f}")
products = {kernel: ours.products[kernel] / parts for kernel in kernels[:3]}
print("\nproducts a chunk:          ", ", ".join(f"{kernel} {number:g}" for kernel, number in products.items()))
chained = {
    "state chain": forwards.chained["state chain"] / parts,
    "adjoint chain": ours.chained["adjoint chain"] / parts,
}
chained["gradients inside"] = (ours.chained["adjoint chain"] + ours.chained["chunk gradients"]) / parts
print("of them one after the other:", ", ".join(f"{kernel} {number:g}" for kernel, number in chained.items()))

fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.3), width_ratios=[3, 2])
start = torch.zeros(len(designs))
for kernel in kernels:
    width = torch.tensor([machine.bytes[kernel] / parts / 1024 for machine in designs.values()])
    left.barh(list(designs), width, left=start, label=kernel)
    start = start + width
left.set(xlabel="KiB a chunk and value head", title="Memory traffic")
left.invert_yaxis()
left.legend(fontsize=8, loc="lower right")
left.set_xlim(0, 560)
right.barh(list(chained), list(chained.values()), color=["C0", "C1", "C5"], height=0.6)
right.set(xlabel="products a chunk that wait for it", title="Work on the chain")
right.invert_yaxis()
plt.show()

# %% [markdown]
# The extra traffic of two chains is the price of a short chain and a parallel rest. With 64 long chains on a GPU one
# could fuse more; with 8, as on one of eight GPUs of a tensor-parallel model, the chain is everything, and what is not
# on it is nearly free. Drawn as time, for one value head and six chunks, with every product one unit long:

# %%
state, adjoint, rest = (round(ours.products[kernel] / parts) for kernel in kernels[:3])
fig, ax = plt.subplots(figsize=(9, 3.2))
for c in range(6):
    boxes = [(0, state * c, state, f"S{c}"), (1, adjoint * c, adjoint, f"dS{5 - c}")]
    boxes.append((2 + c, 6 * adjoint, rest, f"gradients of chunk {c}"))
    for color, (row, left, width, label) in enumerate(boxes):
        ax.barh(row, width - 0.2, left=left, color=f"C{color}")
        ax.text(left + width / 2 - 0.1, row, label, ha="center", va="center", color="white", fontsize=8)
ax.set_yticks(range(8), ["SM 0: state chain", "SM 1: adjoint chain", *[f"SM {c}" for c in range(6)]], fontsize=8)
ax.set(xlabel="products, one after the other", title="Two chains at once, then all chunks at once")
ax.invert_yaxis()
ax.grid(False)
plt.show()

# %% [markdown]
# ## 8 In 16 bits
#
# The kernels round the operands of products to bf16, and so does the machine on request. The gradients' errors,
# against float64, of the split above and of the textbook form with the same rounding:


# %%
def both_N(made, m):
    """N through the inverse (eq. 6.5, 6.6) and through the adjoint (eq. 6.9), by the products of machine m."""
    layout = Layout.of(made.q, None, C)
    x = cut(layout, made.q, made.k, made.v, made.g, made.beta, s)
    states = state_chain(layout, x, made.initial_state.clone())
    y = adjoint_chain(layout, x, layout.gather(made.do, made.q.dtype), made.dht.clone())
    textbook, adjoint = [], []
    for W, U, dU, Y, b, Gamma, A in zip(
        states.residual, states.corrected, y.d_corrected, y.multiplier, x.beta, x.decay, x.inverse, strict=True
    ):
        dA = m.mm(dU, W.T).tril() * b.T
        textbook.append(-b * m.mm(m.mm(A.T, Gamma * dA), A.T).tril(-1))
        adjoint.append(-b * Gamma * m.mm(Y, U.T).tril(-1))
    return {"textbook": torch.stack(textbook), "adjoint": torch.stack(adjoint)}


rows = {}
for recipe in ("bench", "correlated"):
    many = testing.inputs(
        tokens=8 * C, heads=1, value_heads=2, head_dim_k=D, head_dim_v=D, dtype=torch.float64, recipe=recipe
    )
    many = many.to(torch.bfloat16).to(torch.float64)  # what bf16 can hold, so that only the computation rounds
    exact = reference.backward(**many.arguments(), do=many.do, dht=many.dht)
    rounded = split_backward(Machine(rounding=True), many)
    rows[recipe] = {name: testing.compare(x, getattr(exact, name)).relative_l2 for name, x in rounded.items()}
    exact_N = both_N(many, Machine())
    for name, N in both_N(many.to(torch.float32), Machine(rounding=True)).items():
        rows[recipe][f"N, {name}"] = testing.compare(N, exact_N[name]).relative_l2
check("eq. 6.6 and 6.9: N, similar keys", exact_N["adjoint"], exact_N["textbook"], 1e-10)

fig, ax = plt.subplots(figsize=(9, 3.2))
for index, (recipe, found) in enumerate(rows.items()):
    positions = [x + 0.4 * index - 0.2 for x in range(len(found))]
    bars = ax.bar(positions, list(found.values()), width=0.38, label=recipe)
    ax.bar_label(bars, [f"{1e3 * x:.1f}" for x in found.values()], fontsize=7)
ax.set_xticks(range(len(found)), [name.replace("dinitial_state", "dS0") for name in found])
ax.set(ylabel="relative error", title="Errors of the gradients with bf16 operands (labels: thousandths)")
ax.margins(y=0.12)
ax.legend(title="recipe")
plt.show()
_ = check("dv with bf16 operands", rounded["dv"], exact.dv, 2e-2)

# %% [markdown]
# $dg$ in the row form is the worst, as section 5 foretold. For keys that are alike the adjoint form has the more
# accurate $N$: the textbook form multiplies by a rounded $A^\top$ from both sides, the adjoint form by nothing.

# %% [markdown]
# ## 9 The public function
#
# What a user gets when calling `backward()`, on this machine: small inputs against autograd of the token loop in
# float64; on a Hopper GPU also the time at real size.

# %%
torch.set_default_dtype(torch.float32)
cfg = testing.notebook_config()
small = testing.inputs(
    tokens=300,
    heads=1,
    value_heads=2,
    head_dim_k=cfg.head_dim,
    head_dim_v=cfg.head_dim,
    dtype=cfg.dtype,
    device=cfg.device,
)
exact = testing.outcome(testing.oracle64, small)
for name, gradient in testing.outcome(flashqla.chunk_gated_delta_rule, small).items():
    check(f"chunk_gated_delta_rule: {name}", gradient, exact[name], 1e-5 if cfg.device.type == "cpu" else 2e-2)
results = {}
if cfg.needs_hopper():
    large = cfg.inputs(tokens=4096).requires_grad()
    arguments, times = large.arguments(), []
    for _ in range(6):
        o, _ = flashqla.chunk_gated_delta_rule(**arguments)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        o.backward(large.do)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    results["backward_ms, 16/64 1x4096"] = sorted(times)[2]
    print(f"backward of 16/64 heads, 4096 tokens: {sorted(times)[2]:.2f} ms")
torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## Exercises
#
# 1. With $\beta_i = 0$ token $i$ writes nothing, yet the loss depends on $\beta_i$: training must be able to leave 0.
#    Show that eq. 6.10 gives the right $d\beta_i$ where $\langle dV_i, Z_i\rangle/\beta_i$ gives NaN.

# %% jupyter={"source_hidden": true}
# Solution 1
zeroed = testing.inputs(tokens=C, heads=1, value_heads=1, head_dim_k=D, head_dim_v=D, dtype=torch.float64)
zeroed.beta[:, ::3] = 0
exact = testing.outcome(testing.oracle64, zeroed)["dbeta"]
by_division = split_backward(Machine(), zeroed)["dbeta"]
print("NaN by division:", int(by_division.isnan().sum()), "of", C, "tokens; exact gradient there is not 0:")
print("  ", [round(float(x), 3) for x in exact[0, ::3, 0][:6]])
_ = check("exercise 1", reference.backward(**zeroed.arguments(), do=zeroed.do, dht=zeroed.dht).dbeta, exact, 1e-10)

# %% [markdown]
# 2. The scale $s$ is a number that one may want to learn. What is its gradient, in terms of $O$ and $dO$ alone?

# %% jupyter={"source_hidden": true}
# Solution 2: O is s times something without s, so ds = <dO, O> / s
scale = torch.tensor(s, requires_grad=True)
o = reference.recurrent(**made.arguments(), scale=scale).output
_ = check("exercise 2", (dO * O).sum() / s, torch.autograd.grad((o * made.do).sum(), scale)[0], 1e-12)

# %% [markdown]
# 3. $g_t$ of the first token of a sequence that starts from 0 decays nothing. Which terms of eq. 6.14 are left for it,
#    and are they exactly 0 in floating point?

# %% jupyter={"source_hidden": true}
# Solution 3: no pair reaches across, S = 0 kills r and gamma_C <S, dS'>, and no j is before token 0
fresh = testing.inputs(tokens=C, heads=1, value_heads=1, dtype=torch.float64, initial_state=False)
dg = reference.backward(**fresh.arguments(), do=fresh.do, dht=fresh.dht).dg
assert float(dg[0, 0, 0]) == 0.0
_ = check("exercise 3", dg, testing.outcome(testing.oracle64, fresh)["dg"], 1e-10)

# %% [markdown]
# Next: [07 Context parallel](07_context_parallel.ipynb), where a long sequence is cut so that its chain fills the GPU.
