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
# # 03 Algebraic rewrites: the same numbers for less work
#
# The chunk form of notebook 02 is correct. This notebook compares four ways to compute it, and counts
# what each version costs: Tensor Core operations, other arithmetic, exponentials, and bytes to and from device memory
# (HBM). Nothing is counted by hand. Each version is written **once**, as a Python function over an abstract machine,
# and three machines run it:
#
# - `Exact` computes it in float64, to check it against the library;
# - `Rounding` computes it as a GPU would, operands of matrix products rounded to bf16, to measure the error;
# - `Counting` computes nothing. Its matrices are only symbolic shapes, and it writes down every operation.
#
# The proofs are [derivations 4](../derivations/04_rewrites.md), and for version D [section
# 8.1](../derivations/08_hopper_schedule.md). Symbols are those of notebook 02.

# %%
from dataclasses import dataclass, field

import matplotlib.pyplot as plt
import sympy
import torch

from flashqla import reference, testing
from flashqla.reference.chunked import cut
from flashqla.reference.layout import Layout
from flashqla.testing import check

plt.style.use("./flashqla.mplstyle")
torch.set_default_dtype(torch.float64)

C, D, T = 64, 128, 512  # chunk, K = V, tokens
made = testing.inputs(tokens=T, heads=1, value_heads=1, head_dim_k=D, head_dim_v=D, dtype=torch.bfloat16)
made = made.to(torch.float64)  # numbers that bf16 can hold, so that later only the computation rounds
scale = D**-0.5
library = reference.chunked(**made.arguments(), output_final_state=True)
chunks = cut(Layout.of(made.q, None, C), made.q, made.k, made.v, made.g, made.beta, scale)

# %% [markdown]
# ## 1 The gate leaves the inverse
#
# The system of a chunk is $(I + \Gamma \circ L)\,U = \mathrm{diag}(\beta)\,W$. Because
# $\Gamma_{ij} = \gamma_i / \gamma_j$ below the diagonal,
#
# $$ I + \Gamma \circ L = \Lambda (I + L) \Lambda^{-1} \quad\Rightarrow\quad
# (I + \Gamma \circ L)^{-1} = \Lambda A \Lambda^{-1} = \Gamma \circ A \qquad \text{(eq. 4.1)}, $$
#
# with $A = (I + L)^{-1}$, which is lower triangular like $L$. $\Lambda^{-1}$ is notation: the code multiplies by
# $\Gamma$, whose entries never exceed 1. Why it pays: $A$ depends on keys and $\beta$ only. The inverse need not wait
# for the gate, and its entries have one range whatever the gate does, so that a 16-bit format can hold them (notebook
# 04). `mixing` is the library's name for $(\Gamma \circ A)\,\mathrm{diag}(\beta)$, which turns $W$ into $U$.

# %%
Q, K, V, beta = chunks.q[0], chunks.k[0], chunks.v[0], chunks.beta[0]
Gamma, gamma, A = chunks.decay[0], chunks.gamma[0], chunks.inverse[0]
L = (beta * (K @ K.T)).tril(-1)
check("eq. 4.1: similarity", (gamma * (torch.eye(C) + L)) / gamma.T, torch.eye(C) + Gamma * L, 1e-12)
check("eq. 4.1: inverse", torch.linalg.inv(torch.eye(C) + Gamma * L), Gamma * A, 1e-12)
_ = check("eq. 3.4: mixing matrix", Gamma * A * beta.T, chunks.mixing[0], 1e-12)

# %% [markdown]
# ## 2 The machines
#
# A version of the chunk form is a function `form(m, Q, K, V, G, beta, S, c)` that returns $O$, the next state and the
# next `c`. `m` is the machine: `m.mm(a, b, onto)` is a matrix product, which Tensor Cores can add onto a matrix at no
# cost; `m.exp` is an exponential, `m.inverse` the inverse of $I + L$; `m.load` and `m.store` move a matrix from and to
# HBM. Ordinary `+`, `-`, `*` and masks are arithmetic of the other units, the CUDA cores. The state `S` stays on chip
# unless a version stores it; only version D uses the number `c`, which is 1 for the others. `prove` runs a version on
# the machine `Exact` and holds it against the library.


# %%
class Exact:
    """float64; loads and stores do nothing."""

    def mm(self, a, b, onto=0):
        return onto + a @ b

    def load(self, x, bytes=2):
        return x

    store = load

    def exp(self, x):
        return x.exp()

    def inverse(self, L):
        eye = torch.eye(len(L), dtype=L.dtype)
        return torch.linalg.solve_triangular(L, eye, upper=False, unitriangular=True)

    def mask(self, x):
        return x.masked_fill(torch.ones_like(x).triu(1).bool(), -torch.inf)

    def decay(self, G):
        """Gamma, eq. 2.2: masked before exp."""
        return self.exp(self.mask(G - G.T))


class Rounding(Exact):
    """As on a GPU: operands of products and what is stored in 2 bytes become bf16; sums and the rest are float32."""

    def mm(self, a, b, onto=0):
        return onto + a.bfloat16().float() @ b.bfloat16().float()

    def load(self, x, bytes=2):
        return x.bfloat16().float() if bytes == 2 else x.float()

    store = load


# %%
def run(form, m, inputs, dtype):
    """All chunks of the one head of `inputs`; the state and c are carried on."""
    q, k, v, g, beta = (getattr(inputs, name)[0, :, 0].to(dtype) for name in testing.PER_TOKEN)
    S, c, outputs = inputs.initial_state[0, 0].to(dtype), 1.0, []
    for i in range(0, len(q), C):
        rows = slice(i, i + C)
        G = g[rows, None].cumsum(0)
        if c * float(G[-1].exp()) < 2.0**-60:  # for version D, section 6: a new frame
            S, c = c * S, 1.0
        O, S, c = form(m, q[rows], k[rows], v[rows], G, beta[rows, None], S, c)
        c = float(c)
        outputs.append(O)
    return torch.cat(outputs), c * S


def prove(name, form):
    """A version in float64, chunk by chunk, against the library."""
    O, S_T = run(form, Exact(), made, torch.float64)
    check(f"version {name}: output", O, library.output[0, :, 0], 1e-12)
    check(f"version {name}: state", S_T, library.final_state[0, 0], 1e-12)


# %% [markdown]
# ## 3 Version A, the WY form as separate kernels
#
# As in the first papers, and the order in which a general library likes to run it: each kernel does one thing, and
# what the next one needs goes through HBM. Multiply eq. 3.4 out: with the mixing matrix $T = (\Gamma \circ
# A)\,\mathrm{diag}(\beta)$, $U = T (V - \Lambda K S) = U_V - W_K S$, where $W_K = T \Lambda K$ and $U_V = T V$ need no
# state. That makes the chain short, but these two matrices are as large as $K$ and $V$, and the state of every chunk
# is written out so that the output can be a kernel of its own.


# %%
def wy_kernels(m, Q, K, V, G, beta, S, c):
    # kernel 1: the inverse
    k, b, Gamma = m.load(K), m.load(beta, 4), m.decay(m.load(G, 4))
    A = m.inverse((b * m.mm(k, k.T)).tril(-1))
    mixing = m.store(Gamma * A * b.T)
    # kernel 2: W_K and U_V
    mixing, k, v, gamma = m.load(mixing), m.load(K), m.load(V), m.exp(m.load(G, 4))
    W_K, U_V = m.store(m.mm(mixing, gamma * k)), m.store(m.mm(mixing, v))
    # kernel 3: the state chain
    W_K, U_V, k, g = m.load(W_K), m.load(U_V), m.load(K), m.load(G, 4)
    start = m.store(S)
    U = U_V - m.mm(W_K, start)
    late = m.exp(g[-1:] - g)  # gamma_C / gamma
    S_next = m.mm(k.T, late * U, onto=m.exp(g[-1:]) * S)
    U = m.store(U)
    # kernel 4: the output
    q, k, U, start, g = m.load(Q), m.load(K), m.load(U), m.load(start), m.load(G, 4)
    P = scale * m.decay(g) * m.mm(q, k.T)
    O = m.mm(P, U, onto=scale * m.exp(g) * m.mm(q, start))
    return m.store(O), S_next, c


prove("A", wy_kernels)

# %% [markdown]
# ## 4 Version B, fused
#
# Equations 3.3 to 3.6 in one kernel, as other fast packages do it: $W$, $U$, $P$ and $S$ never leave the chip. Only
# the inverse, with $\beta$ folded in, is a kernel of its own, because it runs for all chunks at once. $T (V - \Lambda K
# S)$ is not multiplied out: one product with $T$, where version A needed $T \Lambda K$ and $T V$.


# %%
def fused(m, Q, K, V, G, beta, S, c):
    k, b = m.load(K), m.load(beta, 4)
    A = m.store(m.inverse((b * m.mm(k, k.T)).tril(-1)) * b.T)  # A diag(beta)
    # the fused kernel
    q, k, v, g, A = m.load(Q), m.load(K), m.load(V), m.load(G, 4), m.load(A)
    Gamma, gamma, late = m.decay(g), m.exp(g), m.exp(g[-1:] - g)
    W = v - gamma * m.mm(k, S)  # eq. 3.3
    U = m.mm(Gamma * A, W)  # eq. 3.4
    P = scale * Gamma * m.mm(q, k.T)
    O = m.mm(P, U, onto=scale * gamma * m.mm(q, S))  # eq. 3.5
    S_next = m.mm(k.T, late * U, onto=m.exp(g[-1:]) * S)  # eq. 3.6
    return m.store(O), S_next, c


prove("B", fused)

# %% [markdown]
# ## 5 Version C, two products on the chain
#
# In version B the next state waits for three products in a row: $KS$, then $U$, then $K^\top U$. With $A_b =
# A\,\mathrm{diag}(\beta)$, eq. 3.4 in 3.6 is $S' = \gamma_C S + K^\top\, \mathrm{diag}(\gamma_C/\gamma)\, (\Gamma \circ
# A_b)\, W$. Entry by entry $(\gamma_C/\gamma_i)\, \Gamma_{ij} = \gamma_C/\gamma_j$, so the decay moves from the rows of
# $A_b$ to its columns, and what stands left of it needs no state:
#
# $$ S' = \gamma_C S + X Y_v, \qquad X = K^\top A_b, \qquad Y_v = \mathrm{diag}(\gamma_C/\gamma)\, W =
# \mathrm{diag}(\gamma_C/\gamma)\, V - \gamma_C K S \qquad \text{(eq. 4.2, 4.3)} . $$
#
# Two products are left on the chain. The output needs no $U$ either, because by the similarity of section 1 $(\Gamma
# \circ \mathrm{tril}(QK^\top))\,(\Gamma \circ A_b) = \Gamma \circ (\mathrm{tril}(QK^\top)\, A_b)$:
#
# $$ O = s \Lambda Q S + B W, \qquad B = s\, \Gamma \circ \big(\mathrm{tril}(QK^\top)\, A_b\big)
# \qquad \text{(eq. 4.2, 4.4)} . $$
#
# The price is one more product, of two $C \times C$ matrices.


# %%
def two_product_chain(m, Q, K, V, G, beta, S, c):
    k, b = m.load(K), m.load(beta, 4)
    A = m.store(m.inverse((b * m.mm(k, k.T)).tril(-1)) * b.T)  # A_b
    q, k, v, g, A = m.load(Q), m.load(K), m.load(V), m.load(G, 4), m.load(A)
    Gamma, gamma, late, last = m.decay(g), m.exp(g), m.exp(g[-1:] - g), m.exp(g[-1:])
    X = m.mm(k.T, A)  # eq. 4.2
    B = scale * Gamma * m.mm(m.mm(q, k.T).tril(), A)
    prediction = m.mm(k, S)
    S_next = m.mm(X, late * v - last * prediction, onto=last * S)  # eq. 4.3
    O = m.mm(B, v - gamma * prediction, onto=scale * gamma * m.mm(q, S))  # eq. 4.4
    return m.store(O), S_next, c


prove("C", two_product_chain)
mine = run(two_product_chain, Exact(), made, torch.float64)[0]
_ = check("eq. 4.2 to 4.4: library's chain", mine, reference.chain(**made.arguments()).output[0, :, 0], 1e-12)

# %% [markdown]
# ## 6 Version D, a frame without gates
#
# The similarity of section 1 removed the gate from the inverse. The same idea removes it from everything. Let the
# kernel keep not $S$ but $\tilde S$ with $S = c\,\tilde S$, where the number $c$ is the decay accumulated so far, and
# put $U = c\,\Lambda U'$ into equations 3.3 to 3.6. (A prime on $A, W, U$ says: of this frame. On $S$ and $c$ it means
# the next chunk's, as before. Keys have unit length here, so the $r$ of eq. 8.1 is 1.)
#
# $$ c \Lambda U' = \Lambda A \Lambda^{-1} \mathrm{diag}(\beta)\,(V - c \Lambda K \tilde S)
# \quad\Rightarrow\quad U' = \underbrace{A\,\mathrm{diag}(\beta)}_{A'}\;
# \underbrace{\big(\mathrm{diag}(f)\, V - K \tilde S\big)}_{W'}, \quad f = \frac{1}{\gamma c}. $$
#
# On the state's side $\Lambda^{-1}$ and $\Lambda$ cancel. On the value's side one factor a token is left. Likewise
# $\Gamma_{ij}\gamma_j = \gamma_i$ turns the output into $O = \mathrm{diag}(h)\,(Q\tilde S + \mathrm{tril}(QK^\top)
# U')$ with $h = s c \gamma$, and $(\gamma_C / \gamma_j)\,\gamma_j = \gamma_C$ the state into $\tilde S' = \tilde S +
# K^\top U'$ with $c' = \gamma_C c$ (eq. 8.1 to 8.6). No score, no $U$ and no state is scaled any more, and no $C
# \times C$ exponentials exist. First each step on real numbers, with a frame $c = 1/8$:

# %%
c = 0.125
S = made.initial_state[0, 0]  # the state itself; in the frame it is S / c
S_frame = S / c
W = V - gamma * (K @ S)  # eq. 3.3 to 3.6, as in notebook 02
U = chunks.mixing[0] @ W
O = scale * gamma * (Q @ S) + chunks.scores[0] @ U
S_next = gamma[-1] * S + K.T @ (Gamma[-1][:, None] * U)

f, h, c_next = 1 / (gamma * c), scale * c * gamma, float(gamma[-1]) * c  # eq. 8.1
A_frame = A * beta.T  # eq. 8.2
W_frame = f * V - K @ S_frame  # eq. 8.3
U_frame = A_frame @ W_frame  # eq. 8.4
check("eq. 8.3: W' = W / (gamma c)", W_frame, W / (gamma * c), 1e-12)
check("eq. 8.4: U' = U / (gamma c)", U_frame, U / (gamma * c), 1e-12)
check("eq. 8.5", h * (Q @ S_frame + (Q @ K.T).tril() @ U_frame), O, 1e-12)
_ = check("eq. 8.6", c_next * (S_frame + K.T @ U_frame), S_next, 1e-12)


# %% [markdown]
# The price: $\Lambda^{-1}$ is no longer mere notation, $1/(\gamma c)$ grows while the gate decays. bf16 and float32
# reach $2^{126}$; the kernel keeps $c$ above $2^{-60}$ and otherwise starts a new frame: $\tilde S$ becomes $c \tilde
# S$, and $c$ becomes 1 (eq. 8.7 with $e = 0$; exercise 3 is about $e = 1$). `run` of section 2 does that before the
# chunk. Rounding does not mind large numbers: all terms of a sum carry the same factor, and relative errors do not
# depend on it. One chunk's own decay stays far from the limit with the gates used here.


# %%
def gate_free(m, Q, K, V, G, beta, S, c):
    k, b = m.load(K), m.load(beta, 4)
    A = m.store(m.inverse((b * m.mm(k, k.T)).tril(-1)) * b.T)  # eq. 8.2
    q, k, v, g, A = m.load(Q), m.load(K), m.load(V), m.load(G, 4), m.load(A)
    f, h = m.exp(-g) * (1 / c), m.exp(g) * (scale * c)  # eq. 8.1
    U = m.mm(A, f * v - m.mm(k, S))  # eq. 8.3, 8.4
    O = h * m.mm(m.mm(q, k.T).tril(), U, onto=m.mm(q, S))  # eq. 8.5
    S_next = m.mm(k.T, U, onto=S)  # eq. 8.6
    return m.store(O), S_next, m.exp(g[-1:]) * c


prove("D", gate_free)

# %% [markdown]
# ## 7 Count
#
# The third machine. Its matrices know their shape and which *tape* to write on, a list of operations. Row or column
# vectors have a dimension 1 and broadcast. Multiplying by a Python number counts like any other elementwise operation.
# Rounding a computed matrix to 16 bits, for a product or to store it, is CUDA-core work too, one conversion an element.

# %%
size_C, size_K, size_V = sympy.symbols("C K V", positive=True)


@dataclass
class Tape:
    """A list of (operation, shape) and the totals that follow from it."""

    rows: list = field(default_factory=list)

    def write(self, kind, name, shape, amount):
        self.rows.append((kind, name, shape, sympy.expand(amount)))

    def total(self, kind):
        return sympy.expand(sum(amount for k, _, _, amount in self.rows if k == kind))


@dataclass
class Shape:
    """A matrix that is only its shape; arithmetic on it goes to the tape."""

    rows: sympy.Expr
    columns: sympy.Expr
    tape: Tape
    rounded: bool = False

    def _elementwise(self, other, name):
        rows, columns = self.rows, self.columns
        if isinstance(other, Shape):  # broadcasting: 1 gives way
            rows, columns = (other.rows if rows == 1 else rows), (other.columns if columns == 1 else columns)
        self.tape.write("cuda", name, (rows, columns), rows * columns)
        return Shape(rows, columns, self.tape)

    def __add__(self, other):
        return self._elementwise(other, "+")

    def __sub__(self, other):
        return self._elementwise(other, "-")

    def __mul__(self, other):
        return self._elementwise(other, "*")

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self):
        return self  # a sign bit

    def tril(self, diagonal=0):
        return self._elementwise(None, "mask")

    def cumsum(self, axis):
        return self._elementwise(None, "prefix sum")

    @property
    def T(self):
        return Shape(self.columns, self.rows, self.tape, self.rounded)

    def __getitem__(self, index):
        assert index == slice(-1, None)  # the last row, all that the forms ask for
        return Shape(sympy.Integer(1), self.columns, self.tape, self.rounded)


# %%
class Counting(Exact):
    """Computes nothing, records everything."""

    def round(self, x):
        if not x.rounded:  # once is enough
            x.tape.write("cuda", "round", (x.rows, x.columns), x.rows * x.columns)
            x.rounded = True

    def mm(self, a, b, onto=None):
        self.round(a)
        self.round(b)
        assert a.columns == b.rows, (a, b)
        a.tape.write("tensor", "product", (a.rows, a.columns, b.columns), 2 * a.rows * a.columns * b.columns)
        return Shape(a.rows, b.columns, a.tape)

    def load(self, x, bytes=2):
        x.tape.write("hbm", f"load {bytes} B", (x.rows, x.columns), bytes * x.rows * x.columns)
        return Shape(x.rows, x.columns, x.tape, rounded=bytes == 2)

    def store(self, x, bytes=2):
        if bytes == 2:
            self.round(x)
        x.tape.write("hbm", f"store {bytes} B", (x.rows, x.columns), bytes * x.rows * x.columns)
        return Shape(x.rows, x.columns, x.tape, rounded=bytes == 2)

    def mask(self, x):
        return x.tril()

    def exp(self, x):
        x.tape.write("exp", "exp", (x.rows, x.columns), x.rows * x.columns)
        return Shape(x.rows, x.columns, x.tape)

    def inverse(self, L):
        """Notebook 04: substitution in blocks of 16, then two products for each merge (eq. 5.1, 5.2)."""
        n = L.rows
        L.tape.write("cuda", "substitution, 16 x 16", (n, 16), n / 16 * sum(i * (i + 1) for i in range(16)))
        for block in (16, 32):
            merges = n / (2 * block)
            L.tape.write("tensor", f"merge {block}", (block, block, block), merges * 2 * 2 * block**3)
        return Shape(n, n, L.tape)


# %% [markdown]
# Now the same four functions on it. One chunk of one value head; $Q$ and $K$ are counted as if no other value head
# shared them. Totals are polynomials in $C$, $K$ and $V$ (only the inverse's share, $85\,C$ and $2560\,C$, is for
# $C = 64$). Before you run it, guess which version has the most of what. Version D's tape, then all totals:

# %%
FORMS = {
    "A  WY, separate kernels": wy_kernels,
    "B  fused": fused,
    "C  two-product chain": two_product_chain,
    "D  gate-free frame": gate_free,
}
KINDS = {
    "tensor": "Tensor Core operations",
    "cuda": "CUDA-core operations",
    "exp": "Exponentials",
    "hbm": "HBM bytes",
}
REAL = {size_C: 64, size_K: 128, size_V: 128}


def count(form):
    tape = Tape()
    one = sympy.Integer(1)
    Q, K, V = (Shape(size_C, columns, tape) for columns in (size_K, size_K, size_V))
    form(Counting(), Q, K, V, Shape(size_C, one, tape), Shape(size_C, one, tape), Shape(size_K, size_V, tape), 0.5)
    return tape


tapes = {name: count(form) for name, form in FORMS.items()}
for kind, operation, shape, amount in tapes["D  gate-free frame"].rows:
    print(f"{kind:7}{operation:24}{' x '.join(map(str, shape)):16}{amount}")

# %%
for kind, title in KINDS.items():
    print(f"\n{title} of a chunk")
    for name, tape in tapes.items():
        total = tape.total(kind)
        print(f"  {name:26}{int(total.subs(REAL)):>12,}   {total}")

# %% [markdown]
# A test of the counting itself: the products of each version, by PyTorch's own operation counter.

# %%
from torch.utils.flop_counter import FlopCounterMode

for name, form in FORMS.items():
    with FlopCounterMode(display=False) as counter:  # does not see inside the inverse
        run(form, Exact(), made, torch.float64)
    merges = sum(amount for kind, operation, _, amount in tapes[name].rows if operation.startswith("merge"))
    mine = torch.tensor(float((tapes[name].total("tensor") - merges).subs(REAL) * (T // C)))
    check(f"{name}: products, my count and PyTorch's", mine, torch.tensor(float(counter.get_total_flops())), 0)

# %%
fig, axes = plt.subplots(1, 4, figsize=(12, 3.2), sharey=True)
units = {"tensor": (1e6, "million"), "cuda": (1e3, "thousand"), "exp": (1e3, "thousand"), "hbm": (1024, "KiB")}
for ax, (kind, title) in zip(axes, KINDS.items(), strict=True):
    unit, word = units[kind]
    amounts = [float(tape.total(kind).subs(REAL)) / unit for tape in tapes.values()]
    bars = ax.barh(list(tapes), amounts, color=["C5", "C1", "C3", "C0"])
    ax.bar_label(bars, fmt="%.3g", padding=3)
    ax.set(title=title, xlabel=f"{word} a chunk", xlim=(0, 1.25 * max(amounts)))
    ax.grid(axis="y")
axes[0].invert_yaxis()
plt.show()

# %% [markdown]
# How to read it. From A to B most bytes go, and with them the reason why the first kernels were slow. C buys a
# shorter chain with more arithmetic. D has the products of B, but fewer of the other operations and hardly any
# exponentials. What the totals mean on an H200, all of its SMs together, with the rates that were measured on one
# (`flashqla/bench_peers.py`); a kernel that overlaps both perfectly would need the longer of the two times:

# %%
from flashqla.bench_peers import BYTES_PER_MS, FLOPS_PER_MS

for name, tape in tapes.items():
    products = float(tape.total("tensor").subs(REAL)) / FLOPS_PER_MS * 1e6
    traffic = float(tape.total("hbm").subs(REAL)) / BYTES_PER_MS * 1e6
    print(f"{name:26} products {products:5.1f} ns    traffic {traffic:5.1f} ns    a chunk and value head")

# %% [markdown]
# In models two to four value heads share $Q$ and $K$, which then come from the L2 cache, so for B to D the two times
# are closer than they look here. Counts are not times, though: what a chain waits for and what overlaps decides the
# rest. [Derivations 8.3](../derivations/08_hopper_schedule.md) logs which ideas helped on the machine and which did
# not; version D alone, without a better schedule around it, did not.
#
# ## 8 Does it round worse?
#
# A rewrite may be exact on paper and worse in bf16. `Rounding` rounds what a kernel would round: operands of products
# and what is stored. Errors are relative to float64, for gates as a trained layer has them, for none, and for strong
# ones, and for keys that nearly coincide.

# %%
cases = {
    "usual gate": dict(),
    "no gate": dict(gate=0.0),
    "strong gate, -0.3": dict(gate=-0.3),
    "similar keys": dict(recipe="correlated"),
}
errors = {name: [] for name in FORMS}
sizes = dict(tokens=T, heads=1, value_heads=1, head_dim_k=D, head_dim_v=D, dtype=torch.bfloat16)
for options in cases.values():
    drawn = testing.inputs(**sizes, **options).to(torch.float64)
    exact = reference.chunked(**drawn.arguments()).output[0, :, 0]
    for name, form in FORMS.items():
        errors[name].append(testing.compare(run(form, Rounding(), drawn, torch.float32)[0], exact).relative_l2)

print(f"{'relative error of the output':30}" + "".join(f"{case:>20}" for case in cases))
for name, row in errors.items():
    print(f"{name:30}" + "".join(f"{error:20.2e}" for error in row))

fig, ax = plt.subplots(figsize=(9, 3.2))
for i, (name, row) in enumerate(errors.items()):
    positions = [x + 0.2 * (i - 1.5) for x in range(len(cases))]
    ax.bar(positions, row, width=0.18, label=name, color=["C5", "C1", "C3", "C0"][i])
ax.set_xticks(range(len(cases)), list(cases))
ax.set(ylabel="relative error of O", title="bf16 operands, float32 sums, against float64")
ax.set_ylim(0, 1.35 * max(map(max, errors.values())))
ax.legend(ncols=4, fontsize=8, loc="upper center")
plt.show()
rounded = run(gate_free, Rounding(), made, torch.float32)[0]
_ = check("eq. 8.1 to 8.6 in bf16", rounded, library.output[0, :, 0], 1e-2)

# %% [markdown]
# All four are within a few percent of each other where gates are mild, so the rewrites cost no precision: what counts
# is how often a number is rounded on its way, and that hardly changes. Under a strong gate D is a little worse: $W$ is
# then nearly $V$, which came in bf16 and loses nothing, but $\mathrm{diag}(f)\,V$ must be rounded. Keys that nearly
# coincide are harder for all of them, because corrections then almost cancel what they correct.
#
# ## Exercises
#
# 1. Someone proposes to multiply $Q$ by $h$ before the product instead of scaling $O$ after it. Count it.


# %% jupyter={"source_hidden": true}
# Solution 1
def scaled_queries(m, Q, K, V, G, beta, S, c):
    """Solution 1: as many multiplications where K = V, but the scaled queries must be rounded once more."""
    k, b = m.load(K), m.load(beta, 4)
    A = m.store(m.inverse((b * m.mm(k, k.T)).tril(-1)) * b.T)
    q, k, v, g, A = m.load(Q), m.load(K), m.load(V), m.load(G, 4), m.load(A)
    q = m.exp(g) * (scale * c) * q
    U = m.mm(A, m.exp(-g) * (1 / c) * v - m.mm(k, S))
    O = m.mm(m.mm(q, k.T).tril(), U, onto=m.mm(q, S))
    return m.store(O), m.mm(k.T, U, onto=S), m.exp(g[-1:]) * c


check("exercise 1", run(scaled_queries, Exact(), made, torch.float64)[0], library.output[0, :, 0], 1e-12)
for form in (gate_free, scaled_queries):
    print(f"{form.__name__:16}{count(form).total('cuda')}")

# %% [markdown]
# 2. Version D saves exponentials. How many does B need at $C = 128$ per token, compared with D?

# %% jupyter={"source_hidden": true}
# Solution 2
for name in ("B  fused", "D  gate-free frame"):
    per_token = sympy.expand(tapes[name].total("exp") / size_C)
    print(f"{name:22}{per_token}  =  {float(per_token.subs({size_C: 128})):.2f}")

# %% [markdown]
# 3. With gates of -5 a token a chunk decays by $e^{-320}$, and no frame can hold that. What does version D return, and
#    what does equation 8.7 do about it?

# %% jupyter={"source_hidden": true}
# Solution 3: 1 / gamma is infinite
strong = testing.inputs(**sizes, gate=-5.0).to(torch.float64)
broken = run(gate_free, Rounding(), strong, torch.float32)[0]
print("elements of the output that are not finite:", int((~broken.isfinite()).sum()), "of", broken.numel())
exact = reference.chunked(**strong.arguments()).output[0, :, 0]
check("version B, gates of -5", run(fused, Exact(), strong, torch.float64)[0], exact, 1e-12)
print("eq. 8.7 with e = 1 is version B: such a chunk keeps its gates")

# %% [markdown]
# Next: [04 The inverse](04_inverse.ipynb).
