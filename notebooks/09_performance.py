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
# # 09 Performance: limits, measurements, and where we are slower
#
# Every number in this notebook comes from one of two sources: counts made by code that runs the formulas, and
# measurements on an NVIDIA H200 that are committed as JSON in [results/h200](results/h200). Nothing is typed in, and
# no row is left out.

# %%
import itertools
import json
import pathlib
import time

import matplotlib.pyplot as plt
import torch
from torch.utils.flop_counter import FlopCounterMode

import flashqla
from flashqla import reference, testing
from flashqla.bench_peers import BYTES_PER_MS, FLOPS_PER_MS, Row
from flashqla.plan import Plan
from flashqla.testing import check

plt.style.use("./flashqla.mplstyle")
cfg = testing.notebook_config()
C, D = 64, 128

runs = [json.loads(path.read_text()) for path in sorted(pathlib.Path("results/h200").glob("bench*.json"))]
runs = [run for run in runs if "pass" in run["rows"][0]]  # not those of decoding
measured = [row | {"env": run["env"]} for run in runs for row in run["rows"] if row.get("time_ms")]
for run in runs:
    env = run["env"]
    print(
        f"{env['gpu']}, driver {env['driver']}, {env['date'][:10]}, flashqla {env['commit']}: {len(run['rows'])} rows"
    )
forward = [row for row in measured if row["pass"] == "forward" and "flashqla" in row["time_ms"]]
COLORS = {"flashqla": "C0", "flashinfer": "C1", "flash_qla": "C2", "fla": "C3"}

# %% [markdown]
# ## 1 Right first
#
# A time counts only if the result was right. Each contender was held against float64 on the very inputs that were
# timed.

# %%
contenders = [name for name in COLORS if any(name in row["error"] for row in forward)]
largest = max(found["o"] for row in forward for found in row["error"].values())
fig, ax = plt.subplots(figsize=(8, 2.2))
for name in contenders:
    errors = [row["error"][name]["o"] for row in forward if name in row["error"]]
    ax.plot(errors, [name] * len(errors), "o", alpha=0.4, color=COLORS[name])
    print(f"{name:12} relative error of the output: {min(errors):.1e} to {max(errors):.1e}, {len(errors)} rows")
    assert max(errors) < 1e-2
ax.margins(y=0.3)
ax.set(xlabel="relative error of the output against float64", title="Errors of the timed results")
ax.set_xlim(0, 1.05 * largest)
plt.show()

# %% [markdown]
# ## 2 The count
#
# The forward that the kernels compute (notebook 03, version D; eq. 8.2 to 8.6), one chunk of one value head. PyTorch's
# own counter counts the products of the code below while it runs; loads and stores note their bytes. With $R$ value
# heads a key head, $Q$ and $K$ are shared by $R$, from L2 at least.


# %%
def forward_chunk(K, Q, V, A, S, move, shared):
    """The products of a chunk, and what crosses memory; gates aside (8 bytes a row). The state stays on the chip."""
    K, Q = move(K, 1 / shared), move(Q, 1 / shared)
    W = move(V) - K @ S  # eq. 8.3
    U = move(A) @ W  # eq. 8.4
    O = Q @ S + (Q @ K.T).tril() @ U  # eq. 8.5
    return move(O), S + K.T @ U  # eq. 8.6


def inverse_chunk(K, A, move, shared):
    """K K^T is made once for the heads that share K; the inverse's own products are under 2 %."""
    K = move(K, 1 / shared)
    K @ K.T
    return move(A)


def count(function, *shapes, shared):
    """(operations, bytes) of one chunk and value head."""
    moved = []

    def move(x, share=1.0):
        moved.append(2 * x.numel() * share)
        return x

    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    with FlopCounterMode(display=False) as counter:
        function(*tensors, move, shared)
    return counter.get_total_flops(), sum(moved)


def call_count(shared):
    """Both launches: operations and bytes a chunk and value head."""
    flops, traffic = count(forward_chunk, (C, D), (C, D), (C, D), (C, C), (D, D), shared=shared)
    gram, written = count(inverse_chunk, (C, D), (C, C), shared=shared)
    gates = C * (8 + 2 * 8)  # g and beta read; summed gates and key scales written and read again
    return flops + gram / shared, traffic + written + gates


for shared in (1, 2, 4):
    flops, traffic = call_count(shared)
    products = 3 * 2 * C * D * D + 2 * C * C * D * (3 + 1 / shared)
    tiles = 2 * (2 * C * D + 2 * C * C) + 2 * 3 * C * D / shared + 24 * C
    check(f"operations, R = {shared}", torch.tensor(flops), torch.tensor(products), 1e-6)
    check(f"bytes, R = {shared}", torch.tensor(traffic), torch.tensor(tiles), 1e-6)
    intensity = f"{flops / traffic:.0f} operations a byte"
    print(f"    R = {shared}: {flops / 1e6:.1f} million operations, {traffic / 1024:.0f} KiB, {intensity}")

# %% [markdown]
# ## 3 The roofline
#
# A GPU computes at most $\pi$ operations and moves at most $b$ bytes a second. A computation with $I$ operations a
# byte runs at $\min(\pi, I b)$ at best. The library's benchmark uses what one H200 was *measured* to reach, printed
# below (the data sheet has more).

# %%
peak, bandwidth = FLOPS_PER_MS * 1e3, BYTES_PER_MS * 1e3
print(
    f"measured ceilings: {peak / 1e12:.0f} T operations/s, {bandwidth / 1e12:.1f} TB/s; ridge at {peak / bandwidth:.0f}"
)


def work(row):
    """Operations and bytes of a measured row, from the count."""
    chunks = sum(-(-length // C) for length in row["seqlens"]) * row["hv"]
    flops, traffic = call_count(row["hv"] // row["hk"])
    states = 2 * 4 * D * D * len(row["seqlens"]) * row["hv"]  # read and written once, fp32
    return flops * chunks, traffic * chunks + states


intensities = torch.logspace(1.6, 2.8, 100)
fig, ax = plt.subplots(figsize=(8, 4))
ax.plot(intensities, (intensities * bandwidth).clamp(max=peak) / 1e12, color="0.3")
for name in contenders:
    points = [(work(row), row["time_ms"][name]) for row in forward if name in row["time_ms"]]
    ax.plot(
        [flops / traffic for (flops, traffic), _ in points],
        [flops / ms / 1e9 for (flops, _), ms in points],
        "o",
        color=COLORS[name],
        alpha=0.6,
        label=name,
    )
ax.axvline(peak / bandwidth, color="0.7", linestyle=":")
ax.annotate(" ridge", (peak / bandwidth, 29), color="0.4")
ax.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="T operations/s (useful ones)")
ax.set(title="Forward on the H200: every committed row", ylim=(20, 1200))
ax.set_xticks([50, 100, 200, 400], ["50", "100", "200", "400"])
ax.set_yticks([25, 50, 100, 200, 400, 800], ["25", "50", "100", "200", "400", "800"])
ax.minorticks_off()
ax.legend(loc="upper left")
plt.show()
best = max((work(row)[0] / row["time_ms"]["flashqla"] / 1e9, row["name"]) for row in forward)
print(f"best row of flashqla: {best[1]}, {best[0]:.0f} T operations/s, {100e12 * best[0] / peak:.0f} % of the ceiling")

# %% [markdown]
# All rows stand left of the ridge: the count says that memory comes first, then Tensor Cores, both within a factor of
# two. Most points hang far below the roof, and for the same intensity at very different heights. So neither ceiling
# explains them. What does is the *chain*: a chunk waits for the chunk before.
#
# ## 4 The ceiling of the chain
#
# A chain runs on one SM, or on two with half the state columns each. An SM's Tensor Cores do 4096 operations a cycle,
# so a chunk cannot take less than its products over that. With $n$ chunks in the longest sequence, time is at least $n$
# such steps, more if there are more blocks than SMs. That holds for whole sequences: where the plan cuts them into
# segments (notebook 07), marked *cut* below, the limit says what one chain would have needed, and a bar may end before.

# %%
SM_CLOCK = 1.98e9  # the clock in the header of the committed runs
assert all(run["env"]["clocks"]["clocks.max.sm"].startswith("1980") for run in runs)
flops_chunk, _ = count(forward_chunk, (C, D), (C, D), (C, D), (C, C), (D, D), shared=1)
print(f"one chunk on one SM: {flops_chunk / 4096:.0f} tensor cycles, {1e6 * flops_chunk / 4096 / SM_CLOCK:.2f} us")


def chain_floor(row):
    """Milliseconds of tensor time on the longest path, V on one SM or halved on two."""
    chains = len(row["seqlens"]) * row["hv"]
    total = sum(-(-length // C) for length in row["seqlens"]) * row["hv"]
    longest = max(-(-length // C) for length in row["seqlens"])
    halves = 2 if 2 * chains <= 132 else 1
    step = (2 * C * C * D + (flops_chunk - 2 * C * C * D) / halves) / 4096  # Q K^T is not halved
    return 1e3 * max(longest, total * halves / 132) * step / SM_CLOCK


def is_cut(row):
    """Whether the package's plan cuts the sequences of this call."""
    shapes = [(1, sum(row["seqlens"]), row[heads], D) for heads in ("hk", "hv")]
    return Plan.build(*shapes, lengths=row["seqlens"] if len(row["seqlens"]) > 1 else None).segment_chunks > 0


rows = sorted(forward, key=lambda row: row["time_ms"]["flashqla"])
fig, ax = plt.subplots(figsize=(9, 4.6))
for index, row in enumerate(rows):
    flops, traffic = work(row)
    floors = {"tensor": 1e3 * flops / peak, "memory": 1e3 * traffic / bandwidth, "chain": chain_floor(row)}
    ax.barh(index, row["time_ms"]["flashqla"], color="C0", alpha=0.25)
    for (_, ms), marker, color in zip(floors.items(), ("|", "|", "|"), ("C3", "C1", "C4"), strict=True):
        ax.plot(ms, index, marker, color=color, markersize=13, markeredgewidth=2.5)
ax.set_yticks(range(len(rows)), [row["name"] + ", cut" * is_cut(row) for row in rows], fontsize=8)
for label, color in (("all Tensor Cores", "C3"), ("memory", "C1"), ("Tensor Cores on the chain", "C4")):
    ax.plot([], [], "|", color=color, markersize=12, markeredgewidth=2.5, label=f"limit: {label}")
ax.barh([0], [0], color="C0", alpha=0.25, label="measured")
ax.set(xscale="log", xlabel="milliseconds", title="flashqla's forward and its three limits")
ax.legend(fontsize=8, loc="lower right")
plt.show()

for kind, cut in (("whole", False), ("cut", True)):
    shares = [100 * chain_floor(row) / row["time_ms"]["flashqla"] for row in rows if is_cut(row) == cut]
    if shares:
        print(
            f"{kind + ' sequences:':17} the chain's limit is {min(shares):.0f} to {max(shares):.0f} % of the measured"
        )

# %% [markdown]
# With few chains the red limit is far right of the other two. It falls only if the chain gets shorter: by splitting
# $V$, or by cutting the sequence. The step itself, from the slope between 8K and 32K tokens; where sequences are cut,
# segments run at the same time, and a chunk may take less than the time of its products:

# %%
by_name = {row["name"]: row for row in forward}
print(f"{'heads':8}{'blocks':>8}{'us a chunk':>12}{'its tensor time':>17}  sequences")
for heads in ("2/8", "8/32", "16/32", "16/64"):
    short, long = (by_name.get(f"{heads} 1x{length}") for length in (8192, 32768))
    if short and long:
        us = 1e3 * (long["time_ms"]["flashqla"] - short["time_ms"]["flashqla"]) / ((32768 - 8192) / C)
        tensor = 1e3 * (chain_floor(long) - chain_floor(short)) / ((32768 - 8192) / C)
        print(f"{heads:8}{2 * long['hv']:8}{us:12.2f}{tensor:17.2f}  {'cut' if is_cut(long) else 'whole'}")

# %% [markdown]
# ## 5 Against the others, and where we are slower
#
# The same inputs, one run, medians of CUDA-graph replays. A dot to the right of 1 means that the other one needs
# longer.

# %%
pairs = [
    (row["time_ms"][peer] / row["time_ms"]["flashqla"], row, peer)
    for row in forward
    for peer in contenders
    if peer != "flashqla" and peer in row["time_ms"]
]
pairs.sort(key=lambda pair: pair[0])
names = list(dict.fromkeys(row["name"] for _, row, _ in pairs))  # the row of the closest race first
fig, ax = plt.subplots(figsize=(9, 0.28 * len(names) + 1))
for peer in sorted({peer for _, _, peer in pairs}):
    mine = [(ratio, names.index(row["name"])) for ratio, row, name in pairs if name == peer]
    ax.plot(*zip(*mine, strict=True), "o", color=COLORS[peer], label=peer)
for index, name in enumerate(names):
    closest = next(ratio for ratio, row, _ in pairs if row["name"] == name)
    ax.text(closest, index, f"{closest:.2f}  ", ha="right", va="center", fontsize=8)
ax.axvspan(0.5, 1, color="C4", alpha=0.12)
ax.set_yticks(range(len(names)), names, fontsize=8)
ax.set(xscale="log", xlim=(0.7, 4), title="Forward (shaded: flashqla is slower)")
ax.set_xlabel("time of the other one / time of flashqla")
ax.set_xticks([0.7, 1, 1.5, 2, 3, 4], ["0.7", "1", "1.5", "2", "3", "4"])
ax.minorticks_off()
ax.axvline(1, color="0.3")
ax.legend(loc="lower right")
plt.show()

slower = [(ratio, row, peer) for ratio, row, peer in pairs if ratio < 1]
for ratio, row, peer in slower:
    plan = Plan.build(
        (1, sum(row["seqlens"]), row["hk"], D), (1, sum(row["seqlens"]), row["hv"], D), lengths=row["seqlens"]
    )
    shape = f"{plan.chains} chains for {plan.sm_count} SMs, longest {max(row['seqlens'])} tokens"
    print(f"slower: {row['name']:14} {1 / ratio:.2f} times the time of {peer}; {shape}")
faster = len(pairs) - len(slower)
print(f"faster in {faster} of {len(pairs)} comparisons, slower in {len(slower)}")

# %% [markdown]
# The hard case is a quick call with about as many chains as SMs: no SM is idle, so cutting does not help, the second
# launch and its tail weigh, and nothing is left to hide them behind. Other passes, if measurements of them are
# committed:

# %%
for direction in ("backward", "step"):
    found = [row for row in measured if row["pass"] == direction]
    if not found:
        print(f"{direction}: nothing committed")
    for row in found:
        times = [f"{name} {ms:.3f} ms" for name, ms in row["time_ms"].items()]
        missing = [] if "flashqla" in row["time_ms"] else ["(flashqla: none)"]
        print(f"{direction} {row['name']:16}", *times, *missing, sep="  ")

# %% [markdown]
# ## 6 Before the first result: cold start
#
# Kernels are compiled once for a machine, at the first call or ahead of time by `python -m flashqla warmup`. The
# committed runs found theirs in the cache on disk, so the first call only loaded them. Peers compile or tune at the
# first call of a shape. And each call costs host time, which a CUDA graph removes.

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2))
for name in contenders:
    seconds = [row["first_call_s"][name] for row in measured if name in row.get("first_call_s", {})]
    left.plot(sorted(seconds, reverse=True), "o-", color=COLORS[name], label=name, markersize=4)
    print(f"{name:12} slowest first call {max(seconds):6.1f} s, those of all rows together {sum(seconds):6.1f} s")
left.set(yscale="log", xlabel="shapes, slowest first", ylabel="seconds", title="First call of a shape")
left.legend(fontsize=8)
host = [(row["time_ms"]["flashqla"] * 1e3, row["host_us"].get("plan reused")) for row in forward if row.get("host_us")]
right.plot(*zip(*host, strict=True), "o")
line = torch.logspace(1.3, 3.1, 10)
right.plot(line, line, color="0.5", linestyle=":", label="host = GPU")
right.set(xscale="log", yscale="log", xlabel="GPU time, us", ylabel="host time of a call, us", title="Host against GPU")
right.legend(fontsize=8)
plt.show()
bound = sum(us > gpu for gpu, us in host)
print(f"in {bound} of {len(host)} rows the host needs longer than the GPU: capture a CUDA graph, or batch more")

# %% [markdown]
# ## 7 Here and now
#
# On a Hopper GPU the next cell times this machine; on a CPU it races the chunk form against the token loop, checking
# first.

# %%
if cfg.needs_hopper():
    made = cfg.inputs(initial_state=False)
    arguments = made.arguments(output_final_state=True)
    o, state = flashqla.chunk_gated_delta_rule(**arguments)
    short = {name: getattr(made, name)[:, :512] for name in testing.PER_TOKEN}
    exact = testing.oracle64(**short)
    check("Hopper kernels against float64", o[:, :512], exact.output, 1e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flashqla.chunk_gated_delta_rule(**arguments)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(21)]
    for event in events:
        event.record()
        graph.replay()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    row = {"seqlens": [cfg.tokens], "hk": cfg.heads, "hv": cfg.value_heads}
    print(f"1x{cfg.tokens} 16/64: {times[10]:.3f} ms, of which the chain's tensor time is {chain_floor(row):.3f} ms")
else:
    made = testing.inputs(tokens=1024, heads=1, value_heads=2)
    seconds = {}
    for name, function in {"token loop": reference.recurrent, "chunk form": reference.chunked}.items():
        function(**made.arguments())
        start = time.perf_counter()
        seconds[name] = (function(**made.arguments()).output, time.perf_counter() - start)
    _ = check("chunk form against the token loop", seconds["chunk form"][0], seconds["token loop"][0], 1e-5)
    print(*(f"{name}: {1e3 * duration:.0f} ms" for name, (_, duration) in seconds.items()), sep="; ")

# %% [markdown]
# ## Exercises
#
# 1. Decoding one token reads and writes the whole state. How many operations a byte is that, what is the least time of
#    a step of $N$ sequences with 64 heads, and from which $N$ on would Tensor Cores matter?

# %% jupyter={"source_hidden": true}
# Solution 1: 3 products of a vector with S (K S, its rank-1 update, Q S), S in fp32 read and written
operations, bytes_moved = 3 * 2 * D * D, 2 * 4 * D * D
print(f"{operations / bytes_moved:.2f} operations a byte: always memory")
for N in (1, 32, 256):
    print(f"N = {N:3}: at least {1e6 * N * 64 * bytes_moved / bandwidth:.0f} us a layer")
_ = check("exercise 1: no N changes the ratio", torch.tensor(operations / bytes_moved), torch.tensor(0.75))

# %% [markdown]
# 2. The inverse is written by one launch and read by the next. Which share of the traffic is that with $R = 4$, and
#    what would the memory limit of 16/64 4x8192 become if one launch did both?

# %% jupyter={"source_hidden": true}
# Solution 2
_, traffic = call_count(4)
share = 2 * 2 * C * C / traffic
row = Row.parse("16/64 4x8192")
chunk_heads = row.chunks * row.value_heads
limit = 1e3 * traffic * chunk_heads / bandwidth
print(f"{100 * share:.0f} % of the traffic; {limit:.3f} ms would become {(1 - share) * limit:.3f} ms")
_ = check("exercise 2: chunk-heads", torch.tensor(float(chunk_heads)), torch.tensor(4 * 128 * 64.0))

# %% [markdown]
# 3. A step of the chain has 2,304 tensor cycles, of which $QK^\top$ is 256. With $V$ split over two SMs, what does a
#    step cost each, and why is that not half?

# %% jupyter={"source_hidden": true}
# Solution 3: Q K^T is made by both, as both need all of P
halved = (flops_chunk - 2 * C * C * D) / 2 / 4096 + 2 * C * C * D / 4096
print(f"{flops_chunk / 4096:.0f} -> {halved:.0f} cycles, {halved * 4096 / flops_chunk:.2f} of it")
_ = check("exercise 3", torch.tensor(halved), torch.tensor(1280.0), 1e-6)

# %% [markdown]
# Next: [10 Training and serving](10_training_and_serving.ipynb).
