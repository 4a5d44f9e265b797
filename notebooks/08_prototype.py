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
# # 08 Prototype a variant, with tests that come for free
#
# You have an idea for another rule: another gate, another write. The way from the idea to something trustworthy is
# always the same. Write the token loop, which *is* the rule. Derive a chunk form. Let tests be generated from the
# loop. Then change a kernel. This notebook is a template for that: copy it, replace the rule, keep the rest.
#
# Four variants pass through it: no gate, $\beta$ up to 2, other chunk sizes, and a decay for every key channel, which
# needs real changes.

# %%
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import matplotlib.pyplot as plt
import torch

import flashqla
from flashqla import testing
from flashqla.testing import check

plt.style.use("./flashqla.mplstyle")
torch.set_default_dtype(torch.float64)
cfg = testing.notebook_config()
K, V = 24, 16
s = K**-0.5

# %% [markdown]
# ## 1 The template
#
# A rule is a `step`: the state and one token in, the state and an output out. Nothing else defines it. A `chunk` is a
# claim: the same, for any number of tokens at once. One head is enough; batches, heads and packing come with the
# library's machinery later.


# %%
@dataclass(frozen=True)
class Rule:
    """A recurrence and a chunk form of it.

    step: (S [K, V], q [K], k [K], v [V], g [] or [K], beta []) -> (S, o [V]), the definition.
    chunk: the same for tokens [C, ...] at once.
    gate: "none", "head" (g is [T]) or "channel" (g is [T, K]); beta_max: the largest write strength.
    library: the same by this package, or None where it does not have the rule.
    """

    name: str
    step: Callable
    chunk: Callable
    gate: str = "head"
    beta_max: float = 1.0
    library: Callable | None = None


def token_loop(rule, S, *tokens):
    """The definition: outputs [T, V] and the last state."""
    outputs = []
    for token in zip(*tokens, strict=True):
        S, o = rule.step(S, *token)
        outputs.append(o)
    return torch.stack(outputs), S


def in_chunks(rule, S, *tokens, size=64):
    """The chunk form, `size` tokens at a time."""
    outputs = []
    for parts in zip(*(x.split(size) for x in tokens), strict=True):
        S, o = rule.chunk(S, *parts)
        outputs.append(o)
    return torch.cat(outputs), S


def draw(rule, T, seed=0, gate=None, dtype=torch.float64):
    """A state and T tokens for a rule; `gate` sets every log decay."""
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.nn.functional.normalize(torch.randn(2, T, K, generator=generator, dtype=dtype), dim=-1)
    v, S = (torch.randn(n, V, generator=generator, dtype=dtype) for n in (T, K))
    shape = (T, K) if rule.gate == "channel" else (T,)
    g = -0.2 * torch.rand(shape, generator=generator, dtype=dtype)
    g = torch.zeros(T, dtype=dtype) if rule.gate == "none" else g if gate is None else torch.full_like(g, gate)
    beta = rule.beta_max * torch.rand(T, generator=generator, dtype=dtype)
    return S, q, k, v, g, beta


# %% [markdown]
# Tests follow from what every such rule must obey. Each is a function that raises; `generate` makes the list.


# %%
def generate(rule):
    """(name, test) pairs for any rule."""

    def same(mine, truth, limit=1e-10):
        for a, b in zip(mine, truth, strict=True):
            found = testing.compare(a, b)
            if not found.relative_l2 <= limit or found.disagreements:
                raise AssertionError(found.report())

    def equals_loop(T, size=64, gate=None):
        data = draw(rule, T, seed=T, gate=gate)
        same(in_chunks(rule, *data, size=size), token_loop(rule, *data))

    def cut_anywhere(at):
        S, *tokens = draw(rule, 150)
        first, S_1 = in_chunks(rule, S, *(x[:at] for x in tokens))
        second, S_2 = in_chunks(rule, S_1, *(x[at:] for x in tokens))
        same((torch.cat([first, second]), S_2), in_chunks(rule, S, *tokens))

    def nothing_happens():
        S, *tokens = draw(rule, 70)
        _, after = in_chunks(rule, S, *(torch.cat([x, torch.zeros_like(x)]) for x in tokens))
        same([after], [in_chunks(rule, S, *tokens)[1]])

    def causal():
        S, q, k, v, g, beta = draw(rule, 130)
        changed = v.clone()
        changed[100:] += 1
        same([in_chunks(rule, S, q, k, changed, g, beta)[0][:100]], [in_chunks(rule, S, q, k, v, g, beta)[0][:100]], 0)

    def linear_in_values():
        S, q, k, v, g, beta = draw(rule, 100)
        S_2, _, _, v_2, _, _ = draw(rule, 100, seed=9)
        both = in_chunks(rule, S + 3 * S_2, q, k, v + 3 * v_2, g, beta)
        one, two = in_chunks(rule, S, q, k, v, g, beta), in_chunks(rule, S_2, q, k, v_2, g, beta)
        same(both, [a + 3 * b for a, b in zip(one, two, strict=True)])

    def gradients():
        found = []
        for run in (in_chunks, token_loop):
            data = [x.requires_grad_() for x in draw(rule, 90)]
            o, S = run(rule, *data)
            weights = torch.linspace(-1, 1, o.numel()).view_as(o), torch.linspace(1, 2, S.numel()).view_as(S)
            leaves = data[:4] + data[5:] if rule.gate == "none" else data
            found.append(torch.autograd.grad((o * weights[0]).sum() + (S * weights[1]).sum(), leaves))
        same(*found, 1e-9)

    def reset():
        S, q, k, v, g, beta = draw(rule, 120)
        g[70] = -1e4
        same(in_chunks(rule, S, q, k, v, g, beta), token_loop(rule, S, q, k, v, g, beta))

    def single_precision():
        exact = token_loop(rule, *draw(rule, 256))
        data = [x.float() for x in draw(rule, 256)]
        loop, chunks = token_loop(rule, *data), in_chunks(rule, *data)
        for a, b, truth in zip(chunks, loop, exact, strict=True):
            error, allowed = testing.compare(a, truth).relative_l2, 4 * testing.compare(b, truth).relative_l2
            assert error <= allowed, f"float32: {error:.1e}, 4 times the loop's error is {allowed:.1e}"

    tests = [(f"equals the token loop, {T} tokens", partial(equals_loop, T)) for T in (1, 63, 64, 65, 200)]
    tests += [(f"chunks of {size}", partial(equals_loop, 130, size)) for size in (1, 16, 32, 128)]
    tests += [(f"cut at token {at}", partial(cut_anywhere, at)) for at in (1, 32, 77)]
    tests += [("tokens that do nothing", nothing_happens), ("causal", causal), ("linear in values", linear_in_values)]
    tests += [("gradients", gradients), ("single precision", single_precision)]
    if rule.gate != "none":
        tests += [(f"g = {gate} everywhere", partial(equals_loop, 100, 64, gate)) for gate in (-3.0, -20.0)]
        tests.append(("a hard reset inside a chunk", reset))
    if rule.library is not None:
        data = draw(rule, 200)
        tests.append(("equals the library", lambda: same(in_chunks(rule, *data), rule.library(*data))))
    return tests


def verdicts(rule):
    """Test name -> "" or what is wrong."""
    found = {}
    for name, test in generate(rule):
        try:
            test()
            found[name] = ""
        except AssertionError as error:
            found[name] = str(error)
    return found


def pass_all(rule):
    """Run the generated tests; raise on the first failure, else say how many there were."""
    found = verdicts(rule)
    for name, wrong in found.items():
        assert not wrong, f"{rule.name}: {name}: {wrong}"
    print(f"ok  {rule.name}: {len(found)} generated tests")


# %% [markdown]
# The library's own rule in this form, as a first customer (eq. 1.1 to 1.3 and 3.1 to 3.6):


# %%
def delta_step(S, q, k, v, g, beta):
    S = g.exp() * S
    S = S + torch.outer(k, beta * (v - S.T @ k))
    return S, s * S.T @ q


def masked_exp(difference):
    """exp of the lower triangle of [C, C, ...]; the upper one never reaches exp."""
    upper = torch.ones(difference.shape[:2]).triu(1).bool()
    return difference.masked_fill(upper.view(*upper.shape, *[1] * (difference.ndim - 2)), -torch.inf).exp()


def delta_chunk(S, q, k, v, g, beta):
    G = g.cumsum(0)
    Gamma, gamma, b = masked_exp(G[:, None] - G), G.exp()[:, None], beta[:, None]
    lower = Gamma * (b * (k @ k.T)).tril(-1)
    U = torch.linalg.solve_triangular(
        torch.eye(len(q), dtype=q.dtype) + lower, b * (v - gamma * (k @ S)), upper=False, unitriangular=True
    )
    o = s * gamma * (q @ S) + s * Gamma * (q @ k.T) @ U
    return gamma[-1] * S + k.T @ (Gamma[-1][:, None] * U), o


def by_library(S, q, k, v, g, beta):
    """The public function on one head."""
    tokens = [x[None, :, None] for x in (q, k, v, g, beta)]
    o, S = flashqla.chunk_gated_delta_rule(*tokens, scale=s, initial_state=S[None, None], output_final_state=True)
    return o[0, :, 0], S[0, 0]


gated = Rule("gated delta rule", delta_step, delta_chunk, library=by_library)
pass_all(gated)

# %% [markdown]
# Tests that cannot fail are worthless. Break the chunk form in ways people break it, and see which tests notice:


# %%
def without_mask(S, q, k, v, g, beta):
    """Gamma as a quotient: exp(G_i) / exp(G_j), masked afterwards."""
    G = g.cumsum(0)
    Gamma, gamma, b = (G.exp()[:, None] / G.exp()).tril(), G.exp()[:, None], beta[:, None]
    lower = Gamma * (b * (k @ k.T)).tril(-1)
    U = torch.linalg.solve(torch.eye(len(q), dtype=q.dtype) + lower, b * (v - gamma * (k @ S)))
    return gamma[-1] * S + k.T @ (Gamma[-1][:, None] * U), s * gamma * (q @ S) + s * Gamma * (q @ k.T) @ U


def reads_before_writing(S, q, k, v, g, beta):
    """The scores without their diagonal."""
    S_next, o = delta_chunk(S, q, k, v, g, beta)
    G = g.cumsum(0)
    gamma, b = G.exp()[:, None], beta[:, None]
    lower = masked_exp(G[:, None] - G) * (b * (k @ k.T)).tril(-1)
    U = torch.linalg.solve(torch.eye(len(q), dtype=q.dtype) + lower, b * (v - gamma * (k @ S)))
    return S_next, o - s * (q * k).sum(1, keepdim=True) * U


def state_of_first_row(S, q, k, v, g, beta):
    """The state decays by the first token's gate instead of the whole chunk's."""
    S_next, o = delta_chunk(S, q, k, v, g, beta)
    G = g.cumsum(0)
    return S_next + (G[0].exp() - G[-1].exp()) * S, o


def sees_the_future(S, q, k, v, g, beta):
    """Scores without a mask."""
    S_next, o = delta_chunk(S, q, k, v, g, beta)
    return S_next, o + s * (q @ k.T).triu(1) @ (beta[:, None] * v)


def clipped(S, q, k, v, g, beta):
    """A clamp against overflow that somebody left in."""
    return delta_chunk(S, q, k, v.clamp(-2, 2), g, beta)


def leaks(S, q, k, v, g, beta):
    """A state that fades a little with every chunk."""
    S_next, o = delta_chunk(S, q, k, v, g, beta)
    return 0.999 * S_next, o


broken = {
    "quotient of\nexponentials": without_mask,
    "reads before\nwriting": reads_before_writing,
    "state decays\ntoo little": state_of_first_row,
    "scores\nnot masked": sees_the_future,
    "values\nclipped": clipped,
    "state leaks": leaks,
}
table = {name: verdicts(replace(gated, name=name, chunk=chunk)) for name, chunk in broken.items()}
names = list(next(iter(table.values())))
failed = torch.tensor([[bool(table[rule][name]) for rule in table] for name in names])
assert bool(failed.any(0).all()), "a broken chunk form passed"
assert bool(failed.any(1).all()), "a test noticed nothing"

fig, ax = plt.subplots(figsize=(9, 5))
ax.imshow(failed, cmap="Reds", vmin=0, vmax=2.8, aspect="auto")
ax.set_xticks(range(len(table)), list(table), fontsize=9)
ax.set_yticks(range(len(names)), names, fontsize=8)
for row, column in failed.nonzero().tolist():
    ax.text(column, row, "fails", ha="center", va="center", fontsize=7)
ax.set_title("Which test notices which mistake")
ax.grid(False)
plt.show()

# %% [markdown]
# The quotient passes everything with mild gates, on which a prototype is usually tried. Strong gates and the reset
# find it. `causal` and `linear in values` fail for one mistake each, and thereby name it: a test of a law says more
# than one more size.
#
# ## 2 No gate, $\beta$ up to 2, another chunk size
#
# Without a gate the rule is DeltaNet. $\beta$ up to 2 allows negative eigenvalues, $1 - \beta |k|^2 \ge -1$, which a
# state machine needs to track parity. Both are the chunk form as it stands; the template only has to be told what to
# draw. The chunk size is a parameter of the tests already.

# %%
pass_all(replace(gated, name="no gate", gate="none"))
pass_all(replace(gated, name="beta in [0, 2]", beta_max=2.0))

data = draw(gated, 512)
sizes = (8, 16, 32, 64, 128, 256)
truth = token_loop(gated, *data)[0]
errors = [testing.compare(in_chunks(gated, *[x.float() for x in data], size=size)[0], truth) for size in sizes]
work = [2 * (2 * size * K + 2 * size * V + 3 * K * V + size * size / 3) / 1e3 for size in sizes]
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
left.plot(sizes, work, "o-")
left.set(xscale="log", xlabel="chunk size", ylabel="thousand operations a token", ylim=(0, None), title="Work")
right.plot(sizes, [error.relative_l2 for error in errors], "o-")
right.set(xscale="log", xlabel="chunk size", ylabel="relative error, float32", ylim=(0, None), title="Error")
for ax in (left, right):
    ax.set_xticks(sizes, sizes)
    ax.minorticks_off()
plt.show()
for size in sizes:
    check(f"chunks of {size}", in_chunks(gated, *data, size=size)[0], truth, 1e-12)

# %% [markdown]
# ## 3 A decay for every key channel
#
# In Kimi Delta Attention each key channel $d$ of the state has a gate of its own, $g_t \in \mathbb{R}^K$:
#
# $$ S_t = \mathrm{diag}(a_t) S_{t-1} + k_t u_t^\top, \qquad u_t = \beta_t \big(v_t - S_{t-1}^\top \mathrm{diag}(a_t)
# k_t\big) . $$
#
# Unroll it as in notebook 02. Everything that was $\Gamma \circ (X K^\top)$ becomes
#
# $$ \langle x_i, k_j \rangle_{\Gamma} = \sum_d x_{id}\, k_{jd}\, e^{G_{id} - G_{jd}}, \qquad i \ge j, $$
#
# the decay moves *inside* the product, and rows are scaled by vectors: $\gamma \circ K$ reads, $e^{G_C - G} \circ K$
# writes. The gate no longer leaves the inverse (eq. 4.1 needs one number a token), the rest of the structure stays.


# %%
def channel_step(S, q, k, v, g, beta):
    S = g.exp()[:, None] * S
    S = S + torch.outer(k, beta * (v - S.T @ k))
    return S, s * S.T @ q


def pairs(X, K_, G):
    """<x_i, k_j> with decay, [C, C], lower part: exact and slow, C C K exponentials."""
    return torch.einsum("id,jd,ijd->ij", X, K_, masked_exp(G[:, None] - G))


def channel_chunk(S, q, k, v, g, beta, pairs=pairs):
    G = g.cumsum(0)
    gamma, late, b = G.exp(), (G[-1] - G).exp(), beta[:, None]
    lower = b * pairs(k, k, G).tril(-1)
    U = torch.linalg.solve_triangular(
        torch.eye(len(q), dtype=q.dtype) + lower, b * (v - (gamma * k) @ S), upper=False, unitriangular=True
    )
    return gamma[-1][:, None] * S + (late * k).T @ U, s * (gamma * q) @ S + s * pairs(q, k, G).tril() @ U


channel = Rule("a gate per channel", channel_step, channel_chunk, gate="channel")
pass_all(channel)

# one gate on all channels is the old rule
S, q, k, v, g, beta = draw(gated, 128)
wide = g[:, None].expand(-1, K)
by_channel, by_head = in_chunks(channel, S, q, k, v, wide, beta), in_chunks(gated, S, q, k, v, g, beta)
_ = check("equal gates on all channels", by_channel[0], by_head[0], 1e-12)

# %% [markdown]
# Correct, but $C^2 K$ exponentials and no matrix product: useless on Tensor Cores. The tempting factorisation $e^{G_i}
# e^{-G_j}$ is a product of two scaled matrices, and overflows. The way that works: cut the chunk into blocks of 16
# rows, and refer to the first row $r$ of the row block. For $i \ge r > j$ both factors of $e^{G_i - G_r}\, e^{G_r -
# G_j}$ are at most 1. Only the blocks on the diagonal remain elementwise.


# %%
def pairs_factored(X, K_, G):
    """One product, and a factor that overflows."""
    return ((X * G.exp()) @ (K_ * (-G).exp()).T).tril()


def pairs_blocked(X, K_, G, block=16):
    """Products of factors at most 1 below the diagonal blocks; these exactly."""
    rows = []
    for r in range(0, len(X), block):
        here = slice(r, r + block)
        before = (X[here] * (G[here] - G[r]).exp()) @ (K_[:r] * (G[r] - G[:r]).exp()).T
        diagonal = pairs(X[here], K_[here], G[here])
        rows.append(torch.cat([before, diagonal, X.new_zeros(len(diagonal), len(X) - r - len(diagonal))], 1))
    return torch.cat(rows)


wrong = verdicts(replace(channel, chunk=partial(channel_chunk, pairs=pairs_factored)))
print("factored:", [name for name, error in wrong.items() if error])
assert any(wrong.values())
pass_all(replace(channel, name="a gate per channel, blocked", chunk=partial(channel_chunk, pairs=pairs_blocked)))

exponentials = {"exact": lambda C: C * (C + 1) / 2, "blocks of 16": lambda C: C * 17 / 2 + (C / 16) * (C / 2 + 16)}
fig, ax = plt.subplots(figsize=(7, 3))
for name, count in exponentials.items():
    ax.plot((16, 32, 64, 128), [count(C) for C in (16, 32, 64, 128)], "o-", label=name)
ax.set(xlabel="chunk size", ylabel="exponentials a channel", title="Price of a gate per channel", xscale="log")
ax.set_xticks((16, 32, 64, 128), (16, 32, 64, 128))
ax.minorticks_off()
ax.legend()
plt.show()

# %% [markdown]
# ## 4 A kernel for it
#
# Level 1 of [notebook 05](05_forward_kernel.ipynb) is $KK^\top$ of one chunk: load a tile, one product, store. Here it
# is for the blocked form. What changed: the tile's scaled copies are made in shared memory, one product a row block
# ($64 \times 16$, the chunk's rows as its 64), and the diagonal blocks are sums in registers. $G$ comes as a prefix
# sum in powers of two, because the hardware has `exp2`.

# %%
from flashqla.hopper.compile import TARGET, find_nvcc

C, D, BLOCK = 64, 128, 16


def channel_gram():
    """TileLang: k [T, H, D] bf16, G [T, H, D] fp32 -> [T / 64, H, 64, 64] fp32, lower part."""
    import tilelang.language as T

    H, slots = T.dynamic("H, slots")

    @T.prim_func
    def gram(
        k: T.Tensor((slots * C, H, D), "bfloat16"),
        G: T.Tensor((slots * C, H, D), "float32"),
        out: T.Tensor((slots, H, C, C), "float32"),
    ):
        with T.Kernel(slots, H, threads=128) as (i_c, i_h):
            k_shared = T.alloc_shared((C, D), "bfloat16")
            G_shared = T.alloc_shared((C, D), "float32")
            late_shared = T.alloc_shared((C, D), "bfloat16")
            early_shared = T.alloc_shared((BLOCK, D), "bfloat16")
            out_shared = T.alloc_shared((C, C), "float32")
            product = T.alloc_fragment((C, BLOCK), "float32")
            total = T.alloc_local((1,), "float32")
            thread = T.get_thread_binding()
            T.copy(k[i_c * C : i_c * C + C, i_h, 0:D], k_shared)
            T.copy(G[i_c * C : i_c * C + C, i_h, 0:D], G_shared)
            for i, j in T.Parallel(C, C):
                out_shared[i, j] = 0.0
            for block in T.serial(1, C // BLOCK):
                r = block * BLOCK
                for j, d in T.Parallel(C, D):
                    late_shared[j, d] = k_shared[j, d] * T.exp2(T.min(G_shared[r, d] - G_shared[j, d], 0.0))
                for i, d in T.Parallel(BLOCK, D):
                    early_shared[i, d] = k_shared[r + i, d] * T.exp2(G_shared[r + i, d] - G_shared[r, d])
                T.gemm(late_shared, early_shared, product, transpose_B=True, clear_accum=True)
                for j, i in T.Parallel(C, BLOCK):
                    out_shared[r + i, j] = T.if_then_else(j < r, product[j, i], 0.0)
            for e in T.serial(C * BLOCK // 128):
                i = (e * 128 + thread) // BLOCK
                j = i // BLOCK * BLOCK + (e * 128 + thread) % BLOCK
                if j <= i:
                    total[0] = 0.0
                    for d in T.serial(D):
                        total[0] += k_shared[i, d] * k_shared[j, d] * T.exp2(G_shared[i, d] - G_shared[j, d])
                    out_shared[i, j] = total[0]
            T.copy(out_shared, out[i_c, i_h, 0:C, 0:C])

    return gram


if find_nvcc() is None and not cfg.hopper:
    print("skipped: needs nvcc")
else:
    os.environ["TILELANG_PRINT_ON_COMPILATION"] = "0"
    warnings.filterwarnings("ignore", message="IProgress")  # of a progress bar that is not used
    import tilelang

    options = {tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True}
    kernel = tilelang.compile(channel_gram(), target=TARGET, execution_backend="tvm_ffi", pass_configs=options)
    source = kernel.get_kernel_source()
    print(
        f"compiled for sm_90a: {len(source.splitlines())} lines of CUDA, {source.count('wgmma_ss<')} wgmma call sites"
    )

# %% [markdown]
# On a Hopper GPU it runs, against the exact pairs in float64. Elsewhere the same steps in torch, with the operands
# rounded where the kernel rounds them:


# %%
def rounded_like_kernel(k, G):
    """pairs_blocked with bf16 operands and float32 sums."""
    rows, out = k.bfloat16().float(), k.new_zeros(len(k), len(k), dtype=torch.float32)
    for r in range(0, len(k), BLOCK):
        early = (rows[r : r + BLOCK] * (G[r : r + BLOCK] - G[r]).exp()).bfloat16().float()
        late = (rows[:r] * (G[r] - G[:r]).exp()).bfloat16().float()
        out[r : r + BLOCK, :r] = early @ late.T
        out[r : r + BLOCK, r : r + BLOCK] = pairs(rows[r : r + BLOCK], rows[r : r + BLOCK], G[r : r + BLOCK])
    return out


generator = torch.Generator().manual_seed(0)
k = torch.nn.functional.normalize(torch.randn(C, D, generator=generator), dim=-1).bfloat16()
for gate in (0.05, 1.0, 20.0):
    G = (-gate * torch.rand(C, D, generator=generator)).cumsum(0)
    exact = pairs(k.double(), k.double(), G).tril()
    check(f"kernel's rounding, gates down to -{gate}", rounded_like_kernel(k, G.float()), exact, 5e-3)
if cfg.needs_hopper():
    chunks, heads = 64, 16
    k = torch.nn.functional.normalize(torch.randn(chunks * C, heads, D, device="cuda"), dim=-1).bfloat16()
    g = -0.2 * torch.rand(chunks, C, heads, D, device="cuda")
    G = (g.cumsum(1) * 1.4426950408889634).flatten(0, 1).float()
    out = torch.full((chunks, heads, C, C), float("nan"), device="cuda", dtype=torch.float32)
    kernel(k, G, out)
    rows = k[:C, 3].double().cpu()
    check("kernel on the GPU", out[0, 3].cpu(), pairs(rows, rows, g[0, :, 3].double().cpu().cumsum(0)).tril(), 5e-3)

# %% [markdown]
# ## 5 From prototype to package
#
# 1. The token loop goes to `flashqla/reference/recurrent.py`, the chunk form beside `chunked.py`. Autograd of the loop
#    is the oracle; the backward by hand comes after (notebook 06).
# 2. The generated tests become a test file; add packed sequences, grouped heads, empty sequences.
# 3. Start from the level that is nearest (notebook 05), check it against float64 on NaN-filled memory, only then make
#    it fast.
# 4. Whatever the change does to precision, show it: an error against float64 next to that of the same steps in torch.
#
# ## Exercises
#
# 1. Let the decay come *after* the write: $S_t = a_t (S_{t-1} + k_t u_t^\top)$ with $u_t = \beta_t(v_t - S_{t-1}^\top
#    k_t)$, output from the undecayed state. Change step and chunk until the generated tests pass.

# %% jupyter={"source_hidden": true}
# Solution 1: token t sees the gates of the tokens before it only, so shift them by one


def late_step(S, q, k, v, g, beta):
    S = S + torch.outer(k, beta * (v - S.T @ k))
    return g.exp() * S, s * S.T @ q


def late_chunk(S, q, k, v, g, beta):
    shifted = torch.cat([torch.zeros_like(g[:1]), g[:-1]])
    S, o = delta_chunk(S, q, k, v, shifted, beta)
    return g[-1].exp() * S, o


pass_all(Rule("decay after the write", late_step, late_chunk))
assert any(verdicts(Rule("unchanged chunk form", late_step, delta_chunk)).values())

# %% [markdown]
# 2. DeltaProduct writes twice a token, with two keys and values, and reads once. Express it by the library's function
#    without changing any code.

# %% jupyter={"source_hidden": true}
# Solution 2: two tokens for each; the first one's output is not used, the second one does not decay
S, q, k, v, g, beta = draw(gated, 60)
_, _, k_2, v_2, _, beta_2 = draw(gated, 60, seed=5)
state, expected = S, []
for t in range(60):
    state = g[t].exp() * state
    state = state + torch.outer(k[t], beta[t] * (v[t] - state.T @ k[t]))
    state = state + torch.outer(k_2[t], beta_2[t] * (v_2[t] - state.T @ k_2[t]))
    expected.append(s * state.T @ q[t])
double = [torch.stack(pair, 1).flatten(0, 1) for pair in ((q, q), (k, k_2), (v, v_2), (g, 0 * g), (beta, beta_2))]
_ = check("exercise 2", by_library(S, *double)[0][1::2], torch.stack(expected), 1e-12)

# %% [markdown]
# 3. `pairs_blocked` takes 16. What happens with blocks of 64, and why does the kernel not use blocks of 8?

# %% jupyter={"source_hidden": true}
# Solution 3: one block of 64 is the exact form, 64 * 65 / 2 exponentials a channel and no product. Blocks of 8 would
# halve the elementwise part, but a product has at least N = 8 columns and TileLang's tiles want multiples of 16.
S, q, k, v, g, beta = draw(channel, 64)
for block in (8, 16, 64):
    _ = check(
        f"exercise 3, blocks of {block}", pairs_blocked(q, k, g.cumsum(0), block), pairs(q, k, g.cumsum(0)), 1e-12
    )

# %% [markdown]
# Next: [09 Performance](09_performance.ipynb).
