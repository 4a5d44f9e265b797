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
# # 07 Context parallel: one sequence on many SMs
#
# A chain of states is sequential: chunk by chunk, one streaming multiprocessor (SM) works on it, and a GPU has 132.
# With 64 value heads and several sequences there are chains enough. With 8 heads, as on one of eight GPUs of a
# tensor-parallel model, and one long sequence, most of the machine idles. This notebook cuts the sequence into
# *segments* that run side by side, without changing the result, shows what a strong gate saves, and draws which SM
# does what.

# %%
import math

import matplotlib.pyplot as plt
import torch

import flashqla
from flashqla import reference, testing
from flashqla.nn import GatedDeltaNet
from flashqla.plan import Plan
from flashqla.reference.chunked import cut
from flashqla.reference.layout import Layout
from flashqla.reference.split import segment, segment_maps, segment_starts
from flashqla.testing import check

plt.style.use("./flashqla.mplstyle")
torch.set_default_dtype(torch.float64)

cfg = testing.notebook_config()
C, D, T = 64, 32, 16 * 64  # 16 chunks
sizes = dict(tokens=T, heads=1, value_heads=1, head_dim_k=D, head_dim_v=D, dtype=torch.float64)
made = testing.inputs(**sizes)
made.g = 2 * testing.inputs(**sizes, seed=3).g - 0.002
library = reference.chunked(**made.arguments(), output_final_state=True)
layout = Layout.of(made.q, None, C)
x = cut(layout, made.q, made.k, made.v, made.g, made.beta, None)
S_0 = made.initial_state[0, 0]

# %% [markdown]
# ## 1 A chunk is an affine map of the state
#
# Put equation 3.4 into 3.6, as for eq. 4.3, and collect what multiplies $S$. With $A_b = A\,\mathrm{diag}(\beta)$, a
# chunk does
#
# $$ S' = M_c S + N_c, \qquad M_c = \gamma_C (I - K^\top A_b K), \qquad N_c = K^\top A_b\,\mathrm{diag}(\gamma_C /
# \gamma)\, V \qquad \text{(eq. 7.1, 7.2)} . $$
#
# Neither $M_c$ nor $N_c$ contains the state. Affine maps compose: $M_2(M_1 S + N_1) + N_2 = (M_2 M_1) S + (M_2 N_1 +
# N_2)$. So any run of chunks has a map that can be made *before* the state at its start is known.


# %%
def chunk_map(x, i):
    """M and N of chunk i (eq. 7.2)."""
    writer = x.k[i].T @ x.inverse[i] @ torch.diag(x.beta[i, :, 0])  # X of eq. 4.2
    carry = x.carry[i, 0, 0]
    return carry * (torch.eye(D) - writer @ x.k[i]), writer @ (x.decay[i, -1, :, None] * x.v[i])


def compose(first, second):
    return second[0] @ first[0], second[0] @ first[1] + second[1]


S, whole = S_0, (torch.eye(D), torch.zeros(D, D))
states = [S_0]
for i in range(T // C):
    M, N = chunk_map(x, i)
    S, whole = M @ S + N, compose(whole, (M, N))
    states.append(S)
check("eq. 7.2: chunk by chunk", S, library.final_state[0, 0], 1e-12)
_ = check("eq. 7.1: all chunks at once", whole[0] @ S_0 + whole[1], library.final_state[0, 0], 1e-12)

# %% [markdown]
# No new kernel is needed to make them. Columns of a state do not mix, so the ordinary chain, started from $[I,\, 0]$
# with values $[0,\, V]$, ends in $[M,\, N]$: the same loop on $K + V$ columns.

# %%
wide = torch.cat([torch.eye(D), torch.zeros(D, D)], 1)[None, None]
values = torch.cat([torch.zeros_like(made.v), made.v], -1)
twice = reference.chunked(made.q, made.k, values, made.g, made.beta, initial_state=wide, output_final_state=True)
M, N = twice.final_state[0, 0].split(D, dim=1)
check("eq. 7.2: M by the ordinary chain", M, whole[0], 1e-11)
_ = check("eq. 7.2: N by the ordinary chain", N, whole[1], 1e-12)

# %% [markdown]
# ## 2 Segments and a scan
#
# Cut the 16 chunks into 4 segments of 4. All maps at once, on different SMs; then
#
# $$ S_{\text{start}}(i+1) = N_i + M_i\, S_{\text{start}}(i) \qquad \text{(eq. 7.3)} $$
#
# along the segments: one small product each, the only thing left in sequence. Then each segment is a sequence of its
# own with a known initial state, and the forward of notebook 02 does the rest, again all at once.

# %%
segments, scan = segment(layout, 4)
pieces = cut(segments, made.q, made.k, made.v, made.g, made.beta, None)
transition, offset = segment_maps(segments, pieces, None)
mine, library_starts = S_0, segment_starts(scan, transition, offset, made.initial_state.clone())
for i in range(4):
    check(f"eq. 7.3: state at the start of segment {i}", mine, states[4 * i], 1e-12)
    check(f"eq. 7.3: the library's, segment {i}", library_starts[i, 0], mine, 1e-12)
    mine = offset[i, 0] + transition[i, 0] @ mine
split = reference.split(**made.arguments(), output_final_state=True, segment_chunks=4)
check("split against one chain: output", split.output, library.output, 1e-12)
_ = check("split against one chain: state", split.final_state, library.final_state, 1e-12)

# %% [markdown]
# ## 3 How much of the past gets through
#
# The price of segments is the first pass: $K + V$ columns through every chunk, twice the work of the chain. But is it
# needed? $M$ says how much of the state at a segment's start is left at its end. One token's matrix is $a_t (I -
# \beta_t k_t k_t^\top)$, and for $|k| \le 1$, $0 \le \beta \le 2$ the bracket never lengthens a vector: its
# eigenvalues are 1 and $1 - \beta |k|^2 \in [-1, 1]$. Norms of products are at most products of norms, so
#
# $$ \|M\| \;\le\; \prod_t a_t = \exp\Big(\sum_t g_t\Big) . $$
#
# The gate alone bounds it, and $\sum g$ is known before anything is computed.

# %%
fig, ax = plt.subplots(figsize=(8, 3.4))
chunk_numbers = list(range(1, T // C + 1))
for color, gate in enumerate((0.0, -0.005, -0.02, -0.08)):
    same = testing.inputs(**sizes, gate=gate)
    decaying = cut(layout, same.q, same.k, same.v, same.g, same.beta, None)
    M, norms = torch.eye(D), []
    for i in range(T // C):
        M = chunk_map(decaying, i)[0] @ M
        norms.append(float(torch.linalg.matrix_norm(M, 2)))
    bounds = [math.exp(gate * C * n) for n in chunk_numbers]
    assert all(norm <= bound * (1 + 1e-9) for norm, bound in zip(norms, bounds, strict=True))
    ax.plot(chunk_numbers, norms, "o-", color=f"C{color}", label=f"g = {gate}", markersize=3.5)
    ax.plot(chunk_numbers, bounds, ":", color=f"C{color}")
ax.set(yscale="log", ylim=(1e-16, 3), xlabel="chunks", ylabel="spectral norm of M")
ax.set(title="What is left of a state after n chunks (dotted: the bound from the gates alone)")
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# Overwriting helps on top of the gate: even with $g = 0$ new keys replace what was stored, but how much depends on the
# keys, which nobody bounds beforehand.
#
# ## 4 Warm-up
#
# So for a decaying head: start the chain from 0 only $w$ chunks before a segment's end, and drop $M$. What comes out
# is $N_w$; the truth is $M_w S_w + N_w$, with $S_w$ the state $w$ chunks before. With $\theta'$ the log decay of the
# $w$ chunks,
#
# $$ \|S_{\text{end}} - N_w\| \;=\; \|M_w S_w\| \;\le\; e^{\theta'} \|S_w\| \qquad \text{(eq. 7.4)} . $$
#
# Take the smallest $w$ with $\theta' < \theta$. $\theta = -8$ means $3.4 \cdot 10^{-4}$, a sixth of what one rounding
# to bf16 can cost. Errors of different boundaries do not add up, as no $N_w$ contains a state.

# %%
gate = -0.02
same = testing.inputs(**sizes, gate=gate)
exact = reference.chunked(**same.arguments(), output_final_state=True).final_state[0, 0]
errors, bounds = [], []
for w in range(1, T // C + 1):
    tail = {name: getattr(same, name)[:, T - w * C :] for name in testing.PER_TOKEN}
    warm = reference.chunked(**tail, output_final_state=True).final_state[0, 0]
    head = {name: getattr(same, name)[:, : T - w * C] for name in testing.PER_TOKEN}
    before = dict(initial_state=same.initial_state, output_final_state=True)
    S_w = S_0 if w == T // C else reference.chunked(**head, **before).final_state[0, 0]
    errors.append(float(torch.linalg.matrix_norm(exact - warm, 2)))
    bounds.append(math.exp(gate * C * w) * float(torch.linalg.matrix_norm(S_w, 2)))
assert all(error <= bound * (1 + 1e-9) for error, bound in zip(errors, bounds, strict=True))

fig, ax = plt.subplots(figsize=(8, 3.2))
ax.plot(chunk_numbers, bounds, "o:", color="0.5", label="bound, eq. 7.4", markersize=3.5)
ax.plot(chunk_numbers, errors, "o-", label="error of the state", markersize=3.5)
ax.axhline(2.0**-9 * float(torch.linalg.matrix_norm(exact, 2)), color="C1", linestyle="--", label="one bf16 rounding")
w_needed = math.floor(-8 / (gate * C)) + 1
ax.axvline(w_needed, color="C2")
ax.annotate(" θ = -8", (w_needed, 0.9), xycoords=("data", "axes fraction"), color="C2")
ax.set(yscale="log", xlabel="warm-up w, in chunks", ylabel="spectral norm", title=f"Starting from 0, g = {gate}")
ax.legend()
plt.show()
approximate = reference.split(**same.arguments(), output_final_state=True, segment_chunks=8, threshold=-8.0)
full = reference.chunked(**same.arguments(), output_final_state=True)
check("eq. 7.4: output with θ = -8", approximate.output, full.output, math.exp(-8))
mild = testing.inputs(**sizes, gate=-0.001)  # a gate too weak for any warm-up: the library keeps M, exactly
kept = reference.split(**mild.arguments(), segment_chunks=8, threshold=-8.0).output
_ = check("eq. 7.4: weak gates stay exact", kept, reference.chunked(**mild.arguments()).output, 1e-12)

# %% [markdown]
# How many chunks do real gates need? A layer starts with `g = -exp(A_log) softplus(raw + dt_bias)` (eq. 2.3), its two
# parameters drawn as in Mamba-2. Below, the heads of 100 fresh layers, fed with normal activations. A trained model has
# its own distribution; the library decides per head and per call from the gates it gets.

# %%
torch.manual_seed(0)
layers = [GatedDeltaNet(64, 16, head_dim_k=8, head_dim_v=8) for _ in range(100)]
A_log = torch.stack([layer.A_log for layer in layers]).detach().flatten()
dt_bias = torch.stack([layer.dt_bias for layer in layers]).detach().flatten()
per_token = reference.gate(0.5 * torch.randn(256, len(A_log)), A_log, dt_bias).mean(0)
needed = (torch.ceil(8 / (-per_token * C))).clamp(max=1e4).sort().values
fig, ax = plt.subplots(figsize=(8, 3))
share = torch.arange(1, len(needed) + 1) / len(needed)
ax.plot(needed, 100 * share)
for name, chunks in {"2K tokens": 32, "8K": 128, "32K": 512}.items():
    ax.axvline(chunks, color="0.7", linestyle=":")
    ax.annotate(name, (chunks, 3), rotation=90, xytext=(3, 0), textcoords="offset points", fontsize=8, color="0.4")
ax.set(xscale="log", xlabel="warm-up chunks needed for θ = -8", ylabel="% of the heads", title="Heads of fresh layers")
plt.show()

# %% [markdown]
# ## 5 Backward
#
# The adjoint of an affine map needs no new matrix: $dS_{\text{start}} = M^\top dS_{\text{end}} + N'$ (eq. 7.5), with
# $N'$ what a segment's own outputs send to its start. The scan runs from the last segment to the first, and the
# warm-up from a segment's *start*.

# %%
one = reference.backward(**made.arguments(), do=made.do, dht=made.dht)
cut_up = reference.split_backward(**made.arguments(), do=made.do, dht=made.dht, segment_chunks=4)
for name, gradient in zip(one._fields, cut_up, strict=True):
    check(f"eq. 7.5: {name}", gradient, getattr(one, name), 1e-10)

# %% [markdown]
# ## 6 Which SM does what
#
# Three calls, with the heads of Qwen3.5-like layers: on one of eight GPUs, on one GPU alone, and a very long sequence.
# The library's `Plan` knows their chains. One SM carries a block of 64 state columns of a chain; time is counted in
# chunk steps of such a block. Blocks go to SMs as these become free, which is what the GPU does. In $p$ segments there
# are two rounds: first the maps, on $K + V$ columns instead of $V$, or a warm-up of $w$ chunks on $V$ columns, for all
# segments but the last; then all segments.

# %%
BLOCK = 64  # state columns of one block


def list_schedule(count, duration, sms):
    """(SM, start) of each of `count` equal blocks, each on the SM that is free first, and the end."""
    return [(i % sms, i // sms * duration) for i in range(count)], math.ceil(count / sms) * duration


def timeline(plan, p=1, warm=None):
    """Boxes (phase, SM, start, duration) and the end of a dense plan in p segments: exact maps, or `warm` chunks."""
    chunks = math.ceil(plan.max_seqlen / plan.chunk_size / p)
    blocks = plan.chains * plan.head_dim_v // BLOCK
    boxes, end = [], 0.0
    if p > 1:
        phase = "maps" if warm is None else "warm-up"
        steps = chunks * (1 + plan.head_dim_k / plan.head_dim_v) if warm is None else min(warm, chunks)
        placed, end = list_schedule(blocks * (p - 1), steps, plan.sm_count)
        boxes += [(phase, sm, start, steps) for sm, start in placed]
    placed, last = list_schedule(blocks * p, chunks, plan.sm_count)
    boxes += [("chain", sm, end + start, chunks) for sm, start in placed]
    return boxes, end + last


def best(plan, warm=None):
    """The fewest segments whose end is within 3 % of the earliest."""
    chunks = math.ceil(plan.max_seqlen / plan.chunk_size)
    ends = {p: timeline(plan, p, warm)[1] for p in range(1, min(33, chunks + 1))}
    return min(p for p, end in ends.items() if end <= 1.03 * min(ends.values()))


calls = {
    "TP8: 2/8 heads, 32K": Plan.build((1, 32768, 2, 128), (1, 32768, 8, 128)),
    "TP1: 16/64 heads, 32K": Plan.build((1, 32768, 16, 128), (1, 32768, 64, 128)),
    "TP8: 2/8 heads, 256K": Plan.build((1, 262144, 2, 128), (1, 262144, 8, 128)),
}
COLORS = {"chain": "C0", "maps": "C1", "warm-up": "C2"}
fig, axes = plt.subplots(3, 3, figsize=(10, 7), sharex="row", sharey=True)
for row, (name, plan) in zip(axes, calls.items(), strict=True):
    choices = {"one chain": (1, None), "exact maps": (best(plan), None), "warm-up of 16 chunks": (best(plan, 16), 16)}
    for ax, (choice, (p, warm)) in zip(row, choices.items(), strict=True):
        boxes, end = timeline(plan, p, warm)
        phases, sms, starts, widths = zip(*boxes, strict=True)
        colors = [COLORS[phase] for phase in phases]
        ax.barh(sms, widths, left=starts, height=1.0, color=colors, linewidth=0, antialiased=False)
        busy = sum(box[3] for box in boxes) / (end * plan.sm_count)
        ax.set_title(f"{choice}, p = {p}\n{end:,.0f} steps, SMs {100 * busy:.0f} % busy", fontsize=9)
        ax.grid(False)
    row[0].set_ylabel(f"{name}\nSM", fontsize=9)
for ax in axes[-1]:
    ax.set_xlabel("chunk steps")
axes[0, 0].set_ylim(-1, 132)
handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
fig.legend(handles, list(COLORS), loc="outside lower center", ncols=3)
plt.show()

# %% [markdown]
# - **TP8**: 8 chains of two blocks use 16 of 132 SMs. Segments fill the machine.
# - **TP1**: 64 chains fill 128 SMs already. Segments only add work; the best number is 1.
# - **256K**: the same picture as TP8, eight times as long, and next to it a warm-up costs nothing.
#
# ## 7 When to switch it on
#
# In this model, with $n$ chunks, $p$ segments, $b$ blocks and $m$ SMs, the end is $\lceil bp/m \rceil\, n/p$ steps
# plus the first round. Over $p$ (dotted: one chain):

# %%
fig, axes = plt.subplots(1, 3, figsize=(10, 3.1))
for ax, (name, plan) in zip(axes, calls.items(), strict=True):
    numbers = range(1, 33)
    for warm, label in ((None, "exact maps"), (16, "warm-up of 16 chunks")):
        ax.plot(numbers, [timeline(plan, p, warm)[1] for p in numbers], ".-", label=label)
    ax.set(title=name, xlabel="segments", ylim=(0, None))
    ax.axhline(timeline(plan)[1], color="0.5", linestyle=":")
axes[0].set_ylabel("chunk steps")
axes[0].legend(fontsize=8)
plt.show()
for name, plan in calls.items():
    one, exact, warm = timeline(plan)[1], best(plan), best(plan, 16)
    speed = one / timeline(plan, exact)[1], one / timeline(plan, warm, 16)[1]
    faster = f"exact maps: {speed[0]:.1f} times as fast, p = {exact}; warm-up: {speed[1]:.1f}, p = {warm}"
    print(f"{name:22} one chain {one:5,.0f} steps; {faster}")
tp8, tp1 = list(calls.values())[:2]
assert timeline(tp8, best(tp8))[1] < timeline(tp8)[1] / 2 and best(tp1) == best(tp1, 16) == 1

# %% [markdown]
# The sawtooth is the last wave: with one segment more than fits, some SMs have two and the others wait. Two segments
# with exact maps are *worse* than one chain, since the maps alone take as long as the chain that they save.
#
# So: on when chains leave SMs idle and a segment is much longer than its first round; off otherwise. It is a question
# of shapes, and the host knows the shapes. Whether a warm-up is allowed is a question of the gates, which only the
# device knows; a head whose gates are too weak gets its exact map. What the library's own plan says of TP8:

# %%
print(tp8.explain())
if getattr(tp8, "segment_chunks", 0):
    print(f"\nthis plan cuts segments of {tp8.segment_chunks} chunks")
else:
    print("\nthis plan does not cut sequences")

# %% [markdown]
# ## 8 By hand, with the public function
#
# Warm-up needs no new kernel at all: segments are packed sequences. One call over the last $w$ chunks of every segment
# but the last gives the states at the boundaries, a second call over all segments starts from them. On a Hopper GPU
# the cell takes 2/8 heads and 32K tokens, and times both ways.

# %%
torch.set_default_dtype(torch.float32)
on_gpu = cfg.device.type == "cuda"
length, p, gate = (32768, 8, -0.02) if on_gpu else (2048, 4, -0.02)
long = testing.inputs(
    tokens=length,
    heads=2,
    value_heads=8 if on_gpu else 4,
    head_dim_k=cfg.head_dim,
    head_dim_v=cfg.head_dim,
    gate=gate,
    dtype=cfg.dtype,
    device=cfg.device,
)
per_token = [getattr(long, name) for name in testing.PER_TOKEN]
w = math.floor(-8 / (gate * C)) + 1
span = length // p
bounds = torch.arange(p + 1, device=cfg.device, dtype=torch.int32) * span
tails = torch.cat([torch.arange((i + 1) * span - w * C, (i + 1) * span, device=cfg.device) for i in range(p - 1)])
tail_bounds = torch.arange(p, device=cfg.device, dtype=torch.int32) * (w * C)


def one_chain():
    return flashqla.chunk_gated_delta_rule(*per_token, initial_state=long.initial_state, output_final_state=True)


def warmed_up():
    warm = [x[:, tails] for x in per_token]
    _, boundary = flashqla.chunk_gated_delta_rule(*warm, cu_seqlens=tail_bounds, output_final_state=True)
    starts = torch.cat([long.initial_state, boundary])
    o, ends = flashqla.chunk_gated_delta_rule(
        *per_token, initial_state=starts, cu_seqlens=bounds, output_final_state=True
    )
    return o, ends[-1:]


(o, S), (o_split, S_split) = one_chain(), warmed_up()
check(f"warm-up by hand, {p} segments, w = {w}: output", o_split, o, 1e-2 if on_gpu else math.exp(-8))
check("warm-up by hand: state", S_split, S, 1e-2 if on_gpu else math.exp(-8))
results = {}
if cfg.needs_hopper():
    for name, function in (("one chain", one_chain), ("warm-up by hand", warmed_up)):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        times = []
        for _ in range(11):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        results[name] = sorted(times)[5]
        print(f"{name:16} {results[name]:.3f} ms")

# %% [markdown]
# ## Exercises
#
# 1. The scan of eq. 7.3 is sequential in the number of segments. Affine maps compose associatively; write it as a
#    parallel prefix scan that takes $\log_2 p$ rounds.

# %% jupyter={"source_hidden": true}
# Solution 1: in round r every segment composes its map with that of the segment 2^r before
maps = [(transition[i, 0], offset[i, 0]) for i in range(4)]
step = 1
while step < len(maps):
    maps = [compose(maps[i - step], maps[i]) if i >= step else maps[i] for i in range(len(maps))]
    step *= 2
for i, (M, N) in enumerate(maps):
    _ = check(f"exercise 1: end of segment {i}", M @ S_0 + N, states[4 * (i + 1)], 1e-12)

# %% [markdown]
# 2. $\beta = 2.5$ breaks the condition of eq. 7.4. Find a key and a state for which a token with $g = 0$ makes the
#    state longer.

# %% jupyter={"source_hidden": true}
# Solution 2: along the key the factor is 1 - 2.5 = -1.5
unit = torch.zeros(D)
unit[0] = 1.0
matrix = torch.eye(D) - 2.5 * torch.outer(unit, unit)
print("length of a unit state before 1, after", float((matrix @ unit).norm()))
assert float((matrix @ unit).norm()) == 1.5

# %% [markdown]
# 3. Several GPUs: each holds a contiguous part of the sequence. What must they send each other, in bytes a head, for
#    exact maps and for a warm-up? How does it compare to sending keys and values of the part, as attention would?

# %% jupyter={"source_hidden": true}
# Solution 3: M [K, K] and N [K, V] in fp32, or N alone
K_real = V_real = 128
part = 32768
print(f"exact maps: {4 * (K_real * K_real + K_real * V_real):>10,} bytes a head")
print(f"warm-up:    {4 * K_real * V_real:>10,} bytes a head")
print(f"K and V:    {2 * part * (K_real + V_real):>10,} bytes a head, for {part:,} tokens")

# %% [markdown]
# Next: [08 Prototype a variant](08_prototype.ipynb), where you change the rule.
