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
# # 04 The inverse of a triangular matrix, and how not to compute it
#
# Every chunk needs $A = (I + L)^{-1}$ with $L$ strictly lower triangular, $64 \times 64$ (eq. 3.1, 3.2). It is less
# than two percent of the arithmetic (counted in notebook 03) and the part that fits a GPU worst: substitution goes row
# by row, each waiting for the last. This notebook builds the blockwise inverse that the kernel uses, counts it, shows
# why its entries stay small, and compares its rounding errors with a popular alternative that looks faster.

# %%
import matplotlib.pyplot as plt
import torch

from flashqla import testing
from flashqla.reference.chunked import cut
from flashqla.reference.layout import Layout
from flashqla.testing import check

plt.style.use("./flashqla.mplstyle")
torch.set_default_dtype(torch.float64)

C = 64


def systems(recipe, chunks=8, dim=64, seed=0):
    """L [chunks, C, C], unit keys [chunks, C, K], beta [chunks, C, 1] and the library's inverse."""
    made = testing.inputs(
        tokens=chunks * C,
        heads=1,
        value_heads=1,
        head_dim_k=dim,
        head_dim_v=dim,
        recipe=recipe,
        dtype=torch.float64,
        seed=seed,
    )
    view = cut(Layout.of(made.q, None, C), made.q, made.k, made.v, made.g, made.beta, None)
    return view.beta * view.gram, view.k, view.beta, view.inverse  # eq. 3.1


L, k, beta, library = systems("bench")
hard_L, hard_k, hard_beta, hard_library = systems("correlated")
identity = torch.eye(C)

# %% [markdown]
# The "bench" recipe has random unit keys. "correlated" has keys that nearly coincide (cosine about 0.9) and $\beta$
# close to 1, so that $L$ is far from 0. A kernel must take both. Proofs: [derivations 5](../derivations/05_inverse.md).
#
# ## 1 Forward substitution
#
# Row $i$ of $(I + L) A = I$ reads $A_i + \sum_{j<i} L_{ij} A_j = e_i$, hence
#
# $$ A_i = e_i - \sum_{j<i} L_{ij} A_j \qquad \text{(eq. 5.1)} $$


# %%
def substitution(L):
    """Eq. 5.1 for a batch [..., n, n]."""
    n = L.shape[-1]
    A = torch.eye(n, dtype=L.dtype).expand_as(L).clone()
    for i in range(1, n):
        A[..., i, :i] = -(L[..., i, None, :i] @ A[..., :i, :i])[..., 0, :]
    return A


check("eq. 5.1", substitution(L), library, 1e-12)
_ = check("eq. 5.1, similar keys", substitution(hard_L), hard_library, 1e-12)

# %% [markdown]
# ## 2 Two halves
#
# Cut the matrix in four. The inverse of a block triangular matrix needs only the inverses of its diagonal blocks and
# two matrix products:
#
# $$ \begin{pmatrix} L_1 & 0 \\ N & L_2 \end{pmatrix}^{-1} =
# \begin{pmatrix} A_1 & 0 \\ -A_2 N A_1 & A_2 \end{pmatrix} \qquad \text{(eq. 5.2)} $$
#
# (Here $L_1, L_2$ include the unit diagonal.) Multiply the two matrices to see it. The halves can be halved again.
# The kernel stops at $16 \times 16$, where a warp does the substitution, and then merges $16 \to 32 \to 64$ on Tensor
# Cores. Fifteen dependent steps and four products replace 63 dependent steps.


# %%
def blockwise(L, block=16, mm=torch.matmul):
    """Eq. 5.1 on diagonal blocks, then eq. 5.2 until one block is left; mm multiplies."""
    n = L.shape[-1]
    if n == block:
        return substitution(L)
    half = n // 2
    A_1 = blockwise(L[..., :half, :half], block, mm)
    A_2 = blockwise(L[..., half:, half:], block, mm)
    corner = -mm(A_2, mm(L[..., half:, :half], A_1))  # eq. 5.2
    top = torch.cat([A_1, torch.zeros_like(corner)], dim=-1)
    return torch.cat([top, torch.cat([corner, A_2], dim=-1)], dim=-2)


for block in (8, 16, 32):
    check(f"eq. 5.2, blocks of {block}", blockwise(L, block), library, 1e-12)
check("eq. 5.2, similar keys", blockwise(hard_L), hard_library, 1e-12)

fig, axes = plt.subplots(1, 3, figsize=(10, 3.3))
for ax, size in zip(axes, (16, 32, 64), strict=True):
    same_block = torch.arange(C)[:, None] // size == torch.arange(C) // size
    image = ax.imshow((library[0] - identity) * same_block, cmap="RdBu_r", vmin=-0.3, vmax=0.3)
    for edge in range(16, C, 16):
        ax.axhline(edge - 0.5, color="0.6", linewidth=0.6)
        ax.axvline(edge - 0.5, color="0.6", linewidth=0.6)
    ax.grid(False)
    ax.set(title=f"known with blocks of {size}", xlabel="column j")
axes[0].set_ylabel("row i")
fig.colorbar(image, ax=axes, label="entry of A - I (random keys)")
plt.show()

# %% [markdown]
# ## 3 Counting
#
# The counts come from running the code: `mm` is replaced by a product that notes its size, and substitution by one that
# notes its length. "Dependent steps" is the longest chain of rows or products in which each waits for the previous one.


# %%
def count(block, n=C):
    """(multiply-adds in substitution, multiply-adds in products, dependent steps)."""
    products = []

    def noting(a, b):
        products.append(a.shape[-2] * a.shape[-1] * b.shape[-1])
        return a @ b

    blockwise(torch.zeros(n, n), block, noting)
    rows = n // block * sum(i * (i + 1) // 2 for i in range(block))  # row i: A_j has j + 1 entries, j < i
    levels = (n // block).bit_length() - 1
    return rows, sum(products), block - 1 + 2 * levels


blocks = (1, 2, 4, 8, 16, 32, 64)
rows, products, steps = zip(*map(count, blocks), strict=True)
fig, (left, right) = plt.subplots(1, 2)
labels = [str(block) for block in blocks]
left.bar(labels, [x / 1e3 for x in rows], label="substitution (CUDA cores)", color="C1")
left.bar(
    labels, [x / 1e3 for x in products], bottom=[x / 1e3 for x in rows], label="products (Tensor Cores)", color="C0"
)
left.set(xlabel="block size", ylabel="thousand multiply-adds", title="Work", ylim=(0, 118))
left.legend(fontsize=8)
right.bar(labels, steps, color=["C0" if block == 16 else "C5" for block in blocks])
right.set(xlabel="block size", ylabel="dependent steps", title="Length of the chain")
plt.show()
for row in zip(blocks, rows, products, steps, strict=True):
    print("blocks of {:2}: {:6,} in substitution, {:6,} in products, {:2} dependent steps".format(*row))
_ = check("eq. 5.2: a full inverse by halves alone", blockwise(L, 1), library, 1e-12)

# %% [markdown]
# Smaller blocks would be shorter still, but a Tensor Core instruction works on $16 \times 16$ tiles: below that,
# products run mostly on zeros. That is why 16.
#
# ## 4 Why the entries stay bounded
#
# Inverses of triangular matrices can explode: with all entries of $L$ equal to $-1$ the last entry of the inverse is
# $2^{62}$. Not here. Put $L_{ij} = \beta_i k_i^\top k_j$ into eq. 5.1: $A_{ij} = -\beta_i k_i^\top x_i$ with $x_i =
# \sum_{j \le m < i} A_{mj} k_m$. This sum starts as $x_{j+1} = k_j$ and at each row gains $A_{ij} k_i = -\beta_i k_i
# k_i^\top x_i$, so $x_{i+1} = (I - \beta_i k_i k_i^\top)\, x_i$, and with later factors on the left
#
# $$ A_{ij} = -\beta_i\, k_i^\top \Big[ \prod_{j<m<i} (I - \beta_m k_m k_m^\top) \Big] k_j . $$
#
# $A_{ij}$ asks what is left of a write under $k_j$ when token $i$ looks, after all the corrections in between. For
# unit keys and $0 \le \beta \le 2$ each factor is a contraction, so $|A_{ij}| \le \beta_i$.

# %%
i, j = 50, 20
product = torch.eye(k.shape[-1])
for m in range(j + 1, i):
    product = (torch.eye(k.shape[-1]) - hard_beta[0, m] * torch.outer(hard_k[0, m], hard_k[0, m])) @ product
entry = -hard_beta[0, i, 0] * hard_k[0, i] @ product @ hard_k[0, j]
check("entry (50, 20) as a product", entry, hard_library[0, i, j], 1e-9)

below = torch.ones(C, C).tril(-1).bool()
for name, (A, b) in {"random keys": (library, beta), "similar keys": (hard_library, hard_beta)}.items():
    ratio = (A.abs() / b)[:, below].max()
    print(f"{name:13} largest |A_ij| / beta_i = {ratio:.3f}")
    assert ratio <= 1 + 1e-9
exploding = substitution(-torch.ones(C, C).tril(-1))
print(f"without such keys: largest entry {exploding.max():.3g} = 2^{exploding.max().log2():.0f}")

# %% [markdown]
# ## 5 The tempting alternative
#
# $L$ is nilpotent, $L^{64} = 0$, so the geometric series ends, and it factors:
#
# $$ (I + L)^{-1} = (I - L)(I + L^2)(I + L^4)(I + L^8)(I + L^{16})(I + L^{32}) . $$
#
# Ten products, all of them full-size, no substitution. It is exact in exact arithmetic. But the bound of section 4
# holds for the inverse, *not* for the powers of $L$:


# %%
def by_squaring(L, mm=torch.matmul):
    """The factored geometric series."""
    eye = torch.eye(L.shape[-1], dtype=L.dtype)
    A, power = eye - L, L
    for _ in range(L.shape[-1].bit_length() - 2):
        power = mm(power, power)
        A = mm(A, eye + power)
    return A


check("geometric series, random keys", by_squaring(L), library, 1e-12)
error = testing.compare(by_squaring(hard_L), hard_library).relative_l2
print(f"geometric series, similar keys, float64: relative error {error:.1e}")

fig, ax = plt.subplots(figsize=(7, 3.2))
for name, matrix, color in (("random keys", L, "C0"), ("similar keys", hard_L, "C4")):
    power, sizes = torch.eye(C).expand_as(matrix), []
    for _ in range(C - 1):
        power = power @ matrix
        sizes.append(power.abs().max())
    ax.plot(range(1, C), sizes, label=name, color=color)
ax.axhline(65504, color="0.5", linestyle=":")
ax.annotate("largest float16", (24, 65504), xytext=(0, 4), textcoords="offset points", color="0.4")
ax.set(yscale="log", ylim=(1e-12, 1e20), xlabel="power n", ylabel=r"largest entry of $L^n$", title="Powers of L")
ax.legend(loc="lower center")
plt.show()

# %% [markdown]
# With similar keys the powers reach $10^{16}$ and must cancel down to entries below 1, for which even float64 has no
# digits left. The experiment: the same algorithms with operands of every product rounded to a short format and sums in
# float32, as Tensor Cores do. (The tallest bars are cut at $10^4$.)


# %%
def rounded_to(dtype):
    def mm(a, b):
        return a.to(dtype).float() @ b.to(dtype).float()

    return mm


algorithms = {
    "substitution": lambda L, mm: substitution(L),
    "blocks of 16": lambda L, mm: blockwise(L, 16, mm),
    "squaring": lambda L, mm: by_squaring(L, mm),
}
formats = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
fig, axes = plt.subplots(1, 2, sharey=True)
measured = {}
for ax, (case, matrix, exact) in zip(
    axes, (("random keys", L, library), ("similar keys", hard_L, hard_library)), strict=True
):
    for index, (name, algorithm) in enumerate(algorithms.items()):
        errors = []
        for dtype in formats.values():
            A = algorithm(matrix.float(), rounded_to(dtype))
            found = testing.compare(A, exact)
            errors.append(float("inf") if found.disagreements else found.relative_l2)
        measured[case, name] = errors
        positions = [x + 0.27 * (index - 1) for x in range(len(formats))]
        bars = ax.bar(positions, [min(error, 1e4) for error in errors], width=0.25, label=name)
        ax.bar_label(bars, ["inf" if error == float("inf") else f"{error:.0e}" for error in errors], fontsize=7)
    ax.set_xticks(range(len(formats)), list(formats))
    ax.set(yscale="log", ylim=(1e-8, 1e5), xlabel="format of the operands", title=case)
axes[0].set_ylabel("relative error of A")
axes[0].legend(fontsize=8)
plt.show()
for (case, name), errors in measured.items():
    print(f"{case:13} {name:13}" + "".join(f"{f:>10} {e:8.1e}" for f, e in zip(formats, errors, strict=True)))
check("eq. 5.2 with float16 products", blockwise(L.float(), 16, rounded_to(torch.float16)), library, 1e-3)
_ = check("eq. 5.2, similar keys", blockwise(hard_L.float(), 16, rounded_to(torch.float16)), hard_library, 1e-3)

# %% [markdown]
# (Substitution has no products; it runs in float32 in every column.) Blocks of 16 stay within the rounding of their
# format in both cases, squaring fails for similar keys even in float32. Note that **float16 is better than bfloat16**
# here: its three more bits of mantissa are free, because the bound on the entries means that its small range is never
# left. The kernel therefore inverts in float16 even when the model runs in bfloat16, and rounds $A$ to the model's
# format at the end.
#
# ## Exercises
#
# 1. Show that eq. 5.2 holds by multiplying the block matrices, with halves of unequal size.

# %% jupyter={"source_hidden": true}
# Solution 1
n = 40
top, bottom, corner = L[0, :n, :n], L[0, n:, n:], L[0, n:, :n]
A_1, A_2 = substitution(top), substitution(bottom)
inverse = torch.zeros(C, C)
inverse[:n, :n], inverse[n:, n:], inverse[n:, :n] = A_1, A_2, -A_2 @ corner @ A_1
_ = check("exercise 1", inverse @ (identity + L[0]), identity, 1e-12)

# %% [markdown]
# 2. Keys need not have unit norm: scale them by numbers $n_i$ between $10^{-3}$ and $10^{3}$ while $\beta_i n_i^2$
#    stays what it was. Show that $A_{ij}$ becomes $A_{ij}\, n_j / n_i$, so that the inverse can be taken of unit keys
#    and be rescaled.

# %% jupyter={"source_hidden": true}
# Solution 2: L_ij = beta_i n_i n_j c_ij = (n_j / n_i) (beta_i n_i^2) c_ij is a similarity by diag(n)
norms = 10 ** (6 * torch.rand(C, 1) - 3)
scaled = (beta[0] / norms**2 * (norms * k[0]) @ (norms * k[0]).T).tril(-1)
_ = check("exercise 2", substitution(scaled), library[0] * norms.T / norms, 1e-12)

# %% [markdown]
# 3. One could skip $A$ and solve for $U$ directly, $(I + \Gamma \circ L)\,U = \mathrm{diag}(\beta)\,W$. With $V =
#    128$ columns, how many multiply-adds is that, compared to inverting and multiplying, and which of them run on
#    Tensor Cores?

# %% jupyter={"source_hidden": true}
# Solution 3: substitution over V columns has C (C - 1) / 2 * V multiply-adds, none on Tensor Cores and 63 steps in a
# row, on the chain of states; the inverse is made beforehand for all chunks, and the chain keeps one product.
columns = 128
print(f"solving:    {C * (C - 1) // 2 * columns:,} on CUDA cores, for every state")
print(f"inverting:  {rows[4]:,} on CUDA cores, {products[4]:,} on Tensor Cores, before the chain starts")
print(f"            {C * C * columns:,} on Tensor Cores, for every state")

# %% [markdown]
# You now know all the mathematics of the forward kernel. Next: [05 The forward kernel](05_forward_kernel.ipynb), which
# puts it on the machine.
